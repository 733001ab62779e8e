//! The pages that a reader's regions show: pages of a volume's files, all as of one LSN.
//!
//! Owns the regions' memory. Each region is a read-only shared mapping of a
//! memfd, which holds the pages that were fetched. Userfaultfd reports its faults:
//! a page is visible only after `put_in`. So contents are changed behind the
//! mapping, by `pwrite`, while the pages are taken out of it.
//!
//! Invariants:
//!
//! - Every page that is visible is as of `lsn`. When the view advances, every page
//!   that changes is taken out before the first of them is changed, and put in
//!   after the last was: at every instant all that can be read is old, or all of
//!   it is new. A thread that touches such a page meanwhile waits.
//! - `shown` changes between taking out and putting in: a thread that reads it
//!   before and after other bytes, and finds it the same, has read bytes of one LSN.
//! - A region is readable only once its faults are reported: pages that the kernel
//!   brings in by itself (`mlock`, `mlockall`, MADV_POPULATE_READ) come by faults, too.
//! - A page that is `resident` has its contents in the memfd. Any other page has
//!   none there, and its fault is answered from the node.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use mojim_format::{Op, OpKind, RecordView};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use mojim_env::{Context, Error, Result, descriptors};
use mojim_memory::places;
use mojim_memory::uffd;

/// Bytes of a page, which is also the unit of the node's answers.
pub const PAGE: usize = 4096;

/// Identifies the state that a view shows, for the next question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mark {
    /// The LSN as of which everything is.
    pub lsn: u64,
    /// The epoch of that LSN.
    pub epoch: u64,
    /// The volume's identity; 0 before anything is shown.
    pub volume: u64,
    /// The node's number for the bytes of its files: another one after they were
    /// rewritten without a record, and after each opening of the copy.
    pub rewritten: u64,
    /// Counts how often the view began anew.
    pub life: u64,
}

/// A file as of the view's LSN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
}

/// One mapping.
struct Region {
    number: u64,
    start: usize,
    pages: usize,
    file: u32,
    /// Where in the file the region begins.
    offset: u64,
    memory: OwnedFd,
    resident: BTreeSet<usize>,
    /// Pages that give SIGBUS: beyond the file's end, or given up.
    poisoned: BTreeSet<usize>,
}

impl Region {
    fn span(&self) -> Range<usize> {
        self.start..self.start + self.pages * PAGE
    }

    /// The pages that share bytes with a range of the file.
    fn pages_of(&self, range: Range<u64>) -> Range<usize> {
        let end = self.offset + (self.pages * PAGE) as u64;
        let (from, to) = (range.start.max(self.offset), range.end.min(end));
        if from >= to {
            return 0..0;
        }
        let page = |at: u64| ((at - self.offset) / PAGE as u64) as usize;
        page(from)..page(to - 1) + 1
    }

    /// Takes pages out of the mapping: a thread that touches one waits.
    fn take_out(&self, pages: Range<usize>) -> Result<()> {
        let at = (self.start + pages.start * PAGE) as *mut std::ffi::c_void;
        // DONTNEED_LOCKED, for a program that locked its memory (mlock): plain DONTNEED
        // fails on locked pages.
        // SAFETY: pages of our own mapping. Shared memory loses nothing by it.
        unsafe { rustix::mm::madvise(at, pages.len() * PAGE, Advice::LinuxDontneedLocked) }
            .map_err(std::io::Error::from)
            .context(|| "taking pages out of a view".into())
    }

    /// Frees the contents of pages in the memfd.
    fn free(&self, pages: Range<usize>) -> Result<()> {
        rustix::fs::fallocate(
            &self.memory,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            (pages.start * PAGE) as u64,
            (pages.len() * PAGE) as u64,
        )
        .map_err(std::io::Error::from)
        .context(|| "freeing pages of a view".into())
    }

    fn write(&self, at: u64, mut bytes: &[u8]) -> Result<()> {
        let mut at = at;
        while !bytes.is_empty() {
            let n = rustix::io::pwrite(&self.memory, bytes, at)
                .map_err(std::io::Error::from)
                .context(|| "memory for a view".into())?;
            at += n as u64;
            bytes = &bytes[n..];
        }
        Ok(())
    }
}

/// Runs of adjacent pages.
fn runs(pages: &BTreeSet<usize>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for &p in pages {
        match out.last_mut() {
            Some(r) if r.end == p => r.end += 1,
            _ => out.push(p..p + 1),
        }
    }
    out
}

/// Calls `f` for each operation of the records above `mark`.
pub fn for_each_op<'a>(
    mark: Mark,
    mut records: &'a [u8],
    mut f: impl FnMut(Op, &'a [u8]),
) -> Result<()> {
    let bad = |what: &str| Error::Protocol(format!("the node sent {what} to a reader"));
    while !records.is_empty() {
        let r = RecordView::decode(records).map_err(|e| bad(&e.to_string()))?;
        records = &records[r.header.len as usize..];
        if r.header.volume != mark.volume {
            return Err(bad("records of another volume"));
        }
        if r.header.lsn <= mark.lsn {
            continue;
        }
        for (op, payload) in r.ops() {
            if op.kind == OpKind::Spill {
                return Err(bad("a spill file"));
            }
            f(op, payload);
        }
    }
    Ok(())
}

/// One change to one file.
enum FileChange<'a> {
    Write(u32, u64, &'a [u8]),
    Resize(u32, u64),
    Gone(u32),
    Name(u32, String),
}

/// Where a region goes.
#[derive(Debug, Clone, Copy)]
pub struct MapRequest {
    /// Bytes, as the caller asked.
    pub len: usize,
    /// Where in the file, a multiple of the page size.
    pub offset: u64,
    /// The address, which the caller has claimed; 0: any address.
    pub fixed_at: usize,
}

/// A reader's regions.
pub struct View {
    uffd: Arc<OwnedFd>,
    mark: Mark,
    shown: Arc<AtomicU64>,
    /// The files that are known: those of regions, at least while they have
    /// pages. Size 0 and no name: removed.
    files: BTreeMap<u32, File>,
    regions: Vec<Region>,
    next: u64,
    /// Resident pages, oldest first; some may not be resident any more.
    order: VecDeque<(u64, usize)>,
    resident: usize,
    /// Most resident pages.
    most: usize,
    /// A mutation for tests: each page is changed by itself.
    pub mix: AtomicBool,
}

impl View {
    /// A view that shows nothing yet. It stores the LSN that it shows in `shown`.
    pub fn new(uffd: Arc<OwnedFd>, shown: Arc<AtomicU64>, most: usize) -> View {
        View {
            uffd,
            mark: Mark::default(),
            shown,
            files: BTreeMap::new(),
            regions: Vec::new(),
            next: 0,
            order: VecDeque::new(),
            resident: 0,
            most,
            mix: AtomicBool::new(false),
        }
    }

    /// The state that it shows.
    pub fn mark(&self) -> Mark {
        self.mark
    }

    /// For an address in a region: the file, the page's offset in it, and whether
    /// the page is resident.
    pub fn find(&self, address: usize) -> Option<(u32, u64, bool)> {
        let r = self.regions.iter().find(|r| r.span().contains(&address))?;
        let page = (address - r.start) / PAGE;
        let there = r.resident.contains(&page);
        Some((r.file, r.offset + (page * PAGE) as u64, there))
    }

    /// Maps a part of a file, which is `known` as of the view's LSN. Returns the
    /// address.
    pub fn map(&mut self, file: u32, known: File, place: MapRequest) -> Result<usize> {
        let what = || format!("mapping {} bytes", place.len);
        let system = std::io::Error::from;
        let pages = place.len.div_ceil(PAGE);
        let len = pages * PAGE;
        // Beyond this limit the kernel sends a signal, which ends the program.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| len as u64 > limit) {
            return Err(Error::io(what(), &rustix::io::Errno::FBIG.into()));
        }
        let memfd = || rustix::fs::memfd_create("mojim-view", MemfdFlags::CLOEXEC);
        let memory = descriptors::open(memfd).map_err(system).context(what)?;
        rustix::fs::ftruncate(&memory, len as u64)
            .map_err(system)
            .context(what)?;
        let mut flags = MapFlags::SHARED | MapFlags::NORESERVE;
        if place.fixed_at != 0 {
            flags |= MapFlags::FIXED;
        }
        let at = place.fixed_at as *mut std::ffi::c_void;
        // Not readable before its faults are reported: the memfd is still empty, and
        // its zeros are of no sync point. If it were readable at once, a program that
        // locks what it maps (mlockall) would have it filled with zeros.
        // SAFETY: a new mapping; with an address, the caller has claimed it.
        let start = unsafe { rustix::mm::mmap(at, len, ProtFlags::empty(), flags, &memory, 0) }
            .map_err(system)
            .context(what)?;
        let modes = uffd::MODE_MISSING | uffd::MODE_MINOR;
        // SAFETY: the mapping that was just made, whose faults are answered.
        let ready = unsafe {
            // A forked child would read zeros, since no thread answers its faults.
            rustix::mm::madvise(start, len, Advice::LinuxDontFork)
                .and_then(|()| rustix::mm::madvise(start, len, Advice::LinuxNoHugepage).or(Ok(())))
                .map_err(system)
                .and_then(|()| uffd::register(self.uffd.as_fd(), start as usize, len, modes))
                // A debugger can read the memory already, and so leave pages there.
                .and_then(|()| {
                    Ok(rustix::mm::madvise(
                        start,
                        len,
                        Advice::LinuxDontneedLocked,
                    )?)
                })
                // This brings no page in, locked or not.
                .and_then(|()| Ok(rustix::mm::mprotect(start, len, MprotectFlags::READ)?))
        };
        if let Err(e) = ready {
            let none = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: our own mapping, not given to anyone yet. An address that the caller
            // claimed stays mapped, so that no other thread can map there.
            unsafe {
                match place.fixed_at {
                    0 => drop(rustix::mm::munmap(start, len)),
                    _ => drop(rustix::mm::mmap_anonymous(
                        start,
                        len,
                        ProtFlags::empty(),
                        none,
                    )),
                }
            }
            return Err(Error::io(what(), &e));
        }
        self.regions.push(Region {
            number: self.next,
            start: start as usize,
            pages,
            file,
            offset: place.offset,
            memory,
            resident: BTreeSet::new(),
            poisoned: BTreeSet::new(),
        });
        self.next += 1;
        self.files.insert(file, known);
        Ok(start as usize)
    }

    /// Unmaps the region that begins at `start`, if there is one.
    pub fn unmap(&mut self, start: usize) -> Result<()> {
        let Some(i) = self.regions.iter().position(|r| r.start == start) else {
            return Ok(());
        };
        let r = self.regions.remove(i);
        let len = r.pages * PAGE;
        self.resident -= r.resident.len();
        if self.regions.iter().all(|other| other.file != r.file) {
            self.files.remove(&r.file);
        }
        places::release(start);
        // SAFETY: our own mapping; the program gave it back.
        unsafe { rustix::mm::munmap(start as *mut std::ffi::c_void, len) }
            .map_err(std::io::Error::from)
            .context(|| "unmapping a view".into())?;
        // A thread that still waits for a page of it gets what an unmapped address gives.
        uffd::wake(self.uffd.as_fd(), start, len);
        Ok(())
    }

    /// Unmaps all regions.
    pub fn unmap_all(&mut self) -> Result<()> {
        while let Some(start) = self.regions.first().map(|r| r.start) {
            self.unmap(start)?;
        }
        Ok(())
    }

    /// Discards all that was shown; from here on the view is at `to`.
    pub fn begin_anew(&mut self, to: Mark) -> Result<()> {
        for r in &self.regions {
            r.take_out(0..r.pages)?;
        }
        self.mark = Mark {
            life: self.mark.life + 1,
            ..to
        };
        self.shown.store(to.lsn, SeqCst);
        self.files.clear();
        self.order.clear();
        self.resident = 0;
        // In all regions before anything can fail: a fault of a page that counts as
        // resident would be answered with half-changed contents.
        for r in &mut self.regions {
            r.resident.clear();
            r.poisoned.clear();
        }
        for r in &mut self.regions {
            r.free(0..r.pages)?;
            // No wake is needed: a thread that waits has a fault, which will be answered.
        }
        Ok(())
    }

    /// Advances to `lsn`, of `epoch`. `records` are all above the LSN that is shown,
    /// and perhaps some below. After an error nothing is shown, and the view has to
    /// begin anew.
    pub fn advance(&mut self, records: &[u8], lsn: u64, epoch: u64) -> Result<()> {
        let done = self.try_advance(records, lsn, epoch);
        if done.is_err() {
            self.begin_anew(Mark {
                volume: 0,
                ..self.mark
            })?;
        }
        done
    }

    fn try_advance(&mut self, records: &[u8], lsn: u64, epoch: u64) -> Result<()> {
        let changes = self.changes(records)?;
        let touched = self.touched(&changes);
        if self.mix.load(Relaxed) {
            self.change_one_by_one(&changes, &touched)?;
        }
        for (r, pages) in self.regions.iter_mut().zip(&touched) {
            for run in runs(pages) {
                r.take_out(run)?;
            }
            r.poisoned.retain(|p| !pages.contains(p));
        }
        // From here on no page that changes is visible.
        for c in changes {
            self.change(c)?;
        }
        self.mark.lsn = lsn;
        self.mark.epoch = epoch;
        self.shown.store(lsn, SeqCst);
        for (r, pages) in self.regions.iter().zip(touched) {
            let there = pages.intersection(&r.resident).copied().collect();
            for run in runs(&there) {
                uffd::put_in(
                    self.uffd.as_fd(),
                    r.start + run.start * PAGE,
                    run.len() * PAGE,
                );
            }
        }
        Ok(())
    }

    /// For tests: shows changes page by page that must become visible at once.
    fn change_one_by_one(
        &mut self,
        changes: &[FileChange<'_>],
        touched: &[BTreeSet<usize>],
    ) -> Result<()> {
        for (i, pages) in touched.iter().enumerate() {
            for &page in pages {
                let r = &self.regions[i];
                r.take_out(page..page + 1)?;
                for c in changes {
                    if let FileChange::Write(file, at, bytes) = c
                        && *file == r.file
                        && r.resident.contains(&page)
                    {
                        let from = r.offset + (page * PAGE) as u64;
                        let part =
                            (*at).max(from)..(at + bytes.len() as u64).min(from + PAGE as u64);
                        if !part.is_empty() {
                            let bytes =
                                &bytes[(part.start - at) as usize..(part.end - at) as usize];
                            r.write(part.start - r.offset, bytes)?;
                        }
                    }
                }
                uffd::put_in(self.uffd.as_fd(), r.start + page * PAGE, PAGE);
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// What the records above the view's LSN change.
    fn changes<'a>(&self, records: &'a [u8]) -> Result<Vec<FileChange<'a>>> {
        let mut out = Vec::new();
        // Renaming a file over another one removes the other.
        let mut names: BTreeMap<u32, String> = self
            .files
            .iter()
            .map(|(id, f)| (*id, f.name.clone()))
            .collect();
        for_each_op(self.mark, records, |op, payload| match op.kind {
            OpKind::Write => out.push(FileChange::Write(op.file, op.offset, payload)),
            OpKind::Resize => out.push(FileChange::Resize(op.file, op.offset)),
            OpKind::Remove => out.push(FileChange::Gone(op.file)),
            OpKind::Rename => {
                let name = String::from_utf8_lossy(payload).into_owned();
                let over = names.iter().find(|(id, n)| **id != op.file && **n == name);
                if let Some(id) = over.map(|(id, _)| *id) {
                    names.remove(&id);
                    out.push(FileChange::Gone(id));
                }
                if let Some(n) = names.get_mut(&op.file) {
                    n.clone_from(&name);
                }
                out.push(FileChange::Name(op.file, name));
            }
            // No region shows a new file yet.
            OpKind::Create | OpKind::Spill => {}
        })?;
        Ok(out)
    }

    /// The pages of each region that must not be visible while they are changed.
    fn touched(&self, changes: &[FileChange<'_>]) -> Vec<BTreeSet<usize>> {
        let mut out = vec![BTreeSet::new(); self.regions.len()];
        let mut sizes: BTreeMap<u32, u64> = BTreeMap::new();
        for c in changes {
            let (file, range) = match c {
                FileChange::Write(file, at, bytes) => (*file, *at..at + bytes.len() as u64),
                FileChange::Resize(file, size) => {
                    let known = self.files.get(file).map_or(0, |f| f.size);
                    let old = sizes.insert(*file, *size).unwrap_or(known);
                    (*file, old.min(*size)..u64::MAX)
                }
                FileChange::Gone(file) => (*file, 0..u64::MAX),
                FileChange::Name(..) => continue,
            };
            for (r, out) in self.regions.iter().zip(&mut out) {
                if r.file == file {
                    let pages = r.pages_of(range.clone());
                    out.extend(r.resident.range(pages.clone()));
                    out.extend(r.poisoned.range(pages));
                }
            }
        }
        out
    }

    fn change(&mut self, c: FileChange<'_>) -> Result<()> {
        match c {
            FileChange::Write(file, at, bytes) => {
                let Some(f) = self.files.get(&file) else {
                    return Ok(());
                };
                // As in the data area: what is cut off later in a prefix.
                let end = (at + bytes.len() as u64).min(f.size);
                for r in self.regions.iter().filter(|r| r.file == file) {
                    for page in r.pages_of(at..end) {
                        if r.resident.contains(&page) {
                            let from = r.offset + (page * PAGE) as u64;
                            let part = at.max(from)..end.min(from + PAGE as u64);
                            let bytes =
                                &bytes[(part.start - at) as usize..(part.end - at) as usize];
                            r.write(part.start - r.offset, bytes)?;
                        }
                    }
                }
            }
            FileChange::Resize(file, size) => self.resize(file, size)?,
            FileChange::Gone(file) => {
                self.resize(file, 0)?;
                if let Some(f) = self.files.get_mut(&file) {
                    f.name.clear();
                }
            }
            FileChange::Name(file, name) => {
                if let Some(f) = self.files.get_mut(&file) {
                    f.name = name;
                }
            }
        }
        Ok(())
    }

    fn resize(&mut self, file: u32, size: u64) -> Result<()> {
        let Some(f) = self.files.get_mut(&file) else {
            return Ok(());
        };
        f.size = size;
        for r in self.regions.iter_mut().filter(|r| r.file == file) {
            // Pages beyond the old end or the new one were taken out: their faults are
            // answered by the new size.
            let whole = size.div_ceil(PAGE as u64) * PAGE as u64;
            let gone = r.pages_of(whole..u64::MAX);
            let gone: BTreeSet<usize> = r.resident.range(gone).copied().collect();
            for run in runs(&gone) {
                r.free(run)?;
            }
            r.resident.retain(|p| !gone.contains(p));
            self.resident -= gone.len();
            // The rest of the page in which the file ends is zero.
            if size < whole
                && let Some(page) = r.pages_of(size..whole).next()
                && r.resident.contains(&page)
            {
                r.write(size - r.offset, &vec![0; (whole - size) as usize])?;
            }
        }
        Ok(())
    }

    /// Notes a region's file, as of the view's LSN; `None`: it was removed.
    pub fn learn(&mut self, id: u32, file: Option<File>) {
        // A removed file has no name and size 0.
        let file = file.unwrap_or(File {
            name: String::new(),
            size: 0,
        });
        self.files.insert(id, file);
    }

    /// Puts pages of a file, from `offset` on and as of the view's LSN, into the
    /// region of `address`. If `address` is behind the file's end, its page gives
    /// SIGBUS.
    pub fn install(&mut self, address: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let found = self
            .regions
            .iter()
            .position(|r| r.span().contains(&address));
        let Some(i) = found else {
            return Ok(()); // unmapped meanwhile
        };
        let r = &mut self.regions[i];
        let size = self.files.get(&r.file).map_or(0, |f| f.size);
        for page in r.pages_of(offset..offset + bytes.len() as u64) {
            if r.resident.contains(&page) || r.poisoned.contains(&page) {
                continue;
            }
            let from = (r.offset + (page * PAGE) as u64 - offset) as usize;
            let mut whole = [0; PAGE];
            let part = &bytes[from..bytes.len().min(from + PAGE)];
            whole[..part.len()].copy_from_slice(part);
            r.write((page * PAGE) as u64, &whole)?;
            r.resident.insert(page);
            self.resident += 1;
            self.order.push_back((r.number, page));
            uffd::put_in(self.uffd.as_fd(), r.start + page * PAGE, PAGE);
        }
        let page = (address - r.start) / PAGE;
        if r.offset + (page * PAGE) as u64 >= size {
            self.poison(address);
        }
        self.evict(address)
    }

    /// Puts a page in that was taken out, and whose contents are in the memfd.
    pub fn put_in(&self, address: usize) {
        uffd::put_in(self.uffd.as_fd(), address & !(PAGE - 1), PAGE);
    }

    /// Makes a page give SIGBUS until its file has it, or the node answers again.
    pub fn poison(&mut self, address: usize) {
        let Some(r) = self
            .regions
            .iter_mut()
            .find(|r| r.span().contains(&address))
        else {
            return;
        };
        let page = (address - r.start) / PAGE;
        if r.resident.contains(&page) {
            return self.put_in(address);
        }
        r.poisoned.insert(page);
        uffd::poison(self.uffd.as_fd(), r.start + page * PAGE, PAGE);
    }

    /// The node answers again: pages that were given up are fetched at the next touch.
    pub fn forgive(&mut self) -> Result<()> {
        for r in &mut self.regions {
            let size = self.files.get(&r.file).map(|f| f.size);
            let beyond = |p: &usize| {
                let at = r.offset + (*p * PAGE) as u64;
                size.is_some_and(|size| at >= size)
            };
            let again: BTreeSet<usize> =
                r.poisoned.iter().filter(|p| !beyond(p)).copied().collect();
            for run in runs(&again) {
                r.take_out(run)?;
            }
            r.poisoned.retain(|p| !again.contains(p));
        }
        Ok(())
    }

    /// Frees the oldest pages if too many are resident, but not the page of `keep`.
    fn evict(&mut self, keep: usize) -> Result<()> {
        while self.resident > self.most
            && let Some((number, page)) = self.order.pop_front()
        {
            let Some(r) = self.regions.iter_mut().find(|r| r.number == number) else {
                continue;
            };
            if r.start + page * PAGE == keep & !(PAGE - 1) {
                self.order.push_back((number, page));
                continue;
            }
            if r.resident.remove(&page) {
                self.resident -= 1;
                r.take_out(page..page + 1)?;
                r.free(page..page + 1)?;
            }
        }
        Ok(())
    }
}
