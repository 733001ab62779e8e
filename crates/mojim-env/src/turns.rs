//! Which thread runs next, where threads wait for one another.
//!
//! Owns the two places at which a thread of the engine waits for another one: a lock that is taken,
//! and a futex. A simulator that runs real threads one at a time, in an order drawn from a seed,
//! controls both ([`follow`]). For every other thread they are the system's.
//!
//! Invariants:
//! - Taking a free lock costs what the standard library's does: no [`Turns`] is
//!   asked.
//! - A [`Turns`] holds no lock of this module's itself.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, LockResult, MutexGuard, TryLockError, TryLockResult};
use std::time::Duration;

/// Decides which of its threads runs.
pub trait Turns: Send + Sync {
    /// The calling thread's number among them.
    fn number(&self) -> usize;

    /// Stops the calling thread until `ready` returns true, or `timeout` is over;
    /// it may also return earlier. False after a timeout.
    fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) -> bool;
}

/// Whether any thread of this process follows a [`Turns`]. While none does, a
/// signal handler that waits touches no thread-local memory, which may not be
/// allocated yet.
static USED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static TURNS: RefCell<Option<Arc<dyn Turns>>> = const { RefCell::new(None) };
}

/// From here on this thread stops only as `turns` says.
pub fn follow(turns: Arc<dyn Turns>) {
    TURNS.with(|t| *t.borrow_mut() = Some(turns));
    USED.store(true, Release);
}

/// The [`Turns`] that this thread follows, if any.
pub fn current() -> Option<Arc<dyn Turns>> {
    if !USED.load(Acquire) {
        return None;
    }
    // A thread that ends may have dropped its own already.
    TURNS.try_with(|t| t.borrow().clone()).ok().flatten()
}

/// A mutex like the standard library's.
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

/// Waits until the mutex is free, and takes it. As [`locks::lock`](crate::locks::lock), it takes the data as
/// it is where a holder has panicked.
#[inline]
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Takes the mutex if it is free.
#[inline]
pub fn try_lock<T>(m: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match m.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
