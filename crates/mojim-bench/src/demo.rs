//! `mojim demo`: the main job on one machine: two nodes, a program killed in
//! the middle of its work, and a check of every byte that was acknowledged.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim::{MapFlags, Volume};
use mojim_config::Config;
use mojim_replica::request::Request;
use serde_json::{Value, json};

use crate::latency::{MODES, SIZES};
use crate::processes::{Directory, Process, clean_up_on_signals, free_ports};
use mojim_cli::append::{self, Log};
use mojim_cli::ask::{LONG, SHORT, STATUS, ask};
use mojim_cli::compare::compare_all;
use mojim_cli::failure::{Done, Failure, say_on_stderr};
use mojim_cli::status::columns;

/// The volume of the story.
const VOLUME: &str = "log";
/// Entries after which node a is killed, and the longest time until then.
const KILL_AFTER: (usize, Duration) = (5000, Duration::from_secs(3));
/// Entries that the new primary appends.
const MORE: u64 = 500;

/// Show a failover: two nodes, a program killed in the middle of its work, and not a byte lost.
///
/// The demonstration needs no configuration. It runs two nodes and a program on this machine, in
/// a temporary directory. That is below $TMPDIR, /var/tmp or the current directory: the first
/// that is on a disk.
///
/// 1. It kills the primary's program and daemon.
///
/// 2. It promotes the mirror.
///
/// 3. It checks every acknowledged entry byte by byte.
///
/// 4. It measures a sync point in each mode, beside plain msync.
///
/// It takes about 10 seconds, 400 MiB of disk and 200 MiB of /dev/shm. It removes everything at
/// the end. Exit code 0: nothing was lost or torn.
#[derive(clap::Args)]
pub struct Demo {
    /// Print one JSON object instead of the report.
    #[arg(long)]
    json: bool,
    /// Keep the temporary directory (configuration, data, output of the nodes), and print its
    /// path.
    #[arg(long)]
    keep: bool,
    /// Leave out the measurement.
    #[arg(long)]
    no_latency: bool,
}

struct Stage {
    json: bool,
    dir: PathBuf,
    file: PathBuf,
    config: Config,
}

impl Demo {
    /// Runs it.
    pub fn run(self) -> Done {
        clean_up_on_signals()?;
        let begin = Instant::now();
        let id = format!("mojim-demo-{}", std::process::id());
        let memory = Directory::make(Path::new("/dev/shm"), &id)
            .map_err(|e| Failure::failed(format!("making /dev/shm/{id}: {e}")))?;
        let parent = parent()?;
        let dir = Directory::make(&parent, &id)
            .map_err(|e| Failure::failed(format!("making {}/{id}: {e}", parent.display())))?;
        let dir_path = std::fs::canonicalize(dir.path())?;
        let file = dir_path.join("mojim.toml");
        std::fs::write(&file, configuration(&dir_path, memory.path())?)?;
        let stage = Stage {
            json: self.json,
            config: Config::load(&file)?,
            file,
            dir: dir_path,
        };
        if self.keep {
            dir.keep();
            if !self.json {
                say_on_stderr(&format!("everything stays in {}", stage.dir.display()));
            }
        }
        let (mut result, nodes) = stage.story()?;
        if !self.no_latency {
            result["latency"] = stage.latency()?;
        }
        for mut n in nodes {
            n.stop(Duration::from_secs(5));
        }
        let ok = result["lost"] == 0 && result["torn"].is_null() && result["copies_equal"] == true;
        result["ok"] = json!(ok);
        result["directory"] = if self.keep {
            json!(stage.dir)
        } else {
            Value::Null
        };
        result["seconds"] = json!((begin.elapsed().as_secs_f64() * 10.0).round() / 10.0);
        if self.json {
            writeln!(std::io::stdout(), "{result:#}")?;
        } else {
            stage.say(&format!(
                "\n{}  ({:.0} s; guarantees: docs/reference/guarantees.md)",
                if ok {
                    "Nothing was lost, nothing was torn."
                } else {
                    "SOMETHING WAS LOST OR TORN."
                },
                begin.elapsed().as_secs_f64()
            ))?;
        }
        Ok(if ok { 0 } else { 1 })
    }
}

impl Stage {
    fn say(&self, text: &str) -> Result<(), Failure> {
        if !self.json {
            let mut out = std::io::stdout().lock();
            writeln!(out, "{text}")?;
            out.flush()?;
        }
        Ok(())
    }

    fn node(&self, name: &str) -> Result<Process, Failure> {
        let errors = self.dir.join(format!("node-{name}.txt"));
        let file = self.file.to_string_lossy();
        Process::node(&file, name, &errors)
    }

    /// The program on `node`, and the number of entries that it found.
    fn program(&self, node: &str, more: &[&str]) -> Result<(Process, u64), Failure> {
        let errors = self.dir.join(format!("program-{node}.txt"));
        let file = self.file.to_string_lossy();
        let mut args = vec![
            "__append", "--config", &file, "--node", node, "--volume", VOLUME,
        ];
        args.extend(more);
        let mut p = Process::start(&format!("the program on node {node}"), args, &errors)?;
        let line = p.ready()?;
        let found = line.rsplit(' ').next().and_then(|n| n.parse().ok());
        let found = found.ok_or_else(|| Failure::failed(format!("the program said {line:?}")))?;
        Ok((p, found))
    }

    /// Runs the story: what happened, and the nodes that live at its end.
    fn story(&self) -> Result<(Value, Vec<Process>), Failure> {
        let mut a = self.node("a")?;
        let b = self.node("b")?;
        self.say(&format!(
            "Two nodes, a (primary) and b (mirror), and volume \"{VOLUME}\" in mode sync, in {}",
            self.dir.display()
        ))?;
        let (acknowledged, killed) = self.append_until_killed(&mut a)?;
        let mut result = self.take_over(acknowledged, killed)?;
        if result["lost"] != 0 || !result["torn"].is_null() {
            return Ok((result, vec![b]));
        }
        let a = self.node("a")?;
        self.append_more()?;
        self.compare_copies(&mut result)?;
        Ok((result, vec![a, b]))
    }

    /// Lets the program append on `a`, and kills both in the middle of it. How many entries were
    /// acknowledged, and when both were dead.
    fn append_until_killed(&self, a: &mut Process) -> Result<(u64, Instant), Failure> {
        let (mut program, _) = self.program("a", &[])?;
        let begin = Instant::now();
        let mut acknowledged: u64 = 0;
        let mut note = |line: Option<String>| -> Result<bool, Failure> {
            let Some(line) = line else { return Ok(false) };
            match line.parse::<u64>() {
                Ok(i) if i == acknowledged => {
                    acknowledged += 1;
                    Ok(true)
                }
                _ => Err(Failure::failed(format!(
                    "the program said {line:?} after entry {acknowledged}"
                ))),
            }
        };
        for _ in 0..KILL_AFTER.0 {
            if !note(program.line()?)? {
                return Err(program.failure("ended by itself"));
            }
            if begin.elapsed() > KILL_AFTER.1 {
                break;
            }
        }
        program.kill();
        a.kill();
        let killed = Instant::now();
        // What it had acknowledged before it died is still in the pipe.
        while note(program.line()?)? {}
        self.say(&format!(
            "A program on a appended entries to a mapped log, one gmsync each (entry + size).\n\
             After {acknowledged} acknowledged entries it was killed with SIGKILL, and node a with it."
        ))?;
        Ok((acknowledged, killed))
    }

    /// Promotes b and looks for every acknowledged entry there: what was found.
    fn take_over(&self, acknowledged: u64, killed: Instant) -> Result<Value, Failure> {
        let answer = self.promote("b")?;
        let promoted = killed.elapsed();
        let volume = Volume::attach_with(&self.config, "b", Some(VOLUME), |_, _| {})
            .map_err(|e| Failure::from(e).at("attaching on node b"))?;
        let serving = killed.elapsed();
        let found = entries(&volume)?;
        volume.detach()?;
        let lost = acknowledged.saturating_sub(found.entries);
        self.say(&format!(
            "Node b was promoted: epoch {}, last LSN {}; it served {:.1} s after the kill.\n\
             Entries on b: {} whole ({} acknowledged, {} in flight), {lost} lost, {} torn.",
            answer["epoch"],
            answer["last_lsn"],
            serving.as_secs_f64(),
            found.entries,
            acknowledged,
            found.entries.saturating_sub(acknowledged),
            u8::from(found.torn.is_some()),
        ))?;
        Ok(json!({
            "acknowledged": acknowledged,
            "found": found.entries,
            "lost": lost,
            "torn": found.torn,
            "epoch": answer["epoch"],
            "last_lsn": answer["last_lsn"],
            "promoted_ms": promoted.as_millis() as u64,
            "serving_ms": serving.as_millis() as u64,
            "copies_equal": Value::Null,
        }))
    }

    /// Appends on b until a, which has come back, is its mirror and has everything.
    fn append_more(&self) -> Result<(), Failure> {
        let more = MORE.to_string();
        let (mut program, before) = self.program("b", &["--entries", &more, "--linger"])?;
        for i in before..before + MORE {
            match program.line()? {
                Some(l) if l == i.to_string() => {}
                Some(l) => return Err(Failure::failed(format!("the program on b said {l:?}"))),
                None => return Err(program.failure("ended early")),
            }
        }
        self.wait_for_mirror("b", "a")?;
        drop(program.stdin());
        if !program.finish(Duration::from_secs(20)) {
            return Err(program.failure("failed"));
        }
        Ok(())
    }

    /// Compares both copies of the volume, and notes what came of it in `result`.
    fn compare_copies(&self, result: &mut Value) -> Result<(), Failure> {
        let found = compare_all(
            &self.config,
            self.config.volume(Some(VOLUME))?,
            Duration::from_secs(10),
        )?;
        let wrong = found.differences.first().map(|d| d.what.clone());
        let why = wrong.clone().or(found.undecided.clone());
        result["copies_equal"] = json!(why.is_none());
        match &why {
            None => self.say(&format!(
                "Node a came back as b's mirror and caught up while b appended {MORE} more entries:\n\
                 the copies are equal ({} file, {} bytes, LSN {}).",
                found.files, found.bytes, found.lsn
            )),
            Some(why) => {
                result["what"] = json!(why);
                let word = match wrong {
                    Some(_) => "differ",
                    None => "could not be compared",
                };
                self.say(&format!(
                    "Node a came back as b's mirror, but the copies {word}: {why}"
                ))
            }
        }
    }

    /// Promotes; a mirror that has not noticed yet that its primary is dead refuses for a moment.
    fn promote(&self, name: &str) -> Result<Value, Failure> {
        let node = self.config.node(name)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match ask(
                &self.config,
                node,
                LONG,
                &Request::Promote {
                    volume: VOLUME.to_owned(),
                    force: false,
                },
            ) {
                Err(f) if Instant::now() > deadline => return Err(f),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
                Ok(v) if v["promoting"] == true => {}
                Ok(v) => return Ok(v),
            }
        }
    }

    /// Waits until the primary counts the other node as a member of its view.
    fn wait_for_mirror(&self, primary: &str, mirror: &str) -> Result<(), Failure> {
        let node = self.config.node(primary)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let v = ask(&self.config, node, SHORT, &STATUS)?;
            let mine = v["volumes"]
                .as_array()
                .and_then(|a| a.iter().find(|s| s["volume"] == VOLUME));
            if mine.is_some_and(|s| s["view"]["mirror"] == mirror) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Failure::failed(format!(
                    "node {mirror} did not become the mirror of node {primary}: {}",
                    mine.cloned().unwrap_or_default()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn latency(&self) -> Result<Value, Failure> {
        self.say("\nOne sync point on this machine, in microseconds (median / 99th percentile):")?;
        let errors = self.dir.join("latency.txt");
        let (file, dir) = (self.file.to_string_lossy(), self.dir.to_string_lossy());
        let args = ["__latency", "--config", &file, "--node", "a", "--dir", &dir];
        let mut p = Process::start_own("the measurement", args, &errors)?;
        let mut rows: Vec<Value> = Vec::new();
        while let Some(line) = p.line()? {
            rows.push(serde_json::from_str(&line)?);
        }
        if !p.finish(Duration::from_secs(20)) || rows.is_empty() {
            return Err(p.failure("failed"));
        }
        let cases: Vec<&str> = MODES
            .into_iter()
            .chain(["msync", "msync, large folios"])
            .collect();
        let mut table = vec![[""; 6].map(String::from)];
        table[0][0] = "mode".into();
        for (i, s) in SIZES.iter().enumerate() {
            table[0][i + 1] = if *s < 1024 {
                format!("{s} B")
            } else {
                format!("{} KiB", s / 1024)
            };
        }
        for case in cases {
            let mut line = [""; 6].map(String::from);
            line[0] = case.into();
            for (i, s) in SIZES.iter().enumerate() {
                if let Some(r) = rows.iter().find(|r| r["case"] == case && r["bytes"] == *s) {
                    let n = |k: &str| r[k].as_f64().unwrap_or(0.0);
                    line[i + 1] = format!("{:.1} / {:.0}", n("median_us"), n("p99_us"));
                }
            }
            table.push(line);
        }
        self.say(columns(&table).trim_end())?;
        self.say(
            "(sync: on both nodes, in memory; unreplicated, sync-flush: on this disk too; msync: plain\n\
             msync of a mapped file on this disk, not replicated; small and large page-cache folios)",
        )?;
        Ok(json!(rows))
    }
}

/// The entries of the log that `volume` has; none if it has no log of the right size.
fn entries(volume: &Volume) -> Result<append::LogContents, Failure> {
    if volume.size(append::FILE)? != Some(append::CAPACITY as u64) {
        return Ok(append::LogContents {
            entries: 0,
            size: 0,
            torn: None,
        });
    }
    let flags = MapFlags {
        read_only: true,
        ..MapFlags::default()
    };
    let map = volume.map(append::FILE, 0, flags)?;
    Ok(Log(map).check())
}

/// Where the demonstration's files go: on a disk, or the figures mean nothing.
fn parent() -> Result<PathBuf, Failure> {
    let wanted = std::env::var_os("TMPDIR")
        .filter(|t| !t.is_empty())
        .map(PathBuf::from);
    let here = std::env::current_dir().ok();
    let mut all: Vec<PathBuf> = wanted
        .into_iter()
        .chain([PathBuf::from("/var/tmp")])
        .chain(here)
        .collect();
    all.retain(|p| p.is_dir());
    for p in &all {
        const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6]; // tmpfs, ramfs
        if rustix::fs::statfs(p).is_ok_and(|s| !IN_MEMORY.contains(&{ s.f_type })) {
            return Ok(p.clone());
        }
    }
    let first = all.into_iter().next().ok_or_else(|| {
        Failure::failed("neither $TMPDIR, /var/tmp nor the current directory can be used")
    })?;
    say_on_stderr(&format!(
        "{} is in memory; the figures of the disk mean nothing. Set TMPDIR to a directory on a disk",
        first.display()
    ));
    Ok(first)
}

fn configuration(dir: &Path, memory: &Path) -> Result<String, Failure> {
    let ports = free_ports(2)?;
    let quote = |p: PathBuf| Value::from(p.to_string_lossy()).to_string();
    let mut t = String::from("# Written by `mojim demo`.\ncluster = \"demo\"\n");
    for (name, mode) in [(VOLUME, "sync")].into_iter().chain(MODES.map(|m| (m, m))) {
        t += &format!("\n[volume.{name}]\nmode = \"{mode}\"\nprimary = \"a\"\n");
        if mode != "unreplicated" {
            t += "mirror = \"b\"\n";
        }
        // Two nodes and a program share this machine's processors: patience.
        t += "resend_timeout = \"500ms\"\n";
    }
    for (name, port, medium) in [("a", ports[0], "disk"), ("b", ports[1], "dram")] {
        t += &format!(
            "\n[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = {}\nring = {}\nlog = {{ medium = \"{medium}\", size = \"16MiB\" }}\n",
            quote(dir.join(name)),
            quote(memory.to_owned()),
        );
    }
    Ok(t)
}
