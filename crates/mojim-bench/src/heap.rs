//! What `malloc` and `free` in a persistent heap cost, beside allocators of plain memory; and what it
//! takes to open a large heap.
//!
//! Every allocator runs the same requests: a table of live blocks, of which a random one is freed and
//! replaced by one of a random size, whose first word is stored to. The allocators take turns in
//! blocks of operations. The heap is used as a program does, by the functions of libmojim.so.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::cluster::config_text;
use crate::report::print;
use crate::scratch::Scratch;

/// Options of `mojim bench heap`.
#[derive(Debug, Clone)]
pub struct HeapOptions {
    /// JSON lines instead of a table.
    pub json: bool,
    /// Where the files live.
    pub dir: Option<PathBuf>,
    /// Rounds, in each of which every allocator has a turn.
    pub rounds: usize,
    /// Operations of a turn.
    pub ops: usize,
    /// Bytes of the heap that is opened.
    pub open: usize,
}

impl Default for HeapOptions {
    fn default() -> HeapOptions {
        HeapOptions {
            json: false,
            dir: None,
            rounds: 31,
            ops: 200_000,
            open: 1 << 30,
        }
    }
}

/// One figure.
#[derive(Debug, Clone, Serialize)]
pub struct HeapRow {
    /// `heap`.
    pub bench: &'static str,
    /// What was measured.
    pub case: String,
    /// Which allocator.
    pub allocator: String,
    /// Threads at the same time.
    pub threads: usize,
    /// Median, in nanoseconds for a free and a malloc, or in milliseconds for an open.
    pub median: f64,
    /// `ns` or `ms`.
    pub unit: &'static str,
    /// How many times as long as mimalloc took, the median of the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_mimalloc: Option<f64>,
    /// How many times as long as jemalloc took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_jemalloc: Option<f64>,
}

/// The function of this name.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> io::Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a handle of dlopen, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        let what = format!("there is no function {}", name.to_string_lossy());
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    }
    // SAFETY: a pointer to a function of type `F`, as the caller promises, of the same size.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

/// A shared library, which stays.
fn library(name: &Path) -> io::Result<*mut c_void> {
    use std::os::unix::ffi::OsStrExt;
    let path = CString::new(name.as_os_str().as_bytes())?;
    // SAFETY: the name is a C string; what the library does when it is loaded is what any program
    // that is linked with it has it do.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    match handle.is_null() {
        true => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} cannot be loaded", name.display()),
        )),
        false => Ok(handle),
    }
}

type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);

/// The functions of libmojim.so that are used.
#[derive(Clone, Copy)]
struct Mojim {
    attach: unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> *mut c_void,
    detach: unsafe extern "C" fn(*mut c_void) -> c_int,
    open:
        unsafe extern "C" fn(*mut c_void, *const c_char, usize, *mut c_void, c_int) -> *mut c_void,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
    sync: unsafe extern "C" fn(*mut c_void) -> c_int,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void) -> c_int,
    error: unsafe extern "C" fn() -> *const c_char,
}

impl Mojim {
    /// The library beside this program.
    fn load() -> io::Result<Mojim> {
        let exe = std::env::current_exe()?;
        let handle = library(&exe.with_file_name("libmojim.so"))?;
        // SAFETY: these are the types of these functions in mojim.h and mojim_heap.h.
        unsafe {
            Ok(Mojim {
                attach: function(handle, c"mojim_attach")?,
                detach: function(handle, c"mojim_detach")?,
                open: function(handle, c"mojim_heap_open")?,
                close: function(handle, c"mojim_heap_close")?,
                sync: function(handle, c"mojim_heap_sync")?,
                malloc: function(handle, c"mojim_malloc")?,
                free: function(handle, c"mojim_free")?,
                error: function(handle, c"mojim_last_error")?,
            })
        }
    }

    fn failed(&self) -> io::Error {
        // SAFETY: the text is a C string of the calling thread.
        let text = unsafe { CStr::from_ptr((self.error)()) };
        io::Error::other(text.to_string_lossy().into_owned())
    }

    fn check<T: PartialEq>(&self, got: T, failed: T) -> io::Result<T> {
        match got == failed {
            true => Err(self.failed()),
            false => Ok(got),
        }
    }
}

/// An allocator.
#[derive(Clone, Copy)]
enum Allocator {
    Heap(Mojim, usize),
    Plain(Malloc, Free),
}

impl Allocator {
    #[inline(always)]
    fn malloc(self, size: usize) -> *mut u64 {
        // SAFETY: an open heap; a malloc.
        unsafe {
            match self {
                Allocator::Heap(m, h) => (m.malloc)(h as *mut c_void, size).cast(),
                Allocator::Plain(malloc, _) => malloc(size).cast(),
            }
        }
    }

    #[inline(always)]
    fn free(self, p: *mut u64) {
        // SAFETY: a block of this allocator.
        unsafe {
            match self {
                Allocator::Heap(m, _) => drop((m.free)(p.cast())),
                Allocator::Plain(_, free) => free(p.cast()),
            }
        }
    }
}

/// Live blocks of a thread.
const SLOTS: usize = 1024;

/// The requests of a thread: which block, and its next size.
fn requests(mixed: bool, n: usize, seed: u64) -> Vec<(u16, u16)> {
    let mut x = seed;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x >> 11
    };
    let size = |r: u64| match mixed {
        false => 16 + (r % 241) as u16,
        // As many of each doubling.
        true => {
            let low = 16u64 << (r % 10);
            (low + (r >> 8) % low) as u16
        }
    };
    (0..n)
        .map(|_| ((next() % SLOTS as u64) as u16, size(next())))
        .collect()
}

/// A thread's live blocks.
struct Table {
    allocator: Allocator,
    live: Vec<*mut u64>,
}

// SAFETY: blocks may be freed by any thread.
unsafe impl Send for Table {}

impl Table {
    fn new(allocator: Allocator) -> Table {
        let live = (0..SLOTS).map(|_| allocator.malloc(64)).collect();
        Table { allocator, live }
    }

    /// Nanoseconds for each request.
    fn run(&mut self, requests: &[(u16, u16)]) -> io::Result<f64> {
        let begin = Instant::now();
        for &(slot, size) in requests {
            let p = &mut self.live[slot as usize];
            self.allocator.free(*p);
            *p = self.allocator.malloc(size as usize);
            if p.is_null() {
                return Err(io::Error::other("no block"));
            }
            // SAFETY: a block of at least 16 bytes.
            unsafe { **p = u64::from(size) };
        }
        Ok(begin.elapsed().as_nanos() as f64 / requests.len() as f64)
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// One case: every allocator in turn, in each round.
fn case(
    o: &HeapOptions,
    name: &str,
    mixed: bool,
    threads: usize,
    allocators: &[(&str, Allocator)],
) -> io::Result<Vec<HeapRow>> {
    let requests: Vec<_> = (0..threads)
        .map(|t| requests(mixed, o.ops, 88172645463325252 + t as u64))
        .collect();
    let mut tables: Vec<Vec<Table>> = allocators
        .iter()
        .map(|(_, a)| (0..threads).map(|_| Table::new(*a)).collect())
        .collect();
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); allocators.len()];
    for round in 0..=o.rounds {
        for k in 0..allocators.len() {
            let i = (k + round) % allocators.len();
            let work = tables[i].iter_mut().zip(&requests);
            let took: io::Result<Vec<f64>> = std::thread::scope(|s| {
                let all: Vec<_> = work.map(|(t, r)| s.spawn(move || t.run(r))).collect();
                let joined = all
                    .into_iter()
                    .map(|t| t.join().expect("it does not panic"));
                joined.collect()
            });
            // The first round warms up.
            if round > 0 {
                times[i].push(median(took?));
            }
        }
    }
    for t in tables.into_iter().flatten() {
        t.live.iter().for_each(|p| t.allocator.free(*p));
    }
    let to = |i: usize, other: &str| {
        let j = allocators.iter().position(|(n, _)| *n == other)?;
        let ratios = times[i].iter().zip(&times[j]).map(|(a, b)| a / b);
        (i != j).then(|| median(ratios.collect()))
    };
    let rows = allocators
        .iter()
        .enumerate()
        .map(|(i, (allocator, _))| HeapRow {
            bench: "heap",
            case: name.into(),
            allocator: (*allocator).into(),
            threads,
            median: median(times[i].clone()),
            unit: "ns",
            to_mimalloc: to(i, "mimalloc"),
            to_jemalloc: to(i, "jemalloc"),
        });
    Ok(rows.collect())
}

/// Allocators of plain memory that the system has.
fn rivals() -> Vec<(&'static str, Allocator)> {
    let mut all = vec![("glibc", Allocator::Plain(libc::malloc, libc::free))];
    let mut add = |name, file: &str, malloc: &CStr, free: &CStr| {
        let Ok(handle) = library(Path::new(file)) else {
            return;
        };
        // SAFETY: these are the types of these functions.
        let found = unsafe { (function(handle, malloc), function(handle, free)) };
        if let (Ok(malloc), Ok(free)) = found {
            all.push((name, Allocator::Plain(malloc, free)));
        }
    };
    add("mimalloc", "libmimalloc.so.2", c"mi_malloc", c"mi_free");
    add("mimalloc", "libmimalloc.so.3", c"mi_malloc", c"mi_free");
    add("jemalloc", "libjemalloc.so.2", c"malloc", c"free");
    all.dedup_by_key(|(name, _)| *name);
    all
}

/// Milliseconds to open a heap that is full of blocks of 16 bytes.
fn opens(o: &HeapOptions, m: Mojim, volume: *mut c_void) -> io::Result<HeapRow> {
    let open = || {
        // SAFETY: an attached volume.
        let h = unsafe { (m.open)(volume, c"large".as_ptr(), 4 << 30, std::ptr::null_mut(), 0) };
        m.check(h, std::ptr::null_mut())
    };
    let h = open()?;
    let blocks = o.open / 16 * 9 / 10;
    // SAFETY: an open heap.
    unsafe {
        for i in 0..blocks {
            m.check((m.malloc)(h, 16), std::ptr::null_mut())?;
            // Each sync point stays below the log's size.
            if i % 100_000 == 0 {
                m.check((m.sync)(h), -1)?;
            }
        }
        m.check((m.sync)(h), -1)?;
        m.check((m.close)(h), -1)?;
    }
    let mut times = Vec::new();
    for _ in 0..5 {
        let begin = Instant::now();
        let h = open()?;
        times.push(begin.elapsed().as_secs_f64() * 1000.0);
        // SAFETY: an open heap.
        m.check(unsafe { (m.close)(h) }, -1)?;
    }
    Ok(HeapRow {
        bench: "heap",
        case: format!("open {} MiB of 16-byte blocks", o.open >> 20),
        allocator: "mojim".into(),
        threads: 1,
        median: median(times),
        unit: "ms",
        to_mimalloc: None,
        to_jemalloc: None,
    })
}

fn table(rows: &[HeapRow], out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<34}{:>8}  {:<10}{:>10}  {:>12}{:>12}",
        "case", "threads", "allocator", "median", "to mimalloc", "to jemalloc"
    )?;
    for r in rows {
        let ratio = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.2}"));
        let mut time = String::new();
        let _ = write!(time, "{:.1} {}", r.median, r.unit);
        writeln!(
            out,
            "{:<34}{:>8}  {:<10}{:>10}  {:>12}{:>12}",
            r.case,
            r.threads,
            r.allocator,
            time,
            ratio(r.to_mimalloc),
            ratio(r.to_jemalloc)
        )?;
    }
    Ok(())
}

/// Runs it and prints the rows.
pub fn run(o: &HeapOptions) -> io::Result<()> {
    // Before libmojim.so, which takes much of the room that the C library keeps for the variables of
    // threads of libraries that come late.
    let rivals = rivals();
    let m = Mojim::load()?;
    let scratch = match &o.dir {
        Some(d) => Scratch::new_in(d)?,
        None => Scratch::new()?,
    };
    let config = scratch.path().join("mojim.toml");
    let text = config_text(
        scratch.path(),
        scratch.path(),
        &[("v", "unreplicated", "tcp")],
        None,
    )?;
    std::fs::write(&config, text)?;
    let path = CString::new(config.to_str().ok_or(io::ErrorKind::InvalidInput)?)?;
    // SAFETY: C strings.
    let volume = unsafe { (m.attach)(path.as_ptr(), c"a".as_ptr(), std::ptr::null()) };
    m.check(volume, std::ptr::null_mut())?;
    // SAFETY: an attached volume.
    let h = unsafe { (m.open)(volume, c"heap".as_ptr(), 0, std::ptr::null_mut(), 0) };
    m.check(h, std::ptr::null_mut())?;
    let mut all = vec![("mojim", Allocator::Heap(m, h as usize))];
    all.extend(rivals);
    let mut rows = Vec::new();
    for threads in [1, 2] {
        rows.extend(case(o, "16 to 256 bytes", false, threads, &all)?);
        rows.extend(case(o, "16 bytes to 16 KiB", true, threads, &all)?);
    }
    if o.open > 0 {
        rows.push(opens(o, m, volume)?);
    }
    // SAFETY: no call uses the handle any more.
    m.check(unsafe { (m.detach)(volume) }, -1)?;
    print(o.json, &rows, table)
}
