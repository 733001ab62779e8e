//! Functions and their instrumented clones, for calls by pointer.
//!
//! Owns the table of all that the program and its libraries have registered, ascending.
//!
//! Invariant: a table that was replaced stays, since another thread may look at it. Tables are
//! registered when a program starts, and by dlopen.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering::*};

use crate::thread::{irrevocable, log};

/// A function and its clone.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pair(usize, usize);

static TABLE: AtomicPtr<Vec<Pair>> = AtomicPtr::new(std::ptr::null_mut());
/// What was registered: the addresses of tables, and how many pairs they have.
static PARTS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn table() -> &'static [Pair] {
    // SAFETY: never freed.
    unsafe { TABLE.load(Acquire).as_ref() }.map_or(&[], |t| t)
}

fn change(f: impl FnOnce(&mut Vec<(usize, usize)>)) {
    let mut parts = PARTS.lock().unwrap_or_else(|e| e.into_inner());
    f(&mut parts);
    let mut new = Vec::new();
    for (at, n) in &*parts {
        // SAFETY: the table stays until it is taken off the list.
        new.extend_from_slice(unsafe { std::slice::from_raw_parts(*at as *const Pair, *n) });
    }
    new.sort_unstable_by_key(|p: &Pair| p.0);
    TABLE.store(Box::into_raw(Box::new(new)), Release);
}

/// `_ITM_registerTMCloneTable`.
///
/// # Safety
/// `n` pairs, which stay until they are taken off.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_registerTMCloneTable(pairs: *const Pair, n: usize) {
    if n > 0 {
        change(|parts| parts.push((pairs as usize, n)));
    }
}

/// `_ITM_deregisterTMCloneTable`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_deregisterTMCloneTable(pairs: *const Pair) {
    change(|parts| parts.retain(|p| p.0 != pairs as usize));
}

fn find(function: usize) -> Option<usize> {
    let all = table();
    let i = all.binary_search_by_key(&function, |p| p.0).ok()?;
    Some(all[i].1)
}

/// `_ITM_getTMCloneOrIrrevocable`: without a clone the function runs as it is.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_getTMCloneOrIrrevocable(function: *mut c_void) -> *mut c_void {
    match find(function as usize) {
        Some(clone) => clone as *mut c_void,
        None => {
            // SAFETY: the calling thread's own log, in which the block is open.
            unsafe { irrevocable(log()) };
            function
        }
    }
}

/// `_ITM_getTMCloneSafe`. (libitm ends the process where there is no clone.)
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_getTMCloneSafe(function: *mut c_void) -> *mut c_void {
    _ITM_getTMCloneOrIrrevocable(function)
}
