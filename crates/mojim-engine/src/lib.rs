//! The engine of Mojim: ordinary memory that is also a file, committed atomically at
//! points the program chooses, copied synchronously to a second node.
//!
//! Owns volumes, regions, guests and readers for all that stands on them: the C interface, the
//! mount, the daemon, and the crate `mojim`, which is the Rust interface. Regions are pointers
//! here, and a volume is attached until it is detached. `ARCHITECTURE.md` tells the life of a sync
//! point. `docs/reference/guarantees.md` tells what survives what.
//!
//! # Tour
//!
//! The program sees a region through **windows** (`volume/windows.rs`, `volume/table.rs`). A call
//! of `msync` or `gmsync` is in `volume/sync_point.rs`: it finds the changes (`mojim-memory`),
//! appends and waits (`mojim-replica`). The mount has no working copy, and enters at
//! `volume/batch.rs`. A transaction enters at `volume/exact.rs`.
//!
//! A change of **names or sizes** (`volume/names.rs`) is a record like others. One whose call
//! failed is in doubt until it is resolved. Sync points beyond a file's end wait for it. A
//! **rollback** (`MS_INVALIDATE`) waits until everything appended is committed and applied. Then it
//! copies the data file's bytes into the pages that were written.
//!
//! **Attaching**: `volume/attach_target.rs` steps `attach.rs` of `mojim-replica`, for programs and
//! for a daemon that heals (`attach_with`, `attach_to_heal`, `join` in `volume.rs`). The simulator
//! steps `attach.rs`, too. An attachment has the threads of `start_threads`: `link_loop`,
//! `checkpoint_turns`, `forward_to`, and others as needed.
//!
//! **Several processes**: the one that attached is the **owner** (`volume/owner.rs`), others are
//! guests with the same memory (`share/`). `volume/children.rs` acts after a fork.
//! `volume/memory.rs` bounds memory. `last.rs` has the LSN of a thread's last sync point. `reader/`
//! shows a volume on a node that follows, `reader/files.rs` for mounts.

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
