//! Appending: a record gets its LSN and its place in the log of a lane.
//!
//! Owns the choice of a lane and the order of LSNs in it. Invariant: records of one lane
//! lie in the order of their LSNs.

use super::*;
use crate::piece::{cut, encode};

impl Primary {
    /// Appends one sync point. Returns the LSN of its last record and its lane.
    pub fn append(&self, pieces: &[Piece<'_>]) -> Result<(u64, usize)> {
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
    pub fn try_append_now(
        &self,
        pieces: &[Piece<'_>],
        lane: usize,
    ) -> Result<Option<(u64, usize)>> {
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

    /// Whether another record may be appended, by what the own log, the data files, the mirror
    /// and the backups lack.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.has_window() && !self.backups.is_full(&self.store) && !self.store.is_laden()
    }

    pub(super) fn has_window(&self) -> bool {
        let next = self.next.load(Acquire) + 1024;
        let rule = self.rule();
        self.persisted.has_room(next)
            && (!(rule.mirror || self.link_up.load(Acquire)) || self.acked.has_room(next))
    }

    #[inline]
    pub(super) fn try_append(&self, pieces: &[Piece<'_>], len: usize) -> Option<(u64, usize)> {
        self.try_append_on(pieces, len, thread_number())
    }

    #[inline]
    pub(super) fn try_append_on(
        &self,
        pieces: &[Piece<'_>],
        len: usize,
        own: usize,
    ) -> Option<(u64, usize)> {
        let (lane, _held) = self.pick_lane(own);
        let log = self.log(lane);
        let head = log.head();
        let at = log.place(head, len)?;
        if !self.has_room() || self.closed.load(SeqCst) {
            return None;
        }
        let lsn = self.next.fetch_add(1, SeqCst);
        // SAFETY: the append lock is held, `at` is of the present head, and
        // the slot is dropped before `publish`.
        let slot = unsafe { log.slot(head, at, len, self.volume.load(Relaxed), lsn) };
        encode(
            slot,
            pieces,
            self.volume.load(Relaxed),
            lsn,
            self.epoch.load(Relaxed),
            0,
            true,
            self.stamp(lsn),
        );
        log.publish(at, len);
        Some((lsn, lane))
    }

    pub(super) fn try_append_parts(&self, parts: &[Vec<Piece<'_>>]) -> Option<(u64, usize)> {
        self.try_append_parts_on(parts, thread_number())
    }

    pub(super) fn try_append_parts_on(
        &self,
        parts: &[Vec<Piece<'_>>],
        own: usize,
    ) -> Option<(u64, usize)> {
        let (lane, _held) = self.pick_lane(own);
        let log = self.log(lane);
        let lens: Vec<usize> = parts
            .iter()
            .map(|p| RecordWriter::len_for(p.len(), p.iter().map(Piece::len).sum()))
            .collect();
        let mut from = log.head();
        for &len in &lens {
            from = log.place(from, len)? + (len as u64).next_multiple_of(log.align());
        }
        if !self.has_room() || self.closed.load(SeqCst) {
            return None;
        }
        let n = parts.len() as u64;
        let first = self.next.fetch_add(n, SeqCst);
        self.split.add(first, first + n - 1);
        for (i, (part, &len)) in parts.iter().zip(&lens).enumerate() {
            let head = log.head();
            let at = log.place(head, len).expect("room was found above");
            let lsn = first + i as u64;
            // SAFETY: as in `try_append`.
            let slot = unsafe { log.slot(head, at, len, self.volume.load(Relaxed), lsn) };
            encode(
                slot,
                part,
                self.volume.load(Relaxed),
                lsn,
                self.epoch.load(Relaxed),
                i as u32,
                i + 1 == parts.len(),
                self.stamp(lsn),
            );
            log.publish(at, len);
        }
        Some((first + n - 1, lane))
    }

    /// A lane and its append lock: this thread's own if it is free, else any
    /// free one, else its own after waiting.
    #[inline]
    pub(super) fn pick_lane(&self, own: usize) -> (usize, std::sync::MutexGuard<'_, ()>) {
        let n = self.lanes.len();
        let own = own % n;
        for i in 0..n {
            let lane = (own + i) % n;
            if let Ok(g) = self.lanes[lane].append.try_lock() {
                return (lane, g);
            }
        }
        let g = self.lanes[own]
            .append
            .lock()
            .unwrap_or_else(|e| e.into_inner());
        (own, g)
    }
}
