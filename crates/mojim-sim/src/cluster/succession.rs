//! A mirror or a backup that takes a primary's place, by the register.
//!
//! Owns when a node tries to do so, and the losses that cause it.
//!
//! Invariant: a suspicion may be wrong. This is never unsafe where a register decides.

use std::sync::Arc;

use mojim_env::locks::lock;
use mojim_protocol::view::Register;
use mojim_replica::fallback_timer::FallbackTimer;
use mojim_replica::mirror::Mirror;
use mojim_store::store::Store;

use super::node::{Fallback, NAMES, Role, VOLUME, node};
use super::state::{Checked, Cluster};

impl Cluster {
    /// Node `n` suspects that its primary is dead, rightly or not: this is never unsafe
    /// where a register decides.
    pub(super) fn take_over(&mut self, n: usize) -> Checked {
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        let before = lock(&self.register).now.clone();
        let lacks = self.is_told_of_more(n, &m, &before);
        let ask = |_: &Register| self.told(n);
        let taken = m.try_take_over(&*self.views(n), self.setup.rule(), || true, ask);
        self.note(|| format!("node {} takes over: {taken:?}", NAMES[n]));
        let by_itself = lock(&self.register).now.version == before.version + 1;
        if lacks && by_itself && matches!(taken, Ok(Some(_))) {
            return Err(format!(
                "3: node {n} takes over by itself, though a node that answers knows of acknowledged sync points that it lacks"
            ));
        }
        self.rise(n, m, taken)
    }

    /// Node `n` becomes the primary, if `taken` says that the register agreed.
    fn rise(
        &mut self,
        n: usize,
        m: Arc<Mirror>,
        taken: mojim_env::Result<Option<(u64, u64)>>,
    ) -> Checked {
        let Ok(Some((_, tail))) = taken else {
            drop(m);
            return self.observe(n);
        };
        if self.world.crashed(NAMES[n]).is_some() {
            drop(m);
            return self.fallen(n);
        }
        self.promotions += 1;
        self.backups.primaries += u64::from(self.risen.take_if(|m| *m == n).is_some());
        self.follow_fallback()?;
        match self.fell_back(n, &m.store, tail)? {
            true => {}
            false => {
                self.check.promoted(n, &m.store, tail, false)?;
                self.check.took_over(n)?;
            }
        }
        self.primary = n;
        self.nodes[n].taken = Some(tail);
        drop(m);
        match self.rng.coin() {
            true => Ok(()),
            false => self.hand_over(n),
        }
    }

    /// As `Node::hand_over`: the program attaches next.
    pub(super) fn hand_over(&mut self, n: usize) -> Checked {
        let Some(tail) = self.nodes[n].taken.take() else {
            return Ok(());
        };
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let m = mir.m.clone();
        m.close();
        let closed = match self.setup.backup {
            // Threads that forward still read the ring.
            true => m.store.close_clean(tail),
            false => m.store.close_for_next(tail),
        };
        if closed.is_ok() {
            self.check.closed(n, &m.store)?;
        }
        self.compare(n, &m.store)?;
        drop(m);
        self.end(n)
    }

    /// The mirror or the primary goes down, for longer than other nodes wait for it.
    pub(super) fn succession(&mut self) -> Checked {
        let (mirror, primary) = (self.mirror(), self.primary);
        let most = match self.risen == Some(mirror) {
            true => 2,
            false => 5,
        };
        let lost = match self.rng.below(most) {
            0 => primary,
            _ => mirror,
        };
        match self.rng.coin() {
            true => self.kill(lost),
            false => self.lose_power(lost)?,
        }
        self.observe(lost)?;
        let away = self.setup.limit * self.rng.between(1, 12) as u32;
        let node = &mut self.nodes[lost];
        node.restart = node.restart.max(self.world.now() + away);
        match lost == primary {
            true => self.take_over(mirror),
            false => Ok(()),
        }
    }

    /// The backup loses primary and mirror: they are dead for long, or cut off from it,
    /// with or without being cut off from the voters.
    pub(super) fn lose_both(&mut self) -> Checked {
        let pair = [self.primary, self.mirror()];
        let backups = self.backups();
        let how = self.rng.below(4);
        for n in pair {
            let away = self.setup.limit * self.rng.between(1, 12) as u32;
            match how {
                0 => {
                    match self.rng.coin() {
                        true => self.kill(n),
                        false => self.lose_power(n)?,
                    }
                    self.observe(n)?;
                    let node = &mut self.nodes[n];
                    node.restart = node.restart.max(self.world.now() + away);
                }
                _ => {
                    for backup in &backups {
                        self.world.partition(NAMES[n], NAMES[*backup], false, true);
                    }
                    if how != 1 {
                        lock(&self.register).cut[n] = true;
                    }
                }
            }
        }
        Ok(())
    }

    /// As `Node::watch_loop`, for a backup.
    pub(super) fn keep_vigil(&mut self, n: usize) -> Checked {
        let now = self.world.now();
        let Role::Mirror(mir) = &self.nodes[n].role else {
            self.nodes[n].fallback.heard();
            return Ok(());
        };
        let m = mir.m.clone();
        if m.live_primary().is_some() {
            self.nodes[n].fallback.heard();
        } else if now >= self.nodes[n].next_look && m.store.poisoned().is_none() {
            self.nodes[n].next_look = now + self.setup.limit;
            return self.fall_back(n, m);
        }
        Ok(())
    }

    fn fall_back(&mut self, n: usize, m: Arc<Mirror>) -> Checked {
        let views = self.views(n);
        let Ok(reg) = views.read(VOLUME) else {
            return Ok(());
        };
        let now = self.world.now();
        let members = [&reg.primary, &reg.mirror].into_iter().flatten();
        let up = |o: usize| !matches!(self.nodes[o].role, Role::Down);
        let answers = |o: usize| up(o) && !self.world.is_partitioned(NAMES[o], NAMES[n]);
        let mut others: Vec<usize> = members.map(|m| node(&m.node)).collect();
        others.retain(|o| *o != n);
        // An answer may be late.
        let heard = others.iter().any(|o| answers(*o)) && self.rng.below(8) != 0;
        let fallback = &mut self.nodes[n].fallback;
        if !FallbackTimer::concerns(&m, &reg) || heard {
            fallback.heard();
            return Ok(());
        }
        if !fallback.is_over(&reg, now, self.setup.limit, false) {
            return Ok(());
        }
        self.nodes[n].falls_back = Fallback::Asked;
        let taken = m.force_from(&reg, &*views);
        self.note(|| format!("node {} goes on: {taken:?}", NAMES[n]));
        self.rise(n, m, taken)
    }

    /// Takes note if the register has let a backup go on. What the other nodes have told
    /// their applications beyond this by then is given up, and from then on they
    /// acknowledge nothing.
    pub(super) fn follow_fallback(&mut self) -> Checked {
        let primary = lock(&self.register).now.primary.clone();
        let Some(n) = primary.map(|p| node(&p.node)) else {
            return Ok(());
        };
        if self.nodes[n].falls_back != Fallback::Asked {
            return Ok(());
        }
        self.nodes[n].falls_back = Fallback::Agreed;
        for o in self.places.clone().into_iter().filter(|o| *o != n) {
            if self.world.crashed(NAMES[o]).is_none() {
                self.acknowledge(o)?;
            }
        }
        self.check.given_up(n);
        Ok(())
    }

    /// Node `n` begins a view. Returns whether as a backup that goes on for primary and
    /// mirror.
    pub(super) fn fell_back(&mut self, n: usize, store: &Store, tail: u64) -> Checked<bool> {
        let fell = self.nodes[n].falls_back == Fallback::Agreed;
        if fell {
            self.nodes[n].falls_back = Fallback::No;
            self.backups.fallbacks += 1;
            self.check.fell_back(n, store, tail)?;
        }
        Ok(fell)
    }
}
