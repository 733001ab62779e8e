//! The plan of `mojim bench all`: measurements, and their options by the length of the run.
//!
//! A measurement is one or several parts. Each part is a run of this program with some words. In
//! the standard length each figure comes from 200 operations or from 3 seconds, at least.

use std::time::Duration;

use crate::all::adapters::{self, Adapter};
use crate::all::needs::Need;

/// How long it all may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    /// As little as there is, for tests.
    Tiny,
    /// Under three minutes.
    Quick,
    /// Under forty-five minutes.
    Standard,
    /// Hours.
    Paper,
}

impl Length {
    /// Its name in a report.
    pub(crate) fn name(self) -> &'static str {
        ["tiny", "quick", "standard", "paper"][self as usize]
    }

    /// The longest time that one measurement may take.
    pub(crate) fn limit(self) -> Duration {
        let minutes = [3, 3, 30, 360][self as usize];
        Duration::from_secs(minutes * 60)
    }
}

/// The options of a part which leave it out.
const NONE: &str = "none";

/// One run of this program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// What tells its rows from those of the other parts.
    pub(crate) label: &'static str,
    words: &'static str,
    /// By the length of the run.
    options: [&'static str; 4],
}

const fn part(label: &'static str, words: &'static str, options: [&'static str; 4]) -> Part {
    Part {
        label,
        words,
        options,
    }
}

impl Part {
    /// The words of the run, if it is one of this length.
    pub(crate) fn words(&self, length: Length) -> Option<Vec<String>> {
        let options = self.options[length as usize];
        let all = self
            .words
            .split_whitespace()
            .chain(options.split_whitespace());
        (options != NONE).then(|| all.map(str::to_owned).collect())
    }
}

/// One measurement.
pub(crate) struct Planned {
    /// As `--only` and `--skip` call it.
    pub(crate) name: &'static str,
    pub(crate) needs: &'static [Need],
    pub(crate) adapter: Adapter,
    pub(crate) parts: &'static [Part],
}

const fn planned(
    name: &'static str,
    needs: &'static [Need],
    adapter: Adapter,
    parts: &'static [Part],
) -> Planned {
    Planned {
        name,
        needs,
        adapter,
        parts,
    }
}

const MOJIM: Need = Need::Beside("mojim");
const LIBMOJIM: Need = Need::Beside("libmojim.so");
const LIBMOJIM_ITM: Need = Need::Beside("libmojim_itm.so");
const GCC: Need = Need::Program("gcc", "gcc");

const CONNECTIONS: [&str; 4] = [
    "--counts 1 --seconds 0.02",
    "--counts 1,4 --seconds 0.3",
    "--counts 1,2,4,8,12 --seconds 3",
    "--counts 1,2,4,6,8,10,12 --seconds 10 --rounds 9",
];
const TX: [&str; 4] = [
    "--rounds 1 --ops 2",
    "--rounds 5 --ops 10",
    "--rounds 40 --ops 50",
    "--rounds 400 --ops 100",
];

/// All of them, in the order in which they run.
pub(crate) const PLAN: [Planned; 16] = [
    planned(
        "nvmm",
        &[MOJIM],
        adapters::by_bytes,
        &[part(
            "",
            "nvmm",
            [
                "--rounds 1 --ops 2 --sizes 64,4096",
                "--memory NVMM-Raw,PDRAM --rounds 5 --ops 20",
                "--memory NVMM-Raw,PDRAM,PM-Lat,PM-BW,NVMM-WOF,NVMM-Opt,PMEP --rounds 80",
                "--memory NVMM-Raw,PDRAM,PM-Lat,PM-BW,NVMM-WOF,NVMM-Opt,PMEP --rounds 200",
            ],
        )],
    ),
    planned(
        "nvmm-strict",
        &[MOJIM],
        adapters::by_bytes,
        &[part(
            "strict",
            "nvmm --strict",
            [
                "--rounds 1 --ops 2 --sizes 4096",
                "--rounds 10 --ops 20",
                "--rounds 80",
                "--rounds 200",
            ],
        )],
    ),
    planned(
        "sync",
        &[MOJIM],
        adapters::by_bytes,
        &[part(
            "",
            "sync",
            [
                "--rounds 1 --ops 2 --sizes 64",
                "--rounds 5 --ops 10",
                "--rounds 40",
                "--rounds 200",
            ],
        )],
    ),
    planned(
        "threads",
        &[MOJIM],
        adapters::by_threads,
        &[part(
            "",
            "threads",
            [
                "--counts 1 --seconds 0.02 --cases raw-log,unreplicated",
                "--counts 1,4 --seconds 0.3",
                "--seconds 3",
                "--seconds 10 --rounds 9",
            ],
        )],
    ),
    planned(
        "connections",
        &[MOJIM],
        adapters::by_threads,
        &[
            part("1 connection", CONNECTIONS_1, CONNECTIONS),
            part("4 connections", CONNECTIONS_4, CONNECTIONS),
        ],
    ),
    planned(
        "fams",
        &[],
        adapters::fams,
        &[part(
            "",
            "fams",
            [
                "--pages 1,4 --rounds 1 --block 5 --think 0",
                "--pages 1,16,256 --rounds 1 --block 200",
                "",
                "--rounds 9 --block 10000",
            ],
        )],
    ),
    planned(
        "tiers",
        &[MOJIM],
        adapters::tiers,
        &[part(
            "",
            "tiers",
            [
                "--rounds 0 --sync-rounds 1",
                "--size 134217728 --rounds 1 --sync-rounds 6",
                "",
                "--size 5368709120 --rounds 9 --sync-rounds 400",
            ],
        )],
    ),
    planned(
        "failover",
        &[MOJIM],
        adapters::failover,
        &[part(
            "",
            "failover",
            [
                "--size 4194304 --rounds 1",
                "--size 67108864 --rounds 1",
                "--rounds 5",
                "--rounds 30",
            ],
        )],
    ),
    planned(
        "heap",
        &[LIBMOJIM, MOJIM],
        adapters::heap,
        &[part(
            "",
            "heap",
            [
                "--rounds 1 --ops 10 --open 0",
                "--rounds 3 --ops 100000 --open 64",
                "",
                "--rounds 101",
            ],
        )],
    ),
    planned(
        "tx",
        &[MOJIM],
        adapters::tx,
        &[
            part("", "tx --place memory", TX),
            part("", "tx --place shm", after_tiny(TX)),
            part("", "tx --place tcp", after_tiny(TX)),
            part("", "tx --place disk", after_tiny(TX)),
        ],
    ),
    planned(
        "captured",
        &[GCC, MOJIM, LIBMOJIM, LIBMOJIM_ITM],
        adapters::tx,
        &[part("", "tx --case captured", TX)],
    ),
    planned(
        "table",
        TABLE_NEEDS,
        adapters::tx,
        &[
            part("", "tx --case table --place shm", TX),
            part("", "tx --case table --place tcp", after_tiny(TX)),
            part("", "tx --case table --place disk", after_tiny(TX)),
        ],
    ),
    planned(
        "log",
        &[MOJIM],
        adapters::by_bytes,
        &[part(
            "",
            "log",
            [
                "--rounds 1 --ops 1 --sizes 64",
                "--rounds 5 --ops 5 --sizes 64,512",
                "",
                "--rounds 200",
            ],
        )],
    ),
    planned(
        "programs",
        PROGRAMS_NEEDS,
        adapters::programs,
        &[part(
            "",
            "programs",
            [
                "--only read-4k --rounds 1 --seconds 0.01",
                "--only sync --rounds 1 --seconds 0.3",
                "",
                "--rounds 9 --seconds 10",
            ],
        )],
    ),
    planned(
        "large",
        &[Need::Memory(10)],
        adapters::large,
        &[part("", "large", [NONE, NONE, "", "--rounds 30"])],
    ),
    planned(
        "tls",
        &[MOJIM],
        adapters::by_bytes,
        &[part(
            "",
            "tls",
            [
                "--rounds 1 --ops 2",
                "--rounds 5 --ops 20",
                "",
                "--rounds 400",
            ],
        )],
    ),
];

const CONNECTIONS_1: &str =
    "threads --bytes 4096 --cases unreplicated,async,sync-tcp,sync-shm --connections 1";
const CONNECTIONS_4: &str =
    "threads --bytes 4096 --cases unreplicated,async,sync-tcp,sync-shm --connections 4";
const TABLE_NEEDS: &[Need] = &[
    GCC,
    MOJIM,
    LIBMOJIM,
    LIBMOJIM_ITM,
    Need::Header("db.h", "libdb-dev"),
];
const PROGRAMS_NEEDS: &[Need] = &[
    MOJIM,
    Need::Fuse,
    Need::Program("cc", "gcc"),
    Need::Program("python3", "python3"),
];

/// The same, but for the tiniest length.
const fn after_tiny(mut options: [&'static str; 4]) -> [&'static str; 4] {
    options[0] = NONE;
    options
}

/// The names of all measurements.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PLAN.iter().map(|p| p.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_there_once_and_each_length_measures() {
        let all: Vec<_> = names().collect();
        let mut once = all.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), all.len());
        for p in &PLAN {
            for length in [Length::Standard, Length::Paper] {
                let words = p.parts.iter().map(|part| part.words(length));
                assert!(words.into_iter().all(|w| w.is_some()), "{}", p.name);
            }
        }
        let large = PLAN.iter().find(|p| p.name == "large").unwrap();
        assert_eq!(large.parts[0].words(Length::Quick), None);
    }
}
