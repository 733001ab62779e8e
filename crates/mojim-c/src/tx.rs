//! `include/mojim_tx.h`: transactions.
//!
//! Invariant: what a transaction does often (a begin, an add, an end with nothing to commit)
//! takes the way through `guard` only where it fails.

use std::ffi::{c_int, c_void};

use mojim_tx as tx;

use super::heap::{MojimHeap, heap};
use super::{Failure, Result, guard, guard_always, invalid};

/// A call that neither waits long nor panics: through `guard` only if it fails.
fn quick(done: Result<()>) -> c_int {
    match done {
        Ok(()) => 0,
        Err(e) => guard_always(-1, || Err(Failure::from(e))),
    }
}

/// `mojim_tx_begin`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_begin() -> c_int {
    quick(tx::begin())
}

/// `mojim_tx_add`.
///
/// # Safety
/// The bytes can be read and written until the transaction ends.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_tx_add(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    quick(unsafe { tx::add(addr.cast(), len) })
}

/// `mojim_tx_add_new`.
///
/// # Safety
/// As for [`mojim_tx_add`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_tx_add_new(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    quick(unsafe { tx::add_new(addr.cast(), len) })
}

/// `mojim_tx_set`.
///
/// # Safety
/// As for [`mojim_tx_add`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_tx_set(place: *mut u64, value: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let added = tx::add(place.cast(), 8);
        if added.is_ok() {
            place.write_unaligned(value);
        }
        quick(added)
    }
}

/// `mojim_tx_commit`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_commit() -> c_int {
    if tx::end_quickly() {
        return 0;
    }
    guard(-1, || {
        tx::commit()?;
        Ok(0)
    })
}

/// `mojim_tx_abort`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_abort() -> c_int {
    std::arch::naked_asm!("lea rdi, [rsp + 8]", "jmp {}", sym abort)
}

/// `mojim_tx_abort`.
#[cfg(not(target_arch = "x86_64"))]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_abort() -> c_int {
    let here = 0u8;
    abort(&raw const here as usize)
}

/// An abort for a caller whose stack begins at `sp`.
extern "C-unwind" fn abort(sp: usize) -> c_int {
    guard_always(-1, || {
        tx::abort_to(sp)?;
        Ok(0)
    })
}

/// `mojim_tx_is_open`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_is_open() -> c_int {
    tx::depth() as c_int
}

type Called = unsafe extern "C-unwind" fn(*mut c_void);

/// `mojim_tx_on_commit`.
///
/// # Safety
/// `f` may be called with `arg` after the commit.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_tx_on_commit(f: Option<Called>, arg: *mut c_void) -> c_int {
    let Some(f) = f else {
        return quick(Err(no_function()));
    };
    // SAFETY: the caller's promise.
    quick(unsafe { tx::on_commit(f, arg) })
}

/// `mojim_tx_on_abort`.
///
/// # Safety
/// `f` may be called with `arg` at an abort.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_tx_on_abort(f: Option<Called>, arg: *mut c_void) -> c_int {
    let Some(f) = f else {
        return quick(Err(no_function()));
    };
    // SAFETY: the caller's promise.
    quick(unsafe { tx::on_abort(f, arg) })
}

fn no_function() -> super::Error {
    super::Error::Invalid("the function is NULL".into())
}

/// `mojim_pmalloc`.
///
/// # Safety
/// `pointer` is null or a pointer's place.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_pmalloc(
    h: *mut MojimHeap,
    size: usize,
    pointer: *mut *mut u8,
) -> c_int {
    guard(-1, || {
        if pointer.is_null() {
            return invalid("mojim_pmalloc: pointer is NULL");
        }
        let heap = match h.is_null() {
            true => None,
            false => Some(heap(h)?),
        };
        // SAFETY: the caller's promise.
        unsafe { tx::pmalloc(heap, size, pointer)? };
        Ok(0)
    })
}

/// `mojim_pfree`.
///
/// # Safety
/// As for [`mojim_pmalloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_pfree(pointer: *mut *mut u8) -> c_int {
    guard(-1, || {
        if pointer.is_null() {
            return invalid("mojim_pfree: pointer is NULL");
        }
        // SAFETY: the caller's promise.
        unsafe { tx::pfree(pointer)? };
        Ok(0)
    })
}

/// `mojim_tx_on_failure`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_on_failure(decides: Option<tx::Decides>, arg: *mut c_void) {
    tx::on_failure(decides, arg);
}

/// `mojim_tx_failed`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_failed() -> c_int {
    tx::failed()
}

/// `mojim_tx_thread_2`: the number is that of the layout.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_tx_thread_2() -> *mut c_void {
    tx::thread_log().cast()
}
