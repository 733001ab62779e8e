//! The rows of a report: JSON, one object a line, or a table for people.
//!
//! Programs read the field names, so the names stay.

use std::io::{self, StdoutLock, Write};

use serde::{Deserialize, Serialize};

use crate::measure::{Ratio, Summary};
use crate::threads::Threads;

/// Prints rows: one JSON object a line, or as `table` does it.
pub fn print<R: Serialize>(
    json: bool,
    rows: &[R],
    table: impl FnOnce(&[R], &mut StdoutLock<'static>) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        for r in rows {
            serde_json::to_writer(&mut out, r)?;
            out.write_all(b"\n")?;
        }
    } else {
        table(rows, &mut out)?;
    }
    out.flush()
}

/// One figure. In JSON the optional fields are left out when they are empty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The benchmark: `sync`, `tls`, `threads` or `nvmm`.
    pub bench: String,
    /// What was measured: `mojim`, `raw-link`, `raw-log`, `msync`, `rocksdb`,
    /// `s-unreplicated`.
    pub case: String,
    /// The mode of Mojim, or the variant of a limit: `sync-flush`, `large-folios`, `-`.
    pub mode: String,
    /// The link: `tcp`, `shm`, or `-`.
    pub transport: String,
    /// The payload of one operation in bytes.
    pub bytes: u64,
    /// Threads that ran at the same time.
    pub threads: u64,
    /// The memory that the logs emulate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// The median in microseconds.
    pub median_us: f64,
    /// The 99th percentile in microseconds.
    pub p99_us: f64,
    /// The percentile 99.9 in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p999_us: Option<f64>,
    /// Operations per second, of all threads.
    pub per_second: f64,
    /// How many operations there were. 0: it is not said.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub count: u64,
    /// Operations of the thread that got the least of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least: Option<u64>,
    /// Operations of the thread that got the most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most: Option<u64>,
    /// The machine's speed state that the row is about: `fast` or `slow`; empty: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// How many times as long as the limit it took; in `threads` how many times as many operations
    /// per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// The limit that `ratio` refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to: Option<String>,
}

impl Row {
    /// A row for one thread without state or ratio, its figures rounded: times to nanoseconds,
    /// operations per second to tenths.
    pub fn new(bench: &str, case: &str, bytes: usize, summary: Summary) -> Self {
        Self {
            bench: bench.into(),
            case: case.into(),
            mode: "-".into(),
            transport: "-".into(),
            bytes: bytes as u64,
            threads: 1,
            memory: None,
            median_us: rounded(summary.median_us, 1e3),
            p99_us: rounded(summary.p99_us, 1e3),
            p999_us: None,
            per_second: rounded(summary.per_second, 10.0),
            count: summary.count,
            least: None,
            most: None,
            state: None,
            ratio: None,
            ratio_to: None,
        }
    }

    /// With this mode.
    pub fn mode(self, mode: &str) -> Self {
        Self {
            mode: mode.into(),
            ..self
        }
    }

    /// With this transport.
    pub fn transport(self, transport: &str) -> Self {
        Self {
            transport: transport.into(),
            ..self
        }
    }

    /// With this emulated memory.
    pub fn memory(self, name: &str) -> Self {
        Self {
            memory: Some(name.into()),
            ..self
        }
    }

    /// With this number of threads.
    pub fn threads(self, threads: usize) -> Self {
        Self {
            threads: threads as u64,
            ..self
        }
    }

    /// With what is of interest where threads share something: the long waits, and how evenly the
    /// operations fell to the threads.
    pub fn spread(self, of: &Threads) -> Self {
        Self {
            p999_us: Some(rounded(of.total.p999_us, 1e3)),
            least: of.counts.iter().min().copied(),
            most: of.counts.iter().max().copied(),
            ..self
        }
    }

    /// About the rounds of this state only.
    pub fn state(self, state: crate::measure::State) -> Self {
        Self {
            state: Some(state.name().into()),
            ..self
        }
    }

    /// With a ratio to the limit of this name.
    pub fn ratio(self, ratio: Ratio, to: &str) -> Self {
        Self {
            ratio: Some(rounded(ratio.ratio, 1e3)),
            ratio_to: Some(to.into()),
            ..self
        }
    }

    /// Writes the row as one line of JSON.
    pub fn write_json(&self, out: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, self)?;
        out.write_all(b"\n")
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn rounded(value: f64, per_one: f64) -> f64 {
    if value.is_finite() {
        (value * per_one).round() / per_one
    } else {
        0.0
    }
}

/// Writes all rows, one line of JSON each.
pub fn write_json(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    rows.iter().try_for_each(|row| row.write_json(out))
}

/// The columns of a table.
const HEADINGS: [&str; 16] = [
    "bench",
    "case",
    "mode",
    "transport",
    "bytes",
    "threads",
    "memory",
    "median us",
    "p99 us",
    "p99.9 us",
    "per second",
    "least",
    "most",
    "state",
    "ratio",
    "to",
];
/// Those with words, which stand to the left; numbers stand to the right.
const WORDS: [&str; 7] = [
    "bench",
    "case",
    "mode",
    "transport",
    "memory",
    "state",
    "to",
];

/// Writes a table with a line of headings; columns that no row uses are left out.
pub fn write_table(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let mut lines = vec![HEADINGS.map(String::from)];
    lines.extend(rows.iter().map(|r| {
        [
            r.bench.clone(),
            r.case.clone(),
            r.mode.clone(),
            r.transport.clone(),
            r.bytes.to_string(),
            r.threads.to_string(),
            r.memory.clone().unwrap_or_default(),
            format!("{:.2}", r.median_us),
            format!("{:.2}", r.p99_us),
            r.p999_us.map(|x| format!("{x:.2}")).unwrap_or_default(),
            format!("{:.0}", r.per_second),
            r.least.map(|n| n.to_string()).unwrap_or_default(),
            r.most.map(|n| n.to_string()).unwrap_or_default(),
            r.state.clone().unwrap_or_default(),
            r.ratio.map(|x| format!("{x:.2}")).unwrap_or_default(),
            r.ratio_to.clone().unwrap_or_default(),
        ]
    }));
    let used: Vec<usize> = (0..HEADINGS.len())
        .filter(|&c| lines[1..].iter().any(|line| !line[c].is_empty()))
        .collect();
    let width = |c: usize| {
        lines
            .iter()
            .map(|line| line[c].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    for line in &lines {
        let mut text = String::new();
        for &c in &used {
            let (cell, width) = (&line[c], widths[c]);
            text += &if WORDS.contains(&HEADINGS[c]) {
                format!("{cell:<width$}  ")
            } else {
                format!("{cell:>width$}  ")
            };
        }
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::State;

    fn rows() -> Vec<Row> {
        let s = Summary {
            median_us: 2.5004,
            p99_us: 10.0,
            p999_us: 20.0,
            per_second: 399_999.96,
            count: 9,
        };
        vec![
            Row::new("sync", "raw-link", 64, s).transport("tcp"),
            Row::new("sync", "mojim", 4096, s)
                .mode("sync-flush")
                .transport("shm")
                .threads(4)
                .state(State::Fast)
                .ratio(
                    Ratio {
                        ratio: 1.12345,
                        rounds: 3,
                    },
                    "raw-link",
                ),
        ]
    }

    #[test]
    fn json_has_exactly_the_agreed_fields() {
        let mut out = Vec::new();
        write_json(&rows(), &mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(
            lines,
            [
                r#"{"bench":"sync","case":"raw-link","mode":"-","transport":"tcp","bytes":64,"threads":1,"median_us":2.5,"p99_us":10.0,"per_second":400000.0,"count":9}"#,
                r#"{"bench":"sync","case":"mojim","mode":"sync-flush","transport":"shm","bytes":4096,"threads":4,"median_us":2.5,"p99_us":10.0,"per_second":400000.0,"count":9,"state":"fast","ratio":1.123,"ratio_to":"raw-link"}"#,
            ]
        );
        let back: Vec<Row> = lines
            .iter()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(back, rows());
    }

    #[test]
    fn table_is_aligned_and_has_no_empty_columns() {
        let table = |rows: &[Row]| {
            let mut out = Vec::new();
            write_table(rows, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            table(&rows()),
            "bench  case      mode        transport  bytes  threads  median us  p99 us  per second  state  ratio  to\n\
             sync   raw-link  -           tcp           64        1       2.50   10.00      400000\n\
             sync   mojim     sync-flush  shm         4096        4       2.50   10.00      400000  fast    1.12  raw-link\n"
        );
        assert!(!table(&rows()[..1]).contains("state"));
    }
}
