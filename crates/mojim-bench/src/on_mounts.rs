//! `mojim bench programs`: files and programs on a mounted volume, beside the plain file system.
//!
//! Owns the way there. The measurement itself is in Python (`tests/programs/bench.py`), since it
//! is made of other people's programs. This binary carries the script along, so that it runs
//! wherever they are.
//!
//! Invariant: its directory is removed, and the script ends its clusters, also when a signal asks
//! this process to end.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::emulated::MOST_MICROS;
use crate::orphan::ends_with_us;
use crate::scratch::Scratch;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use mojim_cli::beside::mojim;
use mojim_cli::failure::{Done, Failure};
use mojim_cli::signals;

/// What the script consists of, by its place in a directory.
const FILES: [(&str, &str); 6] = [
    ("bench.py", include_str!("../../../tests/programs/bench.py")),
    (
        "cluster.py",
        include_str!("../../../tests/programs/cluster.py"),
    ),
    ("kinds.py", include_str!("../../../tests/programs/kinds.py")),
    (
        "servers.py",
        include_str!("../../../tests/programs/servers.py"),
    ),
    (
        "src/ops.c",
        include_str!("../../../tests/programs/src/ops.c"),
    ),
    (
        "src/sets.c",
        include_str!("../../../tests/programs/src/sets.c"),
    ),
];
/// The distribution's, which has the modules of its packages; else the first one there is.
const PYTHONS: [&str; 2] = ["/usr/bin/python3", "python3"];

/// Measure files and programs on a mounted volume, beside the plain file system.
///
/// In each round, these places take turns:
///
/// - a plain directory
///
/// - mounts of volumes in mode `sync` on two nodes of this machine, with the mirror's log on disk
///   or in memory
///
/// - the latter over io_uring, where that is switched on
///
/// - the program's own replication, where it has one
///
/// - the program without any sync, which is the limit
///
/// Needs the same as `mojim mount`, python3 and cc, and root for PostgreSQL. Programs that are
/// not installed are left out. `scripts/bench-programs` installs them.
#[derive(clap::Args)]
pub struct Programs {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only cases whose names contain this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Rounds of each case.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds of each case, place and round.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Add a place: the mirror's log on an emulated disk. The disk is in memory, and each durable
    /// write takes this many microseconds. One machine then shows figures for two. The mount uses
    /// io_uring where that is switched on.
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=MOST_MICROS))]
    mirror_disk: Option<u64>,
    /// Print one JSON object a line instead of tables.
    #[arg(long)]
    json: bool,
}

impl Programs {
    /// Runs it; its exit code is the script's.
    pub fn run(self) -> Done {
        // Not a number is refused, too.
        if !(0.01..=3600.0).contains(&self.seconds) {
            return Err(Failure::usage("--seconds: 0.01 to 3600"));
        }
        signals::block()?;
        let scratch = Scratch::new()?;
        let ops = lay_out(scratch.path())?;
        let mut failed = None;
        for python in PYTHONS {
            match self.command(python, scratch.path(), &ops)?.spawn() {
                Ok(child) => return finish(child),
                Err(e) => failed = Some(format!("starting {python}: {e}")),
            }
        }
        Err(Failure::failed(failed.unwrap_or_default()))
    }

    fn command(&self, python: &str, at: &Path, ops: &Path) -> Result<Command, Failure> {
        let mut c = Command::new(python);
        c.arg("-B").arg(at.join("bench.py"));
        c.arg("--mojim").arg(mojim()?);
        c.arg("--ops").arg(ops);
        c.args([
            format!("--rounds={}", self.rounds),
            format!("--seconds={}", self.seconds),
        ]);
        if let Some(dir) = &self.dir {
            c.arg("--dir").arg(dir);
        }
        if let Some(only) = &self.only {
            c.arg(format!("--only={only}"));
        }
        if let Some(takes) = self.mirror_disk {
            c.arg("--bench").arg(std::env::current_exe()?);
            c.arg(format!("--mirror-disk={takes}"));
        }
        if self.json {
            c.arg("--json");
        }
        // A terminal's signals come here alone, and are passed on once.
        c.process_group(0);
        // SAFETY: makes two system calls.
        unsafe { c.pre_exec(signals::unblock_interrupt) };
        // It cleans up also where nobody can pass on a signal any more.
        ends_with_us(&mut c, libc::SIGINT);
        Ok(c)
    }
}

/// Writes the script, and compiles its operations; returns where these are.
fn lay_out(at: &Path) -> Result<PathBuf, Failure> {
    std::fs::create_dir(at.join("src"))?;
    for (name, text) in FILES {
        std::fs::write(at.join(name), text)?;
    }
    let ops = at.join("ops");
    let cc = Command::new("cc")
        .arg("-O2")
        .arg("-o")
        .arg(&ops)
        .arg(at.join("src/ops.c"))
        .status();
    match cc {
        Ok(status) if status.success() => Ok(ops),
        Ok(_) => Err(Failure::failed("the C compiler `cc` failed")),
        Err(e) => Err(Failure::failed(format!(
            "starting the C compiler `cc`: {e}"
        ))),
    }
}

/// Waits for the script's end, and has it end when this process is asked to.
fn finish(mut child: Child) -> Done {
    let pid = Pid::from_child(&child);
    std::thread::spawn(move || {
        // It stays to be reaped below, so that its number is nobody else's until then.
        let _ = waitid(
            WaitId::Pid(pid),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        );
        signals::send(signals::RELOAD);
    });
    while signals::wait()? != signals::RELOAD {
        // It cleans up on this one. It may have ended just now.
        let _ = kill_process(pid, Signal::INT);
    }
    Ok(child.wait()?.code().map_or(1, |code| code as u8))
}
