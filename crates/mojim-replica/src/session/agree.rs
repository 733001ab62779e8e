//! The plan after the mirror's answer to the greeting: which copy both nodes will have.
//!
//! The plan also says what would be lost by that.
//!
//! Invariant: nothing is changed on either node before this is decided. A plan that would
//! lose what was acknowledged is refused (`mojim_protocol::loss`).

use super::*;

/// Why what a node says that it has promised or begun is not believed.
fn far(node: &str, volume: &str, epoch: u64) -> Error {
    Error::Invalid(format!(
        "node {node} has promised or begun epoch {epoch} of volume {volume}: nobody can have come as far, so a node that had no right to do so told it that. It follows nobody any more. docs/how-to/impossible-epoch.md says how to give its copy up for another"
    ))
}

impl Session {
    /// Decides which copy both nodes will have, by the mirror's answer to the greeting, and
    /// begins to bring it about.
    pub(super) fn agree(&mut self, w: Welcome) -> Result<()> {
        let store = self.policy.primary.store.clone();
        let theirs = theirs(&w)?;
        self.check_known_epoch(theirs.history.last_epoch())?;
        self.meet(&w)?;
        // What is in the logs now stays there until the lanes are open.
        store.freeze(true);
        let tail = if self.policy.attach {
            store.tail()
        } else {
            self.policy.primary.last()
        };
        let ours = store.holding(tail);
        let plan = self.plan_for(&ours, &theirs);
        if plan == Plan::CopyFrom {
            let lacks = self.may_lack(w.member, theirs.volume_id);
            let lacks = lacks.filter(|_| !self.policy.adopting);
            self.refuse_loss(lacks.map(Loss::Copy), &ours, &theirs, &w)?;
        }
        self.weigh_loss(&plan, &ours, &theirs, &w)?;
        match plan {
            Plan::Resend { from } => self.resend(from, tail),
            Plan::CopyTo => {
                self.exclude_mirror("is to get a whole copy")?;
                self.copy_out()
            }
            Plan::CopyFrom => {
                self.policy.adopting = true;
                let wire = self.wire.as_mut().expect("connected");
                wire.queue(FrameKind::CopyRequest, self.policy.epoch, 0, 0, &[]);
                self.phase = Phase::Asked;
                Ok(())
            }
            Plan::Foreign => {
                let e = Error::Invalid(format!(
                    "nodes {} and {} hold different volumes of this name; remove one of the copies (its directory and its part of .mojim) to have the other copied there",
                    self.me, self.peer.name
                ));
                if self.policy.attach {
                    self.policy.fatal = Some(e.clone());
                }
                Err(e)
            }
            Plan::Nothing => {
                self.policy.loss = (w.known > 0).then_some(Loss::Known(w.known));
                let (volume, peer) = (&self.policy.primary.store.spec().volume, &self.peer.name);
                let e = Error::Invalid(match w.known {
                    0 => "no usable copy is left on either node: both lost theirs, or a copy between them was interrupted and its source is gone; restore one".into(),
                    known => format!(
                        "this node has no copy of volume {volume}, and that of node {peer} is to be made anew, by an operator's word or since its log is damaged: sync points up to LSN {known} may have been acknowledged. Restore a copy, or go on with what is there: `mojim promote --force --volume {volume} --name {peer}`"
                    ),
                });
                self.policy.fatal = Some(e.clone());
                Err(e)
            }
        }
    }

    /// An attach begins a later epoch than any that the mirror knows, `theirs` at most.
    fn check_known_epoch(&mut self, theirs: u64) -> Result<()> {
        if !self.is_near(theirs) {
            return Err(self.far(theirs));
        }
        // A node that comes back empty knows no epoch, and its copy may come from a
        // mirror that has promised none above this one's.
        if self.policy.attach && theirs >= self.policy.epoch {
            self.policy.epoch = self.policy.primary.store.next_epoch(theirs);
            return Err(Error::Protocol(format!(
                "node {} knows epoch {theirs}: a later one is begun",
                self.peer.name
            )));
        }
        Ok(())
    }

    /// Takes down what the mirror is and can do; an error if it cannot have one of the
    /// files.
    fn meet(&mut self, w: &Welcome) -> Result<()> {
        self.policy.primary.other_end.is_at(w.level);
        if let Some(views) = &mut self.policy.views {
            views.client.peer = Some(Member {
                node: self.peer.name.clone(),
                incarnation: w.life,
            });
        }
        let limits = Limits::of(w);
        if let Some(why) = exceeds(&self.policy.primary.store, &self.peer.name, limits) {
            return Err(self.copy_failed(why));
        }
        self.policy.primary.other_end.has_limits(limits);
        Ok(())
    }

    /// What is to be done about what both nodes have.
    fn plan_for(&self, ours: &Holding, theirs: &Holding) -> Plan {
        let store = &self.policy.primary.store;
        match reconcile(ours, theirs, store.oldest(), self.policy.attach) {
            Plan::Resend { .. } if self.force_copy => Plan::CopyTo,
            plan => plan,
        }
    }

    /// Refuses a plan that loses what was acknowledged. If a plan goes on without what is
    /// lost anyway, or puts this copy over the other one, the mirror is no member before
    /// it has caught up.
    fn weigh_loss(
        &mut self,
        plan: &Plan,
        ours: &Holding,
        theirs: &Holding,
        w: &Welcome,
    ) -> Result<()> {
        if self.policy.attach {
            let known = KnownAcknowledged {
                primary: self.policy.primary.store.known_acknowledged(),
                mirror: w.known,
                ring_lost: self.misses_ring(),
                member: w.member,
            };
            self.refuse_loss(loss(plan, ours, theirs, known), ours, theirs, w)?;
            let kept = match plan {
                Plan::CopyFrom => theirs,
                _ => ours,
            };
            self.ask_told(kept)?;
        }
        // The log of a mirror may be damaged, even if this copy lacks nothing.
        let lost = self.policy.attach
            && self.policy.paired_rule.mirror
            && (self.has_forgotten(theirs, w)
                || has_lost(
                    plan,
                    self.policy.primary.store.known_acknowledged().max(w.known),
                ));
        if let Some(views) = &mut self.policy.views {
            views.client.adopted = !lost && matches!(plan, Plan::Resend { .. } | Plan::CopyFrom);
            if self.policy.attach && (lost || *plan == Plan::CopyTo) {
                // A copy that the register would refuse does not replace the other copy.
                views.client.check_copy_to(&self.policy.primary.store)?;
                // The mirror will have everything only when it has caught up.
                self.policy.member = false;
            }
        }
        if lost {
            self.policy.member = false;
        }
        Ok(())
    }

    /// Whether the mirror that the register names has not come to the epoch in which it was named,
    /// and counts as no mirror itself: its copy is of an earlier time.
    fn has_forgotten(&self, theirs: &Holding, w: &Welcome) -> bool {
        let reg = self.policy.views.as_ref().map(|v| &v.client.register);
        let named = |r: &&Register| r.mirror.as_ref().is_some_and(|m| m.node == self.peer.name);
        let knows = theirs.history.last_epoch();
        !w.member && reg.filter(named).is_some_and(|r| r.is_forgotten(knows))
    }

    /// Sends the mirror the records above `from`; `tail` is the last one as yet.
    fn resend(&mut self, from: u64, tail: u64) -> Result<()> {
        if self.policy.member
            && from
                < self
                    .policy
                    .primary
                    .store
                    .whole(self.policy.primary.acked.get())
        {
            self.exclude_mirror("has less than it acknowledged")?;
        }
        // A mirror that joins again may hold records of an older epoch beyond what is
        // common: they must go. Within one epoch, what it has out of order is right.
        let keep = match (self.policy.attach, self.policy.member) {
            (true, _) => tail,
            (false, true) => u64::MAX,
            (false, false) => from,
        };
        self.start(from, keep)
    }

    /// A running primary's mirror lacks something that it acknowledged, or gets another copy in
    /// place of what it has: it is no member until it holds everything again; durably, so that
    /// the next attach knows it too. With a register it leaves the view first: this node may
    /// fail before the register names the new copy, and then no node could go on.
    fn exclude_mirror(&mut self, why: &str) -> Result<()> {
        if self.policy.attach {
            return Ok(());
        }
        if self.policy.member {
            self.commit_locally()?;
            let store = &self.policy.primary.store;
            store.update(|s| s.view.mirror = JOINING.into())?;
            self.policy.member = false;
        }
        let Some(views) = &mut self.policy.views else {
            return Ok(());
        };
        if !self.policy.primary.spec.rule.mirror || self.policy.alone {
            return Ok(());
        }
        views.leaving = true;
        Err(Error::Protocol(format!(
            "node {} {why}: it leaves the view first",
            self.peer.name
        )))
    }

    /// Whether this node lost its ring in a mode that counts on the mirror alone, and no
    /// register says which node still has its records.
    pub(super) fn misses_ring(&self) -> bool {
        let store = &self.policy.primary.store;
        let is_lost = store.superblock().ring_lost && !store.mutations.forget_ring.is_on();
        is_lost && self.policy.views.is_none() && !self.policy.primary.spec.rule.local
    }

    /// Why the mirror's copy (`member`: a member's; of `volume`) may lack what this node,
    /// whose own is empty, acknowledged without it. `None` if this node's is not empty: a
    /// copy that has all of it and more may be taken.
    pub(super) fn may_lack(&self, member: bool, volume: u64) -> Option<Lacks> {
        let sb = self.policy.primary.store.superblock();
        // A volume that began anew while the mirror's copy was away knows nothing of it.
        let began_anew = sb.state != State::Empty && sb.volume_id != volume;
        if sb.state != State::Empty && !began_anew {
            return None;
        }
        let is_new = sb.view.epoch == 0 || began_anew;
        if !member && (is_new || !self.policy.member) {
            return Some(Lacks::CatchingUp);
        }
        if self.policy.views.is_some() {
            return None;
        }
        if !is_new && !self.policy.member {
            return Some(Lacks::Alone);
        }
        (!self.policy.paired_rule.mirror).then_some(Lacks::Behind)
    }

    pub(super) fn refused(&mut self, r: Refuse) -> Error {
        let text = format!("node {}: {}", self.peer.name, r.text);
        if self.is_copying_out() {
            return self.copy_failed(text);
        }
        match r.code {
            RefuseCode::StaleEpoch if !self.is_near(r.epoch) => self.far(r.epoch),
            RefuseCode::StaleEpoch if self.policy.attach => {
                self.policy.epoch = self
                    .policy
                    .epoch
                    .max(self.policy.primary.store.next_epoch(r.epoch));
                Error::Protocol(text)
            }
            RefuseCode::Superseded => self.superseded(text),
            RefuseCode::StaleEpoch => self.outbid(r.epoch, Error::Stale(text)),
            RefuseCode::UnknownPeer | RefuseCode::Foreign if self.policy.attach => {
                self.policy.fatal = Some(Error::Invalid(text.clone()));
                Error::Protocol(text)
            }
            RefuseCode::Foreign => {
                // The primary goes on without that node, which an operator has to look at.
                self.backoff = COPY_AGAIN;
                Error::Protocol(text)
            }
            code => Error::Refused { code, text },
        }
    }

    /// The peer names an epoch that it cannot have: it is not followed.
    fn far(&mut self, epoch: u64) -> Error {
        let e = far(
            &self.peer.name,
            &self.policy.primary.store.spec().volume,
            epoch,
        );
        if self.policy.attach {
            self.policy.fatal = Some(e.clone());
        }
        e
    }

    /// Whether the peer can have promised or begun this epoch.
    fn is_near(&self, epoch: u64) -> bool {
        let store = &self.policy.primary.store;
        let sb = store.superblock();
        let mut begun = store.history().last_epoch().max(sb.view.epoch);
        if let Some(views) = &self.policy.views {
            begun = begun.max(views.client.register.epoch);
        }
        may_outbid(epoch, begun, self.policy.epoch.max(sb.promised))
    }

    /// The peer follows a newer view than this node knows. With a register, views are
    /// begun only after it has agreed: if it knows nothing newer either, an operator
    /// promoted the peer by hand, and what the peer has acknowledged is not here.
    pub(super) fn superseded(&mut self, text: String) -> Error {
        let mut e = Error::Stale(text.clone());
        if self.policy.attach
            && let Some(views) = &mut self.policy.views
        {
            match views.client.view_to_attach(&self.policy.primary.store) {
                Ok(epoch) if epoch > views.hello_view_epoch => return Error::Protocol(text),
                Ok(_) => {
                    e = Error::Stale(format!(
                        "{text}. The register of views does not know that view: it was made by hand while `failover` was manual. `mojim promote --force` on the node that is to go on settles it"
                    ));
                }
                Err(stale @ Error::Stale(_)) => e = stale,
                Err(e) => return e,
            }
        }
        self.policy.primary.supersede(e.clone());
        self.policy.fatal = Some(e.clone());
        e
    }

    /// What only the lost ring held may be on the mirror alone. Another node that the
    /// configuration names as the mirror now does not have it.
    pub(super) fn misses_mirror(&mut self) -> Result<()> {
        let sb = self.policy.primary.store.superblock();
        let mirror = &sb.view.mirror;
        let replaced = !mirror.is_empty() && *mirror != self.peer.name && mirror != JOINING;
        if !self.policy.attach || !replaced || !self.misses_ring() {
            return Ok(());
        }
        let e = Error::Invalid(format!(
            "this node lost its power. Node {mirror} was the mirror of volume {}, and may be the only one with its last sync points. Node {} in its place does not have them. Name {mirror} as the mirror again, or promote it. If it is lost for good, `mojim promote --volume {} --name {}` goes on without them",
            sb.volume, self.peer.name, sb.volume, self.me
        ));
        self.policy.fatal = Some(e.clone());
        Err(e)
    }
}
