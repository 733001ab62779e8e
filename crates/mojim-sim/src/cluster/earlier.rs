//! A disk as of an earlier time, while the other daemons run on: the whole of it was put back, or
//! its logs lost what the disk had said was durable.
//!
//! Owns when this is drawn. Invariants:
//! - The primary's disk comes back while a mirror runs that follows this primary, with a copy that
//!   counts: an operator who has the mirror's copy made anew gives up the second copy, before or
//!   until the primary is back. Until the primary begins an epoch, it starts only while that node
//!   answers: nobody else could know what it lacks.
//! - The disk of the register's mirror comes back as of an earlier epoch than the one that the
//!   register says this mirror had promised: of an earlier moment of the same epoch the copy does
//!   not know that it is.

use mojim_config::MediumKind;
use mojim_env::locks::lock;
use mojim_format::State;
use mojim_protocol::view::Register;

use super::node::{NAMES, Role};
use super::setup::Mode;
use super::state::{Checked, Cluster, Kept, Whose};
use crate::failures::Takes;
use crate::rot;
use mojim_replica::mirror::Mirror;
use mojim_replica::told::Told;

impl Cluster {
    /// Now and then a disk is kept, or put back.
    pub(super) fn earlier_step(&mut self) -> Checked {
        match self.earlier.as_ref().map(|e| e.whose) {
            Some(Whose::Primarys) => self.primarys_step(),
            Some(Whose::Mirrors) => self.mirrors_step(),
            None => Ok(()),
        }
    }

    fn primarys_step(&mut self) -> Checked {
        let n = self.primary;
        let Some(e) = &mut self.earlier else {
            return Ok(());
        };
        if e.left == 0 || e.rng.below(150) != 0 {
            return Ok(());
        }
        let Role::Primary(prim) = &self.nodes[n].role else {
            return Ok(());
        };
        let linked = prim.ready && prim.session.is_active() && prim.p.store.poisoned().is_none();
        if !linked || !self.setup.persistent()[n] || self.world.crashed(NAMES[n]).is_some() {
            return Ok(());
        }
        let (sb, history) = (prim.p.store.superblock(), prim.p.store.history());
        let now = Kept {
            node: n,
            life: sb.life,
            epoch: prim.epoch,
            nonce: sb.nonce,
            paired: prim.session.is_member(),
        };
        let peer = prim.session.peer();
        let m = NAMES.iter().position(|name| *name == peer);
        let Some(Role::Mirror(mir)) = m.map(|m| &self.nodes[m].role) else {
            return Ok(());
        };
        let store = &mir.m.store;
        let follows = store.superblock().state == State::Whole
            && !store.is_loading()
            && !mir.m.is_distrusted()
            && store.history().last_epoch() >= history.last_epoch();
        // In an epoch that came since, the node may have been alone.
        let fits = e.kept.is_some_and(|k| {
            let always = k.paired && now.paired && self.setup.mode != Mode::Async;
            k.node == n && k.life == now.life && (k.epoch == now.epoch || always)
        });
        let opened_since = e.kept.is_some_and(|k| k.nonce != now.nonce);
        if !fits || e.rng.below(4) == 0 {
            e.kept = Some(now);
            self.world.keep(NAMES[n]);
            return Ok(());
        }
        let known = mir.m.knows(&mir.m.store.superblock()).map_or(0, |k| k.lsn);
        if !follows || !self.world.fails(NAMES[n], Takes::Bytes) {
            return Ok(());
        }
        e.left -= 1;
        e.kept = None;
        // A log in persistent memory that is older than the last opening counts as gone.
        let as_gone = opened_since && self.setup.medium[n] == MediumKind::Pmem;
        let logs_alone = e.rng.coin() && !as_gone;
        self.strike(n, logs_alone, known)
    }

    fn strike(&mut self, n: usize, logs_alone: bool, known: u64) -> Checked {
        self.put_back(n, logs_alone, known)?;
        self.nodes[n].put_back = true;
        match self.nodes[n].role {
            Role::Down => self.start(n),
            _ => Ok(()),
        }
    }

    /// As [`Cluster::primarys_step`], for the mirror.
    fn mirrors_step(&mut self) -> Checked {
        let n = self.mirror();
        let reg = lock(&self.register).now.clone();
        let Some(e) = &mut self.earlier else {
            return Ok(());
        };
        if let Some(n) = e.awaits {
            return self.await_greeting(n, &reg);
        }
        if e.left == 0 || e.rng.below(40) != 0 {
            return Ok(());
        }
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let (m, sb) = (&mir.m, mir.m.store.superblock());
        let whole = sb.state == State::Whole && !m.store.is_loading() && !m.is_distrusted();
        let sound = whole && m.store.poisoned().is_none() && self.setup.persistent()[n];
        if !sound || self.world.crashed(NAMES[n]).is_some() {
            return Ok(());
        }
        if !m.is_member(&reg) {
            return Ok(());
        }
        let kept = e.kept.filter(|k| k.node == n);
        let fits = kept.is_some_and(|k| k.epoch < reg.promised);
        if kept.is_none() || !fits && e.rng.below(4) == 0 {
            e.kept = Some(Kept {
                node: n,
                life: sb.life,
                epoch: sb.promised,
                nonce: sb.nonce,
                paired: true,
            });
            self.world.keep(NAMES[n]);
            return Ok(());
        }
        if !fits {
            // Its program attaches anew, in a later epoch.
            let primary = self.primary;
            self.kill(primary);
            return self.observe(primary);
        }
        let how = e.rng.below(4);
        if !self.world.fails(NAMES[n], Takes::Bytes) {
            return Ok(());
        }
        e.left -= 1;
        e.kept = None;
        self.strike_mirror(n, how)
    }

    /// The mirror's disk comes back. The primary dies before that, when it has greeted the mirror,
    /// or not; or it dies before, comes back, and dies when it has greeted the mirror.
    fn strike_mirror(&mut self, n: usize, how: u64) -> Checked {
        // By the epoch it is known that the copy lacks what was acknowledged.
        self.put_back(n, false, u64::MAX)?;
        let primary = self.primary;
        if how < 2 {
            self.kill(primary);
            self.observe(primary)?;
        }
        if !matches!(self.nodes[n].role, Role::Down) {
            return Ok(());
        }
        self.start(n)?;
        if how == 0 {
            return self.take_over(n);
        }
        if let Some(e) = &mut self.earlier {
            e.awaits = (how < 3).then_some(n);
        }
        Ok(())
    }

    /// If the mirror `n`, whose disk came back, has been greeted, its primary dies, and it takes over.
    fn await_greeting(&mut self, n: usize, reg: &Register) -> Checked {
        let Role::Mirror(mir) = &self.nodes[n].role else {
            return Ok(());
        };
        let is_member = mir.m.is_member(reg);
        let is_greeted = mir.m.store.superblock().promised >= reg.promised;
        if let Some(e) = &mut self.earlier
            && (is_greeted || !is_member)
        {
            e.awaits = None;
        }
        if !is_greeted || !is_member {
            return Ok(());
        }
        let primary = self.primary;
        self.kill(primary);
        self.observe(primary)?;
        self.take_over(n)
    }

    /// Node `n` loses its power, and its disk is as it was when it was kept. Of the nodes that run,
    /// one knows that everything up to LSN `known` was acknowledged.
    fn put_back(&mut self, n: usize, logs_alone: bool, known: u64) -> Checked {
        let spec = self.store_spec(n);
        self.note(|| format!("node {} is put back, logs alone: {logs_alone}", NAMES[n]));
        self.world.power_loss(NAMES[n]);
        self.observe(n)?;
        let logs: Vec<_> = spec.logs.iter().map(|l| l.path.clone()).collect();
        self.world
            .put_back(NAMES[n], logs_alone.then_some(&logs[..]));
        let recovers = rot::recovers(&self.world, NAMES[n], &spec);
        let p = recovers.and_then(|(history, tail)| self.check.points.exact(&history, tail));
        let Some(p) = p else {
            return Err(format!("sim: node {n} was put back to no sync point"));
        };
        self.check.put_back(n, p, logs_alone, known)?;
        self.nodes[n].restart = self.world.now();
        Ok(())
    }

    /// Whether node `n`, the register's mirror, may lack acknowledged points: its log is damaged, or
    /// its disk is of an earlier epoch, and it has not got back what it held.
    pub(super) fn may_lack(&self, n: usize) -> bool {
        let mirrors = self.earlier.as_ref().map(|e| e.whose) == Some(Whose::Mirrors);
        self.check.lacks(n) || mirrors && self.check.is_damaged(n)
    }

    /// Whether node `n` may start: a person who puts a disk back does so while the others run.
    pub(super) fn is_answered(&self, n: usize) -> bool {
        let others = self.nodes.iter().enumerate().filter(|(i, _)| *i != n);
        let mut others = others.filter(|(i, _)| *i < 2);
        !self.nodes[n].put_back
            || n != self.primary
            || others.any(|(_, node)| matches!(node.role, Role::Mirror(_)))
    }

    /// What the nodes that answer know to have been acknowledged, as a program that attaches on
    /// node `n` asks them.
    pub(super) fn told(&self, n: usize) -> Vec<Told> {
        let told = self.followers_near(n).filter_map(|(node, m)| {
            Some(Told {
                node: node.into(),
                known: m.knows(&m.store.superblock())?,
                has: m.tail(),
            })
        });
        told.collect()
    }

    /// Whether node `n`, if it is the mirror of the view `reg`, lacks acknowledged sync points with
    /// its copy `m`, by what the nodes that answer know.
    pub(super) fn is_told_of_more(&self, n: usize, m: &Mirror, reg: &Register) -> bool {
        let kept = m.store.holding(m.tail());
        let most = || Told::most(&self.told(n), &kept, Some(reg.epoch)).is_some();
        self.setup.rule().mirror && m.is_member(reg) && most()
    }

    /// The last LSN of which one of them knows, whatever it says.
    pub(super) fn known_to_others(&self, n: usize) -> u64 {
        let whole = self
            .followers_near(n)
            .filter(|(_, m)| m.store.superblock().state == State::Whole);
        let known = whole.map(|(_, m)| m.committed().max(m.store.known_acknowledged()));
        known.max().unwrap_or(0)
    }

    /// The nodes that answer node `n` and follow.
    fn followers_near(&self, n: usize) -> impl Iterator<Item = (&'static str, &Mirror)> {
        let others = self.nodes.iter().enumerate().filter(move |(i, _)| *i != n);
        let reached = others.filter(move |(i, _)| {
            let cut = |a, b| self.world.is_partitioned(NAMES[a], NAMES[b]);
            self.world.crashed(NAMES[*i]).is_none() && !cut(n, *i) && !cut(*i, n)
        });
        reached.filter_map(|(i, node)| match &node.role {
            Role::Mirror(mir) => Some((NAMES[i], &*mir.m)),
            _ => None,
        })
    }
}
