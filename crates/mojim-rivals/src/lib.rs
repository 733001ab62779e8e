//! The rival schemes of Mojim's Table 1 (ASPLOS 2015, 3.3, 6.2 and 7), for
//! measurement only: nothing here recovers, fails over or checkpoints.
//!
//! The schemes' cost is compared with the cost of Mojim's modes. So everything else is Mojim's:
//!
//! - the records and frames of `mojim-format`
//! - the logs and links of the engine ([`mojim_store::log`], [`mojim_replica::link`])
//! - how it waits ([`mojim_replica::spinner`])
//! - the work of a mirror's lane on a record
//!
//! That work is: receive, verify checksum, epoch and order, append to its log, make the record
//! persistent if its medium persists, acknowledge.
//!
//! The rivals do nothing else that Mojim does: no mapped files, no applying to the data area,
//! no heartbeats, no back-pressure. No scheme takes a step that it could omit. Any doubt is
//! decided in their favour.
//!
//! - [`Scheme`] what is sent to which node, and which nodes answer
//! - [`primary`] the program's end: one sync point at a time
//! - [`replica`] one replica: a process or a thread
//! - [`order`] the first messages between them
//! - [`audit`] whether every replica holds every byte

pub mod audit;
pub mod order;
pub mod primary;
pub mod replica;

use std::sync::Arc;

use mojim_config::MediumKind;
use mojim_env::Env;
use mojim_env::Result;
use mojim_protocol::History;
use mojim_store::log::{Log, LogIdentity, LogSpec, Survival};

/// How one primary's writes reach all replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// E-chain: "propagates data replication from the primary node to the secondary nodes
    /// in a serialized order" (Mojim 6.2). As in its source (van Renesse and Schneider,
    /// OSDI 2004) each replica passes on what is in its log, and the last replica itself
    /// answers the primary: with two replicas, three messages one after the other.
    Chain,
    /// E-broadcast: "similar to E-chain but broadcasts updates to the secondary
    /// nodes" (Mojim 6.2), "and have the primary wait for all" (7).
    Broadcast,
    /// E-writeall: "at least two networking round trips are needed to deliver strong
    /// consistency" (Mojim 7). The first round prepares: the data is in every replica's
    /// log, as a part that does not close its sync point. When all have answered, the
    /// second round commits: an empty part closes the sync point.
    WriteAll,
}

impl Scheme {
    /// All schemes.
    pub const ALL: [Scheme; 3] = [Scheme::Chain, Scheme::Broadcast, Scheme::WriteAll];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Chain => "chain",
            Scheme::Broadcast => "broadcast",
            Scheme::WriteAll => "write-all",
        }
    }

    /// The rounds of one sync point; each needs one record.
    pub fn rounds(self) -> u32 {
        match self {
            Scheme::Chain | Scheme::Broadcast => 1,
            Scheme::WriteAll => 2,
        }
    }
}

/// The only epoch of a run: no node is ever replaced.
const EPOCH: u64 = 1;

fn history() -> History {
    let mut history = History::default();
    history.begin(EPOCH, 1, 0);
    history
}

/// Opens the log of the run of `volume` without changing it.
fn open(env: &Arc<dyn Env>, spec: &LogSpec, volume: u64) -> Result<(Log, Survival)> {
    let align = Log::align_for(&**env, spec)?;
    let known = LogIdentity {
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
