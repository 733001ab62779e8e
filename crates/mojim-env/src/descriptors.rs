//! The engine's descriptors, beside a program's in one table.
//!
//! A program counts on the numbers: a shell closes 0 and lets `dup2` put a file
//! there, and takes 3 to 9 for those that a script names. So descriptors of the
//! engine's lie from [`floor`] on, out of the way.
//!
//! Owns the floor, and the gate behind which a descriptor is moved up.
//!
//! Invariants:
//! - Whoever opens behind the gate does not wait there for anything to happen:
//!   `accept`, for one, keeps the lowest free number to itself while it waits.
//! - Nothing waits at the gate for ever: it is taken from who does not leave, and who
//!   finds that it was uses no number that it had in passing.

use std::cell::Cell;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{self, Mode, OFlags};
use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::process::{Resource, getrlimit};

use crate::futex::{futex_wait, futex_wake};
use crate::threads::SignalsWait;

/// The engine's lowest number where there is room for so many.
const USUAL: u64 = 512;
/// How long somebody waits at the gate: a thousand opens.
const PATIENCE: Duration = Duration::from_secs(1);

/// The engine's lowest number: half of what the process may have, 512 at most.
pub fn floor() -> RawFd {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (most / 2).min(USUAL) as RawFd
}

/// 0: open; 1: somebody is inside; 2: and somebody may wait.
static GATE: AtomicU32 = AtomicU32::new(0);
/// How often it was taken from who did not leave.
static TAKEN: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// This thread is inside: an interposer may have it ask again, when it closes.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// `TAKEN` when it came in.
    static SINCE: Cell<u32> = const { Cell::new(0) };
}

/// No signal handler of the program runs on a thread that is inside, or waits.
struct Inside {
    outermost: bool,
    _signals: Option<SignalsWait>,
}

impl Inside {
    fn enter() -> Inside {
        if INSIDE.get() {
            return Inside {
                outermost: false,
                _signals: None,
            };
        }
        let signals = SignalsWait::begin();
        Inside::wait();
        SINCE.set(TAKEN.load(Acquire));
        INSIDE.set(true);
        Inside {
            outermost: true,
            _signals: Some(signals),
        }
    }

    /// Takes the gate from who does not leave.
    fn wait() {
        if GATE.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            return;
        }
        let until = Instant::now() + PATIENCE;
        while GATE.swap(2, Acquire) != 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                TAKEN.fetch_add(1, AcqRel);
                break;
            }
            futex_wait(&GATE, 2, left);
        }
    }

    /// Nobody has taken the gate from this thread.
    fn is_alone() -> bool {
        TAKEN.load(Acquire) == SINCE.get()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if !self.outermost {
            return;
        }
        INSIDE.set(false);
        // Else it is another's to open.
        if Inside::is_alone() && GATE.swap(0, Release) == 2 {
            futex_wake(&GATE, 1);
        }
    }
}

/// Does something while no other descriptor is moved: what opens some and puts them
/// [`above`]. No signal handler runs meanwhile.
pub fn alone<T>(f: impl FnOnce() -> T) -> T {
    let _inside = Inside::enter();
    f()
}

/// What `open` opens, without waiting, from [`floor`] on; where no number is left
/// there, as it came. It is close-on-exec.
pub fn open<E>(mut open: impl FnMut() -> Result<OwnedFd, E>) -> Result<OwnedFd, E> {
    loop {
        if let Some(fd) = alone(|| open().map(above))? {
            return Ok(fd);
        }
    }
}

/// Moves one from among the program's. In [`alone`], where it was opened. `None` if
/// the program may have taken its number meanwhile: then it is left to it.
pub fn above(fd: OwnedFd) -> Option<OwnedFd> {
    let floor = floor();
    if fd.as_raw_fd() >= floor {
        return Some(fd);
    }
    let moved = match Inside::is_alone() {
        true => fcntl_dupfd_cloexec(&fd, floor),
        false => Err(Errno::BADF),
    };
    match moved {
        Ok(moved) if Inside::is_alone() => Some(moved),
        Ok(_) | Err(Errno::BADF) => {
            let _ = fd.into_raw_fd();
            None
        }
        Err(_) => Some(fd),
    }
}

/// Another descriptor for what `fd` stands for. Fails with EMFILE if none is left.
pub fn duplicate(fd: impl AsFd) -> Result<OwnedFd, Errno> {
    match fcntl_dupfd_cloexec(&fd, floor()) {
        Err(Errno::MFILE | Errno::INVAL) => fcntl_dupfd_cloexec(&fd, 0),
        done => done,
    }
}

/// The text of a small file, as the kernel's are.
pub fn read(path: impl AsRef<Path>) -> std::io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let one = || retry_on_intr(|| fs::open(path.as_ref(), flags, Mode::empty()));
    let mut text = String::new();
    std::fs::File::from(open(one)?).read_to_string(&mut text)?;
    Ok(text)
}

/// Whether the program has something open under this number: what the engine has there
/// for a moment does not count. Signal handlers may ask.
pub fn is_the_programs(number: RawFd) -> bool {
    let _inside = Inside::enter();
    is_open(number)
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: only asked about; any number may be.
    let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(number.max(0)) };
    number >= 0 && rustix::io::fcntl_getfd(fd).is_ok()
}

/// Does what puts something under a number of the program's choice (`dup2`) so that no
/// descriptor of the engine's is hit that has it for a moment. Signal handlers may.
pub fn put<T>(number: RawFd, f: impl FnOnce() -> T) -> T {
    let inside = Inside::enter();
    // What is there is closed by this, which may take long; and is the program's.
    if is_open(number) {
        drop(inside);
        return f();
    }
    f()
}

/// In a child of fork nobody is inside: the threads that were are its parent's.
pub fn forked() {
    GATE.store(0, Release);
    INSIDE.set(false);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn null() -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        fs::open("/dev/null", flags, Mode::empty())
    }

    /// In one test: the gate is the process's.
    #[test]
    fn they_lie_above_the_programs_and_are_moved_one_at_a_time() {
        let fd = open(null).unwrap();
        assert!(fd.as_raw_fd() >= floor());
        assert!(duplicate(&fd).unwrap().as_raw_fd() > fd.as_raw_fd());
        let fails = open(|| Err(Errno::NOENT));
        assert_eq!(fails.unwrap_err(), Errno::NOENT);
        assert!(is_the_programs(2) && !is_the_programs(-1) && !is_the_programs(i32::MAX));

        // Whoever comes to it while another is inside waits, but not for ever; and from
        // then on nobody waits.
        let (inside, is_inside) = mpsc::channel();
        let (go, goes) = mpsc::channel::<()>();
        std::thread::scope(|s| {
            let opens = s.spawn(move || {
                open(|| {
                    inside.send(()).unwrap();
                    goes.recv().unwrap();
                    null()
                })
            });
            is_inside.recv().unwrap();
            let begun = Instant::now();
            put(i32::MAX, || {
                assert_ne!(GATE.load(Relaxed), 0, "it is inside")
            });
            assert!(begun.elapsed() >= PATIENCE);
            assert_eq!(GATE.load(Relaxed), 0);
            // What it opened may have been replaced: it opens again.
            go.send(()).unwrap();
            is_inside.recv().unwrap();
            go.send(()).unwrap();
            let fd = opens.join().unwrap().unwrap();
            assert!(fd.as_raw_fd() >= floor());
        });
        assert_eq!(GATE.load(Relaxed), 0);
    }

    /// A shell saves what is open under a number that it wants, and closes it.
    #[test]
    fn one_that_the_program_has_closed_is_not_used() {
        let number = null().unwrap();
        let closed = number.as_raw_fd();
        let other = rustix::io::fcntl_dupfd_cloexec(&number, 300).unwrap();
        let raw = other.as_raw_fd();
        drop(other);
        // SAFETY: nobody has it: as an open that is moved sees it.
        let gone = unsafe { <OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(raw) };
        assert!(above(gone).is_none());
        assert_ne!(closed, raw);
    }
}
