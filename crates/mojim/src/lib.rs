//! Ordinary memory that is also a file. A program commits it **atomically** at **sync points**, and
//! Mojim copies it **synchronously** to a second node.
//!
//! ```no_run
//! use mojim::Volume;
//!
//! fn main() -> mojim::Result<()> {
//!     // The configuration file, this node's name there, and its only volume.
//!     let volume = Volume::attach("mojim.toml", "a", None)?;
//!     let mut region = volume.map("counter", 8)?;
//!     let n = &mut region.as_mut_slice::<u64>()[0];
//!     *n += 1;
//!     mojim::sync(n)?; // atomic, durable, replicated
//!     println!("run {n}");
//!     drop(region);
//!     volume.detach()
//! }
//! ```
//!
//! # Overview
//!
//! | type | is | changed by |
//! |---|---|---|
//! | [`Volume`] | a directory of files that a program attaches | [`Volume::create`], [`Volume::rename`], … |
//! | [`Region`] | one file in memory, which lends its bytes as slices | sync points, [`Region::atomically`] |
//! | [`Batch`] | ranges of several regions, for one sync point | |
//! | [`Heap`] | a file of values, and pointers between them | transactions: [`Heap::atomically`] |
//! | [`Ptr`], [`PVec`], [`persistent!`](crate::persistent!) | pointers, vectors and structs in a heap | transactions |
//! | [`Reader`] | a volume to read, on the mirror or a backup | nobody |
//!
//! # What commits
//!
//! Memory is a working copy of the file. The file changes at sync points only: [`sync`],
//! [`Region::sync`], [`Batch::commit`], and the end of a transaction.
//!
//! - A sync point commits exactly the bytes that it names.
//! - After any failure they are there all, or none of them is.
//! - Sync points of a volume are in order: a later one is never there without the earlier ones.
//! - Bytes of a region that no sync point named are discarded when the region is dropped.
//! - When a sync point returns, its bytes are as durable as the volume's mode says.
//!
//! Within a transaction the thread makes no other sync point: such a call fails with
//! [`Error::Invalid`].
//!
//! ```
//! use mojim::Volume;
//!
//! # let example = mojim::example::Example::new();
//! # let config = example.config();
//! let volume = Volume::attach(&config, "a", None)?;
//! let mut region = volume.map("counter", 8)?;
//! let n = &mut region.as_mut_slice::<u64>()[0];
//! *n = 1;
//! mojim::sync(n)?;
//! *n = 2; // in no sync point
//! drop(region);
//! volume.detach()?;
//!
//! let volume = Volume::attach(&config, "a", None)?;
//! assert_eq!(volume.map("counter", 8)?.as_slice::<u64>()[0], 1);
//! # Ok::<(), mojim::Error>(())
//! ```
//!
//! # What holds a volume
//!
//! One process of one node has a volume attached at a time. Regions and heaps keep it: it ends with
//! the last of them or with the [`Volume`], whichever goes last. A process that ends in any way
//! loses no commit.
//!
//! # Threads, forks, signals
//!
//! Volumes, regions, heaps and readers are `Send` and `Sync`. Threads share a heap or a region in a
//! `Mutex` or `RwLock`. [`Region::begin_sync`] under the lock, and [`Volume::wait`] after it, let
//! other threads go on meanwhile. A forked child may read what it inherited, but commits nothing: its calls fail with
//! [`Error::Unsupported`]. The engine runs threads of its own.
//!
//! # Errors
//!
//! Every call returns [`Error`]. Its text is one line: why the call failed, and what to do.
//!
//! - A sync point that failed with [`Error::Timeout`] is in doubt: it may be committed later,
//!   whole. Repeat the call.
//! - A transaction whose mirror does not answer waits for it. [`on_doubt`] limits that.
//! - [`Error::Stale`] says that another node is the primary. End, and start there.
//!
//! # The bytes of a heap
//!
//! Safe code is sound as long as a heap's file holds only bytes that heaps have put there. Any
//! program can make a file that looks like a heap: with a `bool` of 2 in it, say, or a block that
//! is free and in use. It can do so in these ways:
//!
//! - by the file's path,
//! - by another process or language,
//! - by a [`Region`] over a new file whose name [`Heap::open`] gets afterwards. (A file that is a
//!   heap cannot be mapped as a region.)
//!
//! To open such a file as a heap is undefined behaviour. No call of this crate is marked `unsafe`
//! for it, as none of the standard library is for a write to `/proc/self/mem`. The reason is the
//! same: a program's types cannot guard bytes outside of its memory.
//!
//! # More
//!
//! In the project's documents:
//!
//! - `docs/tutorial/rust.md`: a first program, and `kill -9`.
//! - `docs/reference/rust.md`: the rules, with examples.
//! - `docs/reference/guarantees.md`: the outcome of each failure.
//! - `docs/reference/configuration.md`: the configuration file.
//!
//! Sources: *Mojim: A Reliable and Highly-Available Non-Volatile Memory System* (ASPLOS 2015), and
//! *Failure-Atomic msync* (EuroSys 2013).

// The files, for people who change this crate. `volume.rs` has the calls of a volume, `attached.rs`
// says when its attachment ends. Sync points are in `region.rs` and `batch.rs`, transactions in
// `region_tx.rs` and `heap.rs`. `persistent.rs` says which values may lie in a heap, `vec.rs` has
// its vectors. `alone.rs` refuses sync points within a transaction, `doubt.rs` decides on those in
// doubt. `reader.rs` reads on a node that follows. `example.rs` has a node for examples.

mod alone;
mod attached;
mod batch;
mod doubt;
#[doc(hidden)]
pub mod example;
mod heap;
mod persistent;
mod reader;
mod region;
mod region_tx;
mod vec;
mod volume;

pub use batch::Batch;
pub use doubt::on_doubt;
pub use engine::{CopyReport, Error, Level, Result, last_lsn};
pub use heap::{Heap, Tx};
#[doc(hidden)]
pub use persistent::shape;
pub use persistent::{Persistent, Ptr, Stored};
pub use reader::Reader;
pub use region::{Region, sync};
pub use region_tx::RegionTx;
pub use vec::PVec;
pub use volume::{MapOptions, Volume};
