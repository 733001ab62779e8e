//! The pulled plug: a machine in QEMU that is killed at a random moment.
//!
//! The workload runs in that machine, on a disk or on an emulated NVDIMM with DAX.
//!
//! Owns the rounds and the verdicts. An image lives through several lives. Each life
//! checks what the one before left, goes on from there, acknowledges steps over a serial
//! line, and ends when the plug is pulled: while it mounts, while it recovers, or after
//! some steps. The last life only checks. All lives begin at one saved state, just before
//! the mount, so a life costs half a second.
//!
//! The guest's memory is lost with the plug, its page cache included. Everything that the
//! guest's disk had accepted stays, flushed or not. An emulated processor has no caches.
//! Block history and the shadow image cover these two.

mod boot;
mod guest;
mod initramfs;
mod machine;
mod medium;
mod order;
mod pages;
mod pressed;
pub mod pressure;
mod scratch;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use mojim_sim::Rng;

use crate::Result;
use crate::report::{Extent, Report, Row};
use crate::subject::Kind;
pub use medium::Medium;
use scratch::Scratch;

use initramfs::Kernel;
use machine::{Images, Machine, Start};
use order::Order;

/// The default place of a kernel: `scripts/guest-kernel` puts it there.
pub const KERNEL: &str = "target/guest-kernel";

/// The parameters of the rung.
pub struct Options<'a> {
    /// The command `mojim-crash`, which runs in the machine.
    pub exe: &'a Path,
    /// How much is run on each medium.
    pub extent: Extent,
    /// The media.
    pub media: &'a [Medium],
    /// Machines at one time.
    pub jobs: u64,
    /// An unpacked package of a kernel with its modules.
    pub kernel: &'a Path,
}

/// Runs a guest's life and never returns, if this is the first process of such a machine.
pub fn be_guest() {
    // In a container this may be the first process, too.
    if std::process::id() == 1 && Path::new(boot::MODULES).is_dir() {
        guest::main();
    }
}

/// What the rung needs and is missing, if anything.
pub fn missing(kernel: &Path) -> Option<String> {
    let runs = |what: &str| std::process::Command::new(what).arg("--version").output();
    if let Err(e) = runs(machine::QEMU) {
        return Some(format!("{}: {e}", machine::QEMU));
    }
    Kernel::find(kernel).err().map(|e| e.to_string())
}

/// A saved machine that has booted and waits for its order, and its images.
struct Bench {
    /// The directory of the machine's files.
    _dir: Scratch,
    images: Images,
    state: PathBuf,
}

impl Bench {
    fn new(o: &Options) -> Result<Bench> {
        let dir = Scratch::new("saved")?;
        let kernel = Kernel::find(o.kernel)?;
        let initramfs = dir.0.join("initramfs");
        std::fs::write(&initramfs, initramfs::build(&kernel, o.exe, &dir.0)?)?;
        let images = Images::in_dir(&dir.0);
        images.make()?;
        let image = &kernel.image;
        let start = Start::Boot {
            image,
            initramfs: &initramfs,
        };
        let mut machine = Machine::start(&dir.0, &images.hardware(), &start)?;
        machine.expect("ready")?;
        let state = dir.0.join("state");
        machine.save(&state)?;
        Ok(Bench {
            _dir: dir,
            images,
            state,
        })
    }
}

/// When the plug is pulled: after this many lines, and then this many turns of an empty
/// loop.
struct Moment {
    lines: u64,
    turns: u64,
}

impl Moment {
    fn draw(rng: &mut Rng) -> Moment {
        Moment {
            lines: match rng.below(8) {
                // While the machine starts, mounts, recovers or attaches.
                0 | 1 => rng.below(4),
                // Before the log has wrapped.
                2..=4 => rng.between(3, 20),
                _ => rng.between(20, 200),
            },
            // Up to some milliseconds, all orders of magnitude alike.
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

/// How many lives an image has before the last one, which only checks.
const LIVES: u64 = 8;
/// No life makes a step beyond this one.
const STEPS: u64 = 100_000;

/// The lives of one image.
struct Chain<'a> {
    bench: &'a Bench,
    dir: &'a Path,
    kind: Kind,
    medium: Medium,
    seed: u64,
    count: u64,
}

impl Chain<'_> {
    /// Runs the lives until a failure is found. Returns how often the plug was pulled.
    fn run(&self, row: &mut Row) -> Result<u64> {
        let images = Images::in_dir(self.dir);
        images.copy_from(&self.bench.images)?;
        let mut rng = Rng::new(self.seed);
        let mut acknowledged = None;
        let mut plugs = 0;
        // Whether the last life ended before its own check.
        let mut unchecked = false;
        for life in 0..=self.count {
            let moment = (life < self.count).then(|| Moment::draw(&mut rng));
            let start = Start::Saved(&self.bench.state);
            let mut machine = Machine::start(self.dir, &images.hardware(), &start)?;
            let order = Order {
                kind: self.kind,
                medium: self.medium,
                boot: rng.next_u64(),
                seed: self.seed,
                acknowledged,
                steps: if moment.is_some() { STEPS } else { 0 },
            };
            machine.say(&order.line())?;
            let mut said = Vec::new();
            while moment
                .as_ref()
                .is_none_or(|m| (said.len() as u64) < m.lines)
            {
                let Some(line) = machine.line()? else {
                    let words = machine.last_words();
                    let at = format!("seed {}, life {life}", self.seed);
                    return Err(format!("{at}: the machine ended by itself; {words}").into());
                };
                let ends = line.starts_with("bad ") || line == "done";
                said.push(line);
                if ends {
                    break;
                }
            }
            if let Some(moment) = &moment {
                moment.wait();
                plugs += 1;
            }
            said.extend(machine.pull()?);
            let mut checked = false;
            for line in &said {
                let verdict = match line.split_once(' ') {
                    Some(("ack", n)) => {
                        acknowledged = Some(n.parse()?);
                        continue;
                    }
                    Some(("found", n)) => {
                        // This step was recovered whole, and must not be lost later.
                        let n = n.parse()?;
                        acknowledged = Some(n);
                        Ok(n)
                    }
                    Some(("bad", what)) => Err(what.to_string()),
                    _ => continue,
                };
                checked = true;
                row.twice += u64::from(unchecked);
                let bad = verdict.is_err();
                row.add(verdict, || {
                    format!("seed {}, life {life} of {}", self.seed, self.count)
                });
                if bad {
                    return Ok(plugs);
                }
            }
            unchecked = acknowledged.is_some() && !checked;
        }
        Ok(plugs)
    }
}

/// Runs one subject on one medium.
fn subject(o: &Options, bench: &Bench, kind: Kind, medium: Medium) -> Result<(Row, u64)> {
    let seen = Mutex::new((Row::new(kind), 0));
    let next = AtomicU64::new(1);
    let broken = AtomicBool::new(false);
    let goes_on = || {
        let (row, _) = &*seen.lock().expect("no thread panics");
        o.extent.goes_on(row) && row.states < o.extent.of(kind) && !broken.load(Relaxed)
    };
    let work = |job: u64| -> Result<()> {
        let dir = Scratch::new(&job.to_string())?;
        while goes_on() {
            let chain = next.fetch_add(1, Relaxed);
            let chain = Chain {
                bench,
                dir: &dir.0,
                kind,
                medium,
                seed: Rng::new(o.extent.seed ^ chain.rotate_left(32)).next_u64(),
                count: LIVES.min(o.extent.of(kind).div_ceil(o.jobs.max(1))),
            };
            let mut row = Row::new(kind);
            let plugs = chain.run(&mut row);
            broken.fetch_or(plugs.is_err(), Relaxed);
            let (all, pulled) = &mut *seen.lock().expect("no thread panics");
            all.join(row);
            *pulled += plugs?;
        }
        Ok(())
    };
    let work = &work;
    std::thread::scope(|s| {
        let jobs: Vec<_> = (0..o.jobs.max(1))
            .map(|j| s.spawn(move || work(j)))
            .collect();
        jobs.into_iter()
            .try_for_each(|j| j.join().expect("no thread panics"))
    })?;
    Ok(seen.into_inner().expect("no thread panics"))
}

/// Runs the rung; returns a report for each medium.
pub fn run(o: &Options) -> Result<Vec<Report>> {
    let bench = Bench::new(o)?;
    let mut reports = Vec::new();
    for medium in o.media {
        let begin = Instant::now();
        let (mut rows, mut pulled) = (Vec::new(), 0);
        for kind in o.extent.kinds.iter().filter(|k| medium.shows(**k)) {
            let (row, plugs) = subject(o, &bench, *kind, *medium)?;
            rows.push(row);
            pulled += plugs;
        }
        reports.push(Report {
            rung: format!("pulled plug, {}: pulled {pulled} times", medium.name()),
            rows,
            seconds: begin.elapsed().as_secs_f64(),
        });
    }
    Ok(reports)
}
