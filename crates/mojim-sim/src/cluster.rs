//! A cluster's nodes, an application and an operator, driven step by step.
//!
//! There are two nodes, in many seeds a third and a fourth one.
//!
//! With a register of views, each of three or four nodes may be primary, mirror and backup.
//! Without one the third and the fourth are the backups.
//!
//! Owns the order in which the actions of real threads and people are done: one step after the
//! other, in one thread, every choice drawn from the seed. The data types are in `state`, `node`
//! and `setup`. Each other file holds one kind of steps, in an `impl Cluster`. Observations go to
//! [`crate::check::Checker`].

use std::time::Duration;

use mojim_replica::pace::Pace;

use crate::nodes::NODES;

mod append;
mod counts;
mod earlier;
mod look;
mod mutation;
mod node;
mod operator;
mod process;
mod replace;
mod settle;
mod setup;
mod spill;
mod state;
mod succession;
mod trouble;
mod turn;

use setup::MS;
use state::Checked;

pub use counts::{Backups, Replacements, Spills};
pub use mutation::Mutation;
pub use setup::{Mode, REPLACES, Setup};
pub use state::Cluster;

impl Cluster {
    /// The whole run: trouble, then calm.
    pub fn run(&mut self) -> Checked {
        self.note(|| format!("{:?}", self.setup));
        for _ in 0..self.setup.steps {
            self.step()?;
            if self.nobody.is_some() {
                return Ok(());
            }
        }
        self.settle()
    }

    /// One random step of the phase with faults.
    pub(super) fn step(&mut self) -> Checked {
        let roll = self.rng.below(100);
        let n = self.some_node();
        match roll {
            0..=24 => self.append(self.runs(n))?,
            25..=54 => drop(self.turn(self.primary)?),
            55..=84 => drop(self.turn(self.mirror())?),
            85..=95 => self.pass()?,
            96 => self.checkpoint(n, (self.rng.clone().below(3) == 0).then_some(Pace::Idle))?,
            97 => self.patience(),
            _ => self.restarts()?,
        }
        for n in 0..NODES {
            self.stream_turn(n)?;
            self.spill_turn(n)?;
        }
        if self.setup.backup {
            self.backup_step()?;
        }
        self.replace_step()?;
        self.earlier_step()?;
        if self.setup.views && self.is_time_for_trouble() {
            // A suspicion, wrong more often than not.
            self.take_over(self.mirror())?;
        }
        if self.is_time_for_trouble() {
            self.trouble()?;
        }
        self.fill();
        let (nodes, trouble) = (self.setup.nodes(), self.setup.trouble);
        if let Some(rot) = &mut self.rot
            && rot.is_due(trouble / 2)
        {
            let n = rot.node(nodes);
            self.rot(n);
        }
        Ok(())
    }

    /// The steps that only clusters with backups have.
    fn backup_step(&mut self) -> Checked {
        match self.rng.below(20) {
            0..=7 => {
                for n in self.backups() {
                    self.turn(n)?;
                }
            }
            8..=12 => drop(self.forward_turn(self.primary)?),
            13..=17 => drop(self.forward_turn(self.mirror())?),
            18 => {
                let n = self.backup();
                self.checkpoint(n, (self.rng.clone().below(3) == 0).then_some(Pace::Idle))?;
            }
            _ => {
                let n = self.backup();
                self.forward_turn(n)?;
            }
        }
        if self.is_time_for_trouble() {
            self.backup_trouble()?;
        }
        if !self.is_free() {
            return Ok(());
        }
        // A session takes hundreds of turns to begin.
        for _ in 0..self.places.len() {
            let n = self.some_node();
            self.turn(n)?;
            self.forward_turn(n)?;
        }
        if self.appended > 0 && self.rng.below(100_000) < self.setup.trouble {
            self.succession()?;
        }
        if self.setup.fallback {
            for n in 0..NODES {
                self.keep_vigil(n)?;
            }
            if self.appended > 0 && self.rng.below(100_000) < self.setup.trouble {
                self.lose_both()?;
            }
        }
        Ok(())
    }

    /// Time passes.
    fn pass(&mut self) -> Checked {
        let now = self.world.now();
        let by = match self.rng.below(10) {
            0..=4 => Duration::from_micros(self.rng.between(1, 200)),
            5..=7 => self
                .world
                .next_event()
                .map_or(MS, |t| t - now)
                .min(1000 * MS),
            8 => MS * self.rng.between(1, 50) as u32,
            _ => MS * self.rng.between(50, 400) as u32,
        };
        let most = match self.is_free() {
            // Longer is a failure of every link.
            true => self.setup.limit / 4,
            false => Duration::MAX,
        };
        self.world.advance(by.min(most));
        Ok(())
    }
}
