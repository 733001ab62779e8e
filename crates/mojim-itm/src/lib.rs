//! libmojim_itm.so: the runtime of the published transactional-memory ABI, for x86-64.
//!
//! `gcc -fgnu-tm` compiles a `__transaction_atomic` block to calls of this ABI. The ABI is
//! that of Intel's "Transactional Memory Compiler and Runtime Application Binary Interface", 1.1,
//! with what libitm adds. Linked before libitm, this library serves these calls by the calling
//! thread's durable transaction.
//!
//! Owns the translation to `mojim-undo`'s log, and nothing of a transaction beyond it. The log is
//! libmojim.so's, which commits it.
//!
//! It is a library of its own. A library that exports these names takes over every program with
//! transactions that it is linked to. It does so also where these count on libitm's concurrency
//! control.
//!
//! # Tour
//!
//! - `begin.rs` and `end.rs`: the begin of a block, its commit and its abort
//! - `stores.rs`, `wide.rs`, `transfers.rs`: loads and stores, of wide types too, and `memcpy`
//! - `actions.rs`, `exceptions.rs`: memory that a block allocates, and exceptions of C++ in it
//! - `clones.rs`: functions that are called by pointer
//! - `thread.rs`: the thread's log
//!
//! Invariants:
//!
//! - A store is logged before it happens, unless the compiler calls it a second one (WaW) of the
//!   same block. A read for a write is logged too, since the write behind it is called WaW.
//! - An abort never stores to the frames of the stack that it leaves.
//! - No function panics or ends the process.

#![allow(non_snake_case)]
#![cfg(target_arch = "x86_64")]

mod actions;
mod begin;
mod clones;
mod end;
mod exceptions;
mod stores;
mod thread;
mod transfers;
mod wide;
