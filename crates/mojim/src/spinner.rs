//! Polling that learns when to stop.

use std::time::Duration;

use crate::env::Env;

/// Bounded polling that learns: after a few polls in a row that found nothing,
/// it blocks at once, and tries again now and then. Where both ends of a link
/// are on one processor, polling only keeps the other end from running
/// (measured: 73 µs instead of 12 for a round trip).
#[derive(Debug, Clone)]
pub struct Spinner {
    spin: Duration,
    since: Option<Duration>,
    misses: u32,
    polls: u32,
    blocked: bool,
}

impl Spinner {
    /// Polls for at most `spin` at a time.
    pub fn new(spin: Duration) -> Spinner {
        Spinner {
            spin,
            since: None,
            misses: 0,
            polls: 0,
            blocked: false,
        }
    }

    /// Something came. Only if it came while polling was polling worth it.
    #[inline]
    pub fn hit(&mut self) {
        if !self.blocked {
            self.misses = 0;
        }
        self.blocked = false;
        self.since = None;
        self.polls = 0;
    }

    /// Nothing came: poll again (true), or block now.
    #[inline]
    pub fn spin(&mut self, env: &dyn Env) -> bool {
        if self.misses >= 3 && !self.misses.is_multiple_of(64) {
            self.misses += 1;
            self.blocked = true;
            return false;
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls % 32 != 1 {
            return true;
        }
        let now = env.now();
        let since = *self.since.get_or_insert(now);
        if now - since < self.spin {
            return true;
        }
        self.since = None;
        self.misses += 1;
        self.blocked = true;
        false
    }
}
