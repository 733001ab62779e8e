//! Whether calls of this process are this library's, and whether a thread is inside it.
//!
//! Owns the switch (`on`), which process the tables are of, the per-thread mark of
//! being inside, and the lock of what is found out once.
//!
//! Invariants:
//! - A thread that is inside goes in no second time: it never waits for itself.
//! - No panic leaves `run_inside`.
//! - The questions take no lock and allocate nothing.

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
/// This process; a child of vfork, which shares our memory, is another.
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

/// Whether a path that this thread gives may be a volume's: those that are given
/// inside are the engine's.
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

/// From here on no call is this library's: the program is about to end.
pub fn switch_off() {
    SWITCH.store(1, Relaxed);
}

/// Whether this is the process that the tables are of, and no child of vfork.
pub fn is_own() -> bool {
    real::getpid() == OWNER.load(Relaxed)
}

/// They are this process's from here on: a forked child's copy.
pub fn own() {
    OWNER.store(real::getpid(), Relaxed);
}

/// Runs `f` inside: the engine's and our own calls pass through. A panic is EIO.
///
/// EDEADLK if the thread is inside already, which a signal handler's call finds that
/// interrupted another: locks may be held, so it can neither be done nor waited for.
/// That takes no lock itself, and allocates nothing.
pub fn enter<T>(failed: T, f: impl FnOnce() -> Result<T, c_int>) -> T {
    if is_inside() {
        real::set_errno(libc::EDEADLK);
        return failed;
    }
    run_inside(failed, f)
}

/// The thread is not cancelled inside.
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

/// The calling thread is inside until `let_go`: it was not, and forks.
pub fn hold() {
    INSIDE.with(|i| i.set(1));
}

/// It has forked.
pub fn let_go() {
    INSIDE.with(|i| i.set(0));
}

/// What a thread holds while it finds the library, the settings or the directory,
/// if they are not known yet: a fork waits for it, since in the child nobody would
/// ever end what that thread has begun.
static STARTING: Mutex<()> = Mutex::new(());

pub fn starting() -> MutexGuard<'static, ()> {
    STARTING.lock().unwrap_or_else(|e| e.into_inner())
}
