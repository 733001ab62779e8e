//! The two levels of one region, used both to collect and to give pages back.
//!
//! This file owns the tracker's parts, not its operations. Invariant: both levels track the same
//! range, and the upper one is dropped first.

use std::ops::Range;
use std::sync::Mutex;

use super::ages::Ages;
use super::release_queue::ReleaseQueue;
use crate::track::mprotect::Mprotect;
use crate::track::process::Process;
use crate::track::uffd::Uffd;

/// The tracker.
pub struct TwoLevel {
    /// Dropped first: then all pages are writable.
    pub(super) chunks: Mprotect,
    pub(super) pages: Uffd,
    /// Bytes of a chunk, and (`len`) of the region.
    pub(super) chunk: usize,
    pub(super) len: usize,
    pub(super) process: Process,
    /// Held by the collect that closes chunks; a collect that finds it locked closes none.
    pub(super) ages: Mutex<Ages>,
    /// Only if pages are counted, and given back.
    pub(super) held: Option<ReleaseQueue>,
}

impl TwoLevel {
    /// The bytes of chunks that lie in `within`.
    pub(super) fn bytes(&self, chunks: &Range<usize>, within: &Range<usize>) -> Range<usize> {
        (chunks.start * self.chunk).max(within.start)..(chunks.end * self.chunk).min(within.end)
    }
}
