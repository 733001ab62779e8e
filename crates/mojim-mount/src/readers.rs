//! Threads that wait for the disk, or until a data file is open, in place of those that serve: of
//! these one alone serves a processor (`rings`), or there are few.
//!
//! Owns the calls that wait for such a thread, and the threads. The first is there from the start.
//! The others come with the calls that need them, and stay.
//!
//! Invariants:
//! - A thread that takes a call has another thread wait for the next one. It does not if there are
//!   as many as may be, or the system has none. So a call waits for others only behind as many of
//!   them as there are threads.
//! - Of the threads that serve `/dev/fuse`, [`SERVING`] at most wait for the disk themselves.
//! - Each call is made. When the mount has ended, whoever brings one makes it.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, available_parallelism};

use crate::THREADS;
use mojim_env::locks::lock;

/// Threads on a machine with fewer processors: what a disk does at a time.
const MOST: usize = 16;
/// Threads that serve and wait for the disk at the same time.
const SERVING: usize = THREADS - 2;

type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    calls: VecDeque<Call>,
    /// Threads that have no call. For some of them one may be there already.
    idle: usize,
    /// Threads, with those that are about to be made.
    count: usize,
    threads: Vec<JoinHandle<()>>,
    ends: bool,
}

pub(crate) struct Readers {
    state: Mutex<State>,
    some: Condvar,
    most: usize,
    /// Threads that serve and wait for the disk.
    serving: AtomicUsize,
}

impl Readers {
    pub(crate) fn new() -> Arc<Readers> {
        let processors = available_parallelism().map_or(1, |n| n.get());
        Arc::new(Readers {
            state: Mutex::default(),
            some: Condvar::new(),
            most: processors.max(MOST),
            serving: AtomicUsize::new(0),
        })
    }

    /// Makes a call, which may wait for the disk, in a thread that serves; `None` if enough of them wait.
    pub(crate) fn one_that_serves<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let done = (self.serving.fetch_add(1, Relaxed) < SERVING).then(call);
        self.serving.fetch_sub(1, Relaxed);
        done
    }

    /// Makes the first thread.
    pub(crate) fn begin(self: &Arc<Self>) -> io::Result<()> {
        lock(&self.state).count += 1;
        self.start()
    }

    /// Has a call made, which may wait.
    pub(crate) fn add(&self, call: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        if state.ends {
            drop(state);
            return call();
        }
        state.calls.push_back(Box::new(call));
        drop(state);
        self.some.notify_one();
    }

    /// Waits until all that was brought is made, and the threads have ended.
    pub(crate) fn end(&self) {
        lock(&self.state).ends = true;
        self.some.notify_all();
        let next = || lock(&self.state).threads.pop();
        // One that makes another has noted it before it ends.
        while let Some(thread) = next() {
            let _ = thread.join();
        }
    }

    /// Makes a thread that is counted already. It may run wherever this one may.
    fn start(self: &Arc<Self>) -> io::Result<()> {
        let me = self.clone();
        let thread = std::thread::Builder::new().name("mojim-reads".into());
        let started = thread.spawn(move || me.work());
        let mut state = lock(&self.state);
        match started {
            Ok(thread) => state.threads.push(thread),
            Err(e) => {
                state.count -= 1;
                return Err(e);
            }
        }
        Ok(())
    }

    fn work(self: Arc<Self>) {
        let mut state = lock(&self.state);
        loop {
            let Some(call) = state.calls.pop_front() else {
                if state.ends {
                    return;
                }
                state.idle += 1;
                let woken = self.some.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            let lacks = state.idle <= state.calls.len();
            let more = lacks && state.count < self.most && !state.ends;
            state.count += usize::from(more);
            drop(state);
            if more {
                // Without it calls wait longer.
                let _ = self.start();
            }
            // A panic is reported; its call has been answered with EIO.
            let _ = catch_unwind(AssertUnwindSafe(call));
            state = lock(&self.state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Brings a call that says that it has begun, and ends when the sender is dropped that is returned.
    fn waits(readers: &Readers, begun: &Sender<usize>, number: usize) -> Sender<()> {
        let (begun, (gate, opens)) = (begun.clone(), channel::<()>());
        readers.add(move || {
            begun.send(number).unwrap();
            let _ = opens.recv();
        });
        gate
    }

    fn numbers(told: &Receiver<usize>, count: usize) -> Vec<usize> {
        let mut all: Vec<_> = told.iter().take(count).collect();
        all.sort_unstable();
        all
    }

    /// One thread made all calls that waited: one that a disk kept had all others of the mount stand still.
    #[test]
    fn calls_that_wait_keep_others_waiting_only_behind_as_many_as_there_are_threads() {
        let readers = Readers::new();
        readers.begin().unwrap();
        let most = readers.most;
        let (begun, told) = channel();
        let mut gates: Vec<_> = (0..most).map(|n| waits(&readers, &begun, n)).collect();
        assert_eq!(numbers(&told, most), Vec::from_iter(0..most));
        // All threads wait. The next ones wait for them, and no thread more is made.
        let behind: Vec<_> = (most..most + 3)
            .map(|n| waits(&readers, &begun, n))
            .collect();
        let state = lock(&readers.state);
        assert_eq!((state.calls.len(), state.idle, state.count), (3, 0, most));
        drop(state);
        drop(gates.pop());
        assert_eq!(numbers(&told, 1), [most]);
        drop((gates, behind));
        readers.end();
        drop(begun);
        assert_eq!(numbers(&told, usize::MAX), [most + 1, most + 2]);
    }

    #[test]
    fn some_threads_that_serve_wait_for_nothing() {
        fn deep(readers: &Readers) -> usize {
            readers.one_that_serves(|| 1 + deep(readers)).unwrap_or(0)
        }
        let readers = Readers::new();
        assert_eq!((deep(&readers), deep(&readers)), (SERVING, SERVING));
    }

    /// A thread that a call ended made no others, and the last one would have been the end of all reads.
    #[test]
    fn a_panic_ends_no_thread_and_what_comes_late_is_made_at_once() {
        let readers = Readers::new();
        readers.begin().unwrap();
        let (begun, told) = channel();
        for _ in 0..readers.most {
            readers.add(|| panic!("as the test asks"));
        }
        drop(waits(&readers, &begun, 1));
        assert_eq!(numbers(&told, 1), [1]);
        readers.end();
        let made = Arc::new(Mutex::new(false));
        let late = made.clone();
        readers.add(move || *lock(&late) = true);
        assert!(*lock(&made));
    }
}
