//! Persistent variables, regions made at run time, and logs.
//!
//! Source: Mnemosyne, "Persistent memory regions" and "Consistent updates".
//!
//! `variables.rs` and `image.rs` have persistent variables, `regions.rs` regions made at run time.
//! `store8.rs` updates one variable. `log/` has logs over a trait, which the shadow image of
//! `mojim-sim` also runs. `open.rs` opens them in the memory that `media.rs` has. `file.rs` tells
//! files of variables, of regions and of logs from others.
//!
//! The containers of a heap are none of these: they are in `vec.rs` of `mojim`.

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
