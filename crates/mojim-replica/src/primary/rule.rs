//! By which rule a sync point is committed: which copies must have it.
//!
//! Owns the rule, the lease, and the answer to "is it committed". Invariant: the rule
//! and the figures that it is applied to are of one instant: the word that holds the rule
//! counts its changes, and is read before and after the figures.

use std::sync::MutexGuard;

use super::*;

impl Primary {
    /// The present rule: the mode's, or that of a primary that is alone.
    #[inline]
    pub fn rule(&self) -> AckRule {
        unpack(self.rule.load(SeqCst))
    }

    pub(crate) fn set_rule(&self, r: AckRule) {
        let mut told = self.told();
        // Sequentially consistent: a thread that takes an LSN after this sees the rule;
        // one that reads the last LSN after this sees every LSN taken before.
        let now = self.rule.load(SeqCst);
        let changes = (now >> CHANGES) + 1;
        let beside = now & (HELD | LEASED);
        self.rule
            .store(pack(r) | beside | changes << CHANGES, SeqCst);
        // Read after the store: no thread is told by the rule before that more is committed.
        let was = unpack(now).committed(self.persisted.get(), self.acked.get());
        *told = told.max(was);
    }

    /// What callers were told is committed, or somewhat more. A change of the rule may lower
    /// [`Primary::committed`], until the copy that counts from then on has everything.
    pub fn acknowledged(&self) -> u64 {
        // Held while the rule is asked: no change comes between.
        let told = self.told();
        self.whole(told.max(self.committed()))
    }

    pub(super) fn told(&self) -> MutexGuard<'_, u64> {
        self.told.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The committed LSN.
    #[inline]
    pub fn committed(&self) -> u64 {
        if self.store.mutations.ack_early.is_on() {
            return self.last();
        }
        loop {
            let rule = self.rule.load(SeqCst);
            if rule & (HELD | LEASED) != 0 {
                match self.committed_by_lease(rule) {
                    Some(committed) => return committed,
                    None => continue,
                }
            }
            if let Some(committed) = self.committed_by(rule) {
                return committed;
            }
        }
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

    /// What was committed at one instant at which this was the rule. `None`: the rule was
    /// set meanwhile, and the mirror's acknowledgements may not have counted when they
    /// were read.
    #[inline]
    pub(super) fn committed_by(&self, rule: u64) -> Option<u64> {
        interleave();
        let persisted = self.persisted.get();
        interleave();
        let acked = self.acked.get();
        interleave();
        let committed = unpack(rule).committed(persisted, acked);
        (self.rule.load(SeqCst) == rule).then_some(committed)
    }

    /// What became committed within a lease stays so, and nothing else does. Every thread
    /// that is about to acknowledge looks at the clock itself: the thread that would hold
    /// commits may sleep, or wait for a disk.
    pub(super) fn committed_by_lease(&self, rule: u64) -> Option<u64> {
        if rule & HELD == 0 {
            let committed = self.committed_by(rule)?;
            // The clock is read last: what counts now was committed before.
            if (self.store.env().now().as_nanos() as u64) < self.lease.load(SeqCst) {
                self.held_at.fetch_max(committed, AcqRel);
                return Some(committed);
            }
        }
        Some(self.held_at.load(Acquire))
    }

    /// This primary commits until `end`, and no longer. Session thread only, as all
    /// changes of the rule.
    pub(crate) fn lease_until(&self, end: Duration) {
        self.lease.store(end.as_nanos() as u64, SeqCst);
        if self.rule.load(SeqCst) & LEASED == 0 {
            self.held_at.store(self.committed(), Release);
            self.rule.fetch_or(LEASED, SeqCst);
        }
    }

    /// From here on nothing becomes committed, whatever the rule says, until
    /// [`Primary::let_go`]. Session thread only, as all changes of the rule.
    pub(crate) fn hold(&self) {
        if !self.is_held() {
            self.rule.fetch_or(HELD, SeqCst);
        }
    }

    /// Ends a hold.
    pub(crate) fn let_go(&self) {
        // Checked first: every sync point reads this cache line.
        if self.is_held() {
            self.rule.fetch_and(!HELD, SeqCst);
            self.wake_all();
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.rule.load(SeqCst) & HELD != 0
    }
}
