//! The engine's descriptors, beside a program's in one table.
//!
//! A program counts on the numbers: a shell closes 0 and lets `dup2` put a file
//! there, and takes 3 to 9 for those that a script names. So the engine's
//! descriptors lie from [`floor`] on, out of the way. The kernel gives the lowest
//! free number first, though: each is opened there and moved up.
//!
//! Owns the floor, and the counts of threads that open a descriptor and of threads that
//! ask about a number of the program's choice. The two kinds exclude each other, so
//! that a thread that asks never meets an engine's descriptor that is not moved up yet.
//!
//! Invariants:
//! - No call waits between opening and moving: `accept`, for one, would keep the
//!   lowest free number to itself while it waits.
//! - Threads that open do not wait for each other: an open on a disk that hangs delays
//!   no other.
//! - No thread waits longer than `PATIENCE`. A thread that then goes on while another
//!   opens gets at worst EBUSY: the kernel reserves the number of an open that is not
//!   done.
//! - A thread that opens or asks runs no signal handler of the program: a handler may
//!   ask, or leave by siglongjmp.

use std::cell::Cell;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{self, Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::process::{Resource, getrlimit};

use crate::event::Event;
use crate::threads::SignalsWait;

/// The engine's lowest number, if the process may have twice as many.
const USUAL: u64 = 512;
/// How long one kind waits for the other: as long as a thousand opens take.
const PATIENCE: Duration = Duration::from_secs(1);

/// The engine's lowest number: half of what the process may have, 512 at most.
pub fn floor() -> RawFd {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (most / 2).min(USUAL) as RawFd
}

/// How many threads open, and, from bit 16 on, how many ask.
static INSIDE: AtomicU32 = AtomicU32::new(0);
/// `INSIDE` became less.
static LEFT: Event = Event::new();

const OPENS: u32 = 1;
const ASKS: u32 = 1 << 16;

thread_local! {
    /// Whether this thread is inside: under an interposer, its own `close` asks.
    static HERE: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, no thread of the other kind is inside.
struct Inside {
    /// What it added to `INSIDE`; 0 if the wait took too long, or its thread was inside
    /// already.
    counts: u32,
    outermost: bool,
    _signals: Option<SignalsWait>,
}

impl Inside {
    fn enter(kind: u32, patience: Duration) -> Inside {
        if HERE.get() {
            return Inside {
                counts: 0,
                outermost: false,
                _signals: None,
            };
        }
        let signals = SignalsWait::begin();
        let counts = if Inside::wait(kind, patience) {
            kind
        } else {
            0
        };
        HERE.set(true);
        Inside {
            counts,
            outermost: true,
            _signals: Some(signals),
        }
    }

    /// False if it took too long.
    fn wait(kind: u32, patience: Duration) -> bool {
        let others = if kind == OPENS { !(ASKS - 1) } else { ASKS - 1 };
        let mut until = None;
        loop {
            let now = INSIDE.load(SeqCst);
            if now & others == 0 {
                match INSIDE.compare_exchange(now, now + kind, SeqCst, SeqCst) {
                    Ok(_) => return true,
                    Err(_) => continue,
                }
            }
            let until = *until.get_or_insert_with(|| Instant::now() + patience);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            LEFT.wait_unless(|| INSIDE.load(SeqCst) & others == 0, left);
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if self.outermost {
            HERE.set(false);
        }
        if self.counts > 0 {
            INSIDE.fetch_sub(self.counts, SeqCst);
            LEFT.notify();
        }
    }
}

/// Runs `f`, which opens descriptors without waiting, and puts them [`above`].
pub fn opening<T>(f: impl FnOnce() -> T) -> T {
    let _inside = Inside::enter(OPENS, PATIENCE);
    f()
}

/// Runs `open`, which must not wait, and moves its descriptor to a number from
/// [`floor`] on; if none is left there, the descriptor stays where it is. It is
/// close-on-exec.
pub fn open<E: From<Errno>>(open: impl FnOnce() -> Result<OwnedFd, E>) -> Result<OwnedFd, E> {
    opening(|| Ok(above(open()?)?))
}

/// Moves a descriptor out of the program's numbers. Called within the [`opening`] that
/// opened it. EBADF if the program has closed it.
pub fn above(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    let floor = floor();
    if fd.as_raw_fd() >= floor {
        return Ok(fd);
    }
    match fcntl_dupfd_cloexec(&fd, floor) {
        Err(Errno::BADF) => {
            // The number is the program's now: it must not be closed.
            let _ = fd.into_raw_fd();
            Err(Errno::BADF)
        }
        moved => Ok(moved.unwrap_or(fd)),
    }
}

/// A duplicate of `fd`. Fails with EMFILE if no number is left.
pub fn duplicate(fd: impl AsFd) -> Result<OwnedFd, Errno> {
    match fcntl_dupfd_cloexec(&fd, floor()) {
        Err(Errno::MFILE | Errno::INVAL) => fcntl_dupfd_cloexec(&fd, 0),
        done => done,
    }
}

/// The text of a small file, such as one of `/proc`.
pub fn read(path: impl AsRef<Path>) -> std::io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let one = || retry_on_intr(|| fs::open(path.as_ref(), flags, Mode::empty()));
    let mut text = String::new();
    std::fs::File::from(open(one)?).read_to_string(&mut text)?;
    Ok(text)
}

/// Whether the program has this descriptor open; one of the engine's that is not moved
/// up yet does not count. Signal handlers may call this.
pub fn is_the_programs(number: RawFd) -> bool {
    let _inside = Inside::enter(ASKS, PATIENCE);
    is_open(number)
}

fn is_open(number: RawFd) -> bool {
    // The system call itself: the number may be of no open descriptor, so nothing borrows it, and
    // `fcntl` of the C library may be an interposer's.
    // SAFETY: F_GETFD takes any number and touches no memory. `errno` is this thread's own, and a signal
    // handler leaves it as it was.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let flags = libc::syscall(libc::SYS_fcntl, number, libc::F_GETFD);
        *errno = before;
        flags >= 0
    }
}

/// Runs `f`, which puts something under a number of the program's choice (`dup2`), so
/// that it replaces no descriptor of the engine's that is not moved up yet. Signal
/// handlers may call this.
pub fn put<T>(number: RawFd, f: impl FnOnce() -> T) -> T {
    let inside = Inside::enter(ASKS, PATIENCE);
    if is_open(number) {
        // The program's own descriptor. `f` closes it, which may take long.
        drop(inside);
        return f();
    }
    f()
}

/// Called in a forked child, where no thread is inside: those that were are its
/// parent's.
pub fn forked() {
    INSIDE.store(0, SeqCst);
    HERE.set(false);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn null() -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        fs::open("/dev/null", flags, Mode::empty())
    }

    /// One test, since the count is the process's.
    #[test]
    fn who_asks_meets_nothing_on_its_way_up_and_nobody_waits_for_ever() {
        let fd = open(null).unwrap();
        assert!(fd.as_raw_fd() >= floor());
        assert!(duplicate(&fd).unwrap().as_raw_fd() > fd.as_raw_fd());
        let fails = open(|| Err(Errno::NOENT));
        assert_eq!(fails.unwrap_err(), Errno::NOENT);
        assert!(is_the_programs(2) && !is_the_programs(-1) && !is_the_programs(i32::MAX));

        let (inside, is_inside) = mpsc::channel();
        let (go, goes) = mpsc::channel::<()>();
        std::thread::scope(|s| {
            // Dropped where an assertion fails, so that the other thread goes on.
            let go = go;
            let opens = s.spawn(move || {
                open(|| {
                    let fd = null();
                    inside.send(fd.as_ref().unwrap().as_raw_fd()).unwrap();
                    let _ = goes.recv();
                    fd
                })
            });
            let low = is_inside.recv().unwrap();
            assert!(low < floor());
            // Another open, as on another disk, does not wait for it.
            let beside = open(|| {
                assert_eq!(INSIDE.load(SeqCst), 2 * OPENS);
                null()
            });
            assert!(beside.is_ok());
            // A thread that asks waits until the descriptor is moved; one that has
            // waited long enough goes on.
            assert_eq!(Inside::enter(ASKS, Duration::ZERO).counts, 0);
            let asks = s.spawn(move || {
                let inside = Inside::enter(ASKS, Duration::from_secs(3600));
                (inside.counts, is_open(low))
            });
            while !LEFT.is_awaited() && !asks.is_finished() {
                std::thread::yield_now();
            }
            go.send(()).unwrap();
            assert_eq!(asks.join().unwrap(), (ASKS, false));
            assert!(opens.join().unwrap().unwrap().as_raw_fd() >= floor());
        });
        // A close inside asks, as under an interposer.
        assert!(opening(|| !is_the_programs(i32::MAX)));
        assert_eq!(INSIDE.load(SeqCst), 0);
    }

    /// A program that closes what it did not open.
    #[test]
    fn one_that_is_closed_on_its_way_is_not_used() {
        let null = null().unwrap();
        let raw = fcntl_dupfd_cloexec(&null, 300).unwrap().into_raw_fd();
        // SAFETY: the one that `above` is given stands for nothing.
        let gone = unsafe {
            rustix::io::close(raw);
            <OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(raw)
        };
        assert_eq!(above(gone).unwrap_err(), Errno::BADF);
    }
}
