//! The table of ranges that the SIGSEGV handler looks faults up in.
//!
//! Invariants:
//!
//! - A slot's range and region are complete while it is `LIVE`.
//! - A region stays while a handler is inside its slot (invariant 3 of `mprotect.rs`).
//! - Looking up takes no lock.

use std::io;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;

use super::region::Region;

/// How many trackers of this kind a process can have.
const SLOTS: usize = 1024;
/// A [`Slot::state`]: never used, or its last range is of no interest.
const FREE: u32 = 0;
/// Being filled in by an attach.
const CLAIMED: u32 = 1;
/// Holds a range that is tracked, and its region.
pub(super) const LIVE: u32 = 2;
/// Holds the range of a tracker that was dropped.
pub(super) const DEAD: u32 = 3;

/// One entry of the handler's table.
pub(super) struct Slot {
    pub(super) state: AtomicU32,
    /// `late` faults may still be retried while DEAD.
    pub(super) late: AtomicU32,
    base: AtomicUsize,
    end: AtomicUsize,
    pub(super) region: AtomicPtr<Region>,
    /// Handlers inside, by the value of `side` when they entered.
    inside: [AtomicU32; 2],
    side: AtomicU32,
}

pub(super) static TABLE: [Slot; SLOTS] = [const {
    Slot {
        state: AtomicU32::new(FREE),
        late: AtomicU32::new(0),
        base: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        region: AtomicPtr::new(std::ptr::null_mut()),
        inside: [AtomicU32::new(0), AtomicU32::new(0)],
        side: AtomicU32::new(0),
    }
}; SLOTS];
/// No slot at or beyond this index was ever used.
pub(super) static USED: AtomicUsize = AtomicUsize::new(0);
/// Where the next attach starts to look: going round keeps the ranges of dropped trackers known for
/// long.
static NEXT: AtomicUsize = AtomicUsize::new(0);

impl Slot {
    pub(super) fn covers(&self, addr: usize, state: u32) -> bool {
        self.state.load(Ordering::SeqCst) == state
            && self.base.load(Ordering::SeqCst) <= addr
            && addr < self.end.load(Ordering::SeqCst)
    }

    /// H0. The slot's content is stable, if LIVE, until the matching [`Slot::leave`].
    pub(super) fn enter(&self) -> usize {
        let side = self.side.load(Ordering::SeqCst) as usize & 1;
        self.inside[side].fetch_add(1, Ordering::SeqCst);
        side
    }

    /// H3.
    pub(super) fn leave(&self, side: usize) {
        self.inside[side].fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn wait_side(&self, side: usize) {
        let mut spins = 0u32;
        while self.inside[side].load(Ordering::SeqCst) != 0 {
            if spins < 200 {
                spins += 1;
                std::hint::spin_loop();
            } else {
                rustix::thread::sched_yield();
            }
        }
    }

    /// CQ: returns after every handler that was inside at the call has left. One caller at a time.
    ///
    /// A handler that read `side` before a flip may enter the old side after it; hence first the
    /// side that is not current, then, after a flip, the one that was.
    pub(super) fn wait_for_handlers(&self) {
        let idle = |side: usize| self.inside[side].load(Ordering::SeqCst) == 0;
        if idle(0) && idle(1) {
            return;
        }
        let current = self.side.load(Ordering::SeqCst);
        self.wait_side((current as usize & 1) ^ 1);
        self.side.store(current ^ 1, Ordering::SeqCst);
        self.wait_side(current as usize & 1);
    }

    /// A slot for `region`, LIVE.
    pub(super) fn claim(region: &Region) -> io::Result<&'static Slot> {
        let first = NEXT.fetch_add(1, Ordering::Relaxed);
        for i in 0..SLOTS {
            let index = (first + i) % SLOTS;
            let slot = &TABLE[index];
            let state = slot.state.load(Ordering::SeqCst);
            if (state == FREE || state == DEAD)
                && slot
                    .state
                    .compare_exchange(state, CLAIMED, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
            {
                slot.base.store(region.base, Ordering::SeqCst);
                slot.end.store(region.base + region.len, Ordering::SeqCst);
                slot.region
                    .store(std::ptr::from_ref(region).cast_mut(), Ordering::SeqCst);
                slot.state.store(LIVE, Ordering::SeqCst);
                USED.fetch_max(index + 1, Ordering::SeqCst);
                return Ok(slot);
            }
        }
        Err(Errno::NOSPC.into())
    }
}
