//! The receiving end of one connection: which records may enter its log.
//!
//! Invariant: the LSNs that enter one lane's log strictly ascend, each in the
//! epoch that the history gives it. Anything else ends the link.

use crate::History;
use mojim_format::RecordHeader;

/// What to do with a record that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// Put it into the log.
    Accept,
    /// The record is in the log already: acknowledge it again.
    Duplicate,
    /// The peer broke the protocol.
    Refuse(String),
}

/// One lane's receiving state.
#[derive(Debug, Clone)]
pub struct LaneIn {
    volume: u64,
    last: u64,
    /// Part number that must come next, 0 between sync points.
    next_part: u32,
}

impl LaneIn {
    /// A lane whose log ends with the record of LSN `last` (0: no record).
    /// `next_part` is 0 if that record was the last part of its sync point.
    pub fn new(volume: u64, last: u64, next_part: u32) -> LaneIn {
        LaneIn {
            volume,
            last,
            next_part,
        }
    }

    /// LSN of the last record accepted, which is acknowledged.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Decides on a record. One that is accepted counts as in the log from here on.
    #[inline]
    pub fn arrive(&mut self, h: &RecordHeader, history: &History) -> Arrival {
        if h.volume != self.volume {
            return Arrival::Refuse(format!(
                "record of volume {:#x} on a link of volume {:#x}",
                h.volume, self.volume
            ));
        }
        let born = history.epoch_at(h.lsn);
        if born != Some(h.epoch) {
            return Arrival::Refuse(format!(
                "record {} of epoch {}, but that number belongs to epoch {}",
                h.lsn,
                h.epoch,
                born.unwrap_or(0)
            ));
        }
        if h.lsn <= self.last {
            return Arrival::Duplicate;
        }
        // Parts of a split sync point are consecutive, in LSN and on one lane (Mojim 4.2).
        if h.part != self.next_part || (h.part > 0 && h.lsn != self.last + 1) {
            return Arrival::Refuse(format!(
                "record {} is part {}, part {} expected",
                h.lsn, h.part, self.next_part
            ));
        }
        self.last = h.lsn;
        self.next_part = if h.end { 0 } else { h.part + 1 };
        Arrival::Accept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rec(lsn: u64, epoch: u64, part: u32, end: bool) -> RecordHeader {
        RecordHeader {
            volume: 7,
            lsn,
            epoch,
            len: 56,
            ops: 0,
            part,
            end,
            committed: 0,
        }
    }

    #[test]
    fn only_ascending_records_of_their_epoch_enter() {
        let mut h = History::default();
        h.begin(1, 1, 0);
        h.begin(2, 10, 0);
        let mut l = LaneIn::new(7, 0, 0);
        assert_eq!(l.arrive(&rec(3, 1, 0, true), &h), Arrival::Accept);
        assert_eq!(l.arrive(&rec(3, 1, 0, true), &h), Arrival::Duplicate);
        assert_eq!(l.arrive(&rec(9, 1, 0, true), &h), Arrival::Accept);
        assert!(matches!(
            l.arrive(&rec(10, 1, 0, true), &h),
            Arrival::Refuse(_)
        ));
        assert_eq!(l.arrive(&rec(10, 2, 0, false), &h), Arrival::Accept);
        assert!(matches!(
            l.arrive(&rec(12, 2, 1, true), &h),
            Arrival::Refuse(_)
        ));
        assert_eq!(l.arrive(&rec(11, 2, 1, true), &h), Arrival::Accept);
        assert!(matches!(
            l.arrive(&rec(12, 2, 1, true), &h),
            Arrival::Refuse(_)
        ));
    }
}
