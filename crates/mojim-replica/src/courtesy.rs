//! Giving way to other threads while waiting, where that does not last long.
//!
//! Owns when it did: a thread that gives way beside one which computes gets the processor
//! back only at the end of that one's slice, milliseconds later, where a thread that sleeps
//! gets it as soon as it is woken. So after a turn that took that long, no thread gives way
//! for a while: it polls as if it were alone, and then sleeps.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mojim_env::Env;
use mojim_env::threads::give_way;

/// Giving way for longer than this means that a thread has the processor which computes.
const LONG: Duration = Duration::from_millis(2);
/// For how long no thread gives way then.
const CROWDED: Duration = Duration::from_millis(500);

/// Whether threads that wait give way to others.
#[derive(Debug, Default)]
pub struct Courtesy {
    /// Until when none does, in nanoseconds of the clock.
    crowded: AtomicU64,
}

impl Courtesy {
    /// Lets another thread have the processor. False, at once, where that took too long
    /// lately.
    pub fn give_way(&self, env: &dyn Env) -> bool {
        let begin = env.now();
        if (begin.as_nanos() as u64) < self.crowded.load(Relaxed) {
            return false;
        }
        give_way();
        let end = env.now();
        if end - begin > LONG {
            let until = end + CROWDED;
            self.crowded.store(until.as_nanos() as u64, Relaxed);
        }
        true
    }
}
