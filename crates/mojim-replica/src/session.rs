//! The primary's session with its mirror: connect, agree, copy, open lanes,
//! keep alive; again after every failure.
//!
//! Owns the control link and the making and breaking of the lanes' links. One
//! state machine, stepped by the link thread (or the simulator); it never
//! blocks. `docs/protocol.md`, "Session".
//!
//! Invariants:
//! - The lanes' ends exist only between `Started` and the next failure, and
//!   all belong to one session number that the mirror gave.
//! - Nothing of a record's epoch changes when it is sent again.
//! - A mirror counts as a member only once it holds every sync point that was
//!   acknowledged without it.
//! - While the register of views is asked, everything goes on as both the old
//!   and the new view allow it.
//! - The mirror is another node only in another epoch: each has one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use mojim_format::message::{
    CopyBegin, CopyData, CopyFile, CopyHave, CopySums, CopyWant, Hello, Lane, Message, Refuse,
    RefuseCode, Start, Started, Welcome,
};
use mojim_format::{CatalogEntry, FRAME_LEN, Frame, FrameKind, State, View};
use mojim_protocol::view::Member;
use mojim_protocol::{
    AckRule, History, Holding, Known, Lacks, Loss, Plan, has_lost, loss, reconcile,
};

use crate::copy::{CopyOut, copy_ends};
use crate::holders::{Holders, Peer};
use crate::link::{
    COPY_AGAIN, COPY_SILENCE, Carrier, HEARTBEAT, PAGE_LEN, Page, Rx, SILENCE, Tx, Wire,
};
use crate::pass::{COPY_BACKLOG, COPY_CHUNK, answers_are_taken};
use crate::primary::{Primary, SpillFile};
use crate::stream::StreamOut;
use crate::view_client::{Change, Outcome, ViewClient};
use mojim_env::{Conn, Error, Result};
use mojim_store::area::named_spill;
use mojim_store::log::{CONTROL_LEN, Live};

/// A mirror that was given up may come back for this many times the limit
/// after which it was; then a backup takes its place.
const REPLACE: u32 = 2;
/// The longest pause between two epochs that are begun for a backup's sake.
const OUTBID_PAUSE: Duration = Duration::from_secs(60);
/// Epochs since a checkpoint with which none is begun for a backup's sake; a
/// history keeps twice as many.
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
    Receiving { lsn: u64, history: History },
    /// The register is asked for the view of an attach.
    Claiming { resume: u64, keep: u64 },
    /// `Start` is out.
    Starting { resume: u64 },
    /// Spill files go ahead of the records that name them and that the mirror lacks.
    Spilling {
        session: u64,
        resume: u64,
        files: VecDeque<SpillFile>,
    },
    /// The lanes' first words are out.
    Opening { lanes: Vec<Opening> },
    /// Records flow.
    Active,
}

struct Opening {
    wire: Option<Wire>,
    carrier: Carrier,
    at: u64,
    open: bool,
}

/// The session.
pub struct Session {
    primary: Arc<Primary>,
    me: String,
    peer: Peer,
    /// A new epoch, and nothing shown to the application yet.
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
    /// What an attach adopted; the application waits until it is acknowledged.
    adopted_lsn: u64,
    force_copy: bool,
    /// When something last moved on the links, and how far it was: what is
    /// acknowledged, what the lanes have taken, and spill files.
    progress: (Duration, [u64; 3]),
    /// The last LSN that may have been acknowledged without this mirror.
    rejoin_lsn: Option<u64>,
    backoff: Duration,
    /// The peer's copy is to be taken.
    adopting: bool,
    /// It has all that is here.
    continues: bool,
    /// Why attaching cannot succeed.
    fatal: Option<Error>,
    /// It would begin with less than was acknowledged: an operator decides.
    loss: Option<Loss>,
    /// Why the last try failed.
    pub last_error: Option<String>,
    spill: Option<SpillOut>,
    /// The register of views, where the cluster has one.
    view_client: Option<ViewClient>,
    /// Counts links; and on which one the register was asked last.
    link: u64,
    asked_on: u64,
    /// Whether it was alone before it asked for its mirror's admission.
    was_alone: bool,
    /// With a register: until when an attach waits for its mirror's admission.
    admit_by: Duration,
    /// The nodes that may be the mirror, the present one among them.
    candidates: Arc<Holders>,
    /// Since when there is no link to the present one that got beyond greeting.
    absent: Duration,
    /// A backup may take over by itself: nothing counts while the register
    /// cannot be asked whether one has.
    leased: bool,
    /// Who is to be the mirror of the epoch that the register is asked for.
    successor: Option<Peer>,
    /// The mirror lost what it had acknowledged: no link before it is out of
    /// the view.
    leaving: bool,
    /// The epoch that the register is asked for is for a backup's sake: links
    /// of the present one are made meanwhile.
    raise_for_backup: bool,
    /// When it may be asked so again, and how long after that the next time.
    outbid_next: Duration,
    outbid_pause: Duration,
    /// The epoch of the view that the last `Hello` named.
    hello_view_epoch: u64,
    /// Silence after which a link counts as broken.
    silence: Duration,
    heartbeat: Duration,
}

/// A spill file on its way out.
struct SpillOut {
    id: u64,
    at: u64,
    ended: bool,
    /// Bytes that the link has taken.
    taken: u64,
    /// All that is to be sent is; the confirmation is out.
    confirming: bool,
}

impl Session {
    /// A session that attaches: asks for an epoch above every one it knows.
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
            continues: false,
            fatal: None,
            loss: None,
            last_error: None,
            spill: None,
            view_client: None,
            link: 0,
            asked_on: 0,
            was_alone: false,
            admit_by: Duration::ZERO,
            candidates: Arc::default(),
            absent: now,
            successor: None,
            leased: false,
            leaving: false,
            raise_for_backup: false,
            outbid_next: Duration::ZERO,
            outbid_pause: Duration::ZERO,
            hello_view_epoch: 0,
            silence: SILENCE,
            heartbeat: HEARTBEAT,
        }
    }

    /// The same in a cluster whose views lie in a register: nothing is begun
    /// without it, and a mirror that stays away is given up. Then one of the
    /// `candidates` that is forwarded to takes its place.
    pub fn with_views(
        mut self,
        view_client: ViewClient,
        candidates: Arc<Holders>,
    ) -> Result<Session> {
        let store = &self.primary.store;
        let sb = store.superblock();
        // What only the lost ring held may have been acknowledged by a mirror
        // that rules alone: this copy does not count as a member's any more.
        let is_lost = sb.ring_lost && !store.mutations.forget_ring.load(Relaxed)
            || store.mutations.other_life.load(Relaxed);
        if is_lost && !self.primary.spec.rule.local {
            let life = store.env().random();
            store.update(|s| {
                s.life = life;
                s.ring_lost = false;
            })?;
        }
        self.silence = self.silence.min(view_client.limit);
        self.heartbeat = self.heartbeat.min(view_client.limit / 4);
        self.view_client = Some(view_client);
        self.candidates = candidates;
        Ok(self)
    }

    /// The same where a backup takes over by itself when primary and mirror are
    /// lost (`fallback = "automatic"`): then nothing is committed while no
    /// majority of voters can be reached.
    pub fn leased(mut self) -> Session {
        self.leased = true;
        self
    }

    /// The node that is its mirror, or is to be.
    pub fn peer(&self) -> &str {
        &self.peer.name
    }

    /// From here on the mirror is another node.
    fn turn_to(&mut self, peer: Peer) {
        self.primary.pair_with(&peer.name);
        let store = &self.primary.store;
        let view = store.superblock().view;
        self.member = self.attach && (view.epoch == 0 || view.mirror == peer.name);
        if let Some(view_client) = &mut self.view_client {
            view_client.peer = None;
        }
        self.peer = peer;
        self.force_copy = false;
        self.absent = store.env().now();
        self.backoff = Duration::from_millis(10);
    }

    /// A primary that is alone, and whose mirror stays away, asks a backup that
    /// has nearly everything to take its place: in an epoch of its own, so that
    /// each epoch has one mirror, and one that does not know yet that it is none
    /// any more is nobody's upstream. True if the register was asked.
    fn replace_mirror(&mut self, now: Duration) -> bool {
        let Some(view_client) = &self.view_client else {
            return false;
        };
        let patience = view_client.limit * REPLACE;
        let gone = now.saturating_sub(self.absent);
        if self.attach || !self.alone || !view_client.may_try(now) || gone < patience {
            return false;
        }
        let all = self.primary.backups.progress();
        let active = all
            .iter()
            .filter(|b| b.active.load(Acquire) && b.name != self.peer.name);
        let Some(best) = active.max_by_key(|b| b.acked.load(Acquire)) else {
            return false;
        };
        let Some(peer) = self.candidates.find(&best.name) else {
            return false;
        };
        let store = &self.primary.store;
        if store.mutations.keep_epoch.load(Relaxed) {
            self.turn_to(peer);
            return false;
        }
        self.successor = Some(peer);
        self.raise_for_backup = false;
        let known = view_client.register.epoch.max(store.superblock().promised);
        let epoch = store.next_epoch(known.max(self.epoch));
        self.ask(Change::Raise(epoch));
        true
    }

    /// Whether the register knows this node as a primary that is alone: then
    /// there is nobody to wait for.
    pub fn is_alone_by_register(&mut self) -> Result<bool> {
        match &mut self.view_client {
            None => Ok(false),
            Some(view_client) => {
                let may = view_client.may_attach_alone(&self.primary.store)?;
                Ok(may && view_client.register.mirror.is_none())
            }
        }
    }

    /// By the register: whether this node may attach without its mirror.
    /// `None` where there is no register.
    pub fn may_attach_alone(&mut self) -> Option<Result<bool>> {
        let view_client = self.view_client.as_mut()?;
        Some(view_client.may_attach_alone(&self.primary.store))
    }

    /// The primary goes on without its mirror, which will join later: what a
    /// node does whose view has no mirror (it was promoted).
    pub fn go_alone(&mut self) -> Result<()> {
        assert!(self.attach);
        if self.is_asking() {
            return Err(Error::Timeout(
                "the register of views does not answer".into(),
            ));
        }
        if self.adopting {
            return Err(Error::Timeout(format!(
                "node {} has a copy of this volume, and the link to it broke while it was copied here; try again when it can be reached",
                self.peer.name
            )));
        }
        self.abandon_link("");
        self.epoch = self.epoch.max(self.unused_epoch());
        if let Some(view_client) = &mut self.view_client {
            // An earlier try may have begun one that is known there only.
            let known = view_client.view_to_attach(&self.primary.store)?;
            self.epoch = self.epoch.max(self.primary.store.next_epoch(known));
        }
        let view = View {
            epoch: self.epoch,
            primary: self.me.clone(),
            mirror: String::new(),
        };
        self.begin(view)?;
        self.primary.set_rule(AckRule::LOCAL);
        self.alone = true;
        self.absent = self.primary.store.env().now();
        self.attach = false;
        self.member = false;
        self.primary.ready.store(true, Release);
        Ok(())
    }

    /// Whether the register was asked for another view and has not answered.
    pub fn is_asking(&self) -> bool {
        self.view_client.as_ref().is_some_and(ViewClient::is_asking)
    }

    /// Begins the epoch without a mirror.
    fn begin(&mut self, view: View) -> Result<()> {
        // A mirror that does not answer may have what an empty copy lacks.
        assert_ne!(self.primary.store.superblock().state, State::Empty);
        if let Some(view_client) = &mut self.view_client {
            let claimed = view_client.attach_alone(&self.primary.store, self.epoch);
            self.claimed(claimed)?;
        }
        self.adopted_lsn = self.primary.begin(self.epoch, view)?;
        Ok(())
    }

    /// What the register said to an attach.
    fn claimed(&mut self, r: Result<()>) -> Result<()> {
        match &r {
            Ok(()) => {}
            Err(e @ Error::Stale(_)) => self.fatal = Some(e.clone()),
            Err(_) => self.leap(),
        }
        r
    }

    /// The next try begins an epoch that the register does not know yet.
    fn leap(&mut self) {
        if let Some(view_client) = &self.view_client {
            let next = self.primary.store.next_epoch(view_client.register.epoch);
            self.epoch = self.epoch.max(next);
        }
    }

    fn ask(&mut self, change: Change) {
        self.asked_on = self.link;
        self.raise_for_backup &= matches!(change, Change::Raise(_)) && self.successor.is_none();
        let view_client = self.view_client.as_mut().expect("the caller has one");
        view_client.ask(&self.primary.store, change);
    }

    /// What the register has answered, if it has.
    fn hear_register(&mut self, now: Duration) -> Result<bool> {
        let Some((change, outcome)) = self.view_client.as_mut().and_then(|c| c.answer(now)) else {
            return Ok(false);
        };
        let p = self.primary.clone();
        let Outcome {
            swapped, result, ..
        } = outcome;
        if let Err(e @ Error::Stale(_)) = &result {
            // Nobody waits for an attach but who called it.
            if !self.attach {
                p.supersede(e.clone());
            }
            self.fatal = Some(e.clone());
            return Err(e.clone());
        }
        let same_link = self.asked_on == self.link;
        match (change, result) {
            (Change::Attach { .. }, result) => {
                let Phase::Claiming { resume, keep } = self.phase else {
                    // The link it was asked for is gone.
                    self.leap();
                    return Ok(true);
                };
                self.claimed(result)?;
                self.adopted_lsn = p.begin(self.epoch, self.view())?;
                self.send_start(resume, keep);
            }
            (Change::Alone, Ok(())) => self.left_alone()?,
            (Change::Admit(_), Ok(())) if same_link && self.is_active() => self.admitted()?,
            // Whoever it was is in the view, and has to come again.
            (Change::Admit(_), Ok(())) => {}
            (Change::Admit(_), Err(e)) => {
                if !swapped && self.was_alone {
                    self.alone = true;
                    if !self.is_active() {
                        p.set_rule(AckRule::LOCAL);
                        p.done.notify();
                    }
                }
                self.last_error = Some(e.to_string());
            }
            (Change::Raise(epoch), Ok(())) => {
                if !matches!(self.phase, Phase::Idle(_)) {
                    // Of the epoch before.
                    self.abandon_link("another epoch begins");
                }
                p.raise(epoch)?;
                self.epoch = epoch;
                if let Some(peer) = self.successor.take() {
                    self.turn_to(peer);
                }
            }
            (Change::Look, Ok(())) => {}
            (Change::Look, Err(e)) => self.last_error = Some(e.to_string()),
            (Change::Alone | Change::Raise(_), Err(e)) => {
                self.successor = None;
                self.last_error = Some(e.to_string());
            }
        }
        Ok(true)
    }

    /// The register knows this primary as one without a mirror.
    fn left_alone(&mut self) -> Result<()> {
        let p = self.primary.clone();
        p.store.update(|s| s.view.mirror.clear())?;
        self.alone = true;
        self.leaving = false;
        self.absent = p.store.env().now();
        if !self.is_active() {
            p.set_rule(AckRule::LOCAL);
        }
        // Who appended meanwhile waits for its log, not for the mirror.
        for lane in 0..p.lanes.len() {
            p.persist_wait(lane)?;
        }
        p.done.notify();
        self.show_adopted()
    }

    /// Where a backup may take over by itself: a primary that has not heard for
    /// `limit` that it still is one holds what it would acknowledge. Each time
    /// it asks it leaves a trace in the register; a backup sees none for longer
    /// than that before it takes over.
    fn keep_lease(&mut self, now: Duration) {
        if !self.leased || self.attach {
            return;
        }
        let Some(view_client) = &self.view_client else {
            return;
        };
        let look = view_client.should_look(now);
        let broken = &self.primary.store.mutations;
        if !broken.ignore_lease.load(Relaxed) {
            self.primary
                .lease_until(view_client.confirmed + view_client.limit);
        }
        match now.saturating_sub(view_client.confirmed) < view_client.limit {
            true => self.primary.let_go(),
            false if broken.ignore_lease.load(Relaxed) => {}
            false => self.primary.hold(),
        }
        if look {
            self.ask(Change::Look);
        }
    }

    /// A running primary whose mirror stays away, or comes and goes, takes it
    /// out of the view, if it is time; sync points wait until then.
    fn give_up_mirror(&mut self, now: Duration) -> Result<()> {
        let active = self.is_active();
        let needed = !self.attach && !self.alone && self.primary.spec.rule.mirror;
        let Some(view_client) = &mut self.view_client else {
            return Ok(());
        };
        if !needed {
            view_client.needs_none(now);
            return Ok(());
        }
        view_client.watch(now, active);
        let due = self.leaving || !active && view_client.is_due();
        if !due || !view_client.may_try(now) {
            return Ok(());
        }
        // From here on, whether the answer comes and says so or not, the mirror
        // is not taken for a member before it was admitted again.
        self.member = false;
        self.lean_on_own_log()?;
        if self
            .primary
            .store
            .mutations
            .alone_without_view
            .load(Relaxed)
        {
            return self.left_alone();
        }
        self.ask(Change::Alone);
        Ok(())
    }

    /// From now on nothing counts that is not persistent in the own log, and
    /// everything that counted already is: what the view must be able to say
    /// of a primary before its mirror leaves it.
    fn lean_on_own_log(&mut self) -> Result<()> {
        let p = &self.primary;
        if p.store.mutations.alone_in_ring.load(Relaxed) {
            return Ok(());
        }
        if p.rule().mirror {
            p.set_rule(AckRule::BOTH);
        }
        for lane in 0..p.lanes.len() {
            p.persist_wait(lane)?;
        }
        p.settle_risk(false);
        Ok(())
    }

    /// The mirror has promised an epoch above this one. In a cluster with a
    /// register that alone does not end a primary: the register says who is.
    fn outbid(&mut self, promised: u64, e: Error) -> Result<()> {
        let p = self.primary.clone();
        let Some(view_client) = &mut self.view_client else {
            p.supersede(e.clone());
            self.fatal = Some(e.clone());
            return Err(e);
        };
        if view_client.may_try(p.store.env().now()) {
            let epoch = p.store.next_epoch(promised.max(self.epoch));
            self.raise_for_backup = false;
            self.ask(Change::Raise(epoch));
        }
        Err(Error::Protocol(e.to_string()))
    }

    /// A node that is no member has promised an epoch above this one (it tried
    /// to become primary, in vain): it follows nobody before a greater one is
    /// begun. Everything goes on until the register has agreed; then the link to
    /// the mirror begins anew. So that no such node disturbs the two again and
    /// again, each time has a longer pause behind it, and there is none where many
    /// epochs have begun since a checkpoint.
    fn outbid_backup(&mut self, now: Duration) {
        let promised = self.primary.backups.outbid();
        let (Some(view_client), store) = (&self.view_client, &self.primary.store) else {
            return;
        };
        // Links, and copies over them, would begin anew.
        let copying = store.progress.get(now).is_some_and(|c| c.running);
        let settled = (self.is_active() && self.member || self.alone) && !copying;
        if self.attach
            || !settled
            || self.leaving
            || promised <= self.epoch
            || now < self.outbid_next
            || !view_client.may_try(now)
            || store.history().entries().len() > MOST_EPOCHS
        {
            return;
        }
        let pause = self.outbid_pause.max(view_client.limit);
        self.outbid_pause = (pause * 2).min(OUTBID_PAUSE);
        self.outbid_next = now + pause;
        let known = promised.max(view_client.register.epoch).max(self.epoch);
        let epoch = store.next_epoch(known);
        self.raise_for_backup = true;
        self.ask(Change::Raise(epoch));
    }

    /// Whether it has not begun its epoch yet.
    pub fn is_attaching(&self) -> bool {
        self.attach
    }

    /// Why attaching cannot succeed, if so.
    pub fn fatal(&self) -> Option<&Error> {
        self.fatal.as_ref()
    }

    /// What an attach would give up that only an operator may.
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

    /// Streams that were opened for a copy since this was asked: the caller
    /// steps them.
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
            // Two ends that disagree are not brought together by trying again.
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
        if self.is_active()
            && let Some(view_client) = &mut self.view_client
        {
            // It was of no use for a while before that was seen.
            let silent = now.saturating_sub(self.heard);
            let stuck = match p.acked.get() < p.last() {
                true => now.saturating_sub(self.progress.0),
                false => Duration::ZERO,
            };
            let silent = if silent > self.heartbeat * 2 {
                silent
            } else {
                Duration::ZERO
            };
            view_client.missed(silent.max(stuck));
        }
        self.link += 1;
        if self.is_connected() {
            self.absent = now;
        }
        for lane in p.lanes.iter() {
            *lane.tx.lock().unwrap_or_else(|e| e.into_inner()) = None;
            let mut slot = lane.rx.lock().unwrap_or_else(|e| e.into_inner());
            if let Some(rx) = slot.end() {
                rx.close();
            }
        }
        if let Phase::Opening { lanes } = &self.phase {
            for l in lanes {
                if let Some(w) = &l.wire {
                    w.conn.close();
                }
            }
        }
        if self.spill.take().is_some() && !why.is_empty() {
            p.spill_failed(why);
        }
        p.set_confirming(false);
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
            *p.link_error.lock().unwrap_or_else(|e| e.into_inner()) = Some(why.to_owned());
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
                .clone()
                .unwrap_or_default();
            return Err(Error::Protocol(why));
        }
        // A copy that failed halfway is nobody's source.
        self.primary.store.check()?;
        let mut moved = self.hear_register(now)?;
        self.give_up_mirror(now)?;
        self.keep_lease(now);
        self.outbid_backup(now);
        if let Phase::Idle(when) = self.phase {
            let raising = self
                .view_client
                .as_ref()
                .is_some_and(ViewClient::is_raising)
                && !self.raise_for_backup;
            // An attach whose outcome is not known is not tried a second time.
            if now < when || raising || self.leaving || self.attach && self.is_asking() {
                return Ok(moved);
            }
            if self.replace_mirror(now) {
                return Ok(true);
            }
            if self.is_replaced() {
                return Ok(moved);
            }
            return self.greet(now).map(|()| true);
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
            self.heard = now;
            moved = true;
            self.on_frame(f, &body)?;
        }
        self.check_copy()?;
        // While it takes in a copy the mirror may sync for long, and so where all of
        // a spill file has come.
        let long = matches!(self.phase, Phase::Sending(_) | Phase::Sent { .. })
            || self.spill.as_ref().is_some_and(|s| s.confirming);
        let patience = if long { COPY_SILENCE } else { self.silence };
        if now.saturating_sub(self.heard) > patience {
            return Err(Error::Protocol(format!(
                "{} has been silent for {patience:?}",
                self.peer.name
            )));
        }
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

    /// Whether another node has its mirror's place. Then it is nobody's mirror any
    /// more, also if it answers, as its own configuration may have it.
    fn is_replaced(&self) -> bool {
        self.view_client.is_some()
            && !self.attach
            && self.candidates.find(&self.peer.name).is_none()
            && !self.primary.store.mutations.call_replaced.load(Relaxed)
    }

    fn greet(&mut self, now: Duration) -> Result<()> {
        let mut view = self.primary.store.superblock().view.epoch;
        if let Some(view_client) = &mut self.view_client
            && self.attach
        {
            match view_client.view_to_attach(&self.primary.store) {
                Ok(epoch) => {
                    view = view.max(epoch);
                    // What it holds beyond this copy is to be adopted.
                    let named = view_client.register.mirror.as_ref();
                    let other = named.filter(|m| m.node != self.peer.name);
                    let broken = &self.primary.store.mutations;
                    let other = other.filter(|_| !broken.ask_configured.load(Relaxed));
                    if let Some(m) = other
                        && let Some(peer) = self.candidates.find(&m.node)
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
        self.hello_view_epoch = view;
        self.misses_mirror()?;
        let store = &self.primary.store;
        let conn = store
            .env()
            .connect(&self.peer.address)
            .map_err(|e| self.unreachable(&e))?;
        let sb = store.superblock();
        if self.attach {
            self.epoch = self.epoch.max(self.unused_epoch());
        }
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

    /// What only the lost ring held may be on the mirror alone. Another node that
    /// the configuration names in its place does not have it.
    fn misses_mirror(&mut self) -> Result<()> {
        let sb = self.primary.store.superblock();
        let mirror = &sb.view.mirror;
        let replaced = !mirror.is_empty() && *mirror != self.peer.name && mirror != JOINING;
        if !self.attach || !replaced || !self.misses_ring() {
            return Ok(());
        }
        let e = Error::Invalid(format!(
            "this node lost its power, and node {mirror}, which was the mirror of volume {}, may be the only one that holds its last sync points; node {} in its place does not have them. Name {mirror} as the mirror again, or promote it; if it is lost for good, `mojim promote --volume {} --name {}` goes on with what is here",
            sb.volume, self.peer.name, sb.volume, self.me
        ));
        self.fatal = Some(e.clone());
        Err(e)
    }

    /// An epoch that the last try began is not begun again.
    fn unused_epoch(&self) -> u64 {
        let store = &self.primary.store;
        let view = store.superblock().view.epoch;
        store.next_epoch(view.max(store.history().last_epoch()))
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
        let bad = |e: mojim_format::FormatError| Error::Protocol(format!("bad message: {e}"));
        if matches!(self.phase, Phase::Receiving { .. }) {
            let bytes = FRAME_LEN + body.len();
            self.primary.store.progress.moved(bytes as u64);
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Greeting);
        let (phase, result) = match (phase, f.kind) {
            (Phase::Greeting, FrameKind::Welcome) => {
                let w = Welcome::decode(body).map_err(bad)?;
                return self.agree(w);
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
                let c = CopyBegin::decode(body).map_err(bad)?;
                let history = History::from_entries(&c.history)
                    .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
                // By the plan: a copy of this volume begins where this one ends.
                let sb = self.primary.store.superblock();
                self.continues = sb.state == State::Whole && sb.volume_id == c.volume_id;
                self.primary
                    .store
                    .load_begin(c.copy, c.volume_id, c.bytes)?;
                (
                    Phase::Receiving {
                        lsn: c.lsn,
                        history,
                    },
                    Ok(()),
                )
            }
            (Phase::Sending(mut out), FrameKind::CopyHave) => {
                let r = CopyHave::decode(body).map_err(bad);
                let r = r.and_then(|m| out.have(&m));
                (Phase::Sending(out), r)
            }
            (Phase::Sending(mut out), FrameKind::CopyWant) => {
                let r = CopyWant::decode(body).map_err(bad);
                let r = r.and_then(|m| out.want(&m));
                (Phase::Sending(out), r)
            }
            (p @ Phase::Receiving { .. }, FrameKind::CopyFile) => {
                let c = CopyFile::decode(body).map_err(bad)?;
                let have = self.primary.store.load_file(CatalogEntry {
                    id: c.id,
                    size: c.size,
                    name: c.name,
                })?;
                self.answer(FrameKind::CopyHave, &have)?;
                (p, Ok(()))
            }
            (p @ Phase::Receiving { .. }, FrameKind::CopySums) => {
                let m = CopySums::decode(body).map_err(bad)?;
                let want = self
                    .primary
                    .store
                    .load_sums(None, &m)
                    .map_err(|e| self.copy_failed(e.to_string()))?;
                self.answer(FrameKind::CopyWant, &want)?;
                (p, Ok(()))
            }
            (p @ Phase::Receiving { .. }, FrameKind::CopyData) => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                let r = self
                    .primary
                    .store
                    .load_data(None, id, offset, bytes)
                    .map_err(|e| self.copy_failed(e.to_string()));
                (p, r)
            }
            (Phase::Receiving { lsn, history }, FrameKind::CopyEnd) => {
                let lsn = copy_ends(lsn, f.lsn)?;
                match self.continues {
                    true => self.primary.store.load_more(lsn, &history)?,
                    false => self.primary.store.load_end(lsn, &history)?,
                }
                return self.start(lsn, lsn);
            }
            (Phase::Sent { lsn }, FrameKind::Copied) => {
                let store = &self.primary.store;
                store.progress.end(store.env().now(), true);
                self.force_copy = false;
                return self.start(lsn, if self.attach { lsn } else { u64::MAX });
            }
            (Phase::Starting { resume }, FrameKind::Started) => {
                let s = Started::decode(body).map_err(bad)?;
                if let Some(view_client) = &mut self.view_client {
                    let peer = Member {
                        node: self.peer.name.clone(),
                        incarnation: s.life,
                    };
                    if self.member && view_client.peer.as_ref() != Some(&peer) {
                        return Err(Error::Protocol("the mirror began another life".into()));
                    }
                    view_client.peer = Some(peer);
                }
                return self.send_spills(s.session, resume);
            }
            (
                Phase::Spilling {
                    session,
                    resume,
                    mut files,
                },
                FrameKind::Spill,
            ) => {
                if let Some(s) = files.front().filter(|s| s.id == f.lsn) {
                    self.primary.spill_reached(s.id, s.len + 1);
                    files.pop_front();
                }
                if files.is_empty() {
                    return self.begin_lanes(session, resume);
                }
                let next = Phase::Spilling {
                    session,
                    resume,
                    files,
                };
                (next, Ok(()))
            }
            (p @ Phase::Active, FrameKind::Spill) => {
                self.primary.spill_arrived(f.lsn);
                (p, Ok(()))
            }
            (p, FrameKind::Heartbeat) => {
                if let (Phase::Active, Ok(epoch)) = (&p, body.try_into()) {
                    let promised = u64::from_le_bytes(epoch);
                    self.primary.backups.outbid_by(promised, self.epoch);
                }
                if let Some((at, n)) = self.sent_at
                    && f.flags as u64 == n & 0x7fff
                {
                    let took = self.primary.store.env().now() - at;
                    let usual = self.primary.measured(took);
                    self.primary.store.logs()[0]
                        .live(Live::RoundTrip)
                        .store(usual.as_nanos() as u64, Relaxed);
                    self.sent_at = None;
                }
                (p, Ok(()))
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

    /// What a receiver of a copy says of what came.
    fn answer<M: Message>(&mut self, kind: FrameKind, m: &M) -> Result<()> {
        let wire = self.wire.as_mut().expect("a frame came over it");
        wire.send(kind, self.epoch, m);
        answers_are_taken(wire)
    }

    /// A copy cannot be made, for a reason that will not pass by itself (no
    /// room, say): an attach ends, a running primary tries again much later.
    fn copy_failed(&mut self, why: String) -> Error {
        let e = Error::Busy(format!(
            "the copy of volume {} cannot be made: {why}",
            self.primary.store.spec().volume
        ));
        if self.attach {
            self.fatal = Some(e.clone());
        }
        self.backoff = COPY_AGAIN;
        e
    }

    fn refused(&mut self, r: Refuse) -> Result<()> {
        let text = format!("node {}: {}", self.peer.name, r.text);
        match r.code {
            RefuseCode::StaleEpoch if self.attach && r.epoch < u64::MAX / 2 => {
                self.epoch = self.epoch.max(self.primary.store.next_epoch(r.epoch));
                Err(Error::Protocol(text))
            }
            RefuseCode::Superseded => Err(self.superseded(text)),
            RefuseCode::StaleEpoch if self.attach => {
                let e = Error::Stale(text);
                self.fatal = Some(e.clone());
                Err(e)
            }
            RefuseCode::StaleEpoch => self.outbid(r.epoch.min(u64::MAX / 2), Error::Stale(text)),
            RefuseCode::Stranger | RefuseCode::Foreign if self.attach => {
                self.fatal = Some(Error::Invalid(text.clone()));
                Err(Error::Protocol(text))
            }
            RefuseCode::Foreign => {
                // It goes on without that node, which a person has to look at.
                self.backoff = COPY_AGAIN;
                Err(Error::Protocol(text))
            }
            _ => Err(Error::Protocol(text)),
        }
    }

    /// The peer follows a newer view than this node knows. With a register,
    /// views are begun only after it has agreed: if it knows nothing newer
    /// either, someone promoted the peer by hand, and what that one has
    /// acknowledged is not here.
    fn superseded(&mut self, text: String) -> Error {
        let mut e = Error::Stale(text.clone());
        if self.attach
            && let Some(view_client) = &mut self.view_client
        {
            match view_client.view_to_attach(&self.primary.store) {
                Ok(epoch) if epoch > self.hello_view_epoch => return Error::Protocol(text),
                Ok(_) => {
                    e = Error::Stale(format!(
                        "{text}. The register of views does not know that view: it was made by hand while `failover` was manual. `mojim promote --force` on the node that is to go on settles it"
                    ));
                }
                Err(stale @ Error::Stale(_)) => e = stale,
                Err(e) => return e,
            }
        }
        self.primary.supersede(e.clone());
        self.fatal = Some(e.clone());
        e
    }

    fn agree(&mut self, w: Welcome) -> Result<()> {
        self.phase = Phase::Greeting;
        let store = self.primary.store.clone();
        let theirs = Holding {
            volume_id: w.volume_id,
            state: w.state,
            tail: w.tail,
            history: History::from_entries(&w.history)
                .ok_or_else(|| Error::Protocol("epochs out of order".into()))?,
        };
        // A node that comes back empty knows no epoch, and its copy may come from a
        // mirror that has promised none above this one's.
        let theirs_last = theirs.history.last_epoch();
        if self.attach && theirs_last >= self.epoch {
            self.epoch = store.next_epoch(theirs_last);
            return Err(Error::Protocol(format!(
                "node {} knows epoch {theirs_last}: a later one is begun",
                self.peer.name
            )));
        }
        self.primary.mirror_level.store(w.level, Relaxed);
        if let Some(view_client) = &mut self.view_client {
            view_client.peer = Some(Member {
                node: self.peer.name.clone(),
                incarnation: w.life,
            });
        }
        let largest = store.largest_file();
        if let Some((name, size)) = largest.filter(|(_, size)| *size > w.max_file) {
            return Err(self.copy_failed(format!(
                "file {name:?} has {size} bytes, node {} can have files of at most {} (its file system, or its limit RLIMIT_FSIZE)",
                self.peer.name, w.max_file
            )));
        }
        self.primary.mirror_max_file.store(w.max_file, Release);
        // What is in the logs now stays there until the lanes are open.
        store.freeze(true);
        let tail = if self.attach {
            store.tail()
        } else {
            self.primary.last()
        };
        let ours = store.holding(tail);
        let mut plan = reconcile(&ours, &theirs, store.oldest(), self.attach);
        if self.force_copy && matches!(plan, Plan::Resend { .. }) {
            plan = Plan::CopyTo;
        }
        // Where success meant persistent here, this copy lacks nothing that was
        // acknowledged: what the mirror has beyond it goes, and no copy that may
        // be the only one is overwritten.
        if plan == Plan::CopyFrom
            && store.superblock().state == State::Whole
            && store.superblock().volume_id == theirs.volume_id
            && self.primary.spec.rule.local
            && store.is_complete()
        {
            plan = Plan::CopyTo;
        }
        if self.attach {
            let known = Known {
                primary: store.known_acknowledged(),
                mirror: w.known,
                ring_lost: self.misses_ring(),
                member: w.member,
            };
            self.refuse_loss(loss(&plan, &ours, &theirs, known), &ours, &theirs)?;
        }
        // The log of a mirror may be damaged, also where this copy lacks nothing.
        let lost = self.attach
            && self.paired_rule.mirror
            && has_lost(&plan, store.known_acknowledged().max(w.known));
        if let Some(view_client) = &mut self.view_client {
            view_client.adopted = !lost && matches!(plan, Plan::Resend { .. } | Plan::CopyFrom);
            if self.attach && (lost || plan == Plan::CopyTo) {
                // What the register would refuse is not put over the other copy.
                view_client.check_copy_to(&store)?;
                // It will have everything only when it has caught up.
                self.member = false;
            }
        }
        if lost {
            self.member = false;
        }
        match plan {
            Plan::Resend { from } => {
                if self.member && !self.attach && from < store.whole(self.primary.acked.get()) {
                    // It has less than it once acknowledged.
                    self.lean_on_own_log()?;
                    store.update(|s| s.view.mirror = JOINING.into())?;
                    self.member = false;
                    if self.view_client.is_some() {
                        self.leaving = true;
                        return Err(Error::Protocol(format!(
                            "node {} has less than it acknowledged: it leaves the view first",
                            self.peer.name
                        )));
                    }
                }
                // A mirror that joins again may hold records of an older
                // epoch beyond what is common: they must go. Within one
                // epoch, what it has out of order is right.
                let keep = match (self.attach, self.member) {
                    (true, _) => tail,
                    (false, true) => u64::MAX,
                    (false, false) => from,
                };
                self.start(from, keep)
            }
            Plan::CopyTo => self.copy_out(),
            Plan::CopyFrom => {
                let lacks = self.may_lack(w.member).filter(|_| !self.adopting);
                self.refuse_loss(lacks.map(Loss::Copy), &ours, &theirs)?;
                self.adopting = true;
                let wire = self.wire.as_mut().expect("connected");
                wire.queue(FrameKind::CopyRequest, self.epoch, 0, 0, &[]);
                Ok(())
            }
            Plan::Foreign => {
                let e = Error::Invalid(format!(
                    "nodes {} and {} hold different volumes of this name; remove one of the copies (its directory and its part of .mojim) to have the other copied there",
                    self.me, self.peer.name
                ));
                if self.attach {
                    self.fatal = Some(e.clone());
                }
                Err(e)
            }
            Plan::Nothing => {
                let e = Error::Invalid("no usable copy is left on either node: what both had was lost, or a copy between them was interrupted and its source is gone; restore one".into());
                self.fatal = Some(e.clone());
                Err(e)
            }
        }
    }

    /// Whether this node lost its ring while what only the mirror had counted as
    /// acknowledged, and no register says who still has it.
    fn misses_ring(&self) -> bool {
        let store = &self.primary.store;
        let is_lost = store.superblock().ring_lost && !store.mutations.forget_ring.load(Relaxed);
        is_lost && self.view_client.is_none() && !self.primary.spec.rule.local
    }

    /// Why the mirror's copy, of a member or not, may lack what this node, whose own is
    /// empty, acknowledged without it. A copy that has all of this one and more may be
    /// taken in any case.
    fn may_lack(&self, member: bool) -> Option<Lacks> {
        let sb = self.primary.store.superblock();
        if sb.state != State::Empty {
            return None;
        }
        let is_new = sb.view.epoch == 0;
        if !member && (is_new || !self.member) {
            return Some(Lacks::CatchingUp);
        }
        if self.view_client.is_some() {
            return None;
        }
        if !is_new && !self.member {
            return Some(Lacks::Alone);
        }
        (!self.paired_rule.mirror).then_some(Lacks::Behind)
    }

    /// The attach ends where it would begin with less than was acknowledged, or may
    /// have been: nothing is changed on either node before an operator says so.
    fn refuse_loss(&mut self, lost: Option<Loss>, ours: &Holding, theirs: &Holding) -> Result<()> {
        let Some(lost) = lost else {
            return Ok(());
        };
        self.loss = Some(lost);
        let store = &self.primary.store;
        let (volume, peer) = (&store.spec().volume, &self.peer.name);
        let e = match lost {
            // Its own log is damaged: the file is named.
            Loss::Known(_) if !store.is_complete() => match store.check_complete() {
                Err(e) => e,
                Ok(()) => unreachable!("it is not complete"),
            },
            Loss::Known(lsn) => Error::Invalid(format!(
                "sync points of volume {volume} up to LSN {lsn} were acknowledged; node {} has them up to LSN {} and node {peer} up to LSN {}, where its log is damaged or ends too early. Restore that log, or give the others up: `mojim promote --force --volume {volume} --name` with the node that is to go on",
                self.me, ours.tail, theirs.tail
            )),
            Loss::Ring => Error::Invalid(format!(
                "this node's memory was lost, and with it what only node {peer}, the mirror of volume {volume}, may have besides; node {peer} answers, but its copy {}, so acknowledged sync points behind LSN {} may be missing from both. If that copy can be found (its disk, or the node itself), start node {peer} with it; if it is lost for good, `mojim promote --volume {volume} --name {}` goes on with what is here",
                match theirs.state {
                    State::Whole => "is not the one that acknowledged them",
                    _ => "was lost too, or is new",
                },
                ours.tail,
                self.me
            )),
            Loss::Copy(lacks) => {
                // The other node asks for it, since this one's view is later.
                let (why, force) = match lacks {
                    Lacks::CatchingUp => ("it was catching up when it was last linked", " --force"),
                    Lacks::Alone => ("this node went on without it", " --force"),
                    Lacks::Behind => ("no sync point waits for it", ""),
                };
                Error::Invalid(format!(
                    "this node has no whole copy of volume {volume}: its disk is new, or what it had in memory is gone. Node {peer}'s, up to LSN {}, may lack acknowledged sync points: {why}. Restore a copy, or go on with that one: `mojim promote{force} --volume {volume} --name {peer}`, and start the program there",
                    theirs.tail
                ))
            }
        };
        self.fatal = Some(e.clone());
        Err(e)
    }

    fn copy_out(&mut self) -> Result<()> {
        let store = self.primary.store.clone();
        if store.superblock().state == State::Empty {
            store.make_new()?;
        }
        // Whatever it had: it is no member until it holds everything again.
        // Durably, so that also the next attach knows it.
        if self.member && !self.attach {
            self.lean_on_own_log()?;
            store.update(|s| s.view.mirror = JOINING.into())?;
            self.member = false;
        }
        if self.attach {
            // Nothing else touches this copy yet: its whole prefix is kept.
            store.freeze(false);
            store.truncate(store.tail())?;
            store.persist_all()?;
            store.apply_all(store.tail())?;
        }
        // A copy for a backup may wait.
        store.revoke_pauses();
        // After a restart the area may show more than is applied again: what was
        // adopted at the attach must be, before anyone copies it.
        store.freeze(false);
        while store.applied() < self.adopted_lsn {
            let before = store.applied();
            if store.apply(self.adopted_lsn, 1 << 20)? == before {
                return Err(Error::Protocol(
                    "the adopted records are not all here".into(),
                ));
            }
        }
        // What is committed by now need not wait in the log meanwhile.
        store.apply(self.primary.apply_limit(), usize::MAX)?;
        // The area must stand still; what commits meanwhile stays in the ring.
        store.freeze(true);
        let wire = self.wire.as_mut().expect("connected");
        let out = CopyOut::begin(&store, wire, self.epoch, None, Some(&self.peer.address));
        self.phase = Phase::Sending(Box::new(out));
        Ok(())
    }

    fn pump_copy(&mut self) -> Result<bool> {
        let Phase::Sending(out) = &mut self.phase else {
            return Ok(false);
        };
        let wire = self.wire.as_mut().expect("connected");
        let moved = out.pump(&self.primary.store, wire, self.epoch)?;
        if moved {
            self.heard = self.primary.store.env().now();
        }
        if out.is_sent() {
            let lsn = out.lsn;
            self.phase = Phase::Sent { lsn };
        }
        wire.flush()?;
        Ok(moved)
    }

    /// Ends with the streams of a copy, if they broke.
    fn check_copy(&mut self) -> Result<()> {
        let Phase::Sending(out) = &self.phase else {
            return Ok(());
        };
        match out.failure().cloned() {
            None => Ok(()),
            Some(f) if f.refused => {
                Err(self.copy_failed(format!("node {}: {}", self.peer.name, f.error)))
            }
            Some(f) => Err(f.error),
        }
    }

    /// Sends the spill files of the records above `resume`, then opens the lanes.
    /// The mirror may have had and confirmed them: it keeps one only as long as a
    /// record in its log names it.
    fn send_spills(&mut self, session: u64, resume: u64) -> Result<()> {
        let store = &self.primary.store;
        let mut files = VecDeque::new();
        for (i, log) in store.logs().iter().enumerate() {
            let mut at = store.seek(i, resume);
            while let Some((r, _, next)) = log.record(at) {
                if let Some((id, len)) = named_spill(&r)? {
                    // Without the file the mirror needs a copy.
                    let file = store
                        .open_spill(id)
                        .inspect_err(|_| self.force_copy = true)?;
                    files.push_back(SpillFile { id, len, file });
                }
                at = next;
            }
        }
        self.primary.spills_begin(files.iter().map(|s| s.id));
        if store.mutations.spill_once.load(Relaxed) {
            files.clear();
        }
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

    /// Sends the spill file whose turn it is: of a record that is sent again, or of
    /// a large sync point that waits for it.
    fn pump_spill(&mut self) -> Result<bool> {
        let wanted = match &self.phase {
            Phase::Spilling { files, .. } => files.front().cloned(),
            Phase::Active => self.primary.spill_wanted(),
            _ => None,
        };
        let Some(wanted) = wanted else {
            if self.spill.take().is_some() {
                self.primary.set_confirming(false);
            }
            return Ok(false);
        };
        if self.spill.as_ref().is_none_or(|s| s.id != wanted.id) {
            self.primary.set_confirming(false);
            self.spill = Some(SpillOut {
                id: wanted.id,
                at: 0,
                ended: false,
                taken: 0,
                confirming: false,
            });
        }
        let out = self.spill.as_mut().expect("just put there");
        let wire = self.wire.as_mut().expect("active");
        let mut moved = false;
        while !out.ended && wire.backlog() < COPY_BACKLOG {
            moved = true;
            if out.at >= wanted.len {
                wire.queue(FrameKind::Spill, self.epoch, out.id, 1, &[]);
                out.ended = true;
                break;
            }
            let n = (COPY_CHUNK as u64).min(wanted.len - out.at) as usize;
            let mut bytes = vec![0; n];
            let got = wanted
                .file
                .read_at(&mut bytes, out.at)
                .map_err(|e| Error::io("reading a spill file", &e))?;
            if got < n {
                return Err(Error::Poisoned("a spill file became shorter".into()));
            }
            let m = CopyData {
                id: out.id,
                offset: out.at,
                bytes,
            };
            wire.send(FrameKind::Spill, self.epoch, &m);
            out.at += n as u64;
        }
        wire.flush()?;
        let backlog = wire.backlog() as u64;
        let taken = out.at.saturating_sub(backlog);
        let confirming = out.ended && backlog == 0;
        if taken > out.taken || confirming && !out.confirming {
            out.taken = taken;
            self.primary.spill_reached(out.id, taken);
            // Its answer to the last heartbeat may be behind all this.
            self.heard = self.primary.store.env().now();
        }
        if confirming && !out.confirming {
            out.confirming = true;
            self.primary.set_confirming(true);
        }
        Ok(moved)
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
            if let Some(view_client) = &self.view_client {
                let change = Change::Attach {
                    epoch: self.epoch,
                    peer: view_client.peer.clone(),
                    // In `async` a mirror never holds everything.
                    member: self.member && self.paired_rule.mirror,
                    adopted: view_client.adopted,
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

    fn begin_lanes(&mut self, session: u64, resume: u64) -> Result<()> {
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

    fn open_lanes(&mut self) -> Result<bool> {
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
        let Phase::Opening { lanes } = std::mem::replace(&mut self.phase, Phase::Active) else {
            unreachable!("seen above");
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
        Ok(true)
    }

    /// A lane can be silent while the control link is well, and in `async`
    /// nobody waits for it: without progress for `SILENCE`, start anew.
    fn watch_lanes(&mut self, now: Duration) -> Result<()> {
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
            self.primary.committed()
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
        // One that takes longer than the time between two is measured too; the
        // time that the mirror takes for a copy is not the link's.
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

    /// While records flow: is the attach complete, is the mirror a member?
    fn settle(&mut self) -> Result<()> {
        let p = &self.primary;
        if !self.member {
            // From here on nothing is acknowledged without the mirror; once it
            // has all that was, it counts. Until then the own log counts too,
            // so that a primary that was alone can go on alone.
            if self.paired_rule.mirror {
                p.set_rule(AckRule::BOTH);
            }
            let all = *self.rejoin_lsn.get_or_insert_with(|| p.last());
            if p.acked.get() >= all || p.store.mutations.admit_early.load(Relaxed) {
                let Some(view_client) = self
                    .view_client
                    .as_ref()
                    .filter(|_| self.paired_rule.mirror)
                else {
                    return self.admitted();
                };
                let now = p.store.env().now();
                if let Some(peer) = view_client.peer.clone()
                    && view_client.may_try(now)
                {
                    // From now on the mirror may be a member: nothing is
                    // acknowledged without it, also if the answer is lost and
                    // then the link, until the register says otherwise.
                    self.was_alone = std::mem::take(&mut self.alone);
                    self.ask(Change::Admit(peer));
                }
            }
        }
        self.show_adopted()
    }

    /// The mirror on the link is a member of the view.
    fn admitted(&mut self) -> Result<()> {
        self.member = true;
        let view = self.view();
        let p = &self.primary;
        p.store.update(|s| s.view = view)?;
        p.set_rule(self.paired_rule);
        self.alone = false;
        self.rejoin_lsn = None;
        self.beat = 0;
        self.show_adopted()
    }

    /// The application sees everything that was adopted, once all of it is as
    /// safe as the rule asks, and the mirror is in the view if it is there: a
    /// program whose first sync points are acknowledged before that could be
    /// followed by nobody, though the mirror holds them.
    fn show_adopted(&mut self) -> Result<()> {
        let p = &self.primary;
        if p.ready.load(Acquire) || p.committed() < self.adopted_lsn {
            return Ok(());
        }
        let joins = !self.member && self.is_active() && self.paired_rule.mirror;
        let waits = joins && p.store.env().now() < self.admit_by;
        if waits && !p.store.mutations.ready_early.load(Relaxed) {
            return Ok(());
        }
        // As much at a time as the area's memory takes.
        let mut before = None;
        while p.store.applied() < self.adopted_lsn && before != Some(p.store.applied()) {
            before = Some(p.store.applied());
            p.store.apply(self.adopted_lsn, usize::MAX)?;
        }
        if p.store.applied() >= self.adopted_lsn {
            if self.leased
                && let Some(view_client) = &self.view_client
            {
                p.lease_until(view_client.confirmed + view_client.limit);
            }
            p.ready.store(true, Release);
            p.done.notify();
        }
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
        let committed = self.primary.committed();
        if let Some(w) = &mut self.wire {
            w.queue(
                FrameKind::Heartbeat,
                self.epoch,
                committed,
                flags,
                &[self.member as u8],
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

    /// While a copy is made: whether bytes wait for room on the link. Then, and
    /// only then, the link alone tells when there is more to do.
    pub fn copies(&self) -> Option<bool> {
        let copies = matches!(
            self.phase,
            Phase::Sending(_) | Phase::Sent { .. } | Phase::Receiving { .. }
        );
        let full = self.wire.as_ref().is_some_and(|w| w.backlog() > 0);
        copies.then_some(full)
    }

    /// The connection to wait on, when there is nothing to do.
    pub fn conn(&self) -> Option<&Arc<dyn Conn>> {
        self.wire.as_ref().map(|w| &w.conn)
    }
}
