//! The applier's lock, and who goes first.
//!
//! Owns the order of two kinds of threads that take one lock:
//!
//! - threads that keep the node going: those that apply and checkpoint, and links
//! - readers, of which there may be many that ask without a pause
//!
//! The system's mutex goes to the thread that is awake when it becomes free. That is a reader
//! that asks again at once.
//!
//! Invariants:
//!
//! - A reader that asks while another thread waits for the lock gets it after that one, unless
//!   [`MOST_PASSED`] others went before them both.
//! - At most one reader has the lock or has been let through to it. So a thread that goes first
//!   waits for one of them at most.
//! - A free lock costs a thread that goes first what a mutex does.

use std::ops::Deref;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::Duration;

use mojim_env::event::Event;
use mojim_env::turns::{self, Mutex, lock};

/// Turns of threads that had to wait, after which a reader is let through to the lock although
/// more of them wait: those that wait may be many, and never none.
const MOST_PASSED: u32 = 64;
/// Longest wait between two looks at the gate; its event comes earlier.
const LOOK: Duration = Duration::from_secs(1);

/// A lock for which readers stand back.
pub(super) struct Gate<T> {
    inner: Mutex<T>,
    /// How many of those that go first wait for `inner`.
    waiting: AtomicU32,
    /// How often one of them got it.
    turns: AtomicU32,
    /// Notified when one of them gets it.
    turned: Event,
    /// Of the reader that is next, also during its turn.
    reader: Mutex<()>,
}

/// A reader's turn.
pub(super) struct ReaderTurn<'a, T> {
    // Given back before the next reader is let through.
    value: MutexGuard<'a, T>,
    _reader: MutexGuard<'a, ()>,
}

impl<T> Deref for ReaderTurn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Gate<T> {
    pub(super) fn new(value: T) -> Gate<T> {
        Gate {
            inner: Mutex::new(value),
            waiting: AtomicU32::new(0),
            turns: AtomicU32::new(0),
            turned: Event::new(),
            reader: Mutex::new(()),
        }
    }

    /// Takes the lock, before all readers that have not been let through.
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        if let Some(value) = self.try_lock() {
            return value;
        }
        self.waiting.fetch_add(1, SeqCst);
        let value = lock(&self.inner);
        self.turns.fetch_add(1, SeqCst);
        self.waiting.fetch_sub(1, SeqCst);
        self.turned.notify();
        value
    }

    /// Takes the lock if it is free.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        turns::try_lock(&self.inner)
    }

    /// Takes the lock as a reader: behind every thread that waits for it in [`Gate::lock`].
    pub(super) fn lock_behind(&self) -> ReaderTurn<'_, T> {
        let reader = lock(&self.reader);
        let first = self.turns.load(SeqCst);
        let is_open = || {
            let passed = self.turns.load(SeqCst).wrapping_sub(first);
            self.waiting.load(SeqCst) == 0 || passed >= MOST_PASSED
        };
        while !is_open() {
            self.turned.wait_unless(is_open, LOOK);
        }
        ReaderTurn {
            value: lock(&self.inner),
            _reader: reader,
        }
    }

    /// Whether a thread waits that goes before readers.
    #[cfg(test)]
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    /// How often a thread that goes before readers had to wait, and got the lock.
    #[cfg(test)]
    pub(super) fn turns(&self) -> u32 {
        self.turns.load(SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_env::turns::{Turns, follow};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread::{scope, yield_now};

    /// Whoever waits as this says is asleep until it may wake, like a thread of the lowest priority.
    #[derive(Default)]
    struct Sleeper {
        is_asleep: AtomicBool,
        may_wake: AtomicBool,
    }

    impl Turns for Sleeper {
        fn number(&self) -> usize {
            0
        }

        fn sleep(&self, ready: &dyn Fn() -> bool, _: Duration) -> bool {
            self.is_asleep.store(true, SeqCst);
            while !self.may_wake.load(SeqCst) || !ready() {
                yield_now();
            }
            self.is_asleep.store(false, SeqCst);
            true
        }
    }

    /// Whoever waits as this says lets the other one wake.
    struct Waker(Arc<Sleeper>);

    impl Turns for Waker {
        fn number(&self) -> usize {
            1
        }

        fn sleep(&self, ready: &dyn Fn() -> bool, _: Duration) -> bool {
            self.0.may_wake.store(true, SeqCst);
            while !ready() {
                yield_now();
            }
            true
        }
    }

    /// A program that read a `--read` mount without a pause had the lock again before the applier
    /// was awake, again and again: its node applied nothing, and links that waited for the same
    /// lock were silent for seconds. Here the applier sleeps until the reader waits.
    #[test]
    fn a_reader_that_asks_again_waits_until_the_applier_is_awake() {
        let (gate, over) = (Gate::new(0u32), AtomicBool::new(false));
        let applier = Arc::new(Sleeper::default());
        let read = || {
            follow(Arc::new(Waker(applier.clone())));
            let mut left_at = None;
            while !over.load(SeqCst) {
                let turn = gate.lock_behind();
                if left_at == Some(*turn) {
                    break;
                }
                while !applier.is_asleep.load(SeqCst) && !over.load(SeqCst) {
                    yield_now();
                }
                applier.may_wake.store(false, SeqCst);
                left_at = Some(*turn);
            }
            applier.may_wake.store(true, SeqCst);
            over.load(SeqCst)
        };
        let apply = || {
            follow(applier.clone());
            (0..100).for_each(|_| *gate.lock() += 1);
            over.store(true, SeqCst);
        };
        let in_order = scope(|s| {
            let reader = s.spawn(read);
            s.spawn(apply);
            reader.join().unwrap()
        });
        assert!(in_order, "it had the lock before the applier");
    }

    /// Each of many readers ends its turn only when the applier waits, and asks again at once.
    #[test]
    fn readers_that_come_after_the_applier_go_after_it() {
        let gate = Gate::new(0u32);
        let over = AtomicBool::new(false);
        let read = || {
            let mut left_at = None;
            while !over.load(SeqCst) {
                let turn = gate.lock_behind();
                if left_at == Some(*turn) {
                    over.store(true, SeqCst);
                    return Err(*turn);
                }
                while !gate.is_wanted() && !over.load(SeqCst) {
                    yield_now();
                }
                left_at = Some(*turn);
            }
            Ok(())
        };
        let apply = || {
            for _ in 0..500 {
                *gate.lock() += 1;
                if over.load(SeqCst) {
                    break;
                }
            }
            over.store(true, SeqCst);
        };
        let read: Vec<_> = scope(|s| {
            let readers: Vec<_> = (0..15).map(|_| s.spawn(read)).collect();
            s.spawn(apply);
            readers.into_iter().map(|r| r.join().unwrap()).collect()
        });
        assert!(read.iter().all(Result::is_ok), "{read:?}");
    }

    /// Where threads wait that go first and there is always one more of them, a reader would wait
    /// for ever.
    #[test]
    fn a_reader_has_its_turn_although_there_is_always_one_who_waits() {
        let gate = Gate::new(());
        // One that waits all the time.
        gate.waiting.fetch_add(1, SeqCst);
        let over = AtomicBool::new(false);
        let is_over = || over.load(SeqCst);
        let first = || {
            // Turns since the reader came.
            let mut passed = 0;
            while passed < 2000 * MOST_PASSED && !is_over() {
                let turn = gate.lock();
                let at = gate.turns();
                passed += u32::from(gate.reader.try_lock().is_err());
                // Whoever has it gives it back only when the other one waits, and asks again when
                // that one has had it.
                while gate.waiting.load(SeqCst) < 2 && !is_over() {
                    yield_now();
                }
                drop(turn);
                while gate.turns() == at && !is_over() {
                    yield_now();
                }
            }
            over.swap(true, SeqCst)
        };
        let read = || {
            drop(gate.lock_behind());
            over.swap(true, SeqCst)
        };
        let was_late = scope(|s| {
            let firsts = [s.spawn(first), s.spawn(first)];
            let reader = s.spawn(read);
            for first in firsts {
                first.join().unwrap();
            }
            gate.waiting.fetch_sub(1, SeqCst);
            gate.turned.notify();
            reader.join().unwrap()
        });
        assert!(!was_late, "the others had ended");
    }
}
