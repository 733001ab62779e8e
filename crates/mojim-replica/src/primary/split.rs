//! The sync points in parts that were not committed at the last look.
//!
//! Invariant: the committed LSN that a primary tells another node or writes into a record
//! is the end of a sync point. Recovery compares what a record tells with the end of the
//! last sync point that it finds whole. No caller was told of a part of one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

use mojim_env::turns::Mutex;
use mojim_env::turns::lock;
use mojim_store::log::Log;

/// Their first and last LSNs.
#[derive(Default)]
pub(super) struct Split {
    points: Mutex<Vec<(u64, u64)>>,
    /// Length of `points`: while it is 0, no thread takes the lock.
    count: AtomicUsize,
    /// The end of a sync point up to which everything was committed when `points` was
    /// last cut. It counts here even if by another rule less is committed now.
    floor: AtomicU64,
}

impl Split {
    fn points(&self) -> std::sync::MutexGuard<'_, Vec<(u64, u64)>> {
        lock(&self.points)
    }

    /// Adds a sync point in parts. Called before its first part can be seen.
    pub fn add(&self, first: u64, last: u64) {
        let mut points = self.points();
        points.push((first, last));
        self.count.store(points.len(), Release);
    }

    /// Begins the LSNs anew, behind what these logs hold.
    pub fn begin(&self, logs: &[Log]) {
        let mut points = self.points();
        points.clear();
        for log in logs {
            let ends = log.records(log.start()).map(|r| r.header);
            let split = ends.filter(|h| h.end && h.part > 0);
            points.extend(split.map(|h| (h.lsn - h.part as u64, h.lsn)));
        }
        self.floor.store(0, Release);
        self.count.store(points.len(), Release);
    }

    /// The end of the last sync point up to `committed`, which was read before.
    #[inline]
    pub fn whole(&self, committed: u64) -> u64 {
        let whole = match self.count.load(Acquire) {
            0 => committed,
            _ => self.end_before(committed),
        };
        // Read after the count: the thread that emptied the list has set the floor
        // before.
        whole.max(self.floor.load(Acquire))
    }

    #[cold]
    fn end_before(&self, committed: u64) -> u64 {
        let mut points = self.points();
        points.retain(|(_, last)| *last > committed);
        let cut = points.iter().find(|(first, _)| *first <= committed);
        let whole = cut.map_or(committed, |(first, _)| first - 1);
        self.floor.fetch_max(whole, AcqRel);
        self.count.store(points.len(), Release);
        whole
    }
}
