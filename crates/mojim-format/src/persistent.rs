//! Heads of the files that hold persistent variables, regions made at run time, and logs.
//!
//! Owns their bytes (`docs/reference/format.md`, "Persistent variables", "Persistent regions" and
//! "Append-only logs"). A head of zeros belongs to a file whose first state was never committed.

use crate::bytes::{Reader, Writer, u32_at};
use crate::{FormatError, crc32c};

/// `MJVARS01`.
pub const VARIABLES_MAGIC: [u8; 8] = *b"MJVARS01";
/// `MJREGN01`.
pub const REGION_MAGIC: [u8; 8] = *b"MJREGN01";
/// Bytes of a head are a multiple of this.
pub const HEAD_UNIT: usize = 64 << 10;
/// Bytes of a region's head.
pub const REGION_HEAD: usize = HEAD_UNIT;
/// Bytes of a build id that are kept.
pub const BUILD_ID: usize = 32;
/// Longest name of a variable, in bytes.
pub const MAX_VARIABLE_NAME: usize = 4096;
/// Bytes of a variables' head before its entries.
pub const VARIABLES_FIXED: usize = 72;
/// Bytes of a region's head up to its checksum.
pub const REGION_FIXED: usize = 40;

/// `MJALOG01`, the first word of an append-only log.
pub const LOG_MAGIC: u64 = u64::from_le_bytes(*b"MJALOG01");
/// Words of a log's header that never change: magic, encoding, words of the ring, salt, checksum.
pub const LOG_FIXED_WORDS: usize = 5;
/// The word with the position of the oldest record.
pub const LOG_HEAD_WORD: usize = 8;
/// The word with the position behind the last record, for the encoding with two fences.
pub const LOG_TAIL_WORD: usize = 16;
/// The word that counts the openings of the log, for the encoding with checksums.
pub const LOG_OPENING_WORD: usize = 24;
/// The first word of a log's ring.
pub const LOG_RING_WORD: usize = 64;

/// One variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// First byte, from the section's beginning.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// The name, as the linker knows it.
    pub name: String,
}

/// What the head of a file of variables says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Variables {
    /// Bytes of the section.
    pub size: u64,
    /// The build id of the program that wrote the head; zeros if it had none.
    pub build_id: [u8; BUILD_ID],
    /// By offset and name; empty if the program had no names.
    pub list: Vec<Variable>,
}

fn check(what: &'static str, b: &[u8], magic: [u8; 8]) -> Result<(), FormatError> {
    match b.get(..8) {
        Some(found) if *found == magic => Ok(()),
        Some(found) => Err(FormatError::Magic {
            what,
            found: u32_at(found, 0),
        }),
        None => Err(FormatError::Short {
            what,
            have: b.len(),
            need: 8,
        }),
    }
}

impl Variables {
    /// The head's bytes, without the zeros behind them.
    pub fn encode(&self) -> Vec<u8> {
        let mut entries = Vec::new();
        let mut w = Writer(&mut entries);
        for v in &self.list {
            w.u64(v.offset);
            w.u64(v.size);
            w.text(&v.name);
        }
        let mut b = Vec::with_capacity(VARIABLES_FIXED + entries.len() + 4);
        b.extend_from_slice(&VARIABLES_MAGIC);
        let whole = VARIABLES_FIXED + entries.len() + 4;
        let mut w = Writer(&mut b);
        w.u64(whole.next_multiple_of(HEAD_UNIT) as u64);
        w.u64(self.size);
        w.u64(self.list.len() as u64);
        w.u64(entries.len() as u64);
        b.extend_from_slice(&self.build_id);
        b.extend_from_slice(&entries);
        b.extend_from_slice(&crc32c(&b).to_le_bytes());
        b
    }

    /// Bytes of the head in its file: the variables begin behind it.
    pub fn head_len(&self) -> usize {
        (self.encode().len()).next_multiple_of(HEAD_UNIT)
    }

    /// Reads a head from a file's beginning.
    pub fn decode(b: &[u8]) -> Result<Variables, FormatError> {
        const WHAT: &str = "head of persistent variables";
        check(WHAT, b, VARIABLES_MAGIC)?;
        let mut r = Reader::new(WHAT, b);
        r.take(8)?;
        let (head, size, count, bytes) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
        let build_id = r.take(BUILD_ID)?.try_into().expect("as many");
        let whole = usize::try_from(bytes)
            .ok()
            .and_then(|n| n.checked_add(VARIABLES_FIXED + 4))
            .filter(|n| *n <= b.len());
        let Some(whole) = whole else {
            return Err(FormatError::Field {
                what: WHAT,
                field: "bytes of the entries",
                value: bytes,
            });
        };
        let at = whole - 4;
        let (found, expected) = (u32_at(b, at), crc32c(&b[..at]));
        if found != expected {
            return Err(FormatError::Checksum {
                what: WHAT,
                found,
                expected,
            });
        }
        if head != whole.next_multiple_of(HEAD_UNIT) as u64 {
            return Err(FormatError::Field {
                what: WHAT,
                field: "length",
                value: head,
            });
        }
        let mut r = Reader::new(WHAT, &b[VARIABLES_FIXED..at]);
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(Variable {
                offset: r.u64()?,
                size: r.u64()?,
                name: r.text("name", MAX_VARIABLE_NAME)?.to_owned(),
            });
        }
        if r.left() > 0 {
            return Err(FormatError::Field {
                what: WHAT,
                field: "number of variables",
                value: count,
            });
        }
        Ok(Variables {
            size,
            build_id,
            list,
        })
    }
}

/// The head of a region that was made at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionHead {
    /// Where its first byte lies in every process.
    pub address: u64,
    /// Bytes behind the head.
    pub size: u64,
}

impl RegionHead {
    /// The head's bytes, without the zeros behind them.
    pub fn encode(&self) -> Vec<u8> {
        let mut b = REGION_MAGIC.to_vec();
        let mut w = Writer(&mut b);
        w.u64(REGION_HEAD as u64);
        w.u64(self.address);
        w.u64(self.size);
        w.u32(0);
        b.extend_from_slice(&crc32c(&b).to_le_bytes());
        b
    }

    /// Reads a head from a file's beginning.
    pub fn decode(b: &[u8]) -> Result<RegionHead, FormatError> {
        const WHAT: &str = "head of a persistent region";
        check(WHAT, b, REGION_MAGIC)?;
        let mut r = Reader::new(WHAT, b);
        r.take(8)?;
        let (head, address, size) = (r.u64()?, r.u64()?, r.u64()?);
        let reserved = r.u32()?;
        let (found, expected) = (r.u32()?, crc32c(&b[..REGION_FIXED - 4]));
        if found != expected {
            return Err(FormatError::Checksum {
                what: WHAT,
                found,
                expected,
            });
        }
        let wrong = [
            ("length", head, REGION_HEAD as u64),
            ("reserved", reserved.into(), 0),
        ];
        match wrong.into_iter().find(|(_, is, must)| is != must) {
            Some((field, value, _)) => Err(FormatError::Field {
                what: WHAT,
                field,
                value,
            }),
            None => Ok(RegionHead { address, size }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            size in any::<u64>(),
            list in prop::collection::vec((any::<u64>(), any::<u64>(), "[a-z_]{1,40}"), 0..50),
        ) {
            let list = list.into_iter().map(|(offset, size, name)| Variable { offset, size, name });
            let v = Variables { size, build_id: [7; BUILD_ID], list: list.collect() };
            let mut b = v.encode();
            b.resize(v.head_len() + 100, 0);
            prop_assert_eq!(Variables::decode(&b).unwrap(), v);
        }

        /// Nothing panics; a byte that changed is found.
        #[test]
        fn what_is_damaged_is_refused(at in 0usize..220, to in any::<u8>(), cut in 0usize..300) {
            let list = vec![Variable { offset: 0, size: 8, name: "n".repeat(100) }];
            let v = Variables { size: 8, build_id: [1; BUILD_ID], list };
            let mut b = v.encode();
            let _ = Variables::decode(&b[..cut.min(b.len())]);
            if let Some(byte) = b.get_mut(at) && *byte != to {
                *byte = to;
                prop_assert!(Variables::decode(&b).is_err());
            }
            let mut b = RegionHead { address: 1 << 40, size: 9 }.encode();
            let _ = RegionHead::decode(&b[..cut.min(b.len())]);
            if let Some(byte) = b.get_mut(at) && *byte != to {
                *byte = to;
                prop_assert!(RegionHead::decode(&b).is_err());
            }
        }
    }
}
