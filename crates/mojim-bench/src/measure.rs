//! Paired rounds: subjects take turns, so that each is compared with its limit at one speed.
//!
//! A round gives every subject a block of operations. The order rotates, and every other round is
//! reversed. Of a pair, the ratio of the two block medians is taken in each round. The median of
//! those ratios is reported: over all rounds, and for the rounds of each speed state that the limit
//! showed.
//!
//! Invariants:
//!
//! - The timed part is the call of [`Subject::op`] and nothing else.
//! - No memory is allocated between the first and the last block.
//! - The time limit ends the run between two operations. A round that it cuts does not count,
//!   unless it is the only one.

use std::io;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// One of the things that are compared.
pub trait Subject {
    /// A name, unique within a run.
    fn name(&self) -> &str;

    /// What has to be done before each operation and is not timed, such as storing the bytes.
    fn prepare(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The operation. Only this call is timed.
    fn op(&mut self) -> io::Result<()>;
}

impl<S: Subject + ?Sized> Subject for Box<S> {
    fn name(&self) -> &str {
        (**self).name()
    }
    fn prepare(&mut self) -> io::Result<()> {
        (**self).prepare()
    }
    fn op(&mut self) -> io::Result<()> {
        (**self).op()
    }
}

/// A [`Subject`] made of closures over a state; see [`subject`] and [`prepared`].
#[derive(Debug)]
pub struct FnSubject<T, P, O> {
    name: String,
    state: T,
    prepare: P,
    op: O,
}

impl<T, P, O> Subject for FnSubject<T, P, O>
where
    P: FnMut(&mut T) -> io::Result<()>,
    O: FnMut(&mut T) -> io::Result<()>,
{
    fn name(&self) -> &str {
        &self.name
    }
    fn prepare(&mut self) -> io::Result<()> {
        (self.prepare)(&mut self.state)
    }
    fn op(&mut self) -> io::Result<()> {
        (self.op)(&mut self.state)
    }
}

/// A subject whose operation is `op`.
pub fn subject(name: impl Into<String>, mut op: impl FnMut() -> io::Result<()>) -> impl Subject {
    prepared(name, (), |()| Ok(()), move |()| op())
}

/// A subject whose operation is `op` on `state`, with `prepare` before each, untimed.
pub fn prepared<T>(
    name: impl Into<String>,
    state: T,
    prepare: impl FnMut(&mut T) -> io::Result<()>,
    op: impl FnMut(&mut T) -> io::Result<()>,
) -> impl Subject {
    FnSubject {
        name: name.into(),
        state,
        prepare,
        op,
    }
}

/// How long and how finely to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Rounds, at least 1.
    pub rounds: usize,
    /// Timed operations of each subject in a round, at least 1.
    pub ops: usize,
    /// Untimed operations of each subject before those, to wake a peer and warm the caches.
    pub warm_ops: usize,
    /// The run ends after this time, with as many rounds as it then has.
    pub time_limit: Duration,
}

impl Default for Plan {
    /// 40 rounds of 50 operations, 5 warm ones before each block, at most 20 s.
    fn default() -> Self {
        Self {
            rounds: 40,
            ops: 50,
            warm_ops: 5,
            time_limit: Duration::from_secs(20),
        }
    }
}

impl Plan {
    /// The smallest plan that runs everything once: for tests.
    pub const TINY: Self = Self {
        rounds: 3,
        ops: 4,
        warm_ops: 1,
        time_limit: Duration::from_secs(5),
    };
}

/// Figures of one set of operations. Times are in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The median.
    pub median_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The percentile 99.9.
    pub p999_us: f64,
    /// Operations per second of timed time (in [`crate::threads`]: of wall time, all threads).
    pub per_second: f64,
    /// How many operations there were.
    pub count: u64,
}

impl Summary {
    /// The figures of a histogram in nanoseconds whose operations took `total` together.
    pub(crate) fn of(histogram: &Histogram<u64>, total: Duration) -> Self {
        let seconds = total.as_secs_f64();
        Self {
            median_us: histogram.value_at_quantile(0.5) as f64 / 1e3,
            p99_us: histogram.value_at_quantile(0.99) as f64 / 1e3,
            p999_us: histogram.value_at_quantile(0.999) as f64 / 1e3,
            per_second: if seconds > 0.0 {
                histogram.len() as f64 / seconds
            } else {
                0.0
            },
            count: histogram.len(),
        }
    }
}

/// An empty histogram from 1 ns to one minute, with three digits.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid constants")
}

/// The speed state of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The limit was quick in this round.
    Fast,
    /// The limit was slow in this round.
    Slow,
}

impl State {
    /// Both states, the fast one first.
    pub const ALL: [Self; 2] = [Self::Fast, Self::Slow];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Slow => "slow",
        }
    }
}

/// Two groups of rounds count as two states when their medians differ by more than this factor.
pub const STATES_DIFFER: f64 = 1.6;

/// The threshold between the two speeds of a limit, or `None` if it had one speed only.
///
/// `medians` are a limit's medians, one a round, in any unit, positive. The groups are those with
/// the least scatter around their means on a logarithmic scale; each must have a twentieth of
/// the rounds and at least two, so that single disturbed rounds are not taken for a state.
pub fn split_states(medians: &[f64]) -> Option<f64> {
    let mut sorted = medians.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let n = sorted.len();
    let least = n.div_ceil(20).max(2);
    if n < 2 * least {
        return None;
    }
    // Fewer than `least` outliers at either end have no weight.
    let clipped = |m: &f64| m.clamp(sorted[least - 1], sorted[n - least]);
    let logs: Vec<f64> = sorted
        .iter()
        .map(|m| clipped(m).max(f64::MIN_POSITIVE).ln())
        .collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    // Least scatter within the groups is the same as most between them.
    let between = |k: usize| {
        let d = mean(&logs[..k]) - mean(&logs[k..]);
        k as f64 * (n - k) as f64 * d * d
    };
    let k = (least..=n - least).max_by(|&a, &b| between(a).total_cmp(&between(b)))?;
    // Of groups with an even number, the two medians that are closer together.
    let (fast, slow) = (sorted[k / 2], sorted[k + (n - k - 1) / 2]);
    (slow > fast * STATES_DIFFER).then(|| (sorted[k - 1] * sorted[k]).sqrt())
}

/// What one subject did: its operations in order of rounds, and each round's median.
#[derive(Debug, Clone)]
struct Taken {
    name: String,
    /// Nanoseconds; round `r` is the part from `ends[r - 1]` (or 0) to `ends[r]`.
    samples: Vec<u64>,
    ends: Vec<usize>,
    /// Nanoseconds.
    medians: Vec<f64>,
}

/// The outcome of [`paired`].
#[derive(Debug, Clone)]
pub struct Paired {
    taken: Vec<Taken>,
    rounds: usize,
}

/// A subject compared with its limit. A ratio of 1.5 says: half as long again as the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// The median over the rounds of the ratio of the two medians.
    pub ratio: f64,
    /// The rounds that it is taken from.
    pub rounds: usize,
}

/// Runs the subjects in paired rounds. An error of any operation ends the run.
pub fn paired(subjects: &mut [&mut dyn Subject], plan: Plan) -> io::Result<Paired> {
    let (rounds, ops) = (plan.rounds.max(1), plan.ops.max(1));
    let mut taken: Vec<Taken> = subjects
        .iter()
        .map(|s| Taken {
            name: s.name().to_owned(),
            samples: Vec::with_capacity(rounds * ops),
            ends: Vec::with_capacity(rounds),
            medians: Vec::with_capacity(rounds),
        })
        .collect();
    let mut sorted = Vec::with_capacity(ops);
    let n = subjects.len();
    let mut complete = 0;
    let begin = Instant::now();
    let over = || begin.elapsed() >= plan.time_limit;
    for round in 0..rounds {
        if round > 0 && over() {
            break;
        }
        let mut cut = false;
        for turn in 0..n {
            // Rotated, and every other round backwards, so that no subject always follows
            // the same one.
            let turn = if round % 2 == 0 { turn } else { n - 1 - turn };
            let i = (turn + round / 2) % n;
            cut |= block(
                &mut *subjects[i],
                &mut taken[i].samples,
                ops,
                plan.warm_ops,
                &over,
            )?;
        }
        if cut && round > 0 {
            break;
        }
        for t in &mut taken {
            let from = t.ends.last().copied().unwrap_or(0);
            sorted.clear();
            sorted.extend_from_slice(&t.samples[from..]);
            t.ends.push(t.samples.len());
            t.medians.push(median(&mut sorted, |&ns| ns as f64));
        }
        complete += 1;
    }
    for t in &mut taken {
        t.samples.truncate(t.ends.last().copied().unwrap_or(0));
    }
    Ok(Paired {
        taken,
        rounds: complete,
    })
}

/// One subject's part of a round; whether the time limit cut it. At least one operation is timed.
fn block(
    subject: &mut dyn Subject,
    samples: &mut Vec<u64>,
    ops: usize,
    warm_ops: usize,
    over: &dyn Fn() -> bool,
) -> io::Result<bool> {
    for _ in 0..warm_ops {
        if over() {
            break;
        }
        subject.prepare()?;
        subject.op()?;
    }
    for i in 0..ops {
        if i > 0 && over() {
            return Ok(true);
        }
        subject.prepare()?;
        let start = Instant::now();
        let done = subject.op();
        let time = start.elapsed();
        done?;
        samples.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
    }
    Ok(false)
}

/// The median of `values`, which it orders; 0 if there are none.
fn median<T>(values: &mut [T], value: impl Fn(&T) -> f64) -> f64 {
    values.sort_unstable_by(|a, b| value(a).total_cmp(&value(b)));
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => value(&values[n / 2]),
        n => (value(&values[n / 2 - 1]) + value(&values[n / 2])) / 2.0,
    }
}

impl Paired {
    /// How many rounds counted.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// The names of the subjects, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.taken.iter().map(|t| t.name.as_str())
    }

    /// The medians of one subject, one a round, in microseconds.
    pub fn round_medians_us(&self, name: &str) -> Option<Vec<f64>> {
        Some(self.find(name)?.medians.iter().map(|ns| ns / 1e3).collect())
    }

    /// The state of each round as `limit` showed it, or `None` if its speed did not change.
    pub fn states(&self, limit: &str) -> Option<Vec<State>> {
        let medians = &self.find(limit)?.medians;
        let threshold = split_states(medians)?;
        let state = |&m: &f64| {
            if m <= threshold {
                State::Fast
            } else {
                State::Slow
            }
        };
        Some(medians.iter().map(state).collect())
    }

    /// The figures of one subject over all rounds.
    pub fn summary(&self, name: &str) -> Option<Summary> {
        self.summarize(self.find(name)?, |_| true)
    }

    /// The figures of one subject over the rounds in which `limit` showed `state`; `None` if the
    /// limit had one speed only.
    pub fn summary_in(&self, name: &str, limit: &str, state: State) -> Option<Summary> {
        let states = self.states(limit)?;
        self.summarize(self.find(name)?, |round| states[round] == state)
    }

    /// `name` against `limit` over all rounds.
    pub fn ratio(&self, name: &str, limit: &str) -> Option<Ratio> {
        self.ratios(name, &[limit], |_| true)
    }

    /// `name` against `limit` over the rounds in which the limit showed `state`; `None` if the
    /// limit had one speed only.
    pub fn ratio_in(&self, name: &str, limit: &str, state: State) -> Option<Ratio> {
        let states = self.states(limit)?;
        self.ratios(name, &[limit], |round| states[round] == state)
    }

    /// `name` against the slower of `limits` in each round: the limit of an operation that does
    /// both at the same time.
    pub fn ratio_to_slower(&self, name: &str, limits: &[&str]) -> Option<Ratio> {
        self.ratios(name, limits, |_| true)
    }

    fn find(&self, name: &str) -> Option<&Taken> {
        self.taken.iter().find(|t| t.name == name)
    }

    fn summarize(&self, taken: &Taken, which: impl Fn(usize) -> bool) -> Option<Summary> {
        let mut all = histogram();
        let mut total = 0;
        let mut from = 0;
        for (round, &end) in taken.ends.iter().enumerate() {
            if which(round) {
                for &ns in &taken.samples[from..end] {
                    all.saturating_record(ns);
                    total += ns;
                }
            }
            from = end;
        }
        (!all.is_empty()).then(|| Summary::of(&all, Duration::from_nanos(total)))
    }

    fn ratios(&self, name: &str, limits: &[&str], which: impl Fn(usize) -> bool) -> Option<Ratio> {
        let subject = self.find(name)?;
        let limits: Vec<_> = limits.iter().map(|l| self.find(l)).collect::<Option<_>>()?;
        let slower = |round: usize| limits.iter().map(|l| l.medians[round]).fold(0.0, f64::max);
        let mut ratios: Vec<f64> = (0..self.rounds)
            .filter(|&round| which(round) && slower(round) > 0.0)
            .map(|round| subject.medians[round] / slower(round))
            .collect();
        let rounds = ratios.len();
        (rounds > 0).then(|| Ratio {
            ratio: median(&mut ratios, |&r| r),
            rounds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result as if measured: one sample a round.
    fn made(subjects: &[(&str, &[u64])]) -> Paired {
        let taken = subjects
            .iter()
            .map(|(name, samples)| Taken {
                name: (*name).into(),
                samples: samples.to_vec(),
                ends: (1..=samples.len()).collect(),
                medians: samples.iter().map(|&s| s as f64).collect(),
            })
            .collect();
        Paired {
            taken,
            rounds: subjects[0].1.len(),
        }
    }

    #[test]
    fn two_speeds_are_told_apart() {
        let two = [2.5, 8.0, 2.6, 3.1, 7.9, 8.4, 2.7, 2.5, 7.6, 2.5];
        let threshold = split_states(&two).unwrap();
        assert!(threshold > 3.1 && threshold < 7.6);
        assert_eq!(split_states(&[2.5, 2.6, 2.7, 3.0, 3.5, 2.5]), None);
        assert_eq!(
            split_states(&[2.5, 2.6, 2.5, 2.6, 90.0, 2.6]),
            None,
            "one disturbed round"
        );
        assert_eq!(split_states(&[1.0, 9.0]), None);
        assert_eq!(split_states(&[]), None);
    }

    #[test]
    fn ratios_pair_the_rounds() {
        // Twice the limit in the fast state, three times in the slow one.
        let limit = [100, 100, 110, 300, 310, 300];
        let mojim = [200, 200, 220, 900, 930, 900];
        let log = [150, 150, 150, 150, 150, 150];
        let got = made(&[("limit", &limit), ("mojim", &mojim), ("log", &log)]);
        assert_eq!(
            got.ratio("mojim", "limit").unwrap(),
            Ratio {
                ratio: 2.5,
                rounds: 6
            }
        );
        let fast = got.ratio_in("mojim", "limit", State::Fast).unwrap();
        let slow = got.ratio_in("mojim", "limit", State::Slow).unwrap();
        assert_eq!((fast.ratio, fast.rounds), (2.0, 3));
        assert_eq!((slow.ratio, slow.rounds), (3.0, 3));
        assert_eq!(
            got.summary_in("mojim", "limit", State::Slow).unwrap().count,
            3
        );
        assert_eq!(
            got.ratio_in("mojim", "log", State::Fast),
            None,
            "one speed only"
        );
        assert_eq!(got.ratio("mojim", "pigeon"), None);
        let slower = got.ratio_to_slower("mojim", &["limit", "log"]).unwrap();
        assert!(
            (slower.ratio - (1.4667 + 3.0) / 2.0).abs() < 0.001,
            "{slower:?}"
        );
    }

    #[test]
    fn every_subject_gets_every_round() {
        let add = |n: &mut u32, by| {
            *n += by;
            Ok(())
        };
        let mut calls = [0; 3];
        let [a, b, c] = &mut calls;
        let mut a = prepared("a", a, |n| add(n, 100), |n| add(n, 1));
        let mut b = subject("b", || add(b, 1));
        let mut c: Box<dyn Subject> = Box::new(subject("c", || add(c, 1)));
        let got = paired(&mut [&mut a, &mut b, &mut c], Plan::TINY).unwrap();
        assert_eq!(got.rounds(), 3);
        assert!(got.names().eq(["a", "b", "c"]));
        for name in ["a", "b", "c"] {
            assert_eq!(got.summary(name).unwrap().count, 12);
            assert_eq!(got.round_medians_us(name).unwrap().len(), 3);
        }
        drop((a, b, c));
        assert_eq!(calls, [15 * 101, 15, 15]);
    }

    #[test]
    fn the_time_limit_leaves_whole_rounds() {
        let mut slow = subject("slow", || {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        });
        let mut quick = subject("quick", || Ok(()));
        let plan = Plan {
            rounds: 1000,
            ops: 3,
            warm_ops: 0,
            time_limit: Duration::from_millis(20),
        };
        let got = paired(&mut [&mut slow, &mut quick], plan).unwrap();
        let rounds = got.rounds();
        assert!((1..1000).contains(&rounds));
        assert_eq!(got.round_medians_us("slow").unwrap().len(), rounds);
        assert_eq!(got.ratio("slow", "quick").unwrap().rounds, rounds);
        // No time at all: still one operation each.
        let plan = Plan {
            time_limit: Duration::ZERO,
            ..plan
        };
        let got = paired(&mut [&mut slow, &mut quick], plan).unwrap();
        assert_eq!((got.rounds(), got.summary("slow").unwrap().count), (1, 1));
    }

    #[test]
    fn an_error_ends_the_run() {
        let mut bad = subject("bad", || Err(io::Error::other("no")));
        assert!(paired(&mut [&mut bad], Plan::TINY).is_err());
    }
}
