//! How far a copy from or to this node is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::time::Duration;

/// How far a copy from or to this node is; after it has ended, how it went.
#[derive(Default)]
pub struct Progress {
    running: AtomicBool,
    incoming: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
    moved: AtomicU64,
    kept: AtomicU64,
    /// When it began, and when it ended, in nanoseconds.
    began: AtomicU64,
    ended: AtomicU64,
    received: AtomicU64,
    compared: AtomicU64,
}

/// A snapshot of [`Progress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copying {
    /// The copy has not ended.
    pub running: bool,
    /// This node receives it.
    pub incoming: bool,
    /// Bytes of the volume's files.
    pub total: u64,
    /// How many of these bytes are done.
    pub done: u64,
    /// Bytes that went over the link for the copy.
    pub moved: u64,
    /// Bytes that were taken from the receiver's older files.
    pub kept: u64,
    /// How long the copy has taken.
    pub time: Duration,
}

impl Progress {
    /// A copy of `total` bytes begins.
    pub fn begin(&self, now: Duration, incoming: bool, total: u64) {
        self.began.store(now.as_nanos() as u64, Relaxed);
        self.incoming.store(incoming, Relaxed);
        self.done.store(0, Relaxed);
        self.moved.store(0, Relaxed);
        self.kept.store(0, Relaxed);
        self.total.store(total, Relaxed);
        self.running.store(true, Relaxed);
    }

    /// Everything before byte `done` of the concatenated files is done.
    pub fn at(&self, done: u64) {
        self.done.fetch_max(done, Relaxed);
    }

    /// Bytes went over the link.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Relaxed);
    }

    /// Bytes came from an older file.
    pub fn kept(&self, bytes: u64) {
        self.kept.fetch_add(bytes, Relaxed);
    }

    /// The copy has ended; not `whole`: it failed.
    pub fn end(&self, now: Duration, whole: bool) {
        self.ended.store(now.as_nanos() as u64, Relaxed);
        if !self.running.swap(false, Relaxed) || !whole {
            return;
        }
        self.done.store(self.total.load(Relaxed), Relaxed);
        if self.incoming.load(Relaxed) {
            self.received.fetch_add(1, Relaxed);
            if self.kept.load(Relaxed) > 0 {
                self.compared.fetch_add(1, Relaxed);
            }
        }
    }

    /// Copies taken in by this process, and how many of them rest partly on
    /// what was here.
    pub fn counts(&self) -> [u64; 2] {
        [&self.received, &self.compared].map(|n| n.load(Relaxed))
    }

    /// The copy that runs or was the last; `None` before the first, or if the last one
    /// moved no bytes over the link.
    pub fn get(&self, now: Duration) -> Option<Copying> {
        let running = self.running.load(Relaxed);
        let end = match running {
            true => now.as_nanos() as u64,
            false => self.ended.load(Relaxed),
        };
        let time = end.saturating_sub(self.began.load(Relaxed));
        let c = Copying {
            running,
            time: Duration::from_nanos(time),
            incoming: self.incoming.load(Relaxed),
            total: self.total.load(Relaxed),
            done: self.done.load(Relaxed),
            moved: self.moved.load(Relaxed),
            kept: self.kept.load(Relaxed),
        };
        (c.running || c.moved > 0).then_some(c)
    }
}
