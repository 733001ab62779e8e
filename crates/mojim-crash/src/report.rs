//! The findings of a rung, and whether its result counts.

use std::fmt::{self, Display};

use serde_json::{Value, json};

use crate::subject::Kind;

/// The results for one subject.
#[derive(Debug, Clone)]
pub struct Row {
    /// The subject.
    pub kind: Kind,
    /// States that were recovered and compared.
    pub states: u64,
    /// States in which the recovery had been cut short by another crash.
    pub twice: u64,
    /// States whose file system did not mount: not compared.
    pub unmountable: u64,
    /// States that were lost or torn.
    pub failures: u64,
    /// The first failure.
    pub first: Option<String>,
}

/// How much is run.
#[derive(Debug, Clone)]
pub struct Extent {
    /// The subjects.
    pub kinds: Vec<Kind>,
    /// States of each subject that must pass.
    pub states: u64,
    /// The most states of a subject that must be caught.
    pub tries: u64,
    /// How often a subject that must be caught must fail.
    pub enough: u64,
    /// The first seed.
    pub seed: u64,
}

impl Extent {
    /// The most states of a subject.
    pub fn of(&self, kind: Kind) -> u64 {
        if kind.must_stand() {
            self.states
        } else {
            self.tries
        }
    }

    /// Whether more states of the subject are wanted.
    pub fn goes_on(&self, row: &Row) -> bool {
        row.kind.must_stand() || row.failures < self.enough
    }
}

impl Row {
    /// An empty row.
    pub fn new(kind: Kind) -> Row {
        Row {
            kind,
            states: 0,
            twice: 0,
            unmountable: 0,
            failures: 0,
            first: None,
        }
    }

    /// Counts a state; `what` names it.
    pub fn add(&mut self, found: Result<u64, String>, what: impl FnOnce() -> String) {
        self.states += 1;
        if let Err(e) = found {
            self.failures += 1;
            self.first.get_or_insert_with(|| format!("{}: {e}", what()));
        }
    }

    /// Adds the counts of another row.
    pub fn join(&mut self, other: Row) {
        self.states += other.states;
        self.twice += other.twice;
        self.unmountable += other.unmountable;
        self.failures += other.failures;
        self.first = self.first.take().or(other.first);
    }

    /// Whether the subject passed or was caught, as it must.
    pub fn is_right(&self) -> bool {
        // If many file systems do not mount, too little was compared.
        let compared = self.unmountable <= self.states / 20 + 2;
        self.states > 0 && compared && (self.failures == 0) == self.kind.must_stand()
    }
}

/// Everything that a rung found.
pub struct Report {
    /// The rung's name.
    pub rung: String,
    /// One row for each subject.
    pub rows: Vec<Row>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    /// Whether every subject passed or was caught as it must.
    pub fn is_right(&self) -> bool {
        self.rows.iter().all(Row::is_right)
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        let row = |r: &Row| {
            json!({
                "subject": r.kind.name(),
                "states": r.states,
                "twice": r.twice,
                "unmountable": r.unmountable,
                "failures": r.failures,
                "must_fail": !r.kind.must_stand(),
                "right": r.is_right(),
                "first": r.first,
            })
        };
        json!({
            "rung": self.rung,
            "seconds": self.seconds,
            "right": self.is_right(),
            "subjects": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {:.0} s", self.rung, self.seconds)?;
        for r in &self.rows {
            let verdict = match (r.is_right(), r.kind.must_stand()) {
                (true, true) => "stands",
                (true, false) => "found out",
                (false, true) => "FAILED",
                (false, false) => "NOT FOUND OUT",
            };
            writeln!(
                f,
                "  {:<26} {:>7} states ({} after two crashes), {:>4} lost or torn: {verdict}",
                r.kind.name(),
                r.states,
                r.twice,
                r.failures
            )?;
            if r.unmountable > 0 {
                writeln!(f, "    {} did not mount", r.unmountable)?;
            }
            if let Some(first) = &r.first {
                writeln!(f, "    {first}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rung_counts_only_if_it_finds_what_is_broken() {
        let row = |name, states, failures| Row {
            states,
            failures,
            ..Row::new(Kind::of(name).unwrap())
        };
        assert!(row("mojim", 3, 0).is_right() && row("naive", 3, 1).is_right());
        assert!(!row("mojim", 3, 1).is_right() && !row("naive", 3, 0).is_right());
        assert!(!row("mojim", 0, 0).is_right());
    }
}
