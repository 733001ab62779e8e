//! The lanes of a session: opened when both ends agree, and watched.

use super::*;

impl Session {
    pub(super) fn begin_lanes(&mut self, session: u64, resume: u64) -> Result<()> {
        let store = self.primary.store.clone();
        let sb = store.superblock();
        let mut lanes = Vec::new();
        for (i, log) in store.logs().iter().enumerate() {
            let conn = store
                .env()
                .connect(&self.peer.address)
                .map_err(|e| self.unreachable(&e))?;
            let at = store.seek(i, resume);
            let mut wire = Wire::new(conn);
            let lane = Lane {
                cluster: sb.cluster.clone(),
                volume: sb.volume.clone(),
                lane: i as u16,
                session,
                position: at,
                ring: if self.peer.shared { log.size() } else { 0 },
                align: log.align() as u32,
            };
            wire.send(FrameKind::Lane, self.epoch, &lane);
            let carrier = if self.peer.shared {
                let page = store
                    .env()
                    .anonymous_memory(PAGE_LEN)
                    .map_err(|e| Error::io("shared page", &e))?;
                Carrier::Shared(Page::new(page))
            } else {
                Carrier::Stream
            };
            wire.flush()?;
            lanes.push(Opening {
                wire: Some(wire),
                carrier,
                at,
                open: false,
            });
        }
        self.phase = Phase::Opening { lanes };
        Ok(())
    }

    pub(super) fn open_lanes(&mut self) -> Result<bool> {
        let Phase::Opening { lanes } = &mut self.phase else {
            return Ok(false);
        };
        let mut moved = false;
        for (i, l) in lanes.iter_mut().enumerate() {
            if l.open {
                continue;
            }
            let wire = l.wire.as_mut().expect("not open yet");
            wire.flush()?;
            while let Some((f, body)) = wire.take_frame()? {
                moved = true;
                match f.kind {
                    // The mirror asks for the ring, then confirms.
                    FrameKind::LaneOk if f.flags == 1 => {
                        let ring = self.primary.store.logs()[i].memory();
                        debug_assert!(ring.len() > CONTROL_LEN);
                        let Carrier::Shared(page) = &l.carrier else {
                            return Err(Error::Protocol("memory was asked for on a stream".into()));
                        };
                        wire.conn
                            .send_memory(ring)
                            .and_then(|()| wire.conn.send_memory(page.memory()))
                            .map_err(|e| Error::io("passing shared memory", &e))?;
                    }
                    FrameKind::LaneOk => {
                        l.open = true;
                        break;
                    }
                    FrameKind::Refuse => {
                        let text = Refuse::decode(&body).map_or_else(|e| e.to_string(), |r| r.text);
                        return Err(Error::Protocol(format!("lane {i} refused: {text}")));
                    }
                    k => return Err(Error::Protocol(format!("{k:?} on a lane"))),
                }
            }
        }
        if !lanes.iter().all(|l| l.open) {
            return Ok(moved);
        }
        self.activate();
        Ok(true)
    }

    /// All lanes are open: records flow.
    fn activate(&mut self) {
        let Phase::Opening { lanes } = std::mem::replace(&mut self.phase, Phase::Active) else {
            unreachable!("seen by the caller");
        };
        self.primary.forget_waits(self.silence);
        self.primary.link_up.store(true, SeqCst);
        self.primary.store.freeze(false);
        for (lane, l) in self.primary.lanes.iter().zip(lanes) {
            let conn: Arc<dyn Conn> = l.wire.expect("open").conn;
            // The mirror may have got records whose acknowledgement was lost,
            // but nothing before `at` is missing there.
            let mut slot = lane.rx.lock().unwrap_or_else(|e| e.into_inner());
            slot.install(Rx::new(conn.clone(), l.carrier.clone(), l.at));
            drop(slot);
            *lane.tx.lock().unwrap_or_else(|e| e.into_inner()) =
                Some(Tx::new(conn, l.carrier, l.at));
        }
        self.backoff = Duration::from_millis(10);
        self.last_error = None;
        *self
            .primary
            .link_error
            .lock()
            .unwrap_or_else(|e| e.into_inner()) = None;
        if std::mem::take(&mut self.attach)
            && let Some(view_client) = &self.view_client
        {
            self.admit_by = self.primary.store.env().now() + view_client.limit;
        }
        for i in 0..self.primary.lanes.len() {
            self.primary.send(i);
        }
        if self.member {
            // It has what it acknowledged, or would be none any more.
            self.primary.settle_risk(true);
        }
        self.primary.done.notify();
    }

    /// A lane can be silent while the control link is well, and in `async`
    /// nobody waits for it: without progress for `SILENCE`, start anew.
    pub(super) fn watch_lanes(&mut self, now: Duration) -> Result<()> {
        let acked = self.primary.acked.get();
        let spill = self.spill.as_ref().map_or(0, |s| s.taken);
        let reached = [acked, self.primary.handed(), spill];
        let waits = match self.phase {
            Phase::Active => acked < self.primary.last(),
            Phase::Opening { .. } | Phase::Starting { .. } => true,
            _ => false,
        };
        // A mirror that says that it waits for a backup is neither stuck nor,
        // where its stalls are counted, to blame.
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
