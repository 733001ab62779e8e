//! Batches: sync points of changes that the caller has in hand, not in a region.
//!
//! Owns the calls for a program that keeps what is not committed yet by itself and is alone
//! with the volume: the mount. It gives files their numbers, and knows the names that it gave,
//! also before they are applied.
//!
//! Invariants:
//! - A batch is one sync point: all of its changes are committed, or none.
//! - Batches are committed in the order in which [`Volume::begin`] returned.
//! - The data files have what was begun once [`Volume::applied`] has reached its LSN, and not
//!   before that for certain.

use std::sync::Arc;
use std::time::Duration;

use mojim_env::{File, Longest, Result, Space};
use mojim_memory::fork::check_fork;
use mojim_replica::piece::Piece;
use mojim_replica::primary::{Begun, RoomWait};
use mojim_store::room::RESERVED_FILES;

use super::attached::Volume;

/// One change of a batch. Files have numbers, which no two of them
/// have, also if one is removed before the other is made.
#[derive(Debug, Clone, Copy)]
pub enum Change<'a> {
    /// `bytes` go to `offset` of the file, which is at least so long.
    Write {
        /// The file's number.
        file: u32,
        /// Byte offset in the file.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The file becomes `size` bytes long; new bytes are zero.
    Resize {
        /// The file's number.
        file: u32,
        /// Bytes.
        size: u64,
    },
    /// A new, empty file.
    Create {
        /// Its number.
        file: u32,
        /// Its name.
        name: &'a str,
    },
    /// The file goes.
    Remove {
        /// The file's number.
        file: u32,
    },
    /// The file gets another name. A file of that name is removed before, by a change of its own.
    Rename {
        /// The file's number.
        file: u32,
        /// The new name.
        name: &'a str,
    },
}

impl<'a> Change<'a> {
    fn piece(&self) -> Piece<'a> {
        match *self {
            Change::Write {
                file,
                offset,
                bytes,
            } => Piece::Write {
                file,
                offset,
                ptr: bytes.as_ptr(),
                len: bytes.len(),
            },
            Change::Resize { file, size } => Piece::Resize { file, size },
            Change::Create { file, name } => Piece::Create { file, name },
            Change::Remove { file } => Piece::Remove { file },
            Change::Rename { file, name } => Piece::Rename { file, name },
        }
    }
}

/// A batch that was begun.
#[derive(Debug, Clone, Copy)]
pub struct Batch(Begun);

impl Batch {
    /// The LSN of its sync point.
    pub fn lsn(&self) -> u64 {
        self.0.lsn
    }
}

#[doc(hidden)]
impl Volume {
    /// Begins a sync point of these changes: its bytes are copied, and it has its LSN. `None`
    /// while the log has no room: then nothing is begun, and [`Volume::await_room`] waits. After
    /// an error nothing is committed. Does not wait itself, unless the batch is larger than
    /// [`Volume::most_at_once`].
    pub fn begin(&self, changes: &[Change<'_>]) -> Result<Option<Batch>> {
        check_fork()?;
        self.0.check_attached()?;
        for c in changes {
            match c {
                Change::Resize { size, .. } => self.0.primary.check_size(*size)?,
                Change::Create { name, .. } | Change::Rename { name, .. } => {
                    self.0.primary.check_name(name)?;
                }
                Change::Write { .. } | Change::Remove { .. } => {}
            }
        }
        let pieces: Vec<_> = changes.iter().map(Change::piece).collect();
        Ok(self.0.primary.try_begin_commit(&pieces)?.map(Batch))
    }

    /// Waits for room in the log, for some milliseconds at most, and says so to `wait`; fails
    /// when there was no progress for too long.
    pub fn await_room(&self, wait: &mut RoomWait) -> Result<()> {
        self.0.primary.wait_for_room(wait)
    }

    /// Bytes of a batch that surely has its place in the log.
    pub fn most_at_once(&self) -> usize {
        self.0.primary.spec.smallest_log as usize / 4
    }

    /// Waits until a batch, and all that was begun before it, is committed.
    pub fn complete(&self, batch: &Batch) -> Result<()> {
        if self.0.primary.store.applied() >= batch.0.lsn {
            return Ok(());
        }
        self.0.primary.finish_commit(&batch.0)
    }

    /// As [`Volume::complete`], for `limit` at most: false if it is not committed by then.
    pub fn complete_within(&self, batch: &Batch, limit: Duration) -> Result<bool> {
        if self.0.primary.store.applied() >= batch.0.lsn {
            return Ok(true);
        }
        self.0.primary.finish_commit_within(&batch.0, limit)
    }

    /// In place of [`Volume::complete`], without a wait: the batch is committed soon.
    pub fn launch(&self, batch: &Batch) {
        self.0.primary.start_async(&batch.0);
    }

    /// The LSN up to which everything is in the data files.
    pub fn applied(&self) -> u64 {
        self.0.primary.store.applied()
    }

    /// Fails if nothing can be committed here any more.
    pub fn check(&self) -> Result<()> {
        self.0.check_attached()?;
        self.0.primary.check()
    }

    /// The longest names that files can have on this node and on the mirror.
    pub fn longest_names(&self) -> Longest {
        self.0.primary.longest_names()
    }

    /// Fails if this node or the mirror cannot have a file of `size` bytes.
    pub fn check_size(&self, size: u64) -> Result<()> {
        self.0.primary.check_size(size)
    }

    /// What may still be put into the data files, here and at the mirror, if it follows: what is
    /// free beyond what a copy leaves free. Each with the LSN up to which that counts what is
    /// applied.
    pub fn rooms(&self) -> impl Iterator<Item = (u64, Space)> {
        let p = &self.0.primary;
        // Before the room is looked at: what is applied meanwhile counts twice, not never.
        let applied = p.store.applied();
        let own = Some((applied, p.store.space()));
        let reserve = p.store.reserve();
        let beyond = |free: u64, kept| match free {
            u64::MAX => free,
            free => free.saturating_sub(kept),
        };
        let rooms = own.into_iter().chain(p.mirror_room());
        rooms.map(move |(applied, space)| {
            let bytes = beyond(space.bytes, reserve);
            let files = beyond(space.files, RESERVED_FILES);
            let space = Space {
                bytes,
                files,
                ..space
            };
            (applied, space)
        })
    }

    /// Whether the mirror has told its room; `None` while none is linked.
    pub fn mirror_told(&self) -> Option<bool> {
        let p = &self.0.primary;
        p.is_linked().then(|| p.mirror_room().is_some())
    }

    /// Has what can be applied at once applied, in the caller's thread: what that frees is room.
    pub fn apply_begun(&self) {
        self.0.apply_now();
    }

    /// Numbers, names and sizes of the volume's files, as far as records are applied.
    pub fn numbered(&self) -> Vec<(u32, String, u64)> {
        let area = self.0.primary.store.area();
        let entry = area.files().map(|f| (f.id, f.name.clone(), f.size));
        entry.collect()
    }

    /// The data file of a number, once its creation is applied.
    pub fn data_file(&self, number: u32) -> Result<Arc<dyn File>> {
        self.0.primary.store.data_file(number)
    }

    /// Bytes that a data file takes of the disk, if that can be told at once: whoever applies records
    /// is not waited for.
    pub fn allocated(&self, number: u32) -> Option<u64> {
        let store = &self.0.primary.store;
        let stat = match store.open_data_file(number) {
            Some(f) => rustix::fs::fstat(f.fd()?),
            None => rustix::fs::lstat(store.data_file_path(number)?),
        };
        Some(stat.ok()?.st_blocks as u64 * 512)
    }

    /// As [`Volume::data_file`], without a wait for whoever applies records: `None` if that would be
    /// necessary.
    pub fn data_file_at_once(&self, number: u32) -> Option<Result<Arc<dyn File>>> {
        self.0.primary.store.data_file_at_once(number)
    }

    /// Names of files in the volume's directory that are not part of the volume.
    pub fn unmanaged_files(&self) -> Result<Vec<String>> {
        self.0.primary.store.area().unmanaged_files()
    }
}
