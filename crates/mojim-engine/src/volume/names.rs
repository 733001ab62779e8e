//! Names and sizes: the calls that change which files a volume has, and how long
//! they are.
//!
//! Owns these calls, how the regions of a file learn its size, and how a change in
//! doubt is finished: one whose call returned before it was committed and applied.
//!
//! Invariants:
//! - A change is committed and applied before its call returns.
//! - Under the lock that [`Inner::names`] returns, every change that was begun has been
//!   made: otherwise a change in doubt might undo what the holder finds.
//! - A sync point that is cut short at a file's end is acknowledged only if that is the
//!   file's end: `sizes` was even, and the same, before the region's size was read and
//!   after.
//! - While a file's end is in doubt, its regions have the nearer one.

use std::ops::Range;
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, MutexGuard};

use mojim_env::locks::lock;
use mojim_format::catalog::valid_file_name;

use crate::last;
use mojim_env::{Context, Error, File, Result};
use mojim_memory::fork::check_fork;
use mojim_memory::region::Region;
use mojim_replica::piece::{OtherFile, Piece};
use mojim_replica::primary::Begun;

use super::attached::{Inner, Names, Volume};

/// A file that is taken into a volume is read into memory whole if it has at most so many
/// bytes.
const AT_ONCE: u64 = 1 << 20;
/// A hole smaller than this counts as data.
const LEAST_HOLE: u64 = 64 << 10;
/// Most parts between holes that a file may have when it is taken into a volume.
const MOST_PARTS: usize = 1 << 20;

fn too_large(errno: i32, name: &str, why: &str) -> Error {
    let e = std::io::Error::from_raw_os_error(errno);
    Error::io(format!("taking {name} into the volume ({why})"), &e)
}

/// A long name is cut: the text is one to be read.
fn no_name(name: &str) -> Error {
    const MOST: usize = 100;
    let head: String = name.chars().take(MOST).collect();
    let rest = match name.len() - head.len() {
        0 => String::new(),
        _ => format!(" and so on, {} bytes,", name.len()),
    };
    Error::Invalid(format!("{head:?}{rest} cannot name a file of a volume"))
}

/// The parts of a file of `size` bytes that may have bytes other than zero.
fn data_of(f: &dyn File, size: u64, name: &str) -> Result<Vec<Range<u64>>> {
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < size {
        let found = f.next_data(at).context(|| name.to_owned())?;
        let Some(found) = found.filter(|r| r.start < size) else {
            break;
        };
        at = found.end;
        let found = found.start..found.end.min(size);
        let known = parts.len();
        match parts.last_mut() {
            Some(last) if found.start - last.end < LEAST_HOLE => last.end = found.end,
            _ if known == MOST_PARTS => {
                return Err(too_large(
                    libc::EFBIG,
                    name,
                    &format!("it has more than {MOST_PARTS} parts between holes"),
                ));
            }
            _ => parts.push(found),
        }
    }
    Ok(parts)
}

impl Volume {
    /// Sets a file's size. Pages of a mapping beyond the new end must not be
    /// touched any more, as with any file.
    ///
    /// # Errors
    /// After `Timeout` the file's size is in doubt. Until it is known, bytes behind the
    /// nearer end cannot be committed, and calls that change names or sizes fail. Call
    /// again.
    pub fn truncate(&self, file: &str, size: u64) -> Result<()> {
        check_fork()?;
        self.0.check_attached()?;
        if size > i64::MAX as u64 {
            return Err(Error::Invalid(format!("{file}: {size} bytes are too many")));
        }
        let mut names = self.0.names()?;
        let (id, old) = self.0.find_or_create(&mut names, file, false)?;
        self.0.resize(&mut names, id, old, size)
    }

    /// Makes an empty file if there is none of this name. True if it was made.
    pub fn create(&self, file: &str) -> Result<bool> {
        check_fork()?;
        self.0.check_attached()?;
        let mut names = self.0.names()?;
        let there = self.0.primary.store.area().find(file).is_some();
        self.0.find_or_create(&mut names, file, true)?;
        Ok(!there)
    }

    /// Removes a file. Fails while it is mapped.
    pub fn remove(&self, file: &str) -> Result<()> {
        check_fork()?;
        self.0.check_attached()?;
        let mut names = self.0.names()?;
        let (id, _) = self.0.find_or_create(&mut names, file, false)?;
        self.0.refuse_mapped(id, file)?;
        self.0
            .change_names(&mut names, &[Piece::Remove { file: id }])
    }

    /// Gives a file another name, replacing a file of that name.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_fork()?;
        self.0.check_attached()?;
        if !valid_file_name(to) {
            return Err(no_name(to));
        }
        let mut names = self.0.names()?;
        let (id, _) = self.0.find_or_create(&mut names, from, false)?;
        if let Some(old) = self.0.primary.store.area().find(to).map(|f| f.id) {
            self.0.refuse_mapped(old, to)?;
        }
        self.0.primary.check_name(to)?;
        let area = self.0.primary.store.area();
        area.check_reach()?;
        area.check_name(to)?;
        drop(area);
        // Before the change: even if it fails now, it may be committed later.
        names.renamed = true;
        self.0
            .change_names(&mut names, &[Piece::Rename { file: id, name: to }])
    }
}

impl Inner {
    fn regions_of(&self, id: u32) -> Vec<Arc<Region>> {
        let mut all = self.regions();
        all.retain(|r| r.file == id);
        all
    }

    fn refuse_mapped(&self, id: u32, file: &str) -> Result<()> {
        if self.regions().iter().any(|r| r.file == id) {
            return Err(Error::Busy(format!("{file} is mapped; unmap it first")));
        }
        Ok(())
    }

    /// The file's number and size. Takes in a file that lies in the directory and is
    /// not part of the volume yet; makes the file if there is none, if `create`.
    pub(super) fn find_or_create(
        &self,
        names: &mut Names,
        file: &str,
        create: bool,
    ) -> Result<(u32, u64)> {
        if !valid_file_name(file) {
            return Err(no_name(file));
        }
        let area = self.primary.store.area();
        if let Some(f) = area.find(file) {
            return Ok((f.id, f.size));
        }
        self.primary.check_name(file)?;
        area.check_reach()?;
        let id = area.next_id();
        let path = area.path(file);
        let unmanaged = area.check_name(file)?;
        drop(area);
        let unmanaged = match unmanaged {
            true => self.env.open(&path, mojim_env::OpenHow::DATA),
            false => Err(std::io::ErrorKind::NotFound.into()),
        };
        match unmanaged {
            Ok(f) => {
                let size = f.len().context(|| path.display().to_string())?;
                self.import(names, id, file, &*f, size)?;
                Ok((id, size))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                if !create {
                    return Err(Error::NotFound(format!(
                        "volume {} has no file {file:?}",
                        self.volume.name
                    )));
                }
                self.change_names(
                    names,
                    &[Piece::Create {
                        file: id,
                        name: file,
                    }],
                )?;
                Ok((id, 0))
            }
            Err(e) => Err(Error::io(format!("opening {}", path.display()), &e)),
        }
    }

    /// Takes a file into the volume that another program has put into its directory.
    fn import(
        &self,
        names: &mut Names,
        id: u32,
        name: &str,
        f: &dyn File,
        size: u64,
    ) -> Result<()> {
        self.primary.check_size(size)?;
        self.primary.store.area().check_reach()?;
        let parts = data_of(f, size, name)?;
        let bytes: u64 = parts.iter().map(|p| p.end - p.start).sum();
        let mut pieces = Vec::new();
        let room = pieces.try_reserve_exact(parts.len() + 2);
        room.map_err(|e| too_large(libc::ENOMEM, name, &e.to_string()))?;
        pieces.extend([
            Piece::Create { file: id, name },
            Piece::Resize { file: id, size },
        ]);
        if bytes > AT_ONCE {
            pieces.extend(parts.into_iter().map(|p| Piece::Copy {
                file: id,
                offset: p.start,
                len: (p.end - p.start) as usize,
                from: OtherFile(f),
            }));
            let begun = self.primary.begin_copied(&pieces)?;
            return self.see_through(names, &begun);
        }
        let mut bytes = vec![0; bytes as usize];
        let mut rest = &mut bytes[..];
        for p in parts {
            let (part, more) = rest.split_at_mut((p.end - p.start) as usize);
            rest = more;
            f.read_at(part, p.start).context(|| name.to_owned())?;
            pieces.push(Piece::Write {
                file: id,
                offset: p.start,
                ptr: part.as_ptr(),
                len: part.len(),
            });
        }
        self.change_names(names, &pieces)
    }

    /// Locks names and sizes against changes by other threads, and finishes a change
    /// in doubt.
    pub(super) fn names(&self) -> Result<MutexGuard<'_, Names>> {
        let mut names = lock(&self.names);
        self.finish_names(&mut names)?;
        Ok(names)
    }

    /// Commits a change and applies it here, so that the file system shows it when
    /// the call returns.
    fn change_names(&self, names: &mut Names, pieces: &[Piece<'_>]) -> Result<()> {
        for p in pieces {
            if let Piece::Resize { size, .. } = p {
                self.primary.check_size(*size)?;
            }
        }
        self.primary.store.area().check_reach()?;
        let begun = self.primary.begin_commit(pieces)?;
        self.see_through(names, &begun)
    }

    fn see_through(&self, names: &mut Names, begun: &Begun) -> Result<()> {
        names.doubt = begun.lsn;
        self.primary.finish_commit(begun)?;
        last::set(begun.lsn);
        self.settle(begun.lsn)?;
        names.doubt = 0;
        Ok(())
    }

    /// Changes a file's size, and tells its regions.
    pub(super) fn resize(&self, names: &mut Names, id: u32, old: u64, size: u64) -> Result<()> {
        let all = self.regions_of(id);
        if size != old {
            // Before the memory beyond the new end goes.
            self.sizes.fetch_add(1, SeqCst);
            all.iter().for_each(|r| r.lower(size.min(old)));
            let done = self.change_names(names, &[Piece::Resize { file: id, size }]);
            if names.doubt == 0 {
                if done.is_err() {
                    all.iter().for_each(|r| r.restore(old));
                }
                self.sizes.fetch_add(1, SeqCst);
            }
            done?;
        }
        // Also if the size is the same: an earlier call may have failed here.
        all.iter().try_for_each(|r| r.apply_size(size))
    }

    /// Finishes a change in doubt, if there is one.
    pub(super) fn finish_names(&self, names: &mut Names) -> Result<()> {
        if names.doubt == 0 {
            return Ok(());
        }
        self.wait_for(names.doubt)?;
        self.settle(names.doubt)?;
        let apply = |region: Arc<Region>| {
            let area = self.primary.store.area();
            let file = area.files().find(|f| f.id == region.file);
            let size = file.expect("a mapped file is not removed").size;
            drop(area);
            region.apply_size(size)
        };
        let settled = self.regions().into_iter().map(apply);
        // A region that fails keeps the nearer end, until its file's size is changed.
        let settled = settled.fold(Ok(()), Result::and);
        names.doubt = 0;
        if !self.sizes().is_multiple_of(2) {
            self.sizes.fetch_add(1, SeqCst);
        }
        settled
    }

    /// To be read before a region's size, for [`Inner::is_end`].
    #[inline]
    pub(super) fn sizes(&self) -> u64 {
        self.sizes.load(SeqCst)
    }

    /// Whether a region's size, read after `sizes`, was its file's size.
    pub(super) fn is_end(&self, sizes: u64) -> bool {
        sizes.is_multiple_of(2) && self.sizes() == sizes
    }

    /// Waits until the regions have their files' sizes. The caller must use no region: a
    /// change of size waits until nobody uses the file's regions.
    #[cold]
    pub(super) fn wait_for_sizes(&self, file: &str) -> Result<()> {
        self.names().map(drop).map_err(|e| match e {
            Error::Timeout(e) => Error::Timeout(format!(
                "stores behind the end of {file} cannot be committed, because the length of the file is in doubt: {e}"
            )),
            e => e,
        })
    }
}
