//! Randomness: a small generator whose whole sequence follows from its seed.
//!
//! Owns the generator (xoshiro256++, seeded by splitmix64) and nothing else.
//! Invariant: the same seed and the same calls give the same numbers on every
//! machine. Nothing here reads the clock, an address or a hash order.

/// A deterministic generator of random numbers.
#[derive(Debug, Clone)]
pub struct Rng {
    s: [u64; 4],
}

impl Rng {
    /// A generator for `seed`; every seed, also 0, is good.
    pub fn new(seed: u64) -> Rng {
        let mut x = seed;
        let mut split = || {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Rng {
            s: [split(), split(), split(), split()],
        }
    }

    /// A generator that is independent of the further numbers of this one.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.next_u64())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.s;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    ///
    /// # Panics
    /// If `high` is below `low`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "between({low}, {high})");
        match (high - low).checked_add(1) {
            Some(n) => low + self.below(n),
            None => self.next_u64(),
        }
    }

    /// True `rate` times in a thousand. A rate of 0 draws nothing, so that
    /// faults that are off do not disturb the sequence.
    pub fn per_mille(&mut self, rate: u32) -> bool {
        rate != 0 && self.below(1000) < u64::from(rate)
    }

    /// True half of the time.
    pub fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }

    /// One of the items.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Fills a buffer with random bytes.
    pub fn fill(&mut self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_sequence() {
        let (mut a, mut b, mut c) = (Rng::new(7), Rng::new(7), Rng::new(8));
        let mut same = 0;
        for _ in 0..1000 {
            let x = a.next_u64();
            assert_eq!(x, b.next_u64());
            same += u32::from(x == c.next_u64());
        }
        assert_eq!(same, 0);
    }

    #[test]
    fn draws_stay_in_their_range_and_reach_its_ends() {
        let mut rng = Rng::new(0);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            assert!(rng.below(3) < 3);
            seen[(rng.between(10, 14) - 10) as usize] = true;
            assert!(!rng.per_mille(0));
            assert!(rng.per_mille(1000));
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(rng.below(0), 0);
        rng.between(0, u64::MAX);
    }
}
