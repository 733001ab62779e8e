//! `mojim bench tiers`: the cost of bringing a node up to date, and of having a backup.
//!
//! Two real nodes run on loopback, and a program stays attached on `a`. Each round has three parts,
//! one after the other:
//!
//! - A plain copy of the volume's bytes is made. It goes file to file through one TCP connection,
//!   and is made durable.
//! - A node `b` that has nothing is brought up to date.
//! - `b` is away while a hundredth of the pages changes and more is committed than the log holds.
//!   Then it returns.
//!
//! Then, with three nodes or more, it measures the cost of more copies to a sync point (Mojim, Table
//! 1 and 6.2). Several schemes take turns, over TCP on loopback, then over shared memory:
//!
//! - `sync`.
//! - `sync-sec`, whose mirror forwards to the backups.
//! - The rivals, which wait for all replicas.
//!
//! Every node is a process, and every log is in memory. Whether a scheme is quick shows only where
//! each node has a processor of its own. With fewer the figures are reported, not claimed.
//! The figures are printed after every rival's replica was found to hold every byte.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::time::{Duration, Instant};

use mojim::{MapFlags, Volume};
use mojim_config::Config;
use serde_json::{Value, json};

use crate::processes::{Directory, Process, clean_up_on_signals, free_ports};
use mojim_cli::ask::{SHORT, STATUS, ask, load};
use mojim_cli::failure::{Done, Failure};

/// The file whose bytes are counted.
const FILE: &str = "ballast";
const PAGE: usize = 4096;
/// The smallest volume of which a hundredth does not fit the log, in bytes.
const LEAST: usize = 128 << 20;
/// A node that takes longer than this over a copy has stopped.
const LIMIT: Duration = Duration::from_secs(600);

/// Measure how a node is brought up to date, and sync points with more copies.
///
/// The first table has bytes and time for a fresh node and for one that returns, beside a plain
/// copy. The second has a sync point with a mirror, and with backups behind it. It compares with
/// three rival schemes: chain, broadcast and write-all.
#[derive(clap::Args)]
pub struct TiersBench {
    /// A directory on the disk to measure [default: the temporary directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Bytes of the volume.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    size: usize,
    /// Rounds of the copies. 0 leaves them out.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Links that carry a copy [default: that of a volume's `copy_streams`].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    copy_streams: Option<u8>,
    /// Rounds of the sync points.
    #[arg(long, value_name = "N", default_value_t = 60)]
    sync_rounds: usize,
    /// Nodes of the sync points, including the primary.
    #[arg(long, value_name = "N", default_value_t = 3)]
    nodes: usize,
    /// Print one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

/// A copy, by the count of the node that received it.
struct Copied {
    seconds: f64,
    moved: f64,
}

impl TiersBench {
    /// Runs it.
    pub fn run(self) -> Done {
        if self.sync_rounds == 0 || !(3..=9).contains(&self.nodes) || self.size < 100 * PAGE {
            return Err(Failure::usage(
                "--sync-rounds: at least 1; --nodes: 3 to 9; --size: at least 100 pages",
            ));
        }
        // What changes while a node is away must not fit the log, or the node needs no
        // copy.
        if self.rounds > 0 && self.size < LEAST {
            return Err(Failure::usage(format!(
                "--size: at least {LEAST} where copies are measured (--rounds)"
            )));
        }
        clean_up_on_signals()?;
        let id = format!("mojim-tiers-{}", std::process::id());
        let memory = Directory::make(Path::new("/dev/shm"), &id)?;
        let parent = self.dir.clone().unwrap_or_else(std::env::temp_dir);
        let made = Directory::make(&parent, &id)?;
        let dir = std::fs::canonicalize(made.path())?;
        if self.rounds > 0 {
            self.copies(&dir, memory.path())?;
        }
        for transport in ["tcp", "shm"] {
            let (dir, memory) = (dir.join(transport), memory.path().join(transport));
            std::fs::create_dir(&dir)?;
            std::fs::create_dir(&memory)?;
            self.sync_points(transport, &dir, &memory)?;
        }
        Ok(0)
    }

    /// What it costs to bring a node up to date.
    fn copies(&self, dir: &Path, memory: &Path) -> Result<(), Failure> {
        let file = dir.join("mojim.toml");
        std::fs::write(&file, self.pair_configuration(dir, memory)?)?;
        let mut pair = Pair::start(&file, dir, memory, self.size)?;
        let (mut plain, mut fresh, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            plain.push(plain_copy(&dir.join("a/v").join(FILE), &dir.join("plain"))?);
            fresh.push(pair.fresh_mirror()?);
            back.push(pair.returning_mirror(self.size / PAGE / 100)?);
        }
        pair.finish()?;
        self.print_copies(&CopyFigures {
            plain: median(plain),
            resync: median(fresh.iter().map(|c| c.seconds).collect()),
            full: median(fresh.iter().map(|c| c.moved).collect()),
            moved: median(back.iter().map(|c| c.moved).collect()),
            rejoin: median(back.iter().map(|c| c.seconds).collect()),
        })
    }

    /// A primary and its mirror, with logs that hold less than a round commits.
    fn pair_configuration(&self, dir: &Path, memory: &Path) -> Result<String, Failure> {
        let ports = free_ports(2)?;
        let mut text = String::from(
            "cluster = \"bench\"\n[volume.v]\nmode = \"async\"\nprimary = \"a\"\nmirror = \"b\"\n",
        );
        if let Some(n) = self.copy_streams {
            text += &format!("copy_streams = {n}\n");
        }
        for (name, port) in ["a", "b"].iter().zip(&ports) {
            text += &format!(
                "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = '{}'\nring = '{}'\nlog = {{ medium = \"disk\", size = \"1MiB\" }}\n",
                dir.join(name).display(),
                memory.join(name).display()
            );
            std::fs::create_dir_all(memory.join(name))?;
        }
        Ok(text)
    }

    fn print_copies(&self, f: &CopyFigures) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        for mut row in f.rows(self.size as f64) {
            if self.json {
                row["bench"] = json!("tiers");
                row["bytes"] = json!(self.size);
                row["rounds"] = json!(self.rounds);
                writeln!(out, "{row}")?;
                continue;
            }
            let n = |k: &str| row[k].as_f64().unwrap_or(0.0);
            let case = row["case"].as_str().unwrap_or("");
            match case {
                "rejoin" => writeln!(
                    out,
                    "{case:>10}: {:.2} % of a full copy's bytes after 1 % of the pages changed, {:.2} s",
                    n("of_full_copy") * 100.0,
                    n("seconds")
                )?,
                _ => writeln!(
                    out,
                    "{case:>10}: {:.2} GiB/s, {:.2} s",
                    n("gib_per_second"),
                    n("seconds")
                )?,
            }
        }
        if !self.json {
            writeln!(
                out,
                "a fresh node gets {:.2} of the plain copy's rate",
                f.plain / f.resync
            )?;
        }
        Ok(())
    }

    /// What more copies cost a sync point, by one scheme or another.
    fn sync_points(&self, transport: &str, dir: &Path, memory: &Path) -> Result<(), Failure> {
        let cores = std::thread::available_parallelism()?.get();
        // A node that waits for another's processor measures the scheduler.
        let claimed = cores >= self.nodes;
        let rows = sync_rows(transport, dir, memory, self.nodes, self.sync_rounds)?;
        let mut out = std::io::stdout().lock();
        for mut row in rows {
            if self.json {
                row["bench"] = json!("tiers");
                row["transport"] = json!(transport);
                row["nodes"] = json!(self.nodes);
                row["cores"] = json!(cores);
                row["claimed"] = json!(claimed);
                writeln!(out, "{row}")?;
                continue;
            }
            let case = row["case"].as_str().unwrap_or("");
            if let Some(n) = row["records"].as_u64() {
                writeln!(out, "{case:>11}: {n} records, whole on every replica")?;
                continue;
            }
            let n = |k: &str| row[k].as_f64().unwrap_or(f64::NAN);
            let ratio = row["ratio_to"]
                .as_str()
                .map_or(String::new(), |to| format!(", {:.2} of {to}", n("ratio")));
            writeln!(
                out,
                "{case:>11}: {:>4} B, {:.1} us{ratio}",
                row["bytes"],
                n("median_us")
            )?;
        }
        if !self.json {
            let note = match claimed {
                true => "",
                false => ": the figures are reported, not claimed",
            };
            writeln!(
                out,
                "{transport}, {} nodes on {cores} processors{note}",
                self.nodes
            )?;
        }
        Ok(())
    }
}

/// Medians over the rounds of the copies.
struct CopyFigures {
    /// Seconds of a plain copy, of a fresh node's copy, and of a returning node's.
    plain: f64,
    resync: f64,
    rejoin: f64,
    /// Bytes that moved to a fresh node, and to a returning one.
    full: f64,
    moved: f64,
}

impl CopyFigures {
    /// A row for each case, of a volume of `bytes` bytes.
    fn rows(&self, bytes: f64) -> [Value; 3] {
        let &CopyFigures {
            plain,
            resync,
            rejoin,
            full,
            moved,
        } = self;
        let gib = |s: f64| bytes / s / (1u64 << 30) as f64;
        [
            json!({ "case": "plain-copy", "seconds": plain, "gib_per_second": gib(plain) }),
            json!({
                "case": "resync", "seconds": resync, "gib_per_second": gib(resync),
                "of_plain_copy": plain / resync, "sent": full,
            }),
            json!({
                "case": "rejoin", "seconds": rejoin, "changed": 0.01, "sent": moved,
                "of_full_copy": moved / full,
            }),
        ]
    }
}

/// A primary with a program on it, and a mirror that comes and goes.
struct Pair<'a> {
    config: Config,
    /// The configuration's file.
    path: String,
    dir: &'a Path,
    memory: &'a Path,
    /// The program's standard input, and the program. Fields drop in this order:
    /// the program ends before its node does.
    orders: ChildStdin,
    program: Process,
    _a: Process,
}

impl<'a> Pair<'a> {
    /// Starts node a, and on it the program with `size` bytes.
    fn start(
        file: &Path,
        dir: &'a Path,
        memory: &'a Path,
        size: usize,
    ) -> Result<Pair<'a>, Failure> {
        let config = Config::load(file)?;
        let path = file.to_string_lossy().into_owned();
        let a = Process::node(&path, "a", &dir.join("a.txt"))?;
        // A volume starts with its mirror, which then leaves.
        let mut b = Process::node(&path, "b", &dir.join("b.txt"))?;
        let size = size.to_string();
        let args = ["__touch", "--config", &path, "--node", "a", "--size", &size];
        let mut program = Process::start_own("the program", args, &dir.join("program.txt"))?;
        program.ready()?;
        b.kill();
        let orders = program
            .stdin()
            .ok_or_else(|| Failure::failed("the program takes no orders"))?;
        Ok(Pair {
            config,
            path,
            dir,
            memory,
            orders,
            program,
            _a: a,
        })
    }

    /// What it takes to bring up to date a node b that has nothing.
    fn fresh_mirror(&self) -> Result<Copied, Failure> {
        for d in [self.dir.join("b"), self.memory.join("b")] {
            match std::fs::remove_dir_all(&d) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
                _ => std::fs::create_dir_all(&d)?,
            }
        }
        self.mirror()
    }

    /// What it takes for a node b that was away while `pages` pages changed.
    fn returning_mirror(&mut self, pages: usize) -> Result<Copied, Failure> {
        writeln!(self.orders, "{pages}")?;
        if self.program.line()?.as_deref() != Some("touched") {
            return Err(self.program.failure("did not touch the pages"));
        }
        self.mirror()
    }

    /// Starts node b, lets it receive a copy, and ends it.
    fn mirror(&self) -> Result<Copied, Failure> {
        let mut b = Process::node(&self.path, "b", &self.dir.join("b.txt"))?;
        let copied = copied(&self.config)?;
        b.kill();
        Ok(copied)
    }

    /// Ends the program.
    fn finish(self) -> Result<(), Failure> {
        let Pair {
            orders,
            mut program,
            ..
        } = self;
        drop(orders);
        if !program.finish(Duration::from_secs(60)) {
            return Err(program.failure("failed"));
        }
        Ok(())
    }
}

/// Sync points of a volume without and of one with backups, and by the rivals,
/// in turns.
fn sync_rows(
    transport: &str,
    dir: &Path,
    memory: &Path,
    nodes: usize,
    rounds: usize,
) -> Result<Vec<Value>, Failure> {
    let ports = free_ports(nodes)?;
    let names: Vec<String> = (1..=nodes).map(|i| format!("n{i}")).collect();
    let mut text = String::from("cluster = \"bench\"\n");
    for (mode, backups) in [("sync", &[][..]), ("sync-sec", &names[2..])] {
        text += &format!(
            "[volume.{mode}]\nmode = \"{mode}\"\nprimary = \"n1\"\nmirror = \"n2\"\nbackups = {backups:?}\n\
             failover = \"manual\"\ntransport = \"{transport}\"\nresend_timeout = \"2s\"\n"
        );
    }
    for (name, port) in names.iter().zip(&ports) {
        let memory = memory.join(name);
        std::fs::create_dir_all(&memory)?;
        text += &format!(
            "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = '{}'\nring = '{}'\n\
             log = {{ medium = \"dram\", path = '{}' }}\n",
            dir.join(name).display(),
            memory.display(),
            memory.join("log").display()
        );
    }
    let file = dir.join("tiers.toml");
    std::fs::write(&file, text)?;
    let path = file.to_string_lossy().into_owned();
    let mut daemons = Vec::new();
    for name in &names[1..] {
        let errors = dir.join(format!("{name}.txt"));
        daemons.push(Process::node(&path, name, &errors)?);
    }
    let (here, memory) = (dir.to_string_lossy(), memory.to_string_lossy());
    let (rounds, replicas) = (rounds.to_string(), (nodes - 1).to_string());
    let args = [
        "__latency",
        "--config",
        &path,
        "--node",
        "n1",
        "--dir",
        &here,
    ];
    let what = ["--volumes", "sync,sync-sec", "--sizes", "64,4096"];
    let how = ["--rounds", &rounds, "--time", "20000"];
    let rivals = ["--rivals", &memory, "--replicas", &replicas];
    let shm: &[&str] = match transport {
        "shm" => &["--shm"],
        _ => &[],
    };
    let args = [&args[..], &what, &how, &rivals, shm].concat();
    let mut program = Process::start_own("the program", args, &dir.join("latency.txt"))?;
    let mut rows = Vec::new();
    while let Some(line) = program.line()? {
        let row = serde_json::from_str(&line);
        rows.push(row.map_err(|e| Failure::failed(format!("{line}: {e}")))?);
    }
    if !program.finish(Duration::from_secs(60)) {
        return Err(program.failure("failed"));
    }
    Ok(rows)
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Waits until node b has received a copy; returns what that took.
fn copied(config: &Config) -> Result<Copied, Failure> {
    let begin = Instant::now();
    loop {
        let all = ask(config, config.node("b")?, SHORT, &STATUS)?;
        let v: &Value = &all["volumes"][0];
        let c = &v["copy"];
        if c["running"] == false && c["done"] == c["total"] && v["link"]["up"] == true {
            return Ok(Copied {
                seconds: c["seconds"].as_f64().unwrap_or(f64::NAN),
                moved: c["moved"].as_f64().unwrap_or(f64::NAN),
            });
        }
        if begin.elapsed() > LIMIT {
            return Err(Failure::failed(format!("node b took no copy: {v}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Seconds to copy the bytes of one file through a connection into another file, durably.
fn plain_copy(from: &Path, to: &Path) -> Result<f64, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut source = File::open(from)?;
    let mut target = File::create(to)?;
    let begin = Instant::now();
    std::thread::scope(|s| -> Result<(), Failure> {
        let receiver = s.spawn(move || -> std::io::Result<()> {
            let (mut conn, _) = listener.accept()?;
            let mut buf = vec![0; 256 << 10];
            loop {
                let n = conn.read(&mut buf)?;
                if n == 0 {
                    break;
                }
                target.write_all(&buf[..n])?;
            }
            target.sync_data()?;
            conn.write_all(b"!")
        });
        let mut conn = TcpStream::connect(address)?;
        let mut buf = vec![0; 256 << 10];
        loop {
            let n = source.read(&mut buf)?;
            if n == 0 {
                break;
            }
            conn.write_all(&buf[..n])?;
        }
        conn.shutdown(std::net::Shutdown::Write)?;
        conn.read_exact(&mut [0])?;
        receiver
            .join()
            .map_err(|_| Failure::failed("the plain copy failed"))??;
        Ok(())
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    std::fs::remove_file(to)?;
    Ok(seconds)
}

/// The program: a file of pages with bytes of their own, of which some are
/// written anew for each number that comes on standard input.
#[derive(clap::Args)]
pub struct Touch {
    #[arg(long)]
    config: PathBuf,
    #[arg(long)]
    node: String,
    #[arg(long)]
    size: usize,
}

impl Touch {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = Volume::attach_with(&config, &self.node, None, |_, _| {})?;
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let size = self.size - self.size % PAGE;
        let map = volume.map(FILE, size, flags)?;
        let mut state = 1u64;
        let mut fill = |at: usize, len: usize| -> Result<(), mojim::Error> {
            // SAFETY: inside the mapping, which only this thread uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(map.ptr.add(at), len) };
            for word in bytes.chunks_exact_mut(8) {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                word.copy_from_slice(&state.to_le_bytes());
            }
            // SAFETY: as above.
            unsafe { mojim::msync(map.ptr.add(at), len) }.map(drop)
        };
        for at in (0..size).step_by(1 << 20) {
            fill(at, (size - at).min(1 << 20))?;
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "attached {}", volume.epoch())?;
        out.flush()?;
        let mut random = 7u64;
        for line in std::io::stdin().lines() {
            let n: usize = line?.parse().map_err(|_| Failure::usage("not a number"))?;
            for _ in 0..n {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
                fill((random >> 20) as usize % (size / PAGE) * PAGE, PAGE)?;
            }
            writeln!(out, "touched")?;
            out.flush()?;
        }
        volume.detach()?;
        writeln!(out, "detached")?;
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all::adapters::tiers;

    #[test]
    fn a_report_has_times_and_bytes_of_copies_and_times_of_sync_points() {
        let figures = CopyFigures {
            plain: 1.0,
            resync: 2.0,
            rejoin: 0.5,
            full: 1e9,
            moved: 1e7,
        };
        let rows = figures.rows(1e9).map(|mut row| {
            row["bytes"] = json!(1_000_000_000);
            tiers("", &row).unwrap()
        });
        let rows = rows.concat();
        let got: Vec<_> = rows
            .iter()
            .map(|r| (&*r.series, r.y, &*r.unit, r.ratio))
            .collect();
        let want = [
            ("plain-copy", 1.0, "s", None),
            ("resync", 2.0, "s", Some(2.0)),
            ("resync", 1e9, "B", None),
            ("rejoin", 0.5, "s", None),
            ("rejoin", 1e7, "B", Some(0.01)),
        ];
        assert_eq!(got, want);
        let audit = json!({ "case": "chain", "records": 9 });
        assert_eq!(tiers("", &audit), Ok(Vec::new()));
        // As `latency.rs` prints it, with what is added here.
        let sync = json!({
            "bytes": 4096, "case": "chain", "median_us": 21.0, "p99_us": 60.0, "count": 40,
            "ratio": 1.8, "ratio_to": "sync-sec", "transport": "tcp", "claimed": false,
        });
        let rows = tiers("", &sync).unwrap();
        assert_eq!(
            (rows[0].series.as_str(), rows[0].ratio),
            ("chain, tcp", Some(1.8))
        );
        assert!(rows[0].has("not claimed"));
    }
}
