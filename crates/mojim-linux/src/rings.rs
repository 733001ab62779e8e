//! Rings that stay in memory after their volumes are gone.
//!
//! Owns the note beside a node's rings, which names the node's directory. A ring outlives
//! programs and daemons, and only its volume's copy refers to it. Once that copy was removed,
//! nothing else would remove the ring.

use std::io::{ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mojim_config::ring_files::{directory_hash, memory_dir};
use mojim_config::{Config, Node};
use mojim_env::{Context, Result};

use crate::trust;

/// The note's name.
const NOTE: &str = "directory";

/// Writes the note beside a node's rings.
pub fn note(config: &Config, node: &Node) -> Result<()> {
    let dir = memory_dir(config, node);
    let path = dir.join(NOTE);
    let what = || format!("writing {}", path.display());
    trust::make(&dir).context(what)?;
    let text = node.directory.as_os_str().as_bytes();
    // A note that was cut off has another text, and is written again.
    if std::fs::read(&path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let mut file = std::fs::OpenOptions::new();
    let file = file.write(true).create(true).truncate(true).mode(0o600);
    let written = file.open(&path).and_then(|mut f| f.write_all(text));
    written.context(what)
}

/// Memory of a node or a volume that is gone.
#[derive(Debug)]
pub struct Left {
    /// A file, or the directory if the whole node is gone.
    pub path: PathBuf,
    /// The directory that it belonged to, which no longer exists.
    pub of: PathBuf,
    /// Bytes.
    pub bytes: u64,
}

fn is_gone(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// The memory in `base`, a node's `ring`, of this user's nodes or volumes that are gone.
/// A file system that is not mounted looks the same: the operator decides.
pub fn left_in(base: &Path) -> Result<Vec<Left>> {
    let what = || format!("looking through {}", base.display());
    let mut left = Vec::new();
    for entry in std::fs::read_dir(base).context(what)? {
        let dir = entry.context(what)?.path();
        let is_ours = dir
            .file_name()
            .is_some_and(|n| n.as_bytes().starts_with(b"mojim-"));
        if !is_ours || trust::check(std::slice::from_ref(&dir)).is_err() {
            continue;
        }
        // Without a note the node is not known.
        let Ok(of) = std::fs::read(dir.join(NOTE)) else {
            continue;
        };
        let of = PathBuf::from(std::ffi::OsString::from_vec(of));
        // Nor is it with a note that was cut off (no room, a kill): that names a
        // directory that never existed.
        let hash = directory_hash(&of);
        if !dir.as_os_str().as_bytes().ends_with(hash.as_bytes()) {
            continue;
        }
        let mut files = Vec::new();
        for file in std::fs::read_dir(&dir).context(what)? {
            let file = file.context(what)?;
            let name = file.file_name();
            let name = name.to_string_lossy();
            let bytes = file.metadata().map_or(0, |m| m.len());
            let volume = [".ring.", ".log."]
                .iter()
                .find_map(|kind| Some(name.rsplit_once(kind)?.0.to_owned()));
            if let Some(volume) = volume {
                files.push((file.path(), of.join(".mojim").join(volume), bytes));
            }
        }
        if is_gone(&of.join(".mojim")) {
            let bytes = files.iter().map(|f| f.2).sum();
            left.push(Left {
                path: dir,
                of,
                bytes,
            });
            continue;
        }
        let gone = files.into_iter().filter(|(_, of, _)| is_gone(of));
        left.extend(gone.map(|(path, of, bytes)| Left { path, of, bytes }));
    }
    left.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(left)
}

impl Left {
    /// Removes it.
    pub fn remove(&self) -> Result<()> {
        let removed = match self.path.is_dir() {
            true => std::fs::remove_dir_all(&self.path),
            false => std::fs::remove_file(&self.path),
        };
        removed.context(|| format!("removing {}", self.path.display()))
    }
}
