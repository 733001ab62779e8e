//! Effects of a commit or an abort beside stores: the program's actions, and allocated memory.
//!
//! The memory is that from malloc and new, which is not persistent. Memory that a block allocates
//! is freed if the block is taken back. Memory that it frees is freed when the block is committed.

use std::ffi::c_void;

use mojim_undo::Log;

use crate::thread::{log, lost};

type Called = unsafe extern "C-unwind" fn(*mut c_void);

/// `_ITM_addUserCommitAction`.
///
/// # Safety
/// `f` may be called with `arg` after the commit.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_addUserCommitAction(f: Called, _id: u64, arg: *mut c_void) {
    let log = log();
    // SAFETY: the calling thread's own log.
    unsafe { ((*log).slow.on_commit)(log, f, arg) };
}

/// `_ITM_addUserUndoAction`.
///
/// # Safety
/// `f` may be called with `arg` at an abort.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_addUserUndoAction(f: Called, arg: *mut c_void) {
    let log = log();
    // SAFETY: the calling thread's own log; the caller's promise.
    if !unsafe { Log::on_abort(log, f, arg) } {
        lost(log);
    }
}

unsafe extern "C-unwind" fn free(p: *mut c_void) {
    // SAFETY: of malloc.
    unsafe { libc::free(p) };
}

/// Has memory freed if the block is taken back; null if there is no memory to note that.
///
/// # Safety
/// `p` is null or of malloc.
unsafe fn freed_at_abort(p: *mut c_void) -> *mut c_void {
    // SAFETY: the calling thread's own log; the caller's promise.
    unsafe {
        if !p.is_null() && !Log::on_abort(log(), free, p) {
            free(p);
            return std::ptr::null_mut();
        }
    }
    p
}

/// `_ITM_malloc`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_malloc(n: usize) -> *mut c_void {
    // SAFETY: just allocated.
    unsafe { freed_at_abort(libc::malloc(n)) }
}

/// `_ITM_calloc`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_calloc(n: usize, size: usize) -> *mut c_void {
    // SAFETY: just allocated.
    unsafe { freed_at_abort(libc::calloc(n, size)) }
}

/// `_ITM_free`.
///
/// # Safety
/// `p` is null or of malloc.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_free(p: *mut c_void) {
    if !p.is_null() {
        // SAFETY: the caller's promise.
        unsafe { _ITM_addUserCommitAction(free, 0, p) };
    }
}

/// The address of a function of libstdc++, which a program in C does not have; then it is null, and
/// nobody asks.
macro_rules! weak {
    ($name:literal as $t:ty) => {{
        let at: usize;
        std::arch::asm!(
            concat!(".weak ", $name),
            concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
            out(reg) at,
            options(pure, nomem, nostack, preserves_flags)
        );
        std::mem::transmute::<usize, Option<$t>>(at)
    }};
}
pub(crate) use weak;

unsafe extern "C-unwind" fn delete(p: *mut c_void) {
    // SAFETY: of `operator new`, so this is there.
    unsafe {
        if let Some(delete) = weak!("_ZdlPv" as Called) {
            delete(p);
        }
    }
}

unsafe extern "C-unwind" fn delete_array(p: *mut c_void) {
    // SAFETY: as above.
    unsafe {
        if let Some(delete) = weak!("_ZdaPv" as Called) {
            delete(p);
        }
    }
}

/// Has memory of `operator new` deleted if the block is taken back.
fn deleted_at_abort(p: *mut c_void, delete: Called) -> *mut c_void {
    if !p.is_null() {
        // SAFETY: what was just allocated may be deleted.
        unsafe { _ITM_addUserUndoAction(delete, p) };
    }
    p
}

type New = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
type NewNothrow = unsafe extern "C-unwind" fn(usize, *const c_void) -> *mut c_void;

macro_rules! news {
    ($($name:ident $new:literal $delete:ident;)*) => { $(
        /// `operator new`.
        ///
        /// # Safety
        /// Called in a block of a program in C++.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(n: usize) -> *mut c_void {
            // SAFETY: the caller's promise: it is there.
            let p = unsafe { weak!($new as New).map_or(std::ptr::null_mut(), |new| new(n)) };
            deleted_at_abort(p, $delete)
        }
    )* };
    (nothrow $($name:ident $new:literal $delete:ident;)*) => { $(
        /// `operator new` that does not throw.
        ///
        /// # Safety
        /// Called in a block of a program in C++.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(n: usize, tag: *const c_void) -> *mut c_void {
            // SAFETY: the caller's promise: it is there.
            let p = unsafe { weak!($new as NewNothrow).map_or(std::ptr::null_mut(), |new| new(n, tag)) };
            deleted_at_abort(p, $delete)
        }
    )* };
}

news! { _ZGTtnwm "_Znwm" delete; _ZGTtnam "_Znam" delete_array; }
news! { nothrow
    _ZGTtnwmRKSt9nothrow_t "_ZnwmRKSt9nothrow_t" delete;
    _ZGTtnamRKSt9nothrow_t "_ZnamRKSt9nothrow_t" delete_array;
}

macro_rules! deletes {
    ($($name:ident $delete:ident;)*) => { $(
        /// `operator delete`: at the commit. (A size and a tag are not looked at.)
        ///
        /// # Safety
        /// `p` is null or of `operator new`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(p: *mut c_void) {
            if !p.is_null() {
                // SAFETY: the caller's promise.
                unsafe { _ITM_addUserCommitAction($delete, 0, p) };
            }
        }
    )* };
}

deletes! {
    _ZGTtdlPv delete;
    _ZGTtdlPvm delete;
    _ZGTtdlPvRKSt9nothrow_t delete;
    _ZGTtdlPvmRKSt9nothrow_t delete;
    _ZGTtdaPv delete_array;
    _ZGTtdaPvm delete_array;
    _ZGTtdaPvRKSt9nothrow_t delete_array;
    _ZGTtdaPvmRKSt9nothrow_t delete_array;
}
