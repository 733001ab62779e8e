//! The cost of `malloc` and `free` in a persistent heap, beside allocators of plain memory, and
//! that of opening a large heap.
//!
//! Every allocator runs the same requests, on a table of live blocks. A random one of these is
//! freed and replaced by one of a random size, whose first word is stored to. The allocators take
//! turns in blocks of operations. The heap is used as a program does, by the functions of
//! libmojim.so. jemalloc is another process's `malloc` (`rival.rs`), since it cannot be loaded
//! late. Then: what an allocation adds to a commit (`commits.rs`).

mod allocator;
mod commits;
mod rival;
mod turns;

use std::ffi::{CStr, CString, c_void};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::cluster::config_text;
use crate::library::{function, load};
use crate::report::print;
use crate::scratch::Scratch;

pub use rival::serve;

use allocator::{Allocator, Mojim};
use rival::Rival;
use turns::{Case, Turns, median};

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
            ops: 1_000_000,
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
    /// How many times as long as the same store took without an allocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_store: Option<f64>,
}

/// Who has a turn.
enum Side<'a> {
    Here(Turns),
    There(&'a mut Rival),
}

/// One case: every allocator in turn, in each round.
fn case(
    o: &HeapOptions,
    (name, case): (&str, Case),
    allocators: &[(&'static str, Allocator)],
    rival: Option<&mut Rival>,
) -> io::Result<Vec<HeapRow>> {
    let here = allocators.iter();
    let mut sides: Vec<(&str, Side<'_>)> = here
        .map(|(n, a)| (*n, Side::Here(Turns::new(*a, case))))
        .collect();
    sides.extend(rival.map(|r| (rival::NAME, Side::There(r))));
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
    for round in 0..=o.rounds {
        for k in 0..sides.len() {
            let i = (k + round) % sides.len();
            let took = match &mut sides[i].1 {
                Side::Here(turns) => turns.turn()?,
                Side::There(rival) => rival.turn(case)?,
            };
            // The first round warms up.
            if round > 0 {
                times[i].push(took);
            }
        }
    }
    let names: Vec<&str> = sides.iter().map(|(n, _)| *n).collect();
    let to = |i: usize, other: &str| {
        let j = names.iter().position(|n| *n == other)?;
        let ratios = times[i].iter().zip(&times[j]).map(|(a, b)| a / b);
        (i != j).then(|| median(ratios.collect()))
    };
    let rows = names.iter().enumerate().map(|(i, allocator)| HeapRow {
        bench: "heap",
        case: name.into(),
        allocator: (*allocator).into(),
        threads: case.threads,
        median: median(times[i].clone()),
        unit: "ns",
        to_mimalloc: to(i, "mimalloc"),
        to_jemalloc: to(i, rival::NAME),
        to_store: None,
    });
    Ok(rows.collect())
}

/// Allocators of plain memory that the system has.
fn rivals() -> Vec<(&'static str, Allocator)> {
    let mut all = vec![("glibc", Allocator::Plain(libc::malloc, libc::free))];
    let mut add = |name, file: &str, malloc: &CStr, free: &CStr| {
        let Ok(handle) = load(file) else {
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
    all.dedup_by_key(|(name, _)| *name);
    all
}

/// What an allocation adds to a commit.
fn commits(o: &HeapOptions, m: Mojim) -> io::Result<Vec<HeapRow>> {
    let all = commits::run(o.rounds, m)?.into_iter();
    let row = |(name, median, to_store): (&str, f64, Option<f64>)| HeapRow {
        bench: "heap",
        case: format!("{name}, {} bytes, committed (shm)", commits::BYTES),
        allocator: "mojim".into(),
        threads: 1,
        median,
        unit: "ns",
        to_mimalloc: None,
        to_jemalloc: None,
        to_store,
    };
    Ok(all.map(row).collect())
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
        to_store: None,
    })
}

fn table(rows: &[HeapRow], out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<46}{:>8}  {:<10}{:>10}  {:>12}{:>12}{:>10}",
        "case", "threads", "allocator", "median", "to mimalloc", "to jemalloc", "to store"
    )?;
    for r in rows {
        let ratio = |v: Option<f64>| v.map_or(String::new(), |v| format!("{v:.2}"));
        let mut time = String::new();
        let _ = write!(time, "{:.1} {}", r.median, r.unit);
        writeln!(
            out,
            "{:<46}{:>8}  {:<10}{:>10}  {:>12}{:>12}{:>10}",
            r.case,
            r.threads,
            r.allocator,
            time,
            ratio(r.to_mimalloc),
            ratio(r.to_jemalloc),
            ratio(r.to_store)
        )?;
    }
    Ok(())
}

/// Runs it and prints the rows.
pub fn run(o: &HeapOptions) -> io::Result<()> {
    // Before libmojim.so, which takes much of the room that the C library keeps for the variables of
    // threads of libraries that come late.
    let rivals = rivals();
    let mut rival = Rival::start();
    let m = Mojim::load()?;
    let mut rows = commits(o, m)?;
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
    for threads in [1, 2] {
        for (name, mixed) in [("16 to 256 bytes", false), ("16 bytes to 16 KiB", true)] {
            let of = Case {
                mixed,
                threads,
                ops: o.ops,
            };
            rows.extend(case(o, (name, of), &all, rival.as_mut())?);
        }
    }
    if o.open > 0 {
        rows.push(opens(o, m, volume)?);
    }
    // SAFETY: no call uses the handle any more.
    m.check(unsafe { (m.detach)(volume) }, -1)?;
    print(o.json, &rows, table)
}
