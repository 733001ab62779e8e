//! A guest: a process that shares a volume that another process of its node has attached.
//!
//! Owns its line to the owner, the mappings of the shared working copies in this process, and the
//! table of their addresses.
//!
//! Invariants:
//! - A window is in the table from when the owner watches it until the owner has forgotten it.
//! - One request of a guest is under way at a time, and `talk` is locked meanwhile.
//! - The owner's end undoes nothing here: the memory stays, and every call fails and says why.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use mojim_env::locks;
use mojim_env::locks::lock;
use mojim_format::Level;
use rustix::mm::{MapFlags as Mmap, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use super::line::{End, Line, MOST};
use super::wire::{MOST_RANGES, Part, Reply, Request, Shown, VERSION, begin_sync, push_part};
use crate::last;
use mojim_config::{Config, Working};
use mojim_env::{Context, Error, Result};
use mojim_memory::fork::{Watch, is_forked, refused, watch_forks};
use mojim_memory::places::{self, Claim};
use mojim_memory::region::{MapFlags, Mapping};
use mojim_memory::shared;
use mojim_memory::track::{Armed, arm, arm_inherited, own_pagemap};
use mojim_replica::layout;

/// A volume that another process of this node, its owner, has attached and shares with this one.
///
/// Cheap to clone; it stays until [`Guest::detach`] or the end of the process. All of its mappings
/// are of shared working copies. Its calls mean what the calls of [`Volume`](crate::Volume) of the
/// same names mean, and fail with `Stale` once the owner has ended: then the memory can still be
/// read and stored to, but nothing of it can be committed.
#[derive(Clone)]
pub struct Guest(Arc<Attached>);

struct Attached {
    volume: String,
    directory: PathBuf,
    socket: PathBuf,
    /// Identifies the attachment. Attachments that forked children make in its place have the
    /// same.
    origin: usize,
    /// Whether the owner can look into this process's page tables.
    watched: bool,
    talk: Mutex<Talk>,
    line: Arc<Line>,
    /// Until the sharing has ended.
    watch: Mutex<Option<Watch>>,
}

struct Talk {
    line: Arc<Line>,
    out: Vec<u8>,
    buf: Vec<u8>,
    /// An answer was late or not understood: the next one could be taken for the answer to another
    /// request. This end has shut down its sending direction, which the owner notices.
    lost: bool,
    /// This process has ended the sharing.
    ended: bool,
    /// A call has reported that the owner has ended, or that the line is lost.
    told: bool,
    /// How long an answer may take.
    limit: Option<Duration>,
    /// The process whose line it is: a child made by other means than `fork` has a copy of this.
    pid: u32,
}

/// A mapping of a shared working copy.
pub(crate) struct Window {
    span: Range<usize>,
    number: u64,
    shown: Shown,
    attached: Arc<Attached>,
    /// Taken before the mapping goes.
    armed: Mutex<Option<Armed>>,
}

/// The process's attachments as a guest, and their windows.
struct Table {
    /// The process whose table it is: no handler runs in a child made by other means than `fork`.
    pid: u32,
    /// Ascending by address.
    windows: RwLock<Vec<Arc<Window>>>,
    /// Held from before the owner is asked to forget windows until they have left the table.
    going: RwLock<()>,
    attached: Mutex<Vec<Arc<Attached>>>,
    /// The parent's attachments without mappings. The first call that needs one replaces it by this
    /// process's own.
    inherited: Mutex<Vec<Inherited>>,
}

/// Whether there is any window. Programs that are no guests pay for this load only.
static ANY: AtomicBool = AtomicBool::new(false);
/// A forked child makes a new table: its parent's may be locked.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

fn table() -> &'static Table {
    let mut p = TABLE.load(Acquire);
    if p.is_null() {
        let new = Table::new();
        match TABLE.compare_exchange(p, new, AcqRel, Acquire) {
            Ok(_) => p = new,
            Err(theirs) => {
                // SAFETY: made above; no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                p = theirs;
            }
        }
    }
    // SAFETY: a table is never freed.
    unsafe { &*p }
}

impl Table {
    fn new() -> *mut Table {
        Box::into_raw(Box::new(Table {
            pid: std::process::id(),
            windows: RwLock::default(),
            going: RwLock::default(),
            attached: Mutex::default(),
            inherited: Mutex::default(),
        }))
    }

    fn windows(&self) -> RwLockReadGuard<'_, Vec<Arc<Window>>> {
        locks::read(&self.windows)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Vec<Arc<Window>>> {
        locks::write(&self.windows)
    }

    fn going(&self) -> RwLockReadGuard<'_, ()> {
        locks::read(&self.going)
    }

    fn add(&self, window: Window) {
        let mut all = self.change();
        let at = all.partition_point(|w| w.span.start < window.span.start);
        all.insert(at, Arc::new(window));
        ANY.store(true, Release);
    }
}

fn find(addr: usize) -> Option<Arc<Window>> {
    if !ANY.load(Acquire) {
        return None;
    }
    let all = table().windows();
    let i = all
        .partition_point(|w| w.span.start <= addr)
        .checked_sub(1)?;
    (addr < all[i].span.end).then(|| all[i].clone())
}

impl Window {
    /// `[addr, addr + len)` as a part of the window, to which the rest of its last page counts.
    fn part(&self, addr: usize, len: usize) -> Result<Part> {
        let page = rustix::param::page_size();
        let end = addr.checked_add(len);
        if end.is_none_or(|e| e > self.span.end.next_multiple_of(page)) {
            return Err(Error::Invalid(format!(
                "{len} bytes at {addr:#x} reach beyond the region of {} bytes at {:#x}",
                self.span.len(),
                self.span.start
            )));
        }
        Ok(Part {
            window: self.number,
            at: (addr - self.span.start) as u64,
            len: len as u64,
        })
    }
}

impl Attached {
    fn connect(
        volume: &str,
        directory: &Path,
        socket: &Path,
        origin: Option<usize>,
        limit: Option<Duration>,
    ) -> Result<Attached> {
        let what = || format!("sharing volume {volume}");
        let watch = watch_forks();
        let line = Arc::new(Line::connect(socket, limit).context(what)?);
        let pagemap = match mojim_memory::track::uffd_available() {
            true => own_pagemap().ok(),
            false => None,
        };
        let mut talk = Talk {
            line: line.clone(),
            out: Vec::new(),
            buf: vec![0; MOST],
            lost: false,
            ended: false,
            told: false,
            limit,
            pid: std::process::id(),
        };
        let hello = Request::Hello {
            version: VERSION,
            volume: volume.to_owned(),
        };
        hello.encode(&mut talk.out);
        talk.ask(volume, pagemap, false)?;
        Ok(Attached {
            volume: volume.to_owned(),
            directory: directory.to_owned(),
            socket: socket.to_owned(),
            // The buffer's address stays the same, wherever `talk` is moved.
            origin: origin.unwrap_or(talk.buf.as_ptr() as usize),
            watched: pagemap.is_some(),
            line,
            talk: Mutex::new(talk),
            watch: Mutex::new(Some(watch)),
        })
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        if !request.fits() {
            return Err(Error::Invalid("a name is too long".into()));
        }
        let mut talk = lock(&self.talk);
        request.encode(&mut talk.out);
        talk.ask(&self.volume, None, matches!(request, Request::Map { .. }))
    }

    /// Asks for a file's shared working copy, to map `len` bytes of it.
    fn pass(&self, file: &str, len: usize, flags: MapFlags) -> Result<Passed> {
        if flags.untracked {
            return Err(Error::Invalid(format!(
                "mapping {file}: the working copy is shared with another process, which has its stores tracked"
            )));
        }
        let answer = self.ask(&Request::Map {
            file: file.to_owned(),
            offset: flags.offset,
            len: len as u64,
            create: flags.create,
            write: !flags.read_only,
        })?;
        let memory = answer.memory;
        let memory = memory.ok_or_else(|| Error::Protocol("memory was not passed".into()))?;
        let identity = shared::identity(memory.as_fd())?;
        let page = rustix::param::page_size();
        let len = usize::try_from(answer.more).ok();
        let Some((len, mapped)) = len.and_then(|l| Some((l, l.checked_next_multiple_of(page)?)))
        else {
            return Err(Error::Protocol("memory without end was passed".into()));
        };
        Ok(Passed {
            file: answer.value as u32,
            memory,
            identity,
            len,
            mapped,
        })
    }

    /// After a mapping failed: asks the owner to keep its memory no longer. The answer does not
    /// matter.
    fn give_back(&self, passed: &Passed) {
        let _ = self.ask(&Request::Show(Shown {
            file: passed.file,
            ..Shown::default()
        }));
    }

    fn sync(&self, parts: impl Iterator<Item = Part>, wait: bool) -> Result<Synced> {
        let mut talk = lock(&self.talk);
        begin_sync(wait, &mut talk.out);
        for part in parts {
            push_part(&part, &mut talk.out);
        }
        let answer = talk.ask(&self.volume, None, false)?;
        Ok(Synced {
            lsn: answer.value,
            last: answer.lsn,
        })
    }
}

/// A shared working copy that the owner has passed, and keeps until a mapping shows it.
struct Passed {
    file: u32,
    memory: OwnedFd,
    identity: u64,
    /// The mapping's length, and (`mapped`) the same in whole pages.
    len: usize,
    mapped: usize,
}

/// Address, protection and flags for `mmap`.
fn placed(flags: MapFlags) -> (*mut std::ffi::c_void, ProtFlags, Mmap) {
    let mut prot = ProtFlags::READ;
    let mut how = Mmap::SHARED | Mmap::NORESERVE;
    if !flags.read_only {
        prot |= ProtFlags::WRITE;
    }
    if flags.fixed_at != 0 {
        how |= Mmap::FIXED;
    }
    (flags.fixed_at as *mut std::ffi::c_void, prot, how)
}

/// The result of a sync point.
pub(crate) struct Synced {
    /// Its LSN; 0 if nothing had changed.
    pub lsn: u64,
    /// The LSN up to which all changes that it found are committed; 0 if it found none.
    pub last: u64,
}

struct Answer {
    lsn: u64,
    value: u64,
    more: u64,
    copies: Vec<(String, Option<Level>)>,
    memory: Option<OwnedFd>,
}

impl Talk {
    /// Sends what is in `out`, and waits for the answer. `lends`: memory comes with the answer.
    fn ask(&mut self, volume: &str, fd: Option<BorrowedFd<'_>>, lends: bool) -> Result<Answer> {
        let gone = || {
            Error::Stale(format!(
                "the process that had volume {volume} attached has ended: stores since the last sync point are in memory only. Detach, and attach again"
            ))
        };
        let lost = || {
            Error::Stale(format!(
                "the line to the process that has volume {volume} attached was lost: stores since the last sync point may be in memory only. Detach, and attach again"
            ))
        };
        if self.pid != std::process::id() {
            return Err(refused());
        }
        if self.ended {
            return Err(Error::Invalid(
                "this volume is not attached any more".into(),
            ));
        }
        if self.lost {
            self.told = true;
            return Err(lost());
        }
        let got = match self.line.send(&self.out, fd) {
            Ok(()) if lends => self.line.recv_with_fd(&mut self.buf, self.limit),
            Ok(()) => {
                let n = self.line.recv(&mut self.buf, self.limit);
                n.map(|n| n.map(|n| (n, None)))
            }
            Err(_) => Ok(None),
        };
        let (n, memory) = match got {
            Ok(Some(got)) => got,
            Ok(None) => {
                self.told = true;
                return Err(gone());
            }
            Err(e) => return Err(self.lose(volume, &e)),
        };
        match Reply::decode(&self.buf[..n]) {
            Ok(Reply::Done { lsn, value, more }) => Ok(Answer {
                lsn,
                value,
                more,
                copies: Vec::new(),
                memory,
            }),
            Ok(Reply::Copies(copies)) => Ok(Answer {
                lsn: 0,
                value: 0,
                more: 0,
                copies,
                memory,
            }),
            Ok(Reply::Failed(e)) => Err(e),
            Err(e) => Err(self.lose(volume, &e)),
        }
    }

    fn lose(&mut self, volume: &str, why: &dyn std::fmt::Display) -> Error {
        self.lost = true;
        self.line.stop_speaking();
        Error::Protocol(format!(
            "the process that has volume {volume} attached: {why}"
        ))
    }

    /// If the line is lost, waits until the owner counts all of this guest's windows as written, or
    /// has ended. If a mapping went before that, the owner would not find the stores to it.
    fn until_forgotten(&mut self) {
        let goes_on = |got: std::io::Result<Option<_>>| match got {
            Ok(got) => got.is_some(),
            // The late answer, which may bring a descriptor.
            Err(e) => e.kind() == std::io::ErrorKind::InvalidData,
        };
        while self.lost && goes_on(self.line.recv(&mut self.buf, None)) {}
    }
}

impl Guest {
    /// Shares a volume that another process of node `node` has attached and shares (see
    /// [`join`](crate::volume::join)). `None` if there is no such process, or if the configuration
    /// says `working = "private"`.
    ///
    /// # Errors
    /// `Busy` if too many processes share it; `Config`, `Io` as their names say.
    pub fn attach(config: &Config, node: &str, volume: Option<&str>) -> Result<Option<Guest>> {
        let wrong = |e: mojim_config::ConfigError| Error::Config(e.to_string());
        let volume = config.volume(volume).map_err(wrong)?;
        let node = config.node(node).map_err(wrong)?;
        let socket = layout::share_socket(node, &volume.name);
        if volume.working == Working::Private {
            return Ok(None);
        }
        let directory = layout::data_dir(node, &volume.name);
        match Attached::connect(&volume.name, &directory, &socket, None, None) {
            Ok(a) => {
                let a = Arc::new(a);
                lock(&table().attached).push(a.clone());
                Ok(Some(Guest(a)))
            }
            Err(Error::Io { errno, .. }) if [libc::ENOENT, libc::ECONNREFUSED].contains(&errno) => {
                Ok(None)
            }
            // The owner has just ended.
            Err(Error::Stale(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// This process's attachment of this origin. In a forked child it is made if it is not there.
    fn of_origin(origin: usize) -> Option<Guest> {
        let table = table();
        let mut waiting = lock(&table.inherited);
        let known = lock(&table.attached)
            .iter()
            .find(|a| a.origin == origin)
            .cloned();
        if known.is_some() {
            return known.map(Guest);
        }
        let i = waiting.iter().position(|i| i.origin == origin)?;
        // If this fails, the next call tries again.
        let a = Arc::new(waiting[i].join().ok()?);
        lock(&a.talk).limit = None;
        waiting.swap_remove(i);
        lock(&table.attached).push(a.clone());
        Some(Guest(a))
    }

    /// In a forked child: its attachment in place of the parent's with the origin `parent`, if the
    /// parent shared the volume (see [`inherit`]).
    pub(crate) fn inherited(parent: usize) -> Option<Guest> {
        is_forked().then(|| Guest::of_origin(parent)).flatten()
    }

    /// This attachment, or in a forked child the one in its place.
    fn attached(&self) -> Result<Arc<Attached>> {
        if !is_forked() {
            return Ok(self.0.clone());
        }
        match Guest::of_origin(self.0.origin) {
            Some(g) => Ok(g.0),
            None => Err(refused()),
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer> {
        let answer = self.attached()?.ask(request)?;
        if answer.lsn > 0 {
            last::set(answer.lsn);
        }
        Ok(answer)
    }

    /// Whether this process can use this handle: false in a forked child that could not become a
    /// guest, and once it is detached. It stays true after the owner's end.
    pub fn is_usable(&self) -> bool {
        self.attached().is_ok_and(|a| !lock(&a.talk).ended)
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.0.volume
    }

    /// The directory whose files are this volume's.
    pub fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// Maps a file, or a part of it, with a shared working copy.
    pub fn map(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        self.map_at(file, len, flags, &|len| {
            Claim::of(file, flags.fixed_at, len)
        })
    }

    /// As [`Volume::map_over`](crate::Volume::map_over), with a shared working copy.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn map_over(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        // SAFETY: the caller's promise.
        self.map_at(file, len, flags, &|len| unsafe {
            Claim::over(file, flags.fixed_at, len)
        })
    }

    fn map_at(
        &self,
        file: &str,
        len: usize,
        flags: MapFlags,
        claim: &dyn Fn(usize) -> Result<Option<Claim>>,
    ) -> Result<Mapping> {
        let attached = self.attached()?;
        let mut place = claim(len)?;
        let passed = attached.pass(file, len, flags)?;
        let (len, mapped) = (passed.len, passed.mapped);
        let what = || format!("mapping {file}");
        let write = !flags.read_only;
        let give_up = || attached.give_back(&passed);
        if place.is_none() {
            place = claim(len).inspect_err(|_| give_up())?;
        }
        let (hint, prot, how) = placed(flags);
        // SAFETY: a new mapping; with `fixed_at` at addresses that were claimed.
        let base = unsafe { mmap(hint, mapped, prot, how, passed.memory.as_fd(), flags.offset) }
            .inspect_err(|_| give_up())
            .map_err(std::io::Error::from)
            .context(what)?;
        let start = base as usize;
        let shown = Shown {
            file: passed.file,
            offset: flags.offset,
            len: len as u64,
            base: start as u64,
            write,
            atomic: flags.atomic,
            memory: passed.identity,
            inherited: false,
        };
        let armed = match write && attached.watched {
            // SAFETY: the mapping was just made, and outlives `Armed`.
            true => unsafe { arm(start, mapped) }.map(Some).context(what),
            false => Ok(None),
        };
        let watched = armed.and_then(|a| Ok((a, attached.ask(&Request::Show(shown))?)));
        match watched {
            Ok((armed, answer)) => {
                match place {
                    Some(place) => place.keep(),
                    None => places::add(start, mapped),
                }
                table().add(Window {
                    span: start..start + len,
                    number: answer.value,
                    shown,
                    attached,
                    armed: Mutex::new(armed),
                });
                let ptr = base.cast();
                Ok(Mapping { ptr, len })
            }
            Err(e) => {
                give_up();
                let none = Mmap::PRIVATE | Mmap::NORESERVE | Mmap::FIXED;
                // SAFETY: our own mapping, not given to the caller yet. An address that the caller
                // chose stays mapped, so that no other thread can map there.
                unsafe {
                    match flags.fixed_at {
                        0 => drop(munmap(base, mapped)),
                        _ => drop(mmap_anonymous(base, mapped, ProtFlags::empty(), none)),
                    }
                }
                Err(e)
            }
        }
    }

    /// As [`Volume::fsync`](crate::Volume::fsync).
    pub fn fsync(&self, file: &str) -> Result<u64> {
        let file = file.to_owned();
        self.ask(&Request::Fsync { file }).map(|a| a.value)
    }

    /// As [`Volume::create`](crate::Volume::create): true if it was not there.
    pub fn create(&self, file: &str) -> Result<bool> {
        let file = file.to_owned();
        self.ask(&Request::Create { file }).map(|a| a.value != 0)
    }

    /// As [`Volume::remove`](crate::Volume::remove).
    pub fn remove(&self, file: &str) -> Result<()> {
        let file = file.to_owned();
        self.ask(&Request::Remove { file }).map(drop)
    }

    /// As [`Volume::rename`](crate::Volume::rename).
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (from.to_owned(), to.to_owned());
        self.ask(&Request::Rename { from, to }).map(drop)
    }

    /// As [`Volume::truncate`](crate::Volume::truncate).
    pub fn truncate(&self, file: &str, size: u64) -> Result<()> {
        let file = file.to_owned();
        self.ask(&Request::Truncate { file, size }).map(drop)
    }

    /// Size of a file in bytes, if it is there.
    pub fn size(&self, file: &str) -> Result<Option<u64>> {
        let file = file.to_owned();
        let a = self.ask(&Request::Size { file })?;
        Ok((a.value != 0).then_some(a.more))
    }

    /// As [`Volume::wait`](crate::Volume::wait).
    pub fn wait(&self, lsn: u64) -> Result<()> {
        self.ask(&Request::Wait { lsn }).map(drop)
    }

    /// As [`Volume::settle`](crate::Volume::settle).
    pub fn settle(&self) -> Result<()> {
        self.ask(&Request::Settle).map(drop)
    }

    /// Which node has `lsn`, and how safe it is there.
    pub fn copies(&self, lsn: u64) -> Result<Vec<(String, Option<Level>)>> {
        self.ask(&Request::Copies { lsn }).map(|a| a.copies)
    }

    /// Ends the sharing: commits the mappings (except those with `atomic`, and those that a forked
    /// child has from its parent) and unmaps all. If something could not be committed, fails and
    /// goes on. After the owner's end it fails with `Stale` if no call has reported that end yet;
    /// otherwise it ends the sharing all the same.
    pub fn detach(&self) -> Result<()> {
        let attached = self.attached()?;
        let _going = table().going();
        let told = lock(&attached.talk).told;
        match attached.ask(&Request::Detach) {
            Err(Error::Stale(_)) if told => {}
            done => drop(done?),
        }
        lock(&attached.talk).until_forgotten();
        attached.end();
        for w in attached.take_windows() {
            unmap_window(&w)?;
        }
        Ok(())
    }

    /// [`Guest::detach`], but leaves the memory mapped: for the end of the process. What is stored
    /// from then on is not kept.
    pub fn finish(&self) -> Result<()> {
        let attached = self.attached()?;
        if !lock(&table().attached)
            .iter()
            .any(|a| Arc::ptr_eq(a, &attached))
        {
            return Ok(());
        }
        let _going = table().going();
        let done = attached.ask(&Request::Detach).map(drop);
        attached.end();
        for w in attached.take_windows() {
            // The mapping stays, and so must `Armed`; but it is no region any more.
            places::release(w.span.start);
            std::mem::forget(w);
        }
        done
    }
}

impl Attached {
    fn end(&self) {
        let mut talk = lock(&self.talk);
        talk.ended = true;
        talk.line.close();
        lock(&self.watch).take();
    }

    /// Takes this attachment and its windows out of the table.
    fn take_windows(&self) -> Vec<Arc<Window>> {
        let table = table();
        lock(&table.attached).retain(|a| !std::ptr::eq(&**a, self));
        let mut all = table.change();
        let (mine, others) = all
            .drain(..)
            .partition(|w| std::ptr::eq(&*w.attached, self));
        *all = others;
        mine
    }
}

/// [`Guest::finish`] for all attachments of this process.
pub(crate) fn finish_all() -> Result<()> {
    if TABLE.load(Acquire).is_null() {
        return Ok(());
    }
    if table().pid != std::process::id() {
        return Ok(());
    }
    let all = lock(&table().attached).clone();
    let done = all.into_iter().map(|a| Guest(a).finish());
    done.fold(Ok(()), Result::and)
}

/// Whether there can be a window: costs a load.
#[inline]
pub(crate) fn any() -> bool {
    ANY.load(Acquire)
}

/// Whether `addr` lies in a window.
pub(crate) fn is_window(addr: usize) -> bool {
    find(addr).is_some()
}

/// A sync point of a range; `None` if it begins in no window.
pub(crate) fn sync(addr: usize, len: usize, wait: bool) -> Option<Result<Synced>> {
    let w = find(addr)?;
    let part = match w.part(addr, len) {
        Ok(part) => part,
        Err(e) => return Some(Err(e)),
    };
    Some(w.attached.sync(std::iter::once(part), wait))
}

/// A sync point of several ranges; `None` if none begins in a window.
pub(crate) fn sync_many(ranges: &[(*const u8, usize)], wait: bool) -> Option<Result<Synced>> {
    let found: Vec<_> = ranges.iter().map(|(p, _)| find(*p as usize)).collect();
    let first = found.iter().flatten().next()?.attached.clone();
    let parts = found.iter().zip(ranges).map(|(w, (p, len))| match w {
        Some(w) if Arc::ptr_eq(&w.attached, &first) => w.part(*p as usize, *len),
        _ => Err(Error::Invalid(
            "the ranges of one sync point lie in different volumes, or in none; atomicity spans one volume"
                .into(),
        )),
    });
    let parts: Result<Vec<_>> = parts.collect();
    Some(parts.and_then(|parts| match parts.len() {
        n if n > MOST_RANGES => Err(Error::Invalid(format!(
            "{n} ranges in one sync point; where another process has the volume attached, {MOST_RANGES} are the most"
        ))),
        _ => first.sync(parts.into_iter(), wait),
    }))
}

/// A rollback; `None` if `addr` is in no window.
pub(crate) fn rollback(addr: usize, len: usize) -> Option<Result<bool>> {
    let w = find(addr)?;
    let part = match w.part(addr, len) {
        Ok(part) => part,
        Err(e) => return Some(Err(e)),
    };
    let done = w.attached.ask(&Request::Rollback(part));
    Some(done.map(|a| a.value != 0))
}

/// Ends a window; `None` if none is there.
pub(crate) fn unmap(addr: usize, len: usize) -> Option<Result<()>> {
    let w = find(addr)?;
    let page = rustix::param::page_size();
    let (span, whole) = (&w.span, w.span.len().next_multiple_of(page));
    if span.start != addr || len.next_multiple_of(page) != whole {
        return Some(Err(Error::Unsupported(format!(
            "unmapping {len} bytes at {addr:#x} of the region of {} bytes at {:#x}: only a whole region can be unmapped",
            span.len(),
            span.start
        ))));
    }
    let _going = table().going();
    let told = lock(&w.attached.talk).told;
    match w.attached.ask(&Request::Unmap { window: w.number }) {
        Ok(_) => {}
        // There was nothing to commit, or an earlier call has reported the owner's end.
        Err(Error::Stale(_)) if told || w.shown.atomic || !w.shown.write => {}
        Err(e) => return Some(Err(e)),
    }
    lock(&w.attached.talk).until_forgotten();
    table().change().retain(|x| !Arc::ptr_eq(x, &w));
    Some(unmap_window(&w))
}

fn unmap_window(w: &Window) -> Result<()> {
    let (start, len) = (w.span.start, w.span.len());
    // Before the mapping goes, since dropping `Armed` unregisters its pages.
    *lock(&w.armed) = None;
    places::release(start);
    let mapped = len.next_multiple_of(rustix::param::page_size());
    // SAFETY: the window's mapping; the program gave it back.
    unsafe { munmap(start as *mut _, mapped) }
        .map_err(std::io::Error::from)
        .context(|| "unmapping".into())
}

/// What a forked child needs to become a guest of its parent, or of its parent's owner.
pub(crate) struct Inherited {
    /// By this the child's handles find the attachment.
    pub origin: usize,
    pub volume: String,
    pub directory: PathBuf,
    pub socket: PathBuf,
    pub windows: Vec<Shown>,
}

impl Inherited {
    fn join(&self) -> Result<Attached> {
        let (directory, socket) = (&self.directory, &self.socket);
        let origin = Some(self.origin);
        let joined = Attached::connect(&self.volume, directory, socket, origin, Some(AT_FORK))?;
        Ok(joined)
    }
}

/// How long a child waits in fork for the owner, and its parent for the child.
pub(crate) const AT_FORK: Duration = Duration::from_secs(5);

/// While this is held, no window of this process as a guest is added, and the owner is asked to
/// forget none.
pub(crate) struct Still {
    _windows: RwLockReadGuard<'static, Vec<Arc<Window>>>,
    /// None if a window was going already: waiting for that may take as long as a sync point, and
    /// the call may be this thread's own, if it forks in a signal handler.
    _going: Option<RwLockWriteGuard<'static, ()>>,
}

/// Before a fork: collects this process's windows as a guest, and the descriptors that the child
/// must not keep: the ends of lines, and those that would accumulate with each generation.
pub(crate) fn before_fork(out: &mut Vec<Inherited>, ends: &mut Vec<End>) -> Option<Still> {
    if TABLE.load(Acquire).is_null() {
        return None;
    }
    let table = table();
    let attached = lock(&table.attached).clone();
    let going = table.going.try_write().ok();
    let windows = table.windows();
    for a in attached {
        let mine = windows.iter().filter(|w| Arc::ptr_eq(&w.attached, &a));
        out.push(Inherited {
            origin: a.origin,
            volume: a.volume.clone(),
            directory: a.directory.clone(),
            socket: a.socket.clone(),
            windows: mine.map(|w| w.shown).collect(),
        });
        ends.extend(a.line.ends());
        if a.watched
            && let Ok(pagemap) = own_pagemap()
        {
            // This one stays open here; the child opens its own.
            ends.push(Arc::new(pagemap.as_raw_fd()));
        }
    }
    // None of these closes before the fork: its window would leave the table first, which is held.
    let armed = windows.iter().filter_map(|w| {
        let armed = lock(&w.armed);
        armed.as_ref().map(|a| Arc::new(a.as_raw_fd()) as End)
    });
    ends.extend(armed);
    Some(Still {
        _windows: windows,
        _going: going,
    })
}

/// In a forked child: becomes a guest of the owners of its shared mappings. If that fails, the
/// mapping becomes read-only: a store would be visible to all, and never be committed.
pub(crate) fn inherit(all: Vec<Inherited>, ends: Vec<End>) {
    // The parent's table is not touched: threads that this child does not have may hold its locks.
    if !TABLE.load(Acquire).is_null() {
        TABLE.store(Table::new(), Release);
        ANY.store(false, Release);
    }
    for end in ends {
        // SAFETY: the child's copy. Nothing uses it here, and, since `end` is forgotten, nothing
        // closes it again.
        unsafe { rustix::io::close(end.as_raw_fd()) };
        std::mem::forget(end);
    }
    for mut i in all {
        let windows = std::mem::take(&mut i.windows);
        if windows.is_empty() {
            lock(&table().inherited).push(i);
            continue;
        }
        let joined = i.join().map(Arc::new);
        if let Ok(a) = &joined {
            lock(&table().attached).push(a.clone());
        }
        let mut why = joined.as_ref().err().cloned();
        for shown in windows {
            let taken = joined.as_ref().ok().map(|a| take_over(a, shown));
            let Some(Err(e)) = taken else {
                if taken.is_none() && shown.write {
                    read_only(shown);
                }
                continue;
            };
            why = Some(e);
            if shown.write {
                read_only(shown);
            }
        }
        if let Ok(a) = &joined {
            lock(&a.talk).limit = None;
        }
        if let Some(why) = why {
            let text = format!(
                "mojim: a forked child cannot share volume {} ({why}): what it has mapped can only be read. Attach after the fork, or end the parent later\n",
                i.volume
            );
            // Not through `std::io::stderr`, whose lock a thread of the parent may have held.
            // SAFETY: standard error, if it is open.
            let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
            let _ = rustix::io::write(stderr, text.as_bytes());
        }
    }
}

/// Stores to a mapping fail from here on.
fn read_only(shown: Shown) {
    let len = (shown.len as usize).next_multiple_of(rustix::param::page_size());
    let how = rustix::mm::MprotectFlags::READ;
    // SAFETY: the child's copy of the mapping; its contents stay.
    let _ = unsafe { mprotect(shown.base as usize as *mut _, len, how) };
}

/// Makes a window of the parent a window of this process.
fn take_over(attached: &Arc<Attached>, shown: Shown) -> Result<()> {
    let (start, len) = (shown.base as usize, shown.len as usize);
    let mapped = len.next_multiple_of(rustix::param::page_size());
    let armed = match shown.write && attached.watched {
        // SAFETY: the child's copy of the mapping, which outlives `Armed`.
        true => Some(unsafe { arm_inherited(start, mapped) }.context(|| "after a fork".into())?),
        false => None,
    };
    let shown = Shown {
        inherited: true,
        ..shown
    };
    let number = attached.ask(&Request::Show(shown))?.value;
    table().add(Window {
        span: start..start + len,
        number,
        shown,
        attached: attached.clone(),
        armed: Mutex::new(armed),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::thread::JoinHandle;

    use super::super::line::Port;
    use super::*;
    use tempfile::TempDir;

    /// Plays the owner: answers each request with the next of `replies`. Then waits until the guest
    /// ends its direction of the line, and returns whether it did.
    fn owner(path: &Path, replies: Vec<(Reply, Option<OwnedFd>)>) -> JoinHandle<bool> {
        let port = Port::listen(path).unwrap();
        std::thread::spawn(move || {
            let line = port.accept().unwrap().unwrap();
            let (mut buf, mut out) = (vec![0; MOST], Vec::new());
            for (reply, fd) in replies {
                line.recv_with_fd(&mut buf, None).unwrap().unwrap();
                reply.encode(&mut out);
                line.send(&out, fd.as_ref().map(AsFd::as_fd)).unwrap();
            }
            let limit = Some(Duration::from_secs(60));
            matches!(line.recv(&mut buf, limit), Ok(None))
        })
    }

    fn done(value: u64, more: u64) -> (Reply, Option<OwnedFd>) {
        let lsn = 0;
        (Reply::Done { lsn, value, more }, None)
    }

    /// A forked child whose parent had no mapping kept the time limit of the fork for ever: a sync
    /// point that took longer ended its sharing, although the owner lived.
    #[test]
    fn who_joins_after_the_fork_waits_as_long_as_it_takes() {
        let dir = TempDir::new().unwrap();
        let socket = dir.path().join("s");
        let owner = owner(&socket, vec![done(0, 0)]);
        let origin = 1; // no address of a buffer's
        lock(&table().inherited).push(Inherited {
            origin,
            volume: "v".into(),
            directory: dir.path().to_owned(),
            socket,
            windows: Vec::new(),
        });
        let guest = Guest::of_origin(origin).unwrap();
        assert_eq!(lock(&guest.0.talk).limit, None);
        guest.0.take_windows();
        drop(guest);
        owner.join().unwrap();
    }

    /// A thread that unmapped while another thread forked made the owner drop the memory that the
    /// child was about to show.
    #[test]
    fn no_window_goes_at_the_owner_during_a_fork() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("s");
        let page = rustix::param::page_size();
        let port = Port::listen(&path).unwrap();
        let flags = [const { AtomicBool::new(false) }; 2];
        let ([forked, asked], tid) = (&flags, &AtomicU32::new(0));
        std::thread::scope(|s| {
            let owner = s.spawn(move || {
                let line = port.accept().unwrap().unwrap();
                let (mut buf, mut out) = (vec![0; MOST], Vec::new());
                done(0, 0).0.encode(&mut out);
                line.recv_with_fd(&mut buf, None).unwrap().unwrap();
                line.send(&out, None).unwrap();
                line.recv_with_fd(&mut buf, None).unwrap().unwrap();
                asked.store(true, SeqCst);
                let early = !forked.load(SeqCst);
                line.send(&out, None).unwrap();
                early
            });
            let a = Attached::connect("v", dir.path(), &path, None, None).unwrap();
            // SAFETY: a new mapping, which `unmap` gives back.
            let base = unsafe {
                mmap_anonymous(std::ptr::null_mut(), page, ProtFlags::READ, Mmap::PRIVATE)
            };
            let base = base.unwrap() as usize;
            table().add(Window {
                span: base..base + page,
                number: 1,
                shown: Shown::default(),
                attached: Arc::new(a),
                armed: Mutex::default(),
            });
            let still = loop {
                let still = before_fork(&mut Vec::new(), &mut Vec::new()).unwrap();
                // Other tests fork, too.
                if still._going.is_some() {
                    break still;
                }
            };
            s.spawn(move || {
                tid.store(
                    rustix::thread::gettid().as_raw_nonzero().get() as u32,
                    SeqCst,
                );
                unmap(base, page).unwrap().unwrap();
            });
            // Until the thread waits for a lock, or has asked the owner without waiting.
            let futex = format!("{} ", libc::SYS_futex);
            while !asked.load(SeqCst) {
                let path = format!("/proc/self/task/{}/syscall", tid.load(SeqCst));
                if std::fs::read_to_string(path).is_ok_and(|call| call.starts_with(&futex)) {
                    break;
                }
                std::thread::yield_now();
            }
            forked.store(true, SeqCst);
            drop(still);
            assert!(!owner.join().unwrap());
        });
    }

    /// A mapping that was to replace a mapping of the caller failed at the owner, and left a hole.
    /// Another thread's mapping came there, and the caller then unmapped that one.
    #[test]
    fn where_a_mapping_at_an_address_fails_nobody_else_can_map() {
        let dir = TempDir::new().unwrap();
        let socket = dir.path().join("s");
        let page = rustix::param::page_size();
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&memory, page as u64).unwrap();
        let replies = vec![
            done(0, 0),
            (done(1, page as u64).0, Some(memory)),
            (Reply::Failed(Error::Busy("too many".into())), None),
            done(0, 0),
        ];
        let owner = owner(&socket, replies);
        let a = Attached::connect("v", dir.path(), &socket, None, None).unwrap();
        let (null, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: new mappings, the second only where nothing is, and both given back.
        unsafe {
            let held = mmap_anonymous(null, page, none, Mmap::PRIVATE).unwrap();
            let flags = MapFlags {
                fixed_at: held as usize,
                ..MapFlags::default()
            };
            let mapped = Guest(Arc::new(a)).map_over("f", page, flags);
            assert!(matches!(mapped, Err(Error::Busy(_))), "{mapped:?}");
            let there = mmap_anonymous(held, page, none, Mmap::PRIVATE | Mmap::FIXED_NOREPLACE);
            assert_eq!(there, Err(rustix::io::Errno::EXIST));
            munmap(held, page).unwrap();
        }
        assert!(owner.join().unwrap());
    }
}
