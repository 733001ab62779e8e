//! Copies that differ, end to end: sent by difference, compared and repaired
//! while a program commits.
//!
//! The tests count bytes, as the nodes count them, never time.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use mojim::{MapFlags, Volume, msync};
use serde_json::Value;

use mojim_testkit::cluster::{Cluster, SYNC, Setup};
use mojim_testkit::{await_that, text};

/// Longer than any test takes.
const MANY: &str = "1000000";

/// Changes a byte of a file in place, behind everyone's back.
fn flip(c: &Cluster, file: &str, at: u64) {
    let f = OpenOptions::new()
        .read(true)
        .write(true)
        .open(c.dir.join(file))
        .unwrap();
    let mut b = [0];
    f.read_exact_at(&mut b, at).unwrap();
    f.write_all_at(&[b[0] ^ 0x10], at).unwrap();
}

fn verified(c: &Cluster) -> (Option<i32>, Value) {
    let out = c.mojim("verify", &["--json", "--wait", "60"]);
    let v = serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)));
    (out.status.code(), v)
}

/// Bytes that came over the link for the last copy to node b, and those of all files.
fn came(c: &Cluster) -> (u64, u64, u64) {
    let copy = await_that("the copy", || {
        let mut b = c.says("b");
        let copy = &b["copy"];
        // One that was cut off is over, too, until the next one begins.
        let is_whole = copy["running"] == false && copy["done"] == copy["total"];
        (is_whole && b["link"]["up"] == true).then(|| b["copy"].take())
    });
    let n = |k: &str| copy[k].as_u64().unwrap();
    (n("moved"), n("kept"), n("total"))
}

#[test]
fn a_mirror_that_was_away_for_long_gets_what_differs() {
    let c = Cluster::new(Setup {
        mode: "async",
        ..SYNC
    });
    let _a = c.node("a");
    let mut b = c.node("b");
    let ballast = (32 << 20).to_string();
    let args = [
        "--entries",
        "12000",
        "--first",
        "50",
        "--ballast",
        &ballast,
        "--linger",
    ];
    let (mut program, _) = c.program("a", &args);
    program.acknowledged(0, 50);
    b.kill();
    // More than the log holds, all of it without b.
    program.go_on();
    program.acknowledged(50, 12000);
    let _b = c.node("b");
    let (moved, kept, total) = came(&c);
    assert!(moved < total / 4, "{moved} of {total}");
    assert!(kept > 0);
    program.finish();
    c.assert_equal();
}

#[test]
fn a_lost_log_does_not_cost_a_whole_copy() {
    let c = Cluster::new(Setup {
        mirror_medium: "dram",
        ..SYNC
    });
    let mut a = c.node("a");
    let mut b = c.node("b");
    let ballast = (32 << 20).to_string();
    let args = ["--entries", "20", "--ballast", &ballast, "--linger"];
    let (mut program, _) = c.program("a", &args);
    program.acknowledged(0, 20);
    // Everything is in its files when it ends in order.
    program.finish();
    b.signal("TERM");
    assert_eq!(b.wait(), Some(0));
    let b = c.node("b");
    drop(b);
    c.lose_memory("b");
    // The daemon of a would bring it up to date within seconds.
    a.kill();
    let _b = c.node("b");
    let state = await_that("its state", || {
        c.says("b")["state"].as_str().map(String::from)
    });
    assert_eq!(state, "empty");
    let _a = c.node("a");
    let (mut program, _) = c.program("a", &["--entries", "1", "--linger"]);
    program.acknowledged(20, 21);
    let (moved, kept, total) = came(&c);
    assert!(moved < total / 50, "{moved} of {total}");
    assert!(kept >= 32 << 20);
    program.finish();
    c.assert_equal();
}

/// `verify` called right copies wrong, and `repair` made one of them anew: a file that a
/// program makes longer all the time had another size on both nodes at every look. Nor do
/// such changes hide what is wrong with another file.
#[test]
fn a_file_that_grows_all_the_time_is_no_difference() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let volume = Volume::attach(&c.file(), "a", None).unwrap();
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let map = volume.map("f", 1 << 20, flags).unwrap();
    // SAFETY: inside the mapping, which only this thread uses.
    unsafe {
        map.ptr.write_bytes(7, map.len);
        msync(map.ptr, map.len).unwrap();
    }
    volume.map("g", 4096, flags).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut size = 4096;
            while !over.load(Relaxed) {
                size += 8;
                volume.truncate("g", size).unwrap();
            }
        });
        // Whatever fails here, the thread ends.
        let looks = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let right = verified(&c);
            flip(&c, "b/v/f", 300_001);
            (right, verified(&c))
        }));
        over.store(true, Relaxed);
        let ((code, v), (after, w)) = looks.unwrap();
        assert_eq!(code, Some(0), "{v} {}", c.logs());
        assert_eq!(after, Some(1), "{w}");
        assert_eq!((&w["file"], &w["offset"]), (&"f".into(), &300_001.into()));
    });
    volume.detach().unwrap();
}

#[test]
fn copies_are_compared_and_repaired_while_a_program_commits() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    // At this pace it does not come to the byte that is changed below, nor to the file's end,
    // in the minutes that this may take.
    let (mut program, _) = c.program("a", &["--entries", MANY, "--pace", "2000"]);
    program.acknowledged(0, 200);
    let program = program.read_on();
    let (code, v) = verified(&c);
    assert_eq!(code, Some(0), "{v} {}", c.logs());

    // One byte where nobody writes, and one in the page that every sync point
    // changes.
    flip(&c, "b/v/log", 33_000_001);
    flip(&c, "b/v/log", 40);
    let (code, v) = verified(&c);
    assert_eq!(code, Some(1), "{v}");
    assert_eq!(
        (&v["offset"], &v["differences"]),
        (&40.into(), &2.into()),
        "{v}"
    );

    // It asks, and takes no answer for a no.
    let out = c.mojim("repair", &[]);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("Go on?"),
        "{}",
        text(&out.stderr)
    );
    let (code, _) = verified(&c);
    assert_eq!(code, Some(1));
    // The primary's own copy is the measure.
    let out = c.mojim("repair", &["--name", "a", "--yes"]);
    assert_eq!(out.status.code(), Some(1));

    let out = c.mojim("repair", &["--yes", "--json", "--wait", "60"]);
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}{}{}",
        text(&out.stdout),
        text(&out.stderr),
        c.logs()
    );
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&v["pages"], &v["node"]), (&2.into(), &"b".into()), "{v}");
    let (code, v) = verified(&c);
    assert_eq!(code, Some(0), "{v}");
    program.stop();
}

#[test]
fn a_copy_is_made_anew_by_difference() {
    let c = Cluster::new(SYNC);
    let _nodes = [c.node("a"), c.node("b")];
    let ballast = (32 << 20).to_string();
    let args = ["--entries", "20", "--ballast", &ballast, "--linger"];
    let (mut program, _) = c.program("a", &args);
    program.acknowledged(0, 20);
    flip(&c, "b/v/ballast", 5_000_000);
    let out = c.mojim("repair", &["--yes", "--anew", "--json", "--wait", "60"]);
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}{}",
        text(&out.stderr),
        c.logs()
    );
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["copied_anew"], true, "{v}");
    let (moved, kept, total) = came(&c);
    assert!(moved < total / 50, "{moved} of {total}");
    assert!(kept > 0);
    program.finish();
    c.assert_equal();
}

/// Why a node's copy cannot be used, once the node says so.
fn unusable(c: &Cluster, node: &str) -> String {
    await_that("its error", || {
        c.says(node)["error"].as_str().map(String::from)
    })
}

fn repaired(c: &Cluster, args: &[&str]) -> Value {
    let args = [&["--yes", "--json", "--wait", "60"], args].concat();
    let out = c.mojim("repair", &args);
    let said = format!("{}{}", text(&out.stderr), c.logs());
    assert_eq!(out.status.code(), Some(0), "{said}");
    let v: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(v["copied_anew"], true, "{v}");
    v
}

/// The files of a follower were removed, but not its superblock and logs. Its copy could not be
/// used, no command healed that, and `status` promised that the primary would.
#[test]
fn a_copy_without_its_files_is_made_anew_by_an_operators_word() {
    let c = Cluster::new(Setup {
        mode: "async",
        ..SYNC
    });
    let _a = c.node("a");
    let mut b = c.node("b");
    let (mut program, _) = c.program("a", &["--entries", MANY, "--pace", "2000"]);
    program.acknowledged(0, 200);
    program.kill();
    b.kill();
    std::fs::remove_dir_all(c.dir.join("b/v")).unwrap();
    let _b = c.node("b");
    let why = unusable(&c, "b");
    assert!(why.contains("mojim repair --anew --name b"), "{why}");
    let before = c.says("b")["life"].clone();
    // Never the primary's, whose copy is the measure.
    let out = c.mojim("repair", &["--anew", "--name", "a", "--yes"]);
    assert_eq!(out.status.code(), Some(1));
    // Nor while nobody has attached, who would have been refused if anything were missing.
    let out = c.mojim("repair", &["--anew", "--name", "b", "--yes"]);
    assert_eq!(out.status.code(), Some(1));
    let why = text(&out.stderr);
    assert!(
        why.contains("only while a program runs on the primary"),
        "{why}"
    );
    assert_eq!(c.says("b")["life"], before);
    let (mut program, found) = c.program("a", &["--entries", MANY, "--pace", "2000"]);
    program.acknowledged(found, found + 100);
    let program = program.read_on();
    // It asks.
    let out = c.mojim("repair", &["--anew", "--name", "b"]);
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(c.says("b")["life"], before);
    repaired(&c, &["--anew", "--name", "b"]);
    assert_ne!(c.says("b")["life"], before);
    let (code, v) = verified(&c);
    assert_eq!(code, Some(0), "{v}");
    program.stop();
}

/// A file that nobody writes was missing on a node that had records to apply: the copy was
/// well, `verify` called it in motion, and `repair` failed.
#[test]
fn a_file_that_nobody_writes_is_missed() {
    let c = Cluster::new(Setup {
        mode: "async",
        ..SYNC
    });
    let _a = c.node("a");
    let mut b = c.node("b");
    let args = ["--entries", MANY, "--pace", "2000", "--ballast", "1048576"];
    let (mut program, _) = c.program("a", &args);
    program.acknowledged(0, 200);
    let program = program.read_on();
    let missed = || {
        let (code, v) = verified(&c);
        assert_eq!(code, Some(1), "{v} {}", c.logs());
        let named = |key: &str| v[key].as_str().unwrap().contains("b/v/ballast");
        assert!(named("file") && named("what"), "{v}");
    };
    // Its name only: the daemon may have it open.
    std::fs::remove_file(c.dir.join("b/v/ballast")).unwrap();
    missed();
    repaired(&c, &["--name", "b"]);
    b.kill();
    std::fs::remove_file(c.dir.join("b/v/ballast")).unwrap();
    let _b = c.node("b");
    let why = unusable(&c, "b");
    assert!(
        why.contains("b/v/ballast") && why.contains("missing"),
        "{why}"
    );
    missed();
    repaired(&c, &["--name", "b"]);
    let (code, v) = verified(&c);
    assert_eq!(code, Some(0), "{v}");
    program.stop();
}
