//! Loads, stores and notes of the types that Rust cannot pass as C does: `long double` and its
//! complex (in the stack of the x87, and by value on the stack), `__m128` and `__m256`.
//!
//! The bytes of a `long double` that hold nothing are noted with it.

use std::arch::naked_asm;

use crate::thread::{is_nested, save, save_bytes};

const E: usize = 16;
const CE: usize = 32;
const M128: usize = 16;
const M256: usize = 32;

extern "C" fn note_e(p: *const u8) {
    save::<E>(p);
}

extern "C" fn note_m128(p: *const u8) {
    save::<M128>(p);
}

extern "C" fn note_ce(p: *const u8) {
    save_bytes(p, CE);
}

extern "C" fn note_m256(p: *const u8) {
    save_bytes(p, M256);
}

/// As the notes above, where a second store needs one.
extern "C" fn again_e(p: *const u8) {
    if is_nested() {
        save::<E>(p);
    }
}

extern "C" fn again_m128(p: *const u8) {
    if is_nested() {
        save::<M128>(p);
    }
}

extern "C" fn again_ce(p: *const u8) {
    if is_nested() {
        save_bytes(p, CE);
    }
}

extern "C" fn again_m256(p: *const u8) {
    if is_nested() {
        save_bytes(p, M256);
    }
}

/// A load into the registers in which C returns it.
macro_rules! load {
    ($load:tt: $($name:ident)*) => { $(
        /// A load.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            wide_asm!($load)
        }
    )* };
}

macro_rules! wide_asm {
    (e) => { naked_asm!("fld tbyte ptr [rdi]", "ret") };
    (ce) => { naked_asm!("fld tbyte ptr [rdi + 16]", "fld tbyte ptr [rdi]", "ret") };
    (m128) => {
        naked_asm!("movups xmm0, xmmword ptr [rdi]", "ret")
    };
    (m256) => { naked_asm!("vmovups ymm0, ymmword ptr [rdi]", "ret") };
    (e_noted $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "fld tbyte ptr [rdi]", "ret",
            note = sym $note)
    };
    (ce_noted $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "fld tbyte ptr [rdi + 16]",
            "fld tbyte ptr [rdi]", "ret", note = sym $note)
    };
    (m128_noted $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "movups xmm0, xmmword ptr [rdi]", "ret",
            note = sym $note)
    };
    (m256_noted $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "vmovups ymm0, ymmword ptr [rdi]", "ret",
            note = sym $note)
    };
    (e_stored $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "fld tbyte ptr [rsp + 8]",
            "fstp tbyte ptr [rdi]", "ret", note = sym $note)
    };
    (ce_stored $note:ident) => {
        naked_asm!("push rdi", "call {note}", "pop rdi", "fld tbyte ptr [rsp + 8]",
            "fstp tbyte ptr [rdi]", "fld tbyte ptr [rsp + 24]", "fstp tbyte ptr [rdi + 16]", "ret",
            note = sym $note)
    };
    (m128_stored $note:ident) => {
        naked_asm!("push rdi", "sub rsp, 16", "movups xmmword ptr [rsp], xmm0", "call {note}",
            "movups xmm0, xmmword ptr [rsp]", "add rsp, 16", "pop rdi",
            "movups xmmword ptr [rdi], xmm0", "ret", note = sym $note)
    };
    (m256_stored $note:ident) => {
        naked_asm!("push rdi", "sub rsp, 32", "vmovups ymmword ptr [rsp], ymm0", "call {note}",
            "vmovups ymm0, ymmword ptr [rsp]", "add rsp, 32", "pop rdi",
            "vmovups ymmword ptr [rdi], ymm0", "vzeroupper", "ret", note = sym $note)
    };
}

/// A note, and then a load or a store.
macro_rules! noted {
    ($how:tt $note:ident: $($name:ident)*) => { $(
        /// A load or a store, noted.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            wide_asm!($how $note)
        }
    )* };
}

/// A note alone.
macro_rules! note {
    ($($name:ident: $note:ident)*) => { $(
        /// A note.
        ///
        /// # Safety
        /// The compiler's address.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(p: *const u8) {
            $note(p);
        }
    )* };
}

load!(e: _ITM_RE _ITM_RaRE _ITM_RaWE);
load!(ce: _ITM_RCE _ITM_RaRCE _ITM_RaWCE);
load!(m128: _ITM_RM128 _ITM_RaRM128 _ITM_RaWM128);
load!(m256: _ITM_RM256 _ITM_RaRM256 _ITM_RaWM256);
noted!(e_noted note_e: _ITM_RfWE);
noted!(ce_noted note_ce: _ITM_RfWCE);
noted!(m128_noted note_m128: _ITM_RfWM128);
noted!(m256_noted note_m256: _ITM_RfWM256);
noted!(e_stored note_e: _ITM_WE _ITM_WaRE);
noted!(ce_stored note_ce: _ITM_WCE _ITM_WaRCE);
noted!(m128_stored note_m128: _ITM_WM128 _ITM_WaRM128);
noted!(m256_stored note_m256: _ITM_WM256 _ITM_WaRM256);
noted!(e_stored again_e: _ITM_WaWE);
noted!(ce_stored again_ce: _ITM_WaWCE);
noted!(m128_stored again_m128: _ITM_WaWM128);
noted!(m256_stored again_m256: _ITM_WaWM256);
note!(_ITM_LE: note_e _ITM_LCE: note_ce _ITM_LM128: note_m128 _ITM_LM256: note_m256);
