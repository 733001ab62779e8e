//! What each thread keeps of a heap: free blocks that it can hand out without a lock.
//!
//! Owns the caches, and how a thread finds its own. They are in memory only. On disk their
//! blocks are free, so a crash loses none.
//!
//! Invariants:
//! - Only its thread uses a cache.
//! - A cache whose key is not its heap's holds nothing: the heap was closed, or rolled back.
//! - `ready`: blocks that are free as of the last commit. `freed`: blocks that the thread has
//!   freed outside a transaction, which may still be allocated as of the last commit, and
//!   which data that is committed may still refer to.

use std::cell::RefCell;

use crate::classes::CLASSES;
use crate::slabs::Place;
use crate::tls;

/// A heap, as its caches know it.
pub trait Keeper: Sync {
    /// The number that its caches have. A cache with another one holds nothing.
    fn key(&self) -> u64;
    /// The cache's thread ends.
    fn take_back(&self, cache: &mut Cache);
}

/// A thread's blocks of one heap.
pub struct Cache {
    key: u64,
    heap: &'static dyn Keeper,
    pub ready: [Vec<Place>; CLASSES],
    pub freed: [Vec<Place>; CLASSES],
    /// The number of the sync that had begun last when a block came into `freed`.
    pub stamp: u64,
}

thread_local!(static MINE: RefCell<Mine> = const { RefCell::new(Mine(Vec::new())) });

/// All caches of a thread.
struct Mine(Vec<Slot>);

/// A cache by its address, which stays.
struct Slot(*mut Cache);

impl Slot {
    fn new<K: Keeper>(heap: &'static K) -> Slot {
        Slot(Box::into_raw(Box::new(Cache {
            key: heap.key(),
            heap,
            ready: [const { Vec::new() }; CLASSES],
            freed: [const { Vec::new() }; CLASSES],
            stamp: 0,
        })))
    }

    /// Frees it; it is not used again.
    fn release(&self) {
        // SAFETY: made by `new`; only the calling thread knows it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl std::ops::Deref for Slot {
    type Target = Cache;

    fn deref(&self) -> &Cache {
        // SAFETY: made by `new`, and not released.
        unsafe { &*self.0 }
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        tls::set(std::ptr::null_mut());
        for slot in self.0.drain(..) {
            // SAFETY: made by `Slot::new`, not released, and this thread's alone.
            let cache = unsafe { &mut *slot.0 };
            if cache.key == cache.heap.key() {
                cache.heap.take_back(cache);
            }
            slot.release();
        }
    }
}

/// Calls `f` with the calling thread's cache of a heap; with `None` while the thread ends.
#[inline(always)]
pub fn with<K: Keeper, R>(heap: &'static K, f: impl FnOnce(Option<&mut Cache>) -> R) -> R {
    let p: *mut Cache = tls::get().cast();
    // SAFETY: null, or the box of a cache of this thread, which lasts until the thread ends.
    // `f` calls nothing that uses a cache.
    match unsafe { p.as_mut() } {
        Some(c) if is_of(c, heap) => f(Some(c)),
        // SAFETY: as above.
        _ => f(unsafe { find(heap).as_mut() }),
    }
}

#[inline(always)]
fn is_of<K: Keeper>(cache: &Cache, heap: &'static K) -> bool {
    cache.key == heap.key()
}

/// Null while the thread ends.
#[cold]
fn find<K: Keeper>(heap: &'static K) -> *mut Cache {
    let found = MINE.try_with(|mine| {
        let all = &mut mine.borrow_mut().0;
        all.retain(|c| {
            let keeps = c.key == c.heap.key();
            if !keeps {
                c.release();
            }
            keeps
        });
        let i = match all.iter().position(|c| is_of(c, heap)) {
            Some(i) => i,
            None => {
                all.push(Slot::new(heap));
                all.len() - 1
            }
        };
        all[i].0
    });
    let p = found.unwrap_or(std::ptr::null_mut());
    tls::set(p.cast());
    p
}
