//! The register of views, kept by the voters among the nodes.
//!
//! It is a register per volume, changed by compare and swap, in a log that a majority of the
//! voters' daemons holds durably. A sync point never comes here.
//!
//! Owns the replication of that register (openraft, on threads of its own) and its files.
//! [`RegisterVoter`] is the whole interface of a daemon. [`RaftViews`] is one run of it,
//! which ends if its disk fails.
//!
//! The modules, from the bottom:
//!
//! - `types`: what the log holds
//! - `disk`: its bytes, on this node's disk (`files` is `disk` for the simulator)
//! - `store`: the log and the registers, as openraft asks for them
//! - `net`, beside `store`: the way to the other voters
//! - `views`
//! - `voter`
//!
//! Invariants:
//! - Nothing is told to another voter or to a caller before it is durable here. That
//!   includes what was found at the start: it is written anew before it is used.
//! - A read is not older than its call.
//! - A swap that was reported as done stays done while a majority of the voters keeps its
//!   directories.
//! - A voter whose directory was lost counts for nobody. The log names the directory that
//!   votes under each name, and each question of Raft's names both ends' (`net`).
//! - Every call from outside is bounded in time.
//!
//! Limits:
//! - The number of voters does not change, and a voter is only replaced by another that
//!   takes its place (`mojim replace`). A directory made for other places is refused, and
//!   so is a voter that counts other places. An address may change: voters are known by
//!   their names.
//! - A directory that is put back from earlier is noticed only where another voter that runs
//!   has heard it promise more (`net`).

mod disk;
pub mod files;
mod net;
mod store;
mod types;
mod views;
mod voter;

#[cfg(test)]
mod tests;

pub use views::{Options, RaftViews};
pub use voter::RegisterVoter;
