//! The figures of a report: what each one shows of which measurement, and what the papers say.
//!
//! Owns how rows are chosen for a figure. `catalog.rs` has the figures themselves. A figure
//! without rows stays in the report and says why.

use serde::{Deserialize, Serialize};

use crate::all::adapters::{AGAIN, STATE};
use crate::all::plot::Kind;
use crate::all::rows::{Measurement, Row, X};

/// What holds for each figure of several nodes.
pub(crate) const ONE_MACHINE: &str = "All nodes are processes of one machine. Two machines share neither \
     processors nor a disk.";

/// One figure.
pub(crate) struct Figure {
    /// Its name in files and links.
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    /// Which figure of which document.
    pub(crate) source: &'static str,
    /// The measurement whose rows it shows.
    pub(crate) measurement: &'static str,
    pub(crate) kind: Kind,
    pub(crate) keep: fn(&Row) -> bool,
    pub(crate) claims: &'static [Claim],
    /// What is not like for like.
    pub(crate) unlike: &'static str,
}

/// What a document says, and where our own value is.
pub(crate) struct Claim {
    pub(crate) text: &'static str,
    /// The document's own value.
    pub(crate) paper: &'static str,
    /// The series, and its x where that matters.
    pub(crate) series: &'static str,
    pub(crate) x: Option<f64>,
    pub(crate) ours: Ours,
}

/// Which part of a row stands beside a document's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ours {
    Ratio,
    Value,
    /// The document has a value, and nothing here measures it.
    Nothing,
}

/// What a page has of a figure, for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Data {
    pub(crate) figure: String,
    pub(crate) measurement: String,
    pub(crate) rows: Vec<Row>,
}

impl Figure {
    /// Its rows among all that was measured.
    pub(crate) fn data(&self, all: &[Measurement]) -> Data {
        let of = self.found(all);
        let rows = of.map_or(&[][..], |m| &m.rows);
        Data {
            figure: self.id.to_owned(),
            measurement: self.measurement.to_owned(),
            rows: rows.iter().filter(|r| (self.keep)(r)).cloned().collect(),
        }
    }

    /// Its measurement.
    pub(crate) fn found<'a>(&self, all: &'a [Measurement]) -> Option<&'a Measurement> {
        all.iter().find(|m| m.name == self.measurement)
    }

    /// Why it has no rows.
    pub(crate) fn missing(&self, all: &[Measurement]) -> String {
        match self.found(all) {
            None if self.measurement.starts_with("scripts/") => {
                format!(
                    "{} measures this. Its rows are not in this report.",
                    self.measurement
                )
            }
            None => format!(
                "The measurement {} was left out of this run.",
                self.measurement
            ),
            Some(m) => match (&m.skipped, &m.failed) {
                (Some(why), _) => format!("The measurement {} was skipped: {why}.", m.name),
                (_, Some(why)) => format!("The measurement {} failed: {why}.", m.name),
                _ => format!("The measurement {} has no such row in this run.", m.name),
            },
        }
    }
}

impl Claim {
    /// Our own value, if it is among `rows`: for people.
    pub(crate) fn here(&self, rows: &[Row]) -> Option<f64> {
        let at = |r: &&Row| match (self.x, &r.x) {
            (None, _) => true,
            (Some(x), X::Number(n)) => x == *n,
            (Some(_), X::Word(_)) => false,
        };
        let mut of = rows.iter().filter(|r| r.series == self.series);
        let row = of.find(at)?;
        match self.ours {
            Ours::Ratio => row.ratio,
            Ours::Value => Some(row.y),
            Ours::Nothing => None,
        }
    }
}

/// The ratio of a row, beside the document's.
pub(crate) const fn ratio(
    text: &'static str,
    paper: &'static str,
    series: &'static str,
    x: f64,
) -> Claim {
    Claim {
        text,
        paper,
        series,
        x: Some(x),
        ours: Ours::Ratio,
    }
}

/// The value of a series.
pub(crate) const fn value(text: &'static str, paper: &'static str, series: &'static str) -> Claim {
    Claim {
        text,
        paper,
        series,
        x: None,
        ours: Ours::Value,
    }
}

/// A value of the document that nothing here can stand beside.
pub(crate) const fn only(text: &'static str, paper: &'static str) -> Claim {
    Claim {
        text,
        paper,
        series: "",
        x: None,
        ours: Ours::Nothing,
    }
}

/// Whether a row has this unit, and is about all rounds of its first case.
pub(crate) fn is(r: &Row, unit: &str) -> bool {
    r.unit == unit && !r.has(STATE) && !r.has(AGAIN)
}

/// Whether it stands at this number.
pub(crate) fn at(r: &Row, x: f64) -> bool {
    r.x == X::Number(x)
}

/// Whether its series ends so.
pub(crate) fn ends(r: &Row, text: &str) -> bool {
    r.series.ends_with(text)
}
