//! The outcome of sync points in names.
//!
//! Each change of names costs several syncs of the disk. A program that makes and removes a file
//! with every transaction (SQLite's journal) goes no faster than its nodes can apply. So sync
//! points that wait together are applied as one, all of them with one write of the catalogue. A
//! file that they make and remove is never made. One that they make and rename is made under its
//! last name. So goes a file that was there, and that they rename and remove: a mount puts a file
//! that is replaced and still open aside, and removes it a moment later. A sync point that renames
//! a file that was there, and that stays, is applied alone, step by step (`names.rs`).
//!
//! Invariants:
//!
//! - The catalogue says that the last of the sync points was begun before the directory shows
//!   anything of them.
//! - Sync points that were begun as one, and cut off by a crash, are applied again as one, maybe
//!   with more behind them. Never fewer: the catalogue may show the names that the last of them
//!   gives. So nothing of them is applied before all of them may be ([`Area::cut_off`]).
//! - Files that were there go first, then names are given. So a name that is free at the end is
//!   free when it is given.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mojim_format::catalog::valid_file_name;
use mojim_format::{Op, OpKind};

use super::entries::Entries;

/// What sync points come to.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files that they make, with their last names.
    pub(super) made: BTreeMap<u32, String>,
    /// Files that they make and remove.
    pub(super) passing: BTreeSet<u32>,
    /// Files that were there, and that they remove, or whose names they give to others.
    pub(super) removed: BTreeSet<u32>,
}

/// An operation, with the number of its sync point among those that are applied together.
pub type Numbered<'a> = (usize, Op, &'a [u8]);

impl Outcome {
    /// Whether they make nothing, not even for a while.
    pub(super) fn is_empty(&self) -> bool {
        self.made.is_empty() && self.passing.is_empty()
    }

    /// Of sync points with these operations, where these files are there. `None` if they change
    /// no names. An error: the number of the first one that cannot be applied with those before
    /// it.
    pub(super) fn of<'a, I>(files: &Entries, ops: impl Fn() -> I) -> Result<Option<Outcome>, usize>
    where
        I: Iterator<Item = Numbered<'a>>,
    {
        let is_data = |op: &Op| matches!(op.kind, OpKind::Write | OpKind::Resize);
        let names = || ops().filter(|(_, op, _)| !is_data(op));
        // A crash may have left some of these in the catalogue.
        let created = names().filter(|(_, op, _)| op.kind == OpKind::Create);
        let mut names_now = Names {
            outcome: Outcome::default(),
            there: files,
            created: created.map(|(_, op, _)| op.file).collect(),
            aside: BTreeMap::new(),
            named: HashMap::new(),
        };
        let mut any = false;
        for (number, op, payload) in names() {
            any = true;
            if !names_now.add(number, op.kind, op.file, payload) {
                return Err(number);
            }
        }
        // A file that they rename, and that stays, needs its steps.
        let staying = names_now.aside.values().map(|(number, _)| *number).min();
        match staying {
            Some(number) => Err(number),
            None => Ok(any.then_some(names_now.outcome)),
        }
    }
}

/// The names while sync points are looked through.
struct Names<'a> {
    outcome: Outcome,
    /// The files that were there, and maybe some of those that the sync points make.
    there: &'a Entries,
    /// The files that the sync points make.
    created: BTreeSet<u32>,
    /// Files that were there and have other names so far. Each has the number of the sync point
    /// that renamed it first, and its name.
    aside: BTreeMap<u32, (usize, String)>,
    /// Those that are made or have other names so far, by name.
    named: HashMap<String, u32>,
}

impl Names<'_> {
    /// Adds a change of the sync point of this number. False if it has to be applied as a step.
    fn add(&mut self, number: usize, kind: OpKind, id: u32, payload: &[u8]) -> bool {
        let all = &self.outcome;
        match (kind, name(payload)) {
            (OpKind::Create, Some(name)) => {
                let again = all.made.contains_key(&id) || all.passing.contains(&id);
                let is_new = !again && !all.removed.contains(&id) && !self.aside.contains_key(&id);
                is_new && self.name(id, name)
            }
            (OpKind::Rename, Some(name)) if all.made.contains_key(&id) => self.name(id, name),
            (OpKind::Rename, Some(name)) => {
                let was_there = !self.created.contains(&id) && !all.removed.contains(&id);
                was_there && self.put_aside(number, id, name)
            }
            (OpKind::Remove, _) => {
                self.remove(id);
                true
            }
            _ => false,
        }
    }

    /// A file that the sync points make has this name from here on.
    fn name(&mut self, id: u32, name: &str) -> bool {
        self.take_away(id, name);
        if let Some(before) = self.outcome.made.insert(id, name.to_owned()) {
            self.named.remove(&before);
        }
        self.named.insert(name.to_owned(), id);
        true
    }

    /// A file that was there has this name from here on.
    fn put_aside(&mut self, number: usize, id: u32, name: &str) -> bool {
        self.take_away(id, name);
        let before = self.aside.remove(&id);
        let first = before.as_ref().map_or(number, |(first, _)| *first);
        if let Some((_, before)) = before {
            self.named.remove(&before);
        }
        self.aside.insert(id, (first, name.to_owned()));
        self.named.insert(name.to_owned(), id);
        true
    }

    /// Another file that has this name, made by the sync points or there before, is gone.
    fn take_away(&mut self, id: u32, name: &str) {
        let there = self.there.holders(name).map(|f| f.id);
        // Also one that has another name by now: unless it goes, too, all is applied in steps.
        let others = there.filter(|other| *other != id && !self.created.contains(other));
        self.outcome.removed.extend(others);
        if let Some(other) = self.named.get(name).copied()
            && other != id
        {
            self.remove(other);
        }
    }

    /// This file is gone.
    fn remove(&mut self, id: u32) {
        let all = &mut self.outcome;
        let had = match all.made.remove(&id) {
            Some(name) => {
                all.passing.insert(id);
                Some(name)
            }
            None => {
                all.removed.insert(id);
                self.aside.remove(&id).map(|(_, name)| name)
            }
        };
        if let Some(name) = had {
            self.named.remove(&name);
        }
    }
}

/// The name in an operation's payload, if a volume can have it.
pub(crate) fn name(payload: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(payload).ok();
    name.filter(|n| valid_file_name(n))
}
