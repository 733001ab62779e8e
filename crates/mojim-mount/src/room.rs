//! Whether the node's disk has room for what programs write and make.
//!
//! Owns what was counted as free, and is given out in parts. A sync point that has no room when it is
//! applied stops the volume, on both nodes, long after the call that asked for too much: so that
//! call has to fail, as it does on a disk's file system. The mirror's disk is not seen from here.

use std::sync::atomic::{AtomicU64, Ordering::*};

use rustix::fs::{StatVfs, statvfs};
use rustix::io::Errno;

use crate::fs::{Fs, Result, State, lock};

/// Bytes of the disk that files leave free: logs and catalogues need some.
const RESERVE: u64 = 16 << 20;
/// Files of the disk that programs leave free.
const RESERVED_FILES: u64 = 128;
/// Bytes that a name or a node takes on the disk, about, beside those of the name itself.
pub(crate) const NAME: usize = 512;
/// The part of what is free that is given out before it is looked again: others write to the disk too.
const PART: u64 = 8;

#[derive(Debug, Default)]
pub(crate) struct Room {
    bytes: AtomicU64,
    files: AtomicU64,
}

fn take(from: &AtomicU64, n: u64) -> bool {
    let rest = |free: u64| free.checked_sub(n);
    from.fetch_update(SeqCst, SeqCst, rest).is_ok()
}

impl Fs {
    fn disk(&self) -> Result<StatVfs> {
        statvfs(self.volume.directory())
    }

    /// `bytes` are written: fails if the disk has no room for them, be it behind the end of a
    /// file or in a hole.
    pub(crate) fn take_room(&self, bytes: usize) -> Result<()> {
        let bytes = bytes as u64;
        if take(&self.room.bytes, bytes) {
            return Ok(());
        }
        let disk = self.disk()?;
        let free = (disk.f_bavail * disk.f_frsize).saturating_sub(RESERVE);
        // What waits, and what is not applied, has taken none yet.
        let waiting = self.waiting.load(Relaxed) + 4 * self.volume.most_at_once();
        let free = free.saturating_sub(waiting as u64);
        let left = free.checked_sub(bytes).ok_or(Errno::NOSPC)?;
        self.room.bytes.store(left / PART, SeqCst);
        Ok(())
    }

    /// A file or a directory is made, whose name has so many bytes: as [`Fs::take_room`].
    pub(crate) fn take_file(&self, state: &State, name: &[u8]) -> Result<()> {
        self.take_room(NAME + name.len())?;
        if take(&self.room.files, 1) {
            return Ok(());
        }
        let disk = self.disk()?;
        // Some file systems have no bound.
        let free = match disk.f_files {
            0 => u64::MAX,
            _ => disk.f_favail.saturating_sub(RESERVED_FILES),
        };
        // Those that are not applied have taken none yet.
        let applied = self.volume.applied();
        let files = state.files.values();
        let new = files.filter(|f| lock(&f.bytes).created > applied).count();
        let free = free.saturating_sub(new as u64);
        let left = free.checked_sub(1).ok_or(Errno::NOSPC)?;
        self.room.files.store(left / PART, SeqCst);
        Ok(())
    }
}
