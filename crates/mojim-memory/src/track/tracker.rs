//! The interface of all trackers ([`Tracker`]), and of those that give pages back ([`GivesBack`]).
//!
//! This file owns the interfaces, and what all kinds share: the check of a range, and how ranges
//! are appended. The invariants that an implementation keeps are in `mod.rs`.

use std::io;
use std::ops::Range;

use super::meter::Meter;

/// Watches one mapping for stores. Dropping it makes the pages ordinary read-write memory again.
///
/// # Limits
/// * **fork**: a child's stores are its own and are not tracked for the parent. In a child every
///   call on an inherited tracker fails (`mark` does nothing); stores keep working. A child may
///   [`attach`](super::attach) to its own memory.
/// * **mremap** drops the tracking of what it moved; with uffd the next collect then fails with
///   EPERM rather than report nothing.
/// * **alias mappings**: stores through another mapping of the same file, and `write(2)` to the
///   file, are not seen.
/// * `read(2)` and friends **into** the region succeed and are reported with uffd; with mprotect
///   they fail with EFAULT on pages that are not yet written, with two levels on those of closed
///   chunks.
/// * With uffd, a page given back by MADV_DONTNEED is reported once more. Closing all descriptors
///   of the process (`close_range`) ends the tracking; collect then fails.
/// * With mprotect and two levels, a program that installs a SIGSEGV handler after the first attach
///   must chain to the previous one, and a thread that blocks SIGSEGV is killed by its first store.
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

    /// `"uffd"`, `"mprotect"`, `"two-level"` or `"untracked"`; of another process's mapping `"remote"` or
    /// `"unwatched"`.
    fn kind(&self) -> &'static str;

    /// The interface that gives pages back, if they are counted
    /// ([`attach_metered`](super::attach_metered)).
    fn metered(&self) -> Option<&dyn GivesBack> {
        None
    }
}

/// Gives back pages of one region, while the program's stores to them are kept out.
/// `two_level/release.rs` tells how, and why nothing is lost.
pub trait GivesBack: Send + Sync {
    /// R1: shuts every chunk that was opened since it was last shut, also if a collect has closed
    /// it since. From then on it counts as what it holds. A chunk that cannot be shut stays open,
    /// and counts as full.
    ///
    /// No thread collects meanwhile.
    ///
    /// # Errors
    /// Those of the page tables' scan. Chunks that were not counted count as full.
    fn shut(&self) -> io::Result<()>;

    /// Counts again what the shut chunks hold: sync points may have found some of it.
    ///
    /// # Errors
    /// As [`GivesBack::shut`].
    fn recount(&self) -> io::Result<()>;

    /// Takes chunks to be tried, those first that were found or tried longest ago, until they hold
    /// `pages` or are `most`. Returns them, and how many pages they hold.
    fn take(&self, pages: usize, most: usize) -> (Vec<usize>, usize);

    /// How many chunks there are to be taken.
    fn holding(&self) -> usize;

    /// Puts a chunk last in the queue, if it holds anything.
    fn put_back(&self, chunk: usize);

    /// Appends the pages of a chunk that have copies in memory, or that were stored to (and may be
    /// swapped out); none if the chunk was opened since it was shut.
    ///
    /// # Errors
    /// Those of the page tables' scan.
    fn copies(&self, chunk: usize, out: &mut Vec<Range<usize>>) -> io::Result<()>;

    /// R4: discards `pages`. False if the chunk was opened since it was shut; then nothing is done.
    ///
    /// # Errors
    /// Those of the system calls; what was not discarded stays.
    ///
    /// # Safety
    /// `pages` are whole pages of this chunk. After it was shut they had what the file has; the
    /// file has that still, and its length. Every record that was begun before the chunk was shut
    /// is applied.
    unsafe fn discard(&self, chunk: usize, pages: &[Range<usize>]) -> io::Result<bool>;

    /// Opens the chunks that overlap these bytes, whatever the bound is: for stores that must not
    /// wait.
    fn let_in(&self, bytes: &Range<usize>);

    /// The meter that counts.
    fn meter(&self) -> &Meter;
}

/// Refuses a range that is not page aligned or not within `len`.
pub(super) fn check_range(start: usize, end: usize, len: usize) -> io::Result<()> {
    let page = rustix::param::page_size();
    if start > end || end > len || (start | end) & (page - 1) != 0 {
        return Err(rustix::io::Errno::INVAL.into());
    }
    Ok(())
}

/// Appends `range` to `out`, merging it with the last one if that is at or after index `from`.
pub(super) fn push(out: &mut Vec<Range<usize>>, from: usize, range: Range<usize>) {
    if out.len() > from
        && let Some(last) = out.last_mut()
        && last.end == range.start
    {
        last.end = range.end;
        return;
    }
    out.push(range);
}
