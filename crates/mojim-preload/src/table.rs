//! Which descriptors stand for a volume's files.
//!
//! Owns one word for each descriptor number: the file's number and how it was opened.
//! Every read, write and close of the process reads the word without a lock. Also owns
//! the files by their numbers, with their lock, and the lock of positions.
//!
//! Invariants:
//! - The locks are taken inside only, so a thread never waits for itself.
//! - A word that is not 0 belongs to a descriptor that this library opened, or
//!   a duplicate of one. Words are cleared before the descriptor is closed.
//! - A process for which `process::is_owner` is false does not change the table.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::{Mutex, MutexGuard};

use crate::inside::is_inside;

/// Descriptor numbers from here on cannot stand for a volume's file.
pub const MAX_FD: usize = 1 << 16;

static FDS: [AtomicU32; MAX_FD] = [const { AtomicU32::new(0) }; MAX_FD];

pub const READ: u32 = 1;
pub const WRITE: u32 = 2;
pub const APPEND: u32 = 4;
/// O_DSYNC or O_SYNC: what is written is committed before the call returns.
pub const DURABLE: u32 = 8;
/// A refused write was reported.
const WARNED: u32 = 16;
const SHIFT: u32 = 5;

/// An open file of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Entry(u32);

impl Entry {
    pub fn new(id: usize, how: u32) -> Entry {
        Entry((id as u32 + 1) << SHIFT | how)
    }

    /// The file's number, in `names`.
    pub fn id(self) -> usize {
        (self.0 >> SHIFT) as usize - 1
    }

    pub fn may(self, how: u32) -> bool {
        self.0 & how != 0
    }
}

/// What a descriptor stands for.
#[inline]
pub fn get(fd: c_int) -> Option<Entry> {
    let e = FDS.get(usize::try_from(fd).ok()?)?.load(Acquire);
    (e != 0).then_some(Entry(e))
}

pub fn set(fd: c_int, e: Option<Entry>) {
    if let Some(slot) = usize::try_from(fd).ok().and_then(|fd| FDS.get(fd)) {
        slot.store(e.map_or(0, |e| e.0), Release);
    }
}

/// Marks a descriptor as warned; true the first time.
pub fn warn_once(fd: c_int) -> bool {
    FDS[fd as usize].fetch_or(WARNED, AcqRel) & WARNED == 0
}

/// Remembers whether writes append.
pub fn set_append(fd: c_int, on: bool) {
    if on {
        FDS[fd as usize].fetch_or(APPEND, AcqRel);
    } else {
        FDS[fd as usize].fetch_and(!APPEND, AcqRel);
    }
}

/// A file's device and inode, which identify it across renames.
pub type Inode = (u64, u64);

/// A file of the volume that was opened.
pub struct Opened {
    /// None if this process has removed it. Another process may have removed or renamed
    /// it without this one's knowledge.
    pub name: Option<String>,
    pub inode: Inode,
}

/// All files that were opened, by number.
pub type Names = Vec<Opened>;
static NAMES: Mutex<Names> = Mutex::new(Vec::new());

/// The lock, with the names.
pub fn names() -> MutexGuard<'static, Names> {
    debug_assert!(is_inside());
    NAMES.lock().unwrap_or_else(|e| e.into_inner())
}

/// Held by a call at a descriptor's own position. A fork takes it too, or a child might
/// find it locked.
pub fn position_lock() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|e| e.into_inner())
}
