//! Memory pressure: the program's region does not fit the memory of its machine, and the plug is
//! pulled.
//!
//! The machine is in QEMU, and has a disk to swap to.
//!
//! Owns the rounds and the verdicts. As with the pulled plug an image lives through several
//! lives, each of which checks what the one before left. Steps store up to half of the
//! region. The plug is pulled while such a step is stored, committed or taken back. `pressed` has
//! what a machine checks while it lives, `pages` what it stores.
//!
//! Invariant: a run in which next to nothing was swapped out shows nothing, and fails.

use std::path::{Path, PathBuf};
use std::time::Instant;

use mojim_sim::Rng;

use super::Medium;
use super::initramfs::{self, Kernel};
use super::machine::{Hardware, Machine, Start, make_ext4};
use super::order::Order;
use super::pressed::{ASKED, is_bounded};
use super::scratch::Scratch;
use crate::Result;
use crate::report::{Extent, Report, Row};
use crate::subject::Kind;

/// The default place of a kernel that can bound memory (Linux 6.7): `scripts/guest-kernel
/// 6.12` puts it there.
pub const KERNEL: &str = "target/guest-kernel-6.12";

/// What the rung tells apart.
pub const KINDS: [Kind; 2] = [Kind::Mojim(None), Kind::Naive];

/// Memory of the machine, in MiB.
const MEMORY: &str = "144";
/// Bytes of the file system, and of the disk to swap to.
const FS_LEN: u64 = 512 << 20;
const SWAP_LEN: u64 = 384 << 20;
/// KiB that must have been in swap at once.
const PRESSURE: u64 = 8 << 10;
/// How many lives an image has before the last one, which only checks.
const LIVES: u64 = 4;
/// No life makes a step beyond this one.
const STEPS: u64 = 100_000;

/// The parameters of the rung.
pub struct Options<'a> {
    /// The command `mojim-crash`, which runs in the machine.
    pub exe: &'a Path,
    /// How much is run.
    pub extent: Extent,
    /// An unpacked package of a kernel with its modules.
    pub kernel: &'a Path,
}

/// What was seen beside the verdicts.
#[derive(Default)]
struct Seen {
    pulled: u64,
    steps: u64,
    /// Most KiB in swap when a step was stored.
    swapped: u64,
    /// Most KiB that a program with a bound held beyond its own when a step was acknowledged.
    held: u64,
}

/// The machine's files.
struct Files {
    dir: Scratch,
    image: PathBuf,
    initramfs: PathBuf,
}

impl Files {
    fn disk(&self) -> PathBuf {
        self.dir.0.join("disk")
    }

    fn swap(&self) -> PathBuf {
        self.dir.0.join("swap")
    }

    fn start(&self) -> Result<Machine> {
        make_swap(&self.swap())?;
        let (disk, swap) = (self.disk(), self.swap());
        let hardware = Hardware {
            memory: MEMORY,
            disks: vec![(&disk, "cache=writeback"), (&swap, "cache=unsafe")],
            nvdimm: None,
            says: ASKED,
        };
        let start = Start::Boot {
            image: &self.image,
            initramfs: &self.initramfs,
        };
        let mut machine = Machine::start(&self.dir.0, &hardware, &start)?;
        machine.expect("ready")?;
        Ok(machine)
    }
}

/// Makes a file that Linux takes for a disk to swap to, version 1: the page's last ten
/// bytes, and from byte 1024 on the version and the last page.
fn make_swap(at: &Path) -> Result<()> {
    let mut page = vec![0; 4096];
    let last = (SWAP_LEN / 4096 - 1) as u32;
    page[1024..1028].copy_from_slice(&1u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&last.to_le_bytes());
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    std::fs::write(at, &page)?;
    Ok(std::fs::File::options()
        .write(true)
        .open(at)?
        .set_len(SWAP_LEN)?)
}

/// The lives of one image.
struct Chain<'a> {
    files: &'a Files,
    kind: Kind,
    seed: u64,
    /// Without the last one, which only checks.
    count: u64,
}

impl Chain<'_> {
    /// Runs them until a failure is found.
    fn run(&self, row: &mut Row, seen: &mut Seen) -> Result<()> {
        make_ext4(&self.files.disk(), 0, FS_LEN)?;
        let mut rng = Rng::new(self.seed);
        let mut acknowledged = None;
        for life in 0..=self.count {
            let said = self.live(life, acknowledged, &mut rng)?;
            seen.pulled += u64::from(life < self.count);
            for line in &said {
                if let Some(wrong) = line.strip_prefix("bad ") {
                    row.add(Err(wrong.to_owned()), || self.what(life));
                    return Ok(());
                }
                if line.starts_with("found ") {
                    row.add(Ok(0), || self.what(life));
                }
                self.hear(line, &mut acknowledged, seen)?;
            }
        }
        Ok(())
    }

    fn what(&self, life: u64) -> String {
        format!("seed {}, life {life} of {}", self.seed, self.count)
    }

    /// One life, until the plug is pulled; returns what the machine said.
    fn live(&self, life: u64, acknowledged: Option<u64>, rng: &mut Rng) -> Result<Vec<String>> {
        let lines = (life < self.count).then(|| rng.between(1, 12));
        let turns = {
            let bits = rng.below(31);
            rng.below(1 << bits)
        };
        let mut machine = self.files.start()?;
        let order = Order {
            kind: self.kind,
            medium: Medium::Disk,
            boot: rng.next_u64(),
            seed: self.seed,
            acknowledged,
            steps: if lines.is_some() { STEPS } else { 0 },
        };
        machine.say(&order.line())?;
        let mut said = Vec::new();
        while lines.is_none_or(|n| (said.len() as u64) < n) {
            let Some(line) = machine.line()? else {
                let (what, words) = (self.what(life), machine.last_words());
                return Err(format!("{what}: the machine ended by itself; {words}").into());
            };
            let ends = line.starts_with("bad ") || line == "done";
            said.push(line);
            if ends {
                break;
            }
        }
        if lines.is_some() {
            for _ in 0..turns {
                std::hint::spin_loop();
            }
        }
        said.extend(machine.pull()?);
        Ok(said)
    }

    /// Counts what a line says, beside a verdict.
    fn hear(&self, line: &str, acknowledged: &mut Option<u64>, seen: &mut Seen) -> Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words.get(i).map_or(Ok(0), |w| w.parse::<u64>());
        match words[0] {
            "stored" => seen.swapped = seen.swapped.max(number(2)?),
            // What was recovered whole must not be lost later.
            "found" => *acknowledged = Some(number(1)?),
            "ack" => {
                *acknowledged = Some(number(1)?);
                seen.steps += u64::from(words.len() > 2);
                if is_bounded(self.seed) {
                    seen.held = seen.held.max(number(2)?);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Runs the rung.
pub fn run(o: &Options) -> Result<Report> {
    let begin = Instant::now();
    let kernel = Kernel::find(o.kernel)?;
    let dir = Scratch::new("pressed")?;
    let initramfs = dir.0.join("initramfs");
    std::fs::write(&initramfs, initramfs::build(&kernel, o.exe, &dir.0)?)?;
    let files = Files {
        dir,
        image: kernel.image.clone(),
        initramfs,
    };
    let (mut rows, mut stands) = (Vec::new(), Seen::default());
    for kind in o.extent.kinds.iter().filter(|k| KINDS.contains(k)) {
        let (mut row, mut seen) = (Row::new(*kind), Seen::default());
        let mut n = 0;
        while row.states < o.extent.of(*kind) && o.extent.goes_on(&row) {
            n += 1;
            // Both kinds of working copies in turn (`is_bounded`).
            let kind_of_copy = (o.extent.seed + n) & 1;
            let seed = Rng::new(o.extent.seed ^ n << 32).next_u64() & !1 | kind_of_copy;
            let chain = Chain {
                files: &files,
                kind: *kind,
                seed,
                count: LIVES.min(o.extent.of(*kind)),
            };
            chain.run(&mut row, &mut seen)?;
        }
        rows.push(row);
        if kind.must_stand() {
            stands = seen;
        }
    }
    let Seen {
        pulled,
        steps,
        swapped,
        held,
    } = stands;
    if rows.iter().any(|r| r.kind.must_stand()) && swapped < PRESSURE {
        return Err(format!("{swapped} KiB were in swap at most: that is no pressure").into());
    }
    let mib = |kib: u64| kib >> 10;
    Ok(Report {
        rung: format!(
            "memory pressure: {steps} steps, pulled {pulled} times, up to {} MiB in swap, {} MiB held after a step",
            mib(swapped),
            mib(held)
        ),
        rows,
        seconds: begin.elapsed().as_secs_f64(),
    })
}
