//! Persistent variables: they keep their values from run to run, however the program was
//! linked; a changed layout is refused with the name of what changed.

#[path = "../e2e/support.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::*;

fn example(v: &TestVolume, name: &str, flags: &[&str]) -> PathBuf {
    let bin = v.root.join(name);
    compile("examples/variables.c", &bin, flags, true);
    bin
}

fn run(v: &TestVolume, bin: &Path, rounds: usize) -> Command {
    let mut c = Command::new(bin);
    c.arg(v.config()).args(["a", &rounds.to_string()]);
    c
}

#[track_caller]
fn counts(v: &TestVolume, bin: &Path, from: usize, to: usize) {
    let text = succeed(&mut run(v, bin, to - from));
    let last = if from == 0 { 7 } else { from };
    assert!(
        text.starts_with(&format!("found {from} 7 {last}\n")),
        "{text}"
    );
    assert!(text.ends_with(&format!("end {to}\n")), "{text}");
}

#[test]
fn values_are_kept_from_run_to_run() {
    let v = TestVolume::new("");
    let bin = example(&v, "p", &["-O2", "-pedantic"]);
    counts(&v, &bin, 0, 3);
    counts(&v, &bin, 3, 4);
    succeed(Command::new("strip").arg(&bin));
    counts(&v, &bin, 4, 9);
}

/// Kills at random moments: what was committed is there, and both variables are of one state.
#[test]
fn kills_leave_what_was_committed() {
    let v = TestVolume::new("");
    let bin = example(&v, "p", &["-O1"]);
    let mut committed = 0;
    for round in 0..4 {
        let mut child = run(&v, &bin, 1_000_000)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let found: Vec<usize> = first
            .split(' ')
            .skip(1)
            .map(|w| w.parse().unwrap())
            .collect();
        assert!(found[0] >= committed, "{first}, {committed} was committed");
        assert!(found[0] == found[2] || found[0] == 0, "{first}");
        for line in lines.by_ref().map(Result::unwrap).take(3 + 7 * round) {
            committed = line.strip_prefix("committed ").unwrap().parse().unwrap();
        }
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            if let Some(Ok(n)) = line.strip_prefix("committed ").map(str::parse) {
                committed = n;
            }
        }
        child.wait().unwrap();
    }
    assert!(committed > 40, "{committed}");
}
