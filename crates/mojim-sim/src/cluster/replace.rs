//! A node that is lost for good, and the node that takes its place.
//!
//! Owns:
//!
//! - When an operator acts as `mojim replace` does, and the conditions for it.
//! - How the other nodes learn of it.
//! - The lost node that comes back later with its old configuration.
//!
//! No node accepts the lost node's links, the voters do not answer it, and it is never
//! a member again. This is checked here, and where acknowledgements are counted.

use std::time::Duration;

use mojim_env::locks::lock;
use mojim_format::{State, Superblock};
use mojim_protocol::view::{Member, Register};

use super::node::{Forwarding, NAMES, Role, node, peer};
use super::state::{Checked, Cluster};
use crate::nodes::{NODES, SPARE};

impl Cluster {
    /// The steps that only clusters with a replacement have.
    pub(super) fn replace_step(&mut self) -> Checked {
        let Some(r) = &mut self.replacing else {
            return Ok(());
        };
        let roll = r.rng.below(400);
        match (r.gone, roll) {
            (None, 0) if self.appended > 0 && !self.calm => self.replace()?,
            (Some((old, _)), 0) => self.come_back(old)?,
            (Some((old, _)), 1..=150) => {
                self.turn(old)?;
                self.forward_turn(old)?;
            }
            (Some((old, _)), 151) if self.setup.views => self.take_over(old)?,
            (Some(_), 152..=160) => self.ask_holders(self.primary),
            _ => {}
        }
        self.watch_gone()
    }

    /// As `mojim replace`: one node is ended for good and another takes its place, if
    /// everything acknowledged is there without it.
    fn replace(&mut self) -> Checked {
        let Some(r) = &mut self.replacing else {
            return Ok(());
        };
        let i = r.rng.below(self.places.len() as u64) as usize;
        let (old, power) = (self.places[i], r.rng.coin());
        let reg = lock(&self.register).now.clone();
        let up = self.answering(old);
        let (primary, mirror) = self.named_members(&reg, &up);
        let Some(primary) = primary.filter(|p| !p.is_empty()) else {
            return Ok(());
        };
        let is_mirror = mirror.as_deref() == Some(NAMES[old]);
        let life = reg.primary.as_ref().map(|p| p.incarnation);
        let holds = match is_mirror {
            true => up.iter().any(|(n, sb)| {
                NAMES[*n] == primary
                    && sb.state == State::Whole
                    && !sb.ring_lost
                    && (!self.setup.views || life == Some(sb.life))
            }),
            false => up.iter().any(|(_, sb)| sb.state == State::Whole),
        };
        // The promotion of `old` may have happened: it may be the primary.
        let half = self.half_promoted == Some(old) || self.nodes[old].taken.is_some();
        if primary == NAMES[old] || half || !holds {
            self.replaced.refused += u64::from(primary != NAMES[old] && !half);
            return Ok(());
        }
        let primary = node(&primary);
        if !self.places.contains(&primary) || primary != self.primary {
            // The promotion by an operator, or the register's last change, is not known
            // yet.
            return Ok(());
        }
        self.note(|| format!("node {} is replaced by {}", NAMES[old], NAMES[SPARE]));
        match power {
            true => self.lose_power(old)?,
            false => {
                self.world.kill(NAMES[old]);
                self.observe(old)?;
            }
        }
        match (is_mirror, self.setup.views && reg.mirror.is_none()) {
            (true, _) => self.replaced.mirrors += 1,
            (false, true) => self.replaced.others += 1,
            (false, false) => self.replaced.backups += 1,
        }
        self.give_place(old, primary)
    }

    /// The nodes other than `old` that the command asks: those whose daemons answer.
    fn answering(&self, old: usize) -> Vec<(usize, Superblock)> {
        let others = self.places.iter().copied().filter(|n| *n != old);
        let up = others.filter_map(|n| match &self.nodes[n].role {
            Role::Down => None,
            Role::Primary(p) => Some((n, p.p.store.superblock())),
            Role::Mirror(m) => Some((n, m.m.store.superblock())),
        });
        up.collect()
    }

    /// The names of primary and mirror: by the register, or by the latest view of the
    /// nodes that are `up`.
    fn named_members(
        &self,
        reg: &Register,
        up: &[(usize, Superblock)],
    ) -> (Option<String>, Option<String>) {
        if self.setup.views {
            let name = |m: &Option<Member>| m.as_ref().map(|m| m.node.clone());
            return (name(&reg.primary), name(&reg.mirror));
        }
        match up.iter().max_by_key(|(_, sb)| sb.view.epoch) {
            None => (None, None),
            Some((_, sb)) => (Some(sb.view.primary.clone()), Some(sb.view.mirror.clone())),
        }
    }

    /// The new node gets the place of `old`, and the daemons read the new configuration.
    fn give_place(&mut self, old: usize, primary: usize) -> Checked {
        // The present primary takes the first place; the new node takes the place that is
        // left.
        let at = |n: usize, places: &[usize]| places.iter().position(|p| *p == n).expect("a place");
        let (from, first) = (at(old, &self.places), at(primary, &self.places));
        if from == 0 {
            self.places[0] = primary;
            self.places[first] = SPARE;
        } else {
            self.places[from] = SPARE;
        }
        self.rank[SPARE] = self.rank[old];
        let version = lock(&self.register).now.version;
        if let Some(r) = &mut self.replacing {
            r.gone = Some((old, version));
        }
        lock(&self.register).cut[old] = true;
        self.nodes[SPARE].restart = self.world.now();
        self.check.replaced(old, SPARE, self.is_free())?;
        for n in self.places.clone() {
            self.stop_mirror(n)?;
        }
        Ok(())
    }

    /// The replaced node starts again with its old configuration, once the view has no
    /// place for it and the program has learned of the new node.
    fn come_back(&mut self, old: usize) -> Checked {
        if !matches!(self.nodes[old].role, Role::Down) || !self.is_left(old) {
            return Ok(());
        }
        self.replaced.returns += 1;
        self.start(old)
    }

    fn is_left(&self, old: usize) -> bool {
        let reg = lock(&self.register).now.clone();
        let named = [&reg.primary, &reg.mirror];
        let speaks = |n: &usize| match &self.nodes[*n].role {
            Role::Primary(p) if self.setup.views => p.holders.find(NAMES[old]).is_some(),
            Role::Primary(p) => p.session.peer() == NAMES[old],
            _ => false,
        };
        !named.into_iter().flatten().any(|m| m.node == NAMES[old])
            && !(0..NODES).any(|n| speaks(&n))
    }

    /// As `Inner::holders_loop`: a primary that is alone forwards to each new node.
    pub(super) fn ask_holders(&mut self, n: usize) {
        let places = self.places.clone();
        let Role::Primary(prim) = &self.nodes[n].role else {
            return;
        };
        let alone = prim.p.store.superblock().view.mirror.is_empty();
        if !self.setup.views || !prim.ready || !alone {
            return;
        }
        let source = prim.p.clone();
        let others = places.iter().filter(|to| **to != n);
        let new = prim.holders.replace(others.map(|to| peer(*to)).collect());
        let forwards = &mut self.nodes[n].forwards;
        forwards.retain(|f| places.contains(&f.to));
        for p in new {
            let to = node(&p.name);
            if forwards.iter().all(|f| f.to != to) {
                forwards.push(Forwarding::new(source.clone(), n, to));
            }
        }
    }

    /// Without a register, a program finds its new mirror when it starts again.
    pub(super) fn find_new_mirror(&mut self) -> Checked {
        let n = self.primary;
        if let (Some(old), Role::Primary(p)) = (self.gone(), &self.nodes[n].role)
            && !self.setup.views
            && p.session.peer() == NAMES[old]
        {
            self.note(|| format!("the program on {} is started again", NAMES[n]));
            self.world.kill(NAMES[n]);
            self.observe(n)?;
            self.nodes[n].restart = self.world.now() + Duration::from_millis(1);
        }
        Ok(())
    }

    /// Once the view has left the replaced node, and the program knows of it, that node must not be
    /// in a view again. A program that does not know yet may still be making it its mirror.
    fn watch_gone(&mut self) -> Checked {
        let Some((old, version)) = self.replacing.as_ref().and_then(|r| r.gone) else {
            return Ok(());
        };
        let reg = lock(&self.register).now.clone();
        let named = [&reg.primary, &reg.mirror];
        let is_named = named.into_iter().flatten().any(|m| m.node == NAMES[old]);
        if is_named && self.left_gone {
            return Err(format!(
                "replaced: node {} has a place in {reg:?}, version {version} having replaced it",
                NAMES[old]
            ));
        }
        self.left_gone |= self.is_left(old);
        Ok(())
    }

    /// Counts the new node if it is a member at the end.
    pub(super) fn count_members(&mut self) {
        let is = self.places.contains(&SPARE) && [self.primary, self.mirror()].contains(&SPARE);
        self.replaced.members += u64::from(is);
    }
}
