//! Vectors that lie in a heap.
//!
//! Owns how they grow.
//!
//! Invariants:
//! - A vector's block has a pointer to the block of its values, or none as long as it was never
//!   pushed to. How many values these are is in front of them, as for a slice: a value behind them
//!   is never shown.
//! - Safe code has pointers to a vector, but never a vector itself, nor a pointer to its values:
//!   no two vectors have the same values.
//! - A call that fails has changed nothing: all that it will store to is noted before its first
//!   store.

use std::mem::needs_drop;
use std::ptr::NonNull;

use engine::Result;
use mojim_heap::Block;

use crate::heap::{HEAD, Heap, Tx, check_index, follow};
use crate::persistent::{Lent, Persistent, Ptr, Stored, shape};

/// A vector in a heap: values side by side, as in `Vec`, that are there in the next run.
///
/// It is reached by a `Ptr<PVec<T>>`: that of a root ([`Heap::root_vec`]), or
/// of a field, for a vector that a transaction made ([`Tx::alloc_vec`]). [`Heap::get`] and
/// [`Tx::get`] lend it as a slice; a transaction changes it, and what it changed is taken back with the
/// transaction. A call that fails has changed nothing.
///
/// [`Tx::push`], [`Tx::pop`] and [`Tx::swap_remove`] commit the values that they change and 8 bytes;
/// where it is full, a push moves the values to a block of twice their size. [`Tx::insert`] and
/// [`Tx::remove`] commit all values behind the place.
///
/// A vector of texts is a `PVec<Ptr<str>>`. What its values lead to is not freed with them.
///
/// ```
/// # let example = mojim::example::Example::new();
/// # let config = example.config();
/// use mojim::{Heap, Ptr, Volume};
///
/// let volume = Volume::attach(&config, "a", None)?;
/// let mut heap = Heap::open(&volume, "todo")?;
/// let list = heap.root_vec::<Ptr<str>>("list")?;
/// heap.atomically(|tx| {
///     let text = tx.alloc_str("write it down")?;
///     tx.push(list, text)
/// })?;
/// assert_eq!(heap.get(heap.get(list)?[0])?, "write it down");
/// heap.atomically(|tx| {
///     let text = tx.remove(list, 0)?;
///     tx.free(text)
/// })?;
/// assert!(heap.get(list)?.is_empty());
/// # Ok::<(), mojim::Error>(())
/// ```
///
/// Nothing changes under a slice of it:
///
/// ```compile_fail,E0502
/// # fn f(heap: &mut mojim::Heap, list: mojim::Ptr<mojim::PVec<u64>>) -> mojim::Result<()> {
/// heap.atomically(|tx| {
///     let first = &tx.get(list)?[0];
///     tx.push(list, 1)?; // may move it
///     assert_eq!(*first, 1);
///     Ok(())
/// })
/// # }
/// ```
#[repr(C)]
pub struct PVec<T: Persistent>(Option<Ptr<Values<T>>>);

impl<T: Persistent> std::fmt::Debug for PVec<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PVec")
    }
}

/// The values of a vector, in a block that may have room for more.
#[repr(transparent)]
struct Values<T>([T]);

// SAFETY: of this crate.
unsafe impl<T: Persistent> Stored for Values<T> {
    type Target = [T];
    fn name() -> &'static str {
        "PVec's values"
    }
    fn tag() -> u64 {
        const { shape("PVec's values", [0, 0], &[T::SHAPE]) }
    }
    fn size(count: usize) -> usize {
        size_of::<T>().saturating_mul(count)
    }
    fn at(data: *mut u8, count: usize) -> *mut Values<T> {
        std::ptr::slice_from_raw_parts_mut(data.cast::<T>(), count) as *mut Values<T>
    }
    unsafe fn target(_: mojim_heap::Heap, at: *mut Values<T>) -> Lent<[T]> {
        Ok((at as *mut [T], None))
    }
}

// SAFETY: of this crate.
unsafe impl<T: Persistent> Stored for PVec<T> {
    type Target = [T];
    fn name() -> &'static str {
        "PVec"
    }
    fn tag() -> u64 {
        const { shape("PVec", [0, 0], &[T::SHAPE]) }
    }
    fn size(_: usize) -> usize {
        size_of::<PVec<T>>()
    }
    fn at(data: *mut u8, _: usize) -> *mut PVec<T> {
        data.cast()
    }
    unsafe fn target(heap: mojim_heap::Heap, at: *mut PVec<T>) -> Lent<[T]> {
        // SAFETY: the caller's promise.
        let Some(values) = (unsafe { (*at).0 }) else {
            let none = NonNull::<T>::dangling().as_ptr();
            return Ok((std::ptr::slice_from_raw_parts_mut(none, 0), None));
        };
        let (block, at) = follow(heap, values)?;
        Ok((at as *mut [T], Some(block)))
    }
}

/// A vector that a transaction is about to change.
struct VecParts<T: Persistent> {
    vec: *mut PVec<T>,
    values: *mut T,
    len: usize,
    /// That of the values.
    block: Option<Block>,
}

impl<T: Persistent> VecParts<T> {
    /// How many values there is room for.
    fn room(&self) -> usize {
        let usable = self.block.map_or(0, |b| b.usable - HEAD);
        match (self.block, size_of::<T>()) {
            (None, _) => 0,
            (_, 0) => usize::MAX,
            (_, size) => usable / size,
        }
    }

    fn at(&self, index: usize) -> *mut T {
        self.values.wrapping_add(index)
    }

    /// Where the number of values is.
    fn count(&self) -> *mut u64 {
        let block = self.block.expect("it has values").ptr;
        block.cast::<u64>().wrapping_add(1)
    }
}

impl Heap {
    /// The vector that is the root of this name; if there is none, an empty one is made, in a
    /// transaction. [`PVec`] has an example.
    ///
    /// # Errors
    /// Those of [`Heap::root`] and of [`Heap::atomically`].
    pub fn root_vec<T: Persistent>(&mut self, name: &str) -> Result<Ptr<PVec<T>>> {
        match self.root(name)? {
            Some(ptr) => Ok(ptr),
            None => self.atomically(|tx| {
                let ptr = tx.alloc_vec()?;
                tx.set_root(name, ptr)?;
                Ok(ptr)
            }),
        }
    }
}

impl Tx<'_> {
    fn place<T: Persistent>(&self, ptr: Ptr<PVec<T>>) -> Result<VecParts<T>> {
        let (_, vec) = follow(self.heap(), ptr)?;
        // SAFETY: a vector (its tag), which does not change meanwhile.
        let (values, block) = unsafe { PVec::target(self.heap(), vec)? };
        Ok(VecParts {
            vec,
            values: values.cast(),
            len: values.len(),
            block,
        })
    }

    /// Notes values from `from` on, and their number.
    fn note_from<T: Persistent>(&self, p: &VecParts<T>, from: usize, to: usize) -> Result<()> {
        self.note(p.count(), 1)?;
        self.note(p.at(from), to - from)
    }

    /// Puts an empty vector into the heap.
    ///
    /// # Errors
    /// As [`Tx::alloc`].
    pub fn alloc_vec<T: Persistent>(&mut self) -> Result<Ptr<PVec<T>>> {
        const {
            assert!(align_of::<T>() <= HEAD, "blocks are aligned to 16 bytes");
            assert!(!needs_drop::<T>(), "nothing in a heap is dropped");
        }
        // SAFETY: room for a `PVec`.
        self.make(1, |at| unsafe { at.cast::<PVec<T>>().write(PVec(None)) })
    }

    /// Puts a value behind the last one of a vector.
    ///
    /// # Errors
    /// As [`Tx::alloc`] and [`Tx::get`].
    pub fn push<T: Persistent>(&mut self, vec: Ptr<PVec<T>>, value: T) -> Result<()> {
        let len = self.place(vec)?.len;
        self.insert(vec, len, value)
    }

    /// Puts a value before the one at `index`: all from there on move up by one.
    ///
    /// # Errors
    /// As [`Tx::push`]; [`Error::Invalid`](crate::Error::Invalid) if the vector is shorter.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let sorted = heap.root_vec::<u32>("sorted")?;
    /// for n in [3, 1, 2] {
    ///     heap.atomically(|tx| {
    ///         let at = tx.get(sorted)?.partition_point(|m| *m < n);
    ///         tx.insert(sorted, at, n)
    ///     })?;
    /// }
    /// assert_eq!(heap.get(sorted)?, [1, 2, 3]);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn insert<T: Persistent>(
        &mut self,
        vec: Ptr<PVec<T>>,
        index: usize,
        value: T,
    ) -> Result<()> {
        let mut p = self.place(vec)?;
        if index > p.len {
            check_index(index, p.len)?;
        }
        if p.len >= p.room() {
            p = self.grow(vec, p)?;
        } else {
            self.note_from(&p, index, p.len + 1)?;
        }
        // SAFETY: there is room for one more, all of it noted, and nothing borrows it.
        unsafe {
            p.at(index).copy_to(p.at(index + 1), p.len - index);
            p.at(index).write(value);
            p.count().write(p.len as u64 + 1);
        }
        Ok(())
    }

    /// The values in a new block, with room for one more at least. That one is noted.
    fn grow<T: Persistent>(&mut self, vec: Ptr<PVec<T>>, p: VecParts<T>) -> Result<VecParts<T>> {
        let least = 64usize.checked_div(size_of::<T>()).unwrap_or(1);
        let room = (p.len + 1).max(p.len.saturating_mul(2)).max(least);
        self.note(p.vec, 1)?;
        if let Some(old) = &p.block {
            self.prepare_release(old)?;
        }
        let sizes = [p.len + 1, room].map(Values::<T>::size);
        let values = self.make_in::<Values<T>>(p.len, sizes, |to| {
            // SAFETY: room for these; a new block overlaps nothing.
            unsafe { to.cast::<T>().copy_from_nonoverlapping(p.values, p.len) };
        })?;
        if let Some(old) = p.block {
            self.release(old);
        }
        // SAFETY: a vector of the heap, which was noted, and nothing borrows it.
        unsafe { p.vec.write(PVec(Some(values))) };
        self.place(vec)
    }

    /// Takes the last value of a vector out.
    ///
    /// # Errors
    /// As [`Tx::get_mut`].
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let stack = heap.root_vec::<u64>("stack")?;
    /// heap.atomically(|tx| {
    ///     tx.push(stack, 7)?;
    ///     assert_eq!((tx.pop(stack)?, tx.pop(stack)?), (Some(7), None));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn pop<T: Persistent>(&mut self, vec: Ptr<PVec<T>>) -> Result<Option<T>> {
        match self.place(vec)?.len {
            0 => Ok(None),
            len => self.remove(vec, len - 1).map(Some),
        }
    }

    /// Takes a value out: all behind it move down by one.
    ///
    /// # Errors
    /// As [`Tx::get_mut`]; [`Error::Invalid`](crate::Error::Invalid) if there is no such value.
    pub fn remove<T: Persistent>(&mut self, vec: Ptr<PVec<T>>, index: usize) -> Result<T> {
        let p = self.place(vec)?;
        check_index(index, p.len)?;
        self.note_from(&p, index, p.len - 1)?;
        // SAFETY: values of the vector, noted where they change, and nothing borrows them. That
        // which is taken out is in the vector no more.
        unsafe {
            let value = p.at(index).read();
            p.at(index).copy_from(p.at(index + 1), p.len - 1 - index);
            p.count().write(p.len as u64 - 1);
            Ok(value)
        }
    }

    /// Takes a value out, and puts the last one in its place.
    ///
    /// # Errors
    /// As [`Tx::remove`].
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut heap = mojim::Heap::open(&volume, "h")?;
    /// let bag = heap.root_vec::<u64>("bag")?;
    /// heap.atomically(|tx| {
    ///     for n in [1, 2, 3] {
    ///         tx.push(bag, n)?;
    ///     }
    ///     tx.swap_remove(bag, 0)
    /// })?;
    /// assert_eq!(heap.get(bag)?, [3, 2]);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn swap_remove<T: Persistent>(&mut self, vec: Ptr<PVec<T>>, index: usize) -> Result<T> {
        let p = self.place(vec)?;
        check_index(index, p.len)?;
        self.note_from(&p, index, (index + 1).min(p.len - 1))?;
        // SAFETY: as in `remove`.
        unsafe {
            let value = p.at(index).read();
            if index < p.len - 1 {
                p.at(index).copy_from(p.at(p.len - 1), 1);
            }
            p.count().write(p.len as u64 - 1);
            Ok(value)
        }
    }

    /// Takes all values from the `len`-th on out of a vector, if it has so many.
    ///
    /// # Errors
    /// As [`Tx::get_mut`].
    pub fn truncate<T: Persistent>(&mut self, vec: Ptr<PVec<T>>, len: usize) -> Result<()> {
        let p = self.place(vec)?;
        if len < p.len {
            self.note(p.count(), 1)?;
            // SAFETY: the number of the vector's values, which was noted.
            unsafe { p.count().write(len as u64) };
        }
        Ok(())
    }
}
