//! The failures of a run: whatever takes something away from a node, numbered in
//! the order in which it is drawn.
//!
//! Owns the numbers, and which of the failures are to happen. Invariant: a failure that
//! is left out is drawn and numbered like any other, but has no effect. So a run with
//! some of its failures left out is a run like any other, and repeats.

use std::collections::BTreeSet;
use std::sync::Arc;

/// What a failure takes away, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// A process. Memory and disk stay.
    Process,
    /// Power: memory, and what was not durable.
    Power,
    /// Bytes somewhere in a log or a superblock.
    Bytes,
    /// Room on a disk.
    Room,
    /// One read, write or sync.
    Call,
}

impl Takes {
    /// Whether something that was durable, or in memory, may be gone.
    pub fn data(self) -> bool {
        matches!(self, Takes::Power | Takes::Bytes)
    }
}

/// One failure that happened, or was armed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// How many were drawn before it.
    pub number: u64,
    /// The node that it strikes.
    pub node: Arc<str>,
    /// What it takes.
    pub takes: Takes,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {:?} of {}", self.number, self.takes, self.node)
    }
}

/// Which failures are to happen; `None` for all of them.
pub type Only = Option<BTreeSet<u64>>;

/// The failures of one run.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    drawn: u64,
    only: Only,
    happened: Vec<Failure>,
}

impl Failures {
    /// Lets only these failures happen.
    pub(crate) fn only(&mut self, only: Only) {
        self.only = only;
    }

    /// A failure was drawn: numbers it, and returns whether it happens.
    pub(crate) fn draw(&mut self, node: &Arc<str>, takes: Takes) -> bool {
        let number = self.drawn;
        self.drawn += 1;
        let happens = self.only.as_ref().is_none_or(|o| o.contains(&number));
        if happens {
            let node = node.clone();
            self.happened.push(Failure {
                number,
                node,
                takes,
            });
        }
        happens
    }

    /// The failures that happened.
    pub(crate) fn happened(&self) -> Vec<Failure> {
        self.happened.clone()
    }
}
