//! memcpy, memmove and memset in a block, and notes of any number of bytes.
//!
//! A name says how source and destination are reached:
//!
//! - Rn, Wn: not by the transaction
//! - Rt, Wt: by the transaction
//! - aR, aW: after a load or a store of the same bytes

use std::ffi::{c_int, c_void};

use crate::thread::{is_nested, save_bytes};

/// A destination that is noted.
fn noted(to: *mut c_void, n: usize) {
    save_bytes(to.cast(), n);
}

/// A destination that the block has noted.
fn again(to: *mut c_void, n: usize) {
    if is_nested() {
        noted(to, n);
    }
}

/// A destination of the block's own, which an abort leaves.
fn own(_: *mut c_void, _: usize) {}

macro_rules! copies {
    ($copy:ident $before:ident: $($name:ident)*) => { $(
        /// A copy.
        ///
        /// # Safety
        /// The compiler's addresses.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            to: *mut c_void,
            from: *const c_void,
            n: usize,
        ) -> *mut c_void {
            $before(to, n);
            // SAFETY: the compiler's addresses.
            unsafe { libc::$copy(to, from, n) }
        }
    )* };
}

copies!(memcpy own: _ITM_memcpyRtWn _ITM_memcpyRtaRWn _ITM_memcpyRtaWWn);
copies!(memcpy noted: _ITM_memcpyRnWt _ITM_memcpyRnWtaR _ITM_memcpyRtWt _ITM_memcpyRtWtaR
    _ITM_memcpyRtaRWt _ITM_memcpyRtaRWtaR _ITM_memcpyRtaWWt _ITM_memcpyRtaWWtaR);
copies!(memcpy again: _ITM_memcpyRnWtaW _ITM_memcpyRtWtaW _ITM_memcpyRtaRWtaW _ITM_memcpyRtaWWtaW);
copies!(memmove own: _ITM_memmoveRtWn _ITM_memmoveRtaRWn _ITM_memmoveRtaWWn);
copies!(memmove noted: _ITM_memmoveRnWt _ITM_memmoveRnWtaR _ITM_memmoveRtWt _ITM_memmoveRtWtaR
    _ITM_memmoveRtaRWt _ITM_memmoveRtaRWtaR _ITM_memmoveRtaWWt _ITM_memmoveRtaWWtaR);
copies!(memmove again: _ITM_memmoveRnWtaW _ITM_memmoveRtWtaW _ITM_memmoveRtaRWtaW
    _ITM_memmoveRtaWWtaW);

macro_rules! sets {
    ($before:ident: $($name:ident)*) => { $(
        /// A memset.
        ///
        /// # Safety
        /// The compiler's addresses.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            to: *mut c_void,
            byte: c_int,
            n: usize,
        ) -> *mut c_void {
            $before(to, n);
            // SAFETY: the compiler's addresses.
            unsafe { libc::memset(to, byte, n) }
        }
    )* };
}

sets!(noted: _ITM_memsetW _ITM_memsetWaR);
sets!(again: _ITM_memsetWaW);

/// `_ITM_LB`: a note of `n` bytes.
///
/// # Safety
/// The compiler's addresses, or those of a function that is `transaction_pure`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _ITM_LB(p: *const c_void, n: usize) {
    save_bytes(p.cast(), n);
}
