//! Disks that are slow, or fail once, below real nodes (`src/disk.rs`).
//!
//! The history is checked each time: an entry is acknowledged when its number was printed, and
//! whoever is primary later must find it. Owns its temporary directories, mounts, shared memory
//! and processes.
//!
//! Where there can be no file system in user space, a test says so and passes.

// The checks are checked: syncs whose errors are ignored, and a disk that drops what it is slow to
// take.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use mojim_testkit::cluster::{self, SYNC};
use mojim_testkit::disk::{Disk, Work};
use mojim_testkit::voters::Cluster;
use mojim_testkit::{
    Counted, Process, await_that, continue_all, libraries, source, stop_all, text,
};

/// Kills node `a`'s daemon and its program `p` right after `before`, while `b` is the mirror:
/// how much was acknowledged. A primary that stood still may give its mirror up before its
/// end, and then nobody but itself may go on: it is started and killed again, not for ever.
fn kill_primary(c: &Cluster, a: &mut Process, p: Counted, before: impl Fn(&Counted)) -> u64 {
    let (mut p, mut acknowledged) = (p, 0);
    for _ in 0..3 {
        c.await_mirror();
        before(&p);
        a.kill();
        acknowledged = p.stop().max(acknowledged);
        // The first view that can be read after its end is the one that it left.
        let left = await_that("the register", || {
            let r: Value = c.register("b");
            r["primary"].is_object().then_some(r)
        });
        if left["primary"]["node"] != "a" || left["mirror"].is_object() {
            return acknowledged;
        }
        *a = c.node("a");
        let (again, found) = c.program("a", &["--pace", "2000"]);
        assert!(found >= acknowledged, "{found} of {acknowledged}");
        p = again.read_on_counting();
    }
    panic!("a gave its mirror up again and again");
}

/// The mirror's disk becomes slow, then a thousand times slower than it was,
/// then as it was; then slow again, and the primary dies.
///
/// No sync point fails: they take as long as the disk, or the mirror is given
/// up and the primary goes on alone. When the disk is well again the mirror is a
/// member again, by itself, with the same bytes. A mirror that takes over has
/// everything that was acknowledged, also what its disk was slow to take.
fn a_slow_disk(medium: &str) {
    let c = Cluster::new("sync", medium);
    // Under all that the mirror's daemon writes.
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("b")) else {
        return;
    };
    let mut a = c.node("a");
    let (_b, _w) = (c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();

    disk.slow(Duration::from_millis(20));
    let before = disk.slowed();
    p.await_more(30);
    await_that("work for the slow disk", || {
        (disk.slowed() > before + 10).then_some(())
    });

    if medium == "disk" {
        // It has nothing in its log within `failure_limit`.
        disk.slow(Duration::from_secs(3));
        c.await_view("a", "a", None);
    } else {
        disk.slow(Duration::from_millis(300));
    }
    p.await_more(1000);

    disk.slow(Duration::ZERO);
    c.await_view("a", "a", Some("b"));
    p.await_more(100);
    c.assert_equal();

    // Not so slow that it is given up.
    disk.slow(Duration::from_millis(5));
    let acknowledged = kill_primary(&c, &mut a, p, |p| p.await_more(10));
    let (mut q, found) = c.program("b", &["--entries", "20", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 20);
    disk.slow(Duration::ZERO);
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    c.assert_equal();
    q.finish();
}

#[test]
fn a_mirror_whose_disk_is_slow_costs_time_and_nothing_else() {
    a_slow_disk("disk");
}

/// Its log is memory; what is slow is the way from there to its data files.
#[test]
fn a_mirror_with_its_log_in_memory_and_a_slow_disk_costs_time_and_nothing_else() {
    a_slow_disk("dram");
}

/// A write, then a sync, fails once with EIO on the mirror, wherever it writes
/// (its log, its data files, its superblock), and the next one would succeed.
///
/// What failed is never taken for clean: the mirror serves no session before
/// its copy was opened and read again. No sync point fails, the mirror is a
/// member again, with the same bytes, and has everything when it takes over.
#[test]
fn a_disk_that_fails_once_is_not_believed_any_more() {
    let c = Cluster::new("sync", "disk");
    // Under all that the mirror's daemon writes.
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("b")) else {
        return;
    };
    let mut a = c.node("a");
    let (b, _w) = (c.node("b"), c.node("w"));
    let (mut p, _) = c.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let reopened = || b.errors().matches("reopening a copy that failed").count();
    for (work, name) in [
        (Work::Write, "/v.log.0"),
        (Work::Sync, "/v.log.0"),
        (Work::Write, "/v/log"),
        (Work::Sync, "/v/log"),
        (Work::Sync, "/superblock"),
    ] {
        let before = reopened();
        disk.fail(work, name);
        let what = format!("the EIO of {work:?} in {name}");
        await_that(&what, || disk.has_failed().then_some(()));
        await_that(&format!("the copy opened again after {what}"), || {
            (reopened() > before).then_some(())
        });
        c.await_view("a", "a", Some("b"));
        p.await_more(100);
        c.assert_equal();
        assert_eq!(reopened(), before + 1, "{what}: {}", b.errors());
    }
    // Once more, when the mirror closes its copy to become the primary, or just
    // before.
    let fail = |p: &Counted| {
        disk.fail(Work::Sync, "/v/log");
        // Where the primary had stood still, everything was synced, and nothing failed.
        p.await_more(20);
    };
    let acknowledged = kill_primary(&c, &mut a, p, fail);
    let (mut q, found) = c.program("b", &["--entries", "20", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    assert!(disk.has_failed());
    q.acknowledged(found, found + 20);
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    c.assert_equal();
    q.finish();
}

/// A program of transactions (`tests/tx/doubt.c`), which does what it is told.
struct Told(Process);

impl Told {
    fn start(c: &cluster::Cluster) -> Told {
        let top = source();
        let (libraries, bin) = (libraries(), c.dir.join("doubt"));
        let mut cc = Command::new("gcc");
        cc.args(["-fgnu-tm", "-O1", "-Wall", "-Werror", "-pthread", "-I"]);
        cc.arg(top.join("include"))
            .arg(top.join("tests/tx/doubt.c"));
        cc.arg("-o").arg(&bin).arg("-L").arg(libraries);
        cc.args(["-lmojim_itm", "-lmojim"]);
        cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
        let out = cc.output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        let mut command = Command::new(bin);
        command.arg(c.file()).arg("a");
        let mut p = Process::of(command, &c.dir.join("program.txt"));
        assert_eq!(p.line().as_deref(), Some("open"), "{}", c.logs());
        Told(p)
    }

    fn say(&mut self, what: &str) -> String {
        let stdin = self.0.stdin.as_mut().unwrap();
        writeln!(stdin, "{what}").unwrap();
        self.0.line().unwrap_or_else(|| self.0.errors())
    }

    fn errno(&mut self, what: &str) -> i32 {
        let said = self.say(what);
        said.parse().unwrap_or_else(|_| panic!("{what}: {said}"))
    }
}

/// A transaction whose mirror stands still is in doubt: it cannot be taken back, also where a later try
/// finds no room on the disk, and is committed when the mirror goes on. Where the own disk fails instead,
/// nothing can be committed any more: a captured block in doubt is given up, and all other
/// transactions of the process are refused and can be taken back.
#[test]
fn a_transaction_in_doubt_is_committed_or_ends_with_the_disk() {
    let c = cluster::Cluster::new(SYNC);
    c.configure(&c.text(SYNC, "e2e").replace("\"5s\"", "\"700ms\""));
    let Some(disk) = Disk::mount_or_skip(&c.dir.join("a")) else {
        return;
    };
    let (_a, b) = (c.node("a"), c.node("b"));
    let mut p = Told::start(&c);
    stop_all(&[b.child.id()]);
    assert_eq!(p.errno("begin"), 0);
    assert_eq!(p.errno("commit"), libc::ETIMEDOUT);
    assert_eq!(p.errno("abort"), libc::ETIMEDOUT);
    assert_eq!(p.errno("more"), 0);
    disk.fill("/spill.");
    assert_eq!(p.errno("commit"), libc::ENOSPC, "{}", p.say("failed"));
    assert!(disk.has_failed());
    assert_eq!(p.errno("abort"), libc::ETIMEDOUT);
    assert_eq!((p.say("words"), p.errno("failed")), ("1 0".into(), 0));
    continue_all(&[b.child.id()]);
    await_that("the commit", || match p.errno("commit") {
        0 => Some(()),
        libc::ETIMEDOUT => None,
        e => panic!("{e}: {}", c.logs()),
    });

    // Nothing is begun from here on that could be a success.
    stop_all(&[b.child.id()]);
    assert_eq!(p.errno("begin"), 0);
    disk.fail(Work::Write, "/v.log.0");
    assert_eq!(p.errno("block"), 0);
    await_that("the end of the block", || {
        (p.errno("failed") == libc::EIO).then_some(())
    });
    assert_eq!(p.errno("commit"), libc::EOPNOTSUPP);
    assert_eq!(p.errno("abort"), 0);
    assert_eq!(p.errno("own"), libc::EOPNOTSUPP);
    // The block's stores stay where they are.
    assert_eq!(p.say("words"), "1 1");
    let said = p.0.errors();
    assert_eq!(said.matches("none is from here on").count(), 1, "{said}");
    continue_all(&[b.child.id()]);
    p.0.kill();
}
