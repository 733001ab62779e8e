//! A mirror's end of a lane: records come in, are checked, appended and acknowledged.
//!
//! Invariant: an acknowledgement is sent only for records that lie in the log without a
//! gap, as durably as it says.

use super::*;
use crate::core_placement::CorePlacement;
use crate::lane_concurrency::LaneConcurrency;
use crate::link::{POLLS_OF_MEMORY, POLLS_OF_STREAM};
use mojim_store::log::Log;

/// Longest time without a record applied after which applying still counts as going on.
const LONGEST_TURN: Duration = Duration::from_secs(10);

enum Feed {
    Stream(StreamIn),
    Ring(RingIn),
}

/// What came over a stream and was not taken yet: `from..to` of `buf`.
struct StreamIn {
    buf: Vec<u8>,
    from: usize,
    to: usize,
}

/// What one step took of a stream.
struct Batch {
    /// The last LSN that is committed, as its frames say.
    committed: u64,
    /// Bytes of the last record; 0: none was taken.
    size: usize,
    /// How many records were taken.
    records: u32,
    step: Step,
}

/// A lane while its lock is held (`lane` is what it guards): only this thread appends to
/// its log.
struct Appender<'a> {
    mirror: &'a Mirror,
    number: usize,
    lane: &'a mut LaneIn,
    log: &'a Log,
    history: &'a History,
    volume: u64,
    /// The `said` of its [`LaneServer`].
    said: &'a mut Option<Duration>,
}

/// What one step of a lane did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing had come.
    Nothing,
    /// Records were taken and acknowledged.
    Moved,
    /// The log has no room until a checkpoint.
    Full,
    /// A backup lacks too much for more to be taken, or too much is to be applied.
    Held,
}

/// The receiving end of one lane.
pub struct LaneServer {
    mirror: Arc<Mirror>,
    lane: usize,
    session: u64,
    epoch: u64,
    volume: u64,
    /// Of the session, so fixed for this lane.
    history: Arc<History>,
    conn: Arc<dyn Conn>,
    source: Feed,
    /// The acknowledgement that the link did not take yet: its bytes from `.1` on.
    unsent: Option<([u8; FRAME_LEN], usize)>,
    /// When the primary was last told that this lane waits for a backup;
    /// nothing was taken since.
    said: Option<Duration>,
    polls: u32,
    concurrency: LaneConcurrency,
    placement: CorePlacement,
}

impl LaneServer {
    /// Accepts a lane whose first word was `l`, or says why not. For shared
    /// memory this waits for the peer to pass it.
    pub fn accept(
        mirror: Arc<Mirror>,
        mut wire: Wire,
        epoch: u64,
        l: &Lane,
    ) -> Result<LaneServer, (Wire, Refusal)> {
        let lane = l.lane as usize;
        if mirror.session.load(Acquire) != l.session
            || mirror.store.superblock().promised != epoch
            || l.session == 0
        {
            let no = Refusal::new(RefuseCode::StaleEpoch, "the session of this lane is over");
            return Err((wire, no));
        }
        if lane >= mirror.lanes.len() {
            let no = Refusal::new(RefuseCode::Protocol, format!("there is no lane {lane}"));
            return Err((wire, no));
        }
        let source = if l.ring == 0 {
            let most = mirror.store.logs()[lane].size() as usize / 2;
            Feed::Stream(StreamIn {
                buf: vec![0; (most.min(1 << 20) + 2 * FRAME_LEN).max(64 << 10)],
                from: 0,
                to: 0,
            })
        } else {
            let shared = (|| -> Result<RingIn> {
                if l.ring > 1 << 40 {
                    return Err(Error::Protocol("a shared ring of impossible size".into()));
                }
                wire.queue(FrameKind::LaneOk, epoch, 0, 1, &[]);
                wire.flush()?;
                let get = |len, write| {
                    wire.conn
                        .recv_memory(len, write)
                        .map_err(|e| Error::io("taking shared memory", &e))
                };
                let ring = get(CONTROL_LEN + l.ring as usize, false)?;
                let page = get(PAGE_LEN, true)?;
                RingIn::new(ring, l.ring, l.align as u64, l.position, Page::new(page))
            })();
            match shared {
                Ok(r) => Feed::Ring(r),
                Err(e) => return Err((wire, Refusal::from(e))),
            }
        };
        wire.queue(FrameKind::LaneOk, epoch, 0, 0, &[]);
        if let Err(e) = wire.flush() {
            return Err((wire, Refusal::from(e)));
        }
        let volume = mirror.store.superblock().volume_id;
        let history = mirror.store.history();
        Ok(LaneServer {
            mirror,
            lane,
            volume,
            history,
            session: l.session,
            epoch,
            conn: wire.conn,
            source,
            unsent: None,
            said: None,
            polls: 0,
            concurrency: LaneConcurrency::default(),
            placement: CorePlacement::default(),
        })
    }

    /// The connection.
    pub fn conn(&self) -> &Arc<dyn Conn> {
        &self.conn
    }

    /// Nothing came: whether other threads should have the processor before the next poll.
    #[inline]
    pub fn gives_way(&mut self) -> bool {
        self.concurrency.gives_way(match self.source {
            Feed::Ring(_) => POLLS_OF_MEMORY,
            Feed::Stream(_) => POLLS_OF_STREAM,
        })
    }

    /// A step took so many records, and acknowledged them. With several threads of the program
    /// on this host the processors do not suffice, and who is where matters less than who waits.
    #[inline]
    fn took(&mut self, records: u32) {
        self.concurrency.took(records);
        if !self.concurrency.is_there() {
            let env = &**self.mirror.store.env();
            match &self.source {
                Feed::Ring(ring) => self.placement.step(env, 32, || ring.processor()),
                Feed::Stream(_) => self.placement.step(env, 4, || self.conn.processor()),
            }
        }
    }

    /// One step: takes what has come, acknowledges it. An error ends the lane.
    #[inline]
    pub fn step(&mut self) -> Result<Step> {
        let r = match self.source {
            Feed::Ring(_) => self.step_ring(),
            Feed::Stream(_) => self.step_stream(),
        };
        if let Err(e) = &r {
            self.refuse(e);
        }
        r
    }

    #[cold]
    fn refuse(&mut self, e: &Error) {
        if let Error::Protocol(_) | Error::Poisoned(_) | Error::Full(_) = e {
            let mut wire = Wire::new(self.conn.clone());
            refuse(&mut wire, self.epoch, &Refusal::from(e.clone()));
        }
        self.conn.close();
    }

    fn step_ring(&mut self) -> Result<Step> {
        let Feed::Ring(ring) = &mut self.source else {
            unreachable!("checked by the caller");
        };
        let Front::Record(mut len) = ring.front()? else {
            self.polls = self.polls.wrapping_add(1);
            if self.polls.is_multiple_of(4096) {
                self.check_alive()?;
            }
            return Ok(Step::Nothing);
        };
        let m = &*self.mirror;
        let mut guard = lock(&m.lanes[self.lane]);
        let lane = current(m, self.session, &mut guard)?;
        let log = &m.store.logs()[self.lane];
        let first = log.head();
        let mut appender = Appender {
            mirror: m,
            number: self.lane,
            lane,
            log,
            history: &self.history,
            volume: self.volume,
            said: &mut self.said,
        };
        let mut records = 0;
        let taken = appender.take_ring(ring, &mut len, &mut records);
        let last = appender.lane.last();
        // Also if a record cannot be taken: this lane's log acknowledges those before it
        // in the next session, and a promotion cuts off what does not count.
        m.landed(self.lane, first)?;
        let step = taken?;
        let committed = ring.committed();
        ring.ack(last, m.store.level() as u16);
        if step == Step::Held && m.tells(&mut self.said) {
            ring.say_waits();
        }
        log.prefetch(len);
        drop(guard);
        m.backups.work.notify();
        m.learn(committed);
        self.took(records);
        Ok(step)
    }

    fn step_stream(&mut self) -> Result<Step> {
        if self.unsent.is_some() && !self.send_ack()? {
            return Ok(Step::Nothing);
        }
        let m = self.mirror.clone();
        let Feed::Stream(stream) = &mut self.source else {
            unreachable!("checked by the caller");
        };
        let log = &m.store.logs()[self.lane];
        if !stream.receive(&*self.conn, log)? {
            return Ok(Step::Nothing);
        }
        let mut guard = lock(&m.lanes[self.lane]);
        let lane = current(&m, self.session, &mut guard)?;
        let first = log.head();
        let mut appender = Appender {
            mirror: &m,
            number: self.lane,
            lane,
            log,
            history: &self.history,
            volume: self.volume,
            said: &mut self.said,
        };
        let taken = appender.take_stream(stream, self.epoch);
        let last = appender.lane.last();
        if taken.is_err() {
            // The records before the one that failed count, as in `step_ring`.
            m.landed(self.lane, first)?;
        }
        let batch = taken?;
        let mut flags = m.store.level() as u16;
        if batch.step != Step::Moved && batch.size == 0 {
            m.learn(batch.committed);
            if batch.step == Step::Full || !m.tells(&mut self.said) {
                return Ok(batch.step);
            }
            flags |= WAITS;
        }
        m.landed(self.lane, first)?;
        drop(guard);
        self.acknowledge(last, flags)?;
        log.prefetch(batch.size);
        m.backups.work.notify();
        m.learn(batch.committed);
        self.took(batch.records);
        Ok(batch.step)
    }

    /// Acknowledges over the stream, as far as the link takes it now.
    #[inline]
    fn acknowledge(&mut self, last: u64, flags: u16) -> Result<bool> {
        let ack = Frame {
            kind: FrameKind::Ack,
            flags,
            epoch: self.epoch,
            lsn: last,
            body: 0,
        };
        self.unsent = Some((ack.encode(), 0));
        self.send_ack()
    }

    fn send_ack(&mut self) -> Result<bool> {
        while let Some((bytes, at)) = &mut self.unsent {
            match self.conn.send(&[IoSlice::new(&bytes[*at..])]) {
                Ok(n) if *at + n == FRAME_LEN => self.unsent = None,
                Ok(n) => *at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(Error::io("acknowledging to the primary", &e)),
            }
        }
        Ok(true)
    }

    /// For a lane of shared memory: is the peer's stream still open?
    fn check_alive(&mut self) -> Result<()> {
        if self.mirror.session.load(Acquire) != self.session {
            return Err(Error::Stale("the session of this lane is over".into()));
        }
        let mut b = [0u8; 1];
        match self.conn.recv(&mut [IoSliceMut::new(&mut b)]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Ok(0) => Err(Error::Timeout("the primary closed the link".into())),
            Ok(_) => Err(Error::Protocol("bytes on a lane of shared memory".into())),
            Err(e) => Err(Error::io("the primary's link", &e)),
        }
    }

    /// Blocks until something may have come, or `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<()> {
        match &self.source {
            Feed::Ring(r) => {
                r.wait(timeout);
                self.check_alive()
            }
            Feed::Stream(_) => {
                let _ = self.conn.wait(self.unsent.is_some(), timeout);
                if self.mirror.session.load(Acquire) != self.session {
                    self.conn.close();
                    return Err(Error::Stale("the session of this lane is over".into()));
                }
                Ok(())
            }
        }
    }
}

impl StreamIn {
    /// What has come and was not taken.
    #[inline]
    fn rest(&self) -> &[u8] {
        &self.buf[self.from..self.to]
    }

    /// Takes bytes from `conn`, unless a whole frame is here already. False if there is
    /// none afterwards. `log`: where the frame's record is to go.
    #[inline]
    fn receive(&mut self, conn: &dyn Conn, log: &Log) -> Result<bool> {
        if has_whole(self.rest())? {
            return Ok(true);
        }
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 && self.buf.len() - self.to < self.buf.len() / 2 {
            self.close_up();
        }
        match conn.recv(&mut [IoSliceMut::new(&mut self.buf[self.to..])]) {
            Ok(0) => return Err(Error::Timeout("the primary closed the link".into())),
            Ok(n) => self.to += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(e) => return Err(Error::io("receiving from the primary", &e)),
        }
        if has_whole(self.rest())? {
            return Ok(true);
        }
        self.make_room(log)?;
        Ok(false)
    }

    /// Makes room for the rest of a frame that is here in part.
    fn make_room(&mut self, log: &Log) -> Result<()> {
        let need = needed(self.rest());
        let most = log.size() as usize / 2 + FRAME_LEN;
        if need > most {
            return Err(Error::Protocol(format!(
                "a record of {need} bytes, {most} at most fit this node's log"
            )));
        }
        if need > self.buf.len() {
            self.buf.resize(need, 0);
        }
        if self.from + need > self.buf.len() {
            self.close_up();
        }
        Ok(())
    }

    /// Moves what is here to the front.
    fn close_up(&mut self) {
        self.buf.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
    }
}

impl Appender<'_> {
    /// Takes the records in `ring`, the first of which has `len` bytes. Afterwards `len`
    /// is the length of the last record that was seen, taken or not; `records` is how many
    /// were taken.
    #[inline]
    fn take_ring(&mut self, ring: &mut RingIn, len: &mut usize, records: &mut u32) -> Result<Step> {
        *records = 0;
        loop {
            match self.take_front(ring, *len)? {
                Step::Moved => *records += 1,
                step => return Ok(step),
            }
            match ring.front()? {
                Front::Record(n) => *len = n,
                Front::Nothing => return Ok(Step::Moved),
            }
        }
    }

    /// Takes the record of `len` bytes at the front of `ring`: it is copied to where it
    /// belongs in the log, and checked there, since its sender may still change it in the
    /// ring.
    #[inline]
    fn take_front(&mut self, ring: &mut RingIn, len: usize) -> Result<Step> {
        let log = self.log;
        check_len(len, log.size())?;
        let (head, at) = match self.place(len) {
            Ok(place) => place,
            Err(step) => return Ok(step),
        };
        // SAFETY: this lane's lock is held, so only this thread appends;
        // `at` is of the present head. A pad written for a record that is
        // then refused lies beyond the head and means nothing.
        let slot = unsafe { log.slot(head, at, len, self.volume, self.lane.last() + 1) };
        ring.take(slot);
        let r = RecordView::decode(slot)
            .map_err(|e| Error::Protocol(format!("a record in shared memory: {e}")))?;
        let h = r.header;
        if h.len as usize != len {
            return Err(Error::Protocol(
                "a record changed while it was copied".into(),
            ));
        }
        self.mirror.check_spill(&r)?;
        match self.lane.arrive(&h, self.history) {
            Arrival::Accept => {
                if at != head {
                    // SAFETY: as above; the pad now names its record.
                    let _ = unsafe { log.slot(head, at, 0, h.volume, h.lsn) };
                }
                log.publish(at, len);
            }
            Arrival::Duplicate => {
                self.mirror.received.mark(h.lsn);
            }
            Arrival::Refuse(why) => return Err(Error::Protocol(why)),
        }
        Ok(Step::Moved)
    }

    /// Takes the whole frames of `stream`, which are of `epoch`.
    #[inline]
    fn take_stream(&mut self, stream: &mut StreamIn, epoch: u64) -> Result<Batch> {
        let mut batch = Batch {
            committed: 0,
            size: 0,
            records: 0,
            step: Step::Moved,
        };
        while has_whole(stream.rest())? {
            let (r, committed) = self.record(stream.rest(), epoch)?;
            let len = r.bytes().len();
            check_len(len, self.log.size())?;
            // Also from a frame whose record has no room: a log may be full of records that
            // are committed and not known to be.
            batch.committed = batch.committed.max(committed);
            batch.step = self.append(&r)?;
            if batch.step != Step::Moved {
                break;
            }
            batch.size = len;
            batch.records += 1;
            stream.from += FRAME_LEN + len;
        }
        Ok(batch)
    }

    /// The record in the frame at the start of `bytes`, which hold at least that frame,
    /// and the last LSN that is committed.
    #[inline]
    fn record<'b>(&self, bytes: &'b [u8], epoch: u64) -> Result<(RecordView<'b>, u64)> {
        let f = Frame::decode(bytes).expect("checked by has_whole");
        if f.epoch != epoch || f.kind != FrameKind::Record {
            return Err(Error::Protocol(format!(
                "{:?} of epoch {} on a lane of epoch {epoch}",
                f.kind, f.epoch
            )));
        }
        let body = &bytes[FRAME_LEN..FRAME_LEN + f.body as usize];
        let r = match self.mirror.store.mutations.trust_wire.is_on() {
            false => RecordView::decode(body),
            true => RecordView::trusted(body),
        };
        let r = r.map_err(|e| Error::Protocol(e.to_string()))?;
        if r.bytes().len() != body.len() {
            return Err(Error::Protocol("a frame larger than its record".into()));
        }
        Ok((r, f.lsn))
    }

    /// Copies a record that came over a stream, and was checked, into the log.
    #[inline]
    fn append(&mut self, r: &RecordView<'_>) -> Result<Step> {
        let len = r.bytes().len();
        let (head, at) = match self.place(len) {
            Ok(place) => place,
            Err(step) => return Ok(step),
        };
        self.mirror.check_spill(r)?;
        match self.lane.arrive(&r.header, self.history) {
            Arrival::Accept => {
                // SAFETY: this lane's lock is held, so only this thread
                // appends; `at` is of the present head.
                let slot = unsafe { self.log.slot(head, at, len, r.header.volume, r.header.lsn) };
                slot.copy_from_slice(r.bytes());
                self.log.publish(at, len);
            }
            Arrival::Duplicate => {
                self.mirror.received.mark(r.header.lsn);
            }
            Arrival::Refuse(why) => return Err(Error::Protocol(why)),
        }
        Ok(Step::Moved)
    }

    /// The log's head, and where a record of `len` bytes goes behind it; or what the lane
    /// waits for.
    // Always: with two callers the compiler would not inline it, and every record goes
    // through it.
    #[inline(always)]
    fn place(&mut self, len: usize) -> std::result::Result<(u64, u64), Step> {
        let head = self.log.head();
        let place = self.log.place(head, len);
        let m = self.mirror;
        let held = m.backups.is_full(&m.store) || m.store.is_laden();
        match place.filter(|_| !held) {
            Some(at) => {
                *self.said = None;
                Ok((head, at))
            }
            None => Err(m.blocked(self.number, place.is_some())),
        }
    }
}

fn current<'a>(
    m: &Mirror,
    session: u64,
    guard: &'a mut MutexGuard<'_, Option<LaneIn>>,
) -> Result<&'a mut LaneIn> {
    if m.session.load(SeqCst) != session {
        return Err(Error::Stale("the session of this lane is over".into()));
    }
    guard
        .as_mut()
        .ok_or_else(|| Error::Stale("the session of this lane is over".into()))
}

fn check_len(len: usize, log: u64) -> Result<()> {
    if len as u64 > log / 2 - 4096 {
        return Err(Error::Protocol(format!(
            "a record of {len} bytes does not fit this node's log of {log}"
        )));
    }
    Ok(())
}

fn needed(b: &[u8]) -> usize {
    match Frame::decode(b) {
        Ok(f) => FRAME_LEN + f.body as usize,
        Err(_) => FRAME_LEN,
    }
}

fn has_whole(b: &[u8]) -> Result<bool> {
    if b.len() < FRAME_LEN {
        return Ok(false);
    }
    let f = Frame::decode(b).map_err(|e| Error::Protocol(e.to_string()))?;
    Ok(b.len() >= FRAME_LEN + f.body as usize)
}

impl Mirror {
    /// Why lane `lane` takes nothing: its log is full if there is no `room` and no backup
    /// keeps it so; else a backup holds it back, or what is to be applied.
    #[cold]
    pub(super) fn blocked(&self, lane: usize, room: bool) -> Step {
        match room || self.store.is_kept(lane) {
            true => Step::Held,
            false => Step::Full,
        }
    }

    /// Whether it is time to tell the primary (again) that a lane waits. Not where it waits for
    /// records to be applied, and none has been for long: then this node is at fault.
    pub(super) fn tells(&self, said: &mut Option<Duration>) -> bool {
        let now = self.store.env().now();
        if self.store.is_laden() && now.saturating_sub(self.store.last_applied()) > LONGEST_TURN {
            return false;
        }
        let every = HEARTBEAT.min(self.silence / 4);
        let due = said.is_none_or(|at| now.saturating_sub(at) >= every);
        if due {
            *said = Some(now);
        }
        due
    }

    /// Refuses a record that names a spill file which is not durable here.
    #[inline]
    pub(super) fn check_spill(&self, r: &RecordView<'_>) -> Result<()> {
        let Some((id, want)) = named_spill(r)? else {
            return Ok(());
        };
        let len = self.store.durable_spill(id);
        if len != Some(want) {
            return Err(Error::Protocol(format!(
                "record {} names spill file {id} of {want} bytes; {} are durable here",
                r.header.lsn,
                len.unwrap_or(0)
            )));
        }
        Ok(())
    }

    /// Records from position `first` on are in the log: makes them persistent
    /// if the medium does, and counts them as received.
    #[inline]
    pub(super) fn landed(&self, lane: usize, first: u64) -> Result<()> {
        let log = &self.store.logs()[lane];
        let head = log.head();
        // Records that an earlier batch published before it failed must be persisted too.
        if first == head && log.persisted() >= head {
            return Ok(());
        }
        self.store.check()?;
        let r = log.persist_arrived(head);
        self.store.fail(r)?;
        let mut marks = Marks::of(&self.received);
        for r in log.records(first) {
            marks.add(r.header.lsn);
        }
        marks.flush();
        Ok(())
    }
}
