//! The calling thread's last sync point.

use std::cell::Cell;

thread_local! {
    static LAST: Cell<u64> = const { Cell::new(0) };
}

/// LSN of the calling thread's last successful sync point, or of the last one that
/// it has begun (`msync_async`); 0 before the first.
pub fn last_lsn() -> u64 {
    LAST.with(Cell::get)
}

/// Sets the calling thread's last LSN.
#[inline]
pub(crate) fn set(lsn: u64) {
    LAST.with(|l| l.set(lsn));
}

/// Sets it, unless it is greater already.
pub(crate) fn raise(lsn: u64) {
    LAST.with(|l| l.set(l.get().max(lsn)));
}
