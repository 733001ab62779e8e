//! The persistent heap as a subject: the region's bytes lie in blocks, each cell of the region in
//! one. A step gives the cells that it changes new blocks, or changes their blocks in place.
//!
//! Owns the program (`program.rs`), and what a heap must be in which the region is found again
//! (`found.rs`).
//!
//! Steps are made in transactions, or outside of them with one sync of the heap. Before some steps,
//! a transaction is taken back. While some steps are made, another thread commits transactions of
//! its own. The step then notes how many of them it knew to be committed. Invariant: every block of
//! the heap can be reached from a root when a step is committed. So a recovery finds each block
//! that is free and should not be, and each that is lost.

mod found;
mod layout;
mod program;

pub use found::recover;
pub use program::Persistent;
