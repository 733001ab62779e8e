//! The configuration file: one TOML text that names a cluster's volumes and nodes.

pub mod key_files;
mod read;
pub mod ring_files;
mod syntax;
#[cfg(test)]
mod tests;
mod types;
mod values;

pub use types::*;
