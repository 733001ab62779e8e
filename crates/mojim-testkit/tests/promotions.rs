//! Promotions by `mojim promote` that fail halfway, at real nodes.
//!
//! A node that is to become primary takes three steps, and each may be as far as it gets:
//!
//! - It stops following.
//! - It promises an epoch durably.
//! - It asks the register.
//!
//! Afterwards these must hold:
//!
//! - Nothing acknowledged is lost.
//! - The primary goes on.
//! - The node is what it was, by itself.
//!
//! The node's disk (`src/disk.rs`) holds the promise back while the world changes.
//!
//! Owns its temporary directories, mounts, shared memory and processes. Where
//! there can be no file system in user space, a test says so and passes.

use std::fs;
use std::ops::Deref;
use std::thread::scope;

use mojim_testkit::disk::{Disk, Work};
use mojim_testkit::voters::Cluster;
use mojim_testkit::{Counted, Process, await_that, text};

/// Primary `a`, mirror `b`, backup `c`, and a node of them with a disk of its
/// own. The voters are the daemons of `a` and of the witnesses, `w` and `x`.
struct Forced {
    disk: Disk,
    node: &'static str,
    c: Cluster,
}

impl Deref for Forced {
    type Target = Cluster;
    fn deref(&self) -> &Cluster {
        &self.c
    }
}

impl Forced {
    fn new(node: &'static str) -> Option<Forced> {
        let c = Cluster::larger("sync");
        // Sync points wait for longer than the voters are away.
        c.rewrite("[volume.v]", "[volume.v]\nresend_timeout = \"60s\"");
        for data in ["[node.b]", "[node.c]"] {
            c.rewrite(data, &format!("{data}\nvote = false"));
        }
        let disk = Disk::mount_or_skip(&c.dir.join(node))?;
        Some(Forced { disk, node, c })
    }

    fn voters(&self) -> Vec<Process> {
        ["a", "w", "x"].map(|n| self.node(n)).into()
    }

    /// `mojim promote --force`, which fails; what it says.
    fn fails(&self) -> String {
        let out = self.mojim("promote", &["--name", self.node, "--force", "--yes"]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
        text(&out.stderr)
    }

    /// The same, where the promise is made durable only after `meanwhile`: the
    /// register was read, the node follows nobody any more.
    fn fails_after(&self, follows: impl Fn() -> bool, meanwhile: impl FnOnce()) -> String {
        await_that("that it follows", || follows().then_some(()));
        scope(|s| {
            let held = self.disk.hold(Work::Sync, "/superblock");
            let said = s.spawn(|| self.fails());
            await_that("the promise", || self.disk.is_holding().then_some(()));
            await_that("the end of its session", || (!follows()).then_some(()));
            meanwhile();
            drop(held);
            said.join().unwrap()
        })
    }
}

/// Whoever stands still for less keeps its session; and the backup takes the place of a
/// mirror that is away for three times as long.
fn be_patient(c: &Cluster) {
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"3s\"");
}

/// Whether the primary has a link to its mirror.
fn has_mirror(c: &Cluster) -> bool {
    c.says("a")["link"]["up"] == true
}

/// The primary dies, and the mirror has everything that was acknowledged.
fn the_mirror_takes_over(c: &Cluster, mut voters: Vec<Process>, p: Counted) {
    // The program stands still before the last look at the view: on a busy machine it may
    // give its mirror up, and then nobody takes over.
    await_that("a primary that stands still with its mirror", || {
        c.await_view("a", "a", Some("b"));
        p.signal("STOP");
        let is_member = c.register("a")["mirror"]["node"] == "b";
        if !is_member {
            p.signal("CONT");
        }
        is_member.then_some(())
    });
    voters[0].kill();
    b_goes_on(c, p.stop());
}

/// A program on `b` finds what was acknowledged, and `a` becomes its mirror.
fn b_goes_on(c: &Cluster, acknowledged: u64) {
    let (mut q, found) = c.program("b", &["--entries", "20", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 20);
    let _a = c.node("a");
    c.await_view("b", "b", Some("a"));
    c.assert_equal();
    q.finish();
}

/// `mojim promote --force` on the mirror fails in every way that it can: the
/// voters are gone when the register is to be read; when it is to be changed;
/// it was changed meanwhile; the promise cannot be made durable.
///
/// Nothing acknowledged is lost, no sync point fails, the primary is who it
/// was, and its mirror is a member again each time.
#[test]
fn a_mirror_whose_force_failed_is_a_mirror_again() {
    let Some(f) = Forced::new("b") else { return };
    be_patient(&f);
    let mut voters = f.voters();
    let (b, _c) = (f.node("b"), f.node("c"));
    let (mut p, _) = f.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let whole = || {
        f.await_view("a", "a", Some("b"));
        await_that("the mirror's link", || has_mirror(&f).then_some(()));
        p.await_more(100);
        f.assert_equal();
    };

    // Nothing has begun: the session goes on, too.
    whole();
    let sessions = || b.errors().matches("following node a").count();
    let before = sessions();
    drop(voters);
    let why = f.fails();
    assert!(why.contains("link"), "{why}");
    p.await_more(50);
    assert_eq!(sessions(), before, "{}", b.errors());
    voters = f.voters();

    whole();
    let why = f.fails_after(|| has_mirror(&f), || drop(voters));
    assert!(why.contains("link"), "{why}");
    voters = f.voters();

    whole();
    let alone = || f.await_view("a", "a", None);
    let why = f.fails_after(|| has_mirror(&f), alone);
    assert!(why.contains("changed meanwhile"), "{why}");

    whole();
    let fails = || f.disk.fail(Work::Sync, "/superblock");
    let why = f.fails_after(|| has_mirror(&f), fails);
    assert!(why.contains("poisoned"), "{why}");

    whole();
    the_mirror_takes_over(&f, voters, p);
}

/// The same on a backup, which no sync point waits for.
///
/// The primary and its mirror go on as if nothing had happened, and the backup
/// follows again, though it has promised an epoch that nobody began.
#[test]
fn a_backup_whose_force_failed_follows_again() {
    let Some(f) = Forced::new("c") else { return };
    be_patient(&f);
    let mut voters = f.voters();
    let (mut b, _c) = (f.node("b"), f.node("c"));
    let (mut p, _) = f.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let follows = || f.says("b")["backups"][0]["active"] == true;
    let whole = || {
        f.await_view("a", "a", Some("b"));
        await_that("the backup follows", || follows().then_some(()));
        let before = await_that("the backup's status", || f.applied("c"));
        p.await_more(100);
        await_that("the backup's progress", || {
            f.applied("c").filter(|n| *n >= before + 100)
        });
        f.assert_equal();
    };
    let sessions = || fs::read_to_string(f.dir.join("c.txt")).unwrap();
    let sessions = || sessions().matches("following node b").count();

    whole();
    let before = sessions();
    drop(voters);
    let why = f.fails();
    assert!(why.contains("link"), "{why}");
    p.await_more(50);
    assert_eq!(sessions(), before, "{}", f.logs());
    voters = f.voters();

    whole();
    let why = f.fails_after(follows, || drop(voters));
    assert!(why.contains("link"), "{why}");
    p.await_more(50);
    voters = f.voters();

    whole();
    let fails = || f.disk.fail(Work::Sync, "/superblock");
    let why = f.fails_after(follows, fails);
    assert!(why.contains("poisoned"), "{why}");

    whole();
    let alone = || {
        b.kill();
        f.await_view("a", "a", None);
    };
    let why = f.fails_after(follows, alone);
    assert!(why.contains("changed meanwhile"), "{why}");
    let _b = f.node("b");

    whole();
    the_mirror_takes_over(&f, voters, p);
}

/// The voters stop while a forced mirror asks them to change the register, and
/// wake when it has given up: the change is done then, or never will be.
///
/// In both cases there is one primary with its mirror afterwards, by itself,
/// and it has everything that was acknowledged. (While the primary's daemon answered, the
/// forced node never looked at the register again: with any usual limit nobody was primary
/// until an operator asked once more.)
#[test]
fn a_force_whose_outcome_is_not_known_loses_nothing() {
    let Some(f) = Forced::new("b") else { return };
    be_patient(&f);
    let voters = f.voters();
    let (_b, _c) = (f.node("b"), f.node("c"));
    let (mut p, _) = f.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let all = |signal: &str| voters.iter().for_each(|v| v.signal(signal));
    f.fails_after(|| has_mirror(&f), || all("STOP"));
    let before = p.count();
    all("CONT");
    // With its mirror, the primary is in an epoch that no older change outdoes.
    let is_a = await_that("a primary with its mirror", || {
        let r = f.register("a");
        let goes_on = p.count() > before + 100 && has_mirror(&f);
        match (r["primary"]["node"].as_str()?, r["mirror"]["node"].as_str()) {
            ("a", Some("b")) if goes_on => Some(true),
            ("b", _) => Some(false),
            _ => None,
        }
    });
    if is_a {
        return the_mirror_takes_over(&f, voters, p);
    }
    let acknowledged = p.end();
    let (mut q, found) = f.program("b", &["--entries", "20", "--linger"]);
    assert!(
        found >= acknowledged,
        "{acknowledged} were acknowledged, {found} are there"
    );
    q.acknowledged(found, found + 20);
    await_that("a mirror of b", || {
        f.register("b")["mirror"].is_object().then_some(())
    });
    f.assert_equal();
    q.finish();
}

/// The voters stop while a forced mirror asks them to change the register; before they wake,
/// the primary dies, its daemon too. The mirror takes over, by the change or without it.
///
/// (A mirror in doubt looks at the register again and again. Each look counted as a word
/// of the primary's, so that the mirror never suspected it: found by reading.)
#[test]
fn a_mirror_in_doubt_takes_over() {
    let Some(f) = Forced::new("b") else { return };
    be_patient(&f);
    let mut voters = f.voters();
    let (_b, _c) = (f.node("b"), f.node("c"));
    let (mut p, _) = f.program("a", &["--pace", "2000"]);
    p.acknowledged(0, 100);
    let p = p.read_on_counting();
    let all = |signal: &str| voters.iter().for_each(|v| v.signal(signal));
    // On a busy machine the primary may give its mirror up meanwhile: again.
    await_that("a mirror that is still a member", || {
        f.await_view("a", "a", Some("b"));
        let mut is_member = false;
        f.fails_after(
            || has_mirror(&f),
            || {
                p.signal("STOP");
                is_member = f.register("a")["mirror"]["node"] == "b";
                all("STOP");
            },
        );
        if !is_member {
            all("CONT");
            p.signal("CONT");
        }
        is_member.then_some(())
    });
    voters[0].kill();
    let acknowledged = p.stop();
    voters[1..].iter().for_each(|v| v.signal("CONT"));
    b_goes_on(&f, acknowledged);
}

/// A backup of which nobody had any program attached was told that "primary a is alive" is to
/// be ended, and a program on it that it is to be promoted; what it heard was the mirror, also
/// where the primary was dead (new users).
#[test]
fn a_backup_says_who_is_to_be_promoted_instead() {
    let c = Cluster::larger("sync");
    be_patient(&c);
    let _nodes = ["a", "b", "c", "w", "x"].map(|n| c.node(n));
    let refused = |says: &[String]| {
        await_that("the refusal", || {
            let out = c.mojim("promote", &["--name", "c"]);
            assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
            let why = text(&out.stderr);
            says.iter().all(|s| why.contains(s)).then_some(())
        });
    };
    let promote = |more| c.advised("promote", more);
    let (p, _) = c.program("a", &["--entries", "1000000", "--pace", "2000"]);
    let p = p.read_on_counting();
    c.await_view("a", "a", Some("b"));
    refused(&[
        "node c is a backup; volume v: it follows node b, which is alive".to_owned(),
        format!(
            "End the program on node a, if one is attached, then {}",
            promote("--name b")
        ),
        promote("--force --name c"),
    ]);
    let Err(why) = c.try_program("c", &[]) else {
        panic!("a program is attached to a backup")
    };
    assert!(
        why.contains("node c is not the primary of volume v: a is")
            && why.contains(&format!("{}, and run it on node b", promote("--name b"))),
        "{why}"
    );
    p.stop();
}
