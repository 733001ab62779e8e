//! Readers on a mirror and on a backup, with the nodes in this process: what
//! their regions show is always of one sync point.
//!
//! The writer changes the same counter in many pages of two files with each sync point. A
//! look reads the first counter, all others, and the first again:
//!
//! - If the first did not change, all others must be equal to it. The counter never goes
//!   back, so everything that was read between was of one state.
//! - If it did change, all others must lie between its two values.
//!
//! No look makes a call.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim_config::Config;
use mojim_engine::{Error, MapFlags, Mapping, Reader, ReaderOptions, Volume, gmsync, msync, unmap};
use mojim_env::locks::lock;
use mojim_node::Node;
use mojim_replica::request::{Request, Standing};
use tracing_subscriber::fmt::TestWriter;

mod support;
use support::free_ports;

const DEADLINE: Duration = Duration::from_secs(120);
const PAGE: usize = 4096;
/// Pages of the two files.
const PAGES: [usize; 2] = [40, 24];
const CREATE: MapFlags = MapFlags {
    create: true,
    atomic: false,
    read_only: false,
    offset: 0,
    fixed_at: 0,
    shared: false,
    untracked: false,
};
const READ: MapFlags = MapFlags {
    create: false,
    ..CREATE
};

/// Nodes `a`, `b` and `c` of a volume with small logs, in directories of their
/// own that go at the end.
struct Place {
    dir: PathBuf,
    shm: PathBuf,
    config: Config,
    /// Those that run until the end: they would make their rings again that the end removes.
    nodes: Mutex<Vec<Arc<Node>>>,
}

impl Place {
    fn new(name: &str) -> Place {
        let id = format!("mojim-readers-{}-{name}", std::process::id());
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&id);
        let shm = Path::new("/dev/shm").join(&id);
        for d in [&dir, &shm] {
            let _ = std::fs::remove_dir_all(d);
            std::fs::create_dir_all(d).unwrap();
        }
        let ports = free_ports::<3>();
        let mut text = String::from(
            "cluster = \"readers\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n\
             backups = [\"c\"]\nconnections = 2\nfailover = \"manual\"\nresend_timeout = \"2s\"\n",
        );
        for (name, port) in ["a", "b", "c"].iter().zip(&ports) {
            text += &format!(
                "[node.{name}]\naddress = \"{}\"\ndirectory = \"{}/{name}\"\nring = \"{}\"\n\
                 log = {{ medium = \"disk\", size = \"1MiB\" }}\n",
                port,
                dir.display(),
                shm.display()
            );
        }
        let config = Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"));
        std::fs::write(dir.join("mojim.toml"), text).unwrap();
        Place {
            dir,
            shm,
            config,
            nodes: Mutex::default(),
        }
    }

    /// In `sync-disk`, whose mirror has its log in memory.
    fn sync_disk(mut self) -> Place {
        let file = self.dir.join("mojim.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        let (a, b) = text.split_once("[node.b]").unwrap();
        let a = a.replace("mode = \"sync\"", "mode = \"sync-disk\"");
        let b = b.replacen("medium = \"disk\"", "medium = \"dram\"", 1);
        let text = format!("{a}[node.b]{b}");
        self.config =
            Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"));
        std::fs::write(file, text).unwrap();
        self
    }

    fn node(&self, name: &'static str) -> Arc<Node> {
        // Its lines are shown where the test fails.
        let _ = tracing_subscriber::fmt()
            .with_writer(TestWriter::with_stderr)
            .try_init();
        let node = Node::start(&self.config, name, None).unwrap_or_else(|e| panic!("{e}"));
        let mut nodes = lock(&self.nodes);
        nodes.push(node.clone());
        node
    }

    fn program(&self) -> Volume {
        Volume::attach_with(&self.config, "a", None, |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
    }

    fn reader(&self, node: &str) -> Reader {
        self.reader_with(node, ReaderOptions::default())
    }

    fn reader_with(&self, node: &str, options: ReaderOptions) -> Reader {
        reader_of(&self.config, node, options)
    }
}

/// As soon as the node has a copy to read.
fn reader_of(config: &Config, node: &str, options: ReaderOptions) -> Reader {
    let made = await_that("a copy to read", || {
        match Reader::attach_with(config, node, None, options) {
            Err(e) if e.errno() == libc::EBUSY => None,
            r => Some(r),
        }
    });
    made.unwrap_or_else(|e| panic!("{e}"))
}

impl Drop for Place {
    fn drop(&mut self) {
        let nodes = self.nodes.get_mut().unwrap_or_else(|e| e.into_inner());
        nodes.iter().for_each(|n| n.stop());
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_dir_all(&self.shm);
    }
}

#[track_caller]
fn await_that<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(x) = f() {
            return x;
        }
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Where page `i` of a mapping has its counter.
fn counter(m: &Mapping, i: usize) -> *mut u64 {
    // SAFETY: inside the mapping, which has a counter in each of its pages.
    unsafe { m.ptr.add(i * PAGE + (i * 72) % 4000 / 8 * 8).cast() }
}

/// All counters of both files, in an order that leaps between them.
fn counters(maps: &[Mapping; 2]) -> Vec<*const u64> {
    let of = |f: usize| (0..PAGES[f]).map(move |i| counter(&maps[f], i).cast_const());
    let (mut f, mut g) = (of(0), of(1));
    let mut out = Vec::new();
    loop {
        match (f.next(), g.next()) {
            (None, None) => return out,
            (x, y) => out.extend([x, y].into_iter().flatten()),
        }
    }
}

/// The program on the primary.
struct Writer {
    volume: Volume,
    maps: [Mapping; 2],
    ranges: Vec<(*const u8, usize)>,
    count: u64,
}

impl Writer {
    fn new(place: &Place) -> Writer {
        let volume = place.program();
        let map = |i: usize, name| volume.map(name, PAGES[i] * PAGE, CREATE).unwrap();
        let maps = [map(0, "f"), map(1, "dir/g")];
        let ranges = counters(&maps).into_iter().map(|p| (p.cast(), 8)).collect();
        let mut w = Writer {
            volume,
            maps,
            ranges,
            count: 0,
        };
        w.write();
        w
    }

    /// One sync point.
    fn write(&mut self) -> u64 {
        self.count += 1;
        for p in counters(&self.maps) {
            // SAFETY: a counter of the writer's own regions.
            unsafe { p.cast_mut().write_volatile(self.count) };
        }
        gmsync(&self.ranges).unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Regions of a reader, looked at without a call.
struct Looker {
    reader: Reader,
    all: Vec<*const u64>,
    last: u64,
}

impl Looker {
    fn new(reader: Reader) -> Looker {
        // A backup comes by its first records on its own time.
        for (i, name) in ["f", "dir/g"].into_iter().enumerate() {
            let whole = Some((PAGES[i] * PAGE) as u64);
            await_that(name, || (reader.size(name).unwrap() == whole).then_some(()));
        }
        let map = |i: usize, name: &str| {
            let m = reader.map(name, 0, READ).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(m.len, PAGES[i] * PAGE);
            m
        };
        let maps = [map(0, "f"), map(1, "dir/g")];
        Looker {
            all: counters(&maps),
            reader,
            last: 0,
        }
    }

    /// The counter, if all of it was of one sync point; or what is wrong.
    fn look(&mut self) -> Result<Option<u64>, String> {
        // SAFETY: a counter of a region that is mapped.
        let read = |p: *const u64| unsafe { p.read_volatile() };
        let before = read(self.all[0]);
        let mut between = [0; 64];
        for (x, p) in between.iter_mut().zip(&self.all) {
            *x = read(*p);
        }
        let after = read(self.all[0]);
        let between = &between[..self.all.len()];
        if before < self.last {
            return Err(format!("{before} after {}", self.last));
        }
        self.last = after;
        if let Some(x) = between.iter().find(|x| **x < before || **x > after) {
            return Err(format!(
                "{x}, while the first counter was {before} to {after}: {between:?}"
            ));
        }
        Ok((before == after).then_some(before))
    }
}

/// Ends others' loops, also when a test breaks.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn regions_show_whole_sync_points_while_a_program_commits() {
    let place = Place::new("whole");
    let _nodes = ["a", "b", "c"].map(|n| place.node(n));
    let mut w = Writer::new(&place);
    let stop = AtomicBool::new(false);
    let seen = [const { AtomicU64::new(0) }; 3];
    std::thread::scope(|s| {
        for (i, node) in ["b", "b", "c"].into_iter().enumerate() {
            let (place, seen, stop) = (&place, &seen, &stop);
            s.spawn(move || {
                let _ends = Ends(stop);
                let mut l = Looker::new(place.reader(node));
                let mut last = 0;
                for look in 0u64.. {
                    if stop.load(SeqCst) {
                        break;
                    }
                    if look % 512 == 0 {
                        // Two processors, and others' work on them.
                        std::thread::yield_now();
                    }
                    let n = l
                        .look()
                        .unwrap_or_else(|e| panic!("a reader on {node}: {e}"));
                    if let Some(n) = n.filter(|n| *n > last) {
                        last = n;
                        seen[i].fetch_add(1, SeqCst);
                    }
                }
                l.reader.detach().unwrap();
            });
        }
        let _ends = Ends(&stop);
        // 2 KiB and more each, in two logs of 1 MiB: many checkpoints.
        let begin = Instant::now();
        let enough = || seen.iter().all(|s| s.load(SeqCst) >= 50);
        while !stop.load(SeqCst) && (w.count < 3000 || !enough()) && begin.elapsed() < DEADLINE {
            w.write();
        }
    });
    assert!(w.count >= 3000, "{} sync points", w.count);
    assert!(seen.iter().all(|s| s.load(SeqCst) >= 50), "{seen:?}");
    eprintln!("{} sync points, {seen:?} seen", w.count);
    w.volume.detach().unwrap();
}

/// The test that tests the test above: pages that change one by one are seen.
#[test]
fn a_mixture_would_be_seen() {
    let place = Place::new("mixed");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let mut w = Writer::new(&place);
    let found = AtomicBool::new(false);
    std::thread::scope(|s| {
        let (place, found) = (&place, &found);
        s.spawn(move || {
            let mut l = Looker::new(place.reader("b"));
            l.reader.mix_pages();
            let begin = Instant::now();
            while l.look().is_ok() && begin.elapsed() < DEADLINE {}
            found.store(begin.elapsed() < DEADLINE, SeqCst);
            l.reader.detach().unwrap();
        });
        let begin = Instant::now();
        while !found.load(SeqCst) && begin.elapsed() < DEADLINE {
            w.write();
            std::thread::yield_now();
        }
    });
    assert!(found.load(SeqCst), "no mixture was seen");
    w.volume.detach().unwrap();
}

fn byte(m: &Mapping, at: usize) -> u8 {
    assert!(at < m.len);
    // SAFETY: inside a mapping that is there.
    unsafe { m.ptr.add(at).read_volatile() }
}

fn put(m: &Mapping, range: std::ops::Range<usize>, value: u8) {
    assert!(range.end <= m.len);
    // SAFETY: inside the writer's region, which only this thread uses.
    unsafe { m.ptr.add(range.start).write_bytes(value, range.len()) };
}

fn commit(m: &Mapping) -> u64 {
    msync(m.ptr, m.len).unwrap_or_else(|e| panic!("{e}"))
}

/// The address whose load may give SIGBUS, and whether it did. The thread that
/// loaded stands still for good then.
static LOADED: AtomicUsize = AtomicUsize::new(0);
static BUS: AtomicBool = AtomicBool::new(false);

extern "C" fn note_bus(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's, for this signal.
    let at = unsafe { (*info).si_addr() } as usize;
    if at & !(PAGE - 1) != LOADED.load(SeqCst) & !(PAGE - 1) {
        // SAFETY: ends the process, of which a test broke.
        unsafe { libc::abort() };
    }
    BUS.store(true, SeqCst);
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Whether a load gives a byte, and not SIGBUS.
fn is_there(m: &Mapping, at: usize) -> bool {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = lock(&ONE);
    assert!(at < m.len);
    let address = m.ptr as usize + at;
    LOADED.store(address, SeqCst);
    BUS.store(false, SeqCst);
    // SAFETY: the handler is one for this signal, and touches an atomic only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note_bus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()),
            0
        );
    }
    let loader = std::thread::spawn(move || {
        // SAFETY: inside a mapping that is there.
        unsafe { (address as *const u8).read_volatile() };
    });
    await_that("a load", || {
        let bus = BUS.load(SeqCst);
        (bus || loader.is_finished()).then_some(!bus)
    })
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn files_grow_shrink_and_go() {
    let place = Place::new("files");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let v = place.program();
    let f = v.map("f", 3 * PAGE + 100, CREATE).unwrap();
    put(&f, 0..f.len, 1);
    let lsn = commit(&f);
    let r = place.reader("b");
    r.wait(lsn, LONG).unwrap();
    assert!(r.shown() >= lsn);
    r.following().unwrap();
    assert_eq!(r.size("f").unwrap(), Some(3 * PAGE as u64 + 100));
    assert_eq!(r.size("nothing").unwrap(), None);
    assert!(matches!(r.map("nothing", 1, READ), Err(Error::NotFound(_))));
    assert!(matches!(r.map("f", 0, CREATE), Err(Error::ReadOnly(_))));
    // Twice, one of them a part, both beyond the end.
    let all = r.map("f", 8 * PAGE, READ).unwrap();
    let part = MapFlags {
        offset: 2 * PAGE as u64,
        ..READ
    };
    let part = r.map("f", 4 * PAGE, part).unwrap();
    assert_eq!((byte(&all, 0), byte(&all, 3 * PAGE + 99)), (1, 1));
    assert_eq!(byte(&all, 3 * PAGE + 100), 0);
    assert_eq!((byte(&part, 0), byte(&part, PAGE + 100)), (1, 0));
    assert!(!is_there(&all, 4 * PAGE) && !is_there(&part, 2 * PAGE));
    // A sync point or an unmapping of the wrong kind.
    assert!(matches!(msync(all.ptr, 1), Err(Error::ReadOnly(_))));
    assert!(matches!(gmsync(&[(all.ptr, 1)]), Err(Error::ReadOnly(_))));
    assert!(matches!(unmap(all.ptr, PAGE), Err(Error::Unsupported(_))));
    assert!(mojim_engine::is_region(part.ptr as usize));

    // Grown: what gave SIGBUS is there, without a call.
    v.truncate("f", 6 * PAGE as u64 + 8).unwrap();
    let more = MapFlags {
        offset: 4 * PAGE as u64,
        ..READ
    };
    let more = MapFlags {
        read_only: false,
        ..more
    };
    let tail = v.map("f", 2 * PAGE + 8, more).unwrap();
    put(&tail, 0..tail.len, 2);
    let lsn = commit(&tail);
    r.wait(lsn, LONG).unwrap();
    assert_eq!((byte(&all, 3 * PAGE + 100), byte(&all, 4 * PAGE)), (0, 2));
    assert_eq!((byte(&part, 2 * PAGE), byte(&all, 6 * PAGE + 7)), (2, 2));
    assert_eq!(byte(&all, 6 * PAGE + 8), 0);
    assert!(!is_there(&all, 7 * PAGE));

    // Shrunk, then grown again: zeros.
    unmap(tail.ptr, tail.len).unwrap();
    v.truncate("f", PAGE as u64 + 10).unwrap();
    r.wait(mojim_engine::last_lsn(), LONG).unwrap();
    assert_eq!((byte(&all, PAGE + 9), byte(&all, PAGE + 10)), (1, 0));
    assert!(!is_there(&all, 2 * PAGE) && !is_there(&part, 0));
    v.truncate("f", 3 * PAGE as u64).unwrap();
    r.wait(mojim_engine::last_lsn(), LONG).unwrap();
    assert_eq!((byte(&all, PAGE + 10), byte(&part, 0)), (0, 0));

    // Another name is the same file; a new file of the old name is not.
    unmap(f.ptr, f.len).unwrap();
    v.rename("f", "g").unwrap();
    let other = v.map("f", PAGE, CREATE).unwrap();
    put(&other, 0..PAGE, 9);
    r.wait(commit(&other), LONG).unwrap();
    assert_eq!(byte(&all, 0), 1);
    let mut buf = [0; 3 * PAGE];
    assert_eq!(r.read("f", 5, &mut buf).unwrap(), PAGE - 5);
    assert_eq!((buf[0], buf[PAGE - 6]), (9, 9));
    // Renamed over, or removed: nothing is there.
    unmap(other.ptr, other.len).unwrap();
    v.rename("f", "g").unwrap();
    r.wait(mojim_engine::last_lsn(), LONG).unwrap();
    assert!(!is_there(&all, 0) && !is_there(&part, 0));
    let again = r.map("g", 0, READ).unwrap();
    assert_eq!(byte(&again, 0), 9);
    v.remove("g").unwrap();
    r.wait(mojim_engine::last_lsn(), LONG).unwrap();
    assert!(!is_there(&again, 0));
    assert_eq!(r.size("g").unwrap(), None);

    unmap(all.ptr, all.len).unwrap();
    assert!(!mojim_engine::is_region(all.ptr as usize));
    r.detach().unwrap();
    assert!(!mojim_engine::is_region(again.ptr as usize));
    v.detach().unwrap();
}

/// A sync point that no answer holds, and one that no log holds, are shown
/// whole too: the view begins anew.
#[test]
fn sync_points_of_any_size() {
    let place = Place::new("large");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let v = place.program();
    const LEN: usize = 6 << 20;
    let f = v.map("f", LEN, CREATE).unwrap();
    put(&f, 0..LEN, 1);
    let lsn = commit(&f);
    // Less memory than the file needs.
    let options = ReaderOptions {
        memory: 1 << 20,
        ..ReaderOptions::default()
    };
    let r = place.reader_with("b", options);
    r.wait(lsn, LONG).unwrap();
    let m = r.map("f", 0, READ).unwrap();
    for (round, len) in [
        (2u8, 100),
        (3, 40 << 10),
        (4, 800 << 10),
        (5, 2 << 20),
        (6, LEN),
    ] {
        let old = byte(&m, LEN - 1);
        put(&f, 0..len, round);
        // SAFETY: a part of the writer's region.
        let lsn = msync(f.ptr, len).unwrap();
        // Looked at from the end, while it comes.
        let mut seen = (byte(&m, len - 1), byte(&m, 0));
        assert!(seen.1 >= seen.0, "{seen:?}");
        r.wait(lsn, LONG).unwrap();
        seen = (byte(&m, 0), byte(&m, len - 1));
        assert_eq!(seen, (round, round));
        if len < LEN {
            assert_eq!(byte(&m, LEN - 1), old);
        }
        let wrong = (0..LEN).step_by(97).find(|&i| {
            let expected = if i < len { round } else { byte(&f, i) };
            byte(&m, i) != expected
        });
        assert_eq!(wrong, None, "round {round}");
    }
    r.detach().unwrap();
    v.detach().unwrap();
}

/// Says to the child of a test that it is one, and where its volume is.
const CHILD: &str = "MOJIM_TEST_CHILD";

/// A process that runs one of these tests, as a child.
fn child_of(test: &str, place: &Place) -> Command {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", "--nocapture", test]);
    c.env(CHILD, &place.dir);
    c
}

/// The child's reader, with as few pages as can be.
fn child_reader(dir: &Path) -> Reader {
    let config = Config::load(&dir.join("mojim.toml")).unwrap_or_else(|e| panic!("{e}"));
    let options = ReaderOptions {
        memory: PAGE,
        ..ReaderOptions::default()
    };
    reader_of(&config, "b", options)
}

/// Pages of its file: more than its reader keeps.
const LOCKED_PAGES: usize = 96;

/// A mapping at an address of a region, of whatever kind, hides it: a load from a reader's
/// that lay over another never came back, and a writer's committed the reader's bytes.
#[test]
fn no_mapping_takes_the_place_of_a_region() {
    let place = Place::new("fixed");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let v = place.program();
    let private = v.map("f", 8 * PAGE, CREATE).unwrap();
    let shared = MapFlags {
        shared: true,
        ..CREATE
    };
    let shared_one = v.map("g", 8 * PAGE, shared).unwrap();
    put(&private, 0..8 * PAGE, 5);
    let lsn = commit(&private);
    let r = place.reader("b");
    r.wait(lsn, DEADLINE).unwrap();
    // Where the kernel puts nothing of the other tests' once it is given back.
    let own = MapFlags {
        fixed_at: 0x2a4d_6f6a_0000,
        ..READ
    };
    let read = r.map("f", 8 * PAGE, own).unwrap();
    for m in [private, shared_one, read] {
        let start = m.ptr as usize;
        for (at, len) in [
            (start, 8 * PAGE),
            (start + 7 * PAGE, 1),
            (start - PAGE, 2 * PAGE),
            (start - PAGE, 0),
        ] {
            let over = |flags| MapFlags {
                fixed_at: at,
                ..flags
            };
            // SAFETY: nobody else has these addresses.
            let done = unsafe {
                [
                    v.map_over("h", if len == 0 { 2 * PAGE } else { len }, over(CREATE)),
                    v.map_over("g", len, over(shared)),
                    r.map_over("g", len, over(READ)),
                ]
            };
            for done in done {
                assert!(matches!(done, Err(Error::Busy(_))), "{done:?}");
            }
        }
    }
    // Before anything had changed.
    assert_eq!(v.size("h").unwrap(), None);
    // SAFETY: inside the mappings.
    unsafe {
        assert_eq!((*private.ptr, *shared_one.ptr, *read.ptr), (5, 0, 5));
        *private.ptr = 6;
    }
    r.wait(commit(&private), DEADLINE).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { *read.ptr }, 6);
    r.detach().unwrap();
    // What was given back is free, for any of them.
    let there = MapFlags {
        fixed_at: read.ptr as usize,
        ..CREATE
    };
    let m = v.map("h", 3 * PAGE, there).unwrap();
    unmap(m.ptr, m.len).unwrap();
    v.detach().unwrap();
}

/// A program that keeps all of its memory, also what comes, from being swapped
/// (mlockall) was shown zeros for ever: the kernel filled a region's mapping
/// with the pages of a memory that was still empty, before anyone was told of
/// its faults. And what was there could not be taken out to be changed: the
/// kernel refuses that of locked memory, so such a reader never moved on.
#[test]
fn a_program_that_locks_its_memory_sees_what_was_committed() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return read_locked(Path::new(&dir));
    }
    let place = Place::new("locked");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let v = place.program();
    let f = v.map("f", LOCKED_PAGES * PAGE, CREATE).unwrap();
    let test = "a_program_that_locks_its_memory_sees_what_was_committed";
    let mut child = child_of(test, &place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut rounds = 0;
    for value in 1u8.. {
        put(&f, 0..f.len, value);
        // It may be gone already: what it said tells why.
        let _ = writeln!(to, "{value} {}", commit(&f));
        let said = from.by_ref().map(Result::unwrap).find_map(|l| {
            let (_, said) = l.split_once("locked: ")?;
            Some(said.to_owned())
        });
        match said.as_deref() {
            Some("more") => rounds += 1,
            Some("all") => break,
            Some(why) => {
                eprintln!("left out: {why}");
                rounds = usize::MAX;
                break;
            }
            None => break,
        }
    }
    drop(to);
    let rest: Vec<_> = from.map(Result::unwrap).collect();
    assert!(child.wait().unwrap().success(), "{rest:#?}");
    assert!(rounds >= 8, "{rounds}");
    v.detach().unwrap();
}

/// The child: looks at all of its regions after each sync point, and before
/// the next one does something else that brings pages in.
fn read_locked(dir: &Path) {
    // SAFETY: memory of its own is mapped, locked as it is touched (so none of
    // it is), and unmapped; then the process's memory is locked.
    let allowed = unsafe {
        let len = 1 << 30;
        let (prot, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let room = libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0);
        assert_ne!(room, libc::MAP_FAILED);
        let enough = libc::mlock2(room, len, libc::MLOCK_ONFAULT as _) == 0;
        libc::munmap(room, len);
        enough && libc::mlockall(libc::MCL_FUTURE) == 0
    };
    if !allowed {
        println!("locked: this process may not lock so much memory (RLIMIT_MEMLOCK)");
        return;
    }
    let r = child_reader(dir);
    let len = LOCKED_PAGES * PAGE;
    let mut regions: Vec<Mapping> = Vec::new();
    // What fails, because the faults of system calls are not waited with, is
    // right as well: what is looked at is what is shown after it.
    let all_of = |m: &Mapping| (m.ptr.cast::<libc::c_void>(), m.len);
    type Step<'a> = &'a dyn Fn(&mut Vec<Mapping>);
    let steps: [Step<'_>; 9] = [
        &|_| {},
        // In place of other memory, which was filled.
        &|regions| {
            let old = regions.pop().unwrap();
            unmap(old.ptr, old.len).unwrap();
            // SAFETY: memory of its own, which nobody else knows.
            let at = unsafe {
                let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0)
            };
            assert_ne!(at, libc::MAP_FAILED);
            let there = MapFlags {
                fixed_at: at as usize,
                ..READ
            };
            // Memory of another kind is not replaced by a safe call.
            let e = r.map("f", 0, there).expect_err("there is memory");
            assert!(matches!(e, Error::Busy(_)), "{e}");
            // SAFETY: memory of its own.
            let m = unsafe { r.map_over("f", 0, there) };
            regions.push(m.unwrap_or_else(|e| panic!("{e}")));
        },
        &|regions| {
            let (at, len) = all_of(&regions[0]);
            // SAFETY: a region; no byte of it changes.
            unsafe { libc::mlock(at, len) };
        },
        &|regions| {
            let (at, len) = all_of(&regions[0]);
            // SAFETY: as above.
            unsafe { libc::munlock(at, len) };
        },
        &|_| {
            // SAFETY: no byte of any memory changes.
            unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
        },
        &|regions| {
            let (at, len) = all_of(&regions[0]);
            // SAFETY: as above.
            unsafe { libc::madvise(at, len, libc::MADV_POPULATE_READ) };
        },
        &|regions| {
            let (at, len) = all_of(&regions[0]);
            let mut bytes = vec![0u8; len];
            let from = libc::iovec {
                iov_base: at,
                iov_len: len,
            };
            let to = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: len,
            };
            // SAFETY: the kernel fills `bytes`, which are as many.
            let n = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
            let n = usize::try_from(n).unwrap_or(0);
            assert_eq!(bytes[..n].iter().find(|b| **b == 0), None);
        },
        &|regions| {
            let (at, len) = all_of(&regions[0]);
            let to = std::fs::File::create(dir.join("copy")).unwrap();
            use std::os::fd::AsRawFd;
            // SAFETY: a region is read.
            let n = unsafe { libc::write(to.as_raw_fd(), at, len) };
            let bytes = std::fs::read(dir.join("copy")).unwrap();
            assert_eq!(bytes.len(), usize::try_from(n).unwrap_or(0));
            assert_eq!(bytes.iter().find(|b| **b == 0), None);
        },
        &|_| {
            // SAFETY: no byte of any memory changes.
            unsafe { libc::munlockall() };
        },
    ];
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    for (i, step) in steps.iter().enumerate() {
        let line = lines.next().unwrap();
        let (value, lsn) = line.split_once(' ').unwrap();
        let (value, lsn): (u8, u64) = (value.parse().unwrap(), lsn.parse().unwrap());
        r.wait(lsn, LONG).unwrap();
        // One is looked at from its first load on, others move on.
        regions.push(r.map("f", 0, READ).unwrap_or_else(|e| panic!("{e}")));
        for m in &regions {
            let wrong = (0..len).step_by(61).find(|at| byte(m, *at) != value);
            assert_eq!(wrong.map(|at| (at, byte(m, at))), None, "step {i}");
        }
        step(&mut regions);
        let last = i + 1 == steps.len();
        println!("locked: {}", if last { "all" } else { "more" });
    }
    r.detach().unwrap();
}

/// The region that a handler of signals loads from, and where the next time.
static LOADS: AtomicUsize = AtomicUsize::new(0);
static LOAD: AtomicUsize = AtomicUsize::new(0);
/// Where it says what it loaded.
static LOADED_TO: AtomicUsize = AtomicUsize::new(0);
/// Blocks of pages that a node gives at one time, in its file.
const BLOCKS: usize = 64;

extern "C" fn load_and_tell(_: i32) {
    let block = LOAD.fetch_add(1, SeqCst) % BLOCKS;
    let at = LOADS.load(SeqCst) + block * 16 * PAGE;
    // SAFETY: in a region that is mapped while there are signals. The kernel
    // reads one byte.
    unsafe {
        let value = (at as *const u8).read_volatile();
        libc::write(LOADED_TO.load(SeqCst) as i32, (&raw const value).cast(), 1);
    }
}

/// A handler of signals that loaded from a page that was not there, in a thread
/// that was within `map`, `size`, `read` or `unmap`, waited for ever: the page
/// was to be brought by a thread that waited for the lock which the interrupted
/// one held.
#[test]
fn a_signal_handler_loads_from_a_region_while_its_thread_is_in_a_call() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return read_with_signals(Path::new(&dir));
    }
    let place = Place::new("signals");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let v = place.program();
    let f = v.map("f", BLOCKS * 16 * PAGE, CREATE).unwrap();
    put(&f, 0..f.len, 1);
    let lsn = commit(&f);
    // The reader is a process of its own, with few threads. In one with many,
    // threads share what malloc locks, also with the one that answers faults:
    // a handler that interrupts malloc must not load there (mojim.h).
    let status = child_of(
        "a_signal_handler_loads_from_a_region_while_its_thread_is_in_a_call",
        &place,
    )
    .env("MOJIM_TEST_LSN", lsn.to_string())
    .status();
    assert!(status.unwrap().success());
    v.detach().unwrap();
}

fn read_with_signals(dir: &Path) {
    const SIGNALS: usize = 2000;
    const ROUNDS: u64 = 100;
    let lsn = std::env::var("MOJIM_TEST_LSN").unwrap().parse().unwrap();
    // It keeps four blocks: by the time a handler comes back to one it is gone.
    let r = child_reader(dir);
    r.wait(lsn, LONG).unwrap();
    let m = r.map("f", 0, READ).unwrap();
    let (mut told, tell) = std::io::pipe().unwrap();
    use std::os::fd::IntoRawFd;
    // Left open: a handler may come late where this test breaks.
    LOADED_TO.store(tell.into_raw_fd() as usize, SeqCst);
    LOADS.store(m.ptr as usize, SeqCst);
    // SAFETY: the handler loads from mapped memory and writes to a pipe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = load_and_tell as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
            0
        );
    }
    let (stop, rounds) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let (who, is) = std::sync::mpsc::channel();
    let calls = {
        let (r, stop, rounds) = (r.clone(), stop.clone(), rounds.clone());
        std::thread::spawn(move || {
            // SAFETY: asks for its own name.
            who.send(unsafe { libc::pthread_self() }).unwrap();
            let mut buf = vec![0; 20 * PAGE];
            while !stop.load(SeqCst) {
                let m = r.map("f", 0, READ).unwrap();
                assert_eq!(r.size("f").unwrap(), Some(m.len as u64));
                assert_eq!(r.read("f", 7, &mut buf).unwrap(), buf.len());
                assert!(buf.iter().all(|b| *b == 1));
                unmap(m.ptr, m.len).unwrap();
                rounds.fetch_add(1, SeqCst);
            }
        })
    };
    let thread = is.recv().unwrap();
    let mut signals = 0;
    while signals < SIGNALS || rounds.load(SeqCst) < ROUNDS {
        assert!(!calls.is_finished(), "after {signals} signals");
        // SAFETY: a thread that goes on until it is told to stop, below.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        let mut fds = [rustix::event::PollFd::new(
            &told,
            rustix::event::PollFlags::IN,
        )];
        let most = rustix::event::Timespec {
            tv_sec: DEADLINE.as_secs() as _,
            tv_nsec: 0,
        };
        let came = rustix::event::poll(&mut fds, Some(&most)).unwrap();
        let rounds = rounds.load(SeqCst);
        assert_eq!(came, 1, "hangs at signal {signals}, round {rounds}");
        let mut value = [0];
        told.read_exact(&mut value).unwrap();
        assert_eq!(value, [1]);
        signals += 1;
    }
    stop.store(true, SeqCst);
    calls.join().unwrap();
    eprintln!("{signals} signals, {rounds:?} rounds");
    r.detach().unwrap();
}

/// What a reader showed stands while its node is away, and goes on when it is
/// back; a page that was not there is given up after a while, and had then.
#[test]
fn a_node_goes_and_comes_back() {
    let place = Place::new("away");
    let _a = place.node("a");
    let b = place.node("b");
    let mut w = Writer::new(&place);
    // Long enough for a page to come from a node that is there, on a busy machine too: with
    // 300 ms one was given up that was on its way.
    let patience = Duration::from_secs(5);
    let options = ReaderOptions {
        patience,
        ..ReaderOptions::default()
    };
    let lsn = w.write();
    let r = place.reader_with("b", options);
    r.wait(lsn, LONG).unwrap();
    let mut l = Looker::new(r);
    // All of `f` and `dir/g` in memory, and a mapping that nobody touched.
    let untouched = l.reader.map("f", 0, READ).unwrap();
    let count = w.count;
    assert_eq!(l.look().unwrap(), Some(count));
    b.stop();
    drop(b);
    await_that("the loss", || l.reader.following().err());
    let begin = Instant::now();
    assert!(!is_there(&untouched, 0));
    assert!(begin.elapsed() >= patience);
    assert_eq!(l.look().unwrap(), Some(count));
    assert!(l.reader.size("f").is_err());

    let _b = place.node("b");
    await_that("the node again", || l.reader.following().ok());
    assert!(is_there(&untouched, 0));
    let lsn = await_that("a sync point", || {
        w.count += 1;
        for p in counters(&w.maps) {
            // SAFETY: as in `write`.
            unsafe { p.cast_mut().write_volatile(w.count) };
        }
        gmsync(&w.ranges).ok()
    });
    l.reader.wait(lsn, LONG).unwrap();
    assert_eq!(l.look().unwrap(), Some(w.count));
    l.reader.detach().unwrap();
    w.volume.detach().unwrap();
}

#[test]
fn a_primary_and_a_network_have_no_readers() {
    let place = Place::new("refused");
    let _nodes = ["a", "b"].map(|n| place.node(n));
    let w = Writer::new(&place);
    let why = Reader::attach_with(&place.config, "a", None, ReaderOptions::default())
        .map(drop)
        .unwrap_err();
    assert_eq!(why.errno(), libc::ESTALE, "{why}");
    use mojim_env::{Address, Env};
    let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
    let at = Address::Tcp(place.config.node("b").unwrap().address);
    let mut client =
        mojim_replica::client::Client::connect(&env, &at, "readers", DEADLINE).unwrap();
    let q = Request::Read(mojim_replica::request::Read {
        volume: "v".into(),
        ..Default::default()
    });
    let why = client.ask(&q).unwrap_err();
    assert_eq!(why.errno(), libc::EACCES, "{why}");
    w.volume.detach().unwrap();
}

/// Once, the mirror of `sync-disk` was read until it knew that it was a member.
#[test]
fn the_mirror_of_sync_disk_has_no_readers_before_and_after_it_is_a_member() {
    let place = Place::new("sync-disk").sync_disk();
    let nodes = ["a", "b", "c"].map(|n| place.node(n));
    let refused = |node: &str| {
        let r = Reader::attach_with(&place.config, node, None, ReaderOptions::default());
        r.map(drop).unwrap_err().to_string()
    };
    // It has no copy yet, and is to be the mirror.
    let why = refused("b");
    assert!(why.contains("nobody reads on its mirror b"), "{why}");
    let mut w = Writer::new(&place);
    let lsn = w.write();
    let why = refused("b");
    assert!(why.contains("nobody reads on its mirror b"), "{why}");
    let r = place.reader("c");
    r.wait(lsn, LONG).unwrap();
    let mut l = Looker::new(r);
    assert_eq!(l.look().unwrap(), Some(w.count));
    l.reader.detach().unwrap();
    w.volume.detach().unwrap();
    drop(nodes);
}

/// The mirror becomes primary: what a reader shows there stands still. On the
/// node that is the mirror then, readers go on, from their own LSN.
#[test]
fn the_primary_changes() {
    let place = Place::new("promoted");
    let a = place.node("a");
    let b = place.node("b");
    let _c = place.node("c");
    let mut w = Writer::new(&place);
    let lsn = w.write();
    let mut on = ["b", "c"].map(|n| {
        let r = place.reader(n);
        r.wait(lsn, LONG).unwrap();
        Looker::new(r)
    });
    for l in &mut on {
        assert_eq!(l.look().unwrap(), Some(w.count));
    }
    let count = w.count;
    // The end is a sync point too, of whole pages, for which no backup is waited: one that
    // lacked it then would get it from nobody. So they are committed before.
    let whole = w.maps.iter().map(commit).max().unwrap();
    for l in &on {
        l.reader.wait(whole, LONG).unwrap();
    }
    w.volume.detach().unwrap();
    a.stop();
    drop(a);
    let env: Arc<dyn mojim_env::Env> = Arc::new(mojim_linux::Os::new().unwrap());
    let at = mojim_env::Address::Tcp(place.config.node("b").unwrap().address);
    // The detaching was a sync point too, and may have come to the readers as a
    // view that began anew: look again, so that all of it is there.
    let volume = || "v".to_owned();
    let connect = || mojim_replica::client::Client::connect(&env, &at, "readers", DEADLINE);
    let q = Request::Standing { volume: volume() };
    let standing = connect().and_then(|mut c| c.ask_for::<Standing>(&q));
    let last = standing.unwrap().last_lsn;
    for l in &mut on {
        l.reader.wait(last, LONG).unwrap();
        assert_eq!(l.look().unwrap(), Some(count));
    }
    let (volume, force) = (volume(), false);
    let q = Request::Promote { volume, force };
    let at = mojim_replica::layout::socket(place.config.node("b").unwrap());
    let at = mojim_env::Address::Unix(at);
    let order = || mojim_replica::client::Client::connect(&env, &at, "readers", DEADLINE);
    await_that("the promotion", || order().ok()?.ask(&q).ok());
    let why = await_that("the end", || {
        let e = on[0].reader.following().err()?;
        (e.errno() == libc::ESTALE).then_some(e)
    });
    assert!(why.to_string().contains("primary"), "{why}");
    assert_eq!(on[0].look().unwrap(), Some(count));
    // A program on the new primary; the backup hears it.
    let v = Volume::attach_with(&place.config, "b", None, |_, _| {}).unwrap();
    let map = |i: usize, name| v.map(name, PAGES[i] * PAGE, CREATE).unwrap();
    let maps = [map(0, "f"), map(1, "dir/g")];
    let ranges: Vec<_> = counters(&maps)
        .iter()
        .map(|p| (p.cast::<u8>(), 8))
        .collect();
    for p in counters(&maps) {
        // SAFETY: a counter of a region of this program.
        unsafe { p.cast_mut().write_volatile(count + 1) };
    }
    let lsn = gmsync(&ranges).unwrap();
    on[1].reader.wait(lsn, LONG).unwrap();
    assert_eq!(on[1].look().unwrap(), Some(count + 1));
    assert_eq!(on[0].look().unwrap(), Some(count));
    for l in &on {
        l.reader.detach().unwrap();
    }
    v.detach().unwrap();
    b.stop();
}
