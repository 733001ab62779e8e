//! Heaps that move to the mirror: a program in C and one in C++ lose their node in the middle of
//! their work, and go on at the other one with all that was acknowledged.

use std::path::{Path, PathBuf};
use std::process::Command;

mod support;
use support::voters::Cluster;
use support::{Process, await_or, libraries, text};

/// Compiles a program of `tests`, linked with libmojim.so.
fn compile(compiler: &str, name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = libraries();
    let to =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("heaps-{}", name.replace('/', "-")));
    let out = Command::new(compiler)
        .args(["-O1", "-pthread", "-I"])
        .arg(root.join("include"))
        .arg(root.join("tests").join(name))
        .arg("-o")
        .arg(&to)
        .arg("-L")
        .arg(dir)
        .arg("-lmojim")
        .arg(format!("-Wl,-rpath,{}", dir.display()))
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    to
}

/// Starts the program as soon as the node is primary; the round that it found.
fn start(c: &Cluster, bin: &Path, node: &str) -> (Process, u64) {
    let config = c.file();
    let begin = || {
        let mut command = Command::new(bin);
        command.arg(&config).arg(node);
        let mut p = Process::of(command, &c.dir.join("program.txt"));
        let line = p.line()?;
        let found = line.strip_prefix("open ").map(|n| n.parse().unwrap());
        // A difference is no reason to try again.
        assert!(
            !line.contains("differs") && !line.contains("torn"),
            "{line}"
        );
        Some((p, found?))
    };
    await_or("the program", || c.status().to_string(), begin)
}

fn moves(compiler: &str, name: &str) {
    let bin = compile(compiler, name);
    let c = Cluster::new("sync", "disk");
    let mut a = c.node("a");
    let _b = c.node("b");
    let _w = c.node("w");
    let (mut p, found) = start(&c, &bin, "a");
    assert_eq!(found, 0);
    let mut last = 0;
    while last < 60 {
        last = p.line().expect("it goes on").parse().unwrap();
    }
    c.await_mirror();
    a.kill();
    p.kill();
    while let Some(line) = p.line() {
        last = line.parse().map_or(last, |n: u64| n.min(last + 1));
    }
    let (mut q, found) = start(&c, &bin, "b");
    assert!(found >= last, "{last} were acknowledged, {found} are there");
    for n in found + 1..found + 20 {
        assert_eq!(q.line(), Some(n.to_string()));
    }
    q.kill();
}

#[test]
fn a_list_in_c_goes_on_at_the_mirror() {
    moves("cc", "heap/list.c");
}

#[test]
fn containers_in_cpp_go_on_at_the_mirror() {
    moves("c++", "heap/containers.cpp");
}

/// Every transaction is there whole: the program checks that when it opens the heap.
#[test]
fn transactions_go_on_at_the_mirror() {
    moves("cc", "tx/crash.c");
}
