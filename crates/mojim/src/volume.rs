//! The attached volume.
//!
//! Owns the calls of a volume. `attached` owns when the attachment ends.
//!
//! Invariant: no call changes the size of a file, or removes or replaces it, while a region shows it: its
//! bytes would change, or go, under a slice.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::{CopyReport, Error, MapFlags, Result};
use mojim_format::heap::HEAP_MAGIC;

use crate::alone::alone;
use crate::attached::{Attached, Mapped};
use crate::region::Region;

/// A volume to which this process is attached as its primary.
///
/// The attachment ends when the volume and all its regions have been dropped, or with
/// [`Volume::detach`].
///
/// ```
/// # let example = mojim::example::Example::new();
/// # let config = example.config();
/// let volume = mojim::Volume::attach(config, "a", None)?;
/// volume.create("notes")?;
/// assert_eq!(volume.files(), [("notes".to_owned(), 0)]);
/// # Ok::<(), mojim::Error>(())
/// ```
#[must_use = "a volume that is dropped, with no region or heap of it, is detached"]
#[derive(Debug)]
pub struct Volume(Arc<Attached>);

/// How a file is mapped: [`Volume::map_with`].
///
/// ```
/// # let example = mojim::example::Example::new();
/// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
/// let options = mojim::MapOptions::new().create(true).len(8192).offset(4096);
/// let region = volume.map_with("f", &options)?;
/// assert_eq!((region.len(), volume.size("f")?), (8192, Some(12288)));
/// # Ok::<(), mojim::Error>(())
/// ```
#[must_use = "they do nothing before `Volume::map_with`"]
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct MapOptions {
    len: usize,
    flags: MapFlags,
}

impl MapOptions {
    /// All of a file that is there.
    pub fn new() -> MapOptions {
        MapOptions::default()
    }

    /// Bytes to map; the file grows to hold them (unless it is mapped to be read only). 0, the
    /// default: up to the file's end.
    pub fn len(mut self, len: usize) -> MapOptions {
        self.len = len;
        self
    }

    /// Where in the file the region begins, in bytes: a multiple of the page size.
    pub fn offset(mut self, offset: u64) -> MapOptions {
        self.flags.offset = offset;
        self
    }

    /// Make the file if there is none.
    pub fn create(mut self, create: bool) -> MapOptions {
        self.flags.create = create;
        self
    }

    /// No stores: [`Region::as_mut_slice`] panics.
    pub fn read_only(mut self, read_only: bool) -> MapOptions {
        self.flags.read_only = read_only;
        self
    }

    /// For programs that commit ranges of at most 16 KiB each: no note is taken of the pages that
    /// are stored to, which makes the first store to a page cheaper. Sync points of more bytes
    /// work, and compare all that was stored since the region was mapped.
    pub fn untracked(mut self, untracked: bool) -> MapOptions {
        self.flags.untracked = untracked;
        self
    }

    /// At this address, a multiple of the page size; [`Error::Busy`] if anything is mapped there.
    pub fn at(mut self, addr: usize) -> MapOptions {
        self.flags.fixed_at = addr;
        self
    }
}

impl Volume {
    /// Attaches this process to a volume as its primary, on node `node` of the configuration file
    /// `config`. `volume` may be left out where the file has only one.
    ///
    /// Recovers the node's copy and, in the modes that have a mirror, agrees with it.
    ///
    /// # Errors
    /// [`Error::Busy`] if a process is attached, this one included; [`Error::Stale`] if another
    /// node is the primary; [`Error::Timeout`] if the mirror does not answer; [`Error::Config`],
    /// [`Error::Damaged`], [`Error::Io`] as their names say.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let config = example.config();
    /// let volume = mojim::Volume::attach(&config, "a", None)?;
    /// let again = mojim::Volume::attach(&config, "a", None);
    /// assert!(matches!(again, Err(mojim::Error::Busy(_))));
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn attach(config: impl AsRef<Path>, node: &str, volume: Option<&str>) -> Result<Volume> {
        let engine = engine::Volume::attach(config.as_ref(), node, volume)?;
        Ok(Volume(Arc::new(Attached::new(engine))))
    }

    /// Ends the attachment, and waits until this node's files have all that is committed. Dropping
    /// the volume does the same, but does not say whether it succeeded.
    ///
    /// # Errors
    /// [`Error::Busy`] while there are regions or heaps of the volume: the attachment ends with the last of
    /// them. After any other error it has ended; what was acknowledged is recovered by the next
    /// attach.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let region = volume.map("f", 8)?;
    /// assert!(matches!(volume.detach(), Err(mojim::Error::Busy(_))));
    /// assert_eq!(region.as_slice::<u8>(), [0; 8]);
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn detach(self) -> Result<()> {
        let name = self.name().to_owned();
        let Some(attached) = Arc::into_inner(self.0) else {
            return Err(Error::Busy(format!(
                "volume {name} has regions or heaps: it is detached when the last of them is dropped"
            )));
        };
        let done = attached.engine.detach();
        if done.is_err() {
            let _ = attached.engine.finish();
        }
        done
    }

    /// Maps the first `len` bytes of a file. Makes the file if there is none, and makes it longer
    /// if it has fewer bytes; new bytes are zeros. With `len` 0: as much as the file has.
    ///
    /// A region is a private working copy of its part of the file: pages that were stored to take
    /// memory. What is in no sync point when the region is dropped is discarded.
    ///
    /// # Errors
    /// [`Error::Busy`] if a region shows some of these bytes already; [`Error::Invalid`] if the file
    /// is a heap ([`Heap`](crate::Heap)); [`Error::Unsupported`] where
    /// the volume shares working copies (see [`Volume::map_shared`]); where the file is made or grows,
    /// those of a sync point, and [`Error::Invalid`] while the calling thread has a transaction open.
    pub fn map(&self, file: &str, len: usize) -> Result<Region> {
        self.map_with(file, &MapOptions::new().create(true).len(len))
    }

    /// [`Volume::map`] with options.
    ///
    /// # Errors
    /// As there; [`Error::NotFound`] if the file is not there and not to be made.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let missing = volume.map_with("f", &mojim::MapOptions::new());
    /// assert!(matches!(missing, Err(mojim::Error::NotFound(_))));
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn map_with(&self, file: &str, options: &MapOptions) -> Result<Region> {
        self.check_private(file)?;
        let map = |len, flags| self.0.engine.map(file, len, flags);
        self.region(file, options, map)
    }

    /// [`Volume::map_with`] in place of what is mapped at `addr` (`MAP_FIXED`); [`Error::Busy`] if a
    /// region is there. `addr` is a multiple of the page size.
    ///
    /// # Safety
    /// The memory there, if any, is the caller's, and nobody uses it from here on, also if the call
    /// fails.
    pub unsafe fn map_fixed(
        &self,
        file: &str,
        addr: usize,
        options: &MapOptions,
    ) -> Result<Region> {
        self.check_private(file)?;
        let options = options.clone().at(addr);
        // SAFETY: the caller's promise.
        let map = |len, flags| unsafe { self.0.engine.map_over(file, len, flags) };
        self.region(file, &options, map)
    }

    /// [`Volume::map_with`] with the working copy that all shared mappings of the file on this node
    /// have, also those of other processes: each shows what the others store, and commits it.
    /// What is not committed is discarded when the last one goes.
    ///
    /// # Safety
    /// While a slice of the region exists, no other mapping of the same bytes, in any process, is
    /// stored to; while a mutable one exists, none is read.
    pub unsafe fn map_shared(&self, file: &str, options: &MapOptions) -> Result<Region> {
        let mut options = options.clone();
        options.flags.shared = true;
        let map = |len, flags| self.0.engine.map(file, len, flags);
        self.region(file, &options, map)
    }

    fn check_private(&self, file: &str) -> Result<()> {
        match self.0.engine.shares_all() {
            false => Ok(()),
            true => Err(Error::Unsupported(format!(
                "mapping {file}: the volume says working = \"shared\": other processes may store to what a slice shows; Volume::map_shared leaves it to the program to prevent that"
            ))),
        }
    }

    fn region(
        &self,
        file: &str,
        options: &MapOptions,
        map: impl FnOnce(usize, MapFlags) -> Result<engine::Mapping>,
    ) -> Result<Region> {
        // Held, so that no call takes from the file what is about to be mapped.
        let mut mapped = self.0.mapped();
        let end = options.flags.offset.saturating_add(options.len as u64);
        if self.size(file)?.is_none_or(|size| size < end) && !options.flags.read_only {
            alone("making a file, or making it longer")?;
        }
        if self.is_heap(file, options, &mapped)? {
            return Err(Error::Invalid(format!(
                "mapping {file}: it is a heap, whose pointers a region would make out of any bytes; open it with Heap"
            )));
        }
        let flags = MapFlags {
            atomic: true,
            ..options.flags
        };
        let mapping = map(options.len, flags)?;
        mapped.push(Mapped {
            file: file.to_owned(),
            is_heap: false,
        });
        Ok(Region::new(&self.0, file, mapping, !flags.read_only))
    }

    fn is_heap(&self, file: &str, options: &MapOptions, mapped: &[Mapped]) -> Result<bool> {
        if let Some(m) = mapped.iter().find(|m| m.file == file) {
            return Ok(m.is_heap);
        }
        let len = HEAP_MAGIC.len();
        if self.size(file)?.is_none_or(|size| size < len as u64) {
            return Ok(false);
        }
        let flags = MapFlags {
            atomic: true,
            read_only: true,
            shared: options.flags.shared,
            ..MapFlags::default()
        };
        let head = self.0.engine.map(file, len, flags)?;
        // SAFETY: a mapping of so many bytes that nobody else knows. If it shows stores of other
        // processes, any bytes do.
        let magic = unsafe { head.ptr.cast::<[u8; HEAP_MAGIC.len()]>().read_volatile() };
        engine::unmap(head.ptr, head.len)?;
        Ok(magic == HEAP_MAGIC)
    }

    /// Holds off new regions while `change` changes files of which there must be none.
    fn change(&self, files: &[&str], change: impl FnOnce() -> Result<()>) -> Result<()> {
        alone("a change of a file's size or name")?;
        let mapped = self.0.mapped();
        match files.iter().find(|f| mapped.iter().any(|m| m.file == **f)) {
            Some(file) => Err(Error::Busy(format!(
                "{file} has regions, or a heap, whose bytes would change: drop them first"
            ))),
            None => change(),
        }
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        self.0.engine.name()
    }

    /// The directory that has the volume's files. It shows a sync point some time after it is
    /// committed, or at once after [`Volume::settle`]. Only read there.
    pub fn directory(&self) -> PathBuf {
        self.0.engine.directory()
    }

    /// Names and sizes (bytes) of the volume's files.
    pub fn files(&self) -> Vec<(String, u64)> {
        self.0.engine.files()
    }

    /// Size of a file in bytes, if it is there.
    pub fn size(&self, file: &str) -> Result<Option<u64>> {
        self.0.engine.size(file)
    }

    /// Makes an empty file if there is none of this name; true if it was made. Durable when the
    /// call returns.
    ///
    /// # Errors
    /// [`Error::Invalid`] while the calling thread has a transaction open: the file would be there
    /// whatever becomes of that.
    pub fn create(&self, file: &str) -> Result<bool> {
        alone("making a file")?;
        self.0.engine.create(file)
    }

    /// Sets a file's size in bytes. Durable when the call returns.
    ///
    /// # Errors
    /// [`Error::Busy`] while there are regions of the file; [`Error::Invalid`] while the calling thread
    /// has a transaction open. After [`Error::Timeout`] the size is in doubt: call again.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let region = volume.map("f", 8)?;
    /// assert!(matches!(volume.truncate("f", 4), Err(mojim::Error::Busy(_))));
    /// drop(region);
    /// volume.truncate("f", 4)?;
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn truncate(&self, file: &str, size: u64) -> Result<()> {
        self.change(&[file], || self.0.engine.truncate(file, size))
    }

    /// Removes a file. Durable when the call returns.
    ///
    /// # Errors
    /// [`Error::Busy`] while there are regions of it; [`Error::Invalid`] while the calling thread has
    /// a transaction open.
    pub fn remove(&self, file: &str) -> Result<()> {
        self.change(&[file], || self.0.engine.remove(file))
    }

    /// Gives a file another name, atomically replacing a file that has it. Durable when the call
    /// returns.
    ///
    /// # Errors
    /// [`Error::Busy`] while there are regions of either; [`Error::Invalid`] while the calling thread
    /// has a transaction open.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// volume.create("new")?;
    /// volume.rename("new", "current")?;
    /// assert_eq!(volume.size("new")?, None);
    /// volume.remove("current")?;
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.change(&[from, to], || self.0.engine.rename(from, to))
    }

    /// Waits until everything up to `lsn` is committed, as the volume's mode requires: for sync
    /// points that were begun only ([`Region::begin_sync`], [`Batch::begin`](crate::Batch::begin)).
    /// With 0 it returns at once.
    ///
    /// A thread that shares a region in a lock begins under the lock, and waits after it.
    ///
    /// # Errors
    /// Those of [`Region::sync`]; after [`Error::Timeout`] wait again. [`Error::Invalid`] if there
    /// is no sync point `lsn` yet.
    pub fn wait(&self, lsn: u64) -> Result<()> {
        self.0.engine.wait(lsn)
    }

    /// Waits until this node's files show all that was committed before this call, so that other
    /// programs can read them in [`Volume::directory`].
    pub fn settle(&self) -> Result<()> {
        self.0.engine.settle()
    }

    /// Which nodes have the sync point `lsn`, and how safe it is there. Each backup is asked, for at
    /// most a second.
    ///
    /// ```
    /// # let example = mojim::example::Example::new();
    /// # let volume = mojim::Volume::attach(example.config(), "a", None)?;
    /// let mut region = volume.map("f", 8)?;
    /// region.as_mut_slice::<u8>()[0] = 1;
    /// let lsn = region.sync_all()?;
    /// let copies = volume.copies(lsn);
    /// assert_eq!((copies.len(), &*copies[0].node), (1, "a"));
    /// assert_eq!(copies[0].level, Some(mojim::Level::Disk));
    /// # Ok::<(), mojim::Error>(())
    /// ```
    pub fn copies(&self, lsn: u64) -> Vec<CopyReport> {
        self.0.engine.copies(lsn)
    }

    pub(crate) fn attached(&self) -> &Arc<Attached> {
        &self.0
    }
}
