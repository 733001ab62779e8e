//! The queue of a region's chunks for `release.rs`.
//!
//! This file owns the order in which a region's chunks that hold something beside the file are
//! tried. It also owns the marks of chunks that were closed without being scanned.
//!
//! Invariant: a chunk is queued once at most.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::track::meter::Meter;
use crate::track::tracker::push;
use mojim_env::locks::lock;

/// What a region needs to give pages back.
pub(super) struct ReleaseQueue {
    pub(super) meter: Arc<Meter>,
    /// One bit a chunk: closed, and not scanned since it was open.
    unseen: Vec<AtomicU64>,
    order: Mutex<Order>,
}

/// The chunks that hold something, the next one to be tried in front.
pub(super) struct Order {
    pub(super) queue: VecDeque<usize>,
    pub(super) queued: Vec<bool>,
}

impl ReleaseQueue {
    pub(super) fn new(chunks: usize, meter: Arc<Meter>) -> ReleaseQueue {
        ReleaseQueue {
            meter,
            unseen: (0..chunks.div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            order: Mutex::new(Order {
                queue: VecDeque::new(),
                queued: vec![false; chunks],
            }),
        }
    }

    pub(super) fn order(&self) -> MutexGuard<'_, Order> {
        lock(&self.order)
    }

    /// Appends the unseen chunks that overlap `wanted`. With `take`, those that lie wholly in
    /// `wanted` are not unseen any more.
    pub(super) fn unseen(
        &self,
        wanted: &Range<usize>,
        chunk: usize,
        len: usize,
        take: bool,
        out: &mut Vec<Range<usize>>,
    ) {
        let from = out.len();
        let chunks = wanted.start / chunk..wanted.end.div_ceil(chunk);
        for word in chunks.start / 64..chunks.end.div_ceil(64) {
            let mut left = self.unseen[word].load(Ordering::SeqCst);
            while left != 0 {
                let bit = left & left.wrapping_neg();
                left &= !bit;
                let c = word * 64 + bit.trailing_zeros() as usize;
                if !chunks.contains(&c) {
                    continue;
                }
                let all = wanted.start <= c * chunk && ((c + 1) * chunk).min(len) <= wanted.end;
                if take && all {
                    self.unseen[word].fetch_and(!bit, Ordering::SeqCst);
                }
                push(out, from, c..c + 1);
            }
        }
    }

    pub(super) fn set_unseen(&self, chunks: &Range<usize>) {
        for c in chunks.clone() {
            self.unseen[c / 64].fetch_or(1 << (c % 64), Ordering::SeqCst);
        }
    }

    pub(super) fn clear_unseen(&self, chunk: usize) {
        self.unseen[chunk / 64].fetch_and(!(1 << (chunk % 64)), Ordering::SeqCst);
    }
}

impl Order {
    pub(super) fn push(&mut self, chunk: usize) {
        if !std::mem::replace(&mut self.queued[chunk], true) {
            self.queue.push_back(chunk);
        }
    }
}
