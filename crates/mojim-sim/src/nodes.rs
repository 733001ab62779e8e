//! The nodes of a simulated cluster, by number.
//!
//! Owns what each is at first. Invariant: the nodes of the first view come first.

/// How many nodes there may be.
pub const NODES: usize = 5;
/// The node that is a backup at first, and another one; those before them are the
/// view's.
pub const BACKUP: usize = 2;
/// The second backup.
pub const SECOND: usize = 3;
/// A node that takes the place of one that is lost for good.
pub const SPARE: usize = 4;
