//! Heaps that move to the mirror.
//!
//! A program in C and one in C++ lose their node in the middle of their work. They go on at
//! the other one with all that was acknowledged.

use std::path::{Path, PathBuf};
use std::process::Command;

use mojim_testkit::home::Home;
use mojim_testkit::voters::Cluster;
use mojim_testkit::{
    Process, await_or, libraries, mojim_path, source, temporary, text, text as text_of,
};
use serde_json::Value;

/// Compiles a program of `tests`, linked with libmojim.so.
fn compile(compiler: &str, name: &str) -> PathBuf {
    let root = source();
    let dir = libraries();
    // One for each test: another may run what this one would write.
    let thread = std::thread::current();
    let to = format!("heaps-{}", thread.name().unwrap());
    let to = temporary().join(to);
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

/// `end`: an argument with which the program tells how many blocks its heap, in this file, has beside one.
fn moves(compiler: &str, name: &str, end: Option<(&str, &str)>) {
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
    let Some((end, file)) = end else { return };
    let mut command = Command::new(&bin);
    command.arg(c.file()).args(["b", end]);
    let mut p = Process::of(command, &c.dir.join("program.txt"));
    let nodes = loop {
        let line = p.line().expect("it says how many");
        if let Some(n) = line.strip_prefix("nodes ") {
            break n.parse::<u64>().unwrap();
        }
    };
    assert_eq!(p.wait(), Some(0));
    let bytes = std::fs::read(c.dir.join("b/v").join(file)).unwrap();
    let report = mojim_heap::check(&bytes).unwrap();
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(report.used_blocks(), nodes + 1, "leaked or lost");
}

#[test]
fn a_list_in_c_goes_on_at_the_mirror() {
    moves("cc", "heap/list.c", Some(("end", "list")));
}

#[test]
fn containers_in_cpp_go_on_at_the_mirror() {
    moves("c++", "heap/containers.cpp", None);
}

/// Every transaction of three threads is there whole: the program checks that when it opens the heap.
#[test]
fn transactions_go_on_at_the_mirror() {
    moves("cc", "tx/crash.c", Some(("check", "heap")));
}

/// Variables, eight bytes alone, and logs in each encoding; an append is one sync point.
#[test]
fn variables_and_logs_go_on_at_the_mirror() {
    moves("cc", "tx/kept.c", None);
}

/// `mojim heap`: what it says of a heap, and other addresses for one.
#[test]
fn a_heap_is_looked_into_and_moved() {
    let bin = compile("cc", "heap/list.c");
    let home = Home::new("heaps", 1);
    let text = "cluster = \"heaps\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n";
    let log = "medium = \"disk\", size = \"1MiB\"";
    home.configure(&format!(
        "{text}{}",
        home.data_node("a", home.ports[0].number, log)
    ));
    let config = home.file();
    let program = |more: &[&str]| {
        let mut command = Command::new(&bin);
        command.arg(&config).arg("a").args(more);
        Process::of(command, &home.dir.join("program.txt"))
    };
    let mut p = program(&[]);
    assert_eq!(p.line(), Some("open 0".into()));
    for n in 1..=30 {
        assert_eq!(p.line(), Some(n.to_string()));
    }
    p.kill();
    let sound = || {
        let mut p = program(&["end"]);
        let opened = p.line().unwrap();
        assert!(opened.starts_with("open "), "{opened}");
        let nodes = p.line().unwrap();
        assert_eq!(p.wait(), Some(0));
        nodes
            .strip_prefix("nodes ")
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let nodes = sound();
    let file = home.dir.join("a/v/list");
    let says = |args: &[&str]| {
        let mut command = Command::new(mojim_path());
        let out = command.arg("heap").args(args).output().unwrap();
        assert!(out.status.success(), "{}", text_of(&out.stderr));
        text_of(&out.stdout)
    };
    let path = file.to_str().unwrap();
    let info = |json: &str| serde_json::from_str::<Value>(json).unwrap();
    let before = info(&says(&["info", path, "--json"]));
    assert_eq!(before["used_blocks"], nodes + 1);
    assert_eq!(before["roots"][0]["name"], "list");
    assert!(says(&["info", path]).contains("struct list"));
    assert!(says(&["check", path]).starts_with("sound: "));
    let of = ["--config", config.to_str().unwrap(), "--name", "a"];
    let to = ["move", "list", "--to", "0x2a0000000000", "--json"];
    let dry = info(&says(&[&to[..], &of, &["--dry-run"]].concat()));
    assert_eq!(
        info(&says(&["info", path, "--json"]))["address"],
        before["address"]
    );
    let moved = info(&says(&[&to[..], &of].concat()));
    assert_eq!(moved["pointers"], dry["pointers"]);
    // Each node but the last points to the next one, and the list to the first.
    assert!(moved["pointers"].as_u64().unwrap() >= nodes);
    assert_eq!(
        info(&says(&["info", path, "--json"]))["address"],
        "0x2a0000000000"
    );
    assert_eq!(sound(), nodes);
    // A damaged one is not sound.
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[64 << 10] ^= 0x40;
    let copy = home.dir.join("copy");
    std::fs::write(&copy, bytes).unwrap();
    let mut command = Command::new(mojim_path());
    let out = command.args(["heap", "check"]).arg(&copy).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text_of(&out.stdout));
}
