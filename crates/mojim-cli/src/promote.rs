//! `mojim promote`: makes a mirror the primary, by an operator's word.

use std::path::PathBuf;
use std::time::Duration;

use mojim_format::shown::shown;
use mojim_replica::request::Request;
use serde_json::{Value, json};

use crate::ask::{LONG, demand, load};
use crate::failure::{Done, Failure};
use crate::output;

/// Make a node the primary of a volume, after its primary has died.
///
/// Refused (exit code 1) while a program is attached to the primary, where that can be known, and
/// where this node's copy may lack acknowledged sync points; but in mode async, and after the node
/// lost its memory, what only a node has that does not answer is given up without --force. If
/// another node knows a later view, or was promoted too, --force is needed. In a cluster with
/// automatic failover the view's mirror becomes primary by itself when the primary dies; --force
/// makes a node primary that is no member of the view, or whose log is damaged, when the others are
/// lost for good. The copies of other nodes are made equal to the new primary's as soon as they
/// answer.
///
/// With automatic failover --force also lifts the refusal beside a program: the program on the old
/// primary can commit nothing any more (its sync points fail with ESTALE), and is started anew on
/// this node. While no program is attached, the mirror is promoted without --force, and the old
/// primary's daemon may go on running: it becomes the mirror.
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
    /// Give up what only the other nodes hold: acknowledged sync points may be lost.
    #[arg(long)]
    force: bool,
    /// Do not ask before --force.
    #[arg(long, requires = "force")]
    yes: bool,
    /// While a primary is alive, or was a moment ago, try again for this many seconds.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_value_t = 0, default_missing_value = "30")]
    wait: u64,
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
        if !volume.data_nodes().contains(&node.name.as_str()) {
            return Err(Failure::usage(format!(
                "{}: node {} does not hold volume {}; its nodes are {}",
                self.config.display(),
                node.name,
                volume.name,
                volume.data_nodes().join(", "),
            )));
        }
        if self.force && !self.yes {
            eprint!(
                "Volume {}: node {} becomes primary with what it has. Sync points that only other nodes hold are\n\
                 given up, also acknowledged ones, and if one of those nodes still runs a program, its sync points\n\
                 fail from now on. End programs on other nodes, and fence the nodes that do not answer, first; the\n\
                 daemons that answer are asked what they have. Go on? [y/N] ",
                volume.name, node.name
            );
            let mut word = String::new();
            std::io::stdin().read_line(&mut word)?;
            if !matches!(word.trim(), "y" | "yes") {
                return Err(Failure::failed("not promoted".to_owned()));
            }
        }
        let request = Request::Promote {
            volume: volume.name.clone(),
            force: self.force,
        };
        let wait = Duration::from_secs(self.wait);
        let mut answer = demand(&config, node, LONG, &request, wait)?;
        // The node goes on, and whoever asks again learns how far it is.
        while answer["promoting"] == true {
            eprintln!("{}", progress(&volume.name, &node.name, &answer));
            answer = demand(&config, node, LONG, &request, wait)?;
        }
        if answer["epoch"].as_u64().is_none() {
            return Err(Failure::failed(format!(
                "node {} does not say since which epoch it is the primary of volume {}",
                node.name, volume.name
            )));
        }
        if self.json {
            let mut answer = answer;
            answer["volume"] = json!(volume.name);
            answer["node"] = json!(node.name);
            output::json(&answer)?;
            return Ok(0);
        }
        if answer["already"] == true {
            output::text(&format!(
                "volume {}: node {} is the primary already, since epoch {}\n",
                volume.name, node.name, answer["epoch"]
            ))?;
        } else {
            output::text(&format!(
                "volume {}: node {} is the primary from epoch {}, last LSN {}\n",
                volume.name, node.name, answer["epoch"], answer["last_lsn"]
            ))?;
        }
        for other in answer["unasked"].as_array().into_iter().flatten() {
            output::text(&format!(
                "Node {} did not answer: if it was promoted, too, what was acknowledged there since is not here\n",
                shown(other.as_str().unwrap_or_default())
            ))?;
        }
        Ok(0)
    }
}

/// How far a promotion is, by the node's answer.
fn progress(volume: &str, node: &str, answer: &Value) -> String {
    let how = match (answer["applied"].as_u64(), answer["last_lsn"].as_u64()) {
        (Some(applied), Some(last)) => {
            format!("what it has is applied up to LSN {applied} of {last}")
        }
        _ => "it goes on".to_owned(),
    };
    format!("volume {volume}: node {node} becomes primary; {how}")
}
