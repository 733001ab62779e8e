//! What the voters agree on, as types: the swap that an entry of the log
//! carries, the voter, and the names of openraft's types with these in them.

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

/// A voter. Where it listens is each node's configuration, not the log's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Voter {
    /// The node's name.
    pub name: String,
}

openraft::declare_raft_types!(
    /// The log's entries are swaps, and the answer is whether one was done.
    pub(crate) TypeConfig:
        D = Swap,
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

/// A voter's number: the checksum of its name, so that it stays the same when
/// others come and go. [`crate::RaftViews::start`] refuses two alike.
pub(crate) fn number(name: &str) -> u64 {
    mojim_format::crc32c(name.as_bytes()).into()
}

/// Compare and swap. False, and nothing changed, if `new` does not follow the
/// present register.
pub(crate) fn swap(registers: &mut Registers, s: Swap) -> bool {
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
