//! Who makes the steps durable: Mojim, whole or broken in one way, and three
//! programs that a rung must tell apart.
//!
//! Owns their names and what they have in common; `subjects.rs` opens one.
//!
//! Invariant of [`Subject`]: what [`Subject::commit`] returned success for is
//! acknowledged. Which subjects keep that promise is what a rung finds out.

use std::path::PathBuf;

use crate::Result;
use crate::machine::Fault;
use crate::workload::Change;

/// Makes steps durable.
pub trait Subject {
    /// Makes the changes and commits them as one.
    fn commit(&mut self, changes: &[Change]) -> Result<()>;
    /// Ends in order.
    fn close(self: Box<Self>) -> Result<()>;
}

/// The subjects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The shipped engine, over a machine without a fault or with one.
    Mojim(Option<Fault>),
    /// A shared mapping and one msync for each step: tears.
    Naive,
    /// A redo log that acknowledges before its flush: loses.
    Nosync,
    /// A redo log as it should be.
    Log,
}

impl Kind {
    /// All of them with their names: those that must stand, then those that
    /// must be found out.
    pub const ALL: [(Kind, &'static str); 9] = [
        (Kind::Mojim(None), "mojim"),
        (Kind::Log, "log"),
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
    ];

    /// By its name.
    pub fn of(name: &str) -> Option<Kind> {
        let found = Kind::ALL.into_iter().find(|(_, n)| *n == name);
        found.map(|(kind, _)| kind)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        let found = Kind::ALL.into_iter().find(|(kind, _)| *kind == self);
        found.expect("all are there").1
    }

    /// Whether nothing of it may be lost or torn.
    pub fn must_stand(self) -> bool {
        matches!(self, Kind::Mojim(None) | Kind::Log)
    }
}

/// Where a subject keeps its files.
#[derive(Debug, Clone)]
pub struct Place {
    /// On the disk.
    pub dir: PathBuf,
    /// In memory that does not outlive the crash.
    pub ring: PathBuf,
    /// What Mojim's log is kept in, as the configuration says it: `disk` or `pmem`.
    pub medium: String,
}
