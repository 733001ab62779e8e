//! Block history: every request to a device is recorded while a workload runs.
//!
//! Then the device is put into states that a loss of power at any moment could leave. The bytes
//! recovered from each state are compared.
//!
//! Owns the choice of states. After a loss of power a device has what was written before the last
//! flush. Of each later write it has one of these:
//!
//! - all
//! - nothing
//! - some blocks of 4 KiB
//! - some sectors of 512 bytes
//!
//! Of a write with forced unit access it has all. In half of the histories the disk has such
//! writes: logs are written by them.
//!
//! The workload acknowledges into the same device, beyond the file system. So the history has the
//! acknowledgements in their places. One recovery in eight is recorded in the same way, and
//! crashed in turn.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use mojim_sim::Rng;

use crate::acks::{self, Acks, SECTOR};
use crate::device::{Device, Event};
use crate::report::{Extent, Report, Row};
use crate::subject::{Kind, SubjectPaths};
use crate::sys::{Lab, Loop, Mounted, make_file_system};
use crate::workload::Model;
use crate::{Result, check, work};

/// Bytes behind the file system, where acknowledgements are.
const BEHIND: u64 = 64 << 10;

/// Size of the file system, in bytes. A heap has each step's blocks twice, and room that nothing uses.
fn file_system(kind: Kind) -> u64 {
    match kind {
        Kind::Heap(_) => 28 << 20,
        _ => 16 << 20,
    }
}

/// The units of a write of which only some reach the medium.
const PIECES: [usize; 2] = [4096, SECTOR];

/// How the rung runs.
pub struct Options {
    /// How much is run.
    pub extent: Extent,
    /// States of one history.
    pub of_each: u64,
    /// Steps of the workload in one history.
    pub steps: u64,
    /// Histories that are examined at the same time.
    pub jobs: usize,
    /// Where images of states are kept that should have been recovered and were not.
    pub keep: Option<PathBuf>,
}

/// Runs the rung.
pub fn run(o: &Options) -> Result<Report> {
    let begun = Instant::now();
    let mut rows = Vec::new();
    for &kind in &o.extent.kinds {
        let total = Mutex::new(Row::new(kind));
        let next = AtomicU64::new(0);
        let histories = o.extent.of(kind).div_ceil(o.of_each);
        let job = || -> Result<()> {
            let mut bench = Bench::new(kind)?;
            loop {
                let n = next.fetch_add(1, Relaxed);
                let goes_on = o.extent.goes_on(&total.lock().expect("no thread panics"));
                if n >= histories || !goes_on {
                    return Ok(());
                }
                let row = bench.look_at(o, kind, o.extent.seed + n)?;
                total.lock().expect("no thread panics").join(row);
            }
        };
        std::thread::scope(|s| {
            let jobs: Vec<_> = (0..o.jobs).map(|_| s.spawn(job)).collect();
            jobs.into_iter().try_for_each(|j| match j.join() {
                Ok(done) => done,
                Err(e) => std::panic::resume_unwind(e),
            })
        })?;
        rows.push(total.into_inner().expect("no thread panics"));
    }
    Ok(Report {
        rung: "block history on ext4".into(),
        rows,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Bytes for an offset, among those that reach the medium.
pub(crate) type Piece = (u64, Vec<u8>);

/// A device that records, a fast image that does not, and where they are mounted.
struct Bench {
    // In the order in which they must be dropped.
    recorded: Loop,
    device: Device,
    quick: Loop,
    image: File,
    lab: Lab,
    pristine: Vec<u8>,
    /// Where acknowledgements are.
    acks: u64,
    lives: u64,
}

impl Bench {
    fn new(kind: Kind) -> Result<Bench> {
        let lab = Lab::new()?;
        let path = lab.path("image");
        let acks = file_system(kind);
        make_file_system("ext4", &path, acks)?;
        let mut pristine = std::fs::read(&path)?;
        let len = acks + BEHIND;
        pristine.resize(len as usize, 0);
        let image = OpenOptions::new().write(true).open(&path)?;
        image.set_len(len)?;
        let device = Device::new(&lab.path("device"), pristine.clone())?;
        Ok(Bench {
            recorded: Loop::new(device.path())?,
            device,
            quick: Loop::new(&path)?,
            image,
            lab,
            pristine,
            acks,
            lives: 0,
        })
    }

    fn mount(&self, disk: &Loop) -> std::io::Result<Mounted> {
        // What is behind the device was changed.
        disk.forget()?;
        Mounted::new("ext4", disk.path(), &self.lab.path("mnt"))
    }

    fn place(&mut self) -> Result<SubjectPaths> {
        let _ = std::fs::remove_dir_all(self.lab.path(&format!("ring.{}", self.lives)));
        self.lives += 1;
        let ring = self.lab.path(&format!("ring.{}", self.lives));
        std::fs::create_dir_all(&ring)?;
        let dir = self.lab.path("mnt").join("d");
        let medium = "disk".into();
        Ok(SubjectPaths {
            dir,
            ring,
            medium,
            forced: None,
        })
    }

    /// Runs the workload, and returns all requests to the device.
    fn history(&mut self, kind: Kind, seed: u64, steps: u64) -> Result<Vec<Event>> {
        self.device.load(self.pristine.clone());
        self.device.record();
        let mounted = self.mount(&self.recorded)?;
        let mut place = self.place()?;
        place.forced = (seed / 2).is_multiple_of(2).then(|| self.device.forced());
        let acks = Acks::open(&format!("{}@{}", self.device.path().display(), self.acks))?;
        work(kind, &place, seed, steps, &acks)?;
        let history = self.device.take_history();
        mounted.unmount()?;
        Ok(history)
    }

    /// Checks states of one history.
    fn look_at(&mut self, o: &Options, kind: Kind, seed: u64) -> Result<Row> {
        let mut row = Row::new(kind);
        let history = self.history(kind, seed, o.steps)?;
        // What is on the medium in any case.
        let mut medium = self.pristine.clone();
        let mut rng = Rng::new(seed ^ 0xb10c);
        let mut moments = moments(&history, self.acks, &mut rng, o.of_each);
        moments.sort_unstable();
        let mut model = Model::new(seed);
        // The number of requests that `medium` has, and the last acknowledgement.
        let (mut durable, mut acknowledged) = (0, None);
        let mut seen = 0;
        for moment in moments {
            let flush = last_flush(&history[..moment]).unwrap_or(0).max(durable);
            for e in &history[durable..flush] {
                if let Event::Write(at, bytes) | Event::Forced(at, bytes) = e {
                    put(&mut medium, *at, bytes);
                }
            }
            durable = flush;
            for e in &history[seen..moment] {
                acknowledged = ack(e, self.acks).or(acknowledged);
            }
            seen = moment;
            let range = Range {
                acknowledged: acknowledged.unwrap_or(0),
                started: acknowledged.map_or(0, |a| (a + 1).min(o.steps)),
            };
            let mut range = range;
            let mut what = format!("seed {seed}, after {moment} of {} requests", history.len());
            let mut pieces = survivors(&history[durable..moment], &mut rng);
            pieces.extend(begun(history.get(moment), &mut rng));
            if rng.below(8) == 0 {
                let (found, after) =
                    self.try_recorded(kind, &medium, &pieces, &mut model, range)?;
                if let Some(Ok(n)) = found {
                    // A later recovery must find the same step.
                    (range.acknowledged, range.started) = (n, n);
                }
                self.count(&mut row, o, found, &what, &medium, &pieces)?;
                // The same state again, but now its recovery is crashed too.
                let moment = rng.below(after.len() as u64 + 1) as usize;
                let flush = last_flush(&after[..moment]).unwrap_or(0);
                pieces.extend(all(&after[..flush]));
                pieces.extend(survivors(&after[flush..moment], &mut rng));
                what = format!("{what}, and {moment} of its recovery");
                row.twice += u64::from(moment > 0 && moment < after.len());
            }
            let found = self.try_state(kind, &medium, &pieces, &mut model, range)?;
            self.count(&mut row, o, found, &what, &medium, &pieces)?;
            if !o.extent.goes_on(&row) {
                break;
            }
        }
        Ok(row)
    }

    /// Recovers from `medium` with `pieces` written over it, and compares; `None` if the
    /// file system does not mount.
    fn try_state(
        &mut self,
        kind: Kind,
        medium: &[u8],
        pieces: &[Piece],
        model: &mut Model,
        range: Range,
    ) -> Result<Option<FoundStep>> {
        self.image.write_all_at(medium, 0)?;
        for (at, bytes) in pieces {
            self.image.write_all_at(bytes, *at)?;
        }
        let mounted = self.mount(&self.quick).ok();
        self.check_mounted(kind, mounted, model, range)
    }

    /// As `try_state`, but on the device that records; returns also its requests.
    fn try_recorded(
        &mut self,
        kind: Kind,
        medium: &[u8],
        pieces: &[Piece],
        model: &mut Model,
        range: Range,
    ) -> Result<(Option<FoundStep>, Vec<Event>)> {
        self.device.load(with(medium, pieces));
        self.device.record();
        let mounted = self.mount(&self.recorded).ok();
        let found = self.check_mounted(kind, mounted, model, range)?;
        Ok((found, self.device.take_history()))
    }

    fn check_mounted(
        &mut self,
        kind: Kind,
        mounted: Option<Mounted>,
        model: &mut Model,
        range: Range,
    ) -> Result<Option<FoundStep>> {
        let Some(mounted) = mounted else {
            return Ok(None);
        };
        let place = self.place()?;
        let found = check(kind, &place, model, range.acknowledged, range.started);
        mounted.unmount()?;
        Ok(Some(found))
    }

    /// Counts a state, and keeps its image if the state should have been recovered.
    fn count(
        &self,
        row: &mut Row,
        o: &Options,
        found: Option<FoundStep>,
        what: &str,
        medium: &[u8],
        pieces: &[Piece],
    ) -> Result<()> {
        let Some(found) = found else {
            row.unmountable += 1;
            return Ok(());
        };
        if let (Err(why), Some(dir), true) = (&found, &o.keep, row.kind.must_stand()) {
            std::fs::create_dir_all(dir)?;
            let name = what.replace([',', ' '], "-");
            std::fs::write(dir.join(format!("{name}.img")), with(medium, pieces))?;
            std::fs::write(dir.join(format!("{name}.txt")), why)?;
        }
        row.add(found, || what.to_owned());
        Ok(())
    }
}

/// The range of steps of which one must be found.
#[derive(Clone, Copy)]
struct Range {
    acknowledged: u64,
    started: u64,
}

/// The step that was found, or what is wrong.
type FoundStep = std::result::Result<u64, String>;

pub(crate) fn put(medium: &mut [u8], at: u64, bytes: &[u8]) {
    medium[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
}

fn with(medium: &[u8], pieces: &[Piece]) -> Vec<u8> {
    let mut all = medium.to_vec();
    pieces
        .iter()
        .for_each(|(at, bytes)| put(&mut all, *at, bytes));
    all
}

/// All writes of a history.
fn all(history: &[Event]) -> impl Iterator<Item = Piece> {
    history.iter().filter_map(|e| match e {
        Event::Write(at, bytes) | Event::Forced(at, bytes) => Some((*at, bytes.clone())),
        Event::Flush => None,
    })
}

/// What there may be of a forced write that was not answered yet.
fn begun(next: Option<&Event>, rng: &mut Rng) -> Vec<Piece> {
    match next {
        Some(Event::Forced(at, bytes)) if rng.coin() => {
            survivors(&[Event::Write(*at, bytes.clone())], rng)
        }
        _ => Vec::new(),
    }
}

/// The step that a request acknowledges; `acks`: where on the device.
fn ack(e: &Event, acks: u64) -> Option<u64> {
    match e {
        Event::Write(at, bytes) | Event::Forced(at, bytes) if *at == acks => acks::of_sector(bytes),
        _ => None,
    }
}

/// The position behind the last flush.
pub(crate) fn last_flush(history: &[Event]) -> Option<usize> {
    let at = history.iter().rposition(|e| *e == Event::Flush)?;
    Some(at + 1)
}

/// The moments of power loss, each as the number of requests before it: often at a flush,
/// seldom while everything is being set up.
fn moments(history: &[Event], acks: u64, rng: &mut Rng, n: u64) -> Vec<usize> {
    let first = history
        .iter()
        .position(|e| ack(e, acks).is_some())
        .unwrap_or(0);
    let flushes: Vec<usize> = (first..history.len())
        .filter(|i| history[*i] == Event::Flush)
        .collect();
    (0..n)
        .map(|i| match i % 8 {
            0 => rng.below(first as u64 + 1) as usize,
            1..=3 if !flushes.is_empty() => *rng.pick(&flushes),
            _ => rng.between(first as u64, history.len() as u64) as usize,
        })
        .collect()
}

/// The parts of writes that were not flushed but reach the medium.
pub(crate) fn survivors(writes: &[Event], rng: &mut Rng) -> Vec<Piece> {
    let forced = |e: &Event| matches!(e, Event::Forced(..));
    let others: Vec<&Event> = writes.iter().filter(|e| **e != Event::Flush).collect();
    let cached: Vec<usize> = (0..others.len()).filter(|i| !forced(others[*i])).collect();
    let one = match cached.is_empty() {
        true => 0,
        false => *rng.pick(&cached),
    };
    let forced: Vec<bool> = others.iter().map(|e| forced(e)).collect();
    let writes: Vec<Piece> = all(writes).collect();
    let (mode, rate) = (rng.below(8), *rng.pick(&[100, 500, 900]));
    let mut out = Vec::new();
    for (i, (at, bytes)) in writes.into_iter().enumerate() {
        let whole = match mode {
            _ if forced[i] => Some(true),
            0 | 1 => Some(true),
            2 => Some(i != one),
            3 => Some(i == one),
            4 | 5 => Some(rng.per_mille(rate)),
            _ => match rng.below(3) {
                0 => None,
                n => Some(n == 1),
            },
        };
        match whole {
            Some(true) => out.push((at, bytes)),
            Some(false) => {}
            None => {
                let size = *rng.pick(&PIECES);
                for (n, piece) in bytes.chunks(size).enumerate() {
                    if rng.coin() {
                        out.push((at + (n * size) as u64, piece.to_vec()));
                    }
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forced write is there, whole and above what came before, whatever is lost of others; and is no flush.
    #[test]
    fn a_forced_write_is_there_and_makes_nothing_else_durable() {
        let of = |n: u8| vec![n; 8192];
        let history = [
            Event::Write(0, of(1)),
            Event::Write(65536, of(2)),
            Event::Forced(4096, of(3)),
            Event::Write(131072, of(4)),
        ];
        assert_eq!(last_flush(&history), None);
        let mut rng = Rng::new(5);
        let mut lost = [0; 3];
        for _ in 0..500 {
            let mut medium = vec![0xff; 3 * 65536];
            for (at, piece) in survivors(&history, &mut rng) {
                put(&mut medium, at, &piece);
            }
            assert_eq!(medium[4096..12288], of(3));
            for (i, at) in [0, 65536, 131072].into_iter().enumerate() {
                lost[i] += usize::from(medium[at..at + 4096].contains(&0xff));
            }
        }
        assert!(lost.iter().all(|n| *n > 50), "{lost:?}");
        // One that was not answered may be torn, or not be there.
        let (mut none, mut whole, mut torn) = (0, 0, 0);
        for _ in 0..500 {
            let pieces = begun(Some(&history[2]), &mut rng);
            match pieces.iter().map(|(_, b)| b.len()).sum() {
                0 => none += 1,
                8192 => whole += 1,
                _ => torn += 1,
            }
        }
        assert!(none > 0 && whole > 0 && torn > 0, "{none} {whole} {torn}");
        assert_eq!(begun(Some(&history[3]), &mut rng), []);
    }

    /// Each write may be missing, alone or with others, be the only one there, or be torn
    /// at sectors; what is there is what was written, at its place.
    #[test]
    fn survivors_are_of_every_kind() {
        let bytes = |n: u8| {
            (0..8192u32)
                .map(|i| (i / 512) as u8 ^ n)
                .collect::<Vec<u8>>()
        };
        let history: Vec<Event> = (0..3)
            .map(|n| Event::Write(n as u64 * 65536, bytes(n)))
            .collect();
        let mut rng = Rng::new(1);
        let mut kinds = std::collections::BTreeSet::new();
        for _ in 0..2000 {
            let mut medium = vec![0xff; 3 * 65536];
            for (at, piece) in survivors(&history, &mut rng) {
                medium[at as usize..at as usize + piece.len()].copy_from_slice(&piece);
            }
            let kind = |n: u8| {
                let at = n as usize * 65536;
                let (got, want) = (&medium[at..at + 8192], bytes(n));
                assert!(medium[at + 8192..at + 65536].iter().all(|b| *b == 0xff));
                let there: Vec<bool> = got
                    .chunks(512)
                    .zip(want.chunks(512))
                    .map(|(g, w)| {
                        assert!(g == w || g.iter().all(|b| *b == 0xff));
                        g == w
                    })
                    .collect();
                let halves = there.chunks(8).all(|c| c.iter().all(|x| *x == c[0]));
                match there.iter().filter(|t| **t).count() {
                    0 => 'n',
                    16 => 'a',
                    _ if halves => 'h',
                    _ => 's',
                }
            };
            kinds.insert([kind(0), kind(1), kind(2)]);
        }
        for want in [
            "aaa", "nnn", "ana", "nan", "naa", "aan", "sns", "hna", "ssh",
        ] {
            let want: Vec<char> = want.chars().collect();
            assert!(kinds.iter().any(|k| k[..] == want[..]), "{want:?}");
        }
    }
}
