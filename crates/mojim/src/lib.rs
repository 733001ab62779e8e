//! Mojim: ordinary memory that is also a file, committed atomically at points
//! the program chooses, copied synchronously to a second node.
//!
//! The engine and its Rust interface. `ARCHITECTURE.md` tells the life of a
//! sync point; `docs/guarantees.md` what survives what.

pub mod area;
pub mod claim;
pub mod client;
pub mod committed;
pub mod config;
pub mod copy;
pub mod diff;
pub mod env;
pub mod error;
pub mod event;
mod fork;
pub mod forward;
pub mod holders;
mod last;
pub mod layout;
pub mod link;
pub mod log;
pub mod mirror;
pub mod node;
mod notes;
pub mod os;
pub mod outflow;
mod parts;
pub mod pass;
mod peek;
mod places;
pub mod primary;
pub mod reader;
pub mod region;
pub mod rings;
pub mod session;
pub mod share;
pub mod shared;
pub mod spinner;
pub mod stage;
pub mod store;
pub mod stream;
pub mod track;
pub mod turns;
pub mod uffd;
pub mod users;
pub mod views;
pub mod vigil;
pub mod volume;

pub use config::Config;
pub use error::{Error, Result};
pub use last::last_lsn;
pub use mojim_format::Level;
pub use reader::{Reader, ReaderOptions};
pub use region::{MapFlags, Mapping};
pub use share::Guest;
pub use volume::{
    CopyReport, Joined, Volume, finish_all, gmsync, gmsync_async, join, msync, msync_async,
    rollback, unmap,
};
