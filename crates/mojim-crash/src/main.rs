//! The command `mojim-crash`: the workload and the check for anyone who crashes a
//! machine, and the rungs that crash machines here.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use mojim_crash::acks::Acks;
use mojim_crash::cluster::parts::{self, Made};
use mojim_crash::cluster::program::Slip;
use mojim_crash::cluster::setup::Mode;
use mojim_crash::cluster::{Failures, mounted};
use mojim_crash::machine::Fault;
use mojim_crash::report::{Extent, Report};
use mojim_crash::subject::{Kind, SubjectPaths};
use mojim_crash::sys::UringAsItWas;
use mojim_crash::workload::Model;
use mojim_crash::{Result, blocks, cache_loss, check, cluster, plug, work};

/// Crashes, and compares what is recovered.
#[derive(Parser)]
#[command(name = "mojim-crash")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Work(Work),
    Check(Check),
    CacheLoss(CacheLoss),
    Blocks(Blocks),
    Plug(Plug),
    Pressure(Pressure),
    Cluster(Cluster),
    Node(Node),
    Program(Program),
}

/// Replays what the disks of two nodes were asked, as they may be after losses of
/// power, and looks at what the cluster serves then.
#[derive(Args)]
struct Cluster {
    /// States of mojim, and of its mounts.
    #[arg(long, default_value_t = 400)]
    states: u64,
    /// Which mode; all of them without.
    #[arg(long, value_parser = parts::mode)]
    mode: Option<Mode>,
    /// Only with a register of views, or only without (true, false).
    #[arg(long)]
    register: Option<bool>,
    /// What happens to the nodes; anything without.
    #[arg(long, value_parser = Failures::of)]
    failures: Vec<Failures>,
    /// Which subject: mojim, mount, mount-uring (over io_uring), or a broken one; all of them without.
    #[arg(long)]
    subject: Vec<String>,
    /// Most minutes of each.
    #[arg(long, default_value_t = 600)]
    minutes: u64,
    /// Most states of one that must be found out.
    #[arg(long, default_value_t = 4000)]
    tries: u64,
    /// How often one must be found out.
    #[arg(long, default_value_t = 3)]
    enough: u64,
    /// States of each history.
    #[arg(long, default_value_t = 100)]
    of_each: u64,
    /// Steps of each thread in a history.
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Histories at one time.
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Tells of each failure when it is found.
    #[arg(long)]
    loud: bool,
    /// Prints data.
    #[arg(long)]
    json: bool,
}

/// A node's daemon, until it is killed (`cluster` runs it).
#[derive(Args)]
struct Node {
    /// The configuration file.
    #[arg(long)]
    config: PathBuf,
    /// Which node.
    #[arg(long)]
    name: String,
    /// What is broken in its machine.
    #[arg(long, value_parser = Fault::of)]
    fault: Option<Fault>,
}

/// The program of a cluster, until it is killed (`cluster` runs it).
#[derive(Args)]
struct Program {
    #[command(flatten)]
    at: Node,
    /// Where it notes what it does.
    #[arg(long)]
    journal: PathBuf,
    /// What its steps follow from.
    #[arg(long)]
    seed: u64,
    /// How many threads make steps.
    #[arg(long)]
    threads: usize,
    /// How many each.
    #[arg(long)]
    steps: u64,
    /// A mounted volume in which it works, instead of attaching it.
    #[arg(long)]
    mount: Option<PathBuf>,
    /// A mistake that it makes there.
    #[arg(long, value_parser = Slip::of)]
    slip: Option<Slip>,
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
    fn place(&self) -> SubjectPaths {
        SubjectPaths {
            dir: self.dir.clone(),
            ring: self.ring.clone(),
            medium: self.medium.clone(),
            forced: None,
        }
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

/// Shuts the file system under the workload down, again and again.
#[derive(Args)]
struct CacheLoss {
    #[command(flatten)]
    rung: Rung,
    /// Crashes of each subject that must stand.
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// ext4 or xfs.
    #[arg(long, default_value = "ext4")]
    file_system: String,
}

/// Replays what the workload's device was asked, as a disk may after a loss of
/// power.
#[derive(Args)]
struct Blocks {
    #[command(flatten)]
    rung: Rung,
    /// States of each subject that must stand.
    #[arg(long, default_value_t = 500)]
    states: u64,
    /// States of each history.
    #[arg(long, default_value_t = 200)]
    of_each: u64,
    /// Steps in each history.
    #[arg(long, default_value_t = 60)]
    steps: u64,
    /// Histories that are looked at at one time.
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Where images of states are kept that should have stood.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// Pulls the plug of a machine in QEMU, again and again.
#[derive(Args)]
struct Plug {
    #[command(flatten)]
    rung: Rung,
    /// States of each subject that must stand, on each medium.
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// disk, or nvdimm (with DAX); both without.
    #[arg(long, value_parser = plug::Medium::of)]
    medium: Option<plug::Medium>,
    /// Machines at one time.
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// An unpacked package of a kernel with its modules; scripts/plug fetches one.
    #[arg(long, default_value = plug::KERNEL)]
    kernel: PathBuf,
}

/// Runs a program in a machine in QEMU that has less memory than the program stores, and pulls
/// its plug.
#[derive(Args)]
struct Pressure {
    #[command(flatten)]
    rung: Rung,
    /// States of mojim.
    #[arg(long, default_value_t = 40)]
    rounds: u64,
    /// An unpacked package of a kernel with its modules; scripts/guest-kernel 6.12 fetches one.
    #[arg(long, default_value = plug::pressure::KERNEL)]
    kernel: PathBuf,
}

#[derive(Args)]
struct Rung {
    /// Which subject; all of them without.
    #[arg(long, value_parser = kind)]
    subject: Option<Kind>,
    /// Most crashes or states of one that must be found out.
    #[arg(long, default_value_t = 2000)]
    tries: u64,
    /// How often one must be found out.
    #[arg(long, default_value_t = 3)]
    enough: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Prints data.
    #[arg(long)]
    json: bool,
}

impl Rung {
    fn extent(&self, states: u64) -> Extent {
        Extent {
            kinds: match self.subject {
                Some(kind) => vec![kind],
                None => Kind::ALL.iter().map(|(kind, _)| *kind).collect(),
            },
            states,
            tries: self.tries,
            enough: self.enough,
            seed: self.seed,
        }
    }

    fn tell(&self, report: &Report) -> Result<()> {
        if self.json {
            println!("{}", report.json());
        } else {
            print!("{report}");
        }
        match report.is_right() {
            true => Ok(()),
            false => Err("not every subject is as it must be".into()),
        }
    }
}

fn kind(name: &str) -> std::result::Result<Kind, String> {
    Kind::of(name).ok_or_else(|| {
        let all: Vec<_> = Kind::ALL.iter().map(|(_, n)| *n).collect();
        format!("one of {}", all.join(", "))
    })
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Cluster(c) => cluster(c),
        Command::Node(n) => parts::run_node(&n.config, &n.name, made(n)),
        Command::Program(p) => program(p),
        Command::Plug(p) => {
            let media = match &p.medium {
                Some(m) => std::slice::from_ref(m),
                None => &plug::Medium::ALL,
            };
            let reports = plug::run(&plug::Options {
                exe: &std::env::current_exe()?,
                extent: p.rung.extent(p.rounds),
                media,
                jobs: p.jobs,
                kernel: &p.kernel,
            })?;
            let told: Vec<_> = reports.iter().map(|r| p.rung.tell(r)).collect();
            told.into_iter().collect()
        }
        Command::Pressure(p) => p.rung.tell(&plug::pressure::run(&plug::pressure::Options {
            exe: &std::env::current_exe()?,
            extent: p.rung.extent(p.rounds),
            kernel: &p.kernel,
        })?),
        Command::Work(w) => {
            let acks = Acks::open(&w.acks)?;
            work(w.at.subject, &w.at.place(), w.at.seed, w.steps, &acks)
        }
        Command::Check(c) => {
            let mut model = Model::new(c.at.seed);
            let started = c.started.unwrap_or(c.acknowledged + 1);
            let place = c.at.place();
            let step = check(c.at.subject, &place, &mut model, c.acknowledged, started)?;
            println!("step {step}");
            Ok(())
        }
        Command::CacheLoss(c) => c.rung.tell(&cache_loss::run(&cache_loss::Options {
            exe: &std::env::current_exe()?,
            extent: c.rung.extent(c.rounds),
            file_system: c.file_system.clone(),
        })?),
        Command::Blocks(b) => b.rung.tell(&blocks::run(&blocks::Options {
            extent: b.rung.extent(b.states),
            of_each: b.of_each,
            steps: b.steps,
            jobs: b.jobs,
            keep: b.keep.clone(),
        })?),
    }
}

fn program(p: &Program) -> Result<()> {
    let work = parts::Work {
        config: p.at.config.clone(),
        journal: p.journal.clone(),
        name: p.at.name.clone(),
        made: made(&p.at),
        seed: p.seed,
        threads: p.threads,
        steps: p.steps,
    };
    match &p.mount {
        Some(at) => mounted::run(&work, at, p.slip),
        None => parts::run_program(&work),
    }
}

fn made(n: &Node) -> Made {
    Made {
        boot: 0,
        fault: n.fault,
    }
}

fn cluster(c: &Cluster) -> Result<()> {
    let _uring = UringAsItWas::note();
    let report = cluster::run(&cluster::Options {
        exe: std::env::current_exe()?,
        subjects: c.subject.clone(),
        modes: c.mode.map_or(Mode::ALL.to_vec(), |m| vec![m]),
        registers: c.register.map_or(vec![false, true], |r| vec![r]),
        failures: match c.failures.is_empty() {
            true => Failures::ALL.map(|(f, _)| f).to_vec(),
            false => c.failures.clone(),
        },
        states: c.states,
        tries: c.tries,
        enough: c.enough,
        limit: Duration::from_secs(c.minutes * 60),
        of_each: c.of_each,
        steps: c.steps,
        jobs: c.jobs,
        seed: c.seed,
        loud: c.loud,
    })?;
    match c.json {
        true => println!("{}", report.json()),
        false => print!("{report}"),
    }
    match report.is_right() {
        true => Ok(()),
        false => Err("not every subject is as it must be".into()),
    }
}

fn main() -> ExitCode {
    plug::be_guest();
    match run(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("mojim-crash: {e}");
            ExitCode::FAILURE
        }
    }
}
