//! The spill files of a copy: the bytes of large sync points, which lie beside the logs.
//!
//! Invariants:
//! - A spill file counts as durable (`spills`) only once this process has synced it and
//!   its name. Only then may a record that names it be taken in.
//! - At most one arrives at a time. One that never became durable is named by no record,
//!   and is removed when the next one arrives.
//! - A file that no record names is removed at the start only if the logs were read to their
//!   known ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use mojim_env::turns::lock;
use mojim_format::{FormatError, Op, OpKind, RECORD_HEADER_LEN, RecordHeader};

use super::state::Store;
use crate::area::{named_spill, spill_path};
use mojim_env::{Context, Error, File, OpenHow, Result};

/// Bytes of an arriving spill file between two syncs.
const SPILL_SYNC: u64 = 8 << 20;

/// What `look` finds in the operations of spill file `file` of `len` bytes. It gets each with its
/// payload if that is a name, else without: so the file's bytes are not read.
pub fn find_in_spill<T>(
    file: &dyn File,
    len: u64,
    look: impl Fn(&Op, &[u8]) -> Option<T>,
) -> Result<Option<T>> {
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        let got = file.read_at(&mut bytes, at);
        match got.context(|| "reading a spill file".to_owned())? {
            n if n < len => Err(Error::Poisoned("a spill file became shorter".into())),
            _ => Ok(bytes),
        }
    };
    let bad = |e: FormatError| Error::Protocol(format!("in a spill file: {e}"));
    let mut at = 0;
    while at < len {
        let header = RecordHeader::decode(&read(at, RECORD_HEADER_LEN)?).map_err(bad)?;
        let end = header.table_end();
        let mut payload = at + end as u64;
        for op in header.table(&read(at, end)?) {
            let op = op.map_err(bad)?;
            let name = match op.kind {
                OpKind::Create | OpKind::Rename => read(payload, op.len as usize)?,
                _ => Vec::new(),
            };
            if let Some(found) = look(&op, &name) {
                return Ok(Some(found));
            }
            payload += u64::from(op.len);
        }
        at += u64::from(header.len);
    }
    Ok(None)
}

impl Store {
    /// Removes a spill file that no record needs.
    pub fn remove_spill(&self, id: u64) {
        lock(&self.spills).remove(&id);
        // If this fails, the file only costs space until the next start.
        let _ = self.env.remove(&spill_path(&self.spec.meta, id));
    }

    /// The spill files that records in the logs name, with their lengths.
    fn named_spills(&self) -> BTreeMap<u64, u64> {
        let mut named = BTreeMap::new();
        for log in &self.logs {
            let names = log.records(log.start()).map(|r| named_spill(&r));
            named.extend(names.filter_map(|named| named.ok().flatten()));
        }
        named
    }

    /// Removes spill files that no record in the logs names: the primary sends such a
    /// file again, ahead of its record, in whichever session the record comes.
    pub fn remove_stray_spills(&self) {
        self.remove_spills_but(&self.named_spills());
    }

    /// Whether records that name spill files may lie behind what can be read of a log. A disk
    /// that reads wrongly once may read rightly the next time; then they need their files.
    fn may_name_more(&self) -> bool {
        self.known_missing().is_some()
    }

    fn remove_spills_but(&self, named: &BTreeMap<u64, u64>) {
        let Ok(names) = self.env.list(&self.spec.meta) else {
            return;
        };
        for n in names {
            let id = n
                .to_str()
                .and_then(|n| n.strip_prefix("spill."))
                .and_then(|n| n.parse::<u64>().ok());
            if let Some(id) = id.filter(|id| !named.contains_key(id)) {
                self.remove_spill(id);
            }
        }
    }

    /// At the start: removes spill files that no record names, and syncs the named ones
    /// again, so that they count as durable. A file that arrived in part and was never
    /// synced is named by no record.
    pub(super) fn keep_named_spills(&self) -> Result<()> {
        let named = self.named_spills();
        if !self.may_name_more() {
            self.remove_spills_but(&named);
        }
        for id in named.into_keys() {
            let path = spill_path(&self.spec.meta, id);
            match self.env.open(&path, OpenHow::default()) {
                // Applying its record will report this. If the record is applied, the file
                // is no longer needed.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                f => drop(f.context(|| format!("opening {}", path.display()))?),
            }
            self.sync_spill(id)?;
        }
        Ok(())
    }

    /// All pieces of a spill file are here: makes it durable, name included, so
    /// that a record may name it.
    pub fn sync_spill(&self, id: u64) -> Result<()> {
        if lock(&self.spills).contains_key(&id) {
            return Ok(());
        }
        let file = self.spill_file(id)?;
        let skipped = self.mutations.spill_unsynced.is_on();
        let synced = match skipped {
            true => file.len(),
            false => file
                .sync()
                .and_then(|()| self.env.sync_dir(&self.spec.meta))
                .and_then(|()| file.len()),
        };
        let len = self.spill_synced(id, synced)?;
        // From here on it stays until its record is gone.
        lock(&self.arriving).take_if(|(arriving, _)| *arriving == id);
        lock(&self.spills).insert(id, len);
        Ok(())
    }

    fn spill_synced<T>(&self, id: u64, r: std::io::Result<T>) -> Result<T> {
        self.fail(r.map_err(|e| {
            let path = spill_path(&self.spec.meta, id);
            Error::Poisoned(format!("spill file {}: {e}", path.display()))
        }))
    }

    /// Writes bytes of an arriving spill file. If the file is durable here already,
    /// nothing is written again.
    ///
    /// Files arrive one after the other, in each session each from its beginning: one
    /// that is not durable when the next one arrives is not needed any more.
    pub fn write_spill(&self, id: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        if lock(&self.spills).contains_key(&id) {
            return Ok(());
        }
        let had = lock(&self.arriving).filter(|(arriving, _)| *arriving == id);
        if had.is_none() {
            self.forget_arriving();
            *lock(&self.arriving) = Some((id, 0));
        }
        let file = self.spill_file(id)?;
        if let Err(e) = file.write_at(bytes, offset) {
            // The part that is here takes room that other writes may need.
            drop(file);
            self.forget_arriving();
            return Err(Error::io("writing a spill file", &e));
        }
        let mut unsynced = had.map_or(0, |(_, n)| n) + bytes.len() as u64;
        // Synced in parts, so that the last sync, during which nothing moves, is short.
        if unsynced >= SPILL_SYNC && !self.mutations.spill_unsynced.is_on() {
            self.spill_synced(id, file.sync())?;
            unsynced = 0;
        }
        *lock(&self.arriving) = Some((id, unsynced));
        Ok(())
    }

    /// Removes the spill file that began to arrive and never became durable: no
    /// record can name it.
    pub fn forget_arriving(&self) {
        let arriving = lock(&self.arriving).take();
        if let Some((id, _)) = arriving {
            self.remove_spill(id);
        }
    }

    /// The length of a spill file, if it is durable here.
    pub fn durable_spill(&self, id: u64) -> Option<u64> {
        lock(&self.spills).get(&id).copied()
    }

    /// Opens a spill file for writing, and makes it if it is not there.
    pub fn spill_file(&self, id: u64) -> Result<Arc<dyn File>> {
        let path = spill_path(&self.spec.meta, id);
        let how = OpenHow {
            create: true,
            write: true,
            durable: false,
            plain: false,
        };
        self.env
            .open(&path, how)
            .context(|| format!("spill file {}", path.display()))
    }

    /// Opens a spill file that a record in the logs names, for reading.
    pub fn open_spill(&self, id: u64) -> Result<Arc<dyn File>> {
        let path = spill_path(&self.spec.meta, id);
        self.env
            .open(&path, OpenHow::default())
            .context(|| format!("opening spill file {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::LogSpec;
    use crate::store::state::StoreSpec;
    use mojim_config::MediumKind;

    /// A mirror kept every spill file that its primary had given up until its next
    /// start: each try of one large sync point left a whole file, until the disk was
    /// full. A file that the mirror has confirmed stays: the record that names it may
    /// be on its way.
    #[test]
    fn a_spill_file_that_never_became_durable_goes_when_another_comes() {
        let dir = std::env::temp_dir().join(format!("mojim-spills-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let env: Arc<dyn mojim_env::Env> = Arc::new(mojim_linux::Os::new().unwrap());
        let log = LogSpec {
            lane: 0,
            medium: MediumKind::Dram,
            path: dir.join("log"),
            ring: dir.join("ring"),
            size: 64 << 10,
        };
        let spec = StoreSpec {
            cluster: "c".into(),
            volume: "v".into(),
            node: "b".into(),
            dir: dir.join("data"),
            meta: dir.join("meta"),
            logs: vec![log],
            rank: 1,
            holders: 2,
            max_open: 16,
            copy_streams: 1,
            by_hand: true,
            locker: mojim_env::Locker::Program,
        };
        let store = Store::open(&env, spec).unwrap();
        let there = |id| spill_path(&store.spec.meta, id).exists();
        let piece = [7; 4096];
        let write = |id, at| store.write_spill(id, at, &piece);
        write(1, 0).unwrap();
        store.sync_spill(1).unwrap();
        // Its primary gives up, and tries again.
        write(2, 0).unwrap();
        write(2, 4096).unwrap();
        write(3, 0).unwrap();
        assert_eq!([1, 2, 3].map(there), [true, false, true]);
        // A piece that has no place (no file is that long).
        let too_far = i64::MAX as u64 - 100;
        write(3, too_far).unwrap_err();
        assert_eq!([1, 3].map(there), [true, false]);
        store.check().unwrap();
        // A link that ended, and another session.
        write(3, 0).unwrap();
        store.forget_arriving();
        write(3, 0).unwrap();
        write(3, 4096).unwrap();
        store.sync_spill(3).unwrap();
        // Nothing is written again to a file that is durable.
        write(1, too_far).unwrap();
        write(4, 0).unwrap();
        store.forget_arriving();
        assert_eq!([1, 3, 4].map(there), [true, true, false]);
        assert_eq!(store.durable_spill(3), Some(8192));
        drop(store);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
