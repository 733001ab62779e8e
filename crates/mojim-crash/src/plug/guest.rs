//! The program that runs inside the machine: its first and only process.
//!
//! Owns what a boot does: it turns the emulated NVDIMM into one that can be mapped
//! (fsdax), and says `ready` on the second serial line. Then it follows one [`Order`]: it
//! mounts, checks what the last life left, continues the workload from there, and
//! acknowledges each step by a line. A machine that is to run short of memory lives as
//! `pressed` has it.

use std::fs::File;
use std::path::Path;

use super::boot::{self, mount, read_line, say};
use super::medium::Medium;
use super::order::{AHEAD, Order};
use super::pressed;
use crate::subject::SubjectPaths;
use crate::workload::{self, Model};
use crate::{Result, subjects};

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
    boot::begin()?;
    if pressed::is_asked()? {
        return pressed::live();
    }
    make_fsdax()?;
    let mut line = boot::line()?;
    // The file systems are put on the disks later, and may differ from those that the
    // kernel saw when it looked at the disks.
    std::fs::write("/proc/sys/vm/drop_caches", "3").map_err(|e| format!("drop_caches: {e}"))?;
    say(&mut line, "ready")?;
    let order = read_line(&mut line)?;
    let order = Order::parse(&order).ok_or("not an order")?;
    obey(&order, &mut line)
}

fn obey(order: &Order, line: &mut File) -> Result<()> {
    boot::begin_life(order.boot)?;
    let (device, options) = match order.medium {
        Medium::Disk => ("/dev/vda", ""),
        Medium::Nvdimm => ("/dev/pmem0", "dax=always"),
    };
    std::fs::create_dir_all("/mnt")?;
    mount(device, Path::new("/mnt"), "ext4", 0, options)?;
    say(line, "mounted")?;
    std::fs::create_dir_all("/mnt/d")?;
    let place = |ring: &str| SubjectPaths {
        dir: "/mnt/d".into(),
        ring: Path::new("/dev/shm").join(ring),
        medium: order.medium.log().into(),
        forced: None,
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
