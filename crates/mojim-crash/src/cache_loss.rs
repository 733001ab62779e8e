//! Page-cache loss: a file system is shut down without a flush of its journal.
//!
//! This happens under a running workload, at a random moment. The test compares what is recovered
//! from the device:
//!
//! - Everything that was acknowledged before the shutdown began must be there.
//! - Data that was acknowledged after that need not be there. A sync during the shutdown can return
//!   success for data that is dropped, which no machine that loses power can do.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mojim_sim::Rng;

use crate::report::{Extent, Report, Row};
use crate::subject::{Kind, SubjectPaths};
use crate::sys::{Lab, Loop, Mounted, make_file_system};
use crate::workload::Model;
use crate::{Result, acks, check};

/// How the rung runs.
pub struct Options<'a> {
    /// The command `mojim-crash`.
    pub exe: &'a Path,
    /// How much is run; one crash counts as one state.
    pub extent: Extent,
    /// `ext4` or `xfs`.
    pub file_system: String,
}

/// Runs the rung.
pub fn run(o: &Options<'_>) -> Result<Report> {
    let begun = Instant::now();
    let lab = Lab::new()?;
    let mut rows = Vec::new();
    for &kind in &o.extent.kinds {
        let mut row = Row::new(kind);
        for n in 0..o.extent.of(kind) {
            let seed = o.extent.seed + n;
            if !o.extent.goes_on(&row) {
                break;
            }
            let (found, twice) = round(o, &lab, kind, seed)?;
            row.twice += u64::from(twice);
            row.add(found, || format!("seed {seed}"));
        }
        rows.push(row);
    }
    Ok(Report {
        rung: format!("page-cache loss on {}", o.file_system),
        rows,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// A child process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn begin(
    o: &Options<'_>,
    word: &str,
    kind: Kind,
    place: &SubjectPaths,
    args: &[String],
) -> Result<Running> {
    let mut c = Command::new(o.exe);
    c.args([word, "--subject", kind.name(), "--dir"])
        .arg(&place.dir);
    c.arg("--ring").arg(&place.ring).args(args);
    c.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    Ok(Running(c.spawn()?))
}

/// The acknowledgements that come through a pipe.
struct Told {
    pipe: ChildStdout,
    rest: Vec<u8>,
    last: Option<u64>,
}

impl Told {
    /// Reads what is available, or waits for more; false at the end.
    fn read(&mut self) -> io::Result<bool> {
        let mut some = [0; 4096];
        let n = self.pipe.read(&mut some)?;
        self.rest.extend_from_slice(&some[..n]);
        while let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            self.last = acks::of_line(&String::from_utf8_lossy(&line)).or(self.last);
        }
        Ok(n > 0)
    }

    /// The last acknowledgement up to now.
    fn now(&mut self) -> Result<Option<u64>> {
        let flags = rustix::fs::fcntl_getfl(&self.pipe)?;
        rustix::fs::fcntl_setfl(&self.pipe, flags | rustix::fs::OFlags::NONBLOCK)?;
        loop {
            match self.read() {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e.into()),
            }
        }
        rustix::fs::fcntl_setfl(&self.pipe, flags)?;
        Ok(self.last)
    }
}

/// Busy-waits while the other process works: this sets the moment of the crash.
fn pass(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::thread::yield_now();
    }
}

/// One round: what was found, and whether the first recovery was crashed too.
fn round(
    o: &Options<'_>,
    lab: &Lab,
    kind: Kind,
    seed: u64,
) -> Result<(std::result::Result<u64, String>, bool)> {
    let mut rng = Rng::new(seed ^ 0xcac4e);
    let image = lab.path("image");
    let size = if o.file_system == "xfs" {
        320 << 20
    } else {
        40 << 20
    };
    make_file_system(&o.file_system, &image, size)?;
    let round = Round {
        o,
        lab,
        kind,
        seed,
        device: Loop::new(&image)?,
        at: lab.path("mnt"),
    };
    let (acknowledged, started) = round.crash_workload(&mut rng)?;
    let twice = rng.below(3) == 0;
    if twice {
        round.crash_recovery(acknowledged, &mut rng)?;
    }
    let mounted = round.mount()?;
    let mut model = Model::new(seed);
    let found = check(kind, &round.place(2)?, &mut model, acknowledged, started);
    mounted.unmount()?;
    Ok((found, twice))
}

/// One file system, from its creation to the last recovery.
struct Round<'a> {
    o: &'a Options<'a>,
    lab: &'a Lab,
    kind: Kind,
    seed: u64,
    device: Loop,
    /// Where it is mounted.
    at: PathBuf,
}

impl Round<'_> {
    fn mount(&self) -> io::Result<Mounted> {
        Mounted::new(&self.o.file_system, self.device.path(), &self.at)
    }

    /// Where the subject keeps its files in this life, with a new ring.
    fn place(&self, life: u32) -> Result<SubjectPaths> {
        let ring = self.lab.path(&format!("ring.{life}"));
        let _ = std::fs::remove_dir_all(&ring);
        std::fs::create_dir_all(&ring)?;
        Ok(SubjectPaths {
            dir: self.at.join("d"),
            ring,
            medium: "disk".into(),
            forced: None,
        })
    }

    fn seed_args(&self) -> [String; 2] {
        ["--seed".to_owned(), self.seed.to_string()]
    }

    /// Crashes the workload at a random moment. Returns the last step that was
    /// acknowledged when the crash began, and the last step that may have been started.
    fn crash_workload(&self, rng: &mut Rng) -> Result<(u64, u64)> {
        let mounted = self.mount()?;
        let args = self.seed_args();
        let mut working = begin(self.o, "work", self.kind, &self.place(0)?, &args)?;
        let mut told = Told {
            pipe: working.0.stdout.take().expect("it is piped"),
            rest: Vec::new(),
            last: None,
        };
        if rng.below(8) == 0 {
            // Mostly while everything is being set up.
            pass(Duration::from_micros(rng.below(40_000)));
        } else {
            let until = rng.between(0, 80);
            while told.last.is_none_or(|a| a < until) {
                if !told.read()? {
                    let seed = self.seed;
                    return Err(format!("seed {seed}: the workload ended by itself").into());
                }
            }
            pass(Duration::from_micros(rng.below(4000)));
        }
        let acknowledged = told.now()?;
        mounted.shut_down()?;
        drop(working);
        while told.read()? {}
        mounted.unmount()?;
        let started = told.last.map_or(0, |a| a + 1);
        Ok((acknowledged.unwrap_or(0), started))
    }

    /// Crashes a recovery at a random moment.
    fn crash_recovery(&self, acknowledged: u64, rng: &mut Rng) -> Result<()> {
        let mounted = self.mount()?;
        let mut args = self.seed_args().to_vec();
        // The result of this check is not read.
        args.extend(["--acknowledged".into(), acknowledged.to_string()]);
        let checking = begin(self.o, "check", self.kind, &self.place(1)?, &args)?;
        pass(Duration::from_micros(rng.below(30_000)));
        mounted.shut_down()?;
        drop(checking);
        Ok(mounted.unmount()?)
    }
}
