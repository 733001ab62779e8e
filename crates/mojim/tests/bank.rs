//! The bank of `examples/bank.rs` is killed at random moments.
//!
//! The total is right at each start, and no transfer is missing that was said to be made.
//!
//! - BANK_SEED repeats a run, as far as its moments can be.
//! - BANK_KILLS says how often it is killed (default 6).

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mojim::example::Example;
use mojim::{Heap, Ptr, Volume, persistent};
use mojim_env::rng::Rng;

persistent! {
    struct Bank {
        /// Ever made.
        transfers: u64,
        accounts: Ptr<[i64]>,
    }
}

/// The compiled example.
fn bank() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let target = test.parent().unwrap().parent().unwrap();
    // A build of all that there is has it.
    if std::env::var_os("MOJIM_BUILT").is_none() {
        let profile = if target.ends_with("debug") {
            "dev"
        } else {
            "release"
        };
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "mojim", "--example", "bank"]);
        cargo
            .args(["--profile", profile, "--target-dir"])
            .arg(target.parent().unwrap());
        assert!(cargo.status().unwrap().success());
    }
    target.join("examples/bank")
}

fn start(program: &Path, example: &Example, transfers: &str) -> Child {
    Command::new(program)
        .arg(example.config())
        .args(["a", transfers])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What the bank's file has: transfers made, and the total.
fn look(example: &Example) -> (u64, i64) {
    let volume = Volume::attach(example.config(), "a", None).unwrap();
    let heap = Heap::open(&volume, "bank.rust").unwrap();
    let bank = heap
        .get(heap.root::<Bank>("bank").unwrap().unwrap())
        .unwrap();
    let total = heap.get(bank.accounts).unwrap().iter().sum();
    (bank.transfers, total)
}

#[test]
fn a_killed_bank_has_its_total() {
    let from = |name: &str, otherwise: u64| -> u64 {
        std::env::var(name).map_or(otherwise, |v| v.parse().unwrap())
    };
    let seed = from("BANK_SEED", std::process::id().into());
    println!("BANK_SEED={seed}");
    let mut chance = Rng::new(seed);
    let (program, example) = (bank(), Example::new());
    let mut said = 0;
    for _ in 0..from("BANK_KILLS", 6) {
        let mut child = start(&program, &example, "1000000000");
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert_eq!(line, "total 64000 ok\n");
        // A kill at any moment is right: this is no wait for something.
        std::thread::sleep(Duration::from_millis(chance.below(100)));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        let whole = rest.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let made = whole.lines().map(|l| l.strip_prefix("transfer ").unwrap());
        said = made.map(|n| n.parse().unwrap()).fold(said, u64::max);
        let (transfers, total) = look(&example);
        assert!(
            transfers >= said && total == 64_000,
            "{transfers} {said} {total}"
        );
        said = transfers;
    }
    let mut child = start(&program, &example, "10");
    assert!(child.wait().unwrap().success());
    assert!(look(&example).0 <= said + 10);
}
