//! The interface of a system over persistent memory, and what must be found of it.
//!
//! Owns the list of defects, the content after each sync point, and the verdict on what a
//! recovery finds. Invariant: every system, the shipped engine and the controls alike, is
//! judged by the same model.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mojim_persistent::log::Defect::{Fence, LastWord, Order, SameBit, Stale, Sum, Truncate};
use mojim_persistent::log::Encoding::{Checksum, TornBit, TwoFences};
use mojim_persistent::log::{Defect, Encoding};

use super::medium::Shadow;
use crate::rng::Rng;

/// What is wrong between a heap and its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeapDefect {
    /// A transaction leaves the state byte of a block out.
    State,
    /// What the heap commits without waiting, a slab's entry, comes after the blocks in it.
    Slab,
    /// A root is committed before the block that it names.
    Root,
    /// A transaction is two sync points: the state bytes, then what lies in the blocks.
    Halves,
}

/// A defect, or the control program that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Stores into the data in place, then flushes.
    Naive,
    /// Acknowledges before the flush.
    Nosync,
    /// A correct redo log: nothing is broken.
    Log,
    /// One flush writes nothing back.
    SkipFlush,
    /// One flush leaves its last line out.
    SkipLine,
    /// One flush is not fenced.
    SkipFence,
    /// One sync of a file does nothing.
    SkipSync,
    /// The engine's `ack_early`.
    AckEarly,
    /// The engine's `apply_before_log`.
    ApplyBeforeLog,
    /// The log that programs append to, with or without a defect.
    Append(Encoding, Option<Defect>),
    /// A program with a persistent heap, with or without a defect.
    Heap(Option<HeapDefect>),
}

const fn appends(encoding: Encoding, defect: Option<Defect>) -> Broken {
    Broken::Append(encoding, defect)
}

impl Broken {
    /// All of them, with their names, and whether each must be noticed.
    pub const ALL: [(Broken, &'static str, bool); 30] = [
        (Broken::Naive, "naive (control)", true),
        (Broken::Nosync, "nosync (control)", true),
        (Broken::Log, "log (control)", false),
        (Broken::SkipFlush, "skip_flush", true),
        (Broken::SkipLine, "skip_line", true),
        (Broken::SkipFence, "skip_fence", true),
        (Broken::SkipSync, "skip_sync", true),
        (Broken::AckEarly, "ack_early", true),
        (Broken::ApplyBeforeLog, "apply_before_log", true),
        (appends(TornBit, None), "append, torn bit", false),
        (appends(TwoFences, None), "append, two fences", false),
        (appends(Checksum, None), "append, checksum", false),
        (
            appends(TornBit, Some(Fence)),
            "append, torn bit: no fence",
            true,
        ),
        (
            appends(TornBit, Some(LastWord)),
            "append, torn bit: a word less flushed",
            true,
        ),
        (
            appends(TornBit, Some(SameBit)),
            "append, torn bit: not flipped",
            true,
        ),
        (
            appends(TornBit, Some(Stale)),
            "append, torn bit: stale words stay",
            true,
        ),
        (
            appends(TornBit, Some(Truncate)),
            "append, torn bit: truncates without fence",
            true,
        ),
        (
            appends(TwoFences, Some(Order)),
            "append, two fences: the first left out",
            true,
        ),
        (
            appends(TwoFences, Some(Fence)),
            "append, two fences: the second left out",
            true,
        ),
        (
            appends(TwoFences, Some(LastWord)),
            "append, two fences: a word less flushed",
            true,
        ),
        (
            appends(TwoFences, Some(Truncate)),
            "append, two fences: truncates without fence",
            true,
        ),
        (
            appends(Checksum, Some(Sum)),
            "append, checksum: not compared",
            true,
        ),
        (
            appends(Checksum, Some(Fence)),
            "append, checksum: no fence",
            true,
        ),
        (
            appends(Checksum, Some(LastWord)),
            "append, checksum: a word less flushed",
            true,
        ),
        (
            appends(Checksum, Some(Truncate)),
            "append, checksum: truncates without fence",
            true,
        ),
        (Broken::Heap(None), "heap", false),
        (
            Broken::Heap(Some(HeapDefect::State)),
            "heap: a state byte is not committed",
            true,
        ),
        (
            Broken::Heap(Some(HeapDefect::Slab)),
            "heap: a slab's entry after its blocks",
            true,
        ),
        (
            Broken::Heap(Some(HeapDefect::Root)),
            "heap: a root before its block",
            true,
        ),
        (
            Broken::Heap(Some(HeapDefect::Halves)),
            "heap: state bytes before what is in the blocks",
            true,
        ),
    ];

    pub(super) fn is_control(self) -> bool {
        matches!(self, Broken::Naive | Broken::Nosync | Broken::Log)
    }
}

/// A file, as found or as expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) id: u32,
    pub(super) bytes: Arc<Vec<u8>>,
}

pub(super) type Content = BTreeMap<String, Named>;

/// The sync points that were made, and which of them were acknowledged.
pub(super) struct SyncHistory {
    /// The LSN and content after each sync point, ascending.
    pub(super) states: Vec<(u64, Content)>,
    pub(super) acked: u64,
}

pub(super) type Model = Mutex<SyncHistory>;

impl SyncHistory {
    pub(super) fn last(&self) -> &Content {
        &self.states.last().expect("never empty").1
    }

    pub(super) fn judge(&self, lsn: u64, found: &Content) -> Result<(), String> {
        if lsn < self.acked {
            return Err(format!(
                "lost: {} was acknowledged, {lsn} is the last that is found",
                self.acked
            ));
        }
        let state = self.states.iter().rev().find(|s| s.0 == lsn);
        let Some((_, content)) = state else {
            return Err(format!("torn: {lsn} is no end of a sync point"));
        };
        if found == content {
            return Ok(());
        }
        let odd = |a: &Content, b: &Content| {
            let mut names = a.iter().filter(|(n, f)| b.get(*n) != Some(f));
            names.next().map(|(n, _)| n.clone())
        };
        let which = odd(found, content).or_else(|| odd(content, found));
        Err(format!(
            "torn: {} is not as of {lsn}",
            which.unwrap_or_default()
        ))
    }
}

/// A system that runs on the machine.
pub(super) trait System: Sized {
    /// States drawn at a fence that has too many to look at all.
    const SAMPLE: u64 = 256;
    /// Recoveries are cut off, too.
    const CUT_OFF: bool = true;
    /// Starts, and recovers what is there.
    fn open(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Self, String>;
    /// The last sync point, and the content as of it. Only when no sync point is open.
    fn found(&self) -> Result<(u64, Content), String>;
    /// What a recovery finds; overridden if starting does more than a recovery needs.
    fn recovered(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<(u64, Content), String> {
        Self::open(env, broken)?.found()
    }
    /// Makes one step.
    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String>;
    /// Ends cleanly.
    fn end(&mut self, model: &Model) -> Result<(), String>;
}
