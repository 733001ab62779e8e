//! The register of views, simulated: what a majority of voters would keep.
//!
//! Owns one volume's register, which nodes the voters cannot hear at present, and the three ways
//! in which an answer may be missing:
//!
//! - Nothing was done.
//! - It was done and the answer was lost.
//! - It is done later.
//!
//! A swap is atomic. Agreement among the voters is the business of the consensus library, not of
//! this module. Owns also a primary's calls to the register, which are run while the primary goes
//! on.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use mojim_env::Error;
use mojim_env::Result;
use mojim_env::locks::lock;
use mojim_protocol::view::Register;
use mojim_replica::register::{RegisterCall, RegisterCalls, ViewRegister};
use serde_json::Value;

use crate::nodes::{NAMES, NODES};
use crate::rng::Rng;
use crate::world::{SimEnv, World};

/// The register and its faults.
pub struct SimRegister {
    /// Its present value.
    pub now: Register,
    /// Nodes that reach no majority.
    pub cut: [bool; NODES],
    /// Chance per 1,000 that an answer is lost.
    pub lost: u32,
    rng: Rng,
    /// Swaps that are still on their way, though their callers got no answer.
    late: Vec<Register>,
    /// The number of swaps done.
    pub swaps: u64,
}

impl SimRegister {
    /// A register that was never written.
    pub fn new(seed: u64) -> SimRegister {
        let mut rng = Rng::new(seed);
        SimRegister {
            now: Register::default(),
            cut: [false; NODES],
            lost: *rng.pick(&[0, 0, 50, 300]),
            rng,
            late: Vec::new(),
            swaps: 0,
        }
    }

    fn swap(&mut self, new: &Register) -> bool {
        let done = new.version == self.now.version + 1;
        if done {
            self.now = new.clone();
            self.swaps += 1;
        }
        done
    }
}

/// A primary's calls to the register. They end with the process that made them.
#[derive(Clone, Default)]
pub struct SimRegisterCalls(Arc<Mutex<VecDeque<RegisterCall>>>);

impl SimRegisterCalls {
    /// Runs the oldest call, if there is one.
    pub fn run(&self, views: &dyn ViewRegister) {
        let next = lock(&self.0).pop_front();
        if let Some(what) = next {
            what(views);
        }
    }
}

impl RegisterCalls for SimRegisterCalls {
    fn send(&mut self, what: RegisterCall) {
        let mut all = lock(&self.0);
        all.push_back(what);
    }
}

/// One node's access to the register.
pub struct SimViews {
    /// Which node.
    pub node: usize,
    /// The register.
    pub register: Arc<Mutex<SimRegister>>,
    /// The node's world: a dead process asks nobody.
    pub world: Arc<SimEnv>,
    /// The whole world, for the trace.
    pub note: World,
}

impl SimViews {
    fn ask(&self) -> Result<MutexGuard<'_, SimRegister>> {
        let mut r = lock(&self.register);
        if !r.late.is_empty() && r.rng.coin() {
            let late = r.late.remove(0);
            let done = r.swap(&late);
            self.note.note(|| format!("--- late {done} view {late:?}"));
        }
        let lost = r.lost;
        if r.cut[self.node] || !self.world.alive() || r.rng.per_mille(lost) {
            return Err(Error::Timeout("no majority of voters answers".into()));
        }
        Ok(r)
    }
}

impl ViewRegister for SimViews {
    fn read(&self, _: &str) -> Result<Register> {
        Ok(self.ask()?.now.clone())
    }

    fn swap(&self, _: &str, new: &Register) -> Result<bool> {
        let mut r = self.ask()?;
        let lost = r.lost;
        if r.rng.per_mille(lost / 2) {
            r.late.push(new.clone());
            return Err(Error::Timeout("nothing was said yet".into()));
        }
        if !r.swap(new) {
            return Ok(false);
        }
        self.note.note(|| format!("--- view {new:?}"));
        if r.rng.per_mille(lost) {
            // What cut the answer off may cut off the mirror, too, which is to be a member.
            if let Some(m) = &new.mirror
                && r.rng.coin()
            {
                self.note.partition(NAMES[self.node], &m.node, false, true);
            }
            return Err(Error::Timeout("the answer was lost".into()));
        }
        Ok(true)
    }

    fn hear(&self, _: mojim_replica::request::RaftCall) -> Result<Value> {
        Err(Error::Unsupported("nobody votes here".into()))
    }
}
