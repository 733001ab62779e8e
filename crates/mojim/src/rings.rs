//! Rings that stay in memory when the volumes that they were of are gone.
//!
//! Owns the note beside a node's rings, which says whose they are: the node's directory.
//! A ring outlives programs and daemons, and only its volume's copy knows it; where that
//! was removed, nobody would ever remove it.

use std::io::{ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::config::{Config, Node};
use crate::error::{Context, Result};
use crate::layout;
use crate::os::trust;

/// The note's name.
const NOTE: &str = "directory";

/// Says beside a node's rings whose they are.
pub(crate) fn note(config: &Config, node: &Node) -> Result<()> {
    let dir = layout::memory_dir(config, node);
    let path = dir.join(NOTE);
    let what = || format!("writing {}", path.display());
    trust::make(&dir).context(what)?;
    let text = node.directory.as_os_str().as_bytes();
    // One that was cut off says something else, and is written again.
    if std::fs::read(&path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let mut file = std::fs::OpenOptions::new();
    let file = file.write(true).create(true).truncate(true).mode(0o600);
    let written = file.open(&path).and_then(|mut f| f.write_all(text));
    written.context(what)
}

/// Memory that is nobody's.
#[derive(Debug)]
pub struct Left {
    /// A file, or the directory when all of it is.
    pub path: PathBuf,
    /// What it was of, which is not there any more.
    pub of: PathBuf,
    /// Bytes.
    pub bytes: u64,
}

fn is_gone(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// What lies in `base`, a node's `ring`, of this user's nodes or volumes that are gone. A
/// file system that is not mounted looks the same: a person decides.
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
        // Without a note nobody knows whose it is.
        let Ok(of) = std::fs::read(dir.join(NOTE)) else {
            continue;
        };
        let of = PathBuf::from(std::ffi::OsString::from_vec(of));
        // Nor by one that was cut off (no room, a kill): what it names was never there.
        let hash = layout::directory_hash(&of);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Volume;
    use crate::os::testdir::TestDir;

    #[test]
    fn rings_of_what_is_gone_are_found() {
        let dir = TestDir::new();
        let text = format!(
            "cluster = \"test\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
             [volume.w]\nmode = \"unreplicated\"\nprimary = \"a\"\n\
             [node.a]\naddress = \"127.0.0.1:1\"\ndirectory = \"{0}/a\"\nring = \"{0}\"\n\
             log = {{ medium = \"disk\", size = \"1MiB\" }}\n",
            dir.root().display()
        );
        let config = Config::parse(&text, dir.root()).unwrap();
        for v in ["v", "w"] {
            let v = Volume::attach_with(&config, "a", Some(v), |_, _| {}).unwrap();
            v.detach().unwrap();
        }
        // As programs that end without a detach leave them.
        let memory = layout::memory_dir(&config, &config.nodes["a"]);
        for v in ["v", "w"] {
            std::fs::write(memory.join(format!("{v}.ring.0")), vec![0; 1 << 20]).unwrap();
        }
        let left = || left_in(dir.root()).unwrap();
        assert!(left().is_empty(), "{:?}", left());
        // A note that was cut off names no one.
        let note = memory.join(NOTE);
        let whole = std::fs::read(&note).unwrap();
        for n in [0, 1, whole.len() - 1] {
            std::fs::write(&note, &whole[..n]).unwrap();
            assert!(left().is_empty(), "{:?}", left());
        }
        super::note(&config, &config.nodes["a"]).unwrap();
        assert_eq!(std::fs::read(&note).unwrap(), whole);
        std::fs::remove_dir_all(dir.path("a/.mojim/w")).unwrap();
        let found = left();
        assert_eq!(found.len(), 1);
        assert!(found[0].path.ends_with("w.ring.0") && found[0].bytes == 1 << 20);
        found[0].remove().unwrap();
        assert!(left().is_empty());
        std::fs::remove_dir_all(dir.path("a")).unwrap();
        let found = left();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].remove().unwrap();
        assert_eq!(std::fs::read_dir(dir.root()).unwrap().count(), 0);
    }
}
