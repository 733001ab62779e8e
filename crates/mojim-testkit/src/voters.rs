//! Clusters whose views lie in a register that their nodes keep, with their
//! configuration.

use std::fs;
use std::ops::Deref;

use serde_json::Value;

use crate::home::Home;
use crate::{Process, await_or, await_that, text};

/// Two nodes with data, `a` and `b`, and a witness, `w`. Where it has a backup,
/// that is `c`, and there is another witness, `x`.
pub struct Cluster {
    home: Home,
}

impl Cluster {
    pub fn new(mode: &str, medium: &str) -> Cluster {
        Cluster::with(mode, medium, None, false)
    }

    /// With a backup.
    pub fn larger(mode: &str) -> Cluster {
        Cluster::with(mode, "disk", None, true)
    }

    /// With keys, and data links that are encrypted or not.
    pub fn keyed(mode: &str, medium: &str, encrypt: bool) -> Cluster {
        Cluster::with(mode, medium, Some(encrypt), false)
    }

    fn with(mode: &str, medium: &str, encrypt: Option<bool>, backup: bool) -> Cluster {
        let home = Home::new("failover", 5);
        let mut t = encrypt.map_or(String::new(), |e| {
            format!("{}encrypt = {e}\n", home.keys_line())
        });
        t += &format!(
            "cluster = \"failover\"\nheartbeat = \"100ms\"\nfailure_limit = \"1s\"\n\
             [volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nmirror = \"b\"\n"
        );
        let (data, witnesses): (&[_], &[_]) = match backup {
            true => (&["a", "b", "c"], &["w", "x"]),
            false => (&["a", "b"], &["w"]),
        };
        if backup {
            t += "backups = [\"c\"]\n";
        }
        let mut ports = home.ports.iter().map(|p| p.number);
        for (name, port) in data.iter().zip(&mut ports) {
            let log = format!("medium = \"{medium}\", size = \"4MiB\"");
            t += &home.data_node(name, port, log);
        }
        for (name, port) in witnesses.iter().zip(&mut ports) {
            t += &home.witness(name, port);
        }
        home.configure(&t);
        if encrypt.is_some() {
            home.make_keys();
        }
        Cluster { home }
    }

    /// Changes the configuration of nodes that are started from now on.
    pub fn rewrite(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.file()).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(self.file(), text.replacen(from, to, 1)).unwrap();
    }

    /// The program, attached as soon as the node is primary; and how many
    /// entries it found.
    pub fn program(&self, node: &str, args: &[&str]) -> (Process, u64) {
        await_or(
            &format!("attaching on {node}"),
            || self.status().to_string(),
            || self.try_program(node, args).ok(),
        )
    }

    /// What the register says, as a node reads it.
    pub fn register(&self, node: &str) -> Value {
        self.says(node)["register"].take()
    }

    pub fn await_view(&self, by: &str, primary: &str, mirror: Option<&str>) {
        let what = format!("the view {primary} and {mirror:?}");
        await_or(
            &what,
            || self.status().to_string(),
            || {
                let r = self.register(by);
                let is = r["primary"]["node"] == primary
                    && match mirror {
                        Some(m) => r["mirror"]["node"] == m,
                        None => r["mirror"].is_null() && r["primary"].is_object(),
                    };
                is.then_some(())
            },
        );
    }

    /// Until the voters' log names the directory of this voter, which runs.
    pub fn await_admitted(&self, voter: &str) {
        let out = self.mojim("replace", &["--same-name", voter]);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    }

    /// Primary `a` has mirror `b` now: a machine that stood still may have made it
    /// go on alone, and then nobody takes over.
    pub fn await_mirror(&self) {
        self.await_view("a", "a", Some("b"));
    }

    /// Up to which LSN a node has applied, if it says so.
    pub fn applied(&self, node: &str) -> Option<u64> {
        self.says(node)["applied"].as_u64()
    }

    /// Until backup `c` has records.
    pub fn await_backup(&self) {
        await_that("the backup follows", || {
            self.applied("c").filter(|n| *n > 0)
        });
    }
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}
