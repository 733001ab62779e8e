//! Gives back the pages of a region that are what the file has, so that a region larger than memory
//! can be changed. Where it is asked for (`Meter`).
//!
//! Source: `docs/invariants.md`, "The order of a record's life": a page is released only while
//! stores to it wait, and only if it is the file's.
//!
//! This file owns what a region's chunks hold, in which order they are tried, and the chunks that
//! were closed without being looked through.
//!
//! # How
//! R1 A chunk is *shut*: closed, as it is. R2 The caller learns which records were begun by then,
//! and waits until the file has them. R3 It compares the chunk's copies with the file, page by
//! page. R4 What is the same is discarded, if the chunk was not opened since R1, and while none can
//! be; its pages are protected again.
//!
//! # Why nothing is lost
//! * Nobody stores to the chunk from R1 to R4, or R4 does nothing: a store opens the chunk, which
//!   makes it *fresh*, and between the look at that and the end of R4 no chunk is opened
//!   ([`Mprotect::alone`]).
//! * So what R3 compared is what R4 discards, and every record that is begun after R1 takes the
//!   same bytes from there: the file shows them before such a record is applied, and after.
//! * What is not committed differs from the file, and stays, with its mark in the page tables.
//! * A chunk that is shut may have pages that no collect has found: it is *unseen* until one looks
//!   through it, or none are left. It is made unseen before it counts as closed; a collect reads
//!   the two the other way round, so it meets one of them. A collect that marks pages as clean
//!   must not run between the two: it could take the mark, scan, and miss a store that was made
//!   then to the chunk, still open. So who shuts or discards holds the region's images, as who
//!   collects does.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::meter::{Counts, Meter};
use super::super::push;
use super::TwoLevel;

/// Chunks that are shut while stores wait, at most.
const AT_ONCE: usize = 32;

/// What a region needs to give pages back.
pub(super) struct Release {
    meter: Arc<Meter>,
    /// One bit a chunk: closed, and not looked through since it was open.
    unseen: Vec<AtomicU64>,
    order: Mutex<Order>,
}

/// The chunks that hold something, the one that is to be tried first in front.
struct Order {
    queue: VecDeque<usize>,
    queued: Vec<bool>,
}

impl Release {
    pub(super) fn new(chunks: usize, meter: Arc<Meter>) -> Release {
        Release {
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

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the unseen chunks that overlap `wanted`. With `take` those of which all is wanted
    /// are not unseen any more.
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

    fn set_unseen(&self, chunks: &Range<usize>) {
        for c in chunks.clone() {
            self.unseen[c / 64].fetch_or(1 << (c % 64), Ordering::SeqCst);
        }
    }

    fn clear_unseen(&self, chunk: usize) {
        self.unseen[chunk / 64].fetch_and(!(1 << (chunk % 64)), Ordering::SeqCst);
    }
}

impl Order {
    fn push(&mut self, chunk: usize) {
        if !std::mem::replace(&mut self.queued[chunk], true) {
            self.queue.push_back(chunk);
        }
    }
}

/// What a program's stores can be kept out of, and given back: of one region.
impl TwoLevel {
    fn release(&self) -> &Release {
        self.release.as_ref().expect("it was attached with a meter")
    }

    fn chunk_bytes(&self, chunk: usize) -> Range<usize> {
        self.bytes(&(chunk..chunk + 1), &(0..self.len))
    }

    /// What a closed chunk holds, for certain while no chunk is opened.
    fn counted(&self, chunk: usize) -> io::Result<Counts> {
        let page = rustix::param::page_size();
        let mut counts = Counts::full(0);
        self.pages.look(&self.chunk_bytes(chunk), |pages, found| {
            // As many as a chunk has, which a u16 can count.
            let n = (pages.len() / page) as u16;
            counts.held += if found.copied { n } else { 0 };
            counts.unsaved += if found.written { n } else { 0 };
        })?;
        Ok(counts)
    }

    /// R1, of every chunk that was opened since it was shut, also if a collect has closed it; they
    /// count as what they hold, from then on. One that cannot be shut stays open, and counts as full.
    ///
    /// Nobody collects meanwhile.
    ///
    /// # Errors
    /// Those of the page tables' scan. Chunks that were not counted count as full.
    pub fn shut(&self) -> io::Result<()> {
        self.process.check()?;
        let r = self.release();
        let mut order = r.order();
        let mut open = Vec::new();
        self.chunks.fresh(&mut open);
        let parts = |run: &Range<usize>| {
            let end = run.end;
            let step = AT_ONCE;
            run.clone()
                .step_by(step)
                .map(move |c| c..(c + step).min(end))
        };
        let parts: Vec<_> = open.iter().flat_map(parts).collect();
        let mut rest = &parts[..];
        while !rest.is_empty() {
            let mut left = AT_ONCE;
            let fits = |p: &&Range<usize>| {
                let fits = p.len() <= left;
                left -= if fits { p.len() } else { left };
                fits
            };
            let (some, more) = rest.split_at(rest.iter().take_while(fits).count());
            rest = more;
            let counted = self.chunks.alone(|alone| {
                let counted: io::Result<()> = some.iter().try_for_each(|run| {
                    r.set_unseen(run);
                    if !alone.shut(run) {
                        return Ok(());
                    }
                    run.clone().try_for_each(|c| {
                        let counts = self.counted(c)?;
                        alone.count(c, counts);
                        if counts.unsaved == 0 {
                            r.clear_unseen(c);
                        }
                        Ok(())
                    })
                });
                alone.count_runs();
                counted
            });
            // Also where some were not counted: they are shut, and nobody finds them again.
            for c in some.iter().flat_map(Range::clone) {
                let counts = self.chunks.counts(c);
                if counts != Counts::full(0) {
                    order.push(c);
                }
            }
            counted?;
        }
        Ok(())
    }

    /// Counts once more what the chunks hold that are shut: sync points have found some of it.
    ///
    /// # Errors
    /// As [`TwoLevel::shut`].
    pub fn recount(&self) -> io::Result<()> {
        let r = self.release();
        let order = r.order();
        for &c in &order.queue {
            if self.chunks.counts(c).unsaved > 0 {
                self.chunks.alone(|alone| {
                    if !self.chunks.is_fresh(c) {
                        alone.count(c, self.counted(c)?);
                    }
                    io::Result::Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Takes chunks to be tried: those that were tried or found first longest ago, until they hold
    /// `pages` or are so many. And how much they hold.
    pub fn take(&self, pages: usize, most: usize) -> (Vec<usize>, usize) {
        let mut order = self.release().order();
        let (mut taken, mut held) = (Vec::new(), 0);
        while held < pages && taken.len() < most {
            let Some(c) = order.queue.pop_front() else {
                break;
            };
            order.queued[c] = false;
            held += usize::from(self.chunks.counts(c).held);
            taken.push(c);
        }
        (taken, held)
    }

    /// How many there are to be taken.
    pub fn holding(&self) -> usize {
        self.release().order().queue.len()
    }

    /// The chunk comes last, if it holds anything.
    pub fn put_back(&self, chunk: usize) {
        // One that was opened is found when it is shut.
        if !self.chunks.is_fresh(chunk) && self.chunks.counts(chunk) != Counts::full(0) {
            self.release().order().push(chunk);
        }
    }

    /// Appends the pages of a chunk of which there are copies in memory, or that were stored to (and
    /// swapped out since, it may be); none if it was opened since it was shut.
    ///
    /// # Errors
    /// Those of the page tables' scan.
    pub fn copies(&self, chunk: usize, out: &mut Vec<Range<usize>>) -> io::Result<()> {
        self.process.check()?;
        if self.chunks.is_fresh(chunk) {
            return Ok(());
        }
        let from = out.len();
        self.pages.look(&self.chunk_bytes(chunk), |pages, found| {
            if found.copied || found.written {
                push(out, from, pages);
            }
        })
    }

    /// R4. False: the chunk was opened since it was shut, and nothing is done.
    ///
    /// # Errors
    /// Those of the system calls; what was not discarded stays.
    ///
    /// # Safety
    /// The pages are whole, of this chunk, and had what the file has, after it was shut; so does
    /// the file now, and it is as long. Every record that was begun before it was shut is applied.
    pub unsafe fn discard(&self, chunk: usize, pages: &[Range<usize>]) -> io::Result<bool> {
        self.process.check()?;
        let r = self.release();
        self.chunks.alone(|alone| {
            if self.chunks.is_fresh(chunk) {
                return Ok(false);
            }
            let bytes = self.chunk_bytes(chunk);
            for range in pages {
                assert!(bytes.start <= range.start && range.end <= bytes.end);
                // SAFETY: nobody stores to the chunk now, nor did since it was shut; the rest is
                // the caller's promise.
                unsafe { self.pages.discard(range)? };
            }
            let counts = self.counted(chunk)?;
            alone.count(chunk, counts);
            if counts.unsaved == 0 {
                r.clear_unseen(chunk);
            }
            Ok(true)
        })
    }

    /// Opens what overlaps these bytes, whatever the bound is: for stores that must not wait.
    pub fn let_in(&self, bytes: &Range<usize>) {
        self.chunks.let_in(bytes);
    }

    /// The meter that counts.
    pub fn meter(&self) -> &Meter {
        &self.release().meter
    }
}
