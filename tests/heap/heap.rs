//! The heap of the C and C++ interfaces: what it refuses, and that kills leave what was committed.
//! HEAP_KILLS: how many kills (default 6); HEAP_SEED: the seed of those of an earlier run.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use mojim_testkit::interface::*;
use mojim_testkit::rng::Rng;

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
        let out = output(Command::new(&bin).arg(v.config()).args(["a", "end"]));
        assert!(
            !out.status.success() && text(&out).contains(says),
            "{}",
            text(&out)
        );
    }
}

/// Compiles C++17, linked with libmojim.so.
#[track_caller]
fn compile_cpp(file: &str, to: &Path, flags: &[&str]) -> Output {
    let dir = libraries();
    let mut c = Command::new("c++");
    c.args([
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-I",
    ])
    .arg(source().join("include"))
    .args(flags)
    .arg(source().join(file))
    .arg("-o")
    .arg(to)
    .arg("-L")
    .arg(dir)
    .arg("-lmojim")
    .arg(format!("-Wl,-rpath,{}", dir.display()));
    output(&mut c)
}

/// Runs a program again and again, each time until it has printed some numbers and is killed. Each time
/// it must find what it had acknowledged.
fn kill_often(v: &TestVolume, bin: &Path) {
    let number = |name| std::env::var(name).ok().map(|v: String| v.parse().unwrap());
    let kills = number("HEAP_KILLS").unwrap_or(6);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed: u64 = number("HEAP_SEED").unwrap_or(now.as_nanos() as u64);
    println!("HEAP_SEED={seed}");
    let mut rng = Rng::new(seed);
    let mut last = 0;
    for _ in 0..kills {
        let lines = rng.below(50);
        let mut child = Command::new(bin)
            .arg(v.config())
            .arg("a")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = out.next().unwrap().unwrap();
        let open = first.strip_prefix("open ").and_then(|n| n.parse().ok());
        let open: u64 = open.unwrap_or_else(|| panic!("{first}"));
        assert!(open >= last, "round {last} was committed, {open} is there");
        last = open;
        for line in out.by_ref().take(lines as usize) {
            let line = line.unwrap();
            last = line.parse().unwrap_or_else(|_| panic!("{line}"));
        }
        child.kill().unwrap();
        // What it had printed before it died; the last line may be cut.
        for line in out.map_while(Result::ok) {
            last = line.parse().map_or(last, |n: u64| n.min(last + 1));
        }
        child.wait().unwrap();
    }
}

/// A process that is killed at any moment leaves the heap as of a sync that had returned, or of the
/// one that ran; nothing leaks, and no block is handed out twice.
#[test]
fn killed_at_any_moment() {
    let v = TestVolume::new("");
    let bin = v.root.join("list");
    compile("tests/heap/list.c", &bin, &["-O2"], true);
    kill_often(&v, &bin);
    let said = succeed(Command::new(&bin).arg(v.config()).args(["a", "end"]));
    let nodes: u64 = said.split_whitespace().last().unwrap().parse().unwrap();
    let bytes = std::fs::read(v.dir().join("list")).unwrap();
    let report = mojim_heap::check(&bytes).unwrap();
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(report.used_blocks(), nodes + 1, "leaked or lost");
    assert_eq!(report.roots.len(), 1);
}

/// Containers are what their twins in plain memory are, after exceptions and after kills. Nested blocks, and
/// heaps that only transactions change, are refused before anything changes.
#[test]
fn containers_are_as_their_twins() {
    let v = TestVolume::new("");
    let bin = v.root.join("containers");
    let made = compile_cpp("tests/heap/containers.cpp", &bin, &["-O1"]);
    assert!(made.status.success(), "{}", text(&made));
    succeed(Command::new(&bin).arg(v.config()).args(["a", "wrong"]));
    kill_often(&v, &bin);
    succeed(Command::new(&bin).arg(v.config()).args(["a", "20"]));
}

/// Containers that others wrote, with their own memory rules: Google's dense hash map, and Boost's.
#[test]
fn containers_of_others_are_as_their_twins() {
    let headers = ["google/dense_hash_map", "boost/container/flat_map.hpp"];
    let here = |h: &&str| Path::new("/usr/include").join(h).exists();
    if !headers.iter().all(here) {
        eprintln!("SKIPPED: needs libsparsehash-dev and libboost-dev");
        return;
    }
    let v = TestVolume::new("");
    let bin = v.root.join("others");
    let made = compile_cpp("tests/heap/others.cpp", &bin, &["-O1"]);
    assert!(made.status.success(), "{}", text(&made));
    kill_often(&v, &bin);
    succeed(Command::new(&bin).arg(v.config()).args(["a", "20"]));
}

/// What cannot persist does not compile, and the compiler says why.
#[test]
fn what_cannot_persist_is_refused() {
    let v = TestVolume::new("");
    for case in 0..6 {
        let flags = [&format!("-DCASE={case}"), "-c", "-fsyntax-only"];
        let out = compile_cpp("tests/heap/refused.cpp", &v.root.join("r.o"), &flags);
        assert_eq!(out.status.success(), case == 0, "{case}: {}", text(&out));
        assert!(case == 0 || text(&out).contains("error: static assertion failed: mojim:"));
    }
    let flags = ["-DCASE=0", "-fno-exceptions", "-fsyntax-only"];
    let out = compile_cpp("tests/heap/refused.cpp", &v.root.join("r.o"), &flags);
    assert!(
        text(&out).contains("mojim.hpp needs exceptions"),
        "{}",
        text(&out)
    );
}
