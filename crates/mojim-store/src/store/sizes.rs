//! Whether the data files have the sizes that the catalogue says, also while records wait to be
//! applied.
//!
//! Invariant: a size is called wrong only if no record above the checkpoint explains it. After a
//! crash a file may have any size that it had since then.

use std::collections::HashSet;

use mojim_env::turns::lock;
use mojim_format::{CatalogEntry, OpKind};

use super::state::Store;
use crate::area::valid_name;
use mojim_env::Result;

/// The files whose names or sizes records change.
#[derive(Default)]
struct Changed {
    ids: HashSet<u32>,
    /// Names that they give: whoever has such a name may lose it.
    names: HashSet<String>,
}

impl Changed {
    fn has(&self, e: &CatalogEntry) -> bool {
        self.ids.contains(&e.id) || self.names.contains(&e.name)
    }
}

impl Store {
    /// Fails if a data file is missing, or has a size that neither the catalogue nor a record
    /// explains: an attach would refuse this copy, so it must not become the primary's before.
    /// Once such a file is written to again, its size may be right.
    pub fn check_sizes(&self) -> Result<()> {
        let a = self.applier.lock();
        // Records that are lost may have changed any file.
        let lost = |known| known > self.tail().max(a.applied);
        let lost = self.known_missing().is_some_and(lost);
        let changed = match self.is_exact() && !lost {
            true => Some(Changed::default()),
            false => self.changed(lost),
        };
        let area = lock(&self.area);
        if area.is_torn() {
            return Ok(());
        }
        area.check_sizes_but(|e| changed.as_ref().is_none_or(|c| c.has(e)))
    }

    /// What the records above the checkpoint change in names and sizes; `None` if that is not
    /// known, since records are spilled or `lost`. The applier's lock is held.
    fn changed(&self, lost: bool) -> Option<Changed> {
        if lost {
            return None;
        }
        let mut changed = Changed::default();
        let starts = lock(&self.durable).clone();
        for (log, start) in self.logs.iter().zip(starts) {
            for r in log.records(start) {
                for (op, payload) in r.ops() {
                    match op.kind {
                        OpKind::Write => continue,
                        OpKind::Spill => return None,
                        OpKind::Create | OpKind::Rename => {
                            let name = valid_name(payload).map(str::to_owned);
                            changed.names.extend(name);
                        }
                        OpKind::Resize | OpKind::Remove => {}
                    }
                    changed.ids.insert(op.file);
                }
            }
        }
        Some(changed)
    }
}
