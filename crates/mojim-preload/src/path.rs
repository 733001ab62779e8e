//! Whether a path names a file of the volume.
//!
//! Owns the comparison with the volume's directory: absolute, without `.`, `..`
//! and symbolic links, whether or not the file, or its directory, is there yet.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::real::say;
use crate::settings::directory;
use crate::table::Inode;

/// A path inside the volume's directory.
pub struct Target {
    /// The whole path, without symbolic links.
    pub path: CString,
    /// Its name within the volume.
    pub name: String,
    /// What is there, if anything.
    pub kind: Kind,
    /// Its inode; zeros if there is nothing.
    pub inode: Inode,
    /// Its size in bytes, if it is a file.
    pub size: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nothing,
    File,
    /// A directory, a socket and the like: not Mojim's business.
    Other,
}

/// The path's place in the volume; None if it is elsewhere, an error if that
/// cannot be told. `follow` says whether a symbolic link at its end is followed.
/// Called inside.
///
/// # Safety
/// `path` is null or a C string.
pub unsafe fn resolve(
    dirfd: c_int,
    path: *const c_char,
    follow: bool,
) -> Result<Option<Target>, c_int> {
    if path.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    if bytes.is_empty() || is_elsewhere(bytes) {
        return Ok(None);
    }
    let given = Path::new(OsStr::from_bytes(bytes));
    let whole = if given.is_absolute() {
        given.to_owned()
    } else if dirfd == libc::AT_FDCWD {
        match std::env::current_dir() {
            Ok(dir) => dir.join(given),
            // A directory that was removed has no files.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    } else {
        match std::fs::read_link(format!("/proc/self/fd/{dirfd}")) {
            Ok(dir) => dir.join(given),
            // SAFETY: no pointers.
            Err(_) if unsafe { libc::syscall(libc::SYS_fcntl, dirfd, libc::F_GETFD) } < 0 => {
                return Ok(None);
            }
            Err(e) => {
                say(&format!(
                    "{}: cannot find the path of descriptor {dirfd}: /proc: {e}",
                    given.display()
                ));
                return Err(libc::EIO);
            }
        }
    };
    let (dir, canonical) = directory()?;
    let whole = canonicalize(&whole, follow);
    let name = [Some(&dir), canonical.as_ref()]
        .into_iter()
        .flatten()
        .find_map(|d| whole.strip_prefix(d).ok());
    let Some(name) = name.filter(|n| !n.as_os_str().is_empty()) else {
        return Ok(None);
    };
    let (kind, inode, size) = match std::fs::symlink_metadata(&whole) {
        Ok(m) if m.is_file() => (Kind::File, (m.dev(), m.ino()), m.len()),
        Ok(m) => (Kind::Other, (m.dev(), m.ino()), 0),
        Err(_) => (Kind::Nothing, (0, 0), 0),
    };
    Ok(Some(Target {
        // A name that is not UTF-8 becomes empty, and is refused as such.
        name: name.to_str().unwrap_or("").to_owned(),
        path: CString::new(whole.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)?,
        kind,
        inode,
        size,
    }))
}

/// Whether a path cannot be a volume's, decided without allocating: allocators read some
/// of these paths while they start. Links to a process's descriptors and directories may
/// lead to a volume.
pub fn is_elsewhere(path: &[u8]) -> bool {
    let has = |part: &[u8]| path.windows(part.len()).any(|w| w == part);
    if path.starts_with(b"/proc/") {
        return !(has(b"/fd/") || has(b"/cwd/") || has(b"/root/"));
    }
    let back = |p: &[u8]| path.starts_with(p);
    path.starts_with(b"/sys/")
        || path.starts_with(b"/dev/")
            && !(back(b"/dev/shm/") || back(b"/dev/fd/") || back(b"/dev/std"))
}

/// The real path; what is not there yet is taken as it is written.
fn canonicalize(path: &Path, follow: bool) -> PathBuf {
    if follow && let Ok(p) = std::fs::canonicalize(path) {
        return p;
    }
    let (Some(parent), Some(last)) = (path.parent(), path.file_name()) else {
        // It ends in `..`, or is `/`.
        return std::fs::canonicalize(path).unwrap_or_else(|_| lexical(path));
    };
    match std::fs::canonicalize(parent) {
        Ok(p) => p.join(last),
        Err(_) => canonicalize(&lexical(parent), true).join(last),
    }
}

fn lexical(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for c in path.components() {
        match c {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            c => out.push(c),
        }
    }
    out
}
