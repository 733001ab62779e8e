//! Sync points: ranges of regions become records, or go back to what is
//! committed.
//!
//! Owns the way of a call of `msync` or `gmsync`, with any of their flags (FAMS
//! 3.1): which regions it concerns, what of them was changed, its record, and
//! what becomes of what was collected if it fails.
//!
//! Thread rule: stores into the ranges meanwhile are the program's to keep away
//! (Mojim 3.1, FAMS 3.3); [`msync`] says what becomes of them. A rollback undoes
//! them in part.
//!
//! Invariants:
//! - Who waits for a sync point waits for all that were begun before it in the
//!   volume: acknowledgements are cumulative. So what a call that did not wait
//!   left undone is an error of the next that does, and of every one until it is
//!   done.
//! - A rollback changes nothing before everything that was begun is committed.
//! - What a failed sync point had collected counts as changed again.
//! - In a forked child nothing can be committed.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, MutexGuard};

use crate::last;
use crate::share::guest;
use mojim_config::Rounding;
use mojim_env::{Error, Result};
use mojim_memory::committed::{Held, Images};
use mojim_memory::fork::{check_fork, is_forked, refused};
use mojim_memory::quiescence::User;
use mojim_memory::region::{EXACT_MAX, Region};
use mojim_replica::piece::Piece;
use mojim_replica::primary::Begun;

use super::attached::{Inner, Volume};
use super::remembered;
use super::table::{Mapped, TABLE, locate};

/// Longest piece that grows where the next one goes on.
const MOST_MERGED: usize = 1 << 30;

thread_local! {
    static RANGES: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of a region, as a part of a sync point.
pub(crate) struct Part {
    pub(crate) region: Arc<Region>,
    /// Relative to the region.
    pub(crate) range: Range<usize>,
}

impl Part {
    pub(crate) fn of(region: &Arc<Region>, range: Range<usize>) -> Part {
        let region = region.clone();
        Part { region, range }
    }
}

/// Regions that a sync point uses: their memory stays, and so does what of each
/// part the file has.
type Used<'a> = (Vec<User<'a>>, Vec<Range<usize>>);

/// The caller uses the region from here on. What of a range the region's file has,
/// by the volume's rule, and whether that is less than was asked for.
#[inline]
fn enter<'a>(
    volume: &Inner,
    region: &'a Region,
    range: &Range<usize>,
) -> Result<(User<'a>, Range<usize>, bool)> {
    let user = region.enter()?;
    let asked = range;
    let mut range = range.clone();
    if volume.volume.rounding == Rounding::Page && !range.is_empty() {
        let page = rustix::param::page_size();
        range = range.start / page * page..range.end.next_multiple_of(page);
    }
    let valid = region.valid.load(SeqCst);
    range.end = range.end.min(valid).max(range.start);
    let cut = !asked.is_empty() && asked.end > valid;
    Ok((user, range, cut))
}

/// The same, where a range that is cut short is so by its file's end.
#[inline]
fn enter_one<'a>(
    volume: &Inner,
    region: &'a Region,
    range: &Range<usize>,
) -> Result<(User<'a>, Range<usize>)> {
    loop {
        let sizes = volume.sizes();
        let (user, range, cut) = enter(volume, region, range)?;
        if !cut || volume.is_end(sizes) {
            return Ok((user, range));
        }
        drop(user);
        volume.settle_sizes(&region.name)?;
    }
}

/// The same of several: who waits uses none.
fn enter_all<'a>(volume: &Inner, parts: &'a [Part]) -> Result<Used<'a>> {
    let mut users = Vec::with_capacity(parts.len());
    let mut ranges = Vec::with_capacity(parts.len());
    loop {
        let sizes = volume.sizes();
        let mut short = None;
        for p in parts {
            let (user, range, cut) = enter(volume, &p.region, &p.range)?;
            users.push(user);
            ranges.push(range);
            short = short.or(cut.then_some(&p.region.name));
        }
        match short {
            Some(file) if !volume.is_end(sizes) => {
                users.clear();
                ranges.clear();
                volume.settle_sizes(file)?;
            }
            _ => return Ok((users, ranges)),
        }
    }
}

/// The answer where there is nothing to commit: what others began is waited for.
pub(super) fn nothing(volume: &Inner, until: Until) -> Result<u64> {
    if until == Until::Committed {
        volume.wait_for(volume.unawaited.load(Acquire))?;
    }
    Ok(0)
}

/// A part of a region, whose bytes are at `ptr`, as the next piece of a sync
/// point; one with the last where both go on.
fn push_piece(out: &mut Vec<Piece<'_>>, region: &Region, part: Range<usize>, at: *const u8) {
    let begin = region.offset + part.start as u64;
    if let Some(Piece::Write {
        file,
        offset,
        ptr,
        len,
    }) = out.last_mut()
        && *file == region.file
        && *offset + *len as u64 == begin
        && ptr.wrapping_add(*len) == at
        && *len < MOST_MERGED
    {
        *len += part.len();
        return;
    }
    out.push(Piece::Write {
        file: region.file,
        offset: begin,
        ptr: at,
        len: part.len(),
    });
}

/// How far a sync point is when its call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// It is committed.
    Committed,
    /// It has its number and its bytes: nothing that is stored later is in it.
    Begun,
}

/// One atomic sync point over any byte range of one region (Mojim 3.1).
/// Returns its LSN; 0 if nothing had changed. `Error::NotFound` if the address
/// is in no region.
///
/// Each byte is taken once, at some moment of the call, and all copies get the
/// same. What was stored before the call is in it. Of what other threads store
/// into the range during the call, each byte may be in it or not; what is not
/// counts as changed, and the next sync point of the range commits it. Threads
/// that must not have half a change committed hold a reader-writer lock shared
/// while they change data, and exclusively here (FAMS 3.3; `examples/transfers.c`).
#[inline]
pub fn msync(addr: *const u8, len: usize) -> Result<u64> {
    sync_address(addr, len, Until::Committed)
}

/// The same, but does not wait until it is committed (`MS_ASYNC`, FAMS 3.1). Its
/// bytes are copied: later stores are not in it. It is committed before every
/// later sync point of the volume, or none of these is; by itself, soon. If it
/// cannot be, the next call that waits says so, of any thread: [`msync`],
/// [`gmsync`], [`Volume::fsync`], [`Volume::wait`], [`Volume::detach`]. The log
/// bounds how much is on its way: where it is full, this waits for room.
///
/// [`Volume::fsync`]: crate::Volume::fsync
/// [`Volume::wait`]: crate::Volume::wait
/// [`Volume::detach`]: crate::Volume::detach
pub fn msync_async(addr: *const u8, len: usize) -> Result<u64> {
    sync_address(addr, len, Until::Begun)
}

#[inline]
fn sync_address(addr: *const u8, len: usize, until: Until) -> Result<u64> {
    if is_forked() {
        let done = guest::sync(addr as usize, len, until == Until::Committed);
        return done.map_or_else(|| Err(refused()), noted);
    }
    let generation = TABLE.generation.load(SeqCst);
    let start = addr as usize;
    let m = match remembered::take() {
        Some((g, m))
            if g == generation
                && m.window.span.start <= start
                && start
                    .checked_add(len)
                    .is_some_and(|e| e <= m.window.span.end) =>
        {
            m
        }
        _ => {
            if let Some(done) = guest::sync(start, len, until == Until::Committed) {
                return noted(done);
            }
            locate(start, len)?
        }
    };
    let done = sync_range(&m.volume, &m.region, m.part(start, len), until);
    remembered::put(generation, m);
    done
}

/// A sync point of these bytes, exactly, was begun, or not.
#[inline]
fn note(region: &Region, bytes: Range<usize>, begun: &Result<Begun>, announced: bool) {
    let lsn = begun.as_ref().map_or(0, |b| b.lsn);
    if !region.committed.note(&bytes, lsn, announced) {
        region.copy.mark(bytes);
    }
}

/// A sync point of a guest's, as the calling thread's last.
fn noted(done: Result<guest::Synced>) -> Result<u64> {
    let done = done?;
    if done.last > 0 {
        last::set(done.last);
    }
    Ok(done.lsn)
}

/// What is left of a sync point that was begun.
#[inline]
fn end(inner: &Inner, begun: &Begun, until: Until) -> Result<()> {
    match until {
        Until::Committed => inner.primary.finish_commit(begun),
        Until::Begun => {
            inner.unawaited.fetch_max(begun.lsn, AcqRel);
            inner.primary.start_async(begun);
            Ok(())
        }
    }
}

/// A sync point of one part of a region.
pub(crate) fn sync_range(
    volume: &Inner,
    region: &Arc<Region>,
    range: Range<usize>,
    until: Until,
) -> Result<u64> {
    volume.check_attached()?;
    if !region.write || range.is_empty() {
        return nothing(volume, until);
    }
    if range.len() <= EXACT_MAX && volume.volume.rounding == Rounding::Exact {
        let (user, range) = enter_one(volume, region, &range)?;
        if range.is_empty() {
            drop(user);
            return nothing(volume, until);
        }
        // The short way: one piece, nothing allocated.
        let piece = Piece::Write {
            file: region.file,
            offset: region.offset + range.start as u64,
            ptr: region.copy.base().wrapping_add(range.start),
            len: range.len(),
        };
        let announced = region.committed.announce(&range);
        let turn = region.committed.turn();
        let begun = volume.primary.begin_commit(&[piece]);
        note(region, range, &begun, announced);
        drop(turn);
        drop(user);
        let begun = begun?;
        let done = end(volume, &begun, until);
        volume.made_room(None);
        done?;
        last::set(begun.lsn);
        return Ok(begun.lsn);
    }
    sync_many(volume, &[Part::of(region, range)], until)
}

/// One atomic sync point over several byte ranges, in one or several regions
/// of one volume (`gmsync`, Mojim 3.1). Returns its LSN; 0 if nothing had changed.
/// Of stores during the call: [`msync`].
pub fn gmsync(ranges: &[(*const u8, usize)]) -> Result<u64> {
    sync_addresses(ranges, Until::Committed)
}

/// The same, but does not wait until it is committed; all that [`msync_async`]
/// says holds.
pub fn gmsync_async(ranges: &[(*const u8, usize)]) -> Result<u64> {
    sync_addresses(ranges, Until::Begun)
}

/// There is nothing to pass several ranges on to: half a commit must not be shown.
fn pass_on_nothing(e: Error) -> Error {
    match e {
        Error::NotFound(t) => Error::Invalid(t),
        e => e,
    }
}

fn sync_addresses(ranges: &[(*const u8, usize)], until: Until) -> Result<u64> {
    if guest::any()
        && let Some(done) = guest::sync_many(ranges, until == Until::Committed)
    {
        return noted(done);
    }
    check_fork()?;
    let mut volume = None;
    let mut found = Vec::with_capacity(ranges.len());
    for &(p, len) in ranges {
        let m = locate(p as usize, len).map_err(pass_on_nothing)?;
        let first = volume.get_or_insert_with(|| m.volume.clone());
        if !Arc::ptr_eq(first, &m.volume) {
            return Err(Error::Invalid(
                "the ranges of one gmsync lie in different volumes; atomicity spans one volume"
                    .into(),
            ));
        }
        found.push(Part::of(&m.region, m.part(p as usize, len)));
    }
    match volume {
        Some(volume) => sync_many(&volume, &found, until).map_err(pass_on_nothing),
        None => Ok(0),
    }
}

/// Rolls the bytes `[addr, addr + len)` of a region that was mapped with
/// `atomic` back to what was committed last (`MS_INVALIDATE` alone, FAMS 3.1):
/// exactly these bytes, or the pages that have them where `msync_rounding` is
/// "page". Waits first for everything that was begun, also by
/// [`msync_async`]: what is committed then is what they go back to.
///
/// False, and nothing is done, for a region without `atomic`.
///
/// # Errors
/// Where something that was begun cannot be committed now, it is in doubt what
/// is committed: the memory stays as it is, and the call can be repeated. So it
/// is where what is committed cannot reach the data file now (while a whole copy
/// of the volume is made). After an error in reading the file some of the bytes
/// may be rolled back.
pub fn rollback(addr: *const u8, len: usize) -> Result<bool> {
    if let Some(done) = guest::rollback(addr as usize, len) {
        return done;
    }
    check_fork()?;
    let m = locate(addr as usize, len)?;
    m.volume.check_attached()?;
    if !m.window.atomic {
        return Ok(false);
    }
    rollback_part(&m.volume, &m.region, m.part(addr as usize, len))?;
    Ok(true)
}

/// [`rollback`] of a part of a region.
pub(crate) fn rollback_part(volume: &Inner, region: &Region, range: Range<usize>) -> Result<()> {
    let (user, range) = enter_one(volume, region, &range)?;
    if !region.write || range.is_empty() {
        return Ok(());
    }
    let primary = &volume.primary;
    let mut images = region.committed.hold(|| primary.settled_unspilled())?;
    // What other threads begin from here on they begin while this goes on.
    let last = primary.settled_last();
    volume.wait_for(last)?;
    // Then the file alone tells what is committed, whoever noted what.
    volume.settle(last)?;
    let mut written = Vec::new();
    region.copy.written(range, &mut written)?;
    // These stores must find room: who makes it waits for these images.
    region.copy.metered(&mut |t| {
        written.iter().for_each(|range| t.let_in(range));
    });
    let (committed, base) = (&region.committed, region.copy.base());
    // SAFETY: the region's own memory, in use until `user` ends.
    unsafe { committed.restore(&mut images, base, &written)? };
    drop(images);
    drop(user);
    volume.made_room(Some(&written));
    Ok(())
}

/// A region that is held, with its first place in the list.
type Compared<'a> = (usize, &'a Region, Held<'a>);

/// A sync point of ranges of one volume that is being made.
struct SyncPoint<'a> {
    inner: &'a Inner,
    /// The regions' memory is used.
    users: Vec<User<'a>>,
    parts: &'a [Part],
    /// Of each part, what the file has, by the volume's rule. They stay as they
    /// are, also where the file becomes shorter meanwhile.
    ranges: Vec<Range<usize>>,
    compared: Vec<Compared<'a>>,
    pieces: Vec<Piece<'a>>,
    /// What was collected (and so marked clean), with the range it is of.
    marks: Vec<(usize, Range<usize>)>,
}

/// The first part of each region that can be stored to, in one order, whoever
/// syncs several.
fn in_order(parts: &[Part]) -> impl Iterator<Item = usize> {
    let mut all: Vec<usize> = (0..parts.len())
        .filter(|i| parts[*i].region.write)
        .collect();
    all.sort_by_key(|i| Arc::as_ptr(&parts[*i].region) as usize);
    all.dedup_by_key(|i| Arc::as_ptr(&parts[*i].region) as usize);
    all.into_iter()
}

impl<'a> SyncPoint<'a> {
    fn new(inner: &'a Inner, parts: &'a [Part]) -> Result<SyncPoint<'a>> {
        let (users, ranges) = enter_all(inner, parts)?;
        let looks = |i: usize| parts[i].region.write && ranges[i].len() > EXACT_MAX;
        let mut compared = Vec::new();
        if (0..parts.len()).any(looks) {
            // Also those that are not looked through: it must not wait for the turn
            // of one with another held.
            for i in in_order(parts) {
                let region = &*parts[i].region;
                let same = |j: &usize| Arc::ptr_eq(&parts[*j].region, &parts[i].region);
                let images = match (0..parts.len()).filter(same).any(looks) {
                    true => region
                        .committed
                        .hold(|| inner.primary.settled_unspilled())?,
                    false => region.committed.lock(),
                };
                compared.push((i, region, region.committed.take(images)));
            }
        }
        Ok(SyncPoint {
            inner,
            users,
            parts,
            ranges,
            compared,
            pieces: Vec::with_capacity(parts.len()),
            marks: Vec::new(),
        })
    }

    /// Finds what it consists of. `found`: for what was collected.
    fn gather(&mut self, found: &mut Vec<Range<usize>>) -> Result<()> {
        let applied = self.inner.primary.store.applied();
        for (i, Part { region, .. }) in self.parts.iter().enumerate() {
            let range = self.ranges[i].clone();
            if !region.write || range.is_empty() {
                continue;
            }
            let base = region.copy.base();
            if range.len() <= EXACT_MAX {
                // SAFETY: inside the region.
                let ptr = unsafe { base.add(range.start) };
                push_piece(&mut self.pieces, region, range, ptr);
                continue;
            }
            let from = found.len();
            let collected = region.copy.collect(range, found);
            self.marks.push((i, from..found.len()));
            collected?;
            let mine = self.compared.iter_mut();
            let (_, _, held) = mine
                .into_iter()
                .find(|(j, ..)| Arc::ptr_eq(&self.parts[*j].region, region))
                .expect("each was held");
            let pieces = &mut self.pieces;
            let push = |part, at| push_piece(pieces, region, part, at);
            let committed = &region.committed;
            committed.changes(&mut held.images, base, &found[from..], applied, push)?;
        }
        Ok(())
    }

    /// Begins it; whoever compares these regions next finds it begun.
    fn begin(&mut self) -> Result<Begun> {
        let exact = || {
            let parts = self.parts.iter().map(|p| &*p.region).zip(&self.ranges);
            parts.filter(|(region, r)| region.write && r.len() <= EXACT_MAX)
        };
        let announced: Vec<bool> = exact()
            .map(|(region, range)| region.committed.announce(range))
            .collect();
        let turns = self.turns();
        let begun = self.inner.primary.begin_commit(&self.pieces);
        for ((region, range), announced) in exact().zip(announced) {
            note(region, range.clone(), &begun, announced);
        }
        drop(turns);
        let begun = begun?;
        for (_, region, held) in &mut self.compared {
            region.committed.done(&mut held.images, begun.lsn);
        }
        Ok(begun)
    }

    /// The turns of a sync point that holds nothing.
    fn turns(&self) -> (Vec<MutexGuard<'a, Images>>, Vec<Held<'a>>) {
        let (mut turns, mut held) = (Vec::new(), Vec::new());
        if self.compared.is_empty() {
            let regions = || in_order(self.parts).map(|i| &*self.parts[i].region);
            if self.inner.primary.must_spill(&self.pieces) {
                // It reads its bytes before it has an LSN.
                held.extend(regions().map(|r| r.committed.take(r.committed.lock())));
            } else if self.parts.iter().any(|p| p.region.committed.is_taken()) {
                turns.extend(regions().map(|r| r.committed.lock()));
            }
        }
        (turns, held)
    }

    /// It was not begun.
    fn undo(&mut self) {
        let last = self.inner.primary.last();
        for (_, region, held) in &mut self.compared {
            region.committed.failed(&mut held.images, last);
        }
    }

    /// What was collected counts as changed again.
    fn mark(&self, found: &[Range<usize>]) {
        for (i, span) in &self.marks {
            for r in &found[span.clone()] {
                self.parts[*i].region.copy.mark(r.clone());
            }
        }
    }
}

/// One atomic sync point of parts of a volume's regions.
pub(crate) fn sync_many(inner: &Inner, parts: &[Part], until: Until) -> Result<u64> {
    if parts.is_empty() {
        return Ok(0);
    }
    inner.check_attached()?;
    let with = |buf: &RefCell<Vec<Range<usize>>>| {
        let mut own = Vec::new();
        let mut held = buf.try_borrow_mut();
        let found = held.as_deref_mut().unwrap_or(&mut own);
        found.clear();
        let mut point = SyncPoint::new(inner, parts)?;
        let begun = match point.gather(found) {
            Ok(()) if point.pieces.is_empty() => {
                // What there was others have begun to commit.
                let last = point.compared.iter().map(|c| c.2.images.last()).max();
                let last = last.unwrap_or(0);
                drop(point);
                inner.made_room(Some(found));
                if until == Until::Committed {
                    inner.wait_for(last.max(inner.unawaited.load(Acquire)))?;
                }
                last::raise(last);
                return Ok(0);
            }
            Ok(()) => point.begin(),
            Err(e) => Err(e),
        };
        let done = match begun {
            Ok(begun) => {
                // The others' turn, while this one waits.
                point.compared.clear();
                point.users.clear();
                let done = end(inner, &begun, until).map(|()| begun.lsn);
                inner.made_room(Some(found));
                done
            }
            Err(e) => {
                point.undo();
                Err(e)
            }
        };
        match &done {
            Ok(lsn) => last::set(*lsn),
            Err(_) => point.mark(found),
        }
        done
    };
    // At the process's end the thread's buffer may be gone already.
    RANGES
        .try_with(with)
        .unwrap_or_else(|_| with(&RefCell::default()))
}

impl Mapped {
    /// A sync point of a part of it.
    pub(super) fn sync(&self, range: Range<usize>) -> Result<u64> {
        if !self.window.write {
            return Ok(0);
        }
        let part = Part::of(&self.region, range);
        sync_many(&self.volume, &[part], Until::Committed)
    }
}

impl Inner {
    /// All regions of a file, as parts of a sync point.
    fn parts_of(&self, file: &str) -> Result<Vec<Part>> {
        let mut names = self.names()?;
        let mut mine = self.regions();
        // A region's name tells without a look at the data area, which is held
        // while records are applied.
        let id = match mine.iter().find(|r| !names.renamed && r.name == file) {
            Some(region) => region.file,
            None => self.find_or_create(&mut names, file, false)?.0,
        };
        mine.retain(|r| r.file == id);
        let all = mine.iter().map(|r| Part::of(r, 0..r.copy.len()));
        Ok(all.collect())
    }

    /// Some of what was stored to may be committed now, or undone. `found`: the
    /// parts of regions that were found to be stored to, where that was looked for.
    #[inline]
    pub(crate) fn made_room(&self, found: Option<&[Range<usize>]>) {
        if let Some(memory) = &self.memory {
            memory.after(found, &|| self.regions());
        }
    }
}

impl Volume {
    /// A sync point of all regions of a file, atomic as a whole (`fsync`,
    /// `fdatasync`). Returns its LSN; 0 if nothing had changed. Waits, as every
    /// sync point does, for those of the volume whose calls did not.
    pub fn fsync(&self, file: &str) -> Result<u64> {
        check_fork()?;
        let inner = &self.0;
        inner.check_attached()?;
        loop {
            let parts = inner.parts_of(file)?;
            if parts.is_empty() {
                inner.wait_for(inner.unawaited.load(Acquire))?;
            }
            match sync_many(inner, &parts, Until::Committed) {
                // One of them has gone meanwhile.
                Err(Error::NotFound(_)) => {}
                done => return done,
            }
        }
    }
}
