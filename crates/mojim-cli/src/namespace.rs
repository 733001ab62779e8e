//! The mount namespace of a program under `mojim run`: there the volume's directory is the
//! volume's mount.
//!
//! Owns the way into it, and the look for ways past it that the program would inherit: a working
//! directory or an open file of the bare directory below, or any open directory.
//!
//! Invariant: [`Namespace::enter`] makes system calls only, on what was prepared before, so it may
//! be called between fork and exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, open, statfs, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::chdir;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::failure::Failure;
use crate::runs_mount::Device;

/// The number of the error that the mount has just ended: one that `exec` does not have.
pub const ENDED: i32 = libc::EOWNERDEAD;

/// The source of the file system below the volume's mount, by which a namespace is known that was made
/// for the run `id` of that mount.
pub fn below(id: &str) -> CString {
    CString::new(format!("mojim:run:{id}")).unwrap_or_default()
}

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
    /// If the program would inherit an open file below `directory`, or an open directory, from which
    /// it comes there; or a working directory that is the same one by another path.
    pub fn new(mount: &Path, directory: &Path) -> Result<Namespace, Failure> {
        refuse_open_files(directory)?;
        let start = std::env::current_dir().ok();
        let start = start.filter(|d| d.starts_with(directory));
        if start.is_none() {
            refuse_another_way(directory)?;
        }
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

    /// Takes this process, which has one thread, there. `device` is what has to be mounted, and `below`
    /// the source of what lies below it.
    ///
    /// # Errors
    /// Standard error says which step failed. [`ENDED`]: the mount has just ended.
    pub fn enter(&self, device: Device, below: &CStr) -> io::Result<()> {
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
        step(
            c"setting the mount namespace apart (its root must be a mount point)",
            mount_change(c"/", flags),
        )?;
        // Who unmounts the volume there, as one does after a kill, must not find the bare copy below.
        let (kind, flags) = (c"tmpfs", MountFlags::RDONLY | MountFlags::NODEV);
        let below = mount(below, self.directory.as_c_str(), kind, flags, c"mode=555");
        step(
            c"laying an empty file system below the volume's mount",
            below,
        )?;
        let bound = mount_bind(self.mount.as_c_str(), self.directory.as_c_str());
        step(c"mounting the volume over its directory", bound)?;
        // It may have been taken away from its place in the meantime.
        let here = statx(
            CWD,
            &*self.directory,
            AtFlags::STATX_DONT_SYNC,
            StatxFlags::TYPE,
        );
        let same = here.and_then(|s| match (s.stx_dev_major, s.stx_dev_minor) == device {
            true => Ok(()),
            false => Err(Errno::from_raw_os_error(ENDED)),
        });
        step(
            c"finding the volume's mount (it may have ended just now)",
            same,
        )?;
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

/// A file that was opened before the mount lay over it would be written past Mojim, and from any
/// directory that is open the way is not far.
fn refuse_open_files(directory: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        // Those of this process are closed by exec.
        if !is_inherited(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let Ok(path) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let is_directory = path.is_absolute()
            && !path.starts_with("/proc")
            && std::fs::metadata(entry.path()).is_ok_and(|m| m.is_dir());
        // Within `mojim run`, it is one of the mount.
        let is_past = path.starts_with(directory) && !is_mounted(&entry.path());
        if !is_directory && !is_past {
            continue;
        }
        return Err(Failure::failed(format!(
            "{} is open already (descriptor {}), so the program would reach the volume's files past Mojim. Have it opened under `mojim run`, for example: mojim run … -- sh -c 'program > file'",
            path.display(),
            entry.file_name().to_string_lossy()
        )));
    }
    Ok(())
}

/// Whether the descriptor of this number stays open at exec.
fn is_inherited(number: &str) -> bool {
    let Ok(n) = number.parse() else {
        return false;
    };
    // SAFETY: asks for the flags of a descriptor, or fails if it is none.
    let flags = unsafe { libc::fcntl(n, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

fn is_mounted(path: &Path) -> bool {
    statfs(path).is_ok_and(|s| s.f_type == mojim_linux::trust::FUSE)
}

/// A working directory in the volume's directory that has another path, as by a bind mount, stays
/// that of the bare copy.
fn refuse_another_way(directory: &Path) -> Result<(), Failure> {
    let id = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
    let is = id(directory)?;
    let Ok(start) = std::env::current_dir() else {
        return Ok(());
    };
    match start.ancestors().find(|d| id(d).is_ok_and(|i| i == is)) {
        Some(same) => Err(Failure::failed(format!(
            "{} is {} by another path, which is not mounted: change to that one first",
            same.display(),
            directory.display()
        ))),
        None => Ok(()),
    }
}
