//! Page-cache loss: the file system under a running workload is shut down
//! without a flush of its journal, at a random moment; what is recovered from
//! the device is compared.
//!
//! What was acknowledged before the shutting down began must be there. What
//! was after that need not be: a sync that meets it can return success for what
//! is dropped, as no machine without power can.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mojim_sim::Rng;

use crate::report::{Extent, Report, Row};
use crate::subject::{Kind, Place};
use crate::sys::{Lab, Loop, Mounted, make_file_system};
use crate::workload::Model;
use crate::{Result, acks, check};

/// How the rung runs.
pub struct Options<'a> {
    /// The command `mojim-crash`.
    pub exe: &'a Path,
    /// How much, one state for each crash.
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

/// Ends with its owner.
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
    place: &Place,
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
    /// Reads what there is, or waits for more; false at the end.
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

    /// The last one up to now.
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

/// Lets time pass in which the other process works: the moment of the crash.
fn pass(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::thread::yield_now();
    }
}

/// What was found, and whether the first recovery was crashed too.
fn round(
    o: &Options<'_>,
    lab: &Lab,
    kind: Kind,
    seed: u64,
) -> Result<(std::result::Result<u64, String>, bool)> {
    let mut rng = Rng::new(seed ^ 0xcac4e);
    let (image, at) = (lab.path("image"), lab.path("mnt"));
    let size = if o.file_system == "xfs" {
        320 << 20
    } else {
        40 << 20
    };
    make_file_system(&o.file_system, &image, size)?;
    let device = Loop::new(&image)?;
    let mount = || Mounted::new(&o.file_system, device.path(), &at);
    let place = |life: u32| -> Result<Place> {
        let ring = lab.path(&format!("ring.{life}"));
        let _ = std::fs::remove_dir_all(&ring);
        std::fs::create_dir_all(&ring)?;
        Ok(Place {
            dir: at.join("d"),
            ring,
            medium: "disk".into(),
        })
    };
    let seeds = ["--seed".to_owned(), seed.to_string()];

    let mounted = mount()?;
    let mut working = begin(o, "work", kind, &place(0)?, &seeds)?;
    let mut told = Told {
        pipe: working.0.stdout.take().expect("it is piped"),
        rest: Vec::new(),
        last: None,
    };
    if rng.below(8) == 0 {
        // While all is being set up, most of the time.
        pass(Duration::from_micros(rng.below(40_000)));
    } else {
        let until = rng.between(0, 80);
        while told.last.is_none_or(|a| a < until) {
            if !told.read()? {
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
    let acknowledged = acknowledged.unwrap_or(0);

    let twice = rng.below(3) == 0;
    if twice {
        let mounted = mount()?;
        let mut args = seeds.to_vec();
        // What it finds nobody hears.
        args.extend(["--acknowledged".into(), acknowledged.to_string()]);
        let checking = begin(o, "check", kind, &place(1)?, &args)?;
        pass(Duration::from_micros(rng.below(30_000)));
        mounted.shut_down()?;
        drop(checking);
        mounted.unmount()?;
    }

    let mounted = mount()?;
    let mut model = Model::new(seed);
    let found = check(kind, &place(2)?, &mut model, acknowledged, started);
    mounted.unmount()?;
    Ok((found, twice))
}
