//! How one cluster of the rung is made: its mode, its logs, its threads.
//!
//! Owns the configuration's text. Everything follows from the seed, the mode and whether
//! there is a register.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use mojim::Config;
use mojim_sim::Rng;

use super::program::PART;
use crate::Result;

/// The volume's one file.
pub const FILE: &str = "f";
/// The file of a thread, where the program works in a mount.
pub fn file_of(thread: usize) -> String {
    format!("t{thread}")
}
/// The directory of a thread there.
pub fn directory_of(thread: usize) -> String {
    format!("d{thread}")
}

/// The nodes that hold the volume, and the witness.
pub const NODES: [&str; 3] = ["a", "b", "w"];
/// How many of the nodes hold the volume.
pub const DATA: usize = 2;

/// The modes in which the volume has a second copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mode {
    Async,
    Sync,
    SyncFlush,
    SyncDisk,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 4] = [Mode::Async, Mode::Sync, Mode::SyncFlush, Mode::SyncDisk];

    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Async => "async",
            Mode::Sync => "sync",
            Mode::SyncFlush => "sync-flush",
            Mode::SyncDisk => "sync-disk",
        }
    }
}

/// The parameters of one cluster.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The seed of everything else.
    pub seed: u64,
    /// The mode.
    pub mode: Mode,
    /// The mode that the program's own configuration has, in a control.
    pub believed: Mode,
    /// Whether there is a witness, and the views are in a register.
    pub register: bool,
    /// The program's threads.
    pub threads: usize,
    /// Steps of each.
    pub steps: u64,
    /// Whether the program works in a mount.
    pub mounted: bool,
    /// Whether that mount's requests come over io_uring.
    uring: bool,
    connections: u64,
    threshold: u64,
    log: u64,
    shm: bool,
}

/// Where the nodes of one cluster are, on this machine.
#[derive(Clone)]
pub struct Places {
    top: PathBuf,
    net: Ipv4Addr,
}

impl Places {
    /// Places below `top`, at addresses that no other cluster uses.
    pub fn new(top: PathBuf) -> Places {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let n = NUMBER.fetch_add(1, Relaxed) as u8;
        let pid = std::process::id();
        let net = Ipv4Addr::new(127, 64 | (pid >> 8) as u8 & 63, pid as u8, n);
        Places { top, net }
    }

    /// The directory of the whole cluster.
    pub fn top(&self) -> &Path {
        &self.top
    }

    /// Where a node's disk is mounted.
    pub fn disk(&self, node: &str) -> PathBuf {
        self.top.join(node).join("disk")
    }

    /// A node's directory on its disk.
    pub fn directory(&self, node: &str) -> PathBuf {
        self.disk(node).join("d")
    }

    /// The directory of a node's memory, which is lost with its power.
    pub fn ring(&self, node: &str) -> PathBuf {
        self.top.join(node).join("ring")
    }
}

impl Setup {
    /// The cluster of a seed.
    pub fn new(seed: u64, mode: Mode, register: bool, steps: u64) -> Setup {
        let mut rng = Rng::new(!seed ^ 0xc1a5);
        let connections = rng.between(1, 2);
        Setup {
            seed,
            mode,
            believed: mode,
            register,
            threads: *rng.pick(&[1, 2, 3, 4, 4]),
            steps,
            mounted: false,
            uring: false,
            connections,
            threshold: *rng.pick(&[1, 1, 4, 32]),
            log: connections * *rng.pick(&[64, 64, 128]),
            shm: rng.coin(),
        }
    }

    /// With a log a quarter of which holds all that the threads may have written and not synced: a
    /// mount commits early what is more. `alone`: with one thread; `uring`: over io_uring.
    pub fn for_a_mount(&mut self, alone: bool, uring: bool) {
        self.mounted = true;
        self.uring = uring;
        self.connections = 1;
        self.log = 2048;
        if alone {
            self.threads = 1;
        }
    }

    /// What its mounts are started with.
    pub fn uring(&self) -> [&'static str; 2] {
        ["--uring", if self.uring { "on" } else { "off" }]
    }

    /// Size of the region, in bytes.
    pub fn region(&self) -> usize {
        self.threads * PART
    }

    /// The configuration's text, in which a node counts as failed after `limit`
    /// milliseconds. `program`: the program's own text, with the mode that it believes
    /// in.
    pub fn text(&self, at: &Places, limit: u64, program: bool) -> String {
        let mode = if program { self.believed } else { self.mode };
        let mut text = format!(
            "cluster = \"crash\"\nheartbeat = \"50ms\"\nfailure_limit = \"{limit}ms\"\n\
             [volume.v]\nmode = \"{}\"\nprimary = \"a\"\nmirror = \"b\"\nfailover = \"{}\"\n\
             transport = \"{}\"\nconnections = {}\ncheckpoint_threshold = {}\n\
             resend_timeout = \"500ms\"\nresend_attempts = 40\n",
            mode.name(),
            if self.register { "automatic" } else { "manual" },
            if self.shm { "shm" } else { "tcp" },
            self.connections,
            self.threshold,
        );
        for (i, node) in NODES.iter().enumerate() {
            if i >= DATA && !self.register {
                break;
            }
            text += &format!(
                "[node.{node}]\naddress = \"{}:{}\"\ndirectory = \"{}\"\n",
                at.net,
                7401 + i,
                at.directory(node).display(),
            );
            if i >= DATA {
                text += "role = \"witness\"\n";
                continue;
            }
            let in_memory = *node == "b" && self.mode == Mode::SyncDisk;
            text += &format!(
                "ring = \"{}\"\nlog = {{ medium = \"{}\", size = \"{}KiB\" }}\n",
                at.ring(node).display(),
                if in_memory { "dram" } else { "disk" },
                self.log,
            );
        }
        text
    }

    /// The daemons' configuration, parsed.
    pub fn config(&self, at: &Places, limit: u64) -> Result<Config> {
        let text = self.text(at, limit, false);
        Ok(Config::parse(&text, Path::new("cluster.toml"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configuration_is_one() {
        let at = Places::new("/nowhere".into());
        for mode in Mode::ALL {
            for seed in 0..50 {
                for register in [false, true] {
                    if register && mode == Mode::Async {
                        continue;
                    }
                    let s = Setup::new(seed, mode, register, 10);
                    s.config(&at, 1000).unwrap();
                }
            }
        }
    }
}
