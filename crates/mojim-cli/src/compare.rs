//! Compares two copies of a volume, also while a program changes them.
//!
//! Owns the decision whether two bytes that were seen to differ do differ.
//! Copies follow each other at some distance, so a difference seen once says
//! nothing. Each answer of a node names two LSNs: everything up to `low` was
//! in the bytes, nothing above `high`. Of bytes that do not change from look to
//! look it is known as of which LSNs they stand so; if that is true of both
//! nodes for one LSN, and they differ, the copies differ. Bytes that became
//! equal, or were written anew on both nodes, are no difference (any more).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mojim::config::{Config, Node, Volume};
use mojim::node::contents::unhex;
use serde_json::{Value, json};

use crate::ask::{Asked, LONG, plain};
use crate::failure::Failure;
use crate::status::holders;

/// Bytes under one sum.
const PAGE: u64 = 4096;
/// Pages under the sums of one answer.
const PAGES: u64 = 2048;
/// Most pages that are looked at again; more are not told apart.
const MOST: usize = 16 << 10;

/// Between two looks at a copy of which it is decided what is committed.
const SETTLES: Duration = Duration::from_millis(500);

/// Files by name: their numbers and sizes.
type Files = BTreeMap<String, (u64, u64)>;

/// Something in which the copies differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The file's name.
    pub file: String,
    /// Its number and the page's offset, if both have it with this size.
    pub page: Option<(u64, u64)>,
    /// The first byte, if it is one.
    pub offset: Option<u64>,
    /// In words.
    pub what: String,
}

/// What a comparison found.
#[derive(Debug, Default)]
pub struct Found {
    /// Files on both nodes.
    pub files: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// The LSN at which the first node stood at the end.
    pub lsn: u64,
    /// In the files' order.
    pub differences: Vec<Difference>,
    /// Why it cannot be said of everything.
    pub undecided: Option<String>,
}

/// One look at something on one node.
struct Look<T> {
    value: T,
    low: u64,
    high: u64,
}

/// Since when a node has shown the same.
struct Stretch<T> {
    value: T,
    /// Everything that may have been in the first look is below this.
    first_high: u64,
    /// LSNs as of which it stands so.
    lsns: Option<(u64, u64)>,
    changed: bool,
}

impl<T: PartialEq> Stretch<T> {
    fn new(l: Look<T>) -> Stretch<T> {
        let mut s = Stretch {
            value: l.value,
            first_high: l.high,
            lsns: None,
            changed: false,
        };
        s.reach(l.low);
        s
    }

    fn reach(&mut self, low: u64) {
        match &mut self.lsns {
            Some((_, to)) => *to = low,
            None if low >= self.first_high => self.lsns = Some((low, low)),
            None => {}
        }
    }

    fn look(&mut self, l: Look<T>) {
        if l.value == self.value {
            self.reach(l.low);
        } else {
            *self = Stretch {
                changed: true,
                ..Stretch::new(l)
            };
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    Differ,
    Unknown,
}

/// One thing on two nodes.
struct Pair<T>([Stretch<T>; 2]);

impl<T: PartialEq> Pair<T> {
    fn new(a: Look<T>, b: Look<T>) -> Pair<T> {
        Pair([Stretch::new(a), Stretch::new(b)])
    }

    fn look(&mut self, a: Look<T>, b: Look<T>) {
        self.0[0].look(a);
        self.0[1].look(b);
    }

    fn verdict(&self) -> Verdict {
        let [a, b] = &self.0;
        if a.value == b.value || a.changed && b.changed {
            return Verdict::Equal;
        }
        match (a.lsns, b.lsns) {
            (Some(a), Some(b)) if a.0.max(b.0) <= a.1.min(b.1) => Verdict::Differ,
            _ => Verdict::Unknown,
        }
    }
}

/// A node's answer to `files`.
struct Listing {
    low: u64,
    high: u64,
    last: u64,
    files: Files,
}

/// A page that was seen to differ.
struct Suspect {
    file: String,
    id: u64,
    offset: u64,
    /// Its bytes that did, at the first look.
    bytes: BTreeMap<usize, Pair<Option<u8>>>,
}

/// Compares the copies of two nodes; what is not clear is looked at again for
/// at most `wait`.
pub fn compare(
    config: &Config,
    volume: &Volume,
    nodes: [&Node; 2],
    wait: Duration,
) -> Result<Found, Failure> {
    let [a, b] = nodes;
    let a = Asked::connect(config, a, LONG)?;
    let b = Asked::connect(config, b, LONG)?;
    let deadline = Instant::now() + wait;
    let mut work = Comparison {
        volume: volume.name.clone(),
        nodes: [a, b],
        moving: String::new(),
        settle_by: Instant::now() + wait / 2,
    };
    loop {
        match work.run(wait)? {
            Some(found) => return Ok(found),
            None if Instant::now() >= deadline => {
                return Ok(Found {
                    undecided: Some(work.moving),
                    ..Found::default()
                });
            }
            None => pause(),
        }
    }
}

/// Compares the copies of all nodes that hold a volume with the first one's, up
/// to the first that is not equal.
pub fn compare_all(config: &Config, volume: &Volume, wait: Duration) -> Result<Found, Failure> {
    let holders = holders(config, volume);
    let [first, others @ ..] = &holders[..] else {
        return Err(Failure::usage(format!(
            "volume {} has no node",
            volume.name
        )));
    };
    let mut found = Found::default();
    for other in others {
        found = compare(config, volume, [first, other], wait)?;
        if !found.differences.is_empty() || found.undecided.is_some() {
            break;
        }
    }
    Ok(found)
}

/// Nodes go on by themselves and tell nobody.
fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}

struct Comparison {
    volume: String,
    nodes: [Asked; 2],
    /// Why the last try came to nothing.
    moving: String,
    /// For so long it waits until it is decided what is committed; then it sees what it can.
    settle_by: Instant,
}

impl Comparison {
    /// Asks both; `None` if one cannot say now, which may pass.
    fn both(&mut self, what: &str, q: &Value) -> Result<Option<[Value; 2]>, Failure> {
        let mut out = Vec::new();
        for node in &mut self.nodes {
            match node.ask(what, q.clone()) {
                Ok(v) => out.push(v),
                Err(e) if [libc::EBUSY, libc::ENOENT].contains(&e.errno()) => {
                    self.moving = format!("{}: {}", node.who(), plain(&e));
                    return Ok(None);
                }
                Err(e) => return Err(Failure::failed(format!("{}: {}", node.who(), plain(&e)))),
            }
        }
        Ok(<[Value; 2]>::try_from(out).ok())
    }

    fn listings(&mut self) -> Result<Option<[Listing; 2]>, Failure> {
        let q = json!({ "volume": self.volume });
        let Some(answers) = self.both("files", &q)? else {
            return Ok(None);
        };
        for (v, node) in answers.iter().zip(&self.nodes) {
            if v["state"] != "whole" {
                self.moving = format!(
                    "the copy of {} is {}",
                    node.who(),
                    v["state"].as_str().unwrap_or("unknown")
                );
                return Ok(None);
            }
        }
        Ok(Some(answers.map(|v| {
            let number = |k: &str| v[k].as_u64().unwrap_or(0);
            let files = v["files"].as_array().into_iter().flatten();
            Listing {
                low: number("low"),
                high: number("high"),
                last: number("last_lsn"),
                files: files
                    .filter_map(|f| {
                        let name = f["name"].as_str()?.to_owned();
                        Some((name, (f["id"].as_u64()?, f["size"].as_u64()?)))
                    })
                    .collect(),
            }
        })))
    }

    /// Has the one who leads decide what is committed of what a program that was killed has
    /// left. True while it does.
    fn settles(&mut self, listings: &[Listing; 2]) -> bool {
        if listings.iter().all(|l| l.low == l.last) || Instant::now() >= self.settle_by {
            return false;
        }
        let q = json!({ "volume": self.volume });
        let mut settles = false;
        for node in &mut self.nodes {
            // One of an older build does not know the word: then it stays open.
            if node.ask("settle", q.clone()).is_ok_and(|v| v == true) {
                self.moving = format!("{} decides what is committed", node.who());
                settles = true;
            }
        }
        if settles {
            // Its daemon needs the copy, which a look takes.
            std::thread::sleep(SETTLES);
        }
        settles
    }

    /// One comparison; `None` if it could not be made now.
    fn run(&mut self, wait: Duration) -> Result<Option<Found>, Failure> {
        let Some(first) = self.listings()? else {
            return Ok(None);
        };
        if self.settles(&first) {
            return Ok(None);
        }
        let began = [first[0].low, first[1].low];
        let mut found = Found::default();
        let Some(files) = self.names(first, wait, &mut found)? else {
            return Ok(None);
        };
        let mut suspects = Vec::new();
        for (name, (id, size)) in files {
            found.files += 1;
            found.bytes += size;
            if !self.scan(&name, id, size, &mut suspects)? {
                return Ok(None);
            }
        }
        self.decide(suspects, wait, &mut found)?;
        let Some([a, b]) = self.listings()? else {
            return Ok(None);
        };
        found.lsn = a.low;
        let stands = [a.low, b.low] == began;
        if stands && found.differences.is_empty() {
            // Nothing moves: then they must also stand at the same point.
            for (l, node) in [&a, &b].into_iter().zip(&self.nodes) {
                if l.low != l.last {
                    self.moving = format!(
                        "{} has records up to LSN {} of which those above {} are not known to be committed, after the end of a program without a detach. The primary's daemon decides that where both nodes of the pair answer, or says why it cannot; a program that attaches does, too",
                        node.who(),
                        l.last,
                        l.low
                    );
                    return Ok(None);
                }
            }
            if a.low != b.low {
                self.moving = format!(
                    "{} is at LSN {}, {} at LSN {}",
                    self.nodes[0].who(),
                    a.low,
                    self.nodes[1].who(),
                    b.low
                );
                return Ok(None);
            }
        }
        Ok(Some(found))
    }

    /// Files that both have, with the same number and size.
    fn names(
        &mut self,
        first: [Listing; 2],
        wait: Duration,
        found: &mut Found,
    ) -> Result<Option<Files>, Failure> {
        let look = |l: &Listing, name: &String| Look {
            value: l.files.get(name).copied(),
            low: l.low,
            high: l.high,
        };
        let names = first[0].files.keys().chain(first[1].files.keys());
        let mut pairs: BTreeMap<String, Pair<Option<(u64, u64)>>> = names
            .map(|n| {
                let pair = Pair::new(look(&first[0], n), look(&first[1], n));
                (n.clone(), pair)
            })
            .collect();
        let deadline = Instant::now() + wait;
        while pairs.values().any(|p| p.verdict() == Verdict::Unknown) {
            if Instant::now() >= deadline {
                self.moving = "names and sizes of files change".into();
                return Ok(None);
            }
            pause();
            let Some([a, b]) = self.listings()? else {
                return Ok(None);
            };
            for (name, pair) in &mut pairs {
                pair.look(look(&a, name), look(&b, name));
            }
        }
        let mut both = BTreeMap::new();
        for (name, pair) in pairs {
            let who = |i: usize| self.nodes[i].who();
            let what = match pair.0.map(|s| s.value) {
                [Some(a), Some(b)] if a == b => {
                    both.insert(name, a);
                    continue;
                }
                // Removed, made or changed on both while they were looked at.
                [None, None] => continue,
                [None, Some(_)] => format!("{} has no file {name}", who(0)),
                [Some(_), None] => format!("{} has no file {name}", who(1)),
                [Some((i, _)), Some((j, _))] if i != j => {
                    format!("file {name}: not the same file on both nodes")
                }
                [Some((_, x)), Some((_, y))] => {
                    format!("file {name}: {x} bytes at {}, {y} at {}", who(0), who(1))
                }
            };
            found.differences.push(Difference {
                file: name,
                page: None,
                offset: None,
                what,
            });
        }
        Ok(Some(both))
    }

    /// Sums of all pages of a file. False if it is gone.
    fn scan(
        &mut self,
        name: &str,
        id: u64,
        size: u64,
        suspects: &mut Vec<Suspect>,
    ) -> Result<bool, Failure> {
        let mut at = 0;
        while at < size {
            let q = json!({ "volume": self.volume, "id": id, "offset": at, "pages": PAGES });
            let Some(answers) = self.both("sums", &q)? else {
                return Ok(false);
            };
            let [x, y] = answers.each_ref().map(|v| v["sums"].as_str().unwrap_or(""));
            for i in 0..(size - at).div_ceil(PAGE).min(PAGES) {
                // A file that is shorter than its catalogue says differs there.
                let part = |s: &str| {
                    s.get(i as usize * 32..(i as usize + 1) * 32)
                        .map(str::to_owned)
                };
                let (p, q) = (part(x), part(y));
                if (p.is_none() || p != q) && suspects.len() < MOST {
                    suspects.push(Suspect {
                        file: name.to_owned(),
                        id,
                        offset: at + i * PAGE,
                        bytes: BTreeMap::new(),
                    });
                }
            }
            at += PAGES * PAGE;
        }
        Ok(true)
    }

    /// One look at a suspect's bytes. False if it cannot be had.
    fn look(&mut self, s: &mut Suspect, first: bool) -> Result<bool, Failure> {
        let q = json!({ "volume": self.volume, "id": s.id, "offset": s.offset });
        let Some(answers) = self.both("page", &q)? else {
            return Ok(false);
        };
        let [a, b] = answers.map(|v| Look {
            value: unhex(v["bytes"].as_str().unwrap_or("")).unwrap_or_default(),
            low: v["low"].as_u64().unwrap_or(0),
            high: v["high"].as_u64().unwrap_or(u64::MAX),
        });
        let byte = |l: &Look<Vec<u8>>, i: usize| Look {
            value: l.value.get(i).copied(),
            low: l.low,
            high: l.high,
        };
        if first {
            s.bytes = (0..PAGE as usize)
                .filter(|i| a.value.get(*i) != b.value.get(*i))
                .map(|i| (i, Pair::new(byte(&a, i), byte(&b, i))))
                .collect();
        } else {
            for (i, pair) in &mut s.bytes {
                pair.look(byte(&a, *i), byte(&b, *i));
            }
        }
        Ok(true)
    }

    fn decide(
        &mut self,
        mut suspects: Vec<Suspect>,
        wait: Duration,
        found: &mut Found,
    ) -> Result<(), Failure> {
        let deadline = Instant::now() + wait;
        let mut first = true;
        while !suspects.is_empty() {
            let mut left = Vec::new();
            for mut s in suspects {
                if !self.look(&mut s, first)? {
                    found.undecided = Some(self.moving.clone());
                    return Ok(());
                }
                let is = |v: Verdict| move |p: &Pair<Option<u8>>| p.verdict() == v;
                let differs = s.bytes.iter().find(|(_, p)| is(Verdict::Differ)(p));
                if let Some((&i, pair)) = differs {
                    let at = s.offset + i as u64;
                    let [x, y] = pair.0.each_ref().map(|s| match (s.value, s.lsns) {
                        (Some(v), Some((from, to))) => format!("{v:#04x} at LSN {from} to {to}"),
                        _ => "no byte".to_owned(),
                    });
                    found.differences.push(Difference {
                        what: format!(
                            "file {}: the first byte that differs is at offset {at}: {} has {x}, {} has {y}",
                            s.file,
                            self.nodes[0].who(),
                            self.nodes[1].who(),
                        ),
                        file: s.file,
                        page: Some((s.id, s.offset)),
                        offset: Some(at),
                    });
                } else if s.bytes.values().any(is(Verdict::Unknown)) {
                    left.push(s);
                }
            }
            suspects = left;
            first = false;
            if let Some(s) = suspects.first() {
                if Instant::now() >= deadline {
                    found.undecided = Some(format!(
                        "file {} changes around offset {}",
                        s.file, s.offset
                    ));
                    break;
                }
                pause();
            }
        }
        found
            .differences
            .sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
        Ok(())
    }
}

/// So many of a thing.
pub fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(value: u8, low: u64, high: u64) -> Look<u8> {
        Look { value, low, high }
    }

    #[test]
    fn a_difference_counts_only_as_of_one_lsn() {
        // Both stand still, at the same point, then at different ones.
        assert_eq!(
            Pair::new(at(1, 5, 5), at(2, 5, 5)).verdict(),
            Verdict::Differ
        );
        assert_eq!(
            Pair::new(at(1, 5, 5), at(2, 6, 6)).verdict(),
            Verdict::Unknown
        );
        assert_eq!(
            Pair::new(at(1, 5, 5), at(1, 6, 6)).verdict(),
            Verdict::Equal
        );

        // One is read while records up to 9 may be half applied: nothing is
        // known before it has passed that.
        let mut p = Pair::new(at(1, 5, 9), at(2, 7, 7));
        p.look(at(1, 8, 12), at(2, 9, 9));
        assert_eq!(p.verdict(), Verdict::Unknown);
        p.look(at(1, 10, 12), at(2, 9, 9));
        assert_eq!(p.verdict(), Verdict::Unknown);
        p.look(at(1, 12, 14), at(2, 11, 11));
        assert_eq!(p.verdict(), Verdict::Differ);
    }

    #[test]
    fn what_is_written_on_both_nodes_is_no_difference() {
        let mut p = Pair::new(at(1, 5, 5), at(2, 4, 4));
        p.look(at(3, 6, 6), at(2, 4, 4));
        assert_eq!(p.verdict(), Verdict::Unknown);
        p.look(at(4, 7, 7), at(3, 6, 6));
        assert_eq!(p.verdict(), Verdict::Equal);
    }
}
