//! One node's copy of a volume: superblock, logs, data area.
//!
//! Owns the durable facts of views; its parts are how it is opened and recovered
//! (`open`), the way of records into the data area and out of the logs (`apply`),
//! what background readers ask of it (`hold`), and a copy that comes from another
//! node (`load`).
//! Primary and mirror use it alike; what differs is who fills the logs and what
//! counts as committed.
//!
//! Invariants:
//! - 1 of `docs/invariants.md`: a record reaches the data area only from a log at least
//!   as durable, and only when committed. Where the log is memory, the boot id
//!   was made durable when the store was opened, so a copy from another boot is
//!   discarded.
//! - What a [`Hold`] still needs stays in the logs behind the checkpoint, as
//!   long as there is room for it.
//! - A copy is replaced only by a whole one: what is taken in from another node
//!   is staged beside it until all of it is durable (`stage`).
//! - After the first failed write or sync the store is poisoned: every call
//!   that would make something durable returns that error.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, MutexGuard, OnceLock, RwLock, Weak};

use mojim_format::superblock::{MAX_HISTORY, SUPERBLOCK_VERSION};
use mojim_format::{Level, SUPERBLOCK_LEN, State, Superblock, View, crc32c};
use mojim_protocol::{History, Holding, is_rival};

use crate::area::{Area, named_spill, spill_path};
use crate::log::{Live, Log, LogSpec};
use crate::progress::Progress;
use crate::stage::Stage;
use mojim_env::event::Event;
use mojim_env::turns::Mutex;
use mojim_env::{Context, Env, Error, File, OpenHow, Result};

mod apply;
mod hold;
mod load;
mod mutations;
mod open;

pub use apply::{AT_ONCE, Page};
pub use hold::{Hold, MOST_CHANGED, Pause, Watch};
pub use mutations::{Mutations, Switch};
pub use open::read_superblock;

use apply::Applier;
use hold::Pauses;

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
    fn logs_hash(&self, align: u64) -> u32 {
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
/// Bytes of a spill file that come in between two syncs.
const SPILL_SYNC: u64 = 8 << 20;

struct SuperblockFile {
    file: Arc<dyn File>,
    now: Superblock,
    /// By a mutation: it is not durable yet.
    late: bool,
}

/// One node's copy of a volume.
pub struct Store {
    env: Arc<dyn Env>,
    spec: StoreSpec,
    logs: Vec<Log>,
    level: Level,
    superblock: Mutex<SuperblockFile>,
    history: RwLock<Arc<History>>,
    area: Mutex<Area>,
    applier: Mutex<Applier>,
    applied: AtomicU64,
    /// Those who wait until more is applied.
    pub advanced: Event,
    rewritten: AtomicU64,
    checkpoint: AtomicU64,
    /// Every record above is in the logs.
    retained: AtomicU64,
    holds: Mutex<Vec<Weak<Hold>>>,
    tail: AtomicU64,
    /// What was being applied when the last process ended, or came with a page
    /// that was rewritten, may show in the data area, in parts, until it is
    /// applied: not beyond this LSN.
    shown: AtomicU64,
    frozen: AtomicBool,
    pauses: Mutex<Pauses>,
    paused: AtomicBool,
    watches: Mutex<Vec<Weak<Watch>>>,
    /// Nothing is applied: a copy is being taken in, or there is none.
    loading: AtomicBool,
    /// The copy that is being taken in.
    stage: Mutex<Option<Stage>>,
    /// There was no room for a copy beside files that are worth nothing else.
    crowded: AtomicBool,
    /// Of the copy that is taken in or given, or was the last.
    pub progress: Progress,
    poison: OnceLock<Error>,
    /// The committed sync point that could not be applied, by its last LSN.
    unapplied: OnceLock<u64>,
    was_clean: bool,
    /// The last LSN known to have been acknowledged, if it is beyond the tail,
    /// and where its log ends early.
    missing: Mutex<Option<(u64, PathBuf, u64)>>,
    /// Valid records stand behind one of the same log that cannot be read. Without:
    /// a log ends before what another lane's tells of.
    has_hole: AtomicBool,
    /// The last LSN that the logs, or the data area, told when this copy was opened
    /// to have been acknowledged; less where it was cut back or replaced since.
    known: AtomicU64,
    /// Spill files that are durable here, with their lengths: those that this process
    /// synced, or synced again when it opened the copy.
    spills: Mutex<BTreeMap<u64, u64>>,
    /// The one that is coming in and not durable yet, and how many of its bytes were
    /// written since it was last synced.
    arriving: Mutex<Option<(u64, u64)>>,
    /// Test-only switches.
    pub mutations: Mutations,
    held: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding one of these is a broken invariant; the data is
    // not trusted less for it, since the store is poisoned by then.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Store {
    /// Whether no record that was acknowledged is missing from this copy, as
    /// far as its logs tell: for a primary that has no other copy to ask.
    pub fn is_complete(&self) -> bool {
        self.missing().is_none()
    }

    fn missing(&self) -> Option<(u64, PathBuf, u64)> {
        let missing = lock(&self.missing).clone();
        missing.filter(|_| !self.mutations.forget_missing.is_on())
    }

    /// The last LSN that its logs tell was acknowledged, though it was not
    /// found in them.
    pub fn known_missing(&self) -> Option<u64> {
        self.missing().map(|m| m.0)
    }

    /// Whether what is missing is known by a damaged log, and not only by lanes that
    /// end at different LSNs.
    pub fn has_hole(&self) -> bool {
        self.has_hole.load(Acquire)
    }

    /// The last LSN that is known here to have been acknowledged, in this copy's
    /// history, whether it is here or not.
    pub fn known_acknowledged(&self) -> u64 {
        let known = self.known.load(Acquire);
        match self.mutations.forget_missing.is_on() {
            true => known.min(self.tail()),
            false => known,
        }
    }

    /// Fails where less than what is known to have been acknowledged is here, of
    /// which everything up to `tail` is.
    pub fn check_complete_at(&self, tail: u64) -> Result<()> {
        let missing = self.missing();
        let Some((known, path, at)) = missing.filter(|m| m.0 > tail) else {
            return Ok(());
        };
        let why = match self.has_hole.load(Acquire) {
            true => format!("the record at byte {at} of the log is damaged"),
            false => format!("the log ends too early, at byte {at} or in another lane"),
        };
        Err(Error::Damaged {
            path,
            what: format!(
                "{why}: sync points up to LSN {known} were acknowledged, LSN {tail} is the last that can be read. Restore the log, or give the others up with `mojim promote --force --volume {} --name {}`",
                self.spec.volume, self.spec.node
            ),
        })
    }

    /// The same of what was found in the logs, by whoever has just opened them.
    pub fn check_complete(&self) -> Result<()> {
        let found = self.check_complete_at(self.tail());
        if found.is_err() {
            // What was read from the damaged log must not outlive this.
            for log in &self.logs {
                log.remove_ring();
            }
        }
        found
    }

    /// What lies beyond `keep` is given up: it is not missing any more.
    fn forget_beyond(&self, keep: u64) {
        self.known.fetch_min(keep, AcqRel);
        lock(&self.missing).take_if(|m| m.0 > keep);
    }

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

    /// What this copy holds, for pairing. `tail` is given by who fills the logs.
    pub fn holding(&self, tail: u64) -> Holding {
        let sb = self.superblock();
        Holding {
            // A copy that was never used, even if its making was interrupted.
            volume_id: if sb.state == State::Empty && sb.view.epoch == 0 {
                0
            } else {
                sb.volume_id
            },
            state: sb.state,
            tail,
            history: (*self.history()).clone(),
        }
    }

    /// The data area.
    pub fn area(&self) -> MutexGuard<'_, Area> {
        lock(&self.area)
    }

    /// The name and size of the largest file.
    pub fn largest_file(&self) -> Option<(String, u64)> {
        let area = self.area();
        let largest = area.files().max_by_key(|f| f.size);
        largest.map(|f| (f.name.clone(), f.size))
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

    /// Makes an empty copy the first copy of a new volume. It counts as whole
    /// only at the end.
    pub fn make_new(&self) -> Result<()> {
        if self.superblock().awaits_copy {
            return Err(Error::Invalid(format!(
                "another node has a copy of volume {}, and it was being copied here when that was interrupted: nothing is made anew in its place. Start the other node; if it is lost for good, remove {}",
                self.spec.volume,
                self.spec.meta.display()
            )));
        }
        let id = self.env.random();
        self.update(|s| {
            s.volume_id = id;
            s.checkpoint = 0;
        })?;
        let mut a = lock(&self.applier);
        self.fail(lock(&self.area).reset(id))?;
        self.restart_at(&mut a, 0, (State::Whole, id), &[], self.env.random())?;
        drop(a);
        self.loading.store(false, Release);
        Ok(())
    }

    /// The first epoch above `above` that is this node's to begin.
    pub fn next_epoch(&self, above: u64) -> u64 {
        let (e, n) = (above + 1, self.spec.holders);
        e + (self.spec.rank + n - e % n) % n
    }

    /// Whether an epoch is this node's to begin.
    pub fn is_own(&self, epoch: u64) -> bool {
        epoch % self.spec.holders == self.spec.rank
    }

    /// Whether this copy, with this `tail`, may be brought to that of a primary of `epoch`,
    /// which node `from` has, without an operator's word; if not, why.
    pub fn check_rival(
        &self,
        tail: u64,
        theirs: &Holding,
        epoch: u64,
        from: &str,
    ) -> std::result::Result<(), String> {
        let led_there = |e| e % self.spec.holders == epoch % self.spec.holders;
        let ours = self.holding(tail);
        if !self.spec.by_hand || !is_rival(theirs, &ours, led_there) {
            return Ok(());
        }
        let (me, volume) = (&self.spec.node, &self.spec.volume);
        Err(format!(
            "nodes {from} and {me} were both promoted for volume {volume}, neither knowing of the other's promotion: node {me} has sync points up to LSN {tail} of epoch {}, node {from} up to LSN {} of epoch {}, and neither has all of the other's. Decide which node goes on, and run `mojim promote --force --volume {volume} --name` with it while both daemons run: that gives up what only the other has",
            ours.history.last_epoch(),
            theirs.tail,
            theirs.history.last_epoch(),
        ))
    }

    /// The view as far as this node may still rely on it: if it has promised a
    /// later epoch to the other node, it is the primary of its view no longer.
    pub fn standing(&self) -> View {
        let sb = self.superblock();
        let mut v = sb.view;
        let to_other = !self.is_own(sb.promised);
        if v.primary == self.spec.node && sb.promised > v.epoch && to_other {
            v.primary.clear();
        }
        v
    }

    /// The end of the last whole sync point at or below `lsn`, where every
    /// record up to `lsn` is in the logs or applied.
    pub fn whole(&self, lsn: u64) -> u64 {
        // Nothing is released while this is held.
        let _a = lock(&self.applier);
        for log in &self.logs {
            let mut at = log.start();
            while let Some((r, _, next)) = log.record(at) {
                if r.header.lsn == lsn {
                    return if r.header.end {
                        lsn
                    } else {
                        lsn - r.header.part as u64 - 1
                    };
                }
                if r.header.lsn > lsn {
                    break;
                }
                at = next;
            }
        }
        // Applied and released: that happens to whole sync points only.
        lsn
    }

    /// Begins `epoch` on this node durably: the view, and the first LSN that
    /// belongs to it.
    pub fn begin_epoch(&self, epoch: u64, first_lsn: u64, view: View) -> Result<()> {
        let mut h = (*self.history()).clone();
        h.begin(epoch, first_lsn, self.retained.load(Acquire));
        self.update(|s| {
            s.promised = s.promised.max(epoch);
            s.view = view;
            s.history = h.entries().to_vec();
            // Whatever it lost, it has now what its view holds.
            s.ring_lost = false;
        })?;
        *self.history.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(h);
        Ok(())
    }

    /// Takes over the primary's history and view (on the mirror, at the start
    /// of a session).
    pub fn follow(&self, history: History, view: View) -> Result<()> {
        // The primary may have forgotten epochs that this node's log, being
        // less far checkpointed, still needs.
        let history = match history.entries().first() {
            Some(first) => {
                let mine = self.history();
                let older = mine
                    .entries()
                    .iter()
                    .filter(|e| e.epoch < first.epoch && e.first_lsn <= first.first_lsn);
                let all: Vec<_> = older.chain(history.entries()).copied().collect();
                let from = all.len().saturating_sub(MAX_HISTORY);
                History::from_entries(&all[from..]).unwrap_or(history)
            }
            None => history,
        };
        self.update(|s| {
            s.promised = s.promised.max(view.epoch);
            s.view = view;
            s.history = history.entries().to_vec();
        })?;
        *self.history.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(history);
        Ok(())
    }

    /// Promises not to accept anything of an epoch below `epoch` any more.
    pub fn promise(&self, epoch: u64) -> Result<()> {
        let durable = !self.mutations.promise_early.is_on();
        self.write_superblock(|s| s.promised = s.promised.max(epoch), durable)
    }

    /// Drops every record above `keep` from the logs' heads. The caller sees
    /// to it that their epoch is over (`begin_epoch` or `follow` with a later
    /// epoch that begins at or before the first of them).
    pub fn truncate(&self, keep: u64) -> Result<()> {
        let mut a = lock(&self.applier);
        a.recount();
        if keep < a.applied {
            return Err(Error::Protocol(format!(
                "records above {keep} are to be dropped, but {} are applied",
                a.applied
            )));
        }
        for (log, &cursor) in self.logs.iter().zip(&a.cursors) {
            let mut at = cursor;
            while let Some((r, _, next)) = log.record(at) {
                if r.header.lsn > keep {
                    break;
                }
                at = next;
            }
            if at < log.head() {
                log.rewind(at);
            }
        }
        self.tail.store(keep, Release);
        self.shown.fetch_min(keep, AcqRel);
        self.forget_beyond(keep);
        Ok(())
    }

    /// Where lane `lane`'s first record above `lsn` begins. Only for LSNs at
    /// or above the checkpoint.
    pub fn seek(&self, lane: usize, lsn: u64) -> u64 {
        let log = &self.logs[lane];
        let mut at = log.start();
        while let Some((r, _, next)) = log.record(at) {
            if r.header.lsn > lsn {
                break;
            }
            at = next;
        }
        at
    }

    /// LSN of the last record in a lane's log and the part number that must
    /// follow it; (0, 0) if the log is empty.
    pub fn last_of(&self, lane: usize) -> (u64, u32) {
        let log = &self.logs[lane];
        let mut at = log.start();
        let mut last = (0, 0);
        while let Some((r, _, next)) = log.record(at) {
            last = (
                r.header.lsn,
                if r.header.end { 0 } else { r.header.part + 1 },
            );
            at = next;
        }
        last
    }

    /// The oldest LSN that the logs still hold, or the one after the last.
    pub fn oldest(&self) -> u64 {
        self.retained.load(Acquire) + 1
    }

    fn live(&self, what: Live) -> &AtomicU64 {
        self.logs[0].live(what)
    }

    /// Removes a spill file that no record needs.
    pub fn remove_spill(&self, id: u64) {
        lock(&self.spills).remove(&id);
        // Left behind, it only costs space until the next start.
        let _ = self.env.remove(&spill_path(&self.spec.meta, id));
    }

    /// The spill files that records in the logs name, with their lengths.
    fn named_spills(&self) -> BTreeMap<u64, u64> {
        let mut named = BTreeMap::new();
        for log in &self.logs {
            let mut at = log.start();
            while let Some((r, _, next)) = log.record(at) {
                if let Ok(Some((id, len))) = named_spill(&r) {
                    named.insert(id, len);
                }
                at = next;
            }
        }
        named
    }

    /// Removes spill files that no record in the logs names: the primary sends
    /// one again, ahead of its record, in whichever session that record comes.
    pub fn remove_stray_spills(&self) {
        self.remove_spills_but(&self.named_spills());
    }

    fn remove_spills_but(&self, named: &BTreeMap<u64, u64>) {
        let Ok(names) = self.env.list(&self.spec.meta) else {
            return;
        };
        for n in names {
            let id = n
                .to_str()
                .and_then(|n| n.strip_prefix("spill."))
                .and_then(|n| n.parse::<u64>().ok());
            if let Some(id) = id.filter(|id| !named.contains_key(id)) {
                self.remove_spill(id);
            }
        }
    }

    /// At the start: strays go, the others count as durable once they are synced
    /// again. What is there of one that arrived in part and was never synced is
    /// named by no record.
    fn keep_named_spills(&self) -> Result<()> {
        let named = self.named_spills();
        self.remove_spills_but(&named);
        for id in named.into_keys() {
            let path = spill_path(&self.spec.meta, id);
            match self.env.open(&path, OpenHow::default()) {
                // Who applies its record says so; one that is applied needs it no more.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                f => drop(f.context(|| format!("opening {}", path.display()))?),
            }
            self.sync_spill(id)?;
        }
        Ok(())
    }

    /// All pieces of a spill file are here: makes it durable, name included, so
    /// that a record may name it.
    pub fn sync_spill(&self, id: u64) -> Result<()> {
        if lock(&self.spills).contains_key(&id) {
            return Ok(());
        }
        let file = self.spill_file(id)?;
        let skipped = self.mutations.spill_unsynced.is_on();
        let synced = match skipped {
            true => file.len(),
            false => file
                .sync()
                .and_then(|()| self.env.sync_dir(&self.spec.meta))
                .and_then(|()| file.len()),
        };
        let len = self.spill_synced(id, synced)?;
        // Nobody's any more only when its record is gone.
        lock(&self.arriving).take_if(|(arriving, _)| *arriving == id);
        lock(&self.spills).insert(id, len);
        Ok(())
    }

    fn spill_synced<T>(&self, id: u64, r: std::io::Result<T>) -> Result<T> {
        self.fail(r.map_err(|e| {
            let path = spill_path(&self.spec.meta, id);
            Error::Poisoned(format!("spill file {}: {e}", path.display()))
        }))
    }

    /// Bytes of a spill file, as they come. Of one that is durable here already
    /// nothing is written again.
    ///
    /// Files come one after the other, each from its beginning in each session: one
    /// that is not durable when the next one comes is nobody's.
    pub fn write_spill(&self, id: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        if lock(&self.spills).contains_key(&id) {
            return Ok(());
        }
        let had = lock(&self.arriving).filter(|(arriving, _)| *arriving == id);
        if had.is_none() {
            self.forget_arriving();
            *lock(&self.arriving) = Some((id, 0));
        }
        let file = self.spill_file(id)?;
        if let Err(e) = file.write_at(bytes, offset) {
            // What is here of it is in the way of what there may be room for.
            drop(file);
            self.forget_arriving();
            return Err(Error::io("writing a spill file", &e));
        }
        let mut unsynced = had.map_or(0, |(_, n)| n) + bytes.len() as u64;
        // In parts, so that the last sync, with which nothing moves, is short.
        if unsynced >= SPILL_SYNC && !self.mutations.spill_unsynced.is_on() {
            self.spill_synced(id, file.sync())?;
            unsynced = 0;
        }
        *lock(&self.arriving) = Some((id, unsynced));
        Ok(())
    }

    /// Removes the spill file that began to come in and never became durable: no
    /// record can name it.
    pub fn forget_arriving(&self) {
        let arriving = lock(&self.arriving).take();
        if let Some((id, _)) = arriving {
            self.remove_spill(id);
        }
    }

    /// The bytes of a spill file that is durable here.
    pub fn durable_spill(&self, id: u64) -> Option<u64> {
        lock(&self.spills).get(&id).copied()
    }

    /// Opens a spill file for writing, and makes it if it is not there.
    pub fn spill_file(&self, id: u64) -> Result<Arc<dyn File>> {
        let path = spill_path(&self.spec.meta, id);
        let how = OpenHow {
            create: true,
            write: true,
            durable: false,
        };
        self.env
            .open(&path, how)
            .context(|| format!("spill file {}", path.display()))
    }

    /// Opens a spill file that a record in the logs names, for reading.
    pub fn open_spill(&self, id: u64) -> Result<Arc<dyn File>> {
        let path = spill_path(&self.spec.meta, id);
        self.env
            .open(&path, OpenHow::default())
            .context(|| format!("opening spill file {}", path.display()))
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

    /// Lets others open this copy. Nothing can be done with it here any more,
    /// whoever still has it.
    pub fn release_lock(&self) {
        let gone = Error::Busy(format!(
            "node {} has handed its copy of volume {} over",
            self.spec.node, self.spec.volume
        ));
        let _ = self.poison.set(gone);
        *lock(&self.held) = None;
    }

    /// After everything is applied: makes it durable and says so, so that the
    /// next start finds a copy that needs no log.
    pub fn close_clean(&self, tail: u64) -> Result<()> {
        self.close_for_next(tail)?;
        for log in &self.logs {
            log.remove_ring();
        }
        Ok(())
    }

    /// The same for a copy that is opened again at once: its rings stay, since
    /// to free their pages and to make new ones takes long.
    pub fn close_for_next(&self, tail: u64) -> Result<()> {
        assert_eq!(self.applied(), tail, "closed before everything was applied");
        // A session that was being made may have left it so, or a copy for a
        // backup is being read, which is given up.
        self.freeze(false);
        self.revoke_pauses();
        let left = (0..self.logs.len()).any(|i| self.last_of(i).0 > tail);
        if left {
            return Err(Error::Busy("sync points are still under way".into()));
        }
        self.checkpoint()?;
        assert_eq!(
            self.checkpointed(),
            tail,
            "clean means that no log is needed"
        );
        let synced = lock(&self.area).sync();
        self.fail(synced)?;
        self.remove_stray_spills();
        self.update(|s| {
            s.boot_id = [0; 16];
            s.logs = 0;
        })
    }

    /// Whether it had been closed cleanly when it was opened.
    pub fn was_clean(&self) -> bool {
        self.was_clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_config::MediumKind;

    /// A mirror kept every spill file whose primary had given up, to its next start:
    /// each try of one large sync point left a whole file, until the disk was full.
    /// What it has confirmed stays: the record that names it may be on its way.
    #[test]
    fn a_spill_file_that_never_became_durable_goes_when_another_comes() {
        let dir = std::env::temp_dir().join(format!("mojim-spills-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
        let log = LogSpec {
            lane: 0,
            medium: MediumKind::Dram,
            path: dir.join("log"),
            ring: dir.join("ring"),
            size: 64 << 10,
        };
        let spec = StoreSpec {
            cluster: "c".into(),
            volume: "v".into(),
            node: "b".into(),
            dir: dir.join("data"),
            meta: dir.join("meta"),
            logs: vec![log],
            rank: 1,
            holders: 2,
            max_open: 16,
            copy_streams: 1,
            by_hand: true,
        };
        let store = Store::open(&env, spec).unwrap();
        let there = |id| spill_path(&store.spec.meta, id).exists();
        let piece = [7; 4096];
        let write = |id, at| store.write_spill(id, at, &piece);
        write(1, 0).unwrap();
        store.sync_spill(1).unwrap();
        // Its primary gives up, and tries again.
        write(2, 0).unwrap();
        write(2, 4096).unwrap();
        write(3, 0).unwrap();
        assert_eq!([1, 2, 3].map(there), [true, false, true]);
        // A piece that has no place (no file is that long).
        let too_far = i64::MAX as u64 - 100;
        write(3, too_far).unwrap_err();
        assert_eq!([1, 3].map(there), [true, false]);
        store.check().unwrap();
        // A link that ended, and another session.
        write(3, 0).unwrap();
        store.forget_arriving();
        write(3, 0).unwrap();
        write(3, 4096).unwrap();
        store.sync_spill(3).unwrap();
        // Of one that is durable nothing is written again.
        write(1, too_far).unwrap();
        write(4, 0).unwrap();
        store.forget_arriving();
        assert_eq!([1, 3, 4].map(there), [true, true, false]);
        assert_eq!(store.durable_spill(3), Some(8192));
        drop(store);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
