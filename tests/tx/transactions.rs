//! Transactions through the C interface: explicit ones, and blocks that gcc captures.

#[path = "../e2e/support.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use support::*;

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
