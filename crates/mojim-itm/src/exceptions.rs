//! Exceptions of C++ in a block.
//!
//! Owns the count of those that are being caught in it, and the one that is allocated and not yet
//! thrown: an abort leaves handlers that never end, and has libstdc++ forget both.

use std::ffi::c_void;

use mojim_undo::Log;

use crate::actions::weak;
use crate::thread::log;

type Allocate = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
type Give = unsafe extern "C-unwind" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !;
type Catch = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
type End = unsafe extern "C-unwind" fn();
type CleanUp = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, u32);

/// `_ITM_cxa_allocate_exception`.
///
/// # Safety
/// Called in a block of a program in C++, as all functions of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_cxa_allocate_exception(n: usize) -> *mut c_void {
    // SAFETY: a program that throws has it; the calling thread's own log.
    unsafe {
        let allocate = weak!("__cxa_allocate_exception" as Allocate);
        let p = allocate.map_or(std::ptr::null_mut(), |f| f(n));
        (*log()).unthrown = p;
        p
    }
}

/// `_ITM_cxa_free_exception`.
///
/// # Safety
/// As for [`_ITM_cxa_allocate_exception`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_cxa_free_exception(p: *mut c_void) {
    // SAFETY: as above.
    unsafe {
        (*log()).unthrown = std::ptr::null_mut();
        if let Some(free) = weak!("__cxa_free_exception" as Give) {
            free(p);
        }
    }
}

/// `_ITM_cxa_throw`.
///
/// # Safety
/// As for [`_ITM_cxa_allocate_exception`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_cxa_throw(p: *mut c_void, t: *mut c_void, d: *mut c_void) {
    // SAFETY: as above.
    unsafe {
        (*log()).unthrown = std::ptr::null_mut();
        if let Some(throw) = weak!("__cxa_throw" as Throw) {
            throw(p, t, d);
        }
    }
}

/// `_ITM_cxa_begin_catch`.
///
/// # Safety
/// As for [`_ITM_cxa_allocate_exception`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_cxa_begin_catch(p: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    unsafe {
        (*log()).catches += 1;
        weak!("__cxa_begin_catch" as Catch).map_or(std::ptr::null_mut(), |f| f(p))
    }
}

/// `_ITM_cxa_end_catch`.
///
/// # Safety
/// As for [`_ITM_cxa_allocate_exception`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_cxa_end_catch() {
    // SAFETY: as above.
    unsafe {
        let log = log();
        (*log).catches = (*log).catches.saturating_sub(1);
        if let Some(end) = weak!("__cxa_end_catch" as End) {
            end();
        }
    }
}

/// An abort leaves what was caught since there were `before`.
///
/// # Safety
/// `log` is the calling thread's.
pub(crate) unsafe fn clean_up(log: *mut Log, before: u32) {
    // SAFETY: the caller's promise; a program that throws has the function.
    unsafe {
        let (unthrown, caught) = ((*log).unthrown, (*log).catches.saturating_sub(before));
        if unthrown.is_null() && caught == 0 {
            return;
        }
        (*log).unthrown = std::ptr::null_mut();
        if let Some(clean_up) = weak!("__cxa_tm_cleanup" as CleanUp) {
            clean_up(unthrown, std::ptr::null_mut(), caught);
        }
    }
}
