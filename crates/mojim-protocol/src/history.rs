//! The epoch in which each LSN was born, as far back as a copy remembers.
//!
//! Two copies agree up to LSN x if and only if both have the same epoch for x, for two reasons:
//!
//! - Within an epoch there is one primary, which gives each LSN one record.
//! - A primary begins an epoch only after adopting what the epoch before left.
//!
//! Invariants: epochs strictly ascend, first LSNs never descend.

use mojim_format::{EpochStart, superblock::MAX_HISTORY};

/// First LSNs of epochs, ascending. LSNs below the first entry are unknown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct History(Vec<EpochStart>);

impl History {
    /// From stored entries; `None` if they are out of order.
    pub fn from_entries(entries: &[EpochStart]) -> Option<History> {
        let ordered = entries
            .windows(2)
            .all(|w| w[0].epoch < w[1].epoch && w[0].first_lsn <= w[1].first_lsn);
        (ordered && entries.len() <= MAX_HISTORY).then(|| History(entries.to_vec()))
    }

    /// The entries, for storing.
    pub fn entries(&self) -> &[EpochStart] {
        &self.0
    }

    /// The last epoch; 0 before the first.
    pub fn last_epoch(&self) -> u64 {
        self.0.last().map_or(0, |e| e.epoch)
    }

    /// Begins `epoch` at `first_lsn`, and forgets earlier entries from there on.
    /// Beyond half of what a superblock holds, drops the oldest entries whose epochs
    /// end at or below `checkpoint`; beyond all of it, any oldest entries.
    pub fn begin(&mut self, epoch: u64, first_lsn: u64, checkpoint: u64) {
        assert!(epoch > self.last_epoch(), "epochs only grow");
        while self.0.last().is_some_and(|e| e.first_lsn >= first_lsn) {
            self.0.pop();
        }
        self.0.push(EpochStart { epoch, first_lsn });
        while self.0.len() > MAX_HISTORY / 2 && self.0[1].first_lsn <= checkpoint {
            self.0.remove(0);
        }
        while self.0.len() > MAX_HISTORY {
            self.0.remove(0);
        }
    }

    /// The epoch in which `lsn` was (or would be) born.
    #[inline]
    pub fn epoch_at(&self, lsn: u64) -> Option<u64> {
        self.0
            .iter()
            .rev()
            .find(|e| e.first_lsn <= lsn)
            .map(|e| e.epoch)
    }

    /// First LSN of the epoch that `lsn` belongs to.
    fn start_of(&self, lsn: u64) -> Option<u64> {
        self.0
            .iter()
            .rev()
            .find(|e| e.first_lsn <= lsn)
            .map(|e| e.first_lsn)
    }

    /// The largest LSN up to which a copy with this history and `tail` and one
    /// with `theirs` and `their_tail` hold the same records. 0 if they share
    /// none; `None` if that LSN is older than what both histories remember.
    pub fn common(&self, tail: u64, theirs: &History, their_tail: u64) -> Option<u64> {
        let mut x = tail.min(their_tail);
        while x > 0 {
            let (mine, other) = (self.epoch_at(x)?, theirs.epoch_at(x)?);
            if mine == other {
                return Some(x);
            }
            x = self.start_of(x)?.max(theirs.start_of(x)?) - 1;
        }
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h(e: &[(u64, u64)]) -> History {
        let v: Vec<_> = e
            .iter()
            .map(|&(epoch, first_lsn)| EpochStart { epoch, first_lsn })
            .collect();
        History::from_entries(&v).unwrap()
    }

    #[test]
    fn the_fork_is_found() {
        // a wrote 1..=120 in epoch 1; b was promoted at 100 and wrote 101..=150 in epoch 2.
        let (a, b) = (h(&[(1, 1)]), h(&[(1, 1), (2, 101)]));
        assert_eq!(a.common(120, &b, 150), Some(100));
        assert_eq!(b.common(150, &a, 120), Some(100));
        assert_eq!(a.common(90, &b, 150), Some(90));
        // nothing in common
        assert_eq!(h(&[(1, 1)]).common(5, &h(&[(2, 1)]), 9), Some(0));
        // below what is remembered
        assert_eq!(h(&[(3, 50)]).common(60, &h(&[(4, 40)]), 60), None);
    }

    #[test]
    fn an_epoch_that_got_no_record_is_forgotten() {
        let mut x = h(&[(1, 1), (2, 10)]);
        x.begin(3, 10, 0);
        assert_eq!(x.epoch_at(10), Some(3));
        assert_eq!(x.epoch_at(9), Some(1));
        assert_eq!(x.entries().len(), 2);
    }

    #[test]
    fn it_stays_within_a_superblock() {
        let mut x = History::default();
        for e in 1..1000 {
            x.begin(e, e * 10, e * 10 - 1);
        }
        assert!(x.entries().len() <= MAX_HISTORY);
        assert_eq!(x.epoch_at(9_990), Some(999));
    }
}
