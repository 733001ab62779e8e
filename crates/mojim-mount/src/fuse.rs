//! The kernel's requests, as calls of `fs`.
//!
//! Owns what is told to the kernel: it may keep names, attributes and bytes for as long as it
//! likes, since nothing changes them but through it. Files are cached and written through: a
//! write comes here before it returns; what a program stores to a mapping comes when the program
//! syncs, or when the kernel writes it back, and is not committed before a sync point then.
//!
//! Invariant: every request is answered, once.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use mojim::Batch;
use rustix::io::Errno;

use crate::Shared;
use crate::at_once::{WOULD_WAIT, anew, at_once};
use crate::beside::Beside;
use crate::cells::{Kind, Time};
use crate::fs::{Entry, Fs, Progress, Result, Seen, Wanted, Writing, now, time_of};
use crate::tree::{Asker, Opened, Renames};

/// How long the kernel may keep what it was told.
const ALWAYS: Duration = Duration::from_secs(3600 * 24 * 365);
/// Most bytes of a write or a read.
pub(crate) const MOST: u32 = 1 << 20;

pub(crate) struct Server {
    shared: Arc<Shared>,
    /// Directories that are being read: what was in them when the reading began.
    readings: Mutex<HashMap<u64, Arc<Vec<Entry>>>>,
    next: AtomicU64,
    beside: Beside,
}

/// An error as `fuser` wants it.
pub(crate) fn no(e: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(e.raw_os_error())
}

fn asker(req: &Request) -> Asker {
    Asker {
        uid: req.uid(),
        gid: req.gid(),
        now: now(),
    }
}

fn system((s, n): Time) -> SystemTime {
    let whole = Duration::from_secs(s.unsigned_abs());
    let at = match s < 0 {
        true => UNIX_EPOCH - whole,
        false => UNIX_EPOCH + whole,
    };
    at + Duration::from_nanos(n.into())
}

pub(crate) fn kind(kind: &Kind) -> FileType {
    match kind {
        Kind::Dir => FileType::Directory,
        Kind::File(_) => FileType::RegularFile,
        Kind::Link(_) => FileType::Symlink,
        Kind::Special(libc::S_IFIFO, _) => FileType::NamedPipe,
        Kind::Special(libc::S_IFSOCK, _) => FileType::Socket,
        Kind::Special(libc::S_IFCHR, _) => FileType::CharDevice,
        Kind::Special(..) => FileType::BlockDevice,
    }
}

pub(crate) fn attr(s: &Seen) -> FileAttr {
    let a = &s.attributes;
    FileAttr {
        ino: INodeNo(s.ino),
        size: s.size,
        blocks: s.blocks,
        atime: system(a.accessed),
        mtime: system(a.modified),
        ctime: system(a.changed),
        crtime: UNIX_EPOCH,
        kind: kind(&a.kind),
        perm: a.mode as u16,
        nlink: s.links,
        uid: a.uid,
        gid: a.gid,
        rdev: match a.kind {
            Kind::Special(_, device) => device,
            _ => 0,
        },
        blksize: 4096,
        flags: 0,
    }
}

/// How long the kernel may keep what it is told of a node.
fn kept(s: &Seen) -> &'static Duration {
    match s.is_sure {
        true => &ALWAYS,
        false => &Duration::ZERO,
    }
}

/// The handle of a file that was opened so.
fn handle(flags: i32) -> FileHandle {
    FileHandle((flags & libc::O_ACCMODE != libc::O_RDONLY).into())
}

fn opened(handle: FileHandle) -> Opened {
    match handle {
        FileHandle(0) => Opened::Reads,
        _ => Opened::Writes,
    }
}

fn time(t: Option<TimeOrNow>) -> Option<Time> {
    t.map(|t| match t {
        TimeOrNow::SpecificTime(t) => time_of(t),
        TimeOrNow::Now => now(),
    })
}

impl Server {
    pub(crate) fn new(shared: Arc<Shared>) -> Server {
        Server {
            shared,
            readings: Mutex::default(),
            next: AtomicU64::new(1),
            beside: Beside::new(),
        }
    }

    /// The file system, to answer `req`.
    fn fs(&self, req: &Request) -> &Fs {
        self.beside.answer(req.pid());
        &self.shared.fs
    }

    /// Answers a call that may have to wait: now, or later.
    fn when_room<T>(
        &self,
        req: &Request,
        call: impl Fn(&Fs) -> Result<T> + Send + 'static,
        answer: impl FnOnce(&Fs, Result<T>) + Send + 'static,
    ) {
        let fs = self.fs(req);
        let done = at_once(|| call(fs));
        if !matches!(&done, Err(e) if *e == WOULD_WAIT) {
            return answer(fs, done);
        }
        let mut answer = Some(answer);
        let again = move |fs: &Fs, failed: Option<Errno>| {
            let done = failed.map_or_else(|| anew(|| call(fs)), Err);
            let waits = matches!(&done, Err(e) if *e == WOULD_WAIT);
            if !waits && let Some(answer) = answer.take() {
                answer(fs, done);
            }
            !waits
        };
        self.shared
            .later
            .call_again(fs, req.pid(), 0, Box::new(again));
    }

    /// Answers a call that changes nothing, and may have to wait until a data file is open.
    fn when_open<T>(
        &self,
        req: &Request,
        call: impl Fn(&Fs) -> Result<T> + Send + 'static,
        answer: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let fs = self.fs(req);
        let done = at_once(|| call(fs));
        if !matches!(&done, Err(e) if *e == WOULD_WAIT) {
            return answer(done);
        }
        let later = &self.shared.later;
        later.call_when_open(fs, move |fs| answer(call(fs)));
    }

    /// Answers a sync point, when it is committed.
    fn sync(
        &self,
        req: &Request,
        begin: impl Fn(&Fs) -> Result<Option<Batch>> + Send + 'static,
        reply: ReplyEmpty,
    ) {
        let (shared, caller) = (self.shared.clone(), req.pid());
        self.when_room(req, begin, move |fs, begun| match begun {
            Ok(Some(batch)) => {
                let answer = |done| empty(reply, done);
                shared.later.complete(fs, caller, batch, answer);
            }
            begun => empty(reply, begun.map(drop)),
        });
    }

    /// What was in a directory when its reading began; it begins anew at offset 0.
    fn reading(&self, ino: INodeNo, fh: FileHandle, offset: u64) -> Result<Arc<Vec<Entry>>> {
        let mut all = self.readings.lock().unwrap_or_else(|e| e.into_inner());
        if offset > 0
            && let Some(r) = all.get(&fh.0)
        {
            return Ok(r.clone());
        }
        let entries = Arc::new(self.shared.fs.entries(ino.0)?);
        all.insert(fh.0, entries.clone());
        Ok(entries)
    }

    /// What an entry of a reading is by now: its name may be another file's, or nobody's.
    fn as_of_now(&self, req: &Request, dir: INodeNo, e: &Entry) -> Result<Seen> {
        match &e.name[..] {
            b"." | b".." => self.fs(req).seen(e.ino),
            name => self.fs(req).lookup(dir.0, name),
        }
    }
}

impl Shared {
    /// The kernel would let a program be executed by the bits that it knows.
    fn forget_mode(&self, ino: INodeNo, changed: bool) {
        if changed && let Some(kernel) = self.kernel.get() {
            let _ = kernel.inval_inode(ino, -1, 0);
        }
    }

    /// Answers a write of `len` bytes.
    fn wrote(
        &self,
        ino: INodeNo,
        (offset, len): (u64, usize),
        how: Writing,
        done: Result<bool>,
        reply: ReplyWrite,
    ) {
        match done {
            Ok(killed) => {
                self.forget_mode(ino, killed);
                reply.written(len as u32);
            }
            Err(e) => {
                // The kernel has it no longer as something to write.
                if how.mapped {
                    self.fs.lose(ino.0, offset, len, e);
                    self.add_stale(ino.0);
                }
                reply.error(no(e));
                if how.mapped {
                    self.turn.notify();
                }
            }
        }
    }
}

fn entry(fs: &Fs, reply: ReplyEntry, done: Result<Seen>) {
    match done {
        Ok(s) => {
            fs.tell(s.ino);
            reply.entry(kept(&s), &attr(&s), Generation(0));
        }
        Err(e) => reply.error(no(e)),
    }
}

fn empty(reply: ReplyEmpty, done: Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(no(e)),
    }
}

pub(crate) fn xattr(reply: ReplyXattr, size: u32, done: Result<Vec<u8>>) {
    match done {
        Ok(v) if size == 0 => reply.size(v.len() as u32),
        Ok(v) if v.len() > size as usize => reply.error(fuser::Errno::ERANGE),
        Ok(v) => reply.data(&v),
        Err(e) => reply.error(no(e)),
    }
}

impl Filesystem for Server {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // `fuser` adds FUSE_ASYNC_READ (several reads ahead at once: a page is locked until its answer
        // is in, and writes of it wait for that) and FUSE_BIG_WRITES.
        let wanted = [
            // Cached bytes stay though a size or time changes: only calls through this mount change
            // them, and `Shared::add_stale` names the exceptions.
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            // `Writing::kill`, `Fs::set` and `Fs::allocate` take set-ID bits; capabilities the kernel
            // takes itself, by REMOVEXATTR.
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            // Attributes come with names. The kernel drops those that are older than what it knows.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            // The lock of `Fs::state` orders calls on one directory.
            InitFlags::FUSE_PARALLEL_DIROPS,
            // The target of a link never changes, and its number is not given again.
            InitFlags::FUSE_CACHE_SYMLINKS,
        ];
        // Not asked for:
        // - FUSE_ASYNC_DIO. Cached pages are then dropped before a write by libaio and O_DIRECT alone,
        //   not after it: a page that is read meanwhile keeps its old bytes, and they come back.
        // - FUSE_WRITEBACK_CACHE. Writes would come late, and the kernel would own sizes and times.
        // - FUSE_ATOMIC_O_TRUNC. A truncation is a SETATTR, which is checked and waits for room.
        // - FUSE_POSIX_LOCKS, FUSE_FLOCK_LOCKS: locks are this machine's, and the kernel keeps them.
        // - FUSE_POSIX_ACL: lists would be kept, and not enforced.
        for flag in wanted {
            // What a kernel lacks costs time only.
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(MOST);
        let _ = config.set_max_readahead(MOST);
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let fs = self.fs(req);
        entry(fs, reply, fs.lookup(parent.0, name.as_bytes()));
    }

    fn forget(&self, req: &Request, ino: INodeNo, times: u64) {
        self.fs(req).forget(ino.0, times);
    }

    fn getattr(&self, req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.fs(req).seen(ino.0) {
            Ok(s) => reply.attr(kept(&s), &attr(&s)),
            Err(e) => reply.error(no(e)),
        }
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let want = Wanted {
            mode,
            uid,
            gid,
            size,
            accessed: time(accessed),
            modified: time(modified),
        };
        let asker = asker(req);
        let call = move |fs: &Fs| fs.set(ino.0, &want, asker);
        self.when_room(req, call, |_, done| match done {
            Ok(s) => reply.attr(kept(&s), &attr(&s)),
            Err(e) => reply.error(no(e)),
        });
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.fs(req).target(ino.0) {
            Ok(t) => reply.data(&t),
            Err(e) => reply.error(no(e)),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let (name, asker) = (name.as_bytes().to_vec(), asker(req));
        let bits = mode & !umask;
        let call = move |fs: &Fs| match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => fs.make_file(parent.0, &name, bits, asker, None),
            kind => fs.make(parent.0, &name, Kind::Special(kind, rdev), bits, asker),
        };
        self.when_room(req, call, |fs, done| entry(fs, reply, done));
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (name, asker) = (name.as_bytes().to_vec(), asker(req));
        let call = move |fs: &Fs| fs.make(parent.0, &name, Kind::Dir, mode & !umask, asker);
        self.when_room(req, call, |fs, done| entry(fs, reply, done));
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let call = move |fs: &Fs| fs.unlink(parent.0, &name);
        self.when_room(req, call, |_, done| empty(reply, done));
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let call = move |fs: &Fs| fs.rmdir(parent.0, &name);
        self.when_room(req, call, |_, done| empty(reply, done));
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let target = Kind::Link(target.as_os_str().as_bytes().to_vec());
        let (name, asker) = (name.as_bytes().to_vec(), asker(req));
        let call = move |fs: &Fs| fs.make(parent.0, &name, target.clone(), 0o777, asker);
        self.when_room(req, call, |fs, done| entry(fs, reply, done));
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let how = match flags {
            f if f.is_empty() => Ok(Renames::Replaces),
            RenameFlags::RENAME_NOREPLACE => Ok(Renames::NoReplace),
            RenameFlags::RENAME_EXCHANGE => Ok(Renames::Exchanges),
            _ => Err(Errno::INVAL),
        };
        let (from, to) = (name.as_bytes().to_vec(), newname.as_bytes().to_vec());
        let call = move |fs: &Fs| fs.rename((parent.0, &from), (newparent.0, &to), how?);
        self.when_room(req, call, |_, done| empty(reply, done));
    }

    fn link(
        &self,
        req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let name = newname.as_bytes().to_vec();
        let call = move |fs: &Fs| fs.link(ino.0, newparent.0, &name);
        self.when_room(req, call, |fs, done| entry(fs, reply, done));
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let handle = handle(flags.0);
        match self.fs(req).open_file(ino.0, opened(handle)) {
            Ok(()) => {
                // Every opening of a file has its cached pages, coherent whatever way bytes go:
                // FOPEN_DIRECT_IO and FOPEN_PASSTHROUGH beside cached openings are not. They stay from
                // one opening to the next unless the kernel may know what is not so.
                let keeps = match self.shared.stale_has(ino.0) {
                    true => FopenFlags::empty(),
                    false => FopenFlags::FOPEN_KEEP_CACHE,
                };
                reply.opened(handle, keeps);
            }
            Err(e) => reply.error(no(e)),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, asker) = (name.as_bytes().to_vec(), asker(req));
        let (handle, bits) = (handle(flags), mode & !umask);
        let how = Some(opened(handle));
        let call = move |fs: &Fs| fs.make_file(parent.0, &name, bits, asker, how);
        self.when_room(req, call, move |fs, done| match done {
            Ok(s) => {
                fs.tell(s.ino);
                // Nothing of a new file is cached.
                let kept = FopenFlags::FOPEN_KEEP_CACHE;
                reply.created(&ALWAYS, &attr(&s), Generation(0), handle, kept);
            }
            Err(e) => reply.error(no(e)),
        });
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = move |fs: &Fs| {
            let mut out = vec![0; size as usize];
            let n = fs.read(ino.0, offset, &mut out)?;
            out.truncate(n);
            Ok(out)
        };
        self.when_open(req, read, |done| match done {
            Ok(bytes) => reply.data(&bytes),
            Err(e) => reply.error(no(e)),
        });
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let how = Writing {
            kill: write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
            mapped: write_flags.contains(WriteFlags::FUSE_WRITE_CACHE),
            in_vain: None,
        };
        let (fs, shared, place) = (self.fs(req), self.shared.clone(), (offset, data.len()));
        let progress = Progress::default();
        let write = move |fs: &Fs, data: &[u8], how| {
            let done = fs.write(ino.0, offset, data, how, &progress);
            done.map(|()| progress.killed())
        };
        let done = at_once(|| write(fs, data, how));
        if done != Err(WOULD_WAIT) {
            return shared.wrote(ino, place, how, done, reply);
        }
        // What the kernel writes back it writes from few requests at a time, and would drop.
        if !how.mapped && !shared.later.takes(data.len()) {
            return shared.wrote(ino, place, how, Err(Errno::NOMEM), reply);
        }
        let (data, mut reply) = (data.to_vec(), Some(reply));
        let again = move |fs: &Fs, in_vain: Option<Errno>| {
            let how = Writing { in_vain, ..how };
            let done = anew(|| write(fs, &data, how));
            let waits = done == Err(WOULD_WAIT);
            if !waits && let Some(reply) = reply.take() {
                shared.wrote(ino, place, how, done, reply);
            }
            !waits
        };
        // What the kernel writes back was stored before, and is not to be lost with a program.
        let caller = if how.mapped { 0 } else { req.pid() };
        let later = &self.shared.later;
        later.call_again(fs, caller, place.1, Box::new(again));
    }

    /// A descriptor is closed: nothing is committed by that.
    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // The kernel asks no more.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.fs(req).close(ino.0, opened(fh));
        reply.ok();
    }

    fn fsync(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.sync(req, move |fs| fs.begin_sync(ino.0), reply);
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let fh = self.next.fetch_add(1, Relaxed);
        // No FOPEN_CACHE_DIR: a listing is asked for each time.
        reply.opened(FileHandle(fh), FopenFlags::empty());
    }

    fn readdir(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = match self.reading(ino, fh, offset) {
            Ok(entries) => entries,
            Err(e) => return reply.error(no(e)),
        };
        for (i, e) in entries.iter().enumerate().skip(offset as usize) {
            let Ok(s) = self.as_of_now(req, ino, e) else {
                continue;
            };
            let kind = kind(&s.attributes.kind);
            let name = OsStr::from_bytes(&e.name);
            if reply.add(INodeNo(s.ino), i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let entries = match self.reading(ino, fh, offset) {
            Ok(entries) => entries,
            Err(e) => return reply.error(no(e)),
        };
        for (i, e) in entries.iter().enumerate().skip(offset as usize) {
            let Ok(s) = self.as_of_now(req, ino, e) else {
                continue;
            };
            let (at, name) = (i as u64 + 1, OsStr::from_bytes(&e.name));
            let full = reply.add(INodeNo(s.ino), at, name, kept(&s), &attr(&s), Generation(0));
            if full {
                break;
            }
            // Of these two the kernel takes no note.
            if !matches!(&e.name[..], b"." | b"..") {
                self.fs(req).tell(s.ino);
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let mut all = self.readings.lock().unwrap_or_else(|e| e.into_inner());
        all.remove(&fh.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.sync(req, Fs::begin_sync_names, reply);
    }

    fn statfs(&self, req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let fs = self.fs(req);
        match rustix::fs::statvfs(fs.volume().directory()) {
            Ok(s) => {
                // What calls find that make something, on the fuller node.
                let left = fs.left();
                let available = s.f_bavail.min(left.bytes / s.f_frsize.max(1));
                let files = s.f_ffree.min(left.files);
                reply.statfs(
                    s.f_blocks,
                    s.f_bfree,
                    available,
                    fs.nodes() + files,
                    files,
                    s.f_bsize as u32,
                    255,
                    s.f_frsize as u32,
                )
            }
            Err(e) => reply.error(no(e)),
        }
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        let call = move |fs: &Fs| fs.set_xattr(ino.0, &name, &value, flags);
        self.when_room(req, call, |_, done| empty(reply, done));
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        xattr(reply, size, self.fs(req).xattr(ino.0, name.as_bytes()));
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        xattr(reply, size, self.fs(req).xattrs(ino.0, asker(req)));
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let call = move |fs: &Fs| fs.remove_xattr(ino.0, &name);
        self.when_room(req, call, |_, done| empty(reply, done));
    }

    fn fallocate(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (shared, asker) = (self.shared.clone(), asker(req));
        let progress = Progress::default();
        let call = move |fs: &Fs| {
            fs.allocate(ino.0, (offset, length), mode, asker, &progress)?;
            Ok(progress.killed())
        };
        self.when_room(req, call, move |_, done| {
            if done.is_err() {
                // A part may be done, and the kernel keeps what it knew of the file.
                shared.add_stale(ino.0);
            }
            shared.forget_mode(ino, done == Ok(true));
            empty(reply, done.map(drop));
            if done.is_err() {
                shared.turn.notify();
            }
        });
    }

    fn lseek(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let at = u64::try_from(offset).map_err(|_| Errno::NXIO);
        let seek = move |fs: &Fs| match whence {
            libc::SEEK_DATA => fs.seek(ino.0, at?, false),
            libc::SEEK_HOLE => fs.seek(ino.0, at?, true),
            _ => Err(Errno::INVAL),
        };
        self.when_open(req, seek, |done| match done {
            Ok(at) => reply.offset(at as i64),
            Err(e) => reply.error(no(e)),
        });
    }
}
