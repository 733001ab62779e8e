//! Mounts, loop devices and the shutdown of file systems.
//!
//! Owns every system call that is not about ordinary files. Invariant: nothing outlives
//! the process, however it ends. Mounts are in a namespace of their own, and a loop
//! device is cleared when no process has it open.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::Result;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const BLKFLSBUF: libc::c_ulong = 0x1261;
const FS_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587d;
const FSOP_GOING_FLAGS_NOLOGFLUSH: u32 = 2;
/// How long a file system that is being unmounted may still be in use.
const PATIENCE: Duration = Duration::from_secs(60);

fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Gives this thread, and the threads that it starts from now on, their own mount
/// namespace.
fn own_mounts() -> io::Result<()> {
    let none = std::ptr::null();
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: changes this thread's view of the file systems only, by names
    // that outlive the calls.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        done(libc::mount(
            c"none".as_ptr(),
            c"/".as_ptr(),
            none,
            flags,
            none.cast(),
        ))
    }
}

/// Whether mounts may have their requests come over io_uring.
const URING: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether this machine's kernel has FUSE over io_uring: `mojim mount --uring on` switches it on.
pub fn has_uring() -> bool {
    // The module may be loaded by that.
    let _ = File::open("/dev/fuse");
    Path::new(URING).exists()
}

/// Switches FUSE over io_uring off again when this is dropped, if it was off.
pub struct UringAsItWas(Option<String>);

impl UringAsItWas {
    /// Notes how it is.
    pub fn note() -> UringAsItWas {
        UringAsItWas(std::fs::read_to_string(URING).ok())
    }
}

impl Drop for UringAsItWas {
    fn drop(&mut self) {
        if self.0.as_ref().is_some_and(|was| was.trim() == "N") {
            // Then it stays on, which does no harm.
            let _ = std::fs::write(URING, "N");
        }
    }
}

/// A mount, which is undone when this is dropped.
pub struct Mounted(PathBuf);

impl Mounted {
    /// Mounts `device` at `at`; the directory is made.
    pub fn new(kind: &str, device: &Path, at: &Path) -> io::Result<Mounted> {
        std::fs::create_dir_all(at)?;
        let (device, kind, place) = (text(device)?, CString::new(kind)?, text(at)?);
        // SAFETY: names that outlive the call.
        done(unsafe {
            libc::mount(
                device.as_ptr(),
                place.as_ptr(),
                kind.as_ptr(),
                libc::MS_NOATIME,
                std::ptr::null(),
            )
        })?;
        Ok(Mounted(at.to_owned()))
    }

    /// The mount point.
    pub fn at(&self) -> &Path {
        &self.0
    }

    /// Shuts the file system down: loses the page cache and what the journal has not
    /// written, and accepts nothing any more.
    pub fn shut_down(&self) -> io::Result<()> {
        let dir = File::open(&self.0)?;
        let how = FSOP_GOING_FLAGS_NOLOGFLUSH;
        // SAFETY: the call reads the four bytes of `how`.
        done(unsafe { libc::ioctl(dir.as_raw_fd(), FS_IOC_SHUTDOWN, &raw const how) })
    }

    /// Unmounts the file system; an error if it is still in use.
    pub fn unmount(self) -> io::Result<()> {
        let at = text(&self.0)?;
        let begin = Instant::now();
        let gone = loop {
            // SAFETY: a name that outlives the call.
            let gone = done(unsafe { libc::umount2(at.as_ptr(), 0) });
            // A child process that another thread has just forked holds all descriptors
            // until its exec, which no event tells of.
            let busy = matches!(&gone, Err(e) if e.raw_os_error() == Some(libc::EBUSY));
            if !busy || begin.elapsed() > PATIENCE {
                break gone;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if gone.is_ok() {
            std::mem::forget(self);
        }
        gone
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Ok(at) = text(&self.0) {
            // SAFETY: a name that outlives the call.
            unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// A directory in memory in which a rung works, with its own mount namespace.
pub struct Lab {
    mounted: Option<Mounted>,
    top: PathBuf,
}

impl Lab {
    /// Makes a directory; fails if this process may not mount.
    pub fn new() -> Result<Lab> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let n = NUMBER.fetch_add(1, Relaxed);
        let name = format!("mojim-crash-{}-{n}", std::process::id());
        let top = std::env::temp_dir().join(name);
        own_mounts().map_err(|e| format!("a mount namespace: {e}"))?;
        let mut lab = Lab {
            mounted: None,
            top: top.clone(),
        };
        let mounted = Mounted::new("tmpfs", Path::new("none"), &top);
        lab.mounted = Some(mounted.map_err(|e| format!("a tmpfs: {e}"))?);
        Ok(lab)
    }

    /// A path in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.mounted = None;
        let _ = std::fs::remove_dir(&self.top);
    }
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    // `struct loop_info64`: what is before its flags, and what is behind them.
    _before: [u8; 52],
    flags: u32,
    _behind: [u8; 176],
    _reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// A loop device. The kernel removes it when this is dropped and nothing is mounted from
/// it.
pub struct Loop {
    open: File,
    path: PathBuf,
}

impl Loop {
    /// A new loop device over `backing`.
    pub fn new(backing: &Path) -> Result<Loop> {
        let backing = OpenOptions::new().read(true).write(true).open(backing)?;
        let control = File::open("/dev/loop-control")?;
        let config = LoopConfig {
            fd: backing.as_raw_fd() as u32,
            block_size: 512,
            _before: [0; 52],
            flags: LO_FLAGS_AUTOCLEAR,
            _behind: [0; 176],
            _reserved: [0; 8],
        };
        loop {
            // SAFETY: takes no argument.
            let n = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if n < 0 {
                return Err(format!("a loop device: {}", io::Error::last_os_error()).into());
            }
            let path = PathBuf::from(format!("/dev/loop{n}"));
            let open = OpenOptions::new().read(true).write(true).open(&path)?;
            // SAFETY: the call reads `config`.
            let set =
                done(unsafe { libc::ioctl(open.as_raw_fd(), LOOP_CONFIGURE, &raw const config) });
            match set {
                Ok(()) => return Ok(Loop { open, path }),
                // Another process took this device first.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(format!("{}: {e}", path.display()).into()),
            }
        }
    }

    /// The path of its device file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Drops the kernel's cache of the device: what is behind it was changed.
    pub fn forget(&self) -> io::Result<()> {
        // SAFETY: takes no argument.
        done(unsafe { libc::ioctl(self.open.as_raw_fd(), BLKFLSBUF) })
    }
}

/// Makes a file system of `bytes` bytes in a file.
pub fn make_file_system(kind: &str, image: &Path, bytes: u64) -> Result<()> {
    let options: &[&str] = match kind {
        "ext4" => &[
            "-q",
            "-F",
            "-b4096",
            "-Jsize=4",
            "-Elazy_itable_init=0,lazy_journal_init=0,nodiscard",
        ],
        _ => &["-q", "-f", "-K"],
    };
    let file = File::create(image)?;
    file.set_len(bytes)?;
    let name = format!("mkfs.{kind}");
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut command = Command::new(&name);
    command.args(options).arg(image).env("PATH", path);
    let ended = command.stdout(Stdio::null()).status();
    match ended.map_err(|e| format!("{name}: {e}"))? {
        s if s.success() => Ok(()),
        s => Err(format!("{name}: {s}").into()),
    }
}

/// Whether the command that makes such a file system is installed.
pub fn has_file_system(kind: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    path.split(':')
        .any(|dir| Path::new(dir).join(format!("mkfs.{kind}")).exists())
}

/// Begins to write a file's page cache back, and flushes nothing.
pub fn begin_writeback(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) })
}
