//! The undo log of a thread's transaction, and which threads have one open.
//!
//! Owns the layout that libmojim.so and libmojim_itm.so share: the first makes a [`Log`] and
//! commits it, the second appends to it (`log.rs`). The code is compiled into both. The statics of
//! this crate, the registry in `open.rs`, are used by the first alone.
//!
//! Invariants:
//! - A log belongs to one thread. Another one reads its mark only ([`Mark`]).
//! - Entries are taken back in the reverse order of their appending, so the oldest bytes win.
//! - Nothing here knows a region or a heap: addresses are addresses.

mod log;
mod open;

pub use log::{Cached, Entry, Level, Log, Slow};
pub use open::{Alone, Mark, alone, alone_within, me, register};
