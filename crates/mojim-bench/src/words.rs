//! The command line of `mojim-bench`, which `mojim bench` and `mojim demo` become.
//!
//! Some of its processes are not asked for by its user: the other end of a link, a replica, a
//! measurement's program. Invariant: each of them is this program again, with a hidden word.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use mojim_cli::docs::{Completions, Man};
use mojim_cli::failure::{Done, Failure};

use crate::all::All;
use crate::command::Measure;
use crate::demo::Demo;
use crate::emulated::EmulatedNode;
use crate::failover::FailoverBench;
use crate::latency::Latency;
use crate::on_mounts::Programs;
use crate::rivals::Replica;
use crate::tiers::{TiersBench, Touch};

/// Measure sync points, heaps, transactions, logs, programs on a mount, and failover.
///
/// Most measurements also show a physical limit, plain msync, or another product under the same
/// load.
#[derive(Parser)]
#[command(name = "mojim-bench", bin_name = "mojim bench", version)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    All(All),
    #[command(flatten)]
    Measure(Measure),
    Programs(Programs),
    Failover(FailoverBench),
    Tiers(TiersBench),
    #[command(hide = true)]
    Demo(Demo),
    #[command(hide = true)]
    Completions(Completions),
    #[command(hide = true)]
    Man(Man),
    #[command(name = "__touch", hide = true)]
    Touch(Touch),
    #[command(name = "__latency", hide = true)]
    Latency(Latency),
    #[command(name = "__replica", hide = true)]
    Replica(Replica),
    #[command(name = crate::emulated::WORD, hide = true)]
    EmulatedNode(EmulatedNode),
}

/// The command line as it is typed: `mojim demo`, `mojim bench sync`.
fn parse() -> Cli {
    let is_demo = std::env::args_os().nth(1) == Some(OsString::from("demo"));
    let command = Cli::command();
    let command = match is_demo {
        true => command.bin_name("mojim"),
        false => command,
    };
    Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|e| e.exit())
}

/// That of `mojim`, with all words of this program.
fn all() -> clap::Command {
    let bench = Cli::command().name("bench");
    let demo = bench.find_subcommand("demo").expect("it is there");
    let demo = demo.clone().hide(false);
    mojim_cli::command().mut_subcommands(|word| match word.get_name() {
        "demo" => demo.clone(),
        "bench" => bench.clone(),
        _ => word,
    })
}

fn run(what: What) -> Done {
    match what {
        What::All(a) => a.run(),
        What::Measure(m) => m.run().map(|()| 0).map_err(|e| match e.kind() {
            ErrorKind::InvalidInput => Failure::usage(e.to_string()),
            _ => Failure::from(e),
        }),
        What::Programs(p) => p.run(),
        What::Failover(f) => f.run(),
        What::Tiers(t) => t.run(),
        What::Demo(d) => d.run(),
        What::Completions(c) => c.run(all()),
        What::Man(m) => m.run(all()),
        What::Touch(t) => t.run(),
        What::Latency(l) => l.run(),
        What::Replica(r) => r.run(),
        What::EmulatedNode(n) => n.run(),
    }
}

/// The program.
pub fn main() -> ExitCode {
    if crate::peers::maybe_run_peer() {
        return ExitCode::SUCCESS;
    }
    match run(parse().what) {
        Ok(code) => ExitCode::from(code),
        Err(f) => {
            f.report();
            ExitCode::from(f.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `mojim bench all` runs this program by these words.
    #[test]
    fn the_words_of_the_plan_are_words_of_this_program() {
        use crate::all::plan::{Length, PLAN};
        let lengths = [Length::Tiny, Length::Quick, Length::Standard, Length::Paper];
        for part in PLAN.iter().flat_map(|p| p.parts) {
            for words in lengths.into_iter().filter_map(|l| part.words(l)) {
                let program = ["mojim-bench".to_owned()].into_iter();
                let all = program.chain(words.clone());
                let all = all.chain(["--json", "--dir", "/tmp"].map(str::to_owned));
                assert!(Cli::try_parse_from(all).is_ok(), "{words:?}");
            }
        }
    }

    /// `mojim --help` has them from another place than their own help.
    #[test]
    fn the_command_says_of_these_words_what_they_say() {
        let (mojim, all) = (mojim_cli::command(), all());
        for name in ["demo", "bench"] {
            let about = |of: &clap::Command| {
                let word = of.find_subcommand(name).expect(name);
                word.get_about().map(ToString::to_string)
            };
            assert!(about(&mojim).is_some());
            assert_eq!(about(&mojim), about(&all));
        }
        all.debug_assert();
    }
}
