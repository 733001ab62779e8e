//! The limit of a shared-memory link that threads share.
//!
//! All records that wait are published at once, in a ring in a memfd that two processes map. The
//! client copies the records in and publishes how many there have been in all. The peer copies them
//! into memory of its own and says how many it has.
//!
//! Invariants:
//!
//! - A write is answered before the next begins.
//! - The ring has room for the largest write.
//!
//! So the client never overwrites bytes that the peer still reads.
//!
//! The peer polls, and gives its processor away between polls, until it is killed. So a link is to
//! be started for the time of its use only.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};

use super::combining::{Carrier, MOST_MEMBERS, Polling, RECORD, Record};
use super::mapping::Mapping;
use super::rules::GIVE_UP;
use crate::peers::process::{self, PeerProcess};

/// What the peer is called in its arguments.
pub(super) const KIND: &str = "combining-shm";
/// Where the client publishes, and where the peer answers; each on lines of its own.
const PUBLISHED: usize = 0;
const RECEIVED: usize = 128;
/// Where the ring begins; its own page.
const DATA: usize = 4096;
/// Records in the ring.
const PLACES: usize = MOST_MEMBERS;
const SIZE: usize = DATA + PLACES * RECORD;
/// Looks of the peer before it gives its processor away once: alone with the client it answers
/// without a system call in its way.
const LOOKS: u32 = 16;
/// From then on the client asks whether the peer lives.
const SLOW: Duration = Duration::from_millis(100);

/// The client of a raw shared-memory link, and the peer process at its other end.
pub struct CombiningShm {
    ring: Ring,
    /// Records.
    sent: u64,
    peer: PeerProcess,
}

impl CombiningShm {
    /// Creates the ring and starts the peer process.
    pub fn start() -> io::Result<CombiningShm> {
        let memory: OwnedFd = memfd_create("mojim-raw-combining", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, SIZE as u64)?;
        let ring = Ring::map(&memory)?;
        let peer = PeerProcess::spawn(&[KIND.to_owned()], Some(memory))?;
        Ok(CombiningShm {
            ring,
            sent: 0,
            peer,
        })
    }

    /// How many records the peer has counted.
    pub fn counted(&self) -> u64 {
        self.ring.word(RECEIVED).load(Ordering::Acquire)
    }

    /// The peer's process id.
    pub fn peer_id(&self) -> u32 {
        self.peer.id()
    }
}

impl Carrier for CombiningShm {
    const MOST: usize = PLACES;

    fn stage(&mut self, at: usize, record: &Record) {
        let at = place(self.sent + at as u64);
        self.ring.memory.put(at, record);
    }

    fn carry(&mut self, n: usize, crowded: &dyn Fn() -> bool) -> io::Result<()> {
        self.sent += n as u64;
        self.ring
            .word(PUBLISHED)
            .store(self.sent, Ordering::Release);
        let mut polling = Polling::default();
        while self.counted() < self.sent {
            let elapsed = polling.pause(crowded);
            if elapsed > GIVE_UP || (elapsed > SLOW && self.peer.has_ended()) {
                return Err(io::Error::other(
                    "the raw shared-memory peer does not answer",
                ));
            }
        }
        Ok(())
    }
}

/// Where record number `n` is.
fn place(n: u64) -> usize {
    DATA + (n % PLACES as u64) as usize * RECORD
}

/// Serves the ring in `memory`; ends with the process (its starter's end ends it).
pub(super) fn peer(memory: impl AsFd) -> io::Result<()> {
    let ring = Ring::map(&memory)?;
    let mut own = Mapping::anonymous(SIZE)?;
    let own = own.as_mut_slice();
    process::announce(KIND)?;
    let (mut have, mut looks) = (0, 0_u32);
    loop {
        let published = ring.word(PUBLISHED).load(Ordering::Acquire);
        if published == have {
            looks += 1;
            if looks.is_multiple_of(LOOKS) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            continue;
        }
        if published < have || published - have > PLACES as u64 {
            return Err(io::Error::other("more records than the ring has room for"));
        }
        for n in have..published {
            let at = place(n);
            // SAFETY: the place is within both mappings, which are distinct; the client put these
            // bytes there before it published them, which was read with Acquire, and does not
            // touch them before the answer below.
            unsafe {
                let target = own[at..][..RECORD].as_mut_ptr();
                std::ptr::copy_nonoverlapping(ring.memory.at(at), target, RECORD);
            }
        }
        have = published;
        ring.word(RECEIVED).store(have, Ordering::Release);
    }
}

/// The shared memory: two counts, and from [`DATA`] on the ring.
struct Ring {
    memory: Mapping,
}

impl Ring {
    fn map(memory: impl AsFd) -> io::Result<Ring> {
        if usize::try_from(fstat(&memory)?.st_size).unwrap_or(0) < SIZE {
            return Err(io::Error::other("the shared memory is too small"));
        }
        let memory = Mapping::shared(memory, SIZE)?;
        let ring = Ring { memory };
        // Fault every page in now, by a load: the peer may map when the client already writes.
        for offset in (0..SIZE).step_by(rustix::param::page_size()) {
            ring.word(offset).load(Ordering::Relaxed);
        }
        Ok(ring)
    }

    /// The word at `offset`.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.memory.len() - 8);
        // SAFETY: eight mapped bytes (asserted) at an aligned address (the mapping begins at a
        // page), valid as long as `self`; the two counts are only accessed so, and other words only
        // before the first record.
        unsafe { AtomicU64::from_ptr(self.memory.at(offset).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::combining::tests::{all_fail, sixteen};
    use super::*;

    #[test]
    fn the_peer_counts_what_all_threads_publish() {
        let mut link = sixteen(CombiningShm::start().unwrap(), 500);
        assert_eq!(link.counted(), 16 * 500);
        link.stage(0, &[7; RECORD]);
        link.carry(PLACES, &|| true).unwrap();
        assert_eq!(link.counted(), (16 * 500 + PLACES) as u64);
    }

    #[test]
    fn a_lost_peer_is_an_error() {
        let link = CombiningShm::start().unwrap();
        let id = rustix::process::Pid::from_raw(link.peer_id() as i32).unwrap();
        all_fail(link, || {
            rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
        });
    }
}
