//! A node's link to a peer that takes its records: connect, agree, copy, open lanes, keep
//! alive, and again after every failure.
//!
//! Owns the control link and the phases. One state machine, stepped by a thread of its own (or
//! the simulator). It never blocks. The peer is a mirror, which sync points wait for, or a
//! backup, which is behind and never waited for: what differs is a [`Policy`], in `session.rs`
//! and in `backup_session.rs`. `docs/reference/protocol.md`, "Session".
//!
//! | phase | what is awaited | the next one |
//! |---|---|---|
//! | Idle | the time for another try | Greeting |
//! | Greeting | `Welcome` | as both agree: Sending, Asked, Claiming, Starting |
//! | Sending | the link has taken the whole copy | Sent |
//! | Sent | `Copied` | Claiming, Starting |
//! | Asked (mirror) | `CopyBegin` | Receiving |
//! | Receiving (mirror) | the rest of the peer's copy | Claiming, Starting |
//! | Claiming (mirror) | the register's answer to an attach | Starting |
//! | Starting | `Started` | Spilling, Opening |
//! | Spilling (mirror) | each spill file is confirmed | Opening |
//! | Opening | the answers of all lanes | Active |
//! | Active | nothing: records flow | |
//! | each of them | a failure, silence, a stand-still | Idle |
//!
//! Invariants:
//!
//! - A phase is over when the next one begins: what fails while a frame is taken fails in the
//!   phase in which the frame came.
//! - The lanes' ends exist only in Active, and all belong to one session, whose number the peer
//!   chose.
//! - The state of one link (its spill file, when something moved) is nothing to the next one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use mojim_format::message::{Hello, Message, Refuse, RefuseCode, Start, Started, Welcome};
use mojim_format::{Frame, FrameKind};

use crate::handshake::Opening;
use crate::holders::Peer;
use crate::link::{COPY_SILENCE, Carrier, HEARTBEAT, SILENCE};
use crate::spill_out::{Sent, SpillFile, SpillOut};
use mojim_copy::copy_in::CopyIn;
use mojim_copy::copy_out::CopyOut;
use mojim_copy::stream::StreamOut;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Conn, Error, Result};
use mojim_store::store::{Store, Watch};

/// The first pause between two tries, and the one after a link that was of use.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// What is awaited: the table above.
pub(crate) enum Phase {
    /// Not connected; try at this time.
    Idle(Duration),
    /// `Hello` is out.
    Greeting,
    /// A copy is being sent.
    Sending(Box<CopyOut>),
    /// All of it is sent.
    Sent { lsn: u64 },
    /// The peer was asked for its copy.
    Asked,
    /// A copy is being received.
    Receiving(CopyIn),
    /// The register is asked for the view of an attach.
    Claiming { resume: u64, keep: u64 },
    /// `Start` is out.
    Starting { resume: u64 },
    /// Spill files go ahead of the records that the peer lacks and that name them.
    Spilling {
        session: u64,
        resume: u64,
        files: VecDeque<SpillFile>,
    },
    /// The lanes' first words are out.
    Opening(Opening),
    /// Records flow.
    Active,
}

/// A lane that was opened: its connection, what carries it, and the position in the log from
/// which records are sent.
pub type OpenLane = (Arc<dyn Conn>, Carrier, u64);

/// What a link does in its own way, by what the peer is.
pub trait Policy: Sized {
    /// The longest pause between two tries.
    const LONGEST_PAUSE: Duration;

    /// The copy whose records go to the peer.
    fn store(&self) -> &Arc<Store>;
    /// The epoch of the link.
    fn epoch(&self) -> u64;
    /// Everything up to this LSN is acknowledged.
    fn acked(&self) -> u64;

    /// What is due at each step, whatever the phase: true if something happened. `None`: the
    /// link does nothing any more.
    fn prepare(link: &mut PeerLink<Self>, now: Duration) -> Result<Option<bool>>;
    /// It is time for another try: greets, if it may; true if it did something.
    fn try_again(link: &mut PeerLink<Self>, now: Duration) -> Result<bool>;
    /// The peer's answer to the greeting: decides which copy both nodes will have, and begins
    /// to bring it about.
    fn agree(link: &mut PeerLink<Self>, welcome: Welcome) -> Result<()>;
    /// The peer refuses something: the error with which the link ends.
    fn refused(link: &mut PeerLink<Self>, refuse: Refuse) -> Error;
    /// What is in the copy that is being sent, by its end.
    fn copy_has(_link: &mut PeerLink<Self>, _lsn: u64) {}
    /// A stream of a copy was refused: the error with which the link ends.
    fn copy_refused(link: &mut PeerLink<Self>, why: &Error) -> Error;
    /// The peer has a whole copy, as of `lsn`.
    fn copied(link: &mut PeerLink<Self>, lsn: u64) -> Result<()>;
    /// The peer has begun the session: opens the lanes.
    fn started(link: &mut PeerLink<Self>, started: Started, resume: u64) -> Result<()>;
    /// All lanes are open.
    fn activate(link: &mut PeerLink<Self>, lanes: Vec<OpenLane>, now: Duration);
    /// The peer has a spill file, while records flow.
    fn spill_arrived(link: &mut PeerLink<Self>, id: u64);
    /// The committed LSN and the flag of a heartbeat that is sent.
    fn beat(link: &mut PeerLink<Self>, now: Duration) -> Result<(u64, bool)>;
    /// The answer to a heartbeat.
    fn beat_answered(_link: &mut PeerLink<Self>, _f: &Frame, _body: &[u8]) -> Result<()> {
        Ok(())
    }
    /// A frame that only a link of this kind takes.
    fn take(link: &mut PeerLink<Self>, f: &Frame, _body: &[u8]) -> Result<()> {
        Err(link.out_of_turn(f.kind))
    }
    /// Carries what is due besides the control link's words: records, spill files. While records
    /// flow it notes in `moved` when something moved, or nothing was due. True if something
    /// happened.
    fn carry(link: &mut PeerLink<Self>, now: Duration) -> Result<bool>;
    /// How long the lanes may stand still.
    fn patience(link: &PeerLink<Self>) -> Duration {
        link.silence
    }
    /// The link failed: ends it.
    fn fail(link: &mut PeerLink<Self>, e: Error);
    /// The link is dropped.
    fn leave(_link: &mut PeerLink<Self>) {}
}

/// A link to a peer, and what `P` has for that peer.
pub struct PeerLink<P: Policy> {
    pub(crate) policy: P,
    pub(crate) me: String,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) wire: Option<Wire>,
    /// When the peer was last heard, and last spoken to.
    pub(crate) heard: Duration,
    pub(crate) spoke: Duration,
    /// The number of the last heartbeat; 0: the next one is due at once.
    pub(crate) beat: u64,
    /// When something last moved on the lanes, or nothing was due there.
    pub(crate) moved: Duration,
    /// The spill file that is being sent.
    pub(crate) spill: Option<SpillOut>,
    /// Sending records again would not help: the peer gets a whole copy.
    pub(crate) force_copy: bool,
    /// The pause before the next try.
    pub(crate) backoff: Duration,
    /// Silence after which the link counts as broken.
    pub(crate) silence: Duration,
    pub(crate) heartbeat: Duration,
    /// The number of the present link.
    pub(crate) number: u64,
    /// Why the last try failed.
    pub last_error: Option<String>,
}

impl<P: Policy> PeerLink<P> {
    /// Not connected; the first try is due at once.
    pub(crate) fn idle(policy: P, me: &str, peer: Peer) -> PeerLink<P> {
        let now = policy.store().env().now();
        PeerLink {
            policy,
            me: me.to_owned(),
            peer,
            phase: Phase::Idle(now),
            wire: None,
            heard: now,
            spoke: now,
            beat: 0,
            moved: now,
            spill: None,
            force_copy: false,
            backoff: FIRST_PAUSE,
            silence: SILENCE,
            heartbeat: HEARTBEAT,
            number: 0,
            last_error: None,
        }
    }

    /// Whether records flow.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active)
    }

    /// The connection to wait on, when there is nothing to do.
    pub fn conn(&self) -> Option<&Arc<dyn Conn>> {
        self.wire.as_ref().map(|w| &w.conn)
    }

    /// Streams that were opened for a copy since the last call; the caller steps them.
    pub fn take_streams(&mut self) -> Vec<StreamOut> {
        match &mut self.phase {
            Phase::Sending(out) => out.take_streams(),
            _ => Vec::new(),
        }
    }

    /// One step. True if something happened, so that another may be due at once.
    pub fn step(&mut self) -> bool {
        self.try_step().unwrap_or_else(|e| {
            P::fail(self, e);
            true
        })
    }

    fn try_step(&mut self) -> Result<bool> {
        let now = self.now();
        let Some(mut moved) = P::prepare(self, now)? else {
            return Ok(false);
        };
        if let Phase::Idle(when) = self.phase {
            return Ok(now >= when && P::try_again(self, now)? || moved);
        }
        moved |= self.pump_copy()?;
        moved |= self.open_lanes(now)?;
        moved |= self.take_frames()?;
        self.check_copy()?;
        self.check_heard(now)?;
        self.keep_alive(now)?;
        moved |= P::carry(self, now)?;
        self.check_moved(now)?;
        self.flush()?;
        Ok(moved)
    }

    pub(crate) fn now(&self) -> Duration {
        self.policy.store().env().now()
    }

    /// Ends the link, if there is one, and what was under way on it.
    pub(crate) fn close(&mut self) {
        let now = self.now();
        if let Phase::Opening(lanes) = &self.phase {
            lanes.close();
        }
        if self.is_copying() {
            self.policy.store().progress.end(now, false);
        }
        if let Some(w) = self.wire.take() {
            w.conn.close();
        }
        self.spill = None;
        self.number += 1;
        self.phase = Phase::Idle(now);
    }

    /// The next try is due after a pause, which grows.
    pub(crate) fn pause(&mut self) {
        self.phase = Phase::Idle(self.now() + self.backoff);
        self.backoff = (self.backoff * 2).min(P::LONGEST_PAUSE);
    }

    /// Whether `e` says that the peer refuses the session's terms, or what the session carries.
    /// Another try does not help if the ends disagree: a whole copy does. A refusal for another
    /// reason, such as the peer's disk, is no record's fault.
    pub(crate) fn disagrees(&self, e: &Error) -> bool {
        let begun = match self.phase {
            Phase::Starting { .. } | Phase::Spilling { .. } => true,
            Phase::Opening(_) | Phase::Active => true,
            Phase::Idle(_) | Phase::Greeting | Phase::Claiming { .. } => false,
            Phase::Sending(_) | Phase::Sent { .. } | Phase::Asked | Phase::Receiving(_) => false,
        };
        let code = RefuseCode::Protocol;
        begun && matches!(e, Error::Refused { code: c, .. } if *c == code)
    }

    pub(crate) fn connect(&self) -> Result<Arc<dyn Conn>> {
        let (Peer { name, address, .. }, env) = (&self.peer, self.policy.store().env());
        env.connect(address)
            .map_err(|e| Error::io(format!("connecting to node {name} at {address}"), &e))
    }

    /// Greets the peer over `conn`.
    pub(crate) fn send_hello(&mut self, conn: Arc<dyn Conn>, hello: &Hello, now: Duration) {
        let mut wire = Wire::new(conn);
        wire.send(FrameKind::Hello, hello.epoch, hello);
        self.wire = Some(wire);
        (self.heard, self.spoke, self.moved) = (now, now, now);
        self.phase = Phase::Greeting;
    }

    /// Begins to send a copy; `watch` says what changes meanwhile.
    pub(crate) fn send_copy(&mut self, watch: Option<Arc<Watch>>) {
        let (store, epoch) = (self.policy.store(), self.policy.epoch());
        let wire = self.wire.as_mut().expect("connected");
        let out = CopyOut::begin(store, wire, epoch, watch, Some(&self.peer.address));
        self.phase = Phase::Sending(Box::new(out));
    }

    /// Sends the session's terms: the peer has everything up to `resume`.
    pub(crate) fn send_start(&mut self, start: &Start, resume: u64) {
        let wire = self.wire.as_mut().expect("connected");
        wire.send(FrameKind::Start, start.epoch, start);
        self.moved = self.now();
        self.phase = Phase::Starting { resume };
    }

    /// Opens the lanes of `session`.
    pub(crate) fn begin_lanes(&mut self, session: u64, resume: u64) -> Result<()> {
        let of = (session, self.policy.epoch());
        let store = self.policy.store();
        let lanes = Opening::begin(store, of, resume, self.peer.shared, || self.connect())?;
        self.moved = self.now();
        self.phase = Phase::Opening(lanes);
        Ok(())
    }

    fn open_lanes(&mut self, now: Duration) -> Result<bool> {
        let Phase::Opening(lanes) = &mut self.phase else {
            return Ok(false);
        };
        let moved = lanes.step(self.policy.store())?;
        if !lanes.is_done() {
            return Ok(moved);
        }
        let Phase::Opening(lanes) = std::mem::replace(&mut self.phase, Phase::Active) else {
            unreachable!("seen above");
        };
        self.last_error = None;
        self.moved = now;
        P::activate(self, lanes.into_links().collect(), now);
        Ok(true)
    }

    pub(crate) fn flush(&mut self) -> Result<()> {
        match &mut self.wire {
            Some(w) => w.flush().map(|_| ()),
            None => Ok(()),
        }
    }

    fn take_frames(&mut self) -> Result<bool> {
        self.flush()?;
        let mut moved = false;
        while let Some(wire) = &mut self.wire
            && let Some((f, body)) = wire.take_frame()?
        {
            moved = true;
            self.on_frame(&f, &body)?;
            // The peer waits for this node's work, which is no silence of its own.
            self.heard = self.now();
        }
        Ok(moved)
    }

    pub(crate) fn on_frame(&mut self, f: &Frame, body: &[u8]) -> Result<()> {
        match (&mut self.phase, f.kind) {
            (_, FrameKind::Refuse) => {
                let refuse = Refuse::decode(body).map_err(bad)?;
                Err(P::refused(self, refuse))
            }
            (_, FrameKind::Heartbeat) => P::beat_answered(self, f, body),
            (Phase::Greeting, FrameKind::Welcome) => {
                P::agree(self, Welcome::decode(body).map_err(bad)?)
            }
            (Phase::Sending(out), k @ (FrameKind::CopyHave | FrameKind::CopyWant)) => {
                out.hear(k, body)
            }
            (Phase::Sent { lsn }, FrameKind::Copied) => {
                let lsn = *lsn;
                self.policy.store().progress.end(self.now(), true);
                self.force_copy = false;
                P::copied(self, lsn)
            }
            (Phase::Starting { resume }, FrameKind::Started) => {
                let resume = *resume;
                P::started(self, Started::decode(body).map_err(bad)?, resume)
            }
            (Phase::Active, FrameKind::Spill) => {
                P::spill_arrived(self, f.lsn);
                Ok(())
            }
            _ => P::take(self, f, body),
        }
    }

    pub(crate) fn out_of_turn(&self, kind: FrameKind) -> Error {
        Error::Protocol(format!("{} sent {kind:?} out of turn", self.peer.name))
    }

    /// Whether a copy goes to the peer.
    pub(crate) fn is_copying_out(&self) -> bool {
        matches!(self.phase, Phase::Sending(_) | Phase::Sent { .. })
    }

    /// Whether a copy goes over the link.
    pub(crate) fn is_copying(&self) -> bool {
        self.is_copying_out() || matches!(self.phase, Phase::Receiving(_))
    }

    fn pump_copy(&mut self) -> Result<bool> {
        let (store, epoch) = (self.policy.store(), self.policy.epoch());
        let Phase::Sending(out) = &mut self.phase else {
            return Ok(false);
        };
        let wire = self.wire.as_mut().expect("connected");
        let moved = out.pump(store, wire, epoch)?;
        if !out.holds() {
            return Err(Error::Stale("the copy was interrupted".into()));
        }
        wire.flush()?;
        let (lsn, is_sent, reached) = (out.lsn, out.is_sent(), out.reached(store));
        P::copy_has(self, reached);
        if moved {
            self.heard = self.now();
        }
        if is_sent {
            self.phase = Phase::Sent { lsn };
        }
        Ok(moved)
    }

    /// Fails if the streams of a copy broke.
    fn check_copy(&mut self) -> Result<()> {
        let Phase::Sending(out) = &self.phase else {
            return Ok(());
        };
        match out.failure().cloned() {
            None => Ok(()),
            Some(f) if f.refused => Err(P::copy_refused(self, &f.error)),
            Some(f) => Err(f.error),
        }
    }

    /// Whether all of a spill file is sent and its confirmation is due.
    pub(crate) fn confirms_spill(&self) -> bool {
        self.spill.as_ref().is_some_and(SpillOut::is_confirming)
    }

    /// Sends what the link takes of the spill file, if there is one.
    pub(crate) fn pump_spill(&mut self) -> Result<Sent> {
        let epoch = self.policy.epoch();
        let (Some(out), Some(wire)) = (&mut self.spill, &mut self.wire) else {
            return Ok(Sent::default());
        };
        let sent = out.pump(wire, epoch)?;
        if sent.further {
            // A large file takes longer than a lane may stand still, and the answer to the last
            // heartbeat may be behind all of it.
            self.moved = self.now();
            self.heard = self.moved;
        }
        Ok(sent)
    }

    /// An error if the peer has been silent for too long.
    fn check_heard(&self, now: Duration) -> Result<()> {
        // The peer may sync for long while it takes in a copy, or when all of a spill file has
        // come.
        let long = self.is_copying_out() || self.confirms_spill();
        let patience = if long { COPY_SILENCE } else { self.silence };
        if now.saturating_sub(self.heard) > patience {
            let peer = &self.peer.name;
            let text = format!("{peer} has been silent for {patience:?}");
            return Err(Error::Timeout(text));
        }
        Ok(())
    }

    /// An error if nothing moved on the lanes for too long. The control link may be well
    /// meanwhile, and nobody may wait for a record.
    fn check_moved(&mut self, now: Duration) -> Result<()> {
        let what = match self.phase {
            Phase::Starting { .. } | Phase::Opening(_) => "no lane was opened",
            Phase::Active => "nothing moved on the lanes",
            _ => {
                self.moved = now;
                return Ok(());
            }
        };
        let patience = P::patience(self);
        if now.saturating_sub(self.moved) > patience {
            let (peer, acked) = (&self.peer.name, self.policy.acked());
            return Err(Error::Timeout(format!(
                "{peer}: {what} for {patience:?}, LSN {acked} is acknowledged"
            )));
        }
        Ok(())
    }

    pub(crate) fn keep_alive(&mut self, now: Duration) -> Result<()> {
        let fresh = now.saturating_sub(self.spoke) < self.heartbeat && self.beat > 0;
        // The peer expects `Hello` and nothing else first.
        if fresh || matches!(self.phase, Phase::Greeting) {
            return Ok(());
        }
        if self.wire.as_ref().is_none_or(|w| w.backlog() > 0) {
            return Ok(());
        }
        self.beat += 1;
        self.spoke = now;
        let (committed, flag) = P::beat(self, now)?;
        self.queue_beat(committed, &[flag as u8]);
        Ok(())
    }

    /// Queues the heartbeat with the present number.
    pub(crate) fn queue_beat(&mut self, committed: u64, body: &[u8]) {
        let (epoch, flags) = (self.policy.epoch(), (self.beat & 0x7fff) as u16);
        if let Some(wire) = &mut self.wire {
            wire.queue(FrameKind::Heartbeat, epoch, committed, flags, body);
        }
    }
}

impl<P: Policy> Drop for PeerLink<P> {
    fn drop(&mut self) {
        P::leave(self);
    }
}
