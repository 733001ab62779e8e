//! How far the records in a copy's logs are applied.
//!
//! Invariants:
//! - The cursors change together with `applied`, at the ends of whole sync points.
//! - Both are only changed under the applier's lock.

use std::collections::VecDeque;
use std::sync::Arc;

use mojim_format::{Op, OpKind};

use crate::area::IMAGE_PAGE;
use crate::log::Log;

pub(super) struct Applier {
    pub(super) cursors: Vec<u64>,
    pub(super) applied: u64,
    /// Where the cursors were after some LSNs, ascending: a reader of the logs
    /// need not search for these places.
    pub(super) marks: VecDeque<(u64, Vec<u64>)>,
    /// Another one when other files took the place of those that the records went to.
    pub(super) life: Arc<()>,
    waiting: Waiting,
    names: Names,
}

/// Pages of records behind the cursors, counted as far as `at`.
#[derive(Default)]
struct Waiting {
    at: Vec<u64>,
    pages: u64,
}

/// Changes of names of whole sync points behind the cursors, counted as far as `at`.
#[derive(Default)]
struct Names {
    at: Vec<u64>,
    count: usize,
    /// For each log, those of the sync point that has not ended there.
    begun: Vec<usize>,
}

/// Whether an operation changes names.
pub(super) fn changes_names(op: &Op) -> bool {
    !matches!(op.kind, OpKind::Write | OpKind::Resize)
}

/// Most of an applier's marks.
pub(super) const MARKS: usize = 64;

impl Applier {
    pub(super) fn at(cursors: Vec<u64>, applied: u64) -> Applier {
        Applier {
            cursors,
            applied,
            marks: VecDeque::new(),
            life: Arc::default(),
            waiting: Waiting::default(),
            names: Names::default(),
        }
    }

    /// Positions in the logs changed: what waits is counted anew.
    pub(super) fn recount(&mut self) {
        self.waiting = Waiting::default();
        self.names = Names::default();
    }

    /// Counts the changes of names in whole sync points up to `limit` that were appended since the
    /// last call. Returns how many wait.
    pub(super) fn count_names(&mut self, logs: &[Log], limit: u64) -> usize {
        let n = &mut self.names;
        if n.at.is_empty() {
            n.at = self.cursors.clone();
            n.begun = vec![0; logs.len()];
        }
        for ((log, at), begun) in logs.iter().zip(&mut n.at).zip(&mut n.begun) {
            let mut records = log.records(*at);
            while let Some(r) = records.next_if(|r| r.header.lsn <= limit) {
                *begun += r.ops().filter(|(op, _)| changes_names(op)).count();
                if r.header.end {
                    n.count += std::mem::take(begun);
                }
            }
            *at = records.position();
        }
        n.count
    }

    /// Counts the pages of records that were appended since the last call, until there
    /// are `most`. Returns the count of all waiting pages.
    pub(super) fn count(&mut self, logs: &[Log], most: u64) -> u64 {
        let w = &mut self.waiting;
        if w.at.is_empty() {
            w.at = self.cursors.clone();
        }
        for (log, at) in logs.iter().zip(&mut w.at) {
            let mut records = log.records(*at);
            while w.pages < most
                && let Some(r) = records.next()
            {
                w.pages += r
                    .ops()
                    .map(|(op, payload)| pages(&op, payload))
                    .sum::<u64>();
            }
            *at = records.position();
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
