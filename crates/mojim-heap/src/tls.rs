//! One pointer a thread, read by two instructions.
//!
//! In a shared library a `thread_local!` is a call on each access, which took a third of the
//! time of `malloc`. So the variable is declared to the assembler, and read by the
//! initial-exec model: it lies in the part of a thread's memory that is made before the
//! program starts. All variables of a library that is loaded later (some hundred bytes of
//! libmojim.so) then come from what the C library keeps for such libraries, about 1,600 bytes.

/// What a thread's variable points to at first: zeros.
#[repr(align(64))]
pub struct Zeros([u8; ZEROS]);

/// How many.
pub const ZEROS: usize = 4096;

static NONE: Zeros = Zeros([0; ZEROS]);

/// The pointer that is none.
pub fn none() -> *mut u8 {
    NONE.0.as_ptr().cast_mut()
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::{asm, global_asm};

    global_asm!(
        ".pushsection .tdata.mojim_heap_cache,\"awT\",@progbits",
        ".globl mojim_heap_cache",
        ".hidden mojim_heap_cache",
        ".type mojim_heap_cache, @object",
        ".size mojim_heap_cache, 8",
        ".p2align 3",
        "mojim_heap_cache:",
        ".quad {none}",
        ".popsection",
        none = sym super::NONE,
    );

    #[inline(always)]
    pub fn get() -> *mut u8 {
        let p: *mut u8;
        // SAFETY: reads the calling thread's variable, which is declared above.
        unsafe {
            asm!(
                "mov {p}, qword ptr [rip + mojim_heap_cache@GOTTPOFF]",
                "mov {p}, qword ptr fs:[{p}]",
                p = out(reg) p,
                options(nostack, readonly, preserves_flags),
            );
        }
        p
    }

    pub fn set(p: *mut u8) {
        // SAFETY: writes the calling thread's variable, which is declared above.
        unsafe {
            asm!(
                "mov {o}, qword ptr [rip + mojim_heap_cache@GOTTPOFF]",
                "mov qword ptr fs:[{o}], {p}",
                o = out(reg) _,
                p = in(reg) p,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use std::cell::Cell;

    thread_local!(static CACHE: Cell<*mut u8> = const { Cell::new((&raw const super::NONE).cast_mut().cast()) });

    #[inline]
    pub fn get() -> *mut u8 {
        CACHE.get()
    }

    pub fn set(p: *mut u8) {
        CACHE.set(p);
    }
}

pub use imp::{get, set};
