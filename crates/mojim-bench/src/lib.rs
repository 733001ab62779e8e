//! The evaluation (limits, paired rounds, threads, and rows to print) and the demonstration.
//!
//! They are the program `mojim-bench`, which starts the command `mojim` for nodes and programs.
//!
//! A figure of Mojim alone says nothing on a machine whose speed changes from second to second. So
//! every figure here is taken beside the physical limit it is to be compared with:
//!
//! - [`raw`] the limits: a link, a shared ring, a log write, these shared by threads, and plain
//!   `msync`.
//! - [`rocksdb`] a rival whose durable puts share writes, where the system has it.
//! - [`programs`] programs in C that are compiled and run, where the system has gcc.
//! - [`pmemobj`] a rival whose transactions are durable in memory, where the system has it.
//! - `library` libraries that are loaded where the system has them, and their functions.
//! - [`peers`] the other process that the links need, and its end.
//! - [`measure`] subjects interleaved in rounds, and ratios per round and per speed state. Its
//!   `Summary` has the figures: median, percentiles, operations per second.
//! - [`threads`] the same subjects in many threads at once.
//! - [`report`] rows, as JSON lines or as a table. Some benchmarks have rows of their own.
//! - [`heap`], [`sync`], [`group`], [`tls`], [`fams`], [`large`], [`log`], [`nvmm`], [`tx`] the
//!   benchmarks.
//! - [`command`] their command lines.
//! - [`all`] all of them, one after the other, and one report.
//! - [`failover`], [`tiers`], [`latency`], [`on_mounts`] benchmarks of whole clusters.
//! - [`demo`] the demonstration.
//! - [`processes`] the processes of these, which end with them.
//! - [`rivals`] the schemes of `mojim-rivals` in processes. `store` gives them the same stores as
//!   Mojim.
//! - [`words`] the command line of the program.
//! - [`emulated`] a mirror whose log is on a disk that writes in a given time. (Emulated memory is
//!   `mojim-emulate`'s.)
//! - `cluster` the two nodes that benchmarks measure. `orphan` has children end with this process.
//! - [`scratch`] the directory in which the files live, and its removal.
//!
//! The program calls [`peers::maybe_run_peer`] first thing in `main`.

pub mod all;
mod cluster;
pub mod command;
pub mod demo;
pub mod emulated;
pub mod failover;
pub mod fams;
pub mod group;
pub mod heap;
pub mod large;
pub mod latency;
mod library;
pub mod log;
pub mod measure;
pub mod nvmm;
pub mod on_mounts;
mod orphan;
pub mod peers;
pub mod pmemobj;
pub mod processes;
pub mod programs;
pub mod raw;
pub mod report;
pub mod rivals;
pub mod rocksdb;
pub mod scratch;
mod store;
pub mod sync;
pub mod threads;
pub mod tiers;
pub mod tls;
pub mod tx;
pub mod words;
