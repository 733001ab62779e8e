//! Compares two copies of a volume, also while a program changes them.
//!
//! Owns the decision whether two bytes that were seen to differ do differ. One copy lags
//! behind the other, so a difference seen once proves nothing. A byte that is the same at two
//! looks may have changed between them. Each answer of a node names two LSNs: everything up
//! to `low` was in the bytes, nothing above `high`.
//!
//! One node is looked at first. Then the other is looked at, as of one LSN of the same
//! history. That LSN is not below the first node's `high`. The second answer names the bytes
//! that the records since the first node's `low` have written. All other bytes must be the
//! same on both nodes. Bytes that became equal, or were written anew on both nodes, are no
//! difference (any more).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use mojim_config::{Config, Node, Volume};
use mojim_node::contents::unhex;
use mojim_replica::request::{Part, Request, Since};
use serde_json::Value;

use crate::ask::{Asked, LONG, plain};
use crate::failure::Failure;
use crate::status::holders;

/// Bytes under one sum.
const PAGE: u64 = 4096;
/// Pages under the sums of one answer.
const PAGES: u64 = 2048;
/// About how many pages are looked at again at one time.
const MOST: usize = 16 << 10;

/// The pause between two looks while a node decides what is committed.
const DECIDES: Duration = Duration::from_millis(500);

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
pub struct CompareResult {
    /// Files on both nodes.
    pub files: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// The LSN at which the first node stood at the end.
    pub lsn: u64,
    /// In the files' order.
    pub differences: Vec<Difference>,
    /// Why not everything could be decided, if so.
    pub undecided: Option<String>,
}

/// The LSNs of an answer, and the epoch in which `low` was born.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Lsns {
    low: u64,
    high: u64,
    /// None in the answer of an older release.
    born: Option<u64>,
    /// The view's epoch.
    epoch: Option<u64>,
}

impl Lsns {
    fn of(answer: &Value) -> Lsns {
        Lsns {
            low: answer["low"].as_u64().unwrap_or(0),
            high: answer["high"].as_u64().unwrap_or(u64::MAX),
            born: answer["born"].as_u64(),
            epoch: answer["epoch"].as_u64(),
        }
    }

    /// The LSN as of which the answer is, if it is a single one.
    fn exact(self) -> Option<u64> {
        (self.low == self.high).then_some(self.low)
    }
}

/// The LSN as of which a value was seen on both nodes: on one with `first`, then on the
/// other with `then`. `kept`: on the other it has not changed since `first.low`.
fn common(first: Lsns, then: Lsns, kept: bool) -> Option<u64> {
    let lsn = then.exact()?;
    let same = |a: Option<u64>, b: Option<u64>| a.is_none() || b.is_none() || a == b;
    if first.exact() == Some(lsn) && same(first.born, then.born) {
        return Some(lsn);
    }
    // What lies above `first.low` there is of the view's epoch, or older.
    if first.exact().is_none() && !same(first.epoch, then.epoch) {
        return None;
    }
    // The value has been the same from `first.low` until now.
    (kept && first.high <= lsn).then_some(lsn)
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    /// As of this LSN.
    Differ(u64),
    Unknown,
}

/// One value on two nodes.
struct Pair<T> {
    seen: [T; 2],
    changed: [bool; 2],
    lsn: Option<u64>,
}

impl<T: PartialEq> Pair<T> {
    /// `lsn`: as of which both have been seen, if it is known.
    fn new(seen: [T; 2], lsn: Option<u64>) -> Pair<T> {
        Pair {
            seen,
            changed: [false; 2],
            lsn,
        }
    }

    fn look(&mut self, seen: [T; 2], lsn: Option<u64>) {
        for (i, (old, new)) in self.seen.iter().zip(&seen).enumerate() {
            self.changed[i] |= old != new;
        }
        self.seen = seen;
        self.lsn = lsn;
    }

    fn verdict(&self) -> Verdict {
        let [a, b] = &self.seen;
        match self.lsn {
            _ if a == b => Verdict::Equal,
            Some(lsn) => Verdict::Differ(lsn),
            None if self.changed == [true; 2] => Verdict::Equal,
            None => Verdict::Unknown,
        }
    }
}

/// A node's answer to `files`.
struct Listing {
    lsns: Lsns,
    last: u64,
    files: Files,
    /// Sums of the pages of small files, by number.
    sums: HashMap<u64, String>,
    /// From which number on there are more.
    next: Option<u32>,
}

/// What became of files since an LSN.
#[derive(Default, serde::Deserialize)]
struct Changed {
    ids: BTreeSet<u64>,
    names: BTreeSet<String>,
}

/// The listings of both nodes.
struct Listings {
    of: [Listing; 2],
    /// Which node was asked first.
    first: usize,
    /// What has changed since, by the other node's answer.
    changed: Option<Changed>,
}

impl Listings {
    /// Leaves the files that both answers reach. Returns from which number on there are more.
    fn cut(&mut self) -> Option<u32> {
        let next = self.of.iter().filter_map(|l| l.next).min()?;
        for l in &mut self.of {
            l.files.retain(|_, (id, _)| *id < u64::from(next));
        }
        Some(next)
    }

    /// Number and size of a file on each node that has it.
    fn look(&self, name: &str) -> [Option<(u64, u64)>; 2] {
        self.of.each_ref().map(|l| l.files.get(name).copied())
    }

    /// The LSN as of which both nodes' answers about this name are.
    fn lsn(&self, name: &str) -> Option<u64> {
        let mut ids = self.look(name).into_iter().flatten().map(|(id, _)| id);
        let kept = self
            .changed
            .as_ref()
            .is_some_and(|c| !c.names.contains(name) && ids.all(|id| !c.ids.contains(&id)));
        let (one, other) = (&self.of[self.first], &self.of[1 - self.first]);
        common(one.lsns, other.lsns, kept)
    }
}

/// The first node's answer, kept until the other node has come as far.
#[derive(Default)]
struct Kept(Option<(usize, Value)>);

/// A page that was seen to differ.
struct Suspect {
    file: String,
    id: u64,
    offset: u64,
    /// Its bytes that differed at the first look.
    bytes: BTreeMap<usize, Pair<Option<u8>>>,
    kept: Kept,
}

/// Compares the copies of two nodes; what is not clear is looked at again for
/// at most `wait`.
pub fn compare(
    config: &Config,
    volume: &Volume,
    nodes: [&Node; 2],
    wait: Duration,
) -> Result<CompareResult, Failure> {
    let [a, b] = nodes;
    let a = Asked::connect(config, a, LONG)?;
    let b = Asked::connect(config, b, LONG)?;
    Comparison::new(&volume.name, [a, b], wait).run_for(wait)
}

/// Compares the copies of all nodes that hold a volume with the first one's, up
/// to the first that is not equal.
pub fn compare_all(
    config: &Config,
    volume: &Volume,
    wait: Duration,
) -> Result<CompareResult, Failure> {
    let holders = holders(config, volume);
    let [first, others @ ..] = &holders[..] else {
        return Err(Failure::usage(format!(
            "volume {} has no node",
            volume.name
        )));
    };
    let mut found = CompareResult::default();
    for other in others {
        found = compare(config, volume, [first, other], wait)?;
        if !found.differences.is_empty() || found.undecided.is_some() {
            break;
        }
    }
    Ok(found)
}

/// Nodes do not report their progress, so they are polled.
fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}

/// One of the nodes.
trait Asks {
    fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error>;
    fn who(&self) -> &str;
}

impl Asks for Asked {
    fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
        // Names are compared as they are.
        Asked::ask_raw(self, request)
    }

    fn who(&self) -> &str {
        Asked::who(self)
    }
}

struct Comparison<N> {
    volume: String,
    nodes: [N; 2],
    /// Why the last try came to nothing.
    moving: String,
    /// Until when it waits for the decision what is committed; after that it compares
    /// what it can.
    decide_by: Instant,
    /// When it was last asked who decides what is committed.
    asked: Instant,
    /// Which node to look at first.
    first: usize,
    /// Where both stood when they were last looked at.
    stand: [Lsns; 2],
    listing: Kept,
    /// What a node says to be wrong with its copy: that does not pass.
    damaged: Option<Difference>,
}

impl<N: Asks> Comparison<N> {
    fn new(volume: &str, nodes: [N; 2], wait: Duration) -> Comparison<N> {
        Comparison {
            volume: volume.to_owned(),
            nodes,
            moving: String::new(),
            decide_by: Instant::now() + wait / 2,
            asked: Instant::now(),
            first: 0,
            stand: [Lsns::default(); 2],
            listing: Kept::default(),
            damaged: None,
        }
    }

    /// Comparisons, until one could be made, for `wait` at most.
    fn run_for(mut self, wait: Duration) -> Result<CompareResult, Failure> {
        let deadline = Instant::now() + wait;
        loop {
            let found = self.run(wait)?;
            if let Some(damaged) = self.damaged.take() {
                return Ok(CompareResult {
                    differences: vec![damaged],
                    ..CompareResult::default()
                });
            }
            match found {
                Some(found) => return Ok(found),
                None if Instant::now() >= deadline => {
                    return Ok(CompareResult {
                        undecided: Some(self.moving),
                        ..CompareResult::default()
                    });
                }
                None => pause(),
            }
        }
    }

    /// Asks one node; `None` if it cannot answer now, which may pass.
    fn ask(&mut self, node: usize, q: &Request) -> Result<Option<Value>, Failure> {
        let node = &mut self.nodes[node];
        match node.ask(q) {
            Ok(v) => Ok(Some(v)),
            Err(e) if [libc::EBUSY, libc::ENOENT].contains(&e.errno()) => {
                self.moving = format!("{}: {}", node.who(), plain(&e));
                Ok(None)
            }
            Err(e) if e.errno() == libc::EUCLEAN => {
                let what = plain(&e);
                self.damaged = Some(Difference {
                    // Its text begins with where the damage is.
                    file: what.split(": ").next().unwrap_or_default().to_owned(),
                    page: None,
                    offset: None,
                    what: format!("{}: {what}", node.who()),
                });
                Ok(None)
            }
            Err(e) => Err(Failure::failed(format!("{}: {}", node.who(), plain(&e)))),
        }
    }

    fn both(&mut self, q: &Request) -> Result<Option<[Value; 2]>, Failure> {
        let (Some(a), Some(b)) = (self.ask(0, q)?, self.ask(1, q)?) else {
            return Ok(None);
        };
        Ok(Some([a, b]))
    }

    /// Asks one node, then the other what it has since; `None` as for `ask`. The answers
    /// are in the nodes' order, with which node was asked first.
    fn since(
        &mut self,
        q: impl Fn(Since) -> Request,
        kept: &mut Kept,
    ) -> Result<Option<([Value; 2], usize)>, Failure> {
        let (first, one) = match kept.0.take() {
            Some(kept) => kept,
            None => match self.ask(self.first, &q(Since::default()))? {
                Some(one) => (self.first, one),
                None => return Ok(None),
            },
        };
        let number = |k: &str| one[k].as_u64();
        let since = Since {
            after: number("low"),
            after_born: number("born").unwrap_or(0),
            since: number("high").unwrap_or(0),
        };
        let Some(other) = self.ask(1 - first, &q(since))? else {
            return Ok(None);
        };
        let [a, b] = [&one, &other].map(Lsns::of);
        let knows = !other["touched"].is_null() || !other["changed"].is_null();
        if b.exact().is_none() {
            // The follower is as of one LSN and knows what has changed. Which node
            // follows is not known here.
            self.first = 1 - first;
        } else if knows && b.low < a.high {
            // The other node lags; the first answer stands until it has come as far.
            kept.0 = Some((first, one.clone()));
        }
        let mut answers = [one, other];
        answers.rotate_left(first);
        self.stand = answers.each_ref().map(Lsns::of);
        if answers[0]["volume_id"] != answers[1]["volume_id"] {
            self.moving = "the copies are not of one volume".into();
            return Ok(None);
        }
        Ok(Some((answers, first)))
    }

    fn listings(&mut self, part: Part) -> Result<Option<Listings>, Failure> {
        let volume = self.volume.clone();
        let q = |since| Request::Files {
            volume: volume.clone(),
            since,
            part,
        };
        let mut kept = std::mem::take(&mut self.listing);
        let answers = self.since(q, &mut kept)?;
        self.listing = kept;
        let Some((answers, first)) = answers else {
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
        let changed = answers[1 - first]["changed"].clone();
        let of = answers.map(|v| {
            let files = || v["files"].as_array().into_iter().flatten();
            Listing {
                lsns: Lsns::of(&v),
                last: v["last_lsn"].as_u64().unwrap_or(0),
                files: files()
                    .filter_map(|f| {
                        let name = f["name"].as_str()?.to_owned();
                        Some((name, (f["id"].as_u64()?, f["size"].as_u64()?)))
                    })
                    .collect(),
                sums: files()
                    .filter_map(|f| Some((f["id"].as_u64()?, f["sums"].as_str()?.to_owned())))
                    .collect(),
                next: v["next"].as_u64().and_then(|n| u32::try_from(n).ok()),
            }
        });
        Ok(Some(Listings {
            of,
            first,
            changed: serde_json::from_value(changed).unwrap_or_default(),
        }))
    }

    /// Has the leading node decide what is committed of the records that a killed program
    /// left. True while it does.
    fn awaits_decision(&mut self, listings: &Listings) -> bool {
        let is_open = listings.of.iter().any(|l| l.lsns.low != l.last);
        is_open && self.ask_to_decide()
    }

    /// The same, now and then, while something waits for the nodes: whatever the listings said. Somebody
    /// may have had the leading node's copy when it was asked last, or a program that was killed since
    /// may have said less than it left; and a copy that is looked at is not healed unasked. Where a
    /// program runs it is asked without success.
    fn decision_is_pending(&mut self) -> bool {
        self.asked.elapsed() >= DECIDES && self.ask_to_decide()
    }

    fn ask_to_decide(&mut self) -> bool {
        self.asked = Instant::now();
        if self.asked >= self.decide_by {
            return false;
        }
        let q = Request::Settle {
            volume: self.volume.clone(),
        };
        let mut decides = false;
        for node in &mut self.nodes {
            // An older build does not know this request: then the question stays open.
            if node.ask(&q).is_ok_and(|v| v == true) {
                self.moving = format!("{} decides what is committed", node.who());
                decides = true;
            }
        }
        if decides {
            // The node's daemon needs the copy, which a look occupies.
            std::thread::sleep(DECIDES);
        }
        decides
    }

    /// One comparison; `None` if it could not be made now.
    fn run(&mut self, wait: Duration) -> Result<Option<CompareResult>, Failure> {
        let mut found = CompareResult::default();
        let mut began = None;
        let mut part = Part {
            sums: true,
            ..Part::default()
        };
        loop {
            self.listing = Kept::default();
            let Some(mut first) = self.listings(part)? else {
                return Ok(None);
            };
            if began.is_none() && self.awaits_decision(&first) {
                return Ok(None);
            }
            began.get_or_insert(first.of.each_ref().map(|l| l.lsns.low));
            let next = first.cut();
            let until = next.unwrap_or(0);
            if !self.compare_part(first, Part { until, ..part }, wait, &mut found)? {
                return Ok(None);
            }
            match next {
                Some(next) => part.from = next,
                None => break,
            }
        }
        let began = began.expect("there is a first part");
        self.listing = Kept::default();
        // Where both stand by now; no file has the number 0.
        let none = Part {
            until: 1,
            ..Part::default()
        };
        let Some(Listings { of: [a, b], .. }) = self.listings(none)? else {
            return Ok(None);
        };
        let lows = [a.lsns.low, b.lsns.low];
        found.lsn = lows[0];
        let stands = lows == began;
        if stands && found.differences.is_empty() {
            // Nothing moves: then both nodes must also be at the same LSN.
            for (l, node) in [&a, &b].into_iter().zip(&self.nodes) {
                if l.lsns.low != l.last {
                    self.moving = format!(
                        "{} has records up to LSN {}. Those above {} may not be committed, because a program ended without a detach. The primary's daemon decides that when both nodes of the pair answer, or says why it cannot. A program that attaches decides it too",
                        node.who(),
                        l.last,
                        l.lsns.low
                    );
                    return Ok(None);
                }
            }
            if lows[0] != lows[1] {
                self.moving = format!(
                    "{} is at LSN {}, {} at LSN {}",
                    self.nodes[0].who(),
                    lows[0],
                    self.nodes[1].who(),
                    lows[1]
                );
                return Ok(None);
            }
        }
        Ok(Some(found))
    }

    /// Compares the files of a part of the list, of which `first` is the first look. False if that
    /// could not be done now.
    fn compare_part(
        &mut self,
        mut first: Listings,
        part: Part,
        wait: Duration,
        found: &mut CompareResult,
    ) -> Result<bool, Failure> {
        let sums = first.of.each_mut().map(|l| std::mem::take(&mut l.sums));
        let Some(files) = self.names(first, part, wait, found)? else {
            return Ok(false);
        };
        let mut suspects = Vec::new();
        for (name, (id, size)) in files {
            found.files += 1;
            found.bytes += size;
            // Few files differ: then there is nothing to ask for.
            let [x, y] = sums.each_ref().map(|s| s.get(&id));
            let whole = 32 * size.div_ceil(PAGE) as usize;
            if x.is_some_and(|x| x.len() == whole) && x == y {
                continue;
            }
            if !self.scan((&*name, id, size), wait, &mut suspects, found)? {
                return Ok(false);
            }
        }
        self.decide(suspects, wait, found)
    }

    /// Why something could not be decided: the nodes' LSNs if both stand still, or if one
    /// does not follow the other; otherwise `moves`.
    fn why(&self, moves: &str) -> String {
        let at = |i: usize| format!("{} is at LSN {}", self.nodes[i].who(), self.stand[i].low);
        let [a, b] = self.stand;
        match [a.exact(), b.exact()] {
            [Some(x), Some(y)] if x != y => format!("{}, {}", at(0), at(1)),
            [None, Some(y)] if y < a.low => format!("{}, {} and goes on", at(1), at(0)),
            [Some(x), None] if x < b.low => format!("{}, {} and goes on", at(0), at(1)),
            _ => moves.to_owned(),
        }
    }

    /// Both nodes' listings once more, after a pause; `None` if all is to begin anew.
    fn listings_again(&mut self, part: Part) -> Result<Option<Listings>, Failure> {
        pause();
        if self.decision_is_pending() {
            return Ok(None);
        }
        let sums = false;
        let Some(mut now) = self.listings(Part { sums, ..part })? else {
            return Ok(None);
        };
        if now.cut().is_some() {
            // More files came than fit an answer.
            self.moving = "names of files change".into();
            return Ok(None);
        }
        Ok(Some(now))
    }

    /// Files that both have, with the same number and size.
    fn names(
        &mut self,
        first: Listings,
        part: Part,
        wait: Duration,
        found: &mut CompareResult,
    ) -> Result<Option<Files>, Failure> {
        let names = first.of.iter().flat_map(|l| l.files.keys());
        let mut pairs: BTreeMap<String, Pair<Option<(u64, u64)>>> = names
            .map(|n| (n.clone(), Pair::new(first.look(n), first.lsn(n))))
            .collect();
        let deadline = Instant::now() + wait;
        // The first look was at more.
        self.listing = Kept::default();
        while pairs.values().any(|p| p.verdict() == Verdict::Unknown) {
            if Instant::now() >= deadline {
                self.moving = self.why("names and sizes of files change");
                return Ok(None);
            }
            let Some(now) = self.listings_again(part)? else {
                return Ok(None);
            };
            for (name, pair) in &mut pairs {
                pair.look(now.look(name), now.lsn(name));
            }
        }
        let (mut both, mut again) = (BTreeMap::new(), false);
        for (name, pair) in pairs {
            let who = |i: usize| self.nodes[i].who();
            let lsn = match (pair.seen, pair.verdict()) {
                (_, Verdict::Differ(lsn)) => lsn,
                // Equal, or changed on both while they were looked at: what both have of it.
                ([Some((a, x)), Some((b, y))], _) if a == b => {
                    both.insert(name, (a, x.min(y)));
                    continue;
                }
                ([None, None], _) => continue,
                _ => {
                    self.moving = format!("file {name} is made anew again and again");
                    again = true;
                    continue;
                }
            };
            let what = match pair.seen {
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
                what: format!("{what}, both as of LSN {lsn}"),
            });
        }
        // What cannot be compared now may be at the next try.
        Ok((!again || !found.differences.is_empty()).then_some(both))
    }

    /// Compares the sums of all pages of a file. False if a node cannot answer now.
    fn scan(
        &mut self,
        (name, id, size): (&str, u64, u64),
        wait: Duration,
        suspects: &mut Vec<Suspect>,
        found: &mut CompareResult,
    ) -> Result<bool, Failure> {
        let mut at = 0;
        while at < size && found.undecided.is_none() && found.differences.len() < MOST {
            let q = Request::Sums {
                volume: self.volume.clone(),
                id,
                offset: at,
                pages: PAGES,
            };
            let Some(answers) = self.both(&q)? else {
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
                if p.is_none() || p != q {
                    suspects.push(Suspect {
                        file: name.to_owned(),
                        id,
                        offset: at + i * PAGE,
                        bytes: BTreeMap::new(),
                        kept: Kept::default(),
                    });
                }
            }
            at += PAGES * PAGE;
            // Where both nodes have a hole, both have zeros. An older release does not say so.
            let zero = answers.map(|v| v["zero_until"].as_u64().unwrap_or(0));
            at = at.max(zero[0].min(zero[1]) / PAGE * PAGE);
            // Pages that are equal after all make room for others.
            if suspects.len() >= MOST && !self.decide(std::mem::take(suspects), wait, found)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One look at a suspect's bytes. False if a node cannot answer now.
    fn look(&mut self, s: &mut Suspect, first: bool) -> Result<bool, Failure> {
        let volume = self.volume.clone();
        let (id, offset) = (s.id, s.offset);
        let q = |since| Request::Page {
            volume: volume.clone(),
            id,
            offset,
            since,
        };
        let mut kept = std::mem::take(&mut s.kept);
        let answers = self.since(q, &mut kept)?;
        s.kept = kept;
        let Some((answers, one)) = answers else {
            return Ok(false);
        };
        let lsns = answers.each_ref().map(Lsns::of);
        let touched: Option<Vec<(u64, u64)>> =
            serde_json::from_value(answers[1 - one]["touched"].clone()).unwrap_or_default();
        let lsn = |i: usize| {
            let kept = touched.as_ref().is_some_and(|t| {
                let next = t.partition_point(|(_, to)| *to <= i as u64);
                t.get(next).is_none_or(|(from, _)| *from > i as u64)
            });
            common(lsns[one], lsns[1 - one], kept)
        };
        let bytes = answers.map(|v| unhex(v["bytes"].as_str().unwrap_or("")).unwrap_or_default());
        let byte = |i: usize| bytes.each_ref().map(|b| b.get(i).copied());
        if first {
            s.bytes = (0..PAGE as usize)
                .map(|i| (i, byte(i)))
                .filter(|(_, [a, b])| a != b)
                .map(|(i, seen)| (i, Pair::new(seen, lsn(i))))
                .collect();
        } else {
            for (i, pair) in &mut s.bytes {
                pair.look(byte(*i), lsn(*i));
            }
        }
        Ok(true)
    }

    /// Looks at these until each is decided. False if all is to begin anew: what is committed is decided
    /// just now.
    fn decide(
        &mut self,
        mut suspects: Vec<Suspect>,
        wait: Duration,
        found: &mut CompareResult,
    ) -> Result<bool, Failure> {
        let deadline = Instant::now() + wait;
        let mut first = true;
        while !suspects.is_empty() {
            let mut left = Vec::new();
            for mut s in suspects {
                // All are looked at once, however long that takes.
                if !first && Instant::now() >= deadline {
                    left.push(s);
                    continue;
                }
                if !self.look(&mut s, first)? {
                    found.undecided = Some(self.moving.clone());
                    return Ok(true);
                }
                let verdicts = || s.bytes.iter().map(|(i, p)| (*i, p, p.verdict()));
                let differs = verdicts().find_map(|(i, p, v)| match v {
                    Verdict::Differ(lsn) => Some((i, p.seen, lsn)),
                    _ => None,
                });
                if let Some((i, seen, lsn)) = differs {
                    let at = s.offset + i as u64;
                    let [x, y] = seen.map(|b| match b {
                        Some(b) => format!("{b:#04x}"),
                        None => "no byte".to_owned(),
                    });
                    found.differences.push(Difference {
                        what: format!(
                            "file {}: the first byte that differs is at offset {at}: {} has {x}, {} has {y}, both as of LSN {lsn}",
                            s.file,
                            self.nodes[0].who(),
                            self.nodes[1].who(),
                        ),
                        file: s.file,
                        page: Some((s.id, s.offset)),
                        offset: Some(at),
                    });
                } else if verdicts().any(|(_, _, v)| v == Verdict::Unknown) {
                    left.push(s);
                    // The next look may wait a second for a mirror that lags.
                    if self.decision_is_pending() {
                        return Ok(false);
                    }
                }
            }
            suspects = left;
            first = false;
            if let Some(s) = suspects.first() {
                if Instant::now() >= deadline {
                    let moves = format!("file {} changes around offset {}", s.file, s.offset);
                    found.undecided = Some(self.why(&moves));
                    break;
                }
                pause();
                if self.decision_is_pending() {
                    return Ok(false);
                }
            }
        }
        found
            .differences
            .sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
        Ok(true)
    }
}

/// A number of things, in words.
pub fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lsns(low: u64, high: u64) -> Lsns {
        Lsns {
            low,
            high,
            born: Some(1),
            epoch: Some(1),
        }
    }

    #[test]
    fn a_difference_counts_only_as_of_one_lsn() {
        // Both stand still, at the same point, then at different ones.
        assert_eq!(common(lsns(5, 5), lsns(5, 5), false), Some(5));
        assert_eq!(common(lsns(5, 5), lsns(6, 6), false), None);
        // What nothing has written since is as of both.
        assert_eq!(common(lsns(5, 5), lsns(6, 6), true), Some(6));
        // The first was read while records up to 9 may have been half applied.
        assert_eq!(common(lsns(5, 9), lsns(9, 9), true), Some(9));
        assert_eq!(common(lsns(5, 9), lsns(9, 9), false), None);
        assert_eq!(common(lsns(5, 9), lsns(8, 8), true), None);
        // So was the second: what it keeps is not known.
        assert_eq!(common(lsns(5, 5), lsns(5, 9), true), None);

        // The same number in another history is another LSN.
        let other = Lsns {
            born: Some(2),
            ..lsns(5, 5)
        };
        assert_eq!(common(lsns(5, 5), other, false), None);
        let other = Lsns {
            epoch: Some(2),
            ..lsns(9, 9)
        };
        assert_eq!(common(lsns(5, 9), other, true), None);

        let verdict = |seen, lsn| Pair::new(seen, lsn).verdict();
        assert_eq!(verdict([1, 2], Some(5)), Verdict::Differ(5));
        assert_eq!(verdict([1, 2], None), Verdict::Unknown);
        assert_eq!(verdict([1, 1], None), Verdict::Equal);
    }

    /// `verify` reported a difference of correct copies: a byte that a program writes all
    /// the time was the same at two looks by chance, and was taken for one that was not
    /// written between them.
    #[test]
    fn a_byte_that_comes_back_is_not_one_that_stood_still() {
        let mut p = Pair::new([1, 2], common(lsns(4195, 4195), lsns(4156, 4156), false));
        p.look([1, 2], common(lsns(4195, 4195), lsns(4259, 4259), false));
        assert_eq!(p.verdict(), Verdict::Unknown);
    }

    #[test]
    fn what_is_written_on_both_nodes_is_no_difference() {
        let mut p = Pair::new([1, 2], None);
        p.look([3, 2], None);
        assert_eq!(p.verdict(), Verdict::Unknown);
        p.look([4, 3], None);
        assert_eq!(p.verdict(), Verdict::Equal);
        // Unless both are seen to differ as of one LSN.
        p.look([4, 3], Some(7));
        assert_eq!(p.verdict(), Verdict::Differ(7));
    }

    fn listings(files: [(u64, u64); 2], changed: Option<Changed>) -> Listings {
        let of = [(5, 9), (9, 9)].map(|(low, high)| Listing {
            lsns: lsns(low, high),
            last: high,
            files: Files::new(),
            sums: HashMap::new(),
            next: None,
        });
        let mut all = Listings {
            of,
            first: 0,
            changed,
        };
        for (l, f) in all.of.iter_mut().zip(files) {
            l.files.insert("f".into(), f);
        }
        all
    }

    /// Changes of other files do not matter.
    #[test]
    fn a_size_differs_only_where_nothing_has_resized_the_file() {
        let changed = |ids: &[u64], names: &[&str]| {
            Some(Changed {
                ids: ids.iter().copied().collect(),
                names: names.iter().map(|n| n.to_string()).collect(),
            })
        };
        let sizes = [(7, 100), (7, 90)];
        assert_eq!(listings(sizes, None).lsn("f"), None);
        assert_eq!(listings(sizes, changed(&[], &[])).lsn("f"), Some(9));
        assert_eq!(listings(sizes, changed(&[8], &["g"])).lsn("f"), Some(9));
        assert_eq!(listings(sizes, changed(&[7], &[])).lsn("f"), None);
        assert_eq!(listings(sizes, changed(&[], &["f"])).lsn("f"), None);
    }

    /// A node whose pages all seem to differ from its peer's when they are summed, as
    /// where a program writes to all of them, and of which only the last one does.
    struct Peer {
        name: &'static str,
        size: u64,
    }

    impl Asks for Peer {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            let mut v = json!({
                "low": 5, "high": 5, "born": 1, "epoch": 1, "last_lsn": 5, "state": "whole",
                "volume_id": "v", "touched": [], "changed": { "ids": [], "names": [] },
            });
            match request {
                Request::Files { .. } => {
                    v["files"] = json!([{ "name": "f", "id": 1, "size": self.size }])
                }
                Request::Sums { offset: at, .. } => {
                    let pages = (self.size - at).div_ceil(PAGE).min(PAGES);
                    v["sums"] = json!(format!("{:0>32}", self.name).repeat(pages as usize));
                }
                Request::Page { offset: at, .. } => {
                    let last = at + PAGE == self.size;
                    let byte = if last { self.name } else { "00" };
                    v["bytes"] = json!(byte.repeat(PAGE as usize));
                }
                _ => unreachable!("{request:?}"),
            }
            Ok(v)
        }

        fn who(&self) -> &str {
            self.name
        }
    }

    /// A node whose program was killed, or its mirror, which does not know that the last record is committed.
    /// The first question finds the leading node's copy in use.
    struct Left {
        leads: bool,
        asked: std::rc::Rc<std::cell::Cell<u32>>,
    }

    impl Asks for Left {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            let knows = self.leads || self.asked.get() > 1;
            match request {
                Request::Settle { .. } if self.leads => {
                    self.asked.set(self.asked.get() + 1);
                    return Ok(json!(self.asked.get() > 1));
                }
                Request::Settle { .. } => return Ok(json!(false)),
                Request::Files { .. } => {}
                _ => unreachable!("{request:?}"),
            }
            let low = if knows { 74 } else { 73 };
            Ok(json!({
                "low": low, "high": 74, "born": 1, "epoch": 1, "last_lsn": 74, "state": "whole",
                "volume_id": "v", "files": [{ "name": "f", "id": 1, "size": u64::from(!knows) * PAGE, "sums": "" }],
            }))
        }

        fn who(&self) -> &str {
            if self.leads { "a" } else { "b" }
        }
    }

    /// A comparison asked once who decides. Where the leading node's daemon looked at the copy just then, it waited
    /// to its end for copies to be equal that nobody was making so.
    #[test]
    fn who_decides_is_asked_again() {
        let asked = std::rc::Rc::<std::cell::Cell<u32>>::default();
        let node = |leads| Left {
            leads,
            asked: asked.clone(),
        };
        let wait = Duration::from_secs(60);
        let found = Comparison::new("v", [node(true), node(false)], wait).run_for(wait);
        let found = found.unwrap();
        assert_eq!((found.undecided, found.lsn, asked.get()), (None, 74, 2));
        assert!(found.differences.is_empty());
    }

    /// A primary's copy that nobody uses, and that of its mirror, which lacks the last record until the
    /// primary's daemon was asked.
    struct Lacks {
        leads: bool,
        asked: std::rc::Rc<std::cell::Cell<u32>>,
    }

    impl Asks for Lacks {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            match request {
                Request::Settle { .. } => {
                    self.asked.set(self.asked.get() + u32::from(self.leads));
                    return Ok(json!(self.leads));
                }
                Request::Files { .. } => {}
                _ => unreachable!("{request:?}"),
            }
            let has = self.leads || self.asked.get() > 0;
            let lsn = if has { 74 } else { 73 };
            Ok(json!({
                "low": lsn, "high": lsn, "born": 1, "epoch": 1, "last_lsn": lsn, "state": "whole",
                "volume_id": "v", "files": [{ "name": "f", "id": 1, "size": u64::from(!has) * PAGE, "sums": "" }],
            }))
        }

        fn who(&self) -> &str {
            if self.leads { "a" } else { "b" }
        }
    }

    /// Nobody was asked where the first listings, one of them of a program that was just killed, showed
    /// no record whose fate was open. The primary's daemon does not heal a copy while it is looked at, and
    /// the comparison looked at it to its end (one of 350 runs of
    /// `an_fsync_is_atomic_when_the_mount_is_killed`).
    #[test]
    fn a_mirror_that_lacks_something_is_healed_for_a_comparison() {
        let asked = std::rc::Rc::<std::cell::Cell<u32>>::default();
        let node = |leads| Lacks {
            leads,
            asked: asked.clone(),
        };
        let wait = Duration::from_secs(20);
        let found = Comparison::new("v", [node(true), node(false)], wait).run_for(wait);
        let found = found.unwrap();
        assert_eq!((found.undecided, found.lsn, asked.get()), (None, 74, 1));
        assert!(found.differences.is_empty());
    }

    /// A primary's copy that nobody uses, or that of its mirror, which lacks the last record
    /// until the primary's daemon was asked. The record wrote all pages of a file.
    struct Lags {
        leads: bool,
        is_asked: std::rc::Rc<std::cell::Cell<bool>>,
        /// How many pages were looked at before the daemon was asked.
        looks: std::rc::Rc<std::cell::Cell<u32>>,
    }

    impl Asks for Lags {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            let has = self.leads || self.is_asked.get();
            let (lsn, byte) = if has { (74, "01") } else { (73, "00") };
            let mut v = json!({
                "low": lsn, "high": lsn, "born": 1, "epoch": 1, "last_lsn": lsn, "state": "whole",
                "volume_id": "v", "touched": [], "changed": { "ids": [], "names": [] },
            });
            match request {
                Request::Settle { .. } => {
                    self.is_asked.set(self.is_asked.get() || self.leads);
                    return Ok(json!(self.leads));
                }
                Request::Files { .. } => {
                    v["files"] = json!([{ "name": "f", "id": 1, "size": 64 * PAGE }])
                }
                Request::Sums { .. } => v["sums"] = json!(byte.repeat(64 * 16)),
                Request::Page { .. } => {
                    let looks = self.looks.get() + u32::from(self.leads && !self.is_asked.get());
                    self.looks.set(looks);
                    v["bytes"] = json!(byte.repeat(PAGE as usize));
                }
                _ => unreachable!("{request:?}"),
            }
            Ok(v)
        }

        fn who(&self) -> &str {
            if self.leads { "a" } else { "b" }
        }
    }

    /// All pages that differed were looked at before anybody was asked who decides. Each look
    /// waits a second for a mirror that lags. So `verify` ended undecided behind 64 pages, in one
    /// of 70 runs under load.
    #[test]
    fn who_decides_is_asked_between_two_pages() {
        let (is_asked, looks) = <(std::rc::Rc<std::cell::Cell<bool>>, _)>::default();
        let node = |leads| Lags {
            leads,
            is_asked: is_asked.clone(),
            looks: std::rc::Rc::clone(&looks),
        };
        let wait = Duration::from_secs(60);
        let mut comparison = Comparison::new("v", [node(true), node(false)], wait);
        // It is time to ask again when the first page has been looked at.
        comparison.asked = Instant::now().checked_sub(DECIDES).unwrap();
        let found = comparison.run_for(wait).unwrap();
        assert_eq!((found.undecided, found.lsn, looks.get()), (None, 74, 1));
        assert!(found.differences.is_empty());
    }

    /// A node with a file that has holes.
    #[derive(Clone)]
    struct Sparse {
        size: u64,
        /// Its pages with data: each one's bytes.
        pages: BTreeMap<u64, &'static str>,
        /// An older release does not say where its holes end.
        says: bool,
        /// How often it was asked for sums.
        asked: std::rc::Rc<std::cell::Cell<u64>>,
    }

    impl Asks for Sparse {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            let mut v = json!({
                "low": 5, "high": 5, "born": 1, "epoch": 1, "last_lsn": 5, "state": "whole",
                "volume_id": "v", "touched": [], "changed": { "ids": [], "names": [] },
            });
            let byte = |page| *self.pages.get(&page).unwrap_or(&"00");
            match request {
                Request::Files { .. } => {
                    v["files"] = json!([{ "name": "f", "id": 1, "size": self.size }])
                }
                Request::Sums { offset: at, .. } => {
                    self.asked.set(self.asked.get() + 1);
                    let pages = (self.size - at).div_ceil(PAGE).min(PAGES);
                    let pages = at / PAGE..at / PAGE + pages;
                    let sums: String = pages.clone().map(|p| byte(p).repeat(16)).collect();
                    v["sums"] = json!(sums);
                    if self.says {
                        let next = self.pages.range(pages.end..).next();
                        v["zero_until"] = json!(next.map_or(self.size, |(p, _)| p * PAGE));
                    }
                }
                Request::Page { offset: at, .. } => {
                    v["bytes"] = json!(byte(at / PAGE).repeat(PAGE as usize));
                }
                _ => unreachable!("{request:?}"),
            }
            Ok(v)
        }

        fn who(&self) -> &str {
            "x"
        }
    }

    /// The sums of a hole were asked for, page after page: 16 million of a file of 64 GiB.
    #[test]
    fn what_is_a_hole_on_both_nodes_is_not_asked_for() {
        let node = |size: u64, pages: &[(u64, &'static str)]| Sparse {
            size,
            pages: pages.iter().copied().collect(),
            says: true,
            asked: Default::default(),
        };
        let run = |nodes: [&Sparse; 2]| {
            nodes.iter().for_each(|n| n.asked.set(0));
            let nodes = nodes.map(Clone::clone);
            let found = Comparison::new("v", nodes, LONG).run(LONG);
            let found = found.unwrap().unwrap();
            assert!(found.undecided.is_none());
            let at = |d: &Difference| d.offset.unwrap() / PAGE;
            found.differences.iter().map(at).collect::<Vec<_>>()
        };
        let large = 64 << 30;
        let data = [(3, "01"), (1 << 20, "02")];
        let a = node(large, &data);
        // Zeros that were written, on one of them, are no difference.
        let written = node(large, &[data[0], (7 << 20, "00"), data[1]]);
        assert_eq!(run([&a, &written]), [0; 0]);
        assert_eq!(a.asked.get(), 3);
        // Bytes in the other node's hole are, on either node, up to the last page.
        let last = large / PAGE - 1;
        let other = node(large, &[data[0], (5000, "03"), data[1], (last, "04")]);
        assert_eq!(run([&a, &other]), [5000, last]);
        assert_eq!(run([&other, &a]), [5000, last]);
        assert_eq!(a.asked.get(), 4);

        // A node that says nothing of holes is asked for all.
        let size = 10 * PAGES * PAGE + 1;
        let mut old = node(size, &data[..1]);
        old.says = false;
        let new = node(size, &[data[0], (9 * PAGES, "05")]);
        assert_eq!(run([&old, &new]), [9 * PAGES]);
        assert_eq!(old.asked.get(), 11);
    }

    /// A node with many files, which it lists in parts.
    struct Lister {
        name: &'static str,
        /// Its files, by number.
        sizes: BTreeMap<u32, u64>,
        /// How many an answer has.
        most: usize,
    }

    impl Asks for Lister {
        fn ask(&mut self, request: &Request) -> Result<Value, mojim::Error> {
            let Request::Files { part, .. } = request else {
                unreachable!("{request:?}");
            };
            let mut all = self.sizes.range(part.from..);
            let is_in = |id: u32| part.until == 0 || id < part.until;
            let of = |(id, size): (&u32, &u64)| json!({ "name": format!("f{id}"), "id": id, "size": size, "sums": self.name.repeat(16) });
            let files: Vec<_> = { &mut all }
                .take_while(|(id, _)| is_in(**id))
                .take(self.most)
                .map(of)
                .collect();
            let last = files.last().map_or(0, |f| f["id"].as_u64().unwrap() as u32);
            let next = self.sizes.range(last.max(part.from) + 1..).next();
            let next = next.map(|(id, _)| *id).filter(|id| is_in(*id));
            Ok(json!({
                "low": 5, "high": 5, "born": 1, "epoch": 1, "last_lsn": 5, "state": "whole",
                "volume_id": "v", "changed": { "ids": [], "names": [] },
                "files": files, "next": next,
            }))
        }

        fn who(&self) -> &str {
            "x"
        }
    }

    /// A list that does not fit an answer comes in parts; the nodes may cut it at other files.
    #[test]
    fn files_are_compared_in_parts() {
        let sizes: BTreeMap<u32, u64> = (1..=1000).map(|id| (id * 3, 1)).collect();
        let node = |most| Lister {
            name: "0a",
            sizes: sizes.clone(),
            most,
        };
        let run = |nodes| Comparison::new("v", nodes, LONG).run(LONG);
        let found = run([node(100), node(77)]).unwrap().unwrap();
        assert_eq!((found.files, found.bytes), (1000, 1000));
        assert!(found.differences.is_empty() && found.undecided.is_none());
        let mut other = node(77);
        other.sizes.insert(2001, 2);
        other.sizes.remove(&2400);
        other.sizes.insert(3001, 1);
        let found = run([node(100), other]).unwrap().unwrap();
        let files: Vec<_> = found.differences.iter().map(|d| &d.file[..]).collect();
        assert_eq!(files, ["f2001", "f2400", "f3001"]);
    }

    /// Behind so many pages that seemed to differ, further ones were not looked at, and
    /// the copies were called equal.
    #[test]
    fn no_page_is_left_out_behind_many_that_seem_to_differ() {
        let size = (2 * MOST as u64 + 5) * PAGE;
        let nodes = ["0a", "0b"].map(|name| Peer { name, size });
        let found = Comparison::new("v", nodes, LONG)
            .run(LONG)
            .unwrap()
            .unwrap();
        let at: Vec<_> = found.differences.iter().map(|d| d.offset).collect();
        assert_eq!(at, [Some(size - PAGE)]);
        assert!(found.undecided.is_none() && found.bytes == size);
    }
}
