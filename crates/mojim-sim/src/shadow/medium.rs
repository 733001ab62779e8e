//! A machine with persistent memory, and every state in which a power cut may leave it.
//!
//! Owns the durable image ([`Image`]), the machine that runs over an image ([`Shadow`], an [`Env`])
//! and the enumeration at its fences.
//!
//! The medium behaves so:
//!
//! - A word (8 aligned bytes) of mapped memory is durable once its line was flushed and fenced.
//!   Until then it may be there or not, independently of the others. That is a superset of what
//!   lines that keep the order of their stores can do. So this order need not be observed. Values
//!   that a word had between two looks are not observed either.
//! - Of what was written to a file and not synced, each 512-byte sector may be there or not, and so
//!   may the new length.
//! - Changes of names become durable in their order. After `sync_dir` all changes up to the last
//!   one in that directory are durable.
//!
//! Between two fences the set of pending changes only grows. So the states of any moment between
//! them are among those of the later fence. A pending sector that is written again would hide its
//! first value, so the states are looked at before that. So the argument holds for files too.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use mojim_env::locks::lock;
use mojim_env::{Address, Conn, Env, File, FileSystem, Locker, Memory, OpenHow};
use mojim_store::log::{CONTROL_LEN, LIVE_AT};

use crate::disk::SECTOR;
use crate::memory::{LINE, Region};
use crate::rng::Rng;

/// The size of a word of persistent memory, in bytes.
const WORD: usize = 8;
/// A fence with at most this many states has all of them looked at.
const EXHAUSTIVE: u64 = 1 << 12;

type Names = BTreeMap<PathBuf, usize>;

/// Everything that a machine finds when it starts.
#[derive(Debug, Clone, Default)]
pub(super) struct Image {
    files: Vec<Arc<Vec<u8>>>,
    names: Arc<Names>,
}

impl Image {
    /// The same image without the files that have no name any more.
    fn compact(self) -> Image {
        let mut files = Vec::new();
        let mut names = Names::new();
        for (name, ino) in self.names.iter() {
            names.insert(name.clone(), files.len());
            files.push(self.files[*ino].clone());
        }
        let names = Arc::new(names);
        Image { files, names }
    }
}

/// A change that may be durable or not.
#[derive(Debug)]
enum Unit {
    Word(usize, usize, [u8; WORD]),
    Length(usize),
    Sector(usize, usize),
}

/// A change of names.
#[derive(Debug)]
enum NameOp {
    Link(PathBuf, usize),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf),
}

impl NameOp {
    fn apply(&self, names: &mut Names) {
        match self {
            NameOp::Link(p, ino) => {
                names.insert(p.clone(), *ino);
            }
            NameOp::Unlink(p) => {
                names.remove(p);
            }
            NameOp::Rename(from, to) => {
                if let Some(ino) = names.remove(from) {
                    names.insert(to.clone(), ino);
                }
            }
        }
    }

    fn is_in(&self, dir: &Path) -> bool {
        let within = |p: &PathBuf| p.parent() == Some(dir);
        match self {
            NameOp::Link(p, _) | NameOp::Unlink(p) => within(p),
            NameOp::Rename(a, b) => within(a) || within(b),
        }
    }
}

/// Counts of what was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looked {
    /// Fences, syncs and the like before which the states were looked at.
    pub fences: u64,
    /// Fences at which every state was looked at.
    pub all: u64,
    /// States of these fences.
    pub exhaustive: u64,
    /// States of the other fences.
    pub sampled: u64,
    /// Recoveries, including those of recoveries that were cut off.
    pub recoveries: u64,
}

impl Looked {
    /// States looked at.
    pub fn states(&self) -> u64 {
        self.exhaustive + self.sampled
    }

    pub(super) fn add(&mut self, o: &Looked) {
        self.fences += o.fences;
        self.all += o.all;
        self.exhaustive += o.exhaustive;
        self.sampled += o.sampled;
        self.recoveries += o.recoveries;
    }
}

/// Checks a state: an error is a failure. The flag says that this state of its fence is
/// to be looked at closely.
pub(super) type Check = Box<dyn FnMut(&Image, bool) -> Result<Looked, String> + Send>;

/// How states are looked at.
pub(super) struct Recorder {
    pub(super) check: Check,
    /// The most states of a fence of which all are looked at.
    pub(super) most: u64,
    /// How many states of any other fence are drawn.
    pub(super) sample: u64,
    pub(super) rng: Rng,
}

impl Recorder {
    pub(super) fn new(rng: Rng, sample: u64, check: Check) -> Recorder {
        Recorder {
            check,
            most: if sample < 64 { 16 } else { EXHAUSTIVE },
            sample,
            rng,
        }
    }
}

/// What the processor or the kernel leaves out once: the number of the call, counted from
/// where recording begins.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Omit {
    /// This flush writes no line back, but fences.
    pub(super) flush: Option<u64>,
    /// This flush writes back all lines but the last.
    pub(super) line: Option<u64>,
    /// This flush does not fence.
    pub(super) fence: Option<u64>,
    /// This sync of a file does nothing.
    pub(super) sync: Option<u64>,
}

struct Inode {
    cache: Arc<Vec<u8>>,
    durable: Arc<Vec<u8>>,
    mapped: Option<Arc<Region>>,
}

struct State {
    inodes: Vec<Inode>,
    names: Arc<Names>,
    durable_names: Arc<Names>,
    pending_names: Vec<NameOp>,
    randoms: u64,
    recorder: Option<Recorder>,
    omit: Omit,
    flushes: u64,
    syncs: u64,
    /// Lines that were written back and not fenced, with their bytes at that time.
    unfenced: Vec<(usize, usize, Vec<u8>)>,
    looked: Looked,
    failure: Option<String>,
    /// A state drawn from those that were looked at, and the number of fences that it was
    /// drawn from.
    drawn: Option<Image>,
    drawn_of: u64,
    scratch: Vec<u8>,
}

/// A machine over an image. Only one thread uses it.
pub(super) struct Shadow {
    boot: u64,
    state: Arc<Mutex<State>>,
}

impl Shadow {
    /// Starts a machine. `number` tells its boots apart.
    pub(super) fn start(image: &Image, number: u64, recorder: Option<Recorder>) -> Arc<Shadow> {
        let inodes = image.files.iter().map(|f| Inode {
            cache: f.clone(),
            durable: f.clone(),
            mapped: None,
        });
        Arc::new(Shadow {
            boot: number,
            state: Arc::new(Mutex::new(State {
                inodes: inodes.collect(),
                names: image.names.clone(),
                durable_names: image.names.clone(),
                pending_names: Vec::new(),
                randoms: number,
                recorder,
                omit: Omit::default(),
                flushes: 0,
                syncs: 0,
                unfenced: Vec::new(),
                looked: Looked::default(),
                failure: None,
                drawn: None,
                drawn_of: 0,
                scratch: Vec::new(),
            })),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// From here on, states are looked at, and the calls of `omit` left out.
    pub(super) fn record(&self, recorder: Recorder, omit: Omit) {
        let mut s = self.lock();
        (s.flushes, s.syncs) = (0, 0);
        s.recorder = Some(recorder);
        s.omit = omit;
    }

    /// Looks at the states of this moment.
    pub(super) fn look(&self) {
        self.lock().look();
    }

    /// Cuts the power: returns one of the states looked at, drawn at random; if there was
    /// none, what is durable.
    pub(super) fn cut(&self) -> Image {
        let mut s = self.lock();
        let drawn = s.drawn.take();
        drawn.unwrap_or_else(|| s.durable()).compact()
    }

    /// What was looked at, and the first failure.
    pub(super) fn seen(&self) -> (Looked, Option<String>) {
        let s = self.lock();
        (s.looked, s.failure.clone())
    }

    /// Whether a state failed.
    pub(super) fn has_failed(&self) -> bool {
        self.lock().failure.is_some()
    }
}

/// Changes the bytes that are within the file.
fn put(file: &mut Arc<Vec<u8>>, at: usize, new: &[u8]) {
    if let Some(room) = file.len().checked_sub(at) {
        let n = room.min(new.len());
        Arc::make_mut(file)[at..at + n].copy_from_slice(&new[..n]);
    }
}

impl State {
    fn durable(&self) -> Image {
        Image {
            files: self.inodes.iter().map(|i| i.durable.clone()).collect(),
            names: self.durable_names.clone(),
        }
    }

    /// What is not durable; and separately the words that are never flushed, the live
    /// figures, which no recovery reads.
    fn pending(&mut self) -> (Vec<Unit>, Vec<Unit>) {
        let (mut units, mut live) = (Vec::new(), Vec::new());
        let mut now = std::mem::take(&mut self.scratch);
        for (ino, inode) in self.inodes.iter().enumerate() {
            if let Some(region) = &inode.mapped {
                now.resize(region.len(), 0);
                region.read(0, &mut now);
                for (n, (new, old)) in now
                    .chunks(LINE)
                    .zip(inode.durable.chunks(LINE))
                    .enumerate()
                    .filter(|(_, (new, old))| new != old)
                {
                    for at in (0..LINE).step_by(WORD) {
                        let word: [u8; WORD] = new[at..at + WORD].try_into().expect("a word");
                        if word == old[at..at + WORD] {
                            continue;
                        }
                        let at = n * LINE + at;
                        let to = match (LIVE_AT..CONTROL_LEN).contains(&at) {
                            true => &mut live,
                            false => &mut units,
                        };
                        to.push(Unit::Word(ino, at, word));
                    }
                }
            } else if !Arc::ptr_eq(&inode.cache, &inode.durable) {
                if inode.cache.len() != inode.durable.len() {
                    units.push(Unit::Length(ino));
                }
                for at in (0..inode.cache.len()).step_by(SECTOR) {
                    let to = (at + SECTOR).min(inode.cache.len());
                    if inode.durable.get(at..to) != Some(&inode.cache[at..to]) {
                        units.push(Unit::Sector(ino, at));
                    }
                }
            }
        }
        self.scratch = now;
        (units, live)
    }

    fn apply(&self, image: &mut Image, unit: &Unit) {
        match *unit {
            Unit::Word(ino, at, word) => put(&mut image.files[ino], at, &word),
            Unit::Length(ino) => {
                let len = self.inodes[ino].cache.len();
                Arc::make_mut(&mut image.files[ino]).resize(len, 0);
            }
            Unit::Sector(ino, at) => {
                let cache = &self.inodes[ino].cache;
                let to = (at + SECTOR).min(cache.len());
                put(&mut image.files[ino], at, &cache[at..to]);
            }
        }
    }

    /// Looks at the states that a power cut now may leave.
    fn look(&mut self) {
        let Some(mut rec) = self.recorder.take() else {
            return;
        };
        if self.failure.is_none() {
            self.look_with(&mut rec);
        }
        self.recorder = Some(rec);
    }

    fn look_with(&mut self, rec: &mut Recorder) {
        let (units, live) = self.pending();
        let n = units.len() as u32;
        let names = self.pending_names.len() as u64 + 1;
        let all = (n < 40).then(|| (1u64 << n).saturating_mul(names));
        let all = all.filter(|a| *a <= rec.most);
        let count = all.unwrap_or(rec.sample);
        self.looked.fences += 1;
        self.looked.all += u64::from(all.is_some());
        let close = rec.rng.below(count);
        self.drawn_of += 1;
        let draw = (rec.rng.below(self.drawn_of) == 0).then(|| rec.rng.below(count));
        let base = self.durable();
        for i in 0..count {
            let mut image = base.clone();
            let mut kept = match all {
                Some(_) => i % names,
                None => rec.rng.below(names),
            };
            if all.is_none() && i < 2 {
                kept = i * (names - 1);
            }
            if kept > 0 {
                let names = Arc::make_mut(&mut image.names);
                for op in &self.pending_names[..kept as usize] {
                    op.apply(names);
                }
            }
            let subset = Subset::of(&mut rec.rng, all.map(|_| i / names), i, u64::from(n));
            for (u, unit) in units.iter().enumerate() {
                if subset.has(u as u64) {
                    self.apply(&mut image, unit);
                }
            }
            for unit in &live {
                if rec.rng.coin() {
                    self.apply(&mut image, unit);
                }
            }
            match all {
                Some(_) => self.looked.exhaustive += 1,
                None => self.looked.sampled += 1,
            }
            self.looked.recoveries += 1;
            match (rec.check)(&image, i == close) {
                Ok(more) => self.looked.add(&more),
                Err(e) => {
                    let there = (0..u64::from(n)).filter(|u| subset.has(*u)).count();
                    self.failure = Some(format!("{e} ({there} of {n} units were there)"));
                    return;
                }
            }
            if draw == Some(i) {
                self.drawn = Some(image);
            }
        }
    }

    fn fence(&mut self) {
        for (ino, at, bytes) in std::mem::take(&mut self.unfenced) {
            put(&mut self.inodes[ino].durable, at, &bytes);
        }
    }

    fn flush(&mut self, ptr: *mut u8, offset: usize, len: usize) {
        let inode = self.inodes.iter().position(|i| {
            let region = i.mapped.as_ref();
            region.is_some_and(|r| r.memory().ptr() == ptr)
        });
        let ino = inode.expect("persistent memory is flushed");
        self.look();
        let number = Some(self.flushes);
        self.flushes += 1;
        let region = self.inodes[ino].mapped.clone().expect("found above");
        let from = offset / LINE * LINE;
        let mut to = (offset + len).next_multiple_of(LINE).min(region.len());
        if self.omit.line == number {
            to -= LINE.min(to - from);
        }
        if self.omit.flush != number && to > from {
            let mut bytes = vec![0; to - from];
            region.read(from, &mut bytes);
            self.unfenced.push((ino, from, bytes));
        }
        if self.omit.fence != number {
            self.fence();
        }
    }

    fn name(&mut self, op: NameOp) {
        op.apply(Arc::make_mut(&mut self.names));
        self.pending_names.push(op);
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        let found = self.names.get(path).copied();
        found.ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn make(&mut self, path: &Path, len: usize) -> usize {
        let bytes = Arc::new(vec![0; len]);
        self.inodes.push(Inode {
            cache: bytes.clone(),
            durable: bytes,
            mapped: None,
        });
        let ino = self.inodes.len() - 1;
        self.name(NameOp::Link(path.to_path_buf(), ino));
        ino
    }
}

/// Which of the pending units are durable.
#[derive(Debug)]
enum Subset {
    /// By the bits of this number.
    Bits(u64),
    /// Only this one.
    Only(u64),
    /// All but this one.
    Without(u64),
    /// The units below this number.
    First(u64),
    /// The units from this number on.
    Last(u64),
    /// Each with this chance in a thousand, from this seed.
    Chance(u32, u64),
}

impl Subset {
    /// The subset with these bits; without bits, the `i`th sample, beginning with those
    /// most likely to be overlooked.
    fn of(rng: &mut Rng, bits: Option<u64>, i: u64, n: u64) -> Subset {
        match (bits, i) {
            (Some(bits), _) => Subset::Bits(bits),
            (None, 0) => Subset::First(0),
            (None, 1) => Subset::First(n),
            _ => match i % 6 {
                0 => Subset::Only(rng.below(n)),
                1 => Subset::Without(rng.below(n)),
                2 => Subset::First(rng.below(n)),
                3 => Subset::Last(rng.below(n)),
                _ => {
                    let chance = *rng.pick(&[30, 200, 500, 800, 970]);
                    Subset::Chance(chance, rng.next_u64())
                }
            },
        }
    }

    fn has(&self, u: u64) -> bool {
        match *self {
            Subset::Bits(bits) => bits >> u & 1 == 1,
            Subset::Only(k) => u == k,
            Subset::Without(k) => u != k,
            Subset::First(k) => u < k,
            Subset::Last(k) => u >= k,
            Subset::Chance(rate, seed) => {
                // One random number for each unit, independent of the order of calls.
                Rng::new(seed ^ u.wrapping_mul(0x9e37_79b9_7f4a_7c15)).per_mille(rate)
            }
        }
    }
}

impl Env for Shadow {
    fn now(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn boot_id(&self) -> [u8; 16] {
        let mut id = [1; 16];
        id[..8].copy_from_slice(&self.boot.to_le_bytes());
        id
    }

    fn random(&self) -> u64 {
        let mut s = self.lock();
        s.randoms = s.randoms.wrapping_add(0x9e37_79b9_7f4a_7c15);
        Rng::new(s.randoms).next_u64().max(1)
    }

    fn sector(&self, _path: &Path) -> io::Result<usize> {
        Ok(SECTOR)
    }

    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        assert!(!how.durable, "no log is on a disk here");
        let mut s = self.lock();
        let ino = match s.find(path) {
            Err(_) if how.create => s.make(path, 0),
            found => found?,
        };
        let state = self.state.clone();
        Ok(Arc::new(ShadowFile { state, ino }))
    }

    fn create_dir_all(&self, _path: &Path) -> io::Result<()> {
        // Directories exist as soon as a file is named in them.
        Ok(())
    }

    fn file_system(&self, _dir: &Path) -> io::Result<Arc<dyn FileSystem>> {
        let state = self.state.clone();
        Ok(Arc::new(ShadowFileSystem(state)))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut s = self.lock();
        s.find(path)?;
        s.name(NameOp::Unlink(path.to_path_buf()));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut s = self.lock();
        s.find(from)?;
        s.name(NameOp::Rename(from.to_path_buf(), to.to_path_buf()));
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut s = self.lock();
        let Some(last) = s.pending_names.iter().rposition(|op| op.is_in(path)) else {
            return Ok(());
        };
        s.look();
        let done: Vec<_> = s.pending_names.drain(..=last).collect();
        let names = Arc::make_mut(&mut s.durable_names);
        done.iter().for_each(|op| op.apply(names));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let s = self.lock();
        let below = |p: &PathBuf| p.strip_prefix(path).ok().map(Path::to_path_buf);
        Ok(s.names.keys().filter_map(below).collect())
    }

    fn locker(&self, _path: &Path) -> io::Result<Option<Locker>> {
        // One process is all that there is, and it never asks.
        Ok(None)
    }
    fn lock(&self, _path: &Path, _locker: Locker) -> io::Result<Box<dyn Any + Send + Sync>> {
        Ok(Box::new(()))
    }

    fn memory(&self, _path: &Path, _len: usize) -> io::Result<Memory> {
        Err(ErrorKind::Unsupported.into())
    }

    fn remove_memory(&self, _path: &Path) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn anonymous_memory(&self, _len: usize) -> io::Result<Memory> {
        Err(ErrorKind::Unsupported.into())
    }

    /// As the real call does: a file that it creates is durable, with its name.
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        let mut s = self.lock();
        let ino = match s.find(path) {
            Ok(ino) => ino,
            Err(_) => {
                s.look();
                let ino = s.make(path, len);
                let done = std::mem::take(&mut s.pending_names);
                let names = Arc::make_mut(&mut s.durable_names);
                done.iter().for_each(|op| op.apply(names));
                ino
            }
        };
        let inode = &mut s.inodes[ino];
        if inode.durable.len() != len {
            return Err(ErrorKind::InvalidInput.into());
        }
        let region = inode.mapped.get_or_insert_with(|| {
            let region = Region::new(len);
            region.write(0, &inode.durable);
            region
        });
        Ok(region.memory())
    }

    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        assert!(offset <= memory.len() && len <= memory.len() - offset);
        self.lock().flush(memory.ptr(), offset, len);
    }

    fn connect(&self, _to: &Address) -> io::Result<Arc<dyn Conn>> {
        Err(ErrorKind::Unsupported.into())
    }
}

struct ShadowFileSystem(Arc<Mutex<State>>);

impl FileSystem for ShadowFileSystem {
    fn sync(&self) -> io::Result<()> {
        let mut s = lock(&self.0);
        s.look();
        let number = Some(s.syncs);
        s.syncs += 1;
        if s.omit.sync == number {
            return Ok(());
        }
        for inode in s.inodes.iter_mut().filter(|i| i.mapped.is_none()) {
            inode.durable = inode.cache.clone();
        }
        let done = std::mem::take(&mut s.pending_names);
        let names = Arc::make_mut(&mut s.durable_names);
        done.iter().for_each(|op| op.apply(names));
        Ok(())
    }

    fn has(&self, _file: &dyn File) -> bool {
        true
    }

    fn has_dir(&self, _dir: &Path) -> bool {
        true
    }
}

struct ShadowFile {
    state: Arc<Mutex<State>>,
    ino: usize,
}

impl ShadowFile {
    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut s = lock(&self.state);
        let inode = &mut s.inodes[self.ino];
        assert!(inode.mapped.is_none(), "mapped files are not written to");
        change(Arc::make_mut(&mut inode.cache));
    }
}

impl File for ShadowFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let s = lock(&self.state);
        let bytes = &s.inodes[self.ino].cache;
        let from = bytes.len().min(offset as usize);
        let n = buf.len().min(bytes.len() - from);
        buf[..n].copy_from_slice(&bytes[from..from + n]);
        Ok(n)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        let end = at + buf.len();
        {
            let mut s = lock(&self.state);
            let inode = &s.inodes[self.ino];
            let overlaps = |r: Range<usize>| {
                let end = r.end.min(inode.cache.len());
                let r = r.start.min(end)..end;
                inode.durable.get(r.clone()) != Some(&inode.cache[r])
            };
            let again = s.recorder.is_some()
                && !Arc::ptr_eq(&inode.cache, &inode.durable)
                && overlaps(at / SECTOR * SECTOR..end.next_multiple_of(SECTOR));
            if again {
                s.look();
            }
        }
        self.change(|bytes| {
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[at..end].copy_from_slice(buf);
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut s = lock(&self.state);
        s.look();
        let number = Some(s.syncs);
        s.syncs += 1;
        if s.omit.sync != number {
            let inode = &mut s.inodes[self.ino];
            inode.durable = inode.cache.clone();
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        {
            let mut s = lock(&self.state);
            let inode = &s.inodes[self.ino];
            let pending = !Arc::ptr_eq(&inode.cache, &inode.durable);
            if s.recorder.is_some() && pending {
                // A truncation may discard what is pending in this file.
                s.look();
            }
        }
        self.change(|bytes| bytes.resize(len as usize, 0));
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        let s = lock(&self.state);
        let inode = &s.inodes[self.ino];
        Ok(match &inode.mapped {
            Some(region) => region.len(),
            None => inode.cache.len(),
        } as u64)
    }

    fn allocate(&self, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let len = self.len()?;
        Ok((offset < len).then_some(offset..len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All images of one fence that a check was shown.
    fn shown(env: &Arc<Shadow>, act: impl FnOnce()) -> Vec<Image> {
        let all = Arc::new(Mutex::new(Vec::new()));
        let to = all.clone();
        let check = move |image: &Image, _| {
            to.lock().unwrap().push(image.clone());
            Ok(Looked::default())
        };
        let recorder = Recorder::new(Rng::new(1), 64, Box::new(check));
        env.record(recorder, Omit::default());
        act();
        env.lock().recorder = None;
        std::mem::take(&mut all.lock().unwrap())
    }

    fn words(image: &Image, path: &Path) -> Vec<u8> {
        let bytes = &image.files[image.names[path]];
        bytes.iter().step_by(8).take(16).copied().collect()
    }

    #[test]
    fn every_subset_of_words_is_shown_and_what_was_flushed_is_in_all() {
        let env = Shadow::start(&Image::default(), 1, None);
        let path = Path::new("/p/m");
        let memory = env.persistent_memory(path, 4096).unwrap();
        let store = |at: usize, byte: u8| {
            // SAFETY: inside the memory, which one thread uses.
            unsafe { memory.ptr().add(at).write(byte) }
        };
        store(0, 1);
        store(64, 1);
        env.flush(&memory, 0, 1);
        // Word 0 is durable; words 1 and 8, the latter in another line, are not.
        store(8, 1);
        let mut seen: Vec<_> = shown(&env, || env.flush(&memory, 8, 8))
            .iter()
            .map(|image| words(image, path))
            .map(|w| [w[0], w[1], w[8]])
            .collect();
        seen.sort();
        assert_eq!(seen, [[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]]);
        let mut seen: Vec<_> = shown(&env, || env.look())
            .iter()
            .map(|image| words(image, path))
            .map(|w| [w[0], w[1], w[8]])
            .collect();
        seen.sort();
        assert_eq!(seen, [[1, 1, 0], [1, 1, 1]]);
    }

    #[test]
    fn files_and_names_are_there_in_part_until_they_are_synced() {
        let env = Shadow::start(&Image::default(), 1, None);
        let how = OpenHow {
            create: true,
            write: true,
            durable: false,
            plain: false,
        };
        let (path, dir) = (Path::new("/d/f"), Path::new("/d"));
        let file = env.open(path, how).unwrap();
        env.sync_dir(dir).unwrap();
        file.write_at(&[7; 2 * SECTOR], 0).unwrap();
        env.rename(path, Path::new("/d/g")).unwrap();
        // Length, two sectors, name: a sector beyond the old length needs it.
        let images = shown(&env, || file.sync().unwrap());
        assert_eq!(images.len(), 16);
        let mut kinds: Vec<_> = images
            .iter()
            .map(|i| {
                let (name, ino) = i.names.iter().next().unwrap();
                let b = &i.files[*ino];
                let sector = |n: usize| b.get(n * SECTOR).copied();
                (name.clone(), b.len(), sector(0), sector(1))
            })
            .collect();
        kinds.sort();
        kinds.dedup();
        assert_eq!(kinds.len(), 2 * (1 + 4));
        env.sync_dir(dir).unwrap();
        let images = shown(&env, || env.look());
        assert_eq!(images.len(), 1);
        assert_eq!(images[0].names.keys().next().unwrap(), Path::new("/d/g"));
        assert_eq!(*images[0].files[0], vec![7; 2 * SECTOR]);
    }
}
