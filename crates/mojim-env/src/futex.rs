//! Sleeping on a word of memory until another thread or process changes it.
//!
//! Owns the two kernel calls. A thread that a simulator schedules sleeps in the
//! simulator instead (`turns.rs`).

use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;

use crate::turns;

/// A relative timeout for the kernel; at most a year.
pub fn timespec(d: Duration) -> rustix::time::Timespec {
    let d = d.min(Duration::from_secs(365 * 24 * 3600));
    rustix::time::Timespec {
        tv_sec: d.as_secs() as _,
        tv_nsec: d.subsec_nanos() as _,
    }
}

/// Blocks while `word` is `expected`, for at most `timeout`. False after a
/// timeout; after true the caller checks the word again, since the wake-up may be
/// spurious. The word may be in memory shared between processes.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) -> bool {
    if let Some(turns) = turns::current() {
        return turns.sleep(&|| word.load(SeqCst) != expected, timeout);
    }
    let done = futex::wait(
        word,
        futex::Flags::empty(),
        expected,
        Some(&timespec(timeout)),
    );
    done != Err(Errno::TIMEDOUT)
}

/// Wakes at most `n` of the threads that wait on `word`, in any process.
pub fn futex_wake(word: &AtomicU32, n: i32) {
    // Fails only if the page is gone: then nobody can wait on it either.
    let _ = futex::wake(word, futex::Flags::empty(), n.max(0) as u32);
}
