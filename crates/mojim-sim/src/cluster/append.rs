//! Sync points that the application makes.
//!
//! Owns what they change, drawn from the seed.

use mojim_env::Error;
use mojim_replica::pace::Pace;
use mojim_replica::primary::Begun;
use mojim_store::log::Log;

use super::node::{Pending, Role, is_plain};
use super::state::{Checked, Cluster};
use crate::model::{Files, ModelOp};
use crate::rng::Rng;

impl Cluster {
    pub(super) fn append(&mut self, n: usize) -> Checked {
        let Role::Primary(prim) = &self.nodes[n].role else {
            return Ok(());
        };
        if !prim.ready || prim.closing || prim.p.store.poisoned().is_some() {
            return Ok(());
        }
        let p = prim.p.clone();
        let (head, epoch) = (prim.head, prim.epoch);
        let spilling = !prim.spills.is_empty();
        if self.is_time_for_spill() {
            return self.begin_spill(n);
        }
        let files = self.check.points[head].files.clone();
        let changes = self.changes(&files);
        if spilling && !is_plain(&changes) {
            return Ok(());
        }
        let pieces: Vec<_> = changes.iter().map(ModelOp::piece).collect();
        let before = p.last();
        let heads = || p.store.logs().iter().map(Log::head).collect::<Vec<_>>();
        let from = heads();
        let lane = self.rng.below(self.setup.lanes as u64) as usize;
        match p.try_append_now(&pieces, lane) {
            Ok(Some(Begun {
                lsn: last, lane, ..
            })) => {
                self.appended += 1;
                self.longest = self.longest.max(heads()[lane] - from[lane]);
                let point = self
                    .check
                    .appended(n, head, epoch, before + 1, last, &changes)?;
                let since = self.world.now();
                self.note(|| format!("appended LSN {}..={last} on lane {lane}", before + 1));
                if let Role::Primary(prim) = &mut self.nodes[n].role {
                    prim.head = point;
                    prim.pending.push_back(Pending {
                        point,
                        since,
                        spilled: false,
                    });
                }
            }
            Ok(None) => {
                if p.backups.is_full(&p.store) {
                    self.backups.stalls += 1;
                }
                // As in `wait_for_room`.
                for l in 0..self.setup.lanes {
                    let _ = p.drive(l);
                }
                let _ = p.checkpoint_step(Pace::Busy);
            }
            Err(Error::Invalid(_)) => {}
            Err(e) => self.note(|| format!("append failed: {e}")),
        }
        self.observe(n)
    }

    fn changes(&mut self, files: &Files) -> Vec<ModelOp> {
        let rng = &mut self.rng;
        let mut out = Vec::new();
        let roll = rng.below(100);
        let some = |rng: &mut Rng| {
            let i = rng.below(files.len() as u64) as usize;
            *files.keys().nth(i).expect("below its length")
        };
        let name = |rng: &mut Rng| match rng.below(3) {
            0 => format!("d/f{}", rng.below(3)),
            _ => format!("f{}", rng.below(6)),
        };
        let size = |rng: &mut Rng| match rng.below(6) {
            0 => 0,
            1 => rng.between(1, 600),
            5 => rng.between(1, 40_000),
            _ => rng.between(1, 9000),
        };
        if files.is_empty() || roll < 6 && files.len() < 6 {
            let name = name(rng);
            if files.values().all(|f| f.name != name) {
                self.names += 1;
                let file = (self.names as u32).wrapping_mul(0x9e37_79b1);
                out.push(ModelOp::Create { file, name });
                if rng.coin() {
                    let size = size(rng);
                    out.push(ModelOp::Resize { file, size });
                    if size > 0 && rng.coin() {
                        out.push(write(rng, file, size));
                    }
                }
                return out;
            }
        }
        if files.is_empty() {
            return out;
        }
        let file = some(rng);
        match roll {
            6..=10 => {
                let size = size(rng);
                if size > 0 && rng.coin() && !files[&file].data.is_empty() {
                    out.push(write(rng, file, files[&file].data.len() as u64));
                }
                out.push(ModelOp::Resize { file, size });
                if size > 0 && rng.coin() {
                    out.push(write(rng, file, size));
                }
            }
            11 | 12 => out.push(ModelOp::Remove { file }),
            13..=15 => {
                let name = name(rng);
                if files[&file].name != name {
                    out.push(ModelOp::Rename { file, name });
                }
            }
            _ => {
                for _ in 0..rng.between(1, 5) {
                    let file = some(rng);
                    let len = files[&file].data.len() as u64;
                    if len > 0 {
                        out.push(write(rng, file, len));
                    }
                }
            }
        }
        out
    }
}

fn write(rng: &mut Rng, file: u32, size: u64) -> ModelOp {
    let most = match rng.below(40) {
        0 => 20_000,
        1..=6 => 3000,
        7..=15 => 600,
        _ => 64,
    };
    let len = rng.between(1, size.min(most));
    let offset = rng.between(0, size - len);
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    ModelOp::Write {
        file,
        offset,
        bytes,
    }
}
