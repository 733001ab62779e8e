//! Whether this library handles the process's calls, and whether a thread is inside it.
//!
//! Owns:
//!
//! - the switch (`on`),
//! - the process that the tables belong to,
//! - the per-thread mark of being inside,
//! - the lock for what is determined once (`starting`).
//!
//! Invariants:
//! - `enter` refuses a thread that is inside, so no thread waits for itself.
//! - No panic leaves `run_inside`.
//! - `on`, `is_inside`, `is_own` and their kin take no lock and allocate nothing.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering::*};
use std::sync::{Mutex, MutexGuard};

use crate::real;

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// 0 not known yet, 1 off, 2 on.
static SWITCH: AtomicU8 = AtomicU8::new(0);
/// The process that the tables belong to. A child of vfork shares our memory, but is
/// another process.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// MOJIM_READ is set: the program reads what a node that follows shows.
static READS: AtomicBool = AtomicBool::new(false);

/// Whether files of the volume are only read here.
#[inline]
pub fn reads() -> bool {
    READS.load(Relaxed)
}

/// Whether calls of this process may concern a volume.
#[inline]
pub fn on() -> bool {
    match SWITCH.load(Relaxed) {
        1 => false,
        2 => true,
        _ => decide(),
    }
}

/// Whether a path that this thread passes may be a volume's; a path passed inside is the
/// engine's.
#[inline]
pub fn takes_paths() -> bool {
    on() && !is_inside()
}

#[cold]
pub fn decide() -> bool {
    let set = |name: &[u8]| {
        // SAFETY: a C string; the environment is not changed before main.
        let v = unsafe { libc::getenv(name.as_ptr().cast()) };
        // SAFETY: a C string.
        !v.is_null() && unsafe { *v } != 0
    };
    let on = set(b"MOJIM_CONFIG\0") && set(b"MOJIM_NODE\0");
    READS.store(set(b"MOJIM_READ\0"), Relaxed);
    OWNER.store(real::getpid(), Relaxed);
    SWITCH.store(if on { 2 } else { 1 }, Relaxed);
    on
}

/// From here on this library handles no call: the program is about to end.
pub fn switch_off() {
    SWITCH.store(1, Relaxed);
}

/// Whether this is the process that the tables belong to, not its child by vfork.
pub fn is_own() -> bool {
    real::getpid() == OWNER.load(Relaxed)
}

/// From here on the tables belong to this process: a forked child has its own copy.
pub fn own() {
    OWNER.store(real::getpid(), Relaxed);
}

/// Runs `f` inside: the engine's and our own calls pass through. A panic is EIO.
///
/// EDEADLK if the thread is inside already: a signal handler interrupted one call and
/// makes another. Locks may be held, so the second call can neither run nor wait. The
/// refusal takes no lock and allocates nothing.
pub fn enter<T>(failed: T, f: impl FnOnce() -> Result<T, c_int>) -> T {
    if is_inside() {
        real::set_errno(libc::EDEADLK);
        return failed;
    }
    run_inside(failed, f)
}

/// `enter` without its check. The thread is not cancelled while it is inside.
pub fn run_inside<T>(failed: T, f: impl FnOnce() -> Result<T, c_int>) -> T {
    let cancel = real::cancel_waits();
    let done = run_uncancelled(failed, f);
    real::cancel_again(cancel);
    done
}

fn run_uncancelled<T>(failed: T, f: impl FnOnce() -> Result<T, c_int>) -> T {
    let before = real::errno();
    INSIDE.with(|i| i.set(i.get() + 1));
    let r = catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        real::say("internal error in libmojim_preload.so");
        Err(libc::EIO)
    });
    INSIDE.with(|i| i.set(i.get() - 1));
    match r {
        Ok(v) => {
            real::set_errno(before);
            v
        }
        Err(e) => {
            real::set_errno(e);
            failed
        }
    }
}

/// Whether the calling thread is inside.
#[inline]
pub fn is_inside() -> bool {
    INSIDE.with(Cell::get) != 0
}

/// Marks the calling thread as inside until `let_go`. It was not inside, and is about to
/// fork.
pub fn hold() {
    INSIDE.with(|i| i.set(1));
}

/// Ends `hold`, after the fork.
pub fn let_go() {
    INSIDE.with(|i| i.set(0));
}

/// Held while a thread determines the library, the settings or the directory for the
/// first time. A fork waits for this lock, since in the child no thread would finish what
/// that thread has begun.
static STARTING: Mutex<()> = Mutex::new(());

pub fn starting() -> MutexGuard<'static, ()> {
    STARTING.lock().unwrap_or_else(|e| e.into_inner())
}
