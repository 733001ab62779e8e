//! The limit of a TCP link that threads share: all records that wait go in one send.
//!
//! The peer receives into a ring of its own, which takes the bytes out of the kernel. It answers
//! with the number of records that it has received in all. Several sends, or parts of one, may get
//! one answer or more. The peer polls, and gives its processor away between polls, for as long as
//! the connection is open. So a link is to be started for the time of its use only.

use std::io;
use std::net::{TcpListener, TcpStream};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::combining::{Carrier, MOST_MEMBERS, Polling, RECORD, Record};
use super::mapping::Mapping;
use super::rules::GIVE_UP;
use super::tcp::send_all;
use crate::peers::process::PeerProcess;

/// What the peer is called in its arguments.
pub(super) const KIND: &str = "combining-tcp";
/// The length of an answer.
const ANSWER: usize = 8;
/// The peer's ring.
const RING: usize = 4 << 20;

/// The client of a raw TCP link on loopback, and the peer process at its other end.
pub struct CombiningTcp {
    stream: TcpStream,
    batch: Vec<u8>,
    /// Records.
    sent: u64,
    /// Records that the peer has, by its last answer.
    counted: u64,
    answers: [u8; 8 * ANSWER],
    /// Bytes in `answers`, less than one answer between receives.
    have: usize,
    peer: PeerProcess,
}

impl CombiningTcp {
    /// Starts the peer process and connects to it.
    pub fn start() -> io::Result<CombiningTcp> {
        let peer = PeerProcess::spawn(&[KIND.to_owned()], None)?;
        let stream = TcpStream::connect(peer.ready())?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GIVE_UP))?;
        Ok(CombiningTcp {
            stream,
            batch: vec![0; MOST_MEMBERS * RECORD],
            sent: 0,
            counted: 0,
            answers: [0; 8 * ANSWER],
            have: 0,
            peer,
        })
    }

    /// How many records the peer has counted.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// The peer's process id.
    pub fn peer_id(&self) -> u32 {
        self.peer.id()
    }

    /// Receives what there is of answers; whether there was anything.
    fn receive(&mut self) -> io::Result<bool> {
        let into = &mut self.answers[self.have..];
        match recv(&self.stream, into, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((n, _)) => {
                self.have += n;
                let mut whole = self.answers[..self.have].chunks_exact(ANSWER);
                if let Some(last) = whole.by_ref().last() {
                    self.counted = u64::from_le_bytes(last.try_into().expect("8 bytes"));
                }
                let used = self.have / ANSWER * ANSWER;
                self.answers.copy_within(used..self.have, 0);
                self.have -= used;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

impl Carrier for CombiningTcp {
    const MOST: usize = MOST_MEMBERS;

    fn stage(&mut self, at: usize, record: &Record) {
        self.batch[at * RECORD..][..RECORD].copy_from_slice(record);
    }

    fn carry(&mut self, n: usize, crowded: &dyn Fn() -> bool) -> io::Result<()> {
        send_all(&self.stream, &self.batch[..n * RECORD])?;
        self.sent += n as u64;
        let mut polling = Polling::default();
        while self.counted < self.sent {
            if !self.receive()? && polling.pause(crowded) > GIVE_UP {
                return Err(io::Error::other("the raw TCP peer does not answer"));
            }
        }
        if self.counted > self.sent {
            return Err(io::Error::other("the raw TCP peer counts too many records"));
        }
        Ok(())
    }
}

/// Serves the one client that connects to `listener` until it closes the connection.
pub(super) fn peer(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut ring = Mapping::anonymous(RING)?;
    let ring = ring.as_mut_slice();
    let mut at = 0;
    let (mut bytes, mut answered) = (0, 0);
    loop {
        match recv(&stream, &mut ring[at..], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(()),
            Ok((n, _)) => {
                at = (at + n) % RING;
                bytes += n as u64;
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                std::thread::yield_now();
                continue;
            }
            Err(e) => return Err(e.into()),
        }
        let count = bytes / RECORD as u64;
        if count > answered {
            answered = count;
            match send_all(&stream, &count.to_le_bytes()) {
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                sent => sent?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::combining::tests::{all_fail, sixteen};
    use super::*;

    #[test]
    fn the_peer_counts_what_all_threads_send() {
        let link = sixteen(CombiningTcp::start().unwrap(), 200);
        assert_eq!(link.counted(), 16 * 200);
        // More than the peer's ring.
        let mut link = link;
        for _ in 0..2 * RING / RECORD / MOST_MEMBERS {
            link.carry(MOST_MEMBERS, &|| true).unwrap();
        }
        assert_eq!(link.counted(), 16 * 200 + 2 * (RING / RECORD) as u64);
    }

    #[test]
    fn a_lost_peer_is_an_error() {
        let link = CombiningTcp::start().unwrap();
        let id = rustix::process::Pid::from_raw(link.peer_id() as i32).unwrap();
        all_fail(link, || {
            rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
        });
    }
}
