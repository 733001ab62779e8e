//! A reader: a process on a node that follows, whose mappings show whole sync points only.
//!
//! The node is the mirror, or a backup. The mappings are read-only (Mojim 4.2).
//!
//! Owns the attachment, its two threads, and the table of its regions' addresses. `view` owns what
//! the regions show, `source` the questions to the node. `files` owns what is known of files by
//! those who read them without mappings.
//!
//! The two threads:
//!
//! - One **follows**: it asks for the records after the LSN that is shown, and advances the view by
//!   them.
//! - The other answers **faults**: it asks for the page, and for the records up to the LSN as of
//!   which the page is.
//!
//! Invariants:
//!
//! - Only answers advance the view, each as of one LSN, under one lock. If the view has changed
//!   since the question was asked, the answer is used only if it leads on from the present state.
//! - No thread holds the lock while the node is asked, and neither of the two threads touches a
//!   region.
//! - A thread that holds the lock ([`LockedView`]) runs no signal handler of the program. Nor does
//!   one in `map`, `size`, `read` or `unmap`. The handler might touch a region. The thread that
//!   answers its fault needs the lock, and allocates as these calls do.
//! - The view goes back only if the node's copy took another history.

pub mod files;
mod source;
pub mod view;

use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use self::source::{ATTACH, Answer, Link, PAUSE, Source, Which, is_final};
use self::view::{MapRequest, Mark, PAGE, View};
use mojim_config::Config;
use mojim_env::event::Event;
use mojim_env::locks::lock;
use mojim_env::threads::{SignalsWait, block_signals};
use mojim_env::{Context, Error, Result, descriptors};
use mojim_memory::fork::{Watch, check_fork, watch_forks};
use mojim_memory::places::{self, Claim};
use mojim_memory::region::{MapFlags, Mapping};
use mojim_memory::uffd;
use mojim_replica::client::READ_PAGES;
use mojim_replica::layout;

/// How long the node lets a question wait for a new record.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Settings of a reader.
#[derive(Debug, Clone, Copy)]
pub struct ReaderOptions {
    /// How long a thread that touches a page which is not there waits for the
    /// node, before it gets SIGBUS.
    pub patience: Duration,
    /// Most bytes of pages that are kept; the oldest go first.
    pub memory: usize,
}

impl Default for ReaderOptions {
    fn default() -> ReaderOptions {
        ReaderOptions {
            patience: Duration::from_secs(30),
            memory: 1 << 30,
        }
    }
}

/// A volume that this process reads, on a node that follows.
///
/// Cheap to clone; it stays attached until [`Reader::detach`] or the end of the
/// process.
#[derive(Clone)]
pub struct Reader(Arc<Inner>);

struct Inner {
    name: String,
    node: String,
    directory: PathBuf,
    options: ReaderOptions,
    source: Source,
    uffd: Arc<OwnedFd>,
    view: Mutex<View>,
    /// The LSN that the view shows.
    shown: Arc<AtomicU64>,
    /// Wakes threads that wait for `shown` to grow, and the thread that follows.
    news: Event,
    /// Why the node did not answer the last time; none if it did.
    trouble: Mutex<Option<Error>>,
    /// A page was given up since the node last answered.
    gave_up: AtomicBool,
    stop: AtomicBool,
    /// An eventfd that ends the wait for faults.
    bell: OwnedFd,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Until it is detached.
    watch: Mutex<Option<Watch>>,
}

/// The regions of all readers of this process.
static REGIONS: Mutex<Vec<(Range<usize>, Arc<Inner>)>> = Mutex::new(Vec::new());

/// The view, locked. The thread's signals are blocked meanwhile.
struct LockedView<'a> {
    // Dropped in this order.
    view: MutexGuard<'a, View>,
    _signals: SignalsWait,
}

impl Deref for LockedView<'_> {
    type Target = View;
    fn deref(&self) -> &View {
        &self.view
    }
}

impl DerefMut for LockedView<'_> {
    fn deref_mut(&mut self) -> &mut View {
        &mut self.view
    }
}

/// Whether an answer could be used.
enum Taken {
    /// The view is as of the answer's LSN.
    Now,
    /// The view has changed meanwhile: ask again.
    Stale,
}

impl Reader {
    /// Attaches this process to a volume, to read what node `node` shows of it.
    ///
    /// Reads the configuration at `config`; `volume` may be left out if it has
    /// only one. The node's daemon must run, on this host.
    ///
    /// # Errors
    /// `Answered` with ESTALE if the node is the volume's primary, with EINVAL if it
    /// is the mirror in mode sync-disk, with EBUSY if it has nothing to show within
    /// 5 s; the socket's error (`Io`) if the daemon cannot be reached within 5 s;
    /// `Unsupported` if the kernel has no userfaultfd for this (Linux 6.6).
    pub fn attach(config: &Path, node: &str, volume: Option<&str>) -> Result<Reader> {
        let config = mojim_linux::trust::load(config)?;
        Reader::attach_with(&config, node, volume, ReaderOptions::default())
    }

    /// [`Reader::attach`] with a configuration in memory, and with options.
    pub fn attach_with(
        config: &Config,
        node: &str,
        volume: Option<&str>,
        options: ReaderOptions,
    ) -> Result<Reader> {
        check_fork()?;
        let watch = watch_forks();
        let (source, node, volume) = Source::of(config, node, volume)?;
        if rustix::param::page_size() != PAGE {
            return Err(Error::Unsupported(format!(
                "readers need pages of {PAGE} bytes, this machine's have {}",
                rustix::param::page_size()
            )));
        }
        let uffd = Arc::new(open_uffd()?);
        let shown = Arc::new(AtomicU64::new(0));
        let most = (options.memory / PAGE).max(4 * READ_PAGES as usize);
        let inner = Arc::new(Inner {
            name: volume.name.clone(),
            node: node.name.clone(),
            directory: layout::data_dir(node, &volume.name),
            options,
            source,
            view: Mutex::new(View::new(uffd.clone(), shown.clone(), most)),
            uffd,
            shown,
            news: Event::default(),
            trouble: Mutex::new(None),
            gave_up: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            bell: descriptors::open(|| eventfd(0, EventfdFlags::CLOEXEC))
                .map_err(std::io::Error::from)
                .context(|| "reading".into())?,
            threads: Mutex::default(),
            watch: Mutex::new(Some(watch)),
        });
        drop(inner.look(Which::None, ATTACH)?);
        inner.start()?;
        Ok(Reader(inner))
    }

    /// Whether this process can use this handle: false in a forked child.
    pub fn is_usable(&self) -> bool {
        check_fork().is_ok()
    }

    /// The volume's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// A number of this attachment, which no other one has while a clone of this is there.
    #[doc(hidden)]
    pub fn attachment(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// Where the node keeps the volume's files.
    pub fn directory(&self) -> PathBuf {
        self.0.directory.clone()
    }

    /// The LSN that the regions show: every sync point up to it, whole, and
    /// nothing of a later one. If it is the same before and after several bytes
    /// are read, these bytes were of one state.
    pub fn shown(&self) -> u64 {
        self.0.shown.load(SeqCst)
    }

    /// Whether the node answered the last time, else why not: then the view
    /// stands still.
    pub fn following(&self) -> Result<()> {
        match &*lock(&self.0.trouble) {
            None => Ok(()),
            Some(e) => Err(e.clone()),
        }
    }

    /// Waits until the regions show everything up to `lsn`.
    pub fn wait(&self, lsn: u64, timeout: Duration) -> Result<()> {
        check_fork()?;
        let end = self.0.source.now() + timeout;
        while self.shown() < lsn {
            let left = end.saturating_sub(self.0.source.now());
            if left.is_zero() || self.0.stop.load(Acquire) {
                let why = match self.following() {
                    Ok(()) => String::new(),
                    Err(e) => format!(" ({e})"),
                };
                return Err(Error::Timeout(format!(
                    "node {} shows volume {} up to LSN {}, not {lsn}{why}",
                    self.0.node,
                    self.0.name,
                    self.shown()
                )));
            }
            self.0.news.wait_unless(|| self.shown() >= lsn, left);
        }
        Ok(())
    }

    /// Size of a file in bytes, if it is there, as of an LSN that is shown when
    /// the call returns.
    pub fn size(&self, file: &str) -> Result<Option<u64>> {
        let _signals = SignalsWait::begin(); // for malloc's lock, too
        check_fork()?;
        let (answer, view) = self.0.look(Which::Named(file), self.0.options.patience)?;
        drop(view);
        Ok(answer.file.map(|(_, f)| f.size))
    }

    /// Maps a file, or a part of it, to be read. `len` 0 means up to its end. A
    /// mapping may reach beyond the end: there it gives SIGBUS until the file has
    /// grown so far. Of `flags` only `offset` and `fixed_at` have an effect;
    /// `create` is refused.
    pub fn map(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        self.map_at(file, len, flags, &|len| {
            Claim::of(file, flags.fixed_at, len)
        })
    }

    /// [`Reader::map`] in place of what is mapped at `fixed_at`; `Busy` if a region, or a part of
    /// one, is mapped there.
    ///
    /// # Safety
    /// The memory there, if any, is the caller's, and nobody uses it from here on, also if the
    /// call fails.
    pub unsafe fn map_over(&self, file: &str, len: usize, flags: MapFlags) -> Result<Mapping> {
        // SAFETY: the caller's promise.
        self.map_at(file, len, flags, &|len| unsafe {
            Claim::over(file, flags.fixed_at, len)
        })
    }

    fn map_at(
        &self,
        file: &str,
        len: usize,
        flags: MapFlags,
        claim: &dyn Fn(usize) -> Result<Option<Claim>>,
    ) -> Result<Mapping> {
        let _signals = SignalsWait::begin(); // for malloc's lock, too
        check_fork()?;
        if flags.create {
            return Err(self.0.read_only(&format!("making {file}")));
        }
        let invalid = |why: String| Err(Error::Invalid(format!("mapping {file}: {why}")));
        if !flags.offset.is_multiple_of(PAGE as u64) {
            return invalid(format!(
                "offset {} is not a multiple of the page size {PAGE}",
                flags.offset
            ));
        }
        let (answer, mut view) = self.0.look(Which::Named(file), self.0.options.patience)?;
        let Some((id, known)) = answer.file else {
            return Err(Error::NotFound(format!(
                "volume {} has no file {file:?} as of LSN {}",
                self.0.name, answer.mark.lsn
            )));
        };
        let len = match len {
            0 => usize::try_from(known.size.saturating_sub(flags.offset)).unwrap_or(usize::MAX),
            len => len,
        };
        let end = flags.offset.checked_add(len as u64);
        if len == 0 || end.is_none_or(|e| e > i64::MAX as u64 - PAGE as u64) {
            return invalid(match len {
                0 => "it is empty there; give a length".into(),
                _ => format!("{len} bytes are too many"),
            });
        }
        let place = MapRequest {
            len,
            offset: flags.offset,
            fixed_at: flags.fixed_at,
        };
        let claim = claim(len)?;
        let start = view.map(id, known, place)?;
        match claim {
            Some(claim) => claim.keep(),
            None => places::add(start, len),
        }
        drop(view);
        lock(&REGIONS).push((start..start + len, self.0.clone()));
        Ok(Mapping {
            ptr: start as *mut u8,
            len,
        })
    }

    /// Reads bytes of a file, up to 64 KiB of them as of one LSN, which is
    /// shown when the call returns. Returns how many were read.
    pub fn read(&self, file: &str, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let _signals = SignalsWait::begin(); // for malloc's lock, too
        check_fork()?;
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let (page, within) = (at - at % PAGE as u64, (at % PAGE as u64) as usize);
            let want = (within + buf.len() - done).div_ceil(PAGE) as u64;
            let which = Which::Named(file);
            let pages = want.min(READ_PAGES);
            let patience = self.0.options.patience;
            let (answer, view) = self.0.look_at(which, page, pages, patience)?;
            drop(view);
            if answer.file.is_none() {
                return Err(Error::NotFound(format!(
                    "volume {} has no file {file:?} as of LSN {}",
                    self.0.name, answer.mark.lsn
                )));
            }
            let Some(bytes) = answer.bytes.get(within..).filter(|b| !b.is_empty()) else {
                break;
            };
            let n = bytes.len().min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
            if answer.bytes.len() < pages as usize * PAGE {
                break;
            }
        }
        Ok(done)
    }

    /// Ends the attachment: all regions are unmapped.
    pub fn detach(&self) -> Result<()> {
        check_fork()?;
        lock(&REGIONS).retain(|(_, r)| !Arc::ptr_eq(r, &self.0));
        let unmapped = self.0.hold().unmap_all();
        self.0.stop.store(true, SeqCst);
        self.0.news.notify();
        // The eventfd cannot be full: nothing else writes to it.
        let _ = rustix::io::write(&self.0.bell, &1u64.to_ne_bytes());
        for t in lock(&self.0.threads).drain(..) {
            // A thread that panicked has reported it.
            let _ = t.join();
        }
        lock(&self.0.watch).take();
        unmapped
    }

    /// For tests: from now on a sync point is shown page by page.
    #[doc(hidden)]
    pub fn mix_pages(&self) {
        self.0.hold().mix.store(true, SeqCst);
    }
}

/// A userfaultfd that also makes faults of system calls wait, if that is allowed.
fn open_uffd() -> Result<OwnedFd> {
    let features = uffd::FEATURE_MISSING_SHMEM | uffd::FEATURE_MINOR_SHMEM | uffd::FEATURE_POISON;
    uffd::open(false, features)
        .or_else(|_| uffd::open(true, features))
        .map_err(|e| {
            Error::Unsupported(format!(
                "reading on a node that follows needs userfaultfd as of Linux 6.6: {e}. Where it is kept from programs (seccomp in a container, for example), allow it"
            ))
        })
}

impl Inner {
    fn read_only(&self, what: &str) -> Error {
        Error::ReadOnly(format!(
            "{what}: volume {} is read on node {} here; only its primary writes",
            self.name, self.node
        ))
    }

    fn hold(&self) -> LockedView<'_> {
        let signals = SignalsWait::begin();
        LockedView {
            view: lock(&self.view),
            _signals: signals,
        }
    }

    fn start(self: &Arc<Inner>) -> Result<()> {
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(format!("mojim-{name}"))
                .spawn(move || {
                    block_signals();
                    f();
                })
                .context(|| "starting a thread".into())
        };
        let mut threads = lock(&self.threads);
        let (a, b) = (self.clone(), self.clone());
        threads.push(spawn("faults", Box::new(move || a.answer_faults()))?);
        threads.push(spawn("follow", Box::new(move || b.follow()))?);
        Ok(())
    }

    /// Asks until the node answers or `patience` ends. The view is returned locked,
    /// and is as of the answer.
    fn look(&self, which: Which<'_>, patience: Duration) -> Result<(Answer, LockedView<'_>)> {
        self.look_at(which, 0, 0, patience)
    }

    fn look_at(
        &self,
        which: Which<'_>,
        offset: u64,
        pages: u64,
        patience: Duration,
    ) -> Result<(Answer, LockedView<'_>)> {
        let mut link = Link::new(&self.source);
        let end = self.source.now() + patience;
        loop {
            if self.stop.load(Acquire) {
                return Err(Error::Invalid(format!(
                    "the reader of volume {} was detached",
                    self.name
                )));
            }
            match self.ask(&mut link, Duration::ZERO, which, offset, pages) {
                Ok((answer, Some(view))) => return Ok((answer, view)),
                Ok((_, None)) => {}
                Err(e) if is_final(&e) || self.source.now() >= end => return Err(e),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Asks once. The view is returned, locked, if it is as of the answer.
    fn ask(
        &self,
        link: &mut Link,
        wait: Duration,
        which: Which<'_>,
        offset: u64,
        pages: u64,
    ) -> Result<(Answer, Option<LockedView<'_>>)> {
        let asked = self.hold().mark();
        let answer = link.ask(asked, wait, which, offset, pages)?;
        let mut view = self.hold();
        let taken = take(&mut view, asked, &answer)?;
        if self.gave_up.swap(false, AcqRel) {
            view.forgive()?;
        }
        match taken {
            Taken::Now => {
                self.news.notify();
                Ok((answer, Some(view)))
            }
            Taken::Stale => Ok((answer, None)),
        }
    }

    fn follow(&self) {
        let mut link = Link::new(&self.source);
        while !self.stop.load(Acquire) {
            let asked = self.ask(&mut link, HEARTBEAT, Which::None, 0, 0);
            let trouble = asked.map(drop).err();
            let failed = trouble.is_some();
            *lock(&self.trouble) = trouble;
            if failed {
                self.news.wait_unless(|| self.stop.load(Acquire), PAUSE);
            }
        }
    }

    fn answer_faults(&self) {
        let mut link = Link::new(&self.source);
        // Addresses of pages whose faults wait, and since when.
        let mut waiting: Vec<(usize, Duration)> = Vec::new();
        let mut told = Vec::new();
        while !self.stop.load(Acquire) {
            let pause = (!waiting.is_empty()).then_some(Timespec {
                tv_sec: 0,
                tv_nsec: PAUSE.as_nanos() as _,
            });
            let mut fds = [
                PollFd::new(&*self.uffd, PollFlags::IN),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            // An error shows at the next read.
            let _ = poll(&mut fds, pause.as_ref());
            if uffd::faults(self.uffd.as_fd(), &mut told).is_err() {
                return;
            }
            let now = self.source.now();
            waiting.extend(told.drain(..).map(|at| (at & !(PAGE - 1), now)));
            let mut heard = true;
            waiting.retain(|&(at, since)| {
                if heard {
                    match self.bring(&mut link, at) {
                        Ok(()) => return false,
                        // The others would fail as well.
                        Err(_) => heard = false,
                    }
                }
                let patient = self.source.now().saturating_sub(since) < self.options.patience;
                if !patient {
                    self.gave_up.store(true, Release);
                    self.hold().poison(at);
                }
                patient
            });
        }
    }

    /// Answers the fault at an address: brings the page in, or makes it give SIGBUS.
    fn bring(&self, link: &mut Link, address: usize) -> Result<()> {
        loop {
            let found = {
                let view = self.hold();
                let found = view.find(address);
                if let Some((.., true)) = found {
                    view.put_in(address);
                }
                found
            };
            let Some((file, offset, false)) = found else {
                return Ok(());
            };
            // Neighbours come with it: a thread that reads on needs them next.
            let block = READ_PAGES * PAGE as u64;
            let from = offset - offset % block;
            let which = Which::Numbered(file);
            let (answer, view) = self.ask(link, Duration::ZERO, which, from, READ_PAGES)?;
            if let Some(mut view) = view {
                view.learn(file, answer.file.map(|(_, f)| f));
                return view.install(address, from, &answer.bytes);
            }
        }
    }
}

/// Advances the view by an answer to a question that was asked when the view
/// showed `asked`.
fn take(view: &mut View, asked: Mark, answer: &Answer) -> Result<Taken> {
    let now = view.mark();
    let (to, same) = (answer.mark, now.life == asked.life);
    match &answer.records {
        Some(records) if same && to.lsn > now.lsn => {
            view.advance(records, to.lsn, to.epoch)?;
            Ok(Taken::Now)
        }
        Some(_) if same && to.lsn == now.lsn => Ok(Taken::Now),
        // Goes back only if the node said so of the state that is shown now.
        None if same && (now == asked || to.lsn > now.lsn) => {
            view.begin_anew(to)?;
            Ok(Taken::Now)
        }
        _ => Ok(Taken::Stale),
    }
}

fn region_at(addr: usize) -> Option<(Range<usize>, Arc<Inner>)> {
    // A forked child has no regions, and a thread of its parent may have held the lock.
    check_fork().ok()?;
    let all = lock(&REGIONS);
    all.iter().find(|(span, _)| span.contains(&addr)).cloned()
}

/// Whether `addr` lies in a reader's region.
pub fn is_region(addr: usize) -> bool {
    region_at(addr).is_some()
}

/// Fails if `addr` lies in a reader's region, which cannot be committed.
pub fn refuse(addr: usize) -> Result<()> {
    match region_at(addr) {
        Some((_, r)) => Err(r.read_only(&format!("a sync point at {addr:#x}"))),
        None => Ok(()),
    }
}

/// Unmaps the reader's region that begins at `addr`. False if `addr` is in no reader's
/// region.
pub fn unmap(addr: *const u8, len: usize) -> Result<bool> {
    let Some((span, r)) = region_at(addr as usize) else {
        return Ok(false);
    };
    if span.start != addr as usize
        || len.next_multiple_of(PAGE) != span.len().next_multiple_of(PAGE)
    {
        return Err(Error::Unsupported(format!(
            "unmapping {len} bytes at {addr:p} of the region of {} bytes at {:#x}: only a whole region can be unmapped",
            span.len(),
            span.start
        )));
    }
    let _signals = SignalsWait::begin(); // for malloc's lock, too
    lock(&REGIONS).retain(|(s, _)| *s != span);
    r.hold().unmap(span.start)?;
    Ok(true)
}
