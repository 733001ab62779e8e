//! `mojim config`: checks a configuration and shows it with every default filled in.

use std::path::PathBuf;
use std::time::Duration;

use mojim_config::{Config, Node, Role, Volume};
use mojim_replica::layout;
use serde_json::{Map, Value, json};

use crate::ask::load;
use crate::failure::Done;
use crate::output;

/// Check a configuration file, and print it with every default filled in.
///
/// The command reports all mistakes, each with its line. Exit code 2: there is a mistake.
#[derive(clap::Args)]
pub struct Check {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print JSON. Sizes are in bytes, times in microseconds.
    #[arg(long)]
    json: bool,
}

impl Check {
    /// Runs it.
    pub fn run(self) -> Done {
        let config = load(&self.config)?;
        match self.json {
            true => output::json_lines(&data(&config))?,
            false => output::text(&text(&config))?,
        }
        Ok(0)
    }
}

/// The configuration as JSON.
fn data(c: &Config) -> Value {
    let volumes = c.volumes.values();
    let volumes: Map<_, _> = volumes.map(|v| (v.name.clone(), volume_data(v))).collect();
    let nodes = c.nodes.values();
    let nodes: Map<_, _> = nodes.map(|n| (n.name.clone(), node_data(c, n))).collect();
    json!({
        "cluster": c.cluster,
        "keys": c.keys.as_ref().map(|k| k.display().to_string()),
        "insecure_network": c.insecure_network,
        "heartbeat_us": us(c.heartbeat),
        "failure_limit_us": us(c.failure_limit),
        "warnings": c.warnings(),
        "volume": volumes,
        "node": nodes,
    })
}

fn volume_data(v: &Volume) -> Value {
    json!({
        "mode": v.mode.as_str(),
        "primary": v.primary,
        "mirror": v.mirror,
        "connections": v.connections,
        "copy_streams": v.copy_streams,
        "checkpoint_threshold": v.checkpoint_threshold,
        "write_back": v.write_back.as_str(),
        "write_back_pages": v.write_back_pages,
        "msync_rounding": v.rounding.as_str(),
        "resend_timeout_us": us(v.resend_timeout),
        "resend_attempts": v.resend_attempts,
        "transport": v.transport.as_str(),
        "encrypt": v.encrypt,
        "spin_us": us(v.spin),
        "tracker": v.tracker.as_str(),
        "working": v.working.as_str(),
        "memory": v.memory,
        "max_uncommitted": v.max_uncommitted,
        "backups": v.backups,
        "secondary_threshold": v.secondary_threshold,
        "failover": v.failover.as_str(),
        "fallback": v.fallback.as_str(),
    })
}

/// A node, with the files of its volumes' logs.
fn node_data(c: &Config, n: &Node) -> Value {
    let logs: Map<String, Value> = c
        .volumes
        .values()
        .filter(|v| v.data_nodes().contains(&n.name.as_str()))
        .map(|v| {
            let paths: Vec<_> = layout::logs(c, n, v)
                .iter()
                .map(|l| l.path.display().to_string())
                .collect();
            (v.name.clone(), json!(paths))
        })
        .collect();
    let mut value = json!({
        "address": n.address.to_string(),
        "directory": n.directory.display().to_string(),
        "role": n.role.as_str(),
        "rack": n.rack,
        "vote": n.vote,
        "replaces": n.replaces,
    });
    if n.role == Role::Data {
        value["ring"] = json!(n.ring.display().to_string());
        value["log"] =
            json!({ "medium": n.log.medium.as_str(), "size": n.log.size, "files": logs });
        if let Some(e) = n.log.emulate {
            value["log"]["emulate"] = json!(e.as_str());
        }
    }
    value
}

fn us(d: Duration) -> u64 {
    d.as_micros() as u64
}

/// The configuration in its own language.
fn text(c: &Config) -> String {
    let mut t = format!(
        "cluster = {}\ninsecure_network = {}\nheartbeat = {}\nfailure_limit = {}\n",
        quote(&c.cluster),
        c.insecure_network,
        time(c.heartbeat),
        time(c.failure_limit),
    );
    if let Some(keys) = &c.keys {
        t += &format!("keys = {}\n", quote(&keys.to_string_lossy()));
    }
    for w in c.warnings() {
        t = format!("# {w}\n{t}");
    }
    for v in c.volumes.values() {
        t += &volume_text(v, c.keys.is_some());
    }
    for n in c.nodes.values() {
        t += &node_text(n);
    }
    t
}

/// The section of a volume. Without keys it has no key `encrypt`.
fn volume_text(v: &Volume, keyed: bool) -> String {
    let mut t = format!(
        "\n[volume.{}]\nmode = \"{}\"\nprimary = {}\n",
        v.name,
        v.mode,
        quote(&v.primary)
    );
    if let Some(m) = &v.mirror {
        t += &format!("mirror = {}\n", quote(m));
    }
    t += &format!(
        "connections = {}\ncheckpoint_threshold = {}\nwrite_back = \"{}\"\nwrite_back_pages = {}\nmsync_rounding = \"{}\"\nresend_timeout = {}\nresend_attempts = {}\ntransport = \"{}\"\nspin = {}\ntracker = \"{}\"\nworking = \"{}\"\n",
        v.connections,
        v.checkpoint_threshold,
        v.write_back,
        v.write_back_pages,
        v.rounding,
        time(v.resend_timeout),
        v.resend_attempts,
        v.transport,
        time(v.spin),
        v.tracker,
        v.working,
    );
    for (key, bytes) in [("memory", v.memory), ("max_uncommitted", v.max_uncommitted)] {
        if let Some(bytes) = bytes {
            t += &format!("{key} = {}\n", size(bytes));
        }
    }
    if let Some(n) = v.copy_streams {
        t += &format!("copy_streams = {n}\n");
    }
    if keyed {
        t += &format!("encrypt = {}\n", v.encrypt);
    }
    if v.mirror.is_some() {
        t += &format!("failover = \"{}\"\n", v.failover);
    }
    if !v.backups.is_empty() {
        t += &format!(
            "backups = [{}]\nsecondary_threshold = {}\nfallback = \"{}\"\n",
            list(&v.backups),
            size(v.secondary_threshold),
            v.fallback,
        );
    }
    t
}

/// The section of a node. A witness has no log.
fn node_text(n: &Node) -> String {
    let mut t = format!(
        "\n[node.{}]\naddress = \"{}\"\ndirectory = {}\nrole = \"{}\"\nvote = {}\n",
        n.name,
        n.address,
        quote(&n.directory.to_string_lossy()),
        n.role,
        n.vote,
    );
    if let Some(r) = &n.rack {
        t += &format!("rack = {}\n", quote(r));
    }
    if !n.replaces.is_empty() {
        t += &format!("replaces = [{}]\n", list(&n.replaces));
    }
    if n.role == Role::Witness {
        return t;
    }
    t += &format!("ring = {}\n", quote(&n.ring.to_string_lossy()));
    t += &format!("log.medium = \"{}\"\n", n.log.medium);
    if let Some(e) = n.log.emulate {
        t += &format!("log.emulate = \"{e}\"\n");
    }
    if let Some(p) = &n.log.path {
        t += &format!("log.path = {}\n", quote(&p.to_string_lossy()));
    }
    t += &format!("log.size = {}\n", size(n.log.size));
    t
}

fn quote(s: &str) -> String {
    Value::from(s).to_string()
}

fn list(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|n| quote(n)).collect();
    names.join(", ")
}

/// A time in the largest unit that has no rest.
fn time(d: Duration) -> String {
    let ns = d.as_nanos();
    match () {
        () if ns.is_multiple_of(1_000_000_000) => format!("\"{}s\"", d.as_secs()),
        () if ns.is_multiple_of(1_000_000) => format!("\"{}ms\"", d.as_millis()),
        () => format!("\"{}us\"", d.as_micros()),
    }
}

/// Bytes in the largest unit that has no rest.
fn size(n: u64) -> String {
    match n {
        n if n > 0 && n % (1 << 30) == 0 => format!("\"{}GiB\"", n >> 30),
        n if n > 0 && n % (1 << 20) == 0 => format!("\"{}MiB\"", n >> 20),
        n if n > 0 && n % (1 << 10) == 0 => format!("\"{}KiB\"", n >> 10),
        n => n.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_printed_is_the_same_configuration() {
        let given = r#"
            cluster = "c"
            keys = "/etc/mojim keys"
            encrypt = false
            [volume.v]
            primary = "a"
            mirror = "b"
            spin = "1500us"
            copy_streams = 3
            resend_timeout = "2s"
            [node.a]
            address = "127.0.0.1:1"
            directory = "/x/a \"q\""
            log = { size = "96MiB" }
            [node.b]
            address = "127.0.0.1:2"
            directory = "/x/b"
            log = { medium = "dram", path = "/x/l" }
            rack = "r1"
            [node.w]
            address = "127.0.0.1:3"
            directory = "/x/w"
            role = "witness"
            replaces = ["u", "v"]
        "#;
        let path = Path::new("f");
        let one = Config::parse(given, path).unwrap();
        let two = Config::parse(&text(&one), path).unwrap();
        assert_eq!(data(&one), data(&two));
        assert_eq!(text(&one), text(&two));
    }
}
