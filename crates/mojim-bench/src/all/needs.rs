//! The needs of a measurement, and the words for each that is missing.

use std::env;
use std::fs::OpenOptions;
use std::process::{Command, Stdio};

use crate::all::machine::memory;

/// One thing that must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A file beside this program.
    Beside(&'static str),
    /// A program that is found by PATH, and its package.
    Program(&'static str, &'static str),
    /// A header that the C compiler finds, and its package.
    Header(&'static str, &'static str),
    /// A file system of a process: `/dev/fuse`.
    Fuse,
    /// Memory that is free, in GiB.
    Memory(u64),
}

impl Need {
    /// What is missing, if it is.
    pub(crate) fn missing(self) -> Option<String> {
        match self {
            Need::Beside(name) => {
                let there = env::current_exe().is_ok_and(|e| e.with_file_name(name).exists());
                (!there).then(|| format!("needs {name} beside this program"))
            }
            Need::Program(name, package) => {
                let path = env::var_os("PATH").unwrap_or_default();
                let mut dirs = env::split_paths(&path);
                let there = dirs.any(|d| d.join(name).is_file());
                (!there).then(|| format!("needs {name}: install the package {package}"))
            }
            Need::Header(name, package) => {
                (!has_header(name)).then(|| format!("needs {name}: install the package {package}"))
            }
            Need::Fuse => {
                let open = OpenOptions::new().read(true).write(true).open("/dev/fuse");
                let why = |e| format!("needs /dev/fuse, which cannot be opened: {e}");
                open.err().map(why)
            }
            Need::Memory(gib) => {
                let free = memory("MemAvailable").unwrap_or(0) >> 30;
                let text = || format!("needs {gib} GiB of free memory, and {free} GiB are there");
                (free < gib).then(text)
            }
        }
    }
}

fn has_header(name: &str) -> bool {
    let mut gcc = Command::new("gcc");
    gcc.args(["-E", "-include", name, "-x", "c", "/dev/null"]);
    gcc.stdin(Stdio::null()).stdout(Stdio::null());
    gcc.stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let text = Need::Program("no-such-program", "some-package").missing();
        let text = text.expect("it is not there");
        assert!(text.contains("no-such-program") && text.contains("some-package"));
        assert_eq!(Need::Program("sh", "dash").missing(), None);
        assert!(Need::Memory(1 << 30).missing().unwrap().contains("GiB"));
        assert_eq!(Need::Memory(0).missing(), None);
        assert!(Need::Beside("no.so").missing().unwrap().contains("no.so"));
        assert!(Need::Header("no-such.h", "p").missing().is_some());
    }
}
