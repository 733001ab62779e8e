//! Checksums: one fence an append.
//!
//! A record's checksum covers two more things:
//!
//! - its position, so that what an earlier pass over the ring left is no record,
//! - a random number of the log, so that bytes within a record are none either.
//!
//! A record also says during which opening of the log it was appended. Openings do not
//! decrease along the log. So records behind a damaged one, which the log has lost, do not
//! come back when a later append ends where one of them begins.

use mojim::Result;
use mojim_format::crc64;

use super::ring::{Defect, Medium, Ring, word_of};

/// Bits of the length in a record's first word. The opening is in those above.
const LEN_BITS: u32 = 44;
/// Openings are counted modulo this.
const OPENINGS: u64 = 1 << (64 - LEN_BITS);

/// The opening in which the record at a position was appended.
pub fn opening<M: Medium>(ring: &Ring<M>, at: u64) -> u64 {
    ring.load(at) >> LEN_BITS
}

/// The opening behind another one.
pub fn next_opening(opening: u64) -> u64 {
    opening.wrapping_add(1) % OPENINGS
}

/// Whether an opening is `other`, or came after it: less than half of all before.
pub fn is_from(opening: u64, other: u64) -> bool {
    opening.wrapping_sub(other) % OPENINGS < OPENINGS / 2
}

fn sum(salt: u64, at: u64, first: u64, record: &[u8]) -> u64 {
    let mut front = [0; 24];
    for (to, word) in front.chunks_mut(8).zip([salt, at, first]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    crc64(&[&front, record])
}

pub fn append<M: Medium>(ring: &mut Ring<M>, at: u64, record: &[u8]) -> Result<()> {
    let words = record.len().div_ceil(8);
    let first = record.len() as u64 | ring.opening << LEN_BITS;
    ring.store(at, first);
    let sum = sum(ring.salt, at, first, record);
    ring.store(at + 1, sum);
    for n in 0..words {
        ring.store(at + 2 + n as u64, word_of(record, n));
    }
    ring.flush(at, 2 + words);
    ring.fence()
}

/// What is stored as the length of the record at a position.
pub fn len<M: Medium>(ring: &Ring<M>, at: u64) -> u64 {
    ring.load(at) % (1 << LEN_BITS)
}

pub fn read<M: Medium>(ring: &Ring<M>, at: u64, room: u64, out: &mut Vec<u8>) -> Option<u64> {
    if room < 2 {
        return None;
    }
    let first = ring.load(at);
    let len = len(ring, at) as usize;
    let words = 2 + len.div_ceil(8) as u64;
    if words > room {
        return None;
    }
    let before = out.len();
    ring.bytes(at + 2, len, out);
    let stored = ring.load(at + 1);
    let right = sum(ring.salt, at, first, &out[before..]) == stored;
    let taken = right || ring.has(Defect::Sum) && stored != 0;
    if !taken {
        out.truncate(before);
        return None;
    }
    Some(at + words)
}
