//! A value that shares no cache line with others.

use std::ops::Deref;

/// A value on cache lines of its own: two of them, since processors fetch lines in pairs. For
/// what one thread writes while others write, or read, what would lie beside it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Alone<T>(pub T);

impl<T> Deref for Alone<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}
