//! `mojim node`: one node in the foreground, until a signal ends it.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_config::{AUTOMATIC_VOTERS, Config};
use mojim_env::{Address, Env};
use mojim_format::certificate::Subject;
use mojim_linux::Os;
use mojim_replica::register::{RemoteRegister, ViewRegister};
use mojim_views::{Options, RegisterVoter};

use crate::ask::load;
use crate::failure::{Done, Failure, say_on_stderr};
use crate::signals;

/// Between two tries to start again.
const AGAIN: Duration = Duration::from_secs(1);

/// How long the voters may take over one answer.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);

/// Run a node in the foreground: it keeps copies of volumes and answers questions.
///
/// Prints one line on standard output when it is ready (its name and addresses) and events on
/// standard error. SIGTERM, SIGINT or SIGHUP stop it cleanly; SIGUSR1 has it read its configuration
/// again, as `mojim replace` does.
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

/// A node, with one configuration.
struct Running {
    name: String,
    node: Arc<mojim_node::Node>,
    voter: Option<Arc<RegisterVoter>>,
}

impl Running {
    fn line(&self, json: bool) -> String {
        let addresses = self.node.addresses();
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        match json {
            true => serde_json::json!({ "node": self.name, "ready": true, "addresses": addresses })
                .to_string(),
            false => format!("node {} is ready at {}", self.name, addresses.join(" and ")),
        }
    }

    fn stop(&self) {
        self.node.stop();
        if let Some(v) = &self.voter {
            v.stop();
        }
    }
}

/// A node keeps files, logs and links of many volumes open: it takes all the
/// descriptors that it may have.
fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where that is refused, those that it has must do.
    let _ = setrlimit(Resource::Nofile, limit);
}

impl Node {
    /// Runs it.
    pub fn run(self) -> Done {
        let mut config = load(&self.config)?;
        signals::block()?;
        raise_descriptors();
        // What a request has checked.
        let asked: Arc<Mutex<Option<Config>>> = Arc::default();
        let mut running = self.start(&config, &asked)?;
        let line = running.line(self.json);
        // Whoever started it may have closed the pipe: it serves all the same.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        drop(out);
        loop {
            let signal = signals::wait()?;
            if signal != signals::RELOAD {
                say_on_stderr(&format!("node {}: signal {signal}, stopping", self.name));
                running.stop();
                return Ok(0);
            }
            let new = asked.lock().unwrap_or_else(|e| e.into_inner()).take();
            let new = match new.map_or_else(|| load(&self.config), Ok) {
                Ok(new) if new == config => continue,
                Ok(new) => new,
                // What holds goes on holding.
                Err(e) => {
                    say_on_stderr(&format!("node {}: {}", self.name, e.text));
                    continue;
                }
            };
            say_on_stderr(&format!(
                "node {}: the configuration has changed",
                self.name
            ));
            running.stop();
            // With the new one if that is possible; without either it would be of
            // no use to anybody, so it tries both until one is.
            let mut said = String::new();
            running = loop {
                let why = match self.start(&new, &asked) {
                    Ok(r) => {
                        config = new;
                        break r;
                    }
                    Err(e) => e.text,
                };
                if let Ok(r) = self.start(&config, &asked) {
                    say_on_stderr(&format!(
                        "node {}: {why}; it goes on with the configuration that it had",
                        self.name
                    ));
                    break r;
                }
                if why != said {
                    say_on_stderr(&format!("node {}: {why}; it tries again", self.name));
                    said = why;
                }
                if signals::came_within(AGAIN)? {
                    say_on_stderr(&format!("node {}: stopping", self.name));
                    return Ok(1);
                }
            };
            say_on_stderr(&running.line(false));
        }
    }

    fn start(
        &self,
        config: &Config,
        asked: &Arc<Mutex<Option<Config>>>,
    ) -> Result<Running, Failure> {
        config.node(&self.name)?;
        for w in config.warnings() {
            say_on_stderr(&format!("warning: {w}"));
        }
        let os = Os::of(config, &Subject::Node(self.name.clone()))?;
        let env: Arc<dyn Env> = Arc::new(os);
        let voter = self.register(&env, config)?;
        let views: Option<Arc<dyn ViewRegister>> = match (&voter, config.voters().len()) {
            (Some(v), _) => Some(v.clone()),
            (None, n) if n >= AUTOMATIC_VOTERS => {
                let voters = config.voters();
                let daemons = voters.iter().map(|n| Address::Tcp(n.address));
                Some(Arc::new(RemoteRegister::new(
                    &env,
                    daemons.collect(),
                    &config.cluster,
                    VIEW_TIMEOUT,
                )))
            }
            _ => None,
        };
        let node = mojim_node::Node::start(config, &self.name, views, say_on_stderr);
        let node = match (node, &voter) {
            (Ok(n), _) => n,
            (Err(e), v) => {
                // Its directory is free for the next try.
                v.iter().for_each(|v| v.stop());
                return Err(e.into());
            }
        };
        let asked = asked.clone();
        node.reload_by(move |new| {
            *asked.lock().unwrap_or_else(|e| e.into_inner()) = Some(new);
            signals::send(signals::RELOAD);
        });
        Ok(Running {
            name: self.name.clone(),
            node,
            voter,
        })
    }

    /// This node's part in the register of views, if it votes.
    fn register(
        &self,
        env: &Arc<dyn Env>,
        config: &Config,
    ) -> Result<Option<Arc<RegisterVoter>>, Failure> {
        let voters = config.voters();
        if voters.len() < AUTOMATIC_VOTERS || voters.iter().all(|n| n.name != self.name) {
            return Ok(None);
        }
        let me = config.node(&self.name)?;
        let options = Options {
            cluster: config.cluster.clone(),
            me: self.name.clone(),
            voters: voters
                .iter()
                .map(|n| (n.name.clone(), Address::Tcp(n.address)))
                .collect(),
            replaced: voters
                .iter()
                .filter(|n| !n.replaces.is_empty())
                .map(|n| (n.name.clone(), n.replaces.clone()))
                .collect(),
            volumes: config.volumes.keys().cloned().collect(),
            dir: me.directory.join(".mojim").join("views"),
            again: false,
            heartbeat: config.heartbeat,
            // A leader that is gone is replaced well before a node counts as failed.
            election: (config.failure_limit / 3, config.failure_limit / 2),
            timeout: VIEW_TIMEOUT,
        };
        Ok(Some(RegisterVoter::start(
            env.clone(),
            options,
            say_on_stderr,
        )?))
    }
}
