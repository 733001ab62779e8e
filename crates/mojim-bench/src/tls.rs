//! `mojim bench tls`: what keys cost a sync point.
//!
//! The same volume three times over TCP: without keys, with encrypted links,
//! and with links that authenticate both ends only (`encrypt = false`). The three
//! take turns in one run. Each round gives the difference of its medians. The cost of keys is the
//! median of these differences over the rounds. The keys are made for the run.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mojim::Volume;
use mojim_config::Config;
use mojim_config::key_files;
use mojim_format::certificate::Subject as Name;
use mojim_keys::{Authority, Validity};
use serde_json::json;

use crate::cluster::{NodeProcess, free_addresses, mojim_subject, target};
use crate::measure::{Paired, Plan, Subject, paired};
use crate::raw::{pin_process, pin_thread, placement};
use crate::report::{Row, write_table};
use crate::scratch::Scratch;

/// Sizes of a sync point, in bytes.
pub const SIZES: [usize; 2] = [64, 4096];

/// What to measure.
#[derive(Debug, Clone)]
pub struct TlsOptions {
    /// One JSON object a line instead of tables.
    pub json: bool,
    /// Where the files go. Default: the temporary directory.
    pub dir: Option<PathBuf>,
    /// Sizes in bytes; empty: 64 B and 4 KiB.
    pub sizes: Vec<usize>,
    /// Rounds of paired blocks for each size.
    pub rounds: usize,
    /// Operations in a block.
    pub ops: usize,
}

/// The link without keys, to which the others are compared.
const BARE: &str = "tcp";
/// The links with keys, and whether they are encrypted.
const KEYED: [(&str, bool); 2] = [("tls", true), ("tls-plain", false)];

/// A cluster with one volume for each link, in a directory `name` below `dir`.
fn cluster(dir: &Path, shm: &Path, name: &str, links: &[(&str, bool)]) -> io::Result<Config> {
    let dir = dir.join(name);
    fs::create_dir_all(&dir)?;
    let keys = dir.join("keys");
    let keyed = links.iter().any(|(link, _)| *link != BARE);
    let mut t = format!("cluster = \"{name}\"\n");
    if keyed {
        t += &format!("keys = \"{}\"\n", keys.display());
    }
    for (link, encrypt) in links {
        t += &format!(
            "[volume.{link}]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"b\"\nresend_timeout = \"2s\"\n"
        );
        if keyed {
            t += &format!("encrypt = {encrypt}\n");
        }
    }
    for (node, address) in ["a", "b"].iter().zip(free_addresses::<2>()?) {
        let log = match *node {
            "a" => "{ medium = \"disk\", size = \"64MiB\" }".to_owned(),
            _ => format!(
                "{{ medium = \"dram\", path = \"{}\", size = \"64MiB\" }}",
                shm.join(name).display()
            ),
        };
        t += &format!(
            "[node.{node}]\naddress = \"{address}\"\ndirectory = \"{}\"\nring = \"{}\"\nlog = {log}\n",
            dir.join(node).display(),
            shm.display()
        );
    }
    let file = dir.join("bench.toml");
    fs::write(&file, t)?;
    let config = Config::load(&file).map_err(io::Error::other)?;
    if keyed {
        make_keys(&config, &keys)?;
    }
    Ok(config)
}

fn make_keys(config: &Config, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let put = |path: PathBuf, text: String| {
        let mut new = OpenOptions::new();
        new.write(true).create_new(true).mode(0o600);
        new.open(path)?.write_all(text.as_bytes())
    };
    let new = Authority::make(&config.cluster).map_err(io::Error::other)?;
    put(key_files::authority(dir), new.certificate)?;
    for node in config.nodes.keys() {
        let name = Name::Node(node.clone());
        let text = new.authority.issue(&name, Validity::days(1));
        put(
            key_files::certificate(dir, &name),
            text.map_err(io::Error::other)?,
        )?;
    }
    Ok(())
}

/// How much more than the bare link, in microseconds: the median over the rounds.
fn more_us(p: &Paired, link: &str) -> Option<f64> {
    let (one, other) = (p.round_medians_us(link)?, p.round_medians_us(BARE)?);
    let mut all: Vec<f64> = one.iter().zip(other).map(|(x, y)| x - y).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

/// A volume that is attached: its link, and where its region begins.
type Attached = (String, Volume, usize);

/// Starts the clusters' mirrors, pinned to `peer`, and attaches their volumes. The mirrors end
/// when they are dropped.
fn attach(
    configs: &[&Config],
    peer: Option<usize>,
) -> io::Result<(Vec<NodeProcess>, Vec<Attached>)> {
    let mut mirrors = Vec::new();
    let mut volumes = Vec::new();
    for config in configs {
        let mirror = NodeProcess::start(&config.path, "b")?;
        for link in config.volumes.keys() {
            let v = Volume::attach_with(config, "a", Some(link), |_, _| {})
                .map_err(io::Error::other)?;
            let base = target(&v)?;
            volumes.push((link.clone(), v, base));
        }
        if let Some(peer) = peer {
            pin_process(mirror.id(), peer)?;
        }
        mirrors.push(mirror);
    }
    Ok((mirrors, volumes))
}

/// Lets the links take turns with sync points of `bytes` bytes.
fn one_size(o: &TlsOptions, volumes: &[Attached], bytes: usize) -> io::Result<Paired> {
    let mut subjects: Vec<Box<dyn Subject + Send>> = volumes
        .iter()
        .map(|(link, _, base)| mojim_subject(link.clone(), *base, bytes))
        .collect();
    let mut refs: Vec<&mut dyn Subject> = subjects.iter_mut().map(|s| &mut **s as _).collect();
    let plan = Plan {
        rounds: o.rounds,
        ops: o.ops,
        ..Plan::default()
    };
    paired(&mut refs, plan)
}

/// Prints a row for each link, with its ratio to the bare one.
fn print_links(
    o: &TlsOptions,
    volumes: &[Attached],
    bytes: usize,
    p: &Paired,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows = Vec::new();
    for (link, ..) in volumes {
        let Some(s) = p.summary(link) else { continue };
        let row = Row::new("tls", "mojim", bytes, s)
            .mode("sync")
            .transport(link);
        rows.push(match p.ratio(link, BARE) {
            Some(r) if link != BARE => row.ratio(r, BARE),
            _ => row,
        });
    }
    if o.json {
        rows.iter().try_for_each(|r| r.write_json(out))
    } else {
        writeln!(out, "\nsync, {bytes} bytes")?;
        write_table(&rows, out)
    }
}

/// Prints what keys add to a sync point.
fn print_differences(
    o: &TlsOptions,
    bytes: usize,
    p: &Paired,
    out: &mut impl Write,
) -> io::Result<()> {
    for (link, _) in KEYED {
        let Some(more) = more_us(p, link) else {
            continue;
        };
        if o.json {
            let more = (more * 1e3).round() / 1e3;
            let row = json!({
                "bench": "tls", "case": "difference", "transport": link, "to": BARE,
                "bytes": bytes, "more_us": more, "rounds": p.rounds(),
            });
            writeln!(out, "{row}")?;
        } else {
            writeln!(out, "{link}: {more:+.2} us against {BARE}")?;
        }
    }
    Ok(())
}

/// Runs the benchmark and prints it.
pub fn run(o: &TlsOptions) -> io::Result<()> {
    let parent = o.dir.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = Scratch::new_in(&parent)?;
    let memory = Scratch::new_in(Path::new("/dev/shm"))?;
    let make = |name, links: &[_]| cluster(scratch.path(), memory.path(), name, links);
    let bare = make("bare", &[(BARE, false)])?;
    let keyed = make("keyed", &KEYED)?;
    let cpus = placement();
    let (_mirrors, volumes) = attach(&[&bare, &keyed], cpus.map(|(_, peer)| peer))?;
    let sizes = match o.sizes.is_empty() {
        true => SIZES.to_vec(),
        false => o.sizes.clone(),
    };
    let pinned = match cpus {
        Some((client, _)) => Some(pin_thread(client)?),
        None => None,
    };
    let mut out = io::stdout().lock();
    for bytes in sizes {
        let p = one_size(o, &volumes, bytes)?;
        print_links(o, &volumes, bytes, &p, &mut out)?;
        print_differences(o, bytes, &p, &mut out)?;
    }
    drop(pinned);
    for (_, v, _) in volumes {
        v.detach().map_err(io::Error::other)?;
    }
    Ok(())
}
