//! Yielding the processor while waiting, as long as that is cheap.
//!
//! Yielding is cheap only if the other threads also wait. Beside a CPU-bound thread, a thread
//! that yields gets its processor back at the end of a time slice, milliseconds later. A thread
//! that sleeps gets it as soon as it is woken. So if a yield took over 2 ms four times in a row,
//! a CPU-bound thread competes: no thread yields for 500 ms. Threads poll as if they were alone,
//! then sleep.
//!
//! One such slice counts once, however many threads waited for it. A checkpoint thread has one
//! now and then. Eight threads that each counted it stopped yielding to each other (measured:
//! 60,000 sync points a second over TCP, instead of 180,000).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mojim_env::Env;
use mojim_env::threads::give_way;

/// Giving way for longer than this means that a thread had the processor which computes.
const LONG: Duration = Duration::from_millis(2);
/// So many times in a row: it is not one of those that wait here.
const IN_A_ROW: u32 = 4;
/// For how long no thread gives way then.
const CROWDED: Duration = Duration::from_millis(500);

/// Whether threads that wait give way to others.
#[derive(Debug, Default)]
pub struct YieldPolicy {
    /// How often in a row giving way took long.
    long: AtomicU32,
    /// When the last of these times ended, in nanoseconds of the clock.
    ended: AtomicU64,
    /// Until when no thread gives way, in nanoseconds of the clock.
    crowded: AtomicU64,
}

impl YieldPolicy {
    /// Lets another thread have the processor. False, at once, where that took too long
    /// lately.
    pub fn give_way(&self, env: &dyn Env) -> bool {
        let begin = env.now();
        if (begin.as_nanos() as u64) < self.crowded.load(Relaxed) {
            return false;
        }
        give_way();
        self.gave_way(begin, env.now());
        true
    }

    /// A thread gave way, and had the processor again at `end`.
    fn gave_way(&self, begin: Duration, end: Duration) {
        if end - begin <= LONG {
            // Checked first: all threads read this cache line.
            if self.long.load(Relaxed) != 0 {
                self.long.store(0, Relaxed);
            }
        } else if self.is_new(begin, end) && self.long.fetch_add(1, Relaxed) + 1 >= IN_A_ROW {
            let until = end + CROWDED;
            self.crowded.store(until.as_nanos() as u64, Relaxed);
            self.long.store(0, Relaxed);
        }
    }

    /// Whether this time began after the last long one had ended, so that it is another one.
    fn is_new(&self, begin: Duration, end: Duration) -> bool {
        let last = self.ended.load(Relaxed);
        let end = end.as_nanos() as u64;
        let swap = || self.ended.compare_exchange(last, end, Relaxed, Relaxed);
        begin.as_nanos() as u64 >= last && swap().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use mojim_linux::Os;

    /// Who gave way for long some times in a row gives way no more, for a while.
    #[test]
    fn nobody_gives_way_beside_a_thread_that_computes() {
        let env = Os::new().unwrap();
        let c = YieldPolicy::default();
        // Far ahead of the clock, so that what follows does not depend on it.
        let at = Cell::new(env.now() + Duration::from_secs(3600));
        let took = |time: Duration, threads: u32| {
            let begin = at.get();
            at.set(begin + time);
            (0..threads).for_each(|_| c.gave_way(begin, begin + time));
        };
        for _ in 0..3 {
            (1..IN_A_ROW).for_each(|_| took(LONG * 2, 1));
            assert_eq!(c.crowded.load(Relaxed), 0, "not often enough");
            took(LONG, 1);
        }
        // Once, each thread that waited for the same slice counted it.
        took(LONG * 2, 2 * IN_A_ROW);
        assert_eq!(c.crowded.load(Relaxed), 0, "one slice");
        took(LONG, 1);
        (0..IN_A_ROW).for_each(|_| took(LONG * 2, 1));
        assert!(!c.give_way(&env));
    }
}
