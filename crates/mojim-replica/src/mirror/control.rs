//! A mirror's end of a session's own link: the greeting, a copy, spill files, heartbeats.

use super::*;

/// What a control link is doing. What fails while a frame is taken fails in the stage in which the
/// frame came.
enum Stage {
    /// The primary knows what is here, and says what comes next: a copy, or the session.
    Greeted,
    /// The primary's copy comes in.
    Loading(CopyIn),
    /// This node's copy goes out.
    Giving(Box<CopyOut>),
    /// The session has begun.
    Running { session: u64, primary: String },
}

/// The mirror's side of a control link.
pub struct ControlIn {
    mirror: Arc<Mirror>,
    wire: Wire,
    epoch: u64,
    stage: Stage,
    heard: Duration,
    generation: u64,
    /// Whether this link froze the store for a copy.
    froze: bool,
    /// The primary has said that it ends in order.
    farewell: bool,
}

impl ControlIn {
    /// Answers `hello`, which came first on `wire`.
    pub fn answer(
        mirror: Arc<Mirror>,
        mut wire: Wire,
        hello: &Hello,
    ) -> Result<ControlIn, (Wire, Refusal)> {
        match mirror.hello(hello) {
            Ok((w, generation)) => {
                wire.send(FrameKind::Welcome, hello.epoch, &w);
                let heard = mirror.store.env().now();
                Ok(ControlIn {
                    generation,
                    froze: false,
                    farewell: false,
                    mirror,
                    wire,
                    epoch: hello.epoch,
                    stage: Stage::Greeted,
                    heard,
                })
            }
            Err(no) => Err((wire, no)),
        }
    }

    /// The connection, for waiting on it.
    pub fn conn(&self) -> &Arc<dyn Conn> {
        &self.wire.conn
    }

    /// Whether the primary has said that it ends in order, so that the link's end is no loss.
    pub fn said_farewell(&self) -> bool {
        self.farewell
    }

    /// Whether bytes wait to be sent.
    pub fn wants_to_send(&self) -> bool {
        self.wire.backlog() > 0
    }

    /// Whether this node gives its copy to a primary that has less.
    pub fn is_giving(&self) -> bool {
        matches!(self.stage, Stage::Giving(_))
    }

    /// One step; an error ends the link. True if something happened.
    pub fn step(&mut self) -> Result<bool> {
        let r = self.try_step();
        if let Err(e) = &r {
            if let Error::Protocol(_) | Error::Io { .. } = e {
                refuse(&mut self.wire, self.epoch, &Refusal::from(e.clone()));
            }
            self.end();
        }
        r
    }

    /// The link is over.
    pub fn end(&mut self) {
        let m = self.mirror.clone();
        let change = lock(&m.change);
        // A session that a newer link has begun goes on.
        if m.generation.load(SeqCst) == self.generation {
            m.stop_session();
        }
        drop(change);
        if std::mem::take(&mut self.froze) {
            let store = &self.mirror.store;
            store.progress.end(store.env().now(), false);
            store.freeze(false);
        }
        self.wire.conn.close();
    }

    fn try_step(&mut self) -> Result<bool> {
        let now = self.mirror.store.env().now();
        if self.mirror.is_closed() {
            return Err(Error::Busy("this copy was closed".into()));
        }
        if self.mirror.store.superblock().promised != self.epoch {
            return Err(Error::Stale(format!("epoch {} is over", self.epoch)));
        }
        self.mirror.store.check()?;
        if let Stage::Loading(_) = self.stage {
            self.mirror.store.check_streams()?;
        }
        let mut moved = false;
        self.wire.flush()?;
        while let Some((f, body)) = self.wire.take_frame()? {
            moved = true;
            self.take(f, &body)?;
            // The peer waits for this node's work, which is no silence of its own.
            self.heard = self.mirror.store.env().now();
        }
        let mut silence = self.mirror.silence;
        if let Stage::Giving(copy) = &mut self.stage {
            // The receiver may have to wait for its disk.
            silence = COPY_SILENCE;
            if copy.pump(&self.mirror.store, &mut self.wire, self.epoch)? {
                self.heard = now;
                moved = true;
            }
            if copy.is_sent() {
                self.mirror.store.progress.end(now, true);
                self.mirror.store.freeze(false);
                self.stage = Stage::Greeted;
            }
        }
        self.wire.flush()?;
        if now.saturating_sub(self.heard) > silence {
            return Err(Error::Timeout(format!(
                "{} has been silent for {silence:?}",
                self.wire.conn.peer()
            )));
        }
        Ok(moved)
    }

    fn take(&mut self, f: Frame, body: &[u8]) -> Result<()> {
        let m = self.mirror.clone();
        let _change = lock(&m.change);
        if m.generation.load(SeqCst) != self.generation {
            return Err(Error::Stale("a newer link was made".into()));
        }
        let store = &m.store;
        if f.epoch != self.epoch {
            return Err(Error::Protocol(format!(
                "a frame of epoch {} on a link of epoch {}",
                f.epoch, self.epoch
            )));
        }
        if matches!(self.stage, Stage::Loading(_)) {
            store.progress.moved((FRAME_LEN + body.len()) as u64);
        }
        match (&mut self.stage, f.kind) {
            (Stage::Greeted, FrameKind::CopyRequest) => self.give(&m),
            (Stage::Giving(copy), k @ (FrameKind::CopyHave | FrameKind::CopyWant)) => {
                copy.hear(k, body)
            }
            (Stage::Greeted, FrameKind::CopyBegin) => {
                self.stage = Stage::Loading(CopyIn::begin(store, body)?);
                Ok(())
            }
            (Stage::Loading(_), k) if k != FrameKind::Heartbeat => self.load(&m, &f, body),
            (Stage::Greeted, FrameKind::Start) => self.start(&m, Start::decode(body).map_err(bad)?),
            (Stage::Running { primary, .. }, FrameKind::Spill) if f.flags == 1 => {
                m.hear(primary, 0);
                store.sync_spill(f.lsn)?;
                self.wire.queue(FrameKind::Spill, self.epoch, f.lsn, 2, &[]);
                Ok(())
            }
            (Stage::Running { .. }, FrameKind::Spill) => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                store.write_spill(id, offset, bytes)
            }
            (_, FrameKind::Heartbeat) => {
                if let Stage::Running { primary, session } = &self.stage {
                    self.beat(&m, primary, *session, &f, body)?;
                }
                self.farewell |= body.get(1) == Some(&1);
                self.answer_beat(&m, f.flags);
                Ok(())
            }
            (_, k) => Err(Error::Protocol(format!("{k:?} out of turn"))),
        }
    }

    /// Takes in a piece of the copy that comes; with the last one, the copy takes the place of
    /// what is here.
    fn load(&mut self, m: &Mirror, f: &Frame, body: &[u8]) -> Result<()> {
        let (store, Stage::Loading(copy)) = (&m.store, &self.stage) else {
            unreachable!("the caller has seen it");
        };
        let Some(lsn) = copy.take(store, &mut self.wire, self.epoch, f, body)? else {
            return Ok(());
        };
        store.load_end(lsn, &copy.history)?;
        m.distrusted.store(false, SeqCst);
        m.received.reset(lsn);
        m.committed.store(lsn, Release);
        self.wire.queue(FrameKind::Copied, self.epoch, lsn, 0, &[]);
        self.stage = Stage::Greeted;
        Ok(())
    }

    /// Begins the session that the primary asks for, and says so.
    fn start(&mut self, m: &Mirror, s: Start) -> Result<()> {
        let session = m.start(&s)?;
        m.hear(&s.primary, 0);
        let life = m.store.superblock().life;
        self.wire
            .send(FrameKind::Started, self.epoch, &Started { session, life });
        let primary = s.primary;
        self.stage = Stage::Running { session, primary };
        Ok(())
    }

    /// Begins to give this copy to an attaching primary.
    fn give(&mut self, m: &Mirror) -> Result<()> {
        let store = &m.store;
        if store.superblock().state != State::Whole || m.is_distrusted() {
            return Err(Error::Protocol("there is no copy to give".into()));
        }
        let tail = m.tail();
        store.truncate(tail)?;
        m.received.reset(tail);
        store.apply_all(tail)?;
        store.freeze(true);
        self.froze = true;
        // The copy's receiver does not listen for streams.
        let copy = CopyOut::begin(store, &mut self.wire, self.epoch, None, None);
        self.stage = Stage::Giving(Box::new(copy));
        Ok(())
    }

    /// A heartbeat of the session's primary, which says what is committed.
    fn beat(&self, m: &Mirror, primary: &str, session: u64, f: &Frame, body: &[u8]) -> Result<()> {
        if m.session.load(Acquire) != session {
            return Err(Error::Stale("another session began".into()));
        }
        m.hear(primary, f.lsn);
        if body.first() == Some(&1) && m.store.superblock().view.mirror != m.me {
            m.store.update(|sb| sb.view.mirror = m.me.clone())?;
            m.followed.store(self.epoch, Release);
        }
        Ok(())
    }

    /// Answers a heartbeat, with the greater epoch that a node has promised that this one
    /// forwards to (only the primary can act on it), and with the room that this copy has.
    fn answer_beat(&mut self, m: &Mirror, number: u16) {
        let outbid = m.backups.outbid();
        // Before the room is looked at: what is applied meanwhile counts twice, not never.
        let applied = m.store.applied();
        let space = m.store.space();
        let alive = Alive {
            outbid: if outbid > self.epoch { outbid } else { 0 },
            applied,
            bytes: space.bytes,
            files: space.files,
            block: space.block,
        };
        self.wire.queue(
            FrameKind::Heartbeat,
            self.epoch,
            m.received.get(),
            number,
            &alive.encode(),
        );
    }
}
