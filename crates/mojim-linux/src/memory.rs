//! Memory that processes share: by name, without a name, or persistent.
//!
//! Processes wait on a word of it, and survive a peer that cuts it off.
//!
//! Owns the mappings ([`Mapping`], the owner in every [`Memory`] made here)
//! and the process's SIGBUS handler, if it was asked for.
//!
//! Invariants:
//! - Memory made here has all its space reserved before it is mapped, except
//!   for anonymous memory, whose pages come when they are first touched.
//! - A file is never mapped by name in these cases, since another user could change its size or its
//!   bytes:
//!   - It is not ours.
//!   - It is reached through a symbolic link.
//!   - It lies where others can put another in its place.
//! - A file of the wrong length is replaced, never cut: a process that still maps the old
//!   one keeps it.
//! - Every mapping received from a peer is in [`GUARDED`] while it lives.

use super::disk::{allocate, parent, sync_dir};
use super::error;
use super::trust;
use mojim_env::{Memory, descriptors};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, FallocateFlags, FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::{OsStr, c_void};
use std::io;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

const FILE_MODE: Mode = Mode::from_raw_mode(0o600);

/// A mapped file; unmapped when dropped. It is the owner in a [`Memory`] of this
/// environment.
#[derive(Debug)]
pub struct Mapping {
    addr: *mut u8,
    len: usize,
    fd: OwnedFd,
    /// Whether a peer gets it writable from `send_memory`.
    pass_writable: bool,
    guard: Option<Guard>,
}

// SAFETY: a mapping belongs to the process, not to a thread; this type never
// reads or writes through `addr`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Flags of a mapping whose pages are all there from the start, so that no
/// sync point pays for a page fault; but not of one that is very large.
fn filled(len: usize) -> MapFlags {
    if len <= 1 << 30 {
        MapFlags::SHARED | MapFlags::POPULATE
    } else {
        MapFlags::SHARED
    }
}

impl Mapping {
    /// Maps all of `fd`, which has `len` bytes.
    fn new(fd: OwnedFd, len: usize, write: bool, flags: MapFlags) -> io::Result<Mapping> {
        if len == 0 {
            return Err(error(io::ErrorKind::InvalidInput, "memory of no bytes"));
        }
        let prot = if write {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches
        // no existing memory.
        let addr = unsafe { mm::mmap(ptr::null_mut(), len, prot, flags, &fd, 0) }?;
        Ok(Mapping {
            addr: addr.cast(),
            len,
            fd,
            pass_writable: false,
            guard: None,
        })
    }

    /// Maps a file that has all its pages, `len` bytes, to be written.
    pub(super) fn of_file(fd: OwnedFd, len: usize) -> io::Result<Memory> {
        let mapped = Mapping::new(fd, len, true, filled(len))?;
        mapped.leave_out_of_dumps();
        Ok(mapped.into_memory())
    }

    /// Keeps it out of core dumps: records are the bytes of the volume.
    fn leave_out_of_dumps(&self) {
        // SAFETY: the mapping is our own, and its bytes stay as they are.
        let done = unsafe { mm::madvise(self.addr.cast(), self.len, mm::Advice::LinuxDontDump) };
        // A kernel without it dumps more.
        let _ = done;
    }

    /// The descriptor of the file that is mapped.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Hands itself over as the owner of its memory.
    fn into_memory(self) -> Memory {
        let (addr, len) = (self.addr, self.len);
        // SAFETY: mapped until the mapping is dropped, which owns itself alone.
        unsafe { Memory::new(addr, len, Arc::new(self)) }
    }

    /// A descriptor for the peer.
    fn passable(&self) -> io::Result<OwnedFd> {
        if self.pass_writable {
            return Ok(descriptors::duplicate(&self.fd)?);
        }
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(descriptors::open(|| {
            retry_on_intr(|| fs::open(&path, flags, Mode::empty()))
        })?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Out of the table first: after the unmap these addresses may be another
        // mapping's.
        self.guard = None;
        // SAFETY: our own mapping, and by the contract of `Memory` nothing
        // uses it after its owner was dropped.
        let done = unsafe { mm::munmap(self.addr.cast(), self.len) };
        debug_assert_eq!(done, Ok(()));
    }
}

/// Bytes that are populated by one call: short enough that a page fault beside
/// it does not wait for long.
const POPULATE_STEP: usize = 256 << 10;

/// See [`mojim_env::Env::populate`]. If it fails, pages come when they are touched. Between its steps,
/// which may be long with its priority, it does not keep the memory.
pub(super) fn populate(memory: &Memory) {
    let (memory, len) = (memory.weak(), memory.len());
    let _quiet = mojim_env::threads::SignalsWait::begin_but_faults();
    // No thread has the same effect as a failure.
    let _ = mojim_env::threads::start("mojim-populate", move || {
        mojim_env::threads::yield_to_others();
        for at in (0..len).step_by(POPULATE_STEP) {
            let n = POPULATE_STEP.min(len - at);
            let Some(memory) = memory() else { return };
            // SAFETY: inside memory that stays mapped as long as `memory`
            // lives; populating changes no byte of it.
            let done = unsafe {
                mm::madvise(
                    memory.ptr().add(at).cast(),
                    n,
                    mm::Advice::LinuxPopulateWrite,
                )
            };
            if done.is_err() {
                return;
            }
        }
    });
}

/// See [`mojim_env::Env::memory`]. Two callers that make the same name anew at the same
/// time may get different memory, so callers hold a lock.
pub(super) fn named(path: &Path, len: usize) -> io::Result<Memory> {
    let place = DirectoryEntry::of(path)?;
    let (fd, made) = match place.open_ours()? {
        Some((fd, old)) if old == len as u64 => (fd, false),
        Some(_) => {
            place.unlink()?;
            (place.make(len)?, true)
        }
        None => (place.make(len)?, true),
    };
    let mapped =
        reserve(&fd, path, len).and_then(|()| Mapping::new(fd, len, true, MapFlags::SHARED));
    if mapped.is_err() && made {
        let _ = place.unlink();
    }
    let mapped = mapped?;
    mapped.leave_out_of_dumps();
    Ok(mapped.into_memory())
}

/// See [`mojim_env::Env::anonymous_memory`].
pub(super) fn anonymous(len: usize) -> io::Result<Memory> {
    let sealable = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = |flags| descriptors::open(|| fs::memfd_create("mojim", flags));
    let fd = match memfd(sealable | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3.
        Err(Errno::INVAL) => memfd(sealable),
        other => other,
    }?;
    check_size(len)?;
    fs::ftruncate(&fd, len as u64)?;
    fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mut mapping = Mapping::new(fd, len, true, filled(len))?;
    mapping.pass_writable = true;
    Ok(mapping.into_memory())
}

/// See [`mojim_env::Env::persistent_memory`]. A file that is there with
/// another length is refused: unlike memory that ends with the power, it may
/// hold the only copy of something.
pub(super) fn persistent(path: &Path, len: usize) -> io::Result<Memory> {
    let place = DirectoryEntry::of(path)?;
    let (fd, made) = match place.open_ours()? {
        Some((fd, old)) if old == len as u64 => (fd, false),
        // Made, but not completed, by a process that died.
        Some((fd, 0)) => {
            fs::ftruncate(&fd, len as u64)?;
            (fd, true)
        }
        Some((_, old)) => {
            return Err(error(
                io::ErrorKind::InvalidInput,
                format!(
                    "{}: has {old} bytes, not {len}; remove it to have it made anew",
                    path.display()
                ),
            ));
        }
        None => (place.make(len)?, true),
    };
    let mapped = reserve(&fd, path, len).and_then(|()| {
        if made {
            fs::fsync(&fd)?;
            sync_dir(parent(path))?;
        }
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        Mapping::new(fd, len, true, flags).map_err(|e| match e.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EINVAL) => error(
                io::ErrorKind::Unsupported,
                format!(
                    "{}: not persistent memory: the file system does not map it with MAP_SYNC \
                     (it must be on DAX); use another medium than pmem",
                    path.display()
                ),
            ),
            _ => e,
        })
    });
    if mapped.is_err() && made {
        let _ = place.unlink();
    }
    Ok(mapped?.into_memory())
}

/// Refuses a size above the process's limit, for which the kernel would send a signal.
fn check_size(len: usize) -> io::Result<()> {
    match len as u64 > super::disk::file_size_limit() {
        true => Err(Errno::FBIG.into()),
        false => Ok(()),
    }
}

/// A name in a directory that nobody else can change.
struct DirectoryEntry<'a> {
    path: &'a Path,
    dir: OwnedFd,
    name: &'a OsStr,
}

impl DirectoryEntry<'_> {
    /// Makes the directory, and those above it, where they are missing.
    fn of(path: &Path) -> io::Result<DirectoryEntry<'_>> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let dir = trust::directory(parent(path), true)?.ok_or(Errno::NOENT)?;
        Ok(DirectoryEntry { path, dir, name })
    }

    /// Opens what is there, if it is a file of ours, and tells its length.
    fn open_ours(&self) -> io::Result<Option<(OwnedFd, u64)>> {
        let refuse = |why: &str| {
            Err(error(
                io::ErrorKind::PermissionDenied,
                format!("{}: {why}", self.path.display()),
            ))
        };
        // NONBLOCK: opening something other than a file must not wait.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let open = || fs::openat(&self.dir, self.name, flags, Mode::empty());
        let fd = match descriptors::open(|| retry_on_intr(open)) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return refuse("is a symbolic link; shared memory must be a file"),
            Err(e) => return Err(e.into()),
        };
        let s = fs::fstat(&fd)?;
        if !FileType::from_raw_mode(s.st_mode).is_file() {
            return refuse("is not a regular file");
        }
        if s.st_uid != rustix::process::geteuid().as_raw() {
            return refuse(&format!(
                "belongs to user {}, not to this process's",
                s.st_uid
            ));
        }
        if s.st_mode & 0o022 != 0 {
            return refuse(&format!(
                "others may write to it (mode {:o})",
                s.st_mode & 0o7777
            ));
        }
        Ok(Some((fd, s.st_size as u64)))
    }

    /// Makes a new file of `len` zero bytes.
    fn make(&self, len: usize) -> io::Result<OwnedFd> {
        check_size(len)?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || fs::openat(&self.dir, self.name, flags, FILE_MODE);
        let fd = descriptors::open(|| retry_on_intr(open))?;
        if let Err(e) = retry_on_intr(|| fs::ftruncate(&fd, len as u64)) {
            let _ = self.unlink();
            return Err(e.into());
        }
        Ok(fd)
    }

    fn unlink(&self) -> io::Result<()> {
        Ok(fs::unlinkat(&self.dir, self.name, AtFlags::empty())?)
    }
}

/// Has the file system set the space aside, so that no store ends in SIGBUS.
fn reserve(fd: &OwnedFd, path: &Path, len: usize) -> io::Result<()> {
    // A file that has all its blocks is left alone: in a memory file system a second
    // fallocate would look at each page.
    if fs::fstat(fd)?.st_blocks as u64 * 512 >= len as u64 {
        return Ok(());
    }
    allocate(fd, FallocateFlags::empty(), len as u64).map_err(|e| {
        let advice = match e.kind() {
            io::ErrorKind::StorageFull => {
                ". Make this file system larger, the node's `log.size` smaller, or have its `ring` or `log.path` elsewhere; `mojim clean` removes what nobody uses there"
            }
            _ => "",
        };
        error(e.kind(), format!("{}: {e}{advice}", path.display()))
    })
}

/// The descriptor to pass for a memory of this environment. Anonymous memory
/// goes out writable; named and persistent memory, and memory that was itself
/// received, goes out through a descriptor that is open for reading only, so
/// the peer cannot map it writable with it. (A process of the same user can
/// always open a named file itself.)
pub(super) fn passable(memory: &Memory) -> io::Result<OwnedFd> {
    match memory.owner().downcast_ref::<Mapping>() {
        Some(m) if m.addr == memory.ptr() && m.len == memory.len() => m.passable(),
        _ => Err(error(
            io::ErrorKind::InvalidInput,
            "only a whole memory of this environment can be passed",
        )),
    }
}

/// Maps what a peer passed, if it has exactly `len` bytes.
pub(super) fn received(fd: OwnedFd, len: usize, write: bool) -> io::Result<Memory> {
    let s = fs::fstat(&fd)?;
    if !FileType::from_raw_mode(s.st_mode).is_file() || s.st_size as u64 != len as u64 {
        return Err(error(
            io::ErrorKind::InvalidData,
            format!(
                "the peer passed memory of {} bytes instead of {len}",
                s.st_size
            ),
        ));
    }
    let mut mapping = Mapping::new(fd, len, write, filled(len))?;
    mapping.guard = Some(Guard::add(mapping.addr, len, write).ok_or_else(|| {
        error(
            io::ErrorKind::QuotaExceeded,
            format!("more than {} memories received and in use", GUARDED.len()),
        )
    })?);
    Ok(mapping.into_memory())
}

/// A range of addresses where SIGBUS means that a peer cut off its memory.
/// `start` is [`FREE`], [`TAKEN`] while the rest is being filled in, or the
/// first address.
struct Guarded {
    start: AtomicUsize,
    end: AtomicUsize,
    write: AtomicBool,
}

const FREE: usize = 0;
const TAKEN: usize = 1;

static GUARDED: [Guarded; 256] = [const {
    Guarded {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        write: AtomicBool::new(false),
    }
}; 256];

/// An entry of [`GUARDED`], freed when dropped.
#[derive(Debug)]
struct Guard(usize);

impl Guard {
    fn add(addr: *mut u8, len: usize, write: bool) -> Option<Guard> {
        let free = |g: &Guarded| {
            g.start
                .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        let index = GUARDED.iter().position(free)?;
        let slot = &GUARDED[index];
        let page = rustix::param::page_size();
        slot.end.store(
            (addr as usize + len).next_multiple_of(page),
            Ordering::Relaxed,
        );
        slot.write.store(write, Ordering::Relaxed);
        slot.start.store(addr as usize, Ordering::Release);
        Some(Guard(index))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDED[self.0].start.store(FREE, Ordering::Release);
    }
}

/// What the handler needs; complete before the handler is installed.
struct Installed {
    page: usize,
    previous: libc::sigaction,
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();
static INSTALL: std::sync::Once = std::sync::Once::new();

/// Keeps this process alive when a peer cuts off memory that it passed to us.
///
/// Touching a page behind the end of a shared file raises SIGBUS. For such
/// pages of received memory the handler puts a page of zeros in place of the
/// missing one, for good: what is read there then fails its checksum. A store
/// goes nowhere. (In a system call the same access is EFAULT, with or without
/// this.) Any other SIGBUS goes to the handler that was there before.
///
/// The handler is installed once in a process; later calls do nothing, also
/// if somebody replaced it in the meantime.
pub fn guard_sigbus() {
    INSTALL.call_once(|| {
        // SAFETY: zeros are a valid sigaction; the first call only reads. What the second installs
        // is async-signal-safe (see there), has SA_SIGINFO's signature, and all that it needs.
        unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            let done = libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous);
            assert_eq!(done, 0, "sigaction: {}", io::Error::last_os_error());
            let mut ours: libc::sigaction = std::mem::zeroed();
            // As the previous handler had it, since it may run inside ours.
            ours.sa_mask = previous.sa_mask;
            ours.sa_flags = libc::SA_SIGINFO
                | libc::SA_ONSTACK
                | previous.sa_flags & (libc::SA_NODEFER | libc::SA_RESTART);
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
            ours.sa_sigaction = handler as usize;
            let _ = INSTALLED.set(Installed {
                page: rustix::param::page_size(),
                previous,
            });
            let done = libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut());
            assert_eq!(done, 0, "sigaction: {}", io::Error::last_os_error());
        }
    });
}

/// Async-signal-safe: atomics, raw system calls that leave errno alone, and
/// functions that POSIX lists. No allocation, no lock.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(installed) = INSTALLED.get() else {
        return;
    };
    // SAFETY: the kernel passes a valid siginfo; for a SIGBUS of the kernel's
    // own (code above 0), it has an address.
    let fault = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr() as usize) };
    if let Some(addr) = fault
        && replace_page(addr, installed.page)
    {
        return;
    }
    let previous = &installed.previous;
    match previous.sa_sigaction {
        libc::SIG_IGN if fault.is_none() => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: sigaction and raise are async-signal-safe. The signal
            // comes again, when the access is repeated or, if there was none,
            // when it is unblocked on return, and ends the process.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                if fault.is_none() {
                    libc::raise(signal);
                }
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: it was installed with SA_SIGINFO, so this is its type.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: it was installed without SA_SIGINFO, so this is its type.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

/// Maps zeros over the page of `addr` if it is in a received memory.
fn replace_page(addr: usize, page: usize) -> bool {
    for slot in &GUARDED {
        let start = slot.start.load(Ordering::Acquire);
        if start == FREE || start == TAKEN || addr < start {
            continue;
        }
        let end = slot.end.load(Ordering::Acquire);
        let write = slot.write.load(Ordering::Acquire);
        // Looked at again, in case the slot has changed hands.
        if addr >= end || slot.start.load(Ordering::Relaxed) != start {
            continue;
        }
        let at = (addr & !(page - 1)) as *mut c_void;
        let prot = if write {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: the page is in a mapping that we made, whose users expect
        // its bytes to change at any time; the file behind it is gone there.
        let done =
            unsafe { mm::mmap_anonymous(at, page, prot, MapFlags::PRIVATE | MapFlags::FIXED) };
        return done.is_ok();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use super::*;
    use crate::Os;
    use mojim_env::Env;
    use mojim_env::futex::{futex_wait, futex_wake};
    use tempfile::TempDir;

    fn get(m: &Memory, at: usize) -> u8 {
        assert!(at < m.len());
        // SAFETY: in the memory, which nobody writes at this moment.
        unsafe { m.ptr().add(at).read_volatile() }
    }

    fn set(m: &Memory, at: usize, value: u8) {
        assert!(at < m.len());
        // SAFETY: in the memory, which nobody else uses at this moment.
        unsafe { m.ptr().add(at).write_volatile(value) }
    }

    #[test]
    fn named_memory_stays_until_its_length_changes() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("a/b/ring");
        let len = 3 * rustix::param::page_size() + 5;
        let m = os.memory(&path, len).unwrap();
        assert_eq!(m.len(), len);
        assert_eq!(fs::stat(&path).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(get(&m, len - 1), 0);
        set(&m, len - 1, 7);
        let again = os.memory(&path, len).unwrap();
        assert_eq!(get(&again, len - 1), 7);
        drop((m, again));
        let old = os.memory(&path, len).unwrap();
        assert_eq!(get(&old, len - 1), 7);
        let other = os.memory(&path, len - 1).unwrap();
        assert!((0..other.len()).all(|i| get(&other, i) == 0));
        // The old mapping keeps its bytes.
        assert_eq!(get(&old, len - 1), 7);
        os.remove_memory(&path).unwrap();
        assert_eq!(get(&os.memory(&path, len).unwrap(), len - 1), 0);
        assert_eq!(
            os.memory(&path, 0).err().unwrap().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn named_memory_refuses_what_is_not_ours() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        os.memory(&dir.path().join("real"), 10).unwrap();
        fs::symlink("real", dir.path().join("link")).unwrap();
        let refused = |name: &str, why: &str| {
            let e = os.memory(&dir.path().join(name), 10).err().unwrap();
            assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
            assert!(e.to_string().contains(why), "{e}");
        };
        refused("link", "symbolic link");
        fs::chmod(dir.path().join("real"), Mode::from_raw_mode(0o666)).unwrap();
        refused("real", "others may write");
        fs::chmod(dir.path().join("real"), FILE_MODE).unwrap();
        if fs::chown(
            dir.path().join("real"),
            Some(fs::Uid::from_raw(12345)),
            None,
        )
        .is_ok()
        {
            refused("real", "user 12345");
        }
    }

    #[test]
    fn what_there_is_no_space_for_is_refused_at_once() {
        let dir = TempDir::new().unwrap();
        let e = Os::new()
            .unwrap()
            .memory(&dir.path().join("big"), 1 << 43)
            .err()
            .unwrap();
        assert_eq!(e.kind(), io::ErrorKind::StorageFull, "{e}");
        assert_eq!(fs::stat(dir.path().join("big")).err(), Some(Errno::NOENT));
    }

    #[test]
    fn anonymous_memory_keeps_its_size() {
        let m = Os::new().unwrap().anonymous_memory(5000).unwrap();
        set(&m, 4999, 1);
        assert_eq!(get(&m, 4999), 1);
        let fd = m.owner().downcast_ref::<Mapping>().unwrap().fd();
        assert_eq!(fs::ftruncate(fd, 0), Err(Errno::PERM));
        assert_eq!(fs::ftruncate(fd, 10000), Err(Errno::PERM));
    }

    #[test]
    fn persistent_memory_is_refused_where_there_is_none() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let path = dir.path().join("pmem");
        match os.persistent_memory(&path, 10000) {
            Ok(m) => {
                // This test runs on DAX.
                set(&m, 9999, 1);
                os.flush(&m, 9999, 1);
                assert!(os.persistent_memory(&path, 10).is_err());
            }
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::Unsupported);
                assert!(e.to_string().contains("DAX"), "{e}");
                assert_eq!(fs::stat(&path).err(), Some(Errno::NOENT));
            }
        }
        std::fs::write(&path, b"precious").unwrap();
        assert!(os.persistent_memory(&path, 10).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_descriptor_passed_for_reading_cannot_be_mapped_writable() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let m = os.memory(&dir.path().join("ring"), 100).unwrap();
        set(&m, 3, 9);
        let e = received(passable(&m).unwrap(), 100, true).err().unwrap();
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied);
        let view = received(passable(&m).unwrap(), 100, false).unwrap();
        assert_eq!(get(&view, 3), 9);
        // Nor what was received for reading, when it is passed on.
        assert!(received(passable(&view).unwrap(), 100, true).is_err());
        assert!(received(passable(&m).unwrap(), 99, false).is_err());

        let shared = os.anonymous_memory(100).unwrap();
        let theirs = received(passable(&shared).unwrap(), 100, true).unwrap();
        set(&theirs, 3, 8);
        assert_eq!(get(&shared, 3), 8);
    }

    #[test]
    fn memory_cut_off_by_the_peer_reads_as_zeros() {
        guard_sigbus();
        guard_sigbus();
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let page = rustix::param::page_size();
        let m = os.memory(&dir.path().join("ring"), 3 * page).unwrap();
        (0..3 * page).for_each(|i| set(&m, i, 1));
        let view = received(passable(&m).unwrap(), 3 * page, false).unwrap();
        let theirs = os.anonymous_memory(page).unwrap();
        let writable = received(passable(&theirs).unwrap(), page, true).unwrap();
        let fd = m.owner().downcast_ref::<Mapping>().unwrap().fd();
        fs::ftruncate(fd, page as u64).unwrap();
        assert_eq!(get(&view, page - 1), 1);
        assert_eq!(get(&view, page), 0);
        assert_eq!(get(&view, 3 * page - 1), 0);
        set(&writable, 0, 5);
        assert_eq!(get(&theirs, 0), 5);
        drop(view);
        assert_eq!(get(&m, 0), 1);
    }

    const HELPER: &str = "MOJIM_TEST_SIGBUS";

    /// Not a test by itself: dies of SIGBUS in the test below.
    #[test]
    fn helper_process() {
        let Some(path) = std::env::var_os(HELPER) else {
            return;
        };
        guard_sigbus();
        let m = Os::new().unwrap().memory(Path::new(&path), 100).unwrap();
        fs::ftruncate(m.owner().downcast_ref::<Mapping>().unwrap().fd(), 0).unwrap();
        get(&m, 0);
    }

    #[test]
    fn other_faults_still_end_the_process() {
        use std::os::unix::process::ExitStatusExt;
        let dir = TempDir::new().unwrap();
        let name = module_path!().split_once("::").unwrap().1;
        let out = std::process::Command::new(std::env::current_exe().unwrap())
            .args([&format!("{name}::helper_process"), "--exact"])
            .env(HELPER, dir.path().join("m"))
            .output()
            .unwrap();
        // Rust's own handler, which is the previous one here, hands on too.
        assert_eq!(out.status.signal(), Some(libc::SIGBUS), "{out:?}");
    }

    #[test]
    fn futex_wakes_across_mappings() {
        let dir = TempDir::new().unwrap();
        let os = Os::new().unwrap();
        let a = os.memory(&dir.path().join("word"), 4).unwrap();
        let b = received(passable(&a).unwrap(), 4, false).unwrap();
        // SAFETY: mapped, aligned, and only used as atomics.
        let (wa, wb) = unsafe { (&*a.ptr().cast::<AtomicU32>(), &*b.ptr().cast::<AtomicU32>()) };
        assert!(
            futex_wait(wb, 1, Duration::from_secs(60)),
            "the word is not 1"
        );
        assert!(!futex_wait(wb, 0, Duration::from_millis(1)), "nobody wakes");
        std::thread::scope(|s| {
            s.spawn(|| {
                while wb.load(Ordering::Acquire) == 0 {
                    futex_wait(wb, 0, Duration::from_secs(60));
                }
            });
            wa.store(1, Ordering::Release);
            futex_wake(wa, i32::MAX);
        });
    }
}
