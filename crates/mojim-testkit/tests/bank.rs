//! The same small bank in every language (`examples/bank*`), on one file.
//!
//! Each is run, killed at random moments, and failed over to the mirror. It finds the total
//! right, and every transfer that was said to be made. A bank whose sync points are not
//! atomic is caught.
//!
//! - BANK_SEED repeats a run, as far as its moments can be.
//! - BANK_ROUNDS: how often each bank has its turn (default 1).
//! - BANK_KILLS: how often it is killed in one (default 1). The last kill takes its node
//!   along.
//!
//! Owns its cluster and its processes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use mojim_testkit::rng::Rng;
use mojim_testkit::voters::Cluster;
use mojim_testkit::{
    DEADLINE, Process, await_or, await_that, continue_all, libraries, mojim_path, source, stop_all,
    text,
};

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |v| v.parse().unwrap())
}

/// One language's bank.
struct Kind {
    name: &'static str,
    /// Its command, but for what is said of the cluster.
    program: Vec<String>,
    /// What it has in common with others: where its accounts are.
    file: &'static str,
    /// It is run under `mojim run`, and given the file.
    is_unmodified: bool,
}

/// Compiles a C or C++ example, with more flags.
fn compile(c: &Cluster, example: &str, name: &str, flags: &[&str]) -> Vec<String> {
    let to = c.dir.join(name);
    let compiler = if example.ends_with(".cpp") {
        "c++"
    } else {
        "cc"
    };
    let dir = libraries().display();
    let out = Command::new(compiler)
        .args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .args(flags.iter().filter(|f| !f.starts_with("-l")))
        .arg(format!("-I{}", source().join("include").display()))
        .arg(source().join("examples").join(example))
        .arg("-o")
        .arg(&to)
        .arg(format!("-L{dir}"))
        .args(flags.iter().filter(|f| f.starts_with("-l")))
        .args(["-lmojim", &format!("-Wl,-rpath,{dir}")])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    vec![to.display().to_string()]
}

/// The bank of Rust, an example of its crate.
fn rust_example() -> String {
    let dir = libraries();
    if std::env::var_os("MOJIM_BUILT").is_none() {
        let profile = match dir.ends_with("debug") {
            true => "dev",
            false => "release",
        };
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "mojim", "--example", "bank"]);
        cargo.args(["--profile", profile, "--target-dir"]);
        cargo.arg(dir.parent().unwrap()).current_dir(source());
        assert!(cargo.status().unwrap().success());
    }
    dir.join("examples/bank").display().to_string()
}

fn kinds(c: &Cluster) -> Vec<Kind> {
    let kind = |name, program| Kind {
        name,
        program,
        file: match name {
            "heap" | "Rust" | "C++" => name,
            _ => "bank",
        },
        is_unmodified: false,
    };
    let python = source().join("scripts/python").display().to_string();
    let script = source().join("examples/bank.py").display().to_string();
    // Variables "might be clobbered" behind a block that begins again: not what a block changes.
    let tm = ["-fgnu-tm", "-Wno-clobbered", "-lmojim_itm"];
    let mut all = vec![
        kind("C", compile(c, "bank.c", "bank", &[])),
        kind("heap", compile(c, "bank_heap.c", "bank_heap", &[])),
        kind("captured", compile(c, "bank_tm.c", "bank_tm", &tm)),
        kind("C++", compile(c, "bank.cpp", "bank++", &["-std=c++17"])),
        kind("Rust", vec![rust_example()]),
        Kind {
            name: "mmap",
            program: compile(c, "bank_mmap.c", "bank_mmap", &[]),
            file: "bank",
            is_unmodified: true,
        },
    ];
    // It makes the environment of Python at its first use.
    let out = Command::new(&python).args(["-c", ""]).output().unwrap();
    match out.status.success() {
        true => all.push(kind("Python", vec![python, script])),
        false => eprintln!("SKIPPED: no Python with NumPy here: {}", text(&out.stderr)),
    }
    all
}

/// A bank that runs.
struct Bank {
    child: Child,
    lines: Receiver<String>,
    /// The last transfer that was said to be made, in this run or before.
    made: u64,
}

impl Bank {
    /// Once the node is primary, and no other program has the volume; the total is right.
    fn open(c: &Cluster, kind: &Kind, node: &str, made: u64) -> Result<Bank, String> {
        let what = format!("the bank in {} on {node}", kind.name);
        await_or(
            &what,
            || c.status().to_string(),
            || {
                let mut bank = Bank::start(c, kind, node, made);
                match bank.lines.recv_timeout(DEADLINE) {
                    Ok(line) if line == "total 64000 ok" => Some(Ok(bank)),
                    Ok(line) => Some(Err(line)),
                    Err(_) => {
                        bank.end();
                        std::thread::sleep(Duration::from_millis(50));
                        None
                    }
                }
            },
        )
    }

    fn start(c: &Cluster, kind: &Kind, node: &str, made: u64) -> Bank {
        let config = c.file();
        let mut command = match kind.is_unmodified {
            true => {
                let file = c.dir.join(node).join("v/bank");
                let mut command = Command::new(mojim_path());
                command.args(["run", "--config"]).arg(&config);
                command.args(["--name", node, "--preload", "--"]);
                command.args(&kind.program).arg(file);
                command
            }
            false => {
                let mut command = Command::new(&kind.program[0]);
                command.args(&kind.program[1..]).arg(&config).arg(node);
                command
            }
        };
        let errors = c.dir.join(format!("bank-{}-{node}.txt", kind.name));
        let errors = File::options().create(true).append(true).open(errors);
        let mut child = command
            .arg("1000000000")
            .env("MOJIM_LIBRARY", libraries().join("libmojim.so"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors.unwrap())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Bank { child, lines, made }
    }

    /// Takes in a line; none of what was made is missing.
    fn take(&mut self, line: &str) {
        let number = line.strip_prefix("transfer ").expect(line);
        let number = number.parse().unwrap();
        assert!(number > self.made, "{} were made, then {line}", self.made);
        self.made = number;
    }

    /// Until a transfer is made, and a moment longer.
    fn work(&mut self, rng: &mut Rng) {
        let line = self.lines.recv_timeout(DEADLINE);
        self.take(&line.expect("it makes transfers"));
        std::thread::sleep(Duration::from_micros(rng.below(30_000)));
    }

    /// The process that makes the transfers: itself, or what it runs.
    fn program(&self) -> u32 {
        let id = self.child.id();
        let children = format!("/proc/{id}/task/{id}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        let mut children = children.split_whitespace();
        children.next().map_or(id, |child| child.parse().unwrap())
    }

    fn end(&mut self) {
        if self.child.try_wait().unwrap().is_some() {
            return;
        }
        // `mojim run` is no more when what it runs ends: it would have it end in a gentler way.
        let program = self.program();
        stop_all(&[self.child.id()]);
        if program != self.child.id() {
            let program = Pid::from_raw(program as i32).expect("a process");
            kill_process(program, Signal::KILL).unwrap();
        }
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Kills it; the last transfer that it said was made.
    fn kill(mut self) -> u64 {
        self.end();
        while let Ok(line) = self.lines.recv_timeout(DEADLINE) {
            self.take(&line);
        }
        self.made
    }
}

impl Drop for Bank {
    fn drop(&mut self) {
        self.end();
    }
}

fn seed() -> Rng {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap();
    let seed = from_environment("BANK_SEED", u64::from(now.subsec_nanos()));
    println!("BANK_SEED={seed}");
    Rng::new(seed)
}

#[test]
fn every_bank_keeps_its_total_through_kills_and_failovers() {
    let mut rng = seed();
    let c = Cluster::new("sync", "dram");
    let kinds = kinds(&c);
    let _w = c.node("w");
    let mut nodes = ["a", "b"].map(|n| (n, c.node(n)));
    // How many transfers were said to be made, in each file.
    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for _ in 0..from_environment("BANK_ROUNDS", 1) {
        let mut order: Vec<&Kind> = kinds.iter().collect();
        rng.shuffle(&mut order);
        for kind in order {
            let mut made = all.get(kind.file).copied().unwrap_or(0);
            for kill in 1..=from_environment("BANK_KILLS", 1) {
                let mut bank = Bank::open(&c, kind, nodes[0].0, made).unwrap();
                bank.work(&mut rng);
                if kill < from_environment("BANK_KILLS", 1) {
                    made = bank.kill();
                    continue;
                }
                made = fail_over(&c, bank, &mut nodes, &mut rng);
                println!("{}: {made} transfers, now on {}", kind.name, nodes[0].0);
            }
            let mut bank = Bank::open(&c, kind, nodes[0].0, made).unwrap();
            bank.work(&mut rng);
            all.insert(kind.file, bank.kill());
        }
    }
}

/// Kills the bank and its node, the first of `nodes`, at a moment when the other one is its
/// mirror; the other is first then, and its node is started again.
fn fail_over(c: &Cluster, bank: Bank, nodes: &mut [(&str, Process); 2], rng: &mut Rng) -> u64 {
    let [(first, _), (second, _)] = nodes;
    // From here on nobody changes the view.
    let program = [bank.program()];
    await_that("a primary that stands still with its mirror", || {
        c.await_view(first, first, Some(second));
        stop_all(&program);
        let is_member = c.register(first)["mirror"]["node"] == *second;
        if !is_member {
            continue_all(&program);
        }
        is_member.then_some(())
    });
    let made = if rng.pick(&[true, false]) {
        let made = bank.kill();
        nodes[0].1.kill();
        made
    } else {
        nodes[0].1.kill();
        bank.kill()
    };
    nodes.swap(0, 1);
    c.await_view(nodes[0].0, nodes[0].0, None);
    nodes[1].1 = c.node(nodes[1].0);
    made
}

/// The test before this one must see a bank whose two accounts are committed one after the
/// other.
#[test]
fn a_bank_of_two_sync_points_is_caught() {
    let mut rng = seed();
    let c = Cluster::new("sync", "dram");
    let _nodes = ["a", "b", "w"].map(|n| c.node(n));
    let hook = source().join("tests/e2e/apart.h").display().to_string();
    let kind = Kind {
        name: "two",
        program: compile(&c, "bank.c", "two", &["-include", &hook]),
        file: "bank",
        is_unmodified: false,
    };
    let mut made = 0;
    for _ in 0..30 {
        match Bank::open(&c, &kind, "a", made) {
            Ok(mut bank) => {
                bank.work(&mut rng);
                made = bank.kill();
            }
            Err(line) => {
                assert!(line.ends_with(" wrong"), "{line}");
                return;
            }
        }
    }
    panic!("no kill was between the sync points");
}
