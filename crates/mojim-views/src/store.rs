//! The log and the registers, as openraft asks for them.
//!
//! Owns the registers in memory and how they follow from the log. They are not
//! on disk themselves: after a start they are those of the last snapshot, and
//! grow current as a leader says which entries are committed.
//!
//! Invariants:
//! - A call that changes what is kept returns after the disk has it. It runs on a thread that
//!   may block. Where its caller is gone, it still runs to its end, so `Disk` never sees half
//!   of a call.
//! - All voters' registers after one entry are the same, to the byte.

use std::fmt::Debug;
use std::io::Cursor;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex};

use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_protocol::view::Register;
use openraft::storage::{LogFlushed, RaftLogStorage, RaftStateMachine};
use openraft::{
    AnyError, EntryPayload, LogState, RaftLogReader, RaftSnapshotBuilder, Snapshot, StorageIOError,
};

use crate::disk::{Disk, Kept, Saved};
use crate::types::{
    Agreed, Entry, Lives, LogId, Membership, SnapshotMeta, StorageError, TypeConfig, Vote,
};

/// The log and the vote.
#[derive(Clone)]
pub(crate) struct LogStore {
    disk: Arc<Disk>,
    /// Most bytes of entries, as JSON, that are read for one request.
    batch: usize,
}

type Made<T> = std::result::Result<T, StorageError>;
type IoError = StorageIOError<u64>;

fn any(e: impl std::fmt::Display) -> AnyError {
    AnyError::error(e)
}

/// Runs `f`, which blocks for the disk, on a thread that may.
async fn blocking(
    disk: &Arc<Disk>,
    f: impl FnOnce(&Disk) -> Result<()> + Send + 'static,
) -> std::result::Result<(), AnyError> {
    let disk = disk.clone();
    tokio::task::spawn_blocking(move || f(&disk))
        .await
        .map_err(any)?
        .map_err(any)
}

impl LogStore {
    pub fn new(disk: Arc<Disk>, batch: usize) -> LogStore {
        LogStore { disk, batch }
    }

    fn look<T>(&self, f: impl FnOnce(&Kept) -> T) -> std::result::Result<T, AnyError> {
        self.disk.kept(f).map_err(any)
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + Send>(
        &mut self,
        range: R,
    ) -> Made<Vec<Entry>> {
        let from = match range.start_bound() {
            Bound::Included(i) => *i,
            Bound::Excluded(i) => i.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let read = self.look(|k| {
            let from_there = k.entries.range(from..);
            let within = from_there.take_while(|(i, _)| range.contains(*i));
            within.map(|(_, e)| e.clone()).collect()
        });
        Ok(read.map_err(IoError::read_logs)?)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Made<Vec<Entry>> {
        let batch = self.batch;
        let read = self.look(|k| -> serde_json::Result<Vec<Entry>> {
            let mut out = Vec::new();
            let mut room = batch;
            for (_, e) in k.entries.range(start..end.max(start)) {
                // With the comma after it. The first entry is always included.
                let len = serde_json::to_vec(e)?.len() + 1;
                if len > room && !out.is_empty() {
                    break;
                }
                room = room.saturating_sub(len);
                out.push(e.clone());
            }
            Ok(out)
        });
        let read = read.map_err(IoError::read_logs)?;
        Ok(read.map_err(|e| IoError::read_logs(any(e)))?)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = LogStore;

    async fn get_log_state(&mut self) -> Made<LogState<TypeConfig>> {
        let state = self.look(|k| LogState {
            last_purged_log_id: k.purged,
            last_log_id: k.last(),
        });
        Ok(state.map_err(IoError::read_logs)?)
    }

    async fn get_log_reader(&mut self) -> LogStore {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Made<()> {
        let v = *vote;
        let done = blocking(&self.disk, move |d| d.vote(v)).await;
        done.map_err(|e| IoError::write_vote(e).into())
    }

    async fn read_vote(&mut self) -> Made<Option<Vote>> {
        Ok(self.look(|k| k.vote).map_err(IoError::read_vote)?)
    }

    async fn append<I>(&mut self, entries: I, done: LogFlushed<TypeConfig>) -> Made<()>
    where
        I: IntoIterator<Item = Entry> + Send,
        I::IntoIter: Send,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        blocking(&self.disk, move |d| d.append(entries))
            .await
            .map_err(IoError::write_logs)?;
        done.log_io_completed(Ok(()));
        Ok(())
    }

    async fn truncate(&mut self, from: LogId) -> Made<()> {
        let done = blocking(&self.disk, move |d| d.truncate(from.index)).await;
        done.map_err(|e| IoError::write_logs(e).into())
    }

    async fn purge(&mut self, upto: LogId) -> Made<()> {
        let done = blocking(&self.disk, move |d| d.purge(upto)).await;
        done.map_err(|e| IoError::write_logs(e).into())
    }
}

/// What the applied entries have made.
#[derive(Debug, Clone, Default)]
struct State {
    applied: Option<LogId>,
    membership: Membership,
    agreed: Agreed,
}

/// The registers as they are now: for reading them once it is known that they
/// are new enough.
#[derive(Clone)]
pub(crate) struct Now(Arc<Mutex<State>>);

impl Now {
    /// A volume's register.
    pub fn read(&self, volume: &str) -> Register {
        let state = lock(&self.0);
        state
            .agreed
            .registers
            .get(volume)
            .cloned()
            .unwrap_or_default()
    }

    /// Whether all that the log says of this name, by `logged`, is committed.
    pub fn has_all_of(&self, voter: &str, logged: &Lives) -> bool {
        lock(&self.0).agreed.lives.agree_on(voter, logged)
    }
}

/// The registers, as entries are applied to them.
pub(crate) struct Machine {
    disk: Arc<Disk>,
    now: Now,
}

impl Machine {
    /// The registers of the last snapshot.
    pub fn new(disk: Arc<Disk>) -> Result<Machine> {
        let state = disk.kept(|k| match &k.snapshot {
            Some(s) => State::from(s.clone()),
            None => State::default(),
        })?;
        Ok(Machine {
            disk,
            now: Now(Arc::new(Mutex::new(state))),
        })
    }

    pub fn now(&self) -> Now {
        self.now.clone()
    }
}

impl From<Saved> for State {
    fn from(s: Saved) -> State {
        State {
            applied: s.meta.last_log_id,
            membership: s.meta.last_membership,
            agreed: s.agreed,
        }
    }
}

/// A snapshot as it travels: what was agreed on as JSON.
fn packed(s: &Saved) -> std::result::Result<Snapshot<TypeConfig>, AnyError> {
    Ok(Snapshot {
        meta: s.meta.clone(),
        snapshot: Box::new(Cursor::new(serde_json::to_vec(&s.agreed).map_err(any)?)),
    })
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Made<(Option<LogId>, Membership)> {
        let state = lock(&self.now.0);
        Ok((state.applied, state.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Made<Vec<bool>>
    where
        I: IntoIterator<Item = Entry> + Send,
        I::IntoIter: Send,
    {
        let mut state = lock(&self.now.0);
        let mut apply = |e: Entry| {
            state.applied = Some(e.log_id);
            match e.payload {
                EntryPayload::Blank => false,
                EntryPayload::Normal(c) => state.agreed.change(c),
                EntryPayload::Membership(m) => {
                    state.membership = Membership::new(Some(e.log_id), m);
                    false
                }
            }
        };
        Ok(entries.into_iter().map(&mut apply).collect())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        Builder {
            disk: self.disk.clone(),
            state: lock(&self.now.0).clone(),
        }
    }

    async fn begin_receiving_snapshot(&mut self) -> Made<Box<Cursor<Vec<u8>>>> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Made<()> {
        let signature = Some(meta.signature());
        let agreed = serde_json::from_slice(&snapshot.into_inner())
            .map_err(|e| IoError::read_snapshot(signature.clone(), any(e)))?;
        let saved = Saved {
            meta: meta.clone(),
            agreed,
        };
        let state = State::from(saved.clone());
        blocking(&self.disk, move |d| d.snapshot(saved))
            .await
            .map_err(|e| IoError::write_snapshot(signature, e))?;
        *lock(&self.now.0) = state;
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Made<Option<Snapshot<TypeConfig>>> {
        let present = self
            .disk
            .kept(|k| k.snapshot.as_ref().map(packed).transpose())
            .map_err(|e: Error| IoError::read_snapshot(None, any(e)))?;
        present.map_err(|e| IoError::read_snapshot(None, e).into())
    }
}

/// Makes a snapshot of the registers as they were when it was asked for.
pub(crate) struct Builder {
    disk: Arc<Disk>,
    state: State,
}

impl RaftSnapshotBuilder<TypeConfig> for Builder {
    async fn build_snapshot(&mut self) -> Made<Snapshot<TypeConfig>> {
        let state = self.state.clone();
        let meta = SnapshotMeta {
            // The same registers have the same name at every voter.
            snapshot_id: state.applied.map_or("none".to_owned(), |l| l.to_string()),
            last_log_id: state.applied,
            last_membership: state.membership,
        };
        let saved = Saved {
            meta,
            agreed: state.agreed,
        };
        let out = packed(&saved).map_err(|e| IoError::write_snapshot(None, e))?;
        blocking(&self.disk, move |d| d.snapshot(saved))
            .await
            .map_err(|e| IoError::write_snapshot(Some(out.meta.signature()), e))?;
        Ok(out)
    }
}
