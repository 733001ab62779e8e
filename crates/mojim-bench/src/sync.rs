//! `mojim bench sync`: the sync path of every mode beside its physical limits.
//!
//! For each transport and size, these take turns on one thread, in one run:
//!
//! - Mojim's modes,
//! - the raw round trip of the same bytes,
//! - a raw log write,
//! - plain `msync`.
//!
//! Each of Mojim's figures comes with its ratio to its limit, over all rounds and per speed
//! state of the machine. The mirror is a process of its own (`mojim node`), pinned, like the
//! raw peers, to another processor than the caller's.
//!
//! Honest limits: the raw peers copy the bytes out. The raw log is written by the same
//! thread, with the same mirror running.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim::Volume;
use mojim_config::Config;

use crate::cluster::{NodeProcess, VolumeOf, config_text_with, mojim_subject, target};
use crate::measure::{Paired, Plan, State, Subject, paired, prepared};
use crate::raw::{
    Folios, PlainMsync, RawLog, RawShm, RawTcp, Wait, pin_process, pin_thread, placement,
};
use crate::report::{Row, write_table};
use crate::scratch::Scratch;

/// Sizes of a sync point, in bytes (Mojim, Figure 8).
pub const SIZES: [usize; 5] = [8, 64, 1024, 4096, 12288];

/// What to measure.
#[derive(Debug, Clone)]
pub struct SyncOptions {
    /// One JSON object a line instead of tables.
    pub json: bool,
    /// Where the files go: a directory on the disk to be measured. Default:
    /// the temporary directory.
    pub dir: Option<PathBuf>,
    /// Sizes in bytes; empty: 8 B to 12 KiB.
    pub sizes: Vec<usize>,
    /// Rounds of paired blocks for each transport and size.
    pub rounds: usize,
    /// Operations in a block.
    pub ops: usize,
    /// How long a durable write of the mirror's emulated disk takes, if its log is on one.
    pub mirror_disk: Option<Duration>,
}

impl Default for SyncOptions {
    fn default() -> Self {
        SyncOptions {
            json: false,
            dir: None,
            sizes: Vec::new(),
            rounds: 40,
            ops: 50,
            mirror_disk: None,
        }
    }
}

/// One volume for each mode and transport.
const VOLUMES: [VolumeOf; 7] = [
    ("unrep", "unreplicated", "tcp"),
    ("async", "async", "tcp"),
    ("sync", "sync", "tcp"),
    ("flush", "sync-flush", "tcp"),
    ("shmasync", "async", "shm"),
    ("shmsync", "sync", "shm"),
    ("shmflush", "sync-flush", "shm"),
];

struct Out {
    json: bool,
}

impl Out {
    fn rows(&self, title: &str, rows: &[Row]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            for r in rows {
                r.write_json(&mut out)?;
            }
        } else {
            writeln!(out, "\n{title}")?;
            write_table(rows, &mut out)?;
        }
        out.flush()
    }
}

/// Runs the benchmark and prints it.
pub fn run(o: &SyncOptions) -> io::Result<()> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let config_path = scratch.path().join("bench.toml");
    let (dir, shm) = (scratch.path(), memory.path());
    let text = config_text_with(dir, shm, &VOLUMES, Some(1), o.mirror_disk)?;
    fs::write(&config_path, text)?;
    let config = Config::load(&config_path).map_err(io::Error::other)?;
    let mirror = NodeProcess::mirror(&config_path, o.mirror_disk)?;
    let mut volumes = Vec::new();
    for (name, mode, transport) in VOLUMES {
        let v =
            Volume::attach_with(&config, "a", Some(name), |_, _| {}).map_err(io::Error::other)?;
        let base = target(&v)?;
        volumes.push((v, base, mode, transport));
    }
    let cpus = placement();
    if let Some((_, peer)) = cpus {
        pin_process(mirror.id(), peer)?;
    }
    let wait = Wait::SPIN.peer_on(cpus.map(|c| c.1));
    let mut limits = Limits::start(wait, scratch.path())?;
    let out = Out { json: o.json };
    let sizes = if o.sizes.is_empty() {
        SIZES.to_vec()
    } else {
        o.sizes.clone()
    };
    if !o.json {
        println!(
            "{} rounds of {} operations for each size; ratios are medians over the rounds",
            o.rounds, o.ops
        );
    }
    let pinned = match cpus {
        Some((client, _)) => Some(pin_thread(client)?),
        None => None,
    };
    for transport in ["tcp", "shm"] {
        for &bytes in &sizes {
            let plan = Plan {
                rounds: o.rounds,
                ops: o.ops,
                ..Plan::default()
            };
            let of = (transport, bytes, o.mirror_disk.is_some());
            let rows = one_size(of, plan, &volumes, &mut limits)?;
            out.rows(&format!("{transport}, {bytes} bytes"), &rows)?;
        }
    }
    drop(pinned);
    for (v, ..) in volumes {
        v.detach().map_err(io::Error::other)?;
    }
    Ok(())
}

/// The limits and the rival that stand beside Mojim's modes.
struct Limits {
    tcp: RawTcp,
    shm: RawShm,
    log: RawLog,
    small: PlainMsync,
    large: PlainMsync,
}

impl Limits {
    /// Starts the peers, with both ends of a link waiting as `wait` says, and makes the files in
    /// `dir`.
    fn start(wait: Wait, dir: &Path) -> io::Result<Limits> {
        Ok(Limits {
            tcp: RawTcp::start(wait)?,
            shm: RawShm::start(wait)?,
            log: RawLog::create(dir, 64 << 20)?,
            small: PlainMsync::create(dir, Folios::Small)?,
            large: PlainMsync::create(dir, Folios::Large)?,
        })
    }

    /// What is measured beside the modes of one transport, with `payload` in each operation.
    fn subjects<'a>(
        &'a mut self,
        transport: &str,
        payload: &'a [u8],
    ) -> Vec<Box<dyn Subject + 'a>> {
        let mut subjects: Vec<Box<dyn Subject + 'a>> = Vec::new();
        if transport == "tcp" {
            subjects.push(Box::new(prepared(
                "raw-link",
                &mut self.tcp,
                |_: &mut &mut RawTcp| Ok(()),
                |t: &mut &mut RawTcp| t.round_trip(payload).map(drop),
            )));
        } else {
            subjects.push(Box::new(prepared(
                "raw-link",
                &mut self.shm,
                |_: &mut &mut RawShm| Ok(()),
                |t: &mut &mut RawShm| t.round_trip(payload).map(drop),
            )));
        }
        subjects.push(Box::new(prepared(
            "raw-log",
            &mut self.log,
            |l: &mut &mut RawLog| l.stage(payload),
            |l: &mut &mut RawLog| l.write_staged().map(drop),
        )));
        for (name, m) in [
            ("small-folios", &mut self.small),
            ("large-folios", &mut self.large),
        ] {
            subjects.push(Box::new(prepared(
                name,
                m,
                |m: &mut &mut PlainMsync| m.dirty(payload),
                |m: &mut &mut PlainMsync| m.msync().map(drop),
            )));
        }
        subjects
    }
}

/// Measures one transport with one size: the modes and the limits take turns.
fn one_size(
    (transport, bytes, is_slow): (&str, usize, bool),
    plan: Plan,
    volumes: &[(Volume, usize, &str, &str)],
    limits: &mut Limits,
) -> io::Result<Vec<Row>> {
    let payload = vec![0x5au8; bytes];
    let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
    let mut modes = Vec::new();
    for (_, base, mode, t) in volumes {
        // The unreplicated mode has no link: it stands beside TCP only.
        if *t == transport {
            modes.push(*mode);
            subjects.push(mojim_subject((*mode).to_owned(), *base, bytes));
        }
    }
    subjects.extend(limits.subjects(transport, &payload));
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| &mut **s as _).collect();
    let paired = paired(&mut refs, plan)?;
    let measured = Measured {
        paired,
        transport,
        bytes,
        is_slow,
    };
    let mut rows = Vec::new();
    for mode in modes {
        rows.extend(measured.mode_rows(mode));
    }
    rows.extend(measured.limit_rows());
    Ok(rows)
}

/// The figures of one transport and one size, to be made into rows.
struct Measured<'a> {
    paired: Paired,
    transport: &'a str,
    bytes: usize,
    /// The mirror's log is on an emulated disk: what waits for it has no limit here.
    is_slow: bool,
}

impl Measured<'_> {
    /// A row of the subject `name`, over all rounds or over those in which the link was in `state`.
    fn row(&self, case: &str, name: &str, state: Option<State>) -> Option<Row> {
        let s = match state {
            None => self.paired.summary(name),
            Some(st) => self.paired.summary_in(name, "raw-link", st),
        }?;
        let r = Row::new("sync", case, self.bytes, s).transport(self.transport);
        Some(match state {
            None => r,
            Some(st) => r.state(st),
        })
    }

    /// A mode with its ratio to its limit: over all rounds, and for each state of a single limit.
    fn mode_rows(&self, mode: &str) -> Vec<Row> {
        let mut rows = Vec::new();
        let (limits, label): (&[&str], _) = match mode {
            "sync" | "sync-flush" if self.is_slow => (&[], ""),
            "sync" => (&["raw-link"], "raw-link"),
            "sync-flush" => (&["raw-link", "raw-log"], "slower of raw-link and raw-log"),
            _ => (&["raw-log"], "raw-log"),
        };
        if let Some(r) = self.row("mojim", mode, None) {
            let r = r.mode(mode);
            rows.push(match self.paired.ratio_to_slower(mode, limits) {
                Some(x) => r.ratio(x, label),
                None => r,
            });
        }
        if limits.len() == 1 {
            for st in [State::Fast, State::Slow] {
                let Some(x) = self.paired.ratio_in(mode, limits[0], st) else {
                    continue;
                };
                let of_limit = self.paired.summary_in(mode, limits[0], st);
                if let Some(s) = of_limit {
                    rows.push(
                        Row::new("sync", "mojim", self.bytes, s)
                            .transport(self.transport)
                            .mode(mode)
                            .state(st)
                            .ratio(x, label),
                    );
                }
            }
        }
        rows
    }

    /// The limits themselves, and plain `msync`.
    fn limit_rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        rows.extend(self.row("raw-link", "raw-link", None));
        for st in [State::Fast, State::Slow] {
            if self.paired.states("raw-link").is_some() {
                rows.extend(self.row("raw-link", "raw-link", Some(st)));
            }
        }
        rows.extend(
            self.row("raw-log", "raw-log", None)
                .map(|r| r.transport("-")),
        );
        for f in ["small-folios", "large-folios"] {
            rows.extend(self.row("msync", f, None).map(|r| r.mode(f).transport("-")));
        }
        rows
    }
}
