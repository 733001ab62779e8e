//! Tests of how a mount shows files: times, links, room, holes.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::mount::Mount;
use mojim_testkit::{await_or, await_that, continue_all, stop_all};

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

const PAGE: u64 = 4096;

/// Has a process go on that was stopped, also where the test fails.
struct Stopped([u32; 1]);

impl Drop for Stopped {
    fn drop(&mut self) {
        continue_all(&self.0);
    }
}

fn open(at: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).open(at).unwrap()
}

/// Programs ask again and again for what is not there: where a header, a module or a journal might lie. Each
/// time the mount was asked. What is asked a second time the kernel answers, also while the mount stands still.
#[test]
fn that_there_is_no_name_is_asked_once() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let at = m.at.join("nothing");
    assert!(!fs::exists(&at).unwrap());
    let mount = [m.process.child.id()];
    std::thread::scope(|s| {
        stop_all(&mount);
        let _goes_on = Stopped(mount);
        let asks = s.spawn(|| fs::exists(&at).unwrap());
        await_that("an answer of the kernel's own", || {
            asks.is_finished().then_some(())
        });
        assert!(!asks.join().unwrap());
    });
    m.end();
}

/// The name that comes, and the call that makes it.
type Way<'a> = (&'static str, &'a dyn Fn(&Path));

/// A name that was asked for before it was there is there from the moment on in which it is made, by whatever
/// call; and it is gone when it is removed.
#[test]
fn a_name_that_was_not_there_is_seen_when_it_comes() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let at = |name: &str| m.at.join(name);
    fs::create_dir(at("dir")).unwrap();
    open(&at("dir/inner"));
    let ways: [Way<'_>; 7] = [
        ("file", &|new| drop(open(new))),
        ("made", &|new| fs::create_dir(new).unwrap()),
        ("link", &|new| fs::hard_link(at("file"), new).unwrap()),
        ("symbolic", &|new| {
            std::os::unix::fs::symlink("x", new).unwrap()
        }),
        ("renamed", &|new| fs::rename(at("file"), new).unwrap()),
        ("pipe", &|new| {
            let mode = Mode::RUSR | Mode::WUSR;
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, new, kind, mode, 0).unwrap();
        }),
        // Of another process.
        ("other", &|new| {
            let made = Command::new("touch").arg(new).status().unwrap();
            assert!(made.success());
        }),
    ];
    for (name, make) in ways {
        let is = || fs::symlink_metadata(at(name)).is_ok();
        assert!(!is() && !is(), "{name}");
        make(&at(name));
        assert!(is(), "{name}");
        if name != "file" {
            let gone = fs::remove_file(at(name)).or_else(|_| fs::remove_dir(at(name)));
            gone.unwrap();
            assert!(!is() && !is(), "{name}");
            let again = open(&at(name));
            assert!(is() && again.metadata().unwrap().nlink() == 1);
        }
    }
    // Names below a directory that comes, and that goes.
    assert!(!fs::exists(at("moved/inner")).unwrap());
    fs::rename(at("dir"), at("moved")).unwrap();
    assert!(fs::exists(at("moved/inner")).unwrap() && !fs::exists(at("dir/inner")).unwrap());
    m.end();
    c.assert_equal();
}

/// A time of modification in the future, set after a write, became the time of change, and stayed it.
#[test]
fn a_future_time_of_modification_is_no_time_of_change() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let f = open(&m.at.join("f"));
    f.write_all_at(&[1; 10], 0).unwrap();
    let future = SystemTime::now() + Duration::from_secs(100_000_000);
    f.set_modified(future).unwrap();
    let changed = || {
        let s = f.metadata().unwrap();
        assert_eq!(s.modified().unwrap(), future);
        SystemTime::UNIX_EPOCH + Duration::from_secs(s.ctime() as u64)
    };
    assert!(changed() < future - Duration::from_secs(1000));
    f.sync_all().unwrap();
    assert!(changed() < future - Duration::from_secs(1000));
    drop(f);
    m.end();
    let m = Mount::new(&c, "a", &[]);
    let s = fs::metadata(m.at.join("f")).unwrap();
    assert_eq!(s.modified().unwrap(), future);
    assert!(s.ctime() < s.mtime() - 1000);
    m.end();
}

/// A directory that was removed while it is open had two links.
#[test]
fn a_removed_directory_has_no_links() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    for way in ["rmdir", "rename"] {
        let at = m.at.join("d");
        fs::create_dir(&at).unwrap();
        let d = File::open(&at).unwrap();
        assert_eq!(d.metadata().unwrap().nlink(), 2);
        if way == "rmdir" {
            fs::remove_dir(&at).unwrap();
        } else {
            fs::create_dir(m.at.join("e")).unwrap();
            fs::rename(m.at.join("e"), &at).unwrap();
        }
        assert_eq!(d.metadata().unwrap().nlink(), 0, "{way}");
    }
    assert_eq!(fs::metadata(&m.at).unwrap().nlink(), 3);
    m.end();
}

/// Ranges of data in a file.
fn ranges(f: &File) -> Vec<(u64, u64)> {
    let (mut at, mut all) = (0, Vec::new());
    while let Ok(data) = rustix::fs::seek(f, SeekFrom::Data(at)) {
        at = rustix::fs::seek(f, SeekFrom::Hole(data)).unwrap();
        all.push((data, at));
    }
    all
}

/// Every file took as much room as it is long, so that `du` and `cp --sparse` took holes for data.
#[test]
fn holes_take_no_room_and_are_found() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let at = m.at.join("f");
    let f = open(&at);
    let (far, len) = (64 << 20, 1 << 30);
    f.set_len(len).unwrap();
    f.write_all_at(&[1; 2 * PAGE as usize], PAGE).unwrap();
    f.write_all_at(&[2; PAGE as usize], far).unwrap();
    let blocks = || fs::metadata(&at).unwrap().blocks();
    assert_eq!(blocks(), 3 * PAGE / 512);
    // There may be a mapping, with bytes that the mount does not know.
    assert_eq!(ranges(&f), [(0, len)]);
    let want = [(PAGE, 3 * PAGE), (far, far + PAGE)];
    let r = File::open(&at).unwrap();
    drop(f);
    // The kernel tells the mount of the last descriptor's end a little later.
    await_or(
        "holes",
        || format!("{:?}", ranges(&r)),
        || (ranges(&r) == want).then_some(()),
    );
    let w = OpenOptions::new().write(true).open(&at).unwrap();
    w.sync_all().unwrap();
    drop(w);
    await_that("the data file", || {
        let data = File::open(c.dir.join("a/v/f")).ok()?;
        (ranges(&data) == want).then_some(())
    });
    await_or(
        "holes",
        || format!("{:?}", ranges(&r)),
        || (ranges(&r) == want).then_some(()),
    );
    assert!(blocks() >= 3 * PAGE / 512 && blocks() < 64, "{}", blocks());
    let copy = c.dir.join("copy");
    let cp = Command::new("cp").args([&at, &copy]).status().unwrap();
    assert!(cp.success());
    assert!(fs::metadata(&copy).unwrap().blocks() < 64);
    assert_eq!(fs::metadata(&copy).unwrap().len(), len);
    // A cut, and what is written over a hole, before they are committed.
    let w = open(&at);
    w.set_len(far).unwrap();
    w.write_all_at(&[3; PAGE as usize], 10 * PAGE).unwrap();
    drop(w);
    let want = [(PAGE, 3 * PAGE), (10 * PAGE, 11 * PAGE)];
    await_or(
        "holes",
        || format!("{:?}", ranges(&r)),
        || (ranges(&r) == want).then_some(()),
    );
    drop(r);
    m.end();
}

/// Any user could list the names and sizes of files in a mount's closed directories: the node's directory,
/// in which the same files lie, was open to all.
#[test]
fn nobody_else_comes_to_the_files_behind_a_mount() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    fs::create_dir(m.at.join("d")).unwrap();
    fs::write(m.at.join("d/f"), b"x").unwrap();
    m.end();
    c.assert_equal();
    for node in ["a", "b"] {
        let volume = fs::metadata(c.dir.join(node).join("v")).unwrap();
        assert_eq!(volume.mode() & 0o7777, 0o700, "{node}");
    }
}

/// What a mount does not have fails as `docs/reference/mount.md` says.
#[test]
fn what_is_not_supported_is_refused_as_documented() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let how = OFlags::TMPFILE | OFlags::RDWR;
    let made = rustix::fs::open(&m.at, how, Mode::RUSR);
    assert_eq!(made.err(), Some(Errno::OPNOTSUPP));
    let f = open(&m.at.join("f"));
    assert_eq!(rustix::fs::ioctl_getflags(&f).err(), Some(Errno::NOTTY));
    // A list with the three entries of a mode.
    let entry = |tag: u16| [&tag.to_le_bytes()[..], &[6, 0], &[0xff; 4]].concat();
    let list = [&2u32.to_le_bytes()[..], &entry(1), &entry(4), &entry(32)].concat();
    let none = rustix::fs::XattrFlags::empty();
    let set = rustix::fs::fsetxattr(&f, "system.posix_acl_access", &list, none);
    assert_eq!(set, Err(Errno::OPNOTSUPP));
    // A name of no namespace was kept, and no other file system would take a copy of it.
    let set = rustix::fs::fsetxattr(&f, "note", b"x", none);
    assert_eq!(set, Err(Errno::OPNOTSUPP));
    drop(f);
    m.end();
}
