//! Opening and closing logs: in a file of a volume, or in persistent memory.
//!
//! Owns the mapping beneath a log, and the lock that its threads take.
//!
//! Invariants:
//!
//! - The memory of a log is not touched once its volume is detached, for it is gone.
//! - One process has a log: a private working copy belongs to one mapping, and a file of
//!   persistent memory is locked.
//! - A file whose words are all zero, but for an incomplete header, was left by a process that died
//!   while it made the log. It is made anew, of the size that is asked for then.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use mojim::{Error, MapFlags, Result, Volume, unmap};
use mojim_env::locks::lock;
use mojim_env::{Context, descriptors};
use mojim_format::FormatError;
use mojim_format::persistent::{LOG_MAGIC, LOG_RING_WORD};
use mojim_memory::fork::check_fork;
use rustix::fs::FlockOperation;
use rustix::mm;

use crate::file::{FileHead, look};
use crate::log::{Encoding, Log, Medium};
use crate::media::{Delay, InRegion, Persistent};

/// A log that is open. Threads wait for each other.
pub struct AppendLog {
    place: LogBacking,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the memory is the log's, and used under its lock.
unsafe impl Send for AppendLog {}
// SAFETY: as above.
unsafe impl Sync for AppendLog {}

enum LogBacking {
    Region(Mutex<Log<InRegion>>, Volume),
    Persistent(
        Mutex<Log<Persistent>>,
        // Holds the lock.
        File,
        u32,
    ),
}

/// Runs a call for both kinds of log.
macro_rules! with {
    ($log:expr, $l:ident => $call:expr) => {
        match &$log.place {
            LogBacking::Region(l, _) => {
                #[allow(unused_mut)]
                let mut $l = lock(l);
                $call
            }
            LogBacking::Persistent(l, ..) => {
                #[allow(unused_mut)]
                let mut $l = lock(l);
                $call
            }
        }
    };
}

fn damaged(path: PathBuf, what: &str) -> Error {
    Error::Damaged {
        path,
        what: format!("{what}; give another name, or remove it"),
    }
}

/// A number that no other log has.
fn salt() -> Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: room for as many bytes.
    match unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) } {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(std::io::Error::last_os_error()).context(|| "a random number".into()),
    }
}

/// A log that is to be made.
#[derive(Clone, Copy)]
struct New {
    /// Of the header and the ring.
    words: usize,
    encoding: Encoding,
}

impl New {
    /// Checks what is asked for, before anything changes.
    fn of(path: &Path, size: usize, encoding: Option<Encoding>) -> Result<New> {
        let path = path.display();
        let Some(encoding) = encoding else {
            return Err(Error::Invalid(format!(
                "{path}: a new log needs an encoding"
            )));
        };
        match size {
            0 => Err(Error::Invalid(format!(
                "{path}: there is no log, and a new one needs a size"
            ))),
            s if s > 1 << 40 => Err(Error::Invalid(format!("a log of {s} bytes is too large"))),
            s => {
                let bytes = (Log::<InRegion>::words_for(s) * 8).next_multiple_of(4096);
                let words = bytes / 8;
                Ok(New { words, encoding })
            }
        }
    }
}

/// Opens the log of a medium of `words` words, and makes it if it is `new`.
fn open<M: Medium>(
    mut medium: M,
    words: usize,
    new: Option<New>,
    encoding: Option<Encoding>,
    path: &Path,
) -> Result<Log<M>> {
    if let Some(new) = new {
        // Word 0 comes last, and the ring is not touched before it.
        let zero = |w: usize| medium.load(w) == 0;
        if !zero(0) || !(LOG_RING_WORD..words).all(zero) {
            return Err(damaged(path.into(), "it holds something else than a log"));
        }
        Log::make(&mut medium, new.words, new.encoding, salt()?)?;
    }
    let log = Log::open(medium, words)?.map_err(|e| damaged(path.into(), &e))?;
    match encoding.filter(|e| *e != log.encoding()) {
        None => Ok(log),
        Some(_) => Err(Error::Invalid(format!(
            "{}: the log is there with another encoding ({:?})",
            path.display(),
            log.encoding()
        ))),
    }
}

/// Whole words of a file that begins as a log does, by its first bytes and its length.
fn words_of(first: &[u8], bytes: u64) -> Result<usize, FormatError> {
    const WHAT: &str = "log";
    let need = LOG_RING_WORD * 8 + 8;
    let have = usize::try_from(bytes).unwrap_or(usize::MAX);
    match first.first_chunk().map(|b| u64::from_le_bytes(*b)) {
        Some(LOG_MAGIC) if have >= need => Ok(have / 8),
        Some(found) if found != LOG_MAGIC => Err(FormatError::Magic {
            what: WHAT,
            found: found as u32,
        }),
        _ => Err(FormatError::Short {
            what: WHAT,
            have,
            need,
        }),
    }
}

impl AppendLog {
    /// Opens a log in a file of a volume. An append is one sync point. `size`: bytes of the
    /// ring, for a log that is not there yet, or was not completed.
    ///
    /// # Errors
    /// `Damaged` if the file holds something else; `Invalid` if the log has another encoding, or
    /// is new and has no size or encoding; those of [`Volume::map`] and of a sync point.
    pub fn open(
        volume: &Volume,
        file: &str,
        size: usize,
        encoding: Option<Encoding>,
    ) -> Result<AppendLog> {
        let path = Path::new(file);
        let (words, new) = match look(volume, file, |b| words_of(b, b.len() as u64))? {
            FileHead::Old(words) => (words, None),
            FileHead::New => {
                let new = New::of(path, size, encoding)?;
                (new.words, Some(new))
            }
        };
        let bytes = words * 8;
        let flags = MapFlags {
            create: true,
            atomic: true,
            ..MapFlags::default()
        };
        let mapping = volume.map(file, bytes, flags)?;
        // SAFETY: the mapping has these words; it goes after the log.
        let medium = unsafe { InRegion::new(mapping.ptr, words) };
        match open(medium, words, new, encoding, path) {
            Ok(log) => Ok(AppendLog {
                place: LogBacking::Region(Mutex::new(log), volume.clone()),
                base: mapping.ptr,
                bytes,
            }),
            Err(e) => {
                unmap(mapping.ptr, mapping.len)?;
                Err(e)
            }
        }
    }

    /// Opens a log in a file of persistent memory (DAX), or on tmpfs, which stands for it and
    /// outlives programs, but not the machine. `delay`: nanoseconds to wait after each store.
    ///
    /// # Errors
    /// As [`AppendLog::open`]; `Busy` if a process has it; `Unsupported` on other file systems.
    pub fn open_persistent(
        path: &Path,
        size: usize,
        encoding: Option<Encoding>,
        delay: u32,
    ) -> Result<AppendLog> {
        let what = || format!("opening {}", path.display());
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        let mut made = true;
        let file = || match options.clone().create_new(true).open(path) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                made = false;
                options.open(path).map(OwnedFd::from)
            }
            file => file.map(OwnedFd::from),
        };
        let file = File::from(descriptors::open(file).context(what)?);
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let meta = file.metadata().context(what)?;
        // Without a name it is one that a call which failed has just removed.
        if locked.is_err() || meta.nlink() == 0 {
            return Err(Error::Busy(format!(
                "{}: a process has the log open",
                path.display()
            )));
        }
        let there = meta.len();
        AppendLog::over(&file, path, (size, there), encoding, delay)
            .inspect_err(|_| {
                // While it is locked: nobody has it.
                let _ = match made {
                    true => std::fs::remove_file(path),
                    false => file.set_len(there),
                };
            })
            .map(|(log, base, bytes)| AppendLog {
                place: LogBacking::Persistent(Mutex::new(log), file, std::process::id()),
                base,
                bytes,
            })
    }

    /// The log in a locked file of `there` bytes; with its memory.
    fn over(
        file: &File,
        path: &Path,
        (size, there): (usize, u64),
        encoding: Option<Encoding>,
        delay: u32,
    ) -> Result<(Log<Persistent>, *mut u8, usize)> {
        let what = || format!("opening {}", path.display());
        let mut first = [0; 8];
        let read = file.read_at(&mut first, 0).context(what)?;
        let (words, new) = match words_of(&first[..read], there) {
            Ok(words) => (words, None),
            Err(e) if first != [0; 8] => return Err(damaged(path.into(), &e.to_string())),
            Err(_) => {
                let new = New::of(path, size, encoding)?;
                (new.words.max(there as usize / 8), Some(new))
            }
        };
        let bytes = words * 8;
        if new.is_some() {
            // All of it, so that no store finds the file system full.
            let done =
                rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64);
            done.map_err(std::io::Error::from).context(what)?;
            file.sync_all().context(what)?;
        }
        let base = map_persistent(file, bytes, path)?;
        // SAFETY: the mapping has these words; it goes after the log.
        let medium = unsafe { Persistent::new(base, words, Delay::of(delay)) };
        let log = open(medium, words, new, encoding, path).inspect_err(|_| {
            // SAFETY: nobody else has the mapping.
            let _ = unsafe { mm::munmap(base.cast(), bytes) };
        })?;
        Ok((log, base, bytes))
    }

    /// In a child made by fork a log in persistent memory is its parent's.
    fn check(&self) -> Result<()> {
        match &self.place {
            LogBacking::Persistent(_, _, pid) if *pid != std::process::id() => Err(
                Error::Unsupported("the log belongs to the parent of this process".into()),
            ),
            LogBacking::Persistent(..) => Ok(()),
            LogBacking::Region(_, volume) => {
                check_fork()?;
                match volume.is_usable() {
                    true => Ok(()),
                    false => Err(Error::Invalid("the log's volume is detached".into())),
                }
            }
        }
    }

    /// [`Log::append`].
    pub fn append(&self, record: &[u8]) -> Result<u64> {
        self.check()?;
        with!(self, l => l.append(record))
    }

    /// [`Log::read`].
    pub fn read(&self, at: u64, out: &mut Vec<u8>) -> Result<Option<u64>> {
        self.check()?;
        with!(self, l => l.read(at, out))
    }

    /// [`Log::truncate`].
    pub fn truncate(&self, to: u64) -> Result<()> {
        self.check()?;
        with!(self, l => l.truncate(to))
    }

    /// Position of the oldest record, and behind the last one.
    pub fn ends(&self) -> Result<(u64, u64)> {
        self.check()?;
        Ok(with!(self, l => (l.head(), l.tail())))
    }

    /// Closes it. What was not acknowledged is discarded, or is in doubt.
    pub fn close(self) -> Result<()> {
        match self.place {
            LogBacking::Region(_, volume) if volume.is_usable() => unmap(self.base, self.bytes),
            LogBacking::Region(..) => Ok(()),
            LogBacking::Persistent(_, file, pid) => {
                // SAFETY: the log's own mapping, which nobody uses any more.
                let done = unsafe { mm::munmap(self.base.cast(), self.bytes) };
                // A child made by fork has the descriptor, too, and would keep the lock.
                if pid == std::process::id() {
                    let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
                }
                done.map_err(std::io::Error::from)
                    .context(|| "closing a log".into())
            }
        }
    }
}

/// Maps a file so that its memory is the medium.
fn map_persistent(file: &File, bytes: usize, path: &Path) -> Result<*mut u8> {
    const TMPFS: i64 = 0x0102_1994;
    let what = || format!("mapping {}", path.display());
    let system = rustix::fs::fstatfs(file).map_err(std::io::Error::from);
    let emulated = system.context(what)?.f_type == TMPFS;
    let flags = match emulated {
        true => mm::MapFlags::SHARED,
        false => mm::MapFlags::SHARED_VALIDATE | mm::MapFlags::SYNC,
    };
    let prot = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
    let none = std::ptr::null_mut();
    // SAFETY: a new mapping, at an address that the kernel chooses.
    match unsafe { mm::mmap(none, bytes, prot, flags, file.as_fd(), 0) } {
        Ok(base) => Ok(base.cast()),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
            Err(Error::Unsupported(format!(
                "{}: neither persistent memory (a file system on DAX) nor tmpfs, which stands for it: stores there are not durable. A log in a volume is",
                path.display()
            )))
        }
        Err(e) => Err(std::io::Error::from(e)).context(what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What failed left a file, of the log's whole size where the mapping failed; and a child made
    /// by fork kept the lock of a log that was closed.
    #[test]
    fn what_fails_leaves_no_file_and_what_is_closed_no_lock() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("log");
        let open = |size, encoding| AppendLog::open_persistent(&path, size, encoding, 0);
        assert!(open(0, None).is_err() && !path.exists());
        assert!(open(4096, None).is_err() && !path.exists());
        std::fs::write(&path, "").unwrap();
        assert!(open(4096, None).is_err());
        assert_eq!(path.metadata().unwrap().len(), 0, "it was there");
        // One that was not completed had the size of the first try for ever.
        for there in [8192, 1 << 20] {
            std::fs::File::create(&path)
                .unwrap()
                .set_len(there)
                .unwrap();
            assert!(open(0, Some(Encoding::Checksum)).is_err());
            assert!(open(1 << 21, None).is_err());
            assert_eq!(path.metadata().unwrap().len(), there);
            let log = open(1 << 18, Some(Encoding::Checksum)).unwrap();
            log.append(&vec![1; 260_000]).unwrap();
            assert!(log.append(&[1; 8192]).is_err(), "{there}");
            log.close().unwrap();
        }
        std::fs::write(&path, "").unwrap();
        let log = open(4096, Some(Encoding::Checksum)).unwrap();
        assert!(matches!(open(0, None), Err(Error::Busy(_))));
        let LogBacking::Persistent(_, file, _) = &log.place else {
            unreachable!("opened so");
        };
        let of_child = file.try_clone().unwrap();
        log.close().unwrap();
        let log = open(0, None).unwrap();
        assert!(log.ends().is_ok());
        drop(of_child);
    }
}
