//! The physical limits: what a link, a ring, a log write and `msync` cost with nothing around them.
//!
//! Each limit uses the best strategy that was found for it, so that a ratio to it is honest, and
//! the same rules as Mojim: the other end is another process, it has the bytes in memory of its
//! own before it answers, and neither end spins longer than [`Wait::spin`] before it blocks.
//! Invariant: after a limit is built, its timed part allocates nothing.

use std::io;
use std::marker::PhantomData;
use std::net::TcpListener;
use std::time::Duration;

use crate::peers;

mod journal;
mod log;
mod mapping;
mod msync;
mod shm;
mod tcp;

pub use journal::Journaling;
pub use log::RawLog;
pub use msync::{Folios, PlainMsync, SIZE as RAW_MSYNC_BYTES};
pub use shm::RawShm;
pub use tcp::{RawTcp, raw_tcp_peer};

/// The largest record that a raw limit takes, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// The largest time that any wait for a peer may last before it is an error.
const GIVE_UP: Duration = Duration::from_secs(10);

/// How both ends of a raw link wait.
///
/// Polling is without `sched_yield`: beside a busy process one yield costs its whole slice (4 ms a
/// round trip were seen). But if the scheduler puts both ends on one processor, each spins in the
/// other's way (73 µs a round trip instead of 7, for a while, then back). So pin both: the peer
/// with [`peer_cpu`](Self::peer_cpu), the client with [`pin_thread`], a mirror that is compared
/// with [`pin_process`], on the processors that [`placement`] gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The time to poll before the thread blocks. Zero: block at once.
    pub spin: Duration,
    /// The processor of the peer; `None`: where the starting thread may run.
    pub peer_cpu: Option<usize>,
}

impl Wait {
    /// Poll for 30 µs, then block; no pinning.
    pub const SPIN: Self = Self {
        spin: Duration::from_micros(30),
        peer_cpu: None,
    };
    /// Block at once; no pinning.
    pub const BLOCK: Self = Self {
        spin: Duration::ZERO,
        peer_cpu: None,
    };

    /// With the peer on this processor.
    pub fn peer_on(self, cpu: Option<usize>) -> Self {
        Self {
            peer_cpu: cpu,
            ..self
        }
    }
}

impl Default for Wait {
    fn default() -> Self {
        Self::SPIN
    }
}

/// Two processors that this thread may run on, for the client and for its peers; `None` if there
/// is only one.
pub fn placement() -> Option<(usize, usize)> {
    let set = rustix::thread::sched_getaffinity(None).ok()?;
    let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Some((cpus.next()?, cpus.next()?))
}

/// The calling thread's stay on one processor; ends when it is dropped (in the same thread).
#[derive(Debug)]
pub struct Pinned {
    before: rustix::thread::CpuSet,
    // Not `Send`: the drop is about the thread that pinned.
    _thread: PhantomData<*const ()>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = rustix::thread::sched_setaffinity(None, &self.before);
    }
}

/// Ties the calling thread to one processor. Threads and processes that it starts afterwards
/// inherit that, so start those first.
pub fn pin_thread(cpu: usize) -> io::Result<Pinned> {
    let before = rustix::thread::sched_getaffinity(None)?;
    rustix::thread::sched_setaffinity(None, &one(cpu)?)?;
    Ok(Pinned {
        before,
        _thread: PhantomData,
    })
}

/// Ties all threads of another process to one processor, and with them those that they start.
pub fn pin_process(id: u32, cpu: usize) -> io::Result<()> {
    let set = one(cpu)?;
    for task in std::fs::read_dir(format!("/proc/{id}/task"))? {
        let task = task?.file_name();
        let task = task.to_str().and_then(|t| t.parse().ok());
        // Never `None`: that would be the calling thread.
        let Some(task) = task.and_then(rustix::process::Pid::from_raw) else {
            continue;
        };
        match rustix::thread::sched_setaffinity(Some(task), &set) {
            // The thread ended meanwhile.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// The set of one processor.
fn one(cpu: usize) -> io::Result<rustix::thread::CpuSet> {
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "no such processor",
        ));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(set)
}

/// The peer's part of `main`: `args` are what follows the hidden argument, `tcp` or `shm` first,
/// then the spin in nanoseconds and, if pinned, the processor.
///
/// Returns when the client has gone.
pub fn raw_peer_main(args: &[String]) -> io::Result<()> {
    let number = |i: usize| args.get(i).and_then(|a| a.parse::<u64>().ok());
    let spin = number(1).map_or(Wait::SPIN.spin, Duration::from_nanos);
    let _pinned = number(2).map(|cpu| pin_thread(cpu as usize)).transpose()?;
    match args.first().map(String::as_str) {
        Some("tcp") => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            peers::announce(&listener.local_addr()?.to_string())?;
            raw_tcp_peer(listener, spin)
        }
        Some("shm") => shm::raw_shm_peer(io::stdin(), spin),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a peer is `tcp` or `shm`",
        )),
    }
}

/// The peer's arguments for `kind` and `wait`.
fn peer_args(kind: &str, wait: Wait) -> Vec<String> {
    let mut args = vec![kind.to_owned(), wait.spin.as_nanos().to_string()];
    args.extend(wait.peer_cpu.map(|cpu| cpu.to_string()));
    args
}

/// An error for a record that is larger than [`MAX_BYTES`].
fn check_length(len: usize) -> io::Result<()> {
    if len > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "record above raw::MAX_BYTES",
        ));
    }
    Ok(())
}

/// The machine's speed just now: the median of 31 loopback round trips with 4 KiB.
///
/// Virtual processors move, and the figure jumps with them (2.5 to 3.1 µs or 7.6 to 8.4 µs where
/// this was written) and stays there for seconds. Only a ratio to figures of the same state means
/// anything; [`crate::measure`] sorts rounds by it.
pub fn speed_state(tcp: &mut RawTcp) -> io::Result<Duration> {
    let bytes = [0x5a; 4096];
    let mut times = [Duration::ZERO; 31];
    tcp.round_trip(&bytes)?;
    for time in &mut times {
        *time = tcp.round_trip(&bytes)?;
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_and_lets_go() {
        // In a thread of its own, for the harness reuses threads.
        let thread = std::thread::spawn(|| {
            let Some((client, peer)) = placement() else {
                return;
            };
            let mut tcp = RawTcp::start(Wait::SPIN.peer_on(Some(peer))).unwrap();
            pin_process(tcp.peer_id(), peer).unwrap();
            let pinned = pin_thread(client).unwrap();
            assert_eq!(placement(), None);
            tcp.round_trip(b"x").unwrap();
            drop(pinned);
            assert_eq!(placement(), Some((client, peer)));
            assert!(pin_thread(usize::MAX).is_err());
        });
        thread.join().unwrap();
    }
}
