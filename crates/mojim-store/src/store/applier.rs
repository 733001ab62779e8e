//! How far the records in a copy's logs are applied.
//!
//! Invariant: the cursors change together with `applied`, at the ends of whole sync
//! points; both are only changed under the applier's lock.

use std::collections::VecDeque;

use mojim_format::{Op, OpKind};

use crate::area::IMAGE_PAGE;
use crate::log::Log;

pub(super) struct Applier {
    pub(super) cursors: Vec<u64>,
    pub(super) applied: u64,
    /// The cursors at the last checkpoint.
    pub(super) durable: Vec<u64>,
    /// Where the cursors were after some LSNs, ascending: a reader of the logs
    /// need not search for these places.
    pub(super) marks: VecDeque<(u64, Vec<u64>)>,
    waiting: Waiting,
}

/// Pages of records behind the cursors, counted as far as `at`.
#[derive(Default)]
struct Waiting {
    at: Vec<u64>,
    pages: u64,
}

/// Most of an applier's marks.
pub(super) const MARKS: usize = 64;

impl Applier {
    pub(super) fn at(cursors: Vec<u64>, applied: u64) -> Applier {
        Applier {
            durable: cursors.clone(),
            cursors,
            applied,
            marks: VecDeque::new(),
            waiting: Waiting::default(),
        }
    }

    /// Positions in the logs changed: the waiting pages are counted anew.
    pub(super) fn recount(&mut self) {
        self.waiting = Waiting::default();
    }

    /// Counts the pages of records that were appended since the last call, until there
    /// are `most`. Returns the count of all waiting pages.
    pub(super) fn count(&mut self, logs: &[Log], most: u64) -> u64 {
        let w = &mut self.waiting;
        if w.at.is_empty() {
            w.at = self.cursors.clone();
        }
        for (log, at) in logs.iter().zip(&mut w.at) {
            while w.pages < most
                && let Some((r, _, next)) = log.record(*at)
            {
                w.pages += r
                    .ops()
                    .map(|(op, payload)| pages(&op, payload))
                    .sum::<u64>();
                *at = next;
            }
        }
        w.pages
    }
}

/// Pages that an operation touches.
fn pages(op: &Op, payload: &[u8]) -> u64 {
    if op.kind != OpKind::Write || payload.is_empty() {
        return 1;
    }
    let last = op.offset + payload.len() as u64 - 1;
    last / IMAGE_PAGE as u64 - op.offset / IMAGE_PAGE as u64 + 1
}
