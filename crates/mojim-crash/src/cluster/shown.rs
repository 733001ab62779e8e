//! The content of a mount as the checker takes it in.
//!
//! The checker takes in every name with what it is of, and each thread's share.
//!
//! Owns the reading of a directory, and which names beside the threads' own may be there.
//!
//! Invariant: nothing that is shown is left out. A name that is no thread's is an error.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::io::Errno;

use super::names::{Entries, Entry, What};
use super::setup::{directory_of, file_of};

/// The extended attribute of [`Entry::mark`].
pub const MARK: &str = "user.mark";

/// What one thread has.
#[derive(Debug)]
pub struct Share {
    /// The bytes of its file.
    pub bytes: Vec<u8>,
    /// Whether the file is there that is to take this one's name.
    pub new: bool,
    /// Its directory.
    pub names: Entries,
}

/// Everything in `top` and below it.
pub fn read(top: &Path) -> io::Result<Entries> {
    let mut found = Entries::new();
    let mut inodes: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut open = vec![String::new()];
    while let Some(path) = open.pop() {
        let at = top.join(&path);
        let is = std::fs::symlink_metadata(&at)?;
        let what = match is.file_type() {
            t if t.is_dir() => {
                for e in std::fs::read_dir(&at)? {
                    let name = e?.file_name();
                    let name = name.to_str().ok_or(io::ErrorKind::InvalidData)?;
                    open.push(format!("{path}/{name}").trim_start_matches('/').to_owned());
                }
                What::Dir
            }
            t if t.is_symlink() => {
                What::Link(std::fs::read_link(&at)?.to_string_lossy().into_owned())
            }
            t if t.is_file() => What::File(std::fs::read(&at)?),
            t => return Err(io::Error::other(format!("{path}: {t:?}"))),
        };
        inodes.entry(is.ino()).or_default().push(path.clone());
        let entry = Entry {
            mark: match what {
                What::Link(_) => None,
                _ => mark(&at)?,
            },
            what,
            mode: is.mode() & 0o7777,
            links: is.nlink(),
            first: String::new(),
        };
        if let (What::File(bytes), len) = (&entry.what, is.len())
            && bytes.len() as u64 != len
        {
            let n = bytes.len();
            return Err(io::Error::other(format!("{path}: {n} bytes of {len}")));
        }
        found.insert(path, entry);
    }
    for paths in inodes.values() {
        let first = paths.iter().min().expect("one at least");
        for p in paths {
            found.get_mut(p).expect("just put there").first = first.clone();
        }
    }
    Ok(found)
}

fn mark(at: &Path) -> io::Result<Option<u64>> {
    let mut value = [0; 16];
    match rustix::fs::lgetxattr(at, MARK, &mut value[..]) {
        Ok(8) => Ok(Some(u64::from_le_bytes(
            value[..8].try_into().expect("eight bytes"),
        ))),
        Ok(n) => Err(io::Error::other(format!("a mark of {n} bytes"))),
        Err(Errno::NODATA) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Whether the volume's catalogue has just the files that are shown, each under one of its names,
/// with its size.
pub fn is_catalogued(shown: &Entries, files: &[(String, u64)]) -> Result<(), String> {
    let mut of: BTreeMap<&str, (&str, u64)> = BTreeMap::new();
    for (path, entry) in shown {
        if let What::File(bytes) = &entry.what {
            of.insert(path, (&entry.first, bytes.len() as u64));
        }
    }
    let mut missing: Vec<&str> = of.values().map(|(first, _)| *first).collect();
    missing.sort_unstable();
    missing.dedup();
    for (name, size) in files.iter().filter(|(n, _)| !n.starts_with(".mount/")) {
        let Some((first, len)) = of.get(&name[..]) else {
            return Err(format!(
                "the volume has a file {name:?}, which is not shown"
            ));
        };
        let Ok(at) = missing.binary_search(first) else {
            return Err(format!(
                "the volume has file {name:?} under another name too"
            ));
        };
        missing.remove(at);
        if size != len {
            return Err(format!("{name:?} has {size} bytes, {len} are shown"));
        }
    }
    match missing.first() {
        None => Ok(()),
        Some(path) => Err(format!("{path:?} is shown, and no file of the volume")),
    }
}

/// What of `shown` is whose.
pub fn shares(mut shown: Entries, threads: usize) -> Result<Vec<Share>, String> {
    shown.remove("");
    let mut all = Vec::new();
    for thread in 0..threads {
        let (file, dir) = (file_of(thread), directory_of(thread));
        let new = format!("{file}.new");
        let bytes = match shown.remove(&file) {
            Some(e) if e.links == 1 => e.what,
            other => {
                return Err(format!(
                    "thread {thread}: its file is {:?}",
                    other.is_some()
                ));
            }
        };
        let What::File(bytes) = bytes else {
            return Err(format!("{file} is no file"));
        };
        all.push(Share {
            bytes,
            new: shown.remove(&new).is_some(),
            names: below(&mut shown, &dir)?,
        });
    }
    match shown.first_key_value() {
        None => Ok(all),
        Some((path, _)) => Err(format!("it shows {path:?} ({} too many)", shown.len())),
    }
}

/// Takes out of `shown` what `dir` is and has, with paths from there.
fn below(shown: &mut Entries, dir: &str) -> Result<Entries, String> {
    let within = |path: &str| -> Option<String> {
        let rest = path.strip_prefix(dir)?;
        match rest {
            "" => Some(String::new()),
            rest => rest.strip_prefix('/').map(str::to_owned),
        }
    };
    let mut all = Entries::new();
    for (path, entry) in std::mem::take(shown) {
        match within(&path) {
            Some(rest) => {
                let first = within(&entry.first);
                let first = first.ok_or_else(|| format!("{path} and {} are one", entry.first))?;
                all.insert(rest, Entry { first, ..entry });
            }
            None => drop(shown.insert(path, entry)),
        }
    }
    Ok(all)
}
