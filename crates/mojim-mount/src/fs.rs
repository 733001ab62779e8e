//! What a mounted directory does, apart from FUSE: calls on numbers of nodes.
//!
//! Owns the mount's memory: the tree, and for each file what is not in its data file yet; and
//! when that is committed. A sync point has all changes of names so far and the bytes of the
//! files it is of; with `atomic = "volume"` those of all files (FAMS 4.2: a program's changes
//! become durable together or not at all).
//!
//! Invariants:
//! - Nothing is committed before a sync point, the interval, or the bound on memory asks for it,
//!   and then only whole: of a file its size, its bytes and its time of modification together.
//! - A call that changes something fails once nothing can be committed any more.
//! - Lock order: `state`; the bytes of files, by ascending number.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mojim::{Batch, Change, Volume};
use mojim_env::{Error, File};
use rustix::io::Errno;

use crate::cells::{Attributes, Kind, Time};
use crate::overlay::Overlay;
use crate::tree::{Asker, NAMES, Renames, Tree};

/// Extents of a file that are not begun: more are committed early.
const MOST_EXTENTS: usize = 1 << 14;
/// Zeros are stored in pieces of so many bytes.
const ZEROS: usize = 1 << 20;
/// A file that is not created yet, even in the log.
const NOT_YET: u64 = u64::MAX;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// How a mount behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// A sync point commits everything that was changed in the volume, not one file's bytes.
    pub atomic_volume: bool,
    /// Changes that no program has committed are, after so long; never with `None`.
    pub commit_interval: Option<Duration>,
    /// Bytes that may wait for a sync point: more are committed early.
    pub most_waiting: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            atomic_volume: false,
            commit_interval: Some(Duration::from_secs(5)),
            most_waiting: 64 << 20,
        }
    }
}

/// A file of the volume.
struct FileBytes {
    number: u32,
    bytes: Mutex<Bytes>,
}

struct Bytes {
    overlay: Overlay,
    /// Its data file, while it is open.
    base: Option<Arc<dyn File>>,
    /// The sync point that makes its data file: 0 if that was there.
    created: u64,
    /// When it was written to, since the last sync point.
    modified: Option<Time>,
}

struct State {
    tree: Tree,
    files: HashMap<u64, Arc<FileBytes>>,
    /// Files that come into being with the next sync point.
    fresh: Vec<Arc<FileBytes>>,
    /// The last batch that was begun.
    last: Option<Batch>,
}

/// Which files' bytes a sync point has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Names,
    One(u64),
    All,
}

/// A node as programs see it.
pub(crate) struct Seen {
    pub(crate) ino: u64,
    pub(crate) attributes: Attributes,
    pub(crate) size: u64,
    pub(crate) links: u32,
}

/// What `setattr` changes.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) accessed: Option<Time>,
    pub(crate) modified: Option<Time>,
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) ino: u64,
}

/// A mounted volume.
pub(crate) struct Fs {
    volume: Volume,
    options: Options,
    state: Mutex<State>,
    /// Files that were written to since their last sync points. Changed under the lock of the
    /// file's bytes.
    dirty: Mutex<BTreeSet<u64>>,
    /// Bytes that are not begun, about.
    waiting: AtomicUsize,
    /// The mount is over: nothing is changed any more.
    closed: AtomicBool,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// An error as programs get it. A volume that has another primary is read-only here.
pub(crate) fn errno(e: &Error) -> Errno {
    match e {
        Error::Stale(_) => Errno::ROFS,
        e => Errno::from_raw_os_error(e.errno()),
    }
}

/// As [`errno`], of a sync point: programs get a number alone, so the reason is said here.
#[cold]
fn told(e: &Error) -> Errno {
    tracing::error!("a sync point could not be committed: {e}");
    errno(e)
}

/// The time now.
pub(crate) fn now() -> Time {
    time_of(SystemTime::now())
}

pub(crate) fn time_of(t: SystemTime) -> Time {
    match t.duration_since(UNIX_EPOCH) {
        Ok(d) => (d.as_secs() as i64, d.subsec_nanos()),
        Err(e) => {
            let before = e.duration();
            match before.subsec_nanos() {
                0 => (-(before.as_secs() as i64), 0),
                n => (-(before.as_secs() as i64) - 1, 1_000_000_000 - n),
            }
        }
    }
}

/// Reads a data file, if there is one.
fn read_base(
    volume: &Volume,
    file: &FileBytes,
    created: u64,
    base: &mut Option<Arc<dyn File>>,
    at: u64,
    out: &mut [u8],
) -> Result<usize> {
    if created > volume.applied() {
        return Ok(0);
    }
    let base = match base {
        Some(base) => base,
        None => {
            let opened = volume.data_file(file.number).map_err(|e| errno(&e))?;
            base.insert(opened)
        }
    };
    let got = base.read_at(out, at);
    got.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

impl Fs {
    /// The directory of an attached volume, which no other program uses.
    pub(crate) fn open(
        volume: Volume,
        options: Options,
        uid: u32,
        gid: u32,
    ) -> mojim_env::Result<Fs> {
        volume.settle()?;
        let mut files = volume.numbered();
        let at = files.iter().position(|f| f.1 == NAMES);
        let names = at.map(|i| files.swap_remove(i));
        let names = names
            .map(|(n, _, size)| read_all(&volume, n, size).map(|b| (n, b)))
            .transpose()?;
        let foreign = volume.strangers()?;
        let asker = Asker {
            uid,
            gid,
            now: now(),
        };
        let tree = Tree::load(
            names.as_ref().map(|(n, b)| (*n, &b[..])),
            &files,
            foreign,
            asker,
            || volume.new_number(),
        );
        let tree = tree.map_err(|what| Error::Damaged {
            path: volume.directory().join(NAMES),
            what,
        })?;
        let sizes: HashMap<u32, u64> = files.iter().map(|f| (f.0, f.2)).collect();
        let files = tree.files().map(|(ino, number)| {
            let file = FileBytes::new(number, sizes.get(&number).copied().unwrap_or(0), 0);
            (ino, Arc::new(file))
        });
        let files = files.collect();
        let fs = Fs {
            state: Mutex::new(State {
                tree,
                files,
                fresh: Vec::new(),
                last: None,
            }),
            dirty: Mutex::default(),
            volume,
            options,
            waiting: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        };
        Ok(fs)
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// From here on nothing is changed.
    pub(crate) fn end(&self) {
        self.closed.store(true, Release);
        // Those that are at it are done.
        drop(lock(&self.state));
    }

    /// Fails if no change can be committed.
    fn writable(&self) -> Result<()> {
        if self.closed.load(Acquire) {
            return Err(Errno::ROFS);
        }
        self.volume.check().map_err(|e| errno(&e))
    }

    fn file(&self, ino: u64) -> Result<Arc<FileBytes>> {
        let state = lock(&self.state);
        match state.files.get(&ino) {
            Some(f) => Ok(f.clone()),
            None => Err(match state.tree.node(ino)?.is_dir() {
                true => Errno::ISDIR,
                false => Errno::INVAL,
            }),
        }
    }

    pub(crate) fn lookup(&self, parent: u64, name: &[u8]) -> Result<Seen> {
        let state = lock(&self.state);
        let ino = state.tree.lookup(parent, name)?;
        state.seen(ino)
    }

    pub(crate) fn seen(&self, ino: u64) -> Result<Seen> {
        lock(&self.state).seen(ino)
    }

    pub(crate) fn target(&self, ino: u64) -> Result<Vec<u8>> {
        match &lock(&self.state).tree.node(ino)?.attributes.kind {
            Kind::Link(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Makes a file, opened if `open`.
    pub(crate) fn make_file(
        &self,
        parent: u64,
        name: &[u8],
        mode: u32,
        asker: Asker,
        open: bool,
    ) -> Result<Seen> {
        self.writable()?;
        let number = self.volume.new_number();
        let mut state = lock(&self.state);
        let ino = state
            .tree
            .make(parent, name, Kind::File(number), mode, asker)?;
        if open {
            state.tree.open(ino)?;
        }
        let file = Arc::new(FileBytes::new(number, 0, NOT_YET));
        state.fresh.push(file.clone());
        state.files.insert(ino, file);
        state.seen(ino)
    }

    /// Makes a directory or a symbolic link.
    pub(crate) fn make(
        &self,
        parent: u64,
        name: &[u8],
        kind: Kind,
        mode: u32,
        asker: Asker,
    ) -> Result<Seen> {
        self.writable()?;
        let mut state = lock(&self.state);
        let ino = state.tree.make(parent, name, kind, mode, asker)?;
        state.seen(ino)
    }

    pub(crate) fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<Seen> {
        self.writable()?;
        let mut state = lock(&self.state);
        state.tree.link_to(ino, parent, name, now())?;
        state.seen(ino)
    }

    pub(crate) fn unlink(&self, parent: u64, name: &[u8]) -> Result<()> {
        self.writable()?;
        let mut state = lock(&self.state);
        let ino = state.tree.unlink(parent, name, now())?;
        self.forget_gone(&mut state, ino);
        Ok(())
    }

    pub(crate) fn rmdir(&self, parent: u64, name: &[u8]) -> Result<()> {
        self.writable()?;
        lock(&self.state).tree.rmdir(parent, name, now())
    }

    pub(crate) fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), how: Renames) -> Result<()> {
        self.writable()?;
        let mut state = lock(&self.state);
        let other = state.tree.lookup(to.0, to.1).ok();
        state.tree.rename(from, to, how, now())?;
        if let Some(other) = other {
            self.forget_gone(&mut state, other);
        }
        Ok(())
    }

    /// The bytes of a node that has gone are not kept.
    fn forget_gone(&self, state: &mut State, ino: u64) {
        if state.tree.node(ino).is_err()
            && let Some(f) = state.files.remove(&ino)
        {
            let b = lock(&f.bytes);
            self.waiting.fetch_sub(b.overlay.dirty_bytes(), Relaxed);
        }
    }

    pub(crate) fn open_file(&self, ino: u64) -> Result<()> {
        lock(&self.state).tree.open(ino)
    }

    pub(crate) fn close(&self, ino: u64) {
        let mut state = lock(&self.state);
        if state.tree.close(ino) {
            self.forget_gone(&mut state, ino);
        } else if state.tree.node(ino).is_ok_and(|n| n.opens == 0)
            && let Some(f) = state.files.get(&ino)
        {
            lock(&f.bytes).base = None;
        }
    }

    /// The names in a directory, with itself and its parent.
    pub(crate) fn entries(&self, ino: u64) -> Result<Vec<Entry>> {
        let state = lock(&self.state);
        let node = state.tree.node(ino)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let entry = |name: &[u8], ino| Entry {
            name: name.to_vec(),
            ino,
        };
        let mut all = vec![entry(b".", ino), entry(b"..", state.tree.parent(ino))];
        all.extend(node.children.iter().map(|(n, c)| entry(n, c.ino)));
        Ok(all)
    }

    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut [u8]) -> Result<usize> {
        let file = self.file(ino)?;
        let b = &mut *lock(&file.bytes);
        b.overlay.applied(self.volume.applied());
        let (created, base) = (b.created, &mut b.base);
        b.overlay.read(offset, out, |at, out| {
            read_base(&self.volume, &file, created, base, at, out)
        })
    }

    pub(crate) fn write(&self, ino: u64, offset: u64, bytes: &[u8], kill: bool) -> Result<()> {
        self.writable()?;
        let file = self.file(ino)?;
        if kill {
            let mut state = lock(&self.state);
            if state.tree.node(ino)?.attributes.mode & 0o6000 != 0 {
                state
                    .tree
                    .change(ino, |a| a.mode = without_set_ids(a.mode))?;
            }
        }
        let end = offset.checked_add(bytes.len() as u64).ok_or(Errno::FBIG)?;
        let early = {
            let mut b = lock(&file.bytes);
            if end > b.overlay.size() {
                self.volume.check_size(end).map_err(|e| errno(&e))?;
            }
            self.count(ino, &mut b, now(), |o| o.write(offset, bytes))
        };
        self.commit_early(ino, early)
    }

    /// Changes a file's bytes; whether so many wait that they are to be committed early.
    fn count(&self, ino: u64, b: &mut Bytes, now: Time, change: impl FnOnce(&mut Overlay)) -> bool {
        if b.modified.replace(now).is_none() {
            lock(&self.dirty).insert(ino);
        }
        let before = b.overlay.dirty_bytes();
        change(&mut b.overlay);
        let after = b.overlay.dirty_bytes();
        let waiting = match after >= before {
            true => self.waiting.fetch_add(after - before, Relaxed) + (after - before),
            false => self.waiting.fetch_sub(before - after, Relaxed),
        };
        waiting > self.options.most_waiting || b.overlay.dirty_extents() > MOST_EXTENTS
    }

    /// Begins a sync point that no program asked for, if that is due.
    fn commit_early(&self, ino: u64, early: bool) -> Result<()> {
        if !early {
            return Ok(());
        }
        let waiting = self.waiting.load(Relaxed);
        let all = self.options.atomic_volume || waiting > self.options.most_waiting;
        let what = match all {
            true => What::All,
            false => What::One(ino),
        };
        if let Some(batch) = self.begin(what)? {
            self.volume.launch(&batch);
        }
        Ok(())
    }

    pub(crate) fn set(&self, ino: u64, want: &Wanted, asker: Asker) -> Result<Seen> {
        self.writable()?;
        if let Some(size) = want.size {
            self.resize(ino, size, asker)?;
        }
        let mut state = lock(&self.state);
        state.tree.change(ino, |a| {
            if let Some(mode) = want.mode {
                a.mode = mode & 0o7777;
            } else if (want.uid.is_some() || want.gid.is_some()) && a.kind != Kind::Dir {
                a.mode = without_set_ids(a.mode);
            }
            a.uid = want.uid.unwrap_or(a.uid);
            a.gid = want.gid.unwrap_or(a.gid);
            a.accessed = want.accessed.unwrap_or(a.accessed);
            a.modified = want.modified.unwrap_or(a.modified);
            a.changed = asker.now;
        })?;
        if let (Some(_), Some(f)) = (want.modified, state.files.get(&ino)) {
            let mut b = lock(&f.bytes);
            // It stays among the dirty ones.
            b.modified = b.modified.and(want.modified);
        }
        state.seen(ino)
    }

    fn resize(&self, ino: u64, size: u64, asker: Asker) -> Result<()> {
        let file = self.file(ino)?;
        if size > i64::MAX as u64 {
            return Err(Errno::FBIG);
        }
        self.volume.check_size(size).map_err(|e| errno(&e))?;
        {
            let mut b = lock(&file.bytes);
            self.count(ino, &mut b, asker.now, |o| o.resize(size));
        }
        let mut state = lock(&self.state);
        if asker.uid != 0 {
            state
                .tree
                .change(ino, |a| a.mode = without_set_ids(a.mode))?;
        }
        Ok(())
    }

    /// `fallocate`: room is not reserved; holes are zeros.
    pub(crate) fn allocate(&self, ino: u64, offset: u64, len: u64, mode: i32) -> Result<()> {
        self.writable()?;
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        let keep = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let zeros = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => false,
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => true,
            _ => return Err(Errno::OPNOTSUPP),
        };
        let file = self.file(ino)?;
        let size = lock(&file.bytes).overlay.size();
        if !keep && end > size {
            let asker = Asker {
                uid: 0,
                gid: 0,
                now: now(),
            };
            self.resize(ino, end, asker)?;
        }
        if zeros {
            let mut at = offset;
            let end = end.min(size);
            while at < end {
                let n = (end - at).min(ZEROS as u64) as usize;
                self.write(ino, at, &vec![0; n], true)?;
                at += n as u64;
            }
        }
        Ok(())
    }

    /// `SEEK_DATA` and `SEEK_HOLE`: a file is data up to its end.
    pub(crate) fn seek(&self, ino: u64, offset: u64, hole: bool) -> Result<u64> {
        let size = lock(&self.file(ino)?.bytes).overlay.size();
        match offset < size {
            true if hole => Ok(size),
            true => Ok(offset),
            false => Err(Errno::NXIO),
        }
    }

    pub(crate) fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>> {
        lock(&self.state).tree.xattr(ino, name).map(<[u8]>::to_vec)
    }

    /// The names of extended attributes, each with a zero behind it.
    pub(crate) fn xattrs(&self, ino: u64) -> Result<Vec<u8>> {
        let state = lock(&self.state);
        let names = state.tree.xattrs(ino)?;
        Ok(names.flat_map(|n| [n, b"\0"].concat()).collect())
    }

    pub(crate) fn set_xattr(&self, ino: u64, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.writable()?;
        let mut state = lock(&self.state);
        state.tree.set_xattr(ino, name, value, flags, now())
    }

    pub(crate) fn remove_xattr(&self, ino: u64, name: &[u8]) -> Result<()> {
        self.writable()?;
        lock(&self.state).tree.remove_xattr(ino, name, now())
    }

    pub(crate) fn nodes(&self) -> u64 {
        lock(&self.state).tree.counts()
    }

    /// A sync point of a file: its bytes, or everything, as the mount is configured.
    pub(crate) fn sync(&self, ino: u64) -> Result<()> {
        self.sync_what(match self.options.atomic_volume {
            true => What::All,
            false => What::One(ino),
        })
    }

    /// A sync point of all names.
    pub(crate) fn sync_names(&self) -> Result<()> {
        self.sync_what(match self.options.atomic_volume {
            true => What::All,
            false => What::Names,
        })
    }

    /// A sync point of everything.
    pub(crate) fn sync_all(&self) -> Result<()> {
        self.sync_what(What::All)
    }

    fn sync_what(&self, what: What) -> Result<()> {
        let begun = self.begin(what)?;
        let batch = match begun {
            Some(batch) => batch,
            // Others may have begun what this call is to wait for.
            None => match lock(&self.state).last {
                Some(batch) => batch,
                None => return self.volume.check().map_err(|e| errno(&e)),
            },
        };
        self.volume.complete(&batch).map_err(|e| told(&e))
    }

    /// Begins a sync point of everything and does not wait; forgets what is applied.
    pub(crate) fn tick(&self) -> Result<()> {
        if let Some(batch) = self.begin(What::All)? {
            self.volume.launch(&batch);
        }
        self.forget_applied();
        Ok(())
    }

    /// Memory of what the data files have by now is free.
    pub(crate) fn forget_applied(&self) {
        let applied = self.volume.applied();
        let mut state = lock(&self.state);
        state.tree.applied(applied);
        for f in state.files.values() {
            lock(&f.bytes).overlay.applied(applied);
        }
    }

    /// Begins a sync point; `None` if there is nothing to commit.
    fn begin(&self, what: What) -> Result<Option<Batch>> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let files = self.chosen(state, what);
        let mut held: Vec<(u32, MutexGuard<'_, Bytes>)> = Vec::new();
        for (ino, f) in &files {
            let b = lock(&f.bytes);
            if let Some(at) = b.modified {
                let set = |a: &mut Attributes| (a.modified, a.changed) = (at, a.changed.max(at));
                // A node that has gone has no attributes.
                let _ = state.tree.change(*ino, set);
                held.push((f.number, b));
            } else if b.overlay.is_dirty() {
                held.push((f.number, b));
            }
        }
        state.tree.write_touched();
        let names = state.tree.renames();
        let mut changes: Vec<Change<'_>> = Vec::new();
        names.changes(&mut changes);
        state.tree.changes(&mut changes);
        for (number, b) in &held {
            b.overlay.changes(*number, &mut changes);
        }
        if changes.is_empty() {
            return Ok(None);
        }
        let batch = self.volume.begin(&changes).map_err(|e| told(&e))?;
        drop(changes);
        let lsn = batch.lsn();
        let mut dirty = lock(&self.dirty);
        files.iter().for_each(|(ino, _)| _ = dirty.remove(ino));
        drop(dirty);
        for (_, b) in &mut held {
            self.waiting.fetch_sub(b.overlay.dirty_bytes(), Relaxed);
            b.overlay.begun(lsn);
            b.modified = None;
        }
        drop(held);
        for f in state.fresh.drain(..) {
            lock(&f.bytes).created = lsn;
        }
        state.tree.begun(lsn);
        state.last = Some(batch);
        Ok(Some(batch))
    }

    /// The files whose bytes a sync point has, by ascending number.
    fn chosen(&self, state: &State, what: What) -> Vec<(u64, Arc<FileBytes>)> {
        let mut inos = match what {
            What::All => lock(&self.dirty).iter().copied().collect(),
            What::One(ino) => vec![ino],
            What::Names => Vec::new(),
        };
        inos.extend(state.tree.joined());
        inos.sort_unstable();
        inos.dedup();
        let file = |ino| Some((ino, state.files.get(&ino)?.clone()));
        inos.into_iter().filter_map(file).collect()
    }
}

/// Writing to a file, or giving it to somebody else, ends what its set-ID bits allowed.
fn without_set_ids(mode: u32) -> u32 {
    match mode & 0o010 {
        0 => mode & !0o4000,
        _ => mode & !0o6000,
    }
}

impl FileBytes {
    fn new(number: u32, size: u64, created: u64) -> FileBytes {
        let bytes = Bytes {
            overlay: Overlay::new(size),
            base: None,
            created,
            modified: None,
        };
        FileBytes {
            number,
            bytes: Mutex::new(bytes),
        }
    }
}

impl State {
    fn seen(&self, ino: u64) -> Result<Seen> {
        let node = self.tree.node(ino)?;
        let mut attributes = node.attributes.clone();
        let mut size = match &attributes.kind {
            Kind::Link(t) => t.len() as u64,
            _ => 0,
        };
        if let Some(f) = self.files.get(&ino) {
            let b = lock(&f.bytes);
            size = b.overlay.size();
            if let Some(at) = b.modified {
                attributes.modified = at;
                attributes.changed = attributes.changed.max(at);
            }
        }
        Ok(Seen {
            ino,
            attributes,
            size,
            links: Tree::links(node),
        })
    }
}

/// A file's bytes, all of which are applied.
fn read_all(volume: &Volume, number: u32, size: u64) -> mojim_env::Result<Vec<u8>> {
    let file = volume.data_file(number)?;
    let mut bytes = vec![0; size as usize];
    let got = file.read_at(&mut bytes, 0);
    let got = got.map_err(|e| Error::io(format!("reading {NAMES}"), &e))?;
    bytes.truncate(got);
    Ok(bytes)
}
