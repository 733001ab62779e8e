//! The primary: turns sync points into records and knows when they are safe.
//!
//! Owns the LSN counter, the lanes' sending ends and the two prefixes (what
//! the mirror acknowledged, what the own log made persistent). The calling
//! thread does the work: it encodes into the ring, sends, writes the local log
//! where the mode asks for it, and polls for the acknowledgement. Threads only
//! meet where they use the same lane at the same time; then one sends, writes
//! or receives for all (Mojim 4.1).
//!
//! Invariants:
//! - 2 of `docs/invariants.md`: `committed` moves only as the mode's rule allows.
//! - The LSN is taken under the lane's append lock, before the first byte is
//!   copied, so LSNs ascend within a lane; every LSN that is taken is
//!   published.
//! - Steady state allocates nothing and calls the system only to send,
//!   receive and write the log.
//!
//! Lock order: append; tx; rx; persist. None is held while another lane's is
//! taken, except by the session, which takes tx and rx of one lane at a time,
//! and by `raise`, which takes every lane's append in their order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, TryLockError};
use std::time::Duration;

use mojim_format::record::MAX_OPS;
use mojim_format::{Level, OP_LEN, Op, OpKind, RECORD_OVERHEAD, RecordWriter, State, View};
use mojim_protocol::{AckRule, Patience, Prefix, Verdict};

use crate::backup_progress::{BackupProgress, Source, Term};
use crate::link::{COPY_SILENCE, Rx, Tx};
use crate::spinner::Spinner;
use mojim_config::WriteBack;
use mojim_env::event::Event;
use mojim_env::threads::thread_number;
use mojim_env::turns::Mutex;
use mojim_env::{Error, File, Result};
use mojim_store::log::{Live, Log};
use mojim_store::store::Store;

/// Most LSNs that may be in flight at once.
const WINDOW: usize = 1 << 16;

/// Round trips for which a sync point waits beyond `resend_timeout`: its record
/// may come behind others, and a packet that is lost is sent again.
const TRIPS: u32 = 3;
/// The longest of such waits: a link that stood still was measured too.
const LONGEST_TRIPS: Duration = Duration::from_secs(1);

/// Bytes a second that the slowest mirror is expected to take in and write: what
/// it lacks lengthens the wait before the link is suspected.
const LEAST_PACE: u64 = 8 << 20;

/// One operation of a sync point, as the caller has it.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Memory that goes to `offset` of the file.
    Write {
        /// The file's number.
        file: u32,
        /// Byte offset in the file.
        offset: u64,
        /// First byte. Read with raw copies: other threads may be storing
        /// there, which tears this sync point but nothing else.
        ptr: *const u8,
        /// Bytes.
        len: usize,
    },
    /// Bytes of another file that go to the same place of the file: read only when
    /// they are written to a spill file, piece by piece.
    Copy {
        /// The file's number.
        file: u32,
        /// Byte offset in both.
        offset: u64,
        /// Bytes.
        len: usize,
        /// The other file; what it does not have is zero.
        from: OtherFile<'a>,
    },
    /// A new file.
    Create {
        /// Its number.
        file: u32,
        /// Its name.
        name: &'a str,
    },
    /// A new size.
    Resize {
        /// The file's number.
        file: u32,
        /// Bytes.
        size: u64,
    },
    /// The file goes.
    Remove {
        /// The file's number.
        file: u32,
    },
    /// The file takes another name.
    Rename {
        /// The file's number.
        file: u32,
        /// The new name.
        name: &'a str,
    },
    /// The operations stand in a spill file that both nodes have.
    Spill {
        /// Its bytes.
        length: u64,
        /// The number in its name.
        id: [u8; 8],
    },
}

/// A file to read from.
#[derive(Clone, Copy)]
pub struct OtherFile<'a>(pub &'a dyn File);

impl std::fmt::Debug for OtherFile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OtherFile")
    }
}

impl Piece<'_> {
    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Piece::Write { len, .. } | Piece::Copy { len, .. } => *len,
            Piece::Create { name, .. } | Piece::Rename { name, .. } => name.len(),
            Piece::Resize { .. } | Piece::Remove { .. } => 0,
            Piece::Spill { .. } => 8,
        }
    }

    /// Whether it has no payload.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn op(&self) -> Op {
        let (file, kind, offset) = match *self {
            Piece::Write { file, offset, .. } | Piece::Copy { file, offset, .. } => {
                (file, OpKind::Write, offset)
            }
            Piece::Create { file, .. } => (file, OpKind::Create, 0),
            Piece::Resize { file, size } => (file, OpKind::Resize, size),
            Piece::Remove { file } => (file, OpKind::Remove, 0),
            Piece::Rename { file, .. } => (file, OpKind::Rename, 0),
            Piece::Spill { length, .. } => (0, OpKind::Spill, length),
        };
        Op {
            file,
            kind,
            offset,
            len: self.len() as u32,
        }
    }

    /// Its first `n` bytes, which are not all, and the others; `None` where it is one.
    fn split(self, n: usize) -> Option<(Self, Self)> {
        assert!(n < self.len());
        match self {
            Piece::Write {
                file,
                offset,
                ptr,
                len,
            } => {
                let piece = |offset, ptr, len| Piece::Write {
                    file,
                    offset,
                    ptr,
                    len,
                };
                // SAFETY: n < len.
                let behind = unsafe { ptr.add(n) };
                Some((
                    piece(offset, ptr, n),
                    piece(offset + n as u64, behind, len - n),
                ))
            }
            Piece::Copy {
                file,
                offset,
                len,
                from,
            } => {
                let piece = |offset, len| Piece::Copy {
                    file,
                    offset,
                    len,
                    from,
                };
                Some((piece(offset, n), piece(offset + n as u64, len - n)))
            }
            _ => None,
        }
    }

    #[inline]
    fn copy_to(&self, to: &mut [u8]) {
        match *self {
            Piece::Write { ptr, len, .. } => {
                assert_eq!(to.len(), len);
                // SAFETY: whoever made the piece vouches that `len` bytes at
                // `ptr` stay readable during the call; the target is ours.
                unsafe { std::ptr::copy_nonoverlapping(ptr, to.as_mut_ptr(), len) }
            }
            Piece::Create { name, .. } | Piece::Rename { name, .. } => {
                to.copy_from_slice(name.as_bytes());
            }
            Piece::Resize { .. } | Piece::Remove { .. } => {}
            Piece::Copy { .. } => unreachable!("its bytes are read before it is encoded"),
            Piece::Spill { id, .. } => to.copy_from_slice(&id),
        }
    }
}

/// The pieces, with what they copy read into `bytes`.
fn read_copies<'a>(pieces: &[Piece<'a>], bytes: &mut Vec<u8>) -> std::io::Result<Vec<Piece<'a>>> {
    let copied = |p: &Piece<'_>| matches!(p, Piece::Copy { .. });
    bytes.clear();
    bytes.resize(pieces.iter().filter(|p| copied(p)).map(Piece::len).sum(), 0);
    let mut rest = &mut bytes[..];
    let mut out = pieces.to_vec();
    for p in &mut out {
        if let Piece::Copy {
            file,
            offset,
            len,
            from,
        } = *p
        {
            let (to, more) = rest.split_at_mut(len);
            rest = more;
            from.0.read_at(to, offset)?;
            let ptr = to.as_ptr();
            *p = Piece::Write {
                file,
                offset,
                ptr,
                len,
            };
        }
    }
    Ok(out)
}

/// Encodes pieces as one record. Returns its length.
#[inline]
#[allow(clippy::too_many_arguments)]
pub fn encode(
    buf: &mut [u8],
    pieces: &[Piece<'_>],
    volume: u64,
    lsn: u64,
    epoch: u64,
    part: u32,
    end: bool,
    committed: u64,
) -> usize {
    let mut w = RecordWriter::new(buf, pieces.len());
    for p in pieces {
        w.op(p.op());
    }
    for p in pieces {
        p.copy_to(w.payload_mut(p.len()));
    }
    w.finish(volume, lsn, epoch, part, end, committed)
}

/// Cuts the pieces of one sync point into parts whose records have at most
/// `max` bytes.
pub fn cut<'a>(pieces: &[Piece<'a>], max: usize) -> Vec<Vec<Piece<'a>>> {
    let mut parts: Vec<Vec<Piece<'a>>> = vec![Vec::new()];
    let mut left = max - RECORD_OVERHEAD;
    for &p in pieces {
        let mut p = p;
        loop {
            let part = parts.last_mut().expect("never empty");
            let full = part.len() >= MAX_OPS.min(max / OP_LEN);
            if !full && OP_LEN + p.len() <= left {
                left -= OP_LEN + p.len();
                part.push(p);
                break;
            }
            if !full
                && left >= OP_LEN + 64
                && let Some((first, rest)) = p.split(left - OP_LEN)
            {
                part.push(first);
                p = rest;
            }
            parts.push(Vec::new());
            left = max - RECORD_OVERHEAD;
        }
    }
    parts
}

/// The receiving end and what stays of it when the link changes.
pub struct RxSlot {
    /// While there is a link.
    pub rx: Option<Rx>,
    /// The lane's LSN that the link last acknowledged.
    acked: u64,
    /// Some of what it acknowledged could not be counted yet.
    held: bool,
    /// Where what the mirror's last link acknowledged ended, once that is over.
    acked_at: u64,
    spinner: Spinner,
}

impl RxSlot {
    /// A new link: what an old one acknowledged is over.
    pub(crate) fn install(&mut self, rx: Rx) {
        self.rx = Some(rx);
        self.acked = 0;
        self.held = false;
    }

    /// The link is over.
    pub(crate) fn end(&mut self) -> Option<Rx> {
        let rx = self.rx.take()?;
        self.acked_at = rx.acked_at;
        Some(rx)
    }
}

/// What one memory alone has, since the mirror was lost.
struct Risk {
    /// Bytes of records, when that was seen,
    bytes: u64,
    /// and when.
    since: Duration,
    /// Where they end, lane by lane.
    ends: Vec<u64>,
}

/// How far the way to the mirror had got when a waiting call last looked.
///
/// Invariant: it only grows, and not beyond what the logs held when the wait
/// began. What is sent a second time over a new link is no progress, nor is what
/// others append meanwhile, or a mirror that takes everything in and acknowledges
/// nothing would be waited for without end.
struct Motion {
    /// Bytes that the logs held.
    until: u64,
    handed: u64,
    lsn: u64,
    acked: u64,
    spilled: u64,
}

impl Motion {
    /// Of a wait for `lsn` that begins now.
    fn of(p: &Primary, lsn: u64) -> Motion {
        let mut motion = Motion {
            until: p.store.logs().iter().map(Log::head).sum(),
            handed: 0,
            lsn,
            acked: 0,
            spilled: 0,
        };
        motion.goes_on(p);
        motion
    }

    /// Whether the mirror has moved on since this was asked last: it has taken
    /// or acknowledged more than ever before, spill files included, which go ahead
    /// of records; or a whole copy is under way, whose own standstill ends its link
    /// (`link::COPY_SILENCE`).
    fn goes_on(&mut self, p: &Primary) -> bool {
        let handed = p.handed().min(self.until);
        let acked = p.acked.get().min(self.lsn);
        let spilled = p.spilled();
        let more = handed > self.handed || acked > self.acked || spilled > self.spilled;
        self.handed = self.handed.max(handed);
        self.acked = self.acked.max(acked);
        self.spilled = spilled;
        more || p.is_copying()
    }
}

/// A wait for room in the log: how long, since anything moved.
#[derive(Default)]
struct RoomWait {
    waited: Duration,
    spilled: u64,
}

/// One lane's shared ends.
pub struct OutLane {
    append: Mutex<()>,
    /// What sends, while there is a link.
    pub tx: Mutex<Option<Tx>>,
    /// What receives.
    pub rx: Mutex<RxSlot>,
    /// When the mirror last said that this lane waits for a backup, in
    /// nanoseconds; 0: it has taken something since.
    waits: AtomicU64,
    /// Position up to which the persistent prefix has been told.
    persist: Mutex<u64>,
}

/// A sync point whose bytes are in the log.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    /// Its LSN.
    pub lsn: u64,
    lane: usize,
    /// About how many bytes the next one may have.
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
    /// After which standstill records are sent again.
    pub resend_timeout: Duration,
    /// How often, before a sync point fails.
    pub resend_attempts: u32,
    /// Largest record that every log of the volume takes, in bytes.
    pub max_record: usize,
    /// Committed records that make a checkpoint due.
    pub checkpoint_threshold: u64,
    /// When they are applied.
    pub write_back: WriteBack,
    /// Pages that may wait with [`WriteBack::Async`].
    pub write_back_pages: u64,
    /// Bytes of the smallest log of the volume: what is larger than half of it
    /// goes through a spill file.
    pub smallest_log: u64,
    /// Bytes that may wait for a backup that this node itself forwards to.
    pub secondary_threshold: u64,
}

/// What the background sees of the program and its sync points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// They come one after the other.
    Busy,
    /// There was none in some turns of the background.
    Quiet,
    /// What waits takes too much memory.
    Pressed,
    /// There was none for long, or somebody waits for room in the log.
    Idle,
}

/// Bytes of records that are applied at a time, at least: an eighth of a log.
const LEAST_PIECE: u64 = 1 << 20;

/// The primary of one volume, in the application's process.
pub struct Primary {
    /// This node's copy.
    pub store: Arc<Store>,
    /// How it behaves.
    pub spec: PrimarySpec,
    volume: AtomicU64,
    epoch: AtomicU64,
    /// Whom the session is with.
    mirror: Mutex<String>,
    /// The rule and what is beside it; above [`CHANGES`], how often it was set.
    rule: AtomicU64,
    /// Of a leased primary: what was committed within its lease.
    held_at: AtomicU64,
    /// Until when what the rule says counts, in nanoseconds of the clock.
    lease: AtomicU64,
    next: AtomicU64,
    /// LSNs that the mirror has in its log.
    pub acked: Prefix,
    /// LSNs that are persistent in the own log.
    pub persisted: Prefix,
    /// The lanes, by their numbers.
    pub lanes: Box<[OutLane]>,
    /// Sync points that wait for others to send, write or receive for them.
    pub done: Event,
    /// The link thread.
    pub link_work: Event,
    /// The checkpoint thread.
    pub checkpoint_work: Arc<Event>,
    /// Sync points are sent to a mirror.
    pub link_up: AtomicBool,
    /// Someone saw the link fail or stall.
    pub suspect: AtomicBool,
    /// The end has begun: nothing is appended any more.
    closed: AtomicBool,
    /// Why this primary can commit nothing any more.
    stale: std::sync::OnceLock<Error>,
    /// Why the link is down, for error texts.
    pub(crate) link_error: Mutex<Option<String>>,
    pub(crate) mirror_level: AtomicU16,
    /// What was acknowledged, and would go with this node's power.
    risk: Mutex<Option<Risk>>,
    /// Silence after which a link counts as broken, in nanoseconds.
    silence: AtomicU64,
    /// The usual round trip over the link, in nanoseconds; 0: not known yet.
    round_trip: AtomicU64,
    /// A program may append.
    pub ready: AtomicBool,
    /// The spill file that the mirror is to get, and whether it has it.
    spill: Mutex<Option<(SpillFile, bool)>>,
    /// Bytes of spill files that got further towards the mirror than ever before,
    /// and of each file how far it got. What is sent a second time over a new link
    /// is no progress, or a mirror that cannot take one in would be waited for
    /// without end.
    spilled: AtomicU64,
    reached: Mutex<BTreeMap<u64, u64>>,
    /// All of a spill file is sent, and the mirror makes it durable.
    confirming: AtomicBool,
    /// Why the last link on which a spill file was sent ended.
    spill_error: Mutex<Option<String>>,
    /// Sync points whose bytes go to spill files, before they have an LSN.
    spilling: AtomicUsize,
    /// The most bytes that a file can have at the mirror, as that said last.
    pub(crate) mirror_max_file: AtomicU64,
    /// The backups, while there is no mirror that forwards to them.
    pub backups: BackupProgress,
}

/// A sync point whose bytes stand in a spill file and that has no record yet.
pub struct Spilling {
    file: SpillFile,
    /// How long nothing may get further while others are waited for, and since when
    /// nothing has.
    usual: Duration,
    quiet: Duration,
    /// Bytes of spill files that had got further when it was last looked at.
    spilled: u64,
    /// The mirror has it, where one must.
    handed: bool,
}

impl Spilling {
    /// What its record says.
    fn piece(&self) -> Piece<'static> {
        Piece::Spill {
            length: self.file.len,
            id: self.file.id.to_le_bytes(),
        }
    }
}

/// A spill file that is to be sent.
#[derive(Clone)]
pub(crate) struct SpillFile {
    pub(crate) id: u64,
    pub(crate) len: u64,
    pub(crate) file: Arc<dyn File>,
}

/// Beside a rule: nothing counts at present.
const HELD: u64 = 4;
/// Beside a rule: it counts until the lease is over.
const LEASED: u64 = 8;
/// Counts the changes of the rule, in the same word.
const CHANGES: u32 = 8;

/// A point at which another thread may change the rule and the prefixes; tests
/// do so there.
#[inline(always)]
fn interleave() {
    #[cfg(test)]
    tests::interleave();
}

fn pack(r: AckRule) -> u64 {
    r.local as u64 | (r.mirror as u64) << 1
}

fn unpack(r: u64) -> AckRule {
    AckRule {
        local: r & 1 != 0,
        mirror: r & 2 != 0,
    }
}

impl Source for Primary {
    fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Its mirror, also one that is lost, is its session's.
    fn serves(&self, peer: &str) -> bool {
        *self.mirror.lock().unwrap_or_else(|e| e.into_inner()) != peer
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

    /// What a primary forwards is settled once and for all, or another does it.
    fn is_settling(&self) -> bool {
        false
    }

    fn received(&self) -> u64 {
        self.committed()
    }

    fn committed(&self) -> u64 {
        Primary::committed(self)
    }

    fn backups(&self) -> &BackupProgress {
        &self.backups
    }
}

impl Primary {
    /// The session is with this node: nobody else speaks to it.
    pub(crate) fn pair_with(&self, mirror: &str) {
        let mut name = self.mirror.lock().unwrap_or_else(|e| e.into_inner());
        if *name != mirror {
            // What another one acknowledged this one does not have.
            for lane in &self.lanes {
                lane.rx.lock().unwrap_or_else(|e| e.into_inner()).acked_at = 0;
            }
        }
        mirror.clone_into(&mut name);
        drop(name);
        self.backups.work.notify();
    }

    /// The node that is its mirror, or is to be; empty where there is none.
    pub fn mirror(&self) -> String {
        let name = self.mirror.lock().unwrap_or_else(|e| e.into_inner());
        name.clone()
    }

    /// A primary over an opened store; it serves nothing until it is started.
    pub fn new(store: Arc<Store>, spec: PrimarySpec) -> Primary {
        let tail = store.tail();
        let lanes = store
            .logs()
            .iter()
            .map(|log| OutLane {
                append: Mutex::new(()),
                tx: Mutex::new(None),
                rx: Mutex::new(RxSlot {
                    rx: None,
                    acked: 0,
                    held: false,
                    acked_at: 0,
                    spinner: Spinner::new(spec.spin),
                }),
                waits: AtomicU64::new(0),
                persist: Mutex::new(log.head()),
            })
            .collect();
        Primary {
            volume: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            mirror: Mutex::default(),
            rule: AtomicU64::new(pack(spec.rule)),
            held_at: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            next: AtomicU64::new(tail + 1),
            acked: Prefix::new(WINDOW, tail),
            persisted: Prefix::new(WINDOW, tail),
            lanes,
            done: Event::default(),
            link_work: Event::default(),
            checkpoint_work: Arc::default(),
            link_up: AtomicBool::new(false),
            suspect: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            stale: std::sync::OnceLock::new(),
            link_error: Mutex::new(None),
            mirror_level: AtomicU16::new(0),
            risk: Mutex::default(),
            silence: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            spill: Mutex::new(None),
            spilled: AtomicU64::new(0),
            reached: Mutex::default(),
            confirming: AtomicBool::new(false),
            spill_error: Mutex::new(None),
            spilling: AtomicUsize::new(0),
            mirror_max_file: AtomicU64::new(u64::MAX),
            backups: BackupProgress::new(store.logs().len(), spec.secondary_threshold),
            store,
            spec,
        }
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
        self.next.store(tail + 1, Release);
        self.acked.reset(0);
        self.persisted.reset(tail);
        for (lane, log) in self.lanes.iter().zip(self.store.logs()) {
            *lane.persist.lock().expect("not poisoned") = log.head();
        }
        let live = &self.store.logs()[0];
        live.live(Live::Epoch).store(epoch, Relaxed);
        live.live(Live::Last).store(tail, Relaxed);
        live.live(Live::Pid)
            .store(std::process::id() as u64, Release);
        Ok(tail)
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
        self.ready.store(true, Release);
        Ok(())
    }

    /// Begins a greater epoch while sync points go on: the next LSN is its
    /// first. The caller has it from the register, and no link is up.
    pub(crate) fn raise(&self, epoch: u64) -> Result<()> {
        let _held: Vec<_> = self
            .lanes
            .iter()
            .map(|l| l.append.lock().unwrap_or_else(|e| e.into_inner()))
            .collect();
        let mut view = self.store.superblock().view;
        view.epoch = epoch;
        self.store
            .begin_epoch(epoch, self.next.load(SeqCst), view)?;
        self.epoch.store(epoch, Release);
        let live = &self.store.logs()[0];
        live.live(Live::Epoch).store(epoch, Relaxed);
        Ok(())
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Acquire)
    }

    /// The last LSN given out.
    pub fn last(&self) -> u64 {
        self.next.load(SeqCst) - 1
    }

    /// What is asked for at present: the mode's rule, or the one of a primary
    /// that is alone.
    #[inline]
    pub fn rule(&self) -> AckRule {
        unpack(self.rule.load(SeqCst))
    }

    /// Whether attaching is complete: sync points are taken.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Acquire)
    }

    /// Whether the lanes to the mirror are open.
    pub fn is_linked(&self) -> bool {
        self.link_up.load(Acquire)
    }

    pub(crate) fn set_rule(&self, r: AckRule) {
        // Sequentially consistent: who takes an LSN after this sees it, and who
        // took one before is seen by who reads the last LSN after this.
        let now = self.rule.load(SeqCst);
        let changes = (now >> CHANGES) + 1;
        let beside = now & (HELD | LEASED);
        self.rule
            .store(pack(r) | beside | changes << CHANGES, SeqCst);
    }

    /// The committed LSN.
    #[inline]
    pub fn committed(&self) -> u64 {
        if self.store.mutations.ack_early.load(Relaxed) {
            return self.last();
        }
        loop {
            let rule = self.rule.load(SeqCst);
            if rule & (HELD | LEASED) != 0 {
                match self.committed_by_lease(rule) {
                    Some(committed) => return committed,
                    None => continue,
                }
            }
            if let Some(committed) = self.committed_by(rule) {
                return committed;
            }
        }
    }

    /// What was committed at one instant at which this was the rule. `None`: it
    /// was set meanwhile, and what a mirror acknowledged may have counted for
    /// nothing when it was read.
    #[inline]
    fn committed_by(&self, rule: u64) -> Option<u64> {
        interleave();
        let persisted = self.persisted.get();
        interleave();
        let acked = self.acked.get();
        interleave();
        let committed = unpack(rule).committed(persisted, acked);
        (self.rule.load(SeqCst) == rule).then_some(committed)
    }

    /// What became committed within a lease stays so, and nothing else does.
    /// Whoever is about to acknowledge looks at the clock itself: the thread
    /// that would hold commits may sleep, or wait for a disk.
    fn committed_by_lease(&self, rule: u64) -> Option<u64> {
        if rule & HELD == 0 {
            let committed = self.committed_by(rule)?;
            // The clock last: what counts now was committed before.
            if (self.store.env().now().as_nanos() as u64) < self.lease.load(SeqCst) {
                self.held_at.fetch_max(committed, AcqRel);
                return Some(committed);
            }
        }
        Some(self.held_at.load(Acquire))
    }

    /// Until `end`, and no longer, this primary commits. By the session's
    /// thread, as all changes of the rule.
    pub(crate) fn lease_until(&self, end: Duration) {
        self.lease.store(end.as_nanos() as u64, SeqCst);
        if self.rule.load(SeqCst) & LEASED == 0 {
            self.held_at.store(self.committed(), Release);
            self.rule.fetch_or(LEASED, SeqCst);
        }
    }

    /// From here on nothing becomes committed, whatever the rule says, until it
    /// is let go again. By the session's thread, as all changes of the rule.
    pub(crate) fn hold(&self) {
        if !self.is_held() {
            self.rule.fetch_or(HELD, SeqCst);
        }
    }

    /// What is held counts by the rule again.
    pub(crate) fn let_go(&self) {
        // Looked at first: the line is every sync point's.
        if self.is_held() {
            self.rule.fetch_and(!HELD, SeqCst);
            self.done.notify();
        }
    }

    fn is_held(&self) -> bool {
        self.rule.load(SeqCst) & HELD != 0
    }

    /// Up to where records may go to the data area: committed, in the own log
    /// if that is to survive, and, while a mirror follows, in its log too, so
    /// that what it lacks is still in the ring.
    pub fn apply_limit(&self) -> u64 {
        if self.store.mutations.apply_before_log.load(Relaxed) {
            return self.last();
        }
        let mut limit = self.committed().min(self.persisted.get());
        if self.link_up.load(Acquire) {
            limit = limit.min(self.acked.get());
        }
        limit
    }

    /// Fails for good: a newer view has another primary.
    pub(crate) fn supersede(&self, e: Error) {
        let _ = self.stale.set(e);
        self.done.notify();
    }

    /// Nothing is appended after this returns; returns the last LSN.
    pub fn close_appends(&self) -> u64 {
        self.closed.store(true, SeqCst);
        self.settled_last()
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

    fn check(&self) -> Result<()> {
        if let Some(e) = self.stale.get() {
            return Err(e.clone());
        }
        self.store.check()
    }

    fn log(&self, lane: usize) -> &Log {
        &self.store.logs()[lane]
    }

    /// Appends one sync point. Returns the LSN of its last record and its lane.
    pub fn append(&self, pieces: &[Piece<'_>]) -> Result<(u64, usize)> {
        self.check_open()?;
        let payload: usize = pieces.iter().map(Piece::len).sum();
        let len = RecordWriter::len_for(pieces.len(), payload);
        if len <= self.spec.max_record && pieces.len() <= MAX_OPS {
            let mut wait = RoomWait::default();
            loop {
                if let Some(done) = self.try_append(pieces, len) {
                    return Ok(done);
                }
                self.wait_for_room(&mut wait)?;
            }
        }
        let parts = cut(pieces, self.spec.max_record);
        if self.is_too_large(payload + parts.len() * RECORD_OVERHEAD + pieces.len() * OP_LEN) {
            return Err(Error::Invalid(
                "a sync point larger than the log must go through a spill file".into(),
            ));
        }
        let mut wait = RoomWait::default();
        loop {
            if let Some(done) = self.try_append_parts(&parts) {
                return Ok(done);
            }
            self.wait_for_room(&mut wait)?;
        }
    }

    /// As `append`, on `lane` if it is free, but never waits: `None` while the
    /// log has no room. For drivers that move time themselves.
    pub fn try_append_now(
        &self,
        pieces: &[Piece<'_>],
        lane: usize,
    ) -> Result<Option<(u64, usize)>> {
        self.check()?;
        let payload: usize = pieces.iter().map(Piece::len).sum();
        let len = RecordWriter::len_for(pieces.len(), payload);
        if len <= self.spec.max_record && pieces.len() <= MAX_OPS {
            return Ok(self.try_append_on(pieces, len, lane));
        }
        let parts = cut(pieces, self.spec.max_record);
        if self.is_too_large(payload + parts.len() * RECORD_OVERHEAD + pieces.len() * OP_LEN) {
            return Err(Error::Invalid(
                "a sync point larger than the log must go through a spill file".into(),
            ));
        }
        Ok(self.try_append_parts_on(&parts, lane))
    }

    /// Whether a sync point of `bytes` must go through a spill file.
    pub fn is_too_large(&self, bytes: usize) -> bool {
        bytes + self.spec.max_record > self.spec.smallest_log as usize / 2
    }

    /// Whether another record may be appended, by what others lack.
    #[inline]
    fn has_room(&self) -> bool {
        self.has_window() && !self.backups.is_full(&self.store)
    }

    fn has_window(&self) -> bool {
        let next = self.next.load(Acquire) + 1024;
        let rule = self.rule();
        self.persisted.has_room(next)
            && (!(rule.mirror || self.link_up.load(Acquire)) || self.acked.has_room(next))
    }

    #[inline]
    fn try_append(&self, pieces: &[Piece<'_>], len: usize) -> Option<(u64, usize)> {
        self.try_append_on(pieces, len, thread_number())
    }

    #[inline]
    fn try_append_on(&self, pieces: &[Piece<'_>], len: usize, own: usize) -> Option<(u64, usize)> {
        let (lane, _held) = self.pick_lane(own);
        let log = self.log(lane);
        let head = log.head();
        let at = log.place(head, len)?;
        if !self.has_room() || self.closed.load(SeqCst) {
            return None;
        }
        let lsn = self.next.fetch_add(1, SeqCst);
        // SAFETY: the append lock is held, `at` is of the present head, and
        // the slot is dropped before `publish`.
        let slot = unsafe { log.slot(head, at, len, self.volume.load(Relaxed), lsn) };
        encode(
            slot,
            pieces,
            self.volume.load(Relaxed),
            lsn,
            self.epoch.load(Relaxed),
            0,
            true,
            self.committed().min(lsn - 1),
        );
        log.publish(at, len);
        Some((lsn, lane))
    }

    fn try_append_parts(&self, parts: &[Vec<Piece<'_>>]) -> Option<(u64, usize)> {
        self.try_append_parts_on(parts, thread_number())
    }

    fn try_append_parts_on(&self, parts: &[Vec<Piece<'_>>], own: usize) -> Option<(u64, usize)> {
        let (lane, _held) = self.pick_lane(own);
        let log = self.log(lane);
        let lens: Vec<usize> = parts
            .iter()
            .map(|p| RecordWriter::len_for(p.len(), p.iter().map(Piece::len).sum()))
            .collect();
        let mut from = log.head();
        for &len in &lens {
            from = log.place(from, len)? + (len as u64).next_multiple_of(log.align());
        }
        if !self.has_room() || self.closed.load(SeqCst) {
            return None;
        }
        let n = parts.len() as u64;
        let first = self.next.fetch_add(n, SeqCst);
        for (i, (part, &len)) in parts.iter().zip(&lens).enumerate() {
            let head = log.head();
            let at = log.place(head, len).expect("room was found above");
            let lsn = first + i as u64;
            // SAFETY: as in `try_append`.
            let slot = unsafe { log.slot(head, at, len, self.volume.load(Relaxed), lsn) };
            encode(
                slot,
                part,
                self.volume.load(Relaxed),
                lsn,
                self.epoch.load(Relaxed),
                i as u32,
                i + 1 == parts.len(),
                self.committed().min(lsn - 1),
            );
            log.publish(at, len);
        }
        Some((first + n - 1, lane))
    }

    /// A lane and its append lock: this thread's own if it is free, else any
    /// free one, else its own after waiting.
    #[inline]
    fn pick_lane(&self, own: usize) -> (usize, std::sync::MutexGuard<'_, ()>) {
        let n = self.lanes.len();
        let own = own % n;
        for i in 0..n {
            let lane = (own + i) % n;
            if let Ok(g) = self.lanes[lane].append.try_lock() {
                return (lane, g);
            }
        }
        let g = self.lanes[own]
            .append
            .lock()
            .unwrap_or_else(|e| e.into_inner());
        (own, g)
    }

    fn wait_for_room(&self, wait: &mut RoomWait) -> Result<()> {
        self.check_open()?;
        let limit = self.patience().limit() + Duration::from_secs(30);
        if wait.waited > self.standstill(limit) {
            return Err(self.timeout("the log is full", limit));
        }
        // Whatever is in the rings moves on only if somebody drives it.
        for lane in 0..self.lanes.len() {
            self.drive(lane)?;
        }
        // The checkpoint's own thread gives way to everybody; this one waits
        // anyway, so it helps.
        if self.checkpoint_step(Pace::Idle)? {
            return Ok(());
        }
        let start = self.store.env().now();
        let used = self.store.fullness();
        self.done
            .wait_unless(|| self.store.fullness() < used, Duration::from_millis(2));
        let now = self.store.env().now();
        // Back-pressure lasts as long as a backup that is alive needs.
        let held = self.backups.is_full(&self.store)
            || self.is_held_back(now)
            || self.is_copying()
            || (0..self.lanes.len()).any(|lane| self.store.is_kept(lane));
        let spilled = self.spilled();
        let held = held || std::mem::replace(&mut wait.spilled, spilled) != spilled;
        wait.waited = match held {
            true => Duration::ZERO,
            false => wait.waited + (now - start),
        };
        Ok(())
    }

    fn timeout(&self, what: &str, limit: Duration) -> Error {
        // What an earlier link ended with says nothing of one that is up.
        let why = match self.link_up.load(Acquire) {
            true => Some("the link to it is up, and nothing moves on it".to_owned()),
            false => self
                .link_error
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .clone(),
        };
        Error::Timeout(format!(
            "{what}; the mirror did not move on within {limit:?}{}. The sync point stays in this node's ring and is sent again when the mirror is back; its extents count as changed until then",
            why.map(|w| format!(" ({w})")).unwrap_or_default()
        ))
    }

    /// Whether a whole copy is being made from here or to here.
    fn is_copying(&self) -> bool {
        let now = self.store.env().now();
        self.store.progress.get(now).is_some_and(|c| c.running)
    }

    /// Bytes of the logs that the streams to the mirror have taken, over all
    /// lanes; without those that somebody is sending on at this moment.
    pub(crate) fn handed(&self) -> u64 {
        let lanes = self.lanes.iter();
        let sent = lanes.filter_map(|l| l.tx.try_lock().ok()?.as_ref().map(Tx::taken));
        sent.sum()
    }

    /// How long a sync point waits before it suspects the link:
    /// `resend_timeout`, the time of some round trips over this link, and what
    /// the slowest mirror needs for the bytes that it lacks.
    pub fn resend_after(&self) -> Duration {
        let trip = Duration::from_nanos(self.round_trip.load(Relaxed));
        // Without a link nothing is taken in: it is not waited for.
        let behind = match self.link_up.load(Acquire) {
            true => self.bytes_behind(),
            false => 0,
        };
        let bytes = Duration::from_micros(behind * 1_000_000 / LEAST_PACE);
        self.spec.resend_timeout + (trip * TRIPS).min(LONGEST_TRIPS) + bytes
    }

    fn patience(&self) -> Patience {
        Patience::new(self.resend_after(), self.spec.resend_attempts)
    }

    /// A round trip over the link took `took`. Returns the usual time.
    pub(crate) fn measured(&self, took: Duration) -> Duration {
        let took = took.as_nanos() as u64;
        let usual = match self.round_trip.load(Relaxed) {
            0 => took,
            usual => usual - usual / 8 + took / 8,
        };
        self.round_trip.store(usual, Relaxed);
        Duration::from_nanos(usual)
    }

    /// Says that the link must be made anew.
    pub fn suspect(&self, why: String) {
        *self.link_error.lock().unwrap_or_else(|e| e.into_inner()) = Some(why);
        self.suspect.store(true, Release);
        self.link_work.notify();
    }

    /// Sends what lane `lane` has to send, if nobody else is at it.
    #[inline]
    pub fn send(&self, lane: usize) {
        if let Ok(mut t) = self.lanes[lane].tx.try_lock()
            && let Some(tx) = &mut *t
            && tx.is_behind(self.log(lane))
        {
            let committed = self.committed();
            if let Err(e) = tx.pump(self.log(lane), self.epoch(), committed) {
                *t = None;
                drop(t);
                self.suspect(format!("sending to the mirror: {e}"));
            }
        }
    }

    /// Makes lane `lane` persistent up to its head, if nobody else is at it.
    #[inline]
    pub(crate) fn persist(&self, lane: usize) -> Result<()> {
        let guard = match self.lanes[lane].persist.try_lock() {
            Ok(g) => g,
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
        };
        self.persist_held(lane, guard)
    }

    /// The same, waiting for whoever is at it.
    pub fn persist_wait(&self, lane: usize) -> Result<()> {
        let guard = self.lanes[lane]
            .persist
            .lock()
            .unwrap_or_else(|e| e.into_inner());
        self.persist_held(lane, guard)
    }

    fn persist_held(&self, lane: usize, mut at: std::sync::MutexGuard<'_, u64>) -> Result<()> {
        let log = self.log(lane);
        let head = log.head();
        if *at == head {
            return Ok(());
        }
        self.store.check()?;
        let r = log.persist(head);
        self.store.fail(r)?;
        let mut advanced = false;
        while let Some((r, _, next)) = log.record(*at) {
            if next > head {
                break;
            }
            advanced |= self.persisted.mark(r.header.lsn);
            *at = next;
        }
        drop(at);
        if advanced {
            self.done.notify();
        }
        Ok(())
    }

    /// Receives what has arrived on lane `lane`, if nobody else is at it.
    /// True if an acknowledgement came.
    #[inline]
    pub fn receive(&self, lane: usize) -> bool {
        let Ok(mut slot) = self.lanes[lane].rx.try_lock() else {
            return false;
        };
        self.receive_held(lane, &mut slot)
    }

    #[inline]
    fn receive_held(&self, lane: usize, slot: &mut RxSlot) -> bool {
        let Some(rx) = &mut slot.rx else { return false };
        let came = match rx.poll() {
            Ok(None) if !slot.held => return false,
            Ok(None) => false,
            Ok(Some(ack)) => {
                self.mirror_level.store(ack.level, Relaxed);
                slot.acked = slot.acked.max(ack.lsn);
                let at = match ack.waits {
                    true => self.store.env().now().as_nanos() as u64,
                    false => 0,
                };
                self.lanes[lane].waits.store(at, Relaxed);
                true
            }
            Err(e) => {
                slot.end();
                self.suspect(e.to_string());
                return false;
            }
        };
        let log = self.log(lane);
        let mut advanced = false;
        slot.held = false;
        while let Some((r, _, next)) = log.record(rx.acked_at) {
            if r.header.lsn > slot.acked {
                break;
            }
            if self.store.mutations.ack_gap.load(Relaxed) {
                self.acked.advance(r.header.lsn);
            }
            if !self.acked.has_room(r.header.lsn) {
                // Another lane is far behind: this waits for it.
                slot.held = true;
                break;
            }
            advanced |= self.acked.mark(r.header.lsn);
            rx.acked_at = next;
        }
        if advanced {
            self.done.notify();
        }
        came || advanced
    }

    /// The mirror waits for a backup, and said so within the silence after
    /// which its link would count as broken: no fault of the mirror's, nor of
    /// the link to it.
    pub fn is_held_back(&self, now: Duration) -> bool {
        let (now, silence) = (now.as_nanos() as u64, self.silence.load(Relaxed));
        self.lanes.iter().any(|l| {
            let said = l.waits.load(Relaxed);
            said != 0 && now.saturating_sub(said) < silence
        })
    }

    /// A link is over; whoever waits for the next one is not held back. Links
    /// count as broken after `silence`.
    pub(crate) fn forget_waits(&self, silence: Duration) {
        self.silence.store(silence.as_nanos() as u64, Relaxed);
        for lane in &self.lanes {
            lane.waits.store(0, Relaxed);
        }
    }

    /// One turn of everything on a lane that does not block for the network.
    pub fn drive(&self, lane: usize) -> Result<()> {
        self.send(lane);
        if self.rule().local {
            self.persist(lane)?;
        }
        self.receive(lane);
        Ok(())
    }

    /// Waits until `lsn`, appended on `lane`, is committed.
    pub fn wait(&self, lsn: u64, lane: usize) -> Result<()> {
        self.wait_hinted(lsn, lane, 0)
    }

    /// The same; the next record may have about `hint` bytes.
    #[inline]
    fn wait_hinted(&self, lsn: u64, lane: usize, hint: usize) -> Result<()> {
        let rule = self.rule();
        // In this order: send, write the own log, receive.
        if rule.mirror || !self.spec.background_send {
            self.send(lane);
        }
        if rule.local {
            self.persist(lane)?;
        }
        if self.committed() >= lsn {
            if self.spec.background_send {
                self.link_work.notify();
            }
            return Ok(());
        }
        if rule.mirror && self.spin_for(lsn, lane, hint) {
            return Ok(());
        }
        self.wait_long(lsn, lane)
    }

    /// The short way: polls for the acknowledgement, for a bounded time. The
    /// thread that has the lane's receiving end polls the link, others poll
    /// what it finds. False if it did not come.
    #[inline]
    fn spin_for(&self, lsn: u64, lane: usize, hint: usize) -> bool {
        let env = &**self.store.env();
        self.log(lane).prefetch(hint);
        let mut start = None;
        loop {
            if let Ok(mut slot) = self.lanes[lane].rx.try_lock() {
                loop {
                    if slot.rx.is_none() {
                        return self.committed() >= lsn;
                    }
                    let came = self.receive_held(lane, &mut slot);
                    if self.committed() >= lsn {
                        slot.spinner.hit(env);
                        return true;
                    }
                    if came {
                        // This lane may be done and another lack a record.
                        break;
                    }
                    if !slot.spinner.spin(env) {
                        return false;
                    }
                    std::hint::spin_loop();
                }
            }
            for _ in 0..64 {
                if self.committed() >= lsn {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = env.now();
            if now - *start.get_or_insert(now) >= self.spec.spin {
                return false;
            }
        }
    }

    #[cold]
    fn wait_long(&self, lsn: u64, lane: usize) -> Result<()> {
        let env = self.store.env();
        let mut start = env.now();
        let mut patience = self.patience();
        let mut motion = Motion::of(self, lsn);
        loop {
            if self.committed() >= lsn {
                return Ok(());
            }
            self.check()?;
            // The prefix may hang on any lane, also one whose thread gave up.
            for i in 0..self.lanes.len() {
                self.drive((lane + i) % self.lanes.len())?;
            }
            if self.rule().local && self.persisted.get() < lsn {
                // Another thread is writing the log: its end is waited for
                // here, since nothing on the link would tell of it.
                for i in 0..self.lanes.len() {
                    self.persist_wait(i)?;
                }
            }
            if self.committed() >= lsn {
                return Ok(());
            }
            // Before what tells that it has ended.
            let confirms = self.standstill(Duration::ZERO);
            let now = env.now();
            if motion.goes_on(self) || self.is_held_back(now) {
                // The bounds are on standstill. As long as the mirror says that
                // it is held back; a link that fails is noticed by its silence.
                (start, patience) = (now, self.patience());
            }
            let linked = self.link_up.load(Acquire);
            match patience.step(now - start) {
                Verdict::Wait => {}
                // The records come behind a spill file that the mirror is syncing.
                Verdict::GiveUp if !linked && now - start < confirms => {}
                // A link that is still being made gets its time.
                Verdict::Resend if !linked => {}
                // Nor is it the link that keeps it.
                Verdict::Resend if self.is_held() => {}
                Verdict::Resend => self.suspect("no acknowledgement in time".into()),
                Verdict::GiveUp => {
                    self.link_work.notify();
                    return Err(self.timeout(&format!("LSN {lsn}"), patience.limit()));
                }
            }
            let slice = Duration::from_millis(2).min(self.spec.resend_timeout);
            let held = if self.rule().mirror && self.acked.get() < lsn {
                self.lanes[lane].rx.try_lock().ok()
            } else {
                None
            };
            match held {
                Some(mut slot) if slot.rx.is_some() => {
                    if let Some(rx) = &mut slot.rx {
                        rx.wait(slice);
                    }
                    self.receive_held(lane, &mut slot);
                    drop(slot);
                    // Another thread may have been turned away meanwhile.
                    self.done.notify();
                }
                _ => {
                    drop(held);
                    self.done.wait_unless(|| self.committed() >= lsn, slice);
                }
            }
        }
    }

    /// Fails where this node or the mirror cannot make a file that large: before
    /// there is a record of it.
    pub fn check_size(&self, size: u64) -> Result<()> {
        let here = self.store.area().max_file();
        let there = self.mirror_max_file.load(Acquire);
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

    /// One sync point from beginning to end. Returns its LSN.
    #[inline]
    pub fn commit(&self, pieces: &[Piece<'_>]) -> Result<u64> {
        let begun = self.begin_commit(pieces)?;
        self.finish_commit(&begun)?;
        Ok(begun.lsn)
    }

    /// Its first half: it has its LSN, and its bytes are in the log. An error
    /// means that they are not.
    #[inline]
    pub fn begin_commit(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        let bytes: usize = pieces.iter().map(|p| p.len() + OP_LEN).sum();
        if self.spills(bytes) {
            return self.begin_copied(pieces);
        }
        let (lsn, lane) = self.append(pieces)?;
        let hint = bytes + RECORD_OVERHEAD;
        Ok(Begun { lsn, lane, hint })
    }

    /// The same by a spill file, whatever its size: for pieces that are copied.
    pub fn begin_copied(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        self.spilling.fetch_add(1, SeqCst);
        let begun = self.begin_spilled(pieces);
        self.spilling.fetch_sub(1, SeqCst);
        begun
    }

    /// As `begin_copied`, but never waits: the bytes are taken, the rest is done by
    /// `spill_step`. For drivers that move time themselves.
    pub fn try_spill_now(&self, pieces: &[Piece<'_>]) -> Result<Spilling> {
        self.spilling.fetch_add(1, SeqCst);
        let begun = self.write_spill(pieces);
        if begun.is_err() {
            self.spilling.fetch_sub(1, SeqCst);
        }
        begun
    }

    /// Goes on with it: the last LSN and the lane of its record once there is one,
    /// `None` while the mirror lacks the file or the log has no room. It is over
    /// after anything else than `None`.
    pub fn spill_step(&self, s: &mut Spilling, lane: usize) -> Result<Option<(u64, usize)>> {
        let next = match s.handed || self.is_handed(s)? {
            false => return Ok(None),
            true => self.try_append_now(&[s.piece()], lane),
        };
        s.handed = true;
        next
    }

    /// A spilling sync point is over, with its record in the log or without one.
    pub fn spill_over(&self, s: &Spilling, appended: bool) {
        self.forget_spill(s, appended);
        self.spilling.fetch_sub(1, SeqCst);
    }

    /// Whether a sync point of these pieces takes its bytes before it has an LSN.
    pub fn must_spill(&self, pieces: &[Piece<'_>]) -> bool {
        self.spills(pieces.iter().map(|p| p.len() + OP_LEN).sum())
    }

    #[inline]
    fn spills(&self, bytes: usize) -> bool {
        bytes > self.spec.max_record && self.is_too_large(bytes + bytes / 64)
    }

    /// Its second half: waits until it is committed.
    #[inline]
    pub fn finish_commit(&self, begun: &Begun) -> Result<()> {
        self.wait_hinted(begun.lsn, begun.lane, begun.hint)
    }

    /// In its place, for who does not wait: sends it, if nobody else is sending.
    /// The checkpoint's thread writes it to the own log, the link's thread sends
    /// what is left over and takes the acknowledgement.
    pub fn start_async(&self, begun: &Begun) {
        if self.spec.background_send {
            self.link_work.notify();
        } else {
            self.send(begun.lane);
        }
        self.checkpoint_work.notify();
    }

    /// The last LSN, when everybody who took one before has appended: who
    /// appends after this has seen what the caller wrote before.
    pub fn settled_last(&self) -> u64 {
        for lane in &self.lanes {
            drop(lane.append.lock().unwrap_or_else(|e| e.into_inner()));
        }
        self.last()
    }

    /// The same, if no sync point has read its bytes already and gets its LSN
    /// later: who appends after this reads after it.
    pub fn settled_unspilled(&self) -> Option<u64> {
        let spills = self.spilling.load(SeqCst) > 0;
        (!spills).then(|| self.settled_last())
    }

    /// A sync point larger than the log: its operations go to a spill file on
    /// both nodes, durable there, and then one small record names it.
    #[cold]
    fn begin_spilled(&self, pieces: &[Piece<'_>]) -> Result<Begun> {
        let mut s = self.write_spill(pieces)?;
        let begun = self.hand_spill(&mut s).and_then(|()| {
            let (lsn, lane) = self.append(&[s.piece()])?;
            Ok(Begun { lsn, lane, hint: 0 })
        });
        self.forget_spill(&s, begun.is_ok());
        begun
    }

    fn write_spill(&self, pieces: &[Piece<'_>]) -> Result<Spilling> {
        self.check()?;
        let id = self.store.env().random();
        let written = self.write_spill_as(id, pieces);
        if written.is_err() {
            self.store.remove_spill(id);
        }
        Ok(Spilling {
            file: written?,
            usual: self.patience().limit(),
            quiet: self.store.env().now(),
            spilled: self.spilled(),
            handed: false,
        })
    }

    /// Nobody is to get it any more but by its record, if it has one.
    fn forget_spill(&self, s: &Spilling, appended: bool) {
        let id = s.file.id;
        let mut handed = self.spill.lock().unwrap_or_else(|e| e.into_inner());
        // It may be the turn of another.
        handed.take_if(|(s, _)| s.id == id);
        drop(handed);
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        reached.remove(&id);
        drop(reached);
        if !appended {
            self.store.remove_spill(id);
        }
    }

    fn write_spill_as(&self, id: u64, pieces: &[Piece<'_>]) -> Result<SpillFile> {
        let file = self.store.spill_file(id)?;
        let fail = |e: std::io::Error| Error::io("writing a spill file", &e);
        let parts = cut(pieces, 1 << 20);
        let (mut buf, mut copied) = (Vec::new(), Vec::new());
        let mut len = 0u64;
        for (i, part) in parts.iter().enumerate() {
            let part = &read_copies(part, &mut copied)
                .map_err(|e| Error::io("reading what goes to a spill file", &e))?[..];
            let payload = part.iter().map(Piece::len).sum();
            buf.resize(RecordWriter::len_for(part.len(), payload), 0);
            let last = i + 1 == parts.len();
            let n = encode(
                &mut buf,
                part,
                self.volume.load(Relaxed),
                1,
                1,
                i as u32,
                last,
                0,
            );
            file.write_at(&buf[..n], len).map_err(fail)?;
            len += n as u64;
        }
        file.sync().map_err(fail)?;
        let env = self.store.env();
        env.sync_dir(&self.store.spec().meta).map_err(fail)?;
        Ok(SpillFile { id, len, file })
    }

    /// Waits until the mirror has a spill file, where one must have it.
    fn hand_spill(&self, s: &mut Spilling) -> Result<()> {
        while !self.is_handed(s)? {
            self.link_work.notify();
            self.done.wait_unless(|| false, Duration::from_millis(1));
        }
        Ok(())
    }

    /// Whether the mirror has a spill file, where one must have it; or why it is
    /// waited for no longer.
    fn is_handed(&self, s: &mut Spilling) -> Result<bool> {
        let needed = self.rule().mirror || self.link_up.load(Acquire);
        if !needed {
            return Ok(true);
        }
        self.check()?;
        {
            // One spill at a time: the others wait their turn.
            let mut slot = self.spill.lock().unwrap_or_else(|e| e.into_inner());
            match &*slot {
                None => *slot = Some((s.file.clone(), false)),
                Some((x, true)) if x.id == s.file.id => {
                    // Whether the log has room for its record is not the next one's.
                    *slot = None;
                    return Ok(true);
                }
                Some(_) => {}
            }
        }
        // Before what tells that it has ended.
        let limit = self.standstill(s.usual);
        let now = self.store.env().now();
        let before = std::mem::replace(&mut s.spilled, self.spilled());
        if s.spilled > before || self.is_copying() {
            s.quiet = now;
        }
        if now.saturating_sub(s.quiet) > limit {
            let spill_error = self.spill_error.lock().unwrap_or_else(|e| e.into_inner());
            let link_error = self.link_error.lock().unwrap_or_else(|e| e.into_inner());
            let why = spill_error.as_ref().or(link_error.as_ref());
            return Err(Error::Timeout(format!(
                "the spill file of a large sync point got no further to the mirror within {limit:?}{}. There is no record of this sync point; its extents count as changed",
                why.map(|w| format!(" ({w})")).unwrap_or_default()
            )));
        }
        Ok(false)
    }

    /// Bytes of spill files that got further than ever before.
    pub fn spilled(&self) -> u64 {
        self.spilled.load(Acquire)
    }

    /// How long nothing may move towards a mirror that is otherwise waited for
    /// `usual`: one that syncs a whole spill file says nothing meanwhile.
    pub fn standstill(&self, usual: Duration) -> Duration {
        match self.confirming.load(Acquire) {
            true => usual.max(COPY_SILENCE),
            false => usual,
        }
    }

    /// The link has taken a spill file up to byte `at`; one more than it has: the
    /// mirror has confirmed it.
    pub(crate) fn spill_reached(&self, id: u64, at: u64) {
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        let had = reached.entry(id).or_default();
        if at > *had {
            self.spilled.fetch_add(at - *had, AcqRel);
            *had = at;
        }
    }

    /// A session begins that sends these spill files first: how far others got
    /// counts no more.
    pub(crate) fn spills_begin(&self, ids: impl Iterator<Item = u64>) {
        let ids: Vec<u64> = ids.collect();
        let own = self.spill_wanted().map(|s| s.id);
        let mut reached = self.reached.lock().unwrap_or_else(|e| e.into_inner());
        reached.retain(|id, _| Some(*id) == own || ids.contains(id));
    }

    /// Whether all of a spill file is sent and its confirmation is out.
    pub(crate) fn set_confirming(&self, is: bool) {
        self.confirming.store(is, Release);
    }

    /// The link on which a spill file was sent has ended.
    pub(crate) fn spill_failed(&self, why: &str) {
        let mut error = self.spill_error.lock().unwrap_or_else(|e| e.into_inner());
        *error = Some(why.to_owned());
    }

    /// The spill file that the session is to send.
    pub(crate) fn spill_wanted(&self) -> Option<SpillFile> {
        match &*self.spill.lock().unwrap_or_else(|e| e.into_inner()) {
            Some((s, false)) => Some(s.clone()),
            _ => None,
        }
    }

    /// The mirror has a spill file durably.
    pub(crate) fn spill_arrived(&self, id: u64) {
        if let Some((s, there)) = &mut *self.spill.lock().unwrap_or_else(|e| e.into_inner())
            && s.id == id
        {
            self.spill_reached(id, s.len + 1);
            *there = true;
            *self.spill_error.lock().unwrap_or_else(|e| e.into_inner()) = None;
        }
        self.done.notify();
    }

    /// Bytes of records that the mirror has not acknowledged.
    pub fn bytes_behind(&self) -> u64 {
        (0..self.lanes.len())
            .filter_map(|i| {
                let slot = self.lanes[i].rx.try_lock().ok()?;
                // Without a link, by what the last one acknowledged.
                let at = slot.rx.as_ref().map_or(slot.acked_at, |r| r.acked_at);
                let log = self.log(i);
                Some(log.head().saturating_sub(at.max(log.start())))
            })
            .sum()
    }

    /// The mirror is lost, seen at `now`: what it acknowledged and the own log does
    /// not have yet is in this node's memory alone. Nothing is where the mode has
    /// the own log acknowledge too, and with a log that is memory everything stays so.
    pub(crate) fn mirror_lost(&self, now: Duration) {
        let rule = self.rule();
        let alone = rule.local || !rule.mirror || !self.store.level().is_persistent();
        let mut risk = self.risk.lock().unwrap_or_else(|e| e.into_inner());
        if alone || risk.is_some() || self.store.check().is_err() {
            return;
        }
        let of = |l: &OutLane| l.rx.lock().unwrap_or_else(|e| e.into_inner()).acked_at;
        let ends: Vec<u64> = self.lanes.iter().map(of).collect();
        *risk = Some(Risk {
            bytes: self.unpersisted(&ends),
            since: now,
            ends,
        });
        drop(risk);
        self.settle_risk(false);
    }

    /// Bytes before `ends` that the own log does not have.
    fn unpersisted(&self, ends: &[u64]) -> u64 {
        let lanes = ends.iter().enumerate();
        lanes
            .map(|(i, end)| end.saturating_sub(self.log(i).persisted()))
            .sum()
    }

    /// Counts what is at risk, and ends that once the own log has it, or the mirror
    /// is back with all of it.
    pub(crate) fn settle_risk(&self, back: bool) {
        let mut risk = self.risk.lock().unwrap_or_else(|e| e.into_inner());
        let Some(r) = &*risk else {
            return;
        };
        let left = if back { 0 } else { self.unpersisted(&r.ends) };
        let live = |l| self.store.logs()[0].live(l);
        live(Live::AtRisk).store(left, Relaxed);
        if left > 0 {
            return;
        }
        let took = self.store.env().now().saturating_sub(r.since);
        live(Live::LastRisk).store(r.bytes, Relaxed);
        live(Live::LastRiskTime).store(took.as_micros() as u64, Relaxed);
        // Who reads this one first sees those of it, or of a later one.
        live(Live::Losses).fetch_add(1, Release);
        *risk = None;
    }

    /// One turn of the background's work on the own copy: persists what the
    /// mode does not on the path, applies what is due by the policy and by what
    /// the program does, checkpoints when the log is half full or the program
    /// idle. True if it did something.
    pub fn checkpoint_step(&self, pace: Pace) -> Result<bool> {
        self.store.check()?;
        if !self.store.mutations.apply_before_log.load(Relaxed) {
            for lane in 0..self.lanes.len() {
                self.persist_wait(lane)?;
            }
        }
        self.settle_risk(false);
        let before = self.store.applied();
        let limit = self.apply_limit();
        let full = self.store.pressure() > 0.5;
        let idle = pace == Pace::Idle;
        // One checkpoint for so much that its syncs do not count, but not for so
        // much that who waits for room waits long.
        let piece = (self.spec.smallest_log / 8).max(LEAST_PIECE);
        let due = full || idle || pace == Pace::Pressed || {
            let enough = limit - before.min(limit) >= self.spec.checkpoint_threshold;
            match self.spec.write_back {
                WriteBack::Eager => enough,
                WriteBack::Async => self.store.has_waiting(self.spec.write_back_pages),
                WriteBack::Auto => {
                    enough && pace == Pace::Quiet || self.store.waiting_bytes() >= piece
                }
            }
        };
        if due {
            self.store.apply(limit, piece as usize)?;
        }
        let live = &self.store.logs()[0];
        live.live(Live::Last).store(self.last(), Relaxed);
        live.live(Live::Committed).store(self.committed(), Relaxed);
        live.live(Live::Acked).store(self.acked.get(), Relaxed);
        live.live(Live::Persisted)
            .store(self.persisted.get(), Relaxed);
        live.live(Live::LinkUp)
            .store(self.link_up.load(Relaxed) as u64, Relaxed);
        live.live(Live::BytesBehind)
            .store(self.bytes_behind(), Relaxed);
        let applied = self.store.applied();
        if (full || idle) && applied > self.store.checkpointed() {
            self.store.checkpoint_if(|lsn| self.may_lose(lsn))?;
            self.done.notify();
        }
        let released = self.store.release_held(|lsn| self.may_lose(lsn))?;
        if released {
            self.done.notify();
        }
        Ok(applied > before || released)
    }

    /// What the mirror lacks must stay in the ring while it follows, also where
    /// it was kept behind the checkpoint for a backup.
    fn may_lose(&self, lsn: u64) -> bool {
        !self.link_up.load(Acquire) || lsn <= self.acked.get()
    }

    /// The level at which this node and its mirror have `lsn`; `None` where it
    /// is not there or not known to be.
    pub fn copies(&self, lsn: u64) -> (Option<Level>, Option<Level>) {
        let own = if lsn > self.last() {
            None
        } else if lsn <= self.persisted.get() {
            Some(self.store.level())
        } else {
            Some(Level::Received)
        };
        let mirror = (lsn <= self.acked.get() && lsn <= self.last())
            .then(|| Level::from_u16(self.mirror_level.load(Relaxed)))
            .flatten();
        (own, mirror)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use mojim_config::MediumKind;
    use mojim_linux::Os;
    use mojim_store::log::LogSpec;
    use mojim_store::store::StoreSpec;

    /// A primary without a mirror, of a volume in a directory of its own.
    fn alone(name: &str, write_back: WriteBack) -> (Primary, std::path::PathBuf) {
        alone_on(name, write_back, MediumKind::Dram)
    }

    fn alone_on(
        name: &str,
        write_back: WriteBack,
        medium: MediumKind,
    ) -> (Primary, std::path::PathBuf) {
        let dir = std::env::temp_dir().join(format!("mojim-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let env: Arc<dyn mojim_env::Env> = Arc::new(Os::new().unwrap());
        let log = LogSpec {
            lane: 0,
            medium,
            path: dir.join("log"),
            ring: dir.join("ring"),
            size: LOG,
        };
        let spec = StoreSpec {
            cluster: "c".into(),
            volume: "v".into(),
            node: "a".into(),
            dir: dir.join("data"),
            meta: dir.join("meta"),
            logs: vec![log],
            rank: 0,
            holders: 2,
            max_open: 16,
            copy_streams: 1,
            by_hand: true,
        };
        let store = Arc::new(Store::open(&env, spec).unwrap());
        let spec = PrimarySpec {
            rule: AckRule::LOCAL,
            background_send: false,
            spin: Duration::ZERO,
            resend_timeout: Duration::from_secs(1),
            resend_attempts: 1,
            max_record: 4096,
            checkpoint_threshold: 2,
            write_back,
            write_back_pages: 5,
            smallest_log: LOG,
            secondary_threshold: 0,
        };
        (Primary::new(store, spec), dir)
    }

    const LOG: u64 = 16 << 20;

    thread_local! {
        /// What other threads do at the next point.
        static OTHERS: RefCell<Option<Box<dyn FnMut()>>> = RefCell::default();
    }

    pub(super) fn interleave() {
        let others = OTHERS.take();
        if let Some(mut others) = others {
            others();
            OTHERS.set(Some(others));
        }
    }

    /// A thread that was about to acknowledge stood still between its look at the
    /// rule and its looks at the prefixes, while the mirror was given up and another
    /// one began to join: it acknowledged by that one alone what the view says is
    /// committed only in the own log. Every interleaving of one thread's looks with
    /// such a history, with and without a lease.
    #[test]
    fn nothing_is_committed_that_was_at_no_instant() {
        type Step = fn(&Primary);
        let history: &[Step] = &[
            // Its mirror is silent.
            |p| p.set_rule(AckRule::BOTH),
            |p| p.persisted.advance(10),
            // The view says that it is alone.
            |p| p.set_rule(AckRule::LOCAL),
            |p| p.acked.reset(4),
            // The mirror joins, and has what is not in the own log yet.
            |p| p.set_rule(AckRule::BOTH),
            |p| p.acked.advance(12),
            // It is lost again, and comes back without what it had.
            |p| p.set_rule(AckRule::LOCAL),
            |p| p.acked.reset(5),
            |p| p.persisted.advance(11),
            |p| p.set_rule(AckRule::BOTH),
            |p| p.acked.advance(13),
            |p| p.persisted.advance(13),
            // It is a member.
            |p| p.set_rule(AckRule::MIRROR),
            |p| p.acked.advance(14),
        ];
        let (p, dir) = alone("interleavings", WriteBack::Eager);
        let p = Arc::new(p);
        // All ways to have some of the history done before, and some at each point.
        let n = history.len();
        let mut looks = 0;
        for leased in [false, true] {
            for begin in 0..n {
                for first in begin..=n {
                    for second in first..=n {
                        for third in second..=n {
                            p.persisted.reset(5);
                            p.acked.reset(7);
                            p.rule.store(pack(AckRule::MIRROR), SeqCst);
                            p.held_at.store(0, SeqCst);
                            history[..begin].iter().for_each(|step| step(&p));
                            if leased {
                                p.lease_until(Duration::MAX / 2);
                                // What it held before is not looked at here.
                                p.held_at.store(0, SeqCst);
                            }
                            let at =
                                |p: &Primary| p.rule().committed(p.persisted.get(), p.acked.get());
                            let seen = Rc::new(RefCell::new(vec![at(&p)]));
                            let mut ends = vec![third, second, first];
                            let (mut done, others) = (begin, (p.clone(), seen.clone()));
                            OTHERS.set(Some(Box::new(move || {
                                let (p, seen) = &others;
                                let end = ends.pop().unwrap_or(done);
                                for step in &history[done..end] {
                                    step(p);
                                    seen.borrow_mut().push(at(p));
                                }
                                done = end;
                            })));
                            let committed = p.committed();
                            OTHERS.take();
                            let seen = seen.borrow();
                            // It may be less than at the end, and more than at none.
                            let most = seen.iter().max().expect("the first");
                            assert!(
                                committed <= *most,
                                "{committed} of {seen:?}; {begin}, {first}, {second}, {third}"
                            );
                            looks += 1;
                        }
                    }
                }
            }
        }
        assert!(looks > 5_000, "{looks}");
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// What each policy applies, by what waits and what the program does.
    #[test]
    fn what_waits_is_written_back_by_the_policy() {
        use WriteBack::{Async, Auto, Eager};
        let store_of = |write_back: WriteBack| {
            let (p, dir) = alone(&format!("write-back-{write_back}"), write_back);
            p.store.make_new().unwrap();
            p.begin(1, mojim_format::View::default()).unwrap();
            p.ready.store(true, Release);
            (p, dir)
        };
        let bytes = vec![1u8; 2000];
        let append = |p: &Primary, offset: u64, len: usize| {
            let ptr = bytes.as_ptr();
            let file = 1;
            p.append(&[Piece::Write {
                file,
                offset,
                ptr,
                len,
            }])
            .unwrap();
        };
        let step = |p: &Primary, pace| {
            p.checkpoint_step(pace).unwrap();
            p.last() - p.store.applied()
        };
        for policy in [Eager, Async, Auto] {
            let (p, dir) = store_of(policy);
            // One record of one page.
            append(&p, 0, 8);
            assert_eq!(step(&p, Pace::Busy), 1, "{policy}");
            assert_eq!(step(&p, Pace::Quiet), 1, "{policy}: below the threshold");
            // Two of three pages.
            append(&p, 4090, 8);
            let left = step(&p, Pace::Busy);
            assert_eq!(left, if policy == Eager { 0 } else { 2 }, "{policy}");
            let left = step(&p, Pace::Quiet);
            assert_eq!(left, if policy == Async { 2 } else { 0 }, "{policy}");
            // Three of five.
            append(&p, 4090, 8);
            let left = step(&p, Pace::Busy);
            assert_eq!(left, if policy == Async { 0 } else { 1 }, "{policy}");
            assert_eq!(step(&p, Pace::Pressed), 0, "{policy}");
            assert_eq!(p.store.checkpointed(), 0, "{policy}");
            // Applied ones do not count again.
            append(&p, 0, 8);
            assert_eq!(step(&p, Pace::Busy), 1, "{policy}");
            assert_eq!(step(&p, Pace::Idle), 0, "{policy}");
            assert_eq!(p.store.checkpointed(), p.last(), "{policy}");
            // Half of the log.
            if policy == Async {
                while p.store.pressure() <= 0.5 {
                    append(&p, 0, 0);
                }
                step(&p, Pace::Busy);
                assert_eq!(p.store.checkpointed(), p.store.applied());
                assert!(p.store.pressure() < 0.5);
            }
            // Much, of few pages.
            if policy == Auto {
                let before = p.store.applied();
                while p.store.waiting_bytes() < LOG / 8 {
                    assert_eq!(p.store.applied(), before);
                    append(&p, 0, bytes.len());
                    if p.store.waiting_bytes() < LOG / 8 {
                        step(&p, Pace::Busy);
                    }
                }
                assert_eq!(step(&p, Pace::Busy), 0);
            }
            drop(p);
            std::fs::remove_dir_all(&dir).unwrap();
        }
    }

    /// Nobody knew how much would have gone with the primary's power, and until when.
    /// And all of the log counted as missing at a mirror that was gone.
    #[test]
    fn what_a_lost_mirror_acknowledged_is_at_risk_until_the_own_log_has_it() {
        let (p, dir) = alone_on("risk", WriteBack::Async, MediumKind::Disk);
        p.store.make_new().unwrap();
        p.begin(1, mojim_format::View::default()).unwrap();
        p.ready.store(true, Release);
        p.set_rule(AckRule::MIRROR);
        let bytes = [1u8; 8];
        let append = || {
            let ptr = bytes.as_ptr();
            let (file, offset, len) = (1, 0, bytes.len());
            p.append(&[Piece::Write {
                file,
                offset,
                ptr,
                len,
            }])
            .unwrap();
            p.log(0).head()
        };
        let start = p.log(0).persisted();
        append();
        let acked_at = append();
        let head = append();
        p.lanes[0].rx.lock().unwrap().acked_at = acked_at;
        assert_eq!(p.bytes_behind(), head - acked_at);
        let live = |l| p.store.logs()[0].live(l).load(Relaxed);
        let told = || [Live::AtRisk, Live::LastRisk, Live::Losses].map(live);
        let lost = || p.mirror_lost(p.store.env().now());
        let bytes_at_risk = acked_at - start;
        lost();
        assert_eq!(told(), [bytes_at_risk, 0, 0]);
        std::thread::sleep(Duration::from_millis(2));
        // A second link that breaks is the same loss.
        lost();
        p.checkpoint_step(Pace::Busy).unwrap();
        assert_eq!(told(), [0, bytes_at_risk, 1]);
        assert!(live(Live::LastRiskTime) >= 2000);
        lost();
        assert_eq!(told(), [0, 0, 2]);
        // Or until a mirror is back that has all of it.
        p.lanes[0].rx.lock().unwrap().acked_at = append();
        lost();
        assert!(live(Live::AtRisk) > 0);
        p.settle_risk(true);
        assert_eq!(told()[0], 0);
        assert_eq!(live(Live::Losses), 3);
        // What counted is in the own log by the rule.
        p.set_rule(AckRule::BOTH);
        lost();
        assert_eq!(live(Live::Losses), 3);
        p.pair_with("another");
        assert_eq!(p.bytes_behind(), p.log(0).head() - p.log(0).start());
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Nobody but the program knew that its copy had failed.
    #[test]
    fn a_copy_that_fails_says_so_where_others_look() {
        let (p, dir) = alone("failed", WriteBack::Eager);
        let failed = || p.store.logs()[0].live(Live::Failed).load(Relaxed);
        assert_eq!(failed(), 0);
        let e = Error::Poisoned("no room".into());
        assert!(p.store.fail::<()>(Err(e)).is_err());
        assert_eq!(failed(), 1);
        drop(p);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// The lease was looked at by the session's thread only: a thread that slept
    /// with it, or ran while it waited for a disk, acknowledged what a backup had
    /// given up.
    #[test]
    fn what_comes_after_a_lease_is_not_committed_whoever_looks() {
        let (p, dir) = alone("lease", WriteBack::Eager);
        let env = p.store.env().clone();
        let hour = Duration::from_secs(3600);
        p.lease_until(env.now() + hour);
        p.persisted.reset(5);
        assert_eq!(p.committed(), 5);
        // It ends, and no other thread has noticed.
        p.lease_until(env.now());
        p.persisted.reset(9);
        assert_eq!(p.committed(), 5);
        // Renewed, but held for another reason; then not.
        p.lease_until(env.now() + hour);
        p.hold();
        assert_eq!(p.committed(), 5);
        p.let_go();
        assert_eq!(p.committed(), 9);
        drop(p);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
