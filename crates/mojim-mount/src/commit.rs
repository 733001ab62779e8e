//! Sync points of a mounted directory.
//!
//! Owns what each of them has, and how it is begun. A sync point has all changes of names so far
//! and the bytes of the files it is of. With `--atomic volume` it has the bytes of all files. So a
//! program's changes become durable together or not at all (FAMS 4.2).
//!
//! Invariants:
//!
//! - A sync point has all changes of names so far. Of the files that it is of, it has what is not
//!   begun yet: bytes, size and time of modification together.
//! - Files are marked dirty, and no longer, under the locks of their bytes.
//! - Nobody holds a lock of the mount while it waits for room in the log. The exception is a sync
//!   point so large that it goes through a spill file. Early commits keep that rare.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard};

use mojim::{Batch, Change, RoomWait};

use crate::at_once::{WOULD_WAIT, is_at_once};
use crate::fs::{Bytes, FileBytes, Fs, NOT_YET, Result, State, told};
use crate::name_table::Attributes;
use mojim_env::locks::lock;

/// Which files' bytes a sync point has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct What {
    /// Of all that were written to.
    all: bool,
    /// Of this one.
    one: Option<u64>,
}

impl Fs {
    /// Begins a sync point of a file: its bytes, or everything, as the mount is configured. Returns
    /// the sync point to wait for, if there is one.
    pub(crate) fn begin_sync(&self, ino: u64) -> Result<Option<Batch>> {
        self.check_lost(Some(ino))?;
        self.begin_or_last(What {
            all: self.options.atomic_volume,
            one: Some(ino),
        })
    }

    /// The same of all names.
    pub(crate) fn begin_sync_names(&self) -> Result<Option<Batch>> {
        self.check_lost(None)?;
        self.begin_or_last(What {
            all: self.options.atomic_volume,
            one: None,
        })
    }

    /// Fails if something is lost of a file whose bytes a sync point would have that a program asked for.
    fn check_lost(&self, one: Option<u64>) -> Result<()> {
        if !self.lost.is_any() {
            return Ok(());
        }
        if self.options.atomic_volume {
            return self.lost.check_all();
        }
        let joined = self.state().tree.joined();
        let mut files = joined.into_iter().chain(one);
        files.try_for_each(|ino| self.lost.check(ino))
    }

    /// A sync point of everything.
    pub(crate) fn sync_all(&self) -> Result<()> {
        let (all, one) = (true, None);
        match self.begin_or_last(What { all, one })? {
            Some(batch) => self.volume.complete(&batch).map_err(|e| told(&e)),
            None => Ok(()),
        }
    }

    /// Begins a sync point. If there is nothing to commit, the one to wait for is the last that was begun:
    /// others may have begun what this call is to wait for.
    fn begin_or_last(&self, what: What) -> Result<Option<Batch>> {
        let begun = self.begin(what)?;
        if begun.is_some() {
            return Ok(begun);
        }
        // If that was the last that could be, later stores were refused, or will be.
        self.volume.check().map_err(|e| told(&e))?;
        let state = self.state();
        self.check_served()?;
        Ok(state.last)
    }

    /// Begins a sync point that no program asked for: of a file, or of all.
    pub(crate) fn begin_early(&self, ino: u64, all: bool) -> Result<()> {
        let all = all || self.options.atomic_volume;
        let one = Some(ino);
        self.launch(What { all, one })
    }

    /// Begins a sync point of everything that no program asked for.
    pub(crate) fn begin_all_early(&self) -> Result<()> {
        let (all, one) = (true, None);
        self.launch(What { all, one })
    }

    /// Begins a sync point of everything and does not wait.
    pub(crate) fn tick(&self) -> Result<()> {
        self.begin_all_early()
    }

    /// Begins a sync point for which nobody waits.
    fn launch(&self, what: What) -> Result<()> {
        if let Some(batch) = self.begin(what)? {
            self.volume.launch(&batch);
        }
        Ok(())
    }

    /// Memory of what the data files have by now is free. True if that was much, and no more is awaited:
    /// then the system is to get it.
    pub(crate) fn forget_applied(&self) -> bool {
        let applied = self.volume.applied();
        self.forget_room();
        let mut state = self.state();
        state.tree.applied(applied);
        // Of those alone that have something: there may be a million others.
        let is_applied = |(lsn, _): &(u64, Vec<u64>)| *lsn <= applied;
        while state.unapplied.front().is_some_and(is_applied)
            && let Some((_, files)) = state.unapplied.pop_front()
        {
            for f in files.iter().filter_map(|ino| state.files.get(ino)) {
                lock(&f.bytes).overlay.applied(applied);
            }
        }
        state.gives_back()
    }

    /// Begins a sync point; `None` if there is nothing to commit. Waits for room, or fails with
    /// [`WOULD_WAIT`] where nobody may wait.
    fn begin(&self, what: What) -> Result<Option<Batch>> {
        let mut wait = RoomWait::default();
        loop {
            match self.try_begin(what)? {
                Tried::Begun(batch) => return Ok(Some(batch)),
                Tried::Nothing => return Ok(None),
                Tried::NoRoom if is_at_once() => return Err(WOULD_WAIT),
                Tried::NoRoom => self.volume.await_room(&mut wait).map_err(|e| told(&e))?,
            }
        }
    }

    fn try_begin(&self, what: What) -> Result<Tried> {
        let mut state = self.state();
        self.check_served()?;
        let state = &mut *state;
        let files = self.chosen(state, what);
        let mut held: Vec<(u64, &FileBytes, MutexGuard<'_, Bytes>)> = Vec::new();
        for (ino, f) in &files {
            let b = lock(&f.bytes);
            match b.modified.is_some() || b.overlay.is_dirty() {
                true => held.push((*ino, f, b)),
                // Under its lock: who writes to it next marks it again.
                false => _ = lock(&self.dirty).remove(ino),
            }
        }
        let before = self.set_times(state, &held);
        // The mirror may be another one by now.
        state.tree.longest = self.volume.longest_names();
        state.tree.write_touched();
        let names = state.tree.renames();
        let mut changes: Vec<Change<'_>> = Vec::new();
        names.changes(&mut changes);
        state.tree.changes(&mut changes);
        for (_, f, b) in &held {
            b.overlay.changes(f.number, &mut changes);
        }
        if changes.is_empty() {
            return Ok(Tried::Nothing);
        }
        let begun = self.volume.begin(&changes);
        let n = changes.len();
        drop(changes);
        let Ok(Some(batch)) = begun else {
            for (ino, attributes) in before {
                // The time goes with the bytes, later.
                let _ = state.tree.change(ino, |a| *a = attributes);
            }
            return match begun {
                Ok(_) => Ok(Tried::NoRoom),
                Err(e) => Err(told(&e)),
            };
        };
        self.note_begun(state, held, &batch);
        state.changes += n;
        Ok(Tried::Begun(batch))
    }

    /// The nodes of files that were written to get their times. Returns what they had.
    fn set_times(
        &self,
        state: &mut State,
        held: &[(u64, &FileBytes, MutexGuard<'_, Bytes>)],
    ) -> Vec<(u64, Attributes)> {
        let mut before = Vec::new();
        for (ino, _, b) in held {
            let (Some(at), Ok(node)) = (b.modified, state.tree.node(*ino)) else {
                continue;
            };
            before.push((*ino, node.attributes.clone()));
            let changed = b.written;
            let set = |a: &mut Attributes| (a.modified, a.changed) = (at, a.changed.max(changed));
            let _ = state.tree.change(*ino, set);
        }
        before
    }

    fn note_begun(
        &self,
        state: &mut State,
        held: Vec<(u64, &FileBytes, MutexGuard<'_, Bytes>)>,
        batch: &Batch,
    ) {
        let lsn = batch.lsn();
        let mut blocks = 0;
        let files = held.iter().map(|(ino, ..)| *ino).collect();
        state.unapplied.push_back((lsn, files));
        for (ino, _, mut b) in held {
            b.forget_blocks();
            blocks += b.overlay.blocks();
            self.waiting.fetch_sub(b.overlay.dirty_bytes(), Relaxed);
            // First: who reads it later finds its bytes here or in the data file.
            if b.created == NOT_YET {
                b.created = lsn;
            }
            b.overlay.begun(lsn);
            b.modified = None;
            lock(&self.dirty).remove(&ino);
        }
        self.room.begun(lsn, blocks);
        for (_, f) in state.fresh.drain() {
            let mut b = lock(&f.bytes);
            b.created = b.created.min(lsn);
        }
        state.tree.begun(lsn);
        state.last = Some(*batch);
    }

    /// The files whose bytes a sync point has, by ascending number.
    fn chosen(&self, state: &State, what: What) -> Vec<(u64, Arc<FileBytes>)> {
        let mut inos: Vec<u64> = what.one.into_iter().collect();
        if what.all {
            inos.extend(lock(&self.dirty).iter());
        }
        inos.extend(state.tree.joined());
        inos.sort_unstable();
        inos.dedup();
        let file = |ino| Some((ino, state.files.get(&ino)?.clone()));
        inos.into_iter().filter_map(file).collect()
    }
}

/// So many changes may have left much memory behind.
const MANY_CHANGES: usize = 1000;

impl State {
    fn gives_back(&mut self) -> bool {
        let gives = self.changes >= MANY_CHANGES && self.unapplied.is_empty();
        if gives {
            self.changes = 0;
        }
        gives
    }
}

/// What became of a try to begin a sync point.
enum Tried {
    Begun(Batch),
    Nothing,
    NoRoom,
}
