//! The catalogue's entries, by number and by name.
//!
//! Invariant: each entry is found by its number, and by its name at a cost that does not grow
//! with their count.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::hash::BuildHasher;

use mojim_format::CatalogEntry;

/// Entries of a catalogue.
#[derive(Default)]
pub(super) struct Entries {
    by_id: BTreeMap<u32, CatalogEntry>,
    /// Sums of names, with the numbers of their entries.
    by_name: BTreeSet<(u64, u32)>,
    sums: RandomState,
}

impl Entries {
    pub(super) fn get(&self, id: u32) -> Option<&CatalogEntry> {
        self.by_id.get(&id)
    }

    pub(super) fn has(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn values(&self) -> btree_map::Values<'_, u32, CatalogEntry> {
        self.by_id.values()
    }

    /// Those from a number on, ascending.
    pub(super) fn from(&self, id: u32) -> impl Iterator<Item = &CatalogEntry> {
        self.by_id.range(id..).map(|(_, e)| e)
    }

    /// The entries that have a name.
    pub(super) fn holders<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a CatalogEntry> {
        let sum = self.sums.hash_one(name);
        let same = self.by_name.range((sum, 0)..=(sum, u32::MAX));
        let entries = same.filter_map(|(_, id)| self.by_id.get(id));
        entries.filter(move |e| e.name == name)
    }

    pub(super) fn find(&self, name: &str) -> Option<&CatalogEntry> {
        let sum = self.sums.hash_one(name);
        let mut same = self.by_name.range((sum, 0)..=(sum, u32::MAX));
        same.find_map(|(_, id)| self.by_id.get(id).filter(|e| e.name == name))
    }

    /// Adds an entry, in the place of one with its number.
    pub(super) fn insert(&mut self, e: CatalogEntry) -> Option<CatalogEntry> {
        let before = self.remove(e.id);
        self.by_name.insert((self.sums.hash_one(&e.name[..]), e.id));
        self.by_id.insert(e.id, e);
        before
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<CatalogEntry> {
        let e = self.by_id.remove(&id)?;
        self.by_name.remove(&(self.sums.hash_one(&e.name[..]), id));
        Some(e)
    }

    /// Gives an entry another name. Returns the one that it had.
    pub(super) fn rename(&mut self, id: u32, name: &str) -> Option<String> {
        let e = self.by_id.get_mut(&id)?;
        let before = std::mem::replace(&mut e.name, name.to_owned());
        self.by_name.remove(&(self.sums.hash_one(&before[..]), id));
        self.by_name.insert((self.sums.hash_one(name), id));
        Some(before)
    }

    /// Sets an entry's size. Returns the one that it had.
    pub(super) fn resize(&mut self, id: u32, size: u64) -> Option<u64> {
        let e = self.by_id.get_mut(&id)?;
        Some(std::mem::replace(&mut e.size, size))
    }

    pub(super) fn clear(&mut self) {
        self.by_id.clear();
        self.by_name.clear();
    }
}

impl FromIterator<CatalogEntry> for Entries {
    fn from_iter<I: IntoIterator<Item = CatalogEntry>>(all: I) -> Entries {
        let mut entries = Entries::default();
        all.into_iter().for_each(|e| _ = entries.insert(e));
        entries
    }
}
