//! Allocators by their functions: those of libmojim.so, and `malloc` and `free` of others.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::path::Path;

/// The function of this name.
///
/// # Safety
/// `F` is the type of a pointer to that function.
pub unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> io::Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a handle of dlopen, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        let what = format!("there is no function {}", name.to_string_lossy());
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    }
    // SAFETY: a pointer to a function of type `F`, as the caller promises, of the same size.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

/// A shared library, which stays.
pub fn library(name: &Path) -> io::Result<*mut c_void> {
    use std::os::unix::ffi::OsStrExt;
    let path = CString::new(name.as_os_str().as_bytes())?;
    // SAFETY: the name is a C string; what the library does when it is loaded is what any program
    // that is linked with it has it do.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    match handle.is_null() {
        true => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} cannot be loaded", name.display()),
        )),
        false => Ok(handle),
    }
}

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
        let handle = library(&exe.with_file_name("libmojim.so"))?;
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
