//! The requests that background readers of a store's logs or files make of it.
//!
//! They ask that records stay in the logs, that the files stand still, that changes are noted.
//!
//! Invariants:
//!
//! - A firm [`Hold`] binds for as long as it lives.
//! - A [`Pause`] and a [`Watch`] may be revoked by a thread that needs the files. Their holders
//!   learn this from the watch.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Weak};

use mojim_env::turns::lock;
use mojim_format::message::COPY_PAGE;

use super::state::{Hold, Store, Watch};
use mojim_env::turns::Mutex;

impl Hold {
    /// The reader has everything up to `lsn`.
    pub fn advance(&self, lsn: u64) {
        self.lsn.store(lsn, Release);
    }

    /// Sets whether the threads that fill the logs wait for this reader.
    pub fn set_firm(&self, on: bool) {
        self.firm.store(on, Release);
    }
}

/// While it is held, nothing is applied, unless it was revoked. The holder sees
/// that afterwards from the [`Watch`] that the pause came from.
pub struct Pause {
    store: Arc<Store>,
    generation: u64,
}

impl Drop for Pause {
    fn drop(&mut self) {
        let mut p = lock(&self.store.pauses);
        if p.generation == self.generation {
            p.count -= 1;
            self.store.paused.store(p.count > 0, Release);
        }
    }
}

/// Most pages that a [`Watch`] notes; then nothing is applied until some were sent.
pub const MOST_CHANGED: usize = 1 << 16;

impl Watch {
    /// Whether the watch was not revoked: it has noted every change since it began.
    pub fn holds(&self) -> bool {
        lock(&self.store.pauses).generation == self.generation
    }

    /// Pages that are to be sent again.
    pub fn changed(&self) -> usize {
        lock(&self.pages).len()
    }

    /// Takes the next of these pages: at most `most` consecutive pages of one file.
    pub fn next(&self, most: u64) -> Option<(u32, Range<u64>)> {
        let mut pages = lock(&self.pages);
        let (id, first) = pages.pop_first()?;
        let mut end = first + 1;
        while end - first < most && pages.remove(&(id, end)) {
            end += 1;
        }
        Some((id, first * COPY_PAGE..end * COPY_PAGE))
    }

    /// Stops the application of records, so that the last changed pages can be sent.
    pub fn pause(&self) -> Pause {
        self.store.pause(self.generation)
    }

    pub(super) fn note(&self, changes: &[(u32, Range<u64>)]) {
        if self.store.mutations.forget_changes.is_on() {
            return;
        }
        let mut pages = lock(&self.pages);
        for (id, bytes) in changes {
            let first = bytes.start / COPY_PAGE;
            pages.extend((first..bytes.end.div_ceil(COPY_PAGE)).map(|page| (*id, page)));
        }
    }
}

impl Store {
    /// Keeps records above `lsn` for a reader of the logs, until the returned hold is
    /// dropped.
    pub fn hold(&self, lsn: u64) -> Arc<Hold> {
        let hold = Arc::new(Hold {
            lsn: AtomicU64::new(lsn),
            firm: AtomicBool::new(false),
        });
        let mut holds = lock(&self.holds);
        holds.retain(|h| h.strong_count() > 0);
        holds.push(Arc::downgrade(&hold));
        hold
    }

    /// From now on every record above `lsn` is kept for that reader, and the threads
    /// that fill the logs wait for it. Returns the oldest LSN that is in the logs.
    pub fn hold_from(&self, hold: &Hold, lsn: u64) -> u64 {
        let _a = self.applier.lock();
        hold.advance(lsn);
        hold.set_firm(true);
        self.oldest()
    }

    /// Stops the application of records while a copy is read in the background,
    /// until a thread that needs it to go on revokes that. Does nothing if pauses
    /// were revoked since `generation`.
    fn pause(self: &Arc<Store>, generation: u64) -> Pause {
        let _a = self.applier.lock();
        let mut p = lock(&self.pauses);
        if p.generation == generation {
            p.count += 1;
            self.paused.store(true, Release);
        }
        Pause {
            store: self.clone(),
            generation,
        }
    }

    /// Notes what is applied from here on, while a copy is read.
    pub fn watch(self: &Arc<Store>) -> Arc<Watch> {
        let _a = self.applier.lock();
        let watch = Arc::new(Watch {
            store: self.clone(),
            generation: lock(&self.pauses).generation,
            pages: Mutex::default(),
        });
        let mut watches = lock(&self.watches);
        watches.retain(|w| w.strong_count() > 0);
        watches.push(Arc::downgrade(&watch));
        watch
    }

    /// The watches of the threads that now read the area for a copy.
    pub(super) fn watches(&self) -> Vec<Arc<Watch>> {
        let watches = lock(&self.watches);
        let mut watches: Vec<_> = watches.iter().filter_map(Weak::upgrade).collect();
        watches.retain(|w| w.holds());
        watches
    }

    /// Ends every pause and watch.
    pub fn revoke_pauses(&self) {
        let mut p = lock(&self.pauses);
        p.generation += 1;
        p.count = 0;
        self.paused.store(false, Release);
    }

    /// Stops or allows the application of records (while a copy is read).
    pub fn freeze(&self, on: bool) {
        let _a = self.applier.lock();
        self.frozen.store(on, Release);
    }

    pub(super) fn stands_still(&self) -> bool {
        let paused = self.paused.load(Acquire) && !self.mutations.ignore_pause.is_on();
        self.frozen.load(Acquire) || paused || self.loading.load(Acquire)
    }
}
