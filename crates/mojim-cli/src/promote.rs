//! `mojim promote`: an operator makes a node the primary.

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
/// The copies of the other nodes become equal to the new primary's as soon as they answer.
///
/// The command refuses with exit code 1 in these cases:
///
/// - A program is attached to the primary, where that can be known.
///
/// - The copy of this node may lack acknowledged sync points.
///
/// - The node is a backup.
///
/// - Another node knows a later view, or was promoted too.
///
/// `--force` lifts these refusals, with manual failover all but the first. Acknowledged sync points
/// may then be lost. A node without a whole copy is never promoted.
///
/// In mode async, and after the node lost its memory, sync points can be given up without
/// `--force`. Those are the ones that only a silent node has.
///
/// With automatic failover, the mirror becomes the primary by itself when the primary dies.
/// `--force` is for the case that the other nodes are lost for good. It promotes a node outside
/// the view, or one whose log is damaged.
///
/// With automatic failover, `--force` also promotes while a program runs on the old primary. Its
/// sync points fail with ESTALE, and you start the program again on this node.
///
/// If no program is attached, the mirror is promoted without `--force`. The old primary's daemon
/// may keep running. It becomes the mirror.
#[derive(clap::Args)]
pub struct Promote {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume. You may leave it out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// The node that becomes the primary. Its daemon must run.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// Give up everything that only other nodes hold. Acknowledged sync points may be lost.
    #[arg(long)]
    force: bool,
    /// With --force, do not ask for confirmation.
    #[arg(long, requires = "force")]
    yes: bool,
    /// Seconds to try again while a primary is alive, or was a moment ago. Without a number: 30.
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
                "Volume {}: node {} becomes the primary with its own data.\nSync points that only other nodes hold are lost, also acknowledged ones.\nPrograms on other nodes may go on, and what they commit from then on is lost too.\nFirst end those programs, and fence the nodes that do not answer. Go on? [y/N] ",
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
                "Node {} did not answer. If it was promoted too, sync points that it acknowledged since are missing here\n",
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
            format!("its log is applied up to LSN {applied} of {last}")
        }
        _ => "it goes on".to_owned(),
    };
    format!("volume {volume}: node {node} becomes primary; {how}")
}
