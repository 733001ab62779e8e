//! Sync points that are larger than the log, which go through a spill file.
//!
//! Owns when a program makes such a sync point, what it writes, and what became of it. It
//! takes the shipped path step by step (`Primary::try_spill_now`), so that anything may
//! happen between the file and its record. Meanwhile the program leaves names and sizes
//! alone: the changes in the spill file must still be possible when the record comes.

use mojim_replica::pace::Pace;
use mojim_replica::primary::{Begun, Primary};

use super::node::{NAMES, Pending, Prim, Role, Spill};
use super::state::{Checked, Cluster};
use crate::model::{Files, ModelOp};
use crate::rng::Rng;

/// One of this many sync points is larger than the log, in a seed with spill files.
const ONE_OF: u64 = 12;

/// The most spill files at a time.
const MOST: usize = 2;

impl Cluster {
    /// Whether the next sync point goes through a spill file.
    pub(super) fn is_time_for_spill(&mut self) -> bool {
        let rng = self.spills.as_mut();
        rng.is_some_and(|rng| rng.below(ONE_OF) == 0)
    }

    /// The program on node `n`, whose primary is ready, begins a spill file.
    pub(super) fn begin_spill(&mut self, n: usize) -> Checked {
        let (Role::Primary(prim), Some(rng)) = (&self.nodes[n].role, &mut self.spills) else {
            return Ok(());
        };
        let (p, head) = (prim.p.clone(), prim.head);
        let plain = match prim.spills.len() {
            0 => false,
            MOST => return Ok(()),
            _ if prim.spills.iter().all(Spill::is_plain) => true,
            _ => return Ok(()),
        };
        let files = self.check.points[head].files.clone();
        let Some(changes) = changes(rng, &files, plain, &p) else {
            return Ok(());
        };
        let pieces: Vec<_> = changes.iter().map(ModelOp::piece).collect();
        match p.try_spill_now(&pieces) {
            Ok(way) => {
                self.spilled.begun += 1;
                self.note(|| format!("node {} begins to spill {changes:?}", NAMES[n]));
                if let Role::Primary(prim) = &mut self.nodes[n].role {
                    prim.spills.push(Spill { way, changes });
                }
            }
            Err(e) => {
                self.spilled.failed += 1;
                self.note(|| format!("no spill file: {e}"));
            }
        }
        self.observe(n)
    }

    /// One turn of one of the threads that wait for a spill file's record.
    pub(super) fn spill_turn(&mut self, n: usize) -> Checked {
        let lanes = self.setup.lanes as u64;
        let (Role::Primary(prim), Some(rng)) = (&mut self.nodes[n].role, &mut self.spills) else {
            return Ok(());
        };
        let Prim { p, spills, .. } = &mut **prim;
        if spills.is_empty() {
            return Ok(());
        }
        let i = rng.below(spills.len() as u64) as usize;
        let lane = rng.below(lanes) as usize;
        let (before, by_mirror) = (p.last(), p.rule().mirror || p.is_linked());
        let done = p.spill_step(&mut spills[i].way, lane);
        if let Ok(None) = done {
            // As in `wait_for_room`.
            for l in 0..self.setup.lanes {
                let _ = p.drive(l);
            }
            let _ = p.checkpoint_step(Pace::Busy);
            return self.observe(n);
        }
        let Spill { way, changes } = spills.remove(i);
        p.spill_over(&way, done.is_ok());
        let (head, epoch) = (prim.head, prim.epoch);
        match done {
            Ok(Some(Begun {
                lsn: last, lane, ..
            })) => {
                self.appended += 1;
                match by_mirror {
                    true => self.spilled.confirmed += 1,
                    false => self.spilled.alone += 1,
                }
                let point = self
                    .check
                    .appended(n, head, epoch, before + 1, last, &changes)?;
                let since = self.world.now();
                self.note(|| format!("appended LSN {last} on lane {lane}, of a spill file"));
                if let Role::Primary(prim) = &mut self.nodes[n].role {
                    prim.head = point;
                    prim.pending.push_back(Pending {
                        point,
                        since,
                        spilled: true,
                    });
                }
            }
            Ok(None) => unreachable!("handled above"),
            Err(e) => {
                self.spilled.failed += 1;
                self.note(|| format!("no record of a spill file: {e}"));
            }
        }
        self.observe(n)
    }
}

/// The changes: large enough for a spill file; if `plain`, without changes of names or
/// sizes.
fn changes(rng: &mut Rng, files: &Files, plain: bool, p: &Primary) -> Option<Vec<ModelOp>> {
    if files.is_empty() {
        return None;
    }
    let mut out = Vec::new();
    let mut sizes: Vec<(u32, u64)> = files
        .iter()
        .map(|(id, f)| (*id, f.data.len() as u64))
        .collect();
    for _ in 0..8 {
        let i = rng.below(sizes.len() as u64) as usize;
        let (file, size) = &mut sizes[i];
        if !plain && (*size < 20_000 || rng.below(8) == 0) {
            *size = rng.between(20_000, 60_000);
            out.push(ModelOp::Resize {
                file: *file,
                size: *size,
            });
        }
        if *size == 0 {
            continue;
        }
        let len = rng.between(*size / 2 + 1, *size);
        let offset = rng.between(0, *size - len);
        let mut bytes = vec![0; len as usize];
        rng.fill(&mut bytes);
        out.push(ModelOp::Write {
            file: *file,
            offset,
            bytes,
        });
        let pieces: Vec<_> = out.iter().map(ModelOp::piece).collect();
        if p.must_spill(&pieces) {
            return Some(out);
        }
    }
    None
}
