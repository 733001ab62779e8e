//! `mojim verify`: compares the copies of a volume byte by byte, through sums.
//!
//! Owns the comparison. A difference counts only if both nodes stood at the
//! same LSN, with everything up to it applied, before and after they were read.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mojim::config::{Config, Volume};
use serde_json::{Value, json};

use crate::ask::{Asked, LONG, load, plain};
use crate::failure::{Done, Failure};
use crate::status::holders;

/// Bytes under one sum, from coarse to fine.
const CHUNKS: [u64; 3] = [1 << 20, 4096, 1];
/// Bytes under the sums of one answer.
const ANSWER: u64 = 64 << 20;

/// Compare the copies of a volume on its nodes.
///
/// Exit code 0 if they are equal; 1 if they differ (the first difference is printed) or a node
/// does not answer; 2 if they could not be compared because they are in use or moving: end the
/// program that is attached, or try again.
#[derive(clap::Args)]
pub struct Verify {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume; may be left out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Seconds to wait for the copies to stand still.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    wait: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What the comparison found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Byte for byte the same.
    Equal {
        /// How many files.
        files: usize,
        /// How many bytes they have.
        bytes: u64,
        /// The LSN at which both nodes stand.
        lsn: u64,
    },
    /// The first difference.
    Differ {
        /// In which file.
        file: String,
        /// The byte offset, if both have the file.
        offset: Option<u64>,
        /// In words.
        what: String,
    },
    /// It cannot be said.
    Moving(String),
}

impl Verify {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        if volume.mirror.is_none() {
            return Err(Failure::usage(format!(
                "{}: volume {} has one copy only; there is nothing to compare",
                self.config.display(),
                volume.name
            )));
        }
        let found = settled(&config, volume, Duration::from_secs(self.wait))?;
        let (code, json, text) = match &found {
            Found::Equal { files, bytes, lsn } => (
                0,
                json!({ "equal": true, "files": files, "bytes": bytes, "lsn": lsn }),
                format!("the copies are equal: {files} files, {bytes} bytes, at LSN {lsn}"),
            ),
            Found::Differ { file, offset, what } => (
                1,
                json!({ "equal": false, "file": file, "offset": offset, "what": what }),
                what.clone(),
            ),
            Found::Moving(why) => (
                2,
                json!({ "equal": null, "what": why }),
                format!("cannot be compared now: {why}"),
            ),
        };
        let mut out = std::io::stdout().lock();
        if self.json {
            let mut json = json;
            json["volume"] = json!(volume.name);
            writeln!(out, "{json}")?;
        } else {
            writeln!(out, "volume {}: {text}", volume.name)?;
        }
        Ok(code)
    }
}

/// Compares; tries again for at most `wait` while the copies move.
pub fn settled(config: &Config, volume: &Volume, wait: Duration) -> Result<Found, Failure> {
    let deadline = Instant::now() + wait;
    loop {
        let found = compare(config, volume)?;
        if !matches!(found, Found::Moving(_)) || Instant::now() >= deadline {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// One node's answer to `files`.
struct Copy {
    lsn: u64,
    files: BTreeMap<String, u64>,
}

/// The answer, or why the copy is not one that can be compared.
fn copy(node: &mut Asked, volume: &str) -> Result<Result<Copy, String>, Failure> {
    let v = match node.ask("files", json!({ "volume": volume })) {
        Ok(v) => v,
        Err(e) if e.errno() == libc::EBUSY => {
            return Ok(Err(format!("{}: {}", node.who(), plain(&e))));
        }
        Err(e) => return Err(Failure::failed(format!("{}: {}", node.who(), plain(&e)))),
    };
    let number = |k: &str| v[k].as_u64().unwrap_or(0);
    let state = v["state"].as_str().unwrap_or("");
    if state != "whole" {
        return Ok(Err(format!("the copy of {} is {state}", node.who())));
    }
    if number("applied") != number("last_lsn") {
        return Ok(Err(format!(
            "{} has records up to LSN {} of which those above {} are not known to be committed; attach a program once",
            node.who(),
            number("last_lsn"),
            number("applied")
        )));
    }
    let files = v["files"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|f| Some((f["name"].as_str()?.to_owned(), f["size"].as_u64()?)))
        .collect();
    Ok(Ok(Copy {
        lsn: number("last_lsn"),
        files,
    }))
}

fn compare(config: &Config, volume: &Volume) -> Result<Found, Failure> {
    let mut nodes = Vec::new();
    for n in holders(config, volume) {
        nodes.push(Asked::connect(config, n, LONG)?);
    }
    let [a, b] = &mut nodes[..] else {
        return Err(Failure::usage(format!(
            "volume {} has one copy only",
            volume.name
        )));
    };
    let (mine, theirs) = match (copy(a, &volume.name)?, copy(b, &volume.name)?) {
        (Ok(x), Ok(y)) => (x, y),
        (Err(why), _) | (_, Err(why)) => return Ok(Found::Moving(why)),
    };
    if mine.lsn != theirs.lsn {
        return Ok(Found::Moving(format!(
            "{} is at LSN {}, {} at LSN {}",
            a.who(),
            mine.lsn,
            b.who(),
            theirs.lsn
        )));
    }
    let found = match difference(a, b, volume, &mine, &theirs) {
        Ok(Some(d)) => d,
        Ok(None) => Found::Equal {
            files: mine.files.len(),
            bytes: mine.files.values().sum(),
            lsn: mine.lsn,
        },
        Err(e) if e.errno() == libc::EBUSY => return Ok(Found::Moving(plain(&e))),
        Err(e) => return Err(Failure::failed(plain(&e))),
    };
    for node in [a, b] {
        match copy(node, &volume.name)? {
            Ok(now) if now.lsn == mine.lsn => {}
            Ok(now) => {
                return Ok(Found::Moving(format!(
                    "{} went on to LSN {} meanwhile",
                    node.who(),
                    now.lsn
                )));
            }
            Err(why) => return Ok(Found::Moving(why)),
        }
    }
    Ok(found)
}

fn difference(
    a: &mut Asked,
    b: &mut Asked,
    volume: &Volume,
    mine: &Copy,
    theirs: &Copy,
) -> Result<Option<Found>, mojim::Error> {
    for (have, lack, who) in [(mine, theirs, &*b), (theirs, mine, &*a)] {
        if let Some(f) = have.files.keys().find(|f| !lack.files.contains_key(*f)) {
            return Ok(Some(Found::Differ {
                file: f.clone(),
                offset: None,
                what: format!("{} has no file {f}", who.who()),
            }));
        }
    }
    for (f, &size) in &mine.files {
        let other = theirs.files[f];
        if let Some(at) = first_difference(a, b, &volume.name, f, 0..size.min(other), 0)? {
            return Ok(Some(Found::Differ {
                file: f.clone(),
                offset: Some(at),
                what: format!("file {f}: the first byte that differs is at offset {at}"),
            }));
        }
        if size != other {
            return Ok(Some(Found::Differ {
                file: f.clone(),
                offset: Some(size.min(other)),
                what: format!(
                    "file {f}: {size} bytes at {}, {other} at {}",
                    a.who(),
                    b.who()
                ),
            }));
        }
    }
    Ok(None)
}

/// The first byte in `range` that differs, by sums of ever smaller chunks.
fn first_difference(
    a: &mut Asked,
    b: &mut Asked,
    volume: &str,
    file: &str,
    range: std::ops::Range<u64>,
    level: usize,
) -> Result<Option<u64>, mojim::Error> {
    let chunk = CHUNKS[level];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(ANSWER);
        let q = json!({ "volume": volume, "file": file, "offset": at, "len": len, "chunk": chunk });
        let sums = |v: Value| -> Vec<u64> {
            let list = v["sums"].as_array();
            list.into_iter()
                .flatten()
                .filter_map(Value::as_u64)
                .collect()
        };
        let x = sums(a.ask("sums", q.clone())?);
        let y = sums(b.ask("sums", q)?);
        let chunks = len.div_ceil(chunk) as usize;
        for i in 0..chunks {
            // A copy that is shorter than its catalogue says differs there.
            if let (Some(p), Some(q)) = (x.get(i), y.get(i))
                && p == q
            {
                continue;
            }
            let from = at + i as u64 * chunk;
            if level + 1 == CHUNKS.len() {
                return Ok(Some(from));
            }
            let to = (from + chunk).min(range.end);
            let finer = first_difference(a, b, volume, file, from..to, level + 1)?;
            return Ok(Some(finer.unwrap_or(from)));
        }
        at += len;
    }
    Ok(None)
}
