//! The load of a session besides records: the whole copy, and spill files.

use super::*;

impl Session {
    pub(super) fn copy_out(&mut self) -> Result<()> {
        let store = self.policy.primary.store.clone();
        if store.superblock().state == State::Empty {
            store.make_new()?;
        }
        if self.policy.attach {
            // Nothing else touches this copy yet: its whole prefix is kept.
            store.freeze(false);
            store.truncate(store.tail())?;
            store.persist_all()?;
            store.apply_all(store.tail())?;
        }
        // This copy goes before one to a backup, which begins anew.
        store.revoke_pauses();
        // After a restart the data files may show more than is applied again: what the
        // attach adopted must be applied before it is copied.
        store.freeze(false);
        while store.applied() < self.policy.adopted_lsn {
            let before = store.applied();
            if store.apply(self.policy.adopted_lsn, 1 << 20)? == before {
                return Err(Error::Protocol(
                    "the adopted records are not all here".into(),
                ));
            }
        }
        // What is committed by now need not wait in the log meanwhile.
        store.apply(self.policy.primary.apply_limit(), usize::MAX)?;
        if !store.is_exact() {
            return Err(Error::Busy(
                "the data files show a part of what found no room when it was applied".into(),
            ));
        }
        // The data files must not change; what commits meanwhile stays in the ring.
        store.freeze(true);
        if store.area().is_torn() {
            // Another thread found no room just before.
            store.freeze(false);
            let torn = || Error::Busy("what is committed is applied in part".into());
            return Err(store.lacks_room().unwrap_or_else(torn));
        }
        self.send_copy(None);
        Ok(())
    }

    /// Sends the spill files of the records above `resume`, then opens the lanes. Also
    /// files that the mirror once confirmed: it keeps one only while a record in its log
    /// names it.
    pub(super) fn send_spills(&mut self, session: u64, resume: u64) -> Result<()> {
        let store = &self.policy.primary.store;
        let mut files = VecDeque::new();
        for (i, log) in store.logs().iter().enumerate() {
            for r in log.records(store.seek(i, resume)) {
                if let Some((id, len)) = named_spill(&r)? {
                    // Without the file the mirror needs a copy.
                    let file = store
                        .open_spill(id)
                        .inspect_err(|_| self.force_copy = true)?;
                    files.push_back(SpillFile { id, len, file });
                }
            }
        }
        self.policy.primary.spills.begin(files.iter().map(|s| s.id));
        if store.mutations.spill_once.is_on() {
            files.clear();
        }
        self.await_spills(session, resume, files)
    }

    /// Sends the spill file whose turn it is: of a record that is sent again, or of
    /// a large sync point that waits for it.
    pub(super) fn send_spill(&mut self) -> Result<bool> {
        let wanted = match &self.phase {
            Phase::Spilling { files, .. } => files.front().cloned(),
            Phase::Active => self.policy.primary.spills.wanted(),
            _ => None,
        };
        let Some(wanted) = wanted else {
            if self.spill.take().is_some() {
                self.policy.primary.spills.set_confirming(false);
            }
            return Ok(false);
        };
        let id = wanted.id;
        if self.spill.as_ref().is_none_or(|s| s.id() != id) {
            self.policy.primary.spills.set_confirming(false);
            self.spill = Some(SpillOut::new(wanted));
        }
        let had = self.confirms_spill();
        let sent = self.pump_spill()?;
        if sent.further
            && let Some(out) = &self.spill
        {
            self.policy.primary.spills.reached(id, out.taken());
        }
        if self.confirms_spill() && !had {
            self.policy.primary.spills.set_confirming(true);
        }
        Ok(sent.moved)
    }

    /// A copy cannot be made, for a reason that will not pass by itself (no
    /// room, say): an attach ends, a running primary tries again much later.
    pub(super) fn copy_failed(&mut self, why: String) -> Error {
        let e = Error::Busy(format!(
            "the copy of volume {} cannot be made: {why}",
            self.policy.primary.store.spec().volume
        ));
        if self.policy.attach {
            self.policy.fatal = Some(e.clone());
        }
        self.backoff = COPY_AGAIN;
        e
    }

    /// A frame of the mirror's copy, which this node takes.
    pub(super) fn copy_in(&mut self, f: &Frame, body: &[u8]) -> Result<()> {
        let store = self.policy.primary.store.clone();
        store.progress.moved((FRAME_LEN + body.len()) as u64);
        let (Phase::Receiving(copy), Some(wire)) = (&self.phase, &mut self.wire) else {
            return Err(self.out_of_turn(f.kind));
        };
        let lsn = match copy.take(&store, wire, self.policy.epoch, f, body) {
            Ok(Some(lsn)) => lsn,
            Ok(None) => return Ok(()),
            // This node has no room for what comes, something is in its way, or it cannot be
            // written. A protocol error may not occur again.
            Err(e)
                if matches!(
                    f.kind,
                    FrameKind::CopyFile | FrameKind::CopySums | FrameKind::CopyData
                ) && !matches!(e, Error::Protocol(_)) =>
            {
                return Err(self.copy_failed(e.to_string()));
            }
            Err(e) => return Err(e),
        };
        // By the plan, a copy of the same volume continues the copy here.
        match copy.continues {
            true => store.load_more(lsn, &copy.history)?,
            false => store.load_end(lsn, &copy.history)?,
        }
        self.start(lsn, lsn)
    }

    /// The lanes begin when the mirror has confirmed all of `files`.
    fn await_spills(
        &mut self,
        session: u64,
        resume: u64,
        files: VecDeque<SpillFile>,
    ) -> Result<()> {
        if files.is_empty() {
            return self.begin_lanes(session, resume);
        }
        self.phase = Phase::Spilling {
            session,
            resume,
            files,
        };
        Ok(())
    }

    /// The mirror has this spill file durably.
    pub(super) fn spill_confirmed(&mut self, id: u64) -> Result<()> {
        let Phase::Spilling {
            session,
            resume,
            files,
        } = &mut self.phase
        else {
            return Err(self.out_of_turn(FrameKind::Spill));
        };
        if let Some(s) = files.front().filter(|s| s.id == id) {
            self.policy.primary.spills.reached(s.id, s.len + 1);
            files.pop_front();
        }
        let (session, resume, files) = (*session, *resume, std::mem::take(files));
        self.await_spills(session, resume, files)
    }
}
