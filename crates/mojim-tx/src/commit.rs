//! The end of a transaction: its bytes are committed, or taken back.
//!
//! Owns what happens where a commit fails. An explicit transaction's caller gets the error and
//! the transaction stays open. A captured block has no caller that could take an error: the commit
//! is repeated, or given up for good.
//!
//! Invariants:
//!
//! - After a block was given up, no transaction of the process is committed any more. One that
//!   builds on stores that nobody committed would be half a change.
//! - A function that is to be called after a commit is called when the transaction is closed, so
//!   it may begin another one. Freed blocks are the heap's before that, so that nobody has closed
//!   it.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering::*};
use std::time::Duration;

#[cfg(not(test))]
use mojim::commit_exact;
use mojim_env::locks::lock;
use mojim_env::threads::{cancel_again, cancel_waits};
use mojim_env::{Error, Result};
use mojim_undo::{Entry, Log};

use crate::object::{Later, Thread, no_memory, tell, tidy};
#[cfg(test)]
use crate::tests::commit_exact;

/// Decides about a captured block that could not be committed: not 0 to try again.
pub type Decides = unsafe extern "C-unwind" fn(c_int, *const c_char, *mut c_void) -> c_int;

/// The errno for which a captured block was given up.
static FAILED: AtomicI32 = AtomicI32::new(0);
static DECIDES: Mutex<Option<(Decides, usize)>> = Mutex::new(None);

/// How long a commit waits for memory before it is repeated.
const PAUSE: Duration = Duration::from_millis(10);

/// The errno for which a captured block of this process was given up; 0 if none was.
pub fn failed() -> i32 {
    FAILED.load(Acquire)
}

/// As if nothing had been given up.
#[cfg(test)]
pub(crate) fn forget() {
    FAILED.store(0, Release);
}

/// Has `decides` asked about captured blocks that cannot be committed; `None` for the default.
pub fn on_failure(decides: Option<Decides>, arg: *mut c_void) {
    let mut now = lock(&DECIDES);
    *now = decides.map(|d| (d, arg as usize));
}

/// Commits the outermost level. After an error the transaction is open as before.
///
/// # Safety
/// `t` is the calling thread's, with one level open.
pub(crate) unsafe fn outermost(t: *mut Thread) -> Result<()> {
    // SAFETY: the caller's promise. No reference outlives a call of the program's.
    let later = unsafe {
        let t = &mut *t;
        check(t)?;
        collect(t)?;
        if let Err(e) = commit_exact(&t.ranges) {
            match e.error {
                // This process commits nothing more, whatever becomes of it.
                Error::Stale(_) | Error::Poisoned(_) | Error::Full(_) => t.in_doubt = false,
                // Of this try or an earlier one. (Where a disk or the log has no room, what was begun
                // goes on by itself.)
                _ => t.in_doubt |= e.begun,
            }
            return Err(e.error);
        }
        t.in_doubt = false;
        // Before another thread can close the heap, or roll it back.
        for what in &t.later {
            if let Later::Freed(heap, block) = what {
                heap.give(*block);
            }
        }
        t.log.close();
        tidy(t);
        std::mem::take(&mut t.later)
    };
    if later.capacity() > 0 {
        // SAFETY: as above.
        unsafe { run(t, later) };
    }
    Ok(())
}

fn check(t: &Thread) -> Result<()> {
    let text = match (t.log.broken, failed()) {
        (0, 0) => return Ok(()),
        (libc::ENOMEM, _) => return Err(no_memory()),
        (0, _) => {
            "a transaction of this process was given up before it was committed (in C: mojim_tx_failed): none is committed from here on, since it could build on the stores of that one; attach anew in a new process"
        }
        _ => {
            "the transaction called what no transaction can take back (__transaction_relaxed with an unsafe call): nothing of it is committed; use __transaction_atomic"
        }
    };
    Err(Error::Unsupported(text.into()))
}

/// The bytes that were stored to, ascending, each once.
fn collect(t: &mut Thread) -> Result<()> {
    let Thread { log, ranges, .. } = t;
    ranges.clear();
    for entry in log.entries() {
        let Entry::Bytes { addr, len } = entry else {
            continue;
        };
        if ranges.len() == ranges.capacity() && ranges.try_reserve(1).is_err() {
            return Err(no_memory());
        }
        ranges.push(addr..addr + len);
    }
    ranges.sort_unstable_by_key(|r| r.start);
    ranges.dedup_by(|next, last| {
        // Only what overlaps or touches: what lies in a gap is not ours to commit.
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    Ok(())
}

/// What is to happen after a commit. What is called does not unwind.
///
/// # Safety
/// `t` is the calling thread's, and closed.
unsafe fn run(t: *mut Thread, mut later: Vec<Later>) {
    for what in later.drain(..) {
        match what {
            // SAFETY: the program's promise, when it gave the function.
            Later::Call(f, arg) => unsafe { f(arg) },
            Later::Taken(..) | Later::Freed(..) | Later::Root(_) => {}
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        if (*t).later.capacity() == 0 {
            (*t).later = later;
        }
    }
}

/// Takes the innermost level back and ends it. Bytes in `dead` stay.
///
/// # Errors
/// `Unsupported` if it was the outermost one and had made stores that nothing takes back: no transaction
/// of the process is committed from here on.
///
/// # Safety
/// `t` is the calling thread's, and a level is open.
pub(crate) unsafe fn take_back(t: *mut Thread, dead: Range<usize>) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let log = &raw mut (*t).log;
        let level = *(*log).levels().last().expect("a level is open");
        Log::take_back(log, level.mark, dead);
        let undone = (*t).later.drain(level.later as usize..).rev();
        undone.for_each(|what| match what {
            Later::Call(..) | Later::Freed(..) => {}
            Later::Root(held) => held.take_back(),
            Later::Taken(heap, block) => heap.give(block),
        });
        (*log).later = level.later;
        (*log).catches = level.catches;
        let broken = match (*log).depth {
            1 => check(&*t).err().filter(|_| (*log).broken != 0),
            _ => None,
        };
        (*log).drop_level();
        if (*log).depth == 0 {
            tidy(&mut *t);
        }
        let Some(e) = broken else { return Ok(()) };
        stop_commits(&e);
        Err(e)
    }
}

/// A thread ends: what it has open is taken back, unless it is in doubt.
///
/// # Safety
/// `t` is the calling thread's.
pub(crate) unsafe fn thread_ends(t: *mut Thread) {
    // SAFETY: the caller's promise. The thread's stack has nothing that is used any more.
    unsafe {
        if (*t).in_doubt {
            tell("a thread ended with a transaction that is in doubt: its stores stay in memory");
            (*t).in_doubt = false;
            (*t).later.clear();
            (*t).log.close();
        }
        while !(*t).log.levels().is_empty() {
            // It was told.
            let _ = take_back(t, stack());
        }
        // Its mark may be up without a level: a begin that has waited was cancelled.
        (*t).log.close();
    }
}

/// The calling thread's stack.
fn stack() -> Range<usize> {
    let (mut base, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the thread's own attributes, which are destroyed.
    unsafe {
        let mut attr = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &mut attr) != 0 {
            return 0..0;
        }
        libc::pthread_attr_getstack(&attr, &mut base, &mut size);
        libc::pthread_attr_destroy(&mut attr);
    }
    base as usize..base as usize + size
}

/// Commits a captured block, or gives it up.
///
/// # Safety
/// `log` is the calling thread's, with one level open.
pub(crate) unsafe extern "C-unwind" fn captured(log: *mut Log) {
    let t = log.cast::<Thread>();
    let cancel = cancel_waits();
    loop {
        // SAFETY: the caller's promise; a log is the first field of its thread's object.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { outermost(t) }));
        let error = match done {
            Ok(Ok(())) => break,
            Ok(Err(e)) => e,
            // SAFETY: as above.
            Err(_) if unsafe { (*t).log.depth == 0 } => break,
            Err(_) => Error::Poisoned("internal error in a commit".into()),
        };
        // SAFETY: as above.
        let hopeless = unsafe { (*t).log.broken != 0 };
        if hopeless || !again(&error) {
            give_up(t, &error);
            break;
        }
    }
    cancel_again(cancel);
}

/// Whether to commit a captured block once more.
pub(crate) fn again(error: &Error) -> bool {
    let decides = *lock(&DECIDES);
    if let Some((decides, arg)) = decides {
        let text = CString::new(error.to_string().replace('\0', "?")).unwrap_or_default();
        // SAFETY: the program's promise, when it gave the function.
        return unsafe { decides(error.errno(), text.as_ptr(), arg as *mut c_void) } != 0;
    }
    if error.errno() == libc::ENOMEM {
        std::thread::sleep(PAUSE);
    }
    [libc::ETIMEDOUT, libc::ENOMEM].contains(&error.errno())
}

/// No transaction is committed from here on.
fn stop_commits(error: &Error) {
    let first = FAILED.compare_exchange(0, error.errno().max(1), AcqRel, Acquire);
    if first.is_ok() {
        tell(&format!(
            "a transaction that cannot be taken back is not committed, and none is from here on: {error}"
        ));
    }
}

pub(crate) fn give_up(t: *mut Thread, error: &Error) {
    // SAFETY: the calling thread's own.
    let t = unsafe { &mut *t };
    stop_commits(error);
    t.in_doubt = false;
    t.later.clear();
    t.log.close();
    tidy(t);
}

/// Takes the innermost level of a captured block back. Frames of the stack from the
/// caller's to `sp` stay as they are.
///
/// # Safety
/// `log` is the calling thread's, and a level is open.
pub(crate) unsafe extern "C-unwind" fn captured_abort(log: *mut Log, sp: usize) {
    // SAFETY: the caller's promise. What fails was told: a cancel has no result.
    let _ = unsafe { take_back(log.cast::<Thread>(), frames_to(sp)) };
}

/// The stack from this call, and those that its caller makes, to `sp`.
#[inline(never)]
pub(crate) fn frames_to(sp: usize) -> Range<usize> {
    let from = stack_pointer().saturating_sub(64 << 10);
    from.min(sp)..sp
}

/// Not a local variable's address: the address sanitizer has these elsewhere, and all between there and
/// the stack, regions too, would stay as an aborted transaction left it.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stack_pointer() -> usize {
    let sp;
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mov {}, rsp", out(reg) sp, options(nomem, nostack, preserves_flags))
    };
    sp
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn stack_pointer() -> usize {
    let here = 0u8;
    &raw const here as usize
}
