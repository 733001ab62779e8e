//! A cache per thread: the window of the thread's last sync point, so that the
//! next one finds it without an atomic write to memory that other threads share.
//!
//! Invariant: a window that has gone is referenced only by calls under way, which
//! drop it when they return. Otherwise a thread that makes no more sync points
//! would keep the window's memory, its volume and the volume's files.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex, Weak};

use super::table::{Mapped, TABLE};
use mojim_env::locks::lock;

/// A window, and the table's generation when it was found.
type Remembered = (u64, Arc<Mapped>);

/// What one thread remembers. Held for moments: by the thread itself, or by a
/// thread that ends a window.
#[derive(Default)]
struct Slot {
    busy: AtomicBool,
    held: UnsafeCell<Option<Remembered>>,
}

// SAFETY: only `with` reaches `held`, and one thread at a time is in it.
unsafe impl Sync for Slot {}
// SAFETY: what is remembered may be dropped by any thread.
unsafe impl Send for Slot {}

impl Slot {
    #[inline]
    fn with<T>(&self, f: impl FnOnce(&mut Option<Remembered>) -> T) -> T {
        while self.busy.swap(true, Acquire) {
            std::thread::yield_now();
        }
        // SAFETY: `busy` was false, and stays true until `f` has returned.
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

/// Has the calling thread's slot exist.
pub(super) fn prepare() {
    let _ = MINE.try_with(|_| ());
}

/// Takes what the calling thread remembers.
#[inline]
pub(super) fn take() -> Option<Remembered> {
    // While the thread ends, its slot may be gone already.
    MINE.try_with(|s| s.with(Option::take)).ok().flatten()
}

/// The calling thread remembers `m`, unless the table has changed since `generation`.
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

/// Makes all threads forget a window that is no longer in the table. Not to be called in a forked
/// child: a thread of its parent may have held a slot at the fork.
pub(super) fn forget(m: &Arc<Mapped>) {
    let all: Vec<_> = lock(&ALL).iter().filter_map(Weak::upgrade).collect();
    for slot in all {
        // Dropped after the slot is free again.
        let _gone = slot.with(|held| held.take_if(|(_, x)| Arc::ptr_eq(x, m)));
    }
}
