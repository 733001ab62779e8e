//! The primary's session with its mirror: connect, agree, copy, open lanes,
//! keep alive; again after every failure.
//!
//! Owns the control link and the making and breaking of the lanes' links. One
//! state machine, stepped by the link thread (or the simulator); it never
//! blocks. `docs/protocol.md`, "Session".
//!
//! Invariants:
//! - The lanes' ends exist only between `Started` and the next failure, and all belong to
//!   one session, whose number the mirror chose.
//! - A record keeps its epoch when it is sent again.
//! - A mirror counts as a member only once it holds every sync point that was
//!   acknowledged without it.
//! - While an answer of the register of views is due, only what both the old and the new
//!   view allow is done.
//! - Each epoch has one mirror: another node becomes the mirror only in a new epoch.

mod agree;
mod lanes;
mod loss;
mod transfer;
mod views;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use mojim_format::message::{Alive, Hello, Message, Refuse, RefuseCode, Start, Started, Welcome};
use mojim_format::{FRAME_LEN, Frame, FrameKind, State, View};
use mojim_protocol::view::{Member, Register};
use mojim_protocol::{
    AckRule, Holding, Known, LAST_EPOCH, Lacks, Loss, Plan, has_lost, loss, may_outbid, reconcile,
};

use crate::handshake::{Limits, Opening, exceeds, theirs};
use crate::holders::{Holders, Peer};
use crate::link::{COPY_AGAIN, COPY_SILENCE, HEARTBEAT, Rx, SILENCE, Tx};
use crate::mirror::promote::used_up;
use crate::primary::Primary;
use crate::spill_out::{SpillFile, SpillOut};
use crate::told::Told;
use crate::view_client::{Change, Outcome, ViewClient};
use mojim_copy::copy_in::CopyIn;
use mojim_copy::copy_out::CopyOut;
use mojim_copy::stream::StreamOut;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Conn, Error, Result, Space};
use mojim_store::area::named_spill;
use mojim_store::log::Live;

/// A mirror that was given up may come back for this many times `failure_limit`; then a
/// backup takes its place.
const REPLACE: u32 = 2;
/// The longest pause between two epochs that are begun for a backup's sake.
const OUTBID_PAUSE: Duration = Duration::from_secs(60);
/// No file system has larger blocks.
const MOST_BLOCK: u32 = 1 << 20;
/// If more epochs than this have begun since a checkpoint, none is begun for a backup's
/// sake; a history keeps twice as many.
const MOST_EPOCHS: usize = 64;
/// Flag of a heartbeat: the mirror now holds everything, it is a member.
pub const FLAG_MEMBER: u16 = 1;

pub use mojim_store::store::JOINING;

enum Phase {
    /// Not connected; try at this time.
    Idle(Duration),
    /// `Hello` is out.
    Greeting,
    /// A copy is being sent.
    Sending(Box<CopyOut>),
    /// All of it is sent; `Copied` is awaited.
    Sent { lsn: u64 },
    /// A copy is being received.
    Receiving(CopyIn),
    /// The register is asked for the view of an attach.
    Claiming { resume: u64, keep: u64 },
    /// `Start` is out.
    Starting { resume: u64 },
    /// Spill files go ahead of the records that the mirror lacks and that name them.
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

/// What a session has for the register of views.
struct Views {
    client: ViewClient,
    /// The number of the link on which the register was last asked.
    asked_on: u64,
    /// Whether this primary was alone before it asked for its mirror's admission.
    was_alone: bool,
    /// Until when an attach waits for its mirror's admission.
    admit_by: Duration,
    /// The nodes that may be the mirror, the present one among them.
    candidates: Arc<Holders>,
    /// Since when no link to the present mirror has got beyond greeting.
    absent: Duration,
    /// A backup may take over by itself: nothing is committed while the register cannot
    /// be asked whether a backup has.
    leased: bool,
    /// The mirror of the epoch that the register is asked for, if a new one.
    successor: Option<Peer>,
    /// The mirror lost what it had acknowledged, or needs a whole copy: no link is made to it
    /// before it is out of the view.
    leaving: bool,
    /// The register is asked for an epoch for a backup's sake: links of the present epoch
    /// are made meanwhile.
    raise_for_backup: bool,
    /// When the register may be asked for such an epoch again, and the pause after that.
    outbid_next: Duration,
    outbid_pause: Duration,
    /// The epoch of the view that the last `Hello` named.
    hello_view_epoch: u64,
}

impl Views {
    fn new(client: ViewClient, candidates: Arc<Holders>, now: Duration) -> Views {
        Views {
            client,
            asked_on: 0,
            was_alone: false,
            admit_by: Duration::ZERO,
            candidates,
            absent: now,
            leased: false,
            successor: None,
            leaving: false,
            raise_for_backup: false,
            outbid_next: Duration::ZERO,
            outbid_pause: Duration::ZERO,
            hello_view_epoch: 0,
        }
    }

    /// Whether an epoch is asked for that the next link has to be of.
    fn is_raising(&self) -> bool {
        self.client.is_raising() && !self.raise_for_backup
    }
}

/// The session.
pub struct Session {
    primary: Arc<Primary>,
    me: String,
    peer: Peer,
    /// It attaches: nothing is shown to the application yet, and it begins a new epoch.
    attach: bool,
    /// The epoch to ask for while attaching.
    epoch: u64,
    phase: Phase,
    wire: Option<Wire>,
    heard: Duration,
    spoke: Duration,
    sent_at: Option<(Duration, u64)>,
    beat: u64,
    member: bool,
    /// By the view, this primary needs no mirror until one has joined.
    alone: bool,
    /// The rule that applies once the mirror is a member.
    paired_rule: AckRule,
    /// The last LSN that an attach adopted; the application waits until it is committed.
    adopted_lsn: u64,
    force_copy: bool,
    /// When something last moved on the links, and how far it was: what is
    /// acknowledged, what the lanes have taken, and spill files.
    progress: (Duration, [u64; 3]),
    /// The last LSN that may have been acknowledged without this mirror.
    rejoin_lsn: Option<u64>,
    backoff: Duration,
    /// This node is to take the peer's copy.
    adopting: bool,
    /// Why attaching cannot succeed.
    fatal: Option<Error>,
    /// The attach would begin with less than was acknowledged: an operator decides.
    loss: Option<Loss>,
    /// What other nodes said before the attach.
    told: Vec<Told>,
    /// Why the last try failed.
    pub last_error: Option<String>,
    spill: Option<SpillOut>,
    /// The number of the present link.
    link: u64,
    /// If the cluster has a register of views.
    views: Option<Views>,
    /// Silence after which a link counts as broken.
    silence: Duration,
    heartbeat: Duration,
}

impl Session {
    /// A session that attaches: it asks for an epoch above all that it knows.
    pub fn attach(primary: Arc<Primary>, me: &str, peer: Peer) -> Session {
        let sb = primary.store.superblock();
        primary.pair_with(&peer.name);
        let member = sb.view.epoch == 0 || sb.view.mirror == peer.name;
        let now = primary.store.env().now();
        Session {
            epoch: primary.store.next_epoch(sb.promised.max(sb.view.epoch)),
            alone: false,
            paired_rule: primary.spec.rule,
            primary,
            me: me.to_owned(),
            peer,
            attach: true,
            phase: Phase::Idle(now),
            wire: None,
            heard: now,
            spoke: now,
            sent_at: None,
            beat: 0,
            member,
            adopted_lsn: 0,
            force_copy: false,
            progress: (now, [0; 3]),
            rejoin_lsn: None,
            backoff: Duration::from_millis(10),
            adopting: false,
            fatal: None,
            loss: None,
            told: Vec::new(),
            last_error: None,
            spill: None,
            link: 0,
            views: None,
            silence: SILENCE,
            heartbeat: HEARTBEAT,
        }
    }

    /// The node that is its mirror, or is to be.
    pub fn peer(&self) -> &str {
        &self.peer.name
    }

    /// Makes `peer` the mirror from here on.
    fn turn_to(&mut self, peer: Peer) {
        self.primary.pair_with(&peer.name);
        let store = &self.primary.store;
        let view = store.superblock().view;
        self.member = self.attach && (view.epoch == 0 || view.mirror == peer.name);
        if let Some(views) = &mut self.views {
            views.client.peer = None;
            views.absent = store.env().now();
        }
        self.peer = peer;
        self.force_copy = false;
        self.backoff = Duration::from_millis(10);
    }

    /// The primary whose session this is.
    pub fn primary(&self) -> &Arc<Primary> {
        &self.primary
    }

    /// Whether it has not begun its epoch yet.
    pub fn is_attaching(&self) -> bool {
        self.attach
    }

    /// Why attaching cannot succeed, if so.
    pub fn fatal(&self) -> Option<&Error> {
        self.fatal.as_ref()
    }

    /// What an attach would lose, if an operator must decide about it.
    pub fn loss(&self) -> Option<Loss> {
        self.loss
    }

    /// Whether records flow.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active)
    }

    /// Whether the mirror holds everything that was acknowledged.
    pub fn is_member(&self) -> bool {
        self.member
    }

    /// Whether the peer answers, whatever it says.
    pub fn is_connected(&self) -> bool {
        !matches!(self.phase, Phase::Idle(_) | Phase::Greeting)
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
        match self.try_step() {
            Ok(b) => b,
            Err(e) => {
                self.fail(e);
                true
            }
        }
    }

    fn fail(&mut self, e: Error) {
        let text = e.to_string();
        if let Error::Refused {
            code: RefuseCode::Protocol,
            ..
        } = e
        {
            // Another try does not help if the ends disagree: a whole copy does.
            self.force_copy |= self.is_active();
        }
        let paired = self.is_active() && !self.attach;
        self.abandon_link(&text);
        if paired {
            let p = &self.primary;
            p.mirror_lost(p.store.env().now());
        }
    }

    fn abandon_link(&mut self, why: &str) {
        let p = self.primary.clone();
        let now = p.store.env().now();
        let (active, connected) = (self.is_active(), self.is_connected());
        if active && let Some(views) = &mut self.views {
            // The link was of no use for a while before its failure was noticed.
            let silent = now.saturating_sub(self.heard);
            let stuck = match p.lacks_acks() {
                true => now.saturating_sub(self.progress.0),
                false => Duration::ZERO,
            };
            let silent = if silent > self.heartbeat * 2 {
                silent
            } else {
                Duration::ZERO
            };
            views.client.missed(silent.max(stuck));
        }
        if connected && let Some(views) = &mut self.views {
            views.absent = now;
        }
        self.link += 1;
        for lane in p.lanes.iter() {
            *lane.tx.lock().unwrap_or_else(|e| e.into_inner()) = None;
            let mut slot = lane.rx.lock().unwrap_or_else(|e| e.into_inner());
            if let Some(rx) = slot.rx.take() {
                rx.close();
            }
        }
        if let Phase::Opening(lanes) = &self.phase {
            lanes.close();
        }
        if self.spill.take().is_some() && !why.is_empty() {
            p.spills.failed(why);
        }
        p.spills.set_confirming(false);
        self.rejoin_lsn = None;
        if self.alone {
            // The mirror that was joining is gone again.
            p.set_rule(AckRule::LOCAL);
        }
        p.link_up.store(false, Release);
        p.suspect.store(false, Release);
        p.forget_waits(self.silence);
        self.sent_at = None;
        if let Some(w) = self.wire.take() {
            w.conn.close();
        }
        p.store.load_abort();
        p.store.progress.end(p.store.env().now(), false);
        p.store.freeze(false);
        if !why.is_empty() {
            self.last_error = Some(why.to_owned());
            *p.link_error.lock().unwrap_or_else(|e| e.into_inner()) =
                Some(Error::Protocol(why.to_owned()));
        }
        self.phase = Phase::Idle(now + self.backoff);
        self.backoff = (self.backoff * 2).min(Duration::from_millis(500));
    }

    fn try_step(&mut self) -> Result<bool> {
        let now = self.primary.store.env().now();
        if self.fatal.is_some() {
            return Ok(false);
        }
        if self.primary.suspect.swap(false, AcqRel) && !matches!(self.phase, Phase::Idle(_)) {
            let why = self
                .primary
                .link_error
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .clone();
            return Err(why.unwrap_or_else(|| Error::Protocol("the link is suspected".into())));
        }
        // A copy that failed halfway must not be a source.
        self.primary.store.check()?;
        let mut moved = self.hear_register(now)?;
        self.give_up_mirror(now)?;
        self.keep_lease(now);
        self.outbid_backup(now);
        if let Phase::Idle(when) = self.phase {
            return Ok(self.leave_idle(now, when)? || moved);
        }
        moved |= self.pump_copy()?;
        moved |= self.open_lanes()?;
        let Some(wire) = &mut self.wire else {
            return Err(Error::Protocol("the control link is gone".into()));
        };
        wire.flush()?;
        while let Some(wire) = &mut self.wire {
            let Some((f, body)) = wire.take_frame()? else {
                break;
            };
            moved = true;
            self.on_frame(f, &body)?;
            // The peer waits for this node's work, which is no silence of its own.
            self.heard = self.primary.store.env().now();
        }
        self.check_copy()?;
        self.check_heard(now)?;
        self.keep_alive(now)?;
        if self.is_active() {
            self.settle()?;
        }
        moved |= self.pump_spill()?;
        self.watch_lanes(now)?;
        if let Some(wire) = &mut self.wire {
            wire.flush()?;
        }
        Ok(moved)
    }

    /// There is no link, and `when` is the time to try again: greets the mirror, or turns
    /// to another one. False if neither is to be done now.
    fn leave_idle(&mut self, now: Duration, when: Duration) -> Result<bool> {
        let views = self.views.as_ref();
        let waits = views.is_some_and(|v| v.is_raising() || v.leaving);
        // An attach whose outcome is not known is not tried a second time.
        if now < when || waits || self.attach && self.is_asking() {
            return Ok(false);
        }
        if self.replace_mirror(now) {
            return Ok(true);
        }
        if self.is_replaced() {
            return Ok(false);
        }
        self.greet(now).map(|()| true)
    }

    /// An error if the mirror has been silent for too long.
    fn check_heard(&self, now: Duration) -> Result<()> {
        // The mirror may sync for long while it takes in a copy, or when all of a spill
        // file has come.
        let long = matches!(self.phase, Phase::Sending(_) | Phase::Sent { .. })
            || self.spill.as_ref().is_some_and(SpillOut::is_confirming);
        let patience = if long { COPY_SILENCE } else { self.silence };
        if now.saturating_sub(self.heard) > patience {
            return Err(Error::Protocol(format!(
                "{} has been silent for {patience:?}",
                self.peer.name
            )));
        }
        Ok(())
    }

    /// Whether another node has taken the mirror's place. The replaced node is no mirror
    /// any more, even if its own configuration still makes it one and it answers.
    fn is_replaced(&self) -> bool {
        let gone = |v: &Views| v.candidates.find(&self.peer.name).is_none();
        self.views.as_ref().is_some_and(gone)
            && !self.attach
            && !self.primary.store.mutations.call_replaced.is_on()
    }

    fn greet(&mut self, now: Duration) -> Result<()> {
        let mut view = self.primary.store.superblock().view.epoch;
        if let Some(views) = &mut self.views
            && self.attach
        {
            match views.client.view_to_attach(&self.primary.store) {
                Ok(epoch) => {
                    view = view.max(epoch);
                    // The attach adopts what the register's mirror holds beyond this copy.
                    let named = views.client.register.mirror.as_ref();
                    let other = named.filter(|m| m.node != self.peer.name);
                    let broken = &self.primary.store.mutations;
                    let other = other.filter(|_| !broken.ask_configured.is_on());
                    if let Some(m) = other
                        && let Some(peer) = views.candidates.find(&m.node)
                    {
                        self.turn_to(peer);
                    }
                }
                Err(e) => {
                    if let Error::Stale(_) = e {
                        self.fatal = Some(e.clone());
                    }
                    return Err(e);
                }
            }
        }
        if let Some(views) = &mut self.views {
            views.hello_view_epoch = view;
        }
        self.misses_mirror()?;
        if self.attach {
            self.epoch = self.epoch.max(self.unused_epoch());
            self.may_begin()?;
        }
        let store = &self.primary.store;
        let conn = store
            .env()
            .connect(&self.peer.address)
            .map_err(|e| self.unreachable(&e))?;
        let sb = store.superblock();
        let tail = if self.attach {
            store.tail()
        } else {
            self.primary.last()
        };
        let hello = Hello {
            cluster: sb.cluster,
            volume: sb.volume,
            from: self.me.clone(),
            to: self.peer.name.clone(),
            volume_id: sb.volume_id,
            view,
            epoch: self.epoch,
            attach: self.attach || !self.member,
            backup: false,
            lanes: store.logs().len() as u16,
            tail,
            history: store.history().entries().to_vec(),
        };
        let mut wire = Wire::new(conn);
        wire.send(FrameKind::Hello, self.epoch, &hello);
        self.wire = Some(wire);
        self.heard = now;
        self.spoke = now;
        self.phase = Phase::Greeting;
        Ok(())
    }

    /// An epoch above those that earlier tries began: none is begun twice.
    fn unused_epoch(&self) -> u64 {
        let store = &self.primary.store;
        let view = store.superblock().view.epoch;
        store.next_epoch(view.max(store.history().last_epoch()))
    }

    /// Fails for good if no epoch is left to be begun.
    fn may_begin(&mut self) -> Result<()> {
        if self.epoch <= LAST_EPOCH {
            return Ok(());
        }
        let e = used_up(&self.primary.store.spec().volume, self.epoch);
        self.fatal = Some(e.clone());
        Err(e)
    }

    fn unreachable(&self, e: &std::io::Error) -> Error {
        Error::io(
            format!(
                "connecting to node {} at {}",
                self.peer.name, self.peer.address
            ),
            e,
        )
    }

    fn on_frame(&mut self, f: Frame, body: &[u8]) -> Result<()> {
        if matches!(self.phase, Phase::Receiving(_)) {
            let bytes = FRAME_LEN + body.len();
            self.primary.store.progress.moved(bytes as u64);
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Greeting);
        let (phase, result) = match (phase, f.kind) {
            (Phase::Greeting, FrameKind::Welcome) => {
                return self.agree(Welcome::decode(body).map_err(bad)?);
            }
            (Phase::Sending(_) | Phase::Sent { .. }, FrameKind::Refuse) => {
                let r = Refuse::decode(body).map_err(bad)?;
                return Err(self.copy_failed(format!("node {}: {}", self.peer.name, r.text)));
            }
            (p, FrameKind::Refuse) => {
                let r = Refuse::decode(body).map_err(bad)?;
                (p, self.refused(r))
            }
            (Phase::Greeting, FrameKind::CopyBegin) => {
                let copy = CopyIn::begin(&self.primary.store, body)?;
                (Phase::Receiving(copy), Ok(()))
            }
            (Phase::Receiving(copy), k) if k != FrameKind::Heartbeat => {
                return self.copy_in(copy, &f, body);
            }
            (Phase::Sending(mut out), k @ (FrameKind::CopyHave | FrameKind::CopyWant)) => {
                let r = out.hear(k, body);
                (Phase::Sending(out), r)
            }
            (Phase::Sent { lsn }, FrameKind::Copied) => return self.copied(lsn),
            (Phase::Starting { resume }, FrameKind::Started) => {
                return self.started(Started::decode(body).map_err(bad)?, resume);
            }
            (
                Phase::Spilling {
                    session,
                    resume,
                    files,
                },
                FrameKind::Spill,
            ) => return self.spill_confirmed(session, resume, files, f.lsn),
            (p @ Phase::Active, FrameKind::Spill) => {
                self.primary.spill_arrived(f.lsn);
                (p, Ok(()))
            }
            (p, FrameKind::Heartbeat) => {
                let taken = self.beat_answered(&f, body, matches!(p, Phase::Active));
                (p, taken)
            }
            (p, k) => (
                p,
                Err(Error::Protocol(format!(
                    "{} sent {k:?} out of turn",
                    self.peer.name
                ))),
            ),
        };
        self.phase = phase;
        result
    }

    /// The mirror has a whole copy, as of `lsn`.
    fn copied(&mut self, lsn: u64) -> Result<()> {
        let store = &self.primary.store;
        store.progress.end(store.env().now(), true);
        self.force_copy = false;
        self.start(lsn, if self.attach { lsn } else { u64::MAX })
    }

    /// The mirror has begun the session.
    fn started(&mut self, s: Started, resume: u64) -> Result<()> {
        if let Some(views) = &mut self.views {
            let peer = Member {
                node: self.peer.name.clone(),
                incarnation: s.life,
            };
            if self.member && views.client.peer.as_ref() != Some(&peer) {
                return Err(Error::Protocol("the mirror began another life".into()));
            }
            views.client.peer = Some(peer);
        }
        self.send_spills(s.session, resume)
    }

    /// Takes the answer to a heartbeat: the round-trip time, the epoch that a backup of the
    /// mirror's has promised, if the answer has one, and the mirror's room.
    fn beat_answered(&mut self, f: &Frame, body: &[u8], active: bool) -> Result<()> {
        let alive = Alive::decode(body).map_err(bad)?;
        if alive.block > MOST_BLOCK {
            return Err(Error::Protocol(format!(
                "node {} says that files take units of {} bytes there",
                self.peer.name, alive.block
            )));
        }
        if active {
            self.primary.backups.outbid_by(alive.outbid, self.epoch);
            let space = Space {
                bytes: alive.bytes,
                files: alive.files,
                block: alive.block,
            };
            self.primary.other_end.has_room(alive.applied, space);
        }
        if let Some((at, n)) = self.sent_at
            && f.flags as u64 == n & 0x7fff
        {
            let took = self.primary.store.env().now() - at;
            let usual = self.primary.other_end.measured(took);
            self.primary.store.logs()[0]
                .live(Live::RoundTrip)
                .store(usual.as_nanos() as u64, Relaxed);
            self.sent_at = None;
        }
        Ok(())
    }

    /// The view of this session.
    fn view(&self) -> View {
        View {
            epoch: self.epoch,
            primary: self.me.clone(),
            mirror: if self.member {
                self.peer.name.clone()
            } else {
                JOINING.into()
            },
        }
    }

    /// Begins the session: the mirror has everything up to `resume`. An attach
    /// begins its epoch first, with the register's consent.
    fn start(&mut self, resume: u64, keep: u64) -> Result<()> {
        if self.attach {
            if self.primary.store.superblock().state == State::Empty {
                self.primary.store.make_new()?;
            }
            if let Some(views) = &self.views {
                let change = Change::Attach {
                    epoch: self.epoch,
                    peer: views.client.peer.clone(),
                    // In `async` a mirror never holds everything.
                    member: self.member && self.paired_rule.mirror,
                    adopted: views.client.adopted,
                };
                self.ask(change);
                self.phase = Phase::Claiming { resume, keep };
                return Ok(());
            }
            self.adopted_lsn = self.primary.begin(self.epoch, self.view())?;
        }
        self.send_start(resume, keep);
        Ok(())
    }

    /// Sends the session's terms.
    fn send_start(&mut self, resume: u64, keep: u64) {
        let store = &self.primary.store;
        let start = Start {
            epoch: self.epoch,
            primary: self.me.clone(),
            volume_id: store.superblock().volume_id,
            member: self.member,
            keep,
            history: store.history().entries().to_vec(),
        };
        // The mirror may have less than it once acknowledged: it lost its log.
        self.primary.acked.reset(resume);
        let wire = self.wire.as_mut().expect("connected");
        wire.send(FrameKind::Start, self.epoch, &start);
        self.phase = Phase::Starting { resume };
    }

    fn keep_alive(&mut self, now: Duration) -> Result<()> {
        if now.saturating_sub(self.spoke) < self.heartbeat && self.beat > 0 {
            return Ok(());
        }
        let Some(wire) = &mut self.wire else {
            return Ok(());
        };
        if wire.backlog() > 0 {
            return Ok(());
        }
        let committed = if self.is_active() {
            self.primary.committed_whole()
        } else {
            0
        };
        let copies = self.copies().is_some();
        let Some(wire) = &mut self.wire else {
            return Ok(());
        };
        if matches!(self.phase, Phase::Greeting) {
            // The peer expects `Hello` and nothing else first.
            self.spoke = now;
            return Ok(());
        }
        self.beat += 1;
        self.spoke = now;
        // A round trip longer than the heartbeat interval is measured too; the time that
        // the mirror takes for a copy is not the link's.
        if !copies {
            self.sent_at.get_or_insert((now, self.beat));
        }
        let flags = (self.beat & 0x7fff) as u16;
        let member = self.member && matches!(self.phase, Phase::Active);
        wire.queue(
            FrameKind::Heartbeat,
            self.epoch,
            committed,
            flags,
            &[member as u8],
        );
        Ok(())
    }

    /// The last word of a primary that ends in order: tells the mirror what is
    /// committed, and waits (at most half a second) for its answer, so that the
    /// mirror's copy is as current as this one.
    pub fn farewell(&mut self) {
        if !self.is_active() {
            self.abandon_link("");
            return;
        }
        let env = self.primary.store.env().clone();
        let end = env.now() + Duration::from_millis(500);
        self.beat += 1;
        let flags = (self.beat & 0x7fff) as u16;
        let committed = self.primary.committed_whole();
        if let Some(w) = &mut self.wire {
            w.queue(
                FrameKind::Heartbeat,
                self.epoch,
                committed,
                flags,
                &[self.member as u8, 1],
            );
        }
        self.sent_at = Some((env.now(), self.beat));
        while self.sent_at.is_some() && env.now() < end && self.is_active() {
            if !self.step()
                && let Some(c) = self.conn()
            {
                let _ = c.wait(false, Duration::from_millis(10));
            }
        }
        self.abandon_link("");
    }

    /// Whether a heartbeat is out and its answer has not come.
    pub fn awaits_answer(&self) -> bool {
        self.is_active() && self.sent_at.is_some()
    }

    /// While a copy is made: whether bytes wait for room on the link. Only then does the
    /// link alone tell when there is more to do.
    pub fn copies(&self) -> Option<bool> {
        let copies = matches!(
            self.phase,
            Phase::Sending(_) | Phase::Sent { .. } | Phase::Receiving(_)
        );
        let full = self.wire.as_ref().is_some_and(|w| w.backlog() > 0);
        copies.then_some(full)
    }

    /// The connection to wait on, when there is nothing to do.
    pub fn conn(&self) -> Option<&Arc<dyn Conn>> {
        self.wire.as_ref().map(|w| &w.conn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_config::WriteBack;
    use mojim_env::Address;

    /// A record that the mirror refused was sent and refused again for ever: the session
    /// received the refusal as a text, without its code. A refusal because of the
    /// mirror's disk is no record's fault: the session resumes where it was.
    #[test]
    fn a_record_that_was_refused_is_not_sent_again() {
        let refused = |code| Error::Refused {
            code,
            text: "b refused a record: a gap".into(),
        };
        let failed = Error::Io {
            what: "b failed".into(),
            errno: libc::EIO,
            error: "no room".into(),
        };
        for (why, copies) in [
            (refused(RefuseCode::Protocol), true),
            (failed, false),
            (Error::Protocol("no acknowledgement in time".into()), false),
        ] {
            let (p, dir) = crate::primary::tests::alone("refused", WriteBack::Auto);
            let tcp = Address::Tcp(([127, 0, 0, 1], 9).into());
            let peer = Peer {
                name: "b".into(),
                address: tcp.clone(),
                tcp,
                shared: false,
            };
            let mut s = Session::attach(Arc::new(p), "a", peer);
            s.phase = Phase::Active;
            s.primary.suspect(why.clone());
            assert!(s.step());
            assert_eq!(s.force_copy, copies, "{why}");
            drop(s);
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}
