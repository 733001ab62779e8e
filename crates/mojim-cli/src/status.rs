//! `mojim status`: what every node says of the volumes, side by side.
//!
//! Owns the questions and the tables. `health` decides what counts as a finding.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mojim_config::{Config, Failover, MediumKind, Mode, Node, Volume};
use mojim_linux::Os;
use mojim_replica::request::Request;
use serde_json::{Map, Value, json};

use crate::ask::{Asked, SHORT, ask, is_answer, load, plain};
use crate::failure::Done;
use crate::health::{
    Expected, Finding, Voter, backup_line, copies, findings, is_level, is_stale, role, unused_line,
};
use crate::heard;
use crate::output;
use crate::typed::{typed, with_volume};

/// The version of the document of `--json`. It grows when a key changes its meaning or goes, not when
/// one is new.
const VERSION: u32 = 1;

/// After so long what only a change of sessions shows is over.
const MOMENT: Duration = Duration::from_millis(500);

/// Show the state of every volume, and each finding with the command that mends it.
///
/// The command asks the daemon of every node. It prints a table of the nodes, and below it the
/// findings: the text, what to do, and the page about it in the documents.
///
/// Exit code 0: every volume is well. 1: there is a finding. 2: the command line or the
/// configuration is wrong.
///
/// A volume is well if all of this is so:
///
/// - Every node that holds the volume answers. Its copy is whole, usable, and of the newest view.
///
/// - Each of these nodes has room for what its log holds.
///
/// - The primary has its mirror.
///
/// - Each backup follows, and lags by no more than `secondary_threshold`.
///
/// - Every voter votes, and the register of views can be read.
///
/// - Without a program, no copy lacks what another copy has committed. No link is missed then.
///
/// A volume that no program has used yet has nothing to copy. A backup that follows no node and
/// lacks nothing is asked again after 500 ms, because a program that attaches causes this
/// briefly.
///
/// In the column `link`, `us` is the round trip to the mirror, in microseconds, as the program
/// last measured it.
///
/// Below the nodes, a line for each backup says which node it follows, and how much it has.
/// Another line lists the voters that vote, that answer and do not vote, and that do not answer.
/// `was primary` and `was mirror` are roles of an older view.
///
/// A mirror may be lost after it acknowledged data that the primary's log did not have yet. A
/// line then says how many bytes are in the primary's memory only, now and at the last such loss.
/// This is no finding. The keys of --json are `at_risk_bytes` and `last_risk`.
///
/// With --json, the findings are the list `ills`. Each has `volume`, `node` (or null), `kind`,
/// `text`, `do` (what to do) and `page`. Where the node knows them, it also has `code`, the code
/// of the event, and `since`, in milliseconds since 1970. docs/reference/status-json.md has every
/// key.
///
/// Each `kind` (unreachable, refused, voter, quorum, promotion, primaries, beyond, configuration,
/// copy, failed, room, strangers, run, stale, alone, link, behind, backup-away, backup-lag) has a
/// page: docs/how-to/status/KIND.md.
#[derive(clap::Args)]
pub struct Status {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Only this volume.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Also show which nodes have the sync point of this number, and how safe it is there.
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
        // Without keys of its own this command would call every node silent.
        Os::asking(&config)?;
        let mut all = gather(&config, self.volume.as_deref());
        if let Some(lsn) = self.lsn {
            let persists = |n: &str| {
                let node = config.nodes.get(n);
                let kept = |n: &Node| n.log.medium != MediumKind::Dram && n.log.emulate.is_none();
                node.is_some_and(kept)
            };
            for v in all["volumes"].as_array_mut().into_iter().flatten() {
                let nodes = v["nodes"].as_array().cloned().unwrap_or_default();
                let copies = copies(lsn, &nodes, persists);
                v["copies"] = json!({ "lsn": lsn, "nodes": copies });
            }
        }
        let well = all["ok"] == true;
        match self.json {
            true => output::json_lines(&document(all))?,
            false => output::text(&text(&all))?,
        }
        Ok(if well { 0 } else { 1 })
    }
}

/// The document of `--json`: numbers that no reader of JSON need read exactly are strings.
fn document(mut all: Value) -> Value {
    fn strings(v: &mut Value) {
        match v {
            Value::Array(all) => all.iter_mut().for_each(strings),
            Value::Object(all) => {
                for (key, v) in all {
                    match (key.as_str(), v.as_u64()) {
                        ("life" | "incarnation", Some(n)) => *v = json!(n.to_string()),
                        _ => strings(v),
                    }
                }
            }
            _ => {}
        }
    }
    strings(&mut all);
    all["version"] = json!(VERSION);
    all
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
    let look = || -> Vec<(Value, bool)> {
        let answers = ask_all(config, &volumes);
        let row = |v: &&Volume| volume_row(config, v, &answers);
        volumes.iter().map(row).collect()
    };
    let mut rows = look();
    let is_well = |(row, _): &(Value, bool)| row["ok"] == true;
    if !rows.iter().all(is_well) && rows.iter().all(|r| is_well(r) || r.1) {
        // Each program that attaches makes new sessions: what is not well for that long only
        // would wake somebody up for nothing (a new user: 18 of 20 programs that attached).
        std::thread::sleep(MOMENT);
        rows = look();
    }
    let well = rows.iter().all(is_well);
    let rows: Vec<Value> = rows.into_iter().map(|(row, _)| row).collect();
    json!({ "cluster": config.cluster, "ok": well, "volumes": rows })
}

/// What each node that holds one of the volumes, or votes on one, says of them.
fn ask_all(config: &Config, volumes: &[&Volume]) -> Map<String, Value> {
    let decided = volumes.iter().any(|v| v.failover == Failover::Automatic);
    let has_part = |n: &&Node| {
        let mut holders = volumes.iter().flat_map(|v| v.data_nodes());
        decided && n.vote || holders.any(|h| h == n.name)
    };
    let nodes: Vec<&Node> = config.nodes.values().filter(has_part).collect();
    std::thread::scope(|s| {
        let asked: Vec<_> = nodes
            .into_iter()
            .map(|n| {
                let mut of = volumes.to_vec();
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
    })
}

/// All answers about a volume, and its findings; whether all of these may last for a moment only.
fn volume_row(config: &Config, v: &Volume, answers: &Map<String, Value>) -> (Value, bool) {
    let mut nodes: Vec<Value> = holders(config, v)
        .iter()
        .map(|n| node_row(config, n, v, &answers[&n.name]))
        .collect();
    let voters = match v.failover {
        Failover::Automatic => voters(config, v, answers),
        Failover::Manual => Vec::new(),
    };
    let expected = Expected {
        mirrored: v.mirror.is_some(),
        waits: !matches!(v.mode, Mode::Unreplicated | Mode::Async),
        threshold: v.secondary_threshold,
        voters: &voters,
    };
    if v.failover == Failover::Automatic {
        let votes = |name: &str| config.nodes.get(name).is_some_and(|n| n.vote);
        heard::weigh(&mut nodes, votes);
    }
    last_of_primary(&mut nodes);
    let findings = findings(&expected, &nodes);
    let stale: Vec<bool> = nodes.iter().map(|n| is_stale(n, &nodes)).collect();
    let backups: Vec<bool> = nodes.iter().map(|n| role(n, &nodes) == "backup").collect();
    for ((n, stale), backup) in nodes.iter_mut().zip(stale).zip(backups) {
        n["stale"] = json!(stale);
        if backup {
            n["role"] = json!("backup");
        }
    }
    let vote = |v: &Voter| {
        let mut vote = json!({ "node": v.name, "answers": v.answers, "votes": v.votes() });
        if let Some(why) = &v.down {
            vote["error"] = json!(why);
        }
        vote
    };
    let passes = findings.iter().all(Finding::passes);
    let several = config.volumes.len() > 1;
    let row = json!({
        "volume": v.name,
        "mode": v.mode.as_str(),
        "ok": findings.is_empty(),
        "ills": findings.iter().map(|i| dated(to_type(i.to_json(&v.name), several), &nodes)).collect::<Vec<_>>(),
        "nodes": nodes,
        "voters": voters.iter().map(vote).collect::<Vec<_>>(),
    });
    (row, passes)
}

/// A finding whose commands can be typed. `several`: they need the volume's name.
fn to_type(mut finding: Value, several: bool) -> Value {
    let volume = finding["volume"].as_str().filter(|_| several);
    let volume = volume.map(str::to_owned);
    for key in ["text", "do"] {
        let text = finding[key].as_str().unwrap_or("");
        let text = match &volume {
            Some(volume) => with_volume(text, volume),
            None => text.into(),
        };
        finding[key] = json!(typed(&text));
    }
    finding
}

/// A finding with the code of its event, and since when it has been so, in milliseconds since 1970, where
/// its node knows.
fn dated(mut finding: Value, nodes: &[Value]) -> Value {
    let codes = match finding["kind"].as_str() {
        Some("alone") => &["alone"][..] as &[&'static str],
        Some("link") => &["mirror_lost"],
        Some("room" | "copy") => &["disk_full", "copy_damaged"],
        Some("failed") => &["program_failed"],
        _ => return finding,
    };
    let row = nodes.iter().find(|n| n["node"] == finding["node"]);
    let since = |code: &&'static str| Some((*code, row?["since"][*code].as_u64()?));
    if let Some((code, since)) = codes.iter().find_map(since) {
        finding["code"] = json!(code);
        finding["since"] = json!(since);
    }
    finding
}

/// How long ago a time in milliseconds since 1970 was, by this machine's clock.
fn ago(since: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_secs());
    let seconds = now.saturating_sub(since / 1000);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Settings by which nodes act together, and which one of them has otherwise than this command.
fn differs(v: &Volume, config: &Config, answer: &Value, row: &Value) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(mode) = row["mode"].as_str().filter(|m| *m != v.mode.as_str()) {
        all.push(format!("mode {mode} (here {})", v.mode.as_str()));
    }
    let theirs = &row["settings"];
    let connections = theirs["connections"].as_u64();
    if let Some(n) = connections.filter(|n| *n != v.connections as u64) {
        all.push(format!("connections {n} (here {})", v.connections));
    }
    // Other nodes in these places may be on their way, by `mojim replace`.
    if let (Some(first), Some(second)) = (theirs["primary"].as_str(), theirs["mirror"].as_str())
        && (Some(first), second) == (v.mirror.as_deref(), &v.primary)
    {
        all.push(format!(
            "primary {first} and mirror {second} (here the other way round)"
        ));
    }
    let limit = config.failure_limit.as_millis() as u64;
    if let Some(theirs) = answer["failure_limit_ms"].as_u64().filter(|l| *l != limit) {
        all.push(format!("failure_limit {theirs} ms (here {limit} ms)"));
    }
    all
}

/// Raises the primary's last LSN to the greatest one of its view: what a program reports
/// is some milliseconds old, or older if it stands still, and it has whatever its
/// followers have.
fn last_of_primary(nodes: &mut [Value]) {
    let newest = nodes.iter().filter_map(|n| n["epoch"].as_u64()).max();
    let is_newest = |n: &Value| n["epoch"].as_u64() == newest;
    let usable = |n: &&Value| is_newest(n) && n["error"].is_null();
    let all = nodes.iter().filter(usable);
    let last = all.filter_map(|n| n["last_lsn"].as_u64()).max();
    for n in nodes.iter_mut().filter(|n| is_newest(n)) {
        if n["role"] == "primary" && n["attached"] == true && n["last_lsn"].is_u64() {
            n["last_lsn"] = json!(last);
        }
    }
}

/// What a node says of a volume that it holds.
fn node_row(config: &Config, n: &Node, v: &Volume, answer: &Value) -> Value {
    let mut row = answer["volumes"]
        .as_array()
        .and_then(|a| a.iter().find(|s| s["volume"] == v.name.as_str()))
        .cloned()
        .unwrap_or_else(|| {
            let unknown = || format!("node {} does not know this volume", n.name);
            let why = answer["error"].as_str().map_or_else(unknown, str::to_owned);
            json!({ "error": why })
        });
    if row["error"].is_string() && answer["beyond"] == true {
        row["beyond"] = json!(true);
    }
    row["reachable"] = json!(answers_at_all(answer));
    row["node"] = json!(n.name);
    row["address"] = json!(n.address.to_string());
    let differs = differs(v, config, answer, &row);
    if !differs.is_empty() {
        row["differs"] = json!(differs);
    }
    if let Some(o) = row.as_object_mut() {
        o.remove("volume");
        o.remove("mode");
        o.remove("settings");
    }
    row
}

/// The nodes that vote on a volume's views. Only a voter without a copy of the volume has
/// an `error` here: the others are judged by their copy.
fn voters(config: &Config, v: &Volume, answers: &Map<String, Value>) -> Vec<Voter> {
    let voter = |n: &Node| {
        let answer = &answers[&n.name];
        let full = || {
            let free = answer["free"].as_u64().filter(|f| *f < VOTES)?;
            Some(format!(
                "node {}: {} KiB are free in {}, where the votes on views go. It should have {} KiB more",
                n.name,
                free >> 10,
                n.directory.display(),
                (VOTES - free).div_ceil(1 << 10)
            ))
        };
        let why = answer["error"].as_str().map(str::to_owned).or_else(full);
        let holds = v.data_nodes().contains(&n.name.as_str());
        Voter {
            name: n.name.clone(),
            answers: answer["error"].is_null(),
            refuses: answer["answered"] == true,
            error: why.filter(|_| !holds),
            unread: answer["unread"].as_str().map(str::to_owned),
            down: answer["vote_error"].as_str().map(str::to_owned),
        }
    };
    config.voters().into_iter().map(voter).collect()
}

/// Whether a node's daemon answered, if only with a refusal.
fn answers_at_all(answer: &Value) -> bool {
    answer["error"].is_null() || answer["answered"] == true
}

/// Bytes that a voter without a copy should have free: many times its log.
const VOTES: u64 = 16 << 20;

/// A node's answer about these volumes. Its register is asked for separately: during an
/// election that takes long, although the node is alive.
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
            // A node that refuses is alive.
            let answered = is_answer(&e);
            let says = if answered { "" } else { " does not answer" };
            let error = format!("{who}{says}: {}", plain(&e));
            let beyond = matches!(e, mojim::Error::Protocol(_));
            return json!({ "error": error, "answered": answered, "beyond": beyond });
        }
    };
    if answer["node"] != node.name.as_str() {
        let other = format!("{who} says that it is node {}", answer["node"]);
        return json!({ "error": other, "answered": true });
    }
    let automatic = |v: &&Volume| v.failover == Failover::Automatic;
    let name = |v: &Volume| v.name.clone();
    let held = volumes.iter().copied().filter(automatic).map(name);
    // A node without a copy of these volumes votes all the same.
    let other = config.volumes.values().find(automatic).map(name);
    let other = other.filter(|_| volumes.is_empty());
    add_registers(&mut answer, held.collect(), other, |question| {
        ask(config, node, SHORT, question).map_err(|f| f.text)
    });
    answer
}

/// Adds what the node reads in the register of views to its answer: of the volumes `held`,
/// or, where it holds none of them, whether it can read of volume `other`.
fn add_registers(
    answer: &mut Value,
    held: Vec<String>,
    other: Option<String>,
    mut ask: impl FnMut(&Request) -> Result<Value, String>,
) {
    let mut lost = None;
    for volume in held {
        let register = match &lost {
            // A node that cannot read one volume's register can read none.
            Some(e) => json!({ "error": e }),
            None => {
                let volume = volume.clone();
                match ask(&Request::ViewRead { volume }) {
                    Ok(r) => r,
                    Err(e) => json!({ "error": lost.insert(e) }),
                }
            }
        };
        let rows = answer["volumes"].as_array_mut().into_iter().flatten();
        for row in rows.filter(|r| r["volume"] == volume.as_str()) {
            row["register"] = register.clone();
        }
    }
    if let Some(volume) = other
        && let Err(e) = ask(&Request::ViewRead { volume })
    {
        answer["unread"] = json!(lost.insert(e));
    }
    // While it waited for the register, the node may have found that it cannot vote.
    let again = Request::Status {
        volume: None,
        register: false,
    };
    if lost.is_some()
        && let Ok(now) = ask(&again)
    {
        answer["vote_error"] = now["vote_error"].clone();
    }
}

fn text(all: &Value) -> String {
    let mut t = String::new();
    for v in list(&all["volumes"]) {
        let word = if v["ok"] == true { "well" } else { "degraded" };
        t += &format!(
            "volume {}  mode {}  {word}\n",
            v["volume"].as_str().unwrap_or(""),
            v["mode"].as_str().unwrap_or("")
        );
        let nodes = list(&v["nodes"]);
        t += &table(nodes);
        for n in nodes {
            if let Some(line) = backup_line(n, nodes) {
                t += &format!("  {line}{}\n", lag_of(n, nodes));
            }
            t += &at_risk(n);
            t += &copying(n).unwrap_or_default();
        }
        if let Some(line) = unused_line(nodes) {
            t += &format!("  {line}\n");
        }
        t += &votes(v);
        for c in list(&v["copies"]["nodes"]) {
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
        for i in list(&v["ills"]) {
            let since = i["since"].as_u64();
            let since = since.map_or_else(String::new, |s| format!(" (for {})", ago(s)));
            t += &format!("  ! {}{since}\n", i["text"].as_str().unwrap_or(""));
            t += &format!("    what to do: {}\n", i["do"].as_str().unwrap_or(""));
            t += &format!("    see {}\n", i["page"].as_str().unwrap_or(""));
        }
    }
    t
}

/// The elements of `v`; none if it is not an array.
fn list(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

/// A line for each node.
fn table(nodes: &[Value]) -> String {
    let head = [
        "  node", "role", "epoch", "state", "last LSN", "applied", "program", "link", "behind",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(nodes.iter().map(|n| table_row(n, nodes)));
    columns(&rows)
}

fn table_row(n: &Value, nodes: &[Value]) -> [String; 9] {
    let s = |k: &str| match &n[k] {
        Value::String(s) => s.clone(),
        Value::Null => "-".into(),
        other => other.to_string(),
    };
    if n["reachable"] != true {
        let mut row = std::array::from_fn(|_| "-".to_owned());
        row[0] = format!("  {}", s("node"));
        row[1] = "no answer".into();
        return row;
    }
    // The superblock's word does not count then.
    let state = match n["state"] == "whole" && n["error"].is_string() {
        true => "unusable".to_owned(),
        false => s("state"),
    };
    [
        format!("  {}", s("node")),
        role(n, nodes).to_owned(),
        s("epoch"),
        state,
        s("last_lsn"),
        s("applied"),
        match n["pid"].as_u64() {
            Some(p) => format!("pid {p}"),
            None if n["attaching"] == true => "attaching".into(),
            None => "-".into(),
        },
        link(n, nodes),
        n["bytes_behind"]
            .as_u64()
            .filter(|_| n["view"]["mirror"] != "")
            .map_or("-".into(), |b| format!("{b} B")),
    ]
}

/// The state of a node's link to the other node of its pair, or to the node that forwards
/// to it.
fn link(n: &Value, nodes: &[Value]) -> String {
    let l = &n["link"];
    // Without a program there is no link, and none is missing.
    let in_use = nodes.iter().any(|n| n["attached"] == true);
    // A program that can commit nothing more keeps what it measured last.
    if n["failed"] == true {
        return "-".into();
    }
    match (
        &l["up"],
        l["round_trip_us"].as_f64(),
        l["heard_ms"].as_u64(),
    ) {
        (Value::Bool(true), Some(us), _) => format!("up, {us:.0} us"),
        (Value::Bool(true), _, Some(ms)) => format!("up, heard {ms} ms ago"),
        (Value::Bool(true), ..) => "up".into(),
        (Value::Bool(false), ..) if in_use => "down".into(),
        _ => "-".into(),
    }
}

/// The line about the voters, if there are any.
fn votes(v: &Value) -> String {
    let all = list(&v["voters"]);
    let names = |answers: bool, votes: bool| {
        let is = |v: &&Value| v["answers"] == answers && v["votes"] == votes;
        let of: Vec<&str> = all
            .iter()
            .filter(is)
            .filter_map(|v| v["node"].as_str())
            .collect();
        (!of.is_empty()).then(|| of.join(", "))
    };
    let none = || "none".to_owned();
    let down = names(true, false);
    match all.len() {
        0 => String::new(),
        n => format!(
            "  voters: {}{}; without an answer: {}; {} of {n} are needed\n",
            names(true, true).unwrap_or_else(none),
            down.map_or(String::new(), |d| format!("; answer and do not vote: {d}")),
            names(false, false).unwrap_or_else(none),
            n / 2 + 1,
        ),
    }
}

/// How many bytes a node lacks, by the node that forwards to it; a program reports no
/// lag.
fn lag_of(n: &Value, nodes: &[Value]) -> String {
    let from = nodes.iter().find(|f| f["node"] == n["link"]["from"]);
    let mut rows = from.map_or(&[][..], |f| list(&f["backups"])).iter();
    let row = rows.find(|r| r["node"] == n["node"] && r["active"] == true);
    // The two nodes were not asked at the same instant.
    let row = row.filter(|_| !is_level(n, nodes));
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
        let time = match ms < 0.05 {
            true => "less than 0.1 ms".to_owned(),
            false => format!("{ms:.1} ms"),
        };
        t += &format!(
            "  node {name}: earlier, when its mirror was lost, {bytes} B were in its memory only, for {time}\n"
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
        // A file may grow while it is copied.
        (done.min(total) * 100).checked_div(total).unwrap_or(100),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Beside another volume, the commands of a finding ended with the question which volume it is.
    #[test]
    fn commands_of_a_finding_name_the_volume_beside_others() {
        let todo = |several| {
            let finding = json!({ "volume": "v", "text": "t", "do": "`mojim promote --name b`" });
            to_type(finding, several)["do"].clone()
        };
        assert_eq!(todo(false), "`mojim promote --name b`");
        assert_eq!(todo(true), "`mojim promote --volume v --name b`");
    }

    /// A finding said what to do in one line, and not where there is more about it.
    #[test]
    fn each_finding_is_printed_with_its_page() {
        let finding = json!({ "text": "node a is alone", "do": "wait", "page": "docs/x.md" });
        let volume = json!({ "volume": "v", "mode": "sync", "ok": false, "ills": [finding] });
        let said = text(&json!({ "volumes": [volume] }));
        let ends = "  ! node a is alone\n    what to do: wait\n    see docs/x.md\n";
        assert!(said.ends_with(ends), "{said}");
    }

    /// A witness whose disk was full was listed as one that votes, beside the error of its
    /// vote: that vote was asked for between the two questions (a new user).
    #[test]
    fn a_vote_that_fails_while_the_register_is_asked_for_counts_for_none() {
        let mut answer = json!({ "node": "w", "volumes": [] });
        add_registers(&mut answer, Vec::new(), Some("v".into()), |q| match q {
            Request::Status { .. } => Ok(json!({ "node": "w", "vote_error": "no space left" })),
            _ => Err("no voter leads".into()),
        });
        assert_eq!(answer["unread"], "no voter leads");
        assert_eq!(answer["vote_error"], "no space left");
    }
}
