//! Loads, stores and notes of the types that Rust can pass as C does. `wide.rs` has the others.
//!
//! R, RaR, RaW: a load. RfW: a load of what is stored to later: noted. W, WaR: a store: noted.
//! WaW: a store to what the same block has noted. L: noted, for a store that is not told.

use crate::thread::{is_nested, save};

/// `float _Complex`; and `__m64`, which is passed likewise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pair(f32, f32);

/// `double _Complex`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pair64(f64, f64);

macro_rules! of_type {
    ($t:ty: $r:ident $rar:ident $raw:ident $rfw:ident $w:ident $war:ident $waw:ident $l:ident) => {
        of_type!(@load $t, $r $rar $raw);
        of_type!(@store $t, $w $war);
        /// A load of what is stored to later.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $rfw(p: *const $t) -> $t {
            save::<{ size_of::<$t>() }>(p.cast());
            // SAFETY: the compiler's address.
            unsafe { p.read_unaligned() }
        }
        /// A second store.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $waw(p: *mut $t, value: $t) {
            if is_nested() {
                save::<{ size_of::<$t>() }>(p.cast());
            }
            // SAFETY: the compiler's address.
            unsafe { p.write_unaligned(value) };
        }
        /// A note.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $l(p: *const $t) {
            save::<{ size_of::<$t>() }>(p.cast());
        }
    };
    (@load $t:ty, $($name:ident)*) => { $(
        /// A load.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(p: *const $t) -> $t {
            // SAFETY: the compiler's address.
            unsafe { p.read_unaligned() }
        }
    )* };
    (@store $t:ty, $($name:ident)*) => { $(
        /// A store.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(p: *mut $t, value: $t) {
            save::<{ size_of::<$t>() }>(p.cast());
            // SAFETY: the compiler's address.
            unsafe { p.write_unaligned(value) };
        }
    )* };
}

of_type!(u8: _ITM_RU1 _ITM_RaRU1 _ITM_RaWU1 _ITM_RfWU1 _ITM_WU1 _ITM_WaRU1 _ITM_WaWU1 _ITM_LU1);
of_type!(u16: _ITM_RU2 _ITM_RaRU2 _ITM_RaWU2 _ITM_RfWU2 _ITM_WU2 _ITM_WaRU2 _ITM_WaWU2 _ITM_LU2);
of_type!(u32: _ITM_RU4 _ITM_RaRU4 _ITM_RaWU4 _ITM_RfWU4 _ITM_WU4 _ITM_WaRU4 _ITM_WaWU4 _ITM_LU4);
of_type!(u64: _ITM_RU8 _ITM_RaRU8 _ITM_RaWU8 _ITM_RfWU8 _ITM_WU8 _ITM_WaRU8 _ITM_WaWU8 _ITM_LU8);
of_type!(f32: _ITM_RF _ITM_RaRF _ITM_RaWF _ITM_RfWF _ITM_WF _ITM_WaRF _ITM_WaWF _ITM_LF);
of_type!(f64: _ITM_RD _ITM_RaRD _ITM_RaWD _ITM_RfWD _ITM_WD _ITM_WaRD _ITM_WaWD _ITM_LD);
of_type!(Pair: _ITM_RM64 _ITM_RaRM64 _ITM_RaWM64 _ITM_RfWM64 _ITM_WM64 _ITM_WaRM64 _ITM_WaWM64 _ITM_LM64);
of_type!(Pair: _ITM_RCF _ITM_RaRCF _ITM_RaWCF _ITM_RfWCF _ITM_WCF _ITM_WaRCF _ITM_WaWCF _ITM_LCF);
of_type!(Pair64: _ITM_RCD _ITM_RaRCD _ITM_RaWCD _ITM_RfWCD _ITM_WCD _ITM_WaRCD _ITM_WaWCD _ITM_LCD);
