//! Owns the notes of renames and removals under way (`docs/reference/format.md`) and their bytes.

use std::path::Path;

use mojim_format::catalog::{MAX_CATALOG, valid_file_name};
use mojim_format::crc32c;

use mojim_env::{Context, Env, OpenHow, Result};

/// The file that names a rename under way.
pub const RENAME_NOTE: &str = "rename";

/// The file that names removals under way.
pub const REMOVAL_NOTE: &str = "removed";

/// Names in the notes in `meta`, beside a catalogue as of `lsn`: of files whose
/// rename or removal was under way.
pub fn noted_names(env: &dyn Env, meta: &Path, volume: u64, lsn: u64) -> Result<Vec<String>> {
    let read = |name: &str| -> Result<Vec<u8>> {
        let path = meta.join(name);
        let what = || format!("reading {}", path.display());
        let f = match env.open(&path, OpenHow::default()) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            r => r.context(what)?,
        };
        let mut b = vec![0u8; f.len().context(what)?.min(MAX_CATALOG) as usize];
        let got = f.read_at(&mut b, 0).context(what)?;
        b.truncate(got);
        Ok(b)
    };
    let mut names = Vec::new();
    if let Some(n) = RenameNote::decode(&read(RENAME_NOTE)?)
        && n.volume == volume
        && n.lsn > lsn
    {
        names.extend([n.from, n.to]);
    }
    if let Some(n) = RemovalNote::decode(&read(REMOVAL_NOTE)?)
        && n.volume == volume
    {
        names.extend(n.names);
    }
    Ok(names)
}

/// Files that are about to be removed: written first, since the catalogue and the
/// directory cannot change atomically together.
pub(crate) struct RemovalNote {
    pub(crate) volume: u64,
    pub(crate) lsn: u64,
    pub(crate) names: Vec<String>,
}

impl RemovalNote {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; 4];
        b.extend_from_slice(&self.volume.to_le_bytes());
        b.extend_from_slice(&self.lsn.to_le_bytes());
        for n in &self.names {
            b.extend_from_slice(&(n.len() as u32).to_le_bytes());
            b.extend_from_slice(n.as_bytes());
        }
        let crc = crc32c(&b[4..]);
        b[..4].copy_from_slice(&crc.to_le_bytes());
        b
    }

    pub(crate) fn decode(b: &[u8]) -> Option<RemovalNote> {
        let u64_at = |at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
        if b.get(..4)? != crc32c(b.get(4..)?).to_le_bytes() {
            return None;
        }
        let mut names = Vec::new();
        let mut rest = b.get(20..)?;
        while !rest.is_empty() {
            let (len, more) = rest.split_at_checked(4)?;
            let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
            let (name, more) = more.split_at_checked(len)?;
            let name = std::str::from_utf8(name).ok()?;
            names.push(name.to_owned());
            rest = more;
        }
        let valid = names.iter().all(|n| valid_file_name(n));
        valid.then_some(RemovalNote {
            volume: u64_at(4)?,
            lsn: u64_at(12)?,
            names,
        })
    }
}

/// A rename that is about to happen: written before the file system is asked,
/// since its names and the catalogue cannot change atomically together.
pub(crate) struct RenameNote {
    pub(crate) volume: u64,
    pub(crate) lsn: u64,
    pub(crate) file: u32,
    pub(crate) from: String,
    pub(crate) to: String,
}

impl RenameNote {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut b = vec![0; 4];
        b.extend_from_slice(&self.volume.to_le_bytes());
        b.extend_from_slice(&self.lsn.to_le_bytes());
        b.extend_from_slice(&self.file.to_le_bytes());
        b.extend_from_slice(&(self.from.len() as u32).to_le_bytes());
        b.extend_from_slice(self.from.as_bytes());
        b.extend_from_slice(self.to.as_bytes());
        let crc = crc32c(&b[4..]);
        b[..4].copy_from_slice(&crc.to_le_bytes());
        b
    }

    pub(crate) fn decode(b: &[u8]) -> Option<RenameNote> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
        if u32_at(0)? != crc32c(b.get(4..)?) {
            return None;
        }
        let names = b.get(28..)?;
        let (from, to) = names.split_at_checked(u32_at(24)? as usize)?;
        let name = |b: &[u8]| {
            let n = std::str::from_utf8(b).ok()?;
            valid_file_name(n).then(|| n.to_owned())
        };
        Some(RenameNote {
            volume: u64_at(4)?,
            lsn: u64_at(12)?,
            file: u32_at(20)?,
            from: name(from)?,
            to: name(to)?,
        })
    }
}
