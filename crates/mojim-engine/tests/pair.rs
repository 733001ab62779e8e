//! A primary and its mirror in one process: the ordinary life of a volume.

// Seen to fail, each by a defect made on purpose or found:
// - a spill file that the mirror had removed or never had never came again: its record was refused
//   in every session
// - pieces that had arrived and were never synced counted by their length
// - `d/f` and its directory were removed and a file `d` made, and on the mirror nothing removed the
//   directory. A copy that cannot apply what it acknowledged acknowledges nothing more
//   (`Store::unapplied`)
// - a size that no file can have was committed on both nodes, and failed at every attach from then
//   on

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mojim_config::Config;
use mojim_engine::{Error, MapFlags, Volume, gmsync, msync, msync_async, rollback, unmap};
use mojim_node::Node;
use tracing_subscriber::fmt::TestWriter;

mod support;
use support::free_ports;

/// Starts a node, whose lines are shown where the test fails.
fn node(config: &Config, name: &str) -> mojim_engine::Result<Arc<Node>> {
    let _ = tracing_subscriber::fmt()
        .with_writer(TestWriter::with_stderr)
        .try_init();
    Node::start(config, name, None)
}

/// A directory of its own on the disk, and memory beside it; both go at the end.
struct Place {
    dir: PathBuf,
    shm: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let id = format!("mojim-test-{}-{name}", std::process::id());
        let p = Place {
            dir: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&id),
            shm: Path::new("/dev/shm").join(&id),
        };
        for d in [&p.dir, &p.shm] {
            // Of a process that had this number, and was killed.
            let _ = std::fs::remove_dir_all(d);
            std::fs::create_dir_all(d).unwrap();
        }
        p
    }

    /// For a test that has sync points fail: a mirror may stand still for 3.5 s, in place of
    /// 10 s. (2.5 s were too few on a busy machine, also while the mirror was there.)
    fn impatient(&self, connections: usize) -> Config {
        let mut c = self.config("sync", "tcp", connections);
        c.volumes.get_mut("v").unwrap().resend_timeout = Duration::from_millis(700);
        c
    }

    fn config(&self, mode: &str, transport: &str, connections: usize) -> Config {
        let [a, b] = free_ports();
        let text = format!(
            r#"
cluster = "test"
[volume.v]
mode = "{mode}"
primary = "a"
{mirror}
connections = {connections}
transport = "{transport}"
resend_timeout = "2s"
[node.a]
address = "{a}"
directory = "{dir}/a"
ring = "{shm}"
log = {{ medium = "disk", size = "4MiB" }}
[node.b]
address = "{b}"
directory = "{dir}/b"
ring = "{shm}"
log = {{ medium = "dram", path = "{shm}/b", size = "4MiB" }}
"#,
            mirror = if mode == "unreplicated" {
                ""
            } else {
                "mirror = \"b\""
            },
            dir = self.dir.display(),
            shm = self.shm.display(),
        );
        Config::parse(&text, Path::new("test.toml")).unwrap_or_else(|e| panic!("{e}"))
    }

    fn bytes(&self, node: &str, file: &str) -> Vec<u8> {
        std::fs::read(self.dir.join(node).join("v").join(file)).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_dir_all(&self.shm);
    }
}

fn attach(c: &Config, node: &str) -> Volume {
    Volume::attach_with(c, node, None, |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

const CREATE: MapFlags = MapFlags {
    create: true,
    atomic: false,
    read_only: false,
    offset: 0,
    fixed_at: 0,
    shared: false,
    untracked: false,
};

/// Stores, then one sync point of two ranges, then a discovered one over all.
fn work(v: &Volume, round: u8) {
    let m = v.map("log", 1 << 20, CREATE).unwrap();
    // SAFETY: the region is mapped, and only this thread uses it.
    let all = unsafe { std::slice::from_raw_parts_mut(m.ptr, m.len) };
    for i in 0..200usize {
        let at = (i * 4096 + 100) % (1 << 20);
        all[at..at + 64].fill(round.wrapping_add(i as u8));
        all[0..8].copy_from_slice(&(i as u64).to_le_bytes());
        let lsn = gmsync(&[(all[at..].as_ptr(), 64), (all.as_ptr(), 8)]).unwrap();
        assert!(lsn > 0);
    }
    for i in 0..64usize {
        all[i * 16_384 + 5000] = round ^ 0x55;
    }
    assert!(msync(m.ptr, m.len).unwrap() > 0);
    // A sync point of 1 MiB, larger than one record.
    all.iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = (i as u8).wrapping_mul(round | 1));
    assert!(msync(m.ptr, m.len).unwrap() > 0);
    unmap(m.ptr, m.len).unwrap();
}

fn expected(round: u8) -> Vec<u8> {
    (0..1usize << 20)
        .map(|i| (i as u8).wrapping_mul(round | 1))
        .collect()
}

fn both(mode: &str, transport: &str, connections: usize) {
    let place = Place::new(&format!("{mode}-{transport}-{connections}"));
    let c = place.config(mode, transport, connections);
    let b: Option<Arc<Node>> =
        (mode != "unreplicated").then(|| node(&c, "b").unwrap_or_else(|e| panic!("{e}")));
    for round in [3u8, 7] {
        let v = attach(&c, "a");
        work(&v, round);
        if mode == "async" {
            // An end waits only for a mirror whose link is up.
            caught_up(&v, mojim_engine::last_lsn());
        }
        v.detach().unwrap_or_else(|e| panic!("{e}"));
        assert!(
            place.bytes("a", "log") == expected(round),
            "a, round {round}"
        );
    }
    if let Some(b) = b {
        b.stop();
        assert!(place.bytes("b", "log") == expected(7), "b");
    }
}

#[test]
fn unreplicated() {
    both("unreplicated", "tcp", 2);
}

#[test]
fn asynchronous() {
    both("async", "tcp", 2);
}

#[test]
fn sync_over_tcp() {
    both("sync", "tcp", 2);
}

#[test]
fn sync_over_shared_memory() {
    both("sync", "shm", 1);
}

#[test]
fn sync_flush() {
    both("sync-flush", "tcp", 1);
}

/// The node that comes back with an empty disk knows no epoch; the copy that it
/// takes has some.
#[test]
fn an_empty_primary_takes_its_mirrors_copy_in_its_first_epoch() {
    let place = Place::new("empty-primary");
    let c = place.config("sync", "tcp", 1);
    let b = node(&c, "b").unwrap_or_else(|e| panic!("{e}"));
    let v = attach(&c, "a");
    work(&v, 3);
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    std::fs::remove_dir_all(place.dir.join("a")).unwrap();
    let v = attach(&c, "a");
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    assert!(place.bytes("a", "log") == expected(3));
    b.stop();
}

/// Without its mirror nothing is committed: a sync point whose call did not wait
/// is the error of each that does, and nothing is rolled back, since nobody knows
/// to what. When the mirror is back all of it is there.
#[test]
fn what_was_begun_without_a_mirror_is_the_error_of_who_waits() {
    let place = Place::new("begun");
    let c = place.impatient(2);
    let start = || node(&c, "b").unwrap();
    let b = start();
    let v = attach(&c, "a");
    let atomic = MapFlags {
        atomic: true,
        ..CREATE
    };
    let m = v.map("f", 1 << 20, atomic).unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    let store = |at: usize, byte: u8| unsafe { m.ptr.add(at).write_volatile(byte) };
    // SAFETY: as above.
    let load = |at: usize| unsafe { m.ptr.add(at).read_volatile() };
    store(0, 1);
    msync(m.ptr, m.len).unwrap();
    let other = v.map("g", 1 << 20, atomic).unwrap();
    msync(other.ptr, other.len).unwrap();
    v.create("h").unwrap();
    v.truncate("h", 4096).unwrap();
    let read_only = MapFlags {
        read_only: true,
        ..MapFlags::default()
    };
    let read = v.map("h", 0, read_only).unwrap();
    b.stop();
    store(1, 2);
    let lsn = msync_async(m.ptr, m.len).unwrap();
    store(2, 3);
    let short = msync_async(m.ptr.wrapping_add(2), 1).unwrap();
    assert!(short > lsn);
    let timeout =
        |r: mojim_engine::Result<u64>| assert!(matches!(r, Err(Error::Timeout(_))), "{r:?}");
    std::thread::scope(|s| {
        let at = m.ptr as usize;
        // Nothing was changed since: these wait for what was begun.
        let of_another = other.ptr as usize;
        let nothing = read.ptr as usize;
        // Once, one of memory that cannot be stored to, or of none, did not wait.
        s.spawn(move || timeout(msync(nothing as *const u8, 4096)));
        s.spawn(move || timeout(msync(of_another as *const u8, 0)));
        s.spawn(move || timeout(msync(of_another as *const u8, 1 << 20)));
        s.spawn(move || timeout(msync(at as *const u8, 1 << 20)));
        s.spawn(|| timeout(v.fsync("f")));
        s.spawn(|| timeout(v.wait(short).map(|()| 0)));
    });
    store(500_000, 4);
    timeout(rollback(m.ptr, m.len).map(u64::from));
    assert_eq!([0, 1, 2, 500_000].map(load), [1, 2, 3, 4]);
    let b = start();
    let mut tries = 0;
    while let Err(e) = rollback(m.ptr, m.len) {
        assert!(matches!(e, Error::Timeout(_)) && tries < 20, "{e}");
        tries += 1;
    }
    assert_eq!([0, 1, 2, 500_000].map(load), [1, 2, 3, 0]);
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    for node in ["a", "b"] {
        let bytes = place.bytes(node, "f");
        assert_eq!([0, 1, 2, 500_000].map(|i| bytes[i]), [1, 2, 3, 0], "{node}");
    }
}

/// What a failed sync point of a region without dirty tracking had taken is in the next one, and
/// the mirror has what the primary has.
#[test]
fn an_untracked_region_outlives_a_failed_sync_point() {
    let place = Place::new("untracked");
    let c = place.impatient(1);
    let b = node(&c, "b").unwrap();
    let v = attach(&c, "a");
    let flags = MapFlags {
        atomic: true,
        untracked: true,
        ..CREATE
    };
    let m = v.map("f", 1 << 20, flags).unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    let store = |at: usize, byte: u8| unsafe { m.ptr.add(at).write_volatile(byte) };
    store(0, 1);
    msync(m.ptr, 1).unwrap();
    b.stop();
    store(1, 2);
    store(500_000, 3);
    let failed = msync(m.ptr, m.len);
    assert!(matches!(failed, Err(Error::Timeout(_))), "{failed:?}");
    let b = node(&c, "b").unwrap();
    store(600_000, 4);
    let mut tries = 0;
    while let Err(e) = msync(m.ptr, m.len) {
        assert!(matches!(e, Error::Timeout(_)) && tries < 20, "{e}");
        tries += 1;
    }
    store(0, 9);
    assert!(rollback(m.ptr, m.len).unwrap());
    // SAFETY: as above.
    assert_eq!(unsafe { m.ptr.read_volatile() }, 1);
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    for node in ["a", "b"] {
        let bytes = place.bytes(node, "f");
        assert_eq!(
            [0, 1, 500_000, 600_000].map(|i| bytes[i]),
            [1, 2, 3, 4],
            "{node}"
        );
    }
}

/// An `MS_ASYNC` whose changes were all in a sync point in doubt began none of its own, and
/// succeeded; a call that waits "for every `MS_ASYNC`", elsewhere, then did not wait for it,
/// and so acknowledged it.
#[test]
fn an_async_sync_of_what_is_in_doubt_is_waited_for() {
    let place = Place::new("doubt-async");
    let c = place.impatient(2);
    let b = node(&c, "b").unwrap();
    let v = attach(&c, "a");
    let m = v.map("f", 1 << 20, CREATE).unwrap();
    let other = v.map("g", 1 << 20, CREATE).unwrap();
    msync(other.ptr, other.len).unwrap();
    b.stop();
    // SAFETY: inside the mapping, which only this thread uses.
    unsafe { m.ptr.write_volatile(1) };
    let timeout =
        |r: mojim_engine::Result<u64>| assert!(matches!(r, Err(Error::Timeout(_))), "{r:?}");
    timeout(msync(m.ptr, m.len));
    assert_eq!(msync_async(m.ptr, m.len).unwrap(), 0);
    timeout(v.fsync("g"));
    timeout(msync(other.ptr, other.len));
    let b = node(&c, "b").unwrap();
    let mut tries = 0;
    while let Err(e) = v.fsync("g") {
        assert!(matches!(e, Error::Timeout(_)) && tries < 20, "{e}");
        tries += 1;
    }
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    assert_eq!(place.bytes("b", "f")[0], 1);
}

/// Once, a truncation that failed for want of the mirror left everything as if it
/// had not been: sync points behind the end that it had asked for were acknowledged,
/// and another truncation found the old size and made no record. Then the mirror
/// came, and the first took it all away.
#[test]
fn a_size_in_doubt_is_nobodys_success() {
    for shared in [false, true] {
        let place = Place::new(if shared { "size-shared" } else { "size" });
        let c = place.impatient(2);
        let start = || node(&c, "b").unwrap();
        let b = start();
        let v = attach(&c, "a");
        let flags = MapFlags {
            atomic: true,
            shared,
            ..CREATE
        };
        const SIZE: u64 = 2 << 20;
        let m = v.map("f", SIZE as usize, flags).unwrap();
        let behind = 1_500_000;
        // SAFETY: inside the mapping, which only this thread uses, where the file
        // has not become shorter.
        let store = |at: usize, byte: u8| unsafe { m.ptr.add(at).write_volatile(byte) };
        store(0, 1);
        store(behind, 1);
        msync(m.ptr, m.len).unwrap();
        b.stop();
        let in_doubt =
            |r: mojim_engine::Result<u64>| assert!(matches!(r, Err(Error::Timeout(_))), "{r:?}");
        in_doubt(v.truncate("f", SIZE / 2).map(|()| 0));
        store(behind, 2);
        let at = m.ptr.wrapping_add(behind);
        in_doubt(msync(at, 1));
        in_doubt(v.truncate("f", SIZE).map(|()| 0));
        if !shared {
            in_doubt(gmsync(&[(m.ptr, 1), (at, 1)]));
            in_doubt(msync(m.ptr, m.len));
            in_doubt(v.fsync("f"));
            in_doubt(v.create("g").map(u64::from));
            in_doubt(v.map("f", 0, flags).map(|_| 0));
        }
        let b = start();
        let mut tries = 0;
        while let Err(e) = v.truncate("f", SIZE) {
            assert!(matches!(e, Error::Timeout(_)) && tries < 20, "{e}");
            tries += 1;
        }
        // It was cut off, and grew again.
        // SAFETY: inside the mapping, which only this thread uses.
        assert_eq!(unsafe { at.read_volatile() }, 0);
        store(behind + 1, 3);
        assert!(msync(m.ptr, m.len).unwrap() > 0);
        v.detach().unwrap_or_else(|e| panic!("{e}"));
        b.stop();
        for node in ["a", "b"] {
            let bytes = place.bytes(node, "f");
            assert_eq!(bytes.len() as u64, SIZE, "{node}");
            assert_eq!(bytes[behind..behind + 2], [0, 3], "{node}");
        }
    }
}

/// Once, an end of the program while a size was in doubt did not even begin to
/// commit what lies before either end. Once, it waited for itself, where all of a
/// mapping lies behind.
#[test]
fn an_end_while_a_size_is_in_doubt_begins_what_is_in_no_doubt() {
    let place = Place::new("size-end");
    let c = place.impatient(2);
    let start = || node(&c, "b").unwrap();
    let b = start();
    let v = attach(&c, "a");
    let shared = MapFlags {
        shared: true,
        ..CREATE
    };
    let m = v.map("f", 2 << 20, shared).unwrap();
    let offset = 3 << 19;
    v.map("f", 4096, MapFlags { offset, ..shared }).unwrap();
    msync(m.ptr, m.len).unwrap();
    b.stop();
    let in_doubt =
        |r: mojim_engine::Result<()>| assert!(matches!(r, Err(Error::Timeout(_))), "{r:?}");
    in_doubt(v.truncate("f", 1 << 20));
    // SAFETY: inside the mapping, which only this thread uses, and the file.
    unsafe { m.ptr.add(500_000).write(7) };
    in_doubt(v.finish());
    drop(v);
    let b = start();
    let v = attach(&c, "a");
    v.fsync("f").unwrap();
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    for node in ["a", "b"] {
        let bytes = place.bytes(node, "f");
        assert_eq!((bytes.len(), bytes[500_000]), (1 << 20, 7), "{node}");
    }
}

/// Waits until the mirror has acknowledged `lsn`.
fn caught_up(v: &Volume, lsn: u64) {
    let has = || {
        v.copies(lsn)
            .iter()
            .any(|c| c.node == "b" && c.level.is_some())
    };
    for _ in 0..6000 {
        if has() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the mirror never has LSN {lsn}: {:?}", v.copies(lsn));
}

/// Where a sync point is: a backup is named too, also where it is away.
#[test]
fn backups_are_named_among_the_copies() {
    let place = Place::new("copies");
    let ports = free_ports::<3>();
    let mut text = String::from(
        "cluster = \"test\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\nbackups = [\"c\"]\nfailover = \"manual\"\n",
    );
    for (name, port) in ["a", "b", "c"].iter().zip(&ports) {
        text += &format!(
            "[node.{name}]\naddress = \"{}\"\ndirectory = \"{}/{name}\"\nring = \"{}\"\nlog = {{ medium = \"disk\", size = \"4MiB\" }}\n",
            port,
            place.dir.display(),
            place.shm.display(),
        );
    }
    let config = Config::parse(&text, Path::new("test.toml")).unwrap();
    let start = |n: &'static str| node(&config, n).unwrap();
    let (b, c) = (start("b"), start("c"));
    let v = attach(&config, "a");
    v.map("f", 4096, CREATE).unwrap();
    let lsn = v.fsync("f").unwrap();
    let levels = |v: &Volume| -> Vec<(String, Option<mojim_engine::Level>)> {
        let all = v.copies(lsn).into_iter();
        all.map(|c| (c.node, c.level)).collect()
    };
    // Until the backup says so: it is asked each time, and may be late another time.
    let mut all = levels(&v);
    for _ in 0..6000 {
        if all[2].1 == Some(mojim_engine::Level::Disk) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        all = levels(&v);
    }
    assert_eq!(
        all[2],
        ("c".into(), Some(mojim_engine::Level::Disk)),
        "{all:?}"
    );
    assert_eq!((&all[0].0[..], &all[1].0[..], all.len()), ("a", "b", 3));
    c.stop();
    assert_eq!(levels(&v)[2], ("c".into(), None));
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
}

/// Once, a spill file that a mirror did not have (it was away, or had confirmed it and
/// removed it as nobody's when it was stopped before the record came) never came
/// again: the record that named it was refused in every session from then on.
#[test]
fn a_spill_file_goes_ahead_of_its_record_in_every_session() {
    let place = Place::new("spill");
    let c = place.config("async", "tcp", 2);
    let start = || node(&c, "b").unwrap();
    let b = start();
    let v = attach(&c, "a");
    const SIZE: usize = 16 << 20;
    let m = v.map("f", SIZE, CREATE).unwrap();
    b.stop();
    // SAFETY: the mapping, which only this thread uses.
    unsafe { std::ptr::write_bytes(m.ptr, 7, SIZE) };
    let lsn = msync(m.ptr, m.len).unwrap();
    let b = start();
    caught_up(&v, lsn);
    // SAFETY: as above.
    unsafe { m.ptr.write(8) };
    let lsn = msync(m.ptr, 1).unwrap();
    caught_up(&v, lsn);
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    let bytes = place.bytes("b", "f");
    assert!(bytes.len() == SIZE && bytes[0] == 8 && bytes[1..].iter().all(|x| *x == 7));
}

/// Once, a name that a mirror had as a directory, whose files were removed, could not
/// become a file's there: the mirror failed, opened its copy again, acknowledged, and
/// failed again; and it could not be promoted.
#[test]
fn a_name_is_a_file_where_it_was_a_directory() {
    let place = Place::new("names");
    let c = place.config("sync", "tcp", 1);
    let b = node(&c, "b").unwrap();
    let v = attach(&c, "a");
    v.create("d/e/f").unwrap();
    v.truncate("d/e/f", 4096).unwrap();
    // Whoever has a file in it keeps it.
    let errno = |r: mojim_engine::Result<bool>| r.unwrap_err().errno();
    assert_eq!(errno(v.create("d")), 21, "EISDIR");
    assert_eq!(errno(v.create("d/e/f/g")), 20, "ENOTDIR");
    v.create("g").unwrap();
    assert_eq!(v.rename("g", "d/e").unwrap_err().errno(), 21, "EISDIR");
    v.remove("d/e/f").unwrap();
    std::fs::remove_dir_all(place.dir.join("a/v/d")).unwrap();
    v.create("d").unwrap();
    v.truncate("d", 4096).unwrap();
    v.remove("d").unwrap();
    v.create("d/h").unwrap();
    v.remove("d/h").unwrap();
    v.rename("g", "d").unwrap();
    v.truncate("d", 100).unwrap();
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
    for node in ["a", "b"] {
        assert_eq!(place.bytes(node, "d").len(), 100, "{node}");
    }
}

/// A name that the primary can have, and the mirror cannot, poisoned the mirror: here its directory's
/// path is longer.
#[test]
fn a_name_that_the_mirror_cannot_have_is_refused_before_there_is_a_record_of_it() {
    let place = Place::new("name-refused");
    let mut c = place.config("sync", "tcp", 1);
    let deep = &mut c.nodes.get_mut("b").unwrap().directory;
    while deep.as_os_str().len() < 3500 {
        deep.push("d".repeat(200));
    }
    let b = node(&c, "b").unwrap();
    let long = vec!["n".repeat(200); 4].join("/");
    let v = attach(&c, "a");
    v.create("short").unwrap();
    let refused = |r: mojim_engine::Result<()>| {
        let e = r.unwrap_err();
        assert_eq!(e.errno(), 36, "ENAMETOOLONG: {e}");
        assert!(e.to_string().contains("node b"), "{e}");
    };
    refused(v.create(&long).map(drop));
    refused(v.rename("short", &long));
    refused(v.map(&long, 4096, CREATE).map(drop));
    let m = v.map("short", 4096, CREATE).unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    unsafe { m.ptr.write_volatile(7) };
    assert!(msync(m.ptr, m.len).unwrap() > 0);
    v.detach().unwrap_or_else(|e| panic!("{e}"));
    b.stop();
}

/// Once, a size that no file can have was committed on both nodes, and then failed on
/// both, at every attach from then on.
#[test]
fn a_size_that_cannot_be_is_refused_before_there_is_a_record_of_it() {
    let place = Place::new("size-refused");
    let c = place.config("sync", "tcp", 1);
    let b = node(&c, "b").unwrap();
    let probe = std::fs::File::create(place.dir.join("probe")).unwrap();
    let size = 1u64 << 62;
    if probe.set_len(size).is_ok() {
        return; // Here it can be.
    }
    for _ in 0..2 {
        let v = attach(&c, "a");
        let m = v.map("f", 1 << 20, CREATE).unwrap();
        let e = v.truncate("f", size).unwrap_err();
        assert_eq!(e.errno(), 27, "EFBIG: {e}");
        let e = v.map("g", size as usize, CREATE).err().unwrap();
        assert!([12, 22, 27].contains(&e.errno()), "{e}");
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { m.ptr.write_volatile(m.ptr.read_volatile() + 1) };
        assert!(msync(m.ptr, m.len).unwrap() > 0);
        v.detach().unwrap_or_else(|e| panic!("{e}"));
    }
    b.stop();
    assert_eq!(place.bytes("b", "f")[0], 2);
}
