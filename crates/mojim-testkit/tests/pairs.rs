//! Every mode and every two failures, as docs/reference/two-failures.md promises.
//!
//! The nodes are real ones on loopback. A program appends entries. The tables are that page's, read
//! from the document.
//!
//! A case is one cell of a table:
//!
//! - The program has entries acknowledged.
//! - Then what the cell names fails at the same time. Where somebody can go on, it may fail one
//!   after the other instead, with more entries acknowledged in between.
//! - Nodes that can come back do.
//! - An operator does what the cell's word allows and nothing else.
//! - The node that is primary then is asked for every entry, byte by byte.
//!
//! Owns its temporary directories, shared memory and processes.
//!
//! A loss of power takes a node's memory away, not its page cache: what was
//! never flushed is the simulator's affair (docs/reference/testing.md). `PAIRS_ROUNDS=20`
//! is the long form, `PAIRS_ONLY` picks cells by their names.

// Seen to fail, each by a defect made on purpose or found:
// - two nodes were each promoted while the other was away, and the one with the later epoch lost
//   its memory: it refused the other for ever. A promotion goes above the other node's view now, by
//   `--force` alone where that view is later
// - `mojim promote` said "already" of a primary whose copy had lost what only its ring held

use std::collections::HashMap;
use std::fs;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use mojim_testkit::home::Home;
use mojim_testkit::link::Way;
use mojim_testkit::{Pipe, Process, await_or, mojim, text};

/// The document with the tables: their only source.
const DOCUMENT: &str = include_str!("../../../docs/reference/two-failures.md");

const UNREPLICATED: &str = "`unreplicated`";
const ASYNC: &str = "`async`";
const SYNC: &str = "`sync`";
const SYNC_FLUSH: &str = "`sync-flush`";
const SYNC_DISK: &str = "`sync-disk`";
const SYNC_SEC: &str = "`sync-sec` and `sync-seceth`";
const BY_HAND: &str = "`sync` with two nodes and no witness";
const DISK_BY_HAND: &str = "`sync-disk` with two nodes and no witness";

/// The document's sections with tables, by their headings, and how many cells each has.
const SECTIONS: [(&str, usize); 8] = [
    (UNREPLICATED, 12),
    (ASYNC, 89),
    (SYNC, 89),
    (SYNC_FLUSH, 89),
    (SYNC_DISK, 89),
    (SYNC_SEC, 120),
    (BY_HAND, 89),
    (DISK_BY_HAND, 89),
];

/// A section of the document, from its heading to the next one.
fn section(heading: &str) -> &'static str {
    let begin = format!("\n### {heading}\n");
    let Some(at) = DOCUMENT.find(&begin) else {
        panic!("the document has no section {heading}")
    };
    let from = &DOCUMENT[at + 1..];
    from.find("\n#").map_or(from, |end| &from[..end])
}

/// Entries that show that somebody goes on.
const MORE: u64 = 30;

/// What fails, and whose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    /// The program of the node is killed.
    Program(&'static str),
    /// So are the node's processes, all of them; its memory stays.
    Processes(&'static str),
    /// Its memory is gone too.
    Power(&'static str),
    /// So is its copy of the volume, and it comes back with its name only.
    Copy(&'static str),
    /// So is its disk, and it does not come back.
    Good(&'static str),
    /// Primary and mirror do not hear each other.
    Link,
}

impl Failure {
    /// The same of another node.
    fn of(self, node: &'static str) -> Failure {
        match self {
            Failure::Program(_) => Failure::Program(node),
            Failure::Processes(_) => Failure::Processes(node),
            Failure::Power(_) => Failure::Power(node),
            Failure::Copy(_) => Failure::Copy(node),
            Failure::Good(_) => Failure::Good(node),
            Failure::Link => Failure::Link,
        }
    }

    /// The node whose processes end by it.
    fn ends(self) -> Option<&'static str> {
        match self {
            Failure::Program(_) => None,
            f => f.node(),
        }
    }

    fn node(self) -> Option<&'static str> {
        match self {
            Failure::Program(n)
            | Failure::Processes(n)
            | Failure::Power(n)
            | Failure::Copy(n)
            | Failure::Good(n) => Some(n),
            Failure::Link => None,
        }
    }
}

/// What is awaited before the second failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// The program is started again on the node that failed.
    Restarted,
    /// Entries are acknowledged that only the primary has.
    Alone,
    /// The same, on the former mirror.
    TakenOver,
    /// The same, on the one of the two that the register lets go on.
    Either,
    /// A backup is the mirror of the primary.
    Replaced,
    /// The same, of the former mirror.
    TakenOverAndReplaced,
    /// The node that failed is a member again.
    Back,
    /// The same, as the mirror of its former mirror.
    BackAsMirror,
}

/// What is promised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Promise {
    /// All that was acknowledged, and nobody types a command.
    Kept,
    /// The same after `promote`.
    Hand,
    /// All that had arrived at the node that is promoted.
    Lag,
    /// All up to the first failure, after `promote`.
    Since,
    /// What the primary had written in the background.
    Ring,
    /// Nothing.
    Lost,
}

/// One cell.
#[derive(Debug)]
struct Case {
    mode: &'static str,
    /// Whether there is a register of views.
    register: bool,
    row: &'static str,
    column: &'static str,
    first: Option<(Failure, Then)>,
    last: Vec<Failure>,
    promise: Promise,
    /// The same where `b` was the one to go on.
    on_b: Promise,
}

impl Case {
    /// Of the nodes that still have a disk, the one that an operator goes on with.
    fn survivor(&self) -> Option<&'static str> {
        let backup = ["sync-sec", "sync-seceth"].contains(&self.mode);
        let of: &[&str] = match self.promise {
            Promise::Lag if backup => &["c"],
            Promise::Lag if matches!(self.first, Some((_, Then::BackAsMirror))) => &["a"],
            Promise::Lag => &["b"],
            // The one that failed second had what was acknowledged alone.
            _ if matches!(self.first, Some((_, Then::Alone | Then::Either))) => &["b"],
            _ if self.mode == "unreplicated" => &[],
            _ => &["a", "b"],
        };
        let failed = |f| self.last.contains(&f) || self.first.is_some_and(|(g, _)| g == f);
        let left = of.iter().filter(|n| !failed(Failure::Good(n)));
        // Rather one that has kept its copy, and its memory.
        left.min_by_key(|n| (failed(Failure::Copy(n)), failed(Failure::Power(n))))
            .copied()
    }

    /// Whether there is anybody who could be asked.
    fn leaves_something(&self) -> bool {
        self.promise != Promise::Lost || self.survivor().is_some() || self.mode == "unreplicated"
    }
}

fn failure(words: &'static str) -> Option<Failure> {
    let node = |w: &'static str| match w {
        "a" | "b" | "c" => w,
        _ => panic!("{words}: no node"),
    };
    Some(match words {
        "nothing else" => return None,
        "the link" => Failure::Link,
        _ if words.ends_with(" for good") => Failure::Good(node(&words[..1])),
        _ => match words.split_once("'s ") {
            Some((n, "program")) => Failure::Program(node(n)),
            Some((n, "processes")) => Failure::Processes(node(n)),
            Some((n, "power")) => Failure::Power(node(n)),
            Some((n, "copy")) => Failure::Copy(node(n)),
            _ => panic!("{words}: no failure"),
        },
    })
}

fn promise(word: &str) -> Promise {
    match word {
        "kept" => Promise::Kept,
        "hand" => Promise::Hand,
        "lag" => Promise::Lag,
        "since" => Promise::Since,
        "ring" => Promise::Ring,
        "lost" => Promise::Lost,
        _ => panic!("{word}: no promise"),
    }
}

/// The modes that a heading names.
fn modes(table: &'static str) -> Vec<&'static str> {
    heading(table).split('`').skip(1).step_by(2).collect()
}

fn heading(table: &'static str) -> &'static str {
    table.lines().next().expect("a heading")
}

/// The cells of the modes' tables, each mode's.
fn cases(table: &'static str) -> Vec<Case> {
    let mut all = Vec::new();
    let modes = modes(table);
    let mut header: Vec<&str> = Vec::new();
    for line in table.lines() {
        let Some(line) = line.strip_prefix('|') else {
            header.clear();
            continue;
        };
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let cells = &cells[..cells.len() - 1];
        if header.is_empty() {
            header = cells.to_vec();
            continue;
        }
        if cells[0].starts_with("---") {
            continue;
        }
        assert_eq!(cells.len(), header.len(), "{line}");
        for (&column, &word) in header.iter().zip(cells).skip(1) {
            if word.is_empty() {
                continue;
            }
            for &mode in &modes {
                let case = case(mode, cells[0], column, header[0], word);
                let register = case.register && !heading(table).contains("no witness");
                all.push(Case { register, ..case });
            }
        }
    }
    all
}

fn case(
    mode: &'static str,
    row: &'static str,
    column: &'static str,
    order: &str,
    word: &str,
) -> Case {
    let (first, last) = match order {
        "at the same time" => {
            let both = [failure(row), failure(column)];
            (None, both.into_iter().flatten().collect())
        }
        "one after the other" => {
            let (one, what) = row.split_once("; ").expect("what comes of it");
            let (then, primary) = match what {
                "a comes back" => (Then::Restarted, "a"),
                "a goes on alone" => (Then::Alone, "a"),
                "b takes over" => (Then::TakenOver, "b"),
                "one of them goes on alone" => (Then::Either, "a"),
                "b is back" => (Then::Back, "a"),
                "c takes its place" => (Then::Replaced, "a"),
                "b takes over, c its place" => (Then::TakenOverAndReplaced, "b"),
                "b takes over, a is back" => (Then::BackAsMirror, "b"),
                _ => panic!("{what}: what comes of it?"),
            };
            let last = match column {
                "then its program" => Failure::Program(primary),
                "its processes" => Failure::Processes(primary),
                "its power" => Failure::Power(primary),
                "it for good" => Failure::Good(primary),
                _ => panic!("{column}: no failure"),
            };
            (Some((failure(one).expect("a failure"), then)), vec![last])
        }
        _ => panic!("{order}: no order"),
    };
    let (on_a, on_b) = word.split_once(", on b ").unwrap_or((word, word));
    Case {
        mode,
        register: !["unreplicated", "async"].contains(&mode),
        row,
        column,
        first,
        last,
        promise: promise(on_a),
        on_b: promise(on_b),
    }
}

/// What is wrong with what was found.
#[derive(Debug, PartialEq, Eq)]
enum Wrong {
    Torn(String),
    Lost(String),
    Made(String),
}

/// Whether `found` entries, all whole, or what was said of damaged ones, are
/// what may be there: at least `least`; at most one more than `acknowledged`,
/// since one was on its way.
fn judge(found: &Result<u64, String>, least: u64, acknowledged: u64) -> Result<u64, Wrong> {
    match found {
        Err(said) => Err(Wrong::Torn(said.clone())),
        Ok(n) if *n < least => Err(Wrong::Lost(format!("{n} of {least} entries"))),
        Ok(n) if *n > acknowledged + 1 => Err(Wrong::Made(format!(
            "{n} entries, {acknowledged} were sent"
        ))),
        Ok(n) => Ok(*n),
    }
}

/// A program that appends until it dies, and what it had acknowledged.
struct Writer {
    node: &'static str,
    id: Pid,
    acknowledged: Arc<AtomicU64>,
    out: Pipe,
    reader: JoinHandle<()>,
}

impl Writer {
    fn new(node: &'static str, mut p: Process, found: u64) -> Writer {
        let acknowledged = Arc::new(AtomicU64::new(found));
        let count = acknowledged.clone();
        let id = Pid::from_child(&p.child);
        let out = p.pipe();
        let reader = std::thread::spawn(move || {
            while let Some(line) = p.line() {
                let entry: u64 = line.parse().expect("an entry's number");
                assert_eq!(count.swap(entry + 1, SeqCst), entry);
            }
        });
        Writer {
            node,
            id,
            acknowledged,
            out,
            reader,
        }
    }

    /// How many entries were acknowledged before nobody is left who does: all that
    /// it has said is read.
    fn standstill(&self) -> u64 {
        self.out.await_standstill(|| self.count())
    }

    fn count(&self) -> u64 {
        self.acknowledged.load(SeqCst)
    }

    /// It is not there any more, by itself.
    fn has_ended(&self) -> bool {
        self.reader.is_finished()
    }

    fn kill(&self) {
        // One that has ended was waited for, so its number may be another's.
        if !self.has_ended() {
            let _ = kill_process(self.id, Signal::KILL);
        }
    }

    /// When it is dead: the entries that were acknowledged.
    fn end(self) -> u64 {
        let read = self.reader.join();
        assert!(read.is_ok() || std::thread::panicking(), "it said nonsense");
        self.acknowledged.load(SeqCst)
    }
}

/// The nodes that a mode needs; a register where it has one.
fn names(mode: &str, register: bool) -> Vec<&'static str> {
    match mode {
        "unreplicated" => vec!["a"],
        "sync-sec" | "sync-seceth" => vec!["a", "b", "c", "w", "x"],
        _ if register => vec!["a", "b", "w"],
        _ => vec!["a", "b"],
    }
}

/// Nodes, a link that can be cut, and a program.
struct Cluster {
    mode: &'static str,
    register: bool,
    home: Home,
    nodes: HashMap<&'static str, Process>,
    /// Those that are gone for good.
    gone: Vec<&'static str>,
    ways: Vec<Way>,
    is_cut: bool,
    writer: Option<Writer>,
    /// Entries that were acknowledged to programs that are dead.
    acknowledged: u64,
}

impl Cluster {
    fn new(mode: &'static str, register: bool) -> Cluster {
        let mut c = Cluster {
            mode,
            register,
            home: Home::new("pairs", names(mode, register).len()),
            nodes: HashMap::new(),
            gone: Vec::new(),
            ways: Vec::new(),
            is_cut: false,
            writer: None,
            acknowledged: 0,
        };
        let names = c.names();
        let ports: Vec<u16> = c.ports.iter().map(|p| p.number).collect();
        for name in &names {
            fs::create_dir_all(c.dir.join(name)).unwrap();
            fs::create_dir_all(c.memory.join(name)).unwrap();
        }
        fs::write(c.file(""), c.text(&ports)).unwrap();
        for name in &names {
            let mut seen = ports.clone();
            // a and b reach each other by ways that can be cut.
            let other = match *name {
                "a" => names.iter().position(|n| *n == "b"),
                "b" => Some(0),
                _ => None,
            };
            if let Some(other) = other {
                let (way, port) = Way::new(ports[other]);
                c.ways.push(way);
                seen[other] = port;
            }
            fs::write(c.file(name), c.text(&seen)).unwrap();
        }
        for name in names {
            c.start(name);
        }
        c
    }

    fn names(&self) -> Vec<&'static str> {
        names(self.mode, self.register)
    }

    fn has_backup(&self) -> bool {
        self.names().contains(&"c")
    }

    fn text(&self, ports: &[u16]) -> String {
        let mode = self.mode;
        let mut t = format!(
            "cluster = \"pairs\"\nheartbeat = \"200ms\"\nfailure_limit = \"3s\"\n\
             [volume.v]\nmode = \"{mode}\"\nprimary = \"a\"\nresend_timeout = \"500ms\"\n"
        );
        // Longer than a machine stands still; with a register, than a change of
        // the view takes.
        t += match self.register {
            true => "resend_attempts = 20\n",
            false => "resend_attempts = 8\n",
        };
        if mode != "unreplicated" {
            t += "mirror = \"b\"\n";
        }
        if self.has_backup() {
            t += "backups = [\"c\"]\n";
        }
        for (name, port) in self.names().iter().zip(ports) {
            t += &format!(
                "[node.{name}]\naddress = \"127.0.0.1:{port}\"\ndirectory = \"{}\"\n",
                self.dir.join(name).display()
            );
            if ["w", "x"].contains(name) {
                t += "role = \"witness\"\n";
                continue;
            }
            let medium = match (mode, *name) {
                ("sync-disk", "b") => "dram",
                _ => "disk",
            };
            t += &format!(
                "ring = \"{}\"\nlog = {{ medium = \"{medium}\", size = \"4MiB\" }}\n",
                self.memory.join(name).display()
            );
        }
        t
    }

    /// The configuration as a node sees it; "": without the ways.
    fn file(&self, node: &str) -> PathBuf {
        self.dir.join(format!("{node}.toml"))
    }

    fn mojim(&self, word: &str, args: &[&str]) -> std::process::Output {
        let file = self.file("");
        mojim(&[&[word, "--config", file.to_str().unwrap()], args].concat())
    }

    fn start(&mut self, name: &'static str) {
        let file = self.file(name);
        let args = ["node", "--config", file.to_str().unwrap(), "--name", name];
        let mut p = Process::start(&args, &self.dir.join(format!("{name}.txt")));
        let line = p
            .line()
            .unwrap_or_else(|| panic!("node {name}: {}", p.errors()));
        assert!(line.contains("is ready at"), "{line}");
        self.nodes.insert(name, p);
    }

    /// The program, attached, and how many entries it found, all whole; or
    /// what it said. `None` if it could not attach.
    fn attach(&self, node: &str, args: &[&str]) -> Option<(Process, Result<u64, String>)> {
        let file = self.file(node);
        let errors = self.dir.join(format!("program-{node}.txt"));
        let _ = fs::remove_file(&errors);
        let base = ["__append", "--config", file.to_str().unwrap(), "--node"];
        let mut p = Process::start(&[&base[..], &[node], args].concat(), &errors);
        match p.line() {
            Some(line) => {
                assert!(line.starts_with("attached "), "{line}");
                let found = line.rsplit(' ').next().unwrap().parse().unwrap();
                Some((p, Ok(found)))
            }
            None if p.errors().contains("is damaged") => {
                let said = p.errors();
                Some((p, Err(said)))
            }
            None => None,
        }
    }

    /// The same, as soon as it can be, where the register says if there is one.
    fn attach_at(
        &self,
        node: Option<&'static str>,
    ) -> (&'static str, Process, Result<u64, String>) {
        await_or(
            "the program's start",
            || self.status().to_string() + &self.logs(),
            || {
                let node = node.or_else(|| self.primary())?;
                let (p, found) = self.attach(node, &["--pace", "500"])?;
                Some((node, p, found))
            },
        )
    }

    /// Starts the program that goes on; what it found must be `least` at least.
    /// One that a change of the view ends is started again, as by `mojim run`.
    fn go_on(&mut self, node: Option<&'static str>, least: u64) -> u64 {
        let mut first = None;
        let begin = Instant::now();
        loop {
            let (node, p, found) = self.attach_at(node);
            let least = first.map_or(least, |_| self.acknowledged);
            let found = judge(&found, least, self.acknowledged)
                .unwrap_or_else(|w| panic!("{w:?}, {} were acknowledged", self.acknowledged));
            first = first.or(Some(found));
            self.writer = Some(Writer::new(node, p, found));
            if self.goes_on() {
                return first.expect("set above");
            }
            assert!(
                begin.elapsed() < mojim_testkit::DEADLINE,
                "it ends over and over"
            );
            self.end_program();
        }
    }

    /// Until more entries are acknowledged, or the program ends by itself;
    /// whether they are.
    fn goes_on(&self) -> bool {
        let w = self.writer.as_ref().expect("a program");
        let end = w.count() + MORE;
        await_or(
            "entries' acknowledgement, or the program's end",
            || self.status().to_string() + &self.logs(),
            || {
                let ended = w.has_ended();
                let went_on = w.count() >= end;
                (went_on || ended).then_some(went_on)
            },
        )
    }

    /// The program, if it runs, is dead.
    fn end_program(&mut self) {
        if let Some(w) = self.writer.take() {
            w.kill();
            self.acknowledged = w.end();
        }
    }

    fn status(&self) -> Value {
        let out = self.mojim("status", &["--json"]);
        serde_json::from_slice(&out.stdout).unwrap_or(Value::Null)
    }

    fn says(status: &Value, node: &str) -> Value {
        let nodes = status["volumes"][0]["nodes"].as_array();
        let found = nodes.into_iter().flatten().find(|n| n["node"] == node);
        found.cloned().unwrap_or(Value::Null)
    }

    /// The node that the register names as primary, once it can be read: nodes
    /// that were just started may have to choose who leads.
    fn await_named(&self) -> Value {
        await_or(
            "an answer from the register",
            || self.status().to_string() + &self.logs(),
            || Some(self.read_register()["primary"]["node"].take()).filter(Value::is_string),
        )
    }

    /// The register, as anybody who answers reads it.
    fn read_register(&self) -> Value {
        let s = self.status();
        let all = ["a", "b", "c"].map(|n| Cluster::says(&s, n)["register"].clone());
        let known = all.into_iter().find(|r| r["primary"].is_object());
        known.unwrap_or(Value::Null)
    }

    /// Who is primary and can be: its node's processes run.
    fn primary(&self) -> Option<&'static str> {
        let name = self.read_register()["primary"]["node"].clone();
        self.nodes.keys().copied().find(|n| name == **n)
    }

    /// Until the view is so, by the register, or else by both copies: a mirror hears that
    /// it counts a moment after its primary has written it down.
    fn await_view(&self, primary: &str, mirror: Option<&str>) {
        await_or(
            &format!("the view {primary} and {mirror:?}"),
            || self.status().to_string() + &self.logs(),
            || {
                let is = if self.register {
                    let r = self.read_register();
                    r["primary"]["node"] == primary && r["mirror"]["node"].as_str() == mirror
                } else {
                    let all = self.status();
                    let so = |node: &str| {
                        let v = &Cluster::says(&all, node)["view"];
                        v["primary"] == primary && v["mirror"] == mirror.unwrap_or("")
                    };
                    so(primary) && mirror.is_none_or(so)
                };
                is.then_some(())
            },
        );
    }

    /// Until these nodes have what is acknowledged now, and `primary` has it on
    /// its disk; how many entries that are.
    fn settle(&self, primary: &str, others: &[&str]) -> u64 {
        let n = self.writer.as_ref().expect("a program").count();
        // What is told is as old as its last checkpoint's begin: the one after the
        // next has begun since, while entries go on all the time.
        let mut last = None;
        for what in ["its last LSN", "another one", "one from after"] {
            let now = || {
                let ended = self.writer.as_ref().is_some_and(Writer::has_ended);
                assert!(!ended, "it ended by itself: {}", self.logs());
                let now = Cluster::says(&self.status(), primary)["last_lsn"].as_u64();
                now.filter(|now| Some(*now) != last)
            };
            last = Some(await_or(
                what,
                || self.status().to_string() + &self.logs(),
                now,
            ));
        }
        let last = last.expect("three were awaited");
        await_or(
            "what is acknowledged, everywhere",
            || self.status().to_string() + &self.logs(),
            || {
                let s = self.status();
                let has = |n: &str, what: &str| {
                    let x = Cluster::says(&s, n)[what].as_u64();
                    x.is_some_and(|x| x >= last)
                };
                let all = has(primary, "persisted") && others.iter().all(|n| has(n, "last_lsn"));
                all.then_some(())
            },
        );
        n
    }

    /// All of it fails, as nearly at once as can be.
    fn inflict(&mut self, failures: &[Failure]) {
        let mut dying = false;
        for f in failures {
            if *f == Failure::Link {
                self.ways.iter().for_each(Way::cut);
                self.is_cut = true;
            }
            if let Some(node) = f.node()
                && let Some(w) = self.writer.as_ref().filter(|w| w.node == node)
            {
                w.kill();
                dying = true;
            }
            if let Some(n) = f.ends() {
                kill_process(Pid::from_child(&self.nodes[n].child), Signal::KILL).unwrap();
            }
        }
        if dying {
            self.end_program();
        }
        for f in failures {
            if let Some(n) = f.ends() {
                self.nodes.remove(n).expect("it runs").kill();
            }
            if let Failure::Copy(n) = f {
                self.lose_copy(n);
            }
            if let Failure::Power(n) | Failure::Copy(n) | Failure::Good(n) = f {
                fs::remove_dir_all(self.memory.join(n)).unwrap();
                fs::create_dir_all(self.memory.join(n)).unwrap();
            }
            if let Failure::Good(n) = f {
                fs::remove_dir_all(self.dir.join(n)).unwrap();
                self.gone.push(n);
            }
        }
    }

    /// All that a node has of the volume; what it has as a voter stays.
    fn lose_copy(&self, node: &str) {
        let dir = self.dir.join(node);
        fs::remove_dir_all(dir.join("v")).unwrap();
        for entry in fs::read_dir(dir.join(".mojim")).unwrap() {
            let path = entry.unwrap().path();
            match path.file_name().unwrap().to_str().unwrap() {
                "v" => fs::remove_dir_all(path).unwrap(),
                name if name.starts_with("v.log.") => fs::remove_file(path).unwrap(),
                _ => {}
            }
        }
    }

    /// Who can come back comes back.
    fn restart(&mut self) {
        for name in self.names() {
            if !self.nodes.contains_key(name) && !self.gone.contains(&name) {
                self.start(name);
            }
        }
    }

    /// An operator lets `node` go on, where that takes his word for what may be
    /// missing, and nothing happens without.
    fn go_on_by_hand(&mut self, case: &Case, node: &str) {
        if self.is_cut {
            // Its voter may lead, and `node` does not hear it.
            let other = if node == "a" { "b" } else { "a" };
            if self.nodes.contains_key(other) {
                self.inflict(&[Failure::Processes(other)]);
            }
        }
        if !self.register {
            if case.promise == Promise::Ring {
                // Nothing happens by itself.
                assert!(self.attach(node, &["--entries", "1"]).is_none());
            }
            return self.promote(node);
        }
        if self.await_named() == node {
            // It is the primary by its name, and has not what that one had.
            assert!(self.attach(node, &["--entries", "1"]).is_none());
        }
        // A backup to which an old mirror forwards believes that the primary lives, and
        // says that instead.
        let why = if node == "c" { "" } else { "--force" };
        self.await_refusal(node, &[], why);
        self.force(node);
    }

    /// Until `mojim promote` refuses for this reason; it must not succeed.
    fn await_refusal(&self, node: &str, more: &[&str], why: &str) {
        await_or(
            &format!("the refusal of {node}"),
            || self.status().to_string() + &self.logs(),
            || {
                let out = self.mojim("promote", &[&["--name", node], more].concat());
                assert_ne!(out.status.code(), Some(0), "{node} was promoted");
                text(&out.stderr).contains(why).then_some(())
            },
        );
    }

    /// `mojim promote` by an operator who has no register to ask, until it is
    /// done. A node that was a member may not have heard so: its primary died
    /// before the next heartbeat.
    fn promote(&self, node: &str) {
        await_or(
            &format!("the promotion of {node}"),
            || self.status().to_string() + &self.logs(),
            || {
                let out = self.mojim("promote", &["--name", node]);
                if text(&out.stderr).contains("--force") {
                    self.force(node);
                    return Some(());
                }
                (out.status.code() == Some(0)).then_some(())
            },
        );
    }

    /// The same with his word for what is missing. A node that was just started
    /// may still have its copy open.
    fn force(&self, node: &str) {
        await_or(
            &format!("the promotion of {node} by force"),
            || self.status().to_string() + &self.logs(),
            || {
                let out = self.mojim("promote", &["--name", node, "--force", "--yes"]);
                (out.status.code() == Some(0)).then_some(())
            },
        );
    }

    /// A copy that is lost is not served, by nobody's word. (`None`: no node
    /// that had one is left; what had no other is an empty volume.)
    fn refuses(&mut self, node: Option<&'static str>) {
        let Some(node) = node else {
            if self.mode == "unreplicated" {
                self.gone.clear();
                self.acknowledged = 0;
                self.restart();
                assert_eq!(self.go_on(Some("a"), 0), 0);
            }
            return;
        };
        self.await_refusal(node, &["--force", "--yes"], "copy of volume v");
        assert!(self.attach(node, &["--entries", "1"]).is_none());
    }
}

impl Deref for Cluster {
    type Target = Home;
    fn deref(&self) -> &Home {
        &self.home
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end_program();
        self.ways.iter().for_each(Way::cut);
        self.nodes.clear();
    }
}

fn run(case: &Case) {
    let mut c = Cluster::new(case.mode, case.register);
    c.go_on(Some("a"), 0);
    if c.register {
        c.await_view("a", Some("b"));
    }
    let copies = c.names();
    let copies: Vec<&str> = copies
        .into_iter()
        .filter(|n| ["b", "c"].contains(n))
        .collect();
    let least = c.settle("a", &copies);
    if c.register {
        // A machine that stood still meanwhile may have changed it.
        c.await_view("a", Some("b"));
    }
    // A backup would take the place that is free.
    let waits = matches!(
        case.first,
        Some((_, Then::Alone | Then::TakenOver | Then::Either))
    );
    let waits = waits && c.has_backup();
    if waits {
        c.nodes["c"].signal("STOP");
    }
    if let Some((failure, then)) = case.first {
        c.inflict(&[failure]);
        follow(&mut c, failure, then, least);
    }
    let mut last = case.last.clone();
    let mut node = case.survivor();
    let at = c.writer.as_ref().expect("it runs").node;
    if let (Some((_, Then::Either)), "b") = (case.first, at) {
        last.iter_mut().for_each(|f| *f = f.of("b"));
        node = node.map(|n| if n == "b" { "a" } else { n });
    }
    c.inflict(&last);
    if waits {
        c.nodes["c"].signal("CONT");
    }
    if c.writer.is_some() {
        // Nobody's program failed: it goes on, unless the view is another
        // node's now, and is killed to be asked.
        c.goes_on();
        c.end_program();
    }
    c.restart();
    let all = c.acknowledged;
    let promise = match at {
        "b" => case.on_b,
        _ => case.promise,
    };
    let found = match promise {
        Promise::Kept => c.go_on((!c.register).then_some(at), all),
        Promise::Hand => {
            let node = node.expect("somebody is left");
            c.go_on_by_hand(case, node);
            c.go_on(Some(node), all)
        }
        Promise::Lost => return c.refuses(node),
        Promise::Lag | Promise::Since | Promise::Ring => {
            let node = node.expect("somebody is left");
            c.go_on_by_hand(case, node);
            c.go_on(Some(node), least)
        }
    };
    if promise == Promise::Since {
        assert!(found < all, "nothing was lost of {all} entries: {found}");
    }
}

/// What comes of the first failure.
/// `least`: entries that everybody had before.
fn follow(c: &mut Cluster, failed: Failure, then: Then, least: u64) {
    match then {
        Then::Either => {
            await_or(
                "that one of them is alone",
                || c.status().to_string() + &c.logs(),
                || {
                    let r = c.read_register();
                    (r["primary"].is_object() && r["mirror"].is_null()).then_some(())
                },
            );
            if !c.goes_on() {
                c.end_program();
                c.go_on(None, c.acknowledged);
            }
        }
        Then::Restarted => {
            c.restart();
            c.go_on(Some("a"), c.acknowledged);
        }
        Then::Alone | Then::Back | Then::Replaced => {
            if c.register && then != Then::Replaced {
                c.await_view("a", None);
            }
            if c.mode == "async" || c.register {
                assert!(c.goes_on(), "{}", c.logs());
            } else {
                let w = c.writer.as_ref().expect("a program");
                let before = w.standstill();
                await_or(
                    "the program's end",
                    || c.status().to_string() + &c.logs(),
                    || w.has_ended().then_some(()),
                );
                c.end_program();
                // One may have been under way.
                assert!(
                    c.acknowledged <= before + 1,
                    "{before}, then {}: acknowledged by nobody",
                    c.acknowledged
                );
                if then == Then::Alone {
                    c.promote("a");
                    c.go_on(Some("a"), c.acknowledged);
                }
            }
        }
        Then::TakenOver | Then::BackAsMirror | Then::TakenOverAndReplaced => {
            if c.register && then != Then::TakenOverAndReplaced {
                c.await_view("b", None);
            } else if !c.register {
                c.promote("b");
            }
            let has_all = c.mode != "async";
            c.go_on(Some("b"), if has_all { c.acknowledged } else { least });
        }
    }
    match then {
        Then::Back => {
            c.start(failed.node().expect("a node"));
            if !c.register && c.mode != "async" {
                c.go_on(Some("a"), c.acknowledged);
            }
            c.await_view("a", Some("b"));
        }
        Then::BackAsMirror => {
            c.start(failed.node().expect("a node"));
            c.await_view("b", Some("a"));
        }
        Then::Replaced => c.await_view("a", Some("c")),
        Then::TakenOverAndReplaced => c.await_view("b", Some("c")),
        _ => {}
    }
}

/// Every cell of a table, several at a time: they wait most of the time. The
/// short form takes every fifth cell, others on each of five days, and modes that share a
/// table share them; with `PAIRS_ROUNDS` each runs all of them, so many times.
/// `PAIRS_ONLY` picks those whose name contains it.
fn run_all(heading: &str) {
    const WORKERS: usize = 4;
    let rounds: Option<usize> = std::env::var("PAIRS_ROUNDS")
        .ok()
        .map(|v| v.parse().expect("PAIRS_ROUNDS is a number"));
    let only = std::env::var("PAIRS_ONLY").unwrap_or_default();
    let table = section(heading);
    let modes = modes(table);
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let today = since.as_secs() as usize / 86_400 % 5;
    let mut all = Vec::new();
    for round in 0..rounds.unwrap_or(1) {
        for (i, case) in cases(table).into_iter().enumerate() {
            // They alternate within a cell, and which is first from cell to cell.
            let cell = i / modes.len();
            let mine = (cell + i) % modes.len() == round % modes.len() && cell % 5 == today;
            let by = if case.register { "" } else { " by hand" };
            let name = format!("{}{by}: {} | {}", case.mode, case.row, case.column);
            let is_asked_for = rounds.is_some() || mine || !only.is_empty();
            if is_asked_for && name.contains(&only) && case.leaves_something() {
                all.push((name, case));
            }
        }
    }
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..WORKERS {
            s.spawn(|| {
                while let Some((name, case)) = all.get(next.fetch_add(1, SeqCst)) {
                    let begin = Instant::now();
                    let done = catch_unwind(AssertUnwindSafe(|| run(case)));
                    let took = begin.elapsed().as_secs_f64();
                    println!("{name}: {:?} {took:.1} s", case.promise);
                    if done.is_err() {
                        eprintln!("FAILED: {case:?}");
                        wrong.lock().unwrap().push(name);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn unreplicated() {
    run_all(UNREPLICATED);
}

#[test]
fn asynchronous() {
    run_all(ASYNC);
}

#[test]
fn sync() {
    run_all(SYNC);
}

#[test]
fn sync_flush() {
    run_all(SYNC_FLUSH);
}

#[test]
fn sync_disk() {
    run_all(SYNC_DISK);
}

#[test]
fn sync_by_hand() {
    run_all(BY_HAND);
}

#[test]
fn sync_disk_by_hand() {
    run_all(DISK_BY_HAND);
}

#[test]
fn sync_sec_and_sync_seceth() {
    run_all(SYNC_SEC);
}

/// No section, table or cell of the document is left out; and all modes have theirs.
#[test]
fn every_table_of_the_document_is_run() {
    let mut named = Vec::new();
    for (heading, cells) in SECTIONS {
        let table = section(heading);
        let modes = modes(table);
        assert_eq!(cases(table).len(), cells * modes.len(), "{heading}");
        named.extend(modes);
    }
    let lines = |text: &str, begin: &str| text.lines().filter(|l| l.starts_with(begin)).count();
    for begin in ["### `", "| at the same time", "| one after the other"] {
        let here: usize = SECTIONS.iter().map(|s| lines(section(s.0), begin)).sum();
        assert_eq!(lines(DOCUMENT, begin), here, "{begin}");
    }
    let all = "unreplicated async sync sync-flush sync-disk sync-sec sync-seceth sync sync-disk";
    assert_eq!(named.join(" "), all);
}

/// The check that every case ends with finds an entry that is missing, one
/// that is torn, and one that nobody wrote.
#[test]
fn the_check_finds_what_is_lost_and_what_is_torn() {
    let mut c = Cluster::new("unreplicated", false);
    let data = c.dir.join("a/v/log");
    c.go_on(Some("a"), 0);
    c.inflict(&[Failure::Program("a")]);
    // What the next program finds, before it adds an entry and detaches.
    let at_rest = |c: &Cluster| {
        let args = ["--entries", "1", "--linger"];
        let (mut p, found) = await_or("attaching", || c.logs(), || c.attach("a", &args));
        if found.is_ok() {
            assert!(p.line().is_some());
            p.finish();
        }
        found
    };
    let some = at_rest(&c).unwrap() + 1;
    assert!(some > c.acknowledged);
    let before = fs::read(&data).unwrap();
    c.acknowledged = some;
    c.go_on(Some("a"), some);
    c.inflict(&[Failure::Program("a")]);
    let all = at_rest(&c).unwrap() + 1;
    assert!(all > c.acknowledged && all > some);
    let whole = fs::read(&data).unwrap();
    // As it was before the last entries.
    fs::write(&data, &before).unwrap();
    let lost = judge(&at_rest(&c), all, all);
    assert!(matches!(lost, Err(Wrong::Lost(_))), "{lost:?}");
    // One bit, in the middle of an entry; the end of the last one.
    let size = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for (at, bits) in [(1000, 4), (64 + size - 1, 0xff)] {
        let mut damaged = whole.clone();
        damaged[at] ^= bits;
        fs::write(&data, &damaged).unwrap();
        let torn = judge(&at_rest(&c), all, all);
        assert!(matches!(torn, Err(Wrong::Torn(_))), "{torn:?}");
    }
    fs::write(&data, &whole).unwrap();
    assert_eq!(at_rest(&c), Ok(all));
    let made = judge(&Ok(all), some, all - 2);
    assert!(matches!(made, Err(Wrong::Made(_))), "{made:?}");
}
