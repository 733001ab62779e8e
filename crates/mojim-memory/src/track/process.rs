//! The identity of the process, so that a forked child is refused the use of its parent's trackers.
//!
//! This file owns one page that the kernel wipes in a forked child. Invariant: no two processes of
//! a line of forks find the same number in it.

use std::io;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Which process this is, counted along a line of forks.
///
/// A tracker keeps the value of the process that made it. The value lies in a page that the kernel
/// wipes in a forked child (MADV_WIPEONFORK, Linux 4.14), so that a comparison costs one load and
/// no getpid, and neither a raw `clone` nor a pid used again can fool it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process(pub(super) u32);

/// The page. Never unmapped once set.
static WIPED_BY_FORK: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// The number last given to a process of this line; a child inherits it and counts on.
static LAST_PROCESS: AtomicU32 = AtomicU32::new(0);

impl Process {
    pub(super) fn current() -> io::Result<Process> {
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
    pub(super) fn check(self) -> io::Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the tracker belongs to the parent of this forked process",
        ))
    }

    pub(super) fn is_current(self) -> bool {
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
