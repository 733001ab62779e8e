//! `mojim bench`: the command line of the evaluation; the work is in `mojim-bench`.

use std::path::PathBuf;

use mojim_bench::sync::SyncOptions;

use crate::failure::{Done, Failure};

/// Measure: the sync path against its physical limits and against plain msync.
#[derive(clap::Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Sync(Sync),
}

/// Latency of one sync point, by mode, transport, size and threads.
#[derive(clap::Args)]
struct Sync {
    /// A directory on the file system to measure; its free space must hold a few GiB.
    #[arg(long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Payloads in bytes.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "8,64,1024,4096,12288")]
    sizes: Vec<usize>,
    /// Modes: unreplicated, async, sync, sync-flush.
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "unreplicated,async,sync,sync-flush")]
    modes: Vec<String>,
    /// Transports: tcp, shm.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "tcp,shm")]
    transports: Vec<String>,
    /// Threads that sync at the same time.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    threads: Vec<usize>,
    /// Seconds for each combination, at most.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    seconds: f64,
    /// Print one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

impl Bench {
    /// Runs it.
    pub fn run(self) -> Done {
        let What::Sync(s) = self.what;
        if !s.seconds.is_finite() || s.seconds <= 0.0 {
            return Err(Failure::usage("--seconds: a number above 0 is needed"));
        }
        if s.threads.contains(&0) {
            return Err(Failure::usage("--threads: at least 1"));
        }
        mojim_bench::sync::run(&SyncOptions {
            directory: s.directory,
            sizes: s.sizes,
            modes: s.modes,
            transports: s.transports,
            threads: s.threads,
            seconds: s.seconds,
            json: s.json,
        })?;
        Ok(0)
    }
}
