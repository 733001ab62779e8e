//! Two real nodes on loopback, with their configuration.

use std::fs;
use std::ops::Deref;

use serde_json::Value;

use crate::home::Home;
use crate::{await_that, text};

/// Two nodes, `a` and `b`.
pub struct Cluster {
    home: Home,
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
        let c = Cluster {
            home: Home::new("e2e", 2),
        };
        c.configure(&c.text(setup, "e2e"));
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
        let nodes = [("a", "disk"), ("b", mirror_medium)];
        for ((name, medium), port) in nodes.iter().zip(&self.ports) {
            let log = format!("medium = \"{medium}\", size = \"4MiB\"");
            t += &self.data_node(name, port.number, log);
        }
        t
    }

    /// [`Cluster::text`] with sync points that fail later than a test waits for anything, so that a
    /// machine that stands still for a minute fails none.
    pub fn patient_text(&self, setup: Setup) -> String {
        let usual = "resend_timeout = \"5s\"";
        let text = self.text(setup, "e2e");
        assert!(text.contains(usual));
        text.replace(usual, &format!("{usual}\nresend_attempts = 200"))
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
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}
