//! The `mojim` command: one module for each subcommand. This file owns the command line and the
//! exit code. It is a library for the sake of `mojim-bench`, which asks nodes, waits and compares
//! copies as the command does (the modules that are public).
//!
//! # Tour
//!
//! `mojim run` (`run.rs`) starts a program once or, with automatic failover, on every node, where
//! the primary is, and ends it elsewhere (`supervise.rs`). `runs_mount.rs` starts the mount that
//! all programs share, `mount_lifetime.rs` is its process, `namespace.rs` puts it over the volume's
//! directory for the program alone. For a program that is linked with `libmojim` (`linked.rs`)
//! nothing is mounted. A mount cannot keep what the kernel writes back of a mapping out of others'
//! commits, so `gmsync` over it would not be atomic.
//!
//! `status.rs` asks and prints. `health.rs` judges and asks nobody. The copy of a running program
//! is closed to the daemon: `status_of_closed` of `mojim-node` reads the `Live` words in its ring
//! or its log in memory. Questions to nodes are `request.rs` of `mojim-replica`, answers
//! `requests.rs` of `mojim-node`. `ask.rs` asks them, and `heard.rs` says how far an answer is
//! believed. `unasked.rs` says why a node could not be asked. `compare.rs` compares copies, for
//! `verify.rs` and `repair.rs`. `beside.rs` starts `mojim-bench`.
//!
//! `node.rs` gives the daemon its register of views, for a cluster with three voters or more.
//! `log.rs` writes the lines of the daemon's log.
//!
//! `mount.rs` is `mojim mount`, and `mount_helper.rs` the same for mount(8). `guard.rs` watches the
//! process of a mount, `below.rs` covers the directory of one that waits. `run_note.rs` keeps the
//! cause of a mount's end. `interval.rs` reads `--commit-interval`.
//!
//! One subcommand each: `append.rs`, `clean.rs`, `config.rs`, `heap.rs`, `keys.rs`, `promote.rs`,
//! `replace.rs`. `import_export.rs` and `docs.rs` have two. All share `failure.rs` (exit codes),
//! `output.rs` (text and JSON) and `signals.rs`. `typed.rs` puts the configuration file into the
//! commands that messages advise.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub mod append;
pub mod ask;
mod below;
pub mod beside;
mod clean;
pub mod compare;
mod config;
pub mod docs;
pub mod failure;
mod guard;
mod health;
mod heap;
mod heard;
mod import_export;
mod interval;
mod keys;
mod linked;
mod log;
mod mount;
mod mount_helper;
mod mount_lifetime;
mod namespace;
mod node;
mod output;
#[path = "../../mojim-preload/src/program.rs"]
mod program;
mod promote;
mod repair;
mod replace;
mod run;
mod run_note;
mod runs_mount;
pub mod signals;
pub mod status;
pub mod supervise;
mod typed;
mod unasked;
mod verify;

use failure::Done;

const AFTER: &str = "\
Start here: `mojim demo` sets up two nodes in a temporary directory, kills one in the middle of \
its work and shows that nothing was lost.

Exit codes:
  0  done, or the answer is yes
  1  failed, or the answer is no
  2  the command line or the configuration is wrong";

/// Keep a program's memory in files, committed atomically where the program chooses, and copied
/// to a second node.
#[derive(Parser)]
#[command(name = "mojim", version, after_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Show a failover: two nodes, a program killed in the middle of its work, and not a byte
    /// lost.
    Demo(beside::Words),
    Keys(keys::Keys),
    Node(node::Node),
    Run(run::Run),
    Mount(mount::Mount),
    Import(import_export::Import),
    Export(import_export::Export),
    Status(status::Status),
    Promote(promote::Promote),
    Verify(verify::Verify),
    Repair(repair::Repair),
    Replace(replace::Replace),
    Clean(clean::Clean),
    Heap(heap::HeapCommand),
    Config(config::Check),
    /// Measure sync points, heaps, transactions, logs, programs on a mount, and failover.
    Bench(beside::Words),
    Completions(docs::Completions),
    Man(docs::Man),
    #[command(name = "__append", hide = true)]
    Append(append::Append),
    #[command(name = "__carry", hide = true)]
    Carry(import_export::Carry),
}

/// The command line, for what is generated from it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// The command.
pub fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let words: Vec<_> = args.collect();
    let done = match Path::new(&name).file_name() {
        Some(name) if name == mount_helper::NAME => mount_helper::run(words),
        _ => match help_of_bench(&words) {
            Some(words) => beside::run_bench(words),
            None => run(Cli::parse()),
        },
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(f) => {
            f.report();
            ExitCode::from(f.code)
        }
    }
}

/// What `mojim-bench` is asked where the words are `help bench` or `help demo`, and more.
fn help_of_bench(words: &[OsString]) -> Option<Vec<OsString>> {
    let (of, more) = match words {
        [help, of, more @ ..] if help == "help" => (of, more),
        _ => return None,
    };
    let first = match of.to_str()? {
        "bench" => &[][..],
        "demo" => std::slice::from_ref(of),
        _ => return None,
    };
    Some([first, more, &["--help".into()]].concat())
}

fn run(cli: Cli) -> Done {
    let Some(chosen) = cli.command else {
        let help = Cli::command().render_help();
        write!(std::io::stdout(), "{help}")?;
        return Ok(0);
    };
    match chosen {
        Command::Demo(w) => w.run(&["demo"]),
        Command::Keys(w) => w.run(),
        Command::Node(w) => w.run(),
        Command::Run(w) => w.run(),
        Command::Mount(w) => w.run(),
        Command::Import(w) => w.run(),
        Command::Export(w) => w.run(),
        Command::Status(w) => w.run(),
        Command::Promote(w) => w.run(),
        Command::Verify(w) => w.run(),
        Command::Repair(w) => w.run(),
        Command::Replace(w) => w.run(),
        Command::Clean(w) => w.run(),
        Command::Heap(w) => w.run(),
        Command::Config(w) => w.run(),
        Command::Bench(w) => w.run(&[]),
        // With the words of `mojim-bench`, where that is there.
        Command::Completions(w) => beside::become_bench_if_there().and_then(|()| w.run(command())),
        Command::Man(w) => beside::become_bench_if_there().and_then(|()| w.run(command())),
        Command::Append(w) => w.run(),
        Command::Carry(w) => w.run(),
    }
}
