//! Mojim's replication as state machines: events in, decisions out.
//!
//! Owns the rules that decide:
//!
//! - when a sync point is committed
//! - which records a copy keeps
//! - how two copies are brought together
//! - when a node may become primary
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
