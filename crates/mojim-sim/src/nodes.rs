//! The nodes of a simulated cluster, by number.
//!
//! Owns the role of each node at the start. Invariant: the nodes of the first view come
//! first.

/// How many nodes there may be.
pub const NODES: usize = 5;
/// Their names.
pub const NAMES: [&str; NODES] = ["a", "b", "c", "d", "e"];
/// The first backup; the nodes before it are the first view's.
pub const BACKUP: usize = 2;
/// The second backup.
pub const SECOND: usize = 3;
/// A node that takes the place of one that is lost for good.
pub const SPARE: usize = 4;
