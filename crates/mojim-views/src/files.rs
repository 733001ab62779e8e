//! A voter's files without the voter: for the simulator, which takes power away
//! from them.
//!
//! Owns nothing of its own: [`Files`] is the voters' `Disk`, with entries and ids as
//! numbers, so that callers need none of openraft's types.

use std::path::Path;
use std::sync::Arc;

use mojim_env::Env;
use mojim_env::Result;
use mojim_protocol::view::Register;
use openraft::{EntryPayload, LeaderId};

use crate::disk::{Disk, Kept, Saved};
use crate::types::{
    Agreed, Entry, LogId, RegisterCommand, Registers, SnapshotMeta, Swap, Vote, number,
};

/// An entry's id: term, leader, index.
pub type Id = (u64, u64, u64);

/// What a voter has promised, as it would act upon it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VoterPromises {
    /// Term, candidate, whether it leads.
    pub vote: Option<(u64, u64, bool)>,
    /// The last entry that was dropped at the beginning.
    pub purged: Option<Id>,
    /// The log, each entry with the number that it carries.
    pub entries: Vec<(Id, u64)>,
    /// The last entry in the snapshot, and the number that is in it.
    pub snapshot: Option<(Id, u64)>,
}

/// The files of one voter.
pub struct Files(Disk);

fn id((term, node, index): Id) -> LogId {
    LogId::new(LeaderId::new(term, node), index)
}

fn numbers(l: LogId) -> Id {
    (l.leader_id.term, l.leader_id.node_id, l.index)
}

fn register(n: u64) -> Register {
    Register {
        version: n,
        ..Register::default()
    }
}

const VOLUME: &str = "v";

impl Files {
    /// The voter's own number.
    pub fn number(node: &str) -> u64 {
        number(node)
    }

    /// Opens a voter's directory, as its daemon does at its start.
    pub fn open(env: Arc<dyn Env>, dir: &Path, node: &str) -> Result<Files> {
        Disk::open(env, dir, "c", node).map(Files)
    }

    /// The directory's incarnation.
    pub fn incarnation(&self) -> u64 {
        self.0.incarnation()
    }

    /// What the voter may act upon.
    pub fn held(&self) -> Result<VoterPromises> {
        let entry = |e: &Entry| {
            let n = match &e.payload {
                EntryPayload::Normal(RegisterCommand::Swap(s)) => s.new.version,
                _ => 0,
            };
            (numbers(e.log_id), n)
        };
        let saved = |s: &Saved| {
            let last = s.meta.last_log_id.map(numbers)?;
            Some((
                last,
                s.agreed.registers.get(VOLUME).map_or(0, |r| r.version),
            ))
        };
        self.0.kept(|k: &Kept| VoterPromises {
            vote: k
                .vote
                .map(|v| (v.leader_id.term, v.leader_id.node_id, v.committed)),
            purged: k.purged.map(numbers),
            entries: k.entries.values().map(entry).collect(),
            snapshot: k.snapshot.as_ref().and_then(saved),
        })
    }

    /// Saves a vote.
    pub fn vote(&self, (term, node, leads): (u64, u64, bool)) -> Result<()> {
        self.0.vote(match leads {
            true => Vote::new_committed(term, node),
            false => Vote::new(term, node),
        })
    }

    /// Appends entries, each with a number that it carries.
    pub fn append(&self, entries: &[(Id, u64)]) -> Result<()> {
        let entry = |(at, n): &(Id, u64)| Entry {
            log_id: id(*at),
            payload: EntryPayload::Normal(RegisterCommand::Swap(Swap {
                volume: VOLUME.into(),
                new: register(*n),
            })),
        };
        self.0.append(entries.iter().map(entry).collect())
    }

    /// Drops the entries from this index on.
    pub fn truncate(&self, from: u64) -> Result<()> {
        self.0.truncate(from)
    }

    /// Drops the entries up to this one.
    pub fn purge(&self, upto: Id) -> Result<()> {
        self.0.purge(id(upto))
    }

    /// Saves a snapshot up to an entry, with a number in it.
    pub fn snapshot(&self, last: Id, n: u64) -> Result<()> {
        self.0.snapshot(Saved {
            meta: SnapshotMeta {
                last_log_id: Some(id(last)),
                ..SnapshotMeta::default()
            },
            agreed: Agreed {
                registers: Registers::from([(VOLUME.into(), register(n))]),
                ..Agreed::default()
            },
        })
    }
}
