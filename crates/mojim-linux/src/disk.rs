//! Files and directories.
//!
//! Owns the descriptors of open files.
//!
//! Invariants:
//!
//! - A file opened `durable` has `O_DSYNC`, and `O_DIRECT` where the file system has it. Where it
//!   has not (some tmpfs), alignment is not needed and durability is `O_DSYNC`'s.
//! - Nothing here uses a descriptor's file position for reading or writing.
//! - A file opened `plain` is a regular one, and lies at the path itself.

use super::error;
use mojim_env::locks::lock;
use mojim_env::{File, FileSystem, Longest, NotPlain, OpenHow, Space, descriptors};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags, preadv2, retry_on_intr};
use std::ffi::OsStr;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

pub(super) const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
const DIR_MODE: Mode = Mode::from_raw_mode(0o755);
const CLOSED_DIR_MODE: Mode = Mode::from_raw_mode(0o700);

/// `O_DSYNC`. Rustix's constant of this name is `O_SYNC`, by which each write also commits the file's
/// times to the file system's journal, and none is one write with FUA.
const DSYNC: OFlags = OFlags::from_bits_retain(libc::O_DSYNC as u32);
/// What a durable write is aligned to where the kernel does not say.
const USUAL_SECTOR: usize = 4096;
/// [`mojim_env::Env::sector`] is never less.
const LEAST_SECTOR: usize = 512;

/// An open file.
#[derive(Debug)]
pub(super) struct DiskFile {
    fd: OwnedFd,
    direct: bool,
    /// Its room was allocated beforehand: writes do not extend it.
    durable: bool,
    /// Its file system has no reads without a wait.
    waits: AtomicBool,
}

impl DiskFile {
    pub(super) fn open(path: &Path, how: OpenHow) -> io::Result<DiskFile> {
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
        flags |= if how.write {
            OFlags::RDWR
        } else {
            OFlags::RDONLY
        };
        if how.create {
            flags |= OFlags::CREATE;
        }
        if how.plain {
            let fd = open_plain(path, flags)?;
            return Ok(DiskFile::new(fd, false, how));
        }
        if !how.durable {
            let fd = open_fd(path, flags, FILE_MODE)?;
            return Ok(DiskFile::new(fd, false, how));
        }
        flags |= DSYNC;
        match open_fd(path, flags | OFlags::DIRECT, FILE_MODE) {
            Ok(fd) => Ok(DiskFile::new(fd, true, how)),
            // The file system has no O_DIRECT (it may have made the file).
            Err(Errno::INVAL) => {
                let fd = open_fd(path, flags, FILE_MODE)?;
                Ok(DiskFile::new(fd, false, how))
            }
            Err(e) => Err(e.into()),
        }
    }

    fn new(fd: OwnedFd, direct: bool, how: OpenHow) -> DiskFile {
        DiskFile {
            fd,
            direct,
            durable: how.durable,
            waits: AtomicBool::new(false),
        }
    }

    /// Says what is wrong where the kernel only says EINVAL.
    fn explain(&self, e: Errno, what: &str, ptr: *const u8, len: usize, offset: u64) -> io::Error {
        let odd = |n: u64| !n.is_multiple_of(LEAST_SECTOR as u64);
        if e == Errno::INVAL && self.direct && (odd(ptr as u64) || odd(len as u64) || odd(offset)) {
            return error(
                io::ErrorKind::InvalidInput,
                format!(
                    "{what} of {len} bytes at offset {offset}, buffer at {ptr:p}: \
                     all three must be multiples of the sector for a durable file"
                ),
            );
        }
        e.into()
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        if SHORT.load(Relaxed) {
            refill();
        }
    }
}

impl File for DiskFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let rest = &mut buf[done..];
            let (ptr, len) = (rest.as_ptr(), rest.len());
            match retry_on_intr(|| rustix::io::pread(&self.fd, &mut *rest, at)) {
                Ok(0) => break,
                Ok(n) => {
                    done += n;
                    // The end of the file, inside a sector: asking for more
                    // from there would be EINVAL.
                    if self.direct && !done.is_multiple_of(LEAST_SECTOR) {
                        break;
                    }
                }
                Err(e) => return Err(self.explain(e, "read", ptr, len, at)),
            }
        }
        Ok(done)
    }

    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() && !self.waits.load(Relaxed) {
            let at = offset + done as u64;
            let mut rest = [IoSliceMut::new(&mut buf[done..])];
            match retry_on_intr(|| preadv2(&self.fd, &mut rest, at, ReadWriteFlags::NOWAIT)) {
                // The end of the file; Linux 5.9 and 5.10 say so also where they would wait.
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::AGAIN) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.waits.store(true, Relaxed),
                // The other call says what it is.
                Err(_) => break,
            }
        }
        let rest = self.read_at(&mut buf[done..], offset + done as u64)?;
        Ok(done + rest)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        // Beyond its limit the kernel sends a signal, which ends the process. A log was
        // checked when its room was allocated.
        if !self.durable && !buf.is_empty() && end > file_size_limit() {
            return Err(Errno::FBIG.into());
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let rest = &buf[done..];
            match retry_on_intr(|| rustix::io::pwrite(&self.fd, rest, at)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(e) => return Err(self.explain(e, "write", rest.as_ptr(), rest.len(), at)),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        // Not retried, whatever it says (`docs/reference/invariants.md`, 6). The kernel
        // does not interrupt it.
        Ok(fs::fdatasync(&self.fd)?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        // Here, too, the kernel would send a signal.
        if len > file_size_limit() && len > self.len()? {
            return Err(Errno::FBIG.into());
        }
        Ok(retry_on_intr(|| fs::ftruncate(&self.fd, len))?)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(fs::fstat(&self.fd)?.st_size as u64)
    }

    /// Keeps the file's length: it reserves, [`File::set_len`] grows.
    fn allocate(&self, len: u64) -> io::Result<()> {
        allocate(&self.fd, FallocateFlags::KEEP_SIZE, len)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let len = self.len()?;
        if offset >= len {
            return Ok(None);
        }
        let start = match fs::seek(&self.fd, fs::SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // The file system does not know: all of it.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some(offset..len)),
            Err(e) => return Err(e.into()),
        };
        match fs::seek(&self.fd, fs::SeekFrom::Hole(start)) {
            Ok(end) => Ok(Some(start..end)),
            // Cut off in the meantime.
            Err(Errno::NXIO) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// Bytes that the file system of `path` has free for users other than root; an error also
/// if it does not count them.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    match space(path)?.bytes {
        u64::MAX => Err(io::ErrorKind::Unsupported.into()),
        bytes => Ok(bytes),
    }
}

/// See [`mojim_env::Env::space`].
pub(super) fn space(path: &Path) -> io::Result<Space> {
    let v = fs::statvfs(path)?;
    let counted = |count: u64, all: u64| match all {
        0 => u64::MAX,
        _ => count,
    };
    Ok(Space {
        bytes: counted(v.f_bavail.saturating_mul(v.f_frsize), v.f_blocks),
        files: counted(v.f_favail, v.f_files),
        block: v.f_frsize.clamp(512, 1 << 20) as u32,
    })
}

/// Descriptors in reserve, so that the engine can open something for a moment (a
/// directory to sync, a catalogue to replace) although the program has taken all others.
static RESERVE: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// Whether descriptors of the reserve were given away.
static SHORT: AtomicBool = AtomicBool::new(true);

/// Size of the reserve: a change of names needs three descriptors at a time, and more
/// than one thread may make one.
const RESERVED: usize = 8;

/// Fills the reserve, as far as there are descriptors.
fn refill() {
    let Ok(mut all) = RESERVE.try_lock() else {
        return;
    };
    while all.len() < RESERVED {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        match descriptors::open(|| retry_on_intr(|| fs::open("/", flags, Mode::empty()))) {
            Ok(fd) => all.push(fd),
            Err(_) => return,
        }
    }
    SHORT.store(false, Relaxed);
}

/// Opens a file, with a descriptor of the reserve if no other is left.
fn open_fd(path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    with_reserve(|| descriptors::open(|| retry_on_intr(|| fs::open(path, flags, mode))))
}

/// [`OpenHow::plain`].
fn open_plain(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    // Looked at first: it is enough for some devices that they are opened.
    match fs::lstat(path) {
        Ok(s) => check_plain(&s)?,
        Err(Errno::NOENT) if flags.contains(OFlags::CREATE) => {}
        Err(e) => return Err(e.into()),
    }
    // Something else may be there by now.
    let opened = open_fd(path, flags | OFlags::NOFOLLOW | OFlags::NONBLOCK, FILE_MODE);
    let fd = match opened {
        Err(Errno::LOOP) => return Err(NotPlain("a symbolic link").into()),
        Err(Errno::NXIO) => return Err(NotPlain("a pipe or socket").into()),
        // A server of files has a lease of it, which it is to give back first.
        Err(Errno::AGAIN) => open_fd(path, flags | OFlags::NOFOLLOW, FILE_MODE)?,
        r => r?,
    };
    check_plain(&fs::fstat(&fd)?)?;
    Ok(fd)
}

fn check_plain(s: &fs::Stat) -> io::Result<()> {
    let what = match FileType::from_raw_mode(s.st_mode) {
        FileType::RegularFile => return Ok(()),
        FileType::Directory => return Err(Errno::ISDIR.into()),
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    };
    Err(NotPlain(what).into())
}

pub(super) fn with_reserve<T>(open: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    if SHORT.load(Relaxed) {
        refill();
    }
    let mut got = open();
    while matches!(got, Err(Errno::MFILE | Errno::NFILE)) {
        let mut all = lock(&RESERVE);
        let Some(one) = all.pop() else {
            break;
        };
        SHORT.store(true, Relaxed);
        drop(one);
        got = open();
    }
    got
}

/// See [`mojim_env::Env::most_open`]: a sixteenth of what this process may have,
/// so that several volumes and the program fit beside each other.
pub(super) fn most_open() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |n| (n / 16).max(4) as usize)
}

/// See [`mojim_env::Env::file_size_limit`].
pub(super) fn file_size_limit() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    limit.unwrap_or(u64::MAX)
}

/// See [`mojim_env::Env::max_file_size`]: found by trying, on a file without a name.
pub(super) fn max_file_size(dir: &Path) -> io::Result<u64> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    // A limit that cannot be tried counts as none.
    let Ok(probe) = open_fd(dir, flags, FILE_MODE) else {
        return Ok(i64::MAX as u64);
    };
    let takes = |len: u64| {
        let done = retry_on_intr(|| fs::ftruncate(&probe, len));
        !matches!(done, Err(Errno::FBIG | Errno::INVAL))
    };
    // Beyond the process's own limit the answer would be a signal.
    let most = file_size_limit().min(i64::MAX as u64);
    if takes(most) {
        return Ok(i64::MAX as u64);
    }
    let (mut fits, mut not) = (0, most);
    while not - fits > 1 {
        let middle = fits + (not - fits) / 2;
        match takes(middle) {
            true => fits = middle,
            false => not = middle,
        }
    }
    Ok(fits)
}

/// See [`mojim_env::Env::reach`].
pub(super) fn reach(dir: &Path) -> io::Result<(u64, u64)> {
    let to_change = fs::Access::WRITE_OK | fs::Access::EXEC_OK;
    match fs::accessat(CWD, dir, to_change, AtFlags::EACCESS) {
        // Before Linux 5.8: by the real user, not the effective one.
        Err(Errno::NOSYS | Errno::INVAL) => fs::access(dir, to_change)?,
        done => done?,
    }
    let stat = fs::stat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// See [`mojim_env::Env::longest_names`]: the file system tells the one, and a path is opened with
/// that of the directory before it.
pub(super) fn longest_names(dir: &Path) -> io::Result<Longest> {
    let usual = Longest::USUAL;
    let part = match fs::statfs(dir)?.f_namelen {
        // It does not tell.
        0 => usual.part,
        n => (n as usize).min(usual.part.into()) as u16,
    };
    let most = libc::PATH_MAX as usize - "/\0".len();
    let path = most.saturating_sub(dir.as_os_str().len()) as u16;
    Ok(Longest { part, path })
}

/// See [`mojim_env::Env::remove_empty_dirs`].
pub(super) fn remove_empty_dirs(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = open_fd(path, flags, Mode::empty())?;
    for entry in fs::Dir::new(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        match remove_empty_dirs(&path.join(OsStr::from_bytes(name.to_bytes()))) {
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
                return Err(Errno::NOTEMPTY.into());
            }
            r => r?,
        }
    }
    Ok(fs::rmdir(path)?)
}

/// `fallocate` of the first `len` bytes, refused beforehand if the file system lacks the
/// room: `fallocate` may take all that is free before it fails, and meanwhile all other
/// writes would fail.
pub(super) fn allocate(fd: &OwnedFd, flags: FallocateFlags, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    if len > file_size_limit() {
        return Err(Errno::FBIG.into());
    }
    let full = |left| {
        let text = format!("no space for {len} bytes, {left} are free");
        error(io::ErrorKind::StorageFull, text)
    };
    let has = fs::fstat(fd)?.st_blocks as u64 * 512;
    let v = fs::fstatvfs(fd)?;
    let left = v.f_bfree.saturating_mul(v.f_frsize);
    // No blocks at all: a file system that does not count them.
    if v.f_blocks > 0 && len.saturating_sub(has) > left {
        return Err(full(left));
    }
    match retry_on_intr(|| fs::fallocate(fd, flags, 0, len)) {
        Err(Errno::NOSPC | Errno::DQUOT) => Err(full(left)),
        Err(Errno::OPNOTSUPP) => Err(error(
            io::ErrorKind::Unsupported,
            "the file system cannot reserve space (fallocate)",
        )),
        other => Ok(other?),
    }
}

/// See [`mojim_env::Env::sector`]. If `path` is a directory or does not exist, the value
/// for a new file there.
pub(super) fn sector(path: &Path) -> io::Result<usize> {
    let want = StatxFlags::DIOALIGN | StatxFlags::TYPE;
    let place = match fs::statx(CWD, path, AtFlags::empty(), want) {
        Ok(x) if x.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => return Ok(sector_of(&x)),
        Ok(x) if FileType::from_raw_mode(x.stx_mode.into()).is_dir() => path,
        Ok(_) | Err(Errno::NOSYS) => return Ok(USUAL_SECTOR),
        Err(Errno::NOENT) => parent(path),
        Err(e) => return Err(e.into()),
    };
    // The kernel tells it of regular files only: make one without a name.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let probe = match open_fd(place, flags, FILE_MODE) {
        Ok(fd) => fd,
        Err(e @ (Errno::NOENT | Errno::NOTDIR)) => return Err(e.into()),
        Err(_) => return Ok(USUAL_SECTOR),
    };
    Ok(match fs::statx(&probe, "", AtFlags::EMPTY_PATH, want) {
        Ok(x) => sector_of(&x),
        Err(_) => USUAL_SECTOR,
    })
}

fn sector_of(x: &fs::Statx) -> usize {
    let align = x.stx_dio_mem_align.max(x.stx_dio_offset_align) as usize;
    // Zero: no O_DIRECT here.
    if x.stx_mask & StatxFlags::DIOALIGN.bits() == 0 || align == 0 {
        return USUAL_SECTOR;
    }
    align.max(LEAST_SECTOR).next_power_of_two()
}

/// The directory that a path's last name is in.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new(if path.has_root() { "/" } else { "." }),
    }
}

/// Makes a directory and its parents, each durable in its parent.
pub(super) fn create_dir_all(path: &Path) -> io::Result<()> {
    make_dirs(path, &|made| sync_dir(parent(made)))
}

/// See [`mojim_env::Env::close_dir`].
pub(super) fn close_dir(path: &Path) -> io::Result<()> {
    Ok(fs::chmod(path, CLOSED_DIR_MODE)?)
}

/// See [`mojim_env::Env::create_dirs`].
pub(super) fn create_dirs(path: &Path) -> io::Result<()> {
    make_dirs(path, &|_| Ok(()))
}

/// Makes a directory and its parents; `made` is called with each that was not there.
fn make_dirs(path: &Path, made: &dyn Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    match fs::mkdir(path, DIR_MODE) {
        Ok(()) => return made(path),
        Err(Errno::NOENT) if parent(path) != path => {}
        Err(e) => return existing_dir(path, e),
    }
    make_dirs(parent(path), made)?;
    match fs::mkdir(path, DIR_MODE) {
        Ok(()) => made(path),
        Err(e) => existing_dir(path, e),
    }
}

/// An existing directory is no error.
fn existing_dir(path: &Path, e: Errno) -> io::Result<()> {
    match fs::stat(path) {
        Ok(s) if FileType::from_raw_mode(s.st_mode).is_dir() => Ok(()),
        _ => Err(e.into()),
    }
}

/// `fsync` of a directory.
pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = open_fd(path, flags, Mode::empty())?;
    match fs::fsync(&fd) {
        // The file system has nothing to sync for directories.
        Err(Errno::INVAL) => Ok(()),
        other => Ok(other?),
    }
}

/// All regular files below `path`, sorted. Symbolic links are not followed.
pub(super) fn list(path: &Path) -> io::Result<Vec<PathBuf>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut found = Vec::new();
    let top = open_fd(path, flags, Mode::empty())?;
    list_into(top, Path::new(""), &mut found)?;
    found.sort();
    Ok(found)
}

fn list_into(dir: OwnedFd, below: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut entries = fs::Dir::new(dir)?;
    while let Some(entry) = entries.read() {
        let entry = entry?;
        let dir = entries.fd()?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let mut kind = entry.file_type();
        if kind == FileType::Unknown {
            kind = match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(s) => FileType::from_raw_mode(s.st_mode),
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(e.into()),
            };
        }
        let path = below.join(OsStr::from_bytes(name.to_bytes()));
        match kind {
            FileType::RegularFile => found.push(path),
            FileType::Directory => {
                match descriptors::open(|| fs::openat(dir, name, flags, Mode::empty())) {
                    Ok(sub) => list_into(sub, &path, found)?,
                    // Removed or replaced since it was listed.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// See [`mojim_env::FileSystem`].
#[derive(Debug)]
pub(super) struct WholeDisk {
    dir: OwnedFd,
    /// A file without a name that has its block, to be written to. None on a file system that
    /// empties the disk's cache itself, or writes to another block each time.
    probe: Option<OwnedFd>,
    device: u64,
}

/// The file systems whose `syncfs` tells of every write that failed: each of their inodes marks
/// the superblock that the descriptor of the directory belongs to. A stacked one has inodes of
/// others.
const TELL: [i64; 4] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
];

impl WholeDisk {
    pub(super) fn open(dir: &Path) -> io::Result<WholeDisk> {
        if !syncfs_tells() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = open_fd(dir, flags, Mode::empty())?;
        let kind = fs::fstatfs(&fd)?.f_type as i64;
        if !TELL.contains(&kind) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let needs = [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC].contains(&kind);
        let probe = needs.then(|| make_probe(dir));
        Ok(WholeDisk {
            probe: probe.transpose()?,
            device: fs::fstat(&fd)?.st_dev,
            dir: fd,
        })
    }
}

/// A file without a name. It has its block at once: later a disk without room would have none for
/// it, and a failed sync poisons the copy.
fn make_probe(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let probe = open_fd(dir, flags, FILE_MODE)?;
    rustix::io::pwrite(&probe, &[0; 8], 0)?;
    fs::fsync(&probe)?;
    Ok(probe)
}

impl FileSystem for WholeDisk {
    fn sync(&self) -> io::Result<()> {
        // Never retried, as with a file.
        fs::syncfs(&self.dir)?;
        // XFS empties the disk's cache with its log only: where no name and no size changed, it
        // may have nothing to write there. A sync of a file that was written to sees to it.
        let Some(probe) = &self.probe else {
            return Ok(());
        };
        match rustix::io::pwrite(probe, &[0; 8], 0) {
            // Nothing is lost by that, and `fsync` empties the cache also if nothing was written.
            Err(Errno::NOSPC | Errno::DQUOT) | Ok(_) => Ok(fs::fsync(probe)?),
            Err(e) => Err(e.into()),
        }
    }

    fn has_dir(&self, dir: &Path) -> bool {
        fs::stat(dir).is_ok_and(|s| s.st_dev == self.device)
    }

    fn has(&self, file: &dyn File) -> bool {
        let stat = file.fd().map(fs::fstat);
        matches!(stat, Some(Ok(s)) if s.st_dev == self.device)
    }
}

/// Whether this kernel's `syncfs` returns errors of writes: since Linux 5.8.
fn syncfs_tells() -> bool {
    // SAFETY: the kernel fills in what is passed, which is valid when zeroed.
    let mut u: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { libc::uname(&raw mut u) } != 0 {
        return false;
    }
    let release = u.release.iter().map(|c| *c as u8 as char);
    let release: String = release.take_while(|c| *c != '\0').collect();
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || parts.next().and_then(|n| n.parse::<u32>().ok());
    (number(), number()) >= (Some(5), Some(8))
}

/// The first bytes of a file, at most `most`.
pub(super) fn read_start(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = open_fd(path, flags, Mode::empty())?;
    read_start_of(&fd, most)
}

pub(super) fn read_start_of(fd: impl AsFd, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut len = 0;
    while len < most {
        match retry_on_intr(|| rustix::io::pread(&fd, &mut bytes[len..], len as u64))? {
            0 => break,
            n => len += n,
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Os;
    use mojim_env::Env;
    use std::alloc::Layout;
    use tempfile::TempDir;

    const RW: OpenHow = OpenHow {
        create: true,
        write: true,
        durable: false,
        plain: false,
    };

    /// Bytes at an address that is a multiple of `align`.
    struct Aligned(*mut u8, Layout);

    impl Aligned {
        fn new(len: usize, align: usize) -> Aligned {
            let layout = Layout::from_size_align(len, align).unwrap();
            // SAFETY: the size is not zero in these tests.
            Aligned(unsafe { std::alloc::alloc_zeroed(layout) }, layout)
        }
        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: allocated, zeroed, with this size, and borrowed from self.
            unsafe { std::slice::from_raw_parts_mut(self.0, self.1.size()) }
        }
    }

    impl Drop for Aligned {
        fn drop(&mut self) {
            // SAFETY: allocated with this layout.
            unsafe { std::alloc::dealloc(self.0, self.1) }
        }
    }

    /// A write to a durable file syncs what is needed to read it again, and no more.
    #[test]
    fn a_durable_file_has_o_dsync_and_not_o_sync() {
        let dir = TempDir::new().unwrap();
        let how = OpenHow {
            durable: true,
            ..RW
        };
        let f = DiskFile::open(&dir.path().join("f"), how).unwrap();
        let flags = fs::fcntl_getfl(&f.fd).unwrap().bits() as i32;
        assert_eq!(flags & libc::O_SYNC, libc::O_DSYNC);
    }

    #[test]
    fn files_read_write_grow_and_shrink() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("f");
        assert_eq!(
            os.open(&path, OpenHow::default()).err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
        let f = os.open(&path, RW).unwrap();
        assert!(f.is_empty().unwrap());
        f.write_at(b"hello", 3).unwrap();
        assert_eq!(f.len().unwrap(), 8);
        let mut buf = [9; 10];
        assert_eq!(f.read_at(&mut buf, 0).unwrap(), 8);
        assert_eq!(&buf[..8], b"\0\0\0hello");
        assert_eq!(f.read_at(&mut buf, 8).unwrap(), 0);
        f.sync().unwrap();
        f.set_len(4).unwrap();
        f.allocate(1 << 20).unwrap();
        assert_eq!(f.len().unwrap(), 4);
        let e = f.allocate(1 << 43).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::StorageFull);
        assert!(f.fd().is_some());

        let r = os.open(&path, OpenHow::default()).unwrap();
        assert_eq!(r.read_at(&mut buf, 0).unwrap(), 4);
        assert!(r.write_at(b"x", 0).is_err());

        os.rename(&path, &dir.path().join("g")).unwrap();
        os.sync_dir(dir.path()).unwrap();
        os.remove(&dir.path().join("g")).unwrap();
        assert_eq!(
            os.remove(&dir.path().join("g")).err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn data_is_found_behind_holes() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let f = os.open(&dir.path().join("f"), RW).unwrap();
        assert_eq!(f.next_data(0).unwrap(), None);
        f.set_len(4 << 20).unwrap();
        f.write_at(&[1], 2 << 20).unwrap();
        f.sync().unwrap();
        // Ranges may be larger than the data, but must cover it.
        let mut at = 0;
        let mut covered = false;
        while let Some(r) = f.next_data(at).unwrap() {
            assert!(r.start >= at && r.start < r.end);
            covered |= r.contains(&(2 << 20));
            at = r.end;
        }
        assert!(covered);
        assert_eq!(f.next_data(4 << 20).unwrap(), None);
    }

    #[test]
    fn durable_writes_by_the_sector() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("log");
        let sector = os.sector(&path).unwrap();
        assert_eq!(sector, os.sector(dir.path()).unwrap());
        assert!(sector.is_power_of_two() && sector >= 512);
        assert!(os.sector(&dir.path().join("not/there")).is_err());

        let f = os
            .open(
                &path,
                OpenHow {
                    durable: true,
                    ..RW
                },
            )
            .unwrap();
        assert_eq!(os.sector(&path).unwrap(), sector);
        let mut out = Aligned::new(2 * sector, sector);
        out.bytes()
            .iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = i as u8);
        f.write_at(out.bytes(), sector as u64).unwrap();
        assert_eq!(f.len().unwrap(), 3 * sector as u64);
        let mut back = Aligned::new(4 * sector, sector);
        assert_eq!(f.read_at(back.bytes(), 0).unwrap(), 3 * sector);
        assert_eq!(&back.bytes()[sector..3 * sector], out.bytes());

        // A file that ends inside a sector is read up to its end.
        f.set_len(2 * sector as u64 + 7).unwrap();
        assert_eq!(f.read_at(back.bytes(), 0).unwrap(), 2 * sector + 7);
        if let Err(e) = f.write_at(&out.bytes()[1..1 + sector], 0) {
            assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
            assert!(e.to_string().contains("multiples of the sector"), "{e}");
        }
    }

    #[test]
    fn a_file_system_without_direct_io_still_opens_durable() {
        let os = Os::new().unwrap();
        let path = PathBuf::from(format!("/dev/shm/mojim-test-{}", os.random()));
        let Ok(f) = os.open(
            &path,
            OpenHow {
                durable: true,
                ..RW
            },
        ) else {
            return; // No /dev/shm here.
        };
        let sector = os.sector(&path).unwrap();
        let mut out = Aligned::new(sector, sector);
        out.bytes().fill(7);
        f.write_at(out.bytes(), 0).unwrap();
        assert_eq!(f.len().unwrap(), sector as u64);
        os.remove(&path).unwrap();
    }

    /// The first sync took a block, which a full disk did not have: that poisoned the copy.
    #[test]
    fn a_file_that_is_written_to_with_each_sync_has_its_block_before() {
        let dir = TempDir::new().unwrap();
        match make_probe(dir.path()) {
            Ok(probe) => assert!(fs::fstat(&probe).unwrap().st_blocks > 0),
            // Not every file system has files without names.
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EOPNOTSUPP), "{e}"),
        }
        if let Ok(whole) = WholeDisk::open(dir.path()) {
            whole.sync().unwrap();
            assert!(whole.has_dir(dir.path()) && !whole.has_dir(Path::new("/proc")));
            assert!(!whole.has_dir(&dir.path().join("none")));
        }
    }

    #[test]
    fn lists_regular_files_only() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        os.create_dir_all(&dir.path().join("a/b/c")).unwrap();
        os.create_dir_all(&dir.path().join("a/b/c")).unwrap();
        for name in ["z", "a/y", "a/b/c/x"] {
            os.open(&dir.path().join(name), RW).unwrap();
        }
        assert!(os.create_dir_all(&dir.path().join("z/under")).is_err());
        assert!(os.create_dir_all(&dir.path().join("z")).is_err());
        fs::symlink("/", dir.path().join("a/link")).unwrap();
        fs::symlink("z", dir.path().join("zlink")).unwrap();
        let want: Vec<PathBuf> = ["a/b/c/x", "a/y", "z"].iter().map(PathBuf::from).collect();
        assert_eq!(os.list(dir.path()).unwrap(), want);
        assert_eq!(
            os.list(&dir.path().join("none")).err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn what_is_in_memory_is_read_at_once() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..40_000u32).map(|n| n as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = os.open(&path, OpenHow::DATA).unwrap();
        let mut out = vec![0; 50_000];
        // Beyond the end there is nothing, wherever that is.
        for (offset, len) in [
            (0, 40_000),
            (1, 39_999),
            (39_999, 1),
            (40_000, 0),
            (90_000, 0),
        ] {
            assert_eq!(file.read_at_once(&mut out, offset).unwrap(), len);
            assert!(out[..len] == bytes[40_000 - len..]);
        }
        assert_eq!(file.read_at_once(&mut [], 0).unwrap(), 0);
        // What the system may have taken out of memory is there, or would be waited for.
        file.sync().unwrap();
        fs::fadvise(file.fd().unwrap(), 0, None, fs::Advice::DontNeed).unwrap();
        match file.read_at_once(&mut out, 0) {
            Ok(len) => assert!(out[..len] == bytes),
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
        }
        assert_eq!(file.read_at(&mut out, 0).unwrap(), 40_000);
        assert!(out[..40_000] == bytes);
    }

    /// In a volume's directory a link was followed, to a file elsewhere, and a pipe waited for.
    #[test]
    fn only_a_plain_file_is_opened_as_a_data_file() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "kept").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("none"), at("dangling")).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        fs::mknodat(CWD, at("pipe"), FileType::Fifo, FILE_MODE, 0).unwrap();
        drop(std::os::unix::net::UnixListener::bind(at("socket")).unwrap());
        let how = |create, write| OpenHow {
            create,
            write,
            ..OpenHow::DATA
        };
        let kinds = [how(false, false), how(false, true), how(true, true)];
        let rows = [
            ("link", "symbolic link"),
            ("dangling", "symbolic link"),
            ("pipe", "pipe"),
            ("socket", "socket"),
            ("/dev/null", "device"),
        ];
        for how in kinds {
            for (name, what) in rows {
                let e = os.open(&at(name), how).err().expect(name);
                assert!(
                    NotPlain::is(&e) && e.to_string().contains(what),
                    "{name}: {e}"
                );
            }
            let e = os.open(&at("directory"), how).err().expect("a directory");
            assert_eq!(e.kind(), io::ErrorKind::IsADirectory);
            assert_eq!(os.open(&at("file"), how).unwrap().len().unwrap(), 4);
            let new = os.open(&at("new"), how);
            assert_eq!(new.is_ok(), how.create, "{how:?}");
        }
        assert!(!at("none").exists());
    }
}
