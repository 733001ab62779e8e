//! Promotion by hand: whether a node may become primary on an operator's request.
//!
//! Decisions only, from what the node knows and what the other nodes answer.
//! Invariant: without force no node becomes primary if its copy may lack what was
//! acknowledged. Even with force none does while a primary is alive, or without a
//! whole copy.

use crate::pairing::{Acknowledged, Holding, LEAP, WORD};
use crate::rule::AckRule;
use mojim_format::{State, View};

/// The copy whose node is to become primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Its node.
    pub node: &'a str,
    /// The view on which the copy may still rely.
    pub standing: View,
    /// The view in its superblock.
    pub view: View,
    /// What the copy has.
    pub holding: Holding,
    /// The epoch of another node's view that the copy has promised.
    pub promised: Option<u64>,
}

impl Candidate<'_> {
    /// The greatest epoch that is known here to have been begun.
    fn begun(&self) -> u64 {
        self.holding.history.last_epoch().max(self.view.epoch)
    }
}

/// Another node's copy, as that node's daemon describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other {
    /// Its node.
    pub node: String,
    /// Epoch of the view that the node knows.
    pub epoch: u64,
    /// The node is the primary of this view, and has a whole copy.
    pub leads: bool,
    /// The last LSN of its copy, if that is whole.
    pub has: Option<u64>,
    /// What it knows to have been acknowledged.
    pub known: Option<Acknowledged>,
}

/// Why a node may not become primary with its copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal<'a> {
    /// A primary is attached and was heard lately.
    PrimaryAlive,
    /// What was acknowledged in that node's view may be missing from the copy.
    Contested(&'a Other),
    /// That node has more, up to this LSN, of what may have been acknowledged, or knows of it.
    Behind(&'a Other, u64),
    /// The copy promised this epoch, of a view to which another node was promoted.
    Promised(u64),
    /// The copy is not whole.
    NotWhole,
    /// The copy was catching up, or is a backup's: acknowledged sync points may be missing
    /// from it.
    NotMember,
}

/// What is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// What only other nodes have is given up.
    pub force: bool,
    /// What a sync point of the mode waits for.
    pub rule: AckRule,
}

/// The node whose view is later than the copy's `view`, or its rival; of several, the one
/// with the latest view. A rival leads its view: it and the primary of `view` were promoted
/// without knowing of each other, so neither view ends the other, and each has what was
/// acknowledged in it. A node that knows the copy's view does not hide a rival. An epoch below
/// half a leap is a register's: a later view ended its view, and its primary does not know that.
pub fn contested<'a>(view: &View, others: &'a [Other]) -> Option<&'a Other> {
    let is = |o: &&Other| {
        let is_rival = o.leads && o.node != view.primary && o.epoch >= LEAP / 2;
        o.epoch > view.epoch || is_rival && o.epoch.saturating_add(LEAP / 2) > view.epoch
    };
    others.iter().filter(is).max_by_key(|o| o.epoch)
}

/// The greatest epoch that another node names, which a promotion of the copy `c` goes beyond. An
/// epoch that nobody can have begun counts for nothing: no node could follow a view behind it.
pub fn outdone(c: &Candidate, others: &[Other]) -> u64 {
    let most = c.begun().saturating_add(WORD);
    let named = others.iter().map(|o| o.epoch);
    named.filter(|epoch| *epoch <= most).max().unwrap_or(0)
}

/// The node that has most beyond the copy `c`, a member's. What any node knows to have been
/// acknowledged was: the node that led the view had it in every mode, the mirror in those that
/// count on it. Beside that, what only the mirror has may have been acknowledged, if the mode
/// counts on the mirror alone.
fn ahead<'a>(c: &Candidate, others: &'a [Other], rule: AckRule) -> Option<(&'a Other, u64)> {
    let led = c.view.primary == c.node;
    let mirrors = rule.mirror && c.standing.mirror == c.node;
    let counts = |o: &Other| led && rule.mirror && !rule.local && o.epoch == c.view.epoch;
    let all = others.iter().flat_map(|o| {
        let has = o.has.filter(|has| counts(o) && *has > c.holding.tail);
        let known = o.known.filter(|_| led || mirrors);
        let known = known.filter(|k| k.is_credible(c.begun(), None));
        let known = known.filter(|k| k.is_missing_from(&c.holding));
        [has, known.map(|k| k.lsn)].map(|lsn| lsn.map(|lsn| (o, lsn)))
    });
    all.flatten().max_by_key(|(_, lsn)| *lsn)
}

/// Whether the node of `c` may become primary. `alive`: the primary of `c` is attached, as
/// far as any node that answers knows.
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
        if let Some((o, lsn)) = ahead(c, others, asked.rule) {
            return Err(Refusal::Behind(o, lsn));
        }
        // The node of that view went on without this copy.
        if let Some(epoch) = c.promised
            && epoch >= c.view.epoch.saturating_add(LEAP / 2)
        {
            return Err(Refusal::Promised(epoch));
        }
    }
    if c.holding.state != State::Whole {
        return Err(Refusal::NotWhole);
    }
    let is_member = c.standing.primary == c.node || c.standing.mirror == c.node;
    // The copy of a non-member may lack what was acknowledged: only with force.
    if !is_member && !asked.force {
        return Err(Refusal::NotMember);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::History;
    use mojim_format::EpochStart;

    const PLAIN: Asked = Asked {
        force: false,
        rule: AckRule::MIRROR,
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
            holding: Holding {
                volume_id: 1,
                state: State::Whole,
                tail: 10,
                history: History::from_entries(&[EpochStart {
                    epoch: 1,
                    first_lsn: 1,
                }])
                .unwrap(),
            },
            promised: None,
        }
    }

    fn other(node: &str, epoch: u64, leads: bool, has: Option<u64>) -> Other {
        Other {
            node: node.into(),
            epoch,
            leads,
            has,
            known: None,
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
            lost.holding.state = State::Switching;
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
            // A backup that knows this copy's view knows nothing of the rival's. It once hid
            // the rival: only the latest view of all was looked at.
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
        // The mirror's own primary is not a rival. A node that was promoted besides this
        // primary is one, also to the mirror, which knows nothing of it.
        let mine = copy("b", &mine);
        let primary = [other("a", 3 + LEAP, true, Some(9))];
        assert_eq!(judge(&mine, false, &primary, PLAIN), Ok(()));
        let rival = [other("c", 2 + LEAP, true, Some(9))];
        let found = judge(&mine, false, &rival, PLAIN);
        assert_eq!(found, Err(Refusal::Contested(&rival[0])));
        // The register made the mirror primary, and the register is gone: `failover` was set
        // to "manual" while the old primary was down. The old primary once counted as a rival.
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

    /// All reasons apply at once and are removed one by one: the operator is told what has to
    /// be settled first.
    #[test]
    fn reasons_have_an_order() {
        let v = view(3, "a", "b");
        let mut c = copy("a", &v);
        // It promised another node's view, so it is no longer the primary of its own.
        c.standing.primary.clear();
        c.promised = Some(3 + LEAP);
        c.holding.state = State::Empty;
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
        c.holding.state = State::Whole;
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
            rule: AckRule::BOTH,
            ..PLAIN
        };
        for (node, asked) in [("a", local), ("b", PLAIN), ("a", FORCE)] {
            assert_eq!(judge(&copy(node, &v), false, &others, asked), Ok(()));
        }
        // The other node has the view before: this copy's view began where that one ended.
        let old = [other("b", 2, false, Some(11))];
        assert_eq!(judge(&copy("a", &v), false, &old, PLAIN), Ok(()));
    }

    /// In `sync-flush` the old primary's disk lost what it had made durable. A plain promotion
    /// went on with the rest, although the mirror answered that it knew of more.
    #[test]
    fn what_another_node_knows_to_be_acknowledged_counts_in_every_mode() {
        let v = view(3, "a", "b");
        let local = Asked {
            rule: AckRule::BOTH,
            ..PLAIN
        };
        let knows = |lsn, epoch| {
            let known = Acknowledged {
                volume_id: 1,
                lsn,
                epoch: Some(epoch),
            };
            Other {
                known: Some(known),
                ..other("b", 3, false, Some(12))
            }
        };
        let b = [knows(11, 1)];
        let found = judge(&copy("a", &v), false, &b, local);
        assert_eq!(found, Err(Refusal::Behind(&b[0], 11)));
        let forced = judge(&copy("a", &v), false, &b, FORCE);
        assert_eq!(forced, Ok(()));
        // what the copy has; what an epoch ended
        let mut ended = copy("a", &v);
        let entry = |epoch, first_lsn| EpochStart { epoch, first_lsn };
        ended.holding.history = History::from_entries(&[entry(1, 1), entry(3, 11)]).unwrap();
        assert_eq!(judge(&copy("a", &v), false, &[knows(10, 1)], local), Ok(()));
        assert_eq!(judge(&ended, false, &b, local), Ok(()));
    }

    /// One node's word for an absurd epoch kept a volume from every promotion without force, and
    /// carried the view of a forced one beyond what any node follows.
    #[test]
    fn an_epoch_that_nobody_can_have_begun_counts_for_nothing() {
        let c = copy("a", &view(3, "a", "b"));
        let most = 3 + WORD;
        let named = |epochs: &[u64]| {
            let others: Vec<_> = epochs.iter().map(|e| other("b", *e, false, None)).collect();
            outdone(&c, &others)
        };
        assert_eq!(named(&[]), 0);
        assert_eq!(named(&[5, most, 4]), most);
        assert_eq!(named(&[5, most + 1, u64::MAX]), 5);
        let knows = |epoch| Other {
            known: Some(Acknowledged {
                volume_id: 1,
                lsn: 11,
                epoch: Some(epoch),
            }),
            ..other("b", 3, false, Some(9))
        };
        let (credible, absurd) = ([knows(most)], [knows(most + 1)]);
        let found = judge(&c, false, &credible, PLAIN);
        assert_eq!(found, Err(Refusal::Behind(&credible[0], 11)));
        assert_eq!(judge(&c, false, &absurd, PLAIN), Ok(()));
    }

    /// A mirror whose log was put back as of an earlier time was promoted, although a backup
    /// answered that more had been acknowledged.
    #[test]
    fn what_a_backup_knows_to_be_acknowledged_counts_for_the_mirror() {
        let v = view(3, "a", "b");
        let known = Acknowledged {
            volume_id: 1,
            lsn: 11,
            epoch: Some(1),
        };
        let c = [Other {
            known: Some(known),
            ..other("c", 3, false, Some(12))
        }];
        let asked = |rule| Asked { rule, ..PLAIN };
        for rule in [AckRule::MIRROR, AckRule::BOTH] {
            let found = judge(&copy("b", &v), false, &c, asked(rule));
            assert_eq!(found, Err(Refusal::Behind(&c[0], 11)));
        }
        // No sync point waits for an asynchronous mirror.
        let lags = judge(&copy("b", &v), false, &c, asked(AckRule::LOCAL));
        assert_eq!(lags, Ok(()));
        assert_eq!(judge(&copy("b", &v), false, &c, FORCE), Ok(()));
        let backup = judge(&copy("d", &v), false, &c, PLAIN);
        assert_eq!(backup, Err(Refusal::NotMember));
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
