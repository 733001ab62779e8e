//! Which addresses are regions, and of which file.
//!
//! Owns a fixed table, read without a lock: an allocator may call munmap at any
//! time, also while another thread holds any lock.
//!
//! Invariant: a slot whose `start` is above `FILLING` is complete.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Most regions that a process can have under this library.
pub const MAX: usize = 1024;

struct Slot {
    /// 0: free. 1: being filled.
    start: AtomicUsize,
    len: AtomicUsize,
    offset: AtomicU64,
    /// The file's number, and in bit 31 whether stores are allowed.
    file: AtomicU32,
}

const WRITE: u32 = 1 << 31;
const FILLING: usize = 1;

static SLOTS: [Slot; MAX] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        offset: AtomicU64::new(0),
        file: AtomicU32::new(0),
    }
}; MAX];
/// Slots from here on were never used.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Region {
    slot: usize,
    pub start: usize,
    /// Bytes of the file; the mapping reaches to the end of the page.
    pub len: usize,
    pub offset: u64,
    pub file: usize,
    pub write: bool,
}

impl Region {
    /// The end of its last page.
    pub fn mapped_end(&self) -> usize {
        self.start + crate::real::round_up(self.len)
    }

    pub fn file_end(&self) -> u64 {
        self.offset + self.len as u64
    }
}

/// Whether there are regions.
#[inline]
pub fn any() -> bool {
    COUNT.load(Acquire) != 0
}

/// All regions, in no order.
pub fn all() -> impl Iterator<Item = Region> {
    SLOTS[..HIGH.load(Acquire)]
        .iter()
        .enumerate()
        .filter_map(|(i, s)| {
            let start = s.start.load(Acquire);
            (start > FILLING).then(|| {
                let file = s.file.load(Relaxed);
                Region {
                    slot: i,
                    start,
                    len: s.len.load(Relaxed),
                    offset: s.offset.load(Relaxed),
                    file: (file & !WRITE) as usize,
                    write: file & WRITE != 0,
                }
            })
        })
}

/// The regions that share bytes with `[addr, addr + len)`.
pub fn overlapping(addr: usize, len: usize) -> impl Iterator<Item = Region> {
    let end = addr.saturating_add(len);
    all().filter(move |r| r.start < end && addr < r.mapped_end())
}

/// The regions of a file that share bytes with `[at, at + len)` of it.
pub fn of_file(file: usize, at: u64, len: u64) -> impl Iterator<Item = Region> {
    let end = at.saturating_add(len);
    all().filter(move |r| r.file == file && r.offset < end && at < r.file_end())
}

/// A slot for a region that is about to be made.
pub struct Reserved(usize);

/// None if all slots are in use.
pub fn reserve() -> Option<Reserved> {
    let i = SLOTS.iter().position(|s| {
        s.start
            .compare_exchange(0, FILLING, AcqRel, Relaxed)
            .is_ok()
    })?;
    HIGH.fetch_max(i + 1, AcqRel);
    Some(Reserved(i))
}

impl Reserved {
    pub fn fill(self, start: usize, len: usize, offset: u64, file: usize, write: bool) {
        let s = &SLOTS[self.0];
        s.len.store(len, Relaxed);
        s.offset.store(offset, Relaxed);
        s.file
            .store(file as u32 | if write { WRITE } else { 0 }, Relaxed);
        COUNT.fetch_add(1, AcqRel);
        s.start.store(start, Release);
        std::mem::forget(self);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        SLOTS[self.0].start.store(0, Release);
    }
}

/// Takes a region out; returns its slot, to fill it again or to drop it.
pub fn take(r: &Region) -> Reserved {
    SLOTS[r.slot].start.store(FILLING, Release);
    COUNT.fetch_sub(1, AcqRel);
    Reserved(r.slot)
}
