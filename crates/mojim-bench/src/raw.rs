//! The physical limits: what a link, a ring, a log write and `msync` cost with nothing around them.
//!
//! Each limit uses the best strategy that was found for it, so that a ratio to it is honest. It
//! follows the same rules as Mojim:
//!
//! - The other end is another process.
//! - The other end has the bytes in memory of its own before it answers.
//! - Neither end spins longer than [`Wait::spin`] before it blocks or yields.
//!
//! [`Combining`] is the limit of threads that share a log or a link.
//!
//! Invariant: after a limit is built, its timed part allocates nothing.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use crate::peers::process;

mod combining;
mod combining_shm;
mod combining_tcp;
mod journal;
mod log;
mod mapping;
mod msync;
mod processors;
mod rules;
mod shm;
mod tcp;

pub use combining::{Carrier, Combining, MOST_MEMBERS, Member, RECORD, Record};
pub use combining_shm::CombiningShm;
pub use combining_tcp::CombiningTcp;
pub use journal::Journaling;
pub use log::{RawLog, RawLogs};
pub use msync::{Folios, PlainMsync, SIZE as RAW_MSYNC_BYTES};
pub use processors::{Pinned, PinnedAll, pin_all, pin_process, pin_thread, placement};
pub use rules::{MAX_BYTES, Wait};
pub use shm::RawShm;
pub use tcp::{RawTcp, raw_tcp_peer};

/// The peer's part of `main`: `args` are what follows the hidden argument: the kind of peer, then,
/// for `tcp` and `shm`, the spin in nanoseconds and, if pinned, the processor.
///
/// Returns when the client has gone.
pub fn raw_peer_main(args: &[String]) -> io::Result<()> {
    let number = |i: usize| args.get(i).and_then(|a| a.parse::<u64>().ok());
    let spin = number(1).map_or(Wait::SPIN.spin, Duration::from_nanos);
    let _pinned = number(2).map(|cpu| pin_thread(cpu as usize)).transpose()?;
    match args.first().map(String::as_str) {
        Some("tcp") => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            process::announce(&listener.local_addr()?.to_string())?;
            raw_tcp_peer(listener, spin)
        }
        Some("shm") => shm::raw_shm_peer(io::stdin(), spin),
        Some(combining_tcp::KIND) => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            process::announce(&listener.local_addr()?.to_string())?;
            combining_tcp::peer(&listener)
        }
        Some(combining_shm::KIND) => combining_shm::peer(io::stdin()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a peer is `tcp`, `shm`, `combining-tcp` or `combining-shm`",
        )),
    }
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
