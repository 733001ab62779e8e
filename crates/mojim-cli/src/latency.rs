//! The demonstration's figures: one sync point in each mode beside plain
//! `msync` on the same file system, taking turns.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use mojim::{MapFlags, Mapping, Volume, msync};
use mojim_bench::measure::{Plan, Subject, paired};
use mojim_bench::raw::{Folios, PlainMsync};
use serde_json::json;

use crate::ask::load;
use crate::failure::{Done, Failure};

/// Bytes of one sync point.
pub const SIZES: [usize; 5] = [8, 64, 1024, 4096, 12288];
/// The modes, by the names of the demonstration's volumes.
pub const MODES: [&str; 4] = ["unreplicated", "async", "sync", "sync-flush"];
/// Bytes of each mapped file.
const REGION: usize = 16 << 20;

/// The demonstration's measurement.
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
}

struct Mode {
    name: String,
    map: Mapping,
    page: usize,
    at: usize,
    random: u64,
    bytes: Vec<u8>,
}

impl Subject for Mode {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> io::Result<()> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = (self.map.len - self.bytes.len()) / self.page;
        self.at = (self.random % pages as u64) as usize * self.page;
        let stamp = self.random.to_le_bytes();
        let n = stamp.len().min(self.bytes.len());
        self.bytes[..n].copy_from_slice(&stamp[..n]);
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.bytes.as_ptr(),
                self.map.ptr.add(self.at),
                self.bytes.len(),
            );
        }
        Ok(())
    }

    fn op(&mut self) -> io::Result<()> {
        // SAFETY: as above.
        let at = unsafe { self.map.ptr.add(self.at) };
        msync(at, self.bytes.len())
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
        let page = rustix::param::page_size();
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
                page,
                at: 0,
                random: 0x9e37_79b9_7f4a_7c15,
                bytes: Vec::new(),
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
        let mut out = io::stdout().lock();
        for size in SIZES {
            modes.iter_mut().for_each(|m| m.bytes = vec![0x5a; size]);
            plain.iter_mut().for_each(|p| p.bytes = vec![0x5a; size]);
            let mut subjects: Vec<&mut dyn Subject> = Vec::new();
            subjects.extend(modes.iter_mut().map(|m| m as &mut dyn Subject));
            subjects.extend(plain.iter_mut().map(|p| p as &mut dyn Subject));
            let plan = Plan {
                rounds: 40,
                ops: 40,
                warm_ops: 4,
                time_limit: Duration::from_millis(self.time),
            };
            let r = paired(&mut subjects, plan)?;
            for name in r.names() {
                let s = r.summary(name).expect("it is one of its names");
                let row = json!({
                    "bytes": size, "case": name,
                    "median_us": s.median_us, "p99_us": s.p99_us, "count": s.count,
                });
                writeln!(out, "{row}")?;
            }
            out.flush()?;
        }
        for v in volumes {
            let name = v.name().to_owned();
            v.detach()
                .map_err(|e| Failure::from(e).at(&format!("volume {name}")))?;
        }
        Ok(0)
    }
}
