//! Directories, links, pipes and device files in a volume's directory, for a program that only
//! reads the volume (`mojim run --read`).
//!
//! Owns the refusal: such a name would lie in the bare copy of this node alone. As in a directory
//! that is mounted for reading, what exists is named first, then EROFS. Other programs make
//! directories as they like: a file of the volume brings them to the other nodes.

use std::ffi::{c_char, c_int};

use libc::{dev_t, mode_t};

use crate::inside::{self, enter, takes_paths};
use crate::path::{Kind, resolve};
use crate::real::{exports, say};

const CWD: c_int = libc::AT_FDCWD;

/// The answer to a call that makes a name, or (`removes`) takes one away. None passes it on.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn refused(dirfd: c_int, path: *const c_char, removes: bool) -> Option<c_int> {
    if !takes_paths() || !inside::reads() {
        return None;
    }
    enter(Some(-1), || {
        // SAFETY: the caller's promise.
        let Some(t) = (unsafe { resolve(dirfd, path, false)? }) else {
            return Ok(None);
        };
        match (t.kind, removes) {
            (Kind::Nothing, true) => Err(libc::ENOENT),
            (Kind::File, true) => Err(libc::ENOTDIR),
            (Kind::File | Kind::Other, false) => Err(libc::EEXIST),
            _ => {
                say(&format!(
                    "{}: the volume is only read here (mojim run --read); its primary changes it",
                    t.name
                ));
                Err(libc::EROFS)
            }
        }
    })
}

/// The answer to a call that takes a directory away.
///
/// # Safety
/// As [`refused`].
pub unsafe fn removed(dirfd: c_int, path: *const c_char) -> Option<c_int> {
    // SAFETY: the caller's promise.
    unsafe { refused(dirfd, path, true) }
}

exports! { |pass|
    fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(CWD, path, false) }.unwrap_or_else(pass)
    }
    fn mkdirat(dirfd: c_int, path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(dirfd, path, false) }.unwrap_or_else(pass)
    }
    fn rmdir(path: *const c_char) -> c_int {
        // SAFETY: the program's path.
        unsafe { removed(CWD, path) }.unwrap_or_else(pass)
    }
    fn symlink(to: *const c_char, path: *const c_char) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(CWD, path, false) }.unwrap_or_else(pass)
    }
    fn symlinkat(to: *const c_char, dirfd: c_int, path: *const c_char) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(dirfd, path, false) }.unwrap_or_else(pass)
    }
    fn mkfifo(path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(CWD, path, false) }.unwrap_or_else(pass)
    }
    fn mkfifoat(dirfd: c_int, path: *const c_char, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(dirfd, path, false) }.unwrap_or_else(pass)
    }
    fn mknod(path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(CWD, path, false) }.unwrap_or_else(pass)
    }
    fn mknodat(dirfd: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { refused(dirfd, path, false) }.unwrap_or_else(pass)
    }
}
