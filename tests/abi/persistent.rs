//! Persistent variables keep their values from run to run, however the program was linked; a
//! changed layout is refused with the name of what changed. Logs have what was appended, also
//! after kills.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mojim_testkit::interface::*;

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

/// What was committed is there, and both variables are of one state.
#[test]
fn kills_leave_what_was_committed() {
    let v = TestVolume::new("");
    let bin = example(&v, "p", &["-O1"]);
    kills(
        || run(&v, &bin, 1_000_000),
        "committed",
        4,
        |first, reached| {
            let found: Vec<u64> = first
                .split(' ')
                .skip(1)
                .map(|w| w.parse().unwrap())
                .collect();
            assert!(found[0] >= reached, "{first}, {reached} was committed");
            assert!(found[0] == found[2] || found[0] == 0, "{first}");
        },
    );
}

/// Kills a program at random moments. `check` gets its first line, and how far it had come
/// before; the program's other lines begin with `word`.
fn kills(mut run: impl FnMut() -> Command, word: &str, rounds: usize, check: impl Fn(&str, u64)) {
    let mut reached = 0;
    for round in 0..rounds {
        let mut child = run().stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        check(&lines.next().unwrap().unwrap(), reached);
        let number = |line: &str| line.strip_prefix(word)?.trim().parse::<u64>().ok();
        for line in lines.by_ref().map(Result::unwrap).take(3 + 9 * round) {
            reached = number(&line).unwrap_or_else(|| panic!("{line}"));
        }
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            reached = number(&line).unwrap_or(reached);
        }
        child.wait().unwrap();
    }
    assert!(reached > 20, "{reached}");
}

#[test]
fn logs_have_what_was_appended() {
    let v = TestVolume::new("");
    let bin = v.root.join("append");
    compile("examples/append.c", &bin, &["-O1", "-pedantic"], true);
    let check = |first: &str, reached: u64| {
        let last = first.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
        assert!(last >= reached, "{first}, {reached} was appended");
    };
    let shm = PathBuf::from(format!("/dev/shm/mojim-logs-{}", std::process::id()));
    std::fs::create_dir_all(&shm).unwrap();
    for encoding in ["1", "2", "3"] {
        // In the volume: an append is a sync point. (Its file is the encoding's own.)
        let v = TestVolume::new("");
        let run = || {
            let mut c = Command::new(&bin);
            c.arg(v.config()).args(["a", encoding, "1000000"]);
            c
        };
        kills(run, "appended", 3, check);
        // On tmpfs, which stands for persistent memory; here the ring wraps many times.
        let file = shm.join(encoding);
        let run = |rounds: &str| {
            let mut c = Command::new(&bin);
            c.arg(v.config()).args(["a", encoding, rounds]).arg(&file);
            c
        };
        succeed(&mut run("3000"));
        kills(|| run("1000000"), "appended", 8, check);
    }
    let _ = std::fs::remove_dir_all(&shm);
}

/// A block that is not committed before the pointer swings to it is seen to be lost, or torn.
#[test]
fn shadow_updates_are_whole() {
    let v = TestVolume::new("");
    let bin = v.root.join("shadow");
    compile("examples/shadow.c", &bin, &["-O1", "-pedantic"], true);
    let run = || {
        let mut c = Command::new(&bin);
        c.arg(v.config()).args(["a", "1000000"]);
        c
    };
    kills(run, "updated", 4, |first, reached| {
        let found = first
            .strip_prefix("found ")
            .unwrap_or_else(|| panic!("{first}"));
        assert!(
            found.parse::<u64>().unwrap() >= reached,
            "{first}, {reached} was there"
        );
    });
    let w = TestVolume::new("");
    compile("examples/shadow.c", &bin, &["-DNOT_FILLED"], true);
    let once = |rounds: &str| output(Command::new(&bin).arg(w.config()).args(["a", rounds]));
    assert!(once("3").status.success());
    let found = text(&once("3"));
    assert!(!found.starts_with("found 3\n"), "{found}");
}

#[test]
fn regions_keep_their_address_and_pointers_hold() {
    let v = TestVolume::new("");
    let bin = v.root.join("pmap");
    compile("tests/abi/pmap.c", &bin, &[], true);
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(succeed(Command::new(&bin).arg(v.config()).arg("list")));
    }
    let places: Vec<_> = all.iter().map(|t| t.split(' ').next().unwrap()).collect();
    assert!(places.windows(2).all(|w| w[0] == w[1]), "{all:?}");
    let lengths: Vec<_> = all
        .iter()
        .map(|t| t.trim().rsplit(' ').next().unwrap())
        .collect();
    assert_eq!(lengths, ["1", "2", "3"]);
    // Errors: another size, something at its address, no region, no address of one; then what
    // was half made, in regions and logs.
    let text = succeed(Command::new(&bin).arg(v.config()).arg("errors"));
    assert_eq!(
        text,
        "EINVAL EADDRINUSE EUCLEAN EBUSY EINVAL EINVAL EINVAL done EINVAL none EINVAL none \
         done full done full\n"
    );
}
