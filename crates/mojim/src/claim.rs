//! What a primary says to the register of views.
//!
//! Owns the register as this primary last knew it and the life of the mirror
//! that it speaks to. Every method is one read, one decision (`view` of
//! mojim-protocol) and one swap; what the answer means for the link is the
//! session's affair.
//!
//! Invariants:
//! - The register is read before it is swapped, and nothing is done on the
//!   strength of a swap whose outcome is not known: the next try reads again.
//! - A primary that is not in the register any more says so (`Error::Stale`)
//!   and never tries again.

use std::sync::Arc;
use std::time::Duration;

use mojim_protocol::view::{Member, Refusal, Register};

use crate::error::{Error, Result};
use crate::store::Store;
use crate::views::Views;

/// How often what failed is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// A primary's hold on the register.
pub struct Claim {
    views: Arc<dyn Views>,
    /// Silence after which a mirror counts as failed.
    pub(crate) limit: Duration,
    /// The register as last read or written.
    pub(crate) register: Register,
    /// The mirror on the present link.
    pub(crate) peer: Option<Member>,
    /// All that the view's mirror holds is here.
    pub(crate) adopted: bool,
    down_since: Option<Duration>,
    next_try: Duration,
}

/// This node as a member, in the life of its copy.
pub fn member(store: &Store) -> Member {
    let sb = store.superblock();
    Member {
        node: sb.node,
        incarnation: sb.life,
    }
}

impl Claim {
    /// A claim that nothing is known of. `limit`: silence after which a mirror
    /// counts as failed.
    pub fn new(views: Arc<dyn Views>, limit: Duration) -> Claim {
        Claim {
            views,
            limit,
            register: Register::default(),
            peer: None,
            adopted: false,
            down_since: None,
            next_try: Duration::ZERO,
        }
    }

    fn read(&mut self, store: &Store) -> Result<Register> {
        self.register = self.views.read(&store.spec().volume)?;
        Ok(self.register.clone())
    }

    fn swap(&mut self, store: &Store, new: Register) -> Result<()> {
        if !self.views.swap(&store.spec().volume, &new)? {
            return Err(Error::Protocol("the view changed meanwhile".into()));
        }
        self.register = new;
        Ok(())
    }

    fn refused(&self, store: &Store, why: Refusal) -> Error {
        let r = &self.register;
        let spec = store.spec();
        let primary = r.primary.as_ref().map_or("nobody", |p| &p.node);
        match why {
            Refusal::NotPrimary => Error::Stale(format!(
                "node {primary} is the primary of volume {} since epoch {}; run the program there",
                spec.volume, r.epoch
            )),
            Refusal::NotMember => Error::Protocol(format!(
                "this node's copy of volume {} lost what it held as node of the view; it waits for {}",
                spec.volume,
                r.mirror
                    .as_ref()
                    .map_or("`mojim promote --force`", |m| &m.node)
            )),
            Refusal::OldEpoch => {
                Error::Protocol(format!("epoch {} is in the register already", r.epoch))
            }
        }
    }

    /// Whether this node may attach without asking its mirror, by the register.
    pub fn may_attach_alone(&mut self, store: &Store) -> Result<bool> {
        let me = member(store);
        Ok(self.read(store)?.is_primary(&me))
    }

    /// The epoch of the view in which this node is to attach; an error if it
    /// is another's.
    pub(crate) fn view_to_attach(&mut self, store: &Store) -> Result<u64> {
        let reg = self.read(store)?;
        match &reg.primary {
            Some(p) if p.node != store.spec().node => Err(self.refused(store, Refusal::NotPrimary)),
            _ => Ok(reg.epoch),
        }
    }

    /// An attach begins `epoch`. With `mirror`, the mirror on the link is a
    /// member too.
    pub(crate) fn attach(&mut self, store: &Store, epoch: u64, mirror: bool) -> Result<()> {
        let reg = self.read(store)?;
        let peer = self.peer.clone().filter(|_| mirror);
        // What the view's mirror holds was compared with what is here only if
        // it is the one on the link.
        let adopted = self.adopted && reg.mirror.is_some() && reg.mirror == self.peer;
        let new = reg
            .attach(&member(store), peer.as_ref(), epoch, adopted)
            .map_err(|why| self.refused(store, why))?;
        self.swap(store, new)
    }

    /// Whether the mirror has been gone for so long that the view should
    /// change, and it is time to try. `up`: the link works.
    pub(crate) fn is_due(&mut self, now: Duration, up: bool) -> bool {
        if up {
            self.down_since = None;
            return false;
        }
        let since = *self.down_since.get_or_insert(now);
        if now - since < self.limit || now < self.next_try {
            return false;
        }
        self.next_try = now + AGAIN;
        true
    }

    /// What was tried at last failed, as of `now`.
    pub(crate) fn failed(&mut self, now: Duration) {
        self.next_try = now + AGAIN;
    }

    /// The mirror is given up: from now on this primary is alone.
    pub(crate) fn alone(&mut self, store: &Store) -> Result<()> {
        let reg = self.read(store)?;
        let me = member(store);
        // Also where the register says so already: an admission whose answer
        // was lost may still be on its way to it, and fails from now on.
        let new = reg.alone(&me).map_err(|why| self.refused(store, why))?;
        self.swap(store, new)
    }

    /// The mirror on the link holds everything: it becomes a member.
    /// `asking` is called before the register is asked to change.
    pub(crate) fn admit(
        &mut self,
        store: &Store,
        now: Duration,
        asking: impl FnOnce(),
    ) -> Result<()> {
        let Some(peer) = self.peer.clone() else {
            return Err(Error::Protocol("the mirror has not said who it is".into()));
        };
        if now < self.next_try {
            return Err(Error::Timeout(
                "the register of views does not answer".into(),
            ));
        }
        self.next_try = now + AGAIN;
        let reg = self.read(store)?;
        let me = member(store);
        if reg.is_primary(&me) && reg.is_mirror(&peer) {
            asking();
            return Ok(());
        }
        let new = reg
            .admit(&me, &peer)
            .map_err(|why| self.refused(store, why))?;
        asking();
        self.swap(store, new)
    }

    /// The mirror promised an epoch that is not this primary's: either it is
    /// primary now, or it tried in vain, and a greater epoch is begun.
    pub(crate) fn raise(&mut self, store: &Store, epoch: u64) -> Result<()> {
        let reg = self.read(store)?;
        let me = member(store);
        if reg.is_primary(&me) && reg.epoch == epoch {
            return Ok(());
        }
        let new = reg
            .raise(&me, epoch)
            .map_err(|why| self.refused(store, why))?;
        self.swap(store, new)
    }
}
