//! Waiting for a sync point: in the caller's thread, which drives its own lane meanwhile.
//!
//! Owns how long a caller waits, and the error if that was too long. Invariant: no caller
//! gives up while anything moves that it waits for.

use super::group::{Led, Waiting, Waits};
use super::*;
use crate::pace::Pace;
use mojim_env::turns::lock;

/// How far the records had got towards the mirror when a waiting call last looked.
///
/// Invariant: it only grows, and not beyond what the logs held when the wait began. Bytes
/// that are sent again over a new link, or that others append meanwhile, are no progress:
/// else a mirror that takes everything in and acknowledges nothing would be waited for
/// without end.
struct Motion {
    /// Bytes that the logs held, or were to hold, when the wait began: one's own record may lie
    /// behind others that are still being made.
    until: u64,
    handed: u64,
    lsn: u64,
    acked: u64,
    spilled: u64,
}

impl Motion {
    /// Of a wait for `lsn` that begins now.
    fn of(p: &Primary, lsn: u64) -> Motion {
        let mut motion = Motion {
            until: p.lanes.iter().map(|l| l.room.end()).sum(),
            handed: 0,
            lsn,
            acked: 0,
            spilled: 0,
        };
        motion.goes_on(p);
        motion
    }

    /// Whether the mirror has moved on since the last call: it has taken or acknowledged
    /// more than ever before, spill files included, which go ahead of records; or a whole
    /// copy is under way, whose own standstill ends its link (`link::COPY_SILENCE`).
    fn goes_on(&mut self, p: &Primary) -> bool {
        let handed = p.handed().min(self.until);
        let acked = p.acked.get().min(self.lsn);
        let spilled = p.spills.moved();
        let more = handed > self.handed || acked > self.acked || spilled > self.spilled;
        self.handed = self.handed.max(handed);
        self.acked = self.acked.max(acked);
        self.spilled = spilled;
        more || p.other_end.is_copying()
    }
}

impl Primary {
    /// Waits until `lsn`, appended on any lane, is committed.
    pub fn wait(&self, lsn: u64) -> Result<()> {
        if self.committed() < lsn {
            // Its thread may have gone on without waiting.
            self.drive_all(0)?;
        }
        self.wait_hinted(lsn, 0, 0)
    }

    /// As `wait`; the next record may have about `hint` bytes.
    #[inline]
    pub(super) fn wait_hinted(&self, lsn: u64, lane: usize, hint: usize) -> Result<()> {
        self.wait_within(lsn, lane, hint, Duration::MAX).map(drop)
    }

    /// The same, for `limit` at most: false if it is not committed by then.
    #[inline]
    pub(super) fn wait_within(
        &self,
        lsn: u64,
        lane: usize,
        hint: usize,
        limit: Duration,
    ) -> Result<bool> {
        let done = self.wait_short(lsn, lane, hint)? || self.wait_long(lsn, lane, limit)?;
        if self.spec.background_send {
            self.link_work.notify();
        }
        Ok(done)
    }

    #[cold]
    pub(super) fn wait_long(&self, lsn: u64, lane: usize, limit: Duration) -> Result<bool> {
        let env = self.store.env();
        let begin = env.now();
        let mut start = begin;
        let mut patience = self.patience();
        let mut motion = Motion::of(self, lsn);
        let _waiting = Waiting(self, lane);
        loop {
            if self.committed() >= lsn {
                return Ok(true);
            }
            self.check()?;
            // Read before the progress: a confirmation that comes in between shows there.
            let confirms = self.standstill(Duration::ZERO);
            let now = env.now();
            if now - begin >= limit {
                return Ok(false);
            }
            if motion.goes_on(self) || self.is_held_back(now) {
                // The bounds are on standstill, and do not count while the mirror says that
                // it is held back: a link that fails is noticed by its silence.
                (start, patience) = (now, self.patience());
            }
            let linked = self.link_up.load(Acquire);
            match patience.step(now - start) {
                Verdict::Wait => {}
                // The records come behind a spill file that the mirror is syncing.
                Verdict::GiveUp if !linked && now - start < confirms => {}
                // A link that is still being made gets its time.
                Verdict::Resend if !linked => {}
                Verdict::Resend if self.lacks_records() => {}
                // The lease keeps it from being committed, not the link.
                Verdict::Resend if self.rule.is_held() => {}
                Verdict::Resend => {
                    self.suspect(Error::Protocol("no acknowledgement in time".into()))
                }
                Verdict::GiveUp if self.lacks_records() => {
                    return Err(Error::Timeout(format!(
                        "LSN {lsn}; another thread of this process has not made the record before it within {:?}: it stands still while it copies its data. The sync point is committed when that thread goes on",
                        patience.limit()
                    )));
                }
                Verdict::GiveUp => {
                    self.link_work.notify();
                    return Err(self.timeout(&format!("LSN {lsn}"), patience.limit()));
                }
            }
            let slice = Duration::from_millis(2).min(self.spec.resend_timeout);
            let woken = self.wait_slice(lsn, lane, slice)?;
            if woken && self.store.mutations.wake_early.is_on() {
                return Ok(true);
            }
            if !woken {
                self.drive_all(lane)?;
                if self.waits_for_log(lsn) {
                    (start, patience) = (env.now(), self.patience());
                }
            }
        }
    }

    /// Whether the mirror owes an acknowledgement: of what is in the logs. What threads of this
    /// process have not made yet is not owed by anybody else.
    pub(crate) fn lacks_acks(&self) -> bool {
        let logs = self.lanes.iter().zip(self.store.logs());
        { logs }.any(|(lane, log)| lane.acked_at.load(Relaxed) < log.head())
    }

    /// Whether records of threads of this process are all that is waited for: then nobody else is
    /// at fault.
    fn lacks_records(&self) -> bool {
        let rule = self.rule();
        let logs = self.store.logs();
        let mut lanes = self.lanes.iter().zip(logs);
        lanes.any(|(lane, log)| log.head() < lane.room.end())
            && !(rule.mirror && self.lacks_acks())
            && !(rule.local && logs.iter().any(|log| log.persisted() < log.head()))
    }

    /// Works on `lane`, or sleeps until others have done so, for `slice` at most. False if
    /// this thread should look at the other lanes: it was not woken, or worked in vain.
    fn wait_slice(&self, lsn: u64, lane: usize, slice: Duration) -> Result<bool> {
        match self.lead(lsn, lane, 0, Waits::Blocks(slice))? {
            Led::Done => return Ok(true),
            Led::Stopped => return Ok(false),
            Led::Taken => {}
        }
        if self.rule().mirror {
            // Who works on the lane may be waiting for an answer.
            self.send(lane);
        }
        let n = self.lanes.len();
        for other in (1..n).map(|i| (lane + i) % n) {
            // The prefix may hang on it, and its own thread may have gone on.
            if self.is_free(other) {
                self.drive(other)?;
            }
        }
        let ready = || self.committed() >= lsn || self.is_free(lane);
        self.lanes[lane].sleeping.fetch_add(1, SeqCst);
        let woken = self.waiters.sleep(lsn, lane, ready, slice);
        self.lanes[lane].sleeping.fetch_sub(1, SeqCst);
        Ok(woken)
    }

    /// Whether another thread is writing a log that `lsn` waits for. That may take long, and is not
    /// the mirror's fault. Nobody stands in line for the log's lock meanwhile: who gets it next would
    /// write what few have appended, while those behind it, whose records are written, are not told.
    fn waits_for_log(&self, lsn: u64) -> bool {
        let written = || (0..self.lanes.len()).any(|lane| self.is_written(lane));
        self.rule().local && self.persisted.get() < lsn && written()
    }

    /// The prefix may hang on any lane, also one whose thread gave up.
    fn drive_all(&self, lane: usize) -> Result<()> {
        let n = self.lanes.len();
        (0..n).try_for_each(|i| self.drive((lane + i) % n))
    }

    /// Waits for room in the log, for a moment; fails if nothing has moved for too long.
    pub fn wait_for_room(&self, wait: &mut RoomWait) -> Result<()> {
        self.check_open()?;
        let limit = self.patience().limit() + Duration::from_secs(30);
        if wait.waited > self.standstill(limit) {
            let late = || self.timeout("the log is full", limit);
            return Err(self.store.lacks_room().unwrap_or_else(late));
        }
        // What is in the rings moves on only if a thread drives it.
        for lane in 0..self.lanes.len() {
            self.drive(lane)?;
        }
        // The checkpoint thread gives way to all others; this thread waits anyway, so it
        // helps.
        match self.checkpoint_step(Pace::Idle) {
            Ok(true) => return Ok(()),
            // What is committed waits for room on the disk, as the log does: a removal may make some.
            Err(e) if e.lacks_room() && self.store.poisoned().is_none() => {}
            done => _ = done?,
        }
        let start = self.store.env().now();
        let used = self.store.fullness();
        self.done
            .wait_unless(|| self.store.fullness() < used, Duration::from_millis(2));
        let now = self.store.env().now();
        // Back-pressure lasts as long as a backup that is alive needs.
        let held = self.backups.is_full(&self.store)
            || self.is_held_back(now)
            || self.is_copying()
            || (0..self.lanes.len()).any(|lane| self.store.is_kept(lane));
        let spilled = self.spills.moved();
        let held = held || std::mem::replace(&mut wait.spilled, spilled) != spilled;
        wait.waited = match held {
            true => Duration::ZERO,
            false => wait.waited + (now - start),
        };
        Ok(())
    }

    pub(super) fn timeout(&self, what: &str, limit: Duration) -> Error {
        // The error of an earlier link says nothing of one that is up.
        let why = match self.link_up.load(Acquire) {
            true => Some("the link to it is up, and nothing moves on it".to_owned()),
            false => lock(&self.link_error).as_ref().map(Error::to_string),
        };
        Error::Timeout(format!(
            "{what}; the mirror did not move on within {limit:?}{}. The sync point stays in this node's ring. It is sent again when the mirror is back, and its extents count as changed until then",
            why.map(|w| format!(" ({w})")).unwrap_or_default()
        ))
    }

    /// Whether a whole copy is being made from here or to here, for a backup too: the logs keep what
    /// it lacks.
    pub(super) fn is_copying(&self) -> bool {
        let now = self.store.env().now();
        self.store.progress.get(now).is_some_and(|c| c.running)
    }

    /// How long a sync point waits before it suspects the link:
    /// `resend_timeout`, the time of some round trips over this link, and what
    /// the slowest mirror needs for the bytes that it lacks.
    pub fn resend_after(&self) -> Duration {
        let trip = self.other_end.round_trip();
        // Without a link the mirror takes nothing in: that adds no time.
        let behind = match self.link_up.load(Acquire) {
            true => self.bytes_behind(),
            false => 0,
        };
        let bytes = Duration::from_micros(behind * 1_000_000 / LEAST_PACE);
        self.spec.resend_timeout + (trip * TRIPS).min(LONGEST_TRIPS) + bytes
    }

    pub(super) fn patience(&self) -> Patience {
        Patience::new(self.resend_after(), self.spec.resend_attempts)
    }

    /// Says that the link must be made anew, and why: a record that the mirror refused is
    /// not sent a second time.
    pub fn suspect(&self, why: Error) {
        *lock(&self.link_error) = Some(why);
        self.suspect.store(true, Release);
        self.link_work.notify();
    }

    /// How long a mirror may stand still: `usual`, or longer while it syncs a whole spill
    /// file and says nothing.
    pub fn standstill(&self, usual: Duration) -> Duration {
        match self.spills.is_confirming() {
            true => usual.max(COPY_SILENCE),
            false => usual,
        }
    }
}
