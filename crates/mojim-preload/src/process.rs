//! This process's attachment to its volume.
//!
//! Owns the handle, the rule which process may use it after a fork, and what happens at
//! the program's start, at fork and at exit.
//!
//! Invariants:
//! - In a child of an attached process, by fork or vfork, the tables and the attachment
//!   are the parent's. The child neither uses nor changes them. The exception is a
//!   child forked from a process that shares the volume, if the engine has attached the
//!   child too. A child that was forked before the attach is a process like any other.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering::*};

use crate::api::{self, Handle, api, failed};
use crate::inside::{self, is_inside, is_own, on, reads, run_inside, starting};
use crate::real;
use crate::settings::{or_null, setting, settings};
use crate::table::{self, Names, names};

/// All locks of this library that a thread waits for, in the order of taking them.
type Locks = (
    MutexGuard<'static, ()>,
    MutexGuard<'static, ()>,
    MutexGuard<'static, Names>,
);

thread_local! {
    static AT_FORK: Cell<Option<Locks>> = const { Cell::new(None) };
}

/// Whether this process was forked from an attached one. 0: it was not. 1: it was, and
/// the engine has not been asked about it yet. 2: it was, and shares its parent's memory,
/// so it is a process like any other. 3: it was, and does not share the memory.
static FORKED: AtomicU8 = AtomicU8::new(0);
static HANDLE: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Whether this is the process that owns the tables, not a child of it.
pub fn is_owner() -> bool {
    is_own()
        && match FORKED.load(Relaxed) {
            0 | 2 => true,
            3 => false,
            _ => is_usable(),
        }
}

/// Whether threads of the engine may open files in this process. Not in a forked child
/// that has not joined its parent yet, and this question does not make it join.
pub fn has_engine() -> bool {
    on() && matches!(FORKED.load(Relaxed), 0 | 2) && is_own()
}

/// Asks the engine whether a forked child may use the volume, and remembers the answer.
#[cold]
fn is_usable() -> bool {
    let h = HANDLE.load(Acquire);
    // SAFETY: the handle.
    let usable = api().is_ok_and(|api| unsafe { (api.mojim_usable)(h) } == 1);
    FORKED.store(if usable { 2 } else { 3 }, Relaxed);
    usable
}

/// Refuses in a child.
pub fn check_owner() -> Result<(), c_int> {
    if is_owner() {
        return Ok(());
    }
    real::say(
        "this process was forked from the one that uses the volume. Its memory is a copy, and cannot be committed; open the files after the fork",
    );
    Err(libc::EOPNOTSUPP)
}

/// The volume, attached at the first call.
pub fn attach() -> Result<Handle, c_int> {
    let h = HANDLE.load(Acquire);
    check_owner()?;
    if !h.is_null() {
        return Ok(h);
    }
    let api = api()?;
    let s = settings()?;
    let _lock = names();
    let h = HANDLE.load(Acquire);
    if !h.is_null() {
        return Ok(h);
    }
    let attach = if reads() {
        api.mojim_attach_reader
    } else {
        api.mojim_join
    };
    // SAFETY: C strings.
    let h = unsafe { attach(or_null(&s.config), or_null(&s.node), or_null(&s.volume)) };
    if h.is_null() {
        return Err(api::failed(api));
    }
    HANDLE.store(h, Release);
    Ok(h)
}

/// The volume, if it is attached and this is its process.
pub fn attached() -> Option<Handle> {
    let h = HANDLE.load(Acquire);
    (!h.is_null() && is_owner()).then_some(h)
}

/// Brings the data files up to what is committed.
pub fn settle() -> Result<(), c_int> {
    if reads() {
        return Ok(()); // what is read is the node's affair
    }
    let Some(h) = attached() else { return Ok(()) };
    let api = api()?;
    // SAFETY: the handle.
    match unsafe { (api.mojim_settle)(h) } {
        0 => Ok(()),
        _ => Err(failed(api)),
    }
}

extern "C" fn before_fork() {
    // A thread that forks inside (a signal handler) may hold the locks itself.
    if !is_inside() {
        let _ = AT_FORK.try_with(|g| {
            inside::hold(); // a signal handler must not wait for them
            let (position, starting) = (table::position_lock(), starting());
            g.set(Some((position, starting, names())));
        });
    }
}

extern "C" fn in_parent() {
    if let Ok(Some(locks)) = AT_FORK.try_with(Cell::take) {
        drop(locks);
        inside::let_go();
    }
}

extern "C" fn in_child() {
    inside::own();
    if !HANDLE.load(Acquire).is_null() {
        FORKED.store(1, SeqCst);
    }
    in_parent();
}

/// The end of the program is a sync point of its regions without MAP_ATOMIC.
extern "C" fn at_exit() {
    let Some(h) = attached() else { return };
    // Not `enter`: a thread whose signal handler left a call by siglongjmp stays inside.
    run_inside((), || {
        HANDLE.store(std::ptr::null_mut(), Release);
        inside::switch_off();
        let api = api()?;
        // SAFETY: the handle is taken out of use.
        if unsafe { (api.mojim_finish)(h) } != 0 {
            let errno = real::errno();
            let mut why = api::last_error(api);
            // The thread's error text may be gone by now.
            if why.is_empty() {
                why = std::io::Error::from_raw_os_error(errno).to_string();
            }
            real::say(&format!(
                "the program ended, and its stores since its last sync point are not committed: {why}"
            ));
        }
        Ok(())
    });
}

/// Ends a program that could not know its volume, before its main.
fn check_start() {
    crate::exec::remember();
    let config = setting("MOJIM_CONFIG").unwrap_or_default();
    // SAFETY: a C string.
    let r = unsafe {
        libc::syscall(
            libc::SYS_faccessat,
            libc::AT_FDCWD,
            config.as_ptr(),
            libc::R_OK,
        )
    };
    if r != 0 {
        let why = std::io::Error::last_os_error();
        real::say(&format!(
            "{}: {why}; the program is not started without its configuration",
            config.to_string_lossy()
        ));
        // SAFETY: nothing of the program has run yet.
        unsafe { libc::_exit(126) };
    }
}

extern "C" fn at_start() {
    if inside::decide() {
        check_start();
        // SAFETY: handlers that touch this library's statics only.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
