//! The fewest failures after which no node may go on.
//!
//! If a person has to decide, the run is over, and nothing is reported as wrong. This is
//! only right if there was a reason for it. Among hundreds of failures there is always
//! one that looks like a reason. So the run is repeated with ever fewer of its failures,
//! as long as it still ends in this way. From the failures that are left, each member of
//! the view must have lost what it had (docs/reference/two-failures.md: *ring*, *since* and *lost*
//! apply only if what each member held is gone). Owns this search, and the check of what
//! is left.

use std::collections::BTreeSet;

use crate::failures::{Failure, Only};

/// The end of a run after which no node may go on.
#[derive(Debug, Clone, Default)]
pub struct Nobody {
    /// The nodes whose copies must have lost something to justify it.
    pub needs: Vec<&'static str>,
    /// The failures that happened.
    pub failures: Vec<Failure>,
}

/// The result of a run.
pub struct Ran {
    /// What was broken.
    pub failure: Option<String>,
    /// Set if no node may go on.
    pub nobody: Option<Nobody>,
}

/// The most runs for one seed: enough for a binary search among a few hundred failures of
/// which a handful matter.
const MOST: u64 = 60;

fn list(failures: &[Failure]) -> String {
    let all: Vec<_> = failures.iter().map(|f| f.to_string()).collect();
    format!("[{}]", all.join(", "))
}

struct Search<F> {
    run: F,
    runs: u64,
    /// The result with the fewest failures so far.
    least: Nobody,
}

impl<F: FnMut(Only) -> Ran> Search<F> {
    /// Repeats the run with these failures alone. Returns whether it still ends in this
    /// way.
    fn ends_with(&mut self, keep: impl Fn(usize, &Failure) -> bool) -> Result<bool, String> {
        let kept = self.least.failures.iter().enumerate();
        let kept: Vec<_> = kept.filter(|(i, f)| keep(*i, f)).map(|(_, f)| f).collect();
        if self.runs == MOST || kept.len() == self.least.failures.len() {
            return Ok(false);
        }
        self.runs += 1;
        let only: BTreeSet<u64> = kept.iter().map(|f| f.number).collect();
        let ran = (self.run)(Some(only.clone()));
        if let Some(f) = ran.failure {
            return Err(format!(
                "shrunk: with no failures but the numbers {only:?}: {f}"
            ));
        }
        let Some(least) = ran.nobody else {
            return Ok(false);
        };
        self.least = least;
        Ok(true)
    }

    /// Leaves out parts of the failures in turn, in ever smaller parts.
    fn search(&mut self) -> Result<(), String> {
        // A failure that takes no data is seldom the reason.
        self.ends_with(|_, f| f.takes.data())?;
        let mut parts = 2;
        while !self.least.failures.is_empty() && self.runs < MOST {
            let n = self.least.failures.len();
            let size = n.div_ceil(parts);
            let mut shorter = false;
            for part in (0..n.div_ceil(size)).rev() {
                let out = part * size..(part + 1) * size;
                shorter = self.ends_with(|i, _| !out.contains(&i))?;
                if shorter {
                    break;
                }
            }
            if !shorter && size == 1 {
                break;
            }
            parts = match shorter {
                true => (parts - 1).max(2),
                false => (2 * parts).min(n),
            };
        }
        Ok(())
    }
}

/// Shrinks the failures of `first`. `run` repeats the run with some of them. Returns the
/// fewest that were found; an error if a run breaks an invariant, or if the failures that
/// are left do not justify that no node may go on.
pub fn shrink(first: Nobody, run: impl FnMut(Only) -> Ran) -> Result<Vec<Failure>, String> {
    let mut search = Search {
        run,
        runs: 0,
        least: first,
    };
    search.search()?;
    let Nobody { needs, failures } = search.least;
    let lost = |node: &&str| failures.iter().any(|f| *f.node == **node && f.takes.data());
    match needs.iter().find(|n| !lost(n)) {
        None => Ok(failures),
        Some(n) => Err(format!(
            "shrunk: nobody may go on after {}, though {n} lost nothing",
            list(&failures)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failures::Takes;

    /// Sixty failures, of both nodes in turn; every third takes data.
    fn many() -> Vec<Failure> {
        let one = |number| Failure {
            number,
            node: ["a", "b"][number as usize % 2].into(),
            takes: match number % 3 {
                0 => Takes::Power,
                _ => Takes::Process,
            },
        };
        (0..60).map(one).collect()
    }

    /// A run that ends in this way if all of `why` happen.
    fn ends(why: &[u64]) -> impl FnMut(Only) -> Ran {
        move |only| {
            let only = only.expect("some are left out");
            let failures = many().into_iter().filter(|f| only.contains(&f.number));
            let nobody = Nobody {
                needs: vec!["a", "b"],
                failures: failures.collect(),
            };
            Ran {
                failure: None,
                nobody: why.iter().all(|n| only.contains(n)).then_some(nobody),
            }
        }
    }

    fn first() -> Nobody {
        Nobody {
            needs: vec!["a", "b"],
            failures: many(),
        }
    }

    #[test]
    fn what_does_not_matter_goes() {
        let left = shrink(first(), ends(&[12, 33])).unwrap();
        let left: Vec<_> = left.iter().map(|f| f.number).collect();
        assert_eq!(left, [12, 33]);
    }

    /// A power loss of one node is not a reason, even if the other node lost its power at
    /// another time.
    #[test]
    fn what_has_nothing_to_do_with_it_excuses_nothing() {
        let e = shrink(first(), ends(&[12])).unwrap_err();
        assert!(e.contains("[12: Power of a], though b lost nothing"), "{e}");
        let e = shrink(first(), ends(&[12, 31])).unwrap_err();
        assert!(e.contains("though b lost nothing"), "{e}");
    }

    #[test]
    fn what_breaks_with_fewer_failures_is_broken() {
        let run = |_| Ran {
            failure: Some("3: lost".into()),
            nobody: None,
        };
        assert!(shrink(first(), run).unwrap_err().ends_with("3: lost"));
    }
}
