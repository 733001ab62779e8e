//! The report's own rows: one shape for the figures of every measurement, as JSON and as CSV.
//!
//! Owns the schema of `results.json` (`docs/reference/bench-report.md`). Programs read the names
//! of the fields, so these stay. A field without a value is null, not absent.

use serde::{Deserialize, Serialize};

use crate::all::machine::Machine;
use crate::all::noise::Noise;

/// What the file is.
pub(crate) const FORMAT: &str = "mojim-bench-report";
/// The version of the schema. A field that changes its meaning raises it.
pub(crate) const VERSION: u32 = 1;

/// All that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) machine: Machine,
    pub(crate) settings: Settings,
    pub(crate) noise: Noise,
    pub(crate) measurements: Vec<Measurement>,
}

/// How it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// `quick`, `standard` or `paper`.
    pub(crate) length: String,
    /// The version of the program.
    pub(crate) program: String,
    /// The directory that is measured.
    pub(crate) directory: String,
    /// `--only` and `--skip`.
    pub(crate) only: Vec<String>,
    pub(crate) skip: Vec<String>,
}

/// A measurement, with rows unless it was skipped or failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) name: String,
    /// What measures it again.
    pub(crate) command: String,
    pub(crate) seconds: f64,
    /// Whether an earlier run of the same command measured it.
    pub(crate) taken: bool,
    /// Why it was not measured.
    pub(crate) skipped: Option<String>,
    /// Why it has no rows, though it was to be measured.
    pub(crate) failed: Option<String>,
    /// What it said beside its rows, for example which rival is not installed.
    pub(crate) notes: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

/// Where a row stands on the first axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum X {
    Number(f64),
    Word(String),
}

impl std::fmt::Display for X {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            X::Number(n) => write!(f, "{n}"),
            X::Word(w) => f.write_str(w),
        }
    }
}

/// One figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) series: String,
    pub(crate) x: X,
    pub(crate) x_unit: String,
    pub(crate) y: f64,
    pub(crate) unit: String,
    pub(crate) low: Option<f64>,
    pub(crate) high: Option<f64>,
    pub(crate) count: Option<u64>,
    pub(crate) ratio: Option<f64>,
    pub(crate) ratio_to: Option<String>,
    pub(crate) marks: Vec<String>,
}

impl Row {
    /// A row with nothing but its place and its value.
    pub(crate) fn new(
        series: impl Into<String>,
        (x, x_unit): (X, &str),
        y: f64,
        unit: &str,
    ) -> Row {
        Row {
            series: series.into(),
            x,
            x_unit: x_unit.to_owned(),
            y,
            unit: unit.to_owned(),
            low: None,
            high: None,
            count: None,
            ratio: None,
            ratio_to: None,
            marks: Vec::new(),
        }
    }

    /// Whether it has this mark.
    pub(crate) fn has(&self, mark: &str) -> bool {
        self.marks.iter().any(|m| m == mark)
    }
}

const HEADINGS: &str = "measurement,series,x,x_unit,y,unit,low,high,count,ratio,ratio_to,marks";

/// All rows as CSV (RFC 4180), a line of headings first.
pub(crate) fn csv(measurements: &[Measurement]) -> String {
    let mut text = format!("{HEADINGS}\r\n");
    let number = |n: Option<f64>| n.map_or(String::new(), |n| n.to_string());
    for m in measurements {
        for r in &m.rows {
            let cells = [
                m.name.clone(),
                r.series.clone(),
                r.x.to_string(),
                r.x_unit.clone(),
                r.y.to_string(),
                r.unit.clone(),
                number(r.low),
                number(r.high),
                r.count.map_or(String::new(), |n| n.to_string()),
                number(r.ratio),
                r.ratio_to.clone().unwrap_or_default(),
                r.marks.join("|"),
            ];
            text += &cells.map(|c| quoted(&c)).join(",");
            text += "\r\n";
        }
    }
    text
}

fn quoted(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_with_a_comma_or_a_quote_is_quoted() {
        let mut row = Row::new("a, \"b\"", (X::Number(8.0), "B"), 1.5, "us");
        row.marks = vec!["fast".into(), "rival".into()];
        let m = Measurement {
            name: "n".into(),
            command: String::new(),
            seconds: 0.0,
            taken: false,
            skipped: None,
            failed: None,
            notes: Vec::new(),
            rows: vec![row],
        };
        let text = csv(&[m]);
        let line = "n,\"a, \"\"b\"\"\",8,B,1.5,us,,,,,,fast|rival";
        assert_eq!(text, format!("{HEADINGS}\r\n{line}\r\n"));
    }

    #[test]
    fn a_field_without_a_value_is_null() {
        let row = Row::new("s", (X::Word("w".into()), ""), 1.0, "us");
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(json["x"], "w");
        for field in ["low", "high", "count", "ratio", "ratio_to"] {
            assert!(json.get(field).is_some_and(|v| v.is_null()), "{field}");
        }
        assert_eq!(serde_json::from_value::<Row>(json).unwrap(), row);
    }
}
