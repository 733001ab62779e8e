//! `mojim status`: what every node says of the volumes, side by side.

use std::io::Write;
use std::path::PathBuf;

use mojim::config::{Config, Node, Volume};
use serde_json::{Map, Value, json};

use crate::ask::{SHORT, ask, load};
use crate::failure::Done;

/// Ask every node for its volumes: roles, epochs, LSNs, links.
///
/// Exit code 0 if all is well, 1 if something is degraded: a node does not answer, a copy is lost,
/// incomplete or not a member of its view, a link is down, or two nodes take themselves for the
/// primary. What is wrong is printed below each volume.
#[derive(clap::Args)]
pub struct Status {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only this volume.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
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
        let all = gather(&config, self.volume.as_deref());
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
    let answers: Map<String, Value> = std::thread::scope(|s| {
        let asked: Vec<_> = nodes
            .iter()
            .map(|n| (n, s.spawn(|| ask(config, n, SHORT, "status", json!({})))))
            .collect();
        asked
            .into_iter()
            .map(|(n, t)| {
                let answer = match t.join() {
                    Ok(Ok(v)) => v,
                    Ok(Err(f)) => json!({ "error": f.text }),
                    Err(_) => json!({ "error": "the question failed" }),
                };
                (n.name.clone(), answer)
            })
            .collect()
    });
    let mut well = true;
    let mut rows = Vec::new();
    for v in volumes {
        let nodes: Vec<Value> = holders(config, v)
            .iter()
            .map(|n| {
                let answer = &answers[&n.name];
                let mut row = answer["volumes"]
                    .as_array()
                    .and_then(|a| a.iter().find(|s| s["volume"] == v.name.as_str()))
                    .cloned()
                    .unwrap_or_else(|| {
                        let why = answer["error"]
                            .as_str()
                            .unwrap_or("it does not know this volume");
                        json!({ "error": why })
                    });
                row["reachable"] = json!(answer.get("error").is_none());
                row["node"] = json!(n.name);
                row["address"] = json!(n.address.to_string());
                if let Some(o) = row.as_object_mut() {
                    o.remove("volume");
                    o.remove("mode");
                }
                row
            })
            .collect();
        let wrong = wrong(v, &nodes);
        well &= wrong.is_empty();
        rows.push(json!({
            "volume": v.name,
            "mode": v.mode.as_str(),
            "ok": wrong.is_empty(),
            "wrong": wrong,
            "nodes": nodes,
        }));
    }
    json!({ "cluster": config.cluster, "ok": well, "volumes": rows })
}

/// Everything about a volume that is not as it should be.
fn wrong(v: &Volume, nodes: &[Value]) -> Vec<String> {
    let mut wrong = Vec::new();
    let text = |n: &Value, k: &str| n[k].as_str().unwrap_or("").to_owned();
    for n in nodes {
        let name = text(n, "node");
        if let Some(e) = n["error"].as_str() {
            wrong.push(if n["reachable"] == true {
                format!("node {name}: {e}")
            } else {
                e.to_owned()
            });
        }
    }
    let epoch = |n: &Value| n["epoch"].as_u64().unwrap_or(0);
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    let first: Vec<&Value> = nodes
        .iter()
        .filter(|n| n["role"] == "primary" && epoch(n) == newest)
        .collect();
    if newest > 0 && nodes.iter().all(|n| n["reachable"] == true) && first.len() != 1 {
        wrong.push(format!(
            "{} nodes are primary in epoch {newest}",
            first.len()
        ));
    }
    for n in nodes
        .iter()
        .filter(|n| n["reachable"] == true && n.get("error").is_none())
    {
        let name = text(n, "node");
        if newest > 0 {
            match n["state"].as_str() {
                Some("whole") => {}
                Some("new") => wrong.push(format!("node {name} has no copy yet")),
                Some(s) => wrong.push(format!("the copy of node {name} is {s}")),
                None => {}
            }
        }
        if n["role"] == "primary" && epoch(n) < newest {
            wrong.push(format!(
                "node {name} was primary until epoch {newest} and has not been brought up to date"
            ));
        }
    }
    for n in nodes {
        for b in n["backups"].as_array().into_iter().flatten() {
            if b["active"] != true {
                wrong.push(format!(
                    "node {} does not reach backup {}",
                    text(n, "node"),
                    text(b, "node")
                ));
            }
        }
    }
    if let (Some(p), Some(_)) = (first.first(), &v.mirror)
        && newest > 0
    {
        let name = text(p, "node");
        if p["view"]["mirror"] == "" {
            wrong.push(format!(
                "node {name} is alone: what it commits has one copy"
            ));
        } else if p["attached"] == true && p["link"]["up"] == false {
            wrong.push(format!("the link of node {name} to its mirror is down"));
        }
    }
    wrong
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
                    s("role"),
                    s("epoch"),
                    s("state"),
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
            for b in n["backups"].as_array().unwrap_or(&empty) {
                t += &format!(
                    "  backup {} of node {}: {}, LSN {}\n",
                    b["node"].as_str().unwrap_or(""),
                    n["node"].as_str().unwrap_or(""),
                    match b["active"] == true {
                        true => "forwarding",
                        false => "not forwarding",
                    },
                    b["acked"]
                );
            }
            t += &copying(n).unwrap_or_default();
        }
        for w in v["wrong"].as_array().unwrap_or(&empty) {
            t += &format!("  ! {}\n", w.as_str().unwrap_or(""));
        }
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
