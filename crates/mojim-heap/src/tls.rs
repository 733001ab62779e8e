//! Which of its caches a thread uses ([`Cached`](mojim_undo::Cached)).
//!
//! Calls without a lock read their cache by two instructions.
//!
//! In a shared library a `thread_local!` is a call on each access, which took a third of the
//! time of `malloc`. So the variable is declared to the assembler, and read by the
//! initial-exec model: it lies in the part of a thread's memory that is made before the
//! program starts. All variables of a library that is loaded later (some hundred bytes of
//! libmojim.so) then come from a reserve. The C library keeps it for such libraries, about 1,600
//! bytes.

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

    use mojim_undo::Cached;

    global_asm!(
        ".pushsection .tdata.mojim_heap_cache,\"awT\",@progbits",
        ".globl mojim_heap_cache",
        ".hidden mojim_heap_cache",
        ".type mojim_heap_cache, @object",
        ".size mojim_heap_cache, 24",
        ".p2align 3",
        "mojim_heap_cache:",
        ".quad {none}",
        ".quad {none}",
        ".quad {none}",
        ".popsection",
        none = sym super::NONE,
    );

    #[inline(always)]
    pub fn now() -> *mut u8 {
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

    #[inline(always)]
    pub fn cached() -> *mut Cached {
        let p: *mut Cached;
        // SAFETY: the address of the calling thread's variable, which is declared above: the thread's
        // block begins with its own address.
        unsafe {
            asm!(
                "mov {p}, qword ptr [rip + mojim_heap_cache@GOTTPOFF]",
                "add {p}, qword ptr fs:[0]",
                p = out(reg) p,
                options(nostack, readonly),
            );
        }
        p
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use std::cell::UnsafeCell;

    use mojim_undo::Cached;

    const NONE: *mut u8 = (&raw const super::NONE).cast_mut().cast();

    thread_local!(static CACHED: UnsafeCell<Cached> = const {
        UnsafeCell::new(Cached { now: NONE, last: NONE, none: NONE })
    });

    #[inline]
    pub fn now() -> *mut u8 {
        // SAFETY: the calling thread's own.
        unsafe { (*cached()).now }
    }

    #[inline]
    pub fn cached() -> *mut Cached {
        CACHED.with(UnsafeCell::get)
    }
}

pub use imp::{cached, now};
