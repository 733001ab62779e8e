//! The shadow durable image: at every fence of a system over persistent memory,
//! every state that a power cut may leave is recovered and compared.
//!
//! Owns the lives of a machine under one seed, and how many states are looked at.
//! Invariant: the same seed gives the same states.
//!
//! A seed is a few lives. In each life the machine starts from a state that the last one
//! left, recovers, commits, checkpoints, and perhaps ends cleanly. States are looked at
//! from the first fence of the recovery, or only after some dozens of sync points, when
//! the logs have wrapped. At one state of each fence the recovery itself is cut off at
//! each of its fences.

mod append;
mod controls;
mod engine;
mod heap;
mod medium;
mod model;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::rng::Rng;
use crate::run::panic_text;
use append::Append;
use controls::Control;
use engine::Engine;
use heap::Persistent;
use medium::{Image, Omit, Recorder, Shadow};
use model::{Content, Model, SyncHistory, System};
use mojim_env::locks::lock;

pub use medium::Looked;
pub use model::Broken;

/// States drawn at such a fence of a recovery that is cut off.
const SAMPLE_WITHIN: u64 = 12;

/// Recovers `image`; returns what the recovery finds.
fn recover<S: System>(
    image: &Image,
    boot: u64,
    broken: Option<Broken>,
) -> Result<(u64, Content), String> {
    S::recovered(&Shadow::start(image, boot, None), broken)
}

/// Recovers `image`, and checks that a recovery cut off at each of its fences finds the
/// same.
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
        let model = SyncHistory {
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

/// What is left out of the steps of a life: the call of this number.
fn omitted(broken: Option<Broken>, number: u64) -> Omit {
    let (mut omit, number) = (Omit::default(), Some(number));
    match broken {
        Some(Broken::SkipFlush) => omit.flush = number,
        Some(Broken::SkipLine) => omit.line = number,
        Some(Broken::SkipFence) => omit.fence = number,
        Some(Broken::SkipSync) => omit.sync = number,
        _ => {}
    }
    omit
}

/// One life of a machine that starts from `image`. Returns what it leaves, and what was
/// looked at.
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
        match close && S::CUT_OFF {
            true => cut_off::<S>(image, broken, &found, &mut within),
            false => Ok(Looked::default()),
        }
    };
    let recorder = Recorder::new(rng.fork(), S::SAMPLE, Box::new(check));
    let omit = omitted(broken, rng.below(8));
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
    let model = Arc::new(Mutex::new(SyncHistory {
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
        // From now on exactly what this recovery finds must be there.
        let (lsn, _) = recover::<S>(&image, rng.next_u64(), broken)?;
        let mut m = lock(&model);
        m.states.retain(|s| s.0 <= lsn);
        m.acked = lsn;
    }
    Ok(())
}

/// The results of one seed, or of many.
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
        Some(Broken::Append(..)) => lives::<Append>(seed, broken, &mut looked),
        Some(Broken::Heap(_)) => lives::<Persistent>(seed, broken, &mut looked),
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

/// Runs seeds from `first` on, until at least `states` states were looked at.
pub fn run_states(states: u64, first: u64, jobs: u64, told: impl Fn(&Shown) + Sync) -> Shown {
    let next = AtomicU64::new(first);
    let total = Mutex::new(Shown::default());
    let work = || loop {
        let seed = next.fetch_add(1, Relaxed);
        let one = run(seed, None);
        let mut total = total.lock().expect("no thread panics");
        // A failure counts, even if other threads have looked at enough states by now.
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

/// The first of `most` seeds at which the defect is noticed as a sync point that is lost
/// or torn, and the states looked at until then.
pub fn catch(broken: Broken, first: u64, most: u64) -> (Looked, Option<(u64, String)>) {
    let mut looked = Looked::default();
    for seed in first..first + most {
        let one = run(seed, Some(broken));
        looked.add(&one.looked);
        let mut failures = one.failures.into_iter();
        let must = Broken::ALL.iter().any(|b| b.0 == broken && b.2);
        let as_what =
            |f: &(u64, String)| !must || f.1.starts_with("lost") || f.1.starts_with("torn");
        if let Some(f) = failures.find(as_what) {
            return (looked, Some(f));
        }
    }
    (looked, None)
}
