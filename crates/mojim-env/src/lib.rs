//! What the engine needs from the world around it, and how its threads wait.
//!
//! The ground of all other crates: the traits that Linux and the simulator
//! implement, the engine's error, locks and sleeps at which a simulator may put
//! itself, and what a thread does about signals.

pub mod descriptors;
mod env;
mod error;
pub mod event;
pub mod futex;
pub mod page_delta;
pub mod threads;
pub mod turns;

pub use env::*;
pub use error::*;
