//! Ordinary memory that is also a file: committed **atomically** at the points that a program
//! chooses, and copied **synchronously** to a second node.
//!
//! A [`Volume`] is a directory of files that a program attaches. A [`Region`] is one of them in
//! memory, and lends its bytes as slices. Nothing that is stored there is durable by itself; a
//! **sync point** ([`sync`], [`Region::sync`], [`Batch::commit`]) commits exactly the bytes that
//! it names: after any failure they are there all, or none of them is, and in order with all other
//! sync points of the volume.
//!
//! ```
//! use mojim::Volume;
//!
//! # let example = mojim::example::Example::new();
//! # let config = example.config();
//! // `config`: the path of mojim.toml. "a": this node's name there.
//! let volume = Volume::attach(&config, "a", None)?;
//! let mut region = volume.map("counter", 8)?;
//! let n = &mut region.as_mut_slice::<u64>()[0];
//! *n += 1;
//! mojim::sync(n)?; // atomic, durable, replicated
//! assert_eq!(*n, 1);
//!
//! drop(region); // what was not committed is discarded
//! volume.detach()?;
//!
//! let volume = Volume::attach(&config, "a", None)?;
//! assert_eq!(volume.map("counter", 8)?.as_slice::<u64>()[0], 1);
//! # Ok::<(), mojim::Error>(())
//! ```
//!
//! A [`Heap`] holds values and pointers between them, and changes them in transactions. Within one, the thread
//! makes no other sync point: such a call fails with [`Error::Invalid`].
//!
//! # What holds a volume
//!
//! One process of one node has a volume attached at a time. Regions and heaps keep it: it ends
//! with the last of them or with the [`Volume`], whichever goes last. A process that ends in any way has lost
//! nothing that was committed.
//!
//! # Threads, forks, signals
//!
//! Volumes, regions, heaps and readers are `Send` and `Sync`. A forked child may read what it inherited, but commits nothing:
//! its calls fail with [`Error::Unsupported`]. The engine runs threads of its own.
//!
//! # The bytes of a heap
//!
//! Safe code is sound as long as a heap's file holds what heaps have put there. Any program can make
//! a file that looks like a heap, with a `bool` of 2 in it, say, or a block that is free and in use:
//! by the file's path, by another process or language, or by a [`Region`] over a new file whose
//! name [`Heap::open`] gets afterwards (a file that is a heap cannot be mapped as a region). To open
//! such a file as a heap is undefined behaviour. No call of this crate is marked `unsafe` for it,
//! as none of the standard library is for a write to `/proc/self/mem`, and for the same reason: what
//! is outside of the program's memory, its types cannot guard.
//!
//! # Errors
//!
//! Every call returns [`Error`]; its text is one line that says what failed, and what to do. A sync
//! point that failed with [`Error::Timeout`] is in doubt: it may be committed later, whole. Repeat
//! the call.
//!
//! # More
//!
//! The project's `docs/reference/guarantees.md` says what survives what; `docs/reference/configuration.md` has the
//! configuration file. Sources: *Mojim: A Reliable and Highly-Available Non-Volatile Memory
//! System* (ASPLOS 2015), and *Failure-Atomic msync* (EuroSys 2013).

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
