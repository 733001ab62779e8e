//! A mount that only shows: the files of a volume as a node that follows has them, whole sync
//! points only.
//!
//! Owns which view programs see: a new one is made when the node shows another LSN. Files are read
//! from the node, question by question.
//!
//! Invariants:
//! - A call shows the volume as of one LSN: names and attributes of one view, the bytes of one
//!   answer. The kernel keeps nothing of it.
//! - A descriptor of a file has its number in the volume.
//! - Nothing changes the volume. While the node does not answer, calls fail.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim::ReaderFiles;
use mojim_env::Error;
use mojim_env::locks::lock;
use rustix::io::Errno;

use crate::calls::{Call, Calls, Request};
use crate::directory;
use crate::flags::{self, Flags};
use crate::fs::{Result, Seen, now};
use crate::fuse::attr;
use crate::init;
use crate::name_table::Kind;
use crate::open_dirs::{Listing, OpenDirs};
use crate::reply::{Entries, EntryOut, Reply, Space, opened};
use crate::session::{Session, Setup};
use crate::shown::Shown;
use crate::switch::Uring;
use crate::tree::{Asker, NAMES, Node};

/// Threads that answer the kernel.
const THREADS: usize = 4;
/// Names and attributes are looked for again after so long.
const FRESH: Duration = Duration::from_millis(20);
/// And after so many times what it took, since with many files it takes long; at the latest after
/// [`STALE`].
const PART: u32 = 4;
const STALE: Duration = Duration::from_millis(500);
/// What is asked for of what the kernel offers. FUSE_ASYNC_DIO is not, as in `fuse`, though nothing is
/// written.
const WANTED: u64 = {
    // The pages of private mappings are dropped when a size or time changes. So listings come without
    // attributes: those of an old one would change sizes back. The kernel would keep none of them.
    init::AUTO_INVAL_DATA | init::PARALLEL_DIROPS
};
/// A directory in which a volume is shown.
pub struct Reading {
    session: Option<Session>,
    directory: PathBuf,
}

impl Reading {
    /// The file of a volume whose bytes are to be part of a listing.
    pub const KEEPS: &str = NAMES;

    /// Shows `files`, whose listing keeps [`Reading::KEEPS`], over `directory`, which allows what `flags`
    /// say, but changes. `source` is as in [`Options`](crate::Options).
    ///
    /// # Errors
    /// What the node says; `Damaged` if the file of names is; `Io` if the system does not let this
    /// process mount.
    pub fn over(
        files: ReaderFiles,
        directory: &Path,
        flags: Flags,
        source: Option<&str>,
    ) -> mojim_env::Result<Reading> {
        let source = flags::source(source, files.name());
        let shows = Shows::new(files);
        shows.refresh(&mut lock(&shows.tree))?;
        let setup = Setup {
            directory,
            source,
            flags: Flags {
                read_only: true,
                ..flags
            },
            wanted: WANTED,
            most_write: init::MOST,
            threads: THREADS,
            // A call may wait for the node, in the thread that serves: there are several.
            uring: Uring::Off,
        };
        let session = Session::begin(Arc::new(Server { shows }), setup)?;
        Ok(Reading {
            session: Some(session),
            directory: directory.to_owned(),
        })
    }

    /// Whether somebody has unmounted it.
    pub fn is_over(&self) -> bool {
        self.session.as_ref().is_none_or(Session::is_over)
    }

    /// Unmounts. Who has a file open there can read it on, as long as this process runs.
    ///
    /// # Errors
    /// The directory stays, as the system says.
    pub fn end(mut self) -> mojim_env::Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> mojim_env::Result<()> {
        match self.session.take() {
            Some(session) => directory::unmount(&session, &self.directory, false),
            None => Ok(()),
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            tracing::error!("{e}");
        }
    }
}

/// What the kernel is told of a node: it keeps nothing of it.
fn found(s: &Seen) -> EntryOut {
    EntryOut {
        attr: attr(s),
        // A file's number tells it from others that have had its node's number.
        generation: match s.attributes.kind {
            Kind::File(number) => number.into(),
            _ => 0,
        },
        kept: Duration::ZERO,
    }
}

/// What is shown now.
#[derive(Default)]
struct Latest {
    shown: Option<Arc<Shown>>,
    /// When it is looked whether there is something newer.
    until: Option<Instant>,
}

struct Shows {
    files: ReaderFiles,
    tree: Mutex<Latest>,
    dirs: OpenDirs,
    /// Of what the volume does not say whose it is, or since when.
    asker: Asker,
    /// Why the node does not answer: each reason is said once.
    trouble: Mutex<Option<String>>,
}

impl Shows {
    fn new(files: ReaderFiles) -> Shows {
        Shows {
            files,
            tree: Mutex::default(),
            dirs: OpenDirs::new(),
            asker: Asker {
                uid: rustix::process::getuid().as_raw(),
                gid: rustix::process::getgid().as_raw(),
                now: now(),
            },
            trouble: Mutex::default(),
        }
    }

    /// Names and attributes, as new as [`FRESH`] and [`STALE`] say.
    fn now(&self) -> Result<Arc<Shown>> {
        self.fresh(&mut lock(&self.tree))
    }

    fn fresh(&self, latest: &mut Latest) -> Result<Arc<Shown>> {
        if let Some(shown) = &latest.shown
            && latest.until.is_some_and(|until| Instant::now() < until)
        {
            return Ok(shown.clone());
        }
        let done = self.refresh(latest);
        self.said(done)
    }

    fn refresh(&self, latest: &mut Latest) -> mojim_env::Result<Arc<Shown>> {
        let begun = Instant::now();
        latest.until = None;
        let version = latest.shown.as_ref().map(|s| s.version);
        let new = self.files.look(|l| {
            (version != Some(l.version())).then(|| {
                let kept = l.kept().map(|(number, bytes)| (number, bytes.to_vec()));
                let files = l.files().map(|(n, name, size)| (n, name.to_owned(), size));
                (l.version(), kept, files.collect::<Vec<_>>())
            })
        })?;
        let shown = match (new, &latest.shown) {
            (Some((version, kept, files)), _) => {
                let kept = kept.as_ref().map(|(n, b)| (*n, &b[..]));
                let before = latest.shown.as_deref();
                let new = Shown::of(version, kept, files, before, self.asker);
                let new = new.map_err(|what| Error::Damaged {
                    path: self.files.directory().join(NAMES),
                    what,
                })?;
                if let Some(before) = before {
                    self.dirs.keep(before, &new);
                }
                Arc::new(new)
            }
            (None, Some(shown)) => shown.clone(),
            (None, None) => unreachable!("there is no version yet"),
        };
        latest.shown = Some(shown.clone());
        let pause = (begun.elapsed() * PART).clamp(FRESH, STALE);
        latest.until = Some(Instant::now() + pause);
        Ok(shown)
    }

    /// What a call that asked the node comes to: programs get a number alone.
    fn said<T>(&self, done: mojim_env::Result<T>) -> Result<T> {
        let mut trouble = lock(&self.trouble);
        let node = self.files.node();
        match done {
            Ok(t) => {
                if trouble.take().is_some() {
                    tracing::info!("node {node} can be read again");
                }
                Ok(t)
            }
            Err(e) => {
                let why = e.to_string();
                if trouble.as_ref() != Some(&why) {
                    tracing::error!("node {node} cannot be read, calls fail with EIO: {why}");
                    *trouble = Some(why);
                }
                Err(Errno::IO)
            }
        }
    }

    /// Opens a file: its number.
    fn open(&self, ino: u64) -> Result<u32> {
        let file = self.now()?.node(ino)?.file().ok_or(Errno::ISDIR)?;
        if self.said(self.files.has(file))? {
            return Ok(file);
        }
        // The kernel looks once more for the name, which is another file's by now, or nothing's.
        lock(&self.tree).until = None;
        Err(Errno::STALE)
    }

    /// Opens a directory: its handle.
    fn open_dir(&self, ino: u64) -> Result<u64> {
        // What the next view lacks is kept for those that are open before.
        let mut latest = lock(&self.tree);
        let shown = self.fresh(&mut latest)?;
        self.dirs.open(&shown, ino)
    }

    fn read(&self, file: u32, offset: u64, size: u32) -> Result<Vec<u8>> {
        let range = offset..offset.saturating_add(size.into());
        let bytes = self.said(self.files.read(file, range))?;
        bytes.ok_or(Errno::STALE)
    }
}

struct Server {
    shows: Shows,
}

impl Server {
    fn attributes(&self, ino: u64) -> Result<Seen> {
        let shown = self.shows.now()?;
        match shown.node(ino) {
            Ok(node) => Ok(shown.seen(node)),
            Err(e) => self.shows.dirs.removed(ino).ok_or(e),
        }
    }

    /// Asks the tree about a node.
    fn of<T>(&self, ino: u64, f: impl FnOnce(&Shown, &Node) -> Result<T>) -> Result<T> {
        let shown = self.shows.now()?;
        f(&shown, shown.node(ino)?)
    }
}

impl Calls for Server {
    fn call(&self, req: &Request<'_>, call: Call<'_>, reply: Reply) {
        let ino = req.ino;
        match call {
            Call::Lookup(name) => match self.shows.now().and_then(|s| s.named(ino, name)) {
                Ok(s) => reply.found(&found(&s)),
                Err(e) => reply.error(e),
            },
            Call::GetAttr => match self.attributes(ino) {
                Ok(s) => reply.attr(&attr(&s), Duration::ZERO),
                Err(e) => reply.error(e),
            },
            Call::ReadLink => match self.of(ino, |_, node| target(node)) {
                Ok(t) => reply.data(t),
                Err(e) => reply.error(e),
            },
            Call::Open(flags) => self.open(ino, flags, reply),
            Call::Read {
                handle,
                offset,
                size,
            } => match self.shows.read(handle as u32, offset, size) {
                Ok(bytes) => reply.data(bytes),
                Err(e) => reply.error(e),
            },
            Call::OpenDir => match self.shows.open_dir(ino) {
                Ok(handle) => reply.opened(handle, 0),
                Err(e) => reply.error(e),
            },
            Call::ReadDir {
                handle,
                offset,
                size,
                plus: false,
            } => self.list((handle, offset), Entries::new(size), reply),
            Call::ReleaseDir(handle) => {
                self.shows.dirs.close(handle);
                reply.ok();
            }
            Call::Release(_) => reply.ok(),
            Call::StatFs => self.space(reply),
            Call::GetXattr(name, room) => {
                let value = self.of(ino, |shown, node| {
                    let value = shown.tree.xattr(node.ino, name)?;
                    Ok(value.to_vec())
                });
                reply.value(room, value);
            }
            Call::ListXattr(room) => {
                let names = self.of(ino, |shown, node| {
                    let names = shown.tree.xattrs(node.ino)?;
                    Ok(names.flat_map(|n| [n, b"\0"].concat()).collect())
                });
                reply.value(room, names);
            }
            // Nothing is there to be synced, and where holes are nobody knows: the kernel does without.
            // Attributes with a listing are not asked for.
            Call::Sync | Call::SyncDir | Call::Seek { .. } | Call::ReadDir { plus: true, .. } => {
                reply.error(Errno::NOSYS);
            }
            // What changes something comes here only if somebody has mounted the directory anew to be
            // written (`mount -o remount,rw`).
            _ => reply.error(Errno::ROFS),
        }
    }

    fn forget(&self, _ino: u64, _times: u64) {}
}

fn target(node: &Node) -> Result<Vec<u8>> {
    match &node.attributes.kind {
        Kind::Link(target) => Ok(target.clone()),
        _ => Err(Errno::INVAL),
    }
}

impl Server {
    fn open(&self, ino: u64, flags: i32, reply: Reply) {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.error(Errno::ROFS);
        }
        match self.shows.open(ino) {
            // The kernel keeps no bytes: each read asks the node. Shared mappings are refused by it.
            Ok(n) => reply.opened(n.into(), opened::DIRECT_IO),
            Err(e) => reply.error(e),
        }
    }

    /// What the directory `handle` has. At `offset` 0 a listing begins.
    fn listing(&self, handle: u64, offset: u64) -> Result<Arc<Listing>> {
        let dirs = &self.shows.dirs;
        if offset > 0
            && let Some(listing) = dirs.listing(handle)?
        {
            return Ok(listing);
        }
        let shown = self.shows.now()?;
        dirs.begin(handle, &shown)
    }

    /// Lists a directory from a place of its listing on, into `entries`.
    fn list(&self, (handle, offset): (u64, u64), mut entries: Entries, reply: Reply) {
        let listing = match self.listing(handle, offset) {
            Ok(listing) => listing,
            Err(e) => return reply.error(e),
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (i, e) in listing.entries.iter().enumerate().skip(from) {
            if !entries.add((e.ino, e.kind), i as u64 + 1, &e.name, None) {
                break;
            }
        }
        reply.entries(entries);
    }

    fn space(&self, reply: Reply) {
        let nodes = self.shows.now().map(|s| s.tree.counts());
        let at = self.shows.files.directory();
        match nodes.and_then(|n| Ok((n, rustix::fs::statvfs(at)?))) {
            Ok((nodes, s)) => reply.space(&Space {
                blocks: s.f_blocks,
                free: s.f_bfree,
                available: s.f_bavail,
                files: nodes + s.f_ffree,
                free_files: s.f_ffree,
                block: s.f_bsize as u32,
                fragment: s.f_frsize as u32,
            }),
            Err(e) => reply.error(e),
        }
    }
}
