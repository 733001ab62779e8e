//! One node's copy of a volume: its logs, its data files, and the application of
//! records from the logs to the data files.

pub mod area;
pub mod log;
pub mod notes;
pub mod progress;
pub mod reservations;
pub mod room;
pub mod stage;
pub mod store;
