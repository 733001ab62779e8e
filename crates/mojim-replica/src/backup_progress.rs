//! How much of a copy its backups have, and how much they may lack.
//!
//! Owns two things:
//!
//! - the figures by which a thread that fills a log sees that its backups are too far
//!   behind (back-pressure, Mojim 4.2)
//! - the view of a copy that a `BackupSession` has: a [`Source`]
//!
//! Nothing here waits or sends.
//!
//! Invariant: only backups that follow hold writers back. A backup that is dead, is being
//! copied to or stands still does not count. A backup whose session ended a moment ago
//! still counts, or the lag would grow without bound until the next session begins.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::turns::lock;
use mojim_store::store::Store;

/// How far above the present epoch a node's promise may be to be believed: some thousand
/// promotions by force.
const MOST_AHEAD: u64 = 1 << 32;

/// The term in which a source is filled: a new one when its records may have been dropped
/// or replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Term {
    /// Different for every term of this source.
    pub number: u64,
    /// The epoch that the receiver of its records has promised.
    pub epoch: u64,
    /// The primary that fills it.
    pub primary: String,
}

/// The copy that a backup session forwards.
pub trait Source: Send + Sync {
    /// The copy and its logs.
    fn store(&self) -> &Arc<Store>;
    /// The present term; `None` while it is being settled, or if this node does not
    /// forward.
    fn term(&self) -> Option<Term>;
    /// Whether the term is being settled: this node will forward again in a moment.
    fn is_settling(&self) -> bool;
    /// The contiguous prefix of what is in the logs.
    fn received(&self) -> u64;
    /// The committed LSN, as far as it is known here.
    fn committed(&self) -> u64;
    /// Whether it forwards to node `peer` at all.
    fn serves(&self, peer: &str) -> bool;
    /// The backups that it forwards to.
    fn backups(&self) -> &BackupProgress;
}

/// How far one backup is, for the threads that fill the logs and for the operator.
#[derive(Debug)]
pub struct Progress {
    /// The backup's name.
    pub name: String,
    /// Records flow.
    pub active: AtomicBool,
    /// Everything up to this LSN is in the backup's log.
    pub acked: AtomicU64,
    /// Sessions in which records flowed.
    pub sessions: AtomicU64,
    /// Whole copies that were begun.
    pub copies: AtomicU64,
    /// For each log, the position up to which the backup has it.
    positions: Vec<AtomicU64>,
    /// When it ceases to hold writers back, in nanoseconds; 0: it holds none back.
    counts: AtomicU64,
}

/// It holds writers back until further notice.
const FOLLOWS: u64 = u64::MAX;

impl Progress {
    /// The backup has log `lane` up to `position`.
    pub fn reached(&self, lane: usize, position: u64) {
        self.positions[lane].store(position, Release);
    }

    /// It follows: threads that fill the logs wait for it.
    pub fn follows(&self) {
        self.counts.store(FOLLOWS, Release);
    }

    /// It ceases to hold writers back at `when`, unless it follows again.
    pub fn counts_until(&self, when: Duration) {
        self.counts.store(when.as_nanos() as u64, Release);
    }

    /// Whether it counts: writers wait for it.
    pub fn counts(&self) -> bool {
        self.counts.load(Acquire) != 0
    }

    /// Whether it counts only by an earlier session, and the time for that is over.
    pub fn is_overdue(&self, now: Duration) -> bool {
        let until = self.counts.load(Acquire);
        until != 0 && until != FOLLOWS && now.as_nanos() as u64 >= until
    }

    /// Bytes that it lacks.
    pub fn lag(&self, store: &Store) -> u64 {
        let logs = store.logs().iter().zip(&self.positions);
        logs.map(|(log, at)| log.head().saturating_sub(at.load(Acquire)))
            .sum()
    }
}

/// All backups of one source: what they lack, and how much that may be.
#[derive(Debug)]
pub struct BackupProgress {
    threshold: u64,
    backups: Mutex<Vec<Arc<Progress>>>,
    /// For each log, the position up to which every backup that counts has it; `u64::MAX`
    /// if none counts.
    floors: Vec<AtomicU64>,
    /// Whether any backup counts.
    any: AtomicBool,
    /// The greatest epoch promised by a node that refused to be a backup in an older one.
    outbid: AtomicU64,
    /// Something was received, or became committed.
    pub work: Event,
}

impl BackupProgress {
    /// The backups of a source with `lanes` logs; at most `threshold` bytes wait for
    /// them.
    pub fn new(lanes: usize, threshold: u64) -> BackupProgress {
        BackupProgress {
            threshold,
            backups: Mutex::default(),
            floors: (0..lanes).map(|_| AtomicU64::new(u64::MAX)).collect(),
            any: AtomicBool::new(false),
            outbid: AtomicU64::new(0),
            work: Default::default(),
        }
    }

    /// Adds a backup that is forwarded to from here on.
    pub fn join(&self, name: &str) -> Arc<Progress> {
        let positions = self.floors.iter().map(|_| AtomicU64::new(0)).collect();
        let progress = Arc::new(Progress {
            name: name.to_owned(),
            active: AtomicBool::new(false),
            acked: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            positions,
            counts: AtomicU64::new(0),
        });
        self.backups().push(progress.clone());
        progress
    }

    /// Removes a backup that is forwarded to no more.
    pub fn leave(&self, progress: &Arc<Progress>) {
        self.backups().retain(|b| !Arc::ptr_eq(b, progress));
        self.refresh();
    }

    /// A node has promised `epoch` and is no backup in an older one, such as `now`: its
    /// primary has to begin a greater one (`Session`). What failed promotions cannot lead
    /// to is not believed.
    pub fn outbid_by(&self, epoch: u64, now: u64) {
        if epoch > now && epoch - now <= MOST_AHEAD {
            self.outbid.fetch_max(epoch, AcqRel);
        }
    }

    /// The greatest epoch that [`BackupProgress::outbid_by`] was told; 0 if none.
    pub fn outbid(&self) -> u64 {
        self.outbid.load(Acquire)
    }

    fn backups(&self) -> MutexGuard<'_, Vec<Arc<Progress>>> {
        lock(&self.backups)
    }

    /// The backups and how far they are.
    pub fn progress(&self) -> Vec<Arc<Progress>> {
        self.backups().clone()
    }

    /// Bytes that wait for the slowest backups that count.
    #[inline]
    pub fn lag(&self, store: &Store) -> u64 {
        let mut lag = 0;
        for (floor, log) in self.floors.iter().zip(store.logs()) {
            let floor = floor.load(Acquire);
            if floor != u64::MAX {
                lag += log.head().saturating_sub(floor);
            }
        }
        lag
    }

    /// Whether the logs may not be filled further for now
    /// (`secondary_threshold`, Mojim 4.2).
    #[inline]
    pub fn is_full(&self, store: &Store) -> bool {
        self.any.load(Relaxed) && self.lag(store) > self.threshold && !self.is_broken(store)
    }

    #[cold]
    fn is_broken(&self, store: &Store) -> bool {
        let forgets = store.mutations.forget_floors.is_on();
        let active = || self.backups().iter().any(|b| b.active.load(Acquire));
        store.mutations.no_back_pressure.is_on() || forgets && !active()
    }

    /// Computes the floors anew from the backups that count.
    pub fn refresh(&self) {
        let backups = self.backups();
        for (lane, floor) in self.floors.iter().enumerate() {
            let counting = backups.iter().filter(|b| b.counts());
            let least = counting.map(|b| b.positions[lane].load(Acquire)).min();
            floor.store(least.unwrap_or(u64::MAX), Release);
        }
        let any = backups.iter().any(|b| b.counts());
        self.any.store(any, Release);
    }

    /// The ends of the logs may have been dropped: no backup has more than there is.
    pub fn cut(&self, store: &Store) {
        for b in self.backups().iter() {
            for (log, at) in store.logs().iter().zip(&b.positions) {
                at.fetch_min(log.head(), AcqRel);
            }
        }
        self.refresh();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word of an absurd promise would make the primary ask for one epoch after the other.
    #[test]
    fn a_promise_that_nobody_can_have_made_is_not_outbid() {
        let b = BackupProgress::new(1, 1 << 20);
        for far in [7, 8 + MOST_AHEAD, u64::MAX] {
            b.outbid_by(far, 7);
            assert_eq!(b.outbid(), 0, "{far}");
        }
        b.outbid_by(7 + MOST_AHEAD, 7);
        assert_eq!(b.outbid(), 7 + MOST_AHEAD);
    }
}
