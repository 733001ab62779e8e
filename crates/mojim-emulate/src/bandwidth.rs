//! The bandwidth of a medium: bytes are written one after the other, whoever writes them.
//!
//! Owns the moment at which the medium will have written all that it was given. It is a token bucket
//! without tokens: a writer's bytes take their time behind those that came before.
//!
//! Invariant: whatever threads write, the medium takes no more bytes in a second than it has
//! bandwidth. No thread holds a lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bandwidth of one medium.
#[derive(Debug)]
pub struct Bandwidth {
    /// When the medium has written all that it has taken, in nanoseconds.
    free: AtomicU64,
    /// Nanoseconds of 2^20 bytes, times 2^12.
    cost: u64,
}

impl Bandwidth {
    /// A medium that writes this many bytes in a second.
    pub fn new(bytes_per_second: u64) -> Bandwidth {
        let cost = (1_000_000_000_u128 << 32) / u128::from(bytes_per_second.max(1));
        Bandwidth {
            free: AtomicU64::new(0),
            cost: cost.min(u64::MAX.into()) as u64,
        }
    }

    /// Nanoseconds in which so many bytes are written.
    fn time(&self, bytes: u64) -> u64 {
        ((u128::from(bytes) * u128::from(self.cost)) >> 32).min(u64::MAX.into()) as u64
    }

    /// Takes bytes at a moment. Returns the moment at which they are written.
    #[inline]
    pub fn take(&self, now: u64, bytes: u64) -> u64 {
        let time = self.time(bytes);
        let end = |free: u64| free.max(now).saturating_add(time);
        // The value is a clock's: no other memory depends on it.
        let before = self.free.fetch_update(Relaxed, Relaxed, |f| Some(end(f)));
        end(before.expect("it always has a next value"))
    }

    /// Takes bytes that a cache of `room` bytes may hold for a while. Returns the moment at which no
    /// more than that wait in it.
    #[inline]
    pub fn take_behind(&self, now: u64, bytes: u64, room: u64) -> u64 {
        self.take(now, bytes).saturating_sub(self.time(room))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_one_after_the_other() {
        let b = Bandwidth::new(1_600_000_000);
        assert_eq!(b.take(1_000, 1_600), 2_000);
        // Another writer comes while these are written, and a third when the medium is idle again.
        assert_eq!(b.take(1_500, 160), 2_100);
        assert_eq!(b.take(5_000, 64), 5_040);
        assert_eq!(b.take(5_000, 0), 5_040);
    }

    #[test]
    fn what_a_cache_holds_is_not_waited_for_and_still_takes_bandwidth() {
        let b = Bandwidth::new(1_000_000_000);
        assert_eq!(b.take_behind(0, 3_000, 4_000), 0);
        assert_eq!(
            b.take_behind(0, 3_000, 4_000),
            2_000,
            "2,000 bytes too many"
        );
        assert_eq!(b.take(0, 64), 6_064, "behind what the cache holds");
    }

    #[test]
    fn threads_together_have_no_more_than_the_bandwidth() {
        let b = Bandwidth::new(1_000_000_000);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..1_000).for_each(|_| _ = b.take(7, 64)));
            }
        });
        assert_eq!(b.take(7, 0), 7 + 4_000 * 64);
    }

    #[test]
    fn the_slowest_and_the_fastest_medium_have_no_overflow() {
        assert_eq!(Bandwidth::new(0).take(0, 1), 1_000_000_000);
        assert_eq!(Bandwidth::new(0).take(5, u64::MAX), u64::MAX);
        assert_eq!(Bandwidth::new(u64::MAX).take(5, 1 << 30), 5);
    }
}
