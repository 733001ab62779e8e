//! A node that is lost for good, and the one that takes its place.
//!
//! Owns when an operator does as `mojim replace` does, what has to be so before,
//! how the others learn of it, and the lost node that comes back later with the
//! configuration that it had. Nobody takes its links, the voters do not answer
//! it, and it is never a member again: that is watched here, and where
//! acknowledgements are counted.

use mojim_env::Address;
use mojim_format::State;
use mojim_replica::holders::Peer;

use super::{
    BackupSession, Checked, Cluster, Duration, Forwarding, NAMES, Rng, Role, address, lock, node,
};
use crate::check::{NODES, SPARE};

/// What became of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Replacements {
    /// Seeds in which a node may be replaced.
    pub seeds: u64,
    /// Mirrors that were replaced.
    pub mirrors: u64,
    /// Backups that were.
    pub backups: u64,
    /// Other nodes that were: away, and of no use to the view.
    pub others: u64,
    /// Refused: what was acknowledged would rest on nobody who answers.
    pub refused: u64,
    /// New nodes that had the register's or the pair's place at the end.
    pub members: u64,
    /// Replaced nodes that came back.
    pub returns: u64,
}

impl Replacements {
    /// Adds those of another seed.
    pub fn add(&mut self, o: &Replacements) {
        self.seeds += o.seeds;
        self.mirrors += o.mirrors;
        self.backups += o.backups;
        self.others += o.others;
        self.refused += o.refused;
        self.members += o.members;
        self.returns += o.returns;
    }
}

/// A seed in which a node may be replaced.
pub struct Replacing {
    rng: Rng,
    /// Who was, and the register's version then.
    pub gone: Option<(usize, u64)>,
}

impl Replacing {
    /// With numbers of its own.
    pub fn new(rng: Rng) -> Replacing {
        Replacing { rng, gone: None }
    }
}

/// How another node is reached.
pub fn peer(to: usize) -> Peer {
    Peer {
        name: NAMES[to].into(),
        address: Address::Tcp(address(to)),
        tcp: Address::Tcp(address(to)),
        shared: false,
    }
}

impl Cluster {
    /// The node that was replaced.
    pub(super) fn gone(&self) -> Option<usize> {
        let gone = self.replacing.as_ref().and_then(|r| r.gone);
        gone.map(|(n, _)| n)
    }

    /// What replacing a node adds to a step.
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

    /// As `mojim replace`: one of the nodes is ended for good, another one gets its
    /// place, if everything that was acknowledged is there without it.
    fn replace(&mut self) -> Checked {
        let Some(r) = &mut self.replacing else {
            return Ok(());
        };
        let i = r.rng.below(self.places.len() as u64) as usize;
        let (old, power) = (self.places[i], r.rng.coin());
        let reg = lock(&self.register).now.clone();
        // Whom the command asks: the daemons that answer.
        let up: Vec<_> = self
            .places
            .iter()
            .copied()
            .filter(|n| *n != old)
            .filter_map(|n| match &self.nodes[n].role {
                Role::Down => None,
                Role::Primary(p) => Some((n, p.p.store.superblock())),
                Role::Mirror(m) => Some((n, m.m.store.superblock())),
            })
            .collect();
        let (primary, mirror) = match self.setup.views {
            true => (
                reg.primary.as_ref().map(|m| m.node.clone()),
                reg.mirror.as_ref().map(|m| m.node.clone()),
            ),
            false => match up.iter().max_by_key(|(_, sb)| sb.view.epoch) {
                None => return Ok(()),
                Some((_, sb)) => (Some(sb.view.primary.clone()), Some(sb.view.mirror.clone())),
            },
        };
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
        // Its promotion may have happened: it may be the primary.
        let half = self.half_promoted == Some(old) || self.nodes[old].taken.is_some();
        if primary == NAMES[old] || half || !holds {
            self.replaced.refused += u64::from(primary != NAMES[old] && !half);
            return Ok(());
        }
        let primary = node(&primary);
        if !self.places.contains(&primary) || primary != self.primary {
            // The person who ended it, or the register's last word, is not in yet.
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
        // Who is primary by now is named as the first; the new one gets what is left.
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
        // The daemons read the new file.
        for n in self.places.clone() {
            self.stop_mirror(n)?;
        }
        Ok(())
    }

    /// The one that was replaced starts again, with the file that it had, when the view
    /// has no place for it any more and the program has learned of the new one.
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

    /// As `Inner::holders_loop`: a primary that is alone forwards to whoever is new.
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
                forwards.push(Forwarding {
                    to,
                    forward: BackupSession::new(source.clone(), NAMES[n], NAMES[to], p.tcp),
                    active: false,
                    sessions: 0,
                    copies: 0,
                    lag: None,
                });
            }
        }
    }

    /// Without a register a program finds its new mirror when it starts again.
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

    /// Once the view has left it, it has no place in one.
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
        self.left_gone |= !is_named;
        Ok(())
    }

    /// Whether the new node is a member at the end, for the counts.
    pub(super) fn count_members(&mut self) {
        let is = self.places.contains(&SPARE) && [self.primary, self.mirror()].contains(&SPARE);
        self.replaced.members += u64::from(is);
    }
}
