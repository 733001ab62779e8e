//! Each thread's cache of a heap: free blocks that it can hand out without a lock.
//!
//! Owns the caches, and how a thread finds its own. They are in memory only. On disk their
//! blocks are free, so a crash loses none.
//!
//! Invariants:
//! - Only its thread uses a cache, but for the few words that [`forget`] and [`tell_begun`] write.
//! - While a transaction of the thread is open no call is without a lock: the thread's word
//!   of its caches ([`Cached`]) says so. The code that begins or ends a transaction sets it
//!   ([`mojim_undo::Log`]).
//! - A cache whose key is not its heap's holds nothing: the heap was closed, or rolled back. Calls
//!   without a lock see it by the capacity and the handle, which are not the heap's any more.
//! - `ready`: blocks that are free as of the last commit.
//! - `freed` and `away`: blocks that the thread has freed outside a transaction. They may
//!   still be allocated as of the last commit, and committed data may still refer to them.

use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null_mut, slice_from_raw_parts_mut};

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, AtomicUsize, compiler_fence};
use std::sync::{Mutex, MutexGuard};

use mojim_env::locks::lock;
use mojim_format::heap::{ALLOCATED, FREE, UNIT};
use mojim_undo::Cached;

use crate::classes::{CLASSES, ENTRIES, LIST, entry_for};
use crate::owners;
use crate::slabs::{Quick, SlabBlock, Slabs, state};
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
    fn take_back(&self, blocks: &mut Blocks);
}

/// What a thread has of one heap. The first line is all that a call without a lock reads of it beside
/// the stamp and the lists.
#[repr(C, align(64))]
struct Cache {
    told: Told,
    base: usize,
    quick: *const Quick,
    heap: &'static dyn Keeper,
    blocks: Blocks,
    /// Where the lists are for each entry of [`classes::LIST`](crate::classes::LIST), in bytes from the first.
    lists_at: [u16; ENTRIES],
}

const LISTS_AT: [u16; ENTRIES] = {
    let mut all = [0; ENTRIES];
    let mut i = 0;
    while i < ENTRIES {
        all[i] = LIST[i] as u16 * size_of::<Lists>() as u16;
        i += 1;
    }
    all
};

// A thread without a cache has zeros in place of one: no heap has that handle, and no address is in it.
const _: () = assert!(size_of::<Cache>() <= tls::ZEROS);

impl Cache {
    /// Its list of freed blocks of a class, so many bytes from the first class's.
    ///
    /// # Safety
    /// `at` is the size of [`Lists`] times a class, and the cache is the calling thread's.
    #[inline(always)]
    unsafe fn freed_at(c: *mut Cache, at: usize) -> *mut Stack {
        // SAFETY: the caller's promise.
        unsafe { &raw mut (*(&raw mut (*c).blocks.lists).cast::<Lists>().byte_add(at)).freed }
    }
}

/// What other threads tell a cache.
#[repr(C)]
struct Told {
    /// The heap's, while calls outside of transactions are allowed; else [`nobody`].
    handle: AtomicUsize,
    /// Bytes of the heap, while calls outside of transactions are allowed; else 0.
    capacity: AtomicUsize,
    /// The last sync of the heap that has begun.
    begun: AtomicU64,
}

/// A thread's blocks of one heap.
#[repr(C)]
pub struct Blocks {
    /// The number of the sync that had begun last when a block came into `freed`.
    pub stamp: u64,
    key: u64,
    /// The thread's number.
    pub owner: u32,
    /// Freed blocks of other threads' slabs.
    pub away: Stack,
    lists: [Lists; CLASSES],
}

/// Its blocks of one class.
#[repr(C, align(64))]
pub struct Lists {
    pub freed: Stack,
    pub ready: Vec<SlabBlock>,
}

/// A stack of blocks. It grows only when it is told to.
#[repr(C)]
pub struct Stack {
    top: *mut SlabBlock,
    end: *mut SlabBlock,
    first: *mut SlabBlock,
}

impl Stack {
    const fn new() -> Stack {
        Stack {
            top: null_mut(),
            end: null_mut(),
            first: null_mut(),
        }
    }

    /// Makes room for `most` blocks in all, if it has none yet.
    pub fn make(&mut self, most: usize) {
        if self.first.is_null() {
            let all: Box<[MaybeUninit<SlabBlock>]> = Box::new_uninit_slice(most);
            self.first = Box::into_raw(all).cast();
            self.top = self.first;
            self.end = self.first.wrapping_add(most);
        }
    }

    /// How many blocks there is room for.
    pub fn room(&self) -> usize {
        (self.end as usize - self.top as usize) / size_of::<SlabBlock>()
    }

    /// Adds a block. There must be room.
    pub fn put(&mut self, p: SlabBlock) {
        let top = self.top;
        assert!(top != self.end, "there is room");
        // SAFETY: `top` is below the end of what was allocated.
        unsafe { top.write(p) };
        self.top = top.wrapping_add(1);
    }

    /// Takes a block.
    pub fn pop(&mut self) -> Option<SlabBlock> {
        let top = self.top;
        if top == self.first {
            return None;
        }
        let top = top.wrapping_sub(1);
        self.top = top;
        // SAFETY: what is below the top was written.
        Some(unsafe { top.read() })
    }

    /// Takes all but the `keep` blocks that came last.
    pub fn split_off(&mut self, keep: usize) -> Vec<SlabBlock> {
        let mut all = Vec::with_capacity(keep);
        while let Some(p) = self.pop() {
            all.push(p);
        }
        let rest = all.split_off(keep.min(all.len()));
        all.into_iter().rev().for_each(|p| self.put(p));
        rest
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !self.first.is_null() {
            let most = (self.end as usize - self.first as usize) / size_of::<SlabBlock>();
            let all: *mut [MaybeUninit<SlabBlock>] =
                slice_from_raw_parts_mut(self.first.cast(), most);
            // SAFETY: made by `make`.
            drop(unsafe { Box::from_raw(all) });
        }
    }
}

impl Lists {
    const fn new() -> Lists {
        Lists {
            freed: Stack::new(),
            ready: Vec::new(),
        }
    }
}

impl Blocks {
    /// Whether they are the heap's, as it is.
    #[inline(always)]
    pub fn is_of<K: Keeper>(&self, heap: &K) -> bool {
        self.key == heap.shared().key.load(Relaxed)
    }

    /// Those of a class.
    #[inline(always)]
    pub fn of(&mut self, class: usize) -> &mut Lists {
        &mut self.lists[class]
    }
}

/// The handle of no heap.
fn nobody() -> usize {
    tls::none() as usize
}

/// The levels of a thread without transactions.
static NONE_OPEN: u32 = 0;

/// A block of the calling thread's cache, of the heap of this handle, if that was used last and has
/// one, and the thread has no transaction open.
#[inline(always)]
pub fn malloc(handle: usize, size: usize) -> Option<*mut u8> {
    let c: *mut Cache = tls::now().cast();
    // SAFETY: a cache of this thread, which lasts until the thread ends, or zeros, which have no block.
    unsafe {
        if (*c).told.handle.load(Relaxed) != handle {
            return None;
        }
        let entry = entry_for(size)?;
        let at = (&raw const (*c).lists_at).cast::<u16>().add(entry).read();
        let freed = Cache::freed_at(c, at as usize);
        let top = (*freed).top;
        if top == (*freed).first {
            return None;
        }
        let top = top.wrapping_sub(1);
        (*freed).top = top;
        state((*top).state).store(ALLOCATED, Relaxed);
        Some((*top).ptr)
    }
}

/// Frees a block of the heap whose cache the calling thread used last, outside a transaction, if that
/// takes no lock and nothing is wrong.
#[inline(always)]
pub fn free(ptr: *mut u8) -> bool {
    let c: *mut Cache = tls::now().cast();
    // SAFETY: as for `malloc`; zeros have no address. A heap's lines are never dropped, and there is one
    // for each unit; the class is below `CLASSES`.
    unsafe {
        let offset = (ptr as usize).wrapping_sub((*c).base);
        if offset >= (*c).told.capacity.load(Relaxed) {
            return false;
        }
        let quick = &*(*c).quick.add(offset / UNIT);
        let Some(found) = quick.find(ptr as usize) else {
            return false;
        };
        if found.owner != (*c).blocks.owner {
            return free_away(c, found.place);
        }
        put(
            c,
            Cache::freed_at(c, found.class * size_of::<Lists>()),
            found.place,
        )
    }
}

/// [`free`] of a block of another thread's slab. Not inlined: else the usual case would choose by a value
/// and wait for it, in place of a branch that is guessed rightly.
#[cold]
#[inline(never)]
unsafe fn free_away(c: *mut Cache, p: SlabBlock) -> bool {
    // SAFETY: the calling thread's cache, and a block of its heap.
    unsafe { put(c, &raw mut (*c).blocks.away, p) }
}

/// Frees a block into this list, if there is room and the block is allocated.
///
/// # Safety
/// `c` is the calling thread's cache, `freed` a list of it, and `p` a place of its heap.
#[inline(always)]
unsafe fn put(c: *mut Cache, freed: *mut Stack, p: SlabBlock) -> bool {
    // SAFETY: the caller's promise; below `end` there is room.
    unsafe {
        let byte = state(p.state);
        let top = (*freed).top;
        if byte.load(Relaxed) != ALLOCATED || top == (*freed).end {
            return false;
        }
        byte.store(FREE, Relaxed);
        compiler_fence(SeqCst);
        if (*c).blocks.stamp != (*c).told.begun.load(Relaxed) {
            // It is in no list yet: as if it had not been freed.
            byte.store(ALLOCATED, Relaxed);
            return false;
        }
        // Two stores: where the compiler makes it one of 16 bytes, a load of a half waits for it.
        (&raw mut (*top).ptr).write(p.ptr);
        (&raw mut (*top).state).write(p.state);
        (*freed).top = top.wrapping_add(1);
        true
    }
}

/// A cache of any thread: its key, and what it is told.
struct RegisteredCache(u64, *const Told);

// SAFETY: atomics alone, and they are there while it is among `KNOWN`.
unsafe impl Send for RegisteredCache {}

/// The caches of all threads. In a forked child nobody looks: the lock may be that of a thread which is
/// not there.
static KNOWN: Mutex<Vec<RegisteredCache>> = Mutex::new(Vec::new());

fn known() -> MutexGuard<'static, Vec<RegisteredCache>> {
    lock(&KNOWN)
}

fn each(key: u64, f: impl Fn(&Told)) {
    for RegisteredCache(_, told) in known().iter().filter(|k| k.0 == key) {
        // SAFETY: a cache leaves `KNOWN` before it is freed.
        f(unsafe { &**told });
    }
}

/// Calls without a lock end for the caches of this key. No other thread is in one.
pub fn forget(key: u64) {
    each(key, |told| {
        told.handle.store(nobody(), Relaxed);
        told.capacity.store(0, Relaxed);
    });
}

/// Calls without a lock end for the caches of the calling thread, of all heaps. Takes no lock: for a
/// child that was forked.
pub fn forget_mine() {
    let _ = MINE.try_with(|mine| {
        let Ok(mine) = mine.try_borrow() else { return };
        for slot in &mine.0 {
            // SAFETY: made by `Slot::new`, and not released.
            let told = unsafe { &(*slot.0).told };
            told.handle.store(nobody(), Relaxed);
            told.capacity.store(0, Relaxed);
        }
    });
}

/// Tells the caches of this key that a sync has begun. A thread knows it once it has passed a barrier.
pub fn tell_begun(key: u64, begun: u64) {
    each(key, |told| {
        told.begun.fetch_max(begun, Relaxed);
    });
}

thread_local! {
    static MINE: RefCell<Mine> = const { RefCell::new(Mine(Vec::new(), owners::NOBODY)) };
    static OPEN: Cell<*const u32> = const { Cell::new(&raw const NONE_OPEN) };
}

/// From here on a transaction of the calling thread is open while `*levels` is not 0. Null: never. Now
/// none is. What is returned lasts as long as the thread.
///
/// # Safety
/// `levels` stays until the next call, and is changed by the calling thread only.
pub unsafe fn set_open(levels: *const u32) -> *mut Cached {
    OPEN.set(match levels.is_null() {
        true => &raw const NONE_OPEN,
        false => levels,
    });
    tls::cached()
}

/// Whether a transaction of the calling thread is open.
pub fn in_transaction() -> bool {
    // SAFETY: the calling thread's own levels (`set_open`).
    unsafe { *OPEN.get() != 0 }
}

/// The calling thread uses this cache last, or none.
fn use_last(c: *mut u8) {
    let cached = tls::cached();
    // SAFETY: the calling thread's own words.
    unsafe {
        (*cached).last = c;
        (*cached).now = match in_transaction() {
            false => c,
            true => (*cached).none,
        };
    }
}

/// All caches of a thread, and its number.
struct Mine(Vec<Slot>, u32);

/// A cache by its address, which stays.
struct Slot(*mut Cache);

impl Slot {
    fn new<K: Keeper>(heap: &'static K, owner: u32) -> Slot {
        let shared = heap.shared();
        let forked = mojim_memory::fork::is_forked();
        // What is told from here on is told to this one, too.
        let mut known = (!forked).then(known);
        let (handle, capacity) = match heap.handle() {
            0 => (nobody(), 0),
            h => (h, shared.slabs.capacity()),
        };
        let key = shared.key.load(Acquire);
        let cache = Box::into_raw(Box::new(Cache {
            told: Told {
                handle: AtomicUsize::new(handle),
                capacity: AtomicUsize::new(capacity),
                begun: AtomicU64::new(shared.begun.load(Acquire)),
            },
            base: shared.slabs.base(),
            quick: shared.slabs.quick(),
            lists_at: LISTS_AT,
            heap,
            blocks: Blocks {
                stamp: 0,
                key,
                owner,
                away: Stack::new(),
                lists: [const { Lists::new() }; CLASSES],
            },
        }));
        if let Some(known) = &mut known {
            // SAFETY: just made.
            known.push(RegisteredCache(key, unsafe { &raw const (*cache).told }));
        }
        Slot(cache)
    }

    /// Whether its heap is as it was when it was made.
    fn is_valid(&self) -> bool {
        // SAFETY: made by `new`, and not released.
        unsafe { (*self.0).blocks.key == (*self.0).heap.shared().key.load(Acquire) }
    }

    /// Frees it; it is not used again.
    fn release(&self) {
        if !mojim_memory::fork::is_forked() {
            // SAFETY: as above.
            let told = unsafe { &raw const (*self.0).told };
            known().retain(|k| k.1 != told);
        }
        // SAFETY: made by `new`; only the calling thread knows it from here on.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        use_last(tls::none());
        for slot in self.0.drain(..) {
            if slot.is_valid() {
                // A panic would end the process here. What is not taken back is free on disk.
                let back = AssertUnwindSafe(|| {
                    // SAFETY: made by `Slot::new`, not released, and this thread's alone.
                    let (heap, blocks) = unsafe { ((*slot.0).heap, &mut (*slot.0).blocks) };
                    heap.take_back(blocks);
                });
                let _ = catch_unwind(back);
            }
            slot.release();
        }
        owners::give(self.1);
    }
}

/// The calling thread's blocks of a heap, if that is the one that the thread used last; else null.
/// Only the calling thread may use them, and only until it calls anything that uses a cache.
#[inline(always)]
pub fn last_used<K: Keeper>(heap: &'static K) -> *mut Blocks {
    // SAFETY: the calling thread's own words.
    let p: *mut Cache = unsafe { (*tls::cached()).last }.cast();
    // SAFETY: a cache of this thread, which lasts until the thread ends, or zeros; no heap has key 0.
    unsafe {
        match (*p).blocks.is_of(heap) {
            true => &raw mut (*p).blocks,
            false => null_mut(),
        }
    }
}

/// Calls `f` with the calling thread's blocks of a heap; with `None` while the thread ends.
#[inline(always)]
pub fn with<K: Keeper, R>(heap: &'static K, f: impl FnOnce(Option<&mut Blocks>) -> R) -> R {
    // SAFETY: null, or those of this thread, which last until the thread ends.
    // `f` calls nothing that uses a cache.
    match unsafe { last_used(heap).as_mut() } {
        Some(b) => f(Some(b)),
        // SAFETY: as above.
        None => f(unsafe { find(heap).as_mut() }),
    }
}

/// Null while the thread ends.
#[cold]
fn find<K: Keeper>(heap: &'static K) -> *mut Blocks {
    let found = MINE.try_with(|mine| {
        let Mine(all, owner) = &mut *mine.borrow_mut();
        all.retain(|c| {
            let keeps = c.is_valid();
            if !keeps {
                c.release();
            }
            keeps
        });
        // SAFETY: made by `Slot::new`, and not released.
        let of = |c: &Slot| unsafe { (*c.0).blocks.is_of(heap) };
        let i = match all.iter().position(of) {
            Some(i) => i,
            None => {
                if *owner == owners::NOBODY {
                    *owner = owners::take();
                }
                all.push(Slot::new(heap, *owner));
                all.len() - 1
            }
        };
        all[i].0
    });
    match found {
        Ok(p) => {
            use_last(p.cast());
            // SAFETY: made by `Slot::new`, and not released.
            unsafe { &raw mut (*p).blocks }
        }
        Err(_) => {
            use_last(tls::none());
            null_mut()
        }
    }
}
