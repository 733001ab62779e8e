//! Files with a head: how one is told from others, and from one that is half made.
//!
//! Owns the first look at a file. A file whose bytes are all zero was made by a process that
//! died before it committed the first state: nothing is lost if it is made anew, of whatever size
//! it was to be.

use std::path::PathBuf;

use mojim::{Error, MapFlags, Result, Volume, unmap};
use mojim_format::FormatError;

/// What there is of a file.
pub enum FileHead<T> {
    /// None, or one that is half made.
    New,
    /// Its head.
    Old(T),
}

/// Looks at a file before it is mapped.
pub fn look<T>(
    volume: &Volume,
    file: &str,
    decode: impl FnOnce(&[u8]) -> Result<T, FormatError>,
) -> Result<FileHead<T>> {
    if matches!(volume.size(file)?, None | Some(0)) {
        return Ok(FileHead::New);
    }
    let flags = MapFlags {
        read_only: true,
        atomic: true,
        ..MapFlags::default()
    };
    let mapping = volume.map(file, 0, flags)?;
    // SAFETY: the mapping has these bytes until it is unmapped below, and nobody writes them.
    let bytes = unsafe { std::slice::from_raw_parts(mapping.ptr, mapping.len) };
    let zero = |b: &[u8]| b.iter().all(|b| *b == 0);
    let found = match decode(bytes) {
        Ok(head) => Ok(FileHead::Old(head)),
        Err(_) if zero(bytes) => Ok(FileHead::New),
        Err(e) => Err(Error::Damaged {
            path: PathBuf::from(file),
            what: format!("{e}: the file holds something else, or is damaged; give another name"),
        }),
    };
    unmap(mapping.ptr, mapping.len)?;
    found
}
