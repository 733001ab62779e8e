//! Files in a volume's directory that are not the volume's, or not as the catalogue has them.
//!
//! There are two kinds:
//!
//! - files that somebody put there past Mojim, which are on this machine only
//! - data files that are not as the catalogue has them
//!
//! This module only looks, for `mojim status` and `mojim verify`, also while the copy is open and
//! changes. It reports only what was so at two looks, and no change of Mojim's own:
//!
//! - Mojim's changes of names are in the notes and the catalogue before they are in the directory
//!   (`area/names.rs` of `mojim-store`).
//! - Both are read while no checkpoint changes them.
//! - Sizes are compared only while nothing is applied.
//!
//! The time of day means nothing here.
//!
//! Invariant: one look at a time for each volume, however often it is asked for.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mojim_format::{State, Superblock};
use serde_json::{Value, json};

use super::Node;
use mojim_config::Volume;
use mojim_replica::layout;
use mojim_store::log::Live;
use mojim_store::notes::noted_names;
use mojim_store::store::read_superblock;

/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// How long a look goes on, if there are many files.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the catalogue is read again, if a checkpoint came meanwhile.
const TRIES: u32 = 20;
/// Most files that an answer names.
const MOST_NAMED: usize = 1000;

impl Node {
    /// What is not as the catalogue has it, if anything.
    pub(super) fn unmanaged_files(&self, v: &Volume) -> Option<Value> {
        let held = self.of(v);
        let mut known = held.known();
        if std::mem::replace(&mut known.looks_for_unmanaged, true) {
            return known.unmanaged_files.clone();
        }
        drop(known);
        let found = self.look_for_unmanaged(v);
        let mut known = held.known();
        known.looks_for_unmanaged = false;
        known.unmanaged_files.clone_from(&found);
        found
    }

    fn look_for_unmanaged(&self, v: &Volume) -> Option<Value> {
        let meta = layout::meta_dir(&self.me, &v.name);
        let directory = layout::data_dir(&self.me, &v.name);
        let superblock = || {
            let found = read_superblock(&*self.env, &meta).ok().flatten();
            found.filter(|sb| sb.state == State::Whole)
        };
        let known = || {
            steady(&|| superblock().map(|sb| sb.sequence), &|| {
                let c = self.catalog(&meta).ok()?;
                let noted = noted_names(&*self.env, &meta, c.volume, c.lsn).ok()?;
                Some(CatalogNames {
                    files: c.files.into_iter().map(|f| (f.name, f.size)).collect(),
                    noted: noted.into_iter().collect(),
                })
            })
        };
        let at_rest = || self.at_rest(v, &superblock()?);
        let found = look_twice(&directory, &known, &at_rest)?;
        if found.is_nothing() || superblock().is_none() {
            return None;
        }
        let named = |all: &BTreeSet<String>| json!(all.iter().take(MOST_NAMED).collect::<Vec<_>>());
        Some(json!({
            "path": directory.display().to_string(),
            "unknown": named(&found.unknown),
            "unknown_count": found.unknown.len(),
            "changed": named(&found.changed),
            "changed_count": found.changed.len(),
            "all_seen": !found.is_part,
        }))
    }

    /// Up to where everything is applied, if nothing waits to be: only then are sizes known.
    fn at_rest(&self, v: &Volume, sb: &Superblock) -> Option<u64> {
        if let Some(m) = self.of(v).mirror() {
            let applied = m.store.applied();
            return (m.store.poisoned().is_none() && applied == m.tail()).then_some(applied);
        }
        if self.attached(v) {
            let live = self.live(v)?;
            let [applied, last, limit] =
                [Live::Applied, Live::Last, Live::Limit].map(|w| live[w as usize]);
            return (applied == last && limit <= applied).then_some(applied);
        }
        (sb.logs == 0 && !self.in_use(v)).then_some(sb.checkpoint)
    }
}

/// The volume's files, as its catalogue has them, with those whose names are being changed.
struct CatalogNames {
    files: HashMap<String, u64>,
    noted: HashSet<String>,
}

/// What `read` has, read while no checkpoint replaced the catalogue and cleared the notes: else a name
/// that Mojim itself has changed might be in neither. `None` if there is no catalogue that can be read,
/// or checkpoints follow each other faster than it is read.
fn steady<T>(sequence: &dyn Fn() -> Option<u64>, read: &dyn Fn() -> Option<T>) -> Option<T> {
    let mut before = sequence()?;
    for _ in 0..TRIES {
        let found = read();
        let after = sequence()?;
        if after == before {
            return found;
        }
        before = after;
    }
    None
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Deviations {
    /// Files that the volume does not know.
    unknown: BTreeSet<String>,
    /// What is wrong with the volume's own files, each with its name.
    changed: BTreeSet<String>,
    /// Not all was looked at.
    is_part: bool,
}

impl Deviations {
    fn is_nothing(&self) -> bool {
        self.unknown.is_empty() && self.changed.is_empty()
    }
}

/// What is found at two looks. `None` if there is no catalogue that can be read.
fn look_twice(
    directory: &Path,
    known: &dyn Fn() -> Option<CatalogNames>,
    at_rest: &dyn Fn() -> Option<u64>,
) -> Option<Deviations> {
    let first = look(directory, known, at_rest)?;
    if first.is_nothing() {
        return Some(first);
    }
    std::thread::sleep(PAUSE);
    let then = look(directory, known, at_rest)?;
    Some(Deviations {
        unknown: &first.unknown & &then.unknown,
        changed: &first.changed & &then.changed,
        is_part: first.is_part || then.is_part,
    })
}

fn look(
    directory: &Path,
    known: &dyn Fn() -> Option<CatalogNames>,
    at_rest: &dyn Fn() -> Option<u64>,
) -> Option<Deviations> {
    let mut found = Deviations::default();
    let rests = at_rest();
    let mut seen = Vec::new();
    walk(directory, &mut seen, &mut found);
    // After the walk: what Mojim itself made or removed by then is in it.
    let known = known()?;
    for name in &seen {
        let is = |n: &str| known.files.contains_key(n) || known.noted.contains(n);
        let there = || fs::symlink_metadata(directory.join(name)).is_ok();
        if !name.to_str().is_some_and(is) && there() {
            found.unknown.insert(name.to_string_lossy().into_owned());
        }
    }
    let mut sizes = Vec::new();
    for (name, &size) in known
        .files
        .iter()
        .filter(|(n, _)| !known.noted.contains(*n))
    {
        match fs::symlink_metadata(directory.join(name)) {
            // An empty one may be about to be made.
            Err(e) if e.kind() == io::ErrorKind::NotFound && size > 0 => {
                found.changed.insert(format!("{name} is not there"));
            }
            Ok(m) if !m.is_file() => {
                found.changed.insert(format!("{name} is not a plain file"));
            }
            Ok(m) if m.len() != size => {
                sizes.push(format!("{name} has {} bytes instead of {size}", m.len()));
            }
            _ => {}
        }
    }
    if rests.is_some() && rests == at_rest() {
        found.changed.extend(sizes);
    }
    Some(found)
}

/// All files below `top`; Mojim's own directories, and empty ones, are no files.
fn walk(top: &Path, seen: &mut Vec<PathBuf>, found: &mut Deviations) {
    let begun = Instant::now();
    let mut below = vec![PathBuf::new()];
    while let Some(at) = below.pop() {
        let Ok(entries) = fs::read_dir(top.join(&at)) else {
            // Not ours to read, or gone.
            found.is_part = true;
            continue;
        };
        for entry in entries.flatten() {
            let name = at.join(entry.file_name());
            if name.as_os_str().as_encoded_bytes().starts_with(b".mojim") {
                continue;
            }
            match entry.file_type().is_ok_and(|t| t.is_dir()) {
                true => below.push(name),
                false => seen.push(name),
            }
        }
        if begun.elapsed() > PATIENCE && !below.is_empty() {
            found.is_part = true;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn known(files: &[(&str, u64)], noted: &[&str]) -> Option<CatalogNames> {
        Some(CatalogNames {
            files: files.iter().map(|(n, s)| ((*n).to_owned(), *s)).collect(),
            noted: noted.iter().map(|n| (*n).to_owned()).collect(),
        })
    }

    fn all(of: &BTreeSet<String>) -> Vec<&str> {
        of.iter().map(String::as_str).collect()
    }

    #[test]
    fn what_is_not_as_the_catalogue_has_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for d in ["d/empty", ".mojim-lost", "kind"] {
            fs::create_dir_all(at(d)).unwrap();
        }
        for name in [
            "known",
            "d/known",
            "longer",
            "d/unmanaged",
            ".mojim-lost/x",
            "going",
        ] {
            fs::write(at(name), "12345").unwrap();
        }
        std::os::unix::fs::symlink("known", at("link")).unwrap();
        let files = [
            ("known", 5),
            ("d/known", 5),
            ("longer", 4),
            ("gone", 1),
            ("kind", 1),
            ("to be made", 0),
            ("coming", 9),
        ];
        let catalog = || known(&files, &["going", "coming"]);
        let found = look_twice(dir.path(), &catalog, &|| Some(1)).unwrap();
        assert_eq!(all(&found.unknown), ["d/unmanaged", "link"]);
        let (gone, kind) = ("gone is not there", "kind is not a plain file");
        let longer = "longer has 5 bytes instead of 4";
        assert_eq!(all(&found.changed), [gone, kind, longer]);
        assert!(!found.is_part);
        // While records are applied, sizes are in motion.
        let found = look_twice(dir.path(), &catalog, &|| None).unwrap();
        assert_eq!(all(&found.changed), [gone, kind]);
        let n = Cell::new(0);
        let moves = || Some(n.replace(n.get() + 1));
        let found = look_twice(dir.path(), &catalog, &moves).unwrap();
        assert_eq!(all(&found.changed), [gone, kind]);
        assert_eq!(look_twice(dir.path(), &|| None, &|| None), None);
    }

    /// A program made a file longer all the time, and each checkpoint changed the superblock: what was
    /// found was dropped for that, look after look.
    #[test]
    fn what_is_found_beside_checkpoints_counts() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("unmanaged"), "12345").unwrap();
        let at = Cell::new(0);
        let reads = Cell::new(0);
        // The first reading of each look meets a checkpoint.
        let catalog = || {
            steady(&|| Some(at.get()), &|| {
                reads.set(reads.get() + 1);
                if reads.get() % 2 == 1 {
                    at.set(at.get() + 1);
                    return known(&[], &[]);
                }
                known(&[("f", 0)], &[])
            })
        };
        let found = look_twice(dir.path(), &catalog, &|| None).unwrap();
        assert_eq!(all(&found.unknown), ["unmanaged"]);
        assert_eq!((at.get(), reads.get()), (2, 4));
        // What is read while checkpoints go on and on may be of two of them.
        let moves = || Some(at.replace(at.get() + 1));
        assert!(steady(&moves, &|| known(&[], &[])).is_none());
        assert!(steady(&|| None, &|| known(&[], &[])).is_none());
    }

    /// What was so at one look only is Mojim's own work.
    #[test]
    fn what_passes_is_no_unmanaged_file() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["f", "removed later"] {
            fs::write(dir.path().join(name), "12345").unwrap();
        }
        let looks = Cell::new(0);
        let catalog = || match looks.replace(looks.get() + 1) {
            0 => known(&[("f", 4), ("gone", 1)], &[]),
            _ => known(&[("f", 5), ("removed later", 5)], &[]),
        };
        let found = look_twice(dir.path(), &catalog, &|| Some(1)).unwrap();
        assert_eq!(found, Deviations::default());
        assert_eq!(looks.get(), 2);
    }
}
