//! `mojim replace`: gives the place of a lost node to another one.
//!
//! Owns the change of the configuration file, and the order in which the nodes
//! learn of it. What follows from it they do themselves: the voters by their
//! log, who forwards by sending the new node a copy. So it may be ended and run
//! again at any point.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim::config::{AUTOMATIC_VOTERS, Config, Failover, Role, Volume};
use serde_json::{Value, json};
use toml_edit::{Array, DocumentMut, Item, value};

use crate::ask::{SHORT, ask, load};
use crate::failure::{Done, Failure, say_on_stderr};
use crate::status::gather;

/// Between two looks at what the nodes do by themselves.
const LOOK: Duration = Duration::from_millis(200);

/// Give the place of a node that is lost for good to another one.
///
/// Changes the configuration file: the new node has the old one's vote and its part in each volume.
/// Then has every node read its file again (copy it to each first, where it is not the same file),
/// and waits until the new node votes and has a copy of each volume. Sync points go on meanwhile.
/// It may be interrupted and run again. The old node must be ended, and is refused from then on.
#[derive(clap::Args)]
pub struct Replace {
    /// The configuration file; it is changed.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The node that is lost.
    #[arg(long, value_name = "OLD")]
    name: String,
    /// The node that takes its place: one of the file that holds no volume, or a new one.
    #[arg(long, value_name = "NEW")]
    with: String,
    /// Where the new node listens; asked for where the file does not have it yet.
    #[arg(long, value_name = "IP:PORT")]
    address: Option<SocketAddr>,
    /// Its directory; otherwise the same path as the old node's.
    #[arg(long, value_name = "DIR", requires = "address")]
    directory: Option<PathBuf>,
    /// Print the file as it would be, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Give up waiting after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

impl Replace {
    /// Runs it.
    pub fn run(self) -> Done {
        let (old, new) = (&*self.name, &*self.with);
        let mut config = load(&self.config)?;
        if !is_done(&config, old, new) {
            self.check_names(&config)?;
            let primaries = check_nodes(&config, old)?;
            let text = std::fs::read_to_string(&self.config)?;
            let text = self.changed(&text, &config, &primaries)?;
            config = Config::parse(&text, &self.config)?;
            self.check_logs(&config)?;
            if self.dry_run {
                write!(std::io::stdout(), "{text}")?;
                return Ok(0);
            }
            put(&self.config, &text)?;
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
        loop {
            let (waits, outcome) = look(&config, new);
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

    fn check_names(&self, config: &Config) -> Result<(), Failure> {
        let (old, new) = (&*self.name, &*self.with);
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

    /// A running primary makes no records that the smallest log cannot take; it
    /// does not look again.
    fn check_logs(&self, config: &Config) -> Result<(), Failure> {
        let new = config.node(&self.with)?;
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

    /// The file's text, with `new` in `old`'s place. `primaries`: who is primary
    /// of which volume.
    fn changed(
        &self,
        text: &str,
        config: &Config,
        primaries: &[(String, String)],
    ) -> Result<String, Failure> {
        let (old, new) = (&*self.name, &*self.with);
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
            table.insert("address", value(at.to_string()));
            if let Some(dir) = &self.directory {
                table.insert("directory", value(dir.display().to_string()));
            }
        }
        let table = nodes.get_mut(new).and_then(Item::as_table_like_mut);
        let table = table.ok_or_else(|| bad("a node is a table"))?;
        table.insert("replaces", value(Array::from_iter(replaces)));
        if config.node(old)?.vote {
            table.remove("vote");
        }
        for v in config.volumes.values() {
            let now = primaries.iter().find(|(volume, _)| *volume == v.name);
            // Who is primary by now is named as the first; the new node gets
            // what is left.
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
            table.insert("primary", value(renamed(&v.primary)));
            if let Some(m) = &v.mirror {
                table.insert("mirror", value(renamed(m)));
            }
            if !v.backups.is_empty() {
                let names = v.backups.iter().map(|b| renamed(b));
                table.insert("backups", value(Array::from_iter(names)));
            }
        }
        Ok(doc.to_string())
    }

    fn report(&self, outcome: Value) -> Done {
        let mut out = std::io::stdout().lock();
        if self.json {
            let mut outcome = outcome;
            outcome["config"] = json!(self.config.display().to_string());
            outcome["replaced"] = json!(self.name);
            outcome["with"] = json!(self.with);
            writeln!(out, "{outcome}")?;
            return Ok(0);
        }
        let mut t = format!("node {} has the place of node {}\n", self.with, self.name);
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
        out.write_all(t.as_bytes())?;
        Ok(0)
    }
}

/// Whether the file says so already.
fn is_done(config: &Config, old: &str, new: &str) -> bool {
    let n = config.nodes.get(new);
    n.is_some_and(|n| n.replaces.last().is_some_and(|r| r == old))
}

/// The old node is ended, and what it held is elsewhere. Who is primary of its
/// volumes.
fn check_nodes(config: &Config, old: &str) -> Result<Vec<(String, String)>, Failure> {
    let node = config.node(old)?;
    if ask(config, node, SHORT, "pulse", json!({})).is_ok() {
        return Err(Failure::failed(format!(
            "node {old} still runs at {}; end its daemon and the programs there first",
            node.address
        )));
    }
    let all = gather(config, None);
    let mut primaries = Vec::new();
    for v in config.volumes.values() {
        if !v.data_nodes().contains(&old) {
            continue;
        }
        let rows = all["volumes"].as_array().into_iter().flatten();
        let row = rows.filter(|r| r["volume"] == v.name.as_str());
        let nodes: Vec<&Value> = row.flat_map(|r| r["nodes"].as_array()).flatten().collect();
        let name = |n: &Value| n["node"].as_str().unwrap_or("").to_owned();
        if !nodes.iter().any(|n| n["reachable"] == true) {
            return Err(Failure::failed(format!(
                "no other node of volume {} answers: nothing is known of its primary",
                v.name
            )));
        }
        // By the register, else by the greatest epoch that a node knows.
        let registered = nodes
            .iter()
            .find_map(|n| n["register"]["primary"]["node"].as_str());
        let newest = nodes.iter().max_by_key(|n| n["epoch"].as_u64());
        let viewed = newest.and_then(|n| n["view"]["primary"].as_str());
        let primary = registered.or(viewed).filter(|p| !p.is_empty());
        let primary = primary.unwrap_or(&v.primary).to_owned();
        if primary == old {
            return Err(Failure::failed(format!(
                "node {old} is the primary of volume {}: another has to take over first{}",
                v.name,
                match v.failover {
                    Failover::Automatic => ", as its mirror does by itself",
                    Failover::Manual => " (`mojim promote`)",
                }
            )));
        }
        let whole = |n: &&Value| n["state"] == "whole" || n["role"] == "primary";
        if !nodes.iter().any(|n| whole(n) && name(n) != old) {
            return Err(Failure::failed(format!(
                "no other node that answers has a whole copy of volume {}",
                v.name
            )));
        }
        primaries.push((v.name.clone(), primary));
    }
    Ok(primaries)
}

/// The file's new text in its place, at one moment.
fn put(path: &Path, text: &str) -> Result<(), Failure> {
    // Through links: it is the file that changes.
    let path = std::fs::canonicalize(path)?;
    let mut new = path.clone().into_os_string();
    new.push(".new");
    let at = |e: std::io::Error| Failure::from(e).at(&path.display().to_string());
    let mode = std::fs::metadata(&path).map_err(at)?.permissions();
    let mut f = std::fs::File::create(&new).map_err(at)?;
    f.set_permissions(mode).map_err(at)?;
    f.write_all(text.as_bytes()).map_err(at)?;
    f.sync_all().map_err(at)?;
    std::fs::rename(&new, &path).map_err(at)?;
    if let Some(dir) = path.parent() {
        std::fs::File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(at)?;
    }
    Ok(())
}

/// Moves on what has to be asked for; what is still waited for, and how things
/// stand.
fn look(config: &Config, new: &str) -> (Vec<String>, Value) {
    let mut waits = Vec::new();
    let mut unreachable = Vec::new();
    let sum = config.sum();
    for n in config.nodes.values() {
        match ask(config, n, SHORT, "reload", json!({ "sum": sum })) {
            // One after the other, so that a majority of voters is there.
            Ok(v) if v["reloads"] == true => {
                waits.push(format!("node {} reads its configuration again", n.name));
                break;
            }
            Ok(_) => {}
            Err(f) if ask(config, n, SHORT, "pulse", json!({})).is_ok() => waits.push(f.text),
            Err(f) if n.name == new => waits.push(format!(
                "{}: start `mojim node --config {} --name {new}` there",
                f.text,
                config.path.display()
            )),
            Err(_) => unreachable.push(n.name.clone()),
        }
    }
    if !waits.is_empty() {
        return (waits, json!({}));
    }
    let voters: BTreeSet<String> = config.voters().iter().map(|n| n.name.clone()).collect();
    if voters.len() >= AUTOMATIC_VOTERS && voters.contains(new) {
        let says = |n: &&mojim::config::Node| {
            let answer = ask(config, n, SHORT, "voters", json!({})).ok()?;
            serde_json::from_value::<BTreeSet<String>>(answer).ok()
        };
        // The new one knows it when it has the others' log.
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
    (waits, outcome)
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
    if mine["state"] == "whole" && mine["link"]["up"] == true {
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
            name: old.into(),
            with: new.into(),
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
        // One that is lost and was not the first primary changes nothing else.
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
            let rank = |c: &Config| mojim::layout::store(c, &c.nodes[n], &c.volumes["v"]).rank;
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
