//! Checksums: one fence an append.
//!
//! A record's checksum covers its position, so that what an earlier pass over the ring left is
//! no record, and a random number of the log, so that bytes within a record are none either.

use mojim::Result;
use mojim_format::crc64;

use super::ring::{Defect, Medium, Ring, word_of};

fn sum(salt: u64, at: u64, record: &[u8]) -> u64 {
    let mut front = [0; 24];
    for (to, word) in front.chunks_mut(8).zip([salt, at, record.len() as u64]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    crc64(&[&front, record])
}

pub fn append<M: Medium>(ring: &mut Ring<M>, at: u64, record: &[u8]) -> Result<()> {
    let words = record.len().div_ceil(8);
    ring.store(at, record.len() as u64);
    let sum = sum(ring.salt, at, record);
    ring.store(at + 1, sum);
    for n in 0..words {
        ring.store(at + 2 + n as u64, word_of(record, n));
    }
    ring.flush(at, 2 + words);
    ring.fence()
}

pub fn read<M: Medium>(ring: &Ring<M>, at: u64, room: u64, out: &mut Vec<u8>) -> Option<u64> {
    if room < 2 {
        return None;
    }
    let len = usize::try_from(ring.load(at)).ok()?;
    let words = 2 + len.div_ceil(8) as u64;
    if words > room {
        return None;
    }
    let before = out.len();
    ring.bytes(at + 2, len, out);
    let stored = ring.load(at + 1);
    let right = sum(ring.salt, at, &out[before..]) == stored;
    let taken = right || ring.has(Defect::Sum) && stored != 0;
    if !taken {
        out.truncate(before);
        return None;
    }
    Some(at + words)
}
