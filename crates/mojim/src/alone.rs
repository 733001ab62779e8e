//! Checks that refuse a call before anything has changed.
//!
//! Owns the rule that a transaction is the only sync point of its thread.

use std::ops::{Bound, RangeBounds};

use engine::{Error, Result};

/// Why a range is none of so many `things`.
#[cold]
pub(crate) fn wrong_range(bounds: impl RangeBounds<usize>, count: usize, things: &str) -> String {
    match (bounds.start_bound(), bounds.end_bound()) {
        (Bound::Included(start), Bound::Excluded(end)) if start > end => {
            format!("{start}..{end} begins behind its end")
        }
        _ => format!("beyond the {count} {things}"),
    }
}

/// Fails if the calling thread has a transaction open. Another one that is taken back later would change
/// what references of safe code show; and a sync point beside it would be there although the transaction is
/// taken back, or have a part of it.
#[inline]
pub(crate) fn alone(call: &str) -> Result<()> {
    match mojim_tx::is_open() {
        false => Ok(()),
        true => Err(within(call)),
    }
}

#[cold]
fn within(call: &str) -> Error {
    Error::Invalid(format!(
        "{call}: a transaction is open in this thread, which is one sync point of its own: call this before it or after it"
    ))
}
