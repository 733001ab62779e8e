//! Random numbers, time and the trace, which a world's disks and net share.
//!
//! Owns the rates of faults. Invariants:
//! - Each fault that happened is counted under its name.
//! - A fault that takes something from a node's disk is one of the run's failures.

use crate::failures::{Failures, Takes};
use crate::rng::Rng;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// A trace keeps its latest events, at most this many.
const TRACED: usize = 20_000;

/// What goes wrong, and how often. Rates are chances in 1000.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    /// A read fails.
    pub read_error: u32,
    /// A write fails, with any part of it done.
    pub write_error: u32,
    /// A sync fails; what it did not write is never written.
    pub sync_error: u32,
    /// The kernel writes some dirty bytes before a cached write.
    pub write_back: u32,
    /// The least time that bytes are on their way.
    pub delay_min: Duration,
    /// The most time that bytes are on their way.
    pub delay_max: Duration,
    /// Bytes take 10 to 1000 times as long.
    pub slow: u32,
    /// A send is split into pieces that arrive apart.
    pub split: u32,
    /// A send takes a part of the bytes.
    pub short_send: u32,
    /// A receive gives a part of what is there.
    pub short_recv: u32,
    /// A send breaks its connection; both ends are reset.
    pub reset: u32,
    /// A send silences its connection, in one direction or both.
    pub half_open: u32,
    /// A connection attempt is refused.
    pub connect_refused: u32,
    /// One bit of a send is flipped on the way, and the network's checksum does not show
    /// it.
    pub rot: u32,
    /// Bytes that a connection holds in each direction.
    pub buffer: usize,
    /// How long TCP repeats bytes that a partition holds up, before it gives up.
    pub retransmit_limit: Duration,
}

impl Faults {
    /// Nothing goes wrong, and bytes always take 20 µs.
    pub fn none() -> Faults {
        Faults {
            read_error: 0,
            write_error: 0,
            sync_error: 0,
            write_back: 0,
            delay_min: Duration::from_micros(20),
            delay_max: Duration::from_micros(20),
            slow: 0,
            split: 0,
            short_send: 0,
            short_recv: 0,
            reset: 0,
            half_open: 0,
            connect_refused: 0,
            rot: 0,
            buffer: 256 << 10,
            retransmit_limit: Duration::from_secs(15),
        }
    }

    /// Draws a mixture: every kind is absent half of the time, and one world
    /// in eight has none at all.
    pub fn draw(rng: &mut Rng) -> Faults {
        let mut faults = Faults::none();
        if rng.below(8) == 0 {
            return faults;
        }
        let mut rate = |most: u64| match rng.coin() {
            true => 0,
            false => rng.between(1, most) as u32,
        };
        faults.read_error = rate(5);
        faults.write_error = rate(10);
        faults.sync_error = rate(10);
        faults.write_back = rate(100);
        faults.slow = rate(50);
        faults.split = rate(300);
        faults.short_send = rate(100);
        faults.short_recv = rate(300);
        faults.reset = rate(10);
        faults.half_open = rate(5);
        faults.connect_refused = rate(200);
        if rng.coin() {
            faults.delay_min = Duration::from_micros(rng.between(0, 50));
            faults.delay_max = faults.delay_min + Duration::from_micros(rng.between(0, 5000));
        }
        if rng.below(4) == 0 {
            faults.buffer = rng.between(1 << 10, 256 << 10) as usize;
        }
        faults
    }
}

/// Random numbers, time and the trace; what disks and the net draw on.
#[derive(Debug)]
pub(crate) struct Ctx {
    pub(crate) now: Duration,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) failures: Failures,
    counts: BTreeMap<&'static str, u64>,
    trace: Option<VecDeque<String>>,
}

impl Ctx {
    /// At time zero, with nothing counted and no record.
    pub(crate) fn new(seed: u64, faults: Faults) -> Ctx {
        Ctx {
            now: Duration::ZERO,
            rng: Rng::new(seed),
            faults,
            failures: Failures::default(),
            counts: BTreeMap::new(),
            trace: None,
        }
    }

    /// How often each fault has happened.
    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.clone()
    }

    /// Begins to record what happens.
    pub(crate) fn trace_on(&mut self) {
        self.trace.get_or_insert_with(VecDeque::new);
    }

    /// The record, oldest first.
    pub(crate) fn traced(&self) -> Vec<String> {
        self.trace.iter().flatten().cloned().collect()
    }

    /// Counts a fault.
    pub(crate) fn hit(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    /// Counts several.
    pub(crate) fn add(&mut self, name: &'static str, n: u64) {
        if n != 0 {
            *self.counts.entry(name).or_default() += n;
        }
    }

    /// Draws whether a fault happens, and counts it if so.
    pub(crate) fn fault(&mut self, rate: u32, name: &'static str) -> bool {
        let happens = self.rng.per_mille(rate);
        if happens {
            self.hit(name);
            self.trace(|| format!("fault: {name}"));
        }
        happens
    }

    /// Draws whether a fault of a node's disk happens, which is one of the run's
    /// failures, and counts it if so.
    pub(crate) fn failure(&mut self, rate: u32, name: &'static str, node: &Arc<str>) -> bool {
        if !self.rng.per_mille(rate) || !self.failures.draw(node, Takes::Call) {
            return false;
        }
        self.hit(name);
        self.trace(|| format!("fault: {name}"));
        true
    }

    /// Draws how many in 1000 of the parts that are not durable survive this crash: none,
    /// all, or a mixture.
    pub(crate) fn keep(&mut self) -> u32 {
        match self.rng.below(3) {
            0 => 0,
            1 => 1000,
            _ => self.rng.between(1, 999) as u32,
        }
    }

    /// Adds an event to the record, if there is one.
    pub(crate) fn trace(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACED {
                trace.pop_front();
            }
            trace.push_back(format!("{:>12?} {}", self.now, text()));
        }
    }
}
