//! A primary's disk that comes back as of an earlier time, or without what it had made durable,
//! while the mirror's daemon runs on: what the mirror knows at that moment counts. And a mirror's
//! disk that comes back with a file that was cut: the mirror does not become primary.
//!
//! Owns its temporary directories, shared memory and processes.

// Seen to fail, each by a defect made on purpose or found:
// - what a mirror knew at its start, told at a greeting
// - a mirror's later epoch taken for a fork
// - a mirror that has more, overwritten in the modes with a local rule
// - a mirror of an earlier epoch took over, and its older copy replaced the primary's, and so it
//   did once it had been greeted
// - an attach named it before it had caught up
// - a mirror with a cut file took over, and no program could attach to it
// - with an older log in place `mojim status` called the volume healthy, and an attach was refused

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use mojim_testkit::cluster::{self, SYNC, Setup};
use mojim_testkit::home::Home;
use mojim_testkit::{Counted, Process, await_or, continue_all, stop_all, text, voters};

/// What becomes of node `a`, whose program has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It lost its power, and its disk the last 40 records of the log.
    Flush,
    /// It lost its power, and its log is as it was before the last 100 sync points.
    Log,
    /// The same with its files and its superblock.
    Directory,
    /// Its copy is as it was when the program before had ended in order.
    Copy,
    /// So is all of its directory, also what it keeps as a voter.
    Whole,
}

impl Fault {
    /// Where in node `a`'s directory the earlier state is put back.
    fn places(self) -> &'static [&'static str] {
        match self {
            Fault::Flush => &[],
            Fault::Log => &[".mojim/v.log.0"],
            Fault::Directory | Fault::Copy => &["v", ".mojim/v", ".mojim/v.log.0"],
            Fault::Whole => &[""],
        }
    }

    /// Whether the program before had ended in order.
    fn is_of_clean_end(self) -> bool {
        matches!(self, Fault::Copy | Fault::Whole)
    }
}

fn copy(from: &Path, to: &Path) {
    let out = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(
        out.unwrap().success(),
        "{} to {}",
        from.display(),
        to.display()
    );
}

/// A node's directory as it is now.
fn keep(c: &Home, node: &str) -> PathBuf {
    let kept = c.dir.join("kept");
    let _ = fs::remove_dir_all(&kept);
    copy(&c.dir.join(node), &kept);
    kept
}

fn put_back(c: &Home, node: &str, kept: &Path, fault: Fault) {
    for place in fault.places() {
        let (from, to) = (kept.join(place), c.dir.join(node).join(place));
        match to.is_dir() {
            true => fs::remove_dir_all(&to).unwrap(),
            false => fs::remove_file(&to).unwrap(),
        }
        copy(&from, &to);
    }
}

/// The last 40 records of `a`'s log were never written, although the disk had said so.
fn lose_flushes(c: &Home) {
    let (records, mut bytes) = c.records("a");
    let last = &records[records.len() - 40..];
    assert!(last[0].0 > c.checkpoint("a"), "a checkpoint was taken");
    for (_, at) in last {
        bytes[*at..*at + 512].fill(0);
    }
    fs::write(c.log("a"), bytes).unwrap();
}

/// What node `a` had in memory is gone.
fn lose_memory(c: &Home) {
    for d in fs::read_dir(&c.memory).unwrap() {
        let d = d.unwrap();
        if d.file_name().to_str().unwrap().contains("-a-") {
            fs::remove_dir_all(d.path()).unwrap();
        }
    }
}

/// A program on `a` that appends all the time.
fn busy(c: &Home) -> Counted {
    let (program, _) = c.program("a", &["--pace", "300"]);
    program.read_on_counting()
}

/// How often the mirror has said that it gives its copy to the node that attaches.
fn given(c: &Home) -> usize {
    let said = fs::read_to_string(c.dir.join("b.txt")).unwrap();
    said.matches("it takes this node's copy").count()
}

/// A program makes sync points, ends, and `fault` strikes node `a`, whose daemon stands still
/// meanwhile. Returns how many entries were acknowledged.
fn strike(c: &Home, fault: Fault, a: &mut Process) -> u64 {
    if fault.is_of_clean_end() {
        let (mut program, found) = c.program("a", &["--entries", "100", "--linger"]);
        program.acknowledged(found, found + 100);
        program.finish();
        a.signal("STOP");
        let kept = keep(c, "a");
        a.signal("CONT");
        let (mut program, found) = c.program("a", &["--entries", "50", "--linger"]);
        program.acknowledged(found, found + 50);
        program.finish();
        if fault == Fault::Whole {
            a.kill();
        } else {
            a.signal("STOP");
        }
        put_back(c, "a", &kept, fault);
        match fault {
            Fault::Whole => *a = c.node("a"),
            _ => a.signal("CONT"),
        }
        return found + 50;
    }
    let program = busy(c);
    program.await_more(100);
    let kept = (fault != Fault::Flush).then(|| {
        stop_all(&[program.id()]);
        let kept = keep(c, "a");
        continue_all(&[program.id()]);
        program.await_more(100);
        kept
    });
    c.stop_with_records(&["a"], 60, &[program.id()]);
    a.signal("STOP");
    let acknowledged = program.stop();
    lose_memory(c);
    match kept {
        Some(kept) => put_back(c, "a", &kept, fault),
        None => lose_flushes(c),
    }
    a.signal("CONT");
    acknowledged
}

/// Each of `faults` in its turn, with a mirror whose daemon has never been started again.
fn strike_all(c: &Home, mode: &str, faults: &[Fault], a: &mut Process) {
    for fault in faults {
        let before = given(c);
        let acknowledged = strike(c, *fault, a);
        // In `async` the mirror may lack the last ones.
        let there = c.says("b")["last_lsn"].as_u64().unwrap();
        let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
        program.acknowledged(found, found + 20);
        let last = c.says("a")["last_lsn"].as_u64().unwrap();
        let arrived = there + found + 20 - last;
        let least = match mode {
            "async" => acknowledged.min(arrived),
            _ => acknowledged,
        };
        assert!(
            found >= least,
            "{mode}, {fault:?}: {found} of {acknowledged} acknowledged, {arrived} had arrived; {}",
            c.logs()
        );
        assert!(
            given(c) > before,
            "{mode}, {fault:?}: not a word; {}",
            c.logs()
        );
        c.assert_equal();
        program.finish();
    }
}

fn keep_records(of: &str) -> String {
    of.replace("[volume.v]", "[volume.v]\ncheckpoint_threshold = 1000000")
}

fn by_hand(mode: &'static str, faults: &[Fault]) {
    let setup = Setup { mode, ..SYNC };
    let c = cluster::Cluster::new(setup);
    c.configure(&keep_records(&c.text(setup, "e2e")));
    let (mut a, _b) = (c.node("a"), c.node("b"));
    strike_all(&c, mode, faults, &mut a);
}

fn by_register(mode: &str, faults: &[Fault]) {
    let c = voters::Cluster::new(mode, "disk");
    // The mirror does not take over while the primary's node is struck.
    c.rewrite("failure_limit = \"1s\"", "failure_limit = \"20s\"");
    c.rewrite("[volume.v]", &keep_records("[volume.v]"));
    let (mut a, _b, _w) = (c.node("a"), c.node("b"), c.node("w"));
    let (mut program, _) = c.program("a", &["--entries", "1", "--linger"]);
    program.acknowledged(0, 1);
    program.finish();
    strike_all(&c, mode, faults, &mut a);
}

/// What a mirror knew was told at a greeting as of the start of its daemon. A primary whose copy
/// was older than what it had acknowledged, and did not say so, attached with a mirror that had
/// everything, and overwrote it: in `sync-flush` and `async`, after a disk had lost the end of
/// the log, 99 of 295 acknowledged entries were on no node any more, and `mojim verify` called the
/// copies equal. A copy of an earlier clean end did the same in every mode: 200 of 500.
#[test]
fn a_running_mirror_has_what_a_flushed_disk_lost() {
    let all = [Fault::Flush, Fault::Log, Fault::Directory, Fault::Copy];
    by_hand("sync-flush", &all);
}

#[test]
fn a_running_mirror_has_what_an_asynchronous_primary_lost() {
    let all = [Fault::Flush, Fault::Log, Fault::Directory, Fault::Copy];
    by_hand("async", &all);
}

#[test]
fn a_running_mirror_has_what_a_primary_of_earlier_lost() {
    let all = [Fault::Flush, Fault::Directory, Fault::Copy, Fault::Whole];
    by_hand("sync", &all);
}

/// A volume without a mirror began with less, and nobody was told, when its log was put back as of
/// a second earlier.
#[test]
fn an_older_log_is_not_taken_for_all_there_was() {
    let c = cluster::Cluster::new(SYNC);
    let of_a = c.data_node("a", c.ports[0].number, "medium = \"disk\", size = \"4MiB\"");
    c.configure(&keep_records(&format!(
        "cluster = \"e2e\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n{of_a}"
    )));
    let mut a = c.node("a");
    let program = busy(&c);
    program.await_more(100);
    stop_all(&[program.id()]);
    let kept = keep(&c, "a");
    continue_all(&[program.id()]);
    program.await_more(500);
    a.kill();
    let acknowledged = program.stop();
    lose_memory(&c);
    put_back(&c, "a", &kept, Fault::Log);
    let _a = c.node("a");
    for _ in 0..2 {
        let said = match c.try_program("a", &["--entries", "1"]) {
            Ok((_, found)) => panic!("it attached, with {found} of {acknowledged} entries"),
            Err(said) => said,
        };
        for what in ["v.log.0", "were acknowledged", "mojim promote", " --force "] {
            assert!(said.contains(what), "{what:?}: {said}");
        }
    }
    let out = c.mojim("promote", &["--name", "a", "--force", "--yes"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
    assert!(
        (1..acknowledged).contains(&found),
        "{found} of {acknowledged}"
    );
    program.acknowledged(found, found + 20);
    program.finish();
}

/// The log was put back while the node's daemon ran: the daemon had looked at what the killed
/// program left, and did not look again. An attach was refused, and `mojim status` called the
/// volume well. Its message named no file, and promised what the mirror would do.
#[test]
fn an_older_log_is_named_without_a_program() {
    let c = cluster::Cluster::new(SYNC);
    let of_a = c.data_node("a", c.ports[0].number, "medium = \"disk\", size = \"4MiB\"");
    c.configure(&keep_records(&format!(
        "cluster = \"e2e\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n{of_a}"
    )));
    let _a = c.node("a");
    let program = busy(&c);
    program.await_more(100);
    stop_all(&[program.id()]);
    let kept = keep(&c, "a");
    continue_all(&[program.id()]);
    program.await_more(500);
    program.stop();
    // Of a program that was killed this is no fault: its records are there.
    await_or(
        "a look at what the program left",
        || c.status().to_string() + &c.logs(),
        || {
            let a = c.says("a");
            let is = a["attached"] == false && a["settling"].is_null() && a["last_lsn"].is_u64();
            is.then_some(())
        },
    );
    assert_eq!(c.says("a")["error"], Value::Null);
    lose_memory(&c);
    put_back(&c, "a", &kept, Fault::Log);
    let said = await_or(
        "a word about the log",
        || c.status().to_string() + &c.logs(),
        || Some(c.says("a")["error"].as_str()?.to_owned()),
    );
    for what in ["v.log.0", "were acknowledged", "mojim promote", " --force "] {
        assert!(said.contains(what), "{what:?}: {said}");
    }
    let out = c.mojim("status", &[]);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{shown}");
    assert!(!shown.contains("from the mirror"), "{shown}");
    await_or(
        "its code",
        || c.status().to_string(),
        || c.says("a")["since"]["copy_damaged"].as_u64(),
    );
    assert!(c.try_program("a", &["--entries", "1"]).is_err());
    let out = c.mojim("promote", &["--name", "a", "--force", "--yes"]);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let (mut program, found) = c.program("a", &["--entries", "20", "--linger"]);
    program.acknowledged(found, found + 20);
    program.finish();
    assert_eq!(c.says("a")["error"], Value::Null);
}

/// The same with a register of views, which names the node and its copy's life as before.
#[test]
fn a_running_mirror_has_what_the_registers_primary_lost() {
    by_register("sync", &[Fault::Log, Fault::Copy]);
    by_register("sync-flush", &[Fault::Flush, Fault::Directory, Fault::Copy]);
}

/// The mirror's copy was put back as of before its primary had attached last, and the primary's
/// node stood still when the mirror came back: it took over with 100 of 300 acknowledged entries,
/// and replaced the copy that had all of them.
#[test]
fn a_mirror_of_earlier_does_not_take_over() {
    let c = voters::Cluster::new("sync", "disk");
    let (a, mut b, _w) = (c.node("a"), c.node("b"), c.node("w"));
    let append = |from: u64| {
        let (mut program, found) = c.program("a", &["--entries", "100", "--linger"]);
        assert_eq!(found, from);
        program.acknowledged(found, found + 100);
        c.await_mirror();
        program.finish();
    };
    append(0);
    b.kill();
    let kept = keep(&c, "b");
    b = c.node("b");
    append(100);
    a.signal("STOP");
    b.kill();
    put_back(&c, "b", &kept, Fault::Copy);
    let _b = c.node("b");
    let why = await_or(
        "why it does not take over",
        || c.status().to_string() + &c.logs(),
        || Some(c.says("b")["take_over_error"].as_str()?.to_owned()),
    );
    for what in ["of an earlier time", "promote --force"] {
        assert!(why.contains(what), "{what:?}: {why}");
    }
    let out = c.mojim("promote", &["--name", "b"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    assert!(text(&out.stderr).contains("of an earlier time"));
    a.signal("CONT");
    append(200);
    c.assert_equal();
}

/// Somebody cuts a node's file, of which no record waits in its log.
fn cut_ballast(c: &Home, node: &str) {
    let at = c.dir.join(node).join("v/ballast");
    let f = fs::File::options().write(true).open(at).unwrap();
    f.set_len(BALLAST / 2).unwrap();
}

const BALLAST: u64 = 1 << 20;

/// Mirror `b` has records in its log that are not applied, none of them of the file that is cut
/// while its daemon is down. Then the primary dies with its node. Returns how many entries were
/// acknowledged.
fn cut_while_down(c: &Home, a: &mut Process, b: &mut Process) -> u64 {
    let ballast = BALLAST.to_string();
    let words = ["--entries", "100", "--ballast", &ballast, "--linger"];
    let (mut program, found) = c.program("a", &words);
    program.acknowledged(found, found + 100);
    program.finish();
    // All of that is in its files, and its log is empty.
    b.signal("TERM");
    b.wait();
    *b = c.node("b");
    let program = busy(c);
    program.await_more(100);
    b.kill();
    stop_all(&[program.id()]);
    cut_ballast(c, "b");
    *b = c.node("b");
    a.kill();
    program.stop()
}

/// Until node `b` says that the file was cut; it is not promoted either.
fn says_that_it_was_cut(c: &Home) {
    let told = |said: &str| said.contains("b/v/ballast") && said.contains(&BALLAST.to_string());
    await_or(
        "a word about the file",
        || c.status().to_string() + &c.logs(),
        || c.says("b")["error"].as_str().filter(|e| told(e)).map(drop),
    );
    let out = c.mojim("promote", &["--name", "b"]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    let said = text(&out.stderr);
    assert!(told(&said), "{said}");
    await_or(
        "its code",
        || c.status().to_string(),
        || c.says("b")["since"]["copy_damaged"].as_u64(),
    );
}

/// Node `a` goes on with all that was acknowledged, and `b` gets another copy of it. Returns the
/// program, which runs on.
fn goes_on_and_heals(c: &Home, attached: (Process, u64), acknowledged: u64) -> Counted {
    let (mut program, found) = attached;
    assert!(found >= acknowledged, "{found} of {acknowledged}");
    program.acknowledged(found, found + 20);
    let program = program.read_on_counting();
    let words = ["--yes", "--wait", "60", "--anew", "--name", "b"];
    let out = c.mojim("repair", &words);
    let said = format!("{}{}", text(&out.stderr), c.logs());
    assert_eq!(out.status.code(), Some(0), "{said}");
    program.await_more(20);
    c.assert_equal();
    program
}

/// The sizes of files were compared with the catalogue only where no record waited to be applied:
/// a mirror with a file that was cut followed, and took over when its primary died. Only the
/// program that attached found the damage, and could not go on; nor could the node whose copy
/// was good, for the register did not name it any more.
#[test]
fn a_mirror_with_a_file_that_was_cut_does_not_take_over() {
    let c = voters::Cluster::new("sync", "disk");
    c.rewrite("[volume.v]", &keep_records("[volume.v]"));
    let (mut a, mut b, _w) = (c.node("a"), c.node("b"), c.node("w"));
    let acknowledged = cut_while_down(&c, &mut a, &mut b);
    says_that_it_was_cut(&c);
    assert_eq!(c.register("b")["primary"]["node"], "a");
    let _a = c.node("a");
    let attached = c.program("a", &["--pace", "300"]);
    goes_on_and_heals(&c, attached, acknowledged).stop();
}

/// The same by hand. Then the file is cut while the mirror's daemon runs, which nobody notices
/// before it is to be primary.
#[test]
fn a_mirror_with_a_file_that_was_cut_is_not_promoted() {
    let c = cluster::Cluster::new(SYNC);
    c.configure(&keep_records(&c.text(SYNC, "e2e")));
    let (mut a, mut b) = (c.node("a"), c.node("b"));
    let acknowledged = cut_while_down(&c, &mut a, &mut b);
    says_that_it_was_cut(&c);
    a = c.node("a");
    // It may go on alone.
    c.promote("a");
    let attached = c.program("a", &["--pace", "300"]);
    let program = goes_on_and_heals(&c, attached, acknowledged);
    cut_ballast(&c, "b");
    program.stop();
    a.kill();
    await_or(
        "a refusal for the file",
        || c.status().to_string() + &c.logs(),
        || {
            // Its primary may have been heard a moment ago.
            let out = c.mojim("promote", &["--name", "b"]);
            assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
            text(&out.stderr).contains("b/v/ballast").then_some(())
        },
    );
    says_that_it_was_cut(&c);
}
