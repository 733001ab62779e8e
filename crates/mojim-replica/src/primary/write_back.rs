//! Writing back: what is committed goes from the log to the data files, and what the loss
//! of the mirror puts at risk meanwhile.
//!
//! Owns when a primary applies and checkpoints. `pace.rs` owns how often its thread takes a turn.
//!
//! Each turn writes the primary's log first. So what `sync` acknowledges is persistent on the
//! primary
//!
//! - as a rule after about 1 ms,
//! - behind a pause of 50 ms after up to 20 ms,
//! - later while a turn applies or syncs data files.
//!
//! A record is applied when it is committed and in the own log. While the mirror is linked,
//! the record must be in the mirror's log, too. The primary applies
//!
//! - when a log is half full, or a caller waits for room,
//! - when nothing was committed for 50 ms,
//! - when 32 MiB of images are kept in the process (`are_many` in `committed.rs` of
//!   `mojim-memory`),
//! - as `write_back` says.
//!
//! `auto` (the default) applies
//!
//! - in a pause, if `checkpoint_threshold` records wait,
//! - when an eighth of the log (a MiB at least) waits,
//! - after a second in which nothing was written, if as many records wait.
//!
//! `eager` applies when `checkpoint_threshold` records wait, `async` when `write_back_pages`
//! pages do.

use super::*;
use crate::pace::{Pace, Pacer, piece};

impl Primary {
    /// Up to where records may go to the data area: committed, in the own log if that is
    /// to survive, and, while a mirror follows, in its log too, so that what the mirror
    /// lacks is still in the ring.
    pub fn apply_limit(&self) -> u64 {
        if self.store.mutations.apply_before_log.is_on() {
            return self.last();
        }
        let mut limit = self.committed().min(self.persisted.get());
        if self.link_up.load(Acquire) {
            limit = limit.min(self.acked.get());
        }
        limit
    }

    /// One turn of the background at the pace that `pacer` finds. `pressed`: what waits to
    /// be applied takes too much memory.
    pub fn background_turn(&self, pacer: &mut Pacer, pressed: bool) -> Result<()> {
        let is_left = || {
            let s = &self.store;
            s.applied() < self.apply_limit() || s.checkpointed() < s.applied()
        };
        let pace = pacer.begin(self.last(), pressed, is_left);
        pacer.end(self.checkpoint_step(pace)?);
        Ok(())
    }

    /// One turn of the background's work on the own copy: persists what the mode's sync
    /// points do not, applies what is due by the policy and the program's pace,
    /// checkpoints when the log is half full or the program idle. True if it did
    /// something.
    pub fn checkpoint_step(&self, pace: Pace) -> Result<bool> {
        self.store.check()?;
        if !self.store.mutations.apply_before_log.is_on() {
            for lane in 0..self.lanes.len() {
                if pace == Pace::Idle || self.is_left_to_the_background(lane) {
                    self.persist_wait(lane)?;
                }
            }
        }
        self.update_risk(false);
        let before = self.store.applied();
        let limit = self.apply_limit();
        let full = self.store.pressure() > 0.5;
        let idle = pace == Pace::Idle;
        let piece = piece(self.spec.smallest_log);
        // All of them: the mirror takes in what is in the log, whatever waits here.
        let names = || self.store.count_names(u64::MAX);
        let due = full || idle || pace == Pace::Pressed || names() || {
            let enough = limit - before.min(limit) >= self.spec.checkpoint_threshold;
            match self.spec.write_back {
                WriteBack::Eager => enough,
                WriteBack::Async => self.store.has_waiting(self.spec.write_back_pages),
                WriteBack::Auto => {
                    enough && pace == Pace::Quiet || self.store.waiting_bytes() >= piece
                }
            }
        };
        // What finds no room is tried again later. Who looks is told the rest meanwhile.
        let applied = match due {
            true => self.store.apply(limit, piece as usize),
            false => Ok(before),
        };
        let live = &self.store.logs()[0];
        live.live(Live::Last).store(self.last(), Relaxed);
        live.live(Live::Committed)
            .store(self.committed_whole(), Relaxed);
        live.live(Live::Acked).store(self.acked.get(), Relaxed);
        live.live(Live::Persisted)
            .store(self.persisted.get(), Relaxed);
        live.live(Live::LinkUp)
            .store(self.link_up.load(Relaxed) as u64, Relaxed);
        live.live(Live::BytesBehind)
            .store(self.bytes_behind(), Relaxed);
        let applied = applied.map(|_| self.store.applied())?;
        self.note_logged()?;
        if applied > before && self.store.is_laden() {
            names();
            self.done.notify();
        }
        if (full || idle) && applied > self.store.checkpointed() {
            self.store.checkpoint_if(|lsn| self.may_lose(lsn))?;
            self.done.notify();
        }
        let released = self.store.release_held(|lsn| self.may_lose(lsn))?;
        if released {
            self.done.notify();
        }
        Ok(applied > before || released)
    }

    /// Has the superblock say how far the own log is known to be acknowledged, where only that
    /// log shows it, or where each sync point waits for it.
    fn note_logged(&self) -> Result<()> {
        let committed = self.committed_whole();
        let counts = self.rule().local && self.store.level().is_persistent();
        match counts && committed <= self.persisted.get() {
            true => self.store.note_logged(committed),
            false => Ok(()),
        }
    }

    /// Whether no other thread writes this lane's log. Where sync points wait for it, theirs do,
    /// and this one would hold them up: it may lose its processor while it has the lock.
    fn is_left_to_the_background(&self, lane: usize) -> bool {
        let persisted = self.log(lane).persisted();
        let before = self.lanes[lane].was_persisted.swap(persisted, Relaxed);
        !self.rule().local || !self.has_company(lane) || before == persisted
    }

    /// Whether records up to `lsn` may leave the ring: while a mirror follows, what it
    /// lacks stays, even behind the checkpoint for a backup.
    pub(super) fn may_lose(&self, lsn: u64) -> bool {
        !self.link_up.load(Acquire) || lsn <= self.acked.get()
    }

    /// Bytes of records that the mirror has not acknowledged.
    pub fn bytes_behind(&self) -> u64 {
        (0..self.lanes.len())
            .map(|i| {
                let (at, log) = (self.lanes[i].acked_at.load(Relaxed), self.log(i));
                log.head().saturating_sub(at.max(log.start()))
            })
            .sum()
    }

    /// The mirror is lost, seen at `now`: what it acknowledged and the own log lacks is
    /// in this node's memory alone. Not counted if the rule requires the own log too, nor
    /// with a log that is memory, in which everything stays at risk.
    pub(crate) fn mirror_lost(&self, now: Duration) {
        let rule = self.rule();
        let alone = rule.local || !rule.mirror || !self.store.level().is_persistent();
        if alone || self.store.check().is_err() {
            return;
        }
        let of = |l: &OutLane| l.acked_at.load(Relaxed);
        let ends: Vec<u64> = self.lanes.iter().map(of).collect();
        self.risk.begin(self.unpersisted(&ends), now, ends);
        self.update_risk(false);
    }

    /// Bytes before `ends` that the own log does not have.
    pub(super) fn unpersisted(&self, ends: &[u64]) -> u64 {
        let lanes = ends.iter().enumerate();
        lanes
            .map(|(i, end)| end.saturating_sub(self.log(i).persisted()))
            .sum()
    }

    /// Counts the bytes at risk, until the own log has them or (`back`) the mirror is
    /// back with all of them.
    pub(crate) fn update_risk(&self, back: bool) {
        let left = |ends: &[u64]| if back { 0 } else { self.unpersisted(ends) };
        let live = |l| self.store.logs()[0].live(l);
        let now = || self.store.env().now();
        self.risk.update(left, now, live);
    }
}
