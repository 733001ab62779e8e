//! Applying again what found no room.
//!
//! A write into new room that fails has made nothing durable that is not in the log, too. So
//! it is no failure of the disk: what was being applied is given up as a crash gives it up,
//! except that nobody loses a descriptor. Then it is applied again from the catalogue as the
//! disk has it.
//!
//! Invariants:
//! - While the area is torn nothing is applied, and nothing of it counts as durable.
//! - All that was not synced before is synced before anything counts as durable. So are files
//!   that left the catalogue by what was given up. They are synced over the descriptors that
//!   tell of failed writes.

use super::*;
use crate::room;

impl Area {
    /// All that was begun to be applied is: it will not be given up.
    pub fn confirm_applied(&mut self) {
        self.left.clear();
    }

    /// Whether it was given up, and not taken up again.
    pub fn is_torn(&self) -> bool {
        self.torn
    }

    /// Replaces the catalogue or a note. Where the disk has no room for it, one of the files that
    /// keep room for that takes its place.
    pub(super) fn replace(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        let env = self.env.clone();
        let mut done = replace_file(&*env, path, bytes);
        let meta = path.parent().expect("it lies in meta");
        for kept in room::kept_for_names(meta) {
            if !done.as_ref().is_err_and(Error::lacks_room) {
                break;
            }
            if env.rename(&kept, &replacement(path)).is_err() {
                continue;
            }
            self.took_kept = true;
            let how = OpenHow {
                write: true,
                ..OpenHow::default()
            };
            let written = env.open(&replacement(path), how).and_then(|f| {
                f.write_at(bytes, 0)?;
                // What it kept beyond is free again.
                f.set_len(bytes.len() as u64)?;
                Ok(f)
            });
            let written = written.context(|| format!("writing {}", path.display()));
            done = written.and_then(|f| put_replacement(&*env, path, f));
        }
        done
    }

    /// Whether room that is kept was taken since this was asked last.
    pub fn took_kept(&mut self) -> bool {
        std::mem::take(&mut self.took_kept)
    }

    /// Gives up what was begun since [`Area::confirm_applied`].
    pub fn give_up(&mut self) {
        self.torn = true;
        self.image = Image::default();
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
        self.cut_off = 0;
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
