//! What runs inside the machine: its first and only process.
//!
//! Owns what a boot does: it loads modules, turns the emulated NVDIMM into one that can
//! be mapped (fsdax), and says `ready` on the second serial line. Then it follows one
//! [`Order`]: it mounts, checks what the last life left, continues the workload from
//! there, and acknowledges each step by a line.
//!
//! Invariant: a line has left the machine before the next step begins, so a reader that
//! reads the lines to their end knows of every acknowledgement.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::medium::Medium;
use crate::subject::{Kind, Place};
use crate::workload::{self, Model};
use crate::{Result, subjects};

/// The guest's end of the connection to the host.
const LINE: &str = "/dev/ttyS1";
/// The directory of the modules in the initramfs, in the order of loading.
pub(super) const MODULES: &str = "/modules";

/// The instructions for one life of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) kind: Kind,
    pub(super) medium: Medium,
    /// This life's boot id: a saved state would always have the same.
    pub(super) boot: u64,
    pub(super) seed: u64,
    /// The step that was acknowledged on this disk, if the disk is not new.
    pub(super) acknowledged: Option<u64>,
    /// The last step to make.
    pub(super) steps: u64,
}

impl Order {
    /// The order as a line.
    pub(super) fn line(&self) -> String {
        let before = match self.acknowledged {
            Some(n) => n.to_string(),
            None => "new".into(),
        };
        format!(
            "{} {} {:016x} {} {before} {}\n",
            self.kind.name(),
            self.medium.name(),
            self.boot,
            self.seed,
            self.steps
        )
    }

    /// Parses a line.
    fn parse(line: &str) -> Option<Order> {
        let mut words = line.split_ascii_whitespace();
        let mut next = || words.next();
        Some(Order {
            kind: Kind::of(next()?)?,
            medium: Medium::of(next()?).ok()?,
            boot: u64::from_str_radix(next()?, 16).ok()?,
            seed: next()?.parse().ok()?,
            acknowledged: match next()? {
                "new" => None,
                n => Some(n.parse().ok()?),
            },
            steps: next()?.parse().ok()?,
        })
    }
}

/// How many steps may be there without having been acknowledged: the one that was being
/// made.
pub(super) const AHEAD: u64 = 1;

/// The life of the machine. Returns only to end it.
pub(super) fn main() -> ! {
    if let Err(e) = live() {
        // To the console, which the host shows.
        eprintln!("mojim-crash: {e}");
    }
    // SAFETY: ends this machine, whose only process this is.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
    std::process::exit(1);
}

fn live() -> Result<()> {
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
    make_fsdax()?;
    let mut line = raw(LINE).map_err(|e| format!("{LINE}: {e}"))?;
    // The file systems are put on the disks later, and may differ from those that the
    // kernel saw when it looked at the disks.
    std::fs::write("/proc/sys/vm/drop_caches", "3").map_err(|e| format!("drop_caches: {e}"))?;
    say(&mut line, "ready")?;
    let order = read_line(&mut line)?;
    let order = Order::parse(&order).ok_or("not an order")?;
    obey(&order, &mut line)
}

fn obey(order: &Order, line: &mut File) -> Result<()> {
    let boot = format!(
        "{:08x}-0000-4000-8000-{:012x}",
        order.boot >> 32,
        order.boot & 0xffff_ffff
    );
    std::fs::write("/tmp/boot", boot)?;
    mount(
        "/tmp/boot",
        Path::new("/proc/sys/kernel/random/boot_id"),
        "",
        libc::MS_BIND,
        "",
    )?;
    let (device, options) = match order.medium {
        Medium::Disk => ("/dev/vda", ""),
        Medium::Nvdimm => ("/dev/pmem0", "dax=always"),
    };
    std::fs::create_dir_all("/mnt")?;
    mount(device, Path::new("/mnt"), "ext4", 0, options)?;
    say(line, "mounted")?;
    std::fs::create_dir_all("/mnt/d")?;
    let place = |ring: &str| Place {
        dir: "/mnt/d".into(),
        ring: Path::new("/dev/shm").join(ring),
        medium: order.medium.log().into(),
    };
    let mut step = 0;
    if let Some(acknowledged) = order.acknowledged {
        let mut model = Model::new(order.seed);
        let started = acknowledged + AHEAD;
        match crate::check(
            order.kind,
            &place("check"),
            &mut model,
            acknowledged,
            started,
        ) {
            Ok(n) => step = n,
            Err(e) => return say(line, &format!("bad {}", e.replace('\n', "; "))),
        }
        say(line, &format!("found {step}"))?;
    }
    let mut subject = subjects::open(order.kind, &place("run"), order.seed)?;
    say(line, &format!("ack {step}"))?;
    while step < order.steps {
        step += 1;
        if workload::reopens(order.seed, step) {
            subject.close()?;
            subject = subjects::open(order.kind, &place("run"), order.seed)?;
        }
        subject.commit(&workload::changes(order.seed, step))?;
        say(line, &format!("ack {step}"))?;
    }
    say(line, "done")
}

/// Writes a line, and waits until it has left the machine.
fn say(line: &mut File, text: &str) -> Result<()> {
    line.write_all(format!("{text}\n").as_bytes())?;
    // SAFETY: an open descriptor.
    if unsafe { libc::tcdrain(line.as_raw_fd()) } != 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}

fn read_line(line: &mut File) -> io::Result<String> {
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

fn mount(from: &str, at: &Path, kind: &str, flags: libc::c_ulong, options: &str) -> Result<()> {
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

/// Makes the NVDIMM mappable. Linux takes a new NVDIMM for a disk only; its pages can be
/// mapped once it has an fsdax namespace. The namespace's description is written to it, 2
/// MiB before what is then `/dev/pmem0`. Does what `ndctl create-namespace -m fsdax -M
/// mem` does.
fn make_fsdax() -> Result<()> {
    let at = Path::new("/sys/bus/nd");
    // Drivers find their devices in threads of their own.
    let dax = loop {
        if let Ok(text) = std::fs::read_to_string("/sys/block/pmem0/queue/dax") {
            break text;
        }
        std::thread::yield_now();
    };
    if dax.trim() == "1" {
        return Ok(());
    }
    let region = at.join("devices/region0");
    let seed = loop {
        match std::fs::read_to_string(region.join("pfn_seed")) {
            Ok(seed) if !seed.trim().is_empty() => break seed,
            _ => std::thread::yield_now(),
        }
    };
    let seed = seed.trim();
    let set = |what: &Path, value: &str| {
        std::fs::write(what, value).map_err(|e| format!("{}: {e}", what.display()))
    };
    let driver = at.join("drivers/nd_pmem");
    set(&driver.join("unbind"), "namespace0.0")?;
    for (what, value) in [
        ("mode", "ram"),
        ("align", "2097152"),
        ("uuid", "6d6f6a69-6d00-4000-8000-000000000001"),
        ("namespace", "namespace0.0"),
    ] {
        set(&region.join(seed).join(what), value)?;
    }
    set(&driver.join("bind"), seed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_read_as_written() {
        for acknowledged in [None, Some(0), Some(77)] {
            let order = Order {
                kind: Kind::Mojim(None),
                medium: Medium::Nvdimm,
                boot: 0xabc,
                seed: 9,
                acknowledged,
                steps: 100,
            };
            assert_eq!(Order::parse(&order.line()), Some(order));
        }
        assert_eq!(Order::parse("mojim disk 1"), None);
    }
}
