//! The region: one mapped file, or a part of one, and its working copy.
//!
//! Owns the interface of working copies, and the private one: a `MAP_PRIVATE`
//! mapping of the data file, so that bytes reach the file only by records (FAMS
//! 3.2), and its dirty tracking. The shared one is `shared.rs`. A [`Region`] holds
//! either as a trait object. A program sees a region through windows: one of a
//! private working copy, any number of a shared one.
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
use mojim_env::locks;
use mojim_env::{Context, Error, File, Result};

/// Ranges up to this many bytes are sent as they are, without a look at the
/// page tables: copying 16 KiB costs about what one scan does.
pub const EXACT_MAX: usize = 16 << 10;

/// How a region is mapped: flags of `mojim::Volume::map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MapFlags {
    /// Create the file if it does not exist.
    pub create: bool,
    /// What is not committed at unmap or exit is discarded (FAMS 3.1,
    /// `MAP_ATOMIC`); without it, both are sync points.
    pub atomic: bool,
    /// No stores.
    pub read_only: bool,
    /// All mappings of the file made this way on this node show each other's
    /// stores, as with MAP_SHARED, unless the configuration says otherwise
    /// (`working`).
    pub shared: bool,
    /// Byte offset in the file, a multiple of the page size.
    pub offset: u64,
    /// Map here, if not 0; `Busy` if anything is mapped there (`MAP_FIXED_NOREPLACE`).
    /// `map_over` replaces what is mapped (`MAP_FIXED`), but no region, nor a part of one.
    pub fixed_at: usize,
    /// For a program that commits exact ranges only (each of at most [`EXACT_MAX`] bytes): no
    /// note is taken of pages that are stored to, so that a first store to a page costs no more
    /// than in any private mapping. A sync point or a rollback of more bytes works, too, but
    /// compares every page that was stored to since the region was mapped. Only with `atomic`, a
    /// private working copy, and `msync_rounding = "exact"`; `Invalid` otherwise. Where memory is
    /// bounded (`memory`, `max_uncommitted`) pages are tracked all the same.
    pub untracked: bool,
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
    /// Appends the parts of `range` that may differ from what is committed, and
    /// marks the pages that lie wholly inside as clean.
    fn collect(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()>;
    /// Appends the parts of `range` that may differ from what is committed, and
    /// leaves them marked as changed.
    fn written(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()>;
    /// Marks a range as changed again: its sync point failed.
    fn mark(&self, range: Range<usize>);
    /// From here on the file has the first `valid` bytes of the copy. What lies
    /// behind reads as zeros, in the page where the file ends and wherever the copy
    /// has memory. The caller holds the region's images.
    fn resized(&self, valid: usize) -> Result<()>;
    /// Calls `f` with the tracker that gives pages back, if the pages are counted.
    /// The copy stays mapped meanwhile.
    fn metered(&self, f: &mut dyn FnMut(&dyn GivesBack)) {
        let _ = f;
    }
    /// Unmaps a window.
    fn close(&self, window: u64) -> Result<()>;
    /// Makes copies of the pages that hold any of `range`, so that stores to them cost no fault,
    /// where that helps: where no stores are tracked. The memory stays mapped, and the file keeps
    /// `range`, meanwhile.
    fn populate(&self, range: Range<usize>) -> Result<()> {
        let _ = range;
        Ok(())
    }
}

/// A `MAP_PRIVATE` mapping of the data file.
pub struct Private {
    base: *mut u8,
    len: usize,
    mapped: usize,
    /// Dropped before the mapping goes: a tracker then touches its pages.
    tracker: RwLock<Option<Box<dyn Tracker>>>,
    untracked: bool,
    gone: AtomicBool,
}

// SAFETY: the mapping stays until `close`, on whatever thread; the program's own
// stores into it are its business, ours are those of `resized` and of a rollback.
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
    /// No note of stores is needed (`MapFlags::untracked`).
    pub untracked: bool,
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
        // SAFETY: a new mapping; with `fixed` at addresses that the caller has claimed.
        let base = unsafe { mmap(hint, mapped, prot, flags, fd.as_fd(), o.offset) }
            .map_err(std::io::Error::from)
            .context(|| format!("mapping {len} bytes"))?
            .cast::<u8>();
        let untracked = o.write && o.untracked && meter.is_none();
        let kind = match untracked {
            true => track::Kind::Untracked,
            false => kind_of(kind),
        };
        let tracker = match o.write {
            // SAFETY: the mapping was just made and stays until `close`,
            // which drops the tracker's use of it first.
            true => Some(unsafe { attach_tracker(base, mapped, kind, meter, o.fixed, true)? }),
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
            untracked,
            gone: AtomicBool::new(false),
        })
    }
}

/// What the configuration asks for.
pub fn kind_of(kind: TrackerKind) -> track::Kind {
    match kind {
        TrackerKind::Auto => track::Kind::Auto,
        TrackerKind::Uffd => track::Kind::Uffd,
        TrackerKind::Mprotect => track::Kind::Mprotect,
        TrackerKind::TwoLevel => track::Kind::TwoLevel,
    }
}

/// Tracks stores to a mapping that was just made, and with a meter counts its
/// pages. On an error the mapping is gone; at a `fixed` address, which is the
/// caller's, an inaccessible mapping takes its place, so that nobody else maps
/// there.
///
/// # Safety
/// As [`track::attach`]; nobody else has the mapping yet.
pub unsafe fn attach_tracker(
    base: *mut u8,
    len: usize,
    kind: track::Kind,
    meter: Option<&Arc<Meter>>,
    fixed: bool,
    private: bool,
) -> Result<Box<dyn Tracker>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    // SAFETY: the caller's promise.
    let tracker = unsafe {
        match meter {
            Some(meter) => track::attach_metered(base, len, meter),
            None => track::attach(base, len, kind, private),
        }
    };
    tracker.map_err(|e| {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: nobody else has the mapping. If the call fails, the mapping
        // stays.
        unsafe {
            match fixed {
                true => drop(mmap_anonymous(base.cast(), len, ProtFlags::empty(), flags)),
                false => drop(munmap(base.cast(), len)),
            }
        }
        Error::io("tracking changed pages", &e)
    })
}

/// Clips the ranges from index `from` on to `range`, and drops those that are
/// empty.
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
        let held = locks::read(&self.tracker);
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
        let held = locks::read(&self.tracker);
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
        let held = locks::read(&self.tracker);
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
        let held = locks::read(&self.tracker);
        if let Some(tracker) = &*held
            && valid < self.len
            && valid < end
        {
            // This store must find room: the thread that would make room may wait
            // for the caller.
            if let Some(t) = tracker.metered() {
                t.let_in(&(valid..end));
            }
            // SAFETY: the page where the file ends, which the mapping has.
            unsafe { self.base.add(valid).write_bytes(0, end - valid) };
        }
        Ok(())
    }

    fn metered(&self, f: &mut dyn FnMut(&dyn GivesBack)) {
        let held = locks::read(&self.tracker);
        if let Some(t) = held.as_ref().and_then(|t| t.metered()) {
            f(t);
        }
    }

    fn populate(&self, range: Range<usize>) -> Result<()> {
        let page = rustix::param::page_size();
        let pages = range.start / page * page..range.end.next_multiple_of(page).min(self.mapped);
        if !self.untracked || pages.is_empty() || self.gone.load(Acquire) {
            return Ok(());
        }
        let start = self.base.wrapping_add(pages.start).cast();
        let how = rustix::mm::Advice::LinuxPopulateWrite;
        // SAFETY: pages of the mapping; their bytes stay what they are.
        match unsafe { rustix::mm::madvise(start, pages.len(), how) } {
            // The kernel (before 5.14) lacks it.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(e) => Err(Error::io("making copies of pages", &e.into())),
        }
    }

    fn close(&self, _: u64) -> Result<()> {
        if self.gone.swap(true, AcqRel) {
            return Ok(());
        }
        match is_forked() {
            false => *locks::write(&self.tracker) = None,
            // A thread of the parent may have held the lock at the fork.
            true => drop(self.tracker.try_write().map(|mut t| t.take())),
        }
        // SAFETY: our own mapping; the program gave it back.
        unsafe { places::unmap(self.base as usize, self.mapped) }
    }
}

/// A mapped file of a volume, or a part of one, with its working copy.
pub struct Region {
    /// Its working copy.
    pub copy: Arc<dyn WorkingCopy>,
    /// What is committed of the region.
    pub committed: Committed,
    /// The file's number.
    pub file: u32,
    /// The file's name.
    pub name: String,
    /// Where in the file the region begins.
    pub offset: u64,
    /// Whether stores are allowed.
    pub write: bool,
    /// Bytes of the region that the file has: fewer than the copy's after the file
    /// was made shorter. Memory beyond must not be touched.
    pub valid: AtomicUsize,
    /// Calls that touch its memory. Until they have left, the memory stays, and so
    /// does what was valid when they entered.
    pub users: Quiescence,
    /// Its memory is about to go, or has gone: no call may enter.
    pub shut: AtomicBool,
}

impl Region {
    /// Keeps the region's memory until the result is dropped.
    #[inline]
    pub fn enter(&self) -> Result<User<'_>> {
        let user = self.users.enter();
        if self.shut.load(SeqCst) {
            return Err(Error::NotFound(format!("{} was unmapped", self.name)));
        }
        Ok(user)
    }

    /// When this returns, no call touches the region's memory any more.
    pub fn shut(&self) {
        self.shut.store(true, SeqCst);
        self.users.wait();
    }

    fn of_size(&self, size: u64) -> usize {
        size.saturating_sub(self.offset).min(self.copy.len() as u64) as usize
    }

    /// Called before the file's size changes, with the smaller of the old and the
    /// new size: from here on no call touches what lies behind it.
    pub fn lower(&self, size: u64) {
        let valid = self.of_size(size);
        if self.valid.swap(valid, SeqCst) > valid {
            // Calls that may still read what lies behind leave before the file is
            // made shorter.
            self.users.wait();
        }
        self.committed.forget(valid);
    }

    /// Undoes [`Region::lower`]: the file's size did not change.
    pub fn restore(&self, size: u64) {
        self.valid.store(self.of_size(size), SeqCst);
    }

    /// The file has this size, in its record and its data file: gives the memory
    /// this size too, before any call touches it.
    pub fn apply_size(&self, size: u64) -> Result<()> {
        let valid = self.of_size(size);
        {
            // A thread that shuts the chunks that this opens holds the images too.
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
    /// The number that the working copy gave it.
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

    /// A working copy that is never read.
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
    /// the bytes that were cut off; that thread was killed by SIGBUS.
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
            // The other thread waits by now, or is about to: some more turns in
            // case it does not yet.
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
