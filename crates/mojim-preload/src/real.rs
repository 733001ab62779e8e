//! The functions behind the interposed ones, how these are defined, errno, and the
//! text on stderr.
//!
//! Owns the way in (`exports`) and the way out: nothing in this crate calls an
//! interposed name directly.

use std::ffi::{CString, c_int, c_void};
use std::sync::Mutex;

use crate::shown::shown;

/// What a call that cannot be made returns.
pub trait Failed {
    const FAILED: Self;
}

impl Failed for c_int {
    const FAILED: c_int = -1;
}

impl Failed for isize {
    const FAILED: isize = -1;
}

impl<T> Failed for *mut T {
    const FAILED: *mut T = std::ptr::null_mut();
}

impl Failed for () {
    const FAILED: () = ();
}

/// Calls the next definition of a function after this library's.
macro_rules! real {
    ($name:ident($($arg:expr => $t:ty),*) -> $ret:ty) => {{
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let mut p = NEXT.load(Relaxed);
        if p == 0 {
            let name = concat!(stringify!($name), "\0").as_ptr().cast();
            // SAFETY: a C string.
            p = unsafe { libc::dlsym(libc::RTLD_NEXT, name) } as usize;
            NEXT.store(p, Relaxed);
        }
        if p == 0 {
            crate::real::set_errno(libc::ENOSYS);
            <$ret as crate::real::Failed>::FAILED
        } else {
            // SAFETY: the C library's function of this name and type; the
            // arguments are the program's own.
            unsafe {
                // A thread that is cancelled in this call ends there, as without this
                // library.
                let f = std::mem::transmute::<usize, unsafe extern "C-unwind" fn($($t),*) -> $ret>(p);
                f($($arg),*)
            }
        }
    }};
}
pub(crate) use real;

pub fn errno() -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(e: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = e };
}

unsafe extern "C-unwind" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Disables cancellation of the calling thread (`pthread_cancel`). Returns the previous
/// state.
#[must_use]
pub fn cancel_waits() -> c_int {
    const DISABLE: c_int = 1;
    let mut before = 0;
    // SAFETY: a valid state, and room for the previous one.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    before
}

/// Restores the state that `cancel_waits` returned. A pending cancellation ends the
/// thread here, so the caller has nothing left to drop.
pub fn cancel_again(before: c_int) {
    // SAFETY: a state that this thread had.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
}

/// Turns -1 into the errno that a raw call left.
pub fn check(r: i64) -> Result<i64, c_int> {
    if r == -1 { Err(errno()) } else { Ok(r) }
}

pub fn page_size() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

pub fn round_up(n: usize) -> usize {
    n.checked_next_multiple_of(page_size())
        .unwrap_or(usize::MAX)
}

/// `mmap` itself.
///
/// # Safety
/// As mmap(2).
pub unsafe fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as *mut c_void }
}

/// `munmap` itself.
///
/// # Safety
/// As munmap(2).
pub unsafe fn munmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len) as c_int }
}

/// `pread` itself.
///
/// # Safety
/// `buf` has room for `n` bytes.
pub unsafe fn pread(fd: c_int, buf: *mut c_void, n: usize, at: i64) -> Result<usize, c_int> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_pread64, fd, buf, n, at) }).map(|n| n as usize)
}

/// `lseek` itself.
pub fn lseek(fd: c_int, at: i64, whence: c_int) -> Result<i64, c_int> {
    // SAFETY: no pointers.
    check(unsafe { libc::syscall(libc::SYS_lseek, fd, at, whence) })
}

pub fn close(fd: c_int) {
    // SAFETY: no pointers; the descriptor is one that this library opened.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// The process's ID, asked of the kernel each time: a child of vfork shares our memory.
pub fn getpid() -> c_int {
    // SAFETY: no preconditions.
    unsafe { libc::syscall(libc::SYS_getpid) as c_int }
}

/// Writes one line to standard error, but not the same line twice in a row.
pub fn say(text: &str) {
    static LAST: Mutex<String> = Mutex::new(String::new());
    if let Ok(mut last) = LAST.try_lock() {
        if *last == text {
            return;
        }
        text.clone_into(&mut last);
    }
    let line = format!("mojim: {}\n", shown(text));
    // SAFETY: the line's own bytes.
    unsafe { libc::syscall(libc::SYS_write, 2, line.as_ptr(), line.len()) };
}

/// A name for the C interface.
pub fn c_name(name: &str) -> Result<CString, c_int> {
    CString::new(name).map_err(|_| libc::EINVAL)
}

/// The stat of an open file: that of its data file.
pub fn stat_of(fd: c_int) -> Result<libc::stat, c_int> {
    let mut st = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for the answer.
    check(unsafe { libc::fstat(fd, st.as_mut_ptr()) } as i64)?;
    // SAFETY: filled in.
    Ok(unsafe { st.assume_init() })
}

/// The size of an open file: its data file's.
pub fn size_of(fd: c_int) -> Result<u64, c_int> {
    Ok(stat_of(fd)?.st_size as u64)
}

/// Defines exported functions under their own names. They are `C-unwind`, since a thread
/// that is cancelled in the C library's function ends by unwinding.
/// With `|pass|`, each body has a closure of that name that makes the call as
/// it would be made without this library.
macro_rules! exports {
    (|$pass:ident| $(fn $name:ident($($arg:ident: $t:ty),* $(,)?) -> $ret:ty $body:block)+) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $t),*) -> $ret {
            let $pass = || crate::real::real!($name($($arg => $t),*) -> $ret);
            $body
        }
    )+};
    ($(fn $name:ident($($arg:ident: $t:ty),* $(,)?) -> $ret:ty $body:block)+) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $t),*) -> $ret $body
    )+};
}
pub(crate) use exports;
