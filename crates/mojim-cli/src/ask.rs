//! Questions to nodes: the connection, its time limit, and the errors' words.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mojim_config::{Config, Node};
use mojim_env::{Address, Env};
use mojim_format::shown::shown;
use mojim_linux::Os;
use mojim_replica::client::Client;
use mojim_replica::layout;
use mojim_replica::request::Request;
use serde_json::Value;

use crate::failure::{Failure, say_on_stderr};
use crate::heard;
use crate::typed;

/// How long a node may take to answer a short question.
pub const SHORT: Duration = Duration::from_secs(3);
/// How long it may take over one that reads data or ends a view.
pub const LONG: Duration = Duration::from_secs(30);
/// Between two tries of what is to be tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// What a node knows of all its volumes.
pub const STATUS: Request = Request::Status {
    volume: None,
    register: true,
};

/// A node that answers, or the reason why it does not.
pub struct Asked {
    client: Client,
    who: String,
}

impl Asked {
    /// Connects to a node, to order something ([`Request::is_order`]). Without keys a node takes that
    /// over its Unix socket; where that cannot be used, the node itself says why.
    pub fn to_order(config: &Config, node: &Node, limit: Duration) -> Result<Asked, Failure> {
        if config.keys.is_none() && node.address.ip().is_loopback() {
            let who = format!("node {} at {}", node.name, node.address);
            let env: Arc<dyn Env> = Arc::new(Os::asking(config)?);
            let at = Address::Unix(layout::socket(node));
            // The node believes its own user, and so does root, who asks as that user.
            let to = || Client::connect(&env, &at, &config.cluster, limit);
            if let Ok(client) = mojim_linux::trust::as_owner_of(&node.directory, to) {
                return Ok(Asked { client, who });
            }
        }
        Asked::connect(config, node, limit)
    }

    /// Connects to a node, to ask this.
    fn for_request(
        config: &Config,
        node: &Node,
        limit: Duration,
        request: &Request,
    ) -> Result<Asked, Failure> {
        match request.is_order() {
            true => Asked::to_order(config, node, limit),
            false => Asked::connect(config, node, limit),
        }
    }

    /// Connects to a node.
    pub fn connect(config: &Config, node: &Node, limit: Duration) -> Result<Asked, Failure> {
        let who = format!("node {} at {}", node.name, node.address);
        let env: Arc<dyn Env> = Arc::new(Os::asking(config)?);
        let client = Client::connect(&env, &Address::Tcp(node.address), &config.cluster, limit)
            .map_err(|e| Failure::failed(format!("{who} cannot be reached: {e}")))?;
        Ok(Asked { client, who })
    }

    /// Asks. What the node says is fit to be shown, and has no number beyond sense.
    pub fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
        let mut answer = self.client.ask(request)?;
        heard::numbers(&answer).map_err(mojim::Error::Protocol)?;
        heard::words(&mut answer);
        Ok(answer)
    }

    /// As [`Asked::ask`], with the names of files as they are: for who compares them.
    pub fn ask_raw(&mut self, request: &Request) -> Result<Value, mojim::Error> {
        self.client.ask(request)
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
    request: &Request,
) -> Result<Value, Failure> {
    let mut asked = Asked::for_request(config, node, limit, request)?;
    let who = asked.who().to_owned();
    let answer = asked.ask(request);
    answer.map_err(|e| Failure::failed(format!("{who}: {}", plain(&e))))
}

/// As [`ask`], for a command that can do nothing without that node: says how to start it where
/// nobody listens, and asks again, for `patience`, while the node says that something is in use.
pub fn demand(
    config: &Config,
    node: &Node,
    limit: Duration,
    request: &Request,
    patience: Duration,
) -> Result<Value, Failure> {
    let end = Instant::now() + patience;
    let mut said = false;
    loop {
        let mut asked = Asked::for_request(config, node, limit, request)?;
        let e = match asked.ask(request) {
            Ok(v) => return Ok(v),
            Err(e) => e,
        };
        let text = format!("{}: {}{}", asked.who(), plain(&e), advice(&node.name, &e));
        if !(is_answer(&e) && e.errno() == libc::EBUSY) || Instant::now() >= end {
            return Err(Failure::failed(text));
        }
        if !std::mem::replace(&mut said, true) {
            say_on_stderr(&format!("{text}. It is tried again for {patience:?}"));
        }
        std::thread::sleep(AGAIN);
    }
}

/// What to do about node `name`, if nobody listens there. One that is slow may be at work.
fn advice(name: &str, e: &mojim::Error) -> String {
    match e {
        mojim::Error::Io { errno, .. } if *errno == libc::ECONNREFUSED => {
            format!(". Start `mojim node --name {name}` there, then try again")
        }
        _ => String::new(),
    }
}

/// Whether the error is a node's answer; otherwise there was none.
pub fn is_answer(e: &mojim::Error) -> bool {
    matches!(e, mojim::Error::Answered { .. } | mojim::Error::Protocol(_))
}

/// An error without the words that the client puts before a node's own.
pub fn plain(e: &mojim::Error) -> String {
    match e {
        mojim::Error::Answered { text, .. } => shown(text).into_owned(),
        e => e.to_string(),
    }
}

/// Reads and checks the configuration. Commands that are advised name this file from now on.
pub fn load(path: &Path) -> Result<Config, Failure> {
    typed::given(path);
    Ok(mojim_linux::trust::load(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A promotion of a node that was not there ended with "Connection refused" alone (a new
    /// user).
    #[test]
    fn who_does_not_run_is_to_be_started() {
        let of = |code| {
            let e = std::io::Error::from_raw_os_error(code);
            advice("b", &mojim::Error::io("link to 127.0.0.1:1", &e))
        };
        assert!(of(libc::ECONNREFUSED).contains("Start `mojim node --name b` there"));
        assert_eq!(of(libc::EPIPE), "");
    }
}
