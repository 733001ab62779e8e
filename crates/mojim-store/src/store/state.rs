//! The fields of a store, their locks, and the superblock.
//!
//! The other files of `store` hold the operations. Types that refer to a store and are
//! referred to by it are defined here too, so that none of these files imports `store.rs`.
//!
//! Invariants:
//!
//! - The lock of checkpoints is taken first, then the applier's. The data area's is taken before
//!   the superblock's, and `durable` last. A thread that only reads takes the applier's lock
//!   behind all that wait for it ([`Gate`]).
//! - `update` changes the superblock in memory only once the change is durable.
//! - After the first failure (`fail`) every call that would make something durable
//!   returns that error. So it does while what is committed finds no room in the data files,
//!   except on a primary that serves.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard, OnceLock, RwLock, Weak};
use std::time::Duration;

use mojim_env::locks;
use mojim_env::turns::{self, lock};
use mojim_format::superblock::SUPERBLOCK_VERSION;
use mojim_format::{Level, SUPERBLOCK_LEN, Superblock, crc32c};
use mojim_protocol::History;

use super::applier::Applier;
use super::gate::Gate;
use super::mutations::Mutations;
use crate::area::{Area, OpenFiles};
use crate::log::{Live, Log, LogSpec};
use crate::progress::Progress;
use crate::stage::Stage;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::{Env, Error, File, Locker, Longest, Result};

/// What a store is and where it lies.
#[derive(Debug, Clone)]
pub struct StoreSpec {
    /// The cluster's name.
    pub cluster: String,
    /// The volume's name.
    pub volume: String,
    /// This node's name.
    pub node: String,
    /// The data files.
    pub dir: PathBuf,
    /// Superblock, catalogue, lock, spill files.
    pub meta: PathBuf,
    /// One log per lane.
    pub logs: Vec<LogSpec>,
    /// This node's number among the nodes that hold the volume. It begins only epochs
    /// that equal `rank` modulo `holders`, so that no two nodes begin the same epoch.
    pub rank: u64,
    /// How many nodes hold the volume; at least 2.
    pub holders: u64,
    /// Most data files that are kept open.
    pub max_open: usize,
    /// Streams over which a copy is sent; 1: only the session's own link.
    pub copy_streams: usize,
    /// There is no register: an operator changes the view.
    pub by_hand: bool,
    /// For which purpose the copy is opened.
    pub locker: Locker,
}

impl StoreSpec {
    pub(super) fn logs_hash(&self, align: u64) -> u32 {
        let mut text = format!("{align}");
        for l in &self.logs {
            text += &format!("|{:?}|{}|{}", l.medium, l.path.display(), l.size);
        }
        crc32c(text.as_bytes()).max(1)
    }
}

/// Stands for the mirror in the view of a primary whose mirror is required but not
/// yet a member: the primary may not go on alone, and the mirror may not be promoted.
/// Everything acknowledged is persistent in the primary's own log. No node can have
/// this name.
pub const JOINING: &str = "~";

pub(super) struct SuperblockFile {
    pub(super) file: Arc<dyn File>,
    pub(super) now: Superblock,
    /// Set by a mutation: the last write is not durable yet.
    pub(super) late: bool,
}

/// What shows that sync points behind a copy's tail were acknowledged.
#[derive(Debug, Clone)]
pub(super) struct Missing {
    /// The last LSN of those.
    pub(super) known: u64,
    /// The log that lacks them, or the catalogue that has a part of them.
    pub(super) path: PathBuf,
    /// Where that log ends.
    pub(super) at: Option<u64>,
}

/// One node's copy of a volume.
pub struct Store {
    pub(super) env: Arc<dyn Env>,
    pub(super) spec: StoreSpec,
    pub(super) logs: Vec<Log>,
    pub(super) level: Level,
    pub(super) superblock: Mutex<SuperblockFile>,
    pub(super) history: RwLock<Arc<History>>,
    pub(super) area: Mutex<Area>,
    /// The area's, for those who do not lock it.
    pub(super) open_files: Arc<OpenFiles>,
    /// The most bytes that the file system allows for a data file.
    pub(super) max_file: u64,
    /// The longest names that data files can have.
    pub(super) longest: Longest,
    pub(super) applier: Gate<Applier>,
    /// Held by whoever makes a checkpoint; taken before the applier's lock.
    pub(super) checkpointing: Mutex<()>,
    /// The logs' positions at the last checkpoint. Nothing is released while it is locked.
    pub(super) durable: Mutex<Vec<u64>>,
    /// Somebody waits until records are applied.
    pub(super) hurried: AtomicBool,
    /// Notified when somebody does.
    pub(super) haste: Event,
    /// When records were last applied, by [`Env::now`], in nanoseconds.
    pub(super) moved: AtomicU64,
    /// Too many changes of names wait to be applied.
    pub(super) laden: AtomicBool,
    pub(super) applied: AtomicU64,
    /// Notified when more is applied, and when bytes were rewritten without a record.
    pub advanced: Event,
    /// Begins with the opening's nonce: what a reader knows of an earlier opening, after
    /// which a page may have been rewritten, is never taken for this one.
    pub(super) rewritten: AtomicU64,
    pub(super) checkpoint: AtomicU64,
    /// Every record above this LSN is in the logs.
    pub(super) retained: AtomicU64,
    pub(super) holds: Mutex<Vec<Weak<Hold>>>,
    pub(super) tail: AtomicU64,
    /// The data area may show parts of records up to this LSN that are not applied yet:
    /// the last process was applying them when it ended, or a rewritten page contained
    /// them.
    pub(super) shown: AtomicU64,
    pub(super) frozen: AtomicBool,
    pub(super) pauses: Mutex<Pauses>,
    pub(super) paused: AtomicBool,
    pub(super) watches: Mutex<Vec<Weak<Watch>>>,
    /// Nothing is applied: a copy is being taken in, or this node has none.
    pub(super) loading: AtomicBool,
    /// The copy that is being taken in.
    pub(super) stage: Mutex<Option<Stage>>,
    /// An incoming copy found no room. If the present copy is not whole, the next
    /// attempt removes its files first.
    pub(super) crowded: AtomicBool,
    /// Progress of the copy that is being received or sent, or of the last one.
    pub progress: Progress,
    pub(super) poison: OnceLock<Error>,
    /// See [`Store::outlast_full_disks`].
    pub(super) outlasts: AtomicBool,
    /// It does not outlast, and `short` says why.
    pub(super) refuses: AtomicBool,
    /// When room was lacking last, and for what, if that was not applied since.
    pub(super) short: Mutex<Option<(Duration, Error)>>,
    /// Bytes of each of the files that keep room, as far as this process knows.
    pub(super) reserved: AtomicU64,
    /// Last LSN of the committed sync point that could not be applied.
    pub(super) unapplied: OnceLock<u64>,
    pub(super) was_clean: bool,
    /// What shows that sync points behind the tail were acknowledged.
    pub(super) missing: Mutex<Option<Missing>>,
    /// Valid records follow an unreadable one in the same log. If false although records
    /// are missing, a log ends before what another lane's log requires.
    pub(super) has_hole: AtomicBool,
    /// The catalogue has a part of a sync point that the logs lack.
    pub(super) has_part: AtomicBool,
    /// The last LSN that was acknowledged according to the logs or the data area when
    /// this copy was opened; less if the copy was truncated or replaced since.
    pub(super) known: AtomicU64,
    /// When the superblock may say again what the logs have.
    pub(super) next_note: Mutex<Duration>,
    /// Durable spill files and their lengths: those that this process synced, or synced
    /// again when it opened the copy.
    pub(super) spills: Mutex<BTreeMap<u64, u64>>,
    /// The spill file that is arriving and not durable yet, and how many of its bytes
    /// were written since its last sync.
    pub(super) arriving: Mutex<Option<(u64, u64)>>,
    /// Test-only switches.
    pub mutations: Mutations,
    pub(super) held: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

/// Keeps records in the logs after their checkpoint, for a reader that has everything
/// up to `lsn`.
#[derive(Debug)]
pub struct Hold {
    pub(super) lsn: AtomicU64,
    /// The threads that fill the logs wait for this reader. A hold that is not firm
    /// keeps at most half a log.
    pub(super) firm: AtomicBool,
}

/// How many pauses there are, and how often all of them were revoked.
#[derive(Default)]
pub(super) struct Pauses {
    pub(super) generation: u64,
    pub(super) count: u64,
}

/// Notes the pages to which records are applied while a copy is read, so that these
/// pages are sent again. Names and sizes do not change meanwhile: a sync point that
/// would change them waits, and with it all later ones.
pub struct Watch {
    pub(super) store: Arc<Store>,
    pub(super) generation: u64,
    pub(super) pages: Mutex<BTreeSet<(u32, u64)>>,
}

impl Store {
    /// This node's surroundings.
    pub fn env(&self) -> &Arc<dyn Env> {
        &self.env
    }

    /// What this store is and where it lies.
    pub fn spec(&self) -> &StoreSpec {
        &self.spec
    }

    /// The logs, one per lane.
    pub fn logs(&self) -> &[Log] {
        &self.logs
    }

    /// The level of safety that `persist` of the logs gives.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The epochs of this copy.
    pub fn history(&self) -> Arc<History> {
        locks::read(&self.history).clone()
    }

    /// The last LSN of the contiguous prefix that recovery found, or where the copy was
    /// truncated or replaced since.
    pub fn tail(&self) -> u64 {
        self.tail.load(Acquire)
    }

    /// The LSN up to which the data area is current.
    pub fn applied(&self) -> u64 {
        self.applied.load(Acquire)
    }

    /// Whether the data area is exactly the result of the records up to `applied`: after
    /// a crash once every record in the logs is applied again, after a page was rewritten
    /// once every record in that page is applied.
    pub fn is_exact(&self) -> bool {
        self.applied() >= self.shown.load(Acquire)
    }

    /// No record above this LSN is in the data area, not even in part.
    pub fn shows(&self) -> u64 {
        self.applied().max(self.shown.load(Acquire))
    }

    /// Somebody waits for records to be applied: a lane for room, a request for the files. The
    /// checkpoint's thread gives way to all others, so another one works meanwhile; never the
    /// one that waits, which has a peer to answer.
    pub fn hurry(&self) {
        if !self.hurried.swap(true, SeqCst) {
            self.haste.notify();
        }
    }

    /// Waits until somebody is in a hurry, `is_over`, or for `timeout`. True if somebody was;
    /// who still is then says so again.
    pub fn await_hurry(&self, is_over: impl Fn() -> bool, timeout: Duration) -> bool {
        let is_over = || self.hurried.load(SeqCst) || is_over();
        self.haste.wait_unless(is_over, timeout);
        self.hurried.swap(false, SeqCst)
    }

    /// When records were applied last, or the copy was opened.
    pub fn last_applied(&self) -> Duration {
        Duration::from_nanos(self.moved.load(Relaxed))
    }

    /// The LSN up to which the data area is durable.
    pub fn checkpointed(&self) -> u64 {
        self.checkpoint.load(Acquire)
    }

    /// The superblock as it is on the disk.
    pub fn superblock(&self) -> Superblock {
        lock(&self.superblock).now.clone()
    }

    /// The data area.
    pub fn area(&self) -> MutexGuard<'_, Area> {
        lock(&self.area)
    }

    /// The data file of a number. One that is open is had without the area's lock, which
    /// whoever applies records holds over syncs of directories. Waits behind all who apply.
    pub fn data_file(&self, id: u32) -> Result<Arc<dyn File>> {
        match self.open_files.get(id) {
            Some(f) => Ok(f),
            None => {
                let _turn = self.applier.lock_behind();
                lock(&self.area).file(id)
            }
        }
    }

    /// The same without a wait; `None` where somebody has the area's lock.
    pub fn data_file_at_once(&self, id: u32) -> Option<Result<Arc<dyn File>>> {
        match self.open_files.get(id) {
            Some(f) => Some(Ok(f)),
            None => Some(turns::try_lock(&self.area)?.file(id)),
        }
    }

    /// The data file of a number, if it is open.
    pub fn open_data_file(&self, id: u32) -> Option<Arc<dyn File>> {
        self.open_files.get(id)
    }

    /// Where a data file lies; `None` where there is none, or somebody has the area's lock.
    pub fn data_file_path(&self, id: u32) -> Option<PathBuf> {
        let area = turns::try_lock(&self.area)?;
        Some(area.path(&area.get(id)?.name))
    }

    /// The most bytes that a data file can have here: the limit of the file system or of the
    /// process, whichever is smaller.
    pub fn max_file(&self) -> u64 {
        self.max_file.min(self.env.file_size_limit())
    }

    /// The longest names that data files can have here.
    pub fn longest_names(&self) -> Longest {
        self.longest
    }

    /// The oldest LSN that the logs still hold, or the one after the last.
    pub fn oldest(&self) -> u64 {
        self.retained.load(Acquire) + 1
    }

    /// Whether the copy had been closed cleanly before it was opened.
    pub fn was_clean(&self) -> bool {
        self.was_clean
    }

    /// The last LSN of the committed sync point whose application failed. The process
    /// that opens this copy again applies it before it acknowledges anything more.
    pub fn unapplied(&self) -> Option<u64> {
        self.unapplied.get().copied()
    }

    /// Notes that the sync point that ends with `lsn` could not be applied.
    pub fn note_unapplied(&self, lsn: u64) {
        let _ = self.unapplied.set(lsn);
    }

    /// The error that poisoned this store, if one did.
    pub fn poisoned(&self) -> Option<&Error> {
        self.poison.get()
    }

    /// Fails if the store is poisoned, or refuses to go on while room is lacking.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.check_poison()?;
        match self.refuses.load(Acquire) {
            true => self.lacks_room().map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    #[inline]
    pub(super) fn check_poison(&self) -> Result<()> {
        match self.poison.get() {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// Remembers the first failure (`docs/reference/invariants.md`, 6).
    pub fn fail<T>(&self, r: Result<T>) -> Result<T> {
        match r {
            Ok(v) => Ok(v),
            Err(e) => {
                if self.mutations.ignore_failed_sync.is_on() {
                    return Err(e);
                }
                let e = self.poison.get_or_init(|| e.into_poison()).clone();
                self.logs()[0].live(Live::Failed).store(1, Release);
                Err(e)
            }
        }
    }

    /// Changes the superblock durably.
    pub fn update(&self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        self.write_superblock(change, true)
    }

    /// [`Store::update`]. Without `durable` (a mutation) the change is only written; it
    /// is synced before the next write.
    pub(super) fn write_superblock(
        &self,
        change: impl FnOnce(&mut Superblock),
        durable: bool,
    ) -> Result<()> {
        self.check()?;
        let mut s = lock(&self.superblock);
        if s.late {
            let synced = s.file.sync();
            self.fail(synced.map_err(|e| Error::poisoned("the superblock before", &e)))?;
        }
        s.late = !durable;
        let mut new = s.now.clone();
        change(&mut new);
        new.sequence = s.now.sequence + 1;
        new.version = SUPERBLOCK_VERSION;
        let at = (new.sequence % 2) * SUPERBLOCK_LEN as u64;
        let wrote = s
            .file
            .write_at(&new.encode()[..], at)
            .and_then(|()| if durable { s.file.sync() } else { Ok(()) })
            .map_err(|e| {
                let path = self.spec.meta.join("superblock");
                Error::poisoned(format!("superblock {}", path.display()), &e)
            });
        if wrote.is_err() && self.mutations.ignore_failed_sync.is_on() {
            s.now = new;
            return Ok(());
        }
        self.fail(wrote)?;
        s.now = new;
        Ok(())
    }

    pub(super) fn live(&self, what: Live) -> &AtomicU64 {
        self.logs[0].live(what)
    }

    /// Makes each lane's log persistent up to its head.
    pub fn persist_all(&self) -> Result<()> {
        self.check()?;
        for log in &self.logs {
            let r = log.persist(log.head());
            self.fail(r)?;
        }
        Ok(())
    }
}
