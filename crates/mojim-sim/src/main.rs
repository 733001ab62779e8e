//! The command `mojim-sim`: runs seeds and reports what broke.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mojim_sim::cluster::{Backups, Mutation, REPLACES, Replacements, Spills};
use mojim_sim::failures::Only;
use mojim_sim::run::{Total, catch_mutation, catch_panics, run, run_with};
use mojim_sim::shadow::{Broken, Shown, catch, run as run_shadow, run_states};
use mojim_sim::threads;
use mojim_sim::voter;

const USAGE: &str =
    "usage: mojim-sim [--replacements] [--seeds N] [--first N] [--minutes M] [--jobs N] [--json]
       mojim-sim --seed N [--trace] [--failures A,B,...]
       mojim-sim --mutations [--only NAME] [--seeds N] [--first N]
       mojim-sim --threads [--seeds N] [--first N] [--minutes M] [--jobs N]
       mojim-sim --threads --seed N
       mojim-sim --threads --mutations [--only NAME] [--seeds N] [--first N]
       mojim-sim --shadow [--states N] [--first N] [--jobs N] [--json]
       mojim-sim --shadow --seed N
       mojim-sim --shadow --mutations [--only NAME] [--seeds N] [--first N]";

/// What the command line asks for.
struct Options {
    seeds: u64,
    first: u64,
    seed: Option<u64>,
    minutes: Option<u64>,
    jobs: u64,
    states: u64,
    only: String,
    /// The numbers of the failures of one seed that are to happen; all of them if `None`.
    failures: Option<BTreeSet<u64>>,
    /// In some of the seeds a node is replaced.
    replacements: bool,
    trace: bool,
    json: bool,
    mutations: bool,
    threads: bool,
    shadow: bool,
}

impl Options {
    /// Parses the arguments; `None` if one is unknown or lacks its number.
    fn read(mut args: impl Iterator<Item = String>) -> Option<Options> {
        let mut o = Options {
            seeds: 1000,
            first: 1,
            seed: None,
            minutes: None,
            jobs: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
            states: 1_000_000,
            only: String::new(),
            failures: None,
            replacements: false,
            trace: false,
            json: false,
            mutations: false,
            threads: false,
            shadow: false,
        };
        while let Some(a) = args.next() {
            let mut number = || args.next().and_then(|v| v.parse::<u64>().ok());
            match a.as_str() {
                "--only" => o.only = args.next().unwrap_or_default(),
                "--failures" => {
                    let numbers = args.next().unwrap_or_default();
                    let numbers = numbers.split(',').filter_map(|n| n.trim().parse().ok());
                    o.failures = Some(numbers.collect());
                }
                "--seeds" => o.seeds = number()?,
                "--first" => o.first = number()?,
                "--seed" => o.seed = Some(number()?),
                "--states" => o.states = number()?,
                "--jobs" => o.jobs = number()?.max(1),
                "--minutes" => o.minutes = Some(number()?),
                "--replacements" => o.replacements = true,
                "--trace" => o.trace = true,
                "--json" => o.json = true,
                "--mutations" => o.mutations = true,
                "--threads" => o.threads = true,
                "--shadow" => o.shadow = true,
                _ => return None,
            }
        }
        Some(o)
    }

    /// The limit on the time for which seeds are run.
    fn within(&self) -> Option<Duration> {
        self.minutes.map(|m| Duration::from_secs(60 * m))
    }
}

fn main() -> ExitCode {
    let Some(o) = Options::read(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    catch_panics();
    match (o.mutations, o.seed) {
        (true, _) if o.shadow => shadow_mutations(&o.only, o.first, o.seeds),
        (false, Some(s)) if o.shadow => shadow_report(&run_shadow(s, None), 0.0, o.json),
        (false, None) if o.shadow => shadow_states(&o),
        (true, _) if o.threads => thread_mutations(&o.only, o.first, o.seeds),
        (false, Some(s)) if o.threads => thread_seeds(s, 1, 1, None),
        (false, None) if o.threads => thread_seeds(o.first, o.seeds, o.jobs, o.within()),
        (true, _) => mutations(&o),
        (false, Some(s)) => one_seed(s, o.failures, o.trace),
        (false, None) => seeds(&o),
    }
}

/// Prints at which seed the mutation was caught, if at any. Returns whether it was
/// missed.
fn missed(name: &str, caught: Option<(u64, String)>, seeds: u64) -> bool {
    match &caught {
        Some((s, why)) => println!("{name}: caught at seed {s}: {why}"),
        None => println!("{name}: NOT caught in {seeds} seeds"),
    }
    caught.is_none()
}

/// Runs each mutation of the cluster and of a voter's files.
fn mutations(o: &Options) -> ExitCode {
    let mut any = false;
    let named = |name: &str| name.starts_with(&o.only);
    for (m, name) in Mutation::ALL.into_iter().filter(|(_, n)| named(n)) {
        any |= missed(name, catch_mutation(m, o.first, o.seeds, o.jobs), o.seeds);
    }
    for (b, name) in voter::Broken::ALL.into_iter().filter(|(_, n)| named(n)) {
        any |= missed(name, voter::catch(b, o.first, o.seeds), o.seeds);
    }
    ExitCode::from(u8::from(any))
}

/// Runs one seed of the cluster, and prints what happened.
fn one_seed(s: u64, failures: Only, trace: bool) -> ExitCode {
    let o = match failures {
        None => run(s, None, trace),
        some => run_with(s, some),
    };
    for line in &o.trace {
        println!("{line}");
    }
    println!(
        "seed {s}: {} sync points, {} acknowledged, {} starts, {} promotions, faults {:?}",
        o.sync_points, o.acks, o.starts, o.promotions, o.faults
    );
    if let Some(least) = &o.nobody {
        println!("seed {s}: nobody may go on, for {least:?}");
    }
    if let Some(f) = o.failure {
        println!("seed {s} FAILED: {f}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Runs many seeds of the cluster, on several threads.
fn seeds(o: &Options) -> ExitCode {
    let first = match o.replacements {
        true => o.first | REPLACES,
        false => o.first,
    };
    let begun = Instant::now();
    // The seeds are independent: the threads share only the counter and the sum.
    let next = AtomicU64::new(first);
    let shared = Mutex::new((Total::default(), begun));
    let work = || loop {
        let s = next.fetch_add(1, Relaxed);
        let over = o.within().is_some_and(|w| begun.elapsed() > w);
        if s >= first.saturating_add(o.seeds) || over {
            return;
        }
        let o = run(s, None, false);
        let (total, told) = &mut *shared.lock().expect("no thread panics");
        if let Some(f) = &o.failure {
            eprintln!("seed {s} FAILED: {f}");
            eprintln!("  replay: mojim-sim --seed {s} --trace");
        }
        total.add(&o);
        if told.elapsed() > Duration::from_secs(10) {
            *told = Instant::now();
            eprintln!("{} seeds, {} failed", total.seeds, total.failures.len());
        }
    };
    on_threads(o.jobs, work);
    let (mut total, _) = shared.into_inner().expect("no thread panics");
    total.failures.sort();
    let rate = total.seeds as f64 * 60.0 / begun.elapsed().as_secs_f64();
    match o.json {
        true => println!("{}", json(&total, rate)),
        false => report(&total, rate),
    }
    ExitCode::from(u8::from(!total.failures.is_empty()))
}

/// Runs `work` on `jobs` threads, until each has returned.
fn on_threads(jobs: u64, work: impl Fn() + Sync + Copy + Send) {
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
}

/// Runs seeds of the multi-threaded program (`threads`).
fn thread_seeds(first: u64, seeds: u64, jobs: u64, within: Option<Duration>) -> ExitCode {
    let begun = Instant::now();
    let next = AtomicU64::new(first);
    let total = Mutex::new((0u64, threads::Outcome::default(), 0u64));
    let work = || loop {
        let s = next.fetch_add(1, Relaxed);
        if s >= first.saturating_add(seeds) || within.is_some_and(|w| begun.elapsed() > w) {
            return;
        }
        let o = threads::run(s, None);
        let (ran, sum, failed) = &mut *total.lock().expect("no thread panics");
        *ran += 1;
        sum.turns += o.turns;
        sum.begun += o.begun;
        sum.acks += o.acks;
        sum.failed += o.failed;
        sum.shared += o.shared;
        sum.crashes += o.crashes;
        sum.deaths += o.deaths;
        if let Some(f) = o.failure {
            *failed += 1;
            eprintln!("seed {s} FAILED: {f}");
            eprintln!("  replay: mojim-sim --threads --seed {s}");
        }
    };
    on_threads(jobs, work);
    let (ran, sum, failed) = total.into_inner().expect("no thread panics");
    println!(
        "seeds {ran}, in shared memory {}, crashes {}, threads that ended in a record {}",
        sum.shared, sum.crashes, sum.deaths
    );
    println!(
        "turns {}, sync points {}, acknowledged {}, calls that failed after a fault {}",
        sum.turns, sum.begun, sum.acks, sum.failed
    );
    println!("failures {failed}");
    ExitCode::from(u8::from(failed > 0))
}

/// Runs each mutation of `threads`.
fn thread_mutations(only: &str, first: u64, seeds: u64) -> ExitCode {
    let mut any = false;
    let named = |name: &str| name.starts_with(only);
    for (b, name) in threads::Broken::ALL.into_iter().filter(|(_, n)| named(n)) {
        any |= missed(name, threads::catch(b, first, seeds), seeds);
    }
    ExitCode::from(u8::from(any))
}

/// Checks the states that a power loss may leave at every fence of many seeds.
fn shadow_states(o: &Options) -> ExitCode {
    // The number of states means nothing if a broken engine would pass.
    let caught = shadow_mutations(&o.only, 1, o.seeds);
    let begun = Instant::now();
    let told = Mutex::new(begun);
    let shown = run_states(o.states, o.first, o.jobs, |so_far| {
        let mut told = told.lock().expect("no thread panics");
        if told.elapsed() > Duration::from_secs(10) {
            *told = Instant::now();
            eprintln!("{} states", so_far.looked.states());
        }
    });
    let rate = shown.looked.states() as f64 / begun.elapsed().as_secs_f64();
    let passed = shadow_report(&shown, rate, o.json);
    match caught == ExitCode::SUCCESS {
        true => passed,
        false => caught,
    }
}

/// Runs each control program and each mutation, and reports on stderr.
fn shadow_mutations(only: &str, first: u64, seeds: u64) -> ExitCode {
    let mut wrong = false;
    // The heap's program, whose states are copies of a MiB, has its own test and its own long form.
    let named =
        |name: &str| name.starts_with(only) && !(only.is_empty() && name.starts_with("heap"));
    for (broken, name, must) in Broken::ALL.into_iter().filter(|(_, n, _)| named(n)) {
        // A program that must pass runs at most 100 seeds, unless it is asked for.
        let most = if must || !only.is_empty() {
            seeds
        } else {
            seeds.min(100)
        };
        let (looked, caught) = catch(broken, first, most);
        let n = looked.states();
        wrong |= caught.is_some() != must;
        match (caught, must) {
            (Some((s, why)), true) => eprintln!("{name}: caught at seed {s}, state {n}: {why}"),
            (None, false) => eprintln!("{name}: passed {n} states"),
            (None, true) => eprintln!("{name}: NOT caught in {most} seeds, {n} states"),
            (Some((s, why)), false) => eprintln!("{name}: FAILED at seed {s}: {why}"),
        }
    }
    ExitCode::from(u8::from(wrong))
}

fn shadow_report(t: &Shown, rate: f64, json: bool) -> ExitCode {
    let l = &t.looked;
    for (s, why) in &t.failures {
        eprintln!("seed {s} FAILED: {why}");
        eprintln!("  replay: mojim-sim --shadow --seed {s}");
    }
    let failed: Vec<_> = t.failures.iter().map(|(s, _)| s.to_string()).collect();
    if json {
        println!(
            "{{\"seeds\":{},\"fences\":{},\"fences_exhaustive\":{},\"states\":{},\"states_exhaustive\":{},\"states_sampled\":{},\"recoveries\":{},\"states_per_second\":{rate:.0},\"failed_seeds\":[{}]}}",
            t.seeds,
            l.fences,
            l.all,
            l.states(),
            l.exhaustive,
            l.sampled,
            l.recoveries,
            failed.join(",")
        );
    } else {
        println!(
            "seeds {}, fences {}, of these with every state {}",
            t.seeds, l.fences, l.all
        );
        println!(
            "states {}: {} of fences with every state, {} sampled; {rate:.0} a second",
            l.states(),
            l.exhaustive,
            l.sampled
        );
        println!("recoveries {}, failures {}", l.recoveries, failed.len());
    }
    ExitCode::from(u8::from(!failed.is_empty()))
}

/// The sum over many seeds as one line of JSON.
fn json(t: &Total, rate: f64) -> String {
    let s = &t.sum;
    let faults: Vec<_> = s.faults.iter().map(|(k, n)| format!("{k:?}:{n}")).collect();
    let failures: Vec<_> = t.failures.iter().map(|(s, _)| s.to_string()).collect();
    let list = [
        format!("\"seeds\":{}", t.seeds),
        format!("\"seeds_per_minute\":{rate:.0}"),
        format!("\"sync_points\":{}", s.sync_points),
        format!("\"acknowledged\":{}", s.acks),
        format!("\"compared\":{}", s.compared),
        format!("\"starts\":{}", s.starts),
        format!("\"promotions\":{}", s.promotions),
        format!("\"copies\":{}", s.copies[0]),
        format!("\"copies_by_difference\":{}", s.copies[1]),
        format!("\"excused_losses\":{}", s.excused),
        format!("\"damaged_logs\":{:?}", s.damaged),
        backups_json(s.with_backup, &s.backups),
        spills_json(&s.spills),
        replacements_json(&s.replaced),
        format!(
            "\"nobody_may\":{{\"runs\":{},\"failures_least\":{},\"failures_most\":{}}}",
            t.nobody.0, t.nobody.1, t.nobody.2
        ),
        format!(
            "\"voter\":{{\"starts\":{},\"calls\":{},\"ends\":{}}}",
            s.voter.starts, s.voter.calls, s.voter.ends
        ),
        format!("\"faults\":{{{}}}", faults.join(",")),
        format!("\"failed_seeds\":[{}]", failures.join(",")),
    ];
    format!("{{{}}}", list.join(","))
}

fn backups_json(seeds: u64, b: &Backups) -> String {
    format!(
        "\"backups\":{{\"seeds\":{seeds},\"seeds_with_two\":{},\"copies\":{},\"by_log\":{},\"stalls\":{},\"held\":{},\"mirrors\":{},\"primaries\":{},\"fallbacks\":{}}}",
        b.pairs, b.copies, b.by_log, b.stalls, b.held, b.mirrors, b.primaries, b.fallbacks,
    )
}

fn spills_json(s: &Spills) -> String {
    format!(
        "\"spills\":{{\"seeds\":{},\"begun\":{},\"confirmed\":{},\"alone\":{},\"failed\":{},\"acknowledged\":{}}}",
        s.seeds, s.begun, s.confirmed, s.alone, s.failed, s.acked,
    )
}

fn replacements_json(r: &Replacements) -> String {
    format!(
        "\"replacements\":{{\"seeds\":{},\"mirrors\":{},\"backups\":{},\"others\":{},\"refused\":{},\"members\":{},\"returns\":{}}}",
        r.seeds, r.mirrors, r.backups, r.others, r.refused, r.members, r.returns,
    )
}

/// Prints the sum over many seeds as text.
fn report(t: &Total, rate: f64) {
    let s = &t.sum;
    println!("seeds {}, {rate:.0} a minute", t.seeds);
    println!("sync points {}, acknowledged {}", s.sync_points, s.acks);
    println!(
        "whole copies {}, of these by difference {}",
        s.copies[0], s.copies[1]
    );
    println!(
        "starts {}, promotions {}, data areas compared {}, losses that no mode prevents {}",
        s.starts, s.promotions, s.compared, s.excused
    );
    report_backups(s.with_backup, &s.backups);
    let [damaged, untold, parts, unopened, differ] = s.damaged;
    println!(
        "damaged logs that cost their copies something {damaged}, take-overs without what those do not tell {untold}"
    );
    println!(
        "runs in which files may show parts of what was given up with a damaged log {parts}; copies that did not open for it {unopened}, ends with copies that differ {differ}"
    );
    println!(
        "runs after which nobody may go on {}, for {} to {} failures each, others left out",
        t.nobody.0, t.nobody.1, t.nobody.2
    );
    report_spills(&s.spills);
    report_replacements(&s.replaced);
    println!(
        "a voter's files: starts {}, calls {}, ends {}",
        s.voter.starts, s.voter.calls, s.voter.ends
    );
    for (k, n) in &s.faults {
        println!("  {k}: {n}");
    }
    println!("failures {}", t.failures.len());
}

fn report_backups(seeds: u64, b: &Backups) {
    println!(
        "seeds with a backup {}, of these with two {}; copies to one {}, catch-ups by log {}, records that waited for one {}, openings of a log with what was kept for one {}",
        seeds, b.pairs, b.copies, b.by_log, b.stalls, b.held
    );
    println!(
        "backups that took the place of a mirror {}, of these then primary {}; that went on for both {}",
        b.mirrors, b.primaries, b.fallbacks
    );
}

fn report_spills(s: &Spills) {
    println!(
        "seeds with spill files {}, written {}, appended when a mirror had confirmed them {}, without a mirror {}, given up {}, acknowledged {}",
        s.seeds, s.begun, s.confirmed, s.alone, s.failed, s.acked
    );
}

fn report_replacements(r: &Replacements) {
    println!(
        "seeds with a node that is replaced {}: mirrors {}, backups {}, others {}, refused {}; new ones that are members at the end {}, replaced ones that came back {}",
        r.seeds, r.mirrors, r.backups, r.others, r.refused, r.members, r.returns
    );
}
