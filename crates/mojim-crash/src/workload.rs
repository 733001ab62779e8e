//! The bytes that are written, and those that must be found.
//!
//! Owns the steps of a run and the model.
//!
//! Invariant: everything follows from the seed, so that a check knows each byte after each step
//! without having seen the run.

use mojim_sim::Rng;

/// Size of a page, in bytes.
pub const PAGE: usize = 4096;

/// New bytes for a part of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// The offset.
    pub at: usize,
    /// The new bytes.
    pub bytes: Vec<u8>,
}

/// Size of a run's region, in bytes.
pub fn region_len(seed: u64) -> usize {
    Rng::new(seed).between(64, 256) as usize * PAGE
}

/// The changes of step `step`, counted from 1, which are made as one: mostly a few
/// scattered places, some of which span a page boundary; sometimes a word in each of many
/// pages; sometimes one piece that is larger than a small log can take.
pub fn changes(seed: u64, step: u64) -> Vec<Patch> {
    let len = region_len(seed);
    let pages = len / PAGE;
    let mut rng = Rng::new(seed.rotate_left(32) ^ step);
    let mut out = Vec::new();
    let mut put = |rng: &mut Rng, at: usize, n: usize| {
        let at = at.min(len - n);
        let mut bytes = vec![0; n];
        rng.fill(&mut bytes);
        out.push(Patch { at, bytes });
    };
    match rng.below(32) {
        0 | 1 => {
            let every = rng.between(2, 4) as usize;
            for page in (rng.below(every as u64) as usize..pages).step_by(every) {
                let at = page * PAGE + rng.below(PAGE as u64 / 8) as usize * 8;
                put(&mut rng, at, 8);
            }
        }
        2 => {
            let n = rng.between(8, pages as u64 / 2) as usize * PAGE + rng.below(999) as usize;
            let at = rng.below(len as u64) as usize;
            put(&mut rng, at, n);
        }
        _ => {
            for _ in 0..rng.between(2, 8) {
                let n = match rng.below(4) {
                    0 => 8,
                    1 => rng.between(1, 64),
                    2 => rng.between(64, 1024),
                    _ => rng.between(1024, 6000),
                } as usize;
                let page = rng.below(pages as u64) as usize * PAGE;
                let at = match rng.below(3) {
                    // Across the boundary before the page.
                    0 => page.saturating_sub(rng.below(n as u64) as usize),
                    _ => page + rng.below(PAGE as u64) as usize,
                };
                put(&mut rng, at, n);
            }
        }
    }
    out
}

/// Whether the subject is closed cleanly and opened again before this step.
pub fn reopens(seed: u64, step: u64) -> bool {
    Rng::new(seed.rotate_left(16) ^ step).below(64) == 0
}

/// The region after a step.
pub struct Model {
    seed: u64,
    /// The step after which it is.
    pub step: u64,
    /// The region's bytes.
    pub bytes: Vec<u8>,
}

impl Model {
    /// The region before the first step: zeros.
    pub fn new(seed: u64) -> Model {
        Model {
            seed,
            step: 0,
            bytes: vec![0; region_len(seed)],
        }
    }

    /// The seed of the run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Applies the next step.
    pub fn advance(&mut self) {
        self.step += 1;
        for c in changes(self.seed, self.step) {
            self.bytes[c.at..c.at + c.bytes.len()].copy_from_slice(&c.bytes);
        }
    }

    /// Goes on to `step`, or starts again if `step` has passed.
    pub fn go_to(&mut self, step: u64) {
        if step < self.step {
            *self = Model::new(self.seed);
        }
        while self.step < step {
            self.advance();
        }
    }
}

/// The step of which `found` is the result, which must be from `acknowledged` to
/// `started`; otherwise what is wrong.
pub fn judge(
    model: &mut Model,
    found: &[u8],
    acknowledged: u64,
    started: u64,
) -> Result<u64, String> {
    if found.len() != model.bytes.len() {
        return Err(format!(
            "lost: {} bytes instead of {}",
            found.len(),
            model.bytes.len()
        ));
    }
    let mut nearest = (usize::MAX, 0, 0);
    model.go_to(acknowledged);
    loop {
        if model.bytes == found {
            return Ok(model.step);
        }
        let differ = |(a, b): (&u8, &u8)| a != b;
        let pairs = || model.bytes.iter().zip(found);
        let n = pairs().filter(|p| differ(*p)).count();
        if n < nearest.0 {
            let first = pairs().position(differ).expect("they differ");
            nearest = (n, model.step, first);
        }
        if model.step >= started {
            break;
        }
        model.advance();
    }
    let mut earlier = Model::new(model.seed);
    while earlier.step < acknowledged {
        if earlier.bytes == found {
            return Err(format!(
                "lost: all is as after step {}, acknowledged are {acknowledged}",
                earlier.step
            ));
        }
        earlier.advance();
    }
    let (n, step, first) = nearest;
    Err(format!(
        "torn: of steps {acknowledged} to {started}, {step} is nearest, and {n} bytes differ, the first at {first}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_from_the_seed_and_have_every_shape() {
        let (mut many, mut large, mut over, mut small) = (0, 0, 0, 0);
        for step in 1..=500 {
            let c = changes(7, step);
            assert_eq!(c, changes(7, step));
            assert!(!c.is_empty());
            for x in &c {
                let end = x.at + x.bytes.len();
                assert!(!x.bytes.is_empty() && end <= region_len(7));
                over += usize::from(x.at / PAGE != (end - 1) / PAGE);
                large += usize::from(x.bytes.len() > 8 * PAGE);
                small += usize::from(x.bytes.len() == 8);
            }
            many += usize::from(c.len() >= 16);
        }
        assert!(many > 10 && large > 5 && over > 100 && small > 100);
        assert_ne!(changes(7, 1), changes(8, 1));
    }

    #[test]
    fn what_is_lost_torn_or_made_up_is_found() {
        let mut m = Model::new(3);
        m.go_to(9);
        let nine = m.bytes.clone();
        assert_eq!(judge(&mut m, &nine, 8, 10), Ok(9));
        assert_eq!(judge(&mut m, &nine, 9, 9), Ok(9));
        assert!(
            judge(&mut m, &nine, 10, 11)
                .unwrap_err()
                .starts_with("lost: all")
        );
        assert!(judge(&mut m, &nine, 7, 8).unwrap_err().starts_with("torn"));
        assert!(
            judge(&mut m, &nine[1..], 9, 9)
                .unwrap_err()
                .starts_with("lost")
        );
        // A step of which one change is missing, and a step of which only one change is
        // there.
        m.go_to(8);
        let mut part = m.bytes.clone();
        let c = &changes(3, 9)[0];
        part[c.at..c.at + c.bytes.len()].copy_from_slice(&c.bytes);
        assert_ne!(part, nine);
        assert!(judge(&mut m, &part, 8, 9).unwrap_err().starts_with("torn"));
        let mut bit = nine.clone();
        bit[12345] ^= 4;
        let e = judge(&mut m, &bit, 9, 9).unwrap_err();
        assert!(e.contains("1 bytes differ, the first at 12345"), "{e}");
    }
}
