//! `mojim bench`: the command line of the evaluation; the work is in `mojim-bench`.

use std::path::PathBuf;
use std::time::Duration;

use mojim_bench::sync::SyncOptions;
use mojim_bench::tls::TlsOptions;

use crate::failover::FailoverBench;
use crate::failure::{Done, Failure};
use crate::tiers::TiersBench;

/// Measure: the sync path against its physical limits and plain msync; keys; failover; bringing a
/// node up to date, and sync points with more copies, by Mojim and by rival schemes.
#[derive(clap::Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Sync(Sync),
    Tls(Tls),
    Failover(FailoverBench),
    Tiers(TiersBench),
}

/// Latency of one sync point by mode, transport and size, then throughput by threads.
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
    /// Most threads in the throughput part; 0 leaves it out.
    #[arg(long, value_name = "N", default_value_t = SyncOptions::default().threads)]
    threads: usize,
    /// Milliseconds for each throughput figure.
    #[arg(long, value_name = "MS", default_value_t = SyncOptions::default().thread_time.as_millis() as u64)]
    thread_time: u64,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

/// What keys add to a sync point: with encrypted links, with plain ones, and without keys.
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
    fn run(self) -> Done {
        at_least_one(self.rounds, self.ops)?;
        mojim_bench::tls::run(&TlsOptions {
            json: self.json,
            dir: self.dir,
            sizes: self.sizes,
            rounds: self.rounds,
            ops: self.ops,
        })?;
        Ok(0)
    }
}

fn at_least_one(rounds: usize, ops: usize) -> Result<(), Failure> {
    for (option, n) in [("rounds", rounds), ("ops", ops)] {
        if n == 0 {
            return Err(Failure::usage(format!("--{option}: at least 1")));
        }
    }
    Ok(())
}

impl Bench {
    /// Runs it.
    pub fn run(self) -> Done {
        let s = match self.what {
            What::Sync(s) => s,
            What::Tls(t) => return t.run(),
            What::Failover(f) => return f.run(),
            What::Tiers(t) => return t.run(),
        };
        at_least_one(s.rounds, s.ops)?;
        mojim_bench::sync::run(&SyncOptions {
            json: s.json,
            dir: s.dir,
            sizes: s.sizes,
            rounds: s.rounds,
            ops: s.ops,
            threads: s.threads,
            thread_time: Duration::from_millis(s.thread_time),
        })?;
        Ok(0)
    }
}
