//! The secondary tier with real processes: a primary, its mirror, and backups
//! that the mirror forwards to.
//!
//! What is checked is each backup's data files: whole sync points, in the end
//! the same bytes as the primary's. Owns its temporary directories, shared
//! memory and processes.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

mod support;
use support::{Process, await_that, mojim};

/// Primary `a`, mirror `b`, backups `c` and `d`; no register.
struct Cluster {
    dir: PathBuf,
    memory: PathBuf,
}

impl Cluster {
    fn new(mode: &str, extra: &str) -> Cluster {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "mojim-backups-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&name);
        let memory = Path::new("/dev/shm").join(&name);
        let _ = fs::remove_dir_all(&dir);
        let _ = fs::remove_dir_all(&memory);
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(&memory).unwrap();
        let held = [0; 4].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = held.map(|l| l.local_addr().unwrap().port());
        let (d, m) = (dir.display(), memory.display());
        let mut t = format!(
            "cluster = \"backups\"\n[volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\nbackups = [\"c\", \"d\"]\nfailover = \"manual\"\n{extra}\n"
        );
        for (name, port) in ["a", "b", "c", "d"].iter().zip(ports) {
            t += &format!(
                "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = \"{d}/{name}\"\nring = \"{m}\"\nlog = {{ size = \"4MiB\" }}\n"
            );
        }
        let c = Cluster { dir, memory };
        fs::write(c.file(), t).unwrap();
        c
    }

    fn file(&self) -> PathBuf {
        self.dir.join("mojim.toml")
    }

    fn node(&self, name: &str) -> Process {
        let file = self.file();
        let args = ["node", "--config", file.to_str().unwrap(), "--name", name];
        let mut p = Process::start(&args, &self.dir.join(format!("{name}.txt")));
        let line = p
            .line()
            .unwrap_or_else(|| panic!("node {name}: {}", p.errors()));
        assert!(line.contains("is ready at"), "{line}");
        p
    }

    /// The program on `node`, attached, and how many entries it found.
    fn program(&self, node: &str, args: &[&str]) -> (Process, u64) {
        let file = self.file();
        let base = ["__append", "--config", file.to_str().unwrap(), "--node"];
        let errors = self.dir.join(format!("program-{node}.txt"));
        let mut p = Process::start(&[&base[..], &[node], args].concat(), &errors);
        let line = p.line().unwrap_or_else(|| panic!("{}", p.errors()));
        assert!(line.starts_with("attached "), "{line}");
        let found = line.rsplit(' ').next().unwrap().parse().unwrap();
        (p, found)
    }

    fn status(&self, node: &str) -> Value {
        let file = self.file();
        let out = mojim(&["status", "--config", file.to_str().unwrap(), "--json"]);
        let v: Value = serde_json::from_slice(&out.stdout).unwrap_or(Value::Null);
        let nodes = v["volumes"][0]["nodes"].as_array().cloned();
        let found = nodes.into_iter().flatten().find(|n| n["node"] == node);
        found.unwrap_or(Value::Null)
    }

    /// Until `node` has applied what `of` has.
    fn await_level(&self, node: &str, of: &str) {
        await_that(&format!("{node} as far as {of}"), || {
            let (x, y) = (self.status(node), self.status(of));
            (y["last_lsn"].is_u64() && x["applied"] == y["last_lsn"] && x["state"] == "whole")
                .then_some(())
        });
    }

    /// Whole copies that the mirror has sent to a backup.
    fn copies(&self, backup: &str) -> u64 {
        let b = self.status("b");
        let rows = b["backups"].as_array().cloned().unwrap_or_default();
        let row = rows.iter().find(|r| r["node"] == backup);
        row.and_then(|r| r["copies"].as_u64()).unwrap_or(0)
    }

    fn log(&self, node: &str) -> Vec<u8> {
        fs::read(self.dir.join(node).join("v").join("log")).unwrap()
    }

    fn assert_same(&self, one: &str, other: &str) {
        assert!(self.log(one) == self.log(other), "{one} and {other} differ");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.memory);
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

#[test]
fn backups_follow_the_mirror_and_come_back_by_log_and_by_copy() {
    let c = Cluster::new("sync", "");
    let _a = c.node("a");
    let _b = c.node("b");
    let mut backup = c.node("c");
    let _d = c.node("d");
    let (mut p, found) = c.program("a", &["--entries", "300", "--linger"]);
    assert_eq!(found, 0);
    p.acknowledged(0, 300);
    p.finish();
    for node in ["c", "d"] {
        c.await_level(node, "b");
        c.assert_same(node, "b");
        assert_eq!(c.status(node)["role"], "backup");
    }

    let before = c.copies("c");
    // Few records while it is away: they are still in the mirror's log.
    backup.kill();
    let (mut p, found) = c.program("a", &["--entries", "100", "--linger"]);
    assert_eq!(found, 300);
    p.acknowledged(300, 400);
    let mut backup = c.node("c");
    c.await_level("c", "b");
    assert_eq!(c.copies("c"), before, "it was copied whole");
    p.finish();
    c.await_level("c", "b");
    c.assert_same("c", "b");

    // More than any log holds: it is copied, while the program goes on.
    backup.kill();
    let (mut p, found) = c.program("a", &["--entries", "7000", "--linger"]);
    assert_eq!(found, 400);
    p.acknowledged(400, 5000);
    let _backup = c.node("c");
    p.acknowledged(5000, 7400);
    p.finish();
    await_that("a copy", || (c.copies("c") > before).then_some(()));
    for node in ["c", "d"] {
        c.await_level(node, "b");
        c.assert_same(node, "a");
    }
}

#[test]
fn a_primary_without_its_mirror_forwards_itself() {
    let c = Cluster::new("async", "");
    let _a = c.node("a");
    let mut b = c.node("b");
    let _c = c.node("c");
    let _d = c.node("d");
    let (mut p, _) = c.program("a", &["--entries", "100", "--linger"]);
    p.acknowledged(0, 100);
    p.finish();
    b.kill();
    // In `async` a primary begins without a mirror that does not answer.
    let (mut p, found) = c.program("a", &["--entries", "200", "--linger"]);
    assert_eq!(found, 100);
    p.acknowledged(100, 300);
    c.await_level("c", "a");
    c.await_level("d", "a");
    p.finish();
    for node in ["c", "d"] {
        c.await_level(node, "a");
        c.assert_same(node, "a");
    }
}
