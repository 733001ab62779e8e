//! The names of the data area: how records make, remove and rename files.
//!
//! Notes say after a crash what was under way.
//!
//! Owns the two notes beside the catalogue, and the order of their writes and the
//! catalogue's.
//!
//! Invariants:
//!
//! - A file that leaves the catalogue is noted first, and goes from the directory afterwards.
//! - A rename is noted first. The file's new name is durable before the catalogue has it.
//! - Within a record the catalogue has the previous LSN, so that the record is applied again, and
//!   says which sync point was begun. It says so before the directory shows a renaming.

use super::outcome::Numbered;
use super::*;
use crate::notes::{REMOVAL_NOTE, RENAME_NOTE, RemovalNote, RenameNote};

/// Where what is in the way lies, in a volume's directory.
pub(super) const LOST: &str = ".mojim-lost";

/// How opening a file fails that may not be written to, or is a program that runs.
const UNWRITABLE: [std::io::ErrorKind; 2] = [
    std::io::ErrorKind::PermissionDenied,
    std::io::ErrorKind::ExecutableFileBusy,
];

/// Bytes of its path that the name of what lies there has.
const MOST_OF_NAME: usize = 200;

impl Area {
    /// A rename that a crash cut off between the file system and the
    /// catalogue is completed, so that replaying finds each file under the
    /// name that the catalogue says.
    pub(super) fn finish_rename(&mut self) -> Result<()> {
        let path = self.rename_path();
        let what = || format!("reading {}", path.display());
        let f = match self.env.open(&path, OpenHow::default()) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            r => r.context(what)?,
        };
        let mut b = vec![0u8; f.len().context(what)?.min(1 << 16) as usize];
        let got = f.read_at(&mut b, 0).context(what)?;
        let Some(r) = RenameNote::decode(&b[..got]) else {
            return Err(self.damaged("the note of its last renaming is damaged"));
        };
        let known = self.files.get(r.file).is_some_and(|e| e.name == r.from);
        if r.volume != self.volume || r.lsn <= self.catalog_lsn || !known {
            return Ok(()); // done, and in the catalogue
        }
        let from = self.dir.join(&r.from);
        match self.env.open(&from, OpenHow::DATA) {
            // It was not done: its record is applied again, with what makes way for it.
            Ok(_) => return Ok(()),
            Err(e) if is_gone(&e) => {}
            Err(e) => return Err(Error::io(format!("opening {}", from.display()), &e)),
        }
        self.sync_parent(&r.from)?;
        self.sync_parent(&r.to)?;
        self.renamed(r.file, &r.to);
        self.write_catalog()
    }

    /// Completes removals that a crash cut off: files that left the catalogue are
    /// removed from the directory too.
    pub(super) fn finish_removal(&mut self) -> Result<()> {
        self.finish_removal_to(self.catalog_lsn)
    }

    /// All records of this copy are applied. A note of removals that is left is of sync points that
    /// were given up: what it names left the catalogue with them, and goes from the directory, too.
    pub fn finish_removals_given_up(&mut self) -> Result<()> {
        self.finish_removal_to(u64::MAX)
    }

    /// [`Area::finish_removal`], if it is of a record up to `lsn`.
    fn finish_removal_to(&mut self, lsn: u64) -> Result<()> {
        // A newer note belongs to a record that will be applied again.
        match self.read_removals()? {
            Some(note) if note.lsn <= lsn => self.remove_files(&note.names),
            _ => Ok(()),
        }
    }

    /// The note of removals, if there is one of this volume.
    fn read_removals(&self) -> Result<Option<RemovalNote>> {
        let path = self.removal_path();
        let what = || format!("reading {}", path.display());
        let f = match self.env.open(&path, OpenHow::default()) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            r => r.context(what)?,
        };
        let mut b = vec![0u8; f.len().context(what)?.min(MAX_CATALOG) as usize];
        let got = f.read_at(&mut b, 0).context(what)?;
        match RemovalNote::decode(&b[..got]) {
            Some(note) => Ok(Some(note).filter(|n| n.volume == self.volume)),
            None => Err(self.damaged("the note of its last removals is damaged")),
        }
    }

    fn removal_path(&self) -> PathBuf {
        self.catalog_path.with_file_name(REMOVAL_NOTE)
    }

    /// Removes those files that the catalogue does not have, and the note of removals.
    pub(super) fn remove_files(&mut self, names: &[String]) -> Result<()> {
        let mut dirs = BTreeSet::new();
        for name in names.iter().filter(|n| self.files.find(n).is_none()) {
            self.remove_quietly(name)?;
            dirs.extend(self.dir.join(name).parent().map(Path::to_owned));
        }
        self.unsynced.sync_dirs(&*self.env, &dirs)?;
        let note = self.removal_path();
        let gone = match self.env.remove(&note) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
        gone.and_then(|()| self.env.sync_dir(note.parent().expect("it lies in meta")))
            .context(|| format!("removing {}", note.display()))
    }

    pub(super) fn rename_path(&self) -> PathBuf {
        self.catalog_path.with_file_name(RENAME_NOTE)
    }

    /// In the catalogue, file `id` has the name `to` from now on.
    fn renamed(&mut self, id: u32, to: &str) {
        if let Some(old) = self.find(to).map(|f| f.id)
            && old != id
        {
            self.files.remove(old);
            self.forget(old);
        }
        self.files.rename(id, to);
    }

    /// Sync points are to be applied that end with these epochs and LSNs; `ops` gives the
    /// operations of so many of them. Returns how many are applied together, from the first one
    /// on: their names are given here, unless it is one that is applied step by step.
    pub fn begin<'a, I>(&mut self, points: &[(u64, u64)], ops: impl Fn(usize) -> I) -> Result<usize>
    where
        I: Iterator<Item = Numbered<'a>>,
    {
        let mut count = points.len();
        let mut outcome = None;
        while points[0].1 > self.catalog_lsn && count > 0 {
            match Outcome::of(&self.files, || ops(count)) {
                Ok(all) => {
                    outcome = all;
                    break;
                }
                Err(number) => count = number,
            }
        }
        let count = if outcome.is_some() { count } else { 1 };
        let (epoch, lsn) = points[count - 1];
        self.begin_writes(epoch, lsn);
        outcome.map_or(Ok(()), |outcome| self.give_names(lsn, outcome))?;
        Ok(count)
    }

    /// [`Area::begin`] of a sync point that changes no names.
    pub fn begin_writes(&mut self, epoch: u64, lsn: u64) {
        if lsn > self.begun.1 {
            self.begun = (epoch, lsn);
        }
    }

    /// Gives the names that the sync points up to `lsn` come to.
    fn give_names(&mut self, lsn: u64, outcome: Outcome) -> Result<()> {
        // A crash may have left some of them in the catalogue, from an earlier attempt, and that
        // may have come to other names.
        let gone = outcome.passing.iter().chain(&outcome.removed);
        for id in gone.copied().collect::<Vec<_>>() {
            if self.files.has(id) || outcome.removed.contains(&id) {
                self.remove(id)?;
            }
        }
        let mut more = false;
        for (id, name) in &outcome.made {
            let id = *id;
            let holders = self.files.holders(name).map(|f| f.id);
            let others: Vec<u32> = holders.filter(|other| *other != id).collect();
            for other in others {
                // Made by the sync points under another name, it gets that one in its turn.
                self.files.remove(other);
                self.forget(other);
            }
            let (size, name) = (0, name.clone());
            // It is made anew: until then there may be no file with what the catalogue has.
            match self.files.resize(id, 0) {
                None => {
                    more = true;
                    self.files.insert(CatalogEntry { id, size, name });
                }
                Some(before) => {
                    more |= before > 0;
                    let before = self.files.rename(id, &name).expect("it is there");
                    if before != name {
                        more = true;
                        self.removed.push(before);
                    }
                }
            }
        }
        let given: BTreeSet<&str> = outcome.made.values().map(|name| &name[..]).collect();
        // Who has a name now needs no note of whoever had it.
        let gone = std::mem::take(&mut self.removed);
        let (again, gone): (Vec<_>, Vec<_>) =
            gone.into_iter().partition(|name| given.contains(&name[..]));
        self.removed = gone;
        self.outcome = outcome;
        if more {
            // A file that the catalogue does not know would remain when this copy is given up.
            self.write_names(lsn)?;
        }
        // A new file is made in its place: who has opened the old one keeps that.
        again.iter().try_for_each(|name| self.remove_quietly(name))
    }

    /// Whether the sync points make this file and remove it.
    pub(super) fn is_passing(&self, id: u32) -> bool {
        self.outcome.passing.contains(&id)
    }

    /// Whether the sync points remove this file, which was there.
    pub(super) fn is_removed(&self, id: u32) -> bool {
        self.outcome.removed.contains(&id)
    }

    /// Whether the sync points make this file, under its last name.
    pub(super) fn is_made(&self, id: u32) -> bool {
        self.outcome.made.contains_key(&id)
    }

    /// If `r`, which is of the record `lsn`, makes several files under names that are free, they
    /// are written to the catalogue at once: each for itself would be the whole catalogue each
    /// time.
    pub(super) fn announce(&mut self, lsn: u64, r: &RecordView<'_>) -> Result<()> {
        let is_new = |op: &Op| {
            let known = self.files.has(op.file) || self.is_passing(op.file);
            op.kind == OpKind::Create && !known
        };
        if lsn <= self.catalog_lsn || r.ops().filter(|(op, _)| is_new(op)).count() < 2 {
            return Ok(());
        }
        let mut new = BTreeMap::new();
        for (op, payload) in r.ops().filter(|(op, _)| is_new(op)) {
            new.insert(Self::name(payload)?, op.file);
        }
        new.retain(|name, id| self.files.find(name).is_none() && !self.files.has(*id));
        let (size, more) = (0, !new.is_empty());
        for (name, id) in new {
            let name = name.to_owned();
            self.files.insert(CatalogEntry { id, size, name });
        }
        match more {
            true => self.write_names(lsn),
            false => Ok(()),
        }
    }

    /// Makes file `id`, by the record `lsn`. The payload is its name.
    pub(super) fn create(&mut self, lsn: u64, id: u32, payload: &[u8]) -> Result<()> {
        // If the file is there already, a rename later in this record was done
        // before a crash, and the catalogue was written with it.
        let name = match self.files.get(id) {
            Some(e) => e.name.clone(),
            None => Self::name(payload)?.to_owned(),
        };
        self.flush()?;
        let path = self.dir.join(&name);
        self.make_parent(lsn, &path)?;
        // Another file of that name is an earlier attempt to create it, of whose
        // success the program was not told: this one counts.
        if !self.is_made(id) {
            self.renamed(id, &name);
        }
        let entry = CatalogEntry {
            id,
            size: 0,
            name: name.clone(),
        };
        if self.files.insert(entry).is_none() {
            // The catalogue first: a file that it does not know would remain when this copy
            // is given up.
            self.write_names(lsn)?;
        }
        let how = OpenHow {
            create: true,
            write: true,
            ..OpenHow::DATA
        };
        let what = || format!("creating {}", path.display());
        let f = self
            .in_place_of(lsn, &path, &UNWRITABLE, |env| env.open(&path, how))?
            .context(what)?;
        // Who has opened what lies there has the new file, so it is cut. Durably before the
        // catalogue has the LSN: with the power its bytes could come back when the record is not
        // applied again.
        if f.len().context(what)? > 0 {
            f.set_len(0).context(what)?;
            self.unsynced.was_cut(&self.called(id), &f)?;
        }
        self.keep_open(id, f)?;
        self.unsynced.dirty.insert(id);
        self.names_dirty = true;
        self.unsynced.dirs.extend(path.parent().map(Path::to_owned));
        Ok(())
    }

    pub(super) fn remove(&mut self, id: u32) -> Result<()> {
        self.flush()?;
        // Also of one that is gone already: if a crash cut that off, a note of it is left.
        self.names_dirty = true;
        let Some(e) = self.files.remove(id) else {
            return Ok(());
        };
        self.forget(id);
        // The catalogue comes first: a file that it does not know does no harm.
        self.removed.push(e.name);
        Ok(())
    }

    /// Renames file `id`, by the record `lsn`. The payload is the new name.
    pub(super) fn rename(&mut self, lsn: u64, id: u32, payload: &[u8]) -> Result<()> {
        let name = Self::name(payload)?.to_owned();
        self.flush()?;
        let Some(e) = self.files.get(id).cloned() else {
            return Ok(());
        };
        self.names_dirty = true;
        if e.name == name {
            return Ok(()); // done already, before a crash
        }
        let (from, to) = (self.dir.join(&e.name), self.dir.join(&name));
        if self.written != self.begun {
            // The catalogue tells what was begun before the directory shows it: after a crash the
            // note alone completes this renaming, whatever became of the record.
            self.write_names(lsn)?;
        }
        self.make_parent(lsn, &to)?;
        // The new name may be durable only where its directory is.
        self.unsynced.sync_names(&*self.env)?;
        let note = RenameNote {
            volume: self.volume,
            lsn,
            file: id,
            from: e.name.clone(),
            to: name.clone(),
        };
        self.replace(&self.rename_path(), &note.encode())?;
        self.in_place_of(lsn, &to, &[], |env| env.rename(&from, &to))?
            .context(|| format!("renaming {}", from.display()))?;
        self.sync_parent(&e.name)?;
        self.sync_parent(&name)?;
        self.renamed(id, &name);
        self.write_names(lsn)
    }

    fn name(payload: &[u8]) -> Result<&str> {
        outcome::name(payload)
            .ok_or_else(|| Error::Protocol("a record names a file that no volume can have".into()))
    }

    /// A name that this sync point removed is to be another file's, or a directory of it: what
    /// lies there goes at once. After a crash the record is applied again, and finds the note.
    fn make_way(&mut self, lsn: u64) -> Result<()> {
        if self.removed.is_empty() {
            // The note may be of a later record of this sync point. Or it is of others behind this
            // one: a crash came between it and the catalogue that says that they were begun, too.
            return self.finish_removal_to(u64::MAX);
        }
        self.write_names(lsn)?;
        let removed = std::mem::take(&mut self.removed);
        self.remove_files(&removed)
    }

    /// Writes the catalogue within the record `lsn`: the present names, but the previous LSN.
    /// What it lacks is noted first: when the record is applied again, the catalogue does not
    /// tell any more that it is to be removed.
    fn write_names(&mut self, lsn: u64) -> Result<()> {
        if !self.removed.is_empty() {
            self.note_removals(lsn)?;
        }
        self.write_catalog()
    }

    /// Makes the directory of `path`, also where a file lay that is removed.
    fn make_parent(&mut self, lsn: u64, path: &Path) -> Result<()> {
        let Some(parent) = path.parent() else {
            return Ok(());
        };
        if self.made.contains(parent) {
            return Ok(());
        }
        match self.make_dirs(parent) {
            Err(Error::Io { errno, .. }) if [libc::ENOTDIR, libc::EEXIST].contains(&errno) => {
                self.make_way(lsn)?;
                if self.make_dirs(parent).is_err() {
                    self.move_unmanaged(lsn, parent)?;
                    self.make_dirs(parent)?;
                }
            }
            made => made?,
        }
        self.made.insert(parent.to_owned());
        Ok(())
    }

    /// Makes a directory of the volume, and those above it. They are durable with the names in
    /// them.
    fn make_dirs(&mut self, dir: &Path) -> Result<()> {
        let made = self.env.create_dirs(dir);
        made.context(|| format!("making {}", dir.display()))?;
        let above = dir.ancestors().skip(1);
        let above = above.take_while(|d| d.starts_with(&self.dir));
        self.unsynced.dirs.extend(above.map(Path::to_owned));
        Ok(())
    }

    /// [`Area::in_place_of_dirs`], also where files lay in these directories that are removed, or
    /// something lies at `path` that is nothing of the volume, as these errors say, too.
    fn in_place_of<T>(
        &mut self,
        lsn: u64,
        path: &Path,
        other: &[std::io::ErrorKind],
        make: impl Fn(&dyn Env) -> std::io::Result<T>,
    ) -> Result<std::io::Result<T>> {
        use std::io::ErrorKind::DirectoryNotEmpty;
        let env = self.env.clone();
        let mut made = self.in_place_of_dirs(path, || make(&*env));
        if matches!(&made, Err(e) if e.kind() == DirectoryNotEmpty) {
            self.make_way(lsn)?;
            made = self.in_place_of_dirs(path, || make(&*env));
        }
        let is_other = |e: &std::io::Error| {
            NotPlain::is(e) || e.kind() == DirectoryNotEmpty || other.contains(&e.kind())
        };
        match made {
            Err(e) if is_other(&e) => {
                self.put_aside(lsn, path)?;
                Ok(make(&*env))
            }
            made => Ok(made),
        }
    }

    /// What somebody else put into the directory keeps a record from being applied, for good:
    /// the first that lies at `path` or above it, and is nothing of the volume, goes to
    /// [`LOST`].
    fn move_unmanaged(&mut self, lsn: u64, path: &Path) -> Result<()> {
        let top = self.dir.clone();
        let mut all: Vec<&Path> = path.ancestors().take_while(|p| *p != top).collect();
        all.reverse();
        for at in all {
            let name = at.strip_prefix(&top).ok().and_then(Path::to_str);
            let Some(name) = name else {
                break;
            };
            let is_file = match self.env.open(at, OpenHow::DATA) {
                Err(e) => NotPlain::is(&e) || e.kind() == std::io::ErrorKind::PermissionDenied,
                Ok(_) => true,
            };
            let is_ours = self.files.find(name).is_some();
            if is_ours || at != path && !is_file {
                continue;
            }
            if self.put_aside(lsn, at)? {
                break;
            }
        }
        Ok(())
    }

    /// What lies at `at`, and is no file of the volume, goes to [`LOST`]. False if it is a
    /// directory in which the volume has files, or nothing.
    fn put_aside(&mut self, lsn: u64, at: &Path) -> Result<bool> {
        use std::io::ErrorKind::{IsADirectory, NotFound};
        let is = |at: &Path, kind| match self.env.open(at, OpenHow::DATA) {
            Err(e) => e.kind() == kind,
            Ok(_) => false,
        };
        let top = self.dir.clone();
        let Some(name) = at.strip_prefix(&top).ok().and_then(Path::to_str) else {
            return Ok(false);
        };
        // The catalogue may have files already for which this is to be a directory.
        let below = format!("{name}/");
        let has_ours = || self.files.values().any(|f| f.name.starts_with(&below));
        if is(at, NotFound) || is(at, IsADirectory) && has_ours() {
            return Ok(false);
        }
        let lost = top.join(LOST);
        make_dirs(&*self.env, &lost, &top)?;
        // Of a long path the end: a name has its limit, too.
        let from = name.len().saturating_sub(MOST_OF_NAME);
        let from = (from..).find(|i| name.is_char_boundary(*i)).unwrap_or(0);
        let name = name[from..].replace('/', "_");
        // What an attempt before a crash moved stays, and so does what was called `a/b`, not `a_b`.
        let names = std::iter::once(format!("{lsn}.{name}"))
            .chain((2..).map(|n| format!("{lsn}.{n}.{name}")))
            .map(|name| lost.join(name));
        let to = { names }
            .find(|to| is(to, NotFound))
            .expect("they do not end");
        self.made.clear();
        let moved = self.env.rename(at, &to);
        moved.context(|| format!("moving {}", at.display()))?;
        self.sync_dir(&lost)?;
        self.sync_dir(at.parent().unwrap_or(&top))?;
        Ok(true)
    }

    /// A directory exists only for the files in it: empty directories that removed files
    /// left give way to a file.
    fn in_place_of_dirs<T>(
        &mut self,
        path: &Path,
        make: impl Fn() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        match make() {
            Err(e) if e.kind() == std::io::ErrorKind::IsADirectory => {
                self.made.clear();
                self.env.remove_empty_dirs(path)?;
                make()
            }
            r => r,
        }
    }

    fn remove_quietly(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        match self.env.remove(&path) {
            // Another file of the volume now has the name of its directory, or uses its
            // name as a directory.
            Err(e) if !is_gone(&e) => Err(Error::io(format!("removing {}", path.display()), &e)),
            _ => Ok(()),
        }
    }

    pub(super) fn note_removals(&mut self, lsn: u64) -> Result<()> {
        // The sync points may have been applied in part before, maybe together with fewer others or
        // more: then the catalogue lacks what they had removed, and only the note tells of that.
        // It goes only once it is completed.
        let names = self.read_removals()?.map_or_else(Vec::new, |n| n.names);
        self.removed.extend(names);
        self.removed.sort();
        self.removed.dedup();
        let note = RemovalNote {
            volume: self.volume,
            lsn,
            names: self.removed.clone(),
        };
        self.replace(&self.removal_path(), &note.encode())
    }

    /// Checks, before there is a record, that a file of that name can be made here. True
    /// if a file lies there already (a foreign one, unless the catalogue has the name).
    pub fn check_name(&self, name: &str) -> Result<bool> {
        let path = self.dir.join(name);
        let refuse = |errno: i32, what: String| Error::Io {
            what,
            errno,
            error: std::io::Error::from_raw_os_error(errno).to_string(),
        };
        let below = |file: &str, dir: &str| {
            let rest = file.strip_prefix(dir);
            rest.is_some_and(|rest| rest.starts_with('/'))
        };
        for f in self.files.values() {
            if below(&f.name, name) {
                let what = format!("file {:?} lies in the directory {name:?}", f.name);
                return Err(refuse(libc::EISDIR, what));
            }
            if below(name, &f.name) {
                let what = format!("{:?} is a file, in which {name:?} cannot lie", f.name);
                return Err(refuse(libc::ENOTDIR, what));
            }
        }
        let how = OpenHow {
            write: true,
            ..OpenHow::DATA
        };
        match self.env.open(&path, how) {
            Ok(_) => Ok(true),
            Err(e) if NotPlain::is(&e) => Err(Error::Exists(format!(
                "{}: {e}: remove it, or give the file another name",
                path.display()
            ))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) if e.kind() == std::io::ErrorKind::IsADirectory => {
                match self
                    .env
                    .list(&path)
                    .context(|| format!("listing {}", path.display()))?
                {
                    files if files.is_empty() => Ok(false),
                    _ => {
                        let what = format!("{} is a directory with files", path.display());
                        Err(refuse(libc::EISDIR, what))
                    }
                }
            }
            Err(e) => Err(Error::io(format!("opening {}", path.display()), &e)),
        }
    }

    /// The sync points that were begun are applied, the last of which ends with `lsn`: their
    /// changes of names reach the catalogue together. Until then the records are in the log, so
    /// that a crash in between only repeats them.
    pub fn end_sync_point(&mut self, lsn: u64) -> Result<()> {
        let dirty = std::mem::take(&mut self.names_dirty);
        let came = !std::mem::take(&mut self.outcome).is_empty();
        // While replaying, an older state must not replace a newer one.
        if !(dirty || came) || lsn <= self.catalog_lsn {
            return Ok(());
        }
        // Also if all that it made is gone, so that the catalogue is not written: what is written
        // to it within a later sync point has this one behind it.
        self.catalog_lsn = lsn;
        if !dirty {
            // An earlier attempt, step by step, may have left a note.
            return self.finish_removal();
        }
        if self.removed.is_empty() {
            self.write_catalog()?;
            // The same record may have been applied in part before a crash, and have
            // left a note of removals.
            return self.finish_removal();
        }
        self.note_removals(lsn)?;
        self.write_catalog()?;
        let removed = std::mem::take(&mut self.removed);
        self.remove_files(&removed)
    }
}
