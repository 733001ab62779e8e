//! Tracking by `mprotect` and a SIGSEGV handler, where the kernel lacks what `uffd.rs` needs; and
//! of chunks of pages, as the upper level of `two_level.rs`.
//!
//! It costs 2.7 to 4.6 µs per first-touched page.
//!
//! This file owns the table of ranges that the process's SIGSEGV handler (`mprotect/handler.rs`)
//! looks faults up in, and each tracker's bitmap: one bit a page (below, "page" stands for a chunk
//! where the tracker has chunks), set when the page counts as written.
//!
//! # Invariants
//! 1. **A writable page has its bit set**, but for the time between the two steps of a re-arming
//!    collect that reports it. A set bit on a protected page is allowed: over-reporting.
//! 2. The handler takes no lock, allocates nothing, leaves errno alone, and runs with all signals
//!    blocked, so that no other handler can leave it half way by `longjmp`.
//! 3. A region's bitmap is freed only after its slot left the table and every handler inside the
//!    slot has left.
//! 4. While a region is `alone` no handler opens a page of it, once those have left that were inside
//!    before: they leave, and the store is tried again in a moment. In a forked child, where nobody
//!    would end that, the flag does not count; nor is anything counted there.
//!
//! # Why no store is missed
//! The handler does H0 enter the slot (a counter), H1 set the bit, H2 make the page writable,
//! H3 leave. A re-arming collect does C1 take (clear) the bits, CQ wait until every handler that
//! was in the slot at C1 has left, C2 protect the pages, return; the caller then reads them.
//! * A store before C2 to a page that is writable at C1: its bit was set (invariant 1), the page is
//!   in this report, and the store is in memory before `mprotect` has flushed the TLBs, hence
//!   before the caller reads.
//! * A handler whose H1 came before C1: its bit is in this report. Without CQ its H2 could come
//!   after C2 and leave a writable page without a bit. With CQ its H2 is over before C2, so the
//!   page is protected; if its store has not happened yet, it faults again and is in the next
//!   report.
//! * A handler whose H1 came after C1: its bit stays set, for the next report, whichever way H2
//!   and C2 fall. If the bit is set and C2 protected the page, the store faults once more.
//! * Taking bits after protecting (C2, C1) would lose a store: H1 H2 between the two leaves a
//!   writable page whose bit C1 then clears.
//! * "H1 before C1" is seen by CQ since both are read-modify-writes of one word of the bitmap:
//!   C1 acquires what H1 released, H0 included.
//!
//! CQ waits for handlers only, and a handler waits for nothing but the kernel, so there is no
//! deadlock, also not when a signal handler of the program stores into the region while its thread
//! is inside a collect. Two counters, of which new handlers enter the current one, keep a stream of
//! faults from delaying CQ for ever. Re-arming collects of one region exclude each other.
//!
//! # Number of mappings
//! Each run of writable pages between protected ones costs two kernel mappings, and a process may
//! have `vm.max_map_count` of them (65,530). The rule, with runs counted over all regions:
//! * fewer than max/8 runs: a fault opens one page;
//! * fewer than 3/16: 16 pages, fewer than max/4: 64 pages, aligned, within the region;
//! * from there on, or when the kernel says ENOMEM: the whole region.
//!
//! Chunks are opened as pages are, but for one that follows open ones: then as many, up to
//! [`AHEAD`], as a program that fills a region would fault for each.
//!
//! All pages of what is opened count as written. A re-arming collect that would split a run when
//! the limit is reached leaves it open and reports it again next time. It closes all its runs with
//! one `mprotect`. For mappings to merge again they must share an anon_vma, which is why attaching
//! copies the first page of the range before it protects.
//!
//! # Late faults
//! A thread may fault just before a tracker is dropped and look its address up just after. The
//! pages are writable by then, so it only has to try again: slots keep the range of their last
//! tracker, and a fault in one is retried a bounded number of times before it is passed on.

use std::io;
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use super::meter::{Counts, Meter};
use super::{Process, Tracker, check_range, push};
use mojim_env::threads::SignalsWait;

mod handler;

/// How many trackers of this kind a process can have.
const SLOTS: usize = 1024;
/// How many faults in a dropped tracker's range are retried: more than threads can be on their way
/// into the handler at one moment, and few enough to pass a true crash on within milliseconds.
const LATE_FAULTS: u32 = 1024;
/// Chunks opened by one fault, at most, behind as many open ones.
const AHEAD: usize = 8;

const READ_WRITE: MprotectFlags = MprotectFlags::READ.union(MprotectFlags::WRITE);

/// A [`Slot::state`]: never used, or its last range is of no interest.
const FREE: u32 = 0;
/// Being filled in by an attach.
const CLAIMED: u32 = 1;
/// Holds a range that is tracked, and its region.
const LIVE: u32 = 2;
/// Holds the range of a tracker that was dropped.
const DEAD: u32 = 3;

/// One entry of the handler's table.
struct Slot {
    state: AtomicU32,
    /// `late` faults may still be retried while DEAD.
    late: AtomicU32,
    base: AtomicUsize,
    end: AtomicUsize,
    region: AtomicPtr<Region>,
    /// Handlers inside, by the value of `side` when they entered.
    inside: [AtomicU32; 2],
    side: AtomicU32,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        state: AtomicU32::new(FREE),
        late: AtomicU32::new(0),
        base: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        region: AtomicPtr::new(std::ptr::null_mut()),
        inside: [AtomicU32::new(0), AtomicU32::new(0)],
        side: AtomicU32::new(0),
    }
}; SLOTS];
/// No slot at or beyond this index was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Where the next attach starts to look: going round keeps dead ranges known for long.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Runs of writable pages in all regions: an estimate, corrected now and then.
static RUNS: AtomicI64 = AtomicI64::new(0);

impl Slot {
    fn covers(&self, addr: usize, state: u32) -> bool {
        self.state.load(Ordering::SeqCst) == state
            && self.base.load(Ordering::SeqCst) <= addr
            && addr < self.end.load(Ordering::SeqCst)
    }

    /// H0. The slot's content is stable, if LIVE, until the matching [`Slot::leave`].
    fn enter(&self) -> usize {
        let side = self.side.load(Ordering::SeqCst) as usize & 1;
        self.inside[side].fetch_add(1, Ordering::SeqCst);
        side
    }

    /// H3.
    fn leave(&self, side: usize) {
        self.inside[side].fetch_sub(1, Ordering::SeqCst);
    }

    fn wait_side(&self, side: usize) {
        let mut spins = 0u32;
        while self.inside[side].load(Ordering::SeqCst) != 0 {
            if spins < 200 {
                spins += 1;
                std::hint::spin_loop();
            } else {
                rustix::thread::sched_yield();
            }
        }
    }

    /// CQ: returns after every handler that was inside at the call has left. One caller at a time.
    ///
    /// A handler that read `side` before a flip may enter the old side after it; hence first the
    /// side that is not current, then, after a flip, the one that was.
    fn wait_for_handlers(&self) {
        let idle = |side: usize| self.inside[side].load(Ordering::SeqCst) == 0;
        if idle(0) && idle(1) {
            return;
        }
        let current = self.side.load(Ordering::SeqCst);
        self.wait_side((current as usize & 1) ^ 1);
        self.side.store(current ^ 1, Ordering::SeqCst);
        self.wait_side(current as usize & 1);
    }

    /// A slot for `region`, LIVE.
    fn claim(region: &Region) -> io::Result<&'static Slot> {
        let first = NEXT.fetch_add(1, Ordering::Relaxed);
        for i in 0..SLOTS {
            let index = (first + i) % SLOTS;
            let slot = &TABLE[index];
            let state = slot.state.load(Ordering::SeqCst);
            if (state == FREE || state == DEAD)
                && slot
                    .state
                    .compare_exchange(state, CLAIMED, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
            {
                slot.base.store(region.base, Ordering::SeqCst);
                slot.end.store(region.base + region.len, Ordering::SeqCst);
                slot.region
                    .store(std::ptr::from_ref(region).cast_mut(), Ordering::SeqCst);
                slot.state.store(LIVE, Ordering::SeqCst);
                USED.fetch_max(index + 1, Ordering::SeqCst);
                return Ok(slot);
            }
        }
        Err(Errno::NOSPC.into())
    }
}

/// What the handler needs to know of a tracked range.
struct Region {
    base: usize,
    len: usize,
    /// What one bit stands for, in bytes: a page or a chunk of pages. The last one may be shorter.
    unit: usize,
    /// [`AHEAD`] where units are chunks, else 1.
    ahead: usize,
    /// One bit a page. Bits beyond the last page are never reported.
    written: Box<[AtomicU64]>,
    /// This region's part of [`RUNS`].
    runs: AtomicI64,
    process: Process,
    /// No page is opened while this is set: handlers leave, and their stores are tried again.
    alone: AtomicBool,
    metered: Option<Metered>,
}

/// Of a region whose chunks are counted.
struct Metered {
    meter: Arc<Meter>,
    /// What each chunk counts as.
    counts: Box<[AtomicU32]>,
    /// One bit a chunk: it was opened since it was shut.
    fresh: Box<[AtomicU64]>,
}

/// Zeros, which the kernel makes as they are touched: a Vec of atomics would be written through.
fn zeros(bits: usize) -> Box<[AtomicU64]> {
    let words = vec![0u64; bits.div_ceil(64)].into_boxed_slice();
    const { assert!(align_of::<u64>() == align_of::<AtomicU64>()) };
    // SAFETY: AtomicU64 has the size and validity of u64, and its alignment on the 64-bit targets
    // that have a 64-bit address space to map (checked above); the box is consumed.
    unsafe { Box::from_raw(Box::into_raw(words) as *mut [AtomicU64]) }
}

/// What a handler did.
enum Answer {
    /// The store can go on.
    Opened,
    /// It has to be tried again in a moment.
    Later,
    /// There is no room for it.
    Refused,
    /// It is not ours.
    Failed,
}

impl Region {
    fn pages(&self) -> usize {
        self.len.div_ceil(self.unit)
    }

    /// The bytes of `pages`, from the start of the region.
    fn bytes(&self, pages: &Range<usize>) -> Range<usize> {
        pages.start * self.unit..(pages.end * self.unit).min(self.len)
    }

    /// The pages that `bytes` overlaps.
    fn touched(&self, bytes: &Range<usize>) -> Range<usize> {
        bytes.start / self.unit..bytes.end.div_ceil(self.unit)
    }

    fn count_runs(&self, delta: i64) {
        self.runs.fetch_add(delta, Ordering::Relaxed);
        RUNS.fetch_add(delta, Ordering::Relaxed);
    }

    fn set_runs(&self, runs: i64) {
        let old = self.runs.swap(runs, Ordering::Relaxed);
        RUNS.fetch_add(runs - old, Ordering::Relaxed);
    }

    /// The bits of word `word` that stand for pages of `pages`.
    fn mask(word: usize, pages: &Range<usize>) -> u64 {
        let low = pages.start.saturating_sub(word * 64);
        let high = pages.end.saturating_sub(word * 64).min(64);
        if low >= high {
            return 0;
        }
        (u64::MAX >> (64 - (high - low))) << low
    }

    /// H1.
    fn set_bits(&self, pages: Range<usize>) {
        for word in pages.start / 64..pages.end.div_ceil(64) {
            let mask = Self::mask(word, &pages);
            if let Some(m) = &self.metered {
                m.fresh[word].fetch_or(mask, Ordering::SeqCst);
            }
            self.written[word].fetch_or(mask, Ordering::SeqCst);
        }
    }

    /// What a chunk counts as when it is open.
    fn full(&self, chunk: usize) -> Counts {
        Counts::full(self.bytes(&(chunk..chunk + 1)).len() / rustix::param::page_size())
    }

    /// Makes the chunks of `opened` count as open: as many of them, with `page`, as may be.
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
    fn clear_bits(&self, pages: Range<usize>) {
        for word in pages.start / 64..pages.end.div_ceil(64) {
            self.written[word].fetch_and(!Self::mask(word, &pages), Ordering::SeqCst);
        }
    }

    fn is_set(&self, page: usize) -> bool {
        self.written[page / 64].load(Ordering::SeqCst) & (1 << (page % 64)) != 0
    }

    /// How many of the two pages next to `pages` are written: 0, 1 or 2.
    fn open_neighbours(&self, pages: &Range<usize>) -> i64 {
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
    fn protect(&self, pages: &Range<usize>, flags: MprotectFlags) -> rustix::io::Result<()> {
        let bytes = self.bytes(pages);
        let start = (self.base + bytes.start) as *mut std::ffi::c_void;
        // SAFETY: a part of the range that the caller of `attach` handed over, still mapped; the
        // contents do not change, and our handler answers the faults of those who store.
        unsafe { rustix::mm::mprotect(start, bytes.len(), flags) }
    }

    /// Answers a fault. Called by the handler, between H0 and H3.
    fn open(&self, addr: usize) -> Answer {
        let page = (addr - self.base) / self.unit;
        // In a forked child nobody is alone, and nobody counts.
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
    fn report(&self, pages: &Range<usize>, take: bool, out: &mut Vec<Range<usize>>) {
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
    fn true_runs(&self) -> i64 {
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

/// The rule of "Number of mappings", in runs.
#[derive(Clone, Copy)]
struct Limits {
    single: i64,
    small: i64,
    whole: i64,
}

static LIMITS: OnceLock<Limits> = OnceLock::new();

impl Limits {
    fn of(max_map_count: i64) -> Limits {
        Limits {
            single: max_map_count / 8,
            small: max_map_count * 3 / 16,
            whole: max_map_count / 4,
        }
    }

    /// Async-signal-safe: a load, once the handler is installed.
    fn get() -> Limits {
        LIMITS.get().copied().unwrap_or(Limits::of(65_530))
    }

    fn read() -> Limits {
        let read = || -> rustix::io::Result<i64> {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let path = "/proc/sys/vm/max_map_count";
            let file =
                mojim_env::descriptors::open(|| rustix::fs::open(path, flags, Mode::empty()))?;
            let mut text = [0u8; 24];
            let n = rustix::io::read(&file, &mut text)?;
            let text = std::str::from_utf8(&text[..n]).map_err(|_| Errno::INVAL)?;
            text.trim().parse().map_err(|_| Errno::INVAL)
        };
        Limits::of(read().unwrap_or(65_530).min(1 << 40))
    }
}

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

/// A tracker of units of some pages, which count if there is a meter.
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
    let unit = pages * page;
    let units = len.div_ceil(unit);
    let region = Region {
        base,
        len,
        unit,
        ahead: if pages > 1 { AHEAD } else { 1 },
        written: zeros(units),
        runs: AtomicI64::new(0),
        process,
        alone: AtomicBool::new(false),
        metered: meter.map(|meter| Metered {
            meter,
            counts: (0..units).map(|_| AtomicU32::new(0)).collect(),
            fresh: zeros(units),
        }),
    };

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

    /// Protects runs of units, given by their numbers, of which none is stored to without a fault
    /// when it returns. One that cannot be protected stays open.
    pub(super) fn close(&self, runs: &[Range<usize>]) {
        let region = self.region();
        let _one_at_a_time = self.rearming.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Lets no unit be opened while `f` runs: what is closed at its begin stays closed, and is
    /// not stored to. Stores wait meanwhile, so `f` is short, and does not allocate: who stores may
    /// hold the allocator's lock.
    pub(super) fn alone<T>(&self, f: impl FnOnce(&Alone<'_>) -> T) -> T {
        struct Open<'a>(&'a AtomicBool);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        let region = self.region();
        let _one_at_a_time = self.rearming.lock().unwrap_or_else(PoisonError::into_inner);
        // A handler of the program on this thread could store, and wait for ever.
        let _quiet = SignalsWait::begin();
        region.alone.store(true, Ordering::SeqCst);
        let _open = Open(&region.alone);
        // Who was inside may open still; who enters later sees the flag.
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
        let _one_at_a_time = self.rearming.lock().unwrap_or_else(PoisonError::into_inner);
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
    /// those that were closed otherwise.
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

    /// After units were shut.
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

        let _one_at_a_time = self.rearming.lock().unwrap_or_else(PoisonError::into_inner);
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

        // Keep the estimate near the truth; count where that is for nothing or where it matters.
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
        // Writable first, so that whoever does not find the range any more only has to try again.
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
        // SAFETY: made by Box::into_raw in attach; the slot's users have left, and new ones do not
        // follow its pointer.
        drop(unsafe { Box::from_raw(self.region) });
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested
mod tests {
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
        let region = Region {
            base: 0,
            len: 200 * 10,
            unit: 10,
            ahead: 1,
            written: zeros(200),
            runs: AtomicI64::new(0),
            process: Process::current().unwrap(),
            alone: AtomicBool::new(false),
            metered: None,
        };
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
