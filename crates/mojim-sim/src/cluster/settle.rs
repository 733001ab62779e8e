//! The end of a run: faults stop, and the copies must become whole and equal.
//!
//! Owns what counts as settled, and when no node may go on because data was lost.

use std::collections::BTreeMap;
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_format::State;
use mojim_protocol::view::Member;
use mojim_replica::primary::Primary;

use super::node::{NAMES, Role, node};
use super::setup::{MS, Mode};
use super::state::{Checked, Cluster};
use crate::ctx::Faults;
use crate::nodes::NODES;
use crate::shrink::Nobody;

impl Cluster {
    /// Faults stop and everything restarts: the cluster must become whole again.
    pub(super) fn settle(&mut self) -> Checked {
        self.calm_down();
        self.find_new_mirror()?;
        let start = self.world.now();
        let mut asked = 0;
        let mut rounds = 0u64;
        loop {
            rounds += 1;
            self.restarts()?;
            if self.nobody.is_some() {
                return Ok(());
            }
            let moved = self.calm_turns()?;
            self.patience();
            for n in 0..NODES {
                self.checkpoint(n, None)?;
            }
            if asked < 3
                && let Role::Primary(p) = &self.nodes[self.primary].role
                && p.ready
            {
                asked += 1;
                self.append(self.primary)?;
            }
            let quiet = asked == 3 && self.is_settled();
            if quiet {
                break;
            }
            self.ask_holders(self.primary);
            let now = self.world.now();
            let is_late = now - start > Duration::from_secs(20);
            if is_late && self.nobody_may()? {
                return Ok(());
            }
            if is_late {
                self.attach_again()?;
            }
            // The limit is long, since a link that goes silent at a copy's very end is
            // noticed late.
            if now - start > Duration::from_secs(300) || rounds > 30_000 {
                return Err(format!("live: stuck: {}", self.state()));
            }
            let by = match moved {
                true => Duration::from_micros(50),
                false => self
                    .world
                    .next_event()
                    .map_or(20 * MS, |t| t - now)
                    .min(20 * MS),
            };
            self.world.advance(by);
        }
        self.count_members();
        self.finally()
    }

    /// Without a register, a backup that has promised a later epoch than the primary's, in a promotion
    /// by hand that failed, follows again once a program attaches anew: a person starts it again.
    fn attach_again(&mut self) -> Checked {
        let n = self.primary;
        let Role::Primary(p) = &self.nodes[n].role else {
            return Ok(());
        };
        let epoch = p.p.epoch();
        let is_ahead = |n: &usize| match &self.nodes[*n].role {
            Role::Mirror(mir) => mir.m.store.superblock().promised > epoch,
            _ => false,
        };
        if self.setup.views || !p.ready || !self.backups().iter().any(is_ahead) {
            return Ok(());
        }
        self.note(|| format!("node {}: its program is started again", NAMES[n]));
        self.world.kill(NAMES[n]);
        self.observe(n)
    }

    /// Faults stop, links are mended, disks have room, and nodes that are down may start.
    fn calm_down(&mut self) {
        self.note(|| "calm".into());
        self.calm = true;
        self.world.set_faults(Faults::none());
        let most = match self.setup.spare {
            true => NODES,
            false => self.setup.nodes().max(3),
        };
        for y in 0..most {
            for x in 0..y {
                self.world.partition(NAMES[x], NAMES[y], false, false);
            }
        }
        {
            let mut r = lock(&self.register);
            r.cut = std::array::from_fn(|n| self.gone() == Some(n));
            r.lost = 0;
        }
        for n in 0..most {
            self.world.set_quota(NAMES[n], None);
            self.world.disarm(NAMES[n]);
            self.nodes[n].restart = self.world.now();
            self.check.look_again(n);
        }
        if let Role::Primary(p) = &mut self.nodes[self.primary].role {
            p.closing = false;
        }
    }

    /// Some turns of every thread of every node. True if something moved.
    fn calm_turns(&mut self) -> Checked<bool> {
        let mut moved = false;
        for _ in 0..12 {
            for n in 0..NODES {
                moved |= self.stream_turn(n)?;
                self.spill_turn(n)?;
            }
            moved |= self.turn(self.primary)?;
            if self.setup.replicated() {
                moved |= self.turn(self.mirror())?;
            }
            self.replace_step()?;
            if self.setup.backup {
                for n in self.backups() {
                    moved |= self.turn(n)?;
                }
                for n in 0..NODES {
                    moved |= self.forward_turn(n)?;
                }
            }
        }
        Ok(moved)
    }

    /// Whether every node that the register names has begun another life since, so that a
    /// person has to decide what is given up. This is right only if each of them lost
    /// what a power loss takes from it.
    fn nobody_may(&mut self) -> Checked<bool> {
        let reg = lock(&self.register).now.clone();
        let lives = self.nodes.iter().enumerate().filter_map(|(n, node)| {
            let store = match &node.role {
                Role::Down => return None,
                Role::Primary(p) => &p.p.store,
                Role::Mirror(m) => &m.m.store,
            };
            Some((NAMES[n], store.superblock().life))
        });
        let lives: Vec<_> = lives.collect();
        // The node went on for primary and mirror, was killed before it began, and its
        // log is damaged.
        let damaged = |m: &Member| match &self.nodes[node(&m.node)].role {
            Role::Mirror(mir) => {
                let missing = mir.m.store.known_missing();
                self.setup.fallback && missing.is_some_and(|k| k > mir.m.tail())
            }
            _ => false,
        };
        if reg.primary.as_ref().is_some_and(damaged) {
            self.nobody = Some(Vec::new());
            return Ok(true);
        }
        let gone = self.gone();
        let lost = |m: &Member| {
            gone == Some(node(&m.node))
                || lives
                    .iter()
                    .any(|(n, l)| *n == m.node && *l != m.incarnation)
        };
        // The operator wanted the mirror's copy made anew, so this copy does not count.
        let distrusted = |m: &Member| match &self.nodes[node(&m.node)].role {
            Role::Mirror(mir) => mir.m.is_distrusted() && !mir.m.store.has_part(),
            _ => false,
        };
        // Nor has the mirror what the register waits for, if its log is damaged, also where the
        // log seems merely to end there; nor if its disk is of an earlier epoch.
        let rotted = |m: &Member| match &self.nodes[node(&m.node)].role {
            Role::Mirror(_) => self.may_lack(node(&m.node)),
            _ => false,
        };
        let given_up = reg.mirror.as_ref().is_some_and(distrusted);
        let rotted = reg.mirror.as_ref().is_some_and(rotted);
        let nobody = self.setup.views
            && reg.primary.as_ref().is_some_and(lost)
            && (given_up || rotted || reg.mirror.as_ref().is_none_or(lost));
        let mirror = reg.mirror.as_ref().filter(|_| !given_up && !rotted);
        if !nobody {
            return Ok(false);
        }
        for (m, leads) in [(reg.primary.as_ref(), true), (mirror, false)] {
            let Some(m) = m else { continue };
            let n = node(&m.node);
            if gone == Some(n) {
                continue;
            }
            let before = self.named.get(&(n, m.incarnation)).copied().unwrap_or(0);
            // With a persistent log, a power loss takes only the ring of a pair's
            // primary, for which the mirror alone counts. A primary that has just begun
            // to go on alone may be taken for such a primary, since its superblock says
            // so later than the register.
            let ring = leads && self.setup.mode == Mode::Sync;
            let may_lose = ring || !self.setup.persistent()[n];
            if !may_lose || self.check.failures()[n] == before {
                return Err(format!(
                    "live: nobody may go on, but {} had no cause to begin another life: {reg:?}, {}",
                    m.node,
                    self.state()
                ));
            }
        }
        // A log is damaged by a failure, too.
        let mirror = reg.mirror.iter().filter(|_| !given_up);
        let members = reg.primary.iter().chain(mirror);
        self.nobody = Some(members.map(|m| node(&m.node)).collect());
        Ok(true)
    }

    /// How the run ended, if no node may go on.
    pub fn nobody(&self) -> Option<Nobody> {
        let needs = self.nobody.as_ref()?;
        Some(Nobody {
            needs: needs.iter().map(|n| NAMES[*n]).collect(),
            failures: self.world.failures(),
        })
    }

    fn is_settled(&self) -> bool {
        let Role::Primary(prim) = &self.nodes[self.primary].role else {
            return false;
        };
        let (p, last) = (&prim.p, prim.p.last());
        let own = prim.ready
            && prim.pending.is_empty()
            && prim.spills.is_empty()
            && p.committed() == last
            && p.store.applied() == last
            // Written back in order, since nothing comes any more.
            && p.store.checkpointed() == last
            && self.backups().iter().all(|n| self.backup_is_settled(*n, p));
        if !self.setup.replicated() {
            return own;
        }
        let mirror = self.mirror();
        let Role::Mirror(mir) = &self.nodes[mirror].role else {
            return false;
        };
        own && prim.session.is_active()
            && prim.session.is_member()
            && p.acked.get() == last
            && mir.m.received.get() == last
            && mir.m.store.applied() == last
            && mir.m.store.superblock().view.mirror == NAMES[mirror]
    }

    /// Whether a backup has what the primary has. A backup of another volume waits for a
    /// person, who removes it.
    fn backup_is_settled(&self, n: usize, p: &Primary) -> bool {
        let Role::Mirror(c) = &self.nodes[n].role else {
            return false;
        };
        let sb = c.m.store.superblock();
        self.is_foreign(n, p)
            || sb.state == State::Whole
                && c.m.received.get() == p.last()
                && c.m.store.applied() == p.last()
    }

    fn is_foreign(&self, n: usize, p: &Primary) -> bool {
        let Role::Mirror(c) = &self.nodes[n].role else {
            return false;
        };
        let sb = c.m.store.superblock();
        sb.state == State::Whole && sb.volume_id != p.store.superblock().volume_id
    }

    fn state(&self) -> String {
        let mut out = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            out += &match &node.role {
                Role::Down => format!("{}: down; ", NAMES[n]),
                Role::Primary(p) => format!(
                    "{}: primary, ready {}, active {}, member {}, last {}, committed {}, acked {}, persisted {}, applied {}, pending {}, rule {:?}, error {:?}, poison {:?}, fullness {}; ",
                    NAMES[n],
                    p.ready,
                    p.session.is_active(),
                    p.session.is_member(),
                    p.p.last(),
                    p.p.committed(),
                    p.p.acked.get(),
                    p.p.persisted.get(),
                    p.p.store.applied(),
                    p.pending.len(),
                    p.p.rule(),
                    p.session.last_error,
                    p.p.store.poisoned(),
                    p.p.store.fullness(),
                ),
                Role::Mirror(m) => format!(
                    "{}: mirror, {:?}, received {}, committed {}, applied {}, view {:?}, lanes {}, controls {}, poison {:?}, fullness {}; ",
                    NAMES[n],
                    m.m.store.superblock().state,
                    m.m.received.get(),
                    m.m.committed(),
                    m.m.store.applied(),
                    m.m.store.superblock().view,
                    m.lanes.len(),
                    m.control.len(),
                    m.m.store.poisoned(),
                    m.m.store.fullness(),
                ),
            };
            for f in &node.forwards {
                out += &format!(
                    "{} to {}: active {}, error {:?}; ",
                    NAMES[n], NAMES[f.to], f.active, f.forward.last_error
                );
            }
        }
        out
    }

    /// Checks that the copies are the same, byte for byte.
    fn finally(&mut self) -> Checked {
        let mut areas: Vec<BTreeMap<String, Vec<u8>>> = Vec::new();
        for n in self.places.clone() {
            if let Role::Primary(p) = &self.nodes[self.primary].role
                && self.backups().contains(&n)
                && self.is_foreign(n, &p.p)
            {
                continue;
            }
            let store = match &self.nodes[n].role {
                Role::Down => continue,
                Role::Primary(p) => p.p.store.clone(),
                Role::Mirror(m) => m.m.store.clone(),
            };
            self.check.look_again(n);
            self.check.compare(n, &store, &self.world, NAMES[n])?;
            let area = store.area();
            let mut area_files = BTreeMap::new();
            for f in area.files() {
                let bytes = self.world.contents(NAMES[n], &area.path(&f.name));
                area_files.insert(f.name.clone(), bytes.unwrap_or_default());
            }
            let dir = store.spec().dir.clone();
            let known: Vec<_> = area_files.keys().map(|f| dir.join(f)).collect();
            let there = self.world.files(NAMES[n]);
            if let Some(f) = there
                .iter()
                .find(|f| f.starts_with(&dir) && !known.contains(f))
            {
                return Err(format!(
                    "4: node {n}: {} lies in the directory, not in the catalogue",
                    f.display()
                ));
            }
            areas.push(area_files);
        }
        match areas.windows(2).all(|w| w[0] == w[1]) {
            true => Ok(()),
            false if self.check.blurred => {
                self.differ += 1;
                Ok(())
            }
            false => Err("4: the copies differ at the end".into()),
        }
    }
}
