//! The engine's needs from the world around it, and how its threads wait.
//!
//! The base of the engine's crates:
//!
//! - the traits that Linux and the simulator implement
//! - the engine's errors
//! - frames over a connection
//! - locks and sleeps that a simulator can control
//! - descriptors
//! - a thread's signals
//! - reads of memory that a program stores to meanwhile

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
