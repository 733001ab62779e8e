//! The kernel's requests, as calls of `fs`.
//!
//! Owns what is told to the kernel: it may keep names, attributes and bytes for as long as it
//! likes, since nothing changes them but through it. Files are cached and written through: a
//! write comes here before it returns. A store to a mapping comes when the program syncs, or
//! when the kernel writes it back. It is not committed before a sync point then.
//!
//! Invariant: every request is answered, once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim::Batch;
use rustix::io::Errno;

use crate::Shared;
use crate::asker_affinity::AskerAffinity;
use crate::at_once::{WOULD_WAIT, anew, at_once, by_disk};
use crate::calls::{Call, Calls, New, Request, Setting, When, write};
use crate::fs::{Entry, Fs, Progress, Result, Seen, Wanted, Writing, now};
use crate::init;
use crate::name_table::{Kind, Time};
use crate::reply::{Attr, Entries, EntryOut, Reply, Space, opened};
use crate::tree::{Asker, Opened, Renames};
use mojim_env::locks::lock;

/// How long the kernel may keep what it was told.
const ALWAYS: Duration = Duration::from_secs(3600 * 24 * 365);

/// What is asked for of what the kernel offers; what it lacks costs time only.
///
/// Not asked for:
/// - FUSE_ASYNC_DIO. Cached pages are then dropped before a write by libaio and O_DIRECT alone,
///   not after it: a page that is read meanwhile keeps its old bytes, and they come back.
/// - FUSE_WRITEBACK_CACHE. Writes would come late, and the kernel would own sizes and times.
/// - FUSE_ATOMIC_O_TRUNC. A truncation is a SETATTR, which is checked and waits for room.
/// - FUSE_POSIX_LOCKS, FUSE_FLOCK_LOCKS: locks are this machine's, and the kernel keeps them.
/// - FUSE_POSIX_ACL: lists would be kept, and not enforced.
pub(crate) const WANTED: u64 = {
    // Cached bytes stay though a size or time changes: only calls through this mount change
    // them, and `Shared::add_stale` names the exceptions.
    init::EXPLICIT_INVAL_DATA
    // `Writing::kill`, `Fs::set` and `Fs::allocate` take set-ID bits; capabilities the kernel
    // takes itself, by REMOVEXATTR.
        | init::HANDLE_KILLPRIV_V2
    // Attributes come with names. The kernel drops those that are older than what it knows.
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
    // The lock of `Fs::state` orders calls on one directory.
        | init::PARALLEL_DIROPS
    // The target of a link never changes, and its number is not given again.
        | init::CACHE_SYMLINKS
};

pub(crate) struct Server {
    shared: Arc<Shared>,
    /// Directories that are being read: what was in them when the reading began.
    readings: Mutex<HashMap<u64, Arc<Vec<Entry>>>>,
    next: AtomicU64,
    affinity: AskerAffinity,
}

fn asker(req: &Request<'_>) -> Asker {
    Asker {
        uid: req.uid,
        gid: req.gid,
        now: now(),
    }
}

/// The type of a node, as a mode has it.
pub(crate) fn kind(kind: &Kind) -> u32 {
    match kind {
        Kind::Dir => libc::S_IFDIR,
        Kind::File(_) => libc::S_IFREG,
        Kind::Link(_) => libc::S_IFLNK,
        Kind::Special(kind, _) => *kind,
    }
}

pub(crate) fn attr(s: &Seen) -> Attr {
    let a = &s.attributes;
    Attr {
        ino: s.ino,
        size: s.size,
        blocks: s.blocks,
        accessed: a.accessed,
        modified: a.modified,
        changed: a.changed,
        mode: kind(&a.kind) | a.mode,
        links: s.links,
        uid: a.uid,
        gid: a.gid,
        device: match a.kind {
            Kind::Special(_, device) => device,
            _ => 0,
        },
    }
}

/// How long the kernel may keep what it is told of a node.
fn kept(s: &Seen) -> Duration {
    match s.is_sure {
        true => ALWAYS,
        false => Duration::ZERO,
    }
}

fn found(s: &Seen) -> EntryOut {
    EntryOut {
        attr: attr(s),
        generation: 0,
        kept: kept(s),
    }
}

/// The handle of a file that was opened so.
fn handle(flags: i32) -> u64 {
    (flags & libc::O_ACCMODE != libc::O_RDONLY).into()
}

fn opened_as(handle: u64) -> Opened {
    match handle {
        0 => Opened::Reads,
        _ => Opened::Writes,
    }
}

fn time(t: Option<When>) -> Option<Time> {
    t.map(|t| match t {
        When::At(t) => t,
        When::Now => now(),
    })
}

impl Server {
    pub(crate) fn new(shared: Arc<Shared>) -> Server {
        Server {
            shared,
            readings: Mutex::default(),
            next: AtomicU64::new(1),
            affinity: AskerAffinity::new(),
        }
    }

    /// The file system, to answer `req`.
    fn fs(&self, req: &Request<'_>) -> &Fs {
        if !req.by.is_beside() {
            self.affinity.answer(req.pid);
        }
        &self.shared.fs
    }

    /// Answers a call that may have to wait: now, or later.
    fn when_room<T>(
        &self,
        req: &Request<'_>,
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
            .call_again(fs, req.pid, 0, Box::new(again));
    }

    /// Answers a call that changes nothing, and may have to wait for the disk, or until a data file is open.
    fn when_there<T>(
        &self,
        req: &Request<'_>,
        call: impl Fn(&Fs) -> Result<T> + Send + 'static,
        answer: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let (fs, readers) = (self.fs(req), &self.shared.readers);
        let would_wait = |done: &Result<T>| matches!(done, Err(e) if *e == WOULD_WAIT);
        let mut done = at_once(|| call(fs));
        if would_wait(&done) && !req.by.is_beside() {
            // One of several: no other thread has to be woken.
            let here = readers.one_that_serves(|| by_disk(|| call(fs)));
            done = here.unwrap_or(done);
        }
        if !would_wait(&done) {
            return answer(done);
        }
        let shared = self.shared.clone();
        readers.add(move || answer(call(&shared.fs)));
    }

    /// Answers a sync point, when it is committed.
    fn sync(
        &self,
        req: &Request<'_>,
        begin: impl Fn(&Fs) -> Result<Option<Batch>> + Send + 'static,
        reply: Reply,
    ) {
        let (shared, caller) = (self.shared.clone(), req.pid);
        self.when_room(req, begin, move |fs, begun| match begun {
            Ok(Some(batch)) => {
                let answer = |done| reply.done(done);
                shared.later.complete(fs, caller, batch, answer);
            }
            begun => reply.done(begun.map(drop)),
        });
    }

    /// What was in a directory when its reading began; it begins anew at offset 0.
    fn reading(&self, ino: u64, handle: u64, offset: u64) -> Result<Arc<Vec<Entry>>> {
        let mut all = lock(&self.readings);
        if offset > 0
            && let Some(r) = all.get(&handle)
        {
            return Ok(r.clone());
        }
        let entries = Arc::new(self.shared.fs.entries(ino)?);
        all.insert(handle, entries.clone());
        Ok(entries)
    }

    /// What an entry of a reading is by now: its name may be another file's, or nobody's.
    fn as_of_now(&self, req: &Request<'_>, dir: u64, e: &Entry) -> Result<Seen> {
        match &e.name[..] {
            b"." | b".." => self.fs(req).seen(e.ino),
            name => self.fs(req).lookup(dir, name),
        }
    }
}

impl Shared {
    /// The kernel would let a program be executed by the bits that it knows.
    fn forget_mode(&self, ino: u64, changed: bool) {
        if changed && let Some(kernel) = self.kernel.get() {
            let _ = kernel.inval_inode(ino, -1, 0);
        }
    }

    /// Answers a write of `len` bytes.
    fn wrote(
        &self,
        ino: u64,
        (offset, len): (u64, usize),
        how: Writing,
        done: Result<bool>,
        reply: Reply,
    ) {
        match done {
            Ok(killed) => {
                self.forget_mode(ino, killed);
                reply.size(len as u32);
            }
            Err(e) => {
                // The kernel has it no longer as something to write.
                if how.mapped {
                    self.fs.lose(ino, offset, len, e);
                    self.add_stale(ino);
                }
                reply.error(e);
                if how.mapped {
                    self.turn.notify();
                }
            }
        }
    }
}

fn entry(fs: &Fs, reply: Reply, done: Result<Seen>) {
    match done {
        Ok(s) => {
            fs.tell(s.ino);
            reply.found(&found(&s));
        }
        Err(e) => reply.error(e),
    }
}

impl Calls for Server {
    fn call(&self, req: &Request<'_>, call: Call<'_>, reply: Reply) {
        let ino = req.ino;
        match call {
            Call::Lookup(name) => {
                let fs = self.fs(req);
                match fs.lookup_any(ino, name).transpose() {
                    Some(done) => entry(fs, reply, done),
                    // The kernel drops that when it has a file of this name made.
                    None => reply.nothing(ALWAYS),
                }
            }
            Call::GetAttr => match self.fs(req).seen(ino) {
                Ok(s) => reply.attr(&attr(&s), kept(&s)),
                Err(e) => reply.error(e),
            },
            Call::SetAttr(setting) => self.set(req, &setting, reply),
            Call::ReadLink => match self.fs(req).target(ino) {
                Ok(t) => reply.data(t),
                Err(e) => reply.error(e),
            },
            Call::Open(flags) => self.open(req, flags, reply),
            Call::Read { offset, size, .. } => self.read(req, offset, size, reply),
            Call::Write {
                offset,
                data,
                flags,
            } => self.write(req, offset, data, flags, reply),
            Call::Release(handle) => {
                self.fs(req).close(ino, opened_as(handle));
                reply.ok();
            }
            Call::Sync => self.sync(req, move |fs| fs.begin_sync(ino), reply),
            Call::SyncDir => self.sync(req, Fs::begin_sync_names, reply),
            Call::OpenDir => {
                let handle = self.next.fetch_add(1, Relaxed);
                // No FOPEN_CACHE_DIR: a listing is asked for each time.
                reply.opened(handle, 0);
            }
            Call::ReadDir {
                handle,
                offset,
                size,
                plus,
            } => self.list(req, (handle, offset), Entries::new(size), plus, reply),
            Call::ReleaseDir(handle) => {
                lock(&self.readings).remove(&handle);
                reply.ok();
            }
            Call::StatFs => self.space(req, reply),
            Call::GetXattr(name, room) => reply.value(room, self.fs(req).xattr(ino, name)),
            Call::ListXattr(room) => reply.value(room, self.fs(req).xattrs(ino, asker(req))),
            Call::Allocate {
                offset,
                length,
                mode,
            } => self.allocate(req, (offset, length), mode, reply),
            Call::Seek { offset, whence } => self.seek(req, offset, whence, reply),
            call => self.change_names(req, call, reply),
        }
    }

    fn forget(&self, ino: u64, times: u64) {
        self.shared.fs.forget(ino, times);
    }
}

impl Server {
    /// Makes a call that makes, removes or changes a name, or an extended attribute.
    fn change_names(&self, req: &Request<'_>, call: Call<'_>, reply: Reply) {
        let (ino, asker) = (req.ino, asker(req));
        match call {
            Call::Create(new, flags) => self.create(req, new, flags, reply),
            Call::MkNod(new, device) => self.make_node(req, new, device, reply),
            Call::MkDir(New { name, mode, umask }) => {
                let name = name.to_vec();
                let call = move |fs: &Fs| fs.make(ino, &name, Kind::Dir, mode & !umask, asker);
                self.when_room(req, call, |fs, done| entry(fs, reply, done));
            }
            Call::SymLink(name, target) => {
                let (name, target) = (name.to_vec(), Kind::Link(target.to_vec()));
                let call = move |fs: &Fs| fs.make(ino, &name, target.clone(), 0o777, asker);
                self.when_room(req, call, |fs, done| entry(fs, reply, done));
            }
            Call::Link(of, name) => {
                let name = name.to_vec();
                let call = move |fs: &Fs| fs.link(of, ino, &name);
                self.when_room(req, call, |fs, done| entry(fs, reply, done));
            }
            Call::Unlink(name) => {
                let name = name.to_vec();
                let call = move |fs: &Fs| fs.unlink(ino, &name);
                self.when_room(req, call, |_, done| reply.done(done));
            }
            Call::RmDir(name) => {
                let name = name.to_vec();
                let call = move |fs: &Fs| fs.rmdir(ino, &name);
                self.when_room(req, call, |_, done| reply.done(done));
            }
            Call::Rename { name, to, flags } => self.rename(req, name, to, flags, reply),
            Call::SetXattr { name, value, flags } => {
                let (name, value) = (name.to_vec(), value.to_vec());
                let call = move |fs: &Fs| fs.set_xattr(ino, &name, &value, flags);
                self.when_room(req, call, |_, done| reply.done(done));
            }
            Call::RemoveXattr(name) => {
                let name = name.to_vec();
                let call = move |fs: &Fs| fs.remove_xattr(ino, &name);
                self.when_room(req, call, |_, done| reply.done(done));
            }
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn set(&self, req: &Request<'_>, setting: &Setting, reply: Reply) {
        let want = Wanted {
            mode: setting.mode,
            uid: setting.uid,
            gid: setting.gid,
            size: setting.size,
            accessed: time(setting.accessed),
            modified: time(setting.modified),
        };
        let (ino, asker) = (req.ino, asker(req));
        let call = move |fs: &Fs| fs.set(ino, &want, asker);
        self.when_room(req, call, |_, done| match done {
            Ok(s) => reply.attr(&attr(&s), kept(&s)),
            Err(e) => reply.error(e),
        });
    }

    fn make_node(&self, req: &Request<'_>, new: New<'_>, device: u32, reply: Reply) {
        let (ino, name, asker) = (req.ino, new.name.to_vec(), asker(req));
        let (mode, bits) = (new.mode, new.mode & !new.umask);
        let call = move |fs: &Fs| match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => fs.make_file(ino, &name, bits, asker, None),
            kind => fs.make(ino, &name, Kind::Special(kind, device), bits, asker),
        };
        self.when_room(req, call, |fs, done| entry(fs, reply, done));
    }

    fn rename(
        &self,
        req: &Request<'_>,
        name: &[u8],
        (dir, to): (u64, &[u8]),
        flags: u32,
        reply: Reply,
    ) {
        let how = match flags {
            0 => Ok(Renames::Replaces),
            libc::RENAME_NOREPLACE => Ok(Renames::NoReplace),
            libc::RENAME_EXCHANGE => Ok(Renames::Exchanges),
            _ => Err(Errno::INVAL),
        };
        let (ino, from, to) = (req.ino, name.to_vec(), to.to_vec());
        let call = move |fs: &Fs| fs.rename((ino, &from), (dir, &to), how?);
        self.when_room(req, call, |_, done| reply.done(done));
    }

    fn open(&self, req: &Request<'_>, flags: i32, reply: Reply) {
        let handle = handle(flags);
        match self.fs(req).open_file(req.ino, opened_as(handle)) {
            Ok(()) => {
                // Every opening of a file has its cached pages, coherent whatever way bytes go:
                // FOPEN_DIRECT_IO and FOPEN_PASSTHROUGH beside cached openings are not. They stay from
                // one opening to the next unless the kernel may know what is not so.
                let keeps = match self.shared.stale_has(req.ino) {
                    true => 0,
                    false => opened::KEEP_CACHE,
                };
                reply.opened(handle, keeps);
            }
            Err(e) => reply.error(e),
        }
    }

    fn create(&self, req: &Request<'_>, new: New<'_>, flags: i32, reply: Reply) {
        let (ino, name, asker) = (req.ino, new.name.to_vec(), asker(req));
        let (handle, bits) = (handle(flags), new.mode & !new.umask);
        let how = Some(opened_as(handle));
        let call = move |fs: &Fs| fs.make_file(ino, &name, bits, asker, how);
        self.when_room(req, call, move |fs, done| match done {
            Ok(s) => {
                fs.tell(s.ino);
                let found = EntryOut {
                    kept: ALWAYS,
                    ..found(&s)
                };
                // Nothing of a new file is cached.
                reply.created(&found, handle, opened::KEEP_CACHE);
            }
            Err(e) => reply.error(e),
        });
    }

    fn read(&self, req: &Request<'_>, offset: u64, size: u32, reply: Reply) {
        let ino = req.ino;
        if size > init::MOST {
            // The kernel asks for no more. A part would be taken for the end of the file.
            return reply.error(Errno::IO);
        }
        let read = move |fs: &Fs| {
            let mut out = vec![0; size as usize];
            let n = fs.read(ino, offset, &mut out)?;
            out.truncate(n);
            Ok(out)
        };
        self.when_there(req, read, |done| match done {
            Ok(bytes) => reply.data(bytes),
            Err(e) => reply.error(e),
        });
    }

    fn write(&self, req: &Request<'_>, offset: u64, data: &[u8], flags: u32, reply: Reply) {
        let ino = req.ino;
        let how = Writing {
            kill: flags & write::KILL_SUIDGID != 0,
            mapped: flags & write::CACHE != 0,
            in_vain: None,
        };
        let (fs, shared, place) = (self.fs(req), self.shared.clone(), (offset, data.len()));
        let progress = Progress::default();
        let write = move |fs: &Fs, data: &[u8], how| {
            let done = fs.write(ino, offset, data, how, &progress);
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
        let caller = if how.mapped { 0 } else { req.pid };
        let later = &self.shared.later;
        later.call_again(fs, caller, place.1, Box::new(again));
    }

    /// Lists a directory from a place of the reading `handle`, into `entries`.
    fn list(
        &self,
        req: &Request<'_>,
        (handle, offset): (u64, u64),
        mut entries: Entries,
        plus: bool,
        reply: Reply,
    ) {
        let all = match self.reading(req.ino, handle, offset) {
            Ok(all) => all,
            Err(e) => return reply.error(e),
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (i, e) in all.iter().enumerate().skip(from) {
            let Ok(s) = self.as_of_now(req, req.ino, e) else {
                continue;
            };
            let found = plus.then(|| found(&s));
            let (node, next) = ((s.ino, kind(&s.attributes.kind)), i as u64 + 1);
            if !entries.add(node, next, &e.name, found.as_ref()) {
                break;
            }
            // Of these two the kernel takes no note.
            if plus && !matches!(&e.name[..], b"." | b"..") {
                self.fs(req).tell(s.ino);
            }
        }
        reply.entries(entries);
    }

    fn space(&self, req: &Request<'_>, reply: Reply) {
        let fs = self.fs(req);
        match rustix::fs::statvfs(fs.volume().directory()) {
            Ok(s) => {
                // What calls find that make something, on the fuller node.
                let left = fs.left();
                let files = s.f_ffree.min(left.files);
                reply.space(&Space {
                    blocks: s.f_blocks,
                    free: s.f_bfree,
                    available: s.f_bavail.min(left.bytes / s.f_frsize.max(1)),
                    files: fs.nodes() + files,
                    free_files: files,
                    block: s.f_bsize as u32,
                    fragment: s.f_frsize as u32,
                });
            }
            Err(e) => reply.error(e),
        }
    }

    fn allocate(&self, req: &Request<'_>, range: (u64, u64), mode: i32, reply: Reply) {
        let (ino, shared, asker) = (req.ino, self.shared.clone(), asker(req));
        let progress = Progress::default();
        let call = move |fs: &Fs| {
            fs.allocate(ino, range, mode, asker, &progress)?;
            Ok(progress.killed())
        };
        self.when_room(req, call, move |_, done| {
            if done.is_err() {
                // A part may be done, and the kernel keeps what it knew of the file.
                shared.add_stale(ino);
            }
            shared.forget_mode(ino, done == Ok(true));
            reply.done(done.map(drop));
            if done.is_err() {
                shared.turn.notify();
            }
        });
    }

    fn seek(&self, req: &Request<'_>, offset: i64, whence: i32, reply: Reply) {
        let ino = req.ino;
        let at = u64::try_from(offset).map_err(|_| Errno::NXIO);
        let seek = move |fs: &Fs| match whence {
            libc::SEEK_DATA => fs.seek(ino, at?, false),
            libc::SEEK_HOLE => fs.seek(ino, at?, true),
            _ => Err(Errno::INVAL),
        };
        self.when_there(req, seek, |done| match done {
            Ok(at) => reply.offset(at),
            Err(e) => reply.error(e),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{ThreadId, current};

    use mojim::Volume;
    use mojim_env::File;

    use super::*;
    use crate::fs::Options;
    use crate::reply::Transport;
    use crate::tree::ROOT;

    /// A disk with sevens, that answers when it is asked to.
    struct Disk {
        /// The thread that serves.
        serves: ThreadId,
        asked: Sender<()>,
        /// Ends when it is to answer.
        silent: Mutex<Receiver<()>>,
        /// Whether what was read stays in memory.
        keeps: bool,
        kept: AtomicBool,
        fails: bool,
        reads: AtomicUsize,
    }

    impl File for Disk {
        fn read_at(&self, buf: &mut [u8], _offset: u64) -> io::Result<usize> {
            assert_ne!(current().id(), self.serves, "it waits for the disk");
            self.reads.fetch_add(1, SeqCst);
            self.asked.send(()).unwrap();
            let _ = lock(&self.silent).recv();
            if self.fails {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            self.kept.store(self.keeps, SeqCst);
            buf.fill(7);
            Ok(buf.len())
        }
        fn read_at_once(&self, buf: &mut [u8], _offset: u64) -> io::Result<usize> {
            // What is found in part is written, as the system does.
            buf[..1].fill(8);
            if !self.kept.load(SeqCst) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            buf.fill(7);
            Ok(buf.len())
        }
        fn write_at(&self, _buf: &[u8], _offset: u64) -> io::Result<()> {
            unreachable!("the mount writes no data file")
        }
        fn sync(&self) -> io::Result<()> {
            unreachable!("nor syncs one")
        }
        fn set_len(&self, _len: u64) -> io::Result<()> {
            unreachable!("nor cuts one")
        }
        fn len(&self) -> io::Result<u64> {
            Ok(SIZE as u64)
        }
        fn allocate(&self, _len: u64) -> io::Result<()> {
            unreachable!("nor allocates one")
        }
        fn next_data(&self, _offset: u64) -> io::Result<Option<Range<u64>>> {
            Ok(None)
        }
    }

    /// Says which request was answered, and how.
    struct Told(Sender<(u64, i32, Vec<u8>)>);

    impl Transport for Told {
        fn answer(&self, _place: u32, unique: u64, error: i32, body: Vec<u8>) {
            self.0.send((unique, error, body)).unwrap();
        }
        fn is_beside(&self) -> bool {
            true
        }
    }

    const SIZE: usize = 4096;

    /// A mount without a kernel, of a volume with one file, whose bytes are applied.
    fn mount(dir: &std::path::Path) -> (Arc<Shared>, u64) {
        let config = dir.join("mojim.toml");
        let at = dir.display();
        let text = format!(
            "cluster = \"test\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n[node.a]\n\
             address = \"127.0.0.1:1\"\ndirectory = \"{at}/a\"\nring = \"{at}\"\n"
        );
        std::fs::write(&config, text).unwrap();
        let volume = Volume::attach(&config, "a", None).unwrap();
        let fs = Fs::open(volume, Options::default(), 0, 0).unwrap();
        let asker = Asker {
            uid: 0,
            gid: 0,
            now: now(),
        };
        let file = fs.make_file(ROOT, b"f", 0o600, asker, None).unwrap();
        let (how, progress) = (Writing::default(), Progress::default());
        fs.write(file.ino, 0, &[1; SIZE], how, &progress).unwrap();
        fs.sync_all().unwrap();
        fs.volume().settle().unwrap();
        (Arc::new(Shared::new(fs)), file.ino)
    }

    /// The only thread of a processor waited for the disk itself, and with it all calls of that processor; any
    /// thread did so under the lock of the file, for which another one waited with the lock of all names.
    #[test]
    fn a_read_that_waits_for_the_disk_keeps_no_other_call_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let (shared, ino) = mount(dir.path());
        let (asked, is_asked) = channel();
        let (answers, silent) = channel();
        let disk = Disk {
            serves: current().id(),
            asked,
            silent: Mutex::new(silent),
            keeps: true,
            kept: AtomicBool::new(false),
            fails: false,
            reads: AtomicUsize::new(0),
        };
        shared.fs.read_from(ino, Arc::new(disk));
        shared.readers.begin().unwrap();
        let server = Server::new(shared.clone());
        let (told, answered) = channel();
        let by: Arc<dyn Transport> = Arc::new(Told(told));
        let call = |unique, call| {
            let req = Request {
                ino,
                uid: 0,
                gid: 0,
                pid: 0,
                by: &*by,
            };
            server.call(&req, call, Reply::new(by.clone(), 0, unique));
        };
        let read = |size| Call::Read {
            handle: 0,
            offset: 0,
            size,
        };
        call(1, read(SIZE as u32));
        is_asked.recv().unwrap();
        call(2, Call::GetAttr);
        assert_eq!(answered.recv().map(|a| (a.0, a.1)), Ok((2, 0)));
        drop(answers);
        assert_eq!(answered.recv(), Ok((1, 0, vec![7; SIZE])));
        // What is in memory is read by who serves, as the disk sees.
        call(3, read(8));
        assert_eq!(answered.recv(), Ok((3, 0, vec![7; 8])));
        shared.readers.end();
        assert_eq!(
            shared.fs.volume().detach().map_err(|e| e.to_string()),
            Ok(())
        );
    }

    /// Where memory is so short that nothing stays in it, and where the disk fails, a read comes to an end, too.
    #[test]
    fn a_read_ends_though_nothing_stays_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let (shared, ino) = mount(dir.path());
        // Another thread than the disk's.
        let read = |fails| {
            let (asked, _is_asked) = channel();
            let disk = Arc::new(Disk {
                serves: std::thread::spawn(|| current().id()).join().unwrap(),
                asked,
                silent: Mutex::new(channel().1),
                keeps: false,
                kept: AtomicBool::new(false),
                fails,
                reads: AtomicUsize::new(0),
            });
            shared.fs.read_from(ino, disk.clone());
            let mut out = [0; 8];
            let done = shared.fs.read(ino, 0, &mut out);
            (done, out, disk.reads.load(SeqCst))
        };
        let (done, out, reads) = read(false);
        assert_eq!((done, out), (Ok(8), [7; 8]));
        assert!(reads > 1, "it looked again");
        let (done, _, reads) = read(true);
        assert_eq!((done, reads), (Err(Errno::IO), 2));
        assert_eq!(
            shared.fs.volume().detach().map_err(|e| e.to_string()),
            Ok(())
        );
    }
}
