//! The mirror: follows a primary into its own copy.
//!
//! Owns what one volume's copy on this node has received and from whom: the
//! control side of a session and the receiving ends of its lanes. Each lane
//! has its own log and its own thread, which receives, validates, appends,
//! makes persistent if the log's medium does, and acknowledges; nothing else
//! happens on that path (Mojim 4.1, 4.2). Checkpoints run beside it.
//!
//! Invariants:
//! - Records are accepted only from the lanes of the present session, whose
//!   epoch this node has durably promised. A new session stops the lanes of
//!   the old one before it answers.
//! - A record is acknowledged after it is in the log, and persistent there if
//!   the medium persists.
//! - Only records known to be committed are applied, except when this node
//!   becomes primary or gives its copy to one: then its whole prefix counts.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use mojim_format::frame::WAITS;
use mojim_format::message::{
    CopyBegin, CopyData, CopyFile, CopyHave, CopySums, CopyWant, Hello, Lane, Message, Refuse,
    RefuseCode, Start, Started, Welcome,
};
use mojim_format::{
    CatalogEntry, FRAME_LEN, Frame, FrameKind, RecordView, State, Superblock, View,
};
use mojim_protocol::view::Register;
use mojim_protocol::{Arrival, History, Holding, LEAP, LaneIn, Prefix};

use crate::backup_progress::{BackupProgress, Source, Term};
use crate::copy::{CopyOut, copy_ends};
use crate::link::{COPY_SILENCE, Front, HEARTBEAT, PAGE_LEN, Page, RingIn, SILENCE, Wire};
use crate::pass::answers_are_taken;
use crate::register::ViewRegister;
use crate::view_client::member;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::{Conn, Error, Result};
use mojim_store::area::named_spill;
use mojim_store::log::CONTROL_LEN;
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
    /// How many records wait before they are applied, but when the log is half
    /// full or nothing comes (`checkpoint_threshold`).
    pub checkpoint_threshold: u64,
    session: AtomicU64,
    /// The contiguous prefix of what is in the logs.
    pub received: Prefix,
    committed: AtomicU64,
    lanes: Vec<Mutex<Option<LaneIn>>>,
    heard: Mutex<Option<(Duration, String)>>,
    /// Who said the last `Hello`.
    upstream: Mutex<String>,
    /// It was one who forwards to a backup.
    as_backup: AtomicBool,
    /// Held while what a session rests on changes: greeting, loading, start,
    /// promotion exclude each other.
    change: Mutex<()>,
    /// Counts greetings: an older control link has no say any more.
    generation: AtomicU64,
    /// Who greeted last: the session, if there is one, is with that node.
    greeted: Mutex<String>,
    /// Different whenever what is here may have been dropped or replaced; 0
    /// while that is open.
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
}

/// No, with its reason: what the peer is told before the link closes.
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
        Refusal::new(code, e.to_string())
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Source for Mirror {
    fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// All but its primary.
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
    /// Follows whoever comes, into an opened store. At most `threshold` bytes
    /// of what was received wait for an active backup.
    pub fn new(store: Arc<Store>, me: &str, threshold: u64) -> Mirror {
        let tail = store.tail();
        let received = Prefix::new(WINDOW, tail);
        // Behind a gap there may be more, which was acknowledged on its lane:
        // it counts as soon as the gap is filled.
        for log in store.logs() {
            let mut at = log.start();
            while let Some((r, _, next)) = log.record(at) {
                received.mark(r.header.lsn);
                at = next;
            }
        }
        Mirror {
            me: me.to_owned(),
            silence: SILENCE,
            checkpoint_threshold: 1,
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
            // Until it has heard its primary: what is in the data area may be
            // what was applied for a primary that never began its epoch.
            term: AtomicU64::new(0),
            terms: AtomicU64::new(1),
            backups: BackupProgress::new(store.logs().len(), threshold),
            checkpoint_work: Event::default(),
            room: Event::default(),
            closed: AtomicBool::new(false),
            distrusted: AtomicBool::new(false),
            gives_up: AtomicBool::new(false),
            store,
        }
    }

    /// The committed LSN, as the primary last said.
    pub fn committed(&self) -> u64 {
        self.committed.load(Acquire)
    }

    /// The primary that was heard of within `silence`, if any.
    pub fn live_primary(&self) -> Option<(Duration, String)> {
        let (when, who) = lock(&self.heard).clone()?;
        let ago = self.store.env().now().saturating_sub(when);
        (self.session.load(Acquire) != 0 && ago < self.silence).then_some((ago, who))
    }

    /// When it last heard of whoever led it since it was opened, alive by now or not.
    pub fn last_heard(&self) -> Option<Duration> {
        lock(&self.heard).as_ref().map(|(when, _)| *when)
    }

    /// Whether it follows one who forwards, as a backup, for all it heard last.
    pub fn is_backup(&self) -> bool {
        self.as_backup.load(Acquire)
    }

    /// The node whose session it is, if there is one.
    pub fn greeted(&self) -> String {
        lock(&self.greeted).clone()
    }

    /// What is here may change: nothing of it is forwarded meanwhile.
    fn unsettle(&self) {
        self.term.store(0, SeqCst);
        self.store.revoke_pauses();
        self.backups.work.notify();
    }

    /// It stands, and grows from here.
    fn settle(&self) {
        self.backups.cut(&self.store);
        let number = self.terms.fetch_add(1, SeqCst) + 1;
        self.term.store(number, SeqCst);
        self.backups.work.notify();
    }

    /// Whether records, or a whole copy, come from somebody.
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

    /// An operator has seen that this copy differs from the primary's in more
    /// than the bytes of its files: it ends the session, and whoever is or
    /// becomes primary makes a copy anew. What is here stays until then.
    pub fn distrust(&self) {
        let _change = lock(&self.change);
        self.distrusted.store(true, SeqCst);
        self.generation.fetch_add(1, SeqCst);
        self.stop_session();
    }

    /// Whether this copy is to be made anew.
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
        // Nobody drops records while it is relied on that they are here.
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
        self.unsettle();
        self.stop_session();
        self.room.notify();
        self.checkpoint_work.notify();
        self.store.advanced.notify();
    }

    /// Answers a primary's `Hello`; the promise is durable when this returns.
    /// With the answer comes the link's generation.
    pub fn hello(&self, h: &Hello) -> Result<(Welcome, u64), Refusal> {
        let _change = lock(&self.change);
        let sb = self.store.superblock();
        if self.is_closed() {
            return Err(Refusal::new(
                RefuseCode::Busy,
                "this copy is being closed; try again",
            ));
        }
        if h.lanes as usize != self.lanes.len() {
            return Err(Refusal::new(
                RefuseCode::Stranger,
                format!(
                    "volume {} has {} connections here and {} at node {}; give both the same configuration",
                    sb.volume,
                    self.lanes.len(),
                    h.lanes,
                    h.from
                ),
            ));
        }
        // A backup does not hear its primary itself; between two who forward in
        // one epoch it does not matter which it hears.
        let newer = if h.backup {
            sb.view.epoch > h.view
        } else {
            sb.view.epoch >= h.view && sb.view.primary != h.from
        };
        if sb.view.epoch > 0 && newer {
            return Err(Refusal::new(
                RefuseCode::Superseded,
                format!(
                    "node {} has been primary of volume {} since epoch {}; node {} knows epoch {} only. Run the program there, or promote a node",
                    sb.view.primary, sb.volume, sb.view.epoch, h.from, h.view
                ),
            ));
        }
        // One that has nothing replaces nothing.
        if sb.state == State::Whole && !h.history.is_empty() {
            let history = History::from_entries(&h.history)
                .ok_or_else(|| Refusal::new(RefuseCode::Stranger, "epochs out of order"))?;
            let theirs = Holding {
                volume_id: h.volume_id,
                state: State::Whole,
                tail: h.tail,
                history,
            };
            self.store
                .check_rival(self.tail(), &theirs, h.epoch, &h.from)
                .map_err(|why| Refusal::new(RefuseCode::Foreign, why))?;
        }
        // No two nodes begin the same epoch, so an equal one is of the same
        // primary. One above the promised one may also come from a primary that
        // goes on while this node's memory of it is gone.
        let fresh = h.epoch >= sb.promised;
        if !fresh || h.epoch == 0 || h.epoch > u64::MAX / 2 {
            return Err(Refusal::new(
                RefuseCode::StaleEpoch,
                format!(
                    "epoch {} was asked for, epoch {} is promised",
                    h.epoch, sb.promised
                ),
            ));
        }
        if let Some(e) = self.store.poisoned() {
            return Err(Refusal::new(RefuseCode::Poisoned, e.to_string()));
        }
        if h.backup && sb.view.epoch > 0 && sb.view.epoch == h.view {
            self.check_upstream(h, &sb.view)?;
        }
        *lock(&self.upstream) = h.from.clone();
        self.as_backup.store(h.backup, Release);
        let generation = self.generation.fetch_add(1, SeqCst) + 1;
        self.unsettle();
        self.stop_session();
        h.from.clone_into(&mut lock(&self.greeted));
        if h.epoch > sb.promised {
            self.store.promise(h.epoch)?;
        }
        let distrusted = self.distrusted.load(Acquire);
        let state = if distrusted { State::Empty } else { sb.state };
        let welcome = Welcome {
            volume_id: self.store.holding(0).volume_id,
            state,
            member: !distrusted && (sb.view.mirror == self.me || sb.view.primary == self.me),
            tail: if state == State::Whole {
                self.tail()
            } else {
                0
            },
            known: if state == State::Whole {
                self.store.known_acknowledged()
            } else {
                0
            },
            level: self.store.level() as u16,
            life: sb.life,
            max_file: self.store.area().max_file(),
            history: self.store.history().entries().to_vec(),
        };
        Ok((welcome, generation))
    }

    /// Two nodes may forward in one view: the primary, which is alone, and the
    /// mirror that it gave up, which does not know it. Whoever has less than is
    /// here, or no more than whom this node hears now, is not listened to.
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

    /// The session's terms are accepted; returns its number.
    fn start(&self, s: &Start) -> Result<u64> {
        let sb = self.store.superblock();
        if s.epoch != sb.promised {
            return Err(Error::Protocol(format!(
                "a session of epoch {}, but epoch {} is promised",
                s.epoch, sb.promised
            )));
        }
        if sb.state != State::Whole || sb.volume_id != s.volume_id {
            return Err(Error::Protocol(
                "a session begins on a copy that is not ready".into(),
            ));
        }
        let history = History::from_entries(&s.history)
            .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
        if s.keep != u64::MAX {
            let keep = self.tail().min(s.keep);
            if keep < self.store.applied() {
                return Err(Error::Protocol(format!(
                    "asked to drop records above {keep}, but {} are applied",
                    self.store.applied()
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
        self.settle();
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

    /// One turn of the checkpoint's work. True if it did something.
    pub fn checkpoint_step(&self, idle: bool) -> Result<bool> {
        if self.is_closed() || self.store.superblock().state != State::Whole {
            return Ok(false);
        }
        let before = self.store.applied();
        let mut limit = self.committed().min(self.received.get());
        if self.store.mutations.apply_uncommitted.load(Relaxed) {
            limit = self.received.get();
        }
        let full = self.store.pressure() > 0.5;
        let enough = limit.saturating_sub(before) >= self.checkpoint_threshold;
        if enough || idle || full {
            self.store.apply(limit, 1 << 20)?;
        }
        let applied = self.store.applied();
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

    /// Whether this node is the mirror of the view, with everything in it.
    pub fn is_member(&self, r: &Register) -> bool {
        r.is_mirror(&member(&self.store))
    }

    /// An operator makes this node primary although it may lack what was
    /// acknowledged: nobody else is left who has it.
    pub fn force(&self, views: &dyn ViewRegister) -> Result<Option<(u64, u64)>> {
        let reg = views.read(&self.store.spec().volume)?;
        self.force_from(&reg, views)
    }

    /// The same, if the register is still as it was read.
    pub fn force_from(
        &self,
        reg: &Register,
        views: &dyn ViewRegister,
    ) -> Result<Option<(u64, u64)>> {
        let _change = lock(&self.change);
        self.open()?;
        self.store.check()?;
        let sb = self.whole()?;
        self.generation.fetch_add(1, SeqCst);
        self.unsettle();
        self.stop_session();
        let epoch = self.store.next_epoch(sb.promised.max(reg.epoch) + LEAP);
        self.store.promise(epoch)?;
        // Also if the answer is lost, and the register read later.
        self.gives_up.store(true, Release);
        let new = reg
            .force(&member(&self.store), epoch)
            .map_err(|why| Error::Protocol(format!("{why:?}")))?;
        if !views.swap(&sb.volume, &new)? {
            return Ok(None);
        }
        self.become_primary(epoch).map(Some)
    }

    /// What the superblock says, of a copy that one can go on with.
    fn whole(&self) -> Result<Superblock> {
        let sb = self.store.superblock();
        match sb.state {
            State::Whole => Ok(sb),
            _ => Err(Error::Invalid(format!(
                "node {} has no whole copy of volume {}: there is nothing to go on with",
                sb.node, sb.volume
            ))),
        }
    }

    /// Whether this node is the view's primary, though it may not have begun
    /// the view's epoch yet.
    pub fn is_primary(&self, r: &Register) -> bool {
        r.is_primary(&member(&self.store))
    }

    /// The primary is gone, as far as this node can tell: makes this node the
    /// primary, if the register agrees. `None` if it does not; then it goes on
    /// following, but promised, so that its primary has to begin another epoch.
    pub fn take_over(&self, views: &dyn ViewRegister) -> Result<Option<(u64, u64)>> {
        // Links are served until the register has answered.
        let reg = views.read(&self.store.spec().volume)?;
        self.take_over_from(reg, views)
    }

    /// The same, where the register was just read.
    pub fn take_over_from(
        &self,
        mut reg: Register,
        views: &dyn ViewRegister,
    ) -> Result<Option<(u64, u64)>> {
        let _change = lock(&self.change);
        self.store.check()?;
        let mut sb = self.store.superblock();
        let mut me = member(&self.store);
        let broken = &self.store.mutations;
        if broken.amnesiac_member.load(Relaxed)
            && let Some(m) = reg.mirror.as_ref().filter(|m| m.node == me.node)
        {
            me = m.clone();
            if sb.state == State::Empty {
                // What was lost counts as nothing that ever was.
                self.store.make_new()?;
                sb = self.store.superblock();
            }
        }
        if broken.stale_member.load(Relaxed) && !reg.is_primary(&me) {
            reg.mirror = Some(me.clone());
        }
        let epoch = if sb.state != State::Whole {
            return Ok(None);
        } else if reg.is_primary(&me) && sb.view.epoch < reg.epoch {
            // Cut off after the register had agreed.
            reg.epoch
        } else if reg.is_mirror(&me) {
            self.store.next_epoch(sb.promised.max(reg.epoch))
        } else {
            return Ok(None);
        };
        let given_up = reg.is_primary(&me) && self.gives_up.load(Acquire);
        let missing = self.store.known_missing().filter(|k| *k > self.tail());
        if let Some(known) = missing.filter(|_| !given_up) {
            return Err(Error::Protocol(format!(
                "this node's log is damaged: sync points up to LSN {known} were acknowledged, LSN {} is the last that can be read; it does not take over by itself (`mojim promote --force` gives the others up)",
                self.tail()
            )));
        }
        // The fence, durably, before anything is asked for.
        if !broken.no_fence.load(Relaxed) {
            self.generation.fetch_add(1, SeqCst);
            self.unsettle();
            self.stop_session();
            self.store.promise(epoch)?;
        }
        if !reg.is_primary(&me) {
            let new = reg
                .take_over(&me, epoch)
                .map_err(|why| Error::Protocol(format!("{why:?}")))?;
            if !views.swap(&sb.volume, &new)? {
                return Ok(None);
            }
        }
        self.become_primary(epoch).map(Some)
    }

    /// Ends following and makes this node the primary of a view of its own:
    /// it completes its log first (Mojim 4.3).
    /// Returns the epoch, which is above `above`, and the last LSN. The store is then
    /// closed cleanly.
    pub fn promote(&self, above: u64) -> Result<(u64, u64)> {
        let _change = lock(&self.change);
        self.open()?;
        let sb = self.whole()?;
        self.generation.fetch_add(1, SeqCst);
        self.unsettle();
        self.stop_session();
        // From here on the old primary has nothing acknowledged any more.
        let epoch = self.epoch_to_promote(&sb, above);
        self.store.promise(epoch)?;
        self.become_primary(epoch)
    }

    /// A leap above what is known, so that it also outranks what the other node began
    /// unseen. A leap tells that this was known (`is_rival`): one that was promised by a
    /// promotion that failed is not leapt over again, nor is a view of this node alone.
    fn epoch_to_promote(&self, sb: &Superblock, above: u64) -> u64 {
        let goes_on = sb.view.primary == self.me && sb.view.mirror.is_empty();
        if goes_on && above + LEAP / 2 <= sb.view.epoch {
            return self.store.next_epoch(sb.promised.max(sb.view.epoch));
        }
        let known = sb.view.epoch.max(above);
        if sb.promised > known && self.store.is_own(sb.promised) {
            return match sb.promised >= known + LEAP {
                true => sb.promised,
                false => self.store.next_epoch(sb.promised + LEAP),
            };
        }
        self.store.next_epoch(known.max(sb.promised) + LEAP)
    }

    fn open(&self) -> Result<()> {
        match self.is_closed() {
            true => Err(Error::Busy("this copy is being closed; try again".into())),
            false => Ok(()),
        }
    }

    /// Everything of its contiguous prefix is this node's own from now on.
    /// No session is left, and `epoch` is promised.
    fn become_primary(&self, epoch: u64) -> Result<(u64, u64)> {
        let tail = self.tail();
        self.store.freeze(false);
        self.store.truncate(tail)?;
        self.received.reset(tail);
        self.store.persist_all()?;
        self.store.apply_all(tail)?;
        // Last, so that a promotion that fails before has not happened.
        self.store.begin_epoch(
            epoch,
            tail + 1,
            View {
                epoch,
                primary: self.me.clone(),
                mirror: String::new(),
            },
        )?;
        Ok((epoch, tail))
    }
}

/// What a control link is doing.
enum Stage {
    Agreed,
    Loading { lsn: u64, history: History },
    Giving(Box<CopyOut>),
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
    /// Whether this link stopped the area for a copy.
    froze: bool,
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
                    mirror,
                    wire,
                    epoch: hello.epoch,
                    stage: Stage::Agreed,
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

    /// Whether bytes wait to be sent.
    pub fn wants_to_send(&self) -> bool {
        self.wire.backlog() > 0
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
        // What a newer link has begun is its own.
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
        if let Stage::Loading { .. } = self.stage {
            self.mirror.store.check_streams()?;
        }
        let mut moved = false;
        self.wire.flush()?;
        while let Some((f, body)) = self.wire.take_frame()? {
            moved = true;
            self.heard = now;
            self.take(f, &body)?;
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
                self.stage = Stage::Agreed;
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
        let bad = |e: mojim_format::FormatError| Error::Protocol(format!("bad message: {e}"));
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
        if matches!(self.stage, Stage::Loading { .. }) {
            store.progress.moved((FRAME_LEN + body.len()) as u64);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Agreed);
        self.stage = match (stage, f.kind) {
            (Stage::Agreed, FrameKind::CopyRequest) => {
                if store.superblock().state != State::Whole {
                    return Err(Error::Protocol("there is no copy to give".into()));
                }
                let tail = m.tail();
                store.truncate(tail)?;
                m.received.reset(tail);
                store.apply_all(tail)?;
                store.freeze(true);
                self.froze = true;
                Stage::Giving(Box::new(CopyOut::begin(
                    store,
                    &mut self.wire,
                    self.epoch,
                    None,
                    // Its receiver does not listen.
                    None,
                )))
            }
            (Stage::Giving(mut copy), FrameKind::CopyHave) => {
                copy.have(&CopyHave::decode(body).map_err(bad)?)?;
                Stage::Giving(copy)
            }
            (Stage::Giving(mut copy), FrameKind::CopyWant) => {
                copy.want(&CopyWant::decode(body).map_err(bad)?)?;
                Stage::Giving(copy)
            }
            (Stage::Agreed, FrameKind::CopyBegin) => {
                let c = CopyBegin::decode(body).map_err(bad)?;
                let history = History::from_entries(&c.history)
                    .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
                store.load_begin(c.copy, c.volume_id, c.bytes)?;
                Stage::Loading {
                    lsn: c.lsn,
                    history,
                }
            }
            (s @ Stage::Loading { .. }, FrameKind::CopyFile) => {
                let c = CopyFile::decode(body).map_err(bad)?;
                let have = store.load_file(CatalogEntry {
                    id: c.id,
                    size: c.size,
                    name: c.name,
                })?;
                self.wire.send(FrameKind::CopyHave, self.epoch, &have);
                answers_are_taken(&self.wire)?;
                s
            }
            (s @ Stage::Loading { .. }, FrameKind::CopySums) => {
                let want = store.load_sums(None, &CopySums::decode(body).map_err(bad)?)?;
                self.wire.send(FrameKind::CopyWant, self.epoch, &want);
                answers_are_taken(&self.wire)?;
                s
            }
            (s @ Stage::Loading { .. }, FrameKind::CopyData) => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                store.load_data(None, id, offset, bytes)?;
                s
            }
            (Stage::Loading { lsn, history }, FrameKind::CopyEnd) => {
                let lsn = copy_ends(lsn, f.lsn)?;
                store.load_end(lsn, &history)?;
                m.distrusted.store(false, SeqCst);
                m.received.reset(lsn);
                m.committed.store(lsn, Release);
                self.wire.queue(FrameKind::Copied, self.epoch, lsn, 0, &[]);
                Stage::Agreed
            }
            (Stage::Agreed, FrameKind::Start) => {
                let s = Start::decode(body).map_err(bad)?;
                let session = m.start(&s)?;
                m.hear(&s.primary, 0);
                let life = store.superblock().life;
                self.wire
                    .send(FrameKind::Started, self.epoch, &Started { session, life });
                Stage::Running {
                    session,
                    primary: s.primary,
                }
            }
            (Stage::Running { session, primary }, FrameKind::Spill) if f.flags == 1 => {
                m.hear(&primary, 0);
                store.sync_spill(f.lsn)?;
                self.wire.queue(FrameKind::Spill, self.epoch, f.lsn, 2, &[]);
                Stage::Running { session, primary }
            }
            (s @ Stage::Running { .. }, FrameKind::Spill) => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                store.write_spill(id, offset, bytes)?;
                s
            }
            (s, FrameKind::Heartbeat) => {
                if let Stage::Running { primary, session } = &s {
                    if m.session.load(Acquire) != *session {
                        return Err(Error::Stale("another session began".into()));
                    }
                    m.hear(primary, f.lsn);
                    if body.first() == Some(&1) && store.superblock().view.mirror != m.me {
                        store.update(|sb| sb.view.mirror = m.me.clone())?;
                    }
                }
                // What a node that this one forwards to has promised, which only
                // the primary can do something about.
                let outbid = Some(m.backups.outbid()).filter(|e| *e > self.epoch);
                let outbid = outbid.map(u64::to_le_bytes);
                self.wire.queue(
                    FrameKind::Heartbeat,
                    self.epoch,
                    m.received.get(),
                    f.flags,
                    outbid.as_ref().map_or(&[], |b| &b[..]),
                );
                s
            }
            (_, k) => return Err(Error::Protocol(format!("{k:?} out of turn"))),
        };
        Ok(())
    }
}

/// Tells the peer no, as far as the link still takes it, and closes.
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

enum Feed {
    Stream {
        buf: Vec<u8>,
        from: usize,
        to: usize,
    },
    Ring(RingIn),
}

/// What one step of a lane did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing had come.
    Nothing,
    /// Records were taken and acknowledged.
    Moved,
    /// The log has no room until a checkpoint.
    Full,
    /// A backup lacks too much for more to be taken.
    Held,
}

/// The receiving end of one lane.
pub struct LaneServer {
    mirror: Arc<Mirror>,
    lane: usize,
    session: u64,
    epoch: u64,
    volume: u64,
    /// Of the session, so fixed for this lane.
    history: Arc<History>,
    conn: Arc<dyn Conn>,
    source: Feed,
    /// Acknowledgement that the link did not take yet: its bytes from `.1` on.
    unsent: Option<([u8; FRAME_LEN], usize)>,
    /// When the primary was last told that this lane waits for a backup;
    /// nothing was taken since.
    said: Option<Duration>,
    polls: u32,
}

impl LaneServer {
    /// Accepts a lane whose first word was `l`, or says why not. For shared
    /// memory this waits for the peer to pass it.
    pub fn accept(
        mirror: Arc<Mirror>,
        mut wire: Wire,
        epoch: u64,
        l: &Lane,
    ) -> Result<LaneServer, (Wire, Refusal)> {
        let lane = l.lane as usize;
        if mirror.session.load(Acquire) != l.session
            || mirror.store.superblock().promised != epoch
            || l.session == 0
        {
            let no = Refusal::new(RefuseCode::StaleEpoch, "the session of this lane is over");
            return Err((wire, no));
        }
        if lane >= mirror.lanes.len() {
            let no = Refusal::new(RefuseCode::Protocol, format!("there is no lane {lane}"));
            return Err((wire, no));
        }
        let source = if l.ring == 0 {
            let most = mirror.store.logs()[lane].size() as usize / 2;
            Feed::Stream {
                buf: vec![0; (most.min(1 << 20) + 2 * FRAME_LEN).max(64 << 10)],
                from: 0,
                to: 0,
            }
        } else {
            let shared = (|| -> Result<RingIn> {
                if l.ring > 1 << 40 {
                    return Err(Error::Protocol("a shared ring of impossible size".into()));
                }
                wire.queue(FrameKind::LaneOk, epoch, 0, 1, &[]);
                wire.flush()?;
                let get = |len, write| {
                    wire.conn
                        .recv_memory(len, write)
                        .map_err(|e| Error::io("taking shared memory", &e))
                };
                let ring = get(CONTROL_LEN + l.ring as usize, false)?;
                let page = get(PAGE_LEN, true)?;
                RingIn::new(ring, l.ring, l.align as u64, l.position, Page::new(page))
            })();
            match shared {
                Ok(r) => Feed::Ring(r),
                Err(e) => return Err((wire, Refusal::from(e))),
            }
        };
        wire.queue(FrameKind::LaneOk, epoch, 0, 0, &[]);
        if let Err(e) = wire.flush() {
            return Err((wire, Refusal::from(e)));
        }
        let volume = mirror.store.superblock().volume_id;
        let history = mirror.store.history();
        Ok(LaneServer {
            mirror,
            lane,
            volume,
            history,
            session: l.session,
            epoch,
            conn: wire.conn,
            source,
            unsent: None,
            said: None,
            polls: 0,
        })
    }

    /// The connection.
    pub fn conn(&self) -> &Arc<dyn Conn> {
        &self.conn
    }

    /// One step: takes what has come, acknowledges it. An error ends the lane.
    #[inline]
    pub fn step(&mut self) -> Result<Step> {
        let r = match self.source {
            Feed::Ring(_) => self.step_ring(),
            Feed::Stream { .. } => self.step_stream(),
        };
        if let Err(e) = &r {
            self.refuse(e);
        }
        r
    }

    #[cold]
    fn refuse(&mut self, e: &Error) {
        if let Error::Protocol(_) | Error::Poisoned(_) | Error::Full(_) = e {
            let mut wire = Wire::new(self.conn.clone());
            refuse(&mut wire, self.epoch, &Refusal::from(e.clone()));
        }
        self.conn.close();
    }

    fn step_ring(&mut self) -> Result<Step> {
        let Feed::Ring(ring) = &mut self.source else {
            unreachable!("checked by the caller");
        };
        let Front::Record(mut len) = ring.front()? else {
            self.polls = self.polls.wrapping_add(1);
            if self.polls.is_multiple_of(4096) {
                self.check_alive()?;
            }
            return Ok(Step::Nothing);
        };
        let m = &self.mirror;
        let mut guard = lock(&m.lanes[self.lane]);
        let lane = current(m, self.session, &mut guard)?;
        let log = &m.store.logs()[self.lane];
        let history = &self.history;
        let mut step = Step::Moved;
        let first = log.head();
        let mut take = || -> Result<()> {
            loop {
                let head = log.head();
                check_len(len, log.size())?;
                let place = log.place(head, len);
                let Some(at) = place.filter(|_| !m.backups.is_full(&m.store)) else {
                    step = m.blocked(self.lane, place.is_some());
                    return Ok(());
                };
                self.said = None;
                // SAFETY: this lane's lock is held, so only this thread appends;
                // `at` is of the present head. A pad written for a record that is
                // then refused lies beyond the head and means nothing.
                let slot = unsafe { log.slot(head, at, len, self.volume, lane.last() + 1) };
                ring.take(slot);
                let r = RecordView::decode(slot)
                    .map_err(|e| Error::Protocol(format!("a record in shared memory: {e}")))?;
                let h = r.header;
                if h.len as usize != len {
                    return Err(Error::Protocol(
                        "a record changed while it was copied".into(),
                    ));
                }
                m.check_spill(&r)?;
                match lane.arrive(&h, history) {
                    Arrival::Accept => {
                        if at != head {
                            // SAFETY: as above; the pad now names its record.
                            let _ = unsafe { log.slot(head, at, 0, h.volume, h.lsn) };
                        }
                        log.publish(at, len);
                    }
                    Arrival::Duplicate => {
                        m.received.mark(h.lsn);
                    }
                    Arrival::Refuse(why) => return Err(Error::Protocol(why)),
                }
                match ring.front()? {
                    Front::Record(n) => len = n,
                    Front::Nothing => return Ok(()),
                }
            }
        };
        let taken = take();
        // Also what came before one that cannot be taken: this lane's log acknowledges
        // it in the next session, and a promotion cuts off what does not count.
        m.landed(self.lane, first)?;
        taken?;
        let committed = ring.committed();
        let last = lane.last();
        ring.ack(last, m.store.level() as u16);
        if step == Step::Held && m.tells(&mut self.said) {
            ring.say_waits();
        }
        log.prefetch(len);
        drop(guard);
        m.backups.work.notify();
        m.learn(committed);
        Ok(step)
    }

    fn step_stream(&mut self) -> Result<Step> {
        if self.unsent.is_some() && !self.send_ack()? {
            return Ok(Step::Nothing);
        }
        let m = self.mirror.clone();
        let Feed::Stream { buf, from, to } = &mut self.source else {
            unreachable!("checked by the caller");
        };
        let pending = has_whole(&buf[*from..*to])?;
        if !pending {
            if *from == *to {
                (*from, *to) = (0, 0);
            } else if *from > 0 && buf.len() - *to < buf.len() / 2 {
                buf.copy_within(*from..*to, 0);
                (*from, *to) = (0, *to - *from);
            }
            match self.conn.recv(&mut [IoSliceMut::new(&mut buf[*to..])]) {
                Ok(0) => return Err(Error::Timeout("the primary closed the link".into())),
                Ok(n) => *to += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Step::Nothing),
                Err(e) => return Err(Error::io("receiving from the primary", &e)),
            }
            if !has_whole(&buf[*from..*to])? {
                let need = needed(&buf[*from..*to]);
                let most = m.store.logs()[self.lane].size() as usize / 2 + FRAME_LEN;
                if need > most {
                    return Err(Error::Protocol(format!(
                        "a record of {need} bytes, {most} at most fit this node's log"
                    )));
                }
                if need > buf.len() {
                    buf.resize(need, 0);
                }
                if *from + need > buf.len() {
                    buf.copy_within(*from..*to, 0);
                    (*from, *to) = (0, *to - *from);
                }
                return Ok(Step::Nothing);
            }
        }
        let mut guard = lock(&m.lanes[self.lane]);
        let lane = current(&m, self.session, &mut guard)?;
        let log = &m.store.logs()[self.lane];
        let history = self.history.clone();
        let first = log.head();
        let mut committed = 0;
        let mut size = 0;
        let mut step = Step::Moved;
        let mut take = || -> Result<()> {
            while has_whole(&buf[*from..*to])? {
                let f = Frame::decode(&buf[*from..*to]).expect("checked by has_whole");
                if f.epoch != self.epoch || f.kind != FrameKind::Record {
                    return Err(Error::Protocol(format!(
                        "{:?} of epoch {} on a lane of epoch {}",
                        f.kind, f.epoch, self.epoch
                    )));
                }
                let body = &buf[*from + FRAME_LEN..*from + FRAME_LEN + f.body as usize];
                let r = match m.store.mutations.trust_wire.load(Relaxed) {
                    false => RecordView::decode(body),
                    true => RecordView::trusted(body),
                };
                let r = r.map_err(|e| Error::Protocol(e.to_string()))?;
                let len = r.bytes().len();
                if len != body.len() {
                    return Err(Error::Protocol("a frame larger than its record".into()));
                }
                check_len(len, log.size())?;
                let head = log.head();
                let place = log.place(head, len);
                // Also of one that has no room: a log may be full of what is committed
                // and not known to be.
                committed = committed.max(f.lsn);
                let Some(at) = place.filter(|_| !m.backups.is_full(&m.store)) else {
                    step = m.blocked(self.lane, place.is_some());
                    return Ok(());
                };
                self.said = None;
                m.check_spill(&r)?;
                match lane.arrive(&r.header, &history) {
                    Arrival::Accept => {
                        // SAFETY: this lane's lock is held, so only this thread
                        // appends; `at` is of the present head.
                        let slot =
                            unsafe { log.slot(head, at, len, r.header.volume, r.header.lsn) };
                        slot.copy_from_slice(r.bytes());
                        log.publish(at, len);
                    }
                    Arrival::Duplicate => {
                        m.received.mark(r.header.lsn);
                    }
                    Arrival::Refuse(why) => return Err(Error::Protocol(why)),
                }
                size = len;
                *from += FRAME_LEN + len;
            }
            Ok(())
        };
        let taken = take();
        if taken.is_err() {
            // What came before counts, as in shared memory.
            m.landed(self.lane, first)?;
        }
        taken?;
        let mut flags = m.store.level() as u16;
        if step != Step::Moved && size == 0 {
            m.learn(committed);
            if step == Step::Full || !m.tells(&mut self.said) {
                return Ok(step);
            }
            flags |= WAITS;
        }
        let last = lane.last();
        m.landed(self.lane, first)?;
        drop(guard);
        let ack = Frame {
            kind: FrameKind::Ack,
            flags,
            epoch: self.epoch,
            lsn: last,
            body: 0,
        };
        self.unsent = Some((ack.encode(), 0));
        self.send_ack()?;
        m.store.logs()[self.lane].prefetch(size);
        m.backups.work.notify();
        m.learn(committed);
        Ok(step)
    }

    fn send_ack(&mut self) -> Result<bool> {
        while let Some((bytes, at)) = &mut self.unsent {
            match self.conn.send(&[IoSlice::new(&bytes[*at..])]) {
                Ok(n) if *at + n == FRAME_LEN => self.unsent = None,
                Ok(n) => *at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(Error::io("acknowledging to the primary", &e)),
            }
        }
        Ok(true)
    }

    /// For a lane of shared memory: is the peer's stream still open?
    fn check_alive(&mut self) -> Result<()> {
        if self.mirror.session.load(Acquire) != self.session {
            return Err(Error::Stale("the session of this lane is over".into()));
        }
        let mut b = [0u8; 1];
        match self.conn.recv(&mut [IoSliceMut::new(&mut b)]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Ok(0) => Err(Error::Timeout("the primary closed the link".into())),
            Ok(_) => Err(Error::Protocol("bytes on a lane of shared memory".into())),
            Err(e) => Err(Error::io("the primary's link", &e)),
        }
    }

    /// Blocks until something may have come, or `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        match &self.source {
            Feed::Ring(r) => {
                r.wait(timeout);
                self.check_alive()
            }
            Feed::Stream { .. } => {
                let _ = self.conn.wait(self.unsent.is_some(), timeout);
                if self.mirror.session.load(Acquire) != self.session {
                    self.conn.close();
                    return Err(Error::Stale("the session of this lane is over".into()));
                }
                Ok(())
            }
        }
    }
}

fn current<'a>(
    m: &Mirror,
    session: u64,
    guard: &'a mut MutexGuard<'_, Option<LaneIn>>,
) -> Result<&'a mut LaneIn> {
    if m.session.load(SeqCst) != session {
        return Err(Error::Stale("the session of this lane is over".into()));
    }
    guard
        .as_mut()
        .ok_or_else(|| Error::Stale("the session of this lane is over".into()))
}

fn check_len(len: usize, log: u64) -> Result<()> {
    if len as u64 > log / 2 - 4096 {
        return Err(Error::Protocol(format!(
            "a record of {len} bytes does not fit this node's log of {log}"
        )));
    }
    Ok(())
}

fn needed(b: &[u8]) -> usize {
    match Frame::decode(b) {
        Ok(f) => FRAME_LEN + f.body as usize,
        Err(_) => FRAME_LEN,
    }
}

fn has_whole(b: &[u8]) -> Result<bool> {
    if b.len() < FRAME_LEN {
        return Ok(false);
    }
    let f = Frame::decode(b).map_err(|e| Error::Protocol(e.to_string()))?;
    Ok(b.len() >= FRAME_LEN + f.body as usize)
}

impl Mirror {
    /// Why lane `lane` takes nothing: for want of room, if there is no `room`
    /// and no backup that keeps it.
    #[cold]
    fn blocked(&self, lane: usize, room: bool) -> Step {
        match room || self.store.is_kept(lane) {
            true => Step::Held,
            false => Step::Full,
        }
    }

    /// Whether it is time to tell the primary (again) that a lane waits.
    fn tells(&self, said: &mut Option<Duration>) -> bool {
        let now = self.store.env().now();
        let every = HEARTBEAT.min(self.silence / 4);
        let due = said.is_none_or(|at| now.saturating_sub(at) >= every);
        if due {
            *said = Some(now);
        }
        due
    }

    /// A record that names a spill file is worth nothing without it, durable here.
    #[inline]
    fn check_spill(&self, r: &RecordView<'_>) -> Result<()> {
        let Some((id, want)) = named_spill(r)? else {
            return Ok(());
        };
        let len = self.store.durable_spill(id);
        if len != Some(want) {
            return Err(Error::Protocol(format!(
                "record {} names spill file {id} of {want} bytes; {} are durable here",
                r.header.lsn,
                len.unwrap_or(0)
            )));
        }
        Ok(())
    }

    /// Records from position `first` on are in the log: makes them persistent
    /// if the medium does, and counts them as received.
    #[inline]
    fn landed(&self, lane: usize, first: u64) -> Result<()> {
        let log = &self.store.logs()[lane];
        let head = log.head();
        // Also what an earlier batch published before it failed.
        if first == head && log.persisted() >= head {
            return Ok(());
        }
        self.store.check()?;
        let r = log.persist(head);
        self.store.fail(r)?;
        let mut at = first;
        while let Some((r, _, next)) = log.record(at) {
            self.received.mark(r.header.lsn);
            at = next;
        }
        Ok(())
    }
}
