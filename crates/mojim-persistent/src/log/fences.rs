//! Two fences: the record is durable before the tail behind it is stored.

use mojim::Result;
use mojim_format::persistent::LOG_TAIL_WORD;

use super::ring::{Defect, Medium, Ring, word_of};

pub fn append<M: Medium>(ring: &mut Ring<M>, at: u64, tail: u64, record: &[u8]) -> Result<()> {
    ring.store(at, record.len() as u64);
    for n in 0..record.len().div_ceil(8) {
        ring.store(at + 1 + n as u64, word_of(record, n));
    }
    ring.flush(at, (tail - at) as usize);
    if !ring.has(Defect::Order) {
        ring.medium.order()?;
    }
    ring.medium.store(LOG_TAIL_WORD, tail);
    ring.medium.flush(LOG_TAIL_WORD, 1);
    ring.fence()
}

/// What is stored as the length of the record at a position.
pub fn len<M: Medium>(ring: &Ring<M>, at: u64) -> u64 {
    ring.load(at)
}

pub fn read<M: Medium>(ring: &Ring<M>, at: u64, room: u64, out: &mut Vec<u8>) -> Option<u64> {
    if room == 0 {
        return None;
    }
    let len = usize::try_from(len(ring, at)).ok()?;
    let words = 1 + len.div_ceil(8) as u64;
    if words > room {
        return None;
    }
    ring.bytes(at + 1, len, out);
    Some(at + words)
}
