//! Where everything of a volume lies on a node, from the configuration.
//!
//! Owns the paths (except those of keys and rings, `mojim-config`). Nothing else makes up a
//! path.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim_protocol::AckRule;

use crate::holders::Peer;
use crate::primary::PrimarySpec;
use crate::register::VIEW_TIMEOUT;
use mojim_config::ring_files;
use mojim_config::{Config, Failover, MediumKind, Mode, Node, Transport, Volume};
use mojim_env::{Address, Locker};
use mojim_store::log::{Log, LogSpec};
use mojim_store::store::StoreSpec;

/// The volume's data files on a node.
pub fn data_dir(node: &Node, volume: &str) -> PathBuf {
    node.directory.join(volume)
}

/// The volume's own state on a node.
pub fn meta_dir(node: &Node, volume: &str) -> PathBuf {
    node.directory.join(".mojim").join(volume)
}

/// The Unix socket on which a node listens for peers of the same host.
pub fn socket(node: &Node) -> PathBuf {
    node.directory.join(".mojim").join("node.sock")
}

/// The Unix socket on which the process that attached the volume listens for
/// others of the node that share it.
pub fn share_socket(node: &Node, volume: &str) -> PathBuf {
    meta_dir(node, volume).join("share.sock")
}

/// The directories of a volume on a node that no other user may change.
pub fn own_dirs(node: &Node, volume: &str) -> Vec<PathBuf> {
    // A log that is memory is checked where it is mapped.
    let log = node.log.path.clone();
    let log = log.filter(|_| node.log.medium == MediumKind::Disk);
    [
        node.directory.clone(),
        node.directory.join(".mojim"),
        meta_dir(node, volume),
        data_dir(node, volume),
    ]
    .into_iter()
    .chain(log)
    .collect()
}

/// Where the mount is that programs under `mojim run` have in common, and what belongs to it.
pub fn runs_dir(node: &Node, volume: &str) -> PathBuf {
    meta_dir(node, volume).join("run")
}

/// The file in it with what the last of these mounts could not commit, or of what it died.
pub const RUN_FAILED: &str = "failed";

/// Where programs of the node that share the volume keep locks on its files.
pub fn locks_dir(node: &Node, volume: &str) -> PathBuf {
    meta_dir(node, volume).join("locks")
}

/// Where the logs of a volume on a node lie, and how large they are.
pub fn logs(config: &Config, node: &Node, volume: &Volume) -> Vec<LogSpec> {
    let memory = ring_files::memory_dir(config, node);
    let base = match (&node.log.path, node.log.medium) {
        (Some(p), _) => p.clone(),
        (None, MediumKind::Dram) => memory.clone(),
        (None, _) if node.log.emulate.is_some() => memory.clone(),
        (None, _) => node.directory.join(".mojim"),
    };
    (0..volume.connections)
        .map(|lane| LogSpec {
            lane,
            medium: node.log.medium,
            path: base.join(format!("{}.log.{lane}", volume.name)),
            ring: memory.join(format!("{}.ring.{lane}", volume.name)),
            size: node.log.share(volume.connections),
        })
        .collect()
}

/// Streams of a copy if the configuration does not say: the sender leaves half of this
/// machine's cores to the program.
fn copy_streams() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(1, 4)
}

/// The store of a volume on a node.
pub fn store(config: &Config, node: &Node, volume: &Volume, locker: Locker) -> StoreSpec {
    // By place, so that it changes neither with the roles nor with a replacement.
    let nodes = volume.data_nodes().into_iter();
    let mut places: Vec<&str> = nodes.map(|n| place(config, n)).collect();
    places.sort_unstable_by(|a, b| b.cmp(a));
    StoreSpec {
        cluster: config.cluster.clone(),
        volume: volume.name.clone(),
        node: node.name.clone(),
        dir: data_dir(node, &volume.name),
        meta: meta_dir(node, &volume.name),
        logs: logs(config, node, volume),
        max_open: mojim_store::area::MAX_OPEN,
        copy_streams: volume.copy_streams.unwrap_or_else(copy_streams),
        by_hand: volume.failover != Failover::Automatic,
        locker,
        rank: places
            .iter()
            .position(|p| *p == node.place())
            .expect("it holds the volume") as u64,
        holders: places.len().max(2) as u64,
    }
}

fn place<'a>(config: &'a Config, node: &'a str) -> &'a str {
    config.nodes.get(node).map_or(node, Node::place)
}

fn reached(other: &Node, volume: &Volume) -> Peer {
    let shared = volume.transport == Transport::Shm;
    Peer {
        name: other.name.clone(),
        address: if shared {
            Address::Unix(socket(other))
        } else {
            Address::Tcp(other.address)
        },
        tcp: Address::Tcp(other.address),
        shared,
    }
}

/// The other node, as a primary on `node` reaches it.
pub fn peer(config: &Config, node: &Node, volume: &Volume) -> Option<Peer> {
    let other = config.peer_of(volume, &node.name)?;
    Some(reached(other, volume))
}

/// The other nodes that hold the volume: a primary's candidates for a mirror, and the
/// nodes that it may forward to.
pub fn others(config: &Config, node: &Node, volume: &Volume) -> Vec<Peer> {
    let names = volume.data_nodes().into_iter();
    names
        .filter(|n| *n != node.name)
        .filter_map(|n| config.nodes.get(n))
        .map(|n| reached(n, volume))
        .collect()
}

/// How a primary of this volume behaves on `node`.
pub fn primary(config: &Config, node: &Node, volume: &Volume) -> PrimarySpec {
    // A backup's log counts too: a record that it cannot take is never forwarded to it.
    let others = volume.data_nodes().into_iter();
    let smallest = others
        .filter_map(|n| config.nodes.get(n))
        .chain([node])
        .map(|n| n.log.share(volume.connections))
        .min()
        .expect("there is at least this node");
    // Where the view changes by itself, a sync point waits for its outcome:
    // the mirror's silence, the register's answer, and as much again.
    let outcome = match volume.failover {
        Failover::Automatic => config.failure_limit * 2 + VIEW_TIMEOUT,
        Failover::Manual => Duration::ZERO,
    };
    // With automatic failover a mirror that stands still again and again, each time for
    // less than the limit, must be noticed: its link is suspected sooner, and tried more
    // often.
    let timeout = match volume.failover {
        Failover::Automatic => volume.resend_timeout.min(config.failure_limit / 4),
        Failover::Manual => volume.resend_timeout,
    };
    let timeout = timeout.max(Duration::from_millis(1));
    let bound = outcome.max(volume.resend_timeout * volume.resend_attempts);
    let attempts = bound.as_micros().div_ceil(timeout.as_micros());
    PrimarySpec {
        rule: rule(volume),
        background_send: volume.mode == Mode::Async,
        spin: volume.spin,
        resend_timeout: timeout,
        resend_attempts: volume
            .resend_attempts
            .max(u32::try_from(attempts).unwrap_or(u32::MAX)),
        max_record: Log::max_record(smallest),
        smallest_log: smallest,
        checkpoint_threshold: volume.checkpoint_threshold,
        write_back: volume.write_back,
        write_back_pages: volume.write_back_pages,
        secondary_threshold: volume.secondary_threshold,
    }
}

/// What a sync point waits for while there is a mirror.
pub fn rule(volume: &Volume) -> AckRule {
    match volume.mode {
        Mode::Unreplicated | Mode::Async => AckRule::LOCAL,
        Mode::Sync | Mode::SyncDisk | Mode::SyncSec | Mode::SyncSecEth => AckRule::MIRROR,
        Mode::SyncFlush => AckRule::BOTH,
    }
}

/// Whether `path` lies in the volume's directory on `node`; if so, its name
/// within the volume.
pub fn name_within(node: &Node, volume: &str, path: &Path) -> Option<String> {
    let rel = path.strip_prefix(data_dir(node, volume)).ok()?;
    rel.to_str().map(str::to_owned).filter(|n| !n.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that replaces another one must have the rank that the other one had.
    #[test]
    fn a_node_that_replaces_another_has_its_rank() {
        let text = |b: &str, more: &str| {
            format!(
                "cluster = \"c\"\n[volume.v]\nmode = \"sync\"\nprimary = \"a\"\nmirror = \"{b}\"\n\
                 [node.a]\naddress = \"127.0.0.1:7401\"\ndirectory = \"/d/a\"\n\
                 [node.{b}]\naddress = \"127.0.0.1:7402\"\ndirectory = \"/d/b\"\n{more}"
            )
        };
        let parse = |text: &str| Config::parse(text, Path::new("/c.toml")).unwrap();
        let rank = |c: &Config, n: &str| store(c, &c.nodes[n], &c.volumes["v"], Locker::Node).rank;
        let replaced = parse(&text("b", "replaces = [\"y\", \"z\"]\n"));
        let named = parse(&text("y", ""));
        assert_eq!(rank(&replaced, "b"), rank(&named, "y"));
        assert_eq!(rank(&replaced, "a"), rank(&named, "a"));
    }
}
