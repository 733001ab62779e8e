//! Several processes of a node on one volume: how the others communicate with the one that has
//! attached it.
//!
//! The process that attached the volume is its **owner**: it has the lock, the session and the log.
//! Every other process is a **guest**. A guest maps the same memory (the shared working copies) and
//! tracks its own stores. It asks the owner for sync points and all other calls over its own line.
//!
//! Owns what both ends need: the line and the messages.

pub(crate) mod guest;
pub(crate) mod line;
pub(crate) mod wire;

pub use guest::Guest;
