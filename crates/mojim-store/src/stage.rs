//! A copy of another node's files, kept beside this node's own until it is whole.
//!
//! Owns two things:
//!
//! - The staged files, `.mojim-copy/NUMBER` in the data directory. That directory may be a file
//!   system of its own, and a rename must stay within it.
//! - Their catalogue, `copy` in the metadata directory.
//!
//! Invariants:
//!
//! - The present copy is not changed before `seal` returned and the superblock says `Switching`: if
//!   the sender fails before that, nothing is lost.
//! - `put_in_place` may be repeated from any point where a crash cut it off: a staged file that is
//!   gone is in its place, which is checked before anything else changes. (If the data directory is
//!   not mounted, all files seem to be gone.)
//! - Older files are only a source of bytes: a page of an older file is taken only if its bytes
//!   have the sum that the sender named.
//! - A staged file may be closed with bytes that were not synced only on a condition. A sync of the
//!   whole file system must tell of writes that failed. It must have been opened before the bytes
//!   were written.
//! - The copy is sealed only after every wanted page has come, and every stream that carried
//!   anything has ended.
//! - Bytes are read and written by several threads at once, each with a [`Target`] that it got from
//!   this copy.
//! - Threads of an older copy write into files that were removed.
//! - Nothing is written once the copy is sealed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mojim_format::catalog::{MAX_CATALOG, valid_file_name};
use mojim_format::message::{COPY_PAGE, COPY_PAGES, CopySums, SUM_LEN};
use mojim_format::{Catalog, CatalogEntry, FormatError};

use crate::area::{is_gone, make_dirs, of_another_release, replace_file};
use crate::notes::{REMOVAL_NOTE, RENAME_NOTE, noted_names};
use mojim_env::{Context, Env, Error, File, FileSystem, NotPlain, OpenHow, Result};

/// The directory of staged files; no file of a volume can lie there.
const STAGED: &str = ".mojim-copy";
/// Most files, or directories, that are synced one by one where the file system can be synced as
/// a whole: each sync of a new one commits the file system's journal.
const MOST_SYNCS: usize = 64;
/// Frames of sums that may be unanswered on one link.
pub const WINDOW: usize = 32;

/// A copy that is being taken in.
pub struct Stage {
    env: Arc<dyn Env>,
    dir: PathBuf,
    catalog: PathBuf,
    volume: u64,
    /// The copy's number.
    copy: u64,
    files: BTreeMap<u32, CatalogEntry>,
    names: BTreeSet<String>,
    open: BTreeMap<u32, Arc<dyn File>>,
    max_open: usize,
    /// The file system of the staged files, from before the first write; `None` where it cannot
    /// be synced as a whole.
    whole: Option<Arc<dyn FileSystem>>,
    /// Files were closed that only a sync of `whole` makes durable.
    closed: bool,
    /// Names of this node's own files, by number.
    old: BTreeMap<u32, String>,
    /// All names that are removed before the copy is put in place: those of this node's own
    /// files, and of files whose removal is not finished.
    present: BTreeSet<String>,
    /// The older file that was compared last, and the number of the copy's file.
    source: Option<(u32, Arc<dyn File>)>,
    /// Pages that were requested and have not arrived.
    owed: BTreeSet<(u32, u64)>,
    /// Where each file begins in the concatenation of all files, for progress.
    starts: BTreeMap<u32, u64>,
    bytes: u64,
    /// Buffers that comparisons reuse.
    bufs: Vec<Vec<u8>>,
    /// Streams that were opened; `unfinished` of them have begun to carry bytes and
    /// have not ended.
    opened: usize,
    unfinished: usize,
    sealed: bool,
    /// A stream's failure, which its own link may be unable to report.
    failed: Option<Error>,
}

/// A file of the copy, for a thread that writes bytes to it.
pub struct Target {
    id: u32,
    path: PathBuf,
    file: Arc<dyn File>,
}

/// A comparison that is to be made.
pub struct Question {
    to: Target,
    old: Option<Arc<dyn File>>,
    end: u64,
    buf: Vec<u8>,
}

/// What a comparison of pages found.
pub struct Compared {
    /// A bit for each page that is to be sent.
    pub wanted: Vec<u8>,
    /// Bytes that need not be sent.
    pub kept: u64,
}

/// Most pages that may be requested and not sent yet, for each link: twice the pages
/// of all the sums that a sender sends before it has to see an answer.
const MOST_OWED: usize = 2 * WINDOW * COPY_PAGES;

/// Most streams beside a session's own link.
pub const MOST_STREAMS: usize = 16;

/// Where the staged catalogue lies.
fn catalog_path(meta: &Path) -> PathBuf {
    meta.join("copy")
}

fn staged(dir: &Path, id: u32) -> PathBuf {
    dir.join(STAGED).join(id.to_string())
}

impl Stage {
    /// Begins to take in copy number `copy`, of `volume`; removes what an earlier copy
    /// left. `old`: the names of this node's own files, by number. At most `max_open`
    /// files are kept open.
    pub fn begin(
        env: &Arc<dyn Env>,
        dir: &Path,
        meta: &Path,
        volume: u64,
        copy: u64,
        old: BTreeMap<u32, String>,
        max_open: usize,
    ) -> Result<Stage> {
        Stage::clear(&**env, dir, meta)?;
        make_dirs(&**env, &dir.join(STAGED), dir)?;
        let mut present = BTreeSet::from_iter(old_names(&**env, meta, &meta.join("catalog"))?);
        present.extend(old.values().cloned());
        Ok(Stage {
            whole: env.file_system(&dir.join(STAGED)).ok(),
            closed: false,
            env: env.clone(),
            dir: dir.to_owned(),
            catalog: catalog_path(meta),
            volume,
            copy,
            files: BTreeMap::new(),
            names: BTreeSet::new(),
            open: BTreeMap::new(),
            max_open,
            old,
            present,
            source: None,
            owed: BTreeSet::new(),
            starts: BTreeMap::new(),
            bytes: 0,
            bufs: Vec::new(),
            opened: 0,
            unfinished: 0,
            sealed: false,
            failed: None,
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

    /// One file of the copy. Returns how many bytes of an older file can be compared.
    pub fn file(&mut self, entry: CatalogEntry) -> Result<u64> {
        if !valid_file_name(&entry.name)
            || self.files.contains_key(&entry.id)
            || !self.names.insert(entry.name.clone())
        {
            return Err(Error::Protocol(format!(
                "a copy names file {} {:?}, which cannot be",
                entry.id, entry.name
            )));
        }
        // An obstacle at its path is better found now than when the present
        // copy is half replaced.
        let to = self.dir.join(&entry.name);
        let how = OpenHow {
            write: true,
            ..OpenHow::DATA
        };
        let ours = |name: &str| self.present.contains(name);
        let above = |a: &Path| a.to_str().is_some_and(ours);
        let clear = match self.env.open(&to, how) {
            Ok(_) => Ok(()),
            // The file takes its place.
            Err(e) if NotPlain::is(&e) => Ok(()),
            Err(e) => match e.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                // The obstacle is a file of the present copy, which is removed first.
                std::io::ErrorKind::NotADirectory
                    if Path::new(&entry.name).ancestors().skip(1).any(above) =>
                {
                    Ok(())
                }
                std::io::ErrorKind::IsADirectory => {
                    let inside = self.env.list(&to).context(|| to.display().to_string())?;
                    let all = inside.iter().map(|p| Path::new(&entry.name).join(p));
                    let mut all = all.map(|p| p.to_str().is_some_and(ours));
                    if all.all(|ours| ours) { Ok(()) } else { Err(e) }
                }
                _ => Err(e),
            },
        };
        clear.context(|| format!("{} is in the way of a file of the volume", to.display()))?;
        let id = entry.id;
        let size = entry.size;
        let f = self.create(id)?;
        f.set_len(size)
            .context(|| format!("staging {:?}, {size} bytes", entry.name))?;
        self.starts.insert(id, self.bytes);
        self.bytes = self.bytes.saturating_add(size);
        self.files.insert(id, entry);
        // A file that cannot be read here is sent whole.
        Ok(match self.source(id) {
            Some(old) => old.len().unwrap_or(0).min(size),
            None => 0,
        })
    }

    /// This node's own file with the number of the copy's file `id`, else with its name.
    fn source(&mut self, id: u32) -> Option<Arc<dyn File>> {
        if let Some((of, f)) = &self.source
            && *of == id
        {
            return Some(f.clone());
        }
        let new = &self.files.get(&id)?.name;
        let names = [self.old.get(&id), Some(new)];
        let f = names
            .into_iter()
            .flatten()
            .find_map(|name| self.env.open(&self.dir.join(name), OpenHow::DATA).ok())?;
        self.source = Some((id, f.clone()));
        Some(f)
    }

    /// An error unless this is copy `copy` and its bytes may still come.
    pub fn takes(&self, copy: u64) -> Result<()> {
        match self.copy == copy && !self.sealed {
            true => Ok(()),
            false => Err(over()),
        }
    }

    /// A stream is opened.
    pub fn stream_opens(&mut self) -> Result<()> {
        if self.opened == MOST_STREAMS {
            return Err(Error::Protocol(format!(
                "a copy has more than {MOST_STREAMS} streams"
            )));
        }
        self.opened += 1;
        Ok(())
    }

    /// A stream begins to carry bytes.
    pub fn stream_begins(&mut self) {
        self.unfinished += 1;
    }

    /// A stream ends: everything that came over it is here.
    pub fn stream_ends(&mut self) {
        self.unfinished -= 1;
    }

    /// Bytes from a stream could not be taken in.
    pub fn stream_fails(&mut self, e: Error) {
        self.failed.get_or_insert(e);
    }

    /// An error if [`Stage::stream_fails`] was called.
    pub fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// An error unless every stream that carries bytes has ended: only then may bytes
    /// follow that were read later.
    pub fn check_streams(&self) -> Result<()> {
        match self.unfinished {
            0 => Ok(()),
            n => Err(Error::Protocol(format!(
                "a copy goes on while {n} of its streams have not ended"
            ))),
        }
    }

    /// What is needed to compare pages: see [`Question::answer`].
    pub fn question(&mut self, m: &CopySums) -> Result<Question> {
        let size = self.files.get(&m.id).map_or(0, |f| f.size);
        let pages = m.sums.len() as u64;
        if m.offset >= size
            || (pages - 1) * COPY_PAGE >= size - m.offset
            || self.owed.len() + m.sums.len() > MOST_OWED * self.opened.max(1)
        {
            return Err(Error::Protocol(format!(
                "a copy has sums of file {} at {}, outside it or too many",
                m.id, m.offset
            )));
        }
        Ok(Question {
            end: (m.offset + pages * COPY_PAGE).min(size),
            old: self.source(m.id),
            buf: self.bufs.pop().unwrap_or_default(),
            to: self.open(m.id)?,
        })
    }

    /// Notes the pages that are wanted: the copy is not sealed without them. Returns
    /// how far into the copy the comparison reaches.
    pub fn answered(&mut self, m: &CopySums, q: Question, wanted: &[u8]) -> Result<u64> {
        let differs = |i: &usize| wanted[i / 8] >> (i % 8) & 1 == 1;
        for i in (0..m.sums.len()).filter(differs) {
            self.owed.insert((m.id, m.offset + i as u64 * COPY_PAGE));
        }
        self.keep_open(&q.to)?;
        self.bufs.push(q.buf);
        Ok(self.starts[&m.id].saturating_add(q.end))
    }

    fn create(&mut self, id: u32) -> Result<Arc<dyn File>> {
        let how = OpenHow {
            create: true,
            write: true,
            ..OpenHow::DATA
        };
        let path = staged(&self.dir, id);
        let f = self
            .env
            .open(&path, how)
            .context(|| format!("creating {}", path.display()))?;
        self.keep(id, f.clone())?;
        Ok(f)
    }

    /// Keeps a file open. A file that is closed to make room is made durable first, or later with
    /// the whole file system, so that a failure to write it back is seen.
    fn keep(&mut self, id: u32, f: Arc<dyn File>) -> Result<()> {
        if self.open.len() >= self.max_open
            // The file that was announced last is needed last.
            && let Some((id, f)) = self.open.pop_last()
        {
            match self.whole.as_ref().is_some_and(|w| w.has(&*f)) {
                true => self.closed = true,
                false => self.sync_one(id, &*f)?,
            }
        }
        self.open.insert(id, f);
        Ok(())
    }

    fn sync_one(&self, id: u32, f: &dyn File) -> Result<()> {
        f.sync()
            .context(|| format!("staged file {}", staged(&self.dir, id).display()))
    }

    /// Makes the bytes of all staged files durable.
    fn sync_files(&mut self) -> Result<()> {
        let open = std::mem::take(&mut self.open);
        let many = std::mem::take(&mut self.closed) || open.len() > MOST_SYNCS;
        let whole = self.whole.clone().filter(|_| many);
        sync_whole(whole.as_deref(), &self.dir)?;
        let is_left = |f: &dyn File| !whole.as_ref().is_some_and(|w| w.has(f));
        let mut left = open.iter().filter(|(_, f)| is_left(&***f));
        left.try_for_each(|(id, f)| self.sync_one(*id, &**f))
    }

    /// Where bytes of a file of the copy are to be written.
    pub fn target(&mut self, id: u64, offset: u64, len: usize) -> Result<Target> {
        let known = u32::try_from(id).ok().and_then(|id| self.files.get(&id));
        let end = offset.checked_add(len as u64);
        match known.filter(|f| end.is_some_and(|e| e <= f.size)) {
            Some(f) => self.open(f.id),
            None => Err(Error::Protocol(format!(
                "a copy has bytes of file {id} at {offset}, outside it"
            ))),
        }
    }

    /// Notes that `bytes` were written. Returns how far into the copy they reach.
    pub fn written(&mut self, to: &Target, bytes: Range<u64>) -> Result<u64> {
        self.keep_open(to)?;
        let (id, size) = (to.id, self.files[&to.id].size);
        let paid: Vec<_> = self
            .owed
            .range((id, bytes.start)..(id, bytes.end))
            .filter(|(_, page)| (page + COPY_PAGE).min(size) <= bytes.end)
            .copied()
            .collect();
        for p in paid {
            self.owed.remove(&p);
        }
        Ok(self.starts[&id].saturating_add(bytes.end))
    }

    fn open(&mut self, id: u32) -> Result<Target> {
        let file = match self.open.get(&id) {
            Some(f) => f.clone(),
            None => self.create(id)?,
        };
        let path = staged(&self.dir, id);
        Ok(Target { id, path, file })
    }

    /// A file that was closed while it was written to has to be made durable again.
    fn keep_open(&mut self, to: &Target) -> Result<()> {
        match self.open.contains_key(&to.id) {
            true => Ok(()),
            false => self.keep(to.id, to.file.clone()),
        }
    }

    /// The volume that is copied.
    pub fn volume(&self) -> u64 {
        self.volume
    }

    /// All of the copy is here, the result of the records up to `lsn`: makes it
    /// durable.
    pub fn seal(&mut self, lsn: u64) -> Result<()> {
        self.check_streams()?;
        if let Some((id, page)) = self.owed.first() {
            return Err(Error::Protocol(format!(
                "a copy ends without the page of file {id} at {page}, which is wanted"
            )));
        }
        self.source = None;
        self.sync_files()?;
        let staged = self.dir.join(STAGED);
        self.env
            .sync_dir(&staged)
            .context(|| format!("syncing {}", staged.display()))?;
        let c = Catalog {
            volume: self.volume,
            lsn,
            begun: (0, 0),
            files: self.files.values().cloned().collect(),
        };
        replace_file(&*self.env, &self.catalog, &c.encode())?;
        self.sealed = true;
        Ok(())
    }

    /// Whether all of the copy is here, durably.
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }
}

/// The error for a thread whose copy is no longer taken in.
pub fn over() -> Error {
    Error::Stale("this copy is over".into())
}

impl Target {
    /// Writes bytes of the file.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file
            .write_at(bytes, offset)
            .context(|| format!("writing {}", self.path.display()))
    }
}

impl Question {
    /// Takes the pages of the older file that have the sums in `m`. `broken`: a
    /// mutation, a page that differs is taken too.
    pub fn answer(&mut self, m: &CopySums, broken: bool) -> Result<Compared> {
        let mut buf = std::mem::take(&mut self.buf);
        buf.resize((self.end - m.offset) as usize, 0);
        let mut wanted = vec![0u8; m.sums.len().div_ceil(8)];
        let mut kept = 0;
        // A file that cannot be read counts as different.
        let got = self
            .old
            .as_ref()
            .and_then(|old| old.read_at(&mut buf, m.offset).ok())
            .unwrap_or(0);
        let mut lie = broken;
        let mut run = 0..0;
        for (i, named) in m.sums.iter().enumerate() {
            let from = i * COPY_PAGE as usize;
            let to = (from + COPY_PAGE as usize).min(buf.len());
            let here = to <= got;
            let equal = here && sum(&buf[from..to]) == *named;
            if equal || here && std::mem::take(&mut lie) {
                kept += (to - from) as u64;
                if run.end != from {
                    self.keep_run(m, &buf, run)?;
                    run = from..from;
                }
                run.end = to;
            } else {
                wanted[i / 8] |= 1 << (i % 8);
            }
        }
        self.keep_run(m, &buf, run)?;
        self.buf = buf;
        Ok(Compared { wanted, kept })
    }

    /// Writes a run of the older file's bytes to the staged file, which has zeros
    /// already.
    fn keep_run(&self, m: &CopySums, buf: &[u8], run: Range<usize>) -> Result<()> {
        let page = COPY_PAGE as usize;
        let mut at = run.start;
        while at < run.end {
            let is_zero = |p: usize| buf[p..run.end.min(p + page)].iter().all(|b| *b == 0);
            let mut end = at;
            while end < run.end && !is_zero(end) {
                end = run.end.min(end + page);
            }
            if at < end {
                self.to.write(m.offset + at as u64, &buf[at..end])?;
            }
            at = end + page;
        }
        Ok(())
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
    let c = Catalog::decode(&bytes).map_err(|e| match e {
        FormatError::Version { .. } => of_another_release(path, &e),
        e => Error::Damaged {
            path: path.to_owned(),
            what: e.to_string(),
        },
    })?;
    Ok(Some((c, bytes)))
}

fn size_of(env: &dyn Env, path: &Path) -> Result<Option<u64>> {
    match env.open(path, OpenHow::DATA) {
        Err(e) if is_gone(&e) => Ok(None),
        r => r
            .and_then(|f| f.len())
            .map(Some)
            .context(|| path.display().to_string()),
    }
}

/// Replaces the present copy by a sealed copy of `volume` as of `lsn`. On return
/// the sealed copy's catalogue is durably the volume's.
pub fn put_in_place(env: &dyn Env, dir: &Path, meta: &Path, volume: u64, lsn: u64) -> Result<()> {
    let path = catalog_path(meta);
    let what = || format!("putting the copy in {} in place", dir.display());
    let present = meta.join("catalog");
    let Some((c, bytes)) = read_catalog(env, &path)? else {
        // The copy is already in place if the present catalogue is the copy's.
        return match read_catalog(env, &present)? {
            Some((c, _)) if c.volume == volume && c.lsn == lsn => Ok(()),
            _ => Err(Error::Damaged {
                path,
                what: "the catalogue of a copy that was being put in place is gone; remove this node's copy of the volume (its directory and its part of .mojim) to have it copied from the other node".into(),
            }),
        };
    };
    check_staged(env, dir, &c)?;
    let old = old_names(env, meta, &present)?;
    let mut changed = BTreeSet::from([dir.to_owned(), dir.join(STAGED)]);
    remove_old(env, dir, &old, &c, &mut changed)?;
    // A file that is moved must not go with a directory that a crash takes away.
    sync_dirs(env, dir, &make_parents(env, dir, &c)?)?;
    move_staged(env, dir, &c, &mut changed)?;
    sync_dirs(env, dir, &changed)?;
    // Notes of renames and removals under way belong to the old copy.
    remove(env, &meta.join(RENAME_NOTE)).context(what)?;
    remove(env, &meta.join(REMOVAL_NOTE)).context(what)?;
    env.sync_dir(meta).context(what)?;
    replace_file(env, &present, &bytes)?;
    remove(env, &path).context(what)?;
    env.sync_dir(meta).context(what)
}

/// Checks that every file of the copy is there: staged, or in its place since an
/// earlier try.
fn check_staged(env: &dyn Env, dir: &Path, c: &Catalog) -> Result<()> {
    for e in &c.files {
        let to = dir.join(&e.name);
        if size_of(env, &staged(dir, e.id))? != Some(e.size) && size_of(env, &to)? != Some(e.size) {
            return Err(Error::Damaged {
                path: to,
                what: "this file of a copy that was being put in place is not there; is the volume's file system mounted?".into(),
            });
        }
    }
    Ok(())
}

/// The names in the present catalogue, `present`, and in its notes of renames and
/// removals under way.
fn old_names(env: &dyn Env, meta: &Path, present: &Path) -> Result<Vec<String>> {
    match read_catalog(env, present) {
        Ok(Some((c, _))) => {
            let mut old = noted_names(env, meta, c.volume, c.lsn)?;
            old.extend(c.files.into_iter().map(|f| f.name));
            Ok(old)
        }
        // The files that it named stay, and are not files of the volume.
        Ok(None) | Err(Error::Damaged { .. }) => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Removes the files of the present copy that the new one, `c`, does not have. Adds the
/// directories that changed to `changed`.
fn remove_old(
    env: &dyn Env,
    dir: &Path,
    old: &[String],
    c: &Catalog,
    changed: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    let names: BTreeSet<&str> = c.files.iter().map(|f| f.name.as_str()).collect();
    for name in old.iter().filter(|n| !names.contains(n.as_str())) {
        match env.remove(&dir.join(name)) {
            Err(e) if is_gone(&e) => {}
            r => r.context(|| format!("putting the copy in {} in place", dir.display()))?,
        }
        changed.extend(dir.join(name).parent().map(Path::to_owned));
    }
    Ok(())
}

/// Makes the directories in which files of the copy lie. Returns them and those above.
fn make_parents(env: &dyn Env, dir: &Path, c: &Catalog) -> Result<BTreeSet<PathBuf>> {
    let mut all = BTreeSet::new();
    for e in &c.files {
        let to = dir.join(&e.name);
        let parent = to.parent().filter(|p| !all.contains(*p));
        if let Some(parent) = parent {
            env.create_dir_all(parent)
                .context(|| format!("making {}", parent.display()))?;
            let above = parent.ancestors().take_while(|a| a.starts_with(dir));
            all.extend(above.map(Path::to_owned));
        }
    }
    Ok(all)
}

/// Makes the names in these directories durable, those in `dir` or below.
fn sync_dirs(env: &dyn Env, dir: &Path, all: &BTreeSet<PathBuf>) -> Result<()> {
    let whole = match all.len() > MOST_SYNCS {
        true => env.file_system(dir).ok(),
        false => None,
    };
    sync_whole(whole.as_deref(), dir)?;
    let is_left = |p: &&PathBuf| !whole.as_ref().is_some_and(|w| w.has_dir(p));
    all.iter()
        .filter(is_left)
        .try_for_each(|p| match env.sync_dir(p) {
            Err(e) if is_gone(&e) => Ok(()),
            r => r.context(|| format!("syncing {}", p.display())),
        })
}

fn sync_whole(whole: Option<&dyn FileSystem>, dir: &Path) -> Result<()> {
    let what = || format!("syncing the file system of {}", dir.display());
    whole.map_or(Ok(()), |w| w.sync().context(what))
}

/// Renames the staged files to their places, except those that an earlier try renamed.
/// Adds the directories that changed to `changed`.
fn move_staged(
    env: &dyn Env,
    dir: &Path,
    c: &Catalog,
    changed: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    for e in &c.files {
        let to = dir.join(&e.name);
        changed.extend(to.parent().map(Path::to_owned));
        let from = staged(dir, e.id);
        let moved = match env.rename(&from, &to) {
            // Empty directories that files of the old copy left.
            Err(e) if e.kind() == std::io::ErrorKind::IsADirectory => env
                .remove_empty_dirs(&to)
                .and_then(|()| env.rename(&from, &to)),
            r => r,
        };
        match moved {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            r => r.context(|| format!("renaming to {}", to.display()))?,
        }
    }
    Ok(())
}

/// The sum by which both sides compare a page: 128 bits of BLAKE3, for which no
/// collision is known. Pages with equal sums count as equal.
pub fn sum(page: &[u8]) -> [u8; SUM_LEN] {
    let whole = blake3::hash(page);
    *whole.as_bytes().first_chunk().expect("a hash is 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notes::RemovalNote;
    use mojim_linux::Os;

    fn place(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("mojim-stage-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(dir.join("meta")).unwrap();
        dir
    }

    fn begin(dir: &Path) -> Stage {
        let env: Arc<dyn Env> = Arc::new(Os::new().unwrap());
        let old = BTreeMap::from([(7, "before".to_owned())]);
        Stage::begin(&env, dir, &dir.join("meta"), 1, 9, old, 8).unwrap()
    }

    fn compare(s: &mut Stage, m: &CopySums) -> Result<Compared> {
        let mut q = s.question(m)?;
        let found = q.answer(m, false)?;
        s.answered(m, q, &found.wanted)?;
        Ok(found)
    }

    fn data(s: &mut Stage, id: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = s.target(id, offset, bytes.len())?;
        to.write(offset, bytes)?;
        s.written(&to, offset..offset + bytes.len() as u64)?;
        Ok(())
    }

    fn entry(id: u32, size: u64, name: &str) -> CatalogEntry {
        CatalogEntry {
            id,
            size,
            name: name.into(),
        }
    }

    fn sums(id: u32, offset: u64, bytes: &[u8]) -> CopySums {
        CopySums {
            id,
            offset,
            sums: bytes.chunks(COPY_PAGE as usize).map(sum).collect(),
        }
    }

    #[test]
    fn what_is_here_is_taken_and_the_rest_must_come() {
        let dir = place("taken");
        let page = COPY_PAGE as usize;
        let old: Vec<u8> = (0..4 * page + 100).map(|i| (i / page + 1) as u8).collect();
        std::fs::write(dir.join("before"), &old).unwrap();
        let mut new = old.clone();
        new[page + 5] ^= 1;
        new[2 * page..3 * page].fill(0);
        new.truncate(4 * page + 50);
        new[4 * page] ^= 1;
        let mut s = begin(&dir);
        // By its number, though it has another name now.
        let have = s.file(entry(7, new.len() as u64, "now")).unwrap();
        assert_eq!(have, new.len() as u64);
        let found = compare(&mut s, &sums(7, 0, &new)).unwrap();
        assert_eq!(found.wanted, [0b10110]);
        assert_eq!(found.kept, 2 * COPY_PAGE);
        let refused = s.seal(5).unwrap_err();
        assert!(refused.to_string().contains("which is wanted"), "{refused}");
        data(&mut s, 7, COPY_PAGE, &new[page..3 * page]).unwrap();
        // A part of a page does not pay for it.
        data(&mut s, 7, 4 * COPY_PAGE, &new[4 * page..4 * page + 10]).unwrap();
        assert!(s.seal(5).is_err());
        data(&mut s, 7, 4 * COPY_PAGE, &new[4 * page..]).unwrap();
        s.seal(5).unwrap();
        assert_eq!(std::fs::read(staged(&dir, 7)).unwrap(), new);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_copy_waits_for_its_own_streams() {
        let dir = place("streams");
        let mut s = begin(&dir);
        s.file(entry(1, COPY_PAGE, "f")).unwrap();
        for _ in 0..MOST_STREAMS {
            s.stream_opens().unwrap();
        }
        assert!(s.stream_opens().is_err());
        assert!(s.takes(8).is_err());
        s.takes(9).unwrap();
        // No one waits for a stream that was opened and carries nothing.
        s.check_streams().unwrap();
        s.stream_begins();
        assert!(s.check_streams().is_err());
        let refused = s.seal(5).unwrap_err();
        assert!(refused.to_string().contains("streams"), "{refused}");
        s.stream_ends();
        s.seal(5).unwrap();
        // A late thread would write into files that may be in place already.
        assert!(s.takes(9).is_err());
        drop(s);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// The removal of a file was not finished when the power went: the note of it was durable, and
    /// the file still there. A copy that has a directory of this name, or the other way round,
    /// could not be taken in, and the primary did not come back.
    #[test]
    fn what_is_being_removed_is_in_nobodys_way() {
        let dir = place("removed");
        let meta = dir.join("meta");
        std::fs::create_dir_all(dir.join("d")).unwrap();
        let gone = ["f", "d/x"];
        for name in gone {
            std::fs::write(dir.join(name), "old").unwrap();
        }
        let refused = |name: &str| begin(&dir).file(entry(1, 9, name)).is_err();
        // Nobody knows that they are files of the volume.
        assert!(refused("f/below") && refused("d"));

        let (volume, lsn) = (1, 3);
        let (begun, files) = ((0, 0), Vec::new());
        let present = Catalog {
            volume,
            lsn,
            begun,
            files,
        };
        std::fs::write(meta.join("catalog"), present.encode()).unwrap();
        let names = gone.map(str::to_owned).to_vec();
        let note = RemovalNote { volume, lsn, names };
        std::fs::write(meta.join(REMOVAL_NOTE), note.encode()).unwrap();
        let mut s = begin(&dir);
        for (id, name) in [(1, "f/below"), (2, "d")] {
            assert_eq!(s.file(entry(id, 9, name)).unwrap(), 0);
        }
        s.seal(5).unwrap();
        put_in_place(&Os::new().unwrap(), &dir, &meta, volume, 5).unwrap();
        for name in ["f/below", "d"] {
            assert_eq!(std::fs::read(dir.join(name)).unwrap(), [0; 9], "{name}");
        }
        drop(s);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A file was closed, and synced at that, while a stream was about to write to it.
    /// It was not synced again.
    #[test]
    fn what_is_written_after_a_file_was_closed_is_synced_too() {
        let dir = place("closed");
        let mut s = begin(&dir);
        for id in 1..=9 {
            s.file(entry(id, COPY_PAGE, &id.to_string())).unwrap();
        }
        let to = s.target(9, 0, 10).unwrap();
        for id in 1..=8 {
            s.target(id, 0, 10).unwrap();
        }
        assert!(!s.open.contains_key(&9));
        to.write(0, &[1; 10]).unwrap();
        s.written(&to, 0..10).unwrap();
        assert!(s.open.contains_key(&9));
        drop(s);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let dir = place("refused");
        let mut s = begin(&dir);
        let page = [1u8; COPY_PAGE as usize];
        assert_eq!(s.file(entry(1, 2 * COPY_PAGE, "f")).unwrap(), 0);
        // No older file is here: everything is wanted.
        let two = sums(1, 0, &[page, page].concat());
        assert_eq!(compare(&mut s, &two).unwrap().wanted, [0b11]);
        for wrong in [
            sums(1, 2 * COPY_PAGE, &page),
            sums(1, COPY_PAGE, &[page, page].concat()),
            sums(2, 0, &page),
            sums(1, u64::MAX - COPY_PAGE + 1, &page),
        ] {
            assert!(compare(&mut s, &wrong).is_err(), "{}", wrong.offset);
        }
        for (id, at) in [(1, COPY_PAGE + 1), (2, 0), (1, u64::MAX), (1 << 32 | 1, 0)] {
            assert!(data(&mut s, id, at, &page).is_err(), "{id} {at}");
        }
        // A sender that offers more and more and sends nothing.
        let size = (MOST_OWED as u64 + 2) * COPY_PAGE;
        s.file(entry(3, size, "g")).unwrap();
        let refused = (0..MOST_OWED as u64)
            .map(|i| compare(&mut s, &sums(3, i * COPY_PAGE, &page)))
            .find_map(Result::err);
        assert!(refused.is_some());
        drop(s);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
