//! By which rule a sync point is committed: which copies must have it.
//!
//! Owns the rule, the lease, and the answer to "is it committed". Invariant: the rule
//! and the figures that it is applied to are of one instant: the word that holds the rule
//! counts its changes, and is read before and after the figures.
//!
//! The rule of the moment, set by `session/views.rs`:
//!
//! | state | a sync point is committed when it is in |
//! |---|---|
//! | alone | the own log |
//! | a mirror catches up, or is being given up | both logs |
//! | with its mirror | what the mode asks for (`layout.rs`) |
//!
//! So what holds an acknowledged sync point depends on the rule of that moment. `abandon_link` in
//! `session.rs` also changes it. *Held* and *leased* stand beside the rule, only with `fallback =
//! "automatic"`. The primary then commits nothing once `failure_limit` has passed since it asked
//! for the last change that the register made. `ViewChange::Look` is such a change. It is asked for at
//! every quarter of that time.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use mojim_env::turns::Mutex;
use mojim_env::turns::lock;
use mojim_protocol::{AckRule, Prefix};

/// Flag beside the rule: nothing becomes committed at present.
const HELD: u64 = 4;
/// Flag beside the rule: it applies until the lease is over.
const LEASED: u64 = 8;
/// The bit from which on the same word counts the changes of the rule.
const CHANGES: u32 = 8;

fn pack(r: AckRule) -> u64 {
    r.local as u64 | (r.mirror as u64) << 1
}

fn unpack(r: u64) -> AckRule {
    AckRule {
        local: r & 1 != 0,
        mirror: r & 2 != 0,
    }
}

/// A point at which another thread may change the rule and the prefixes; tests do so there.
#[inline(always)]
fn interleave() {
    #[cfg(test)]
    others_go_on();
}

/// The rule, and what it was applied to when it changed.
pub(super) struct Rule {
    /// The rule, its flags [`HELD`] and [`LEASED`], and, above [`CHANGES`], how often it was
    /// set.
    word: AtomicU64,
    /// Of a leased primary: what was committed within its lease.
    held_at: AtomicU64,
    /// The end of the lease, in nanoseconds of the clock.
    lease: AtomicU64,
    /// What was committed when the rule was last set, by the rule before.
    told: Mutex<u64>,
}

impl Rule {
    pub(super) fn new(r: AckRule) -> Rule {
        Rule {
            word: AtomicU64::new(pack(r)),
            held_at: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            told: Mutex::default(),
        }
    }

    /// The LSNs begin anew: nobody was told of one.
    pub(super) fn begin(&self) {
        *self.told() = 0;
    }

    fn told(&self) -> MutexGuard<'_, u64> {
        lock(&self.told)
    }

    /// The present rule.
    #[inline]
    pub(super) fn get(&self) -> AckRule {
        unpack(self.word.load(SeqCst))
    }

    /// Sets another one.
    pub(super) fn set(&self, r: AckRule, persisted: &Prefix, acked: &Prefix) {
        let mut told = self.told();
        // Sequentially consistent: a thread that takes an LSN after this sees the rule;
        // one that reads the last LSN after this sees every LSN taken before.
        let now = self.word.load(SeqCst);
        let changes = (now >> CHANGES) + 1;
        let beside = now & (HELD | LEASED);
        let next = pack(r) | beside | changes << CHANGES;
        self.word.store(next, SeqCst);
        // Read after the store: no thread is told by the rule before that more is committed.
        let was = unpack(now).committed(persisted.get(), acked.get());
        *told = told.max(was);
    }

    /// What callers were told is committed, or somewhat more, where `committed` is asked.
    pub(super) fn acknowledged(&self, committed: impl FnOnce() -> u64) -> u64 {
        // Held while the rule is asked: no change comes between.
        let told = self.told();
        told.max(committed())
    }

    /// The committed LSN. `now` asks the clock.
    #[inline]
    pub(super) fn committed(
        &self,
        persisted: &Prefix,
        acked: &Prefix,
        now: impl Fn() -> Duration,
    ) -> u64 {
        loop {
            let rule = self.word.load(SeqCst);
            let committed = match rule & (HELD | LEASED) {
                0 => self.committed_by(rule, persisted, acked),
                _ => self.committed_by_lease(rule, persisted, acked, &now),
            };
            if let Some(committed) = committed {
                return committed;
            }
        }
    }

    /// What was committed at one instant at which this was the rule. `None`: the rule was
    /// set meanwhile, and the mirror's acknowledgements may not have counted when they
    /// were read.
    #[inline]
    fn committed_by(&self, rule: u64, persisted: &Prefix, acked: &Prefix) -> Option<u64> {
        interleave();
        let persisted = persisted.get();
        interleave();
        let acked = acked.get();
        interleave();
        let committed = unpack(rule).committed(persisted, acked);
        (self.word.load(SeqCst) == rule).then_some(committed)
    }

    /// What became committed within a lease stays so, and nothing else does. Every thread
    /// that is about to acknowledge looks at the clock itself: the thread that would hold
    /// commits may sleep, or wait for a disk.
    fn committed_by_lease(
        &self,
        rule: u64,
        persisted: &Prefix,
        acked: &Prefix,
        now: &impl Fn() -> Duration,
    ) -> Option<u64> {
        if rule & HELD == 0 {
            let committed = self.committed_by(rule, persisted, acked)?;
            // The clock is read last: what counts now was committed before.
            if (now().as_nanos() as u64) < self.lease.load(SeqCst) {
                self.held_at.fetch_max(committed, AcqRel);
                return Some(committed);
            }
        }
        Some(self.held_at.load(Acquire))
    }

    /// It applies until `end`, and no longer; `committed` is asked if it had no end before.
    pub(super) fn lease_until(&self, end: Duration, committed: impl FnOnce() -> u64) {
        self.lease.store(end.as_nanos() as u64, SeqCst);
        if self.word.load(SeqCst) & LEASED == 0 {
            self.held_at.store(committed(), Release);
            self.word.fetch_or(LEASED, SeqCst);
        }
    }

    /// Nothing becomes committed from here on.
    pub(super) fn hold(&self) {
        if !self.is_held() {
            self.word.fetch_or(HELD, SeqCst);
        }
    }

    /// Ends a hold. False if there was none.
    pub(super) fn let_go(&self) -> bool {
        // Checked first: every sync point reads this cache line.
        let held = self.is_held();
        if held {
            self.word.fetch_and(!HELD, SeqCst);
        }
        held
    }

    pub(super) fn is_held(&self) -> bool {
        self.word.load(SeqCst) & HELD != 0
    }
}

#[cfg(test)]
thread_local! {
    /// What other threads do at the next point.
    pub(super) static OTHERS: std::cell::RefCell<Option<Box<dyn FnMut()>>> = std::cell::RefCell::default();
}

#[cfg(test)]
fn others_go_on() {
    let others = OTHERS.take();
    if let Some(mut others) = others {
        others();
        OTHERS.set(Some(others));
    }
}

#[cfg(test)]
impl Rule {
    /// As it was at first, without a lease.
    pub(super) fn reset(&self, r: AckRule) {
        self.word.store(pack(r), SeqCst);
        self.forget_held();
    }

    pub(super) fn forget_held(&self) {
        self.held_at.store(0, SeqCst);
    }
}
