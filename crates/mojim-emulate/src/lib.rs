//! Memory of this machine that is as slow as a named non-volatile memory.
//!
//! The papers ran on Intel's PMEP, whose memory controller was slowed down and whose kernel added a
//! delay for each write barrier (Mojim, 6.1). This crate adds the same delays in software:
//!
//! - [`Model`] says how slow: read latency, bandwidths, barrier, and the way to flush. The six of the
//!   slides and PMEP's have names.
//! - [`Machine`] says how fast this machine's own memory is, measured.
//! - [`Emulator`] lets flushes, arriving bytes and reads take the model's time. Its head has the cost
//!   model.
//! - `bandwidth` shares a medium's bandwidth among threads.
//! - [`Emulated`] puts an emulator under a node whose configuration names a memory.
//! - [`Clock`] waits for nanoseconds.
//!
//! # Invariants
//! - A delay never ends early.
//! - Emulated memory keeps no promise: power takes its bytes. Whoever uses it must say so.

mod bandwidth;
mod clock;
mod emulator;
mod machine;
mod model;
mod over;

pub use bandwidth::Bandwidth;
pub use clock::Clock;
pub use emulator::{Emulator, Stores, Totals};
pub use machine::Machine;
pub use model::{Bytes, Model};
pub use over::Emulated;
