//! A mount that only shows: the files of a volume as a node that follows has them, whole sync
//! points only.
//!
//! Owns what programs see of names and attributes: a tree, as of one LSN, that is made anew when
//! the node shows another one. Files are read from the node, question by question.
//!
//! Invariants:
//! - What a call shows is as of one LSN: names and attributes of one tree, the bytes of one
//!   answer. The kernel keeps nothing of it.
//! - A number that the kernel knows means one file or directory for as long as the mount lasts,
//!   whatever the tree. A descriptor has its file's number in the volume.
//! - Nothing changes the volume. While the node does not answer, calls fail.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mojim::ReaderFiles;
use mojim_env::Error;
use rustix::io::Errno;

use crate::calls::{Call, Calls, Request};
use crate::directory;
use crate::flags::{self, Flags};
use crate::fs::{Entry, Result, Seen, lock, now};
use crate::fuse::{attr, kind};
use crate::init;
use crate::name_table::Kind;
use crate::reply::{Entries, EntryOut, Reply, Space, opened};
use crate::session::{Session, Setup};
use crate::switch::Uring;
use crate::tree::{Asker, NAMES, Node, ROOT, Tree};

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
    // The pages of private mappings are dropped when a size or time changes.
    init::AUTO_INVAL_DATA | init::DO_READDIRPLUS | init::READDIRPLUS_AUTO | init::PARALLEL_DIROPS
};
/// Numbers of files that the file of names does not have, with that of the file behind it.
const FILES: u64 = 1 << 50;
/// The same of directories, with a number of ours behind it.
const DIRS: u64 = 1 << 51;

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
        let server = Server {
            shows,
            readings: Mutex::default(),
            next: AtomicU64::new(1),
        };
        let setup = Setup {
            directory,
            source,
            flags: Flags {
                read_only: true,
                ..flags
            },
            wanted: WANTED,
            threads: THREADS,
            // A call may wait for the node, in the thread that serves: there are several.
            uring: Uring::Off,
        };
        let session = Session::begin(Arc::new(server), setup)?;
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

/// Names and attributes as of one LSN.
struct Shown {
    /// That of the listing.
    version: u64,
    tree: Tree,
    sizes: HashMap<u32, u64>,
    /// The kernel's numbers of nodes that the file of names does not have, and the tree's.
    outer: HashMap<u64, u64>,
    inner: HashMap<u64, u64>,
}

impl Shown {
    /// The node of a number that the kernel knows.
    fn node(&self, ino: u64) -> Result<&Node> {
        let inner = self.inner.get(&ino).copied();
        match inner {
            Some(inner) => self.tree.node(inner),
            // In the tree it may be another one's.
            None if self.outer.contains_key(&ino) => Err(Errno::STALE),
            None => self.tree.node(ino),
        }
    }

    fn seen(&self, node: &Node) -> Seen {
        let size = match &node.attributes.kind {
            Kind::Link(target) => target.len() as u64,
            Kind::File(number) => self.sizes.get(number).copied().unwrap_or(0),
            _ => 0,
        };
        Seen {
            ino: self.outer.get(&node.ino).copied().unwrap_or(node.ino),
            attributes: node.attributes.clone(),
            size,
            blocks: size.div_ceil(512),
            is_sure: true,
            links: Tree::links(node),
        }
    }

    /// What has a name in a directory, which may be `.` or `..`.
    fn named(&self, dir: u64, name: &[u8]) -> Result<Seen> {
        let dir = self.node(dir)?;
        let ino = match name {
            b"." => dir.ino,
            b".." => self.tree.parent(dir.ino),
            name => self.tree.lookup(dir.ino, name)?,
        };
        Ok(self.seen(self.tree.node(ino)?))
    }

    fn entries(&self, dir: u64) -> Result<Vec<Entry>> {
        let node = self.node(dir)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let names = [&b"."[..], b".."].map(<[u8]>::to_vec).into_iter();
        let names = names.chain(node.children.keys().cloned());
        let entry = |name: Vec<u8>| {
            let ino = self.named(dir, &name)?.ino;
            Ok(Entry { name, ino })
        };
        names.map(entry).collect()
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
    /// Numbers of directories that the file of names does not have, by path.
    dirs: HashMap<Vec<u8>, u64>,
}

struct Shows {
    files: ReaderFiles,
    tree: Mutex<Latest>,
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
        let mut latest = lock(&self.tree);
        if let Some(shown) = &latest.shown
            && latest.until.is_some_and(|until| Instant::now() < until)
        {
            return Ok(shown.clone());
        }
        let done = self.refresh(&mut latest);
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
                self.tree_of(version, kept, files, &mut latest.dirs)?
            }
            (None, Some(shown)) => shown.clone(),
            (None, None) => unreachable!("there is no version yet"),
        };
        latest.shown = Some(shown.clone());
        let pause = (begun.elapsed() * PART).clamp(FRESH, STALE);
        latest.until = Some(Instant::now() + pause);
        Ok(shown)
    }

    fn tree_of(
        &self,
        version: u64,
        names: Option<(u32, &[u8])>,
        mut files: Vec<(u32, String, u64)>,
        dirs: &mut HashMap<Vec<u8>, u64>,
    ) -> mojim_env::Result<Arc<Shown>> {
        files.retain(|f| f.1 != NAMES);
        let tree = Tree::load(names, &files, Vec::new(), self.asker, 1);
        let tree = tree.map_err(|what| Error::Damaged {
            path: self.files.directory().join(NAMES),
            what,
        })?;
        let mut shown = Shown {
            version,
            sizes: files.iter().map(|f| (f.0, f.2)).collect(),
            outer: HashMap::new(),
            inner: HashMap::new(),
            tree,
        };
        for node in shown.tree.nodes().filter(|n| !n.is_kept()) {
            let outer = match node.file() {
                _ if node.ino == ROOT => continue,
                Some(number) => FILES + u64::from(number),
                None => {
                    let next = DIRS + dirs.len() as u64;
                    *dirs.entry(shown.tree.path(node)).or_insert(next)
                }
            };
            shown.outer.insert(node.ino, outer);
            shown.inner.insert(outer, node.ino);
        }
        Ok(Arc::new(shown))
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

    fn read(&self, file: u32, offset: u64, size: u32) -> Result<Vec<u8>> {
        let range = offset..offset.saturating_add(size.into());
        let bytes = self.said(self.files.read(file, range))?;
        bytes.ok_or(Errno::STALE)
    }
}

/// A directory's entries, as of the moment when its reading began.
type Listed = Arc<(Arc<Shown>, Vec<Entry>)>;

struct Server {
    shows: Shows,
    /// Directories that are being read.
    readings: Mutex<HashMap<u64, Listed>>,
    next: AtomicU64,
}

impl Server {
    /// What was in a directory when its reading began; it begins anew at offset 0.
    fn reading(&self, ino: u64, handle: u64, offset: u64) -> Result<Listed> {
        if offset > 0
            && let Some(r) = lock(&self.readings).get(&handle)
        {
            return Ok(r.clone());
        }
        let shown = self.shows.now()?;
        let entries = shown.entries(ino)?;
        let reading = Arc::new((shown, entries));
        lock(&self.readings).insert(handle, reading.clone());
        Ok(reading)
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
            Call::GetAttr => match self.of(ino, |shown, node| Ok(shown.seen(node))) {
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
            Call::OpenDir => reply.opened(self.next.fetch_add(1, Relaxed), 0),
            Call::ReadDir {
                handle,
                offset,
                size,
                plus,
            } => self.list(ino, (handle, offset), Entries::new(size), plus, reply),
            Call::ReleaseDir(handle) => {
                lock(&self.readings).remove(&handle);
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
            Call::Sync | Call::SyncDir | Call::Seek { .. } => reply.error(Errno::NOSYS),
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

    /// Lists a directory from a place of the reading `handle`, into `entries`.
    fn list(
        &self,
        ino: u64,
        (handle, offset): (u64, u64),
        mut entries: Entries,
        plus: bool,
        reply: Reply,
    ) {
        let listed = match self.reading(ino, handle, offset) {
            Ok(listed) => listed,
            Err(e) => return reply.error(e),
        };
        let (shown, all) = &*listed;
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (i, e) in all.iter().enumerate().skip(from) {
            let Ok(s) = shown.node(e.ino).map(|n| shown.seen(n)) else {
                continue;
            };
            let found = plus.then(|| found(&s));
            let (node, next) = ((s.ino, kind(&s.attributes.kind)), i as u64 + 1);
            if !entries.add(node, next, &e.name, found.as_ref()) {
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
