//! The answers of a node that follows to its readers.
//!
//! An answer has what the node's data area shows, as of one LSN, and the records after the LSN
//! that the reader shows.
//!
//! Owns the request `read` (`docs/reference/requests.md`, "Readers"). A reader is a
//! process of this host that maps the volume's files (`mojim::reader`).
//!
//! Invariants:
//!
//! - An answer is as of the LSN up to which the data area is applied: whole sync points, all of
//!   them committed. The state that follows from it on the reader's side, records before pages,
//!   is as of that LSN too.
//! - A reader is told to go on from what it shows only if that is a state of this copy's history,
//!   and of these bytes. That means: no page was rewritten since, no other copy was taken in, and
//!   the copy is still open. Else the reader begins anew.
//! - Within one history a reader is never sent back, also if it has to begin anew.
//! - Nothing is kept for a reader: no record stays in a log for it, and an answer has a
//!   bound. A reader that stands still holds up only its own link.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use mojim_format::State;
use mojim_format::catalog::CatalogEntry;
use serde_json::{Value, json};

use super::Node;
use super::requests::MAX_WAIT;
use mojim_config::{Mode, Volume};
use mojim_env::{Context, Error, Result};
use mojim_replica::client::READ_PAGES;
use mojim_replica::layout;
use mojim_replica::mirror::Mirror;
use mojim_replica::request::Read;
use mojim_store::area::Area;
use mojim_store::store::read_superblock;

/// Most bytes of records in one answer; a reader that lacks more begins anew.
pub const MOST_RECORDS: usize = 896 << 10;
/// Bytes of a page of an answer.
pub const PAGE: u64 = 4096;
/// About how many bytes of a list of files are in one answer: beside the records there is room
/// for one entry more of any length.
const MOST_LIST: usize = 32 << 10;
/// Longest wait between two looks at whether the copy is still open here.
const SLICE: Duration = Duration::from_millis(100);

impl Node {
    /// The copy that this node keeps for a primary elsewhere.
    fn followed(self: &Arc<Node>, v: &Volume) -> Result<Arc<Mirror>> {
        if let Some(m) = self.of(v).mirror() {
            return Ok(m);
        }
        if self.follows(v)? {
            return self.mirror(v);
        }
        Err(Error::Stale(format!(
            "node {} is the primary of volume {}: readers map the files of nodes that follow it",
            self.me.name, v.name
        )))
    }

    /// In mode `sync-disk` the mirror serves no readers, nor does a node that catches up
    /// to become the mirror.
    fn check_readable(&self, v: &Volume) -> Result<()> {
        if v.mode != Mode::SyncDisk {
            return Ok(());
        }
        let sb = read_superblock(&*self.env, &layout::meta_dir(&self.me, &v.name))?;
        let mirror = self.of(v).mirror();
        if self.role(v, sb.as_ref(), mirror.as_deref()) == "mirror" {
            return Err(Error::Invalid(format!(
                "volume {} is in mode sync-disk: nobody reads on its mirror {}. Read on a backup, or choose mode sync",
                v.name, self.me.name
            )));
        }
        Ok(())
    }

    pub(super) fn read(
        self: &Arc<Node>,
        v: &Volume,
        q: &Read,
        bytes: &mut Vec<u8>,
    ) -> Result<Value> {
        self.check_readable(v)?;
        let after = q.after;
        let m = self.await_beyond(v, q)?;
        let store = &m.store;
        // Before the lock is taken: it may be a MiB.
        let mut pages = room(q);
        let answer = store.standing_still_since(after, MOST_RECORDS, |area, lsn, records| {
            // A record may be there in part after its application failed.
            store.check()?;
            let busy = |why: &str| {
                Err(Error::Busy(format!(
                    "node {} cannot show volume {} now: {why}",
                    self.me.name, v.name
                )))
            };
            let sb = store.superblock();
            if sb.state != State::Whole {
                return busy("it has no whole copy yet");
            }
            if !store.is_exact() {
                return busy(
                    "it was not closed in order, and has not heard yet what of its log is committed",
                );
            }
            let history = store.history();
            let epoch = |lsn| history.epoch_at(lsn).unwrap_or(0);
            let same_history = q.volume_id == sb.volume_id && q.epoch == epoch(after);
            if same_history && after > lsn {
                return busy("it has not yet applied again what the reader shows");
            }
            let same = same_history && q.rewritten == store.rewritten();
            let mut answer = json!({ "lsn": lsn, "epoch": epoch(lsn) });
            match records.filter(|_| same) {
                Some(r) => {
                    answer["records"] = json!(r.len());
                    *bytes = r;
                }
                None => {
                    answer["volume_id"] = json!(sb.volume_id);
                    answer["rewritten"] = json!(store.rewritten());
                }
            }
            if let Some(from) = q.files {
                answer["files"] = list(area, from);
                pages.clear();
                return Ok(answer);
            }
            let entry = match (&q.name, q.id) {
                (Some(name), _) => area.find(name),
                (None, Some(id)) => area.get(id),
                (None, None) => return Ok(answer),
            };
            let Some(e) = entry.cloned() else {
                answer["file"] = Value::Null;
                pages.clear();
                return Ok(answer);
            };
            answer["file"] = json!({ "id": e.id, "name": e.name, "size": e.size });
            self.read_pages(v, area, &e, q.offset, &mut pages)?;
            Ok(answer)
        })?;
        bytes.append(&mut pages);
        Ok(answer)
    }

    /// The copy, once its data area shows more than the reader, or as much with other
    /// bytes; or after the wait that the reader allows, at most `MAX_WAIT`.
    fn await_beyond(self: &Arc<Node>, v: &Volume, q: &Read) -> Result<Arc<Mirror>> {
        let end = self.env.now() + Duration::from_millis(q.wait).min(MAX_WAIT);
        loop {
            let m = self.followed(v)?;
            let left = end.saturating_sub(self.env.now());
            let is_new = || {
                let applied = m.store.applied();
                applied > q.after || applied == q.after && m.store.rewritten() != q.rewritten
            };
            if left.is_zero() || is_new() || self.stopping.load(Acquire) {
                return Ok(m);
            }
            let changed = || is_new() || m.is_closed();
            m.store.advanced.wait_unless(changed, left.min(SLICE));
        }
    }

    /// Fills `pages` with the bytes of a file from an offset on, as far as the file reaches.
    fn read_pages(
        &self,
        v: &Volume,
        area: &mut Area,
        e: &CatalogEntry,
        offset: u64,
        pages: &mut Vec<u8>,
    ) -> Result<()> {
        let len = e.size.saturating_sub(offset).min(pages.len() as u64);
        pages.truncate(len as usize);
        if len == 0 {
            return Ok(());
        }
        let got = area
            .file(e.id)?
            .read_at(pages, offset)
            .context(|| format!("reading {} of volume {}", e.name, v.name))?;
        if got as u64 != len {
            return Err(Error::Damaged {
                path: area.path(&e.name),
                what: format!(
                    "it ends at byte {}, and has {} bytes by the catalogue",
                    offset + got as u64,
                    e.size
                ),
            });
        }
        Ok(())
    }
}

/// Room for the bytes that a question asks for.
fn room(q: &Read) -> Vec<u8> {
    match q.id.is_some() || q.name.is_some() {
        true => vec![0; (q.pages.min(READ_PAGES) * PAGE) as usize],
        false => Vec::new(),
    }
}

/// The files from a number on, by ascending numbers, as many as one answer has room for; none if
/// there are none.
fn list(area: &Area, from: u32) -> Value {
    let mut bytes = 0;
    let mut all = Vec::new();
    for e in area.files().filter(|e| e.id >= from) {
        let entry = json!([e.id, e.name, e.size]);
        bytes += entry.to_string().len();
        all.push(entry);
        if bytes > MOST_LIST {
            break;
        }
    }
    Value::Array(all)
}
