//! Why the mount of `mojim run` ended, written for the next command.
//!
//! Owns the file with the cause in a volume's directory of runs. `mojim run` and the node's daemon
//! read it.
//!
//! Invariants:
//! - The file has the whole cause, or is not there. On a disk that does not sync, a loss of power may
//!   take it.
//! - Each process of a run may write one, and the first counts: the guard's says less.
//! - It never has the cause of an earlier end: where the new cause cannot be written, it is removed.
//! - A disk without room takes the cause all the same. Its bytes are there from the start of the mount
//!   on, under another name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mojim_replica::layout::RUN_FAILED;

/// Bytes that are kept for a cause. A longer one is cut.
const KEPT: usize = 4096;

fn file_in(dir: &Path) -> PathBuf {
    dir.join(RUN_FAILED)
}

fn kept_in(dir: &Path) -> PathBuf {
    dir.join(format!("{RUN_FAILED}.new"))
}

/// Keeps room for a cause in `dir`, before a mount serves.
pub fn keep_room(dir: &Path) {
    let write = || {
        let file = own(&kept_in(dir))?;
        // Over the bytes that it has: a full disk would not give them again.
        file.write_all_at(&[b' '; KEPT], 0)?;
        file.set_len(KEPT as u64)?;
        file.sync_all()
    };
    if let Err(e) = write() {
        tracing::warn!("keeping room for a note about the end of the mount: {e}");
    }
}

/// Writes why the mount ended.
pub fn write(dir: &Path, why: &str) {
    if let Err(e) = replace(dir, cut(why)) {
        tracing::error!("writing a note about the end of the mount: {e}. It ended because: {why}");
        // What is there is the cause of another end.
        clear(dir);
    }
}

/// [`write`] by another process than that of the mount. That one knows more, if it has written.
pub fn write_if_none(dir: &Path, why: &str) {
    if read(dir).is_none() {
        write(dir, why);
    }
}

/// The cause, if there is one.
pub fn read(dir: &Path) -> Option<String> {
    fs::read_to_string(file_in(dir)).ok()
}

/// Removes the cause.
pub fn clear(dir: &Path) {
    let _ = fs::remove_file(file_in(dir));
}

fn replace(dir: &Path, why: &str) -> io::Result<()> {
    let kept = kept_in(dir);
    let file = own(&kept)?;
    file.write_all_at(why.as_bytes(), 0)?;
    file.set_len(why.len() as u64)?;
    // A disk that fails ends mounts. The next command is told the cause all the same, while the machine
    // runs.
    let told = |done: io::Result<()>| {
        if let Err(e) = done {
            tracing::warn!("a note about the end of the mount is not on the disk: {e}");
        }
    };
    told(file.sync_all());
    fs::rename(&kept, file_in(dir))?;
    told(File::open(dir).and_then(|dir| dir.sync_all()));
    Ok(())
}

/// At most so much as room is kept for.
fn cut(why: &str) -> &str {
    let mut end = why.len().min(KEPT);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    &why[..end]
}

/// A file of this user's alone, with the bytes that it has.
fn own(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_cause_replaces_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        keep_room(dir.path());
        assert_eq!(read(dir.path()), None);
        write(dir.path(), "a long cause, the first");
        write(dir.path(), "the second");
        assert_eq!(read(dir.path()).unwrap(), "the second");
        keep_room(dir.path());
        write(dir.path(), &"ä".repeat(KEPT));
        assert_eq!(read(dir.path()).unwrap(), "ä".repeat(KEPT / 2));
        clear(dir.path());
        assert_eq!(read(dir.path()), None);
    }

    /// The guard of a mount that was killed behind its own note wrote another one over it or, on a
    /// full disk, removed it.
    #[test]
    fn a_guard_leaves_the_cause_that_the_mount_wrote() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "of the mount");
        write_if_none(dir.path(), "of the guard");
        assert_eq!(read(dir.path()).unwrap(), "of the mount");
        clear(dir.path());
        write_if_none(dir.path(), "of the guard");
        assert_eq!(read(dir.path()).unwrap(), "of the guard");
    }

    /// A file system that is taken away at the end.
    struct Mounted(PathBuf);

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }

    /// On a full disk the file was emptied, and then not written. Or it kept the cause of an earlier
    /// end, which the next command told.
    #[test]
    fn a_disk_without_room_takes_a_cause_and_keeps_no_older_one() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("left out: a file system of its own needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=64k", "small"]);
        assert!(mount.arg(dir).status().unwrap().success());
        let _mounted = Mounted(dir.to_owned());
        let fill = || {
            let mut all = File::create(dir.join(tempfile_name(dir))).unwrap();
            while all.write_all(&[1; 4096]).is_ok() {}
        };
        keep_room(dir);
        write(dir, "of an earlier end");
        keep_room(dir);
        fill();
        // The next mount begins on the full disk.
        keep_room(dir);
        write(dir, "the disk is full");
        assert_eq!(read(dir).unwrap(), "the disk is full");
        // No room was kept for this one, and what it replaces gives none.
        fill();
        write(dir, "another end");
        assert_eq!(read(dir), None);
    }

    fn tempfile_name(dir: &Path) -> String {
        format!("all-{}", fs::read_dir(dir).unwrap().count())
    }
}
