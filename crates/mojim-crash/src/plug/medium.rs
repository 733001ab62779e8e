//! What the machine's file system lies on, and what a pulled plug shows there.
//!
//! Owns the names of the media, which the host and the guest tell each other.

use crate::machine::Fault;
use crate::subject::Kind;

/// What the file system lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// virtio, with a cache that must be told to write.
    Disk,
    /// Mapped by DAX; Mojim's log on it has the medium `pmem`.
    Nvdimm,
}

impl Medium {
    /// Both.
    pub const ALL: [Medium; 2] = [Medium::Disk, Medium::Nvdimm];

    pub(super) fn name(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "nvdimm",
        }
    }

    /// By its name.
    pub fn of(name: &str) -> std::result::Result<Medium, String> {
        let found = Medium::ALL.into_iter().find(|m| m.name() == name);
        found.ok_or("disk or nvdimm".into())
    }

    /// What Mojim's log is kept in.
    pub(super) fn log(self) -> &'static str {
        match self {
            Medium::Disk => "disk",
            Medium::Nvdimm => "pmem",
        }
    }

    /// Whether a plug that is pulled shows what is broken in `kind`: on an
    /// NVDIMM each write to a file is there at once, synced or not.
    pub(super) fn shows(self, kind: Kind) -> bool {
        let sync = matches!(
            kind,
            Kind::Mojim(Some(Fault::NoDataFlush | Fault::NoSuperblockFlush))
        );
        self == Medium::Disk || !sync
    }
}
