//! A mapping that is unmapped on drop. It hands out pointers. The code that shares the memory
//! says why that is sound.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A readable and writable mapping of `len` bytes, aligned to a page.
#[derive(Debug)]
pub(super) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value, not to a thread, and has no interior state.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps private, zeroed, populated memory.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a null hint lets the kernel choose an unused address, so no memory is replaced.
        let ptr = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )?
        };
        Self::own(ptr, len)
    }

    /// Maps the first `len` bytes of `file` shared. No page is touched: to populate a writable
    /// mapping of a file would make all of it dirty.
    pub fn shared(file: impl AsFd, len: usize) -> io::Result<Self> {
        // SAFETY: a null hint lets the kernel choose an unused address, so no memory is replaced.
        let ptr = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        Self::own(ptr, len)
    }

    /// Tells the kernel that neighbours of a touched page are not wanted.
    pub fn no_readahead(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping; the advice changes no memory.
        unsafe { madvise(self.ptr.as_ptr().cast(), self.len, Advice::Random)? };
        Ok(())
    }

    fn own(ptr: *mut c_void, len: usize) -> io::Result<Self> {
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("mapped at null"))?;
        Ok(Self { ptr, len })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of byte `offset`, which is below the length.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.len);
        // SAFETY: `offset` is within the mapping, which is one allocated object.
        unsafe { self.ptr.as_ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: the target is within the mapping (asserted) and writable; `bytes` cannot overlap
        // it, for no slice of the mapping outlives a borrow of `self`. Another process that maps
        // the same file is kept from the bytes by the caller's protocol.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr.as_ptr().add(offset), bytes.len())
        }
    }

    /// The whole mapping as a slice. Only for anonymous mappings: nobody else sees those.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is mapped, initialized (zeroed by the kernel), private to this value,
        // and borrowed mutably for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly this range was mapped by this value, and no borrow of it is left.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
