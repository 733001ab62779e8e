//! How long the chunks of a region have been open, and which of them a collect closes: "When a
//! chunk is closed" of `two_level.rs`.
//!
//! Invariant: only chunks that lie wholly in what was collected are chosen, and none that the
//! collect has found written.

use std::ops::Range;

use crate::track::tracker::push;

/// Collects without a store after which a chunk is closed, at first.
const FIRST: u32 = 2;
/// The most collects without a store after which a chunk is closed.
const MOST: u32 = 64;
/// A chunk that is opened within so many collects after it was closed was closed too soon.
const SOON: u32 = 64;
/// Each collect closes at most one in so many of the open chunks, or [`FEW`] if that is more.
const SHARE: usize = 64;
const FEW: usize = 2;

/// How long chunks have been open.
pub(super) struct Ages {
    /// Counts the collects, without 0.
    now: u32,
    /// By chunk: when it was last found stored to; 0 if it was not since it was closed.
    seen: Vec<u32>,
    /// When it was closed; 0: never.
    closed: Vec<u32>,
    /// How long it stays open.
    life: Vec<u32>,
    /// Runs of chunks that are open, of this collect.
    pub(super) open: Vec<Range<usize>>,
    /// The chunks to be closed.
    pub(super) closing: Vec<Range<usize>>,
}

impl Ages {
    pub(super) fn new(chunks: usize) -> Ages {
        Ages {
            now: 0,
            // Zeroed by the kernel as they are touched.
            seen: vec![0; chunks],
            closed: vec![0; chunks],
            life: vec![0; chunks],
            open: Vec::new(),
            closing: Vec::new(),
        }
    }

    /// Chooses which of the open chunks in `whole` to close, after a collect that has found
    /// `written`, in bytes.
    pub(super) fn choose(&mut self, whole: &Range<usize>, chunk: usize, written: &[Range<usize>]) {
        self.now = self.now.wrapping_add(1).max(1);
        self.closing.clear();
        let within = |run: &Range<usize>| run.start.max(whole.start)..run.end.min(whole.end);
        let open = self.open.iter().map(within);
        let mut left = (open.clone().map(|r| r.len()).sum::<usize>() / SHARE).max(FEW);
        let mut written = written.iter().peekable();
        for c in open.flatten() {
            while written.next_if(|w| w.end <= c * chunk).is_some() {}
            if written.peek().is_some_and(|w| w.start < (c + 1) * chunk) {
                if self.seen[c] == 0 {
                    let since = self.now.wrapping_sub(self.closed[c]);
                    self.life[c] = match self.closed[c] != 0 && since < SOON {
                        true => (self.life[c] * 2).clamp(FIRST, MOST),
                        false => FIRST,
                    };
                }
                self.seen[c] = self.now;
            } else if (self.seen[c] == 0 || self.now.wrapping_sub(self.seen[c]) >= self.life[c])
                && left > 0
            {
                left -= 1;
                self.seen[c] = 0;
                self.closed[c] = self.now;
                push(&mut self.closing, 0, c..c + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // lists of ranges are what is tested

    use super::*;

    /// One collect that finds these chunks written, of those open; gives what is closed.
    fn step(ages: &mut Ages, open: &mut Vec<usize>, written: &[usize]) -> Vec<usize> {
        for c in written {
            if !open.contains(c) {
                open.push(*c);
            }
        }
        open.sort_unstable();
        ages.open.clear();
        for c in &*open {
            push(&mut ages.open, 0, *c..c + 1);
        }
        let pages: Vec<_> = written.iter().map(|c| c * 10 + 3..c * 10 + 4).collect();
        let whole = 0..ages.seen.len();
        ages.choose(&whole, 10, &pages);
        let closed: Vec<usize> = ages.closing.iter().cloned().flatten().collect();
        open.retain(|c| !closed.contains(c));
        closed
    }

    #[test]
    fn a_chunk_here_and_there_is_soon_closed() {
        let mut ages = Ages::new(10_000);
        let mut open = Vec::new();
        for n in 0..1000 {
            step(&mut ages, &mut open, &[n * 7]);
            assert!(open.len() <= FIRST as usize, "{open:?}");
        }
    }

    #[test]
    fn what_is_stored_to_often_stays_open() {
        let mut ages = Ages::new(100);
        let mut open = Vec::new();
        let mut opened = 0;
        for n in 0..2000 {
            let hot = [n % 20];
            opened += usize::from(!open.contains(&hot[0]));
            step(&mut ages, &mut open, &hot);
        }
        assert!(opened < 20 * 8, "opened {opened} times");
        assert_eq!(open.len(), 20);
    }

    #[test]
    fn a_region_just_filled_is_closed_bit_by_bit() {
        let mut ages = Ages::new(6400);
        let mut open = Vec::new();
        let all: Vec<usize> = (0..6400).collect();
        assert!(step(&mut ages, &mut open, &all).is_empty());
        assert!(step(&mut ages, &mut open, &[]).is_empty());
        assert_eq!(
            step(&mut ages, &mut open, &[]),
            (0..100).collect::<Vec<_>>()
        );
        let mut steps = 0;
        while !open.is_empty() {
            step(&mut ages, &mut open, &[]);
            steps += 1;
        }
        assert!(steps < 500, "{steps}");
    }

    #[test]
    fn only_whole_chunks_are_closed() {
        let mut ages = Ages::new(10);
        ages.open = vec![2..6];
        ages.choose(&(3..5), 10, &[]);
        assert_eq!(ages.closing, [3..5]);
    }
}
