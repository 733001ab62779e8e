//! One node's copy of a volume: its logs, its data files, and the way of records
//! from the ones into the others.

pub mod area;
pub mod log;
mod notes;
pub mod progress;
pub mod stage;
pub mod store;
