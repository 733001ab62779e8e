//! A file system that journals data: ext4 with `data=journal` on a loop device.
//!
//! It is mounted in a mount namespace of the calling thread and of those that it starts. So it is
//! gone with the process, however that ends. Its image is a file of the caller's directory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Bytes of the image: room for a file of 64 MiB and a journal that is not the limit.
const SIZE: u64 = 512 << 20;

/// The mounted file system. Files that are open in it must be closed before this is
/// dropped.
pub struct Journaling {
    at: PathBuf,
}

impl Journaling {
    /// Makes the file system below `dir`. Needs root, `mkfs.ext4` and loop devices.
    pub fn mount(dir: &Path) -> io::Result<Journaling> {
        let (image, at) = (dir.join("journal.img"), dir.join("journal"));
        // Written over, so that the loop device's writes allocate nothing.
        let mut file = File::create(&image)?;
        let zeros = vec![0; 1 << 20];
        for _ in 0..SIZE >> 20 {
            file.write_all(&zeros)?;
        }
        file.sync_all()?;
        fs::create_dir(&at)?;
        // SAFETY: no memory is involved.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        run(Command::new("mount").args(["--make-rprivate", "/"]))?;
        run(Command::new("mkfs.ext4")
            .args(["-q", "-F", "-J", "size=128"])
            .args(["-E", "nodiscard,lazy_itable_init=0"])
            .arg(&image))?;
        let device = run(Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(&image))?;
        let mounted = run(Command::new("mount")
            .args(["-t", "ext4", "-o", "data=journal", device.trim()])
            .arg(&at));
        // From here on the loop device goes with its last user.
        run(Command::new("losetup").args(["-d", device.trim()]))?;
        mounted.map(|_| Journaling { at })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Journaling {
    fn drop(&mut self) {
        // The namespace ends with the process anyway.
        let _ = run(Command::new("umount").arg(&self.at));
    }
}

/// Runs a command; returns what it prints.
fn run(command: &mut Command) -> io::Result<String> {
    let out = command.stdin(Stdio::null()).output()?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
        false => Err(io::Error::other(format!(
            "{}: {}",
            command.get_program().to_string_lossy(),
            String::from_utf8_lossy(&out.stderr).trim()
        ))),
    }
}
