//! When a backup goes on in the place of primary and mirror (`fallback`).
//!
//! Owns the one decision in which a time decides who is primary. A primary
//! whose lease is over commits nothing (`Session::leased`), and each of its
//! signs of life changes the register's version: so a backup that follows the
//! present view goes on when it has heard nobody of it, and seen no other
//! version, for longer than any lease.

use std::time::Duration;

use mojim_format::State;
use mojim_protocol::view::Register;

use crate::mirror::Mirror;

/// For how many limits nobody of a view is heard of, before a backup goes on
/// in its place. The first has passed when it first looks at the register; a
/// primary that wrote there just before commits for one more at most.
const PATIENCE: u32 = 3;

/// A backup's watch over those whom it follows.
#[derive(Debug, Default)]
pub struct FallbackTimer {
    /// When nobody was heard of for the first time, and the version then.
    since: Option<(Duration, u64)>,
}

impl FallbackTimer {
    /// Somebody of the view was heard.
    pub fn heard(&mut self) {
        self.since = None;
    }

    /// The same, when it is noticed only now, and they may be gone again.
    pub fn heard_at(&mut self, when: Duration) {
        self.since.take_if(|(since, _)| *since <= when);
    }

    /// Whether the copy is one that may go on after `reg`: a backup's of this view that
    /// nobody distrusts. A mirror that was given up may lack all since, and does not
    /// know that it was.
    pub fn concerns(m: &Mirror, reg: &Register) -> bool {
        let sb = m.store.superblock();
        let mut members = [&reg.primary, &reg.mirror].into_iter().flatten();
        sb.state == State::Whole
            && !m.is_distrusted()
            && sb.view.epoch == reg.epoch
            && sb.view.mirror != sb.node
            && members.all(|other| other.node != sb.node)
    }

    /// Nobody was heard, and the register stands as in `reg`, which was read at
    /// `now` or before: whether it is time to go on. `better`: another backup has
    /// more, and goes first; if it does not go at all, this one does.
    pub fn is_over(
        &mut self,
        reg: &Register,
        now: Duration,
        limit: Duration,
        better: bool,
    ) -> bool {
        let (begin, version) = *self.since.get_or_insert((now, reg.version));
        if version != reg.version {
            self.since = Some((now, reg.version));
            return false;
        }
        let patience = if better { PATIENCE * 2 } else { PATIENCE };
        now.saturating_sub(begin) >= limit * (patience - 1)
    }
}
