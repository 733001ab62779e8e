//! The rival schemes of Mojim's Table 1 (ASPLOS 2015, 3.3, 6.2 and 7), for
//! measurement only: nothing here recovers, fails over or checkpoints.
//!
//! What the schemes cost is compared with what Mojim's modes cost, so all else
//! is Mojim's: the records and frames of `mojim-format`, the logs and links of
//! the engine ([`mojim_store::log`], [`mojim_replica::link`]), how it waits
//! ([`mojim_replica::spinner`]), and what a mirror's lane does with a record: receive,
//! check sum, epoch and order, append to its log, make that persistent if its
//! medium persists, acknowledge. Whatever Mojim does besides (mapped files,
//! applying to the data area, heartbeats, back-pressure) the rivals do without,
//! and no scheme takes a step that it could do without: what is in doubt is in
//! their favour.
//!
//! - [`Scheme`] what is sent to whom, and who answers;
//! - [`primary`] the program's end: one sync point at a time;
//! - [`replica`] one replica: a process or a thread;
//! - [`order`] the first words between them;
//! - [`audit`] does every replica hold every byte.

pub mod audit;
pub mod order;
pub mod primary;
pub mod replica;

use std::sync::Arc;

use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_env::Result;
use mojim_protocol::History;
use mojim_store::log::{Known, Log, LogSpec, Survival};

/// How one primary's writes reach all replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// E-chain: "propagates data replication from the primary node to the
    /// secondary nodes in a serialized order" (Mojim 6.2). As in its source
    /// (van Renesse and Schneider, OSDI 2004) each replica passes on what is in
    /// its log, and the last one answers the primary itself: three messages
    /// one after the other with two replicas.
    Chain,
    /// E-broadcast: "similar to E-chain but broadcasts updates to the secondary
    /// nodes" (Mojim 6.2), "and have the primary wait for all" (7).
    Broadcast,
    /// E-writeall: "at least two networking round trips are needed to deliver
    /// strong consistency" (Mojim 7). The first prepares: the data is in every
    /// replica's log, as a part that does not close its sync point. When all
    /// have answered, the second commits: an empty part that closes it.
    WriteAll,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Scheme; 3] = [Scheme::Chain, Scheme::Broadcast, Scheme::WriteAll];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Chain => "chain",
            Scheme::Broadcast => "broadcast",
            Scheme::WriteAll => "write-all",
        }
    }

    /// Rounds of one sync point: as many records.
    pub fn rounds(self) -> u32 {
        match self {
            Scheme::Chain | Scheme::Broadcast => 1,
            Scheme::WriteAll => 2,
        }
    }
}

/// The only epoch of a run: nobody is ever replaced.
const EPOCH: u64 = 1;

fn history() -> History {
    let mut history = History::default();
    history.begin(EPOCH, 1, 0);
    history
}

/// Opens the log that belongs to the run of `volume`, as it is.
fn open(env: &Arc<dyn Env>, spec: &LogSpec, volume: u64) -> Result<(Log, Survival)> {
    let align = Log::align_for(&**env, spec)?;
    let known = Known {
        incarnation: volume,
        nonce: 0,
        or: 0,
    };
    let opened = Log::open(env, spec.clone(), align, known, 0, None)?;
    if spec.medium != MediumKind::Disk {
        opened.0.own(known);
    }
    Ok(opened)
}
