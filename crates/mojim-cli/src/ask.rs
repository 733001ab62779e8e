//! Questions to nodes: the connection, its time limit, and the errors' words.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mojim_config::{Config, Node};
use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_replica::client::Client;
use serde_json::{Value, json};

use crate::failure::Failure;

/// How long a node may take to answer a short question.
pub const SHORT: Duration = Duration::from_secs(3);
/// How long it may take over one that reads data or ends a view.
pub const LONG: Duration = Duration::from_secs(30);

/// A node that answers, or the reason why it does not.
pub struct Asked {
    client: Client,
    cluster: String,
    who: String,
}

impl Asked {
    /// Connects to a node.
    pub fn connect(config: &Config, node: &Node, limit: Duration) -> Result<Asked, Failure> {
        let who = format!("node {} at {}", node.name, node.address);
        let env: Arc<dyn Env> = Arc::new(Os::asking(config)?);
        let client = Client::connect(&env, &Address::Tcp(node.address), limit)
            .map_err(|e| Failure::failed(format!("{who} cannot be reached: {e}")))?;
        Ok(Asked {
            client,
            cluster: config.cluster.clone(),
            who,
        })
    }

    /// Asks `what`, with the fields of `more` (an object).
    pub fn ask(&mut self, what: &str, more: Value) -> Result<Value, mojim::Error> {
        let mut q = more;
        q["what"] = json!(what);
        q["cluster"] = json!(self.cluster);
        self.client.ask(&q)
    }

    /// The node, for messages.
    pub fn who(&self) -> &str {
        &self.who
    }
}

/// One question to one node.
pub fn ask(
    config: &Config,
    node: &Node,
    limit: Duration,
    what: &str,
    more: Value,
) -> Result<Value, Failure> {
    let mut asked = Asked::connect(config, node, limit)?;
    let who = asked.who().to_owned();
    asked
        .ask(what, more)
        .map_err(|e| Failure::failed(format!("{who}: {}", plain(&e))))
}

/// Whether the error is a node's answer; otherwise there was none.
pub fn is_answer(e: &mojim::Error) -> bool {
    matches!(e, mojim::Error::Io { what, .. } if what == "the node says")
}

/// An error without the words that the client puts before a node's own.
pub fn plain(e: &mojim::Error) -> String {
    match e {
        mojim::Error::Io { error, .. } if is_answer(e) => error.clone(),
        e => e.to_string(),
    }
}

/// Reads and checks the configuration.
pub fn load(path: &Path) -> Result<Config, Failure> {
    Ok(Config::load(path)?)
}
