//! The evaluation's measuring half: physical limits, paired rounds, threads, and rows to print.
//!
//! A figure of Mojim alone says nothing on a machine whose speed changes from second to second,
//! so every figure here is taken beside the limit it is to be compared with:
//!
//! - [`raw`] the limits: a link, a shared ring, a log write, these shared by threads, and plain
//!   `msync`;
//! - [`rocksdb`] a rival whose durable puts share writes, where the system has it;
//! - [`programs`] programs in C that are compiled and run, where the system has gcc;
//! - [`pmemobj`] a rival whose transactions are durable in memory, where the system has it;
//! - `library` libraries that are loaded where the system has them, and their functions;
//! - [`peers`] the other process that the links need, and its end;
//! - [`measure`] subjects interleaved in rounds, and ratios per round and per speed state;
//! - [`threads`] the same subjects in many threads at once;
//! - [`report`] rows, as JSON lines or as a table;
//! - [`heap`], [`sync`], [`group`], [`tls`], [`fams`], [`large`], [`log`], [`tx`] the benchmarks;
//! - [`command`] their command lines;
//! - [`scratch`] the directory in which the files live, and its removal.
//!
//! A program that measures calls [`peers::maybe_run_peer`] first thing in `main`.

mod cluster;
pub mod command;
pub mod fams;
pub mod group;
pub mod heap;
pub mod large;
mod library;
pub mod log;
pub mod measure;
pub mod peers;
pub mod pmemobj;
pub mod programs;
pub mod raw;
pub mod report;
pub mod rocksdb;
pub mod scratch;
pub mod sync;
pub mod threads;
pub mod tls;
pub mod tx;
