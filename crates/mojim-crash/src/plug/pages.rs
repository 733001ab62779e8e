//! The stores of a program that has more to store than its machine has memory.
//!
//! Owns the program's steps and their model, which says what must be found. Everything follows from
//! the seed. The contents of a page are computed from the steps that stored to it last. So the
//! model takes 8 bytes for each page of the region, and no program needs the region twice.

use mojim_sim::Rng;

use crate::workload::PAGE;

/// Words in a page.
pub(super) const WORDS: usize = PAGE / 8;
/// Words at a page's beginning that a step may store alone.
const HEAD: usize = 64;

/// How a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Its ranges are committed, and nothing else.
    Ranges,
    /// The region is committed.
    Region,
    /// It is taken back.
    Rollback,
}

/// One step: what it stores, and how it ends.
pub(super) struct Step {
    /// Pages, ascending, with whether all of the page is stored.
    pub(super) pages: Vec<(usize, bool)>,
    pub(super) end: End,
}

/// Step `number` over a region of so many pages: every fifth is small, the others store to
/// an eighth to half of the pages.
pub(super) fn step(seed: u64, number: u64, pages: usize) -> Step {
    let mut rng = Rng::new(seed.rotate_left(24) ^ number);
    let small = rng.below(5) == 0;
    let one_in = match small {
        true => pages as u64 / 32,
        false => rng.between(2, 8),
    };
    let chosen = (0..pages).filter_map(|p| match rng.below(one_in) {
        0 => Some((p, rng.below(4) != 0)),
        _ => None,
    });
    let chosen = chosen.collect();
    let end = match rng.below(4) {
        0 => End::Rollback,
        _ if small => End::Ranges,
        _ => End::Region,
    };
    Step { pages: chosen, end }
}

/// Word `i` of a page after `step` has stored it; zero before the first.
fn word(seed: u64, page: usize, step: u32, i: usize) -> u64 {
    if step == 0 {
        return 0;
    }
    let base = seed ^ (page as u64) << 32 ^ u64::from(step);
    let x = base
        .wrapping_add(i as u64 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ x >> 29
}

/// Writes what a step stores in a page.
pub(super) fn store(seed: u64, number: u64, page: usize, whole: bool, to: &mut [u64]) {
    let n = if whole { WORDS } else { HEAD };
    for (i, w) in to[..n].iter_mut().enumerate() {
        *w = word(seed, page, number as u32, i);
    }
}

/// Bytes that a step stores in a page.
pub(super) fn stored(whole: bool) -> usize {
    if whole { PAGE } else { HEAD * 8 }
}

/// The region after some steps.
#[derive(Clone)]
pub(super) struct Model {
    seed: u64,
    /// The step that stored last to each page's head, and to its rest.
    head: Vec<u32>,
    rest: Vec<u32>,
}

impl Model {
    /// Before the first step: zeros.
    pub(super) fn new(seed: u64, pages: usize) -> Model {
        Model {
            seed,
            head: vec![0; pages],
            rest: vec![0; pages],
        }
    }

    /// After the steps up to `last`.
    pub(super) fn after(seed: u64, pages: usize, last: u64) -> Model {
        let mut model = Model::new(seed, pages);
        for n in 1..=last {
            let step = step(seed, n, pages);
            if step.end != End::Rollback {
                model.take(n, &step);
            }
        }
        model
    }

    /// What a step stores is there.
    pub(super) fn take(&mut self, number: u64, step: &Step) {
        for &(page, whole) in &step.pages {
            self.head[page] = number as u32;
            if whole {
                self.rest[page] = number as u32;
            }
        }
    }

    /// Writes what a page must hold.
    pub(super) fn fill(&self, page: usize, to: &mut [u64]) {
        for (i, w) in to.iter_mut().enumerate() {
            *w = self.word(page, i);
        }
    }

    fn word(&self, page: usize, i: usize) -> u64 {
        let step = match i < HEAD {
            true => self.head[page],
            false => self.rest[page],
        };
        word(self.seed, page, step, i)
    }

    /// Whether a page is as it must be.
    pub(super) fn is(&self, page: usize, found: &[u64]) -> bool {
        let mut all = found.iter().enumerate();
        all.all(|(i, w)| *w == self.word(page, i))
    }

    /// Whether a page has a word of step `number`, as `word` has it.
    pub(super) fn has_of(&self, page: usize, number: u64, found: &[u64]) -> bool {
        let mut all = found.iter().enumerate();
        all.any(|(i, w)| *w == word(self.seed, page, number as u32, i))
    }

    /// The pages that are not as they must be: how many, and the first.
    pub(super) fn wrong(&self, region: &[u64]) -> Option<(usize, usize)> {
        let pages = region.chunks_exact(WORDS).enumerate();
        let mut wrong = pages
            .filter(|(p, found)| !self.is(*p, found))
            .map(|(p, _)| p);
        let first = wrong.next()?;
        Some((1 + wrong.count(), first))
    }
}

/// The step of which `region` is the result, which must be from `acknowledged` to the one
/// after; otherwise what is wrong.
pub(super) fn judge(seed: u64, region: &[u64], acknowledged: u64) -> Result<u64, String> {
    let pages = region.len() / WORDS;
    let mut model = Model::after(seed, pages, acknowledged);
    let Some(before) = model.wrong(region) else {
        return Ok(acknowledged);
    };
    let next = step(seed, acknowledged + 1, pages);
    if next.end != End::Rollback {
        model.take(acknowledged + 1, &next);
    }
    let Some(after) = model.wrong(region) else {
        return Ok(acknowledged + 1);
    };
    Err(format!(
        "of {pages} pages {} are not as after step {acknowledged}, which was acknowledged (the first is {}), and {} not as after the next one (the first is {})",
        before.0, before.1, after.0, after.1
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 96;

    fn made(seed: u64, last: u64) -> Vec<u64> {
        let mut region = vec![0; PAGES * WORDS];
        for n in 1..=last {
            let step = step(seed, n, PAGES);
            if step.end == End::Rollback {
                continue;
            }
            for (page, whole) in step.pages {
                store(seed, n, page, whole, &mut region[page * WORDS..][..WORDS]);
            }
        }
        region
    }

    #[test]
    fn steps_have_every_end_and_are_judged() {
        let ends: Vec<End> = (1..100).map(|n| step(7, n, PAGES).end).collect();
        for end in [End::Ranges, End::Region, End::Rollback] {
            assert!(ends.contains(&end), "{end:?}");
        }
        for seed in 0..20 {
            let region = made(seed, 9);
            assert_eq!(judge(seed, &region, 9), Ok(9));
            let ninth = step(seed, 9, PAGES);
            if ninth.end == End::Rollback {
                continue;
            }
            assert_eq!(judge(seed, &region, 8), Ok(9));
            // A part of a step, a step that was acknowledged and is lost, a bit.
            let mut part = made(seed, 8);
            let page = ninth.pages[0].0;
            assert!(judge(seed, &part, 9).is_err());
            part[page * WORDS] = region[page * WORDS];
            if ninth.pages.len() > 1 {
                assert!(judge(seed, &part, 8).is_err());
            }
            let mut bit = region.clone();
            bit[12345] ^= 1 << 9;
            assert!(judge(seed, &bit, 9).is_err());
            let has = Model::after(seed, PAGES, 8);
            let of = |r: &[u64]| has.has_of(page, 9, &r[page * WORDS..][..WORDS]);
            assert!(of(&region) && !of(&made(seed, 8)));
        }
    }
}
