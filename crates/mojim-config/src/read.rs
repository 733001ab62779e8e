//! Reads a [`Config`] from a TOML document and collects every mistake on the way.
//!
//! Owns the keys, and the default of each one.
//!
//! Invariants:
//! - A value is either good or has its mistake noted, once.
//! - A check of several values runs whenever those that it needs are good, whatever else is
//!   wrong.
//! - No text makes [`Config::parse`] panic or use unbounded stack or memory: `syntax::guard`
//!   refuses what the TOML parser would answer so.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mojim_format::certificate::MAX_LABEL;
use toml_edit::{Document, Item, TableLike};

use crate::syntax;
use crate::types::*;
use crate::values::*;

mod places;
mod volume;

const ANY_WAIT: RangeInclusive<Duration> = Duration::from_micros(1)..=Duration::from_secs(3600);
const HEARTBEAT: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(10);
const FAILURE_LIMIT: RangeInclusive<Duration> = Duration::from_micros(1)..=Duration::from_secs(600);
const SECONDARY_THRESHOLD: u64 = 40 << 20;
const MIN_SECONDARY_THRESHOLD: u64 = 64 << 10;

const TOP_KEYS: &[&str] = &[
    "cluster",
    "keys",
    "encrypt",
    "insecure_network",
    "heartbeat",
    "failure_limit",
    "volume",
    "node",
];
const VOLUME_KEYS: &[&str] = &[
    "mode",
    "primary",
    "mirror",
    "backups",
    "secondary_threshold",
    "failover",
    "fallback",
    "connections",
    "copy_streams",
    "checkpoint_threshold",
    "write_back",
    "write_back_pages",
    "msync_rounding",
    "resend_timeout",
    "resend_attempts",
    "transport",
    "encrypt",
    "spin",
    "tracker",
    "working",
    "memory",
    "max_uncommitted",
];
const NODE_KEYS: &[&str] = &[
    "address",
    "directory",
    "role",
    "rack",
    "vote",
    "ring",
    "log",
    "replaces",
];
const LOG_KEYS: &[&str] = &["medium", "emulate", "path", "size"];
/// All keys.
#[cfg(test)]
pub(crate) const KEYS: [&[&str]; 4] = [TOP_KEYS, VOLUME_KEYS, NODE_KEYS, LOG_KEYS];

/// What a volume's directory in a node's `.mojim` would be called as the register's.
const REGISTER: &str = "views";

impl Config {
    /// Reads and checks the file at `path`.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let fail = |message| Err(single(path, 0, "", message));
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(MAX_TEXT as u64 + 1).read_to_end(&mut bytes));
        if let Err(error) = read {
            return fail(format!("cannot read the configuration: {error}"));
        }
        if bytes.len() > MAX_TEXT {
            return fail(too_long());
        }
        match std::str::from_utf8(&bytes) {
            Ok(text) => Config::parse(text, path),
            Err(error) => {
                let before = &bytes[..error.valid_up_to()];
                let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
                Err(single(
                    path,
                    line,
                    "",
                    "the text is not UTF-8; save the file as UTF-8".into(),
                ))
            }
        }
    }

    /// Checks `text`; `path` says where it came from and is not opened.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        if text.len() > MAX_TEXT {
            return Err(single(path, 0, "", too_long()));
        }
        let lines = Lines::of(text);
        if let Err((offset, message)) = syntax::guard(text.as_bytes()) {
            return Err(single(path, lines.at(offset), "", message));
        }
        let document = Document::parse(text).map_err(|error| {
            let span = error.span().unwrap_or(0..0);
            let here = match text.get(span.clone()) {
                Some(here) if !here.is_empty() => format!(" at {}", quoted(here)),
                _ => String::new(),
            };
            let message = format!("not TOML: {}{here}", error.message().trim());
            single(path, lines.at(span.start), "", message)
        })?;
        let (config, mut mistakes) = config(lines, document.as_table(), path);
        mistakes.sort_by_key(|mistake| mistake.line);
        match config {
            Some(config) if mistakes.is_empty() => Ok(config),
            _ => Err(ConfigError {
                path: path.to_owned(),
                mistakes,
            }),
        }
    }
}

/// The offsets of the newlines of a text.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Lines {
        Lines(
            text.bytes()
                .enumerate()
                .filter(|&(_, byte)| byte == b'\n')
                .map(|(i, _)| i)
                .collect(),
        )
    }

    /// The line, from 1, of the byte at `offset`.
    fn at(&self, offset: usize) -> usize {
        1 + self.0.partition_point(|&newline| newline < offset)
    }
}

fn too_long() -> String {
    format!(
        "the file is larger than {} MiB; this is no configuration",
        MAX_TEXT >> 20
    )
}

/// The configuration in `table`, complete if there are no mistakes beside it.
fn config(lines: Lines, table: &dyn TableLike, path: &Path) -> (Option<Config>, Vec<Mistake>) {
    let mut reader = Reader {
        lines,
        mistakes: Vec::new(),
    };
    let config = reader.config(table, path);
    (config, reader.mistakes)
}

/// A table of the file under its dotted name.
struct Section<'a> {
    name: String,
    line: usize,
    table: &'a dyn TableLike,
}

/// A key's value. None in `value` with `given` set means that a mistake has been noted.
#[derive(Clone)]
struct Field<T> {
    /// The key's line, or its section's where the key is absent.
    line: usize,
    given: bool,
    value: Option<T>,
}

impl<T> Field<T> {
    fn or(mut self, default: T) -> Self {
        if !self.given {
            self.value = Some(default);
        }
        self
    }
}

/// A node as far as it could be read; what is None has its mistake noted or is absent.
struct RawNode {
    name: String,
    address: Field<SocketAddr>,
    directory: Field<PathBuf>,
    role: Field<Role>,
    rack: Field<String>,
    vote: Field<bool>,
    ring: Field<PathBuf>,
    medium: Field<MediumKind>,
    emulate: Field<EmulatedMemory>,
    log_path: Field<PathBuf>,
    log_size: Field<u64>,
    /// Each with its line.
    replaces: Field<Vec<(usize, String)>>,
}

/// How links are protected, as far as it could be read.
struct Links {
    keys: Field<PathBuf>,
    insecure: Field<bool>,
    /// The volumes' default.
    encrypt: Field<bool>,
}

/// What a volume's section says of how its records are sent and written back, as far as it
/// could be read.
struct Flow {
    connections: Field<u64>,
    streams: Field<Option<usize>>,
    threshold: Field<u64>,
    write_back: Field<WriteBack>,
    write_back_pages: Field<u64>,
    rounding: Field<Rounding>,
    timeout: Field<Duration>,
    attempts: Field<u64>,
}

/// What a volume's section says of working copies, as far as it could be read.
struct Memory {
    memory: Field<u64>,
    uncommitted: Field<u64>,
    tracker: Field<TrackerKind>,
    working: Field<Working>,
}

impl Memory {
    fn default_tracker(&self) -> TrackerKind {
        Memory::default_tracker_of(&self.memory, &self.uncommitted)
    }

    /// A bound on memory needs a tracker that gives pages back.
    fn default_tracker_of(memory: &Field<u64>, uncommitted: &Field<u64>) -> TrackerKind {
        match memory.given || uncommitted.given {
            true => TrackerKind::TwoLevel,
            false => TrackerKind::Auto,
        }
    }
}

/// Reads tables and collects mistakes.
struct Reader {
    lines: Lines,
    mistakes: Vec<Mistake>,
}

impl Reader {
    fn note(&mut self, line: usize, key: impl Into<String>, message: impl Into<String>) {
        self.mistakes.push(Mistake {
            line,
            key: key.into(),
            message: message.into(),
        });
    }

    fn line_of(&self, table: &dyn TableLike, key: &str) -> Option<usize> {
        let span = table.get_key_value(key)?.0.span()?;
        Some(self.lines.at(span.start))
    }

    /// `item` as a table whose keys are all in `known` (any key, where that is empty).
    fn section<'a>(
        &mut self,
        item: &'a Item,
        name: String,
        line: usize,
        known: &[&str],
    ) -> Option<Section<'a>> {
        let Some(table) = item.as_table_like() else {
            let have = item.type_name();
            self.note(
                line,
                name.as_str(),
                format!("wants a table ([{name}] or {{ ... }}), not {have}"),
            );
            return None;
        };
        if !known.is_empty() {
            self.unknown_keys(table, &name, line, known);
        }
        Some(Section { name, line, table })
    }

    fn unknown_keys(&mut self, table: &dyn TableLike, section: &str, line: usize, known: &[&str]) {
        for (key, _) in table.iter().filter(|(key, _)| !known.contains(key)) {
            let line = self.line_of(table, key).unwrap_or(line);
            let message = match nearest(key, known) {
                Some(near) => format!("unknown key; did you mean `{near}`?"),
                None => format!("unknown key; the keys here are {}", known.join(", ")),
            };
            self.note(line, dotted(section, key), message);
        }
    }

    /// The named tables under the top-level key `kind`.
    fn named<'a>(
        &mut self,
        top: &Section<'a>,
        kind: &str,
        known: &[&str],
    ) -> Vec<(&'a str, Section<'a>)> {
        let mut found = Vec::new();
        let Some(item) = top.table.get(kind) else {
            return found;
        };
        let line = self.line_of(top.table, kind).unwrap_or(1);
        let Some(group) = self.section(item, kind.to_owned(), line, &[]) else {
            return found;
        };
        for (name, item) in group.table.iter() {
            let line = self.line_of(group.table, name).unwrap_or(line);
            let key = dotted(kind, name);
            if let Err(message) = checked_name(name) {
                self.note(line, key.as_str(), message);
            }
            if kind == "volume" && name == REGISTER {
                let message = "is no name for a volume: the register of views lies in the directory of that name";
                self.note(line, key.as_str(), message.to_owned());
            }
            if let Some(section) = self.section(item, key, line, known) {
                found.push((name, section));
            }
        }
        found
    }

    /// The value of `key`, read by `read`. No section (its mistake is noted) gives no value.
    fn field<T>(
        &mut self,
        section: Option<&Section<'_>>,
        key: &str,
        read: impl FnOnce(&Item) -> Result<T, String>,
    ) -> Field<T> {
        let Some(section) = section else {
            return Field {
                line: 0,
                given: true,
                value: None,
            };
        };
        let Some(item) = section.table.get(key) else {
            return Field {
                line: section.line,
                given: false,
                value: None,
            };
        };
        let line = self.line_of(section.table, key).unwrap_or(section.line);
        let value =
            read(item).map_err(|message| self.note(line, dotted(&section.name, key), message));
        Field {
            line,
            given: true,
            value: value.ok(),
        }
    }

    fn required<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl FnOnce(&Item) -> Result<T, String>,
    ) -> Field<T> {
        let field = self.field(Some(section), key, read);
        if !field.given {
            let message = format!("is missing; add {key} = {example}");
            self.note(section.line, dotted(&section.name, key), message);
        }
        field
    }

    fn config(&mut self, table: &dyn TableLike, path: &Path) -> Option<Config> {
        let top = Section {
            name: String::new(),
            line: 1,
            table,
        };
        self.unknown_keys(table, "", 1, TOP_KEYS);
        let cluster = self.required(&top, "cluster", "\"NAME\"", read_name);
        let links = self.links(&top, &cluster);
        let heartbeat = self
            .field(Some(&top), "heartbeat", |item| {
                read_duration(item, HEARTBEAT)
            })
            .or(Duration::from_millis(100));
        let limit = self
            .field(Some(&top), "failure_limit", |item| {
                read_duration(item, FAILURE_LIMIT)
            })
            .or(Duration::from_secs(3));
        self.enough_heartbeats(&heartbeat, &limit);
        if !table.contains_key("volume") && !table.contains_key("node") {
            self.note(
                1,
                "",
                "there is neither a volume nor a node; add [volume.NAME] and [node.NAME]",
            );
        }
        let mut raw = BTreeMap::new();
        for (name, section) in self.named(&top, "node", NODE_KEYS) {
            let node = self.node(name, &section, &links);
            raw.insert(name, node);
        }
        self.distinct_addresses(&raw);
        self.distinct_paths(&raw);
        self.distinct_places(&raw);
        // A node with a mistake may be a voter.
        let voters = match table.get("node").and_then(Item::as_table_like) {
            Some(all) => all.len() - raw.values().filter(|n| n.vote.value == Some(false)).count(),
            None => 0,
        };

        // For each node, the volume there with the most connections: its log has the least share.
        let mut most: BTreeMap<&str, (usize, String)> = BTreeMap::new();
        let mut volumes = Vec::new();
        for (name, section) in self.named(&top, "volume", VOLUME_KEYS) {
            let (volume, connections, members) =
                self.volume(name, &section, &raw, table, voters, &links);
            for member in members {
                let entry = most.entry(member).or_insert((1, String::new()));
                if connections > entry.0 {
                    *entry = (connections, name.to_owned());
                }
            }
            volumes.push(volume);
        }
        for (name, node) in &raw {
            let (connections, volume) = most.get(name).cloned().unwrap_or((1, String::new()));
            self.log_share(node, connections, &volume);
        }

        let volumes = volumes.into_iter().map(|v| v.map(|v| (v.name.clone(), v)));
        Some(Config {
            cluster: cluster.value?,
            keys: links.keys.value,
            insecure_network: links.insecure.value?,
            heartbeat: heartbeat.value?,
            failure_limit: limit.value?,
            volumes: volumes.collect::<Option<_>>()?,
            nodes: raw.into_values().map(finished).collect::<Option<_>>()?,
            path: path.to_owned(),
        })
    }

    /// How links are protected, for all of the file.
    fn links(&mut self, top: &Section<'_>, cluster: &Field<String>) -> Links {
        let keys = self.field(Some(top), "keys", read_path);
        let insecure = self.field(Some(top), "insecure_network", read_bool);
        if keys.given && insecure.value == Some(true) {
            let message = "links are authenticated with `keys`; remove this, or the keys";
            self.note(insecure.line, "insecure_network", message);
        }
        let links = Links {
            encrypt: self.encrypt(top, keys.given, true),
            insecure: insecure.or(false),
            keys,
        };
        if let Some(name) = &cluster.value {
            self.fits_certificate(name, "cluster", cluster.line, &links);
        }
        links
    }

    /// `encrypt` in a section; `default` where it is not there.
    fn encrypt(&mut self, section: &Section<'_>, keys: bool, default: bool) -> Field<bool> {
        let field = self.field(Some(section), "encrypt", read_bool);
        if field.given && !keys {
            let message = "needs `keys`: without keys a node cannot check its peer; make them with `mojim keys`, or remove this";
            self.note(field.line, dotted(&section.name, "encrypt"), message);
        }
        field.or(keys && default)
    }

    /// With keys, a name is part of a name in certificates: a DNS label.
    fn fits_certificate(&mut self, name: &str, key: &str, line: usize, links: &Links) {
        let fits = name.len() <= MAX_LABEL && !name.starts_with('-') && !name.ends_with('-');
        if links.keys.given && !fits && checked_name(name).is_ok() {
            let message = format!(
                "{} does not fit a certificate, which `keys` asks for: use at most {MAX_LABEL} \
                 characters, neither the first nor the last of them a `-`",
                quoted(name)
            );
            self.note(line, key, message);
        }
    }

    fn enough_heartbeats(&mut self, heartbeat: &Field<Duration>, limit: &Field<Duration>) {
        let (Some(beat), Some(silence)) = (heartbeat.value, limit.value) else {
            return;
        };
        let least = beat * MIN_MISSED;
        if silence >= least {
            return;
        }
        let (line, key) = if limit.given {
            (limit.line, "failure_limit")
        } else {
            (heartbeat.line, "heartbeat")
        };
        let message = format!(
            "failure_limit ({}) is less than {MIN_MISSED} times heartbeat ({}), so that a few late \
             heartbeats would count as a failure; make failure_limit at least {}, or heartbeat \
             shorter",
            shown_time(silence),
            shown_time(beat),
            shown_time(least)
        );
        self.note(line, key, message);
    }

    fn node(&mut self, name: &str, section: &Section<'_>, links: &Links) -> RawNode {
        self.fits_certificate(name, &section.name, section.line, links);
        let address = self.required(section, "address", "\"127.0.0.1:PORT\"", |item| {
            read_address(item, links)
        });
        let directory = self.required(section, "directory", "\"/absolute/path\"", read_path);
        let role = self.field(Some(section), "role", read_word).or(Role::Data);
        let rack = self.field(Some(section), "rack", read_rack);
        let mut vote = self.field(Some(section), "vote", read_bool).or(true);
        let none = toml_edit::Table::new();
        let nothing = Section {
            name: section.name.clone(),
            line: section.line,
            table: &none,
        };
        let mut stores = section;
        if role.value == Some(Role::Witness) {
            if vote.value == Some(false) {
                let message = "a witness only votes; remove this, or the node";
                self.note(vote.line, dotted(&section.name, "vote"), message);
                vote.value = None;
            }
            for key in ["ring", "log"] {
                if let Some(line) = self.line_of(section.table, key) {
                    let message = "a witness stores no data, so it has no use for this; remove it, \
                                   or set role = \"data\"";
                    self.note(line, dotted(&section.name, key), message);
                }
            }
            stores = &nothing;
        }
        let ring = self
            .field(Some(stores), "ring", read_path)
            .or(PathBuf::from("/dev/shm"));
        let empty = Item::Table(none.clone());
        let log = stores.table.get("log").unwrap_or(&empty);
        let line = self.line_of(stores.table, "log").unwrap_or(stores.line);
        let log = self.section(log, dotted(&section.name, "log"), line, LOG_KEYS);
        let replaces = self.replaces(section);
        let medium = self
            .field(log.as_ref(), "medium", read_word)
            .or(MediumKind::Disk);
        let emulate = self.field(log.as_ref(), "emulate", read_word);
        if emulate.given && medium.value == Some(MediumKind::Disk) {
            let message = "a log on a disk is as slow as the disk; give it medium \"dram\", or \
                           \"pmem\" to have it flushed as persistent memory is";
            let key = dotted(&dotted(&section.name, "log"), "emulate");
            self.note(emulate.line, key, message);
        }
        RawNode {
            name: name.to_owned(),
            address,
            directory,
            role,
            rack,
            vote,
            ring,
            medium,
            emulate,
            log_path: self.field(log.as_ref(), "path", read_path),
            log_size: self.field(log.as_ref(), "size", read_size).or(DEFAULT_LOG),
            replaces,
        }
    }

    /// The nodes whose place this one has, each with its line.
    fn replaces(&mut self, section: &Section<'_>) -> Field<Vec<(usize, String)>> {
        let list = self.field(Some(section), "replaces", read_list);
        let mut names = Some(Vec::new());
        for (offset, name) in list.value.unwrap_or_default() {
            let line = self.lines.at(offset);
            match (name, &mut names) {
                (Ok(name), Some(all)) if all.len() < MAX_REPLACED => all.push((line, name)),
                (Ok(_), _) => {
                    let message = format!("is too long; the most is {MAX_REPLACED} names");
                    self.note(line, dotted(&section.name, "replaces"), message);
                    names = None;
                    break;
                }
                (Err(message), _) => {
                    self.note(line, dotted(&section.name, "replaces"), message);
                    names = None;
                }
            }
        }
        Field {
            line: list.line,
            given: list.given,
            value: names,
        }
    }
}

fn finished(raw: RawNode) -> Option<(String, Node)> {
    let node = Node {
        name: raw.name.clone(),
        address: raw.address.value?,
        directory: raw.directory.value?,
        role: raw.role.value?,
        rack: raw.rack.value,
        vote: raw.vote.value?,
        ring: raw.ring.value?,
        log: LogConfig {
            medium: raw.medium.value?,
            emulate: raw.emulate.value,
            path: raw.log_path.value,
            size: raw.log_size.value?,
        },
        replaces: raw.replaces.value?.into_iter().map(|(_, n)| n).collect(),
        medium_line: raw.medium.line,
    };
    Some((raw.name, node))
}

fn by_line<'a>(
    nodes: &'a BTreeMap<&str, RawNode>,
    line: impl Fn(&RawNode) -> usize,
) -> Vec<&'a RawNode> {
    let mut nodes: Vec<_> = nodes.values().collect();
    nodes.sort_by_key(|node| line(node));
    nodes
}

/// What two addresses of one host have in common; every loopback address is on this host.
fn host(address: SocketAddr) -> Option<IpAddr> {
    Some(address.ip().to_canonical()).filter(|ip| !ip.is_loopback())
}

/// The known key that `key` was probably meant to be.
fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let key: Vec<char> = key
        .chars()
        .take(MAX_NAME)
        .map(|c| c.to_ascii_lowercase())
        .collect();
    let distance = |word: &str| {
        let mut row: Vec<usize> = (0..=key.len()).collect();
        for (i, w) in word.chars().enumerate() {
            let mut diagonal = std::mem::replace(&mut row[0], i + 1);
            for (j, k) in key.iter().enumerate() {
                let replaced = diagonal + usize::from(w != *k);
                diagonal = row[j + 1];
                row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
            }
        }
        row[key.len()]
    };
    let (near, word) = known.iter().map(|word| (distance(word), *word)).min()?;
    (near <= 1 + word.len() / 4).then_some(word)
}

/// An address at which others can reach a node, over links as they are.
fn read_address(item: &Item, links: &Links) -> Result<SocketAddr, String> {
    let text = read_str(item)?;
    let address: SocketAddr = text.parse().map_err(|_| {
        format!(
            "wants an IP address and a port (\"127.0.0.1:7401\"), not {}",
            quoted(text)
        )
    })?;
    let ip = address.ip().to_canonical();
    if address.port() == 0 || ip.is_unspecified() || ip.is_multicast() {
        return Err(format!(
            "no node can be reached at {address}; give its own IP address and port"
        ));
    }
    if !ip.is_loopback() && links.insecure.value == Some(false) && !links.keys.given {
        return Err(format!(
            "{ip} is not a loopback address and links are not authenticated; make keys \
             (`keys = \"/absolute/path\"` and `mojim keys`), or set \
             insecure_network = true if everyone on this network is trusted"
        ));
    }
    Ok(address)
}
