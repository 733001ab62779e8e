//! Tests of how a cluster heals by itself where no program is attached.
//!
//! The daemon of the node that is primary brings the other copy up to date, and yields to a
//! program.
//!
//! Owns its temporary directories, shared memory and processes.

use std::fs;
use std::time::Duration;

use mojim_testkit::cluster::{Cluster, SYNC};
use mojim_testkit::{await_or, await_that, link, text};

/// Until `node` follows `of`, whole and with all that it has.
fn await_level(c: &Cluster, node: &str, of: &str) {
    await_that(&format!("{node} as far as {of}"), || {
        let (x, y) = (c.says(node), c.says(of));
        let is = x["state"] == "whole"
            && x["view"]["primary"] == of
            && x["epoch"] == y["epoch"]
            && x["last_lsn"] == y["last_lsn"]
            && y["attached"] == false
            && y["healing"].is_null();
        is.then_some(())
    });
}

/// After a take-over the node that had failed came back and stayed as it was until a
/// program attached to the new primary: nothing that happened to that one could be outlived,
/// `verify` and `repair` could do nothing, and `repair --anew` said that the old copy was
/// the one to which the others are made equal.
#[test]
fn after_a_take_over_the_other_copy_is_brought_up_to_date() {
    let c = Cluster::new(SYNC);
    let mut a = c.node("a");
    let _b = c.node("b");
    let (mut p, _) = c.program("a", &["--entries", "200", "--linger"]);
    p.acknowledged(0, 200);
    p.kill();
    a.kill();
    c.promote("b");
    let _a = c.node("a");
    await_level(&c, "a", "b");
    c.assert_equal();
    // A node may be late with its answer.
    await_or(
        "all to be well",
        || text(&c.mojim("status", &[]).stdout),
        || (c.mojim("status", &[]).status.code() == Some(0)).then_some(()),
    );
    let (mut p, found) = c.program("b", &["--entries", "10", "--linger"]);
    assert_eq!(found, 200);
    p.acknowledged(200, 210);
    p.finish();
    c.assert_equal();
}

/// The same for a mirror whose disk was replaced, and for a program that is started while
/// its copy is under way: that one is not kept waiting for it.
#[test]
fn a_lost_copy_is_made_again_and_a_program_goes_first() {
    let c = Cluster::new(SYNC);
    let a = c.node("a");
    let mut b = c.node("b");
    let words = ["--entries", "10", "--ballast", "3000000", "--linger"];
    let (mut p, _) = c.program("a", &words);
    p.acknowledged(0, 10);
    p.finish();
    drop(a);
    b.kill();
    fs::remove_dir_all(c.dir.join("b")).unwrap();
    c.lose_memory("b");
    // Ten seconds for the copy, by whoever gives it.
    let near = c.file().with_extension("near");
    fs::copy(c.file(), &near).unwrap();
    let address = format!("127.0.0.1:{}", c.ports[1].number);
    let port = link::slow(address.clone(), 32 << 10, Duration::from_millis(100));
    let said = fs::read_to_string(c.file()).unwrap();
    let far = said.replace(&address, &format!("127.0.0.1:{port}"));
    c.configure(&far);
    let _a = c.node("a");
    let _b = c.node_as(&near, "b");
    await_that("a copy for b", || {
        (c.says("a")["healing"] == true && c.says("b")["state"] == "loading").then_some(())
    });
    let (mut p, found) = c.program("a", &["--entries", "10", "--linger"]);
    assert_eq!(found, 10);
    p.acknowledged(10, 20);
    p.finish();
    await_level(&c, "b", "a");
    c.assert_equal();
}

/// After a program was killed, nobody knew of its last records whether they were committed:
/// the copies could not be compared before somebody had attached.
#[test]
fn copies_are_compared_after_a_program_was_killed() {
    let c = Cluster::new(SYNC);
    let _a = c.node("a");
    let _b = c.node("b");
    let (p, _) = c.program("a", &["--pace", "300"]);
    let p = p.read_on_counting();
    p.await_more(400);
    // Nothing would be open if a checkpoint had just been taken.
    c.stop_with_records(&["a"], 3, &[p.id()]);
    let acknowledged = p.stop();
    // Nothing else is behind, that the daemon would see to it by itself: at most the record
    // that was being sent, which no checkpoint covers.
    let level = || {
        let (a, b) = (c.says("a"), c.says("b"));
        let (last, has) = (a["last_lsn"].as_u64()?, b["last_lsn"].as_u64()?);
        (a["settling"] != true && has <= last && last <= has + 1).then_some(a)
    };
    let before = await_that("both copies at rest", level);
    assert!(before["checkpoint"].as_u64() < before["last_lsn"].as_u64());
    c.assert_equal();
    // The daemon that has seen to it detaches.
    await_that("a checkpoint of all that a has", || {
        let a = c.says("a");
        let is = a["last_lsn"].is_u64() && a["checkpoint"] == a["last_lsn"];
        is.then_some(())
    });
    let (mut p, found) = c.program("a", &["--entries", "10"]);
    assert!(found >= acknowledged);
    p.acknowledged(found, found + 10);
    p.finish();
}
