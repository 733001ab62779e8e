//! A disk that can become slow, or fail once: a file system in user space that
//! passes everything on to a directory beside it.
//!
//! Owns its mount, which is in a mount namespace of the test's thread and of
//! the processes that it starts. It is gone with them, however the test ends.
//! The kernel's page cache keeps what is passed on: a disk that loses its
//! power is the simulator's affair.

use std::collections::HashMap;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File, FileTimes, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{
    DirEntryExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};

/// How long the kernel believes what it was told.
const TTL: Duration = Duration::from_secs(1);

/// What a disk is asked that may take long, or fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Write,
    Sync,
}

/// How the disk is at the moment.
#[derive(Default)]
struct State {
    /// Milliseconds that each write and each sync takes on top.
    delay: AtomicU64,
    /// Writes and syncs that were slowed down.
    slowed: AtomicU64,
    /// The next work of this kind, on a file whose path ends like this, fails with this errno.
    fault: Mutex<Option<(Which, i32)>>,
    hold: Mutex<Hold>,
    released: Condvar,
}

/// A kind of work, and how the path of the file ends.
type Which = (Work, String);

/// Whether some work is not let go on.
#[derive(Default)]
enum Hold {
    #[default]
    No,
    Next(Which),
    Held,
}

/// A mounted disk.
pub struct Disk {
    at: PathBuf,
    state: Arc<State>,
    _session: BackgroundSession,
}

impl Disk {
    /// A disk at `at`; says so where there can be none.
    pub fn mount_or_skip(at: &Path) -> Option<Disk> {
        match Disk::mount(at) {
            Ok(disk) => Some(disk),
            Err(why) => {
                // Said also by a test that passes.
                let _ = writeln!(
                    io::stderr(),
                    "SKIPPED: no disk of our own can be mounted here: {why}"
                );
                None
            }
        }
    }

    /// A disk at `at`, which is a directory of this name from now on for this
    /// thread and for the processes that it starts; or why there can be none.
    /// What is written there lies in a directory beside it.
    fn mount(at: &Path) -> Result<Disk, String> {
        let behind = at.with_extension("disk");
        for d in [at, &behind] {
            fs::create_dir_all(d).unwrap();
        }
        let nothing = std::ptr::null();
        // SAFETY: changes this thread's view of the file systems only, by
        // names that outlive the calls.
        let private = unsafe {
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    c"none".as_ptr(),
                    c"/".as_ptr(),
                    nothing,
                    flags,
                    nothing.cast(),
                ) == 0
        };
        if !private {
            let e = io::Error::last_os_error();
            return Err(format!("a mount namespace: {e}"));
        }
        let state = Arc::new(State::default());
        let passing = Passing::new(&behind, state.clone());
        let mut config = Config::default();
        // One that is slow holds up no look at another file.
        config.n_threads = Some(4);
        let session = Session::new(passing, at, &config).and_then(Session::spawn);
        Ok(Disk {
            at: at.to_owned(),
            state,
            _session: session.map_err(|e| format!("/dev/fuse: {e}"))?,
        })
    }

    /// From now on each write and each sync takes so much longer.
    pub fn slow(&self, by: Duration) {
        self.state.delay.store(by.as_millis() as u64, SeqCst);
    }

    /// How many writes and syncs have been slow.
    pub fn slowed(&self) -> u64 {
        self.state.slowed.load(SeqCst)
    }

    /// The next `work` on a file whose path ends with `name` is EIO.
    pub fn fail(&self, work: Work, name: &str) {
        *self.state.fault.lock().unwrap() = Some(((work, name.to_owned()), libc::EIO));
    }

    /// The next write to a file of these is ENOSPC.
    pub fn fill(&self, name: &str) {
        *self.state.fault.lock().unwrap() = Some(((Work::Write, name.to_owned()), libc::ENOSPC));
    }

    /// Whether that has happened.
    pub fn has_failed(&self) -> bool {
        self.state.fault.lock().unwrap().is_none()
    }

    /// The next `work` on a file whose path ends with `name` waits for the end of what
    /// this gives. That comes before the end of processes that were started before, also
    /// where the test fails: one whose disk is held cannot be killed.
    #[must_use]
    pub fn hold(&self, work: Work, name: &str) -> WorkPause<'_> {
        *self.state.hold.lock().unwrap() = Hold::Next((work, name.to_owned()));
        WorkPause(self)
    }

    /// Whether it has come, and waits.
    pub fn is_holding(&self) -> bool {
        matches!(*self.state.hold.lock().unwrap(), Hold::Held)
    }

    fn release(&self) {
        *self.state.hold.lock().unwrap() = Hold::No;
        self.state.released.notify_all();
    }
}

/// Work that does not go on while this lives.
pub struct WorkPause<'a>(&'a Disk);

impl Drop for WorkPause<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.slow(Duration::ZERO);
        self.release();
        let at = CString::new(self.at.as_os_str().as_bytes()).unwrap();
        // SAFETY: by a name that outlives the call. At once, also where a
        // process still has files open: they end with it.
        unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
    }
}

/// The file system.
struct Passing {
    state: Arc<State>,
    /// What the kernel knows, by its number there, and how often it asked.
    known: Mutex<HashMap<u64, (Arc<File>, u64)>>,
    open: Mutex<HashMap<u64, Arc<File>>>,
    next: AtomicU64,
}

/// What is behind a descriptor, whatever its name is by now.
fn place(f: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", f.as_raw_fd()))
}

/// A descriptor of what is at `path`, good for looking and as a beginning of
/// paths.
fn at(path: &Path) -> io::Result<File> {
    let mut how = OpenOptions::new();
    how.read(true)
        .custom_flags(libc::O_PATH | libc::O_NOFOLLOW)
        .open(path)
}

fn kind(m: &Metadata) -> FileType {
    let t = m.file_type();
    if t.is_dir() {
        FileType::Directory
    } else if t.is_symlink() {
        FileType::Symlink
    } else if t.is_socket() {
        FileType::Socket
    } else {
        FileType::RegularFile
    }
}

fn attributes(f: &File, number: u64) -> io::Result<FileAttr> {
    let m = f.metadata()?;
    let when = |s: i64, ns: i64| UNIX_EPOCH + Duration::new(s.max(0) as u64, ns as u32);
    Ok(FileAttr {
        ino: INodeNo(number),
        size: m.size(),
        blocks: m.blocks(),
        atime: when(m.atime(), m.atime_nsec()),
        mtime: when(m.mtime(), m.mtime_nsec()),
        ctime: when(m.ctime(), m.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: kind(&m),
        perm: (m.mode() & 0o7777) as u16,
        nlink: m.nlink() as u32,
        uid: m.uid(),
        gid: m.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    })
}

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Passing {
    fn new(behind: &Path, state: Arc<State>) -> Passing {
        let root = Arc::new(at(behind).unwrap());
        Passing {
            state,
            known: Mutex::new(HashMap::from([(INodeNo::ROOT.0, (root, 1))])),
            open: Mutex::new(HashMap::new()),
            next: AtomicU64::new(1),
        }
    }

    fn known(&self, number: INodeNo) -> io::Result<Arc<File>> {
        let known = self.known.lock().unwrap();
        let found = known.get(&number.0).map(|k| k.0.clone());
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    fn path(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(place(&*self.known(parent)?).join(name))
    }

    /// What is at `path`, which the kernel knows from now on.
    fn entry(&self, path: &Path) -> io::Result<FileAttr> {
        let f = at(path)?;
        // While it is held, no other file gets its number.
        let number = f.metadata()?.ino();
        let mut known = self.known.lock().unwrap();
        let k = known.entry(number).or_insert_with(|| (Arc::new(f), 0));
        k.1 += 1;
        attributes(&k.0, number)
    }

    fn open_as(&self, path: &Path, flags: i32, mode: u32) -> io::Result<FileHandle> {
        // What is durable is not looked at here, and buffers are not aligned.
        let more = flags & !(libc::O_ACCMODE | libc::O_DIRECT | libc::O_SYNC | libc::O_NOFOLLOW);
        let way = flags & libc::O_ACCMODE;
        let mut how = OpenOptions::new();
        how.read(way != libc::O_WRONLY)
            .write(way != libc::O_RDONLY)
            .mode(mode)
            .create(flags & libc::O_CREAT != 0 && way != libc::O_RDONLY)
            .custom_flags(more & !libc::O_EXCL);
        let f = how.open(path)?;
        let handle = self.next.fetch_add(1, SeqCst);
        self.open.lock().unwrap().insert(handle, Arc::new(f));
        Ok(FileHandle(handle))
    }

    fn opened(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        let open = self.open.lock().unwrap();
        let found = open.get(&handle.0).cloned();
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// Takes as long as the disk takes, and fails if it is to.
    fn work(&self, work: Work, f: &File) -> io::Result<()> {
        let delay = self.state.delay.load(SeqCst);
        if delay > 0 {
            std::thread::sleep(Duration::from_millis(delay));
            self.state.slowed.fetch_add(1, SeqCst);
        }
        let path = fs::read_link(place(f))?;
        let path = path.to_string_lossy();
        // The number of a spill file is nobody's choice.
        let name = path.trim_end_matches(|c: char| c.is_ascii_digit() && path.contains("/spill."));
        let ends = |with: &str| path.ends_with(with) || name.ends_with(with);
        let is = |which: &Which| which.0 == work && ends(&which.1);
        let mut hold = self.state.hold.lock().unwrap();
        if matches!(&*hold, Hold::Next(which) if is(which)) {
            *hold = Hold::Held;
            while matches!(*hold, Hold::Held) {
                hold = self.state.released.wait(hold).unwrap();
            }
        }
        drop(hold);
        let mut fault = self.state.fault.lock().unwrap();
        if let Some((_, errno)) = fault.take_if(|(which, _)| is(which)) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        Ok(())
    }

    fn change(
        &self,
        number: INodeNo,
        mode: Option<u32>,
        size: Option<u64>,
        modified: Option<TimeOrNow>,
    ) -> io::Result<FileAttr> {
        let f = self.known(number)?;
        if let Some(mode) = mode {
            fs::set_permissions(place(&f), Permissions::from_mode(mode & 0o7777))?;
        }
        if let Some(size) = size {
            OpenOptions::new()
                .write(true)
                .open(place(&f))?
                .set_len(size)?;
        }
        if let Some(TimeOrNow::SpecificTime(t)) = modified {
            let times = FileTimes::new().set_modified(t);
            File::open(place(&f))?.set_times(times)?;
        }
        attributes(&f, number.0)
    }

    fn list(&self, number: INodeNo) -> io::Result<Vec<(u64, FileType, OsString)>> {
        let mut all = Vec::new();
        for e in fs::read_dir(place(&*self.known(number)?))? {
            let e = e?;
            all.push((e.ino(), kind(&e.metadata()?), e.file_name()));
        }
        Ok(all)
    }
}

/// Answers with what `$result` has, by the reply's `$how`.
macro_rules! answer {
    ($reply:ident, $result:expr, |$ok:pat_param| $how:expr) => {
        match $result {
            Ok($ok) => $how,
            Err(e) => $reply.error(Errno::from(e)),
        }
    };
}

impl Filesystem for Passing {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.path(parent, name).and_then(|p| self.entry(&p));
        answer!(reply, found, |a| reply.entry(&TTL, &a, Generation(0)))
    }

    fn forget(&self, _: &Request, number: INodeNo, times: u64) {
        let mut known = self.known.lock().unwrap();
        if let Some(k) = known.get_mut(&number.0) {
            k.1 = k.1.saturating_sub(times);
            if k.1 == 0 {
                known.remove(&number.0);
            }
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.known(number).and_then(|f| attributes(&f, number.0));
        answer!(reply, found, |a| reply.attr(&TTL, &a))
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changed = self.change(number, mode, size, mtime);
        answer!(reply, changed, |a| reply.attr(&TTL, &a))
    }

    fn mknod(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let made = self.path(parent, name).and_then(|p| {
            let c = CString::new(p.as_os_str().as_bytes())?;
            // SAFETY: by a name that outlives the call.
            done(unsafe { libc::mknod(c.as_ptr(), mode & !umask, rdev.into()) })?;
            self.entry(&p)
        });
        answer!(reply, made, |a| reply.entry(&TTL, &a, Generation(0)))
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let made = self.path(parent, name).and_then(|p| {
            fs::create_dir(&p)?;
            fs::set_permissions(&p, Permissions::from_mode(mode & !umask & 0o7777))?;
            self.entry(&p)
        });
        answer!(reply, made, |a| reply.entry(&TTL, &a, Generation(0)))
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.path(parent, name).and_then(fs::remove_file);
        answer!(reply, gone, |()| reply.ok())
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.path(parent, name).and_then(fs::remove_dir);
        answer!(reply, gone, |()| reply.ok())
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let renamed = (|| {
            if !flags.is_empty() {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            fs::rename(self.path(parent, name)?, self.path(new_parent, new_name)?)
        })();
        answer!(reply, renamed, |()| reply.ok())
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let f = self.known(number);
        let opened = f.and_then(|f| self.open_as(&place(&f), flags.0 & !libc::O_CREAT, 0));
        answer!(reply, opened, |h| reply.opened(h, FopenFlags::empty()))
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.path(parent, name).and_then(|p| {
            let handle = self.open_as(&p, flags | libc::O_CREAT, mode & !umask)?;
            Ok((self.entry(&p)?, handle))
        });
        answer!(reply, made, |(a, h)| {
            reply.created(&TTL, &a, Generation(0), h, FopenFlags::empty());
        })
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut bytes = vec![0; size as usize];
        let got = self.opened(handle).and_then(|f| {
            let mut n = 0;
            while n < bytes.len() {
                match f.read_at(&mut bytes[n..], offset + n as u64)? {
                    0 => break,
                    more => n += more,
                }
            }
            Ok(n)
        });
        answer!(reply, got, |n| reply.data(&bytes[..n]))
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.opened(handle).and_then(|f| {
            self.work(Work::Write, &f)?;
            f.write_all_at(data, offset)
        });
        answer!(reply, written, |()| reply.written(data.len() as u32))
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.open.lock().unwrap().remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        let synced = self.opened(handle).and_then(|f| self.work(Work::Sync, &f));
        answer!(reply, synced, |()| reply.ok())
    }

    fn fsyncdir(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let synced = self.known(number).and_then(|f| self.work(Work::Sync, &f));
        answer!(reply, synced, |()| reply.ok())
    }

    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let all = match self.list(number) {
            Ok(all) => all,
            Err(e) => return reply.error(Errno::from(e)),
        };
        for (i, (number, kind, name)) in all.into_iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(number), i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        let found = self
            .known(number)
            .and_then(|f| Ok(rustix::fs::fstatvfs(&f)?));
        answer!(reply, found, |s| reply.statfs(
            s.f_blocks,
            s.f_bfree,
            s.f_bavail,
            s.f_files,
            s.f_ffree,
            s.f_bsize as u32,
            s.f_namemax as u32,
            s.f_frsize as u32,
        ))
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let reserved = self.opened(handle).and_then(|f| {
            // SAFETY: of a descriptor that is open.
            done(unsafe { libc::fallocate(f.as_raw_fd(), mode, offset as i64, length as i64) })
        });
        answer!(reply, reserved, |()| reply.ok())
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let found = self.opened(handle).and_then(|f| {
            // SAFETY: of a descriptor that is open, whose position nobody uses.
            match unsafe { libc::lseek(f.as_raw_fd(), offset, whence) } {
                -1 => Err(io::Error::last_os_error()),
                there => Ok(there),
            }
        });
        answer!(reply, found, |there| reply.offset(there))
    }
}
