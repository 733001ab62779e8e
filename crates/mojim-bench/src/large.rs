//! `mojim bench large`: what a sync point of a whole region costs by the size of the region.
//!
//! Unreplicated, with the log on disk. Each operation stores 8 bytes to one random
//! resident page. Then it commits the whole region by `msync`, which has to find the page.
//! The regions take turns in blocks, in an order that rotates. The kinds of tracking come one after
//! the other.
//!
//! The resident pages are the program's own, as if all had been changed. Each is stored
//! to, but with the bytes that it has, so that the data file stays sparse. They lie in
//! pieces of 2 MiB, at even distances.
//!
//! The store is timed separately, and in the sum: the first store to a page after a sync
//! point is a page fault, and with two levels may be a signal.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use mojim::{MapFlags, Volume, msync, unmap};
use mojim_config::Config;
use mojim_env::rng::Rng;
use serde::Serialize;

use crate::fams::median;
use crate::report;
use crate::scratch::Scratch;

/// Resident pages lie in pieces of this size.
const PIECE: usize = 2 << 20;

/// What to measure.
#[derive(Debug, Clone)]
pub struct LargeOptions {
    /// One JSON object a line instead of a table.
    pub json: bool,
    /// Where the files go: a directory on the disk to be measured. Default: the temporary
    /// directory.
    pub dir: Option<PathBuf>,
    /// Kinds of tracking, as in a configuration.
    pub trackers: Vec<String>,
    /// Sizes, and how many bytes of each are resident; the others are compared with the
    /// first.
    pub regions: Vec<(usize, usize)>,
    /// Rounds of blocks.
    pub rounds: usize,
    /// Sync points in a block.
    pub ops: usize,
    /// Sync points of each region before the first round.
    pub warm: usize,
}

impl Default for LargeOptions {
    fn default() -> Self {
        LargeOptions {
            json: false,
            dir: None,
            trackers: vec!["uffd".into(), "two-level".into()],
            regions: vec![
                (16 << 20, 16 << 20),
                (4 << 30, 4 << 30),
                (64 << 30, 1 << 30),
            ],
            rounds: 9,
            ops: 100,
            warm: 1000,
        }
    }
}

/// One figure.
#[derive(Debug, Clone, Serialize)]
struct Row {
    bench: &'static str,
    tracker: String,
    region_mib: usize,
    resident_mib: usize,
    /// Medians over the rounds of the blocks' medians.
    sync_us: f64,
    store_us: f64,
    /// How many times the first region's, in the same round: medians.
    times: f64,
    times_with_store: f64,
}

struct Region {
    base: *mut u8,
    len: usize,
    resident: usize,
    random: Rng,
}

impl Region {
    fn map(volume: &Volume, n: usize, (len, resident): (usize, usize)) -> io::Result<Region> {
        let flags = MapFlags {
            create: true,
            ..MapFlags::default()
        };
        let m = volume
            .map(&format!("data{n}"), len, flags)
            .map_err(io::Error::other)?;
        let r = Region {
            base: m.ptr,
            len,
            resident,
            random: Rng::new(1),
        };
        let page = rustix::param::page_size();
        for i in 0..resident / page {
            // SAFETY: inside the mapping.
            unsafe { r.page(i).write_volatile(0) };
            // Little at a time: all of it is compared with what is committed.
            if ((i + 1) * page).is_multiple_of(256 << 20) {
                r.sync()?;
            }
        }
        r.sync()?;
        Ok(r)
    }

    /// Resident page `i`.
    fn page(&self, i: usize) -> *mut u8 {
        let at = i * rustix::param::page_size();
        let stride = self.len / (self.resident / PIECE);
        // SAFETY: inside the mapping.
        unsafe { self.base.add(at / PIECE * stride + at % PIECE) }
    }

    fn sync(&self) -> io::Result<()> {
        msync(self.base, self.len)
            .map(drop)
            .map_err(io::Error::other)
    }

    /// One operation: microseconds of the store and of the sync point.
    fn one(&mut self) -> io::Result<(f64, f64)> {
        let random = self.random.next();
        let page = (random >> 20) as usize % (self.resident / rustix::param::page_size());
        let at = self.page(page).cast::<u64>();
        let begin = Instant::now();
        // SAFETY: inside the mapping, and aligned; sizes are whole pages.
        unsafe { at.write_volatile(random) };
        let stored = begin.elapsed();
        self.sync()?;
        let synced = begin.elapsed() - stored;
        Ok((stored.as_secs_f64() * 1e6, synced.as_secs_f64() * 1e6))
    }
}

fn config(dir: &Path, ring: &Path, tracker: &str) -> io::Result<Config> {
    let path = dir.join("bench.toml");
    fs::write(
        &path,
        format!(
            "cluster = \"bench\"\n[volume.v]\nmode = \"unreplicated\"\nprimary = \"a\"\ntracker = \"{tracker}\"\n[node.a]\naddress = \"127.0.0.1:1\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {{ medium = \"disk\", size = \"64MiB\" }}\n",
            dir.join("a").display(),
            ring.display(),
        ),
    )?;
    Config::load(&path).map_err(io::Error::other)
}

fn measure(o: &LargeOptions, tracker: &str) -> io::Result<Vec<Row>> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let config = config(scratch.path(), memory.path(), tracker)?;
    let volume =
        Volume::attach_with(&config, "a", Some("v"), |_, _| {}).map_err(io::Error::other)?;
    let mut regions = Vec::new();
    for (n, size) in o.regions.iter().enumerate() {
        regions.push(Region::map(&volume, n, *size)?);
    }
    for r in &mut regions {
        for _ in 0..o.warm {
            r.one()?;
        }
    }
    // By region, the blocks' medians: the store, the sync point, both.
    let mut taken = vec![[const { Vec::new() }; 3]; regions.len()];
    for round in 0..o.rounds {
        for i in 0..regions.len() {
            let i = (i + round) % regions.len();
            let mut all = [const { Vec::new() }; 3];
            for _ in 0..o.ops {
                let (store, sync) = regions[i].one()?;
                all[0].push(store);
                all[1].push(sync);
                all[2].push(store + sync);
            }
            for (taken, all) in taken[i].iter_mut().zip(all) {
                taken.push(median(all));
            }
        }
    }
    let rounded = |x: f64| (x * 1e3).round() / 1e3;
    let times = |i: usize, of: usize| {
        let ratios = taken[i][of].iter().zip(&taken[0][of]).map(|(a, b)| a / b);
        rounded(median(ratios.collect()))
    };
    let rows = regions.iter().enumerate().map(|(i, r)| Row {
        bench: "large",
        tracker: tracker.to_owned(),
        region_mib: r.len >> 20,
        resident_mib: r.resident >> 20,
        sync_us: rounded(median(taken[i][1].clone())),
        store_us: rounded(median(taken[i][0].clone())),
        times: times(i, 1),
        times_with_store: times(i, 2),
    });
    let rows = rows.collect();
    for r in &regions {
        unmap(r.base, r.len).map_err(io::Error::other)?;
    }
    volume.detach().map_err(io::Error::other)?;
    Ok(rows)
}

fn table(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<10} {:>10} {:>12} {:>9} {:>9} {:>6} {:>11}",
        "tracker", "region MiB", "resident MiB", "sync us", "store us", "times", "with stores"
    )?;
    for r in rows {
        writeln!(
            out,
            "{:<10} {:>10} {:>12} {:>9.1} {:>9.1} {:>6.2} {:>11.2}",
            r.tracker,
            r.region_mib,
            r.resident_mib,
            r.sync_us,
            r.store_us,
            r.times,
            r.times_with_store
        )?;
    }
    Ok(())
}

/// Runs the benchmark and prints it.
pub fn run(o: &LargeOptions) -> io::Result<()> {
    for tracker in &o.trackers {
        let rows = measure(o, tracker)?;
        report::print(o.json, &rows, table)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_measures_every_region() {
        let dir = Scratch::new().unwrap();
        let o = LargeOptions {
            dir: Some(dir.path().to_owned()),
            regions: vec![(2 << 20, 2 << 20), (128 << 20, 4 << 20)],
            rounds: 2,
            ops: 5,
            warm: 5,
            ..LargeOptions::default()
        };
        for tracker in &o.trackers {
            let rows = measure(&o, tracker).unwrap();
            let sizes: Vec<_> = rows
                .iter()
                .map(|r| (r.region_mib, r.resident_mib))
                .collect();
            assert_eq!(sizes, [(2, 2), (128, 4)]);
            assert!(rows.iter().all(|r| r.sync_us > 0.0 && r.store_us > 0.0));
        }
    }

    #[test]
    fn a_report_has_a_row_for_each_region() {
        let row = Row {
            bench: "large",
            tracker: "uffd".into(),
            region_mib: 4096,
            resident_mib: 4096,
            sync_us: 1700.0,
            store_us: 1.0,
            times: 40.0,
            times_with_store: 39.0,
        };
        let row = serde_json::to_value(&row).unwrap();
        let rows = crate::all::adapters::large("", &row).unwrap();
        assert_eq!((rows[0].y, rows[0].ratio), (1700.0, Some(40.0)));
    }
}
