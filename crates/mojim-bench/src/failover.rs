//! `mojim bench failover`: how long a volume is without a primary.
//!
//! Three real nodes run on loopback: two with data, and a witness. One program appends on
//! `a`. Another one on `b` waits to be allowed, as under `mojim run`. Then `a`'s daemon and
//! program are killed. Each round gives three figures:
//!
//! - the whole time from the kill to the first sync point acknowledged on `b`,
//! - the detection, as `b`'s daemon counts it,
//! - the rest.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim_config::Config;
use serde_json::{Value, json};

use crate::processes::{Directory, Process, clean_up_on_signals, free_ports};
use mojim_cli::failure::{Done, Failure};
use mojim_cli::supervise::Post;

/// Measure the time from the SIGKILL of the primary's node to the first sync point of the new
/// primary.
#[derive(clap::Args)]
pub struct FailoverBench {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Bytes of the volume beside the program's own.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    size: u64,
    /// Milliseconds of silence after which a node counts as failed.
    #[arg(long, value_name = "MS", default_value_t = 500)]
    failure_limit: u64,
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Print one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

struct Round {
    total: f64,
    detection: f64,
}

impl FailoverBench {
    /// Runs it.
    pub fn run(self) -> Done {
        if self.rounds == 0 {
            return Err(Failure::usage("--rounds: at least 1"));
        }
        clean_up_on_signals()?;
        let mut all = Vec::new();
        for i in 0..self.rounds {
            all.push(self.round(i)?);
        }
        let mut out = std::io::stdout().lock();
        let ms = |f: &dyn Fn(&Round) -> f64| {
            let mut v: Vec<f64> = all.iter().map(f).collect();
            v.sort_by(f64::total_cmp);
            (v[v.len() / 2], v[v.len() - 1])
        };
        for (case, (median, worst)) in [
            ("total", ms(&|r| r.total)),
            ("detection", ms(&|r| r.detection)),
            ("rest", ms(&|r| r.total - r.detection)),
        ] {
            if self.json {
                writeln!(out, "{}", row(case, self.size, (median, worst)))?;
            } else {
                writeln!(
                    out,
                    "{case:>10}: median {median:.1} ms, worst of {} rounds {worst:.1} ms",
                    all.len()
                )?;
            }
        }
        Ok(0)
    }

    fn round(&self, number: usize) -> Result<Round, Failure> {
        let id = format!("mojim-failover-{}-{number}", std::process::id());
        let memory = Directory::make(Path::new("/dev/shm"), &id)?;
        let parent = self.dir.clone().unwrap_or_else(std::env::temp_dir);
        let made = Directory::make(&parent, &id)?;
        let dir = std::fs::canonicalize(made.path())?;
        let file = dir.join("mojim.toml");
        std::fs::write(&file, self.configuration(&dir, memory.path())?)?;
        let cluster = Cluster {
            config: Config::load(&file)?,
            file: file.to_string_lossy().into_owned(),
            dir,
        };
        let mut a = cluster.node("a")?;
        let mut b = cluster.node("b")?;
        let _w = cluster.node("w")?;
        let mut on_a = cluster.program("a", &self.size.to_string())?;
        on_a.ready()?;
        for _ in 0..200 {
            on_a.line()?;
        }
        // As `mojim run` waits.
        let post = Post::new(&cluster.config, cluster.config.node("b")?, "v")?;
        let killed = Instant::now();
        a.strike()?;
        on_a.strike()?;
        while !post.is_ready_within(Duration::from_millis(500)) {
            if killed.elapsed() > Duration::from_secs(60) {
                return Err(b.failure("did not take over"));
            }
        }
        let mut on_b = cluster.program("b", "0")?;
        on_b.ready()?;
        on_b.line()?;
        let total = killed.elapsed().as_secs_f64() * 1000.0;
        let detection = cluster.detection("b")?;
        Ok(Round { total, detection })
    }

    /// Two nodes with data and a witness.
    fn configuration(&self, dir: &Path, memory: &Path) -> Result<String, Failure> {
        let ports = free_ports(3)?;
        let mut text = format!(
            "cluster = \"bench\"\nheartbeat = \"20ms\"\nfailure_limit = \"{}ms\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\n",
            self.failure_limit
        );
        for (name, port) in ["a", "b"].iter().zip(&ports) {
            text += &format!(
                "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = '{}'\nring = '{}'\n",
                dir.join(name).display(),
                memory.display()
            );
        }
        text += &format!(
            "[node.w]\naddress = \"127.0.0.1:{}\"\ndirectory = '{}'\nrole = \"witness\"\n",
            ports[2],
            dir.join("w").display()
        );
        Ok(text)
    }
}

/// A part of the time without a primary, in milliseconds: the median and the worst round.
fn row(part: &str, bytes: u64, (median, worst): (f64, f64)) -> Value {
    json!({
        "bench": "failover", "case": "mojim", "part": part, "mode": "sync",
        "transport": "tcp", "bytes": bytes, "threads": 1,
        "median_us": median * 1000.0, "p99_us": worst * 1000.0,
        "per_second": 1000.0 / median,
    })
}

/// The cluster of one round.
struct Cluster {
    config: Config,
    /// The configuration's file.
    file: String,
    dir: PathBuf,
}

impl Cluster {
    /// Where a process leaves what it says on standard error.
    fn errors(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.txt"))
    }

    /// A node's daemon, which is ready.
    fn node(&self, name: &str) -> Result<Process, Failure> {
        Process::node(&self.file, name, &self.errors(name))
    }

    /// The program that appends on node `name`, with `ballast` bytes beside its log.
    fn program(&self, name: &str, ballast: &str) -> Result<Process, Failure> {
        let args = [
            "__append",
            "--config",
            &self.file,
            "--node",
            name,
            "--volume",
            "v",
            "--pace",
            "1000",
            "--ballast",
            ballast,
        ];
        let errors = self.errors("program");
        Process::start(&format!("the program on {name}"), args, &errors)
    }

    /// For how long the daemon of `name` heard nothing before it took over, in milliseconds.
    fn detection(&self, name: &str) -> Result<f64, Failure> {
        let said = std::fs::read_to_string(self.errors(name))?;
        said.lines()
            .find_map(|l| {
                let (_, after) = l.split_once("was silent for ")?;
                after.split(' ').next()?.parse::<f64>().ok()
            })
            .ok_or_else(|| Failure::failed(format!("node {name} did not say why it took over")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_milliseconds() {
        let rows = crate::all::adapters::failover("", &row("total", 1, (700.0, 900.0))).unwrap();
        assert_eq!(
            (rows[0].y, rows[0].high, &*rows[0].unit),
            (700.0, Some(900.0), "ms")
        );
    }
}
