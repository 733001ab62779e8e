//! The types of what the voters agree on:
//!
//! - the change that an entry of the log carries: the swap of a register, or which directory a
//!   voter's name stands for
//! - the voter
//! - the names of openraft's types with these in them

use std::collections::BTreeMap;
use std::io::Cursor;

use mojim_protocol::view::Register;
use serde::{Deserialize, Serialize};

/// Replaces the volume's register, which must have the version before, by `new`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Swap {
    /// The volume.
    pub volume: String,
    /// Its register from then on.
    pub new: Register,
}

/// What an entry of the log changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RegisterCommand {
    /// A volume's register.
    Swap(Swap),
    /// From now on the voters with these names are those with these directories, unless a
    /// name stands for another one, or that directory was retired.
    Admit(BTreeMap<String, u64>),
    /// The voter's directory with this incarnation is lost: the name stands for none.
    Retire {
        /// The voter's name.
        voter: String,
        /// What its name stood for.
        incarnation: u64,
    },
}

/// Which directory a voter's name stands for. A directory's incarnation is a random number
/// that is made with it, so a voter that lost its directory is another one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Life {
    /// The incarnation that votes under the name.
    pub present: Option<u64>,
    /// Those that did, and never do again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<u64>,
}

/// The voters' incarnations, as the log says, its entries that are not committed included:
/// as Raft's set of voters, they count from the moment at which they are in the log. Empty:
/// no voter was admitted yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lives(BTreeMap<String, Life>);

impl Lives {
    /// Whether no voter was admitted yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The incarnation that votes under this name.
    pub fn present(&self, voter: &str) -> Option<u64> {
        self.0.get(voter)?.present
    }

    /// Whether this one does not vote under this name: another does, or it was retired.
    pub fn excludes(&self, voter: &str, incarnation: u64) -> bool {
        self.0.get(voter).is_some_and(|l| {
            l.present.is_some_and(|p| p != incarnation) || l.retired.contains(&incarnation)
        })
    }

    /// Whether this one voted under this name, and never does again.
    pub fn is_retired(&self, voter: &str, incarnation: u64) -> bool {
        let life = self.0.get(voter);
        life.is_some_and(|l| l.retired.contains(&incarnation))
    }

    /// Whether these say the same of this name as `other`.
    pub fn agree_on(&self, voter: &str, other: &Lives) -> bool {
        let life = |l: &Lives| l.0.get(voter).cloned().unwrap_or_default();
        life(self) == life(other)
    }

    /// All that vote.
    pub fn all(&self) -> BTreeMap<String, u64> {
        let all = self.0.iter();
        all.filter_map(|(n, l)| Some((n.clone(), l.present?)))
            .collect()
    }

    /// As after an entry with this change. False if it changes nothing here.
    pub fn change(&mut self, c: &RegisterCommand) -> bool {
        match c {
            RegisterCommand::Swap(_) => false,
            RegisterCommand::Admit(all) => {
                let mut done = false;
                for (voter, incarnation) in all {
                    let life = self.0.entry(voter.clone()).or_default();
                    if life.present.is_none() && !life.retired.contains(incarnation) {
                        life.present = Some(*incarnation);
                        done = true;
                    }
                }
                done
            }
            RegisterCommand::Retire { voter, incarnation } => match self.0.get_mut(voter) {
                Some(life) if life.present == Some(*incarnation) => {
                    life.present = None;
                    life.retired.push(*incarnation);
                    true
                }
                _ => false,
            },
        }
    }
}

/// What others may count on of a voter, as its directory says: whom it voted for, or follows,
/// and how many entries up to the last one of that leader it has. Both only grow, in this
/// order, also where the log is cut: a leader's own entries are never cut off while a voter
/// follows it. A directory that says less than was counted on is one of earlier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Promised {
    pub term: u64,
    pub node: u64,
    /// 0: none of that leader.
    pub entries: u64,
}

impl Promised {
    /// With this vote, where this is the last entry of a log.
    pub fn new(vote: &Vote, last: Option<LogId>) -> Promised {
        let leader = vote.leader_id;
        let last = last.filter(|l| l.leader_id == leader);
        Promised {
            term: leader.term,
            node: leader.node_id,
            entries: last.map_or(0, |l| l.index.saturating_add(1)),
        }
    }
}

/// A voter. Where it listens is each node's configuration, not the log's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Voter {
    /// The node's name.
    pub name: String,
}

openraft::declare_raft_types!(
    /// The answer to a change is whether it was done.
    pub(crate) TypeConfig:
        D = RegisterCommand,
        R = bool,
        NodeId = u64,
        Node = Voter,
        SnapshotData = Cursor<Vec<u8>>,
);

pub(crate) type Raft = openraft::Raft<TypeConfig>;
pub(crate) type Entry = openraft::Entry<TypeConfig>;
pub(crate) type LogId = openraft::LogId<u64>;
pub(crate) type Vote = openraft::Vote<u64>;
pub(crate) type Membership = openraft::StoredMembership<u64, Voter>;
pub(crate) type SnapshotMeta = openraft::SnapshotMeta<u64, Voter>;
pub(crate) type StorageError = openraft::StorageError<u64>;

/// The registers of all volumes that were ever written.
pub(crate) type Registers = BTreeMap<String, Register>;

/// All that the entries of a log have made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agreed {
    pub registers: Registers,
    pub lives: Lives,
}

impl Agreed {
    /// As after an entry with this change. False if it changes nothing.
    pub fn change(&mut self, c: RegisterCommand) -> bool {
        match c {
            RegisterCommand::Swap(s) => swap(&mut self.registers, s),
            c => self.lives.change(&c),
        }
    }
}

/// A voter's number: the checksum of its name, so that it stays the same when
/// others come and go. [`crate::RaftViews::start`] refuses two alike.
pub(crate) fn number(name: &str) -> u64 {
    mojim_format::crc32c(name.as_bytes()).into()
}

/// Compare and swap. False, and nothing changed, if `new` does not follow the
/// present register.
fn swap(registers: &mut Registers, s: Swap) -> bool {
    let version = registers.get(&s.volume).map_or(0, |r| r.version);
    let done = version.checked_add(1) == Some(s.new.version);
    if done {
        registers.insert(s.volume, s.new);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name stands for one directory at a time, and never again for one that was lost.
    #[test]
    fn a_name_stands_for_one_directory() {
        let mut lives = Lives::default();
        let admit = |n: u64| RegisterCommand::Admit([("w".to_owned(), n)].into());
        let retire = |incarnation| RegisterCommand::Retire {
            voter: "w".into(),
            incarnation,
        };
        assert!(!lives.excludes("w", 1) && lives.change(&admit(1)));
        assert!(!lives.change(&admit(2)) && !lives.change(&retire(2)));
        assert!(lives.excludes("w", 2) && !lives.excludes("w", 1));
        assert!(lives.change(&retire(1)) && !lives.change(&retire(1)));
        assert_eq!(lives.present("w"), None);
        assert!(lives.excludes("w", 1) && !lives.excludes("w", 2));
        assert!(!lives.change(&admit(1)) && lives.change(&admit(2)));
        assert_eq!(lives.all(), [("w".to_owned(), 2)].into());
    }

    #[test]
    fn a_promise_grows_with_votes_and_with_entries_of_the_leader() {
        use openraft::LeaderId;
        let id = |term, index| LogId::new(LeaderId::new(term, 7), index);
        let all = [
            Promised::default(),
            Promised::new(&Vote::new(1, 7), None),
            Promised::new(&Vote::new_committed(1, 7), Some(id(1, 5))),
            // The log is cut, by a leader of which it has nothing yet.
            Promised::new(&Vote::new(2, 3), Some(id(1, 5))),
            Promised::new(&Vote::new(2, 7), Some(id(1, 2))),
            Promised::new(&Vote::new(2, 7), Some(id(2, 3))),
        ];
        assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");
    }

    #[test]
    fn a_swap_needs_the_version_before() {
        let mut all = Registers::new();
        let mut put = |version, epoch| {
            let new = Register {
                version,
                epoch,
                ..Register::default()
            };
            let volume = "v".to_owned();
            swap(&mut all, Swap { volume, new })
        };
        assert!(!put(0, 9) && !put(2, 9));
        assert!(put(1, 1));
        assert!(!put(1, 9) && !put(3, 9) && !put(u64::MAX, 9));
        assert!(put(2, 2));
        assert_eq!((all["v"].version, all["v"].epoch), (2, 2));
    }
}
