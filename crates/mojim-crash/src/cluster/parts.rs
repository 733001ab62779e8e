//! The processes of a cluster: a node's daemon, and the program (`mounted.rs` has the one that
//! works in a mount).
//!
//! Owns how each is started over a machine that may have a fault. The daemon is made as
//! `mojim node` makes it, with its part in the register.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mojim::{MapFlags, Mapping, Volume, gmsync, msync};
use mojim_config::{AUTOMATIC_VOTERS, Config};
use mojim_env::{Address, Env};
use mojim_linux::Os;
use mojim_node as node;
use mojim_replica::register::ViewRegister;
use mojim_views::{Options, RegisterVoter};

use super::program::{PART, changes};
use super::setup::{FILE, Mode};
use crate::Result;
use crate::journal::Journal;
use crate::machine::{Fault, Machine};

/// How long the voters may take for one answer.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);

/// The events of a daemon that are shown: Mojim's own.
pub const OURS: &str = "mojim=info";

/// The machine of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Which boot of the machine.
    pub boot: u8,
    /// Its fault, if it has one.
    pub fault: Option<Fault>,
}

impl Made {
    /// The environment of this machine, for a node with this directory.
    pub fn over(self, os: Os, directory: &Path) -> Arc<dyn Env> {
        Arc::new(Machine {
            os,
            boot: self.boot,
            fault: self.fault,
            data: directory.join("v").join(FILE),
            newest: Arc::default(),
            forced: None,
        })
    }
}

/// A node's daemon.
pub struct Daemon {
    node: Arc<node::Node>,
    voter: Option<Arc<RegisterVoter>>,
}

impl Daemon {
    /// Starts a daemon.
    pub fn start(config: &Config, name: &str, made: Made) -> Result<Daemon> {
        let me = config.node(name)?.directory.clone();
        let env = made.over(Os::new()?, &me);
        let voters = config.voters();
        let votes = voters.len() >= AUTOMATIC_VOTERS && voters.iter().any(|v| v.name == name);
        let voter = match votes {
            false => None,
            true => Some(RegisterVoter::start(
                env,
                Options {
                    cluster: config.cluster.clone(),
                    me: name.to_owned(),
                    voters: voters
                        .iter()
                        .map(|n| (n.name.clone(), Address::Tcp(n.address)))
                        .collect(),
                    replaced: Default::default(),
                    volumes: config.volumes.keys().cloned().collect(),
                    dir: me.join(".mojim").join("views"),
                    again: false,
                    heartbeat: config.heartbeat,
                    election: (config.failure_limit / 3, config.failure_limit / 2),
                    timeout: VIEW_TIMEOUT,
                },
            )?),
        };
        let views = voter.clone().map(|v| -> Arc<dyn ViewRegister> { v });
        let over = move |os| made.over(os, &me);
        match node::Node::start_over(config, name, views, over) {
            Ok(node) => Ok(Daemon { node, voter }),
            Err(e) => {
                voter.iter().for_each(|v| v.stop());
                Err(e.into())
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.node.stop();
        self.voter.iter().for_each(|v| v.stop());
    }
}

/// Runs a daemon until the process is killed.
pub fn run_node(config: &Path, name: &str, made: Made) -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(OURS)
        .with_writer(std::io::stderr)
        .init();
    let daemon = Daemon::start(&Config::load(config)?, name, made)?;
    println!("ready");
    loop {
        std::thread::park();
        // The daemon ends only with the process.
        let _ = &daemon;
    }
}

/// The program's parameters.
pub struct Work {
    /// Its configuration.
    pub config: PathBuf,
    /// The journal of its steps.
    pub journal: PathBuf,
    /// Its node.
    pub name: String,
    /// The machine of that node.
    pub made: Made,
    /// The seed of its steps.
    pub seed: u64,
    /// The number of its threads.
    pub threads: usize,
    /// The steps of each thread.
    pub steps: u64,
}

/// Attaches, makes the steps of all threads, and stays attached until the process is
/// killed.
pub fn run_program(w: &Work) -> Result<()> {
    let config = Config::load(&w.config)?;
    let directory = config.node(&w.name)?.directory.clone();
    let over = |os| w.made.over(os, &directory);
    let volume = Volume::attach_over(&config, &w.name, None, over, |_, _| {})?;
    let flags = MapFlags {
        create: true,
        atomic: true,
        shared: w.seed % 2 == 1,
        ..MapFlags::default()
    };
    let region = volume.map(FILE, w.threads * PART, flags)?;
    let journal = Journal::open(&w.journal)?;
    journal.ready();
    let work = |thread: usize| -> Result<()> {
        for step in 1..=w.steps {
            let region: &Mapping = &region;
            // SAFETY: inside the region, of which this thread alone uses this part.
            let part = unsafe { region.ptr.add(thread * PART) };
            let mut places = vec![(part.cast_const(), 8)];
            // SAFETY: as above; eight bytes of it.
            unsafe { part.copy_from(step.to_le_bytes().as_ptr(), 8) };
            for c in changes(w.seed, thread, step) {
                assert!(c.at + c.bytes.len() <= PART);
                // SAFETY: inside the thread's part.
                let at = unsafe { part.add(c.at) };
                // SAFETY: as above.
                unsafe { at.copy_from(c.bytes.as_ptr(), c.bytes.len()) };
                places.push((at.cast_const(), c.bytes.len()));
            }
            journal.begin(thread, step);
            match step % 3 {
                0 => msync(part, PART)?,
                _ => gmsync(&places)?,
            };
            journal.acknowledge(thread, step);
        }
        Ok(())
    };
    in_threads(w.threads, &work)
}

/// Runs `work` in so many threads, says when all are done, and stays until the process is killed.
pub fn in_threads(threads: usize, work: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
    std::thread::scope(|s| {
        let all: Vec<_> = (0..threads).map(|t| s.spawn(move || work(t))).collect();
        all.into_iter().try_for_each(|t| match t.join() {
            Ok(done) => done,
            Err(e) => std::panic::resume_unwind(e),
        })
    })?;
    println!("done");
    loop {
        std::thread::park();
    }
}

/// A mode by its name.
pub fn mode(name: &str) -> std::result::Result<Mode, String> {
    let all = Mode::ALL.into_iter();
    let found = all.clone().find(|m| m.name() == name);
    found.ok_or_else(|| {
        format!(
            "one of {}",
            all.map(Mode::name).collect::<Vec<_>>().join(", ")
        )
    })
}
