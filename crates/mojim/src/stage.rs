//! A copy of another node's files, kept beside the own ones until it is whole.
//!
//! Owns the staged files, `.mojim-copy/NUMBER` in the data directory (a file
//! system of its own may be mounted there, and a rename must stay within it),
//! and their catalogue, `copy` in the metadata directory.
//!
//! Invariants:
//! - Nothing of the present copy is touched before `seal` returned and the
//!   superblock says `Switching`: a source that fails in between takes
//!   nothing with it.
//! - `put_in_place` may be repeated from any point where a crash cut it off:
//!   a staged file that is not there any more is in its place, and is seen
//!   there before anything else changes. (A data directory that is not mounted
//!   looks as if all were gone.)

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_format::catalog::valid_file_name;
use mojim_format::{Catalog, CatalogEntry};

use crate::area::{MAX_CATALOG, REMOVAL_NOTE, RENAME_NOTE, make_dirs, noted_names, replace_file};
use crate::env::{Env, File, OpenHow};
use crate::error::{Context, Error, Result};

/// The directory of staged files; no file of a volume can lie there.
const STAGED: &str = ".mojim-copy";

/// A copy that is being taken in.
pub struct Stage {
    env: Arc<dyn Env>,
    dir: PathBuf,
    catalog: PathBuf,
    volume: u64,
    files: BTreeMap<u32, CatalogEntry>,
    names: BTreeSet<String>,
    open: BTreeMap<u32, Arc<dyn File>>,
    max_open: usize,
    sealed: bool,
}

/// Where the staged catalogue lies.
fn catalog_path(meta: &Path) -> PathBuf {
    meta.join("copy")
}

fn staged(dir: &Path, id: u32) -> PathBuf {
    dir.join(STAGED).join(id.to_string())
}

impl Stage {
    /// Begins to take in a copy of `volume`; what an earlier one left is
    /// removed. At most `max_open` files are kept open.
    pub fn begin(
        env: &Arc<dyn Env>,
        dir: &Path,
        meta: &Path,
        volume: u64,
        max_open: usize,
    ) -> Result<Stage> {
        Stage::clear(&**env, dir, meta)?;
        make_dirs(&**env, &dir.join(STAGED), dir)?;
        Ok(Stage {
            env: env.clone(),
            dir: dir.to_owned(),
            catalog: catalog_path(meta),
            volume,
            files: BTreeMap::new(),
            names: BTreeSet::new(),
            open: BTreeMap::new(),
            max_open,
            sealed: false,
        })
    }

    /// Removes what a copy that did not become whole left behind.
    pub fn clear(env: &dyn Env, dir: &Path, meta: &Path) -> Result<()> {
        let what = || format!("removing an unfinished copy in {}", dir.display());
        remove(env, &catalog_path(meta)).context(what)?;
        let staged = dir.join(STAGED);
        match env.list(&staged) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            names => {
                for name in names.context(what)? {
                    remove(env, &staged.join(name)).context(what)?;
                }
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
        // What stands in its way is better found now than when the present
        // copy is half replaced.
        let to = self.dir.join(&entry.name);
        if let Some(parent) = to.parent() {
            make_dirs(&*self.env, parent, &self.dir)?;
        }
        let how = OpenHow {
            create: false,
            write: true,
            durable: false,
        };
        match self.env.open(&to, how) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(
                    format!("{} is in the way of a file of the volume", to.display()),
                    &e,
                ));
            }
            _ => {}
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
        if self.open.len() >= self.max_open
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
        let staged = self.dir.join(STAGED);
        self.env
            .sync_dir(&staged)
            .context(|| format!("syncing {}", staged.display()))?;
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

fn read_catalog(env: &dyn Env, path: &Path) -> Result<Option<(Catalog, Vec<u8>)>> {
    let what = || format!("reading {}", path.display());
    let f = match env.open(path, OpenHow::default()) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        r => r.context(what)?,
    };
    let mut bytes = vec![0u8; f.len().context(what)?.min(MAX_CATALOG) as usize];
    let got = f.read_at(&mut bytes, 0).context(what)?;
    bytes.truncate(got);
    let c = Catalog::decode(&bytes).map_err(|e| Error::Damaged {
        path: path.to_owned(),
        what: e.to_string(),
    })?;
    Ok(Some((c, bytes)))
}

fn size_of(env: &dyn Env, path: &Path) -> Result<Option<u64>> {
    match env.open(path, OpenHow::default()) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        r => r
            .and_then(|f| f.len())
            .map(Some)
            .context(|| path.display().to_string()),
    }
}

/// A sealed copy of `volume` as of `lsn` takes the place of the present one:
/// its catalogue is the volume's when this returns, durably.
pub fn put_in_place(env: &dyn Env, dir: &Path, meta: &Path, volume: u64, lsn: u64) -> Result<()> {
    let path = catalog_path(meta);
    let what = || format!("putting the copy in {} in place", dir.display());
    let present = meta.join("catalog");
    let Some((c, bytes)) = read_catalog(env, &path)? else {
        // All of this happened before, if the catalogue is the copy's.
        return match read_catalog(env, &present)? {
            Some((c, _)) if c.volume == volume && c.lsn == lsn => Ok(()),
            _ => Err(Error::Damaged {
                path,
                what: "the catalogue of a copy that was being put in place is gone; remove this node's copy of the volume (its directory and its part of .mojim) to have it copied from the other node".into(),
            }),
        };
    };
    for e in &c.files {
        let to = dir.join(&e.name);
        if size_of(env, &staged(dir, e.id))? != Some(e.size) && size_of(env, &to)? != Some(e.size) {
            return Err(Error::Damaged {
                path: to,
                what: "this file of a copy that was being put in place is not there; is the volume's file system mounted?".into(),
            });
        }
    }
    // Whatever the present catalogue has and the copy has not goes.
    let old = match read_catalog(env, &present) {
        Ok(Some((c, _))) => {
            let mut old = noted_names(env, meta, c.volume, c.lsn)?;
            old.extend(c.files.into_iter().map(|f| f.name));
            old
        }
        // What it named stays, and is no file of the volume.
        Ok(None) | Err(Error::Damaged { .. }) => Vec::new(),
        Err(e) => return Err(e),
    };
    let names: BTreeSet<&str> = c.files.iter().map(|f| f.name.as_str()).collect();
    let mut parents = BTreeSet::from([dir.to_owned(), dir.join(STAGED)]);
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
    replace_file(env, &present, &bytes)?;
    remove(env, &path).context(what)?;
    env.sync_dir(meta).context(what)
}
