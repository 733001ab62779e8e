//! The calling thread's last sync point.

use std::cell::Cell;

thread_local! {
    static LAST: Cell<u64> = const { Cell::new(0) };
}

/// LSN of the calling thread's last successful sync point, or of the last that
/// it has begun; 0 before the first.
pub fn last_lsn() -> u64 {
    LAST.with(Cell::get)
}

/// It is this one.
#[inline]
pub(crate) fn set(lsn: u64) {
    LAST.with(|l| l.set(lsn));
}

/// It is this one, if that is later.
pub(crate) fn raise(lsn: u64) {
    LAST.with(|l| l.set(l.get().max(lsn)));
}
