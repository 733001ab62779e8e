//! The reader-writer lock recipe (failure-atomic msync, Section 3.3), by its
//! example: with many threads at work every state that is committed keeps the sum
//! of the accounts, also across kills; without the lock one that does not is seen.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use mojim_testkit::interface::*;

const SUM: &str = "64000";
const THREADS: &str = "8";

/// The example, and what its test puts in: `tests/abi/between.h`.
fn transfers(v: &TestVolume, flags: &[&str]) -> PathBuf {
    let bin = v.root.join("transfers");
    let hook = source().join("tests/abi/between.h");
    let data = format!("-DDATA_FILE=\"{}\"", v.dir().join("bank").display());
    let mut all = vec!["-O2", "-include", hook.to_str().unwrap(), &data];
    all.extend(flags);
    compile("examples/transfers.c", &bin, &all, true);
    bin
}

fn command(v: &TestVolume, bin: &PathBuf, points: usize) -> Command {
    let mut c = Command::new(bin);
    c.arg(v.config()).args(["a", THREADS, &points.to_string()]);
    c
}

/// Numbers and sums of lines like `is 7 sum 64000`.
fn sums(text: &str) -> Vec<(usize, &str)> {
    text.lines()
        .filter(|s| s.starts_with("is ") || s.starts_with("found "))
        .map(|s| {
            let words: Vec<&str> = s.split_whitespace().collect();
            (words[1].parse().unwrap(), words[3])
        })
        .collect()
}

#[test]
fn as_it_is_written_the_example_compiles() {
    let v = TestVolume::new("");
    let bin = v.root.join("plain");
    compile("examples/transfers.c", &bin, &["-pedantic"], true);
    succeed(&mut command(&v, &bin, 3));
}

#[test]
fn every_committed_state_keeps_the_sum() {
    for tracker in ["uffd", "mprotect"] {
        let v = TestVolume::new(&format!("tracker = \"{tracker}\""));
        let bin = transfers(&v, &[]);
        let text = succeed(&mut command(&v, &bin, 300));
        let all = sums(&text);
        // The one with which it begins, what was found, and 300 more.
        assert_eq!(all.len(), 302, "{text}");
        assert!(all.iter().all(|(_, sum)| *sum == SUM), "{tracker}: {text}");
        assert!(all.windows(2).all(|w| w[0].0 <= w[1].0));
    }
}

#[test]
fn kills_leave_the_sum_and_what_was_committed() {
    let v = TestVolume::new("");
    let bin = transfers(&v, &[]);
    let mut committed = 0;
    for round in 0..10 {
        let mut child = command(&v, &bin, 1_000_000)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let found = |l: &String| l.starts_with("found");
        let first = lines.by_ref().map(Result::unwrap).find(found).unwrap();
        let (points, sum) = sums(&first)[0];
        assert_eq!(sum, SUM, "round {round}");
        assert!(points >= committed, "{points} of {committed}");
        for line in lines.by_ref().map(Result::unwrap).take(20 + 7 * round) {
            if let Some(n) = line.strip_prefix("committed ") {
                committed = n.parse().unwrap();
            }
        }
        child.kill().unwrap();
        // What it wrote before it was killed counts.
        for line in lines.map_while(Result::ok) {
            if let Some(n) = line.strip_prefix("committed ") {
                committed = n.parse().unwrap();
            }
        }
        child.wait().unwrap();
    }
    assert!(committed > 100, "{committed}");
    let text = succeed(&mut command(&v, &bin, 1));
    assert!(sums(&text).iter().all(|(_, sum)| *sum == SUM), "{text}");
}

/// What the test above would see: a transfer that is half done is committed.
#[test]
fn without_the_lock_half_a_transfer_is_committed() {
    let v = TestVolume::new("");
    let bin = transfers(&v, &["-DWITHOUT_LOCK"]);
    let text = succeed(&mut command(&v, &bin, 3));
    let all = sums(&text);
    assert_eq!(all[0], (1, SUM), "before there are threads: {text}");
    let half = all.iter().find(|(n, _)| *n == 2).unwrap();
    assert_ne!(half.1, SUM, "{text}");
}
