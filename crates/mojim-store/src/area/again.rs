//! Applying again what found no room.
//!
//! A write into new room that fails has made nothing durable that is not in the log, too. So it is
//! no failure of the disk: what was being applied is given up as a crash gives it up, except that
//! nobody loses a descriptor, and is applied again from the catalogue as the disk has it.
//!
//! Invariants:
//! - While the area is torn nothing is applied, and nothing of it counts as durable.
//! - What was not synced before is synced before anything counts as durable: also files that left
//!   the catalogue by what was given up, over the descriptors that tell of failed writes.

use super::*;

impl Area {
    /// All that was begun to be applied is: it will not be given up.
    pub fn settle(&mut self) {
        self.left.clear();
    }

    /// Whether it was given up, and not taken up again.
    pub fn is_torn(&self) -> bool {
        self.torn
    }

    /// Gives up what was begun since [`Area::settle`].
    pub fn give_up(&mut self) {
        self.torn = true;
        self.image.clear();
        self.image_bytes = 0;
        self.removed.clear();
        self.made.clear();
        self.outcome = Outcome::default();
        (self.names_dirty, self.sizes_dirty) = (false, false);
    }

    /// If it was given up: goes on from what the disk has, as after a crash.
    pub fn take_up(&mut self) -> Result<()> {
        if !self.torn {
            return Ok(());
        }
        self.files = Entries::default();
        (self.catalog_lsn, self.begun, self.written) = (0, (0, 0), (0, 0));
        self.read_catalog()?;
        self.finish_rename()?;
        self.finish_removal()?;
        for (id, f) in std::mem::take(&mut self.left) {
            if self.files.has(id) {
                self.open.all().entry(id).or_insert(f);
                self.unsynced.dirty.insert(id);
            }
        }
        self.torn = false;
        Ok(())
    }
}
