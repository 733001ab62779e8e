//! The view: who is primary, who must acknowledge, who follows behind. And
//! the only ways in which it changes.
//!
//! Decisions only. A view lies in a register that is changed by compare and
//! swap (`version`), kept by a majority of voters; a sync point never touches
//! it. The rule behind the transitions: **every member of the view holds every
//! acknowledged sync point**, so a view may only be proposed by one of its
//! predecessor's members, and only with members that hold them all.
//!
//! Mojim 4.3; docs/protocol.md, "Views in a register".

use serde::{Deserialize, Serialize};

/// A node in a view. Its incarnation is another one after it lost what it had
/// promised to hold: then it is no member any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The node's name.
    pub node: String,
    /// Which life of its copy.
    pub incarnation: u64,
}

/// One volume's view, as the register holds it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Register {
    /// Counts the changes; what compare and swap compares. 0: never written.
    pub version: u64,
    /// The epoch of the records that this view's primary makes. Greater with
    /// every other primary; the same while one only gains or loses a mirror.
    pub epoch: u64,
    /// Who may have sync points acknowledged.
    pub primary: Option<Member>,
    /// Who must acknowledge them; none while the primary is alone.
    pub mirror: Option<Member>,
}

/// Why a view does not change as proposed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Another node is the primary.
    NotPrimary,
    /// The node is not in the view, or was when it still held everything.
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

    /// Whether `m` is its primary, in this life.
    pub fn is_primary(&self, m: &Member) -> bool {
        self.primary.as_ref() == Some(m)
    }

    /// Whether `m` is its mirror, in this life.
    pub fn is_mirror(&self, m: &Member) -> bool {
        self.mirror.as_ref() == Some(m)
    }

    /// A primary attaches: it begins `epoch`, with `mirror` beside it, or alone.
    /// `adopted`: it has taken over all that the view's other member holds, so
    /// that it counts as a member whatever it was before.
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
            ..self.next()
        })
    }

    /// The primary says that it lives: nothing changes but the version.
    pub fn look(&self, me: &Member) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        Ok(self.next())
    }

    /// A mirror that holds everything becomes a member, in the same epoch.
    pub fn admit(&self, me: &Member, mirror: &Member) -> Result<Register, Refusal> {
        if !self.is_primary(me) {
            return Err(Refusal::NotPrimary);
        }
        Ok(Register {
            mirror: Some(mirror.clone()),
            ..self.next()
        })
    }

    /// The primary begins a greater epoch, since a mirror has promised one.
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

    /// The mirror becomes primary, alone at first. It has durably promised
    /// `epoch` before it asks.
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
            ..self.next()
        })
    }

    /// An operator makes `me` primary although it is no member: what only the
    /// members held is given up.
    pub fn force(&self, me: &Member, epoch: u64) -> Result<Register, Refusal> {
        if epoch <= self.epoch {
            return Err(Refusal::OldEpoch);
        }
        Ok(Register {
            epoch,
            primary: Some(me.clone()),
            mirror: None,
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
        // an amnesiac primary attaches only with what its mirror holds
        let a2 = m("a", 2);
        assert_eq!(r.attach(&a2, None, 4, false), Err(Refusal::NotMember));
        assert!(r.attach(&a2, Some(&b), 4, true).is_ok());
        // alone, then together again, in one epoch
        let alone = r.alone(&a).unwrap();
        assert_eq!(alone.take_over(&b, 5), Err(Refusal::NotMember));
        let again = alone.admit(&a, &m("b", 3)).unwrap();
        assert_eq!((again.version, again.epoch), (3, 2));
        assert_eq!(again.raise(&a, 2), Err(Refusal::OldEpoch));
        assert_eq!(again.raise(&a, 9).unwrap().epoch, 9);
    }
}
