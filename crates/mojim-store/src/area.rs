//! The data area: a volume's files and their catalogue, and how records reach
//! them.
//!
//! Owns the open data files, the catalogue, and the image: pages in anonymous
//! memory into which a batch of records is merged before each page is written
//! once. Of a page to which little was written, only the written bytes are kept.
//! Never stores through a mapping of a data file. Never opens what is no plain file, or follows a
//! link in a data file's place.
//!
//! Invariants:
//! - Records are applied in LSN order, whole sync points at a time, by one
//!   thread at a time. Applying a prefix again from any earlier point gives the same
//!   bytes: `Create`, `Remove` and `Rename` are skipped up to the catalogue's
//!   LSN, `Resize` and `Write` are repeated.
//! - A change of name is a barrier, and so is a cut: the image is written out first.
//! - A file has its name durably before the catalogue has its size, or the LSN of the sync
//!   point that made it.
//! - Sizes reach the catalogue before what changed them counts as applied.
//! - After an error nothing more is applied (the store poisons itself).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_format::catalog::{MAX_CATALOG, valid_file_name};
use mojim_format::{Catalog, CatalogEntry, FormatError, Op, OpKind, RecordView};

use mojim_env::{Context, Env, Error, File, Longest, NotPlain, OpenHow, Result};

mod again;
mod entries;
mod image;
mod names;
mod open;
mod outcome;
mod unsynced;
mod writes;

use entries::Entries;
pub use image::IMAGE_PAGE;
use image::{Image, Page, TooMany};
pub use open::OpenFiles;
use outcome::Outcome;
pub(crate) use outcome::name as valid_name;
pub use unsynced::{Syncing, is_gone};
use unsynced::{Unsynced, sync_file};

/// Bytes of the image beyond which it is written out.
pub const MOST_IMAGE: usize = 32 << 20;

/// Most files of an area that are kept open.
pub const MAX_OPEN: usize = 256;

/// The files of one node's copy.
pub struct Area {
    env: Arc<dyn Env>,
    dir: PathBuf,
    catalog_path: PathBuf,
    volume: u64,
    catalog_lsn: u64,
    /// Epoch and last LSN of the sync point that was last begun to be applied, in this process or,
    /// as the catalogue says, in one before.
    begun: (u64, u64),
    /// [`Area::begun`] as the catalogue's file has it.
    written: (u64, u64),
    /// The last LSN of sync points that were begun and not ended, as the catalogue said when it was
    /// read. 0: of none.
    cut_off: u64,
    /// [`Area::begun`] as it was when it was given up: the catalogue's file may have it still.
    given_up: (u64, u64),
    files: Entries,
    open: Arc<OpenFiles>,
    image: Image,
    unsynced: Unsynced,
    /// Names changed in the sync point being applied.
    names_dirty: bool,
    /// Sizes changed since the catalogue was written.
    sizes_dirty: bool,
    /// Names of files that this sync point removed.
    removed: Vec<String>,
    /// What the sync points that are being applied come to, unless one is applied step by step.
    outcome: Outcome,
    /// Directories that are there.
    made: BTreeSet<PathBuf>,
    /// LSNs of applied records, and the spill files that they name: a file can go
    /// when its record has gone from the logs.
    spills: Vec<(u64, u64)>,
    /// A sync that failed when a file was closed for another: every later `flush` and
    /// `sync` fails too.
    failed: Option<Error>,
    /// What was being applied found no room, and is given up; the rest is not what the disk has.
    torn: bool,
    /// Room that is kept for the catalogue and the notes was taken.
    took_kept: bool,
    /// There is a catalogue.
    catalogued: bool,
    /// Files that were not synced, and left the catalogue since [`Area::confirm_applied`].
    left: BTreeMap<u32, Arc<dyn File>>,
    /// Most files that are kept open.
    max_open: usize,
    /// The most bytes that a file can have here.
    max_file: u64,
    /// The longest names that files can have here.
    longest: Longest,
    /// The catalogue's directory, as it was when the area was opened.
    place: (u64, u64),
}

/// The error for a catalogue, at `path`, of a version that this release does not know.
pub(crate) fn of_another_release(path: &Path, e: &FormatError) -> Error {
    Error::Config(format!(
        "{}: {e}. A newer release of Mojim wrote it: open it with that one",
        path.display()
    ))
}

impl Area {
    /// Opens the area: reads the catalogue, if there is one.
    pub fn open(env: &Arc<dyn Env>, dir: &Path, meta: &Path, volume: u64) -> Result<Area> {
        let mut area = Area::unknown(env, dir, meta, volume)?;
        area.read_catalog()?;
        area.finish_rename()?;
        area.finish_removal()?;
        Ok(area)
    }

    /// An area whose catalogue is not read: of a copy that is about to be
    /// replaced. Its files are overwritten or stay unknown.
    pub fn unknown(env: &Arc<dyn Env>, dir: &Path, meta: &Path, volume: u64) -> Result<Area> {
        let catalog_path = meta.join("catalog");
        // A catalogue is made only after the data directory is durable.
        let there = env.open(&catalog_path, OpenHow::default()).is_ok();
        if !there || env.sync_dir(dir).is_err() {
            make_dirs(&**env, dir, Path::new("/"))?;
        }
        if !there {
            // The files' names and sizes are for those alone whom a mount shows them. It may be another
            // user's, whose affair it is then.
            let _ = env.close_dir(dir);
        }
        let mut area = Area::closed(env, dir, meta, volume);
        area.max_file = env
            .max_file_size(dir)
            .context(|| format!("how large files may be in {}", dir.display()))?;
        area.longest = env
            .longest_names(dir)
            .context(|| format!("how long names may be in {}", dir.display()))?;
        // Where nothing can be changed, that is said when something is to be.
        area.place = area.reach().unwrap_or_default();
        area.unsynced.whole = env.file_system(dir).ok();
        Ok(area)
    }

    /// An area before anything is read.
    fn closed(env: &Arc<dyn Env>, dir: &Path, meta: &Path, volume: u64) -> Area {
        let mut area = Area {
            max_file: 0,
            longest: Longest::USUAL,
            place: (0, 0),
            env: env.clone(),
            dir: dir.to_owned(),
            catalog_path: meta.join("catalog"),
            volume,
            catalog_lsn: 0,
            begun: (0, 0),
            written: (0, 0),
            cut_off: 0,
            given_up: (0, 0),
            files: Entries::default(),
            open: Arc::default(),
            image: Image::default(),
            unsynced: Unsynced::default(),
            names_dirty: false,
            sizes_dirty: false,
            removed: Vec::new(),
            outcome: Outcome::default(),
            made: BTreeSet::new(),
            spills: Vec::new(),
            failed: None,
            torn: false,
            took_kept: false,
            catalogued: false,
            left: BTreeMap::new(),
            max_open: 0,
        };
        area.keep_most_open(MAX_OPEN);
        area
    }

    /// Sets how many files are kept open at most.
    pub fn keep_most_open(&mut self, most: usize) {
        self.max_open = most;
        self.unsynced.most = (most / 4).max(1);
    }

    /// Checks, without changing anything, that the area of a copy with this checkpoint could be
    /// opened: its catalogue and, if `all` records are applied, the sizes of its files.
    pub fn look(
        env: &Arc<dyn Env>,
        dir: &Path,
        meta: &Path,
        (volume, checkpoint): (u64, u64),
        all: bool,
    ) -> Result<()> {
        let mut area = Area::closed(env, dir, meta, volume);
        // The files are opened one at a time.
        area.max_open = 1;
        area.read_catalog()?;
        area.check_catalog(checkpoint)?;
        if all { area.check_sizes() } else { Ok(()) }
    }

    fn read_catalog(&mut self) -> Result<()> {
        let how = OpenHow::default();
        match self.env.open(&self.catalog_path, how) {
            Ok(f) => {
                let path = self.catalog_path.clone();
                let what = || format!("catalogue {}", path.display());
                let len = f.len().context(what)?;
                if len > MAX_CATALOG {
                    return Err(self.damaged("catalogue larger than 1 GiB"));
                }
                let mut bytes = vec![0u8; len as usize];
                let got = f.read_at(&mut bytes, 0).context(what)?;
                let c = Catalog::decode(&bytes[..got]).map_err(|e| match e {
                    FormatError::Version { .. } => of_another_release(&path, &e),
                    e => self.damaged(&e.to_string()),
                })?;
                if c.volume != self.volume {
                    return Err(self.damaged("it belongs to another volume"));
                }
                (self.catalog_lsn, self.written) = (c.lsn, c.begun);
                if c.begun != self.given_up {
                    self.begun = c.begun;
                    self.cut_off = if c.begun.1 > c.lsn { c.begun.1 } else { 0 };
                }
                self.files = c.files.into_iter().collect();
                self.catalogued = true;
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => {
                return Err(Error::io(
                    format!("opening {}", self.catalog_path.display()),
                    &e,
                ));
            }
        }
        Ok(())
    }

    /// Fails if there is no catalogue, though the copy has a checkpoint: the records that would
    /// make its files again may be gone.
    pub fn check_catalog(&self, checkpoint: u64) -> Result<()> {
        match self.catalogued || checkpoint == 0 {
            true => Ok(()),
            false => Err(self.damaged("the catalogue is missing")),
        }
    }

    /// Makes a catalogue where there is none, before a checkpoint counts.
    pub fn make_catalog(&mut self) -> Result<()> {
        match self.catalogued {
            true => Ok(()),
            false => self.write_catalog(),
        }
    }

    fn damaged(&self, what: &str) -> Error {
        Error::Damaged {
            path: self.catalog_path.clone(),
            what: format!(
                "{what}; restore it, or remove this node's copy of the volume (its directory and its part of .mojim) to have it copied from the other node"
            ),
        }
    }

    /// Where the catalogue lies.
    pub fn catalog_path(&self) -> &Path {
        &self.catalog_path
    }

    /// Epoch and last LSN of the last sync point of which the catalogue may show a part.
    pub fn begun(&self) -> (u64, u64) {
        self.begun
    }

    /// What the catalogue has begun is not of this copy's history: it was given up.
    pub fn forget_begun(&mut self) {
        self.given_up = self.begun;
        (self.begun, self.cut_off) = ((0, 0), 0);
    }

    /// If a sync point that ends with `lsn` changes names, and the catalogue may show a part of it:
    /// the last LSN of those that were begun with it. They are applied again as one.
    pub fn cut_off(&self, lsn: u64) -> Option<u64> {
        (lsn > self.catalog_lsn && lsn <= self.cut_off).then_some(self.cut_off)
    }

    /// Whether the catalogue has the names of the sync point that ends with `lsn`.
    pub fn has_names_of(&self, lsn: u64) -> bool {
        lsn <= self.catalog_lsn
    }

    /// The catalogue's entries, by number.
    pub fn files(&self) -> impl Iterator<Item = &CatalogEntry> {
        self.files.values()
    }

    /// Those from a number on.
    pub fn files_from(&self, id: u32) -> impl Iterator<Item = &CatalogEntry> {
        self.files.from(id)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// The entry of a name.
    pub fn find(&self, name: &str) -> Option<&CatalogEntry> {
        self.files.find(name)
    }

    /// The entry of a number.
    pub fn get(&self, id: u32) -> Option<&CatalogEntry> {
        self.files.get(id)
    }

    /// A number for a new file. Random, since a number that was in use a moment ago
    /// must not come back: replaying a log writes to the numbers that it names.
    pub fn next_id(&self) -> u32 {
        loop {
            let id = self.env.random() as u32;
            if id != 0 && !self.files.has(id) {
                return id;
            }
        }
    }

    /// Names of regular files in the directory that the catalogue does not know.
    pub fn unmanaged_files(&self) -> Result<Vec<String>> {
        let all = self
            .env
            .list(&self.dir)
            .context(|| format!("listing {}", self.dir.display()))?;
        Ok(all
            .into_iter()
            .filter_map(|p| p.to_str().map(str::to_owned))
            .filter(|n| valid_file_name(n) && self.find(n).is_none())
            .collect())
    }

    /// Checks every file's size against the catalogue, when all records are applied.
    pub fn check_sizes(&mut self) -> Result<()> {
        let entries: Vec<_> = self.files.values().cloned().collect();
        for e in entries {
            let path = self.dir.join(&e.name);
            let len = match self.file(e.id) {
                Ok(f) => f.len().context(|| path.display().to_string())?,
                Err(Error::Io { errno, .. }) if no_file(errno) => return Err(self.lacks(&e)),
                Err(x) => return Err(x),
            };
            self.check_len(&e, len)?;
        }
        Ok(())
    }

    /// The same by name, without opening a file for good. Of a file that is `open_to_change` by
    /// records that are still to be applied no size is known: that one has to be there, unless it
    /// is empty. An empty one may be one whose creation a crash cut off: the catalogue has it
    /// first, and its record is applied again.
    pub fn check_sizes_but(&self, open_to_change: impl Fn(&CatalogEntry) -> bool) -> Result<()> {
        for e in self.files.values() {
            match open_to_change(e) {
                true if e.size == 0 => {}
                true => _ = self.there(e, false)?,
                false => {
                    let len = self.there(e, true)?.len();
                    let len = len.context(|| self.dir.join(&e.name).display().to_string())?;
                    self.check_len(e, len)?;
                }
            }
        }
        Ok(())
    }

    fn check_len(&self, e: &CatalogEntry, len: u64) -> Result<()> {
        match len == e.size {
            true => Ok(()),
            false => Err(Error::Damaged {
                path: self.dir.join(&e.name),
                what: format!(
                    "{len} bytes, {} expected; was it changed past Mojim? Restore it, or remove this node's copy of the volume to have it copied again, if another node has a good one",
                    e.size
                ),
            }),
        }
    }

    /// The file that has this name now; another one may be open here.
    fn there(&self, e: &CatalogEntry, write: bool) -> Result<Arc<dyn File>> {
        let how = OpenHow {
            write,
            ..OpenHow::DATA
        };
        let found = self.env.open(&self.dir.join(&e.name), how);
        found.map_err(|x| match is_gone(&x) && !NotPlain::is(&x) {
            true => self.lacks(e),
            false => self.closed_to_us(e, &x),
        })
    }

    /// Why a file that the catalogue has could not be opened.
    fn closed_to_us(&self, e: &CatalogEntry, x: &std::io::Error) -> Error {
        let path = self.dir.join(&e.name);
        match NotPlain::is(x) {
            true => Error::Damaged {
                path,
                what: format!(
                    "{x}, and in the place of a file of the volume ({} bytes); was it put there? Put that file back, or remove this node's copy of the volume to have it copied again, if another node has a good one",
                    e.size
                ),
            },
            false => Error::io(format!("opening {}", path.display()), x),
        }
    }

    /// [`Area::file`] for who compares what lies in the directory with another copy: a file
    /// that is open here, and whose name was removed, is not there.
    pub fn file_by_name(&mut self, id: u32) -> Result<Arc<dyn File>> {
        if let Some(e) = self.files.get(id) {
            self.there(e, false)?;
        }
        self.file(id)
    }

    fn lacks(&self, e: &CatalogEntry) -> Error {
        Error::Damaged {
            path: self.dir.join(&e.name),
            what: format!(
                "this file of the volume ({} bytes) is missing; was it removed? Restore it, or remove this node's copy of the volume to have it copied again, if another node has a good one",
                e.size
            ),
        }
    }

    /// A file, in messages.
    fn called(&self, id: u32) -> String {
        match self.files.get(id) {
            Some(f) => format!("file {:?}", f.name),
            None => format!("file {id}"),
        }
    }

    /// Where the files lie.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a file lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The open file of a number.
    pub fn file(&mut self, id: u32) -> Result<Arc<dyn File>> {
        if let Some(f) = self.open.get(id) {
            return Ok(f);
        }
        let entry = self
            .files
            .get(id)
            .ok_or_else(|| Error::NotFound(format!("file {id} is not in the catalogue")))?;
        let how = OpenHow {
            write: true,
            ..OpenHow::DATA
        };
        let opened = self.env.open(&self.dir.join(&entry.name), how);
        let f = opened.map_err(|x| self.closed_to_us(entry, &x))?;
        self.keep_open(id, f.clone())?;
        Ok(f)
    }

    fn keep_open(&mut self, id: u32, f: Arc<dyn File>) -> Result<()> {
        // The limit may have become smaller since the area was opened.
        if self.open.all().len() >= self.max_open.min(self.env.most_open()) {
            // Files with bytes that still need a sync stay.
            let mut open = self.open.all();
            open.retain(|id, _| self.unsynced.dirty.contains(id));
            // If that is all of them, half are closed. Where the file system does not tell later
            // of writes that failed, they are synced now instead of at the checkpoint: a
            // descriptor whose writes failed must not be lost.
            let many = open.len().saturating_sub(self.max_open / 2);
            let some: Vec<u32> = open.keys().copied().take(many).collect();
            drop(open);
            for id in some {
                let f = self
                    .open
                    .all()
                    .remove(&id)
                    .expect("only the area's holder removes");
                if !self.unsynced.may_close(&*f)
                    && let Err(e) = sync_file(&self.called(id), &*f)
                {
                    // The caller may not be the applier. The next sync must fail
                    // too, and not rely on a new descriptor, which may report success.
                    self.failed = Some(e.clone());
                    return Err(e);
                }
                self.unsynced.dirty.remove(&id);
            }
        }
        self.open.all().insert(id, f);
        Ok(())
    }

    /// Merges one record of a whole sync point. `meta` is the directory of spill files.
    pub fn apply(&mut self, r: &RecordView<'_>, meta: &Path) -> Result<()> {
        self.announce(r.header.lsn, r)?;
        for (op, payload) in r.ops() {
            if op.kind == OpKind::Spill {
                self.apply_spill(r.header.lsn, &op, payload, meta)?;
            } else {
                self.apply_op(r.header.lsn, &op, payload)?;
            }
        }
        Ok(())
    }

    fn apply_op(&mut self, lsn: u64, op: &Op, payload: &[u8]) -> Result<()> {
        match op.kind {
            OpKind::Write => self.write(op.file, op.offset, payload),
            OpKind::Resize => self.resize(op.file, op.offset),
            OpKind::Create | OpKind::Remove | OpKind::Rename if lsn <= self.catalog_lsn => Ok(()),
            OpKind::Create | OpKind::Remove | OpKind::Rename if self.is_passing(op.file) => Ok(()),
            OpKind::Rename if self.is_made(op.file) || self.is_removed(op.file) => Ok(()),
            OpKind::Create => self.create(lsn, op.file, payload),
            OpKind::Remove => self.remove(op.file),
            OpKind::Rename => self.rename(lsn, op.file, payload),
            OpKind::Spill => Err(Error::Protocol("a spill file names another".into())),
        }
    }

    fn resize(&mut self, id: u32, size: u64) -> Result<()> {
        let Some(old) = self.files.get(id).map(|f| f.size) else {
            return Ok(()); // removed later in the prefix
        };
        if size < old {
            // What lies behind the new end must not come back when the file grows again.
            self.flush()?;
        }
        let f = self.file(id)?;
        match f.set_len(size) {
            // A primary tries a size, and knows its mirror's limit, before it makes
            // a record. So this record is of an earlier version, which tried the
            // size after the record, and the program's call failed. Every node of
            // the volume skips it.
            // A backup with a smaller limit than theirs skips a record too; its
            // source then forwards nothing more to it.
            Err(e)
                if size > self.max_file
                    && matches!(e.raw_os_error(), Some(libc::EFBIG | libc::EINVAL)) =>
            {
                return Ok(());
            }
            r => r.context(|| format!("resizing {} to {size} bytes", self.called(id)))?,
        }
        self.unsynced.dirty.insert(id);
        self.files.resize(id, size);
        self.sizes_dirty = true;
        Ok(())
    }

    fn forget(&mut self, id: u32) {
        let open = self.open.all().remove(&id);
        if self.unsynced.dirty.remove(&id)
            && let Some(f) = open
        {
            self.left.insert(id, f);
        }
        self.image.forget(id);
    }

    fn reach(&self) -> Result<(u64, u64)> {
        let meta = self.catalog_path.parent().expect("it has a directory");
        let tell = |dir: &Path| {
            let reached = self.env.reach(dir);
            reached.context(|| format!("changing files in {}", dir.display()))
        };
        tell(&self.dir)?;
        tell(meta)
    }

    /// Fails if this process cannot change names and sizes any more, before there is a record of such a
    /// change: it cannot be applied then, and the copy is poisoned.
    pub fn check_reach(&self) -> Result<()> {
        let lost = |e: std::io::Error| {
            let what = format!(
                "{}: this process has another root or another user than when it attached; attach after chroot and setuid",
                self.dir.display()
            );
            Error::io(what, &e)
        };
        match self.reach() {
            Ok(place) if place == self.place => Ok(()),
            Ok(_) => Err(lost(std::io::Error::from_raw_os_error(libc::ENOENT))),
            Err(e) => Err(lost(std::io::Error::from_raw_os_error(e.errno()))),
        }
    }

    /// The longest names that files can have here.
    pub fn longest_names(&self) -> Longest {
        self.longest
    }

    /// The most bytes that the file system allows for a file here.
    pub fn max_file(&self) -> u64 {
        self.max_file
    }

    /// The table of open files: what is in it may be read without the area.
    pub fn open_files(&self) -> &Arc<OpenFiles> {
        &self.open
    }

    /// This area takes the place of another one, whose table of open files has its users.
    pub fn take_over(&mut self, open: &Arc<OpenFiles>) {
        let mut theirs = open.all();
        *theirs = std::mem::take(&mut self.open.all());
        drop(theirs);
        self.open = open.clone();
    }

    fn sync_parent(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        self.sync_dir(path.parent().unwrap_or(&self.dir))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        match self.env.sync_dir(dir) {
            Err(e) if !is_gone(&e) => {
                Err(Error::poisoned(format!("syncing {}", dir.display()), &e))
            }
            _ => Ok(()),
        }
    }

    /// Overwrites bytes of one file that the medium returned wrong. The file keeps
    /// its size.
    pub fn rewrite(&mut self, id: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        self.flush()?;
        self.write_run(id, offset, bytes)
    }

    /// From here on nothing counts as durable, not even what an earlier process
    /// applied: the next [`Area::sync`] syncs every file.
    pub fn doubt(&mut self) {
        self.unsynced.dirty = self.files.values().map(|f| f.id).collect();
    }

    /// Makes everything applied and flushed so far durable.
    pub fn sync(&mut self) -> Result<()> {
        self.begin_sync()?.run()
    }

    /// In place of [`Area::sync`]: what is to be synced, so that the area can be used meanwhile.
    /// If that fails, nothing more counts as durable.
    pub fn begin_sync(&mut self) -> Result<Syncing> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        let (dirty, whole) = self.unsynced.take();
        let mut files = Vec::new();
        for id in dirty.into_iter() {
            if !self.files.has(id) {
                continue;
            }
            let f = self.file(id)?;
            if whole.as_ref().is_some_and(|w| w.has(&*f)) {
                continue;
            }
            // No more descriptors than may be open.
            match files.len() < self.max_open {
                true => files.push((self.called(id), f)),
                false => sync_file(&self.called(id), &*f)?,
            }
        }
        Ok(Syncing { files, whole })
    }

    /// Writes the catalogue, if it has not all sizes: a file that grows with every sync point
    /// would otherwise have it written as often.
    pub fn write_sizes(&mut self) -> Result<()> {
        match self.sizes_dirty {
            true => self.write_catalog(),
            false => Ok(()),
        }
    }

    /// Takes the spill files of applied records up to `gone`, which are in no log any more.
    pub fn take_spills(&mut self, gone: u64) -> Vec<u64> {
        let all = self.spills.extract_if(.., |(lsn, _)| *lsn <= gone);
        all.map(|(_, id)| id).collect()
    }

    /// Replaces the catalogue durably.
    pub fn write_catalog(&mut self) -> Result<()> {
        self.unsynced.sync_names(&*self.env)?;
        let c = Catalog {
            volume: self.volume,
            lsn: self.catalog_lsn,
            begun: self.begun,
            files: self.files.values().cloned().collect(),
        };
        let path = self.catalog_path.clone();
        self.replace(&path, &c.encode())?;
        self.catalogued = true;
        self.written = self.begun;
        self.sizes_dirty = false;
        Ok(())
    }

    fn apply_spill(&mut self, lsn: u64, op: &Op, payload: &[u8], meta: &Path) -> Result<()> {
        let id = spill_id(payload)?;
        self.spills.push((lsn, id));
        let path = spill_path(meta, id);
        let what = || format!("spill file {}", path.display());
        let f = match self.env.open(&path, OpenHow::default()) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::Damaged {
                    path,
                    what: "the spill file of a record is missing".into(),
                });
            }
            r => r.context(what)?,
        };
        let mut at = 0u64;
        let mut buf = vec![0u8; 64 << 10];
        while at < op.offset {
            let n = f.read_at(&mut buf, at).context(what)?;
            let h = mojim_format::RecordHeader::decode(&buf[..n]).map_err(|e| Error::Damaged {
                path: path.clone(),
                what: e.to_string(),
            })?;
            if h.len as usize > n {
                if h.len as usize <= buf.len() {
                    return Err(Error::Damaged {
                        path,
                        what: "it ends early".into(),
                    });
                }
                buf.resize(h.len as usize, 0);
                continue;
            }
            let r = RecordView::decode(&buf[..h.len as usize]).map_err(|e| Error::Damaged {
                path: path.clone(),
                what: e.to_string(),
            })?;
            self.announce(lsn, &r)?;
            for (op, payload) in r.ops() {
                self.apply_op(lsn, &op, payload)?;
                if self.image_bytes() > 8 << 20 {
                    self.flush()?;
                }
            }
            at += h.len as u64;
        }
        Ok(())
    }

    /// Makes this the empty area of `volume`: removes every file.
    pub fn reset(&mut self, volume: u64) -> Result<()> {
        self.image = Image::default();
        self.open.all().clear();
        self.unsynced.dirty.clear();
        let names: Vec<_> = self.files.values().map(|f| f.name.clone()).collect();
        self.files.clear();
        self.volume = volume;
        (self.catalog_lsn, self.begun, self.cut_off) = (0, (0, 0), 0);
        self.names_dirty = false;
        self.removed = names;
        let note = self.rename_path();
        match self.env.remove(&note) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("removing {}", note.display()), &e));
            }
            _ => {}
        }
        // This also makes the removal of the rename note durable. After a crash
        // from here on, the next start completes the removals.
        self.note_removals(0)?;
        self.write_catalog()?;
        let names = std::mem::take(&mut self.removed);
        self.remove_files(&names)
    }

    /// Reads bytes of one file as of the applied LSN; for checksums and copies.
    pub fn read(&mut self, id: u32, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.flush()?;
        let f = self.file(id)?;
        f.read_at(buf, offset)
            .context(|| format!("reading {}", self.called(id)))
    }
}

/// [`is_gone`] by the error's number, where a file is opened to write.
fn no_file(errno: i32) -> bool {
    [libc::ENOENT, libc::ENOTDIR, libc::EISDIR].contains(&errno)
}

/// Makes a directory and its parents below `root`, durably.
pub fn make_dirs(env: &dyn Env, dir: &Path, root: &Path) -> Result<()> {
    env.create_dir_all(dir)
        .context(|| format!("making {}", dir.display()))?;
    for parent in dir.ancestors().skip(1) {
        if !parent.starts_with(root) {
            break;
        }
        match env.sync_dir(parent) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EIO) || parent == root => {
                return Err(Error::poisoned(format!("syncing {}", parent.display()), &e));
            }
            // Far up there may be directories that this process may not open.
            Err(_) => break,
        }
    }
    Ok(())
}

/// The number of the spill file that a record's payload names.
pub fn spill_id(payload: &[u8]) -> Result<u64> {
    payload
        .try_into()
        .map(u64::from_le_bytes)
        .map_err(|_| Error::Protocol("a record names a spill file wrongly".into()))
}

/// The number and length of the spill file that a record names, if it does.
pub fn named_spill(r: &RecordView<'_>) -> Result<Option<(u64, u64)>> {
    if r.header.ops != 1 {
        return Ok(None);
    }
    match r.ops().next() {
        Some((op, payload)) if op.kind == OpKind::Spill => {
            Ok(Some((spill_id(payload)?, op.offset)))
        }
        _ => Ok(None),
    }
}

/// Where a spill file lies.
pub fn spill_path(meta: &Path, id: u64) -> PathBuf {
    meta.join(format!("spill.{id}"))
}

/// Where the bytes are written that are to replace a small file.
fn replacement(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Replaces a small file durably and atomically.
pub fn replace_file(env: &dyn Env, path: &Path, bytes: &[u8]) -> Result<()> {
    let new = replacement(path);
    let what = || format!("writing {}", path.display());
    let how = OpenHow {
        create: true,
        write: true,
        ..OpenHow::default()
    };
    let f = env.open(&new, how).context(what)?;
    f.set_len(0).context(what)?;
    f.write_at(bytes, 0).context(what)?;
    put_replacement(env, path, f)
}

/// The replacement `f` of a small file is written: takes its place.
fn put_replacement(env: &dyn Env, path: &Path, f: Arc<dyn File>) -> Result<()> {
    let what = || format!("writing {}", path.display());
    f.sync().map_err(|e| Error::poisoned(what(), &e))?;
    drop(f);
    env.rename(&replacement(path), path).context(what)?;
    if let Some(dir) = path.parent() {
        env.sync_dir(dir).map_err(|e| Error::poisoned(what(), &e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mojim_format::RecordWriter;

    use super::*;
    use mojim_linux::Os;

    /// A program was told that a file could not be created in time (a copy was
    /// being made, and nothing was applied meanwhile), and tried again. The result
    /// was two files of one name: no copy can be made of them, and no attach succeeds.
    #[test]
    fn a_file_created_twice_is_one_file() {
        let dir = std::env::temp_dir().join(format!("mojim-area-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let (data, meta) = (dir.join("data"), dir.join("meta"));
        std::fs::create_dir_all(&meta).unwrap();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let mut area = Area::open(&env, &data, &meta, 9).unwrap();
        for (lsn, file, size) in [(1, 11, 100), (2, 12, 200)] {
            let mut bytes = vec![0; RecordWriter::len_for(2, 1)];
            let mut w = RecordWriter::new(&mut bytes, 2);
            let op = |kind, offset, len| Op {
                file,
                kind,
                offset,
                len,
            };
            w.op(op(OpKind::Create, 0, 1));
            w.op(op(OpKind::Resize, size, 0));
            w.payload_mut(1).copy_from_slice(b"x");
            w.finish(9, lsn, 1, 0, true, lsn - 1);
            let r = RecordView::decode(&bytes).unwrap();
            area.apply(&r, &meta).unwrap();
            area.end_sync_point(lsn).unwrap();
        }
        area.sync().unwrap();
        let mut again = Area::open(&env, &data, &meta, 9).unwrap();
        let files: Vec<_> = again.files().map(|f| (f.id, f.size)).collect();
        assert_eq!(files, [(12, 200)]);
        again.check_sizes().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// One record that removes a file and makes another one in a directory of its name, or the
    /// other way round, could not be applied: what is removed lay there until the record's end.
    /// Also after a crash in the middle, which leaves the catalogue and a note.
    #[test]
    fn what_a_record_removes_makes_way_for_what_it_makes() {
        let dir = std::env::temp_dir().join(format!("mojim-way-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let (data, meta) = (dir.join("data"), dir.join("meta"));
        std::fs::create_dir_all(&meta).unwrap();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let record = |lsn: u64, ops: &[(OpKind, u32, &str)]| {
            let payload: usize = ops.iter().map(|o| o.2.len()).sum();
            let mut bytes = vec![0; RecordWriter::len_for(ops.len(), payload)];
            let mut w = RecordWriter::new(&mut bytes, ops.len());
            for (kind, file, name) in ops {
                w.op(Op {
                    file: *file,
                    kind: *kind,
                    offset: 0,
                    len: name.len() as u32,
                });
            }
            ops.iter().for_each(|o| w.payload(o.2.as_bytes()));
            w.finish(9, lsn, 1, 0, true, lsn - 1);
            bytes
        };
        let first = record(1, &[(OpKind::Create, 1, "p"), (OpKind::Create, 2, "d/f")]);
        let ops = [
            (OpKind::Remove, 1, ""),
            (OpKind::Remove, 2, ""),
            (OpKind::Create, 3, "p/f"),
            (OpKind::Create, 4, "d"),
        ];
        let mut area = Area::open(&env, &data, &meta, 9).unwrap();
        let apply = |area: &mut Area, bytes: &[u8]| {
            area.apply(&RecordView::decode(bytes).unwrap(), &meta)
                .unwrap();
        };
        apply(&mut area, &first);
        area.end_sync_point(1).unwrap();
        for done in 0..=ops.len() {
            // A crash behind so many of its changes.
            apply(&mut area, &record(2, &ops[..done]));
            area = Area::open(&env, &data, &meta, 9).unwrap();
        }
        apply(&mut area, &record(2, &ops));
        area.end_sync_point(2).unwrap();
        let files: Vec<_> = area.files().map(|f| (f.id, f.name.clone())).collect();
        assert_eq!(files, [(3, "p/f".to_owned()), (4, "d".to_owned())]);
        area.check_sizes().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A file that nobody writes was missed only when somebody read it, if records that
    /// touch others were still to be applied. One that a crash kept from being made is not
    /// missed.
    #[test]
    fn a_file_that_was_removed_is_missed_and_one_that_is_to_be_made_is_not() {
        let dir = std::env::temp_dir().join(format!("mojim-missed-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let (data, meta) = (dir.join("data"), dir.join("meta"));
        std::fs::create_dir_all(&meta).unwrap();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let mut area = Area::open(&env, &data, &meta, 9).unwrap();
        let op = |kind, file, offset, len| Op {
            file,
            kind,
            offset,
            len,
        };
        for (file, name) in [(7, b"x"), (8, b"y")] {
            area.apply_op(1, &op(OpKind::Create, file, 0, 1), name)
                .unwrap();
        }
        area.apply_op(1, &op(OpKind::Resize, 7, 100, 0), b"")
            .unwrap();
        area.end_sync_point(1).unwrap();
        area.sync().unwrap();
        // As a crash leaves it that came after the catalogue and before the file.
        std::fs::remove_file(data.join("y")).unwrap();
        area.check_sizes_but(|_| true).unwrap();
        std::fs::remove_file(data.join("x")).unwrap();
        // Although it is open here.
        for found in [
            area.check_sizes_but(|_| true),
            area.file_by_name(7).map(drop),
        ] {
            let said = found.expect_err("noticed").to_string();
            assert!(
                said.contains("data/x") && said.contains("missing"),
                "{said}"
            );
        }
        area.file(7).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A new area below `dir`, and where its files and its catalogue lie.
    fn new_area(dir: &Path) -> (Area, PathBuf) {
        let (data, meta) = (dir.join("data"), dir.join("meta"));
        std::fs::create_dir_all(&meta).unwrap();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        (Area::open(&env, &data, &meta, 9).unwrap(), data)
    }

    fn make(area: &mut Area, lsn: u64, file: u32, name: &str) -> Result<()> {
        let (kind, offset, len) = (OpKind::Create, 0, name.len() as u32);
        let op = Op {
            file,
            kind,
            offset,
            len,
        };
        area.apply_op(lsn, &op, name.as_bytes())?;
        area.end_sync_point(lsn)
    }

    fn make_pipe(path: &Path) {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a path that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    }

    /// What somebody had put where a record made a file was opened: a symbolic link was followed,
    /// and the file that it leads to cut; a pipe was written to; a file that may not be written to,
    /// or a directory with files, kept the node from applying, for good. In a thread that is
    /// nobody's as far as files are concerned: root may write to everything.
    #[test]
    fn what_is_in_the_way_of_a_new_file_is_put_aside() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let work = || {
            // SAFETY: has no memory of ours. It is of this thread only.
            unsafe { libc::setfsuid(65534) };
            let (mut area, data) = new_area(dir.path());
            let elsewhere = dir.path().join("elsewhere");
            std::fs::write(&elsewhere, "not the volume's").unwrap();
            let long = format!("{}/{}", "d".repeat(250), "x".repeat(250));
            std::fs::create_dir_all(data.join(&long).parent().unwrap()).unwrap();
            std::fs::create_dir_all(data.join("directory/deep")).unwrap();
            symlink(&elsewhere, data.join("link")).unwrap();
            symlink(&elsewhere, data.join(&long)).unwrap();
            symlink(dir.path().join("nowhere"), data.join("dangling")).unwrap();
            symlink(&elsewhere, data.join("directory/deep/link")).unwrap();
            make_pipe(&data.join("pipe"));
            make_pipe(&data.join("above"));
            drop(std::os::unix::net::UnixListener::bind(data.join("socket")).unwrap());
            std::fs::write(data.join("locked"), "locked").unwrap();
            let mode = std::fs::Permissions::from_mode(0o444);
            std::fs::set_permissions(data.join("locked"), mode).unwrap();
            let names = ["link", &long, "dangling", "directory", "pipe", "socket"];
            let names = names.into_iter().chain(["locked", "above/x"]);
            let names: Vec<_> = names.zip(1..).collect();
            for (name, n) in &names {
                make(&mut area, *n, *n as u32, name).unwrap();
                assert!(
                    data.join(name).symlink_metadata().unwrap().is_file(),
                    "{name}"
                );
            }
            area.check_sizes().unwrap();
            let lost = data.join(names::LOST);
            let at = |name: &str| lost.join(name).symlink_metadata().unwrap().file_type();
            assert!(at("1.link").is_symlink() && at("3.dangling").is_symlink());
            assert!(at("4.directory/deep/link").is_symlink());
            assert!(at("5.pipe").is_fifo() && at("8.above").is_fifo());
            assert!(at("6.socket").is_socket());
            assert_eq!(std::fs::read(lost.join("7.locked")).unwrap(), b"locked");
            assert_eq!(std::fs::read(&elsewhere).unwrap(), b"not the volume's");
            assert!(!dir.path().join("nowhere").exists());
            assert_eq!(std::fs::read_dir(&lost).unwrap().count(), names.len());
        };
        std::thread::scope(|s| s.spawn(work).join().unwrap());
    }

    /// A link that was put in the place of a file of the volume was followed, and a file elsewhere
    /// changed; a pipe there was waited for, by whoever held the area's lock.
    #[test]
    fn what_is_in_the_place_of_a_file_is_not_opened_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let (mut area, data) = new_area(dir.path());
        make(&mut area, 1, 1, "x").unwrap();
        area.sync().unwrap();
        let elsewhere = dir.path().join("elsewhere");
        std::fs::write(&elsewhere, "").unwrap();
        let link = |at: &Path| std::os::unix::fs::symlink(&elsewhere, at).unwrap();
        for what in ["symbolic link", "pipe"] {
            std::fs::remove_file(data.join("x")).unwrap();
            match what {
                "pipe" => make_pipe(&data.join("x")),
                _ => link(&data.join("x")),
            }
            let env = area.env.clone();
            let meta = dir.path().join("meta");
            let mut again = Area::open(&env, &data, &meta, 9).unwrap();
            let found = [again.check_sizes(), again.file_by_name(1).map(drop)];
            for found in found.into_iter().chain([again.file(1).map(drop)]) {
                let said = found.expect_err(what).to_string();
                let parts = ["data/x", what, "Put that file back"];
                assert!(parts.iter().all(|p| said.contains(p)), "{said}");
            }
            make_pipe(&data.join("unmanaged"));
            let said = again.check_name("unmanaged").expect_err("a pipe");
            assert_eq!(said.errno(), libc::EEXIST, "{said}");
            std::fs::remove_file(data.join("unmanaged")).unwrap();
        }
    }

    /// Small extents, alone, many in a page, in neighbouring pages and at the
    /// file's end: the file has what writing each of them would have given.
    #[test]
    fn what_was_merged_is_what_was_written() {
        let dir = std::env::temp_dir().join(format!("mojim-merged-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let (data, meta) = (dir.join("data"), dir.join("meta"));
        std::fs::create_dir_all(&meta).unwrap();
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let mut area = Area::open(&env, &data, &meta, 9).unwrap();
        let size = 40 * IMAGE_PAGE + 100;
        let op = |kind, offset: usize, len: usize| Op {
            file: 7,
            kind,
            offset: offset as u64,
            len: len as u32,
        };
        area.apply_op(1, &op(OpKind::Create, 0, 1), b"x").unwrap();
        area.apply_op(1, &op(OpKind::Resize, size, 0), b"").unwrap();
        area.end_sync_point(1).unwrap();
        let mut want = vec![0u8; size];
        let mut rng = mojim_env::rng::Rng::new(1);
        let mut below = |n: usize| rng.index(n);
        for round in 1..200u8 {
            for _ in 0..below(400) {
                // Pages far apart, then neighbours, then one again and again.
                let page = match round % 3 {
                    0 => below(41),
                    1 => 3 * below(13),
                    _ => 40 - below(3),
                };
                let at = (page * IMAGE_PAGE + below(IMAGE_PAGE)).min(size - 1);
                let most = if below(50) == 0 { 6000 } else { 40 };
                let end = (at + 1 + below(most)).min(size);
                want[at..end].fill(round);
                area.write(7, at as u64, &vec![round; end - at]).unwrap();
            }
            area.flush().unwrap();
            assert_eq!(area.image_bytes(), 0);
            assert!(std::fs::read(data.join("x")).unwrap() == want, "{round}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
