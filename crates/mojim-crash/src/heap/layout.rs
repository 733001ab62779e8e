//! Where a heap lies, and which blocks the region's bytes are in.

use std::ops::Range;

use mojim_heap::HeapOptions;
use mojim_sim::Rng;

use crate::workload::region_len;

/// Addresses of a heap, and where those of the first seed lie. Heaps of histories that are looked at at one
/// time lie apart.
pub const CAPACITY: usize = 64 << 20;
pub const FIRST: usize = 0x2400_0000_0000;
pub const APART: u64 = 4096;
/// Cells that a root of their own points to, instead of the table.
pub const NAMED: usize = 6;
/// The root of the table: a word with the number of the other thread's transactions that are known to be
/// committed, and a pointer for each cell.
pub const TABLE: &str = "table";
/// The root of what the other thread has: how many transactions it made, and its last blocks.
pub const OTHER: &str = "other";
pub const SLOTS: usize = 8;
pub const KIND: &str = "cell";
/// Bytes before a cell's: its number, and how many follow.
pub const PREFIX: usize = 8;

/// A cell's name, as a root.
pub fn name(cell: usize) -> String {
    format!("cell.{cell}")
}

/// The parts of the region that lie in a block each.
pub fn cells(seed: u64) -> Vec<Range<usize>> {
    let (mut rng, len) = (Rng::new(seed ^ 0xce11), region_len(seed));
    let (mut all, mut at) = (Vec::new(), 0);
    while at < len {
        let n = match rng.below(40) {
            0 => rng.between(16 << 10, 100 << 10),
            1..=5 => rng.between(1000, 9000),
            _ => rng.between(8, 1500),
        } as usize;
        let end = (at + n).min(len);
        all.push(at..end);
        at = end;
    }
    all
}

pub fn options(seed: u64) -> HeapOptions {
    let address = FIRST + (seed % APART) as usize * 2 * CAPACITY;
    HeapOptions::new(CAPACITY, address)
}

/// Bytes of the block of the other thread's transaction `n`.
pub fn other_size(n: u64) -> usize {
    8 + (n * 37 % 600) as usize
}
