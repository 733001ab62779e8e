//! `mojim_heap.h`: the persistent heap.
//!
//! A handle is the heap's own number, which is looked up among those that are open: a
//! closed or foreign one is refused. The calls that take no lock run without the guard,
//! since they neither unwind nor can be cancelled.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};

use engine::{Error, Result};
use mojim_heap::{Heap, HeapOptions};
use mojim_tx as tx;

use crate::{Failure, Mojim, Writer, guard, guard_always, handle, invalid, text, text_or_none};

const MOJIM_HEAP_EXACT: c_int = 0x1;

/// `mojim_heap_t`: only its address is used.
#[repr(C)]
pub struct MojimHeap([u8; 0]);

const GRAIN: usize = 16;

pub(crate) fn heap(h: *const MojimHeap) -> Result<Heap, Failure> {
    match Heap::of_handle(h as usize) {
        Some(h) => Ok(h),
        None => invalid("the heap is not open: mojim_heap_open failed, or it was closed"),
    }
}

fn owner(p: *const c_void) -> Result<Heap, Failure> {
    match Heap::of(p.cast()) {
        Some(h) => Ok(h),
        None => invalid(format!("{p:p} lies in no heap that is open")),
    }
}

/// `mojim_heap_open`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_heap_open(
    m: *mut Mojim,
    file: *const c_char,
    capacity: usize,
    address: *mut c_void,
    flags: c_int,
) -> *mut MojimHeap {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let (known, file) = unsafe { (handle(m)?, text(file, "file")?) };
        if flags & !MOJIM_HEAP_EXACT != 0 {
            return invalid(format!(
                "heap {file}: flags {flags:#x} are not among MOJIM_HEAP_EXACT"
            ));
        }
        let mut options = HeapOptions::new(capacity, address as usize);
        options.exact = flags & MOJIM_HEAP_EXACT != 0;
        let opened = match known {
            Mojim::Primary(v) => match Writer::of(v) {
                Writer::Own(v) => Heap::open(v, file, &options),
                Writer::Shared(_) => Err(mojim_env::Error::Unsupported(format!(
                    "heap {file}: in a child made by fork; open it in the process that attached"
                ))),
            },
            Mojim::Guest(_) => Err(Error::Unsupported(format!(
                "heap {file}: this process shares the volume; only the one that attached it can open a heap"
            ))),
            Mojim::Reader(r) => Heap::open_reader(r, file),
        };
        Ok(opened?.handle() as *mut MojimHeap)
    })
}

/// `mojim_heap_close`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_close(h: *mut MojimHeap) -> c_int {
    guard_always(-1, || {
        heap(h)?.close()?;
        Ok(0)
    })
}

/// Whether an allocation or a free is a transaction's: of the one that is open, or one of its own.
fn joins(h: Heap) -> bool {
    tx::is_open() || h.is_exact()
}

fn allocate(h: Heap, size: usize, alignment: usize) -> Result<*mut u8, Error> {
    match (joins(h), alignment <= GRAIN) {
        (true, _) => tx::malloc(h, size, alignment),
        (false, true) => h.malloc(size),
        (false, false) => h.malloc_aligned(size, alignment),
    }
}

/// `realloc` in a transaction: another block, since an abort needs the first as it is.
///
/// # Safety
/// No other thread stores into the block meanwhile.
unsafe fn realloc_joined(h: Heap, p: *mut u8, size: usize) -> Result<*mut u8, Error> {
    tx::atomically(|_| {
        let old = h.usable(p)?;
        let new = tx::malloc(h, size, GRAIN)?;
        // SAFETY: two blocks of at least so many bytes; the new one is the caller's alone.
        unsafe { std::ptr::copy_nonoverlapping(p, new, old.min(size)) };
        tx::free(h, p)?;
        Ok(new)
    })
}

/// `mojim_malloc`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_malloc(h: *mut MojimHeap, size: usize) -> *mut c_void {
    match mojim_heap::malloc_cached(h as usize, size) {
        Some(p) => p.cast(),
        None => malloc_slow(h, size),
    }
}

/// Not inlined, as [`free_slow`]: else each call would save the registers that this one needs.
#[cold]
#[inline(never)]
extern "C-unwind" fn malloc_slow(h: *mut MojimHeap, size: usize) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        Ok(allocate(heap(h)?, size, GRAIN)?.cast())
    })
}

/// `mojim_calloc`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_calloc(h: *mut MojimHeap, n: usize, size: usize) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        let Some(bytes) = n.checked_mul(size) else {
            return Err(Failure(
                libc::ENOMEM,
                format!("{n} times {size} bytes are too many"),
            ));
        };
        let h = heap(h)?;
        let zeros = || {
            let p = allocate(h, bytes, GRAIN)?;
            // SAFETY: a block of at least so many bytes, the caller's alone.
            unsafe { p.write_bytes(0, bytes) };
            Ok(p.cast())
        };
        // The zeros are in the commit that has the block.
        match joins(h) {
            true => tx::atomically(|_| zeros()),
            false => zeros(),
        }
    })
}

/// `mojim_realloc`.
///
/// # Safety
/// No other thread stores into the block meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_realloc(
    h: *mut MojimHeap,
    p: *mut c_void,
    size: usize,
) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        let h = heap(h)?;
        let new = match p.is_null() {
            true => allocate(h, size, GRAIN)?,
            // SAFETY: the caller's promise.
            false if joins(h) => unsafe { realloc_joined(h, p.cast(), size)? },
            // SAFETY: the caller's promise.
            false => unsafe { h.realloc(p.cast(), size)? },
        };
        Ok(new.cast())
    })
}

/// `mojim_aligned_alloc`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_aligned_alloc(
    h: *mut MojimHeap,
    alignment: usize,
    size: usize,
) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        if !alignment.is_power_of_two() {
            return invalid(format!(
                "an alignment of {alignment}: it must be a power of two"
            ));
        }
        Ok(allocate(heap(h)?, size, alignment)?.cast())
    })
}

/// `mojim_free`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_free(p: *mut c_void) -> c_int {
    match mojim_heap::free_cached(p.cast()) {
        true => 0,
        false => free_slow(p),
    }
}

#[cold]
#[inline(never)]
extern "C-unwind" fn free_slow(p: *mut c_void) -> c_int {
    if p.is_null() {
        return 0;
    }
    guard_always(-1, || {
        let h = owner(p)?;
        match joins(h) {
            true => tx::free(h, p.cast())?,
            false => h.free(p.cast())?,
        }
        Ok(0)
    })
}

/// `mojim_usable_size`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_usable_size(p: *const c_void) -> usize {
    guard_always(0, || Ok(owner(p)?.usable(p.cast())?))
}

thread_local! {
    /// The heap that the thread has named, or null.
    static WITHIN: Cell<*mut MojimHeap> = const { Cell::new(std::ptr::null_mut()) };
}

/// `mojim_heap_within`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_within(h: *mut MojimHeap) -> *mut MojimHeap {
    WITHIN.replace(h)
}

/// `mojim_heap_of`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_of(p: *const c_void) -> *mut MojimHeap {
    let found = match p.is_null() {
        true => Heap::of_handle(WITHIN.get() as usize).or_else(Heap::first),
        false => Heap::of(p.cast()),
    };
    found.map_or(std::ptr::null_mut(), |h| h.handle() as *mut MojimHeap)
}

/// `mojim_root_set`.
///
/// # Safety
/// `name` and `kind` are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_root_set(
    h: *mut MojimHeap,
    name: *const c_char,
    p: *mut c_void,
    kind: *const c_char,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (name, kind) = unsafe { (text(name, "name")?, text_or_none(kind, "type")?) };
        tx::set_root(heap(h)?, name, p.cast(), kind.unwrap_or(""))?;
        Ok(0)
    })
}

/// `mojim_root`.
///
/// # Safety
/// As for [`mojim_root_set`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_root(
    h: *mut MojimHeap,
    name: *const c_char,
    kind: *const c_char,
) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let (name, kind) = unsafe { (text(name, "name")?, text_or_none(kind, "type")?) };
        Ok(heap(h)?.root(name, kind.unwrap_or(""))?.cast())
    })
}

/// `mojim_heap_sync`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_sync(h: *mut MojimHeap) -> c_int {
    guard(-1, || {
        heap(h)?.sync()?;
        Ok(0)
    })
}

/// `mojim_heap_rollback`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_rollback(h: *mut MojimHeap) -> c_int {
    guard(-1, || {
        heap(h)?.rollback()?;
        Ok(0)
    })
}

/// `mojim_heap_base`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_heap_base(h: *const MojimHeap) -> *mut c_void {
    guard(std::ptr::null_mut(), || Ok(heap(h)?.base().cast()))
}
