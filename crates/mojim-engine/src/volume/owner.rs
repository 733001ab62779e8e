//! The owner's end: other processes of the node, the guests, share this one's working copies.
//!
//! Owns the socket on which guests connect, and a thread for each guest, which answers it. A
//! guest's windows are windows of the shared working copies like those of this process. Stores
//! through them are found in the guest's page tables (`track::Remote`).
//!
//! Invariants:
//! - A guest's requests are checked: it changes something only through calls that any process of
//!   this user could make. The addresses that it gives are used in its own memory only.
//! - If a guest ends without `Detach`, its windows' pages count as possibly written.
//! - After `unshare` no guest's request is under way, and none comes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::last;
use crate::share::line::{Line, MOST, Port};
use crate::share::wire::{Part as Wanted, Reply, Request, Shown, VERSION};
use mojim_env::locks::lock;
use mojim_env::threads::SignalsWait;
use mojim_env::{Context, Error, Result};
use mojim_memory::region::MapFlags;
use mojim_memory::track::{Remote, Tracker, Unwatched};
use mojim_replica::layout;

use super::attached::{Inner, Lent, Volume};
use super::sync_point::{Part, Until, nothing, rollback_part, sync_many, sync_range};

/// Most guests at once.
const MOST_GUESTS: usize = 256;
/// Most windows of a guest.
const MOST_WINDOWS: usize = 4096;

impl Inner {
    /// From here on other processes can share the volume.
    pub(crate) fn share(self: &Arc<Inner>) -> Result<()> {
        let mut owner = lock(&self.owner);
        if owner.port.is_some() || owner.closed {
            return Ok(());
        }
        let path = layout::share_socket(&self.node, &self.volume.name);
        let what = || format!("waiting at {} for those who share", path.display());
        let port = Arc::new(Port::listen(&path).context(what)?);
        let (me, at) = (self.clone(), port.clone());
        let thread = std::thread::Builder::new().name("mojim-share".into());
        let accept = move || {
            me.accept(&at);
            Ok(())
        };
        // Signals are the program's: this thread takes none, nor do the threads that it starts.
        let quiet = SignalsWait::begin_but_faults();
        let thread = thread.spawn(accept).context(what)?;
        drop(quiet);
        owner.threads.push(thread);
        owner.port = Some(port);
        Ok(())
    }

    /// Ends the sharing: what the guests have stored is committed, except in atomic windows, as at
    /// their own `Detach`. The caller does not hold `names`, which their requests need.
    pub(super) fn unshare(&self) -> Result<()> {
        let mut owner = lock(&self.owner);
        owner.closed = true;
        if let Some(port) = &owner.port {
            port.close();
        }
        for line in owner.lines.drain(..).filter_map(|l| l.upgrade()) {
            line.close();
        }
        let threads = std::mem::take(&mut owner.threads);
        drop(owner);
        let mut done = Ok(());
        for t in threads {
            // A thread that panicked has reported it.
            done = done.and(t.join().unwrap_or(Ok(())));
        }
        done
    }

    /// A detach failed, and the attachment goes on: shares it again, if it was shared.
    pub(super) fn share_again(self: &Arc<Inner>) -> Result<()> {
        let mut owner = lock(&self.owner);
        owner.closed = false;
        if owner.port.take().is_none() {
            return Ok(());
        }
        drop(owner);
        self.share()
    }

    fn accept(self: &Arc<Inner>, port: &Port) {
        loop {
            match port.accept() {
                Ok(Some(line)) => self.begin(Arc::new(line)),
                Ok(None) => return,
                // A process of another user, or no descriptor is left: later ones may succeed.
                Err(_) => self
                    .stopped
                    .wait_unless(|| lock(&self.owner).closed, Duration::from_millis(10)),
            }
        }
    }

    fn begin(self: &Arc<Inner>, line: Arc<Line>) {
        let mut owner = lock(&self.owner);
        owner.lines.retain(|l| l.strong_count() > 0);
        owner.threads.retain(|t| !t.is_finished());
        if owner.closed {
            return;
        }
        if owner.lines.len() >= MOST_GUESTS {
            let mut out = Vec::new();
            let text = format!(
                "{MOST_GUESTS} processes share volume {} already",
                self.volume.name
            );
            Reply::Failed(Error::Busy(text)).encode(&mut out);
            // If this does not arrive, the end of the line tells the process.
            let _ = line.send(&out, None);
            return;
        }
        owner.lines.push(Arc::downgrade(&line));
        let mut guest = Guest {
            volume: Volume(self.clone()),
            line,
            greeted: false,
            pagemap: None,
            windows: BTreeMap::new(),
            last: 0,
        };
        let thread = std::thread::Builder::new().name("mojim-guest".into());
        // If no thread can be started, the line ends.
        if let Ok(t) = thread.spawn(move || guest.serve()) {
            owner.threads.push(t);
        }
    }
}

/// A guest, as the owner's thread for it knows it.
struct Guest {
    volume: Volume,
    line: Arc<Line>,
    greeted: bool,
    /// None: its stores cannot be watched.
    pagemap: Option<Arc<OwnedFd>>,
    windows: BTreeMap<u64, Window>,
    /// The number given to the latest window.
    last: u64,
}

struct Window {
    lent: Lent,
    /// The working copy's number for this window.
    id: u64,
    /// The part of the file that it shows; empty if it was lent and is not mapped yet.
    span: Range<usize>,
    write: bool,
    atomic: bool,
    /// A forked child has it from its parent: it commits nothing at its end.
    inherited: bool,
}

impl Window {
    /// Whether the window is committed at its end.
    fn commits_at_end(&self) -> bool {
        self.write && !self.atomic && !self.inherited
    }

    /// The part of `len` bytes from `at` on that the window has.
    fn part(&self, at: u64, len: u64) -> Range<usize> {
        let (at, len) = (usize::try_from(at), usize::try_from(len));
        let (at, len) = (at.unwrap_or(usize::MAX), len.unwrap_or(usize::MAX));
        let from = self.span.start.saturating_add(at).min(self.span.end);
        // To the end of the page, since programs round up.
        let shown = self.span.end.next_multiple_of(rustix::param::page_size());
        from..from.saturating_add(len).min(shown)
    }
}

fn done(value: u64, more: u64) -> Reply {
    let lsn = last::last_lsn();
    Reply::Done { lsn, value, more }
}

impl Guest {
    /// Answers until the line ends.
    fn serve(&mut self) -> Result<()> {
        let mut buf = vec![0; MOST];
        let mut out = Vec::new();
        loop {
            // Only the greeting comes with a descriptor.
            let got = match self.greeted {
                true => self.line.recv(&mut buf, None).map(|n| n.map(|n| (n, None))),
                false => self.line.recv_with_fd(&mut buf, None),
            };
            let Ok(Some((n, fd))) = got else { break };
            last::set(0);
            let mut memory = None;
            let reply = match Request::decode(&buf[..n]) {
                Ok(Request::Detach) => self.detach(),
                Ok(request) => self.answer(request, fd, &mut memory),
                Err(e) => Err(Error::Protocol(e.to_string())),
            };
            reply.unwrap_or_else(Reply::Failed).encode(&mut out);
            let memory = memory.as_ref().map(|lent: &Lent| lent.0.fd());
            if self.line.send(&out, memory).is_err() {
                break;
            }
        }
        // Whether this end has closed the line, or the guest.
        let ours = lock(&self.volume.0.owner).closed;
        match ours {
            true => self.detach().map(drop),
            false => Ok(()),
        }
    }

    fn window(&self, number: u64) -> Result<&Window> {
        self.windows
            .get(&number)
            .ok_or_else(|| Error::NotFound(format!("there is no window {number}")))
    }

    fn answer(
        &mut self,
        request: Request,
        fd: Option<OwnedFd>,
        memory: &mut Option<Lent>,
    ) -> Result<Reply> {
        let volume = self.volume.clone();
        if !self.greeted && !matches!(request, Request::Hello { .. }) {
            return Err(Error::Protocol("a request before the greeting".into()));
        }
        match request {
            Request::Hello { version, volume } => self.hello(version, &volume, fd),
            Request::Map {
                file,
                offset,
                len,
                create,
                write,
            } => {
                let flags = MapFlags {
                    create,
                    read_only: !write,
                    offset,
                    ..MapFlags::default()
                };
                self.map(&file, len, flags, memory)
            }
            Request::Show(shown) => {
                let done = self.show(shown);
                self.release(shown.file);
                done
            }
            Request::Unmap { window } => self.unmap(window),
            Request::Sync { wait, parts } => self.sync(wait, &parts),
            Request::Rollback(part) => self.rollback(&part),
            Request::Fsync { file } => volume.fsync(&file).map(|lsn| done(lsn, 0)),
            Request::Create { file } => volume.create(&file).map(|made| done(made.into(), 0)),
            Request::Remove { file } => volume.remove(&file).map(|()| done(0, 0)),
            Request::Rename { from, to } => volume.rename(&from, &to).map(|()| done(0, 0)),
            Request::Truncate { file, size } => volume.truncate(&file, size).map(|()| done(0, 0)),
            Request::Size { file } => Ok(match volume.size(&file)? {
                Some(size) => done(1, size),
                None => done(0, 0),
            }),
            Request::Wait { lsn } => volume.wait(lsn).map(|()| done(0, 0)),
            Request::Settle => volume.settle().map(|()| done(0, 0)),
            Request::Copies { lsn } => {
                let all = volume.copies(lsn).into_iter();
                Ok(Reply::Copies(all.map(|c| (c.node, c.level)).collect()))
            }
            Request::Detach => unreachable!("it was told apart"),
        }
    }

    /// The greeting. `fd`: the guest's pagemap, if its page tables can be read.
    fn hello(&mut self, version: u32, volume: &str, fd: Option<OwnedFd>) -> Result<Reply> {
        if version != VERSION || volume != self.volume.name() {
            return Err(Error::Protocol(format!(
                "volume {volume:?}, version {version}: here is {:?}, version {VERSION}",
                self.volume.name()
            )));
        }
        self.greeted = true;
        self.pagemap = fd.map(Arc::new);
        Ok(done(0, 0))
    }

    /// Lends `memory` for a mapping that the guest is to make.
    fn map(
        &mut self,
        file: &str,
        len: u64,
        flags: MapFlags,
        memory: &mut Option<Lent>,
    ) -> Result<Reply> {
        self.check_room()?;
        let len = usize::try_from(len)
            .map_err(|_| Error::Invalid(format!("mapping {file}: {len} bytes")))?;
        let (lent, len, id) = self.volume.0.lend(file, len, flags)?;
        *memory = Some(lent.clone());
        let number = u64::from(lent.1.file);
        self.add(Window {
            lent,
            id,
            span: 0..0,
            write: false,
            atomic: false,
            inherited: false,
        });
        Ok(done(number, len as u64))
    }

    /// Commits a window, if it is committed at its end, and then forgets it.
    fn unmap(&mut self, window: u64) -> Result<Reply> {
        let w = self.window(window)?;
        if w.commits_at_end() {
            let all = w.part(0, u64::MAX);
            sync_range(&self.volume.0, &w.lent.1, all, Until::Committed)?;
        }
        let w = self.windows.remove(&window).expect("it was there");
        self.volume.0.take_back(&w.lent.0, w.id, false);
        Ok(done(0, 0))
    }

    fn rollback(&self, part: &Wanted) -> Result<Reply> {
        let w = self.window(part.window)?;
        if !w.atomic {
            return Ok(done(0, 0));
        }
        self.volume.0.check_attached()?;
        rollback_part(&self.volume.0, &w.lent.1, w.part(part.at, part.len))?;
        Ok(done(1, 0))
    }

    fn check_room(&self) -> Result<()> {
        if self.windows.len() < MOST_WINDOWS {
            return Ok(());
        }
        Err(Error::Busy(format!(
            "a process that shares a volume can have {MOST_WINDOWS} mappings"
        )))
    }

    fn add(&mut self, window: Window) -> u64 {
        self.last += 1;
        self.windows.insert(self.last, window);
        self.last
    }

    /// The guest has made and armed a mapping: watches it.
    fn show(&mut self, s: Shown) -> Result<Reply> {
        self.check_room()?;
        let inner = &self.volume.0;
        let wrong = || Error::Invalid(format!("no mapping: {s:?}"));
        // Under `names` the copy does not lose its last window.
        let names = lock(&inner.names);
        let lent = inner.shared_of(s.file).ok_or_else(wrong)?;
        // The file may have been unmapped by all, and mapped again with other memory.
        if lent.0.identity()? != s.memory {
            return Err(wrong());
        }
        let page = rustix::param::page_size();
        let end = s.offset.checked_add(s.len).ok_or_else(wrong)?;
        if s.len == 0 || !s.offset.is_multiple_of(page as u64) || end > lent.0.capacity() as u64 {
            return Err(wrong());
        }
        let span = s.offset as usize..end as usize;
        let mapped = span.len().next_multiple_of(page);
        let tracker: Option<Box<dyn Tracker>> = match &self.pagemap {
            _ if !s.write => None,
            None => Some(Box::new(Unwatched)),
            Some(pagemap) => {
                let base = usize::try_from(s.base).map_err(|_| wrong())?;
                let remote = Remote::new(pagemap.clone(), base, mapped);
                Some(Box::new(remote.context(|| "watching a guest".into())?))
            }
        };
        let id = lent.0.watch(span.start, mapped, tracker);
        drop(names);
        let number = self.add(Window {
            lent,
            id,
            span,
            write: s.write,
            atomic: s.atomic,
            inherited: s.inherited,
        });
        Ok(done(number, 0))
    }

    /// Drops a loan of the file's memory: its mapping is made, or was given up.
    fn release(&mut self, file: u32) {
        let mut held = self.windows.iter();
        let held = held.find(|(_, w)| w.span.is_empty() && w.lent.1.file == file);
        if let Some(held) = held.map(|(n, _)| *n) {
            let held = self.windows.remove(&held).expect("it was there");
            self.volume.0.take_back(&held.lent.0, held.id, false);
        }
    }

    fn sync(&self, wait: bool, parts: &[Wanted]) -> Result<Reply> {
        let until = match wait {
            true => Until::Committed,
            false => Until::Begun,
        };
        let inner = &self.volume.0;
        if let [Wanted { window, at, len }] = parts {
            let w = self.window(*window)?;
            let lsn = match w.write {
                true => sync_range(inner, &w.lent.1, w.part(*at, *len), until)?,
                // As in the owner itself: what other calls began is waited for.
                false => nothing(inner, until)?,
            };
            return Ok(done(lsn, 0));
        }
        let mut found = Vec::with_capacity(parts.len());
        for p in parts {
            let w = self.window(p.window)?;
            if w.write {
                found.push(Part::of(&w.lent.1, w.part(p.at, p.len)));
            }
        }
        let lsn = match found.is_empty() && !parts.is_empty() {
            // All of the windows are read-only.
            true => nothing(inner, until)?,
            false => sync_many(inner, &found, until)?,
        };
        Ok(done(lsn, 0))
    }

    /// The guest's end, like the owner's: commits all windows that are committed at their end.
    fn detach(&mut self) -> Result<Reply> {
        let mut synced = Ok(());
        for w in self.windows.values().filter(|w| w.commits_at_end()) {
            let all = w.part(0, u64::MAX);
            let one = sync_range(&self.volume.0, &w.lent.1, all, Until::Committed);
            synced = synced.and(one.map(drop));
        }
        synced?;
        // Waits for what was begun, also if the guest has nothing to commit.
        nothing(&self.volume.0, Until::Committed)?;
        self.forget(false);
        Ok(done(0, 0))
    }

    fn forget(&mut self, lost: bool) {
        for w in std::mem::take(&mut self.windows).into_values() {
            self.volume.0.take_back(&w.lent.0, w.id, lost);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.forget(true);
    }
}
