//! Gives back the pages of a region that are what the file has.
//!
//! So a region larger than memory can be changed. This is done only if it is asked for (`Meter`).
//!
//! Source: `docs/reference/invariants.md`, "The order of a record's life". A page is released
//! only while stores to it wait, and only if it is the file's.
//!
//! This file owns the steps below. Their state is in `release_queue.rs`.
//!
//! # How
//!
//! - R1: a chunk is *shut*: closed, without a scan.
//! - R2: the caller learns which records were begun by then, and waits until the file has them.
//! - R3: it compares the chunk's copies with the file, page by page.
//! - R4: pages that are the same are discarded, if the chunk was not opened since R1, and while
//!   none can be opened. They are protected again.
//!
//! # Why nothing is lost
//!
//! * No thread stores to the chunk from R1 to R4, or R4 does nothing. A store opens the chunk,
//!   which makes it *fresh*. Between the check for that and the end of R4 no chunk is opened
//!   (`Mprotect::alone`).
//! * So what R3 compared is what R4 discards. Every record that is begun after R1 takes the same
//!   bytes from there. The file shows them before such a record is applied, and after.
//! * Pages that are not committed differ from the file, and stay, with their marks in the page
//!   tables.
//! * A shut chunk may have pages that no collect has found. It is *unseen* until a collect scans
//!   it, or no such pages are left. It is made unseen before it counts as closed. A collect reads
//!   the two in the opposite order, so it finds the chunk in one of them. A re-arming collect
//!   must not run between the two. It could clear the unseen mark, scan, and miss a store made
//!   after that to the chunk, which is still open. So a thread that shuts or discards holds the
//!   region's images, as one that collects does.

use std::io;
use std::ops::Range;

use super::levels::TwoLevel;
use super::release_queue::ReleaseQueue;
use crate::track::meter::{Counts, Meter};
use crate::track::tracker::{GivesBack, push};

/// Chunks that are shut while stores wait, at most.
const AT_ONCE: usize = 32;

impl TwoLevel {
    fn held(&self) -> &ReleaseQueue {
        self.held.as_ref().expect("it was attached with a meter")
    }

    fn chunk_bytes(&self, chunk: usize) -> Range<usize> {
        self.bytes(&(chunk..chunk + 1), &(0..self.len))
    }

    /// What a closed chunk holds; certain only while no chunk is opened.
    fn counted(&self, chunk: usize) -> io::Result<Counts> {
        let page = rustix::param::page_size();
        let mut counts = Counts::full(0);
        self.pages.look(&self.chunk_bytes(chunk), |pages, found| {
            // At most the pages of a chunk, which a u16 can count.
            let n = (pages.len() / page) as u16;
            counts.held += if found.copied { n } else { 0 };
            counts.unsaved += if found.written { n } else { 0 };
        })?;
        Ok(counts)
    }
}

impl GivesBack for TwoLevel {
    fn shut(&self) -> io::Result<()> {
        self.process.check()?;
        let r = self.held();
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
            // Also if some were not counted: they are shut, and no later shut finds them again.
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

    fn recount(&self) -> io::Result<()> {
        let r = self.held();
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

    fn take(&self, pages: usize, most: usize) -> (Vec<usize>, usize) {
        let mut order = self.held().order();
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

    fn holding(&self) -> usize {
        self.held().order().queue.len()
    }

    fn put_back(&self, chunk: usize) {
        // A chunk that was opened is queued when it is shut.
        if !self.chunks.is_fresh(chunk) && self.chunks.counts(chunk) != Counts::full(0) {
            self.held().order().push(chunk);
        }
    }

    fn copies(&self, chunk: usize, out: &mut Vec<Range<usize>>) -> io::Result<()> {
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

    unsafe fn discard(&self, chunk: usize, pages: &[Range<usize>]) -> io::Result<bool> {
        self.process.check()?;
        let r = self.held();
        self.chunks.alone(|alone| {
            if self.chunks.is_fresh(chunk) {
                return Ok(false);
            }
            let bytes = self.chunk_bytes(chunk);
            for range in pages {
                assert!(bytes.start <= range.start && range.end <= bytes.end);
                // SAFETY: no thread stores to the chunk now, nor did since it was shut; the rest is
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

    fn let_in(&self, bytes: &Range<usize>) {
        self.chunks.let_in(bytes);
    }

    fn meter(&self) -> &Meter {
        &self.held().meter
    }
}
