//! What programs stored into mappings and the mount could not take.
//!
//! When the kernel writes such pages back and gets an error, it takes them for clean all the same:
//! it reports the error once, and has nothing to write at the next sync. So a program that calls
//! `msync` a second time would be told that all is well (known as "fsyncgate" since PostgreSQL found
//! it in 2018).
//!
//! Owns the files of which something is lost.
//!
//! Invariant: from the moment the kernel is told of the error, no sync point of such a file succeeds
//! until nobody has the file open: who opens it then reads what is committed, and goes on from there.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use rustix::io::Errno;

use crate::fs::{Fs, Result, lock};

#[derive(Debug, Default)]
pub(crate) struct Lost {
    /// Whether there are any: sync points look here.
    any: AtomicBool,
    files: Mutex<HashMap<u64, Errno>>,
}

impl Lost {
    /// Fails if something is lost of the file, or of any with `None`.
    pub(crate) fn check(&self, ino: Option<u64>) -> Result<()> {
        if !self.any.load(SeqCst) {
            return Ok(());
        }
        let files = lock(&self.files);
        let found = match ino {
            Some(ino) => files.get(&ino),
            None => files.values().next(),
        };
        found.map_or(Ok(()), |e| Err(*e))
    }

    /// Nobody has the file open any more.
    pub(crate) fn forget(&self, ino: u64) {
        if self.any.load(SeqCst) {
            let mut files = lock(&self.files);
            files.remove(&ino);
            self.any.store(!files.is_empty(), SeqCst);
        }
    }

    /// True if it is the first of this file.
    fn add(&self, ino: u64, error: Errno) -> bool {
        let mut files = lock(&self.files);
        self.any.store(true, SeqCst);
        files.insert(ino, error).is_none()
    }
}

impl Fs {
    /// Bytes that the kernel wrote back, from a mapping, were not taken. Call before it is told.
    #[cold]
    pub(crate) fn lose(&self, ino: u64, offset: u64, len: usize, error: Errno) {
        if !self.lost.add(ino, error) {
            return;
        }
        let state = self.state();
        let path = state.tree.node(ino).map(|n| state.tree.path(n));
        let path = path.unwrap_or_default();
        tracing::error!(
            "{}: bytes {offset} to {} that a program stored into a mapping are lost: {error}. No sync \
             point of the file succeeds until every program has closed it",
            String::from_utf8_lossy(&path),
            offset + len as u64
        );
    }
}
