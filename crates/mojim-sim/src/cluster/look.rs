//! Observations of a node after each of its steps.
//!
//! Owns what the checker is told: what each copy has, what was acknowledged, what backups
//! lack. Invariant: the state of a dead process is not observed.

use std::sync::atomic::Ordering::Relaxed;

use mojim_env::locks::lock;
use mojim_format::State;
use mojim_protocol::AckRule;
use mojim_protocol::view::Member;
use mojim_store::store::Store;

use super::node::{NAMES, Role, committed, node};
use super::state::{Checked, Cluster};

impl Cluster {
    /// Observes node `n` after one of its steps.
    pub(super) fn observe(&mut self, n: usize) -> Checked {
        self.watch_register()?;
        self.follow_fallback()?;
        self.follow_view();
        // What a dead process believes it did has no effect.
        if self.world.crashed(NAMES[n]).is_none() {
            return self.look(n);
        }
        if !matches!(self.nodes[n].role, Role::Down) {
            return self.fallen(n);
        }
        Ok(())
    }

    /// Checks that a running primary that leaves its mirror has everything acknowledged
    /// in its own log, if this log survives a power loss.
    fn watch_register(&mut self) -> Checked {
        let now = lock(&self.register).now.clone();
        let was = std::mem::replace(&mut self.seen, now.clone());
        let leaves = was.mirror.is_some() && now.mirror.is_none();
        match &now.primary {
            Some(p) if leaves && was.primary == now.primary && was.epoch == now.epoch => {
                let n = node(&p.node);
                match self.setup.persistent()[n] {
                    true => self.check.alone(n),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn look(&mut self, n: usize) -> Checked {
        self.look_at_life(n);
        self.look_at_backups(n)?;
        match &mut self.nodes[n].role {
            Role::Down => Ok(()),
            Role::Mirror(m) => {
                if !m.lanes.is_empty() {
                    self.check.resumed(n);
                }
                let m = m.m.clone();
                if !m.greeted().is_empty() {
                    self.check.follows(n, m.is_backup());
                }
                let logs = m.store.logs();
                let persisted = m.store.level().is_persistent()
                    && logs.iter().all(|l| l.persisted() >= l.head());
                self.check
                    .received(n, &m.store, m.received.get(), persisted)?;
                self.compare(n, &m.store)
            }
            Role::Primary(prim) => {
                let p = prim.p.clone();
                let begins = p.epoch() != prim.epoch && prim.epoch == 0;
                if begins {
                    self.fell_back(n, &p.store, p.last())?;
                    self.nodes[n].put_back = false;
                }
                let Role::Primary(prim) = &mut self.nodes[n].role else {
                    unreachable!("it is one");
                };
                if p.epoch() != prim.epoch {
                    // A running primary may raise its own epoch.
                    if begins {
                        prim.head = self.check.began(n, &p.store, p.last())?;
                    }
                    prim.epoch = p.epoch();
                    let epoch = prim.epoch;
                    self.world
                        .note(|| format!("--- epoch {epoch} begins behind LSN {}", p.last()));
                }
                let (head, epoch) = (prim.head, prim.epoch);
                if epoch == 0 {
                    if p.store.superblock().state != State::Whole {
                        return self.check.received(n, &p.store, 0, false);
                    }
                    return self.check.received(n, &p.store, p.store.tail(), false);
                }
                if p.store.level().is_persistent() {
                    self.check.persisted(n, head, p.persisted.get());
                }
                let settled = self.check.points.before(head, committed(&p));
                self.check.settled(settled);
                if p.store.poisoned().is_some() {
                    return Ok(());
                }
                self.check.looked(n, &p.store)?;
                self.compare(n, &p.store)?;
                self.acknowledge(n)
            }
        }
    }

    /// Takes note of how often a node whose log is in memory had lost its power when the present
    /// life of its copy began.
    fn look_at_life(&mut self, n: usize) {
        let store = match &self.nodes[n].role {
            Role::Primary(p) => &p.p.store,
            Role::Mirror(m) => &m.m.store,
            Role::Down => return,
        };
        if self.setup.views && !self.setup.persistent()[n] {
            let failures = self.check.failures()[n];
            let life = store.superblock().life;
            self.named.entry((n, life)).or_insert(failures);
        }
    }

    /// Checks how far a node's backups are behind.
    fn look_at_backups(&mut self, n: usize) -> Checked {
        let lanes = self.setup.lanes as u64;
        let (threshold, longest) = (self.setup.secondary, self.longest);
        let node = &mut self.nodes[n];
        let Some(source) = node.forwards.first().map(|f| f.forward.source().clone()) else {
            return Ok(());
        };
        let (store, backups) = (source.store(), source.backups());
        // A record may not fit before the ring's end, and begins at a multiple of
        // up to 4096 bytes.
        let most = threshold.saturating_add(lanes * (2 * longest + 4096));
        for f in &mut node.forwards {
            let to = NAMES[f.to];
            let progress = backups.progress();
            let p = progress.iter().find(|p| p.name == to).expect("it joined");
            let active = f.forward.is_active();
            let mut had = f.lag.take();
            let sessions = p.sessions.load(Relaxed);
            if std::mem::replace(&mut f.sessions, sessions) != sessions {
                // The backup may lack any part of what the logs have, even if the session
                // ended at once.
                had = None;
            }
            if active && !f.active {
                let copies = p.copies.load(Relaxed);
                match copies == f.copies {
                    true => self.backups.by_log += 1,
                    false => self.backups.copies += 1,
                }
                f.copies = copies;
                self.world
                    .note(|| format!("--- node {} forwards to {to}, {copies} copies", NAMES[n]));
            }
            f.active = active;
            let acked = p.acked.load(Relaxed);
            if active && store.poisoned().is_none() && store.oldest() > acked + 1 {
                return Err(format!(
                    "backup: {to} has LSN {acked}, but the logs of {} begin at {}",
                    NAMES[n],
                    store.oldest()
                ));
            }
            // A backup may count between two sessions too.
            if !p.counts() {
                continue;
            }
            let lag = p.lag(store);
            if lag > most && had.is_some_and(|had| lag > had) {
                return Err(format!(
                    "backup: {to} lacks {lag} bytes of {}'s, {most} at most may wait",
                    NAMES[n]
                ));
            }
            f.lag = Some(lag);
        }
        Ok(())
    }

    pub(super) fn compare(&mut self, n: usize, store: &Store) -> Checked {
        if self.calm || self.rng.below(8) == 0 {
            self.check.compare(n, store, &self.world, NAMES[n])?;
        }
        Ok(())
    }

    /// What the application's waiting threads would see now.
    pub(super) fn acknowledge(&mut self, n: usize) -> Checked {
        self.watch_attach(n)?;
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let (p, persistent) = (prim.p.clone(), self.setup.persistent());
        let mut rule = p.rule();
        let pair = [n, node(prim.session.peer())];
        if self.setup.fallback {
            // What counted within a lease goes on counting, also when the mirror is asked
            // for later records: the mirror is not a member before it has these too.
            let reg = lock(&self.register).now.clone();
            if reg.mirror.is_none() && reg.primary.is_some_and(|p| p.node == NAMES[n]) {
                rule = AckRule::LOCAL;
            }
        }
        let became = p.is_ready() && !prim.ready;
        if became {
            // From now on the application sees what was adopted.
            prim.ready = true;
            self.world.note(|| "--- attached".into());
            let adopted = self.check.points.before(prim.head, p.last());
            let adopted = match prim.pending.front() {
                None => adopted,
                Some(_) => return Err("attached with sync points under way".into()),
            };
            self.check.by_itself(n, adopted)?;
            self.check.acked(pair, adopted, rule, persistent)?;
        }
        if became {
            self.forward(n, p.clone());
        }
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let committed = p.committed();
        while let Some(f) = prim.pending.front()
            && self.check.points[f.point].last <= committed
        {
            let (point, spilled) = (f.point, f.spilled);
            prim.pending.pop_front();
            self.spilled.acked += u64::from(spilled);
            self.check.acked(pair, point, rule, persistent)?;
            self.check.acks += 1;
        }
        Ok(())
    }

    /// When a program that has kept the link to its mirror becomes ready, the register
    /// names this mirror, or already another primary, or the limit has passed.
    fn watch_attach(&mut self, n: usize) -> Checked {
        let now = self.world.now();
        let Role::Primary(prim) = &mut self.nodes[n].role else {
            return Ok(());
        };
        let linked = std::mem::replace(&mut prim.linked, prim.session.is_active());
        if prim.session.is_attaching() {
            return Ok(());
        }
        // A link that is back only now may be a new link, to a mirror that was given up
        // before.
        let same = prim.linked && (linked || prim.begun.is_none());
        let waited = now - *prim.begun.get_or_insert(now);
        let became = prim.p.is_ready() && !prim.ready;
        if !self.setup.views || !became || !same || waited >= self.setup.limit {
            return Ok(());
        }
        let (me, mirror) = (NAMES[n], prim.session.peer());
        let reg = lock(&self.register).now.clone();
        let is = |m: &Option<Member>, name| m.as_ref().is_some_and(|m| m.node == name);
        if is(&reg.primary, me) && !is(&reg.mirror, mirror) {
            return Err(format!(
                "view: {me} has attached, linked to {mirror}, which {reg:?} does not name"
            ));
        }
        Ok(())
    }
}
