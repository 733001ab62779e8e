//! The update of a single variable: eight bytes, stored through to what keeps them.
//!
//! Source: Mnemosyne, "Consistent updates" (single variable).

use std::sync::atomic::{AtomicU64, Ordering::Release};

use mojim::{Error, Result, is_region, msync};

use crate::media::{fence, store_through};

/// Stores eight bytes and makes them durable: in a region of a volume by a sync point of these
/// bytes; elsewhere by a store past the cache and a fence, which is durable where the memory is
/// persistent itself (a file on DAX, mapped with `MAP_SYNC`).
///
/// # Errors
/// `Invalid` if the address is not a multiple of 8; those of a sync point: the value is in memory
/// then, and in doubt.
///
/// # Safety
/// Eight bytes that can be written.
pub unsafe fn store8(word: *mut u64, value: u64) -> Result<()> {
    if word.is_null() || !word.is_aligned() {
        return Err(Error::Invalid(format!(
            "{word:p} is not aligned to 8 bytes: such a store is not atomic"
        )));
    }
    if is_region(word as usize) {
        // SAFETY: the caller's promise; aligned.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Release);
        return msync(word.cast(), 8).map(drop);
    }
    // What was stored before is in the memory first.
    fence();
    // SAFETY: the caller's promise.
    unsafe { store_through(word, value) };
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as above.
    unsafe {
        mojim_linux::flush_range(word.cast(), 8);
    }
    fence();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_memory_is_stored_to_and_what_is_not_aligned_is_refused() {
        let mut words = [1u64, 2];
        let first = words.as_mut_ptr();
        // SAFETY: two words of our own.
        unsafe {
            store8(first, 7).unwrap();
            let odd = store8(first.byte_add(4), 8).unwrap_err();
            assert_eq!(odd.errno(), libc::EINVAL);
        }
        assert_eq!(words, [7, 2]);
        // SAFETY: refused before it is touched.
        let none = unsafe { store8(std::ptr::null_mut(), 1) };
        assert_eq!(none.unwrap_err().errno(), libc::EINVAL);
    }
}
