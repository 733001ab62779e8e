//! A plain redo log: append a record with its checksum, flush, then change the file,
//! flush, cut the log. This control must pass. Without its first flush, it must be caught
//! losing data.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use mojim_format::crc32c;

use crate::Result;
use crate::subject::{Subject, SubjectPaths};
use crate::workload::{Patch, region_len};

/// Length and checksum of what follows.
const HEADER: usize = 12;

/// The file of the region, made durably if it does not exist.
pub fn data_file(place: &SubjectPaths, seed: u64) -> Result<File> {
    open_durably(place, "data", &vec![0; region_len(seed)])
}

/// Opens a file. A file that does not exist has `first` in it before its name is durable.
fn open_durably(place: &SubjectPaths, name: &str, first: &[u8]) -> Result<File> {
    let path = place.dir.join(name);
    let mut how = OpenOptions::new();
    how.read(true).write(true);
    if !path.exists() {
        let new = place.dir.join(format!("{name}.new"));
        std::fs::write(&new, first)?;
        File::open(&new)?.sync_all()?;
        std::fs::rename(&new, &path)?;
        File::open(&place.dir)?.sync_all()?;
    }
    Ok(how.open(path)?)
}

/// The file and its log. The last record stays in the log until the next one comes.
pub struct Redo {
    data: File,
    log: File,
    flushes: bool,
    last: Vec<u8>,
}

impl Redo {
    /// Opens the file and applies what is in its log. Without `flushes`, records are
    /// acknowledged before they are flushed.
    pub fn open(place: &SubjectPaths, seed: u64, flushes: bool) -> Result<Redo> {
        let data = data_file(place, seed)?;
        let log = open_durably(place, "log", &[])?;
        let mut last = vec![0; log.metadata()?.len() as usize];
        log.read_exact_at(&mut last, 0)?;
        let mut redo = Redo {
            data,
            log,
            flushes,
            last,
        };
        redo.apply()?;
        Ok(redo)
    }

    /// The region.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut all = vec![0; self.data.metadata()?.len() as usize];
        self.data.read_exact_at(&mut all, 0)?;
        Ok(all)
    }

    /// Writes the last record to the file, and cuts it from the log.
    fn apply(&mut self) -> Result<()> {
        let last = std::mem::take(&mut self.last);
        for (at, bytes) in decode(&last).unwrap_or_default() {
            self.data.write_all_at(bytes, at)?;
        }
        self.data.sync_data()?;
        self.log.set_len(0)?;
        Ok(self.log.sync_data()?)
    }
}

impl Subject for Redo {
    fn commit(&mut self, changes: &[Patch]) -> Result<()> {
        if !self.last.is_empty() {
            // This flush is also made if the record was acknowledged without one.
            self.log.sync_data()?;
            self.apply()?;
        }
        self.last = encode(changes);
        self.log.write_all_at(&self.last, 0)?;
        if self.flushes {
            self.log.sync_data()?;
        }
        Ok(())
    }

    fn close(mut self: Box<Self>) -> Result<()> {
        self.log.sync_data()?;
        self.apply()
    }
}

fn encode(changes: &[Patch]) -> Vec<u8> {
    let mut out = vec![0; HEADER];
    for c in changes {
        out.extend_from_slice(&(c.at as u64).to_le_bytes());
        out.extend_from_slice(&(c.bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(&c.bytes);
    }
    let (len, sum) = ((out.len() - HEADER) as u64, crc32c(&out[HEADER..]));
    out[..8].copy_from_slice(&len.to_le_bytes());
    out[8..12].copy_from_slice(&sum.to_le_bytes());
    out
}

/// The writes of a record; `None` if the record is not whole.
fn decode(record: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let number = |b: &[u8]| Some(u64::from_le_bytes(b.get(..8)?.try_into().ok()?));
    let body = record.get(HEADER..)?;
    let mut body = body.get(..number(record)? as usize)?;
    if crc32c(body).to_le_bytes() != record[8..HEADER] {
        return None;
    }
    let mut out = Vec::new();
    while !body.is_empty() {
        let (at, len) = (number(body)?, number(&body[8..])? as usize);
        out.push((at, body.get(16..16 + len)?));
        body = &body[16 + len..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::changes;

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let c = changes(1, 1);
        let mut r = encode(&c);
        let read = decode(&r).unwrap();
        assert_eq!(read.len(), c.len());
        assert!(
            read.iter()
                .zip(&c)
                .all(|((at, b), c)| *at == c.at as u64 && *b == c.bytes)
        );
        assert_eq!(decode(&r[..r.len() - 1]), None);
        let last = r.len() - 1;
        r[last] ^= 1;
        assert_eq!(decode(&r), None);
    }
}
