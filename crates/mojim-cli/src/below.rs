//! The empty file system over the directory of a mount that waits (`mojim mount --wait`).
//!
//! Owns that it goes with its process, however that ends. It takes nothing: what programs stored into the
//! bare directory while this node is not the primary would stay on this machine. Only root may have
//! it.
//!
//! A second process waits for the first one's end, and takes the file system away. Where both were
//! killed at once, the next `mojim mount --wait` does so.

use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::runs_mount::{Device, device_of};

/// The source of such a file system, before the number of its process.
const SOURCE: &str = "mojim:waiting:";

/// What the second process hears: the device's two numbers, then a byte.
const MESSAGE: usize = 9;

/// The file system, as long as this lives.
pub struct Below(Option<Laid>);

struct Laid {
    at: PathBuf,
    device: Device,
    /// The second process does nothing once it hears the last byte.
    tell: io::PipeWriter,
}

impl Below {
    /// Lays it over `directory`; nothing if this process may not.
    ///
    /// # Errors
    /// The second process cannot be made.
    pub fn over(directory: &Path) -> io::Result<Below> {
        let at = std::fs::canonicalize(directory)?;
        while is_left(&at) {
            unmount(&at, UnmountFlags::DETACH)?;
        }
        // First the second process: this one may be killed as soon as the file system is there.
        let mut tell = watch(&at)?;
        let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
        let source = format!("{SOURCE}{}", std::process::id());
        if mount(source, &at, "tmpfs", flags, None).is_err() {
            let _ = tell.write_all(&[0; MESSAGE]);
            return Ok(Below(None));
        }
        let device = device_of(&at).and_then(|device| {
            tell.write_all(&told(device))?;
            Ok(device)
        });
        match device {
            Ok(device) => Ok(Below(Some(Laid { at, device, tell }))),
            // Nobody would take it away.
            Err(e) => {
                let _ = unmount(&at, UnmountFlags::DETACH);
                Err(e)
            }
        }
    }
}

/// Makes the second process, before there is anything to take away. It hears the file system's
/// device, and a byte more if nothing is left to do.
fn watch(at: &Path) -> io::Result<io::PipeWriter> {
    let below = device_of(at).ok();
    let (mut hear, tell) = io::pipe()?;
    let path = CString::new(at.as_os_str().as_bytes())?;
    // SAFETY: the child makes system calls only, on what was prepared.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(tell);
            let _ = rustix::process::setsid();
            let (mut heard, mut n) = ([0; MESSAGE], 0);
            // Until the other end is closed, or all is said.
            while n < MESSAGE {
                match hear.read(&mut heard[n..]) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Ok(more) if more > 0 => n += more,
                    _ => break,
                }
            }
            let is_own = |device: Device| match heard {
                // It was killed before it could say which one it is.
                _ if n < MESSAGE - 1 => Some(device) != below && is_tmpfs(&path),
                [a, b, c, d, e, f, g, h, _] => {
                    let [major, minor] = [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes);
                    device == (major, minor)
                }
            };
            if n < MESSAGE {
                take_away(&path, is_own);
            }
            // SAFETY: ends the process without running anything of its parent's.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(tell),
    }
}

/// The first bytes of what the second process hears.
fn told((major, minor): Device) -> [u8; MESSAGE - 1] {
    let mut told = [0; MESSAGE - 1];
    told[..4].copy_from_slice(&major.to_ne_bytes());
    told[4..].copy_from_slice(&minor.to_ne_bytes());
    told
}

impl Drop for Below {
    fn drop(&mut self) {
        if let Some(laid) = &mut self.0 {
            // Somebody else may have unmounted it.
            if device_of(&laid.at).is_ok_and(|d| d == laid.device) {
                let _ = unmount(&laid.at, UnmountFlags::DETACH);
            }
            let _ = laid.tell.write(&[1]);
        }
    }
}

/// Takes the file system away, with the dead mount over it, if there is one.
fn take_away(at: &CString, is_own: impl Fn(Device) -> bool) {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statfs, statx};
    use rustix::io::Errno;
    for _ in 0..2 {
        // Without a question to the server of what is there.
        let flags = AtFlags::STATX_DONT_SYNC;
        let own = statx(CWD, at.as_c_str(), flags, StatxFlags::TYPE)
            .is_ok_and(|s| is_own((s.stx_dev_major, s.stx_dev_minor)));
        if !own && statfs(at.as_c_str()).err() != Some(Errno::NOTCONN) {
            return;
        }
        let _ = unmount(at.as_c_str(), UnmountFlags::DETACH);
        if own {
            return;
        }
    }
}

/// Whether the uppermost file system at `at` lies in memory.
fn is_tmpfs(at: &CString) -> bool {
    let found = rustix::fs::statfs(at.as_c_str());
    found.is_ok_and(|s| s.f_type == libc::TMPFS_MAGIC)
}

/// Whether the uppermost file system at `at` is one of a process that has ended.
fn is_left(at: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let at = at.to_string_lossy().replace(' ', "\\040");
    let of = |line: &str| {
        let (source, rest) = line.split_once(' ')?;
        (rest.split(' ').next()? == at).then(|| source.to_owned())
    };
    let Some(source) = mounts.lines().filter_map(of).next_back() else {
        return false;
    };
    source.strip_prefix(SOURCE).is_some_and(|id| {
        let name = std::fs::read_to_string(format!("/proc/{id}/comm"));
        !name.is_ok_and(|n| n.trim_end() == "mojim")
    })
}
