//! The heap: opening, blocks, and its sync points.
//!
//! Owns what a program does with a heap (FAMS, Section 4.1).
//!
//! Invariants:
//!
//! - A block that a transaction gets ([`Heap::take`]) is free as of the last commit. Else its
//!   contents could be committed before the free that they rest on. A crash would then show them
//!   in a block that the program still had.
//! - A block that was freed outside a transaction is at first handed out again only to calls
//!   outside transactions. That ends once a sync that began after the free has succeeded.
//! - A heap's struct is never freed: threads may still have their caches of it. Its tables are the
//!   next heap's when it is closed.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*, compiler_fence,
};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use mojim::{Reader, Volume};
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_format::heap::{
    ALIGNMENT, ALLOCATED, CHUNK_ENTRY_LEN, Chunk, FIXED_LEN, FREE, GRAIN, HEAD_LEN, HeapHead,
    LARGE, UNIT, chunk_entry_at, decode_chunks, encode_chunk,
};

use crate::addresses::{choose, release, reserve};
use crate::cache::{self, Blocks, Keeper, Lists, Shared};
use crate::classes::{CLASSES, MOST, class_of, kept, size_of};
use crate::owners;
use crate::slabs::{FIRST, LOOKED, Slab, SlabBlock, Slabs, state, too_large};
use crate::space::{Closable, ReaderSpace, Space, VolumeSpace};

mod roots;
#[cfg(test)]
mod tests;

use roots::Changed;
pub use roots::HeldRoot;

/// Bytes of addresses that a heap reserves where the program does not say.
pub const DEFAULT_CAPACITY: usize = 64 << 30;
/// The least there is: a heap's first chunk.
pub const LEAST_CAPACITY: usize = FIRST as usize;
/// How often a heap that a reader opens is read, before damage counts as that.
const READS: u32 = 5;
const BETWEEN: Duration = Duration::from_millis(20);
/// Most heaps that a process has open.
const MOST_OPEN: usize = 64;

/// How a heap is opened, and what a new one is to be like.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct HeapOptions {
    /// Bytes of addresses that a new heap reserves, a multiple of 1 MiB; 0: 64 GiB.
    pub capacity: usize,
    /// Where a new heap lies, a multiple of 1 MiB; 0: chosen by chance.
    pub address: usize,
    /// Only transactions change the heap (`MOJIM_HEAP_EXACT`).
    pub exact: bool,
}

impl HeapOptions {
    /// Of a heap whose capacity and address are these; 0: chosen.
    pub fn new(capacity: usize, address: usize) -> HeapOptions {
        HeapOptions {
            capacity,
            address,
            ..HeapOptions::default()
        }
    }

    /// Only transactions will change the heap.
    pub fn exact(mut self) -> HeapOptions {
        self.exact = true;
        self
    }
}

/// A heap that is open. Any thread may use it.
#[derive(Clone, Copy)]
pub struct Heap(&'static Inner);

impl PartialEq for Heap {
    fn eq(&self, other: &Heap) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Heap {}

/// A block, for a transaction to allocate or to free.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Its state byte: [`ALLOCATED`] or [`FREE`].
    pub state: *mut u8,
    /// Its bytes.
    pub usable: usize,
}

/// Blocks that were freed outside a transaction, while the sync `stamp` had begun last.
struct Freed {
    stamp: u64,
    class: u8,
    /// The thread whose slabs they are of.
    owner: u32,
    blocks: Vec<SlabBlock>,
}

/// Those of each class, and at last the large ones.
type Waiting = [Vec<Freed>; CLASSES + 1];

/// Where those of a class, or of [`LARGE`], are.
fn row(class: u8) -> usize {
    (class as usize).min(CLASSES)
}

/// Bytes of a class that wait for the thread whose they are, before others take them.
const WAITING: usize = 1 << 20;
/// Blocks of other threads' slabs that a thread gives back at a time.
const AWAY: usize = 64;

/// What a [`Heap`] stands for.
pub struct Inner {
    space: Box<dyn Space>,
    name: Name,
    base: usize,
    capacity: usize,
    exact: bool,
    read_only: bool,
    shared: Shared,
    freed: Mutex<Waiting>,
    /// Places of roots that open transactions have changed.
    roots: Mutex<Vec<Changed>>,
    /// The last sync that has succeeded.
    synced: AtomicU64,
    /// Held while all of the heap is read, to be committed; and by a thread that ends, which ends slabs.
    whole: Mutex<()>,
    closed: AtomicBool,
    /// Grows from one opened heap to the next.
    number: u64,
    /// Some of its memory was rolled back, and some was not.
    torn: AtomicBool,
    /// The heap that was closed before it.
    closed_before: AtomicPtr<Inner>,
}

/// The heap that was closed last. A handle of a closed heap is still looked at, so they stay: some KB for each.
/// The list shows tools that look for lost memory where it is.
static CLOSED: AtomicPtr<Inner> = AtomicPtr::new(std::ptr::null_mut());

/// The last key that a heap got.
static KEYS: AtomicU64 = AtomicU64::new(0);

fn new_key() -> u64 {
    KEYS.fetch_add(1, Relaxed) + 1
}

static OPEN: [AtomicPtr<Inner>; MOST_OPEN] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST_OPEN];
/// Entries of [`OPEN`] from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Held while a heap is opened or closed.
static CHANGES: Mutex<()> = Mutex::new(());

fn invalid(text: String) -> Error {
    Error::Invalid(text)
}

fn all() -> impl Iterator<Item = &'static Inner> {
    let used = USED.load(Acquire);
    // SAFETY: null, or a heap, which is never freed.
    OPEN[..used]
        .iter()
        .filter_map(|p| unsafe { p.load(Acquire).as_ref() })
}

impl Heap {
    /// Opens the heap in a file of the volume; makes it if the file is not there.
    ///
    /// # Errors
    /// `Io` (EADDRINUSE) if this process has other mappings at its addresses, `Busy` if it is
    /// open, `Damaged` if the file is no heap, `Unsupported` if the volume rounds to pages or shares
    /// its working copies, and those of [`Volume::map`].
    pub fn open(volume: &Volume, file: &str, options: &HeapOptions) -> Result<Heap> {
        mojim_memory::fork::check_fork()?;
        volume.check_exact()?;
        let space = VolumeSpace {
            volume: Closable::new(volume),
            file: file.into(),
            exact: options.exact,
        };
        let _changes = lock(&CHANGES);
        let name = Name::new(volume.name(), volume.attachment(), volume.directory(), file)?;
        let head = space.begin(HEAD_LEN)?;
        let made = match name.decode(&head.0)? {
            Some(h) => Ok(h),
            // As a creation leaves it that ended before its commit.
            None if head.1 == 0 || head.1 == FIRST && head.0.iter().all(|b| *b == 0) => {
                Err(new_head(options)?)
            }
            None => return Err(name.damaged("it is no heap: it begins with zeros")),
        };
        name.open(Box::new(space), made, head, Some(options.exact))
    }

    /// Opens a heap to be read, at its address, as a node that follows shows it. Its chunks are
    /// mapped as they come by [`Heap::root`].
    ///
    /// # Errors
    /// Those of [`Heap::open`], and of [`Reader::map`].
    pub fn open_reader(reader: &Reader, file: &str) -> Result<Heap> {
        // The heap may grow between two looks at it.
        let mut tries = 0;
        loop {
            tries += 1;
            match Heap::try_open_reader(reader, file) {
                Err(Error::Damaged { .. }) if tries < READS => std::thread::sleep(BETWEEN),
                done => return done,
            }
        }
    }

    fn try_open_reader(reader: &Reader, file: &str) -> Result<Heap> {
        mojim_memory::fork::check_fork()?;
        let space = ReaderSpace {
            reader: Closable::new(reader),
            file: file.into(),
        };
        let _changes = lock(&CHANGES);
        let name = Name::new(reader.name(), reader.attachment(), reader.directory(), file)?;
        let head = space.begin(HEAD_LEN)?;
        let made = name.decode(&head.0)?;
        let made = made.ok_or_else(|| name.damaged("it was not made yet"))?;
        name.open(Box::new(space), Ok(made), head, None)
    }

    /// As [`Heap::open`] over another space, whose first bytes and size are `head`: for tests.
    #[doc(hidden)]
    pub fn open_over(
        space: Box<dyn Space>,
        file: &str,
        head: (Vec<u8>, u64),
        options: &HeapOptions,
    ) -> Result<Heap> {
        let _changes = lock(&CHANGES);
        let name = Name::new("", 0, PathBuf::new(), file)?;
        let made = match name.decode(&head.0)? {
            Some(h) => Ok(h),
            None => Err(new_head(options)?),
        };
        name.open(space, made, head, Some(options.exact))
    }

    /// [`Heap::open_over`] as a reader.
    #[doc(hidden)]
    pub fn open_reader_over(
        space: Box<dyn Space>,
        file: &str,
        head: (Vec<u8>, u64),
    ) -> Result<Heap> {
        let _changes = lock(&CHANGES);
        let name = Name::new("", 0, PathBuf::new(), file)?;
        let made = name.decode(&head.0)?;
        let made = made.ok_or_else(|| name.damaged("it was not made yet"))?;
        name.open(space, Ok(made), head, None)
    }

    /// The heap in whose addresses `addr` lies.
    #[inline]
    pub fn of(addr: *const u8) -> Option<Heap> {
        all()
            .find(|h| (addr as usize).wrapping_sub(h.base) < h.capacity)
            .map(Heap)
    }

    /// An open heap whose addresses, as far as it may grow, have some of these.
    #[doc(hidden)]
    pub fn meets(span: Range<usize>) -> Option<Heap> {
        all()
            .find(|h| span.start < h.base + h.capacity && h.base < span.end)
            .map(Heap)
    }

    /// The open heap in this file of an attachment.
    #[doc(hidden)]
    pub fn in_file(attachment: usize, file: &str) -> Option<Heap> {
        all()
            .find(|h| h.name.attachment == attachment && h.name.file == file)
            .map(Heap)
    }

    /// The heap that was opened first, of those that are open.
    #[inline]
    pub fn first() -> Option<Heap> {
        all().min_by_key(|h| h.number).map(Heap)
    }

    /// The heap as a number that is not 0, for other languages.
    #[doc(hidden)]
    pub fn handle(self) -> usize {
        std::ptr::from_ref(self.0) as usize
    }

    /// The heap of which [`Heap::handle`] gave this number, if it is open.
    #[doc(hidden)]
    #[inline]
    pub fn of_handle(handle: usize) -> Option<Heap> {
        all()
            .find(|h| std::ptr::from_ref::<Inner>(h) as usize == handle)
            .map(Heap)
    }

    /// The first address.
    pub fn base(self) -> *mut u8 {
        self.0.base as *mut u8
    }

    /// Whether only transactions change it.
    #[inline]
    pub fn is_exact(self) -> bool {
        self.0.exact
    }

    /// Ends it: what was not committed is gone, and so is its memory. No other call may be using
    /// the heap, and none may follow.
    pub fn close(self) -> Result<()> {
        let _alone = self.alone()?;
        self.end(&lock(&CHANGES), true)
    }

    /// [`Heap::close`] of a heap of which no open transaction has noted anything: it waits for none.
    pub fn close_unused(self) -> Result<()> {
        mojim_memory::fork::check_fork()?;
        self.end(&lock(&CHANGES), true)
    }

    /// `mapped`: its mappings are there.
    fn end(self, _changes: &MutexGuard<()>, mapped: bool) -> Result<()> {
        let inner = self.0;
        if inner.closed.swap(true, AcqRel) {
            return Err(inner.gone());
        }
        inner.renew_key();
        let me = std::ptr::from_ref(inner).cast_mut();
        inner.closed_before.store(CLOSED.swap(me, AcqRel), Release);
        for p in &OPEN {
            let _ = p.compare_exchange(me, std::ptr::null_mut(), AcqRel, Acquire);
        }
        let mut done = Ok(());
        let mut end = inner.base;
        for (at, len) in inner.shared.slabs.mappings() {
            if mapped {
                done = done.and(inner.space.unmap(at.cast_mut(), len));
            }
            end = at as usize + len;
        }
        if !inner.shared.slabs.is_stuck() {
            release(end, inner.base + inner.capacity - end);
        }
        inner.shared.slabs.close();
        lock(&inner.freed).fill_with(Vec::new);
        inner.space.end();
        done
    }

    /// Ends an attachment by `end`, and closes those of its heaps whose memory is gone: if `end` succeeds,
    /// or fails half-way and `gone` says so of a heap's first address. The others stay open. No open
    /// transaction has noted anything of them, and no other call may be using them.
    #[doc(hidden)]
    pub fn ending(
        attachment: usize,
        end: impl FnOnce() -> Result<()>,
        gone: impl Fn(usize) -> bool,
    ) -> Result<()> {
        // In a child a thread of the parent may have held the lock at the fork.
        if mojim_memory::fork::is_forked() {
            return end();
        }
        // A thread that ends meanwhile must not give its blocks to memory that is gone.
        let changes = lock(&CHANGES);
        let mut done = end();
        let whole = done.is_ok();
        for h in all().filter(|h| h.name.attachment == attachment) {
            if whole || gone(h.base) {
                done = done.and(Heap(h).end(&changes, false));
            }
        }
        done
    }

    /// Detaches a volume, and closes its heaps. Where that fails they are open as before, but for those
    /// whose memory is gone.
    pub fn detach(volume: &Volume) -> Result<()> {
        let gone = |base: usize| !mojim::is_region(base);
        Heap::ending(volume.attachment(), || volume.detach(), gone)
    }

    /// [`Heap::detach`] of a reader, whose memory goes in any case.
    pub fn detach_reader(reader: &Reader) -> Result<()> {
        Heap::ending(reader.attachment(), || reader.detach(), |_| true)
    }

    /// Fails for a reader's heap.
    #[doc(hidden)]
    pub fn check_writable(self) -> Result<()> {
        match self.0.read_only {
            true => Err(Error::ReadOnly(format!(
                "heap {} is only read here; its primary changes it",
                self.0.name.file
            ))),
            false => Ok(()),
        }
    }

    /// No other thread has a transaction open until the result is dropped.
    fn alone(self) -> Result<mojim_undo::Alone> {
        mojim_memory::fork::check_fork()?;
        let open = || invalid("a transaction is open in this thread: end it first".into());
        // Before it waits for the lock: who has that may wait for this transaction.
        if cache::in_transaction() {
            return Err(open());
        }
        mojim_undo::alone().ok_or_else(open)
    }

    fn check(self) -> Result<()> {
        let inner = self.0;
        mojim_memory::fork::check_fork()?;
        self.check_writable()?;
        match inner.exact {
            true => Err(Error::Unsupported(format!(
                "heap {} was opened for transactions only (MOJIM_HEAP_EXACT)",
                inner.name.file
            ))),
            false => Ok(()),
        }
    }

    /// A block of at least `size` bytes, which the next [`Heap::sync`] commits.
    ///
    /// # Errors
    /// `Io` (ENOMEM) if the capacity is used up; `Unsupported` if the heap is for transactions
    /// only; and those of a sync point.
    #[inline]
    pub fn malloc(self, size: usize) -> Result<*mut u8> {
        match cache::malloc(self.handle(), size) {
            Some(p) => Ok(p),
            None => self.malloc_slow(size, GRAIN),
        }
    }

    /// [`Heap::malloc`] at an address that is a multiple of `align`, a power of two up to 1 MiB.
    pub fn malloc_aligned(self, size: usize, align: usize) -> Result<*mut u8> {
        self.malloc_slow(size, align)
    }

    #[cold]
    fn malloc_slow(self, size: usize, align: usize) -> Result<*mut u8> {
        self.check()?;
        let inner = self.0;
        inner.check_whole()?;
        let wanted = Wanted::of(size, align)?;
        if let Wanted::Class(class) = wanted
            && let Some(p) = inner.refill(class)?
        {
            return Ok(mark(p));
        }
        let place = match inner.reuse(&wanted) {
            Some(p) => p,
            None => inner.take_ready(&wanted)?,
        };
        Ok(mark(place))
    }

    /// Frees a block, outside a transaction.
    ///
    /// # Errors
    /// `Invalid` if it is no block, or is free.
    #[inline]
    pub fn free(self, ptr: *mut u8) -> Result<()> {
        let mine = (ptr as usize).wrapping_sub(self.0.base) < self.0.capacity;
        match mine && cache::free(ptr) {
            true => Ok(()),
            false => self.free_slow(ptr),
        }
    }

    #[cold]
    fn free_slow(self, ptr: *mut u8) -> Result<()> {
        let inner = self.0;
        self.check()?;
        inner.check_whole()?;
        let Some((slab, p)) = inner.shared.slabs.find(ptr as usize) else {
            return Err(inner.no_block(ptr));
        };
        inner.shared.slabs.look(slab);
        // SAFETY: a state byte of the heap.
        let byte = unsafe { state(p.state) };
        if byte.load(Relaxed) != ALLOCATED {
            return Err(inner.no_block(ptr));
        }
        byte.store(FREE, Relaxed);
        compiler_fence(SeqCst);
        inner.put_freed(slab, p);
        Ok(())
    }

    /// Bytes that can be used of an allocated block.
    ///
    /// # Errors
    /// `Invalid` if it is no block, or is free; `ReadOnly` of a reader, which does not hear of blocks;
    /// `Unsupported` in a forked child, as a thread of the parent may have held a lock at the fork.
    #[inline]
    pub fn usable(self, ptr: *const u8) -> Result<usize> {
        mojim_memory::fork::check_fork()?;
        self.check_writable()?;
        self.find(ptr).map(|b| b.usable)
    }

    /// As `realloc`, outside a transaction.
    ///
    /// # Safety
    /// No other thread stores into the block meanwhile.
    pub unsafe fn realloc(self, ptr: *mut u8, size: usize) -> Result<*mut u8> {
        self.check()?;
        let old = self.find(ptr)?;
        if size <= old.usable && size > old.usable / 2 {
            return Ok(ptr);
        }
        let new = self.malloc(size)?;
        // SAFETY: two blocks, of at least so many bytes each.
        unsafe { new.copy_from_nonoverlapping(ptr, old.usable.min(size)) };
        self.free(ptr)?;
        Ok(new)
    }

    /// A block that is free as of the last commit, for a transaction. Its state byte is [`FREE`]
    /// still; until it is [`ALLOCATED`] the block is the caller's alone, to [`Heap::give`] back.
    #[inline]
    pub fn take(self, size: usize, align: usize) -> Result<Block> {
        let inner = self.0;
        if size <= MOST && align <= GRAIN {
            let class = class_of(size);
            // SAFETY: this thread's, and nothing below uses another one.
            let cache = unsafe { cache::last_used(inner).as_mut() };
            if let Some(p) = cache.and_then(|c| c.of(class).ready.pop()) {
                return Ok(Block {
                    ptr: p.ptr,
                    state: p.state,
                    usable: size_of(class),
                });
            }
        }
        if inner.read_only {
            self.check()?;
        }
        let wanted = Wanted::of(size, align)?;
        let p = inner.take_ready(&wanted)?;
        self.find_any(p.ptr)
    }

    /// An allocated block.
    ///
    /// # Errors
    /// `Invalid` if it is no block, or is free.
    #[inline]
    pub fn find(self, ptr: *const u8) -> Result<Block> {
        let block = self.find_any(ptr)?;
        // SAFETY: a state byte of the heap.
        match unsafe { state(block.state) }.load(Relaxed) {
            ALLOCATED => Ok(block),
            _ => Err(self.0.no_block(ptr)),
        }
    }

    #[inline]
    fn find_any(self, ptr: *const u8) -> Result<Block> {
        let slabs = &self.0.shared.slabs;
        let Some((slab, p)) = slabs.find(ptr as usize) else {
            return Err(self.0.no_block(ptr));
        };
        // A child changes no state byte, and a thread of the parent may have held a lock at the fork.
        if !mojim_memory::fork::is_forked() {
            slabs.look(slab);
        }
        Ok(Block {
            ptr: p.ptr,
            state: p.state,
            usable: slab.size(),
        })
    }

    /// A block that is free as of the last commit, and was the caller's, is the heap's again.
    #[inline]
    pub fn give(self, block: Block) {
        // A thread of the parent may have held a lock at the fork. A child takes no block.
        if mojim_memory::fork::is_forked() {
            return;
        }
        let inner = self.0;
        let (slab, p) = inner
            .shared
            .slabs
            .find(block.ptr as usize)
            .expect("it is a block");
        if slab.class() == LARGE {
            return inner.shared.slabs.put_large(p, &*inner.space);
        }
        let class = slab.class() as usize;
        cache::with(inner, |cache| {
            let Some(cache) = cache else {
                return inner.shared.slabs.put(class, &[p], &*inner.space);
            };
            let ready = &mut cache.of(class).ready;
            ready.push(p);
            if ready.len() > kept(class) {
                let back = ready.split_off(kept(class) / 2);
                inner.shared.slabs.put(class, &back, &*inner.space);
            }
        });
    }

    /// Commits all that was stored in the heap, atomically (FAMS, Section 4.1). No thread may be
    /// in the middle of a change. Waits for the transactions of other threads, and has them wait.
    ///
    /// # Errors
    /// `Invalid` if the calling thread has a transaction open; and those of a sync point.
    pub fn sync(self) -> Result<()> {
        self.check()?;
        let inner = self.0;
        let this = inner.shared.begun.fetch_add(1, SeqCst) + 1;
        cache::tell_begun(inner.shared.key.load(Acquire), this);
        // What other threads freed before they could see this number is in memory from here on.
        let _alone = self.alone()?;
        inner.check_whole()?;
        let whole = lock(&inner.whole);
        inner.space.sync(&inner.shared.slabs.mappings())?;
        drop(whole);
        inner.synced.fetch_max(this, SeqCst);
        inner.release_freed(this);
        Ok(())
    }

    /// Takes the heap back to its last commits: what was stored since is undone, also by calls
    /// outside of transactions, and blocks are as they were. No other thread may be using the
    /// heap, and no transaction be open. Costs a look at all pages that were stored to, and waits
    /// until the data file has what is committed.
    ///
    /// # Errors
    /// Those of [`mojim::rollback`]. If some of the memory was rolled back by then, the heap can only
    /// be closed.
    pub fn rollback(self) -> Result<()> {
        self.check()?;
        let _alone = self.alone()?;
        // A thread that ends gives its blocks back.
        let _changes = lock(&CHANGES);
        let inner = self.0;
        inner.check_whole()?;
        for (i, span) in inner.shared.slabs.mappings().into_iter().enumerate() {
            if let Err(e) = inner.space.rollback(span) {
                // What is awaited before the first byte is undone.
                let untouched = i == 0 && matches!(e, Error::Timeout(_) | Error::Stale(_));
                if !untouched {
                    inner.torn.store(true, SeqCst);
                    inner.renew_key();
                }
                return Err(e);
            }
        }
        inner.renew_key();
        lock(&inner.freed).iter_mut().for_each(Vec::clear);
        let done = inner.shared.slabs.begin_anew(&*inner.space);
        done.map_err(|e| {
            inner.torn.store(true, SeqCst);
            inner.name.damaged(e)
        })
    }
}

/// A request for a block.
enum Wanted {
    Class(usize),
    /// Units, and what the first is to be a multiple of.
    Large(usize, usize),
}

impl Wanted {
    fn of(size: usize, align: usize) -> Result<Wanted> {
        if !align.is_power_of_two() || align > ALIGNMENT {
            return Err(invalid(format!(
                "an alignment of {align}: it must be a power of two, at most {ALIGNMENT}"
            )));
        }
        if size > isize::MAX as usize / 2 {
            return Err(too_large(size));
        }
        // Blocks of a power of two are aligned to their size.
        let small = match align <= GRAIN {
            true => size,
            false => size.max(align).next_power_of_two(),
        };
        if small <= MOST {
            return Ok(Wanted::Class(class_of(small)));
        }
        let units = size.div_ceil(UNIT).max(1);
        Ok(Wanted::Large(units, (align / UNIT).max(1)))
    }
}

/// The state byte of a block that is handed out.
#[inline(always)]
fn mark(p: SlabBlock) -> *mut u8 {
    // SAFETY: a state byte of the heap; the block is the calling thread's.
    unsafe { state(p.state) }.store(ALLOCATED, Relaxed);
    p.ptr
}

impl Inner {
    fn check_whole(&self) -> Result<()> {
        if self.closed.load(Acquire) {
            return Err(self.gone());
        }
        match self.torn.load(Acquire) {
            true => Err(Error::Poisoned(format!(
                "a rollback of heap {} failed half-way; close it and open it again",
                self.name.file
            ))),
            false => Ok(()),
        }
    }

    /// What the caches of threads have is none of the heap's from here on.
    fn renew_key(&self) {
        cache::forget(self.shared.key.swap(new_key(), SeqCst));
    }

    fn gone(&self) -> Error {
        invalid(format!("heap {} is closed", self.name.file))
    }

    #[cold]
    fn no_block(&self, ptr: *const u8) -> Error {
        let offset = (ptr as usize).wrapping_sub(self.base);
        let why = match (offset < self.capacity, self.shared.slabs.find(ptr as usize)) {
            (false, _) => "does not lie in it",
            (true, None) => "begins no block",
            (true, Some(_)) => "is free: it was freed before, or never handed out",
        };
        invalid(format!("heap {}: {ptr:p} {why}", self.name.file))
    }

    /// A block that was freed outside a transaction since the last sync.
    fn reuse(&self, wanted: &Wanted) -> Option<SlabBlock> {
        let mut freed = lock(&self.freed);
        match *wanted {
            Wanted::Class(c) => {
                let p = freed[c].last_mut()?.blocks.pop();
                freed[c].pop_if(|f| f.blocks.is_empty());
                p
            }
            Wanted::Large(units, align) => {
                let fits = |f: &Freed| {
                    let found = self.shared.slabs.find(f.blocks[0].ptr as usize);
                    let (slab, p) = found.expect("it is a block");
                    let aligned = (p.ptr as usize).is_multiple_of(align * UNIT);
                    let has = slab.size() / UNIT;
                    aligned && has >= units && has - units <= units / 4
                };
                let i = freed[CLASSES].iter().position(fits)?;
                Some(freed[CLASSES].swap_remove(i).blocks[0])
            }
        }
    }

    /// A block for a call outside of a transaction, and more of them into the thread's cache: what was
    /// freed since the last sync first. `None` while the thread ends.
    fn refill(&'static self, class: usize) -> Result<Option<SlabBlock>> {
        cache::with(self, |cache| {
            let Some(cache) = cache else {
                return Ok(None);
            };
            self.stamp(cache, self.shared.begun.load(Acquire));
            #[cfg(test)]
            tests::meanwhile();
            let freed = &mut cache.of(class).freed;
            freed.make(kept(class));
            if let Some(p) = freed.pop() {
                return Ok(Some(p));
            }
            let owner = cache.owner;
            let Lists { freed, ready } = cache.of(class);
            let most = WAITING / size_of(class) / kept(class);
            let want = (kept(class) / 2).max(1);
            let mut batch = self.batch(class, owner, most);
            if batch.is_none()
                && ready.is_empty()
                && let Err(e) = (self.shared.slabs).take(class, want, ready, owner, &*self.space)
            {
                // What waits for others is better than none.
                batch = Some(self.batch(class, owner, 0).ok_or(e)?);
            }
            if let Some((stamp, blocks)) = batch {
                blocks.into_iter().for_each(|p| freed.put(p));
                let one = freed.pop();
                // They may have been freed after a sync that began since the look above.
                cache.stamp = cache.stamp.max(stamp);
                return Ok(one);
            }
            let from = ready.len().saturating_sub(want);
            ready.drain(from..).for_each(|p| freed.put(p));
            Ok(freed.pop())
        })
    }

    /// What was freed of a class since the last sync, with its stamp, at most [`kept`] blocks: of this
    /// thread's slabs or of those of one that has ended; any if more than `most` such batches wait.
    fn batch(&self, class: usize, owner: u32, most: usize) -> Option<(u64, Vec<SlabBlock>)> {
        let all = &mut lock(&self.freed)[class];
        let looked = all.len().saturating_sub(LOOKED);
        let mine = |f: &Freed| f.owner == owner || !owners::is_live(f.owner);
        let i = all[looked..].iter().rposition(mine).map(|i| looked + i);
        let last = all.len().checked_sub(1)?;
        let i = i.or((last >= most).then_some(last))?;
        let Freed { stamp, blocks, .. } = all.swap_remove(i);
        Some((stamp, blocks))
    }

    /// From here on `begun` is the stamp of what comes into the cache's `freed`.
    #[inline]
    fn stamp(&self, cache: &mut Blocks, begun: u64) {
        if cache.stamp != begun {
            self.recycle_cache(cache);
            cache.stamp = begun;
        }
    }

    /// A block that is free as of the last commit.
    fn take_ready(&'static self, wanted: &Wanted) -> Result<SlabBlock> {
        self.check_whole()?;
        let class = match *wanted {
            Wanted::Class(c) => c,
            Wanted::Large(units, align) => {
                return self.shared.slabs.take_large(units, align, &*self.space);
            }
        };
        cache::with(self, |cache| {
            let Some(cache) = cache else {
                let mut one = Vec::with_capacity(1);
                (self.shared.slabs).take(class, 1, &mut one, owners::NOBODY, &*self.space)?;
                return Ok(one[0]);
            };
            self.recycle_cache(cache);
            let owner = cache.owner;
            let ready = &mut cache.of(class).ready;
            if ready.is_empty() {
                let want = (kept(class) / 2).max(1);
                (self.shared.slabs).take(class, want, ready, owner, &*self.space)?;
            }
            Ok(ready.pop().expect("there was one, or an error"))
        })
    }

    /// A block that was freed outside a transaction.
    fn put_freed(&'static self, slab: &Slab, p: SlabBlock) {
        let begun = self.shared.begun.load(Acquire);
        let class = slab.class();
        cache::with(self, |cache| match cache {
            Some(cache) if class != LARGE => {
                self.stamp(cache, begun);
                if slab.owner() != cache.owner {
                    cache.away.make(AWAY);
                    if cache.away.room() == 0 {
                        self.send_away(cache);
                    }
                    return cache.away.put(p);
                }
                let owner = cache.owner;
                let freed = &mut cache.of(class as usize).freed;
                let most = kept(class as usize);
                freed.make(most);
                if freed.room() == 0 {
                    let blocks = freed.split_off(most / 2);
                    self.keep_freed((begun, owner), class, blocks);
                }
                freed.put(p);
            }
            _ => self.keep_freed((begun, slab.owner()), class, vec![p]),
        });
    }

    #[cold]
    fn keep_freed(&self, (stamp, owner): (u64, u32), class: u8, blocks: Vec<SlabBlock>) {
        let mut all = lock(&self.freed);
        let row = &mut all[row(class)];
        let looked = row.len().saturating_sub(LOOKED);
        let most = if class == LARGE {
            1
        } else {
            kept(class as usize)
        };
        let fits = |f: &&mut Freed| {
            (f.stamp, f.owner) == (stamp, owner) && f.blocks.len() + blocks.len() <= most
        };
        match row[looked..].iter_mut().rev().find(fits) {
            Some(f) => f.blocks.extend(blocks),
            None => row.push(Freed {
                stamp,
                class,
                owner,
                blocks,
            }),
        }
        drop(all);
        // A sync may have succeeded meanwhile.
        let synced = self.synced.load(Acquire);
        if stamp < synced {
            self.release_freed(synced);
        }
    }

    /// The threads whose blocks they are find them. What is of no thread, or of one that has ended, is
    /// this thread's from here on.
    #[cold]
    fn send_away(&self, cache: &mut Blocks) {
        let mine = cache.owner;
        let sorted = |p: SlabBlock| {
            let (slab, _) = (self.shared.slabs.find(p.ptr as usize)).expect("it is a block");
            if !owners::is_live(slab.owner()) {
                self.shared.slabs.own(slab, mine);
            }
            (slab.owner(), slab.class(), p)
        };
        let mut all: Vec<_> = cache.away.split_off(0).into_iter().map(sorted).collect();
        all.sort_by_key(|a| (a.0, a.1));
        for some in all.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (owner, class, _) = some[0];
            for part in some.chunks(kept(class as usize)) {
                let blocks = part.iter().map(|a| a.2).collect();
                self.keep_freed((cache.stamp, owner), class, blocks);
            }
        }
    }

    /// What a thread has freed before the last sync began is ready now; what is older than that
    /// and not covered by one goes where all threads find it.
    fn recycle_cache(&self, cache: &mut Blocks) {
        let covered = cache.stamp < self.synced.load(Acquire);
        if !covered && cache.stamp == self.shared.begun.load(Acquire) {
            return;
        }
        // If they are covered, they are in the slabs right away.
        self.send_away(cache);
        let owner = cache.owner;
        for class in 0..CLASSES {
            let mut blocks = cache.of(class).freed.split_off(0);
            if blocks.is_empty() {
                continue;
            }
            if !covered {
                self.keep_freed((cache.stamp, owner), class as u8, blocks);
                continue;
            }
            let room = kept(class).saturating_sub(cache.of(class).ready.len());
            let back = blocks.split_off(room.min(blocks.len()));
            cache.of(class).ready.append(&mut blocks);
            self.shared.slabs.put(class, &back, &*self.space);
        }
    }

    /// What was freed before the sync `this` began, which has succeeded, is free.
    fn release_freed(&self, this: u64) {
        let mut all = lock(&self.freed);
        let covered = |rows: &mut Vec<Freed>| -> Vec<Freed> {
            rows.extract_if(.., |f| f.stamp < this).collect()
        };
        let done: Vec<Freed> = all.iter_mut().flat_map(covered).collect();
        drop(all);
        for f in done {
            match f.class {
                LARGE => self.shared.slabs.put_large(f.blocks[0], &*self.space),
                c => self.shared.slabs.put(c as usize, &f.blocks, &*self.space),
            }
        }
    }
}

impl Keeper for Inner {
    #[inline(always)]
    fn shared(&self) -> &Shared {
        &self.shared
    }

    fn handle(&self) -> usize {
        match self.exact || self.read_only || self.closed.load(Acquire) {
            true => 0,
            false => std::ptr::from_ref(self) as usize,
        }
    }

    fn take_back(&self, cache: &mut Blocks) {
        if mojim_memory::fork::is_forked() {
            return;
        }
        // The heap may have been closed or rolled back meanwhile. Before the other lock: a sync, which has
        // transactions wait, waits for that one.
        let _changes = lock(&CHANGES);
        let _whole = lock(&self.whole);
        if !cache.is_of(self) {
            return;
        }
        self.send_away(cache);
        let owner = cache.owner;
        for class in 0..CLASSES {
            let ready = std::mem::take(&mut cache.of(class).ready);
            if !ready.is_empty() {
                self.shared.slabs.put(class, &ready, &*self.space);
            }
            let freed = cache.of(class).freed.split_off(0);
            if !freed.is_empty() {
                self.keep_freed((cache.stamp, owner), class as u8, freed);
            }
        }
    }
}

/// Which heap it is.
struct Name {
    volume: String,
    /// The attachment ([`Volume::attachment`]) that it was opened through.
    attachment: usize,
    /// The directory of the volume's files.
    home: PathBuf,
    file: String,
}

impl Name {
    /// Of a heap that is not open. The caller holds [`CHANGES`].
    fn new(volume: &str, attachment: usize, home: PathBuf, file: &str) -> Result<Name> {
        if all().any(|h| h.name.home == home && h.name.file == file) {
            let text = format!("heap {file} of volume {volume} is open in this process");
            return Err(Error::Busy(text));
        }
        Ok(Name {
            volume: volume.into(),
            attachment,
            home,
            file: file.into(),
        })
    }

    fn damaged(&self, why: impl ToString) -> Error {
        Error::Damaged {
            path: self.file.as_str().into(),
            what: format!("as a heap of volume {}: {}", self.volume, why.to_string()),
        }
    }

    fn decode(&self, head: &[u8]) -> Result<Option<HeapHead>> {
        HeapHead::decode(&head[..FIXED_LEN]).map_err(|e| self.damaged(e))
    }

    /// `made`: an error for a heap that is to be made. `exact`: `None` for a reader.
    fn open(
        self,
        space: Box<dyn Space>,
        made: Result<HeapHead, HeapHead>,
        head: (Vec<u8>, u64),
        exact: Option<bool>,
    ) -> Result<Heap> {
        let (Ok(fixed) | Err(fixed)) = made;
        let (base, capacity) = (fixed.base as usize, fixed.capacity as usize);
        // The caller holds `CHANGES`.
        if OPEN.iter().all(|p| !p.load(Acquire).is_null()) {
            return Err(Error::Busy(format!(
                "this process has {MOST_OPEN} heaps open, and cannot have more"
            )));
        }
        reserve(&self.file, base, capacity)?;
        let mut mapped = Vec::new();
        let slabs = self.map(&*space, exact.is_none(), made, &head, &mut mapped);
        let slabs = match slabs {
            Ok(slabs) => slabs,
            Err(e) => {
                let mut end = base;
                for (at, len) in mapped {
                    let _ = space.unmap(at, len);
                    end = at as usize + len;
                }
                release(end, base + capacity - end);
                return Err(e);
            }
        };
        Ok(register(Box::leak(Box::new(Inner {
            space,
            name: self,
            base,
            capacity,
            exact: exact == Some(true),
            read_only: exact.is_none(),
            shared: Shared {
                key: AtomicU64::new(new_key()),
                begun: AtomicU64::new(0),
                slabs,
            },
            freed: Mutex::new([const { Vec::new() }; CLASSES + 1]),
            roots: Mutex::default(),
            synced: AtomicU64::new(0),
            whole: Mutex::default(),
            closed: AtomicBool::new(false),
            number: new_key(),
            torn: AtomicBool::new(false),
            closed_before: AtomicPtr::default(),
        }))))
    }

    /// Maps the chunks, and makes a new heap what it is. Tells what it has `mapped`, in order.
    fn map(
        &self,
        space: &dyn Space,
        read_only: bool,
        made: Result<HeapHead, HeapHead>,
        (head, size): &(Vec<u8>, u64),
        mapped: &mut Vec<(*mut u8, usize)>,
    ) -> Result<Slabs> {
        let (Ok(fixed) | Err(fixed)) = made;
        let chunks = match made {
            Ok(_) => decode_chunks(head, *size).map_err(|e| self.damaged(e))?,
            Err(_) => vec![(HEAD_LEN as u64, FIRST - HEAD_LEN as u64)],
        };
        let Some(last) = chunks.last() else {
            return Err(self.damaged("it has no chunk"));
        };
        if last.0 + last.1 > fixed.capacity {
            return Err(self.damaged("its chunks are more than its capacity"));
        }
        let base = fixed.base as usize;
        let slabs = Slabs::new(base, fixed.capacity as usize)?;
        for &(offset, len) in &chunks {
            // The head is mapped with the first chunk.
            let (offset, len) = match offset == HEAD_LEN as u64 {
                true => (0, len + offset),
                false => (offset, len),
            };
            let at = (base + offset as usize) as *mut u8;
            space.map(offset, len as usize, at)?;
            mapped.push((at, len as usize));
        }
        if let Err(new) = made {
            write_head(space, &new, chunks[0])?;
        }
        for (offset, len) in chunks {
            let chunk = Chunk::of(offset, len).expect("it was checked");
            match read_only {
                true => slabs.know(chunk),
                false => slabs.adopt(chunk, space).map_err(|e| self.damaged(e))?,
            }
        }
        Ok(slabs)
    }
}

fn new_head(options: &HeapOptions) -> Result<HeapHead> {
    let capacity = match options.capacity {
        0 => DEFAULT_CAPACITY,
        c => c.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX),
    };
    let capacity = capacity.max(LEAST_CAPACITY);
    let base = match options.address {
        0 => choose(capacity)?,
        a => a,
    };
    let head = HeapHead {
        base: base as u64,
        capacity: capacity as u64,
        identity: crate::addresses::random(),
    };
    match head.is_sane() {
        true => Ok(head),
        false => Err(invalid(format!(
            "a heap of {capacity} bytes at {base:#x}: the address must be a multiple of 1 MiB, and all of it below 2^47"
        ))),
    }
}

/// The first sync point of a heap: from here on the file is one.
fn write_head(space: &dyn Space, made: &HeapHead, chunk: (u64, u64)) -> Result<()> {
    let fixed = made.encode();
    let entry = encode_chunk(chunk.0, chunk.1);
    let base = made.base as usize as *mut u8;
    let at = base.wrapping_add(chunk_entry_at(0));
    // SAFETY: the head, which is mapped and which nobody uses yet.
    unsafe {
        base.copy_from_nonoverlapping(fixed.as_ptr(), FIXED_LEN);
        at.copy_from_nonoverlapping(entry.as_ptr(), CHUNK_ENTRY_LEN);
    }
    let spans = [
        (base.cast_const(), FIXED_LEN),
        (at.cast_const(), CHUNK_ENTRY_LEN),
    ];
    space.commit(&spans, true)
}

/// In a child that was forked: no cache of the parent's is used, so each call fails.
extern "C" fn forked() {
    if mojim_memory::fork::is_forked() {
        cache::forget_mine();
    }
}

/// Makes a heap known. There is room for it.
fn register(inner: &'static mut Inner) -> Heap {
    static FORKS: mojim_memory::fork::Once = mojim_memory::fork::Once::new();
    FORKS.call(|| {
        // Behind the handler that marks the child, which the attachment has registered.
        // SAFETY: registers a handler that takes no lock.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
    let me: *mut Inner = inner;
    let free = OPEN.iter().position(|p| p.load(Acquire).is_null());
    let i = free.expect("it was looked for");
    OPEN[i].store(me, Release);
    USED.fetch_max(i + 1, AcqRel);
    // SAFETY: leaked, and from here on only shared.
    Heap(unsafe { &*me })
}
