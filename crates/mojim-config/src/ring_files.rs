//! Where a node's memory that outlives its processes lies.

use std::path::{Path, PathBuf};

use crate::types::{Config, Node};

/// A name for a node's memory that no other node on this host has: its own,
/// and a hash of its directory.
pub fn memory_dir(config: &Config, node: &Node) -> PathBuf {
    let hash = directory_hash(&node.directory);
    node.ring
        .join(format!("mojim-{}-{}-{hash}", config.cluster, node.name))
}

/// A node's directory, as the name of its memory ends with it.
pub fn directory_hash(directory: &Path) -> String {
    let mut h = 0xcbf2_9ce4_8422_2325u64; // FNV-1a, 64 bits
    for b in directory.to_string_lossy().bytes() {
        h = (h ^ b as u64).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{h:016x}")
}
