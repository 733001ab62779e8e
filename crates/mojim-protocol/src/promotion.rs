//! Promotion by hand: whether a copy may go on as the primary's on an operator's word.
//!
//! Decisions only, by what its own node knows and what the other nodes say that answer.
//! Invariant: without force nobody becomes primary whose copy may lack what was
//! acknowledged; nobody does at all while a primary is alive, or without a whole copy.

use crate::pairing::LEAP;
use mojim_format::{State, View};

/// The copy that is to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Its node.
    pub node: &'a str,
    /// The view that it has, with which it would go on.
    pub standing: View,
    /// The view in its superblock.
    pub view: View,
    /// Whether the copy can be used.
    pub state: State,
    /// Last LSN that it has all of.
    pub tail: u64,
    /// The epoch of a view of another node's that it promised to take.
    pub promised: Option<u64>,
}

/// Another node's copy, as its daemon says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other {
    /// Its node.
    pub node: String,
    /// Of the view that it knows.
    pub epoch: u64,
    /// By its view it is the primary, and has a whole copy.
    pub leads: bool,
    /// The last LSN of a whole copy.
    pub has: Option<u64>,
}

/// Why a copy may not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal<'a> {
    /// A primary is attached and was heard of lately.
    PrimaryAlive,
    /// What was acknowledged in that node's view may be missing from the copy.
    Contested(&'a Other),
    /// That node has more, up to this LSN, of what may have been acknowledged.
    Behind(&'a Other, u64),
    /// It promised to take the view of this epoch, which another node was promoted to.
    Promised(u64),
    /// It is empty.
    NotWhole,
    /// It was catching up, or is a backup: acknowledged sync points may be missing from it.
    NotMember,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// What only the others have is given up.
    pub force: bool,
    /// An acknowledgement means the mirror alone.
    pub mirror_only: bool,
}

/// Whose view is later than the copy's `view`, or was begun beside it: that node was promoted
/// without the primary of `view`, or that one without it, and neither view ends the other's,
/// which has what was acknowledged in it. The latest of several; a node that knows the copy's
/// view hides no rival. An epoch that no promotion by hand leads to is a register's: a later
/// view ended its view, and its primary does not know that yet.
pub fn contested<'a>(view: &View, others: &'a [Other]) -> Option<&'a Other> {
    let is = |o: &&Other| {
        let is_rival = o.leads && o.node != view.primary && o.epoch >= LEAP / 2;
        o.epoch > view.epoch || is_rival && o.epoch.saturating_add(LEAP / 2) > view.epoch
    };
    others.iter().filter(is).max_by_key(|o| o.epoch)
}

/// Whether `c` may go on. `alive`: its primary is attached, as far as anyone who answers
/// knows.
pub fn judge<'a>(
    c: &Candidate,
    alive: bool,
    others: &'a [Other],
    asked: Asked,
) -> Result<(), Refusal<'a>> {
    if alive {
        return Err(Refusal::PrimaryAlive);
    }
    if !asked.force {
        if let Some(o) = contested(&c.view, others) {
            return Err(Refusal::Contested(o));
        }
        // What only the mirror has may have been acknowledged.
        let counts = c.view.primary == c.node && asked.mirror_only;
        let same = others.iter().filter(|o| o.epoch == c.view.epoch);
        let ahead = same.filter_map(|o| o.has.map(|has| (o, has)));
        let ahead = ahead.max_by_key(|(_, has)| *has);
        if let Some((o, has)) = ahead.filter(|(_, has)| counts && *has > c.tail) {
            return Err(Refusal::Behind(o, has));
        }
        // That node went on without this copy.
        if let Some(epoch) = c.promised
            && epoch >= c.view.epoch.saturating_add(LEAP / 2)
        {
            return Err(Refusal::Promised(epoch));
        }
    }
    if c.state != State::Whole {
        return Err(Refusal::NotWhole);
    }
    let is_member = c.standing.primary == c.node || c.standing.mirror == c.node;
    // Who is no member may lack what was acknowledged: the operator's word.
    if !is_member && !asked.force {
        return Err(Refusal::NotMember);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Asked = Asked {
        force: false,
        mirror_only: true,
    };
    const FORCE: Asked = Asked {
        force: true,
        ..PLAIN
    };

    fn view(epoch: u64, primary: &str, mirror: &str) -> View {
        View {
            epoch,
            primary: primary.into(),
            mirror: mirror.into(),
        }
    }

    /// A whole copy up to LSN 10.
    fn copy<'a>(node: &'a str, view: &View) -> Candidate<'a> {
        Candidate {
            node,
            standing: view.clone(),
            view: view.clone(),
            state: State::Whole,
            tail: 10,
            promised: None,
        }
    }

    fn other(node: &str, epoch: u64, leads: bool, has: Option<u64>) -> Other {
        Other {
            node: node.into(),
            epoch,
            leads,
            has,
        }
    }

    #[test]
    fn only_a_whole_member_without_a_living_primary_goes_on() {
        let v = view(3, "a", "b");
        for node in ["a", "b"] {
            assert_eq!(judge(&copy(node, &v), false, &[], PLAIN), Ok(()));
        }
        for asked in [PLAIN, FORCE] {
            let alive = judge(&copy("b", &v), true, &[], asked);
            assert_eq!(alive, Err(Refusal::PrimaryAlive));
            let mut lost = copy("b", &v);
            lost.state = State::Switching;
            assert_eq!(judge(&lost, false, &[], asked), Err(Refusal::NotWhole));
        }
        let backup = copy("c", &v);
        assert_eq!(judge(&backup, false, &[], PLAIN), Err(Refusal::NotMember));
        assert_eq!(judge(&backup, false, &[], FORCE), Ok(()));
    }

    #[test]
    fn what_another_node_has_is_given_up_by_force_alone() {
        let mine = view(3 + LEAP, "a", "b");
        let rows = [
            ("a later view", other("b", 4 + LEAP, false, Some(2)), true),
            ("and no copy", other("b", 4 + LEAP, false, None), true),
            (
                "a rival, promoted too",
                other("b", 2 + LEAP, true, Some(9)),
                true,
            ),
            ("what this one ended", other("b", 3, true, Some(9)), false),
            (
                "a rival, half a leap below",
                other("c", 3 + LEAP - LEAP / 2, true, Some(9)),
                false,
            ),
            (
                "a rival, not so far below",
                other("c", 4 + LEAP - LEAP / 2, true, Some(9)),
                true,
            ),
            (
                "the mirror's old view",
                other("b", 2 + LEAP, false, Some(9)),
                false,
            ),
        ];
        for (what, o, is_contested) in rows {
            // A backup that knows this copy's view says nothing of the rival's. It hid
            // the rival once: only the latest view of all was looked at.
            let c = other("c", 3 + LEAP, false, Some(10));
            for others in [
                vec![o.clone()],
                vec![o.clone(), c.clone()],
                vec![c, o.clone()],
            ] {
                let found = judge(&copy("a", &mine), false, &others, PLAIN);
                let expected = match is_contested {
                    true => Err(Refusal::Contested(&o)),
                    false => Ok(()),
                };
                assert_eq!(found, expected, "{what}");
                let forced = judge(&copy("a", &mine), false, &others, FORCE);
                assert_eq!(forced, Ok(()), "{what}");
            }
        }
        // The mirror's own primary is no rival; who was promoted beside that one is, also to the
        // mirror, which knows nothing of it.
        let mine = copy("b", &mine);
        let primary = [other("a", 3 + LEAP, true, Some(9))];
        assert_eq!(judge(&mine, false, &primary, PLAIN), Ok(()));
        let rival = [other("c", 2 + LEAP, true, Some(9))];
        let found = judge(&mine, false, &rival, PLAIN);
        assert_eq!(found, Err(Refusal::Contested(&rival[0])));
        // The register's view went on to the mirror, and the register is gone: `failover` was
        // set to "manual" while the primary before was down. It counted as a rival once.
        for node in ["b", "c"] {
            let copy = copy(node, &view(5, "b", "c"));
            let before = [other("a", 3, true, Some(9))];
            assert_eq!(judge(&copy, false, &before, PLAIN), Ok(()));
        }
        // Of several, the latest.
        let both = [
            other("c", 4 + LEAP, false, None),
            other("d", 5 + LEAP, false, None),
        ];
        let found = judge(&mine, false, &both, PLAIN);
        assert_eq!(found, Err(Refusal::Contested(&both[1])));
    }

    /// Every reason at once, and one after the other taken away: what an operator is told is
    /// what has to be settled first.
    #[test]
    fn reasons_have_an_order() {
        let v = view(3, "a", "b");
        let mut c = copy("a", &v);
        // It promised another's view: its own names it no longer.
        c.standing.primary.clear();
        c.promised = Some(3 + LEAP);
        c.state = State::Empty;
        let later = other("c", 4, false, None);
        let ahead = other("b", 3, false, Some(11));
        let mut others = vec![ahead.clone(), later.clone()];
        assert_eq!(judge(&c, true, &others, PLAIN), Err(Refusal::PrimaryAlive));
        assert_eq!(
            judge(&c, false, &others, PLAIN),
            Err(Refusal::Contested(&later))
        );
        others.pop();
        assert_eq!(
            judge(&c, false, &others, PLAIN),
            Err(Refusal::Behind(&ahead, 11))
        );
        others.clear();
        assert_eq!(
            judge(&c, false, &others, PLAIN),
            Err(Refusal::Promised(3 + LEAP))
        );
        c.promised = Some(3 + LEAP / 2 - 1);
        assert_eq!(judge(&c, false, &others, PLAIN), Err(Refusal::NotWhole));
        c.promised = Some(3 + LEAP / 2);
        assert_eq!(
            judge(&c, false, &others, PLAIN),
            Err(Refusal::Promised(3 + LEAP / 2))
        );
        c.promised = None;
        c.state = State::Whole;
        assert_eq!(judge(&c, false, &others, PLAIN), Err(Refusal::NotMember));
        assert_eq!(judge(&c, false, &others, FORCE), Ok(()));
    }

    #[test]
    fn the_mirror_alone_may_have_what_was_acknowledged() {
        let v = view(3, "a", "b");
        let (b, c) = (
            other("b", 3, false, Some(11)),
            other("c", 3, false, Some(9)),
        );
        let others = [b.clone(), c];
        let found = judge(&copy("a", &v), false, &others, PLAIN);
        assert_eq!(found, Err(Refusal::Behind(&b, 11)));
        let local = Asked {
            mirror_only: false,
            ..PLAIN
        };
        for (node, asked) in [("a", local), ("b", PLAIN), ("a", FORCE)] {
            assert_eq!(judge(&copy(node, &v), false, &others, asked), Ok(()));
        }
        // Of the view before: this one's began where that one had ended.
        let old = [other("b", 2, false, Some(11))];
        assert_eq!(judge(&copy("a", &v), false, &old, PLAIN), Ok(()));
    }

    #[test]
    fn a_view_that_was_promised_went_on_without_this_copy() {
        let v = view(3, "a", "b");
        let mut c = copy("a", &v);
        c.promised = Some(4);
        assert_eq!(judge(&c, false, &[], PLAIN), Ok(()));
        c.promised = Some(3 + LEAP);
        assert_eq!(
            judge(&c, false, &[], PLAIN),
            Err(Refusal::Promised(3 + LEAP))
        );
        assert_eq!(judge(&c, false, &[], FORCE), Ok(()));
    }
}
