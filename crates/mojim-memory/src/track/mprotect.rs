//! Tracking by `mprotect` and a SIGSEGV handler, where the kernel lacks what `uffd.rs` needs.
//!
//! It also tracks chunks of pages, as the upper level of `two_level.rs`.
//!
//! It costs 2.7 to 4.6 µs per first-touched page.
//!
//! This file owns the tracker, which closes pages. The process's SIGSEGV handler
//! (`mprotect/handler.rs`) opens them. It looks faults up in a table of ranges
//! (`mprotect/table.rs`). Each range has a bitmap (`mprotect/region.rs`) with one bit a page, set
//! when the page counts as written. Below, "page" stands for a chunk where the tracker has chunks.
//!
//! # Invariants
//! 1. **A writable page has its bit set**, but for the time between the two steps of a re-arming
//!    collect that reports it. A set bit on a protected page is allowed: over-reporting.
//! 2. The handler takes no lock, allocates nothing and leaves errno alone. It runs with all signals
//!    blocked, so that no other handler can leave it half way by `longjmp`.
//! 3. A region's bitmap is freed only after its slot left the table and every handler inside the
//!    slot has left.
//! 4. While a region is `alone` no handler opens a page of it, once those that were inside before
//!    have left. Handlers leave, and their stores are tried again in a moment. A forked child
//!    ignores the flag, for no thread would clear it there. Nothing is counted there either.
//!
//! # Why no store is missed
//! The handler does:
//!
//! * H0: enter the slot (a counter).
//! * H1: set the bit.
//! * H2: make the page writable.
//! * H3: leave.
//!
//! A re-arming collect does:
//!
//! * C1: take (clear) the bits.
//! * CQ: wait until every handler that was in the slot at C1 has left.
//! * C2: protect the pages, and return.
//!
//! The caller then reads the pages. The cases:
//!
//! * A store before C2 to a page that is writable at C1: its bit was set (invariant 1). So the page
//!   is in this report. The store is in memory before `mprotect` has flushed the TLBs, hence before
//!   the caller reads.
//! * A handler whose H1 came before C1: its bit is in this report. Without CQ its H2 could come
//!   after C2 and leave a writable page without a bit. With CQ its H2 is over before C2, so the
//!   page is protected. If its store has not happened yet, it faults again and is in the next
//!   report.
//! * A handler whose H1 came after C1: its bit stays set, for the next report, whichever way H2
//!   and C2 fall. If the bit is set and C2 protected the page, the store faults once more.
//! * Taking bits after protecting (C2, C1) would lose a store: H1 H2 between the two leaves a
//!   writable page whose bit C1 then clears.
//! * "H1 before C1" is seen by CQ since both are read-modify-writes of one word of the bitmap:
//!   C1 acquires what H1 released, H0 included.
//!
//! CQ waits for handlers only, and a handler waits for nothing but the kernel, so there is no
//! deadlock. That holds also when a signal handler of the program stores into the region while its
//! thread is inside a collect. Two counters, of which new handlers enter the current one, keep a
//! stream of faults from delaying CQ for ever. Re-arming collects of one region exclude each other.
//!
//! # Number of mappings
//! Each run of writable pages between protected ones costs two kernel mappings. A process may have
//! `vm.max_map_count` of them (65,530). The rule, with runs counted over all regions:
//!
//! * fewer than max/8 runs: a fault opens one page.
//! * fewer than 3/16: 16 pages, aligned, within the region.
//! * fewer than max/4: 64 pages, likewise.
//! * from there on, or when the kernel says ENOMEM: the whole region.
//!
//! Chunks are opened as pages are, with one difference. A fault in a chunk that follows open chunks
//! opens as many as those, up to `AHEAD`. A program that fills a region would otherwise fault for
//! each.
//!
//! All pages of what is opened count as written. A re-arming collect that would split a run when
//! the limit is reached leaves it open and reports it again next time. It closes all its runs with
//! one `mprotect`. For mappings to merge again they must share an anon_vma. That is why attaching
//! copies the first page of the range before it protects.
//!
//! # Late faults
//! A thread may fault just before a tracker is dropped and look its address up just after. The
//! pages are writable by then, so it only has to try again. Slots keep the range of their last
//! tracker. A fault in one is retried a bounded number of times before it is passed on.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use mojim_env::locks::lock;
use mojim_env::threads::SignalsWait;
use rustix::mm::{Advice, MprotectFlags};

use super::meter::{Counts, Meter};
use super::process::Process;
use super::tracker::{Tracker, check_range, push};
use limits::{Limits, RUNS};
use region::{AHEAD, READ_WRITE, Region};
use table::{DEAD, Slot};

mod handler;
mod limits;
mod region;
mod table;

/// How many faults in a dropped tracker's range are retried: more than threads can be on their way
/// into the handler at one moment, and few enough to pass a true crash on within milliseconds.
const LATE_FAULTS: u32 = 1024;

pub(super) struct Mprotect {
    process: Process,
    slot: &'static Slot,
    /// Pointed to by the slot; made from a Box, freed by drop.
    region: *mut Region,
    /// Held by a re-arming collect.
    rearming: Mutex<()>,
}

// SAFETY: the pointer is an owned Box in all but name, for the slot shares it; a Region is made of
// atomics and constants.
unsafe impl Send for Mprotect {}
// SAFETY: as above.
unsafe impl Sync for Mprotect {}

/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn attach(base: usize, len: usize) -> io::Result<Box<dyn Tracker>> {
    // SAFETY: the caller's promise.
    Ok(Box::new(unsafe { of_units(base, len, 1, None)? }))
}

/// A tracker of units of `pages` pages, which are counted if there is a meter.
///
/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn of_units(
    base: usize,
    len: usize,
    pages: usize,
    meter: Option<Arc<Meter>>,
) -> io::Result<Mprotect> {
    let process = Process::current()?;
    handler::install()?;
    let page = rustix::param::page_size();
    let ahead = if pages > 1 { AHEAD } else { 1 };
    let region = Region::new(base..base + len, pages * page, ahead, process, meter);

    // Gives the whole range one anon_vma (see "Number of mappings"). Fails harmlessly before Linux
    // 5.14, and beyond the end of a file: then mappings merge less well.
    let start = base as *mut std::ffi::c_void;
    // SAFETY: populating a page of the caller's range changes no contents.
    let _ = unsafe { rustix::mm::madvise(start, page, Advice::LinuxPopulateWrite) };

    let region = Box::into_raw(Box::new(region));
    // SAFETY: made above; shared only with the handler, which reads it.
    let shared = unsafe { &*region };
    let slot = match Slot::claim(shared) {
        Ok(slot) => slot,
        Err(e) => {
            // SAFETY: nobody else has the pointer.
            drop(unsafe { Box::from_raw(region) });
            return Err(e);
        }
    };
    // From here on dropping `tracker` undoes everything. Protect last: the table is ready.
    let tracker = Mprotect {
        process,
        slot,
        region,
        rearming: Mutex::new(()),
    };
    shared.protect(&(0..shared.pages()), MprotectFlags::READ)?;
    Ok(tracker)
}

impl Mprotect {
    fn region(&self) -> &Region {
        // SAFETY: valid until drop, and never mutated but through atomics.
        unsafe { &*self.region }
    }

    /// C2 of a run of pages. False: they are open, in whole or in part, as they were.
    fn protect(&self, run: &Range<usize>) -> bool {
        let region = self.region();
        let neighbours = region.open_neighbours(run);
        let full = RUNS.load(Ordering::Relaxed) >= Limits::get().whole;
        !(neighbours == 2 && full) && region.protect(run, MprotectFlags::READ).is_ok()
    }

    /// Appends the open units that overlap `bytes`, as runs of unit numbers.
    pub(super) fn open(&self, bytes: &Range<usize>, out: &mut Vec<Range<usize>>) {
        let region = self.region();
        let from = out.len();
        // As in `collect`: a store by this thread may have been let through by another's fault.
        fence(Ordering::SeqCst);
        region.report(&region.touched(bytes), false, out);
        for run in &mut out[from..] {
            *run = region.touched(run);
        }
    }

    /// Protects runs of units, given by their numbers: from its return on a store to any of them
    /// faults. A run that cannot be protected stays open.
    pub(super) fn close(&self, runs: &[Range<usize>]) {
        let region = self.region();
        let _one_at_a_time = lock(&self.rearming);
        for run in runs {
            region.clear_bits(run.clone()); // C1
        }
        self.slot.wait_for_handlers(); // CQ
        for run in runs {
            if !self.protect(run) {
                region.set_bits(run.clone());
            }
        }
        region.set_runs(region.true_runs());
    }

    /// Lets no unit be opened while `f` runs: what is closed when it begins stays closed, and is
    /// not stored to. Stores wait meanwhile, so `f` is short, and does not allocate: a thread that
    /// stores may hold the allocator's lock.
    pub(super) fn alone<T>(&self, f: impl FnOnce(&Alone<'_>) -> T) -> T {
        struct Open<'a>(&'a AtomicBool);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        let region = self.region();
        let _one_at_a_time = lock(&self.rearming);
        // A signal handler of the program on this thread could store, and wait for ever.
        let _quiet = SignalsWait::begin();
        region.alone.store(true, Ordering::SeqCst);
        let _open = Open(&region.alone);
        // A handler that was inside may still open units; one that enters later sees the flag.
        self.slot.wait_for_handlers();
        f(&Alone {
            tracker: self,
            region,
        })
    }

    /// Opens the units that overlap `bytes`, whatever they count as then: for stores that must not
    /// wait.
    pub(super) fn let_in(&self, bytes: &Range<usize>) {
        let region = self.region();
        let units = region.touched(bytes);
        let _one_at_a_time = lock(&self.rearming);
        if let Some(m) = &region.metered {
            for unit in units.clone() {
                m.meter.set(&m.counts[unit], region.full(unit));
            }
        }
        region.set_bits(units.clone());
        // Where it fails, the handler opens more.
        let _ = region.protect(&units, READ_WRITE);
        region.set_runs(region.true_runs());
    }

    /// Appends the units that were opened since they were shut, as runs: all that are open, and
    /// those that a collect has closed.
    pub(super) fn fresh(&self, out: &mut Vec<Range<usize>>) {
        let region = self.region();
        let from = out.len();
        let fresh = region.metered.iter().flat_map(|m| m.fresh.iter());
        for (word, bits) in fresh.enumerate() {
            let mut left = bits.load(Ordering::SeqCst);
            while left != 0 {
                let unit = word * 64 + left.trailing_zeros() as usize;
                left &= left - 1;
                push(out, from, unit..unit + 1);
            }
        }
    }

    /// Whether a unit was opened since it was shut.
    pub(super) fn is_fresh(&self, unit: usize) -> bool {
        let fresh = self.region().metered.as_ref().map(|m| &m.fresh[unit / 64]);
        fresh.is_none_or(|bits| bits.load(Ordering::SeqCst) & (1 << (unit % 64)) != 0)
    }

    /// What a unit counts as.
    pub(super) fn counts(&self, unit: usize) -> Counts {
        let m = self.region().metered.as_ref();
        m.map_or(Counts::full(0), |m| {
            Counts::of(m.counts[unit].load(Ordering::SeqCst))
        })
    }
}

/// What can be done while no unit is opened.
pub(super) struct Alone<'a> {
    tracker: &'a Mprotect,
    region: &'a Region,
}

impl Alone<'_> {
    /// Closes a run of units; from now on none of them is fresh. False: they are open.
    pub fn shut(&self, units: &Range<usize>) -> bool {
        let region = self.region;
        let Some(m) = &region.metered else {
            return false;
        };
        // The order of `close`; the handlers have left.
        region.clear_bits(units.clone());
        if !self.tracker.protect(units) {
            region.set_bits(units.clone());
            return false;
        }
        for word in units.start / 64..units.end.div_ceil(64) {
            m.fresh[word].fetch_and(!Region::mask(word, units), Ordering::SeqCst);
        }
        true
    }

    /// Makes a closed unit count as this.
    pub fn count(&self, unit: usize, counts: Counts) {
        if let Some(m) = &self.region.metered {
            m.meter.set(&m.counts[unit], counts);
        }
    }

    /// Called after units were shut.
    pub fn count_runs(&self) {
        self.region.set_runs(self.region.true_runs());
    }
}

impl Tracker for Mprotect {
    fn collect(
        &self,
        start: usize,
        end: usize,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        let region = self.region();
        check_range(start, end, region.len)?;
        self.process.check()?;
        if start == end {
            return Ok(());
        }
        let pages = start / region.unit..end / region.unit;
        let from = out.len();
        // A store by this thread that succeeded because another thread's fault opened its page:
        // the load of the bit must not be moved before it.
        fence(Ordering::SeqCst);
        if !rearm {
            region.report(&pages, false, out);
            return Ok(());
        }

        let _one_at_a_time = lock(&self.rearming);
        region.report(&pages, true, out); // C1
        let (Some(first), Some(last)) = (out.get(from), out.last()) else {
            return Ok(());
        };
        let hull = first.start / region.unit..last.end / region.unit;
        let closed = (out.len() - from) as i64;
        self.slot.wait_for_handlers(); // CQ

        // Everything in the hull that is not in the report is protected, or was opened after C1
        // and has its bit set, so that protecting all of it is right, and one call.
        let neighbours = region.open_neighbours(&hull);
        if !self.protect(&hull) {
            // C2 did not happen, or in part: the pages count as written, which is always allowed.
            for range in &out[from..] {
                region.set_bits(region.touched(range));
            }
            return Ok(());
        }

        // Keep the estimate near the truth; count where that costs nothing or where it matters.
        let known = region.runs.load(Ordering::Relaxed);
        if pages == (0..region.pages()) || known >= Limits::get().single / 4 {
            region.set_runs(region.true_runs());
        } else {
            region.count_runs(neighbours - closed);
        }
        Ok(())
    }

    fn mark(&self, start: usize, end: usize) {
        let region = self.region();
        let pages = region.touched(&(start..end.min(region.len)));
        if !pages.is_empty() {
            // Set bits on protected pages are allowed (invariant 1).
            region.set_bits(pages);
        }
    }

    fn kind(&self) -> &'static str {
        "mprotect"
    }
}

impl Drop for Mprotect {
    fn drop(&mut self) {
        let region = self.region();
        // Writable first, so that a thread whose fault does not find the range any more only has to
        // try again.
        let _ = region.protect(&(0..region.pages()), READ_WRITE);
        region.set_runs(0);
        self.slot.late.store(LATE_FAULTS, Ordering::SeqCst);
        self.slot.state.store(DEAD, Ordering::SeqCst);
        if !self.process.is_current() {
            // A forked child: handlers that were inside at the fork are not here to leave. Leak
            // the bitmap rather than wait.
            return;
        }
        // A handler that enters from here on sees that the slot is not LIVE.
        self.slot.wait_side(0);
        self.slot.wait_side(1);
        if let Some(m) = &region.metered {
            let none = Counts::full(0);
            m.counts.iter().for_each(|c| m.meter.set(c, none));
            m.meter.next_turn();
        }
        // SAFETY: made by Box::into_raw in `of_units`; the slot's users have left, and new ones do
        // not follow its pointer.
        drop(unsafe { Box::from_raw(self.region) });
    }
}
