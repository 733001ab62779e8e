//! Appending: a record gets its LSN and its room in the log of a lane, and is then made there.
//!
//! Owns the choice of a lane and the order of LSNs in it. Threads take LSNs and room one after
//! the other, and make their records side by side.
//!
//! Invariants:
//! - Records of one lane lie in the order of their LSNs: both are taken in one step.
//! - A thread that takes room waits for nothing until the records are there. If it comes to its
//!   end before, records that change nothing take their place: others' lie behind them.

use std::mem::ManuallyDrop;

use mojim_store::reservations::{Full, Turn};

use super::*;
use crate::piece::{cut, encode, encode_nothing};

/// LSNs that other lanes may take between this lane's look at the window and its own.
const OTHERS: u64 = 1024;

/// LSNs and room for the records of one sync point, until they are there.
pub(super) struct Reserved<'a> {
    primary: &'a Primary,
    lane: usize,
    taken: Taken,
    /// The first record's LSN.
    first: u64,
    lens: &'a [usize],
    /// How many of them are made.
    made: usize,
}

impl Reserved<'_> {
    /// Makes each record, which gets its number among them, its LSN and its memory.
    #[inline]
    pub(super) fn fill(&mut self, mut make: impl FnMut(usize, u64, &mut [u8])) {
        let log = self.primary.log(self.lane);
        let volume = self.primary.volume.load(Relaxed);
        let mut from = self.taken.begin;
        for (i, &len) in self.lens.iter().enumerate() {
            let lsn = self.first + i as u64;
            let (at, off) = match i {
                0 => (self.taken.at, self.taken.off),
                _ => {
                    let at = log.fit(from, len);
                    (at, at % log.size())
                }
            };
            // SAFETY: this room was taken for this record, and is not joined yet.
            make(i, lsn, unsafe {
                log.slot_at(from, at, off, len, volume, lsn)
            });
            self.made = i + 1;
            from = log.end_of(at, len);
        }
    }

    /// The records are there. The last one's LSN is that of the sync point.
    #[inline]
    pub(super) fn join(self) -> Begun {
        let this = ManuallyDrop::new(self);
        this.join_now();
        Begun {
            lsn: this.first + this.lens.len() as u64 - 1,
            lane: this.lane,
            end: this.taken.end,
            hint: 0,
        }
    }

    #[inline]
    fn join_now(&self) {
        let (p, log) = (self.primary, self.primary.log(self.lane));
        if p.store.mutations.send_hole.is_on() {
            let end = self.taken.end;
            while log.head() < end && !log.move_head(log.head(), end) {}
            return;
        }
        if p.lanes[self.lane].room.join(log, self.taken) {
            // Others' records came before their turn, and nobody may be at work for them.
            p.pass_on(self.lane);
        }
    }
}

impl Drop for Reserved<'_> {
    /// The records were not made.
    #[cold]
    fn drop(&mut self) {
        let p = self.primary;
        if p.store.mutations.keep_hole.is_on() {
            return;
        }
        let (volume, epoch) = (p.volume.load(Relaxed), p.epoch.load(Relaxed));
        let (torn, made, n) = (
            p.store.mutations.tear_group.is_on(),
            self.made,
            self.lens.len(),
        );
        self.fill(|i, lsn, slot| match torn {
            false => encode_nothing(slot, volume, lsn, epoch, (0, true), p.stamp(lsn)),
            true if i < made => {}
            true => {
                let part = (i as u32, i + 1 == n);
                encode_nothing(slot, volume, lsn, epoch, part, p.stamp(lsn));
            }
        });
        self.join_now();
    }
}

impl Primary {
    /// Appends one sync point.
    pub fn append(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        self.check_open()?;
        let payload: usize = pieces.iter().map(Piece::len).sum();
        let len = RecordWriter::len_for(pieces.len(), payload);
        if len <= self.spec.max_record && pieces.len() <= MAX_OPS {
            let mut wait = RoomWait::default();
            loop {
                if let Some(done) = self.try_append(pieces, len) {
                    return Ok(done);
                }
                self.wait_for_room(&mut wait)?;
            }
        }
        let parts = cut(pieces, self.spec.max_record);
        if self.is_too_large(payload + parts.len() * RECORD_OVERHEAD + pieces.len() * OP_LEN) {
            return Err(Error::Invalid(
                "a sync point larger than the log must go through a spill file".into(),
            ));
        }
        let mut wait = RoomWait::default();
        loop {
            if let Some(done) = self.try_append_parts(&parts) {
                return Ok(done);
            }
            self.wait_for_room(&mut wait)?;
        }
    }

    /// As `append`, on `lane` if it is free, but never waits: `None` while the
    /// log has no room. For drivers that move time themselves.
    pub fn try_append_now(&self, pieces: &[Piece<'_>], lane: usize) -> Result<Option<Begun>> {
        self.check()?;
        let payload: usize = pieces.iter().map(Piece::len).sum();
        let len = RecordWriter::len_for(pieces.len(), payload);
        if len <= self.spec.max_record && pieces.len() <= MAX_OPS {
            return Ok(self.try_append_on(pieces, len, lane));
        }
        let parts = cut(pieces, self.spec.max_record);
        if self.is_too_large(payload + parts.len() * RECORD_OVERHEAD + pieces.len() * OP_LEN) {
            return Err(Error::Invalid(
                "a sync point larger than the log must go through a spill file".into(),
            ));
        }
        Ok(self.try_append_parts_on(&parts, lane))
    }

    /// Whether a sync point of `bytes` must go through a spill file.
    pub fn is_too_large(&self, bytes: usize) -> bool {
        bytes + self.spec.max_record > self.spec.smallest_log as usize / 2
    }

    /// Whether another record may be appended, by what the data files and the backups lack.
    #[inline]
    fn has_room(&self) -> bool {
        !self.backups.is_full(&self.store) && !self.store.is_laden()
    }

    /// The greatest LSN that may be taken, by what the own log and the mirror lack. Later it may
    /// be more.
    #[inline]
    fn most(&self) -> u64 {
        let most = self.persisted.most();
        match self.rule().mirror || self.link_up.load(Acquire) {
            true => most.min(self.acked.most()),
            false => most,
        }
    }

    /// Takes LSNs and room for records of these lengths. `None` while there is no room for all.
    #[inline]
    pub(super) fn reserve<'a>(&'a self, lens: &'a [usize], own: usize) -> Option<Reserved<'a>> {
        if !self.has_room() {
            return None;
        }
        let (n, most) = (lens.len() as u64, self.most());
        loop {
            let (lane, mut turn) = self.pick_lane(own);
            let next = self.next();
            if self.closed.load(SeqCst) || next.load(SeqCst) + n + OTHERS > most {
                return None;
            }
            match turn.take(self.log(lane), lens) {
                Ok(taken) => {
                    let first = match self.lanes.len() {
                        // Under the lock of the only lane.
                        1 => {
                            let first = next.load(Relaxed);
                            next.store(first + n, Release);
                            first
                        }
                        _ => next.fetch_add(n, SeqCst),
                    };
                    return Some(Reserved {
                        primary: self,
                        lane,
                        taken,
                        first,
                        lens,
                        made: 0,
                    });
                }
                Err(Full::Log) => return None,
                Err(Full::Places) => {}
            }
            drop(turn);
            // Others are making their records, and wait for nothing.
            self.lanes[lane].room.wait_filled(self.log(lane));
        }
    }

    #[inline]
    pub(super) fn try_append(&self, pieces: &[Piece<'_>], len: usize) -> Option<Begun> {
        self.try_append_on(pieces, len, thread_number())
    }

    #[inline]
    pub(super) fn try_append_on(
        &self,
        pieces: &[Piece<'_>],
        len: usize,
        own: usize,
    ) -> Option<Begun> {
        let lens = [len];
        let mut room = self.reserve(&lens, own)?;
        let (volume, epoch) = (self.volume.load(Relaxed), self.epoch.load(Relaxed));
        self.store.mutations.let_others();
        room.fill(|_, lsn, slot| {
            encode(slot, pieces, volume, lsn, epoch, 0, true, self.stamp(lsn));
        });
        Some(room.join())
    }

    pub(super) fn try_append_parts(&self, parts: &[Vec<Piece<'_>>]) -> Option<Begun> {
        self.try_append_parts_on(parts, thread_number())
    }

    pub(super) fn try_append_parts_on(
        &self,
        parts: &[Vec<Piece<'_>>],
        own: usize,
    ) -> Option<Begun> {
        let lens: Vec<usize> = parts
            .iter()
            .map(|p| RecordWriter::len_for(p.len(), p.iter().map(Piece::len).sum()))
            .collect();
        let mut room = self.reserve(&lens, own)?;
        let (volume, epoch) = (self.volume.load(Relaxed), self.epoch.load(Relaxed));
        self.split
            .add(room.first, room.first + lens.len() as u64 - 1);
        room.fill(|i, lsn, slot| {
            self.store.mutations.let_others();
            let (part, end) = (i as u32, i + 1 == parts.len());
            encode(
                slot,
                &parts[i],
                volume,
                lsn,
                epoch,
                part,
                end,
                self.stamp(lsn),
            );
        });
        Some(room.join())
    }

    /// A lane, and the right to take room there: this thread's own if it is free, else any
    /// free one, else its own after waiting.
    #[inline]
    fn pick_lane(&self, own: usize) -> (usize, Turn<'_>) {
        let n = self.lanes.len();
        let own = own % n;
        for lane in (own..n).chain(0..own) {
            if let Some(turn) = self.lanes[lane].room.try_turn() {
                return (lane, turn);
            }
        }
        (own, self.lanes[own].room.turn())
    }
}
