//! Which bytes of memory differ from a copy of them, so that the cost of a sync
//! point follows what was changed.
//!
//! Owns the comparison, in words of 8 bytes, by the widest registers that the processor has. All
//! that differs is copied in the same pass. So the copy is what a record is made of, whatever other
//! threads store meanwhile. Such memory is read as `racing.rs` of `mojim-env` says.

use mojim_env::racing;

/// Bytes compared at once.
const WORD: usize = 8;
/// Bytes whose words are the bits of one mask.
const BLOCK: usize = 64 * WORD;
/// Up to this many equal words between words that differ are sent too: a further
/// extent would cost more.
const GAP: u32 = (mojim_format::OP_LEN / WORD) as u32;

/// How words are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

fn kind() -> Kind {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // Looked up once; a load from then on.
        if std::arch::is_x86_feature_detected!("avx512f") {
            return Kind::Avx512;
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return Kind::Avx2;
        }
    }
    Kind::Scalar
}

/// Makes `[copy, copy + len)` what is at `now`, and calls `changed` with the
/// places of what differed, ascending: begin and end, in bytes. What lies
/// between two differences may be named too, where that is cheaper.
///
/// # Safety
/// `now` is readable and `copy` readable and writable for `len` bytes, and both
/// have the same distance from a multiple of 8. Other threads may store to `now`:
/// then what is copied is some of the bytes before and some after.
pub unsafe fn update(
    now: *const u8,
    copy: *mut u8,
    len: usize,
    mut changed: impl FnMut(usize, usize),
) {
    // SAFETY: the caller's promise.
    unsafe { update_by(kind(), now, copy, len, &mut changed) }
}

/// # Safety
/// As `update`; the processor has what `kind` needs.
unsafe fn update_by(
    kind: Kind,
    now: *const u8,
    copy: *mut u8,
    len: usize,
    changed: &mut impl FnMut(usize, usize),
) {
    let mut runs = Runs {
        now,
        copy,
        open: None,
        changed,
    };
    let head = now.align_offset(WORD).min(len);
    let mut at = 0;
    // SAFETY: all offsets are below `len`.
    unsafe {
        runs.bytes(0..head);
        at += head;
        while len - at >= BLOCK {
            let (x, y) = (now.add(at), copy.add(at));
            let mask = match kind {
                Kind::Scalar => words_differ(x, y, 64),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx2 => avx2(x, y),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512 => avx512(x, y),
            };
            runs.block(at, mask);
            at += BLOCK;
        }
        let words = (len - at) / WORD;
        runs.block(at, words_differ(now.add(at), copy.add(at), words));
        at += words * WORD;
        runs.bytes(at..len);
        runs.close();
    }
}

/// Merges differences that lie close together.
struct Runs<'a, F: FnMut(usize, usize)> {
    now: *const u8,
    copy: *mut u8,
    open: Option<(usize, usize)>,
    changed: &'a mut F,
}

impl<F: FnMut(usize, usize)> Runs<'_, F> {
    /// The words of a block at `at` whose bits are set differ.
    ///
    /// # Safety
    /// They are inside both.
    #[inline]
    unsafe fn block(&mut self, at: usize, mut mask: u64) {
        while mask != 0 {
            let first = mask.trailing_zeros();
            let n = (mask >> first).trailing_ones();
            let begin = at + first as usize * WORD;
            // SAFETY: as the caller says.
            unsafe { self.add(begin, begin + n as usize * WORD) };
            if first + n == 64 {
                break;
            }
            mask = mask >> (first + n) << (first + n);
        }
    }

    /// Compares single bytes.
    ///
    /// # Safety
    /// They are inside both.
    unsafe fn bytes(&mut self, range: std::ops::Range<usize>) {
        for i in range {
            // SAFETY: as the caller says.
            unsafe {
                if racing::byte(self.now.add(i)) != self.copy.add(i).read() {
                    self.add(i, i + 1);
                }
            }
        }
    }

    /// # Safety
    /// It is inside both, and behind what came before.
    #[inline]
    unsafe fn add(&mut self, begin: usize, end: usize) {
        match &mut self.open {
            Some(open) if begin - open.1 <= GAP as usize * WORD => open.1 = end,
            _ => {
                // SAFETY: as the caller says.
                unsafe { self.close() };
                self.open = Some((begin, end));
            }
        }
    }

    /// # Safety
    /// What is open is inside both.
    #[inline]
    unsafe fn close(&mut self) {
        if let Some((begin, end)) = self.open.take() {
            // SAFETY: as the caller says.
            unsafe {
                let (from, to) = (self.now.add(begin), self.copy.add(begin));
                racing::copy(from, to, end - begin);
            }
            (self.changed)(begin, end);
        }
    }
}

/// # Safety
/// `words` words at both are readable, 64 at most.
#[inline]
unsafe fn words_differ(x: *const u8, y: *const u8, words: usize) -> u64 {
    let mut mask = 0;
    for i in 0..words {
        // SAFETY: as the caller says; the copy need not be aligned.
        let differs = unsafe {
            let x = racing::word(x.add(i * WORD));
            x != y.add(i * WORD).cast::<u64>().read_unaligned()
        };
        mask |= u64::from(differs) << i;
    }
    mask
}

/// # Safety
/// The processor has AVX2, and a block at both is readable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(x: *const u8, y: *const u8) -> u64 {
    use std::arch::{asm, x86_64::*};
    let mut mask = 0u64;
    for i in 0..BLOCK / 32 {
        // SAFETY: as the caller says; unaligned loads. The first is as those of `racing`.
        unsafe {
            let a: __m256i;
            asm!("vmovdqu {}, ymmword ptr [{}]", out(ymm_reg) a, in(reg) x.add(i * 32),
                options(nostack, readonly, preserves_flags));
            let b = _mm256_loadu_si256(y.add(i * 32).cast());
            let same = _mm256_castsi256_pd(_mm256_cmpeq_epi64(a, b));
            let differ = !_mm256_movemask_pd(same) as u64 & 0xf;
            mask |= differ << (i * 4);
        }
    }
    mask
}

/// # Safety
/// The processor has AVX-512F, and a block at both is readable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(x: *const u8, y: *const u8) -> u64 {
    use std::arch::{asm, x86_64::*};
    let mut mask = 0u64;
    for i in 0..BLOCK / 64 {
        // SAFETY: as the caller says; unaligned loads. The first is as those of `racing`.
        unsafe {
            let a: __m512i;
            asm!("vmovdqu64 {}, zmmword ptr [{}]", out(zmm_reg) a, in(reg) x.add(i * 64),
                options(nostack, readonly, preserves_flags));
            let b = _mm512_loadu_si512(y.add(i * 64).cast());
            mask |= u64::from(_mm512_cmpneq_epi64_mask(a, b)) << (i * 8);
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> Vec<Kind> {
        let mut all = vec![Kind::Scalar];
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                all.push(Kind::Avx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.push(Kind::Avx512);
            }
        }
        all
    }

    /// Memory whose begin is `skew` bytes behind a multiple of 8.
    fn skewed(bytes: &[u8], skew: usize) -> Vec<u64> {
        let mut all = vec![0u64; (skew + bytes.len()).div_ceil(8)];
        // SAFETY: inside `all`.
        unsafe {
            let to = all.as_mut_ptr().cast::<u8>().add(skew);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        all
    }

    fn run(kind: Kind, now: &[u8], old: &[u8], skew: usize) -> Vec<(usize, usize)> {
        let (x, mut y) = (skewed(now, skew), skewed(old, skew));
        let mut out = Vec::new();
        // SAFETY: both have `now.len()` bytes behind the skew.
        let copy = unsafe {
            let x = x.as_ptr().cast::<u8>().add(skew);
            let y = y.as_mut_ptr().cast::<u8>().add(skew);
            update_by(kind, x, y, now.len(), &mut |b, e| out.push((b, e)));
            std::slice::from_raw_parts(y, now.len()).to_vec()
        };
        assert_eq!(copy, now, "{kind:?}, {skew}");
        out
    }

    #[test]
    fn every_kind_finds_the_same_and_copies_it() {
        let mut rng = mojim_env::rng::Rng::new(1);
        let mut next = move || rng.next() as usize;
        let rounds = if cfg!(miri) { 20 } else { 2000 };
        for _ in 0..rounds {
            let len = next() % 1500;
            let old: Vec<u8> = (0..len).map(|_| next() as u8).collect();
            let mut now = old.clone();
            for _ in 0..next() % 6 {
                if len > 0 {
                    let at = next() % len;
                    let n = 1 + next() % 40;
                    now[at..(at + n).min(len)].fill(next() as u8);
                }
            }
            let skew = next() % 8;
            let all: Vec<_> = kinds()
                .into_iter()
                .map(|k| run(k, &now, &old, skew))
                .collect();
            assert!(all.iter().all(|a| *a == all[0]));
            let inside = |i: usize| all[0].iter().any(|r| (r.0..r.1).contains(&i));
            for i in 0..len {
                assert!(now[i] == old[i] || inside(i), "byte {i} of {len}");
            }
            // Nothing is named that is far from a difference.
            for (b, e) in &all[0] {
                let near = (*b..*e).filter(|i| now[*i] != old[*i]).count();
                assert!(near > 0);
            }
            assert!(all[0].windows(2).all(|w| w[0].1 + 16 < w[1].0));
        }
    }

    #[test]
    fn differences_close_together_are_one() {
        let old = [0u8; 512];
        let mut now = old;
        now[8] = 1;
        now[32] = 1;
        now[200] = 1;
        for k in kinds() {
            assert_eq!(run(k, &now, &old, 0), [(8, 40), (200, 208)]);
            assert_eq!(run(k, &old, &old, 3), []);
        }
    }
}
