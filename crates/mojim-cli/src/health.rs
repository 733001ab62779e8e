//! Whether a volume is well, by what its nodes say.
//!
//! Owns the rules of `mojim status`: what counts as a finding, its kind, its text and what
//! to do about it. `status` asks the nodes. A node's row is its daemon's answer, with
//! `node` and `reachable`. The row also has `error` if the daemon did not answer or its copy is
//! not usable.
//!
//! Invariants:
//!
//! - About backups only the node that forwards to them is believed: the mirror of the
//!   newest epoch. Reports of other followers about each other are ignored.
//! - Nothing is concluded from one answer that one answer cannot show: a count of primaries
//!   needs every node's answer.

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::unasked::Cause;

/// What the configuration says of a volume, as far as its health goes.
pub struct Expected<'a> {
    /// Whether it has a mirror.
    pub mirrored: bool,
    /// Whether a sync point waits for the mirror (each mode with a mirror, but `async`).
    pub waits: bool,
    /// Bytes that may wait for a backup (`secondary_threshold`).
    pub threshold: u64,
    /// All voters; none if there is no register.
    pub voters: &'a [Voter],
}

/// A node that votes on who is primary.
pub struct Voter {
    /// Its name.
    pub name: String,
    /// Whether its daemon answered without refusing.
    pub answers: bool,
    /// Whether its daemon refused to answer.
    pub refuses: bool,
    /// What is wrong with a voter that holds no copy of the volume.
    pub error: Option<String>,
    /// Why a voter that holds no copy cannot read the register of views.
    pub unread: Option<String>,
    /// Why it does not vote, although its daemon answers.
    pub down: Option<String>,
}

impl Voter {
    /// Whether it answers, and its vote counts.
    pub fn votes(&self) -> bool {
        self.answers && self.down.is_none()
    }
}

impl Expected<'_> {
    /// What to do about a copy that follows and has no room.
    fn room(&self) -> &'static str {
        match self.voters {
            [] => ROOM_BY_HAND,
            _ => ROOM,
        }
    }

    /// How many voters vote, how many there are, and how many have to vote.
    fn votes(&self) -> (usize, usize, usize) {
        let all = self.voters.len();
        let have = self.voters.iter().filter(|v| v.votes()).count();
        (have, all, all / 2 + 1)
    }

    /// Whether too few voters vote: what changes the view, or begins one, does not happen.
    fn lacks_votes(&self) -> bool {
        let (have, all, need) = self.votes();
        all > 0 && have < need
    }

    /// The same in words.
    fn count(&self) -> String {
        let (have, all, _) = self.votes();
        let down = self.voters.iter().filter(|v| v.answers && !v.votes());
        let down: Vec<&str> = down.map(|v| &*v.name).collect();
        match down.is_empty() {
            true => format!("{have} of {all} voters answer"),
            false => format!(
                "{have} of {all} voters vote ({} answers, and does not)",
                down.join(", ")
            ),
        }
    }

    /// What the text about a voter that is not well adds.
    fn vote_of(&self, name: &str) -> String {
        match self.voters.iter().find(|v| v.name == name) {
            None => String::new(),
            Some(Voter {
                answers: true,
                down: Some(why),
                ..
            }) => format!("; it does not vote on views meanwhile: {why}"),
            // That its next vote fails shows when it is asked for one.
            Some(Voter {
                answers: true,
                error: Some(_),
                ..
            }) => "; it has a vote, and cannot give it where it finds no room".to_owned(),
            Some(_) => "; it has a vote".to_owned(),
        }
    }
}

/// One thing that is not well.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    node: String,
    kind: &'static str,
    text: String,
    todo: Cow<'static, str>,
    /// Whether a change of sessions shows it for a moment: a second look decides.
    passes: bool,
}

impl Finding {
    fn new(node: &str, kind: &'static str, text: String, todo: &'static str) -> Finding {
        Finding {
            node: node.to_owned(),
            kind,
            text,
            todo: Cow::Borrowed(todo),
            passes: false,
        }
    }

    /// Whether it may be one of those that last for a moment whenever a program attaches.
    pub fn passes(&self) -> bool {
        self.passes
    }

    /// For programs.
    pub fn to_json(&self, volume: &str) -> Value {
        json!({
            "volume": volume,
            "node": if self.node.is_empty() { Value::Null } else { json!(self.node) },
            "kind": self.kind,
            "text": self.text,
            "do": for_node(&self.todo, &self.node),
            "page": format!("docs/how-to/status/{}.md", self.kind),
        })
    }
}

/// Advice about a node's daemon, with commands for that node.
fn for_node(todo: &str, node: &str) -> String {
    if node.is_empty() {
        return todo.to_owned();
    }
    let replace = format!("`mojim replace --name {node} --with NEW --address IP:PORT`");
    todo.replace("`mojim node`", &format!("`mojim node --name {node}`"))
        .replace("`mojim replace`", &replace)
}

const START: &str = "start `mojim node` there. If it hangs, end it first. If it runs, look at its machine and its network. If the node is lost for good, run `mojim replace`";
const VOTERS: &str = "look again in a few seconds. If it stays so, mend the cause that the messages name: room, or a disk. A running daemon tries again every second. Start a daemon again that has ended";
const VOTER: &str = "mend the cause that the message names: room, or a disk. A running daemon tries again every second. A daemon that you start before that ends with the error: start it again afterwards";
const READS: &str = "look again in a few seconds. If it stays so, mend the cause that the message names: room, a disk, or a node that does not answer";
/// It would make a voter forget what it promised.
const NO_BACKUP: &str = "Never put a backup or a snapshot of a directory of votes back";
/// `findings` puts in its place who does it, and where.
const PROGRAM: &str = "nothing, if this passes: the primary brings the other copies up to date";
const JOINS: &str = "nothing, if this passes: the primary takes back a node that answers. If it stays so, read the messages of the program and of the other nodes' daemons";
const FAILED: &str = "mend the disk, or make room on it. Then end that program and start it again. Until then it fails at each sync point";
const TAKE: &str = "start the program there. It takes the mirror's copy, or says why it does not. Or run `mojim promote` on the mirror, and start the program there";
const PRIMARY: &str = "mend the cause that the message names: room, the disk, or the log. Then start `mojim node` there again, and the program. The program takes the missing data from the mirror, or says why it does not";
const ONLY: &str = "do what the message says, or mend the cause that it names: room, the disk, or the log. Then start `mojim node` there again. No other node has the missing data";
const DISK: &str = "mend the cause that the message names: room, the disk, or the log. Then start `mojim node` there again";
const LOADS: &str = "nothing, if this passes: the whole volume is copied to it";
const AWAY: &str = "look again in a few seconds. If it stays so, read the messages of its daemon and of the mirror's";
const ROOM_TO_COPY: &str = "make room where the message says that there is none. Until a copy is complete, the files that change are there twice. It is tried again every 30 s";
const DECIDE: &str = "decide which copy goes on; the message says how";
const RUN: &str =
    "start them again. The next `mojim run` mounts the volume anew, and this finding goes";
/// Where the message alone says where.
const MAKE_ROOM: &str = "make room where the message says that there is none";
const ROOM: &str =
    "make room where the message says that there is none. It goes on by itself within seconds";
const ROOM_BY_HAND: &str = "make room where the message says that there is none. It goes on by itself when a program is attached. Otherwise start `mojim node` there again";
/// Added to the advice about voters: the other lines do not repeat it.
const BEFORE: &str = ". Do this first. Until then, you cannot follow other advice about programs, promotions and places";
const BEYOND: &str = "end the daemon there. It is broken, of another version, or not the node's own: the node's key is then in other hands (docs/explanation/threats.md)";
const CONFIGURATION: &str = "give all nodes and this command the same file. Then restart the daemon of the node that has another one, or send it SIGUSR1";
const REFUSED: &str = "give the node and this command the same configuration and keys";

fn text<'a>(n: &'a Value, key: &str) -> &'a str {
    n[key].as_str().unwrap_or("")
}

fn epoch(n: &Value) -> u64 {
    n["epoch"].as_u64().unwrap_or(0)
}

/// The newest epoch that a node knows.
fn newest(nodes: &[Value]) -> u64 {
    nodes.iter().map(epoch).max().unwrap_or(0)
}

/// Whether a node answers, and its copy can be used.
fn is_usable(n: &Value) -> bool {
    n["reachable"] == true && n["error"].is_null() && n["state"] == "whole"
}

/// Whether a node's role and copy are of an older view.
pub fn is_stale(n: &Value, nodes: &[Value]) -> bool {
    n["epoch"].is_u64() && epoch(n) < newest(nodes) || replaced_by(n, nodes).is_some()
}

/// The node that is the primary by a later version of the register than the view in which `n` was,
/// and the epoch of that version, if that node does not answer: no copy that does need know the later
/// view. One that answers says itself what it is.
fn replaced_by<'a>(n: &Value, nodes: &'a [Value]) -> Option<(&'a str, u64)> {
    if n["role"] != "primary" || !n["epoch"].is_u64() {
        return None;
    }
    let register = latest(nodes)?;
    let (primary, since) = (register["primary"]["node"].as_str()?, epoch(register));
    let is_away = |m: &Value| m["node"] == primary && m["reachable"] != true;
    (n["node"] != primary && epoch(n) < since && nodes.iter().any(is_away))
        .then_some((primary, since))
}

/// A node's role by all the answers, for people.
pub fn role<'a>(n: &'a Value, nodes: &[Value]) -> &'a str {
    match text(n, "role") {
        "primary" if is_stale(n, nodes) => "was primary",
        "mirror" if is_stale(n, nodes) => "was mirror",
        // The node's own copy does not say which node is the mirror.
        "mirror" if mirror_by_view(nodes).is_some_and(|m| n["node"] != m) => "backup",
        "" => "-",
        role => role,
    }
}

/// The primary of the newest view.
fn leader(nodes: &[Value]) -> Option<&Value> {
    let first = primaries(nodes).into_iter().next();
    first.filter(|p| epoch(p) > 0)
}

/// The mirror that the primary of the newest view names.
fn mirror_by_view(nodes: &[Value]) -> Option<&str> {
    let named = text(&leader(nodes)?["view"], "mirror");
    nodes.iter().any(|n| n["node"] == named).then_some(named)
}

/// The line about the primary of a volume to which no program is attached: the next
/// program is started there.
pub fn unused_line(nodes: &[Value]) -> Option<String> {
    let p = leader(nodes)?;
    let used = nodes.iter().any(|n| n["attached"] == true);
    (!used).then(|| {
        format!(
            "no program is attached; node {} is the primary",
            text(p, "node")
        )
    })
}

/// The line about a node that is neither the primary nor its mirror: which node it
/// follows, and how much it has. None before the first attach.
pub fn backup_line(n: &Value, nodes: &[Value]) -> Option<String> {
    let is_other = |n: &Value| ["backup", "was mirror", "was primary"].contains(&role(n, nodes));
    if !is_other(n) || newest(nodes) == 0 {
        return None;
    }
    if n["reachable"] == true && n["error"].is_string() {
        return Some(format!(
            "{} {}: takes nothing, its copy cannot be used",
            role(n, nodes),
            text(n, "node")
        ));
    }
    if !is_usable(n) {
        return None;
    }
    let in_use = nodes.iter().any(|n| n["attached"] == true);
    let is_up = n["link"]["up"] == true;
    let follows = match n["link"]["from"].as_str() {
        Some(whom) if is_up => format!(" follows node {whom},"),
        None if is_up => " follows,".to_owned(),
        _ if in_use => " follows nobody,".to_owned(),
        _ => String::new(),
    };
    Some(format!(
        "{} {}:{follows} {}",
        role(n, nodes),
        text(n, "node"),
        has(n, nodes)
    ))
}

/// Up to which LSN a node's copy is.
fn has(n: &Value, nodes: &[Value]) -> String {
    // In an older view the same LSN may be another sync point.
    if is_stale(n, nodes) {
        return format!("has LSN {} of an older view", n["last_lsn"]);
    }
    let last = n["last_lsn"].as_u64().unwrap_or(0);
    format!("has LSN {last} of {}", last_known(nodes))
}

/// The greatest LSN in the newest view, committed or not, as far as is known.
fn last_known(nodes: &[Value]) -> u64 {
    let newest = nodes.iter().filter(|n| !is_stale(n, nodes));
    let all = newest.filter_map(|n| n["last_lsn"].as_u64());
    all.max().unwrap_or(0).max(most(nodes))
}

/// Whether a node's copy has all that is committed, as far as is known.
pub fn is_level(n: &Value, nodes: &[Value]) -> bool {
    !is_stale(n, nodes) && n["last_lsn"].as_u64().unwrap_or(0) >= most(nodes)
}

/// What is committed in the newest view, as far as is known.
fn most(nodes: &[Value]) -> u64 {
    let newest = nodes.iter().filter(|n| !is_stale(n, nodes));
    newest.map(committed).max().unwrap_or(0)
}

/// What a node is known to have committed.
fn committed(n: &Value) -> u64 {
    let known = n["committed"].as_u64().or(n["last_lsn"].as_u64());
    known.unwrap_or(0)
}

/// How to go on without a primary that is not reached, where an operator alone decides
/// that: no node reads a register, or the register's mirror is not reached either.
fn without(nodes: &[Value], primary: &str) -> Option<String> {
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    let here = |n: &&Value| n["reachable"] == true && n["error"].is_null();
    if nodes.iter().all(|n| n["register"].is_null()) {
        let knows =
            |n: &&Value| n["role"] == "mirror" && epoch(n) == newest && n["state"] == "whole";
        let mirror = nodes.iter().filter(here).find(knows)?;
        return (mirror["view"]["primary"] == primary).then(|| {
            let mirror = text(mirror, "node");
            format!("To go on without it meanwhile, make sure that its program and daemon have ended. Then run `mojim promote --name {mirror}`, and start the program there")
        });
    }
    let view = latest(nodes)?;
    let mirror = view["mirror"]["node"].as_str()?;
    let away = nodes
        .iter()
        .all(|n| n["node"] != mirror || n["reachable"] != true);
    if view["primary"]["node"] != primary || !away {
        return None;
    }
    let whole = nodes.iter().filter(here).filter(|n| n["state"] == "whole");
    let most = whole.max_by_key(|n| (epoch(n), committed(n)))?;
    Some(format!(
        "The volume's mirror, node {mirror}, does not answer either. If both are lost for good, `mojim promote --force --name {}` goes on with that backup's copy",
        text(most, "node")
    ))
}

/// The newest version of the register that a node has read, if any.
fn latest(nodes: &[Value]) -> Option<&Value> {
    let registers = nodes.iter().map(|n| &n["register"]);
    registers
        .filter(|r| r["version"].is_u64())
        .max_by_key(|r| r["version"].as_u64())
}

/// Everything about a volume that is not as it should be.
pub fn findings(expected: &Expected<'_>, nodes: &[Value]) -> Vec<Finding> {
    let mut findings = collect_findings(expected, nodes);
    for i in findings.iter_mut().filter(|i| i.kind == "unreachable") {
        if Cause::of(&i.text).is_some_and(Cause::is_of_keys) {
            // It may serve: nobody is to go on without it.
            continue;
        }
        if alone_by_register(&i.node, nodes).is_some() {
            i.todo = back_alone(&i.node, nodes).into();
        } else if let Some(how) = without(nodes, &i.node) {
            i.todo = Cow::Owned(format!("{}. {how}", i.todo));
        }
    }
    for i in findings.iter_mut().filter(|i| i.todo == PROGRAM) {
        i.todo = brought(&i.node, nodes);
    }
    findings
}

/// Who brings the copy of `node` up to date, and what to do if nobody does. No node: the
/// copies of all others.
fn brought(node: &str, nodes: &[Value]) -> Cow<'static, str> {
    if let Some(p) = to_promote(nodes) {
        return promote(p).into();
    }
    let Some(p) = leader(nodes) else {
        return without_primary(nodes).map_or(PROGRAM.into(), Cow::Owned);
    };
    let name = text(p, "node");
    // What the primary's daemon failed to heal does not pass by itself.
    if let Some(why) = p["heal_error"].as_str() {
        return format!(
            "the daemon of node {name} has tried to bring the other copies up to date, and could not: {why}. Mend that. The daemon tries again in minutes, and a program that you start there tries at once"
        )
        .into();
    }
    if p["attached"] == true {
        return format!(
            "nothing, if this passes: the program on node {name}, and the mirror, bring the other copies up to date. If it stays so, read the messages of that program and of the nodes' daemons"
        )
        .into();
    }
    let mirror = text(&p["view"], "mirror");
    if node == mirror || nodes.len() == 2 {
        return format!(
            "nothing, if this passes: the daemon of node {name}, the primary, brings the other copy up to date. If it cannot, it says why. A program that you start on node {name} then brings it up to date"
        )
        .into();
    }
    away_unused(nodes).into()
}

/// What to do about a copy that is not the mirror's, and lacks something while no program is
/// attached.
fn away_unused(nodes: &[Value]) -> String {
    format!(
        "look again in a few seconds: the daemon of the primary may mend this. {}",
        starts(nodes)
    )
}

/// What to do about a copy that is to be brought up to date, where the register's primary is not
/// there to do it.
fn without_primary(nodes: &[Value]) -> Option<String> {
    let primary = latest(nodes)?["primary"]["node"].as_str()?;
    let of = |n: &&Value| n["node"] == primary;
    if nodes.iter().find(of)?["reachable"] == true {
        return None;
    }
    let whole = nodes.iter().filter(|n| is_usable(n));
    let or = whole.max_by_key(|n| (epoch(n), committed(n))).map(|n| {
        let name = text(n, "node");
        format!(
            ". If that node is lost for good, `mojim promote --force --name {name}` goes on with the copy of node {name}"
        )
    });
    Some(format!(
        "start `mojim node --name {primary}` on node {primary}, the primary. It brings the other copies up to date{}",
        or.unwrap_or_default()
    ))
}

/// The nodes that say that they are the primary of the newest epoch; one whose copy can be used first.
fn primaries(nodes: &[Value]) -> Vec<&Value> {
    let newest = newest(nodes);
    let leads = |n: &&Value| n["role"] == "primary" && epoch(n) == newest;
    let holds = |n: &&Value| replaced_by(n, nodes).is_none();
    let mut all: Vec<&Value> = nodes.iter().filter(leads).filter(holds).collect();
    all.sort_by_key(|n| !is_usable(n));
    all
}

/// Whether all nodes answer, and not one of them alone is the primary.
fn is_headless(nodes: &[Value]) -> bool {
    let known = |n: &Value| n["epoch"].is_u64() || n["state"] == "new";
    let answer = nodes.iter().all(|n| n["reachable"] == true && known(n));
    answer && newest(nodes) > 0 && primaries(nodes).len() != 1
}

/// The node at which the volume goes on where no node leads, as one that should has an empty copy, or
/// none. None where all copies are whole: then it is not known which one counts.
fn to_promote(nodes: &[Value]) -> Option<&Value> {
    let lacks = |n: &Value| ["empty", "new"].contains(&text(n, "state"));
    if !is_headless(nodes) || !nodes.iter().any(lacks) {
        return None;
    }
    let whole = nodes.iter().filter(|n| is_usable(n));
    whole.max_by_key(|n| (epoch(n), committed(n)))
}

/// What to do where no node leads, and `n` has the copy that counts.
fn promote(n: &Value) -> String {
    let name = text(n, "node");
    format!(
        "look again in a few seconds: a promotion passes through this state. If it stays so, run `mojim promote --name {name} --wait`: the copy of node {name} is whole. Then start the program on node {name}. The other copies are made anew from that one"
    )
}

/// Why nobody takes over from the primary `name`, where the register's mirror has nothing to
/// serve.
fn of_empty_mirror(name: &str, nodes: &[Value]) -> Option<String> {
    let view = latest(nodes).filter(|v| v["primary"]["node"] == name)?;
    let mirror = view["mirror"]["node"].as_str()?;
    let row = nodes.iter().find(|n| n["node"] == mirror)?;
    let empty = row["reachable"] == true && row["state"] != "whole";
    empty.then(|| format!("; node {mirror}, its mirror, has no whole copy, and nobody takes over"))
}

/// The register's version by which `name` is a primary without a mirror, if it is the newest one that a
/// node has read.
fn alone_by_register<'a>(name: &str, nodes: &'a [Value]) -> Option<&'a Value> {
    let view = latest(nodes).filter(|v| v["primary"]["node"] == name)?;
    (view.get("mirror") == Some(&Value::Null)).then_some(view)
}

/// What to do about a primary that was alone, and does not answer.
fn back_alone(name: &str, nodes: &[Value]) -> String {
    let whole = nodes.iter().filter(|n| is_usable(n));
    let or = whole.max_by_key(|n| (epoch(n), committed(n))).map(|n| {
        format!(
            ". Only if node {name} is lost for good, `mojim promote --force --name {}` goes on, without the sync points that node {name} committed alone",
            text(n, "node")
        )
    });
    format!(
        "start `mojim node --name {name}` on node {name} again. If it hangs, end it first. If it runs, look at its machine and its network. Then start the program there, if it has ended. The other nodes get the missing data from that copy{}",
        or.unwrap_or_default()
    )
}

/// That a backup waits for a program.
fn starts(nodes: &[Value]) -> String {
    let at = leader(nodes).map_or(String::new(), |p| format!(" on node {}", text(p, "node")));
    format!(
        "If it stays so, start the program{at}: a backup gets missing data while a program is attached"
    )
}

fn collect_findings(expected: &Expected<'_>, nodes: &[Value]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for n in nodes {
        of_node(expected, n, nodes, &mut findings);
    }
    of_voters(expected, &mut findings);
    of_register(expected, nodes, &mut findings);
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    if newest == 0 {
        // No program has ever attached: there is nothing to copy.
        return findings;
    }
    let first = primaries(nodes);
    if is_headless(nodes) {
        let what = format!("{} nodes are primary in epoch {newest}", first.len());
        let todo = "look again in a few seconds. If it stays so, start the program on the node that the register, or your last `mojim promote`, made the primary";
        let mut finding = Finding::new("", "primaries", what, todo);
        if let Some(p) = to_promote(nodes) {
            finding.todo = promote(p).into();
        }
        findings.push(finding);
    }
    for n in nodes.iter().filter(|n| n["reachable"] == true) {
        let is_primary = n["role"] == "primary" && n["state"] != "loading";
        let leads = is_primary && first.iter().all(|p| p["node"] == n["node"]);
        of_copy(n, nodes, leads, &mut findings);
    }
    let mut mirror = None;
    if let Some(p) = first.first() {
        of_mirror(expected, p, nodes, &mut findings);
        // A mirror that is joining is not in the view yet.
        mirror = p["view"]["mirror"].as_str();
        mirror = mirror.filter(|m| nodes.iter().any(|n| n["node"] == *m));
    }
    let forwards = mirror.or_else(|| first.first().map(|p| text(p, "node")));
    of_backups(expected, newest, (mirror, forwards), nodes, &mut findings);
    findings
}

/// Whether the voters vote. That a data node does not is said with its lack of room, where
/// it has one.
fn of_voters(expected: &Expected<'_>, findings: &mut Vec<Finding>) {
    for v in expected.voters {
        let is_said = findings
            .iter()
            .any(|i| i.node == v.name && i.kind == "room");
        let down = v.down.as_ref().filter(|_| v.answers && !is_said);
        if let Some(why) = &v.error {
            let what = format!("{why}{}", expected.vote_of(&v.name));
            let todo = match v.answers {
                true => VOTER,
                false if v.refuses => REFUSED,
                false => START,
            };
            findings.push(unasked(Finding::new(&v.name, "voter", what, todo), why));
        } else if let Some(why) = down {
            let what = format!("node {} does not vote on views: {why}", v.name);
            let mut finding = Finding::new(&v.name, "voter", what, VOTER);
            if let Some(todo) = of_admission(&v.name, why) {
                finding.todo = todo.into();
            }
            findings.push(finding);
        }
    }
}

/// What to do about a voter that does not vote because of its directory of votes, for `why`, in the words
/// of `mojim-views`.
fn of_admission(name: &str, why: &str) -> Option<String> {
    let says = |words: &str| why.contains(words);
    let todo = if says("a register was begun anew beside this one") {
        "remove nothing. Keep the directories of votes (`.mojim/views`) of all voters. docs/how-to/status/voter.md says the rest".to_owned()
    } else if says("was given up by `mojim replace --same-name`") {
        "end the daemon there. If this node has another directory of votes, go on with that one. If it has none, move `.mojim/views` of its directory elsewhere, keep it, and start the daemon: the voters admit its new directory".to_owned()
    } else if says("was admitted as a voter with another directory of votes") {
        format!(
            "look first whether the earlier directory of votes still exists, for example on a file system that is not mounted. If so, end the daemon, bring that directory back, and start the daemon. Only if it is lost for good, run `mojim replace --same-name {name}`: more than half of the voters have to agree, without this one"
        )
    } else if says("is of an earlier time") || says("Keep this voter stopped") {
        format!(
            "look first whether the directory of votes of now still exists, for example on a file system that is not mounted. If so, go on with that one. Only if it is lost for good, end the daemon, move `.mojim/views` of its directory elsewhere, keep it, and start the daemon. Then run `mojim replace --same-name {name}`"
        )
    } else {
        return None;
    };
    Some(format!("{todo}. {NO_BACKUP}"))
}

/// What to do about a finding that was caused by one of `node`, if `node` has such a finding.
/// Low room alone has caused nothing yet.
fn because_of(
    expected: &Expected<'_>,
    node: &str,
    nodes: &[Value],
    findings: &[Finding],
) -> Option<Cow<'static, str>> {
    let causes = ["unreachable", "refused", "copy", "failed"];
    let full = nodes.iter().any(|n| n["node"] == node && n["full"] == true);
    let is_cause = |kind| causes.contains(&kind) || full && kind == "room";
    let has = |i: &Finding| i.node == node && is_cause(i.kind);
    let may = |n: &&Value| n["node"] != node && n["role"] != "primary" && is_usable(n);
    let in_use = nodes.iter().any(|n| n["attached"] == true);
    let other = match nodes.iter().any(|n| may(&n)) && !expected.voters.is_empty() {
        true if expected.lacks_votes() => {
            ", or, once enough voters vote, when another takes its place"
        }
        true if in_use => ", or when another takes its place",
        true => ", or, at the latest while a program is attached, when another takes its place",
        false => "",
    };
    let todo = format!("mend the other finding of node {node}: this one passes with it{other}");
    findings.iter().any(has).then_some(Cow::Owned(todo))
}

/// Whether a node answers, and whether its copy can be used.
fn of_node(expected: &Expected<'_>, n: &Value, nodes: &[Value], findings: &mut Vec<Finding>) {
    let name = text(n, "node");
    let waits = n["waits_for_room"] == true;
    let room = of_room(n).or_else(|| waits.then(|| no_room(n)));
    let full = n["full"] == true && room.is_some();
    if let Some(e) = n["error"].as_str().filter(|_| !full) {
        findings.push(of_error(expected, n, e, nodes));
    }
    if let Some(mut what) = room {
        let mut todo = Cow::Owned(make_room(n));
        if let Some(e) = n["error"].as_str().filter(|_| full) {
            what += &format!("; its copy takes nothing meanwhile: {e}");
            todo = expected.room().replace(MAKE_ROOM, &todo).into();
        }
        if waits {
            what += "; committed data waits in the log, and sync points of its program go on until the log is full too";
        }
        if let Some(how) = elsewhere(n, nodes) {
            what += "; a program may find too little room to attach there, and no other node takes over for that";
            todo = format!("{todo}. Or run {how}").into();
        }
        what += &expected.vote_of(name);
        let mut finding = Finding::new(name, "room", what, "");
        finding.todo = todo;
        findings.push(finding);
    }
    of_unmanaged_files(n, nodes, findings);
    if let Some(differs) = n["differs"].as_array() {
        let differs: Vec<&str> = differs.iter().filter_map(Value::as_str).collect();
        let what = format!(
            "node {name} runs with another configuration: {}",
            differs.join(", ")
        );
        findings.push(Finding::new(name, "configuration", what, CONFIGURATION));
    }
    if let Some(why) = n["run_failed"].as_str() {
        let what = format!("programs under `mojim run` on node {name} have ended: {why}");
        findings.push(Finding::new(name, "run", what, RUN));
    }
    if let Some(why) = n["take_over_error"].as_str()
        && n["distrusted"] != true
    {
        let what = format!("node {name} does not take the place of its primary: {why}");
        findings.push(Finding::new(name, "behind", what, DECIDE));
    }
    if n["distrusted"] == true {
        findings.push(Finding::new(
            name,
            "copy",
            format!("the copy of node {name} is to be made anew, because an operator asked for it or its log is damaged"),
            PROGRAM,
        ));
    }
}

const CHANGED_PAGE: &str = "docs/how-to/status/strangers.md says the rest";
/// Where no copy is known to be the right one.
const DECIDE_CHANGED: &str = "end the program that changed them, and the volume's program. Keep a copy of the volume's directory of each node. `mojim verify` says where the copies differ. Repair and promote no node before you know which bytes are right. docs/how-to/status/strangers.md says the rest";

/// Most files that a finding names.
const MOST_NAMED: usize = 5;

/// Names, and how many more there are.
fn some_of(names: &Value, count: &Value) -> String {
    let all = names.as_array().into_iter().flatten();
    let named: Vec<&str> = all.filter_map(Value::as_str).take(MOST_NAMED).collect();
    let more = count
        .as_u64()
        .unwrap_or(0)
        .saturating_sub(named.len() as u64);
    match more {
        0 => named.join(", "),
        more => format!("{}, and {more} more", named.join(", ")),
    }
}

/// What lies in a volume's directory on a node, or is missing there, past Mojim.
fn of_unmanaged_files(n: &Value, nodes: &[Value], findings: &mut Vec<Finding>) {
    let (name, s) = (text(n, "node"), &n["strangers"]);
    let path = text(s, "path");
    if s["unknown_count"].as_u64().unwrap_or(0) > 0 {
        let what = format!(
            "node {name}: {path} has files that are not the volume's, on this node only: {}",
            some_of(&s["unknown"], &s["unknown_count"])
        );
        let mut finding = Finding::new(name, "strangers", what, "");
        let whereto = leader(nodes).map_or(String::new(), |p| {
            let primary = text(p, "node");
            format!(" on node {primary}, the primary: `mojim import --name {primary} FILE`, or a program under `mojim run` there")
        });
        finding.todo = format!(
            "end the program that made them, and move them elsewhere. Bring files that belong into the volume in{whereto}"
        )
        .into();
        findings.push(finding);
    }
    if s["changed_count"].as_u64().unwrap_or(0) > 0 {
        let what = format!(
            "node {name}: somebody changed files of the volume in {path}, past Mojim: {}",
            some_of(&s["changed"], &s["changed_count"])
        );
        let mut finding = Finding::new(name, "strangers", what, "");
        finding.todo = changed(n, nodes).into();
        findings.push(finding);
    }
}

/// What to do where files of the volume were changed past Mojim. `mojim repair` takes the primary's
/// bytes, whichever they are. Pages that were cut off must not become readable while a program runs:
/// it would commit their zeros.
fn changed(n: &Value, nodes: &[Value]) -> String {
    let name = text(n, "node");
    let others = || nodes.iter().filter(|m| m["node"] != n["node"]);
    let is_good = |m: &&Value| is_usable(m) && is_level(m, nodes);
    let is_gone =
        |m: &Value| m["reachable"] == true && ["new", "empty"].contains(&text(m, "state"));
    if others().all(is_gone) {
        return format!(
            "end the program that changed them, and the volume's program. Keep a copy of {}. No other node has the files: restore them from where they were changed, or from a backup. {CHANGED_PAGE}",
            text(&n["strangers"], "path")
        );
    }
    let is_changed = |m: &Value| m["strangers"]["changed_count"].as_u64().unwrap_or(0) > 0;
    let primary = leader(nodes).filter(|_| !others().any(is_changed));
    match primary {
        Some(p) if p["node"] != n["node"] && is_usable(p) => format!(
            "end the program that changed them. `mojim verify` says where the copies differ. Then `mojim repair --name {name}` takes the primary's bytes"
        ),
        Some(p) if p["node"] == n["node"] => {
            let mirror = mirror_by_view(nodes);
            let mirror = mirror.filter(|m| others().filter(is_good).any(|o| o["node"] == *m));
            mirror.map_or(DECIDE_CHANGED.to_owned(), |mirror| format!(
                "end the program that changed them. `mojim verify` says where the copies differ. Repair no other node now: it would get the bytes of this one, the primary. End the volume's program, run `mojim promote --name {mirror} --wait`, start the program on node {mirror}, and run `mojim repair --anew --name {name}`. {CHANGED_PAGE}"
            ))
        }
        _ => DECIDE_CHANGED.to_owned(),
    }
}

/// The finding of a node that does not answer, refuses, or cannot use its copy, for `e`.
fn of_error(expected: &Expected<'_>, n: &Value, e: &str, nodes: &[Value]) -> Finding {
    let name = text(n, "node");
    match (n["reachable"] == true, n.get("role").is_some()) {
        (false, _) => {
            let goes_on = goes_on(expected, name, nodes);
            let what = format!("{e}{goes_on}{}", expected.vote_of(name));
            unasked(Finding::new(name, "unreachable", what, START), e)
        }
        (true, true) => {
            let mut todo = Cow::Borrowed(match text(n, "role") {
                "primary" if !expected.mirrored => ONLY,
                "primary" => PRIMARY,
                _ if n["full"] == true => expected.room(),
                _ => DISK,
            });
            if todo == DISK {
                let anew = format!(
                    ". If its files are lost or damaged for good, `mojim repair --anew --name {name}` makes the copy anew, while a program runs on the primary"
                );
                todo.to_mut().push_str(&anew);
            }
            if let Some(how) = elsewhere(n, nodes) {
                todo = format!("{todo}. Or run {how}").into();
            }
            let what = format!("the copy of node {name} cannot be used: {e}");
            let mut finding = Finding::new(name, "copy", what, "");
            finding.todo = todo;
            finding
        }
        (true, false) => {
            let (kind, todo) = match n["beyond"] == true {
                true => ("beyond", BEYOND),
                false => ("refused", REFUSED),
            };
            unasked(Finding::new(name, kind, e.to_owned(), todo), e)
        }
    }
}

/// A finding of a node that could not be asked, for `e`: where the cause is known, with what to do about it.
fn unasked(mut finding: Finding, e: &str) -> Finding {
    if let Some(cause) = Cause::of(e) {
        finding.todo = cause.todo(&finding.node).into();
    }
    finding
}

/// How the volume goes on at the mirror of `n`, if `n` is the primary, no program is
/// attached, and the mirror's copy can be used.
fn elsewhere(n: &Value, nodes: &[Value]) -> Option<String> {
    let leads = leader(nodes).is_some_and(|p| p["node"] == n["node"]);
    let mirror = mirror_by_view(nodes).filter(|_| leads && n["attached"] != true)?;
    let m = nodes.iter().find(|m| m["node"] == mirror)?;
    is_usable(m)
        .then(|| format!("`mojim promote --name {mirror}`, and start the program on node {mirror}"))
}

/// Whether there is too little room for a node's data.
fn of_room(n: &Value) -> Option<String> {
    let room = &n["room"];
    let (free, needs) = (room["free"].as_u64()?, room["needs"].as_u64()?);
    let count = |what: &str| room[what].as_u64();
    let more = || Some(count("files")?.saturating_sub(count("needs_files")?));
    let is_low = free < needs || more() == Some(0);
    let files = count("files").map(|n| format!(", and {n} files can be made"));
    let needs_files = count("needs_files").map(|n| format!(" and {n} files"));
    is_low.then(|| {
        format!(
            "node {}: {} MiB are free for its data at {}{}; {} MiB{} are kept for what makes room, so a mount takes nothing new",
            text(n, "node"),
            free >> 20,
            text(room, "path"),
            files.unwrap_or_default(),
            needs >> 20,
            needs_files.unwrap_or_default(),
        )
    })
}

/// The same of a node whose program waits for room, and does not say how much.
fn no_room(n: &Value) -> String {
    let (name, room) = (text(n, "node"), &n["room"]);
    match (room["path"].as_str(), room["free"].as_u64()) {
        (Some(path), Some(free)) => {
            let free = free >> 20;
            format!("node {name}: the disk of {path} has no room, {free} MiB are free there")
        }
        _ => format!("node {name}: its disk has no room"),
    }
}

/// Where to make room, and how much at least.
fn make_room(n: &Value) -> String {
    let room = &n["room"];
    let lacks = |has: &str, needs: &str| {
        let [has, needs] = [has, needs].map(|key| room[key].as_u64());
        needs.unwrap_or(0).saturating_sub(has.unwrap_or(u64::MAX))
    };
    let Some(path) = room["path"].as_str() else {
        return MAKE_ROOM.to_owned();
    };
    let bytes = lacks("free", "needs").div_ceil(1 << 20);
    let files = lacks("files", "needs_files");
    let lacking = match (bytes, files) {
        (0, 0) => String::new(),
        (0, files) => format!(": at least {files} files have to go"),
        (mib, 0) => format!(": at least {mib} MiB are lacking"),
        (mib, files) => format!(": at least {mib} MiB are lacking, and {files} files have to go"),
    };
    let name = text(n, "node");
    format!("make room on the file system of {path} on node {name}{lacking}")
}

/// For a node whose daemon does not answer: whether another node hears its program.
fn goes_on(expected: &Expected<'_>, name: &str, nodes: &[Value]) -> String {
    let newest = newest(nodes);
    // The silent node leads, and its program sends to `n` directly.
    let hears = |n: &&Value| {
        let link = &n["link"];
        link["up"] == true && link["from"] == name && link["primary"] == name
    };
    if let Some(n) = nodes.iter().find(hears) {
        return format!(
            "; node {} heard its program {} ms ago, which needs no daemon to go on",
            text(n, "node"),
            n["link"]["heard_ms"]
        );
    }
    if let Some(p) = leader(nodes).filter(|_| mirror_by_view(nodes) == Some(name))
        && p["attached"] == true
        && p["link"]["up"] == true
        && p["failed"] != true
    {
        return format!(
            "; it is the mirror of node {}: unless that node hears it, {}",
            text(p, "node"),
            then(expected, p)
        );
    }
    // A mirror that comes back knows of the view before alone.
    if let Some(view) = alone_by_register(name, nodes) {
        return format!(
            "; node {name} has gone on without a mirror since epoch {}: its copy is the newest, and nobody takes over",
            epoch(view)
        );
    }
    let is_mirror = |n: &&Value| {
        let view = &n["view"];
        view["primary"] == name && view["mirror"] == n["node"] && epoch(n) == newest
    };
    let Some(mirror) = nodes.iter().filter(|n| is_usable(n)).find(is_mirror) else {
        return of_empty_mirror(name, nodes).unwrap_or_default();
    };
    let then = match expected.votes() {
        (_, 0, _) => ", and waits for an operator",
        (have, _, need) if have < need => ", and cannot take over",
        _ => ", and takes over in seconds if that stays so",
    };
    format!(
        "; node {}, its mirror, hears no program there{then}",
        text(mirror, "node")
    )
}

/// What sync points of the program on node `p` do without their mirror.
fn then(expected: &Expected<'_>, p: &Value) -> &'static str {
    match expected.voters {
        _ if !expected.waits => "sync points of its program go on, and have one copy",
        [] => "sync points of its program wait, and fail if it stays so",
        _ if p["register"]["error"].is_string() => {
            "sync points of its program wait, and fail if it stays so: it reaches too few voters to go on alone"
        }
        // Whether such a voter still votes is not seen from here.
        all if all.iter().any(|v| v.error.is_some()) => {
            "sync points of its program wait until it goes on alone, if enough voters agree"
        }
        _ => "sync points of its program wait until it goes on alone, in seconds",
    }
}

/// Whether the views can change, and whether what they say has been carried out.
fn of_register(expected: &Expected<'_>, nodes: &[Value], findings: &mut Vec<Finding>) {
    // A node that can read the register can take over.
    let read = nodes.iter().any(|n| n["register"]["version"].is_u64());
    let of_copies = nodes
        .iter()
        .map(|n| (text(n, "node"), n["register"]["error"].as_str()));
    let of_others = expected
        .voters
        .iter()
        .map(|v| (&*v.name, v.unread.as_deref()));
    let unread = of_copies.chain(of_others);
    let unread: Vec<(&str, &str)> = unread.filter_map(|(n, e)| Some((n, e?))).collect();
    let count = expected.count();
    let is_down = |name: &str| {
        let mut all = expected.voters.iter();
        all.any(|v| v.name == name && v.answers && v.down.is_some())
    };
    if !read && expected.lacks_votes() {
        findings.extend(too_few(expected, unread.is_empty()));
    } else if read || unread.is_empty() {
        // Of a voter that does not vote that is said already.
        for (name, e) in unread.into_iter().filter(|(n, _)| !is_down(n)) {
            let what = format!("node {name} cannot read the register of views: {e}");
            findings.push(Finding::new(name, "quorum", what, READS));
        }
    } else {
        // A voter that reports an error is the cause.
        let finding = |v: &Voter| v.error.is_some() || v.down.is_some();
        let chooses = match expected.voters.iter().any(finding) {
            true => "",
            false => ", possibly because they choose their leader, for some seconds",
        };
        // The other errors would say the same.
        let what = format!(
            "{count}, and the register of views cannot be read{chooses}; meanwhile nobody takes over: {}",
            unread[0].1
        );
        findings.push(Finding::new("", "quorum", what, VOTERS));
    }
    let Some(primary) = latest(nodes).and_then(|r| r["primary"]["node"].as_str()) else {
        return;
    };
    let named = nodes.iter().find(|n| n["node"] == primary);
    if let Some(n) = named
        && n["reachable"] == true
        && n["role"] != "primary"
    {
        findings.push(Finding::new(
            primary,
            "promotion",
            format!("the register names node {primary} the primary, and it has not become it yet"),
            "look again in a few seconds. If it stays so, read the messages of its daemon",
        ));
    }
}

/// The finding of voters of which too few vote. `unheard`: no node has said that it cannot read
/// the register.
fn too_few(expected: &Expected<'_>, unheard: bool) -> Option<Finding> {
    let all = expected.voters;
    // Who refuses this command alone may vote all the same.
    if unheard && all.iter().any(|v| v.refuses) {
        return None;
    }
    let (_, _, need) = expected.votes();
    let meanwhile = match unheard {
        true => "if they do not reach each other either,",
        false => "meanwhile",
    };
    let what = format!(
        "{}, and {need} are needed: {meanwhile} nobody takes over, no node takes another's place, and no program can attach",
        expected.count()
    );
    let away = all.iter().any(|v| !v.answers);
    let down = all.iter().any(|v| v.answers && !v.votes());
    let todo = match (away, down) {
        (false, _) => VOTERS,
        (true, false) => {
            "start the voters that do not answer, or look at their machines and network"
        }
        (true, true) => {
            "start the voters that do not answer, or look at their machines and network. Other voters answer and do not vote: mend the cause that their findings name, room or a disk. Their daemons try again every second"
        }
    };
    let mut finding = Finding::new("", "quorum", what, todo);
    finding.todo.to_mut().push_str(BEFORE);
    Some(finding)
}

/// Whether a node's copy is whole, and of the newest view. `leads`: the node is the
/// primary, and no other node is the primary of the newest view.
fn of_copy(n: &Value, nodes: &[Value], leads: bool, findings: &mut Vec<Finding>) {
    let name = text(n, "node");
    match n["state"].as_str() {
        // A damaged copy has an `error`, too.
        Some("whole" | "damaged") | None => {}
        Some(_) if leads => findings.push(Finding::new(
            name,
            "copy",
            format!("node {name} is the primary, and its copy is gone"),
            TAKE,
        )),
        Some("new") => findings.push(Finding::new(
            name,
            "copy",
            format!("node {name} has no copy yet"),
            PROGRAM,
        )),
        Some(s) => findings.push(Finding::new(
            name,
            "copy",
            format!("the copy of node {name} is {s}{}", uncopied(n)),
            match s {
                "loading" => LOADS,
                _ if n["copy_error"].is_object() => ROOM_TO_COPY,
                _ => PROGRAM,
            },
        )),
    }
    if n["failed"] == true {
        findings.push(Finding::new(
            name,
            "failed",
            format!("the program on node {name} can commit nothing more: the disk, or the log, of its copy failed"),
            FAILED,
        ));
    }
    let has_one = n["state"] != "new" && n["state"] != "empty" && n["state"] != "loading";
    if n["role"] == "primary" && has_one && is_stale(n, nodes) {
        let now = match replaced_by(n, nodes) {
            Some((primary, since)) => {
                format!("the register names node {primary} the primary since epoch {since}")
            }
            None => format!("the volume is in epoch {} now", newest(nodes)),
        };
        let what = format!(
            "node {name} was primary, in epoch {}; {now}, and that copy has not been brought up to date{}",
            epoch(n),
            uncopied(n)
        );
        let mut finding = Finding::new(name, "stale", what, PROGRAM);
        if n["copy_error"].is_object() {
            finding.todo = ROOM_TO_COPY.into();
        } else if n["attached"] == true {
            let process = n["pid"].as_u64();
            let process = process.map_or(String::new(), |pid| format!(" (process {pid})"));
            finding.todo = format!(
                "if you want what only this node has, copy its directory first. Then end the program on node {name}{process}: while it runs, this copy does not follow. After that: {}",
                brought(name, nodes)
            )
            .into();
        }
        findings.push(finding);
    }
}

/// Why the data that came in last for a copy could not be stored, if that is why the copy
/// lacks something.
fn uncopied(n: &Value) -> String {
    let why = n["copy_error"]["text"].as_str();
    why.map_or(String::new(), |why| {
        format!(
            "; data for it that came {} s ago found no room: {why}",
            n["copy_error"]["seconds_ago"]
        )
    })
}

/// Whether the primary has its mirror, and the mirror what is committed.
fn of_mirror(expected: &Expected<'_>, p: &Value, nodes: &[Value], findings: &mut Vec<Finding>) {
    if !expected.mirrored {
        return;
    }
    let name = text(p, "node");
    let mirror = p["view"]["mirror"].as_str().unwrap_or("");
    if mirror.is_empty() {
        findings.push(alone(expected, p, nodes, findings));
        return;
    }
    if p["attaching"] == true {
        // Nothing waits for the mirror yet.
        return;
    }
    if p["attached"] == true {
        if p["link"]["up"] == false {
            let then = match p["failed"] == true {
                // The finding `failed` says so.
                true => String::new(),
                false => format!(": {}", then(expected, p)),
            };
            let what =
                format!("the link of node {name} to its mirror, node {mirror}, is down{then}");
            let mut finding = Finding::new(name, "link", what, START);
            finding.todo = because_of(expected, mirror, nodes, findings).unwrap_or(
                "look at the network between the two, and read the messages of their daemons"
                    .into(),
            );
            findings.push(finding);
        }
        of_silence(p, nodes, findings);
        return;
    }
    of_unused(p, mirror, nodes, findings);
}

/// Whether the primary or its mirror lacks something, while no program is attached that would
/// send it.
fn of_unused(p: &Value, mirror: &str, nodes: &[Value], findings: &mut Vec<Finding>) {
    let name = text(p, "node");
    let found = nodes.iter().find(|n| n["node"] == mirror);
    if let Some(m) = found.filter(|m| m["reachable"] == true && m["state"] == "whole")
        && m["last_lsn"].as_u64().is_some_and(|l| l < committed(p))
    {
        let what = format!(
            "the copy of node {mirror} ends at LSN {}, that of node {name} has LSN {}, and no program is attached",
            m["last_lsn"],
            committed(p)
        );
        let mut finding = Finding::new(mirror, "behind", what, PROGRAM);
        // The daemon copies what is known to be committed.
        if m["last_lsn"].as_u64() >= p["checkpoint"].as_u64() {
            finding.todo = format!("start the program on node {name}: an earlier program began sync points that nobody saw acknowledged, and they wait for it").into();
        }
        findings.push(finding);
    }
    // The mirror has records that the primary lost.
    if let Some(m) = found.filter(|m| m["reachable"] == true && epoch(m) == epoch(p))
        && p["settling"] != true
        && p["last_lsn"].as_u64().is_some_and(|l| l < committed(m))
    {
        let what = format!(
            "the copy of node {name} ends at LSN {}, that of its mirror, node {mirror}, has LSN {}, and no program is attached",
            p["last_lsn"],
            committed(m)
        );
        let mut finding = Finding::new(name, "behind", what, "");
        finding.todo = format!("start the program on node {name}: it takes the missing data from the mirror, or says why it does not. If you lose the mirror before that, the data is lost").into();
        findings.push(finding);
    }
}

/// A program that stands still does not say that its link is down.
fn of_silence(p: &Value, nodes: &[Value], findings: &mut Vec<Finding>) {
    let name = text(p, "node");
    let mirror = nodes.iter().find(|n| n["node"] == p["view"]["mirror"]);
    let hears_nothing = |m: &&Value| is_usable(m) && m["link"]["up"] == false;
    if p["link"]["up"] == true
        && p["failed"] != true
        && let Some(m) = mirror
            .filter(|m| epoch(m) == epoch(p))
            .filter(hears_nothing)
    {
        let what = format!(
            "node {}, the mirror, hears nothing of the program on node {name} (process {})",
            text(m, "node"),
            p["pid"]
        );
        let todo = "look again in a few seconds. If it stays so, look whether that process is stopped, and at the network between the two";
        findings.push(Finding::new(name, "link", what, todo));
    }
}

/// The finding of a primary without a mirror: which nodes have what it commits all the same,
/// and what to do.
fn alone(expected: &Expected<'_>, p: &Value, nodes: &[Value], findings: &[Finding]) -> Finding {
    let name = text(p, "node");
    let attached = p["attached"] == true;
    let is_other = |n: &&Value| n["node"] != name && is_usable(n);
    let follows = |n: &&Value| !attached || n["link"]["up"] == true && n["link"]["from"] == name;
    let others: Vec<&Value> = nodes.iter().filter(is_other).filter(follows).collect();
    let mut what = format!("node {name} is alone: ");
    what += match (attached, others.is_empty()) {
        (true, true) => "its sync points have one copy",
        (true, false) => {
            "a sync point returns when it is on this node, without waiting for another copy"
        }
        (false, true) => "it has no mirror, and no other copy can be used",
        (false, false) => "it has no mirror",
    };
    if others.is_empty() && nodes.iter().any(|n| n["reachable"] != true) {
        what += ", as far as the nodes that answer know";
    }
    for n in &others {
        let does = if attached { " follows and" } else { "" };
        what += &format!("; node {}{does} {}", text(n, "node"), has(n, nodes));
    }
    // First the nodes that were, or are to be, the mirror; then those whose role is
    // unknown.
    let could_be = |roles: &'static [&str]| {
        let is = move |n: &&Value| n["node"] != name && roles.contains(&text(n, "role"));
        let all = nodes.iter().filter(is);
        all.filter_map(|n| because_of(expected, text(n, "node"), nodes, findings))
            .next()
    };
    let mut todo = match could_be(&["mirror", "primary"]).or_else(|| could_be(&[""])) {
        Some(todo) => todo,
        None if attached => JOINS.into(),
        None => brought("", nodes),
    };
    if !attached {
        todo.to_mut().push_str(&format!(
            ". Node {name} is the primary: start the program there"
        ));
    }
    let (have, _, need) = expected.votes();
    if attached && !others.is_empty() && !expected.voters.is_empty() && have >= need {
        todo.to_mut()
            .push_str(". A node that follows takes the mirror's place if no mirror comes back");
    }
    let mut finding = Finding::new(name, "alone", what, "");
    finding.todo = todo;
    finding
}

/// Whether each backup follows, and how far. `upstream` forwards to the backups; until it
/// does, a node that came back while another is the view's `mirror` takes itself for the
/// mirror.
fn of_backups(
    expected: &Expected<'_>,
    newest: u64,
    (mirror, upstream): (Option<&str>, Option<&str>),
    nodes: &[Value],
    findings: &mut Vec<Finding>,
) {
    // Who attaches sends nothing yet.
    let is_used = |n: &Value| n["attached"] == true && n["attaching"] != true;
    let in_use = nodes.iter().any(is_used);
    let most = most(nodes);
    let forwards = |n: &&Value| n["role"] == "mirror" && epoch(n) == newest;
    let rows = nodes.iter().filter(forwards);
    let rows: Vec<&Value> = rows
        .filter_map(|n| n["backups"].as_array())
        .flatten()
        .collect();
    let outside = |n: &Value| n["role"] == "mirror" && mirror.is_some_and(|m| n["node"] != m);
    let backups = nodes.iter().filter(|n| n["role"] == "backup" || outside(n));
    // `of_node` reports a copy that cannot be used.
    let usable = |n: &&Value| n["reachable"] == true && n["error"].is_null();
    for b in backups.filter(usable).filter(|n| n["state"] == "whole") {
        let row = rows.iter().find(|r| r["node"] == b["node"]);
        let follows = b["link"]["up"] == true || row.is_some_and(|r| r["active"] == true);
        let has = b["last_lsn"].as_u64().unwrap_or(0);
        let is_old = outside(b) && epoch(b) < newest;
        if !follows && (in_use || is_old || has < most) {
            let lacks = match is_old || has < most {
                true => format!("has LSN {has} of {}{}", last_known(nodes), uncopied(b)),
                false => "has everything that is committed".to_owned(),
            };
            let mut finding = away(b, mirror.filter(|_| outside(b)), &lacks);
            finding.passes = !is_old && has >= most;
            let because = upstream.and_then(|u| because_of(expected, u, nodes, findings));
            match because {
                Some(todo) if in_use => finding.todo = todo,
                Some(todo) => finding.todo = format!("{todo}. {}", starts(nodes)).into(),
                None if finding.todo == AWAY && !in_use => finding.todo = away_unused(nodes).into(),
                None => {}
            }
            findings.push(finding);
        }
    }
    for r in rows {
        of_lag(expected, r, nodes, findings);
    }
}

/// The finding of a node that follows nobody. `mirror`: it takes itself for the mirror, and this
/// node is.
fn away(b: &Value, mirror: Option<&str>, lacks: &str) -> Finding {
    let name = text(b, "node");
    let what = match mirror {
        Some(mirror) => {
            format!(
                "node {mirror} is the mirror, and node {name} follows nobody: node {name} {lacks}"
            )
        }
        None => format!("backup {name} follows nobody: it {lacks}"),
    };
    let todo = match b["copy_error"].is_object() {
        true => ROOM_TO_COPY,
        false => AWAY,
    };
    Finding::new(name, "backup-away", what, todo)
}

/// Whether the program waits for a backup, by the row that the mirror has of it.
fn of_lag(expected: &Expected<'_>, r: &Value, nodes: &[Value], findings: &mut Vec<Finding>) {
    let name = text(r, "node");
    let lag = r["lag"].as_u64().unwrap_or(0);
    let Some(b) = nodes.iter().find(|n| n["node"] == name) else {
        return;
    };
    let more = format!(
        "{lag} bytes, more than secondary_threshold ({})",
        expected.threshold
    );
    // A node that no longer forwards, as with a full disk, does not know the lag.
    let (what, todo) = match (r["active"] == true, r["counts"] == true) {
        _ if lag <= expected.threshold => return,
        (true, _) if is_usable(b) => (
            format!("backup {name} lags by {more}: the program is held back"),
            "look at the link to it and at its disk, or raise secondary_threshold",
        ),
        (_, true) => (
            format!(
                "backup {name} takes nothing, and lacks {more}: sync points wait until it goes on, or counts as lost after some seconds"
            ),
            "mend the other findings of that node. If it has none: nothing, if this passes",
        ),
        _ => return,
    };
    findings.push(Finding::new(name, "backup-lag", what, todo));
}

/// Which nodes have a sync point, and how safe it is there: `level` is none (not
/// there, or not known to be), received (in memory) or persistent; `applied`, whether
/// it is in the data files. `persists`: whether a node's log outlives its power. A
/// node of an older view may have another sync point of that number: none.
pub fn copies(lsn: u64, nodes: &[Value], persists: impl Fn(&str) -> bool) -> Value {
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    let of = |n: &Value| {
        let reaches = |key: &str| n[key].as_u64().is_some_and(|l| l >= lsn);
        let name = text(n, "node");
        let usable = n["reachable"] == true && n.get("error").is_none() && n["state"] == "whole";
        let there = usable && epoch(n) == newest && reaches("last_lsn");
        let logged = n["level"] == "persistent" || reaches("persisted") && persists(name);
        let level = match there {
            false => "none",
            true if reaches("checkpoint") || logged => "persistent",
            true => "received",
        };
        let applied = there && (reaches("applied") || reaches("checkpoint"));
        json!({ "node": name, "level": level, "applied": applied })
    };
    nodes.iter().map(of).collect()
}

#[cfg(test)]
mod tests;
