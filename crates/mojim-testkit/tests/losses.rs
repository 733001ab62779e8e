//! Changes that `mojim mount` cannot take, or cannot keep.
//!
//! The program that asked for one is told, each time, and nobody else has to pay for it.

// Seen to fail, each by a defect made on purpose or found:
// - the look at what was lost
// - the count of files left
// - the bound on attributes
// - the memory of removed files
// - the write-back and the clearing at the end
// - the skipping of holes
// - the empty file system below a run left out
// - a cut before what may fail
// - mapped stores refused while the log is full
// - a listing by inode
// - set-ID bits after `fallocate`
// - names of root's attributes
// - the exit code of a mount that lost something, and of one whose file without a name did

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::home::Home;
use mojim_testkit::mount::{Mount, Small};
use mojim_testkit::voters;
use mojim_testkit::{await_or, await_that};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

const PAGE: usize = 4096;

/// A mapping of a whole file, shared.
struct Mapping(*mut u8, usize);

impl Mapping {
    fn of(f: &impl AsFd, len: usize) -> Mapping {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a mapping of its own, at a place that the kernel chooses.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, f, 0) };
        Mapping(at.unwrap().cast(), len)
    }

    fn store(&self, page: usize, byte: u8) {
        assert!((page + 1) * PAGE <= self.1);
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { self.0.add(page * PAGE).write_volatile(byte) };
    }

    fn sync(&self) -> Result<(), Errno> {
        // SAFETY: the mapping's own range.
        unsafe { rustix::mm::msync(self.0.cast(), self.1, MsyncFlags::SYNC) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), self.1) };
    }
}

fn open(at: &Path) -> File {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true).open(at).unwrap()
}

/// The kernel learns that the mount wants not to be told of each descriptor that is closed. Until
/// then a child that this process starts, and so closes its descriptors, waits for the mount.
fn no_more_flushes(c: &Home, m: &Mount) {
    let closed = open(&m.at.join("closed"));
    // So that a sync point of another file has nothing to commit, nor to wait for.
    closed.sync_all().unwrap();
    let applied = c.dir.join("a/v/closed");
    await_that("the data file", || applied.exists().then_some(()));
}

fn is_root() -> bool {
    let is = rustix::process::getuid().is_root();
    if !is {
        eprintln!("only root can make a small file system: nothing was tested");
    }
    is
}

/// A store was refused when the kernel wrote it back; the kernel then took the page for clean, and a
/// second msync, once the disk had room again, said that all was committed, while no node had it.
#[test]
fn what_was_stored_and_not_taken_is_not_called_committed_later() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _small = Small::at(c.dir.join("a"), "size=64m");
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let [f, fill, other] = ["f", "fill", "other"].map(|n| open(&m.at.join(n)));
    fill.set_len(1 << 30).unwrap();
    let mut at = 0;
    while fill.write_all_at(&[1; 1 << 20], at).is_ok() {
        fill.sync_all().unwrap();
        at += 1 << 20;
    }
    f.set_len(8 << 20).unwrap();
    let map = Mapping::of(&f, 8 << 20);
    (0..2048).for_each(|page| map.store(page, 7));
    assert_eq!(map.sync(), Err(Errno::NOSPC));
    fill.set_len(0).unwrap();
    fill.sync_all().unwrap();
    // There is room again.
    await_that("room", || other.write_all_at(&[2; 1 << 20], 0).ok());
    other.sync_all().unwrap();
    assert_eq!(map.sync(), Err(Errno::NOSPC));
    assert_eq!(f.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert!(
        m.process.errors().contains("f: bytes"),
        "{}",
        m.process.errors()
    );
    // Who opens it anew sees what is committed, and goes on from there.
    drop((map, f));
    let f = open(&m.at.join("f"));
    let mut first = [9];
    f.read_exact_at(&mut first, 0).unwrap();
    assert_eq!(first, [0]);
    await_that("a sync point", || {
        f.write_all_at(b"again", 0).and_then(|()| f.sync_all()).ok()
    });
    drop((f, fill, other));
    // A mount that had lost what nobody was told of any more said that all was committed.
    let said = m.end_as(1);
    assert!(said.contains("taking all stores into mappings"), "{said}");
}

/// What a file without a name loses is nobody's loss: the mount would end as one that has lost
/// something for good.
#[test]
fn what_a_file_without_a_name_loses_is_no_loss_in_the_end() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _small = Small::at(c.dir.join("a"), "size=64m");
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let [f, fill] = ["f", "fill"].map(|n| open(&m.at.join(n)));
    let pieces = (0..).map(|n| fill.write_all_at(&[1; 1 << 20], n << 20));
    let refused = pieces.map(Result::err).find_map(|e| e).unwrap();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    // As much as the disk has: a refusal may come while some room is left.
    let all = 64 << 20;
    f.set_len(all).unwrap();
    fs::remove_file(m.at.join("f")).unwrap();
    let map = Mapping::of(&f, all as usize);
    (0..all as usize / PAGE).for_each(|page| map.store(page, 7));
    assert_eq!(map.sync(), Err(Errno::NOSPC));
    drop((map, f, fill));
    m.end();
}

/// Two bugs of the time in which nothing can be begun, since the mirror is away and the log is full.
///
/// A truncation that failed had cut the file all the same, and the next sync point of whomever
/// committed that. And what a program had stored into a mapping was dropped, though no disk had
/// failed, and though who writes by calls has only to try again.
#[test]
fn what_fails_while_the_mirror_is_away_has_changed_nothing() {
    let c = Cluster::new(SYNC);
    let text = c.text(SYNC, "e2e");
    let text = text.replace("\"5s\"", "\"700ms\"\nresend_attempts = 2");
    c.configure(&text.replace("4MiB", "1MiB"));
    let _a = c.node("a");
    let mut b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let [f, more] = ["f", "more"].map(|n| open(&m.at.join(n)));
    f.write_all_at(&[1; 2 * PAGE], 0).unwrap();
    // The mirror may be late: it gets little more than a second.
    await_that("a sync point", || f.sync_all().ok());
    let map = Mapping::of(&f, 2 * PAGE);
    b.kill();
    let timed_out = |e: std::io::Error| assert_eq!(e.raw_os_error(), Some(libc::ETIMEDOUT), "{e}");
    let writes = (0..).map(|n| more.write_all_at(&[2; 1 << 16], n << 16));
    timed_out(writes.map(Result::err).find_map(|e| e).unwrap());
    map.store(0, 7);
    assert_eq!(map.sync(), Err(Errno::TIMEDOUT));
    let target = "t".repeat(4000);
    let names = (0..).map(|n| std::os::unix::fs::symlink(&target, m.at.join(n.to_string())));
    timed_out(names.map(Result::err).find_map(|e| e).unwrap());
    timed_out(f.set_len(0).unwrap_err());
    let _b = c.node("b");
    await_that("the mirror's return", || map.sync().ok());
    drop((map, f, more));
    m.end();
    let want = [&[7][..], &[1; 2 * PAGE - 1]].concat();
    for node in ["a", "b"] {
        let at = c.dir.join(node).join("v/f");
        await_or(
            "the file's bytes",
            || format!("{node}: {:?}", fs::metadata(&at)),
            || (fs::read(&at).unwrap() == want).then_some(()),
        );
    }
}

/// The names in `dir`, of which each was there all the time; `within` is called when the first is known.
fn names(dir: &Path, within: impl FnOnce()) -> Vec<String> {
    let mut all = fs::read_dir(dir).unwrap();
    let first = all.next().unwrap();
    within();
    let all = std::iter::once(first).chain(all);
    all.map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// A name that was replaced while a program listed the directory was left out of the listing, though
/// it was there before, meanwhile and afterwards.
#[test]
fn a_name_that_is_replaced_meanwhile_is_listed() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let dir = m.at.join("d");
    fs::create_dir(&dir).unwrap();
    let many = 4000;
    (0..many).for_each(|n| drop(open(&dir.join(format!("{n:060}")))));
    drop(open(&m.at.join("new")));
    let last = format!("{:060}", many - 1);
    let listed = names(&dir, || {
        fs::rename(m.at.join("new"), dir.join(&last)).unwrap();
    });
    assert_eq!(listed.len(), many);
    assert!(listed.contains(&last));
    m.end();
}

/// Does something as a user who is not root, in a thread of its own.
fn as_nobody<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let nobody = rustix::process::Uid::from_raw(65534);
    std::thread::scope(|s| {
        let t = s.spawn(|| {
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            f()
        });
        t.join().unwrap()
    })
}

/// Zeros that another user made `fallocate` put into a set-user-ID program left it set-user-ID; and
/// every user was shown the names of attributes that are root's.
#[test]
fn another_user_keeps_no_set_id_bit_and_sees_no_trusted_name() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let f = open(&m.at.join("f"));
    f.write_all_at(&[1; PAGE], 0).unwrap();
    for name in ["trusted.t", "user.u"] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::fsetxattr(&f, name, b"x", flags).unwrap();
    }
    let names = || {
        let mut all = [0; 64];
        let n = rustix::fs::flistxattr(&f, &mut all).unwrap();
        String::from_utf8(all[..n].to_vec()).unwrap()
    };
    assert_eq!(names(), "trusted.t\0user.u\0");
    assert_eq!(as_nobody(names), "user.u\0");
    let kinds = [
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        FallocateFlags::ZERO_RANGE,
        FallocateFlags::empty(),
    ];
    for kind in kinds {
        let mode = || rustix::fs::fstat(&f).unwrap().st_mode & 0o7777;
        rustix::fs::fchmod(&f, Mode::from_raw_mode(0o4755)).unwrap();
        rustix::fs::fallocate(&f, kind, 0, 16).unwrap();
        assert_eq!(mode(), 0o4755);
        as_nobody(|| rustix::fs::fallocate(&f, kind, 0, 16).unwrap());
        assert_eq!(mode(), 0o755, "{kind:?}");
    }
    drop(f);
    m.end();
}

/// The same where another node has become the primary: the first msync failed, and the second did not.
#[test]
fn what_was_stored_after_a_promotion_elsewhere_is_never_called_committed() {
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let f = open(&m.at.join("f"));
    f.set_len(PAGE as u64).unwrap();
    f.sync_all().unwrap();
    let map = Mapping::of(&f, PAGE);
    no_more_flushes(&c, &m);
    let process = [a.child.id(), m.process.child.id()];
    mojim_testkit::stop_all(&process);
    c.promote("b");
    mojim_testkit::continue_all(&process);
    await_or(
        "EROFS",
        || c.logs(),
        || {
            map.store(0, 7);
            (map.sync() == Err(Errno::ROFS)).then_some(())
        },
    );
    assert_eq!(map.sync(), Err(Errno::ROFS));
    assert_eq!(f.sync_all().unwrap_err().raw_os_error(), Some(libc::EROFS));
}

/// A mount that had waited lost the primary's role while a program had a file open: it went on
/// showing bytes, half of them of the old primary and half of the new one.
#[test]
fn a_mount_that_is_the_primarys_no_longer_shows_nothing() {
    let c = voters::Cluster::new("sync", "disk");
    let a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let mut m = Mount::waiting(&c, "a");
    assert!(m.process.line().unwrap().contains("is mounted at"));
    c.await_view("a", "a", Some("b"));
    let f = open(&m.at.join("f"));
    f.write_all_at(b"old", 0).unwrap();
    f.sync_all().unwrap();
    no_more_flushes(&c, &m);
    let process = [a.child.id(), m.process.child.id()];
    mojim_testkit::stop_all(&process);
    c.await_view("b", "b", None);
    mojim_testkit::continue_all(&process);
    await_or(
        "an error",
        || c.logs(),
        || {
            let e = f.read_exact_at(&mut [0; 3], 0).err()?;
            (e.raw_os_error() == Some(libc::ESTALE)).then_some(())
        },
    );
}

/// The first file that could not be written back at the end kept all others from it, and the command
/// said nothing: one whose path is longer than a path may be was enough.
#[test]
fn the_end_of_a_mount_commits_the_stores_of_every_file() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let (flags, mode) = (OFlags::RDONLY | OFlags::DIRECTORY, Mode::RWXU);
    let mut dir = rustix::fs::open(&m.at, flags, Mode::empty()).unwrap();
    let name = "d".repeat(250);
    for _ in 0..20 {
        rustix::fs::mkdirat(&dir, &*name, mode).unwrap();
        dir = rustix::fs::openat(&dir, &*name, flags, Mode::empty()).unwrap();
    }
    let both = OFlags::RDWR | OFlags::CREATE;
    let far = (0..20).map(|n| rustix::fs::openat(&dir, format!("{n}"), both, mode).unwrap());
    let far: Vec<File> = far.map(File::from).collect();
    let near: Vec<File> = (0..5).map(|n| open(&m.at.join(format!("{n}")))).collect();
    let maps: Vec<Mapping> = far
        .iter()
        .chain(&near)
        .map(|f| {
            f.set_len(PAGE as u64).unwrap();
            let map = Mapping::of(f, PAGE);
            map.store(0, 7);
            map
        })
        .collect();
    drop(dir);
    m.end();
    drop(maps);
    let m = Mount::new(&c, "a", &[]);
    for n in 0..5 {
        assert_eq!(fs::read(m.at.join(format!("{n}"))).unwrap()[0], 7, "{n}");
    }
    m.end();
}

/// Each new file takes one of the disk's: when there were no more, an acknowledged sync point could not be
/// applied, and the volume not be opened any more.
#[test]
fn a_disk_that_has_no_more_files_refuses_new_ones() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _small = Small::at(c.dir.join("a"), "size=256m,nr_inodes=400");
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let mut made = 0;
    let e = loop {
        match File::create_new(m.at.join(format!("{made}"))).and_then(|f| f.sync_all()) {
            Ok(()) => made += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(e.raw_os_error(), Some(libc::ENOSPC), "after {made}: {e}");
    assert!((100..400).contains(&made), "{made}");
    // What makes room is not refused.
    fs::remove_file(m.at.join("0")).unwrap();
    File::open(&m.at).unwrap().sync_all().unwrap();
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    assert_eq!(fs::read_dir(&m.at).unwrap().count(), made - 1);
    m.end();
    c.assert_equal();
}

/// Bytes of files that were made and removed stayed in memory until the next sync point, uncounted.
#[test]
fn removed_files_take_no_memory() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let before = m.process.peak();
    let at = m.at.join("temporary");
    for n in 0..200 {
        fs::write(&at, vec![n as u8 + 1; 2 << 20]).unwrap();
        fs::remove_file(&at).unwrap();
    }
    let more = m.process.peak() - before;
    assert!(more < 200 << 20, "{} MiB", more >> 20);
    m.end();
}

/// Any user could fill the memory of the mount, and of every later one, with attributes of one file.
#[test]
fn a_file_has_no_more_attributes_than_have_room() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let f = open(&m.at.join("f"));
    let set = |n: usize, bytes: usize| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::fsetxattr(&f, format!("user.{n}"), &vec![1; bytes], flags)
    };
    let refused = (0..10).find_map(|n| set(n, 60_000).err());
    assert_eq!(refused, Some(Errno::NOSPC));
    assert_eq!(set(0, 10), Ok(()));
    let many = (100..10_000).find_map(|n| set(n, 1).err().map(|e| (n, e)));
    assert_eq!(many.unwrap().1, Errno::NOSPC);
    assert!(rustix::fs::flistxattr(&f, &mut vec![0; 64 << 10]).is_ok());
    drop(f);
    m.end();
}

/// A hole of any length was filled with zeros, through both nodes' logs, until their disks were full.
#[test]
fn punching_a_hole_stores_nothing_where_there_is_one() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let f = open(&m.at.join("f"));
    f.set_len(1 << 40).unwrap();
    for at in [0, 1 << 30] {
        f.write_all_at(&[5; 8192], at).unwrap();
    }
    f.sync_all().unwrap();
    await_that("the data file", || {
        let mut there = [0];
        let data = File::open(c.dir.join("a/v/f")).ok()?;
        data.read_exact_at(&mut there, 1 << 30).ok()?;
        (there == [5]).then_some(())
    });
    f.write_all_at(&[6; 8192], 2 << 30).unwrap();
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&f, how, 4096, 1 << 40).unwrap();
    let byte = |at| {
        let mut one = [9];
        f.read_exact_at(&mut one, at).unwrap();
        one[0]
    };
    assert_eq!([0, 4095, 4096, 1 << 30, 2 << 30].map(byte), [5, 5, 0, 0, 0]);
    f.sync_all().unwrap();
    drop(f);
    m.end();
    let data = fs::metadata(c.dir.join("a/v/f")).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&data) < 1 << 12);
}

/// Below the mount that `mojim run` gives a program lies nothing that can be written to.
#[test]
fn below_the_mount_of_a_run_there_is_nothing_to_write_to() {
    if !is_root() {
        return;
    }
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let dir = c.dir.join("a/v");
    let script = format!(
        "cd / && umount -l {0} && echo x > {0}/f; echo $?; ls {0}",
        dir.display()
    );
    let out = Command::new(mojim_testkit::mojim_path())
        .args([
            "run",
            "--config",
            c.file().to_str().unwrap(),
            "--name",
            "a",
            "--",
            "sh",
            "-c",
            &script,
        ])
        .output()
        .unwrap();
    let said = mojim_testkit::text(&out.stderr);
    assert!(said.contains("Read-only file system"), "{said}");
    assert!(!mojim_testkit::text(&out.stdout).starts_with("0\n"));
    assert!(!dir.join("f").exists());
}
