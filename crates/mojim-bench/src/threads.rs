//! Many threads at once: each runs its subject until the time is over, all from one barrier on.
//!
//! Invariants:
//!
//! - Only operations that begin after the warm-up and end before the time is over are recorded.
//! - A thread whose operation fails or panics stops alone, and the run reports it at its end. So
//!   no thread ever waits for another at more than the first barrier.

use std::io;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::measure::{Subject, Summary, histogram};

/// How long to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Time at the beginning in which nothing is recorded.
    pub warm_up: Duration,
    /// Time in which operations are recorded.
    pub duration: Duration,
}

impl Default for Plan {
    /// 100 ms and then 1 s.
    fn default() -> Self {
        Self {
            warm_up: Duration::from_millis(100),
            duration: Duration::from_secs(1),
        }
    }
}

/// The outcome of [`run`].
#[derive(Debug, Clone)]
pub struct Threads {
    /// All operations of all threads; `per_second` is their number over the wall time, which
    /// includes what each thread does between its operations.
    pub total: Summary,
    /// Operations of each thread.
    pub counts: Vec<u64>,
}

/// Runs each subject in a thread of its own and merges their times.
pub fn run<S: Subject + Send>(subjects: Vec<S>, plan: Plan) -> io::Result<Threads> {
    let barrier = Barrier::new(subjects.len());
    let each = std::thread::scope(|scope| {
        let barrier = &barrier;
        let start = |mut subject: S| {
            scope.spawn(move || {
                let mut times = histogram();
                barrier.wait();
                let done = record(&mut subject, plan, &mut times);
                done.map(|()| times)
            })
        };
        let threads: Vec<_> = subjects.into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|t| {
                t.join()
                    .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
            })
            .collect::<io::Result<Vec<_>>>()
    })?;
    let mut all = histogram();
    for times in &each {
        all.add(times).map_err(io::Error::other)?;
    }
    Ok(Threads {
        total: Summary::of(&all, plan.duration),
        counts: each.iter().map(|times| times.len()).collect(),
    })
}

fn record(
    subject: &mut impl Subject,
    plan: Plan,
    times: &mut hdrhistogram::Histogram<u64>,
) -> io::Result<()> {
    let begin = Instant::now();
    let end = plan.warm_up + plan.duration;
    loop {
        subject.prepare()?;
        let start = Instant::now();
        subject.op()?;
        let after = Instant::now();
        if after - begin > end {
            return Ok(());
        }
        if start - begin >= plan.warm_up {
            times.saturating_record((after - start).as_nanos() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::subject;

    const TINY: Plan = Plan {
        warm_up: Duration::from_millis(1),
        duration: Duration::from_millis(20),
    };

    #[test]
    fn merges_all_threads() {
        let sleepy = |i| {
            subject(format!("{i}"), || {
                std::thread::sleep(Duration::from_micros(100));
                Ok(())
            })
        };
        // So long that a process which stands still for a while has some operations in it.
        let plan = Plan {
            duration: Duration::from_secs(2),
            ..TINY
        };
        let got = run((0..3).map(sleepy).collect(), plan).unwrap();
        assert_eq!(got.counts.len(), 3);
        assert_eq!(got.total.count, got.counts.iter().sum::<u64>());
        assert!(got.total.count > 0 && got.total.per_second > 0.0);
    }

    #[test]
    fn one_failure_is_reported_and_stops_nobody_else() {
        let one = |i| {
            subject("s", move || {
                if i == 1 {
                    Err(io::Error::other("no"))
                } else {
                    Ok(())
                }
            })
        };
        assert!(run((0..3).map(one).collect(), TINY).is_err());
        let one = |i| {
            subject(
                "s",
                move || if i == 1 { panic!("on purpose") } else { Ok(()) },
            )
        };
        assert!(run((0..2).map(one).collect(), TINY).is_err());
    }
}
