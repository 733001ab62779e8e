//! `mojim node`: one node in the foreground, until a signal ends it.

use std::io::Write;
use std::path::PathBuf;

use crate::ask::load;
use crate::failure::{Done, say_on_stderr};
use crate::signals;

/// Run a node in the foreground: it keeps copies of volumes and answers questions.
///
/// Prints one line on standard output when it is ready (its name and addresses) and events on
/// standard error. SIGTERM, SIGINT or SIGHUP stop it cleanly.
#[derive(clap::Args)]
pub struct Node {
    /// The configuration file; the same text on every node.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Which of its nodes this is.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// Print the ready line as JSON.
    #[arg(long)]
    json: bool,
}

impl Node {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        config.node(&self.name)?;
        signals::block()?;
        let node = mojim::node::Node::start(&config, &self.name, say_on_stderr)?;
        let addresses: Vec<String> = node.addresses().iter().map(ToString::to_string).collect();
        let line = if self.json {
            serde_json::json!({ "node": self.name, "ready": true, "addresses": addresses })
                .to_string()
        } else {
            format!("node {} is ready at {}", self.name, addresses.join(" and "))
        };
        // Whoever started it may have closed the pipe: it serves all the same.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        drop(out);
        let signal = signals::wait()?;
        say_on_stderr(&format!("node {}: signal {signal}, stopping", self.name));
        node.stop();
        Ok(0)
    }
}
