//! Group commit: one thread works for all that wait on a lane. It sends, writes the own
//! log, and receives.
//!
//! One thread per lane, the leader, sends and receives for all. The others look for up to
//! 100 µs, then sleep. A leader that leaves wakes one sleeper.
//!
//! Owns who leads, and what the others do meanwhile (Mojim 4.1). A thread that finds the lane's
//! work free does it, for every record that is appended by then. A thread alone takes the same
//! locks as without others.
//!
//! Invariants:
//! - No thread waits here for a lock that is held during a system call: it waits for the
//!   outcome.
//! - While threads sleep for records of a lane, one thread works on it, looks, or is
//!   woken: whoever stops working, looking or waiting sees to that ([`Primary::pass_on`]).
//!   A thread that looks may be kept from its processor, and others have these locks for
//!   other purposes: that costs those who sleep a slice of `wait_long` at most.
//!
//! By the mirror's log alone (`sync`):
//!
//! - A thread tries to take the receiving end (`lead_link`). With it, it sends, then polls. Over
//!   a stream, it yields once before it sends if others look or sleep: they append. At every 32nd
//!   empty poll it sends again what others appended. It counts acknowledgements for all.
//! - A thread without it looks until nothing was committed for 100 µs (`follow`). Then it sends
//!   (`wait_slice`) and sleeps.
//!
//! Where the own log counts too, each thread sends first, and writes the log if that lock is free
//! (`lead_log`). Where the own log alone counts, the thread with that lock sends and writes (in
//! `async` the link thread sends). In both cases a thread looks for 20 µs. While others look or
//! sleep, the thread that polls yields between polls (`poll_in_company`). A thread that polls alone
//! stops as `spinner.rs` has learned.

use super::*;
use mojim_env::turns;

/// For how long a thread looks whether others have done its work, from the last time that
/// anything became committed, before it sleeps: several round trips of a link.
const LOOK: Duration = Duration::from_micros(100);
/// As [`LOOK`], where it waits for a log's write, which takes longer than looking is worth.
const LOOK_AT_LOG: Duration = Duration::from_micros(20);

/// After so many turns of work on a lane, whoever had the last one gives way to the others.
const TURNS: u32 = 16;

/// What became of a try to work on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Led {
    /// The sync point is committed.
    Done,
    /// It is not, and polling is over.
    Stopped,
    /// Another thread is at it, or this lane has nothing left to do.
    Taken,
}

/// How a thread that works on a lane waits for acknowledgements.
#[derive(Debug, Clone, Copy)]
pub(super) enum Waits {
    /// It polls for as long as the spinner says.
    Polls,
    /// It blocks once, for this long at most.
    Blocks(Duration),
}

/// While it lives, its thread looks whether another one has done its work.
struct Looking<'a>(&'a Primary, usize);

impl<'a> Looking<'a> {
    fn begin(p: &'a Primary, lane: usize) -> Looking<'a> {
        p.lanes[lane].looking.fetch_add(1, SeqCst);
        Looking(p, lane)
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.lanes[self.1].looking.fetch_sub(1, SeqCst);
        self.0.pass_on(self.1);
    }
}

/// A thread that may have been woken to work for others: when it leaves, another is.
pub(super) struct Waiting<'a>(pub(super) &'a Primary, pub(super) usize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.pass_on(self.1);
    }
}

impl Primary {
    /// The short wait. False if `lsn` is not committed yet.
    #[inline]
    pub(super) fn wait_short(&self, lsn: u64, lane: usize, hint: usize) -> Result<bool> {
        match self.lead(lsn, lane, hint, Waits::Polls)? {
            Led::Done => Ok(true),
            Led::Stopped => Ok(false),
            Led::Taken => self.follow(lsn, lane, hint),
        }
    }

    /// Looks whether other threads have committed `lsn`, and works if none of them is at
    /// it.
    fn follow(&self, lsn: u64, lane: usize, hint: usize) -> Result<bool> {
        if self.spec.spin.is_zero() {
            return Ok(false);
        }
        let _looking = Looking::begin(self, lane);
        let env = &**self.store.env();
        let (mut since, mut seen) = (env.now(), 0);
        loop {
            let committed = self.committed();
            if committed >= lsn {
                return Ok(true);
            }
            match self.lead(lsn, lane, hint, Waits::Polls)? {
                Led::Done => return Ok(true),
                Led::Stopped => return Ok(false),
                Led::Taken => {}
            }
            let now = env.now();
            if committed != seen {
                (since, seen) = (now, committed);
            }
            if now - since >= self.look() || !self.yield_policy.give_way(env) {
                return Ok(false);
            }
        }
    }

    fn look(&self) -> Duration {
        match self.rule().local {
            true => LOOK_AT_LOG,
            false => LOOK,
        }
    }

    /// Works on `lane` for all that wait there, unless another thread does.
    #[inline]
    pub(super) fn lead(&self, lsn: u64, lane: usize, hint: usize, how: Waits) -> Result<Led> {
        let rule = self.rule();
        if !rule.mirror {
            return self.lead_log(lsn, lane);
        }
        if rule.local {
            // The records travel while they are written.
            self.send(lane);
            if self.lead_log(lsn, lane)? == Led::Done {
                return Ok(Led::Done);
            }
            if self.is_written(lane) {
                // Whoever writes the log takes what has come meanwhile. To poll beside that
                // would keep a processor from the threads that the write's end wakes
                // (measured, four threads on two cores: p99 2.3 to 3.5 times that of the write
                // alone, and 1.3 to 1.4 times without).
                self.receive(lane);
                return Ok(self.led(lsn));
            }
        }
        self.lead_link(lsn, lane, hint, how)
    }

    /// Whether a thread writes the lane's log just now.
    pub(super) fn is_written(&self, lane: usize) -> bool {
        turns::try_lock(&self.lanes[lane].persist).is_none()
    }

    /// Writes the own log for all.
    fn lead_log(&self, lsn: u64, lane: usize) -> Result<Led> {
        let Some(guard) = turns::try_lock(&self.lanes[lane].persist) else {
            return Ok(Led::Taken);
        };
        if !self.spec.background_send {
            // A mirror that joins gets them meanwhile.
            self.send(lane);
        }
        self.persist_held(lane, guard)?;
        Ok(self.led(lsn))
    }

    fn led(&self, lsn: u64) -> Led {
        match self.committed() >= lsn {
            true => Led::Done,
            false => Led::Taken,
        }
    }

    /// Sends and receives for all.
    #[inline]
    fn lead_link(&self, lsn: u64, lane: usize, hint: usize, how: Waits) -> Result<Led> {
        let Some(mut slot) = turns::try_lock(&self.lanes[lane].rx) else {
            return Ok(Led::Taken);
        };
        if self.is_worth_gathering(lane, &slot) {
            self.yield_policy.give_way(&**self.store.env());
        }
        self.send(lane);
        let (led, advanced) = match how {
            Waits::Polls => self.poll(lsn, lane, hint, &mut slot),
            Waits::Blocks(slice) => self.block(lsn, lane, slice, &mut slot),
        };
        drop(slot);
        self.pass_on(lane);
        if advanced {
            self.wake();
        }
        if self.has_company(lane) {
            self.end_turn(lane);
        }
        Ok(led)
    }

    /// Whether to let others append before the leader sends what there is.
    ///
    /// With few processors they wait for one, and their records would need a round trip of their
    /// own (measured, 4 threads over TCP on two cores: 101,000 to 115,000 sync points a second
    /// without, 115,000 to 123,000 with). A round trip over shared memory is shorter than the
    /// system call. Where the own log counts too, its write gathers them.
    fn is_worth_gathering(&self, lane: usize, slot: &RxSlot) -> bool {
        let by_stream = || slot.rx.as_ref().is_some_and(Rx::is_stream);
        let has_some = || {
            let tx = turns::try_lock(&self.lanes[lane].tx);
            let behind = |tx: &Tx| tx.is_behind(self.log(lane));
            tx.is_some_and(|tx| tx.as_ref().is_some_and(behind))
        };
        self.has_company(lane) && !self.rule().local && by_stream() && has_some()
    }

    /// Whoever works is on a processor, and would find the work free again and again:
    /// now and then the others get it.
    fn end_turn(&self, lane: usize) {
        let turns = self.lanes[lane].turns.fetch_add(1, Relaxed);
        if turns.is_multiple_of(TURNS) {
            self.yield_policy.give_way(&**self.store.env());
        }
    }

    /// Polls the link until `lsn` is committed, or for a bounded time. Also returns
    /// whether anything became committed of which the others do not know.
    #[inline]
    fn poll(&self, lsn: u64, lane: usize, hint: usize, slot: &mut RxSlot) -> (Led, bool) {
        let env = &**self.store.env();
        self.log(lane).prefetch(hint);
        let (mut polls, mut since) = (0u32, None);
        loop {
            let came = self.receive_held(lane, slot);
            if self.committed() >= lsn {
                slot.spinner.hit(env);
                return (Led::Done, came.advanced);
            }
            if came.advanced {
                self.wake();
                since = None;
            }
            if !self.is_owed(lane, slot) {
                slot.spinner.forget();
                return (Led::Taken, false);
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(32) {
                // What the link did not take at once, or others appended meanwhile.
                self.send(lane);
            }
            let polls_on = match self.has_company(lane) {
                true => {
                    slot.spinner.forget();
                    self.poll_in_company(polls, &mut since, slot)
                }
                false => self.poll_alone(slot),
            };
            if !polls_on {
                return (Led::Stopped, false);
            }
            std::hint::spin_loop();
        }
    }

    /// Nothing came, and no other thread waits. False if polling is over.
    #[inline]
    fn poll_alone(&self, slot: &mut RxSlot) -> bool {
        let env = &**self.store.env();
        let polls_on = slot.spinner.spin(env);
        if polls_on && slot.spinner.gives_way() {
            self.yield_policy.give_way(env);
        }
        polls_on
    }

    /// Nothing came, and other threads wait too: they get the processor now and then, for
    /// what they append goes with the next send. False if polling is over.
    fn poll_in_company(&self, polls: u32, since: &mut Option<Duration>, slot: &RxSlot) -> bool {
        if !polls.is_multiple_of(slot.rx.as_ref().map_or(1, Rx::polls)) {
            return true;
        }
        let env = &**self.store.env();
        let now = env.now();
        if self.spec.spin.is_zero() || now - *since.get_or_insert(now) >= LOOK {
            return false;
        }
        self.yield_policy.give_way(env);
        true
    }

    /// Whether other threads wait for records of this lane.
    #[inline]
    pub(super) fn has_company(&self, lane: usize) -> bool {
        let out = &self.lanes[lane];
        out.looking.load(Relaxed) > 0 || out.sleeping.load(Relaxed) > 0
    }

    /// Blocks until something comes over the link, if anything is to come.
    fn block(&self, lsn: u64, lane: usize, slice: Duration, slot: &mut RxSlot) -> (Led, bool) {
        let mut came = self.receive_held(lane, slot);
        if self.committed() < lsn && self.is_owed(lane, slot) {
            if came.advanced {
                self.wake();
            }
            if let Some(rx) = &mut slot.rx {
                rx.wait(slice);
            }
            came = self.receive_held(lane, slot);
            let led = match self.committed() >= lsn {
                true => Led::Done,
                false => Led::Stopped,
            };
            return (led, came.advanced);
        }
        (self.led(lsn), came.advanced)
    }

    /// Whether the mirror has not acknowledged all of this lane.
    #[inline]
    fn is_owed(&self, lane: usize, slot: &RxSlot) -> bool {
        let head = self.log(lane).head();
        slot.rx.as_ref().is_some_and(|rx| rx.acked_at < head)
    }

    /// Whether a lane has work that no thread is at.
    pub(super) fn is_free(&self, lane: usize) -> bool {
        let (out, rule) = (&self.lanes[lane], self.rule());
        let link = || {
            let slot = turns::try_lock(&out.rx);
            slot.is_some_and(|slot| self.is_owed(lane, &slot))
        };
        let log = || {
            let at = turns::try_lock(&out.persist);
            at.is_some_and(|at| *at < self.log(lane).head())
        };
        // Whoever writes the log sees to the link afterwards.
        rule.mirror && !(rule.local && self.is_written(lane)) && link() || rule.local && log()
    }

    /// This thread works on `lane` no longer, or looks no longer: if there is work left
    /// and everybody sleeps, one of them is woken for it.
    #[inline]
    pub(super) fn pass_on(&self, lane: usize) {
        if self.waiters.any() && self.lanes[lane].looking.load(SeqCst) == 0 && self.is_free(lane) {
            self.waiters.wake_first(lane, self.committed());
        }
    }

    /// Something became committed, or may have: wakes who waits for it.
    #[inline]
    pub(super) fn wake(&self) {
        self.done.notify();
        self.waiters.wake(|| self.committed());
    }

    /// What is committed is decided otherwise from here on: wakes every waiting thread.
    pub(crate) fn wake_all(&self) {
        self.done.notify();
        self.waiters.wake_all();
    }
}
