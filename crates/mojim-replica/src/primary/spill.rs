//! Sync points that no log can hold: they go through a file of their own.
//!
//! The protocol is in `docs/reference/protocol.md`, "Spill files".
//!
//! Owns the writing of the file, and how its sync point goes on. `spills.rs` has its place in line.
//!
//! Invariant: the record that names a file is appended only after every copy that counts has the
//! file durably.

use super::*;
use crate::piece::{cut, encode, read_copies};
use mojim_env::turns::lock;

impl Primary {
    /// As `begin_copied`, but never waits: the bytes are taken, the rest is done by
    /// `spill_step`. For drivers that move time themselves.
    pub fn try_spill_now(&self, pieces: &[Piece<'_>]) -> Result<Spilling> {
        self.spills.under_way.fetch_add(1, SeqCst);
        let begun = self.write_spill(pieces);
        if begun.is_err() {
            self.spills.under_way.fetch_sub(1, SeqCst);
        }
        begun
    }

    /// Goes on with a spilling sync point: begun once there is its record, `None` while the
    /// mirror lacks the file or the log has no room. It is over after anything but `None`.
    pub fn spill_step(&self, s: &mut Spilling, lane: usize) -> Result<Option<Begun>> {
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
        self.spills.under_way.fetch_sub(1, SeqCst);
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
        let handed = self.hand_spill(&mut s);
        let begun = handed.and_then(|()| self.append(&[s.piece()]));
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
            moved: self.spills.moved(),
            handed: false,
        })
    }

    /// The session sends the file no longer, unless a record names it; without one
    /// (`appended`) it is removed.
    pub(super) fn forget_spill(&self, s: &Spilling, appended: bool) {
        self.spills.forget(s.file.id);
        if !appended {
            self.store.remove_spill(s.file.id);
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
        if self.spills.has_arrived(&s.file) {
            return Ok(true);
        }
        // Read before the progress: a confirmation that comes in between shows there.
        let limit = self.standstill(s.usual);
        let now = self.store.env().now();
        let before = std::mem::replace(&mut s.moved, self.spills.moved());
        if s.moved > before || self.other_end.is_copying() {
            s.quiet = now;
        }
        if now.saturating_sub(s.quiet) > limit {
            let spill_error = self.spills.error();
            let link_error = lock(&self.link_error);
            let link_error = link_error.as_ref().map(Error::to_string);
            let why = spill_error.as_ref().or(link_error.as_ref());
            return Err(Error::Timeout(format!(
                "the spill file of a large sync point got no further to the mirror within {limit:?}{}. There is no record of this sync point; its extents count as changed",
                why.map(|w| format!(" ({w})")).unwrap_or_default()
            )));
        }
        Ok(false)
    }

    /// The mirror has a spill file durably.
    pub(crate) fn spill_arrived(&self, id: u64) {
        self.spills.arrived(id);
        self.done.notify();
    }
}
