//! The calling thread's log, in a variable of the thread's own.
//!
//! Owns that variable. It has the initial-exec model. That costs one load where Rust's own
//! `thread_local!` in a shared library costs a call. So the library must be loaded with the
//! program and not by dlopen, unless the C library has room for it.

use std::arch::{asm, global_asm};
use std::time::Duration;

use mojim_undo::Log;

global_asm!(
    ".pushsection .tbss.mojim_itm_log,\"awT\",@nobits",
    ".balign 8",
    ".globl mojim_itm_log",
    ".hidden mojim_itm_log",
    ".type mojim_itm_log,@object",
    ".size mojim_itm_log,8",
    "mojim_itm_log:",
    ".zero 8",
    ".popsection",
);

unsafe extern "C-unwind" {
    /// libmojim.so's; its number is that of the layout of [`Log`].
    fn mojim_tx_thread_2() -> *mut Log;
}

/// The calling thread's log; null before its first block.
#[inline(always)]
pub(crate) fn log() -> *mut Log {
    let log;
    // SAFETY: reads the variable above.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + mojim_itm_log@GOTTPOFF]",
            "mov {0}, qword ptr fs:[{0}]",
            out(reg) log,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    log
}

fn variable() -> *mut *mut Log {
    let at: *mut *mut Log;
    // SAFETY: computes the variable's address.
    unsafe {
        asm!(
            "mov {0}, qword ptr [rip + mojim_itm_log@GOTTPOFF]",
            "add {0}, qword ptr fs:[0]",
            out(reg) at,
            options(pure, readonly, nostack)
        );
    }
    at
}

/// Asks libmojim.so for the calling thread's log, and notes it. A block cannot refuse to begin: it
/// waits for memory.
#[cold]
#[inline(never)]
pub(crate) fn fetch() -> *mut Log {
    loop {
        // SAFETY: no preconditions.
        let log = unsafe { mojim_tx_thread_2() };
        if log.is_null() {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        let variable = variable();
        // SAFETY: the thread's own variable and log. libmojim.so clears the variable when the
        // log becomes another thread's.
        unsafe {
            *variable = log;
            (*log).noted = variable;
        }
        return log;
    }
}

/// The log could not grow: the block cannot be taken back, and is not committed.
#[cold]
#[inline(never)]
pub(crate) fn lost(log: *mut Log) {
    let text = c"no memory for the undo log of a __transaction_atomic block: it is not committed";
    // SAFETY: the calling thread's own log.
    unsafe { ((*log).slow.fail)(log, libc::ENOMEM, text.as_ptr()) };
}

/// The block does what cannot be taken back, in code that does not tell its stores.
///
/// # Safety
/// `log` is the calling thread's.
pub(crate) unsafe fn irrevocable(log: *mut Log) {
    let text = c"a __transaction_relaxed block calls what no transaction can take back: it runs, but nothing of it is committed, and no transaction after it; use __transaction_atomic";
    // SAFETY: the caller's promise.
    unsafe { ((*log).slow.fail)(log, libc::EOPNOTSUPP, text.as_ptr()) };
}

/// Notes bytes that are about to be stored to.
#[inline(always)]
pub(crate) fn save<const N: usize>(addr: *const u8) {
    let log = log();
    // SAFETY: the compiler's addresses; the calling thread's own log.
    if !unsafe { Log::save::<N>(log, addr) } {
        lost(log);
    }
}

/// [`save`] of any number of bytes.
pub(crate) fn save_bytes(addr: *const u8, len: usize) {
    let log = log();
    // SAFETY: as in `save`.
    if !unsafe { Log::save_bytes(log, addr, len) } {
        lost(log);
    }
}

/// Whether a store that the compiler calls a second one may be the first since an inner level
/// began, which an abort of that level must take back.
#[inline(always)]
pub(crate) fn is_nested() -> bool {
    // SAFETY: the calling thread's own log.
    unsafe { (*log()).depth > 1 }
}
