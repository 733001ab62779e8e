//! Runs one measurement as processes of this program, and keeps its rows in a file.
//!
//! Invariants:
//!
//! - A file of rows is whole or absent: it gets its name last.
//! - The rows of a report are those that the file gives, also in the run that wrote it.
//! - Its rows are those of the commands that it names, so another run may take them.
//! - A child is asked to end when this process has ended.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::all::noise::Point;
use crate::all::plan::{Length, Planned};

/// What a file of rows is, and its version.
const FORMAT: &str = "mojim-bench-rows";
const VERSION: u32 = 1;
/// What is said of a program whose figures are too slow.
pub(crate) const DEBUG: &str = "debug build";
/// Lines of what a failed part said that are passed on.
const LAST_LINES: usize = 5;

/// A measurement that was made: a file of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Made {
    format: String,
    version: u32,
    /// The version of the program that made it.
    program: String,
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

/// The version of this program, and whether it was built for measurements.
pub(crate) fn program() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match cfg!(debug_assertions) {
        true => format!("{version}, {DEBUG}"),
        false => version.to_owned(),
    }
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

/// The rows that an earlier run left in `file`, if it measured the same.
pub(crate) fn earlier(file: &Path, parts: &[(String, Vec<String>)]) -> Option<Made> {
    let made: Made = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let mut pairs = made.parts.iter().zip(parts);
    let same = made.parts.len() == parts.len()
        && pairs.all(|(m, (label, words))| m.label == *label && m.words == *words);
    let ours = made.format == FORMAT && made.version == VERSION && made.program == program();
    (same && ours).then_some(made)
}

/// Runs all parts and leaves their rows in `file`. The error is words for people.
pub(crate) fn measure(
    name: &str,
    parts: &[(String, Vec<String>)],
    file: &Path,
) -> Result<Made, String> {
    let mut made = Vec::new();
    for (label, words) in parts {
        let begin = Instant::now();
        let out = run(words).map_err(|e| format!("starting this program: {e}"))?;
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
        program: program(),
        parts: made,
        calm: Point::now(name),
    };
    let failed = |e: io::Error| format!("{}: {e}", file.display());
    save(file, &made).map_err(failed)?;
    // As a later run reads it: the last digit of a number may change on the way.
    earlier(file, parts).ok_or_else(|| format!("{} cannot be read back", file.display()))
}

fn run(words: &[String]) -> io::Result<Output> {
    let mut c = Command::new(std::env::current_exe()?);
    c.args(words);
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: two async-signal-safe system calls, which take numbers.
        let orphan = unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            libc::getppid() != parent as i32
        };
        match orphan {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => Ok(()),
        }
    };
    // SAFETY: `ask` makes async-signal-safe system calls only, and allocates nothing.
    unsafe { c.pre_exec(ask) };
    c.output()
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
            program: program(),
            parts: parts.iter().map(part).collect(),
            // Not the clock's: such a number need not be the same when it is read again.
            calm: Point {
                at: "x".to_owned(),
                median_us: 1.5,
                spread: 0.25,
            },
        }
    }

    #[test]
    fn rows_of_other_settings_are_not_taken() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path().join("nvmm.json");
        let of = |length, dir: &str| parts(&PLAN[0], length, Path::new(dir));
        let quick = of(Length::Quick, "/tmp");
        assert_eq!(earlier(&file, &quick), None);
        let made = made(&quick);
        save(&file, &made).unwrap();
        assert_eq!(earlier(&file, &quick), Some(made));
        assert_eq!(earlier(&file, &of(Length::Standard, "/tmp")), None);
        assert_eq!(earlier(&file, &of(Length::Quick, "/mnt")), None);
        fs::write(&file, "{").unwrap();
        assert_eq!(earlier(&file, &quick), None, "a file that is cut off");
    }

    #[test]
    fn a_command_can_be_pasted() {
        let parts = parts(&PLAN[1], Length::Quick, Path::new("/a b/it's"));
        let want = "mojim bench nvmm --strict --rounds 10 --ops 20 --json --dir '/a b/it'\\''s'";
        assert_eq!(command(&parts), want);
    }
}
