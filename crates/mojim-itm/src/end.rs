//! The end of a block: commit and abort, and what a block can ask about itself.

use std::ffi::{c_char, c_int, c_void};
use std::io::Write;

use mojim_undo::{Level, Log};

use crate::begin::{ABORTED, RESTORE_LIVE, RUN_AGAIN, go_on};
use crate::exceptions;
use crate::thread::{irrevocable, log};

/// Reasons of an abort.
const RETRY: c_int = 2;
const OUTER: c_int = 16;

/// What `_ITM_getTransactionId` returns outside.
const NO_TRANSACTION: u64 = 1;

/// The version of the ABI.
const VERSION: c_int = 90;

/// Ends levels that the program has begun by mojim_tx_begin in the block and left open: they
/// become the block's.
///
/// # Safety
/// `log` is the calling thread's, and a captured level is open.
unsafe fn fold(log: *mut Log) {
    // SAFETY: the caller's promise.
    unsafe {
        while (*log).levels().last().is_some_and(|l| l.captured == 0) && (*log).depth > 1 {
            (*log).depth -= 1;
        }
    }
}

/// `_ITM_commitTransaction`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_commitTransaction() {
    let log = log();
    // SAFETY: the calling thread's own log, in which the block is open.
    unsafe {
        fold(log);
        if !Log::end(log) {
            ((*log).slow.commit)(log);
        }
    }
}

/// `_ITM_commitTransactionEH`: an exception leaves the block, which commits.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_commitTransactionEH(_exception: *mut c_void) {
    _ITM_commitTransaction();
}

/// `_ITM_abortTransaction`.
///
/// # Safety
/// Called in a block.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_abortTransaction(reason: c_int) -> ! {
    let log = log();
    // SAFETY: the calling thread's own log.
    if unsafe { log.as_ref() }.is_none_or(|l| l.depth == 0) {
        // The call does not return, and there is no begin to go back to. A compiler that makes it is
        // wrong (gcc 12 does so at -O0, see docs/reference/transactions.md).
        let text =
            b"mojim: a transaction is cancelled where none is open: the program cannot go on\n";
        // Nothing can be done if that fails.
        let _ = std::io::stderr().write_all(text);
        std::process::abort();
    }
    // SAFETY: the calling thread's own log, in which the block is open: the frame of its begin
    // is there.
    unsafe {
        fold(log);
        let target = match reason & OUTER {
            0 => (*log).levels().len() - 1,
            _ => {
                let first = (*log).levels().iter().position(|l| l.captured == 1);
                first.unwrap_or(0)
            }
        };
        let level: Level = (*log).levels()[target];
        exceptions::clean_up(log, level.catches);
        while (*log).levels().len() > target {
            ((*log).slow.abort)(log, level.registers[0]);
        }
        let mut value = ABORTED | RESTORE_LIVE;
        if reason & RETRY != 0 {
            let again = Log::begin(log, true);
            // There was room for it a moment ago.
            (*again).registers = level.registers;
            value = RUN_AGAIN;
        }
        go_on(&level.registers, value)
    }
}

/// `_ITM_changeTransactionMode`: to serial and irrevocable, the only one there is.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_changeTransactionMode(_mode: c_int) {
    // SAFETY: the calling thread's own log, in which the block is open.
    unsafe { irrevocable(log()) };
}

/// `_ITM_inTransaction`: 0 outside, 1 inside, 2 where it cannot be taken back.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_inTransaction() -> c_int {
    // SAFETY: the calling thread's own log.
    unsafe { log().as_ref() }.map_or(0, |l| match (l.depth, l.broken) {
        (0, _) => 0,
        (_, 0) => 1,
        _ => 2,
    })
}

/// `_ITM_getTransactionId`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_getTransactionId() -> u64 {
    // SAFETY: the calling thread's own log.
    let last = unsafe { log().as_ref() }.and_then(|l| l.levels().last().map(|x| (l.depth, x)));
    last.map_or(NO_TRANSACTION, |(depth, level)| {
        1 << 63 | u64::from(level.number) << 24 | u64::from(depth & 0xff_ffff)
    })
}

/// `_ITM_dropReferences`: there are none.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_dropReferences(_start: *mut c_void, _size: usize) {}

/// `_ITM_versionCompatible`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_versionCompatible(version: c_int) -> c_int {
    (version == VERSION).into()
}

/// `_ITM_libraryVersion`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_libraryVersion() -> *const c_char {
    concat!("Mojim ", env!("CARGO_PKG_VERSION"), "\0")
        .as_ptr()
        .cast()
}

/// `_ITM_error`: compilers that report errors at run time. The program goes on.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _ITM_error(_location: *const c_void, number: c_int) {
    let _ = writeln!(
        std::io::stderr(),
        "mojim: the program reports transaction error {number}"
    );
}
