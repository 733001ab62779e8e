//! Sync points: ranges of regions become records, or go back to what is
//! committed.
//!
//! Owns the course of a call of `msync` or `gmsync`, with any of their flags (FAMS 3.1):
//!
//! - which regions it concerns
//! - which bytes of them were changed
//! - its record
//! - what happens to the collected changes if it fails
//!
//! Thread rule: it is the program's task to prevent stores into the ranges during the call (Mojim
//! 3.1, FAMS 3.3). [`msync`] says what happens to such stores. A rollback undoes some of their
//! bytes.
//!
//! Invariants:
//!
//! - A call that waits for a sync point waits for all that were begun before it in the volume:
//!   acknowledgements are cumulative. So if a sync point whose call did not wait cannot be
//!   committed, every call that waits fails until it is.
//! - A rollback changes nothing before everything that was begun is committed.
//! - The changes that a failed sync point had collected count as changed again.
//! - A forked child can commit nothing itself. As a guest it asks the owner.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, MutexGuard};

use crate::last;
use crate::share::guest;
use mojim_config::Rounding;
use mojim_env::{Context, Error, Result, reserve};
use mojim_memory::committed::{Images, ImagesGuard};
use mojim_memory::fork::{check_fork, is_forked, refused};
use mojim_memory::quiescence::User;
use mojim_memory::region::{EXACT_MAX, Region};
use mojim_replica::piece::Piece;
use mojim_replica::primary::Begun;

use super::attached::{Inner, Volume};
use super::remembered;
use super::table::{Mapped, TABLE, locate};

/// A piece of this length or more is not merged with the piece that follows it.
const MOST_MERGED: usize = 1 << 30;

thread_local! {
    static RANGES: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// Has the thread's own variables exist that a sync point uses. The C library ends the
/// process where it has no memory to note that they go with the thread.
pub fn prepare_thread() {
    if !is_forked() {
        let _ = RANGES.try_with(|_| ());
        remembered::prepare();
    }
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

/// Regions that a sync point uses, and the part of each range that lies within the
/// file. While in use, their memory stays, and the file keeps these parts.
type Used<'a> = (Vec<User<'a>>, Vec<Range<usize>>);

/// The caller uses the region from here on. Returns the part of `range` that lies
/// within the region's file, rounded as the volume is configured, and whether that
/// is less than was asked for.
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

/// [`enter`], but a range is cut short only at a file's end that is not in doubt.
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
        volume.wait_for_sizes(&region.name)?;
    }
}

/// [`enter_one`] for several parts. While it waits it uses no region.
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
                volume.wait_for_sizes(file)?;
            }
            _ => return Ok((users, ranges)),
        }
    }
}

fn no_memory() -> String {
    "listing what was stored".into()
}

/// A sync point with nothing to commit: waits for what other calls began.
pub(super) fn nothing(volume: &Inner, until: Until) -> Result<u64> {
    if until == Until::Committed {
        volume.wait_for(volume.unawaited.load(Acquire))?;
    }
    Ok(0)
}

/// Appends a part of a region, whose bytes are at `at`, as a piece of a sync point.
/// Merges it with the last piece if it continues that in the file and in memory.
///
/// # Errors
/// If there is no memory for it.
pub(super) fn push_piece(
    out: &mut Vec<Piece<'_>>,
    region: &Region,
    part: Range<usize>,
    at: *const u8,
) -> std::io::Result<()> {
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
        return Ok(());
    }
    reserve::room(out, 1)?;
    out.push(Piece::Write {
        file: region.file,
        offset: begin,
        ptr: at,
        len: part.len(),
    });
    Ok(())
}

/// How far a sync point has come when its call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// It is committed.
    Committed,
    /// It has its LSN and its bytes: nothing that is stored later is in it.
    Begun,
}

/// One atomic sync point over any byte range of one region (Mojim 3.1).
/// Returns its LSN; 0 if nothing had changed. `Error::NotFound` if the address
/// is in no region.
///
/// Each byte is read once, at some moment of the call, and all copies get the same
/// value. The sync point has everything stored before the call. Of what other
/// threads store into the range during the call, it may have each byte or not;
/// bytes that it does not have count as changed, and the next sync point of the
/// range commits them. Threads that must not have half a change committed hold a
/// reader-writer lock shared while they change data, and exclusively here (FAMS
/// 3.3; `examples/transfers.c`).
#[inline]
pub fn msync(addr: *const u8, len: usize) -> Result<u64> {
    sync_address(addr, len, Until::Committed)
}

/// [`msync`] that does not wait until the sync point is committed (`MS_ASYNC`, FAMS
/// 3.1). Its bytes are copied: later stores are not in it. It is committed soon,
/// without a further call, and no later sync point of the volume before it. If it
/// cannot be committed, the next call that waits fails, in any thread: [`msync`],
/// [`gmsync`], [`Volume::fsync`], [`Volume::wait`], [`Volume::detach`]. The log
/// bounds how much is under way: if it is full, this call waits for room.
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

/// Notes that an exact-range sync point of these bytes was begun, or that it failed.
#[inline]
pub(super) fn note(region: &Region, bytes: Range<usize>, begun: &Result<Begun>, announced: bool) {
    let lsn = begun.as_ref().map_or(0, |b| b.lsn);
    if !region.committed.note(&bytes, lsn, announced) {
        region.copy.mark(bytes);
    }
}

/// Makes a guest's sync point the calling thread's last one.
fn noted(done: Result<guest::Synced>) -> Result<u64> {
    let done = done?;
    if done.last > 0 {
        last::set(done.last);
    }
    Ok(done.lsn)
}

/// Waits for a sync point that was begun, or starts to send it and does not wait.
#[inline]
pub(super) fn end(inner: &Inner, begun: &Begun, until: Until) -> Result<()> {
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
        // The fast path: one piece, no allocation.
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
/// For stores during the call, see [`msync`].
pub fn gmsync(ranges: &[(*const u8, usize)]) -> Result<u64> {
    sync_addresses(ranges, Until::Committed)
}

/// [`gmsync`] that does not wait until the sync point is committed; see
/// [`msync_async`].
pub fn gmsync_async(ranges: &[(*const u8, usize)]) -> Result<u64> {
    sync_addresses(ranges, Until::Begun)
}

/// A caller may pass an msync that fails with `NotFound` on to the system, but not a
/// `gmsync`: half a commit must not be visible. So that fails with `Invalid`.
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
                "the ranges of one sync point lie in different volumes; atomicity spans one volume"
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
/// exactly these bytes, or the pages that contain them if `msync_rounding` is
/// "page". First waits for everything that was begun, also by [`msync_async`],
/// and then rolls back to what is committed.
///
/// Returns false and does nothing for a region without `atomic`.
///
/// # Errors
/// If something that was begun cannot be committed now, it is in doubt what is
/// committed: the memory stays as it is, and the call can be repeated. The same
/// holds if what is committed cannot reach the data file now (while a whole copy
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
    let mut images = region.committed.hold(|| primary.last_unless_spilling())?;
    // Sync points that other threads begin from here on are concurrent with this rollback.
    let last = primary.last_with_records();
    volume.wait_for(last)?;
    // After this the file has all that is committed; no note needs to be looked at.
    volume.settle(last)?;
    let mut written = Vec::new();
    region.copy.written(range, &mut written)?;
    // These stores must not wait for room: the thread that makes room would wait for the
    // images that are held here.
    region.copy.metered(&mut |t| {
        written.iter().for_each(|range| t.let_in(range));
    });
    let (committed, base) = (&region.committed, region.copy.base());
    // SAFETY: the region's own memory, in use until `user` is dropped.
    unsafe { committed.restore(&mut images, base, &written)? };
    drop(images);
    drop(user);
    volume.made_room(Some(&written));
    Ok(())
}

/// A region that is held, with the index of its first part.
type Compared<'a> = (usize, &'a Region, ImagesGuard<'a>);

/// A sync point of one volume while it is being made.
struct SyncPoint<'a> {
    inner: &'a Inner,
    /// Keep the regions' memory in use.
    users: Vec<User<'a>>,
    parts: &'a [Part],
    /// Of each part, the bytes within the file, rounded as the volume is configured.
    /// They do not change even if the file becomes shorter meanwhile.
    ranges: Vec<Range<usize>>,
    compared: Vec<Compared<'a>>,
    pieces: Vec<Piece<'a>>,
    /// For each part that was searched: its index, and which entries of `found` were
    /// collected from it (and so marked clean).
    marks: Vec<(usize, Range<usize>)>,
}

/// Index of the first part of each region that can be stored to. The order of regions
/// is the same in all threads: it is their lock order.
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
            // Also regions that are not searched: with one region held, it must not wait
            // for its turn at another.
            for i in in_order(parts) {
                let region = &*parts[i].region;
                let same = |j: &usize| Arc::ptr_eq(&parts[*j].region, &parts[i].region);
                let images = match (0..parts.len()).filter(same).any(looks) {
                    true => region
                        .committed
                        .hold(|| inner.primary.last_unless_spilling())?,
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

    /// Finds the pieces. Appends the written ranges that it collects to `found`.
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
                push_piece(&mut self.pieces, region, range, ptr).context(no_memory)?;
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
            let (pieces, mut pushed) = (&mut self.pieces, Ok(()));
            let push = |part, at| {
                // After one that did not fit, none may be merged.
                if pushed.is_ok() {
                    pushed = push_piece(pieces, region, part, at);
                }
            };
            let committed = &region.committed;
            committed.changes(&mut held.images, base, &found[from..], applied, push)?;
            pushed.context(no_memory)?;
        }
        Ok(())
    }

    /// Begins it, and notes it in its regions before another thread can compare them.
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

    /// The turns at its regions, if it holds none of them yet.
    fn turns(&self) -> (Vec<MutexGuard<'a, Images>>, Vec<ImagesGuard<'a>>) {
        let (mut turns, mut held) = (Vec::new(), Vec::new());
        if self.compared.is_empty() {
            let regions = || in_order(self.parts).map(|i| &*self.parts[i].region);
            if self.inner.primary.must_spill(&self.pieces) {
                // It will read its bytes before it has an LSN.
                held.extend(regions().map(|r| r.committed.take(r.committed.lock())));
            } else if self.parts.iter().any(|p| p.region.committed.is_taken()) {
                turns.extend(regions().map(|r| r.committed.lock()));
            }
        }
        (turns, held)
    }

    /// Undoes what `gather` noted, if it could not be begun.
    fn undo(&mut self) {
        let last = self.inner.primary.last();
        for (_, region, held) in &mut self.compared {
            region.committed.failed(&mut held.images, last);
        }
    }

    /// What was collected counts as changed again. While memory is short, so does what lies
    /// between: that takes none.
    fn mark(&self, found: &[Range<usize>]) {
        for (i, span) in &self.marks {
            let (found, copy) = (&found[span.clone()], &self.parts[*i].region.copy);
            match found {
                [first, .., last] if reserve::is_short() => copy.mark(first.start..last.end),
                _ => found.iter().for_each(|r| copy.mark(r.clone())),
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
                // All changes found are in sync points that others have begun.
                let last = point.compared.iter().map(|c| c.2.images.last()).max();
                let last = last.unwrap_or(0);
                drop(point);
                inner.made_room(Some(found));
                match until {
                    Until::Committed => {
                        inner.wait_for(last.max(inner.unawaited.load(Acquire)))?;
                    }
                    // Who waits next waits for them too.
                    Until::Begun => {
                        inner.unawaited.fetch_max(last, AcqRel);
                        inner.primary.await_records();
                    }
                }
                last::raise(last);
                return Ok(0);
            }
            Ok(()) => point.begin(),
            Err(e) => Err(e),
        };
        let done = match begun {
            Ok(begun) => {
                // Other threads may use the regions while this one waits.
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
        if reserve::is_short() {
            *found = Vec::new();
        }
        done
    };
    // While the thread ends, its buffer may be gone already.
    RANGES
        .try_with(with)
        .unwrap_or_else(|_| with(&RefCell::default()))
}

impl Mapped {
    /// A sync point of a part of the window.
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
        // A region's name avoids a look-up in the data area, whose lock is held while
        // records are applied.
        let id = match mine.iter().find(|r| !names.renamed && r.name == file) {
            Some(region) => region.file,
            None => self.find_or_create(&mut names, file, false)?.0,
        };
        mine.retain(|r| r.file == id);
        let all = mine.iter().map(|r| Part::of(r, 0..r.copy.len()));
        Ok(all.collect())
    }

    /// To be called after something was committed or undone. `found`: the parts of
    /// regions that were found to be stored to, if they were searched.
    #[inline]
    pub(crate) fn made_room(&self, found: Option<&[Range<usize>]>) {
        if let Some(memory) = &self.memory {
            memory.after(found, &|| self.regions());
        }
    }
}

impl Volume {
    /// A sync point of all regions of a file, atomic as a whole (`fsync`,
    /// `fdatasync`). Returns its LSN; 0 if nothing had changed. Like every sync
    /// point that waits, also waits for those of the volume whose calls did not.
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
                // A region was unmapped meanwhile.
                Err(Error::NotFound(_)) => {}
                done => return done,
            }
        }
    }
}
