//! The mirror: follows a primary into its own copy.
//!
//! Owns what one volume's copy on this node has received and from whom: the
//! control side of a session and the receiving ends of its lanes. Each lane
//! has its own log and its own thread. The thread receives, validates, appends,
//! makes persistent if the log's medium does, and acknowledges. Nothing else
//! happens on that path (Mojim 4.1, 4.2). Checkpoints run beside it.
//!
//! Invariants:
//!
//! - Records are accepted only from the lanes of the present session, whose
//!   epoch this node has durably promised. A new session stops the lanes of
//!   the old one before it answers.
//! - A record is acknowledged after it is in the log, and persistent there if
//!   the medium persists.
//! - Only records known to be committed are applied, except when this node
//!   becomes primary or gives its copy to one: then its whole prefix counts.

pub mod control;
pub mod lane;
pub mod promote;

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use mojim_env::turns::lock;
use mojim_format::frame::WAITS;
use mojim_format::message::{
    Alive, CopyData, Hello, Lane, Message, Refuse, RefuseCode, Start, Started, Welcome,
};
use mojim_format::{FRAME_LEN, Frame, FrameKind, RecordView, State, Superblock, View};
use mojim_protocol::view::Register;
use mojim_protocol::{
    Acknowledged, Arrival, History, Holding, LAST_EPOCH, LEAP, LaneIn, Marks, Prefix, may_promise,
};

use crate::backup_progress::{BackupProgress, Source, Term};
use crate::link::{COPY_SILENCE, Front, HEARTBEAT, PAGE_LEN, Page, RingIn, SILENCE};
use crate::pace::{Pace, Pacer, piece};
use crate::register::ViewRegister;
use crate::view_client::member;
use mojim_copy::copy_in::CopyIn;
use mojim_copy::copy_out::CopyOut;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Conn, Error, Result};
use mojim_store::area::named_spill;
use mojim_store::log::{CONTROL_LEN, Log};
use mojim_store::store::{Page as FilePage, Store};

/// Most LSNs that may be received out of order.
const WINDOW: usize = 1 << 17;

/// One volume's copy on a node that follows.
pub struct Mirror {
    /// The copy.
    pub store: Arc<Store>,
    me: String,
    /// Silence after which a link counts as broken.
    pub silence: Duration,
    /// How many records wait, at least, before they are applied in a pause
    /// (`checkpoint_threshold`), unless the log is half full or nothing comes for long.
    pub checkpoint_threshold: u64,
    smallest_log: u64,
    session: AtomicU64,
    /// The contiguous prefix of what is in the logs.
    pub received: Prefix,
    committed: AtomicU64,
    lanes: Vec<Mutex<Option<LaneIn>>>,
    heard: Mutex<Option<(Duration, String)>>,
    /// The node that sent the last `Hello`.
    upstream: Mutex<String>,
    /// That node forwards to this one as its backup.
    as_backup: AtomicBool,
    /// Held while what a session rests on changes: greeting, loading, start,
    /// promotion exclude each other.
    change: Mutex<()>,
    /// Counts greetings: a control link of an older greeting may change nothing any more.
    generation: AtomicU64,
    /// The node that greeted last: the session, if there is one, is with it.
    greeted: Mutex<String>,
    /// A new number whenever records here may have been dropped or replaced; 0 while that
    /// is not decided.
    term: AtomicU64,
    terms: AtomicU64,
    /// The backups that this copy is forwarded to.
    pub backups: BackupProgress,
    /// The checkpoint thread.
    pub checkpoint_work: Event,
    /// Lanes that wait for room in their log.
    pub room: Event,
    closed: AtomicBool,
    /// This copy is known to be wrong: the next primary is told that there is none.
    distrusted: AtomicBool,
    /// The register was asked to go on with what is here, whatever is missing.
    gives_up: AtomicBool,
    /// The greatest epoch that the register was seen to have.
    agreed: AtomicU64,
    /// The epoch that this process has followed as a member, so that what was acknowledged in it
    /// is here; 0: none.
    followed: AtomicU64,
}

/// A refusal with its reason: what the peer is told before the link closes.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// For programs.
    pub code: RefuseCode,
    /// For people.
    pub text: String,
}

impl Refusal {
    fn new(code: RefuseCode, text: impl Into<String>) -> Refusal {
        Refusal {
            code,
            text: text.into(),
        }
    }
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Refusal {
        let code = match e {
            Error::Poisoned(_) | Error::Full(_) | Error::Io { .. } => RefuseCode::Poisoned,
            Error::Busy(_) => RefuseCode::Busy,
            _ => RefuseCode::Protocol,
        };
        // This node goes on by itself when there is room: nobody attaches here.
        Refusal::new(code, e.cause())
    }
}

impl Source for Mirror {
    fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// All nodes but its primary.
    fn serves(&self, peer: &str) -> bool {
        self.store.superblock().view.primary != peer
    }

    fn term(&self) -> Option<Term> {
        let number = self.term.load(SeqCst);
        if number == 0 {
            return None;
        }
        let sb = self.store.superblock();
        let mine = sb.state == State::Whole && sb.view.mirror == self.me;
        let term = Term {
            number,
            epoch: sb.promised,
            primary: sb.view.primary,
        };
        (mine && self.term.load(SeqCst) == number).then_some(term)
    }

    fn is_settling(&self) -> bool {
        self.term.load(SeqCst) == 0 && !self.is_closed()
    }

    fn received(&self) -> u64 {
        self.received.get()
    }

    fn committed(&self) -> u64 {
        Mirror::committed(self)
    }

    fn backups(&self) -> &BackupProgress {
        &self.backups
    }
}

impl Mirror {
    /// A copy in an opened store, which follows any node that greets. At most `threshold`
    /// bytes of what was received wait for an active backup.
    pub fn new(store: Arc<Store>, me: &str, threshold: u64) -> Mirror {
        let tail = store.tail();
        let received = Prefix::new(WINDOW, tail);
        // Behind a gap there may be records that were acknowledged on their lane: they
        // count as soon as the gap is filled.
        for log in store.logs() {
            for r in log.records(log.start()) {
                received.mark(r.header.lsn);
            }
        }
        Mirror {
            me: me.to_owned(),
            silence: SILENCE,
            checkpoint_threshold: 1,
            smallest_log: store.logs().iter().map(Log::size).min().unwrap_or(0),
            session: AtomicU64::new(0),
            received,
            // What is in the data area was committed.
            committed: AtomicU64::new(store.applied()),
            lanes: store.logs().iter().map(|_| Mutex::new(None)).collect(),
            heard: Mutex::new(None),
            upstream: Mutex::default(),
            as_backup: AtomicBool::new(false),
            change: Mutex::new(()),
            generation: AtomicU64::new(0),
            greeted: Mutex::default(),
            // 0 until this copy has heard its primary: the data area may hold what was
            // applied for a primary that never began its epoch.
            term: AtomicU64::new(0),
            terms: AtomicU64::new(1),
            backups: BackupProgress::new(store.logs().len(), threshold),
            checkpoint_work: Event::default(),
            room: Event::default(),
            closed: AtomicBool::new(false),
            distrusted: AtomicBool::new(store.has_part()),
            gives_up: AtomicBool::new(false),
            agreed: AtomicU64::new(0),
            followed: AtomicU64::new(0),
            store,
        }
    }

    /// The committed LSN, as the primary last said.
    pub fn committed(&self) -> u64 {
        self.committed.load(Acquire)
    }

    /// The last LSN that this node knows now to have been acknowledged, whether its copy has
    /// the record or not: by its logs as they were found, or by its primary's word since.
    pub fn known_acknowledged(&self) -> u64 {
        let found = self.store.known_acknowledged();
        match self.store.mutations.tell_old.is_on() {
            true => found,
            false => found.max(self.committed()),
        }
    }

    /// The same with its epoch, for others than the primary; `None` without a whole copy. `sb` is
    /// the superblock as it was read: the store's own is not asked for while a disk writes it.
    pub fn knows(&self, sb: &Superblock) -> Option<Acknowledged> {
        let lsn = self.known_acknowledged();
        (sb.state == State::Whole).then(|| Acknowledged {
            volume_id: sb.volume_id,
            lsn,
            epoch: self.store.history().epoch_at(lsn),
        })
    }

    /// The primary that was heard within `silence`, if any, and how long ago.
    pub fn live_primary(&self) -> Option<(Duration, String)> {
        let (when, who) = lock(&self.heard).clone()?;
        let ago = self.store.env().now().saturating_sub(when);
        (self.session.load(Acquire) != 0 && ago < self.silence).then_some((ago, who))
    }

    /// When it last heard its primary since it was opened, whether that is alive by now
    /// or not.
    pub fn last_heard(&self) -> Option<Duration> {
        lock(&self.heard).as_ref().map(|(when, _)| *when)
    }

    /// Whether it follows a node that forwards, as its backup, by the last `Hello`.
    pub fn is_backup(&self) -> bool {
        self.as_backup.load(Acquire)
    }

    /// The node that greeted last: the session, if there is one, is with it.
    pub fn greeted(&self) -> String {
        lock(&self.greeted).clone()
    }

    /// The records here may change: none is forwarded meanwhile.
    fn stop_forwarding(&self) {
        self.term.store(0, SeqCst);
        self.store.revoke_pauses();
        self.backups.work.notify();
    }

    /// The records here stand from now on; more are only added.
    fn start_forwarding(&self) {
        self.backups.cut(&self.store);
        let number = self.terms.fetch_add(1, SeqCst) + 1;
        self.term.store(number, SeqCst);
        self.backups.work.notify();
    }

    /// Whether another node sends records, or a whole copy.
    pub fn has_session(&self) -> bool {
        self.session.load(Acquire) != 0 || self.store.is_loading()
    }

    /// Ends the present session: its lanes accept nothing more once this
    /// returns, and a copy that was being taken in is given up.
    fn stop_session(&self) {
        self.session.store(0, SeqCst);
        self.store.load_abort();
        for lane in &self.lanes {
            // A lane holds this lock while it appends.
            *lock(lane) = None;
        }
    }

    /// An operator has seen that this copy differs from the primary's in more than the
    /// bytes of its files. Ends the session, so that the present or the next primary
    /// makes a copy anew; what is here stays until then.
    pub fn distrust(&self) {
        let _change = lock(&self.change);
        self.distrusted.store(true, SeqCst);
        self.generation.fetch_add(1, SeqCst);
        self.stop_session();
    }

    /// Whether this copy is to be made anew: by an operator's word, or since its log was damaged
    /// where the files show more.
    pub fn is_distrusted(&self) -> bool {
        self.distrusted.load(Acquire)
    }

    /// `Store::rewrite`, for a copy that follows the primary of `epoch`.
    pub fn rewrite(
        &self,
        epoch: u64,
        id: u32,
        offset: u64,
        fetch: impl FnOnce(u64) -> Result<FilePage>,
    ) -> Result<bool> {
        // No records are dropped while the rewrite relies on them.
        let _change = lock(&self.change);
        self.store.check()?;
        let sb = self.store.superblock();
        if self.is_closed() || sb.state != State::Whole || sb.view.epoch != epoch {
            return Err(Error::Busy(format!(
                "node {} does not follow epoch {epoch} of volume {} with a whole copy",
                self.me, sb.volume
            )));
        }
        self.store
            .rewrite(id, offset, || self.received.get(), fetch)
    }

    /// Whether the store was handed back.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Ends everything here; the store is no longer used after this.
    pub fn close(&self) {
        self.closed.store(true, SeqCst);
        let _change = lock(&self.change);
        self.stop_forwarding();
        self.stop_session();
        self.room.notify();
        self.checkpoint_work.notify();
        self.store.hurry();
        self.store.advanced.notify();
    }

    /// The register has this epoch: a node that was away for long may be told of it.
    pub fn learn_epoch(&self, agreed: u64) {
        self.agreed.fetch_max(agreed, AcqRel);
    }

    /// Answers a primary's `Hello`; the promise is durable when this returns. Also
    /// returns the link's generation.
    pub fn hello(&self, h: &Hello) -> Result<(Welcome, u64), Refusal> {
        let _change = lock(&self.change);
        let sb = self.store.superblock();
        if self.is_closed() {
            return Err(Refusal::new(
                RefuseCode::Busy,
                "this copy is being closed; try again",
            ));
        }
        self.check_lanes(h, &sb)?;
        check_view(h, &sb)?;
        self.check_rival(h, &sb)?;
        let begun = self.store.history().last_epoch().max(sb.view.epoch);
        check_epoch(h, &sb, begun.max(self.agreed.load(Acquire)))?;
        if let Err(e) = self.store.check() {
            return Err(Refusal::new(RefuseCode::Poisoned, e.cause()));
        }
        if h.backup && sb.view.epoch > 0 && sb.view.epoch == h.view {
            self.check_upstream(h, &sb.view)?;
        }
        *lock(&self.upstream) = h.from.clone();
        self.as_backup.store(h.backup, Release);
        let generation = self.generation.fetch_add(1, SeqCst) + 1;
        self.stop_forwarding();
        self.stop_session();
        h.from.clone_into(&mut lock(&self.greeted));
        if h.epoch > sb.promised {
            // The register compares what was promised. A copy of an earlier time would pass for one
            // that has everything, as soon as its primary, or whoever attaches, has greeted it.
            let missed = h.view > sb.promised && !self.store.spec().by_hand;
            match missed && !self.store.mutations.forget_miss.is_on() {
                true => self.store.promise_as_nonmember(h.epoch)?,
                false => self.store.promise(h.epoch)?,
            }
        }
        Ok((self.welcome(&self.store.superblock()), generation))
    }

    /// Checks that both ends have the same number of lanes.
    fn check_lanes(&self, h: &Hello, sb: &Superblock) -> Result<(), Refusal> {
        if h.lanes as usize == self.lanes.len() {
            return Ok(());
        }
        Err(Refusal::new(
            RefuseCode::UnknownPeer,
            format!(
                "volume {} has {} connections here and {} at node {}; give both the same configuration",
                sb.volume,
                self.lanes.len(),
                h.lanes,
                h.from
            ),
        ))
    }

    /// Checks that this copy may be brought to what the greeting node has.
    fn check_rival(&self, h: &Hello, sb: &Superblock) -> Result<(), Refusal> {
        // A node that has nothing replaces nothing.
        if sb.state != State::Whole || h.history.is_empty() {
            return Ok(());
        }
        let history = History::from_entries(&h.history)
            .ok_or_else(|| Refusal::new(RefuseCode::UnknownPeer, "epochs out of order"))?;
        let theirs = Holding {
            volume_id: h.volume_id,
            state: State::Whole,
            tail: h.tail,
            history,
        };
        self.store
            .check_rival(self.tail(), &theirs, h.epoch, &h.from)
            .map_err(|why| Refusal::new(RefuseCode::Foreign, why))
    }

    /// What is here, as of the superblock `sb`.
    fn welcome(&self, sb: &Superblock) -> Welcome {
        let distrusted = self.distrusted.load(Acquire);
        let state = if distrusted { State::Empty } else { sb.state };
        // A copy that led once, and was greeted in a later view that it was not in, lacks what was
        // acknowledged since: it may be of an earlier time, or have been away.
        let missed = sb.promised > sb.view.epoch
            && !self.store.spec().by_hand
            && !self.store.mutations.forget_miss.is_on();
        let counts = sb.view.mirror == self.me || sb.view.primary == self.me && !missed;
        Welcome {
            volume_id: self.store.holding(0).volume_id,
            state,
            member: !distrusted && counts,
            tail: if state == State::Whole {
                self.tail()
            } else {
                0
            },
            // Also if this copy is to be made anew: what it knows may be known nowhere else.
            known: if sb.state == State::Whole || self.store.has_part() {
                self.known_acknowledged()
            } else {
                0
            },
            level: self.store.level() as u16,
            life: sb.life,
            max_file: self.store.max_file(),
            max_part: self.store.longest_names().part,
            max_name: self.store.longest_names().path,
            history: self.store.history().entries().to_vec(),
        }
    }

    /// Two nodes may forward in one view: the primary, alone, and the mirror that it gave
    /// up, which does not know it. Refuses a node that has less than is applied here, or,
    /// while another is heard, no more than is here.
    fn check_upstream(&self, h: &Hello, view: &View) -> Result<(), Refusal> {
        let no = |what: String| Err(Refusal::new(RefuseCode::Busy, what));
        if view.mirror == self.me {
            return no(format!(
                "this node is the mirror of epoch {}, no backup",
                view.epoch
            ));
        }
        let applied = self.store.applied();
        if h.tail < applied {
            return no(format!(
                "node {} has LSN {}, this backup LSN {applied}",
                h.from, h.tail
            ));
        }
        let heard = lock(&self.upstream).clone();
        if heard != h.from && self.live_primary().is_some() && h.tail <= self.tail() {
            return no(format!("node {heard} forwards to this backup"));
        }
        Ok(())
    }

    /// Accepts the session's terms; returns the session's number.
    fn start(&self, s: &Start) -> Result<u64> {
        let sb = self.store.superblock();
        if s.epoch != sb.promised {
            return Err(Error::Protocol(format!(
                "a session of epoch {}, but epoch {} is promised",
                s.epoch, sb.promised
            )));
        }
        if sb.state != State::Whole || sb.volume_id != s.volume_id || self.is_distrusted() {
            return Err(Error::Protocol(
                "a session begins on a copy that is not ready".into(),
            ));
        }
        let history = History::from_entries(&s.history)
            .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
        if s.keep != u64::MAX {
            let keep = self.tail().min(s.keep);
            // Names that go with a record that is dropped would stay as they are: only a whole
            // copy, or a promotion, settles what the files show.
            if keep < self.store.shows() {
                return Err(Error::Protocol(format!(
                    "asked to drop records above {keep}, but {} are applied, or may be in part",
                    self.store.shows()
                )));
            }
            self.committed.fetch_min(keep, AcqRel);
            self.store.truncate(keep)?;
            self.received.reset(keep);
        }
        // Each session sends a spill file from its beginning.
        self.store.forget_arriving();
        let member = s.member;
        self.store.follow(
            history,
            View {
                epoch: s.epoch,
                primary: s.primary.clone(),
                mirror: if member {
                    self.me.clone()
                } else {
                    String::new()
                },
            },
        )?;
        self.followed
            .store(if member { s.epoch } else { 0 }, Release);
        for (i, lane) in self.lanes.iter().enumerate() {
            let (last, part) = self.store.last_of(i);
            let floor = self.store.checkpointed();
            *lock(lane) = Some(if last > floor {
                LaneIn::new(s.volume_id, last, part)
            } else {
                LaneIn::new(s.volume_id, floor, 0)
            });
        }
        let number = self.store.env().random();
        self.session.store(number, SeqCst);
        self.start_forwarding();
        Ok(number)
    }

    /// The last LSN of the whole sync points that are here without a gap.
    pub fn tail(&self) -> u64 {
        self.store.whole(self.received.get())
    }

    fn hear(&self, who: &str, committed: u64) {
        *lock(&self.heard) = Some((self.store.env().now(), who.to_owned()));
        self.learn(committed);
    }

    #[inline]
    fn learn(&self, committed: u64) {
        if committed > self.committed.load(Relaxed) {
            self.committed.fetch_max(committed, AcqRel);
            self.checkpoint_work.notify();
        }
    }

    /// One turn of the checkpoint thread at the pace that `pacer` finds.
    pub fn background_turn(&self, pacer: &mut Pacer) -> Result<()> {
        let pace = pacer.begin(self.received.get(), false, || self.is_due());
        pacer.end(self.checkpoint_step(pace)?);
        Ok(())
    }

    /// Up to where records may be applied, as far as is known now.
    pub fn apply_limit(&self) -> u64 {
        self.committed().min(self.received.get())
    }

    /// Whether something can be applied. Nothing of a sync point is while a part of it is
    /// missing.
    pub fn is_due(&self) -> bool {
        let (limit, applied) = (self.apply_limit(), self.store.applied());
        limit > applied && self.store.whole(limit) > applied
    }

    /// One turn of the checkpoint's work: applies what is due, checkpoints when the log is
    /// half full or nothing comes. True if it did something.
    pub fn checkpoint_step(&self, pace: Pace) -> Result<bool> {
        if self.is_closed() || self.store.superblock().state != State::Whole {
            return Ok(false);
        }
        let before = self.store.applied();
        let mut limit = self.apply_limit();
        if self.store.mutations.apply_uncommitted.is_on() {
            limit = self.received.get();
        }
        if self.store.lacks_room().is_some() {
            // Also if nothing is to be applied any more: else it would refuse for ever.
            self.store.apply(limit, piece(self.smallest_log) as usize)?;
        }
        let full = self.store.pressure() > 0.5;
        let enough = limit.saturating_sub(before) >= self.checkpoint_threshold;
        let idle = pace == Pace::Idle;
        let piece = piece(self.smallest_log);
        let late = pace == Pace::Pressed;
        let due = enough && pace == Pace::Quiet || self.store.waiting_bytes() >= piece;
        let due = due || self.store.count_names(limit);
        if full || idle || late || due {
            // All at once: the more records, the more of them meet in a page.
            self.store.apply(limit, piece as usize)?;
        }
        let applied = self.store.applied();
        if applied > before && self.store.is_laden() {
            self.store.count_names(limit);
            self.room.notify();
        }
        if applied > self.store.checkpointed() && (idle || self.store.pressure() > 0.5) {
            self.store.checkpoint()?;
            self.room.notify();
        }
        let released = self.store.release_held(|_| true)?;
        if released {
            self.room.notify();
        }
        Ok(applied > before || released)
    }
}

/// Refuses a node that knows an older view than this one.
fn check_view(h: &Hello, sb: &Superblock) -> Result<(), Refusal> {
    // A backup does not hear its primary itself; which of two nodes forwards to it in one
    // epoch does not matter.
    let newer = if h.backup {
        sb.view.epoch > h.view
    } else {
        sb.view.epoch >= h.view && sb.view.primary != h.from
    };
    if sb.view.epoch == 0 || !newer {
        return Ok(());
    }
    Err(Refusal::new(
        RefuseCode::Superseded,
        format!(
            "node {} has been primary of volume {} since epoch {}; node {} knows epoch {} only. Run the program there, or promote a node",
            sb.view.primary, sb.volume, sb.view.epoch, h.from, h.view
        ),
    ))
}

/// Refuses an epoch that may not be promised: any more, or because nobody can have come as
/// far as that. `begun`: the greatest epoch that is known here to have been begun.
fn check_epoch(h: &Hello, sb: &Superblock, begun: u64) -> Result<(), Refusal> {
    // No two nodes begin the same epoch, so an equal epoch is of the same primary. A
    // greater one may also come from a primary that goes on while this node's memory of
    // it is gone.
    let fresh = h.epoch >= sb.promised;
    let may = |epoch| may_promise(epoch, begun, sb.promised);
    let likely = may(h.epoch) && may(h.view);
    if fresh && h.epoch != 0 && likely {
        return Ok(());
    }
    if !likely {
        // The greeting node is to begin nothing by this.
        return Err(Refusal::new(
            RefuseCode::UnknownPeer,
            format!(
                "epoch {} was asked for, in view {}; nobody can have come as far from epoch {begun}, which is known here",
                h.epoch, h.view
            ),
        ));
    }
    Err(Refusal::new(
        RefuseCode::StaleEpoch,
        format!(
            "epoch {} was asked for, epoch {} is promised",
            h.epoch, sb.promised
        ),
    ))
}

/// Why node `me`, whose last view is `view`, does not follow the node that greets it:
/// `me` made a newer view itself than that node knows.
pub fn superseded(me: &str, view: &View, h: &Hello) -> Option<Refusal> {
    let is = view.primary == me && view.epoch > h.view;
    is.then(|| {
        let text = format!(
            "node {me} is itself the primary of volume {}, since epoch {}; node {} knows epoch {} only. Run the program on node {me}",
            h.volume, view.epoch, h.from, h.view
        );
        Refusal::new(RefuseCode::Superseded, text)
    })
}

/// Sends the refusal, if the link still takes it. The caller closes the link.
pub fn refuse(wire: &mut Wire, epoch: u64, no: &Refusal) {
    wire.send(
        FrameKind::Refuse,
        epoch,
        &Refuse {
            code: no.code,
            epoch,
            text: no.text.clone(),
        },
    );
    // The link is closing; what cannot be said now is not said.
    let _ = wire.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log of a daemon said to attach again, where nobody attaches (a new user).
    #[test]
    fn a_follower_without_room_asks_nobody_to_attach() {
        let full = Error::Full("writing file 7: no space left".into());
        let said = Refusal::from(full).text;
        assert_eq!(said, "poisoned: writing file 7: no space left");
    }

    /// After a crash the files may show a part of each record in the log: a removal among them may
    /// have left the catalogue, and the directory not. A node that asked to drop such a record was
    /// obeyed, and nothing remembered that the files were ahead.
    #[test]
    fn no_record_is_dropped_that_the_files_may_show() {
        let (p, dir) = crate::primary::tests::alone("shown", mojim_config::WriteBack::Eager);
        p.store.make_new().unwrap();
        p.begin(1, mojim_format::View::default()).unwrap();
        p.ready.store(true, Release);
        for size in [4096, 8192] {
            let resize = crate::piece::Piece::Resize { file: 1, size };
            p.append(&[resize]).unwrap();
        }
        let spec = p.store.spec().clone();
        let env = p.store.env().clone();
        drop(p);
        let store = Arc::new(Store::open(&env, spec).unwrap());
        let m = Mirror::new(store, "b", 0);
        let (tail, sb) = (m.tail(), m.store.superblock());
        assert!(m.store.applied() < tail && tail >= 2, "{tail}");
        m.store.promise(2).unwrap();
        let start = |keep| Start {
            epoch: 2,
            primary: "a".into(),
            volume_id: sb.volume_id,
            member: false,
            keep,
            history: m.store.history().entries().to_vec(),
        };
        let no = m.start(&start(tail - 1)).unwrap_err().to_string();
        assert!(no.contains("may be in part"), "{no}");
        assert_eq!(m.tail(), tail);
        m.start(&start(tail)).unwrap();
        drop(m);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// While records follow each other a mirror writes them back in pieces: once, each one
    /// as it came, beside the threads that waited for each other.
    #[test]
    fn a_mirror_applies_in_a_pause_or_in_pieces() {
        let (p, dir) = crate::primary::tests::alone("mirror-pace", mojim_config::WriteBack::Eager);
        p.store.make_new().unwrap();
        p.begin(1, mojim_format::View::default()).unwrap();
        p.ready.store(true, Release);
        let bytes = [1u8; 4000];
        let (ptr, len) = (bytes.as_ptr(), bytes.len());
        let append = |offset| {
            let (file, offset) = (1, offset * 4096);
            let write = crate::piece::Piece::Write {
                file,
                offset,
                ptr,
                len,
            };
            p.append(&[write]).unwrap().lsn
        };
        let follow = |tail| {
            let m = Mirror::new(p.store.clone(), "b", 0);
            m.learn(tail);
            m
        };
        let few = (0..3).map(append).last().unwrap();
        let mut m = follow(few);
        m.checkpoint_threshold = 10;
        let step = |m: &Mirror, pace| {
            m.checkpoint_step(pace).unwrap();
            m.store.applied()
        };
        assert_eq!(step(&m, Pace::Busy), 0);
        assert_eq!(step(&m, Pace::Quiet), 0, "fewer than the threshold");
        assert_eq!(step(&m, Pace::Pressed), few, "for however long they wait");
        let mut many = few;
        while m.store.waiting_bytes() < piece(m.smallest_log) {
            many = append(many % 8);
        }
        let m = follow(many);
        assert_eq!(step(&m, Pace::Busy), many);
        drop((m, p));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
