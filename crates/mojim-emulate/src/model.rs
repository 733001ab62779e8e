//! Named non-volatile memories.
//!
//! Owns the figures of the sources: the slides' six configurations, and Intel's PMEP as the Mojim
//! paper used it (6.1).

use std::fmt;
use std::str::FromStr;

use mojim_linux::FlushMode;

/// A bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    /// That of this machine's own memory, divided by this number. One adds no delay.
    OfDram(u32),
    /// This many bytes in a second.
    PerSecond(u64),
}

/// How slow a non-volatile memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub name: &'static str,
    /// Nanoseconds of a read that no cache has.
    pub read_ns: u32,
    /// The bandwidth of reads.
    pub read: Bytes,
    /// The bandwidth of writes.
    pub write: Bytes,
    /// Nanoseconds of a write barrier.
    pub barrier_ns: u32,
    /// How stores are flushed.
    pub flush: FlushMode,
    /// Whether only modified lines are flushed (slides, "Selective Persistent Flushing").
    pub selective: bool,
}

/// Nanoseconds of a read of the slides' plain memory, PDRAM. Models with this latency add none.
pub(crate) const PLAIN_READ_NS: u32 = 150;

const PDRAM: Model = Model {
    name: "PDRAM",
    read_ns: PLAIN_READ_NS,
    read: Bytes::OfDram(1),
    write: Bytes::OfDram(1),
    barrier_ns: 0,
    flush: FlushMode::Clflush,
    selective: false,
};
const PM_LAT: Model = Model {
    name: "PM-Lat",
    read_ns: 300,
    ..PDRAM
};
const PM_BW: Model = Model {
    name: "PM-BW",
    read: Bytes::OfDram(8),
    write: Bytes::OfDram(8),
    ..PM_LAT
};
const NVMM_RAW: Model = Model {
    name: "NVMM-Raw",
    barrier_ns: 1000,
    ..PM_BW
};

impl Model {
    /// All of them: the slides' six ("Evaluation Configurations"), then PMEP.
    pub const ALL: [Model; 7] = [
        PDRAM,
        PM_LAT,
        PM_BW,
        NVMM_RAW,
        Model {
            name: "NVMM-WOF",
            flush: FlushMode::Wof,
            ..NVMM_RAW
        },
        Model {
            name: "NVMM-Opt",
            selective: true,
            ..NVMM_RAW
        },
        Model {
            name: "PMEP",
            read: Bytes::PerSecond(5_000_000_000),
            write: Bytes::PerSecond(1_600_000_000),
            ..NVMM_RAW
        },
    ];

    /// The model of this name; capital letters do not matter.
    pub fn named(name: &str) -> Option<Model> {
        let mut all = Model::ALL.into_iter();
        all.find(|m| m.name.eq_ignore_ascii_case(name))
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(name: &str) -> Result<Model, String> {
        Model::named(name).ok_or_else(|| {
            let names = Model::ALL.map(|m| m.name).join(", ");
            format!("no memory has the name \"{name}\"; the names are {names}")
        })
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bytes::OfDram(1) => f.write_str("all of DRAM's"),
            Bytes::OfDram(n) => write!(f, "1/{n} of DRAM's"),
            Bytes::PerSecond(n) => write!(f, "{:.1} GB/s", *n as f64 / 1e9),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: read latency {} ns, read bandwidth {}, write bandwidth {}, write barrier {} ns, \
             flush by {}{}",
            self.name,
            self.read_ns,
            self.read,
            self.write,
            self.barrier_ns,
            self.flush.name(),
            if self.selective {
                ", modified lines only"
            } else {
                ""
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the slides, row by row.
    #[test]
    fn the_six_configurations_are_those_of_the_slides() {
        let rows = Model::ALL.map(|m| {
            assert_eq!(m.read == Bytes::OfDram(1), m.write == Bytes::OfDram(1));
            (
                m.name,
                m.read_ns,
                m.write,
                m.barrier_ns,
                m.flush.name(),
                m.selective,
            )
        });
        let (one, eighth) = (Bytes::OfDram(1), Bytes::OfDram(8));
        let pmep = Bytes::PerSecond(1_600_000_000);
        assert_eq!(
            rows,
            [
                ("PDRAM", 150, one, 0, "clflush", false),
                ("PM-Lat", 300, one, 0, "clflush", false),
                ("PM-BW", 300, eighth, 0, "clflush", false),
                ("NVMM-Raw", 300, eighth, 1000, "clflush", false),
                ("NVMM-WOF", 300, eighth, 1000, "WOF", false),
                ("NVMM-Opt", 300, eighth, 1000, "clflush", true),
                ("PMEP", 300, pmep, 1000, "clflush", false),
            ]
        );
    }

    #[test]
    fn a_name_is_found_and_an_unknown_one_is_told_the_others() {
        assert_eq!("nvmm-raw".parse(), Ok(NVMM_RAW));
        let e = "NVMM".parse::<Model>().unwrap_err();
        assert!(e.contains("\"NVMM\"") && e.contains("NVMM-Opt"), "{e}");
        let shown = Model::named("PMEP").unwrap().to_string();
        assert!(
            shown.contains("5.0 GB/s") && shown.contains("1.6 GB/s"),
            "{shown}"
        );
    }
}
