//! The contiguous prefix of completed LSNs, kept by many threads without a lock.
//!
//! Records complete out of order, on several connections. The prefix is the largest n such that
//! every LSN up to n is complete (cumulative acknowledgement).
//!
//! Invariants:
//!
//! - Between resets `get` never goes back.
//! - `get` returns n only if every LSN in (start, n] was marked, or `advance` covered it.
//! - At most `window` LSNs may be in flight above the prefix. The caller ensures this with
//!   [`Prefix::has_room`].

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, Release, SeqCst},
    fence,
};

/// A completion ring: slot `lsn % window` holds `lsn` once that LSN is complete. In a cache line
/// of its own: whoever waits looks at it all the time.
#[repr(align(128))]
pub struct Prefix {
    slots: Box<[AtomicU64]>,
    done: AtomicU64,
}

impl Prefix {
    /// Everything up to `done` is complete; `window` is a power of two.
    pub fn new(window: usize, done: u64) -> Prefix {
        assert!(window.is_power_of_two());
        Prefix {
            slots: (0..window).map(|_| AtomicU64::new(0)).collect(),
            done: AtomicU64::new(done),
        }
    }

    /// Starts again from `done`. No other thread may be using it.
    pub fn reset(&self, done: u64) {
        for s in &self.slots {
            s.store(0, Relaxed);
        }
        self.done.store(done, SeqCst);
    }

    /// Moves the prefix to `done` at once: everything up to it is complete. Marks above
    /// `done` stay.
    pub fn advance(&self, done: u64) {
        self.done.fetch_max(done, SeqCst);
    }

    /// The prefix.
    #[inline]
    pub fn get(&self) -> u64 {
        self.done.load(SeqCst)
    }

    /// Whether `lsn` may be in flight without overrunning the window.
    #[inline]
    pub fn has_room(&self, lsn: u64) -> bool {
        lsn.saturating_sub(self.get()) < self.slots.len() as u64
    }

    /// Up to which LSN [`Prefix::has_room`], until the prefix moves.
    #[inline]
    pub fn most(&self) -> u64 {
        self.get() + self.slots.len() as u64 - 1
    }

    /// Marks `lsn` complete. True if this call advanced the prefix.
    #[inline]
    pub fn mark(&self, lsn: u64) -> bool {
        self.mark_range(lsn, lsn)
    }

    /// Marks every LSN from `first` to `last` complete: at once where those before are. True if
    /// this call advanced the prefix.
    ///
    /// No completion is lost between two threads: each first moves `done` or
    /// stores its own slots, then reads `done` and the next slots, all
    /// sequentially consistent; the thread whose store comes last sees the
    /// other's.
    #[inline]
    pub fn mark_range(&self, first: u64, last: u64) -> bool {
        let mask = self.slots.len() as u64 - 1;
        let mut n = self.get();
        let mut advanced = false;
        while !advanced && n < last {
            if first > n + 1 {
                for lsn in first..=last {
                    self.slots[(lsn & mask) as usize].store(lsn, Release);
                }
                fence(SeqCst);
                break;
            }
            match self.done.compare_exchange(n, last, SeqCst, SeqCst) {
                Ok(_) => advanced = true,
                Err(now) => n = now,
            }
        }
        if n >= last {
            return false;
        }
        loop {
            let n = self.done.load(SeqCst);
            if self.slots[((n + 1) & mask) as usize].load(SeqCst) != n + 1 {
                return advanced;
            }
            if self.done.compare_exchange(n, n + 1, SeqCst, SeqCst).is_ok() {
                advanced = true;
            }
        }
    }
}

/// Completions that are noticed one after the other: those that follow each other are marked
/// together.
pub struct Marks<'a> {
    prefix: &'a Prefix,
    /// What is not marked yet; 0 and 0: nothing.
    first: u64,
    last: u64,
    advanced: bool,
}

impl<'a> Marks<'a> {
    /// None yet.
    #[inline]
    pub fn of(prefix: &'a Prefix) -> Marks<'a> {
        Marks {
            prefix,
            first: 0,
            last: 0,
            advanced: false,
        }
    }

    /// `lsn` is complete.
    #[inline]
    pub fn add(&mut self, lsn: u64) {
        if self.last > 0 && lsn == self.last + 1 {
            self.last = lsn;
            return;
        }
        self.flush();
        (self.first, self.last) = (lsn, lsn);
    }

    /// Marks what was added.
    #[inline]
    pub fn flush(&mut self) {
        if self.last > 0 {
            self.advanced |= self.prefix.mark_range(self.first, self.last);
            (self.first, self.last) = (0, 0);
        }
    }

    /// As `flush`. True if the prefix was advanced by what was added.
    #[inline]
    pub fn end(mut self) -> bool {
        self.flush();
        self.advanced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Marks of ranges, beside those of single LSNs, complete what marks of each would.
    #[test]
    fn a_range_is_marked_as_each_of_it_would_be() {
        let p = Prefix::new(16, 10);
        assert!(!p.mark_range(13, 15));
        assert!(!p.mark(17));
        assert_eq!(p.get(), 10);
        // Up to the gap at 16, over what overlaps.
        assert!(p.mark_range(9, 13));
        assert_eq!(p.get(), 15);
        assert!(!p.mark_range(12, 15));
        let mut m = Marks::of(&p);
        [16, 18, 20].iter().for_each(|l| m.add(*l));
        assert!(m.end());
        assert_eq!(p.get(), 18);
        assert!(p.mark(19));
        assert_eq!((p.get(), p.most()), (20, 35));
        assert!(p.has_room(35) && !p.has_room(36));
    }

    /// Threads that mark ranges of a few LSNs each, as the lanes of a link do.
    #[test]
    fn many_threads_complete_ranges() {
        let n: u64 = if cfg!(miri) { 60 } else { 20_000 };
        let p = Prefix::new(1 << 17, 0);
        std::thread::scope(|s| {
            for t in 0..3 {
                let p = &p;
                s.spawn(move || {
                    for r in (0..n).filter(|r| r % 3 == t) {
                        p.mark_range(4 * r + 1, 4 * r + 1 + r % 4);
                        if r % 4 < 3 {
                            p.mark_range(4 * r + 2 + r % 4, 4 * r + 4);
                        }
                    }
                });
            }
        });
        assert_eq!(p.get(), 4 * n);
    }

    #[test]
    fn a_gap_holds_the_prefix() {
        let p = Prefix::new(8, 10);
        assert!(!p.mark(12));
        assert_eq!(p.get(), 10);
        assert!(p.mark(11));
        assert_eq!(p.get(), 12);
        assert!(!p.mark(11));
        assert!(p.has_room(19) && !p.has_room(20));
    }

    /// Marks that a reset left counted for records that were to come again: a mirror then
    /// acknowledged what it did not have.
    #[test]
    fn a_reset_forgets_every_mark() {
        for (mark, done) in [(12, 10), (15, 13), (18, 10)] {
            let p = Prefix::new(8, 10);
            (11..=mark).filter(|l| *l != 11).for_each(|l| {
                p.mark(l);
            });
            p.reset(done);
            assert!(p.mark(done + 1));
            assert_eq!(p.get(), done + 1, "marked up to {mark}, reset to {done}");
        }
    }

    #[test]
    fn many_threads_complete_everything() {
        let n: u64 = if cfg!(miri) { 200 } else { 40_000 };
        let p = Arc::new(Prefix::new(1 << 16, 0));
        std::thread::scope(|s| {
            for t in 0..4 {
                let p = p.clone();
                s.spawn(move || {
                    (1..=n).filter(|l| l % 4 == t).for_each(|l| {
                        p.mark(l);
                    })
                });
            }
        });
        assert_eq!(p.get(), n);
    }
}
