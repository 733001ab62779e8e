//! The benchmarks that `mojim bench` runs by itself: the command line of each one in this crate.
//!
//! A wrong option is an error of the kind `InvalidInput`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;

use crate::emulated::MOST_MICROS;
use crate::fams::FamsOptions;
use crate::group::{self, ThreadsOptions};
use crate::heap::HeapOptions;
use crate::large::LargeOptions;
use crate::log::LogOptions;
use crate::nvmm::NvmmOptions;
use crate::sync::SyncOptions;
use crate::tls::TlsOptions;
use crate::tx::TxOptions;

/// One of the benchmarks.
#[derive(clap::Subcommand)]
#[allow(private_interfaces, reason = "the command line is the interface")]
#[allow(missing_docs, reason = "the help is that of each variant's options")]
pub enum Measure {
    Sync(Sync),
    Threads(Threads),
    Heap(Heap),
    Fams(Fams),
    Large(Large),
    Log(LogOptions),
    Nvmm(NvmmOptions),
    Tls(Tls),
    Tx(TxOptions),
}

impl Measure {
    /// Runs it and prints its rows.
    pub fn run(self) -> io::Result<()> {
        match self {
            Measure::Sync(s) => s.run(),
            Measure::Threads(t) => t.run(),
            Measure::Heap(h) => h.run(),
            Measure::Fams(f) => f.run(),
            Measure::Large(l) => l.run(),
            Measure::Log(l) => crate::log::run(&l),
            Measure::Nvmm(n) => crate::nvmm::run(&n),
            Measure::Tls(t) => t.run(),
            Measure::Tx(t) => crate::tx::run(&t),
        }
    }
}

fn wrong(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

/// Measure one sync point by mode, transport and size.
#[derive(clap::Args)]
struct Sync {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Sizes of a sync point in bytes, separated by commas [default: 8 B to 12 KiB].
    #[arg(long, value_name = "BYTES", value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Rounds of paired blocks for each transport and size.
    #[arg(long, value_name = "N", default_value_t = SyncOptions::default().rounds)]
    rounds: usize,
    /// Operations in a block.
    #[arg(long, value_name = "N", default_value_t = SyncOptions::default().ops)]
    ops: usize,
    #[command(flatten)]
    mirror: MirrorDisk,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Sync {
    fn run(self) -> io::Result<()> {
        at_least_one(self.rounds, self.ops)?;
        crate::sync::run(&SyncOptions {
            json: self.json,
            dir: self.dir,
            sizes: self.sizes,
            rounds: self.rounds,
            ops: self.ops,
            mirror_disk: self.mirror.takes(),
        })
    }
}

/// The emulated disk of the mirror's log, if there is one.
#[derive(clap::Args)]
struct MirrorDisk {
    /// Emulate the disk of the mirror's log. It is in memory, and each durable write takes this
    /// many microseconds. One machine then shows figures for two. Cases that wait for this disk
    /// have no ratio. Without it, the mirror's log is in memory.
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=MOST_MICROS))]
    mirror_disk: Option<u64>,
}

impl MirrorDisk {
    fn takes(&self) -> Option<Duration> {
        self.mirror_disk.map(Duration::from_micros)
    }
}

/// Measure how threads share the write of a sync point: operations per second and latency by
/// number of threads.
///
/// It compares with a log and links that threads share, and with RocksDB.
///
/// "ratio" is the operations per second, divided by those of the limit with as many threads in
/// the same round. With several rounds, a row shows the round with the median operations per
/// second.
#[derive(clap::Args)]
struct Threads {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Numbers of threads, separated by commas [default: 1 to 32].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    counts: Vec<usize>,
    /// Seconds of each case, after a warm-up.
    #[arg(long, value_name = "S", default_value_t = ThreadsOptions::default().time.as_secs_f64())]
    seconds: f64,
    /// Rounds for each number of threads.
    #[arg(long, value_name = "N", default_value_t = ThreadsOptions::default().rounds)]
    rounds: usize,
    /// Connections of each volume. 0 leaves the key out of the configuration.
    #[arg(long, value_name = "N", default_value_t = ThreadsOptions::default().connections)]
    connections: usize,
    /// Bytes of a sync point, and of a value in RocksDB. Above 64 there are no ratios, because
    /// the limits carry records of 128 bytes.
    #[arg(long, value_name = "BYTES", default_value_t = ThreadsOptions::default().bytes)]
    bytes: usize,
    /// The cases to measure, separated by commas [default: all].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PossibleValuesParser::new(group::case_names()))]
    cases: Vec<String>,
    #[command(flatten)]
    mirror: MirrorDisk,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Threads {
    fn run(self) -> io::Result<()> {
        at_least_one(self.rounds, 1)?;
        let most = group::MOST_THREADS;
        if let Some(n) = self.counts.iter().find(|n| !(1..=most).contains(*n)) {
            return Err(wrong(format!("--counts: {n} is not 1 to {most}")));
        }
        let most = group::MOST_BYTES;
        if !(1..=most).contains(&self.bytes) {
            return Err(wrong(format!("--bytes: 1 to {most}")));
        }
        // Not a number is refused, too.
        if !(0.001..=3600.0).contains(&self.seconds) {
            return Err(wrong("--seconds: 0.001 to 3600"));
        }
        group::run(&ThreadsOptions {
            json: self.json,
            dir: self.dir,
            counts: self.counts,
            time: Duration::from_secs_f64(self.seconds),
            rounds: self.rounds,
            connections: self.connections,
            bytes: self.bytes,
            cases: self.cases,
            mirror_disk: self.mirror.takes(),
        })
    }
}

/// Measure malloc and free in a persistent heap, beside allocators of plain memory.
///
/// The allocators are mimalloc and jemalloc, where installed (libmimalloc2.0, libjemalloc2), and
/// the C library's. One operation frees a random block of 1,024, and allocates another.
///
/// Two more measurements are transactions over shared memory, and the time to open a heap full of
/// small blocks. One transaction allocates a block and fills it. The other ("to store") fills an
/// existing block.
///
/// Needs libmojim.so beside this command.
#[derive(clap::Args)]
struct Heap {
    /// A directory for the files [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Rounds, in each of which every allocator has a turn.
    #[arg(long, value_name = "N", default_value_t = HeapOptions::default().rounds)]
    rounds: usize,
    /// Operations of a turn.
    #[arg(long, value_name = "N", default_value_t = HeapOptions::default().ops)]
    ops: usize,
    /// Size of the heap to open, in MiB. 0 leaves the measurement out.
    #[arg(long, value_name = "MIB", default_value_t = HeapOptions::default().open >> 20)]
    open: usize,
    /// Take the turns of the process's own allocator. The command starts itself with this.
    #[arg(long, hide = true)]
    serve: bool,
    /// Print one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

impl Heap {
    fn run(self) -> io::Result<()> {
        if self.serve {
            return crate::heap::serve();
        }
        at_least_one(self.rounds, self.ops)?;
        if self.open > 3 << 10 {
            return Err(wrong("--open: at most 3072"));
        }
        crate::heap::run(&HeapOptions {
            json: self.json,
            dir: self.dir,
            rounds: self.rounds,
            ops: self.ops,
            open: self.open << 20,
        })
    }
}

/// Measure one sync point by the number of changed pages, beside plain msync.
///
/// Each page has 8 changed bytes. Means include the time until everything is durable in the data
/// file.
///
/// "to large" and "to small" are the speed divided by that of plain msync. The page cache of its
/// file has large folios, or single pages.
#[derive(clap::Args)]
struct Fams {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Pages in a sync point, of the 16,384 of a region, separated by commas [default: 1 to 512].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pages: Vec<usize>,
    /// Rounds of blocks.
    #[arg(long, value_name = "N", default_value_t = FamsOptions::default().rounds)]
    rounds: usize,
    /// Milliseconds of a block.
    #[arg(long, value_name = "MS", default_value_t = FamsOptions::default().block.as_millis() as u64)]
    block: u64,
    /// Microseconds between two sync points, separated by commas [default: 0 and 4000].
    #[arg(long, value_name = "US", value_delimiter = ',')]
    think: Vec<u64>,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Fams {
    fn run(self) -> io::Result<()> {
        if self.rounds == 0 || self.block == 0 {
            return Err(wrong("--rounds and --block: at least 1"));
        }
        let most = crate::fams::MOST_PAGES;
        if let Some(n) = self.pages.iter().find(|n| !(1..=most).contains(*n)) {
            return Err(wrong(format!(
                "--pages: {n} is not 1 to {most}, the pages of the region"
            )));
        }
        let think = self.think.iter().map(|us| Duration::from_micros(*us));
        crate::fams::run(&FamsOptions {
            json: self.json,
            dir: self.dir,
            pages: self.pages,
            rounds: self.rounds,
            block: Duration::from_millis(self.block),
            think: match self.think.is_empty() {
                true => FamsOptions::default().think,
                false => think.collect(),
            },
        })
    }
}

/// Measure a sync point of a whole region with one changed page, by the size of the region.
///
/// The regions have 16 MiB and 4 GiB, all in memory, and 64 GiB with 1 GiB in memory. "times"
/// says how many times as long it takes as in 16 MiB, without the store and with it. Needs 10 GiB
/// of memory. The files are sparse.
#[derive(clap::Args)]
struct Large {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Kinds of tracking, separated by commas [default: uffd and two-level].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    trackers: Vec<String>,
    /// Rounds of paired blocks.
    #[arg(long, value_name = "N", default_value_t = LargeOptions::default().rounds)]
    rounds: usize,
    /// Operations in a block.
    #[arg(long, value_name = "N", default_value_t = LargeOptions::default().ops)]
    ops: usize,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Large {
    fn run(self) -> io::Result<()> {
        at_least_one(self.rounds, self.ops)?;
        let default = LargeOptions::default();
        crate::large::run(&LargeOptions {
            json: self.json,
            dir: self.dir,
            trackers: match self.trackers.is_empty() {
                true => default.trackers,
                false => self.trackers,
            },
            rounds: self.rounds,
            ops: self.ops,
            ..LargeOptions::default()
        })
    }
}

/// Measure how much keys add to a sync point: encrypted links, plain links, and no keys.
#[derive(clap::Args)]
struct Tls {
    /// A directory for the files [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Sizes of a sync point in bytes, separated by commas [default: 64 and 4096].
    #[arg(long, value_name = "BYTES", value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Rounds of paired blocks for each size.
    #[arg(long, value_name = "N", default_value_t = SyncOptions::default().rounds)]
    rounds: usize,
    /// Operations in a block.
    #[arg(long, value_name = "N", default_value_t = SyncOptions::default().ops)]
    ops: usize,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Tls {
    fn run(self) -> io::Result<()> {
        at_least_one(self.rounds, self.ops)?;
        crate::tls::run(&TlsOptions {
            json: self.json,
            dir: self.dir,
            sizes: self.sizes,
            rounds: self.rounds,
            ops: self.ops,
        })
    }
}

fn at_least_one(rounds: usize, ops: usize) -> io::Result<()> {
    for (option, n) in [("rounds", rounds), ("ops", ops)] {
        if n == 0 {
            return Err(wrong(format!("--{option}: at least 1")));
        }
    }
    Ok(())
}
