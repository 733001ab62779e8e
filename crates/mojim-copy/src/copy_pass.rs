//! The first pass of a copy that is sent: what is left of it, and what one
//! link carries.
//!
//! Owns the place up to which the files were handed out, and what the receiver has of each. The
//! session's own link, or streams beside it (`stream`), take the next piece where the last one
//! ended. So nothing waits in between, and a quick link carries more than a slow one. Of what the
//! receiver has, sums of pages travel, then the pages that it finds different. Of the rest, the
//! bytes travel.
//!
//! Invariants:
//! - Each piece is handed out once, and only from files of which the receiver has said
//!   what it has.
//! - At most `AHEAD` files are announced beyond the one that is handed out. A link has at most
//!   `WINDOW` sums unanswered.
//! - Holes are neither summed nor sent: what is not mentioned is zero.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::*};

use mojim_env::locks::lock;
use mojim_format::message::{COPY_PAGE, COPY_PAGES, CopyFile, CopyHave, CopySums, CopyWant};
use mojim_format::{CatalogEntry, FrameKind};

use mojim_env::event::Event;
use mojim_env::wire::Wire;
use mojim_env::{Context, Error, File, Result};
use mojim_store::stage::{WINDOW, sum};
use mojim_store::store::Store;

/// Bytes of a copy in one frame.
pub const COPY_CHUNK: usize = 256 << 10;
/// Bytes of a copy that may be queued on one link.
pub const COPY_BACKLOG: usize = 2 << 20;
/// Bytes under the sums of one frame.
const UNIT: u64 = COPY_PAGES as u64 * COPY_PAGE;
/// Files announced beyond the one that is handed out.
const AHEAD: usize = 256;

/// What is left of the first pass, for all links that carry it.
pub struct CopyPass {
    files: Vec<CatalogEntry>,
    place: Mutex<SendCursor>,
    links: Mutex<Links>,
    over: AtomicBool,
    /// Notified when there may be a piece, and at the end.
    pub work: Event,
}

#[derive(Default)]
struct SendCursor {
    /// Files announced.
    announced: usize,
    /// What the receiver has of the announced files, from the present one on.
    have: VecDeque<u64>,
    /// The present file, and the offset up to which it was handed out.
    next: usize,
    offset: u64,
    /// Bytes of the files before it.
    before: u64,
}

/// The streams beside the session's own link.
#[derive(Default)]
struct Links {
    /// Streams that may still carry something, or whose bytes are not known to be staged.
    open: usize,
    failure: Option<Failure>,
}

/// Fails if the sender does not take the answers to its copy. Otherwise they are few and
/// small.
pub fn answers_are_taken(wire: &Wire) -> Result<()> {
    if wire.backlog() > COPY_BACKLOG {
        return Err(Error::Protocol(
            "the sender of a copy does not take the answers to it".into(),
        ));
    }
    Ok(())
}

/// Why a stream that carried something broke.
#[derive(Debug, Clone)]
pub struct Failure {
    /// What happened.
    pub error: Error,
    /// Whether the receiver said so.
    pub refused: bool,
}

/// A part of a file that one link deals with.
enum Piece {
    /// Whole pages that the receiver has something of.
    Sums(Range<u64>),
    Bytes(Range<u64>),
}

enum Next {
    Piece(usize, Piece),
    /// Not before the receiver has answered.
    Later,
    Nothing,
}

impl CopyPass {
    /// A pass over `files`.
    pub fn new(files: Vec<CatalogEntry>) -> CopyPass {
        CopyPass {
            files,
            place: Mutex::default(),
            links: Mutex::default(),
            over: AtomicBool::new(false),
            work: Event::default(),
        }
    }

    /// The files.
    pub fn files(&self) -> &[CatalogEntry] {
        &self.files
    }

    /// Bytes that were handed out, counted over the files one after the other.
    pub fn at(&self) -> u64 {
        let p = lock(&self.place);
        p.before + p.offset
    }

    /// The next file to announce, if there is room for one.
    pub fn announce(&self) -> Option<CopyFile> {
        let mut p = lock(&self.place);
        let f = self.files.get(p.announced)?;
        if p.announced - p.next >= AHEAD {
            return None;
        }
        p.announced += 1;
        Some(CopyFile {
            id: f.id,
            size: f.size,
            name: f.name.clone(),
        })
    }

    /// The receiver says what it has of the next file.
    pub fn have(&self, m: &CopyHave) -> Result<()> {
        let mut p = lock(&self.place);
        let i = p.next + p.have.len();
        match self.files.get(i) {
            Some(f) if i < p.announced && f.id == m.id => p.have.push_back(m.size),
            _ => {
                return Err(Error::Protocol(format!(
                    "an answer about file {}, which was not asked for",
                    m.id
                )));
            }
        }
        drop(p);
        self.work.notify();
        Ok(())
    }

    /// Whether a link that waits for a piece has something to do: there may be one, or
    /// none will come.
    pub fn is_ready(&self) -> bool {
        let p = lock(&self.place);
        self.is_over() || !p.have.is_empty() || p.next == self.files.len()
    }

    /// Whether the receiver has answered anything.
    pub fn is_answered(&self) -> bool {
        let p = lock(&self.place);
        p.next > 0 || !p.have.is_empty()
    }

    /// Whether every piece was handed out.
    pub fn is_handed_out(&self) -> bool {
        lock(&self.place).next == self.files.len()
    }

    fn next(&self, store: &Store, may_ask: bool) -> Result<Next> {
        let mut p = lock(&self.place);
        loop {
            let Some(f) = self.files.get(p.next) else {
                return Ok(Next::Nothing);
            };
            let Some(&have) = p.have.front() else {
                return Ok(Next::Later);
            };
            // A page that the receiver has in part is not worth a sum, except the file's
            // last.
            let have = match have >= f.size {
                true => f.size,
                false => have - have % COPY_PAGE,
            };
            let file = store.area().file(f.id)?;
            let data = file
                .next_data(p.offset)
                .context(|| format!("reading {}", f.name))?
                .filter(|r| r.start < f.size);
            let Some(data) = data else {
                p.before += f.size;
                p.offset = 0;
                p.next += 1;
                p.have.pop_front();
                continue;
            };
            let end = data.end.min(f.size);
            let page = data.start - data.start % COPY_PAGE;
            let piece = if page < have {
                if !may_ask {
                    return Ok(Next::Later);
                }
                let end = end.next_multiple_of(COPY_PAGE).min(have).min(page + UNIT);
                p.offset = end;
                Piece::Sums(page..end)
            } else {
                let end = end.min(data.start + COPY_CHUNK as u64);
                p.offset = end;
                Piece::Bytes(data.start..end)
            };
            return Ok(Next::Piece(p.next, piece));
        }
    }

    /// A stream is being opened.
    pub fn opens(&self) {
        lock(&self.links).open += 1;
    }

    /// All that a stream carried is staged; or it never carried anything.
    pub fn closes(&self) {
        lock(&self.links).open -= 1;
    }

    /// A stream broke that had begun to carry.
    pub fn breaks(&self, failure: Failure) {
        let mut links = lock(&self.links);
        // The receiver's reason tells more than the broken link that followed.
        if failure.refused || links.failure.is_none() {
            links.failure = Some(failure);
        }
    }

    /// Why the pass cannot be completed.
    pub fn failure(&self) -> Option<Failure> {
        lock(&self.links).failure.clone()
    }

    /// Whether a stream may still carry something.
    pub fn is_shared(&self) -> bool {
        lock(&self.links).open > 0
    }

    /// Ends the pass: no link carries anything of it any more.
    pub fn end(&self) {
        self.over.store(true, SeqCst);
        self.work.notify();
    }

    /// Whether [`CopyPass::end`] was called.
    pub fn is_over(&self) -> bool {
        self.over.load(Acquire)
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

/// What a step of a [`Part`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Went {
    /// Something was queued.
    On,
    /// Answers are due.
    Waits,
    /// There is nothing left.
    Through,
}

/// What one link carries of a pass.
#[derive(Default)]
pub struct Part {
    asked: VecDeque<Question>,
    wanted: VecDeque<Run>,
    buf: Vec<u8>,
}

impl Part {
    /// Whether an answer is due.
    pub fn is_asking(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The receiver says which pages it lacks.
    pub fn want(&mut self, pass: &CopyPass, m: &CopyWant) -> Result<()> {
        let bad = || Error::Protocol("pages are wanted that were not offered".into());
        let q = self.asked.pop_front().ok_or_else(bad)?;
        let f = &pass.files[q.file];
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

    /// Queues what was wanted, or else the next piece.
    pub fn step(
        &mut self,
        pass: &CopyPass,
        store: &Store,
        wire: &mut Wire,
        epoch: u64,
    ) -> Result<Went> {
        if let Some(run) = self.wanted.pop_front() {
            let f = &pass.files[run.file];
            let file = store.area().file(f.id)?;
            send(store, wire, epoch, f, &*file, run.range, true)?;
            return Ok(Went::On);
        }
        let (file, piece) = match pass.next(store, self.asked.len() < WINDOW)? {
            Next::Piece(file, piece) => (file, piece),
            Next::Nothing if self.asked.is_empty() => return Ok(Went::Through),
            Next::Nothing | Next::Later => return Ok(Went::Waits),
        };
        let f = &pass.files[file];
        let open = store.area().file(f.id)?;
        match piece {
            Piece::Bytes(range) => send(store, wire, epoch, f, &*open, range, false)?,
            Piece::Sums(range) => {
                self.buf.resize((range.end - range.start) as usize, 0);
                read(store, f, &*open, &mut self.buf, range.start)?;
                let m = CopySums {
                    id: f.id,
                    offset: range.start,
                    sums: self.buf.chunks(COPY_PAGE as usize).map(sum).collect(),
                };
                wire.send(FrameKind::CopySums, epoch, &m);
                self.asked.push_back(Question {
                    file,
                    offset: range.start,
                    pages: m.sums.len(),
                });
            }
        }
        Ok(Went::On)
    }
}

/// Queues bytes of a file; `zeros`: also if all of them are zero.
pub fn send(
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

    fn pass(pages: usize) -> CopyPass {
        let pass = CopyPass::new(vec![CatalogEntry {
            id: 7,
            size: pages as u64 * COPY_PAGE - 10,
            name: "f".into(),
        }]);
        assert!(pass.announce().is_some_and(|f| f.id == 7));
        assert!(pass.announce().is_none());
        pass
    }

    fn asked(pages: usize) -> Part {
        Part {
            asked: VecDeque::from([Question {
                file: 0,
                offset: 0,
                pages,
            }]),
            ..Part::default()
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
        c.want(&pass(10), &want(7, 0, &[0b1000_0110, 0b11]))
            .unwrap();
        let runs: Vec<_> = c.wanted.iter().map(|r| r.range.clone()).collect();
        let page = COPY_PAGE;
        assert_eq!(runs, [page..3 * page, 7 * page..10 * page - 10]);
    }

    #[test]
    fn answers_to_what_was_not_asked_are_refused() {
        let pass = pass(10);
        for wrong in [
            want(8, 0, &[1, 0]),
            want(7, COPY_PAGE, &[1, 0]),
            want(7, 0, &[1]),
            want(7, 0, &[1, 0, 0]),
            want(7, 0, &[0, 0b100]),
        ] {
            assert!(asked(10).want(&pass, &wrong).is_err(), "{wrong:?}");
        }
        let mut c = asked(10);
        c.want(&pass, &want(7, 0, &[0, 0])).unwrap();
        assert!(c.want(&pass, &want(7, 0, &[0, 0])).is_err());
        assert!(pass.have(&CopyHave { id: 8, size: 0 }).is_err());
        assert!(!pass.is_ready() && !pass.is_answered());
        pass.have(&CopyHave { id: 7, size: 0 }).unwrap();
        assert!(pass.is_ready() && pass.is_answered());
        assert!(pass.have(&CopyHave { id: 7, size: 0 }).is_err());
    }
}
