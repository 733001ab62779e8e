//! Where a heap's bytes lie and how they are committed: what the heap needs from a volume.
//!
//! Owns the trait, and its implementations over a volume, a reader, and plain memory (for tests).

use std::sync::Mutex;

use mojim::{MapFlags, Mapping, Reader, Volume, gmsync, gmsync_async, unmap};
use mojim_env::locks::lock;
use mojim_env::{Error, Result};

/// Bytes in memory that were changed.
pub type Span = (*const u8, usize);

/// The file of a heap, mapped from its base on.
pub trait Space: Send + Sync {
    /// Maps `len` bytes of the file from `offset` on at `at`, which the heap has reserved.
    /// The file grows to reach there; what is new reads as zeros.
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()>;
    /// Commits these bytes, atomically and no others. `wait`: until they are committed; else they
    /// are committed before whatever is committed after this call.
    fn commit(&self, spans: &[Span], wait: bool) -> Result<()>;
    /// Commits all that was stored in these mappings, atomically.
    fn sync(&self, mappings: &[Span]) -> Result<()>;
    /// Takes a mapping's memory back to what was committed last.
    fn rollback(&self, mapping: Span) -> Result<()>;
    /// These bytes are about to be stored to.
    fn expect(&self, span: Span) {
        let _ = span;
    }
    /// Of a reader: a number that changes with what it shows.
    fn shown(&self) -> u64 {
        0
    }
    /// Ends a mapping that `map` made. What was not committed is gone.
    fn unmap(&self, at: *mut u8, len: usize) -> Result<()>;
    /// The heap is closed: its struct stays, and what is behind the space need not.
    fn end(&self) {}
}

/// Plain memory, which is committed nowhere: for tests.
#[doc(hidden)]
pub struct Nowhere;

impl Space for Nowhere {
    fn map(&self, _: u64, len: usize, at: *mut u8) -> Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the heap has reserved these addresses.
        unsafe { mmap_anonymous(at.cast(), len, prot, flags) }
            .map_err(|e| Error::io("a mapping", &e.into()))?;
        Ok(())
    }

    fn commit(&self, _: &[Span], _: bool) -> Result<()> {
        Ok(())
    }

    fn sync(&self, _: &[Span]) -> Result<()> {
        Ok(())
    }

    fn rollback(&self, _: Span) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: made by `map`.
        unsafe { rustix::mm::munmap(at.cast(), len) }.map_err(|e| Error::io("a mapping", &e.into()))
    }
}

/// A volume, or a reader, until the heap is closed.
pub struct Closable<T>(Mutex<Option<T>>);

impl<T: Clone> Closable<T> {
    pub fn new(of: &T) -> Closable<T> {
        Closable(Mutex::new(Some(of.clone())))
    }

    fn end(&self) {
        let _ = lock(&self.0).take();
    }

    fn get(&self) -> Result<T> {
        let held = lock(&self.0).clone();
        held.ok_or_else(|| Error::Invalid("the heap is closed".into()))
    }
}

/// A file of a volume.
pub struct VolumeSpace {
    pub volume: Closable<Volume>,
    pub file: String,
    /// Only exact ranges are committed: no note of pages is needed.
    pub exact: bool,
}

impl VolumeSpace {
    /// The first bytes of the file, and its size. All are 0 if it is not there.
    pub fn begin(&self, len: usize) -> Result<(Vec<u8>, u64)> {
        let volume = self.volume.get()?;
        let size = volume.size(&self.file)?.unwrap_or(0);
        let map = |n, flags| volume.map(&self.file, n, flags);
        Ok((first_bytes(len, size, map)?, size))
    }
}

fn first_bytes(
    len: usize,
    size: u64,
    map: impl FnOnce(usize, MapFlags) -> Result<Mapping>,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    if size == 0 {
        return Ok(bytes);
    }
    let flags = MapFlags {
        read_only: true,
        ..MapFlags::default()
    };
    let n = len.min(size as usize);
    let m = map(n, flags)?;
    // SAFETY: the mapping has `n` bytes, and stays until it is unmapped below.
    unsafe { std::ptr::copy_nonoverlapping(m.ptr, bytes.as_mut_ptr(), n) };
    unmap(m.ptr, m.len)?;
    Ok(bytes)
}

/// A file of a volume, as a node that follows shows it.
pub struct ReaderSpace {
    pub reader: Closable<Reader>,
    pub file: String,
}

impl ReaderSpace {
    /// The first bytes of the file, and its size.
    pub fn begin(&self, len: usize) -> Result<(Vec<u8>, u64)> {
        let reader = self.reader.get()?;
        let Some(size) = reader.size(&self.file)? else {
            return Err(Error::NotFound(format!(
                "volume {} has no file {}",
                reader.name(),
                self.file
            )));
        };
        let map = |n, flags| reader.map(&self.file, n, flags);
        Ok((first_bytes(len, size, map)?, size))
    }

    fn refuse(&self) -> Error {
        Error::ReadOnly(format!("heap {} is only read here", self.file))
    }
}

impl Space for ReaderSpace {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()> {
        let flags = MapFlags {
            read_only: true,
            offset,
            fixed_at: at as usize,
            ..MapFlags::default()
        };
        let reader = self.reader.get()?;
        // SAFETY: the heap has reserved these addresses, and nobody uses them yet.
        let mapped = unsafe { reader.map_over(&self.file, len, flags) };
        mapped.map(drop)
    }

    fn commit(&self, _: &[Span], _: bool) -> Result<()> {
        Err(self.refuse())
    }

    fn sync(&self, _: &[Span]) -> Result<()> {
        Err(self.refuse())
    }

    fn rollback(&self, _: Span) -> Result<()> {
        Err(self.refuse())
    }

    fn shown(&self) -> u64 {
        self.reader.get().map_or(0, |r| r.shown())
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        end(at, len)
    }

    fn end(&self) {
        self.reader.end();
    }
}

fn end(at: *mut u8, len: usize) -> Result<()> {
    match unmap(at, len) {
        // The volume was detached, and took its regions with it.
        Err(Error::NotFound(_)) => Ok(()),
        done => done,
    }
}

impl Space for VolumeSpace {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()> {
        let flags = MapFlags {
            create: true,
            atomic: true,
            untracked: self.exact,
            offset,
            fixed_at: at as usize,
            ..MapFlags::default()
        };
        let volume = self.volume.get()?;
        // SAFETY: the heap has reserved these addresses, and nobody uses them yet.
        let mapped = unsafe { volume.map_over(&self.file, len, flags) };
        mapped.map(drop)
    }

    fn commit(&self, spans: &[Span], wait: bool) -> Result<()> {
        match wait {
            true => gmsync(spans).map(drop),
            false => gmsync_async(spans).map(drop),
        }
    }

    fn sync(&self, mappings: &[Span]) -> Result<()> {
        gmsync(mappings).map(drop)
    }

    fn rollback(&self, (at, len): Span) -> Result<()> {
        let done = mojim::rollback(at, len)?;
        assert!(done, "the mappings of a heap are atomic");
        Ok(())
    }

    fn expect(&self, (at, len): Span) {
        if self.exact {
            // Without it the stores themselves make the pages.
            let _ = mojim::populate(at, len);
        }
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        end(at, len)
    }

    fn end(&self) {
        self.volume.end();
    }
}
