//! The bytes of Mojim: records, frames, log pads, superblocks, catalogues.
//!
//! Owns every offset in these. A log's control page and the notes of renames and removals are
//! elsewhere, in `mojim-store`. So is the voters' log, in `mojim-views`. There is no I/O, no
//! clock and no thread here. Encoding a record allocates nothing. `docs/reference/format.md`
//! describes the same bytes, and a test parses its worked example with this code.
//! All integers are little-endian.
//!
//! Decoding never trusts its input: every length is checked before it is used,
//! and nothing is allocated in proportion to a number that was merely read.
//!
//! # Tour
//!
//! - `record.rs`: records. `piece.rs` of `mojim-replica` encodes a sync point as one.
//! - `pad.rs`: the end of a log
//! - `frame.rs`: the kinds of frames, and their limits
//! - `message.rs`: the bodies of frames, and the codes of a refusal
//! - `superblock.rs`, `catalog.rs`: a copy's state, and its files
//! - `heap.rs`, `persistent.rs`: heaps, and heads of files for variables, regions and logs
//! - `certificate.rs`: the name in a certificate
//! - `shown.rs`: text of others, fit to be printed
//! - `bytes.rs`: cursors over bytes
//!
//! The longest names and the most lanes are constants here. `mojim-config` has the same limits for
//! keys, by itself. `docs/reference/protocol.md` says which code handles a frame. A change of the
//! bytes changes `FORMAT_VERSION`, `WIRE_VERSION` or `SUPERBLOCK_VERSION`.

pub mod bytes;
pub mod catalog;
pub mod certificate;
pub mod frame;
pub mod heap;
pub mod message;
pub mod pad;
pub mod persistent;
pub mod record;
pub mod shown;
pub mod superblock;

pub use catalog::{Catalog, CatalogEntry};
pub use frame::{FRAME_LEN, Frame, FrameKind, Level};
pub use record::{
    OP_LEN, Op, OpKind, RECORD_HEADER_LEN, RECORD_OVERHEAD, RECORD_TRAILER_LEN, RecordHeader,
    RecordView, RecordWriter,
};
pub use superblock::{EpochStart, SUPERBLOCK_LEN, State, Superblock, View};

/// Version of the formats in this crate that have none of their own (frames have
/// [`frame::WIRE_VERSION`], superblocks theirs). A reader refuses any other.
pub const FORMAT_VERSION: u16 = 1;

/// Longest name of a cluster, node or volume, in bytes.
pub const MAX_NAME: usize = 64;

/// Longest name of a file within its volume, in bytes (a path, `/` between parts).
pub const MAX_FILE_NAME: usize = 1024;

/// Most connections, and so logs, of a volume.
pub const MAX_LANES: usize = 64;

/// CRC-32C (Castagnoli), the checksum of every format here.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC-64/NVME of parts in a row: where a record is found by its checksum alone.
pub fn crc64(parts: &[&[u8]]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// Why bytes were not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Fewer bytes than the structure needs.
    #[error("{what}: {have} bytes, at least {need} needed")]
    Short {
        /// The structure.
        what: &'static str,
        /// Bytes present.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// The structure does not begin with its magic number.
    #[error("{what}: foreign bytes (magic {found:#010x})")]
    Magic {
        /// The structure.
        what: &'static str,
        /// The number found in place of the magic.
        found: u32,
    },
    /// Written by another version of the format.
    #[error("{what}: format version {found}, this program knows {known}")]
    Version {
        /// The structure.
        what: &'static str,
        /// The version found.
        found: u16,
        /// The newest that this program reads.
        known: u16,
    },
    /// The checksum does not match: torn or damaged.
    #[error("{what}: checksum {found:#010x}, {expected:#010x} expected: torn or damaged")]
    Checksum {
        /// The structure.
        what: &'static str,
        /// The stored checksum.
        found: u32,
        /// The computed checksum.
        expected: u32,
    },
    /// A field holds a value that it cannot have.
    #[error("{what}: field {field} holds {value}")]
    Field {
        /// The structure.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Its parts contradict each other.
    #[error("{what}: {why}")]
    Wrong {
        /// The structure.
        what: &'static str,
        /// How.
        why: &'static str,
    },
    /// A text is not UTF-8 or breaks the rules of a name.
    #[error("{what}: field {field} is not a valid name")]
    Name {
        /// The structure.
        what: &'static str,
        /// The field.
        field: &'static str,
    },
}
