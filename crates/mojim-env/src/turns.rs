//! Whose turn it is, where threads wait for one another.
//!
//! Owns the two places at which a thread of the engine stops for another one: a
//! lock that is taken, and a futex. A simulator that runs real threads one at a
//! time, in an order drawn from a seed, puts itself there ([`follow`]); for
//! every other thread both are the system's.
//!
//! Invariants:
//! - A lock that is free costs what the standard library's does: nobody is asked.
//! - Who is asked holds no lock of this module's.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, LockResult, MutexGuard, TryLockError, TryLockResult};
use std::time::Duration;

/// Decides which of its threads runs.
pub trait Turns: Send + Sync {
    /// Which of them the calling thread is.
    fn number(&self) -> usize;

    /// The calling thread stops until `ready` says yes, or `timeout` is over; it
    /// may also return earlier. False after a timeout.
    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool;
}

/// Whether any thread of this process follows somebody. A signal handler that
/// waits touches no memory of its thread's that may not be there yet.
static USED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static TURNS: RefCell<Option<Arc<dyn Turns>>> = const { RefCell::new(None) };
}

/// From here on this thread stops only as `turns` says.
pub fn follow(turns: Arc<dyn Turns>) {
    TURNS.with(|t| *t.borrow_mut() = Some(turns));
    USED.store(true, Release);
}

/// Who says when this thread goes on, if somebody does.
pub fn current() -> Option<Arc<dyn Turns>> {
    if !USED.load(Acquire) {
        return None;
    }
    // A thread that ends has none any more.
    TURNS.try_with(|t| t.borrow().clone()).ok().flatten()
}

/// A mutex as the standard library's.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// One that guards `value`.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Waits until it is free, and takes it.
    #[inline]
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(e)) => Err(e),
            Err(TryLockError::WouldBlock) => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> LockResult<MutexGuard<'_, T>> {
        let Some(turns) = current() else {
            return self.0.lock();
        };
        loop {
            turns.sleep(&|| self.0.try_lock().is_ok(), Duration::from_micros(100));
            match self.0.try_lock() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(e)) => return Err(e),
                Err(TryLockError::WouldBlock) => {}
            }
        }
    }

    /// Takes it if it is free.
    #[inline]
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        self.0.try_lock()
    }
}
