//! The view: who is primary and who must acknowledge, and the only ways in which
//! it changes.
//!
//! Decisions only. A view lies in a register, kept by a majority of voters. The register is changed
//! by compare and swap (`version`). A sync point never touches it. The rule behind the transitions:
//! **every member of the view holds every acknowledged sync point**. So only a member of the view
//! before may propose a view, and only with members that hold all of them ([`Register::force`]
//! excepted).
//!
//! See Mojim 4.3, and docs/reference/views.md, "Views in a register".

use serde::{Deserialize, Serialize};

use crate::pairing::{FAR, is_near};

/// A node in a view. Its incarnation changes when it loses what it had promised
/// to hold; then it is no longer a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The node's name.
    pub node: String,
    /// Number of the life of its copy.
    pub incarnation: u64,
}

/// One volume's view, as the register holds it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Register {
    /// Counts the changes; compare and swap compares it. 0: never written.
    pub version: u64,
    /// The epoch of the records that this view's primary makes. It grows with every
    /// attach, raise, take-over and force; it stays the same while a primary only
    /// loses a mirror or admits one.
    pub epoch: u64,
    /// The node whose sync points may be acknowledged.
    pub primary: Option<Member>,
    /// The node that must acknowledge them; none while the primary is alone.
    pub mirror: Option<Member>,
    /// The epoch that the mirror had durably promised when it was named last, 0 where that is
    /// not known. A copy of its that promises less is of an earlier time.
    #[serde(default)]
    pub promised: u64,
}

/// Why a view does not change as proposed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Another node is the primary.
    NotPrimary,
    /// The node is not in the view, or the view names an earlier life of its copy.
    NotMember,
    /// The epoch is not above the view's.
    OldEpoch,
}

impl Register {
    /// The register after one more change.
    fn next(&self) -> Register {
        Register {
            version: self.version + 1,
            ..self.clone()
        }
    }

    /// Whether a view of `epoch` can be the next one. What a node has promised may lie [`FAR`]
    /// above this view, and a view that follows on such a promise somewhat above that. A register
    /// that was never written knows no epoch.
    pub fn is_near(&self, epoch: u64) -> bool {
        match self.epoch {
            0 => is_near(epoch, 0),
            now => is_near(epoch, now.saturating_add(FAR)),
        }
    }

    /// Whether `m` is the view's primary, in this life of its copy.
    pub fn is_primary(&self, m: &Member) -> bool {
        self.primary.as_ref() == Some(m)
    }

    /// Whether the view's mirror, which has durably promised `epoch`, had promised more when it
    /// was named: its copy has forgotten that, and with it what was acknowledged since.
    pub fn is_forgotten(&self, epoch: u64) -> bool {
        self.mirror.is_some() && epoch < self.promised
    }

    /// Whether `m` is the view's mirror, in this life of its copy.
    pub fn is_mirror(&self, m: &Member) -> bool {
        self.mirror.as_ref() == Some(m)
    }

    /// A primary attaches: it begins `epoch`, which `mirror` has durably promised, or alone.
    /// `adopted`: it has adopted everything that the view's mirror holds, so it
    /// counts as a member even in another life of its copy.
    pub fn attach(
        &self,
        me: &Member,
        mirror: Option<&Member>,
        epoch: u64,
        adopted: bool,
    ) -> Result<Register, Refusal> {
        if self.version > 0 {
            let primary = self.primary.as_ref().ok_or(Refusal::NotPrimary)?;
            if primary.node != me.node {
                return Err(Refusal::NotPrimary);
            }
            if primary != me && !adopted {
                return Err(Refusal::NotMember);
            }
        }
        if epoch <= self.epoch {
            return Err(Refusal::OldEpoch);
        }
        Ok(Register {
            epoch,
            primary: Some(me.clone()),
            mirror: mirror.cloned(),
            promised: mirror.map_or(0, |_| epoch),
            ..self.next()
        })
    }

    /// The primary goes on without its mirror, in the same epoch.
    pub fn alone(&self, me: &Member) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        Ok(Register {
            mirror: None,
            promised: 0,
            ..self.next()
        })
    }

    /// The primary shows that it is alive: only the version changes.
    pub fn look(&self, me: &Member) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        Ok(self.next())
    }

    /// A mirror that holds everything becomes a member, in the same epoch. `promised`: the epoch
    /// in which it follows.
    pub fn admit(&self, me: &Member, mirror: &Member, promised: u64) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        Ok(Register {
            mirror: Some(mirror.clone()),
            promised,
            ..self.next()
        })
    }

    /// The primary begins a greater epoch, since its mirror or a backup has promised
    /// one, or since another node is to become its mirror.
    pub fn raise(&self, me: &Member, epoch: u64) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        if epoch <= self.epoch {
            return Err(Refusal::OldEpoch);
        }
        Ok(Register {
            epoch,
            ..self.next()
        })
    }

    /// The mirror becomes primary, alone at first. It must have durably promised
    /// `epoch` before it proposes this.
    pub fn take_over(&self, me: &Member, epoch: u64) -> Result<Register, Refusal> {
        if !self.is_mirror(me) {
            return Err(Refusal::NotMember);
        }
        if epoch <= self.epoch {
            return Err(Refusal::OldEpoch);
        }
        Ok(Register {
            epoch,
            primary: Some(me.clone()),
            mirror: None,
            promised: 0,
            ..self.next()
        })
    }

    /// An operator makes `me` primary, member or not: what only the members held
    /// is given up.
    pub fn force(&self, me: &Member, epoch: u64) -> Result<Register, Refusal> {
        if epoch <= self.epoch {
            return Err(Refusal::OldEpoch);
        }
        Ok(Register {
            epoch,
            primary: Some(me.clone()),
            mirror: None,
            promised: 0,
            ..self.next()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn m(node: &str, incarnation: u64) -> Member {
        Member {
            node: node.into(),
            incarnation,
        }
    }

    #[test]
    fn no_view_comes_far_after_another() {
        let of = |epoch| Register {
            epoch,
            ..Register::default()
        };
        // A register of a volume that was led without one may begin late.
        assert!(of(0).is_near(FAR + 9) && !of(0).is_near(FAR << 12));
        let promised = 5 + FAR;
        assert!(of(5).is_near(promised + crate::LEAP) && !of(5).is_near(promised + FAR + 1));
        assert!(!of(u64::MAX).is_near(crate::LAST_EPOCH + 1));
    }

    #[test]
    fn only_members_of_this_life_change_a_view() {
        let (a, b) = (m("a", 1), m("b", 1));
        let r = Register::default().attach(&a, Some(&b), 2, false).unwrap();
        assert_eq!((r.version, r.epoch), (1, 2));
        // the mirror takes over, the old primary is out
        let s = r.take_over(&b, 5).unwrap();
        assert!(s.is_primary(&b) && s.mirror.is_none());
        assert_eq!(s.alone(&a), Err(Refusal::NotPrimary));
        assert_eq!(s.attach(&a, None, 6, true), Err(Refusal::NotPrimary));
        assert_eq!(s.take_over(&a, 6), Err(Refusal::NotMember));
        // an amnesiac mirror does not
        assert_eq!(r.take_over(&m("b", 2), 5), Err(Refusal::NotMember));
        assert_eq!(r.take_over(&b, 2), Err(Refusal::OldEpoch));
        // No epoch is begun twice, also not by the same primary.
        assert_eq!(r.attach(&a, None, 2, true), Err(Refusal::OldEpoch));
        assert_eq!(r.force(&b, 2), Err(Refusal::OldEpoch));
        assert!(r.attach(&a, None, 3, false).is_ok());
        // an amnesiac primary attaches only with what its mirror holds
        let a2 = m("a", 2);
        assert_eq!(r.attach(&a2, None, 4, false), Err(Refusal::NotMember));
        assert!(r.attach(&a2, Some(&b), 4, true).is_ok());
        // alone, then together again, in one epoch
        let alone = r.alone(&a).unwrap();
        assert_eq!(alone.take_over(&b, 5), Err(Refusal::NotMember));
        let again = alone.admit(&a, &m("b", 3), 2).unwrap();
        assert_eq!((again.version, again.epoch), (3, 2));
        // What the mirror has promised by then is remembered, and of no other one.
        assert!(r.is_forgotten(1) && !r.is_forgotten(2) && again.is_forgotten(1));
        assert!(!alone.is_forgotten(0) && !s.is_forgotten(0));
        // A raise is agreed on before the mirror hears of it.
        assert!(!again.raise(&a, 9).unwrap().is_forgotten(2));
        assert_eq!(again.raise(&a, 2), Err(Refusal::OldEpoch));
        assert_eq!(again.raise(&a, 9).unwrap().epoch, 9);
    }
}
