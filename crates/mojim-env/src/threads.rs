//! Signals, cancellation, priority and number of a thread of the library, or of a
//! program's thread inside it.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::mpsc::sync_channel;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::turns;

/// Lets every other thread run before the calling one: for background work, which must not take
/// the processor from a link's thread (a sync point beside a checkpoint took 19 µs instead of 8 on two
/// processors), and which holds no lock for which a caller waits.
pub fn yield_to_others() {
    // If this fails, the priority stays as it was.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
}

/// From here on the calling thread takes the processor from no other one when it wakes up: for
/// background work that holds locks for which a caller waits.
///
/// Its share of the processor stays that of any thread. With the lowest priority ([`yield_to_others`]) a
/// thread that held such a lock could wait for a second for the processor where others were busy: of 750
/// rollbacks beside four busy threads on two processors the longest took 0.2 to 1.4 s, and so 4 to 25
/// ms. A thread without privileges cannot raise its priority while it holds a lock.
pub fn yield_at_wakeups() {
    let plain = libc::sched_param { sched_priority: 0 };
    // SAFETY: changes how the calling thread (0) is scheduled. If it fails, that stays as it was.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const plain) };
}

/// Lets another thread run that is ready to, on this processor.
#[inline]
pub fn give_way() {
    match turns::current() {
        Some(turns) => drop(turns.sleep(&|| false, Duration::from_nanos(1))),
        None => rustix::thread::sched_yield(),
    }
}

/// Blocks all signals on the calling thread, which is the library's, so that it runs no
/// signal handler of the program.
pub fn block_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: a local set, filled before it is read. The only possible failure, a wrong
    // `how`, cannot occur.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Starts a thread of the library, and waits until it runs. What a thread takes at its start it has
/// then: where there is no memory for that, the C library ends the process, which is the program's.
pub fn start(name: &str, f: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let (runs, begun) = sync_channel(1);
    let thread = Builder::new().name(name.into()).spawn(move || {
        // Fails if nobody waits.
        let _ = runs.send(());
        f();
    })?;
    // Fails if the thread is at its end already.
    let _ = begun.recv();
    Ok(thread)
}

unsafe extern "C-unwind" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// A thread's cancellation state before [`cancel_waits`].
#[must_use]
pub struct Cancel(libc::c_int);

/// From here on `pthread_cancel` does not end the calling thread: it would unwind the
/// thread from any call of the C library, with locks held and through frames that
/// cannot be unwound. Costs a store to a thread-local variable.
#[inline]
pub fn cancel_waits() -> Cancel {
    const DISABLE: libc::c_int = 1;
    let mut before = 0;
    // SAFETY: a valid state, and room for the previous one.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    Cancel(before)
}

/// Restores the state before [`cancel_waits`]. A thread that can be cancelled at any
/// moment, and was cancelled meanwhile, ends in this call: the caller must have nothing
/// left to drop.
#[inline]
pub fn cancel_again(before: Cancel) {
    // SAFETY: a state that this thread had.
    unsafe { pthread_setcancelstate(before.0, std::ptr::null_mut()) };
}

/// While it lives, the calling thread runs no signal handler; signals wait.
pub struct SignalsWait {
    before: libc::sigset_t,
    /// Not `Send`: the mask is the thread's own.
    _here: PhantomData<*const ()>,
}

impl SignalsWait {
    /// Blocks all signals from now on.
    pub fn begin() -> SignalsWait {
        SignalsWait::but(&[])
    }

    /// Blocks all signals but those of the thread's own faults: for work whose faults a
    /// handler answers (on memory that a peer cut off).
    pub fn begin_but_faults() -> SignalsWait {
        SignalsWait::but(&[libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE])
    }

    fn but(these: &[libc::c_int]) -> SignalsWait {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: local sets, one filled before it is read, the other by the call. The
        // only possible failures, a wrong `how` or number, cannot occur.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for signal in these {
                libc::sigdelset(all.as_mut_ptr(), *signal);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        SignalsWait {
            before,
            _here: PhantomData,
        }
    }
}

impl Drop for SignalsWait {
    fn drop(&mut self) {
        // SAFETY: the set that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// A small number for the calling thread, for spreading threads over lanes.
#[inline]
pub fn thread_number() -> usize {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) });
    NUMBER.with(|n| {
        if n.get() == usize::MAX {
            let turns = turns::current();
            n.set(turns.map_or_else(|| NEXT.fetch_add(1, Relaxed), |t| t.number()));
        }
        n.get()
    })
}
