//! The limit of writes that threads share: the thread that finds the carrier free takes all that is
//! queued.
//!
//! Each operation brings a record of 128 bytes and draws a ticket. A ticket's slot holds the record
//! until it is written. One thread at a time leads:
//!
//! - It stages the records from `done` on as far as they are there, in the order of the tickets.
//! - It has the carrier write them at once.
//! - It counts them done, wakes their threads, and lets go of the lead.
//!
//! The others look for 20 µs, giving their processor away between looks. Then they sleep, each on
//! the futex of its own seat.
//!
//! Invariants:
//!
//! - A member has at most one ticket that is not done, and there are no more members than slots. So
//!   a slot is not used again before its ticket is done.
//! - A slot may be used again before its ticket's thread has heard that it is done. So a thread
//!   sleeps in its seat, which is its alone. The leader notes the seats before they are done.
//! - While nobody leads, the thread whose ticket is `done` (the front, if that ticket is drawn) is
//!   awake or is being woken. Before it sleeps it says so in its seat. After that it sleeps only if
//!   it sees that somebody leads or that it is not the front. The leader looks into the front's
//!   seat after the lead is free again. These stores and loads are all sequentially consistent, so
//!   at least one of the two sees the other.
//! - After a failure nothing is written any more, and every put is an error.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

use super::rules::Wait;
use mojim_env::locks::lock;

/// Bytes that each operation brings.
pub const RECORD: usize = 128;
/// What each operation brings.
pub type Record = [u8; RECORD];
/// Most threads that share writes, and most records in one write.
pub const MOST_MEMBERS: usize = 256;

/// How long a thread looks before it sleeps.
const LOOK: Duration = Duration::from_micros(20);
/// States of a seat's thread.
const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// What records are written to: a log, or a link.
pub trait Carrier {
    /// Most records in one write, at most [`MOST_MEMBERS`].
    const MOST: usize;

    /// Takes `record` as number `at` of the next write.
    fn stage(&mut self, at: usize, record: &Record);

    /// Writes the first `n` staged records and returns when they are where they are to be.
    /// `crowded` says whether other threads wait.
    fn carry(&mut self, n: usize, crowded: &dyn Fn() -> bool) -> io::Result<()>;
}

#[repr(align(64))]
struct Slot {
    /// One more than the ticket whose record is here; 0 before the first.
    ready: AtomicU64,
    /// The seat of the ticket's thread.
    seat: AtomicUsize,
    record: UnsafeCell<Record>,
}

impl Slot {
    fn new() -> Slot {
        Slot {
            ready: AtomicU64::new(0),
            seat: AtomicUsize::new(0),
            record: UnsafeCell::new([0; RECORD]),
        }
    }
}

/// Where a member's thread sleeps: a futex, [`AWAKE`] or [`ASLEEP`].
#[repr(align(64))]
struct Seat(AtomicU32);

impl Seat {
    /// Wakes the thread that sleeps here, or is about to. To wake one for nothing does no harm.
    fn wake(&self) {
        if self.0.load(SeqCst) == ASLEEP && self.0.swap(AWAKE, SeqCst) == ASLEEP {
            // It fails for no address that is mapped.
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }
}

/// A value on cache lines of its own.
#[repr(align(128))]
struct Alone<T>(T);

/// A carrier that threads share.
pub struct Combining<C> {
    slots: Box<[Slot]>,
    seats: Box<[Seat]>,
    /// Seats that no member has.
    free: Mutex<Vec<usize>>,
    /// The next ticket.
    next: Alone<AtomicU64>,
    /// Tickets below are written. Only who leads changes it.
    done: Alone<AtomicU64>,
    /// Whether somebody leads.
    busy: Alone<AtomicBool>,
    failed: AtomicBool,
    why: Mutex<String>,
    carrier: UnsafeCell<C>,
}

// SAFETY: the carrier is touched only by the thread that leads, of which there is one; a record is
// written by its ticket's thread before `ready` says that it is there, and read by who leads between
// that and `done`. So a shared reference lets threads pass the carrier on, which `Send` allows.
unsafe impl<C: Send> Sync for Combining<C> {}

/// A thread's place: one record at a time.
pub struct Member<'a, C: Carrier> {
    of: &'a Combining<C>,
    seat: usize,
}

impl<C: Carrier> Combining<C> {
    /// For nobody yet.
    pub fn new(carrier: C) -> Combining<C> {
        Combining::with_most(carrier, MOST_MEMBERS)
    }

    /// For up to `most` members.
    fn with_most(carrier: C, most: usize) -> Combining<C> {
        assert!((1..=MOST_MEMBERS).contains(&C::MOST) && most <= MOST_MEMBERS);
        Combining {
            slots: (0..most).map(|_| Slot::new()).collect(),
            seats: (0..most).map(|_| Seat(AtomicU32::new(AWAKE))).collect(),
            free: Mutex::new((0..most).collect()),
            next: Alone(AtomicU64::new(0)),
            done: Alone(AtomicU64::new(0)),
            busy: Alone(AtomicBool::new(false)),
            failed: AtomicBool::new(false),
            why: Mutex::new(String::new()),
            carrier: UnsafeCell::new(carrier),
        }
    }

    /// A place for one more thread, of [`MOST_MEMBERS`].
    pub fn member(&self) -> io::Result<Member<'_, C>> {
        self.check()?;
        match self.free_seats().pop() {
            Some(seat) => Ok(Member { of: self, seat }),
            None => Err(io::Error::other("too many threads share a raw limit")),
        }
    }

    fn free_seats(&self) -> MutexGuard<'_, Vec<usize>> {
        lock(&self.free)
    }

    /// The carrier.
    pub fn into_inner(self) -> C {
        self.carrier.into_inner()
    }

    fn slot(&self, ticket: u64) -> &Slot {
        &self.slots[(ticket % self.slots.len() as u64) as usize]
    }

    fn is_ready(&self, ticket: u64) -> bool {
        self.slot(ticket).ready.load(SeqCst) == ticket + 1
    }

    /// Whether there is something to lead, and nobody does.
    fn is_free(&self) -> bool {
        !self.busy.0.load(SeqCst) && self.is_ready(self.done.0.load(SeqCst))
    }

    fn is_done(&self, ticket: u64) -> bool {
        self.done.0.load(SeqCst) > ticket
    }

    fn check(&self) -> io::Result<()> {
        if !self.failed.load(SeqCst) {
            return Ok(());
        }
        let why = lock(&self.why);
        Err(io::Error::other(why.clone()))
    }

    /// From now on every put fails; who sleeps hears of it.
    fn fail(&self, why: String) {
        *lock(&self.why) = why;
        self.failed.store(true, SeqCst);
        self.seats.iter().for_each(Seat::wake);
    }

    /// Returns when `ticket` is written, and leads when that is free meanwhile; sleeps in `seat`.
    fn wait(&self, ticket: u64, seat: usize) -> io::Result<()> {
        let state = &self.seats[seat].0;
        let mut since = None;
        loop {
            if self.is_done(ticket) {
                return Ok(());
            }
            self.check()?;
            if self.is_free() {
                self.try_lead();
                continue;
            }
            if since.get_or_insert_with(Instant::now).elapsed() < LOOK {
                std::thread::yield_now();
                continue;
            }
            state.store(ASLEEP, SeqCst);
            // What changed before that store is seen here; who changes it later sees the store.
            if !self.is_done(ticket) && !self.failed.load(SeqCst) && !self.is_free() {
                match futex::wait(state, futex::Flags::PRIVATE, ASLEEP, None) {
                    Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(e) => self.fail(format!("a futex: {e}")),
                }
            }
            state.store(AWAKE, SeqCst);
            since = None;
        }
    }

    /// Writes once what is queued, if nobody else leads.
    fn try_lead(&self) {
        if self.busy.0.swap(true, SeqCst) {
            return;
        }
        let lead = Lead(self);
        // SAFETY: this thread leads until `lead` is dropped, and no other touches the carrier.
        let carrier = unsafe { &mut *self.carrier.get() };
        // Another may have failed since this one looked.
        if self.failed.load(SeqCst) {
            return;
        }
        let begin = self.done.0.load(SeqCst);
        let mut end = begin;
        let mut seats = [0; MOST_MEMBERS];
        while end - begin < C::MOST as u64 && self.is_ready(end) {
            // SAFETY: `ready` says that the ticket's thread has written the record; the slot is
            // not written again before the ticket is done, which only this thread makes it.
            let record = unsafe { &*self.slot(end).record.get() };
            let at = (end - begin) as usize;
            carrier.stage(at, record);
            seats[at] = self.slot(end).seat.load(SeqCst);
            end += 1;
        }
        if end == begin {
            return;
        }
        let crowded = || self.next.0.load(SeqCst) > begin + 1;
        let seats = &seats[..(end - begin) as usize];
        match carrier.carry(seats.len(), &crowded) {
            Ok(()) => {
                self.done.0.store(end, SeqCst);
                seats.iter().for_each(|seat| self.seats[*seat].wake());
            }
            Err(e) => self.fail(e.to_string()),
        }
        drop(lead);
    }
}

/// The lead; free again when it is dropped.
struct Lead<'a, C: Carrier>(&'a Combining<C>);

impl<C: Carrier> Drop for Lead<'_, C> {
    fn drop(&mut self) {
        let of = self.0;
        if std::thread::panicking() {
            of.fail("the thread that wrote for others panicked".into());
        }
        of.busy.0.store(false, SeqCst);
        // One of those that remain has to lead: the front, if it does not look by itself. (Before
        // its record is there it does, and the seat is an earlier one's.)
        let front = of.slot(of.done.0.load(SeqCst));
        of.seats[front.seat.load(SeqCst)].wake();
    }
}

impl<C: Carrier> Member<'_, C> {
    /// Returns when `record` is written.
    pub fn put(&mut self, record: &Record) -> io::Result<()> {
        let of = self.of;
        of.check()?;
        let ticket = of.next.0.fetch_add(1, SeqCst);
        let slot = of.slot(ticket);
        // SAFETY: the slot's ticket before this one is done (a member has one that is not, except
        // after a failure, and then draws no other), so nobody reads the record before `ready`.
        unsafe { *slot.record.get() = *record };
        slot.seat.store(self.seat, SeqCst);
        slot.ready.store(ticket + 1, SeqCst);
        of.wait(ticket, self.seat)
    }
}

impl<C: Carrier> Drop for Member<'_, C> {
    fn drop(&mut self) {
        self.of.free_seats().push(self.seat);
    }
}

/// How who leads waits for a link's answer: alone it spins, for [`Wait::spin`] of the raw links;
/// beside others, or after that time, it gives its processor away between polls.
#[derive(Default)]
pub(super) struct Polling {
    polls: u32,
    start: Option<Instant>,
    elapsed: Duration,
}

impl Polling {
    /// Between two polls; how long they have lasted, about.
    pub fn pause(&mut self, crowded: &dyn Fn() -> bool) -> Duration {
        self.polls += 1;
        // The clock is read once in some polls: it costs as much as a cache line.
        if self.polls.is_multiple_of(32) {
            self.elapsed = self.start.get_or_insert_with(Instant::now).elapsed();
        }
        if crowded() || self.elapsed > Wait::SPIN.spin {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        self.elapsed
    }
}

/// Tests of every carrier.
#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Each of 16 threads puts `each` records whose bytes are the thread's number. There are as many
    /// slots, so that they are used again at once.
    pub fn sixteen<C: Carrier + Send>(carrier: C, each: usize) -> C {
        let shared = Combining::with_most(carrier, 16);
        std::thread::scope(|scope| {
            for i in 0..16 {
                let mut member = shared.member().unwrap();
                scope.spawn(move || (0..each).for_each(|_| member.put(&[i; RECORD]).unwrap()));
            }
        });
        shared.into_inner()
    }

    /// Each of 16 threads puts records until that is an error, which `end` brings about.
    pub fn all_fail<C: Carrier + Send>(carrier: C, end: impl FnOnce()) {
        let shared = Combining::new(carrier);
        let members: Vec<_> = (0..16).map(|_| shared.member().unwrap()).collect();
        std::thread::scope(|scope| {
            for mut member in members {
                scope.spawn(move || while member.put(&[1; RECORD]).is_ok() {});
            }
            std::thread::sleep(Duration::from_millis(20));
            end();
        });
        assert!(shared.member().is_err());
    }

    /// Counts by thread; sleeps in some writes, so that the others sleep too; few fit in one.
    struct Counted {
        staged: Vec<u8>,
        by_thread: [usize; 16],
        writes: usize,
        fail_at: usize,
    }

    impl Counted {
        fn new(fail_at: usize) -> Counted {
            Counted {
                staged: Vec::new(),
                by_thread: [0; 16],
                writes: 0,
                fail_at,
            }
        }
    }

    impl Carrier for Counted {
        const MOST: usize = 5;

        fn stage(&mut self, at: usize, record: &Record) {
            assert_eq!(self.staged.len(), at);
            assert!(record.iter().all(|b| *b == record[0]));
            self.staged.push(record[0]);
        }

        fn carry(&mut self, n: usize, _: &dyn Fn() -> bool) -> io::Result<()> {
            assert!(n == self.staged.len() && n <= Self::MOST);
            self.writes += 1;
            if self.writes == self.fail_at {
                return Err(io::Error::other("on purpose"));
            }
            if self.writes.is_multiple_of(7) {
                std::thread::sleep(Duration::from_micros(200));
            }
            for i in self.staged.drain(..) {
                self.by_thread[usize::from(i)] += 1;
            }
            Ok(())
        }
    }

    #[test]
    fn every_record_is_written_once() {
        let got = sixteen(Counted::new(0), 2000);
        assert_eq!(got.by_thread, [2000; 16]);
        assert!(got.writes >= 16 * 2000 / Counted::MOST);
    }

    #[test]
    fn a_failure_reaches_every_thread() {
        all_fail(Counted::new(500), || ());
    }

    #[test]
    fn a_panic_reaches_every_thread() {
        struct Bad;
        impl Carrier for Bad {
            const MOST: usize = 1;
            fn stage(&mut self, _: usize, _: &Record) {}
            fn carry(&mut self, _: usize, _: &dyn Fn() -> bool) -> io::Result<()> {
                std::thread::sleep(Duration::from_millis(5));
                panic!("on purpose")
            }
        }
        let shared = Combining::new(Bad);
        let members: Vec<_> = (0..8).map(|_| shared.member().unwrap()).collect();
        std::thread::scope(|scope| {
            let mut all = Vec::new();
            for mut member in members {
                all.push(scope.spawn(move || member.put(&[0; RECORD])));
            }
            let failed = |t: std::thread::ScopedJoinHandle<'_, io::Result<()>>| {
                !matches!(t.join(), Ok(Ok(())))
            };
            assert!(all.into_iter().all(failed));
        });
    }

    #[test]
    fn there_are_as_many_members_as_slots() {
        let shared = Combining::new(Counted::new(0));
        let all: Vec<_> = (0..MOST_MEMBERS)
            .map(|_| shared.member().unwrap())
            .collect();
        assert!(shared.member().is_err());
        drop(all);
        assert!(shared.member().is_ok());
    }
}
