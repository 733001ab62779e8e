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

    /// The sync point at the cursor of `lane` is applied. It changes `names` names and ends with
    /// LSN `applied`; behind it is the position `next`. [`Applier::recount_pages`] is to be called,
    /// once for many of these.
    pub(super) fn advance(&mut self, lane: usize, next: u64, applied: u64, names: usize) {
        self.cursors[lane] = next;
        self.applied = applied;
        let n = &mut self.names;
        match n.at.get_mut(lane) {
            // It is counted.
            Some(at) if *at >= next => n.count -= names,
            Some(at) => (*at, n.begun[lane]) = (next, 0),
            None => {}
        }
    }

    /// Pages that wait are counted anew.
    pub(super) fn recount_pages(&mut self) {
        self.waiting = Waiting::default();
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

#[cfg(test)]
mod tests {
    use mojim_config::MediumKind;
    use mojim_env::Env;
    use mojim_format::RecordWriter;

    use super::*;
    use crate::log::{LogIdentity, LogSpec};

    /// A part of a sync point, with some changes of names.
    fn append(log: &Log, lsn: u64, (part, end): (u32, bool), names: usize) -> bool {
        let len = RecordWriter::len_for(names + 1, 900);
        let Some(at) = log.place(log.head(), len) else {
            return false;
        };
        // SAFETY: this thread alone appends, at the place found for the present head.
        let slot = unsafe { log.slot(log.head(), at, len, 7, lsn) };
        let mut w = RecordWriter::new(slot, names + 1);
        let op = |kind, len| Op {
            file: 1,
            kind,
            offset: 0,
            len,
        };
        for _ in 0..names {
            w.op(op(OpKind::Remove, 0));
        }
        w.op(op(OpKind::Write, 900));
        w.payload(&[1; 900]);
        w.finish(7, lsn, 1, part, end, 0);
        log.publish(at, len);
        true
    }

    /// Behind each sync point that is applied, and at limits in the middle of others, the count is
    /// what a count from the cursors gives. The sync points have several parts and lie in two logs,
    /// which begin anew at their ends.
    #[test]
    fn what_waits_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let env: Arc<dyn Env> = Arc::new(mojim_linux::Os::new().unwrap());
        let known = LogIdentity {
            incarnation: 5,
            nonce: 6,
            or: 0,
        };
        let logs = [0, 1].map(|lane| {
            let spec = LogSpec {
                lane,
                medium: MediumKind::Dram,
                path: dir.path().join(format!("log.{lane}")),
                ring: dir.path().join(format!("ring.{lane}")),
                size: 64 << 10,
            };
            Log::open(&env, spec, 64, known, 0, None).unwrap().0
        });
        let mut a = Applier::at(vec![0; 2], 0);
        let (mut lsn, mut seed) = (0, 1u64);
        // The lane, the LSN and the changes of names of each sync point that waits.
        let mut waiting = VecDeque::new();
        for _ in 0..3000 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let lane = (seed >> 8) as usize % 2;
            if seed % 2 == 0 && waiting.len() < 20 {
                let (parts, mut names) = (1 + (seed >> 16) as u32 % 3, 0);
                for part in 0..parts {
                    let more = (seed >> 24) as usize % 3 * part as usize;
                    lsn += 1;
                    assert!(append(&logs[lane], lsn, (part, part + 1 == parts), more));
                    names += more;
                }
                waiting.push_back((lane, lsn, names));
            } else if let Some((lane, end, names)) = waiting.pop_front() {
                if seed % 3 > 0 {
                    // Maybe in the middle of a sync point.
                    a.count_names(&logs, end + (seed >> 32) % 5);
                }
                let mut records = logs[lane].records(a.cursors[lane]);
                let last = records.find(|r| r.header.lsn == end).unwrap();
                a.advance(lane, last.next, end, names);
                logs[lane].release(a.cursors[lane]);
            }
            if seed % 5 == 0 {
                let mut fresh = Applier::at(a.cursors.clone(), a.applied);
                let counted = fresh.count_names(&logs, u64::MAX);
                assert_eq!(a.count_names(&logs, u64::MAX), counted);
                assert_eq!(counted, waiting.iter().map(|w| w.2).sum());
            }
        }
        assert!(logs.iter().all(|log| log.start() > 10 * log.size()));
    }
}
