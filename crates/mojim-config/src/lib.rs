//! The configuration file: one TOML text that names a cluster's volumes and nodes.
//!
//! # Tour
//!
//! `types.rs` has what a file says, with defaults. `read.rs` lists the keys and reads the file,
//! `read/volume.rs` the sections of volumes. `read/places.rs` looks at the nodes' places.
//! `values.rs` reads single values, such as times. `syntax.rs` checks the text before the TOML
//! parser sees it. `config.rs` of `mojim-cli` shows a configuration: a new key is added there, too.
//! `layout.rs` of `mojim-replica` passes values to a primary, `lib.rs` of `mojim-node` to a mirror.

pub mod key_files;
mod read;
pub mod ring_files;
mod syntax;
#[cfg(test)]
mod tests;
mod types;
mod values;

pub use types::*;
