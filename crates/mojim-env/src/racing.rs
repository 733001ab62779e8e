//! Reads of memory to which others may store at the same time: a program's working copy, and a ring
//! that a peer maps.
//!
//! Owns the argument why that is sound, and the means. Nothing else reads such memory.
//!
//! A sync point reads bytes while other threads of the program may store to them. The documents let
//! a program do that. Such a sync point may hold some bytes from before a store and some from after
//! it, and nothing else is torn. In Rust and C++ a load beside a store of another thread is a data
//! race if one of the two is not atomic. The program's stores are ordinary ones. No load of ours
//! can be inside that model, an atomic one included.
//!
//! So these reads are outside of it, as those of the kernel are when `write(2)` takes a program's
//! buffer. On x86-64 they are assembly, which the compiler can neither repeat nor split, nor draw
//! conclusions from. The processor defines what they give: each byte is one that was there at a
//! moment of the call. The compiler that translates the program sees no access beside the program's
//! own.
//!
//! Elsewhere, and under Miri, they are volatile reads: the nearest that the language has.
//!
//! The bytes read are used from where they were copied to, and never read again from such memory.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::asm;

/// One byte.
///
/// # Safety
/// It is readable.
#[inline(always)]
pub unsafe fn byte(from: *const u8) -> u8 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let out: u8;
        // SAFETY: a load of one byte, which the caller says is readable.
        unsafe {
            asm!("mov {}, byte ptr [{}]", out(reg_byte) out, in(reg) from,
                options(nostack, readonly, preserves_flags));
        }
        out
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: as the caller says.
    unsafe {
        from.read_volatile()
    }
}

/// Eight bytes, which may lie anywhere. They are read at once if they are aligned.
///
/// # Safety
/// They are readable.
#[inline(always)]
pub unsafe fn word(from: *const u8) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let out: u64;
        // SAFETY: a load of eight bytes, which the caller says are readable.
        unsafe {
            asm!("mov {}, qword ptr [{}]", out(reg) out, in(reg) from,
                options(nostack, readonly, preserves_flags));
        }
        out
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        let mut bytes = [0; 8];
        // SAFETY: as the caller says.
        unsafe {
            if from.cast::<u64>().is_aligned() {
                return from.cast::<u64>().read_volatile();
            }
            for (i, b) in bytes.iter_mut().enumerate() {
                *b = from.add(i).read_volatile();
            }
        }
        u64::from_ne_bytes(bytes)
    }
}

/// Copies `len` bytes to memory of the caller's own.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes. They do not overlap, and nobody else uses
/// `to`.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= 16 {
        // SAFETY: as the caller says, and AVX2 is there where it is used.
        return unsafe {
            match len >= WIDE && is_x86_feature_detected!("avx2") {
                true => copy_wide(from, to, len),
                false => copy_blocks(from, to, len),
            }
        };
    }
    let mut at = 0;
    // SAFETY: inside both, at each step.
    unsafe {
        while at + 8 <= len {
            let bytes = word(from.add(at));
            to.add(at).cast::<u64>().write_unaligned(bytes);
            at += 8;
        }
        copy_few(from.add(at), to.add(at), len - at);
    }
}

/// As [`copy`], of few bytes: what is aligned to four or two bytes is read at once, so that a number
/// of that size is one that was there.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_few(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while at < len {
        // SAFETY: `at` and as many bytes as are left are inside both.
        unsafe {
            let (from, to, left) = (from.add(at), to.add(at), len - at);
            if left >= 4 && from.cast::<u32>().is_aligned() {
                to.cast::<u32>().write_unaligned(half(from));
                at += 4;
            } else if left >= 2 && from.cast::<u16>().is_aligned() {
                to.cast::<u16>().write_unaligned(quarter(from));
                at += 2;
            } else {
                to.write(byte(from));
                at += 1;
            }
        }
    }
}

/// Four bytes, aligned.
///
/// # Safety
/// They are, and are readable.
#[inline(always)]
unsafe fn half(from: *const u8) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let out: u32;
        // SAFETY: a load of four bytes, which the caller says are readable.
        unsafe {
            asm!("mov {:e}, dword ptr [{}]", out(reg) out, in(reg) from,
                options(nostack, readonly, preserves_flags));
        }
        out
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: as the caller says.
    unsafe {
        from.cast::<u32>().read_volatile()
    }
}

/// Two bytes, aligned.
///
/// # Safety
/// They are, and are readable.
#[inline(always)]
unsafe fn quarter(from: *const u8) -> u16 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let out: u16;
        // SAFETY: a load of two bytes, which the caller says are readable.
        unsafe {
            asm!("mov {:x}, word ptr [{}]", out(reg) out, in(reg) from,
                options(nostack, readonly, preserves_flags));
        }
        out
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: as the caller says.
    unsafe {
        from.cast::<u16>().read_volatile()
    }
}

/// From this length on wider registers pay.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const WIDE: usize = 256;

/// As [`copy`], of 128 bytes at least: blocks of 128, then the last ones once more.
///
/// # Safety
/// As [`copy`], and the processor has AVX2.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
unsafe fn copy_wide(from: *const u8, to: *mut u8, len: usize) {
    let last = len - 128;
    let mut at = 0;
    // SAFETY: each load and store is inside what the caller vouches for: a block begins at `last` at
    // most, where 128 bytes are left.
    unsafe {
        while at < len {
            let here = at.min(last);
            asm!(
                "vmovdqu {a}, ymmword ptr [{from}]",
                "vmovdqu {b}, ymmword ptr [{from} + 32]",
                "vmovdqu {c}, ymmword ptr [{from} + 64]",
                "vmovdqu {d}, ymmword ptr [{from} + 96]",
                "vmovdqu ymmword ptr [{to}], {a}",
                "vmovdqu ymmword ptr [{to} + 32], {b}",
                "vmovdqu ymmword ptr [{to} + 64], {c}",
                "vmovdqu ymmword ptr [{to} + 96], {d}",
                from = in(reg) from.add(here),
                to = in(reg) to.add(here),
                a = out(ymm_reg) _,
                b = out(ymm_reg) _,
                c = out(ymm_reg) _,
                d = out(ymm_reg) _,
                options(nostack, preserves_flags),
            );
            at += 128;
        }
    }
    // Code for older registers is slow while the upper halves are in use.
    std::arch::x86_64::_mm256_zeroupper();
}

/// As [`copy`], of 16 bytes at least: blocks of 64, then the last ones, which may overlap the blocks.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_blocks(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    // SAFETY: each load and store is inside what the caller vouches for: the last one begins where 16
    // bytes are left.
    unsafe {
        while len - at >= 64 {
            asm!(
                "movups {a}, xmmword ptr [{from}]",
                "movups {b}, xmmword ptr [{from} + 16]",
                "movups {c}, xmmword ptr [{from} + 32]",
                "movups {d}, xmmword ptr [{from} + 48]",
                "movups xmmword ptr [{to}], {a}",
                "movups xmmword ptr [{to} + 16], {b}",
                "movups xmmword ptr [{to} + 32], {c}",
                "movups xmmword ptr [{to} + 48], {d}",
                from = in(reg) from.add(at),
                to = in(reg) to.add(at),
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
            at += 64;
        }
        while at < len {
            let here = at.min(len - 16);
            asm!(
                "movups {a}, xmmword ptr [{from}]",
                "movups xmmword ptr [{to}], {a}",
                from = in(reg) from.add(here),
                to = in(reg) to.add(here),
                a = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
            at += 16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length to beyond four of the largest blocks, from and to any place of a word, and nothing beside it.
    #[test]
    fn a_copy_is_what_was_there_and_no_byte_more() {
        let from: Vec<u8> = (0..600u32).map(|i| (i * 7 + 1) as u8).collect();
        let most = if cfg!(miri) { 40 } else { 520 };
        for len in 0..most {
            for skew in 0..16 {
                let mut to = vec![0; 600];
                // SAFETY: `skew + len` and `len + 17` are below 600.
                unsafe { copy(from.as_ptr().add(skew), to.as_mut_ptr().add(17), len) };
                assert_eq!(
                    to[17..17 + len],
                    from[skew..skew + len],
                    "{len} from {skew}"
                );
                assert!(to[..17].iter().chain(&to[17 + len..]).all(|b| *b == 0));
            }
        }
        // SAFETY: inside `from`.
        let (one, eight) = unsafe { (byte(&from[5]), word(&from[5])) };
        assert_eq!(one, from[5]);
        assert_eq!(eight.to_ne_bytes(), from[5..13]);
    }

    /// Fewer than eight bytes were copied one by one: a counter of four bytes that a thread changed
    /// meanwhile could be committed as a number that it never was.
    #[test]
    fn an_aligned_number_is_read_at_once() {
        use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering::Relaxed};

        #[repr(C)]
        struct Two {
            small: AtomicU16,
            pad: u16,
            large: AtomicU32,
        }
        let two = Two {
            small: AtomicU16::new(0),
            pad: 0,
            large: AtomicU32::new(0),
        };
        let over = AtomicBool::new(false);
        let rounds = if cfg!(miri) { 10 } else { 200_000 };
        let mut torn = None;
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    for all in [u32::MAX, 0] {
                        two.large.store(all, Relaxed);
                        two.small.store(all as u16, Relaxed);
                    }
                }
            });
            let from = (&raw const two).cast::<u8>();
            while two.large.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            // Asserted when the other thread has ended: it would be waited for.
            torn = [(0, 3), (4, 4), (3, 5), (2, 6), (0, 2), (1, 7)]
                .into_iter()
                .flat_map(|part| std::iter::repeat_n(part, rounds))
                .find_map(|(at, len)| {
                    let mut to = [0u8; 8];
                    // SAFETY: inside `two`, and `to` has room for eight bytes.
                    unsafe { copy(from.add(at), to.as_mut_ptr().add(at), len) };
                    let large = u32::from_ne_bytes(to[4..].try_into().unwrap());
                    let small = u16::from_ne_bytes([to[0], to[1]]);
                    let whole = [0, u32::MAX].contains(&large)
                        && (at > 0 || [0, u16::MAX].contains(&small));
                    (!whole).then_some((at, len, to))
                });
            over.store(true, Relaxed);
        });
        assert_eq!(torn, None, "from, length, bytes");
        assert_eq!(two.pad, 0);
    }
}
