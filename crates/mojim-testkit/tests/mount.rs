//! `mojim mount`, end to end: a volume as a directory, with programs that know nothing of Mojim.
//!
//! The tests compare what a plain directory shows, and what was synced, after kills and on the
//! other node.

// Mounts that read, seen to fail, each by a defect made on purpose or found:
// - what an answer changes in bytes before it left out, in a read or in the file of names
// - numbers that follow the order of the files
// - a write-open that is not refused
// - a mount that does not go on

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::home::Home;
use mojim_testkit::mount::{Mount, Small};
use mojim_testkit::rng::Rng;
use mojim_testkit::voters;
use mojim_testkit::{await_or, await_that, text};

fn sync_dir(dir: &Path) {
    File::open(dir).unwrap().sync_all().unwrap();
}

/// Everything that a directory shows, by path.
fn shows(dir: &Path) -> BTreeMap<PathBuf, String> {
    shows_now(dir).unwrap()
}

/// The same of a directory that may change meanwhile.
fn shows_now(dir: &Path) -> io::Result<BTreeMap<PathBuf, String>> {
    fn look(top: &Path, at: &Path, all: &mut BTreeMap<PathBuf, String>) -> io::Result<()> {
        for e in fs::read_dir(at)? {
            let path = e?.path();
            let m = fs::symlink_metadata(&path)?;
            let mut said = format!("{:o}", m.mode());
            if m.is_dir() {
                look(top, &path, all)?;
            } else if m.is_symlink() {
                said += &format!(" -> {:?}", fs::read_link(&path)?);
            } else {
                let bytes = fs::read(&path)?;
                if bytes.len() as u64 != m.len() {
                    return Err(io::Error::other("it has another length than bytes"));
                }
                let sum = bytes.iter().enumerate().fold(7u64, |s, (i, b)| {
                    s.wrapping_mul(31).wrapping_add(i as u64 ^ u64::from(*b))
                });
                said += &format!(" {} {} {sum:x}", m.len(), m.nlink());
            }
            all.insert(path.strip_prefix(top).unwrap().to_owned(), said);
        }
        Ok(())
    }
    let mut all = BTreeMap::new();
    look(dir, dir, &mut all)?;
    Ok(all)
}

/// Small writes, creation by `fopen`, truncation by `>`, mkstemp, links, attributes: each of them
/// was refused, or stayed on one node, when the volume was reached by an interposer alone.
#[test]
fn what_is_synced_in_a_mount_is_there_after_a_kill_and_on_the_other_node() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let mut b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let at = m.at.clone();
    fs::create_dir_all(at.join("d/e/empty")).unwrap();
    fs::write(at.join("d/e/f"), "once").unwrap();
    fs::write(at.join("d/e/f"), "twice").unwrap();
    fs::hard_link(at.join("d/e/f"), at.join("d/other")).unwrap();
    symlink("e/f", at.join("d/link")).unwrap();
    fs::set_permissions(at.join("d/e/f"), fs::Permissions::from_mode(0o4710)).unwrap();
    fs::write(at.join("gone"), "gone").unwrap();
    fs::write(at.join("temporary"), "new").unwrap();
    fs::rename(at.join("temporary"), at.join("gone")).unwrap();
    fs::rename(at.join("d/e"), at.join("d/moved")).unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    fs::write(at.join(odd), "not UTF-8").unwrap();
    let deep = ["x"; 20].map(|x| x.repeat(200)).join("/");
    fs::create_dir_all(at.join(&deep)).unwrap();
    let far = File::create(at.join(&deep).join("far")).unwrap();
    (&far).write_all(b"away").unwrap();
    for f in ["d/moved/f", "gone"] {
        File::open(at.join(f)).unwrap().sync_all().unwrap();
    }
    File::open(at.join(odd)).unwrap().sync_all().unwrap();
    far.sync_all().unwrap();
    let want = shows(&at);
    // Not synced: it may be there or not, with all of its bytes or none.
    fs::write(at.join("unsynced"), "later").unwrap();
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    let mut got = shows(&at);
    got.remove(Path::new("unsynced"));
    assert_eq!(got, want);
    fs::write(at.join("last"), "at the end").unwrap();
    let want = shows(&at);
    m.end();
    c.assert_equal();
    c.promote("b");
    let m = Mount::new(&c, "b", &[]);
    assert_eq!(shows(&m.at), want);
    let inode = |f: &str| fs::metadata(m.at.join(f)).unwrap().ino();
    assert_eq!(inode("d/moved/f"), inode("d/other"));
    m.end();
    b.kill();
}

/// One step on two directories alike.
fn step(rng: &mut Rng, mount: &Path, plain: &Path, open: &mut Vec<[File; 2]>) {
    let name = |rng: &mut Rng| {
        let dirs = ["", "p/", "p/q/", "r/"];
        format!(
            "{}{}",
            rng.pick(&dirs),
            rng.pick(&["f", "g", "h", "p", "q"])
        )
    };
    let (one, two) = (name(rng), name(rng));
    let what = rng.below(14);
    let (at, len) = (rng.below(40_000), 1 + rng.below(9000) as usize);
    let fill = rng.next() as u8;
    let mut outcomes = Vec::new();
    let mut opened = Vec::new();
    for dir in [mount, plain] {
        let (one, two) = (dir.join(&one), dir.join(&two));
        let done: io::Result<()> = match what {
            0 => fs::create_dir(&one),
            1 => fs::remove_dir(&one),
            2 => fs::remove_file(&one),
            3 | 4 => fs::rename(&one, &two),
            5 => fs::hard_link(&one, &two),
            6 => symlink("f", &one),
            7 => fs::write(&one, vec![fill; len]),
            8 => {
                let f = OpenOptions::new().write(true).open(&one);
                f.and_then(|f| f.set_len(at))
            }
            9 => fs::set_permissions(
                &one,
                fs::Permissions::from_mode(0o600 | u32::from(fill) & 0o77),
            ),
            10 => File::open(&one).and_then(|f| f.sync_all()),
            11 => {
                let f = OpenOptions::new().read(true).write(true).open(&one);
                f.map(|f| opened.push(f))
            }
            _ => {
                let f = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(&one);
                f.and_then(|f| f.write_all_at(&vec![fill; len], at))
            }
        };
        outcomes.push(done.map_err(|e| e.raw_os_error()));
    }
    assert_eq!(outcomes[0], outcomes[1], "{what} {one} {two}");
    if let Ok(pair) = <[File; 2]>::try_from(opened) {
        open.push(pair);
    }
    // Files that are open, of which some have lost their names.
    if open.len() > 5 {
        open.remove(rng.below(5) as usize);
    }
    if let Some(pair) = open.last() {
        let read = pair.each_ref().map(|f| {
            f.write_all_at(&[fill; 100], at).unwrap();
            let mut b = vec![0; 50_000];
            let n = f.read_at(&mut b, 0).unwrap();
            b.truncate(n);
            b
        });
        assert!(read[0] == read[1], "an open file");
    }
}

/// A mount beside a plain directory: the same calls have the same outcomes, and show the same,
/// also after the mount has ended or was killed behind a sync of everything.
#[test]
fn a_mount_behaves_as_a_plain_directory_does() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let plain = c.dir.join("plain");
    fs::create_dir(&plain).unwrap();
    let mut rng = Rng::new(4);
    for round in 0..6 {
        // A short interval, so that much is committed that nobody synced.
        let m = Mount::new(
            &c,
            "a",
            &["--commit-interval", "0.05", "--atomic", "volume"],
        );
        assert_eq!(shows(&m.at), shows(&plain), "round {round}");
        let mut open = Vec::new();
        for _ in 0..400 {
            step(&mut rng, &m.at, &plain, &mut open);
        }
        drop(open);
        assert_eq!(shows(&m.at), shows(&plain), "round {round}");
        match round % 2 {
            0 => m.end(),
            _ => {
                sync_dir(&m.at);
                m.kill();
            }
        }
    }
    c.assert_equal();
}

/// A file of 64 pages, all written anew before each fsync, of which the mount is killed: it has
/// what the last fsync that returned had, or the next one, and never parts of two.
#[test]
fn an_fsync_is_atomic_when_the_mount_is_killed() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let mut from = 0;
    for round in 0..6u64 {
        let m = Mount::new(&c, "a", &[]);
        let path = m.at.join("whole");
        let all = fs::read(&path).unwrap_or_default();
        let first = all.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        let words = all
            .chunks_exact(8)
            .map(|w| u64::from_le_bytes(w.try_into().unwrap()));
        assert!(
            words.clone().all(|w| w == first),
            "round {round}: parts of two"
        );
        assert!(first >= from, "round {round}: {first} of {from}");
        assert!(first <= from + 1, "round {round}: {first} of {from}");
        let done = AtomicU64::new(first);
        std::thread::scope(|s| {
            let done = &done;
            s.spawn(move || {
                let (mut rng, mut pages) = (Rng::new(round), Vec::from_iter(0..64));
                let Ok(f) = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(&path)
                else {
                    return;
                };
                for n in first + 1.. {
                    let page: Vec<u8> = std::iter::repeat_n(n.to_le_bytes(), 512)
                        .flatten()
                        .collect();
                    // Also the last first: then the file's size comes before its bytes.
                    rng.shuffle(&mut pages);
                    let mut pages = pages.iter();
                    let written = pages.try_for_each(|p| f.write_all_at(&page, p * 4096));
                    if written.and_then(|()| f.sync_all()).is_err() {
                        return;
                    }
                    done.store(n, SeqCst);
                }
            });
            await_or("sync points", String::new, || {
                (done.load(SeqCst) >= first + 20 + round * 7).then_some(())
            });
            m.kill();
        });
        from = done.into_inner();
    }
    c.assert_equal();
}

/// Another node has taken over: what a program changes here fails, and says why; it was
/// acknowledged before, and silently lost.
#[test]
fn a_mount_whose_node_was_replaced_is_read_only() {
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    fs::write(m.at.join("f"), "first").unwrap();
    sync_dir(&m.at);
    File::open(m.at.join("f")).unwrap().sync_all().unwrap();
    a.signal("STOP");
    m.process.signal("STOP");
    c.promote("b");
    let b = Mount::new(&c, "b", &[]);
    assert_eq!(fs::read(b.at.join("f")).unwrap(), b"first");
    a.signal("CONT");
    m.process.signal("CONT");
    let f = OpenOptions::new().write(true).open(m.at.join("f")).unwrap();
    let rofs = io::Error::from_raw_os_error(30).raw_os_error();
    await_or(
        "EROFS",
        || c.logs(),
        || {
            let e = f
                .write_all_at(b"second", 0)
                .and_then(|()| f.sync_all())
                .err()?;
            (e.raw_os_error() == rofs).then_some(())
        },
    );
    assert_eq!(
        fs::create_dir(m.at.join("d")).unwrap_err().raw_os_error(),
        rofs
    );
    assert_eq!(fs::read(b.at.join("f")).unwrap(), b"first");
    b.end();
}

/// Three voters: the node of the primary's mount is lost, and the other mount, which waited, has
/// all that was synced. Until then nothing can be stored into its directory: it would have stayed
/// there, in the bare directory below, on this machine alone.
#[test]
fn a_mount_that_waits_takes_over() {
    let c = voters::Cluster::new("sync", "disk");
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let mut first = Mount::waiting(&c, "a");
    assert!(first.process.line().unwrap().contains("is mounted at"));
    c.await_view("a", "a", Some("b"));
    let mut second = Mount::waiting(&c, "b");
    await_or(
        "the second's file system",
        || c.logs(),
        || {
            let e = fs::write(second.at.join("early"), "").err()?;
            (e.raw_os_error() == Some(30)).then_some(())
        },
    );
    fs::write(first.at.join("f"), "synced").unwrap();
    File::open(first.at.join("f")).unwrap().sync_all().unwrap();
    first.process.kill();
    a.kill();
    assert!(second.process.line().unwrap().contains("is mounted at"));
    assert_eq!(fs::read(second.at.join("f")).unwrap(), b"synced");
    fs::write(second.at.join("g"), "goes on").unwrap();
    File::open(second.at.join("g")).unwrap().sync_all().unwrap();
    second.end();
}

/// The mount was killed while it waited: the empty directory over its own stayed, one more each time.
#[test]
fn a_killed_mount_that_waits_leaves_nothing_over_its_directory() {
    let c = voters::Cluster::new("sync", "disk");
    let is_over = |m: &Mount| {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        mounts.contains(m.at.to_str().unwrap())
    };
    let mut m = Mount::waiting(&c, "b");
    await_or("its file system", || c.logs(), || is_over(&m).then_some(()));
    let at = m.at.clone();
    m.process.kill();
    m.over = true;
    let gone = || {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        (!mounts.contains(at.to_str().unwrap())).then_some(())
    };
    await_or("its end", || c.logs(), gone);
    // Of one that was killed together with the process that takes it away.
    let mut mount = std::process::Command::new("mount");
    let left = "mojim:waiting:4194304";
    mount.args(["-t", "tmpfs", "-o", "ro", left]).arg(&at);
    assert!(mount.status().unwrap().success());
    let mut m = Mount::waiting(&c, "b");
    let mounts = || fs::read_to_string("/proc/mounts").unwrap();
    await_or(
        "the one of before",
        || c.logs(),
        || (is_over(&m) && !mounts().contains(left)).then_some(()),
    );
    m.process.signal("TERM");
    assert_eq!(m.process.wait(), Some(0));
    m.over = true;
    await_or("its end", || c.logs(), gone);
}

/// After a kill of the mount the mirror was busy with what that had begun, and the next mount was
/// refused, twice, after three seconds each: it waits, and says for whom.
#[test]
fn a_mount_waits_for_a_mirror_that_is_slow() {
    let c = Cluster::new(SYNC);
    let text = fs::read_to_string(c.file()).unwrap();
    let usual = "resend_timeout = \"5s\"\n";
    assert!(text.contains(usual));
    c.configure(&text.replace(usual, "resend_timeout = \"500ms\"\nresend_attempts = 2\n"));
    let _a = c.node("a");
    let b = c.node("b");
    b.signal("STOP");
    let at = c.dir.join("at-a");
    fs::create_dir_all(&at).unwrap();
    let args = ["--name", "a", at.to_str().unwrap()];
    let mut process = c.start("mount", &args, "mount-a");
    await_or(
        "its wait",
        || process.errors(),
        || process.errors().contains("waiting: ").then_some(()),
    );
    b.signal("CONT");
    let line = process.line();
    assert!(
        line.as_ref().is_some_and(|l| l.contains("is mounted at")),
        "{}",
        process.errors()
    );
    Mount {
        process,
        at,
        over: false,
    }
    .end();
}

/// A program has a file open, and has stored into another by a mapping, while the mount is asked
/// to end: everything is committed, and the directory goes; it was left behind dead, and the
/// command failed, or what was stored was missing.
#[test]
fn a_mount_ends_under_a_program_that_uses_it() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let at = m.at.clone();
    let mut f = File::create(at.join("f")).unwrap();
    f.write_all(b"open").unwrap();
    let how = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .clone();
    let mapped = how.open(at.join("mapped")).unwrap();
    mapped.set_len(4096).unwrap();
    // SAFETY: a mapping of its own at a place that the kernel chooses, of a file that is as long.
    unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let p = libc::mmap(
            std::ptr::null_mut(),
            4096,
            prot,
            flags,
            mapped.as_raw_fd(),
            0,
        );
        assert_ne!(p, libc::MAP_FAILED);
        p.cast::<u8>().write(7);
    }
    m.end();
    assert!(fs::read_dir(&at).unwrap().next().is_none());
    assert!(f.write_all(b"lost").and_then(|()| f.sync_all()).is_err());
    let m = Mount::new(&c, "a", &[]);
    assert_eq!(fs::read(m.at.join("f")).unwrap(), b"open");
    assert_eq!(fs::read(m.at.join("mapped")).unwrap()[0], 7);
    m.end();
}

/// A directory was removed while a program used it: its node was committed without a name, and
/// after a kill no mount would read the file of names any more.
#[test]
fn a_directory_that_was_removed_in_use_keeps_no_mount_away() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let dir = |name: &str| {
        let path = m.at.join(name);
        fs::create_dir(&path).unwrap();
        File::open(&path).unwrap()
    };
    let (_removed, _replaced) = (dir("removed"), dir("replaced"));
    dir("other").sync_all().unwrap();
    fs::remove_dir(m.at.join("removed")).unwrap();
    fs::rename(m.at.join("other"), m.at.join("replaced")).unwrap();
    sync_dir(&m.at);
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    let shown = shows(&m.at);
    assert_eq!(shown.keys().collect::<Vec<_>>(), [Path::new("replaced")]);
    m.end();
}

/// A link, and a directory that was renamed, came with the bytes that the last sync point of
/// their files had.
#[test]
fn no_name_comes_without_the_bytes_it_had() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    fs::create_dir(m.at.join("d")).unwrap();
    for name in ["f", "d/g"] {
        fs::write(m.at.join(name), "old").unwrap();
    }
    sync_dir(&m.at);
    for name in ["f", "d/g"] {
        let f = OpenOptions::new().write(true).open(m.at.join(name));
        f.unwrap().write_all_at(b"new", 0).unwrap();
    }
    fs::hard_link(m.at.join("f"), m.at.join("linked")).unwrap();
    fs::remove_file(m.at.join("f")).unwrap();
    fs::rename(m.at.join("d"), m.at.join("e")).unwrap();
    sync_dir(&m.at);
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    for name in ["linked", "e/g"] {
        assert_eq!(fs::read(m.at.join(name)).unwrap(), b"new", "{name}");
    }
    m.end();
}

/// What waited was bounded in bytes alone: with large logs hundreds of thousands of names went in one
/// sync point, and a node that took over then had to apply all of them before it served.
#[test]
fn many_names_are_committed_early() {
    let c = Cluster::new(SYNC);
    let text = fs::read_to_string(c.file()).unwrap();
    c.configure(&text.replace("4MiB", "64MiB"));
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    fs::create_dir(m.at.join("d")).unwrap();
    sync_dir(&m.at);
    let last = || c.says("a")["last_lsn"].as_u64().unwrap();
    let make = |names: std::ops::Range<u32>| {
        for n in names {
            File::create(m.at.join(format!("d/{n}"))).unwrap();
        }
    };
    let before = last();
    make(0..1000);
    assert_eq!(last(), before, "few wait for a sync point");
    make(1000..17_000);
    await_that("the early commit", || (last() > before).then_some(()));
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    assert!(fs::read_dir(m.at.join("d")).unwrap().count() > 16_000);
    m.end();
}

/// A file was made as long as it will be, as databases do, and its holes were filled: nobody
/// looked whether the disk had room, every fsync was acknowledged, and the copy could not be
/// opened any more once that was to be applied.
#[test]
fn a_disk_without_room_refuses_what_fills_a_hole() {
    if !rustix::process::getuid().is_root() {
        eprintln!("only root can make a file system of 64 MiB: nothing was tested");
        return;
    }
    let c = Cluster::new(SYNC);
    let _small = Small::at(c.dir.join("a"), "size=64m");
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &[]);
    let f = File::create(m.at.join("f")).unwrap();
    f.set_len(1 << 30).unwrap();
    let piece = |n: u64| vec![n as u8 + 1; 1 << 20];
    let mut held = 0;
    let e = loop {
        if let Err(e) = f.write_all_at(&piece(held), held << 20) {
            break e;
        }
        f.sync_all().unwrap();
        held += 1;
    };
    assert_eq!(e.raw_os_error(), Some(libc::ENOSPC), "{e}");
    assert!((8..60).contains(&held), "{held} MiB");
    // What is there already has its room, once it is applied.
    await_that("a write that needs no room", || {
        f.write_all_at(&piece(100), 0).ok()
    });
    f.sync_all().unwrap();
    m.kill();
    let m = Mount::new(&c, "a", &[]);
    let f = File::open(m.at.join("f")).unwrap();
    for n in 0..held {
        let mut got = vec![0; 1 << 20];
        f.read_exact_at(&mut got, n << 20).unwrap();
        assert!(got == piece(if n == 0 { 100 } else { n }), "MiB {n}");
    }
    m.end();
}

/// What is refused, and how.
#[test]
fn a_mount_says_what_it_cannot_do() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let refused = |args: &[&str]| {
        let out = c.mojim("mount", args);
        assert_ne!(out.status.code(), Some(0), "{args:?}");
        text(&out.stderr)
    };
    let own = c.dir.join("a");
    let own = own.to_str().unwrap();
    assert!(refused(&["--name", "a", own]).contains("mount elsewhere"));
    assert!(refused(&["--name", "a", "/nowhere/at/all"]).contains("make it first"));
    assert!(refused(&["--name", "z", "/tmp"]).contains('z'));
    let m = Mount::new(&c, "a", &[]);
    // The mount is the only user of its volume.
    let e = c.try_program("a", &["--entries", "1"]).err().unwrap();
    assert!(e.contains("only one process can be attached"), "{e}");
    let e = fs::create_dir(m.at.join(".mount")).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
    assert!(!fs::exists(m.at.join(".mount")).unwrap());
    let e = fs::write(m.at.join("n".repeat(256)), "").unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::InvalidFilename);
    m.end();
}

/// A call that changes something was refused because the directory only shows.
/// A writer to a volume, on any node, chooses modes and owners: in a mount by root, a setuid
/// file of root's that another node had planted ran as root.
#[test]
fn a_mount_gives_no_rights_unless_they_are_asked_for() {
    if !rustix::process::getuid().is_root() {
        eprintln!("left out: a mount that gives rights needs root");
        return;
    }
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    // Others get that far.
    let path = c
        .dir
        .ancestors()
        .take_while(|d| d.metadata().is_ok_and(|m| m.mode() & 1 == 0));
    let closed = path.count() > 0;
    for (args, gives) in [(&[][..], false), (&["-o", "suid,dev,noatime"], true)] {
        let m = Mount::new(&c, "a", args);
        let (id, null) = (m.at.join("id"), m.at.join("null"));
        if !gives {
            fs::copy("/usr/bin/id", &id).unwrap();
            fs::set_permissions(&id, fs::Permissions::from_mode(0o4755)).unwrap();
            let device = rustix::fs::makedev(1, 3);
            let (kind, mode) = (rustix::fs::FileType::CharacterDevice, 0o666.into());
            rustix::fs::mknodat(rustix::fs::CWD, &null, kind, mode, device).unwrap();
        }
        assert_eq!(fs::read(&null).is_ok(), gives);
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mine = mounts
            .lines()
            .find(|l| l.contains(m.at.to_str().unwrap()))
            .unwrap();
        assert_eq!(
            mine.contains("nosuid") && mine.contains("nodev"),
            !gives,
            "{mine}"
        );
        assert_eq!(mine.contains("noatime"), gives, "{mine}");
        if !closed {
            let mut as_nobody = Command::new(&id);
            let said = as_nobody.arg("-u").uid(65534).gid(65534).output().unwrap();
            let expected = if gives { "0\n" } else { "65534\n" };
            assert_eq!(text(&said.stdout), expected, "{}", text(&said.stderr));
        }
        m.end();
    }
    let m = Mount::new(&c, "a", &["-o", "ro,noexec"]);
    is_read_only(fs::write(m.at.join("new"), ""), "ro");
    let ran = Command::new(m.at.join("id")).status();
    assert_eq!(ran.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    m.end();
    let refused = c.mojim("mount", &["--name", "a", "-o", "allow_other", "/"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

/// mount(8) and /etc/fstab know file systems by their helpers only.
#[test]
fn a_mount_is_made_by_mounts_helper() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let (at, helper) = (c.dir.join("at"), c.dir.join("mount.fuse.mojim"));
    fs::create_dir(&at).unwrap();
    symlink(mojim_testkit::mojim_path(), &helper).unwrap();
    let run = |options: &str| {
        let mut mount = Command::new(&helper);
        mount.arg(c.file()).arg(&at).args(["-n", "-o", options]);
        mount.status().unwrap().code()
    };
    let mounted = || {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mine = mounts.lines().find(|l| l.contains(at.to_str().unwrap()));
        mine.map(str::to_owned)
    };
    assert_eq!(run("name=a,allow_other"), Some(1));
    assert_eq!(run("name=none"), Some(32));
    assert_eq!(mounted(), None);
    assert_eq!(run("rw,name=a,noexec,_netdev"), Some(0));
    let line = mounted().expect("it is mounted");
    // A bare `fuse` has mount(8) run the source as a command where a mount is to be changed.
    for word in [" fuse.mojim ", "nosuid", "nodev", "noexec"] {
        assert!(line.contains(word), "{line}");
    }
    fs::write(at.join("f"), "x").unwrap();
    File::open(at.join("f")).unwrap().sync_all().unwrap();
    let umount = Command::new("umount").arg(&at).status().unwrap();
    assert!(umount.success());
    // Its process ends by itself: then the volume is free.
    let m = Mount::new(&c, "a", &[]);
    assert_eq!(fs::read(m.at.join("f")).unwrap(), b"x");
    m.end();
}

/// A second `mount -a` mounted what was mounted: the table of mounts had another source than fstab.
#[test]
fn mount_knows_what_it_has_mounted_already() {
    let can = Command::new("unshare")
        .args(["-m", "mount", "--version"])
        .output();
    if !can.is_ok_and(|out| out.status.success() && text(&out.stdout).contains("util-linux")) {
        eprintln!("left out: needs root, and mount and unshare of util-linux");
        return;
    }
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let places = ["at-a", "at-b", "tools", "helpers"].map(|name| c.dir.join(name));
    places.iter().for_each(|p| fs::create_dir(p).unwrap());
    let [a, b, tools, helpers] = places.each_ref().map(|p| p.display());
    let (file, table) = (c.file(), c.dir.join("fstab"));
    let line = |at, options| format!("{} {at} fuse.mojim {options} 0 0\n", file.display());
    fs::write(&table, line(&a, "name=a,noexec") + &line(&b, "name=b,read")).unwrap();
    // The helper lies where other helpers lie, in this mount namespace only.
    let script = format!(
        "set -e; dir=$(realpath /sbin)
         trap 'for at in {a} {b}; do while umount $at; do :; done; done' EXIT
         mount --bind $dir {tools}; ln -s {tools}/* {helpers}; rm -f {helpers}/mount.fuse.mojim
         ln -s '{}' {helpers}/mount.fuse.mojim; mount --bind {helpers} $dir
         for again in 1 2 3; do mount -T {table} -a; cat /proc/self/mountinfo; echo; done",
        mojim_testkit::mojim_path(),
        table = table.display(),
    );
    let mut unshare = Command::new("unshare");
    unshare.args(["-m", "--propagation", "private", "sh", "-c", &script]);
    let out = unshare.output().unwrap();
    let (said, why) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{why}");
    let tables: Vec<&str> = said.trim_end().split("\n\n").collect();
    assert_eq!(tables.len(), 3, "{said}");
    for (table, at) in tables
        .iter()
        .flat_map(|t| [(t, &places[0]), (t, &places[1])])
    {
        let (at, source) = (format!(" {} ", at.display()), file.display());
        let mounts: Vec<&str> = table.lines().filter(|l| l.contains(&at)).collect();
        assert_eq!(mounts.len(), 1, "{table}");
        assert!(
            mounts[0].contains(&format!(" fuse.mojim {source} ")),
            "{table}"
        );
    }
    // Its process ends by itself.
    Mount::new(&c, "a", &[]).end();
}

/// `umount`, by which a mount is to be ended, was a warning; that somebody ended its connection to the
/// kernel said the same.
#[test]
fn the_end_of_a_mount_is_logged_with_its_cause() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let mut m = Mount::new(&c, "a", &[]);
    let umount = Command::new("umount").arg(&m.at).status().unwrap();
    assert!(umount.success());
    assert_eq!(m.process.wait(), Some(0));
    m.over = true;
    let said = m.process.errors();
    assert!(
        said.contains("INFO node a: the mount ends: somebody unmounted it"),
        "{said}"
    );
    if !rustix::process::getuid().is_root() {
        eprintln!("left out: ending a connection to the kernel needs root");
        return;
    }
    let mut m = Mount::new(&c, "a", &[]);
    let _open = File::create(m.at.join("f")).unwrap();
    let _ = rustix::mount::unmount(&m.at, rustix::mount::UnmountFlags::FORCE);
    m.process.wait();
    let said = m.process.errors();
    assert!(
        said.contains("WARN node a: the mount ends: somebody ended its connection"),
        "{said}"
    );
}

/// `verify` read the holes of a file, and compared their sums: 65 seconds for 4 GiB. What is a hole on one
/// node and bytes on the other is found all the same.
#[test]
fn the_holes_of_a_file_are_compared_without_being_read() {
    const SIZE: u64 = 64 << 30;
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let mut b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let f = File::create(m.at.join("f")).unwrap();
    f.set_len(SIZE).unwrap();
    for (i, at) in [5 << 12, 3 << 30, SIZE - 1].into_iter().enumerate() {
        f.write_all_at(&[i as u8 + 1], at).unwrap();
    }
    f.sync_all().unwrap();
    let copy = |node: &str| c.dir.join(node).join("v/f");
    let is_sparse = |node| fs::metadata(copy(node)).is_ok_and(|m| m.blocks() < 1 << 20);
    await_that("the copies", || {
        let there = |node| fs::metadata(copy(node)).is_ok_and(|m| m.len() == SIZE);
        (there("a") && there("b")).then_some(())
    });
    let data = rustix::fs::seek(
        File::open(copy("a")).unwrap(),
        rustix::fs::SeekFrom::Data(4 << 30),
    );
    if !is_sparse("a") || !is_sparse("b") || data == Ok(4 << 30) {
        eprintln!(
            "left out: the file system of {} has no holes",
            c.dir.display()
        );
        return m.end();
    }
    // Bytes that a daemon has read, if the system says so.
    let read = |id: u32| {
        let io = fs::read_to_string(format!("/proc/{id}/io")).unwrap_or_default();
        let line = io.lines().find_map(|l| l.strip_prefix("rchar: "));
        line.map_or(0, |n| n.parse::<u64>().unwrap())
    };
    let daemons = [a.child.id(), b.child.id()];
    let before = daemons.map(read);
    // In use, with bytes in a hole that are not committed, and then with some that are.
    f.write_all_at(b"pending", 5 << 30).unwrap();
    c.assert_equal();
    f.sync_all().unwrap();
    c.assert_equal();
    drop(f);
    m.end();
    c.assert_equal();
    for (id, before) in daemons.into_iter().zip(before) {
        let more = read(id) - before;
        assert!(more < SIZE / 64, "{more} bytes were read");
    }
    // On one node: zeros in a hole, which are none the less zeros; then, before these, bytes in a hole of
    // the other node; then bytes in data.
    let zeros = OpenOptions::new().write(true).open(copy("a")).unwrap();
    zeros.write_all_at(&[0; 4096], 7 << 30).unwrap();
    zeros.sync_all().unwrap();
    c.assert_equal();
    for (at, byte) in [(6 << 30, 9), (3 << 30, 2), (SIZE - 1, 3)] {
        b.signal("TERM");
        assert_eq!(b.wait(), Some(0));
        let f = OpenOptions::new().write(true).open(copy("b")).unwrap();
        f.write_all_at(&[byte ^ 0x10], at).unwrap();
        f.sync_all().unwrap();
        b = c.node("b");
        let out = c.mojim("verify", &["--json", "--wait", "60"]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
        let v: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!((&v["file"], &v["offset"]), (&"f".into(), &at.into()), "{v}");
        f.write_all_at(&[if at == 6 << 30 { 0 } else { byte }], at)
            .unwrap();
    }
    c.assert_equal();
}

fn is_read_only<T: std::fmt::Debug>(done: io::Result<T>, what: &str) {
    let e = done.expect_err(what);
    assert_eq!(e.raw_os_error(), Some(libc::EROFS), "{what}: {e}");
}

fn set_xattr(at: &Path, value: &str) -> io::Result<()> {
    let flags = rustix::fs::XattrFlags::empty();
    Ok(rustix::fs::setxattr(
        at,
        "user.note",
        value.as_bytes(),
        flags,
    )?)
}

/// The mirror's mount shows what the primary's has committed and nothing else, refuses every
/// change, and stays while mounts on the primary come and go.
#[test]
fn a_mirrors_mount_shows_what_is_committed() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let at = m.at.clone();
    fs::create_dir_all(at.join("d/e/empty")).unwrap();
    fs::write(at.join("d/f"), "old").unwrap();
    fs::write(at.join("long"), vec![7; 500_000]).unwrap();
    fs::hard_link(at.join("d/f"), at.join("d/e/other")).unwrap();
    symlink("e/other", at.join("d/link")).unwrap();
    fs::set_permissions(at.join("d/f"), fs::Permissions::from_mode(0o4710)).unwrap();
    fs::write(at.join(std::ffi::OsStr::from_bytes(b"\xff")), "odd").unwrap();
    set_xattr(&at.join("d/f"), "kept").unwrap();
    sync_dir(&at);
    let committed = shows(&at);
    let r = Mount::new(&c, "b", &["--read"]);
    let same = |want: &BTreeMap<PathBuf, String>| {
        await_or(
            "the same",
            || c.logs(),
            || (shows_now(&r.at).ok()? == *want).then_some(()),
        );
    };
    same(&committed);
    let inode = |f: &str| fs::metadata(r.at.join(f)).unwrap().ino();
    assert_eq!(inode("d/f"), inode("d/e/other"));
    let mut value = [0; 16];
    let n = rustix::fs::getxattr(r.at.join("d/f"), "user.note", &mut value).unwrap();
    assert_eq!(&value[..n], b"kept");

    // What is not committed, beside what is.
    let f = OpenOptions::new().write(true).open(at.join("d/f")).unwrap();
    f.write_all_at(b"new", 0).unwrap();
    File::create(at.join("mark")).unwrap().sync_all().unwrap();
    fs::create_dir(at.join("later")).unwrap();
    await_that("a mark", || {
        fs::exists(r.at.join("mark")).unwrap().then_some(())
    });
    assert_eq!(fs::read(r.at.join("d/f")).unwrap(), b"old");
    assert!(!fs::exists(r.at.join("later")).unwrap());
    nothing_can_be_changed(&r.at);
    // What is nowhere but in the file of names.
    for mode in [0o700, 0o511] {
        fs::set_permissions(at.join("d"), fs::Permissions::from_mode(mode)).unwrap();
        sync_dir(&at);
        let shown = || fs::metadata(r.at.join("d")).unwrap().mode() & 0o777;
        await_that("a mode", || (shown() == mode).then_some(()));
    }
    assert!(fs::exists(r.at.join("later")).unwrap());

    // The mount goes on without the primary's, and beside the next one.
    let open = File::open(r.at.join("d/f")).unwrap();
    let want = shows(&at);
    m.end();
    same(&want);
    let m = Mount::new(&c, "a", &[]);
    fs::rename(at.join("long"), at.join("d/e/long")).unwrap();
    sync_dir(&at);
    same(&shows(&at));
    let mut bytes = [0; 9];
    assert_eq!(open.read_at(&mut bytes, 0).unwrap(), 3);
    assert_eq!(&bytes[..3], b"new");
    for name in ["d/f", "d/e/other"] {
        fs::remove_file(at.join(name)).unwrap();
    }
    sync_dir(&at);
    await_that("an open file that is gone", || {
        let e = open.read_at(&mut bytes, 0).err()?;
        (e.raw_os_error() == Some(libc::ESTALE)).then_some(())
    });
    same(&shows(&at));
    m.end();
    r.end();
}

/// opendir(3) is two calls: an open, which the kernel tries again where a name leads elsewhere by now, and
/// fstat, which it does not. The directory was made anew on the primary, and the sync point came between the two:
/// ESTALE, once in some 60 runs, at a path that had a directory before and after it.
#[test]
fn an_open_directory_is_there_after_it_was_made_anew() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let make = |file: &str| {
        fs::create_dir(m.at.join("d")).unwrap();
        File::create(m.at.join("d").join(file)).unwrap();
        sync_dir(&m.at);
    };
    let names = |dir: &File| {
        let dir = rustix::fs::Dir::new(dir.try_clone().unwrap()).unwrap();
        let names = dir.map(|e| e.unwrap().file_name().to_str().unwrap().to_owned());
        names.collect::<BTreeSet<_>>()
    };
    let has = |file: &str| [".", "..", file].map(str::to_owned).into();
    make("old");
    let r = Mount::new(&c, "b", &["--read"]);
    let d = r.at.join("d");
    let read = await_or("a directory", || c.logs(), || File::open(&d).ok());
    let unread = File::open(&d).unwrap();
    assert_eq!(names(&read), has("old"));
    fs::remove_dir_all(m.at.join("d")).unwrap();
    make("new");
    await_or(
        "the new one",
        || c.logs(),
        || fs::exists(d.join("new")).unwrap().then_some(()),
    );
    for open in [read, unread] {
        let was = open.metadata().unwrap();
        assert!(was.is_dir());
        assert_eq!(was.nlink(), 0, "it has no name any more");
        (&open).rewind().unwrap();
        assert_eq!(names(&open), has("old"));
        // The path leads to the new one, also while the old one is open.
        assert_ne!(fs::metadata(&d).unwrap().ino(), was.ino());
        assert_eq!(names(&File::open(&d).unwrap()), has("new"));
    }
    m.end();
    r.end();
}

/// The kernel was given attributes with the names of a listing. A listing that had begun before a file grew made
/// the file shorter again: the pages of a private mapping went, and who touched them got SIGBUS.
#[test]
fn a_listing_that_has_begun_makes_no_file_shorter() {
    const PAGE: usize = 4096;
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let m = Mount::new(&c, "a", &["--commit-interval", "never"]);
    let d = m.at.join("d");
    fs::create_dir(&d).unwrap();
    // Of 30 names the kernel asks for the attributes of some 25 at once, in a page.
    for n in 0..30 {
        fs::write(d.join(format!("{n:02}")), "1").unwrap();
    }
    sync_dir(&m.at);
    let r = Mount::new(&c, "b", &["--read"]);
    let d = r.at.join("d");
    let dir = await_or("a directory", || c.logs(), || File::open(&d).ok());
    let mut room = Vec::with_capacity(512);
    let mut listing = rustix::fs::RawDir::new(&dir, room.spare_capacity_mut());
    let first = listing.next().unwrap().unwrap().file_name().to_owned();
    assert_eq!(first.to_bytes(), b".");

    let bytes = vec![7; 2 * PAGE];
    let longer = OpenOptions::new()
        .write(true)
        .open(m.at.join("d/29"))
        .unwrap();
    longer.write_all_at(&bytes, 0).unwrap();
    longer.sync_all().unwrap();
    let path = d.join("29");
    await_or(
        "its length",
        || c.logs(),
        || (fs::metadata(&path).unwrap().len() == bytes.len() as u64).then_some(()),
    );
    let file = File::open(&path).unwrap();
    // SAFETY: a mapping of its own at a place that the kernel chooses, of a file that is as long.
    let page = unsafe {
        let (none, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        let (read, private) = (libc::PROT_READ, libc::MAP_PRIVATE);
        let p = libc::mmap(none, 2 * PAGE, read, private, fd, 0);
        assert_ne!(p, libc::MAP_FAILED);
        p.cast::<u8>().add(PAGE)
    };
    // The kernel reads it, so that the test gets an error where a program would get a signal.
    let (mut from, to) = io::pipe().unwrap();
    let mut touch = || {
        // SAFETY: a byte of the mapping, which stays to the end.
        let n = unsafe { libc::write(to.as_raw_fd(), page.cast(), 1) };
        let mut byte = [0];
        if n == 1 {
            from.read_exact(&mut byte).unwrap();
        }
        (n, byte[0])
    };
    assert_eq!(touch(), (1, 7));
    // Who looks for names of a directory is given attributes with the next ones.
    let mut n = 2;
    for name in 20.. {
        let _ = fs::metadata(d.join(format!("{name}")));
        match listing.next() {
            Some(e) => drop(e.unwrap()),
            None => break,
        }
        n += 1;
    }
    assert_eq!(n, 30 + 2 + 1);
    assert_eq!(touch(), (1, 7), "{}", io::Error::last_os_error());
    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
    m.end();
    r.end();
}

fn nothing_can_be_changed(at: &Path) {
    let change = |what: &str| {
        let f = at.join("d/f");
        is_read_only(OpenOptions::new().write(true).open(&f), what);
        is_read_only(fs::write(&f, ""), what);
        is_read_only(fs::write(at.join("new"), ""), what);
        is_read_only(fs::create_dir(at.join("new")), what);
        is_read_only(symlink("f", at.join("new")), what);
        is_read_only(fs::hard_link(&f, at.join("new")), what);
        is_read_only(fs::rename(&f, at.join("new")), what);
        is_read_only(fs::remove_file(&f), what);
        is_read_only(fs::remove_dir(at.join("d/e/empty")), what);
        is_read_only(
            fs::set_permissions(&f, fs::Permissions::from_mode(0o600)),
            what,
        );
        is_read_only(set_xattr(&f, "other"), what);
    };
    change("mounted");
    let mut mount = Command::new("mount");
    if rustix::process::getuid().is_root() {
        mount.args(["-i", "-o", "remount,rw"]).arg(at);
        assert!(mount.status().unwrap().success());
        change("mounted anew, to be written");
    }
    // Private mappings are there; shared ones would show a mixture, and say so.
    let file = File::open(at.join("long")).unwrap();
    // SAFETY: mappings of their own at places that the kernel chooses, of a file that is as long.
    unsafe {
        let map = |flags| {
            let (none, fd) = (std::ptr::null_mut(), file.as_raw_fd());
            libc::mmap(none, 4096, libc::PROT_READ, flags, fd, 0)
        };
        assert_eq!(map(libc::MAP_SHARED), libc::MAP_FAILED);
        let e = io::Error::last_os_error();
        assert_eq!(e.raw_os_error(), Some(libc::ENODEV), "{e}");
        let p = map(libc::MAP_PRIVATE);
        assert_ne!(p, libc::MAP_FAILED);
        assert_eq!(p.cast::<u8>().read(), 7);
    }
}

/// Primary `a`, mirror `b`, backup `c`, with small logs: a node that follows often lacks the
/// records since what was read before.
fn with_backup() -> Home {
    let home = Home::new("mount-read", 3);
    let mut t = String::from(
        "cluster = \"mount\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n\
         backups = [\"c\"]\nfailover = \"manual\"\n",
    );
    for (name, port) in ["a", "b", "c"].iter().zip(&home.ports) {
        t += &home.data_node(name, port.number, "size = \"1MiB\"");
    }
    home.configure(&t);
    home
}

/// The count in a file's first bytes, or others.
fn count(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// Looks once at what [`write_whole`] writes. Returns the count that it saw.
fn look(at: &Path, f: &File) -> u64 {
    // One read call, which asks the node 16 times.
    let mut bytes = vec![0; FAR + 8];
    assert_eq!(f.read_at(&mut bytes, 0).unwrap(), FAR + 8);
    let first = count(&bytes);
    assert_eq!(first, count(&bytes[FAR..]), "a read is of two sync points");

    let mut names: Vec<String> = fs::read_dir(at.join("names"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let [p, q] = &names[..] else {
        panic!("names of several sync points: {names:?}");
    };
    assert_eq!(p.strip_prefix("p"), q.strip_prefix("q"), "{names:?}");

    let second = count(&fs::read(at.join("g")).unwrap());
    f.read_at(&mut bytes, 0).unwrap();
    let last = count(&bytes);
    assert!((first..=last).contains(&second), "{first} {second} {last}");
    last
}

/// The last page but one of what one request of the kernel has, however the buffer lies.
const FAR: usize = 253 * 4096;

/// With each sync point the same count in two far pages of one file, in another file, and now and
/// then in the names of two more, until `done` says so.
fn write_whole(at: &Path, done: impl Fn() -> bool) {
    fs::create_dir_all(at.join("names")).unwrap();
    let file = |name: &str| {
        let how = OpenOptions::new().write(true).create(true).clone();
        how.open(at.join(name)).unwrap()
    };
    let (f, g) = (file("f"), file("g"));
    f.set_len(FAR as u64 + 8).unwrap();
    let name = |kind: &str, n: u64| at.join(format!("names/{kind}{n}"));
    for n in 1u64.. {
        for (file, offset) in [(&f, 0), (&f, FAR as u64), (&g, 0)] {
            file.write_all_at(&n.to_le_bytes(), offset).unwrap();
        }
        // Now and then: each change of names costs the nodes several syncs of their disks.
        for kind in ["p", "q"] {
            match n {
                1 => drop(File::create(name(kind, n)).unwrap()),
                n if n % 16 == 1 => fs::rename(name(kind, n - 16), name(kind, n)).unwrap(),
                _ => {}
            }
        }
        f.sync_all().unwrap();
        if done() {
            return;
        }
    }
}

/// What a program sees on the mirror and on a backup is never half a sync point.
#[test]
fn mounts_that_read_show_whole_sync_points() {
    let c = with_backup();
    let _nodes = ["a", "b", "c"].map(|n| c.node(n));
    let m = Mount::new(
        &c,
        "a",
        &["--atomic", "volume", "--commit-interval", "never"],
    );
    write_whole(&m.at, || true);
    let readers = ["b", "c"].map(|n| Mount::new(&c, n, &["--read"]));
    for r in &readers {
        await_or(
            "the files",
            || c.logs(),
            || fs::exists(r.at.join("names/q1")).unwrap().then_some(()),
        );
    }
    let left = AtomicU64::new(readers.len() as u64);
    fs::remove_dir_all(m.at.join("names")).unwrap();
    std::thread::scope(|s| {
        for r in &readers {
            let left = &left;
            s.spawn(move || {
                let f = File::open(r.at.join("f")).unwrap();
                let seen = std::panic::catch_unwind(|| {
                    let mut seen = vec![look(&r.at, &f)];
                    let states = |seen: &[u64]| seen.iter().collect::<BTreeSet<_>>().len();
                    while seen.len() < 12 || states(&seen) < 5 {
                        seen.push(look(&r.at, &f));
                    }
                    assert!(seen.is_sorted(), "it goes back: {seen:?}");
                });
                left.fetch_sub(1, SeqCst);
                seen.unwrap();
            });
        }
        write_whole(&m.at, || left.load(SeqCst) == 0);
    });
    m.end();
    readers.into_iter().for_each(Mount::end);
    c.assert_equal();
}

/// The threads that apply on the mirror and that forward to a backup had the lowest priority. Beside six busy
/// programs on two processors the first one got a thousandth of a processor, with the lock for which readers
/// wait, and with the log full, for whose room the primary waits: fsync failed after 10 s in four of four runs.
/// The second one let the backup's link fall silent.
#[test]
fn no_thread_of_a_node_that_others_wait_for_has_a_lower_priority() {
    // The name of a thread as the system cuts it off, and its nice value.
    fn threads(node: &mojim_testkit::Process) -> Vec<(String, i64)> {
        let all = fs::read_dir(format!("/proc/{}/task", node.child.id())).unwrap();
        let one = |e: fs::DirEntry| {
            let stat = fs::read_to_string(e.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let nice = rest.split_whitespace().nth(16)?.parse().ok()?;
            Some((name.to_owned(), nice))
        };
        all.flatten().filter_map(one).collect()
    }
    let c = with_backup();
    let nodes = ["a", "b", "c"].map(|n| c.node(n));
    let m = Mount::new(&c, "a", &[]);
    fs::write(m.at.join("f"), "f").unwrap();
    // It is said at a thread's start, before it works: the backup has got this by all of them.
    await_or(
        "the backup's copy",
        || c.logs(),
        || fs::exists(c.dir.join("c/v/f")).unwrap().then_some(()),
    );
    for (node, needed) in [
        (1, "mojim-checkpoin"),
        (1, "mojim-forward"),
        (2, "mojim-checkpoin"),
    ] {
        let all = threads(&nodes[node]);
        let found: Vec<_> = all.iter().filter(|(name, _)| name == needed).collect();
        assert!(!found.is_empty(), "{needed}: {all:?}");
    }
    let own = threads(&nodes[1])[0].1;
    for node in &nodes {
        let all = threads(node);
        // Nobody waits for the one that touches memory beforehand.
        let others = all.iter().filter(|(name, _)| name != "mojim-populate");
        others.for_each(|(name, nice)| assert_eq!(*nice, own, "{name}: {all:?}"));
    }
    m.end();
}

/// The node's daemon dies and comes back: calls fail meanwhile, and say why. Files come and go
/// that no mount made: each keeps its number.
#[test]
fn a_mount_that_reads_goes_on_when_its_node_does() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let mut b = c.node("b");
    let config = mojim::Config::load(&c.file()).unwrap();
    let volume = mojim::Volume::attach_with(&config, "a", None, |_, _| {}).unwrap();
    let create = mojim::MapFlags {
        create: true,
        ..Default::default()
    };
    let make = |name: &str, byte: u8| {
        let m = volume.map(name, 5000, create).unwrap();
        // SAFETY: a byte of the mapping, which only this thread uses.
        unsafe { m.ptr.write(byte) };
        mojim::msync(m.ptr, 1).unwrap();
    };
    make("d/f", 1);
    let mut r = Mount::new(&c, "b", &["--read"]);
    let read = |name: &str| fs::read(r.at.join(name)).map(|b| (b.first().copied(), b.len()));
    let shows = |name: &str, byte: u8| {
        await_or(
            name,
            || c.logs(),
            || (read(name).ok()? == (Some(byte), 5000)).then_some(()),
        );
    };
    let number = |name: &str| fs::metadata(r.at.join(name)).unwrap().ino();
    shows("d/f", 1);
    let numbers = ["d", "d/f"].map(number);
    for i in 0..8 {
        make(&format!("{i}/{i}"), i);
    }
    shows("7/7", 7);
    assert_eq!(["d", "d/f"].map(number), numbers);
    let e = c.mojim("mount", &["--read", "--name", "a", r.at.to_str().unwrap()]);
    let said = text(&e.stderr);
    assert!(said.contains("is the primary of volume v"), "{said}");

    b.kill();
    let e = read("d/f").unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EIO), "{e}");
    assert!(
        r.process.errors().contains("cannot be read"),
        "{}",
        r.process.errors()
    );
    let _b = c.node("b");
    // Its view has not gone back, and moves on.
    shows("d/f", 1);
    make("after", 9);
    shows("after", 9);

    // A mount on the primary gives numbers to what no mount made: fstat of a file that is open here failed with
    // ESTALE then, and an open directory had no link.
    let open = ["d", "d/f"].map(|name| File::open(r.at.join(name)).unwrap());
    volume.detach().unwrap();
    let m = Mount::new(&c, "a", &[]);
    fs::create_dir(m.at.join("made")).unwrap();
    sync_dir(&m.at);
    await_or(
        "what the mount made",
        || c.logs(),
        || fs::exists(r.at.join("made")).unwrap().then_some(()),
    );
    for (file, links) in open.iter().zip([2, 1]) {
        assert_eq!(file.metadata().unwrap().nlink(), links);
    }
    let mut byte = [0];
    open[1].read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
    m.end();
    r.process.signal("TERM");
    assert_eq!(r.process.wait(), Some(0));
    r.over = true;
}
