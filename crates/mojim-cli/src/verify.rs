//! `mojim verify`: whether the copies of a volume are equal, byte by byte.
//!
//! Owns the command's output; the comparison is `compare`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use mojim_config::{Config, Volume};
use mojim_format::shown::shown;
use mojim_replica::request::Request;
use serde_json::{Value, json};

use crate::ask::{LONG, ask, load};
use crate::compare::{compare_all, count};
use crate::failure::{Done, Failure};
use crate::output;
use crate::status::holders;

/// Compare the copies of a volume on its nodes, also while a program is attached.
///
/// Exit code 0 if they are equal; 1 if they differ (the first difference is printed), if files lie in
/// the volume's directory of a node that are not the volume's, or if a node does not answer; 2 if it could not be said of all bytes, because they changed too fast or a
/// copy is not whole: try again, or with a longer --wait. What changes while it is compared is
/// looked at again, until both nodes show what must be the same on both, or it is equal. See `mojim repair`.
#[derive(clap::Args)]
pub struct Verify {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume; may be left out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// Seconds after which what is still in motion is given up.
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
        let (code, json, text) = if let Some(d) = found.differences.first() {
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
                format!("cannot be compared now: {why}"),
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
        let strangers = strangers(&config, volume);
        if self.json {
            let mut json = json;
            json["volume"] = json!(volume.name);
            if !strangers.is_empty() {
                json["strangers"] = json!(strangers);
            }
            output::json(&json)?;
        } else {
            let mut lines = format!("volume {}: {}\n", volume.name, shown(&text));
            for (node, s) in &strangers {
                say_strangers(&mut lines, node, s);
            }
            output::text(&lines)?;
        }
        Ok(match strangers.is_empty() {
            true => code,
            false => code.max(1),
        })
    }
}

/// What lies in the volume's directories past Mojim, by node: on every node it is on that one only.
/// A node that does not answer any more has said already whether the copies are equal.
fn strangers(config: &Config, volume: &Volume) -> BTreeMap<String, Value> {
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

fn say_strangers(out: &mut String, node: &str, s: &Value) {
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
