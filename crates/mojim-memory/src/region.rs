//! The region: one mapped file, or a part of one, and its working copy.
//!
//! Owns what a working copy is, and the private one: a `MAP_PRIVATE` mapping of
//! the data file, so that nothing reaches the file but by records (FAMS
//! 3.2), and its dirty tracking. The shared one is
//! `shared.rs`. Either is a trait object of a [`Region`], which a program sees
//! through windows: of a private working copy one, of a shared one any number.
//!
//! Invariants:
//! - Bytes outside the range that the caller gave are never read for a record.
//! - A page is marked clean only when all of it was in the caller's range.
//! - Ranges are relative to the region, whatever window they were given by.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, RwLock};

use crate::committed::Committed;
use crate::fork::is_forked;
use crate::places;
use crate::quiescence::{Quiescence, User};
use crate::track::{self, GivesBack, Meter, Tracker};
use mojim_config::TrackerKind;
use mojim_env::{Context, Error, File, Result};

/// Ranges up to this many bytes are sent as they are, without a look at the
/// page tables: copying 16 KiB costs about what one scan does.
pub const EXACT_MAX: usize = 16 << 10;

/// How a region is mapped: flags of `mojim::Volume::map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MapFlags {
    /// Make the file if it is not there.
    pub create: bool,
    /// What is not committed at unmap or exit is discarded (FAMS 3.1,
    /// `MAP_ATOMIC`); without it, both are sync points.
    pub atomic: bool,
    /// No stores.
    pub read_only: bool,
    /// What is stored is seen by everyone who maps the file so on this node, as
    /// with MAP_SHARED, unless the configuration says otherwise (`working`).
    pub shared: bool,
    /// Byte offset in the file, a multiple of the page size.
    pub offset: u64,
    /// Map here, replacing what is mapped (`MAP_FIXED`), if not 0; `Busy` where that is
    /// a region, or a part of one.
    pub fixed_at: usize,
}

/// A mapped region: a pointer and a length, valid until it is unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First byte.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: a pointer and a length; what is done with them is the program's affair.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Where a program's stores go until they are committed.
pub trait WorkingCopy: Send + Sync {
    /// First byte.
    fn base(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Appends the parts of `range` that may differ from what is committed,
    /// and marks what lies wholly inside as clean.
    fn collect(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()>;
    /// Appends the parts of `range` that may differ from what is committed, and
    /// leaves them marked as changed.
    fn written(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()>;
    /// Marks a range as changed again: its sync point failed.
    fn mark(&self, range: Range<usize>);
    /// The file has so many bytes of it from here on. What lies behind reads as
    /// zeros, in the page where the file ends and wherever it has memory. The
    /// caller holds the region's images.
    fn resized(&self, valid: usize) -> Result<()>;
    /// Calls `f` with what gives its pages back, if they are counted. It stays
    /// mapped meanwhile.
    fn metered(&self, f: &mut dyn FnMut(&dyn GivesBack)) {
        let _ = f;
    }
    /// Gives a window's mapping back to the system.
    fn close(&self, window: u64) -> Result<()>;
}

/// A `MAP_PRIVATE` mapping of the data file.
pub struct Private {
    base: *mut u8,
    len: usize,
    mapped: usize,
    /// Gone before the mapping is: a tracker touches its pages when dropped.
    tracker: RwLock<Option<Box<dyn Tracker>>>,
    gone: AtomicBool,
}

// SAFETY: the mapping stays until `unmap`, on whatever thread; the program's
// own stores into it are its business, ours are none.
unsafe impl Send for Private {}
// SAFETY: as above.
unsafe impl Sync for Private {}

/// How a region is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapOptions {
    /// Where, if the program asks for an address (must be free).
    pub at: Option<usize>,
    /// Replace what is mapped there (`MAP_FIXED`): addresses that the caller has claimed.
    pub fixed: bool,
    /// Allow stores.
    pub write: bool,
    /// Byte offset in the file, a multiple of the page size.
    pub offset: u64,
}

impl Private {
    /// Maps `len` bytes of the data file. With a meter its pages are counted, and
    /// can be given back.
    pub fn map(
        file: &Arc<dyn File>,
        len: usize,
        o: MapOptions,
        kind: TrackerKind,
        meter: Option<&Arc<Meter>>,
    ) -> Result<Private> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let fd = file.fd().ok_or_else(|| {
            Error::Unsupported("this environment's files cannot be mapped".into())
        })?;
        let page = rustix::param::page_size();
        let mapped = len.next_multiple_of(page);
        let mut prot = ProtFlags::READ;
        if o.write {
            prot |= ProtFlags::WRITE;
        }
        let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        if o.fixed {
            flags |= MapFlags::FIXED;
        }
        let hint = o.at.unwrap_or(0) as *mut std::ffi::c_void;
        // SAFETY: a new mapping; with `fixed` the caller asked to replace
        // what is there, as mmap(2) says.
        let base = unsafe { mmap(hint, mapped, prot, flags, fd.as_fd(), o.offset) }
            .map_err(std::io::Error::from)
            .context(|| format!("mapping {len} bytes"))?
            .cast::<u8>();
        let tracker = match o.write {
            // SAFETY: the mapping was just made and stays until `close`,
            // which drops the tracker's use of it first.
            true => Some(unsafe { attach_tracker(base, mapped, kind, meter, o.fixed)? }),
            false => None,
        };
        if !o.fixed {
            places::add(base as usize, mapped);
        }
        Ok(Private {
            base,
            len,
            mapped,
            tracker: RwLock::new(tracker),
            gone: AtomicBool::new(false),
        })
    }
}

/// Notes stores to a mapping that was just made, and with a meter counts its
/// pages. Where that fails nothing is
/// mapped there; at a `fixed` address, of which the caller disposes, still
/// nobody else can map.
///
/// # Safety
/// As [`track::attach`]; nobody else has the mapping yet.
pub unsafe fn attach_tracker(
    base: *mut u8,
    len: usize,
    kind: TrackerKind,
    meter: Option<&Arc<Meter>>,
    fixed: bool,
) -> Result<Box<dyn Tracker>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let kind = match kind {
        TrackerKind::Auto => track::Kind::Auto,
        TrackerKind::Uffd => track::Kind::Uffd,
        TrackerKind::Mprotect => track::Kind::Mprotect,
        TrackerKind::TwoLevel => track::Kind::TwoLevel,
    };
    // SAFETY: the caller's promise.
    let tracker = unsafe {
        match meter {
            Some(meter) => track::attach_metered(base, len, meter),
            None => track::attach(base, len, kind),
        }
    };
    tracker.map_err(|e| {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: nobody else has it. What fails leaves the mapping there.
        unsafe {
            match fixed {
                true => drop(mmap_anonymous(base.cast(), len, ProtFlags::empty(), flags)),
                false => drop(munmap(base.cast(), len)),
            }
        }
        Error::io("tracking changed pages", &e)
    })
}

/// Cuts what was appended since `from` to what is in `range`.
pub fn clip(out: &mut Vec<Range<usize>>, from: usize, range: &Range<usize>) {
    for r in &mut out[from..] {
        r.start = r.start.max(range.start);
        r.end = r.end.min(range.end);
    }
    let mut keep = from;
    for i in from..out.len() {
        if out[i].start < out[i].end {
            out.swap(keep, i);
            keep += 1;
        }
    }
    out.truncate(keep);
}

impl WorkingCopy for Private {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }

    fn collect(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()> {
        let held = self.tracker.read().unwrap_or_else(|e| e.into_inner());
        let Some(t) = &*held else {
            return Ok(());
        };
        let page = rustix::param::page_size();
        let (first, last) = (range.start / page * page, range.end.next_multiple_of(page));
        // The region's last page counts as whole: nothing of the file follows.
        let whole_end = if range.end == self.len {
            last
        } else {
            range.end / page * page
        };
        let whole_start = range.start.next_multiple_of(page).min(whole_end);
        let from = out.len();
        let err = |e| Error::io("finding changed pages", &e);
        if first < whole_start {
            t.collect(first, whole_start, false, out).map_err(err)?;
        }
        if whole_start < whole_end {
            t.collect(whole_start, whole_end, true, out).map_err(err)?;
        }
        if whole_end < last && whole_end >= whole_start {
            t.collect(whole_end, last, false, out).map_err(err)?;
        }
        clip(out, from, &range);
        Ok(())
    }

    fn written(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()> {
        let held = self.tracker.read().unwrap_or_else(|e| e.into_inner());
        if let Some(t) = &*held {
            let page = rustix::param::page_size();
            let pages = range.start / page * page..range.end.next_multiple_of(page);
            let from = out.len();
            t.collect(pages.start, pages.end, false, out)
                .map_err(|e| Error::io("finding changed pages", &e))?;
            clip(out, from, &range);
        }
        Ok(())
    }

    fn mark(&self, range: Range<usize>) {
        let held = self.tracker.read().unwrap_or_else(|e| e.into_inner());
        if let Some(t) = &*held {
            let page = rustix::param::page_size();
            t.mark(
                range.start / page * page,
                range.end.next_multiple_of(page).min(self.mapped),
            );
        }
    }

    fn resized(&self, valid: usize) -> Result<()> {
        let end = valid.next_multiple_of(rustix::param::page_size());
        let held = self.tracker.read().unwrap_or_else(|e| e.into_inner());
        if let Some(tracker) = &*held
            && valid < self.len
            && valid < end
        {
            // This store must find room: who would make it may wait for the caller.
            if let Some(t) = tracker.metered() {
                t.let_in(&(valid..end));
            }
            // SAFETY: the page where the file ends, which the mapping has.
            unsafe { self.base.add(valid).write_bytes(0, end - valid) };
        }
        Ok(())
    }

    fn metered(&self, f: &mut dyn FnMut(&dyn GivesBack)) {
        let held = self.tracker.read().unwrap_or_else(|e| e.into_inner());
        if let Some(t) = held.as_ref().and_then(|t| t.metered()) {
            f(t);
        }
    }

    fn close(&self, _: u64) -> Result<()> {
        if self.gone.swap(true, AcqRel) {
            return Ok(());
        }
        match is_forked() {
            false => *self.tracker.write().unwrap_or_else(|e| e.into_inner()) = None,
            // A thread of the parent may have held it at the fork.
            true => drop(self.tracker.try_write().map(|mut t| t.take())),
        }
        // Before others can have them.
        places::release(self.base as usize);
        // SAFETY: our own mapping; the program gave it back.
        unsafe { rustix::mm::munmap(self.base.cast(), self.mapped) }
            .map_err(std::io::Error::from)
            .context(|| "unmapping".into())
    }
}

/// A mapped file of a volume, or a part of one: what a working copy has.
pub struct Region {
    /// Its working copy.
    pub copy: Arc<dyn WorkingCopy>,
    /// What of it is committed.
    pub committed: Committed,
    /// The file's number.
    pub file: u32,
    /// The file's name.
    pub name: String,
    /// Where in the file it begins.
    pub offset: u64,
    /// Whether stores are allowed.
    pub write: bool,
    /// Bytes of it that the file has: fewer than the copy's after the file
    /// was made shorter. Memory beyond must not be touched.
    pub valid: AtomicUsize,
    /// Calls that touch its memory: it does not go, and what was valid when they
    /// entered does not, before they have left.
    pub users: Quiescence,
    /// Its memory goes, or has gone.
    pub shut: AtomicBool,
}

impl Region {
    /// Its memory stays, until the answer is dropped.
    #[inline]
    pub fn enter(&self) -> Result<User<'_>> {
        let user = self.users.enter();
        if self.shut.load(SeqCst) {
            return Err(Error::NotFound(format!("{} was unmapped", self.name)));
        }
        Ok(user)
    }

    /// Nobody touches its memory any more when this returns.
    pub fn shut(&self) {
        self.shut.store(true, SeqCst);
        self.users.wait();
    }

    fn of_size(&self, size: u64) -> usize {
        size.saturating_sub(self.offset).min(self.copy.len() as u64) as usize
    }

    /// Before the file's size changes, to this one or from it, the smaller: nobody
    /// touches what lies behind it from here on.
    pub fn lower(&self, size: u64) {
        let valid = self.of_size(size);
        if self.valid.swap(valid, SeqCst) > valid {
            // Who reads what was valid does so before the file's end comes nearer.
            self.users.wait();
        }
        self.committed.forget(valid);
    }

    /// The size did not change.
    pub fn restore(&self, size: u64) {
        self.valid.store(self.of_size(size), SeqCst);
    }

    /// The file has this size, in its record and its data file: so has its memory,
    /// before anybody touches it.
    pub fn settle(&self, size: u64) -> Result<()> {
        let valid = self.of_size(size);
        {
            // Who shuts what this opens holds them too.
            let _images = self.committed.lock();
            self.copy.resized(valid)?;
        }
        self.committed.forget(valid);
        self.valid.store(valid, SeqCst);
        Ok(())
    }
}

/// Addresses at which a program sees a part of a region.
#[derive(Debug, Clone)]
pub struct Window {
    /// The working copy's number of it.
    pub id: u64,
    /// The addresses.
    pub span: Range<usize>,
    /// Where in the region it begins.
    pub at: usize,
    /// Whether stores are allowed.
    pub write: bool,
    /// Discard, rather than commit, what is not committed at unmap and exit
    /// (`MAP_ATOMIC`).
    pub atomic: bool,
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use mojim_env::{Env, OpenHow};

    /// Nothing is ever read of it.
    struct Nothing;

    impl WorkingCopy for Nothing {
        fn base(&self) -> *mut u8 {
            std::ptr::null_mut()
        }
        fn len(&self) -> usize {
            1 << 20
        }
        fn collect(&self, _: Range<usize>, _: &mut Vec<Range<usize>>) -> Result<()> {
            Ok(())
        }
        fn written(&self, _: Range<usize>, _: &mut Vec<Range<usize>>) -> Result<()> {
            Ok(())
        }
        fn mark(&self, _: Range<usize>) {}
        fn resized(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn close(&self, _: u64) -> Result<()> {
            Ok(())
        }
    }

    /// Once, a file could become shorter while a sync point of another thread read
    /// what it cut off, and that thread died of it.
    #[test]
    fn who_takes_memory_waits_for_those_who_read_it() {
        let path = std::env::temp_dir().join(format!("mojim-users-{}", std::process::id()));
        std::fs::write(&path, [0]).unwrap();
        let os = mojim_linux::Os::new().unwrap();
        let file = os.open(&path, OpenHow::default()).unwrap();
        let region = Region {
            copy: Arc::new(Nothing),
            committed: Committed::new(file, 0, 1 << 20),
            file: 1,
            name: "f".into(),
            offset: 0,
            write: true,
            valid: AtomicUsize::new(1 << 20),
            users: Quiescence::new(),
            shut: AtomicBool::new(false),
        };
        let left = AtomicBool::new(false);
        let inside = Barrier::new(2);
        let read_until = |seen: &dyn Fn() -> bool| {
            let user = region.enter().unwrap();
            inside.wait();
            while !seen() {
                std::thread::yield_now();
            }
            // It is waited for by now, or about to be: some more for who is not.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            left.store(true, SeqCst);
            drop(user);
        };
        std::thread::scope(|s| {
            s.spawn(|| read_until(&|| region.valid.load(SeqCst) == 5));
            inside.wait();
            region.lower(5);
            assert!(left.swap(false, SeqCst));
        });
        std::thread::scope(|s| {
            s.spawn(|| read_until(&|| region.shut.load(SeqCst)));
            inside.wait();
            region.shut();
            assert!(left.load(SeqCst));
        });
        assert!(matches!(region.enter(), Err(Error::NotFound(_))));
        std::fs::remove_file(&path).unwrap();
    }
}
