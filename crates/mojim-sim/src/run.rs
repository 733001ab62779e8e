//! Runs seeds, each independent of the others, and sums up their outcomes.
//!
//! Owns the outcome of a seed. A panic of the engine is caught and counts as a failure of
//! its seed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::cluster::{Backups, Cluster, Mutation, Replacements, Spills};
use crate::failures::{Failure, Only};
use crate::shrink::{Nobody, Ran, shrink};
use crate::voter;

/// What one seed did.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What was broken, if anything.
    pub failure: Option<String>,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Sync points appended.
    pub sync_points: u64,
    /// Sync points acknowledged.
    pub acks: u64,
    /// Losses that the mode does not promise to prevent.
    pub excused: u64,
    /// Counts of: logs whose damage cost their copies something; take-overs without
    /// points of which a damaged log does not tell; runs in which a node went on with a
    /// data area that may show parts of what was given up; in these runs, copies that
    /// could not be opened; and runs at whose end copies differ.
    pub damaged: [u64; 5],
    /// Promotions.
    pub promotions: u64,
    /// Starts of processes.
    pub starts: u64,
    /// Whole copies received, and those that rest partly on older files.
    pub copies: [u64; 2],
    /// Whole data areas compared with the model.
    pub compared: u64,
    /// Whether there was a backup.
    pub with_backup: u64,
    /// What backups did.
    pub backups: Backups,
    /// If the run ended because no node may go on: the fewest failures that lead to this
    /// end.
    pub nobody: Option<Vec<Failure>>,
    /// What became of spill files.
    pub spills: Spills,
    /// What became of nodes that were replaced.
    pub replaced: Replacements,
    /// What became of a voter's files.
    pub voter: voter::Shown,
    /// The trace, if it was asked for.
    pub trace: Vec<String>,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the texts of panics for their seeds instead of printing them.
pub fn catch_panics() {
    std::panic::set_hook(Box::new(|info| {
        let trace = match std::env::var_os("RUST_BACKTRACE") {
            Some(_) => format!("\n{}", std::backtrace::Backtrace::force_capture()),
            None => String::new(),
        };
        PANIC.with(|p| *p.borrow_mut() = Some(format!("{info}{trace}")));
    }));
}

/// The text of a panic that was caught on this thread.
pub(crate) fn panic_text(p: &(dyn std::any::Any + Send)) -> String {
    let text = PANIC.with(|p| p.borrow_mut().take());
    let text = text.or_else(|| p.downcast_ref::<String>().cloned());
    let text = text.or_else(|| p.downcast_ref::<&str>().map(|s| s.to_string()));
    text.unwrap_or_default()
}

/// Runs one seed's cluster, with only these of its failures.
pub fn run_with(seed: u64, only: Only) -> Outcome {
    run_cluster(seed, None, true, only).0
}

/// Runs one seed: a cluster, and if that shows no failure, a voter's files.
pub fn run(seed: u64, mutation: Option<Mutation>, trace: bool) -> Outcome {
    let (mut outcome, nobody) = run_cluster(seed, mutation, trace, None);
    let shrinks = mutation.is_none_or(|m| m == Mutation::OtherLife);
    if let Some(nobody) = nobody.filter(|_| shrinks && outcome.failure.is_none()) {
        let again = |only| {
            let (outcome, nobody) = run_cluster(seed, mutation, false, only);
            Ran {
                failure: outcome.failure,
                nobody,
            }
        };
        match shrink(nobody, again) {
            Ok(least) => outcome.nobody = Some(least),
            Err(e) => outcome.failure = Some(e),
        }
    }
    if mutation.is_none() && outcome.failure.is_none() {
        let (shown, result, world) = voter::run(seed, None, trace);
        outcome.voter = shown;
        outcome.failure = result.err();
        for (k, n) in world.counts() {
            *outcome.faults.entry(k).or_default() += n;
        }
        outcome.trace.extend(world.trace());
    }
    outcome
}

fn run_cluster(
    seed: u64,
    mutation: Option<Mutation>,
    trace: bool,
    only: Only,
) -> (Outcome, Option<Nobody>) {
    run_this(Cluster::new(seed, mutation), seed, trace, only)
}

fn run_this(mut cluster: Cluster, seed: u64, trace: bool, only: Only) -> (Outcome, Option<Nobody>) {
    cluster.world.only_failures(only);
    if trace {
        cluster.world.trace_on();
    }
    let result = catch_unwind(AssertUnwindSafe(|| cluster.run()));
    let failure = match result {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e),
        Err(p) => Some(format!("panic: {}", panic_text(&*p))),
    };
    let outcome = Outcome {
        seed,
        failure,
        faults: cluster.world.counts(),
        sync_points: cluster.appended,
        acks: cluster.check.acks,
        excused: cluster.check.excused,
        damaged: [
            cluster.check.damaged,
            cluster.check.untold,
            u64::from(cluster.check.blurred),
            cluster.unopened,
            cluster.differ,
        ],
        promotions: cluster.promotions,
        starts: cluster.starts,
        copies: cluster.copies,
        compared: cluster.check.compared,
        with_backup: u64::from(cluster.setup.backup),
        backups: cluster.backups,
        nobody: None,
        spills: cluster.spilled,
        replaced: cluster.replaced,
        voter: voter::Shown::default(),
        trace: cluster.world.trace(),
    };
    // With one failure less the operator would not have replaced that node, or would have
    // replaced it too early. So such a run cannot be shrunk.
    let nobody = cluster.nobody().filter(|_| !cluster.setup.spare);
    if outcome.failure.is_some() {
        // What a panic left may panic again when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(cluster)));
    }
    (outcome, nobody)
}

/// The sum of many seeds.
#[derive(Debug, Clone, Default)]
pub struct Total {
    /// Seeds run.
    pub seeds: u64,
    /// Everything but the failures, summed.
    pub sum: Outcome,
    /// Runs that ended because no node may go on; of these, the fewest and the most
    /// failures that shrinking left.
    pub nobody: (u64, usize, usize),
    /// Seeds that failed, with why.
    pub failures: Vec<(u64, String)>,
}

impl Total {
    /// Adds a seed.
    pub fn add(&mut self, o: &Outcome) {
        self.seeds += 1;
        for (k, n) in &o.faults {
            *self.sum.faults.entry(k).or_default() += n;
        }
        self.sum.sync_points += o.sync_points;
        self.sum.acks += o.acks;
        self.sum.excused += o.excused;
        self.sum.promotions += o.promotions;
        self.sum.starts += o.starts;
        for (sum, n) in self.sum.copies.iter_mut().zip(o.copies) {
            *sum += n;
        }
        for (sum, n) in self.sum.damaged.iter_mut().zip(o.damaged) {
            *sum += n;
        }
        self.sum.compared += o.compared;
        self.sum.with_backup += o.with_backup;
        self.sum.backups.pairs += o.backups.pairs;
        self.sum.backups.copies += o.backups.copies;
        self.sum.backups.by_log += o.backups.by_log;
        self.sum.backups.stalls += o.backups.stalls;
        self.sum.backups.held += o.backups.held;
        self.sum.backups.mirrors += o.backups.mirrors;
        self.sum.backups.primaries += o.backups.primaries;
        self.sum.backups.fallbacks += o.backups.fallbacks;
        self.sum.spills.add(&o.spills);
        self.sum.replaced.add(&o.replaced);
        self.sum.voter.starts += o.voter.starts;
        self.sum.voter.calls += o.voter.calls;
        self.sum.voter.ends += o.voter.ends;
        if let Some(n) = o.nobody.as_ref().map(Vec::len) {
            let (runs, least, most) = self.nobody;
            self.nobody = match runs {
                0 => (1, n, n),
                _ => (runs + 1, least.min(n), most.max(n)),
            };
        }
        if let Some(f) = &o.failure {
            self.failures.push((o.seed, f.clone()));
        }
    }
}

/// Runs a seed with `mutation`. Returns the expected report of it, if there is one: the same run
/// without the mutation must fail in nothing.
fn caught(seed: u64, mutation: Mutation) -> Option<String> {
    let failure = run(seed, Some(mutation), false).failure?;
    let is_noticed = mutation.breaks().iter().any(|p| failure.starts_with(p));
    let sound = || {
        let (o, _) = run_this(Cluster::sound(seed, mutation), seed, false, None);
        o.failure.is_none()
    };
    (is_noticed && sound()).then_some(failure)
}

/// The lowest seed at which a mutation is caught with an expected report, and this
/// report.
pub fn catch_mutation(
    mutation: Mutation,
    first: u64,
    most: u64,
    jobs: u64,
) -> Option<(u64, String)> {
    if let Some(seed) = mutation.seen_at()
        && let Some(f) = caught(seed, mutation)
    {
        return Some((seed, f));
    }
    let next = AtomicU64::new(first);
    let found: Mutex<Option<(u64, String)>> = Mutex::new(None);
    let work = || loop {
        let seed = next.fetch_add(1, Relaxed);
        let best = found
            .lock()
            .expect("no thread panics")
            .as_ref()
            .map(|f| f.0);
        if seed >= first + most || best.is_some_and(|b| b < seed) {
            return;
        }
        let Some(f) = caught(seed, mutation) else {
            continue;
        };
        let mut found = found.lock().expect("no thread panics");
        if found.as_ref().is_none_or(|b| seed < b.0) {
            *found = Some((seed, f));
        }
    };
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
    found.into_inner().expect("no thread panics")
}
