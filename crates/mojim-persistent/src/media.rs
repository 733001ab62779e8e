//! The memory of logs: a region of a volume, and memory that is persistent itself.
//!
//! Owns how a word is stored and made durable in either.
//!
//! Invariants:
//! - In a region a fence is one sync point of all that was flushed, so nothing need be ordered
//!   before it: it is there whole or not at all.
//! - In persistent memory stores bypass the cache (`movnti`), so that a fence is all that they
//!   need. The program's own loads see them at once.

use std::ops::Range;
use std::time::{Duration, Instant};

use mojim::{Result, gmsync};

use crate::log::Medium;

/// A word of a mapping.
fn at(base: *mut u8, words: usize, word: usize) -> *mut u64 {
    assert!(word < words);
    // SAFETY: within the mapping, which has as many words.
    unsafe { base.cast::<u64>().add(word) }
}

/// Words of a region.
pub struct InRegion {
    base: *mut u8,
    words: usize,
    /// What the next fence commits; at most a few ranges, since a new one is merged with one
    /// that it touches.
    flushed: Vec<Range<usize>>,
}

// SAFETY: the region stays mapped as long as this, and one thread at a time has this.
unsafe impl Send for InRegion {}

impl InRegion {
    /// # Safety
    /// `base` begins `words` words of a region that stay mapped, and that nobody else uses.
    pub unsafe fn new(base: *mut u8, words: usize) -> InRegion {
        InRegion {
            base,
            words,
            flushed: Vec::with_capacity(8),
        }
    }
}

impl Medium for InRegion {
    fn load(&self, word: usize) -> u64 {
        // SAFETY: in the mapping, which one thread uses.
        unsafe { at(self.base, self.words, word).read() }
    }

    fn store(&mut self, word: usize, value: u64) {
        // SAFETY: as above.
        unsafe { at(self.base, self.words, word).write(value) }
    }

    fn flush(&mut self, word: usize, words: usize) {
        let new = word..word + words;
        let touches = |r: &&mut Range<usize>| r.start <= new.end && new.start <= r.end;
        match self.flushed.iter_mut().find(touches) {
            Some(r) => *r = r.start.min(new.start)..r.end.max(new.end),
            None => self.flushed.push(new),
        }
    }

    fn fence(&mut self) -> Result<()> {
        let range = |r: &Range<usize>| {
            let first = at(self.base, self.words, r.start).cast_const();
            (first.cast::<u8>(), r.len() * 8)
        };
        let ranges = self.flushed.iter().filter(|r| !r.is_empty()).map(range);
        match self.flushed.as_slice() {
            [one] => mojim::msync(range(one).0, range(one).1)?,
            _ => gmsync(&ranges.collect::<Vec<_>>())?,
        };
        self.flushed.clear();
        Ok(())
    }

    fn order(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Waits that long after each store, as memory slower than DRAM would.
#[derive(Clone, Copy)]
pub struct Delay(u64);

impl Delay {
    /// A delay of some nanoseconds; 0: none.
    pub fn of(nanoseconds: u32) -> Delay {
        if nanoseconds == 0 {
            return Delay(0);
        }
        let (from, begin) = (ticks(), Instant::now());
        let mut passed = Duration::ZERO;
        while passed < Duration::from_micros(200) {
            passed = begin.elapsed();
        }
        let ticks = (ticks() - from) as f64 / passed.as_nanos() as f64;
        Delay((f64::from(nanoseconds) * ticks) as u64)
    }

    fn wait(self) {
        if self.0 > 0 {
            let from = ticks();
            while ticks().wrapping_sub(from) < self.0 {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: every x86_64 processor has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    static BEGIN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    BEGIN.elapsed().as_nanos() as u64
}

/// Words of persistent memory, or of memory that stands for it.
pub struct Persistent {
    base: *mut u8,
    words: usize,
    delay: Delay,
}

// SAFETY: as for `InRegion`.
unsafe impl Send for Persistent {}

impl Persistent {
    /// # Safety
    /// As for [`InRegion::new`], of a shared mapping of a file.
    pub unsafe fn new(base: *mut u8, words: usize, delay: Delay) -> Persistent {
        Persistent { base, words, delay }
    }
}

impl Medium for Persistent {
    fn load(&self, word: usize) -> u64 {
        // SAFETY: as for `InRegion`.
        unsafe { at(self.base, self.words, word).read() }
    }

    fn store(&mut self, word: usize, value: u64) {
        // SAFETY: as for `InRegion`; the word is aligned.
        unsafe { store_through(at(self.base, self.words, word), value) }
        self.delay.wait();
    }

    fn flush(&mut self, word: usize, words: usize) {
        if cfg!(not(target_arch = "x86_64")) && words > 0 {
            let first = at(self.base, self.words, word);
            // SAFETY: words of the mapping.
            unsafe { mojim_linux::flush_range(first.cast(), words * 8) }
        }
    }

    fn fence(&mut self) -> Result<()> {
        fence();
        Ok(())
    }
}

/// Stores a word past the cache, where the processor can.
///
/// # Safety
/// An aligned word that can be written.
pub unsafe fn store_through(word: *mut u64, value: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; every x86_64 processor has the instruction.
    unsafe {
        std::arch::asm!("movnti [{}], {}", in(reg) word, in(reg) value, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        word.write_volatile(value);
    }
}

/// Waits until what was stored past the cache is in the memory.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86_64 processor has it.
    unsafe {
        std::arch::asm!("sfence", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
