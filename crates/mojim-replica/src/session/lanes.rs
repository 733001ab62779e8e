//! The lanes of a session: opened when both ends agree, and watched.

use super::*;

impl Session {
    pub(super) fn begin_lanes(&mut self, session: u64, resume: u64) -> Result<()> {
        let store = &self.primary.store;
        let connect = || {
            let conn = store.env().connect(&self.peer.address);
            conn.map_err(|e| self.unreachable(&e))
        };
        let of = (session, self.epoch);
        let lanes = Opening::begin(store, of, resume, self.peer.shared, connect)?;
        self.phase = Phase::Opening(lanes);
        Ok(())
    }

    pub(super) fn open_lanes(&mut self) -> Result<bool> {
        let Phase::Opening(lanes) = &mut self.phase else {
            return Ok(false);
        };
        let moved = lanes.step(&self.primary.store)?;
        if !lanes.is_done() {
            return Ok(moved);
        }
        self.activate();
        Ok(true)
    }

    /// All lanes are open: records flow.
    fn activate(&mut self) {
        let Phase::Opening(lanes) = std::mem::replace(&mut self.phase, Phase::Active) else {
            unreachable!("seen by the caller");
        };
        self.primary.forget_waits(self.silence);
        self.primary.link_up.store(true, SeqCst);
        self.primary.store.freeze(false);
        for (lane, (conn, carrier, at)) in self.primary.lanes.iter().zip(lanes.into_links()) {
            // The mirror may have got records whose acknowledgement was lost,
            // but nothing before `at` is missing there.
            let mut slot = lane.rx.lock().unwrap_or_else(|e| e.into_inner());
            slot.install(Rx::new(conn.clone(), carrier.clone(), at));
            lane.acked_at.store(at, Relaxed);
            drop(slot);
            *lane.tx.lock().unwrap_or_else(|e| e.into_inner()) = Some(Tx::new(conn, carrier, at));
        }
        self.backoff = Duration::from_millis(10);
        self.last_error = None;
        *self
            .primary
            .link_error
            .lock()
            .unwrap_or_else(|e| e.into_inner()) = None;
        if std::mem::take(&mut self.attach)
            && let Some(views) = &mut self.views
        {
            views.admit_by = self.primary.store.env().now() + views.client.limit;
        }
        for i in 0..self.primary.lanes.len() {
            self.primary.send(i);
        }
        if self.member {
            // A mirror that is still a member has all that it acknowledged.
            self.primary.settle_risk(true);
        }
        self.primary.wake_all();
    }

    /// A lane can be silent while the control link is well, and in `async` no sync point
    /// waits for it: without progress for `silence`, the session begins anew.
    pub(super) fn watch_lanes(&mut self, now: Duration) -> Result<()> {
        let acked = self.primary.acked.get();
        let spill = self.spill.as_ref().map_or(0, SpillOut::taken);
        let reached = [acked, self.primary.handed(), spill];
        let waits = match self.phase {
            Phase::Active => self.primary.lacks_acks(),
            Phase::Opening(_) | Phase::Starting { .. } => true,
            _ => false,
        };
        // A mirror that says that it waits for a backup is not stuck, nor is that its
        // stall.
        if !waits || reached != self.progress.1 || self.primary.is_held_back(now) {
            self.progress = (now, reached);
        } else if now - self.progress.0 > self.silence {
            self.progress = (now, reached);
            return Err(Error::Protocol(format!(
                "{}: nothing moved on the lanes for {:?}, LSN {acked} is acknowledged",
                self.peer.name, self.silence
            )));
        }
        Ok(())
    }
}
