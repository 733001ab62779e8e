//! Stores of programs into mappings that the mount could not take.
//!
//! When the kernel writes such pages back and gets an error, it takes them for clean all the same.
//! It reports the error once, and has nothing to write at the next sync. So a program that calls
//! `msync` a second time would be told that all is well. This is known as "fsyncgate" since
//! PostgreSQL found it in 2018.
//!
//! Owns the files of which something is lost.
//!
//! Invariants:
//!
//! - From the moment the kernel is told of the error, no sync point of such a file succeeds until
//!   nobody has the file open. A program that opens it then reads what is committed, and goes on
//!   from there.
//! - That something was lost of a file with a name is known until the mount ends, which says it.

use mojim_env::locks::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::io::Errno;

#[derive(Debug, Default)]
pub(crate) struct Lost {
    /// Whether there are any: sync points look here.
    any: AtomicBool,
    files: Mutex<HashMap<u64, Errno>>,
    /// The first of all, also of files that nobody has open any more.
    first: OnceLock<Errno>,
}

impl Lost {
    pub(crate) fn is_any(&self) -> bool {
        self.any.load(SeqCst)
    }

    /// Fails if something is lost of the file.
    pub(crate) fn check(&self, ino: u64) -> Result<(), Errno> {
        self.files().get(&ino).map_or(Ok(()), |e| Err(*e))
    }

    /// Fails if something is lost of any file.
    pub(crate) fn check_all(&self) -> Result<(), Errno> {
        self.files().values().next().map_or(Ok(()), |e| Err(*e))
    }

    /// Fails if something was lost at any time.
    pub(crate) fn check_ever(&self) -> Result<(), Errno> {
        self.first.get().map_or(Ok(()), |e| Err(*e))
    }

    /// Nobody has the file open any more.
    pub(crate) fn forget(&self, ino: u64) {
        if self.any.load(SeqCst) {
            let mut files = self.files();
            files.remove(&ino);
            self.any.store(!files.is_empty(), SeqCst);
        }
    }

    /// Something is lost of the file, which `counts` at the end, too. True if it is the first time.
    pub(crate) fn add(&self, ino: u64, error: Errno, counts: bool) -> bool {
        let mut files = self.files();
        self.any.store(true, SeqCst);
        if counts {
            let _ = self.first.set(error);
        }
        files.insert(ino, error).is_none()
    }

    fn files(&self) -> MutexGuard<'_, HashMap<u64, Errno>> {
        lock(&self.files)
    }
}
