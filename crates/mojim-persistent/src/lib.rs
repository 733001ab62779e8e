//! Persistent variables, regions made at run time, and logs.
//!
//! Source: Mnemosyne, "Persistent memory regions" and "Consistent updates".
//!
//! `variables.rs` and `image.rs` have persistent variables. `log/` has logs over a trait, which the
//! shadow image of `mojim-sim` also runs.

mod file;
mod image;
pub mod log;
mod media;
mod open;
pub mod regions;
mod store8;
pub mod variables;

pub use open::AppendLog;
pub use store8::store8;
