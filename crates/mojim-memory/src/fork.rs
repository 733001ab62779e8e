//! Forks: a child of a process that is attached has a copy of its memory, which
//! must not be committed.
//!
//! Owns the mark by which a child knows that it was forked, and the count of attachments.
//!
//! Invariant: a child is marked if anything was attached at the fork, or about to be, and only
//! then. So are its own children. Anything that was detached before leaves nothing that could be
//! committed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};

use mojim_env::{Error, Result};

/// Set in a forked child.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Runs something once, also in a child that was forked while a thread of its parent
/// ran it: in the child that thread does not exist, and so cannot finish. (Up to
/// glibc 2.35 a thread that registers a handler waits for a fork.)
#[derive(Default)]
pub struct Once(AtomicU32);

impl Once {
    const DONE: u32 = u32::MAX;

    /// Has not run yet.
    pub const fn new() -> Once {
        Once(AtomicU32::new(0))
    }

    /// Runs `f`, or waits until another thread of this process has run it.
    pub fn call(&self, f: impl FnOnce()) {
        let me = std::process::id();
        loop {
            match self.0.load(Acquire) {
                Once::DONE => return,
                by if by == me => std::thread::yield_now(),
                by => {
                    if self.0.compare_exchange(by, me, AcqRel, Acquire).is_ok() {
                        f();
                        self.0.store(Once::DONE, Release);
                        return;
                    }
                }
            }
        }
    }
}

extern "C" fn after_fork_in_child() {
    if ATTACHMENTS.load(SeqCst) > 0 {
        FORKED.store(true, Relaxed);
    }
    if !is_forked() {
        PID.store(0, Relaxed);
    }
    mojim_env::descriptors::forked();
}

/// The process that watches for forks; 0: none.
static PID: AtomicU32 = AtomicU32::new(0);
/// How many [`Watch`]es there are.
static ATTACHMENTS: AtomicUsize = AtomicUsize::new(0);

/// An attachment: children that are forked while it lives are marked.
#[derive(Debug)]
pub struct Watch(());

impl Drop for Watch {
    fn drop(&mut self) {
        ATTACHMENTS.fetch_sub(1, SeqCst);
    }
}

/// Registers the handler that marks children while forks are watched.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call(|| {
        // SAFETY: registers a handler that only stores to atomics and a thread-local.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
}

/// From here on forked children are marked, as long as what it returns lives.
pub fn watch_forks() -> Watch {
    register();
    ATTACHMENTS.fetch_add(1, SeqCst);
    // A marked child keeps its parent's number.
    let _ = PID.compare_exchange(0, std::process::id(), Relaxed, Relaxed);
    Watch(())
}

/// Whether this process, or one that it comes from, was forked from one that was attached.
pub fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// Whether nothing was attached in this process. Also true in a child that was made
/// by other means than `fork`, for which no handler runs.
pub fn is_other_process() -> bool {
    is_forked() || PID.load(Relaxed) != std::process::id()
}

/// Fails in a process that was forked from one that was attached.
pub fn check_fork() -> Result<()> {
    match is_forked() {
        true => Err(refused()),
        false => Ok(()),
    }
}

/// The error that a forked child gets.
pub fn refused() -> Error {
    Error::Unsupported(
        "this process was forked from the one that attached: its memory is a copy and cannot be committed (but for mappings with a shared working copy); attach after the fork".into(),
    )
}
