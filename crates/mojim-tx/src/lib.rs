//! Durable transactions: an undo log in memory, stores in place, commit by exact ranges.
//!
//! Source: Mnemosyne, "Durable memory transactions". `include/mojim_tx.h` is the manual.
//!
//! Owns:
//!
//! - each thread's transaction (`object.rs`, `thread.rs`),
//! - how it ends (`commit.rs`),
//! - blocks of a heap in it (`blocks.rs`),
//! - the interface for those who write down their stores (`explicit.rs`).
//!
//! The log itself is `mojim-undo`'s, which libmojim_itm.so appends to for blocks that the compiler
//! captures.
//!
//! Invariants:
//!
//! - The stores of a transaction are committed by one sync point, or they are taken back.
//! - A transaction that is in doubt is never taken back: it may be committed.
//! - A commit contains the transaction's own bytes and no others, not even in gaps between them:
//!   these may be half of what another thread is storing.
//! - No function panics across the C interface, none ends the process.

mod blocks;
mod commit;
mod explicit;
mod object;
#[cfg(test)]
mod tests;
mod thread;

pub use blocks::{free, malloc, pfree, pmalloc, set_root};
pub use commit::{Decides, failed, on_failure};
pub use explicit::{
    Tx, abort, abort_to, add, add_new, atomically, begin, commit, depth, end_quickly, is_open,
    on_abort, on_commit, unmapping,
};
pub use object::no_memory;
pub use thread::thread_log;
