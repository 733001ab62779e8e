//! When a sync point is committed, and how long its caller waits for that.

use std::time::Duration;

/// Which of the two conditions a view's mode requires (Mojim 3.3, Table 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckRule {
    /// Persistent in the primary's own log.
    pub local: bool,
    /// In the mirror's log.
    pub mirror: bool,
}

impl AckRule {
    /// `unreplicated`, `async`, and any mode while the primary is alone.
    pub const LOCAL: AckRule = AckRule {
        local: true,
        mirror: false,
    };
    /// `sync`, and the other modes that count on the mirror alone.
    pub const MIRROR: AckRule = AckRule {
        local: false,
        mirror: true,
    };
    /// `sync-flush`, and the modes of [`AckRule::MIRROR`] while the mirror joins or
    /// leaves the view.
    pub const BOTH: AckRule = AckRule {
        local: true,
        mirror: true,
    };

    /// The committed LSN: every record up to it is where the mode requires it.
    #[inline]
    pub fn committed(self, persisted: u64, acked: u64) -> u64 {
        match (self.local, self.mirror) {
            (true, false) => persisted,
            (false, true) => acked,
            (true, true) => persisted.min(acked),
            (false, false) => unreachable!("a rule asks for something"),
        }
    }
}

/// What a waiting sync point does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Keep waiting.
    Wait,
    /// Send again over new links.
    Resend,
    /// Give up with ETIMEDOUT; the record stays in the ring, in doubt.
    GiveUp,
}

/// Counts the resends of one sync point (Mojim 4.1: "resends ... after a set
/// number of unsuccessful re-send attempts ...").
#[derive(Debug, Clone)]
pub struct Patience {
    timeout: Duration,
    attempts: u32,
    tried: u32,
}

impl Patience {
    /// `attempts` periods of `timeout` each.
    pub fn new(timeout: Duration, attempts: u32) -> Patience {
        Patience {
            timeout,
            attempts,
            tried: 0,
        }
    }

    /// The longest wait in all.
    pub fn limit(&self) -> Duration {
        self.timeout.saturating_mul(self.attempts)
    }

    /// What to do after a total wait of `waited`.
    pub fn step(&mut self, waited: Duration) -> Verdict {
        if waited >= self.limit() {
            return Verdict::GiveUp;
        }
        if waited >= self.timeout.saturating_mul(self.tried + 1) {
            self.tried += 1;
            return Verdict::Resend;
        }
        Verdict::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_resends_then_ends() {
        let ms = Duration::from_millis;
        let mut p = Patience::new(ms(50), 3);
        assert_eq!(p.step(ms(10)), Verdict::Wait);
        assert_eq!(p.step(ms(50)), Verdict::Resend);
        assert_eq!(p.step(ms(60)), Verdict::Wait);
        assert_eq!(p.step(ms(120)), Verdict::Resend);
        assert_eq!(p.step(ms(150)), Verdict::GiveUp);
    }

    #[test]
    fn each_mode_waits_for_what_it_promises() {
        assert_eq!(AckRule::LOCAL.committed(5, 3), 5);
        assert_eq!(AckRule::MIRROR.committed(3, 5), 5);
        assert_eq!(AckRule::BOTH.committed(5, 3), 3);
    }
}
