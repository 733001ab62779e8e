//! Users of a thing that another thread takes away: a table of windows, the memory of
//! a region.
//!
//! Owns the count of users, in stripes, so that threads that use the thing at the
//! same time write to no common cache line.
//!
//! Invariants:
//! - A user looks at the thing after it has entered. The thread that takes the thing
//!   away first makes that known, then waits: after that every user has left that did
//!   not find it gone.
//! - A thread waits for the users that are in, not for those that enter meanwhile:
//!   these count on the other side (as in sleepable RCU: McKenney, 2006). The side
//!   changes twice, since a user that was about to enter may do so on either side.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_env::threads::thread_number;

const STRIPES: usize = 16;

#[repr(align(64))]
struct Stripe([AtomicUsize; 2]);

/// The count.
pub struct Quiescence {
    stripes: [Stripe; STRIPES],
    /// On which side a user that enters counts: the lowest bit.
    side: AtomicUsize,
    waits: Mutex<()>,
}

/// A user, until this is dropped.
pub struct User<'a>(&'a AtomicUsize);

impl Quiescence {
    /// No users.
    pub const fn new() -> Quiescence {
        Quiescence {
            stripes: [const { Stripe([const { AtomicUsize::new(0) }; 2]) }; STRIPES],
            side: AtomicUsize::new(0),
            waits: Mutex::new(()),
        }
    }

    /// Adds a user, before it looks at the thing.
    #[inline]
    pub fn enter(&self) -> User<'_> {
        let sides = &self.stripes[thread_number() % STRIPES].0;
        let side = &sides[self.side.load(Relaxed) % 2];
        side.fetch_add(1, SeqCst);
        User(side)
    }

    /// Waits until every user that is in now has left. A user must not call this.
    pub fn wait(&self) {
        let _waits = lock(&self.waits);
        for _ in 0..2 {
            let side = self.side.fetch_add(1, SeqCst) % 2;
            for stripe in &self.stripes {
                let mut turns = 0;
                while stripe.0[side].load(SeqCst) != 0 {
                    turns += 1;
                    match turns < 100 {
                        true => std::thread::yield_now(),
                        // A user may be waiting for room in the log.
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

    /// Once, a thread waited until no user was in: for ever, with two threads whose
    /// uses overlapped in turn.
    #[test]
    fn who_enters_later_is_not_waited_for() {
        let users = Quiescence::new();
        std::thread::scope(|s| {
            let mut user = users.enter();
            let waits = s.spawn(|| users.wait());
            // By time: its thread may stand still for many turns of this one.
            let begun = std::time::Instant::now();
            while !waits.is_finished() {
                assert!(begun.elapsed().as_secs() < 60, "it still waits");
                let next = users.enter();
                drop(std::mem::replace(&mut user, next));
                std::thread::yield_now();
            }
        });
    }

    /// No user reads what is taken away: `wait` returns after those that were in have
    /// left.
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
