//! The first steps of every machine, and how it speaks to the host.
//!
//! Owns the guest's end of the line: a line has left the machine before [`say`] returns.
//! So a reader that reads the lines to their end knows of all that was said.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::Result;

/// The guest's end of the connection to the host.
const LINE: &str = "/dev/ttyS1";
/// The directory of the modules in the initramfs, in the order of loading.
pub(super) const MODULES: &str = "/modules";

/// Mounts what a system has, and loads the modules.
pub(super) fn begin() -> Result<()> {
    for (kind, at) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
    ] {
        std::fs::create_dir_all(at)?;
        mount(kind, Path::new(at), kind, 0, "")?;
    }
    std::fs::create_dir_all("/dev/shm")?;
    mount("tmpfs", Path::new("/dev/shm"), "tmpfs", 0, "")?;
    let mut modules: Vec<PathBuf> = std::fs::read_dir(MODULES)?
        .map(|e| e.map(|e| e.path()))
        .collect::<io::Result<_>>()?;
    modules.sort();
    for module in modules {
        load(&module).map_err(|e| format!("{}: {e}", module.display()))?;
    }
    Ok(())
}

/// Gives this life of the machine a boot id of its own.
pub(super) fn begin_life(boot: u64) -> Result<()> {
    let id = format!(
        "{:08x}-0000-4000-8000-{:012x}",
        boot >> 32,
        boot & 0xffff_ffff
    );
    std::fs::write("/tmp/boot", id)?;
    let at = Path::new("/proc/sys/kernel/random/boot_id");
    mount("/tmp/boot", at, "", libc::MS_BIND, "")
}

/// Opens the line to the host.
pub(super) fn line() -> Result<File> {
    Ok(raw(LINE).map_err(|e| format!("{LINE}: {e}"))?)
}

/// Writes a line, and waits until it has left the machine.
pub(super) fn say(line: &mut File, text: &str) -> Result<()> {
    line.write_all(format!("{text}\n").as_bytes())?;
    // SAFETY: an open descriptor.
    if unsafe { libc::tcdrain(line.as_raw_fd()) } != 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}

/// Reads a line from the host.
pub(super) fn read_line(line: &mut File) -> io::Result<String> {
    let mut text = Vec::new();
    let mut byte = [0];
    while line.read(&mut byte)? == 1 && byte[0] != b'\n' {
        text.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Opens a serial line in raw mode.
fn raw(path: &str) -> io::Result<File> {
    let line = OpenOptions::new().read(true).write(true).open(path)?;
    // SAFETY: a termios of zeros is a valid value, which the first call fills;
    // the descriptor is open.
    let done = unsafe {
        let mut how: libc::termios = std::mem::zeroed();
        libc::tcgetattr(line.as_raw_fd(), &mut how);
        libc::cfmakeraw(&mut how);
        libc::tcsetattr(line.as_raw_fd(), libc::TCSANOW, &how)
    };
    if done == 0 {
        Ok(line)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Mounts a file system.
pub(super) fn mount(
    from: &str,
    at: &Path,
    kind: &str,
    flags: libc::c_ulong,
    options: &str,
) -> Result<()> {
    let c = |s: &str| CString::new(s).expect("no zero byte");
    let (source, target) = (c(from), c(&at.to_string_lossy()));
    let (kind, options) = (c(kind), c(options));
    // SAFETY: four strings that end with zero.
    let done = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    if done == 0 {
        return Ok(());
    }
    let e = io::Error::last_os_error();
    Err(format!("mounting {from} on {}: {e}", at.display()).into())
}

fn load(module: &Path) -> io::Result<()> {
    /// MODULE_INIT_COMPRESSED_FILE
    const COMPRESSED: libc::c_int = 4;
    let flags = match module.extension() {
        Some(e) if e == "ko" => 0,
        _ => COMPRESSED,
    };
    let file = File::open(module)?;
    // SAFETY: an open descriptor, a string that ends with zero, a number.
    let done = unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            c"".as_ptr(),
            flags,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
