//! The engine of Mojim: ordinary memory that is also a file, committed atomically at
//! points the program chooses, copied synchronously to a second node.
//!
//! Owns volumes, regions, guests and readers for all that stands on them: the C interface,
//! the mount, the daemon, and the crate `mojim`, which is the Rust interface. Regions are
//! pointers here, and a volume is attached until it is detached. `ARCHITECTURE.md` tells the life of a sync point;
//! `docs/reference/guarantees.md` what survives what.

mod last;
mod reader;
mod share;
mod volume;

pub use last::last_lsn;
pub use mojim_config::Config;
pub use mojim_env::{Error, Result};
pub use mojim_format::Level;
#[doc(hidden)]
pub use mojim_linux::trust::load as load_config;
pub use mojim_memory::region::{MapFlags, Mapping};
#[doc(hidden)]
pub use reader::files::{Listing, ReaderFiles};
pub use reader::{Reader, ReaderOptions};
pub use share::Guest;
#[doc(hidden)]
pub use volume::{
    Batch, Change, Failure, RoomWait, commit_exact, leave_memory, prepare_thread, span_of,
};
pub use volume::{
    CopyReport, Joined, Volume, expect_forks, finish_all, gmsync, gmsync_async, is_region, join,
    msync, msync_async, populate, rollback, unmap,
};
