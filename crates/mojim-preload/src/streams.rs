//! stdio streams on a volume's files.
//!
//! A stream reads inside the C library, past this one: it sees what is
//! committed, not what was merely stored. Streams that write are refused, and
//! all of them where the volume is only read (`inside::reads`).

use std::ffi::{CStr, c_char, c_int};

use libc::FILE;

use crate::files::{forget, open_file};
use crate::inside::{self, enter, on, takes_paths};
use crate::path::{Kind, Target, resolve};
use crate::process::{attach, settle};
use crate::real::{exports, say};

/// The flags of a stream that reads a volume's file; None if it is elsewhere.
///
/// # Safety
/// The arguments are null or C strings.
unsafe fn reading(
    path: *const c_char,
    mode: *const c_char,
) -> Result<Option<(Target, c_int)>, c_int> {
    // SAFETY: the caller's promise.
    let Some(t) = (unsafe { resolve(libc::AT_FDCWD, path, true)? }) else {
        return Ok(None);
    };
    if t.kind == Kind::Other || mode.is_null() {
        return Ok(None);
    }
    if inside::reads() {
        say(&format!(
            "{}: a stream is not supported under `mojim run --read`: it would read the file in the middle of a sync point; map it, or use read(2)",
            t.name
        ));
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller's promise.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let mode = mode.split(|&b| b == b',').next().unwrap_or_default();
    if mode.first() != Some(&b'r') || mode.contains(&b'+') {
        say(&format!(
            "a stream that writes to {} of a volume is not supported; map the file",
            t.name
        ));
        return Err(libc::EOPNOTSUPP);
    }
    let cloexec = if mode.contains(&b'e') {
        libc::O_CLOEXEC
    } else {
        0
    };
    Ok(Some((t, libc::O_RDONLY | cloexec)))
}

unsafe fn open_stream(
    path: *const c_char,
    mode: *const c_char,
    pass: impl FnOnce() -> *mut FILE,
) -> *mut FILE {
    if !takes_paths() {
        return pass();
    }
    let fd = enter(Some(-1), || {
        // SAFETY: the program's strings.
        match unsafe { reading(path, mode)? } {
            Some((t, flags)) => {
                let fd = open_file(&t, flags)?;
                settle()?;
                Ok(fd)
            }
            None => Ok(None),
        }
    });
    match fd {
        None => pass(),
        Some(-1) => std::ptr::null_mut(),
        // SAFETY: a new descriptor, and the program's string.
        Some(fd) => unsafe { libc::fdopen(fd, mode) },
    }
}

unsafe fn reopen_stream(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
    pass: impl FnOnce() -> *mut FILE,
) -> *mut FILE {
    if !takes_paths() {
        return pass();
    }
    let ok = enter(false, || {
        // Without a path it is the same file, opened anew with this mode.
        // SAFETY: the program's stream.
        let same = format!("/proc/self/fd/{}\0", unsafe { libc::fileno(stream) });
        let path = if path.is_null() {
            same.as_ptr().cast()
        } else {
            path
        };
        // SAFETY: the program's strings, or ours.
        if unsafe { reading(path, mode)? }.is_some() {
            attach()?;
            settle()?;
        }
        Ok(true)
    });
    if !ok {
        return std::ptr::null_mut();
    }
    // SAFETY: the program's stream.
    forget(unsafe { libc::fileno(stream) });
    pass()
}

exports! { |pass|
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
        // SAFETY: the program's strings.
        unsafe { open_stream(path, mode, pass) }
    }
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
        // SAFETY: the program's strings.
        unsafe { open_stream(path, mode, pass) }
    }
    fn freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
        // SAFETY: the program's strings and stream.
        unsafe { reopen_stream(path, mode, stream, pass) }
    }
    fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
        // SAFETY: the program's strings and stream.
        unsafe { reopen_stream(path, mode, stream, pass) }
    }
    fn fclose(stream: *mut FILE) -> c_int {
        if !stream.is_null() && on() {
            // SAFETY: the program's stream.
            forget(unsafe { libc::fileno(stream) });
        }
        pass()
    }
}
