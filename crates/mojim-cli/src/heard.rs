//! A node's answers, before anything is concluded from them or shown.
//!
//! Owns what is believed of an answer. A node's key may be stolen, and a daemon may be broken. Its
//! words may not speak for another node, nor for this command.
//!
//! Invariants:
//! - A string of an answer is shown as `mojim_format::shown` has it. A comparison of names of
//!   files takes them raw.
//! - A number that no sound node says is an error of that node. Nothing else of the answer counts.
//! - With a register, a node that has no vote and is in no view moves nothing that is said of
//!   others. Its epoch, its role, its LSNs and what it tells of other nodes count for itself alone.

use mojim_format::shown::shown;
use serde_json::{Map, Value, json};

/// The greatest number that a sound node says, and that every reader of JSON reads exactly: LSNs at a
/// million a second come to it in 285 years.
const MOST: u64 = 1 << 53;

/// Numbers that are drawn at random, or that a file system says.
const ANY: [&str; 5] = ["life", "incarnation", "volume_id", "free", "needs"];

/// Makes every string fit to be shown, the names of values too.
pub fn words(v: &mut Value) {
    match v {
        Value::String(s) => {
            if let std::borrow::Cow::Owned(fit) = shown(s) {
                *s = fit;
            }
        }
        Value::Array(all) => all.iter_mut().for_each(words),
        Value::Object(all) => {
            all.values_mut().for_each(words);
            if all.keys().any(|k| shown(k) != *k) {
                let old = std::mem::take(all);
                *all = old
                    .into_iter()
                    .map(|(k, v)| (shown(&k).into_owned(), v))
                    .collect();
            }
        }
        _ => {}
    }
}

/// Fails if a number of the answer is beyond sense; the error names it.
pub fn numbers(v: &Value) -> Result<(), String> {
    fn look(key: &str, v: &Value) -> Result<(), String> {
        match v {
            Value::Array(all) => all.iter().try_for_each(|v| look(key, v)),
            Value::Object(all) => all.iter().try_for_each(|(k, v)| look(k, v)),
            Value::Number(n) if !ANY.contains(&key) => {
                let sound = match n.as_u64() {
                    Some(n) => n <= MOST,
                    None => n.as_f64().is_some_and(|f| (0.0..=MOST as f64).contains(&f)),
                };
                let beyond = || format!("its answer is beyond sense: `{}` is {n}", shown(key));
                sound.then_some(()).ok_or_else(beyond)
            }
            _ => Ok(()),
        }
    }
    look("answer", v)
}

/// Holds the rows of nodes that have no vote to what the voters know. `votes`: whether a node does.
/// Without a voter that has read the register nothing is known better.
pub fn weigh(nodes: &mut [Value], votes: impl Fn(&str) -> bool) {
    let voter = |n: &Value| n["node"].as_str().is_some_and(&votes);
    let believed = nodes.iter().filter(|n| voter(n) && n["reachable"] == true);
    let read = believed.clone().map(|n| &n["register"]);
    let read = read.filter(|r| r["version"].is_u64());
    let Some(register) = read.max_by_key(|r| r["version"].as_u64()).cloned() else {
        return;
    };
    let number = |n: &Value, key: &str| n[key].as_u64().unwrap_or(0);
    let most = |key: &str| believed.clone().map(|n| number(n, key)).max().unwrap_or(0);
    let newest = most("epoch").max(number(&register, "epoch"));
    let in_view = |n: &Value| {
        let member = |which: &str| register[which]["node"] == n["node"];
        member("primary") || member("mirror")
    };
    let of_members = nodes
        .iter()
        .filter(|n| (voter(n) || in_view(n)) && n["reachable"] == true);
    let lsns = ["last_lsn", "committed", "acked"];
    let has: Vec<u64> = of_members
        .flat_map(|n| lsns.map(|k| number(n, k)))
        .collect();
    let last = has.into_iter().max().unwrap_or(0);
    for n in nodes.iter_mut().filter(|n| !voter(n)) {
        let claims = match number(n, "epoch") {
            epoch if epoch > newest => format!("epoch {epoch}, and the voters know {newest}"),
            epoch
                if epoch == number(&register, "epoch")
                    && n["role"] == "primary"
                    && register["primary"]["node"] != n["node"] =>
            {
                "to be the primary, and the register of views names another node".to_owned()
            }
            _ => {
                hold(n, &register, in_view(n), last);
                continue;
            }
        };
        let of: Map<String, Value> = ["node", "address", "reachable"]
            .map(|k| (k.to_owned(), n[k].clone()))
            .into_iter()
            .collect();
        let name = n["node"].as_str().unwrap_or("").to_owned();
        *n = Value::Object(of);
        n["error"] = json!(format!("node {name} has no vote, and claims {claims}"));
        n["beyond"] = json!(true);
    }
}

/// Takes from a row of a node without a vote what would speak for others. What it says of the
/// register stays if the voters say the same, or if it could not read the register.
fn hold(n: &mut Value, register: &Value, in_view: bool, last: u64) {
    let Some(row) = n.as_object_mut() else {
        return;
    };
    let claims = |r: &Value| !r["version"].is_null() && r != register;
    if row.get("register").is_some_and(claims) {
        row.remove("register");
    }
    if in_view {
        return;
    }
    row.remove("backups");
    for key in ["last_lsn", "committed"] {
        if let Some(lsn) = row.get(key).and_then(Value::as_u64) {
            row.insert(key.to_owned(), json!(lsn.min(last)));
        }
    }
    if row.contains_key("attached") {
        row.insert("attached".to_owned(), json!(false));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_fit_to_be_shown_and_numbers_have_a_bound() {
        let mut v = json!({ "a\x1b": ["x\ny", { "b": "\u{9b}2J" }], "life": u64::MAX });
        words(&mut v);
        assert_eq!(
            v,
            json!({ "a\\u{1b}": ["x\\ny", { "b": "\\u{9b}2J" }], "life": u64::MAX })
        );
        assert_eq!(numbers(&v), Ok(()));
        for beyond in [json!(u64::MAX), json!(-1), json!(1e300)] {
            let v = json!({ "volumes": [{ "copy": { "do\x1bne": beyond } }] });
            let why = numbers(&v).unwrap_err();
            assert!(why.contains("`do\\u{1b}ne`"), "{why}");
        }
    }

    /// A backup's key is enough to answer `mojim status` for its node. It claimed the greatest epoch,
    /// and every other node "was" primary or mirror.
    #[test]
    fn who_has_no_vote_speaks_for_itself_alone() {
        let register = json!({
            "version": 7, "epoch": 3,
            "primary": { "node": "a" }, "mirror": { "node": "b" },
        });
        let row = |name: &str, more: Value| {
            let mut n = json!({ "node": name, "address": "-", "reachable": true, "epoch": 3,
                "state": "whole", "last_lsn": 9, "committed": 9 });
            n.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            n
        };
        let well = [
            row(
                "a",
                json!({ "role": "primary", "attached": true, "register": register }),
            ),
            row("b", json!({ "role": "mirror", "register": register })),
        ];
        let votes = |name: &str| name != "c";
        let seen = |claims: Value| {
            let mut nodes = well.to_vec();
            nodes.push(row("c", claims));
            weigh(&mut nodes, votes);
            assert_eq!(nodes[..2], well);
            nodes.pop().unwrap()
        };
        for claims in [
            json!({ "epoch": 4, "role": "backup" }),
            json!({ "role": "primary", "attached": true }),
        ] {
            let c = seen(claims);
            assert!(
                c["error"]
                    .as_str()
                    .unwrap()
                    .contains("has no vote, and claims"),
                "{c}"
            );
            assert_eq!(c.get("epoch"), None);
        }
        let c = seen(json!({
            "role": "mirror", "last_lsn": 1u64 << 50, "committed": 1u64 << 50, "attached": true,
            "backups": [{ "node": "b", "lag": 1u64 << 40 }],
            "register": { "version": 1u64 << 40, "primary": { "node": "c" } },
        }));
        assert_eq!((&c["last_lsn"], &c["committed"]), (&json!(9), &json!(9)));
        assert_eq!((c.get("backups"), c.get("register")), (None, None));
        assert_eq!(c["attached"], false);
        // What it says of itself, and soundly, stays; and what the voters say, too.
        let same = seen(json!({ "role": "backup", "register": well[0]["register"] }));
        assert_eq!(same["register"], well[0]["register"]);
        let unread = seen(json!({ "role": "backup", "register": { "error": "no voter leads" } }));
        assert_eq!(unread["register"]["error"], "no voter leads");
        let sound = seen(json!({ "role": "backup", "last_lsn": 8, "committed": 8 }));
        assert_eq!(sound["last_lsn"], 8);
    }
}
