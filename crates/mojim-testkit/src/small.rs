//! A disk that can be full: an ext4 of its own on a loop device.
//!
//! Owns its mount, which is in a mount namespace of the test's thread and of the
//! processes that it starts: it is gone with them, and so is the loop device, however
//! the test ends.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted disk.
pub struct Small {
    at: PathBuf,
}

impl Small {
    /// A disk of `mib` MiB at `at`; says so where there can be none.
    pub fn mount_or_skip(at: &Path, mib: u64) -> Option<Small> {
        match Small::mount(at, mib) {
            Ok(()) => Some(Small { at: at.to_owned() }),
            Err(why) => {
                // Said also by a test that passes.
                let _ = writeln!(
                    io::stderr(),
                    "SKIPPED: no disk of our own can be mounted here: {why}"
                );
                None
            }
        }
    }

    fn mount(at: &Path, mib: u64) -> Result<(), String> {
        fs::create_dir_all(at).unwrap();
        // SAFETY: changes this thread's view of the file systems only, by names that
        // outlive the calls.
        let private = unsafe {
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            let nothing = std::ptr::null();
            let (none, root) = (c"none".as_ptr(), c"/".as_ptr());
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, root, nothing, flags, nothing.cast()) == 0
        };
        if !private {
            let e = io::Error::last_os_error();
            return Err(format!("a mount namespace: {e}"));
        }
        let image = at.with_extension("img");
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        // Nothing is kept back for root, whom tests like this run as.
        let make = ["-q", "-F", "-m", "0", "-O", "^has_journal"];
        run(Command::new("mkfs.ext4").args(make).arg(&image))?;
        let mount = ["-o", "loop"];
        run(Command::new("mount").args(mount).args([&image, at]))
    }

    /// Nothing more fits.
    pub fn fill(&self) {
        let mut f = File::create(self.at.join("filler")).unwrap();
        for piece in [1 << 20, 4096, 1] {
            let bytes = vec![1; piece];
            while f.write_all(&bytes).and_then(|()| f.sync_data()).is_ok() {}
        }
    }

    /// There is room again.
    pub fn empty(&self) {
        fs::remove_file(self.at.join("filler")).unwrap();
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command.output().map_err(|e| format!("{name}: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&out.stderr).into_owned()),
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // At once, also where a process still has files open: they end with it.
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}
