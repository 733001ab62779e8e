//! Arrays that are reserved whole and take memory where they are used.
//!
//! Owns the addresses of those that are kept: the next array of the same type and length gets them.

use std::any::TypeId;
use std::marker::PhantomData;
use std::ops::Index;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use mojim_env::locks::lock;
use mojim_env::{Error, Result};

/// Types of which a zeroed value is valid, and which threads may share.
///
/// # Safety
/// As said.
pub unsafe trait Zeroed: Sync + 'static {}

/// An array that is kept: type, length and address.
static KEPT: Mutex<Vec<(TypeId, usize, usize)>> = Mutex::new(Vec::new());

/// `len` values in anonymous memory, zero at first.
pub struct Table<T: Zeroed> {
    at: *mut T,
    len: usize,
    kept: AtomicBool,
    of: PhantomData<T>,
}

// SAFETY: it owns its memory, and gives shared references to what is `Sync`.
unsafe impl<T: Zeroed> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroed> Sync for Table<T> {}

impl<T: Zeroed> Table<T> {
    /// Reserves it, or takes one that was kept.
    pub fn new(len: usize) -> Result<Table<T>> {
        let at = match Self::take_kept(len) {
            Some(at) => at as *mut T,
            None => Self::reserve(len)?,
        };
        Ok(Table {
            at,
            len,
            kept: AtomicBool::new(false),
            of: PhantomData,
        })
    }

    fn take_kept(len: usize) -> Option<usize> {
        let mut all = lock(&KEPT);
        let fits = |k: &(TypeId, usize, usize)| (k.0, k.1) == (TypeId::of::<T>(), len);
        let i = all.iter().position(fits)?;
        Some(all.swap_remove(i).2)
    }

    fn reserve(len: usize) -> Result<*mut T> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = len * size_of::<T>();
        // SAFETY: new memory, at an address of the system's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, flags) };
        let at = at.map_err(|e| Error::io("reserving a heap's tables", &e.into()))?;
        Ok(at.cast())
    }
}

impl<T: Zeroed> Table<T> {
    /// All values are zero again, and take no memory. Nobody else looks at them meanwhile.
    pub fn clear(&self) {
        use rustix::mm::{Advice, madvise};
        let bytes = self.len * size_of::<T>();
        // SAFETY: anonymous memory of our own: it reads as zeros after that, which are valid.
        let done = unsafe { madvise(self.at.cast(), bytes, Advice::LinuxDontNeed) };
        done.expect("the kernel gives up our own memory");
    }
}

impl<T: Zeroed> Table<T> {
    /// Gives the memory up, and keeps the addresses for the next table. Who still looks at this one
    /// finds zeros, or that one's values.
    pub fn keep(&self) {
        if !self.kept.swap(true, Relaxed) {
            self.clear();
            let mut all = lock(&KEPT);
            all.push((TypeId::of::<T>(), self.len, self.at as usize));
        }
    }
}

impl<T: Zeroed> Table<T> {
    /// The first value.
    pub fn start(&self) -> *const T {
        self.at
    }
}

impl<T: Zeroed> Index<usize> for Table<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, i: usize) -> &T {
        assert!(i < self.len, "beyond a heap's table");
        // SAFETY: inside the mapping, which stays as long as `self`, and is of no other type; zeros are valid.
        unsafe { &*self.at.add(i) }
    }
}

impl<T: Zeroed> Drop for Table<T> {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        // SAFETY: made in `new`, and no reference outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len * size_of::<T>()) };
    }
}
