//! Tracking in two levels: of chunks by `mprotect`, and of the pages of open chunks by userfaultfd.
//! A collect's cost follows what was stored to, not what the region holds.
//!
//! Its costs, and the alternatives that were tried, are in `docs/reference/performance.md`.
//!
//! This file owns the tracker, and when a collect closes chunks (`two_level/ages.rs` chooses
//! which). A closed chunk is read-only to the program, and was not stored to since it was last
//! scanned. The first store to it opens it (`mprotect.rs`), and from then on its written pages are
//! found by `uffd.rs`.
//!
//! # Why no store is missed
//! Every store is to an open chunk, and the chunks that are open are known (invariant 1 of
//! `mprotect.rs`). A collect reads which they are, scans them, and may close some: K1 it protects
//! them (which waits for handlers, and flushes the TLBs), K2 it scans them once more.
//! * A store before K1 is found by one of the two scans: the page tables keep it (invariant 1 of
//!   `uffd.rs`), and protecting does not change that.
//! * A store after K1 opens the chunk again: the next collect scans it.
//! * Scanning only before protecting would lose the stores between the two.
//!
//! # When a chunk is closed
//! Opening and closing cost 10 to 20 µs together, a scan of an open chunk about 1 µs. A chunk stays
//! open for `FIRST` collects without a store. One that is opened again soon after it was closed
//! stays open for twice as many each time, up to `MOST`. So scattered stores leave few chunks open,
//! and chunks that are stored to all the time stay open. If those are all chunks, the region is
//! scanned as without this level: open chunks that are near each other are scanned together. A
//! collect closes only a few chunks, since otherwise the first sync point after a region was filled
//! would pay for all.
//!
//! Where memory is bounded, chunks are also shut: closed without being scanned
//! (`two_level/release.rs`). A collect scans these as well.
//!
//! # Limits
//! `read(2)` and all that has the kernel write into memory fail with EFAULT at a closed chunk. So
//! this level is for programs that ask for it ([`super::Kind::TwoLevel`]).

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::meter::Meter;
use super::mprotect;
use super::process::Process;
use super::tracker::{GivesBack, Tracker, check_range};
use super::uffd::{self, unite};
use ages::Ages;
use levels::TwoLevel;
use mojim_env::locks;
use release_queue::ReleaseQueue;

mod ages;
mod levels;
mod release;
mod release_queue;

/// Bytes of a chunk: smaller ones save little (the signal remains), larger ones cost more, since
/// protecting goes page by page.
pub const CHUNK: usize = 256 << 10;
/// Regions below this are scanned as a whole: that costs as much as opening and closing one chunk.
const LEAST: usize = 64 << 20;
/// Open chunks less than so many bytes apart are scanned together: what lies between costs no more
/// than one more call.
const GAP: usize = 2 << 20;

/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn attach(base: usize, len: usize) -> io::Result<Box<dyn Tracker>> {
    if len < LEAST {
        // SAFETY: the caller's promise.
        return unsafe { uffd::attach(base, len, false) };
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

/// A tracker whose chunks have `pages` pages.
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
    // The upper level first: protecting takes no time while the page tables are still empty.
    // SAFETY: the caller's promise, of both; each leaves the other's part of the state alone.
    let (upper, lower) = unsafe {
        (
            mprotect::of_units(base, len, pages, meter.cloned())?,
            // Unarmed, more is found in the chunks that are open, nothing less.
            match len > uffd::MOST_ARMED {
                true => uffd::registered(base, len)?,
                false => uffd::of_pages(base, len)?,
            },
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
        held: meter.map(|m| ReleaseQueue::new(len.div_ceil(chunk), m.clone())),
    }))
}

impl TwoLevel {
    /// Appends the chunks that overlap `wanted` and may have pages that no collect has found, as
    /// runs of chunk numbers. With `rearm` the caller scans them now.
    fn unseen(&self, wanted: &Range<usize>, rearm: bool, out: &mut Vec<Range<usize>>) {
        let from = out.len();
        self.chunks.open(wanted, out);
        // In this order: a chunk that is shut in between is in one of the two.
        if let Some(h) = &self.held {
            h.unseen(wanted, self.chunk, self.len, rearm, out);
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
            // Scans one page, to fail if the range is not tracked any more.
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
        let held = locks::try_lock(&self.ages);
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

    fn metered(&self) -> Option<&dyn GivesBack> {
        self.held.is_some().then_some(self as &dyn GivesBack)
    }
}
