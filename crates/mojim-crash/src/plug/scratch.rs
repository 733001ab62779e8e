//! Directories of a rung's files.

use std::path::{Path, PathBuf};

use crate::Result;

/// A directory that is removed when this is dropped.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    /// A new directory, in memory if possible.
    pub(super) fn new(name: &str) -> Result<Scratch> {
        let shm = Path::new("/dev/shm");
        let at = match shm.is_dir() {
            true => shm.to_path_buf(),
            false => std::env::temp_dir(),
        };
        let dir = at.join(format!("mojim-plug-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        Ok(Scratch(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
