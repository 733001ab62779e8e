//! How a mirror, or a backup, becomes primary.
//!
//! Invariants:
//! - The epoch is promised durably, and the lanes are stopped, before the register is asked.
//! - Before that the data files are looked at: a copy that no program could use stays as it is.

use super::*;
use crate::told::Told;
use mojim_protocol::AckRule;
use mojim_protocol::promotion::Candidate;

/// Why nobody begins `epoch`, which follows on what this node knows.
pub fn used_up(volume: &str, epoch: u64) -> Error {
    Error::Invalid(format!(
        "the epochs of volume {volume} are used up: the next one is {epoch}, and none is begun after {LAST_EPOCH}. A node that had no right to has had one promised that was never begun. docs/how-to/impossible-epoch.md says how to go on"
    ))
}

/// Fails where no attach could follow on `epoch`, which a promotion is to begin.
fn check_left(store: &Store, epoch: u64) -> Result<()> {
    match epoch <= LAST_EPOCH {
        true => Ok(()),
        false => Err(used_up(&store.spec().volume, epoch)),
    }
}

/// Checks, on the node that is the view's primary by name, that this copy has what that
/// primary had. `local`: whether success means this node's own log.
pub fn check_primary(reg: &Register, store: &Store, local: bool) -> Result<()> {
    let sb = store.superblock();
    // A program that attaches gives such a copy another life, and from then on the register
    // tells. What this node led itself and lost counts, not what it has taken over from
    // another primary since.
    let led = sb.view.primary == sb.node;
    let misses = sb.ring_lost && !sb.renewed && led && !local;
    if misses || !reg.is_primary(&member(store)) {
        return Err(Error::Invalid(format!(
            "node {} is the primary by its name, and its copy is not that of the view any more. Sync points that only its ring or its log held were lost, so acknowledged sync points may be missing. Start the other nodes. If the node with more is lost for good, `mojim promote --force` gives them up",
            sb.node
        )));
    }
    Ok(())
}

/// Fails where the register names this node the primary of an epoch that its copy has not promised:
/// whoever becomes primary promises that durably before it asks the register.
fn check_own_promise(reg: &Register, sb: &Superblock) -> Result<()> {
    if sb.promised >= reg.epoch {
        return Ok(());
    }
    let (volume, me) = (&sb.volume, &sb.node);
    Err(Error::Invalid(format!(
        "the copy of volume {volume} on node {me} is of an earlier time: this node became primary in epoch {}, and its copy knows of epoch {} at most. What was acknowledged since may be missing here, so this node does not go on by itself. Promote a node that has more; if none is left, `mojim promote --force --volume {volume} --name {me}` goes on with what is here",
        reg.epoch, sb.promised
    )))
}

/// Fails where the register knows that this copy, the view's mirror's, had promised more: it is
/// of an earlier time, and may lack what was acknowledged since. A copy that was greeted since then
/// has promised as much again, but counts as no mirror in the view that it knows.
fn check_promise(reg: &Register, sb: &Superblock) -> Result<()> {
    let knows = match sb.view.mirror == sb.node {
        true => sb.promised,
        false => sb.promised.min(sb.view.epoch),
    };
    if !reg.is_forgotten(knows) {
        return Ok(());
    }
    let (volume, primary) = (&sb.volume, reg.primary.as_ref().map_or("", |p| &p.node));
    Err(Error::Invalid(format!(
        "the copy of volume {volume} on node {} is of an earlier time: it had promised epoch {} as the mirror of the view, and knows of epoch {} at most. What was acknowledged since may be missing here, so this node does not become primary by itself. Start node {primary}, which brings this copy up to date; if it is lost for good, `mojim promote --force --volume {volume} --name {}` goes on with what is here",
        sb.node, reg.promised, knows, sb.node
    )))
}

impl Mirror {
    /// Becomes primary if the register agrees. `suspect` says whether the primary is silent;
    /// if it is not, only what the register has agreed to is completed. It is asked again
    /// after each wait for another node: the primary may have spoken meanwhile. `ask` asks the
    /// other nodes what they know, if this node may take over by the register. `None`: it may not.
    pub fn try_take_over(
        &self,
        views: &dyn ViewRegister,
        rule: AckRule,
        suspect: impl Fn() -> bool,
        ask: impl FnOnce(&Register) -> Vec<Told>,
    ) -> Result<Option<(u64, u64)>> {
        // Links are served until the register has answered.
        let reg = views.read(&self.store.spec().volume)?;
        let mine = self.is_primary(&reg);
        if !(mine || self.is_member(&reg) && suspect()) {
            return Ok(None);
        }
        if mine {
            check_primary(&reg, &self.store, rule.local)?;
        } else if self.is_distrusted() {
            let (why, force) = match self.store.has_part() {
                true => ("since its log is damaged", " --force"),
                false => ("by an operator's word", ""),
            };
            return Err(Error::Invalid(format!(
                "its primary is silent, and the copy here is to be made anew, {why}: it does not take over by itself (`mojim promote{force}` takes it as it is)"
            )));
        }
        // Without the mirror in the rule a sync point waits for no other node.
        let asks = rule.mirror && !self.store.mutations.ask_nobody.is_on();
        let told = match asks {
            true => ask(&reg),
            false => Vec::new(),
        };
        if !(mine || suspect()) {
            return Ok(None);
        }
        match self.take_over_from(reg, views, &told)? {
            None => Err(Error::Protocol("the view changed meanwhile".into())),
            taken => Ok(taken),
        }
    }

    /// This copy as a candidate, to judge whether it may go on on an operator's word.
    pub fn candidate(&self) -> Candidate<'_> {
        let sb = self.store.superblock();
        Candidate {
            node: &self.me,
            standing: self.store.standing_of(&sb),
            view: sb.view,
            holding: self.store.holding(self.tail()),
            promised: Some(sb.promised).filter(|e| !self.store.is_own(*e)),
        }
    }

    /// Whether this node is the mirror of the view, with everything in it.
    pub fn is_member(&self, r: &Register) -> bool {
        let broken = &self.store.mutations;
        let named = || r.mirror.as_ref().is_some_and(|m| m.node == self.me);
        r.is_mirror(&member(&self.store))
            || broken.stale_member.is_on()
            || broken.amnesiac_member.is_on() && named()
    }

    /// An operator makes this node primary although it may lack what was acknowledged: no
    /// other node is left that has it.
    pub fn force(&self, views: &dyn ViewRegister) -> Result<Option<(u64, u64)>> {
        let reg = views.read(&self.store.spec().volume)?;
        self.force_from(&reg, views)
    }

    /// As [`Mirror::force`], if the register is still `reg`.
    pub fn force_from(
        &self,
        reg: &Register,
        views: &dyn ViewRegister,
    ) -> Result<Option<(u64, u64)>> {
        let _change = lock(&self.change);
        self.open()?;
        self.store.check()?;
        let sb = self.whole()?;
        self.check_files()?;
        let epoch = self.store.next_epoch(sb.promised.max(reg.epoch) + LEAP);
        check_left(&self.store, epoch)?;
        self.generation.fetch_add(1, SeqCst);
        self.stop_forwarding();
        self.stop_session();
        self.store.promise(epoch)?;
        // This also counts if the answer is lost and the register is read later.
        self.gives_up.store(true, Release);
        let new = reg
            .force(&member(&self.store), epoch)
            .map_err(|why| Error::Protocol(format!("{why:?}")))?;
        if !views.swap(&sb.volume, &new)? {
            return Ok(None);
        }
        self.become_primary(epoch).map(Some)
    }

    /// The superblock of this copy; an error if the copy is not whole.
    pub(super) fn whole(&self) -> Result<Superblock> {
        let sb = self.store.superblock();
        match sb.state {
            State::Whole => Ok(sb),
            _ => Err(Error::Invalid(format!(
                "node {} has no whole copy of volume {}: there is nothing to go on with",
                sb.node, sb.volume
            ))),
        }
    }

    /// Fails if the data files are not what an attach takes, before anybody is told that this
    /// node is to be primary: the old primary, or another node, may have a good copy. From then
    /// on the copy here counts as damaged, until it is opened again.
    fn check_files(&self) -> Result<()> {
        let found = self.store.check_sizes();
        if found.is_err() {
            let _ = self.store.fail(found.clone());
        }
        found
    }

    /// Whether this node is the view's primary, though it may not have begun
    /// the view's epoch yet.
    pub fn is_primary(&self, r: &Register) -> bool {
        r.is_primary(&member(&self.store))
    }

    /// The primary is gone, as far as this node can tell: makes this node the primary, if
    /// the register agrees. `None` if not: it goes on following, but has promised the
    /// epoch, so that its primary has to begin another one.
    pub fn take_over(&self, views: &dyn ViewRegister, told: &[Told]) -> Result<Option<(u64, u64)>> {
        // Links are served until the register has answered.
        let reg = views.read(&self.store.spec().volume)?;
        self.take_over_from(reg, views, told)
    }

    /// As [`Mirror::take_over`], with the register that was just read. `told`: what other nodes
    /// know to have been acknowledged, in a mode whose sync points wait for the mirror.
    pub fn take_over_from(
        &self,
        mut reg: Register,
        views: &dyn ViewRegister,
        told: &[Told],
    ) -> Result<Option<(u64, u64)>> {
        let _change = lock(&self.change);
        self.store.check()?;
        let mut sb = self.store.superblock();
        let mut me = member(&self.store);
        let broken = &self.store.mutations;
        if broken.amnesiac_member.is_on()
            && let Some(m) = reg.mirror.as_ref().filter(|m| m.node == me.node)
        {
            me = m.clone();
            if sb.state == State::Empty {
                // What was lost counts as nothing that ever was.
                self.store.make_new()?;
                sb = self.store.superblock();
            }
        }
        if broken.stale_member.is_on() && !reg.is_primary(&me) {
            reg.mirror = Some(me.clone());
        }
        let epoch = if sb.state != State::Whole {
            return Ok(None);
        } else if reg.is_primary(&me) && sb.view.epoch < reg.epoch {
            // This node was interrupted after the register had agreed.
            if !broken.no_fence.is_on() {
                check_own_promise(&reg, &sb)?;
            }
            reg.epoch
        } else if reg.is_mirror(&me) {
            if !broken.forget_promise.is_on() {
                check_promise(&reg, &sb)?;
            }
            self.store.next_epoch(sb.promised.max(reg.epoch))
        } else {
            return Ok(None);
        };
        let given_up = reg.is_primary(&me) && self.gives_up.load(Acquire);
        let missing = self.store.known_missing().filter(|k| *k > self.tail());
        if let Some(known) = missing.filter(|_| !given_up) {
            return Err(Error::Protocol(format!(
                "this node's log is damaged: sync points up to LSN {known} were acknowledged, LSN {} is the last that can be read; it does not take over by itself (`mojim promote --force` gives the others up)",
                self.tail()
            )));
        }
        if !given_up {
            self.check_told(told, &reg)?;
        }
        self.check_files()?;
        check_left(&self.store, epoch)?;
        // The fence, durably, before anything is asked for.
        if !broken.no_fence.is_on() {
            self.generation.fetch_add(1, SeqCst);
            self.stop_forwarding();
            self.stop_session();
            self.store.promise(epoch)?;
        }
        if !reg.is_primary(&me) {
            let new = reg
                .take_over(&me, epoch)
                .map_err(|why| Error::Protocol(format!("{why:?}")))?;
            if !views.swap(&sb.volume, &new)? {
                return Ok(None);
            }
        }
        self.become_primary(epoch).map(Some)
    }

    /// Fails if another node knows of acknowledged sync points that this copy lacks. Whoever is
    /// the view's mirror, and has followed its epoch in one life of its process, lacks nothing
    /// that was acknowledged in it: what another node says of that epoch does not count.
    fn check_told(&self, told: &[Told], reg: &Register) -> Result<()> {
        let kept = self.store.holding(self.tail());
        let has_all =
            reg.is_mirror(&member(&self.store)) && self.followed.load(Acquire) == reg.epoch;
        let counts = |t: &&Told| !has_all || t.known.epoch != Some(reg.epoch);
        let Some(t) = Told::most(told.iter().filter(counts), &kept, Some(reg.epoch)) else {
            return Ok(());
        };
        let (volume, node) = (&self.store.spec().volume, &t.node);
        Err(Error::Invalid(format!(
            "node {node} knows that sync points of volume {volume} up to LSN {} were acknowledged, and the copy here ends at LSN {}: it is of an earlier time, or its disk lost what it had made durable. This node does not become primary by itself. {}",
            t.known.lsn,
            kept.tail,
            t.way_out(volume, &self.me)
        )))
    }

    /// Ends following and makes this node the primary of a view of its own:
    /// it completes its log first (Mojim 4.3).
    /// Returns the epoch, which is above `above`, and the last LSN. The store is then
    /// closed cleanly.
    pub fn promote(&self, above: u64) -> Result<(u64, u64)> {
        let _change = lock(&self.change);
        self.open()?;
        let sb = self.whole()?;
        self.check_files()?;
        let epoch = self.epoch_to_promote(&sb, above);
        check_left(&self.store, epoch)?;
        self.generation.fetch_add(1, SeqCst);
        self.stop_forwarding();
        self.stop_session();
        // From here on this node acknowledges nothing to the old primary any more.
        self.store.promise(epoch)?;
        self.become_primary(epoch)
    }

    /// A leap above what is known, so that it also outranks what the other node began
    /// unseen. By a leap `is_rival` sees that this was known. An epoch that a failed
    /// promotion promised is not leapt over again, nor is a view of this node alone.
    pub(super) fn epoch_to_promote(&self, sb: &Superblock, above: u64) -> u64 {
        let goes_on = sb.view.primary == self.me && sb.view.mirror.is_empty();
        if goes_on && above + LEAP / 2 <= sb.view.epoch {
            return self.store.next_epoch(sb.promised.max(sb.view.epoch));
        }
        let known = sb.view.epoch.max(above);
        if sb.promised > known && self.store.is_own(sb.promised) {
            return match sb.promised >= known + LEAP {
                true => sb.promised,
                false => self.store.next_epoch(sb.promised + LEAP),
            };
        }
        self.store.next_epoch(known.max(sb.promised) + LEAP)
    }

    pub(super) fn open(&self) -> Result<()> {
        match self.is_closed() {
            true => Err(Error::Busy("this copy is being closed; try again".into())),
            false => Ok(()),
        }
    }

    /// Makes this node the primary of `epoch`, with everything of its contiguous prefix.
    /// The caller has ended the session and promised `epoch`.
    pub(super) fn become_primary(&self, epoch: u64) -> Result<(u64, u64)> {
        let tail = self.tail();
        self.store.freeze(false);
        self.store.truncate(tail)?;
        self.received.reset(tail);
        self.store.persist_all()?;
        self.store.apply_last(tail)?;
        // Last, so that a promotion that fails before has not happened.
        self.store.begin_epoch(
            epoch,
            tail + 1,
            View {
                epoch,
                primary: self.me.clone(),
                mirror: String::new(),
            },
        )?;
        Ok((epoch, tail))
    }
}
