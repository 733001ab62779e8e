//! A volume as a mounted directory, over FUSE.
//!
//! Any program, in any language, linked in any way, keeps its files there. It has them committed
//! atomically and copied (Mojim, Section 5).
//!
//! Owns the mount's session with the kernel, and the thread that commits what no program commits.
//! [`Mounted::over`] attaches nothing: it is given a volume, and detaches it at the end.
//! `read` owns mounts that only show what a node that follows has.
//!
//! The files import downwards only:
//!
//! - `read`
//! - `open_dirs`
//! - `shown`
//! - `fuse`, `commit`
//! - `later`, `readers`
//! - `asker_affinity`, `directory`, `taking`
//! - `fs`, `session`
//! - `tree`, `rings`
//! - `names`, `device`, `mounting`, `room`
//! - `calls`
//! - `reply`
//! - `at_once`, `flags`, `init`, `killed`, `lost`, `name_table`, `overlay`, `switch`
//!
//! `session` and the files it imports are the way to the kernel: `device` over /dev/fuse, `rings`
//! over io_uring.
//!
//! Invariants:
//!
//! - A [`Mounted`] is the only one that changes the volume while it is mounted.
//! - An fsync that returned 0 is committed as the volume's mode says. So is all that was begun
//!   before it.
//!
//! The process of the mount is the volume's primary, and has no working copy. A sync point begins
//! in a thread of FUSE when a program syncs, and in a thread of its own every `--commit-interval`.
//!
//! - `calls` decodes the kernel's requests.
//! - `fuse` makes them calls of `fs`. The trait `Calls` has a method for each kind: `fuse`
//!   implements it for a mount, `read` for a mount that only shows.
//! - `commit` has the sync points.
//! - `tree` has the names, and `names` the order in which one sync point changes them.
//! - `overlay` has a file's bytes that are not applied.
//! - `name_table` has the bytes of the file of names.
//! - `shown` has the names that a mount only shows, and `open_dirs` its open directories.
//! - `lost` has what could not be taken.
//! - `room` has the disk's room.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mojim::Volume;
use mojim_env::event::Event;
use mojim_env::locks::lock;
use mojim_env::{Context, Error, Result};
use rustix::mount::UnmountFlags;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

mod asker_affinity;
mod at_once;
mod calls;
mod commit;
mod device;
mod directory;
mod flags;
mod fs;
mod fuse;
mod init;
mod killed;
mod later;
mod lost;
mod mounting;
mod name_table;
mod names;
mod open_dirs;
mod overlay;
mod read;
mod readers;
mod reply;
mod rings;
mod room;
mod session;
mod shown;
mod switch;
mod taking;
mod tree;

use device::Device;
pub use flags::Flags;
use fs::Fs;
pub use fs::Options;
use later::Later;
pub use read::Reading;
use readers::Readers;
use session::{Session, Setup};
pub use switch::Uring;

/// Threads that serve the kernel. Calls that have to wait keep none of them for long (`later`).
const THREADS: usize = 8;
/// The least that the kernel takes as the most bytes of a write.
const LEAST_WRITE: u32 = 4096;
/// How often memory of what the data files have is freed.
const TURN: Duration = Duration::from_millis(500);

/// A directory in which a volume is mounted.
pub struct Mounted {
    session: Option<Session>,
    commits: Option<JoinHandle<()>>,
    /// Those of calls that wait.
    later: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    directory: PathBuf,
    /// Whether it was taken away from the directory, so that there is nothing to unmount.
    left: AtomicBool,
}

/// What the threads of a mount share.
struct Shared {
    fs: Fs,
    later: Later,
    readers: Arc<Readers>,
    /// To tell the kernel that something it knows is so no longer.
    kernel: OnceLock<Arc<Device>>,
    /// Files of which the kernel is to forget what it knows, and how often that was found.
    stale: Mutex<BTreeMap<u64, u64>>,
    ends: AtomicBool,
    /// There is something for the thread that commits.
    turn: Event,
}

impl Mounted {
    /// Mounts `volume`, which this process has attached and nothing else uses, over
    /// `directory`.
    ///
    /// # Errors
    /// `Damaged` if the file of names is; `Io` if the system does not let this process mount.
    pub fn over(volume: Volume, directory: &Path, options: Options) -> Result<Mounted> {
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        let source = flags::source(options.source.as_deref(), volume.name());
        let most_waiting = options.most_waiting.min(volume.most_at_once());
        let options = Options {
            most_waiting,
            ..options
        };
        let (flags, uring) = (options.flags, options.uring);
        let fs = Fs::open(volume, options, uid.as_raw(), gid.as_raw())?;
        let shared = Arc::new(Shared::new(fs));
        let server = Arc::new(fuse::Server::new(shared.clone()));
        let setup = Setup {
            directory,
            source,
            flags,
            wanted: fuse::WANTED,
            // A larger one would not go into the log beside anything else.
            most_write: u32::try_from(most_waiting / 2)
                .unwrap_or(init::MOST)
                .clamp(LEAST_WRITE, init::MOST),
            threads: THREADS,
            uring,
        };
        let session = Session::begin(server, setup)?;
        let _ = shared.kernel.set(session.device());
        let mut mounted = Mounted {
            session: Some(session),
            commits: None,
            later: Vec::new(),
            shared: shared.clone(),
            directory: directory.to_owned(),
            left: AtomicBool::new(false),
        };
        let start = |name: &str, work: fn(&Shared)| {
            let (thread, shared) = (std::thread::Builder::new(), shared.clone());
            let started = thread.name(name.into()).spawn(move || work(&shared));
            started.context(|| "starting a thread".into())
        };
        mounted.commits = Some(start("mojim-commit", Shared::commit_now_and_then)?);
        let sync_points = |s: &Shared| s.later.wait_for_sync_points(&s.fs);
        mounted.later.push(start("mojim-waits", sync_points)?);
        let calls = |s: &Shared| s.later.make_calls(&s.fs);
        mounted.later.push(start("mojim-calls", calls)?);
        let killed = |s: &Shared| s.later.answer_killed(&s.fs);
        mounted.later.push(start("mojim-killed", killed)?);
        let reads = shared.readers.begin();
        reads.context(|| "starting a thread".into())?;
        Ok(mounted)
    }

    /// Whether the kernel's requests come over io_uring.
    pub fn is_over_uring(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_over_uring)
    }

    /// Where it is mounted.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether somebody has unmounted it.
    pub fn is_over(&self) -> bool {
        self.session.as_ref().is_none_or(Session::is_over)
    }

    /// Whether nothing can be committed here any more, since another node is the primary.
    pub fn is_stale(&self) -> bool {
        matches!(self.shared.fs.volume().check(), Err(Error::Stale(_)))
    }

    /// Takes the directory away in this process's namespace, unless somebody uses it there. Programs
    /// in other mount namespaces keep it; [`Mounted::is_over`] says when the last of them is gone.
    ///
    /// # Errors
    /// Somebody uses it, or the helper fails that unmounts for who is not root.
    pub fn leave(&self) -> Result<()> {
        self.take_away(UnmountFlags::empty())
    }

    /// The same also if somebody uses it: nobody comes to it any more; who is there stays.
    ///
    /// # Errors
    /// As of [`Mounted::leave`].
    pub fn hide(&self) -> Result<()> {
        self.take_away(UnmountFlags::DETACH)
    }

    fn take_away(&self, flags: UnmountFlags) -> Result<()> {
        mounting::take_away(&self.directory, flags)?;
        self.left.store(true, SeqCst);
        Ok(())
    }

    /// Whether a process, in whichever namespace, has a file of it open (a directory does not count).
    pub fn is_open(&self) -> bool {
        self.shared.fs.is_open()
    }

    /// Has the kernel forget what it knows of files, so that who still has them open, or mapped, is not
    /// shown it after the end.
    pub fn forget(&self) {
        let Some(kernel) = self.shared.kernel.get() else {
            return;
        };
        for ino in self.shared.fs.inodes() {
            // It may know nothing of that file.
            let _ = kernel.inval_inode(ino, 0, 0);
        }
    }

    /// Unmounts, commits what is not committed, and detaches the volume. Programs that still have
    /// files open there get ESTALE from then on.
    ///
    /// # Errors
    /// What could not be committed, or was lost; the directory is unmounted all the same.
    pub fn end(mut self) -> Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> Result<()> {
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        if !session.is_over() {
            self.write_back();
        }
        let unmounted = directory::unmount(&session, &self.directory, self.left.load(SeqCst));
        self.shared.ends.store(true, SeqCst);
        self.shared.turn.notify();
        if let Some(t) = self.commits.take() {
            // A thread that panicked has reported it.
            let _ = t.join();
        }
        let fs = &self.shared.fs;
        // What programs have stored while the directory was taken away.
        self.write_back();
        fs.end();
        let synced = fs.sync_all();
        self.forget();
        fs.clear();
        // What waited was committed, or could not be.
        self.shared.later.end();
        self.shared.readers.end();
        for t in self.later.drain(..) {
            let _ = t.join();
        }
        let told = |what: &str, e: rustix::io::Errno| {
            let what = format!("{what} {}", self.directory.display());
            Error::io(what, &std::io::Error::from(e))
        };
        let synced = synced.map_err(|e| told("committing what was in", e));
        // Who stored it may have had no call that could be told.
        let taken = fs.lost.check_ever();
        let taken = taken.map_err(|e| told("taking all stores into mappings of files in", e));
        synced.and(taken).and(fs.volume().detach()).and(unmounted)
    }

    /// What programs stored into mappings of files that are open comes here, and is committed:
    /// nothing does once the directory is taken away. (`syncfs` does not wait for that.) What does
    /// not come is lost, and known as such.
    fn write_back(&self) {
        let Some(kernel) = self.shared.kernel.get() else {
            return;
        };
        for ino in self.shared.fs.open_inodes() {
            // The kernel writes what it forgets. If a write fails, that is known by it; and what the
            // kernel knows nothing of, or has no connection for any more, is not there to be written.
            let _ = kernel.inval_inode(ino, 0, 0);
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            tracing::error!("{e}");
        }
    }
}

impl Shared {
    fn new(fs: Fs) -> Shared {
        Shared {
            fs,
            later: Later::default(),
            readers: Readers::new(),
            kernel: OnceLock::new(),
            stale: Mutex::default(),
            ends: AtomicBool::new(false),
            turn: Event::new(),
        }
    }

    /// The kernel knows something of the file that is not so. Whoever says that waits for the kernel's
    /// turn, or is waited for: so the thread that commits has it forget, and who opens the file before.
    fn add_stale(&self, ino: u64) {
        *lock(&self.stale).entry(ino).or_default() += 1;
    }

    fn stale_has(&self, ino: u64) -> bool {
        lock(&self.stale).contains_key(&ino)
    }

    fn forget_stale(&self) {
        let Some(kernel) = self.kernel.get() else {
            return;
        };
        let stale = lock(&self.stale).clone();
        for (ino, times) in stale {
            // It may know nothing of that file.
            let _ = kernel.inval_inode(ino, 0, 0);
            let mut stale = lock(&self.stale);
            if stale.get(&ino) == Some(&times) {
                stale.remove(&ino);
            }
        }
    }

    /// Commits what no program has committed, at the configured interval.
    fn commit_now_and_then(&self) {
        let interval = self.fs.options().commit_interval.unwrap_or(Duration::MAX);
        let turn = TURN.min(interval);
        let mut waited = Duration::ZERO;
        while !self.ends.load(SeqCst) {
            let begun = Instant::now();
            let has_turn = || self.ends.load(SeqCst) || !lock(&self.stale).is_empty();
            self.turn.wait_unless(has_turn, turn);
            self.forget_stale();
            waited += begun.elapsed();
            if waited >= interval {
                waited = Duration::ZERO;
                // What could not be committed is said there, and tried again.
                let _ = self.fs.tick();
            }
            if self.fs.forget_applied() {
                mojim_env::reserve::trim();
            }
        }
    }
}
