//! The stores of the threads of the cluster's program, and what must be found.
//!
//! Owns the steps. Each thread has a part of the one region for itself: a word with the
//! number of its last step, and bytes that follow from the seed, the thread and its
//! steps. Invariant: a step changes its word and all its places by one sync point, so
//! that a partial step can be detected.
//!
//! In a mount the part is a file of the thread, and some steps are on names (`names.rs`)
//! instead.

use mojim_sim::Rng;

use crate::workload::{PAGE, Patch};

/// Size of a thread's part, in bytes.
pub const PART: usize = 24 * PAGE;
const WORD: usize = 8;

/// What a step in a mount is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Writes to the file, and an fsync of it.
    Write,
    /// Stores into a mapping of the file, and an msync.
    Store,
    /// A new file that is renamed over the old one, and an fsync of the directory.
    Replace,
    /// Calls on names in the thread's directory (`names.rs`).
    Names,
}

/// What step `step` of a thread in a mount is.
pub fn act(seed: u64, thread: usize, step: u64) -> Act {
    let mut rng = Rng::new(seed.rotate_left(8) ^ (thread as u64) << 48 ^ step);
    match rng.below(6) {
        0 => Act::Write,
        1 => Act::Store,
        2 => Act::Replace,
        _ => Act::Names,
    }
}

/// A mistake that the program in a mount makes, in a control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slip {
    /// It syncs in the middle of each step on its file.
    HalfSteps,
    /// It syncs in the middle of each step on names.
    HalfNames,
    /// It does not sync the directory after a step on names.
    UnsyncedNames,
}

impl Slip {
    const NAMED: [(Slip, &'static str); 3] = [
        (Slip::HalfSteps, "half-steps"),
        (Slip::HalfNames, "half-names"),
        (Slip::UnsyncedNames, "unsynced-names"),
    ];

    /// The mistake's name.
    pub fn name(self) -> &'static str {
        let found = Slip::NAMED.into_iter().find(|(s, _)| *s == self);
        found.expect("all are there").1
    }

    /// The mistake of this name.
    pub fn of(name: &str) -> Result<Slip, String> {
        let found = Slip::NAMED.into_iter().find(|(_, n)| *n == name);
        let all = Slip::NAMED.map(|(_, n)| n);
        found
            .map(|(s, _)| s)
            .ok_or_else(|| format!("one of {}", all.join(", ")))
    }
}

/// What step `step`, counted from 1, of a thread changes besides its word.
pub fn changes(seed: u64, thread: usize, step: u64) -> Vec<Patch> {
    let mut rng = Rng::new(seed.rotate_left(24) ^ (thread as u64) << 48 ^ step);
    let mut sizes = Vec::new();
    if rng.below(48) == 0 {
        // Larger than a record of a small log can be.
        sizes.push(rng.between(20_000, 70_000) as usize);
    } else {
        for _ in 0..rng.between(1, 5) {
            sizes.push(match rng.below(4) {
                0 => 8,
                1 => rng.between(1, 64),
                2 => rng.between(64, 512),
                _ => rng.between(512, 5000),
            } as usize);
        }
    }
    let of = |n: usize| {
        let mut bytes = vec![0; n];
        rng.fill(&mut bytes);
        let at = WORD + rng.below((PART - WORD - n) as u64) as usize;
        Patch { at, bytes }
    };
    sizes.into_iter().map(of).collect()
}

/// A thread's part after each step.
pub struct Model {
    seed: u64,
    thread: usize,
    mounted: bool,
    step: u64,
    bytes: Vec<u8>,
}

impl Model {
    /// The part before the first step; `mounted`: as a file in a mount.
    pub fn new(seed: u64, thread: usize, mounted: bool) -> Model {
        Model {
            seed,
            thread,
            mounted,
            step: 0,
            bytes: vec![0; PART],
        }
    }

    fn is_of_bytes(&self, step: u64) -> bool {
        !self.mounted || act(self.seed, self.thread, step) != Act::Names
    }

    /// The step of which `found` is the result, among those up to `begun`; or how it
    /// differs from its step.
    pub fn step_of(&mut self, found: &[u8], begun: u64) -> Result<u64, String> {
        let thread = self.thread;
        let step = u64::from_le_bytes(found[..WORD].try_into().expect("eight bytes"));
        if step > begun || step > 0 && !self.is_of_bytes(step) {
            return Err(format!(
                "thread {thread}: step {step} is there, {begun} were begun"
            ));
        }
        if step < self.step {
            *self = Model::new(self.seed, thread, self.mounted);
        }
        while self.step < step {
            self.step += 1;
            if !self.is_of_bytes(self.step) {
                continue;
            }
            for c in changes(self.seed, thread, self.step) {
                self.bytes[c.at..c.at + c.bytes.len()].copy_from_slice(&c.bytes);
            }
        }
        self.bytes[..WORD].copy_from_slice(&step.to_le_bytes());
        if self.bytes == found {
            return Ok(step);
        }
        let differ = |(a, b): (&u8, &u8)| a != b;
        let pairs = || self.bytes.iter().zip(found);
        Err(format!(
            "thread {thread}: {} bytes are not as after its step {step}, the first at {}",
            pairs().filter(|p| differ(*p)).count(),
            pairs().position(differ).unwrap_or(PART),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_told_and_half_of_one_is_none() {
        let mut part = vec![0; PART];
        let mut model = Model::new(5, 1, false);
        assert_eq!(model.step_of(&part, 0), Ok(0));
        for step in 1..=200u64 {
            let before = part.clone();
            for c in changes(5, 1, step) {
                part[c.at..c.at + c.bytes.len()].copy_from_slice(&c.bytes);
            }
            assert!(step == 1 || model.step_of(&part, 200).is_err());
            part[..WORD].copy_from_slice(&step.to_le_bytes());
            assert_eq!(model.step_of(&part, 200), Ok(step));
            assert!(model.step_of(&part, step - 1).is_err());
            let mut half = before;
            half[..WORD].copy_from_slice(&step.to_le_bytes());
            assert!(model.step_of(&half, 200).is_err());
        }
        assert_ne!(changes(5, 1, 1), changes(5, 0, 1));
    }
}
