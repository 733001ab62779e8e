//! Torn bits: one fence an append.
//!
//! A word has 63 bits of the record. Its highest bit has the parity of the pass over the ring in
//! which it was stored. A record whose words do not all have the parity of their pass was torn: the
//! log ends before it. Before words behind the end are used again, those that a torn append left
//! with the parity of this pass lose it: otherwise they would complete a later record that is torn
//! in its turn.

use std::ops::Range;

use mojim::Result;

use super::ring::{Defect, Medium, Ring, word_of};

const BIT: u32 = 63;
const MASK: u64 = (1 << BIT) - 1;

/// Words of a record: one for its length.
pub fn words(len: usize) -> usize {
    1 + (len * 8).div_ceil(BIT as usize)
}

/// The bit of a word that is stored in its pass. The first pass has 1: memory begins as zeros.
fn bit<M: Medium>(ring: &Ring<M>, position: u64) -> u64 {
    let pass = position / ring.words as u64;
    match ring.has(Defect::SameBit) {
        true => 1 << BIT,
        false => ((pass + 1) % 2) << BIT,
    }
}

pub fn append<M: Medium>(ring: &mut Ring<M>, at: u64, record: &[u8]) -> Result<()> {
    let mut put = |n: usize, bits: u64| {
        let position = at + n as u64;
        let value = bits & MASK | bit(ring, position);
        ring.store(position, value);
    };
    put(0, record.len() as u64);
    // `held` bits wait in `bits`, the lowest first.
    let (mut bits, mut held, mut n) = (0u128, 0, 1);
    for word in 0..record.len().div_ceil(8) {
        bits |= u128::from(word_of(record, word)) << held;
        held += (record.len() - word * 8).min(8) as u32 * 8;
        while held >= BIT {
            put(n, bits as u64);
            bits >>= BIT;
            held -= BIT;
            n += 1;
        }
    }
    if held > 0 {
        put(n, bits as u64);
    }
    ring.flush(at, words(record.len()));
    ring.fence()
}

/// What is stored as the length of the record at a position.
pub fn len<M: Medium>(ring: &Ring<M>, at: u64) -> u64 {
    ring.load(at) & MASK
}

pub fn read<M: Medium>(ring: &Ring<M>, at: u64, room: u64, out: &mut Vec<u8>) -> Option<u64> {
    let load = |n: u64| {
        let position = at + n;
        let word = ring.load(position);
        (word & !MASK == bit(ring, position)).then_some(word & MASK)
    };
    let len = match room {
        0 => return None,
        _ => usize::try_from(load(0)?).ok()?,
    };
    if len as u64 > room * 8 || words(len) as u64 > room {
        return None;
    }
    let before = out.len();
    let (mut bits, mut held) = (0u128, 0);
    for n in 1..words(len) as u64 {
        let Some(word) = load(n) else {
            out.truncate(before);
            return None;
        };
        bits |= u128::from(word) << held;
        held += BIT;
        while held >= 8 {
            out.push(bits as u8);
            bits >>= 8;
            held -= 8;
        }
    }
    out.truncate(before + len);
    Some(at + words(len) as u64)
}

/// Takes the parity of their pass from words behind the end.
pub fn clean<M: Medium>(ring: &mut Ring<M>, behind: Range<u64>) -> Result<()> {
    if ring.has(Defect::Stale) {
        return Ok(());
    }
    let mut any = false;
    for position in behind {
        let stored = bit(ring, position);
        if ring.load(position) & !MASK == stored {
            ring.store(position, stored ^ !MASK);
            let word = ring.word(position);
            ring.medium.flush(word, 1);
            any = true;
        }
    }
    match any {
        true => ring.medium.fence(),
        false => Ok(()),
    }
}
