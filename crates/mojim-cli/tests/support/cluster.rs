//! Two real nodes on loopback, with their configuration.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use super::{Process, await_that, mojim, text};

/// Two nodes' configuration, directories and memory.
pub struct Cluster {
    pub dir: PathBuf,
    pub memory: PathBuf,
    pub ports: [u16; 2],
}

/// How a test's cluster is configured.
#[derive(Clone, Copy)]
pub struct Setup {
    pub mode: &'static str,
    pub mirror_medium: &'static str,
    pub transport: &'static str,
}

pub const SYNC: Setup = Setup {
    mode: "sync",
    mirror_medium: "disk",
    transport: "tcp",
};

impl Cluster {
    pub fn new(setup: Setup) -> Cluster {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "mojim-e2e-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
        let memory = Path::new("/dev/shm").join(&name);
        // Left behind by a killed run of the same number.
        let _ = fs::remove_dir_all(&dir);
        let _ = fs::remove_dir_all(&memory);
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(&memory).unwrap();
        let held = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = held.map(|l| l.local_addr().unwrap().port());
        let c = Cluster { dir, memory, ports };
        fs::write(c.file(), c.text(setup, "e2e")).unwrap();
        c
    }

    pub fn text(&self, setup: Setup, cluster: &str) -> String {
        let Setup {
            mode,
            mirror_medium,
            transport,
        } = setup;
        let mut t = format!(
            "cluster = \"{cluster}\"\n[volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\ntransport = \"{transport}\"\nresend_timeout = \"5s\"\n"
        );
        for (i, (name, medium)) in [("a", "disk"), ("b", mirror_medium)].iter().enumerate() {
            t += &format!(
                "[node.{name}]\naddress = \"127.0.0.1:{}\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ medium = \"{medium}\", size = \"4MiB\" }}\n",
                self.ports[i],
                self.dir.join(name).display(),
                self.memory.display(),
            );
        }
        t
    }

    pub fn file(&self) -> PathBuf {
        self.dir.join("mojim.toml")
    }

    /// `mojim WORD --config FILE ARGS…`, to its end.
    pub fn mojim(&self, word: &str, args: &[&str]) -> Output {
        mojim(&[&[word, "--config", self.file().to_str().unwrap()], args].concat())
    }

    pub fn node(&self, name: &str) -> Process {
        let file = self.file();
        let args = ["node", "--config", file.to_str().unwrap(), "--name", name];
        let mut p = Process::start(&args, &self.dir.join(format!("{name}.txt")));
        let line = p
            .line()
            .unwrap_or_else(|| panic!("node {name}: {}", p.errors()));
        assert!(line.contains("is ready at 127.0.0.1:"), "{line}");
        p
    }

    /// The demonstration's program, attached; and how many entries it found.
    pub fn program(&self, node: &str, args: &[&str]) -> (Process, u64) {
        let file = self.file();
        let base = [
            "__append",
            "--config",
            file.to_str().unwrap(),
            "--node",
            node,
        ];
        let errors = self.dir.join(format!("program-{node}.txt"));
        let mut p = Process::start(&[&base[..], args].concat(), &errors);
        let line = p
            .line()
            .unwrap_or_else(|| panic!("program on {node}: {}", p.errors()));
        let found = line.rsplit(' ').next().unwrap().parse().unwrap();
        assert!(line.starts_with("attached "), "{line}");
        (p, found)
    }

    pub fn status(&self) -> Value {
        let out = self.mojim("status", &["--json"]);
        serde_json::from_slice(&out.stdout).unwrap()
    }

    /// What node `i` (0: a, 1: b) says of the volume.
    pub fn says(&self, i: usize) -> Value {
        self.status()["volumes"][0]["nodes"][i].clone()
    }

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

    pub fn promote(&self, name: &str) -> Value {
        // A mirror notices within its heartbeat that the primary has died.
        let mut last = String::new();
        await_that("the promotion", || {
            let out = self.mojim("promote", &["--name", name, "--json"]);
            last = text(&out.stderr);
            (out.status.code() == Some(0)).then(|| serde_json::from_slice(&out.stdout).unwrap())
        })
    }

    /// As after a loss of power: what a node had in memory is gone.
    pub fn lose_memory(&self, node: &str) {
        let mine = format!("mojim-e2e-{node}-");
        for d in fs::read_dir(&self.memory).unwrap() {
            let d = d.unwrap();
            if d.file_name().to_str().unwrap().starts_with(&mine) {
                fs::remove_dir_all(d.path()).unwrap();
            }
        }
    }

    pub fn logs(&self) -> String {
        ["a", "b", "program-a", "program-b"]
            .map(|n| {
                let t = fs::read_to_string(self.dir.join(format!("{n}.txt"))).unwrap_or_default();
                format!("\n--- {n}\n{t}")
            })
            .concat()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let _ = fs::remove_dir_all(&self.dir);
        let _ = fs::remove_dir_all(&self.memory);
    }
}
