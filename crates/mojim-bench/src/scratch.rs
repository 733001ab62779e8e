//! A directory for the files of one run.
//!
//! Invariant: the directory is new, belongs to this value alone, and is removed with all that is
//! in it when the value is dropped. A killed process leaves it behind, under a name that says so.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new directory, removed on drop.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates a directory below `parent`, named `mojim-bench-<pid>-<n>`.
    ///
    /// `parent` chooses the file system that is measured; it must exist.
    pub fn new_in(parent: &Path) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("mojim-bench-{}-{n}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => {
                    let what =
                        format!("a directory for the benchmark in {}: {e}", parent.display());
                    return Err(io::Error::new(e.kind(), what));
                }
            }
        }
    }

    /// Creates a directory below the system's temporary directory.
    ///
    /// That is often a `tmpfs`: right for tests, wrong for figures about a disk.
    pub fn new() -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Removes the directories below `parent` that the process `pid` of this program left there. That
/// process has not been reaped yet, so nobody else has its number.
pub(crate) fn remove_left(parent: &Path, pid: u32) {
    let prefix = format!("mojim-bench-{pid}-");
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A file that is still mapped or open goes away with its last user.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rings of a measurement that was killed took memory until the machine started again.
    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let parent = Scratch::new().unwrap();
        for name in ["mojim-bench-12-0", "mojim-bench-12-1", "mojim-bench-123-0"] {
            fs::create_dir(parent.path().join(name)).unwrap();
            fs::write(parent.path().join(name).join("ring"), b"x").unwrap();
        }
        remove_left(parent.path(), 12);
        let left = fs::read_dir(parent.path()).unwrap();
        let left: Vec<_> = left.map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["mojim-bench-123-0"]);
    }

    #[test]
    fn is_removed_with_its_files() {
        let a = Scratch::new().unwrap();
        let b = Scratch::new().unwrap();
        assert_ne!(a.path(), b.path());
        fs::write(a.path().join("file"), b"x").unwrap();
        let path = a.path().to_owned();
        drop(a);
        assert!(!path.exists());
        assert!(b.path().exists());
    }
}
