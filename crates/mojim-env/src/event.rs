//! A wake-up that costs nothing while nobody sleeps.
//!
//! Invariant: a `notify` after a sleeper read `seen` wakes it, or the sleeper
//! does not fall asleep (futex compares the sequence number).

use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

/// Something that threads wait for.
#[derive(Debug, Default)]
pub struct Event {
    sequence: AtomicU32,
    sleepers: AtomicU32,
}

impl Event {
    /// An event that no thread waits for.
    pub const fn new() -> Event {
        Event {
            sequence: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// Whether any thread sleeps, or is about to.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.sleepers.load(SeqCst) > 0
    }

    /// The sequence number; a sleeper reads it before it checks the condition.
    #[inline]
    pub fn seen(&self) -> u32 {
        self.sequence.load(SeqCst)
    }

    /// Wakes every sleeper. A system call only if there is one.
    #[inline]
    pub fn notify(&self) {
        if self.sleepers.load(SeqCst) > 0 {
            self.sequence.fetch_add(1, SeqCst);
            crate::futex::futex_wake(&self.sequence, i32::MAX);
        }
    }

    /// Sleeps until the next `notify`, or for `timeout`; not at all if `ready`
    /// returns true. It is called when this thread already counts as a sleeper,
    /// so that no later `notify` is missed.
    pub fn wait_unless(&self, ready: impl Fn() -> bool, timeout: Duration) {
        self.sleepers.fetch_add(1, SeqCst);
        let seen = self.seen();
        if !ready() {
            crate::futex::futex_wait(&self.sequence, seen, timeout);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}
