//! `mojim bench tx`: transactions of scattered 8-byte stores, beside libpmemobj's.
//!
//! One thread measures one place at a time. Three subjects take turns there:
//!
//! - Mojim's transactions (begin, add and store each word, commit),
//! - the same stores committed by hand with `gmsync`,
//! - libpmemobj's transactions.
//!
//! The places:
//!
//! - `memory`: unreplicated, the log on tmpfs. libpmemobj's pool is there too, with
//!   PMEM_IS_PMEM_FORCE=1.
//! - `shm` and `tcp`: sync, the mirror's log in memory. They are measured beside the same pool.
//! - `disk`: unreplicated, log and pool on the disk. The pool is not forced, since forced there is
//!   not durable.
//!
//! Each place is a process of its own for libpmemobj's sake, which looks once at what is forced.
//!
//! Two cases measure programs in C instead (`programs/`):
//!
//! - `--case captured` measures what blocks that gcc captures cost.
//! - `--case table` measures the poster's hash table beside Berkeley DB. The files of Berkeley DB
//!   are on the disk wherever the table is.
//!
//! Honest limits:
//!
//! - Warm pages were stored to and committed before, cold ones never.
//! - The logs have gone round once before.
//! - Without libpmemobj its rows are left out.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::builder::PossibleValuesParser;
use mojim::{MapFlags, Volume, gmsync};
use mojim_config::Config;

use crate::cluster::{LOG, NodeProcess, config_text};
use crate::measure::{Plan, Subject, paired, prepared};
use crate::pmemobj::{PACKAGE, Pool};
use crate::programs::{CAPTURED, Program, TABLE, table};
use crate::raw::{pin_all, pin_process, placement};
use crate::report::{Row, print, write_table};
use crate::scratch::Scratch;

/// Stores in a transaction.
const COUNTS: [usize; 3] = [1, 10, 100];
/// Bytes that the stores are scattered over: warm, and cold.
const WARM: usize = 4 << 20;
const COLD: usize = 256 << 20;

/// Where what is committed goes.
pub const PLACES: [&str; 4] = ["memory", "shm", "tcp", "disk"];

/// How regions are mapped.
pub const REGIONS: [&str; 3] = ["tracked", "untracked", "populated"];

/// What is measured.
pub const CASES: [&str; 3] = ["words", "captured", "table"];

/// Measure transactions of 1, 10 and 100 scattered stores of 8 bytes, beside gmsync and
/// libpmemobj.
///
/// "ratio" is the time divided by that of libpmemobj. In the row of libpmemobj it is its time
/// divided by that of gmsync.
#[derive(Debug, Clone, clap::Args)]
pub struct TxOptions {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Where transactions are committed: to a log in memory without a mirror, to a mirror (shared
    /// memory or TCP), or to the disk without a mirror.
    #[arg(long, value_name = "PLACE", default_value = "memory", value_parser = PossibleValuesParser::new(PLACES))]
    pub place: String,
    /// The case: scattered words, blocks that gcc captures, or the hash table of Mnemosyne's
    /// poster beside Berkeley DB. Blocks and the hash table need gcc. The hash table also needs
    /// libdb-dev.
    #[arg(long, value_name = "CASE", default_value = "words", value_parser = PossibleValuesParser::new(CASES))]
    pub case: String,
    /// Store to pages that were never stored to.
    #[arg(long)]
    pub cold: bool,
    /// How the regions of Mojim are mapped. "untracked" is without dirty tracking
    /// (`MOJIM_HEAP_EXACT`). "populated" is the same, and all pages are present before the first
    /// store.
    #[arg(long, value_name = "REGIONS", default_value = "tracked", value_parser = PossibleValuesParser::new(REGIONS))]
    pub regions: String,
    /// Rounds of paired blocks for each number of stores.
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub rounds: usize,
    /// Operations in a block.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub ops: usize,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// Random words of a region, no two in a page as long as there are enough.
struct Words {
    base: usize,
    pages: usize,
    next: usize,
    count: usize,
    value: u64,
    at: Vec<usize>,
}

impl Words {
    fn new(base: usize, cold: bool, count: usize) -> Words {
        let pages = if cold { COLD } else { WARM } / 4096;
        Words {
            base,
            pages,
            next: 1,
            count,
            value: 0,
            at: vec![0; count],
        }
    }

    fn choose(&mut self) -> io::Result<()> {
        self.value += 1;
        for at in &mut self.at {
            // Scattered: a step that has no divisor in common with the number of pages.
            self.next = (self.next + 613) % self.pages;
            *at = self.next * 4096 + (self.value as usize * 40 + 8) % 4096 / 8 * 8;
        }
        Ok(())
    }

    fn transaction(&self) -> io::Result<()> {
        mojim_tx::begin().map_err(io::Error::other)?;
        for at in &self.at {
            let p = (self.base + at) as *mut u8;
            // SAFETY: words of the region, which stays mapped.
            unsafe {
                mojim_tx::add(p, 8).map_err(io::Error::other)?;
                p.cast::<u64>().write(self.value);
            }
        }
        mojim_tx::commit().map_err(io::Error::other)
    }

    fn by_hand(&self) -> io::Result<()> {
        let mut ranges = [(std::ptr::null(), 0); 100];
        for (at, range) in self.at.iter().zip(&mut ranges) {
            let p = (self.base + at) as *mut u64;
            // SAFETY: words of the region, which stays mapped.
            unsafe { p.write(self.value) };
            *range = (p.cast_const().cast(), 8);
        }
        gmsync(&ranges[..self.count])
            .map(drop)
            .map_err(io::Error::other)
    }
}

/// Maps a region, and stores to each page of it if it is to be warm.
fn region(volume: &Volume, file: &str, o: &TxOptions) -> io::Result<usize> {
    let flags = MapFlags {
        create: true,
        atomic: true,
        untracked: o.regions != "tracked",
        ..MapFlags::default()
    };
    let len = if o.cold { COLD } else { WARM };
    let m = volume.map(file, len, flags).map_err(io::Error::other)?;
    let base = m.ptr as usize;
    if o.regions == "populated" {
        mojim::populate(m.ptr, len).map_err(io::Error::other)?;
    }
    if !o.cold {
        for page in (0..len).step_by(4096) {
            // SAFETY: inside the mapping.
            unsafe { ((base + page) as *mut u64).write(1) };
        }
        mojim::msync(m.ptr, len).map_err(io::Error::other)?;
    }
    Ok(base)
}

/// Has each log gone round once: else every sync point stores to pages of it that nobody has
/// stored to, which is so on a program's first day only.
fn warm_logs(volume: &Volume) -> io::Result<()> {
    let flags = MapFlags {
        create: true,
        ..MapFlags::default()
    };
    let len = 1 << 20;
    let m = volume.map("warm", len, flags).map_err(io::Error::other)?;
    for i in 0..LOG / len + 16 {
        // SAFETY: the mapping, which only this thread uses.
        unsafe { m.ptr.write_bytes(i as u8 + 1, len) };
        mojim::msync(m.ptr, len).map_err(io::Error::other)?;
    }
    mojim::unmap(m.ptr, len).map_err(io::Error::other)
}

/// A place, made: directories, a configuration, and the mirror if there is one.
struct Made {
    scratch: Scratch,
    _memory: Scratch,
    file: PathBuf,
    _mirror: Option<NodeProcess>,
    /// Where who commits is to run; where there is a mirror, which runs elsewhere.
    cpu: Option<usize>,
}

impl Made {
    /// The directories alone.
    fn directories(o: &TxOptions) -> io::Result<(Scratch, Scratch)> {
        let memory = Scratch::new_in(Path::new("/dev/shm"))?;
        let scratch = match o.place.as_str() {
            "disk" => Scratch::new_in(&o.parent())?,
            _ => Scratch::new_in(Path::new("/dev/shm"))?,
        };
        Ok((scratch, memory))
    }

    fn new(o: &TxOptions, (scratch, memory): (Scratch, Scratch)) -> io::Result<Made> {
        let (mode, transport) = match o.place.as_str() {
            "shm" => ("sync", "shm"),
            "tcp" => ("sync", "tcp"),
            _ => ("unreplicated", "tcp"),
        };
        let volume = [("v", mode, transport)];
        let text = config_text(scratch.path(), memory.path(), &volume, Some(1))?;
        let file = scratch.path().join("bench.toml");
        fs::write(&file, text)?;
        let mirror = match mode {
            "sync" => Some(NodeProcess::start(&file, "b")?),
            _ => None,
        };
        // Without a mirror nobody is in the way of who commits but its own threads.
        let cpus = mirror.as_ref().and_then(|_| placement());
        if let (Some((_, peer)), Some(mirror)) = (cpus, &mirror) {
            pin_process(mirror.id(), peer)?;
        }
        Ok(Made {
            scratch,
            _memory: memory,
            file,
            _mirror: mirror,
            cpu: cpus.map(|(client, _)| client),
        })
    }
}

impl TxOptions {
    fn parent(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(std::env::temp_dir)
    }
}

/// Runs the benchmark and prints it.
pub fn run(o: &TxOptions) -> io::Result<()> {
    match o.case.as_str() {
        "captured" => program(o, &CAPTURED),
        "table" => program(o, &TABLE),
        _ => words(o),
    }
}

/// Runs a program of C and prints what it found.
fn program(o: &TxOptions, which: &Program) -> io::Result<()> {
    let made = Made::new(o, Made::directories(o)?)?;
    let program = which.compile(made.scratch.path())?;
    let rival = Scratch::new_in(&o.parent())?;
    let mut command = Command::new(program);
    command.arg(&made.file).arg("a");
    command.args([o.rounds, o.ops].map(|n| n.max(1).to_string()));
    if o.case == "table" {
        command.arg(rival.path());
    }
    let rows = which.run(&mut command, made.cpu, &o.place)?;
    print(o.json, &rows, table)
}

/// Transactions of scattered words.
fn words(o: &TxOptions) -> io::Result<()> {
    // libpmemobj first: it looks at the environment, which threads must not do meanwhile.
    let directories = Made::directories(o)?;
    let pool_bytes = if o.cold { COLD } else { WARM };
    let pool = directories.0.path().join("pool");
    let pool = Pool::create(&pool, pool_bytes, o.place != "disk");
    if let Err(e) = &pool {
        eprintln!("libpmemobj is left out: {e}; package {PACKAGE}");
    }
    let made = Made::new(o, directories)?;
    let config = Config::load(&made.file).map_err(io::Error::other)?;
    let volume =
        Volume::attach_with(&config, "a", Some("v"), |_, _| {}).map_err(io::Error::other)?;
    // The engine's threads too: beside the mirror, which looks for records all the time, they would
    // take its turns, where a machine has two processors.
    let _tied = made.cpu.map(pin_all).transpose()?;
    warm_logs(&volume)?;
    for count in COUNTS {
        one_count(o, count, &volume, pool.as_ref().ok())?;
    }
    volume.detach().map_err(io::Error::other)
}

fn plan(o: &TxOptions, count: usize) -> Plan {
    let mut plan = Plan {
        rounds: o.rounds,
        ops: o.ops,
        ..Plan::default()
    };
    if o.cold {
        // Each page is stored to once.
        let in_a_round = (plan.ops + plan.warm_ops) * count;
        plan.rounds = plan.rounds.min(COLD / 4096 / in_a_round).max(1);
    }
    plan
}

fn one_count(o: &TxOptions, count: usize, volume: &Volume, pool: Option<&Pool>) -> io::Result<()> {
    let plan = plan(o, count);
    let words = |file: &str| -> io::Result<Words> {
        let file = format!("{file}-{count}");
        Ok(Words::new(region(volume, &file, o)?, o.cold, count))
    };
    let mut subjects: Vec<Box<dyn Subject>> = vec![
        Box::new(prepared(
            "transaction",
            words("tx")?,
            Words::choose,
            |w: &mut Words| w.transaction(),
        )),
        Box::new(prepared(
            "gmsync",
            words("hand")?,
            Words::choose,
            |w: &mut Words| w.by_hand(),
        )),
    ];
    if let Some(pool) = pool {
        let rival = Words::new(0, o.cold, count);
        subjects.push(Box::new(prepared(
            "libpmemobj",
            rival,
            Words::choose,
            move |w: &mut Words| pool.store(&w.at, w.value),
        )));
    }
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| &mut **s as _).collect();
    let paired = paired(&mut refs, plan)?;
    let mut mode = String::from(if o.cold { "cold" } else { "warm" });
    if o.regions != "tracked" {
        mode = format!("{mode}, {}", o.regions);
    }
    let mut rows = Vec::new();
    for name in ["transaction", "gmsync", "libpmemobj"] {
        let Some(summary) = paired.summary(name) else {
            continue;
        };
        let row = Row::new("tx", name, count * 8, summary)
            .mode(&mode)
            .transport(&o.place);
        let to = match name {
            "libpmemobj" => "gmsync",
            _ => "libpmemobj",
        };
        rows.push(match paired.ratio(name, to) {
            Some(ratio) => row.ratio(ratio, to),
            None => row,
        });
    }
    let mut out = io::stdout().lock();
    match o.json {
        true => rows.iter().try_for_each(|r| r.write_json(&mut out))?,
        false => {
            writeln!(
                out,
                "\n{}, {mode} pages, {count} stores of 8 bytes",
                o.place
            )?;
            write_table(&rows, &mut out)?;
        }
    }
    out.flush()
}
