//! Tracking in two levels: of chunks by `mprotect`, and of the pages of open chunks by
//! userfaultfd. What a collect costs follows what was stored to, not what the region holds.
//!
//! What it costs, and the ways that were tried beside it, stand in `docs/performance.md`.
//!
//! This file owns which chunks are closed, and when. A closed chunk is read-only to the program,
//! and nothing of it was stored to since it was last looked through; the first store to it opens
//! it (`mprotect.rs`), and from then on its pages are found as everywhere (`uffd.rs`).
//!
//! # Why no store is missed
//! Every store is to an open chunk, and the chunks that are open are known (invariant 1 of
//! `mprotect.rs`). A collect reads which they are, looks them through, and may close some: K1 it
//! protects them (which waits for handlers, and flushes the TLBs), K2 it looks them through once
//! more.
//! * A store before K1 is found by one of the two looks: the page tables keep it (invariant 1 of
//!   `uffd.rs`), and protecting does not change that.
//! * A store after K1 opens the chunk again: the next collect looks through it.
//! * Looking through before protecting alone would lose the stores between the two.
//!
//! # When a chunk is closed
//! Opening and closing cost 10 to 20 µs together, a look through an open chunk about 1 µs. A chunk
//! stays open for [`FIRST`] collects without a store; one that is opened again soon after it was
//! closed, for twice as many each time, up to [`MOST`]. So a page here and there leaves few chunks
//! open, what is stored to all the time stays open, and where that is everything the region is
//! scanned as without this level: open chunks that are near each other are looked through in one
//! go. A collect closes a few chunks at a time, or the sync point that meets a region just filled
//! would pay for all.
//!
//! Where memory is bounded, chunks are shut too: closed without being looked through
//! (`two_level/release.rs`). A collect looks through these as well.
//!
//! # Limits
//! `read(2)` and all that has the kernel write into memory fail with EFAULT at a closed chunk. So
//! this is for programs that ask for it ([`super::Kind::TwoLevel`]).

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use super::meter::Meter;
use super::mprotect::{self, Mprotect};
use super::uffd::{self, Uffd, unite};
use super::{Process, Tracker, check_range, push};

mod release;

use release::Release;

/// Bytes of a chunk: smaller ones save little (the signal remains), larger ones cost more, since
/// protecting goes page by page.
pub const CHUNK: usize = 256 << 10;
/// Regions below this are scanned as a whole: for as much as one chunk opened and closed.
const LEAST: usize = 64 << 20;
/// Open chunks less than so many bytes apart are looked through together: what lies between costs
/// no more than one more call.
const GAP: usize = 2 << 20;
/// Collects without a store after which a chunk is closed, at first.
const FIRST: u32 = 2;
/// And at most.
const MOST: u32 = 64;
/// A chunk opened within so many collects of when it was closed was closed too soon.
const SOON: u32 = 64;
/// Each collect closes one in so many of the open chunks, and always [`FEW`].
const SHARE: usize = 64;
const FEW: usize = 2;

/// The tracker.
pub struct TwoLevel {
    /// Goes first: then all is writable.
    chunks: Mprotect,
    pages: Uffd,
    /// Bytes of a chunk, of the region.
    chunk: usize,
    len: usize,
    process: Process,
    /// Of the collect that closes chunks; one that finds it held closes none.
    ages: Mutex<Ages>,
    /// Where pages are counted, and given back.
    release: Option<Release>,
}

/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn attach(base: usize, len: usize) -> io::Result<Box<dyn Tracker>> {
    if len < LEAST {
        // SAFETY: the caller's promise.
        return unsafe { uffd::attach(base, len) };
    }
    let pages = (CHUNK / rustix::param::page_size()).max(1);
    // SAFETY: the caller's promise.
    unsafe { of_chunks(base, len, pages, None) }
}

/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn attach_metered(
    base: usize,
    len: usize,
    meter: &Arc<Meter>,
) -> io::Result<Box<dyn Tracker>> {
    let pages = (CHUNK / rustix::param::page_size()).max(1);
    // SAFETY: the caller's promise.
    unsafe { of_chunks(base, len, pages, Some(meter)) }
}

/// A tracker whose chunks have so many pages.
///
/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn of_chunks(
    base: usize,
    len: usize,
    pages: usize,
    meter: Option<&Arc<Meter>>,
) -> io::Result<Box<dyn Tracker>> {
    let process = Process::current()?;
    // First the upper level: it is done with at once where the page tables are empty still.
    // SAFETY: the caller's promise, of both; each leaves the other's part of the state alone.
    let (upper, lower) = unsafe {
        (
            mprotect::of_units(base, len, pages, meter.cloned())?,
            uffd::of_pages(base, len)?,
        )
    };
    let chunk = pages * rustix::param::page_size();
    Ok(Box::new(TwoLevel {
        chunks: upper,
        pages: lower,
        chunk,
        len,
        process,
        ages: Mutex::new(Ages::new(len.div_ceil(chunk))),
        release: meter.map(|m| Release::new(len.div_ceil(chunk), m.clone())),
    }))
}

impl TwoLevel {
    /// The bytes of chunks that lie in `within`.
    fn bytes(&self, chunks: &Range<usize>, within: &Range<usize>) -> Range<usize> {
        (chunks.start * self.chunk).max(within.start)..(chunks.end * self.chunk).min(within.end)
    }

    /// Appends the chunks that overlap `wanted` and may have pages that no collect has found, as
    /// runs of chunk numbers. With `rearm` the caller looks through them now.
    fn unseen(&self, wanted: &Range<usize>, rearm: bool, out: &mut Vec<Range<usize>>) {
        let from = out.len();
        self.chunks.open(wanted, out);
        // In this order: what is shut in between is in one of the two.
        if let Some(r) = &self.release {
            r.unseen(wanted, self.chunk, self.len, rearm, out);
            if out.len() > from {
                unite(out, from);
            }
        }
    }

    fn search(
        &self,
        chunks: &[Range<usize>],
        wanted: &Range<usize>,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        if chunks.is_empty() {
            // Is it tracked still?
            let page = rustix::param::page_size();
            let first = wanted.start..(wanted.start + page).min(wanted.end);
            return self
                .pages
                .collect_parts([first].into_iter(), wanted.clone(), rearm, out);
        }
        let gap = GAP / self.chunk;
        let near = chunks.chunk_by(|a, b| b.start - a.end < gap.max(1));
        let parts = near.map(|runs| {
            let hull = runs[0].start..runs[runs.len() - 1].end;
            self.bytes(&hull, wanted)
        });
        self.pages.collect_parts(parts, wanted.clone(), rearm, out)
    }
}

impl Tracker for TwoLevel {
    fn collect(
        &self,
        start: usize,
        end: usize,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        check_range(start, end, self.len)?;
        self.process.check()?;
        if start == end {
            return Ok(());
        }
        let wanted = start..end;
        let from = out.len();
        let held = match self.ages.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(e)) => Some(PoisonError::into_inner(e)),
            Err(TryLockError::WouldBlock) => None,
        };
        let mut own = Vec::new();
        let Some(mut ages) = held.filter(|_| rearm) else {
            self.unseen(&wanted, rearm, &mut own);
            return self.search(&own, &wanted, rearm, out);
        };
        let ages = &mut *ages;
        ages.open.clear();
        self.unseen(&wanted, true, &mut ages.open);
        self.search(&ages.open, &wanted, true, out)?;

        let last = match end == self.len {
            true => end.div_ceil(self.chunk),
            false => end / self.chunk,
        };
        let whole = start.div_ceil(self.chunk)..last;
        ages.choose(&whole, self.chunk, &out[from..]);
        if ages.closing.is_empty() {
            return Ok(());
        }
        let found = out.len();
        self.chunks.close(&ages.closing); // K1
        if let Err(e) = self.search(&ages.closing, &wanted, true, out) {
            // K2 failed: all of `wanted` is marked.
            out.truncate(from);
            return Err(e);
        }
        if out.len() > found {
            unite(out, from);
        }
        Ok(())
    }

    fn mark(&self, start: usize, end: usize) {
        // No chunk need be opened: marks are reported whatever is open.
        self.pages.mark(start, end);
    }

    fn kind(&self) -> &'static str {
        "two-level"
    }

    fn metered(&self) -> Option<&TwoLevel> {
        self.release.is_some().then_some(self)
    }
}

/// How long chunks have been open.
struct Ages {
    /// Counts the collects, without 0.
    now: u32,
    /// By chunk: when it was last found stored to; 0 where it was not since it was closed.
    seen: Vec<u32>,
    /// When it was closed; 0: never.
    closed: Vec<u32>,
    /// How long it stays open.
    life: Vec<u32>,
    /// Runs of chunks that are open, of this collect.
    open: Vec<Range<usize>>,
    /// Those to be closed.
    closing: Vec<Range<usize>>,
}

impl Ages {
    fn new(chunks: usize) -> Ages {
        Ages {
            now: 0,
            // Zeroed by the kernel as they are touched.
            seen: vec![0; chunks],
            closed: vec![0; chunks],
            life: vec![0; chunks],
            open: Vec::new(),
            closing: Vec::new(),
        }
    }

    /// Chooses which of the open chunks in `whole` to close, after a collect that has found
    /// `written`, in bytes.
    fn choose(&mut self, whole: &Range<usize>, chunk: usize, written: &[Range<usize>]) {
        self.now = self.now.wrapping_add(1).max(1);
        self.closing.clear();
        let within = |run: &Range<usize>| run.start.max(whole.start)..run.end.min(whole.end);
        let open = self.open.iter().map(within);
        let mut left = (open.clone().map(|r| r.len()).sum::<usize>() / SHARE).max(FEW);
        let mut written = written.iter().peekable();
        for c in open.flatten() {
            while written.next_if(|w| w.end <= c * chunk).is_some() {}
            if written.peek().is_some_and(|w| w.start < (c + 1) * chunk) {
                if self.seen[c] == 0 {
                    let since = self.now.wrapping_sub(self.closed[c]);
                    self.life[c] = match self.closed[c] != 0 && since < SOON {
                        true => (self.life[c] * 2).clamp(FIRST, MOST),
                        false => FIRST,
                    };
                }
                self.seen[c] = self.now;
            } else if (self.seen[c] == 0 || self.now.wrapping_sub(self.seen[c]) >= self.life[c])
                && left > 0
            {
                left -= 1;
                self.seen[c] = 0;
                self.closed[c] = self.now;
                push(&mut self.closing, 0, c..c + 1);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested
mod tests {
    use super::*;

    /// One collect that finds these chunks written, of those open; gives what is closed.
    fn step(ages: &mut Ages, open: &mut Vec<usize>, written: &[usize]) -> Vec<usize> {
        for c in written {
            if !open.contains(c) {
                open.push(*c);
            }
        }
        open.sort_unstable();
        ages.open.clear();
        for c in &*open {
            push(&mut ages.open, 0, *c..c + 1);
        }
        let pages: Vec<_> = written.iter().map(|c| c * 10 + 3..c * 10 + 4).collect();
        let whole = 0..ages.seen.len();
        ages.choose(&whole, 10, &pages);
        let closed: Vec<usize> = ages.closing.iter().cloned().flatten().collect();
        open.retain(|c| !closed.contains(c));
        closed
    }

    #[test]
    fn a_chunk_here_and_there_is_soon_closed() {
        let mut ages = Ages::new(10_000);
        let mut open = Vec::new();
        for n in 0..1000 {
            step(&mut ages, &mut open, &[n * 7]);
            assert!(open.len() <= FIRST as usize, "{open:?}");
        }
    }

    #[test]
    fn what_is_stored_to_often_stays_open() {
        let mut ages = Ages::new(100);
        let mut open = Vec::new();
        let mut opened = 0;
        for n in 0..2000 {
            let hot = [n % 20];
            opened += usize::from(!open.contains(&hot[0]));
            step(&mut ages, &mut open, &hot);
        }
        assert!(opened < 20 * 8, "opened {opened} times");
        assert_eq!(open.len(), 20);
    }

    #[test]
    fn a_region_just_filled_is_closed_bit_by_bit() {
        let mut ages = Ages::new(6400);
        let mut open = Vec::new();
        let all: Vec<usize> = (0..6400).collect();
        assert!(step(&mut ages, &mut open, &all).is_empty());
        assert!(step(&mut ages, &mut open, &[]).is_empty());
        assert_eq!(
            step(&mut ages, &mut open, &[]),
            (0..100).collect::<Vec<_>>()
        );
        let mut steps = 0;
        while !open.is_empty() {
            step(&mut ages, &mut open, &[]);
            steps += 1;
        }
        assert!(steps < 500, "{steps}");
    }

    #[test]
    fn only_whole_chunks_are_closed() {
        let mut ages = Ages::new(10);
        ages.open = vec![2..6];
        ages.choose(&(3..5), 10, &[]);
        assert_eq!(ages.closing, [3..5]);
    }
}
