//! A whole copy of a volume that comes in over a session's own link.
//!
//! Owns the receiver's side, whichever of the two nodes receives: an announced file is
//! answered with what is here already, sums with the pages that differ. Where the bytes
//! go, and when they count, is `mojim_store::stage`'s.
//!
//! Invariants:
//! - Nothing of the copy that is here changes before all of the new one has come.
//! - Answers that the sender does not take are bounded.

use mojim_format::message::{CopyBegin, CopyData, CopyFile, CopySums, Message};
use mojim_format::{CatalogEntry, Frame, FrameKind, State};
use mojim_protocol::History;

use crate::copy_pass::answers_are_taken;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Error, Result};
use mojim_store::store::Store;

/// A copy that has begun to come in.
#[derive(Debug)]
pub struct CopyIn {
    /// The copy is of the volume whose whole copy was here when it began.
    pub continues: bool,
    /// The LSN as of which it was begun.
    lsn: u64,
    /// The epochs of its records.
    pub history: History,
}

impl CopyIn {
    /// Begins a copy by the body of a CopyBegin.
    pub fn begin(store: &Store, body: &[u8]) -> Result<CopyIn> {
        let c = CopyBegin::decode(body).map_err(bad)?;
        let history = History::from_entries(&c.history)
            .ok_or_else(|| Error::Protocol("epochs out of order".into()))?;
        let sb = store.superblock();
        let continues = sb.state == State::Whole && sb.volume_id == c.volume_id;
        store.load_begin(c.copy, c.volume_id, c.bytes)?;
        Ok(CopyIn {
            continues,
            lsn: c.lsn,
            history,
        })
    }

    /// Takes one more frame. Returns the copy's LSN after the last one: the caller then
    /// puts the copy in place (`Store::load_end`, `Store::load_more`). `None` if there is
    /// more.
    pub fn take(
        &self,
        store: &Store,
        wire: &mut Wire,
        epoch: u64,
        f: &Frame,
        body: &[u8],
    ) -> Result<Option<u64>> {
        match f.kind {
            FrameKind::CopyFile => {
                let c = CopyFile::decode(body).map_err(bad)?;
                let have = store.load_file(CatalogEntry {
                    id: c.id,
                    size: c.size,
                    name: c.name,
                })?;
                wire.send(FrameKind::CopyHave, epoch, &have);
                answers_are_taken(wire)?;
            }
            FrameKind::CopySums => {
                let want = store.load_sums(None, &CopySums::decode(body).map_err(bad)?)?;
                wire.send(FrameKind::CopyWant, epoch, &want);
                answers_are_taken(wire)?;
            }
            FrameKind::CopyData => {
                let (id, offset, bytes) = CopyData::view(body).map_err(bad)?;
                store.load_data(None, id, offset, bytes)?;
            }
            FrameKind::CopyEnd if f.lsn < self.lsn => {
                return Err(Error::Protocol(format!(
                    "a copy of LSN {} ends with LSN {}",
                    self.lsn, f.lsn
                )));
            }
            FrameKind::CopyEnd => return Ok(Some(f.lsn)),
            k => return Err(Error::Protocol(format!("{k:?} within a copy"))),
        }
        Ok(None)
    }
}
