//! Transactions through the C interface: explicit ones, and blocks that gcc captures.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mojim_testkit::interface::*;
use mojim_testkit::rng::Rng;

/// Compiles a program with `__transaction_atomic` blocks, whose runtime is ours.
fn compile_captured(compiler: &str, source_file: &str, to: &Path, flags: &[&str]) {
    let dir = libraries();
    succeed(
        Command::new(compiler)
            .args(["-fgnu-tm", "-Wall", "-Werror", "-pthread"])
            .args(flags)
            .arg("-I")
            .arg(source().join("include"))
            .arg(source().join(source_file))
            .arg("-o")
            .arg(to)
            .arg("-L")
            .arg(dir)
            .args(["-lmojim_itm", "-lmojim"])
            .arg(format!("-Wl,-rpath,{}", dir.display())),
    );
}

/// A volume `v`, and one `w`.
fn two_volumes() -> TestVolume {
    let v = TestVolume::new("");
    let config = std::fs::read_to_string(v.config()).unwrap();
    let second = "[volume.w]\nmode = \"unreplicated\"\nprimary = \"a\"\n[node.a]";
    std::fs::write(v.config(), config.replace("[node.a]", second)).unwrap();
    v
}

fn run_twice(v: &TestVolume, program: &Path) {
    for run in ["first", "second"] {
        succeed(Command::new(program).arg(v.config()).arg(run));
    }
}

/// What is added is committed or taken back, level by level, in each thread by itself, and
/// nothing else is; errors leave the transaction open.
#[test]
fn explicit_transactions_are_whole_or_not_there() {
    let v = two_volumes();
    let program = v.root.join("explicit");
    compile("tests/tx/explicit.c", &program, &[], true);
    run_twice(&v, &program);
}

/// A block of gcc's is committed when it ends, and taken back when it is cancelled.
#[test]
fn captured_blocks_are_whole_or_not_there() {
    for optimized in ["-O0", "-O2"] {
        let v = TestVolume::new("");
        let program = v.root.join("captured");
        compile_captured("gcc", "tests/tx/captured.c", &program, &[optimized]);
        run_twice(&v, &program);
    }
}

/// A block that calls what no transaction can take back runs, and says so once; nothing of it is
/// committed, nor is any transaction after it.
#[test]
fn relaxed_blocks_with_unsafe_calls_are_not_committed() {
    for (optimized, how) in [("-O0", "whole"), ("-O2", "part"), ("-O2", "abort")] {
        let v = TestVolume::new("");
        let program = v.root.join("relaxed");
        compile_captured("gcc", "tests/tx/relaxed.c", &program, &[optimized]);
        let out = output(Command::new(&program).arg(v.config()).arg(how));
        assert!(out.status.success(), "{how}: {}", text(&out));
        assert_eq!(String::from_utf8_lossy(&out.stdout), "unsafe 2\n");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        for part in ["a __transaction_relaxed block", "none is from here on"] {
            assert_eq!(said.matches(part).count(), 1, "{how}: {said}");
        }
        succeed(Command::new(&program).arg(v.config()).arg("check"));
    }
}

/// The names that a library defines for data, and for variables of threads, in plain text.
fn data_of(library: &str) -> Vec<String> {
    let mut nm = Command::new("nm");
    let out = succeed(
        nm.args(["-C", "--defined-only"])
            .arg(libraries().join(library)),
    );
    let words = out.lines().map(|l| l.splitn(3, ' ').collect::<Vec<_>>());
    let mut names = Vec::new();
    for w in words.filter(|w| w.len() == 3) {
        if ["b", "B", "d", "D"].contains(&w[1]) {
            names.push(w[2].to_owned());
        }
    }
    names
}

/// Which thread has which transaction open is known to libmojim.so alone: what the other library
/// has of the same code has no variables there. (With a registry of its own it would begin
/// transactions that no sync of a heap waits for.)
#[test]
fn the_state_of_transactions_is_in_one_library() {
    let is_state = |name: &&String| {
        ["mojim_undo", "mojim_tx", "mojim_heap"]
            .iter()
            .any(|c| name.contains(c))
    };
    let ours = data_of("libmojim.so");
    for variable in ["mojim_undo::open::ALL", "mojim_tx::commit::FAILED"] {
        assert!(ours.iter().any(|n| n.contains(variable)), "{variable}");
    }
    let theirs = data_of("libmojim_itm.so");
    assert_eq!(theirs.iter().find(is_state), None);
    assert!(theirs.iter().any(|n| n == "mojim_itm_log"), "{theirs:?}");
}

/// The lines that the programs of `program.h` print: what each has in the end.
fn outcomes(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|l| l.split_once(' '));
    lines.map(|(n, o)| (n.to_owned(), o.to_owned())).collect()
}

/// What libitm does wrongly even with its best method: it takes no store of an inner block
/// back that the compiler calls a second one (WaW), and an abort out of a handler of an
/// exception ends the program.
const LIBITM_IS_WRONG: [&str; 4] = ["nested", "twice", "deep", "catches"];

/// 27 programs do what their models without transactions do, in memory and on disk, and what
/// they do with libitm. `MOJIM_TX_LEVELS` has the levels of optimization.
#[test]
fn captured_programs_are_equal_to_their_models() {
    let levels = std::env::var("MOJIM_TX_LEVELS").unwrap_or_else(|_| "-O0 -O2".into());
    let seed = std::process::id().to_string();
    println!("seed {seed}");
    for (compiler, file) in [
        ("gcc", "tests/tx/programs.c"),
        ("g++", "tests/tx/programs.cc"),
    ] {
        let v = TestVolume::new("");
        let model = v.root.join("model");
        compile_with(compiler, &["-DMODEL"], file, &model);
        let expected = outcomes(&succeed(Command::new(&model).arg(&seed)));
        assert!(expected.len() >= 5, "{expected:?}");
        for level in levels.split(' ') {
            let ours = v.root.join("ours");
            compile_captured(compiler, file, &ours, &[level, "-DDURABLE"]);
            // Another volume for each level: the programs begin with empty files.
            let v = TestVolume::new("");
            let run = |what: &str| succeed(Command::new(&ours).args([&seed, what]).arg(v.config()));
            assert_eq!(outcomes(&run("run")), expected, "{level}, seed {seed}");
            for (name, line) in outcomes(&run("check")) {
                let memory = expected[&name].split(' ').next().unwrap();
                assert_eq!(line, memory, "{name} on disk, {level}, seed {seed}");
            }
            let theirs = v.root.join("libitm");
            compile_with(compiler, &["-fgnu-tm", level], file, &theirs);
            let out = output(
                Command::new(&theirs)
                    .arg(&seed)
                    .env("ITM_DEFAULT_METHOD", "gl_wt"),
            );
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            let theirs = outcomes(&text);
            for (name, line) in &expected {
                if !LIBITM_IS_WRONG.contains(&name.as_str()) {
                    assert_eq!(
                        theirs.get(name),
                        Some(line),
                        "libitm: {name}, {level}, seed {seed}"
                    );
                }
            }
        }
    }
}

/// Compiles a program that is not linked with ours.
fn compile_with(compiler: &str, flags: &[&str], source_file: &str, to: &Path) {
    let mut c = Command::new(compiler);
    c.args(["-Wall", "-Werror"]).args(flags);
    succeed(c.arg(source().join(source_file)).arg("-o").arg(to));
}

/// What is allocated and freed in a transaction goes with it; a sync of the heap waits for
/// transactions of other threads.
#[test]
fn blocks_of_a_heap_go_with_their_transaction() {
    let v = TestVolume::new("");
    let program = v.root.join("heap");
    compile("tests/tx/heap.c", &program, &[], true);
    run_twice(&v, &program);
}

/// Runs the threads of `crash.c` and kills them, `rounds` times; after each, the check. False
/// as soon as one fails.
fn survives_kills(rounds: u64, seed: u64, more: &[&str]) -> bool {
    let v = TestVolume::new("");
    let program = v.root.join("crash");
    compile("tests/tx/crash.c", &program, &[], true);
    let mut rng = Rng::new(seed);
    for _ in 0..rounds {
        let mut run = Command::new(&program);
        run.arg(v.config()).args(["a", "run"]).args(more);
        let mut child = run.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "running\n");
        std::thread::sleep(Duration::from_micros(rng.below(30_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let check = output(Command::new(&program).arg(v.config()).args(["a", "check"]));
        if !check.status.success() {
            println!("{}", text(&check));
            return false;
        }
    }
    true
}

/// Several threads are killed at random moments: each transaction is there whole, or not at
/// all. One that commits in halves is found out. `MOJIM_TX_KILLS` has the number of kills.
#[test]
fn killed_transactions_are_whole_or_not_there() {
    let kills = std::env::var("MOJIM_TX_KILLS").map_or(8, |n| n.parse().unwrap());
    let seed = u64::from(std::process::id());
    println!("seed {seed}");
    assert!(survives_kills(kills, seed, &[]), "seed {seed}");
    assert!(!survives_kills(60, seed, &["halves"]), "seed {seed}");
}

/// A program that was linked without libmojim_itm ran, said nothing, and lost what its blocks had stored. Where a
/// block allocates, it is told.
#[test]
fn a_block_of_another_runtime_is_told() {
    let v = TestVolume::new("");
    let program = v.root.join("foreign");
    compile("tests/tx/foreign.c", &program, &["-fgnu-tm"], true);
    succeed(Command::new(&program).arg(v.config()));
}

/// The poster's hash table keeps its entries from run to run.
#[test]
fn the_hash_table_of_the_poster_is_persistent() {
    let v = TestVolume::new("");
    let program = v.root.join("hashtable");
    compile_captured("gcc", "examples/hashtable.c", &program, &["-O2", "-Wextra"]);
    let run = |args: &[&str]| succeed(Command::new(&program).arg(v.config()).arg("a").args(args));
    for key in ["key 10", "key 20"] {
        assert_eq!(run(&["get", key]), "(none)\n");
        run(&["put", key, "other"]);
        run(&["put", key, key]);
        assert_eq!(run(&["get", key]), format!("{key}\n"));
    }
    assert_eq!(run(&["get", "key 10"]), "key 10\n");
}
