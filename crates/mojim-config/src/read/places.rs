//! Settings that nodes have for themselves alone.
//!
//! They are addresses, directories, and the paths of their logs.

use super::*;

impl Reader {
    /// Notes names that belong to two nodes, now or before.
    pub(super) fn distinct_places(&mut self, nodes: &BTreeMap<&str, RawNode>) {
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

    pub(super) fn distinct_addresses(&mut self, nodes: &BTreeMap<&str, RawNode>) {
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
    pub(super) fn distinct_paths(&mut self, nodes: &BTreeMap<&str, RawNode>) {
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

    pub(super) fn log_share(&mut self, node: &RawNode, connections: usize, volume: &str) {
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
