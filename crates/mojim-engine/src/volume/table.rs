//! The table of windows: which addresses of this process show which part of which region.
//!
//! Owns the process's one table, how an address is found in it, and what of a volume is mapped.
//! `windows` makes and ends windows.
//!
//! Invariants:
//! - Readers take no lock. A table that was replaced is freed when its last reader has left.
//! - Every window that a thread may remember is valid as long as `generation` does not grow.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::reader;
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_memory::fork::is_forked;
use mojim_memory::quiescence::Quiescence;
use mojim_memory::region::{Region, Window};

use super::attached::{Inner, Lent};

/// The process's table of windows, ascending by address.
pub(crate) struct Table {
    now: AtomicPtr<Vec<Arc<Mapped>>>,
    /// Incremented after each change. What threads remember is valid until then.
    pub(crate) generation: AtomicU64,
    readers: Quiescence,
    change: Mutex<()>,
}

/// A window, and what it shows.
pub(crate) struct Mapped {
    pub(crate) window: Window,
    pub(crate) region: Arc<Region>,
    pub(crate) volume: Arc<Inner>,
}

impl Mapped {
    /// The part of `[addr, addr + len)` that the window shows, relative to the region.
    #[inline]
    pub(crate) fn part(&self, addr: usize, len: usize) -> Range<usize> {
        let w = &self.window;
        let from = addr - w.span.start + w.at;
        // A private copy ends with its window. A shared one goes on behind it: to the
        // end of the page, since programs round up.
        let shown = match w.id {
            0 => w.span.len(),
            _ => w.span.len().next_multiple_of(rustix::param::page_size()),
        };
        from..(from + len).min(w.at + shown)
    }

    /// All that the window shows.
    pub(super) fn all(&self) -> Range<usize> {
        self.part(self.window.span.start, self.window.span.len())
    }
}

pub(crate) static TABLE: Table = Table {
    now: AtomicPtr::new(std::ptr::null_mut()),
    generation: AtomicU64::new(1),
    readers: Quiescence::new(),
    change: Mutex::new(()),
};

impl Table {
    #[inline]
    pub(super) fn read<T>(&self, f: impl FnOnce(&[Arc<Mapped>]) -> T) -> T {
        let _reads = self.readers.enter();
        let p = self.now.load(SeqCst);
        if p.is_null() {
            return f(&[]);
        }
        // SAFETY: a table is freed only after every reader has left that entered
        // before it was replaced.
        f(unsafe { &*p })
    }

    /// All windows of the process.
    pub(crate) fn windows(&self) -> Vec<Arc<Mapped>> {
        self.read(<[_]>::to_vec)
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Vec<Arc<Mapped>>)) {
        let _held = lock(&self.change);
        let mut new = self.windows();
        change(&mut new);
        new.sort_by_key(|m| m.window.span.start);
        let old = self.now.swap(Box::into_raw(Box::new(new)), SeqCst);
        self.generation.fetch_add(1, SeqCst);
        self.readers.wait();
        if !old.is_null() {
            // SAFETY: made by `Box::into_raw` above; every reader that could have
            // loaded it has left.
            drop(unsafe { Box::from_raw(old) });
        }
    }

    /// No window comes or goes until the guard is dropped.
    pub(super) fn still(&self) -> MutexGuard<'_, ()> {
        lock(&self.change)
    }

    #[inline]
    pub(crate) fn find(&self, addr: usize) -> Option<Arc<Mapped>> {
        self.read(|all| {
            let i = all.partition_point(|m| m.window.span.start <= addr);
            let m = all.get(i.checked_sub(1)?)?;
            (addr < m.window.span.end).then(|| m.clone())
        })
    }
}

/// The window at an address. In a forked child, windows of shared working copies are
/// in its own table (`guest`): its parent's table may be out of date for them.
pub(super) fn window_at(addr: usize) -> Option<Arc<Mapped>> {
    TABLE
        .find(addr)
        .filter(|m| m.window.id == 0 || !is_forked())
}

/// The window that holds all of `[addr, addr + len)`. The rest of its last page
/// counts as part of it: programs round up to whole pages.
pub(crate) fn locate(addr: usize, len: usize) -> Result<Arc<Mapped>> {
    let Some(m) = window_at(addr) else {
        reader::refuse(addr)?;
        return Err(Error::NotFound(format!(
            "{addr:#x} is not in a region. A file that the program maps by itself is one under `mojim run --preload`"
        )));
    };
    let end = addr.checked_add(len);
    let page = rustix::param::page_size();
    if end.is_none_or(|e| e > m.window.span.end.next_multiple_of(page)) {
        return Err(Error::Invalid(format!(
            "{len} bytes at {addr:#x} reach beyond the region of {} ({} bytes at {:#x})",
            m.region.name,
            m.region.copy.len(),
            m.window.span.start
        )));
    }
    Ok(m)
}

impl Inner {
    /// The volume's windows in this process. No other volume's are held, not for a moment:
    /// a volume that is detached meanwhile would keep its files open until they are let go.
    pub(crate) fn windows(&self) -> Vec<Arc<Mapped>> {
        TABLE.read(|all| {
            let mine = all.iter().filter(|m| std::ptr::eq(&*m.volume, self));
            mine.cloned().collect()
        })
    }

    /// The volume's regions, each once.
    pub(crate) fn regions(&self) -> Vec<Arc<Region>> {
        let windows = self.windows();
        let mut all: Vec<_> = windows.iter().map(|m| m.region.clone()).collect();
        all.extend(lock(&self.shared).iter().map(|(_, r)| r.clone()));
        all.sort_by_key(|r| Arc::as_ptr(r) as usize);
        all.dedup_by_key(|r| Arc::as_ptr(r) as usize);
        all
    }

    /// A file's shared working copy, if it has one.
    pub(crate) fn shared_of(&self, id: u32) -> Option<Lent> {
        let all = lock(&self.shared);
        all.iter().find(|(_, r)| r.file == id).cloned()
    }
}
