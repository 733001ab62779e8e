//! Locks of processes on a volume's files (`fcntl`, `lockf`).
//!
//! Several processes may share a volume, and the program's descriptors are read-only, so they
//! cannot take a write lock. The locks are therefore taken on other files, one for each locked
//! file of the volume. These lie in a directory that all processes of the node find.
//!
//! Owns the descriptors of these lock files. They stay open: closing one would release
//! the process's locks. The locks are released when the program closes a descriptor of
//! the locked file, as POSIX requires.

use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicPtr, Ordering::*};

use crate::api::api;
use crate::inside::enter;
use crate::real::{self, check, size_of, stat_of};
use crate::settings::locks_directory;
use crate::table::names;

/// An inode, and the descriptor of its lock file.
struct LockFile {
    inode: u64,
    fd: c_int,
    next: *const LockFile,
}

/// All lock files. Read without a lock, also by a close in a signal handler. An entry is
/// added with the names locked, and is never removed.
static FILES: AtomicPtr<LockFile> = AtomicPtr::new(std::ptr::null_mut());

fn find(inode: u64) -> Option<c_int> {
    let mut at: *const LockFile = FILES.load(Acquire);
    // SAFETY: an entry that was added, which is complete and never freed.
    while let Some(f) = unsafe { at.as_ref() } {
        if f.inode == inode {
            return Some(f.fd);
        }
        at = f.next;
    }
    None
}

fn inode(fd: c_int) -> Result<u64, c_int> {
    stat_of(fd).map(|st| st.st_ino)
}

/// The descriptor of the lock file for the file that `fd` is open on.
fn of_file(fd: c_int) -> Result<c_int, c_int> {
    let inode = inode(fd)?;
    let _held = names();
    if let Some(fd) = find(inode) {
        return Ok(fd);
    }
    let directory = locks_directory()?;
    // SAFETY: a C string.
    if let Err(e) = check(unsafe { libc::mkdir(directory.as_ptr(), 0o700) } as i64)
        && e != libc::EEXIST
    {
        return Err(e);
    }
    let mut path = directory.into_bytes();
    path.extend_from_slice(format!("/{inode:x}").as_bytes());
    let path = CString::new(path).map_err(|_| libc::EINVAL)?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC;
    // Out of the way of the program's descriptor numbers. SAFETY: a C string.
    let fd = unsafe { (api()?.mojim_open_above)(path.as_ptr(), flags, 0o600) };
    if fd < 0 {
        return Err(real::errno());
    }
    let next = FILES.load(Acquire);
    FILES.store(
        Box::into_raw(Box::new(LockFile { inode, fd, next })),
        Release,
    );
    Ok(fd)
}

/// fcntl's F_SETLK, F_SETLKW and F_GETLK.
///
/// # Safety
/// `lock` is the program's struct, as fcntl(2) asks for.
pub unsafe fn control(fd: c_int, cmd: c_int, lock: *mut libc::flock) -> c_int {
    let known = enter(None, || {
        // SAFETY: the caller's promise.
        let mut wanted = unsafe { *lock };
        // The lock file has neither the position nor the size of the locked file.
        let from = match c_int::from(wanted.l_whence) {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => real::lseek(fd, 0, libc::SEEK_CUR)?,
            libc::SEEK_END => size_of(fd)? as i64,
            _ => return Err(libc::EINVAL),
        };
        wanted.l_start = wanted.l_start.checked_add(from).ok_or(libc::EOVERFLOW)?;
        wanted.l_whence = libc::SEEK_SET as _;
        Ok(Some((of_file(fd)?, wanted)))
    });
    let Some((at, mut wanted)) = known else {
        return -1;
    };
    // SAFETY: a struct of ours; fcntl itself, which may wait.
    let r = unsafe { libc::syscall(libc::SYS_fcntl, at, cmd, &raw mut wanted) } as c_int;
    if r == 0 && cmd == libc::F_GETLK {
        // SAFETY: the caller's promise.
        unsafe { *lock = wanted };
    }
    r
}

/// lockf, which locks from the descriptor's position on.
pub fn section(fd: c_int, cmd: c_int, len: libc::off_t) -> c_int {
    // SAFETY: a flock may be all zeros.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_whence = libc::SEEK_CUR as _;
    lock.l_len = len;
    lock.l_type = match cmd {
        libc::F_ULOCK => libc::F_UNLCK as _,
        libc::F_LOCK | libc::F_TLOCK | libc::F_TEST => libc::F_WRLCK as _,
        _ => {
            real::set_errno(libc::EINVAL);
            return -1;
        }
    };
    let how = match cmd {
        libc::F_LOCK => libc::F_SETLKW,
        libc::F_TEST => libc::F_GETLK,
        _ => libc::F_SETLK,
    };
    // SAFETY: our own struct.
    let r = unsafe { control(fd, how, &raw mut lock) };
    if r == 0 && cmd == libc::F_TEST && c_int::from(lock.l_type) != libc::F_UNLCK {
        real::set_errno(libc::EACCES);
        return -1;
    }
    r
}

/// Releases the process's locks on a volume's file of which the program closes a
/// descriptor. Waits for nothing, so a signal handler may call it at any point.
pub fn let_go(fd: c_int) {
    if FILES.load(Acquire).is_null() {
        return;
    }
    let before = real::errno();
    if let Some(at) = inode(fd).ok().and_then(find) {
        // SAFETY: a flock may be all zeros.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_UNLCK as _;
        // SAFETY: a struct of ours.
        unsafe { libc::syscall(libc::SYS_fcntl, at, libc::F_SETLK, &raw mut lock) };
    }
    real::set_errno(before);
}
