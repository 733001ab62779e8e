//! Bringing two copies of a volume together.
//!
//! Decisions only. The rule behind them: nothing that may have been acknowledged is ever discarded.
//! Discarded records lie beyond a fork, in an epoch that a newer view superseded.

use crate::History;
use mojim_format::State;

/// What one node says about its copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Identity of the volume; 0 for none.
    pub volume_id: u64,
    /// Whether the copy can be used.
    pub state: State,
    /// Last LSN of its contiguous prefix.
    pub tail: u64,
    /// The epochs of its records.
    pub history: History,
}

/// How the mirror's copy is made equal to the primary's, or the other way round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// The mirror holds a prefix: send it the records above `from`.
    Resend {
        /// Last LSN that the mirror has.
        from: u64,
    },
    /// Send the mirror a whole copy.
    CopyTo,
    /// The mirror holds all that the attaching primary has, and more: the primary takes its
    /// copy.
    CopyFrom,
    /// These are copies of different volumes; an operator must decide.
    Foreign,
    /// Neither copy can be used.
    Nothing,
}

/// Decides how to pair. `oldest` is the first LSN still in the primary's logs.
/// `attach`: the primary begins an epoch and has shown nothing to a program yet.
pub fn reconcile(primary: &Holding, mirror: &Holding, oldest: u64, attach: bool) -> Plan {
    match (primary.state, mirror.state) {
        (State::Whole, State::Whole) => {}
        (State::Whole, State::Empty) => return Plan::CopyTo,
        (State::Empty, State::Whole) if attach => return Plan::CopyFrom,
        (State::Empty, State::Empty) if primary.volume_id == 0 && mirror.volume_id == 0 => {
            return Plan::CopyTo;
        }
        // The nodes held a volume and lost it: nothing is made anew in its place.
        _ => return Plan::Nothing,
    }
    if primary.volume_id != mirror.volume_id {
        // An attaching primary without a record meets another volume: the
        // primary's directory was made anew.
        return if attach && primary.tail == 0 {
            Plan::CopyFrom
        } else {
            Plan::Foreign
        };
    }
    match primary
        .history
        .common(primary.tail, &mirror.history, mirror.tail)
    {
        Some(c) if c == mirror.tail && oldest <= c + 1 => Plan::Resend { from: c },
        Some(c) if c == mirror.tail => Plan::CopyTo,
        // The mirror's copy continues where the primary's ends, in the same epoch, or in a
        // later one (the primary's copy is of an earlier time): adopt it. A primary that
        // has begun a later epoch at that LSN (it was promoted) has ended the mirror's
        // epoch.
        Some(c)
            if c == primary.tail
                && attach
                && primary.history.epoch_at(c + 1) <= mirror.history.epoch_at(c + 1) =>
        {
            Plan::CopyFrom
        }
        // A fork: the mirror's tail is of an epoch that this view superseded.
        _ => Plan::CopyTo,
    }
}

/// How far the epoch of a promotion by hand lies above every epoch that the promoted node
/// knows, so that it also outranks epochs that the other node began unseen.
pub const LEAP: u64 = 1 << 20;

/// How far above the epochs that a node knows another one's may lie. A million promotions do
/// not get as far; a node that was told an epoch near the end of the numbers could begin none
/// any more.
pub const FAR: u64 = 1 << 40;

/// How far above the epochs that a node knows it believes in one by another node's word alone: a
/// thousand promotions that it has not seen. What follows on such an epoch must still be near
/// ([`is_near`]) to nodes that were away.
pub const WORD: u64 = LEAP << 10;

/// The last epoch that is begun or promised. There are [`FAR`] numbers behind it, so that no
/// sum overflows.
pub const LAST_EPOCH: u64 = u64::MAX / 4;

/// Whether `epoch`, which another node names, can be one that was begun or is about to be:
/// for a node to which `begun` is the greatest one that was begun; 0: it knows none, and meets a
/// volume of any age.
pub fn is_near(epoch: u64, begun: u64) -> bool {
    let begun = match begun {
        0 => FAR << 10,
        begun => begun,
    };
    epoch <= begun.saturating_add(FAR).min(LAST_EPOCH)
}

/// Whether a node promises `epoch`, or follows on another node's promise of it. What was promised
/// and never begun carries nobody further: else promises of promises would use the numbers up. But
/// whoever is to follow on a promise, by an attach or a promotion by hand, needs the next ones.
pub fn may_promise(epoch: u64, begun: u64, promised: u64) -> bool {
    is_near(epoch, begun) || epoch <= promised.saturating_add(2 * LEAP).min(LAST_EPOCH)
}

/// Whether a primary, which then begins a later epoch, believes that a node that follows it has
/// promised `epoch`. An unknown peer may have had that node promise [`FAR`] more than was begun, and a
/// little more with each question after that: so this bound is [`FAR`] above the other one, and
/// leaves room below that of the register ([`crate::view::Register::is_near`]). At the same bound,
/// the second question of an unknown peer kept every primary from attaching.
pub fn may_outbid(epoch: u64, begun: u64, promised: u64) -> bool {
    let further = match begun {
        0 => 0,
        begun => begun.saturating_add(FAR - 8 * LEAP),
    };
    may_promise(epoch, begun, promised) || is_near(epoch, further)
}

/// Whether `other`, which `kept` would replace, is its rival: both were promoted by hand,
/// neither knowing of the other's promotion, and what `other` acknowledged since is not
/// in `kept`. The epochs do not tell which promotion was later, so an operator decides.
/// (The epoch of a promotion that knew `other`'s epochs lies a leap above them.)
/// `led_here`: the epochs that only the node of `kept` may begin; it knew all of them.
pub fn is_rival(kept: &Holding, other: &Holding, led_here: impl Fn(u64) -> bool) -> bool {
    if kept.volume_id != other.volume_id || other.state != State::Whole || other.tail == 0 {
        return false;
    }
    let Some(epoch) = other.history.epoch_at(other.tail) else {
        return false;
    };
    let fork = kept.history.common(kept.tail, &other.history, other.tail);
    if fork == Some(other.tail) || led_here(epoch) {
        return false;
    }
    // If the fork is older than what both histories remember, its epoch is at most the first
    // epoch that `kept` remembers.
    let oldest = kept.history.entries().first().map_or(0, |e| e.epoch);
    let begun = match fork {
        Some(lsn) => other.history.epoch_at(lsn).unwrap_or(0),
        None => oldest.min(epoch),
    };
    let was_promoted = epoch - begun >= LEAP / 2;
    let knew = kept.history.last_epoch() >= epoch + LEAP / 2;
    let has_it = kept.history.entries().iter().any(|e| e.epoch == epoch);
    was_promoted && !knew && !has_it
}

/// What a node knows now to have been acknowledged, whether it has the records or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledged {
    /// Identity of the volume.
    pub volume_id: u64,
    /// The last LSN.
    pub lsn: u64,
    /// The epoch in which that LSN was born, if the node still knows it.
    pub epoch: Option<u64>,
}

impl Acknowledged {
    /// Whether another node's word for this can be true. `begun`: the greatest epoch that is
    /// known here; `agreed`: that of the register, if it was ever written. None above that was
    /// begun.
    pub fn is_credible(&self, begun: u64, agreed: Option<u64>) -> bool {
        let most = agreed.map_or(begun.saturating_add(WORD), |agreed| agreed.max(begun));
        self.epoch.is_none_or(|epoch| epoch <= most)
    }

    /// Whether both nodes would have less than this if `kept` is the copy that both will have.
    /// If that copy has ended an epoch, what was acknowledged beyond that end was given up
    /// when its next epoch began. A copy that has not come to the epoch has given up nothing.
    pub fn is_missing_from(&self, kept: &Holding) -> bool {
        self.lsn > kept.tail
            && self.volume_id == kept.volume_id
            && kept.history.epoch_at(self.lsn) <= self.epoch
    }
}

/// What the two nodes of an attach know about acknowledged records that may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownAcknowledged {
    /// The last LSN acknowledged according to the primary's copy; it may lie beyond
    /// the copy's tail.
    pub primary: u64,
    /// The last LSN that the mirror knows to have been acknowledged, as of its greeting.
    pub mirror: u64,
    /// The primary lost its ring while records that only its mirror had counted as
    /// acknowledged, and no register says whether the mirror still has them.
    pub ring_lost: bool,
    /// The mirror says that it held everything when it was last linked.
    pub member: bool,
}

/// Why an attach may not begin as planned: an operator decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Sync points up to this LSN were acknowledged, and are not in the copy that
    /// both nodes would then have.
    Known(u64),
    /// What only the lost ring held may have been acknowledged, and the node that
    /// answers for the mirror is not the copy that acknowledged it.
    Ring,
    /// The primary's copy is gone, and the mirror's may have less than was acknowledged.
    Copy(Lacks),
}

/// Why a mirror's copy may lack what its primary acknowledged. The primary's copy is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lacks {
    /// The mirror was catching up.
    CatchingUp,
    /// The primary went on without the mirror.
    Alone,
    /// No sync point waits for the mirror.
    Behind,
}

/// Whether an attach by `plan` would begin with less than what is known to have been
/// acknowledged, or with a copy for which neither node can vouch.
pub fn loss(
    plan: &Plan,
    primary: &Holding,
    mirror: &Holding,
    known: KnownAcknowledged,
) -> Option<Loss> {
    let (kept, other) = match plan {
        Plan::Resend { .. } | Plan::CopyTo => (primary, mirror),
        Plan::CopyFrom => (mirror, primary),
        Plan::Foreign | Plan::Nothing => return None,
    };
    // An empty copy tells nothing, unless it is the mirror's, of which only the files are wrong.
    let tells = |of: &Holding| of.state == State::Whole || std::ptr::eq(of, mirror);
    let all = [(primary, known.primary), (mirror, known.mirror)];
    let beyond = all.into_iter().filter(|(of, lsn)| {
        let (volume_id, epoch) = (of.volume_id, of.history.epoch_at(*lsn));
        let acknowledged = Acknowledged {
            volume_id,
            lsn: *lsn,
            epoch,
        };
        tells(of) && acknowledged.is_missing_from(kept)
    });
    if let Some(lsn) = beyond.map(|(_, lsn)| lsn).max() {
        return Some(Loss::Known(lsn));
    }
    if !known.ring_lost || primary.state != State::Whole {
        return None;
    }
    let vouches = match plan {
        // The mirror's copy has all that the primary's has, and what the mirror had when
        // the view ended.
        Plan::CopyFrom => other.volume_id == kept.volume_id,
        Plan::Resend { from } => known.member && *from >= known.primary,
        _ => false,
    };
    (!vouches).then_some(Loss::Ring)
}

/// Whether the mirror lacks a record up to `known`, the last LSN that is known to have been
/// acknowledged. If sync points wait for the mirror, it is then not a member until it has
/// caught up; otherwise records would be missing unnoticed once the primary is lost too.
pub fn has_lost(plan: &Plan, known: u64) -> bool {
    matches!(plan, Plan::Resend { from } if *from < known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_format::EpochStart;

    /// The bound was relative to what was promised: each question for FAR more was granted, and
    /// the numbers were used up after some millions of them.
    #[test]
    fn promises_of_promises_carry_nobody_far() {
        let begun = 7;
        assert!(may_promise(begun + FAR, begun, 9) && !may_promise(begun + FAR + 1, begun, 9));
        let far = begun + FAR;
        assert!(!may_promise(far + FAR, begun, far));
        // Who attaches, or is promoted by hand, after that.
        for next in [far, far + 1, far + LEAP + 9] {
            assert!(may_promise(next, begun, far), "{next}");
        }
        // Whoever was away for many promotions, or comes new.
        assert!(may_promise(begun + 100_000 * LEAP, begun, begun));
        assert!(may_promise(far + LEAP, 0, 0) && !may_promise(LAST_EPOCH, 0, 0));
        for epoch in [LAST_EPOCH + 1, u64::MAX] {
            assert!(!may_promise(epoch, LAST_EPOCH, LAST_EPOCH));
            assert!(!may_promise(epoch, u64::MAX, u64::MAX));
            assert!(!may_outbid(epoch, u64::MAX, u64::MAX));
        }
    }

    /// An unknown peer asked a mirror for as much as it promises, and then for a little more: no
    /// primary followed on that, since it believed no more than a mirror promises at once.
    #[test]
    fn a_primary_follows_on_what_an_unknown_peer_can_have_had_promised() {
        let (begun, mut promised) = (7, 7);
        for step in 0..100_000 {
            let next = match step {
                0 => begun + FAR,
                _ => promised + 2 * LEAP,
            };
            assert!(may_promise(next, begun, promised));
            promised = next;
            assert!(may_outbid(promised, begun, begun), "after {step} questions");
            // The mirror follows, and the register agrees.
            let of = crate::view::Register {
                epoch: begun,
                ..Default::default()
            };
            assert!(may_promise(promised + LEAP + 2, begun, promised));
            assert!(of.is_near(promised + LEAP + 2));
        }
        assert!(!may_outbid(begun + 2 * FAR, begun, begun));
    }

    fn copy(id: u64, state: State, tail: u64, e: &[(u64, u64)]) -> Holding {
        let v: Vec<_> = e
            .iter()
            .map(|&(epoch, first_lsn)| EpochStart { epoch, first_lsn })
            .collect();
        Holding {
            volume_id: id,
            state,
            tail,
            history: History::from_entries(&v).unwrap(),
        }
    }

    #[test]
    fn each_meeting_has_its_plan() {
        use State::*;
        let p = |t| copy(1, Whole, t, &[(1, 1)]);
        // the ordinary restart of a program
        assert_eq!(reconcile(&p(10), &p(8), 5, true), Plan::Resend { from: 8 });
        // the mirror is further behind than the logs reach
        assert_eq!(reconcile(&p(10), &p(3), 5, true), Plan::CopyTo);
        // the primary lost its power and with it its ring
        assert_eq!(reconcile(&p(8), &p(10), 5, true), Plan::CopyFrom);
        // the mirror lost its log
        assert_eq!(
            reconcile(&p(8), &copy(1, Empty, 0, &[]), 1, false),
            Plan::CopyTo
        );
        // the primary's directory is new
        assert_eq!(
            reconcile(&copy(0, Empty, 0, &[]), &p(10), 1, true),
            Plan::CopyFrom
        );
        assert_eq!(
            reconcile(&copy(2, Whole, 0, &[(1, 1)]), &p(10), 1, true),
            Plan::CopyFrom
        );
        // different volumes, both used
        assert_eq!(
            reconcile(&copy(2, Whole, 4, &[(1, 1)]), &p(10), 1, true),
            Plan::Foreign
        );
        // the old primary returns as the mirror of the promoted one
        let b = copy(1, Whole, 150, &[(1, 1), (2, 101)]);
        assert_eq!(reconcile(&b, &p(120), 1, true), Plan::CopyTo);
        assert_eq!(reconcile(&b, &p(100), 1, true), Plan::Resend { from: 100 });
        // Found by the simulator: a node that was promoted at 100 and attached again
        // before it wrote anything adopted what the old primary had beyond 100.
        let b = copy(1, Whole, 100, &[(1, 1), (2, 101)]);
        assert_eq!(reconcile(&b, &p(120), 1, true), Plan::CopyTo);
        // The primary's copy was put back as of an earlier epoch: the mirror had all of it, and
        // what came since was overwritten.
        let since = copy(1, Whole, 150, &[(1, 1), (2, 101)]);
        assert_eq!(reconcile(&p(100), &since, 1, true), Plan::CopyFrom);
        assert_eq!(reconcile(&p(90), &since, 1, true), Plan::CopyFrom);
        assert_eq!(reconcile(&p(100), &since, 1, false), Plan::CopyTo);
        assert_eq!(
            reconcile(
                &copy(1, Switching, 0, &[]),
                &copy(1, Switching, 0, &[]),
                1,
                true
            ),
            Plan::Nothing
        );
        // A node was lost while its copy was under way to a new directory.
        let (new, lost) = (copy(0, Empty, 0, &[]), copy(1, Empty, 0, &[]));
        assert_eq!(reconcile(&new, &lost, 1, true), Plan::Nothing);
        assert_eq!(reconcile(&lost, &new, 1, true), Plan::Nothing);
        assert_eq!(reconcile(&new, &new, 1, true), Plan::CopyTo);
    }

    /// An attach that would begin with less than what was acknowledged: because a log
    /// is damaged, on either side, or because a lost ring leaves it open.
    #[test]
    fn no_attach_begins_with_less_than_is_known() {
        use State::*;
        let p = |t| copy(1, Whole, t, &[(1, 1)]);
        let plan_and_loss = |a: &Holding, b: &Holding, known| {
            let plan = reconcile(a, b, 1, true);
            let loss = loss(&plan, a, b, known);
            (plan, loss)
        };
        let nothing = KnownAcknowledged::default();
        let own = |primary| KnownAcknowledged { primary, ..nothing };
        let of_mirror = |mirror| KnownAcknowledged { mirror, ..nothing };
        let refused = |a: &Holding, b: &Holding, known| plan_and_loss(a, b, known).1;
        // the primary's log is damaged: the mirror is behind, has some of the rest, all of it
        assert_eq!(refused(&p(10), &p(8), own(20)), Some(Loss::Known(20)));
        assert_eq!(refused(&p(10), &p(15), own(20)), Some(Loss::Known(20)));
        assert_eq!(
            plan_and_loss(&p(10), &p(20), own(20)),
            (Plan::CopyFrom, None)
        );
        let empty = copy(0, Empty, 0, &[]);
        assert_eq!(refused(&p(10), &empty, own(20)), Some(Loss::Known(20)));
        assert_eq!(refused(&p(10), &empty, own(10)), None);
        // the mirror's log is damaged: the primary has all, or has not; or is empty
        assert_eq!(refused(&p(20), &p(8), of_mirror(20)), None);
        assert_eq!(refused(&p(19), &p(8), of_mirror(20)), Some(Loss::Known(20)));
        assert_eq!(refused(&p(6), &p(8), of_mirror(20)), Some(Loss::Known(20)));
        assert_eq!(refused(&empty, &p(8), of_mirror(20)), Some(Loss::Known(20)));
        assert_eq!(refused(&empty, &p(20), of_mirror(20)), None);
        // The mirror's log is damaged where its files show more: it gets a whole copy, unless it
        // knows of what nobody else has.
        let part = copy(1, Empty, 0, &[(1, 1)]);
        let lost = Some(Loss::Known(20));
        assert_eq!(
            plan_and_loss(&p(8), &part, of_mirror(20)),
            (Plan::CopyTo, lost)
        );
        assert_eq!(
            plan_and_loss(&p(20), &part, of_mirror(20)),
            (Plan::CopyTo, None)
        );
        // Found by the simulator (seed 15382): the mirror was away since before the epoch in
        // which the primary, whose log is damaged, acknowledged alone.
        let a = copy(1, Whole, 16, &[(1, 1), (2, 16), (3, 24)]);
        let old = copy(1, Whole, 17, &[(1, 1), (2, 16)]);
        let found = plan_and_loss(&a, &old, own(66));
        assert_eq!(found, (Plan::CopyFrom, Some(Loss::Known(66))));
        // what the primary's view gave up when it began counts no more
        let b = copy(1, Whole, 150, &[(1, 1), (2, 101)]);
        assert_eq!(
            plan_and_loss(&b, &p(120), of_mirror(160)),
            (Plan::CopyTo, None)
        );
        let ring = |member, primary| KnownAcknowledged {
            primary,
            ring_lost: true,
            member,
            ..nothing
        };
        // after a loss of the ring, what the mirror is counts
        assert_eq!(refused(&p(10), &p(8), ring(true, 8)), None);
        assert_eq!(refused(&p(10), &p(8), ring(false, 8)), Some(Loss::Ring));
        assert_eq!(refused(&p(10), &p(8), ring(true, 9)), Some(Loss::Ring));
        assert_eq!(refused(&p(10), &p(12), ring(true, 10)), None);
        for b in [&empty, &copy(1, Empty, 0, &[])] {
            for member in [true, false] {
                assert_eq!(refused(&p(10), b, ring(member, 8)), Some(Loss::Ring));
            }
        }
        // a whole one that has forked, or that the log does not reach
        let forked = copy(1, Whole, 8, &[(1, 1), (2, 6)]);
        assert_eq!(refused(&p(10), &forked, ring(true, 5)), Some(Loss::Ring));
    }

    /// A backup that answers knows of what neither primary nor mirror has, or of what was given
    /// up when an epoch ended.
    #[test]
    fn what_any_node_knows_counts_unless_an_epoch_ended_it() {
        let kept = copy(1, State::Whole, 150, &[(1, 1), (2, 101), (5, 160)]);
        let knows = |lsn, epoch| Acknowledged {
            volume_id: 1,
            lsn,
            epoch,
        };
        let rows = [
            (knows(150, Some(2)), false),
            (knows(151, Some(2)), true),
            (knows(151, Some(3)), true),
            // it ended epoch 1 at 100, and epoch 2 at 159
            (knows(151, Some(1)), false),
            (knows(160, Some(2)), false),
            (knows(160, Some(5)), true),
            (knows(151, None), false),
        ];
        for (known, is_missing) in rows {
            assert_eq!(known.is_missing_from(&kept), is_missing, "{known:?}");
        }
        let other = Acknowledged {
            volume_id: 2,
            ..knows(151, Some(2))
        };
        assert!(!other.is_missing_from(&kept));
    }

    /// The mirror's log was damaged at 10 of 20 acknowledged records. The attach took the
    /// mirror for the member that it was; when the primary was lost before the rest had
    /// been sent again, the mirror was promoted without a warning.
    #[test]
    fn a_mirror_that_lost_what_it_acknowledged_is_known() {
        let p = |t| copy(1, State::Whole, t, &[(1, 1)]);
        let plan = |t| reconcile(&p(20), &p(t), 1, true);
        assert!(has_lost(&plan(10), 20));
        assert!(!has_lost(&plan(10), 10));
        assert!(!has_lost(&plan(20), 20));
        assert!(!has_lost(&Plan::CopyTo, 20));
    }

    /// Each of two nodes was promoted while the other was away, and acknowledged records.
    /// When they met, the copy with the higher epoch replaced the other, whichever was later.
    #[test]
    fn two_that_were_promoted_unknown_to_each_other_are_rivals() {
        use State::*;
        let of = |tail, e: &[(u64, u64)]| copy(1, Whole, tail, e);
        // a's epochs are even, b's odd
        let rival = |kept: &Holding, other: &Holding, rank: u64| {
            assert_eq!(
                reconcile(kept, other, 1, true),
                if kept.history.common(kept.tail, &other.history, other.tail) == Some(other.tail) {
                    Plan::Resend { from: other.tail }
                } else {
                    Plan::CopyTo
                }
            );
            is_rival(kept, other, |e| e % 2 == rank)
        };
        let (a, b) = (LEAP + 4, LEAP + 3);
        let kept = of(150, &[(2, 1), (b + 6, 101)]);
        assert!(rival(&kept, &of(120, &[(2, 1), (a, 101)]), 1));
        // by a fork of its own, or from the first record on
        assert!(rival(&kept, &of(120, &[(2, 1), (a, 90)]), 1));
        assert!(rival(&kept, &of(20, &[(a, 1)]), 1));
        // and if this copy has nothing of its own yet
        assert!(rival(
            &of(100, &[(2, 1), (b + 6, 101)]),
            &of(120, &[(2, 1), (a, 101)]),
            1
        ));
        // the fork is forgotten: an old mirror is not taken for a promoted node
        let long = of(150, &[(b + 6, 101)]);
        assert!(!is_rival(&long, &of(90, &[(b + 4, 1)]), |_| false));
        // promoted, and nothing came of it
        assert!(!rival(&kept, &of(100, &[(2, 1), (a, 101)]), 1));
        // the old primary: a promotion ended its epoch
        assert!(!rival(&kept, &of(120, &[(2, 1)]), 1));
        assert!(!rival(&kept, &of(120, &[(2, 1), (4, 101)]), 1));
        // promoted with knowledge of the other's promotion
        let knew = of(150, &[(2, 1), (a + LEAP + 1, 101)]);
        assert!(!rival(&knew, &of(120, &[(2, 1), (a, 101)]), 1));
        // what this node led itself, and what it has
        assert!(!rival(&kept, &of(120, &[(2, 1), (b + 2, 101)]), 1));
        let went_on = of(150, &[(2, 1), (a, 101), (a + 1, 130)]);
        assert!(!rival(&went_on, &of(140, &[(2, 1), (a, 101)]), 1));
    }
}
