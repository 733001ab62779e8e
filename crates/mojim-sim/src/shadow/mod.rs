//! The shadow durable image: at every fence of a system over persistent memory,
//! every state that a power cut may leave is recovered and compared.
//!
//! Owns the model of what must be found, the lives of a machine under one seed,
//! and the list of what is broken on purpose. Invariants: the same seed gives
//! the same states; every system, the shipped engine and the controls alike,
//! is judged by the same model.
//!
//! A seed is a handful of lives. In each the machine starts from a state that
//! the last one was left in, recovers, commits, checkpoints, perhaps ends
//! cleanly; the states are looked at from the first fence of the recovery, or
//! only after some dozens of sync points, when the logs have wrapped. At one
//! state of each fence the recovery itself is cut off at each of its fences.

mod controls;
mod engine;
mod medium;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::rng::Rng;
use crate::run::panic_text;
use controls::Control;
use engine::Engine;
use medium::{Image, Omit, Recorder, Shadow};

pub use medium::Looked;

/// Of a fence with more states than are all looked at.
const SAMPLE: u64 = 256;
/// Likewise, where a recovery is cut off.
const SAMPLE_WITHIN: u64 = 12;

/// What is broken, or which control program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Stores into the data in place, then flushes.
    Naive,
    /// Acknowledges before the flush.
    Nosync,
    /// A correct redo log: nothing is broken.
    Log,
    /// One flush writes nothing back.
    SkipFlush,
    /// One flush leaves its last line out.
    SkipLine,
    /// One flush is not fenced.
    SkipFence,
    /// One sync of a file does nothing.
    SkipSync,
    /// The engine's `ack_early`.
    AckEarly,
    /// The engine's `apply_before_log`.
    ApplyBeforeLog,
}

impl Broken {
    /// All of them, with their names, and whether it must be noticed.
    pub const ALL: [(Broken, &'static str, bool); 9] = [
        (Broken::Naive, "naive (control)", true),
        (Broken::Nosync, "nosync (control)", true),
        (Broken::Log, "log (control)", false),
        (Broken::SkipFlush, "skip_flush", true),
        (Broken::SkipLine, "skip_line", true),
        (Broken::SkipFence, "skip_fence", true),
        (Broken::SkipSync, "skip_sync", true),
        (Broken::AckEarly, "ack_early", true),
        (Broken::ApplyBeforeLog, "apply_before_log", true),
    ];

    fn is_control(self) -> bool {
        matches!(self, Broken::Naive | Broken::Nosync | Broken::Log)
    }
}

/// A file, as it is or must be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Named {
    id: u32,
    bytes: Arc<Vec<u8>>,
}

type Content = BTreeMap<String, Named>;

/// What sync points there were, and which were acknowledged.
struct Known {
    /// The content after each, ascending.
    states: Vec<(u64, Content)>,
    acked: u64,
}

type Model = Mutex<Known>;

fn lock(m: &Model) -> MutexGuard<'_, Known> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Known {
    fn last(&self) -> &Content {
        &self.states.last().expect("never empty").1
    }

    fn judge(&self, lsn: u64, found: &Content) -> Result<(), String> {
        if lsn < self.acked {
            return Err(format!(
                "lost: {} was acknowledged, {lsn} is the last that is found",
                self.acked
            ));
        }
        let state = self.states.iter().rev().find(|s| s.0 == lsn);
        let Some((_, content)) = state else {
            return Err(format!("torn: {lsn} is no end of a sync point"));
        };
        if found == content {
            return Ok(());
        }
        let odd = |a: &Content, b: &Content| {
            let mut names = a.iter().filter(|(n, f)| b.get(*n) != Some(f));
            names.next().map(|(n, _)| n.clone())
        };
        let which = odd(found, content).or_else(|| odd(content, found));
        Err(format!(
            "torn: {} is not as of {lsn}",
            which.unwrap_or_default()
        ))
    }
}

/// What runs on the machine.
trait System: Sized {
    /// Starts, recovering what is there.
    fn open(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Self, String>;
    /// The last sync point, and the content as of it. Where nothing is open.
    fn found(&self) -> Result<(u64, Content), String>;
    /// What a recovery finds: where starting takes more than that, without it.
    fn recovered(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<(u64, Content), String> {
        Self::open(env, broken)?.found()
    }
    /// Does something.
    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String>;
    /// Ends cleanly.
    fn end(&mut self, model: &Model) -> Result<(), String>;
}

/// What a recovery of `image` finds.
fn recover<S: System>(
    image: &Image,
    boot: u64,
    broken: Option<Broken>,
) -> Result<(u64, Content), String> {
    S::recovered(&Shadow::start(image, boot, None), broken)
}

/// The recovery of `image`, cut off at each of its fences and begun again.
fn cut_off<S: System>(
    image: &Image,
    broken: Option<Broken>,
    must: &(u64, Content),
    rng: &mut Rng,
) -> Result<Looked, String> {
    let boot = rng.next_u64();
    let (lsn, content) = must.clone();
    let check = move |image: &Image, _| {
        let found = recover::<S>(image, boot + 1, broken)?;
        let model = Known {
            states: vec![(lsn, content.clone())],
            acked: lsn,
        };
        model.judge(found.0, &found.1)?;
        Ok(Looked::default())
    };
    let recorder = Recorder::new(rng.fork(), SAMPLE_WITHIN, Box::new(check));
    let env = Shadow::start(image, boot, Some(recorder));
    let opened = S::open(&env, broken);
    let (looked, failure) = env.seen();
    match failure {
        Some(e) => Err(format!("{e}, where a recovery was cut off")),
        None => opened.map(|_| looked),
    }
}

fn life<S: System + 'static>(
    image: &Image,
    broken: Option<Broken>,
    model: &Arc<Model>,
    rng: &mut Rng,
) -> Result<(Image, Looked), (Looked, String)> {
    let env = Shadow::start(image, rng.next_u64(), None);
    let mut within = rng.fork();
    let of = model.clone();
    let check = move |image: &Image, close: bool| {
        let found = recover::<S>(image, within.next_u64(), broken)?;
        lock(&of).judge(found.0, &found.1)?;
        match close {
            true => cut_off::<S>(image, broken, &found, &mut within),
            false => Ok(Looked::default()),
        }
    };
    let recorder = Recorder::new(rng.fork(), SAMPLE, Box::new(check));
    let number = Some(rng.below(8));
    let omit = match broken {
        Some(Broken::SkipFlush) => Omit {
            flush: number,
            ..Omit::default()
        },
        Some(Broken::SkipLine) => Omit {
            line: number,
            ..Omit::default()
        },
        Some(Broken::SkipFence) => Omit {
            fence: number,
            ..Omit::default()
        },
        Some(Broken::SkipSync) => Omit {
            sync: number,
            ..Omit::default()
        },
        _ => Omit::default(),
    };
    let at_once = rng.below(3) == 0;
    let before = rng.between(10, 80);
    let after = rng.between(4, 10);
    let clean = rng.below(4) == 0;
    let failed = |e: String| {
        let (looked, first) = env.seen();
        (looked, first.unwrap_or(e))
    };
    let mut recorder = Some(recorder);
    if at_once {
        env.record(recorder.take().expect("once"), omit);
    }
    let mut system = S::open(&env, broken).map_err(failed)?;
    let found = system.found().map_err(failed)?;
    lock(model).judge(found.0, &found.1).map_err(failed)?;
    if let Some(recorder) = recorder {
        for _ in 0..before {
            system.step(rng, model).map_err(failed)?;
        }
        env.record(recorder, omit);
    }
    for _ in 0..after {
        system.step(rng, model).map_err(failed)?;
        if env.has_failed() {
            return Err(failed(String::new()));
        }
    }
    env.look();
    if clean {
        system.end(model).map_err(failed)?;
        env.look();
    }
    match env.seen() {
        (looked, Some(e)) => Err((looked, e)),
        (looked, None) => Ok((env.cut(), looked)),
    }
}

fn lives<S: System + 'static>(
    seed: u64,
    broken: Option<Broken>,
    looked: &mut Looked,
) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut image = Image::default();
    let first = match broken {
        Some(b) if b.is_control() => recover::<S>(&image, 1, broken)?.1,
        _ => Content::new(),
    };
    let model = Arc::new(Mutex::new(Known {
        states: vec![(0, first)],
        acked: 0,
    }));
    for _ in 0..rng.between(2, 5) {
        match life::<S>(&image, broken, &model, &mut rng) {
            Ok((left, more)) => {
                looked.add(&more);
                image = left;
            }
            Err((more, e)) => {
                looked.add(&more);
                return Err(e);
            }
        }
        // What is there now is there for good, and nothing else is.
        let (lsn, _) = recover::<S>(&image, rng.next_u64(), broken)?;
        let mut m = lock(&model);
        m.states.retain(|s| s.0 <= lsn);
        m.acked = lsn;
    }
    Ok(())
}

/// What one seed, or many, came to.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    /// Seeds.
    pub seeds: u64,
    /// What was looked at.
    pub looked: Looked,
    /// The seeds that failed, and why.
    pub failures: Vec<(u64, String)>,
}

/// Runs one seed. Panics are caught with [`crate::run::catch_panics`].
pub fn run(seed: u64, broken: Option<Broken>) -> Shown {
    let mut looked = Looked::default();
    let result = catch_unwind(AssertUnwindSafe(|| match broken {
        Some(b) if b.is_control() => lives::<Control>(seed, broken, &mut looked),
        _ => lives::<Engine>(seed, broken, &mut looked),
    }));
    let failure = match result {
        Ok(r) => r.err(),
        Err(p) => Some(format!("panic: {}", panic_text(&*p))),
    };
    Shown {
        seeds: 1,
        looked,
        failures: failure.into_iter().map(|f| (seed, f)).collect(),
    }
}

/// Runs seeds from `first` on until at least `states` were looked at.
pub fn run_states(states: u64, first: u64, jobs: u64, told: impl Fn(&Shown) + Sync) -> Shown {
    let next = AtomicU64::new(first);
    let total = Mutex::new(Shown::default());
    let work = || loop {
        let seed = next.fetch_add(1, Relaxed);
        let one = run(seed, None);
        let mut total = total.lock().expect("no thread panics");
        // What one found counts, also where the others have looked at enough.
        total.failures.extend(one.failures);
        if total.looked.states() >= states {
            return;
        }
        total.seeds += 1;
        total.looked.add(&one.looked);
        told(&total);
    };
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
    let mut total = total.into_inner().expect("no thread panics");
    total.failures.sort();
    total
}

/// The first of `most` seeds at which something broken is noticed as a sync
/// point that is lost or torn, and the states looked at until then.
pub fn catch(broken: Broken, first: u64, most: u64) -> (Looked, Option<(u64, String)>) {
    let mut looked = Looked::default();
    for seed in first..first + most {
        let one = run(seed, Some(broken));
        looked.add(&one.looked);
        let mut failures = one.failures.into_iter();
        let as_what = |f: &(u64, String)| f.1.starts_with("lost") || f.1.starts_with("torn");
        if let Some(f) = failures.find(as_what) {
            return (looked, Some(f));
        }
    }
    (looked, None)
}
