//! `mojim replace`: gives the place of a lost node to another one.
//!
//! Owns the change of the configuration file, and the order in which the nodes learn of
//! it. The nodes do the rest themselves: the voters by their log, the forwarding node by
//! sending the new node a copy. So this command may be interrupted and run again at any
//! point.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim_config::{AUTOMATIC_VOTERS, Config, Failover, Role, Volume};
use mojim_replica::request::{Request, Retired};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use toml_edit::{Array, DocumentMut, Item, TableLike};

use crate::ask::{SHORT, STATUS, ask, load};
use crate::failure::{Done, Failure, say_on_stderr};
use crate::output;
use crate::status::gather;

/// The pause between two looks at what the nodes do by themselves.
const LOOK: Duration = Duration::from_millis(200);
/// How long the voters may take to agree, the question's way included.
const STEP: Duration = Duration::from_secs(5);
/// How long a node that reads its file again may take to come back.
const BACK: Duration = Duration::from_secs(60);

/// Give the place of a node that is lost for good to another node.
///
/// End the old node first. It is refused from then on. Sync points go on meanwhile. You may
/// interrupt this command and run it again.
///
/// 1. The command changes the configuration file. The new node gets the old one's vote, and its
///    part in each volume.
///
/// 2. If the nodes do not share the file, copy it to each of them.
///
/// 3. The command has every node read its file again.
///
/// 4. It waits until the new node votes, and has a copy of each volume.
///
/// `--same-name` is for a voter that lost its directory of votes (DIR/.mojim/views), and runs
/// again with an empty one. A majority of the other voters gives up the old directory for good,
/// and admits the new one. The configuration stays as it is.
#[derive(clap::Args)]
pub struct Replace {
    /// The configuration file. The command changes it.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node that is lost.
    #[arg(
        long,
        value_name = "OLD",
        required_unless_present = "same_name",
        requires = "with"
    )]
    name: Option<String>,
    /// The node that takes its place: a new name, or a node of the file that holds no volume.
    #[arg(long, value_name = "NEW", requires = "name")]
    with: Option<String>,
    /// A voter that lost its directory of votes, and keeps its name.
    #[arg(long, value_name = "NODE", conflicts_with_all = ["name", "with", "dry_run"])]
    same_name: Option<String>,
    /// The address and port of the new node. Give it if the file does not have the node yet.
    #[arg(long, value_name = "IP:PORT")]
    address: Option<SocketAddr>,
    /// The directory of the new node [default: the path of the old node's].
    #[arg(long, value_name = "DIR", requires = "address")]
    directory: Option<PathBuf>,
    /// Print the new file, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Seconds to wait [default: no limit].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

impl Replace {
    /// Runs it.
    pub fn run(self) -> Done {
        if let Some(name) = &self.same_name {
            return self.readmit(name);
        }
        let (old, new) = self.names();
        // Symbolic links are followed: the file itself changes.
        let path = std::fs::canonicalize(&self.config).map_err(|e| at(&self.config, e))?;
        let _alone = alone(&path)?;
        let mut config = load(&self.config)?;
        if !is_done(&config, old, new) {
            self.check_names(&config)?;
            let text = std::fs::read_to_string(&path)?;
            let primaries = check_nodes(&config, old)?;
            let text = self.changed(&text, &config, &primaries)?;
            config = Config::parse(&text, &self.config)?;
            self.check_logs(&config)?;
            if self.dry_run {
                write!(std::io::stdout(), "{text}")?;
                return Ok(0);
            }
            put(&path, &text)?;
            say_on_stderr(&format!(
                "{}: node {new} has the place of node {old}",
                self.config.display()
            ));
        } else if self.dry_run {
            write!(
                std::io::stdout(),
                "{}",
                std::fs::read_to_string(&self.config)?
            )?;
            return Ok(0);
        }
        let end = self
            .timeout
            .map(|s| Instant::now() + Duration::from_secs(s));
        let mut said = String::new();
        let mut nodes = Readers::default();
        loop {
            let (waits, outcome) = look(&config, new, &mut nodes)?;
            if waits.is_empty() {
                return self.report(outcome);
            }
            let text = waits.join("\n");
            if text != said {
                say_on_stderr(&text);
                said = text;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Failure::failed(format!(
                    "node {new} has not taken the place of node {old} yet; run this again to go on"
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Has a majority of the voters give up the directory with which node `name` was admitted,
    /// and waits until the node votes with the one that it has.
    fn readmit(&self, name: &str) -> Done {
        let config = load(&self.config)?;
        let node = config.node(name)?;
        let voters = config.voters();
        if voters.len() < AUTOMATIC_VOTERS || voters.iter().all(|n| n.name != name) {
            return Err(Failure::usage(format!(
                "{}: node {name} does not vote in a register of views, so it needs no admission. Its copies come by themselves",
                self.config.display()
            )));
        }
        let end = self
            .timeout
            .map(|s| Instant::now() + Duration::from_secs(s));
        let mut said = String::new();
        let (mut given_up, mut others) = (false, voters.iter().filter(|n| n.name != name).cycle());
        loop {
            // Each may be down, or without the leader.
            let other = others.next().expect("two voters and more");
            let voter = name.to_owned();
            let answer = ask(&config, other, STEP, &Request::Retire { voter });
            let says = answer.map(serde_json::from_value::<Retired>);
            let why = match says {
                Ok(Ok(Retired::Votes)) => return self.readmitted(name, given_up),
                Ok(Ok(r)) => {
                    given_up |= r == Retired::Now;
                    format!(
                        "node {name} is admitted as soon as it answers: `mojim node --config {} --name {name}` ({})",
                        self.config.display(),
                        node.address
                    )
                }
                Ok(Err(e)) => return Err(Failure::failed(format!("node {}: {e}", other.name))),
                Err(f) => format!("a majority of the other voters has to agree: {}", f.text),
            };
            if why != said {
                say_on_stderr(&why);
                said = why;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(Failure::failed(format!(
                    "node {name} does not vote yet; run this again to go on"
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn readmitted(&self, name: &str, given_up: bool) -> Done {
        match (self.json, given_up) {
            (true, _) => output::json(&json!({ "readmitted": name, "given_up": given_up }))?,
            (false, true) => output::text(&format!(
                "node {name} votes with the directory that it has; its earlier one is refused from now on\n"
            ))?,
            (false, false) => output::text(&format!(
                "node {name} votes with the directory with which it was admitted\n"
            ))?,
        }
        Ok(0)
    }

    /// The node that is lost, and the one that takes its place.
    fn names(&self) -> (&str, &str) {
        let (old, new) = (&self.name, &self.with);
        (
            old.as_deref().unwrap_or_default(),
            new.as_deref().unwrap_or_default(),
        )
    }

    fn check_names(&self, config: &Config) -> Result<(), Failure> {
        let (old, new) = self.names();
        let file = self.config.display();
        let wrong = |why: String| Err(Failure::usage(format!("{file}: {why}")));
        if let Some(n) = config.replacement_of(old) {
            return wrong(format!(
                "node {old} was replaced by node {} already",
                n.name
            ));
        }
        if config.replacement_of(new).is_some() {
            return wrong(format!(
                "there was a node {new} before; a name that was replaced is not used again"
            ));
        }
        let o = config.node(old)?;
        match (config.nodes.get(new), self.address) {
            _ if old == new => wrong(format!("node {old} cannot replace itself")),
            (Some(n), _) if !n.replaces.is_empty() => wrong(format!(
                "node {new} has the place of another already (`replaces`)"
            )),
            (None, None) => wrong(format!(
                "there is no node {new}; say where it listens (--address), or add [node.{new}]"
            )),
            (Some(_), Some(_)) => wrong(format!(
                "[node.{new}] is there and says where it listens; leave --address out"
            )),
            (Some(n), None) if n.role != o.role => wrong(format!(
                "node {new} is a {}, node {old} a {} (`role`)",
                n.role, o.role
            )),
            (Some(n), None)
                if config
                    .volumes
                    .values()
                    .any(|v| v.data_nodes().contains(&&*n.name)) =>
            {
                wrong(format!("node {new} holds a volume already"))
            }
            (Some(n), None) if n.vote && config.voters().len() >= AUTOMATIC_VOTERS => {
                wrong(format!(
                    "node {new} votes already; a node that takes another's place must not have a vote of its own (remove [node.{new}] from the file, and give --address)"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a log smaller than the others': a running primary makes records that fit
    /// the smallest log, and does not look again.
    fn check_logs(&self, config: &Config) -> Result<(), Failure> {
        let new = config.node(self.names().1)?;
        let volumes = config.volumes.values();
        for v in volumes.filter(|v| v.data_nodes().contains(&&*new.name)) {
            let share = |n: &str| config.nodes[n].log.share(v.connections);
            let others = v.data_nodes().into_iter().filter(|n| *n != new.name);
            let least = others.map(share).min().unwrap_or(0);
            if new.role == Role::Data && share(&new.name) < least {
                return Err(Failure::usage(format!(
                    "{}: the log of node {} is smaller than those of the other nodes of volume {}; give it as much (`log.size`)",
                    self.config.display(),
                    new.name,
                    v.name
                )));
            }
        }
        Ok(())
    }

    /// The file's text, with `new` in `old`'s place. `primaries`: each volume with its
    /// primary.
    fn changed(
        &self,
        text: &str,
        config: &Config,
        primaries: &[(String, String)],
    ) -> Result<String, Failure> {
        let (old, new) = self.names();
        let bad = |what: &str| Failure::failed(format!("{}: {what}", self.config.display()));
        let mut doc: DocumentMut = text.parse().map_err(|e| bad(&format!("{e}")))?;
        let nodes = doc.get_mut("node").and_then(Item::as_table_like_mut);
        let nodes = nodes.ok_or_else(|| bad("no table of nodes"))?;
        let gone = nodes.remove(old).ok_or_else(|| bad("no such node"))?;
        let mut replaces = config.node(old)?.replaces.clone();
        replaces.push(old.to_owned());
        if let Some(at) = self.address {
            nodes.insert(new, gone);
            let table = nodes.get_mut(new).and_then(Item::as_table_like_mut);
            let table = table.ok_or_else(|| bad("a node is a table"))?;
            set(table, "address", at.to_string());
            if let Some(dir) = &self.directory {
                set(table, "directory", dir.display().to_string());
            }
        }
        let table = nodes.get_mut(new).and_then(Item::as_table_like_mut);
        let table = table.ok_or_else(|| bad("a node is a table"))?;
        set(table, "replaces", Array::from_iter(replaces));
        if config.node(old)?.vote {
            table.remove("vote");
        }
        for v in config.volumes.values() {
            let now = primaries.iter().find(|(volume, _)| *volume == v.name);
            // The present primary is named as the first one; the new node gets the place
            // that is left.
            let primary = now.map_or(&*v.primary, |(_, p)| p);
            let renamed = |n: &str| match n {
                _ if v.primary == old && n == old => primary.to_owned(),
                _ if v.primary == old && n == primary || n == old => new.to_owned(),
                n => n.to_owned(),
            };
            if !v.data_nodes().contains(&old) {
                continue;
            }
            let volumes = doc.get_mut("volume").and_then(Item::as_table_like_mut);
            let table = volumes.and_then(|t| t.get_mut(&v.name));
            let table = table.and_then(Item::as_table_like_mut);
            let table = table.ok_or_else(|| bad("a volume is a table"))?;
            set(table, "primary", renamed(&v.primary));
            if let Some(m) = &v.mirror {
                set(table, "mirror", renamed(m));
            }
            if !v.backups.is_empty() {
                let names = v.backups.iter().map(|b| renamed(b));
                set(table, "backups", Array::from_iter(names));
            }
        }
        Ok(doc.to_string())
    }

    fn report(&self, outcome: Value) -> Done {
        let (old, new) = self.names();
        if self.json {
            let mut outcome = outcome;
            outcome["config"] = json!(self.config.display().to_string());
            outcome["replaced"] = json!(old);
            outcome["with"] = json!(new);
            output::json(&outcome)?;
            return Ok(0);
        }
        let mut t = format!("node {new} has the place of node {old}\n");
        for v in outcome["volumes"].as_array().into_iter().flatten() {
            let volume = v["volume"].as_str().unwrap_or("");
            let _ = match v["note"].as_str() {
                Some(note) => writeln!(t, "  volume {volume}: {note}"),
                None => writeln!(t, "  volume {volume}: a copy up to LSN {}", v["last_lsn"]),
            };
        }
        for n in outcome["unreachable"].as_array().into_iter().flatten() {
            let n = n.as_str().unwrap_or("");
            let _ = writeln!(
                t,
                "  node {n} did not answer: give it the new file before it is started again"
            );
        }
        output::text(&t)?;
        Ok(0)
    }
}

/// Whether `new` has `old`'s place in the file already.
fn is_done(config: &Config, old: &str, new: &str) -> bool {
    let n = config.nodes.get(new);
    n.is_some_and(|n| n.replaces.last().is_some_and(|r| r == old))
}

/// Replaces a value, and keeps the comment beside it.
fn set(table: &mut dyn TableLike, key: &str, to: impl Into<toml_edit::Value>) {
    let mut to = to.into();
    if let Some(old) = table.get(key).and_then(Item::as_value) {
        *to.decor_mut() = old.decor().clone();
    }
    table.insert(key, Item::Value(to));
}

/// Checks that the old node is ended, that nothing depends on it alone, and that the
/// others run with this configuration. Returns the primary of each of its volumes.
fn check_nodes(config: &Config, old: &str) -> Result<Vec<(String, String)>, Failure> {
    let node = config.node(old)?;
    let no = |why: String| Err(Failure::failed(why));
    // Any listener counts, whatever it answers.
    if TcpStream::connect_timeout(&node.address, SHORT).is_ok() {
        return no(format!(
            "something listens at {}: if it is node {old}, end its daemon and the programs there first",
            node.address
        ));
    }
    for n in config.nodes.values().filter(|n| n.name != old) {
        let Ok(answer) = ask(config, n, SHORT, &STATUS) else {
            continue;
        };
        if answer["config"].as_u64() != Some(config.sum().into()) {
            return no(format!(
                "node {} runs with another configuration than {} says; bring them together first, with this file on every node, and start that node again",
                n.name,
                config.path.display()
            ));
        }
    }
    let voters = config.voters();
    if node.vote && voters.len() >= AUTOMATIC_VOTERS {
        let counts = |n: &&&mojim_config::Node| {
            let names = ask(config, n, SHORT, &Request::Voters).unwrap_or_default();
            let names = names.as_array().into_iter().flatten();
            n.name != old && names.into_iter().any(|name| name == old)
        };
        let most = voters.len() / 2 + 1;
        let have = voters.iter().filter(counts).count();
        if have < most {
            return no(format!(
                "{have} of the {} voters answer and have the register; it takes {most} to change them",
                voters.len()
            ));
        }
    }
    let all = gather(config, None);
    let mut primaries = Vec::new();
    for v in config.volumes.values() {
        if v.data_nodes().contains(&old) {
            primaries.push((v.name.clone(), primary_of(v, old, &all)?));
        }
    }
    Ok(primaries)
}

/// The primary of a volume that `old` holds, by the nodes' answers, if everything that
/// was acknowledged is there without `old`.
fn primary_of(v: &Volume, old: &str, all: &Value) -> Result<String, Failure> {
    let no = |why: String| Err(Failure::failed(format!("volume {}: {why}", v.name)));
    if v.mirror.is_none() {
        return no(format!(
            "its only copy was on node {old}; take the volume out of the file first"
        ));
    }
    let rows = all["volumes"].as_array().into_iter().flatten();
    let row = rows.filter(|r| r["volume"] == v.name.as_str());
    let nodes: Vec<&Value> = row.flat_map(|r| r["nodes"].as_array()).flatten().collect();
    let mut others = nodes
        .iter()
        .filter(|n| n["reachable"] == true && n["node"] != old);
    // By the register, else by the greatest epoch that a node knows.
    let register = nodes
        .iter()
        .map(|n| &n["register"])
        .find(|r| r["version"].is_u64());
    let newest = others.clone().max_by_key(|n| n["epoch"].as_u64());
    let Some(newest) = newest else {
        return no("no other node of it answers, so its primary is unknown".into());
    };
    let (primary, mirror) = match register {
        Some(r) => (&r["primary"]["node"], &r["mirror"]["node"]),
        None => (&newest["view"]["primary"], &newest["view"]["mirror"]),
    };
    // The volume was never used.
    let Some(primary) = primary.as_str().filter(|p| !p.is_empty()) else {
        return match (&v.primary, others.all(|n| n["state"] == "new")) {
            (first, true) if first != old => Ok(first.clone()),
            _ => no("its primary is unknown".into()),
        };
    };
    if primary == old {
        return no(format!(
            "node {old} is its primary: another node must take over first{}",
            match v.failover {
                Failover::Automatic => ", as its mirror does by itself",
                Failover::Manual => " (`mojim promote`)",
            }
        ));
    }
    if mirror == old {
        // The primary has what was acknowledged, unless it lost what it held.
        let holds = others.any(|n| {
            let life = register.map(|r| &r["primary"]["incarnation"]);
            n["node"] == primary
                && n["state"] == "whole"
                && n["ring_lost"] != true
                && life.is_none_or(|life| *life == n["life"])
        });
        if !holds {
            return no(format!(
                "node {old} is its mirror, and may be the only node with some acknowledged sync points: node {primary}, the primary, does not answer, or lost its copy. Bring one of them back, or give up the sync points of node {old} (`mojim promote --force`)"
            ));
        }
    } else if !others.any(|n| n["state"] == "whole") {
        return no("no other node that answers has a whole copy".into());
    }
    Ok(primary.to_owned())
}

fn at(path: &Path, e: std::io::Error) -> Failure {
    Failure::from(e).at(&path.display().to_string())
}

/// Keeps other processes from changing the file by this command, until the returned
/// descriptor is dropped.
fn alone(path: &Path) -> Result<OwnedFd, Failure> {
    let f = std::fs::File::open(path).map_err(|e| at(path, e))?;
    match flock(&f, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(f.into()),
        Err(_) => Err(Failure::failed(format!(
            "{}: another `mojim replace` is at work",
            path.display()
        ))),
    }
}

/// Replaces the file's text atomically and durably. Its permissions and owner stay.
fn put(path: &Path, text: &str) -> Result<(), Failure> {
    let at = |e: std::io::Error| at(path, e);
    let mut new = path.to_owned().into_os_string();
    new.push(format!(".{}", std::process::id()));
    let before = std::fs::metadata(path).map_err(at)?;
    let written = (|| {
        let mut f = std::fs::File::create_new(&new)?;
        f.set_permissions(before.permissions())?;
        let now = f.metadata()?;
        if (now.uid(), now.gid()) != (before.uid(), before.gid()) {
            std::os::unix::fs::fchown(&f, Some(before.uid()), Some(before.gid()))?;
        }
        f.write_all(text.as_bytes())?;
        f.sync_all()?;
        std::fs::rename(&new, path)
    })();
    if written.is_err() {
        // The temporary file may not be there.
        let _ = std::fs::remove_file(&new);
    }
    written.map_err(at)?;
    if let Some(dir) = path.parent() {
        let synced = std::fs::File::open(dir).and_then(|d| d.sync_all());
        synced.map_err(at)?;
    }
    Ok(())
}

/// Which nodes have read the file.
#[derive(Default)]
struct Readers {
    /// The node that was asked to read the file, and since when.
    asked: Option<(String, Instant)>,
    /// The nodes that have read it.
    have: BTreeSet<String>,
}

impl Readers {
    /// Has the nodes read the file, one after the other, so that a majority of voters is
    /// there. Returns what is waited for, and which nodes do not answer.
    fn go_on(&mut self, config: &Config, new: &str) -> Result<(Vec<String>, Vec<String>), Failure> {
        let (mut waits, mut unreachable) = (Vec::new(), Vec::new());
        let sum = config.sum();
        let pulse = |n| ask(config, n, SHORT, &Request::Pulse).is_ok();
        for n in config.nodes.values() {
            let mine = self.asked.as_ref().is_some_and(|(a, _)| *a == n.name);
            if self.asked.is_some() && !mine || self.have.contains(&n.name) {
                continue;
            }
            match ask(config, n, SHORT, &Request::Reload { sum: sum.into() }) {
                Ok(v) if v["reloads"] == true => {
                    let since = Instant::now();
                    self.asked.get_or_insert((n.name.clone(), since));
                    return Ok((
                        vec![format!("node {} reads its configuration again", n.name)],
                        unreachable,
                    ));
                }
                Ok(_) => {
                    self.have.insert(n.name.clone());
                    self.asked = None;
                }
                Err(f) if mine => {
                    let since = self.asked.as_ref().map(|(_, since)| since.elapsed());
                    if since > Some(BACK) {
                        return Err(Failure::failed(format!(
                            "node {} has not come back since it was asked to read the file: {}",
                            n.name, f.text
                        )));
                    }
                    waits.push(format!("node {} reads its configuration again", n.name));
                    return Ok((waits, unreachable));
                }
                Err(f) if pulse(n) => waits.push(f.text),
                Err(f) if n.name == new => waits.push(format!(
                    "{}: start `mojim node --config {} --name {new}` there",
                    f.text,
                    config.path.display()
                )),
                Err(_) => unreachable.push(n.name.clone()),
            }
        }
        Ok((waits, unreachable))
    }
}

/// Asks for the next step. Returns what is still waited for, and the outcome so far.
fn look(
    config: &Config,
    new: &str,
    readers: &mut Readers,
) -> Result<(Vec<String>, Value), Failure> {
    let (mut waits, unreachable) = readers.go_on(config, new)?;
    if !waits.is_empty() {
        return Ok((waits, json!({})));
    }
    let voters: BTreeSet<String> = config.voters().iter().map(|n| n.name.clone()).collect();
    if voters.len() >= AUTOMATIC_VOTERS && voters.contains(new) {
        let says = |n: &&mojim_config::Node| {
            let answer = ask(config, n, SHORT, &Request::Voters).ok()?;
            serde_json::from_value::<BTreeSet<String>>(answer).ok()
        };
        // The new node knows the voters when it has the others' log.
        let known = config.nodes.get(new).as_ref().and_then(says);
        if known.as_ref() != Some(&voters) {
            waits.push(format!("node {new} is to become a voter"));
        }
    }
    let mut volumes = Vec::new();
    let all = gather(config, None);
    for v in config.volumes.values() {
        if !v.data_nodes().contains(&new) {
            continue;
        }
        let rows = all["volumes"].as_array().into_iter().flatten();
        let row = rows.filter(|r| r["volume"] == v.name.as_str());
        let nodes: Vec<&Value> = row.flat_map(|r| r["nodes"].as_array()).flatten().collect();
        match copied(v, &nodes, new) {
            Ok(state) => volumes.push(state),
            Err(why) => waits.push(format!("volume {}: {why}", v.name)),
        }
    }
    let outcome = json!({ "voters": voters, "volumes": volumes, "unreachable": unreachable });
    Ok((waits, outcome))
}

/// Whether the new node follows, by what the nodes of a volume say; otherwise
/// what is waited for.
fn copied(v: &Volume, nodes: &[&Value], new: &str) -> Result<Value, String> {
    let mine = nodes.iter().find(|n| n["node"] == new);
    let mine = *mine.ok_or("it does not answer")?;
    let done = |note: Option<&str>| {
        Ok(json!({
            "volume": v.name, "last_lsn": mine["last_lsn"], "role": mine["role"], "note": note,
        }))
    };
    if mine["copy"]["running"] == true {
        let number = |k: &str| mine["copy"][k].as_u64().unwrap_or(0);
        let (part, whole) = (number("done"), number("total"));
        return Err(format!(
            "{} % of {} MiB are copied",
            (part * 100).checked_div(whole).unwrap_or(100) / 10 * 10,
            whole >> 20
        ));
    }
    let follows = mine["state"] == "whole" && mine["link"]["up"] == true;
    if follows || mine["role"] == "primary" {
        return done(None);
    }
    let Some(primary) = nodes.iter().find(|n| n["attached"] == true) else {
        return done(Some("it gets its copy when the program runs again"));
    };
    if v.failover == Failover::Manual && v.mirror.as_deref() == Some(new) {
        let who = primary["node"].as_str().unwrap_or("");
        return done(Some(&format!(
            "without a register a program finds its new mirror when it starts: start it again on node {who}"
        )));
    }
    Err(format!("node {new} waits for its copy"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"# the cluster
cluster = "c"
failure_limit = "3s"

[volume.v]
primary = "a"   # began here
mirror = "b"
backups = ["x", "y"]

[node.a]
address = "127.0.0.1:1"
directory = "/d/a"

[node.b]
address = "127.0.0.1:2"
directory = "/d/b"
log = { size = "32MiB" }

[node.x]
address = "127.0.0.1:3"
directory = "/d/x"

[node.y]
address = "127.0.0.1:4"
directory = "/d/y"
vote = false
"#;

    fn replace(old: &str, new: &str) -> Replace {
        Replace {
            config: "/c.toml".into(),
            name: Some(old.into()),
            with: Some(new.into()),
            same_name: None,
            address: Some("127.0.0.1:9".parse().unwrap()),
            directory: None,
            dry_run: false,
            timeout: None,
            json: false,
        }
    }

    fn roles(c: &Config) -> Vec<String> {
        let v = &c.volumes["v"];
        v.data_nodes().into_iter().map(String::from).collect()
    }

    fn change(text: &str, r: &Replace, primary: &str) -> Config {
        let before = Config::parse(text, Path::new("/c.toml")).unwrap();
        r.check_names(&before).unwrap();
        let primaries = [("v".to_owned(), primary.to_owned())];
        let text = r.changed(text, &before, &primaries).unwrap();
        assert!(text.starts_with("# the cluster\n"));
        Config::parse(&text, Path::new("/c.toml")).unwrap()
    }

    #[test]
    fn a_mirror_s_place_with_all_that_belongs_to_it() {
        let c = change(FILE, &replace("b", "d"), "a");
        assert_eq!(roles(&c), ["a", "d", "x", "y"]);
        let d = &c.nodes["d"];
        assert_eq!((d.place(), d.log.size), ("b", 32 << 20));
        assert_eq!(d.address.port(), 9);
        assert!(is_done(&c, "b", "d") && !c.nodes.contains_key("b"));
    }

    #[test]
    fn who_became_primary_is_named_as_it() {
        let c = change(FILE, &replace("a", "d"), "x");
        assert_eq!(roles(&c), ["x", "b", "d", "y"]);
        let c = change(FILE, &replace("a", "d"), "b");
        assert_eq!(roles(&c), ["b", "d", "x", "y"]);
        // Replacing a node that was not the first primary changes nothing else.
        let c = change(FILE, &replace("y", "d"), "x");
        assert_eq!(roles(&c), ["a", "b", "x", "d"]);
        assert!(!c.nodes["d"].vote);
    }

    #[test]
    fn a_place_may_change_again_and_keeps_its_rank() {
        let r = replace("b", "d");
        let before = Config::parse(FILE, Path::new("/c.toml")).unwrap();
        let primaries = [("v".to_owned(), "a".to_owned())];
        let text = r.changed(FILE, &before, &primaries).unwrap();
        let again = Replace {
            address: Some("127.0.0.1:10".parse().unwrap()),
            ..replace("d", "zz")
        };
        let c = change(&text, &again, "a");
        assert_eq!(c.nodes["zz"].replaces, ["b", "d"]);
        for n in ["a", "x", "y"] {
            let rank = |c: &Config| {
                mojim_replica::layout::store(
                    c,
                    &c.nodes[n],
                    &c.volumes["v"],
                    mojim_env::Locker::Node,
                )
                .rank
            };
            assert_eq!(rank(&before), rank(&c));
        }
    }

    #[test]
    fn names_that_cannot_be() {
        let c = Config::parse(FILE, Path::new("/c.toml")).unwrap();
        for (old, new) in [("b", "b"), ("z", "d"), ("b", "x")] {
            assert!(replace(old, new).check_names(&c).is_err(), "{old} {new}");
        }
        let nowhere = Replace {
            address: None,
            ..replace("b", "d")
        };
        assert!(nowhere.check_names(&c).is_err());
    }
}
