//! The committed bytes of a region, page by page, for sync points that send only what was changed.
//!
//! The committed bytes are the data file's, with those of the records that are not
//! applied to it yet. The module owns:
//!
//! - images of the pages for which all such records are known
//! - for every page, the last LSN of a sync point that wrote to it and left no image
//!
//! A written page is compared with its image, or with the file if no record is
//! outstanding. If neither is possible, all of it counts as changed.
//!
//! Invariants:
//! - An image has every byte that is committed, or is being committed. This holds up to
//!   the last LSN noted for its page when the image was made. A later note ends it.
//! - A page is compared with the file only if every record that wrote to it is
//!   applied: those noted, and those appended before noting began. A sync point may send
//!   its bytes without a comparison. It is announced before it reads the page (`notes`).
//!   So no comparison misses it between its reading and its note.
//! - One thread at a time compares and appends (`Images`, a lock for each region).
//!   A sync point that finds nothing changed waits for what others have collected.
//! - Of two records that overlap, the one with the higher LSN has everything that was
//!   stored before either call began. A sync point that compares takes its bytes
//!   before it has an LSN. So others of the region take no LSN until it has one
//!   (`ImagesGuard`, `turn`). The exception is one that was announced before `take`: the
//!   comparison sees what was stored before that, and counts its pages as changed. The
//!   lower record alone may have what is stored during both calls. That is still marked
//!   written.
//! - Images are bounded, for the whole process. Beyond the bound pages are
//!   compared, and no image is kept.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::diff;
use crate::file_pages::{FilePages, MOST_PAGES};
use crate::page_lsns::{Note, PageLsns};
use mojim_env::locks::lock;
use mojim_env::page_delta::{PART_OVERHEAD, PageDelta};
use mojim_env::{Context, Error, File, Result, reserve};
use mojim_env::{locks, racing};

/// Most bytes of images in the process, free buffers included.
const MOST_BYTES: usize = 64 << 20;
/// A region with no more images than this does not look for those that are applied.
const MANY: usize = 512;

/// Free buffers that a region keeps while there are many images in the process.
const SPARE: usize = 64;

/// Bytes of images, and of buffers for them.
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// [`MOST_BYTES`], or less where memory is bounded.
static MOST: AtomicUsize = AtomicUsize::new(MOST_BYTES);

/// Bounds the images of all volumes to this many bytes, from now on.
pub fn bound_images(bytes: usize) {
    MOST.fetch_min(bytes, Relaxed);
}

/// Whether there are so many images that those that are applied should be looked
/// for.
pub fn are_many() -> bool {
    BYTES.load(Relaxed) > MOST.load(Relaxed) / 2
}

/// A page's worth of memory.
struct Buffer(Box<[u64]>);

impl Buffer {
    /// None if the bound is reached, or the process gets no more memory.
    fn new(page: usize) -> Option<Buffer> {
        if reserve::is_short() {
            return None;
        }
        if BYTES.fetch_add(page, Relaxed) + page > MOST.load(Relaxed) {
            BYTES.fetch_sub(page, Relaxed);
            return None;
        }
        Some(Buffer(vec![0; page / 8].into()))
    }

    fn ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    fn bytes(&mut self) -> &mut [u8] {
        let len = self.0.len() * 8;
        // SAFETY: all of the buffer, as bytes.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0.len() * 8, Relaxed);
    }
}

/// Most bytes of an image made of parts; a larger one is whole.
const MOST_PARTS: usize = 2048;

/// Parts of a page, counted in `BYTES`.
#[derive(Default)]
struct Counted(PageDelta);

impl Counted {
    fn push(&mut self, at: usize, bytes: &[u8]) {
        BYTES.fetch_add(PART_OVERHEAD + bytes.len(), Relaxed);
        self.0.push(at, bytes);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0.len(), Relaxed);
    }
}

/// Bytes that do not move until all of them are cleared.
#[derive(Default)]
struct Arena {
    /// Never filled beyond their capacity.
    chunks: Vec<Vec<u8>>,
    /// The chunk that is being filled.
    now: usize,
}

impl Arena {
    const CHUNK: usize = 64 << 10;
    /// Chunks that are kept for the next time.
    const KEPT: usize = 4;

    fn put(&mut self, bytes: &[u8]) -> *const u8 {
        let room = |c: &Vec<u8>| c.capacity() - c.len() >= bytes.len();
        while self.chunks.get(self.now).is_some_and(|c| !room(c)) {
            self.now += 1;
        }
        if self.now == self.chunks.len() {
            let size = bytes.len().max(Arena::CHUNK);
            self.chunks.push(Vec::with_capacity(size));
        }
        let chunk = &mut self.chunks[self.now];
        let at = chunk.len();
        chunk.extend_from_slice(bytes);
        chunk[at..].as_ptr()
    }

    fn clear(&mut self) {
        self.chunks.truncate(Arena::KEPT);
        self.chunks.iter_mut().for_each(Vec::clear);
        self.now = 0;
    }
}

/// Most differences of a page that are kept apart: each costs memory while the sync
/// point is made.
const MOST_RUNS: usize = 32;

/// Merges the differences into one if there are too many.
fn unite(runs: &mut Vec<(usize, usize)>) {
    if runs.len() > MOST_RUNS {
        let all = (runs[0].0, runs[runs.len() - 1].1);
        runs.clear();
        runs.push(all);
    }
}

/// An LSN that no data file ever reaches. (`u64::MAX` stands for a record that is
/// being made, and ends images.)
const UNKNOWN: u64 = u64::MAX - 1;

/// Hashes page numbers, which nobody chooses in order to make them collide.
#[derive(Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("the number of a page is hashed")
    }

    fn write_usize(&mut self, page: usize) {
        // The map uses the low bits for the place, and 7 high ones as a tag.
        let spread = (page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ spread >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

enum Kind {
    Whole(Buffer),
    Delta(Counted),
}

struct Image {
    kind: Kind,
    /// The last LSN noted for its page when it was made.
    noted: u64,
    /// The LSN of the last record in it; `u64::MAX` while that record is being
    /// made.
    lsn: u64,
}

/// What is committed of one region.
pub struct Committed {
    data: FilePages,
    offset: u64,
    pages: usize,
    page: usize,
    notes: OnceLock<PageLsns>,
    /// The holder of the images has taken bytes, or will, for a record that has no
    /// LSN yet.
    taken: AtomicBool,
    images: Mutex<Images>,
}

/// The images of a region, held by a sync point that takes its bytes before it has
/// an LSN: meanwhile no sync point that is announced later gets an LSN for newer bytes,
/// which the older ones would overwrite.
pub struct ImagesGuard<'a> {
    committed: &'a Committed,
    /// The images.
    pub images: MutexGuard<'a, Images>,
}

impl Drop for ImagesGuard<'_> {
    fn drop(&mut self) {
        self.committed.taken.store(false, Release);
    }
}

/// A part of a page that is to be compared.
struct Step {
    page: usize,
    part: Range<usize>,
    noted: Note,
    /// Records up to this LSN may have written to the page and be in no image.
    known: u64,
    image: Option<Image>,
}

impl Step {
    /// Whether the page is compared with the data file, which has every record up
    /// to `applied`.
    fn takes_file(&self, applied: u64) -> bool {
        match &self.image {
            Some(image) => matches!(image.kind, Kind::Delta(_)),
            None => self.known <= applied,
        }
    }
}

/// The images of a region. Their holder may append what it found by comparing.
#[derive(Default)]
pub struct Images {
    pages: HashMap<usize, Image, BuildHasherDefault<PageHasher>>,
    free: Vec<Buffer>,
    /// Pages that are compared together, and (in `scratch`) the file's bytes for
    /// them.
    batch: Vec<Step>,
    scratch: Vec<u64>,
    /// The differences found in one page: begin and end.
    runs: Vec<(usize, usize)>,
    /// Buffers of whole images that have ended, and (in `parts`) bytes of parts:
    /// the sync point that is being made points to them.
    ended: Vec<Buffer>,
    parts: Arena,
    /// Pages of the sync point that is being made.
    touched: Vec<usize>,
    /// The number of images beyond which those that are applied are looked for.
    many: usize,
    /// The LSN up to which records were applied at the last sweep.
    swept: u64,
    /// Records up to this LSN may have written to any page without a note;
    /// [`UNKNOWN`] while that LSN is not known.
    since: u64,
    /// The LSN of the last sync point that was found by comparing.
    last: u64,
}

impl Images {
    /// The LSN of the last sync point that was found by comparing; 0: none.
    pub fn last(&self) -> u64 {
        self.last
    }
}

impl Committed {
    /// For `len` bytes of a file, from `offset` on, mapped just now.
    pub fn new(file: Arc<dyn File>, offset: u64, len: usize) -> Committed {
        let page = rustix::param::page_size();
        let pages = len.div_ceil(page);
        Committed {
            data: FilePages::new(file, offset, pages),
            offset,
            pages,
            page,
            notes: OnceLock::new(),
            taken: AtomicBool::new(false),
            images: Mutex::default(),
        }
    }

    /// Until the guard is dropped, no other thread compares this region. `floor`
    /// gives the last LSN, if everything that is appended later is noted; `None`
    /// while some sync point has read its bytes and has no LSN yet. Until there is
    /// a floor, everything counts as changed.
    pub fn hold(&self, floor: impl FnOnce() -> Option<u64>) -> Result<MutexGuard<'_, Images>> {
        let mut images = self.lock();
        if self.notes.get().is_none() {
            let notes = PageLsns::new(self.pages)?;
            assert!(self.notes.set(notes).is_ok(), "one thread at a time");
            images.since = UNKNOWN;
        }
        if images.since == UNKNOWN {
            images.since = floor().unwrap_or(UNKNOWN);
        }
        Ok(images)
    }

    /// The lock of [`Committed::hold`], only to keep others from comparing: its
    /// holder must not call [`Committed::changes`].
    pub fn lock(&self) -> MutexGuard<'_, Images> {
        lock(&self.images)
    }

    /// As [`Committed::lock`], but `None` if a thread holds the images. It also
    /// keeps the file's length as it is.
    pub fn try_hold(&self) -> Option<MutexGuard<'_, Images>> {
        locks::try_lock(&self.images)
    }

    /// From here on the holder takes bytes, and has no LSN for them yet.
    pub fn take<'a>(&'a self, images: MutexGuard<'a, Images>) -> ImagesGuard<'a> {
        // A sync point that does not see the flag has announced its bytes, and they
        // were stored before that: the holder reads both after this.
        self.taken.store(true, SeqCst);
        fence(SeqCst);
        ImagesGuard {
            committed: self,
            images,
        }
    }

    /// A sync point that sends these bytes without a comparison is about to read
    /// them: until it is noted, neither the file nor an image stands for their
    /// pages. Returns whether a comparison can see this.
    #[inline]
    pub fn announce(&self, bytes: &Range<usize>) -> bool {
        let notes = self.notes.get();
        if let Some(notes) = notes {
            self.pages_of(bytes).for_each(|page| notes.begin(page));
        }
        // The bytes are read after the announcement, by plain reads, and `turn`
        // looks after the stores before it are visible. Without notes nothing was
        // compared yet: everything before the first comparison counts.
        if notes.is_none() || cfg!(not(target_arch = "x86_64")) {
            fence(SeqCst);
        }
        notes.is_some()
    }

    /// Called after `announce`, before an LSN is taken: waits for the sync point
    /// that has taken bytes and has no LSN yet. `None`, at the cost of a load, if
    /// there is none.
    #[inline]
    pub fn turn(&self) -> Option<MutexGuard<'_, Images>> {
        self.is_taken().then(|| self.lock())
    }

    /// Whether a sync point has taken bytes and has no LSN yet.
    #[inline]
    pub fn is_taken(&self) -> bool {
        self.taken.load(SeqCst)
    }

    /// The announced sync point was appended as `lsn`, or was not made (0). Called
    /// before its caller goes on. False if the first comparison came in between and
    /// did not see the announcement: then the bytes have to be compared once more.
    #[inline]
    pub fn note(&self, bytes: &Range<usize>, lsn: u64, announced: bool) -> bool {
        let Some(notes) = self.notes.get() else {
            return true;
        };
        self.pages_of(bytes).for_each(|page| match announced {
            true => notes.end(page, lsn),
            false => notes.put(page, lsn),
        });
        announced
    }

    fn pages_of(&self, bytes: &Range<usize>) -> Range<usize> {
        match bytes.is_empty() {
            true => 0..0,
            false => bytes.start / self.page..(bytes.end - 1) / self.page + 1,
        }
    }

    /// Pushes the parts of `ranges`, ascending, that differ or may differ from what
    /// is committed, each with a pointer to its bytes: in the memory at `base`, or
    /// in an image that stays until `done` or `failed`. `applied`: the LSN up to
    /// which the data file is current. What is pushed counts as committed from here
    /// on; if it is not, or after an error, the caller calls `failed`.
    pub fn changes(
        &self,
        images: &mut Images,
        base: *const u8,
        ranges: &[Range<usize>],
        applied: u64,
        mut push: impl FnMut(Range<usize>, *const u8),
    ) -> Result<()> {
        if applied > images.swept && images.pages.len() > images.many.max(MANY) {
            images.sweep(applied);
        }
        self.check_length(ranges)?;
        let mut last = None;
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let page = at / self.page;
                let end = range.end.min((page + 1) * self.page);
                if images.batch.len() == MOST_PAGES || last == Some(page) {
                    self.compare(images, base, applied, &mut push)?;
                }
                if images.batch.is_empty() {
                    images.make_room()?;
                }
                let step = self.step(images, page, at..end, applied);
                images.batch.push(step);
                (at, last) = (end, Some(page));
            }
        }
        self.compare(images, base, applied, &mut push)
    }

    /// A thread that touches memory whose file was cut behind our back dies of
    /// SIGBUS. One that only asks for what has changed gets an error instead.
    fn check_length(&self, ranges: &[Range<usize>]) -> Result<()> {
        let Some(last) = ranges.last() else {
            return Ok(());
        };
        let has = self.data.file_len()?;
        let end = self.offset + last.end as u64;
        if has.next_multiple_of(self.page as u64) < end {
            let what = format!(
                "a data file was cut: it is {has} bytes long, and memory up to {end} has changed"
            );
            let eio = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(Error::io(what, &eio));
        }
        Ok(())
    }

    /// What is known of a page, a part of which is to be compared. Its image is
    /// taken out.
    fn step(&self, images: &mut Images, page: usize, part: Range<usize>, applied: u64) -> Step {
        let notes = self.notes.get().expect("it is held");
        let noted = notes.get(page);
        let mut known = images.since.max(noted.lsn());
        if noted.is_under_way() {
            known = u64::MAX;
        }
        let mut image = images.pages.remove(&page);
        if let Some(old) = image.take_if(|i| i.noted != noted.lsn() || known == u64::MAX) {
            known = known.max(old.lsn);
            images.end(old);
        }
        // The file has the parts by now.
        image.take_if(|i| i.lsn <= applied && matches!(i.kind, Kind::Delta(_)));
        Step {
            page,
            part,
            noted,
            known,
            image,
        }
    }

    /// Compares the batch, and leaves it empty.
    fn compare(
        &self,
        images: &mut Images,
        base: *const u8,
        applied: u64,
        push: &mut impl FnMut(Range<usize>, *const u8),
    ) -> Result<()> {
        let mut batch = std::mem::take(&mut images.batch);
        let mut scratch = std::mem::take(&mut images.scratch);
        let (mut pages, mut n) = ([0; MOST_PAGES], 0);
        for step in batch.iter().filter(|s| s.takes_file(applied)) {
            pages[n] = step.page;
            n += 1;
        }
        let room = (n * self.page / 8).max(scratch.len());
        scratch.resize(room, 0);
        // SAFETY: the first `n` pages of the scratch, as bytes.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast::<u8>(), n * self.page)
        };
        let read = self.data.read(&pages[..n], bytes);
        let mut bytes = bytes.chunks_mut(self.page);
        for step in batch.drain(..) {
            if read.is_err() {
                // An image that `step` ended may have had a record that is not
                // applied: `failed` notes the page.
                images.touched.push(step.page);
                images.pages.extend(step.image.map(|i| (step.page, i)));
            } else if step.takes_file(applied) {
                let bytes = bytes.next().expect("it was read");
                self.compare_with(images, step, bytes, base, push);
            } else {
                self.compare_known(images, step, base, push);
            }
        }
        (images.batch, images.scratch) = (batch, scratch);
        read
    }

    /// Whether a sync point was announced or noted since `noted` was read; called
    /// after the page was compared. That sync point may have read bytes that the
    /// comparison did not see any more. (A sync point that is announced later reads
    /// what was compared, or what is stored later and counts as changed.)
    fn was_noted(&self, page: usize, noted: Note) -> bool {
        fence(Acquire);
        self.notes.get().expect("it is held").get(page) != noted
    }

    /// Compares a page whose image is whole, or of which nothing is known.
    fn compare_known(
        &self,
        images: &mut Images,
        step: Step,
        base: *const u8,
        push: &mut impl FnMut(Range<usize>, *const u8),
    ) {
        let Step {
            page, part, noted, ..
        } = step;
        // SAFETY: inside the region.
        let now = unsafe { base.add(part.start) };
        let within = part.start - page * self.page;
        let Some(Image {
            kind: Kind::Whole(mut bytes),
            mut lsn,
            noted: was,
        }) = step.image
        else {
            // What is committed is in the logs: all of the part counts as changed.
            images.touched.push(page);
            let whole = part.len() == self.page;
            let room = if whole {
                images.buffer(self.page)
            } else {
                None
            };
            match room {
                Some(mut bytes) => {
                    // SAFETY: a page from each. Others may store to the first.
                    unsafe { racing::copy(now, bytes.ptr(), self.page) };
                    push(part, bytes.ptr());
                    images.keep(page, Kind::Whole(bytes), noted.lsn(), u64::MAX);
                }
                None => push(part, now),
            }
            return;
        };
        let copy = bytes.ptr();
        let runs = &mut images.runs;
        runs.clear();
        // SAFETY: `copy` is a page's, and both have the part, as far from its
        // begin. What is found is inside it.
        unsafe {
            diff::update(now, copy.add(within), part.len(), |b, e| runs.push((b, e)));
            if self.was_noted(page, noted) {
                runs.clear();
                runs.push((0, part.len()));
            }
            unite(runs);
            for (b, e) in runs.iter() {
                push(part.start + b..part.start + e, copy.add(within + b));
            }
        }
        if !runs.is_empty() {
            lsn = u64::MAX;
            images.touched.push(page);
        }
        images.keep(page, Kind::Whole(bytes), was, lsn);
    }

    /// Compares a page with the file's, which is in `bytes`, and the parts of its
    /// image over that.
    fn compare_with(
        &self,
        images: &mut Images,
        step: Step,
        bytes: &mut [u8],
        base: *const u8,
        push: &mut impl FnMut(Range<usize>, *const u8),
    ) {
        let Step {
            page, part, noted, ..
        } = step;
        // SAFETY: inside the region.
        let now = unsafe { base.add(part.start) };
        let within = part.start - page * self.page;
        if let Some(Image {
            kind: Kind::Delta(parts),
            ..
        }) = &step.image
        {
            parts.0.put(bytes);
        }
        let runs = &mut images.runs;
        runs.clear();
        let old = &mut bytes[within..within + part.len()];
        // SAFETY: both have the part.
        unsafe { diff::update(now, old.as_mut_ptr(), old.len(), |b, e| runs.push((b, e))) };
        unite(runs);
        if self.was_noted(page, noted) {
            images.touched.push(page);
            push(part, now);
            return;
        }
        let image = match images.runs.is_empty() {
            false => {
                let noted = (page, noted.lsn());
                self.changed(images, step.image, noted, (part, now), bytes, push)
            }
            true => step.image,
        };
        images.pages.extend(image.map(|i| (page, i)));
    }

    /// Makes `ranges` of the memory at `base` what is committed, where they differ
    /// from it. Everything that was appended before the call is committed, and
    /// applied to the data file.
    ///
    /// # Safety
    /// `base` is the region's memory, mapped for writing, in all of `ranges`.
    pub unsafe fn restore(
        &self,
        images: &mut Images,
        base: *mut u8,
        ranges: &[Range<usize>],
    ) -> Result<()> {
        self.check_length(ranges)?;
        let mut scratch = std::mem::take(&mut images.scratch);
        scratch.resize((self.page / 8).max(scratch.len()), 0);
        // SAFETY: a page of the scratch, as bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), self.page) };
        let done = ranges.iter().try_for_each(|range| {
            let mut at = range.start;
            while at < range.end {
                let page = at / self.page;
                let end = range.end.min((page + 1) * self.page);
                self.data.read(&[page], bytes)?;
                let old = &bytes[at - page * self.page..][..end - at];
                // SAFETY: both have the part, as far from a page's begin: the caller's
                // promise, and the scratch's size.
                unsafe { diff::update(old.as_ptr(), base.add(at), old.len(), |_, _| {}) };
                at = end;
            }
            Ok(())
        });
        images.scratch = scratch;
        done
    }

    /// Appends those pages of `ranges` whose memory at `base` is what the data file
    /// has now. `ranges` are whole pages of the region, and not beyond its file.
    /// `_held`: the file's length stays. Other threads may store: then a page may
    /// be appended that is not the same any more.
    ///
    /// # Safety
    /// `base` is the region's memory, which is there in all of `ranges`.
    pub unsafe fn same(
        &self,
        _held: &Images,
        base: *const u8,
        ranges: &[Range<usize>],
        scratch: &mut Vec<u64>,
        out: &mut Vec<Range<usize>>,
    ) -> Result<()> {
        self.check_length(ranges)?;
        let from = out.len();
        for range in ranges {
            scratch.resize(scratch.len().max(range.len() / 8), 0);
            let copy = scratch.as_mut_ptr().cast::<u8>();
            // SAFETY: the first bytes of the scratch.
            let bytes = unsafe { std::slice::from_raw_parts_mut(copy, range.len()) };
            self.data.read_on(range.start / self.page, bytes)?;
            for at in (0..range.len()).step_by(self.page) {
                let mut same = true;
                // SAFETY: a page of the region, by the caller's promise, and of the scratch.
                unsafe {
                    let (now, copy) = (base.add(range.start + at), copy.add(at));
                    diff::update(now, copy, self.page, |_, _| same = false);
                }
                let page = range.start + at..range.start + at + self.page;
                match out[from..].last_mut() {
                    Some(last) if same && last.end == page.start => last.end = page.end,
                    _ if same => out.push(page),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Pushes `images.runs`, in which a page was found to differ; it is as `bytes`
    /// from here on. Returns its image, if one is kept.
    fn changed(
        &self,
        images: &mut Images,
        image: Option<Image>,
        (page, noted): (usize, u64),
        (part, now): (Range<usize>, *const u8),
        bytes: &[u8],
        push: &mut impl FnMut(Range<usize>, *const u8),
    ) -> Option<Image> {
        let within = part.start - page * self.page;
        let place = |b: usize, e: usize| part.start + b..part.start + e;
        images.touched.push(page);
        let new = images.runs.iter().map(|(b, e)| e - b + PART_OVERHEAD);
        let new: usize = new.sum();
        let parts = match image {
            Some(Image {
                kind: Kind::Delta(parts),
                ..
            }) => Some(parts),
            _ => None,
        };
        let lsn = u64::MAX;
        let many = new + parts.as_ref().map_or(0, |p| p.0.len()) > MOST_PARTS;
        if many && let Some(mut whole) = images.buffer(self.page) {
            whole.bytes().copy_from_slice(bytes);
            let copy = whole.ptr();
            for (b, e) in &images.runs {
                // SAFETY: inside the page.
                push(place(*b, *e), unsafe { copy.add(within + b) });
            }
            let kind = Kind::Whole(whole);
            return Some(Image { kind, noted, lsn });
        }
        if many || reserve::is_short() || BYTES.load(Relaxed) + new > MOST.load(Relaxed) {
            // The page's image is dropped, so that `done` notes the page.
            for (b, e) in &images.runs {
                // SAFETY: inside the region.
                push(place(*b, *e), unsafe { now.add(*b) });
            }
            return None;
        }
        let mut parts = parts.unwrap_or_default();
        for (b, e) in &images.runs {
            let bytes = &bytes[within + b..within + e];
            push(place(*b, *e), images.parts.put(bytes));
            parts.push(within + b, bytes);
        }
        let kind = Kind::Delta(parts);
        Some(Image { kind, noted, lsn })
    }

    /// Drops images that the file has in full, if no thread holds the images.
    pub fn sweep(&self, applied: u64) {
        if let Ok(mut images) = self.images.try_lock()
            && (applied > images.swept || images.free.len() > SPARE)
        {
            images.sweep(applied);
        }
    }

    /// What `changes` pushed was appended as `lsn`.
    pub fn done(&self, images: &mut Images, lsn: u64) {
        while let Some(page) = images.touched.pop() {
            match images.pages.get_mut(&page) {
                Some(image) => image.lsn = lsn,
                None => self.note_page(page, lsn),
            }
        }
        images.release();
        images.last = lsn;
    }

    /// What `changes` pushed was not appended. `last`: the last LSN now.
    pub fn failed(&self, images: &mut Images, last: u64) {
        while let Some(page) = images.touched.pop() {
            // The image has bytes that are not committed.
            images.pages.remove(&page);
            self.note_page(page, last);
        }
        images.release();
    }

    fn note_page(&self, page: usize, lsn: u64) {
        self.notes.get().expect("it is held").put(page, lsn);
    }

    /// The file's size changes: what is known from byte `from` on is dropped.
    /// Called before the record of the change, and after it.
    pub fn forget(&self, from: usize) {
        let mut images = self.lock();
        images.pages.retain(|page, image| {
            let keep = *page < from / self.page;
            if !keep {
                self.note_page(*page, image.lsn);
            }
            keep
        });
    }
}

impl Images {
    /// Makes room for what a batch adds to what is kept of each page. An error leaves all as it is.
    fn make_room(&mut self) -> Result<()> {
        let pages = self.pages.try_reserve(MOST_PAGES);
        let pages = pages.map_err(|_| reserve::none_left());
        pages
            .and_then(|()| reserve::room(&mut self.touched, MOST_PAGES))
            .context(|| "comparing what was stored".into())
    }

    fn buffer(&mut self, page: usize) -> Option<Buffer> {
        self.free.pop().or_else(|| Buffer::new(page))
    }

    fn keep(&mut self, page: usize, kind: Kind, noted: u64, lsn: u64) {
        self.pages.insert(page, Image { kind, noted, lsn });
    }

    /// Drops an image that is wrong from now on.
    fn end(&mut self, image: Image) {
        match image.kind {
            Kind::Whole(bytes) if image.lsn == u64::MAX => self.ended.push(bytes),
            Kind::Whole(bytes) => self.free.push(bytes),
            Kind::Delta(_) => {}
        }
    }

    /// No sync point points to ended images or parts any more.
    fn release(&mut self) {
        self.free.append(&mut self.ended);
        self.parts.clear();
    }

    /// Drops the images that the file has in full.
    fn sweep(&mut self, applied: u64) {
        let kept = self.pages.len();
        let free = &mut self.free;
        self.pages
            .extract_if(|_, image| image.lsn <= applied)
            .for_each(|(_, image)| {
                if let Kind::Whole(bytes) = image.kind {
                    free.push(bytes);
                }
            });
        self.many = 2 * self.pages.len();
        self.swept = applied;
        // As many buffers as were in use at once may be needed again.
        self.free.truncate(if are_many() { SPARE } else { kept });
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use mojim_env::{Env, OpenHow};

    /// What `changes` pushes of `memory`, as parts of it.
    fn found(c: &Committed, memory: &[u8], applied: u64, lsn: u64) -> Vec<Range<usize>> {
        let mut images = c.hold(|| Some(0)).unwrap();
        let mut all = Vec::new();
        let range = 0..memory.len();
        let ranges = std::slice::from_ref(&range);
        let base = memory.as_ptr();
        c.changes(&mut images, base, ranges, applied, |part, at| {
            // SAFETY: `at` has the part's bytes until `done`.
            let bytes = unsafe { std::slice::from_raw_parts(at, part.len()) };
            assert!(*bytes == memory[part.clone()]);
            all.push(part);
        })
        .unwrap();
        c.done(&mut images, lsn);
        all
    }

    /// Images of one test at a time are counted.
    static ALONE: Mutex<()> = Mutex::new(());

    /// What other threads store beside the range stays, and so do images.
    #[test]
    fn exactly_the_range_goes_back_to_what_is_committed() {
        let _alone = lock(&ALONE);
        let dir = std::env::temp_dir().join(format!("mojim-restore-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let page = rustix::param::page_size();
        let size = 3 * page + 100;
        let env = mojim_linux::Os::new().unwrap();
        for len in [8, 50, 3000, page] {
            let path = dir.join("f");
            std::fs::write(&path, vec![3; size]).unwrap();
            let file = env.open(&path, OpenHow::default()).unwrap();
            let c = Committed::new(file, 0, size);
            let mut memory = vec![3u8; size];
            memory[page..page + len].fill(1);
            found(&c, &memory, 0, 5);
            let mut want = memory.clone();
            // It is applied.
            std::fs::write(&path, &want).unwrap();
            memory.fill(9);
            let range = page / 2 + 1..2 * page + 3;
            want[..range.start].fill(9);
            want[range.end..].fill(9);
            let mut images = c.hold(|| Some(0)).unwrap();
            let ranges = std::slice::from_ref(&range);
            let mut restore = |memory: &mut Vec<u8>| {
                // SAFETY: the ranges are inside `memory`.
                unsafe { c.restore(&mut images, memory.as_mut_ptr(), ranges) }
            };
            restore(&mut memory).unwrap();
            assert!(memory == want, "{len}");
            // The file was cut: an error instead of SIGBUS.
            std::fs::write(&path, vec![3; page]).unwrap();
            restore(&mut memory).unwrap_err();
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A change of `len` bytes, back again while it is not applied, and once
    /// more when it is; with room for images, and without any.
    #[test]
    fn what_is_outstanding_is_known_or_counts_as_changed() {
        let _alone = lock(&ALONE);
        let dir = std::env::temp_dir().join(format!("mojim-committed-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let page = rustix::param::page_size();
        let size = 3 * page + 100;
        std::fs::write(dir.join("f"), vec![0; size]).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        for full in [false, true] {
            let taken = if full { MOST_BYTES } else { 0 };
            BYTES.fetch_add(taken, Relaxed);
            for len in [8, 50, 3000, page] {
                let file = env.open(&dir.join("f"), OpenHow::default()).unwrap();
                let c = Committed::new(file, 0, size);
                let mut memory = vec![0u64; size.div_ceil(8)];
                // SAFETY: all of it, as bytes.
                let memory = unsafe {
                    std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), size)
                };
                memory[page..page + len].fill(1);
                let first = page..page + len.next_multiple_of(8);
                assert_eq!(found(&c, memory, 0, 5), std::slice::from_ref(&first));
                memory[page..page + len].fill(0);
                let all = if full { page } else { len.next_multiple_of(8) };
                let back = page..page + all;
                assert_eq!(found(&c, memory, 4, 6), [back], "{full} {len}");
                assert_eq!(found(&c, memory, 6, 7), []);
                // A part of the page is committed by itself.
                let part = page + 4..page + 8;
                let announced = c.announce(&part);
                assert!(c.note(&part, 8, announced));
                let whole = page..2 * page;
                assert_eq!(found(&c, memory, 7, 9), [whole]);
                assert_eq!(found(&c, memory, 9, 10), []);
            }
            BYTES.fetch_sub(taken, Relaxed);
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Zeros, or an error.
    struct Zeros(u64, AtomicBool);

    impl File for Zeros {
        fn read_at(&self, buf: &mut [u8], _: u64) -> io::Result<usize> {
            buf.fill(0);
            match self.1.load(Relaxed) {
                true => Err(io::Error::from_raw_os_error(libc::EIO)),
                false => Ok(buf.len()),
            }
        }
        fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn sync(&self) -> io::Result<()> {
            unreachable!()
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn len(&self) -> io::Result<u64> {
            Ok(self.0)
        }
        fn allocate(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn next_data(&self, _: u64) -> io::Result<Option<Range<u64>>> {
            unreachable!()
        }
    }

    /// A page whose image was ended, by a note of an earlier record, is compared
    /// together with others; the file cannot be read. The image's record is not
    /// forgotten.
    #[test]
    fn what_is_outstanding_is_known_after_an_error() {
        let _alone = lock(&ALONE);
        let page = rustix::param::page_size();
        let size = 2 * page;
        let file = Arc::new(Zeros(size as u64, AtomicBool::new(false)));
        let c = Committed::new(file.clone(), 0, size);
        let mut memory = vec![0u8; size];
        memory[..8].fill(1);
        assert_eq!(found(&c, &memory, 0, 5), std::slice::from_ref(&(0..8)));
        let part = 64..72;
        assert!(c.announce(&part) && c.note(&part, 4, true));
        memory[..8].fill(0);
        let mut images = c.hold(|| Some(0)).unwrap();
        for n in 0..2 {
            let step = c.step(&mut images, n, n * page..(n + 1) * page, 4);
            images.batch.push(step);
        }
        file.1.store(true, Relaxed);
        c.compare(&mut images, memory.as_ptr(), 4, &mut |_, _| {})
            .unwrap_err();
        c.failed(&mut images, 6);
        drop(images);
        file.1.store(false, Relaxed);
        let all = found(&c, &memory, 4, 7);
        assert_eq!(all.iter().map(Range::len).sum::<usize>(), size, "{all:?}");
        assert_eq!(found(&c, &memory, 7, 8), []);
    }

    /// Something has read its bytes before the first comparison, and has no LSN yet.
    #[test]
    fn everything_counts_while_the_floor_is_not_known() {
        let _alone = lock(&ALONE);
        let path = std::env::temp_dir().join(format!("mojim-floor-{}", std::process::id()));
        let page = rustix::param::page_size();
        std::fs::write(&path, vec![0; page]).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        let file = env.open(&path, OpenHow::default()).unwrap();
        let c = Committed::new(file, 0, page);
        let memory = vec![0u8; page];
        let whole = 0..page;
        let changes = |floor, applied, lsn| {
            let mut images = c.hold(|| floor).unwrap();
            let (mut all, ranges) = (Vec::new(), std::slice::from_ref(&whole));
            let push = |part, _| all.push(part);
            c.changes(&mut images, memory.as_ptr(), ranges, applied, push)
                .unwrap();
            c.done(&mut images, lsn);
            all
        };
        assert_eq!(changes(None, 3, 4), std::slice::from_ref(&whole));
        c.sweep(4);
        assert_eq!(changes(None, 4, 5), std::slice::from_ref(&whole));
        c.sweep(5);
        // Its LSN was 6 at most.
        assert_eq!(changes(Some(6), 5, 7), std::slice::from_ref(&whole));
        c.sweep(7);
        assert_eq!(changes(None, 7, 8), []);
        std::fs::remove_file(&path).unwrap();
    }

    /// Many differences in a page are sent as what lies between the first and the last.
    #[test]
    fn many_differences_in_a_page_are_one() {
        let dir = std::env::temp_dir().join(format!("mojim-many-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("f"), [0; 4096]).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        let file = env.open(&dir.join("f"), OpenHow::default()).unwrap();
        let c = Committed::new(file, 0, 4096);
        let mut memory = vec![0u8; 4096];
        for byte in 1..4 {
            (8..4000).step_by(80).for_each(|i| memory[i] = byte);
            let all = found(&c, &memory, 0, byte.into());
            let covered = |i: usize| all.iter().any(|r| r.contains(&i));
            assert!(all.len() <= MOST_RUNS, "{all:?}");
            assert!((8..4000).step_by(80).all(covered), "{all:?}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Once, a thread synced 8 bytes; another stored what they had been before, and
    /// a third compared, before the first had noted its sync point: by the file
    /// nothing had changed. Then the first thread's bytes reached the file, and
    /// memory differed until its page was stored to again.
    #[test]
    fn what_is_being_appended_is_not_taken_for_unchanged() {
        let _alone = lock(&ALONE);
        let path = std::env::temp_dir().join(format!("mojim-announced-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        let file = env.open(&path, OpenHow::default()).unwrap();
        let page = rustix::param::page_size();
        let memory = vec![0u8; page];
        // With nothing known of the page, with parts, with a whole image.
        for len in [0, 8, 3000] {
            let c = Committed::new(file.clone(), 0, page);
            let part = 64..72;
            // Nothing was compared yet; a sync point that began before the first
            // comparison is told to compare again.
            assert!(!c.announce(&part));
            drop(c.hold(|| Some(0)).unwrap());
            assert!(!c.note(&part, 1, false));
            let known = |c: &Committed, lsn| {
                let mut changed = memory.clone();
                changed[..len].fill(1);
                found(c, &changed, lsn - 1, lsn);
                found(c, &memory, lsn - 1, lsn);
            };
            known(&c, 2);
            assert_eq!(found(&c, &memory, 1, 3), []);
            // Announced before the comparison.
            assert!(c.announce(&part));
            assert_eq!(found(&c, &memory, 3, 5), std::slice::from_ref(&(0..page)));
            assert!(c.note(&part, 4, true));
            known(&c, 6);
            // During it; appended or not.
            for lsn in [0, 7] {
                let mut images = c.hold(|| Some(0)).unwrap();
                let step = c.step(&mut images, 0, 0..page, 5);
                images.batch.push(step);
                assert!(c.announce(&part));
                let mut all = Vec::new();
                let mut push = |part: Range<usize>, _| all.push(part);
                c.compare(&mut images, memory.as_ptr(), 5, &mut push)
                    .unwrap();
                assert_eq!(all, std::slice::from_ref(&(0..page)), "{len} {lsn}");
                c.done(&mut images, 8);
                assert!(c.note(&part, lsn, true));
            }
            assert_eq!(found(&c, &memory, 8, 9), []);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
