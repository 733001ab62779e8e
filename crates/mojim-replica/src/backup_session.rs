//! The secondary tier: a node's copy, forwarded to a backup in the background.
//!
//! Owns one backup's control link and lanes, as seen from the node that
//! forwards (the mirror; Mojim 4.2). One state machine, stepped by a thread of
//! its own (or the simulator); it never blocks. The backup's end is the same
//! as a mirror's (`mirror`): it applies only what is known to be committed, so
//! its data area is at every moment the result of whole sync points.
//!
//! Invariants:
//! - Nothing of a term that is over is sent: what was received under it may have been
//!   dropped since.
//! - From the backup's first answer to the end of its session, every record
//!   that it lacks stays in the logs.
//! - While a copy is read, what changes in the data area is sent again
//!   (`copy`), or the copy is given up.
//! - A backup that followed holds the logs' writers back, and what it lacks
//!   stays, also while its session is made anew, for [`SILENCE`] at most.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use mojim_format::message::{Hello, Message, Refuse, RefuseCode, Start, Started, Welcome};
use mojim_format::{Frame, FrameKind};
use mojim_protocol::{Holding, Plan, Prefix, reconcile};

use crate::backup_progress::{Progress, Source, Term};
use crate::handshake::{Limits, Opening, exceeds, theirs};
use crate::link::{COPY_AGAIN, COPY_SILENCE, HEARTBEAT, Rx, SILENCE, Tx};
use crate::spill_out::{SpillFile, SpillOut};
use mojim_copy::copy_out::CopyOut;
use mojim_copy::stream::{StreamOut, StreamThreads};
use mojim_env::wire::{Wire, bad};
use mojim_env::{Address, Conn, Context, Error, OpenHow, Result};
use mojim_store::area::{named_spill, spill_path};
use mojim_store::log::Log;
use mojim_store::store::Hold;

/// Most LSNs that a backup may acknowledge out of order.
const WINDOW: usize = 1 << 17;
/// The longest pause between two attempts.
const BACKOFF: Duration = Duration::from_secs(2);

enum Phase {
    Idle(Duration),
    Greeting,
    Sending(Box<CopyOut>),
    Sent { lsn: u64 },
    Starting { resume: u64 },
    Opening(Opening),
    Active { lanes: Vec<Out> },
}

/// The sending side of one open lane.
struct Out {
    tx: Tx,
    rx: Rx,
    acked: u64,
    /// Records before this position were looked through for spill files.
    seen: u64,
}

impl Out {
    /// Looks through the records of `log` up to the next one that names a spill file:
    /// where it is, and the file's number and length.
    fn find_spill(&mut self, log: &Log) -> Result<Option<(u64, u64, u64)>> {
        for r in log.records(self.seen) {
            if let Some((id, len)) = named_spill(&r)? {
                return Ok(Some((r.at, id, len)));
            }
            self.seen = r.next;
        }
        Ok(None)
    }

    /// Takes what the backup acknowledges; true if anything came.
    fn take_acks(&mut self) -> Result<bool> {
        let mut came = false;
        while let Some(ack) = self.rx.poll()? {
            self.acked = self.acked.max(ack.lsn);
            came = true;
        }
        Ok(came)
    }

    /// Counts the lane's acknowledged records, which are in `log`, in `all`; true if there
    /// were any.
    fn count_acked(&mut self, log: &Log, all: &Prefix) -> bool {
        let had = self.rx.acked_at;
        let acked = |lsn| lsn <= self.acked && all.has_room(lsn);
        let mut records = log.records(had);
        while let Some(r) = records.next_if(|r| acked(r.header.lsn)) {
            all.mark(r.header.lsn);
        }
        self.rx.acked_at = records.position();
        self.rx.acked_at != had
    }
}

/// A spill file on its way out, and the lane whose record names it.
struct Spill {
    lane: usize,
    out: SpillOut,
}

/// Forwards one source to one backup.
pub struct BackupSession {
    source: Arc<dyn Source>,
    me: String,
    peer: String,
    address: Address,
    term: Option<Term>,
    phase: Phase,
    wire: Option<Wire>,
    heard: Duration,
    spoke: Duration,
    beat: u64,
    acked: Prefix,
    hold: Arc<Hold>,
    progress: Arc<Progress>,
    spill: Option<Spill>,
    /// When something last moved on the lanes, or nothing was due there.
    moved: Duration,
    /// The last session ended because nothing moved: no writer waits for this backup
    /// before something does.
    stalled: bool,
    force_copy: bool,
    /// What files the backup can have.
    limits: Limits,
    backoff: Duration,
    /// Why the last try failed.
    pub last_error: Option<String>,
}

impl BackupSession {
    /// From `source` on node `me` to node `peer`.
    pub fn new(source: Arc<dyn Source>, me: &str, peer: &str, address: Address) -> BackupSession {
        let store = source.store();
        let now = store.env().now();
        let progress = source.backups().join(peer);
        BackupSession {
            me: me.to_owned(),
            peer: peer.to_owned(),
            address,
            term: None,
            phase: Phase::Idle(now),
            wire: None,
            heard: now,
            spoke: now,
            beat: 0,
            acked: Prefix::new(WINDOW, 0),
            // Not firm before the backup has answered: records are kept only while there is
            // room.
            hold: store.hold(store.checkpointed()),
            progress,
            spill: None,
            moved: now,
            stalled: false,
            force_copy: false,
            limits: Limits::UNKNOWN,
            backoff: Duration::from_millis(10),
            last_error: None,
            source,
        }
    }

    /// What is forwarded.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Whether records flow.
    pub fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active { .. })
    }

    /// Whether something is under way that needs no more than another step:
    /// an acknowledgement is due, or a handshake.
    pub fn is_busy(&self) -> bool {
        match &self.phase {
            Phase::Idle(_) => false,
            Phase::Active { .. } => self.acked.get() < self.source.received(),
            _ => true,
        }
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
        match self.try_step() {
            Ok(moved) => moved,
            Err(e) => {
                self.fail(e);
                true
            }
        }
    }

    fn fail(&mut self, e: Error) {
        self.stalled |= matches!(e, Error::Timeout(_));
        let started = matches!(self.phase, Phase::Starting { .. } | Phase::Active { .. });
        if started && self.term == self.source.term() && matches!(e, Error::Refused { .. }) {
            // Another try does not help if the ends disagree: a whole copy does.
            self.force_copy = true;
        }
        self.last_error = Some(e.to_string());
        self.end();
        let now = self.source.store().env().now();
        self.phase = Phase::Idle(now + self.backoff);
        self.backoff = (self.backoff * 2).min(BACKOFF);
    }

    /// The last word of a source that ends in order: what it has, and what of
    /// it is committed; waits for at most half a second.
    fn farewell(&mut self) {
        let env = self.source.store().env().clone();
        let end = env.now() + Duration::from_millis(500);
        while self.is_active() && self.is_busy() && env.now() < end {
            if !self.step()
                && let Some(c) = self.conn()
            {
                let _ = c.wait(false, Duration::from_millis(1));
            }
        }
        if self.is_active() {
            self.beat = 0;
            // If this fails, the next session tells the backup.
            let _ = self.keep_alive(env.now()).and_then(|()| self.flush());
        }
    }

    /// Ends the session, if there is one.
    pub fn end(&mut self) {
        if let Phase::Opening(lanes) = &self.phase {
            lanes.close();
        }
        if let Phase::Active { lanes } = &self.phase {
            lanes.iter().for_each(|l| l.rx.close());
        }
        let now = self.source.store().env().now();
        if let Phase::Sending(..) | Phase::Sent { .. } = &self.phase {
            self.source.store().progress.end(now, false);
        }
        if self.is_active() && self.progress.counts() {
            // Most sessions end because another begins in a moment.
            let seen = self.heard.min(self.moved);
            self.progress.counts_until(seen + SILENCE);
        }
        self.phase = Phase::Idle(now);
        self.spill = None;
        self.term = None;
        if let Some(w) = self.wire.take() {
            w.conn.close();
        }
        self.progress.active.store(false, Release);
        self.hold.set_firm(self.progress.counts());
        self.forget_late(now);
    }

    /// A backup whose session ended holds writers back no longer than one that is silent,
    /// and not at all if this node forwards no more.
    fn forget_late(&mut self, now: Duration) {
        let source = &self.source;
        let goes_on =
            source.serves(&self.peer) && (source.term().is_some() || source.is_settling());
        if self.is_active() || goes_on && !self.progress.is_overdue(now) {
            return;
        }
        self.forget();
    }

    /// No writer waits for this backup any more.
    fn forget(&mut self) {
        self.progress.counts_until(Duration::ZERO);
        self.source.backups().refresh();
        if let Phase::Idle(_) = self.phase {
            self.hold.set_firm(false);
        }
    }

    fn try_step(&mut self) -> Result<bool> {
        let store = self.source.store().clone();
        let now = store.env().now();
        if self.progress.counts() {
            self.forget_late(now);
        }
        if let Phase::Idle(when) = self.phase {
            if now < when {
                return Ok(false);
            }
            let term = self.source.term();
            let Some(term) = term.filter(|_| self.source.serves(&self.peer)) else {
                return Ok(false);
            };
            return self.greet(term, now).map(|()| true);
        }
        let across = store.mutations.forward_across_terms.is_on();
        if (self.source.term() != self.term || !self.source.serves(&self.peer)) && !across {
            self.backoff = Duration::from_millis(10);
            return Err(Error::Stale("what is forwarded begins anew".into()));
        }
        // A copy that failed halfway must not be a source.
        store.check()?;
        let mut moved = self.pump_copy()?;
        moved |= self.open_lanes(now)?;
        self.flush()?;
        while let Some(wire) = &mut self.wire {
            let Some((f, body)) = wire.take_frame()? else {
                break;
            };
            moved = true;
            self.on_frame(f, &body)?;
            // The peer waits for this node's work, which is no silence of its own.
            self.heard = store.env().now();
        }
        self.check_copy()?;
        moved |= self.pump_lanes(now)?;
        moved |= self.pump_spill()?;
        let patience = match self.phase {
            Phase::Sending(..) | Phase::Sent { .. } => COPY_SILENCE,
            // The backup syncs the whole spill file before it answers.
            _ if self.confirms_spill() => COPY_SILENCE,
            _ => SILENCE,
        };
        if now.saturating_sub(self.heard) > patience {
            return Err(Error::Timeout(format!(
                "{} has been silent for {patience:?}",
                self.peer
            )));
        }
        self.keep_alive(now)?;
        self.flush()?;
        Ok(moved)
    }

    fn flush(&mut self) -> Result<()> {
        match &mut self.wire {
            Some(w) => w.flush().map(|_| ()),
            None => Ok(()),
        }
    }

    fn tail(&self) -> u64 {
        self.source.store().whole(self.source.received())
    }

    fn connect(&self) -> Result<Wire> {
        let env = self.source.store().env();
        let conn = env
            .connect(&self.address)
            .context(|| format!("connecting to node {} at {}", self.peer, self.address))?;
        Ok(Wire::new(conn))
    }

    fn greet(&mut self, term: Term, now: Duration) -> Result<()> {
        let store = self.source.store();
        let sb = store.superblock();
        let hello = Hello {
            cluster: sb.cluster,
            volume: sb.volume,
            from: self.me.clone(),
            to: self.peer.clone(),
            volume_id: sb.volume_id,
            view: sb.view.epoch,
            epoch: term.epoch,
            attach: false,
            backup: true,
            lanes: store.logs().len() as u16,
            tail: self.tail(),
            history: store.history().entries().to_vec(),
        };
        let mut wire = self.connect()?;
        wire.send(FrameKind::Hello, term.epoch, &hello);
        self.wire = Some(wire);
        self.term = Some(term);
        self.heard = now;
        self.spoke = now;
        self.phase = Phase::Greeting;
        Ok(())
    }

    fn committed(&self) -> u64 {
        let broken = &self.source.store().mutations;
        if broken.forward_uncommitted.is_on() {
            return self.source.received();
        }
        self.source.committed()
    }

    fn epoch(&self) -> u64 {
        self.term.as_ref().map_or(0, |t| t.epoch)
    }

    fn on_frame(&mut self, f: Frame, body: &[u8]) -> Result<()> {
        match (&self.phase, f.kind) {
            (Phase::Greeting, FrameKind::Welcome) => {
                let w = Welcome::decode(body).map_err(bad)?;
                self.agree(w)
            }
            (_, FrameKind::Refuse) => {
                let r = Refuse::decode(body).map_err(bad)?;
                if matches!(self.phase, Phase::Sending(..) | Phase::Sent { .. })
                    || matches!(r.code, RefuseCode::Stranger | RefuseCode::Foreign)
                {
                    self.backoff = COPY_AGAIN;
                }
                if r.code == RefuseCode::StaleEpoch {
                    self.source.backups().outbid_by(r.epoch, self.epoch());
                }
                Err(Error::Refused {
                    code: r.code,
                    text: format!("node {} refused: {}", self.peer, r.text),
                })
            }
            (Phase::Sending(..), FrameKind::CopyHave | FrameKind::CopyWant) => {
                let Phase::Sending(out) = &mut self.phase else {
                    unreachable!("seen above");
                };
                out.hear(f.kind, body)
            }
            (Phase::Sent { lsn }, FrameKind::Copied) => {
                let lsn = *lsn;
                let store = self.source.store();
                store.progress.end(store.env().now(), true);
                self.force_copy = false;
                self.start(lsn)
            }
            (Phase::Starting { resume }, FrameKind::Started) => {
                let resume = *resume;
                let s = Started::decode(body).map_err(bad)?;
                self.begin_lanes(s.session, resume)
            }
            (Phase::Active { .. }, FrameKind::Spill) => {
                self.spill_arrived(f.lsn);
                Ok(())
            }
            (_, FrameKind::Heartbeat) => Ok(()),
            (_, k) => Err(Error::Protocol(format!(
                "{} sent {k:?} out of turn",
                self.peer
            ))),
        }
    }

    /// The backup has the spill file: the record that names it may follow.
    fn spill_arrived(&mut self, id: u64) {
        let Phase::Active { lanes } = &mut self.phase else {
            return;
        };
        if let Some(s) = self.spill.take_if(|s| s.out.id() == id && s.out.is_ended()) {
            self.moved = self.source.store().env().now();
            let lane = &mut lanes[s.lane];
            let log = &self.source.store().logs()[s.lane];
            if let Some(r) = log.record(lane.seen) {
                lane.seen = r.next;
            }
        }
    }

    /// A backup that cannot have one of the files would pass over its size, and the bytes
    /// that are written there: it follows no node.
    fn check_sizes(&mut self) -> Result<()> {
        let Some(why) = exceeds(self.source.store(), &self.peer, self.limits) else {
            return Ok(());
        };
        self.backoff = COPY_AGAIN;
        Err(Error::Invalid(format!(
            "{why}: it is no backup of this volume"
        )))
    }

    fn agree(&mut self, w: Welcome) -> Result<()> {
        self.limits = Limits::of(&w);
        self.check_sizes()?;
        let store = self.source.store().clone();
        let theirs = theirs(&w)?;
        // First keep what the backup may lack, then see what the logs still have.
        let ours = store.holding(self.tail());
        let common = ours.history.common(ours.tail, &theirs.history, theirs.tail);
        let oldest = store.hold_from(&self.hold, common.unwrap_or(0));
        let epoch_at = |h: &Holding| h.history.epoch_at(ours.tail + 1);
        if common == Some(ours.tail)
            && theirs.tail > ours.tail
            && epoch_at(&theirs) == epoch_at(&ours)
        {
            // The backup received more of this epoch than this node, which is still
            // catching up. A copy would take those records away.
            return Err(Error::Busy(format!(
                "{} is at LSN {}, ahead of this node at {}",
                self.peer, theirs.tail, ours.tail
            )));
        }
        match reconcile(&ours, &theirs, oldest, false) {
            Plan::Resend { from } if !self.force_copy => self.start(from),
            Plan::Resend { .. } | Plan::CopyTo => self.copy_out(),
            plan => {
                self.backoff = COPY_AGAIN;
                Err(Error::Invalid(format!(
                    "node {} holds another volume of this name, or neither copy can be used ({plan:?}); remove its copy (its directory and its part of .mojim) to have this one forwarded there",
                    self.peer
                )))
            }
        }
    }

    fn copy_out(&mut self) -> Result<()> {
        let store = self.source.store().clone();
        let watch = store.watch();
        if !store.is_exact() {
            // The backup would show half a sync point, and for good if this node is lost
            // before it sends the rest.
            return Err(Error::Busy(
                "this copy was not closed and is not up to date yet".into(),
            ));
        }
        self.progress.copies.fetch_add(1, Relaxed);
        self.forget();
        // Records above are forwarded after the copy.
        store.hold_from(&self.hold, store.applied());
        let epoch = self.epoch();
        let wire = self.wire.as_mut().expect("connected");
        let out = CopyOut::begin(&store, wire, epoch, Some(watch), Some(&self.address));
        self.phase = Phase::Sending(Box::new(out));
        Ok(())
    }

    fn pump_copy(&mut self) -> Result<bool> {
        let epoch = self.epoch();
        let Phase::Sending(out) = &mut self.phase else {
            return Ok(false);
        };
        let store = self.source.store();
        let wire = self.wire.as_mut().expect("connected");
        let moved = out.pump(store, wire, epoch)?;
        if !out.holds() {
            return Err(Error::Stale("the copy was interrupted".into()));
        }
        // What is in the copy by its end is not needed from the logs.
        self.hold.advance(out.reached(store));
        if moved {
            self.heard = store.env().now();
        }
        if out.is_sent() {
            let lsn = out.lsn;
            self.phase = Phase::Sent { lsn };
        }
        wire.flush()?;
        Ok(moved)
    }

    /// Fails if the streams of a copy broke.
    fn check_copy(&mut self) -> Result<()> {
        let Phase::Sending(out) = &self.phase else {
            return Ok(());
        };
        match out.failure().cloned() {
            None => Ok(()),
            Some(f) if f.refused => {
                self.backoff = COPY_AGAIN;
                let (peer, e) = (&self.peer, f.error);
                Err(Error::Protocol(format!("node {peer} refused: {e}")))
            }
            Some(f) => Err(f.error),
        }
    }

    /// Sends the terms: the backup has everything up to `resume`, and drops what it has
    /// beyond.
    fn start(&mut self, resume: u64) -> Result<()> {
        let term = self.term.clone().expect("of this session");
        let store = self.source.store();
        let start = Start {
            epoch: term.epoch,
            primary: term.primary,
            volume_id: store.superblock().volume_id,
            member: false,
            keep: resume,
            history: store.history().entries().to_vec(),
        };
        self.acked.reset(resume);
        let wire = self.wire.as_mut().expect("connected");
        wire.send(FrameKind::Start, term.epoch, &start);
        self.phase = Phase::Starting { resume };
        Ok(())
    }

    fn begin_lanes(&mut self, session: u64, resume: u64) -> Result<()> {
        let store = self.source.store();
        let of = (session, self.epoch());
        let lanes = Opening::begin(store, of, resume, false, || Ok(self.connect()?.conn))?;
        self.moved = store.env().now();
        self.phase = Phase::Opening(lanes);
        Ok(())
    }

    fn open_lanes(&mut self, now: Duration) -> Result<bool> {
        let Phase::Opening(lanes) = &mut self.phase else {
            return Ok(false);
        };
        let moved = lanes.step(self.source.store())?;
        if !lanes.is_done() {
            // The control link may live on while a lane's answer is lost.
            if now.saturating_sub(self.moved) > SILENCE {
                let peer = &self.peer;
                return Err(Error::Timeout(format!(
                    "{peer}: no lane was opened for {SILENCE:?}"
                )));
            }
            return Ok(moved);
        }
        self.activate(now);
        Ok(true)
    }

    /// All lanes are open: records flow.
    fn activate(&mut self, now: Duration) {
        let Phase::Opening(lanes) = std::mem::replace(&mut self.phase, Phase::Greeting) else {
            unreachable!("seen by the caller");
        };
        let mut outs = Vec::new();
        for (i, (conn, carrier, at)) in lanes.into_links().enumerate() {
            self.progress.reached(i, at);
            outs.push(Out {
                tx: Tx::new(conn.clone(), carrier.clone(), at),
                rx: Rx::new(conn, carrier, at),
                acked: 0,
                seen: at,
            });
        }
        self.phase = Phase::Active { lanes: outs };
        self.last_error = None;
        self.moved = now;
        self.progress.acked.store(self.acked.get(), Release);
        self.progress.sessions.fetch_add(1, AcqRel);
        self.progress.active.store(true, Release);
        if !self.stalled {
            self.follows();
        }
    }

    /// Writers wait for this backup from here on.
    fn follows(&mut self) {
        self.stalled = false;
        self.backoff = Duration::from_millis(10);
        self.progress.follows();
        self.source.backups().refresh();
    }

    /// Sends what the logs hold, takes what the backup acknowledges.
    fn pump_lanes(&mut self, now: Duration) -> Result<bool> {
        let (epoch, committed) = (self.epoch(), self.committed());
        let Phase::Active { lanes } = &mut self.phase else {
            return Ok(false);
        };
        let store = self.source.store();
        let mut moved = false;
        let (mut came, mut due) = (false, false);
        for (i, (lane, log)) in lanes.iter_mut().zip(store.logs()).enumerate() {
            // A record that names a spill file waits until the file is there.
            let wait = self.spill.as_ref().is_some_and(|s| s.lane == i);
            let found = if wait { None } else { lane.find_spill(log)? };
            // One file at a time; those of other lanes have their turn later.
            if let Some((at, id, len)) = found.filter(|_| self.spill.is_none()) {
                let path = spill_path(&store.spec().meta, id);
                let file = store.env().open(&path, OpenHow::default()).map_err(|e| {
                    // A whole copy brings the bytes of the file's sync point.
                    self.force_copy |= self.term == self.source.term();
                    Error::io(format!("opening {}", path.display()), &e)
                })?;
                self.spill = Some(Spill {
                    lane: i,
                    out: SpillOut::new(SpillFile { id, len, file }),
                });
                lane.seen = at;
                moved = true;
            }
            let before = lane.tx.sent();
            let limit = match &self.spill {
                Some(s) if s.lane == i => lane.seen,
                _ => lane.seen.max(before),
            };
            lane.tx
                .pump_until(log, limit, epoch, committed)
                .context(|| format!("sending to node {}", self.peer))?;
            moved |= lane.tx.sent() != before;
            moved |= lane.take_acks()?;
            came |= lane.count_acked(log, &self.acked);
            due |= lane.rx.acked_at < log.head();
            self.progress.reached(i, lane.rx.acked_at);
        }
        self.note_acks(now, came, due)?;
        Ok(moved)
    }

    /// Counts the lanes' acknowledgements for the writers that wait. `came`: some came;
    /// `due`: some are still to come.
    fn note_acks(&mut self, now: Duration, came: bool, due: bool) -> Result<()> {
        let patience = match self.confirms_spill() {
            true => COPY_SILENCE,
            false => SILENCE,
        };
        let acked = self.acked.get();
        if came {
            self.hold.advance(acked);
            self.progress.acked.store(acked, Release);
        }
        if came || !due {
            self.moved = now;
            if came && !self.stalled {
                self.source.backups().refresh();
            } else if self.stalled {
                self.follows();
            }
        } else if now.saturating_sub(self.moved) > patience {
            return Err(Error::Timeout(format!(
                "{}: nothing moved on the lanes for {patience:?}, LSN {acked} is acknowledged",
                self.peer
            )));
        }
        Ok(())
    }

    /// Whether all of a spill file is sent and its confirmation is due.
    fn confirms_spill(&self) -> bool {
        self.spill.as_ref().is_some_and(|s| s.out.is_confirming())
    }

    fn pump_spill(&mut self) -> Result<bool> {
        let epoch = self.epoch();
        let (Some(spill), Some(wire)) = (&mut self.spill, &mut self.wire) else {
            return Ok(false);
        };
        let sent = spill.out.pump(wire, epoch)?;
        if sent.further {
            // A large file takes longer than a lane may stand still, and the answer
            // to the last heartbeat may be behind all of it.
            self.moved = self.source.store().env().now();
            self.heard = self.moved;
        }
        Ok(sent.moved)
    }

    fn keep_alive(&mut self, now: Duration) -> Result<()> {
        let fresh = now.saturating_sub(self.spoke) < HEARTBEAT && self.beat > 0;
        if fresh || matches!(self.phase, Phase::Greeting) {
            return Ok(());
        }
        self.check_sizes()?;
        let committed = if self.is_active() {
            self.committed()
        } else {
            0
        };
        let epoch = self.epoch();
        let Some(wire) = self.wire.as_mut().filter(|w| w.backlog() == 0) else {
            return Ok(());
        };
        self.beat += 1;
        self.spoke = now;
        let flags = (self.beat & 0x7fff) as u16;
        wire.queue(FrameKind::Heartbeat, epoch, committed, flags, &[0]);
        Ok(())
    }
}

impl Drop for BackupSession {
    fn drop(&mut self) {
        self.end();
        self.source.backups().leave(&self.progress);
    }
}

/// Forwards `source`, on node `me`, to one backup until `stop`: the body of a thread.
/// `say` receives a text for each change.
pub fn run(
    source: &Arc<dyn Source>,
    me: &str,
    peer: &str,
    address: &Address,
    stop: impl Fn() -> bool,
    say: impl Fn(&str),
) {
    // The backup hears of this node by this thread, and gives it up after a silence.
    mojim_env::threads::yield_at_wakeups();
    let work = &source.backups().work;
    let mut said = None;
    let mut active = false;
    let mut streams = StreamThreads::default();
    // One for all terms: what the backup lacks is kept from one to the next.
    let mut forward = BackupSession::new(source.clone(), me, peer, address.clone());
    while !stop() {
        let moved = forward.step();
        streams.start(forward.take_streams());
        if forward.is_active() != active {
            active = !active;
            let not = if active { "" } else { "not " };
            say(&format!("{not}forwarding to node {peer}"));
        }
        if forward.last_error != said {
            if let Some(e) = &forward.last_error {
                say(&format!("forwarding to node {peer}: {e}"));
            }
            said = forward.last_error.clone();
        }
        if moved {
            continue;
        }
        if let Some(c) = forward.conn().filter(|_| !forward.is_active()) {
            // An error shows at the next step.
            let _ = c.wait(false, Duration::from_millis(10));
        } else if forward.is_active() && forward.is_busy() {
            work.wait_unless(&stop, Duration::from_micros(200));
        } else {
            let had = (source.received(), source.committed());
            let more = || (source.received(), source.committed()) != had;
            work.wait_unless(|| stop() || more(), Duration::from_millis(20));
        }
    }
    forward.farewell();
    drop(forward);
    streams.join();
}
