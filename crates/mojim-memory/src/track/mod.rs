//! Finds the pages of a mapping of a working copy that were stored to.
//!
//! By userfaultfd write-protect in async mode +
//! the `PAGEMAP_SCAN` ioctl (`uffd.rs`, Linux 6.7+), `mprotect` + SIGSEGV where that is missing
//! (`mprotect.rs`), and where it is asked for both, one above the other (`two_level.rs`). This file
//! owns the interface, the choice between them, and the identity of the process (so that a forked
//! child is refused).
//!
//! Invariants, for all kinds:
//! 1. A page whose contents changed since a re-arming [`Tracker::collect`] last reported it (or
//!    since [`attach`]) is reported by the next collect that covers it. More may be reported;
//!    nothing is ever left out.
//! 2. A store that runs at the same time as a re-arming collect is either in memory before that
//!    collect returns, and its page is in that report, or it is reported by the next one. So read
//!    the pages **after** collect has returned, never before.
//! 3. When a re-arming collect fails, everything in its range counts as written.
//! 4. All system calls on memory and descriptors are raw: an interposer of `mmap`, `mprotect` and
//!    `open` in the same process does not see them.

mod meter;
mod mprotect;
mod remote;
mod two_level;
mod uffd;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

pub use meter::Meter;
pub use remote::{Armed, Remote, Unwatched, arm, arm_inherited, own_pagemap};
pub use two_level::{CHUNK, TwoLevel};
pub use uffd::uffd_available;
pub(crate) use uffd::{Marks, unite};

/// Watches one mapping for stores. Dropping it makes the pages ordinary read-write memory again.
///
/// # Limits
/// * **fork**: a child's stores are its own and are not tracked for the parent. In a child every
///   call on an inherited tracker fails (`mark` does nothing); stores keep working. A child may
///   [`attach`] to its own memory.
/// * **mremap** drops the tracking of what it moved; with uffd the next collect then fails with
///   EPERM rather than report nothing.
/// * **alias mappings**: stores through another mapping of the same file, and `write(2)` to the
///   file, are not seen.
/// * `read(2)` and friends **into** the region succeed and are reported with uffd; with mprotect
///   they fail with EFAULT on pages that are not yet written, with two levels on those of closed
///   chunks.
/// * With uffd, a page given back by MADV_DONTNEED is reported once more. Closing all descriptors
///   of the process (`close_range`) ends the tracking; collect then fails.
/// * With mprotect and two levels, a program that installs a SIGSEGV handler after the first attach must chain to
///   the previous one, and a thread that blocks SIGSEGV is killed by its first store.
pub trait Tracker: Send + Sync {
    /// Appends to `out` the page-aligned ranges, relative to the start of the mapping, of the
    /// pages in `start..end` that were written since they were last collected with `rearm`.
    ///
    /// `start` and `end` are page-aligned offsets. The ranges are ascending, and merged where they
    /// touch. With `rearm` each page is write-protected again, atomically with its report;
    /// without, it stays marked as written. On an error `out` is as it was, and after a failed
    /// call with `rearm` all of `start..end` counts as written.
    ///
    /// Of two collects that re-arm overlapping ranges at the same time, each page goes to one: the
    /// callers have to agree on who commits it.
    fn collect(
        &self,
        start: usize,
        end: usize,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> io::Result<()>;

    /// Makes the pages that overlap `start..end` count as written again, since a sync point that
    /// had collected them failed. What lies beyond the mapping is ignored.
    fn mark(&self, start: usize, end: usize);

    /// `"uffd"`, `"mprotect"` or `"two-level"`.
    fn kind(&self) -> &'static str;

    /// Where pages are counted ([`attach_metered`]): what gives them back.
    fn metered(&self) -> Option<&TwoLevel> {
        None
    }
}

/// How to track.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// [`Kind::Uffd`] where the kernel can, else [`Kind::Mprotect`].
    #[default]
    Auto,
    /// userfaultfd WP_ASYNC and PAGEMAP_SCAN. Exact: pages, not chunks.
    Uffd,
    /// mprotect and a SIGSEGV handler. May report pages that were not written.
    Mprotect,
    /// Both, in large regions, where the kernel can: exact, and a collect does not cost more in a
    /// larger region. Small regions, and kernels that cannot, get [`Kind::Auto`].
    TwoLevel,
}

/// Starts tracking stores to `base..base + len`. Nothing counts as written at first.
///
/// # Errors
/// EINVAL when the range is empty or not page aligned; else what the kernel says, for instance
/// ENOSYS or EINVAL for [`Kind::Uffd`] on an old one and EBUSY where another userfaultfd watches
/// the range. ENOSPC: more than 1024 mprotect trackers at once.
///
/// # Safety
/// `[base, base + len)` is a live mapping with `PROT_READ | PROT_WRITE`, private or of shared
/// memory, page aligned, that stays mapped, with its protection left alone, until the tracker is dropped. No other
/// tracker is attached to any part of it.
pub unsafe fn attach(base: *mut u8, len: usize, kind: Kind) -> io::Result<Box<dyn Tracker>> {
    let page = rustix::param::page_size();
    let addr = base as usize;
    if len == 0 || addr == 0 || (addr | len) & (page - 1) != 0 || addr.checked_add(len).is_none() {
        return Err(rustix::io::Errno::INVAL.into());
    }
    check_room(len)?;
    // SAFETY: the caller's promise is that of both functions.
    unsafe {
        match kind {
            Kind::Uffd => uffd::attach(addr, len),
            Kind::Mprotect => mprotect::attach(addr, len),
            // Another userfaultfd may hold this range, or descriptors may be short.
            Kind::Auto if uffd_available() => {
                uffd::attach(addr, len).or_else(|_| mprotect::attach(addr, len))
            }
            Kind::TwoLevel if uffd_available() => {
                two_level::attach(addr, len).or_else(|_| mprotect::attach(addr, len))
            }
            Kind::Auto | Kind::TwoLevel => mprotect::attach(addr, len),
        }
    }
}

/// The same in two levels, however large the range is, with what it holds counted by `meter`.
///
/// # Errors
/// As [`attach`]; and where the kernel has no write tracking by userfaultfd.
///
/// # Safety
/// As [`attach`].
pub unsafe fn attach_metered(
    base: *mut u8,
    len: usize,
    meter: &Arc<Meter>,
) -> io::Result<Box<dyn Tracker>> {
    if !uffd_available() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel has no write tracking by userfaultfd (Linux 6.7), without which memory cannot be bounded; remove `memory` and `max_uncommitted` from the volume's section",
        ));
    }
    check_room(len)?;
    // SAFETY: the caller's promise.
    unsafe { two_level::attach_metered(base as usize, len, meter) }
}

/// Fails where what is noted of so large a range has no room: a program gives its length,
/// and where one of the allocations fails the process ends.
fn check_room(len: usize) -> io::Result<()> {
    // A bit for each page, or some words for each chunk: less than this.
    let mut probe = Vec::<u8>::new();
    let room = probe.try_reserve_exact(len >> 12);
    room.map_err(|_| rustix::io::Errno::NOMEM.into())
}

/// Refuses a range that is not page aligned or not within `len`.
fn check_range(start: usize, end: usize, len: usize) -> io::Result<()> {
    let page = rustix::param::page_size();
    if start > end || end > len || (start | end) & (page - 1) != 0 {
        return Err(rustix::io::Errno::INVAL.into());
    }
    Ok(())
}

/// Appends `range` to `out`, merging it with the last one if that is at or after index `from`.
fn push(out: &mut Vec<Range<usize>>, from: usize, range: Range<usize>) {
    if out.len() > from
        && let Some(last) = out.last_mut()
        && last.end == range.start
    {
        last.end = range.end;
        return;
    }
    out.push(range);
}

/// Which process this is, counted along a line of forks.
///
/// A tracker keeps the value of the process that made it. The value lies in a page that the kernel
/// wipes in a forked child (MADV_WIPEONFORK, Linux 4.14), so that a comparison costs one load and
/// no getpid, and neither a raw `clone` nor a pid used again can fool it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process(u32);

/// The page. Never unmapped once set.
static WIPED_BY_FORK: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// The number last given to a process of this line; a child inherits it and counts on.
static LAST_PROCESS: AtomicU32 = AtomicU32::new(0);

impl Process {
    fn current() -> io::Result<Process> {
        let cell = Self::cell()?;
        let seen = cell.load(Ordering::Acquire);
        if seen != 0 {
            return Ok(Process(seen));
        }
        // The first call in this process. Threads may race; one number wins.
        let mine = LAST_PROCESS.fetch_add(1, Ordering::Relaxed) + 1;
        match cell.compare_exchange(0, mine, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(Process(mine)),
            Err(theirs) => Ok(Process(theirs)),
        }
    }

    /// Fails in a process forked from this one.
    fn check(self) -> io::Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the tracker belongs to the parent of this forked process",
        ))
    }

    fn is_current(self) -> bool {
        // The page exists, since `self` was made from it; in a child it reads 0 or a later number.
        Self::cell().is_ok_and(|cell| cell.load(Ordering::Acquire) == self.0)
    }

    /// Lock free, since another thread may be inside it at the moment of a fork.
    fn cell() -> io::Result<&'static AtomicU32> {
        let known = WIPED_BY_FORK.load(Ordering::Acquire);
        if !known.is_null() {
            // SAFETY: a non-null value points to a page, zeroed or written through atomics only,
            // that is never unmapped.
            return Ok(unsafe { &*known });
        }
        let page = rustix::param::page_size();
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses; advising it,
        // and unmapping it if another thread was faster, touches only itself.
        unsafe {
            let fresh = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                page,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?;
            if let Err(e) = rustix::mm::madvise(fresh, page, Advice::LinuxWipeOnFork) {
                let _ = rustix::mm::munmap(fresh, page);
                return Err(e.into());
            }
            let fresh = fresh.cast::<AtomicU32>();
            match WIPED_BY_FORK.compare_exchange(
                std::ptr::null_mut(),
                fresh,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => Ok(&*fresh),
                Err(theirs) => {
                    let _ = rustix::mm::munmap(fresh.cast(), page);
                    Ok(&*theirs)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
