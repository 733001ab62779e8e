//! How files' names in the volume change with one sync point.
//!
//! Owns the order of these changes. A record is applied again after a crash, from its first
//! change, to a volume that has some of them already. Then a change must not take a name from a
//! file that has it by a later one.
//!
//! Invariants:
//!
//! - Removals come first, then renames, then creations.
//! - A file is renamed once. It is renamed twice if the name that it had is on the way of
//!   another: then all such go to names of their own first.

use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};

use mojim::Change;

/// Where files lie that are open and have no name, or are on their way to another.
pub(crate) const REMOVED: &str = ".mount/removed/";

/// The changes of names of one sync point, in their order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    removed: Vec<u32>,
    renamed: Vec<(u32, String)>,
    created: Vec<(u32, String)>,
}

impl Names {
    /// Of files with the names that they had and have.
    pub(crate) fn of(files: impl Iterator<Item = (u32, Option<String>, Option<String>)>) -> Names {
        let mut names = Names::default();
        let mut moved = Vec::new();
        for (file, was, is) in files {
            match (was, is) {
                (Some(_), None) => names.removed.push(file),
                (None, Some(is)) => names.created.push((file, is)),
                (Some(was), Some(is)) if was != is => moved.push((file, was, is)),
                _ => {}
            }
        }
        let taken: BTreeSet<&str> = moved.iter().map(|(_, _, is)| &is[..]).collect();
        for (file, was, _) in &moved {
            let aside = format!("{REMOVED}{file}");
            if is_on_the_way(was, &taken) && *was != aside {
                names.renamed.push((*file, aside));
            }
        }
        names
            .renamed
            .extend(moved.into_iter().map(|(file, _, is)| (file, is)));
        names
    }

    /// Adds the changes to `out`.
    pub(crate) fn changes<'a>(&'a self, out: &mut Vec<Change<'a>>) {
        let removed = self.removed.iter();
        out.extend(removed.map(|file| Change::Remove { file: *file }));
        let renamed = self.renamed.iter();
        out.extend(renamed.map(|(file, name)| Change::Rename { file: *file, name }));
        let created = self.created.iter();
        out.extend(created.map(|(file, name)| Change::Create { file: *file, name }));
    }
}

/// Whether no file can have one of the names `taken` while another one has `name`: it is the
/// same, or one is a directory in the other.
fn is_on_the_way(name: &str, taken: &BTreeSet<&str>) -> bool {
    let below = format!("{name}/");
    let next = taken
        .range::<str, _>((Excluded(&below[..]), Unbounded))
        .next();
    let ends = name.match_indices('/').map(|(i, _)| i).chain([name.len()]);
    let mut above = ends.map(|i| &name[..i]);
    above.any(|a| taken.contains(a)) || next.is_some_and(|n| n.starts_with(&below))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// What the engine does with changes, as far as names go: a rename or a creation takes the
    /// name from whoever has it; a name below a file, or of a directory with files, fails.
    fn apply(disk: &mut BTreeMap<String, u32>, changes: &[Change<'_>]) {
        for c in changes {
            match c {
                Change::Remove { file } => disk.retain(|_, f| f != file),
                Change::Rename { file, name } | Change::Create { file, name } => {
                    let known = disk.values().any(|f| f == file);
                    let is_create = matches!(c, Change::Create { .. });
                    if known && is_create {
                        continue;
                    }
                    assert!(known || is_create, "{file} is lost");
                    disk.retain(|_, f| f != file);
                    assert!(!disk.contains_key(*name), "{name} is another file's");
                    let below = format!("{name}/");
                    assert!(
                        !disk.keys().any(|n| n.starts_with(&below)),
                        "{name} is a directory"
                    );
                    let above = |n: &String| name.starts_with(&format!("{n}/"));
                    assert!(!disk.keys().any(above), "{name} lies below a file");
                    disk.insert(name.to_string(), *file);
                }
                _ => unreachable!(),
            }
        }
    }

    const NAMES: [&str; 8] = ["a", "b", "c", "c/a", "c/b", "a/x", "a/x/y", "d"];

    /// A set of names that files can have beside each other.
    fn names() -> impl Strategy<Value = BTreeMap<u32, String>> {
        let pair = (1..6u32, 0..NAMES.len());
        prop::collection::vec(pair, 0..6).prop_map(|pairs| {
            let mut all: BTreeMap<u32, String> = BTreeMap::new();
            for (file, n) in pairs {
                let name = NAMES[n];
                let free = all.iter().all(|(f, other)| {
                    *f == file || other != name && !is_on_the_way(other, &BTreeSet::from([name]))
                });
                if free {
                    all.insert(file, name.into());
                }
            }
            all
        })
    }

    proptest! {
        /// From any names to any others, also applied again after any part of it.
        #[test]
        fn every_change_can_be_made_and_made_again(was in names(), is in names()) {
            let files: BTreeSet<u32> = was.keys().chain(is.keys()).copied().collect();
            let of = |m: &BTreeMap<u32, String>, f| m.get(&f).cloned();
            let names = Names::of(files.into_iter().map(|f| (f, of(&was, f), of(&is, f))));
            let mut changes = Vec::new();
            names.changes(&mut changes);
            let want: BTreeMap<String, u32> = is.into_iter().map(|(f, n)| (n, f)).collect();
            for done in 0..=changes.len() {
                let mut disk = was.iter().map(|(f, n)| (n.clone(), *f)).collect();
                apply(&mut disk, &changes[..done]);
                apply(&mut disk, &changes);
                prop_assert_eq!(&disk, &want);
            }
        }
    }
}
