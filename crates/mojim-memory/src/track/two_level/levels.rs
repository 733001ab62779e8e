//! The two levels of one region, as who collects and who gives back has them.
//!
//! This file owns what the tracker is made of, and nothing that is done with it. Invariant: both
//! levels track the same range, and the upper one is dropped first.

use std::ops::Range;
use std::sync::Mutex;

use super::ages::Ages;
use super::held::Held;
use crate::track::mprotect::Mprotect;
use crate::track::process::Process;
use crate::track::uffd::Uffd;

/// The tracker.
pub struct TwoLevel {
    /// Goes first: then all is writable.
    pub(super) chunks: Mprotect,
    pub(super) pages: Uffd,
    /// Bytes of a chunk, of the region.
    pub(super) chunk: usize,
    pub(super) len: usize,
    pub(super) process: Process,
    /// Of the collect that closes chunks; one that finds it held closes none.
    pub(super) ages: Mutex<Ages>,
    /// Where pages are counted, and given back.
    pub(super) held: Option<Held>,
}

impl TwoLevel {
    /// The bytes of chunks that lie in `within`.
    pub(super) fn bytes(&self, chunks: &Range<usize>, within: &Range<usize>) -> Range<usize> {
        (chunks.start * self.chunk).max(within.start)..(chunks.end * self.chunk).min(within.end)
    }
}
