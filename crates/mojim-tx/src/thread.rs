//! Which transaction is the calling thread's, and what libmojim_itm.so has done with it.
//!
//! Invariants:
//! - An object is made at a thread's first transaction and never freed, since other threads look
//!   at its mark: an ended thread's is used again.
//! - A thread that ends with a transaction open takes it back.
//! - A forked child's object is registered nowhere: its parent's threads are not there.

use std::alloc::{Layout, alloc};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

use mojim_env::Result;
use mojim_env::locks::lock;
use mojim_env::threads::{cancel_again, cancel_waits};
use mojim_memory::fork::is_forked;
use mojim_undo::{Log, Slow, register};

use crate::commit;
use crate::object::{Later, Thread, deepen, grow, no_memory, push_later, release, tell};

static SLOW: Slow = Slow {
    grow,
    deepen,
    wait,
    commit: commit::captured,
    abort: commit::captured_abort,
    on_commit: commit_calls,
    fail,
};

/// The objects of threads that have ended.
static POOL: Mutex<Vec<usize>> = Mutex::new(Vec::new());

struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        ended(MINE.get());
    }
}

thread_local! {
    static MINE: Cell<*mut Thread> = const { Cell::new(null_mut()) };
    static ENDS: Ends = const { Ends };
}

/// The calling thread's transaction, or null if it never had one.
#[inline]
pub(crate) fn known() -> *mut Thread {
    MINE.get()
}

/// The calling thread's transaction.
///
/// # Errors
/// If there is no memory for it.
#[inline]
pub(crate) fn mine() -> Result<*mut Thread> {
    match MINE.get() {
        t if t.is_null() => make(),
        t => Ok(t),
    }
}

/// The calling thread's log, for libmojim_itm.so. Null if there is no memory for it.
pub fn thread_log() -> *mut Log {
    mine().map_or(null_mut(), <*mut Thread>::cast)
}

#[cold]
fn make() -> Result<*mut Thread> {
    mojim::prepare_thread();
    let pool = || lock(&POOL);
    // While the thread ends nobody would give the object back; in a child the pool's lock
    // may be held by a thread that is not there.
    let pooled = !is_forked() && ENDS.try_with(|_| ()).is_ok();
    if pooled && let Some(t) = pool().pop() {
        let t = t as *mut Thread;
        // SAFETY: the calling thread's from here on.
        unsafe { (*t).log.mark.own() };
        known_from_here(t);
        return Ok(t);
    }
    // SAFETY: the layout of a type with fields.
    let t = unsafe { alloc(Layout::new::<Thread>()) }.cast::<Thread>();
    if t.is_null() {
        return Err(no_memory());
    }
    let thread = Thread {
        log: Log::new(&SLOW),
        ranges: Vec::new(),
        later: Vec::new(),
        in_doubt: false,
        pooled,
    };
    // SAFETY: just allocated.
    unsafe { t.write(thread) };
    // SAFETY: just written.
    unsafe { (*t).log.mark.own() };
    if !is_forked() {
        // SAFETY: never freed.
        register(unsafe { &(*t).log.mark });
    }
    known_from_here(t);
    Ok(t)
}

/// Makes an object the calling thread's.
fn known_from_here(t: *mut Thread) {
    MINE.set(t);
    // SAFETY: the calling thread's own, which stays.
    unsafe { (*t).log.cached = mojim_heap::set_open(&raw const (*t).log.depth) };
}

/// The thread that had `t` ends.
fn ended(t: *mut Thread) {
    // A thread of the parent may have held the locks at the fork.
    if t.is_null() || is_forked() {
        MINE.set(null_mut());
        return;
    }
    // SAFETY: the thread's own object, which nobody else uses but for its mark.
    unsafe {
        let noted = (*t).log.noted;
        if !noted.is_null() {
            *noted = null_mut();
            (*t).log.noted = null_mut();
        }
        // What is called when it is taken back is within the transaction, as at any abort.
        commit::thread_ends(t);
        MINE.set(null_mut());
        mojim_heap::set_open(null_mut());
        (*t).log.cached = null_mut();
        release(&mut (*t).log, 0);
        (*t).ranges = Vec::new();
        (*t).later = Vec::new();
        if (*t).pooled {
            let mut pool = lock(&POOL);
            pool.push(t as usize);
        }
    }
}

unsafe extern "C-unwind" fn wait(log: *mut Log) {
    // In a child the thread that held the marks is not there.
    if !is_forked() {
        // It sleeps: a thread that ended there would be waited for until the process ends.
        let cancel = cancel_waits();
        // SAFETY: the calling thread's own log.
        unsafe { (*log).mark.wait() };
        cancel_again(cancel);
    }
}

unsafe extern "C-unwind" fn commit_calls(
    log: *mut Log,
    f: unsafe extern "C-unwind" fn(*mut c_void),
    arg: *mut c_void,
) {
    // SAFETY: a log is the first field of its thread's object.
    let t = unsafe { &mut *log.cast::<Thread>() };
    if !push_later(t, Later::Call(f, arg)) {
        t.log.broken = libc::ENOMEM;
    }
}

unsafe extern "C-unwind" fn fail(log: *mut Log, errno: i32, text: *const c_char) {
    // SAFETY: the caller's log and text.
    let (log, text) = unsafe { (&mut *log, CStr::from_ptr(text)) };
    if log.broken == 0 {
        log.broken = errno;
        tell(&text.to_string_lossy());
    }
}
