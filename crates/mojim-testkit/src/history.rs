//! Checks what the clients of a volume saw: could one log that never failed have shown it?
//!
//! The object is a log to which numbered entries are appended, each by one writer (one
//! process, attached once). There are two kinds of operations, each with the time before it
//! began and the time after it ended, on one clock: an acknowledged append, and a reading of
//! the whole log, which every process does when it has attached. A process may have one more
//! append that was not acknowledged. It is there whole or not at all.
//!
//! The entries' numbers are the order that linearizability asks for. So two things are left
//! to check:
//!
//! - This order is one: each number once, every reading a prefix of the longest.
//! - It nowhere contradicts time: if one operation ended before another began, the first must
//!   not come later.
//!
//! The order is total and the times are intervals, so pairs are enough.

use std::collections::HashMap;
use std::fmt;

/// An append that returned success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    pub writer: u64,
    pub entry: u64,
    pub before: u64,
    pub after: u64,
}

/// The log as somebody found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Who, if it goes on to write.
    pub writer: u64,
    pub begin: u64,
    pub end: u64,
    /// Who wrote the entries: writer, first, last.
    pub runs: Vec<(u64, u64, u64)>,
}

impl Reading {
    pub fn entries(&self) -> u64 {
        self.runs.last().map_or(0, |r| r.2)
    }
}

/// All that was seen.
#[derive(Debug, Clone, Default)]
pub struct History {
    pub acks: Vec<Ack>,
    pub readings: Vec<Reading>,
    /// Damage: who saw what.
    pub torn: Vec<String>,
    /// Appends that failed: how many.
    pub failed: usize,
}

/// What is wrong with a history.
#[derive(Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Something was there in part, or was damaged.
    Torn(String),
    /// An acknowledged entry is not where it was.
    Lost(String),
    /// The order of the log is none, or contradicts time.
    Order(String),
    /// Two primaries had entries acknowledged at the same time.
    TwoPrimaries(String),
    /// The records themselves make no sense.
    Record(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Torn(s) => write!(f, "torn: {s}"),
            Wrong::Lost(s) => write!(f, "lost: {s}"),
            Wrong::Order(s) => write!(f, "out of order: {s}"),
            Wrong::TwoPrimaries(s) => write!(f, "two primaries: {s}"),
            Wrong::Record(s) => write!(f, "the record is wrong: {s}"),
        }
    }
}

/// What a sound history contained.
#[derive(Debug, PartialEq, Eq)]
pub struct Sound {
    /// Entries of the log.
    pub entries: u64,
    pub acknowledged: usize,
    /// Processes that wrote into it.
    pub writers: usize,
    pub readings: usize,
}

impl History {
    /// Takes in a client's records (`client.c`). A record that its process did
    /// not finish counts for nothing.
    pub fn read(&mut self, text: &str) {
        for line in text.lines() {
            let Some(line) = line.strip_suffix(" ;") else {
                continue;
            };
            let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
            let numbers = || -> Option<Vec<u64>> {
                rest.split(' ')
                    .map(|w| w.parse().ok())
                    .collect::<Option<Vec<u64>>>()
            };
            match kind {
                "A" => match numbers().as_deref() {
                    Some(&[writer, entry, before, after]) => self.acks.push(Ack {
                        writer,
                        entry,
                        before,
                        after,
                    }),
                    _ => self.torn.push(format!("no record: {line}")),
                },
                "S" => match reading(rest) {
                    Some(r) => self.readings.push(r),
                    None => self.torn.push(format!("no record: {line}")),
                },
                "E" => self.failed += 1,
                "T" => self.torn.push(rest.to_owned()),
                _ => self.torn.push(format!("no record: {line}")),
            }
        }
    }

    /// Whether one log explains all of it.
    pub fn check(&self) -> Result<Sound, Wrong> {
        if let Some(t) = self.torn.first() {
            return Err(Wrong::Torn(t.clone()));
        }
        let Some(longest) = self.readings.iter().max_by_key(|r| r.entries()) else {
            return Err(Wrong::Record("nobody read the log".into()));
        };
        let log = log_of(longest)?;
        self.check_readings(&log)?;
        let acks = self.check_acks(&log)?;
        self.check_time(&log, &acks)?;
        Ok(Sound {
            entries: log.len() as u64,
            acknowledged: self.acks.len(),
            writers: longest.runs.len(),
            readings: self.readings.len(),
        })
    }

    /// Every reading is a prefix of the longest, and none that began after
    /// another had ended is shorter.
    fn check_readings(&self, log: &[u64]) -> Result<(), Wrong> {
        for r in &self.readings {
            for (i, (have, want)) in log_of(r)?.iter().zip(log).enumerate() {
                if have != want {
                    return Err(Wrong::Lost(format!(
                        "entry {} was found as one of {have}, later as one of {want}",
                        i + 1
                    )));
                }
            }
        }
        let mut by_begin: Vec<&Reading> = self.readings.iter().collect();
        by_begin.sort_by_key(|r| r.begin);
        let mut by_end = by_begin.clone();
        by_end.sort_by_key(|r| r.end);
        let mut ended = by_end.into_iter().peekable();
        let mut most = 0;
        for r in by_begin {
            while let Some(e) = ended.next_if(|e| e.end < r.begin) {
                most = most.max(e.entries());
            }
            if r.entries() < most {
                return Err(Wrong::Lost(format!(
                    "{most} entries were found, then (at {}) {}",
                    r.begin,
                    r.entries()
                )));
            }
        }
        Ok(())
    }

    /// Every acknowledged entry is in the log as its writer's, was acknowledged
    /// once, and each writer's follow each other from what it had found on.
    fn check_acks<'a>(&'a self, log: &[u64]) -> Result<HashMap<u64, &'a Ack>, Wrong> {
        let mut found: HashMap<u64, u64> = self
            .readings
            .iter()
            .map(|r| (r.writer, r.entries()))
            .collect();
        let mut acks: HashMap<u64, &Ack> = HashMap::new();
        for a in &self.acks {
            if a.before > a.after {
                return Err(Wrong::Record(format!("{a:?} ended before it began")));
            }
            let Some(last) = found.get_mut(&a.writer) else {
                return Err(Wrong::Record(format!("{a:?} by nobody who had attached")));
            };
            if let Some(b) = acks.insert(a.entry, a) {
                return Err(Wrong::TwoPrimaries(format!("{a:?} and {b:?}")));
            }
            if a.entry != *last + 1 {
                return Err(Wrong::Order(format!("{a:?} after its entry {last}")));
            }
            *last = a.entry;
            match log.get(a.entry as usize - 1) {
                Some(w) if *w == a.writer => {}
                Some(w) => {
                    return Err(Wrong::Lost(format!("{a:?}, but the log has one of {w}")));
                }
                None => {
                    return Err(Wrong::Lost(format!(
                        "{a:?}, but the log has {} entries",
                        log.len()
                    )));
                }
            }
        }
        Ok(acks)
    }

    /// No operation comes in the log behind one that began after it had ended.
    fn check_time(&self, log: &[u64], acks: &HashMap<u64, &Ack>) -> Result<(), Wrong> {
        // When each writer can have begun its next entry: not before its own
        // last one was acknowledged, or it had read the log.
        let mut free: HashMap<u64, u64> = self.readings.iter().map(|r| (r.writer, r.end)).collect();
        // The latest beginning so far, and whose it is.
        let mut latest = (0, 0, 0);
        let mut begun = Vec::with_capacity(log.len());
        for (entry, &writer) in (1..).zip(log) {
            let Some(free) = free.get_mut(&writer) else {
                return Err(Wrong::Record(format!(
                    "entry {entry} is of {writer}, who had not attached"
                )));
            };
            let before = match acks.get(&entry) {
                Some(a) => {
                    if latest.0 > a.after {
                        let what = format!(
                            "{a:?} was acknowledged before entry {} of {} was begun at {}",
                            latest.1, latest.2, latest.0
                        );
                        return Err(if latest.2 == writer {
                            Wrong::Order(what)
                        } else {
                            Wrong::TwoPrimaries(what)
                        });
                    }
                    *free = a.after;
                    a.before
                }
                None => *free,
            };
            begun.push(before);
            if before > latest.0 {
                latest = (before, entry, writer);
            }
        }
        for r in &self.readings {
            if let Some(a) = self
                .acks
                .iter()
                .find(|a| a.entry > r.entries() && a.after < r.begin)
            {
                return Err(Wrong::Lost(format!(
                    "{a:?}, but at {} only {} entries were found",
                    r.begin,
                    r.entries()
                )));
            }
            let have = &begun[..r.entries() as usize];
            if let Some(i) = have.iter().position(|&b| b > r.end) {
                return Err(Wrong::Order(format!(
                    "entry {} was found by {}, but it was begun at {} only",
                    i + 1,
                    r.end,
                    have[i]
                )));
            }
        }
        Ok(())
    }
}

fn reading(text: &str) -> Option<Reading> {
    let (head, rest) = text.split_once(" :")?;
    let head: Vec<&str> = head.split(' ').collect();
    let &[writer, _node, begin, end, entries] = &head[..] else {
        return None;
    };
    let mut runs = Vec::new();
    for run in rest.split(',').map(str::trim).filter(|r| !r.is_empty()) {
        let mut words = run.split(' ').map(|w| w.parse().ok());
        runs.push((words.next()??, words.next()??, words.next()??));
    }
    let r = Reading {
        writer: writer.parse().ok()?,
        begin: begin.parse().ok()?,
        end: end.parse().ok()?,
        runs,
    };
    (r.entries() == entries.parse::<u64>().ok()?).then_some(r)
}

/// Who wrote each entry. Nobody's turn comes twice.
fn log_of(r: &Reading) -> Result<Vec<u64>, Wrong> {
    let mut log = Vec::new();
    for (i, &(writer, from, to)) in r.runs.iter().enumerate() {
        if from != log.len() as u64 + 1 || to < from {
            return Err(Wrong::Record(format!("a run from {from} to {to}")));
        }
        if r.runs[..i].iter().any(|w| w.0 == writer) {
            return Err(Wrong::TwoPrimaries(format!(
                "{writer} wrote before and after another, again from entry {from} on"
            )));
        }
        log.resize(to as usize, writer);
    }
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(writer: u64, entry: u64, before: u64, after: u64) -> Ack {
        Ack {
            writer,
            entry,
            before,
            after,
        }
    }

    fn found(writer: u64, begin: u64, end: u64, runs: &[(u64, u64, u64)]) -> Reading {
        Reading {
            writer,
            begin,
            end,
            runs: runs.to_vec(),
        }
    }

    /// Writer 1 has three entries acknowledged and a fourth in doubt; 2 takes
    /// over, finds the fourth and appends two; then somebody reads all.
    fn sound() -> History {
        History {
            acks: vec![
                ack(1, 1, 20, 30),
                ack(1, 2, 31, 40),
                ack(1, 3, 41, 50),
                ack(2, 5, 121, 130),
                ack(2, 6, 131, 140),
            ],
            readings: vec![
                found(1, 10, 19, &[]),
                found(2, 100, 120, &[(1, 1, 4)]),
                found(0, 200, 210, &[(1, 1, 4), (2, 5, 6)]),
            ],
            torn: vec![],
            failed: 1,
        }
    }

    fn rejected(change: impl FnOnce(&mut History)) -> Wrong {
        let mut h = sound();
        change(&mut h);
        h.check().expect_err("a tampered history was accepted")
    }

    #[test]
    fn a_sound_history_is_accepted() {
        let s = sound().check().unwrap();
        assert_eq!((s.entries, s.acknowledged, s.writers), (6, 5, 2));
        // Nor is the entry in doubt needed.
        let mut h = sound();
        h.readings[1].runs = vec![(1, 1, 3)];
        h.acks[3].entry = 4;
        h.acks[4].entry = 5;
        h.readings[2].runs = vec![(1, 1, 3), (2, 4, 5)];
        h.check().unwrap();
    }

    /// A call that began before the new primary's first one ended may still be
    /// acknowledged, if the log has it before: it took effect in time.
    #[test]
    fn a_late_answer_is_accepted() {
        let mut h = sound();
        h.acks.push(ack(1, 4, 51, 500));
        h.check().unwrap();
    }

    #[test]
    fn what_was_torn_is_rejected() {
        let w = rejected(|h| h.torn.push("entry 3".into()));
        assert!(matches!(w, Wrong::Torn(_)), "{w}");
    }

    #[test]
    fn a_lost_entry_is_rejected() {
        let w = rejected(|h| h.readings[2].runs = vec![(1, 1, 4), (2, 5, 5)]);
        assert!(matches!(w, Wrong::Lost(_)), "{w}");
        // Lost for the new primary only, which went on without it.
        let w = rejected(|h| h.acks.push(ack(1, 5, 51, 60)));
        assert!(matches!(w, Wrong::TwoPrimaries(_) | Wrong::Order(_)), "{w}");
        let w = rejected(|h| {
            h.readings[1].runs = vec![(1, 1, 2)];
            h.acks[3].entry = 3;
            h.acks[4].entry = 4;
            h.readings[2].runs = vec![(1, 1, 2), (2, 3, 4)];
        });
        assert!(matches!(w, Wrong::TwoPrimaries(_) | Wrong::Lost(_)), "{w}");
    }

    /// Found after a view change, gone after the next one.
    #[test]
    fn an_entry_that_was_seen_and_is_gone_is_rejected() {
        let w = rejected(|h| {
            h.readings[2].runs = vec![(1, 1, 3), (2, 4, 5)];
            h.acks[3].entry = 4;
            h.acks[4].entry = 5;
        });
        assert!(matches!(w, Wrong::Lost(_) | Wrong::Order(_)), "{w}");
        let w = rejected(|h| h.readings.push(found(0, 300, 310, &[(1, 1, 4)])));
        assert!(matches!(w, Wrong::Lost(_)), "{w}");
    }

    #[test]
    fn a_reading_that_lacks_what_was_acknowledged_before_is_rejected() {
        let w = rejected(|h| {
            h.acks.truncate(3);
            h.readings[1].runs = vec![(1, 1, 2)];
            h.readings.truncate(2);
            h.readings.push(found(0, 60, 100, &[(1, 1, 3)]));
        });
        assert!(matches!(w, Wrong::Lost(_)), "{w}");
    }

    #[test]
    fn a_reading_of_what_was_not_begun_is_rejected() {
        let w = rejected(|h| h.readings.push(found(0, 101, 119, &[(1, 1, 4), (2, 5, 6)])));
        assert!(matches!(w, Wrong::Order(_)), "{w}");
    }

    #[test]
    fn an_entry_acknowledged_twice_is_rejected() {
        let w = rejected(|h| h.acks.push(ack(2, 3, 141, 150)));
        assert!(matches!(w, Wrong::TwoPrimaries(_)), "{w}");
    }

    #[test]
    fn a_writer_that_goes_on_behind_another_is_rejected() {
        let w = rejected(|h| {
            h.acks.push(ack(1, 4, 51, 60));
            h.acks.push(ack(1, 7, 141, 150));
            h.readings[2].runs = vec![(1, 1, 4), (2, 5, 6), (1, 7, 7)];
        });
        assert!(matches!(w, Wrong::TwoPrimaries(_)), "{w}");
    }

    /// The old primary's call began when the new one's first was acknowledged
    /// already, and was acknowledged all the same.
    #[test]
    fn an_old_primary_that_commits_after_a_view_change_is_rejected() {
        let w = rejected(|h| h.acks.push(ack(1, 4, 135, 150)));
        assert!(matches!(w, Wrong::TwoPrimaries(_)), "{w}");
    }

    #[test]
    fn an_order_against_time_is_rejected() {
        let w = rejected(|h| h.acks[1] = ack(1, 2, 15, 18));
        assert!(matches!(w, Wrong::Order(_)), "{w}");
        let w = rejected(|h| h.acks.swap(0, 1));
        assert!(matches!(w, Wrong::Order(_)), "{w}");
    }

    #[test]
    fn an_entry_of_nobody_is_rejected() {
        let w = rejected(|h| h.readings[2].runs = vec![(1, 1, 4), (2, 5, 6), (3, 7, 7)]);
        assert!(matches!(w, Wrong::Record(_)), "{w}");
    }

    #[test]
    fn records_are_read_and_unfinished_ones_left_out() {
        let mut h = History::default();
        h.read("\nS 7 0 1 2 3 : 5 1 2 , 6 3 3 , ;\n\nA 7 4 10 20 ;\n\nE 7 5 1 2 110 ;\nA 7 6 1\nA 7 6 1 2\n\nT 9 of 3 entries, entry 2 ;\n");
        assert_eq!(h.acks, [ack(7, 4, 10, 20)]);
        assert_eq!(h.readings, [found(7, 1, 2, &[(5, 1, 2), (6, 3, 3)])]);
        assert_eq!((h.failed, h.torn.len()), (1, 1));
        h.read("A 7 x ;\n");
        assert_eq!(h.torn.len(), 2);
        h.read("S 7 0 1 2 4 : 5 1 2 , ;\n");
        assert_eq!(h.torn.len(), 3);
    }
}
