//! Records that were acknowledged, and would be lost with this node's power.
//!
//! Owns the account of it, from the loss of the mirror on. Invariant: a loss is counted once, and
//! with what was at risk when it was noticed.

use std::sync::atomic::{AtomicU64, Ordering::*};
use std::time::Duration;

use mojim_env::turns::Mutex;
use mojim_env::turns::lock;
use mojim_store::log::Live;

/// What only this node's memory has, since the mirror was lost.
struct Risk {
    /// Bytes of these records when the loss was noticed.
    bytes: u64,
    /// When the loss was noticed.
    since: Duration,
    /// Where these records end, lane by lane.
    ends: Vec<u64>,
}

/// The account of it; nothing while no mirror is lost, or all is known.
#[derive(Default)]
pub(super) struct AtRisk(Mutex<Option<Risk>>);

impl AtRisk {
    /// A loss was noticed, unless the last one is not over yet.
    pub(super) fn begin(&self, bytes: u64, since: Duration, ends: Vec<u64>) {
        let mut risk = lock(&self.0);
        risk.get_or_insert(Risk { bytes, since, ends });
    }

    /// Counts what is `left` of the records before these ends, until that is nothing.
    pub(super) fn update<'a>(
        &self,
        left: impl FnOnce(&[u64]) -> u64,
        now: impl FnOnce() -> Duration,
        live: impl Fn(Live) -> &'a AtomicU64,
    ) {
        let mut risk = lock(&self.0);
        let Some(r) = &*risk else {
            return;
        };
        let left = left(&r.ends);
        live(Live::AtRisk).store(left, Relaxed);
        if left > 0 {
            return;
        }
        let took = now().saturating_sub(r.since);
        live(Live::LastRisk).store(r.bytes, Relaxed);
        live(Live::LastRiskTime).store(took.as_micros() as u64, Relaxed);
        // A reader that loads this count first sees the figures of this loss, or of a
        // later one.
        live(Live::Losses).fetch_add(1, Release);
        *risk = None;
    }
}
