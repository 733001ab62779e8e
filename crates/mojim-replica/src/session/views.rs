//! A session and the register of views: what the primary asks it, and what follows from
//! its answers.
//!
//! Invariant: no link waits for the register. A change that was asked for counts as made
//! and as not made until the answer is here.

use super::*;

impl Session {
    /// In a cluster with a register: no epoch is begun without it, and a mirror that
    /// stays away is given up. Then one of the `candidates` that is forwarded to takes
    /// its place.
    pub fn with_views(
        mut self,
        view_client: ViewClient,
        candidates: Arc<Holders>,
    ) -> Result<Session> {
        let store = &self.policy.primary.store;
        let sb = store.superblock();
        // What only the lost ring held may have been acknowledged, by the mirror alone:
        // this copy does not count as a member's any more. Once for a loss, since the
        // register may name the new life before this node begins the epoch. That the ring
        // was lost stays on record until then: without a register, nothing else tells.
        let is_lost = sb.ring_lost && !sb.renewed && !store.mutations.forget_ring.is_on()
            || store.mutations.other_life.is_on();
        if is_lost && !self.policy.primary.spec.rule.local {
            let life = store.env().random();
            store.update(|s| {
                s.life = life;
                s.renewed = s.ring_lost;
            })?;
        }
        self.silence = self.silence.min(view_client.limit);
        self.heartbeat = self.heartbeat.min(view_client.limit / 4);
        let now = store.env().now();
        self.policy.views = Some(Views::new(view_client, candidates, now));
        Ok(self)
    }

    /// If a backup takes over by itself when primary and mirror are lost (`fallback =
    /// "automatic"`): nothing is committed while no majority of voters can be reached.
    pub fn leased(mut self) -> Session {
        if let Some(views) = &mut self.policy.views {
            views.leased = true;
        }
        self
    }

    /// If this primary is alone and its mirror stays away, the backup that has most takes
    /// its place: in an epoch of its own, so that each epoch has one mirror, and a
    /// replaced one that does not know it yet is no node's upstream. True if the register
    /// was asked.
    pub(super) fn replace_mirror(&mut self, now: Duration) -> bool {
        let Some(views) = &mut self.policy.views else {
            return false;
        };
        let patience = views.client.limit * REPLACE;
        let gone = now.saturating_sub(views.absent);
        if self.policy.attach || !self.policy.alone || !views.client.may_try(now) || gone < patience
        {
            return false;
        }
        let all = self.policy.primary.backups.progress();
        let active = all
            .iter()
            .filter(|b| b.active.load(Acquire) && b.name != self.peer.name);
        let Some(best) = active.max_by_key(|b| b.acked.load(Acquire)) else {
            return false;
        };
        let Some(peer) = views.candidates.find(&best.name) else {
            return false;
        };
        let store = &self.policy.primary.store;
        if store.mutations.keep_epoch.is_on() {
            self.turn_to(peer);
            return false;
        }
        views.successor = Some(peer);
        views.raise_for_backup = false;
        let known = views.client.register.epoch.max(store.superblock().promised);
        let epoch = store.next_epoch(known.max(self.policy.epoch));
        self.ask(ViewChange::Raise(epoch));
        true
    }

    /// Whether the register knows this node as a primary that is alone: then there is no
    /// mirror to wait for.
    pub fn is_alone_by_register(&mut self) -> Result<bool> {
        match &mut self.policy.views {
            None => Ok(false),
            Some(views) => {
                let may = views.client.may_attach_alone(&self.policy.primary.store)?;
                Ok(may && views.client.register.mirror.is_none())
            }
        }
    }

    /// By the register: whether this node may attach without its mirror. `None` without a
    /// register.
    pub fn may_attach_alone(&mut self) -> Option<Result<bool>> {
        let views = self.policy.views.as_mut()?;
        Some(views.client.may_attach_alone(&self.policy.primary.store))
    }

    /// The primary goes on without its mirror, which will join later; also after a
    /// promotion, whose view has no mirror.
    pub fn go_alone(&mut self) -> Result<()> {
        assert!(self.policy.attach);
        if self.is_asking() {
            return Err(Error::Timeout(
                "the register of views does not answer".into(),
            ));
        }
        if self.policy.adopting {
            return Err(Error::Timeout(format!(
                "node {} has a copy of this volume, and the link to it broke while it was copied here; try again when it can be reached",
                self.peer.name
            )));
        }
        self.abandon_link("");
        let store = &self.policy.primary.store;
        let kept = store.holding(store.tail());
        self.ask_told(&kept)?;
        self.policy.epoch = self.policy.epoch.max(self.unused_epoch());
        if let Some(views) = &mut self.policy.views {
            // An earlier try may have begun an epoch that only the register knows.
            let known = views.client.view_to_attach(&self.policy.primary.store)?;
            self.policy.epoch = self
                .policy
                .epoch
                .max(self.policy.primary.store.next_epoch(known));
        }
        self.may_begin()?;
        let view = View {
            epoch: self.policy.epoch,
            primary: self.me.clone(),
            mirror: String::new(),
        };
        self.begin(view)?;
        self.policy.primary.set_rule(AckRule::LOCAL);
        self.policy.alone = true;
        if let Some(views) = &mut self.policy.views {
            views.absent = self.policy.primary.store.env().now();
        }
        self.policy.attach = false;
        self.policy.member = false;
        self.policy.primary.serve();
        Ok(())
    }

    /// Whether the register was asked for another view and has not answered.
    pub fn is_asking(&self) -> bool {
        self.policy
            .views
            .as_ref()
            .is_some_and(|v| v.client.is_asking())
    }

    /// Begins the epoch without a mirror.
    pub(super) fn begin(&mut self, view: View) -> Result<()> {
        // A mirror that does not answer may have what an empty copy lacks.
        assert_ne!(self.policy.primary.store.superblock().state, State::Empty);
        if let Some(views) = &mut self.policy.views {
            let claimed = views
                .client
                .attach_alone(&self.policy.primary.store, self.policy.epoch);
            self.claimed(claimed)?;
        }
        self.policy.adopted_lsn = self.policy.primary.begin(self.policy.epoch, view)?;
        Ok(())
    }

    /// Takes the register's answer to an attach.
    pub(super) fn claimed(&mut self, r: Result<()>) -> Result<()> {
        match &r {
            Ok(()) => {}
            Err(e @ Error::Stale(_)) => self.policy.fatal = Some(e.clone()),
            Err(_) => self.skip_epochs(),
        }
        r
    }

    /// The next try begins an epoch that the register does not know yet.
    pub(super) fn skip_epochs(&mut self) {
        if let Some(views) = &self.policy.views {
            let next = self
                .policy
                .primary
                .store
                .next_epoch(views.client.register.epoch);
            self.policy.epoch = self.policy.epoch.max(next);
        }
    }

    pub(super) fn ask(&mut self, change: ViewChange) {
        let views = self.policy.views.as_mut().expect("the caller has one");
        views.asked_on = self.number;
        views.raise_for_backup &=
            matches!(change, ViewChange::Raise(_)) && views.successor.is_none();
        views.client.ask(&self.policy.primary.store, change);
    }

    /// Takes the register's answer, if it has come; true if so.
    pub(super) fn hear_register(&mut self, now: Duration) -> Result<bool> {
        let Some(views) = &mut self.policy.views else {
            return Ok(false);
        };
        let Some((change, outcome)) = views.client.answer(now) else {
            return Ok(false);
        };
        let same_link = views.asked_on == self.number;
        let was_alone = views.was_alone;
        // Only an epoch that was asked for names another mirror.
        let successor = views
            .successor
            .take_if(|_| matches!(change, ViewChange::Alone | ViewChange::Raise(_)));
        let p = self.policy.primary.clone();
        let Outcome {
            swapped, result, ..
        } = outcome;
        if let Err(e @ Error::Stale(_)) = &result {
            // Only the caller of an attach waits for it.
            if !self.policy.attach {
                p.supersede(e.clone());
            }
            self.policy.fatal = Some(e.clone());
            return Err(e.clone());
        }
        match (change, result) {
            (ViewChange::Attach { .. }, result) => {
                let Phase::Claiming { resume, keep } = self.phase else {
                    // The link that this was asked for is gone.
                    self.skip_epochs();
                    return Ok(true);
                };
                self.claimed(result)?;
                self.policy.adopted_lsn = p.begin(self.policy.epoch, self.view())?;
                self.send_terms(resume, keep);
            }
            (ViewChange::Alone, Ok(())) => self.left_alone()?,
            (ViewChange::Admit(_), Ok(())) if same_link && self.is_active() => self.admitted()?,
            // The node that was admitted is in the view, and has to be linked again.
            (ViewChange::Admit(_), Ok(())) => {}
            (ViewChange::Admit(_), Err(e)) => {
                let doubt = swapped && !p.store.mutations.admit_in_doubt.is_on();
                if !doubt && was_alone {
                    self.policy.alone = true;
                    if !self.is_active() {
                        p.set_rule(AckRule::LOCAL);
                        p.wake_all();
                    }
                }
                self.last_error = Some(e.to_string());
            }
            (ViewChange::Raise(epoch), Ok(())) => {
                if !matches!(self.phase, Phase::Idle(_)) {
                    // The link is of the epoch before.
                    self.abandon_link("another epoch begins");
                }
                p.raise(epoch)?;
                self.policy.epoch = epoch;
                if let Some(peer) = successor {
                    self.turn_to(peer);
                }
            }
            (ViewChange::Look, Ok(())) => {}
            (ViewChange::Look, Err(e)) => self.last_error = Some(e.to_string()),
            (ViewChange::Alone | ViewChange::Raise(_), Err(e)) => {
                self.last_error = Some(e.to_string());
            }
        }
        Ok(true)
    }

    /// The register knows this primary as one without a mirror.
    pub(super) fn left_alone(&mut self) -> Result<()> {
        let p = self.policy.primary.clone();
        p.store.update(|s| s.view.mirror.clear())?;
        self.policy.alone = true;
        if let Some(views) = &mut self.policy.views {
            views.leaving = false;
            views.absent = p.store.env().now();
        }
        if !self.is_active() {
            p.set_rule(AckRule::LOCAL);
        }
        // A thread that appended meanwhile waits for its log, not for the mirror.
        for lane in 0..p.lanes.len() {
            p.persist_wait(lane)?;
        }
        p.wake_all();
        self.show_adopted()
    }

    /// Where a backup may take over by itself: a primary that has not heard for `limit`
    /// that it still is one commits nothing. Each question changes the register's
    /// version; a backup takes over only after it has seen no change for longer than
    /// that.
    pub(super) fn keep_lease(&mut self, now: Duration) {
        let Some(views) = self
            .policy
            .views
            .as_ref()
            .filter(|v| v.leased && !self.policy.attach)
        else {
            return;
        };
        let look = views.client.should_look(now);
        let broken = &self.policy.primary.store.mutations;
        if !broken.ignore_lease.is_on() {
            self.policy
                .primary
                .lease_until(views.client.confirmed + views.client.limit);
        }
        match now.saturating_sub(views.client.confirmed) < views.client.limit {
            true => self.policy.primary.let_go(),
            false if broken.ignore_lease.is_on() => {}
            false => self.policy.primary.hold(),
        }
        if look {
            self.ask(ViewChange::Look);
        }
    }

    /// A running primary whose mirror stays away, or comes and goes, takes it
    /// out of the view, if it is time; sync points wait until then.
    pub(super) fn give_up_mirror(&mut self, now: Duration) -> Result<()> {
        let active = self.is_active();
        let needed =
            !self.policy.attach && !self.policy.alone && self.policy.primary.spec.rule.mirror;
        let Some(views) = &mut self.policy.views else {
            return Ok(());
        };
        if !needed {
            views.client.needs_none(now);
            return Ok(());
        }
        views.client.watch(now, active);
        let due = views.leaving || !active && views.client.is_due();
        if !due || !views.client.may_try(now) {
            return Ok(());
        }
        // From here on, whatever the answer and even if none comes, the mirror is no
        // member before it is admitted again.
        self.policy.member = false;
        self.commit_locally()?;
        if self
            .policy
            .primary
            .store
            .mutations
            .alone_without_view
            .is_on()
        {
            return self.left_alone();
        }
        self.ask(ViewChange::Alone);
        Ok(())
    }

    /// From now on nothing is committed that is not persistent in the own log, and
    /// everything committed already is: so it must be before the mirror leaves the view.
    pub(super) fn commit_locally(&mut self) -> Result<()> {
        let p = &self.policy.primary;
        if p.store.mutations.alone_in_ring.is_on() {
            return Ok(());
        }
        if p.rule().mirror {
            p.set_rule(AckRule::BOTH);
        }
        for lane in 0..p.lanes.len() {
            p.persist_wait(lane)?;
        }
        p.update_risk(false);
        Ok(())
    }

    /// The mirror has promised an epoch above this one. In a cluster with a register this
    /// alone does not end a primary: the register says which node is the primary.
    pub(super) fn outbid(&mut self, promised: u64, e: Error) -> Error {
        let p = self.policy.primary.clone();
        let Some(views) = &mut self.policy.views else {
            p.supersede(e.clone());
            self.policy.fatal = Some(e.clone());
            return e;
        };
        if views.client.may_try(p.store.env().now()) {
            let epoch = p.store.next_epoch(promised.max(self.policy.epoch));
            views.raise_for_backup = false;
            self.ask(ViewChange::Raise(epoch));
        }
        Error::Protocol(e.to_string())
    }

    /// A node that is no member has promised an epoch above this one (it tried in vain to
    /// become primary): it follows no node before a greater one is begun. Everything goes
    /// on until the register has agreed; then the link to the mirror is made anew. So
    /// that this does not happen again and again, the pause grows each time, and no epoch
    /// is begun if many have begun since a checkpoint.
    pub(super) fn raise_epoch_for_backup(&mut self, now: Duration) {
        let promised = self.policy.primary.backups.outbid();
        let (active, store) = (self.is_active(), &self.policy.primary.store);
        let Some(views) = &mut self.policy.views else {
            return;
        };
        // A new epoch makes links, and copies over them, begin anew.
        let copying = store.progress.get(now).is_some_and(|c| c.running);
        let settled = (active && self.policy.member || self.policy.alone) && !copying;
        if self.policy.attach
            || !settled
            || views.leaving
            || promised <= self.policy.epoch
            || now < views.outbid_next
            || !views.client.may_try(now)
            || store.history().entries().len() > MOST_EPOCHS
        {
            return;
        }
        let pause = views.outbid_pause.max(views.client.limit);
        views.outbid_pause = (pause * 2).min(OUTBID_PAUSE);
        views.outbid_next = now + pause;
        let known = promised
            .max(views.client.register.epoch)
            .max(self.policy.epoch);
        let epoch = store.next_epoch(known);
        views.raise_for_backup = true;
        self.ask(ViewChange::Raise(epoch));
    }

    /// The mirror on the link is a member of the view.
    pub(super) fn admitted(&mut self) -> Result<()> {
        self.policy.member = true;
        let view = self.view();
        let p = &self.policy.primary;
        p.store.update(|s| s.view = view)?;
        p.set_rule(self.policy.paired_rule);
        self.policy.alone = false;
        self.policy.rejoin_lsn = None;
        self.beat = 0;
        self.show_adopted()
    }

    /// While records flow: is the attach complete, is the mirror a member?
    pub(super) fn check_membership(&mut self) -> Result<()> {
        let p = &self.policy.primary;
        if !self.policy.member {
            // From here on nothing is acknowledged without the mirror; once the mirror has
            // everything that was acknowledged, it counts. Until then the own log counts
            // too, so that a primary that was alone can go on alone.
            if self.policy.paired_rule.mirror {
                p.set_rule(AckRule::BOTH);
            }
            let all = *self.policy.rejoin_lsn.get_or_insert_with(|| p.last());
            if p.acked.get() >= all || p.store.mutations.admit_early.is_on() {
                let Some(views) = self
                    .policy
                    .views
                    .as_mut()
                    .filter(|_| self.policy.paired_rule.mirror)
                else {
                    return self.admitted();
                };
                let now = p.store.env().now();
                if let Some(peer) = views.client.peer.clone()
                    && views.client.may_try(now)
                {
                    // From now on the mirror may be a member: nothing is
                    // acknowledged without it, also if the answer is lost and
                    // then the link, until the register says otherwise.
                    views.was_alone = std::mem::take(&mut self.policy.alone);
                    self.ask(ViewChange::Admit(peer));
                }
            }
        }
        self.show_adopted()
    }

    /// Shows the application what was adopted, once it is as safe as the rule asks, and
    /// the mirror, if linked, is in the view. Otherwise first sync points could be
    /// acknowledged while no node may take over, though the mirror holds them.
    pub(super) fn show_adopted(&mut self) -> Result<()> {
        let p = &self.policy.primary;
        if p.ready.load(Acquire) || p.committed() < self.policy.adopted_lsn {
            return Ok(());
        }
        let joins = !self.policy.member && self.is_active() && self.policy.paired_rule.mirror;
        let admit_by = self
            .policy
            .views
            .as_ref()
            .map_or(Duration::ZERO, |v| v.admit_by);
        let waits = joins && p.store.env().now() < admit_by;
        if waits && !p.store.mutations.ready_early.is_on() {
            return Ok(());
        }
        // As much at a time as the area's memory takes.
        let mut before = None;
        while p.store.applied() < self.policy.adopted_lsn && before != Some(p.store.applied()) {
            before = Some(p.store.applied());
            p.store.apply(self.policy.adopted_lsn, usize::MAX)?;
        }
        if p.store.applied() >= self.policy.adopted_lsn {
            if let Some(views) = self.policy.views.as_ref().filter(|v| v.leased) {
                p.lease_until(views.client.confirmed + views.client.limit);
            }
            p.serve();
            p.wake_all();
        }
        Ok(())
    }
}
