//! `mojim verify`: whether the copies of a volume are equal, byte by byte.
//!
//! Owns the command's output. The comparison is `compare`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use mojim_config::{Config, Node, Volume};
use mojim_format::shown::shown;
use mojim_replica::request::Request;
use serde_json::{Value, json};

use crate::ask::{LONG, ask, load};
use crate::compare::{compare, compare_all, count};
use crate::failure::{Done, Failure};
use crate::output;
use crate::status::{gather, holders};
use crate::typed::typed;

/// Compare the copies of a volume on its nodes. A program may be attached.
///
/// A part that changes during the comparison is read again. The comparison ends when it is equal,
/// or when both nodes show a state that must be the same on both.
///
/// Exit code 0: the copies are equal.
///
/// Exit code 1: one of these is so:
///
/// - The copies differ. The command prints the first difference. See `mojim repair`.
///
/// - The volume's directory of a node has files that are not the volume's.
///
/// - A node does not answer.
///
/// Exit code 2: some bytes could not be compared. They changed too fast, or a copy is not whole.
/// Try again, or with a longer --wait.
#[derive(clap::Args)]
pub struct Verify {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume. You may leave it out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Seconds to wait for parts that change all the time.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Verify {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        if volume.mirror.is_none() {
            return Err(Failure::usage(format!(
                "{}: volume {} has one copy only; there is nothing to compare",
                self.config.display(),
                volume.name
            )));
        }
        let found = compare_all(&config, volume, Duration::from_secs(self.wait))?;
        let (code, mut json, mut text) = if let Some(d) = found.differences.first() {
            let n = found.differences.len();
            (
                1,
                json!({
                    "equal": false, "file": d.file, "offset": d.offset, "what": d.what,
                    "differences": n,
                }),
                match n {
                    1 => d.what.clone(),
                    _ => format!("{} ({n} pages or files differ in all)", d.what),
                },
            )
        } else if let Some(why) = &found.undecided {
            (
                2,
                json!({ "equal": null, "what": why }),
                format!("cannot be compared now: {}", shown(why)),
            )
        } else {
            let (files, bytes, lsn) = (found.files, found.bytes, found.lsn);
            (
                0,
                json!({ "equal": true, "files": files, "bytes": bytes, "lsn": lsn }),
                format!(
                    "the copies are equal: {}, {bytes} bytes, at LSN {lsn}",
                    count(files, "file")
                ),
            )
        };
        if !found.differences.is_empty() {
            let advice = Advice::of(&config, volume, Duration::from_secs(self.wait));
            json["odd"] = json!(advice.odd);
            json["do"] = json!(typed(&advice.todo));
            text = format!("{}\n{}", shown(&text), advice.text());
        }
        let unmanaged = unmanaged_files(&config, volume);
        if self.json {
            let mut json = json;
            json["volume"] = json!(volume.name);
            if !unmanaged.is_empty() {
                json["strangers"] = json!(unmanaged);
            }
            output::json(&json)?;
        } else {
            let mut lines = format!("volume {}: {text}\n", volume.name);
            for (node, s) in &unmanaged {
                say_unmanaged(&mut lines, node, s);
            }
            output::text(&lines)?;
        }
        Ok(match unmanaged.is_empty() {
            true => code,
            false => code.max(1),
        })
    }
}

/// What an operator can do about copies that differ.
struct Advice {
    /// The node whose copy alone differs from all others, which are equal.
    odd: Option<String>,
    todo: String,
}

impl Advice {
    fn of(config: &Config, volume: &Volume, wait: Duration) -> Advice {
        let odd = odd_one(config, volume, wait);
        let all = gather(config, Some(&volume.name));
        let rows = all["volumes"][0]["nodes"].as_array();
        let leads = |n: &&Value| n["role"] == "primary" && n["stale"] != true;
        let primary = rows.into_iter().flatten().find(leads);
        let primary = primary.and_then(|n| n["node"].as_str()).unwrap_or("");
        let of = |node: &str| format!("`mojim repair --volume {} --name {node}`", volume.name);
        let todo = match &odd {
            Some(odd) if odd == primary => format!(
                "the primary's copy is the odd one. `mojim repair` would spread it: run `mojim promote` on another node first, then {}",
                of(odd)
            ),
            Some(odd) => format!("{} makes its copy equal to the primary's", of(odd)),
            None => format!(
                "find out which copy is right: {} makes NODE's copy equal to the primary's. If the primary's copy is the wrong one, run `mojim promote` on another node first",
                of("NODE")
            ),
        };
        Advice { odd, todo }
    }

    fn text(&self) -> String {
        let odd = self.odd.iter();
        let odd: String = odd
            .map(|odd| format!("  the copy of node {odd} is the odd one: the others are equal\n"))
            .collect();
        format!("{odd}  what to do: {}", self.todo)
    }
}

/// The node whose copy differs from all others, of three or more, which are equal.
fn odd_one(config: &Config, volume: &Volume, wait: Duration) -> Option<String> {
    let holders = holders(config, volume);
    let equal = |a: &Node, b: &Node| {
        let found = compare(config, volume, [a, b], wait).ok()?;
        let decided = found.undecided.is_none() || !found.differences.is_empty();
        decided.then_some(found.differences.is_empty())
    };
    let mut equals = vec![0; holders.len()];
    for (i, a) in holders.iter().enumerate() {
        for (j, b) in holders.iter().enumerate().skip(i + 1) {
            if equal(a, b)? {
                equals[i] += 1;
                equals[j] += 1;
            }
        }
    }
    odd_by(&equals).map(|i| holders[i].name.clone())
}

/// Which of three or more copies differs from all others, which are equal, by how many each is equal to.
fn odd_by(equals: &[usize]) -> Option<usize> {
    let n = equals.len();
    let odd = equals.iter().position(|e| *e == 0)?;
    let mut others = equals.iter().enumerate().filter(|(i, _)| *i != odd);
    (n > 2 && others.all(|(_, e)| *e == n - 2)).then_some(odd)
}

/// What lies in the volume's directories past Mojim, by node: on every node it is on that one only.
/// A node that does not answer any more has said already whether the copies are equal.
fn unmanaged_files(config: &Config, volume: &Volume) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for node in holders(config, volume) {
        let question = Request::Status {
            volume: Some(volume.name.clone()),
            register: false,
        };
        let said = match ask(config, node, LONG, &question) {
            Ok(said) => said,
            Err(f) => {
                f.report();
                continue;
            }
        };
        let of_volume = said["volumes"].as_array().into_iter().flatten();
        let mut found = of_volume.filter(|v| v["volume"] == volume.name.as_str());
        if let Some(s) = found.find_map(|v| v.get("strangers")) {
            all.insert(node.name.clone(), s.clone());
        }
    }
    all
}

fn say_unmanaged(out: &mut String, node: &str, s: &Value) {
    let path = s["path"].as_str().unwrap_or_default();
    let names = |key: &str| {
        s[key]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
    };
    for name in names("unknown") {
        *out += &format!("node {node}: {path}/{name} is not the volume's, and on this node only\n");
    }
    for what in names("changed") {
        *out += &format!("node {node}: {path}: {what}: somebody changed it past Mojim\n");
    }
    for (key, of) in [("unknown_count", "unknown"), ("changed_count", "changed")] {
        let count = s[key].as_u64().unwrap_or(0);
        let more = count.saturating_sub(names(of).count() as u64);
        if more > 0 {
            *out += &format!("node {node}: {path}: {more} more files like the last one\n");
        }
    }
    if s["all_seen"] == false {
        *out += &format!("node {node}: {path}: there are more files than were looked at\n");
    }
}

#[cfg(test)]
mod tests {
    use super::odd_by;

    #[test]
    fn the_odd_one_differs_from_all_others_which_are_equal() {
        // Of two nobody knows; of three one, or all differ; of four, two and two.
        assert_eq!(odd_by(&[0, 0]), None);
        assert_eq!(odd_by(&[1, 0, 1]), Some(1));
        assert_eq!(odd_by(&[0, 0, 0]), None);
        assert_eq!(odd_by(&[2, 2, 2, 0]), Some(3));
        assert_eq!(odd_by(&[1, 1, 1, 1]), None);
        assert_eq!(odd_by(&[1, 1, 0, 0]), None);
    }
}
