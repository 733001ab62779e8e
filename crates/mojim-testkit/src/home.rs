//! A cluster's place on this machine: its directories, its ports, its
//! configuration, and the `mojim` command on them.
//!
//! Owns the directories: when it is dropped they are gone, and where the test
//! has failed its processes' messages are printed first.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::{
    Port, Process, await_that, continue_all, mojim, mojim_path, stop_all, temporary, text,
};

/// Directories on disk and in memory, and a port for each node.
pub struct Home {
    pub dir: PathBuf,
    pub memory: PathBuf,
    pub ports: Vec<Port>,
    prepare: OnceLock<Prepare>,
}

/// What is done to the command of each process that is started, by the name of
/// its node.
type Prepare = Box<dyn Fn(&str, &mut Command) + Send + Sync>;

impl Home {
    pub fn new(test: &str, nodes: usize) -> Home {
        // Built here, where it is needed: a thread may have a network of its own later.
        mojim_path();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "mojim-{test}-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let dir = temporary().join(&name);
        let memory = Path::new("/dev/shm").join(&name);
        for d in [&dir, &memory] {
            // Left behind by a killed run of the same number.
            let _ = fs::remove_dir_all(d);
            fs::create_dir_all(d).unwrap();
        }
        Home {
            dir,
            memory,
            ports: (0..nodes).map(|_| Port::new()).collect(),
            prepare: OnceLock::new(),
        }
    }

    /// The configuration of a node with data that listens at `port`; its log
    /// as in `{ log }`.
    pub fn data_node(&self, name: &str, port: u16, log: impl Display) -> String {
        format!(
            "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ {log} }}\n",
            self.dir.join(name).display(),
            self.memory.display(),
        )
    }

    /// The same of a witness.
    pub fn witness(&self, name: &str, port: u16) -> String {
        format!(
            "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = \"{}\"\nrole = \"witness\"\n",
            self.dir.join(name).display(),
        )
    }

    /// The line that says where the keys are, for the head of a configuration.
    pub fn keys_line(&self) -> String {
        format!("keys = \"{}\"\n", self.dir.join("keys").display())
    }

    pub fn configure(&self, text: &str) {
        fs::write(self.file(), text).unwrap();
    }

    /// A command as a message advises it: with this configuration file.
    pub fn advised(&self, command: &str, more: &str) -> String {
        format!(
            "`mojim {command} --config {} {more}`",
            self.file().display()
        )
    }

    pub fn file(&self) -> PathBuf {
        self.dir.join("mojim.toml")
    }

    /// `mojim WORD --config FILE ARGS…`, to its end.
    pub fn mojim(&self, word: &str, args: &[&str]) -> Output {
        mojim(&[&[word, "--config", self.file().to_str().unwrap()], args].concat())
    }

    pub fn make_keys(&self) {
        let out = self.mojim("keys", &[]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    }

    /// `mojim WORD --config FILE ARGS…`, started; its messages go to `NAME.txt`.
    pub fn start(&self, word: &str, args: &[&str], name: &str) -> Process {
        self.start_as(&self.file(), word, args, name)
    }

    /// From now on, each node and program starts as this says.
    pub fn prepare(&self, how: impl Fn(&str, &mut Command) + Send + Sync + 'static) {
        assert!(self.prepare.set(Box::new(how)).is_ok());
    }

    fn start_as(&self, file: &Path, word: &str, args: &[&str], name: &str) -> Process {
        let all = [&[word, "--config", file.to_str().unwrap()], args].concat();
        let errors = self.dir.join(format!("{name}.txt"));
        Process::start_with(&all, &errors, |command| {
            if let Some(prepare) = self.prepare.get() {
                prepare(name.strip_prefix("program-").unwrap_or(name), command);
            }
        })
    }

    /// A node, ready.
    pub fn node(&self, name: &str) -> Process {
        self.node_as(&self.file(), name)
    }

    /// The same with a configuration of its own.
    pub fn node_as(&self, file: &Path, name: &str) -> Process {
        let mut p = self.start_as(file, "node", &["--name", name], name);
        let line = p
            .line()
            .unwrap_or_else(|| panic!("node {name}: {}", p.errors()));
        assert!(line.contains("is ready at 127.0.0.1:"), "{line}");
        p
    }

    /// The demonstration's program, if it could attach; and how many entries it
    /// found.
    pub fn try_program(&self, node: &str, args: &[&str]) -> Result<(Process, u64), String> {
        let all = [&["--node", node], args].concat();
        let mut p = self.start("__append", &all, &format!("program-{node}"));
        let Some(line) = p.line() else {
            return Err(p.errors());
        };
        assert!(line.starts_with("attached "), "{line}");
        let found = line.rsplit(' ').next().unwrap().parse().unwrap();
        Ok((p, found))
    }

    pub fn program(&self, node: &str, args: &[&str]) -> (Process, u64) {
        self.try_program(node, args)
            .unwrap_or_else(|e| panic!("program on {node}: {e}"))
    }

    /// What every node says; null where the command says nothing that is JSON.
    pub fn status(&self) -> Value {
        let out = self.mojim("status", &["--json"]);
        serde_json::from_slice(&out.stdout).unwrap_or(Value::Null)
    }

    /// What one node says of the volume. On a busy machine it may be late once.
    pub fn says(&self, node: &str) -> Value {
        let look = || {
            let all = self.status()["volumes"][0]["nodes"].take();
            let nodes = all.as_array().into_iter().flatten();
            let mut found = nodes.filter(|n| n["node"] == node).cloned();
            found.next().unwrap_or(Value::Null)
        };
        let is_late = |n: &Value| {
            let why = n["error"].as_str().unwrap_or_default();
            n["reachable"] == false && why.contains("did not answer within")
        };
        let mut looks = (0..3).map(|_| look());
        let first = looks.next().expect("three looks");
        match is_late(&first) {
            true => looks.find(|n| !is_late(n)).unwrap_or(first),
            false => first,
        }
    }

    /// The log of a node on its disk.
    pub fn log(&self, node: &str) -> PathBuf {
        self.dir.join(format!("{node}/.mojim/v.log.0"))
    }

    /// The checkpoint of a node's copy, by its superblock.
    pub fn checkpoint(&self, node: &str) -> u64 {
        let path = self.dir.join(format!("{node}/.mojim/v/superblock"));
        let bytes = fs::read(path).unwrap();
        let word =
            |slot: &[u8], at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().unwrap());
        let slots = bytes.chunks_exact(bytes.len() / 2);
        let newest = slots.max_by_key(|s| word(s, 16)).unwrap();
        word(newest, 48)
    }

    /// Where the records lie in a node's log on disk, by their LSNs, and its bytes.
    pub fn records(&self, node: &str) -> (Vec<(u64, usize)>, Vec<u8>) {
        let bytes = fs::read(self.log(node)).unwrap();
        let lsn = |at: usize| u64::from_le_bytes(bytes[at + 16..at + 24].try_into().unwrap());
        let all = (0..bytes.len()).step_by(512);
        let all = all.filter(|at| bytes[*at..].starts_with(b"MJR1"));
        let mut records: Vec<_> = all.map(|at| (lsn(at), at)).collect();
        records.sort();
        (records, bytes)
    }

    /// How many records a node's log has on its disk that its checkpoint does not cover.
    pub fn waiting(&self, node: &str) -> usize {
        let from = self.checkpoint(node);
        let (records, _) = self.records(node);
        records.iter().filter(|(lsn, _)| *lsn > from).count()
    }

    /// Has processes stand still once the nodes' logs have `least` records on their disks that
    /// no checkpoint covers: one is taken whenever a machine is so busy that it seems idle. Two
    /// processes stop together: one that waits for the other is idle, too.
    pub fn stop_with_records(&self, nodes: &[&str], least: usize, ids: &[u32]) {
        let enough = || nodes.iter().all(|n| self.waiting(n) >= least);
        await_that("records behind the checkpoint", || {
            // First while they run, so that they get as far.
            if !enough() {
                return None;
            }
            stop_all(ids);
            let enough = enough();
            if !enough {
                continue_all(ids);
            }
            enough.then_some(())
        });
    }

    /// All copies are the same, once they have come as far.
    pub fn assert_equal(&self) -> Value {
        let out = self.mojim("verify", &["--json", "--wait", "60"]);
        assert_eq!(
            out.status.code(),
            Some(0),
            "{} {}",
            text(&out.stdout),
            self.logs()
        );
        let v: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(v["equal"], true, "{v}");
        v
    }

    /// What every process has said on its standard error.
    pub fn logs(&self) -> String {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries.map(|e| e.path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "txt"));
        files.sort();
        let mut all = String::new();
        for f in files {
            let t = fs::read_to_string(&f).unwrap_or_default();
            // A program that is tried again and again says the same each time.
            let mut lines: Vec<&str> = t.lines().collect();
            lines.dedup();
            all += &format!("\n--- {}\n{}\n", f.display(), lines.join("\n"));
        }
        all
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let _ = fs::remove_dir_all(&self.dir);
        let _ = fs::remove_dir_all(&self.memory);
    }
}
