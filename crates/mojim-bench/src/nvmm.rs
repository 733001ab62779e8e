//! `mojim bench nvmm`: a sync point on emulated non-volatile memory, beside plain flushing.
//!
//! It is the measurement of the Mojim paper's Figures 4, 5 and 8. Random places of a file in memory
//! change, and each change is made persistent before the next one. These take turns on one thread:
//!
//! - `s-unreplicated`, the paper's baseline: the pages that the range touches are flushed, as Linux's
//!   msync rounds them, then a barrier. It is not atomic, and has no copy. Where the memory's name
//!   says that only modified lines are flushed, only these are.
//! - Mojim's modes over shared memory. `unreplicated` is atomic, without a copy.
//!
//! Each ratio is to `s-unreplicated`. The mirror is a process of its own, on another processor.
//!
//! The emulator's constants take part in each ratio, so the model is printed. In the paper's model
//! the mirror does not flush. With `--strict` it does.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use mojim::Volume;
use mojim_config::Config;
use mojim_emulate::{Emulator, Machine, Model, Stores};
use mojim_env::rng::Rng;

use crate::cluster::{NodeProcess, VolumeOf, config_text_emulated, mojim_subject, target};
use crate::measure::{Plan, Subject, paired, prepared};
use crate::raw::{pin_process, pin_thread, placement};
use crate::report::{Row, write_json, write_table};
use crate::scratch::Scratch;
use crate::sync::SIZES;

/// The name of the baseline.
const BASELINE: &str = "s-unreplicated";
/// Bytes of the baseline's memory.
const SPAN: usize = 64 << 20;
const PAGE: usize = 4096;

/// One volume for each mode.
const VOLUMES: [VolumeOf; 4] = [
    ("unrep", "unreplicated", "tcp"),
    ("async", "async", "shm"),
    ("sync", "sync", "shm"),
    ("flush", "sync-flush", "shm"),
];

/// Measure sync points on emulated non-volatile memory, beside plain flushing.
///
/// The logs of both nodes lie in memory that is as slow as a named one. "ratio" is the time,
/// divided by that of s-unreplicated, which flushes whole pages, is not atomic and has no copy.
#[derive(Debug, Clone, clap::Args)]
pub struct NvmmOptions {
    /// The memories to emulate, separated by commas [default: NVMM-Raw].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = Model::from_str)]
    memory: Vec<Model>,
    /// Sizes of a sync point in bytes, separated by commas [default: 8 B to 12 KiB].
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    sizes: Vec<u64>,
    /// Rounds of paired blocks for each memory and size.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = at_least_one)]
    rounds: usize,
    /// Operations in a block.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = at_least_one)]
    ops: usize,
    /// The mirror flushes its log, too.
    #[arg(long)]
    strict: bool,
    /// A directory for the data files [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("wants a number of at least 1".to_owned()),
        Ok(n) => Ok(n),
    }
}

/// Runs the benchmark and prints it.
pub fn run(o: &NvmmOptions) -> io::Result<()> {
    let memories = match o.memory.as_slice() {
        [] => vec![Model::named("NVMM-Raw").expect("it has a model")],
        all => all.to_vec(),
    };
    let machine = Machine::measured();
    for model in memories {
        let emulator = Emulator::new(model, machine.clone());
        // Programs that read the rows get the model beside them.
        match o.json {
            true => eprint!("{}", emulator.describe(o.strict)),
            false => println!("{}", emulator.describe(o.strict)),
        }
        one_memory(o, &emulator)?;
    }
    Ok(())
}

/// Measures all sizes on one memory.
fn one_memory(o: &NvmmOptions, emulator: &Emulator) -> io::Result<()> {
    let memory = emulator.model().name;
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let rings = Scratch::new_in(Path::new("/dev/shm"))?;
    let path = scratch.path().join("bench.toml");
    let of = (memory, o.strict);
    let text = config_text_emulated(scratch.path(), rings.path(), &VOLUMES, of)?;
    fs::write(&path, text)?;
    let config = Config::load(&path).map_err(io::Error::other)?;
    let mirror = NodeProcess::mirror(&path, None)?;
    let mut volumes = Vec::new();
    for (name, mode, _) in VOLUMES {
        let v =
            Volume::attach_with(&config, "a", Some(name), |_, _| {}).map_err(io::Error::other)?;
        let base = target(&v)?;
        volumes.push((v, base, mode));
    }
    let cpus = placement();
    if let Some((_, peer)) = cpus {
        pin_process(mirror.id(), peer)?;
    }
    let pinned = cpus.map(|(client, _)| pin_thread(client)).transpose()?;
    let sizes = match o.sizes.as_slice() {
        [] => SIZES.to_vec(),
        all => all.iter().map(|n| *n as usize).collect(),
    };
    let mut flushed = Flushed::new(emulator);
    for bytes in sizes {
        let rows = one_size(o, &mut flushed, &volumes, bytes)?;
        let mut out = io::stdout().lock();
        match o.json {
            true => write_json(&rows, &mut out)?,
            false => write_table(&rows, &mut out)?,
        }
    }
    drop(pinned);
    volumes
        .into_iter()
        .try_for_each(|(v, ..)| v.detach().map_err(io::Error::other))
}

/// Measures one size: the modes and the baseline take turns.
fn one_size(
    o: &NvmmOptions,
    flushed: &mut Flushed<'_>,
    volumes: &[(Volume, usize, &str)],
    bytes: usize,
) -> io::Result<Vec<Row>> {
    let memory = flushed.emulator.model().name;
    let plan = Plan {
        rounds: o.rounds,
        ops: o.ops,
        ..Plan::default()
    };
    let mut subjects: Vec<Box<dyn Subject + '_>> = vec![Box::new(prepared(
        BASELINE,
        flushed,
        |f: &mut &mut Flushed<'_>| {
            f.change(bytes);
            Ok(())
        },
        |f: &mut &mut Flushed<'_>| {
            f.flush();
            Ok(())
        },
    ))];
    for (_, base, mode) in volumes {
        subjects.push(mojim_subject((*mode).to_owned(), *base, bytes));
    }
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| &mut **s as _).collect();
    let paired = paired(&mut refs, plan)?;
    let row = |case: &str, name: &str| {
        let summary = paired.summary(name)?;
        Some(Row::new("nvmm", case, bytes, summary).memory(memory))
    };
    let mut rows: Vec<Row> = row(BASELINE, BASELINE).into_iter().collect();
    for (_, _, mode) in volumes {
        let transport = if *mode == "unreplicated" { "-" } else { "shm" };
        let Some(r) = row("mojim", mode) else {
            continue;
        };
        let r = r.mode(mode).transport(transport);
        rows.push(match paired.ratio_to_slower(mode, &[BASELINE]) {
            Some(x) => r.ratio(x, BASELINE),
            None => r,
        });
    }
    Ok(rows)
}

/// Memory whose changes are flushed, and nothing else.
struct Flushed<'a> {
    emulator: &'a Emulator,
    bytes: Vec<u8>,
    random: Rng,
    fill: u8,
    /// What changed last: where, and how many bytes.
    changed: (usize, usize),
}

impl<'a> Flushed<'a> {
    fn new(emulator: &'a Emulator) -> Flushed<'a> {
        Flushed {
            emulator,
            // Written once, so that no page is new when it is measured.
            bytes: vec![0xa5; SPAN + PAGE],
            random: Rng::new(1),
            fill: 0,
            changed: (0, 0),
        }
    }

    /// Changes bytes at a random place. They cross no border of pages that they need not cross, so
    /// that the baseline flushes no page more than it must.
    fn change(&mut self, len: usize) {
        let first = self.bytes.as_ptr().align_offset(PAGE);
        let unit = len.next_power_of_two().min(PAGE);
        let places = ((SPAN - len) / unit) as u64;
        let at = first + self.random.below(places) as usize * unit;
        self.fill = self.fill.wrapping_add(1);
        self.bytes[at..at + len].fill(self.fill);
        self.changed = (at, len);
    }

    /// Flushes what changed: its pages, or its lines only.
    fn flush(&mut self) {
        let (at, len) = self.changed;
        let address = self.bytes.as_ptr() as usize + at;
        let unit = if self.emulator.model().selective {
            1
        } else {
            PAGE
        };
        let before = address % unit;
        let len = (before + len).next_multiple_of(unit);
        let at = self.bytes[at - before..][..len].as_mut_ptr();
        // SAFETY: inside the memory, which only this thread has. All its lines are: the memory
        // begins and ends a page beyond what changes.
        unsafe { self.emulator.flush(at, len, Stores::None) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulator(name: &str) -> Emulator {
        let machine = Machine {
            write_bytes_per_second: 8_000_000_000,
            read_ns: 90,
            line_ns: Vec::new(),
        };
        Emulator::new(Model::named(name).unwrap(), machine)
    }

    /// Linux rounds msync's range to pages. With a memory that flushes modified lines only, it is not.
    #[test]
    fn the_baseline_flushes_the_pages_of_what_changed_or_its_lines() {
        for (name, len, want) in [
            ("PDRAM", 8, 4096),
            ("PDRAM", 4096, 4096),
            ("PDRAM", 12_288, 12_288),
            ("NVMM-Opt", 8, 64),
            ("NVMM-Opt", 4096, 4096),
        ] {
            let e = emulator(name);
            let mut f = Flushed::new(&e);
            for _ in 0..100 {
                let before = e.totals();
                f.change(len);
                f.flush();
                let now = e.totals();
                assert_eq!(now.flushed - before.flushed, want, "{name}, {len} bytes");
                assert_eq!(now.barriers - before.barriers, 1);
            }
        }
    }
}
