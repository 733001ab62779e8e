//! `mojim node`: one node in the foreground, until a signal ends it.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_config::{AUTOMATIC_VOTERS, Config};
use mojim_env::locks::lock;
use mojim_env::{Address, Env};
use mojim_format::certificate::Subject;
use mojim_linux::Os;
use mojim_replica::register::{RemoteRegister, ViewRegister};
use mojim_views::{Options, RegisterVoter};
use tracing::{error, info, warn};

use crate::ask::load;
use crate::failure::{Done, Failure};
use crate::log::{self, Form};
use crate::signals;

/// Between two tries to start again.
const AGAIN: Duration = Duration::from_secs(1);

/// How long the voters may take over one answer.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);

/// Run the daemon of a node in the foreground. It keeps copies of volumes and answers questions.
///
/// When it is ready, the daemon prints its name and addresses in one line on standard output. It
/// writes events on standard error.
///
/// SIGTERM, SIGINT or SIGHUP stops it cleanly. On SIGUSR1 it reads its configuration again, as
/// for `mojim replace`.
///
/// The variable MOJIM_LOG, or else RUST_LOG, selects the events. It has a level, PART=LEVEL, or
/// several of them with commas between. The levels are off, error, warn, info, debug and trace.
/// The default is "info,openraft=off".
#[derive(clap::Args)]
pub struct Node {
    /// The configuration file. It has the same text on every node.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The name of this node in the file.
    #[arg(long, value_name = "NODE")]
    name: String,
    /// Print the ready line as JSON.
    #[arg(long)]
    json: bool,
    /// The form of events on standard error.
    #[arg(long, value_enum, default_value_t = Form::Text, value_name = "FORM")]
    log: Form,
}

/// A node, with one configuration.
struct Running {
    name: String,
    node: Arc<mojim_node::Node>,
    voter: Option<Arc<RegisterVoter>>,
}

impl Running {
    fn addresses(&self) -> Vec<String> {
        let all = self.node.addresses();
        all.iter().map(ToString::to_string).collect()
    }

    fn line(&self, json: bool) -> String {
        let (name, addresses) = (&self.name, self.addresses());
        match json {
            true => serde_json::json!({ "node": name, "ready": true, "addresses": addresses })
                .to_string(),
            false => format!("node {name} is ready at {}", addresses.join(" and ")),
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
pub fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If that is refused, the present limit must do.
    let _ = setrlimit(Resource::Nofile, limit);
}

impl Node {
    /// Runs it.
    pub fn run(self) -> Done {
        mojim_linux::hide_memory();
        log::install(&self.name, self.log)?;
        let me = &self.name;
        let mut config = load(&self.config)?;
        signals::block()?;
        raise_descriptors();
        // The configuration that a request has checked.
        let asked: Arc<Mutex<Option<Config>>> = Arc::default();
        let mut running = self.start(&config, &asked)?;
        let line = running.line(self.json);
        // The starter may have closed the pipe: the node serves all the same.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        drop(out);
        loop {
            let signal = signals::wait()?;
            if signal != signals::RELOAD {
                info!(node = %me, "signal {signal}, stopping");
                running.stop();
                return Ok(0);
            }
            let new = lock(&asked).take();
            let new = match new.map_or_else(|| load(&self.config), Ok) {
                Ok(new) if new == config => continue,
                Ok(new) => new,
                // The old configuration stays in force.
                Err(e) => {
                    // One event for each mistake in the configuration.
                    e.text.lines().for_each(|why| error!(node = %me, "{why}"));
                    continue;
                }
            };
            info!(node = %me, "the configuration has changed");
            running.stop();
            // Starts with the new configuration if possible, else with the old one. A
            // node without either is useless, so it tries both until one works.
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
                    warn!(node = %me, "{why}; it goes on with the configuration that it had");
                    break r;
                }
                if why != said {
                    error!(node = %me, "{why}; it tries again");
                    said = why;
                }
                if signals::came_within(AGAIN)? {
                    info!(node = %me, "stopping");
                    return Ok(1);
                }
            };
            info!(node = %me, "it is ready at {}", running.addresses().join(" and "));
        }
    }

    fn start(
        &self,
        config: &Config,
        asked: &Arc<Mutex<Option<Config>>>,
    ) -> Result<Running, Failure> {
        let me = config.node(&self.name)?;
        for w in config.warnings() {
            warn!(node = %self.name, "{w}");
        }
        let os = Os::of(config, &Subject::Node(self.name.clone()))?;
        let env: Arc<dyn Env> = Arc::new(os);
        // Before the voter stores its votes there.
        mojim_node::make_directories(config, me, &*env)?;
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
        let node = mojim_node::Node::start(config, &self.name, views);
        let node = match (node, &voter) {
            (Ok(n), _) => n,
            (Err(e), v) => {
                // Frees the voter's directory for the next try.
                v.iter().for_each(|v| v.stop());
                return Err(e.into());
            }
        };
        let asked = asked.clone();
        node.reload_by(move |new| {
            *lock(&asked) = Some(new);
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
        Ok(Some(RegisterVoter::start(env.clone(), options)?))
    }
}
