//! The primary: turns sync points into records and knows when they are safe.
//!
//! Owns the LSN counter, the lanes' sending ends and the two prefixes (what
//! the mirror acknowledged, what the own log made persistent). The calling
//! thread does the work:
//!
//! - It encodes into the ring.
//! - It sends.
//! - It writes the local log where the mode asks for it.
//! - It polls for the acknowledgement.
//!
//! Threads only meet where they use the same lane at the same time. Then one sends, writes
//! and receives for all (`group.rs`, Mojim 4.1).
//!
//! Invariants:
//! - 2 of `docs/reference/invariants.md`: `committed` moves only as the mode's rule allows.
//! - The LSN is taken together with the room for its record, before the first byte is
//!   copied, so LSNs ascend within a lane. The record is made without a lock. Every LSN
//!   that is taken gets one.
//! - Steady state allocates nothing and calls the system only to send,
//!   receive and write the log.
//!
//! Lock order: room, tx, rx, persist. None is held while another lane's is taken. There are two
//! exceptions:
//!
//! - The session takes tx and rx of one lane at a time.
//! - `raise` takes every lane's room in their order.
//!
//! With `room` held, a thread waits only for records that are being made. These need no lock.

mod append;
mod committed;
mod drive;
mod group;
mod other_end;
mod risk;
mod rule;
mod spill;
mod spills;
mod split;
#[cfg(test)]
pub(crate) mod tests;
mod wait;
mod waiters;
mod write_back;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::Duration;

use mojim_format::record::MAX_OPS;
use mojim_format::{Level, OP_LEN, RECORD_OVERHEAD, RecordWriter, State, View};
use mojim_protocol::{AckRule, Marks, Patience, Prefix, Verdict};

use crate::backup_progress::{BackupProgress, Source, Term};
use crate::handshake::too_long;
use crate::link::{COPY_SILENCE, Rx, Tx};
use crate::piece::Piece;
use crate::spill_out::SpillFile;
use crate::spinner::Spinner;
use crate::yield_policy::YieldPolicy;
use mojim_config::WriteBack;
use mojim_env::alone::Alone;
use mojim_env::event::Event;
use mojim_env::threads::thread_number;
use mojim_env::turns::Mutex;
use mojim_env::{Error, Longest, Result, Space};
use mojim_store::log::{Live, Log};
use mojim_store::reservations::{Reservations, Taken};
use mojim_store::store::Store;
use other_end::OtherEnd;
use risk::AtRisk;
use rule::Rule;
pub use spills::Spilling;
use spills::Spills;
use split::Split;
use waiters::Waiters;

/// Most LSNs that may be in flight at once.
const WINDOW: usize = 1 << 16;

/// Looks at records that are being made before they count as not known to be there.
const LOOKS: u32 = 10;

/// Round trips for which a sync point waits beyond `resend_timeout`: its record
/// may come behind others, and a packet that is lost is sent again.
const TRIPS: u32 = 3;
/// The longest of such waits: a link that stood still was measured too.
const LONGEST_TRIPS: Duration = Duration::from_secs(1);

/// Bytes a second that the slowest mirror is expected to take in and write: what
/// it lacks lengthens the wait before the link is suspected.
const LEAST_PACE: u64 = 8 << 20;

/// A lane's receiving end, and what is kept of it when the link changes.
pub struct RxSlot {
    /// While there is a link.
    pub rx: Option<Rx>,
    /// The lane's last LSN that the present link acknowledged.
    acked: u64,
    /// Some of what the link acknowledged could not be counted yet.
    held: bool,
    spinner: Spinner,
}

impl RxSlot {
    /// A new link: acknowledgements of an old one no longer count.
    pub(crate) fn install(&mut self, rx: Rx) {
        self.rx = Some(rx);
        self.acked = 0;
        self.held = false;
    }
}

/// A wait for room in the log: how long it has lasted since anything moved.
#[derive(Default)]
pub struct RoomWait {
    waited: Duration,
    spilled: u64,
}

/// One lane's shared ends.
pub struct OutLane {
    /// Who has taken room in the log. The first lane's number beside it is the next LSN: with
    /// one lane, whoever appends writes one cache line for others.
    room: Reservations,
    /// The sending end, while there is a link.
    pub tx: Alone<Mutex<Option<Tx>>>,
    /// The receiving end.
    pub rx: Alone<Mutex<RxSlot>>,
    /// Position up to which the mirror has acknowledged, over the present link or, without
    /// one, over the last. It is read without `rx`, which a thread may hold while it waits.
    pub(crate) acked_at: Alone<AtomicU64>,
    /// When the mirror last said that this lane waits for a backup, in
    /// nanoseconds; 0: it has taken something since.
    waits: AtomicU64,
    /// Position up to which `persisted` counts this lane's records.
    persist: Alone<Mutex<u64>>,
    /// Threads that look again and again whether another one has done their work.
    looking: Alone<AtomicU32>,
    /// Threads that sleep until another one has done it.
    sleeping: AtomicU32,
    /// Turns of work while other threads waited.
    turns: AtomicU32,
    /// Up to where the log was persistent in the background's last turn.
    was_persisted: AtomicU64,
}

/// A sync point whose bytes are in the log.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    /// Its LSN.
    pub lsn: u64,
    /// The lane in whose log it is.
    pub lane: usize,
    /// Where it ends in that log.
    end: u64,
    /// About how many bytes the next sync point may have.
    hint: usize,
}

/// How a primary behaves.
#[derive(Debug, Clone)]
pub struct PrimarySpec {
    /// The mode's rule.
    pub rule: AckRule,
    /// Whether sync points return before the mirror has them, so that a
    /// background thread sends (`async`).
    pub background_send: bool,
    /// How long a sync point polls before it blocks.
    pub spin: Duration,
    /// Standstill after which the link is suspected, so that records are sent again.
    pub resend_timeout: Duration,
    /// How many such periods pass before a sync point fails.
    pub resend_attempts: u32,
    /// Largest record that every log of the volume takes, in bytes.
    pub max_record: usize,
    /// Committed records that make a checkpoint due.
    pub checkpoint_threshold: u64,
    /// When committed records are applied.
    pub write_back: WriteBack,
    /// Pages that may wait with [`WriteBack::Async`].
    pub write_back_pages: u64,
    /// Bytes of the smallest log of the volume: what is larger than half of it
    /// goes through a spill file.
    pub smallest_log: u64,
    /// Bytes that may wait for a backup that this node itself forwards to.
    pub secondary_threshold: u64,
}

/// The primary of one volume, in the application's process.
pub struct Primary {
    /// This node's copy.
    pub store: Arc<Store>,
    /// How it behaves.
    pub spec: PrimarySpec,
    volume: AtomicU64,
    epoch: AtomicU64,
    pub(crate) other_end: OtherEnd,
    rule: Rule,
    split: Split,
    /// LSNs that the mirror has in its log.
    pub acked: Prefix,
    /// LSNs that are persistent in the own log.
    pub persisted: Prefix,
    /// The lanes, by their numbers.
    pub lanes: Box<[OutLane]>,
    /// Something moved: for threads that wait for anything but their sync points.
    pub done: Alone<Event>,
    /// Threads that wait for their sync points.
    waiters: Waiters,
    yield_policy: YieldPolicy,
    /// The link thread.
    pub link_work: Event,
    /// The checkpoint thread.
    pub checkpoint_work: Arc<Event>,
    /// Sync points are sent to a mirror.
    pub link_up: AtomicBool,
    /// A thread saw the link fail or stall.
    pub suspect: AtomicBool,
    /// The end has begun: nothing is appended any more.
    closed: AtomicBool,
    /// Why this primary can commit nothing any more.
    stale: std::sync::OnceLock<Error>,
    /// Why the link is down, for error texts.
    pub(crate) link_error: Mutex<Option<Error>>,
    /// What was acknowledged, and would be lost with this node's power.
    risk: AtRisk,
    /// A program may append.
    pub ready: AtomicBool,
    pub(crate) spills: Spills,
    /// The backups, while there is no mirror that forwards to them.
    pub backups: BackupProgress,
}

impl Source for Primary {
    fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// All but its mirror, even a lost one: the session sends to that node.
    fn serves(&self, peer: &str) -> bool {
        *self.other_end.name() != peer
    }

    /// A primary forwards while its view has no mirror.
    fn term(&self) -> Option<Term> {
        if !self.is_ready() || self.stale.get().is_some() {
            return None;
        }
        let epoch = self.epoch();
        let view = self.store.superblock().view;
        (view.mirror.is_empty() && view.epoch == epoch).then_some(Term {
            number: epoch,
            epoch,
            primary: view.primary,
        })
    }

    /// A primary's records are never dropped or replaced: its term is settled for good,
    /// or another node forwards.
    fn is_settling(&self) -> bool {
        false
    }

    fn received(&self) -> u64 {
        self.committed()
    }

    fn committed(&self) -> u64 {
        self.committed_whole()
    }

    fn backups(&self) -> &BackupProgress {
        &self.backups
    }
}

impl Primary {
    /// The session is with node `mirror` from here on: no backup session sends to that
    /// node.
    pub(crate) fn pair_with(&self, mirror: &str) {
        let mut name = self.other_end.name();
        if *name != mirror {
            // The new mirror does not have what another node acknowledged.
            for lane in &self.lanes {
                lane.acked_at.store(0, Relaxed);
            }
        }
        mirror.clone_into(&mut name);
        drop(name);
        self.backups.work.notify();
    }

    /// The node that is its mirror, or is to be; empty if there is none.
    pub fn mirror(&self) -> String {
        self.other_end.name().clone()
    }

    /// A primary over an opened store; it serves nothing until it is started.
    pub fn new(store: Arc<Store>, spec: PrimarySpec) -> Primary {
        let tail = store.tail();
        let lanes = store
            .logs()
            .iter()
            .map(|log| OutLane {
                room: Reservations::new(log.head(), log.size()),
                tx: Alone(Mutex::new(None)),
                rx: Alone(Mutex::new(RxSlot {
                    rx: None,
                    acked: 0,
                    held: false,
                    spinner: Spinner::new(spec.spin),
                })),
                acked_at: Alone(AtomicU64::new(0)),
                waits: AtomicU64::new(0),
                persist: Alone(Mutex::new(log.head())),
                looking: Alone(AtomicU32::new(0)),
                sleeping: AtomicU32::new(0),
                turns: AtomicU32::new(0),
                was_persisted: AtomicU64::new(0),
            })
            .collect();
        let primary = Primary {
            volume: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            other_end: OtherEnd::default(),
            rule: Rule::new(spec.rule),
            split: Split::default(),
            acked: Prefix::new(WINDOW, tail),
            persisted: Prefix::new(WINDOW, tail),
            lanes,
            done: Alone::default(),
            waiters: Waiters::default(),
            yield_policy: YieldPolicy::default(),
            link_work: Event::default(),
            checkpoint_work: Arc::default(),
            link_up: AtomicBool::new(false),
            suspect: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            stale: std::sync::OnceLock::new(),
            link_error: Mutex::new(None),
            risk: AtRisk::default(),
            ready: AtomicBool::new(false),
            spills: Spills::default(),
            backups: BackupProgress::new(store.logs().len(), spec.secondary_threshold),
            store,
            spec,
        };
        primary.next().store(tail + 1, Release);
        primary
    }

    /// The next LSN. Whoever takes some has a lane's room locked.
    #[inline]
    fn next(&self) -> &AtomicU64 {
        self.lanes[0].room.numbers()
    }

    /// Takes what the store now holds as this primary's past and begins
    /// `epoch`: everything whole and contiguous stays, the rest is dropped.
    pub(crate) fn begin(&self, epoch: u64, view: View) -> Result<u64> {
        let tail = self.store.tail();
        self.store.truncate(tail)?;
        self.store.begin_epoch(epoch, tail + 1, view)?;
        self.store.persist_all()?;
        self.volume
            .store(self.store.superblock().volume_id, Release);
        self.epoch.store(epoch, Release);
        self.next().store(tail + 1, Release);
        self.split.begin(self.store.logs());
        self.rule.begin();
        self.acked.reset(0);
        self.persisted.reset(tail);
        for (lane, log) in self.lanes.iter().zip(self.store.logs()) {
            lane.room.restart(log);
            *lane.persist.lock().expect("not poisoned") = log.head();
        }
        let live = &self.store.logs()[0];
        live.live(Live::Epoch).store(epoch, Relaxed);
        live.live(Live::Last).store(tail, Release);
        Ok(tail)
    }

    /// Sync points are taken from here on.
    pub(crate) fn serve(&self) {
        let live = &self.store.logs()[0];
        // Who sees the process sees its link.
        live.live(Live::LinkUp)
            .store(self.link_up.load(Acquire) as u64, Relaxed);
        live.live(Live::Pid)
            .store(std::process::id() as u64, Release);
        self.store.outlast_full_disks();
        self.ready.store(true, Release);
    }

    /// Begins to serve a volume without a mirror, by what its own copy says.
    pub fn begin_unreplicated(&self, me: &str) -> Result<()> {
        let store = &self.store;
        store.check_complete()?;
        if store.superblock().state == State::Empty {
            store.make_new()?;
        }
        let sb = store.superblock();
        let epoch = store.next_epoch(sb.promised.max(sb.view.epoch));
        let view = View {
            epoch,
            primary: me.to_owned(),
            mirror: String::new(),
        };
        let tail = self.begin(epoch, view)?;
        self.set_rule(AckRule::LOCAL);
        store.apply_all(tail)?;
        self.serve();
        Ok(())
    }

    /// Begins a greater epoch while sync points go on: the next LSN is its first. The
    /// register has agreed to it, and no link is up.
    pub(crate) fn raise(&self, epoch: u64) -> Result<()> {
        let held: Vec<_> = self.lanes.iter().map(|l| l.room.turn()).collect();
        // Every LSN below has its record, in the epoch in which it was taken.
        self.await_records();
        let mut view = self.store.superblock().view;
        view.epoch = epoch;
        self.store
            .begin_epoch(epoch, self.next().load(SeqCst), view)?;
        self.epoch.store(epoch, Release);
        drop(held);
        let live = &self.store.logs()[0];
        live.live(Live::Epoch).store(epoch, Relaxed);
        Ok(())
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Acquire)
    }

    /// The last LSN given out. Its record may still be made.
    pub fn last(&self) -> u64 {
        self.next().load(SeqCst) - 1
    }

    /// Whether attaching is complete: sync points are taken.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Acquire)
    }

    /// Whether the lanes to the mirror are open.
    pub fn is_linked(&self) -> bool {
        self.link_up.load(Acquire)
    }

    /// What was last told to be free at the mirror, while one is linked, and the LSN up to which
    /// that counts what is applied there: the records behind it are on their way.
    pub fn mirror_room(&self) -> Option<(u64, Space)> {
        self.other_end.room().filter(|_| self.is_linked())
    }

    /// Fails for good: a newer view has another primary.
    pub(crate) fn supersede(&self, e: Error) {
        let _ = self.stale.set(e);
        self.wake_all();
    }

    /// Nothing is appended after this returns. Returns the last LSN.
    pub fn close_appends(&self) -> u64 {
        self.closed.store(true, SeqCst);
        self.last_with_records()
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(SeqCst) {
            return Err(Error::Invalid("this volume is being detached".into()));
        }
        if !self.is_ready() {
            // There is no epoch yet, in which a record could be made.
            self.check()?;
            return Err(Error::Invalid("this volume is not attached yet".into()));
        }
        self.check()
    }

    /// Fails if nothing can be committed here any more.
    pub fn check(&self) -> Result<()> {
        if let Some(e) = self.stale.get() {
            return Err(e.clone());
        }
        self.store.check()
    }

    fn log(&self, lane: usize) -> &Log {
        &self.store.logs()[lane]
    }

    /// Fails if this node or the mirror cannot have a file of `size` bytes. This is
    /// checked before there is a record of the size.
    pub fn check_size(&self, size: u64) -> Result<()> {
        let here = self.store.max_file();
        let there = self.other_end.max_file();
        if size <= here.min(there) {
            return Ok(());
        }
        let (node, most) = match here <= there {
            true => (self.store.spec().node.clone(), here),
            false => (self.mirror(), there),
        };
        Err(Error::Io {
            what: format!(
                "a file of {size} bytes: node {node} can have at most {most} (its file system, or its limit RLIMIT_FSIZE)"
            ),
            errno: libc::EFBIG,
            error: "file too large".into(),
        })
    }

    /// The longest names that files can have on this node and on the mirror.
    pub fn longest_names(&self) -> Longest {
        self.store
            .longest_names()
            .and(self.other_end.longest_names())
    }

    /// Fails if this node or the mirror cannot have a file of this name. This is checked
    /// before there is a record of the name.
    pub fn check_name(&self, name: &str) -> Result<()> {
        if self.longest_names().takes(name) {
            return Ok(());
        }
        let here = self.store.longest_names();
        let (node, most) = match here.takes(name) {
            false => (self.store.spec().node.clone(), here),
            true => (self.mirror(), self.other_end.longest_names()),
        };
        Err(Error::Io {
            what: too_long(name, &node, most),
            errno: libc::ENAMETOOLONG,
            error: "name too long".into(),
        })
    }

    /// One sync point from beginning to end. Returns its LSN.
    #[inline]
    pub fn commit(&self, pieces: &[Piece<'_>]) -> Result<u64> {
        let begun = self.begin_commit(pieces)?;
        self.finish_commit(&begun)?;
        Ok(begun.lsn)
    }

    /// The first half of [`Primary::commit`]: the sync point gets its LSN, and its bytes
    /// are in the log. After an error they are not.
    #[inline]
    pub fn begin_commit(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        let bytes: usize = pieces.iter().map(|p| p.len() + OP_LEN).sum();
        if self.spills(bytes) {
            return self.begin_copied(pieces);
        }
        let begun = self.append(pieces)?;
        let hint = bytes + RECORD_OVERHEAD;
        Ok(Begun { hint, ..begun })
    }

    /// As [`Primary::begin_commit`], but never waits: `None` while the log has no room. What
    /// goes through a spill file waits all the same.
    pub fn try_begin_commit(&self, pieces: &[Piece<'_>]) -> Result<Option<Begun>> {
        let bytes: usize = pieces.iter().map(|p| p.len() + OP_LEN).sum();
        if self.spills(bytes) {
            return self.begin_copied(pieces).map(Some);
        }
        self.check_open()?;
        let appended = self.try_append_now(pieces, thread_number())?;
        let hint = bytes + RECORD_OVERHEAD;
        Ok(appended.map(|begun| Begun { hint, ..begun }))
    }

    /// As [`Primary::begin_commit`], but by a spill file whatever the size: for pieces
    /// that are copied.
    pub fn begin_copied(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        self.spills.under_way.fetch_add(1, SeqCst);
        let begun = self.begin_spilled(pieces);
        self.spills.under_way.fetch_sub(1, SeqCst);
        begun
    }

    /// The second half of [`Primary::commit`]: waits until the sync point is committed.
    #[inline]
    pub fn finish_commit(&self, begun: &Begun) -> Result<()> {
        self.wait_hinted(begun.lsn, begun.lane, begun.hint)
    }

    /// As [`Primary::finish_commit`], for `limit` at most: false if it is not committed by then.
    pub fn finish_commit_within(&self, begun: &Begun, limit: Duration) -> Result<bool> {
        self.wait_within(begun.lsn, begun.lane, begun.hint, limit)
    }

    /// In place of [`Primary::finish_commit`], without a wait: sends the record, or
    /// leaves that to a thread that is sending. The checkpoint thread writes it to the
    /// own log; the link thread sends what is left over and takes the acknowledgement. The sync
    /// point outlives the process: no record before it is still being made.
    pub fn start_async(&self, begun: &Begun) {
        self.await_records_before(begun);
        if self.spec.background_send {
            self.link_work.notify();
        } else {
            self.send(begun.lane);
        }
        self.checkpoint_work.notify();
    }

    /// The last LSN, after every thread that took one before has made its record: a thread that
    /// takes one after this has seen what the caller wrote before.
    pub fn last_with_records(&self) -> u64 {
        for lane in &self.lanes {
            drop(lane.room.turn());
        }
        self.await_records();
        self.last()
    }

    /// Waits until each LSN that was taken before has its record: then what this thread has appended
    /// outlives the process, and what it knows to be appended by others. For what other threads
    /// copy at this moment, and for nothing else.
    pub fn await_records(&self) {
        if self.store.mutations.settle_early.is_on() {
            return;
        }
        for (lane, log) in self.lanes.iter().zip(self.store.logs()) {
            lane.room.wait_filled(log);
        }
    }

    /// Waits until each record is there whose LSN is at most that of `begun`: what lies behind it on
    /// its own lane has a higher one.
    fn await_records_before(&self, begun: &Begun) {
        if self.store.mutations.settle_early.is_on() {
            return;
        }
        let lanes = self.lanes.iter().zip(self.store.logs());
        for (i, (lane, log)) in lanes.enumerate() {
            match i == begun.lane {
                true => lane.room.wait_filled_before(log, begun.end),
                // On another lane all of them were taken by now.
                false => lane.room.wait_filled(log),
            }
        }
    }

    /// As [`Primary::last_with_records`]; `None` while a sync point has read its bytes and
    /// gets its LSN later. A thread that appends after this reads after it.
    pub fn last_unless_spilling(&self) -> Option<u64> {
        let spills = self.spills.under_way.load(SeqCst) > 0;
        (!spills).then(|| self.last_with_records())
    }

    /// The level at which this node and its mirror have `lsn`; `None` if the record is
    /// not there or not known to be.
    pub fn copies(&self, lsn: u64) -> (Option<Level>, Option<Level>) {
        let own = if lsn > self.last() {
            None
        } else if lsn <= self.persisted.get() {
            Some(self.store.level())
        } else {
            // It may be one that a thread is making. Who asks waits for that, not for one that
            // stands still.
            let mut lanes = self.lanes.iter().zip(self.store.logs());
            let are_there = lanes.all(|(lane, log)| lane.room.wait_filled_within(log, LOOKS));
            are_there.then_some(Level::Received)
        };
        let mirror = (lsn <= self.acked.get() && lsn <= self.last())
            .then(|| self.other_end.level())
            .flatten();
        (own, mirror)
    }
}
