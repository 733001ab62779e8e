//! The heap of the C interface: what it refuses, and that kills leave what was committed.

#[path = "../e2e/support.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use support::*;

#[test]
fn wrong_calls_are_errors() {
    let v = TestVolume::new("");
    let bin = v.root.join("misuse");
    compile("tests/heap/misuse.c", &bin, &[], true);
    let out = succeed(Command::new(&bin).arg(v.config()));
    assert_eq!(out, "all refused\n");
}

/// A heap needs exact commits, of memory that is its own.
#[test]
fn volumes_that_cannot_have_a_heap_refuse() {
    for (more, says) in [
        ("msync_rounding = \"page\"", "msync_rounding"),
        ("working = \"shared\"", "working"),
    ] {
        let v = TestVolume::new(more);
        let bin = v.root.join("list");
        compile("tests/heap/list.c", &bin, &[], true);
        let out = output(Command::new(&bin).args([v.config(), "end".into()]));
        assert!(
            !out.status.success() && text(&out).contains(says),
            "{}",
            text(&out)
        );
    }
}

/// A process that is killed at any moment leaves the heap as of a sync that had returned, or of the
/// one that ran; nothing leaks, and no block is handed out twice.
#[test]
fn killed_at_any_moment() {
    let v = TestVolume::new("");
    let bin = v.root.join("list");
    compile("tests/heap/list.c", &bin, &["-O2"], true);
    let kills: u32 = std::env::var("HEAP_KILLS").map_or(8, |k| k.parse().unwrap());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut seed = std::env::var("HEAP_SEED").map_or(now.as_nanos() as u64, |s| s.parse().unwrap());
    println!("HEAP_SEED={seed}");
    let mut last = 0;
    for _ in 0..kills {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let lines = (seed >> 33) % 50;
        let mut child = Command::new(&bin)
            .arg(v.config())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = out.next().unwrap().unwrap();
        let open: u64 = first
            .strip_prefix("open ")
            .unwrap_or_else(|| panic!("{first}"))
            .parse()
            .unwrap();
        assert!(open >= last, "round {last} was committed, {open} is there");
        last = open;
        for line in out.by_ref().take(lines as usize) {
            last = line.unwrap().parse().unwrap();
        }
        child.kill().unwrap();
        // What it had printed before it died.
        for line in out {
            last = line.unwrap().parse().unwrap_or(last);
        }
        child.wait().unwrap();
    }
    let said = succeed(Command::new(&bin).args([v.config(), "end".into()]));
    let nodes: u64 = said.split_whitespace().last().unwrap().parse().unwrap();
    let bytes = std::fs::read(v.dir().join("list")).unwrap();
    let report = mojim_heap::check(&bytes).unwrap();
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(report.used_blocks(), nodes + 1, "leaked or lost");
    assert_eq!(report.roots.len(), 1);
}
