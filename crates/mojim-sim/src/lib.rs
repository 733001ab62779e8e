//! Runs the shipped engine over a simulated disk, network and clock.
//!
//! Owns the simulated world: everything that [`mojim_env::Env`] asks of the
//! machine, made from one seed. Invariants:
//! - The same seed, the same [`Faults`] and the same calls give the same run,
//!   byte for byte: no thread, no clock, no address and no hash order decides.
//! - The medium does what `mojim_env` allows, and no more: what was made durable survives any
//!   crash. Anything else may survive, in any part.
//! - A dead process changes nothing that a later one sees: each call of its
//!   [`SimEnv`] fails, and stores that it still makes into named or persistent
//!   memory go into a copy that nobody else maps.
//!
//! Apart from that world, [`shadow`] enumerates what persistent memory may have. It runs the
//! engine, the logs of `mojim-persistent` and the heap over that memory.
//!
//! The rates of faults are `Faults` in `ctx.rs`. Reads, writes and syncs fail in `world/file.rs`,
//! and syncs of directories and file systems in `world/env.rs`. `disk.rs` has write-back, and what
//! a loss of power leaves. The network's faults are in `net.rs`, damaged logs in `rot.rs`. Those of
//! a node or an operator are `cluster/trouble.rs` and `cluster/operator.rs`.
//!
//! A new fault is drawn from a generator of its own: all seeds without it stay as they were
//! (`draw_faults` in `cluster/setup.rs`). One that takes something from a node is also numbered in
//! `failures.rs`. `cluster/mutation.rs` has the defects that are put into the engine, and which
//! runs can notice each. `check.rs` compares the copies with all that was acknowledged: the points
//! of `points.rs`, by the files of `model.rs`.
//!
//! `run.rs` runs seeds, `shrink.rs` looks for the fewest failures that stop all nodes. `nodes.rs`
//! has the roles at the start, `views.rs` a simulated register. `voter.rs` runs the files of a real
//! voter. `threads.rs` runs threads of a program one at a time, in the turns of `turns.rs`.
//! `memory.rs` has the memory of processes, `rng.rs` the generator of a seed. (Tests and
//! measurements of other crates draw from `rng.rs` of `mojim-env`.)

// Node numbers index several arrays at once.
#![allow(clippy::needless_range_loop)]

pub mod check;
pub mod cluster;
mod ctx;
mod disk;
pub mod failures;
mod memory;
pub mod model;
mod net;
pub mod nodes;
pub mod points;
pub mod rng;
mod rot;
pub mod run;
pub mod shadow;
pub mod shrink;
pub mod threads;
pub mod turns;
pub mod views;
pub mod voter;
pub mod world;

pub use ctx::Faults;
pub use disk::SECTOR;
pub use rng::Rng;
pub use world::{CrashKind, SimConn, SimEnv, SimListener, World, is_crash};
