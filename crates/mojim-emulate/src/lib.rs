//! Memory of this machine that is as slow as a named non-volatile memory.
//!
//! The papers ran on Intel's PMEP, whose memory controller was slowed down and whose kernel added a
//! delay for each write barrier (Mojim, 6.1). This crate adds the same delays in software:
//!
//! - `model.rs` ([`Model`]) says how slow: read latency, bandwidths, barrier, the way to flush. The
//!   slides' six memories and PMEP have names, the same as in `EmulatedMemory` of `mojim-config`.
//! - `machine.rs` ([`Machine`]) says how fast this machine's own memory is, measured.
//! - `emulator.rs` ([`Emulator`]) lets flushes, arriving bytes and reads take the model's time. Its
//!   head has the cost model. `LINE_NS` there has a row for each `FlushMode` of `mojim-linux`.
//! - `bandwidth.rs` shares a medium's bandwidth among threads.
//! - `over.rs` ([`Emulated`]) puts an emulator under a node whose configuration names a memory.
//! - `clock.rs` ([`Clock`]) waits for nanoseconds.
//!
//! An emulated disk is another thing: `emulated.rs` of `mojim-bench`.
//!
//! # Invariants
//! - A delay never ends early.
//! - Emulated memory keeps no promise: power takes its bytes. A user of it must say so.

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
