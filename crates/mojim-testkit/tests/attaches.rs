//! The conclusions that an attach or a promotion may draw from the copies that it finds.
//!
//! It may never conclude that less was acknowledged than is known, or may be, unless an operator
//! says so. The tests have real nodes without a register, memory and disks that are lost, and logs
//! that are damaged.
//!
//! Owns its temporary directories, shared memory and processes.

use std::fs;

use mojim_testkit::cluster::{Cluster, SYNC, Setup};
use mojim_testkit::{Counted, Port, Process, await_that, text};
use serde_json::json;

/// A mirror whose log is memory.
const DISK: Setup = Setup {
    mirror_medium: "dram",
    ..SYNC
};

/// A program that appends all the time.
fn busy(c: &Cluster, node: &str) -> (Counted, u64) {
    let (program, found) = c.program(node, &["--pace", "300"]);
    (program.read_on_counting(), found)
}

/// More records wait in the logs than a test makes.
fn keep_records(c: &Cluster, setup: Setup) {
    let text = c.text(setup, "e2e");
    c.configure(&text.replace("[volume.v]", "[volume.v]\ncheckpoint_threshold = 1000000"));
}

fn kill(mut daemon: Process) {
    daemon.kill();
}

/// Nobody attaches on `node`: what the program says.
fn refused(c: &Cluster, node: &str) -> String {
    match c.try_program(node, &["--entries", "1"]) {
        Ok((_, found)) => panic!("it attached, with {found} entries; {}", c.logs()),
        Err(said) => said,
    }
}

/// `mojim promote` refuses, and says why.
fn not_promoted(c: &Cluster, node: &str) -> String {
    let out = c.mojim("promote", &["--name", node]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    text(&out.stderr)
}

/// One bit of a record, 20 before the last of a log on disk, on a node that is down
/// and whose ring is lost.
fn damage(c: &Cluster, node: &str) {
    let (records, mut bytes) = c.records(node);
    let (lsn, at) = records[records.len() - 21];
    assert!(lsn > c.checkpoint(node), "a checkpoint was taken");
    bytes[at + 60] ^= 1;
    fs::write(c.log(node), bytes).unwrap();
}

/// The last 40 records were never written to this log.
fn cut(c: &Cluster, node: &str) {
    let (records, mut bytes) = c.records(node);
    let (lsn, _) = records[records.len() - 40];
    assert!(lsn > c.checkpoint(node), "a checkpoint was taken");
    for (_, at) in &records[records.len() - 40..] {
        bytes[*at..*at + 512].fill(0);
    }
    fs::write(c.log(node), bytes).unwrap();
}

/// The node's copy is gone, and its name stays.
fn replace_disk(c: &Cluster, node: &str) {
    fs::remove_dir_all(c.dir.join(node)).unwrap();
    c.lose_memory(node);
}

/// Both nodes lost their memory at once, and with it what only the two rings, or
/// the mirror's log, held. The mirror came back empty under its name, and the
/// attach made it a copy of the rest, with success: up to 1,029 of 4,506
/// acknowledged entries were gone, and nobody was told.
#[test]
fn an_empty_mirror_is_no_witness_of_what_the_ring_held() {
    for (setup, disk_too) in [(DISK, false), (SYNC, true)] {
        let c = Cluster::new(setup);
        keep_records(&c, setup);
        let (mut a, b) = (c.node("a"), c.node("b"));
        let (program, _) = busy(&c, "a");
        program.await_more(300);
        kill(b);
        a.kill();
        let acknowledged = program.stop();
        c.lose_memory("a");
        match disk_too {
            true => replace_disk(&c, "b"),
            false => c.lose_memory("b"),
        }
        let (_a, _b) = (c.node("a"), c.node("b"));
        for _ in 0..2 {
            let said = refused(&c, "a");
            for what in ["node b", "lost", "mojim promote", "--name a"] {
                assert!(said.contains(what), "{what:?}: {said}");
            }
        }
        c.promote("a");
        let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
        assert!(found <= acknowledged + 1, "{found} of {acknowledged}");
        program.acknowledged(found, found + 20);
        await_that("the mirror", || {
            (c.says("a")["view"]["mirror"] == "b").then_some(())
        });
        c.assert_equal();
        program.finish();
        // It is over.
        let (mut program, found) = c.program("a", &["--entries", "1"]);
        program.acknowledged(found, found + 1);
        program.finish();
    }
}

/// While there was a register, a try to attach noted that the ring was lost only in the
/// life of the copy. Then the register was given up, and the last sync points with it,
/// without a word.
#[test]
fn a_lost_ring_counts_once_the_register_is_given_up() {
    let c = Cluster::new(DISK);
    let port = Port::new();
    let by_register = c
        .text(DISK, "e2e")
        .replace("[volume.v]", "[volume.v]\ncheckpoint_threshold = 1000000")
        + &c.witness("w", port.number);
    c.configure(&by_register);
    let (mut a, b, w) = (c.node("a"), c.node("b"), c.node("w"));
    let (program, _) = busy(&c, "a");
    program.await_more(300);
    kill(b);
    a.kill();
    let acknowledged = program.stop();
    c.lose_memory("a");
    c.lose_memory("b");
    let (mut a, b) = (c.node("a"), c.node("b"));
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(said.contains("lost what it held"), "{said}");
    }
    a.kill();
    kill(b);
    kill(w);
    c.configure(&by_register.replace("[volume.v]", "[volume.v]\nfailover = \"manual\""));
    let (_a, _b) = (c.node("a"), c.node("b"));
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(said.contains("memory was lost"), "{said}");
    }
    c.promote("a");
    let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
    assert!(found <= acknowledged + 1, "{found} of {acknowledged}");
    program.acknowledged(found, found + 20);
    program.finish();
}

/// The configuration with a backup `c`, in which operators promote.
fn by_hand_with_backup(c: &Cluster, port: &Port) -> String {
    c.text(SYNC, "e2e").replace(
        "mirror = \"b\"",
        "mirror = \"b\"\nbackups = [\"c\"]\nfailover = \"manual\"",
    ) + &c.data_node("c", port.number, "size = \"4MiB\"")
}

/// A backup had been promoted while the two others were away. They came back, the program
/// attached with its mirror, and what they acknowledged was replaced later.
#[test]
fn an_attach_asks_whether_a_backup_was_promoted() {
    let c = Cluster::new(SYNC);
    let port = Port::new();
    let with_backup = by_hand_with_backup(&c, &port);
    c.configure(&with_backup);
    let (mut a, b, backup) = (c.node("a"), c.node("b"), c.node("c"));
    let (mut program, _) = c.program("a", &["--entries", "50", "--linger"]);
    program.acknowledged(0, 50);
    await_that("the backup", || {
        let (here, there) = (c.says("a"), c.says("c"));
        (there["state"] == "whole" && here["last_lsn"] == there["last_lsn"]).then_some(())
    });
    program.finish();
    a.kill();
    kill(b);
    await_that("the promotion", || {
        let out = c.mojim("promote", &["--name", "c", "--force", "--yes"]);
        (out.status.code() == Some(0)).then_some(())
    });
    let (mut program, found) = c.program("c", &["--entries", "10"]);
    assert_eq!(found, 50);
    program.acknowledged(50, 60);
    program.finish();
    // Its daemon will bring `a` up to date by itself: not at once.
    kill(backup);
    let (_a, _b, _c) = (c.node("a"), c.node("b"), c.node("c"));
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(
            said.contains("primary of volume v") && said.contains("epoch"),
            "{said}"
        );
    }
    let (mut program, found) = c.program("c", &["--entries", "10"]);
    assert_eq!(found, 60);
    program.acknowledged(60, 70);
    program.finish();
}

/// The mirror was promoted, a backup followed it, and the promoted node's disk was replaced: the
/// old primary attached with the empty node, and acknowledged what the backup's daemon, which
/// answered, knew to be of an older view. And where both disks were replaced, the attach began
/// an empty volume, of which the backup became a copy.
#[test]
fn an_attach_asks_every_node_that_answers_for_the_view() {
    let c = Cluster::new(SYNC);
    let port = Port::new();
    let with_backup = by_hand_with_backup(&c, &port);
    c.configure(&with_backup);
    let followed = |primary: &str| {
        await_that("the backup", || {
            let (here, there) = (c.says(primary), c.says("c"));
            let both = there["state"] == "whole" && here["last_lsn"] == there["last_lsn"];
            (both && here["epoch"] == there["epoch"]).then_some(())
        });
    };
    let (mut a, b, backup) = (c.node("a"), c.node("b"), c.node("c"));
    let (mut program, _) = c.program("a", &["--entries", "50", "--linger"]);
    program.acknowledged(0, 50);
    followed("a");
    program.finish();
    a.kill();
    // What the backup hears is the mirror, which it said was the primary.
    await_that("the refusal", || {
        let out = c.mojim("promote", &["--name", "c"]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
        let why = text(&out.stderr);
        let says = [
            "it follows node b, which is alive",
            &c.advised("promote", "--name b"),
        ];
        says.iter().all(|s| why.contains(s)).then_some(())
    });
    await_that("the promotion", || {
        let out = c.mojim("promote", &["--name", "b"]);
        (out.status.code() == Some(0)).then_some(())
    });
    let (mut program, found) = c.program("b", &["--entries", "10", "--linger"]);
    assert_eq!(found, 50);
    program.acknowledged(50, 60);
    followed("b");
    program.finish();
    for node in [b, backup] {
        kill(node);
    }
    replace_disk(&c, "b");
    let (mut a, b, backup) = (c.node("a"), c.node("b"), c.node("c"));
    let said = refused(&c, "a");
    assert!(
        said.contains("node b has been primary of volume v") && said.contains("as node c says"),
        "{said}"
    );
    a.kill();
    for node in [b, backup] {
        kill(node);
    }
    replace_disk(&c, "a");
    c.configure(
        &with_backup
            .replace("primary = \"a\"", "primary = \"b\"")
            .replace("mirror = \"b\"", "mirror = \"a\""),
    );
    let (_a, _b, _c) = (c.node("a"), c.node("b"), c.node("c"));
    let said = refused(&c, "b");
    assert!(
        said.contains("is new") && said.contains(&c.advised("promote", "--force --name c")),
        "{said}"
    );
    await_that("the promotion", || {
        let out = c.mojim("promote", &["--name", "c", "--force", "--yes"]);
        (out.status.code() == Some(0)).then_some(())
    });
    let (mut program, found) = c.program("c", &["--entries", "10"]);
    assert_eq!(found, 60);
    program.acknowledged(60, 70);
    program.finish();
}

/// The mirror was away while sync points were acknowledged, then the primary's
/// power failed, and one bit of its log was damaged. With the mirror in reach
/// the attach took what was before the bit for all there ever was.
#[test]
fn a_damaged_log_is_not_given_up_for_a_mirror_that_is_behind() {
    let asynchronous = Setup {
        mode: "async",
        ..SYNC
    };
    // In `sync` the primary is alone by an operator's word.
    for setup in [asynchronous, SYNC] {
        let by_hand = setup.mode == "sync";
        let c = Cluster::new(setup);
        keep_records(&c, setup);
        let (mut a, b) = (c.node("a"), c.node("b"));
        let (mut program, _) = c.program("a", &["--entries", "50"]);
        program.acknowledged(0, 50);
        program.finish();
        kill(b);
        if by_hand {
            c.promote("a");
        }
        let (program, found) = busy(&c, "a");
        program.await_more(100);
        c.stop_with_records(&["a"], 60, &[program.id()]);
        a.kill();
        let acknowledged = program.stop();
        c.lose_memory("a");
        damage(&c, "a");
        let (_a, _b) = (c.node("a"), c.node("b"));
        for _ in 0..2 {
            let said = refused(&c, "a");
            assert!(
                said.contains("v.log.0") && said.contains("--force"),
                "{said}"
            );
            let said = not_promoted(&c, "a");
            assert!(
                said.contains("v.log.0") && said.contains("--force"),
                "{said}"
            );
        }
        let out = c.mojim("promote", &["--name", "a", "--force", "--yes"]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let (mut program, left) = c.program("a", &["--entries", "20", "--linger"]);
        assert!((found..acknowledged).contains(&left), "{left} are there");
        program.acknowledged(left, left + 20);
        c.assert_equal();
        program.finish();
    }
}

/// The damaged log is the mirror's, and the primary lost its ring: what the
/// mirror knows to be missing from itself it says when it is greeted, and it is
/// not promoted either, but by force.
#[test]
fn a_mirror_says_what_its_damaged_log_lacks() {
    let c = Cluster::new(SYNC);
    keep_records(&c, SYNC);
    let (mut a, b) = (c.node("a"), c.node("b"));
    let (program, found) = busy(&c, "a");
    program.await_more(100);
    c.stop_with_records(&["a", "b"], 60, &[program.id(), b.child.id()]);
    a.kill();
    kill(b);
    let acknowledged = program.stop();
    c.lose_memory("a");
    c.lose_memory("b");
    cut(&c, "a");
    damage(&c, "b");
    let (_a, _b) = (c.node("a"), c.node("b"));
    let said = refused(&c, "a");
    assert!(said.contains("node b") && said.contains("LSN"), "{said}");
    let said = not_promoted(&c, "b");
    assert!(
        said.contains("v.log.0") && said.contains("--force"),
        "{said}"
    );
    let out = c.mojim("promote", &["--name", "b", "--force", "--yes"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let (mut program, left) = c.program("b", &["--entries", "20", "--linger"]);
    assert!((found..acknowledged).contains(&left), "{left} are there");
    program.acknowledged(left, left + 20);
    c.assert_equal();
    program.finish();
}

/// Where the mirror has all that the damaged log lacks, it is adopted, as ever.
#[test]
fn a_damaged_log_is_mended_from_a_mirror_that_has_all() {
    let c = Cluster::new(SYNC);
    keep_records(&c, SYNC);
    let (mut a, b) = (c.node("a"), c.node("b"));
    let (program, _) = busy(&c, "a");
    program.await_more(100);
    c.stop_with_records(&["a"], 60, &[program.id()]);
    a.kill();
    let acknowledged = program.stop();
    c.lose_memory("a");
    damage(&c, "a");
    let _a = c.node("a");
    let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
    assert!(found >= acknowledged, "{found} of {acknowledged}");
    program.acknowledged(found, found + 20);
    c.assert_equal();
    program.finish();
    drop(b);
}

/// In `async` a mirror lags. A primary that came back empty under its name began an
/// empty volume where the mirror did not answer, and took the mirror's copy for all
/// there ever was where it did.
#[test]
fn an_empty_primary_does_not_take_a_copy_that_lags_for_everything() {
    let c = Cluster::new(Setup {
        mode: "async",
        ..SYNC
    });
    let (mut a, b) = (c.node("a"), c.node("b"));
    let (mut program, _) = c.program("a", &["--entries", "50"]);
    program.acknowledged(0, 50);
    program.finish();
    kill(b);
    let (mut program, _) = c.program("a", &["--entries", "50"]);
    program.acknowledged(50, 100);
    program.finish();
    a.kill();
    replace_disk(&c, "a");
    let _a = c.node("a");
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(said.contains("b cannot be reached"), "{said}");
        assert!(said.contains("no whole copy"), "{said}");
    }
    let _b = c.node("b");
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(said.contains("up to LSN"), "{said}");
        assert!(
            said.contains(&c.advised("promote", "--volume v --name b")),
            "{said}"
        );
    }
    let out = c.mojim("promote", &["--volume", "v", "--name", "b"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let said = refused(&c, "a");
    assert!(said.contains("node b is itself the primary"), "{said}");
    let (mut program, left) = c.program("b", &["--entries", "20", "--linger"]);
    assert_eq!(left, 50);
    program.acknowledged(left, left + 20);
    c.assert_equal();
    program.finish();
}

/// A primary that had gone on alone, by an operator's word, lost its memory, and with
/// it its copy: its mirror, which did not know that it had been given up, was taken for
/// a member, and what was acknowledged without it was gone without a word.
#[test]
fn a_copy_that_was_left_behind_is_not_all_there_was() {
    let c = Cluster::new(SYNC);
    let on_disk = "medium = \"disk\"";
    let in_memory = c
        .text(SYNC, "e2e")
        .replacen(on_disk, "medium = \"dram\"", 1);
    c.configure(&in_memory);
    let (mut a, b) = (c.node("a"), c.node("b"));
    let (mut program, _) = c.program("a", &["--entries", "50"]);
    program.acknowledged(0, 50);
    program.finish();
    kill(b);
    c.promote("a");
    let (program, _) = busy(&c, "a");
    program.await_more(100);
    a.kill();
    assert!(program.stop() > 50);
    c.lose_memory("a");
    let (_a, _b) = (c.node("a"), c.node("b"));
    for _ in 0..2 {
        let said = refused(&c, "a");
        assert!(said.contains("went on without it"), "{said}");
    }
    // The node that went on without it knows a later view.
    let said = not_promoted(&c, "b");
    assert!(
        said.contains("a later view") && said.contains("--force"),
        "{said}"
    );
    let out = c.mojim("promote", &["--force", "--yes", "--name", "b"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let (mut program, left) = c.program("b", &["--entries", "20", "--linger"]);
    assert_eq!(left, 50);
    program.acknowledged(left, left + 20);
    c.assert_equal();
    program.finish();
}

/// Each of two nodes was promoted while the other was away, and served: when they met, the
/// one with the higher epoch, which was the earlier, replaced the copy of the other, and
/// what had been acknowledged there was gone without a word.
#[test]
fn of_two_that_were_promoted_unknown_to_each_other_a_person_chooses() {
    for chosen in ["a", "b"] {
        let c = Cluster::new(SYNC);
        let (mut a, mut b) = (c.node("a"), c.node("b"));
        let (mut program, _) = c.program("a", &["--entries", "50"]);
        program.acknowledged(0, 50);
        program.finish();
        // b serves alone, and begins more epochs than a will.
        a.kill();
        assert_eq!(c.promote("b")["unasked"], json!(["a"]));
        for at in [50, 60, 70] {
            let (mut program, left) = c.program("b", &["--entries", "10"]);
            assert_eq!(left, at);
            program.acknowledged(at, at + 10);
            program.finish();
        }
        b.kill();
        // a is repaired first: the operator knows of no other.
        let mut a = c.node("a");
        assert_eq!(c.promote("a")["unasked"], json!(["b"]));
        let out = c.mojim("promote", &["--name", "a"]);
        let said = text(&out.stdout);
        assert!(
            said.contains("Node b did not answer. If it was promoted too"),
            "{said}"
        );
        let (mut program, left) = c.program("a", &["--entries", "5", "--linger"]);
        assert_eq!(left, 50);
        program.acknowledged(50, 55);
        program.finish();
        let b = c.node("b");
        // Neither daemon makes the copies equal, and neither node attaches.
        await_that("the daemon's refusal", || {
            let said = c.logs();
            (said.contains("cannot be brought up to date") && said.contains("both promoted"))
                .then_some(())
        });
        let said = refused(&c, "a");
        assert!(said.contains("is itself the primary"), "{said}");
        let said = refused(&c, "b");
        assert!(said.contains("neither knowing of the other"), "{said}");
        let out = c.mojim("status", &[]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
        for node in ["a", "b"] {
            let said = not_promoted(&c, node);
            assert!(said.contains("--force"), "{said}");
        }
        // Nothing has changed by all that, also across another life of both daemons.
        a.kill();
        kill(b);
        let (_a, _b) = (c.node("a"), c.node("b"));
        let out = c.mojim("promote", &["--force", "--yes", "--name", chosen]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let said = text(&out.stdout);
        assert!(!said.contains("did not answer"), "{said}");
        let (mut program, left) = c.program(chosen, &["--entries", "5", "--linger"]);
        assert_eq!(left, if chosen == "a" { 55 } else { 80 });
        program.acknowledged(left, left + 5);
        c.assert_equal();
        program.finish();
    }
}

/// A promotion that was refused kept the copy open: no program could attach on that node
/// until its daemon was started again, and it was told that another one was attached.
#[test]
fn a_promotion_that_is_refused_leaves_the_copy_to_a_program() {
    let c = Cluster::new(SYNC);
    let (a, b) = (c.node("a"), c.node("b"));
    let (mut program, _) = c.program("a", &["--entries", "50"]);
    program.acknowledged(0, 50);
    program.finish();
    drop(a);
    kill(b);
    let text = c.text(SYNC, "e2e");
    c.configure(&text.replacen("medium = \"disk\"", "medium = \"dram\"", 1));
    c.lose_memory("a");
    replace_disk(&c, "a");
    let _a = c.node("a");
    // An attach that fails leaves a superblock.
    refused(&c, "a");
    let said = not_promoted(&c, "a");
    assert!(said.contains("no whole copy"), "{said}");
    let _b = c.node("b");
    let (mut program, left) = c.program("a", &["--entries", "5", "--linger"]);
    assert_eq!(left, 50);
    program.acknowledged(50, 55);
    program.finish();
}

/// The old primary had lost its memory, and its mirror answered with more than it had: a
/// plain promotion of it gave that up.
#[test]
fn a_promotion_asks_whether_the_mirror_has_more() {
    let c = Cluster::new(SYNC);
    keep_records(&c, SYNC);
    let (mut a, b) = (c.node("a"), c.node("b"));
    let (program, _) = busy(&c, "a");
    program.await_more(200);
    c.stop_with_records(&["a"], 60, &[program.id()]);
    a.kill();
    let acknowledged = program.stop();
    c.lose_memory("a");
    cut(&c, "a");
    let _a = c.node("a");
    let said = not_promoted(&c, "a");
    assert!(said.contains("takes them over"), "{said}");
    assert!(said.contains("--force"), "{said}");
    let (mut program, left) = c.program("a", &["--entries", "5", "--linger"]);
    assert!(left >= acknowledged, "{left} of {acknowledged}");
    program.acknowledged(left, left + 5);
    program.finish();
    drop(b);
}
