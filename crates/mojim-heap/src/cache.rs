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
use std::panic::{AssertUnwindSafe, catch_unwind};

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::compiler_fence;

use mojim_format::heap::{ALLOCATED, FREE};

use crate::classes::{CLASSES, MOST, class_of};
use crate::slabs::{Place, Slabs, state};
use crate::tls;

/// What its caches look at of a heap.
pub struct Shared {
    /// The number that caches of the heap have. A cache with another one holds nothing.
    pub key: AtomicU64,
    /// Syncs that have begun.
    pub begun: AtomicU64,
    /// The slabs.
    pub slabs: Slabs,
}

/// A heap, as its caches know it.
pub trait Keeper: Sync {
    /// What they look at.
    fn shared(&self) -> &Shared;
    /// By this number other languages name it, while calls outside of transactions are allowed; else 0.
    fn handle(&self) -> usize;
    /// The cache's thread ends.
    fn take_back(&self, cache: &mut Cache);
}

/// A thread's blocks of one heap.
pub struct Cache {
    key: u64,
    handle: usize,
    shared: &'static Shared,
    heap: &'static dyn Keeper,
    pub ready: [Vec<Place>; CLASSES],
    pub freed: [Vec<Place>; CLASSES],
    /// The number of the sync that had begun last when a block came into `freed`.
    pub stamp: u64,
}

impl Cache {
    #[inline(always)]
    pub fn is_valid(&self) -> bool {
        self.key == self.shared.key.load(Relaxed)
    }

    /// A block for a call outside of a transaction.
    #[inline(always)]
    pub fn malloc(&mut self, class: usize) -> Option<*mut u8> {
        let p = self.freed[class].pop();
        let p = p.or_else(|| self.ready[class].pop())?;
        // SAFETY: a state byte of the heap; the block is the calling thread's.
        unsafe { state(p.state) }.store(ALLOCATED, Relaxed);
        Some(p.ptr)
    }

    /// Frees a block outside of a transaction, if that takes no lock and nothing is wrong.
    #[inline(always)]
    pub fn free(&mut self, ptr: *mut u8) -> bool {
        let Some((class, p)) = self.shared.slabs.find_cached(ptr as usize) else {
            return false;
        };
        // SAFETY: a state byte of the heap.
        let byte = unsafe { state(p.state) };
        let freed = &mut self.freed[class];
        if byte.load(Relaxed) != ALLOCATED || freed.len() >= freed.capacity() {
            return false;
        }
        byte.store(FREE, Relaxed);
        compiler_fence(SeqCst);
        if self.stamp != self.shared.begun.load(Acquire) {
            // It is in no list yet: as if it had not been freed.
            byte.store(ALLOCATED, Relaxed);
            return false;
        }
        push(freed, p);
        true
    }
}

/// A block of the calling thread's cache, of the heap of this handle, if that was used last and has one.
#[inline(always)]
pub fn malloc(handle: usize, size: usize) -> Option<*mut u8> {
    let p: *mut Cache = tls::get().cast();
    // SAFETY: null, or a cache of this thread, which lasts until the thread ends.
    let cache = unsafe { p.as_mut() }?;
    match handle != 0 && cache.handle == handle && size <= MOST && cache.is_valid() {
        true => cache.malloc(class_of(size)),
        false => None,
    }
}

/// Frees a block of the heap whose cache the calling thread used last, if that takes no lock and
/// nothing is wrong.
#[inline(always)]
pub fn free(ptr: *mut u8) -> bool {
    let p: *mut Cache = tls::get().cast();
    // SAFETY: null, or a cache of this thread, which lasts until the thread ends.
    match unsafe { p.as_mut() } {
        Some(c) if c.handle != 0 && c.is_valid() => c.free(ptr),
        _ => false,
    }
}

thread_local!(static MINE: RefCell<Mine> = const { RefCell::new(Mine(Vec::new())) });

/// All caches of a thread.
struct Mine(Vec<Slot>);

/// A cache by its address, which stays.
struct Slot(*mut Cache);

impl Slot {
    fn new<K: Keeper>(heap: &'static K) -> Slot {
        Slot(Box::into_raw(Box::new(Cache {
            key: heap.shared().key.load(Relaxed),
            handle: heap.handle(),
            shared: heap.shared(),
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
            if cache.is_valid() {
                // A panic would end the process here. What is not taken back is free on disk.
                let back = AssertUnwindSafe(|| cache.heap.take_back(cache));
                let _ = catch_unwind(back);
            }
            slot.release();
        }
    }
}

/// The calling thread's cache of a heap, if that is the one that the thread used last; else null.
/// Only the calling thread may use it, and only until it calls anything that uses a cache.
#[inline(always)]
pub fn last_used<K: Keeper>(heap: &'static K) -> *mut Cache {
    let p: *mut Cache = tls::get().cast();
    // SAFETY: null, or a cache of this thread, which lasts until the thread ends.
    match unsafe { p.as_ref() } {
        Some(c) if is_of(c, heap) => p,
        _ => std::ptr::null_mut(),
    }
}

/// Adds a block to a list that has room for it. (Two stores: where the compiler makes it one of 16
/// bytes, it reads what it has just written in halves, and waits for that.)
#[inline(always)]
fn push(list: &mut Vec<Place>, p: Place) {
    assert!(list.len() < list.capacity());
    let n = list.len();
    // SAFETY: there is room, and the place is written before it counts.
    unsafe {
        let to = list.as_mut_ptr().add(n);
        (&raw mut (*to).ptr).write(p.ptr);
        (&raw mut (*to).state).write(p.state);
        list.set_len(n + 1);
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
    cache.key == heap.shared().key.load(Relaxed)
}

/// Null while the thread ends.
#[cold]
fn find<K: Keeper>(heap: &'static K) -> *mut Cache {
    let found = MINE.try_with(|mine| {
        let all = &mut mine.borrow_mut().0;
        all.retain(|c| {
            let keeps = c.is_valid();
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
