//! The command `mojim-sim`: runs seeds and reports what broke.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use mojim_sim::cluster::{Mutation, REPLACES};
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

fn main() -> ExitCode {
    let (mut seeds, mut first, mut seed, mut minutes) = (1000u64, 1u64, None, None);
    let mut jobs = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let (mut trace, mut json, mut mutations, mut shadow) = (false, false, false, false);
    let mut by_threads = false;
    // In some of these seeds a node is replaced.
    let mut replaces = 0;
    let mut states = 1_000_000u64;
    let mut only = String::new();
    // Of the failures of one seed, those that are to happen.
    let mut failures = None;
    let mut args = std::env::args().skip(1);
    while let Some(a) = args.next() {
        if a == "--only" {
            only = args.next().unwrap_or_default();
            continue;
        }
        if a == "--failures" {
            let numbers = args.next().unwrap_or_default();
            let numbers = numbers.split(',').filter_map(|n| n.trim().parse().ok());
            failures = Some(numbers.collect::<BTreeSet<u64>>());
            continue;
        }
        let mut number = || args.next().and_then(|v| v.parse::<u64>().ok());
        let ok = match a.as_str() {
            "--seeds" => number().map(|n| seeds = n),
            "--first" => number().map(|n| first = n),
            "--seed" => number().map(|n| seed = Some(n)),
            "--states" => number().map(|n| states = n),
            "--jobs" => number().map(|n| jobs = n.max(1)),
            "--minutes" => number().map(|n| minutes = Some(n)),
            "--replacements" => {
                let _: () = replaces = REPLACES;
                Some(())
            }
            "--trace" => {
                let _: () = trace = true;
                Some(())
            }
            "--json" => {
                let _: () = json = true;
                Some(())
            }
            "--mutations" => {
                let _: () = mutations = true;
                Some(())
            }
            "--threads" => {
                let _: () = by_threads = true;
                Some(())
            }
            "--shadow" => {
                let _: () = shadow = true;
                Some(())
            }
            _ => None,
        };
        if ok.is_none() {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    catch_panics();
    if shadow {
        return match (mutations, seed) {
            (true, _) => shadow_mutations(&only, first, seeds),
            (false, Some(s)) => shadow_report(&run_shadow(s, None), 0.0, json),
            (false, None) => {
                // A count says nothing where what is broken would pass.
                let caught = shadow_mutations(&only, 1, seeds);
                let begun = Instant::now();
                let told = Mutex::new(begun);
                let shown = run_states(states, first, jobs, |so_far| {
                    let mut told = told.lock().expect("no thread panics");
                    if told.elapsed() > Duration::from_secs(10) {
                        *told = Instant::now();
                        eprintln!("{} states", so_far.looked.states());
                    }
                });
                let rate = shown.looked.states() as f64 / begun.elapsed().as_secs_f64();
                let passed = shadow_report(&shown, rate, json);
                if caught == ExitCode::SUCCESS {
                    passed
                } else {
                    caught
                }
            }
        };
    }
    if by_threads {
        let within = minutes.map(|m| Duration::from_secs(60 * m));
        return match (mutations, seed) {
            (true, _) => thread_mutations(&only, first, seeds),
            (false, Some(s)) => thread_seeds(s, 1, 1, None),
            (false, None) => thread_seeds(first, seeds, jobs, within),
        };
    }
    if mutations {
        let mut missed = false;
        let named = |name: &str| name.starts_with(&only);
        for (m, name) in Mutation::ALL.into_iter().filter(|(_, n)| named(n)) {
            match catch_mutation(m, first, seeds, jobs) {
                Some((s, why)) => println!("{name}: caught at seed {s}: {why}"),
                None => {
                    println!("{name}: NOT caught in {seeds} seeds");
                    missed = true;
                }
            }
        }
        for (b, name) in voter::Broken::ALL.into_iter().filter(|(_, n)| named(n)) {
            match voter::catch(b, first, seeds) {
                Some((s, why)) => println!("{name}: caught at seed {s}: {why}"),
                None => {
                    println!("{name}: NOT caught in {seeds} seeds");
                    missed = true;
                }
            }
        }
        return ExitCode::from(u8::from(missed));
    }
    if let Some(s) = seed {
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
        return ExitCode::SUCCESS;
    }
    let first = first | replaces;
    let begun = Instant::now();
    // Each seed is on its own, so that threads share nothing but the count.
    let next = AtomicU64::new(first);
    let shared = Mutex::new((Total::default(), begun));
    let work = || loop {
        let s = next.fetch_add(1, Relaxed);
        let over = minutes.is_some_and(|m| begun.elapsed() > Duration::from_secs(60 * m));
        if s >= first.saturating_add(seeds) || over {
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
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
    let (mut total, _) = shared.into_inner().expect("no thread panics");
    total.failures.sort();
    let rate = total.seeds as f64 * 60.0 / begun.elapsed().as_secs_f64();
    report(&total, rate, json);
    ExitCode::from(u8::from(!total.failures.is_empty()))
}

/// Runs several threads of a program, seed by seed.
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
        if let Some(f) = o.failure {
            *failed += 1;
            eprintln!("seed {s} FAILED: {f}");
            eprintln!("  replay: mojim-sim --threads --seed {s}");
        }
    };
    std::thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
    let (ran, sum, failed) = total.into_inner().expect("no thread panics");
    println!(
        "seeds {ran}, in shared memory {}, crashes {}",
        sum.shared, sum.crashes
    );
    println!(
        "turns {}, sync points {}, acknowledged {}, calls that failed after a fault {}",
        sum.turns, sum.begun, sum.acks, sum.failed
    );
    println!("failures {failed}");
    ExitCode::from(u8::from(failed > 0))
}

/// Each mutation of the threads' rung.
fn thread_mutations(only: &str, first: u64, seeds: u64) -> ExitCode {
    let mut missed = false;
    for (broken, name) in threads::Broken::ALL
        .into_iter()
        .filter(|(_, n)| n.starts_with(only))
    {
        match threads::catch(broken, first, seeds) {
            Some((s, why)) => println!("{name}: caught at seed {s}: {why}"),
            None => {
                println!("{name}: NOT caught in {seeds} seeds");
                missed = true;
            }
        }
    }
    ExitCode::from(u8::from(missed))
}

/// Each control program and each mutation, on stderr.
fn shadow_mutations(only: &str, first: u64, seeds: u64) -> ExitCode {
    let mut wrong = false;
    let named = |name: &str| name.starts_with(only);
    for (broken, name, must) in Broken::ALL.into_iter().filter(|(_, n, _)| named(n)) {
        // The one that is right runs as many seeds as pass quickly.
        let most = if must { seeds } else { seeds.min(100) };
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

fn report(t: &Total, rate: f64, json: bool) {
    let s = &t.sum;
    if json {
        let faults: Vec<_> = s.faults.iter().map(|(k, n)| format!("{k:?}:{n}")).collect();
        let failures: Vec<_> = t.failures.iter().map(|(s, _)| s.to_string()).collect();
        println!(
            "{{\"seeds\":{},\"seeds_per_minute\":{rate:.0},\"sync_points\":{},\"acknowledged\":{},\"compared\":{},\"starts\":{},\"promotions\":{},\"copies\":{},\"copies_by_difference\":{},\"excused_losses\":{},\"damaged_logs\":{:?},\"backups\":{{\"seeds\":{},\"seeds_with_two\":{},\"copies\":{},\"by_log\":{},\"stalls\":{},\"held\":{},\"mirrors\":{},\"primaries\":{},\"fallbacks\":{}}},\"spills\":{{\"seeds\":{},\"begun\":{},\"confirmed\":{},\"alone\":{},\"failed\":{},\"acknowledged\":{}}},\"replacements\":{{\"seeds\":{},\"mirrors\":{},\"backups\":{},\"others\":{},\"refused\":{},\"members\":{},\"returns\":{}}},\"nobody_may\":{{\"runs\":{},\"failures_least\":{},\"failures_most\":{}}},\"voter\":{{\"starts\":{},\"calls\":{},\"ends\":{}}},\"faults\":{{{}}},\"failed_seeds\":[{}]}}",
            t.seeds,
            s.sync_points,
            s.acks,
            s.compared,
            s.starts,
            s.promotions,
            s.copies[0],
            s.copies[1],
            s.excused,
            s.damaged,
            s.with_backup,
            s.backups.pairs,
            s.backups.copies,
            s.backups.by_log,
            s.backups.stalls,
            s.backups.held,
            s.backups.mirrors,
            s.backups.primaries,
            s.backups.fallbacks,
            s.spills.seeds,
            s.spills.begun,
            s.spills.confirmed,
            s.spills.alone,
            s.spills.failed,
            s.spills.acked,
            s.replaced.seeds,
            s.replaced.mirrors,
            s.replaced.backups,
            s.replaced.others,
            s.replaced.refused,
            s.replaced.members,
            s.replaced.returns,
            t.nobody.0,
            t.nobody.1,
            t.nobody.2,
            s.voter.starts,
            s.voter.calls,
            s.voter.ends,
            faults.join(","),
            failures.join(",")
        );
        return;
    }
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
    println!(
        "seeds with a backup {}, of these with two {}; copies to one {}, catch-ups by log {}, records that waited for one {}, openings of a log with what was kept for one {}",
        s.with_backup,
        s.backups.pairs,
        s.backups.copies,
        s.backups.by_log,
        s.backups.stalls,
        s.backups.held
    );
    println!(
        "backups that took the place of a mirror {}, of these then primary {}; that went on for both {}",
        s.backups.mirrors, s.backups.primaries, s.backups.fallbacks
    );
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
    println!(
        "seeds with spill files {}, written {}, appended when a mirror had confirmed them {}, without a mirror {}, given up {}, acknowledged {}",
        s.spills.seeds,
        s.spills.begun,
        s.spills.confirmed,
        s.spills.alone,
        s.spills.failed,
        s.spills.acked
    );
    println!(
        "seeds with a node that is replaced {}: mirrors {}, backups {}, others {}, refused {}; new ones that are members at the end {}, replaced ones that came back {}",
        s.replaced.seeds,
        s.replaced.mirrors,
        s.replaced.backups,
        s.replaced.others,
        s.replaced.refused,
        s.replaced.members,
        s.replaced.returns
    );
    println!(
        "a voter's files: starts {}, calls {}, ends {}",
        s.voter.starts, s.voter.calls, s.voter.ends
    );
    for (k, n) in &s.faults {
        println!("  {k}: {n}");
    }
    println!("failures {}", t.failures.len());
}
