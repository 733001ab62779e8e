//! Bringing two copies of a volume together, and making one the primary.
//!
//! Decisions only. The rule behind them: nothing that may have been
//! acknowledged is ever thrown away; what is thrown away lies beyond a fork,
//! in an epoch that a newer view superseded.

use crate::History;
use mojim_format::{State, View};

/// What one node says of its copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Identity of the volume; 0 for none.
    pub volume_id: u64,
    /// Whether the copy can be used.
    pub state: State,
    /// Last LSN of its contiguous prefix.
    pub tail: u64,
    /// Its epochs.
    pub history: History,
}

/// How the mirror's copy is brought to the primary's, or the other way round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// The mirror holds a prefix: send it the records above `from`.
    Resend {
        /// Last LSN that the mirror has.
        from: u64,
    },
    /// Send the mirror a whole copy.
    CopyTo,
    /// The mirror holds more than the attaching primary: take its copy.
    CopyFrom,
    /// These are copies of different volumes; a person must decide.
    Foreign,
    /// Neither copy can be used.
    Nothing,
}

/// Decides how to pair. `oldest` is the first LSN still in the primary's logs;
/// `attach`: the primary begins an epoch and has shown nothing to anyone yet.
pub fn reconcile(primary: &Holding, mirror: &Holding, oldest: u64, attach: bool) -> Plan {
    match (primary.state, mirror.state) {
        (State::Whole, State::Whole) => {}
        (State::Whole, State::Empty) => return Plan::CopyTo,
        (State::Empty, State::Whole) if attach => return Plan::CopyFrom,
        (State::Empty, State::Empty) if primary.volume_id == 0 && mirror.volume_id == 0 => {
            return Plan::CopyTo;
        }
        // They held a volume and lost it: nothing is made anew in its place.
        _ => return Plan::Nothing,
    }
    if primary.volume_id != mirror.volume_id {
        // A primary that has no record yet and meets a mirror that has: the
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
        // The mirror's copy goes on from where this one ends, in the epoch that
        // this one is in: adopt it. A primary that has begun a later epoch there
        // (it was promoted) has ended the other's.
        Some(c)
            if c == primary.tail
                && attach
                && primary.history.epoch_at(c + 1) == mirror.history.epoch_at(c + 1) =>
        {
            Plan::CopyFrom
        }
        // A fork: the mirror's tail is of an epoch that this view superseded.
        _ => Plan::CopyTo,
    }
}

/// Why a node may not become primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromoteRefusal {
    /// A primary is attached and was heard of lately.
    PrimaryAlive,
    /// Its copy is empty.
    NotWhole,
    /// It was catching up: acknowledged sync points may be missing from it.
    NotMember,
}

/// Whether `node` may become primary of its volume, by what it knows itself.
/// `primary_alive`: its primary is attached, as far as anyone reachable knows.
pub fn may_promote(
    node: &str,
    view: &View,
    state: State,
    primary_alive: bool,
) -> Result<(), PromoteRefusal> {
    if primary_alive {
        return Err(PromoteRefusal::PrimaryAlive);
    }
    if state != State::Whole {
        return Err(PromoteRefusal::NotWhole);
    }
    if view.primary != node && view.mirror != node {
        return Err(PromoteRefusal::NotMember);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_format::EpochStart;

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
        // Found by the simulator: promoted at 100 and attached again before it
        // wrote anything, it adopted what the old primary had beyond.
        let b = copy(1, Whole, 100, &[(1, 1), (2, 101)]);
        assert_eq!(reconcile(&b, &p(120), 1, true), Plan::CopyTo);
        assert_eq!(
            reconcile(
                &copy(1, Switching, 0, &[]),
                &copy(1, Switching, 0, &[]),
                1,
                true
            ),
            Plan::Nothing
        );
        // A copy from it was under way to a new directory when it was lost.
        let (new, lost) = (copy(0, Empty, 0, &[]), copy(1, Empty, 0, &[]));
        assert_eq!(reconcile(&new, &lost, 1, true), Plan::Nothing);
        assert_eq!(reconcile(&lost, &new, 1, true), Plan::Nothing);
        assert_eq!(reconcile(&new, &new, 1, true), Plan::CopyTo);
    }

    #[test]
    fn only_a_whole_member_without_a_living_primary_is_promoted() {
        let v = View {
            epoch: 3,
            primary: "a".into(),
            mirror: "b".into(),
        };
        assert_eq!(may_promote("b", &v, State::Whole, false), Ok(()));
        assert_eq!(
            may_promote("b", &v, State::Whole, true),
            Err(PromoteRefusal::PrimaryAlive)
        );
        assert_eq!(
            may_promote("b", &v, State::Switching, false),
            Err(PromoteRefusal::NotWhole)
        );
        assert_eq!(
            may_promote("c", &v, State::Whole, false),
            Err(PromoteRefusal::NotMember)
        );
    }
}
