//! A voter that takes part again after its disk has failed.
//!
//! Owns a [`RaftViews`] and the thread that looks after it. Nothing of a run that
//! failed is used: its part is stopped, and its directory opened anew, as by the next
//! start of the daemon, which writes everything durably before it counts.
//!
//! Invariants:
//! - Two parts never have the directory at one time: the files' lock is the first's
//!   until it has ended.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_env::event::Event;
use mojim_env::locks::lock;
use mojim_env::threads::block_signals;
use mojim_env::{Context, Env, Error, Result};
use mojim_protocol::view::Register;
use mojim_replica::register::ViewRegister;
use mojim_replica::request::{RaftCall, Retired};
use serde_json::Value;
use tracing::{dispatcher, error, info};

use crate::views::{Options, RaftViews};

/// How often the thread checks whether the disk has failed, or works again.
const LOOK: Duration = Duration::from_secs(1);

/// This node's part in the register of views, for as long as its daemon runs.
/// [`RegisterVoter::stop`] ends it.
pub struct RegisterVoter {
    env: Arc<dyn Env>,
    options: Options,
    /// This node's part, or why there is none now.
    part: Mutex<std::result::Result<Arc<RaftViews>, String>>,
    over: AtomicBool,
    news: Event,
    /// Whether the thread has ended; a disk that hangs may keep it from ending.
    ended: AtomicBool,
    end: Event,
}

impl RegisterVoter {
    /// Starts as [`RaftViews::start`] does, with its errors. Later failures, and their
    /// ends, are told by `tracing` to the subscriber that the caller's thread has.
    pub fn start(env: Arc<dyn Env>, options: Options) -> Result<Arc<RegisterVoter>> {
        let part = RaftViews::start(env.clone(), options.clone())?;
        let voter = Arc::new(RegisterVoter {
            env,
            options,
            part: Mutex::new(Ok(part)),
            over: AtomicBool::new(false),
            news: Event::default(),
            ended: AtomicBool::new(false),
            end: Event::default(),
        });
        let v = voter.clone();
        let lines = dispatcher::get_default(Clone::clone);
        let started = std::thread::Builder::new()
            .name("mojim-voter".into())
            .spawn(move || {
                block_signals();
                dispatcher::with_default(&lines, || v.look_after());
                v.ended.store(true, SeqCst);
                v.end.notify();
            })
            .context(|| "starting a thread".into());
        if let Err(e) = started {
            voter.stop_part();
            return Err(e);
        }
        Ok(voter)
    }

    /// Ends this node's part; see [`RaftViews::stop`]. Waits about twice as long at most.
    pub fn stop(&self) {
        self.over.store(true, SeqCst);
        self.news.notify();
        self.end
            .wait_unless(|| self.ended.load(SeqCst), self.options.timeout);
        self.stop_part();
    }

    fn stop_part(&self) {
        let part = lock(&self.part).clone();
        if let Ok(part) = part {
            part.stop();
        }
    }

    pub(crate) fn part(&self) -> Result<Arc<RaftViews>> {
        lock(&self.part).clone().map_err(Error::Poisoned)
    }

    fn look_after(&self) {
        let me = &self.options.me;
        loop {
            self.news.wait_unless(|| self.over.load(SeqCst), LOOK);
            if self.over.load(SeqCst) {
                return;
            }
            match self.part() {
                Ok(part) => {
                    let Some(Error::Poisoned(why)) = part.failed() else {
                        continue;
                    };
                    // Before it is said: a caller who knows of it finds no part that is being
                    // stopped.
                    *lock(&self.part) = Err(why.clone());
                    error!(
                        node = %me, code = "votes_lost",
                        "this node does not vote on views: {why}. It is tried again every second"
                    );
                    part.stop();
                }
                // Its votes and entries must be there: a voter that comes back without
                // them would vote a second time, which only the operator may decide.
                Err(_) => match RaftViews::start(
                    self.env.clone(),
                    Options {
                        again: true,
                        ..self.options.clone()
                    },
                ) {
                    Ok(part) => {
                        *lock(&self.part) = Ok(part);
                        // `stop` may have run meanwhile, without seeing this part.
                        if self.over.load(SeqCst) {
                            return self.stop_part();
                        }
                        info!(node = %me, code = "votes_back", "this node votes on views again");
                    }
                    Err(e) => {
                        let why = e.to_string();
                        let before = std::mem::replace(&mut *lock(&self.part), Err(why.clone()));
                        if before.err().as_ref() != Some(&why) {
                            error!(node = %me, code = "votes_lost", "this node does not vote on views: {why}");
                        }
                    }
                },
            }
        }
    }
}

impl ViewRegister for RegisterVoter {
    fn read(&self, volume: &str) -> Result<Register> {
        self.part()?.read(volume)
    }

    fn swap(&self, volume: &str, new: &Register) -> Result<bool> {
        self.part()?.swap(volume, new)
    }

    fn voters(&self) -> Result<Vec<String>> {
        self.part()?.voters()
    }

    fn retire(&self, voter: &str) -> Result<Retired> {
        self.part()?.retire(voter)
    }

    fn hear(&self, call: RaftCall) -> Result<Value> {
        self.part()?.hear(call)
    }
}
