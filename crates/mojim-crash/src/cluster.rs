//! Power for clusters: two nodes, each on a device that records its requests, with real
//! daemons and a program of several threads. At any moment of this run nodes lose their
//! power, and come back or not. Then what the cluster serves is compared with what was
//! acknowledged.
//!
//! Owns the choice of states, and what each may have lost: the tables of
//! `docs/reference/two-failures.md`. A state is a moment of the common clock. For each node that
//! loses its power, the state has what its device had flushed before, and any part of the
//! rest (as in `blocks.rs`). Its memory is gone. A node that loses only its processes
//! keeps its page cache and its memory.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mojim_sim::Rng;
use serde_json::{Value, json};

use crate::Result;
use crate::blocks::{Piece, last_flush, put, survivors};
use crate::device::Event;
use crate::journal::Told;
use crate::machine::Fault;
use crate::sys::{self, Lab};

mod live;
pub mod mounted;
mod names;
pub mod parts;
pub mod program;
pub mod setup;
mod shown;
mod stand;
mod thread;

use live::{DISK, DISK_OF_A_MOUNT, End, Faults, History, Stage};
use names::Reached;
use program::{PART, Slip};
use setup::{Mode, NODES, Places, Setup};
use stand::{Back, Outcome, Plan, Stand};
use thread::Thread;

/// How the rung runs.
pub struct Options {
    /// The command `mojim-crash`.
    pub exe: PathBuf,
    /// The names of the subjects; all subjects if empty.
    pub subjects: Vec<String>,
    /// The modes in which `mojim` runs.
    pub modes: Vec<Mode>,
    /// Whether there is a register; both may be wanted.
    pub registers: Vec<bool>,
    /// What happens to the nodes.
    pub failures: Vec<Failures>,
    /// The number of states of `mojim`.
    pub states: u64,
    /// The most states of a subject that must be caught.
    pub tries: u64,
    /// How often a subject that must be caught must fail.
    pub enough: u64,
    /// States of one history.
    pub of_each: u64,
    /// Steps of each thread in one history.
    pub steps: u64,
    /// Histories that are examined at the same time.
    pub jobs: usize,
    /// The first seed.
    pub seed: u64,
    /// After this time no new history is begun.
    pub limit: Duration,
    /// Prints each failure when it is found.
    pub loud: bool,
}

/// What happens to the two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failures {
    /// Both lose their power and come back.
    Both,
    /// `a` is lost for good, `b` loses its power.
    AGone,
    /// `b` is lost for good, `a` loses its power.
    BGone,
    /// `a` loses everything and comes back with an empty disk, `b` loses its power.
    AEmpty,
    /// `b` loses everything and comes back with an empty disk, `a` loses its power.
    BEmpty,
    /// `a` loses its power, `b` its processes.
    APower,
    /// `b` loses its power, `a` its processes.
    BPower,
}

impl Failures {
    /// All failures, with the words that choose them.
    pub const ALL: [(Failures, &'static str); 7] = [
        (Failures::Both, "both"),
        (Failures::AGone, "a-gone"),
        (Failures::BGone, "b-gone"),
        (Failures::AEmpty, "a-empty"),
        (Failures::BEmpty, "b-empty"),
        (Failures::APower, "a-power"),
        (Failures::BPower, "b-power"),
    ];

    /// The failures that `word` chooses.
    pub fn of(word: &str) -> std::result::Result<Failures, String> {
        let found = Failures::ALL.into_iter().find(|(_, w)| *w == word);
        found
            .map(|(f, _)| f)
            .ok_or_else(|| format!("one of {}", Failures::ALL.map(|(_, w)| w).join(", ")))
    }

    /// The failures that can be made from any moment of a history.
    const POWER: [Failures; 5] = [
        Failures::Both,
        Failures::AGone,
        Failures::BGone,
        Failures::AEmpty,
        Failures::BEmpty,
    ];

    fn name(self) -> &'static str {
        match self {
            Failures::Both => "a's power, b's power",
            Failures::AGone => "a for good, b's power",
            Failures::BGone => "a's power, b for good",
            Failures::AEmpty => "a comes back empty, b's power",
            Failures::BEmpty => "a's power, b comes back empty",
            Failures::APower => "a's power, b's processes",
            Failures::BPower => "a's processes, b's power",
        }
    }

    fn plan(self, register: bool, rng: &mut Rng) -> Plan {
        let (attach, promote) = match self {
            // With a register the node that is left goes on by itself.
            Failures::AGone | Failures::AEmpty if register => (Some(1), 1),
            Failures::AGone => (None, 1),
            Failures::AEmpty => (Some(0), 1),
            // An attach that waits for the lost node takes seconds, so it is seldom
            // tried.
            Failures::BGone => ((rng.below(40) == 0).then_some(0), 0),
            _ => (Some(0), 0),
        };
        Plan { attach, promote }
    }
}

/// What may be missing, by the tables of the guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// Nothing.
    Kept,
    /// The last sync points, after an promotion by hand.
    Part,
    /// Everything: no node serves the volume.
    Lost,
}

fn allowed_loss(mode: Mode, failures: Failures) -> Loss {
    use Failures::*;
    match (mode, failures) {
        (_, APower | BPower) => Loss::Kept,
        (Mode::Async, AGone | AEmpty) => Loss::Part,
        (Mode::SyncDisk, AGone | AEmpty) => Loss::Lost,
        (Mode::SyncDisk, Both) => Loss::Part,
        (Mode::Sync | Mode::SyncDisk, BGone | BEmpty) => Loss::Part,
        _ => Loss::Kept,
    }
}

/// A system under test.
struct Subject {
    name: &'static str,
    /// The modes to run in; all that were asked for if empty.
    modes: &'static [Mode],
    faults: Faults,
    /// The fault of the machines on which it recovers.
    recovers: Option<Fault>,
    /// The mode that the program's own configuration has, if it differs.
    believed: Option<Mode>,
    /// With these words for `mojim mount`, if the program works in a mount.
    mount: Option<&'static [&'static str]>,
    /// Whether that mount's requests come over io_uring.
    uring: bool,
    /// The mistake of the program in the mount.
    slip: Option<Slip>,
    /// Whether that program has one thread only, so that no other one's sync point commits a part
    /// of its steps.
    alone: bool,
    /// Whether it must pass; the others must be caught.
    stands: bool,
}

const MOJIM: Subject = Subject {
    name: "mojim",
    modes: &[],
    faults: [None, None],
    recovers: None,
    believed: None,
    mount: None,
    uring: false,
    slip: None,
    alone: false,
    stands: true,
};

impl Subject {
    fn made(&self) -> live::Made {
        live::Made {
            faults: self.faults,
            mount: self.mount,
            slip: self.slip,
        }
    }

    /// The cluster in which it runs.
    fn setup(&self, mut setup: Setup) -> Setup {
        setup.believed = self.believed.unwrap_or(setup.mode);
        if self.mount.is_some() {
            setup.for_a_mount(self.alone, self.uring);
        }
        setup
    }
}

/// A mount that commits what is synced, and nothing else.
const MOUNT: Subject = Subject {
    name: "mount",
    mount: Some(&["--commit-interval", "never"]),
    ..MOJIM
};

/// The same over io_uring.
const MOUNT_OVER_URING: Subject = Subject {
    name: "mount-uring",
    uring: true,
    ..MOUNT
};

/// The subjects that must be caught.
const BROKEN: [Subject; 14] = [
    Subject {
        name: "mirror-no-log-flush",
        modes: &[Mode::Sync],
        faults: [None, Some(Fault::NoLogFlush)],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "mirror-no-superblock-flush",
        modes: &[Mode::Sync],
        faults: [None, Some(Fault::NoSuperblockFlush)],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "mirror-data-first",
        modes: &[Mode::Sync],
        faults: [None, Some(Fault::DataFirst)],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "mirror-superblock-late",
        modes: &[Mode::Sync],
        faults: [None, Some(Fault::SuperblockLate)],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "primary-superblock-late",
        modes: &[Mode::SyncFlush],
        faults: [Some(Fault::SuperblockLate), None],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "primary-no-superblock-flush",
        modes: &[Mode::SyncFlush],
        faults: [Some(Fault::NoSuperblockFlush), None],
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "without-the-mirror",
        modes: &[Mode::SyncFlush],
        believed: Some(Mode::Async),
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "ring-forgotten",
        modes: &[Mode::Sync],
        recovers: Some(Fault::ForgetRing),
        stands: false,
        ..MOJIM
    },
    Subject {
        name: "mount-without-the-mirror",
        modes: &[Mode::SyncFlush],
        believed: Some(Mode::Async),
        stands: false,
        ..MOUNT
    },
    // Each step is two sync points.
    Subject {
        name: "mount-half-steps",
        modes: &[Mode::Sync],
        slip: Some(Slip::HalfSteps),
        stands: false,
        ..MOUNT
    },
    Subject {
        name: "mount-uring-half-steps",
        modes: &[Mode::Sync],
        slip: Some(Slip::HalfSteps),
        stands: false,
        ..MOUNT_OVER_URING
    },
    // The same with steps on names alone.
    Subject {
        name: "mount-half-names",
        modes: &[Mode::Sync],
        slip: Some(Slip::HalfNames),
        alone: true,
        stands: false,
        ..MOUNT
    },
    // What was acknowledged of names comes with a later sync point.
    Subject {
        name: "mount-names-late",
        modes: &[Mode::SyncFlush],
        slip: Some(Slip::UnsyncedNames),
        alone: true,
        stands: false,
        ..MOUNT
    },
    // It commits also what no program has synced, at moments of its own.
    Subject {
        name: "mount-commits-early",
        mount: Some(&["--commit-interval", "0.01"]),
        alone: true,
        stands: false,
        ..MOUNT
    },
];

/// The results for one subject, mode and kind of failures.
#[derive(Debug, Clone, Default)]
struct Row {
    states: u64,
    /// Everything acknowledged was there.
    kept: u64,
    /// Something was missing that may be missing, after an promotion by hand.
    allowed: u64,
    /// Something else was missing, or no node served.
    lost: u64,
    /// A part of a step was there, or a step without one before it.
    torn: u64,
    unmountable: u64,
    first: Option<String>,
}

impl Row {
    fn failures(&self) -> u64 {
        self.lost + self.torn
    }

    fn join(&mut self, other: Row) {
        self.states += other.states;
        self.kept += other.kept;
        self.allowed += other.allowed;
        self.lost += other.lost;
        self.torn += other.torn;
        self.unmountable += other.unmountable;
        self.first = self.first.take().or(other.first);
    }
}

const NO_URING: &str = "FUSE over io_uring needs Linux 6.14 with CONFIG_FUSE_IO_URING";

type Rows = BTreeMap<(bool, String, Failures), Row>;

/// Runs the rung.
pub fn run(o: &Options) -> Result<Report> {
    let begun = Instant::now();
    let mut found = Vec::new();
    let standing = [&MOJIM, &MOUNT, &MOUNT_OVER_URING];
    for subject in standing.into_iter().chain(&BROKEN) {
        if !o.subjects.is_empty() && o.subjects.iter().all(|s| s != subject.name) {
            continue;
        }
        if subject.uring && !sys::has_uring() {
            // Said also by a test that passes.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {}: {NO_URING}", subject.name);
            continue;
        }
        found.push((subject, look_at(o, subject)?));
    }
    Ok(Report {
        subjects: found,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

fn look_at(o: &Options, subject: &Subject) -> Result<Rows> {
    let must_stand = subject.stands;
    let states = if must_stand { o.states } else { o.tries };
    let begun = Instant::now();
    let total = Mutex::new(Rows::new());
    let next = AtomicU64::new(0);
    let goes_on = || {
        let rows = total.lock().expect("no thread panics");
        let seen: u64 = rows.values().map(|r| r.states).sum();
        let failures: u64 = rows.values().map(Row::failures).sum();
        seen < states && begun.elapsed() < o.limit && (must_stand || failures < o.enough)
    };
    let job = || -> Result<()> {
        let mut bench = Bench::new(o, subject)?;
        while goes_on() {
            let n = next.fetch_add(1, Relaxed);
            let rows = bench.look_at(o, subject, n)?;
            let mut total = total.lock().expect("no thread panics");
            for (key, row) in rows {
                total.entry(key).or_default().join(row);
            }
        }
        Ok(())
    };
    std::thread::scope(|s| {
        let jobs: Vec<_> = (0..o.jobs).map(|_| s.spawn(job)).collect();
        jobs.into_iter().try_for_each(|j| match j.join() {
            Ok(done) => done,
            Err(e) => std::panic::resume_unwind(e),
        })
    })?;
    Ok(total.into_inner().expect("no thread panics"))
}

/// The mode of the `n`th history of a subject, and whether this history has a register.
fn turn(o: &Options, subject: &Subject, n: usize) -> (Mode, bool) {
    let modes = match subject.modes {
        [] => &o.modes,
        modes => modes,
    };
    let mode = modes[n % modes.len()];
    let turn = n / modes.len();
    // The mode `async` has none.
    let has_none = mode == Mode::Async || subject.believed == Some(Mode::Async);
    let register = o.registers[turn % o.registers.len()] && !has_none;
    (mode, register)
}

/// How a cluster's life ends: by a kill of one node's processes, in one history of three
/// if this is asked for, and in all if no power failures are.
fn end_of_life(o: &Options, of_power: &[Failures], rng: &mut Rng) -> End {
    let alone: Vec<usize> = [Failures::BPower, Failures::APower]
        .iter()
        .enumerate()
        .filter(|(_, f)| o.failures.contains(f))
        .map(|(node, _)| node)
        .collect();
    match rng.below(3) {
        n if !alone.is_empty() && (n == 0 || of_power.is_empty()) => End::Killed {
            node: *rng.pick(&alone),
            step: rng.between(1, o.steps - o.steps / 4),
        },
        _ => End::Done,
    }
}

/// The disks of one job.
struct Bench {
    // In the order in which they must be dropped.
    stand: Stand,
    stage: Stage,
    places: Places,
    _lab: Lab,
}

impl Bench {
    fn new(o: &Options, subject: &Subject) -> Result<Bench> {
        let lab = Lab::new()?;
        let size = match subject.mount {
            Some(_) => DISK_OF_A_MOUNT,
            None => DISK,
        };
        let stage = Stage::new(&lab, &o.exe, size)?;
        let places = Places::new(lab.path("cluster"));
        let stand = Stand::new(&lab, places.clone(), stage.pristine(), &o.exe)?;
        Ok(Bench {
            stand,
            stage,
            places,
            _lab: lab,
        })
    }

    /// Checks states of the `n`th history.
    fn look_at(&mut self, o: &Options, subject: &Subject, n: u64) -> Result<Rows> {
        let seed = o.seed + n;
        let (mode, register) = turn(o, subject, n as usize);
        let setup = subject.setup(Setup::new(seed, mode, register, o.steps));
        let mut rng = Rng::new(seed ^ 0x0c10_57e4);
        let wanted = |f: &Failures| o.failures.contains(f);
        let of_power: Vec<Failures> = Failures::POWER.into_iter().filter(wanted).collect();
        let end = end_of_life(o, &of_power, &mut rng);
        let places = &self.places;
        let history = self.stage.run(places, &setup, subject.made(), end)?;
        let of_each = match end {
            End::Done => o.of_each,
            // Such a history has only one moment of failure.
            End::Killed { .. } => o.of_each / 4,
        };
        let mut rows = Rows::new();
        let model = |t| Thread::new(seed, t, setup.threads, setup.mounted);
        let mut models: Vec<_> = (0..setup.threads).map(model).collect();
        let mut disks: Vec<_> = history
            .nodes
            .iter()
            .map(|past| Disk::new(past, self.stage.pristine()))
            .collect();
        for moment in moments(&history, &mut rng, of_each) {
            disks.iter_mut().for_each(|d| d.go_to(moment));
            let failures = match &history.kept {
                Some(k) if k.node == 0 => Failures::BPower,
                Some(_) => Failures::APower,
                None => *rng.pick(&of_power),
            };
            let plan = failures.plan(register, &mut rng);
            let back: Vec<Back<'_>> = disks
                .iter()
                .enumerate()
                .map(|(i, d)| back(failures, &history, i, d, &mut rng))
                .collect();
            let (outcome, said) = self.stand.recover(&setup, &back, plan, subject.recovers)?;
            let key = (register, mode.name().to_owned(), failures);
            let row = rows.entry(key).or_default();
            let judged = judge(
                outcome,
                allowed_loss(mode, failures),
                &history.told,
                moment,
                &mut models,
            );
            let bad = row.count(judged, || {
                format!(
                    "seed {seed} ({n}), {}, moment {moment} of {}",
                    failures.name(),
                    history.end
                )
            });
            if let (Some(bad), true) = (bad, o.loud) {
                eprintln!(
                    "{}, {}{}: {bad}\n{said}",
                    subject.name,
                    mode.name(),
                    if register { ", register" } else { "" }
                );
            }
            let failures: u64 = rows.values().map(Row::failures).sum();
            if !subject.stands && failures >= o.enough {
                break;
            }
        }
        Ok(rows)
    }
}

/// A node's device as time goes on.
struct Disk<'a> {
    events: &'a [Event],
    times: &'a [u64],
    /// What is on the medium in any case.
    medium: Vec<u8>,
    /// The number of requests that `medium` has.
    durable: usize,
    seen: usize,
}

impl<'a> Disk<'a> {
    fn new(past: &'a live::Past, pristine: &[u8]) -> Disk<'a> {
        Disk {
            events: &past.events,
            times: &past.times,
            medium: pristine.to_vec(),
            durable: 0,
            seen: 0,
        }
    }

    fn go_to(&mut self, moment: u64) {
        self.seen = self.times.partition_point(|t| *t < moment);
        let flushed = last_flush(&self.events[self.durable..self.seen]).unwrap_or(0);
        for e in &self.events[self.durable..self.durable + flushed] {
            if let Event::Write(at, bytes) | Event::Forced(at, bytes) = e {
                put(&mut self.medium, *at, bytes);
            }
        }
        self.durable += flushed;
    }

    fn unflushed(&self) -> &'a [Event] {
        &self.events[self.durable..self.seen]
    }
}

fn back<'a>(
    failures: Failures,
    history: &'a History,
    node: usize,
    disk: &'a Disk<'_>,
    rng: &mut Rng,
) -> Back<'a> {
    use Failures::*;
    if let Some(k) = history.kept.as_ref().filter(|k| k.node == node) {
        return Back::Kept(&k.disk, &k.ring);
    }
    match (failures, NODES[node]) {
        (AGone, "a") | (BGone, "b") => Back::Gone,
        (AEmpty, "a") | (BEmpty, "b") => Back::Empty,
        // The witness keeps its power.
        (_, "w") => Back::Power(&disk.medium, written(disk.unflushed())),
        _ => Back::Power(&disk.medium, survivors(disk.unflushed(), rng)),
    }
}

fn written(events: &[Event]) -> Vec<Piece> {
    let write = |e: &Event| match e {
        Event::Write(at, bytes) | Event::Forced(at, bytes) => Some((*at, bytes.clone())),
        Event::Flush => None,
    };
    events.iter().filter_map(write).collect()
}

/// The moments of power loss, in ascending order: often just after an acknowledgement or
/// a flush of a device; seldom while everything is being set up.
fn moments(history: &History, rng: &mut Rng, n: u64) -> Vec<u64> {
    let (ready, end) = (history.told.ready, history.end);
    let first = history.kept.as_ref().map_or(ready, |k| k.since).min(end);
    let mut marks: Vec<u64> = history
        .told
        .threads
        .iter()
        .flatten()
        .map(|(_, a)| a + 1)
        .collect();
    for past in &history.nodes {
        let flushes = past.events.iter().zip(&past.times);
        marks.extend(
            flushes
                .filter(|(e, _)| **e == Event::Flush)
                .map(|(_, t)| *t),
        );
    }
    marks.retain(|t| (first..=end).contains(t));
    let mut all: Vec<u64> = (0..n)
        .map(|i| match i % 16 {
            0 if history.kept.is_none() => rng.between(1, first),
            1..=9 if !marks.is_empty() => *rng.pick(&marks),
            _ => rng.between(first, end),
        })
        .collect();
    all.sort_unstable();
    all
}

/// The verdict on a state.
enum Judged {
    Kept,
    Allowed,
    Lost(String),
    Torn(String),
    Unmountable,
}

fn judge(outcome: Outcome, loss: Loss, told: &Told, moment: u64, models: &mut [Thread]) -> Judged {
    let anything = told.ready < moment;
    let (bytes, by_hand, shown) = match outcome {
        Outcome::Unmountable => return Judged::Unmountable,
        // Before the volume exists, no node can be promoted.
        Outcome::Refused(_) if !anything => return Judged::Kept,
        Outcome::Refused(_) if loss == Loss::Lost => return Judged::Allowed,
        Outcome::Refused(why) => return Judged::Lost(format!("nobody serves: {why}")),
        Outcome::Found {
            bytes,
            by_hand,
            shown,
        } => (bytes, by_hand, shown),
    };
    if let Some(Err(e)) = shown {
        return Judged::Torn(e);
    }
    if bytes.is_empty() {
        // Files that are made at the start, by sync points of their own.
        return match (anything, loss) {
            (false, _) => Judged::Kept,
            (true, Loss::Part) if by_hand => Judged::Allowed,
            _ => Judged::Lost("a file is missing, or has another size".into()),
        };
    }
    let found = match steps(
        &bytes,
        shown.and_then(std::result::Result::ok),
        told,
        moment,
        models,
    ) {
        Ok(found) => found,
        Err(e) => return Judged::Torn(e),
    };
    let missing: Vec<String> = found
        .iter()
        .enumerate()
        .map(|(thread, r)| (thread, r.last_whole(), told.acknowledged(thread, moment)))
        .filter(|(_, n, acknowledged)| n < acknowledged)
        .map(|(thread, n, acknowledged)| {
            format!("thread {thread}: step {n} is there, {acknowledged} was acknowledged")
        })
        .collect();
    match (missing.is_empty(), loss) {
        (true, _) => Judged::Kept,
        (false, Loss::Part) if by_hand => Judged::Allowed,
        _ => Judged::Lost(format!(
            "{}{}",
            missing.join(", "),
            if by_hand {
                ", after a promotion"
            } else {
                ", without a word"
            }
        )),
    }
}

/// How far each thread has come by what was found, or what is torn.
fn steps(
    bytes: &[u8],
    shown: Option<names::Entries>,
    told: &Told,
    moment: u64,
    models: &mut [Thread],
) -> std::result::Result<Vec<Reached>, String> {
    let shares = shown.map(|s| shown::shares(s, models.len())).transpose()?;
    let mut found = Vec::new();
    for (thread, model) in models.iter_mut().enumerate() {
        let share = shares.as_ref().map(|all| &all[thread]);
        let begun = told.begun(thread, moment);
        found.push(model.step_of(&bytes[thread * PART..][..PART], share, begun)?);
    }
    let whole: Vec<u64> = found.iter().map(|r| r.last_whole()).collect();
    let part: Vec<u64> = found.iter().map(|r| r.step).collect();
    match told.disorder(&whole, &part) {
        Some(e) => Err(e),
        None => Ok(found),
    }
}

impl Row {
    /// Counts a state; returns what is wrong with it, if anything.
    fn count(&mut self, judged: Judged, what: impl FnOnce() -> String) -> Option<String> {
        if let Judged::Unmountable = judged {
            self.unmountable += 1;
            return None;
        }
        self.states += 1;
        let (counted, why) = match judged {
            Judged::Kept => (&mut self.kept, None),
            Judged::Allowed => (&mut self.allowed, None),
            Judged::Lost(e) => (&mut self.lost, Some(format!("lost: {e}"))),
            Judged::Torn(e) => (&mut self.torn, Some(format!("torn: {e}"))),
            Judged::Unmountable => unreachable!("said above"),
        };
        *counted += 1;
        let why = format!("{}: {}", what(), why?);
        self.first.get_or_insert_with(|| why.clone());
        Some(why)
    }
}

/// Everything that the rung found.
pub struct Report {
    subjects: Vec<(&'static Subject, Rows)>,
    seconds: f64,
}

fn is_right(subject: &Subject, rows: &Rows) -> bool {
    let sum = |f: fn(&Row) -> u64| rows.values().map(f).sum::<u64>();
    let (states, unmountable) = (sum(|r| r.states), sum(|r| r.unmountable));
    let compared = states > 0 && unmountable <= states / 20 + 2;
    compared && (sum(Row::failures) == 0) == subject.stands
}

impl Report {
    /// Whether every subject was caught or passed as it must.
    pub fn is_right(&self) -> bool {
        self.subjects
            .iter()
            .all(|(subject, rows)| is_right(subject, rows))
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        let row = |((register, mode, failures), r): (&(bool, String, Failures), &Row)| {
            json!({
                "mode": mode,
                "register": register,
                "failures": failures.name(),
                "states": r.states,
                "kept": r.kept,
                "allowed": r.allowed,
                "lost": r.lost,
                "torn": r.torn,
                "unmountable": r.unmountable,
                "first": r.first,
            })
        };
        let subject = |(subject, rows): &(&'static Subject, Rows)| {
            json!({
                "subject": subject.name,
                "must_fail": !subject.stands,
                "right": is_right(subject, rows),
                "rows": rows.iter().map(row).collect::<Vec<_>>(),
            })
        };
        json!({
            "rung": "power for clusters",
            "seconds": self.seconds,
            "right": self.is_right(),
            "subjects": self.subjects.iter().map(subject).collect::<Vec<_>>(),
        })
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "power for clusters, {:.0} s", self.seconds)?;
        for (subject, rows) in &self.subjects {
            let name = subject.name;
            let states: u64 = rows.values().map(|r| r.states).sum();
            let verdict = match (is_right(subject, rows), subject.stands) {
                (true, true) => "stands",
                (true, false) => "found out",
                (false, true) => "FAILED",
                (false, false) => "NOT FOUND OUT",
            };
            writeln!(f, "  {name:<28} {states:>6} states: {verdict}")?;
            for ((register, mode, failures), r) in rows {
                let with = if *register { "register" } else { "" };
                writeln!(
                    f,
                    "    {mode:<10} {with:<8} {:<30} {:>6}: {} kept, {} allowed, {} lost, {} torn, {} did not mount",
                    failures.name(),
                    r.states,
                    r.kept,
                    r.allowed,
                    r.lost,
                    r.torn,
                    r.unmountable
                )?;
                if let Some(first) = &r.first {
                    writeln!(f, "      {first}")?;
                }
            }
        }
        Ok(())
    }
}
