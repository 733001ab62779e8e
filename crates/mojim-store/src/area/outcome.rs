//! What a sync point comes to in names.
//!
//! Each change of names costs several syncs of the disk, and a program that makes and removes a
//! file with every transaction (SQLite's journal) goes no faster than its nodes can apply. So a
//! file that a sync point makes and removes is never made, and one that it makes and renames is
//! made under its last name, all of them with one write of the catalogue. A sync point that
//! renames a file that was there before is applied step by step instead (`names.rs`).
//!
//! Invariants:
//! - The catalogue says that the sync point was begun before the directory shows anything of it.
//! - Files that were there go first, then names are given: a name that is free at the end is free
//!   when it is given.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mojim_format::catalog::valid_file_name;
use mojim_format::{CatalogEntry, Op, OpKind};

/// What a sync point comes to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files that it makes, with their last names.
    pub(super) made: BTreeMap<u32, String>,
    /// Files that it makes and removes.
    pub(super) passing: BTreeSet<u32>,
    /// Files that were there, and that it removes.
    pub(super) removed: BTreeSet<u32>,
}

impl Outcome {
    /// Whether it makes nothing, not even for a while.
    pub(super) fn is_empty(&self) -> bool {
        self.made.is_empty() && self.passing.is_empty()
    }

    /// Of a sync point with these operations, where these files are there. `None` if it changes
    /// no names, or is to be applied step by step.
    pub(super) fn of<'a, I>(
        files: &BTreeMap<u32, CatalogEntry>,
        ops: impl Fn() -> I,
    ) -> Option<Outcome>
    where
        I: Iterator<Item = (Op, &'a [u8])>,
    {
        let is_data = |op: &Op| matches!(op.kind, OpKind::Write | OpKind::Resize);
        if ops().all(|(op, _)| is_data(&op)) {
            return None;
        }
        // A crash may have left some of these in the catalogue.
        let created = ops().filter(|(op, _)| op.kind == OpKind::Create);
        let created: BTreeSet<u32> = created.map(|(op, _)| op.file).collect();
        let by_steps = |op: &Op| match op.kind {
            OpKind::Spill => true,
            OpKind::Rename => !created.contains(&op.file),
            _ => false,
        };
        if ops().any(|(op, _)| by_steps(&op)) {
            return None;
        }
        // Only names that the sync point gives matter: a volume may have many others.
        let names = ops().filter(|(op, _)| !is_data(op));
        let given: BTreeSet<&str> = names.filter_map(|(_, payload)| name(payload)).collect();
        let there = files.values().filter(|f| given.contains(&f.name[..]));
        let there = there.filter(|f| !created.contains(&f.id));
        let mut names = Names {
            outcome: Outcome::default(),
            there: there.map(|f| (&f.name[..], f.id)).collect(),
            made: HashMap::new(),
        };
        let mut ops = ops().filter(|(op, _)| !is_data(op));
        let all = ops.all(|(op, payload)| names.add(op.kind, op.file, payload));
        all.then_some(names.outcome)
    }
}

/// The names while a sync point is looked through.
struct Names<'a> {
    outcome: Outcome,
    /// The files that were there, by name.
    there: HashMap<&'a str, u32>,
    /// The files that the sync point made, by name.
    made: HashMap<String, u32>,
}

impl Names<'_> {
    /// Adds a change. False if it has to be applied as a step.
    fn add(&mut self, kind: OpKind, id: u32, payload: &[u8]) -> bool {
        let all = &mut self.outcome;
        match (kind, name(payload)) {
            (OpKind::Create, Some(name)) => {
                let again = all.made.contains_key(&id) || all.passing.contains(&id);
                !again && !all.removed.contains(&id) && self.name(id, name)
            }
            (OpKind::Rename, Some(name)) => all.made.contains_key(&id) && self.name(id, name),
            (OpKind::Remove, _) => {
                match all.made.remove(&id) {
                    Some(name) => {
                        self.made.remove(&name);
                        all.passing.insert(id)
                    }
                    None => all.removed.insert(id),
                };
                true
            }
            _ => false,
        }
    }

    /// A file that the sync point makes has this name from here on; another one that it made
    /// loses it, and is gone. False if one has it that was there.
    fn name(&mut self, id: u32, name: &str) -> bool {
        let all = &mut self.outcome;
        let there = self.there.get(name);
        if there.is_some_and(|f| !all.removed.contains(f)) {
            return false;
        }
        if let Some(before) = all.made.insert(id, name.to_owned()) {
            self.made.remove(&before);
        }
        if let Some(other) = self.made.insert(name.to_owned(), id)
            && other != id
        {
            all.made.remove(&other);
            all.passing.insert(other);
        }
        true
    }
}

/// The name in an operation's payload, if a volume can have it.
pub(super) fn name(payload: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(payload).ok();
    name.filter(|n| valid_file_name(n))
}
