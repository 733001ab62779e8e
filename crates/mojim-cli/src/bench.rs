//! `mojim bench`: the command line of the evaluation; the work is in `mojim-bench`, and here where it
//! needs the other commands.

use std::io::ErrorKind;

use mojim_bench::command::Measure;

use crate::bench_programs::Programs;
use crate::failover::FailoverBench;
use crate::failure::{Done, Failure};
use crate::tiers::TiersBench;

/// Measure: the sync path against its physical limits and plain msync; heaps, transactions and logs; keys;
/// programs on a mount; failover; bringing a node up to date, and sync points with more copies, by Mojim
/// and by rival schemes.
#[derive(clap::Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    #[command(flatten)]
    Measure(Measure),
    Programs(Programs),
    Failover(FailoverBench),
    Tiers(TiersBench),
}

impl Bench {
    /// Runs it.
    pub fn run(self) -> Done {
        match self.what {
            What::Measure(m) => m.run().map(|()| 0).map_err(|e| match e.kind() {
                ErrorKind::InvalidInput => Failure::usage(e.to_string()),
                _ => Failure::from(e),
            }),
            What::Programs(p) => p.run(),
            What::Failover(f) => f.run(),
            What::Tiers(t) => t.run(),
        }
    }
}
