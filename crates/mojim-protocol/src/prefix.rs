//! The contiguous prefix of completed LSNs, kept by many threads without a lock.
//!
//! Records complete out of order, on several connections; what counts is the
//! largest n such that every LSN up to n is complete (cumulative
//! acknowledgement). Invariants: between resets `get` never goes back; it returns
//! n only if every LSN in (start, n] was marked, or `advance` covered it. At most
//! `window` LSNs may be in flight above the prefix; the caller ensures this with
//! [`Prefix::has_room`].

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// A completion ring: slot `lsn % window` holds `lsn` once that LSN is complete.
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

    /// Marks `lsn` complete. True if this call advanced the prefix.
    ///
    /// No completion is lost between two threads: each first stores its own
    /// slot, then reads `done` and the next slots, all sequentially
    /// consistent; the thread whose store comes last sees the other's.
    #[inline]
    pub fn mark(&self, lsn: u64) -> bool {
        let mask = self.slots.len() as u64 - 1;
        let mut n = self.get();
        if lsn <= n {
            return false;
        }
        self.slots[(lsn & mask) as usize].store(lsn, SeqCst);
        let mut advanced = false;
        loop {
            n = self.done.load(SeqCst);
            if self.slots[((n + 1) & mask) as usize].load(SeqCst) != n + 1 {
                return advanced;
            }
            if self.done.compare_exchange(n, n + 1, SeqCst, SeqCst).is_ok() {
                advanced = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
