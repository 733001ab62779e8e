//! The subjects, which make steps durable: Mojim, unbroken or broken in one way, a program over
//! Mojim's heap, and three other programs that a rung must tell apart.
//!
//! Owns their names and their interface. `subjects.rs` opens one.
//!
//! Invariant of [`Subject`]: what [`Subject::commit`] returned success for is
//! acknowledged. A rung finds out which subjects keep this promise.

use std::path::PathBuf;

use crate::Result;
use crate::device::Forced;
use crate::machine::Fault;
use crate::workload::Patch;

/// A program that makes steps durable.
pub trait Subject {
    /// Makes the changes and commits them as one.
    fn commit(&mut self, changes: &[Patch]) -> Result<()>;
    /// Ends cleanly.
    fn close(self: Box<Self>) -> Result<()>;
}

/// A mistake of the program over the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slip {
    /// The state bytes of new blocks are not committed.
    NoState,
    /// Pointers and roots are committed before the blocks to which they point.
    RootFirst,
    /// A step is committed in two parts.
    Halves,
    /// What the other thread is still committing counts as committed.
    OtherEarly,
}

/// The subjects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The shipped engine, over a machine without a fault or with one.
    Mojim(Option<Fault>),
    /// A shared mapping and one msync for each step: steps are torn.
    Naive,
    /// A redo log that acknowledges before its flush: steps are lost.
    Nosync,
    /// A correct redo log.
    Log,
    /// The persistent heap of the shipped engine; the program makes a mistake, or none.
    Heap(Option<Slip>),
}

impl Kind {
    /// All subjects with their names: those that must pass, then those that must be
    /// caught.
    pub const ALL: [(Kind, &'static str); 14] = [
        (Kind::Mojim(None), "mojim"),
        (Kind::Log, "log"),
        (Kind::Heap(None), "heap"),
        (Kind::Naive, "naive"),
        (Kind::Nosync, "nosync"),
        (Kind::Mojim(Some(Fault::NoLogFlush)), "mojim-no-log-flush"),
        (Kind::Mojim(Some(Fault::NoDataFlush)), "mojim-no-data-flush"),
        (
            Kind::Mojim(Some(Fault::NoSuperblockFlush)),
            "mojim-no-superblock-flush",
        ),
        (Kind::Mojim(Some(Fault::DataFirst)), "mojim-data-first"),
        (Kind::Mojim(Some(Fault::AckEarly)), "mojim-ack-early"),
        (Kind::Heap(Some(Slip::NoState)), "heap-no-state"),
        (Kind::Heap(Some(Slip::RootFirst)), "heap-root-first"),
        (Kind::Heap(Some(Slip::Halves)), "heap-halves"),
        (Kind::Heap(Some(Slip::OtherEarly)), "heap-other-early"),
    ];

    /// The subject of this name.
    pub fn of(name: &str) -> Option<Kind> {
        let found = Kind::ALL.into_iter().find(|(_, n)| *n == name);
        found.map(|(kind, _)| kind)
    }

    /// The subject's name.
    pub fn name(self) -> &'static str {
        let found = Kind::ALL.into_iter().find(|(kind, _)| *kind == self);
        found.expect("all are there").1
    }

    /// Whether none of its steps may be lost or torn.
    pub fn must_stand(self) -> bool {
        matches!(self, Kind::Mojim(None) | Kind::Log | Kind::Heap(None))
    }
}

/// Where a subject keeps its files.
#[derive(Debug, Clone)]
pub struct SubjectPaths {
    /// The directory on the disk.
    pub dir: PathBuf,
    /// The directory in memory that does not survive the crash.
    pub ring: PathBuf,
    /// What Mojim's log is kept in, as the configuration says it: `disk` or `pmem`.
    pub medium: String,
    /// The device, if logs are written to it by forced writes.
    pub forced: Option<Forced>,
}
