//! The `mojim` command: one module for each subcommand; this file owns the command
//! line and the exit code.

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

mod append;
mod ask;
mod below;
mod bench;
mod bench_programs;
mod carry;
mod clean;
mod compare;
mod config;
mod demo;
mod docs;
mod failover;
mod failure;
mod guard;
mod heap;
mod heard;
mod interval;
mod keys;
mod latency;
mod log;
mod mount;
mod mount_helper;
mod namespace;
mod node;
mod output;
mod processes;
#[path = "../../mojim-preload/src/program.rs"]
mod program;
mod promote;
mod repair;
mod replace;
mod rivals;
mod run;
mod runs_mount;
mod signals;
mod status;
mod store;
mod supervise;
mod tiers;
mod verify;
mod well;
mod while_used;

use failure::Done;

const AFTER: &str = "\
Start here: `mojim demo` sets up two nodes in a temporary directory, kills one in the middle of \
its work and shows that nothing was lost.

Exit codes: 0 done, or the answer is yes; 1 failed, or the answer is no; 2 the command line or \
the configuration is wrong.";

/// Ordinary memory that is also a file, committed atomically where the program chooses and copied
/// to a second node.
#[derive(Parser)]
#[command(name = "mojim", version, after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    word: Option<Word>,
}

#[derive(Subcommand)]
enum Word {
    Demo(demo::Demo),
    Keys(keys::Keys),
    Node(node::Node),
    Run(run::Run),
    Mount(mount::Mount),
    Import(carry::Import),
    Export(carry::Export),
    Status(status::Status),
    Promote(promote::Promote),
    Verify(verify::Verify),
    Repair(repair::Repair),
    Replace(replace::Replace),
    Clean(clean::Clean),
    Heap(heap::HeapCommand),
    Config(config::Check),
    Bench(bench::Bench),
    Completions(docs::Completions),
    Man(docs::Man),
    #[command(name = "__append", hide = true)]
    Append(append::Append),
    #[command(name = "__carry", hide = true)]
    Carry(carry::Carry),
    #[command(name = "__touch", hide = true)]
    Touch(tiers::Touch),
    #[command(name = "__latency", hide = true)]
    Latency(latency::Latency),
    #[command(name = "__replica", hide = true)]
    Replica(rivals::Replica),
}

fn main() -> ExitCode {
    if mojim_bench::peers::maybe_run_peer() {
        return ExitCode::SUCCESS;
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let done = match std::path::Path::new(&name).file_name() {
        Some(name) if name == mount_helper::NAME => mount_helper::run(args),
        _ => run(Cli::parse()),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(f) => {
            f.report();
            ExitCode::from(f.code)
        }
    }
}

fn run(cli: Cli) -> Done {
    let Some(word) = cli.word else {
        let help = Cli::command().render_help();
        write!(std::io::stdout(), "{help}")?;
        return Ok(0);
    };
    match word {
        Word::Demo(w) => w.run(),
        Word::Keys(w) => w.run(),
        Word::Node(w) => w.run(),
        Word::Run(w) => w.run(),
        Word::Mount(w) => w.run(),
        Word::Import(w) => w.run(),
        Word::Export(w) => w.run(),
        Word::Status(w) => w.run(),
        Word::Promote(w) => w.run(),
        Word::Verify(w) => w.run(),
        Word::Repair(w) => w.run(),
        Word::Replace(w) => w.run(),
        Word::Clean(w) => w.run(),
        Word::Heap(w) => w.run(),
        Word::Config(w) => w.run(),
        Word::Bench(w) => w.run(),
        Word::Completions(w) => w.run(Cli::command()),
        Word::Man(w) => w.run(Cli::command()),
        Word::Append(w) => w.run(),
        Word::Carry(w) => w.run(),
        Word::Touch(w) => w.run(),
        Word::Latency(w) => w.run(),
        Word::Replica(w) => w.run(),
    }
}
