//! The command `mojim-crash`: the workload and the check for whoever crashes a
//! machine, and two rungs that do it here.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use mojim_crash::acks::Acks;
use mojim_crash::subject::{Kind, Place};
use mojim_crash::workload::Model;
use mojim_crash::{Result, check, plug, work};

/// Crashes, and compares what is recovered.
#[derive(Parser)]
#[command(name = "mojim-crash")]
struct Cli {
    #[command(subcommand)]
    word: Word,
}

#[derive(Subcommand)]
enum Word {
    Work(Work),
    Check(Check),
    Plug(plug::Plug),
}

#[derive(Args)]
struct Where {
    /// mojim, log, naive, nosync, or a broken mojim.
    #[arg(long, value_parser = kind)]
    subject: Kind,
    /// Where its files are.
    #[arg(long)]
    dir: PathBuf,
    /// What all follows from.
    #[arg(long)]
    seed: u64,
    /// A directory in memory; for `check` one that no `work` has used.
    #[arg(long, default_value = "/dev/shm")]
    ring: PathBuf,
    /// What mojim's log is kept in: disk or pmem.
    #[arg(long, default_value = "disk")]
    medium: String,
}

impl Where {
    fn place(&self) -> Result<Place> {
        std::fs::create_dir_all(&self.dir)?;
        Ok(Place {
            dir: self.dir.clone(),
            ring: self.ring.clone(),
            medium: self.medium.clone(),
        })
    }
}

/// Makes steps and acknowledges each: `ack N`, 0 when all is set up.
#[derive(Args)]
struct Work {
    #[command(flatten)]
    at: Where,
    /// How many.
    #[arg(long, default_value_t = u64::MAX)]
    steps: u64,
    /// stdout, or PATH@OFFSET for a sector of a device or file.
    #[arg(long, default_value = "stdout")]
    acks: String,
}

/// Recovers and compares: prints the step that was found; fails if it is none
/// of those that may be.
#[derive(Args)]
struct Check {
    #[command(flatten)]
    at: Where,
    /// The last step that was acknowledged.
    #[arg(long)]
    acknowledged: u64,
    /// The last step that may have begun: by default the one after.
    #[arg(long)]
    started: Option<u64>,
}

fn kind(name: &str) -> std::result::Result<Kind, String> {
    Kind::of(name).ok_or_else(|| {
        let all: Vec<_> = Kind::ALL.iter().map(|(_, n)| *n).collect();
        format!("one of {}", all.join(", "))
    })
}

fn run(word: &Word) -> Result<()> {
    match word {
        Word::Plug(p) if plug::run(p)? => Ok(()),
        Word::Plug(_) => Err("not as it must be".into()),
        Word::Work(w) => {
            let acks = Acks::open(&w.acks)?;
            work(w.at.subject, &w.at.place()?, w.at.seed, w.steps, &acks)
        }
        Word::Check(c) => {
            let mut model = Model::new(c.at.seed);
            let started = c.started.unwrap_or(c.acknowledged + 1);
            let place = c.at.place()?;
            let step = check(c.at.subject, &place, &mut model, c.acknowledged, started)?;
            println!("step {step}");
            Ok(())
        }
    }
}

fn main() -> ExitCode {
    plug::be_guest();
    match run(&Cli::parse().word) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("mojim-crash: {e}");
            ExitCode::FAILURE
        }
    }
}
