//! The work of a mounted directory, apart from FUSE: calls on numbers of nodes.
//!
//! Owns the mount's memory: the tree, and for each file what is not in its data file yet. Owns
//! also when so much waits that it is committed early. `commit` owns how, `room` what the disks
//! have room for, `lost` what could not be taken.
//!
//! Invariants:
//!
//! - Nothing is committed before a sync point, the interval, or the bound on memory asks for it,
//!   and then only whole: of a file its size, its bytes and its time of modification together.
//! - A call that changes something fails once nothing can be committed any more.
//! - No thread that holds a lock of the mount waits for a thread that applies records.
//! - Lock order: `state`, then the bytes of files, by ascending number.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mojim::{Batch, Volume};
use mojim_env::locks::lock;
use mojim_env::{Error, File};
use rustix::io::Errno;

use crate::at_once::{WOULD_WAIT, is_at_once, may_pause, may_read};
use crate::flags::Flags;
use crate::lost::Lost;
use crate::name_table::{Attributes, Kind, Time};
use crate::overlay::{BLOCK, Overlay};
use crate::room::Room;
use crate::switch::Uring;
use crate::tree::{Asker, NAMES, Opened, Renames, Tree};

/// Extents of a file that are not begun: more are committed early.
const MOST_EXTENTS: usize = 1 << 14;
/// Names that are not begun: more are committed early. It is half of what a mirror lets wait to be
/// applied before it takes more: a node that takes over has to apply them all first.
const MOST_NAMES: usize = 1 << 14;
/// Zeros are stored in pieces of so many bytes.
const ZEROS: usize = 1 << 20;
/// A file that is not created yet, even in the log.
pub(crate) const NOT_YET: u64 = u64::MAX;
/// Room that bytes take is counted in so many.
const PAGE: u64 = 4096;
/// Most data files that are kept open for reading.
const MOST_BASES: usize = 128;
/// What work on a file's bytes says that needs the data file, which is not open. No program is told
/// this.
const NOT_OPEN: Errno = Errno::BADFD;
/// What a read says of bytes of a data file that are not in memory. No program is told this.
const COLD: Errno = Errno::AGAIN;
/// How often a read has bytes taken into memory, and looks whether they are there.
const TRIES: usize = 3;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Bytes of a write that was let in. They count as waiting until this is dropped.
struct Storing<'a>(&'a AtomicUsize, usize);

impl Storing<'_> {
    /// Lets a write of `len` bytes in, unless more than `most` wait with it: those that `waiting` says
    /// and those that others were let in with, whose sum is `storing`. One alone may have any size.
    fn try_new(
        storing: &AtomicUsize,
        len: usize,
        waiting: impl Fn() -> usize,
        most: usize,
    ) -> Option<Storing<'_>> {
        let fits = |before| {
            let all = waiting() + before;
            (all == 0 || all + len <= most).then_some(before + len)
        };
        let taken = storing.fetch_update(Relaxed, Relaxed, fits);
        taken.ok().map(|_| Storing(storing, len))
    }
}

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

/// How a mount behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// A sync point commits everything that was changed in the volume, not one file's bytes.
    pub atomic_volume: bool,
    /// Changes that no program has committed are, after so long; never with `None`.
    pub commit_interval: Option<Duration>,
    /// Bytes that may wait for a sync point: more are committed early.
    pub most_waiting: usize,
    /// What the mount allows.
    pub flags: Flags,
    /// The source in the table of mounts; `mojim:VOLUME` if it is not given.
    pub source: Option<String>,
    /// Whether requests come over io_uring.
    pub uring: Uring,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            atomic_volume: false,
            commit_interval: Some(Duration::from_secs(5)),
            most_waiting: 64 << 20,
            flags: Flags::default(),
            source: None,
            uring: Uring::default(),
        }
    }
}

/// A file of the volume.
pub(crate) struct FileBytes {
    pub(crate) number: u32,
    pub(crate) bytes: Mutex<Bytes>,
}

pub(crate) struct Bytes {
    pub(crate) overlay: Overlay,
    /// Its data file, if it was read lately.
    base: Option<Arc<dyn File>>,
    /// The sync point that makes its data file: 0 if that was there, or [`NOT_YET`].
    pub(crate) created: u64,
    /// Its time of modification, if it was written to since the last sync point: that of the last write,
    /// or what a program has set since.
    pub(crate) modified: Option<Time>,
    /// When it was written to last.
    pub(crate) written: Time,
    /// Blocks of its data file, if nothing is to be applied to it.
    allocated: Option<u64>,
}

pub(crate) struct State {
    pub(crate) tree: Tree,
    pub(crate) files: HashMap<u64, Arc<FileBytes>>,
    /// Files that come into being with the next sync point.
    pub(crate) fresh: HashMap<u64, Arc<FileBytes>>,
    /// The last batch that was begun.
    pub(crate) last: Option<Batch>,
    /// Sync points that may not be applied yet, and the files of whose bytes they have some.
    pub(crate) unapplied: VecDeque<(u64, Vec<u64>)>,
    /// Changes that were begun since memory was given back.
    pub(crate) changes: usize,
}

/// A node as programs see it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) ino: u64,
    pub(crate) attributes: Attributes,
    pub(crate) size: u64,
    /// Blocks of 512 bytes that it takes, about.
    pub(crate) blocks: u64,
    /// Whether these may be kept: the disk has told them.
    pub(crate) is_sure: bool,
    pub(crate) links: u32,
}

/// What a call has done that is made anew.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// It took set-ID bits from the file.
    killed: Cell<bool>,
    /// Up to where it has stored zeros.
    zeroed: Cell<u64>,
}

/// How bytes are written.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Writing {
    /// The file's set-ID bits go.
    pub(crate) kill: bool,
    /// They were stored into a mapping, and the kernel writes them back.
    pub(crate) mapped: bool,
    /// The call has waited for room already, in vain.
    pub(crate) in_vain: Option<Errno>,
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
    pub(crate) volume: Volume,
    pub(crate) options: Options,
    state: Mutex<State>,
    /// Files that were written to since their last sync points. Changed under the lock of the
    /// file's bytes.
    pub(crate) dirty: Mutex<BTreeSet<u64>>,
    /// Files whose data files are open, in the order in which they were opened.
    bases: Mutex<VecDeque<Weak<FileBytes>>>,
    /// Bytes that are not begun, about.
    pub(crate) waiting: AtomicUsize,
    /// Bytes of writes that were let in, and may not be counted there yet.
    storing: AtomicUsize,
    /// Its lock is taken last.
    pub(crate) room: Room,
    pub(crate) lost: Lost,
    /// The mount is over: nothing is changed any more.
    closed: AtomicBool,
    /// Nothing is served any more. Set under the lock of `state`.
    cleared: AtomicBool,
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
pub(crate) fn told(e: &Error) -> Errno {
    tracing::error!("a sync point could not be committed: {e}");
    errno(e)
}

/// The time now.
pub(crate) fn now() -> Time {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(d) => (d.as_secs() as i64, d.subsec_nanos()),
        // The clock is wrong.
        Err(_) => (0, 0),
    }
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
        let foreign = volume.unmanaged_files()?;
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
            RandomState::new().hash_one(0) as u32,
        );
        let mut tree = tree.map_err(|what| Error::Damaged {
            path: volume.directory().join(NAMES),
            what,
        })?;
        tree.longest = volume.longest_names();
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
                fresh: HashMap::new(),
                last: None,
                unapplied: VecDeque::new(),
                changes: 0,
            }),
            dirty: Mutex::default(),
            bases: Mutex::default(),
            volume,
            options,
            waiting: AtomicUsize::new(0),
            storing: AtomicUsize::new(0),
            room: Room::default(),
            lost: Lost::default(),
            closed: AtomicBool::new(false),
            cleared: AtomicBool::new(false),
        };
        Ok(fs)
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// From here on nothing is changed: who is at it is done when this returns, and who comes
    /// later sees it.
    pub(crate) fn end(&self) {
        self.closed.store(true, SeqCst);
        let files: Vec<_> = self.state().files.values().cloned().collect();
        files.iter().for_each(|f| drop(lock(&f.bytes)));
    }

    /// The state. After a panic in the middle of a change nothing is changed any more.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| {
            self.closed.store(true, SeqCst);
            e.into_inner()
        })
    }

    /// Nothing is served any more, and nothing kept: who still has a file open gets ESTALE.
    pub(crate) fn clear(&self) {
        let mut state = self.state();
        self.cleared.store(true, SeqCst);
        state.tree.clear();
        state.files.clear();
        state.fresh.clear();
        state.last = None;
        state.unapplied.clear();
    }

    /// As [`Fs::state`], for a change.
    fn to_change(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        // Others may have added as much again before this thread has the lock. They had begun it.
        for _ in 0..2 {
            if !self.is_much(&state) {
                break;
            }
            drop(state);
            // Else one sync point would have more than the log has room for.
            self.begin_all_early()?;
            state = self.state();
        }
        // Under the lock: whoever ends the mount waits for it.
        self.writable()?;
        Ok(state)
    }

    /// Whether more waits, of names and bytes together, or of names alone, than is to.
    fn is_much(&self, state: &State) -> bool {
        state.tree.names_waiting() > MOST_NAMES
            || self.all_waiting(state) > self.options.most_waiting
    }

    /// Bytes that wait for a sync point, of names and files: what it would have, about.
    fn all_waiting(&self, state: &State) -> usize {
        state.tree.waiting() + self.waiting.load(Relaxed)
    }

    /// Has bytes count as waiting before they are stored. `None` if so much waits that it is to be
    /// committed first. Of several threads that look at the same time, each would else find room.
    fn reserve(&self, state: &State, len: usize) -> Option<Storing<'_>> {
        if state.tree.names_waiting() > MOST_NAMES {
            return None;
        }
        let named = state.tree.waiting();
        let waiting = || named + self.waiting.load(Relaxed);
        Storing::try_new(&self.storing, len, waiting, self.options.most_waiting)
    }

    /// Fails if nothing is served any more: what is not here may have been dropped uncommitted.
    pub(crate) fn check_served(&self) -> Result<()> {
        match self.cleared.load(SeqCst) {
            true => Err(Errno::STALE),
            false => Ok(()),
        }
    }

    /// Fails if no change can be committed.
    fn writable(&self) -> Result<()> {
        self.check_served()?;
        if self.closed.load(SeqCst) {
            return Err(Errno::ROFS);
        }
        self.volume.check().map_err(|e| errno(&e))
    }

    fn file(&self, ino: u64) -> Result<Arc<FileBytes>> {
        self.state().file(ino)
    }

    pub(crate) fn lookup(&self, parent: u64, name: &[u8]) -> Result<Seen> {
        let state = self.state();
        let ino = state.tree.lookup(parent, name)?;
        self.whole(state, ino)
    }

    /// As [`Fs::lookup`]; `None` if the directory is there, and has no such name.
    pub(crate) fn lookup_any(&self, parent: u64, name: &[u8]) -> Result<Option<Seen>> {
        match self.lookup(parent, name) {
            Err(Errno::NOENT) => self.state().tree.node(parent).map(|_| None),
            found => found.map(Some),
        }
    }

    pub(crate) fn seen(&self, ino: u64) -> Result<Seen> {
        self.whole(self.state(), ino)
    }

    /// What a node is seen as, with the blocks of its file: a disk may be asked for them, so without
    /// the lock.
    fn whole(&self, state: MutexGuard<'_, State>, ino: u64) -> Result<Seen> {
        let (mut seen, file) = (state.seen(ino)?, state.files.get(&ino).cloned());
        drop(state);
        if let Some(file) = file {
            (seen.blocks, seen.is_sure) = self.blocks(&file);
        }
        Ok(seen)
    }

    /// Blocks of 512 bytes that a file takes, about: of its data file, and of what is not in it. A file
    /// with bytes has some always: programs take one without for a hole, and a mapping may have
    /// bytes that are not here yet. False if the disk could not be asked at once: then all of it
    /// counts.
    fn blocks(&self, file: &FileBytes) -> (u64, bool) {
        let b = &mut *lock(&file.bytes);
        let size = b.overlay.size();
        let most = size.div_ceil(PAGE) * PAGE / 512;
        let applied = self.volume.applied();
        b.overlay.applied(applied);
        let there = match b.allocated {
            _ if size == 0 || b.created > applied => 0,
            Some(there) => there,
            None => {
                let open = b
                    .base
                    .as_ref()
                    .and_then(|f| rustix::fs::fstat(f.fd()?).ok());
                let open = open.map(|s| s.st_blocks as u64 * 512);
                let Some(bytes) = open.or_else(|| self.volume.allocated(file.number)) else {
                    return (most, false);
                };
                b.allocated = (!b.overlay.is_begun()).then_some(bytes / 512);
                bytes / 512
            }
        };
        let here = b.overlay.pages(PAGE) * PAGE / 512;
        ((there + here).max(PAGE / 512).min(most), true)
    }

    pub(crate) fn target(&self, ino: u64) -> Result<Vec<u8>> {
        match &self.state().tree.node(ino)?.attributes.kind {
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
        open: Option<Opened>,
    ) -> Result<Seen> {
        let need = self.take_name(parent, name, 0, 1)?;
        let mut state = self.to_change()?;
        let number = state.tree.new_number();
        let ino = state
            .tree
            .make(parent, name, Kind::File(number), mode, asker)?;
        self.room.named(need);
        if let Some(how) = open {
            state.tree.open(ino, how)?;
        }
        let file = Arc::new(FileBytes::new(number, 0, NOT_YET));
        state.fresh.insert(ino, file.clone());
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
        let need = match &kind {
            Kind::Dir => self.take_name(parent, name, BLOCK as usize, 1)?,
            // They are in the file of names alone.
            Kind::Link(target) => self.take_name(parent, name, target.len(), 0)?,
            _ => self.take_name(parent, name, 0, 0)?,
        };
        let mut state = self.to_change()?;
        let ino = state.tree.make(parent, name, kind, mode, asker)?;
        self.room.named(need);
        state.seen(ino)
    }

    pub(crate) fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<Seen> {
        let need = self.take_name(parent, name, 0, 0)?;
        let mut state = self.to_change()?;
        state.tree.link_to(ino, parent, name, now())?;
        self.room.named(need);
        self.whole(state, ino)
    }

    pub(crate) fn unlink(&self, parent: u64, name: &[u8]) -> Result<()> {
        let mut state = self.to_change()?;
        let ino = state.tree.unlink(parent, name, now())?;
        self.forget_gone(&mut state, ino);
        Ok(())
    }

    pub(crate) fn rmdir(&self, parent: u64, name: &[u8]) -> Result<()> {
        self.to_change()?.tree.rmdir(parent, name, now())
    }

    pub(crate) fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), how: Renames) -> Result<()> {
        let mut state = self.to_change()?;
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
            // Else the next sync point would keep them until it is begun.
            state.fresh.remove(&ino);
            self.lost.forget(ino);
            let b = lock(&f.bytes);
            self.waiting.fetch_sub(b.overlay.dirty_bytes(), Relaxed);
            self.room.count(b.overlay.blocks(), 0);
            lock(&self.dirty).remove(&ino);
        }
    }

    pub(crate) fn open_file(&self, ino: u64, how: Opened) -> Result<()> {
        self.state().tree.open(ino, how)
    }

    pub(crate) fn close(&self, ino: u64, how: Opened) {
        let mut state = self.state();
        if state.tree.close(ino, how) {
            self.forget_gone(&mut state, ino);
        } else if state.tree.node(ino).is_ok_and(|n| n.opens == 0) {
            self.lost.forget(ino);
        }
    }

    /// The kernel was told of a node.
    pub(crate) fn tell(&self, ino: u64) {
        let mut state = self.state();
        if state.tree.node(ino).is_ok() {
            state.tree.tell(ino);
        }
    }

    /// The kernel has forgotten a node.
    pub(crate) fn forget(&self, ino: u64, times: u64) {
        let mut state = self.state();
        if state.tree.forget(ino, times) {
            self.forget_gone(&mut state, ino);
        }
    }

    /// The names in a directory, with itself and its parent.
    pub(crate) fn entries(&self, ino: u64) -> Result<Vec<Entry>> {
        let state = self.state();
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

    /// Reads up to `out.len()` bytes. Nobody waits for the disk under the lock of the file's bytes: who looks
    /// at its attributes waits for that, with the lock of all names.
    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut [u8]) -> Result<usize> {
        let file = self.file(ino)?;
        for _ in 0..TRIES {
            let done = self.read_by(&file, offset, out, |f, out, at| f.read_at_once(out, at));
            if done != Err(COLD) {
                return done;
            }
            may_read()?;
            if !warm(&file, offset, out) {
                break;
            }
        }
        // The disk fails, or there is so little memory that nothing stays in it: then it is under the lock.
        self.read_by(&file, offset, out, |f, out, at| f.read_at(out, at))
    }

    /// Reads what is here, and from the data file by `read`.
    fn read_by(
        &self,
        file: &Arc<FileBytes>,
        offset: u64,
        out: &mut [u8],
        read: impl Fn(&dyn File, &mut [u8], u64) -> io::Result<usize>,
    ) -> Result<usize> {
        self.with_bytes(file, |b| {
            b.overlay.applied(self.volume.applied());
            let (created, base) = (b.created, &b.base);
            b.overlay.read(offset, out, |at, out| {
                if created > self.volume.applied() {
                    return Ok(0);
                }
                let base = base.as_ref().ok_or(NOT_OPEN)?;
                read(&**base, out, at).map_err(|e| match e.kind() {
                    io::ErrorKind::WouldBlock => COLD,
                    _ => Errno::from_io_error(&e).unwrap_or(Errno::IO),
                })
            })
        })
    }

    /// Works on a file's bytes, under their lock; anew, once the data file is open, if that is
    /// [`NOT_OPEN`]. It is opened without the lock: that may wait for whoever applies records, and
    /// who looks at the file's attributes waits for the lock.
    fn with_bytes<T>(
        &self,
        file: &Arc<FileBytes>,
        mut work: impl FnMut(&mut Bytes) -> Result<T>,
    ) -> Result<T> {
        loop {
            let done = work(&mut lock(&file.bytes));
            if !matches!(&done, Err(e) if *e == NOT_OPEN) {
                return done;
            }
            self.open_base(file)?;
        }
    }

    /// Whether the file's data file has bytes, and no hole, in all of `range`.
    fn is_there(&self, b: &Bytes, range: Range<u64>) -> Result<bool> {
        if b.created > self.volume.applied() {
            return Ok(false);
        }
        let data = Self::next_data(b, range.start)?;
        Ok(data.is_some_and(|d| d.start <= range.start && range.end <= d.end))
    }

    /// The first range of data at or behind `at` in the file's data file, which is there.
    fn next_data(b: &Bytes, at: u64) -> Result<Option<Range<u64>>> {
        let data = b.base.as_ref().ok_or(NOT_OPEN)?.next_data(at);
        data.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Opens a file's data file; another one's is closed, if there are many. The caller holds no lock of
    /// the mount.
    fn open_base(&self, file: &Arc<FileBytes>) -> Result<()> {
        let opened = match self.volume.data_file_at_once(file.number) {
            Some(opened) => opened,
            None => may_pause().map(|()| self.volume.data_file(file.number))?,
        };
        let opened = opened.map_err(|e| errno(&e))?;
        let mut bases = lock(&self.bases);
        bases.push_back(Arc::downgrade(file));
        if bases.len() > MOST_BASES
            && let Some(other) = bases.pop_front().and_then(|f| f.upgrade())
            && !Arc::ptr_eq(&other, file)
            // Who holds it may wait for this list.
            && let Ok(mut b) = other.bytes.try_lock()
        {
            b.base = None;
        }
        drop(bases);
        lock(&file.bytes).base = Some(opened);
        Ok(())
    }

    /// Stores bytes.
    pub(crate) fn write(
        &self,
        ino: u64,
        offset: u64,
        bytes: &[u8],
        how: Writing,
        progress: &Progress,
    ) -> Result<()> {
        let file = self.file(ino)?;
        let end = offset.checked_add(bytes.len() as u64).ok_or(Errno::FBIG)?;
        // Before anything is stored: a write that fails has stored nothing.
        let room = match how.in_vain {
            Some(e) => Err(e),
            None => self.commit_early(ino, &file, bytes.len()),
        };
        let _room = match room {
            // The kernel would drop what was stored into a mapping, and only since much waits.
            Err(Errno::TIMEDOUT | Errno::NOSPC) if how.mapped && self.fits_the_log(bytes.len()) => {
                None
            }
            room => Some(room?),
        };
        self.await_mirror()?;
        if how.kill {
            self.take_set_ids(ino, progress)?;
        }
        let mut look = 0;
        loop {
            match self.with_bytes(&file, |b| self.store(ino, b, offset..end, bytes)) {
                Err(Errno::NOSPC) if self.look_again(&mut look)? => {}
                stored => return stored,
            }
        }
    }

    /// Stores bytes, if there is room for them.
    fn store(&self, ino: u64, b: &mut Bytes, range: Range<u64>, bytes: &[u8]) -> Result<()> {
        self.writable()?;
        if range.end > b.overlay.size() {
            self.volume.check_size(range.end).map_err(|e| errno(&e))?;
        }
        let new = if bytes.is_empty() {
            0
        } else {
            b.overlay.new_blocks(&range)
        };
        let taken = match self.take_blocks(new) {
            Ok(()) => true,
            // A full disk takes what takes the place of other bytes.
            Err(Errno::NOSPC) if self.is_there(b, range.clone())? => false,
            Err(e) => return Err(e),
        };
        self.count(ino, b, now(), |o| {
            o.write(range.start, bytes);
            if taken && new > 0 {
                o.take_blocks(&range);
            }
        });
        Ok(())
    }

    /// Takes set-ID bits from a file.
    fn take_set_ids(&self, ino: u64, progress: &Progress) -> Result<()> {
        let mut state = self.to_change()?;
        if state.tree.node(ino)?.attributes.mode & 0o6000 != 0 {
            let tree = &mut state.tree;
            tree.change(ino, |a| a.mode = without_set_ids(a.mode))?;
            progress.killed.set(true);
        }
        Ok(())
    }

    /// Whether everything that waits still goes into the log, with another write of `len` bytes: whoever begins a
    /// sync point by a spill file, while the mirror is away, keeps all others waiting. What waits is
    /// a quarter of a log at most. A sync point spills from three eighths on (`Primary::must_spill`).
    fn fits_the_log(&self, len: usize) -> bool {
        let most = self.options.most_waiting;
        let stored = self.storing.load(Relaxed);
        self.all_waiting(&self.state()) + stored + len <= most + most / 4
    }

    /// Bytes that the kernel wrote back, from a mapping, were not taken. Call before it is told.
    #[cold]
    pub(crate) fn lose(&self, ino: u64, offset: u64, len: usize, error: Errno) {
        let state = self.state();
        let node = state.tree.node(ino);
        // Nobody misses what a file without a name had.
        let counts = node.as_ref().is_ok_and(|n| Tree::links(n) > 0);
        if !self.lost.add(ino, error, counts) {
            return;
        }
        let path = node.map(|n| state.tree.path(n));
        let path = path.unwrap_or_default();
        tracing::error!(
            "{}: bytes {offset} to {} that a program stored into a mapping are lost: {error}. No sync \
             point of the file succeeds until every program has closed it",
            String::from_utf8_lossy(&path),
            offset + len as u64
        );
    }

    /// Changes a file's bytes, which the caller has locked.
    fn count(&self, ino: u64, b: &mut Bytes, now: Time, change: impl FnOnce(&mut Overlay)) {
        b.written = now;
        if b.modified.replace(now).is_none() {
            lock(&self.dirty).insert(ino);
        }
        let (before, blocks) = (b.overlay.dirty_bytes(), b.overlay.blocks());
        change(&mut b.overlay);
        self.room.count(blocks, b.overlay.blocks());
        let after = b.overlay.dirty_bytes();
        match after >= before {
            true => self.waiting.fetch_add(after - before, Relaxed),
            false => self.waiting.fetch_sub(before - after, Relaxed),
        };
    }

    /// Begins a sync point that no program asked for, if so much waits: in one file or, where a write
    /// of `len` bytes has got no room, of all. Then it gets some.
    fn commit_early<'a>(&'a self, ino: u64, file: &FileBytes, len: usize) -> Result<Storing<'a>> {
        let mut room = self.reserve(&self.state(), len);
        let extents = || lock(&file.bytes).overlay.dirty_extents() > MOST_EXTENTS;
        if room.is_some() && extents() {
            self.begin_early(ino, false)?;
        }
        loop {
            if let Some(room) = room {
                return Ok(room);
            }
            self.begin_early(ino, true)?;
            room = self.reserve(&self.state(), len);
            if room.is_none() && is_at_once() {
                return Err(WOULD_WAIT);
            }
            // Others are storing what they were let in with.
            std::thread::yield_now();
        }
    }

    pub(crate) fn set(&self, ino: u64, want: &Wanted, asker: Asker) -> Result<Seen> {
        let file = want.size.map(|_| self.file(ino)).transpose()?;
        // Before anything is changed: a call that fails has cut nothing.
        let mut state = self.to_change()?;
        state.tree.node(ino)?;
        if let (Some(size), Some(file)) = (want.size, file) {
            self.resize(ino, &file, asker.now, size, |_| true)?;
        }
        state.tree.change(ino, |a| {
            if want.size.is_some() && asker.uid != 0 {
                a.mode = without_set_ids(a.mode);
            }
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
        self.whole(state, ino)
    }

    /// Sets the size of a file, if `of` the present one says so.
    fn resize(
        &self,
        ino: u64,
        file: &FileBytes,
        now: Time,
        size: u64,
        of: impl FnOnce(u64) -> bool,
    ) -> Result<()> {
        if size > i64::MAX as u64 {
            return Err(Errno::FBIG);
        }
        self.volume.check_size(size).map_err(|e| errno(&e))?;
        let mut b = lock(&file.bytes);
        self.writable()?;
        if of(b.overlay.size()) {
            self.count(ino, &mut b, now, |o| o.resize(size));
        }
        Ok(())
    }

    /// `fallocate` of a range (offset and length): room is not reserved; holes are zeros.
    pub(crate) fn allocate(
        &self,
        ino: u64,
        (offset, len): (u64, u64),
        mode: i32,
        asker: Asker,
        progress: &Progress,
    ) -> Result<()> {
        self.writable()?;
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        let keep = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let zeros = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => false,
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => true,
            _ => return Err(Errno::OPNOTSUPP),
        };
        let file = self.file(ino)?;
        // The kernel does not say whether it has to be.
        if asker.uid != 0 {
            self.take_set_ids(ino, progress)?;
        }
        let size = lock(&file.bytes).overlay.size();
        if !keep && end > size {
            self.resize(ino, &file, asker.now, end, |size| end > size)?;
        }
        if zeros {
            let end = end.min(size);
            // Zeros that are stored already are not stored again: they may be what has to wait.
            let mut at = progress.zeroed.get().max(offset);
            // A hole stays one.
            while let Some(next) = self.next_written(&file, at)?.filter(|r| r.start < end) {
                let most = ZEROS.min(self.options.most_waiting / 2);
                let n = (next.end.min(end) - next.start).min(most as u64) as usize;
                let how = Writing::default();
                self.write(ino, next.start, &vec![0; n], how, progress)?;
                at = next.start + n as u64;
                progress.zeroed.set(at);
            }
        }
        Ok(())
    }

    /// The first range from `at` on that may have other bytes than zeros.
    fn next_written(&self, file: &Arc<FileBytes>, at: u64) -> Result<Option<Range<u64>>> {
        self.with_bytes(file, |b| {
            let here = b.overlay.next(at);
            if b.created > self.volume.applied() {
                return Ok(here);
            }
            let data = Self::next_data(b, at)?;
            let data = data.map(|d| d.start.max(at)..d.end);
            Ok(here.into_iter().chain(data).min_by_key(|r| r.start))
        })
    }

    /// `SEEK_DATA` and `SEEK_HOLE`. While a program has the file open to write, all of it is data:
    /// there may be a mapping, with bytes that the kernel has not written back.
    pub(crate) fn seek(&self, ino: u64, offset: u64, hole: bool) -> Result<u64> {
        let state = self.state();
        let (file, writes) = (state.file(ino)?, state.tree.node(ino)?.writers > 0);
        drop(state);
        let size = lock(&file.bytes).overlay.size();
        if offset >= size {
            return Err(Errno::NXIO);
        }
        let next = |at| match writes {
            true => Ok(Some(at..size)),
            false => self.next_written(&file, at),
        };
        if !hole {
            let data = next(offset)?.filter(|r| r.start < size);
            return data.map(|r| r.start).ok_or(Errno::NXIO);
        }
        let mut at = offset;
        while at < size
            && let Some(data) = next(at)?.filter(|r| r.start <= at)
        {
            at = data.end;
        }
        Ok(at.min(size))
    }

    pub(crate) fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>> {
        Self::check_xattr(name)?;
        self.state().tree.xattr(ino, name).map(<[u8]>::to_vec)
    }

    /// The names of extended attributes that an asker may know, each with a zero behind it.
    pub(crate) fn xattrs(&self, ino: u64, asker: Asker) -> Result<Vec<u8>> {
        let state = self.state();
        let names = state.tree.xattrs(ino)?;
        let names = names.filter(|n| asker.uid == 0 || !n.starts_with(b"trusted."));
        Ok(names.flat_map(|n| [n, b"\0"].concat()).collect())
    }

    /// Access control lists would be kept, and not enforced.
    fn check_xattr(name: &[u8]) -> Result<()> {
        let known: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
        match known.iter().any(|space| name.starts_with(space)) {
            true => Ok(()),
            false => Err(Errno::OPNOTSUPP),
        }
    }

    pub(crate) fn set_xattr(&self, ino: u64, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        Self::check_xattr(name)?;
        let need = self.take_name(ino, name, value.len(), 0)?;
        let mut state = self.to_change()?;
        state.tree.set_xattr(ino, name, value, flags, now())?;
        self.room.named(need);
        Ok(())
    }

    pub(crate) fn remove_xattr(&self, ino: u64, name: &[u8]) -> Result<()> {
        self.to_change()?.tree.remove_xattr(ino, name, now())
    }

    /// The numbers of files that are open.
    pub(crate) fn open_inodes(&self) -> Vec<u64> {
        self.state().tree.open_inodes().collect()
    }

    /// Whether a process has a file open.
    pub(crate) fn is_open(&self) -> bool {
        self.state().tree.is_open()
    }

    /// The numbers of all files and directories.
    pub(crate) fn inodes(&self) -> Vec<u64> {
        self.state().tree.inodes().collect()
    }

    pub(crate) fn nodes(&self) -> u64 {
        self.state().tree.counts()
    }
}

impl Progress {
    /// Whether the call took set-ID bits from the file.
    pub(crate) fn killed(&self) -> bool {
        self.killed.get()
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
            written: (i64::MIN, 0),
            allocated: None,
        };
        FileBytes {
            number,
            bytes: Mutex::new(bytes),
        }
    }
}

impl Bytes {
    /// Something is to be applied to its data file.
    pub(crate) fn forget_blocks(&mut self) {
        self.allocated = None;
    }
}

impl State {
    fn file(&self, ino: u64) -> Result<Arc<FileBytes>> {
        match self.files.get(&ino) {
            Some(f) => Ok(f.clone()),
            None => Err(match self.tree.node(ino)?.is_dir() {
                true => Errno::ISDIR,
                false => Errno::INVAL,
            }),
        }
    }

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
                attributes.changed = attributes.changed.max(b.written);
            }
        }
        Ok(Seen {
            ino,
            attributes,
            size,
            blocks: size.div_ceil(512),
            is_sure: true,
            links: Tree::links(node),
        })
    }
}

/// Has bytes of a file's data file taken into memory, through `out`, which is of no use afterwards. Waits for
/// the disk. False if that fails.
fn warm(file: &FileBytes, offset: u64, out: &mut [u8]) -> bool {
    let base = lock(&file.bytes).base.clone();
    // If it was closed, it is opened again.
    base.is_none_or(|f| f.read_at(out, offset).is_ok())
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

#[cfg(test)]
impl Fs {
    /// From now on a file is read from `base` in place of its data file.
    pub(crate) fn read_from(&self, ino: u64, base: Arc<dyn File>) {
        lock(&self.file(ino).expect("a file").bytes).base = Some(base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that serve looked at the same time, and each let in a write of its own: together they had
    /// more than the log takes, and the sync point of it all kept every call waiting for the mirror.
    #[test]
    fn writes_at_the_same_time_are_let_in_one_by_one() {
        let (storing, waiting) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let new = |len| Storing::try_new(&storing, len, || waiting.load(Relaxed), 100);
        let first = new(1000);
        assert!(first.is_some(), "one write alone may have any size");
        assert!(new(1).is_none());
        // It is stored.
        waiting.store(60, Relaxed);
        drop(first);
        let second = new(40);
        assert!(second.is_some() && new(1).is_none(), "its own bytes count");
        waiting.store(101, Relaxed);
        drop(second);
        assert_eq!(storing.load(Relaxed), 0);
        assert!(new(1).is_none());
    }
}
