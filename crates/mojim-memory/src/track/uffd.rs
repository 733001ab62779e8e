//! Tracking by userfaultfd write-protect in async mode and the `PAGEMAP_SCAN` ioctl.
//!
//! Source: Linux `Documentation/admin-guide/mm/userfaultfd.rst` and `pagemap.rst`. Needs Linux
//! 6.7, and no privilege: UFFD_USER_MODE_ONLY.
//!
//! This file owns one userfaultfd per tracker (the kernel's structures are `crate::uffd`'s), and
//! one descriptor of `/proc/self/pagemap` per process.
//!
//! Invariants:
//!
//! 1. A page that is not write-protected in the page tables is a written one: the kernel's state
//!    is the only state, except for the ranges of [`Marks`].
//! 2. PM_SCAN_WP_MATCHING protects a page under the lock of its page table, in the same step that
//!    reports it. It flushes the TLBs before the ioctl returns. So a store that is done by the
//!    time the ioctl returns went through a page that is in the report. Any other store faults,
//!    and its page is in the next report.
//! 3. PM_SCAN_CHECK_WPASYNC is always set: memory that is no longer tracked gives EPERM, never
//!    "nothing written".
//! 4. The descriptors belong to the memory of the process that opened them. A forked child never
//!    uses them. It only closes its copy of the userfaultfd.
//!
//! Costs to know:
//!
//! - Arming fills the page tables of the whole range (8 bytes a page, WP_UNPOPULATED). So a page
//!   read for the first time does not look written.
//! - A scan costs time by the resident page tables of its range, not by what was written.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use mojim_env::locks::lock;
use mojim_env::{descriptors, reserve};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::process::Process;
use super::tracker::{Tracker, check_range, push};
use crate::uffd::{self, UffdioRange, call};

// linux/userfaultfd.h
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

// linux/fs.h
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;

#[repr(C)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<UffdioWriteprotect>() == 24);
const _: () = assert!(size_of::<PageRegion>() == 24);
const _: () = assert!(size_of::<PmScanArg>() == 96);

const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(0xAA, 0x06);
const PAGEMAP_SCAN: Opcode = opcode::read_write::<PmScanArg>(b'f', 16);

/// The descriptor of `/proc/self/pagemap`: the [`Process`] that opened it in the upper half, the
/// descriptor plus one in the lower. 0: none yet.
///
/// It is never closed. A forked child finds another process's number in it and opens its own, so
/// the parent's number stays behind in the child (it is CLOEXEC). Lock free because of fork.
static PAGEMAP: AtomicU64 = AtomicU64::new(0);

pub(super) fn pagemap(process: Process) -> io::Result<RawFd> {
    loop {
        let seen = PAGEMAP.load(Ordering::Acquire);
        if seen != 0 && (seen >> 32) as u32 == process.0 {
            return Ok((seen as u32 - 1) as RawFd);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let fresh =
            descriptors::open(|| rustix::fs::open("/proc/self/pagemap", flags, Mode::empty()))?;
        let packed = (u64::from(process.0) << 32) | (fresh.as_raw_fd() as u64 + 1);
        if PAGEMAP
            .compare_exchange(seen, packed, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            return Ok(fresh.into_raw_fd());
        }
        // Another thread was faster: close ours, use its.
    }
}

/// Ranges that count as written whatever the page tables say, from [`Tracker::mark`] and windows
/// that went.
///
/// Empty most of the time, so that a collect pays one load for it.
#[derive(Default)]
pub(crate) struct Marks {
    any: AtomicBool,
    /// Disjoint, ascending, never touching one another.
    ranges: Mutex<Vec<Range<usize>>>,
}

impl Marks {
    pub(crate) fn add(&self, range: Range<usize>) {
        let mut ranges = lock(&self.ranges);
        ranges.push(range);
        unite(&mut ranges, 0);
        self.any.store(true, Ordering::Release);
    }

    /// Unites what is marked in `wanted` into `out[from..]`, and forgets it if `take`.
    pub(crate) fn report(
        &self,
        wanted: Range<usize>,
        take: bool,
        out: &mut Vec<Range<usize>>,
        from: usize,
    ) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut ranges = lock(&self.ranges);
        let scanned = out.len();
        for range in ranges.iter() {
            let part = range.start.max(wanted.start)..range.end.min(wanted.end);
            if !part.is_empty() {
                out.push(part);
            }
        }
        if out.len() == scanned {
            return;
        }
        unite(out, from);
        if take {
            let old = std::mem::take(&mut *ranges);
            for range in old {
                let before = range.start..range.end.min(wanted.start);
                let after = range.start.max(wanted.end)..range.end;
                ranges.extend([before, after].into_iter().filter(|r| !r.is_empty()));
            }
            self.any.store(!ranges.is_empty(), Ordering::Release);
        }
    }
}

/// Sorts `ranges[from..]` and merges what overlaps or touches.
pub(crate) fn unite(ranges: &mut Vec<Range<usize>>, from: usize) {
    ranges[from..].sort_unstable_by_key(|r| r.start);
    let mut kept = from;
    for i in from + 1..ranges.len() {
        let next = ranges[i].clone();
        let last = &mut ranges[kept];
        if next.start <= last.end {
            last.end = last.end.max(next.end);
        } else {
            kept += 1;
            ranges[kept] = next;
        }
    }
    ranges.truncate(kept + 1);
}

pub(super) struct Uffd {
    base: usize,
    len: usize,
    process: Process,
    fd: OwnedFd,
    pagemap: RawFd,
    marks: Marks,
    /// Nothing was armed in advance, and a page that is not in memory was not stored to: what a private
    /// mapping holds is in memory, or swapped out. (Of shared memory that the kernel has taken out of
    /// the page tables, only the markers are left.)
    is_sparse: bool,
}

/// A larger range is not armed in advance where that can be done without. Each page of it would have a
/// marker in the page tables, which the kernel removes one by one at the process's end: half a minute
/// for each 100 GiB, in which a killed process still held its volume. So a page of such a range that was
/// only read counts as written once.
pub(super) const MOST_ARMED: usize = 16 << 30;

/// `private`: the mapping is a private one.
///
/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn attach(
    base: usize,
    len: usize,
    private: bool,
) -> io::Result<Box<dyn Tracker>> {
    // SAFETY: the caller's promise.
    let tracker = unsafe {
        match private && len > MOST_ARMED {
            true => {
                let mut tracker = registered(base, len)?;
                tracker.is_sparse = true;
                tracker
            }
            false => of_pages(base, len)?,
        }
    };
    Ok(Box::new(tracker))
}

/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn of_pages(base: usize, len: usize) -> io::Result<Uffd> {
    // SAFETY: the caller's promise.
    let tracker = unsafe { registered(base, len)? };
    // From here on dropping `tracker` undoes the registration.
    tracker.arm(&(0..len))?;
    Ok(tracker)
}

/// What the page tables say of pages that are next to each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageFlags {
    /// Changed, in memory: the mapping has copies of its own.
    pub copied: bool,
    /// Stored to since they were last collected.
    pub written: bool,
}

/// As [`of_pages`], but without arming: what is in the page tables now counts as written, and so
/// may the pages of the 2 MiB around one that is touched before they are collected. Costs nothing
/// in a large mapping that is hardly used.
///
/// # Safety
/// As [`super::attach`].
pub(super) unsafe fn registered(base: usize, len: usize) -> io::Result<Uffd> {
    let process = Process::current()?;
    let pagemap = pagemap(process)?;
    let fd = uffd::open(
        true,
        UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_PAGEFAULT_FLAG_WP,
    )?;
    // SAFETY: the range is the caller's; write-protection changes when a page is writable, never
    // what it holds.
    unsafe { uffd::register(fd.as_fd(), base, len, UFFDIO_REGISTER_MODE_WP)? };
    Ok(Uffd {
        base,
        len,
        process,
        fd,
        pagemap,
        marks: Marks::default(),
        is_sparse: false,
    })
}

impl Uffd {
    /// Protects all of `range`, so that no page of it counts as written.
    fn arm(&self, range: &Range<usize>) -> io::Result<()> {
        let mut arm = UffdioWriteprotect {
            range: UffdioRange {
                start: (self.base + range.start) as u64,
                len: range.len() as u64,
            },
            mode: UFFDIO_WRITEPROTECT_MODE_WP,
        };
        loop {
            // SAFETY: the argument of UFFDIO_WRITEPROTECT is a UffdioWriteprotect.
            match unsafe { call(self.fd.as_fd(), UFFDIO_WRITEPROTECT, &mut arm) } {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Gives back the copies of these pages, which show the file from then on and do not count as
    /// written.
    ///
    /// # Safety
    /// No thread stores to them meanwhile, and the file has what they hold.
    pub(super) unsafe fn discard(&self, range: &Range<usize>) -> io::Result<()> {
        let start = (self.base + range.start) as *mut std::ffi::c_void;
        // SAFETY: a part of the caller's mapping, whose bytes stay what they are (the caller's
        // promise).
        unsafe { rustix::mm::madvise(start, range.len(), Advice::LinuxDontNeed)? };
        // If it fails, they count as written: more is reported, nothing left out.
        self.arm(range)
    }

    /// Calls `each` with the pages of `range` that are copied or written, ascending. Allocates
    /// nothing.
    pub(super) fn look(
        &self,
        range: &Range<usize>,
        each: impl FnMut(Range<usize>, PageFlags),
    ) -> io::Result<()> {
        look(self.pagemap, self.base, range, PM_SCAN_CHECK_WPASYNC, each)
    }

    /// [`Tracker::collect`] of `wanted`, where only `parts` of it can have been stored to since
    /// they were last re-armed; `parts` are ascending, and do not touch.
    pub(super) fn collect_parts(
        &self,
        parts: impl Iterator<Item = Range<usize>>,
        wanted: Range<usize>,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        check_range(wanted.start, wanted.end, self.len)?;
        self.process.check()?;
        let from = out.len();
        for part in parts {
            // SAFETY: the descriptor is never closed by us, and open in this process.
            let pagemap = unsafe { BorrowedFd::borrow_raw(self.pagemap) };
            let scan_for = Scan {
                rearm,
                is_sparse: self.is_sparse,
            };
            if let Err(e) = scan(pagemap, self.base, part, scan_for, out) {
                out.truncate(from);
                if rearm {
                    // Some pages may be protected again without having been reported.
                    self.marks.add(wanted);
                }
                return Err(e);
            }
        }
        self.marks.report(wanted, rearm, out, from);
        Ok(())
    }
}

/// [`Uffd::look`], by the page tables of this process. Where no userfaultfd watches, every copy counts
/// as written, also one that is swapped out.
///
/// # Errors
/// Those of PAGEMAP_SCAN, which kernels before 6.7 lack.
pub(super) fn look(
    pagemap: RawFd,
    base: usize,
    range: &Range<usize>,
    flags: u64,
    mut each: impl FnMut(Range<usize>, PageFlags),
) -> io::Result<()> {
    let stop = (base + range.end) as u64;
    let mut at = (base + range.start) as u64;
    let mut regions = [const { MaybeUninit::<PageRegion>::uninit() }; 32];
    while at < stop {
        let mut arg = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags,
            start: at,
            end: stop,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            // In memory and not the file's, or swapped out.
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_WRITTEN,
        };
        // SAFETY: as in `scan_into`.
        let found = unsafe {
            let pagemap = BorrowedFd::borrow_raw(pagemap);
            call(pagemap, PAGEMAP_SCAN, &mut arg)?
        };
        if arg.walk_end <= at || arg.walk_end > stop || found > regions.len() {
            return Err(io::Error::other("PAGEMAP_SCAN gave an impossible answer"));
        }
        for region in &regions[..found] {
            // SAFETY: the kernel filled the first `found` entries.
            let region = unsafe { region.assume_init_ref() };
            let found = PageFlags {
                copied: region.categories & PAGE_IS_PRESENT != 0,
                written: region.categories & PAGE_IS_WRITTEN != 0,
            };
            let (start, end) = (region.start as usize, region.end as usize);
            // Pages that are not there, and only have a marker, are neither.
            if found.copied || found.written {
                each(start - base..end - base, found);
            }
        }
        at = arg.walk_end;
    }
    Ok(())
}

/// How pages are scanned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scan {
    /// What is reported is protected again.
    pub rearm: bool,
    /// A page that is not in memory was not written.
    pub is_sparse: bool,
}

/// Appends the pages of `part` that were written, relative to `base`, by the page tables of
/// whichever memory `pagemap` was opened for. What is not mapped there is not reported.
pub(super) fn scan(
    pagemap: BorrowedFd<'_>,
    base: usize,
    part: Range<usize>,
    how: Scan,
    out: &mut Vec<Range<usize>>,
) -> io::Result<()> {
    // The kernel allocates a vector of up to 512 entries for each call: ask for few at first.
    const FIRST: usize = 32;
    // They lie on the stack of the program's thread.
    const MORE: usize = 128;
    let from = out.len();
    let mut left = (base + part.start) as u64..(base + part.end) as u64;
    let mut few = [const { MaybeUninit::<PageRegion>::uninit() }; FIRST];
    left.start = scan_into(pagemap, base, &left, how, &mut few, out, from)?;
    if !left.is_empty() {
        let mut many = [const { MaybeUninit::<PageRegion>::uninit() }; MORE];
        while !left.is_empty() {
            left.start = scan_into(pagemap, base, &left, how, &mut many, out, from)?;
        }
    }
    Ok(())
}

/// One PAGEMAP_SCAN of `left`; gives the address where it ended.
#[inline]
fn scan_into(
    pagemap: BorrowedFd<'_>,
    base: usize,
    left: &Range<u64>,
    how: Scan,
    regions: &mut [MaybeUninit<PageRegion>],
    out: &mut Vec<Range<usize>>,
    from: usize,
) -> io::Result<u64> {
    let mut arg = PmScanArg {
        size: size_of::<PmScanArg>() as u64,
        flags: PM_SCAN_CHECK_WPASYNC | if how.rearm { PM_SCAN_WP_MATCHING } else { 0 },
        start: left.start,
        end: left.end,
        walk_end: 0,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        // Exactly this mask in both, and no others, takes the kernel's fast path. There a page that is
        // not in memory, and has no marker, counts as written.
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: match how.is_sparse {
            true => PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            false => 0,
        },
        return_mask: PAGE_IS_WRITTEN,
    };
    // SAFETY: the argument of PAGEMAP_SCAN is a PmScanArg, whose vec and vec_len are those of
    // `regions`; protecting pages of the range changes no contents.
    let found = unsafe { call(pagemap, PAGEMAP_SCAN, &mut arg)? };
    if arg.walk_end <= left.start || arg.walk_end > left.end || found > regions.len() {
        // Not a kernel that we know, or the descriptor is no pagemap any more.
        return Err(io::Error::other("PAGEMAP_SCAN gave an impossible answer"));
    }
    // What was found is marked clean by now: where there is no room for it, the caller marks it.
    reserve::room(out, found)?;
    for region in &regions[..found] {
        // SAFETY: the kernel filled the first `found` entries.
        let region = unsafe { region.assume_init_ref() };
        let start = region.start as usize - base;
        push(out, from, start..region.end as usize - base);
    }
    Ok(arg.walk_end)
}

impl Tracker for Uffd {
    fn collect(
        &self,
        start: usize,
        end: usize,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()> {
        let whole = (start < end).then_some(start..end);
        self.collect_parts(whole.into_iter(), start..end, rearm, out)
    }

    fn mark(&self, start: usize, end: usize) {
        // In a forked child the lock may be held by a thread that is not there.
        if !self.process.is_current() {
            return;
        }
        let page = rustix::param::page_size();
        let start = start & !(page - 1);
        let end = end.min(self.len).next_multiple_of(page);
        if start < end {
            self.marks.add(start..end);
        }
    }

    fn kind(&self) -> &'static str {
        "uffd"
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        // In a forked child the descriptor stands for the parent's memory: only close it. In the
        // parent closing is not enough, since children may hold copies.
        if self.process.is_current() {
            // SAFETY: the range is still mapped (the promise of attach); its pages become
            // ordinary ones.
            let _ = unsafe { uffd::unregister(self.fd.as_fd(), self.base, self.len) };
        }
    }
}

/// True when this kernel can do userfaultfd WP_ASYNC and PAGEMAP_SCAN on a private file mapping.
///
/// Found out once, by really tracking the pages of a small memfd; then remembered.
pub fn uffd_available() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => {
            // Two threads may both probe; they find the same.
            let yes = probe().unwrap_or(false);
            KNOWN.store(if yes { YES } else { NO }, Ordering::Relaxed);
            yes
        }
        known => known == YES,
    }
}

fn probe() -> io::Result<bool> {
    let page = rustix::param::page_size();
    let len = 3 * page;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = descriptors::open(|| rustix::fs::memfd_create("mojim-probe", flags))?;
    rustix::fs::ftruncate(&file, len as u64)?;
    // SAFETY: a fresh mapping at an address that the kernel chooses, of a file that nobody else
    // has; it is unmapped below, after the tracker is gone.
    unsafe {
        let base = rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
            &file,
            0,
        )?;
        let found = probe_mapping(base.cast(), page);
        rustix::mm::munmap(base, len)?;
        found
    }
}

/// # Safety
/// `base` is a fresh private mapping of three pages that nothing else uses.
unsafe fn probe_mapping(base: *mut u8, page: usize) -> io::Result<bool> {
    let mut found = Vec::new();
    // SAFETY: the caller's promise; the tracker is dropped before the function returns.
    unsafe {
        let tracker = attach(base as usize, 3 * page, true)?;
        base.read_volatile();
        tracker.collect(0, 3 * page, true, &mut found)?;
        let clean = found.is_empty();
        base.add(page).write_volatile(1);
        tracker.collect(0, 3 * page, true, &mut found)?;
        let exact = found.pop() == Some(page..2 * page) && found.is_empty();
        tracker.collect(0, 3 * page, true, &mut found)?;
        Ok(clean && exact && found.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_kernels() {
        // The values of the generic ioctl encoding (x86-64, aarch64, riscv64).
        assert_eq!(UFFDIO_WRITEPROTECT, 0xC018_AA06);
        assert_eq!(PAGEMAP_SCAN, 0xC060_6610);
    }

    #[test]
    fn marks_unite_and_are_taken_in_part() {
        let marks = Marks::default();
        marks.add(40..50);
        marks.add(10..20);
        marks.add(20..30);
        let mut out = vec![5..6, 12..14, 30..35];
        marks.report(15..45, true, &mut out, 1);
        assert_eq!(out, [5..6, 12..14, 15..35, 40..45]);
        assert_eq!(*marks.ranges.lock().unwrap(), [10..15, 45..50]);
        out.clear();
        marks.report(0..100, false, &mut out, 0);
        assert_eq!(out, [10..15, 45..50]);
        out.clear();
        marks.report(0..100, true, &mut out, 0);
        assert_eq!(out, [10..15, 45..50]);
        assert!(!marks.any.load(Ordering::Relaxed));
    }
}
