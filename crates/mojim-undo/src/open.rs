//! Which threads have a transaction open, so that a sync of a whole heap commits half of none.
//!
//! Owns the marks of all threads. A transaction's begin stores its mark and then looks whether
//! the mark is held. A thread that wants to be alone does three things, in this order:
//!
//! - It holds all marks.
//! - It has every processor pass a barrier (membarrier(2)).
//! - It looks at the marks.
//!
//! So one of both sees the other, and a begin costs a store and a load, without a fence.
//!
//! Invariant: while an [`Alone`] lives, no transaction of another thread is open or begins.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*, compiler_fence, fence};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// A thread's mark.
#[repr(C)]
pub struct Mark {
    open: AtomicU32,
    /// 0: transactions may begin. 1: they wait. 2: they look with a fence, since the system
    /// has no membarrier. 3: both.
    held: AtomicU32,
    /// Whose it is: [`me`].
    owner: AtomicUsize,
}

/// A number of the calling thread's, which no other living thread has.
pub fn me() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here) as usize)
}

const HELD: u32 = 1;
const FENCED: u32 = 2;

impl Mark {
    /// Nothing is open.
    pub const fn new() -> Mark {
        Mark {
            open: AtomicU32::new(0),
            held: AtomicU32::new(0),
            owner: AtomicUsize::new(0),
        }
    }

    /// A transaction is open from here on, if [`Mark::is_held`] says so afterwards.
    #[inline(always)]
    pub fn raise(&self) {
        self.open.store(1, Relaxed);
        compiler_fence(SeqCst);
    }

    /// Whether the begin must wait, or look again behind a fence ([`Mark::wait`]). Acquires: what
    /// the last thread that was alone has read comes before what the transaction stores.
    #[inline(always)]
    pub fn is_held(&self) -> bool {
        self.held.load(Acquire) != 0
    }

    /// The transaction has ended: what it stored is committed or taken back.
    #[inline(always)]
    pub fn lower(&self) {
        self.open.store(0, Release);
    }

    /// It is the calling thread's from here on.
    pub fn own(&self) {
        self.owner.store(me(), Relaxed);
    }

    /// Where its fields lie, and its size.
    #[cfg(test)]
    pub(crate) fn layout() -> [usize; 4] {
        use std::mem::offset_of;
        [
            offset_of!(Mark, open),
            offset_of!(Mark, held),
            offset_of!(Mark, owner),
            size_of::<Mark>(),
        ]
    }

    /// Whether it is up.
    pub fn is_up(&self) -> bool {
        self.open.load(Acquire) != 0
    }

    /// Waits until the mark can be up while nobody is alone.
    pub fn wait(&self) {
        loop {
            fence(SeqCst);
            if self.held.load(SeqCst) & HELD == 0 {
                return;
            }
            self.lower();
            WAITING.fetch_add(1, SeqCst);
            pause(|| self.held.load(SeqCst) & HELD == 0);
            self.raise();
            WAITING.fetch_sub(1, SeqCst);
        }
    }
}

impl Default for Mark {
    fn default() -> Mark {
        Mark::new()
    }
}

/// The marks of all threads that ever had a transaction; those of ended threads are used
/// again.
static ALL: Mutex<Vec<&'static Mark>> = Mutex::new(Vec::new());
/// Transactions that wait to begin: the next who wants to be alone lets them.
static WAITING: AtomicU32 = AtomicU32::new(0);
/// Whether the process has registered for membarrier.
static BARRIER: AtomicBool = AtomicBool::new(false);

/// Adds a thread's mark, before its first transaction. Waits while a thread is alone.
pub fn register(mark: &'static Mark) {
    let mut all = ALL.lock().unwrap_or_else(|e| e.into_inner());
    if all.is_empty() {
        BARRIER.store(barrier::register(), Relaxed);
    }
    if !BARRIER.load(Relaxed) {
        mark.held.store(FENCED, SeqCst);
    }
    all.push(mark);
}

/// No transaction is open in another thread until this is dropped. Those that begin wait.
pub struct Alone(MutexGuard<'static, Vec<&'static Mark>>);

/// Waits until no other thread has a transaction open, and keeps them from beginning one. `None`
/// if the caller has one open itself; it begins none meanwhile.
///
/// Passes a barrier on every processor: what another thread stored before it could see what the caller
/// stored before this call is visible when this returns.
pub fn alone() -> Option<Alone> {
    let all = ALL.lock().unwrap_or_else(|e| e.into_inner());
    if all
        .iter()
        .any(|m| m.is_up() && m.owner.load(Relaxed) == me())
    {
        return None;
    }
    pause(|| WAITING.load(SeqCst) == 0);
    hold(all, |_| true)
}

/// [`alone`] for a caller that may have a transaction open itself, which counts for nothing. `None` if
/// another thread's is open for longer than `patience`.
pub fn alone_within(patience: Duration) -> Option<Alone> {
    let end = Instant::now() + patience;
    let mut all = None;
    // Who has the lock may wait for the caller's own transaction.
    pause(|| {
        all = match ALL.try_lock() {
            Ok(all) => Some(all),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        all.is_some() || Instant::now() >= end
    });
    hold(all?, |mark| {
        mark.owner.load(Relaxed) != me() && Instant::now() < end
    })
}

/// Holds the transactions that begin, and waits for those that are open while `waits`. `None` if one
/// that is not the caller's is open then.
fn hold(
    all: MutexGuard<'static, Vec<&'static Mark>>,
    waits: impl Fn(&Mark) -> bool,
) -> Option<Alone> {
    for mark in &*all {
        mark.held.fetch_or(HELD, SeqCst);
    }
    // From here on they are let go, whatever happens.
    let alone = Alone(all);
    if !BARRIER.load(Relaxed) {
        BARRIER.store(barrier::register(), Relaxed);
    }
    if !(BARRIER.load(Relaxed) && barrier::pass()) {
        BARRIER.store(false, Relaxed);
        // Begins of transactions have a fence from here on. Those that had none, and other stores, are
        // in memory after a pause: by far longer than any store waits.
        for mark in &*alone.0 {
            mark.held.fetch_or(FENCED, SeqCst);
        }
        fence(SeqCst);
        std::thread::sleep(Duration::from_millis(1));
    }
    // A mark that was down once stands for no transaction: it may be up for a moment, until its thread
    // sees that it is held.
    let ends = |mark: &&Mark| {
        let mut up = true;
        pause(|| {
            up = mark.is_up();
            !up || !waits(mark)
        });
        !up || mark.owner.load(Relaxed) == me()
    };
    alone.0.iter().all(ends).then_some(alone)
}

impl Drop for Alone {
    fn drop(&mut self) {
        for mark in &*self.0 {
            mark.held.fetch_and(!HELD, SeqCst);
        }
    }
}

/// Waits until `done`: for moments without, then with sleep.
fn pause(mut done: impl FnMut() -> bool) {
    let mut turns = 0;
    while !done() {
        turns += 1;
        match turns < 100 {
            true => std::thread::yield_now(),
            // A commit may wait for the mirror.
            false => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// membarrier(2), by its number: the standard library does not have it.
#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
mod barrier {
    const MEMBARRIER: usize = 324;
    const PRIVATE: usize = 1 << 3;
    const REGISTER_PRIVATE: usize = 1 << 4;

    fn call(command: usize) -> isize {
        let done: isize;
        // SAFETY: membarrier touches no memory of the program.
        unsafe {
            std::arch::asm!("syscall", inlateout("rax") MEMBARRIER as isize => done,
                in("rdi") command, in("rsi") 0, in("rdx") 0,
                lateout("rcx") _, lateout("r11") _, options(nostack));
        }
        done
    }

    pub(super) fn register() -> bool {
        call(REGISTER_PRIVATE) == 0
    }

    pub(super) fn pass() -> bool {
        // The kernel may have no memory for it at the moment. Where a filter of system calls has come
        // since, it is another error, and each process has to do without: a fence and a pause.
        const ENOMEM: isize = -12;
        let mut done = 0;
        super::pause(|| {
            done = call(PRIVATE);
            done != ENOMEM
        });
        done == 0
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
mod barrier {
    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn pass() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// The tests use the marks of one another.
    static ONE_TEST: Mutex<()> = Mutex::new(());

    /// A thread that begins a transaction has its mark up for a moment before it sees that it must wait.
    /// This was taken for an open transaction: a sync of the heap failed, "a transaction is open in this
    /// thread".
    #[test]
    fn who_must_wait_has_nothing_open() {
        let _one = ONE_TEST.lock();
        let marks: [&'static Mark; 2] = [0, 1].map(|_| &*Box::leak(Box::new(Mark::new())));
        for (i, mark) in marks.iter().enumerate() {
            mark.owner.store(i + 1, Relaxed);
            register(mark);
        }
        marks[1].raise();
        let alone = std::thread::spawn(|| alone().is_some());
        while !marks[0].is_held() {
            std::thread::yield_now();
        }
        // Time to see that the first one is down.
        std::thread::sleep(Duration::from_millis(5));
        marks[0].raise();
        marks[1].lower();
        // As if it were interrupted here: time to see that the second one is down.
        std::thread::sleep(Duration::from_millis(5));
        marks[0].lower();
        assert!(alone.join().unwrap());
    }

    /// Who is alone sees no transaction half-done: both halves of what threads change are the
    /// same then.
    #[test]
    fn who_is_alone_sees_no_half() {
        let _one = ONE_TEST.lock();
        static HALVES: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
        static STOP: AtomicBool = AtomicBool::new(false);
        static LOCK: Mutex<()> = Mutex::new(());
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    let mark: &'static Mark = Box::leak(Box::new(Mark::new()));
                    mark.own();
                    register(mark);
                    while !STOP.load(Relaxed) {
                        mark.raise();
                        if mark.is_held() {
                            mark.wait();
                        }
                        {
                            let _one = LOCK.lock().unwrap();
                            HALVES[0].fetch_add(1, Relaxed);
                            HALVES[1].fetch_add(1, Relaxed);
                        }
                        mark.lower();
                    }
                });
            }
            let rounds = if cfg!(miri) { 20 } else { 500 };
            for _ in 0..rounds {
                let alone = alone().unwrap();
                let (a, b) = (HALVES[0].load(Relaxed), HALVES[1].load(Relaxed));
                if a != b {
                    STOP.store(true, Relaxed);
                }
                assert_eq!(a, b);
                drop(alone);
                std::thread::yield_now();
            }
            STOP.store(true, Relaxed);
        });
    }
}
