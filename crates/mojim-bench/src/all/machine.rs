//! The machine that the figures come from: the processor, the memory, the kernel and the file system.
//!
//! Owns the reading of `/proc` and `/sys`. Nothing here fails: an unknown thing is "unknown".

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    /// That of the directory which is measured.
    pub(crate) file_system: String,
    pub(crate) clock_source: String,
    #[serde(rename = "virtual")]
    pub(crate) is_virtual: bool,
    /// Load averages of one minute.
    pub(crate) load_begin: f64,
    pub(crate) load_end: f64,
}

impl Machine {
    /// This one, as it is now. The directory `dir` is to be measured.
    pub(crate) fn here(dir: &Path) -> Machine {
        let cpus = read("/proc/cpuinfo");
        let load = load();
        Machine {
            cpu: field(&cpus, "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory("MemTotal").unwrap_or(0),
            kernel: line(&read("/proc/sys/kernel/osrelease")),
            file_system: file_system(dir, &read("/proc/self/mountinfo")),
            clock_source: line(&read(CLOCK)),
            is_virtual: field(&cpus, "flags").is_some_and(|f| has_word(&f, "hypervisor")),
            load_begin: load,
            load_end: load,
        }
    }
}

const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// What tells this host from others, also after it has started again.
pub(crate) fn host() -> Option<String> {
    let text = read("/etc/machine-id");
    Some(text.trim().to_owned()).filter(|t| !t.is_empty())
}

/// The load average of the last minute.
pub(crate) fn load() -> f64 {
    let text = read("/proc/loadavg");
    let first = text.split_whitespace().next();
    first.and_then(|n| n.parse().ok()).unwrap_or(0.0)
}

/// A figure of `/proc/meminfo`, in bytes.
pub(crate) fn memory(name: &str) -> Option<u64> {
    let text = field(&read("/proc/meminfo"), name)?;
    let kib: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn line(text: &str) -> String {
    match text.trim() {
        "" => unknown(),
        t => t.to_owned(),
    }
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|w| w == word)
}

/// The value of the first line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let pair = |l: &str| {
        let (key, value) = l.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    };
    text.lines().find_map(pair)
}

/// The type of the file system on which `dir` lies, by the mounts in `mountinfo`.
fn file_system(dir: &Path, mountinfo: &str) -> String {
    let Ok(dir) = fs::canonicalize(dir) else {
        return unknown();
    };
    let mount = |l: &str| {
        let (before, after) = l.split_once(" - ")?;
        let at = before.split(' ').nth(4)?.to_owned();
        let kind = after.split(' ').next()?.to_owned();
        dir.starts_with(&at).then_some((at.len(), kind))
    };
    // Of mounts over one another the last one is seen.
    let found = mountinfo.lines().filter_map(mount).max_by_key(|m| m.0);
    found.map_or_else(unknown, |m| m.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_mount_says_which_file_system_it_is() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n\
                      2 1 0:2 / /proc rw shared:1 - proc proc rw\n\
                      3 1 0:3 / /proc rw - tmpfs over rw\n";
        assert_eq!(file_system(Path::new("/"), mounts), "ext4");
        assert_eq!(file_system(Path::new("/proc/self"), mounts), "tmpfs");
        let first = mounts.lines().take(2).collect::<Vec<_>>().join("\n");
        assert_eq!(file_system(Path::new("/proc"), &first), "proc");
        assert_eq!(file_system(Path::new("/is/not/here"), mounts), "unknown");
    }

    #[test]
    fn this_machine_is_described() {
        let m = Machine::here(Path::new("/"));
        assert!(m.cores > 0 && m.memory_bytes > 0, "{m:?}");
        assert_ne!(m.kernel, "unknown");
        let json = serde_json::to_value(&m).unwrap();
        assert!(json["virtual"].is_boolean());
    }
}
