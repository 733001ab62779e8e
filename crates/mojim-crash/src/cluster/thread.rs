//! How far one thread's steps are there: its bytes and, in a mount, its names.
//!
//! Owns the verdict on one thread.
//!
//! Invariant: all that is found of a thread is what it was after one step. In a mount that others
//! use too, there may be a part of the next one besides.

use super::names::{self, Reached};
use super::program::{self, Act, act};
use super::shown::Share;

/// What a thread has after each of its steps.
pub struct Thread {
    seed: u64,
    thread: usize,
    mounted: bool,
    /// Whether no other thread syncs.
    alone: bool,
    bytes: program::Model,
    names: names::Model,
}

impl Thread {
    /// The state before the first step, of one of so many threads.
    pub fn new(seed: u64, thread: usize, threads: usize, mounted: bool) -> Thread {
        Thread {
            seed,
            thread,
            mounted,
            alone: threads == 1,
            bytes: program::Model::new(seed, thread, mounted),
            names: names::Model::new(seed, thread),
        }
    }

    fn act(&self, step: u64) -> Act {
        act(self.seed, self.thread, step)
    }

    /// The step of which `bytes`, and in a mount all of `share`, are the result, among those up to
    /// `begun`; or what is wrong.
    pub fn step_of(
        &mut self,
        bytes: &[u8],
        share: Option<&Share>,
        begun: u64,
    ) -> Result<Reached, String> {
        let of_bytes = self.bytes.step_of(bytes, begun)?;
        let thread = self.thread;
        let share = match share {
            None if !self.mounted => {
                let (step, whole) = (of_bytes, true);
                return Ok(Reached { step, whole });
            }
            share => share.ok_or("nothing was looked at but bytes")?,
        };
        if share.bytes != bytes {
            return Err(format!(
                "thread {thread}: the mount shows other bytes than the volume's file has"
            ));
        }
        let (seed, alone) = (self.seed, self.alone);
        let is_of_names = |step| act(seed, thread, step) == Act::Names;
        let of_names = self
            .names
            .step_of(&share.names, begun, alone, &is_of_names)?;
        let whole = match of_names.whole {
            true => of_names.step.max(of_bytes),
            false => of_names.step - 1,
        };
        let last = |names: bool| {
            let mut before = (1..=whole).rev();
            before.find(|s| is_of_names(*s) == names).unwrap_or(0)
        };
        let names_whole = of_names.step == last(true) || !of_names.whole;
        if of_bytes != last(false) || !names_whole {
            return Err(format!(
                "thread {thread}: its bytes are as after step {of_bytes}, its names as after step {}",
                of_names.step
            ));
        }
        match (of_names.whole, share.new) {
            (true, false) => Ok(Reached {
                step: whole,
                whole: true,
            }),
            (false, false) => Ok(of_names),
            (names_whole, true) => {
                let next = whole + 1;
                let is_next = names_whole && next <= begun && self.act(next) == Act::Replace;
                match is_next && !alone {
                    true => Ok(Reached {
                        step: next,
                        whole: false,
                    }),
                    false => Err(format!(
                        "names of thread {thread}: a part of step {next} is there, the new file"
                    )),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::names::{Tree, step};
    use super::super::program::{PART, changes};
    use super::*;

    const STEPS: u64 = 60;

    /// What a thread has after each step, the first of them before any.
    fn all(seed: u64) -> Vec<Share> {
        let (mut bytes, mut tree) = (vec![0; PART], Tree::new());
        let mut all = Vec::new();
        for s in 0..=STEPS {
            match act(seed, 0, s) {
                _ if s == 0 => {}
                Act::Names => {
                    let made = step(seed, 0, s, &tree);
                    made.calls.iter().for_each(|c| tree.apply(c));
                }
                _ => {
                    bytes[..8].copy_from_slice(&s.to_le_bytes());
                    for c in changes(seed, 0, s) {
                        bytes[c.at..c.at + c.bytes.len()].copy_from_slice(&c.bytes);
                    }
                }
            }
            all.push(Share {
                bytes: bytes.clone(),
                new: false,
                names: tree.entries(),
            });
        }
        all
    }

    #[test]
    fn bytes_and_names_are_as_of_one_step() {
        let all = all(9);
        let mut alone = Thread::new(9, 0, 1, true);
        let mut one_of_two = Thread::new(9, 0, 2, true);
        for thread in [&mut alone, &mut one_of_two] {
            for (s, share) in all.iter().enumerate() {
                let found = thread.step_of(&share.bytes, Some(share), STEPS);
                let (step, whole) = (s as u64, true);
                assert_eq!(found, Ok(Reached { step, whole }));
                assert!(s == 0 || thread.step_of(&share.bytes, Some(share), step - 1).is_err());
                // Names of one step beside bytes of another, either way.
                for other in &all {
                    let mixed = Share {
                        bytes: share.bytes.clone(),
                        new: false,
                        names: other.names.clone(),
                    };
                    let is_one = |a: &Share| (&a.bytes, &a.names) == (&mixed.bytes, &mixed.names);
                    let found = thread.step_of(&mixed.bytes, Some(&mixed), STEPS);
                    assert_eq!(found.is_ok(), all.iter().any(is_one));
                }
                let other = vec![7; PART];
                assert!(thread.step_of(&other, Some(share), STEPS).is_err());
                assert!(thread.step_of(&share.bytes, None, STEPS).is_err());
            }
        }
    }

    #[test]
    fn a_new_file_is_a_part_of_the_step_that_renames_it() {
        let (mut alone, mut one_of_two) = (Thread::new(9, 0, 1, true), Thread::new(9, 0, 2, true));
        for (s, mut share) in all(9).into_iter().enumerate() {
            share.new = true;
            let bytes = share.bytes.clone();
            assert!(alone.step_of(&bytes, Some(&share), STEPS).is_err());
            let step = s as u64 + 1;
            let found = one_of_two.step_of(&bytes, Some(&share), STEPS);
            let whole = false;
            match act(9, 0, step) == Act::Replace && step <= STEPS {
                true => assert_eq!(found, Ok(Reached { step, whole })),
                false => assert!(found.is_err()),
            }
            assert!(one_of_two.step_of(&bytes, Some(&share), s as u64).is_err());
        }
    }
}
