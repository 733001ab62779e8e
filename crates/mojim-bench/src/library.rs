//! Libraries that are loaded where the system has them, and their functions.

use std::ffi::{CStr, CString, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A shared library, which stays.
///
/// # Errors
/// `NotFound` if it cannot be loaded.
pub(crate) fn load(name: impl AsRef<Path>) -> io::Result<*mut c_void> {
    let name = name.as_ref();
    let path = CString::new(name.as_os_str().as_bytes())?;
    // SAFETY: the name is a C string; what the library does when it is loaded is what any program
    // that is linked with it has it do.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    match handle.is_null() {
        true => Err(not_found(format!("{} cannot be loaded", name.display()))),
        false => Ok(handle),
    }
}

/// The function of this name.
///
/// # Safety
/// `F` is the type of a pointer to that function.
///
/// # Errors
/// `NotFound` if there is none.
pub(crate) unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> io::Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a handle of dlopen, and a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    match found.is_null() {
        true => Err(not_found(format!("there is no function {name:?}"))),
        // SAFETY: a pointer to a function of type `F`, as the caller promises, of the same size.
        false => Ok(unsafe { std::mem::transmute_copy(&found) }),
    }
}

fn not_found(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, text)
}
