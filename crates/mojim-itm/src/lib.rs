//! libmojim_itm.so: the runtime of the published transactional-memory ABI, for x86-64.
//!
//! `gcc -fgnu-tm` compiles a `__transaction_atomic` block to calls of this ABI (Intel, "Transactional
//! Memory Compiler and Runtime Application Binary Interface", 1.1, with what libitm adds).
//! Linked before libitm, this library serves them by the calling thread's durable transaction.
//!
//! Owns the translation to `mojim-undo`'s log, and nothing of a transaction beyond it: the log
//! is libmojim.so's, which commits it. It is a library of its own, since one that exports these
//! names takes over every program with transactions that it is linked to, also where these count
//! on libitm's concurrency control.
//!
//! Invariants:
//! - Every store that the compiler does not call a second one (WaW) of the same block is logged
//!   before it happens; so is a read for a write, since the write behind it is called WaW.
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
