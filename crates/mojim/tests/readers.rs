//! Readers on a mirror and on a backup, with the nodes in this process: what
//! their regions show is always of one sync point.
//!
//! The writer changes the same counter in many pages of two files with each
//! sync point. A look reads the first, all others, and the first again; where
//! that did not change, all others must be equal to it, since the counter never
//! goes back and everything that was read between was of one state. Where it
//! did, they must lie between the two. No look makes a call.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use mojim::config::Config;
use mojim::node::Node;
use mojim::{Error, MapFlags, Mapping, Reader, ReaderOptions, Volume, gmsync};

const DEADLINE: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
/// Pages of the two files.
const PAGES: [usize; 2] = [40, 24];
const CREATE: MapFlags = MapFlags {
    create: true,
    atomic: false,
    read_only: false,
    offset: 0,
    fixed_at: 0,
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
        let held = [0; 3].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let mut text = String::from(
            "cluster = \"readers\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n\
             backups = [\"c\"]\nconnections = 2\nfailover = \"manual\"\n",
        );
        for (name, port) in ["a", "b", "c"].iter().zip(&held) {
            text += &format!(
                "[node.{name}]\naddress = \"{}\"\ndirectory = \"{}/{name}\"\nring = \"{}\"\n\
                 log = {{ medium = \"disk\", size = \"1MiB\" }}\n",
                port.local_addr().unwrap(),
                dir.display(),
                shm.display()
            );
        }
        let config = Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"));
        Place { dir, shm, config }
    }

    fn node(&self, name: &'static str) -> Arc<Node> {
        let say = move |t: &str| eprintln!("{name}: {t}");
        Node::start(&self.config, name, None, say).unwrap_or_else(|e| panic!("{e}"))
    }

    fn program(&self) -> Volume {
        Volume::attach_with(&self.config, "a", None, |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
    }

    fn reader(&self, node: &str) -> Reader {
        self.reader_with(node, ReaderOptions::default())
    }

    fn reader_with(&self, node: &str, options: ReaderOptions) -> Reader {
        let made = await_that("a copy to read", || {
            match Reader::attach_with(&self.config, node, None, options) {
                Err(Error::Io { errno, .. }) if errno == libc::EBUSY => None,
                r => Some(r),
            }
        });
        made.unwrap_or_else(|e| panic!("{e}"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
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
                let mut l = Looker::new(place.reader(node));
                let mut last = 0;
                while !stop.load(SeqCst) {
                    let n = l.look().unwrap_or_else(|e| {
                        stop.store(true, SeqCst);
                        panic!("a reader on {node}: {e}")
                    });
                    if let Some(n) = n.filter(|n| *n > last) {
                        last = n;
                        seen[i].fetch_add(1, SeqCst);
                    }
                }
                l.reader.detach().unwrap();
            });
        }
        // Each is 4 KiB and more in a log of 1 MiB: many checkpoints.
        let begin = Instant::now();
        let enough = || seen.iter().all(|s| s.load(SeqCst) >= 200);
        while !stop.load(SeqCst) && (w.count < 3000 || !enough()) {
            w.write();
            assert!(begin.elapsed() < DEADLINE, "{seen:?} after {}", w.count);
        }
        stop.store(true, SeqCst);
    });
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
        }
    });
    assert!(found.load(SeqCst), "no mixture was seen");
    w.volume.detach().unwrap();
}
