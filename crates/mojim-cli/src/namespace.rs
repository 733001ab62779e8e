//! The mount namespace of a program under `mojim run`: there the volume's directory is the
//! volume's mount.
//!
//! Owns the way into it, and the look for ways past it that the program would inherit: a working
//! directory or an open file of the bare directory below.
//!
//! Invariant: [`Namespace::enter`] makes system calls only, on what was prepared before, so it may
//! be called between fork and exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::process::chdir;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::failure::Failure;

/// Where a program's volume is, in its namespace.
pub struct Namespace {
    mount: CString,
    directory: CString,
    /// Where the program starts, if that lies in the directory.
    start: Option<CString>,
    /// Lines of `uid_map` and `gid_map`, for who may not mount without a user namespace.
    maps: Option<[String; 2]>,
}

impl Namespace {
    /// One in which `directory` is `mount`.
    ///
    /// # Errors
    /// If a file below `directory` is open here, which the program would inherit.
    pub fn new(mount: &Path, directory: &Path) -> Result<Namespace, Failure> {
        refuse_open_files(directory)?;
        let start = std::env::current_dir().ok();
        let start = start.filter(|d| d.starts_with(directory));
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let line = |id: u32| format!("{id} {id} 1\n");
        let maps = (!uid.is_root()).then(|| [line(uid.as_raw()), line(gid.as_raw())]);
        Ok(Namespace {
            mount: c_path(mount)?,
            directory: c_path(directory)?,
            start: start.as_deref().map(c_path).transpose()?,
            maps,
        })
    }

    /// Takes this process, which has one thread, there.
    ///
    /// # Errors
    /// Standard error says which step failed.
    pub fn enter(&self) -> io::Result<()> {
        let user = match self.maps {
            Some(_) => UnshareFlags::NEWUSER,
            None => UnshareFlags::empty(),
        };
        // SAFETY: descriptors and the file system's attributes stay shared; no code here relies on
        // this process's mounts or user IDs being those of before.
        let apart = unsafe { unshare_unsafe(UnshareFlags::NEWNS | user) };
        let what = c"making a mount namespace for the program (`mojim run --preload` needs none)";
        step(what, apart)?;
        if let Some([uids, gids]) = &self.maps {
            for (path, text) in [
                (c"/proc/self/setgroups", "deny"),
                (c"/proc/self/uid_map", uids),
                (c"/proc/self/gid_map", gids),
            ] {
                let put = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                    .and_then(|f| rustix::io::write(f, text.as_bytes()));
                step(path, put.map(drop))?;
            }
        }
        // What is mounted outside later is seen inside; what is mounted inside is not seen outside.
        let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        step(c"setting the namespace apart", mount_change(c"/", flags))?;
        let bound = mount_bind(self.mount.as_c_str(), self.directory.as_c_str());
        step(c"mounting the volume over its directory", bound)?;
        match &self.start {
            // By its path, for the working directory is still the one below the mount.
            Some(start) => step(start, chdir(start.as_c_str())),
            None => Ok(()),
        }
    }
}

fn c_path(path: &Path) -> Result<CString, Failure> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Failure::usage(format!("{}: a zero byte in a path", path.display())))
}

/// Says on standard error what failed, without allocating.
fn step(what: &CStr, done: rustix::io::Result<()>) -> io::Result<()> {
    done.map_err(|e| {
        let parts: [&[u8]; 3] = [b"mojim: ", what.to_bytes(), b": failed\n"];
        for part in parts {
            // SAFETY: standard error is borrowed for this call; if it is closed, the call fails.
            let err = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
            let _ = rustix::io::write(err, part);
        }
        io::Error::from(e)
    })
}

/// A file that was opened before the mount lay over it would be written past Mojim.
fn refuse_open_files(directory: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        let path: PathBuf = match std::fs::read_link(entry.path()) {
            Ok(path) if path.starts_with(directory) => path,
            _ => continue,
        };
        return Err(Failure::failed(format!(
            "{} is open already (descriptor {}): the program would write it past Mojim. Have it \
             opened under `mojim run`, for example: mojim run … -- sh -c 'program > file'",
            path.display(),
            entry.file_name().to_string_lossy()
        )));
    }
    Ok(())
}
