//! The spill files of a primary that are under way (`docs/reference/protocol.md`, "Spill files").
//!
//! Owns whose turn it is to be sent, and how far each file got. Invariant: one file at a time is sent
//! for sync points that wait.

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::time::Duration;

use mojim_env::turns::Mutex;
use mojim_env::turns::lock;

use crate::piece::Piece;
use crate::spill_out::SpillFile;

/// The spill files of a primary that are under way.
#[derive(Default)]
pub(crate) struct Spills {
    /// The file that the mirror is to get, and whether the mirror has it.
    turn: Mutex<Option<(SpillFile, bool)>>,
    /// Bytes by which files got further towards the mirror than ever before, and how far
    /// each file got. Bytes that are sent again over a new link are no progress: otherwise a
    /// mirror that cannot take a file in would be waited for without end.
    moved: AtomicU64,
    reached: Mutex<BTreeMap<u64, u64>>,
    /// All of a file is sent, and the mirror makes it durable.
    confirming: AtomicBool,
    /// Why the last link on which a file was sent ended.
    error: Mutex<Option<String>>,
    /// Sync points whose bytes go to such files, before they have an LSN.
    pub(super) under_way: AtomicUsize,
}

impl Spills {
    fn turn(&self) -> MutexGuard<'_, Option<(SpillFile, bool)>> {
        lock(&self.turn)
    }

    fn how_far(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        lock(&self.reached)
    }

    pub(super) fn error(&self) -> MutexGuard<'_, Option<String>> {
        lock(&self.error)
    }

    /// Bytes of spill files that got further than ever before.
    pub fn moved(&self) -> u64 {
        self.moved.load(Acquire)
    }

    /// The link has taken a file up to byte `at`. One more than its length: the mirror has
    /// confirmed it.
    pub(crate) fn reached(&self, id: u64, at: u64) {
        let mut reached = self.how_far();
        let had = reached.entry(id).or_default();
        if at > *had {
            self.moved.fetch_add(at - *had, AcqRel);
            *had = at;
        }
    }

    /// A session begins that sends these files first. How far others got is forgotten, except
    /// for the one whose turn it is.
    pub(crate) fn begin(&self, ids: impl Iterator<Item = u64>) {
        let ids: Vec<u64> = ids.collect();
        let own = self.wanted().map(|s| s.id);
        let keeps = |id: &u64| Some(*id) == own || ids.contains(id);
        self.how_far().retain(|id, _| keeps(id));
    }

    /// Sets whether all of a file is sent and its confirmation is due.
    pub(crate) fn set_confirming(&self, is: bool) {
        self.confirming.store(is, Release);
    }

    /// Whether all of a file is sent and its confirmation is due.
    pub(super) fn is_confirming(&self) -> bool {
        self.confirming.load(Acquire)
    }

    /// The link on which a file was sent has ended.
    pub(crate) fn failed(&self, why: &str) {
        *self.error() = Some(why.to_owned());
    }

    /// The file that the session is to send.
    pub(crate) fn wanted(&self) -> Option<SpillFile> {
        match &*self.turn() {
            Some((s, false)) => Some(s.clone()),
            _ => None,
        }
    }

    /// The mirror has a file durably.
    pub(super) fn arrived(&self, id: u64) {
        if let Some((s, there)) = &mut *self.turn()
            && s.id == id
        {
            self.reached(id, s.len + 1);
            *there = true;
            *self.error() = None;
        }
    }

    /// Whether the mirror has a file, whose turn it becomes if it is nobody's. One spill at a
    /// time: the others wait.
    pub(super) fn has_arrived(&self, file: &SpillFile) -> bool {
        let mut turn = self.turn();
        match &*turn {
            None => *turn = Some((file.clone(), false)),
            Some((x, true)) if x.id == file.id => {
                // The next file need not wait for room for this one's record.
                *turn = None;
                return true;
            }
            Some(_) => {}
        }
        false
    }

    /// The file is sent no longer.
    pub(super) fn forget(&self, id: u64) {
        // It may be another file's turn.
        self.turn().take_if(|(s, _)| s.id == id);
        self.how_far().remove(&id);
    }
}

/// A sync point whose bytes stand in a spill file and that has no record yet.
pub struct Spilling {
    pub(super) file: SpillFile,
    /// How long spill files may stand still before this one fails, and since when they
    /// do.
    pub(super) usual: Duration,
    pub(super) quiet: Duration,
    /// What [`Spills::moved`] returned at the last look.
    pub(super) moved: u64,
    /// The mirror has the file, or none must have it.
    pub(super) handed: bool,
}

impl Spilling {
    /// The operation that its record holds.
    pub(super) fn piece(&self) -> Piece<'static> {
        Piece::Spill {
            length: self.file.len,
            id: self.file.id.to_le_bytes(),
        }
    }
}
