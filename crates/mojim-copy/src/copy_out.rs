//! A whole copy of a volume on its way to the other node: the sender's side.
//!
//! Owns the order in which a copy is sent, whichever of the two nodes gives it:
//!
//! - Files are announced in order over the session's own link. The receiver answers how much
//!   it has of each from before, whatever that is worth.
//! - Then everything is sent once (`pass`), over that link or over streams beside it
//!   (`stream`).
//! - The bytes that changed meanwhile are sent again, over that link only.
//!
//! The receiver's side is `copy_in`.
//!
//! Invariants:
//!
//! - The copy is the area as it stands at the end. There are two ways to that. The area may
//!   stand still from the beginning to the end (`Store::freeze`), so that what was summed is
//!   what is sent. Or it is watched: every page that changed after it may have been read is
//!   sent again, the last ones while the area stands still.
//! - Nothing is sent again, and the end is not said, before all that streams
//!   carried is staged: what is read later arrives later.
//! - All that is announced, unanswered and queued is bounded (`pass`), whatever the peer
//!   answers or fails to.

use std::sync::Arc;
use std::time::Duration;

use mojim_format::message::{COPY_PAGE, CopyBegin, CopyHave, CopyWant, Message};
use mojim_format::{CatalogEntry, FrameKind};

use crate::copy_pass::{COPY_BACKLOG, COPY_CHUNK, CopyPass, Failure, Part, Went, send};
use crate::stream::StreamOut;
use mojim_env::wire::{Wire, bad};
use mojim_env::{Address, Error, Result};
use mojim_store::store::{Pause, Store, Watch};

/// How long after a stream broke the receiver's reason is awaited.
const REASON: Duration = Duration::from_millis(500);
/// Changed pages that are few enough to stop the application for them.
const FEW: usize = 16;

/// A whole copy on its way out.
pub struct CopyOut {
    /// The copy is the result of the records up to this LSN; if the area is watched, it
    /// is known at the end.
    pub lsn: u64,
    watch: Option<Arc<Watch>>,
    /// Held while the last changed pages are sent.
    pause: Option<Pause>,
    /// Changed pages at the beginning of this round of sending them, and how
    /// many of them are left.
    round: (usize, usize),
    pass: Arc<CopyPass>,
    /// What the session's own link carries of the pass.
    part: Part,
    /// The copy's number.
    copy: u64,
    /// Where streams beside that link are to be opened.
    to: Option<Address>,
    /// Streams that the caller has not taken yet.
    streams: Vec<StreamOut>,
    failure: Option<Failure>,
    /// When a stream was found broken.
    broke: Option<Duration>,
    ended: bool,
}

impl CopyOut {
    /// Queues the beginning of a copy of what is applied here. The area must stand still
    /// until the end, or `watch` must have begun. `to`: where the receiver listens, if
    /// streams may be opened to it.
    pub fn begin(
        store: &Store,
        wire: &mut Wire,
        epoch: u64,
        watch: Option<Arc<Watch>>,
        to: Option<&Address>,
    ) -> CopyOut {
        let lsn = store.applied();
        let files: Vec<CatalogEntry> = store.area().files().cloned().collect();
        let bytes = files.iter().map(|f| f.size).sum();
        let begin = CopyBegin {
            volume_id: store.superblock().volume_id,
            lsn,
            files: files.len() as u32,
            bytes,
            copy: store.env().random(),
            history: store.history().entries().to_vec(),
        };
        store.progress.begin(store.env().now(), false, bytes);
        wire.send(FrameKind::CopyBegin, epoch, &begin);
        // A single stream would carry no more than the session's own link.
        let several = store.spec().copy_streams > 1 && !files.is_empty();
        CopyOut {
            lsn,
            watch,
            pause: None,
            round: (usize::MAX, 0),
            pass: Arc::new(CopyPass::new(files)),
            part: Part::default(),
            copy: begin.copy,
            to: to.filter(|_| several).cloned(),
            streams: Vec::new(),
            failure: None,
            broke: None,
            ended: false,
        }
    }

    /// Whether all of it is queued.
    pub fn is_sent(&self) -> bool {
        self.ended
    }

    /// The LSN up to which everything will be in the copy.
    pub fn reached(&self, store: &Store) -> u64 {
        match self.watch.is_none() || self.pause.is_some() {
            true => self.lsn,
            false => store.applied(),
        }
    }

    /// Whether what was read so far still holds: the watch was not revoked.
    pub fn holds(&self) -> bool {
        self.watch.as_ref().is_none_or(|w| w.holds())
    }

    /// Why the copy cannot be completed over streams, as of the last `pump`. What the
    /// receiver said before over the session's own link comes first: it ends the streams
    /// of a copy that it refuses there.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Streams that were opened since the last call; the caller steps them.
    pub fn take_streams(&mut self) -> Vec<StreamOut> {
        std::mem::take(&mut self.streams)
    }

    /// Queues what there is room for. False if nothing could be queued: the
    /// link is full, answers are due, or streams carry what is next.
    pub fn pump(&mut self, store: &Arc<Store>, wire: &mut Wire, epoch: u64) -> Result<bool> {
        if let Some(f) = self.pass.failure() {
            // The reason may still come over the session's own link, if it was lost with
            // the bytes on their way over the stream.
            let now = store.env().now();
            let since = *self.broke.get_or_insert(now);
            if f.refused || now.saturating_sub(since) >= REASON {
                self.failure = Some(f);
            }
            return Ok(false);
        }
        let before = wire.backlog();
        let paused = self.pause.is_some();
        let mut moved = false;
        while !self.ended && wire.backlog() < COPY_BACKLOG && self.step(store, wire, epoch)? {
            moved = true;
        }
        moved |= self.pause.is_some() != paused;
        store.progress.moved((wire.backlog() - before) as u64);
        store.progress.at(self.pass.at());
        Ok(moved)
    }

    /// The receiver's word: what it has of the next file, or which pages it lacks.
    pub fn hear(&mut self, kind: FrameKind, body: &[u8]) -> Result<()> {
        match kind {
            FrameKind::CopyHave => self.pass.have(&CopyHave::decode(body).map_err(bad)?),
            FrameKind::CopyWant => {
                let want = CopyWant::decode(body).map_err(bad)?;
                self.part.want(&self.pass, &want)
            }
            k => Err(Error::Protocol(format!("{k:?} from a copy's receiver"))),
        }
    }

    fn step(&mut self, store: &Arc<Store>, wire: &mut Wire, epoch: u64) -> Result<bool> {
        if let Some(m) = self.pass.announce() {
            wire.send(FrameKind::CopyFile, epoch, &m);
            return Ok(true);
        }
        // A receiver that has answered knows this copy's number.
        if self.to.is_some() && !self.pass.is_answered() {
            return Ok(false);
        }
        if let Some(to) = self.to.take() {
            self.open_streams(store, &to, epoch);
        }
        // What a stream carries must be staged before any of it is sent again.
        let shared = self.pass.is_shared();
        let overtakes = store.mutations.overtake.is_on() && self.pass.is_handed_out();
        if shared && !overtakes {
            return Ok(false);
        }
        match self.part.step(&self.pass, store, wire, epoch)? {
            Went::On => return Ok(true),
            Went::Waits => return Ok(false),
            Went::Through => {}
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
        if shared {
            return Ok(false);
        }
        wire.queue(FrameKind::CopyEnd, epoch, self.lsn, 0, &[]);
        self.ended = true;
        Ok(true)
    }

    /// Opens as many streams as possible; without any, the session's own link carries the
    /// copy.
    fn open_streams(&mut self, store: &Arc<Store>, to: &Address, epoch: u64) {
        for _ in 0..store.spec().copy_streams {
            let Ok(conn) = store.env().connect(to) else {
                break;
            };
            let stream = StreamOut::open(store, &self.pass, conn, epoch, self.copy);
            self.streams.push(stream);
        }
    }

    /// Sends pages that changed since they were read, round by round, for as long as each
    /// round has at most half as many as the one before; the rest while nothing is
    /// applied. False if none is left and none can come, or if that pause has just begun.
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
                // The last of them, and the end, in the next turn. Where what was being applied
                // found no room, the files may show a part of it: the end waits until they do not.
                let pause = watch.pause();
                if store.is_exact() {
                    self.pause = Some(pause);
                    self.lsn = store.applied();
                }
                return Ok(false);
            }
            self.round = (changed, changed);
        }
        let Some((id, range)) = watch.next(COPY_CHUNK as u64 / COPY_PAGE) else {
            return Ok(false);
        };
        let pages = (range.end - range.start) / COPY_PAGE;
        self.round.1 = self.round.1.saturating_sub(pages as usize);
        let f = self.pass.files().iter().find(|f| f.id == id);
        // What lies beyond a file's size is ignored, and so is a file removed.
        if let Some(f) = f.filter(|f| range.start < f.size) {
            let file = store.area().file(id)?;
            let range = range.start..range.end.min(f.size);
            send(store, wire, epoch, f, &*file, range, true)?;
        }
        Ok(true)
    }
}

impl Drop for CopyOut {
    fn drop(&mut self) {
        self.pass.end();
    }
}
