//! The engine's needs from the world around it, and how its threads wait.
//!
//! The base of the engine's crates:
//!
//! - the traits that Linux and the simulator implement: `env.rs`
//! - the engine's errors, and the errno of each: `error.rs`
//! - frames over a connection: `wire.rs`
//! - locks and sleeps that a simulator can control: `locks.rs`, `event.rs`, `futex.rs`, `turns.rs`
//! - descriptors: `descriptors.rs`
//! - a thread's signals: `threads.rs`, and its processor: `processors.rs`
//! - reads of memory that a program stores to meanwhile: `racing.rs`
//! - an environment that changes some methods of another one: `forward.rs`
//! - memory for when the system gives none: `reserve.rs`
//! - parts of a page: `page_delta.rs`
//! - a value that shares no cache line: `alone.rs`
//! - choices that a seed repeats, for tests and measurements: `rng.rs`

pub mod alone;
pub mod descriptors;
mod env;
mod error;
pub mod event;
mod forward;
pub mod futex;
pub mod locks;
pub mod page_delta;
pub mod processors;
pub mod racing;
pub mod reserve;
pub mod rng;
pub mod threads;
pub mod turns;
pub mod wire;

pub use env::*;
pub use error::*;
