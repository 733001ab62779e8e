//! The sync points that are committed, and what others are told of that.
//!
//! Owns no state: the rule, the prefixes and the sync points in parts have theirs. Invariant: what
//! another node or a record is told is the end of a whole sync point.

use super::*;

impl Primary {
    /// The present rule: the mode's, or that of a primary that is alone.
    #[inline]
    pub fn rule(&self) -> AckRule {
        self.rule.get()
    }

    pub(crate) fn set_rule(&self, r: AckRule) {
        self.rule.set(r, &self.persisted, &self.acked);
    }

    /// What callers were told is committed, or somewhat more. A change of the rule may lower
    /// [`Primary::committed`], until the copy that counts from then on has everything.
    pub fn acknowledged(&self) -> u64 {
        self.whole(self.rule.acknowledged(|| self.committed()))
    }

    /// The committed LSN.
    #[inline]
    pub fn committed(&self) -> u64 {
        if self.store.mutations.ack_early.is_on() {
            return self.last();
        }
        let now = || self.store.env().now();
        self.rule.committed(&self.persisted, &self.acked, now)
    }

    /// The end of the last committed sync point, for other nodes: a part of one means
    /// nothing to them.
    #[inline]
    pub fn committed_whole(&self) -> u64 {
        self.whole(self.committed())
    }

    /// The committed LSN that the record `lsn`, which is being made, carries.
    #[inline]
    pub(super) fn stamp(&self, lsn: u64) -> u64 {
        self.whole(self.committed().min(lsn - 1)).min(lsn - 1)
    }

    #[inline]
    fn whole(&self, committed: u64) -> u64 {
        match self.store.mutations.stamp_parts.is_on() {
            false => self.split.whole(committed),
            true => committed,
        }
    }

    /// This primary commits until `end`, and no longer. Session thread only, as all
    /// changes of the rule.
    pub(crate) fn lease_until(&self, end: Duration) {
        self.rule.lease_until(end, || self.committed());
    }

    /// From here on nothing becomes committed, whatever the rule says, until
    /// [`Primary::let_go`]. Session thread only, as all changes of the rule.
    pub(crate) fn hold(&self) {
        self.rule.hold();
    }

    /// Ends a hold.
    pub(crate) fn let_go(&self) {
        if self.rule.let_go() {
            self.wake_all();
        }
    }
}
