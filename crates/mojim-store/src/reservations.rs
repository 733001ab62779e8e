//! Room in a log that threads take one after the other, and fill side by side.
//!
//! Owns the room that is taken behind a log's head, and moves the head on as the room is filled.
//! A thread takes room under a lock, which is held for some instructions. It fills the room without
//! a lock, and then joins it to the log: the head moves to the end of the first reservations that
//! are filled, and no further. So nobody sees room that is not filled.
//!
//! Invariants:
//!
//! - `head <= end`. The room between belongs to reservations, in the order of their tickets and
//!   without gaps.
//! - The head moves from where a reservation begins to where that ends, and only when it is
//!   filled.
//! - Two threads may move the head over a reservation: the one that fills its room, and the one
//!   that moves the head to where it begins. The filler notes the room as filled and then looks at
//!   the head. The other moves the head and then looks at the note. All four steps are
//!   sequentially consistent, so one of the two threads sees the other.
//! - A note is at most the head at which its next reservation begins, unless that is filled: a
//!   place is used again only when the head has passed what was there. So a note above the head
//!   is that of the reservation that begins there.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use mojim_env::alone::Alone;
use mojim_env::event::Event;
use mojim_env::turns::{self, Mutex};

use crate::log::Log;

/// Reservations that may be under way, and have a place for a note each.
const PLACES: u64 = 256;
/// Notes in a cache line. Those of neighbours lie in different ones.
const IN_LINE: u64 = 8;
/// Places are counted as free by so many.
const BATCH: u64 = PLACES / 4;

/// Longest wait between two looks at the head; the event comes earlier.
const LOOK: Duration = Duration::from_millis(10);

/// Looks at the head before a thread sleeps.
const SPINS: u32 = 100;

/// Why no room was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// The log has no room.
    Log,
    /// Too many reservations are under way.
    Places,
}

/// Where a log's taken room ends, beside its position.
#[derive(Debug)]
#[repr(C)]
struct Tail {
    /// Where in the ring that is, below its size: a division for each record would take as long as
    /// all the rest.
    off: u64,
    /// How many reservations there were.
    tickets: u64,
    /// Where the reservations of each of the last four batches begin.
    begins: [u64; 4],
}

impl Tail {
    fn at(head: u64, size: u64) -> Tail {
        Tail {
            off: head % size,
            tickets: 0,
            begins: [head; 4],
        }
    }

    /// The places of the next batch are those of the batch four before it, which must be over.
    #[inline]
    fn begin_batch(&mut self, log: &Log, end: u64) -> Result<(), Full> {
        let batch = self.tickets / BATCH;
        if log.head() < self.begins[(batch + 1) as usize % 4] {
            return Err(Full::Places);
        }
        self.begins[batch as usize % 4] = end;
        Ok(())
    }
}

/// The right to take room: no other thread has it.
pub struct Turn<'a> {
    room: &'a Reservations,
    tail: MutexGuard<'a, Tail>,
}

impl Turn<'_> {
    /// Takes room in `log` for records of these lengths, all of it or none.
    #[inline]
    pub fn take(&mut self, log: &Log, lens: &[usize]) -> Result<Taken, Full> {
        let tail = &mut *self.tail;
        let begin = self.room.end();
        let (mut end, mut off, mut first) = (begin, tail.off, None);
        for &len in lens {
            let at = log.fit_at(end, off, len);
            if at != end {
                off = 0;
            }
            first = first.or(Some((at, off)));
            end = log.end_of(at, len);
            off += end - at;
            if off == log.size() {
                off = 0;
            }
        }
        if end - log.start() > log.size() {
            return Err(Full::Log);
        }
        if tail.tickets.is_multiple_of(BATCH) {
            tail.begin_batch(log, begin)?;
        }
        let ticket = tail.tickets;
        let (at, first_off) = first.unwrap_or((begin, off));
        tail.tickets += 1;
        tail.off = off;
        self.room.front.end.store(end, Release);
        Ok(Taken {
            ticket,
            begin,
            at,
            off: first_off,
            end,
        })
    }
}

/// Room that a thread has taken. It must be joined once it is filled, or nothing behind it
/// becomes part of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    ticket: u64,
    /// Where it begins.
    pub begin: u64,
    /// Where its first record begins.
    pub at: u64,
    /// Where in the ring that is.
    pub off: u64,
    /// Where it ends.
    pub end: u64,
}

/// What threads write for each record: the first of two cache lines.
#[repr(C)]
struct Front {
    numbers: AtomicU64,
    /// Where the taken room ends. Changed by who has the turn.
    end: AtomicU64,
    tail: Mutex<Tail>,
}

/// The reservations of one log.
pub struct Reservations {
    front: Alone<Front>,
    notes: Box<[AtomicU64]>,
    /// The head has moved.
    joined: Alone<Event>,
}

impl Reservations {
    /// Behind the head of a log of `size` bytes.
    pub fn new(head: u64, size: u64) -> Reservations {
        Reservations {
            front: Alone(Front {
                numbers: AtomicU64::new(0),
                end: AtomicU64::new(head),
                tail: Mutex::new(Tail::at(head, size)),
            }),
            notes: (0..PLACES).map(|_| AtomicU64::new(0)).collect(),
            joined: Alone::default(),
        }
    }

    /// Begins anew behind the log's head. Nothing is under way.
    pub fn restart(&self, log: &Log) {
        let mut turn = self.turn();
        self.notes.iter().for_each(|n| n.store(0, Relaxed));
        self.front.end.store(log.head(), Release);
        *turn.tail = Tail::at(log.head(), log.size());
    }

    /// A number that its owner changes when it takes room: it lies beside the lock.
    #[inline]
    pub fn numbers(&self) -> &AtomicU64 {
        &self.front.numbers
    }

    /// Where the taken room ends.
    #[inline]
    pub fn end(&self) -> u64 {
        self.front.end.load(Acquire)
    }

    /// Waits for the right to take room.
    #[inline]
    pub fn turn(&self) -> Turn<'_> {
        let tail = turns::lock(&self.front.tail);
        Turn { room: self, tail }
    }

    /// As `turn`, if no other thread has it.
    #[inline]
    pub fn try_turn(&self) -> Option<Turn<'_>> {
        let tail = turns::try_lock(&self.front.tail)?;
        Some(Turn { room: self, tail })
    }

    #[inline]
    fn note(&self, ticket: u64) -> &AtomicU64 {
        let lines = PLACES / IN_LINE;
        let at = ticket % lines * IN_LINE + ticket / lines % IN_LINE;
        &self.notes[at as usize]
    }

    /// The room is filled, and part of `log` once all before it is. True if the head has moved
    /// over others' room too.
    #[inline]
    pub fn join(&self, log: &Log, taken: Taken) -> bool {
        let is_next = || log.head() == taken.begin;
        if !is_next() {
            self.note(taken.ticket).store(taken.end, SeqCst);
            if !is_next() {
                return false;
            }
        }
        if !log.move_head(taken.begin, taken.end) {
            return false;
        }
        let (mut head, mut next) = (taken.end, taken.ticket + 1);
        loop {
            let noted = self.note(next).load(SeqCst);
            if noted <= head || !log.move_head(head, noted) {
                break;
            }
            (head, next) = (noted, next + 1);
        }
        self.joined.notify();
        head > taken.end
    }

    /// Waits until everything that was taken before is part of `log`: by this thread, or by one of
    /// which this one has heard that it did.
    pub fn wait_filled(&self, log: &Log) {
        self.wait_filled_within(log, u32::MAX);
    }

    /// Waits until everything before `end`, where taken room ends, is part of `log`.
    pub fn wait_filled_before(&self, log: &Log, end: u64) {
        self.wait_for(log, end, u32::MAX);
    }

    /// As [`Reservations::wait_filled`], in `looks` looks: some milliseconds each, unless the head moves.
    /// False if it is not by then.
    pub fn wait_filled_within(&self, log: &Log, looks: u32) -> bool {
        self.wait_for(log, self.end(), looks)
    }

    fn wait_for(&self, log: &Log, end: u64, looks: u32) -> bool {
        let is_there = || log.head() >= end;
        // A record takes less time than a sleep and the call that ends it.
        for _ in 0..SPINS {
            if is_there() {
                return true;
            }
            std::hint::spin_loop();
        }
        let mut looks = looks;
        while !is_there() {
            if looks == 0 {
                return false;
            }
            self.joined.wait_unless(is_there, LOOK);
            // Without a limit for `u32::MAX`.
            looks -= u32::from(looks != u32::MAX);
        }
        true
    }
}
