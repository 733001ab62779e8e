//! The sections of volumes: their modes, members and limits, and what these ask of nodes.

use super::*;

impl Reader {
    /// The volume, its connections, and those of its nodes that exist and store data. `voters` is
    /// the greatest number of them that the file can mean.
    pub(super) fn volume<'n>(
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

    /// The mode, by its key or, with a mirror or without, by default.
    pub(super) fn mode(&mut self, section: &Section<'_>, mirrored: bool) -> Field<Mode> {
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
    pub(super) fn memory(&mut self, section: &Section<'_>) -> Memory {
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

    /// Checks bounds on memory against settings that keep all of it.
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
                "{word} cannot keep stores out of a page that is given back, and {what} needs that; choose \"two-level\" or remove the key"
            );
            self.note(tracker.line, key("tracker"), message);
        }
        if let Some((what, _)) = bounds.into_iter().find(|(_, f)| f.given)
            && working.value == Some(Working::Shared)
        {
            let message = format!(
                "a shared working copy stays in memory as a whole, and {what} bounds that memory; choose \"private\" or remove the key"
            );
            self.note(working.line, key("working"), message);
        }
    }

    /// The nodes that hold the volume: its backups' names, primary and mirror, and all.
    #[allow(clippy::type_complexity, reason = "three lists of names")]
    pub(super) fn members<'n>(
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
    pub(super) fn fallback(
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

    /// Shared memory needs both nodes on one host.
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
    pub(super) fn failover(
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
    pub(super) fn secondary_threshold<'r>(
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

    /// The data node called `name`, which `key` names at `line`. Notes a mistake if there
    /// is none.
    pub(super) fn member<'n>(
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
}
