//! `mojim bench fams`: what a sync point costs by the number of pages that were stored to
//! (failure-atomic msync, Figure 2).
//!
//! A file of 64 MiB is mapped. Each operation stores 8 bytes to each of some random pages and
//! commits them, by one of these:
//!
//! - plain `msync` of the whole mapping (which is neither atomic nor ordered), also on a file
//!   system that journals data
//! - Mojim's `msync` of the whole region, which has to find the pages, with each policy of
//!   write-back
//! - `gmsync` of the exact ranges
//!
//! Nothing is replicated, and the log is on the same disk. The subjects take turns in blocks of
//! some time, in an order that rotates.
//!
//! Timed are the sync points of a block, and at its end the time until everything is in the data
//! file and durable there. Plain `msync` has done that by then. The stores are timed apart: the
//! first one to a page after a sync point is a page fault, for all.
//!
//! Honest limits: a file has one of two speeds for plain `msync` (see [`crate::raw`]). Both are
//! measured. Bytes written are those of the whole disk, as the kernel counts them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim::{MapFlags, Volume, gmsync, msync};
use mojim_config::{Config, WriteBack};
use mojim_env::rng::Rng;
use serde::Serialize;

use crate::measure::histogram;
use crate::raw::{Folios, Journaling, PlainMsync, RAW_MSYNC_BYTES};
use crate::report;
use crate::scratch::Scratch;

/// Numbers of pages in a sync point (Figure 2).
pub const PAGES: [usize; 6] = [1, 4, 16, 64, 256, 512];
/// Pages of a region.
pub const MOST_PAGES: usize = RAW_MSYNC_BYTES / 4096;
/// Bytes changed in each.
const CHANGED: usize = 8;

/// What to measure.
#[derive(Debug, Clone)]
pub struct FamsOptions {
    /// One JSON object a line instead of a table.
    pub json: bool,
    /// Where the files go: a directory on the disk to be measured. Default: the temporary
    /// directory.
    pub dir: Option<PathBuf>,
    /// Pages in a sync point; empty: 1 to 512.
    pub pages: Vec<usize>,
    /// Rounds of blocks.
    pub rounds: usize,
    /// Time of a block.
    pub block: Duration,
    /// Times between two sync points, one after the other.
    pub think: Vec<Duration>,
}

impl Default for FamsOptions {
    fn default() -> Self {
        FamsOptions {
            json: false,
            dir: None,
            pages: Vec::new(),
            rounds: 5,
            block: Duration::from_millis(700),
            think: vec![Duration::ZERO, Duration::from_millis(4)],
        }
    }
}

/// One figure.
#[derive(Debug, Clone, Serialize)]
struct Row {
    bench: &'static str,
    /// `msync`, `mojim`.
    case: &'static str,
    /// How the file's pages lie in memory, or how the sync point names what changed.
    mode: &'static str,
    /// `write_back` of Mojim's volume.
    #[serde(skip_serializing_if = "str::is_empty")]
    write_back: &'static str,
    pages: usize,
    think_us: u64,
    /// Of all rounds: a sync point's share of all the time; without think time the end of the
    /// blocks is in it.
    mean_us: f64,
    median_us: f64,
    p99_us: f64,
    /// The stores of one sync point, which are not in the other figures.
    store_us: f64,
    /// Its share of the ends of the blocks: until all is in the data file, and durable there.
    settle_us: f64,
    /// Bytes written to the disk for each sync point.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<u64>,
    /// How many times as fast as plain `msync`, by the means: the median over the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    faster_than_large: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    faster_than_small: Option<f64>,
}

/// Random places, 8 bytes each, one in each of some pages.
struct Places {
    random: Rng,
    page: usize,
    at: Vec<usize>,
}

impl Places {
    fn new() -> Places {
        Places {
            random: Rng::new(1),
            page: rustix::param::page_size(),
            at: Vec::new(),
        }
    }

    fn choose(&mut self, n: usize) {
        self.at.clear();
        while self.at.len() < n {
            let random = self.random.next();
            let pages = RAW_MSYNC_BYTES / self.page;
            let page = (random >> 20) as usize % pages;
            let within = (random >> 50) as usize % (self.page / CHANGED) * CHANGED;
            self.at.push(page * self.page + within);
        }
    }
}

trait Subject {
    fn case(&self) -> &'static str;
    fn mode(&self) -> &'static str;
    fn write_back(&self) -> &'static str {
        ""
    }
    /// Where it is mapped.
    fn base(&self) -> *mut u8;
    fn sync(&mut self, at: &[usize]) -> io::Result<()>;
    /// Waits until everything is durable in the data file.
    fn settle(&mut self) -> io::Result<()>;
}

struct Plain(PlainMsync, &'static str);

impl Subject for Plain {
    fn case(&self) -> &'static str {
        "msync"
    }
    fn mode(&self) -> &'static str {
        self.1
    }
    fn base(&self) -> *mut u8 {
        self.0.base()
    }
    fn sync(&mut self, _: &[usize]) -> io::Result<()> {
        self.0.msync_all()
    }
    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Mojim {
    volume: Volume,
    base: *mut u8,
    data: File,
    write_back: WriteBack,
    exact: Option<Vec<(*const u8, usize)>>,
}

impl Mojim {
    fn attach(config: &Config, write_back: WriteBack, exact: bool) -> io::Result<Mojim> {
        let name = name(write_back, exact);
        let volume =
            Volume::attach_with(config, "a", Some(&name), |_, _| {}).map_err(io::Error::other)?;
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let m = volume
            .map("data", RAW_MSYNC_BYTES, flags)
            .map_err(io::Error::other)?;
        // Like the rival's file, all of it is there.
        // SAFETY: inside the mapping.
        unsafe { std::ptr::write_bytes(m.ptr, 0xa5, m.len) };
        msync(m.ptr, m.len).map_err(io::Error::other)?;
        let data = File::open(volume.directory().join("data"))?;
        Ok(Mojim {
            volume,
            base: m.ptr,
            data,
            write_back,
            exact: exact.then(Vec::new),
        })
    }
}

impl Subject for Mojim {
    fn case(&self) -> &'static str {
        "mojim"
    }
    fn mode(&self) -> &'static str {
        match self.exact {
            Some(_) => "exact-ranges",
            None => "whole-region",
        }
    }
    fn write_back(&self) -> &'static str {
        self.write_back.as_str()
    }
    fn base(&self) -> *mut u8 {
        self.base
    }
    fn sync(&mut self, at: &[usize]) -> io::Result<()> {
        match &mut self.exact {
            Some(ranges) => {
                ranges.clear();
                // SAFETY: inside the mapping.
                let all = at
                    .iter()
                    .map(|a| (unsafe { self.base.add(*a) }.cast_const(), CHANGED));
                ranges.extend(all);
                gmsync(ranges)
            }
            None => msync(self.base, RAW_MSYNC_BYTES),
        }
        .map(drop)
        .map_err(io::Error::other)
    }
    fn settle(&mut self) -> io::Result<()> {
        self.volume.settle().map_err(io::Error::other)?;
        self.data.sync_data()
    }
}

/// For each of Mojim's volumes: the write-back policy, and whether sync points name their
/// bytes.
const VOLUMES: [(WriteBack, bool); 4] = [
    (WriteBack::Auto, false),
    (WriteBack::Eager, false),
    (WriteBack::Async, false),
    (WriteBack::Auto, true),
];

fn name(write_back: WriteBack, exact: bool) -> String {
    let what = if exact { "exact" } else { "whole" };
    format!("{what}-{write_back}")
}

fn config(dir: &Path, ring: &Path) -> io::Result<Config> {
    let path = dir.join("bench.toml");
    let volume = |(write_back, exact): (WriteBack, bool)| {
        format!(
            "[volume.{}]\nmode = \"unreplicated\"\nprimary = \"a\"\nwrite_back = \"{write_back}\"\n",
            name(write_back, exact)
        )
    };
    fs::write(
        &path,
        format!(
            "cluster = \"bench\"\n{}[node.a]\naddress = \"127.0.0.1:1\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ medium = \"disk\", size = \"64MiB\" }}\n",
            VOLUMES.map(volume).concat(),
            dir.join("a").display(),
            ring.display(),
        ),
    )?;
    Config::load(&path).map_err(io::Error::other)
}

/// Bytes written to the disk on which `dir` lies, so far.
fn written(dir: &Path) -> Option<u64> {
    let dev = fs::metadata(dir).ok()?.st_dev();
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    let stat = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
    let sectors: u64 = stat.split_whitespace().nth(6)?.parse().ok()?;
    Some(sectors * 512)
}

/// The figures of one subject's blocks.
struct Taken {
    times: hdrhistogram::Histogram<u64>,
    /// Of each block, in microseconds.
    means: Vec<f64>,
    ops: u64,
    total: Duration,
    stores: Duration,
    settled: Duration,
    bytes: Option<u64>,
}

fn block(
    s: &mut dyn Subject,
    places: &mut Places,
    pages: usize,
    (time, think): (Duration, Duration),
    taken: &mut Taken,
    dir: &Path,
) -> io::Result<()> {
    let before = written(dir);
    let (mut ops, mut total) = (0u64, Duration::ZERO);
    let begin = Instant::now();
    let mut fill = taken.ops;
    while begin.elapsed() < time {
        places.choose(pages);
        fill += 1;
        let at = Instant::now();
        for a in &places.at {
            // SAFETY: inside the mapping, which stays.
            unsafe { s.base().add(*a).cast::<u64>().write(fill) };
        }
        let stored = at.elapsed();
        s.sync(&places.at)?;
        let took = at.elapsed() - stored;
        taken.stores += stored;
        let _ = taken.times.record(took.as_nanos() as u64);
        total += took;
        ops += 1;
        if !think.is_zero() {
            std::thread::sleep(think);
        }
    }
    let at = Instant::now();
    s.settle()?;
    let settled = at.elapsed();
    taken.settled += settled;
    // With think time, nearly all of this is done during the think time.
    if think.is_zero() {
        total += settled;
    }
    taken.means.push(total.as_secs_f64() * 1e6 / ops as f64);
    taken.ops += ops;
    taken.total += total;
    taken.bytes = match (taken.bytes, before, written(dir)) {
        (Some(sum), Some(before), Some(after)) => Some(sum + (after - before)),
        _ => None,
    };
    Ok(())
}

pub(crate) fn median(mut all: Vec<f64>) -> f64 {
    all.sort_unstable_by(f64::total_cmp);
    all[all.len() / 2]
}

fn one(
    o: &FamsOptions,
    subjects: &mut [Box<dyn Subject>],
    pages: usize,
    think: Duration,
    dir: &Path,
) -> io::Result<Vec<Row>> {
    let mut places = Places::new();
    let mut all: Vec<Taken> = subjects
        .iter()
        .map(|_| Taken {
            times: histogram(),
            means: Vec::new(),
            ops: 0,
            total: Duration::ZERO,
            stores: Duration::ZERO,
            settled: Duration::ZERO,
            bytes: Some(0),
        })
        .collect();
    for round in 0..o.rounds {
        for i in 0..subjects.len() {
            let i = (i + round) % subjects.len();
            let s = &mut *subjects[i];
            block(s, &mut places, pages, (o.block, think), &mut all[i], dir)?;
        }
    }
    let means: Vec<Vec<f64>> = all.iter().map(|t| t.means.clone()).collect();
    let than = |of: usize, i: usize| {
        let ratios = means[of].iter().zip(&means[i]).map(|(a, b)| a / b);
        Some((median(ratios.collect()) * 1e3).round() / 1e3)
    };
    let rounded = |x: f64| (x * 1e3).round() / 1e3;
    Ok(subjects
        .iter()
        .zip(&all)
        .enumerate()
        .map(|(i, (s, t))| {
            let ours = s.case() == "mojim";
            Row {
                bench: "fams",
                case: s.case(),
                mode: s.mode(),
                write_back: s.write_back(),
                pages,
                think_us: think.as_micros() as u64,
                mean_us: rounded(t.total.as_secs_f64() * 1e6 / t.ops as f64),
                median_us: rounded(t.times.value_at_quantile(0.5) as f64 / 1e3),
                p99_us: rounded(t.times.value_at_quantile(0.99) as f64 / 1e3),
                store_us: rounded(t.stores.as_secs_f64() * 1e6 / t.ops as f64),
                settle_us: rounded(t.settled.as_secs_f64() * 1e6 / t.ops as f64),
                disk_bytes: t.bytes.map(|b| b / t.ops),
                faster_than_large: if ours { than(0, i) } else { None },
                faster_than_small: if ours { than(1, i) } else { None },
            }
        })
        .collect())
}

fn table(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<6} {:<13} {:<6} {:>5} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9} {:>9}",
        "case",
        "mode",
        "write",
        "pages",
        "think us",
        "mean us",
        "median us",
        "p99 us",
        "store us",
        "settle us",
        "disk bytes",
        "to large",
        "to small"
    )?;
    let times = |x: Option<f64>| x.map_or(String::new(), |x| format!("{x:.2}"));
    for r in rows {
        let disk = r.disk_bytes.map_or(String::new(), |b| b.to_string());
        writeln!(
            out,
            "{:<6} {:<13} {:<6} {:>5} {:>8} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>10} {:>9} {:>9}",
            r.case,
            r.mode,
            r.write_back,
            r.pages,
            r.think_us,
            r.mean_us,
            r.median_us,
            r.p99_us,
            r.store_us,
            r.settle_us,
            disk,
            times(r.faster_than_large),
            times(r.faster_than_small)
        )?;
    }
    Ok(())
}

/// Runs the benchmark and prints it.
pub fn run(o: &FamsOptions) -> io::Result<()> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let config = config(scratch.path(), memory.path())?;
    let plain = |dir: &Path, f: Folios, name| {
        PlainMsync::create(dir, f).map(|p| Box::new(Plain(p, name)) as Box<dyn Subject>)
    };
    // Dropped after the subjects that use it.
    let journaling = Journaling::mount(scratch.path());
    let mut subjects = Vec::new();
    for f in [Folios::Large, Folios::Small] {
        subjects.push(plain(scratch.path(), f, f.name())?);
    }
    match &journaling {
        Ok(j) => subjects.push(plain(j.path(), Folios::Small, "data=journal")?),
        Err(e) => eprintln!("ext4 with data=journal is left out: {e}"),
    }
    let mut volumes = Vec::new();
    for (write_back, exact) in VOLUMES {
        let m = Mojim::attach(&config, write_back, exact)?;
        volumes.push(m.volume.clone());
        subjects.push(Box::new(m));
    }
    let pages = match o.pages.is_empty() {
        true => PAGES.to_vec(),
        false => o.pages.clone(),
    };
    for &think in &o.think {
        for &pages in &pages {
            let rows = one(o, &mut subjects, pages, think, scratch.path())?;
            report::print(o.json, &rows, table)?;
        }
    }
    drop(subjects);
    for v in volumes {
        v.detach().map_err(io::Error::other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_measures_every_case() {
        let dir = Scratch::new().unwrap();
        run(&FamsOptions {
            json: true,
            dir: Some(dir.path().to_owned()),
            pages: vec![2],
            rounds: 1,
            block: Duration::from_millis(20),
            think: vec![Duration::ZERO, Duration::from_millis(1)],
        })
        .unwrap();
    }

    #[test]
    fn a_report_has_its_means_and_medians() {
        let row = Row {
            bench: "fams",
            case: "mojim",
            mode: "whole-region",
            write_back: "auto",
            pages: 16,
            think_us: 4000,
            mean_us: 200.0,
            median_us: 150.0,
            p99_us: 900.0,
            store_us: 1.0,
            settle_us: 2.0,
            disk_bytes: Some(8192),
            faster_than_large: Some(2.0),
            faster_than_small: None,
        };
        let row = serde_json::to_value(&row).unwrap();
        let rows = crate::all::adapters::fams("", &row).unwrap();
        let got: Vec<_> = rows.iter().map(|r| (r.y, &*r.unit, &*r.marks[0])).collect();
        let want = [
            (200.0, "us", "mean"),
            (150.0, "us", "median"),
            (8192.0, "B", "disk"),
        ];
        assert_eq!(got, want);
        assert_eq!(rows[0].series, "mojim whole-region, write_back auto");
        assert_eq!(rows[0].ratio, Some(0.5), "of times, not of speeds");
        assert!(rows.iter().all(|r| r.has("think 4000 us")));
    }
}
