//! A part of a file in memory, and its sync points.
//!
//! Owns the rules by which safe code borrows a region's bytes.
//!
//! Invariants:
//!
//! - A region's memory stays until the region is dropped: it keeps the attachment.
//! - No two regions of safe code show the same byte of a file. The engine refuses to map bytes
//!   twice with private working copies, and shared ones are `unsafe` to map. So slices obey the
//!   borrow of their region alone.
//! - The engine stores to a region in a rollback only, which borrows it mutably. A sync point only
//!   reads.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use engine::{Error, Mapping, Result};

use crate::alone::{alone, wrong_range};
use crate::attached::Attached;

/// A file of a volume, or a part of one, in memory.
///
/// Lends its bytes as slices of any plain type (`u64`, `[f32; 4]`, a `#[repr(C)]` struct that
/// derives [`bytemuck::Pod`](https://docs.rs/bytemuck)). Stores go to a private working copy, and
/// to the file by sync points only. What is in no sync point when the region is dropped is
/// discarded.
///
/// A slice cannot outlive its region, and there is no second mutable one:
///
/// ```compile_fail,E0499
/// # fn f(region: &mut mojim::Region) {
/// let a = region.as_mut_slice::<u8>();
/// let b = region.as_mut_slice::<u8>();
/// a[0] = b[0];
/// # }
/// ```
/// ```compile_fail,E0505
/// # fn f(region: mojim::Region) -> u8 {
/// let a = region.as_slice::<u8>();
/// drop(region);
/// a[0]
/// # }
/// ```
/// Types with pointers are refused:
///
/// ```compile_fail,E0277
/// # fn f(region: &mut mojim::Region) {
/// region.as_mut_slice::<&str>()[0] = "gone in the next run";
/// # }
/// ```
#[derive(Debug)]
pub struct Region {
    start: *mut u8,
    len: usize,
    write: bool,
    file: String,
    volume: Arc<Attached>,
}

// SAFETY: the memory is the region's own, on whatever thread; slices of it are borrowed from the
// region, and what the engine does with it may be done from any thread.
unsafe impl Send for Region {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // A transaction borrows the region, so none that is open has noted anything of it: nobody is
        // asked (mojim_munmap says EBUSY). A failure leaves memory mapped that nobody uses.
        let _ = engine::unmap(self.start, self.len);
        self.volume.unmapped(&self.file);
    }
}

impl Region {
    pub(crate) fn new(volume: &Arc<Attached>, file: &str, mapping: Mapping, write: bool) -> Region {
        Region {
            start: mapping.ptr,
            len: mapping.len,
            write,
            file: file.to_owned(),
            volume: volume.clone(),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a region has a byte at least.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Its first byte. What is stored through the pointer is the caller's affair.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// How many `T` fit.
    fn count<T>(&self) -> usize {
        assert!(
            align_of::<T>() <= 4096,
            "no page is aligned to {}",
            align_of::<T>()
        );
        self.len.checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// All of it, as values of a plain type. Bytes behind the last whole value are left out.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let region = volume.map("f", 20)?;
    /// assert_eq!(region.as_slice::<u64>(), [0, 0]);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn as_slice<T: AnyBitPattern>(&self) -> &[T] {
        let count = self.count::<T>();
        // SAFETY: the region's memory, which stays and is only read while `self` is borrowed; it is
        // aligned to a page, and any bytes are a `T`.
        unsafe { std::slice::from_raw_parts(self.start.cast(), count) }
    }

    /// All of it, to be stored to.
    ///
    /// # Panics
    /// If it was mapped to be read only.
    ///
    /// ```
    /// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    /// #[repr(C)]
    /// struct Account {
    ///     number: u64,
    ///     cents: i64,
    /// }
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut region = volume.map("accounts", 100 * size_of::<Account>())?;
    /// let account = &mut region.as_mut_slice::<Account>()[7];
    /// account.cents += 100;
    /// mojim::sync(account)?;
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn as_mut_slice<T: AnyBitPattern + NoUninit>(&mut self) -> &mut [T] {
        assert!(self.write, "{} was mapped to be read only", self.file);
        let count = self.count::<T>();
        // SAFETY: as in `as_slice`; nobody else reads or stores while `self` is borrowed mutably,
        // and `T` has no bytes that are not initialised.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), count) }
    }

    /// The bytes of a range of the region.
    pub(crate) fn part(&self, range: impl RangeBounds<usize>) -> Result<(*const u8, usize)> {
        let start = match range.start_bound() {
            Bound::Included(at) => Some(*at),
            Bound::Excluded(at) => at.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(at) => at.checked_add(1),
            Bound::Excluded(at) => Some(*at),
            Bound::Unbounded => Some(self.len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len => {
                Ok((self.start.wrapping_add(start), end - start))
            }
            _ => Err(Error::Invalid(format!(
                "region of {}: a range {}",
                self.file,
                wrong_range(range, self.len, "bytes")
            ))),
        }
    }

    /// One sync point of a range of bytes. When it returns, the bytes are as durable as the volume's
    /// mode says, on both nodes; after a failure they are there all, or none. Returns its LSN; 0
    /// if nothing had changed.
    ///
    /// A range of up to 16 KiB is committed as it is. Of a larger one only what was stored to is,
    /// found by the pages written. Allocates nothing for up to 16 KiB.
    ///
    /// # Errors
    /// [`Error::Timeout`]: the mirror made no progress; the sync point is in doubt, and in the next
    /// one if it is not committed. [`Error::Stale`]: another node is the primary now.
    /// [`Error::Invalid`]: a range beyond the region; or the calling thread has a transaction open
    /// ([`Heap::atomically`](crate::Heap::atomically)): nothing is committed then.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut region = volume.map("f", 4096)?;
    /// region.as_mut_slice::<u8>()[10..20].fill(7);
    /// let lsn = region.sync(10..20)?;
    /// assert!(lsn > 0 && region.sync(4090..5000).is_err());
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn sync(&self, range: impl RangeBounds<usize>) -> Result<u64> {
        alone("sync")?;
        let (start, len) = self.part(range)?;
        engine::msync(start, len)
    }

    /// [`Region::sync`] of all of it.
    pub fn sync_all(&self) -> Result<u64> {
        self.sync(..)
    }

    /// [`Region::sync`] that does not wait until it is committed. Its bytes are copied: later stores
    /// are not in it. [`Volume::wait`](crate::Volume::wait) waits for it, and so does every later
    /// sync point of the volume.
    ///
    /// # Errors
    /// Those of [`Region::sync`].
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut region = volume.map("f", 8)?;
    /// region.as_mut_slice::<u8>()[0] = 1;
    /// let lsn = region.begin_sync(..)?;
    /// region.as_mut_slice::<u8>()[0] = 2; // not in it
    /// volume.wait(lsn)?;
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn begin_sync(&self, range: impl RangeBounds<usize>) -> Result<u64> {
        alone("begin_sync")?;
        let (start, len) = self.part(range)?;
        engine::msync_async(start, len)
    }

    /// Takes a range of bytes back to what is committed (FAMS, Section 3.1). Waits for all that was
    /// begun first, and reads the file: for an undo that happens often, keep the old bytes.
    ///
    /// # Errors
    /// If something that was begun cannot be committed now: then the memory stays as it is, and the
    /// call can be repeated.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut region = volume.map("f", 8)?;
    /// region.as_mut_slice::<u8>()[0] = 1;
    /// region.rollback(..)?;
    /// assert_eq!(region.as_slice::<u8>()[0], 0);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn rollback(&mut self, range: impl RangeBounds<usize>) -> Result<()> {
        let (start, len) = self.part(range)?;
        engine::rollback(start, len).map(drop)
    }

    /// Makes the first stores to a range cost no page fault, in a region that was mapped
    /// [`untracked`](crate::MapOptions::untracked); does nothing in others. The pages take memory.
    pub fn populate(&self, range: impl RangeBounds<usize>) -> Result<()> {
        let (start, len) = self.part(range)?;
        engine::populate(start, len)
    }
}

/// One sync point of a value, or a slice, that lies in a region: [`Region::sync`] where the region
/// itself is borrowed, for instance by threads that each have a part of it. It takes the value itself, not a
/// `Region`, a `Vec` or another value that leads there.
///
/// # Errors
/// As there; [`Error::NotFound`] if it lies in no region; [`Error::Invalid`] while the calling thread has a
/// transaction open, and of what lies in a heap, which transactions alone commit.
///
/// ```
/// # let example = mojim::example::Example::new();
/// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
/// let mut region = volume.map("f", 16)?;
/// let (left, right) = region.as_mut_slice::<u64>().split_at_mut(1);
/// std::thread::scope(|s| {
///     s.spawn(|| { left[0] = 1; mojim::sync(left) });
///     s.spawn(|| { right[0] = 2; mojim::sync(right) });
/// });
/// assert_eq!(region.as_slice::<u64>(), [1, 2]);
/// # Ok::<(), mojim::Error>(())
/// ```
pub fn sync<T: ?Sized>(value: &T) -> Result<u64> {
    alone("sync")?;
    let start = std::ptr::from_ref(value).cast::<u8>();
    // Another thread may have it from a transaction that is open.
    if mojim_heap::Heap::of(start).is_some() {
        return Err(Error::Invalid(
            "sync: the value lies in a heap, which its transactions commit".into(),
        ));
    }
    engine::msync(start, size_of_val(value)).map_err(|e| match e {
        Error::NotFound(text) => Error::NotFound(format!(
            "{text}; sync takes the value itself, a part of what as_mut_slice gives (a Region has its own sync)"
        )),
        e => e,
    })
}
