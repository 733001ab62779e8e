//! An attachment, which a volume and its regions share.
//!
//! Owns when it ends, and which files are in memory.
//!
//! Invariant: a region keeps the attachment, so that its memory stays as long as slices of it.

use std::sync::{Mutex, MutexGuard};

/// Ends the attachment when it is dropped.
pub(crate) struct Attached {
    pub(crate) engine: engine::Volume,
    mapped: Mutex<Vec<Mapped>>,
}

/// A region, or a heap: no file has both.
pub(crate) struct Mapped {
    pub(crate) file: String,
    pub(crate) is_heap: bool,
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

    /// All regions and heaps. None comes or goes while it is held.
    pub(crate) fn mapped(&self) -> MutexGuard<'_, Vec<Mapped>> {
        self.mapped.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A region or a heap of `file` has gone.
    pub(crate) fn unmapped(&self, file: &str) {
        let mut mapped = self.mapped();
        if let Some(i) = mapped.iter().position(|m| m.file == file) {
            mapped.swap_remove(i);
        }
    }
}
