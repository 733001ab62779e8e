//! `mojim promote`: makes a mirror the primary, by an operator's word.

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;

use crate::ask::{LONG, ask, load};
use crate::failure::{Done, Failure};

/// Make a node the primary of a volume, after its primary has died.
///
/// Refused (exit code 1) while a program is attached to the primary, where that can be known, and
/// where this node's copy may lack acknowledged sync points.
#[derive(clap::Args)]
pub struct Promote {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume; may be left out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// The node that becomes primary; its daemon must run.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

impl Promote {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        let node = config.node(&self.name)?;
        if volume.primary != node.name && volume.mirror.as_ref() != Some(&node.name) {
            return Err(Failure::usage(format!(
                "{}: node {} does not hold volume {}; its nodes are {}{}",
                self.config.display(),
                node.name,
                volume.name,
                volume.primary,
                volume
                    .mirror
                    .as_ref()
                    .map_or(String::new(), |m| format!(" and {m}")),
            )));
        }
        let answer = ask(
            &config,
            node,
            LONG,
            "promote",
            json!({ "volume": volume.name }),
        )?;
        let mut out = std::io::stdout().lock();
        if self.json {
            let mut answer = answer;
            answer["volume"] = json!(volume.name);
            answer["node"] = json!(node.name);
            writeln!(out, "{answer}")?;
            return Ok(0);
        }
        if answer["already"] == true {
            writeln!(
                out,
                "volume {}: node {} is the primary already, since epoch {}",
                volume.name, node.name, answer["epoch"]
            )?;
        } else {
            writeln!(
                out,
                "volume {}: node {} is the primary from epoch {}, last LSN {}",
                volume.name, node.name, answer["epoch"], answer["last_lsn"]
            )?;
        }
        Ok(0)
    }
}
