//! The register of views, as the engine sees it: read it, swap it.
//!
//! Owns:
//!
//! - the interface
//! - the way to it from outside of the voters: a program asks the node daemon beside it, a node
//!   that does not vote asks one that does
//! - the thread on which a primary's calls to it wait
//!
//! A crate above keeps the register, in a log that the voters replicate. The simulator has one of
//! its own.
//!
//! Invariants:
//!
//! - A swap that was reported as done stays done, whatever fails.
//! - No link waits for the register.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_protocol::view::Register;
use serde_json::Value;

use crate::client::Client;
use crate::request::{RaftCall, Request, Retired};
use mojim_env::{Address, Context, Env, Error, Result};

/// How long a daemon may take to answer for the voters.
pub const VIEW_TIMEOUT: Duration = Duration::from_secs(3);

/// Where views lie.
pub trait ViewRegister: Send + Sync {
    /// The register of a volume, not older than this call; the default one if it was
    /// never written. Fails with `Error::Timeout` if no majority of voters can be
    /// reached. Blocks for a bounded time.
    fn read(&self, volume: &str) -> Result<Register>;

    /// Puts `new` in the place of the register with the version before `new.version`.
    /// False if the present version is another one. After an error the outcome is not
    /// known: the caller reads again, and a register equal to `new` is this one.
    fn swap(&self, volume: &str, new: &Register) -> Result<bool>;

    /// The voters, as far as is known here.
    fn voters(&self) -> Result<Vec<String>> {
        Err(Error::Invalid("it is not known here who votes".into()))
    }

    /// Has a majority of the voters give up the directory with which `voter` was admitted:
    /// it is admitted anew with the one that it has. Not if it runs with that one.
    fn retire(&self, voter: &str) -> Result<Retired> {
        Err(Error::Invalid(format!(
            "the voters are not asked about node {voter} here: ask a voter"
        )))
    }

    /// Answers another voter's daemon.
    fn hear(&self, call: RaftCall) -> Result<Value>;
}

/// A call to be made on the register.
pub type RegisterCall = Box<dyn FnOnce(&dyn ViewRegister) + Send>;

/// Runs calls to the register while their sender does something else.
pub trait RegisterCalls: Send {
    /// Has `what` run. A call that cannot be run any more is dropped.
    fn send(&mut self, what: RegisterCall);
}

/// Runs register calls on a thread of its own, which ends with its owner: at once, or
/// when the register has answered or is given up (`VIEW_TIMEOUT`).
pub struct RegisterWorker(Sender<RegisterCall>);

impl RegisterWorker {
    /// Starts the thread. `back` is called after each call.
    pub fn start(
        views: Arc<dyn ViewRegister>,
        back: impl Fn() + Send + 'static,
    ) -> Result<RegisterWorker> {
        let (send, errands) = channel::<RegisterCall>();
        let _quiet = mojim_env::threads::SignalsWait::begin_but_faults();
        std::thread::Builder::new()
            .name("mojim-views".into())
            .spawn(move || {
                while let Ok(what) = errands.recv() {
                    what(&*views);
                    back();
                }
            })
            .context(|| "starting a thread".into())?;
        Ok(RegisterWorker(send))
    }
}

impl RegisterCalls for RegisterWorker {
    fn send(&mut self, what: RegisterCall) {
        // The thread ends after this sender.
        let _ = self.0.send(what);
    }
}

/// The register through a daemon.
pub struct RemoteRegister {
    env: Arc<dyn Env>,
    daemons: Vec<Address>,
    cluster: String,
    timeout: Duration,
    /// What to do where no daemon can be reached, for people.
    advice: Option<String>,
    /// The link in use, and which daemon is tried first.
    client: Mutex<(Option<Client>, usize)>,
}

impl RemoteRegister {
    /// Asks the first of `daemons` that can be reached; each answer is awaited
    /// for at most `timeout`.
    pub fn new(
        env: &Arc<dyn Env>,
        daemons: Vec<Address>,
        cluster: &str,
        timeout: Duration,
    ) -> RemoteRegister {
        assert!(!daemons.is_empty());
        RemoteRegister {
            env: env.clone(),
            daemons,
            cluster: cluster.to_owned(),
            timeout,
            advice: None,
            client: Mutex::new((None, 0)),
        }
    }

    /// Adds to the error of a link that cannot be made what to do.
    pub fn advising(self, advice: String) -> RemoteRegister {
        RemoteRegister {
            advice: Some(advice),
            ..self
        }
    }

    /// `again`: whether the question may be asked twice.
    fn ask(&self, question: &Request, again: bool) -> Result<Value> {
        let mut slot = lock(&self.client);
        let (link, first) = &mut *slot;
        let kept = link.take();
        let was_kept = kept.is_some();
        let mut client = match kept {
            Some(c) => c,
            None => self.connect(first)?,
        };
        let mut answer = client.ask(question);
        // The daemon at the other end of a kept link may be long gone.
        let heard = match &answer {
            Ok(_) | Err(Error::Timeout(_) | Error::Answered { .. }) => true,
            Err(_) => false,
        };
        if again && was_kept && !heard {
            client = self.connect(first)?;
            answer = client.ask(question);
        }
        // A question that was sent is not asked again elsewhere: it may have
        // been heard.
        match answer {
            Ok(answer) => {
                *link = Some(client);
                Ok(answer)
            }
            Err(e) => {
                *first = (*first + 1) % self.daemons.len();
                Err(e)
            }
        }
    }

    fn connect(&self, first: &mut usize) -> Result<Client> {
        let mut last = None;
        for _ in 0..self.daemons.len() {
            match Client::connect(
                &self.env,
                &self.daemons[*first],
                &self.cluster,
                self.timeout,
            ) {
                Ok(c) => return Ok(c),
                Err(e) => last = Some(e),
            }
            *first = (*first + 1) % self.daemons.len();
        }
        Err(match (last.expect("there is at least one"), &self.advice) {
            (Error::Io { what, errno, error }, Some(advice)) => Error::Io {
                what,
                errno,
                error: format!("{error}. {advice}"),
            },
            (e, _) => e,
        })
    }
}

impl ViewRegister for RemoteRegister {
    fn read(&self, volume: &str) -> Result<Register> {
        let volume = volume.to_owned();
        let answer = self.ask(&Request::ViewRead { volume }, true)?;
        serde_json::from_value(answer).map_err(|e| Error::Protocol(format!("not a register: {e}")))
    }

    fn swap(&self, volume: &str, new: &Register) -> Result<bool> {
        let (volume, new) = (volume.to_owned(), new.clone());
        self.ask(&Request::ViewSwap { volume, new }, false)?
            .as_bool()
            .ok_or_else(|| Error::Protocol("a swap is done or not".into()))
    }

    fn hear(&self, _: RaftCall) -> Result<Value> {
        Err(Error::Invalid("a program does not vote".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_linux::Os;

    /// "Connection refused", at a path, was all that a program heard whose node's daemon did
    /// not run (a new user).
    #[test]
    fn who_finds_no_daemon_is_told_what_to_start() {
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let nowhere = vec![Address::Unix("/nonexistent/node.sock".into())];
        let register = RemoteRegister::new(&env, nowhere, "c", VIEW_TIMEOUT);
        let plain = register.read("v").unwrap_err();
        let advised = register.advising("Start it".into()).read("v").unwrap_err();
        assert_eq!(advised.to_string(), format!("{plain}. Start it"));
        assert_eq!(advised.errno(), libc::ENOENT);
    }
}
