//! Allocators by their functions: those of libmojim.so, and `malloc` and `free` of others.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;

use crate::library::{function, load};

pub type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
pub type Free = unsafe extern "C" fn(*mut c_void);

/// The functions of libmojim.so that are used.
#[derive(Clone, Copy)]
pub struct Mojim {
    pub attach: unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> *mut c_void,
    pub detach: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub open:
        unsafe extern "C" fn(*mut c_void, *const c_char, usize, *mut c_void, c_int) -> *mut c_void,
    pub close: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub sync: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub begin: unsafe extern "C" fn() -> c_int,
    pub add: unsafe extern "C" fn(*mut c_void, usize) -> c_int,
    pub commit: unsafe extern "C" fn() -> c_int,
    pub malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    pub free: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub error: unsafe extern "C" fn() -> *const c_char,
}

impl Mojim {
    /// The library beside this program.
    pub fn load() -> io::Result<Mojim> {
        let exe = std::env::current_exe()?;
        let handle = load(exe.with_file_name("libmojim.so"))?;
        // SAFETY: these are the types of these functions in mojim.h, mojim_heap.h and mojim_tx.h.
        unsafe {
            Ok(Mojim {
                attach: function(handle, c"mojim_attach")?,
                detach: function(handle, c"mojim_detach")?,
                open: function(handle, c"mojim_heap_open")?,
                close: function(handle, c"mojim_heap_close")?,
                sync: function(handle, c"mojim_heap_sync")?,
                begin: function(handle, c"mojim_tx_begin")?,
                add: function(handle, c"mojim_tx_add")?,
                commit: function(handle, c"mojim_tx_commit")?,
                malloc: function(handle, c"mojim_malloc")?,
                free: function(handle, c"mojim_free")?,
                error: function(handle, c"mojim_last_error")?,
            })
        }
    }

    fn failed(&self) -> io::Error {
        // SAFETY: the text is a C string of the calling thread.
        let text = unsafe { CStr::from_ptr((self.error)()) };
        io::Error::other(text.to_string_lossy().into_owned())
    }

    pub fn check<T: PartialEq>(&self, got: T, failed: T) -> io::Result<T> {
        match got == failed {
            true => Err(self.failed()),
            false => Ok(got),
        }
    }
}

/// An allocator.
#[derive(Clone, Copy)]
pub enum Allocator {
    Heap(Mojim, usize),
    Plain(Malloc, Free),
}

impl Allocator {
    #[inline(always)]
    pub fn malloc(self, size: usize) -> *mut u64 {
        // SAFETY: an open heap; a malloc.
        unsafe {
            match self {
                Allocator::Heap(m, h) => (m.malloc)(h as *mut c_void, size).cast(),
                Allocator::Plain(malloc, _) => malloc(size).cast(),
            }
        }
    }

    #[inline(always)]
    pub fn free(self, p: *mut u64) {
        // SAFETY: a block of this allocator.
        unsafe {
            match self {
                Allocator::Heap(m, _) => drop((m.free)(p.cast())),
                Allocator::Plain(_, free) => free(p.cast()),
            }
        }
    }
}
