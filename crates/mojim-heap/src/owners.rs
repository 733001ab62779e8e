//! Numbers of threads, for slabs to say whose they are.
//!
//! Two threads that change state bytes of one slab pass the cache line to and fro, which costs more than
//! all else of a `malloc`. So a thread takes blocks of its own slabs, and gives those of others back to them.

use std::sync::atomic::{AtomicBool, Ordering::*};

/// No thread.
pub const NOBODY: u32 = 0;

/// Threads beyond so many at the same time have no number.
const MOST: usize = 1024;

static LIVE: [AtomicBool; MOST] = [const { AtomicBool::new(false) }; MOST];

/// A number for a thread, the lowest that none has; [`NOBODY`] if there is none.
pub fn take() -> u32 {
    let free = |i: &usize| {
        LIVE[*i]
            .compare_exchange(false, true, AcqRel, Relaxed)
            .is_ok()
    };
    (1..MOST).find(free).unwrap_or(0) as u32
}

/// The thread of this number ends. What is left of it is anybody's.
pub fn give(number: u32) {
    LIVE[number as usize].store(false, Release);
}

/// Whether there is a thread of this number.
pub fn is_live(number: u32) -> bool {
    LIVE[number as usize].load(Relaxed)
}
