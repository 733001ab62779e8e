//! How background threads write records back to the data files: in pieces, or in a pause.
//!
//! Owns the pace, and how much is a piece. The pace follows from the records that come and from
//! what the turns before did. A thread that wrote back each record as it comes would take the
//! processor from threads that wait for each other, however low its priority. Under EEVDF a thread
//! that yields a hundred times has put itself behind all others.
//!
//! Invariant: a pace depends on turns alone. A turn takes a millisecond or more. The caller says
//! how long it took, so that the simulator drives the same [`Pacer`].
//!
//! A mirror applies in each of these cases:
//!
//! - Its log is half full.
//! - 50 ms have passed without a record or without anything applied.
//! - `checkpoint_threshold` records wait, in a pause or after 20 ms.
//! - An eighth of the log waits.
//!
//! It applies what the primary has told it to be committed. Each record and each
//! heartbeat (100 ms) says that. A primary's conditions are in `primary/write_back.rs`.

/// What the background sees of the program and its sync points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Sync points come one after the other.
    Busy,
    /// No sync point came in some turns of the background.
    Quiet,
    /// The records that wait to be applied take too much memory, or have waited for long.
    Pressed,
    /// No sync point came for long, or a caller waits for room in the log.
    Idle,
}

/// After so many turns without a record the system counts as idle (Mojim 4.2, "when the
/// system is idle").
const IDLE: u32 = 50;

/// After how many turns a node writes back.
#[derive(Debug, Clone, Copy)]
struct Turns {
    /// Turns without a record that make a pause, beside the present one.
    pause: u32,
    /// Turns in which nothing was written back, after which enough records are, although
    /// others follow them.
    late: u32,
    /// As `late`, after which few records are too.
    pressed: u32,
}

/// In the turn after a record a program's sync point may be under way that takes longer than
/// a turn.
const PRIMARY: Turns = Turns {
    pause: 1,
    late: 1000,
    pressed: u32::MAX,
};
/// Readers see no older state than this.
const MIRROR: Turns = Turns {
    pause: 0,
    late: 20,
    pressed: IDLE,
};

/// Counts the turns of a node's background.
#[derive(Debug)]
pub struct Pacer {
    turns: Turns,
    last: u64,
    /// No record came since the turn before.
    still: bool,
    /// Turns in a row without a record and without anything written back.
    quiet: u32,
    /// Turns in a row without anything written back.
    late: u32,
}

impl Pacer {
    /// For a primary.
    pub fn of_primary() -> Pacer {
        Pacer::new(PRIMARY)
    }

    /// For a mirror, and for a backup.
    pub fn of_mirror() -> Pacer {
        Pacer::new(MIRROR)
    }

    fn new(turns: Turns) -> Pacer {
        Pacer {
            turns,
            last: 0,
            still: false,
            quiet: 0,
            late: 0,
        }
    }

    /// Begins a turn. `last`: the last LSN that has come. `pressed`: what waits takes too
    /// much memory. `is_left`: whether something remains that an idle turn should have done.
    pub fn begin(&mut self, last: u64, pressed: bool, is_left: impl FnOnce() -> bool) -> Pace {
        self.still = last == self.last;
        self.last = last;
        if !self.still {
            self.quiet = 0;
        }
        let pause = self.still && self.quiet >= self.turns.pause;
        if self.quiet == IDLE || self.quiet > IDLE && is_left() {
            Pace::Idle
        } else if pressed || self.late >= self.turns.pressed {
            Pace::Pressed
        } else if pause || self.late >= self.turns.late {
            Pace::Quiet
        } else {
            Pace::Busy
        }
    }

    /// Ends a turn: whether it wrote anything back.
    pub fn end(&mut self, did_something: bool) {
        if did_something {
            (self.quiet, self.late) = (0, 0);
            return;
        }
        self.late = self.late.saturating_add(1);
        self.quiet = match self.still {
            true => self.quiet.saturating_add(1),
            false => 0,
        };
    }

    /// Whether there is nothing to do until something comes. Where something is left, it is
    /// tried again after a while.
    pub fn rests(&self) -> bool {
        self.quiet > IDLE
    }
}

/// The fewest bytes of records that are applied at a time.
const LEAST_PIECE: u64 = 1 << 20;

/// Bytes of records that are applied at a time: enough for one checkpoint that its syncs do
/// not count, but not so much that a caller waits long for room.
pub fn piece(smallest_log: u64) -> u64 {
    (smallest_log / 8).max(LEAST_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Pace::*;

    /// What happens in one turn.
    #[derive(Clone, Copy)]
    enum Sees {
        /// A record came.
        Record,
        /// None came.
        None,
        /// None came, and an idle turn has left something.
        Left,
        /// A record came, and what waits takes too much memory.
        Many,
        /// A record came, and something was written back.
        Wrote,
        /// None came, and something was written back.
        WroteInPause,
    }

    #[test]
    fn a_pace_follows_from_the_turns_before() {
        use Sees::*;
        let primary = Pacer::of_primary;
        let mirror = Pacer::of_mirror;
        // What so many turns see, and the pace of the last of them.
        type Case = (&'static str, fn() -> Pacer, &'static [(u32, Sees, Pace)]);
        let table: &[Case] = &[
            (
                "a sync point may take longer than a turn",
                primary,
                &[(1, Record, Busy), (1, None, Busy), (1, None, Quiet)],
            ),
            (
                "a mirror's pause is one turn",
                mirror,
                &[(1, Record, Busy), (1, None, Quiet), (1, Record, Busy)],
            ),
            (
                "idle once, and again only for what is left",
                primary,
                &[
                    (1, Record, Busy),
                    (50, None, Quiet),
                    (1, None, Idle),
                    (3, None, Quiet),
                    (1, Left, Idle),
                    (1, Left, Idle),
                    (1, None, Quiet),
                ],
            ),
            (
                "a record ends the rest, in the turn that would be idle too",
                primary,
                &[
                    (1, Record, Busy),
                    (50, None, Quiet),
                    (1, Record, Busy),
                    (51, None, Idle),
                    (9, None, Quiet),
                    (1, Record, Busy),
                    (1, Left, Busy),
                ],
            ),
            (
                "what was written back begins the count anew",
                primary,
                &[
                    (1, Record, Busy),
                    (40, None, Quiet),
                    (1, WroteInPause, Quiet),
                    (1, None, Busy),
                    (49, None, Quiet),
                    (1, None, Idle),
                ],
            ),
            (
                "a primary's records wait for a second at most",
                primary,
                &[
                    (1000, Record, Busy),
                    (1, Record, Quiet),
                    (1, Wrote, Quiet),
                    (1, Record, Busy),
                ],
            ),
            (
                "a mirror's wait less, enough of them or few",
                mirror,
                &[
                    (20, Record, Busy),
                    (1, Record, Quiet),
                    (29, Record, Quiet),
                    (1, Record, Pressed),
                    (1, Wrote, Pressed),
                    (1, Record, Busy),
                ],
            ),
            (
                "memory presses",
                primary,
                &[(1, Many, Pressed), (1, Record, Busy), (1, Many, Pressed)],
            ),
        ];
        for (name, pacer, rows) in table {
            let (mut pacer, mut last) = (pacer(), 0);
            for (i, (turns, sees, expected)) in rows.iter().enumerate() {
                let mut pace = Busy;
                for _ in 0..*turns {
                    last += u64::from(matches!(sees, Record | Many | Wrote));
                    pace = pacer.begin(last, matches!(sees, Many), || matches!(sees, Left));
                    pacer.end(matches!(sees, Wrote | WroteInPause));
                }
                assert_eq!(pace, *expected, "{name}, row {i}");
            }
        }
    }

    #[test]
    fn a_background_rests_when_it_has_been_idle() {
        for mut pacer in [Pacer::of_primary(), Pacer::of_mirror()] {
            let turn = |pacer: &mut Pacer, last| {
                pacer.begin(last, false, || false);
                pacer.end(false);
                pacer.rests()
            };
            assert!(!turn(&mut pacer, 1));
            for i in 0..50 {
                assert!(!turn(&mut pacer, 1), "{i}");
            }
            assert!(turn(&mut pacer, 1) && turn(&mut pacer, 1));
            assert!(!turn(&mut pacer, 2));
        }
    }
}
