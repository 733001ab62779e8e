//! Runs one measurement as processes of this program, and keeps its rows in a file.
//!
//! Invariants:
//!
//! - A file of rows is whole or absent: it gets its name last.
//! - The rows of a report are those that the file gives, also in the run that wrote it.
//! - Its rows are those of the commands, the machine and the programs that it names. So another run
//!   of these may take them.
//! - A measurement that takes longer than its limit is ended, and has failed.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::all::child;
use crate::all::noise::Point;
use crate::all::origin::Origin;
use crate::all::plan::{Length, Planned};

/// What a file of rows is, and its version.
const FORMAT: &str = "mojim-bench-rows";
const VERSION: u32 = 2;
/// Lines of what a failed part said that are passed on.
const LAST_LINES: usize = 5;

/// A measurement that was made: a file of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Made {
    format: String,
    version: u32,
    origin: Origin,
    pub(crate) parts: Vec<MadePart>,
    /// How steady the machine was when it ended.
    pub(crate) calm: Point,
}

/// One run of the program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MadePart {
    pub(crate) label: String,
    /// Its words.
    pub(crate) words: Vec<String>,
    pub(crate) seconds: f64,
    /// What it said on standard error.
    pub(crate) notes: Vec<String>,
    /// Its own rows, in its own shape.
    pub(crate) rows: Vec<Value>,
}

/// The parts of a measurement in a run of this length: labels and words.
pub(crate) fn parts(of: &Planned, length: Length, dir: &Path) -> Vec<(String, Vec<String>)> {
    let whole = |mut words: Vec<String>| {
        words.extend(["--json".to_owned(), "--dir".to_owned()]);
        words.push(dir.to_string_lossy().into_owned());
        words
    };
    let part = |p: &crate::all::plan::Part| Some((p.label.to_owned(), whole(p.words(length)?)));
    of.parts.iter().filter_map(part).collect()
}

/// The command line that measures parts again.
pub(crate) fn command(parts: &[(String, Vec<String>)]) -> String {
    let one = |(_, words): &(String, Vec<String>)| {
        let words = words.iter().map(|w| quoted(w));
        let words: Vec<String> = words.collect();
        format!("mojim bench {}", words.join(" "))
    };
    parts.iter().map(one).collect::<Vec<_>>().join(" && ")
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,+=:".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// What runs measurements.
pub(crate) struct Runner {
    /// Where its rows come from.
    pub(crate) origin: Origin,
    /// The longest time that one measurement may take.
    pub(crate) limit: Duration,
}

impl Runner {
    /// The rows that an earlier run left in `file`, if it measured the same.
    pub(crate) fn earlier(&self, file: &Path, parts: &[(String, Vec<String>)]) -> Option<Made> {
        let made: Made = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
        let mut pairs = made.parts.iter().zip(parts);
        let same = made.parts.len() == parts.len()
            && pairs.all(|(m, (label, words))| m.label == *label && m.words == *words);
        let ours = made.format == FORMAT && made.version == VERSION && made.origin == self.origin;
        (same && ours).then_some(made)
    }

    /// Runs all parts and leaves their rows in `file`. The error is words for people.
    pub(crate) fn measure(
        &self,
        name: &str,
        parts: &[(String, Vec<String>)],
        file: &Path,
    ) -> Result<Made, String> {
        let until = Instant::now() + self.limit;
        let mut made = Vec::new();
        for (label, words) in parts {
            let begin = Instant::now();
            let out = run(words, until).map_err(|e| format!("running this program: {e}"))?;
            let out = out.ok_or_else(|| {
                let seconds = self.limit.as_secs();
                format!("it took longer than {seconds} s, the limit of this length, and was ended")
            })?;
            let seconds = begin.elapsed().as_secs_f64();
            made.push(MadePart {
                label: label.clone(),
                words: words.clone(),
                seconds: (seconds * 10.0).round() / 10.0,
                notes: lines(&out.stderr),
                rows: rows(&out)?,
            });
        }
        let made = Made {
            format: FORMAT.to_owned(),
            version: VERSION,
            origin: self.origin.clone(),
            parts: made,
            calm: Point::now(name),
        };
        let failed = |e: io::Error| format!("{}: {e}", file.display());
        save(file, &made).map_err(failed)?;
        // As a later run reads it: the last digit of a number may change on the way.
        let read = self.earlier(file, parts);
        read.ok_or_else(|| format!("{} cannot be read back", file.display()))
    }
}

fn run(words: &[String], until: Instant) -> io::Result<Option<Output>> {
    let mut c = Command::new(std::env::current_exe()?);
    c.args(words).stdin(Stdio::null());
    child::run(&mut c, until)
}

fn lines(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    text.lines().map(str::to_owned).collect()
}

/// The rows that a part printed.
fn rows(out: &Output) -> Result<Vec<Value>, String> {
    if !out.status.success() {
        let said = lines(&out.stderr);
        let last = &said[said.len().saturating_sub(LAST_LINES)..];
        return Err(format!("{}: {}", out.status, last.join(" | ")));
    }
    let parse = |l: String| serde_json::from_str(&l).map_err(|e| format!("no row: {l}: {e}"));
    let rows: Vec<Value> = lines(&out.stdout)
        .into_iter()
        .map(parse)
        .collect::<Result<_, _>>()?;
    match rows.is_empty() {
        true => Err("it printed no row".to_owned()),
        false => Ok(rows),
    }
}

fn save(file: &Path, made: &Made) -> io::Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, serde_json::to_vec_pretty(made)?)?;
    fs::rename(new, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all::origin::tests::{here, others};
    use crate::all::plan::PLAN;
    use crate::scratch::Scratch;

    fn made(parts: &[(String, Vec<String>)]) -> Made {
        let part = |(label, words): &(String, Vec<String>)| MadePart {
            label: label.clone(),
            words: words.clone(),
            seconds: 1.0,
            notes: Vec::new(),
            rows: vec![Value::Null],
        };
        Made {
            format: FORMAT.to_owned(),
            version: VERSION,
            origin: here(),
            parts: parts.iter().map(part).collect(),
            // Not the clock's: such a number need not be the same when it is read again.
            calm: Point {
                at: "x".to_owned(),
                median_us: 1.5,
                spread: 0.25,
            },
        }
    }

    fn runner(origin: Origin) -> Runner {
        let limit = Length::Tiny.limit();
        Runner { origin, limit }
    }

    #[test]
    fn rows_of_other_settings_are_not_taken() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path().join("nvmm.json");
        let of = |length, dir: &str| parts(&PLAN[0], length, Path::new(dir));
        let quick = of(Length::Quick, "/tmp");
        let runner = runner(here());
        assert_eq!(runner.earlier(&file, &quick), None);
        let made = made(&quick);
        save(&file, &made).unwrap();
        assert_eq!(runner.earlier(&file, &quick), Some(made));
        assert_eq!(runner.earlier(&file, &of(Length::Standard, "/tmp")), None);
        assert_eq!(runner.earlier(&file, &of(Length::Quick, "/mnt")), None);
        fs::write(&file, "{").unwrap();
        let cut = runner.earlier(&file, &quick);
        assert_eq!(cut, None, "a file that is cut off");
    }

    /// A report that was carried to another machine, or whose program was built again without a new
    /// version, had rows of both.
    #[test]
    fn rows_of_another_machine_or_program_are_not_taken() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path().join("nvmm.json");
        let quick = parts(&PLAN[0], Length::Quick, Path::new("/tmp"));
        let made = made(&quick);
        save(&file, &made).unwrap();
        for other in others(&made.origin) {
            assert_eq!(runner(other).earlier(&file, &quick), None);
        }
        assert!(runner(here()).earlier(&file, &quick).is_some());
    }

    #[test]
    fn a_command_can_be_pasted() {
        let parts = parts(&PLAN[1], Length::Quick, Path::new("/a b/it's"));
        let want = "mojim bench nvmm --strict --rounds 10 --ops 20 --json --dir '/a b/it'\\''s'";
        assert_eq!(command(&parts), want);
    }
}
