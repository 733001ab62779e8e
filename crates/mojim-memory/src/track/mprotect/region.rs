//! The facts of a tracked range that the SIGSEGV handler needs, and how it opens a page of it.
//!
//! This file owns each tracker's bitmap, and keeps invariants 1 and 2 of `mprotect.rs`: what
//! `Region::open` calls takes no lock and allocates nothing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use rustix::mm::MprotectFlags;

use super::limits::{Limits, RUNS};
use crate::track::meter::{Counts, Meter};
use crate::track::process::Process;
use crate::track::tracker::push;

/// Most chunks that one fault opens; it opens as many as are open just before.
pub(super) const AHEAD: usize = 8;

pub(super) const READ_WRITE: MprotectFlags = MprotectFlags::READ.union(MprotectFlags::WRITE);

/// What the handler needs to know of a tracked range.
pub(super) struct Region {
    pub(super) base: usize,
    pub(super) len: usize,
    /// What one bit stands for, in bytes: a page or a chunk of pages. The last one may be shorter.
    pub(super) unit: usize,
    /// [`AHEAD`] where units are chunks, else 1.
    ahead: usize,
    /// One bit a page. Bits beyond the last page are never reported.
    written: Box<[AtomicU64]>,
    /// This region's part of [`RUNS`].
    pub(super) runs: AtomicI64,
    pub(super) process: Process,
    /// No page is opened while this is set: handlers leave, and their stores are tried again.
    pub(super) alone: AtomicBool,
    pub(super) metered: Option<Metered>,
}

/// The counts of a region whose chunks are counted.
pub(super) struct Metered {
    pub(super) meter: Arc<Meter>,
    /// What each chunk counts as.
    pub(super) counts: Box<[AtomicU32]>,
    /// One bit a chunk: it was opened since it was shut.
    pub(super) fresh: Box<[AtomicU64]>,
}

/// Zeros, which the kernel makes as they are touched: collecting atomics would write them all.
fn zeros(bits: usize) -> Box<[AtomicU64]> {
    let words = vec![0u64; bits.div_ceil(64)].into_boxed_slice();
    const { assert!(align_of::<u64>() == align_of::<AtomicU64>()) };
    // SAFETY: AtomicU64 has the size and validity of u64, and its alignment on the 64-bit targets
    // that have a 64-bit address space to map (checked above); the box is consumed.
    unsafe { Box::from_raw(Box::into_raw(words) as *mut [AtomicU64]) }
}

/// What a handler did.
pub(super) enum Answer {
    /// The store can go on.
    Opened,
    /// It has to be tried again in a moment.
    Later,
    /// There is no room for it.
    Refused,
    /// The fault is not ours, or the page could not be opened.
    Failed,
}

impl Region {
    /// A range of which nothing counts as written, in units of `unit` bytes.
    pub(super) fn new(
        range: Range<usize>,
        unit: usize,
        ahead: usize,
        process: Process,
        meter: Option<Arc<Meter>>,
    ) -> Region {
        let units = range.len().div_ceil(unit);
        Region {
            base: range.start,
            len: range.len(),
            unit,
            ahead,
            written: zeros(units),
            runs: AtomicI64::new(0),
            process,
            alone: AtomicBool::new(false),
            metered: meter.map(|meter| Metered {
                meter,
                counts: (0..units).map(|_| AtomicU32::new(0)).collect(),
                fresh: zeros(units),
            }),
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.len.div_ceil(self.unit)
    }

    /// The bytes of `pages`, from the start of the region.
    pub(super) fn bytes(&self, pages: &Range<usize>) -> Range<usize> {
        pages.start * self.unit..(pages.end * self.unit).min(self.len)
    }

    /// The pages that `bytes` overlaps.
    pub(super) fn touched(&self, bytes: &Range<usize>) -> Range<usize> {
        bytes.start / self.unit..bytes.end.div_ceil(self.unit)
    }

    pub(super) fn count_runs(&self, delta: i64) {
        self.runs.fetch_add(delta, Ordering::Relaxed);
        RUNS.fetch_add(delta, Ordering::Relaxed);
    }

    pub(super) fn set_runs(&self, runs: i64) {
        let old = self.runs.swap(runs, Ordering::Relaxed);
        RUNS.fetch_add(runs - old, Ordering::Relaxed);
    }

    /// The bits of word `word` that stand for pages of `pages`.
    pub(super) fn mask(word: usize, pages: &Range<usize>) -> u64 {
        let low = pages.start.saturating_sub(word * 64);
        let high = pages.end.saturating_sub(word * 64).min(64);
        if low >= high {
            return 0;
        }
        (u64::MAX >> (64 - (high - low))) << low
    }

    /// H1.
    pub(super) fn set_bits(&self, pages: Range<usize>) {
        for word in pages.start / 64..pages.end.div_ceil(64) {
            let mask = Self::mask(word, &pages);
            if let Some(m) = &self.metered {
                m.fresh[word].fetch_or(mask, Ordering::SeqCst);
            }
            self.written[word].fetch_or(mask, Ordering::SeqCst);
        }
    }

    /// What a chunk counts as when it is open.
    pub(super) fn full(&self, chunk: usize) -> Counts {
        Counts::full(self.bytes(&(chunk..chunk + 1)).len() / rustix::param::page_size())
    }

    /// Makes the chunks of `opened` count as open: `page`, and as many next to it as the bound
    /// allows.
    fn admit(&self, m: &Metered, page: usize, opened: &mut Range<usize>) -> Answer {
        let charge = |chunk: &usize| m.meter.charge(&m.counts[*chunk], self.full(*chunk));
        if !charge(&page) {
            return match m.meter.ask() {
                true => Answer::Refused,
                false => Answer::Later,
            };
        }
        let before = (opened.start..page).rev().take_while(charge).count();
        let after = (page + 1..opened.end).take_while(charge).count();
        *opened = page - before..page + 1 + after;
        Answer::Opened
    }

    /// C1, of pages that are not to be reported.
    pub(super) fn clear_bits(&self, pages: Range<usize>) {
        for word in pages.start / 64..pages.end.div_ceil(64) {
            self.written[word].fetch_and(!Self::mask(word, &pages), Ordering::SeqCst);
        }
    }

    fn is_set(&self, page: usize) -> bool {
        self.written[page / 64].load(Ordering::SeqCst) & (1 << (page % 64)) != 0
    }

    /// How many of the two pages next to `pages` are written: 0, 1 or 2.
    pub(super) fn open_neighbours(&self, pages: &Range<usize>) -> i64 {
        let before = pages.start > 0 && self.is_set(pages.start - 1);
        let after = pages.end < self.pages() && self.is_set(pages.end);
        i64::from(before) + i64::from(after)
    }

    /// How many pages just before this one are written, up to `ahead`; 0 where nothing is opened
    /// ahead.
    fn open_before(&self, page: usize) -> usize {
        let most = if self.ahead > 1 { self.ahead } else { 0 };
        (1..=most.min(page))
            .take_while(|back| self.is_set(page - back))
            .count()
    }

    /// H2 and C2.
    pub(super) fn protect(
        &self,
        pages: &Range<usize>,
        flags: MprotectFlags,
    ) -> rustix::io::Result<()> {
        let bytes = self.bytes(pages);
        let start = (self.base + bytes.start) as *mut std::ffi::c_void;
        // SAFETY: a part of the range that the caller of `attach` handed over, still mapped; the
        // contents do not change, and our handler answers the faults of stores.
        unsafe { rustix::mm::mprotect(start, bytes.len(), flags) }
    }

    /// Answers a fault. Called by the handler, between H0 and H3.
    pub(super) fn open(&self, addr: usize) -> Answer {
        let page = (addr - self.base) / self.unit;
        // In a forked child `alone` is ignored, and nothing is counted.
        let mine = self.process.is_current();
        if mine && self.alone.load(Ordering::SeqCst) {
            return Answer::Later;
        }
        let limits = Limits::get();
        let total = RUNS.load(Ordering::Relaxed);
        let chunk = match total {
            t if t < limits.single => self.open_before(page).max(1),
            t if t < limits.small => 16,
            t if t < limits.whole => 64,
            _ => self.pages(),
        };
        let start = match total < limits.single {
            true => page,
            false => page - page % chunk,
        };
        let mut opened = start..(start + chunk).min(self.pages());
        let metered = self.metered.as_ref().filter(|_| mine);
        if let Some(m) = metered {
            match self.admit(m, page, &mut opened) {
                Answer::Opened => {}
                other => return other,
            }
        }
        if opened != (0..self.pages()) {
            let neighbours = self.open_neighbours(&opened);
            self.set_bits(opened.clone());
            if self.protect(&opened, READ_WRITE).is_ok() {
                self.count_runs(1 - neighbours);
                return Answer::Opened;
            }
        }
        // ENOMEM most likely: the whole region is one mapping, which needs no new ones.
        if let Some(m) = metered {
            let all = m.counts.iter().enumerate();
            all.for_each(|(chunk, counts)| m.meter.set(counts, self.full(chunk)));
        }
        self.set_bits(0..self.pages());
        if self.protect(&(0..self.pages()), READ_WRITE).is_err() {
            return Answer::Failed;
        }
        self.set_runs(1);
        Answer::Opened
    }

    /// Appends the runs of set bits within `pages` as byte ranges. `take` clears them: C1.
    pub(super) fn report(&self, pages: &Range<usize>, take: bool, out: &mut Vec<Range<usize>>) {
        let from = out.len();
        for word in pages.start / 64..pages.end.div_ceil(64) {
            let bits = &self.written[word];
            let mask = Self::mask(word, pages);
            let mut set = bits.load(Ordering::SeqCst) & mask;
            if set == 0 {
                continue;
            }
            if take {
                set = bits.fetch_and(!mask, Ordering::SeqCst) & mask;
            }
            while set != 0 {
                let low = set.trailing_zeros() as usize;
                let ones = (set >> low).trailing_ones() as usize;
                let first = word * 64 + low;
                push(out, from, self.bytes(&(first..first + ones)));
                set &= !Self::mask(word, &(first..first + ones));
            }
        }
    }

    /// Runs of set bits in the whole region, without allocating.
    pub(super) fn true_runs(&self) -> i64 {
        let mut carry = 0;
        let mut runs = 0;
        for word in &self.written {
            let set = word.load(Ordering::Relaxed);
            runs += i64::from((set & !(set << 1 | carry)).count_ones());
            carry = set >> 63;
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested

    use super::*;

    #[test]
    fn masks() {
        assert_eq!(Region::mask(0, &(0..64)), u64::MAX);
        assert_eq!(Region::mask(0, &(3..5)), 0b11000);
        assert_eq!(Region::mask(1, &(3..66)), 0b11);
        assert_eq!(Region::mask(1, &(3..64)), 0);
        assert_eq!(Region::mask(2, &(127..129)), 1);
    }

    #[test]
    fn runs_cross_words() {
        let region = Region::new(0..200 * 10, 10, 1, Process::current().unwrap(), None);
        region.set_bits(62..130);
        region.set_bits(0..1);
        region.set_bits(199..200);
        assert_eq!(region.true_runs(), 3);
        let mut out = Vec::new();
        region.report(&(0..200), false, &mut out);
        assert_eq!(out, [0..10, 620..1300, 1990..2000]);
        out.clear();
        region.report(&(63..129), true, &mut out);
        assert_eq!(out, [630..1290]);
        assert_eq!(region.true_runs(), 4);
    }
}
