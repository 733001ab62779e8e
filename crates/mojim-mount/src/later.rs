//! Calls that are answered later: none of the threads that serve the kernel waits for the mirror, for room,
//! or for whoever applies records, longer than a moment.
//!
//! The mirror may be away for seconds or minutes. There are few threads that serve, so as many calls that
//! wait would keep all others from being served, also those that only read.
//!
//! Owns the calls that wait, and three threads. One waits for sync points that were begun. One makes
//! calls anew that found no room. One makes calls that only read, of files that are to be opened first.
//!
//! Invariants:
//! - A sync point that is committed at once is waited for by the thread that serves it: no other
//!   thread has to be woken. At most [`WAITING`] threads wait so, for [`SOON`] each.
//! - A call that is made anew had changed nothing.
//! - A call fails for want of progress only if nothing has moved for as long as it has waited here, and
//!   for at least as long as a caller of the volume waits; and after twice that time at the latest.
//! - What waits here is bounded: a program's thread has one call; bytes of writes by [`MOST_KEPT`], and
//!   those that the kernel writes back by what it has under way at a time.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::time::Duration;

use mojim::{Batch, RoomWait};
use mojim_env::event::Event;
use rustix::io::Errno;

use crate::THREADS;
use crate::fs::{Fs, Result, lock, told};

/// Threads that serve and wait for a sync point at the same time.
const WAITING: usize = THREADS - 2;
/// For how long.
const SOON: Duration = Duration::from_millis(10);
/// How often the threads look whether the mount ends.
const TURN: Duration = Duration::from_secs(1);
/// Most bytes of writes that wait.
const MOST_KEPT: usize = 256 << 20;

/// Answers the kernel.
type Answer = Box<dyn FnOnce(Result<()>) + Send>;

/// A call that found no room: true if it is answered. With an error it is, whatever it says.
pub(crate) type Again = Box<dyn FnMut(&Fs, Option<Errno>) -> bool + Send>;

/// A call that is made once, and answered.
type Once = Box<dyn FnOnce(&Fs) + Send>;

struct Call {
    number: u64,
    /// Bytes that it keeps.
    bytes: usize,
    again: Again,
}

#[derive(Default)]
struct Calls {
    all: VecDeque<Call>,
    next: u64,
    bytes: usize,
}

#[derive(Default)]
pub(crate) struct Later {
    /// Threads that serve and wait for a sync point.
    waiting: AtomicUsize,
    begun: Mutex<Vec<(Batch, Answer)>>,
    some_begun: Event,
    calls: Mutex<Calls>,
    some_calls: Event,
    readers: Mutex<VecDeque<Once>>,
    some_readers: Event,
    ends: AtomicBool,
}

impl Later {
    /// Waits for a sync point in place of the thread that serves, unless it is committed soon.
    pub(crate) fn complete(
        &self,
        fs: &Fs,
        batch: Batch,
        answer: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        let mut done = Ok(false);
        if self.waiting.fetch_add(1, Relaxed) < WAITING {
            done = fs.volume().complete_within(&batch, SOON);
        }
        self.waiting.fetch_sub(1, Relaxed);
        match done {
            Ok(true) => answer(Ok(())),
            Ok(false) => {
                let mut begun = lock(&self.begun);
                if self.ends.load(SeqCst) {
                    drop(begun);
                    return answer(fs.volume().complete(&batch).map_err(|e| told(&e)));
                }
                begun.push((batch, Box::new(answer)));
                drop(begun);
                self.some_begun.notify();
            }
            Err(e) => answer(Err(told(&e))),
        }
    }

    /// Whether a call may wait here that keeps `bytes`.
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        lock(&self.calls).bytes + bytes <= MOST_KEPT
    }

    /// Has a call, which keeps `bytes`, made anew when there may be room.
    pub(crate) fn call_again(&self, fs: &Fs, bytes: usize, mut again: Again) {
        let mut calls = lock(&self.calls);
        if self.ends.load(SeqCst) {
            drop(calls);
            again(fs, Some(Errno::ROFS));
            return;
        }
        let number = calls.next;
        calls.next += 1;
        calls.bytes += bytes;
        calls.all.push_back(Call {
            number,
            bytes,
            again,
        });
        drop(calls);
        self.some_calls.notify();
    }

    /// Has a call made, and answered, by a thread that may wait until a data file is open.
    pub(crate) fn call_when_open(&self, fs: &Fs, call: impl FnOnce(&Fs) + Send + 'static) {
        let mut readers = lock(&self.readers);
        if self.ends.load(SeqCst) {
            drop(readers);
            return call(fs);
        }
        readers.push_back(Box::new(call));
        drop(readers);
        self.some_readers.notify();
    }

    /// The thread that waits until data files are open.
    pub(crate) fn make_calls_that_read(&self, fs: &Fs) {
        let next = || {
            let mut readers = lock(&self.readers);
            (readers.pop_front(), self.ends.load(SeqCst))
        };
        loop {
            match next() {
                (Some(call), _) => call(fs),
                (None, true) => return,
                (None, false) => {
                    let ready = || self.ends.load(SeqCst) || !lock(&self.readers).is_empty();
                    self.some_readers.wait_unless(ready, TURN);
                }
            }
        }
    }

    /// The thread that waits for sync points.
    pub(crate) fn wait_for_sync_points(&self, fs: &Fs) {
        let mut all: Vec<(Batch, Answer)> = Vec::new();
        loop {
            let ends = self.take_begun(&mut all);
            all.sort_by_key(|(batch, _)| batch.lsn());
            let Some((first, _)) = all.first() else {
                if ends {
                    return;
                }
                let ready = || self.ends.load(SeqCst) || !lock(&self.begun).is_empty();
                self.some_begun.wait_unless(ready, TURN);
                continue;
            };
            if let Err(e) = fs.volume().complete(first) {
                // All of them were here when this wait began, and come behind the first.
                let e = told(&e);
                all.drain(..).for_each(|(_, answer)| answer(Err(e)));
                continue;
            }
            // Others came meanwhile, and may be committed too.
            self.take_begun(&mut all);
            all.sort_by_key(|(batch, _)| batch.lsn());
            let is_done =
                |b: &Batch| matches!(fs.volume().complete_within(b, Duration::ZERO), Ok(true));
            let done = all.iter().take_while(|(batch, _)| is_done(batch)).count();
            all.drain(..done).for_each(|(_, answer)| answer(Ok(())));
        }
    }

    /// Takes what has come; true if no more will.
    fn take_begun(&self, all: &mut Vec<(Batch, Answer)>) -> bool {
        let mut begun = lock(&self.begun);
        all.append(&mut begun);
        self.ends.load(SeqCst)
    }

    /// The thread that makes calls anew.
    pub(crate) fn make_calls(&self, fs: &Fs) {
        loop {
            match self.next_call(u64::MAX) {
                Some(call) => self.make(fs, call),
                None if self.is_over() => return,
                None => {
                    let ready = || self.ends.load(SeqCst) || !lock(&self.calls).all.is_empty();
                    self.some_calls.wait_unless(ready, TURN);
                }
            }
        }
    }

    /// Makes a call anew until it finds room, or waits in vain. So have those that came before it began
    /// to wait, unless they need not wait.
    fn make(&self, fs: &Fs, mut call: Call) {
        let (mut wait, mut failed) = (RoomWait::default(), None);
        let before = lock(&self.calls).next;
        while !(call.again)(fs, failed) {
            failed = match self.ends.load(SeqCst) {
                true => Some(Errno::ROFS),
                false => fs.volume().await_room(&mut wait).err().map(|e| told(&e)),
            };
        }
        while failed.is_some()
            && let Some(mut call) = self.next_call(before)
        {
            if !(call.again)(fs, None) {
                (call.again)(fs, failed);
            }
        }
    }

    /// The next call, if its number is less than `before`.
    fn next_call(&self, before: u64) -> Option<Call> {
        let mut calls = lock(&self.calls);
        calls.all.front().filter(|c| c.number < before)?;
        let call = calls.all.pop_front()?;
        calls.bytes -= call.bytes;
        Some(call)
    }

    fn is_over(&self) -> bool {
        let calls = lock(&self.calls);
        self.ends.load(SeqCst) && calls.all.is_empty()
    }

    /// Nothing is taken any more; the threads end once nothing waits.
    pub(crate) fn end(&self) {
        let all = (lock(&self.begun), lock(&self.calls), lock(&self.readers));
        self.ends.store(true, SeqCst);
        drop(all);
        self.some_begun.notify();
        self.some_calls.notify();
        self.some_readers.notify();
    }
}
