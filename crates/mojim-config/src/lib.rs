//! The configuration file: one TOML text that names a cluster's volumes and nodes.
//!
//! # Tour
//!
//! `types.rs` has what a file says. `read.rs` lists the keys and reads the file, `read/volume.rs`
//! the sections of volumes. Both give each key its default, mostly by `.or(…)`. A default that
//! depends on the machine is in `layout.rs` of `mojim-replica` (`copy_streams`). `read/places.rs`
//! looks at the nodes' places.
//! `values.rs` reads single values, such as times. `syntax.rs` checks the text before the TOML
//! parser sees it. `key_files.rs` and `ring_files.rs` have paths that follow from a configuration.
//!
//! `config.rs` of `mojim-cli` shows a configuration: a new key is added there, too. `layout.rs` of
//! `mojim-replica` passes values to a primary, in the `PrimarySpec` of `primary.rs`. `lib.rs` of
//! `mojim-node` passes values to a mirror.

pub mod key_files;
mod read;
pub mod ring_files;
mod syntax;
#[cfg(test)]
mod tests;
mod types;
mod values;

pub use types::*;
