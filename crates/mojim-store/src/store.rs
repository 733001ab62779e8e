//! One node's copy of a volume: superblock, logs, data area.
//!
//! Owns the durable facts of views, and what is known to be missing. Its modules:
//!
//! - `state`: the fields and their locks
//! - `open`: opening and recovery
//! - `apply`: application and release of records
//! - `applier`: how far records are applied
//! - `gate`: which thread takes the applier's lock first
//! - `spill`: spill files
//! - `sizes`: the sizes of data files
//! - `hold`: requests of background readers
//! - `load`: a copy that comes from another node
//!
//! Primary and mirror use the same code. They differ in who fills the logs and in what
//! counts as committed.
//!
//! Invariants:
//!
//! - 1 of `docs/reference/invariants.md`: a record reaches the data area only from a log at least
//!   as durable, and only when committed. Where the log is memory, the boot id
//!   was made durable when the store was opened, so a copy from another boot is
//!   discarded.
//! - The records that a [`Hold`] still needs stay in the logs below the checkpoint, as
//!   long as there is room for them.
//! - A copy is replaced only by a whole one: a copy from another node is staged
//!   beside it until all of it is durable (`stage`).
//! - After the first failed write or sync the store is poisoned: every call
//!   that would make something durable returns that error.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use mojim_env::locks;
use mojim_env::turns::lock;
use mojim_format::superblock::MAX_HISTORY;
use mojim_format::{State, Superblock, View};
use mojim_protocol::{History, Holding, is_rival};

use mojim_env::{Error, Longest, Result};

mod applier;
mod apply;
mod gate;
mod hold;
mod load;
mod mutations;
mod open;
mod reserve;
mod sizes;
mod spill;
mod state;

pub use apply::{AT_ONCE, Page};
pub use hold::{MOST_CHANGED, Pause};
pub use mutations::{Mutations, Switch};
pub use open::read_superblock;
pub use spill::find_in_spill;
pub use state::{Hold, JOINING, Store, StoreSpec, Watch};

use state::Missing;

/// How often the superblock says what the logs have, at most.
const NOTE_EVERY: Duration = Duration::from_millis(250);

impl Store {
    /// Whether no record that was acknowledged is missing from this copy, as
    /// far as its logs tell: for a primary that has no other copy to ask.
    pub fn is_complete(&self) -> bool {
        self.missing().is_none()
    }

    fn missing(&self) -> Option<Missing> {
        let missing = lock(&self.missing).clone();
        missing.filter(|_| !self.mutations.forget_missing.is_on())
    }

    /// The last LSN acknowledged according to the logs, if they lack its record.
    pub fn known_missing(&self) -> Option<u64> {
        self.missing().map(|m| m.known)
    }

    /// Whether a damaged log shows that records are missing, and not only lanes that
    /// end at different LSNs.
    pub fn has_hole(&self) -> bool {
        self.has_hole.load(Acquire) || self.has_part()
    }

    /// Whether the files have a part of a sync point that the logs lacked when this copy was
    /// opened: records alone do not lead from such a copy to another.
    pub fn has_part(&self) -> bool {
        self.has_part.load(Acquire)
    }

    /// The last LSN that this copy knows to have been acknowledged, in its history,
    /// whether it has the record or not.
    pub fn known_acknowledged(&self) -> u64 {
        let known = self.known.load(Acquire);
        match self.mutations.forget_missing.is_on() {
            true => known.min(self.tail()),
            false => known,
        }
    }

    /// Fails if an LSN above `tail` is known to have been acknowledged. The copy has
    /// every record up to `tail`.
    pub fn check_complete_at(&self, tail: u64) -> Result<()> {
        let missing = self.missing();
        let Some(Missing { known, path, at }) = missing.filter(|m| m.known > tail) else {
            return Ok(());
        };
        let (why, were) = match at {
            None => (
                "it has a part of what the log lacks, whose end is damaged".to_owned(),
                "may have been",
            ),
            Some(at) if self.has_hole.load(Acquire) => (
                format!("the record at byte {at} of the log is damaged"),
                "were",
            ),
            Some(at) => {
                let why = format!("the log ends too early, at byte {at} or in another lane");
                (why, "were")
            }
        };
        Err(Error::Damaged {
            path,
            what: format!(
                "{why}: sync points up to LSN {known} {were} acknowledged, LSN {tail} is the last that can be read. Restore the log, or give the others up with `mojim promote --force --volume {} --name {}`",
                self.spec.volume, self.spec.node
            ),
        })
    }

    /// [`Store::check_complete_at`] for what was found in the logs, just after they
    /// were opened.
    pub fn check_complete(&self) -> Result<()> {
        let found = self.check_complete_at(self.tail());
        if found.is_err() {
            // The next process must not take what was read from the damaged log for
            // the log.
            for log in &self.logs {
                log.remove_ring();
            }
        }
        found
    }

    /// Records above `keep` are given up, so they do not count as missing any more.
    fn forget_beyond(&self, keep: u64) {
        self.known.fetch_min(keep, AcqRel);
        lock(&self.missing).take_if(|m| m.known > keep);
    }

    /// What this copy holds, for pairing. The thread that fills the logs knows `tail`.
    pub fn holding(&self, tail: u64) -> Holding {
        let sb = self.superblock();
        Holding {
            // Never used, even if `make_new` was interrupted.
            volume_id: if sb.state == State::Empty && sb.view.epoch == 0 {
                0
            } else {
                sb.volume_id
            },
            state: sb.state,
            tail,
            history: (*self.history()).clone(),
        }
    }

    /// The name and size of the largest file.
    pub fn largest_file(&self) -> Option<(String, u64)> {
        let area = self.area();
        let largest = area.files().max_by_key(|f| f.size);
        largest.map(|f| (f.name.clone(), f.size))
    }

    /// The name of a file that a copy with these longest names cannot have.
    pub fn too_long(&self, longest: Longest) -> Option<String> {
        let area = self.area();
        let found = area.files().find(|f| !longest.takes(&f.name));
        found.map(|f| f.name.clone())
    }

    /// Makes an empty copy the first copy of a new volume. The copy counts as whole
    /// only at the end.
    pub fn make_new(&self) -> Result<()> {
        if self.superblock().awaits_copy {
            return Err(Error::Invalid(format!(
                "another node has a copy of volume {}, and that is to be copied here: nothing is made anew in its place. Start the other node; if it is lost for good, remove {}",
                self.spec.volume,
                self.spec.meta.display()
            )));
        }
        let id = self.env.random();
        self.update(|s| {
            s.volume_id = id;
            s.checkpoint = 0;
        })?;
        let mut a = self.applier.lock();
        self.fail(lock(&self.area).reset(id))?;
        self.restart_at(&mut a, 0, (State::Whole, id), &[], self.env.random())?;
        drop(a);
        self.loading.store(false, Release);
        Ok(())
    }

    /// The first epoch above `above` that this node may begin. At the end of the numbers it is
    /// not above: none of these is begun any more.
    pub fn next_epoch(&self, above: u64) -> u64 {
        let n = self.spec.holders;
        let e = above.min(u64::MAX - 2 * n) + 1;
        e + (self.spec.rank + n - e % n) % n
    }

    /// Whether this node, and no other, may begin `epoch`.
    pub fn is_own(&self, epoch: u64) -> bool {
        epoch % self.spec.holders == self.spec.rank
    }

    /// Fails if an operator must decide before this copy, with this `tail`, is replaced
    /// by `theirs`, the copy of node `from`, which is a primary of `epoch`.
    pub fn check_rival(
        &self,
        tail: u64,
        theirs: &Holding,
        epoch: u64,
        from: &str,
    ) -> std::result::Result<(), String> {
        let led_there = |e| e % self.spec.holders == epoch % self.spec.holders;
        let ours = self.holding(tail);
        if !self.spec.by_hand || !is_rival(theirs, &ours, led_there) {
            return Ok(());
        }
        let (me, volume) = (&self.spec.node, &self.spec.volume);
        Err(format!(
            "nodes {from} and {me} were both promoted for volume {volume}, neither knowing of the other's promotion. Node {me} has sync points up to LSN {tail} of epoch {}, node {from} up to LSN {} of epoch {}, and neither has all of the other's. Decide which node goes on. Run `mojim promote --force --volume {volume} --name` with it while both daemons run: that gives up sync points that only the other has",
            ours.history.last_epoch(),
            theirs.tail,
            theirs.history.last_epoch(),
        ))
    }

    /// The view as far as this node may still rely on it: after it has promised a
    /// later epoch of another node, it is no longer the primary of its view.
    pub fn standing(&self) -> View {
        self.standing_of(&self.superblock())
    }

    /// [`Store::standing`] for a superblock that was already read.
    pub fn standing_of(&self, sb: &mojim_format::Superblock) -> View {
        let mut v = sb.view.clone();
        let to_other = !self.is_own(sb.promised);
        if v.primary == self.spec.node && sb.promised > v.epoch && to_other {
            v.primary.clear();
        }
        v
    }

    /// The end of the last whole sync point at or below `lsn`, where every
    /// record up to `lsn` is in the logs or applied.
    pub fn whole(&self, lsn: u64) -> u64 {
        // Nothing is released, and no record dropped, meanwhile.
        let _durable = lock(&self.durable);
        for log in &self.logs {
            let mut behind = log.records(log.start());
            if let Some(r) = behind.find(|r| r.header.lsn >= lsn)
                && r.header.lsn == lsn
            {
                return match r.header.end {
                    true => lsn,
                    false => lsn - r.header.part as u64 - 1,
                };
            }
        }
        // The record was applied and released. Only whole sync points are.
        lsn
    }

    /// Begins `epoch` on this node durably: the view, and the first LSN that
    /// belongs to it.
    pub fn begin_epoch(&self, epoch: u64, first_lsn: u64, view: View) -> Result<()> {
        let mut h = (*self.history()).clone();
        h.begin(epoch, first_lsn, self.retained.load(Acquire));
        self.update(|s| {
            s.promised = s.promised.max(epoch);
            s.view = view;
            s.history = h.entries().to_vec();
            s.logged = s.logged.min(first_lsn - 1);
            // Whatever this node lost, it now has what its view holds.
            (s.ring_lost, s.renewed) = (false, false);
        })?;
        *locks::write(&self.history) = Arc::new(h);
        Ok(())
    }

    /// Takes over the primary's history and view (on the mirror, at the start
    /// of a session).
    pub fn follow(&self, history: History, view: View) -> Result<()> {
        // The primary may have forgotten epochs that this node's log still needs,
        // since its checkpoint is older.
        let history = match history.entries().first() {
            Some(first) => {
                let mine = self.history();
                let older = mine
                    .entries()
                    .iter()
                    .filter(|e| e.epoch < first.epoch && e.first_lsn <= first.first_lsn);
                let all: Vec<_> = older.chain(history.entries()).copied().collect();
                let from = all.len().saturating_sub(MAX_HISTORY);
                History::from_entries(&all[from..]).unwrap_or(history)
            }
            None => history,
        };
        self.update(|s| {
            s.promised = s.promised.max(view.epoch);
            s.view = view;
            s.history = history.entries().to_vec();
        })?;
        *locks::write(&self.history) = Arc::new(history);
        Ok(())
    }

    /// Promises not to accept anything of an epoch below `epoch` any more.
    pub fn promise(&self, epoch: u64) -> Result<()> {
        let durable = !self.mutations.promise_early.is_on();
        self.write_superblock(|s| s.promised = s.promised.max(epoch), durable)
    }

    /// As [`Store::promise`], for a copy that has not promised the epoch of the view in which it is
    /// asked: it was not in that view, or is of an earlier time. From now on it does not count as
    /// a mirror, until a session says that it does.
    pub fn promise_as_nonmember(&self, epoch: u64) -> Result<()> {
        let durable = !self.mutations.promise_early.is_on();
        let change = |s: &mut Superblock| {
            s.promised = s.promised.max(epoch);
            if s.view.mirror == s.node {
                s.view.mirror.clear();
            }
        };
        self.write_superblock(change, durable)
    }

    /// Drops every record above `keep` from the logs' heads. The caller ensures
    /// that their epoch is over (`begin_epoch` or `follow` with a later epoch
    /// that begins at or before the first of them).
    pub fn truncate(&self, keep: u64) -> Result<()> {
        let mut a = self.applier.lock();
        a.recount();
        if keep < a.applied {
            return Err(Error::Protocol(format!(
                "records above {keep} are to be dropped, but {} are applied",
                a.applied
            )));
        }
        if self.superblock().logged > keep {
            self.update(|s| s.logged = keep)?;
        }
        let durable = lock(&self.durable);
        for (log, &cursor) in self.logs.iter().zip(&a.cursors) {
            let at = log.records(cursor).pass(|r| r.header.lsn <= keep);
            if at < log.head() {
                log.rewind(at);
            }
        }
        drop(durable);
        self.tail.store(keep, Release);
        let mut area = lock(&self.area);
        if area.begun().1 > keep {
            area.forget_begun();
        }
        drop(area);
        self.shown.fetch_min(keep, AcqRel);
        self.forget_beyond(keep);
        Ok(())
    }

    /// Notes durably, now and then, that this node's own logs have everything up to `lsn`
    /// durably, and that it was acknowledged: where nobody else has it, logs that end before
    /// are otherwise not told from logs that were always so short. For the one thread that
    /// works in a primary's background.
    pub fn note_logged(&self, lsn: u64) -> Result<()> {
        let now = self.env.now();
        let mut next = lock(&self.next_note);
        if now < *next || lsn <= self.superblock().logged {
            return Ok(());
        }
        *next = now + NOTE_EVERY;
        drop(next);
        self.update(|s| s.logged = lsn)
    }

    /// Where lane `lane`'s first record above `lsn` begins. Only for LSNs at
    /// or above the checkpoint.
    pub fn seek(&self, lane: usize, lsn: u64) -> u64 {
        let log = &self.logs[lane];
        log.records(log.start()).pass(|r| r.header.lsn <= lsn)
    }

    /// LSN of the last record in a lane's log and the part number that must
    /// follow it; (0, 0) if the log is empty.
    pub fn last_of(&self, lane: usize) -> (u64, u32) {
        let log = &self.logs[lane];
        log.records(log.start()).last().map_or((0, 0), |r| {
            let part = if r.header.end { 0 } else { r.header.part + 1 };
            (r.header.lsn, part)
        })
    }

    /// Lets other processes open this copy. From here on every change through this
    /// `Store` fails.
    pub fn release_lock(&self) {
        let gone = Error::Busy(format!(
            "node {} has handed its copy of volume {} over",
            self.spec.node, self.spec.volume
        ));
        let _ = self.poison.set(gone);
        *lock(&self.held) = None;
    }

    /// After everything is applied: makes it durable and says so in the superblock,
    /// so that the next start finds a copy that needs no log.
    pub fn close_clean(&self, tail: u64) -> Result<()> {
        self.close_for_next(tail)?;
        for log in &self.logs {
            log.remove_ring();
        }
        Ok(())
    }

    /// [`Store::close_clean`] for a copy that is opened again at once: its rings stay,
    /// since freeing their pages and making new ones takes long.
    pub fn close_for_next(&self, tail: u64) -> Result<()> {
        assert_eq!(self.applied(), tail, "closed before everything was applied");
        // An unfinished session may have left it frozen; a copy that is being read
        // for a backup is given up.
        self.freeze(false);
        self.revoke_pauses();
        let left = (0..self.logs.len()).any(|i| self.last_of(i).0 > tail);
        if left {
            return Err(Error::Busy("sync points are still under way".into()));
        }
        self.checkpoint()?;
        assert_eq!(
            self.checkpointed(),
            tail,
            "clean means that no log is needed"
        );
        let synced = lock(&self.area).sync();
        self.fail(synced)?;
        self.remove_stray_spills();
        self.update(|s| {
            s.boot_id = [0; 16];
            s.logs = 0;
        })
    }
}
