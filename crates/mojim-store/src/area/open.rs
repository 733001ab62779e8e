//! The data files that are open.
//!
//! Owns their table. It has a lock of its own, for an instant. A turn of applying holds the area
//! and syncs directories. A thread that reads a data file must not wait until such a turn has
//! ended. (`mojim mount` reads one for every page that a program misses.)
//!
//! Invariant: only who holds the area adds files and removes them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use mojim_env::File;
use mojim_env::locks::lock;

/// Open data files, by their numbers in the catalogue.
#[derive(Default)]
pub struct OpenFiles(Mutex<BTreeMap<u32, Arc<dyn File>>>);

impl OpenFiles {
    pub(super) fn all(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<dyn File>>> {
        lock(&self.0)
    }

    /// The file of a number, if it is open.
    pub fn get(&self, id: u32) -> Option<Arc<dyn File>> {
        self.all().get(&id).cloned()
    }
}
