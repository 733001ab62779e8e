//! The code in a machine that has less memory than its program stores, and a disk to swap to.
//!
//! Owns one life of such a machine, and the checks while it lives:
//!
//! - A region is what the program stored, whatever of it is in memory, in swap or nowhere but in
//!   the file.
//! - Nothing of a step is in the file before it is committed.
//! - Bytes that are taken back are gone.
//! - Committed pages are given back, where the volume has a bound of memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mojim::{Config, MapFlags, Mapping, Volume, gmsync, msync, rollback};
use rustix::mm::{MsyncFlags, ProtFlags};

use super::boot::{self, mount, read_line, say};
use super::order::Order;
use super::pages::{End, Model, Step, WORDS, judge, step, store, stored};
use crate::Result;
use crate::machine::{Fault, Machine};
use crate::subject::{Kind, SubjectPaths};
use crate::workload::PAGE;

/// On the kernel's command line of such a machine.
pub(super) const ASKED: &str = "mojim.pressed";
/// Bytes of the region.
const LEN: usize = 96 << 20;
const PAGES: usize = LEN / PAGE;
/// The volume's bound of memory, in MiB, in half of the runs.
const MEMORY: u64 = 8;
/// What a program may hold beside it, in MiB: images of pages, and its own.
const BESIDE: u64 = MEMORY / 4 + 8;
/// How long committed pages may take to be given back.
const PATIENCE: Duration = Duration::from_secs(300);
const FILE: &str = "f";

/// Whether this machine is to live so.
pub(super) fn is_asked() -> Result<bool> {
    Ok(std::fs::read_to_string("/proc/cmdline")?.contains(ASKED))
}

/// Whether the volume has a bound of memory: with a private working copy. The others have
/// shared memory, which cannot be bounded.
pub(super) fn is_bounded(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// A life of the machine.
pub(super) fn live() -> Result<()> {
    let mut line = boot::line()?;
    say(&mut line, "ready")?;
    let order = Order::parse(&read_line(&mut line)?).ok_or("not an order")?;
    boot::begin_life(order.boot)?;
    // SAFETY: a string that ends with zero.
    if unsafe { libc::swapon(c"/dev/vdb".as_ptr(), 0) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // The kernel tells of each signal that this process handles, on a slow line.
    std::fs::write("/proc/sys/debug/exception-trace", "0")?;
    // Pages of programs go as soon as those of files.
    std::fs::write("/proc/sys/vm/swappiness", "100")?;
    std::fs::create_dir_all("/mnt")?;
    mount("/dev/vda", Path::new("/mnt"), "ext4", 0, "")?;
    say(&mut line, "mounted")?;
    match make_steps(&order, &mut line)? {
        None => say(&mut line, "done"),
        Some(wrong) => say(&mut line, &format!("bad {}", wrong.replace('\n', "; "))),
    }
}

/// Checks what the life before left, and goes on. Returns what is wrong, if anything.
fn make_steps(order: &Order, line: &mut File) -> Result<Option<String>> {
    let mut last = 0;
    if let Some(acknowledged) = order.acknowledged {
        // What recovers has no fault.
        let kind = match order.kind {
            Kind::Mojim(_) => Kind::Mojim(None),
            kind => kind,
        };
        let program = Program::open(kind, "check", order.seed)?;
        match judge(order.seed, program.words(), acknowledged) {
            Ok(step) => last = step,
            Err(e) => return Ok(Some(e)),
        }
        program.close()?;
        say(line, &format!("found {last}"))?;
    }
    let program = Program::open(order.kind, "run", order.seed)?;
    let mut run = Run {
        model: Model::after(order.seed, PAGES, last),
        base: anonymous()?,
        program,
        seed: order.seed,
    };
    say(line, &format!("ack {last}"))?;
    for n in last + 1..=order.steps {
        let wrong = run.make(n, line)?;
        if wrong.is_some() {
            return Ok(wrong);
        }
        say(
            line,
            &format!("ack {n} {}", anonymous()?.saturating_sub(run.base)),
        )?;
    }
    run.program.close()?;
    Ok(None)
}

/// A figure in KiB from one of the kernel's tables.
fn figure(table: &str, name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(table)?;
    let row = text.lines().find_map(|l| l.strip_prefix(name));
    let word = row.and_then(|r| r.split_ascii_whitespace().next());
    Ok(word
        .ok_or_else(|| format!("{table} has no {name}"))?
        .parse()?)
}

/// KiB in memory of this program that no file has. A committed page that went to swap before
/// it was given back stays there until it is used again: the page tables do not tell it from
/// a page that was given back.
fn anonymous() -> Result<u64> {
    figure("/proc/self/status", "RssAnon:")
}

/// KiB in swap, of shared memory too.
fn swapped() -> Result<u64> {
    let of = |name| figure("/proc/meminfo", name);
    Ok(of("SwapTotal:")? - of("SwapFree:")?)
}

/// The region, and how it is made durable.
enum Program {
    Mojim {
        volume: Volume,
        region: Mapping,
    },
    /// A shared mapping of the file.
    Naive(*mut u8),
}

impl Program {
    fn open(kind: Kind, ring: &str, seed: u64) -> Result<Program> {
        let place = SubjectPaths {
            dir: "/mnt/d".into(),
            ring: Path::new("/dev/shm").join(ring),
            medium: "disk".into(),
            forced: None,
        };
        std::fs::create_dir_all(place.dir.join("v"))?;
        match kind {
            Kind::Mojim(fault) => Program::open_volume(&place, seed, fault),
            _ => Program::map_file(&place),
        }
    }

    fn open_volume(place: &SubjectPaths, seed: u64, fault: Option<Fault>) -> Result<Program> {
        let shared = !is_bounded(seed);
        let bound = match shared {
            true => String::new(),
            false => format!("memory = \"{MEMORY}MiB\"\n"),
        };
        let text = format!(
            "cluster = \"crash\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\n{bound}\
             [node.a]\naddress = \"127.0.0.1:7401\"\ndirectory = \"{}\"\nring = \"{}\"\n\
             log = {{ medium = \"disk\", size = \"4MiB\" }}\n",
            place.dir.display(),
            place.ring.display(),
        );
        let data = place.dir.join("v").join(FILE);
        let over = |os| -> Arc<dyn mojim_env::Env> {
            Arc::new(Machine {
                os,
                newest: Arc::default(),
                boot: 0,
                fault,
                data,
                forced: None,
            })
        };
        let config = Config::parse(&text, Path::new("crash.toml"))?;
        let volume = Volume::attach_over(&config, "a", None, over, |_, _| {})?;
        let flags = MapFlags {
            create: true,
            atomic: true,
            shared,
            ..MapFlags::default()
        };
        let region = volume.map(FILE, LEN, flags)?;
        Ok(Program::Mojim { volume, region })
    }

    fn map_file(place: &SubjectPaths) -> Result<Program> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(place.dir.join("v").join(FILE))?;
        file.set_len(LEN as u64)?;
        let (how, shared) = (
            ProtFlags::READ | ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
        );
        // SAFETY: a new mapping, where the kernel likes.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, how, shared, &file, 0)? };
        Ok(Program::Naive(at.cast()))
    }

    fn at(&self) -> *mut u8 {
        match self {
            Program::Mojim { region, .. } => region.ptr,
            Program::Naive(at) => *at,
        }
    }

    fn words(&self) -> &[u64] {
        // SAFETY: mapped until `close` takes this value; stores are made by `page` only,
        // which takes it exclusively.
        unsafe { std::slice::from_raw_parts(self.at().cast(), LEN / 8) }
    }

    fn page(&mut self, page: usize) -> &mut [u64] {
        assert!(page < PAGES);
        // SAFETY: as above; the page is in the region.
        unsafe { std::slice::from_raw_parts_mut(self.at().add(page * PAGE).cast(), WORDS) }
    }

    fn close(self) -> Result<()> {
        match self {
            Program::Mojim { volume, .. } => volume.detach()?,
            // SAFETY: the mapping of `map_file`, which nothing else uses.
            Program::Naive(at) => unsafe { rustix::mm::munmap(at.cast(), LEN)? },
        }
        Ok(())
    }
}

/// The steps of one life.
struct Run {
    program: Program,
    model: Model,
    seed: u64,
    /// What the program held before its first store.
    base: u64,
}

impl Run {
    /// Makes one step. Returns what is wrong, if anything.
    fn make(&mut self, n: u64, line: &mut File) -> Result<Option<String>> {
        let step = step(self.seed, n, PAGES);
        for &(page, whole) in &step.pages {
            store(self.seed, n, page, whole, self.program.page(page));
        }
        say(line, &format!("stored {n} {}", swapped()?))?;
        let mut then = self.model.clone();
        then.take(n, &step);
        if n.is_multiple_of(3)
            && let Some((many, first)) = then.wrong(self.program.words())
        {
            let what = format!("step {n} stored, {many} pages are otherwise, the first {first}");
            return Ok(Some(what));
        }
        if let Some(page) = self.in_the_file(n, &step)? {
            let what = format!("page {page} of step {n} was in the file before it was committed");
            return Ok(Some(what));
        }
        self.end(&step)?;
        if step.end != End::Rollback {
            self.model = then;
        }
        if (n % 3 == 1 || step.end == End::Rollback)
            && let Some((many, first)) = self.model.wrong(self.program.words())
        {
            let end = step.end;
            let what =
                format!("step {n} ended ({end:?}), {many} pages are otherwise, the first {first}");
            return Ok(Some(what));
        }
        self.await_given_back(n)
    }

    /// A page of which the file has what is not committed. (What a shared mapping stores is
    /// in the file at once.)
    fn in_the_file(&self, n: u64, step: &Step) -> Result<Option<usize>> {
        if matches!(self.program, Program::Naive(_)) {
            return Ok(None);
        }
        let file = File::open(Path::new("/mnt/d/v").join(FILE))?;
        let mut bytes = vec![0; PAGE];
        for &(page, _) in step.pages.iter().step_by(16) {
            file.read_exact_at(&mut bytes, (page * PAGE) as u64)?;
            let words = bytes.chunks_exact(8);
            let words = words.map(|w| u64::from_ne_bytes(w.try_into().expect("eight bytes")));
            if self.model.has_of(page, n, &words.collect::<Vec<_>>()) {
                return Ok(Some(page));
            }
        }
        Ok(None)
    }

    fn end(&mut self, step: &Step) -> Result<()> {
        let at = self.program.at();
        if let Program::Naive(_) = self.program {
            if step.end == End::Rollback {
                for &(page, _) in &step.pages {
                    self.model.fill(page, self.program.page(page));
                }
            }
            // SAFETY: the whole mapping.
            unsafe { rustix::mm::msync(at.cast(), LEN, MsyncFlags::SYNC)? };
            return Ok(());
        }
        match step.end {
            End::Region => {
                msync(at, LEN)?;
            }
            End::Rollback => {
                rollback(at, LEN)?;
            }
            End::Ranges => {
                let range = |&(page, whole): &(usize, bool)| {
                    (at.wrapping_add(page * PAGE).cast_const(), stored(whole))
                };
                let ranges: Vec<_> = step.pages.iter().map(range).collect();
                gmsync(&ranges)?;
            }
        }
        Ok(())
    }

    /// Waits until the program holds no more than the volume's bound, if it has one: nothing
    /// is uncommitted.
    fn await_given_back(&self, n: u64) -> Result<Option<String>> {
        let bound = match self.program {
            Program::Mojim { .. } if is_bounded(self.seed) => (MEMORY + BESIDE) << 10,
            _ => return Ok(None),
        };
        let begin = Instant::now();
        loop {
            let held = anonymous()?.saturating_sub(self.base);
            if held <= bound {
                return Ok(None);
            }
            if begin.elapsed() > PATIENCE {
                return Ok(Some(format!(
                    "step {n} ended, and the program still holds {held} KiB of {bound}"
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
