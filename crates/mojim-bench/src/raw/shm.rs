//! The limit of a link through shared memory: a ring in a memfd that two processes map.
//!
//! The client copies a record into the ring and publishes it. The peer polls, copies the bytes out
//! into memory of its own, and acknowledges. The peer polls a record's sequence number, which is in
//! the same cache line as the record's first bytes. So a small record costs one line less than with
//! a separate tail.
//!
//! Invariants:
//!
//! - Before a record is published the sequence field behind it is zero, so old payload is never
//!   taken for a record.
//! - One record is under way at a time, so the client never overwrites bytes that the peer still
//!   reads.
//!
//! An idle peer sleeps in a futex after [`Wait::spin`]. The client sees that in the cache
//! line that it polls anyway and wakes the peer, so neither end pays a fence for it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::thread::futex;

use super::mapping::Mapping;
use super::rules::{GIVE_UP, MAX_BYTES, Wait, check_length, peer_args};
use crate::peers::process::{self, PeerProcess};

/// The ring in bytes.
const RING: usize = 4 << 20;
/// Where the acknowledgement is, and behind it the peer's sleep flag.
const ACK: usize = 0;
const ASLEEP: usize = 8;
/// Where the ring begins; its own page.
const DATA: usize = 4096;
/// A record's sequence number and length, before its bytes.
const HEADER: usize = 16;
/// Records begin at cache lines.
const LINE: usize = 64;
/// A length that says: the next record is at the ring's beginning.
const WRAP: u64 = u64::MAX;

/// The client of a raw shared-memory link, and the peer process at its other end.
#[derive(Debug)]
pub struct RawShm {
    ring: Ring,
    position: usize,
    sequence: u64,
    wait: Wait,
    peer: PeerProcess,
}

impl RawShm {
    /// Creates the ring and starts the peer process. The client never sleeps: after
    /// [`Wait::spin`] it gives its processor away between polls.
    pub fn start(wait: Wait) -> io::Result<Self> {
        let memory: OwnedFd = memfd_create("mojim-raw-shm", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, (DATA + RING) as u64)?;
        let ring = Ring::map(&memory)?;
        let peer = PeerProcess::spawn(&peer_args("shm", wait), Some(memory))?;
        Ok(Self {
            ring,
            position: 0,
            sequence: 0,
            wait,
            peer,
        })
    }

    /// Hands `bytes` over and waits for the acknowledgement; the time from before the copy until
    /// the acknowledgement was seen. At most [`MAX_BYTES`].
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
        let size = (HEADER + bytes.len()).next_multiple_of(LINE);
        if self.position + size + HEADER > self.ring.size() {
            self.publish(WRAP, 0);
        }
        let at = self.position;
        self.ring.memory.put(DATA + at + HEADER, bytes);
        self.publish(bytes.len() as u64, at + size);
        Ok(())
    }

    fn publish(&mut self, length: u64, next: usize) {
        self.sequence += 1;
        self.ring
            .word(DATA + self.position + 8)
            .store(length, Ordering::Relaxed);
        self.ring.word(DATA + next).store(0, Ordering::Relaxed);
        self.ring
            .word(DATA + self.position)
            .store(self.sequence, Ordering::Release);
        self.position = next;
    }

    /// Waits for the acknowledgement of the last [`send`](Self::send).
    pub fn receive(&mut self) -> io::Result<()> {
        let mut start = None;
        loop {
            // The clock is read once in many polls: it costs as much as a cache line.
            for _ in 0..64 {
                if self.ring.word(ACK).load(Ordering::Acquire) == self.sequence {
                    return Ok(());
                }
                if self.ring.asleep().load(Ordering::Relaxed) != 0 {
                    self.ring.asleep().store(0, Ordering::Relaxed);
                    // Not lost if the peer has not yet gone to sleep: the futex compares.
                    futex::wake(self.ring.asleep(), futex::Flags::empty(), 1)?;
                }
                std::hint::spin_loop();
            }
            let elapsed = start.get_or_insert_with(Instant::now).elapsed();
            if elapsed > self.wait.spin {
                std::thread::yield_now();
            }
            if elapsed > GIVE_UP || (elapsed > Duration::from_millis(100) && self.peer.has_ended())
            {
                return Err(io::Error::other(
                    "the raw shared-memory peer does not answer",
                ));
            }
        }
    }

    /// The peer's process id.
    pub fn peer_id(&self) -> u32 {
        self.peer.id()
    }
}

/// Serves the ring in `memory`; ends with the process (its starter's end ends it).
pub(super) fn raw_shm_peer(memory: impl AsFd, spin: Duration) -> io::Result<()> {
    let ring = Ring::map(&memory)?;
    let mut own = Mapping::anonymous(RING)?;
    let mut own_position = 0;
    let mut position = 0;
    let mut sequence = 1;
    process::announce("shm")?;
    loop {
        ring.wait_for(position, sequence, spin)?;
        let length = ring.word(DATA + position + 8).load(Ordering::Relaxed);
        if length == WRAP {
            position = 0;
        } else {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            check_length(length)?;
            if own_position + length > own.len() {
                own_position = 0;
            }
            let from = DATA + position + HEADER;
            if length > ring.memory.len() - from {
                return Err(io::Error::other("a record beyond the end of the ring"));
            }
            // SAFETY: source and target are within their mappings (checked above), which are
            // distinct; the client published these bytes before the sequence number that was
            // read with Acquire, and does not touch them before the acknowledgement below.
            unsafe {
                let target = own.as_mut_slice().as_mut_ptr().add(own_position);
                std::ptr::copy_nonoverlapping(ring.memory.at(from), target, length);
            }
            own_position += length.next_multiple_of(LINE);
            position += (HEADER + length).next_multiple_of(LINE);
            ring.word(ACK).store(sequence, Ordering::Release);
        }
        sequence += 1;
    }
}

/// The shared memory: acknowledgement, sleep flag, and from [`DATA`] on the ring.
#[derive(Debug)]
struct Ring {
    memory: Mapping,
}

impl Ring {
    fn map(memory: impl AsFd) -> io::Result<Self> {
        let len = usize::try_from(fstat(&memory)?.st_size).unwrap_or(0);
        if len < DATA + 2 * MAX_BYTES {
            return Err(io::Error::other("the shared memory is too small"));
        }
        let ring = Self {
            memory: Mapping::shared(memory, len)?,
        };
        // Fault every page in now, by a load: the peer may map when the client already writes.
        for offset in (0..len).step_by(rustix::param::page_size()) {
            ring.word(offset).load(Ordering::Relaxed);
        }
        Ok(ring)
    }

    fn size(&self) -> usize {
        self.memory.len() - DATA
    }

    /// The word at `offset`, which both processes only touch as an atomic while it is a header.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.memory.len() - 8);
        // SAFETY: eight mapped bytes (asserted) at an aligned address (the mapping begins at a
        // page), valid as long as `self`; the bytes are shared and accessed atomically, and the
        // client's plain payload copies to the place are ordered by the acknowledgement.
        unsafe { AtomicU64::from_ptr(self.memory.at(offset).cast()) }
    }

    /// Not zero while the peer sleeps or is about to.
    fn asleep(&self) -> &AtomicU32 {
        // SAFETY: as for `word`; the offset is constant, aligned, and only used for this flag.
        unsafe { AtomicU32::from_ptr(self.memory.at(ASLEEP).cast()) }
    }

    /// Polls until the record at `position` has `sequence`; sleeps when that takes long.
    fn wait_for(&self, position: usize, sequence: u64, spin: Duration) -> io::Result<()> {
        let word = self.word(DATA + position);
        let polls = if spin.is_zero() { 1 } else { 256 };
        let mut start = None;
        loop {
            for _ in 0..polls {
                if word.load(Ordering::Acquire) == sequence {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() < spin {
                continue;
            }
            self.asleep().store(1, Ordering::SeqCst);
            if word.load(Ordering::SeqCst) != sequence {
                match futex::wait(self.asleep(), futex::Flags::empty(), 1, None) {
                    Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            self.asleep().store(0, Ordering::Relaxed);
            start = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carries_records_of_all_sizes_and_wraps() {
        let mut shm = RawShm::start(Wait::SPIN).unwrap();
        // Bytes that look like sequence numbers: old payload must not be taken for a record.
        let bytes: Vec<u8> = (0..MAX_BYTES as u64 / 8)
            .flat_map(|i| (i % 97).to_le_bytes())
            .collect();
        for len in [0, 1, 48, 49, 64, 4096, 100_000, MAX_BYTES] {
            for _ in 0..7 {
                shm.round_trip(&bytes[..len]).unwrap();
            }
        }
        assert!(shm.sequence > 56, "wrapped");
        assert!(shm.round_trip(&vec![0; MAX_BYTES + 1]).is_err());
    }

    #[test]
    fn wakes_a_sleeping_peer() {
        let mut shm = RawShm::start(Wait::BLOCK).unwrap();
        for _ in 0..3 {
            shm.round_trip(b"x").unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_lost_peer_is_an_error() {
        let mut shm = RawShm::start(Wait::SPIN).unwrap();
        let id = rustix::process::Pid::from_raw(shm.peer_id() as i32).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
        while shm.round_trip(b"x").is_ok() {}
    }
}
