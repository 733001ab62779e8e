//! A node's share of one volume: its copy while it follows, and what it knows of that copy.
//!
//! Owns both, with their locks. There is one `VolumeState` for each volume that the node holds,
//! from the node's start to its end, so looking it up needs no lock.
//!
//! Invariants:
//! - The order of locks is `mirror`, then `opened`, then `known`. `catalog` is alone. A
//!   thread holds those of one volume only: no volume waits for what is done with another.
//! - `mirror` is held for as long as a copy is opened, closed to be opened again, or given
//!   up: nobody else opens it meanwhile.
//! - `known` is held for one look or change. Nothing else is locked, asked or read from a
//!   disk meanwhile.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::Value;

use mojim_config::Volume;
use mojim_env::event::Event;
use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_format::Catalog;
use mojim_replica::mirror::Mirror;
use mojim_store::store::Store;

use crate::conditions::Conditions;

/// A volume that this node holds.
pub(crate) struct VolumeState {
    /// Its configuration.
    pub(crate) volume: Volume,
    mirror: Mutex<Option<Arc<Mirror>>>,
    known: Mutex<CopyFacts>,
    opened: Mutex<Option<Opened>>,
    catalog: Mutex<Option<Listed>>,
}

/// A copy that nobody uses, and that is open for looks: not opened anew for each of them.
pub(crate) struct Opened {
    pub(crate) store: Store,
    /// When it was looked at last.
    pub(crate) last: Duration,
}

/// The catalogue of a copy that a program has open, as last read.
pub(crate) struct Listed {
    /// Its file's length, its first bytes and its checksum.
    pub(crate) is: (u64, Vec<u8>, Vec<u8>),
    pub(crate) catalog: Arc<Catalog>,
    /// When it was used last.
    pub(crate) last: Duration,
}

/// What a node knows of a volume's copy, beside what the copy says itself.
#[derive(Default)]
pub(crate) struct CopyFacts {
    /// Why the copy could not be opened or made persistent the last time, and the
    /// superblock's sequence then. Another sequence now means that the copy was used
    /// since, and voids this.
    pub(crate) copy_error: Option<(Option<u64>, Error)>,
    /// If a program left the copy without detaching: the superblock's sequence when this
    /// node looked, and up to which LSN it found records; `None` if it could not look.
    pub(crate) left_tail: Option<(u64, Option<u64>)>,
    /// When a program last asked this node to give way.
    pub(crate) gave_way: Option<Duration>,
    /// How many looks this node has at the copy at present.
    pub(crate) looks: usize,
    /// What lies in the volume's directory past Mojim, as last found.
    pub(crate) unmanaged_files: Option<Value>,
    /// Unmanaged files are looked for just now.
    pub(crate) looks_for_unmanaged: bool,
    /// The promotion that an operator asked for last, until its outcome was told.
    pub(crate) promotion: Option<Arc<Promotion>>,
    /// A promotion failed, and may be agreed to in the register all the same.
    pub(crate) doubt: bool,
    /// This node brings the mirror up to date, and whether it was asked to give way.
    pub(crate) healing: Option<Arc<AtomicBool>>,
    /// Copies are compared, and the last program left records that may or may not be
    /// committed.
    pub(crate) open_tail: bool,
    /// Why the last try to bring the mirror up to date failed.
    pub(crate) unhealed: Option<String>,
    /// Why this node does not take the place of its primary, which is silent.
    pub(crate) stays: Option<String>,
    /// The copy was closed to be opened again before its links had ended, with the LSN up
    /// to which it could not apply what it had acknowledged.
    pub(crate) unopened: Option<Option<u64>>,
    /// What is not as it should be, and since when.
    pub(crate) conditions: Conditions,
    /// When, and why, incoming data last could not be stored for want of room.
    pub(crate) uncopied: Option<(Duration, String)>,
}

/// A promotion that goes on, or is over.
pub(crate) struct Promotion {
    /// Whether it gives up what only others have.
    pub(crate) force: bool,
    done: Mutex<Option<(Duration, Result<Value>)>>,
    /// Notified when it is over.
    pub(crate) over: Event,
}

impl Promotion {
    pub(crate) fn new(force: bool) -> Promotion {
        Promotion {
            force,
            done: Mutex::default(),
            over: Event::default(),
        }
    }

    /// It is over, `at` that time.
    pub(crate) fn end(&self, at: Duration, done: Result<Value>) {
        *lock(&self.done) = Some((at, done));
        self.over.notify();
    }

    /// What came of it, and when.
    pub(crate) fn outcome(&self) -> Option<(Duration, Result<Value>)> {
        lock(&self.done).clone()
    }
}

impl VolumeState {
    pub(crate) fn new(volume: Volume) -> VolumeState {
        VolumeState {
            volume,
            mirror: Mutex::default(),
            known: Mutex::default(),
            opened: Mutex::default(),
            catalog: Mutex::default(),
        }
    }

    /// The copy that this node keeps for a primary elsewhere, if it is open. Waits while
    /// it is opened or closed.
    pub(crate) fn mirror(&self) -> Option<Arc<Mirror>> {
        lock(&self.mirror).clone()
    }

    /// [`VolumeState::mirror`] for who does not wait; also `None` while it is opened or closed.
    pub(crate) fn mirror_now(&self) -> Option<Arc<Mirror>> {
        self.mirror.try_lock().ok()?.clone()
    }

    /// Whether this node has its copy open to follow.
    pub(crate) fn is_open(&self) -> bool {
        lock(&self.mirror).is_some()
    }

    /// The copy's place, for opening and closing it.
    pub(crate) fn place(&self) -> MutexGuard<'_, Option<Arc<Mirror>>> {
        lock(&self.mirror)
    }

    /// What is known of it.
    pub(crate) fn known(&self) -> MutexGuard<'_, CopyFacts> {
        lock(&self.known)
    }

    /// The copy that is open for looks. Whoever opens it there counts a look, and whoever closes it
    /// ends that.
    pub(crate) fn opened(&self) -> MutexGuard<'_, Option<Opened>> {
        lock(&self.opened)
    }

    /// The catalogue as a program's copy last had it.
    pub(crate) fn listed(&self) -> MutexGuard<'_, Option<Listed>> {
        lock(&self.catalog)
    }

    /// Begins a look at a copy that nobody else uses: before the copy is opened, until it
    /// is closed.
    pub(crate) fn look(&self) -> Look<'_> {
        self.known().looks += 1;
        Look(self)
    }
}

/// While this lives, the node has a copy of its own open for a look, whose end a program waits for.
pub(crate) struct Look<'a>(&'a VolumeState);

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.0.known().looks -= 1;
    }
}
