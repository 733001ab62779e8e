//! The persistent heap: blocks of a file of a volume, at a fixed address, so that
//! pointers between them stay valid from run to run.
//!
//! Sources: FAMS, Section 4.1, and Mnemosyne, "Persistent heap". On disk lies only what
//! cannot be computed again: slab tables and one state byte a block. So:
//!
//! - An allocation or a free changes one byte, which a transaction commits exactly.
//! - Threads that commit at the same time commit their own bytes alone.
//! - A crash leaks nothing, since blocks in the caches of threads are free on disk.
//!
//! Layers, from the ground:
//!
//! 1. `classes`, `table`, `tls`, `owners`, `addresses`, `space`
//! 2. `slabs`, `check`
//! 3. `moved`
//! 4. `cache`
//! 5. `heap`
//!
//! `slabs` knows what is free, `owners` whose slab it is, `cache` what a thread keeps. `heap` has
//! the calls, `heap/roots.rs` the roots, `space` what a heap needs of a volume.

mod addresses;
mod cache;
mod check;
mod classes;
mod heap;
mod moved;
mod owners;
mod slabs;
mod space;
mod table;
mod tls;

#[doc(hidden)]
pub use cache::{free as free_cached, malloc as malloc_cached, set_open};
#[doc(hidden)]
pub use check::blocks;
pub use check::{ClassReport, HeapReport, check, check_file};
pub use heap::{Block, DEFAULT_CAPACITY, Heap, HeapOptions, HeldRoot, LEAST_CAPACITY};
pub use mojim_format::heap::{ALLOCATED, FREE};
pub use moved::{Moved, move_heap};
#[doc(hidden)]
pub use space::{Nowhere, Space, Span};
