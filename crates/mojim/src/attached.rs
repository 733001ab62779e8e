//! An attachment, which a volume and its regions share.
//!
//! Owns when it ends, and which files are in memory.
//!
//! Invariant: a region keeps the attachment, so that its memory stays as long as slices of it.

use std::sync::{Mutex, MutexGuard};

/// Ends the attachment when it is dropped.
pub(crate) struct Attached {
    pub(crate) engine: engine::Volume,
    /// The file of each region and heap.
    mapped: Mutex<Vec<String>>,
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.engine.name())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Nobody is there to be told. What was acknowledged is kept in any case.
        if self.engine.detach().is_err() {
            let _ = self.engine.finish();
        }
    }
}

impl Attached {
    pub(crate) fn new(engine: engine::Volume) -> Attached {
        Attached {
            engine,
            mapped: Mutex::default(),
        }
    }

    /// The file of each region and heap. None comes or goes while it is held.
    pub(crate) fn mapped(&self) -> MutexGuard<'_, Vec<String>> {
        self.mapped.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A region of `file` has gone.
    pub(crate) fn unmapped(&self, file: &str) {
        let mut mapped = self.mapped();
        if let Some(i) = mapped.iter().position(|f| f == file) {
            mapped.swap_remove(i);
        }
    }
}
