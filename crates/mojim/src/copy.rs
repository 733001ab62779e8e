//! A whole copy of a volume on its way to the other node: the sender's side.
//!
//! Owns the order in which a copy is sent, whichever of the two nodes gives
//! it. Files are announced in order; the receiver answers how much it has of
//! each from before, whatever that is worth. Of so much, sums of pages travel
//! instead of pages, then the pages that the receiver finds different; of the
//! rest the bytes. The receiver's side is `stage`.
//!
//! Invariants:
//! - The area stands still from the beginning to the end (`Store::freeze`), so
//!   that what was summed is what is sent; or it is watched, and every page that
//!   changed after it may have been read is sent again, the last ones while it
//!   stands still. So the copy is the area as it stands at the end.
//! - Whatever the peer answers or fails to, at most `AHEAD` files are announced,
//!   `WINDOW` sums unanswered and about `COPY_BACKLOG` bytes queued.
//! - Holes are neither summed nor sent: what is not mentioned is zero.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mojim_format::message::{
    COPY_PAGE, COPY_PAGES, CopyBegin, CopyFile, CopyHave, CopySums, CopyWant, SUM_LEN,
};
use mojim_format::{CatalogEntry, FrameKind};

use crate::env::File;
use crate::error::{Context, Error, Result};
use crate::link::Wire;
use crate::store::{Pause, Store, Watch};

/// Bytes of a copy in one frame.
pub const COPY_CHUNK: usize = 256 << 10;
/// Bytes of a copy that may be queued.
pub const COPY_BACKLOG: usize = 2 << 20;
/// Bytes under the sums of one frame.
const UNIT: u64 = COPY_PAGES as u64 * COPY_PAGE;
/// Frames of sums that may be unanswered.
pub const WINDOW: usize = 32;
/// Changed pages that are few enough to stop the application for them.
const FEW: usize = 16;
/// Files announced beyond the one that is sent.
const AHEAD: usize = 64;

/// What stands for a page while both sides compare: 128 bits of a hash that
/// nobody is known to find two pages for. Equal sums count as equal pages.
pub fn sum(page: &[u8]) -> [u8; SUM_LEN] {
    let whole = blake3::hash(page);
    *whole.as_bytes().first_chunk().expect("a hash is 32 bytes")
}

/// How far a copy from or to this node is; after it has ended, how it went.
#[derive(Default)]
pub struct Progress {
    running: AtomicBool,
    incoming: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
    moved: AtomicU64,
    kept: AtomicU64,
    /// When it began, and when it ended, in nanoseconds.
    began: AtomicU64,
    ended: AtomicU64,
    received: AtomicU64,
    compared: AtomicU64,
}

/// What `Progress` says at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copying {
    /// It has not ended.
    pub running: bool,
    /// This node receives it.
    pub incoming: bool,
    /// Bytes of the volume's files.
    pub total: u64,
    /// How many of them are dealt with.
    pub done: u64,
    /// Bytes that went over the link for it.
    pub moved: u64,
    /// Bytes that were taken from the receiver's older files.
    pub kept: u64,
    /// How long it has taken.
    pub time: Duration,
}

impl Progress {
    /// A copy of `total` bytes begins.
    pub fn begin(&self, now: Duration, incoming: bool, total: u64) {
        self.began.store(now.as_nanos() as u64, Relaxed);
        self.incoming.store(incoming, Relaxed);
        self.done.store(0, Relaxed);
        self.moved.store(0, Relaxed);
        self.kept.store(0, Relaxed);
        self.total.store(total, Relaxed);
        self.running.store(true, Relaxed);
    }

    /// Everything before this byte of the files, one behind the other, is
    /// dealt with.
    pub fn at(&self, done: u64) {
        self.done.fetch_max(done, Relaxed);
    }

    /// Bytes went over the link.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Relaxed);
    }

    /// Bytes came from an older file.
    pub fn kept(&self, bytes: u64) {
        self.kept.fetch_add(bytes, Relaxed);
    }

    /// It has ended, or failed.
    pub fn end(&self, now: Duration, whole: bool) {
        self.ended.store(now.as_nanos() as u64, Relaxed);
        if !self.running.swap(false, Relaxed) || !whole {
            return;
        }
        self.done.store(self.total.load(Relaxed), Relaxed);
        if self.incoming.load(Relaxed) {
            self.received.fetch_add(1, Relaxed);
            if self.kept.load(Relaxed) > 0 {
                self.compared.fetch_add(1, Relaxed);
            }
        }
    }

    /// Copies taken in by this process, and how many of them rest partly on
    /// what was here.
    pub fn counts(&self) -> [u64; 2] {
        [&self.received, &self.compared].map(|n| n.load(Relaxed))
    }

    /// Of the copy that runs or was the last; `None` before the first.
    pub fn get(&self, now: Duration) -> Option<Copying> {
        let running = self.running.load(Relaxed);
        let end = match running {
            true => now.as_nanos() as u64,
            false => self.ended.load(Relaxed),
        };
        let time = end.saturating_sub(self.began.load(Relaxed));
        let c = Copying {
            running,
            time: Duration::from_nanos(time),
            incoming: self.incoming.load(Relaxed),
            total: self.total.load(Relaxed),
            done: self.done.load(Relaxed),
            moved: self.moved.load(Relaxed),
            kept: self.kept.load(Relaxed),
        };
        (c.running || c.moved > 0).then_some(c)
    }
}

/// Sums of which the answer has not come.
struct Question {
    file: usize,
    offset: u64,
    pages: usize,
}

/// Pages that the receiver wants, in a row.
struct Run {
    file: usize,
    range: Range<u64>,
}

/// A whole copy on its way out.
pub struct CopyOut {
    /// The copy is the result of the records up to here; where the area is
    /// watched, that is known at the end.
    pub lsn: u64,
    watch: Option<Arc<Watch>>,
    /// Held for the last of what changed.
    pause: Option<Pause>,
    /// Changed pages at the beginning of this round of sending them, and how
    /// many of them are left.
    round: (usize, usize),
    files: Vec<CatalogEntry>,
    /// Files announced.
    announced: usize,
    /// What the receiver has of the announced files, from the present one on.
    have: VecDeque<u64>,
    /// The present file, and where in it everything before was dealt with.
    next: usize,
    offset: u64,
    /// Bytes of the files before it.
    before: u64,
    asked: VecDeque<Question>,
    wanted: VecDeque<Run>,
    ended: bool,
    buf: Vec<u8>,
}

impl CopyOut {
    /// Queues the beginning of a copy of what is applied here. The area must
    /// stand still until the end, or `watch` have begun.
    pub fn begin(store: &Store, wire: &mut Wire, epoch: u64, watch: Option<Arc<Watch>>) -> CopyOut {
        let lsn = store.applied();
        let files: Vec<CatalogEntry> = store.area().files().cloned().collect();
        let bytes = files.iter().map(|f| f.size).sum();
        let begin = CopyBegin {
            volume_id: store.superblock().volume_id,
            lsn,
            files: files.len() as u32,
            bytes,
            history: store.history().entries().to_vec(),
        };
        store.progress.begin(store.env().now(), false, bytes);
        wire.say(FrameKind::CopyBegin, epoch, &begin);
        CopyOut {
            lsn,
            watch,
            pause: None,
            round: (usize::MAX, 0),
            files,
            announced: 0,
            have: VecDeque::new(),
            next: 0,
            offset: 0,
            before: 0,
            asked: VecDeque::new(),
            wanted: VecDeque::new(),
            ended: false,
            buf: Vec::new(),
        }
    }

    /// Whether all of it is queued.
    pub fn is_sent(&self) -> bool {
        self.ended
    }

    /// Everything up to here will be in the copy.
    pub fn reached(&self, store: &Store) -> u64 {
        match self.watch.is_none() || self.pause.is_some() {
            true => self.lsn,
            false => store.applied(),
        }
    }

    /// Whether what was read so far is right.
    pub fn holds(&self) -> bool {
        self.watch.as_ref().is_none_or(|w| w.holds())
    }

    /// Queues what there is room for. False if nothing could be queued: the
    /// link is full, or answers are due.
    pub fn pump(&mut self, store: &Store, wire: &mut Wire, epoch: u64) -> Result<bool> {
        let before = wire.backlog();
        let paused = self.pause.is_some();
        let mut moved = false;
        while !self.ended && wire.backlog() < COPY_BACKLOG && self.step(store, wire, epoch)? {
            moved = true;
        }
        moved |= self.pause.is_some() != paused;
        store.progress.moved((wire.backlog() - before) as u64);
        store.progress.at(self.before + self.offset);
        Ok(moved)
    }

    /// The receiver says what it has of the next file.
    pub fn have(&mut self, m: &CopyHave) -> Result<()> {
        let i = self.next + self.have.len();
        match self.files.get(i) {
            Some(f) if i < self.announced && f.id == m.id => self.have.push_back(m.size),
            _ => {
                return Err(Error::Protocol(format!(
                    "an answer about file {}, which was not asked for",
                    m.id
                )));
            }
        }
        Ok(())
    }

    /// The receiver says which pages it lacks.
    pub fn want(&mut self, m: &CopyWant) -> Result<()> {
        let bad = || Error::Protocol("pages are wanted that were not offered".into());
        let q = self.asked.pop_front().ok_or_else(bad)?;
        let f = &self.files[q.file];
        let bit = |i: usize| m.pages.get(i / 8).is_some_and(|b| b >> (i % 8) & 1 == 1);
        if f.id != m.id
            || q.offset != m.offset
            || m.pages.len() != q.pages.div_ceil(8)
            || (q.pages..m.pages.len() * 8).any(bit)
        {
            return Err(bad());
        }
        for i in (0..q.pages).filter(|i| bit(*i)) {
            let start = q.offset + i as u64 * COPY_PAGE;
            let end = (start + COPY_PAGE).min(f.size);
            match self.wanted.back_mut() {
                Some(r)
                    if r.file == q.file
                        && r.range.end == start
                        && end - r.range.start <= COPY_CHUNK as u64 =>
                {
                    r.range.end = end;
                }
                _ => self.wanted.push_back(Run {
                    file: q.file,
                    range: start..end,
                }),
            }
        }
        Ok(())
    }

    fn step(&mut self, store: &Store, wire: &mut Wire, epoch: u64) -> Result<bool> {
        if let Some(run) = self.wanted.pop_front() {
            let f = &self.files[run.file];
            let file = store.area().file(f.id)?;
            send(store, wire, epoch, f, &*file, run.range, true)?;
            return Ok(true);
        }
        if self.announced < self.files.len() && self.announced - self.next < AHEAD {
            let f = &self.files[self.announced];
            let m = CopyFile {
                id: f.id,
                size: f.size,
                name: f.name.clone(),
            };
            wire.say(FrameKind::CopyFile, epoch, &m);
            self.announced += 1;
            return Ok(true);
        }
        let Some(f) = self.files.get(self.next) else {
            if !self.asked.is_empty() {
                return Ok(false);
            }
            if let Some(watch) = self.watch.clone() {
                let paused = self.pause.is_some();
                if self.catch_up(&watch, store, wire, epoch)? {
                    return Ok(true);
                }
                if !paused {
                    return Ok(false);
                }
            }
            wire.queue(FrameKind::CopyEnd, epoch, self.lsn, 0, &[]);
            self.ended = true;
            return Ok(true);
        };
        let Some(&have) = self.have.front() else {
            return Ok(false);
        };
        // A page that only part of is there is not worth a sum, but for the
        // file's own last.
        let have = match have >= f.size {
            true => f.size,
            false => have - have % COPY_PAGE,
        };
        let file = store.area().file(f.id)?;
        let data = file
            .next_data(self.offset)
            .context(|| format!("reading {}", f.name))?
            .filter(|r| r.start < f.size);
        let Some(data) = data else {
            self.before += f.size;
            self.offset = 0;
            self.next += 1;
            self.have.pop_front();
            return Ok(true);
        };
        let end = data.end.min(f.size);
        let page = data.start - data.start % COPY_PAGE;
        if page < have {
            if self.asked.len() >= WINDOW {
                return Ok(false);
            }
            let end = end.next_multiple_of(COPY_PAGE).min(have).min(page + UNIT);
            self.ask(store, wire, epoch, &file, page..end)?;
            self.offset = end;
        } else {
            let end = end.min(data.start + COPY_CHUNK as u64);
            send(store, wire, epoch, f, &*file, data.start..end, false)?;
            self.offset = end;
        }
        Ok(true)
    }

    /// Sends pages that changed since they were read, round by round, for as
    /// long as each has at most half as many as the one before; the rest while
    /// nothing is applied. False if none is left and none can come, or if that
    /// has just begun.
    fn catch_up(
        &mut self,
        watch: &Watch,
        store: &Store,
        wire: &mut Wire,
        epoch: u64,
    ) -> Result<bool> {
        if self.pause.is_none() && self.round.1 == 0 {
            let changed = watch.changed();
            if changed <= FEW || changed > self.round.0 / 2 {
                // The last of them, and the end, in the next turn.
                self.pause = Some(watch.pause());
                self.lsn = store.applied();
                return Ok(false);
            }
            self.round = (changed, changed);
        }
        let Some((id, range)) = watch.next(COPY_CHUNK as u64 / COPY_PAGE) else {
            return Ok(false);
        };
        let pages = (range.end - range.start) / COPY_PAGE;
        self.round.1 = self.round.1.saturating_sub(pages as usize);
        let f = self.files.iter().find(|f| f.id == id);
        // What lies beyond a file's size is ignored, and so is a file removed.
        if let Some(f) = f.filter(|f| range.start < f.size) {
            let file = store.area().file(id)?;
            let range = range.start..range.end.min(f.size);
            send(store, wire, epoch, f, &*file, range, true)?;
        }
        Ok(true)
    }

    fn ask(
        &mut self,
        store: &Store,
        wire: &mut Wire,
        epoch: u64,
        file: &Arc<dyn File>,
        range: Range<u64>,
    ) -> Result<()> {
        let f = &self.files[self.next];
        self.buf.resize((range.end - range.start) as usize, 0);
        read(store, f, &**file, &mut self.buf, range.start)?;
        let m = CopySums {
            id: f.id,
            offset: range.start,
            sums: self.buf.chunks(COPY_PAGE as usize).map(sum).collect(),
        };
        wire.say(FrameKind::CopySums, epoch, &m);
        self.asked.push_back(Question {
            file: self.next,
            offset: range.start,
            pages: m.sums.len(),
        });
        Ok(())
    }
}

/// The LSN of a copy that began as of `begin`, by the last word of its sender.
pub fn copy_ends(begin: u64, end: u64) -> Result<u64> {
    if end < begin {
        return Err(Error::Protocol(format!(
            "a copy of LSN {begin} ends with LSN {end}"
        )));
    }
    Ok(end)
}

/// The receiver's answers are few and small, as long as they are taken.
pub fn answers_are_taken(wire: &Wire) -> Result<()> {
    if wire.backlog() > COPY_BACKLOG {
        return Err(Error::Protocol(
            "the sender of a copy does not take the answers to it".into(),
        ));
    }
    Ok(())
}

/// Queues bytes of a file; `zeros`: also if all of them are zero.
fn send(
    store: &Store,
    wire: &mut Wire,
    epoch: u64,
    f: &CatalogEntry,
    file: &dyn File,
    range: Range<u64>,
    zeros: bool,
) -> Result<()> {
    let len = (range.end - range.start) as usize;
    wire.queue_data(epoch, f.id as u64, range.start, len, |buf| {
        read(store, f, file, buf, range.start)?;
        Ok(zeros || buf.iter().any(|b| *b != 0))
    })
}

fn read(store: &Store, f: &CatalogEntry, file: &dyn File, buf: &mut [u8], at: u64) -> Result<()> {
    let got = file
        .read_at(buf, at)
        .context(|| format!("reading {}", f.name))?;
    if got < buf.len() {
        return Err(Error::Damaged {
            path: store.spec().dir.join(&f.name),
            what: "it became shorter while it was copied".into(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(pages: usize) -> CopyOut {
        let f = CatalogEntry {
            id: 7,
            size: pages as u64 * COPY_PAGE - 10,
            name: "f".into(),
        };
        CopyOut {
            lsn: 1,
            watch: None,
            pause: None,
            round: (usize::MAX, 0),
            files: vec![f],
            announced: 1,
            have: VecDeque::new(),
            next: 0,
            offset: 0,
            before: 0,
            asked: VecDeque::from([Question {
                file: 0,
                offset: 0,
                pages,
            }]),
            wanted: VecDeque::new(),
            ended: false,
            buf: Vec::new(),
        }
    }

    fn want(id: u32, offset: u64, pages: &[u8]) -> CopyWant {
        CopyWant {
            id,
            offset,
            pages: pages.to_vec(),
        }
    }

    #[test]
    fn wanted_pages_are_sent_in_runs() {
        let mut c = asked(10);
        c.want(&want(7, 0, &[0b1000_0110, 0b11])).unwrap();
        let runs: Vec<_> = c.wanted.iter().map(|r| r.range.clone()).collect();
        let page = COPY_PAGE;
        assert_eq!(runs, [page..3 * page, 7 * page..10 * page - 10]);
    }

    #[test]
    fn answers_to_what_was_not_asked_are_refused() {
        for wrong in [
            want(8, 0, &[1, 0]),
            want(7, COPY_PAGE, &[1, 0]),
            want(7, 0, &[1]),
            want(7, 0, &[1, 0, 0]),
            want(7, 0, &[0, 0b100]),
        ] {
            assert!(asked(10).want(&wrong).is_err(), "{wrong:?}");
        }
        let mut c = asked(10);
        c.want(&want(7, 0, &[0, 0])).unwrap();
        assert!(c.want(&want(7, 0, &[0, 0])).is_err());
        assert!(c.have(&CopyHave { id: 8, size: 0 }).is_err());
        c.have(&CopyHave { id: 7, size: 0 }).unwrap();
        assert!(c.have(&CopyHave { id: 7, size: 0 }).is_err());
    }
}
