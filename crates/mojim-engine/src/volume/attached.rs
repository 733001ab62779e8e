//! The attachments of this process: its volumes, and the state of each.
//!
//! Owns the list of attachments, what an attachment consists of, and what every call asks of it:
//!
//! - whether it is still attached
//! - whether a record is committed
//! - whether the files show it
//!
//! Changes of the state are in `names`, `owner` and `windows`.
//!
//! Lock order: `names` before `shared`, and before the data area.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::share::line::{End, Line, Port};
use mojim_config::{Config, Node, Rounding, Volume as VolumeConfig, Working};
use mojim_env::event::Event;
use mojim_env::{Env, Error, Result};
use mojim_linux::Os;
use mojim_memory::fork::{Watch, check_fork};
use mojim_memory::region::Region;
use mojim_memory::shared::Shared;
use mojim_replica::holders::Holders;
use mojim_replica::layout;
use mojim_replica::primary::Primary;
use mojim_store::store::AT_ONCE;

use super::attach_target::AttachTarget;
use super::memory::Memory;

/// The volumes of this process: for `finish_all` and for forks.
pub(super) static ATTACHED: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

pub(crate) struct Inner {
    pub(super) config: Config,
    pub(super) volume: VolumeConfig,
    pub(super) node: Node,
    pub(super) primary: Arc<Primary>,
    pub(super) env: Arc<dyn Env>,
    pub(super) holders: Arc<Holders>,
    /// `env` is this, or made from it.
    pub(super) os: Os,
    pub(super) stop: AtomicBool,
    pub(super) stopped: Event,
    pub(super) detached: AtomicBool,
    /// LSN of the last sync point whose call did not wait for it.
    pub(super) unawaited: AtomicU64,
    /// Gives memory back; none if memory is not bounded.
    pub(super) memory: Option<Memory>,
    /// Held by a call that changes the name space, maps or unmaps regions, or
    /// iterates over them.
    pub(super) names: Mutex<Names>,
    /// A sequence counter: odd while a file's size changes, or is in doubt. Changed
    /// under `names`.
    pub(super) sizes: AtomicU64,
    pub(super) shared: SharedCopies,
    pub(super) owner: Mutex<Owner>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    /// Until it is detached.
    pub(super) watch: Mutex<Option<Watch>>,
}

/// What is known of a volume's names.
#[derive(Default)]
pub(crate) struct Names {
    /// A file may have been renamed since this program attached: then the names
    /// that regions keep may be out of date.
    pub(super) renamed: bool,
    /// LSN of a change that is in doubt: its call began it, and returned before it
    /// was committed and applied. 0 if there is none.
    pub(super) doubt: u64,
}

/// The other processes that share a volume: the port where they connect, and their lines.
#[derive(Default)]
pub(crate) struct Owner {
    pub(super) port: Option<Arc<Port>>,
    pub(super) lines: Vec<Weak<Line>>,
    pub(super) threads: Vec<JoinHandle<Result<()>>>,
    pub(super) closed: bool,
}

impl Owner {
    /// The descriptors that a forked child must close: as long as it has ends of lines, guests do
    /// not notice that this process has ended.
    pub(super) fn ends(&self) -> Vec<End> {
        let lines = self.lines.iter().filter_map(Weak::upgrade);
        let lines = lines.flat_map(|l| l.ends());
        let port = self.port.iter().map(|p| p.clone() as End);
        lines.chain(port).collect()
    }
}

/// The shared working copies of a volume, by file.
pub(crate) type SharedCopies = Mutex<Vec<Lent>>;

/// A shared working copy, and its region.
pub(crate) type Lent = (Arc<Shared>, Arc<Region>);

/// A volume to which this process is attached as primary.
///
/// Cheap to clone; the volume stays attached until [`Volume::detach`] or the
/// end of the process. Dropping it neither commits nor detaches, and nor does
/// the end: see [`finish_all`](crate::finish_all).
#[derive(Clone)]
pub struct Volume(pub(super) Arc<Inner>);

impl Inner {
    /// A volume whose primary has begun its epoch.
    pub(super) fn new(
        place: AttachTarget,
        primary: Arc<Primary>,
        holders: Arc<Holders>,
        watch: Watch,
    ) -> Inner {
        let AttachTarget {
            config,
            volume,
            node,
            os,
            env,
        } = place;
        Inner {
            memory: Memory::of(&volume, &primary, &env),
            config,
            volume,
            node,
            primary,
            env,
            holders,
            os,
            stop: AtomicBool::new(false),
            stopped: Event::default(),
            detached: AtomicBool::new(false),
            unawaited: AtomicU64::new(0),
            names: Mutex::default(),
            sizes: AtomicU64::new(0),
            shared: Mutex::default(),
            owner: Mutex::default(),
            threads: Mutex::new(Vec::new()),
            watch: Mutex::new(Some(watch)),
        }
    }

    pub(crate) fn check_attached(&self) -> Result<()> {
        if self.detached.load(Acquire) {
            return Err(Error::Invalid(
                "this volume is not attached any more".into(),
            ));
        }
        Ok(())
    }

    /// Waits until every record up to `lsn` is committed.
    pub(crate) fn wait_for(&self, lsn: u64) -> Result<()> {
        // Applied records are committed, even if the link that acknowledged them is gone
        // and the next one is behind.
        if lsn > self.primary.store.applied() {
            self.primary.wait(lsn)?;
        }
        Ok(())
    }

    /// Waits until the data files show every record up to `lsn`, which must be
    /// committed.
    pub(crate) fn settle(&self, lsn: u64) -> Result<()> {
        let p = &self.primary;
        let start = self.env.now();
        while p.store.applied() < lsn {
            for lane in 0..p.lanes.len() {
                p.persist_wait(lane)?;
            }
            let before = p.store.applied();
            p.store.apply(p.apply_limit(), AT_ONCE)?;
            if p.store.applied() == before {
                if self.env.now() - start > Duration::from_secs(30) {
                    return Err(Error::Timeout(format!(
                        "LSN {lsn} is committed, but cannot be applied yet"
                    )));
                }
                // A lower record of another lane is missing, or a copy is under way.
                p.link_work.notify();
                p.done
                    .wait_unless(|| p.apply_limit() > before, Duration::from_millis(1));
            }
        }
        Ok(())
    }
}

impl Volume {
    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.0.volume.name
    }

    /// Fails unless sync points commit exactly the bytes that they are given, of working copies
    /// that are this process's alone.
    #[doc(hidden)]
    pub fn check_exact(&self) -> Result<()> {
        let v = &self.0.volume;
        let why = match (v.rounding, v.working) {
            (Rounding::Page, _) => "msync_rounding = \"page\"",
            (_, Working::Shared) => "working = \"shared\"",
            _ => return Ok(()),
        };
        Err(Error::Unsupported(format!(
            "volume {} is configured with {why}: a heap needs exact commits of a memory of its own",
            v.name
        )))
    }

    /// A number of this attachment, which no other one has while a clone of this is there.
    #[doc(hidden)]
    pub fn attachment(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// The directory whose files are this volume's.
    pub fn directory(&self) -> std::path::PathBuf {
        layout::data_dir(&self.0.node, &self.0.volume.name)
    }

    /// Whether all its working copies are shared (`working = "shared"`).
    pub fn shares_all(&self) -> bool {
        self.0.volume.working == Working::Shared
    }

    /// Names and sizes of the volume's files.
    pub fn files(&self) -> Vec<(String, u64)> {
        self.0
            .primary
            .store
            .area()
            .files()
            .map(|f| (f.name.clone(), f.size))
            .collect()
    }

    /// Size of a file in bytes, if it is there.
    pub fn size(&self, file: &str) -> Result<Option<u64>> {
        check_fork()?;
        Ok(self.0.primary.store.area().find(file).map(|f| f.size))
    }

    /// Waits until everything up to `lsn` is committed, as the mode requires.
    pub fn wait(&self, lsn: u64) -> Result<()> {
        check_fork()?;
        if lsn > self.0.primary.last() {
            return Err(Error::Invalid(format!(
                "LSN {lsn} was not given out yet; the last is {}",
                self.0.primary.last()
            )));
        }
        self.0.primary.wait(lsn)
    }

    /// Waits until the data files show all that was committed before this
    /// call, so that they can be read by other means than a mapping.
    pub fn settle(&self) -> Result<()> {
        check_fork()?;
        self.0.settle(self.0.primary.acknowledged())
    }

    /// The epoch of this attachment.
    pub fn epoch(&self) -> u64 {
        self.0.primary.epoch()
    }
}
