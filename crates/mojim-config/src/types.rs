//! The configuration file: one TOML text that names a cluster's volumes and nodes.
//!
//! Owns the words of the file, its limits, and the values that hold. `read.rs` has the keys, their
//! defaults, and the checks of the text. Only [`Config::check_media`] and [`check_pmem`] touch the
//! machine.
//!
//! Invariants:
//! - A [`Config`] that exists has passed every check, two of which are:
//!   - Each node that a volume names is in `nodes` and stores data.
//!   - No two nodes of one host share an address or a directory.
//! - A default may depend on other nodes or other keys. Each field has the value that holds, and a
//!   file may give that value itself.
//! - A text with mistakes gives all of them at once, in line order, each with its key and line.
//! - A text that is not TOML gives the first place where it stops being TOML.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The smallest log, in bytes, that one connection of a volume works with: 64 KiB.
pub const MIN_LOG: u64 = 64 << 10;

/// The log where the configuration does not say: so that the rings of three volumes, or
/// nodes, fit the 64 MiB that a container's /dev/shm usually has.
pub const DEFAULT_LOG: u64 = 16 << 20;
/// The largest log of one volume on one node, in bytes: 1 TiB.
pub const MAX_LOG: u64 = 1 << 40;
/// A connection's share of a log is a multiple of this many bytes. It is a unit of the
/// configuration, whatever the machine's page size.
pub const LOG_UNIT: u64 = 4096;
/// The largest configuration file, in bytes: 1 MiB.
pub const MAX_TEXT: usize = 1 << 20;
/// The longest name of a cluster, volume, node or rack, in bytes.
pub const MAX_NAME: usize = 64;
/// The most nodes that one node replaces.
pub const MAX_REPLACED: usize = 64;
/// The fewest voters with which a view can change without an operator: a majority of three outlives
/// one of them, a majority of two none.
pub const AUTOMATIC_VOTERS: usize = 3;
/// The least memory that a volume can be bounded to, in bytes: 1 MiB.
pub const MIN_MEMORY: u64 = 1 << 20;
/// How many heartbeats, at least, a node must miss before it counts as failed.
pub const MIN_MISSED: u32 = 4;

/// A word that is not among those that its key accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is not one of {}", quoted(.word), .valid.join(", "))]
pub struct UnknownWord {
    /// The word that was given.
    pub word: String,
    /// The words that the key accepts.
    pub valid: &'static [&'static str],
}

/// An enum whose variants are words of the file; `Display` and `FromStr` use these words.
macro_rules! words {
    ($(
        $(#[$doc:meta])*
        $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }
    )+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// The words of the file, in the order of the variants.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word that the file uses for this value.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;
            fn from_str(word: &str) -> Result<Self, UnknownWord> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(UnknownWord { word: word.to_owned(), valid: Self::WORDS }),
                }
            }
        }
    )+};
}

words! {
    /// When a sync point of a volume is acknowledged. The default is `sync` where the volume names
    /// a mirror and `unreplicated` where it does not.
    Mode {
        /// `unreplicated`: persistent on the primary; there is no mirror.
        Unreplicated = "unreplicated",
        /// `async`: persistent on the primary and handed to the link, or sent when the mirror can be
        /// reached again; what had not arrived there is lost with the primary.
        Async = "async",
        /// `sync`: in the mirror's log; the primary flushes nothing on the path.
        Sync = "sync",
        /// `sync-flush`: as `sync`, and persistent on the primary.
        SyncFlush = "sync-flush",
        /// `sync-disk`: as `sync`, with the mirror's log in `dram` or `pmem` and its data area on a
        /// disk; nothing reads on that mirror once it is a member. A mirror with its log on `disk`
        /// is refused.
        SyncDisk = "sync-disk",
        /// `sync-sec`: as `sync`, and the mirror forwards to the backups, so far over TCP, as in
        /// `sync-seceth`. Needs `backups`.
        SyncSec = "sync-sec",
        /// `sync-seceth`: as `sync`, and the mirror forwards to the backups over plain TCP. Needs
        /// `backups`.
        SyncSecEth = "sync-seceth",
    }
    /// What a node is for. The default is `data`.
    Role {
        /// `data`: holds copies of volumes, and votes on views unless `vote` is false.
        Data = "data",
        /// `witness`: votes on views and stores no data; no volume can name it.
        Witness = "witness",
    }
    /// Who promotes the mirror when the primary has failed. The default is `automatic` where at
    /// least [`AUTOMATIC_VOTERS`] nodes vote and the volume has a mirror, but not in mode `async`;
    /// otherwise `manual`.
    Failover {
        /// `automatic`: the mirror itself, once a majority of the voters agrees. Refused in mode
        /// `async`, where it may lack what was acknowledged.
        Automatic = "automatic",
        /// `manual`: an operator.
        Manual = "manual",
    }
    /// Who promotes a backup when primary and mirror have both failed: what the mirror had not
    /// forwarded to it yet is lost. The default is `manual`.
    Fallback {
        /// `manual`: an operator.
        Manual = "manual",
        /// `automatic`: the backup itself, once a majority of the voters agrees. Needs `backups`;
        /// refused where `failover` is `manual`.
        Automatic = "automatic",
    }
    /// Which bytes `msync` commits. The default is `exact`.
    Rounding {
        /// `exact`: the bytes of the range and no others.
        Exact = "exact",
        /// `page`: the range rounded up to whole pages, as Linux does.
        Page = "page",
    }
    /// What carries records from primary to mirror. The default is `tcp`.
    Transport {
        /// `tcp`: TCP connections.
        Tcp = "tcp",
        /// `shm`: shared memory; both nodes are on one host.
        Shm = "shm",
    }
    /// What a node's log is kept in. The default is `disk`.
    MediumKind {
        /// `dram`: memory, lost with the machine's power.
        Dram = "dram",
        /// `pmem`: persistent memory, mapped with DAX (see [`check_pmem`]).
        Pmem = "pmem",
        /// `disk`: a file on a block device.
        Disk = "disk",
    }
    /// A non-volatile memory that a log in memory is as slow as (slides, "Evaluation
    /// Configurations"). There is no default: memory is as fast as it is.
    EmulatedMemory {
        /// `PDRAM`: plain memory that is persistent.
        Pdram = "PDRAM",
        /// `PM-Lat`: reads take 300 ns.
        PmLat = "PM-Lat",
        /// `PM-BW`: as PM-Lat, with an eighth of the bandwidth.
        PmBw = "PM-BW",
        /// `NVMM-Raw`: as PM-BW, and a write barrier takes 1 us.
        NvmmRaw = "NVMM-Raw",
        /// `NVMM-WOF`: as NVMM-Raw, and lines are flushed by writing them again.
        NvmmWof = "NVMM-WOF",
        /// `NVMM-Opt`: as NVMM-Raw, and only modified lines are flushed.
        NvmmOpt = "NVMM-Opt",
        /// `PMEP`: Intel's emulator as the Mojim paper used it (6.1).
        Pmep = "PMEP",
    }
    /// When committed bytes that are safe in the log go to the data files (failure-atomic msync,
    /// 3.2). The default is `auto`.
    WriteBack {
        /// `auto`: as `eager` while the program pauses for two or three milliseconds between its
        /// sync points, else when an eighth of a log's share of records waits (but at least a
        /// MiB), or what came in a second: a page that is changed often is written once for many
        /// sync points, and the thread that writes sleeps meanwhile.
        Auto = "auto",
        /// `eager`: as soon as `checkpoint_threshold` records wait.
        Eager = "eager",
        /// `async`: when `write_back_pages` pages wait.
        Async = "async",
    }
    /// Whose stores a mapping shows (`lib.rs` of `mojim-memory`, "working copy"). The default is
    /// `auto`.
    Working {
        /// `auto`: what the program asks for; private by the interfaces, shared under `mojim run --preload`.
        Auto = "auto",
        /// `private`: of each mapping its own. The same bytes of a file can be mapped once; memory is
        /// needed for what is stored to.
        Private = "private",
        /// `shared`: one for all mappings of a file on the node. Memory is needed for the whole file.
        Shared = "shared",
    }
    /// How stores into a mapped region are noticed. The default is `auto`.
    TrackerKind {
        /// `auto`: `uffd` where the kernel has it, otherwise `mprotect`.
        Auto = "auto",
        /// `uffd`: userfaultfd write protection and the PAGEMAP_SCAN ioctl (Linux 6.7 and later).
        Uffd = "uffd",
        /// `mprotect`: mprotect and SIGSEGV.
        Mprotect = "mprotect",
        /// `two-level`: both, so that a sync point of a whole region does not cost more the larger
        /// the region is. Then `read(2)` and other calls that have the kernel write into a region
        /// of 64 MiB or more fail with EFAULT where it was not stored to lately.
        TwoLevel = "two-level",
    }
}

/// A configuration file that has passed every check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `cluster`: the cluster's name. Required.
    pub cluster: String,
    /// `keys`: the absolute path of the directory, on every node, with the authority's certificate
    /// and the node's own (`mojim keys` makes them). With it every link is authenticated, and the
    /// names of the cluster and its nodes must fit a certificate. Without it nodes have loopback
    /// addresses only, but see `insecure_network`.
    pub keys: Option<PathBuf>,
    /// `insecure_network`: whether nodes may have addresses other than loopback, although links
    /// are not authenticated. Default false; refused with `keys`.
    pub insecure_network: bool,
    /// `heartbeat`: how often nodes say that they are there, from 10 ms to 10 s. Default 100 ms.
    pub heartbeat: Duration,
    /// `failure_limit`: the silence after which a node counts as failed, at least [`MIN_MISSED`]
    /// heartbeats and at most 10 minutes. Default 3 s.
    pub failure_limit: Duration,
    /// `[volume.NAME]`: the volumes by name.
    pub volumes: BTreeMap<String, Volume>,
    /// `[node.NAME]`: the nodes by name.
    pub nodes: BTreeMap<String, Node>,
    /// The file that this was read from.
    pub path: PathBuf,
}

/// One volume: a directory of files that is replicated, ordered and failed over as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// The NAME of `[volume.NAME]`.
    pub name: String,
    /// `mode`: when a sync point is acknowledged. Default `sync` with a mirror, else
    /// `unreplicated`.
    pub mode: Mode,
    /// `primary`: the node that serves the volume first. Required.
    pub primary: String,
    /// `mirror`: the node with the second copy. Required but in mode `unreplicated`, where it is
    /// refused.
    pub mirror: Option<String>,
    /// `backups`: the nodes to which the mirror forwards in the background: distinct data nodes,
    /// neither primary nor mirror. Default none; required in modes `sync-sec` and `sync-seceth`,
    /// refused in mode `unreplicated`.
    pub backups: Vec<String>,
    /// `secondary_threshold`: how many bytes may wait in the mirror's logs for the backups before
    /// the mirror makes the primary wait. At least 64 KiB, at most half of the smallest log of one
    /// connection ([`LogConfig::share`]) among the volume's nodes. Default 40 MiB, or that half
    /// where it is less, even if below 64 KiB.
    pub secondary_threshold: u64,
    /// `failover`: who promotes the mirror when the primary has failed. Default `automatic` with
    /// at least [`AUTOMATIC_VOTERS`] voters and a mirror, but not in mode `async`; else `manual`.
    pub failover: Failover,
    /// `fallback`: who promotes a backup when primary and mirror have both failed. Default
    /// `manual`.
    pub fallback: Fallback,
    /// `connections`: links, and shares of each log, from 1 to 64. Default 1.
    pub connections: usize,
    /// `checkpoint_threshold`: how many committed records wait, at least, before they go to the data
    /// files: on a mirror in a pause or after 20 ms, on a primary as `write_back` says. At least
    /// 1, the default. With `write_back` `async`, `write_back_pages` says it instead.
    pub checkpoint_threshold: u64,
    /// `write_back`: when the primary's committed bytes go from its log to its data files. Default
    /// `auto`. Whatever it says, they do when the log is half full, when what is kept in memory of
    /// pages that wait is many (32 MiB in the process), and when nothing was committed for 50 ms.
    /// While it waits, a page that a sync point of at most 16 KiB wrote to is sent whole by a
    /// larger sync point that finds it stored to.
    pub write_back: WriteBack,
    /// `write_back_pages`: how many pages of 4 KiB may wait with `write_back` `async`, from 1 to
    /// 1048576; a page counts once for each sync point. Default 128.
    pub write_back_pages: u64,
    /// `msync_rounding`: which bytes msync commits. Default `exact`.
    pub rounding: Rounding,
    /// `resend_timeout`: how long a mirror may stand still before records are sent to it again,
    /// up to an hour. Default 2 s.
    pub resend_timeout: Duration,
    /// `resend_attempts`: after how many of these a sync point fails, at least 1. The time counts
    /// anew whenever the mirror moves on, and not at all during a whole copy; while the mirror syncs
    /// a spill file it is 120 s at least. Default 5.
    pub resend_attempts: u32,
    /// `copy_streams`: links that carry a whole copy to another node, from 1 to 16; 1 is the
    /// session's own. Default: half of the sending machine's cores, at most 4.
    pub copy_streams: Option<usize>,
    /// `transport`: what carries records. Default `tcp`.
    pub transport: Transport,
    /// `encrypt`: whether the volume's data links are encrypted; both ends of one prove their names
    /// in any case. Default true with `keys`, or what `encrypt` at the top of the file says; refused
    /// without `keys`, where it is false.
    pub encrypt: bool,
    /// `spin`: how long a waiting thread polls before it blocks, up to an hour. Default 30 µs. A
    /// mirror's threads poll up to 300 µs while records come that regularly.
    pub spin: Duration,
    /// `tracker`: how stores are noticed. Default `auto`; `two-level` where memory is bounded.
    pub tracker: TrackerKind,
    /// `working`: whose stores a mapping of a file shows. Default `auto`.
    pub working: Working,
    /// `memory`: bytes of changed pages that the volume's regions may keep in memory. Beyond that,
    /// those that are committed and applied are given back to the system; what is not committed
    /// stays, whatever it is. From 1 MiB on. Default: all stay until their region is unmapped.
    pub memory: Option<u64>,
    /// `max_uncommitted`: bytes of pages that may be changed and not committed, in all regions of
    /// the volume. A store beyond that gets SIGBUS. From 1 MiB on. Default: no bound.
    pub max_uncommitted: Option<u64>,
}

impl Volume {
    /// The nodes that hold a copy: primary, mirror, backups, in this order.
    pub fn data_nodes(&self) -> Vec<&str> {
        let mirror = self.mirror.as_ref();
        std::iter::once(&self.primary)
            .chain(mirror)
            .chain(&self.backups)
            .map(String::as_str)
            .collect()
    }
}

/// One node: a daemon on one host, with its own directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The NAME of `[node.NAME]`.
    pub name: String,
    /// `address`: the IP address and port where the node listens. Required.
    pub address: SocketAddr,
    /// `directory`: the absolute path of the node's data. Required.
    pub directory: PathBuf,
    /// `role`: what the node is for. Default `data`.
    pub role: Role,
    /// `rack`: what the node shares with others that may fail with it, in at most [`MAX_NAME`]
    /// bytes of any text. None is not known.
    pub rack: Option<String>,
    /// `vote`: whether the node votes on views. Default true, and always true for a witness.
    pub vote: bool,
    /// `ring`: the absolute path of a directory for memory that outlives the application. Default
    /// `/dev/shm`. Refused for a witness, which uses none.
    pub ring: PathBuf,
    /// `log`: where records are kept until they are checkpointed. Refused for a witness, which
    /// keeps none.
    pub log: LogConfig,
    /// `replaces`: the nodes that had this one's place before it, the first of them first; `mojim
    /// replace` writes it. Whoever takes a place keeps what depends on it: its rank among those
    /// that make epochs, and its vote. Default none.
    pub replaces: Vec<String>,
    pub(crate) medium_line: usize,
}

impl Node {
    /// The name of the node that first had this one's place: its own, where it replaces nobody.
    pub fn place(&self) -> &str {
        self.replaces.first().unwrap_or(&self.name)
    }
}

/// Where a node keeps the logs of its volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// `log.medium`: what the log is kept in. Default `disk`.
    pub medium: MediumKind,
    /// `log.emulate`: the memory that the log is as slow as. With `pmem` the log lies in memory as
    /// with `dram`, and is treated as if it were persistent. Default none.
    pub emulate: Option<EmulatedMemory>,
    /// `log.path`: the absolute path of the log. None leaves it to the node: in
    /// `<directory>/.mojim` for `disk` and `pmem`, under `ring` for `dram`.
    pub path: Option<PathBuf>,
    /// `log.size`: bytes of log for each volume on this node, divided equally among the volume's
    /// connections. Default [`DEFAULT_LOG`], at most [`MAX_LOG`]; a share is at least [`MIN_LOG`].
    pub size: u64,
}

impl LogConfig {
    /// The bytes of log for each of `connections` (at least 1): an equal share, rounded down to a
    /// multiple of [`LOG_UNIT`].
    pub fn share(&self, connections: usize) -> u64 {
        log_share(self.size, connections)
    }
}

/// A configuration that cannot be used, with everything that is wrong in it.
///
/// Displays as one line for each mistake: ``path:line: key `volume.orders.mode`: what is wrong``.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The configuration file.
    pub path: PathBuf,
    /// What is wrong, in line order; never empty.
    pub mistakes: Vec<Mistake>,
}

/// One thing that is wrong in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The line, counted from 1; 0 where the mistake has none.
    pub line: usize,
    /// The key's full dotted name; empty where the file as a whole is at fault.
    pub key: String,
    /// What is wrong and what to do about it.
    pub message: String,
}

impl Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, mistake) in self.mistakes.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:", self.path.display())?;
            if mistake.line > 0 {
                write!(f, "{}:", mistake.line)?;
            }
            if !mistake.key.is_empty() {
                write!(f, " key `{}`:", mistake.key)?;
            }
            write!(f, " {}", mistake.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// The volume called `name`, or with None the only one. The error lists the names.
    pub fn volume(&self, name: Option<&str>) -> Result<&Volume, ConfigError> {
        let have = || names(self.volumes.keys());
        let (key, message) = match name {
            Some(name) => match self.volumes.get(name) {
                Some(volume) => return Ok(volume),
                None => (
                    shown_key(name),
                    format!("there is no such volume; {}", have()),
                ),
            },
            None => match (self.volumes.values().next(), self.volumes.len()) {
                (Some(volume), 1) => return Ok(volume),
                _ => (
                    String::new(),
                    format!("say which volume is meant; {}", have()),
                ),
            },
        };
        Err(single(
            &self.path,
            0,
            format!("volume.{key}").trim_end_matches('.'),
            message,
        ))
    }

    /// The node called `name`. The error lists the names.
    pub fn node(&self, name: &str) -> Result<&Node, ConfigError> {
        self.nodes.get(name).ok_or_else(|| {
            let message = format!("there is no such node; {}", names(self.nodes.keys()));
            single(&self.path, 0, &format!("node.{}", shown_key(name)), message)
        })
    }

    /// The nodes that vote on views, by name.
    pub fn voters(&self) -> Vec<&Node> {
        self.nodes.values().filter(|node| node.vote).collect()
    }

    /// The node that has the place of the node that was called `name`.
    pub fn replacement_of(&self, name: &str) -> Option<&Node> {
        let mut nodes = self.nodes.values();
        nodes.find(|n| n.replaces.iter().any(|r| r == name))
    }

    /// Whether `name` holds the volume, or did before it was replaced.
    pub fn held(&self, volume: &Volume, name: &str) -> bool {
        let now = self.replacement_of(name).map_or(name, |n| &n.name);
        volume.data_nodes().contains(&now)
    }

    /// A checksum of what the file says, wherever it lies and however it is laid out: nodes with
    /// the same one have the same configuration.
    pub fn sum(&self) -> u32 {
        let mut c = self.clone();
        c.path.clear();
        c.nodes.values_mut().for_each(|n| n.medium_line = 0);
        mojim_format::crc32c(format!("{c:?}").as_bytes())
    }

    /// What is allowed but protects less than it may seem to: a sentence for each, the cluster's
    /// before those of the volumes, which come by name.
    pub fn warnings(&self) -> Vec<String> {
        let mut all = Vec::new();
        let voters = self.voters().len();
        if voters < AUTOMATIC_VOTERS && self.volumes.values().any(|v| v.mirror.is_some()) {
            let data = self.nodes.values().filter(|n| n.role == Role::Data).count();
            let have = match (voters, data, self.nodes.len()) {
                (2, 2, 2) => "there are two data nodes and no witness".to_owned(),
                (0, ..) => "no node votes".to_owned(),
                (1, ..) => "only 1 node votes".to_owned(),
                _ => format!("only {voters} nodes vote"),
            };
            all.push(format!(
                "{have}, so promotion is manual; for an automatic `failover`, add a [node.NAME] \
                 with role = \"witness\", until at least {AUTOMATIC_VOTERS} nodes vote"
            ));
        }
        if voters > 2 && voters.is_multiple_of(2) {
            all.push(format!(
                "{voters} nodes vote, which outlive no more failures than {} would; set \
                 vote = false in one [node.NAME], or add one with role = \"witness\"",
                voters - 1
            ));
        }
        if self.keys.is_none() && self.nodes.values().any(|n| !n.address.ip().is_loopback()) {
            all.push(
                "insecure_network: anybody who reaches a node's address can read and change every volume, act as any node, and promote one; make keys (`mojim keys`) if that network has other users"
                    .to_owned(),
            );
        }
        for node in self.nodes.values() {
            if let (Some(memory), MediumKind::Pmem) = (node.log.emulate, node.log.medium) {
                all.push(format!(
                    "node {}: its log is in memory and counts as persistent (emulate = \"{memory}\"), \
                     so a power failure loses what was committed; emulate is for measurements alone",
                    node.name
                ));
            }
        }
        for volume in self.volumes.values() {
            self.warn_of(volume, &mut all);
        }
        all
    }

    fn warn_of(&self, volume: &Volume, all: &mut Vec<String>) {
        let Volume { name, primary, .. } = volume;
        let Some(mirror) = &volume.mirror else {
            return;
        };
        let rack = |name| self.nodes.get(name)?.rack.as_deref();
        if let (Some(rack), Some(other)) = (rack(primary), rack(mirror))
            && rack == other
        {
            all.push(format!(
                "volume.{name}.primary and volume.{name}.mirror are in one rack (node.{primary}.rack \
                 and node.{mirror}.rack are both {}), whose failure takes both copies; choose \
                 nodes of different racks",
                quoted(rack)
            ));
        }
        if volume.fallback == Fallback::Automatic {
            let voters = self.voters();
            let apart = |node: &&&Node| node.name != *primary && node.name != *mirror;
            let (all_of_them, left) = (voters.len(), voters.iter().filter(apart).count());
            if left * 2 <= all_of_them {
                all.push(format!(
                    "volume.{name}.fallback is automatic, but without nodes {primary} and {mirror} \
                     only {left} of {all_of_them} voters are left, which is no majority; add nodes \
                     that vote, or set vote = false in [node.{primary}] or [node.{mirror}]"
                ));
            }
        }
    }

    /// The other data node of `volume`: its mirror for the primary, its primary for all others.
    /// None for a node that holds no copy, and where there is no mirror.
    pub fn peer_of(&self, volume: &Volume, node: &str) -> Option<&Node> {
        let mirror = volume.mirror.as_deref()?;
        let peer = match node {
            _ if node == volume.primary => mirror,
            _ if node == mirror => &volume.primary,
            // A backup that goes on alone takes the first primary back.
            _ if volume.backups.iter().any(|b| b == node) => &volume.primary,
            _ => return None,
        };
        self.nodes.get(peer)
    }

    /// Whether the medium that `node` declares for its log is what this machine has there: `pmem`
    /// must pass [`check_pmem`]. Call it on the node's own host.
    pub fn check_media(&self, node: &str) -> Result<(), ConfigError> {
        let node = self.node(node)?;
        if node.log.medium != MediumKind::Pmem || node.log.emulate.is_some() {
            return Ok(());
        }
        let default = node.directory.join(".mojim");
        check_pmem(node.log.path.as_deref().unwrap_or(&default)).map_err(|error| {
            let key = format!("node.{}.log.medium", node.name);
            let message = format!("{error}; use \"disk\" or \"dram\", or move log.path to pmem");
            single(&self.path, node.medium_line, &key, message)
        })
    }
}

/// Succeeds if files at `path` can be mapped as persistent memory (DAX, with MAP_SYNC).
///
/// Maps a temporary file, without a name where the file system allows that, in the directory at
/// `path`, or in its nearest parent that exists.
pub fn check_pmem(path: &Path) -> io::Result<()> {
    use rustix::fs::{Mode, OFlags};
    use rustix::mm::{MapFlags, ProtFlags};

    let directory = path
        .ancestors()
        .find(|p| p.is_dir())
        .unwrap_or(Path::new("."));
    let failed = |doing: &str, error: rustix::io::Errno| {
        let error = io::Error::from(error);
        let text = format!("cannot {doing} in {}: {error}", quoted_path(directory));
        io::Error::new(error.kind(), text)
    };
    let access = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = rustix::fs::open(directory, access | OFlags::TMPFILE, mode).or_else(|_| {
        let name = directory.join(format!(".mojim-probe-{}", std::process::id()));
        let file = rustix::fs::open(&name, access | OFlags::CREATE | OFlags::EXCL, mode)?;
        rustix::fs::unlink(&name).map(|()| file)
    });
    let file = file.map_err(|error| failed("make a temporary file", error))?;
    let length = rustix::param::page_size();
    rustix::fs::ftruncate(&file, length as u64)
        .map_err(|error| failed("size a temporary file", error))?;
    let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address, so no memory of this program is replaced; the mapping
    // is never accessed, and it is unmapped once, by its own address and length.
    let mapped = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), length, protection, flags, &file, 0)
            .and_then(|address| rustix::mm::munmap(address, length))
    };
    mapped.map_err(|error| {
        let error = io::Error::from(error);
        let place = quoted_path(directory);
        let text = format!("{place} is not persistent memory (no DAX mapping, MAP_SYNC: {error})");
        io::Error::new(io::ErrorKind::Unsupported, text)
    })
}

pub(crate) fn single(path: &Path, line: usize, key: &str, message: String) -> ConfigError {
    ConfigError {
        path: path.to_owned(),
        mistakes: vec![Mistake {
            line,
            key: key.to_owned(),
            message,
        }],
    }
}

/// `text` in backquotes, without control characters, and cut where it is long.
pub(crate) fn quoted(text: &str) -> String {
    let mut shown: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        shown.push_str("...");
    }
    format!("`{shown}`")
}

pub(crate) fn quoted_path(path: &Path) -> String {
    format!("`{}`", path.display())
}

/// A part of a dotted key as the file would write it, cut where it is long.
pub(crate) fn shown_key(key: &str) -> String {
    match checked_name(key) {
        Ok(()) => key.to_owned(),
        Err(_) => format!("\"{}\"", quoted(key).trim_matches('`')),
    }
}

pub(crate) fn dotted(section: &str, key: &str) -> String {
    match section {
        "" => shown_key(key),
        _ => format!("{section}.{}", shown_key(key)),
    }
}

/// A sentence with the names that the file has.
pub(crate) fn names(mut names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let first: Vec<_> = names
        .by_ref()
        .take(8)
        .map(|name| shown_key(name.as_ref()))
        .collect();
    match (first.join(", "), names.count()) {
        (first, _) if first.is_empty() => "the file has none".to_owned(),
        (first, 0) => format!("the file has {first}"),
        (first, n) => format!("the file has {first} and {n} more"),
    }
}

pub(crate) fn checked_name(name: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    Err(format!(
        "{} is no name; use 1 to {MAX_NAME} of the characters A-Z a-z 0-9 _ -",
        quoted(name)
    ))
}

/// `time` as the file would write it.
pub(crate) fn shown_time(time: Duration) -> String {
    match time.as_micros() {
        us if us.is_multiple_of(1_000_000) => format!("{}s", us / 1_000_000),
        us if us.is_multiple_of(1000) => format!("{}ms", us / 1000),
        us => format!("{us}us"),
    }
}

pub(crate) fn log_share(size: u64, connections: usize) -> u64 {
    let share = size / connections.max(1) as u64;
    share - share % LOG_UNIT
}
