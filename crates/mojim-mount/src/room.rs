//! Whether the node's disk has room for what programs write and make.
//!
//! Owns what was counted as free, and is given out in parts. A sync point that has no room when it is
//! applied stops the volume, on both nodes, long after the call that asked for too much: so that
//! call has to fail, as it does on a disk's file system. The mirror's disk is not seen from here.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::fs::statvfs;
use rustix::io::Errno;

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

impl Room {
    /// `bytes` are written, on the disk of `dir`, of which those that `waiting` says are to come already.
    ///
    /// # Errors
    /// ENOSPC: the disk has no room for them.
    pub(crate) fn take(
        &self,
        dir: impl FnOnce() -> PathBuf,
        bytes: usize,
        waiting: impl FnOnce() -> usize,
    ) -> Result<(), Errno> {
        take(&self.bytes, bytes as u64, || {
            let disk = statvfs(dir())?;
            let free = (disk.f_bavail * disk.f_frsize).saturating_sub(RESERVE);
            Ok(free.saturating_sub(waiting() as u64))
        })
    }

    /// A file or a directory is made there, beside those that `waiting` says.
    ///
    /// # Errors
    /// ENOSPC: the disk's file system has no more of them.
    pub(crate) fn take_file(
        &self,
        dir: impl FnOnce() -> PathBuf,
        waiting: impl FnOnce() -> usize,
    ) -> Result<(), Errno> {
        take(&self.files, 1, || {
            let disk = statvfs(dir())?;
            // Some file systems have no bound.
            let free = match disk.f_files {
                0 => u64::MAX,
                _ => disk.f_favail.saturating_sub(RESERVED_FILES),
            };
            Ok(free.saturating_sub(waiting() as u64))
        })
    }
}

/// Takes `n` of what was given out, or of a new part of what `free` says.
fn take(from: &AtomicU64, n: u64, free: impl FnOnce() -> Result<u64, Errno>) -> Result<(), Errno> {
    let rest = |free: u64| free.checked_sub(n);
    if from.fetch_update(SeqCst, SeqCst, rest).is_err() {
        let left = free()?.checked_sub(n).ok_or(Errno::NOSPC)?;
        from.store(left / PART, SeqCst);
    }
    Ok(())
}
