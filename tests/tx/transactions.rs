//! Transactions through the C interface: explicit ones, and blocks that gcc captures.

#[path = "../e2e/support.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use support::*;

/// Compiles a program with `__transaction_atomic` blocks, whose runtime is ours.
fn compile_captured(compiler: &str, source_file: &str, to: &Path, flags: &[&str]) {
    let dir = libraries();
    succeed(
        Command::new(compiler)
            .args(["-fgnu-tm", "-Wall", "-Wextra", "-Werror", "-pthread"])
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
