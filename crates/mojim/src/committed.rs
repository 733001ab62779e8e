//! What is committed of a region, page by page, for sync points that send what
//! was changed (X5).
//!
//! The committed bytes are the data file's and those of the records that are
//! not applied to it yet. Owns images of pages of which such records are known
//! in full, and for every page the last LSN of a sync point that wrote to it
//! without one. A written page is compared with its image, or with the file
//! where nothing is outstanding; where neither is known, all of it counts as
//! changed.
//!
//! Invariants:
//! - An image has every byte that was committed or is on its way to be, up to
//!   the last LSN noted for its page when it was made. A later note ends it.
//! - The file stands for a page only if every record that wrote to it is
//!   applied: what was noted, and what was appended before noting began.
//! - One thread at a time compares and appends (`Images`, a lock for each
//!   region): who finds nothing changed waits for what others have collected.
//! - Images have a bound, for the process; beyond it pages are compared and
//!   not kept.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::mm::{MapFlags, ProtFlags};

use crate::diff;
use crate::env::File;
use crate::error::{Context, Result};

/// Most bytes of images in the process, those that wait to be used included.
pub const MOST_BYTES: usize = 64 << 20;
/// Images of a region before those are looked for that are applied.
const MANY: usize = 512;

/// Buffers that a region keeps for later while there are many in the process.
const SPARE: usize = 64;

/// Buffers that exist, in bytes.
static BYTES: AtomicUsize = AtomicUsize::new(0);

/// There are so many images that records should be applied.
pub fn are_many() -> bool {
    BYTES.load(Relaxed) > MOST_BYTES / 2
}

/// Nearly as many as there may be: what is not applied soon is sent in whole
/// pages.
pub fn are_too_many() -> bool {
    BYTES.load(Relaxed) > MOST_BYTES / 8 * 7
}

/// A page's worth of memory.
struct Buffer(Box<[u64]>);

impl Buffer {
    /// None if there are as many as there may be.
    fn new(page: usize) -> Option<Buffer> {
        if BYTES.fetch_add(page, Relaxed) + page > MOST_BYTES {
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

struct Image {
    bytes: Buffer,
    /// The last LSN noted for its page when it was made.
    noted: u64,
    /// The record with the last of it; `u64::MAX` while that is made.
    lsn: u64,
}

/// For every page, the last LSN of a sync point that wrote to it and left no
/// image. Memory that is there only for pages that were noted.
struct Notes {
    base: *mut AtomicU64,
    pages: usize,
}

// SAFETY: an array of atomics that lives as long as this.
unsafe impl Send for Notes {}
// SAFETY: as above.
unsafe impl Sync for Notes {}

impl Notes {
    fn new(pages: usize) -> Result<Notes> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                pages * 8,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base
            .map_err(std::io::Error::from)
            .context(|| "memory for the pages of a region".into())?;
        Ok(Notes {
            base: base.cast(),
            pages,
        })
    }

    fn at(&self, page: usize) -> &AtomicU64 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, which is zeros at first.
        unsafe { &*self.base.add(page) }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.pages * 8) };
    }
}

/// What is committed of one region.
pub struct Committed {
    file: Arc<dyn File>,
    offset: u64,
    pages: usize,
    page: usize,
    notes: OnceLock<Notes>,
    images: Mutex<Images>,
}

/// The images of a region, and who may append what was found by them.
#[derive(Default)]
pub struct Images {
    pages: HashMap<usize, Image>,
    free: Vec<Buffer>,
    /// Where `Committed::changes` compares what no image is kept of.
    scratch: Vec<u64>,
    /// Pages of the sync point that is being made.
    touched: Vec<usize>,
    /// When it is time to look for images that are applied.
    many: usize,
    /// How much was applied when that was done last.
    swept: u64,
    /// What was appended up to here may have written to any page, unnoted.
    since: u64,
    /// The last sync point that was found by comparing.
    last: u64,
}

impl Images {
    /// The LSN of the last sync point that was found by comparing; 0: none.
    pub fn last(&self) -> u64 {
        self.last
    }
}

impl Committed {
    /// Of `len` bytes of a file, from `offset` on, mapped just now.
    pub fn new(file: Arc<dyn File>, offset: u64, len: usize) -> Committed {
        let page = rustix::param::page_size();
        Committed {
            file,
            offset,
            pages: len.div_ceil(page),
            page,
            notes: OnceLock::new(),
            images: Mutex::default(),
        }
    }

    /// From here on until the answer is dropped, nobody else compares this
    /// region. `floor`: the last LSN, when everything that is appended later
    /// is noted.
    pub fn hold(&self, floor: impl FnOnce() -> u64) -> Result<MutexGuard<'_, Images>> {
        let mut images = self.images.lock().unwrap_or_else(|e| e.into_inner());
        if self.notes.get().is_none() {
            let notes = Notes::new(self.pages)?;
            assert!(self.notes.set(notes).is_ok(), "one thread at a time");
            images.since = floor();
        }
        Ok(images)
    }

    /// A sync point wrote to these bytes, or may have: it has `lsn`, or is
    /// before it. Called after it was appended, before its caller goes on.
    #[inline]
    pub fn note(&self, bytes: Range<usize>, lsn: u64) {
        // Nobody compares: all that is before the first comparison counts.
        if let Some(notes) = self.notes.get()
            && !bytes.is_empty()
        {
            for page in bytes.start / self.page..=(bytes.end - 1) / self.page {
                notes.at(page).fetch_max(lsn, AcqRel);
            }
        }
    }

    /// The parts of `ranges`, ascending, that differ from what is committed or
    /// may, with where their bytes are: of the memory at `base`, or of an image
    /// that stays until `done` or `failed`. `applied`: the LSN up to which the
    /// data file is current. What is named is committed from here on, or
    /// `failed` is called.
    pub fn changes(
        &self,
        images: &mut Images,
        base: *const u8,
        ranges: &[Range<usize>],
        applied: u64,
        mut push: impl FnMut(Range<usize>, *const u8),
    ) -> Result<()> {
        if applied > images.swept && (images.pages.len() > images.many.max(MANY) || are_many()) {
            images.sweep(applied);
        }
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let page = at / self.page;
                let end = range.end.min((page + 1) * self.page);
                self.page_changes(images, base, page, at..end, applied, &mut push)?;
                at = end;
            }
        }
        Ok(())
    }

    fn page_changes(
        &self,
        images: &mut Images,
        base: *const u8,
        page: usize,
        part: Range<usize>,
        applied: u64,
        push: &mut impl FnMut(Range<usize>, *const u8),
    ) -> Result<()> {
        let begin = page * self.page;
        let notes = self.notes.get().expect("it is held");
        let noted = notes.at(page).load(Acquire);
        // SAFETY: inside the region.
        let now = unsafe { base.add(part.start) };
        let within = part.start - begin;
        let compare = |copy: *mut u8, f: &mut dyn FnMut(usize, usize)| {
            // SAFETY: `copy` is a page's, and both have the part, as far from
            // its begin.
            unsafe { diff::update(now, copy.add(within), part.len(), f) };
        };
        let mut known = images.since.max(noted);
        if let Some(image) = images.pages.get_mut(&page) {
            if image.noted == noted {
                let copy = image.bytes.ptr();
                let mut any = false;
                compare(copy, &mut |b, e| {
                    any = true;
                    // SAFETY: inside the image.
                    push(part.start + b..part.start + e, unsafe {
                        copy.add(within + b)
                    });
                });
                if any {
                    image.lsn = u64::MAX;
                    images.touched.push(page);
                }
                return Ok(());
            }
            known = known.max(image.lsn);
            let image = images.pages.remove(&page).expect("just seen");
            images.free.push(image.bytes);
        }
        let whole = part.len() == self.page;
        if known > applied {
            // What is committed is in the logs: all of the part counts.
            images.touched.push(page);
            let room = if whole {
                images.buffer(self.page)
            } else {
                None
            };
            match room {
                Some(mut bytes) => {
                    // SAFETY: a page from each; a raw copy, since others may store.
                    unsafe { std::ptr::copy_nonoverlapping(now, bytes.ptr(), self.page) };
                    push(part, bytes.ptr());
                    images.keep(page, bytes, noted);
                }
                None => push(part, now),
            }
            return Ok(());
        }
        match images.buffer(self.page) {
            Some(mut bytes) => {
                self.read(page, bytes.bytes())?;
                let copy = bytes.ptr();
                let mut any = false;
                compare(copy, &mut |b, e| {
                    any = true;
                    // SAFETY: inside the buffer, which does not move.
                    push(part.start + b..part.start + e, unsafe {
                        copy.add(within + b)
                    });
                });
                if any {
                    images.touched.push(page);
                    images.keep(page, bytes, noted);
                } else {
                    images.free.push(bytes);
                }
            }
            None => {
                let mut scratch = std::mem::take(&mut images.scratch);
                scratch.resize(self.page / 8, 0);
                let copy = scratch.as_mut_ptr().cast::<u8>();
                // SAFETY: all of the scratch, as bytes.
                let bytes = unsafe { std::slice::from_raw_parts_mut(copy, self.page) };
                let done = self.read(page, bytes);
                let mut any = false;
                if done.is_ok() {
                    compare(copy, &mut |b, e| {
                        any = true;
                        // SAFETY: inside the region.
                        push(part.start + b..part.start + e, unsafe { now.add(b) });
                    });
                }
                if any {
                    images.touched.push(page);
                }
                images.scratch = scratch;
                done?;
            }
        }
        Ok(())
    }

    /// The page as the data file has it; zeros beyond its end.
    fn read(&self, page: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.offset + (page * self.page) as u64;
        let got = self
            .file
            .read_at(bytes, at)
            .context(|| "reading what is committed".into())?;
        bytes[got..].fill(0);
        Ok(())
    }

    /// What `changes` named was appended as `lsn`.
    pub fn done(&self, images: &mut Images, lsn: u64) {
        while let Some(page) = images.touched.pop() {
            match images.pages.get_mut(&page) {
                Some(image) => image.lsn = lsn,
                None => self.note_page(page, lsn),
            }
        }
        images.last = lsn;
    }

    /// What `changes` named was not appended. `last`: the last LSN now.
    pub fn failed(&self, images: &mut Images, last: u64) {
        while let Some(page) = images.touched.pop() {
            // It has what is not committed.
            if let Some(image) = images.pages.remove(&page) {
                images.free.push(image.bytes);
            }
            self.note_page(page, last);
        }
    }

    fn note_page(&self, page: usize, lsn: u64) {
        let notes = self.notes.get().expect("it is held");
        notes.at(page).fetch_max(lsn, AcqRel);
    }

    /// The file has another size: what is known from byte `from` on is not any
    /// more. Called before its record and after.
    pub fn forget(&self, from: usize) {
        let mut images = self.images.lock().unwrap_or_else(|e| e.into_inner());
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
    fn buffer(&mut self, page: usize) -> Option<Buffer> {
        self.free.pop().or_else(|| Buffer::new(page))
    }

    fn keep(&mut self, page: usize, bytes: Buffer, noted: u64) {
        let image = Image {
            bytes,
            noted,
            lsn: u64::MAX,
        };
        self.pages.insert(page, image);
    }

    /// Gives up the images of which the file has all.
    fn sweep(&mut self, applied: u64) {
        let kept = self.pages.len();
        let free = &mut self.free;
        self.pages
            .extract_if(|_, image| image.lsn <= applied)
            .for_each(|(_, image)| free.push(image.bytes));
        self.many = 2 * self.pages.len();
        self.swept = applied;
        // As many as were in use at once may be again.
        self.free.truncate(if are_many() { SPARE } else { kept });
    }
}
