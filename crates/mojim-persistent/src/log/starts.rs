//! Where records begin: a sparse index in ordinary memory, made while the log is opened.
//!
//! A walk over the records' lengths tells a position that is a record's from one that is not. It
//! starts at the first record that begins in the same span.
//!
//! Invariants:
//!
//! - From the first record of a span on, records follow each other up to the log's end.
//! - No record before the head is known: its words may be in use again.

/// Words of a span: the most records that are walked over.
const SPAN: u64 = 4096;

/// Of each span of the ring the position of its first record, plus one; 0: none is known.
pub struct Starts(Vec<u64>);

impl Starts {
    /// For a ring of as many words.
    pub fn new(words: usize) -> Starts {
        // One more for the ring, which may begin within a span, and one for its remainder.
        Starts(vec![0; words / SPAN as usize + 2])
    }

    fn slot(&self, at: u64) -> usize {
        (at / SPAN % self.0.len() as u64) as usize
    }

    /// The first record of a position's span, if it is not behind the position.
    pub fn before(&self, at: u64) -> Option<u64> {
        let first = self.0[self.slot(at)].checked_sub(1)?;
        (first / SPAN == at / SPAN && first <= at).then_some(first)
    }

    /// A record begins at a position, behind all others.
    pub fn push(&mut self, at: u64) {
        if self.before(at).is_none() {
            self.cut(at);
        }
    }

    /// The records before a position are discarded.
    pub fn cut(&mut self, at: u64) {
        let slot = self.slot(at);
        self.0[slot] = at + 1;
    }
}
