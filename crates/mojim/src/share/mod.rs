//! Several processes of a node on one volume: how those that have not attached it talk with the
//! one that has.
//!
//! The process that attached the volume is its **owner**: it has the lock, the session and the log.
//! Another one is its **guest**: it maps the same memory (the shared working copies), has its own
//! pages armed, and asks the owner for sync points and all else, over a line of its own.
//! Owns what both ends need: the line and the messages.

pub(crate) mod guest;
pub(crate) mod line;
pub(crate) mod wire;

pub use guest::Guest;
