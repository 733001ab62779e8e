//! The first request of a connection, FUSE_INIT: what the kernel offers, and what is taken of it.
//!
//! Owns the flags' numbers and the bytes of both messages.
//!
//! Invariant: nothing is taken that was not offered.

use mojim_format::FormatError;
use mojim_format::bytes::{Reader, Writer};

/// Several reads ahead at once: a page is locked until its answer is in, and writes of it wait for that.
pub(crate) const ASYNC_READ: u64 = 1 << 0;
const BIG_WRITES: u64 = 1 << 5;
pub(crate) const AUTO_INVAL_DATA: u64 = 1 << 12;
pub(crate) const DO_READDIRPLUS: u64 = 1 << 13;
pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
const MAX_PAGES: u64 = 1 << 22;
pub(crate) const CACHE_SYMLINKS: u64 = 1 << 23;
pub(crate) const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
pub(crate) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
/// There are more than 32 flags.
const INIT_EXT: u64 = 1 << 30;
/// Requests can come over io_uring.
pub(crate) const OVER_IO_URING: u64 = 1 << 41;
/// Most bytes of a write or a read.
pub(crate) const MOST: u32 = 1 << 20;
/// The protocol's version: that with all that is asked for here. An older kernel lacks some.
const MAJOR: u32 = 7;
const MINOR: u32 = 42;
/// Since then the messages have the form that they have here.
const LEAST_MINOR: u32 = 23;
/// Requests that the kernel has under way by itself: reads ahead, and what it writes back.
const BACKGROUND: u16 = 16;

/// What a kernel offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    minor: u32,
    readahead: u32,
    flags: u64,
}

impl Offer {
    /// Whether all of `flags` are offered.
    pub(crate) fn has(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }
}

/// Reads the request behind its header.
///
/// # Errors
/// It is shorter than any kernel's, or of another protocol.
pub(crate) fn offer(body: &[u8]) -> Result<Offer, FormatError> {
    let what = "FUSE_INIT";
    let mut r = Reader::new(what, body);
    let (major, minor) = (r.u32()?, r.u32()?);
    for (field, value, fits) in [
        ("major version", major, major == MAJOR),
        ("minor version", minor, minor >= LEAST_MINOR),
    ] {
        if !fits {
            let value = value.into();
            return Err(FormatError::Field { what, field, value });
        }
    }
    let (readahead, low) = (r.u32()?, u64::from(r.u32()?));
    let high = match low & INIT_EXT {
        0 => 0,
        _ => u64::from(r.u32()?) << 32,
    };
    let flags = low | high;
    Ok(Offer {
        minor,
        readahead,
        flags,
    })
}

/// The answer, where those of `wanted` are asked for that are offered, and what every mount asks for.
/// A write has `most_write` bytes at most.
pub(crate) fn answer(offer: &Offer, wanted: u64, most_write: u32) -> Vec<u8> {
    let flags = offer.flags & (wanted | ASYNC_READ | BIG_WRITES | MAX_PAGES | INIT_EXT);
    let readahead = offer.readahead.min(MOST);
    let mut out = Vec::with_capacity(64);
    let mut w = Writer(&mut out);
    w.u32(MAJOR).u32(MINOR.min(offer.minor));
    w.u32(readahead).u32(flags as u32);
    w.u16(BACKGROUND).u16(BACKGROUND * 3 / 4);
    // Times have nanoseconds.
    w.u32(most_write.min(MOST)).u32(1);
    // Its pages: with more of them it would ask for more than MOST bytes.
    let pages = MOST as usize / rustix::param::page_size();
    w.u16(pages as u16).u16(0);
    w.u32((flags >> 32) as u32);
    out.resize(64, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn what_is_not_offered_is_not_taken() {
        let low = (ASYNC_READ | DO_READDIRPLUS | INIT_EXT) as u32;
        let offered = offer(&request(&[7, 38, 128 << 10, low, 1 << 9])).unwrap();
        let wanted = DO_READDIRPLUS | CACHE_SYMLINKS | OVER_IO_URING | 1 << 40;
        let out = answer(&offered, wanted, MOST);
        let word = |at: usize| u32::from_le_bytes(out[at..at + 4].try_into().unwrap());
        assert_eq!(out.len(), 64);
        assert_eq!((word(0), word(4), word(8)), (7, 38, 128 << 10));
        assert_eq!((word(12), word(32)), (low, 1 << 9));
        assert!(offered.has(OVER_IO_URING) && !offered.has(OVER_IO_URING | CACHE_SYMLINKS));
        assert_eq!((word(20), word(24)), (MOST, 1));
        // Without the flag for it there is no second word of flags.
        let older = offer(&request(&[7, 31, 0, ASYNC_READ as u32, u32::MAX])).unwrap();
        assert_eq!(older.flags, ASYNC_READ);
    }

    #[test]
    fn another_protocol_is_refused() {
        let is_refused = |words: &[u32]| offer(&request(words)).is_err();
        assert!(is_refused(&[8, 0, 0, 0]) && is_refused(&[7, 22, 0, 0]));
        assert!(is_refused(&[7, 31, 0]) && is_refused(&[]));
        assert!(is_refused(&[7, 38, 0, INIT_EXT as u32]));
        assert!(!is_refused(&[7, 23, 0, 0]));
    }
}
