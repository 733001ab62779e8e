//! Mojim's replication as state machines: events in, decisions out.
//!
//! Owns the rules that decide:
//!
//! - when a sync point is committed: `rule.rs`, `prefix.rs`
//! - which records a lane's log takes: `lane.rs`
//! - which records a copy keeps, and how two copies are brought together: `pairing.rs`, with the
//!   epochs of `history.rs`
//! - when a node may become primary: `view.rs` with a register, `promotion.rs` by hand
//!
//! No I/O, no clock, no threads: time and messages are arguments, so the simulator and the drivers
//! run the same code.

pub mod history;
pub mod lane;
pub mod pairing;
pub mod prefix;
pub mod promotion;
pub mod rule;
pub mod view;

pub use history::History;
pub use lane::{Arrival, LaneIn};
pub use pairing::{
    Acknowledged, FAR, Holding, KnownAcknowledged, LAST_EPOCH, LEAP, Lacks, Loss, Plan, WORD,
    has_lost, is_near, is_rival, loss, may_outbid, may_promise, reconcile,
};
pub use prefix::{Marks, Prefix};
pub use rule::{AckRule, Patience, Verdict};
