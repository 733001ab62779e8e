//! Notes on each page of a region.
//!
//! A note has the last LSN of a sync point that wrote to the page and left no image. It also says
//! whether such a sync point is being made.
//!
//! Owns an array that takes memory only for pages that were noted.

use std::sync::atomic::{AtomicU64, Ordering::*};

use rustix::mm::{MapFlags, ProtFlags};

use mojim_env::{Context, Result};

/// Counts one sync point that is being made; the bits below are the LSN. Each
/// thread may make one, and a system can have more than 4095 threads.
const ONE: u64 = 1 << 48;

/// What was noted of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Note(u64);

impl Note {
    /// The last LSN that was noted; `u64::MAX` for one that does not fit.
    pub fn lsn(self) -> u64 {
        match self.0 % ONE {
            lsn if lsn == ONE - 1 => u64::MAX,
            lsn => lsn,
        }
    }

    /// Whether a sync point that will be noted may have read its bytes already.
    pub fn is_under_way(self) -> bool {
        self.0 >= ONE
    }
}

/// The notes of a region.
pub struct PageLsns {
    base: *mut AtomicU64,
    pages: usize,
}

// SAFETY: an array of atomics that lives as long as this.
unsafe impl Send for PageLsns {}
// SAFETY: as above.
unsafe impl Sync for PageLsns {}

impl PageLsns {
    /// No page has a note.
    pub fn new(pages: usize) -> Result<PageLsns> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                pages * 8,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base
            .map_err(std::io::Error::from)
            .context(|| "memory for the pages of a region".into())?;
        Ok(PageLsns {
            base: base.cast(),
            pages,
        })
    }

    fn at(&self, page: usize) -> &AtomicU64 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, which is zeros at first.
        unsafe { &*self.base.add(page) }
    }

    /// What is noted of a page.
    pub fn get(&self, page: usize) -> Note {
        Note(self.at(page).load(Acquire))
    }

    /// Notes a sync point.
    pub fn put(&self, page: usize, lsn: u64) {
        self.change(page, lsn, 0);
    }

    /// A sync point is being made; it has not read the page yet.
    pub fn begin(&self, page: usize) {
        self.at(page).fetch_add(ONE, SeqCst);
    }

    /// The sync point of [`PageLsns::begin`] has this LSN, or 0 if it was not made.
    pub fn end(&self, page: usize, lsn: u64) {
        self.change(page, lsn, ONE);
    }

    fn change(&self, page: usize, lsn: u64, less: u64) {
        let new = |old: u64| {
            let lsn = lsn.min(ONE - 1).max(old % ONE);
            Some((old - old % ONE).wrapping_sub(less) + lsn)
        };
        // `new` never returns `None`.
        let _ = self.at(page).fetch_update(AcqRel, Relaxed, new);
    }
}

impl Drop for PageLsns {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.pages * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_be_under_way_and_no_lsn_is_taken_for_less() {
        let notes = PageLsns::new(1).unwrap();
        (0..50_000).for_each(|_| notes.begin(0));
        notes.put(0, 7);
        assert!(notes.get(0).is_under_way());
        (0..50_000).for_each(|n| notes.end(0, n % 9));
        assert!(!notes.get(0).is_under_way());
        assert_eq!(notes.get(0).lsn(), 8);
        notes.put(0, ONE);
        assert_eq!(notes.get(0).lsn(), u64::MAX);
        notes.put(0, 9);
        assert_eq!(notes.get(0).lsn(), u64::MAX);
        assert!(!notes.get(0).is_under_way());
    }
}
