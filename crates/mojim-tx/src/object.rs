//! A thread's transaction as an object: its log with room, and what a commit needs beside.
//!
//! Invariant: a log's room is made here and given back here.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::io::Write;
use std::ops::Range;
use std::ptr::null_mut;

use mojim_env::Error;
use mojim_heap::{Block, Heap, HeldRoot};
use mojim_undo::{Level, Log};

/// What happens after a transaction.
pub(crate) enum Later {
    /// A call after the commit.
    Call(unsafe extern "C-unwind" fn(*mut c_void), *mut c_void),
    /// The block was taken: it is the heap's again if the level is taken back.
    Taken(Heap, Block),
    /// The block was freed: it is the heap's again after the commit.
    Freed(Heap, Block),
    /// The place of a root was changed: no other transaction changes it until the end.
    Root(HeldRoot),
}

/// A thread's transaction.
#[repr(C)]
pub(crate) struct Thread {
    /// First: libmojim_itm.so knows the object by it.
    pub(crate) log: Log,
    /// What a commit sorts; kept for the next one.
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) later: Vec<Later>,
    /// It has an LSN and may be committed, or come to be: it cannot be taken back.
    pub(crate) in_doubt: bool,
    /// It is in the registry, and goes to the pool.
    pub(crate) pooled: bool,
}

/// Words and levels that a log begins with.
const WORDS: usize = 2048;
const LEVELS: u32 = 8;
/// A log of more words than these gives its room back after the transaction.
const MOST_KEPT: usize = 128 << 10;

/// The error of a transaction that gets no memory.
pub fn no_memory() -> Error {
    Error::io("a transaction", &mojim_env::reserve::none_left())
}

/// One line on standard error.
pub(crate) fn tell(text: &str) {
    // A program that has closed standard error does not want the text.
    let _ = writeln!(std::io::stderr(), "mojim: {text}");
}

/// Gives the room of a log that is empty back, if it has more than `most` words.
pub(crate) fn release(log: &mut Log, most: usize) {
    if log.words() == 0 && log.capacity() > most {
        // SAFETY: an empty log needs no room; what it had was made by `grow`.
        unsafe {
            let (base, capacity) = log.replace(null_mut(), 0);
            dealloc(base.cast(), layout(capacity));
        }
    }
}

/// To be called after a transaction.
#[inline]
pub(crate) fn tidy(t: &mut Thread) {
    if t.log.capacity() > MOST_KEPT {
        release(&mut t.log, MOST_KEPT);
        t.ranges = Vec::new();
    }
}

fn layout(words: usize) -> Layout {
    Layout::array::<u64>(words).expect("it was allocated")
}

pub(crate) unsafe extern "C-unwind" fn grow(log: *mut Log, words: usize) -> bool {
    // SAFETY: the calling thread's own log; nothing else refers to its words.
    unsafe {
        let (used, had) = ((*log).words(), (*log).capacity());
        let Some(needed) = used.checked_add(words) else {
            return false;
        };
        let capacity = needed.max(had.saturating_mul(2)).max(WORDS);
        let Ok(new) = Layout::array::<u64>(capacity) else {
            return false;
        };
        let base = alloc(new).cast::<u64>();
        if base.is_null() {
            return false;
        }
        if used > 0 {
            std::ptr::copy_nonoverlapping((*log).base(), base, used);
        }
        let (old, had) = (*log).replace(base, capacity);
        if had > 0 {
            dealloc(old.cast(), layout(had));
        }
        true
    }
}

pub(crate) unsafe extern "C-unwind" fn deepen(log: *mut Log) -> bool {
    // SAFETY: as in `grow`.
    unsafe {
        let depth = (*log).depth;
        let Some(room) = depth.checked_mul(2).map(|n| n.max(LEVELS)) else {
            return false;
        };
        let of = |n: u32| Layout::array::<Level>(n as usize).expect("a few levels");
        let levels = alloc(of(room)).cast::<Level>();
        if levels.is_null() {
            return false;
        }
        std::ptr::copy_nonoverlapping((*log).levels().as_ptr(), levels, depth as usize);
        let (old, had) = (*log).replace_levels(levels, room);
        if had > 0 {
            dealloc(old.cast(), of(had));
        }
        true
    }
}

/// False if there is no memory.
pub(crate) fn push_later(t: &mut Thread, later: Later) -> bool {
    if t.later.try_reserve(1).is_err() {
        return false;
    }
    t.later.push(later);
    t.log.later += 1;
    true
}
