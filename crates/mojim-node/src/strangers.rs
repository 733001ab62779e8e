//! What lies in a volume's directory and is not the volume's: files that somebody put there past
//! Mojim, which are on this machine only, and data files that are not as the catalogue has them.
//!
//! Only looks, for `mojim status` and `mojim verify`, also while a program has the copy open and
//! changes it. So what changed within the last [`MOMENT`] is left out, and what seems to be missing
//! is looked for again.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::Node;
use mojim_config::Volume;
use mojim_replica::layout;

/// A change by Mojim itself is in the catalogue after less than that.
const MOMENT: Duration = Duration::from_secs(5);
/// The pause before a file that seems to be missing is looked for again.
const PAUSE: Duration = Duration::from_millis(100);
/// Most files that are looked at.
const MOST_SEEN: usize = 100_000;
/// Most files that an answer names.
const MOST_NAMED: usize = 1000;

impl Node {
    /// What is not as the catalogue has it, if anything.
    pub(super) fn strangers(&self, v: &Volume) -> Option<Value> {
        let meta = layout::meta_dir(&self.me, &v.name);
        let directory = layout::data_dir(&self.me, &v.name);
        let catalog = || {
            let files = self.catalog(&meta).ok()?.files;
            Some(files.into_iter().map(|f| (f.name, f.size)).collect())
        };
        let found = look(&directory, MOMENT, catalog)?;
        if found.unknown.is_empty() && found.changed.is_empty() && !found.is_part {
            return None;
        }
        let named = |all: &[String]| json!(all[..all.len().min(MOST_NAMED)]);
        Some(json!({
            "path": directory.display().to_string(),
            "unknown": named(&found.unknown),
            "unknown_count": found.unknown.len(),
            "changed": named(&found.changed),
            "changed_count": found.changed.len(),
            "all_seen": !found.is_part,
        }))
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Files that the volume does not know.
    unknown: Vec<String>,
    /// What is wrong with the volume's own files, each with its name.
    changed: Vec<String>,
    /// There were more files than are looked at.
    is_part: bool,
}

/// Names and sizes of the volume's files.
type Files = HashMap<String, u64>;

/// `None` if there is no catalogue that can be read.
fn look(directory: &Path, moment: Duration, catalog: impl Fn() -> Option<Files>) -> Option<Found> {
    let mut found = Found::default();
    let mut seen = Vec::new();
    // What cannot be read now is read at the next look.
    let _ = walk(directory, PathBuf::new(), &mut seen, &mut found);
    // After the walk: what Mojim made before that is in it.
    let files = catalog()?;
    let path = |name: &str| directory.join(name);
    for name in seen {
        let known = name.to_str().is_some_and(|n| files.contains_key(n));
        if !known && stands(&directory.join(&name), moment).is_some() {
            found.unknown.push(name.to_string_lossy().into_owned());
        }
    }
    let mut missing: Vec<&String> = Vec::new();
    for (name, &size) in &files {
        match fs::symlink_metadata(path(name)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => missing.push(name),
            _ => {
                let Some(m) = stands(&path(name), moment) else {
                    continue;
                };
                if !m.is_file() {
                    found.changed.push(format!("{name} is not a plain file"));
                } else if m.len() != size && stays(&catalog, name, size) {
                    let has = m.len();
                    found
                        .changed
                        .push(format!("{name} has {has} bytes instead of {size}"));
                }
            }
        }
    }
    if !missing.is_empty() {
        std::thread::sleep(PAUSE);
        let again = catalog()?;
        for name in missing {
            if again.contains_key(name) && !path(name).exists() {
                found.changed.push(format!("{name} is not there"));
            }
        }
    }
    found.unknown.sort_unstable();
    found.changed.sort_unstable();
    Some(found)
}

/// Whether the catalogue still has that size for the file.
fn stays(catalog: &impl Fn() -> Option<Files>, name: &str, size: u64) -> bool {
    std::thread::sleep(PAUSE);
    catalog().is_some_and(|files| files.get(name) == Some(&size))
}

/// The file at `path`, if it has been as it is for more than `moment`.
fn stands(path: &Path, moment: Duration) -> Option<fs::Metadata> {
    let m = fs::symlink_metadata(path).ok()?;
    let since = Duration::new(
        u64::try_from(m.ctime()).unwrap_or(0),
        u32::try_from(m.ctime_nsec()).unwrap_or(0),
    );
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let age = now.unwrap_or_default().checked_sub(since)?;
    (age > moment).then_some(m)
}

/// All files below `at`, a path within `top`; Mojim's own directories, and empty ones, are no files.
fn walk(top: &Path, at: PathBuf, seen: &mut Vec<PathBuf>, found: &mut Found) -> io::Result<()> {
    let mut below = vec![at];
    while let Some(at) = below.pop() {
        for entry in fs::read_dir(top.join(&at))?.flatten() {
            let name = at.join(entry.file_name());
            let is_mojims = at.as_os_str().is_empty()
                && entry.file_name().as_encoded_bytes().starts_with(b".mojim");
            if is_mojims {
                continue;
            }
            if seen.len() >= MOST_SEEN {
                found.is_part = true;
                return Ok(());
            }
            match entry.file_type()?.is_dir() {
                true => below.push(name),
                false => seen.push(name),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn files(of: &[(&str, u64)]) -> Files {
        of.iter().map(|(n, s)| ((*n).to_owned(), *s)).collect()
    }

    #[test]
    fn what_is_not_as_the_catalogue_has_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for d in ["d/empty", ".mojim-lost", "kind"] {
            fs::create_dir_all(at(d)).unwrap();
        }
        for name in ["known", "d/known", "longer", "d/stranger", ".mojim-lost/x"] {
            fs::write(at(name), "12345").unwrap();
        }
        std::os::unix::fs::symlink("known", at("link")).unwrap();
        let known = [
            ("known", 5),
            ("d/known", 5),
            ("longer", 4),
            ("gone", 1),
            ("kind", 0),
        ];
        let catalog = || Some(files(&known));
        let found = look(dir.path(), Duration::ZERO, catalog).unwrap();
        assert_eq!(found.unknown, ["d/stranger", "link"]);
        let changed = [
            "gone is not there",
            "kind is not a plain file",
            "longer has 5 bytes instead of 4",
        ];
        assert_eq!(found.changed, changed);
        // Mojim itself may be about to note what has just changed.
        let found = look(dir.path(), MOMENT, catalog).unwrap();
        assert!(found.unknown.is_empty());
        assert_eq!(found.changed, ["gone is not there"]);
        assert_eq!(look(dir.path(), MOMENT, || None), None);
    }

    /// What is removed, or gets another size, while it is looked at is as it should be.
    #[test]
    fn what_mojim_changes_meanwhile_is_no_stranger() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "12345").unwrap();
        let looks = Cell::new(0);
        let catalog = || {
            looks.set(looks.get() + 1);
            Some(match looks.get() {
                1 => files(&[("f", 4), ("gone", 1)]),
                _ => files(&[("f", 5)]),
            })
        };
        let found = look(dir.path(), Duration::ZERO, catalog).unwrap();
        assert_eq!(found, Found::default());
        assert!(looks.get() > 1);
    }
}
