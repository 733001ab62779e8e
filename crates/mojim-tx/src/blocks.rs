//! Blocks of a heap in a transaction: allocated, freed, and the pointers to them.
//!
//! A heap's block has one state byte. Allocating and freeing store to it, as any store of the
//! transaction does. The state in memory alone (which block may be given out) follows at the
//! transaction's end.
//!
//! Invariants:
//!
//! - A block that is taken is given back if the level is taken back.
//! - A block that is freed can be given out again after the commit only.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use mojim_env::{Error, Result};
use mojim_heap::{ALLOCATED, Block, FREE, Heap};
use mojim_undo::Log;

use crate::explicit::{add, add_new, atomically, is_open};
use crate::object::{Later, Thread, no_memory, push_later};
use crate::thread::known;

/// Notes what happens to a block, and its new state.
///
/// # Safety
/// The block is the transaction's to change; one is open.
unsafe fn change(block: Block, state: u8, later: Later) -> Result<()> {
    let t: *mut Thread = known();
    // SAFETY: the calling thread's own; the caller's promise.
    unsafe {
        if !push_later(&mut *t, later) {
            return Err(no_memory());
        }
        if !Log::save::<1>(t.cast(), block.state) {
            (*t).later.pop();
            (*t).log.later -= 1;
            return Err(no_memory());
        }
        AtomicU8::from_ptr(block.state).store(state, Relaxed);
    }
    Ok(())
}

/// Allocates in the open transaction. The `size` bytes are committed as they are at its commit.
fn take(heap: Heap, size: usize, align: usize) -> Result<*mut u8> {
    let block = heap.take(size, align)?;
    // SAFETY: a block that was just taken.
    if let Err(e) = unsafe { change(block, ALLOCATED, Later::Taken(heap, block)) } {
        heap.give(block);
        return Err(e);
    }
    // SAFETY: as above.
    unsafe { add_new(block.ptr, size.min(block.usable))? };
    Ok(block.ptr)
}

/// Allocates a block in the calling thread's transaction, or in one of its own.
///
/// # Errors
/// As [`Heap::malloc`], and those of a commit.
pub fn malloc(heap: Heap, size: usize, align: usize) -> Result<*mut u8> {
    atomically(|_| take(heap, size, align))
}

/// Frees a block in the calling thread's transaction, or in one of its own.
///
/// # Errors
/// `Invalid` if it is no block, or is free; and those of a commit.
pub fn free(heap: Heap, ptr: *mut u8) -> Result<()> {
    heap.check_writable()?;
    atomically(|_| {
        let block = heap.find(ptr)?;
        // SAFETY: an allocated block, which the program gives up.
        unsafe { change(block, FREE, Later::Freed(heap, block)) }
    })
}

/// Sets `*pointer` to a new block, in the same commit as the allocation (Mnemosyne's `pmalloc`).
/// Without a heap: that in which `pointer` lies, else the first that is open.
///
/// # Safety
/// As for [`add`], of the pointer.
pub unsafe fn pmalloc(heap: Option<Heap>, size: usize, pointer: *mut *mut u8) -> Result<()> {
    let heap = heap.or_else(|| Heap::of(pointer.cast()));
    let heap = heap.or_else(Heap::first);
    let heap = heap.ok_or_else(|| Error::Invalid("no heap is open: mojim_heap_open".into()))?;
    atomically(|_| {
        // SAFETY: the caller's promise.
        unsafe {
            add(pointer.cast(), size_of::<*mut u8>())?;
            pointer.write_unaligned(take(heap, size, 1)?);
        }
        Ok(())
    })
}

/// Frees the block at `*pointer` and sets that to null, in one commit. Null stays null.
///
/// # Safety
/// As for [`add`], of the pointer.
pub unsafe fn pfree(pointer: *mut *mut u8) -> Result<()> {
    // SAFETY: the caller's promise.
    let ptr = unsafe { pointer.read_unaligned() };
    if ptr.is_null() {
        return Ok(());
    }
    let none = || Error::Invalid(format!("{ptr:p} is in no heap"));
    let heap = Heap::of(ptr).ok_or_else(none)?;
    atomically(|_| {
        free(heap, ptr)?;
        // SAFETY: as above.
        unsafe {
            add(pointer.cast(), size_of::<*mut u8>())?;
            pointer.write_unaligned(std::ptr::null_mut());
        }
        Ok(())
    })
}

/// As [`Heap::set_root`], in the calling thread's transaction if one is open.
pub fn set_root(heap: Heap, name: &str, ptr: *mut u8, kind: &str) -> Result<()> {
    match is_open() {
        true => {
            // SAFETY: the calling thread's own.
            if unsafe { (*known()).later.try_reserve(1) }.is_err() {
                return Err(no_memory());
            }
            // An abort does not restore them: the root takes itself back, under the lock of roots.
            // SAFETY: bytes of the heap, which stays while it is used.
            let held = heap.set_root_with(name, ptr, kind, &mut |p, n| unsafe { add_new(p, n) })?;
            // SAFETY: as above. There is room for it.
            assert!(push_later(unsafe { &mut *known() }, Later::Root(held)));
            Ok(())
        }
        false if heap.is_exact() => atomically(|_| set_root(heap, name, ptr, kind)),
        false => heap.set_root(name, ptr, kind),
    }
}
