//! Whether a volume is well, by what its nodes say.
//!
//! Owns the rules of `mojim status`: what counts as an ill, its kind, its words
//! and what to do about it. It asks nobody; `status` has asked. A node's row is
//! what its daemon answered, with `node` and `reachable`, and with `error` where
//! it did not answer, or said that its copy is not usable.
//!
//! Invariants:
//! - Only who forwards is believed about backups: the mirror of the newest
//!   epoch. What other followers say of each other means nothing.
//! - What one answer cannot show is not concluded from it: a count of primaries
//!   needs every node's answer.

use std::borrow::Cow;

use serde_json::{Value, json};

/// What the configuration says of a volume, as far as its health goes.
pub struct Expected<'a> {
    /// Whether it has a mirror.
    pub mirrored: bool,
    /// Bytes that may wait for a backup (`secondary_threshold`).
    pub threshold: u64,
    /// The voters that hold no copy of it, each with the reason why it does not
    /// answer, if it does not; none where no register decides.
    pub voters: &'a [(String, Option<String>)],
}

/// One thing that is not well.
#[derive(Debug, PartialEq, Eq)]
pub struct Ill {
    node: String,
    kind: &'static str,
    text: String,
    todo: Cow<'static, str>,
}

impl Ill {
    fn new(node: &str, kind: &'static str, text: String, todo: &'static str) -> Ill {
        Ill {
            node: node.to_owned(),
            kind,
            text,
            todo: Cow::Borrowed(todo),
        }
    }

    /// For programs.
    pub fn to_json(&self, volume: &str) -> Value {
        json!({
            "volume": volume,
            "node": if self.node.is_empty() { Value::Null } else { json!(self.node) },
            "kind": self.kind,
            "text": self.text,
            "do": self.todo,
        })
    }
}

const START: &str = "start `mojim node` there, or look at its machine and its network; `mojim replace` if it is lost for good";
const VOTERS: &str = "look again in a few seconds: voters may be choosing who leads them. If it stays so, mend what the messages name (room, a disk: the daemon there tries again every second) and start the voters that do not run: a majority of them has to be there";
const VOTER: &str = "mend what the message names (room, a disk: the daemon there tries again every second). Else look again in a few seconds, and if it stays so start `mojim node` there again; `mojim replace` if it is lost for good";
const PROGRAM: &str = "nothing, if this passes: the daemon of the primary brings the other copies up to date; where it cannot, it says why, and the program that is started there does";
const FAILED: &str = "mend the disk, or make room on it; then end that program and start it again: until then it fails at each sync point";
const TAKE: &str = "start the program there, which takes the mirror's copy over or says why it does not, or `mojim promote` on the mirror, and start the program there";
const PRIMARY: &str = "mend what the message names (room, the disk, the log), then start `mojim node` there again; what is missing there the program takes from the mirror when it is started, or says why it does not";
const DISK: &str = "mend what the message names (room, the disk, the log), then start `mojim node` there again; without a usable copy the primary makes it anew";

fn text<'a>(n: &'a Value, key: &str) -> &'a str {
    n[key].as_str().unwrap_or("")
}

fn epoch(n: &Value) -> u64 {
    n["epoch"].as_u64().unwrap_or(0)
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
            format!("to go on without it meanwhile, make sure that its program and daemon have ended, then `mojim promote --name {mirror}`, and start the program there")
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
        "the volume's mirror, node {mirror}, is not there either: if both are lost for good, `mojim promote --force --name {}` goes on with what that backup has",
        text(most, "node")
    ))
}

/// The register as it was read last, if it was.
fn latest(nodes: &[Value]) -> Option<&Value> {
    let registers = nodes.iter().map(|n| &n["register"]);
    registers
        .filter(|r| r["version"].is_u64())
        .max_by_key(|r| r["version"].as_u64())
}

/// Everything about a volume that is not as it should be.
pub fn ills(expected: &Expected<'_>, nodes: &[Value]) -> Vec<Ill> {
    let mut ills = found(expected, nodes);
    for i in ills.iter_mut().filter(|i| i.kind == "unreachable") {
        if let Some(how) = without(nodes, &i.node) {
            i.todo = Cow::Owned(format!("{START}; {how}"));
        }
    }
    // What has failed does not pass.
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    let leads = |n: &&Value| n["role"] == "primary" && epoch(n) == newest;
    if let Some(p) = nodes.iter().find(leads)
        && let Some(why) = p["heal_error"].as_str()
    {
        let name = text(p, "node");
        let refused = format!(
            "the daemon of node {name} has tried to bring the other copies up to date, and could not: {why}. Mend that; it tries again in minutes, and a program that is started there at once"
        );
        for i in ills.iter_mut().filter(|i| i.todo == PROGRAM) {
            i.todo = Cow::Owned(refused.clone());
        }
    }
    ills
}

fn found(expected: &Expected<'_>, nodes: &[Value]) -> Vec<Ill> {
    let mut ills = Vec::new();
    for n in nodes {
        of_node(n, &mut ills);
    }
    for (name, why) in expected.voters {
        if let Some(why) = why {
            let what = format!("{why}; it has a vote");
            ills.push(Ill::new(name, "voter", what, VOTER));
        }
    }
    of_register(nodes, &mut ills);
    let newest = nodes.iter().map(epoch).max().unwrap_or(0);
    if newest == 0 {
        // Nobody has ever attached: there is nothing to copy.
        return ills;
    }
    let first: Vec<&Value> = nodes
        .iter()
        .filter(|n| n["role"] == "primary" && epoch(n) == newest)
        .collect();
    let known = |n: &Value| n["epoch"].is_u64() || n["state"] == "new";
    if nodes.iter().all(|n| n["reachable"] == true && known(n)) && first.len() != 1 {
        let what = format!("{} nodes are primary in epoch {newest}", first.len());
        let todo = "look again in a few seconds; if it stays so, start the program where the register or the operator's last word put the primary";
        ills.push(Ill::new("", "primaries", what, todo));
    }
    for n in nodes.iter().filter(|n| n["reachable"] == true) {
        let is_primary = n["role"] == "primary" && n["state"] != "loading";
        let leads = is_primary && first.iter().all(|p| p["node"] == n["node"]);
        of_copy(n, newest, leads, &mut ills);
    }
    let mut mirror = None;
    if let Some(p) = first.first() {
        of_mirror(expected, p, nodes, &mut ills);
        // One that joins has no place in the view yet.
        mirror = p["view"]["mirror"].as_str();
        mirror = mirror.filter(|m| nodes.iter().any(|n| n["node"] == *m));
    }
    of_backups(expected, newest, mirror, nodes, &mut ills);
    ills
}

/// Whether it answers, and whether it can use what it has.
fn of_node(n: &Value, ills: &mut Vec<Ill>) {
    let name = text(n, "node");
    if let Some(e) = n["error"].as_str() {
        ills.push(match (n["reachable"] == true, n.get("role").is_some()) {
            (false, _) => Ill::new(name, "unreachable", e.to_owned(), START),
            (true, true) => Ill::new(
                name,
                "copy",
                format!("the copy of node {name} cannot be used: {e}"),
                match text(n, "role") {
                    "primary" => PRIMARY,
                    _ => DISK,
                },
            ),
            (true, false) => Ill::new(
                name,
                "refused",
                e.to_owned(),
                "give the node and this command the same configuration and keys",
            ),
        });
    }
    let room = &n["room"];
    if let (Some(free), Some(needs)) = (room["free"].as_u64(), room["needs"].as_u64())
        && free < needs
    {
        ills.push(Ill::new(
            name,
            "room",
            format!(
                "node {name}: {} MiB are free for its data at {}, and up to {} MiB of its log may have to go there",
                free >> 20,
                text(room, "path"),
                needs >> 20
            ),
            "make room on that file system",
        ));
    }
    if n["distrusted"] == true {
        ills.push(Ill::new(
            name,
            "copy",
            format!("the copy of node {name} is to be made anew, by an operator's word"),
            PROGRAM,
        ));
    }
}

/// Whether the views can change, and whether what they say has been carried out.
fn of_register(nodes: &[Value], ills: &mut Vec<Ill>) {
    // Who can read it can take over.
    let read = nodes.iter().any(|n| n["register"]["version"].is_u64());
    for n in nodes {
        let name = text(n, "node");
        if let Some(e) = n["register"]["error"].as_str() {
            let (then, todo) = match read {
                true => ("", VOTER),
                false => (
                    ", nor can any that answers: while that is so nobody takes over",
                    VOTERS,
                ),
            };
            let what = format!("node {name} cannot read the register of views{then}: {e}");
            ills.push(Ill::new(name, "quorum", what, todo));
        }
    }
    let Some(primary) = latest(nodes).and_then(|r| r["primary"]["node"].as_str()) else {
        return;
    };
    let named = nodes.iter().find(|n| n["node"] == primary);
    if let Some(n) = named
        && n["reachable"] == true
        && n["role"] != "primary"
    {
        ills.push(Ill::new(
            primary,
            "promotion",
            format!("the register names node {primary} the primary, and it has not become it yet"),
            "look again in a few seconds; if it stays so, read what its daemon says",
        ));
    }
}

/// Whether it is whole, and of the present view. `leads`: it is the primary, and no other
/// node is in a view that is as late.
fn of_copy(n: &Value, newest: u64, leads: bool, ills: &mut Vec<Ill>) {
    let name = text(n, "node");
    match n["state"].as_str() {
        // What is damaged is an error, too.
        Some("whole" | "damaged") | None => {}
        Some(_) if leads => ills.push(Ill::new(
            name,
            "copy",
            format!("node {name} is the primary, and its copy is gone"),
            TAKE,
        )),
        Some("new") => ills.push(Ill::new(
            name,
            "copy",
            format!("node {name} has no copy yet"),
            PROGRAM,
        )),
        Some(s) => ills.push(Ill::new(
            name,
            "copy",
            format!("the copy of node {name} is {s}"),
            PROGRAM,
        )),
    }
    if n["failed"] == true {
        ills.push(Ill::new(
            name,
            "failed",
            format!("the program on node {name} can commit nothing more: the disk, or the log, of its copy failed"),
            FAILED,
        ));
    }
    let has_one = n["state"] != "new" && n["state"] != "empty" && n["state"] != "loading";
    if n["role"] == "primary" && has_one && n["epoch"].is_u64() && epoch(n) < newest {
        ills.push(Ill::new(
            name,
            "stale",
            format!(
                "node {name} was primary until epoch {newest} and has not been brought up to date"
            ),
            PROGRAM,
        ));
    }
}

/// Whether the primary has its mirror, and the mirror what is committed.
fn of_mirror(expected: &Expected<'_>, p: &Value, nodes: &[Value], ills: &mut Vec<Ill>) {
    if !expected.mirrored {
        return;
    }
    let name = text(p, "node");
    let mirror = p["view"]["mirror"].as_str().unwrap_or("");
    if mirror.is_empty() {
        ills.push(Ill::new(
            name,
            "alone",
            format!("node {name} is alone: what it commits has one copy"),
            "start the node that is to be its mirror, and the program if it does not run",
        ));
        return;
    }
    if p["attached"] == true {
        if p["link"]["up"] == false {
            ills.push(Ill::new(
                name,
                "link",
                format!("the link of node {name} to its mirror is down"),
                START,
            ));
        }
        return;
    }
    // Nobody sends: what it lacks it goes on lacking.
    let found = nodes.iter().find(|n| n["node"] == mirror);
    if let Some(m) = found.filter(|m| m["reachable"] == true && m["state"] == "whole")
        && m["last_lsn"].as_u64().is_some_and(|l| l < committed(p))
    {
        ills.push(Ill::new(
            mirror,
            "behind",
            format!(
                "the copy of node {mirror} ends at LSN {}, that of node {name} has LSN {}, and no program is attached",
                m["last_lsn"],
                committed(p)
            ),
            PROGRAM,
        ));
    }
    // What it lost itself the mirror has.
    if let Some(m) = found.filter(|m| m["reachable"] == true && epoch(m) == epoch(p))
        && p["settling"] != true
        && p["last_lsn"].as_u64().is_some_and(|l| l < committed(m))
    {
        ills.push(Ill::new(
            name,
            "behind",
            format!(
                "the copy of node {name} ends at LSN {}, that of its mirror, node {mirror}, has LSN {}, and no program is attached",
                p["last_lsn"],
                committed(m)
            ),
            "start the program there: it takes what it lacks from the mirror, or says why it does not; before that, whatever becomes of the mirror is lost",
        ));
    }
}

/// Whether each backup follows, and how far. A node that came back while another is the
/// view's `mirror` takes itself for the mirror until somebody forwards to it.
fn of_backups(
    expected: &Expected<'_>,
    newest: u64,
    mirror: Option<&str>,
    nodes: &[Value],
    ills: &mut Vec<Ill>,
) {
    let in_use = nodes.iter().any(|n| n["attached"] == true);
    let most = nodes.iter().map(committed).max().unwrap_or(0);
    let forwards = |n: &&Value| n["role"] == "mirror" && epoch(n) == newest;
    let rows = || {
        let rows = nodes.iter().filter(forwards);
        rows.filter_map(|n| n["backups"].as_array()).flatten()
    };
    let outside = |n: &Value| n["role"] == "mirror" && mirror.is_some_and(|m| n["node"] != m);
    let backups = nodes.iter().filter(|n| n["role"] == "backup" || outside(n));
    // One that cannot be used is said to be so.
    let usable = |n: &&Value| n["reachable"] == true && n["error"].is_null();
    for b in backups.filter(usable).filter(|n| n["state"] == "whole") {
        let name = text(b, "node");
        let row = rows().find(|r| r["node"] == name);
        let follows = b["link"]["up"] == true || row.is_some_and(|r| r["active"] == true);
        let has = b["last_lsn"].as_u64().unwrap_or(0);
        let is_old = outside(b) && epoch(b) < newest;
        if !follows && (in_use || is_old || has < most) {
            ills.push(Ill::new(
                name,
                "backup-away",
                match mirror.filter(|_| outside(b)) {
                    Some(mirror) => format!(
                        "node {name} follows nobody, and node {mirror} is the mirror: it has LSN {has}, and LSN {most} is committed"
                    ),
                    None => format!(
                        "backup {name} follows nobody: it has LSN {has}, and LSN {most} is committed"
                    ),
                },
                "look again in a few seconds; if it stays so, read what its daemon and the mirror's say, and start the program if it does not run",
            ));
        }
        // Who forwards no more, as with a full disk, knows nothing of its lag.
        let row = row.filter(|r| r["active"] == true);
        let lag = row.and_then(|r| r["lag"].as_u64()).unwrap_or(0);
        if follows && lag > expected.threshold {
            ills.push(Ill::new(
                name,
                "backup-lag",
                format!(
                    "backup {name} lags by {lag} bytes, more than secondary_threshold ({}): the program is held back",
                    expected.threshold
                ),
                "look at the link to it and at its disk, or give it a greater secondary_threshold",
            ));
        }
    }
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
mod tests {
    use super::*;

    fn row(name: &str, role: &str) -> Value {
        json!({
            "node": name, "role": role, "reachable": true, "state": "whole", "epoch": 5,
            "last_lsn": 90, "attached": false, "view": { "primary": "a", "mirror": "b" },
        })
    }

    /// A primary with its program, its mirror, and two backups. Like a real
    /// daemon of an older build, the backups say that they reach nobody.
    fn cluster() -> Vec<Value> {
        let mut nodes = vec![
            row("a", "primary"),
            row("b", "mirror"),
            row("c", "backup"),
            row("d", "backup"),
        ];
        nodes[0]["attached"] = json!(true);
        for n in &mut nodes {
            n["link"] = json!({ "up": true });
            n["room"] = json!({ "free": 1 << 30, "needs": 64 << 20, "path": "/x" });
            n["register"] = json!({ "version": 3, "epoch": 5, "primary": { "node": "a" } });
        }
        let rows = |active: bool, of: [&str; 2]| {
            json!(of.map(|n| json!({ "node": n, "active": active, "acked": 90, "lag": 0 })))
        };
        nodes[1]["backups"] = rows(true, ["c", "d"]);
        nodes[2]["backups"] = rows(false, ["b", "d"]);
        nodes[3]["backups"] = rows(false, ["b", "c"]);
        nodes
    }

    fn judge_with(nodes: &[Value], voters: &[(String, Option<String>)]) -> Vec<(String, String)> {
        let expected = Expected {
            mirrored: true,
            threshold: 1000,
            voters,
        };
        let found = ills(&expected, nodes);
        for i in &found {
            assert!(!i.text.is_empty() && !i.todo.is_empty(), "{i:?}");
        }
        found
            .into_iter()
            .map(|i| (i.node, i.kind.to_owned()))
            .collect()
    }

    fn judge(nodes: &[Value]) -> Vec<(String, String)> {
        judge_with(nodes, &[("w".into(), None)])
    }

    /// What is to be done first, where nobody else votes.
    fn todo(nodes: &[Value]) -> Cow<'static, str> {
        let expected = Expected {
            mirrored: true,
            threshold: 1000,
            voters: &[],
        };
        ills(&expected, nodes).remove(0).todo
    }

    fn one(node: &str, kind: &str) -> Vec<(String, String)> {
        vec![(node.to_owned(), kind.to_owned())]
    }

    /// It was judged by nobody: the node is no backup, and the mirror is another.
    #[test]
    fn who_came_back_and_has_no_place_in_the_view_is_not_well() {
        let mut nodes = cluster();
        nodes.push(row("e", "mirror"));
        nodes[4]["link"] = json!({ "up": false });
        assert_eq!(judge(&nodes), one("e", "backup-away"));
        nodes[4]["link"]["up"] = json!(true);
        assert_eq!(judge(&nodes), []);
    }

    #[test]
    fn a_healthy_volume_with_backups_is_well() {
        let mut nodes = cluster();
        assert_eq!(judge(&nodes), []);
        // The program has ended, and the mirror's daemon was started again.
        nodes[0]["attached"] = json!(false);
        for n in &mut nodes {
            n["link"] = json!({ "up": false });
        }
        nodes[1]["backups"][0]["active"] = json!(false);
        nodes[1]["backups"][1]["active"] = json!(false);
        assert_eq!(judge(&nodes), []);
        // Nobody has ever attached.
        for n in &mut nodes {
            *n = json!({ "node": n["node"], "role": n["role"], "reachable": true, "state": "new" });
        }
        assert_eq!(judge(&nodes), []);
    }

    #[test]
    fn a_node_that_does_not_answer_or_cannot_use_its_copy_is_an_ill() {
        for attached in [true, false] {
            let mut nodes = cluster();
            nodes[0]["attached"] = json!(attached);
            let whole = nodes.clone();
            nodes[2] = json!({ "node": "c", "reachable": false, "error": "no answer" });
            assert_eq!(judge(&nodes), one("c", "unreachable"));
            for i in 0..4 {
                let mut nodes = whole.clone();
                nodes[i]["error"] = json!("poisoned: no space left");
                let name = text(&whole[i], "node");
                assert_eq!(judge(&nodes), one(name, "copy"));
                let mut nodes = whole.clone();
                nodes[i]["room"]["free"] = json!(1 << 20);
                assert_eq!(judge(&nodes), one(name, "room"));
                let mut nodes = whole.clone();
                nodes[i]["state"] = json!("empty");
                assert_eq!(judge(&nodes), one(name, "copy"));
            }
            nodes = whole.clone();
            nodes[1] = json!({ "node": "b", "reachable": true, "error": "this is cluster x" });
            assert_eq!(judge(&nodes), one("b", "refused"));
            // Before anybody has attached, too.
            let new = |n: &Value| json!({ "node": n["node"], "role": n["role"], "reachable": true, "state": "new" });
            nodes = whole.iter().map(new).collect();
            nodes[3]["error"] = json!("no space");
            assert_eq!(judge(&nodes), one("d", "copy"));
        }
    }

    #[test]
    fn a_dead_witness_and_a_lost_quorum_are_ills() {
        let mut nodes = cluster();
        let dead = [("w".to_owned(), Some("refused".to_owned()))];
        assert_eq!(judge_with(&nodes, &dead), one("w", "voter"));
        nodes[1]["register"] = json!({ "error": "no majority" });
        assert_eq!(judge(&nodes), one("b", "quorum"));
        nodes[1]["register"] =
            json!({ "version": 4, "epoch": 6, "primary": { "node": "b" }, "mirror": null });
        assert_eq!(judge(&nodes), one("b", "promotion"));
    }

    #[test]
    fn a_backup_that_lags_or_follows_nobody_is_an_ill() {
        let mut nodes = cluster();
        nodes[1]["backups"][0]["lag"] = json!(1000);
        assert_eq!(judge(&nodes), []);
        nodes[1]["backups"][0]["lag"] = json!(1001);
        assert_eq!(judge(&nodes), one("c", "backup-lag"));
        nodes = cluster();
        nodes[1]["backups"][1]["active"] = json!(false);
        nodes[3]["link"] = json!({ "up": false });
        assert_eq!(judge(&nodes), one("d", "backup-away"));
        // Nobody sends any more, and it lacks something.
        nodes[0]["attached"] = json!(false);
        assert_eq!(judge(&nodes), []);
        nodes[3]["last_lsn"] = json!(89);
        assert_eq!(judge(&nodes), one("d", "backup-away"));
    }

    /// A program whose disk had been full failed at each sync point, and all was well.
    #[test]
    fn a_program_that_can_commit_nothing_is_an_ill() {
        let mut nodes = cluster();
        nodes[0]["failed"] = json!(true);
        assert_eq!(judge(&nodes), one("a", "failed"));
    }

    /// A mirror that came back empty, and is the configuration's primary, was said to be
    /// the primary whose copy is gone.
    #[test]
    fn an_empty_mirror_is_not_the_primary() {
        let mut nodes = cluster();
        nodes[0] = row("a", "primary");
        nodes[0]["epoch"] = json!(4);
        nodes[1]["role"] = json!("primary");
        nodes[1]["view"]["primary"] = json!("b");
        nodes[1]["attached"] = json!(true);
        for state in ["empty", "loading"] {
            nodes[0]["state"] = json!(state);
            let expected = Expected {
                mirrored: true,
                threshold: 1000,
                voters: &[],
            };
            let of_a = ills(&expected, &nodes);
            let of_a: Vec<_> = of_a.iter().filter(|i| i.node == "a").collect();
            assert!(
                of_a.iter().all(|i| i.kind == "copy" && i.todo != TAKE),
                "{of_a:?}"
            );
        }
    }

    /// "Nothing, if this passes" was said of the primary itself, which nobody heals.
    #[test]
    fn a_primary_whose_copy_is_gone_does_not_pass() {
        let mut nodes = cluster();
        for state in ["new", "empty"] {
            nodes[0]["state"] = json!(state);
            nodes[0]["attached"] = json!(false);
            let expected = Expected {
                mirrored: true,
                threshold: 1000,
                voters: &[],
            };
            let all = ills(&expected, &nodes);
            let copy = all.iter().find(|i| i.kind == "copy").expect("it is named");
            assert_eq!((copy.node.as_str(), &*copy.todo), ("a", TAKE));
        }
    }

    /// Nobody takes over by itself without a register, and nothing said who could.
    #[test]
    fn where_no_register_decides_the_operator_is_told_how_to_go_on() {
        let mut nodes = cluster();
        nodes[0] = json!({ "node": "a", "reachable": false, "error": "node a is away" });
        assert_eq!(todo(&nodes), START);
        for n in &mut nodes[1..] {
            n["register"] = Value::Null;
        }
        assert!(todo(&nodes).contains("`mojim promote --name b`"));
        // It is not the one that leads.
        nodes[1]["view"]["primary"] = json!("d");
        assert_eq!(todo(&nodes), START);
        // A register decides, but not who takes the place of both.
        let mut nodes = cluster();
        for n in &mut nodes {
            n["register"]["mirror"] = json!({ "node": "b" });
        }
        let away = |name| json!({ "node": name, "reachable": false, "error": "is away" });
        nodes[0] = away("a");
        assert_eq!(todo(&nodes), START);
        nodes[1] = away("b");
        nodes[3]["last_lsn"] = json!(95);
        assert!(todo(&nodes).contains("`mojim promote --force --name d`"));
    }

    /// A mirror whose disk is full forwards nothing any more, and said that a backup
    /// which has everything lags by as much as was ever sent.
    #[test]
    fn a_lag_is_known_by_who_forwards() {
        let mut nodes = cluster();
        nodes[1]["backups"][0] = json!({ "node": "c", "active": false, "acked": 0, "lag": 5000 });
        nodes[2]["link"] = json!({ "up": true });
        assert!(judge(&nodes).iter().all(|(_, kind)| kind != "backup-lag"));
        nodes[1]["backups"][0]["active"] = json!(true);
        assert_eq!(judge(&nodes), one("c", "backup-lag"));
    }

    /// "Nothing, if this passes" was said of what a daemon had refused.
    #[test]
    fn what_a_daemon_could_not_heal_is_not_said_to_pass() {
        let mut nodes = cluster();
        nodes[0]["attached"] = json!(false);
        nodes[1]["state"] = json!("empty");
        assert_eq!(todo(&nodes), PROGRAM);
        // Of another view: it leads nobody any more.
        nodes[2]["heal_error"] = json!("old");
        assert_eq!(todo(&nodes), PROGRAM);
        nodes[0]["heal_error"] = json!("what a had was lost; `mojim promote --force`");
        assert!(todo(&nodes).contains("could not: what a had was lost; `mojim promote --force`"));
    }

    #[test]
    fn a_primary_without_its_mirror_is_an_ill() {
        let mut nodes = cluster();
        nodes[0]["link"] = json!({ "up": false });
        assert_eq!(judge(&nodes), one("a", "link"));
        nodes[0]["view"]["mirror"] = json!("");
        assert_eq!(judge(&nodes), one("a", "alone"));
        // A mirror that lacks what is committed, and nobody sends.
        nodes = cluster();
        nodes[0]["attached"] = json!(false);
        nodes[0]["committed"] = json!(95);
        for n in &mut nodes[2..] {
            n["last_lsn"] = json!(95);
        }
        assert_eq!(judge(&nodes), one("b", "behind"));
        // A primary that lost what it had, and one that was not looked at yet.
        nodes = cluster();
        nodes[0]["attached"] = json!(false);
        nodes[0]["last_lsn"] = json!(80);
        assert_eq!(judge(&nodes), one("a", "behind"));
        nodes[0]["settling"] = json!(true);
        assert_eq!(judge(&nodes), []);
        // What was given out and never committed is no loss.
        nodes = cluster();
        nodes[0]["attached"] = json!(false);
        nodes[0]["last_lsn"] = json!(99);
        nodes[0]["committed"] = json!(90);
        assert_eq!(judge(&nodes), []);
    }

    #[test]
    fn who_has_a_sync_point_and_how_safe() {
        let mut nodes = cluster();
        nodes[0]["persisted"] = json!(80);
        nodes[0]["applied"] = json!(70);
        nodes[0]["checkpoint"] = json!(60);
        nodes[1]["level"] = json!("persistent");
        nodes[1]["applied"] = json!(90);
        nodes[3]["last_lsn"] = json!(79);
        let levels = |lsn: u64, nodes: &[Value]| -> Vec<String> {
            let all = copies(lsn, nodes, |n| n == "a");
            let word = |c: &Value| match c["applied"] == true {
                true => format!("{}, applied", text(c, "level")),
                false => text(c, "level").to_owned(),
            };
            all.as_array().unwrap().iter().map(word).collect()
        };
        let all = ["received", "persistent, applied", "received", "none"];
        assert_eq!(levels(90, &nodes), all);
        let all = ["persistent", "persistent, applied", "received", "none"];
        assert_eq!(levels(80, &nodes), all);
        let all = [
            "persistent, applied",
            "persistent, applied",
            "received",
            "received",
        ];
        assert_eq!(levels(60, &nodes), all);
        assert_eq!(levels(91, &nodes), ["none"; 4]);
        // What an older view had under this number may be another sync point.
        nodes[2]["epoch"] = json!(4);
        nodes[3]["error"] = json!("damaged");
        assert_eq!(levels(60, &nodes)[2..], ["none", "none"]);
    }

    #[test]
    fn an_old_primary_that_is_back_is_an_ill() {
        let mut nodes = cluster();
        nodes[1]["role"] = json!("primary");
        nodes[1]["epoch"] = json!(6);
        nodes[1]["view"] = json!({ "primary": "b", "mirror": "" });
        let found = judge(&nodes);
        let expected = [("a", "stale"), ("b", "alone")].map(|(n, k)| (n.into(), k.into()));
        assert_eq!(found, expected);
    }
}
