//! The shared working copy: memory that all mappings of a file show.
//!
//! Owns the memory (a memfd) of one file of a volume, the engine's own mapping
//! of it, and which windows show parts of it. A window is a mapping that a program asked for,
//! with dirty tracking of its own. Stores through any window are seen by
//! all, as POSIX promises of MAP_SHARED. A sync point finds them all.
//!
//! Invariants:
//!
//! - The memory has every byte of the file, from the moment it is made. It never
//!   becomes shorter (sealed), so that reading it cannot give SIGBUS.
//! - A page that was stored to since it was last collected is marked, or known to a tracker: that
//!   of the window it was stored through.
//! - A window that goes leaves what its tracker knew as marks.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::Resource;

use crate::available;
use crate::places;
use crate::region::{MapOptions, WorkingCopy, attach_tracker, clip, kind_of};
use crate::track::{Marks, Tracker, unite};
use mojim_config::TrackerKind;
use mojim_env::locks;
use mojim_env::{Context, Error, File, Result, descriptors};

/// Address space that a shared file gets, so that it can grow in place, if the
/// process's address space is not limited: this much, or `GROWTH` times the file's
/// size if that is more.
const LEAST_CAPACITY: usize = 16 << 30;
const GROWTH: usize = 4;
/// How many times its size a file gets if the address space is limited, or if the
/// larger reservation fails.
const LEAST_GROWTH: usize = 2;
/// Bytes read from the data file at once.
const PIECE: usize = 1 << 20;

/// The memory of one file that all mappings of it share.
pub struct Shared {
    memory: OwnedFd,
    base: *mut u8,
    capacity: usize,
    /// The file's size.
    size: AtomicUsize,
    windows: RwLock<Windows>,
    marks: Marks,
}

// SAFETY: the engine's mapping stays until this is dropped; the program's stores
// into it are its business, ours are those of a rollback.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

#[derive(Default)]
struct Windows {
    all: Vec<Window>,
    last: u64,
}

struct Window {
    id: u64,
    /// Where in the file it begins, and its length; both are multiples of a page.
    at: usize,
    len: usize,
    /// `None`: the window allows no stores.
    tracker: Option<Box<dyn Tracker>>,
    /// The window's address, if it is in this process.
    base: Option<usize>,
}

impl Window {
    /// The part of `range` of the file that the window shows, relative to the
    /// window.
    fn part(&self, range: &Range<usize>) -> Range<usize> {
        let from = range.start.clamp(self.at, self.at + self.len);
        let to = range.end.clamp(from, self.at + self.len);
        from - self.at..to - self.at
    }

    /// Appends the parts of `range` of the file that were stored to through the
    /// window.
    fn collect(
        &self,
        range: &Range<usize>,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> Result<()> {
        let part = self.part(range);
        let Some(tracker) = self.tracker.as_ref().filter(|_| !part.is_empty()) else {
            return Ok(());
        };
        let from = out.len();
        tracker
            .collect(part.start, part.end, rearm, out)
            .map_err(|e| Error::io("finding changed pages", &e))?;
        for found in &mut out[from..] {
            *found = found.start + self.at..found.end + self.at;
        }
        Ok(())
    }
}

impl Shared {
    /// Makes the memory, with the bytes of a data file that has `size` of them and
    /// every record that wrote to it, and with address space for `end` bytes or
    /// more.
    ///
    /// # Errors
    /// ENOMEM if the bytes do not fit into half of the memory that is free.
    pub fn fill(file: &Arc<dyn File>, size: u64, end: u64) -> Result<Shared> {
        let what = || "memory for a shared working copy".to_owned();
        let too_large = || Error::Invalid(format!("{}: {} bytes", what(), size.max(end)));
        let most = usize::try_from(size.max(end)).ok();
        let most = most
            .filter(|m| m.checked_mul(GROWTH * 2).is_some())
            .ok_or_else(too_large)?;
        let size = size as usize;
        // No file of this process may be larger: a write beyond is a signal.
        let limit = rustix::process::getrlimit(Resource::Fsize).current;
        if limit.is_some_and(|limit| most as u64 > limit) {
            return Err(Error::io(what(), &rustix::io::Errno::FBIG.into()));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = descriptors::open(|| rustix::fs::memfd_create("mojim-working-copy", flags))
            .map_err(std::io::Error::from)
            .context(what)?;
        rustix::fs::ftruncate(&memory, size as u64)
            .and_then(|()| {
                rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::SEAL)
            })
            .map_err(std::io::Error::from)
            .context(what)?;
        let page = rustix::param::page_size();
        let short = rustix::process::getrlimit(Resource::As).current.is_some();
        let [usual, least] = [
            (most * GROWTH).max(LEAST_CAPACITY),
            (most * LEAST_GROWTH).max(page),
        ]
        .map(|n| n.next_multiple_of(page));
        let map = |capacity| {
            // SAFETY: a new mapping, at an address that the kernel chooses.
            unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    capacity,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::NORESERVE,
                    &memory,
                    0,
                )
            }
        };
        let reserve = |capacity| map(capacity).map(|base| (base, capacity));
        // One only: each is address space.
        let mapped = match short {
            true => reserve(least),
            false => reserve(usual).or_else(|_| reserve(least)),
        };
        let (base, capacity) = mapped.map_err(std::io::Error::from).context(what)?;
        let shared = Shared {
            memory,
            base: base.cast(),
            capacity,
            size: AtomicUsize::new(size),
            windows: RwLock::default(),
            marks: Marks::default(),
        };
        // SAFETY: our own mapping; its addresses would fill a core dump.
        let _ = unsafe { rustix::mm::madvise(base, capacity, Advice::LinuxDontDump) };
        shared.load(file, size)?;
        Ok(shared)
    }

    /// Reads the data file's bytes; of a sparse file, only the parts that are not
    /// holes.
    fn load(&self, file: &Arc<dyn File>, size: usize) -> Result<()> {
        let parts = match file.fd() {
            Some(fd) => parts_of(fd, size),
            None => std::iter::once(0..size).collect(),
        };
        let bytes: u64 = parts.iter().map(|p| p.len() as u64).sum();
        // The program needs memory too.
        let room = available::memory().map(|free| free / 2);
        if let Some(room) = room.filter(|room| bytes > *room) {
            let enomem = std::io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(Error::io(
                format!(
                    "a shared working copy has all {bytes} bytes of the file in memory, and may take {room} of what is free now, the half; with working = \"private\" it needs only what is stored to"
                ),
                &enomem,
            ));
        }
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                let len = PIECE.min(part.end - at);
                // SAFETY: inside the file's part of the mapping, which nobody
                // else has yet.
                let bytes = unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) };
                let got = file
                    .read_at(bytes, at as u64)
                    .context(|| "filling a shared working copy".into())?;
                if got == 0 {
                    break;
                }
                at += got;
            }
        }
        Ok(())
    }

    fn windows(&self) -> RwLockReadGuard<'_, Windows> {
        locks::read(&self.windows)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Windows> {
        locks::write(&self.windows)
    }

    /// The memory, for other processes to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// A number that identifies the memory on this machine.
    pub fn identity(&self) -> Result<u64> {
        identity(self.fd())
    }

    /// How far the file can grow, in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether there is no window.
    pub fn is_unused(&self) -> bool {
        self.windows().all.is_empty()
    }

    /// A new window in this process: its number, and where it is.
    pub fn open(&self, len: usize, o: MapOptions, kind: TrackerKind) -> Result<(u64, *mut u8)> {
        let mapped = len.next_multiple_of(rustix::param::page_size());
        let mut prot = ProtFlags::READ;
        if o.write {
            prot |= ProtFlags::WRITE;
        }
        let mut flags = MapFlags::SHARED | MapFlags::NORESERVE;
        if o.fixed {
            flags |= MapFlags::FIXED;
        }
        let hint = o.at.unwrap_or(0) as *mut std::ffi::c_void;
        // SAFETY: a new mapping; with `fixed` at addresses that the caller has claimed.
        let base = unsafe { rustix::mm::mmap(hint, mapped, prot, flags, &self.memory, o.offset) }
            .map_err(std::io::Error::from)
            .context(|| format!("mapping {len} bytes"))?
            .cast::<u8>();
        let kind = kind_of(kind);
        let tracker = match o.write {
            // SAFETY: the mapping was just made, and stays until `close`, which
            // drops the tracker first.
            true => Some(unsafe { attach_tracker(base, mapped, kind, None, o.fixed, false)? }),
            false => None,
        };
        if !o.fixed {
            places::add(base as usize, mapped);
        }
        let id = self.add(Window {
            id: 0,
            at: o.offset as usize,
            len: mapped,
            tracker,
            base: Some(base as usize),
        });
        Ok((id, base))
    }

    fn add(&self, window: Window) -> u64 {
        let mut windows = self.change();
        windows.last += 1;
        let id = windows.last;
        windows.all.push(Window { id, ..window });
        id
    }

    /// Adds a window of another process: `len` bytes of the file from `at` on, both
    /// multiples of a page. Returns its number.
    pub fn watch(&self, at: usize, len: usize, tracker: Option<Box<dyn Tracker>>) -> u64 {
        self.add(Window {
            id: 0,
            at,
            len,
            tracker,
            base: None,
        })
    }

    /// Removes a window. What was stored through it stays, and counts as changed:
    /// what its tracker reports, or all of the window if the tracker's state is
    /// `lost`.
    pub fn forget(&self, id: u64, lost: bool) -> Result<()> {
        let mut windows = self.change();
        let Some(i) = windows.all.iter().position(|w| w.id == id) else {
            return Ok(());
        };
        let window = windows.all.remove(i);
        let all = window.at..window.at + window.len;
        let mut found = Vec::new();
        if window.tracker.is_some() {
            let known = !lost && window.collect(&all, false, &mut found).is_ok();
            if !known {
                found = vec![all];
            }
        }
        found.into_iter().for_each(|part| self.marks.add(part));
        drop(window.tracker);
        if let Some(base) = window.base {
            // SAFETY: the window's mapping; the program gave it back.
            unsafe { places::unmap(base, window.len)? };
        }
        Ok(())
    }

    /// Appends the parts of `range`, which is whole pages, that were stored to
    /// through any window, or are marked.
    fn find(
        &self,
        windows: &Windows,
        range: Range<usize>,
        rearm: bool,
        out: &mut Vec<Range<usize>>,
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let from = out.len();
        for window in &windows.all {
            if let Err(e) = window.collect(&range, rearm, out) {
                out.truncate(from);
                if rearm {
                    // Some may be protected again without having been reported.
                    self.marks.add(range);
                }
                return Err(e);
            }
        }
        self.marks.report(range, rearm, out, from);
        if out.len() > from && windows.all.len() > 1 {
            unite(out, from);
        }
        Ok(())
    }
}

/// A number that identifies the memory behind a descriptor.
pub fn identity(memory: BorrowedFd<'_>) -> Result<u64> {
    let stat = rustix::fs::fstat(memory).map_err(std::io::Error::from);
    Ok(stat
        .context(|| "memory for a shared working copy".into())?
        .st_ino)
}

/// The parts of a file's first `size` bytes that are not holes.
fn parts_of(fd: BorrowedFd<'_>, size: usize) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < size {
        let from = match rustix::fs::seek(fd, SeekFrom::Data(at as u64)) {
            Ok(from) => from as usize,
            // Nothing but a hole follows.
            Err(rustix::io::Errno::NXIO) => break,
            // The file system does not tell.
            Err(_) => return std::iter::once(0..size).collect(),
        };
        let to = rustix::fs::seek(fd, SeekFrom::Hole(from as u64)).map_or(size, |to| to as usize);
        parts.push(from.min(size)..to.min(size));
        at = to.max(from + 1);
    }
    parts.retain(|p| !p.is_empty());
    parts
}

impl WorkingCopy for Shared {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.capacity
    }

    fn collect(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()> {
        let page = rustix::param::page_size();
        let (first, last) = (range.start / page * page, range.end.next_multiple_of(page));
        // Held to the end: the file must not grow between reading its size and the
        // searches.
        let windows = self.windows();
        // The file's last page counts as whole: nothing of the file follows.
        let whole_end = match range.end == self.size.load(Acquire) {
            true => last,
            false => range.end / page * page,
        };
        let whole_start = range.start.next_multiple_of(page).min(whole_end);
        let from = out.len();
        if first < whole_start {
            self.find(&windows, first..whole_start, false, out)?;
        }
        self.find(&windows, whole_start..whole_end, true, out)?;
        if whole_start <= whole_end && whole_end < last {
            self.find(&windows, whole_end..last, false, out)?;
        }
        clip(out, from, &range);
        Ok(())
    }

    fn written(&self, range: Range<usize>, out: &mut Vec<Range<usize>>) -> Result<()> {
        let page = rustix::param::page_size();
        let pages = range.start / page * page..range.end.next_multiple_of(page);
        let from = out.len();
        self.find(&self.windows(), pages, false, out)?;
        clip(out, from, &range);
        Ok(())
    }

    fn mark(&self, range: Range<usize>) {
        let page = rustix::param::page_size();
        let end = range.end.next_multiple_of(page).min(self.capacity);
        self.marks.add(range.start / page * page..end);
    }

    fn resized(&self, size: usize) -> Result<()> {
        let page = rustix::param::page_size();
        let what = || "memory for a shared working copy".to_owned();
        // No thread collects meanwhile.
        let _windows = self.change();
        let old = self.size.load(Acquire);
        let has = rustix::fs::fstat(&self.memory)
            .map_err(std::io::Error::from)
            .context(what)?
            .st_size as usize;
        // What lies behind the end reads as zeros, now and when the file grows
        // again: also what was stored to the rest of the last page.
        let behind = old.min(size)..has.next_multiple_of(page);
        if !behind.is_empty() {
            rustix::fs::fallocate(
                &self.memory,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                behind.start as u64,
                behind.len() as u64,
            )
            .map_err(std::io::Error::from)
            .context(what)?;
        }
        if size > has {
            rustix::fs::ftruncate(&self.memory, size as u64)
                .map_err(std::io::Error::from)
                .context(what)?;
        }
        self.size.store(size, Release);
        Ok(())
    }

    fn close(&self, window: u64) -> Result<()> {
        self.forget(window, false)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the engine's own mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.capacity) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_env::{Env, OpenHow};

    /// The smaller reservation was made whether or not it was needed, and never given back:
    /// each shared file that was ever mapped cost twice its size in address space for good.
    #[test]
    fn a_working_copy_has_one_mapping_and_leaves_none() {
        let path = std::env::temp_dir().join(format!("mojim-shared-{}", std::process::id()));
        std::fs::write(&path, [7; 4096]).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        let file = env.open(&path, OpenHow::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let shared = Shared::fill(&file, 4096, 4096).unwrap();
        let inode = shared.identity().unwrap().to_string();
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            // Another file, of another test, may have the same number on its file system.
            let of = |l: &&str| {
                l.split_whitespace().nth(4) == Some(&inode) && l.contains("mojim-working-copy")
            };
            maps.lines()
                .filter(of)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(mappings().len(), 1, "{:?}", mappings());
        // Whoever gets the inode's number next is another file, and has another name.
        drop(shared);
        let left = mappings();
        assert!(
            !left.iter().any(|l| l.contains("mojim-working-copy")),
            "{left:?}"
        );
    }
}
