//! The origin of rows: the machine and the programs that they were measured with.
//!
//! Invariant: rows of another machine, or of programs that were built again, are not taken.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use mojim_format::crc64;
use serde::{Deserialize, Serialize};

use crate::all::machine::{Machine, host};

/// What is measured, beside this program. Each one may be missing.
const BESIDE: [&str; 3] = ["mojim", "libmojim.so", "libmojim_itm.so"];
/// What is said of a program whose figures are too slow.
pub(crate) const DEBUG: &str = "debug build";

/// Where rows come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Origin {
    program: String,
    /// Checksums of programs and libraries, by their names.
    files: BTreeMap<String, String>,
    cpu: String,
    cores: usize,
    kernel: String,
    file_system: String,
    /// What tells this host from others, if it has that.
    host: Option<String>,
}

impl Origin {
    /// That of rows which this program measures here.
    pub(crate) fn here(machine: &Machine) -> io::Result<Origin> {
        let this = std::env::current_exe()?;
        let mut files = BTreeMap::from([("mojim-bench".to_owned(), sum(&fs::read(&this)?))]);
        for name in BESIDE {
            match fs::read(this.with_file_name(name)) {
                Ok(bytes) => files.insert(name.to_owned(), sum(&bytes)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(e) => return Err(e),
            };
        }
        Ok(Origin {
            program: program(),
            files,
            cpu: machine.cpu.clone(),
            cores: machine.cores,
            kernel: machine.kernel.clone(),
            file_system: machine.file_system.clone(),
            // The name itself is not to be told.
            host: host().map(|h| sum(format!("mojim-bench {h}").as_bytes())),
        })
    }
}

/// The version of this program, and whether it was built for measurements.
pub(crate) fn program() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match cfg!(debug_assertions) {
        true => format!("{version}, {DEBUG}"),
        false => version.to_owned(),
    }
}

fn sum(bytes: &[u8]) -> String {
    format!("{:016x}", crc64(&[bytes]))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::Path;

    pub(crate) fn here() -> Origin {
        Origin::here(&Machine::here(Path::new("/"))).unwrap()
    }

    /// Origins that differ from this one in one thing each.
    pub(crate) fn others(of: &Origin) -> Vec<Origin> {
        let changes: [fn(&mut Origin); 7] = [
            |o| o.program.push('x'),
            |o| o.cpu.push('x'),
            |o| o.cores += 1,
            |o| o.kernel.push('x'),
            |o| o.file_system.push('x'),
            |o| o.host = Some("another".to_owned()),
            |o| {
                o.files.insert("mojim-bench".to_owned(), sum(b"another"));
            },
        ];
        let changed = |change: fn(&mut Origin)| {
            let mut o = of.clone();
            change(&mut o);
            o
        };
        changes.into_iter().map(changed).collect()
    }

    #[test]
    fn the_origin_is_the_same_each_time() {
        assert_eq!(here(), here());
    }
}
