//! A stream: a link beside the session's own that carries a part of a copy's
//! first pass.
//!
//! Owns both ends. Each is a state machine that never blocks. In the product a thread drives it
//! (`StreamOut::run`, `mojim-node`), so that several cores read, encrypt, compare and write.
//!
//! Invariants:
//!
//! - A stream carries bytes of one copy, which its first word names. Bytes that come after that
//!   copy is over are refused (`mojim_store::stage`).
//! - Its last word is answered when everything before it is staged. Until then
//!   nothing is sent again, and the copy does not end.
//! - A stream that breaks after it was open ends the copy. A stream that cannot be opened leaves
//!   its part to the others.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use mojim_format::frame::{MAX_BODY, STREAM_END, STREAM_OPEN, STREAM_STAGED};
use mojim_format::message::{
    CopyData, CopyStream, CopySums, CopyWant, Message, Refuse, RefuseCode,
};
use mojim_format::{FRAME_LEN, Frame, FrameKind};

use crate::copy_pass::{COPY_BACKLOG, CopyPass, Failure, Part, Went, answers_are_taken};
use mojim_env::threads::block_signals;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Conn, Error, Result};
use mojim_store::store::Store;

/// A stream that is not open after this long is left out.
const OPENING: Duration = Duration::from_secs(3);
/// A stream on which nothing moves for this long, though something is due, is broken.
/// Until then its receiver may wait for its disk.
const PATIENCE: Duration = Duration::from_secs(120);

/// The error for a broken link, which says nothing about the copy.
fn broken(e: Error) -> Error {
    Error::Timeout(format!("a stream of a copy: {e}"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Opening,
    Carrying,
    /// The last word is said.
    Ending,
    Over,
}

/// The sending end.
pub struct StreamOut {
    store: Arc<Store>,
    pass: Arc<CopyPass>,
    wire: Wire,
    epoch: u64,
    part: Part,
    state: State,
    /// When something last moved, or nothing was due.
    moved: Duration,
}

impl StreamOut {
    /// Opens a stream for copy number `copy`, whose first pass is `pass`.
    pub fn open(
        store: &Arc<Store>,
        pass: &Arc<CopyPass>,
        conn: Arc<dyn Conn>,
        epoch: u64,
        copy: u64,
    ) -> StreamOut {
        let sb = store.superblock();
        let mut wire = Wire::new(conn);
        let first = CopyStream {
            cluster: sb.cluster,
            volume: sb.volume,
            copy,
        };
        wire.send(FrameKind::CopyStream, epoch, &first);
        pass.opens();
        StreamOut {
            pass: pass.clone(),
            wire,
            epoch,
            part: Part::default(),
            state: State::Opening,
            moved: store.env().now(),
            store: store.clone(),
        }
    }

    /// Whether the stream has ended or failed.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// One step. True if something happened, so that another may be due at once.
    pub fn step(&mut self) -> bool {
        if self.is_over() {
            return false;
        }
        match self.try_step() {
            Ok(moved) => moved,
            Err(error) => {
                self.fail(error, false);
                true
            }
        }
    }

    /// The link is of no use any more.
    fn fail(&mut self, error: Error, refused: bool) {
        match self.state {
            State::Over => return,
            State::Opening => self.pass.closes(),
            _ => self.pass.breaks(Failure { error, refused }),
        }
        self.end();
    }

    fn end(&mut self) {
        self.state = State::Over;
        self.wire.conn.close();
    }

    fn try_step(&mut self) -> Result<bool> {
        if self.pass.is_over() {
            self.end();
            return Ok(true);
        }
        self.store.check()?;
        let now = self.store.env().now();
        let due = self.wire.backlog();
        self.wire.flush()?;
        let mut moved = self.wire.backlog() < due;
        while !self.is_over()
            && let Some((f, body)) = self.wire.take_frame()?
        {
            moved = true;
            self.on_frame(f, &body)?;
        }
        if self.state == State::Carrying {
            moved |= self.carry()?;
        }
        let waits = self.state != State::Carrying || self.part.is_asking();
        if moved || !waits && self.wire.backlog() == 0 {
            self.moved = now;
        }
        let patience = match self.state {
            State::Opening => OPENING,
            _ => PATIENCE,
        };
        if now.saturating_sub(self.moved) > patience {
            return Err(Error::Timeout(format!(
                "{}: nothing moved on a stream of a copy for {patience:?}",
                self.wire.conn.peer()
            )));
        }
        Ok(moved)
    }

    /// Queues what there is room for.
    fn carry(&mut self) -> Result<bool> {
        let before = self.wire.backlog();
        while self.wire.backlog() < COPY_BACKLOG {
            let went = self
                .part
                .step(&self.pass, &self.store, &mut self.wire, self.epoch)?;
            match went {
                Went::On => {}
                Went::Waits => break,
                Went::Through => {
                    let kind = FrameKind::CopyStream;
                    self.wire.queue(kind, self.epoch, 0, STREAM_END, &[]);
                    self.state = State::Ending;
                    break;
                }
            }
        }
        let queued = self.wire.backlog() - before;
        self.store.progress.moved(queued as u64);
        self.store.progress.at(self.pass.at());
        self.wire.flush()?;
        Ok(queued > 0)
    }

    fn on_frame(&mut self, f: Frame, body: &[u8]) -> Result<()> {
        match (self.state, f.kind, f.flags) {
            (State::Opening, FrameKind::CopyStream, STREAM_OPEN) => {
                self.state = State::Carrying;
                Ok(())
            }
            (State::Carrying, FrameKind::CopyWant, _) => self
                .part
                .want(&self.pass, &CopyWant::decode(body).map_err(bad)?),
            (State::Ending, FrameKind::CopyStream, STREAM_STAGED) => {
                self.pass.closes();
                self.end();
                Ok(())
            }
            (_, FrameKind::Refuse, _) => {
                let text = Refuse::decode(body).map_err(bad)?.text;
                self.fail(Error::Protocol(text), true);
                Ok(())
            }
            (_, kind, flags) => Err(Error::Protocol(format!(
                "{} sent {kind:?} ({flags}) out of turn on a stream of a copy",
                self.wire.conn.peer()
            ))),
        }
    }

    /// Steps it to its end: the body of a thread.
    fn run(mut self) {
        block_signals();
        while !self.is_over() {
            if !self.step() {
                self.rest();
            }
        }
    }

    /// Blocks until there may be something to do. A wait on the pass does not see the
    /// link, nor the other way round: so neither lasts long.
    fn rest(&self) {
        let full = self.wire.backlog() > 0;
        if self.state == State::Carrying && !full && !self.part.is_asking() {
            let ready = || self.pass.is_ready();
            self.pass.work.wait_unless(ready, Duration::from_millis(20));
        } else {
            // An error shows at the next step.
            let _ = self.wire.conn.wait(full, Duration::from_millis(5));
        }
    }
}

impl Drop for StreamOut {
    fn drop(&mut self) {
        self.fail(
            Error::Protocol("a stream of a copy was given up".into()),
            false,
        );
    }
}

/// The threads of a node's or a program's outgoing streams.
#[derive(Default)]
pub struct StreamThreads(Vec<JoinHandle<()>>);

impl StreamThreads {
    /// Gives each stream a thread. A stream for which none can be started is given up.
    pub fn start(&mut self, streams: Vec<StreamOut>) {
        for stream in streams {
            self.0.retain(|t| !t.is_finished());
            let thread = std::thread::Builder::new().name("mojim-copy".into());
            self.0.extend(thread.spawn(|| stream.run()));
        }
    }

    /// Waits for all of them, whose copies are over.
    pub fn join(self) {
        for t in self.0 {
            // A thread that panicked has said so.
            let _ = t.join();
        }
    }
}

/// The receiving end.
pub struct StreamIn {
    store: Arc<Store>,
    wire: Wire,
    epoch: u64,
    copy: u64,
    /// Whether anything came.
    begun: bool,
    ended: bool,
}

impl StreamIn {
    /// Accepts a stream whose first word was `m`; an error ends it.
    pub fn accept(
        store: &Arc<Store>,
        mut wire: Wire,
        epoch: u64,
        m: &CopyStream,
    ) -> Result<StreamIn> {
        wire.limit = MAX_BODY;
        let mut stream = StreamIn {
            store: store.clone(),
            wire,
            epoch,
            copy: m.copy,
            begun: false,
            ended: false,
        };
        if let Err(e) = store.stream_opens(m.copy, epoch) {
            stream.refuse(&e);
            return Err(e);
        }
        let kind = FrameKind::CopyStream;
        stream.wire.queue(kind, epoch, 0, STREAM_OPEN, &[]);
        Ok(stream)
    }

    /// The connection, for waiting on it.
    pub fn conn(&self) -> &Arc<dyn Conn> {
        &self.wire.conn
    }

    /// Whether bytes wait to be sent.
    pub fn wants_to_send(&self) -> bool {
        self.wire.backlog() > 0
    }

    /// One step; an error ends the stream. True if something happened.
    pub fn step(&mut self) -> Result<bool> {
        let r = self.try_step();
        if let Err(e) = &r {
            self.refuse(e);
        }
        r
    }

    /// Tells the sender what is wrong with the copy, but not that it is over.
    #[cold]
    fn refuse(&mut self, e: &Error) {
        let code = match e {
            Error::Protocol(_) => RefuseCode::Protocol,
            Error::Io { .. } | Error::Poisoned(_) | Error::Full(_) => RefuseCode::Poisoned,
            _ => return self.wire.conn.close(),
        };
        self.store.stream_fails(self.copy, e);
        let refuse = Refuse {
            code,
            epoch: self.epoch,
            text: e.cause(),
        };
        self.wire.send(FrameKind::Refuse, self.epoch, &refuse);
        // What cannot be sent now is not sent.
        let _ = self.wire.flush();
        self.wire.conn.close();
    }

    fn try_step(&mut self) -> Result<bool> {
        self.flush()?;
        // Even if nothing comes any more.
        self.store.stream_goes_on(self.copy)?;
        answers_are_taken(&self.wire)?;
        let mut moved = false;
        while let Some((f, body)) = self.take_frame()? {
            moved = true;
            self.take(f, &body)?;
            self.flush()?;
        }
        Ok(moved)
    }

    fn take_frame(&mut self) -> Result<Option<(Frame, Vec<u8>)>> {
        self.wire.take_frame().map_err(broken)
    }

    fn flush(&mut self) -> Result<()> {
        self.wire.flush().map(drop).map_err(broken)
    }

    fn take(&mut self, f: Frame, body: &[u8]) -> Result<()> {
        if f.epoch != self.epoch || self.ended {
            return Err(Error::Protocol(format!(
                "{:?} of epoch {} out of turn on a stream of a copy of epoch {}",
                f.kind, f.epoch, self.epoch
            )));
        }
        let store = &self.store;
        store.progress.moved((FRAME_LEN + body.len()) as u64);
        let carries = matches!(f.kind, FrameKind::CopySums | FrameKind::CopyData);
        if carries && !self.begun {
            store.stream_begins(self.copy)?;
            self.begun = true;
        }
        match (f.kind, f.flags) {
            (FrameKind::CopySums, _) => {
                let m = CopySums::decode(body).map_err(bad)?;
                let want = store.load_sums(Some(self.copy), &m)?;
                self.wire.send(FrameKind::CopyWant, self.epoch, &want);
            }
            (FrameKind::CopyData, _) => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                store.load_data(Some(self.copy), id, offset, bytes)?;
            }
            (FrameKind::CopyStream, STREAM_END) => {
                if self.begun {
                    store.stream_ends(self.copy)?;
                }
                self.ended = true;
                let kind = FrameKind::CopyStream;
                self.wire.queue(kind, self.epoch, 0, STREAM_STAGED, &[]);
            }
            (kind, flags) => {
                return Err(Error::Protocol(format!(
                    "{kind:?} ({flags}) on a stream of a copy"
                )));
            }
        }
        Ok(())
    }
}
