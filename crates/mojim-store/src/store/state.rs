//! What a store is made of: its parts, the locks between them, and the superblock.
//!
//! The other files of `store` say what is done with it. What refers to a store and is
//! referred to by it is defined here too, so that none of them imports `store.rs`.
//!
//! Invariants:
//! - The applier's lock is taken before any other, and the data area's before the
//!   superblock's.
//! - `update` changes the superblock in memory only once the change is durable.
//! - After the first failure (`fail`) every call that would make something durable
//!   returns that error.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard, OnceLock, RwLock, Weak};

use mojim_format::superblock::SUPERBLOCK_VERSION;
use mojim_format::{Level, SUPERBLOCK_LEN, Superblock, crc32c};
use mojim_protocol::History;

use super::applier::Applier;
use super::mutations::Mutations;
use crate::area::Area;
use crate::log::{Live, Log, LogSpec};
use crate::progress::Progress;
use crate::stage::Stage;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::{Env, Error, File, Result};

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
    /// This node's number among those that hold the volume, and how many they
    /// are: the epochs that it begins are its number modulo theirs, so that no
    /// two nodes ever begin the same one.
    pub rank: u64,
    /// At least 2.
    pub holders: u64,
    /// Most data files that are kept open.
    pub max_open: usize,
    /// Streams over which a copy is sent; 1: the session's own link.
    pub copy_streams: usize,
    /// The view lies in no register: a person changes it.
    pub by_hand: bool,
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

/// Stands for the mirror in the view of a primary whose mirror is required but
/// not yet a member: it may not go on alone, and the mirror may not be promoted.
/// Everything acknowledged is persistent in its own log. No node can have this name.
pub const JOINING: &str = "~";

pub(super) struct SuperblockFile {
    pub(super) file: Arc<dyn File>,
    pub(super) now: Superblock,
    /// By a mutation: it is not durable yet.
    pub(super) late: bool,
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
    pub(super) applier: Mutex<Applier>,
    pub(super) applied: AtomicU64,
    /// Those who wait until more is applied.
    pub advanced: Event,
    pub(super) rewritten: AtomicU64,
    pub(super) checkpoint: AtomicU64,
    /// Every record above is in the logs.
    pub(super) retained: AtomicU64,
    pub(super) holds: Mutex<Vec<Weak<Hold>>>,
    pub(super) tail: AtomicU64,
    /// What was being applied when the last process ended, or came with a page
    /// that was rewritten, may show in the data area, in parts, until it is
    /// applied: not beyond this LSN.
    pub(super) shown: AtomicU64,
    pub(super) frozen: AtomicBool,
    pub(super) pauses: Mutex<Pauses>,
    pub(super) paused: AtomicBool,
    pub(super) watches: Mutex<Vec<Weak<Watch>>>,
    /// Nothing is applied: a copy is being taken in, or there is none.
    pub(super) loading: AtomicBool,
    /// The copy that is being taken in.
    pub(super) stage: Mutex<Option<Stage>>,
    /// There was no room for a copy beside files that are worth nothing else.
    pub(super) crowded: AtomicBool,
    /// Of the copy that is taken in or given, or was the last.
    pub progress: Progress,
    pub(super) poison: OnceLock<Error>,
    /// The committed sync point that could not be applied, by its last LSN.
    pub(super) unapplied: OnceLock<u64>,
    pub(super) was_clean: bool,
    /// The last LSN known to have been acknowledged, if it is beyond the tail,
    /// and where its log ends early.
    pub(super) missing: Mutex<Option<(u64, PathBuf, u64)>>,
    /// Valid records stand behind one of the same log that cannot be read. Without:
    /// a log ends before what another lane's tells of.
    pub(super) has_hole: AtomicBool,
    /// The last LSN that the logs, or the data area, told when this copy was opened
    /// to have been acknowledged; less where it was cut back or replaced since.
    pub(super) known: AtomicU64,
    /// Spill files that are durable here, with their lengths: those that this process
    /// synced, or synced again when it opened the copy.
    pub(super) spills: Mutex<BTreeMap<u64, u64>>,
    /// The one that is coming in and not durable yet, and how many of its bytes were
    /// written since it was last synced.
    pub(super) arriving: Mutex<Option<(u64, u64)>>,
    /// Test-only switches.
    pub mutations: Mutations,
    pub(super) held: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

/// Keeps records in the logs after their checkpoint, for a reader of them that
/// has everything up to an LSN.
#[derive(Debug)]
pub struct Hold {
    pub(super) lsn: AtomicU64,
    /// Whoever fills the logs waits for this reader. One that is not firm gets
    /// what room there is: at most half a log.
    pub(super) firm: AtomicBool,
}

/// How many pauses there are, and how often all of them were revoked.
#[derive(Default)]
pub(super) struct Pauses {
    pub(super) generation: u64,
    pub(super) count: u64,
}

/// Notes the pages that are applied to while a copy is read, so that they are
/// sent again. Names and sizes do not change meanwhile; a sync point that would
/// change them waits, and with it those behind it.
pub struct Watch {
    pub(super) store: Arc<Store>,
    pub(super) generation: u64,
    pub(super) pages: Mutex<BTreeSet<(u32, u64)>>,
}

pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding one of these is a broken invariant; the data is
    // not trusted less for it, since the store is poisoned by then.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Store {
    /// This node's surroundings.
    pub fn env(&self) -> &Arc<dyn Env> {
        &self.env
    }

    /// What and where it is.
    pub fn spec(&self) -> &StoreSpec {
        &self.spec
    }

    /// The logs, one per lane.
    pub fn logs(&self) -> &[Log] {
        &self.logs
    }

    /// What `persist` of its logs gives.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Its epochs.
    pub fn history(&self) -> Arc<History> {
        self.history
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .clone()
    }

    /// The last LSN of the contiguous prefix that recovery found.
    pub fn tail(&self) -> u64 {
        self.tail.load(Acquire)
    }

    /// The LSN up to which the data area is current.
    pub fn applied(&self) -> u64 {
        self.applied.load(Acquire)
    }

    /// Whether the data area is exactly the result of what is applied: after a
    /// crash it is once everything that the logs had was applied again, after
    /// a page was rewritten once what that had is.
    pub fn is_exact(&self) -> bool {
        self.applied() >= self.shown.load(Acquire)
    }

    /// No record above is in the data area, not even in part.
    pub fn shows(&self) -> u64 {
        self.applied().max(self.shown.load(Acquire))
    }

    /// The LSN up to which the data area is durable.
    pub fn checkpointed(&self) -> u64 {
        self.checkpoint.load(Acquire)
    }

    /// The superblock as it stands on the disk.
    pub fn superblock(&self) -> Superblock {
        lock(&self.superblock).now.clone()
    }

    /// The data area.
    pub fn area(&self) -> MutexGuard<'_, Area> {
        lock(&self.area)
    }

    /// The oldest LSN that the logs still hold, or the one after the last.
    pub fn oldest(&self) -> u64 {
        self.retained.load(Acquire) + 1
    }

    /// Whether it had been closed cleanly when it was opened.
    pub fn was_clean(&self) -> bool {
        self.was_clean
    }

    /// The last LSN of the committed sync point whose application failed: who opens
    /// this copy again applies it before anything more is acknowledged.
    pub fn unapplied(&self) -> Option<u64> {
        self.unapplied.get().copied()
    }

    /// The sync point that ends there could not be applied.
    pub fn note_unapplied(&self, lsn: u64) {
        let _ = self.unapplied.set(lsn);
    }

    /// The error that poisoned this store, if one did.
    pub fn poisoned(&self) -> Option<&Error> {
        self.poison.get()
    }

    /// Fails if the store is poisoned.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.poison.get() {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// Remembers the first failure (invariant 6).
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

    /// The same; not `durable`: a mutation, it is only written, and durable before the
    /// next one is.
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

    /// Everything up to the head of each lane made persistent.
    pub fn persist_all(&self) -> Result<()> {
        self.check()?;
        for log in &self.logs {
            let r = log.persist(log.head());
            self.fail(r)?;
        }
        Ok(())
    }
}
