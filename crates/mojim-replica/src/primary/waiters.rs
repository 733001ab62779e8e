//! Threads that sleep until their sync points are committed, or until one of them has to
//! work for the others.
//!
//! Owns the places in which they sleep. Each has a word of memory of its own, so that
//! those whose sync points are committed wake, and no others.
//!
//! Invariants:
//! - A sleeper whose sync point is committed before [`Waiters::wake`] is called wakes, or
//!   does not fall asleep: it takes its place before it looks a last time, and the waker
//!   moves the prefix before it looks at the places.
//! - While nobody sleeps, a waker reads one word.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::time::Duration;

use mojim_env::alone::Alone;
use mojim_env::event::Event;
use mojim_env::futex::{futex_wait, futex_wake};
use mojim_env::threads::thread_number;

/// Threads that sleep in a place of their own; any more of them share one.
const PLACES: usize = 64;
/// No thread sleeps in this place.
const FREE: u64 = u64::MAX;

/// Where one thread sleeps. Its neighbour is written by another one.
#[repr(align(64))]
struct WaitSlot {
    /// What it waits for, or [`FREE`].
    lsn: AtomicU64,
    /// The lane of its sync point.
    lane: AtomicUsize,
    /// Odd while it sleeps, or is about to.
    turn: AtomicU32,
}

impl WaitSlot {
    /// Wakes its thread, unless another one has.
    fn wake(&self) {
        let turn = self.turn.load(SeqCst);
        let woken = turn.wrapping_add(1);
        if turn & 1 == 1
            && self
                .turn
                .compare_exchange(turn, woken, SeqCst, SeqCst)
                .is_ok()
        {
            futex_wake(&self.turn, 1);
        }
    }

    fn is_asleep(&self) -> bool {
        self.turn.load(SeqCst) & 1 == 1
    }
}

/// All sleepers of a volume.
pub(super) struct Waiters {
    asleep: Alone<AtomicU32>,
    places: Box<[WaitSlot]>,
    crowd: Event,
}

impl Default for Waiters {
    fn default() -> Waiters {
        let place = |_| WaitSlot {
            lsn: AtomicU64::new(FREE),
            lane: AtomicUsize::new(0),
            turn: AtomicU32::new(0),
        };
        Waiters {
            asleep: Alone(AtomicU32::new(0)),
            places: (0..PLACES).map(place).collect(),
            crowd: Event::new(),
        }
    }
}

impl Waiters {
    /// Whether anybody sleeps.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.asleep.load(SeqCst) > 0
    }

    /// Sleeps until `lsn`, of `lane`, is committed, until this thread is chosen to work,
    /// or for `timeout`; not at all if `ready`. False after a timeout.
    pub(super) fn sleep(
        &self,
        lsn: u64,
        lane: usize,
        ready: impl Fn() -> bool,
        timeout: Duration,
    ) -> bool {
        let Some(place) = self.take(lsn) else {
            self.asleep.fetch_add(1, SeqCst);
            self.crowd.wait_unless(&ready, timeout);
            self.asleep.fetch_sub(1, SeqCst);
            return ready();
        };
        place.lane.store(lane, SeqCst);
        let mine = place.turn.load(SeqCst) | 1;
        place.turn.store(mine, SeqCst);
        self.asleep.fetch_add(1, SeqCst);
        let woken = ready() || futex_wait(&place.turn, mine, timeout);
        self.asleep.fetch_sub(1, SeqCst);
        if place.is_asleep() {
            // Nobody woke it. Fails if somebody does so just now.
            let _ = place
                .turn
                .compare_exchange(mine, mine.wrapping_add(1), SeqCst, SeqCst);
        }
        place.lsn.store(FREE, SeqCst);
        woken
    }

    /// A place for a thread that waits for `lsn`, if one is free.
    fn take(&self, lsn: u64) -> Option<&WaitSlot> {
        let own = thread_number();
        (0..PLACES)
            .map(|i| &self.places[(own + i) % PLACES])
            .find(|p| {
                p.lsn.load(Relaxed) == FREE
                    && p.lsn.compare_exchange(FREE, lsn, SeqCst, Relaxed).is_ok()
            })
    }

    /// How often a thread has fallen asleep in a place of its own.
    #[cfg(test)]
    pub(super) fn naps(&self) -> u32 {
        let naps = |p: &WaitSlot| p.turn.load(SeqCst).div_ceil(2);
        self.places.iter().map(naps).sum()
    }

    /// Wakes every thread whose sync point is among those up to `committed`.
    #[inline]
    pub(super) fn wake(&self, committed: impl Fn() -> u64) {
        if self.any() {
            self.wake_up_to(committed());
        }
    }

    #[cold]
    fn wake_up_to(&self, committed: u64) {
        for place in &self.places {
            if place.lsn.load(SeqCst) <= committed {
                place.wake();
            }
        }
        self.crowd.notify();
    }

    /// Wakes every thread: what they wait for is decided otherwise.
    pub(super) fn wake_all(&self) {
        self.wake(|| FREE - 1);
    }

    /// Wakes the thread that waits for the lowest sync point of `lane` above `committed`; if
    /// there is none, the lowest of any lane, which may hang on that one.
    #[cold]
    pub(super) fn wake_first(&self, lane: usize, committed: u64) {
        let waits = |p: &&WaitSlot| p.is_asleep() && p.lsn.load(SeqCst) > committed;
        let order = |p: &&WaitSlot| (p.lane.load(SeqCst) != lane, p.lsn.load(SeqCst));
        match self.places.iter().filter(waits).min_by_key(order) {
            Some(place) => place.wake(),
            None => self.crowd.notify(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    const LONG: Duration = Duration::from_secs(60);

    /// Waits, asleep or awake, until `committed` has reached `lsn`; false if a wake-up
    /// was lost.
    fn wait(w: &Waiters, lsn: u64, committed: &AtomicU64) -> bool {
        let ready = || committed.load(SeqCst) >= lsn;
        while !ready() {
            if !w.sleep(lsn, 0, ready, LONG) {
                return false;
            }
        }
        true
    }

    #[test]
    fn no_wake_up_is_lost() {
        let (rounds, threads) = if cfg!(miri) { (20, 3) } else { (3_000, 6) };
        let (w, committed) = (Waiters::default(), AtomicU64::new(0));
        let barrier = Barrier::new(threads as usize + 1);
        std::thread::scope(|s| {
            for t in 1..=threads {
                let (w, committed, barrier) = (&w, &committed, &barrier);
                s.spawn(move || {
                    for round in 0..rounds {
                        barrier.wait();
                        assert!(wait(w, round * threads + t, committed));
                    }
                });
            }
            for round in 0..rounds {
                barrier.wait();
                for t in 1..=threads {
                    committed.store(round * threads + t, SeqCst);
                    w.wake(|| committed.load(SeqCst));
                }
            }
        });
        assert!(!w.any());
    }

    /// More sleepers than places: those beyond share one, and wake as well.
    #[test]
    fn more_threads_than_places_wake_too() {
        let (w, committed) = (Waiters::default(), AtomicU64::new(0));
        let most = PLACES as u64 + 8;
        std::thread::scope(|s| {
            for lsn in 1..=most {
                let (w, committed) = (&w, &committed);
                s.spawn(move || assert!(wait(w, lsn, committed)));
            }
            while u64::from(w.asleep.load(SeqCst)) < most {
                std::thread::yield_now();
            }
            committed.store(most, SeqCst);
            w.wake(|| committed.load(SeqCst));
        });
    }

    /// One thread is chosen to work: the one that has waited longest on the lane, and no
    /// other.
    #[test]
    fn who_came_first_is_chosen() {
        let w = Waiters::default();
        let (chosen, over) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            for (lsn, lane) in [(5, 0), (3, 1), (7, 0), (4, 0)] {
                let (w, chosen, over) = (&w, &chosen, &over);
                s.spawn(move || {
                    w.sleep(lsn, lane, || false, LONG);
                    if over.load(SeqCst) == 0 {
                        chosen.store(lsn, SeqCst);
                    }
                });
            }
            while w.places.iter().filter(|p| p.is_asleep()).count() < 4 {
                std::thread::yield_now();
            }
            // The thread of 3 is of another lane, and that of 4 is about to wake by itself.
            w.wake_first(0, 4);
            while chosen.load(SeqCst) == 0 {
                std::thread::yield_now();
            }
            over.store(1, SeqCst);
            w.wake_all();
        });
        assert_eq!(chosen.load(SeqCst), 5);
    }
}
