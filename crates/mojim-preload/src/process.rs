//! Whether this process has a volume, and its attachment.
//!
//! Owns the switch (`on`), the per-thread mark of being inside, the one lock,
//! the handle, and what happens at fork and at exit.
//!
//! Invariants:
//! - The lock is taken inside only, so a thread never waits for itself.
//! - In a child of an attached process, by fork or vfork, the tables and the
//!   attachment are the parent's: they are neither used nor changed; unless it
//!   was forked from one that shares the volume, and the engine has attached it
//!   so too. A child that was forked before is a process like any other.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, Ordering::*};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::api::{self, Handle, api};
use crate::real;

/// All locks of this library that a thread waits for, in the order of taking them.
type Locks = (
    MutexGuard<'static, ()>,
    MutexGuard<'static, ()>,
    MutexGuard<'static, Names>,
);

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    static AT_FORK: Cell<Option<Locks>> = const { Cell::new(None) };
}

/// 0 not known yet, 1 off, 2 on.
static SWITCH: AtomicU8 = AtomicU8::new(0);
/// This process; a child of vfork, which shares our memory, is another.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// Whether this was forked from a process that was attached: 0 it was not; 1 it
/// was; 2 and shares its memory, so that it is a process like any other; 3 and
/// does not.
static FORKED: AtomicU8 = AtomicU8::new(0);
static HANDLE: AtomicPtr<std::ffi::c_void> = AtomicPtr::new(std::ptr::null_mut());

/// MOJIM_READ is set: the program reads what a node that follows shows.
static READS: AtomicBool = AtomicBool::new(false);

/// Whether files of the volume are only read here.
#[inline]
pub fn reads() -> bool {
    READS.load(Relaxed)
}

/// A file's device and inode: which file it is, whoever renames it.
pub type Inode = (u64, u64);

/// A file of the volume that was opened.
pub struct Opened {
    /// None if this process has removed it. Another process may have done so, or
    /// renamed it, and this does not know.
    pub name: Option<String>,
    pub inode: Inode,
}

/// All that were, by number.
pub type Names = Vec<Opened>;
static NAMES: Mutex<Names> = Mutex::new(Vec::new());

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
fn decide() -> bool {
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
fn run_inside<T>(failed: T, f: impl FnOnce() -> Result<T, c_int>) -> T {
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

/// The lock, with the names.
pub fn names() -> MutexGuard<'static, Names> {
    debug_assert!(is_inside());
    NAMES.lock().unwrap_or_else(|e| e.into_inner())
}

/// Whether this is the process that owns the tables, not a child of it.
pub fn is_owner() -> bool {
    real::getpid() == OWNER.load(Relaxed)
        && match FORKED.load(Relaxed) {
            0 | 2 => true,
            3 => false,
            _ => is_usable(),
        }
}

/// Whether threads of the engine may open files in this process's table: not in a
/// forked child that has not joined its parent yet, which asking does not make it.
pub fn has_engine() -> bool {
    on() && matches!(FORKED.load(Relaxed), 0 | 2) && real::getpid() == OWNER.load(Relaxed)
}

/// In a forked child, once it is known to the engine.
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
        "this process was forked from the one that uses the volume, and shares no memory with it: its memory is a copy and cannot be committed; open the files after the fork",
    );
    Err(libc::EOPNOTSUPP)
}

fn setting(name: &str) -> Option<CString> {
    use std::os::unix::ffi::OsStringExt;
    CString::new(std::env::var_os(name)?.into_vec()).ok()
}

fn or_null(s: &Option<CString>) -> *const c_char {
    s.as_ref().map_or(std::ptr::null(), |s| s.as_ptr())
}

/// What a thread holds while it finds the library, the settings or the directory,
/// if they are not known yet: a fork waits for it, since in the child nobody would
/// ever end what that thread has begun.
static STARTING: Mutex<()> = Mutex::new(());

pub fn starting() -> MutexGuard<'static, ()> {
    STARTING.lock().unwrap_or_else(|e| e.into_inner())
}

struct Settings {
    config: Option<CString>,
    node: Option<CString>,
    volume: Option<CString>,
    directory: PathBuf,
}

/// The settings. While they cannot be had, no path can be told from a volume's:
/// the call fails, and the next one tries again.
fn settings() -> Result<&'static Settings, c_int> {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    if let Some(known) = SETTINGS.get() {
        return Ok(known);
    }
    // Without the lock: it registers the engine's handlers of forks, for which it may
    // have to wait for a fork, which waits for this one.
    let read = read_settings()?;
    let _held = starting();
    Ok(SETTINGS.get_or_init(|| read))
}

fn read_settings() -> Result<Settings, c_int> {
    use std::os::unix::ffi::OsStringExt;
    let (config, node) = (setting("MOJIM_CONFIG"), setting("MOJIM_NODE"));
    let volume = setting("MOJIM_VOLUME").filter(|v| !v.is_empty());
    let api = api()?;
    let mut dir = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: C strings, and the buffer's own length.
    let n = unsafe {
        (api.mojim_directory)(
            or_null(&config),
            or_null(&node),
            or_null(&volume),
            dir.as_mut_ptr().cast(),
            dir.len(),
        )
    };
    let Ok(n) = usize::try_from(n) else {
        let errno = real::errno();
        real::say(&format!(
            "{}; without its configuration this program can open no file",
            api::last_error(api)
        ));
        return Err(errno);
    };
    dir.truncate(n);
    Ok(Settings {
        config,
        node,
        volume,
        directory: std::ffi::OsString::from_vec(dir).into(),
    })
}

/// Where processes of the node that share the volume keep their locks.
pub fn locks_directory() -> Result<CString, c_int> {
    let (s, api) = (settings()?, api()?);
    let mut dir = vec![0u8; libc::PATH_MAX as usize];
    let (config, node, volume) = (or_null(&s.config), or_null(&s.node), or_null(&s.volume));
    // SAFETY: C strings, and the buffer's own length.
    let n = unsafe { (api.mojim_locks)(config, node, volume, dir.as_mut_ptr().cast(), dir.len()) };
    dir.truncate(usize::try_from(n).map_err(|_| api::failed(api))?);
    CString::new(dir).map_err(|_| libc::EINVAL)
}

/// The volume's directory, as configured and, if it is there, without symbolic links.
pub fn directory() -> Result<(PathBuf, Option<PathBuf>), c_int> {
    static CANONICAL: OnceLock<PathBuf> = OnceLock::new();
    let dir = &settings()?.directory;
    let canonical = match CANONICAL.get() {
        Some(c) => Some(c.clone()),
        None => {
            let found = std::fs::canonicalize(dir).ok();
            let _held = starting();
            found.map(|c| CANONICAL.get_or_init(|| c).clone())
        }
    };
    Ok((dir.clone(), canonical))
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

extern "C" fn before_fork() {
    // A thread that forks inside (a signal handler) may hold them itself.
    if !is_inside() {
        let _ = AT_FORK.try_with(|g| {
            INSIDE.with(|i| i.set(1)); // a signal handler must not wait for them
            let (position, starting) = (crate::rw::position_lock(), starting());
            let names = NAMES.lock().unwrap_or_else(|e| e.into_inner());
            g.set(Some((position, starting, names)));
        });
    }
}

extern "C" fn in_parent() {
    if let Ok(Some(locks)) = AT_FORK.try_with(Cell::take) {
        drop(locks);
        INSIDE.with(|i| i.set(0));
    }
}

extern "C" fn in_child() {
    OWNER.store(real::getpid(), Relaxed);
    if !HANDLE.load(Acquire).is_null() {
        FORKED.store(1, SeqCst);
    }
    in_parent();
}

/// The end of the program is a sync point of its regions without MAP_ATOMIC.
extern "C" fn at_exit() {
    let Some(h) = attached() else { return };
    // Also where a handler has left a call by siglongjmp, and is inside for ever.
    run_inside((), || {
        HANDLE.store(std::ptr::null_mut(), Release);
        SWITCH.store(1, Relaxed);
        let api = api()?;
        // SAFETY: the handle is taken out of use.
        if unsafe { (api.mojim_finish)(h) } != 0 {
            let errno = real::errno();
            let mut why = api::last_error(api);
            // The thread's text may be gone by now.
            if why.is_empty() {
                why = std::io::Error::from_raw_os_error(errno).to_string();
            }
            real::say(&format!(
                "at the program's end, what it stored since its last sync point is not committed: {why}"
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
            "{}: {why}; without its configuration the program is not started",
            config.to_string_lossy()
        ));
        // SAFETY: nothing of the program has run yet.
        unsafe { libc::_exit(126) };
    }
}

extern "C" fn at_start() {
    if decide() {
        check_start();
        // SAFETY: handlers that touch this module's statics only.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = at_start;

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
