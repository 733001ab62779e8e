//! One node's copy of a volume: its logs, its data files, and the application of
//! records from the logs to the data files.
//!
//! # Tour
//!
//! A **log** lies on the medium. Its **ring** has the records first, in memory that outlives the
//! process. The type `Log` (`log.rs`) is both. Threads take room one after the other and fill it side by side (`reservations.rs`).
//! The `Live` words of a log tell the daemon what a running program does. `LIVE_COUNT` beside them
//! names the last one, and `docs/reference/format.md` lists them.
//!
//! The **data area** (`area.rs`) merges records into pages (`area/image.rs`) and writes the data
//! files (`area/writes.rs`, `area/unsynced.rs`). `area/entries.rs` has the catalogue in memory,
//! `area/names.rs` and `area/outcome.rs` its changes, `notes.rs` those under way. `area/again.rs`
//! applies again what found no room.
//!
//! `store/apply.rs` has the order: committed records, whole sync points, by LSN. The threads that
//! apply yield at wake-ups and have no lower priority, since others wait for their locks. Three
//! callers do this work themselves:
//!
//! - one that waits for room in a log,
//! - one that waits for the data files (a rollback, a detach),
//! - the start of a copy.
//!
//! A **checkpoint** (`checkpoint_if` in `store/apply.rs`) syncs the data files (unless the log is
//! memory), and writes the superblock. Then it releases the log space that backups and a linked
//! mirror do not need. It runs when a log is half full, or after 50 ms without work. The caller
//! decides this: `checkpoint_step` in `primary/write_back.rs` and `mirror.rs` of `mojim-replica`.
//!
//! `store/open.rs` opens and recovers a copy: superblock, logs, catalogue, the contiguous prefix of
//! whole sync points. `store/load.rs` and `stage.rs` take in another node's copy beside the present
//! one, until it is whole (`progress.rs` says how far). `store/spill.rs` keeps the bytes of sync
//! points that no log can hold. `room.rs` says how much of the disk stays free.

pub mod area;
pub mod log;
pub mod notes;
pub mod progress;
pub mod reservations;
pub mod room;
pub mod stage;
pub mod store;
