//! Sync points that no log can hold: they go through a file of their own
//! (`docs/protocol.md`, "Spill files").
//!
//! Owns the writing of the file and its place in line. Invariant: the record that names a
//! file is appended only after every copy that counts has the file durably.

use super::*;
use crate::piece::{cut, encode, read_copies};

impl Primary {
    /// As `begin_copied`, but never waits: the bytes are taken, the rest is done by
    /// `spill_step`. For drivers that move time themselves.
    pub fn try_spill_now(&self, pieces: &[Piece<'_>]) -> Result<Spilling> {
        self.spilling.fetch_add(1, SeqCst);
        let begun = self.write_spill(pieces);
        if begun.is_err() {
            self.spilling.fetch_sub(1, SeqCst);
        }
        begun
    }

    /// Goes on with a spilling sync point: the LSN and lane of its record once there is
    /// one, `None` while the mirror lacks the file or the log has no room. It is over
    /// after anything but `None`.
    pub fn spill_step(&self, s: &mut Spilling, lane: usize) -> Result<Option<(u64, usize)>> {
        let next = match s.handed || self.is_handed(s)? {
            false => return Ok(None),
            true => self.try_append_now(&[s.piece()], lane),
        };
        s.handed = true;
        next
    }

    /// A spilling sync point is over, with its record in the log or without one.
    pub fn spill_over(&self, s: &Spilling, appended: bool) {
        self.forget_spill(s, appended);
        self.spilling.fetch_sub(1, SeqCst);
    }

    /// Whether a sync point of these pieces takes its bytes before it has an LSN.
    pub fn must_spill(&self, pieces: &[Piece<'_>]) -> bool {
        self.spills(pieces.iter().map(|p| p.len() + OP_LEN).sum())
    }

    #[inline]
    pub(super) fn spills(&self, bytes: usize) -> bool {
        bytes > self.spec.max_record && self.is_too_large(bytes + bytes / 64)
    }

    /// A sync point larger than the log: its operations go to a spill file on
    /// both nodes, durable there, and then one small record names it.
    #[cold]
    pub(super) fn begin_spilled(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        let mut s = self.write_spill(pieces)?;
        let begun = self.hand_spill(&mut s).and_then(|()| {
            let (lsn, lane) = self.append(&[s.piece()])?;
            Ok(Begun { lsn, lane, hint: 0 })
        });
        self.forget_spill(&s, begun.is_ok());
        begun
    }

    pub(super) fn write_spill(&self, pieces: &[Piece<'_>]) -> Result<Spilling> {
        self.check()?;
        let id = self.store.env().random();
        let written = self.write_spill_as(id, pieces);
        if written.is_err() {
            self.store.remove_spill(id);
        }
        Ok(Spilling {
            file: written?,
            usual: self.patience().limit(),
            quiet: self.store.env().now(),
            spilled: self.spilled(),
            handed: false,
        })
    }

    /// The session sends the file no longer, unless a record names it; without one
    /// (`appended`) it is removed.
    pub(super) fn forget_spill(&self, s: &Spilling, appended: bool) {
        let id = s.file.id;
        let mut handed = self.spill.lock().unwrap_or_else(|e| e.into_inner());
        // It may be another file's turn.
        handed.take_if(|(s, _)| s.id == id);
        drop(handed);
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        reached.remove(&id);
        drop(reached);
        if !appended {
            self.store.remove_spill(id);
        }
    }

    pub(super) fn write_spill_as(&self, id: u64, pieces: &[Piece<'_>]) -> Result<SpillFile> {
        let file = self.store.spill_file(id)?;
        let fail = |e: std::io::Error| Error::io("writing a spill file", &e);
        let parts = cut(pieces, 1 << 20);
        let (mut buf, mut copied) = (Vec::new(), Vec::new());
        let mut len = 0u64;
        for (i, part) in parts.iter().enumerate() {
            let part = &read_copies(part, &mut copied)
                .map_err(|e| Error::io("reading what goes to a spill file", &e))?[..];
            let payload = part.iter().map(Piece::len).sum();
            buf.resize(RecordWriter::len_for(part.len(), payload), 0);
            let last = i + 1 == parts.len();
            let n = encode(
                &mut buf,
                part,
                self.volume.load(Relaxed),
                1,
                1,
                i as u32,
                last,
                0,
            );
            file.write_at(&buf[..n], len).map_err(fail)?;
            len += n as u64;
        }
        file.sync().map_err(fail)?;
        let env = self.store.env();
        env.sync_dir(&self.store.spec().meta).map_err(fail)?;
        Ok(SpillFile { id, len, file })
    }

    /// Waits until the mirror has a spill file, if a mirror must have it.
    pub(super) fn hand_spill(&self, s: &mut Spilling) -> Result<()> {
        while !self.is_handed(s)? {
            self.link_work.notify();
            self.done.wait_unless(|| false, Duration::from_millis(1));
        }
        Ok(())
    }

    /// Whether the mirror has a spill file, or none must have it. An error if it is
    /// waited for no longer.
    pub(super) fn is_handed(&self, s: &mut Spilling) -> Result<bool> {
        let needed = self.rule().mirror || self.link_up.load(Acquire);
        if !needed {
            return Ok(true);
        }
        self.check()?;
        {
            // One spill at a time: the others wait their turn.
            let mut slot = self.spill.lock().unwrap_or_else(|e| e.into_inner());
            match &*slot {
                None => *slot = Some((s.file.clone(), false)),
                Some((x, true)) if x.id == s.file.id => {
                    // The next file need not wait for room for this one's record.
                    *slot = None;
                    return Ok(true);
                }
                Some(_) => {}
            }
        }
        // Read before the progress: a confirmation that comes in between shows there.
        let limit = self.standstill(s.usual);
        let now = self.store.env().now();
        let before = std::mem::replace(&mut s.spilled, self.spilled());
        if s.spilled > before || self.is_copying() {
            s.quiet = now;
        }
        if now.saturating_sub(s.quiet) > limit {
            let spill_error = self.spill_error.lock().unwrap_or_else(|e| e.into_inner());
            let link_error = self.link_error.lock().unwrap_or_else(|e| e.into_inner());
            let link_error = link_error.as_ref().map(Error::to_string);
            let why = spill_error.as_ref().or(link_error.as_ref());
            return Err(Error::Timeout(format!(
                "the spill file of a large sync point got no further to the mirror within {limit:?}{}. There is no record of this sync point; its extents count as changed",
                why.map(|w| format!(" ({w})")).unwrap_or_default()
            )));
        }
        Ok(false)
    }

    /// Bytes of spill files that got further than ever before.
    pub fn spilled(&self) -> u64 {
        self.spilled.load(Acquire)
    }

    /// The link has taken a spill file up to byte `at`. One more than its length: the
    /// mirror has confirmed it.
    pub(crate) fn spill_reached(&self, id: u64, at: u64) {
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        let had = reached.entry(id).or_default();
        if at > *had {
            self.spilled.fetch_add(at - *had, AcqRel);
            *had = at;
        }
    }

    /// A session begins that sends these spill files first. How far others got is
    /// forgotten, except for the one whose turn it is.
    pub(crate) fn spills_begin(&self, ids: impl Iterator<Item = u64>) {
        let ids: Vec<u64> = ids.collect();
        let own = self.spill_wanted().map(|s| s.id);
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        reached.retain(|id, _| Some(*id) == own || ids.contains(id));
    }

    /// Sets whether all of a spill file is sent and its confirmation is due.
    pub(crate) fn set_confirming(&self, is: bool) {
        self.confirming.store(is, Release);
    }

    /// The link on which a spill file was sent has ended.
    pub(crate) fn spill_failed(&self, why: &str) {
        let mut error = self.spill_error.lock().unwrap_or_else(|e| e.into_inner());
        *error = Some(why.to_owned());
    }

    /// The spill file that the session is to send.
    pub(crate) fn spill_wanted(&self) -> Option<SpillFile> {
        match &*self.spill.lock().unwrap_or_else(|e| e.into_inner()) {
            Some((s, false)) => Some(s.clone()),
            _ => None,
        }
    }

    /// The mirror has a spill file durably.
    pub(crate) fn spill_arrived(&self, id: u64) {
        if let Some((s, there)) = &mut *self.spill.lock().unwrap_or_else(|e| e.into_inner())
            && s.id == id
        {
            self.spill_reached(id, s.len + 1);
            *there = true;
            *self.spill_error.lock().unwrap_or_else(|e| e.into_inner()) = None;
        }
        self.done.notify();
    }
}
