//! Heap memory that stands for what processes map, and the durable image of persistent memory.
//!
//! Owns the allocations.
//!
//! Invariants:
//!
//! - A [`Region`] starts at a page boundary.
//! - It never moves, and it stays valid while a `Memory` or the world holds it.
//! - Nothing here ever makes a reference to its bytes, since the engine stores into them through
//!   raw pointers at any time.

use crate::rng::Rng;
use mojim_env::Memory;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::sync::Arc;

/// What mapped memory is aligned to.
pub(crate) const PAGE: usize = 4096;
/// The unit of a cache flush.
pub(crate) const LINE: usize = 64;

/// Zeroed, page-aligned memory with an address that does not change.
#[derive(Debug)]
pub(crate) struct Region {
    base: *mut u8,
    layout: Layout,
    start: *mut u8,
    len: usize,
}

// SAFETY: a region is only an allocation; code that accesses its bytes does so through
// raw pointers and answers for races.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory of `len` bytes.
    pub(crate) fn new(len: usize) -> Arc<Region> {
        // Aligned by hand: the allocator zeroes large blocks for free only at
        // small alignments.
        let layout = Layout::from_size_align(len + PAGE, 16).expect("a length that fits");
        // SAFETY: the layout's size is at least PAGE, so not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        let start = base.wrapping_add(base.align_offset(PAGE));
        Arc::new(Region {
            base,
            layout,
            start,
            len,
        })
    }

    /// A copy as of now, at another address.
    pub(crate) fn copy(&self) -> Arc<Region> {
        let new = Region::new(self.len);
        // SAFETY: both have `len` bytes and are distinct allocations; the
        // world is driven by one thread, so nobody stores meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(self.start, new.start, self.len) };
        new
    }

    /// The handle that the engine gets.
    pub(crate) fn memory(self: &Arc<Region>) -> Memory {
        let owner: Arc<dyn Any + Send + Sync> = self.clone();
        // SAFETY: the region is valid for `len` bytes while `owner` lives.
        unsafe { Memory::new(self.start, self.len, owner) }
    }

    /// Its length.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, buf: &mut [u8]) {
        assert!(offset <= self.len && buf.len() <= self.len - offset);
        // SAFETY: the range was checked; `buf` is ours; one thread only.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.add(offset), buf.as_mut_ptr(), buf.len());
        }
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: usize, buf: &[u8]) {
        assert!(offset <= self.len && buf.len() <= self.len - offset);
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(buf.as_ptr(), self.start.add(offset), buf.len()) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed only here.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// Persistent memory: what processes see, and what the medium has.
#[derive(Debug)]
pub(crate) struct Pmem {
    pub(crate) region: Arc<Region>,
    pub(crate) image: Vec<u8>,
}

impl Pmem {
    pub(crate) fn new(len: usize) -> Pmem {
        Pmem {
            region: Region::new(len),
            image: vec![0; len],
        }
    }

    /// Where in this memory `ptr` points, if it does.
    pub(crate) fn offset_of(&self, ptr: *mut u8) -> Option<usize> {
        let at = (ptr as usize).checked_sub(self.region.start as usize)?;
        (at < self.region.len).then_some(at)
    }

    /// Makes the cache lines that the range touches durable.
    pub(crate) fn flush(&mut self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let from = offset / LINE * LINE;
        let to = (offset + len).next_multiple_of(LINE).min(self.image.len());
        self.region.read(from, &mut self.image[from..to]);
    }

    /// A flush that a crash interrupts: any of its lines are durable.
    pub(crate) fn flush_torn(&mut self, offset: usize, len: usize, rng: &mut Rng) {
        if len == 0 {
            return;
        }
        let end = (offset + len).min(self.image.len());
        let mut at = offset / LINE * LINE;
        while at < end {
            if rng.coin() {
                self.flush(at, 1);
            }
            at += LINE;
        }
    }

    /// The power goes: each word that differs reaches the medium `keep` times
    /// in 1000, then memory is what the medium has. Returns how many words
    /// were dropped.
    pub(crate) fn power_loss(&mut self, keep: u32, rng: &mut Rng) -> u64 {
        let mut dropped = 0;
        let mut now = [0u8; PAGE];
        for (n, page) in self.image.chunks_mut(PAGE).enumerate() {
            let now = &mut now[..page.len()];
            self.region.read(n * PAGE, now);
            if now == page {
                continue;
            }
            for (new, old) in now.chunks(8).zip(page.chunks_mut(8)) {
                if new != old {
                    if rng.per_mille(keep) {
                        old.copy_from_slice(new);
                    } else {
                        dropped += 1;
                    }
                }
            }
        }
        self.region = Region::new(self.image.len());
        self.region.write(0, &self.image);
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zeroed() {
        for len in [0, 1, 4096, 100_000] {
            let region = Region::new(len);
            assert_eq!(region.start as usize % PAGE, 0);
            let mut bytes = vec![1; len];
            region.read(0, &mut bytes);
            assert!(bytes.iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn a_flush_keeps_whole_lines_and_only_them() {
        let mut pmem = Pmem::new(8192);
        pmem.region.write(0, &[7; 8192]);
        pmem.flush(100, 1);
        let dropped = pmem.power_loss(0, &mut Rng::new(1));
        assert_eq!(dropped, (8192 - 64) / 8);
        let mut bytes = [0; 8192];
        pmem.region.read(0, &mut bytes);
        assert!(bytes[64..128].iter().all(|b| *b == 7));
        assert!(bytes[..64].iter().chain(&bytes[128..]).all(|b| *b == 0));
    }
}
