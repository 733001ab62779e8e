//! A copy of another node's files, kept beside the own ones until it is whole.
//!
//! Owns the staged files, `.mojim-copy.NUMBER` in the data directory (a file
//! system of its own may be mounted there, and a rename must stay within it),
//! and their catalogue, `copy` in the metadata directory.
//!
//! Invariants:
//! - Nothing of the present copy is touched before `seal` returned and the
//!   superblock says `Switching`: a source that fails in between takes
//!   nothing with it.
//! - `put_in_place` may be repeated from any point where a crash cut it off:
//!   a staged file that is not there any more is in its place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_format::catalog::valid_file_name;
use mojim_format::{Catalog, CatalogEntry};

use crate::area::{REMOVAL_NOTE, RENAME_NOTE, make_dirs, replace_file};
use crate::env::{Env, File, OpenHow};
use crate::error::{Context, Error, Result};

/// What the names of staged files begin with; no file of a volume can.
const PREFIX: &str = ".mojim-copy.";

/// Most staged files that are kept open.
const MAX_OPEN: usize = 64;

/// A copy that is being taken in.
pub struct Stage {
    env: Arc<dyn Env>,
    dir: PathBuf,
    catalog: PathBuf,
    volume: u64,
    files: BTreeMap<u32, CatalogEntry>,
    names: BTreeSet<String>,
    open: BTreeMap<u32, Arc<dyn File>>,
    sealed: bool,
}

/// Where the staged catalogue lies.
fn catalog_path(meta: &Path) -> PathBuf {
    meta.join("copy")
}

fn staged(dir: &Path, id: u32) -> PathBuf {
    dir.join(format!("{PREFIX}{id}"))
}

impl Stage {
    /// Begins to take in a copy of `volume`; what an earlier one left is removed.
    pub fn begin(env: &Arc<dyn Env>, dir: &Path, meta: &Path, volume: u64) -> Result<Stage> {
        Stage::clear(&**env, dir, meta)?;
        Ok(Stage {
            env: env.clone(),
            dir: dir.to_owned(),
            catalog: catalog_path(meta),
            volume,
            files: BTreeMap::new(),
            names: BTreeSet::new(),
            open: BTreeMap::new(),
            sealed: false,
        })
    }

    /// Removes what a copy that did not become whole left behind.
    pub fn clear(env: &dyn Env, dir: &Path, meta: &Path) -> Result<()> {
        let what = || format!("removing an unfinished copy in {}", dir.display());
        remove(env, &catalog_path(meta)).context(what)?;
        for name in env.list(dir).context(what)? {
            if name.to_str().is_some_and(|n| n.starts_with(PREFIX)) {
                remove(env, &dir.join(name)).context(what)?;
            }
        }
        Ok(())
    }

    /// One file of the copy.
    pub fn file(&mut self, entry: CatalogEntry) -> Result<()> {
        if !valid_file_name(&entry.name)
            || self.files.contains_key(&entry.id)
            || !self.names.insert(entry.name.clone())
        {
            return Err(Error::Protocol(format!(
                "a copy names file {} {:?}, which cannot be",
                entry.id, entry.name
            )));
        }
        let id = entry.id;
        let size = entry.size;
        let f = self.create(id)?;
        f.set_len(size)
            .context(|| format!("staging {:?}, {size} bytes", entry.name))?;
        self.files.insert(id, entry);
        Ok(())
    }

    fn create(&mut self, id: u32) -> Result<Arc<dyn File>> {
        let how = OpenHow {
            create: true,
            write: true,
            durable: false,
        };
        let path = staged(&self.dir, id);
        let f = self
            .env
            .open(&path, how)
            .context(|| format!("creating {}", path.display()))?;
        self.keep(id, f.clone())?;
        Ok(f)
    }

    /// Keeps a file open; one that is closed for it is made durable first, so
    /// that a failure to write it back is seen.
    fn keep(&mut self, id: u32, f: Arc<dyn File>) -> Result<()> {
        if self.open.len() >= MAX_OPEN
            && let Some((id, f)) = self.open.pop_first()
        {
            f.sync()
                .context(|| format!("staged file {}", staged(&self.dir, id).display()))?;
        }
        self.open.insert(id, f);
        Ok(())
    }

    /// Bytes of a file of the copy.
    pub fn data(&mut self, id: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let size = self.files.get(&id).map_or(0, |f| f.size);
        if offset
            .checked_add(bytes.len() as u64)
            .is_none_or(|end| end > size)
        {
            return Err(Error::Protocol(format!(
                "a copy has bytes of file {id} at {offset}, outside it"
            )));
        }
        let f = match self.open.get(&id) {
            Some(f) => f.clone(),
            None => self.create(id)?,
        };
        f.write_at(bytes, offset)
            .context(|| format!("writing {}", staged(&self.dir, id).display()))
    }

    /// The volume that it is of.
    pub fn volume(&self) -> u64 {
        self.volume
    }

    /// All of it is here, the result of the records up to `lsn`: makes it
    /// durable.
    pub fn seal(&mut self, lsn: u64) -> Result<()> {
        for (id, f) in std::mem::take(&mut self.open) {
            f.sync()
                .context(|| format!("staged file {}", staged(&self.dir, id).display()))?;
        }
        self.env
            .sync_dir(&self.dir)
            .context(|| format!("syncing {}", self.dir.display()))?;
        let c = Catalog {
            volume: self.volume,
            lsn,
            files: self.files.values().cloned().collect(),
        };
        replace_file(&*self.env, &self.catalog, &c.encode())?;
        self.sealed = true;
        Ok(())
    }

    /// Whether all of it is here, durably.
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }
}

fn remove(env: &dyn Env, path: &Path) -> std::io::Result<()> {
    match env.remove(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        r => r,
    }
}

/// A sealed copy takes the place of the present one: its catalogue is the
/// volume's when this returns, durably. `old` are the names of the files that
/// the present catalogue has, as far as it can be read.
pub fn put_in_place(env: &dyn Env, dir: &Path, meta: &Path, old: &[String]) -> Result<()> {
    let path = catalog_path(meta);
    let what = || format!("putting the copy in {} in place", dir.display());
    let f = match env.open(&path, OpenHow::default()) {
        // All of this happened before.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        r => r.context(what)?,
    };
    let mut bytes = vec![0u8; f.len().context(what)? as usize];
    let got = f.read_at(&mut bytes, 0).context(what)?;
    let c = Catalog::decode(&bytes[..got]).map_err(|e| Error::Damaged {
        path: path.clone(),
        what: e.to_string(),
    })?;
    drop(f);
    let names: BTreeSet<&str> = c.files.iter().map(|f| f.name.as_str()).collect();
    let mut parents = BTreeSet::from([dir.to_owned()]);
    for name in old.iter().filter(|n| !names.contains(n.as_str())) {
        remove(env, &dir.join(name)).context(what)?;
        parents.extend(dir.join(name).parent().map(Path::to_owned));
    }
    for e in &c.files {
        let to = dir.join(&e.name);
        if let Some(parent) = to.parent() {
            make_dirs(env, parent, dir)?;
            parents.insert(parent.to_owned());
        }
        match env.rename(&staged(dir, e.id), &to) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            r => r.context(|| format!("renaming to {}", to.display()))?,
        }
    }
    for p in parents {
        match env.sync_dir(&p) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            r => r.context(|| format!("syncing {}", p.display()))?,
        }
    }
    // What was under way in the old copy is none of this one's.
    remove(env, &meta.join(RENAME_NOTE)).context(what)?;
    remove(env, &meta.join(REMOVAL_NOTE)).context(what)?;
    env.sync_dir(meta).context(what)?;
    replace_file(env, &meta.join("catalog"), &bytes[..got])?;
    remove(env, &path).context(what)?;
    env.sync_dir(meta).context(what)
}
