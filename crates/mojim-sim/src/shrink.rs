//! The fewest failures after which nobody may go on.
//!
//! Where a person has to decide, a run is over, and nothing was wrong: that is as
//! good as the reason for it. Among hundreds of failures there is always one that
//! looks like a reason. So the run is repeated with ever fewer of its failures for
//! as long as it still ends so; of what is left then each member of the view must
//! have lost what it had (docs/guarantees.md: *ring*, *since* and *lost* stand only
//! where what each of them held is gone). Owns that search, and what has to be left.

use std::collections::BTreeSet;

use crate::failures::{Failure, Only};

/// How a run ended in which nobody may go on.
#[derive(Debug, Clone, Default)]
pub struct Nobody {
    /// Whose copies must have lost something for it.
    pub needs: Vec<&'static str>,
    /// The failures that happened.
    pub failures: Vec<Failure>,
}

/// What a run came to.
pub struct Ran {
    /// What was broken.
    pub failure: Option<String>,
    /// Nobody may go on.
    pub nobody: Option<Nobody>,
}

/// The most runs for one seed: a search by halves of a few hundred failures, of
/// which a handful matter.
const MOST: u64 = 60;

fn list(failures: &[Failure]) -> String {
    let all: Vec<_> = failures.iter().map(|f| f.to_string()).collect();
    format!("[{}]", all.join(", "))
}

struct Search<F> {
    run: F,
    runs: u64,
    /// The smallest so far.
    least: Nobody,
}

impl<F: FnMut(Only) -> Ran> Search<F> {
    /// Repeats the run with these failures alone. Whether it still ends so.
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

    /// By ever smaller parts, each left out in turn.
    fn search(&mut self) -> Result<(), String> {
        // What takes no data is seldom the reason.
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

/// Shrinks what `first` came to. `run` repeats the run with some of its failures.
/// Returns the fewest that were found; an error where a run breaks something, or
/// where what is left does not excuse that nobody may go on.
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

    /// Ends so where all of `why` happen.
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

    /// One node's power is no reason, though the other's went too, at another time.
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
