//! Who is using a thing that somebody else takes away: a table of windows, the
//! memory of a region.
//!
//! Owns a count of those, in stripes, so that threads that use it at once write
//! to no common cache line.
//!
//! Invariants:
//! - A user looks at the thing after it has entered. Who takes the thing away makes
//!   that known first, then waits: then everybody has left who did not find it gone.
//! - Who waits does so for those who are in, not for who enters meanwhile: these count
//!   on the other side (as in sleepable RCU: McKenney, 2006), which changes twice,
//!   since who was about to enter may do so on either.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::Duration;

use mojim_env::threads::thread_number;

const STRIPES: usize = 16;

#[repr(align(64))]
struct Stripe([AtomicUsize; 2]);

/// The count.
pub struct Quiescence {
    stripes: [Stripe; STRIPES],
    /// Where who enters counts: its lowest bit.
    side: AtomicUsize,
    waits: Mutex<()>,
}

/// A user; until it is dropped.
pub struct User<'a>(&'a AtomicUsize);

impl Quiescence {
    /// Nobody.
    pub const fn new() -> Quiescence {
        Quiescence {
            stripes: [const { Stripe([const { AtomicUsize::new(0) }; 2]) }; STRIPES],
            side: AtomicUsize::new(0),
            waits: Mutex::new(()),
        }
    }

    /// One more, before it looks at the thing.
    #[inline]
    pub fn enter(&self) -> User<'_> {
        let sides = &self.stripes[thread_number() % STRIPES].0;
        let side = &sides[self.side.load(Relaxed) % 2];
        side.fetch_add(1, SeqCst);
        User(side)
    }

    /// Waits until everybody who is in now has left. Not called by one who is.
    pub fn wait(&self) {
        let _waits = self.waits.lock().unwrap_or_else(|e| e.into_inner());
        for _ in 0..2 {
            let side = self.side.fetch_add(1, SeqCst) % 2;
            for stripe in &self.stripes {
                let mut turns = 0;
                while stripe.0[side].load(SeqCst) != 0 {
                    turns += 1;
                    match turns < 100 {
                        true => std::thread::yield_now(),
                        // One may be waiting for room in the log.
                        false => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            }
        }
    }
}

impl Default for Quiescence {
    fn default() -> Quiescence {
        Quiescence::new()
    }
}

impl Drop for User<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once, who waited did so until nobody was in: with two threads that took
    /// turns in overlapping, for ever.
    #[test]
    fn who_enters_later_is_not_waited_for() {
        let users = Quiescence::new();
        std::thread::scope(|s| {
            let mut user = users.enter();
            let waits = s.spawn(|| users.wait());
            let mut turns = 0u64;
            while !waits.is_finished() {
                turns += 1;
                assert!(turns < 20_000_000, "it still waits");
                let next = users.enter();
                drop(std::mem::replace(&mut user, next));
                std::thread::yield_now();
            }
        });
    }

    /// Nobody reads what is taken away: who is in has entered before.
    #[test]
    fn who_waits_sees_everybody_leave() {
        let users = Quiescence::new();
        let there = std::sync::atomic::AtomicBool::new(true);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let inside = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while !stop.load(SeqCst) {
                        let _user = users.enter();
                        if there.load(SeqCst) {
                            inside.fetch_add(1, SeqCst);
                            std::thread::yield_now();
                            inside.fetch_sub(1, SeqCst);
                        }
                    }
                });
            }
            for _ in 0..1000 {
                there.store(false, SeqCst);
                users.wait();
                let left = inside.load(SeqCst);
                if left != 0 {
                    stop.store(true, SeqCst);
                }
                assert_eq!(left, 0);
                there.store(true, SeqCst);
                std::thread::yield_now();
            }
            stop.store(true, SeqCst);
        });
    }
}
