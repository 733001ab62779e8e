//! Views and fences, every interleaving of a small cluster.
//!
//! Owns a model of two data nodes and one register, and what must hold in each state that it can
//! reach. The checker is `stateright`'s. The shipped code decides: the transitions of [`Register`],
//! [`reconcile`], [`History`], [`LaneIn`] and [`AckRule`] are called, not imitated. Their callers
//! (`view_client.rs`, `session.rs`, `mirror.rs` of `mojim-replica`, `watch.rs` of `mojim-node`) are
//! rewritten here step by step. Each step is as small as what other nodes can see.
//!
//! Modelled:
//!
//! - A read and a swap of the register are two steps, its answer is a third. A
//!   swap whose answer was lost was done, or was not, or will be later.
//! - Up to three LSNs, each on a lane of its own, so that they overtake each other. Links break at
//!   either end. Messages that were sent before arrive or not. A `Hello` of a link that is long
//!   over may arrive late.
//! - A superblock keeps promise, view, history, life, lost ring. A process that ends keeps its log.
//!   A machine that loses power keeps what its log's medium has, or, where that is memory, nothing.
//! - Suspicion, giving up the mirror, attaching, going alone and ending happen
//!   at any time that the code allows. There is no clock.
//! - A record counts as acknowledged as soon as the rule lets the caller be told.
//!
//! Two rules are there because of what this model found. Each has a test that shows what for:
//!
//! - A primary that gives up its mirror swaps even where the register says "alone" already
//!   (`alone_by_reading`).
//! - A primary that adopts a copy which goes on where its own ends stays in its life
//!   (`life_ended_by_more`).
//!
//! Left out:
//!
//! - `force` and every operator
//! - `async`
//! - first use of a volume
//! - logs that are full or trimmed (the ring reaches back to LSN 1)
//! - split sync points, spill files, damage
//! - a copy that breaks off in the middle (it changes nothing)
//! - a lost directory, which takes the promise with it
//! - the voters themselves
//! - that anything happens at all

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use mojim_format::{EpochStart, RecordHeader, State as CopyState};
use mojim_protocol::view::{Member, Refusal, Register};
use mojim_protocol::{AckRule, Arrival, History, Holding, LaneIn, Plan, reconcile};
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

/// LSNs that there are.
const LSNS: usize = 3;
/// The volume.
const VOLUME: u64 = 1;
/// In a view: no mirror; or one that must acknowledge but is no member yet.
const NOBODY: u8 = 2;
const JOINING: u8 = 3;
/// In `Start`: nothing is dropped.
const ALL: u8 = u8::MAX;

/// A record. The epoch is in its header; the rest is known to the model only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Rec {
    epoch: u8,
    /// No two appends have the same.
    id: u8,
    /// The register named another primary when it was appended.
    late: bool,
}

type Log = [Option<Rec>; LSNS];

/// A history: the epoch that begins at each LSN, 0 for none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Epochs([u8; LSNS + 1]);

/// A node in a life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Who {
    node: u8,
    life: u8,
}

/// The register, small.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Reg {
    version: u8,
    epoch: u8,
    primary: Option<Who>,
    mirror: Option<Who>,
}

/// The view in a superblock.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct View {
    epoch: u8,
    primary: u8,
    mirror: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Rule {
    Local,
    Mirror,
    Both,
}

/// A swap that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Asked {
    what: What,
    new: Reg,
    /// What the register has done about it.
    done: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum What {
    Attach { resume: u8, keep: u8 },
    AttachAlone,
    Alone,
    Admit,
    Raise(u8),
    TakeOver(u8),
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// Another node is the primary.
    Stale,
    /// Refused, or unknown.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Greeting,
    Receiving,
    Sent,
    Starting { resume: u8 },
    Active,
}

/// The program attached at a node: `Primary`, `Session` and `Claim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Program {
    attach: bool,
    /// The register knows it as alone: it waits for nobody.
    hurry: bool,
    epoch: u8,
    member: bool,
    alone: bool,
    adopting: bool,
    adopted: bool,
    ready: bool,
    stale: bool,
    rule: Rule,
    keep: u8,
    /// Bit per LSN that the mirror acknowledged.
    acked: u8,
    join: Option<u8>,
    phase: Phase,
    link: u8,
    peer: Option<u8>,
    asked: Option<Asked>,
}

/// A node's daemon, which follows: `Mirror` and its links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Daemon {
    /// It has the copy open.
    open: bool,
    /// The link that was greeted last, if it is not over.
    link: u8,
    /// A session is begun on it.
    running: bool,
    asked: Option<Asked>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Role {
    Daemon(Daemon),
    Program(Program),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Node {
    log: Log,
    /// Records from here on are in the ring only.
    kept: u8,
    whole: bool,
    epochs: Epochs,
    promised: u8,
    view: View,
    life: u8,
    /// Its ring was lost, and its life has not changed since (`ring_lost && !renewed`).
    ring_lost: bool,
    role: Role,
    /// It was primary by the register before it knew.
    completed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Msg {
    to: u8,
    link: u8,
    body: Body,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Body {
    Hello {
        epoch: u8,
        view: u8,
    },
    Welcome {
        whole: bool,
        tail: u8,
        epochs: Epochs,
        life: u8,
    },
    /// Superseded, or a stale epoch.
    Refuse {
        promised: u8,
    },
    CopyRequest,
    /// From its first frame to its last.
    Copy {
        lsn: u8,
        log: Log,
        epochs: Epochs,
    },
    Copied {
        lsn: u8,
    },
    Start {
        epoch: u8,
        member: bool,
        keep: u8,
        epochs: Epochs,
    },
    Started {
        life: u8,
    },
    Record {
        lsn: u8,
        rec: Rec,
    },
    Ack {
        lsn: u8,
    },
}

/// How often something may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Left {
    appends: u8,
    breaks: u8,
    suspicions: u8,
    lost_answers: u8,
    ends: u8,
    lost_rings: u8,
    lost_memories: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    reg: Reg,
    /// A swap that nobody waits for any more, but that may be done.
    late_swap: Option<Reg>,
    nodes: [Node; 2],
    net: Vec<Msg>,
    left: Left,
    /// What was, or may have been, acknowledged.
    acked: Log,
    /// The register's primary has acknowledged something.
    spoke: bool,
    /// Two records were acknowledged at one LSN.
    forked: bool,
    /// A primary that was none any more acknowledged something of its own.
    overtaken: bool,
    /// A mirror refused a record of its own session, or had less than it said.
    odd: bool,
    /// A node lost what it held.
    lost: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Deliver(u8),
    Append(u8),
    Persist(u8),
    /// The program is started.
    Attach(u8),
    Greet(u8),
    GoAlone(u8),
    GiveUpMirror(u8),
    Settle(u8),
    /// The daemon holds its primary for dead, or completes what it began.
    TakeOver(u8),
    Swap(u8),
    Answer(u8),
    LoseAnswer(u8),
    /// The register could not be read when the program was started.
    LoseRead(u8),
    SwapLate,
    /// The primary leaves the link.
    BreakLink(u8),
    /// The mirror leaves it.
    BreakSession(u8),
    /// The process ends; its log outlives it.
    End(u8),
    /// Power is lost; the log's medium keeps what it has.
    LoseRing(u8),
    /// Power is lost, and the log was memory.
    LoseMemory(u8),
}

/// What is broken: the rules without it must lose something.
#[derive(Clone, Copy, Default)]
struct Broken {
    /// The mirror goes on taking records of the epoch that it has ended.
    no_fence: bool,
    /// The primary goes on alone and asks nobody.
    alone_without_swap: bool,
    /// A mirror is admitted before it has everything.
    admit_early: bool,
    /// Its name makes a node a member, whatever it lost.
    amnesiac_member: bool,
    /// A node takes over that is no member.
    non_member: bool,
    /// Who lost its ring goes on as if it had it.
    ring_not_missed: bool,
    /// A register that says "alone" is believed, though a swap that would
    /// change that may be under way.
    alone_by_reading: bool,
    /// A primary that adopts a copy which goes on where its own ends begins
    /// another life.
    life_ended_by_more: bool,
}

struct Cluster {
    /// The mode's rule.
    paired: Rule,
    broken: Broken,
    /// A swap whose answer was lost may be done later.
    late_swaps: bool,
    left: Left,
}

const NAMES: [&str; 2] = ["a", "b"];

impl Epochs {
    fn begin(&mut self, epoch: u8, first: u8) {
        let mut h = self.history();
        h.begin(epoch as u64, first as u64, 0);
        *self = Epochs::from(&h);
    }

    fn history(&self) -> History {
        let mut v = Vec::with_capacity(LSNS + 1);
        for (i, &epoch) in self.0.iter().enumerate() {
            if epoch > 0 {
                v.push(EpochStart {
                    epoch: epoch as u64,
                    first_lsn: i as u64 + 1,
                });
            }
        }
        History::from_entries(&v).expect("in order")
    }

    fn last(&self) -> u8 {
        self.0.iter().copied().max().unwrap_or(0)
    }
}

impl From<&History> for Epochs {
    fn from(h: &History) -> Epochs {
        let mut e = [0; LSNS + 1];
        for s in h.entries() {
            e[s.first_lsn as usize - 1] = s.epoch as u8;
        }
        Epochs(e)
    }
}

impl Who {
    fn member(self) -> Member {
        Member {
            node: NAMES[self.node as usize].into(),
            incarnation: self.life as u64,
        }
    }

    fn of(m: &Member) -> Who {
        Who {
            node: NAMES.iter().position(|n| *n == m.node).expect("a node") as u8,
            life: m.incarnation as u8,
        }
    }
}

impl Reg {
    fn register(&self) -> Register {
        Register {
            version: self.version as u64,
            epoch: self.epoch as u64,
            primary: self.primary.map(Who::member),
            mirror: self.mirror.map(Who::member),
            // No copy of the model's goes back in time.
            promised: 0,
        }
    }

    fn of(r: &Register) -> Reg {
        Reg {
            version: r.version as u8,
            epoch: r.epoch as u8,
            primary: r.primary.as_ref().map(Who::of),
            mirror: r.mirror.as_ref().map(Who::of),
        }
    }
}

impl Rule {
    fn ack(self) -> AckRule {
        match self {
            Rule::Local => AckRule::LOCAL,
            Rule::Mirror => AckRule::MIRROR,
            Rule::Both => AckRule::BOTH,
        }
    }
}

impl Daemon {
    /// After a start of the process: open if it follows another node.
    fn started(n: u8, view: View) -> Role {
        Role::Daemon(Daemon {
            open: view.primary != n,
            link: 0,
            running: false,
            asked: None,
        })
    }
}

impl Program {
    fn committed(&self, kept: u8) -> u8 {
        let acked = self.acked.trailing_ones() as u64;
        self.rule.ack().committed(kept as u64, acked) as u8
    }
}

/// The first epoch above `above` that is this node's to begin: even ones are
/// a's, odd ones b's.
fn next_epoch(n: u8, above: u8) -> u8 {
    let e = above + 1;
    e + (e + n) % 2
}

fn low(bits: u8) -> u8 {
    (1 << bits) - 1
}

impl Node {
    fn tail(&self) -> u8 {
        self.log.iter().take_while(|r| r.is_some()).count() as u8
    }

    fn truncate(&mut self, keep: u8) {
        for r in &mut self.log[keep as usize..] {
            *r = None;
        }
    }

    fn program(&mut self) -> &mut Program {
        match &mut self.role {
            Role::Program(p) => p,
            Role::Daemon(_) => panic!("no program is attached"),
        }
    }

    fn daemon(&mut self) -> &mut Daemon {
        match &mut self.role {
            Role::Daemon(d) => d,
            Role::Program(_) => panic!("a program is attached"),
        }
    }

    fn asked(&mut self) -> &mut Option<Asked> {
        match &mut self.role {
            Role::Daemon(d) => &mut d.asked,
            Role::Program(p) => &mut p.asked,
        }
    }

    fn holding(&self, tail: u8) -> Holding {
        Holding {
            volume_id: VOLUME,
            state: if self.whole {
                CopyState::Whole
            } else {
                CopyState::Empty
            },
            tail: tail as u64,
            history: self.epochs.history(),
        }
    }

    /// `Store::begin_epoch`.
    fn begin_epoch(&mut self, epoch: u8, first: u8, view: View) {
        self.epochs.begin(epoch, first);
        self.promised = self.promised.max(epoch);
        self.view = view;
        self.ring_lost = false;
    }

    /// `Store::load_end`.
    fn load(&mut self, n: u8, lsn: u8, log: Log, epochs: Epochs) {
        self.log = log;
        self.truncate(lsn);
        self.kept = lsn;
        self.epochs = epochs;
        self.whole = true;
        self.life += 1;
        self.ring_lost = false;
        if self.view.mirror == n {
            self.view.mirror = NOBODY;
        }
    }
}

/// One step: the state that it leads to, and the rules in force.
struct Step<'a> {
    m: &'a Cluster,
    s: State,
}

impl Step<'_> {
    fn node(&mut self, n: u8) -> &mut Node {
        &mut self.s.nodes[n as usize]
    }

    fn p(&mut self, n: u8) -> &mut Program {
        self.node(n).program()
    }

    fn me(&self, n: u8) -> Who {
        let life = self.s.nodes[n as usize].life;
        Who { node: n, life }
    }

    fn send(&mut self, to: u8, link: u8, body: Body) {
        self.s.net.push(Msg { to, link, body });
    }

    /// `Session::abandon_link`.
    fn abandon(&mut self, n: u8) {
        let p = self.p(n);
        p.join = None;
        if p.alone {
            p.rule = Rule::Local;
        }
        p.link = 0;
        p.phase = Phase::Idle;
    }

    /// The process ends, or its attach fails.
    fn end(&mut self, n: u8) {
        let late = self.m.late_swaps;
        let node = self.node(n);
        let asked = node.asked().take();
        node.role = match node.role {
            Role::Program(_) => Role::Daemon(Daemon {
                open: false,
                link: 0,
                running: false,
                asked: None,
            }),
            Role::Daemon(_) => Daemon::started(n, node.view),
        };
        if let Some(a) = asked
            && a.done.is_none()
            && late
        {
            self.s.late_swap = Some(a.new);
        }
    }

    fn supersede(&mut self, n: u8) {
        self.p(n).stale = true;
        self.abandon(n);
    }

    /// What is asked of the register, by what it was a moment ago.
    fn ask(&mut self, n: u8, what: What, new: Result<Register, Refusal>) {
        match new {
            Ok(new) => {
                *self.node(n).asked() = Some(Asked {
                    what,
                    new: Reg::of(&new),
                    done: None,
                });
            }
            Err(Refusal::NotPrimary) => self.answered(n, what, Outcome::Stale),
            Err(_) => self.answered(n, what, Outcome::Failed),
        }
    }

    /// What follows from the register's answer.
    fn answered(&mut self, n: u8, what: What, out: Outcome) {
        match what {
            What::Attach { resume, keep } => match out {
                Outcome::Done => {
                    let mirror = if self.p(n).member { 1 - n } else { JOINING };
                    self.begin(n, mirror);
                    self.start_session(n, resume, keep);
                }
                Outcome::Stale => self.end(n),
                Outcome::Failed => {
                    // The register as it was read.
                    let above = next_epoch(n, self.s.reg.epoch);
                    let p = self.p(n);
                    p.epoch = p.epoch.max(above);
                    self.abandon(n);
                }
            },
            What::AttachAlone => match out {
                Outcome::Done => {
                    self.begin(n, NOBODY);
                    let p = self.p(n);
                    p.rule = Rule::Local;
                    p.alone = true;
                    p.attach = false;
                    p.hurry = false;
                    p.member = false;
                    p.ready = true;
                }
                Outcome::Stale => self.end(n),
                Outcome::Failed => {
                    let above = next_epoch(n, self.s.reg.epoch);
                    let p = self.p(n);
                    p.epoch = p.epoch.max(above);
                }
            },
            What::Alone => match out {
                Outcome::Done => {
                    let node = self.node(n);
                    node.view.mirror = NOBODY;
                    node.kept = node.tail();
                    let p = self.p(n);
                    p.alone = true;
                    p.rule = Rule::Local;
                }
                Outcome::Stale => self.supersede(n),
                // The link is made anew meanwhile.
                Outcome::Failed => {}
            },
            What::Admit => match out {
                Outcome::Done => {
                    let paired = self.m.paired;
                    let node = self.node(n);
                    let p = node.program();
                    p.rule = paired;
                    p.alone = false;
                    p.member = true;
                    p.join = None;
                    let epoch = p.epoch;
                    node.view = View {
                        epoch,
                        primary: n,
                        mirror: 1 - n,
                    };
                }
                Outcome::Stale => self.supersede(n),
                Outcome::Failed => {}
            },
            What::Raise(epoch) => match out {
                Outcome::Done => {
                    let node = self.node(n);
                    let view = View { epoch, ..node.view };
                    node.begin_epoch(epoch, node.tail() + 1, view);
                    self.p(n).epoch = epoch;
                    self.abandon(n);
                }
                Outcome::Stale => self.supersede(n),
                Outcome::Failed => self.abandon(n),
            },
            What::TakeOver(epoch) => {
                if out == Outcome::Done {
                    self.become_primary(n, epoch);
                }
            }
        }
    }

    /// `Primary::begin`.
    fn begin(&mut self, n: u8, mirror: u8) {
        let node = self.node(n);
        let tail = node.tail();
        node.truncate(tail);
        let epoch = node.program().epoch;
        let view = View {
            epoch,
            primary: n,
            mirror,
        };
        node.begin_epoch(epoch, tail + 1, view);
        node.kept = tail;
        let p = node.program();
        p.acked = 0;
        p.keep = tail;
    }

    /// The end of `Session::start`.
    fn start_session(&mut self, n: u8, resume: u8, keep: u8) {
        let epochs = self.node(n).epochs;
        let p = self.p(n);
        p.acked = low(resume);
        p.phase = Phase::Starting { resume };
        let (link, epoch, member) = (p.link, p.epoch, p.member);
        let body = Body::Start {
            epoch,
            member,
            keep,
            epochs,
        };
        self.send(1 - n, link, body);
    }

    /// `Session::start`.
    fn start(&mut self, n: u8, resume: u8, keep: u8) {
        let me = self.me(n).member();
        let p = *self.p(n);
        if !p.attach {
            self.start_session(n, resume, keep);
            return;
        }
        let peer = p.peer.map(|life| Who { node: 1 - n, life });
        let with = peer.filter(|_| p.member).map(Who::member);
        let adopted = p.adopted && self.s.reg.mirror.is_some() && self.s.reg.mirror == peer;
        let new = self
            .s
            .reg
            .register()
            .attach(&me, with.as_ref(), p.epoch as u64, adopted);
        self.ask(n, What::Attach { resume, keep }, new);
    }

    /// `Session::agree`.
    fn agree(&mut self, n: u8, theirs: Holding, life: u8) {
        let paired = self.m.paired.ack();
        let node = self.node(n);
        let tail = node.tail();
        let mine = node.holding(tail);
        let whole = node.whole;
        let p = node.program();
        p.peer = Some(life);
        let mut plan = reconcile(&mine, &theirs, 1, p.attach);
        if plan == Plan::CopyFrom && whole && paired.local {
            plan = Plan::CopyTo;
        }
        p.adopted = matches!(plan, Plan::Resend { .. } | Plan::CopyFrom);
        if plan == Plan::CopyTo && p.attach {
            p.member = false;
        }
        let (attach, member, link) = (p.attach, p.member, p.link);
        match plan {
            Plan::Resend { from } => {
                let from = from as u8;
                if member && !attach && from < p.acked.trailing_ones() as u8 {
                    self.s.odd = true;
                    return;
                }
                let keep = match (attach, member) {
                    (true, _) => tail,
                    (false, true) => ALL,
                    (false, false) => from,
                };
                self.start(n, from, keep);
            }
            Plan::CopyTo => {
                p.phase = Phase::Sent;
                if member && !attach {
                    p.member = false;
                    node.view.mirror = JOINING;
                    self.commit_locally(n);
                }
                let node = self.node(n);
                if attach {
                    node.truncate(tail);
                    node.kept = tail;
                }
                // Nothing else is applied yet, for all that the mirror knows.
                let lsn = if attach { tail } else { node.program().keep };
                let (log, epochs) = (node.log, node.epochs);
                self.send(1 - n, link, Body::Copy { lsn, log, epochs });
            }
            Plan::CopyFrom => {
                p.adopting = true;
                p.phase = Phase::Receiving;
                self.send(1 - n, link, Body::CopyRequest);
            }
            Plan::Foreign | Plan::Nothing => self.end(n),
        }
    }

    /// `Mirror::become_primary`, and the copy is closed.
    fn become_primary(&mut self, n: u8, epoch: u8) {
        let fenced = !self.m.broken.no_fence;
        let node = self.node(n);
        let tail = node.tail();
        node.truncate(tail);
        node.kept = LSNS as u8;
        let view = View {
            epoch,
            primary: n,
            mirror: NOBODY,
        };
        node.begin_epoch(epoch, tail + 1, view);
        let d = node.daemon();
        d.open = false;
        if fenced {
            d.link = 0;
            d.running = false;
        }
    }

    /// `Mirror::take_over`.
    fn take_over(&mut self, n: u8) -> bool {
        let broken = self.m.broken;
        let me = self.me(n).member();
        let mut reg = self.s.reg.register();
        let node = self.node(n);
        if !node.whole {
            return false;
        }
        let named = reg.mirror.as_ref().is_some_and(|m| m.node == me.node);
        if broken.amnesiac_member && named || broken.non_member && !reg.is_primary(&me) {
            reg.mirror = Some(me.clone());
        }
        let mine = reg.is_primary(&me);
        let epoch = if mine && (node.view.epoch as u64) < reg.epoch {
            reg.epoch as u8
        } else if reg.is_mirror(&me) {
            next_epoch(n, node.promised.max(reg.epoch as u8))
        } else {
            return false;
        };
        if !broken.no_fence {
            let d = node.daemon();
            d.link = 0;
            d.running = false;
            node.promised = node.promised.max(epoch);
        }
        if mine {
            node.completed = true;
            self.become_primary(n, epoch);
        } else {
            self.ask(n, What::TakeOver(epoch), reg.take_over(&me, epoch as u64));
        }
        true
    }

    /// A link that was not there before.
    fn new_link(&self) -> u8 {
        let used = |l| {
            self.s.net.iter().any(|m| m.link == l)
                || self.s.nodes.iter().any(|n| match n.role {
                    Role::Daemon(d) => d.link == l,
                    Role::Program(p) => p.link == l,
                })
        };
        (1..).find(|l| !used(*l)).expect("there are many")
    }

    /// `Session::greet`.
    fn greet(&mut self, n: u8) {
        let reg = self.s.reg;
        let link = self.new_link();
        let node = self.node(n);
        let mut view = node.view.epoch;
        let unused = next_epoch(n, node.view.epoch.max(node.epochs.last()));
        let p = node.program();
        if p.attach {
            if reg.primary.is_some_and(|w| w.node != n) {
                self.end(n);
                return;
            }
            view = view.max(reg.epoch);
            p.epoch = p.epoch.max(unused);
        }
        p.link = link;
        p.phase = Phase::Greeting;
        let epoch = p.epoch;
        self.send(1 - n, link, Body::Hello { epoch, view });
    }

    /// `Session::check_membership`, as far as the mirror's membership goes. False if
    /// there is nothing to do.
    fn check_membership(&mut self, n: u8) -> bool {
        let early = self.m.broken.admit_early;
        let me = self.me(n).member();
        let node = self.node(n);
        let last = node.tail();
        let p = node.program();
        let before = (p.rule, p.join);
        p.rule = Rule::Both;
        let all = *p.join.get_or_insert(last);
        if (p.acked.trailing_ones() as u8) < all && !early {
            return before != (p.rule, p.join);
        }
        let life = p.peer.expect("it was welcomed");
        let peer = Who { node: 1 - n, life }.member();
        let reg = self.s.reg.register();
        if reg.is_primary(&me) && reg.is_mirror(&peer) {
            self.answered(n, What::Admit, Outcome::Done);
            return true;
        }
        let new = reg.admit(&me, &peer, 0);
        if new.is_ok() {
            // From the moment that it is asked for it may be so.
            self.p(n).alone = false;
        }
        self.ask(n, What::Admit, new);
        true
    }

    /// `Session::give_up_mirror`.
    fn give_up_mirror(&mut self, n: u8) {
        let me = self.me(n).member();
        self.p(n).member = false;
        self.commit_locally(n);
        let reg = self.s.reg.register();
        let there = reg.is_primary(&me) && reg.mirror.is_none();
        let broken = self.m.broken;
        if broken.alone_without_swap || broken.alone_by_reading && there {
            self.answered(n, What::Alone, Outcome::Done);
        } else {
            self.ask(n, What::Alone, reg.alone(&me));
        }
    }

    /// `Session::commit_locally`.
    fn commit_locally(&mut self, n: u8) {
        let node = self.node(n);
        node.kept = node.tail();
        let p = node.program();
        if p.rule != Rule::Local {
            p.rule = Rule::Both;
        }
    }

    /// `Session::outbid`.
    fn outbid(&mut self, n: u8, promised: u8) {
        let me = self.me(n).member();
        let epoch = next_epoch(n, promised.max(self.p(n).epoch));
        let reg = self.s.reg.register();
        if reg.is_primary(&me) && reg.epoch == epoch as u64 {
            self.answered(n, What::Raise(epoch), Outcome::Done);
        } else {
            self.ask(n, What::Raise(epoch), reg.raise(&me, epoch as u64));
        }
    }

    /// What a mirror, or its daemon, makes of a message. False if it has to wait.
    fn at_mirror(&mut self, n: u8, msg: Msg) -> bool {
        let from = 1 - n;
        let unfenced = self.m.broken.no_fence;
        let node = self.node(n);
        let newer = |view| node.view.primary == n && node.view.epoch > view;
        let Role::Daemon(d) = node.role else {
            // Busy, if it does not know better.
            if let Body::Hello { epoch, view } = msg.body
                && newer(view)
            {
                self.send(from, msg.link, Body::Refuse { promised: epoch });
            }
            return true;
        };
        // The lock is held while the register is asked, but not by lanes.
        let is_record = matches!(msg.body, Body::Record { .. });
        if d.asked.is_some() && !is_record {
            return false;
        }
        if let Body::Hello { epoch, view } = msg.body {
            if newer(view) {
                self.send(from, msg.link, Body::Refuse { promised: epoch });
                return true;
            }
            node.daemon().open = true;
            node.kept = LSNS as u8;
            let promised = node.promised;
            let v = node.view;
            if v.epoch > 0 && v.epoch >= view && v.primary != from || epoch < promised {
                self.send(from, msg.link, Body::Refuse { promised });
                return true;
            }
            node.promised = epoch;
            let d = node.daemon();
            d.link = msg.link;
            d.running = false;
            let (whole, epochs, life) = (node.whole, node.epochs, node.life);
            let tail = if whole { node.tail() } else { 0 };
            let body = Body::Welcome {
                whole,
                tail,
                epochs,
                life,
            };
            self.send(from, msg.link, body);
            return true;
        }
        if d.link != msg.link {
            return true;
        }
        match msg.body {
            Body::CopyRequest => {
                let lsn = node.tail();
                node.truncate(lsn);
                let (log, epochs) = (node.log, node.epochs);
                self.send(from, msg.link, Body::Copy { lsn, log, epochs });
            }
            Body::Copy { lsn, log, epochs } => {
                node.load(n, lsn, log, epochs);
                node.kept = LSNS as u8;
                self.send(from, msg.link, Body::Copied { lsn });
            }
            Body::Start {
                epoch,
                member,
                keep,
                epochs,
            } => {
                if epoch != node.promised {
                    node.daemon().link = 0;
                    return true;
                }
                if keep != ALL {
                    node.truncate(node.tail().min(keep));
                }
                node.epochs = epochs;
                node.view = View {
                    epoch,
                    primary: from,
                    mirror: if member { n } else { NOBODY },
                };
                node.daemon().running = true;
                let life = node.life;
                self.send(from, msg.link, Body::Started { life });
            }
            Body::Record { lsn, rec } => {
                if !d.running {
                    return true;
                }
                let slot = &mut node.log[lsn as usize - 1];
                let last = if slot.is_some() { lsn as u64 } else { 0 };
                let header = RecordHeader {
                    volume: VOLUME,
                    lsn: lsn as u64,
                    epoch: rec.epoch as u64,
                    len: 56,
                    ops: 0,
                    part: 0,
                    end: true,
                    committed: 0,
                };
                let mut lane = LaneIn::new(VOLUME, last, 0);
                match lane.arrive(&header, &node.epochs.history()) {
                    Arrival::Accept => *slot = Some(rec),
                    Arrival::Duplicate => {}
                    // Without its fence a mirror has two histories.
                    Arrival::Refuse(_) if unfenced => *slot = Some(rec),
                    Arrival::Refuse(_) => {
                        self.s.odd = true;
                        return true;
                    }
                }
                self.send(from, msg.link, Body::Ack { lsn });
            }
            _ => unreachable!("not for a mirror"),
        }
        true
    }

    /// What a primary makes of a message. False if it has to wait.
    fn at_primary(&mut self, n: u8, msg: Msg) -> bool {
        let p = *self.p(n);
        if let Body::Ack { lsn } = msg.body {
            // Any thread takes it.
            self.p(n).acked |= 1 << (lsn - 1);
            return true;
        }
        // One thread has the session, and waits for the register.
        if p.asked.is_some() || p.hurry {
            return false;
        }
        match msg.body {
            Body::Welcome {
                whole,
                tail,
                epochs,
                life,
            } => {
                let theirs = Holding {
                    volume_id: VOLUME,
                    state: if whole {
                        CopyState::Whole
                    } else {
                        CopyState::Empty
                    },
                    tail: tail as u64,
                    history: epochs.history(),
                };
                self.agree(n, theirs, life);
            }
            Body::Refuse { promised } => {
                if p.attach {
                    self.p(n).epoch = p.epoch.max(next_epoch(n, promised));
                    self.abandon(n);
                } else {
                    self.outbid(n, promised);
                }
            }
            Body::Copy { lsn, log, epochs } => {
                let ends = self.m.broken.life_ended_by_more;
                let node = self.node(n);
                let (was, life) = (node.whole, node.life);
                node.load(n, lsn, log, epochs);
                if was && !ends {
                    // It holds what it held.
                    node.life = life;
                }
                self.start(n, lsn, lsn);
            }
            Body::Copied { lsn } => self.start(n, lsn, if p.attach { lsn } else { ALL }),
            Body::Started { life } => {
                let Phase::Starting { resume } = p.phase else {
                    unreachable!("nothing was started");
                };
                if p.member && p.peer != Some(life) {
                    self.abandon(n);
                    return true;
                }
                let log = self.node(n).log;
                let p = self.p(n);
                p.peer = Some(life);
                p.phase = Phase::Active;
                p.attach = false;
                let link = p.link;
                for (i, rec) in log.iter().enumerate().skip(resume as usize) {
                    if let Some(rec) = *rec {
                        let lsn = i as u8 + 1;
                        self.send(1 - n, link, Body::Record { lsn, rec });
                    }
                }
            }
            _ => unreachable!("not for a primary"),
        }
        true
    }

    /// `Primary::append`, and it is sent.
    fn append(&mut self, n: u8) {
        let late = self.s.reg.primary.is_none_or(|w| w.node != n);
        self.s.left.appends -= 1;
        let id = self.s.left.appends;
        let node = self.node(n);
        let lsn = node.tail() + 1;
        let p = node.program();
        let epoch = p.epoch;
        let rec = Rec { epoch, id, late };
        let (active, link) = (p.phase == Phase::Active, p.link);
        node.log[lsn as usize - 1] = Some(rec);
        if active {
            self.send(1 - n, link, Body::Record { lsn, rec });
        }
    }

    /// What everybody sees at the end of a step: what may be acknowledged, and
    /// what can still arrive.
    fn finish(mut self) -> State {
        for n in 0..2u8 {
            let node = self.s.nodes[n as usize];
            let Role::Program(mut p) = node.role else {
                continue;
            };
            let committed = p.committed(node.kept.min(node.tail()));
            let settled = p.phase == Phase::Active && (p.member || p.join.is_some());
            if !p.attach && (p.alone || settled) && committed >= p.keep {
                p.ready = true;
            }
            self.node(n).role = Role::Program(p);
            if p.ready {
                for (i, rec) in node.log.iter().take(committed as usize).enumerate() {
                    self.acknowledge(n, i, rec.expect("committed"));
                }
            }
        }
        let s = &mut self.s;
        if s.late_swap.is_some_and(|r| r.version != s.reg.version + 1) {
            s.late_swap = None;
        }
        let (nodes, mut stale) = (s.nodes, 0);
        s.net.sort();
        s.net.retain(|m| match nodes[m.to as usize].role {
            _ if matches!(m.body, Body::Hello { .. }) => {
                let from = nodes[1 - m.to as usize].role;
                if !matches!(from, Role::Program(p) if p.link == m.link) {
                    stale += 1;
                }
                stale <= 1
            }
            Role::Daemon(d) => d.link == m.link,
            Role::Program(p) => p.link == m.link,
        });
        self.s
    }

    fn acknowledge(&mut self, n: u8, i: usize, rec: Rec) {
        let s = &mut self.s;
        let ours = s.reg.primary.is_some_and(|w| w.node == n);
        if s.acked[i] != Some(rec) {
            s.forked |= s.acked[i].is_some();
            s.overtaken |= !ours && (rec.late || s.spoke);
            s.acked[i] = Some(rec);
        }
        s.spoke |= ours;
    }

    /// The register as it is from now on.
    fn swap(&mut self, new: Reg) {
        let node = |w: Option<Who>| w.map(|w| w.node);
        if node(new.primary) != node(self.s.reg.primary) {
            self.s.spoke = false;
        }
        self.s.reg = new;
    }
}

impl Model for Cluster {
    type State = State;
    type Action = Action;

    /// Paired, records flow, none was made yet.
    fn init_states(&self) -> Vec<State> {
        let who = |node| Some(Who { node, life: 1 });
        let program = Program {
            attach: false,
            hurry: false,
            epoch: 2,
            member: true,
            alone: false,
            adopting: false,
            adopted: true,
            ready: true,
            stale: false,
            rule: self.paired,
            keep: 0,
            acked: 0,
            join: None,
            phase: Phase::Active,
            link: 1,
            peer: Some(1),
            asked: None,
        };
        let a = Node {
            log: [None; LSNS],
            kept: 0,
            whole: true,
            epochs: Epochs([2, 0, 0, 0]),
            promised: 2,
            view: View {
                epoch: 2,
                primary: 0,
                mirror: 1,
            },
            life: 1,
            ring_lost: false,
            role: Role::Program(program),
            completed: false,
        };
        let b = Node {
            kept: LSNS as u8,
            role: Role::Daemon(Daemon {
                open: true,
                link: 1,
                running: true,
                asked: None,
            }),
            ..a
        };
        vec![State {
            reg: Reg {
                version: 1,
                epoch: 2,
                primary: who(0),
                mirror: who(1),
            },
            late_swap: None,
            nodes: [a, b],
            net: Vec::new(),
            left: self.left,
            acked: [None; LSNS],
            spoke: false,
            forked: false,
            overtaken: false,
            odd: false,
            lost: false,
        }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Action>) {
        out.extend((0..s.net.len() as u8).map(Action::Deliver));
        let left = s.left;
        if s.late_swap.is_some() {
            out.push(Action::SwapLate);
        }
        for n in 0..2u8 {
            let node = &s.nodes[n as usize];
            match &node.role {
                Role::Daemon(d) => {
                    match d.asked {
                        Some(a) => swaps(n, &a, left, out),
                        None if d.open => {
                            let mine = s.reg.primary.is_some_and(|w| w.node == n);
                            if mine || left.suspicions > 0 {
                                out.push(Action::TakeOver(n));
                            }
                        }
                        None => out.push(Action::Attach(n)),
                    }
                    if node.kept < LSNS as u8 {
                        out.push(Action::Persist(n));
                    }
                    if d.link != 0 && left.breaks > 0 {
                        out.push(Action::BreakSession(n));
                    }
                    let busy = d.link != 0 || d.asked.is_some();
                    if left.ends > 0 && busy {
                        out.push(Action::End(n));
                    }
                }
                Role::Program(p) => {
                    let tail = node.tail();
                    if p.ready && !p.stale && left.appends > 0 && (tail as usize) < LSNS {
                        out.push(Action::Append(n));
                    }
                    if node.kept < tail && !p.attach {
                        out.push(Action::Persist(n));
                    }
                    match p.asked {
                        Some(a) => swaps(n, &a, left, out),
                        None if !p.stale => {
                            if p.hurry && left.lost_answers > 0 {
                                out.push(Action::LoseRead(n));
                            }
                            if p.phase == Phase::Idle {
                                out.push(Action::Greet(n));
                            } else {
                                let other = s.nodes[1 - n as usize].role;
                                let alive = matches!(other, Role::Daemon(d) if d.link == p.link)
                                    || s.net.iter().any(|m| m.link == p.link);
                                if !alive || left.breaks > 0 {
                                    out.push(Action::BreakLink(n));
                                }
                            }
                            if p.phase != Phase::Active && p.attach && node.whole && !p.adopting {
                                out.push(Action::GoAlone(n));
                            }
                            if p.phase != Phase::Active && !p.attach && !p.alone {
                                out.push(Action::GiveUpMirror(n));
                            }
                            if p.phase == Phase::Active && !p.member {
                                out.push(Action::Settle(n));
                            }
                        }
                        None => {}
                    }
                    if left.ends > 0 || p.stale {
                        out.push(Action::End(n));
                    }
                }
            }
            if left.lost_rings > 0 {
                out.push(Action::LoseRing(n));
            }
            if left.lost_memories > 0 {
                out.push(Action::LoseMemory(n));
            }
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut t = Step {
            m: self,
            s: s.clone(),
        };
        match action {
            Action::Deliver(i) => {
                let msg = t.s.net.remove(i as usize);
                let heard = match t.s.nodes[msg.to as usize].role {
                    Role::Program(p) if p.link == msg.link => t.at_primary(msg.to, msg),
                    _ => t.at_mirror(msg.to, msg),
                };
                if !heard {
                    return None;
                }
            }
            Action::Append(n) => t.append(n),
            Action::Persist(n) => {
                let node = t.node(n);
                node.kept = match node.role {
                    Role::Program(_) => node.tail(),
                    Role::Daemon(_) => LSNS as u8,
                };
            }
            Action::Attach(n) => {
                let (rule, missed) = (self.paired, !self.broken.ring_not_missed);
                let node = t.node(n);
                if node.ring_lost && !rule.ack().local && missed {
                    node.life += 1;
                    node.ring_lost = false;
                    t.s.lost = true;
                }
                let node = t.node(n);
                node.kept = LSNS as u8;
                node.completed = false;
                let me = Who {
                    node: n,
                    life: node.life,
                };
                let alone = s.reg.primary == Some(me) && s.reg.mirror.is_none();
                node.role = Role::Program(Program {
                    attach: true,
                    hurry: alone && node.whole,
                    epoch: next_epoch(n, node.promised.max(node.view.epoch)),
                    member: node.view.mirror == 1 - n,
                    alone: false,
                    adopting: false,
                    adopted: false,
                    ready: false,
                    stale: false,
                    rule,
                    keep: 0,
                    acked: 0,
                    join: None,
                    phase: Phase::Idle,
                    link: 0,
                    peer: None,
                    asked: None,
                });
            }
            Action::Greet(n) => t.greet(n),
            Action::GoAlone(n) => {
                let me = t.me(n).member();
                let reg = s.reg.register();
                if !reg.is_primary(&me) {
                    if !t.p(n).hurry {
                        return None;
                    }
                    t.p(n).hurry = false;
                    return Some(t.finish());
                }
                t.abandon(n);
                let node = t.node(n);
                let unused = next_epoch(n, node.view.epoch.max(node.epochs.last()));
                let p = node.program();
                p.epoch = p.epoch.max(unused).max(next_epoch(n, s.reg.epoch));
                let peer = p.peer.map(|life| Who { node: 1 - n, life });
                let adopted = p.adopted && s.reg.mirror.is_some() && s.reg.mirror == peer;
                let new = reg.attach(&me, None, p.epoch as u64, adopted);
                t.ask(n, What::AttachAlone, new);
            }
            Action::GiveUpMirror(n) => t.give_up_mirror(n),
            Action::Settle(n) => {
                if !t.check_membership(n) {
                    return None;
                }
            }
            Action::TakeOver(n) => {
                if s.reg.primary.is_none_or(|w| w.node != n) {
                    t.s.left.suspicions -= 1;
                }
                if !t.take_over(n) {
                    return None;
                }
            }
            Action::Swap(n) => {
                let asked = t.node(n).asked().as_mut()?;
                let new = asked.new;
                let done = new.version == s.reg.version + 1;
                asked.done = Some(done);
                if done {
                    t.swap(new);
                }
            }
            Action::Answer(n) => {
                let asked = t.node(n).asked().take()?;
                let out = match asked.done? {
                    true => Outcome::Done,
                    false => Outcome::Failed,
                };
                t.answered(n, asked.what, out);
            }
            Action::LoseAnswer(n) => {
                let asked = t.node(n).asked().take()?;
                t.s.left.lost_answers -= 1;
                if asked.done.is_none() && self.late_swaps {
                    t.s.late_swap = Some(asked.new);
                }
                t.answered(n, asked.what, Outcome::Failed);
            }
            Action::LoseRead(n) => {
                t.s.left.lost_answers -= 1;
                t.p(n).hurry = false;
            }
            Action::SwapLate => {
                let new = t.s.late_swap.take()?;
                t.swap(new);
            }
            Action::BreakLink(n) => {
                let link = t.p(n).link;
                let other = s.nodes[1 - n as usize].role;
                let alive = matches!(other, Role::Daemon(d) if d.link == link)
                    || s.net.iter().any(|m| m.link == link);
                if alive {
                    t.s.left.breaks -= 1;
                }
                t.abandon(n);
            }
            Action::BreakSession(n) => {
                t.s.left.breaks -= 1;
                let d = t.node(n).daemon();
                d.link = 0;
                d.running = false;
            }
            Action::End(n) => {
                if !matches!(s.nodes[n as usize].role, Role::Program(p) if p.stale) {
                    t.s.left.ends -= 1;
                }
                t.end(n);
            }
            Action::LoseRing(n) => {
                t.s.left.lost_rings -= 1;
                t.end(n);
                let node = t.node(n);
                node.truncate(node.kept);
                node.role = Daemon::started(n, node.view);
                if node.view.primary == n && node.view.mirror == 1 - n {
                    node.ring_lost = true;
                }
            }
            Action::LoseMemory(n) => {
                t.s.left.lost_memories -= 1;
                t.s.lost = true;
                t.end(n);
                let node = t.node(n);
                node.truncate(0);
                node.kept = LSNS as u8;
                node.whole = false;
                node.epochs = Epochs([0; LSNS + 1]);
                node.life += 1;
                if node.view.mirror == n {
                    node.view.mirror = NOBODY;
                }
                node.role = Daemon::started(n, node.view);
            }
        }
        Some(t.finish())
    }

    fn properties(&self) -> Vec<Property<Cluster>> {
        vec![
            Property::always(HELD, |m: &Cluster, s: &State| m.members_hold_all(s)),
            Property::always(ONE_HISTORY, |_, s: &State| !s.forked),
            Property::always(ONE_PRIMARY, |_, s: &State| !s.overtaken),
            Property::always(IN_STEP, |_, s: &State| !s.odd),
            Property::always(ALIVE, |_, s: &State| {
                let alive = |w: &Who| s.nodes[w.node as usize].life == w.life;
                s.lost || [s.reg.primary, s.reg.mirror].iter().flatten().any(alive)
            }),
            Property::sometimes("a primary acknowledges alone", |_, s: &State| {
                s.nodes.iter().enumerate().any(|(n, node)| {
                    let other = &s.nodes[1 - n];
                    let lacks = |i: usize| s.acked[i].is_some() && other.log[i] != s.acked[i];
                    matches!(node.role, Role::Program(p) if p.alone && p.ready)
                        && (0..LSNS).any(lacks)
                })
            }),
            Property::sometimes("a mirror is admitted again", |_, s: &State| {
                // Within the first epoch a view gets a mirror in no other way.
                s.reg.epoch == 2 && s.reg.version > 2 && s.reg.mirror.is_some()
            }),
            Property::sometimes("a mirror in a new life is admitted", |_, s: &State| {
                let Some(w) = s.reg.mirror else { return false };
                let node = &s.nodes[w.node as usize];
                let holds = s.acked[0].is_some() && node.log[0] == s.acked[0];
                w.life > 1 && w.life == node.life && holds
            }),
            Property::sometimes("an amnesiac mirror is refused", |_, s: &State| {
                let Some(w) = s.reg.mirror else { return false };
                let node = &s.nodes[w.node as usize];
                let me = Who {
                    life: node.life,
                    ..w
                };
                node.whole
                    && me != w
                    && s.reg
                        .register()
                        .take_over(&me.member(), s.reg.epoch as u64 + 1)
                        == Err(Refusal::NotMember)
            }),
            Property::sometimes(
                "a primary that lost its ring adopts what its mirror has",
                |_, s: &State| {
                    s.reg.primary.is_some_and(|w| w.life > 1 && w.node == 0)
                        && s.reg.mirror.is_some_and(|w| w.life == 1)
                        && s.acked[0].is_some()
                },
            ),
            Property::sometimes(
                "a take-over whose answer was lost is completed",
                |_, s: &State| s.nodes.iter().any(|n| n.completed),
            ),
            Property::sometimes("a primary learns that it is none", |_, s: &State| {
                s.nodes
                    .iter()
                    .any(|n| matches!(n.role, Role::Program(p) if p.stale))
            }),
            Property::sometimes("a primary suspected in vain goes on", |_, s: &State| {
                // The program that attached first has a greater epoch.
                let Role::Program(p) = s.nodes[0].role else {
                    return false;
                };
                p.epoch > 2 && s.reg.version == 2 && p.epoch == s.reg.epoch && p.member
            }),
            Property::sometimes(
                "an old primary comes back as mirror, without its fork",
                |_, s: &State| {
                    let Role::Daemon(d) = s.nodes[0].role else {
                        return false;
                    };
                    d.running && s.reg.mirror.is_some_and(|w| w.node == 0 && w.life > 1)
                },
            ),
            Property::sometimes("both nodes have been primary", |_, s: &State| {
                let born = |n: u8| move |r: &Option<Rec>| r.is_some_and(|r| r.epoch % 2 == n);
                s.acked.iter().any(born(0)) && s.acked.iter().any(born(1))
            }),
        ]
    }

    fn within_boundary(&self, s: &State) -> bool {
        assert!(s.reg.epoch < 60, "epochs grow without end");
        true
    }
}

const HELD: &str = "every member holds every acknowledged record";
const ONE_HISTORY: &str = "acknowledged records form one history";
const ONE_PRIMARY: &str = "an old primary acknowledges nothing any more";
const ALIVE: &str = "a view keeps a living member unless one lost its copy";
const IN_STEP: &str = "both ends of a session agree";

/// What can become of a swap that was asked for.
fn swaps(n: u8, a: &Asked, left: Left, out: &mut Vec<Action>) {
    out.push(match a.done {
        None => Action::Swap(n),
        Some(_) => Action::Answer(n),
    });
    if left.lost_answers > 0 {
        out.push(Action::LoseAnswer(n));
    }
}

impl Cluster {
    /// A member that began another life is none: what it lost is excused.
    fn members_hold_all(&self, s: &State) -> bool {
        let members = [s.reg.primary, s.reg.mirror];
        members.iter().flatten().all(|w| {
            let node = &s.nodes[w.node as usize];
            // It sees that when a program attaches.
            let lost = node.ring_lost && !self.paired.ack().local;
            node.life != w.life
                || lost
                || s.acked
                    .iter()
                    .zip(&node.log)
                    .all(|(acked, held)| acked.is_none() || acked == held)
        })
    }
}

impl fmt::Debug for Rec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let late = if self.late { "!" } else { "" };
        write!(f, "{}.{}{late}", self.epoch, self.id)
    }
}

impl fmt::Debug for Epochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl fmt::Debug for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", NAMES[self.node as usize], self.life)
    }
}

impl fmt::Debug for Reg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "v{} e{} {:?} {:?}",
            self.version, self.epoch, self.primary, self.mirror
        )
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |n: u8| ["a", "b", "-", "~"][n as usize];
        write!(
            f,
            "e{} {}{}",
            self.epoch,
            name(self.primary),
            name(self.mirror)
        )
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "life {} log {:?} kept {} whole {} epochs {:?} promised {} view {:?} ring_lost {} {:?}",
            self.life,
            self.log,
            self.kept,
            self.whole,
            self.epochs,
            self.promised,
            self.view,
            self.ring_lost,
            self.role
        )
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "register {:?} late {:?}", self.reg, self.late_swap)?;
        writeln!(f, "  a {:?}\n  b {:?}", self.nodes[0], self.nodes[1])?;
        writeln!(f, "  net {:?}", self.net)?;
        write!(f, "  acked {:?} {:?}", self.acked, self.left)
    }
}

/// The rules in `sync`, and what happens unless a test says otherwise.
fn cluster(change: impl FnOnce(&mut Cluster)) -> Cluster {
    let mut m = Cluster {
        paired: Rule::Mirror,
        broken: Broken::default(),
        late_swaps: true,
        left: Left {
            appends: 2,
            breaks: 1,
            suspicions: 1,
            lost_answers: 0,
            ends: 0,
            lost_rings: 0,
            lost_memories: 0,
        },
    };
    change(&mut m);
    m
}

/// What happens at some time, and whether it was seen.
#[derive(Default)]
struct Seen(BTreeMap<&'static str, bool>);

impl Seen {
    /// Visits every state.
    fn all_hold(&mut self, what: &str, change: impl FnOnce(&mut Cluster)) {
        let start = Instant::now();
        let checker = cluster(change)
            .checker()
            .threads(2)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        println!(
            "states: {} unique of {}, depth {}, {:.1} s: {what}",
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            start.elapsed().as_secs_f64()
        );
        for p in checker.model().properties() {
            if p.expectation == Expectation::Sometimes {
                *self.0.entry(p.name).or_default() |= checker.discovery(p.name).is_some();
            } else {
                checker.assert_no_discovery(p.name);
            }
        }
    }

    fn everything(&self) {
        for (what, seen) in &self.0 {
            assert!(seen, "in no run: {what}");
        }
    }
}

#[test]
fn every_member_holds_what_was_acknowledged() {
    let mut seen = Seen::default();
    seen.all_hold("answers are lost", |m| m.left.lost_answers = 1);
    seen.all_hold("a machine's memory is lost", |m| m.left.lost_memories = 1);
    seen.all_hold("a machine's ring is lost", |m| {
        m.left.appends = 1;
        m.left.lost_rings = 1;
    });
    seen.all_hold("a process ends", |m| {
        m.left.appends = 1;
        m.left.ends = 1;
    });
    seen.all_hold("three lanes", |m| {
        m.left.appends = 3;
        m.left.breaks = 0;
    });
    seen.all_hold("two links break", |m| {
        m.left.appends = 1;
        m.left.breaks = 2;
        m.left.lost_answers = 1;
    });
    seen.all_hold("two suspicions", |m| {
        m.left.appends = 1;
        m.left.suspicions = 2;
    });
    seen.all_hold("sync-flush", |m| {
        m.paired = Rule::Both;
        m.left.appends = 1;
        m.left.lost_rings = 1;
    });
    seen.everything();
}

/// A quarter of an hour, and 5 GiB.
#[test]
#[ignore = "long: scripts/test-long runs it"]
fn every_member_holds_it_after_more() {
    let mut seen = Seen::default();
    seen.all_hold("two suspicions, answers lost", |m| {
        m.left.suspicions = 2;
        m.left.lost_answers = 1;
    });
    seen.all_hold("a machine's memory and answers are lost", |m| {
        m.left.lost_memories = 1;
        m.left.lost_answers = 1;
    });
    seen.all_hold("a machine's ring and answers are lost", |m| {
        m.left.lost_rings = 1;
        m.left.lost_answers = 1;
    });
    seen.all_hold("the same in sync-flush", |m| {
        m.paired = Rule::Both;
        m.left.lost_rings = 1;
        m.left.lost_answers = 1;
    });
    seen.all_hold("a process ends", |m| m.left.ends = 1);
    seen.everything();
}

/// With this broken, that does not hold.
fn is_found(name: &'static str, change: impl FnOnce(&mut Cluster)) {
    let checker = cluster(change)
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyOf([name].into()))
        .spawn_bfs()
        .join();
    let path = checker.assert_any_discovery(name);
    println!(
        "states: {} unique; not so: {name}: {:?}",
        checker.unique_state_count(),
        path.into_actions()
    );
}

#[test]
fn a_mirror_without_a_fence_is_found() {
    is_found(ONE_PRIMARY, |m| m.broken.no_fence = true);
}

#[test]
fn a_primary_that_goes_on_alone_unasked_is_found() {
    is_found(HELD, |m| m.broken.alone_without_swap = true);
    is_found(ONE_HISTORY, |m| m.broken.alone_without_swap = true);
}

#[test]
fn a_mirror_admitted_too_early_is_found() {
    is_found(HELD, |m| m.broken.admit_early = true);
}

#[test]
fn an_amnesiac_member_is_found() {
    is_found(HELD, |m| {
        m.broken.amnesiac_member = true;
        m.left.lost_memories = 1;
    });
}

#[test]
fn a_take_over_by_a_non_member_is_found() {
    is_found(HELD, |m| m.broken.non_member = true);
}

#[test]
fn a_lost_ring_that_is_not_missed_is_found() {
    is_found(HELD, |m| {
        m.broken.ring_not_missed = true;
        m.left.lost_rings = 1;
    });
}

/// The answer to `admit` is lost, then the link; the register says "alone" and
/// is believed; then `admit` is done after all.
#[test]
fn a_swap_that_is_done_late_is_found() {
    is_found(HELD, |m| {
        m.broken.alone_by_reading = true;
        m.left.breaks = 2;
        m.left.lost_answers = 1;
    });
}

/// A primary alone sends a record to a mirror that is joining, loses its power
/// before its own log has it, and cannot read the register when it is back. It
/// takes the mirror's copy, and the life that the register knows is over.
#[test]
fn a_primary_that_gives_its_life_away_is_found() {
    is_found(ALIVE, |m| {
        m.broken.life_ended_by_more = true;
        m.left.appends = 1;
        m.left.suspicions = 0;
        m.left.lost_answers = 1;
        m.left.lost_rings = 1;
    });
}
