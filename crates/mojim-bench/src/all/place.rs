//! The directory of a report: whose it is, its lock, and how files get into it.
//!
//! Invariants:
//!
//! - A directory with anything else in it is refused, and nothing in it changes.
//! - One run at a time has it.
//! - A file of a report is whole: it gets its name last.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use mojim_cli::failure::Failure;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;

use crate::all::rows::FORMAT;

/// The file that is locked. It says what the directory is, also before there is a report.
const LOCK: &str = "report.lock";

/// A directory that this run has to itself.
pub(crate) struct Place {
    dir: PathBuf,
    _lock: File,
}

impl Place {
    /// Takes the directory `dir`, which is made if it is not there.
    pub(crate) fn take(dir: &Path) -> Result<Place, Failure> {
        let at = |e: io::Error| Failure::failed(format!("{}: {e}", dir.display()));
        fs::create_dir_all(dir).map_err(at)?;
        if !is_ours(dir).map_err(at)? {
            return Err(Failure::usage(format!(
                "{} is not empty, and has no report of `mojim bench all`. Name another directory \
                 with --report.",
                dir.display()
            )));
        }
        let mut file = OpenOptions::new();
        let file = file.read(true).append(true).create(true);
        let mut lock = file.open(dir.join(LOCK)).map_err(at)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let text = "another run of `mojim bench all` writes its report there";
                return Err(Failure::usage(format!("{}: {text}", dir.display())));
            }
            Err(e) => return Err(at(e.into())),
        }
        if lock.metadata().map_err(at)?.len() == 0 {
            writeln!(lock, "{FORMAT}").map_err(at)?;
        }
        Ok(Place {
            dir: dir.to_owned(),
            _lock: lock,
        })
    }

    /// A directory in it, which is made if it is not there.
    pub(crate) fn directory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.dir.join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Puts these files there, with all their bytes at once. Each has its path in the directory.
    pub(crate) fn put(&self, files: &[(PathBuf, Vec<u8>)]) -> io::Result<()> {
        let new = |path: &Path| {
            let mut name = self.dir.join(path).into_os_string();
            name.push(".new");
            name
        };
        for (path, bytes) in files {
            fs::write(new(path), bytes)?;
        }
        for (path, _) in files {
            fs::rename(new(path), self.dir.join(path))?;
        }
        Ok(())
    }
}

/// Removes a file that may not be there.
pub(crate) fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Whether a report may be written there: it is empty, or has a report or a part of one.
fn is_ours(dir: &Path) -> io::Result<bool> {
    let mut others = false;
    for entry in fs::read_dir(dir)? {
        others |= entry?.file_name() != LOCK;
    }
    let begun = || fs::read(dir.join(LOCK)).is_ok_and(|b| b.starts_with(FORMAT.as_bytes()));
    Ok(!others || begun() || has_report(dir))
}

fn has_report(dir: &Path) -> bool {
    let bytes = fs::read(dir.join("results.json")).unwrap_or_default();
    let json: Option<Value> = serde_json::from_slice(&bytes).ok();
    json.is_some_and(|json| json["format"] == FORMAT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn refusal(dir: &Path) -> String {
        let refused = Place::take(dir).err().expect("it is refused");
        assert_eq!(refused.code, 2);
        refused.text
    }

    /// A report in a directory with other files overwrote an index.html that was there.
    #[test]
    fn a_directory_with_other_files_is_refused_and_stays_as_it_is() {
        let scratch = Scratch::new().unwrap();
        let dir = scratch.path();
        let other = r#"{"format": "another", "version": 1}"#;
        for (name, text) in [("index.html", "mine"), ("results.json", other)] {
            fs::write(dir.join(name), text).unwrap();
            assert!(refusal(dir).contains("is not empty"));
            assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), text);
        }
        assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
        let ours = format!(r#"{{"format": "{FORMAT}"}}"#);
        fs::write(dir.join("results.json"), ours).unwrap();
        assert!(Place::take(dir).is_ok());
    }

    /// Two runs in one directory made one report of both.
    #[test]
    fn one_run_at_a_time_has_a_directory_and_a_later_one_goes_on() {
        let scratch = Scratch::new().unwrap();
        let dir = scratch.path().join("new");
        let place = Place::take(&dir).map_err(|f| f.text).unwrap();
        assert!(refusal(&dir).contains("another run"));
        place.directory("rows").unwrap();
        drop(place);
        // The first one was cut off before it had a report.
        let place = Place::take(&dir).map_err(|f| f.text).unwrap();
        let file = (PathBuf::from("rows/x"), b"y".to_vec());
        place.put(&[file]).unwrap();
        assert_eq!(fs::read(dir.join("rows/x")).unwrap(), b"y");
        assert_eq!(fs::read_dir(dir.join("rows")).unwrap().count(), 1);
    }
}
