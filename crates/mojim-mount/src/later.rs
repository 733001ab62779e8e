//! Calls that are answered later, so that no thread that serves the kernel waits longer than a
//! moment.
//!
//! Such a thread waits longer for none of these:
//!
//! - the mirror
//! - room
//! - whoever applies records
//!
//! The mirror may be away for seconds or minutes. There are few threads that serve. As many calls
//! that wait would keep all others from being served, also those that only read.
//!
//! Owns the calls that wait, and three threads:
//!
//! - One waits for sync points that were begun.
//! - One makes calls anew that found no room.
//! - One looks for calls whose program is being killed: the kernel lets such a program end only
//!   when its call is answered.
//!
//! (`readers` has the calls that wait for this node's disk.)
//!
//! Invariants:
//!
//! - A sync point that is committed at once is waited for by the thread that serves it: no other
//!   thread has to be woken. At most [`WAITING`] threads wait so, for [`SOON`] each. A thread that
//!   serves a processor alone waits so only as long as nobody else asks it.
//! - A call that is made anew had changed nothing.
//! - A call fails for want of progress only if nothing has moved for as long as it has waited here.
//!   It must also have waited at least as long as a caller of the volume waits. It fails after
//!   twice that time at the latest.
//! - A call fails with EINTR only if its thread is being killed. A program takes any error of fsync
//!   for a lost write, and may get signals at any time. The call's sync point goes on.
//! - The calls that wait here are bounded: a program's thread has one call. Bytes of writes are
//!   bounded by [`MOST_KEPT`]. Those that the kernel writes back are bounded by the writes that it
//!   has under way at a time.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::time::{Duration, Instant};

use mojim::{Batch, RoomWait};
use mojim_env::event::Event;
use mojim_env::locks::lock;
use rustix::io::Errno;

use crate::THREADS;
use crate::at_once::others_ask;
use crate::fs::{Fs, Result, told};
use crate::killed::is_killed;

/// Threads that serve and wait for a sync point at the same time.
const WAITING: usize = THREADS - 2;
/// For how long.
const SOON: Duration = Duration::from_millis(10);
/// How often one that serves alone looks meanwhile whether others ask.
const STEP: Duration = Duration::from_micros(200);
/// How often the threads look whether the mount ends.
const TURN: Duration = Duration::from_secs(1);
/// How often it is looked, while calls wait, whether their threads are being killed.
const LOOK: Duration = Duration::from_millis(100);
/// Most bytes of writes that wait.
const MOST_KEPT: usize = 256 << 20;

/// Answers the kernel.
type Answer = Box<dyn FnOnce(Result<()>) + Send>;

/// A call that found no room: true if it is answered. With an error it is, whatever it says.
pub(crate) type Again = Box<dyn FnMut(&Fs, Option<Errno>) -> bool + Send>;

/// A call that waits for a sync point.
struct Point {
    number: u64,
    /// The thread that called.
    caller: u32,
    batch: Batch,
    answer: Answer,
}

#[derive(Default)]
struct Points {
    all: Vec<Point>,
    next: u64,
}

impl Points {
    fn take(&mut self, number: u64) -> Option<Point> {
        let at = self.all.iter().position(|p| p.number == number)?;
        Some(self.all.swap_remove(at))
    }
}

/// A call that is made anew.
struct Call {
    number: u64,
    /// The thread that called; 0: the kernel itself, or one that cannot be looked at.
    caller: u32,
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

impl Calls {
    fn take(&mut self, at: usize) -> Option<Call> {
        let call = self.all.remove(at)?;
        self.bytes -= call.bytes;
        Some(call)
    }
}

#[derive(Default)]
pub(crate) struct Later {
    /// Threads that serve and wait for a sync point.
    waiting: AtomicUsize,
    points: Mutex<Points>,
    some_points: Event,
    calls: Mutex<Calls>,
    some_calls: Event,
    ends: AtomicBool,
    ended: Event,
}

impl Later {
    /// Waits for a sync point in place of the thread that serves, unless it is committed soon.
    pub(crate) fn complete(
        &self,
        fs: &Fs,
        caller: u32,
        batch: Batch,
        answer: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        match self.complete_soon(fs, &batch) {
            Ok(true) => answer(Ok(())),
            Ok(false) => {
                let mut points = lock(&self.points);
                if self.ends.load(SeqCst) {
                    drop(points);
                    return answer(fs.volume().complete(&batch).map_err(|e| told(&e)));
                }
                let number = points.next;
                points.next += 1;
                points.all.push(Point {
                    number,
                    caller,
                    batch,
                    answer: Box::new(answer),
                });
                drop(points);
                self.some_points.notify();
            }
            Err(e) => answer(Err(told(&e))),
        }
    }

    /// Waits for a sync point for a moment. False if it takes longer.
    fn complete_soon(&self, fs: &Fs, batch: &Batch) -> mojim_env::Result<bool> {
        if others_ask().is_some() {
            let begun = Instant::now();
            let mut done = fs.volume().complete_within(batch, Duration::ZERO);
            while matches!(done, Ok(false)) && others_ask() == Some(false) && begun.elapsed() < SOON
            {
                done = fs.volume().complete_within(batch, STEP);
            }
            return done;
        }
        let mut done = Ok(false);
        if self.waiting.fetch_add(1, Relaxed) < WAITING {
            done = fs.volume().complete_within(batch, SOON);
        }
        self.waiting.fetch_sub(1, Relaxed);
        done
    }

    /// Whether a call may wait here that keeps `bytes`.
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        lock(&self.calls).bytes + bytes <= MOST_KEPT
    }

    /// Has a call of the thread `caller`, which keeps `bytes`, made anew when there may be room.
    pub(crate) fn call_again(&self, fs: &Fs, caller: u32, bytes: usize, mut again: Again) {
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
            caller,
            bytes,
            again,
        });
        drop(calls);
        self.some_calls.notify();
    }

    /// The thread that waits for sync points.
    pub(crate) fn wait_for_sync_points(&self, fs: &Fs) {
        loop {
            let points = lock(&self.points);
            let ends = self.ends.load(SeqCst);
            let first = points.all.iter().map(|p| p.batch).min_by_key(Batch::lsn);
            let before = points.next;
            drop(points);
            let Some(first) = first else {
                if ends {
                    return;
                }
                let ready = || self.ends.load(SeqCst) || !lock(&self.points).all.is_empty();
                self.some_points.wait_unless(ready, TURN);
                continue;
            };
            // Meanwhile all stay where it is looked who is being killed.
            let failed = fs.volume().complete(&first).err().map(|e| told(&e));
            let mut all = std::mem::take(&mut lock(&self.points).all);
            let answered = match failed {
                // Those that were here when this wait began come behind the first.
                Some(_) => {
                    all.sort_by_key(|p| p.number);
                    all.iter().take_while(|p| p.number < before).count()
                }
                // Others came meanwhile, and may be committed too.
                None => {
                    all.sort_by_key(|p| p.batch.lsn());
                    let at_once = |p: &Point| fs.volume().complete_within(&p.batch, Duration::ZERO);
                    let is_done = |p: &&Point| matches!(at_once(p), Ok(true));
                    all.iter().take_while(is_done).count()
                }
            };
            let done = failed.map_or(Ok(()), Err);
            all.drain(..answered).for_each(|p| (p.answer)(done));
            lock(&self.points).all.append(&mut all);
        }
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
    /// to wait, unless they need not wait: also in place of one whose thread is being killed.
    fn make(&self, fs: &Fs, mut call: Call) {
        let (mut wait, mut failed) = (RoomWait::default(), None);
        let (before, mut looked) = (lock(&self.calls).next, Instant::now());
        while !(call.again)(fs, failed) {
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if is_killed(call.caller) {
                    (call.again)(fs, Some(Errno::INTR));
                    match self.next_call(before) {
                        Some(next) => call = next,
                        None => return,
                    }
                    continue;
                }
            }
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
        calls.take(0)
    }

    /// The thread that looks which programs are being killed. Nobody wakes it: it costs calls nothing
    /// that wait for a moment.
    pub(crate) fn answer_killed(&self, fs: &Fs) {
        while !self.ends.load(SeqCst) {
            let begun = Instant::now();
            // A look at very many of them is seldom: one part in twenty of a processor at most.
            let pause = match self.answer_killed_now(fs) {
                true => LOOK.max(19 * begun.elapsed()),
                false => TURN,
            };
            self.ended.wait_unless(|| self.ends.load(SeqCst), pause);
        }
    }

    /// Answers the calls of threads that are being killed. True if any calls waited.
    fn answer_killed_now(&self, fs: &Fs) -> bool {
        let (mut points, mut calls) = (Vec::new(), Vec::new());
        points.extend(lock(&self.points).all.iter().map(|p| (p.number, p.caller)));
        calls.extend(lock(&self.calls).all.iter().map(|c| (c.number, c.caller)));
        let some = !points.is_empty() || !calls.is_empty();
        // By numbers: once answered, a thread ends, and another one may get its id.
        points.retain(|(_, caller)| is_killed(*caller));
        for (number, _) in points {
            let point = lock(&self.points).take(number);
            if let Some(point) = point {
                // Perhaps nobody else sends it.
                fs.volume().launch(&point.batch);
                (point.answer)(Err(Errno::INTR));
            }
        }
        calls.retain(|(_, caller)| is_killed(*caller));
        for (number, _) in calls {
            let mut waiting = lock(&self.calls);
            let at = waiting.all.iter().position(|c| c.number == number);
            let call = at.and_then(|at| waiting.take(at));
            drop(waiting);
            if let Some(mut call) = call {
                (call.again)(fs, Some(Errno::INTR));
            }
        }
        some
    }

    fn is_over(&self) -> bool {
        let calls = lock(&self.calls);
        self.ends.load(SeqCst) && calls.all.is_empty()
    }

    /// Nothing is taken any more; the threads end once nothing waits.
    pub(crate) fn end(&self) {
        let all = (lock(&self.points), lock(&self.calls));
        self.ends.store(true, SeqCst);
        drop(all);
        self.some_points.notify();
        self.some_calls.notify();
        self.ended.notify();
    }
}
