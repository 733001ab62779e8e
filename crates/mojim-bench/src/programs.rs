//! Measurements of `mojim bench tx` by programs in C, as a user would write them.
//!
//! They are blocks that gcc captures, and the poster's hash table beside Berkeley DB (`programs/`).
//! The programs are compiled when they are asked for, since that needs gcc, and for the second
//! Berkeley DB's header.
//!
//! A program has what it compares take turns, round by round, and prints a figure of each.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;

use crate::raw::pin_process;

/// The headers that the programs include.
const HEADERS: [(&str, &str); 4] = [
    ("measure.h", include_str!("../programs/measure.h")),
    ("mojim.h", include_str!("../../../include/mojim.h")),
    (
        "mojim_heap.h",
        include_str!("../../../include/mojim_heap.h"),
    ),
    ("mojim_tx.h", include_str!("../../../include/mojim_tx.h")),
];

/// A program, and what it needs beside gcc.
pub(crate) struct Program {
    name: &'static str,
    source: &'static str,
    /// A library; and a header of it, whose lack is told by the name of its package.
    library: Option<(&'static str, &'static str, &'static str)>,
}

/// Blocks that gcc captures, beside plain stores and gmsync.
pub(crate) const CAPTURED: Program = Program {
    name: "captured",
    source: include_str!("../programs/captured.c"),
    library: None,
};

/// The poster's hash table, beside Berkeley DB.
pub(crate) const TABLE: Program = Program {
    name: "table",
    source: include_str!("../programs/table.c"),
    library: Some(("-ldb", "db.h", "libdb-dev")),
};

/// One figure of a program.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProgramRow {
    /// `tx`.
    pub bench: &'static str,
    /// What was done.
    pub case: String,
    /// Bytes that it stores.
    pub bytes: u64,
    /// Where what is committed goes.
    pub place: String,
    /// What did it.
    pub of: String,
    /// The median over the rounds, in nanoseconds.
    pub median_ns: f64,
    /// How much longer it took than the other, in nanoseconds: the median over the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_ns: Option<f64>,
    /// How many times as long: the median over the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// The other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

fn failed(text: String) -> io::Error {
    io::Error::other(text)
}

impl Program {
    /// Compiles it in `dir`; the program.
    pub(crate) fn compile(&self, dir: &Path) -> io::Result<PathBuf> {
        let libraries = libraries()?;
        for (name, text) in HEADERS {
            fs::write(dir.join(name), text)?;
        }
        let source = dir.join(self.name).with_extension("c");
        fs::write(&source, self.source)?;
        let program = dir.join(self.name);
        let mut gcc = Command::new("gcc");
        // The warnings of variables that a block might clobber are without a reason.
        gcc.args(["-O2", "-fgnu-tm", "-w", "-pthread", "-I"])
            .arg(dir);
        gcc.arg(&source).arg("-o").arg(&program);
        gcc.arg("-L").arg(&libraries);
        gcc.args(["-lmojim_itm", "-lmojim"]);
        gcc.args(self.library.map(|(link, ..)| link));
        gcc.arg(format!("-Wl,-rpath,{}", libraries.display()));
        let out = gcc.env("LC_ALL", "C").output().map_err(|e| {
            failed(format!(
                "gcc, which compiles what is measured, cannot be started: {e}; package gcc"
            ))
        })?;
        let said = String::from_utf8_lossy(&out.stderr);
        match self.library {
            _ if out.status.success() => Ok(program),
            Some((link, header, package)) if said.contains(header) || said.contains(link) => {
                Err(failed(format!("{header} is not here; package {package}")))
            }
            _ => Err(failed(format!("gcc -fgnu-tm fails: {said}"))),
        }
    }

    /// Runs it, pinned to a processor if one is given; its rows, of a run at `place`.
    pub(crate) fn run(
        &self,
        command: &mut Command,
        cpu: Option<usize>,
        place: &str,
    ) -> io::Result<Vec<ProgramRow>> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        if let Some(cpu) = cpu {
            pin_process(child.id(), cpu)?;
        }
        let out = child.stdout.take().expect("it is piped");
        let lines: io::Result<Vec<String>> = BufReader::new(out).lines().collect();
        let status = child.wait()?;
        if !status.success() {
            return Err(failed(format!("the program `{}`: {status}", self.name)));
        }
        rows(&lines?, place)
    }
}

/// The directory of libmojim.so and libmojim_itm.so: that of this program.
fn libraries() -> io::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let dir = exe.parent().unwrap_or(Path::new("/")).to_owned();
    for name in ["libmojim.so", "libmojim_itm.so"] {
        if !dir.join(name).exists() {
            let text = format!("{name} is not beside this program, in {}", dir.display());
            return Err(failed(text));
        }
    }
    Ok(dir)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// The figures of each round, of a case and a size: of what is compared, and with what.
type Rounds = BTreeMap<(usize, String, u64), Vec<(String, Vec<f64>)>>;

/// The rows of a program's lines: `CASE BYTES OF NANOSECONDS`. The first of a case is compared with
/// the second.
fn rows(lines: &[String], place: &str) -> io::Result<Vec<ProgramRow>> {
    let mut cases: Vec<String> = Vec::new();
    let mut all = Rounds::new();
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let parsed = match words[..] {
            [case, bytes, of, ns] => {
                (bytes.parse().ok().zip(ns.parse().ok())).map(|n| (case, of, n))
            }
            _ => None,
        };
        let Some((case, of, (bytes, ns))) = parsed else {
            return Err(failed(format!("a program printed `{line}`")));
        };
        // In the order in which the program has them.
        let at = cases.iter().position(|c| c == case).unwrap_or_else(|| {
            cases.push(case.to_owned());
            cases.len() - 1
        });
        let of_case = all.entry((at, case.to_owned(), bytes)).or_default();
        match of_case.iter_mut().find(|(name, _)| name == of) {
            Some((_, rounds)) => rounds.push(ns),
            None => of_case.push((of.to_owned(), vec![ns])),
        }
    }
    let mut rows = Vec::new();
    for ((_, case, bytes), of_case) in all {
        for (i, (of, rounds)) in of_case.iter().enumerate() {
            let other = of_case.get(1).filter(|_| i == 0);
            let pairs = |f: fn((&f64, &f64)) -> f64| {
                other.map(|(_, o)| median(rounds.iter().zip(o).map(f).collect()))
            };
            rows.push(ProgramRow {
                bench: "tx",
                case: case.clone(),
                bytes,
                place: place.into(),
                of: of.clone(),
                median_ns: median(rounds.clone()),
                over_ns: pairs(|(a, b)| a - b),
                ratio: pairs(|(a, b)| a / b),
                to: other.map(|(name, _)| name.clone()),
            });
        }
    }
    Ok(rows)
}

/// Writes the rows as a table.
pub(crate) fn table(rows: &[ProgramRow], out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<14}{:>7}  {:<8}{:<13}{:>13}{:>13}{:>8}  to",
        "case", "bytes", "place", "of", "median ns", "over ns", "ratio"
    )?;
    for r in rows {
        let number =
            |v: Option<f64>, digits: usize| v.map_or(String::new(), |v| format!("{v:.digits$}"));
        writeln!(
            out,
            "{:<14}{:>7}  {:<8}{:<13}{:>13.1}{:>13}{:>8}  {}",
            r.case,
            r.bytes,
            r.place,
            r.of,
            r.median_ns,
            number(r.over_ns, 1),
            number(r.ratio, 2),
            r.to.as_deref().unwrap_or("")
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a program prints becomes medians, in its order, and the first of a case is compared
    /// with the second, round by round.
    #[test]
    fn rows_are_medians_of_the_rounds() {
        let text = "store 8 block 3\nstore 8 plain 1\nput 64 a 10\nput 64 b 5\n\
                    store 8 block 9\nstore 8 plain 2\nstore 8 block 4\nstore 8 plain 4";
        let lines: Vec<String> = text.lines().map(String::from).collect();
        let rows = rows(&lines, "memory").unwrap();
        let short = |r: &ProgramRow| {
            (
                r.case.clone(),
                r.of.clone(),
                r.median_ns,
                r.over_ns,
                r.ratio,
            )
        };
        let all: Vec<_> = rows.iter().map(short).collect();
        let expected = [
            ("store", "block", 4.0, Some(2.0), Some(3.0)),
            ("store", "plain", 2.0, None, None),
            ("put", "a", 10.0, Some(5.0), Some(2.0)),
            ("put", "b", 5.0, None, None),
        ];
        let expected = expected.map(|(c, o, m, d, r)| (c.to_owned(), o.to_owned(), m, d, r));
        assert_eq!(all, expected);
        assert!(super::rows(&["one two".to_owned()], "memory").is_err());
    }
}
