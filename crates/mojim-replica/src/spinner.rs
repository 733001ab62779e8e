//! Polling that learns when to stop.
//!
//! Two things are learned. The first is whether polling finds anything: after a few waits in a row
//! in which it did not, waits block at once, and one in 64 tries again. Where both ends of a link
//! are on one processor, polling only keeps the other end from running (measured: 73 µs instead of
//! 12 for a round trip).
//!
//! The second, for a thread that serves others ([`Spinner::learning`]), is how long polling is
//! worth it. An example is a primary whose sync points take 130 µs, because each writes its log. It
//! sends something every 130 µs, and pays to wake a mirror that stopped polling after 30 (measured:
//! 1.3 times the slower of disk and link, instead of 1.15). So while something comes regularly,
//! such a thread polls for up to twice the usual wait, [`LONGEST`] at most. It yields the processor
//! to other threads meanwhile.

use std::time::Duration;

use mojim_env::Env;

/// The longest that a learning spinner polls (unless `spin` is longer). A
/// longer wait saves nothing that its sender would notice beside its own.
pub const LONGEST: Duration = Duration::from_micros(300);

/// Decides, poll by poll, whether to poll again or to block.
#[derive(Debug, Clone)]
pub struct Spinner {
    /// Polls at least this long.
    spin: Duration,
    /// Whether `usual` is kept.
    learns: bool,
    /// The usual wait: rises at once to one that polling could have lasted,
    /// falls slowly, and faster where waits are too long for polling.
    usual: Duration,
    /// When this wait began, once it lasted some polls.
    since: Option<Duration>,
    /// This wait has lasted so long that others should have the processor.
    long: bool,
    misses: u32,
    polls: u32,
    blocked: bool,
}

impl Spinner {
    /// Polls for at most `spin` at a time.
    pub fn new(spin: Duration) -> Spinner {
        Spinner {
            spin,
            learns: false,
            usual: Duration::ZERO,
            since: None,
            long: false,
            misses: 0,
            polls: 0,
            blocked: false,
        }
    }

    /// Polls for at most `spin` at a time, or twice the usual wait, if that is
    /// longer and no more than [`LONGEST`].
    pub fn learning(spin: Duration) -> Spinner {
        Spinner {
            learns: true,
            ..Spinner::new(spin)
        }
    }

    /// Something came. Only if it came while polling was polling worth it.
    #[inline]
    pub fn hit(&mut self, env: &dyn Env) {
        if !self.blocked {
            self.misses = 0;
        }
        if self.learns
            && let Some(since) = self.since
        {
            self.learn(env.now().saturating_sub(since));
        }
        self.blocked = false;
        self.since = None;
        self.long = false;
        self.polls = 0;
    }

    /// This wait goes on elsewhere: it tells nothing.
    #[inline]
    pub fn forget(&mut self) {
        self.since = None;
        self.long = false;
        self.polls = 0;
    }

    fn learn(&mut self, wait: Duration) {
        if wait <= LONGEST {
            self.usual = wait.max(self.usual - self.usual / 16);
        } else {
            self.usual /= 2;
        }
    }

    fn limit(&self) -> Duration {
        self.spin.max((self.usual * 2).min(LONGEST))
    }

    /// How long a wait is before others should have the processor between two polls: the
    /// answer may have to be made on this processor. A thread that would block after `spin`
    /// gives way a little before: blocking takes longer, and to find that polling was in vain
    /// makes the next waits block at once.
    fn courteous(&self) -> Duration {
        match self.learns {
            true => self.spin,
            false => self.spin / 3 * 2,
        }
    }

    /// This wait has lasted so long that, between two polls, others should have the
    /// processor.
    #[inline]
    pub fn gives_way(&self) -> bool {
        self.long
    }

    /// Nothing came: poll again (true), or block now.
    #[inline]
    pub fn spin(&mut self, env: &dyn Env) -> bool {
        if self.learns && self.blocked {
            // The same wait: an idle link is one miss, not one per look.
            return false;
        }
        if self.misses >= 3 && !self.misses.is_multiple_of(64) {
            self.misses += 1;
            self.block(env);
            return false;
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls % 32 != 1 && !self.long {
            return true;
        }
        let now = env.now();
        let waited = now - *self.since.get_or_insert(now);
        if waited < self.limit() {
            self.long = waited >= self.courteous();
            return true;
        }
        self.misses += 1;
        self.block(env);
        false
    }

    /// The wait goes on, blocked; a learning spinner wants to know how long.
    fn block(&mut self, env: &dyn Env) {
        self.blocked = true;
        self.long = false;
        if !self.learns {
            self.since = None;
        } else if self.since.is_none() {
            self.since = Some(env.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use mojim_linux::Os;

    const SPIN: Duration = Duration::from_micros(30);

    fn after(spinner: &mut Spinner, wait: Duration) {
        spinner.learn(wait);
    }

    #[test]
    fn regular_waits_lengthen_the_polling_and_rare_ones_shorten_it() {
        let mut s = Spinner::learning(SPIN);
        assert_eq!(s.limit(), SPIN);
        after(&mut s, Duration::from_micros(120));
        assert_eq!(s.limit(), Duration::from_micros(240));
        after(&mut s, Duration::from_micros(200));
        assert_eq!(s.limit(), LONGEST);
        // Waits that no polling could have lasted: back to `spin`.
        for _ in 0..4 {
            after(&mut s, Duration::from_secs(1));
        }
        assert_eq!(s.limit(), SPIN);
        // Short waits: slowly.
        after(&mut s, Duration::from_micros(100));
        for _ in 0..200 {
            after(&mut s, Duration::from_micros(5));
        }
        assert_eq!(s.limit(), SPIN);
        // A configured time that is longer stands.
        let mut long = Spinner::learning(Duration::from_millis(2));
        after(&mut long, Duration::from_micros(120));
        assert_eq!(long.limit(), Duration::from_millis(2));
    }

    #[test]
    fn waits_that_polling_never_met_block_at_once_but_for_one_in_64() {
        let env = Os::new().unwrap();
        let mut s = Spinner::learning(SPIN);
        let mut polled = 0;
        for _ in 0..64 * 4 {
            let mut polls = 0;
            while s.spin(&env) {
                polls += 1;
            }
            // However often it looks while it is blocked, that is one miss.
            assert!(!s.spin(&env) && !s.spin(&env));
            polled += u32::from(polls > 0);
            // It came while blocked, after a second.
            s.since = Some(env.now() - Duration::from_secs(1));
            s.hit(&env);
        }
        assert!(
            (4..=3 + 4).contains(&polled),
            "{polled} of 256 waits polled"
        );
    }
}
