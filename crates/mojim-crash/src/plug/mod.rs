//! The pulled plug: the workload runs in a machine in QEMU, on a disk or on an
//! emulated NVDIMM with DAX, and QEMU is killed at a random moment.
//!
//! Owns the rounds and the verdicts. An image lives through several lives: each
//! checks what the one before left, goes on from there, acknowledges steps over
//! a serial line, and ends when the plug is pulled, while it mounts, while it
//! recovers, or after some steps; the last one only checks. All lives begin at
//! one saved state, just before the mount, so a life costs half a second.
//!
//! What goes with the plug is the guest's memory, its page cache in it. What the
//! guest's disk had accepted stays, flushed or not, and an emulated processor has
//! no caches: block history and the shadow image look at these.

mod guest;
mod initramfs;
mod machine;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use clap::Args;
use mojim_sim::Rng;
use serde_json::json;

use crate::Result;
use crate::machine::Fault;
use crate::subject::Kind;
use guest::Order;
use initramfs::Kernel;
use machine::{Images, Machine, Start};

/// What the file system lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// virtio, with a cache that must be told to write.
    Disk,
    /// Mapped by DAX; Mojim's log on it has the medium `pmem`.
    Nvdimm,
}

impl Medium {
    const ALL: [Medium; 2] = [Medium::Disk, Medium::Nvdimm];

    fn name(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "nvdimm",
        }
    }

    fn of(name: &str) -> Option<Medium> {
        Medium::ALL.into_iter().find(|m| m.name() == name)
    }

    /// What Mojim's log is kept in.
    fn log(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "pmem",
        }
    }

    /// Whether a plug that is pulled shows what is broken in `kind`: on an
    /// NVDIMM each write to a file is there at once, synced or not.
    fn shows(self, kind: Kind) -> bool {
        let sync = matches!(
            kind,
            Kind::Mojim(Some(Fault::NoDataFlush | Fault::NoSuperblockFlush))
        );
        self == Medium::Disk || !sync
    }
}

/// Pulls the plug of a machine in QEMU, again and again; every byte of what is
/// recovered must be that of a step that may be the last.
#[derive(Args)]
pub struct Plug {
    /// How often, for each subject that must stand, on each medium. A broken
    /// one is run until it is found out, at most twice as often.
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// disk, nvdimm, or all.
    #[arg(long, default_value = "all", value_parser = medium)]
    medium: &'static [Medium],
    /// One of them, or all.
    #[arg(long, default_value = "all")]
    subject: String,
    /// Machines at one time.
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// What all choices follow from, but for what the clock does.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// An unpacked package of a kernel with its modules; scripts/plug fetches one.
    #[arg(long, default_value = "target/guest-kernel")]
    kernel: PathBuf,
    /// Where images are made: best in memory.
    #[arg(long, default_value = "/dev/shm")]
    scratch: PathBuf,
    /// Prints data.
    #[arg(long)]
    json: bool,
}

fn medium(name: &str) -> std::result::Result<&'static [Medium], String> {
    match name {
        "all" => Ok(&Medium::ALL),
        _ => Medium::ALL
            .iter()
            .position(|m| m.name() == name)
            .map(|i| &Medium::ALL[i..=i])
            .ok_or("disk, nvdimm or all".into()),
    }
}

/// Where this is the first process of a machine, lives its life.
pub fn be_guest() {
    // In a container it may be the first process, too.
    if std::process::id() == 1 && Path::new(guest::MODULES).is_dir() {
        guest::main();
    }
}

/// What is needed and not there, if anything is.
pub fn missing(kernel: &Path) -> Option<String> {
    let runs = |what: &str| std::process::Command::new(what).arg("--version").output();
    if let Err(e) = runs(machine::QEMU) {
        return Some(format!("{}: {e}", machine::QEMU));
    }
    Kernel::find(kernel).err().map(|e| e.to_string())
}

/// A directory that is removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(at: &Path, name: &str) -> Result<Scratch> {
        let at = if at.is_dir() {
            at.to_path_buf()
        } else {
            std::env::temp_dir()
        };
        let dir = at.join(format!("mojim-plug-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        Ok(Scratch(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A machine that has booted and waits for its order, saved, and its images.
struct Bench {
    dir: Scratch,
    images: Images,
    state: PathBuf,
}

impl Bench {
    fn new(plug: &Plug) -> Result<Bench> {
        let dir = Scratch::new(&plug.scratch, "saved")?;
        let kernel = Kernel::find(&plug.kernel)?;
        let initramfs = dir.0.join("initramfs");
        std::fs::write(&initramfs, initramfs::build(&kernel, &dir.0)?)?;
        let images = Images::in_dir(&dir.0);
        images.make()?;
        let image = &kernel.image;
        let start = Start::Boot {
            image,
            initramfs: &initramfs,
        };
        let mut machine = Machine::start(&dir.0, &images, &start)?;
        machine.expect("ready")?;
        let state = dir.0.join("state");
        machine.save(&state)?;
        Ok(Bench { dir, images, state })
    }
}

/// Why and when the plug is pulled: after so many lines, and then so many turns
/// of an empty loop.
struct Moment {
    lines: u64,
    turns: u64,
}

impl Moment {
    fn draw(rng: &mut Rng) -> Moment {
        Moment {
            lines: match rng.below(8) {
                // While it starts, mounts, recovers, attaches.
                0 | 1 => rng.below(4),
                // Before the log has been all around.
                2..=4 => rng.between(3, 20),
                _ => rng.between(20, 200),
            },
            // Up to some milliseconds, all lengths alike.
            turns: {
                let bits = rng.below(23);
                rng.below(1 << bits)
            },
        }
    }

    fn wait(&self) {
        for _ in 0..self.turns {
            std::hint::spin_loop();
        }
    }
}

/// How many lives an image has, but for the last, that only checks.
const LIVES: u64 = 8;
/// Steps that no life goes beyond.
const STEPS: u64 = 100_000;

/// What was seen of one subject on one medium.
#[derive(Default)]
struct Tally {
    /// Plugs pulled, those among them before the first step, and what they
    /// left that was checked.
    plugs: AtomicU64,
    early: AtomicU64,
    checked: AtomicU64,
    steps: AtomicU64,
    found: std::sync::Mutex<Vec<String>>,
}

impl Tally {
    fn found(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.found.lock().expect("no thread panics")
    }
}

/// The lives of one image. False when it ended with a finding.
fn lives(
    bench: &Bench,
    dir: &Path,
    kind: Kind,
    medium: Medium,
    seed: u64,
    count: u64,
    tally: &Tally,
) -> Result<bool> {
    let images = Images::in_dir(dir);
    images.copy_from(&bench.images)?;
    let mut rng = Rng::new(seed);
    let mut acknowledged = None;
    for life in 0..=count {
        let last = life == count;
        let moment = (!last).then(|| Moment::draw(&mut rng));
        let mut machine = Machine::start(dir, &images, &Start::Saved(&bench.state))?;
        let order = Order {
            kind,
            medium,
            boot: rng.next_u64(),
            seed,
            acknowledged,
            steps: if last { 0 } else { STEPS },
        };
        machine.say(&order.line())?;
        let mut said = Vec::new();
        while moment
            .as_ref()
            .is_none_or(|m| (said.len() as u64) < m.lines)
        {
            let Some(line) = machine.line()? else {
                return Err(
                    format!("the machine ended by itself; {}", machine.last_words()).into(),
                );
            };
            let ends = line.starts_with("bad ") || line == "done";
            said.push(line);
            if ends {
                break;
            }
        }
        if let Some(moment) = &moment {
            moment.wait();
            tally.plugs.fetch_add(1, Relaxed);
        }
        said.extend(machine.pull()?);
        let before = acknowledged.unwrap_or(0);
        let mut now = acknowledged;
        for line in &said {
            if let Some(n) = line.strip_prefix("ack ") {
                now = Some(n.parse()?);
            } else if line.starts_with("found ") {
                tally.checked.fetch_add(1, Relaxed);
            } else if let Some(what) = line.strip_prefix("bad ") {
                tally.checked.fetch_add(1, Relaxed);
                tally
                    .found()
                    .push(format!("seed {seed}, life {life}: {what}"));
                return Ok(false);
            }
        }
        let made = now.unwrap_or(0).saturating_sub(before);
        tally.steps.fetch_add(made, Relaxed);
        if made == 0 && !last {
            tally.early.fetch_add(1, Relaxed);
        }
        acknowledged = now;
    }
    Ok(true)
}

/// All rounds of one subject on one medium.
fn rounds(plug: &Plug, bench: &Bench, kind: Kind, medium: Medium) -> Result<Tally> {
    let tally = Tally::default();
    let most = plug.rounds * if kind.must_stand() { 1 } else { 2 };
    let chains = most.div_ceil(LIVES);
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let work = |job: u64| -> Result<()> {
        let dir = Scratch::new(&plug.scratch, &job.to_string())?;
        loop {
            let chain = next.fetch_add(1, Relaxed);
            if chain >= chains || stop.load(Relaxed) {
                return Ok(());
            }
            let mut rng = Rng::new(plug.seed ^ (chain + 1).rotate_left(32));
            let count = LIVES.min(most - chain * LIVES);
            let stands = lives(bench, &dir.0, kind, medium, rng.next_u64(), count, &tally);
            // One that is broken has been found out; one that is not, is lost.
            if !matches!(stands, Ok(true)) && (!kind.must_stand() || stands.is_err()) {
                stop.store(true, Relaxed);
            }
            stands?;
        }
    };
    let work = &work;
    std::thread::scope(|s| {
        let jobs: Vec<_> = (0..plug.jobs.max(1))
            .map(|j| s.spawn(move || work(j)))
            .collect();
        jobs.into_iter()
            .try_for_each(|j| j.join().expect("no thread panics"))
    })?;
    Ok(tally)
}

/// Runs what was asked for; whether all behaved as they must.
pub fn run(plug: &Plug) -> Result<bool> {
    let kinds: Vec<Kind> = match &*plug.subject {
        "all" => Kind::ALL.iter().map(|(kind, _)| *kind).collect(),
        name => vec![Kind::of(name).ok_or("no such subject")?],
    };
    let bench = Bench::new(plug)?;
    let mut right = true;
    let mut out = Vec::new();
    for medium in plug.medium {
        for kind in kinds.iter().filter(|k| medium.shows(**k)) {
            let begin = std::time::Instant::now();
            let tally = rounds(plug, &bench, *kind, *medium)?;
            let seconds = begin.elapsed().as_secs();
            let found = tally.found();
            let as_it_must = found.is_empty() == kind.must_stand();
            right &= as_it_must;
            let get = |n: &AtomicU64| n.load(Relaxed);
            if plug.json {
                out.push(json!({
                    "medium": medium.name(),
                    "subject": kind.name(),
                    "plugs": get(&tally.plugs),
                    "before_a_step": get(&tally.early),
                    "checked": get(&tally.checked),
                    "steps": get(&tally.steps),
                    "found": *found,
                    "must_stand": kind.must_stand(),
                    "as_it_must": as_it_must,
                    "seconds": seconds,
                }));
                continue;
            }
            println!(
                "{:6} {:26} {:5} plugs pulled ({} before a step), {:5} states checked, {:6} steps, {seconds} s: {}",
                medium.name(),
                kind.name(),
                get(&tally.plugs),
                get(&tally.early),
                get(&tally.checked),
                get(&tally.steps),
                match (found.len(), as_it_must) {
                    (0, true) => "nothing lost, nothing torn".to_string(),
                    (0, false) => "NOT FOUND OUT".to_string(),
                    (_, true) => format!("found out, {}", found[0]),
                    (n, false) => format!("{n} FINDINGS\n  {}", found.join("\n  ")),
                }
            );
        }
    }
    if plug.json {
        println!("{}", json!({ "runs": out, "as_they_must": right }));
    }
    drop(bench.dir);
    Ok(right)
}
