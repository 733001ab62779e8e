//! The catalogue: the numbers, names and sizes of a volume's files.
//!
//! One small file per node, replaced as a whole (temporary file, sync, rename)
//! whenever a record that changes names or sizes is applied.
//! `docs/reference/format.md`, "Catalogue".

use crate::bytes::{Reader, Writer, u32_at};
use crate::{FormatError, MAX_FILE_NAME, crc32c};

/// Most bytes of a catalogue.
pub const MAX_CATALOG: u64 = 1 << 30;

/// The version that is written. Version 1 did not have `begun`.
pub const CATALOG_VERSION: u16 = 2;

/// `MJCATLG1`.
pub const CATALOG_MAGIC: [u8; 8] = *b"MJCATLG1";

const WHAT: &str = "catalogue";

/// One file of the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogEntry {
    /// Its number, random so that a removed file's number does not come back.
    pub id: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Its path below the volume's directory.
    pub name: String,
}

/// All files of the volume.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Catalog {
    /// Identity of the volume.
    pub volume: u64,
    /// Last LSN whose change of names or sizes is included.
    pub lsn: u64,
    /// Epoch and last LSN of the last sync point of which any change may be included: it is
    /// applied in steps, and the catalogue is written between them too. Zeros: of none.
    pub begun: (u64, u64),
    /// The files, by ascending number.
    pub files: Vec<CatalogEntry>,
}

/// Whether `name` may name a file of a volume: a relative path of ordinary
/// components, not below `.mojim`.
pub fn valid_file_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_FILE_NAME
        && !name.contains('\0')
        && name
            .split('/')
            .all(|c| !c.is_empty() && c != "." && c != ".." && c.len() <= 255)
        && !name.starts_with(".mojim")
}

impl Catalog {
    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut w = Writer(&mut out);
        w.raw(&CATALOG_MAGIC)
            .u16(CATALOG_VERSION)
            .u16(0)
            .u32(u32::try_from(self.files.len()).expect("file numbers are 32 bits"))
            .u64(self.volume)
            .u64(self.lsn)
            .u64(self.begun.0)
            .u64(self.begun.1);
        for f in &self.files {
            w.u32(f.id).u64(f.size).text(&f.name);
        }
        let crc = crc32c(&out);
        Writer(&mut out).u32(crc);
        out
    }

    /// Reads and validates.
    pub fn decode(b: &[u8]) -> Result<Catalog, FormatError> {
        let mut r = Reader::new(WHAT, checked_body(b)?);
        let version = r.u16()?;
        if !(1..=CATALOG_VERSION).contains(&version) {
            return Err(FormatError::Version {
                what: WHAT,
                found: version,
                known: CATALOG_VERSION,
            });
        }
        let reserved = r.u16()?;
        if reserved != 0 {
            return Err(field("reserved", reserved as u64));
        }
        let n = r.u32()?;
        let (volume, lsn) = (r.u64()?, r.u64()?);
        let begun = match version {
            1 => (0, 0),
            _ => (r.u64()?, r.u64()?),
        };
        let mut files: Vec<CatalogEntry> = Vec::new();
        for _ in 0..n {
            let entry = entry(&mut r, files.last())?;
            files.push(entry);
        }
        if r.left() != 0 {
            return Err(field("length", b.len() as u64));
        }
        Ok(Catalog {
            volume,
            lsn,
            begun,
            files,
        })
    }
}

fn field(field: &'static str, value: u64) -> FormatError {
    FormatError::Field {
        what: WHAT,
        field,
        value,
    }
}

/// Checks the magic and the checksum, and returns the bytes between them.
fn checked_body(b: &[u8]) -> Result<&[u8], FormatError> {
    if b.len() < 36 {
        return Err(FormatError::Short {
            what: WHAT,
            have: b.len(),
            need: 36,
        });
    }
    if b[..8] != CATALOG_MAGIC {
        return Err(FormatError::Magic {
            what: WHAT,
            found: u32_at(b, 0),
        });
    }
    let (body, crc) = b.split_at(b.len() - 4);
    let (found, expected) = (u32_at(crc, 0), crc32c(body));
    if found != expected {
        return Err(FormatError::Checksum {
            what: WHAT,
            found,
            expected,
        });
    }
    Ok(&body[8..])
}

/// Reads the next file; its number must be above that of `last`.
fn entry(r: &mut Reader<'_>, last: Option<&CatalogEntry>) -> Result<CatalogEntry, FormatError> {
    let (id, size) = (r.u32()?, r.u64()?);
    let name = r.text("name", MAX_FILE_NAME)?;
    if !valid_file_name(name) {
        return Err(FormatError::Name {
            what: WHAT,
            field: "name",
        });
    }
    if last.is_some_and(|f| f.id >= id) || size > i64::MAX as u64 {
        return Err(field("file", id as u64));
    }
    Ok(CatalogEntry {
        id,
        size,
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_flips_are_found() {
        let c = Catalog {
            volume: 1,
            lsn: 9,
            begun: (2, 10),
            files: vec![
                CatalogEntry {
                    id: 1,
                    size: 4096,
                    name: "log".into(),
                },
                CatalogEntry {
                    id: 4,
                    size: 0,
                    name: "sub/dir/file".into(),
                },
            ],
        };
        let b = c.encode();
        assert_eq!(Catalog::decode(&b).unwrap(), c);
        for bit in 0..b.len() * 8 {
            let mut d = b.clone();
            d[bit / 8] ^= 1 << (bit % 8);
            assert!(Catalog::decode(&d).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_version_before_is_read() {
        let c = Catalog {
            volume: 1,
            lsn: 9,
            begun: (0, 0),
            files: Vec::new(),
        };
        let mut old = c.encode();
        old.truncate(32);
        old[8] = 1;
        let crc = crc32c(&old);
        old.extend_from_slice(&crc.to_le_bytes());
        assert_eq!(Catalog::decode(&old).unwrap(), c);
        old[8] = 3;
        assert!(Catalog::decode(&old).is_err());
    }

    #[test]
    fn names_that_leave_the_volume_are_refused() {
        for bad in [
            "", "/etc", "a//b", "../x", "a/../b", ".", "a\0b", ".mojim/x", "a/",
        ] {
            assert!(!valid_file_name(bad), "{bad:?}");
        }
        assert!(valid_file_name("a/b.c"));
    }
}
