//! How background threads write records back to the data files: in pieces, or in a pause.
//!
//! Owns what they see of the records that come, and how much is a piece. A thread that
//! wrote back each record as it comes would take the processor from threads that wait for
//! each other, however low its priority: under EEVDF a thread that gives way a hundred times
//! has put itself behind all others.

/// What the background sees of the program and its sync points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Sync points come one after the other.
    Busy,
    /// No sync point came in some turns of the background.
    Quiet,
    /// The records that wait to be applied take too much memory, or have waited for long.
    Pressed,
    /// No sync point came for long, or a caller waits for room in the log.
    Idle,
}

/// The fewest bytes of records that are applied at a time.
const LEAST_PIECE: u64 = 1 << 20;

/// Bytes of records that are applied at a time: enough for one checkpoint that its syncs do
/// not count, but not so much that a caller waits long for room.
pub fn piece(smallest_log: u64) -> u64 {
    (smallest_log / 8).max(LEAST_PIECE)
}
