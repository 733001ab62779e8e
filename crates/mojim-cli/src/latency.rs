//! One sync point in each of several modes, taking turns: beside plain `msync`
//! on the same file system for the demonstration, beside the rival schemes for
//! `mojim bench tiers`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim::{MapFlags, Mapping, Volume, msync};
use mojim_bench::measure::{Plan, Subject, paired};
use mojim_bench::raw::{Folios, PlainMsync};
use mojim_rivals::Scheme;
use mojim_rivals::order::Transport;
use serde_json::json;

use crate::ask::load;
use crate::failure::{Done, Failure};
use crate::rivals::Rival;

/// Bytes of one sync point.
pub const SIZES: [usize; 5] = [8, 64, 1024, 4096, 12288];
/// The modes, by the names of the demonstration's volumes.
pub const MODES: [&str; 4] = ["unreplicated", "async", "sync", "sync-flush"];
/// Bytes of each mapped file.
const REGION: usize = 16 << 20;

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

/// Where a program stores next, and what: some page of its file, with bytes that
/// it never had before.
pub struct Store {
    page: usize,
    random: u64,
    bytes: Vec<u8>,
}

impl Store {
    fn new() -> Store {
        Store {
            page: rustix::param::page_size(),
            random: 0x9e37_79b9_7f4a_7c15,
            bytes: Vec::new(),
        }
    }

    /// From now on this many bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.bytes = vec![0x5a; bytes];
    }

    /// The offset in the file, and the bytes.
    pub fn next(&mut self) -> (usize, &[u8]) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = (REGION - self.bytes.len()) / self.page;
        let at = (self.random % pages as u64) as usize * self.page;
        let stamp = self.random.to_le_bytes();
        let n = stamp.len().min(self.bytes.len());
        self.bytes[..n].copy_from_slice(&stamp[..n]);
        (at, &self.bytes)
    }
}

struct Mode {
    name: String,
    map: Mapping,
    at: usize,
    store: Store,
}

impl Subject for Mode {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> io::Result<()> {
        let (at, bytes) = self.store.next();
        self.at = at;
        // SAFETY: inside the mapping, which is `REGION` bytes long and which
        // only this thread uses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.ptr.add(at), bytes.len()) };
        Ok(())
    }

    fn op(&mut self) -> io::Result<()> {
        // SAFETY: as above.
        let at = unsafe { self.map.ptr.add(self.at) };
        msync(at, self.store.bytes.len())
            .map_err(|e| io::Error::other(format!("mode {}: {e}", self.name)))?;
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
        let mut volumes = Vec::new();
        let mut modes = Vec::new();
        let all = MODES.map(String::from).to_vec();
        let alone = !self.volumes.is_empty();
        for name in if alone { self.volumes } else { all } {
            let v = Volume::attach_with(&config, &self.node, Some(&name), |_, _| {})
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
                store: Store::new(),
            });
            volumes.push(v);
        }
        let mut plain = Vec::new();
        let folios = [
            ("msync", Folios::Small),
            ("msync, large folios", Folios::Large),
        ];
        for (name, folios) in folios.into_iter().filter(|_| !alone) {
            plain.push(Plain {
                name,
                file: PlainMsync::create(&self.dir, folios)?,
                bytes: Vec::new(),
            });
        }
        let mut rivals = match &self.rivals {
            Some(dir) => {
                let transport = match self.shm {
                    true => Transport::Shm,
                    false => Transport::Tcp,
                };
                start_rivals(dir, transport, self.replicas, &self.sizes, self.rounds)?
            }
            None => Vec::new(),
        };
        let mut out = io::stdout().lock();
        for size in self.sizes {
            modes.iter_mut().for_each(|m| m.store.resize(size));
            rivals.iter_mut().for_each(|r| r.resize(size));
            plain.iter_mut().for_each(|p| p.bytes = vec![0x5a; size]);
            let mut subjects: Vec<&mut dyn Subject> = Vec::new();
            subjects.extend(modes.iter_mut().map(|m| m as &mut dyn Subject));
            subjects.extend(plain.iter_mut().map(|p| p as &mut dyn Subject));
            subjects.extend(rivals.iter_mut().map(|r| r as &mut dyn Subject));
            let plan = Plan {
                rounds: self.rounds,
                ops: OPS.0,
                warm_ops: OPS.1,
                time_limit: Duration::from_millis(self.time),
            };
            let r = paired(&mut subjects, plan)?;
            for name in r.names() {
                let s = r.summary(name).expect("it is one of its names");
                let mut row = json!({
                    "bytes": size, "case": name,
                    "median_us": s.median_us, "p99_us": s.p99_us, "count": s.count,
                });
                if let Some((_, to)) = RATIOS.iter().find(|(case, _)| *case == name)
                    && let Some(r) = r.ratio(name, to)
                {
                    row["ratio"] = json!((r.ratio * 1000.0).round() / 1000.0);
                    row["ratio_to"] = json!(to);
                }
                writeln!(out, "{row}")?;
            }
            out.flush()?;
        }
        for r in rivals {
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
