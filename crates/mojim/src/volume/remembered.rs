//! What each thread remembers: the window that its last sync point was of, so
//! that the next one finds it without an atomic write that other threads see.
//!
//! Invariant: a window that has gone is known to nobody but calls that are under
//! way, which forget it when they return. Else a thread that makes no more sync
//! points would keep its memory, its volume and the volume's files.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex, Weak};

use super::attached::lock;
use super::table::{Mapped, TABLE};

/// A window, and the table's generation when it was found.
type Remembered = (u64, Arc<Mapped>);

/// What one thread remembers. Held for moments: by the thread, or by whoever
/// takes a window away.
#[derive(Default)]
struct Slot {
    busy: AtomicBool,
    held: UnsafeCell<Option<Remembered>>,
}

// SAFETY: `held` is reached by `with` only, which one thread at a time is in.
unsafe impl Sync for Slot {}
// SAFETY: what is remembered may be dropped by any thread.
unsafe impl Send for Slot {}

impl Slot {
    #[inline]
    fn with<T>(&self, f: impl FnOnce(&mut Option<Remembered>) -> T) -> T {
        while self.busy.swap(true, Acquire) {
            std::thread::yield_now();
        }
        // SAFETY: `busy` was false, and is true until this is done with it.
        let done = f(unsafe { &mut *self.held.get() });
        self.busy.store(false, Release);
        done
    }
}

/// The slots of all threads.
static ALL: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

thread_local! {
    static MINE: Arc<Slot> = {
        let slot = Arc::<Slot>::default();
        let mut all = lock(&ALL);
        all.retain(|s| s.strong_count() > 0);
        all.push(Arc::downgrade(&slot));
        slot
    };
}

/// What the calling thread remembers; until it puts something back, nothing.
#[inline]
pub(super) fn take() -> Option<Remembered> {
    // At the end of a thread there is nothing to remember.
    MINE.try_with(|s| s.with(Option::take)).ok().flatten()
}

/// The calling thread remembers this, unless a window has gone meanwhile.
#[inline]
pub(super) fn put(generation: u64, m: Arc<Mapped>) {
    let mut kept = Some((generation, m));
    let _ = MINE.try_with(|s| {
        s.with(|held| {
            if TABLE.generation.load(SeqCst) == generation {
                std::mem::swap(held, &mut kept);
            }
        });
    });
}

/// Nobody remembers a window that is not in the table any more. Not in a forked child: its parent's
/// threads may have been in their slots.
pub(super) fn forget(m: &Arc<Mapped>) {
    let all: Vec<_> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    for slot in all {
        // Dropped after the slot is free again.
        let _gone = slot.with(|held| held.take_if(|(_, x)| Arc::ptr_eq(x, m)));
    }
}
