//! The limit of a TCP link: one send of a 32-byte header and the payload, a 32-byte answer.
//!
//! The peer receives into a ring. So the bytes leave the kernel once, and are then where a mirror's
//! log would be. The usual case is one receive call a record. Both ends poll with a receive that
//! does not wait, and block when [`Wait::spin`] is over.

use std::io::{self, IoSlice};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::mapping::Mapping;
use super::rules::{GIVE_UP, MAX_BYTES, Wait, check_length, peer_args};
use crate::peers::process::PeerProcess;

/// The length of the header before the payload: payload length, sequence number, zeros.
const HEADER: usize = 32;
/// The length of the answer: sequence number, zeros.
const ANSWER: usize = 32;
/// The peer's ring.
const RING: usize = 4 << 20;
/// Up to this payload a copy behind the header is cheaper than a second piece in the send.
const COPIED: usize = 1024;

/// The client of a raw TCP link on loopback, and the peer process at its other end.
#[derive(Debug)]
pub struct RawTcp {
    stream: TcpStream,
    wait: Wait,
    sequence: u64,
    frame: [u8; HEADER + COPIED],
    peer: PeerProcess,
}

impl RawTcp {
    /// Starts the peer process and connects to it.
    pub fn start(wait: Wait) -> io::Result<Self> {
        let peer = PeerProcess::spawn(&peer_args("tcp", wait), None)?;
        let stream = TcpStream::connect(peer.ready())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(GIVE_UP))?;
        stream.set_write_timeout(Some(GIVE_UP))?;
        Ok(Self {
            stream,
            wait,
            sequence: 0,
            frame: [0; HEADER + COPIED],
            peer,
        })
    }

    /// Sends `bytes` and waits for the answer; the time from before the send until the answer is
    /// in memory. At most [`MAX_BYTES`].
    pub fn round_trip(&mut self, bytes: &[u8]) -> io::Result<Duration> {
        let start = Instant::now();
        self.send(bytes)?;
        self.receive()?;
        Ok(start.elapsed())
    }

    /// The first half of [`round_trip`](Self::round_trip), for work to be done meanwhile. Each
    /// send is followed by one [`receive`](Self::receive) before the next.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        check_length(bytes.len())?;
        self.sequence += 1;
        self.frame[..8].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.frame[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        if bytes.len() <= COPIED {
            self.frame[HEADER..HEADER + bytes.len()].copy_from_slice(bytes);
            return send_all(&self.stream, &self.frame[..HEADER + bytes.len()]);
        }
        let pieces = [IoSlice::new(&self.frame[..HEADER]), IoSlice::new(bytes)];
        let mut nothing = SendAncillaryBuffer::default();
        let sent = sendmsg(&self.stream, &pieces, &mut nothing, SendFlags::NOSIGNAL)?;
        match sent.checked_sub(HEADER) {
            Some(sent) => send_all(&self.stream, &bytes[sent..]),
            None => {
                send_all(&self.stream, &self.frame[sent..HEADER])?;
                send_all(&self.stream, bytes)
            }
        }
    }

    /// Waits for the answer to the last [`send`](Self::send).
    pub fn receive(&mut self) -> io::Result<()> {
        let mut answer = [0; ANSWER];
        let mut have = 0;
        while have < ANSWER {
            match receive_some(&self.stream, &mut answer[have..], self.wait.spin)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => have += n,
            }
        }
        if answer[..8] != self.sequence.to_le_bytes() {
            return Err(io::Error::other("the raw TCP peer answered another record"));
        }
        Ok(())
    }

    /// The peer's process id.
    pub fn peer_id(&self) -> u32 {
        self.peer.id()
    }
}

/// Serves the one client that connects to `listener` until it closes the connection. Each wait
/// polls for `spin` and then blocks.
pub fn raw_tcp_peer(listener: TcpListener, spin: Duration) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut ring = Mapping::anonymous(RING)?;
    let ring = ring.as_mut_slice();
    // The bytes of `ring[begin..end]` were received and not yet answered.
    let (mut begin, mut end) = (0, 0);
    loop {
        // The next frame must fit without a break.
        if RING - begin < HEADER + MAX_BYTES {
            ring.copy_within(begin..end, 0);
            (begin, end) = (0, end - begin);
        }
        let n = match receive_some(&stream, &mut ring[end..], spin) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => 0,
            Err(e) => return Err(e),
        };
        if n == 0 {
            return Ok(());
        }
        end += n;
        while end - begin >= HEADER {
            let len = u64::from_le_bytes(ring[begin..begin + 8].try_into().expect("8 bytes"));
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            check_length(len)?;
            if end - begin < HEADER + len {
                break;
            }
            let mut answer = [0; ANSWER];
            answer[..8].copy_from_slice(&ring[begin + 8..begin + 16]);
            send_all(&stream, &answer)?;
            begin += HEADER + len;
        }
    }
}

/// Sends all of `bytes`; one call unless the socket is full.
pub(super) fn send_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Receives what there is, at least one byte; 0 when the other end has closed.
fn receive_some(stream: &TcpStream, into: &mut [u8], spin: Duration) -> io::Result<usize> {
    if !spin.is_zero() {
        let start = Instant::now();
        while start.elapsed() < spin {
            match recv(stream, &mut *into, RecvFlags::DONTWAIT) {
                Ok((n, _)) => return Ok(n),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => std::hint::spin_loop(),
                Err(e) => return Err(e.into()),
            }
        }
    }
    loop {
        match recv(stream, &mut *into, RecvFlags::empty()) {
            Ok((n, _)) => return Ok(n),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_records_of_all_sizes() {
        for wait in [Wait::SPIN, Wait::BLOCK] {
            let mut tcp = RawTcp::start(wait).unwrap();
            let bytes = vec![7; MAX_BYTES];
            // Together more than the ring, so that it wraps within a record.
            for len in [0, 1, 64, COPIED, COPIED + 1, 4096, MAX_BYTES - 1, MAX_BYTES] {
                for _ in 0..3 {
                    tcp.round_trip(&bytes[..len]).unwrap();
                }
            }
            assert!(tcp.round_trip(&vec![0; MAX_BYTES + 1]).is_err());
            tcp.round_trip(b"still in step").unwrap();
        }
    }

    #[test]
    fn a_lost_peer_is_an_error() {
        let mut tcp = RawTcp::start(Wait::SPIN).unwrap();
        let id = rustix::process::Pid::from_raw(tcp.peer_id() as i32).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
        while tcp.round_trip(b"x").is_ok() {}
    }

    #[test]
    fn a_thread_can_be_the_peer() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let peer = std::thread::spawn(move || raw_tcp_peer(listener, Duration::ZERO));
        let stream = TcpStream::connect(address).unwrap();
        let mut frame = [0; HEADER + 3];
        frame[0] = 3;
        frame[8] = 9;
        send_all(&stream, &frame[..10]).unwrap();
        send_all(&stream, &frame[10..]).unwrap();
        let mut answer = [0; ANSWER];
        assert_eq!(
            receive_some(&stream, &mut answer, Duration::ZERO).unwrap(),
            ANSWER
        );
        assert_eq!(answer[0], 9);
        drop(stream);
        peer.join().unwrap().unwrap();
    }

    #[test]
    fn the_machine_has_a_speed() {
        let mut tcp = RawTcp::start(Wait::SPIN).unwrap();
        assert!(super::super::speed_state(&mut tcp).unwrap() > Duration::ZERO);
    }
}
