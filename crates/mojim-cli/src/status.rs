//! `mojim status`: what every node says of the volumes, side by side.
//!
//! Owns the questions and the tables; what counts as an ill is `well`'s affair.

use std::io::Write;
use std::path::PathBuf;

use mojim_config::{Config, Failover, MediumKind, Mode, Node, Volume};
use mojim_replica::request::Request;
use serde_json::{Map, Value, json};

use crate::ask::{Asked, SHORT, ask, is_answer, load, plain};
use crate::failure::Done;
use crate::well::{Expected, Ill, Voter, backup_line, copies, ills, is_stale, role};

/// Ask every node for its volumes: roles, epochs, LSNs, links.
///
/// Exit code 0 if every volume that was asked about is well, 1 if one is not, 2 if the command
/// line or the configuration is wrong. A volume is well if every node that holds it answers with
/// a whole copy that it can use, of the newest view, and with room for what its log holds; if its
/// primary has its mirror; if each backup follows and lags by no more than secondary_threshold;
/// if every voter answers and the register of views can be read. That holds with and without a
/// program: without one, no link is missed, but a copy that lacks what another one has
/// committed is. A volume that no program has used yet has nothing to copy.
///
/// After the loss of a mirror that had acknowledged what the primary's own log did not have yet, the
/// primary's node says how much of that is in its memory only (with --json `at_risk_bytes`, while
/// there is some), and how much it was the last time, and for how long (`last_risk`, with `bytes`
/// and `milliseconds`). That makes no volume less well.
///
/// Below the nodes is said, for each copy that is neither the primary's nor its mirror's, whom it
/// follows and how much it has, and which voters answer. A role of an older view is `was primary` or
/// `was mirror`; with --json such a node has `stale`, and the volume has `voters`, each with `answers`.
///
/// What is not well is printed below the volume; with --json it is the list `ills`, each with
/// `volume`, `node` (null where it is none's), `kind` (unreachable, refused, voter, quorum,
/// promotion, primaries, copy, failed, room, stale, alone, link, behind, backup-away, backup-lag), `text`
/// and `do`, what to do about it.
#[derive(clap::Args)]
pub struct Status {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only this volume.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Say also which nodes have the sync point of this number, and how safe it is there.
    #[arg(long, value_name = "LSN")]
    lsn: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Status {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        if let Some(v) = &self.volume {
            config.volume(Some(v))?;
        }
        let mut all = gather(&config, self.volume.as_deref());
        if let Some(lsn) = self.lsn {
            let persists = |n: &str| {
                let node = config.nodes.get(n);
                node.is_some_and(|n| n.log.medium != MediumKind::Dram)
            };
            for v in all["volumes"].as_array_mut().into_iter().flatten() {
                let nodes = v["nodes"].as_array().cloned().unwrap_or_default();
                let copies = copies(lsn, &nodes, persists);
                v["copies"] = json!({ "lsn": lsn, "nodes": copies });
            }
        }
        let well = all["ok"] == true;
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{all:#}")?;
        } else {
            out.write_all(text(&all).as_bytes())?;
        }
        Ok(if well { 0 } else { 1 })
    }
}

/// The nodes that hold a volume, its first primary first.
pub fn holders<'a>(config: &'a Config, volume: &'a Volume) -> Vec<&'a Node> {
    volume
        .data_nodes()
        .into_iter()
        .filter_map(|n| config.nodes.get(n))
        .collect()
}

/// Asks all nodes at the same time and puts the answers together by volume.
pub fn gather(config: &Config, only: Option<&str>) -> Value {
    let volumes: Vec<&Volume> = config
        .volumes
        .values()
        .filter(|v| only.is_none_or(|o| o == v.name))
        .collect();
    let nodes: Vec<&Node> = config
        .nodes
        .values()
        .filter(|n| {
            volumes
                .iter()
                .any(|v| holders(config, v).iter().any(|h| h.name == n.name))
        })
        .collect();
    // Who votes and holds no copy of these volumes is asked whether it is there.
    let decided = volumes.iter().any(|v| v.failover == Failover::Automatic);
    let mut voters = config.voters();
    voters.retain(|_| decided);
    let others = voters
        .iter()
        .filter(|w| nodes.iter().all(|n| n.name != w.name));
    let all = nodes.iter().chain(others).copied();
    let answers: Map<String, Value> = std::thread::scope(|s| {
        let asked: Vec<_> = all
            .map(|n| {
                let mut of = volumes.clone();
                of.retain(|v| v.data_nodes().contains(&n.name.as_str()));
                (n, s.spawn(move || ask_node(config, n, &of)))
            })
            .collect();
        asked
            .into_iter()
            .map(|(n, t)| {
                let failed = |_| json!({ "error": "the question failed" });
                (n.name.clone(), t.join().unwrap_or_else(failed))
            })
            .collect()
    });
    let vote = |n: &&Node| {
        let answer = &answers[&n.name];
        let full = || {
            let free = answer["free"].as_u64().filter(|f| *f < VOTES)?;
            Some(format!(
                "node {}: {} KiB are free in its directory, where the votes on views go",
                n.name,
                free >> 10
            ))
        };
        let why = answer["error"].as_str().map(str::to_owned).or_else(full);
        let holds = nodes.iter().any(|h| h.name == n.name);
        Voter {
            name: n.name.clone(),
            answers: answers_at_all(answer),
            error: why.filter(|_| !holds),
            unread: answer["unread"].as_str().map(str::to_owned),
        }
    };
    let voters: Vec<Voter> = voters.iter().map(vote).collect();
    let mut well = true;
    let mut rows = Vec::new();
    for v in volumes {
        let mut nodes: Vec<Value> = holders(config, v)
            .iter()
            .map(|n| {
                let answer = &answers[&n.name];
                let mut row = answer["volumes"]
                    .as_array()
                    .and_then(|a| a.iter().find(|s| s["volume"] == v.name.as_str()))
                    .cloned()
                    .unwrap_or_else(|| {
                        let unknown = || format!("node {} does not know this volume", n.name);
                        let why = answer["error"].as_str().map_or_else(unknown, str::to_owned);
                        json!({ "error": why })
                    });
                row["reachable"] = json!(answers_at_all(answer));
                row["node"] = json!(n.name);
                row["address"] = json!(n.address.to_string());
                if let Some(o) = row.as_object_mut() {
                    o.remove("volume");
                    o.remove("mode");
                }
                row
            })
            .collect();
        let expected = Expected {
            mirrored: v.mirror.is_some(),
            waits: !matches!(v.mode, Mode::Unreplicated | Mode::Async),
            threshold: v.secondary_threshold,
            voters: match v.failover {
                Failover::Automatic => &voters,
                Failover::Manual => &[],
            },
        };
        let ills = ills(&expected, &nodes);
        well &= ills.is_empty();
        let of = |i: &Ill| i.to_json(&v.name);
        let ills: Vec<Value> = ills.iter().map(of).collect();
        let votes = expected.voters.iter();
        let votes: Vec<Value> = votes
            .map(|v| json!({ "node": v.name, "answers": v.answers }))
            .collect();
        let stale: Vec<bool> = nodes.iter().map(|n| is_stale(n, &nodes)).collect();
        for (n, stale) in nodes.iter_mut().zip(stale) {
            n["stale"] = json!(stale);
        }
        rows.push(json!({
            "volume": v.name,
            "mode": v.mode.as_str(),
            "ok": ills.is_empty(),
            "ills": ills,
            "nodes": nodes,
            "voters": votes,
        }));
    }
    json!({ "cluster": config.cluster, "ok": well, "volumes": rows })
}

/// Whether a node's daemon answered, if only that it does not want to.
fn answers_at_all(answer: &Value) -> bool {
    answer["error"].is_null() || answer["answered"] == true
}

/// Bytes that a voter without a copy should have free: many times its log.
const VOTES: u64 = 16 << 20;

/// What a node says of these volumes. Its register is asked for apart: during an
/// election that takes long, and then the node is there all the same.
fn ask_node(config: &Config, node: &Node, volumes: &[&Volume]) -> Value {
    let question = Request::Status {
        volume: None,
        register: false,
    };
    let asked = Asked::connect(config, node, SHORT);
    let mut asked = match asked {
        Ok(a) => a,
        Err(f) => return json!({ "error": f.text }),
    };
    let who = asked.who().to_owned();
    let mut answer = match asked.ask(&question) {
        Ok(v) => v,
        Err(e) => {
            // Who says no is there.
            let answered = is_answer(&e);
            let says = if answered { "" } else { " does not answer" };
            return json!({ "error": format!("{who}{says}: {}", plain(&e)), "answered": answered });
        }
    };
    if answer["node"] != node.name.as_str() {
        let other = format!("{who} says that it is node {}", answer["node"]);
        return json!({ "error": other, "answered": true });
    }
    let mut lost = None;
    for v in volumes.iter().filter(|v| v.failover == Failover::Automatic) {
        let register = match &lost {
            // Whoever cannot read one can read none.
            Some(e) => json!({ "error": e }),
            None => {
                let volume = v.name.clone();
                match ask(config, node, SHORT, &Request::ViewRead { volume }) {
                    Ok(r) => r,
                    Err(f) => json!({ "error": lost.insert(f.text) }),
                }
            }
        };
        let rows = answer["volumes"].as_array_mut().into_iter().flatten();
        for row in rows.filter(|r| r["volume"] == v.name.as_str()) {
            row["register"] = register.clone();
        }
    }
    // Who holds no copy of them votes all the same.
    let mut decided = config.volumes.values();
    if volumes.is_empty()
        && let Some(v) = decided.find(|v| v.failover == Failover::Automatic)
        && let Err(f) = ask(
            config,
            node,
            SHORT,
            &Request::ViewRead {
                volume: v.name.clone(),
            },
        )
    {
        answer["unread"] = json!(f.text);
    }
    answer
}

fn text(all: &Value) -> String {
    let mut t = String::new();
    let empty = Vec::new();
    for v in all["volumes"].as_array().unwrap_or(&empty) {
        let word = if v["ok"] == true { "well" } else { "degraded" };
        t += &format!(
            "volume {}  mode {}  {word}\n",
            v["volume"].as_str().unwrap_or(""),
            v["mode"].as_str().unwrap_or("")
        );
        let mut rows = vec![
            [
                "  node", "role", "epoch", "state", "last LSN", "applied", "program", "link",
                "behind",
            ]
            .map(String::from),
        ];
        let nodes = v["nodes"].as_array().unwrap_or(&empty);
        // Without a program there is no link, and none is missing.
        let in_use = nodes.iter().any(|n| n["attached"] == true);
        for n in nodes {
            let s = |k: &str| match &n[k] {
                Value::String(s) => s.clone(),
                Value::Null => "-".into(),
                other => other.to_string(),
            };
            let link = match (
                &n["link"]["up"],
                n["link"]["round_trip_us"].as_f64(),
                n["link"]["heard_ms"].as_u64(),
            ) {
                (Value::Bool(true), Some(us), _) => format!("up, {us:.0} us"),
                (Value::Bool(true), _, Some(ms)) => format!("up, heard {ms} ms ago"),
                (Value::Bool(true), ..) => "up".into(),
                (Value::Bool(false), ..) if in_use => "down".into(),
                _ => "-".into(),
            };
            rows.push(if n["reachable"] == true {
                [
                    format!("  {}", s("node")),
                    role(n, nodes).to_owned(),
                    s("epoch"),
                    match n["error"].is_null() {
                        true => s("state"),
                        false => "unusable".to_owned(),
                    },
                    s("last_lsn"),
                    s("applied"),
                    n["pid"].as_u64().map_or("-".into(), |p| format!("pid {p}")),
                    link,
                    n["bytes_behind"]
                        .as_u64()
                        .map_or("-".into(), |b| format!("{b} B")),
                ]
            } else {
                let mut row = std::array::from_fn(|_| "-".to_owned());
                row[0] = format!("  {}", s("node"));
                row[1] = "no answer".into();
                row
            });
        }
        t += &columns(&rows);
        for n in nodes {
            if let Some(line) = backup_line(n, nodes) {
                t += &format!("  {line}{}\n", lag_of(n, nodes));
            }
            t += &at_risk(n);
            t += &copying(n).unwrap_or_default();
        }
        t += &votes(v);
        for c in v["copies"]["nodes"].as_array().unwrap_or(&empty) {
            let applied = match c["applied"] == true {
                true => ", applied",
                false => "",
            };
            t += &format!(
                "  LSN {} on node {}: {}{applied}\n",
                v["copies"]["lsn"],
                c["node"].as_str().unwrap_or(""),
                c["level"].as_str().unwrap_or(""),
            );
        }
        for i in v["ills"].as_array().unwrap_or(&empty) {
            t += &format!("  ! {}\n", i["text"].as_str().unwrap_or(""));
            t += &format!("    what to do: {}\n", i["do"].as_str().unwrap_or(""));
        }
    }
    t
}

/// The line about who votes, if somebody does.
fn votes(v: &Value) -> String {
    let empty = Vec::new();
    let all = v["voters"].as_array().unwrap_or(&empty);
    let here = |answers: bool| -> Vec<&str> {
        let of = all.iter().filter(|v| (v["answers"] == true) == answers);
        of.filter_map(|v| v["node"].as_str()).collect()
    };
    let away = match here(false) {
        away if away.is_empty() => String::new(),
        away => format!("; no answer from {}", away.join(", ")),
    };
    match all.len() {
        0 => String::new(),
        n => format!(
            "  voters, of which {} are needed: {} answer{away}\n",
            n / 2 + 1,
            here(true).join(", ")
        ),
    }
}

/// How many bytes a node lacks, by who forwards to it.
fn lag_of(n: &Value, nodes: &[Value]) -> String {
    let rows = nodes.iter().filter(|f| f["node"] == n["link"]["primary"]);
    let mut rows = rows.filter_map(|f| f["backups"].as_array()).flatten();
    let row = rows.find(|r| r["node"] == n["node"] && r["active"] == true);
    match row.and_then(|r| r["lag"].as_u64()) {
        Some(lag @ 1..) => format!(", {lag} B to go"),
        _ => String::new(),
    }
}

/// The lines about what only a primary has, or had, in its memory, since its mirror was lost.
fn at_risk(n: &Value) -> String {
    let mut t = String::new();
    let name = n["node"].as_str().unwrap_or("");
    if let Some(bytes) = n["at_risk_bytes"].as_u64() {
        t += &format!(
            "  node {name}: {bytes} B that its lost mirror had acknowledged are in its memory only\n"
        );
    }
    let last = &n["last_risk"];
    if let (Some(bytes @ 1..), Some(ms)) = (last["bytes"].as_u64(), last["milliseconds"].as_f64()) {
        t += &format!(
            "  node {name}: its mirror was lost, and {bytes} B were in its memory only, for {ms:.1} ms\n"
        );
    }
    t
}

/// The line about a copy that comes to a node, or goes from it.
fn copying(n: &Value) -> Option<String> {
    let c = &n["copy"];
    if c["running"] != true {
        return None;
    }
    let number = |k: &str| c[k].as_u64().unwrap_or(0);
    let (done, total) = (number("done"), number("total"));
    Some(format!(
        "  node {}: a copy {}: {} of {} MiB ({} %), {} MiB sent for it\n",
        n["node"].as_str().unwrap_or(""),
        if c["direction"] == "in" {
            "comes in"
        } else {
            "is given"
        },
        done >> 20,
        total >> 20,
        (done * 100).checked_div(total).unwrap_or(100),
        number("moved") >> 20,
    ))
}

/// Rows as lines whose columns begin below each other.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: [usize; N] =
        std::array::from_fn(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0));
    let mut t = String::new();
    for r in rows {
        let mut line = String::new();
        for (cell, &width) in r.iter().zip(&widths) {
            line += &format!("{cell:<width$}  ");
        }
        t += line.trim_end();
        t.push('\n');
    }
    t
}
