//! `mojim bench tx`: transactions of scattered 8-byte stores, beside libpmemobj's.
//!
//! One thread; of one place Mojim's transactions (begin, add and store each word, commit), the same
//! stores committed by hand with `gmsync`, and libpmemobj's transactions take turns. Places:
//! `memory` (unreplicated, the log on tmpfs, libpmemobj's pool there too, with
//! PMEM_IS_PMEM_FORCE=1), `shm` and `tcp` (sync, the mirror's log in memory; beside the same pool),
//! `disk` (unreplicated, log and pool on the disk, the pool not forced, since forced there is not
//! durable). Each place is a process of its own for libpmemobj's sake, which looks once at what is forced.
//!
//! Honest limits: warm pages were stored to and committed before; cold ones never. Without libpmemobj
//! its rows are left out.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use mojim::{MapFlags, Volume, gmsync};
use mojim_config::Config;

use crate::cluster::{NodeProcess, config_text};
use crate::measure::{Plan, Subject, paired, prepared};
use crate::pmemobj::{PACKAGE, Pool};
use crate::raw::{pin_process, pin_thread, placement};
use crate::report::{Row, write_table};
use crate::scratch::Scratch;

/// Stores in a transaction.
const COUNTS: [usize; 3] = [1, 10, 100];
/// Bytes that the stores are scattered over: warm, and cold.
const WARM: usize = 4 << 20;
const COLD: usize = 256 << 20;

/// Where what is committed goes.
pub const PLACES: [&str; 4] = ["memory", "shm", "tcp", "disk"];

/// Transactions of 1, 10 and 100 scattered 8-byte stores, beside the same by gmsync and libpmemobj.
///
/// "ratio": how many times as long as libpmemobj's (its own: as gmsync's).
#[derive(Debug, Clone, clap::Args)]
pub struct TxOptions {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Where what is committed goes: unreplicated with a log in memory, to a mirror by shared
    /// memory or TCP, unreplicated on the disk.
    #[arg(long, value_name = "PLACE", default_value = "memory", value_parser = PossibleValuesParser::new(PLACES))]
    pub place: String,
    /// Store to pages that were never stored to.
    #[arg(long)]
    pub cold: bool,
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
fn region(volume: &Volume, file: &str, cold: bool) -> io::Result<usize> {
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    let len = if cold { COLD } else { WARM };
    let m = volume.map(file, len, flags).map_err(io::Error::other)?;
    let base = m.ptr as usize;
    if !cold {
        for page in (0..len).step_by(4096) {
            // SAFETY: inside the mapping.
            unsafe { ((base + page) as *mut u64).write(1) };
        }
        mojim::msync(m.ptr, len).map_err(io::Error::other)?;
    }
    Ok(base)
}

/// Runs the benchmark and prints it.
pub fn run(o: &TxOptions) -> io::Result<()> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let scratch = match o.place.as_str() {
        "disk" => Scratch::new_in(&parent)?,
        _ => Scratch::new_in(Path::new("/dev/shm"))?,
    };
    // libpmemobj first: it looks at the environment, which threads must not do meanwhile.
    let pool_bytes = if o.cold { COLD } else { WARM };
    let pool = Pool::create(&scratch.path().join("pool"), pool_bytes, o.place != "disk");
    if let Err(e) = &pool {
        eprintln!("libpmemobj is left out: {e}; package {PACKAGE}");
    }
    let (mode, transport) = match o.place.as_str() {
        "shm" => ("sync", "shm"),
        "tcp" => ("sync", "tcp"),
        _ => ("unreplicated", "tcp"),
    };
    let text = config_text(
        scratch.path(),
        memory.path(),
        &[("v", mode, transport)],
        Some(1),
    )?;
    let file = scratch.path().join("bench.toml");
    fs::write(&file, text)?;
    let config = Config::load(&file).map_err(io::Error::other)?;
    let mirror = match mode {
        "sync" => Some(NodeProcess::start(&file, "b")?),
        _ => None,
    };
    let volume =
        Volume::attach_with(&config, "a", Some("v"), |_, _| {}).map_err(io::Error::other)?;
    let cpus = placement();
    if let (Some((_, peer)), Some(mirror)) = (cpus, &mirror) {
        pin_process(mirror.id(), peer)?;
    }
    let pinned = cpus.map(|(client, _)| pin_thread(client)).transpose()?;
    for count in COUNTS {
        one_count(o, count, &volume, pool.as_ref().ok())?;
    }
    drop(pinned);
    volume.detach().map_err(io::Error::other)
}

fn one_count(o: &TxOptions, count: usize, volume: &Volume, pool: Option<&Pool>) -> io::Result<()> {
    let plan = Plan {
        rounds: o.rounds,
        ops: o.ops,
        ..Plan::default()
    };
    let words = |file: &str| -> io::Result<Words> {
        let file = format!("{file}-{count}");
        Ok(Words::new(region(volume, &file, o.cold)?, o.cold, count))
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
    let mode = if o.cold { "cold" } else { "warm" };
    let mut rows = Vec::new();
    for name in ["transaction", "gmsync", "libpmemobj"] {
        let Some(summary) = paired.summary(name) else {
            continue;
        };
        let row = Row::new("tx", name, count * 8, summary)
            .mode(mode)
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
