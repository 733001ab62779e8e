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
//! - Nothing waits at the gate for ever: a signal handler may come to it amid an
//!   open of its own thread's, and a child of fork amid another's.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};

use crate::futex::{futex_wait, futex_wake};

/// The engine's lowest number where there is room for so many.
const USUAL: u64 = 512;
/// How long somebody waits at the gate: a thousand opens.
const PATIENCE: Duration = Duration::from_secs(1);

/// The engine's lowest number: half of what the process may have, 512 at most.
pub fn floor() -> RawFd {
    static FLOOR: OnceLock<RawFd> = OnceLock::new();
    *FLOOR.get_or_init(|| {
        let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        (most / 2).min(USUAL) as RawFd
    })
}

/// 0: open; 1: somebody is inside; 2: and somebody may wait.
static GATE: AtomicU32 = AtomicU32::new(0);

struct Inside;

impl Inside {
    /// None if it took too long.
    fn enter() -> Option<Inside> {
        if GATE.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            return Some(Inside);
        }
        let until = Instant::now() + PATIENCE;
        while GATE.swap(2, Acquire) != 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            futex_wait(&GATE, 2, left);
        }
        Some(Inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if GATE.swap(0, Release) == 2 {
            futex_wake(&GATE, 1);
        }
    }
}

/// Does something alone: what gives a number of the program's choice a new meaning
/// (`dup2`), or opens what is then put [`above`].
pub fn alone<T>(f: impl FnOnce() -> T) -> T {
    let _inside = Inside::enter();
    f()
}

/// In a child of fork nobody is inside: the threads that were are its parent's.
pub fn forked() {
    GATE.store(0, Release);
}

/// What `open` opens, without waiting, from [`floor`] on; where no number is left
/// there, as it came. It is close-on-exec.
pub fn open<E>(open: impl FnOnce() -> Result<OwnedFd, E>) -> Result<OwnedFd, E> {
    alone(|| open().map(above))
}

/// Moves one from among the program's. In [`alone`], where it was opened.
pub fn above(fd: OwnedFd) -> OwnedFd {
    if fd.as_raw_fd() >= floor() {
        return fd;
    }
    fcntl_dupfd_cloexec(&fd, floor()).unwrap_or(fd)
}

/// Another descriptor for what `fd` stands for. Fails with EMFILE if none is left.
pub fn duplicate(fd: impl AsFd) -> Result<OwnedFd, Errno> {
    match fcntl_dupfd_cloexec(&fd, floor()) {
        Err(Errno::MFILE | Errno::INVAL) => fcntl_dupfd_cloexec(&fd, 0),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn null() -> Result<OwnedFd, Errno> {
        use rustix::fs::{Mode, OFlags, open};
        open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    #[test]
    fn they_lie_above_the_programs() {
        let fd = open(null).unwrap();
        assert!(fd.as_raw_fd() >= floor());
        assert!(duplicate(&fd).unwrap().as_raw_fd() > fd.as_raw_fd());
        assert_eq!(open(|| Err(Errno::NOENT)).unwrap_err(), Errno::NOENT);
    }

    /// Nobody puts a descriptor over one that is about to be moved; and what hangs
    /// behind the gate does not hang who comes to it.
    #[test]
    fn one_at_a_time_but_not_for_ever() {
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
            assert!(Inside::enter().is_none());
            assert!(begun.elapsed() >= PATIENCE);
            let waits = s.spawn(|| alone(|| GATE.load(Relaxed)));
            go.send(()).unwrap();
            assert!(opens.join().unwrap().is_ok());
            assert_ne!(waits.join().unwrap(), 0, "it is inside");
        });
        assert_eq!(GATE.load(Relaxed), 0);
    }
}
