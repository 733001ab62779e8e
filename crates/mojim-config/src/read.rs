//! Reads a [`Config`] from a TOML document and collects every mistake on the way.
//!
//! Invariants:
//! - A value is either good or has its mistake noted, once; a check of several values runs whenever
//!   those that it needs are good, whatever else is wrong.
//! - No text makes [`Config::parse`] panic or use unbounded stack or memory: `syntax::guard`
//!   refuses what the TOML parser would answer so.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use mojim_format::certificate::MAX_LABEL;
use toml_edit::{Document, Item, TableLike, Value};

use crate::syntax;
use crate::types::*;

const MAX_PATH: usize = 4095; // PATH_MAX without its NUL
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
const LOG_KEYS: &[&str] = &["medium", "path", "size"];
/// All of them.
#[cfg(test)]
pub(crate) const KEYS: [&[&str]; 4] = [TOP_KEYS, VOLUME_KEYS, NODE_KEYS, LOG_KEYS];

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

/// The configuration in `table`, complete if the mistakes beside it are none.
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
    log_path: Field<PathBuf>,
    log_size: Field<u64>,
    /// With the place of each in the text.
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

/// What it says of working copies, as far as it could be read.
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

    /// What bounds memory needs a tracker that gives pages back.
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
        // What has a mistake may be a voter.
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
            let message = "needs `keys`: without them nobody knows who is at the other end; \
                           make them with `mojim keys`, or remove this";
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
                let message = "a witness is there to vote and does nothing else; remove this, \
                               or the node";
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
        RawNode {
            name: name.to_owned(),
            address,
            directory,
            role,
            rack,
            vote,
            ring,
            medium: self
                .field(log.as_ref(), "medium", read_word)
                .or(MediumKind::Disk),
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

    /// A name is one node's, now and before.
    fn distinct_places(&mut self, nodes: &BTreeMap<&str, RawNode>) {
        let mut taken: BTreeMap<String, String> = BTreeMap::new();
        for node in by_line(nodes, |n| n.replaces.line) {
            for (line, old) in node.replaces.value.iter().flatten() {
                let key = format!("node.{}.replaces", shown_key(&node.name));
                if nodes.contains_key(&**old) {
                    let message = format!(
                        "node {} is still in this file; remove [node.{}], or the name here",
                        shown_key(old),
                        shown_key(old)
                    );
                    self.note(*line, key, message);
                } else if let Some(other) = taken.insert(old.clone(), node.name.clone()) {
                    let message = format!(
                        "node {} is named already in node.{}.replaces; a place is one node's",
                        shown_key(old),
                        shown_key(&other)
                    );
                    self.note(*line, key, message);
                }
            }
        }
    }

    /// The volume, its connections, and those of its nodes that exist and store data. `voters` is
    /// the greatest number of them that the file can mean.
    fn volume<'n>(
        &mut self,
        name: &str,
        section: &Section<'_>,
        nodes: &BTreeMap<&'n str, RawNode>,
        top: &dyn TableLike,
        voters: usize,
        links: &Links,
    ) -> (Option<Volume>, usize, Vec<&'n str>) {
        let of = Some(section);
        let primary = self.required(section, "primary", "\"NODE\"", read_name);
        let mirror = self.field(of, "mirror", read_name);
        let listed = self.field(of, "backups", read_list).or(Vec::new());
        let mode = self.mode(section, mirror.given);
        let flow = self.flow(section);
        let transport = self.field(of, "transport", read_word).or(Transport::Tcp);
        let default = links.encrypt.value.unwrap_or(true);
        let encrypt = self.encrypt(section, links.keys.given, default);
        let spin = self
            .field(of, "spin", |item| read_duration(item, ANY_WAIT))
            .or(Duration::from_micros(30));
        let memory = self.memory(section);

        let (backups, pair, members) =
            self.members(section, [&primary, &mirror], &listed, nodes, top);
        self.check_mode(section, &mode, &mirror, &listed);
        let failover = self.failover(section, &mode, mirror.given, voters);
        let alone = listed.value.as_ref().is_some_and(Vec::is_empty);
        let fallback = self.fallback(section, alone, failover);
        self.check_media(section, &mode, pair.map(|name| Some(&nodes[name?].medium)));
        let addresses = pair.map(|name| nodes[name?].address.value);
        self.check_transport(section, &transport, addresses);

        let shares = flow.connections.value.unwrap_or(1) as usize;
        let logs = members.iter().map(|name| &nodes[name]);
        let logs = flow.connections.value.map(|_| (logs, shares));
        let secondary = self.secondary_threshold(section, logs);
        let volume = (|| {
            Some(Volume {
                name: name.to_owned(),
                mode: mode.value?,
                primary: primary.value?,
                mirror: mirror.value,
                backups,
                secondary_threshold: secondary?,
                failover: failover?,
                fallback: fallback.value?,
                connections: shares,
                checkpoint_threshold: flow.threshold.value?,
                write_back: flow.write_back.value?,
                write_back_pages: flow.write_back_pages.value?,
                rounding: flow.rounding.value?,
                resend_timeout: flow.timeout.value?,
                resend_attempts: flow.attempts.value? as u32,
                copy_streams: flow.streams.value?,
                transport: transport.value?,
                encrypt: encrypt.value?,
                spin: spin.value?,
                tracker: match memory.tracker.value? {
                    TrackerKind::Auto => memory.default_tracker(),
                    word => word,
                },
                memory: memory.memory.value,
                max_uncommitted: memory.uncommitted.value,
                working: memory.working.value?,
            })
        })();
        (volume, shares, members)
    }

    /// The mode, by its key or as a mirror asks for.
    fn mode(&mut self, section: &Section<'_>, mirrored: bool) -> Field<Mode> {
        let default = if mirrored {
            Mode::Sync
        } else {
            Mode::Unreplicated
        };
        self.field(Some(section), "mode", read_word).or(default)
    }

    /// How much goes out at once, and how long answers may take.
    fn flow(&mut self, section: &Section<'_>) -> Flow {
        let of = Some(section);
        Flow {
            connections: self
                .field(of, "connections", |item| read_int(item, 1..=64))
                .or(1),
            streams: self
                .field(of, "copy_streams", |item| {
                    read_int(item, 1..=16).map(|n| Some(n as usize))
                })
                .or(None),
            threshold: self
                .field(of, "checkpoint_threshold", |item| {
                    read_int(item, 1..=i64::MAX)
                })
                .or(1),
            write_back: self.field(of, "write_back", read_word).or(WriteBack::Auto),
            write_back_pages: self
                .field(of, "write_back_pages", |item| read_int(item, 1..=1 << 20))
                .or(128),
            rounding: self
                .field(of, "msync_rounding", read_word)
                .or(Rounding::Exact),
            timeout: self
                .field(of, "resend_timeout", |item| read_duration(item, ANY_WAIT))
                .or(Duration::from_secs(2)),
            attempts: self
                .field(of, "resend_attempts", |item| {
                    read_int(item, 1..=i64::from(u32::MAX))
                })
                .or(5),
        }
    }

    /// What working copies are made of, and what bounds them.
    fn memory(&mut self, section: &Section<'_>) -> Memory {
        let of = Some(section);
        let memory = self.field(of, "memory", read_memory);
        let uncommitted = self.field(of, "max_uncommitted", read_memory);
        let default = Memory::default_tracker_of(&memory, &uncommitted);
        let tracker = self.field(of, "tracker", read_word).or(default);
        let working = self.field(of, "working", read_word).or(Working::Auto);
        self.check_memory(
            section,
            [("memory", &memory), ("max_uncommitted", &uncommitted)],
            &tracker,
            &working,
        );
        Memory {
            memory,
            uncommitted,
            tracker,
            working,
        }
    }

    /// What bounds memory against what keeps all of it.
    fn check_memory(
        &mut self,
        section: &Section<'_>,
        bounds: [(&str, &Field<u64>); 2],
        tracker: &Field<TrackerKind>,
        working: &Field<Working>,
    ) {
        let key = |key| dotted(&section.name, key);
        if let Some((what, _)) = bounds.into_iter().find(|(_, f)| f.given)
            && let Some(word @ (TrackerKind::Uffd | TrackerKind::Mprotect)) = tracker.value
        {
            let message = format!(
                "{word} cannot keep stores out of a page that is given back, which {what} needs; \
                 choose \"two-level\" or remove the key"
            );
            self.note(tracker.line, key("tracker"), message);
        }
        if let Some((what, _)) = bounds.into_iter().find(|(_, f)| f.given)
            && working.value == Some(Working::Shared)
        {
            let message = format!(
                "a shared working copy stays in memory as a whole, which {what} bounds; \
                 choose \"private\" or remove the key"
            );
            self.note(working.line, key("working"), message);
        }
    }

    /// The nodes that hold the volume: its backups' names, primary and mirror, and all.
    #[allow(clippy::type_complexity, reason = "three lists of names")]
    fn members<'n>(
        &mut self,
        section: &Section<'_>,
        [primary, mirror]: [&Field<String>; 2],
        listed: &Field<Vec<Element>>,
        nodes: &BTreeMap<&'n str, RawNode>,
        top: &dyn TableLike,
    ) -> (Vec<String>, [Option<&'n str>; 2], Vec<&'n str>) {
        let key = |key| dotted(&section.name, key);
        let mut backups = Vec::new();
        for (at, backup) in listed.value.iter().flatten() {
            let line = self.lines.at(*at);
            match backup {
                Ok(backup) => backups.push((line, backup.as_str())),
                Err(message) => self.note(line, key("backups"), message.as_str()),
            }
        }
        let pair = [("primary", primary), ("mirror", mirror)].map(|(role, field)| {
            let member = field.value.as_deref()?;
            self.member(member, field.line, key(role), nodes, top)
        });
        let mut members: Vec<&'n str> = pair.into_iter().flatten().collect();
        if mirror.value.is_some() && mirror.value == primary.value {
            self.note(
                mirror.line,
                key("mirror"),
                "is the primary too; a copy on the same node protects nothing, name another node",
            );
        }
        let mut seen = BTreeSet::new();
        for &(line, backup) in &backups {
            let already = match Some(backup) {
                name if name == primary.value.as_deref() => "is the primary too",
                name if name == mirror.value.as_deref() => "is the mirror too",
                _ if !seen.insert(backup) => "is listed twice",
                _ => {
                    members.extend(self.member(backup, line, key("backups"), nodes, top));
                    continue;
                }
            };
            let message = format!(
                "{backup} {already}; a copy on the same node protects nothing, \
                 name another node"
            );
            self.note(line, key("backups"), message);
        }
        let backups = backups.iter().map(|(_, name)| (*name).to_owned());
        (backups.collect(), pair, members)
    }

    /// The mode against the nodes that there are.
    fn check_mode(
        &mut self,
        section: &Section<'_>,
        mode: &Field<Mode>,
        mirror: &Field<String>,
        listed: &Field<Vec<Element>>,
    ) {
        let key = |key| dotted(&section.name, key);
        match mode.value {
            Some(Mode::Unreplicated) if mirror.given => {
                let message = "mode unreplicated sends nothing to a mirror, so the second copy \
                               would never exist; remove the mirror or choose mode sync";
                self.note(mirror.line, key("mirror"), message);
            }
            Some(word) if word != Mode::Unreplicated && !mirror.given => {
                let message = format!(
                    "is missing: mode {word} sends every record to a mirror; \
                     add mirror = \"NODE\" or choose mode unreplicated"
                );
                self.note(mode.line, key("mirror"), message);
            }
            _ => {}
        }
        let alone = listed.value.as_ref().is_some_and(Vec::is_empty);
        match mode.value {
            Some(Mode::Unreplicated) if !alone && listed.value.is_some() => {
                let message = "mode unreplicated has no mirror that could forward to backups; \
                               remove them, or name a mirror and choose mode sync-sec";
                self.note(listed.line, key("backups"), message);
            }
            Some(word @ (Mode::SyncSec | Mode::SyncSecEth)) if alone => {
                let (line, lack) = if listed.given {
                    (listed.line, "names no node")
                } else {
                    (mode.line, "is missing")
                };
                let message = format!(
                    "{lack}: in mode {word} the mirror forwards every record to backups; \
                     add backups = [\"NODE\"] or choose mode sync"
                );
                self.note(line, key("backups"), message);
            }
            _ => {}
        }
    }

    /// `fallback`, against the backups and the failover that there are.
    fn fallback(
        &mut self,
        section: &Section<'_>,
        alone: bool,
        failover: Option<Failover>,
    ) -> Field<Fallback> {
        let key = |key| dotted(&section.name, key);
        let fallback = self
            .field(Some(section), "fallback", read_word)
            .or(Fallback::Manual);
        if fallback.value == Some(Fallback::Automatic) && alone {
            let message = "there is no backup to fall back to; add backups = [\"NODE\"] \
                           or choose \"manual\"";
            self.note(fallback.line, key("fallback"), message);
        }
        if fallback.value == Some(Fallback::Automatic)
            && !alone
            && failover == Some(Failover::Manual)
        {
            let message = format!(
                "failover is \"manual\", so no backup acts by itself; set failover = \"automatic\" \
                 ({AUTOMATIC_VOTERS} voters or more, not in mode async), or choose \"manual\""
            );
            self.note(fallback.line, key("fallback"), message);
        }
        fallback
    }

    /// The mode against the media of the logs of primary and mirror.
    fn check_media(
        &mut self,
        section: &Section<'_>,
        mode: &Field<Mode>,
        [primary_medium, mirror_medium]: [Option<&Field<MediumKind>>; 2],
    ) {
        let key = |key| dotted(&section.name, key);
        if let (Some(word), Some(medium)) = (mode.value, primary_medium)
            && matches!(word, Mode::Unreplicated | Mode::Async | Mode::SyncFlush)
            && medium.value == Some(MediumKind::Dram)
        {
            let message = format!(
                "mode {word} acknowledges what is persistent on the primary, \
                 but the log of its primary is in dram \
                 (line {}); give that log medium \"disk\" or \"pmem\", or choose mode sync",
                medium.line
            );
            self.note(mode.line, key("mode"), message);
        }
        if let (Some(Mode::SyncDisk), Some(medium)) = (mode.value, mirror_medium)
            && medium.value == Some(MediumKind::Disk)
        {
            let message = format!(
                "mode sync-disk keeps the mirror's log in memory and only its data on a disk, \
                 but the log of its mirror is on a disk (line {}); give that log medium \"dram\" \
                 or \"pmem\", or choose mode sync",
                medium.line
            );
            self.note(mode.line, key("mode"), message);
        }
    }

    /// Shared memory is of one host.
    fn check_transport(
        &mut self,
        section: &Section<'_>,
        transport: &Field<Transport>,
        addresses: [Option<SocketAddr>; 2],
    ) {
        let key = |key| dotted(&section.name, key);
        if let (Some(Transport::Shm), [Some(a), Some(b)]) = (transport.value, addresses)
            && host(a) != host(b)
        {
            let message = format!(
                "shm needs both nodes on one host, but they are at {} and {}; use \"tcp\"",
                a.ip(),
                b.ip()
            );
            self.note(transport.line, key("transport"), message);
        }
    }

    /// Who promotes the mirror, by the key or by default.
    fn failover(
        &mut self,
        section: &Section<'_>,
        mode: &Field<Mode>,
        mirrored: bool,
        voters: usize,
    ) -> Option<Failover> {
        let automatic = voters >= AUTOMATIC_VOTERS && mirrored && mode.value != Some(Mode::Async);
        let failover = self
            .field(Some(section), "failover", read_word)
            .or(if automatic {
                Failover::Automatic
            } else {
                Failover::Manual
            });
        if failover.value != Some(Failover::Automatic) {
            return failover.value;
        }
        let key = dotted(&section.name, "failover");
        if mode.value == Some(Mode::Unreplicated) {
            let message = "in mode unreplicated there is no mirror that could be promoted; \
                           remove this, or name a mirror and choose mode sync";
            self.note(failover.line, key.as_str(), message);
        }
        if mode.value == Some(Mode::Async) {
            let message = "in mode async the mirror may lack what was acknowledged, so it is \
                           promoted by a person who knows the loss; choose \"manual\", or mode sync";
            self.note(failover.line, key.as_str(), message);
        }
        if voters < AUTOMATIC_VOTERS {
            let message = format!(
                "automatic promotion needs at least {AUTOMATIC_VOTERS} voters, so that a majority \
                 is left when one has failed, but the file has {voters}; add a witness \
                 ([node.NAME] with role = \"witness\") or choose \"manual\""
            );
            self.note(failover.line, key, message);
        }
        failover.value
    }

    /// The threshold by its key or, in the bounds that the logs set, by default. `logs`: the
    /// volume's nodes and its connections, where these are known.
    fn secondary_threshold<'r>(
        &mut self,
        section: &Section<'_>,
        logs: Option<(impl Iterator<Item = &'r RawNode>, usize)>,
    ) -> Option<u64> {
        let field = self.field(Some(section), "secondary_threshold", read_size);
        let (nodes, connections) = logs?;
        let smallest = nodes
            .filter_map(|node| Some((log_share(node.log_size.value?, connections), node)))
            .min_by_key(|(share, _)| *share);
        let half = smallest.map_or(u64::MAX, |(share, _)| share / 2);
        let field = field.or(SECONDARY_THRESHOLD.min(half));
        let bytes = field.value?;
        if let Some((share, node)) = smallest.filter(|_| bytes > half) {
            let message = format!(
                "{bytes} bytes are more than half of the smallest log: that of each connection has \
                 {share} bytes on node {} (line {}); make it at most {half}, or that log larger",
                shown_key(&node.name),
                node.log_size.line
            );
            self.note(
                field.line,
                dotted(&section.name, "secondary_threshold"),
                message,
            );
        } else if field.given && bytes < MIN_SECONDARY_THRESHOLD.min(half) {
            let message = format!(
                "{bytes} bytes are too few; the least is {} KiB",
                MIN_SECONDARY_THRESHOLD >> 10
            );
            self.note(
                field.line,
                dotted(&section.name, "secondary_threshold"),
                message,
            );
        }
        Some(bytes)
    }

    /// The data node called `name`, which `key` names at `line`. Notes that there is none.
    fn member<'n>(
        &mut self,
        name: &str,
        line: usize,
        key: String,
        nodes: &BTreeMap<&'n str, RawNode>,
        top: &dyn TableLike,
    ) -> Option<&'n str> {
        let is_there = |group: &dyn TableLike| group.contains_key(name);
        match nodes.get_key_value(name) {
            Some((_, node)) if node.role.value == Some(Role::Witness) => {
                let message = format!(
                    "node {name} is a witness (line {}), which stores no data; name a data node",
                    node.role.line
                );
                self.note(line, key, message);
                None
            }
            Some((&member, _)) => Some(member),
            // A node that is no table has its own mistake.
            None if top
                .get("node")
                .and_then(Item::as_table_like)
                .is_some_and(is_there) =>
            {
                None
            }
            None => {
                let message = format!("there is no [node.{name}]; {}", names(nodes.keys()));
                self.note(line, key, message);
                None
            }
        }
    }

    fn distinct_addresses(&mut self, nodes: &BTreeMap<&str, RawNode>) {
        let mut used = BTreeMap::new();
        for node in by_line(nodes, |node| node.address.line) {
            let Some(address) = node.address.value else {
                continue;
            };
            let place = (address.ip().to_canonical(), address.port());
            if let Some(first) = used.insert(place, node) {
                let message = format!(
                    "{address} is the address of node {} too (line {}); \
                     give each node its own port",
                    first.name, first.address.line
                );
                self.note(
                    node.address.line,
                    format!("node.{}.address", shown_key(&node.name)),
                    message,
                );
            }
        }
    }

    /// Notes data directories and logs of different nodes of one host that are or contain one
    /// another. Nodes of different hosts may use one path.
    fn distinct_paths(&mut self, nodes: &BTreeMap<&str, RawNode>) {
        let mut places = Vec::new();
        for node in nodes.values() {
            let here = node.address.value.and_then(host);
            for (key, field) in [("directory", &node.directory), ("log.path", &node.log_path)] {
                if let Some(path) = &field.value {
                    // With a slash at its end, a directory is a prefix of exactly what is in it.
                    let path = path.display().to_string();
                    let path = format!("{}/", path.trim_end_matches('/'));
                    places.push((here, path, field.line, key, &node.name));
                }
            }
        }
        places.sort();
        let mut within: Vec<&(_, String, usize, &str, &String)> = Vec::new();
        for place in &places {
            while within
                .last()
                .is_some_and(|outer| outer.0 != place.0 || !place.1.starts_with(&outer.1))
            {
                within.pop();
            }
            if let Some(outer) = within.iter().rev().find(|outer| outer.4 != place.4) {
                let (late, early, how) = if place.2 >= outer.2 {
                    (
                        place,
                        *outer,
                        if place.1 == outer.1 {
                            "is"
                        } else {
                            "is inside"
                        },
                    )
                } else {
                    (
                        *outer,
                        place,
                        if place.1 == outer.1 { "is" } else { "contains" },
                    )
                };
                let message = format!(
                    "{how} the {} of node {} (line {}); give each node a place of its own",
                    early.3,
                    shown_key(early.4),
                    early.2
                );
                self.note(
                    late.2,
                    format!("node.{}.{}", shown_key(late.4), late.3),
                    message,
                );
            }
            within.push(place);
        }
    }

    fn log_share(&mut self, node: &RawNode, connections: usize, volume: &str) {
        let Some(size) = node.log_size.value else {
            return;
        };
        if log_share(size, connections) >= MIN_LOG {
            return;
        }
        let shared = match connections {
            1 => String::new(),
            n => format!(" for each of the {n} connections of volume {volume}"),
        };
        let message = format!(
            "a log of {size} bytes is too small: {} KiB is the least{shared}, \
             make it at least {} KiB",
            MIN_LOG >> 10,
            (MIN_LOG >> 10) * connections as u64
        );
        self.note(
            node.log_size.line,
            format!("node.{}.log.size", shown_key(&node.name)),
            message,
        );
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

fn read_str(item: &Item) -> Result<&str, String> {
    item.as_str()
        .ok_or_else(|| format!("wants a string, not {}", item.type_name()))
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

fn read_bool(item: &Item) -> Result<bool, String> {
    item.as_bool()
        .ok_or_else(|| format!("wants true or false, not {}", item.type_name()))
}

fn read_name(item: &Item) -> Result<String, String> {
    let name = read_str(item)?;
    checked_name(name).map(|()| name.to_owned())
}

fn read_rack(item: &Item) -> Result<String, String> {
    match read_str(item)? {
        "" => Err("is empty; name the rack, or remove the key".to_owned()),
        text if text.len() > MAX_NAME => Err(format!(
            "{} is too long; the most is {MAX_NAME} bytes",
            quoted(text)
        )),
        text => Ok(text.to_owned()),
    }
}

/// An element of a list: its offset in the text, and the name or what is wrong with it.
type Element = (usize, Result<String, String>);

fn read_list(item: &Item) -> Result<Vec<Element>, String> {
    let wants = |have| format!("wants a list of nodes ([\"a\", \"b\"]), not {have}");
    let list = item.as_array().ok_or_else(|| wants(item.type_name()))?;
    let element = |value: &Value| {
        let name = match value.as_str() {
            Some(name) => checked_name(name).map(|()| name.to_owned()),
            None => Err(format!("wants names of nodes, not {}", value.type_name())),
        };
        (value.span().map_or(0, |span| span.start), name)
    };
    Ok(list.iter().map(element).collect())
}

fn read_word<T: FromStr<Err = UnknownWord>>(item: &Item) -> Result<T, String> {
    read_str(item)?
        .parse()
        .map_err(|error: UnknownWord| error.to_string())
}

fn read_int(item: &Item, range: RangeInclusive<i64>) -> Result<u64, String> {
    let value = item
        .as_integer()
        .ok_or_else(|| format!("wants an integer, not {}", item.type_name()))?;
    match u64::try_from(value) {
        Ok(valid) if range.contains(&value) => Ok(valid),
        _ if *range.end() == i64::MAX => Err(format!(
            "{value} is too small; the least is {}",
            range.start()
        )),
        _ => Err(format!(
            "{value} is not between {} and {}",
            range.start(),
            range.end()
        )),
    }
}

/// An absolute path, without `.`, doubled slashes, or a slash at its end.
fn read_path(item: &Item) -> Result<PathBuf, String> {
    let text = read_str(item)?;
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err(format!(
            "{} is not an absolute path; begin it with /",
            quoted(text)
        ));
    }
    if text.contains('\0') || text.len() > MAX_PATH {
        return Err(format!("a path has at most {MAX_PATH} bytes and no NUL"));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(format!(
            "{} has `..` in it; write the path that is meant",
            quoted(text)
        ));
    }
    Ok(path.components().collect())
}

/// The decimal number at the beginning of `text`, and the unit after it.
fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    Some((text[..end].parse().ok()?, text[end..].trim_start()))
}

fn read_size(item: &Item) -> Result<u64, String> {
    let bytes = match (item.as_integer(), item.as_str()) {
        (Some(bytes), _) => u64::try_from(bytes).map_err(|_| format!("{bytes} is not a size"))?,
        (_, Some(text)) => {
            let size = number_and_unit(text.trim()).and_then(|(number, unit)| {
                let shift = match unit {
                    "" | "B" => 0,
                    "KiB" => 10,
                    "MiB" => 20,
                    "GiB" => 30,
                    "TiB" => 40,
                    _ => return None,
                };
                number.checked_mul(1 << shift)
            });
            let what = "is not a size; write bytes, or a number with KiB, MiB, GiB or TiB";
            size.ok_or_else(|| format!("{} {what}", quoted(text)))?
        }
        _ => {
            return Err(format!(
                "wants a size such as \"64MiB\", not {}",
                item.type_name()
            ));
        }
    };
    if bytes > MAX_LOG {
        return Err(format!("{bytes} bytes is too large; the most is 1TiB"));
    }
    Ok(bytes)
}

fn read_memory(item: &Item) -> Result<u64, String> {
    let bytes = read_size(item)?;
    if bytes < MIN_MEMORY {
        return Err(format!("{bytes} bytes are too few; the least is 1MiB"));
    }
    Ok(bytes)
}

fn read_duration(item: &Item, range: RangeInclusive<Duration>) -> Result<Duration, String> {
    let Some(text) = item.as_str() else {
        return Err(format!(
            "wants a duration such as \"50ms\", not {}",
            item.type_name()
        ));
    };
    let time = number_and_unit(text.trim()).and_then(|(number, unit)| match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    });
    match time {
        None => Err(format!(
            "{} is not a duration; write a number with us, ms or s",
            quoted(text)
        )),
        Some(time) if time.is_zero() => Err("must be longer than zero".to_owned()),
        Some(time) if time < *range.start() => Err(format!(
            "{} is too short; the least is {}",
            quoted(text),
            shown_time(*range.start())
        )),
        Some(time) if time > *range.end() => Err(format!(
            "{} is too long; the most is {}",
            quoted(text),
            shown_time(*range.end())
        )),
        Some(time) => Ok(time),
    }
}
