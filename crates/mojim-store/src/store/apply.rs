//! Owns the application of records from the logs to the data area, checkpoints,
//! and the release of log space.
//!
//! Invariants: only committed records are applied (the caller passes the limit),
//! as whole sync points in LSN order, under the applier's lock.
//! A log is released only after a `sync` of the data area (unless the log is
//! memory) and then a durable superblock that says so.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mojim_env::turns::lock;
use mojim_format::{Op, OpKind};

use super::applier::{Applier, MARKS, changes_names};
use super::hold::MOST_CHANGED;
use super::state::{Store, Watch};
use crate::area::{Area, MOST_IMAGE};
use crate::log::{Live, Log, Placed};
use mojim_env::{Error, Result};

/// Bytes of records that are applied at a time by a caller that waits for all of them.
pub const AT_ONCE: usize = 8 << 20;

/// A lack of room is not looked at again sooner.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Changes of names that may wait to be applied, about: as many as a node that takes over applies
/// in a second or two.
const MOST_WAITING: usize = 1 << 15;

/// Fewest changes of names that do not wait for a pause.
const LEAST_SOON: usize = 256;

/// Changes of names that are applied together, about; more in a volume with many files.
const MOST_NAMES: usize = 8192;

/// Sync points within which a file is removed that was renamed, for both to be applied together.
const MOST_ASIDE: usize = 64;

/// Records that were kept in a log below the checkpoint are released once they
/// take more than 1/`RELEASE` of the log.
const RELEASE: u64 = 8;

/// Bytes of a data file that were read while records were applied to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Every record up to this LSN is in the bytes.
    pub low: u64,
    /// No record above this LSN is in the bytes.
    pub high: u64,
}

/// A whole sync point in a lane's log.
#[derive(Debug, Clone, Copy)]
struct Point {
    lane: usize,
    /// Where it begins in the lane's log, and what follows it.
    at: u64,
    next: u64,
    /// Epoch and LSN of its last record.
    epoch: u64,
    end: u64,
    /// How many of its operations change names.
    names: usize,
}

impl Point {
    fn bytes(&self) -> usize {
        (self.next - self.at) as usize
    }

    /// Its records.
    fn records(self, log: &Log) -> impl Iterator<Item = Placed<'_>> {
        let mut records = log.records(self.at);
        std::iter::from_fn(move || {
            let more = records.position() < self.next;
            more.then(|| records.next().expect("it was found"))
        })
    }

    /// Its operations.
    fn ops(self, log: &Log) -> impl Iterator<Item = (Op, &[u8])> {
        self.records(log).flat_map(|r| r.ops())
    }

    /// What it writes; `None` if it does anything else.
    fn written(self, log: &Log) -> Option<Vec<(u32, Range<u64>)>> {
        self.ops(log)
            .map(|(op, payload)| {
                let range = op.offset..op.offset + payload.len() as u64;
                (op.kind == OpKind::Write).then_some((op.file, range))
            })
            .collect()
    }
}

/// What sync points that are to be applied together do with files.
#[derive(Default)]
struct Together {
    /// Those that they make.
    created: HashSet<u32>,
    /// Those that were there, and that they rename, and have not removed so far.
    aside: HashSet<u32>,
}

impl Together {
    /// Adds a sync point. False if it can only be applied alone.
    fn add(&mut self, log: &Log, point: Point) -> bool {
        point.ops(log).all(|(op, _)| match op.kind {
            OpKind::Create => {
                self.created.insert(op.file);
                true
            }
            OpKind::Rename => {
                if !self.created.contains(&op.file) {
                    self.aside.insert(op.file);
                }
                true
            }
            OpKind::Remove => {
                self.aside.remove(&op.file);
                true
            }
            OpKind::Spill => false,
            _ => true,
        })
    }
}

/// Adds what a sync point writes to `changes`. False if it has to wait for `watches`: it changes
/// names or sizes, or one of them has no room to note its extents (each counts as one page).
fn collect_changes(
    watches: &[Arc<Watch>],
    log: &Log,
    point: Point,
    changes: &mut Vec<(u32, Range<u64>)>,
) -> bool {
    let Some(written) = point.written(log) else {
        return false;
    };
    let more = changes.len() + written.len();
    if watches.iter().any(|w| w.changed() + more > MOST_CHANGED) {
        return false;
    }
    changes.extend(written);
    true
}

impl Store {
    /// Applies whole sync points up to `limit`, at most about `bytes` bytes of
    /// records, and writes them out. Returns how far the data area now is. Those that were begun as
    /// one before a crash are held back until `limit` has all of them again.
    pub fn apply(&self, limit: u64, bytes: usize) -> Result<u64> {
        self.check_poison()?;
        let mut a = self.applier.lock();
        let torn = self.lacks_room().is_some();
        if self.stands_still() || a.applied >= limit && !torn {
            return Ok(a.applied);
        }
        if let Some(e) = self.lacked_room_just_now() {
            return Err(e);
        }
        // Other processes that read the data files learn what may be in them.
        self.live(Live::Limit).fetch_max(limit, SeqCst);
        let mut area = lock(&self.area);
        let from = (a.applied, a.cursors.clone());
        let mut short = torn;
        while let Err((last, e)) = self.apply_to(&mut a, &mut area, limit, bytes) {
            (a.applied, a.cursors) = from.clone();
            a.recount();
            self.applied_in_part(&mut area, limit, last, e)?;
            short = true;
        }
        area.confirm_applied();
        if torn {
            *lock(&self.short) = None;
            self.refuses.store(false, Release);
            self.live(Live::NoRoom).store(0, Release);
        }
        if short || area.took_kept() {
            self.keep_again();
        }
        if self.applied.swap(a.applied, AcqRel) != a.applied {
            let mark = (a.applied, a.cursors.clone());
            a.marks.push_back(mark);
            if a.marks.len() > MARKS {
                a.marks.pop_front();
            }
        }
        self.live(Live::Applied).store(a.applied, SeqCst);
        self.moved.store(self.env.now().as_nanos() as u64, Relaxed);
        self.advanced.notify();
        Ok(a.applied)
    }

    /// The work of [`Store::apply`]. An error comes with the last LSN of what could not be applied.
    fn apply_to(
        &self,
        a: &mut Applier,
        area: &mut Area,
        limit: u64,
        bytes: usize,
    ) -> std::result::Result<(), (u64, Error)> {
        area.take_up().map_err(|e| (limit, e))?;
        let mut left = bytes;
        let watches = self.watches();
        let mut changes = Vec::new();
        while a.applied < limit && left > 0 && area.image_bytes() < MOST_IMAGE {
            let Some(first) = self.point(&a.cursors, a.applied, limit) else {
                break;
            };
            let log = &self.logs[first.lane];
            if !watches.is_empty() && !collect_changes(&watches, log, first, &mut changes) {
                break;
            }
            if first.names == 0 {
                // The usual case needs no list of sync points, and no look at names.
                area.begin_writes(first.epoch, first.end);
                let done = self.apply_records(area, first, &mut left);
                done.map_err(|e| (first.end, e))?;
                a.advance(first.lane, first.next, first.end, 0);
                continue;
            }
            let cut_off = area.cut_off(first.end);
            if cut_off.is_some_and(|lsn| lsn > limit) {
                break;
            }
            let points = self.together(a, first, limit, left, area);
            let last = points.last().expect("the first is one of them").end;
            let done = self.apply_points(area, &points, &mut left);
            for point in &points[..done.map_err(|e| (last, e))?] {
                a.advance(point.lane, point.next, point.end, point.names);
            }
        }
        a.recount_pages();
        // Most of what is applied is written here. Processes that read the data files learn the
        // sizes from the catalogue.
        let flushed = area.flush().and_then(|()| area.write_sizes());
        flushed.map_err(|e| (a.applied, e))?;
        // Only now that the bytes are in the files: a page that was read before this is
        // read again.
        watches.iter().for_each(|w| w.note(&changes));
        Ok(())
    }

    /// Records up to `limit` were applied in part, when `e` came up at the sync point that ends
    /// with `last`. Ok: to be tried again at once. Where it is room that is lacking, a later call
    /// tries again; after any other error the store is poisoned.
    fn applied_in_part(&self, area: &mut Area, limit: u64, last: u64, e: Error) -> Result<()> {
        if !e.lacks_room() || self.mutations.ignore_failed_sync.is_on() {
            self.note_unapplied(last);
            return self.fail(Err(e));
        }
        self.shown.fetch_max(limit, AcqRel);
        // What was written was not noted: a copy that is being read would have a part of it.
        self.revoke_pauses();
        area.give_up();
        if self.release_reserve() {
            return Ok(());
        }
        self.keep_again();
        let e = match e {
            Error::Io { what, errno, error } => Error::Io {
                what: format!(
                    "committed data waits for room: {what} in {} (nothing is lost; make room on that disk)",
                    area.dir().display()
                ),
                errno,
                error,
            },
            e => e,
        };
        *lock(&self.short) = Some((self.env.now(), e.clone()));
        self.live(Live::NoRoom).store(1, Release);
        if !self.outlasts.load(Acquire) {
            self.refuses.store(true, Release);
        }
        Err(e)
    }

    /// Why what is committed is not applied, if room is lacking.
    pub fn lacks_room(&self) -> Option<Error> {
        lock(&self.short).as_ref().map(|(_, e)| e.clone())
    }

    /// [`Store::lacks_room`], if that was a moment ago: it is not looked for again yet.
    fn lacked_room_just_now(&self) -> Option<Error> {
        let (when, e) = lock(&self.short).clone()?;
        let is_fresh = self.env.now().saturating_sub(when) < LOOK_AGAIN;
        is_fresh.then_some(e)
    }

    /// From here on this copy makes more durable although what is committed finds no room in the
    /// data files, as long as the logs have room: that of a primary that serves. Any other stops
    /// meanwhile, so that it acknowledges nothing and cannot take over.
    pub fn outlast_full_disks(&self) {
        self.outlasts.store(true, Release);
    }

    /// The sync point behind LSN `applied`, if its last part is there and at most `limit`: `cursors`
    /// say where to look. Its parts are consecutive in one log.
    fn point(&self, cursors: &[u64], applied: u64, limit: u64) -> Option<Point> {
        let (lane, at) = self.logs.iter().enumerate().find_map(|(lane, log)| {
            let r = log.record(cursors[lane])?;
            (r.header.lsn == applied + 1).then_some((lane, r.at))
        })?;
        let mut names = 0;
        for r in self.logs[lane].records(at) {
            names += r.ops().filter(|(op, _)| changes_names(op)).count();
            if r.header.end {
                let (epoch, end) = (r.header.epoch, r.header.lsn);
                let point = Point {
                    lane,
                    at,
                    next: r.next,
                    epoch,
                    end,
                    names,
                };
                return Some(point).filter(|p| p.end <= limit);
            }
        }
        None
    }

    /// The sync points from `first` on, which changes names, that may be applied together, about
    /// `bytes` bytes at most: each of those changes costs syncs, which others can share. Those that
    /// were begun together are applied together again, however many they are.
    fn together(
        &self,
        a: &Applier,
        first: Point,
        limit: u64,
        bytes: usize,
        area: &Area,
    ) -> Vec<Point> {
        let mut points = vec![first];
        let mut together = Together::default();
        let is_known = area.has_names_of(first.end);
        if is_known || !together.add(&self.logs[first.lane], first) {
            return points;
        }
        let begun = area.cut_off(first.end).unwrap_or(0);
        // So many leave no file renamed that was there, and stays; or they were begun.
        let mut whole = usize::from(together.aside.is_empty() || first.end <= begun);
        // The catalogue is written for each run: the larger it is, the more go together.
        let most = MOST_NAMES.max(area.count() / 8);
        let mut cursors = a.cursors.clone();
        let (mut taken, mut names, mut last) = (first.bytes(), first.names, first);
        let goes_on = |taken, names, aside| taken < bytes && names < most && aside < MOST_ASIDE;
        while last.end < begun || goes_on(taken, names, points.len() - whole) {
            cursors[last.lane] = last.next;
            let Some(point) = self.point(&cursors, last.end, limit) else {
                break;
            };
            if !together.add(&self.logs[point.lane], point) {
                break;
            }
            points.push(point);
            if together.aside.is_empty() || point.end <= begun {
                whole = points.len();
            }
            (taken, names, last) = (taken + point.bytes(), names + point.names, point);
        }
        points.truncate(whole.max(1));
        points
    }

    /// Applies some of these sync points, from the first on, as one, and subtracts their bytes from
    /// `left`. Returns how many.
    fn apply_points(&self, area: &mut Area, points: &[Point], left: &mut usize) -> Result<usize> {
        let ends: Vec<_> = points.iter().map(|p| (p.epoch, p.end)).collect();
        let ops = |count: usize| {
            let numbered = points[..count].iter().enumerate();
            numbered.flat_map(|(number, point)| {
                let ops = point.ops(&self.logs[point.lane]);
                ops.map(move |(op, payload)| (number, op, payload))
            })
        };
        let count = area.begin(&ends, ops)?;
        for point in &points[..count] {
            self.apply_records(area, *point, left)?;
        }
        area.end_sync_point(points[count - 1].end)?;
        Ok(count)
    }

    /// Applies a sync point's records, and subtracts their bytes from `left`.
    fn apply_records(&self, area: &mut Area, point: Point, left: &mut usize) -> Result<()> {
        *left = left.saturating_sub(point.bytes());
        for r in point.records(&self.logs[point.lane]) {
            area.apply(&r, &self.spec.meta)?;
            // A sync point may have more bytes than the image is to have.
            if area.image_bytes() > MOST_IMAGE {
                area.flush()?;
            }
        }
        Ok(())
    }

    /// Applies everything up to `tail`, which is in the logs and committed.
    pub fn apply_all(&self, tail: u64) -> Result<()> {
        loop {
            let before = self.applied();
            let now = self.apply(tail, AT_ONCE)?;
            if now >= tail {
                return Ok(());
            }
            if now == before {
                return Err(Error::Protocol(format!(
                    "sync points up to LSN {tail} are to be applied, and none is found behind LSN {now}"
                )));
            }
        }
    }

    /// [`Store::apply_all`] of a copy that follows: all but what is held back until more is known to
    /// be committed.
    pub fn apply_known(&self, tail: u64) -> Result<()> {
        let done = self.apply_all(tail);
        let failed = self.poisoned().is_some() || self.lacks_room().is_some();
        match done.is_err() && !failed && self.holds_back(&self.applier.lock(), tail) {
            true => Ok(()),
            false => done,
        }
    }

    /// Whether sync points up to `limit` may wait for later ones that were begun with them.
    fn holds_back(&self, a: &Applier, limit: u64) -> bool {
        let cut_off = lock(&self.area).cut_off(limit);
        cut_off.is_some_and(|lsn| lsn > limit.max(a.applied))
    }

    /// [`Store::apply_all`] of a copy that goes on with what it has: nothing behind `tail` comes
    /// again, also what the files show in part.
    pub fn apply_last(&self, tail: u64) -> Result<()> {
        self.apply_all(tail)?;
        let done = lock(&self.area).finish_removals_given_up();
        self.fail(done)
    }

    /// Runs `f` on the data area while nothing is applied to it, behind all who wait to apply,
    /// to checkpoint, or for a link. `f` also gets the applied LSN.
    pub fn standing_still<T>(&self, f: impl FnOnce(&mut Area, u64) -> Result<T>) -> Result<T> {
        let a = self.applier.lock_behind();
        f(&mut lock(&self.area), a.applied)
    }

    /// [`Store::standing_still`], with the bytes of the applied records above `after`
    /// in order; `None` if the logs do not have all of them, they are more than `most`
    /// bytes, or one names a spill file.
    pub fn standing_still_since<T>(
        &self,
        after: u64,
        most: usize,
        f: impl FnOnce(&mut Area, u64, Option<Vec<u8>>) -> Result<T>,
    ) -> Result<T> {
        let a = self.applier.lock_behind();
        let records = self.applied_since(&a, after, most);
        f(&mut lock(&self.area), a.applied, records)
    }

    /// Nothing is released meanwhile, since the applier's lock is held.
    fn applied_since(&self, a: &Applier, after: u64, most: usize) -> Option<Vec<u8>> {
        if after > a.applied || after < self.retained.load(Acquire) {
            return None;
        }
        let mark = a.marks.iter().rev().find(|(lsn, _)| *lsn <= after);
        let mut at: Vec<u64> = self.logs.iter().map(Log::start).collect();
        if let Some((_, cursors)) = mark {
            // Records behind the mark may have been released since it was set.
            at.iter_mut()
                .zip(cursors)
                .for_each(|(s, c)| *s = (*s).max(*c));
        }
        let mut out = Vec::new();
        for lsn in after + 1..=a.applied {
            let found = self.logs.iter().zip(&mut at).find_map(|(log, at)| {
                let mut records = log.records(*at);
                let mut last = None;
                while let Some(r) = records.next_if(|r| r.header.lsn <= lsn) {
                    last = Some(r);
                }
                *at = records.position();
                last.filter(|r| r.header.lsn == lsn)
            })?;
            let spilled = found.ops().any(|(op, _)| op.kind == OpKind::Spill);
            if spilled || out.len() + found.bytes().len() > most {
                return None;
            }
            out.extend_from_slice(found.bytes());
        }
        Some(out)
    }

    /// Another number after each time that bytes of the data files were rewritten without
    /// a record, and in each opening of the copy. As long as it is the same, and the
    /// history too, records alone lead from one LSN to a later one.
    pub fn rewritten(&self) -> u64 {
        self.rewritten.load(Acquire)
    }

    /// Rewrites a page of a file with bytes that `fetch` gets from the primary's
    /// copy: every record up to `low` is in them, and none above `high`.
    /// They may be newer than this copy: the page is right once the records up to
    /// `high` are applied too, since each of them only repeats what is there. All
    /// of them must be in the logs here (`here`). False if this does not hold now.
    /// `fetch` gets the LSN that must be in the bytes; nothing is applied while it
    /// runs.
    pub fn rewrite(
        &self,
        id: u32,
        offset: u64,
        here: impl FnOnce() -> u64,
        fetch: impl FnOnce(u64) -> Result<Page>,
    ) -> Result<bool> {
        self.check()?;
        let a = self.applier.lock_behind();
        if self.stands_still() {
            return Err(Error::Busy("a copy is being made".into()));
        }
        let page = fetch(a.applied)?;
        if page.low < a.applied || page.high > here() {
            return Ok(false);
        }
        let mut area = lock(&self.area);
        // The page may show records that are not applied yet.
        self.shown.fetch_max(page.high, AcqRel);
        let written = area
            .rewrite(id, offset, &page.bytes)
            .and_then(|()| area.sync());
        self.rewritten.fetch_add(1, AcqRel);
        self.advanced.notify();
        self.fail(written)?;
        let end = offset + page.bytes.len() as u64;
        for w in self.watches() {
            w.note(&[(id, offset..end)]);
        }
        Ok(true)
    }

    /// Makes what was applied durable and releases its log space.
    pub fn checkpoint(&self) -> Result<()> {
        self.checkpoint_if(|_| true)
    }

    /// [`Store::checkpoint`], if `may` agrees to lose the log up to the applied LSN.
    /// Does nothing while a copy is read or a session begins. `may` is called while
    /// no other thread can apply or freeze. While files are synced, others can.
    pub fn checkpoint_if(&self, may: impl Fn(u64) -> bool) -> Result<()> {
        self.check()?;
        // What an earlier one has taken out to be synced is not durable before that one ends.
        let _one = lock(&self.checkpointing);
        let a = self.applier.lock();
        let (applied, life) = (a.applied, a.life.clone());
        if self.checkpointed() == applied || self.stands_still() || !may(applied) {
            return Ok(());
        }
        if lock(&self.area).is_torn() {
            return Ok(());
        }
        let cursors = a.cursors.clone();
        let persists = self.level.is_persistent();
        let begun = persists.then(|| lock(&self.area).begin_sync());
        drop(a);
        let synced = begun.transpose();
        let synced = synced.and_then(|begun| begun.map_or(Ok(()), |s| s.run()));
        if let Err(e) = synced
            && !self.mutations.ignore_failed_sync.is_on()
        {
            return self.fail(Err(e));
        }
        let a = self.applier.lock();
        let is_replaced = !Arc::ptr_eq(&life, &a.life);
        let is_torn = lock(&self.area).is_torn();
        if is_replaced || is_torn || self.stands_still() || !may(applied) {
            return Ok(());
        }
        lock(&self.area).make_catalog()?;
        lock(&self.durable).clone_from(&cursors);
        let (starts, lost) = self.releasable(&cursors);
        let lost = if starts == cursors { applied } else { lost };
        let durable = !self.mutations.release_early.is_on();
        self.write_superblock(
            |s| {
                s.checkpoint = applied;
                s.starts = starts.clone();
            },
            durable,
        )?;
        self.checkpoint.store(applied, Release);
        self.retained.store(lost, Release);
        self.release(&starts);
        self.remove_released_spills();
        self.keep_reserve();
        Ok(())
    }

    /// Releases the logs up to these positions. The applier's lock is held.
    fn release(&self, starts: &[u64]) {
        let _durable = lock(&self.durable);
        for (log, &start) in self.logs.iter().zip(starts) {
            log.release(start);
        }
    }

    /// Removes the spill files of released records only: a record that is kept for
    /// another node may be sent again, with its spill file ahead of it.
    fn remove_released_spills(&self) {
        let gone = lock(&self.area).take_spills(self.retained.load(Acquire));
        gone.into_iter().for_each(|id| self.remove_spill(id));
    }

    /// Where each log may be released to, and the last LSN that is then released.
    fn releasable(&self, durable: &[u64]) -> (Vec<u64>, u64) {
        let mut lost = self.retained.load(Acquire);
        let mut holds = lock(&self.holds);
        holds.retain(|h| h.strong_count() > 0);
        if holds.is_empty() || self.mutations.ignore_hold.is_on() {
            return (durable.to_vec(), self.checkpointed());
        }
        let holds: Vec<(u64, bool)> = holds
            .iter()
            .filter_map(Weak::upgrade)
            .map(|h| (h.lsn.load(Acquire), h.firm.load(Acquire)))
            .collect();
        let mut to = Vec::with_capacity(self.logs.len());
        for (log, &durable) in self.logs.iter().zip(durable) {
            let mut records = log.records(log.start());
            loop {
                let half = log.head() - records.position() > log.size() / 2;
                let free = |lsn| holds.iter().all(|&(has, firm)| has >= lsn || !firm && half);
                let goes = |r: &Placed| r.next <= durable && free(r.header.lsn);
                let Some(r) = records.next_if(goes) else {
                    break;
                };
                lost = lost.max(r.header.lsn);
            }
            to.push(records.position());
        }
        (to, lost)
    }

    /// Releases records that were kept below the checkpoint and are no longer needed,
    /// if they take more than an eighth of a log and `may` agrees, as in
    /// [`Store::checkpoint_if`]. Returns whether it released them.
    pub fn release_held(&self, may: impl FnOnce(u64) -> bool) -> Result<bool> {
        self.check()?;
        let _a = self.applier.lock();
        let durable = lock(&self.durable).clone();
        let held = |to: &[u64]| {
            let mut logs = self.logs.iter().zip(to);
            logs.any(|(log, to)| to - log.start() > log.size() / RELEASE)
        };
        if !held(&durable) || self.stands_still() || !may(self.checkpointed()) {
            return Ok(false);
        }
        let (starts, lost) = self.releasable(&durable);
        if !held(&starts) {
            return Ok(false);
        }
        self.update(|s| s.starts = starts.clone())?;
        self.retained.fetch_max(lost, AcqRel);
        self.release(&starts);
        self.remove_released_spills();
        Ok(true)
    }

    /// Whether a backup keeps lane `lane`'s log from having room: a copy is being read
    /// for it, or it lacks records that are in the log.
    pub fn is_kept(&self, lane: usize) -> bool {
        let durable = lock(&self.durable)[lane];
        let log = &self.logs[lane];
        let firm = || {
            let holds = lock(&self.holds);
            let mut holds = holds.iter().filter_map(Weak::upgrade);
            holds.any(|h| h.firm.load(Acquire))
        };
        let kept = durable.saturating_sub(log.start());
        let copied = self.paused.load(Acquire) || !self.watches().is_empty();
        copied || kept > log.size() / RELEASE && firm()
    }

    /// Whether the records that are not applied touch at least `pages` pages.
    pub fn has_waiting(&self, pages: u64) -> bool {
        self.applier.lock().count(&self.logs, pages) >= pages
    }

    /// Counts the changes of names that wait to be applied, of which [`Store::is_laden`] tells
    /// from then on. Returns whether they are to be applied soon. Only whole sync points up to
    /// `limit` count. Whoever holds back records passes how far it can apply: else it would hold
    /// back those that are needed first.
    pub fn count_names(&self, limit: u64) -> bool {
        let mut a = self.applier.lock();
        let names = a.count_names(&self.logs, limit);
        // Nothing would be applied.
        let stands = self.stands_still() || !self.watches().is_empty();
        let stands = stands || self.holds_back(&a, limit);
        self.laden.store(names >= MOST_WAITING && !stands, Release);
        if names < LEAST_SOON || stands {
            return false;
        }
        // Each time the whole catalogue is written.
        names >= (lock(&self.area).count() / 16).clamp(LEAST_SOON, MOST_NAMES / 2)
    }

    /// Whether so many changes of names wait to be applied that no more are to come: a node that
    /// takes over applies all of them first.
    #[inline]
    pub fn is_laden(&self) -> bool {
        self.laden.load(Relaxed)
    }

    /// Bytes of the records that are not applied.
    pub fn waiting_bytes(&self) -> u64 {
        let a = self.applier.lock();
        let all = self.logs.iter().zip(&a.cursors);
        all.map(|(log, at)| log.head().saturating_sub(*at)).sum()
    }

    /// The largest part of any log that records above the checkpoint take, from 0 to 1.
    pub fn pressure(&self) -> f64 {
        let durable = lock(&self.durable);
        self.logs
            .iter()
            .zip(&*durable)
            .map(|(l, d)| l.head().saturating_sub(*d) as f64 / l.size() as f64)
            .fold(0.0, f64::max)
    }

    /// The largest part of any log in use, from 0 to 1.
    pub fn fullness(&self) -> f64 {
        self.logs
            .iter()
            .map(|l| l.head().saturating_sub(l.start()) as f64 / l.size() as f64)
            .fold(0.0, f64::max)
    }
}
