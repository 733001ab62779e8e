//! The primary's session with its mirror: what a link (`peer_link.rs`) does for a peer that
//! sync points wait for.
//!
//! Owns whether the mirror is a member, how an attach goes, and the making and breaking of the
//! lanes' ends, which the primary's threads use. `docs/reference/protocol.md`, "Session".
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

use mojim_env::turns::lock;
use mojim_format::message::{Alive, Hello, Message, Refuse, RefuseCode, Start, Started, Welcome};
use mojim_format::{FRAME_LEN, Frame, FrameKind, State, View};
use mojim_protocol::view::{Member, Register};
use mojim_protocol::{
    AckRule, Holding, KnownAcknowledged, LAST_EPOCH, Lacks, Loss, Plan, has_lost, loss, may_outbid,
    reconcile,
};

use crate::handshake::{Limits, exceeds, theirs};
use crate::holders::{Holders, Peer};
use crate::link::{COPY_AGAIN, Rx, Tx};
use crate::mirror::promote::used_up;
use crate::peer_link::{FIRST_PAUSE, OpenLane, PeerLink, Phase, Policy};
use crate::primary::Primary;
use crate::spill_out::{SpillFile, SpillOut};
use crate::told::Told;
use crate::view_client::{Outcome, ViewChange, ViewClient};
use mojim_copy::copy_in::CopyIn;
use mojim_env::wire::bad;
use mojim_env::{Error, Result, Space};
use mojim_store::area::named_spill;
use mojim_store::log::Live;
use mojim_store::store::Store;

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

/// A session: a primary's link to its mirror.
pub type Session = PeerLink<ToMirror>;

/// What a link to a mirror has besides.
pub struct ToMirror {
    primary: Arc<Primary>,
    /// It attaches: nothing is shown to the application yet, and it begins a new epoch.
    attach: bool,
    /// The epoch to ask for while attaching.
    epoch: u64,
    sent_at: Option<(Duration, u64)>,
    member: bool,
    /// By the view, this primary needs no mirror until one has joined.
    alone: bool,
    /// The rule that applies once the mirror is a member.
    paired_rule: AckRule,
    /// The last LSN that an attach adopted; the application waits until it is committed.
    adopted_lsn: u64,
    /// How far the lanes were at the last look: what is acknowledged, what they have taken.
    reached: [u64; 2],
    /// The last LSN that may have been acknowledged without this mirror.
    rejoin_lsn: Option<u64>,
    /// This node is to take the peer's copy.
    adopting: bool,
    /// Why attaching cannot succeed.
    fatal: Option<Error>,
    /// The attach would begin with less than was acknowledged: an operator decides.
    loss: Option<Loss>,
    /// What other nodes said before the attach.
    told: Vec<Told>,
    /// If the cluster has a register of views.
    views: Option<Views>,
}

impl Policy for ToMirror {
    const LONGEST_PAUSE: Duration = Duration::from_millis(500);

    fn store(&self) -> &Arc<Store> {
        &self.primary.store
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn acked(&self) -> u64 {
        self.primary.acked.get()
    }

    fn prepare(s: &mut Session, now: Duration) -> Result<Option<bool>> {
        s.prepare(now)
    }

    fn try_again(s: &mut Session, now: Duration) -> Result<bool> {
        s.leave_idle(now)
    }

    fn agree(s: &mut Session, welcome: Welcome) -> Result<()> {
        s.agree(welcome)
    }

    fn refused(s: &mut Session, refuse: Refuse) -> Error {
        s.refused(refuse)
    }

    fn copy_refused(s: &mut Session, why: &Error) -> Error {
        s.copy_failed(format!("node {}: {why}", s.peer.name))
    }

    fn copied(s: &mut Session, lsn: u64) -> Result<()> {
        s.start(lsn, if s.policy.attach { lsn } else { u64::MAX })
    }

    fn started(s: &mut Session, started: Started, resume: u64) -> Result<()> {
        s.started(started, resume)
    }

    fn activate(s: &mut Session, lanes: Vec<OpenLane>, _: Duration) {
        s.activate(lanes);
    }

    fn spill_arrived(s: &mut Session, id: u64) {
        s.policy.primary.spill_arrived(id);
    }

    fn beat(s: &mut Session, now: Duration) -> Result<(u64, bool)> {
        Ok(s.beat(now))
    }

    fn beat_answered(s: &mut Session, f: &Frame, body: &[u8]) -> Result<()> {
        s.beat_answered(f, body)
    }

    fn take(s: &mut Session, f: &Frame, body: &[u8]) -> Result<()> {
        match (&mut s.phase, f.kind) {
            (Phase::Asked, FrameKind::CopyBegin) => {
                let copy = CopyIn::begin(&s.policy.primary.store, body)?;
                s.phase = Phase::Receiving(copy);
                Ok(())
            }
            (Phase::Receiving(_), _) => s.copy_in(f, body),
            (Phase::Spilling { .. }, FrameKind::Spill) => s.spill_confirmed(f.lsn),
            _ => Err(s.out_of_turn(f.kind)),
        }
    }

    fn carry(s: &mut Session, now: Duration) -> Result<bool> {
        if s.is_active() {
            s.check_membership()?;
        }
        let moved = s.send_spill()?;
        s.watch_lanes(now);
        Ok(moved)
    }

    fn fail(s: &mut Session, e: Error) {
        s.force_copy |= s.disagrees(&e);
        let paired = s.is_active() && !s.policy.attach;
        s.abandon_link(&e.to_string());
        if paired {
            let p = &s.policy.primary;
            p.mirror_lost(p.store.env().now());
        }
    }

    fn leave(s: &mut Session) {
        s.policy.primary.other_end.set_copying(false);
    }
}

impl Session {
    /// A session that attaches: it asks for an epoch above all that it knows.
    pub fn attach(primary: Arc<Primary>, me: &str, peer: Peer) -> Session {
        let sb = primary.store.superblock();
        primary.pair_with(&peer.name);
        let member = sb.view.epoch == 0 || sb.view.mirror == peer.name;
        let to = ToMirror {
            epoch: primary.store.next_epoch(sb.promised.max(sb.view.epoch)),
            alone: false,
            paired_rule: primary.spec.rule,
            primary,
            attach: true,
            sent_at: None,
            member,
            adopted_lsn: 0,
            reached: [0; 2],
            rejoin_lsn: None,
            adopting: false,
            fatal: None,
            loss: None,
            told: Vec::new(),
            views: None,
        };
        PeerLink::idle(to, me, peer)
    }

    /// The node that is its mirror, or is to be.
    pub fn peer(&self) -> &str {
        &self.peer.name
    }

    /// Makes `peer` the mirror from here on.
    fn turn_to(&mut self, peer: Peer) {
        self.policy.primary.pair_with(&peer.name);
        let store = &self.policy.primary.store;
        let view = store.superblock().view;
        self.policy.member = self.policy.attach && (view.epoch == 0 || view.mirror == peer.name);
        if let Some(views) = &mut self.policy.views {
            views.client.peer = None;
            views.absent = store.env().now();
        }
        self.peer = peer;
        self.force_copy = false;
        self.backoff = FIRST_PAUSE;
    }

    /// The primary whose session this is.
    pub fn primary(&self) -> &Arc<Primary> {
        &self.policy.primary
    }

    /// Whether it has not begun its epoch yet.
    pub fn is_attaching(&self) -> bool {
        self.policy.attach
    }

    /// Why attaching cannot succeed, if so.
    pub fn fatal(&self) -> Option<&Error> {
        self.policy.fatal.as_ref()
    }

    /// What an attach would lose, if an operator must decide about it.
    pub fn loss(&self) -> Option<Loss> {
        self.policy.loss
    }

    /// Whether the mirror holds everything that was acknowledged.
    pub fn is_member(&self) -> bool {
        self.policy.member
    }

    /// Whether the peer answers, whatever it says.
    pub fn is_connected(&self) -> bool {
        !matches!(self.phase, Phase::Idle(_) | Phase::Greeting)
    }

    fn abandon_link(&mut self, why: &str) {
        let p = self.policy.primary.clone();
        let now = p.store.env().now();
        let (active, connected) = (self.is_active(), self.is_connected());
        if active && let Some(views) = &mut self.policy.views {
            // The link was of no use for a while before its failure was noticed.
            let silent = now.saturating_sub(self.heard);
            let stuck = match p.lacks_acks() {
                true => now.saturating_sub(self.moved),
                false => Duration::ZERO,
            };
            let silent = if silent > self.heartbeat * 2 {
                silent
            } else {
                Duration::ZERO
            };
            views.client.missed(silent.max(stuck));
        }
        if connected && let Some(views) = &mut self.policy.views {
            views.absent = now;
        }
        for lane in p.lanes.iter() {
            *lock(&lane.tx) = None;
            let mut slot = lock(&lane.rx);
            if let Some(rx) = slot.rx.take() {
                rx.close();
            }
        }
        if self.spill.is_some() && !why.is_empty() {
            p.spills.failed(why);
        }
        p.spills.set_confirming(false);
        self.policy.rejoin_lsn = None;
        if self.policy.alone {
            // The mirror that was joining is gone again.
            p.set_rule(AckRule::LOCAL);
        }
        p.link_up.store(false, Release);
        p.suspect.store(false, Release);
        p.forget_waits(self.silence);
        self.policy.sent_at = None;
        self.close();
        p.other_end.set_copying(false);
        p.store.load_abort();
        p.store.freeze(false);
        if !why.is_empty() {
            self.last_error = Some(why.to_owned());
            *lock(&p.link_error) = Some(Error::Protocol(why.to_owned()));
        }
        self.pause();
    }

    /// What is due whatever the phase: what the primary's threads and the register say.
    fn prepare(&mut self, now: Duration) -> Result<Option<bool>> {
        if self.policy.fatal.is_some() {
            return Ok(None);
        }
        if self.policy.primary.suspect.swap(false, AcqRel) && !matches!(self.phase, Phase::Idle(_))
        {
            let why = lock(&self.policy.primary.link_error).clone();
            return Err(why.unwrap_or_else(|| Error::Protocol("the link is suspected".into())));
        }
        // A copy that failed halfway must not be a source.
        self.policy.primary.store.check()?;
        let moved = self.hear_register(now)?;
        self.give_up_mirror(now)?;
        self.keep_lease(now);
        self.raise_epoch_for_backup(now);
        self.policy.primary.other_end.set_copying(self.is_copying());
        Ok(Some(moved))
    }

    /// It is time to try again: greets the mirror, or turns to another one. False if neither is
    /// to be done now.
    fn leave_idle(&mut self, now: Duration) -> Result<bool> {
        let views = self.policy.views.as_ref();
        let waits = views.is_some_and(|v| v.is_raising() || v.leaving);
        // An attach whose outcome is not known is not tried a second time.
        if waits || self.policy.attach && self.is_asking() {
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

    /// Whether another node has taken the mirror's place. The replaced node is no mirror
    /// any more, even if its own configuration still makes it one and it answers.
    fn is_replaced(&self) -> bool {
        let gone = |v: &Views| v.candidates.find(&self.peer.name).is_none();
        self.policy.views.as_ref().is_some_and(gone)
            && !self.policy.attach
            && !self.policy.primary.store.mutations.call_replaced.is_on()
    }

    fn greet(&mut self, now: Duration) -> Result<()> {
        let mut view = self.policy.primary.store.superblock().view.epoch;
        if let Some(views) = &mut self.policy.views
            && self.policy.attach
        {
            match views.client.view_to_attach(&self.policy.primary.store) {
                Ok(epoch) => {
                    view = view.max(epoch);
                    // The attach adopts what the register's mirror holds beyond this copy.
                    let named = views.client.register.mirror.as_ref();
                    let other = named.filter(|m| m.node != self.peer.name);
                    let broken = &self.policy.primary.store.mutations;
                    let other = other.filter(|_| !broken.ask_configured.is_on());
                    if let Some(m) = other
                        && let Some(peer) = views.candidates.find(&m.node)
                    {
                        self.turn_to(peer);
                    }
                }
                Err(e) => {
                    if let Error::Stale(_) = e {
                        self.policy.fatal = Some(e.clone());
                    }
                    return Err(e);
                }
            }
        }
        if let Some(views) = &mut self.policy.views {
            views.hello_view_epoch = view;
        }
        self.misses_mirror()?;
        if self.policy.attach {
            self.policy.epoch = self.policy.epoch.max(self.unused_epoch());
            self.may_begin()?;
        }
        let store = &self.policy.primary.store;
        let conn = self.connect()?;
        let sb = store.superblock();
        let tail = if self.policy.attach {
            store.tail()
        } else {
            self.policy.primary.last()
        };
        let hello = Hello {
            cluster: sb.cluster,
            volume: sb.volume,
            from: self.me.clone(),
            to: self.peer.name.clone(),
            volume_id: sb.volume_id,
            view,
            epoch: self.policy.epoch,
            attach: self.policy.attach || !self.policy.member,
            backup: false,
            lanes: store.logs().len() as u16,
            tail,
            history: store.history().entries().to_vec(),
        };
        self.send_hello(conn, &hello, now);
        Ok(())
    }

    /// An epoch above those that earlier tries began: none is begun twice.
    fn unused_epoch(&self) -> u64 {
        let store = &self.policy.primary.store;
        let view = store.superblock().view.epoch;
        store.next_epoch(view.max(store.history().last_epoch()))
    }

    /// Fails for good if no epoch is left to be begun.
    fn may_begin(&mut self) -> Result<()> {
        if self.policy.epoch <= LAST_EPOCH {
            return Ok(());
        }
        let e = used_up(&self.policy.primary.store.spec().volume, self.policy.epoch);
        self.policy.fatal = Some(e.clone());
        Err(e)
    }

    /// The mirror has begun the session.
    fn started(&mut self, s: Started, resume: u64) -> Result<()> {
        if let Some(views) = &mut self.policy.views {
            let peer = Member {
                node: self.peer.name.clone(),
                incarnation: s.life,
            };
            if self.policy.member && views.client.peer.as_ref() != Some(&peer) {
                return Err(Error::Protocol("the mirror began another life".into()));
            }
            views.client.peer = Some(peer);
        }
        self.send_spills(s.session, resume)
    }

    /// Takes the answer to a heartbeat: the round-trip time, the epoch that a backup of the
    /// mirror's has promised, if the answer has one, and the mirror's room.
    fn beat_answered(&mut self, f: &Frame, body: &[u8]) -> Result<()> {
        let alive = Alive::decode(body).map_err(bad)?;
        if alive.block > MOST_BLOCK {
            return Err(Error::Protocol(format!(
                "node {} says that files take units of {} bytes there",
                self.peer.name, alive.block
            )));
        }
        if self.is_active() {
            self.policy
                .primary
                .backups
                .outbid_by(alive.outbid, self.policy.epoch);
            let space = Space {
                bytes: alive.bytes,
                files: alive.files,
                block: alive.block,
            };
            self.policy.primary.other_end.has_room(alive.applied, space);
        }
        if let Some((at, n)) = self.policy.sent_at
            && f.flags as u64 == n & 0x7fff
        {
            let took = self.policy.primary.store.env().now() - at;
            let usual = self.policy.primary.other_end.measured(took);
            self.policy.primary.store.logs()[0]
                .live(Live::RoundTrip)
                .store(usual.as_nanos() as u64, Relaxed);
            self.policy.sent_at = None;
        }
        Ok(())
    }

    /// The view of this session.
    fn view(&self) -> View {
        View {
            epoch: self.policy.epoch,
            primary: self.me.clone(),
            mirror: if self.policy.member {
                self.peer.name.clone()
            } else {
                JOINING.into()
            },
        }
    }

    /// Begins the session: the mirror has everything up to `resume`. An attach
    /// begins its epoch first, with the register's consent.
    fn start(&mut self, resume: u64, keep: u64) -> Result<()> {
        if self.policy.attach {
            if self.policy.primary.store.superblock().state == State::Empty {
                self.policy.primary.store.make_new()?;
            }
            if let Some(views) = &self.policy.views {
                let change = ViewChange::Attach {
                    epoch: self.policy.epoch,
                    peer: views.client.peer.clone(),
                    // In `async` a mirror never holds everything.
                    member: self.policy.member && self.policy.paired_rule.mirror,
                    adopted: views.client.adopted,
                };
                self.ask(change);
                self.phase = Phase::Claiming { resume, keep };
                return Ok(());
            }
            self.policy.adopted_lsn = self.policy.primary.begin(self.policy.epoch, self.view())?;
        }
        self.send_terms(resume, keep);
        Ok(())
    }

    /// Sends the session's terms.
    fn send_terms(&mut self, resume: u64, keep: u64) {
        let store = &self.policy.primary.store;
        let start = Start {
            epoch: self.policy.epoch,
            primary: self.me.clone(),
            volume_id: store.superblock().volume_id,
            member: self.policy.member,
            keep,
            history: store.history().entries().to_vec(),
        };
        // The mirror may have less than it once acknowledged: it lost its log.
        self.policy.primary.acked.reset(resume);
        self.send_start(&start, resume);
    }

    /// What a heartbeat says: what is committed, and whether the mirror is a member.
    fn beat(&mut self, now: Duration) -> (u64, bool) {
        // A round trip longer than the heartbeat interval is measured too; the time that
        // the mirror takes for a copy, or to make its own ready, is not the link's.
        if !self.is_copying() && !matches!(self.phase, Phase::Asked) {
            self.policy.sent_at.get_or_insert((now, self.beat));
        }
        match self.is_active() {
            true => (self.policy.primary.committed_whole(), self.policy.member),
            false => (0, false),
        }
    }

    /// The last word of a primary that ends in order: tells the mirror what is
    /// committed, and waits (at most half a second) for its answer, so that the
    /// mirror's copy is as current as this one.
    pub fn farewell(&mut self) {
        if !self.is_active() {
            self.abandon_link("");
            return;
        }
        let env = self.policy.primary.store.env().clone();
        let end = env.now() + Duration::from_millis(500);
        self.beat += 1;
        let committed = self.policy.primary.committed_whole();
        self.queue_beat(committed, &[self.policy.member as u8, 1]);
        self.policy.sent_at = Some((env.now(), self.beat));
        while self.policy.sent_at.is_some() && env.now() < end && self.is_active() {
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
        self.is_active() && self.policy.sent_at.is_some()
    }

    /// While a copy is made: whether bytes wait for room on the link. Only then does the
    /// link alone tell when there is more to do.
    pub fn copies(&self) -> Option<bool> {
        let full = self.wire.as_ref().is_some_and(|w| w.backlog() > 0);
        self.is_copying().then_some(full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::SILENCE;
    use crate::view_client::tests::Mute;
    use mojim_config::WriteBack;
    use mojim_env::Address;

    /// A session with a mirror that cannot be reached.
    fn session(p: Primary) -> Session {
        let tcp = Address::Tcp(([127, 0, 0, 1], 9).into());
        let peer = Peer {
            name: "b".into(),
            address: tcp.clone(),
            tcp,
            shared: false,
        };
        Session::attach(Arc::new(p), "a", peer)
    }

    /// While a frame was taken, the session was in the phase after `Hello`. If the frame could
    /// not be read, the session ended as one that had not begun: the mirror was not counted as
    /// lost, nor what it alone had as at risk.
    #[test]
    fn a_frame_that_cannot_be_read_ends_the_phase_in_which_it_came() {
        let (p, dir) = crate::primary::tests::alone("unread", WriteBack::Auto);
        let mut s = session(p);
        s.phase = Phase::Active;
        let f = Frame {
            kind: FrameKind::Refuse,
            flags: 0,
            epoch: 1,
            lsn: 0,
            body: 1,
        };
        s.on_frame(&f, &[1]).unwrap_err();
        assert!(s.is_active());
        drop(s);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Each try to reach a mirror that was away ended the account of whatever copy this node
    /// made: one for a backup. `mojim status` did not show that copy, and a new epoch could be
    /// begun in the middle of it.
    #[test]
    fn a_mirror_that_is_away_ends_no_copy_for_a_backup() {
        let (p, dir) = crate::primary::tests::alone("copies", WriteBack::Auto);
        let mut s = session(p);
        let store = s.policy.primary.store.clone();
        store.progress.begin(s.now(), false, 1 << 20);
        store.progress.moved(1);
        while s.last_error.is_none() {
            s.step();
        }
        assert!(store.progress.get(s.now()).unwrap().running);
        // No sync point waits longer for it.
        let waits = |s: &Session| s.policy.primary.other_end.is_copying();
        s.prepare(s.now()).unwrap();
        assert!(!waits(&s));
        // Its own copy ends with its link.
        s.phase = Phase::Sent { lsn: 1 };
        s.prepare(s.now()).unwrap();
        assert!(waits(&s));
        s.abandon_link("the link broke");
        assert!(!store.progress.get(s.now()).unwrap().running && !waits(&s));
        drop(s);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// The time in which a mirror made its copy ready, to give it, counted as a round trip over the
    /// link: sync points suspected the link as much later.
    #[test]
    fn the_time_that_a_copy_takes_is_no_round_trip() {
        let (p, dir) = crate::primary::tests::alone("asked", WriteBack::Auto);
        let mut s = session(p);
        for (phase, counts) in [
            (Phase::Asked, false),
            (Phase::Sent { lsn: 1 }, false),
            (Phase::Starting { resume: 0 }, true),
        ] {
            s.phase = phase;
            s.beat(s.now());
            assert_eq!(s.policy.sent_at.is_some(), counts);
        }
        drop(s);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// A link on which the session itself saw that nothing moved ended as one that had worked
    /// until then: its mirror was given up later by that time.
    #[test]
    fn time_in_which_nothing_moved_counts_towards_giving_the_mirror_up() {
        let (p, dir) = crate::primary::tests::alone("stuck", WriteBack::Auto);
        p.begin_unreplicated("a").unwrap();
        p.append(&[]).unwrap();
        let client = ViewClient::new(Arc::new(Mute), Box::new(Mute), SILENCE);
        let mut s = session(p).with_views(client, Arc::default()).unwrap();
        let due = |s: &Session| s.policy.views.as_ref().unwrap().client.is_due();
        s.phase = Phase::Active;
        s.heard = s.now();
        s.policy.reached = [s.policy.acked(), s.policy.primary.handed()];
        s.moved = s.heard.saturating_sub(SILENCE + SILENCE / 4);
        assert!(!due(&s));
        assert!(s.step());
        let why = s.last_error.clone().unwrap();
        assert!(why.contains("nothing moved on the lanes"), "{why}");
        assert!(due(&s));
        drop(s);
        std::fs::remove_dir_all(dir).unwrap();
    }

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
            let mut s = session(p);
            s.phase = Phase::Active;
            s.policy.primary.suspect(why.clone());
            assert!(s.step());
            assert_eq!(s.force_copy, copies, "{why}");
            drop(s);
            std::fs::remove_dir_all(dir).unwrap();
        }
    }

    /// A mirror that refused its session's terms was offered the same terms again, and a spill file
    /// that it refused was sent again, for ever: what came over the session's own link was received
    /// as a text, without its code. docs/protocol.md: only a whole copy settles it.
    #[test]
    fn terms_that_were_refused_are_not_offered_again() {
        let phases: [fn() -> Phase; 3] = [
            || Phase::Starting { resume: 0 },
            || Phase::Spilling {
                session: 1,
                resume: 0,
                files: VecDeque::new(),
            },
            || Phase::Active,
        ];
        let codes = [
            (RefuseCode::Protocol, true),
            (RefuseCode::Poisoned, false),
            (RefuseCode::Busy, false),
        ];
        for (code, copies) in codes {
            for phase in phases {
                let (p, dir) = crate::primary::tests::alone("terms", WriteBack::Auto);
                let mut s = session(p);
                s.phase = phase();
                let refuse = Refuse {
                    code,
                    epoch: 1,
                    text: "asked to drop what is shown".into(),
                };
                let e = s.refused(refuse);
                assert!(e.to_string().contains("node b: asked to drop"), "{e}");
                ToMirror::fail(&mut s, e);
                assert_eq!(s.force_copy, copies, "{code:?}");
                drop(s);
                std::fs::remove_dir_all(dir).unwrap();
            }
        }
    }
}
