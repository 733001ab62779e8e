//! The medium of the machine's file system, and which faults a pulled plug shows there.
//!
//! Owns the names of the media, which the host and the guest exchange.

use crate::machine::Fault;
use crate::subject::Kind;

/// What the file system is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// A virtio disk with a cache that must be told to write.
    Disk,
    /// An NVDIMM mapped by DAX; Mojim's log on it has the medium `pmem`.
    Nvdimm,
}

impl Medium {
    /// Both media.
    pub const ALL: [Medium; 2] = [Medium::Disk, Medium::Nvdimm];

    pub(super) fn name(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "nvdimm",
        }
    }

    /// The medium of this name.
    pub fn of(name: &str) -> std::result::Result<Medium, String> {
        let found = Medium::ALL.into_iter().find(|m| m.name() == name);
        found.ok_or("disk or nvdimm".into())
    }

    /// The medium of Mojim's log.
    pub(super) fn log(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "pmem",
        }
    }

    /// Whether a pulled plug shows what is broken in `kind`: on an NVDIMM each write to a
    /// file is durable at once, synced or not.
    pub(super) fn shows(self, kind: Kind) -> bool {
        let sync = matches!(
            kind,
            Kind::Mojim(Some(Fault::NoDataFlush | Fault::NoSuperblockFlush))
        );
        self == Medium::Disk || !sync
    }
}
