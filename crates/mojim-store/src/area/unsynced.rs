//! The part of the data files that is not durable yet, and how it becomes so.
//!
//! A few files are synced one by one. For many, one sync of the file system is cheaper by orders
//! of magnitude: each `fdatasync` of a new file commits the file system's journal. It waits for
//! the pages of other programs, too, so it is not used where a few would do.
//!
//! Invariants:
//! - A file is closed with bytes that were not synced only where a sync of the whole file system
//!   tells of writes that failed. The descriptor that tells was opened before they were made.
//! - Nothing is forgotten but by a sync that follows. A caller that takes it out to be synced lets
//!   nothing count as durable if that fails.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_env::{Env, Error, File, FileSystem, NotPlain, Result};

/// Files and names that are not durable.
#[derive(Default)]
pub(super) struct Unsynced {
    /// The file system, from before the first write; `None` where it cannot tell.
    pub(super) whole: Option<Arc<dyn FileSystem>>,
    /// Most files, or directories, that are synced one by one where it can be synced as a whole.
    pub(super) most: usize,
    /// Files that were written to.
    pub(super) dirty: BTreeSet<u32>,
    /// Files were closed with bytes that were not synced.
    closed: bool,
    /// Directories in which files or directories were made or renamed.
    pub(super) dirs: BTreeSet<PathBuf>,
    /// Files that were cut when they were made anew in the place of another.
    cut: BTreeMap<String, Arc<dyn File>>,
    /// There were more of those.
    cut_more: bool,
}

/// Files to be synced, while others may be written to.
#[must_use]
pub struct Syncing {
    pub(super) files: Vec<(String, Arc<dyn File>)>,
    pub(super) whole: Option<Arc<dyn FileSystem>>,
}

impl Syncing {
    /// Makes what was written to the files before durable.
    pub fn run(&self) -> Result<()> {
        if let Some(whole) = &self.whole {
            sync_whole(&**whole)?;
        }
        let mut files = self.files.iter();
        files.try_for_each(|(called, f)| sync_file(called, &**f))
    }
}

/// Whether the error means that no file of the volume lies at that path.
pub fn is_gone(e: &std::io::Error) -> bool {
    use std::io::ErrorKind::*;
    NotPlain::is(e) || matches!(e.kind(), NotFound | NotADirectory | IsADirectory)
}

fn sync_whole(whole: &dyn FileSystem) -> Result<()> {
    let synced = whole.sync();
    synced.map_err(|e| Error::poisoned("syncing the file system of the data files", &e))
}

pub(super) fn sync_file(called: &str, f: &dyn File) -> Result<()> {
    f.sync()
        .map_err(|e| Error::poisoned(format!("syncing {called}"), &e))
}

fn sync_dir(env: &dyn Env, dir: &Path) -> Result<()> {
    match env.sync_dir(dir) {
        Err(e) if !is_gone(&e) => Err(Error::poisoned(format!("syncing {}", dir.display()), &e)),
        _ => Ok(()),
    }
}

/// Syncs the directories that do not lie on the file system `whole`, which was synced: another one
/// may be mounted below the volume's directory.
fn sync_rest(
    env: &dyn Env,
    whole: Option<Arc<dyn FileSystem>>,
    dirs: &BTreeSet<PathBuf>,
) -> Result<()> {
    let is_left = |d: &&PathBuf| !whole.as_ref().is_some_and(|w| w.has_dir(d));
    dirs.iter()
        .filter(is_left)
        .try_for_each(|d| sync_dir(env, d))
}

impl Unsynced {
    /// Whether a file may be closed although its bytes were not synced: it is noted then.
    pub(super) fn may_close(&mut self, f: &dyn File) -> bool {
        let may = self.whole.as_ref().is_some_and(|w| w.has(f));
        self.closed |= may;
        may
    }

    /// The file was cut. What was cut off must not come back when no record is applied again
    /// that cuts it.
    pub(super) fn was_cut(&mut self, called: &str, f: &Arc<dyn File>) -> Result<()> {
        if self.cut.len() < self.most {
            self.cut.insert(called.to_owned(), f.clone());
            return Ok(());
        }
        match self.whole.as_ref().is_some_and(|w| w.has(&**f)) {
            true => {
                self.cut_more = true;
                Ok(())
            }
            false => sync_file(called, &**f),
        }
    }

    /// Makes names durable, and what was cut off.
    pub(super) fn sync_names(&mut self, env: &dyn Env) -> Result<()> {
        let cut = std::mem::take(&mut self.cut);
        let dirs = std::mem::take(&mut self.dirs);
        let more = std::mem::take(&mut self.cut_more);
        let whole = self.sync_many(more || cut.len() + dirs.len() > self.most)?;
        for (called, f) in &cut {
            if !whole.as_ref().is_some_and(|w| w.has(&**f)) {
                sync_file(called, &**f)?;
            }
        }
        sync_rest(env, whole, &dirs)
    }

    /// Makes names in these directories durable.
    pub(super) fn sync_dirs(&mut self, env: &dyn Env, dirs: &BTreeSet<PathBuf>) -> Result<()> {
        let whole = self.sync_many(dirs.len() > self.most)?;
        sync_rest(env, whole, dirs)
    }

    /// If there are `many`, syncs the file system where that can be done, and returns it.
    fn sync_many(&mut self, many: bool) -> Result<Option<Arc<dyn FileSystem>>> {
        let whole = self.whole.clone().filter(|_| many);
        whole.as_ref().map_or(Ok(()), |w| sync_whole(&**w))?;
        Ok(whole)
    }

    /// Takes out what is to be synced: the numbers of the files, and the file system that is
    /// to be synced for those that lie on it.
    pub(super) fn take(&mut self) -> (BTreeSet<u32>, Option<Arc<dyn FileSystem>>) {
        let dirty = std::mem::take(&mut self.dirty);
        let many = std::mem::take(&mut self.closed) || dirty.len() > self.most;
        (dirty, self.whole.clone().filter(|_| many))
    }
}
