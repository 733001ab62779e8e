//! A heap whose contents are durable: values, pointers between them, and transactions.
//!
//! Owns the rules by which safe code borrows what lies in a heap.
//!
//! Invariants:
//! - Only a transaction changes a heap, and it borrows it mutably: no reference into a heap lives
//!   while another thread, or a rollback, changes what it shows.
//! - A block that a transaction freed, or allocated before it was taken back, is handed out again
//!   after its end only: references within the transaction stay good.

use std::mem::needs_drop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use engine::{Error, Result};
use mojim_format::heap::ALIGNMENT;
use mojim_heap::{ALLOCATED, Block, FREE, HeapOptions, LEAST_CAPACITY};

use crate::alone::alone;
use crate::attached::{Attached, Mapped};
use crate::persistent::{Persistent, Ptr, Stored};
use crate::volume::Volume;

/// Bytes in front of a block's values: the type's tag, and how many they are.
pub(crate) const HEAD: usize = 16;

/// A heap in a file of a volume: what lies in it is there in the next run, and on the mirror.
///
/// It is always mapped at the same addresses (between 0x2000'0000'0000 and 0x3000'0000'0000), so
/// pointers in it stay good. A **root** is a name by which the program finds its data. All
/// changes are made by [`Heap::atomically`]: whole or not at all, durable when it returns.
///
/// Threads share a heap in a `Mutex` or `RwLock`. Dropping it closes it, and waits for nobody.
///
/// Its file is written by this type alone, with `mojim heap move` beside: what is put there by other
/// means is not checked, but for the tags of types ([its bytes](crate#the-bytes-of-a-heap)).
///
/// ```
/// use mojim::{Heap, Ptr, Volume, persistent};
///
/// persistent! {
///     struct List { first: Option<Ptr<Item>> }
/// }
/// persistent! {
///     struct Item { text: Ptr<str>, next: Option<Ptr<Item>> }
/// }
///
/// # let example = mojim::example::Example::new();
/// # let config = example.config();
/// let volume = Volume::attach(&config, "a", None)?;
/// let mut heap = Heap::open(&volume, "todo")?;
/// let list = heap.root_or("list", || List { first: None })?;
/// heap.atomically(|tx| {
///     let text = tx.alloc_str("write it down")?;
///     let next = tx.get(list)?.first;
///     let item = tx.alloc(Item { text, next })?;
///     tx.get_mut(list)?.first = Some(item);
///     Ok(())
/// })?;
/// let item = heap.get(heap.get(list)?.first.unwrap())?;
/// assert_eq!(heap.get(item.text)?, "write it down");
/// assert_eq!(item.next, None);
/// # Ok::<(), mojim::Error>(())
/// ```
#[must_use = "a heap that is dropped is closed"]
pub struct Heap {
    heap: mojim_heap::Heap,
    file: String,
    volume: Arc<Attached>,
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Heap({})", self.file)
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // A transaction borrows the heap, so none that is open has noted anything of it. A failure
        // leaves memory mapped that nobody uses.
        let _ = self.heap.close_unused();
        self.volume.unmapped(&self.file);
    }
}

/// Where a pointer leads: its block, and what is in that.
pub(crate) fn follow<T: Stored + ?Sized>(
    heap: mojim_heap::Heap,
    ptr: Ptr<T>,
) -> Result<(Block, *mut T)> {
    let block = heap.find(ptr.block())?;
    // SAFETY: an allocated block, which has 16 bytes at least and is aligned to them. What is in
    // it changes under a mutable borrow of the heap only.
    let [tag, count] = unsafe { block.ptr.cast::<[u64; 2]>().read() };
    let fits = T::size(count as usize) <= block.usable - HEAD;
    if tag != T::tag() || !fits {
        return Err(Error::Invalid(format!(
            "{ptr:?} leads to no `{}`: what was there was freed, or is of another type",
            T::name()
        )));
    }
    Ok((block, T::at(block.ptr.wrapping_add(HEAD), count as usize)))
}

/// What is lent of that to which a pointer leads.
fn lent<T: Stored + ?Sized>(heap: mojim_heap::Heap, ptr: Ptr<T>) -> Result<*mut T::Target> {
    let (_, at) = follow(heap, ptr)?;
    // SAFETY: a value of this type, which does not change meanwhile.
    unsafe { T::target(heap, at) }.map(|(at, _)| at)
}

/// How a root names its type: at most 127 bytes.
fn kind<T: Stored + ?Sized>() -> String {
    let name = T::name();
    let short: String = name.chars().take(25).collect();
    format!("{short} {:016x}", T::tag())
}

impl Heap {
    /// Opens the heap in a file of the volume, and makes it if the file is not there. It reserves 64
    /// GiB of addresses; the file grows as needed.
    ///
    /// # Errors
    /// [`Error::Busy`] if it is open, or the file has regions; `Io` with EADDRINUSE if something else
    /// is at its addresses (`mojim heap move` gives it others); [`Error::Damaged`] if the file is no heap;
    /// [`Error::Unsupported`] where the volume rounds to pages or shares working copies;
    /// [`Error::Invalid`] while the calling thread has a transaction open.
    pub fn open(volume: &Volume, file: &str) -> Result<Heap> {
        Heap::open_at(volume, file, 0, 0)
    }

    /// [`Heap::open`] that makes a new heap with so many bytes of addresses (a multiple of 1 MiB, and at
    /// least 16 MiB; 0: 64 GiB), from `address` on (a multiple of 1 MiB; 0: chosen by chance). A heap that
    /// exists keeps what it has: both are not looked at then, and `mojim heap move` changes them.
    ///
    /// # Errors
    /// Those of [`Heap::open`]; [`Error::Invalid`] for other numbers.
    pub fn open_at(volume: &Volume, file: &str, capacity: usize, address: usize) -> Result<Heap> {
        alone("opening a heap")?;
        let is_right = |n: usize, least| n == 0 || n.is_multiple_of(ALIGNMENT) && n >= least;
        if !is_right(capacity, LEAST_CAPACITY) || !is_right(address, ALIGNMENT) {
            return Err(Error::Invalid(format!(
                "heap {file}: {capacity} bytes at {address:#x}: both are multiples of 1 MiB, or 0, and it has at least 16 MiB"
            )));
        }
        let attached = volume.attached();
        let mut mapped = attached.mapped();
        if mapped.iter().any(|m| m.file == file && !m.is_heap) {
            return Err(Error::Busy(format!(
                "{file} has regions, through which a heap would change"
            )));
        }
        let options = HeapOptions::new(capacity, address).exact();
        let heap = mojim_heap::Heap::open(&attached.engine, file, &options)?;
        mapped.push(Mapped {
            file: file.to_owned(),
            is_heap: true,
        });
        Ok(Heap {
            heap,
            file: file.to_owned(),
            volume: attached.clone(),
        })
    }

    /// What a pointer leads to.
    ///
    /// # Errors
    /// [`Error::Invalid`] if that was freed, or is of another type.
    pub fn get<T: Stored + ?Sized>(&self, ptr: Ptr<T>) -> Result<&T::Target> {
        let at = lent(self.heap, ptr)?;
        // SAFETY: a value of this type (its tag), which stays and does not change while the heap is
        // borrowed.
        Ok(unsafe { &*at })
    }

    /// The root of this name, if there is one.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is of another type; the text shows both.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// assert_eq!(heap.root::<u64>("n")?, None);
    /// heap.root_or("n", || 7u64)?;
    /// assert!(heap.root::<i64>("n").is_err());
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn root<T: Stored + ?Sized>(&self, name: &str) -> Result<Option<Ptr<T>>> {
        match self.heap.root(name, &kind::<T>()) {
            Ok(block) => Ok(Ptr::new(block)),
            Err(Error::NotFound(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The root of this name; if there is none, it is made, with the value of `f`, in a transaction.
    ///
    /// # Errors
    /// Those of [`Heap::root`] and of [`Heap::atomically`].
    pub fn root_or<T: Persistent>(&mut self, name: &str, f: impl FnOnce() -> T) -> Result<Ptr<T>> {
        match self.root(name)? {
            Some(ptr) => Ok(ptr),
            None => self.atomically(|tx| {
                let ptr = tx.alloc(f())?;
                tx.set_root(name, ptr)?;
                Ok(ptr)
            }),
        }
    }

    /// Runs `f` in a transaction. What it changed is committed as one sync point if it returns
    /// `Ok`, and taken back if it returns an error or panics.
    ///
    /// Costs what a [`sync`](crate::sync) of the changed bytes does, and for each change a copy of the
    /// old bytes.
    ///
    /// **Nothing else is committed within it.** A transaction is one sync point. In `f`, each call that would
    /// be another one fails with [`Error::Invalid`], before it has committed anything: `sync`, a
    /// [`Batch`](crate::Batch), another transaction, [`Heap::open`], and what makes, cuts, renames or
    /// removes a file.
    ///
    /// **Without its mirror it waits for ever**, and says nothing: a commit that got no answer is in doubt, and a
    /// transaction that is neither committed nor taken back has nothing to return. It returns `Ok` when the
    /// mirror is back, and [`Error::Stale`] when the mirror has become the primary (`mojim promote`, or
    /// by three voters). With automatic failover the voters let this node go on alone, within seconds, if the
    /// mirror is lost. `mojim status` shows that it is gone. Of a process that is killed there, the
    /// transaction is found whole, or not at all. [`on_doubt`](crate::on_doubt) has a function of the program's
    /// decide after each try (10 s by default: `resend_timeout` × `resend_attempts`).
    ///
    /// # Errors
    /// Those of `f`; those of the commit, and then the transaction was taken back, or the process
    /// cannot commit any more ([`Error::Stale`], [`Error::Poisoned`], [`Error::Full`], and after a commit that was in
    /// doubt any other: what it changed stays in memory then); [`Error::Invalid`] if the thread has
    /// a transaction open: they do not nest.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let n = heap.root_or("n", || 1u64)?;
    /// let failed = heap.atomically(|tx| {
    ///     *tx.get_mut(n)? = 2;
    ///     Err::<(), _>(mojim::Error::Invalid("no".into()))
    /// });
    /// assert!(failed.is_err() && *heap.get(n)? == 1);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn atomically<R>(&mut self, f: impl FnOnce(&mut Tx<'_>) -> Result<R>) -> Result<R> {
        self.try_atomically(f)
    }

    /// [`Heap::atomically`] with an error type of the program's.
    ///
    /// ```
    /// enum Refused { Poor, Mojim(mojim::Error) }
    /// impl From<mojim::Error> for Refused {
    ///     fn from(e: mojim::Error) -> Refused { Refused::Mojim(e) }
    /// }
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let cents = heap.root_or("cents", || 5i64)?;
    /// let paid = heap.try_atomically(|tx| {
    ///     *tx.get_mut(cents)? -= 6;
    ///     if *tx.get(cents)? < 0 { Err(Refused::Poor) } else { Ok(()) }
    /// });
    /// assert!(matches!(paid, Err(Refused::Poor)) && *heap.get(cents)? == 5);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn try_atomically<R, E: From<Error>>(
        &mut self,
        f: impl FnOnce(&mut Tx<'_>) -> Result<R, E>,
    ) -> Result<R, E> {
        alone("atomically")?;
        let mut blocks = Blocks(self.heap, Vec::new());
        mojim_tx::atomically(|log| {
            f(&mut Tx {
                heap: self.heap,
                log,
                blocks: &mut blocks,
            })
        })
    }
}

pub(crate) fn check_index(index: usize, len: usize) -> Result<()> {
    match index < len {
        true => Ok(()),
        false => Err(Error::Invalid(format!("index {index} of {len} values"))),
    }
}

fn state(block: &Block) -> &AtomicU8 {
    // SAFETY: a state byte of the heap, which is read and written as an atomic.
    unsafe { AtomicU8::from_ptr(block.state) }
}

/// Blocks that a transaction allocated or freed. After its end, whatever that was, those that are
/// free are the heap's again. One that was allocated and freed is named twice.
struct Blocks(mojim_heap::Heap, Vec<Block>);

impl Blocks {
    /// Has room for two more.
    fn reserve(&mut self) -> Result<()> {
        self.1.try_reserve(2).map_err(|_| mojim_tx::no_memory())
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.1.sort_unstable_by_key(|b| b.ptr);
        self.1.dedup_by_key(|b| b.ptr);
        for block in self.1.drain(..) {
            if state(&block).load(Relaxed) == FREE {
                self.0.give(block);
            }
        }
    }
}

/// A transaction of a heap: what [`Heap::atomically`] passes to its closure.
pub struct Tx<'h> {
    heap: mojim_heap::Heap,
    log: &'h mojim_tx::Tx,
    blocks: &'h mut Blocks,
}

impl std::fmt::Debug for Tx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tx")
    }
}

impl Tx<'_> {
    /// What a pointer leads to.
    ///
    /// # Errors
    /// As [`Heap::get`].
    pub fn get<T: Stored + ?Sized>(&self, ptr: Ptr<T>) -> Result<&T::Target> {
        let at = lent(self.heap, ptr)?;
        // SAFETY: as in `Heap::get`; changes borrow the transaction mutably.
        Ok(unsafe { &*at })
    }

    /// What a pointer leads to, to be changed: all of it is noted as it is, and committed.
    ///
    /// # Errors
    /// As [`Heap::get`]; `Io` with ENOMEM.
    pub fn get_mut<T: Stored + ?Sized>(&mut self, ptr: Ptr<T>) -> Result<&mut T::Target> {
        let at = lent(self.heap, ptr)?;
        // SAFETY: a value of the heap, which stays until the transaction's end, since that borrows
        // the heap; nothing else borrows it now.
        unsafe {
            match size_of_val(&*at) {
                0 => {}
                size => self.log.add(at.cast(), size)?,
            }
            Ok(&mut *at)
        }
    }

    /// One value of a slice or a [`PVec`](crate::PVec), to be changed: only that one is noted and
    /// committed.
    ///
    /// # Errors
    /// As [`Tx::get_mut`]; [`Error::Invalid`] if there is no such value.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let cents = heap.atomically(|tx| tx.alloc_slice(&[100i64; 1000]))?;
    /// heap.atomically(|tx| {
    ///     *tx.at_mut(cents, 3)? -= 10;
    ///     *tx.at_mut(cents, 900)? += 10;
    ///     Ok(())
    /// })?;
    /// assert_eq!(heap.get(cents)?.iter().sum::<i64>(), 100_000);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn at_mut<T: Persistent, S>(&mut self, ptr: Ptr<S>, index: usize) -> Result<&mut T>
    where
        S: Stored<Target = [T]> + ?Sized,
    {
        let at = lent(self.heap, ptr)?;
        check_index(index, at.len())?;
        let one = at.cast::<T>().wrapping_add(index);
        // SAFETY: as in `get_mut`.
        unsafe {
            self.log.add(one.cast(), size_of::<T>())?;
            Ok(&mut *one)
        }
    }

    /// Notes bytes of the heap, which are about to be stored to.
    pub(crate) fn note<T>(&self, at: *mut T, count: usize) -> Result<()> {
        match count * size_of::<T>() {
            0 => Ok(()),
            // SAFETY: bytes of an allocated block or a state byte, which stay until the
            // transaction's end.
            size => unsafe { self.log.add(at.cast(), size) },
        }
    }

    /// A block for `T`, to be written by `fill`, and allocated then: `size` bytes, of which the first
    /// `used` are committed. After an error nothing has changed.
    pub(crate) fn make_in<T: Stored + ?Sized>(
        &mut self,
        count: usize,
        [used, size]: [usize; 2],
        fill: impl FnOnce(*mut u8),
    ) -> Result<Ptr<T>> {
        self.blocks.reserve()?;
        let block = self.heap.take(size.saturating_add(HEAD), HEAD)?;
        self.blocks.1.push(block);
        self.note(block.state, 1)?;
        // SAFETY: a free block of so many bytes, this transaction's.
        unsafe {
            mojim_tx::add_new(block.ptr, HEAD + used)?;
            block.ptr.cast::<[u64; 2]>().write([T::tag(), count as u64]);
        }
        fill(block.ptr.wrapping_add(HEAD));
        state(&block).store(ALLOCATED, Relaxed);
        Ok(Ptr::new(block.ptr).expect("no block is at address 0"))
    }

    /// A block with so many values, which `fill` writes.
    pub(crate) fn make<T: Stored + ?Sized>(
        &mut self,
        count: usize,
        fill: impl FnOnce(*mut u8),
    ) -> Result<Ptr<T>> {
        let size = T::size(count);
        self.make_in(count, [size; 2], fill)
    }

    /// Has a block ready to be freed by [`Tx::release`].
    pub(crate) fn prepare_release(&mut self, block: &Block) -> Result<()> {
        self.blocks.reserve()?;
        self.note(block.state, 1)
    }

    /// Frees a block.
    pub(crate) fn release(&mut self, block: Block) {
        self.blocks.1.push(block);
        state(&block).store(FREE, Relaxed);
    }

    pub(crate) fn heap(&self) -> mojim_heap::Heap {
        self.heap
    }

    /// Puts a value into the heap.
    ///
    /// # Errors
    /// `Io` with ENOMEM where the heap's capacity is used up, or the memory; those of a sync point,
    /// where the heap grows.
    pub fn alloc<T: Persistent>(&mut self, value: T) -> Result<Ptr<T>> {
        const {
            assert!(align_of::<T>() <= HEAD, "blocks are aligned to 16 bytes");
            assert!(!needs_drop::<T>(), "nothing in a heap is dropped");
        }
        // SAFETY: room for a `T`.
        self.make(1, |at| unsafe { at.cast::<T>().write(value) })
    }

    /// Puts a copy of values into the heap.
    ///
    /// # Errors
    /// As [`Tx::alloc`].
    pub fn alloc_slice<T: Persistent + Copy>(&mut self, values: &[T]) -> Result<Ptr<[T]>> {
        const { assert!(align_of::<T>() <= HEAD, "blocks are aligned to 16 bytes") }
        let from = values.as_ptr();
        // SAFETY: room for so many; a new block overlaps nothing that is borrowed.
        self.make(values.len(), |at| unsafe {
            at.cast::<T>().copy_from_nonoverlapping(from, values.len());
        })
    }

    /// Puts a copy of a text into the heap.
    ///
    /// # Errors
    /// As [`Tx::alloc`].
    pub fn alloc_str(&mut self, text: &str) -> Result<Ptr<str>> {
        // SAFETY: room for so many bytes.
        self.make(text.len(), |at| unsafe {
            at.copy_from_nonoverlapping(text.as_ptr(), text.len());
        })
    }

    /// Frees what a pointer leads to, but not what that leads to. A pointer to it that is followed
    /// later is an error, or leads to another value of the same type that was put there.
    ///
    /// # Errors
    /// As [`Heap::get`].
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let n = heap.atomically(|tx| tx.alloc(1u64))?;
    /// heap.atomically(|tx| tx.free(n))?;
    /// assert!(heap.get(n).is_err());
    /// assert!(heap.atomically(|tx| tx.free(n)).is_err());
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn free<T: Stored + ?Sized>(&mut self, ptr: Ptr<T>) -> Result<()> {
        let (block, at) = follow(self.heap, ptr)?;
        // SAFETY: a value of this type, which does not change meanwhile.
        let (_, inner) = unsafe { T::target(self.heap, at)? };
        self.prepare_release(&block)?;
        if let Some(inner) = inner {
            self.prepare_release(&inner)?;
            self.release(inner);
        }
        self.release(block);
        Ok(())
    }

    /// Gives a root this name: a value from which the program finds all others.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name has none or more than 63 bytes, or there are 128 roots.
    pub fn set_root<T: Stored + ?Sized>(&mut self, name: &str, ptr: Ptr<T>) -> Result<()> {
        let (block, _) = follow(self.heap, ptr)?;
        self.note_root(name, block.ptr, &kind::<T>())
    }

    /// Removes a root's name, if there is one. What it led to stays.
    pub fn remove_root(&mut self, name: &str) -> Result<()> {
        self.note_root(name, std::ptr::null_mut(), "")
    }

    fn note_root(&mut self, name: &str, block: *mut u8, kind: &str) -> Result<()> {
        mojim_tx::set_root(self.heap, name, block, kind)
    }
}
