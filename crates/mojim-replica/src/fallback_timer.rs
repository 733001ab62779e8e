//! When a backup takes over from primary and mirror (`fallback`).
//!
//! Owns the one decision in which a time decides which node is primary. A primary whose
//! lease is over commits nothing (`Session::leased`). Each of a primary's signs of life
//! changes the register's version.
//!
//! So a backup that follows the present view takes over when, for longer than any lease:
//!
//! - It has heard no node of that view.
//! - It has seen no other version.

use std::time::Duration;

use mojim_format::State;
use mojim_protocol::view::Register;

use crate::mirror::Mirror;

/// For how many limits no node of a view is heard before a backup takes over. The first
/// one has passed when the backup first looks at the register; a primary that wrote there
/// just before commits for one more at most.
const PATIENCE: u32 = 3;

/// A backup's watch over the nodes that it follows.
#[derive(Debug, Default)]
pub struct FallbackTimer {
    /// When it was first found that no node is heard, and the register's version then.
    since: Option<(Duration, u64)>,
}

impl FallbackTimer {
    /// A node of the view was heard.
    pub fn heard(&mut self) {
        self.since = None;
    }

    /// A node of the view was heard at `when`, which is noticed only now; it may be gone
    /// again.
    pub fn heard_at(&mut self, when: Duration) {
        self.since.take_if(|(since, _)| *since <= when);
    }

    /// Whether the copy may take over after `reg`: a backup's whole copy of this view
    /// that is not distrusted. A mirror that was given up may lack all since, and does
    /// not know it.
    pub fn concerns(m: &Mirror, reg: &Register) -> bool {
        let sb = m.store.superblock();
        let mut members = [&reg.primary, &reg.mirror].into_iter().flatten();
        sb.state == State::Whole
            && !m.is_distrusted()
            && sb.view.epoch == reg.epoch
            && sb.view.mirror != sb.node
            && members.all(|other| other.node != sb.node)
    }

    /// No node of the view was heard, and the register was `reg` when read, at `now` or
    /// before: whether to take over. `better`: another backup has more, and goes first;
    /// if it does not go at all, this one does.
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
