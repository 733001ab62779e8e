//! Keeping the two ends of a link on one host on different processors.
//!
//! Owns when a mirror's thread leaves the processor of the program's. A thread that waits for an
//! answer sleeps after a while. The kernel wakes it where the answer was sent if every other
//! processor is in use at that moment. A thread of the background is enough for that. From then on
//! both ends are on one processor, and each waits for the other to leave it. The kernel's balancing
//! sees one thread that runs and one that sleeps. A round trip was measured at 20 to 60 µs instead
//! of 7, for tens of ms, although the other processor was idle.

use std::time::Duration;

use mojim_env::Env;
use mojim_env::processors::{leave, processor};

/// Who moved stays for so long: where the processors do not suffice, moving helps nobody.
const STAY: Duration = Duration::from_micros(500);

/// What a lane's thread knows of the place of its peer's.
#[derive(Debug, Default)]
pub(crate) struct CorePlacement {
    steps: u32,
    /// When it last moved.
    moved: Option<Duration>,
}

impl CorePlacement {
    /// A step was taken, of which one in `steps` is to look; `there` tells the peer's processor.
    #[inline]
    pub(crate) fn step(
        &mut self,
        env: &dyn Env,
        steps: u32,
        there: impl FnOnce() -> Option<usize>,
    ) {
        self.steps = self.steps.wrapping_add(1);
        if !self.steps.is_multiple_of(steps) {
            return;
        }
        let here = processor();
        if there().is_some_and(|there| Some(there) == here && self.moves(env.now())) {
            here.into_iter().for_each(leave);
        }
    }

    /// Whether it moves at `now`, on its peer's processor.
    #[cold]
    fn moves(&mut self, now: Duration) -> bool {
        let rests = self.moved.is_some_and(|at| now.saturating_sub(at) < STAY);
        if !rests {
            self.moved = Some(now);
        }
        !rests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_linux::Os;

    #[test]
    fn who_moved_stays_for_a_while() {
        let mut a = CorePlacement::default();
        let at = Duration::from_secs(5);
        assert!(a.moves(at));
        assert!(!a.moves(at) && !a.moves(at + STAY / 2));
        assert!(a.moves(at + STAY));
        assert!(!a.moves(at + STAY));
    }

    #[test]
    fn a_lane_moves_only_off_its_peers_processor() {
        let env = Os::new().unwrap();
        let mut a = CorePlacement::default();
        let mut looks = 0;
        for _ in 0..10 * 4 {
            a.step(&env, 4, || {
                looks += 1;
                None
            });
        }
        assert_eq!(looks, 10);
        a.step(&env, 1, || Some(usize::MAX));
        assert_eq!(a.moved, None);
        // The thread may be moved between two looks, but not in each of a thousand.
        let mut tries = 0;
        while a.moved.is_none() && tries < 1000 {
            a.step(&env, 1, processor);
            tries += 1;
        }
        assert!(a.moved.is_some());
    }
}
