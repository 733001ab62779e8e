//! Faults, and the interventions of operators.
//!
//! Owns kills, losses of power, cut links, full disks and rot. Invariant: a fault that
//! takes something from a node is drawn as one of the run's failures.

use super::node::{NAMES, Role};
use super::state::{Checked, Cluster};
use crate::failures::Takes;
use crate::world::CrashKind;
use mojim_env::locks::lock;

impl Cluster {
    /// In clusters whose nodes may have any role, this trouble is rarer, since most of
    /// theirs is a change of roles; and it starts only once there is something to lose.
    pub(super) fn is_time_for_trouble(&mut self) -> bool {
        let of = match self.is_free() {
            true if self.appended == 0 => return false,
            true => 400_000,
            false => 100_000,
        };
        self.rng.below(of) < self.setup.trouble
    }

    /// A fault happens, or an operator intervenes.
    pub(super) fn trouble(&mut self) -> Checked {
        let pair = [self.primary, self.mirror()];
        if self.anew.below(16) == 0
            && !self.nodes.iter().any(|node| node.put_back)
            && let Role::Mirror(m) = &self.nodes[pair[1]].role
        {
            // As `mojim repair --anew`; its primary dies, perhaps before the new copy
            // has all that the old one had.
            self.note(|| format!("node {} is to be copied anew", NAMES[pair[1]]));
            m.m.distrust();
            let after = self.anew.between(1, 60);
            self.arm_on_send(pair[0], after, CrashKind::Kill);
            self.suspects = Some(pair[1]);
            return Ok(());
        }
        if let Some(n) = self.suspects.take()
            && self.setup.views
            && matches!(self.nodes[self.primary].role, Role::Down)
        {
            return self.take_over(n);
        }
        let i = self.rng.below(2) as usize;
        let (n, other) = (pair[i], pair[1 - i]);
        let name = NAMES[n];
        let kind = match self.rng.coin() {
            true => CrashKind::Kill,
            false => CrashKind::Power,
        };
        let oneway = self.rng.coin();
        let after = match self.rng.coin() {
            true => self.rng.between(1, 20),
            false => self.rng.between(1, 200),
        };
        match self.rng.below(20) {
            0..=2 => {
                self.kill(n);
                return self.observe(n);
            }
            3 | 4 => {
                return self.lose_power(n);
            }
            5..=8 => self.arm(n, after, kind),
            9 => self.arm_on_send(n, after.min(30), kind),
            10 => {
                self.world.partition(name, NAMES[other], oneway, true);
                if self.setup.views && self.rng.coin() {
                    lock(&self.register).cut[n] = true;
                }
            }
            11..=13 => {
                self.world.partition(name, NAMES[other], false, false);
                lock(&self.register).cut = std::array::from_fn(|n| self.gone() == Some(n));
            }
            14 => self.world.reset_connections(name, NAMES[other]),
            15 | 16 if self.setup.views => return self.take_over(other),
            15 | 16 => return self.promote(),
            17 | 18 => return self.detach(),
            _ => {
                for n in pair {
                    self.kill(n);
                    self.observe(n)?;
                }
            }
        }
        Ok(())
    }

    /// A fault of the backup or its links.
    pub(super) fn backup_trouble(&mut self) -> Checked {
        let n = self.backup();
        let name = NAMES[n];
        let pair = [self.primary, self.mirror()];
        let other = *self.rng.pick(&pair);
        let kind = match self.rng.coin() {
            true => CrashKind::Kill,
            false => CrashKind::Power,
        };
        let after = match self.rng.coin() {
            true => self.rng.between(1, 20),
            false => self.rng.between(1, 200),
        };
        match self.rng.below(16) {
            0..=2 => {
                self.kill(n);
                self.observe(n)?;
            }
            3 | 4 => {
                self.lose_power(n)?;
            }
            5..=7 => self.arm(n, after, kind),
            8 => {
                let oneway = self.rng.coin();
                let (from, to) = match self.rng.coin() {
                    true => (name, NAMES[other]),
                    false => (NAMES[other], name),
                };
                self.world.partition(from, to, oneway, true);
            }
            9 => {
                // Cut off for good, or until the links are mended.
                for other in pair {
                    self.world.partition(name, NAMES[other], false, true);
                }
            }
            10..=12 => {
                for other in pair {
                    self.world.partition(name, NAMES[other], false, false);
                }
            }
            13 => self.world.reset_connections(name, NAMES[other]),
            // The node may well be forwarding at that moment.
            14 => self.arm_on_send(other, after.min(30), kind),
            _ => self.stop_mirror(n)?,
        }
        Ok(())
    }

    /// The process of node `n` is killed.
    pub(super) fn kill(&self, n: usize) {
        if self.world.fails(NAMES[n], Takes::Process) {
            self.world.kill(NAMES[n]);
        }
    }

    /// Node `n` crashes in an operation to come, or in a send.
    fn arm(&self, n: usize, after: u64, kind: CrashKind) {
        if self.world.fails(NAMES[n], takes(kind)) {
            self.world.arm_crash(NAMES[n], after, kind);
        }
    }

    fn arm_on_send(&self, n: usize, after: u64, kind: CrashKind) {
        if self.world.fails(NAMES[n], takes(kind)) {
            self.world.arm_crash_on_send(NAMES[n], after, kind);
        }
    }

    pub(super) fn lose_power(&mut self, n: usize) -> Checked {
        if !self.world.fails(NAMES[n], Takes::Power) {
            return Ok(());
        }
        self.world.power_loss(NAMES[n]);
        match self.nodes[n].role {
            Role::Down => self.check.crashed(n, CrashKind::Power, None, None),
            _ => self.observe(n),
        }
    }

    /// Fills disks now and then, or gives them room again.
    pub(super) fn fill(&mut self) {
        let Some(rng) = &mut self.full else {
            return;
        };
        if rng.below(20_000) >= self.setup.trouble {
            return;
        }
        let n = rng.below(3.max(self.setup.nodes() as u64)) as usize;
        let room = match rng.coin() {
            true => None,
            false => Some(rng.below(8)),
        };
        self.note(|| format!("node {}: room for {room:?} pages", NAMES[n]));
        match room {
            Some(pages) if self.world.fails(NAMES[n], Takes::Room) => {
                self.world.fill(NAMES[n], pages);
            }
            Some(_) => {}
            None => self.world.set_quota(NAMES[n], None),
        }
    }

    /// Damages something on the disk of node `n`.
    pub(super) fn rot(&mut self, n: usize) {
        let spec = self.store_spec(n);
        let down = matches!(self.nodes[n].role, Role::Down);
        let dark = self.world.crashed(NAMES[n]) == Some(CrashKind::Power);
        if let Some(rot) = &mut self.rot {
            rot.strike(&self.world, (n, NAMES[n]), &spec, (down, down && dark));
        }
    }
}

fn takes(kind: CrashKind) -> Takes {
    match kind {
        CrashKind::Kill => Takes::Process,
        CrashKind::Power => Takes::Power,
    }
}
