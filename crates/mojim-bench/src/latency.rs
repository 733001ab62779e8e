//! One sync point in each of several modes, taking turns: beside plain `msync`
//! on the same file system for the demonstration, beside the rival schemes for
//! `mojim bench tiers`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::measure::{Paired, Plan, Subject, paired};
use crate::raw::{Folios, PlainMsync};
use mojim::{MapFlags, Mapping, Volume, msync};
use mojim_config::Config;
use mojim_rivals::Scheme;
use mojim_rivals::order::Transport;
use serde_json::json;

use crate::rivals::Rival;
use crate::store::{REGION, Store};
use mojim_cli::ask::load;
use mojim_cli::failure::{Done, Failure};

/// Bytes of one sync point.
pub const SIZES: [usize; 5] = [8, 64, 1024, 4096, 12288];
/// The modes, by the names of the demonstration's volumes.
pub const MODES: [&str; 4] = ["unreplicated", "async", "sync", "sync-flush"];

/// The measurement.
#[derive(clap::Args)]
pub struct Latency {
    #[arg(long)]
    config: PathBuf,
    #[arg(long)]
    node: String,
    /// Where the files of plain msync go.
    #[arg(long)]
    dir: PathBuf,
    /// Milliseconds for each size.
    #[arg(long, default_value_t = 2500)]
    time: u64,
    /// Only these volumes, without plain msync [default: one in each mode].
    #[arg(long, value_delimiter = ',')]
    volumes: Vec<String>,
    /// Sizes of a sync point [default: 8 B to 12 KiB].
    #[arg(long, value_delimiter = ',', default_values_t = SIZES)]
    sizes: Vec<usize>,
    /// Rounds for each size.
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Beside them the rival schemes, whose logs go into this directory.
    #[arg(long)]
    rivals: Option<PathBuf>,
    /// How many replicas each of them has.
    #[arg(long, default_value_t = 2)]
    replicas: usize,
    /// Their records go through shared memory.
    #[arg(long)]
    shm: bool,
}

/// Operations in a block, and untimed ones before it.
const OPS: (usize, usize) = (40, 4);

/// What each ratio is to. The rivals' own code with one replica does what
/// `sync` does, and shows what it costs by itself.
const RATIOS: [(&str, &str); 5] = [
    ("sync-sec", "sync"),
    (ONE, "sync"),
    ("chain", "sync-sec"),
    ("broadcast", "sync-sec"),
    ("write-all", "sync-sec"),
];
const ONE: &str = "one-replica";

struct Mode {
    name: String,
    map: Mapping,
    /// What was stored last: where, and how many bytes.
    at: usize,
    len: usize,
    store: Store,
}

impl Subject for Mode {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> io::Result<()> {
        let (at, bytes) = self.store.next();
        (self.at, self.len) = (at, bytes.len());
        // SAFETY: inside the mapping, which is `REGION` bytes long and which
        // only this thread uses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.ptr.add(at), bytes.len()) };
        Ok(())
    }

    fn op(&mut self) -> io::Result<()> {
        // SAFETY: as above.
        let at = unsafe { self.map.ptr.add(self.at) };
        msync(at, self.len).map_err(|e| io::Error::other(format!("mode {}: {e}", self.name)))?;
        Ok(())
    }
}

struct Plain {
    name: &'static str,
    file: PlainMsync,
    bytes: Vec<u8>,
}

impl Subject for Plain {
    fn name(&self) -> &str {
        self.name
    }
    fn prepare(&mut self) -> io::Result<()> {
        self.bytes[0] = self.bytes[0].wrapping_add(1);
        self.file.dirty(&self.bytes)
    }
    fn op(&mut self) -> io::Result<()> {
        self.file.msync()
    }
}

impl Latency {
    /// Runs it: one JSON object a line.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let alone = !self.volumes.is_empty();
        let names = match alone {
            true => self.volumes.clone(),
            false => MODES.map(String::from).to_vec(),
        };
        let (volumes, modes) = attach_modes(&config, &self.node, names)?;
        let plain = match alone {
            true => Vec::new(),
            false => plain_files(&self.dir)?,
        };
        let rivals = match &self.rivals {
            Some(dir) => {
                let transport = match self.shm {
                    true => Transport::Shm,
                    false => Transport::Tcp,
                };
                start_rivals(dir, transport, self.replicas, &self.sizes, self.rounds)?
            }
            None => Vec::new(),
        };
        let mut subjects = Subjects {
            modes,
            plain,
            rivals,
        };
        let plan = Plan {
            rounds: self.rounds,
            ops: OPS.0,
            warm_ops: OPS.1,
            time_limit: Duration::from_millis(self.time),
        };
        let mut out = io::stdout().lock();
        for size in self.sizes {
            let measured = subjects.take_turns(size, plan)?;
            write_rows(&mut out, size, &measured)?;
            out.flush()?;
        }
        for r in subjects.rivals {
            let case = r.name().to_owned();
            let records = r.finish()?;
            writeln!(out, "{}", json!({ "case": case, "records": records }))?;
        }
        for v in volumes {
            let name = v.name().to_owned();
            v.detach()
                .map_err(|e| Failure::from(e).at(&format!("volume {name}")))?;
        }
        Ok(0)
    }
}

/// Everything that takes turns.
struct Subjects {
    modes: Vec<Mode>,
    plain: Vec<Plain>,
    rivals: Vec<Rival>,
}

impl Subjects {
    /// Measures sync points of `size` bytes.
    fn take_turns(&mut self, size: usize, plan: Plan) -> io::Result<Paired> {
        self.modes.iter_mut().for_each(|m| m.store.resize(size));
        self.rivals.iter_mut().for_each(|r| r.resize(size));
        self.plain
            .iter_mut()
            .for_each(|p| p.bytes = vec![0x5a; size]);
        let mut all: Vec<&mut dyn Subject> = Vec::new();
        all.extend(self.modes.iter_mut().map(|m| m as &mut dyn Subject));
        all.extend(self.plain.iter_mut().map(|p| p as &mut dyn Subject));
        all.extend(self.rivals.iter_mut().map(|r| r as &mut dyn Subject));
        paired(&mut all, plan)
    }
}

/// Attaches the volumes `names` on `node`, and maps a file of each.
fn attach_modes(
    config: &Config,
    node: &str,
    names: Vec<String>,
) -> Result<(Vec<Volume>, Vec<Mode>), Failure> {
    let (mut volumes, mut modes) = (Vec::new(), Vec::new());
    for name in names {
        let v = Volume::attach_with(config, node, Some(&name), |_, _| {})
            .map_err(|e| Failure::from(e).at(&format!("volume {name}")))?;
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let map = v.map("data", REGION, flags)?;
        modes.push(Mode {
            name,
            map,
            at: 0,
            len: 0,
            store: Store::new(),
        });
        volumes.push(v);
    }
    Ok((volumes, modes))
}

/// The files of plain msync, in `dir`.
fn plain_files(dir: &Path) -> io::Result<Vec<Plain>> {
    let folios = [
        ("msync", Folios::Small),
        ("msync, large folios", Folios::Large),
    ];
    let make = |(name, folios)| {
        Ok(Plain {
            name,
            file: PlainMsync::create(dir, folios)?,
            bytes: Vec::new(),
        })
    };
    folios.into_iter().map(make).collect()
}

/// A row for each subject, with its ratio to what it is compared with.
fn write_rows(out: &mut impl Write, size: usize, measured: &Paired) -> io::Result<()> {
    for name in measured.names() {
        let s = measured.summary(name).expect("it is one of its names");
        let mut row = json!({
            "bytes": size, "case": name,
            "median_us": s.median_us, "p99_us": s.p99_us, "count": s.count,
        });
        if let Some((_, to)) = RATIOS.iter().find(|(case, _)| *case == name)
            && let Some(r) = measured.ratio(name, to)
        {
            row["ratio"] = json!((r.ratio * 1000.0).round() / 1000.0);
            row["ratio_to"] = json!(to);
        }
        writeln!(out, "{row}")?;
    }
    Ok(())
}

/// All rivals, with logs that have room for all that will be sent.
fn start_rivals(
    dir: &Path,
    transport: Transport,
    replicas: usize,
    sizes: &[usize],
    rounds: usize,
) -> Result<Vec<Rival>, Failure> {
    // Beside the bytes a record takes less than a sector, and write-all sends two.
    let one: usize = sizes.iter().map(|s| s + 2 * 512).sum();
    let size = ((rounds * (OPS.0 + OPS.1) * one) as u64).next_multiple_of(1 << 20);
    let all = Scheme::ALL.map(|s| (s.name(), s, replicas));
    all.into_iter()
        .chain([(ONE, Scheme::Broadcast, 1)])
        .map(|rival| Rival::start(rival, transport, dir, size, Store::new()))
        .collect()
}
