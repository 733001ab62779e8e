//! `mojim bench log`: appends to a log in each encoding, in memory that stands for persistent
//! memory, without and with a delay after each store, and in volumes.
//!
//! All cases of one size take turns. An operation is [`BATCH`] appends, so that the clock
//! costs little. Rows are of one append. Ratios are to the torn bit's time at the same place
//! (Mnemosyne, "High performance logging").

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use mojim::Volume;
use mojim_config::Config;
use mojim_persistent::AppendLog;
use mojim_persistent::log::Encoding;

use crate::cluster::{NodeProcess, VolumeOf, config_text};
use crate::measure::{Plan, Subject, Summary, paired, prepared};
use crate::raw::{pin_process, pin_thread, placement};
use crate::report::{Row, write_table};
use crate::scratch::Scratch;

/// Sizes of a record, in bytes.
pub const SIZES: [usize; 4] = [8, 64, 512, 4096];
/// Nanoseconds after a store of 8 bytes, as the poster's emulation has it.
pub const DELAY: u32 = 150;
/// Longest record: a ring has room for an operation.
const MOST_BYTES: usize = 16 << 10;
/// Appends in an operation.
const BATCH: usize = 16;
/// Bytes of each ring.
const RING: usize = 1 << 20;

const VOLUMES: [VolumeOf; 3] = [
    ("unrep", "unreplicated", "tcp"),
    ("sync", "sync", "tcp"),
    ("shmsync", "sync", "shm"),
];

/// Measure appends to a log in three encodings.
///
/// The log is in memory that stands for persistent memory, and in volumes. In memory each append
/// is measured twice: plain, and with a delay of 150 ns after each store of 8 bytes.
///
/// "ratio" is the time divided by that of the torn bit at the same place.
#[derive(Debug, Clone, clap::Args)]
pub struct LogOptions {
    /// A directory on the disk of the volumes [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Bytes of a record, up to 16384, separated by commas [default: 8 to 4096].
    #[arg(long, value_name = "BYTES", value_delimiter = ',')]
    pub sizes: Vec<usize>,
    /// Rounds of paired blocks for each size.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rounds: usize,
    /// Operations in a block. An operation is 16 appends.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub ops: usize,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    pub json: bool,
}

/// A log, and where it lies.
struct LogCase {
    name: String,
    mode: String,
    transport: &'static str,
    encoding: &'static str,
    log: AppendLog,
}

/// Opens a log for every encoding at every place.
fn places(memory: &Path, volumes: &[(Volume, VolumeOf)]) -> mojim::Result<Vec<LogCase>> {
    let mut all = Vec::new();
    for (encoding, name) in Encoding::ALL {
        let mut push = |mode: String, transport, log| {
            all.push(LogCase {
                name: format!("{mode} {transport} {name}"),
                mode,
                transport,
                encoding: name,
                log,
            });
        };
        for delay in [0, DELAY] {
            let path = memory.join(format!("{name}-{delay}"));
            let log = AppendLog::open_persistent(&path, RING, Some(encoding), delay)?;
            push(format!("memory+{delay}ns"), "-", log);
        }
        for (volume, (_, mode, transport)) in volumes {
            let log = AppendLog::open(volume, name, RING, Some(encoding))?;
            let transport = if *mode == "unreplicated" {
                "-"
            } else {
                *transport
            };
            push((*mode).to_owned(), transport, log);
        }
    }
    Ok(all)
}

/// Runs the benchmark and prints it.
pub fn run(o: &LogOptions) -> io::Result<()> {
    let odd = |s: &usize| *s > MOST_BYTES;
    if o.rounds == 0 || o.ops == 0 || o.sizes.iter().any(odd) {
        let text = format!("rounds and operations: at least 1; sizes: at most {MOST_BYTES}");
        return Err(io::Error::other(text));
    }
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let config_path = scratch.path().join("bench.toml");
    let text = config_text(scratch.path(), memory.path(), &VOLUMES, Some(1))?;
    fs::write(&config_path, text)?;
    let config = Config::load(&config_path).map_err(io::Error::other)?;
    let mirror = NodeProcess::start(&config_path, "b")?;
    let mut volumes = Vec::new();
    for of in VOLUMES {
        let v = Volume::attach_with(&config, "a", Some(of.0), |_, _| {});
        volumes.push((v.map_err(io::Error::other)?, of));
    }
    let all = places(memory.path(), &volumes).map_err(io::Error::other)?;
    let cpus = placement();
    if let Some((_, peer)) = cpus {
        pin_process(mirror.id(), peer)?;
    }
    let pinned = cpus.map(|(client, _)| pin_thread(client)).transpose()?;
    let sizes = match o.sizes.is_empty() {
        true => SIZES.to_vec(),
        false => o.sizes.clone(),
    };
    let plan = Plan {
        rounds: o.rounds,
        ops: o.ops,
        ..Plan::default()
    };
    for bytes in sizes {
        let rows = one_size(bytes, plan, &all)?;
        let mut out = io::stdout().lock();
        match o.json {
            true => rows.iter().try_for_each(|r| r.write_json(&mut out))?,
            false => {
                writeln!(out, "\nappends of {bytes} bytes")?;
                write_table(&rows, &mut out)?;
            }
        }
    }
    drop(pinned);
    for place in all {
        place.log.close().map_err(io::Error::other)?;
    }
    for (v, _) in volumes {
        v.detach().map_err(io::Error::other)?;
    }
    Ok(())
}

fn subject<'a>(place: &'a LogCase, record: &'a [u8]) -> impl Subject + 'a {
    let prepare = |log: &mut &AppendLog| {
        // The ring's room for a whole operation.
        let (head, tail) = log.ends().map_err(io::Error::other)?;
        let words = (BATCH * (record.len() / 7 + 4)) as u64;
        match tail - head + words > RING as u64 / 8 {
            true => log.truncate(tail).map_err(io::Error::other),
            false => Ok(()),
        }
    };
    let op = |log: &mut &AppendLog| {
        for _ in 0..BATCH {
            log.append(record).map_err(io::Error::other)?;
        }
        Ok(())
    };
    prepared(place.name.clone(), &place.log, prepare, op)
}

fn one_size(bytes: usize, plan: Plan, all: &[LogCase]) -> io::Result<Vec<Row>> {
    let record = vec![0x5a; bytes];
    let mut subjects: Vec<_> = all.iter().map(|p| subject(p, &record)).collect();
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| s as _).collect();
    let paired = paired(&mut refs, plan)?;
    let mut rows = Vec::new();
    for place in all {
        let Some(s) = paired.summary(&place.name) else {
            continue;
        };
        let n = BATCH as f64;
        let one = Summary {
            median_us: s.median_us / n,
            p99_us: s.p99_us / n,
            p999_us: s.p999_us / n,
            per_second: s.per_second * n,
            ..s
        };
        let row = Row::new("log", place.encoding, bytes, one)
            .mode(&place.mode)
            .transport(place.transport);
        let to = format!("{} {} torn-bit", place.mode, place.transport);
        rows.push(match paired.ratio(&place.name, &to) {
            Some(x) if to != place.name => row.ratio(x, "torn-bit"),
            _ => row,
        });
    }
    Ok(rows)
}
