//! The pad: fills the end of a log that the next record does not fit into.
//!
//! A pad exists only in logs, never on a wire. It names the LSN of the record that
//! follows at the log's start, which distinguishes it from a pad left over from an
//! earlier lap. `docs/reference/format.md`, "Log".

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::{FORMAT_VERSION, FormatError, crc32c};

/// `MJPD`.
pub const PAD_MAGIC: u32 = u32::from_le_bytes(*b"MJPD");
/// Bytes of a pad's own fields; the rest up to the log's end has no meaning.
pub const PAD_LEN: usize = 32;

/// A pad's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pad {
    /// Identity of the volume.
    pub volume: u64,
    /// LSN of the record that follows.
    pub lsn: u64,
}

impl Pad {
    /// Writes the pad at the start of `b`.
    pub fn encode(&self, b: &mut [u8]) {
        let b = &mut b[..PAD_LEN];
        b[0..4].copy_from_slice(&PAD_MAGIC.to_le_bytes());
        b[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        b[6..8].fill(0);
        b[8..16].copy_from_slice(&self.volume.to_le_bytes());
        b[16..24].copy_from_slice(&self.lsn.to_le_bytes());
        b[24..28].fill(0);
        let crc = crc32c(&b[..28]);
        b[28..32].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads and validates a pad.
    pub fn decode(b: &[u8]) -> Result<Pad, FormatError> {
        const WHAT: &str = "pad";
        if b.len() < PAD_LEN {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: PAD_LEN,
            });
        }
        let magic = u32_at(b, 0);
        if magic != PAD_MAGIC {
            return Err(FormatError::Magic {
                what: WHAT,
                found: magic,
            });
        }
        let (found, expected) = (u32_at(b, 28), crc32c(&b[..28]));
        if found != expected {
            return Err(FormatError::Checksum {
                what: WHAT,
                found,
                expected,
            });
        }
        if u16_at(b, 4) != FORMAT_VERSION {
            return Err(FormatError::Version {
                what: WHAT,
                found: u16_at(b, 4),
                known: FORMAT_VERSION,
            });
        }
        let reserved = u16_at(b, 6) as u64 | u32_at(b, 24) as u64;
        if reserved != 0 {
            return Err(FormatError::Field {
                what: WHAT,
                field: "reserved",
                value: reserved,
            });
        }
        Ok(Pad {
            volume: u64_at(b, 8),
            lsn: u64_at(b, 16),
        })
    }
}
