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
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim::config::Config;
use mojim::node::Node;
use mojim::{Error, MapFlags, Mapping, Reader, ReaderOptions, Volume, gmsync, msync, unmap};

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
             backups = [\"c\"]\nconnections = 2\nfailover = \"manual\"\nresend_timeout = \"2s\"\n",
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
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
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
    assert!(mojim::volume::is_region(part.ptr as usize));

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
    r.wait(mojim::last_lsn(), LONG).unwrap();
    assert_eq!((byte(&all, PAGE + 9), byte(&all, PAGE + 10)), (1, 0));
    assert!(!is_there(&all, 2 * PAGE) && !is_there(&part, 0));
    v.truncate("f", 3 * PAGE as u64).unwrap();
    r.wait(mojim::last_lsn(), LONG).unwrap();
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
    r.wait(mojim::last_lsn(), LONG).unwrap();
    assert!(!is_there(&all, 0) && !is_there(&part, 0));
    let again = r.map("g", 0, READ).unwrap();
    assert_eq!(byte(&again, 0), 9);
    v.remove("g").unwrap();
    r.wait(mojim::last_lsn(), LONG).unwrap();
    assert!(!is_there(&again, 0));
    assert_eq!(r.size("g").unwrap(), None);

    unmap(all.ptr, all.len).unwrap();
    assert!(!mojim::volume::is_region(all.ptr as usize));
    r.detach().unwrap();
    assert!(!mojim::volume::is_region(again.ptr as usize));
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

/// What a reader showed stands while its node is away, and goes on when it is
/// back; a page that was not there is given up after a while, and had then.
#[test]
fn a_node_goes_and_comes_back() {
    let place = Place::new("away");
    let _a = place.node("a");
    let b = place.node("b");
    let mut w = Writer::new(&place);
    let patience = Duration::from_millis(300);
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
    use mojim::env::{Address, Env};
    let env: Arc<dyn Env> = Arc::new(mojim::os::Os::new().unwrap());
    let at = Address::Tcp(place.config.node("b").unwrap().address);
    let mut client = mojim::client::Client::connect(&env, &at, DEADLINE).unwrap();
    let q = serde_json::json!({ "what": "read", "cluster": "readers", "volume": "v", "after": 0 });
    let why = client.ask(&q).unwrap_err();
    assert_eq!(why.errno(), libc::EACCES, "{why}");
    w.volume.detach().unwrap();
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
    w.volume.detach().unwrap();
    a.stop();
    drop(a);
    let env: Arc<dyn mojim::env::Env> = Arc::new(mojim::os::Os::new().unwrap());
    let at = mojim::env::Address::Tcp(place.config.node("b").unwrap().address);
    // The detaching was a sync point too, and may have come to the readers as a
    // view that began anew: look again, so that all of it is there.
    let q = serde_json::json!({ "what": "status", "cluster": "readers", "volume": "v" });
    let status = mojim::client::Client::connect(&env, &at, DEADLINE).and_then(|mut c| c.ask(&q));
    let last = status.unwrap()["volumes"][0]["last_lsn"].as_u64().unwrap();
    for l in &mut on {
        l.reader.wait(last, LONG).unwrap();
        assert_eq!(l.look().unwrap(), Some(count));
    }
    let q = serde_json::json!({ "what": "promote", "cluster": "readers", "volume": "v" });
    await_that("the promotion", || {
        let mut client = mojim::client::Client::connect(&env, &at, DEADLINE).ok()?;
        client.ask(&q).ok()
    });
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
