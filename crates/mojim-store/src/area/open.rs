//! The data files that are open.
//!
//! Owns their table. It has a lock of its own, for an instant: who reads a data file (`mojim
//! mount` does, for every page that a program misses) must not wait until a turn of applying,
//! which holds the area and syncs directories, has ended.
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
