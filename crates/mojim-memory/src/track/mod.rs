//! Finds the pages of a mapping of a working copy that were stored to.
//!
//! There are four kinds:
//!
//! - userfaultfd write-protect in async mode with the `PAGEMAP_SCAN` ioctl (`uffd.rs`, Linux
//!   6.7+),
//! - `mprotect` with a SIGSEGV handler, where the kernel lacks that (`mprotect.rs`),
//! - if asked for, both, one above the other (`two_level.rs`),
//! - none at all (`untracked.rs`).
//!
//! This file owns the choice between them. Their interface is `tracker.rs`.
//!
//! Invariants, for all kinds:
//! 1. A page whose contents changed since a re-arming [`Tracker::collect`] last reported it
//!    (or since [`attach`]) is reported by the next collect that covers it. More may be
//!    reported. Nothing is ever left out.
//! 2. A store may run at the same time as a re-arming collect. Then one of two things is
//!    true: it is in memory before that collect returns, and its page is in that report, or
//!    the next collect reports it. So read the pages **after** collect has returned, never
//!    before.
//! 3. When a re-arming collect fails, everything in its range counts as written.
//! 4. All system calls on memory and descriptors are raw: an interposer of `mmap`, `mprotect` and
//!    `open` in the same process does not see them.

mod meter;
mod mprotect;
mod process;
mod remote;
mod tracker;
mod two_level;
mod uffd;
mod untracked;

use std::io;
use std::sync::Arc;

pub use meter::Meter;
pub use remote::{Armed, Remote, Unwatched, arm, arm_inherited, own_pagemap};
pub use tracker::{GivesBack, Tracker};
pub use two_level::CHUNK;
pub use uffd::uffd_available;
pub(crate) use uffd::{Marks, unite};

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
    /// None: every page of which a private mapping has a copy counts as written, always.
    Untracked,
}

/// Starts tracking stores to `base..base + len`. Nothing counts as written at first.
///
/// # Errors
/// EINVAL when the range is empty or not page aligned; else what the kernel says, for instance
/// ENOSYS or EINVAL for [`Kind::Uffd`] on an old kernel, and EBUSY where another userfaultfd
/// watches the range. ENOSPC: more than 1024 mprotect trackers at once. ENOMEM: no memory for
/// what the tracker keeps of the pages.
///
/// # Safety
/// `[base, base + len)` is a live mapping with `PROT_READ | PROT_WRITE`, private or of shared
/// memory, page aligned, that stays mapped, with its protection left alone, until the tracker is
/// dropped. No other tracker is attached to any part of it.
pub unsafe fn attach(
    base: *mut u8,
    len: usize,
    kind: Kind,
    private: bool,
) -> io::Result<Box<dyn Tracker>> {
    let page = rustix::param::page_size();
    let addr = base as usize;
    if len == 0 || addr == 0 || (addr | len) & (page - 1) != 0 || addr.checked_add(len).is_none() {
        return Err(rustix::io::Errno::INVAL.into());
    }
    check_room(len)?;
    // SAFETY: the caller's promise is that of both functions.
    unsafe {
        match kind {
            Kind::Uffd => uffd::attach(addr, len, private),
            Kind::Mprotect => mprotect::attach(addr, len),
            // Another userfaultfd may hold this range, or no descriptor may be left.
            Kind::Auto if uffd_available() => {
                uffd::attach(addr, len, private).or_else(|_| mprotect::attach(addr, len))
            }
            Kind::TwoLevel if uffd_available() => {
                two_level::attach(addr, len).or_else(|_| mprotect::attach(addr, len))
            }
            Kind::Auto | Kind::TwoLevel => mprotect::attach(addr, len),
            // A shared mapping has no copies of its own.
            Kind::Untracked if !private => Err(rustix::io::Errno::INVAL.into()),
            Kind::Untracked => untracked::attach(addr, len),
        }
    }
}

/// [`attach`] in two levels, however large the range is; `meter` counts the pages that it holds.
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

/// Fails if there is no memory for the state of so large a range: the program gives the length, and
/// a failed allocation would end the process.
fn check_room(len: usize) -> io::Result<()> {
    // A bit for each page, or some words for each chunk: less than this.
    let mut probe = Vec::<u8>::new();
    let room = probe.try_reserve_exact(len >> 12);
    room.map_err(|_| rustix::io::Errno::NOMEM.into())
}

#[cfg(test)]
mod tests;
