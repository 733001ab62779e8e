//! `mojim repair`: makes a copy that differs equal to the primary's.
//!
//! Pages are rewritten one by one with the primary's bytes, while sync points
//! go on. Where names or sizes of files differ, the copy is made anew, by
//! difference. The operator must know which of the two copies is right.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mojim_config::{Config, Node, Volume};
use mojim_format::shown::shown;
use mojim_replica::request::{Part, Request, Since};
use serde_json::{Value, json};

use crate::ask::{Asked, LONG, ask, demand, load, plain};
use crate::compare::{CompareResult, compare, count};
use crate::failure::{Done, Failure};
use crate::output;
use crate::status::{gather, holders};

/// How long a page may be too far behind to be rewritten, and a copy may stand still.
const PATIENCE: Duration = Duration::from_secs(60);

/// Make a copy of a volume equal to its primary's again.
///
/// The command compares as `mojim verify` does, and asks. Then it rewrites the pages that differ
/// with the primary's bytes, and compares again. It works with and without an attached program.
///
/// If files are missing or have other sizes, the whole copy is made anew, by difference. The node
/// is no mirror meanwhile, and sync points wait in modes that need a mirror. Without a program,
/// the primary's daemon makes the copy.
///
/// A copy that cannot be used is given up first. With `--anew`, that holds for any damage. A
/// program must run on the primary.
///
/// The command cannot know whether the primary's copy is the wrong one.
///
/// Exit code 0: the copies are equal at the end. 1: they are not.
#[derive(clap::Args)]
pub struct Repair {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The volume. You may leave it out if there is only one.
    #[arg(long, value_name = "VOLUME")]
    volume: Option<String>,
    /// The node whose copy is repaired [default: the one that is not the primary].
    #[arg(long, value_name = "NODE")]
    name: Option<String>,
    /// Make the whole copy anew, by difference, in any case.
    #[arg(long)]
    anew: bool,
    /// Do not ask for confirmation.
    #[arg(long)]
    yes: bool,
    /// Seconds to wait for parts that change all the time.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    wait: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Repair {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        let volume = config.volume(self.volume.as_deref())?;
        let wait = Duration::from_secs(self.wait);
        let nodes = self.nodes(&config, volume)?;
        let node = nodes[1];
        let found = match compare(&config, volume, nodes, wait) {
            // A copy that cannot be used cannot be compared either.
            Err(e) if self.anew => CompareResult {
                undecided: Some(e.text),
                ..CompareResult::default()
            },
            r => r?,
        };
        if found.differences.is_empty() && !self.anew {
            return match found.undecided {
                None => self.say(volume, node, &found, 0, false),
                Some(why) => {
                    let why = shown(&why);
                    Err(Failure::failed(format!("cannot be compared now: {why}")))
                }
            };
        }
        let pages: Vec<(u64, u64)> = found.differences.iter().filter_map(|d| d.page).collect();
        let anew = self.anew || pages.len() < found.differences.len();
        let epoch = match anew {
            true => check_primary(&config, volume, nodes[0], wait)?,
            false => 0,
        };
        if !self.yes && !self.asked(volume, node, &found, anew)? {
            return Err(Failure::failed("nothing was changed"));
        }
        if anew {
            copy_anew(&config, volume, node, epoch, wait)?;
        } else {
            let mut at = Asked::to_order(&config, node, LONG)?;
            for (id, offset) in &pages {
                rewrite(&mut at, volume, *id, *offset)?;
            }
        }
        let after = compare(&config, volume, nodes, wait)?;
        if let Some(d) = after.differences.first() {
            return Err(Failure::failed(format!(
                "volume {}: still different: {}",
                volume.name,
                shown(&d.what)
            )));
        }
        if let Some(why) = &after.undecided {
            return Err(Failure::failed(format!(
                "volume {}: repaired, but it cannot be compared now: {}",
                volume.name,
                shown(why)
            )));
        }
        self.say(volume, node, &after, pages.len(), anew)
    }

    /// The primary, and whose copy is to be repaired.
    fn nodes<'a>(&self, config: &'a Config, volume: &'a Volume) -> Result<[&'a Node; 2], Failure> {
        let all = gather(config, Some(&volume.name));
        let none = Vec::new();
        let rows = all["volumes"][0]["nodes"].as_array().unwrap_or(&none);
        let named = |n: &Value| n["node"].as_str().unwrap_or("").to_owned();
        let epoch = |n: &&Value| n["epoch"].as_u64().unwrap_or(0);
        let primary = rows
            .iter()
            .filter(|n| n["role"] == "primary")
            .max_by_key(epoch)
            .map(named)
            .ok_or_else(|| {
                Failure::failed(format!("volume {}: no primary answers", volume.name))
            })?;
        let mirrors: Vec<&Value> = rows.iter().filter(|n| n["role"] == "mirror").collect();
        let name = match (&self.name, &mirrors[..]) {
            (Some(name), _) => name.clone(),
            (None, [mirror]) => named(mirror),
            _ => {
                return Err(Failure::failed(format!(
                    "volume {}: say with --name which node's copy is to be repaired",
                    volume.name
                )));
            }
        };
        if name == primary {
            return Err(Failure::failed(format!(
                "node {name} is the primary of volume {}: the other copies are made equal to its own",
                volume.name
            )));
        }
        let holder = |name: &str| {
            let found = holders(config, volume).into_iter().find(|n| n.name == name);
            found.ok_or_else(|| {
                Failure::usage(format!(
                    "{}: node {name} does not hold volume {}",
                    self.config.display(),
                    volume.name
                ))
            })
        };
        Ok([holder(&primary)?, holder(&name)?])
    }

    fn asked(
        &self,
        volume: &Volume,
        node: &Node,
        found: &CompareResult,
        anew: bool,
    ) -> Result<bool, Failure> {
        let differences = &found.differences;
        let files: BTreeSet<&str> = differences.iter().map(|d| d.file.as_str()).collect();
        let why = found.undecided.as_deref().unwrap_or("none was found");
        let first = shown(differences.first().map_or(why, |d| &d.what));
        let how = match anew {
            true => {
                "its whole copy is made anew, by difference, and it is no mirror until then. A copy that cannot be used is given up at once"
            }
            false => "each such page is rewritten",
        };
        eprint!(
            "Volume {}: {} in {}; {first}.\nThe copy of node {} is made equal to the primary's: {how}.\nIf the primary's copy is the wrong one, this destroys the right one. Go on? [y/N] ",
            volume.name,
            count(differences.len(), "difference"),
            count(files.len(), "file"),
            node.name
        );
        let mut word = String::new();
        std::io::stdin().read_line(&mut word)?;
        Ok(matches!(word.trim(), "y" | "yes"))
    }

    fn say(
        &self,
        volume: &Volume,
        node: &Node,
        found: &CompareResult,
        pages: usize,
        anew: bool,
    ) -> Done {
        if self.json {
            let v = json!({
                "volume": volume.name, "node": node.name, "equal": true, "lsn": found.lsn,
                "pages": pages, "copied_anew": anew,
            });
            output::json(&v)?;
            return Ok(0);
        }
        let done = match (anew, pages) {
            (true, _) => "its copy was made anew".to_owned(),
            (false, 0) => "there was nothing to repair".to_owned(),
            (false, n) => format!("{n} pages of 4 KiB were rewritten"),
        };
        output::text(&format!(
            "volume {}, node {}: {done}; the copies are equal at LSN {}\n",
            volume.name, node.name, found.lsn
        ))?;
        Ok(0)
    }
}

fn rewrite(at: &mut Asked, volume: &Volume, id: u64, offset: u64) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let q = Request::Rewrite {
            volume: volume.name.clone(),
            id,
            offset,
        };
        let why = match at.ask(&q) {
            Ok(v) if v["done"] == true => return Ok(()),
            Ok(_) => "the copies are too far apart".to_owned(),
            Err(e) if e.errno() == libc::EBUSY => plain(&e),
            Err(e) => return Err(Failure::failed(format!("{}: {}", at.who(), plain(&e)))),
        };
        if begin.elapsed() > PATIENCE {
            return Err(Failure::failed(format!(
                "{}: the page at {offset} could not be rewritten: {why}",
                at.who()
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Fails unless the primary's catalogue can be read: another copy is given up for its own.
/// Returns its epoch if a program is attached there and can commit; else 0.
fn check_primary(
    config: &Config,
    volume: &Volume,
    primary: &Node,
    wait: Duration,
) -> Result<u64, Failure> {
    let mut at = Asked::connect(config, primary, LONG)?;
    let q = Request::Files {
        volume: volume.name.clone(),
        since: Since::default(),
        // Whether the catalogue can be read; no file has the number 0.
        part: Part {
            until: 1,
            ..Part::default()
        },
    };
    let deadline = Instant::now() + wait;
    loop {
        let why = match at.ask(&q) {
            Ok(v) if v["state"] == "whole" => break,
            Ok(v) => format!("it is {}", v["state"].as_str().unwrap_or("unknown")),
            // A program attaches, or the daemon looks at it.
            Err(e) if e.errno() == libc::EBUSY && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(e) => plain(&e),
        };
        return Err(Failure::failed(format!(
            "{}: the primary's copy cannot be read, so nothing is given up for it: {why}",
            at.who()
        )));
    }
    let v = of_volume(&ask(config, primary, LONG, &status_of(volume))?, volume);
    let works = v["attached"] == true && v["attaching"] != true && v["failed"] != true;
    Ok(v["epoch"].as_u64().filter(|_| works).unwrap_or(0))
}

/// What a node knows of the volume itself: nobody waits for the voters.
fn status_of(volume: &Volume) -> Request {
    Request::Status {
        volume: Some(volume.name.clone()),
        register: false,
    }
}

/// What a node's status says of the volume.
fn of_volume(all: &Value, volume: &Volume) -> Value {
    let mut rows = all["volumes"].as_array().into_iter().flatten();
    let found = rows.find(|v| v["volume"] == volume.name.as_str());
    found.cloned().unwrap_or_default()
}

/// Has the copy made anew and waits for it.
fn copy_anew(
    config: &Config,
    volume: &Volume,
    node: &Node,
    epoch: u64,
    wait: Duration,
) -> Result<(), Failure> {
    let q = Request::CopyAnew {
        volume: volume.name.clone(),
        epoch,
    };
    // Its daemon may be trying to open the copy just now.
    demand(config, node, LONG, &q, wait)?;
    let q = status_of(volume);
    await_copy(&node.name, || {
        ask(config, node, LONG, &q).map(|all| of_volume(&all, volume))
    })
}

/// Waits until node `name` follows with a whole copy. `ask`: what it says of it.
fn await_copy(name: &str, mut ask: impl FnMut() -> Result<Value, Failure>) -> Result<(), Failure> {
    let mut moved = Value::Null;
    let mut since = Instant::now();
    loop {
        // It may be late while it opens the copy, or be started again: the copy goes on.
        let said = ask();
        let v = said.as_ref().unwrap_or(&Value::Null);
        if v["state"] == "whole" && v["distrusted"] != true && v["link"]["up"] == true {
            return Ok(());
        }
        if v["copy"]["moved"] != moved && said.is_ok() {
            moved = v["copy"]["moved"].clone();
            since = Instant::now();
        }
        if since.elapsed() > PATIENCE {
            said?;
            return Err(Failure::failed(format!(
                "node {name} waits for a copy from the primary. The output of the primary's daemon says more"
            )));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that was late with one answer, as while it opened its copy, ended the command with an error,
    /// and the copy was made all the same.
    #[test]
    fn a_late_answer_ends_no_repair() {
        let whole = json!({ "state": "whole", "link": { "up": true } });
        let loading = json!({ "state": "loading", "copy": { "moved": 7 } });
        let late = || Err(Failure::failed("node b does not answer"));
        let mut said = [late(), Ok(loading), late(), Ok(whole)].into_iter();
        await_copy("b", || said.next().expect("it is whole by then")).unwrap();
        assert!(said.next().is_none());
    }
}
