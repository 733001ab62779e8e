//! One replica of a rival: it does what a mirror's lane does with a record, and then what
//! the scheme prescribes.
//!
//! Invariants:
//! - A record is passed on and acknowledged after it is in this replica's log, and
//!   persistent there if the medium persists: all replicas of a chain have what the last
//!   one has acknowledged.
//! - Its log is not reused: it holds the whole run, for [`crate::audit`].

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mojim_env::wire::Wire;
use mojim_env::{Address, Conn, Env};
use mojim_env::{Error, Result};
use mojim_format::{FRAME_LEN, Frame, FrameKind, RECORD_TRAILER_LEN, RecordView, crc32c};
use mojim_linux::Listener;
use mojim_protocol::{Arrival, History, LaneIn};
use mojim_replica::link::{Carrier, Front, PAGE_LEN, Page, RingIn, Tx};
use mojim_replica::spinner::Spinner;
use mojim_store::log::{CONTROL_LEN, Log, LogSpec};

use crate::order::{LIMIT, Order, Ring, Transport, hear, pass, say, take, words};
use crate::{EPOCH, history, open};

/// A defect of a replica, for the tests of the audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Acknowledges this LSN without having put it into its log.
    Drop(u64),
    /// Changes the last byte of this LSN's payload, with a checksum that fits.
    Change(u64),
}

/// The parameters of a replica.
#[derive(Debug, Clone)]
pub struct ReplicaSpec {
    /// Its log, large enough for the whole run.
    pub log: LogSpec,
    /// How long it polls before it blocks.
    pub spin: Duration,
    /// `None` except in tests.
    pub mutation: Option<Mutation>,
}

/// Serves one run; ends when the sender of the records has closed its link.
pub fn serve(env: &Arc<dyn Env>, listener: &Listener, spec: &ReplicaSpec) -> Result<()> {
    let Links {
        mut primary,
        order,
        pages,
        before,
        ring,
    } = links(env, listener)?;
    let shared = order.transport == Transport::Shm;
    let (log, _) = open(env, &spec.log, order.volume)?;
    let feed = match pages.first() {
        Some(page) => {
            let memory = take(&*before, CONTROL_LEN + ring.size as usize, false)?;
            let ring = RingIn::new(memory, ring.size, ring.align, 0, page.clone())?;
            Feed::Ring(ring, 0)
        }
        None => Feed::Stream(Stream {
            buf: vec![0; (log.size() as usize / 2).min(1 << 20) + FRAME_LEN],
            from: 0,
            to: 0,
        }),
    };
    let next = match &order.next {
        None => None,
        Some(address) => {
            let mut wire = Wire::new(connect(env, address)?);
            say(&mut wire, &**env, FrameKind::Lane, &Ring::of(&log))?;
            let mut carrier = Carrier::Stream;
            if shared {
                pass(&*wire.conn, log.memory())?;
                carrier = Carrier::Shared(pages[1].clone());
            }
            Some((Tx::new(wire.conn.clone(), carrier, 0), wire.conn))
        }
    };
    say(&mut primary, &**env, FrameKind::LaneOk, &())?;
    let mut replica = Replica {
        feed,
        before,
        kept: Kept {
            log,
            lane: LaneIn::new(order.volume, 0, 0),
            history: history(),
            mutation: spec.mutation,
        },
        next,
        answer: order.answers.then_some(primary.conn),
    };
    let mut spinner = Spinner::learning(spec.spin);
    loop {
        match replica.step()? {
            Step::Moved(..) => spinner.hit(&**env),
            Step::Ended => break,
            Step::Nothing if !spinner.spin(&**env) => {
                if replica.wait()? {
                    break;
                }
            }
            Step::Nothing if spinner.gives_way() => std::thread::yield_now(),
            Step::Nothing => std::hint::spin_loop(),
        }
    }
    if let Some((_, conn)) = &replica.next {
        conn.close();
    }
    // From here on, for a log on a disk, only what is on the disk counts.
    replica.kept.log.remove_ring();
    Ok(())
}

/// Connects to a replica; an address that is not an IP address is a Unix socket's path.
pub(crate) fn connect(env: &Arc<dyn Env>, address: &str) -> Result<Arc<dyn Conn>> {
    let to = match address.parse::<SocketAddr>() {
        Ok(tcp) => Address::Tcp(tcp),
        Err(_) => Address::Unix(address.into()),
    };
    env.connect(&to)
        .map_err(|e| Error::io(format!("connecting to {address}"), &e))
}

/// All links of one replica.
struct Links {
    primary: Wire,
    order: Order,
    /// Over shared memory: the page shared with the sender of records, and that shared
    /// with the next.
    pages: Vec<Page>,
    /// The link to the sender of records, and the layout of its log.
    before: Arc<dyn Conn>,
    ring: Ring,
}

/// Accepts the primary's link, and that of the replica before this one if there is one.
fn links(env: &Arc<dyn Env>, listener: &Listener) -> Result<Links> {
    let (mut ordered, mut before) = (None, None);
    loop {
        let conn = listener
            .accept(LIMIT)
            .map_err(|e| Error::io("waiting for a link", &e))?
            .ok_or_else(|| Error::Timeout("nobody came".into()))?;
        let mut wire = Wire::new(conn);
        match hear(&mut wire, &**env)? {
            (f, body) if f.kind == FrameKind::Request => {
                let order: Order = words(&body)?;
                let n = match order.transport {
                    Transport::Tcp => 0,
                    Transport::Shm => 1 + order.next.iter().len(),
                };
                let pages: Result<Vec<Page>> = (0..n)
                    .map(|_| Ok(Page::new(take(&*wire.conn, PAGE_LEN, true)?)))
                    .collect();
                if order.first {
                    let (f, body) = hear(&mut wire, &**env)?;
                    if f.kind != FrameKind::Lane {
                        return Err(Error::Protocol(format!("{:?} came second", f.kind)));
                    }
                    before = Some((wire.conn.clone(), words(&body)?));
                }
                ordered = Some((wire, order, pages?));
            }
            (f, body) if f.kind == FrameKind::Lane => before = Some((wire.conn, words(&body)?)),
            (f, _) => return Err(Error::Protocol(format!("{:?} came first", f.kind))),
        }
        match (ordered, before) {
            (Some((primary, order, pages)), Some((before, ring))) => {
                return Ok(Links {
                    primary,
                    order,
                    pages,
                    before,
                    ring,
                });
            }
            some => (ordered, before) = some,
        }
    }
}

/// Where records come from.
enum Feed {
    Stream(Stream),
    /// The sender's log, and how many looks at it found nothing.
    Ring(RingIn, u32),
}

/// Bytes that were received and not taken yet.
struct Stream {
    buf: Vec<u8>,
    from: usize,
    to: usize,
}

impl Stream {
    /// The frame and body at the front, if they are complete.
    fn front(&self) -> Result<Option<(Frame, &[u8])>> {
        let came = &self.buf[self.from..self.to];
        if came.len() < FRAME_LEN {
            return Ok(None);
        }
        let f = Frame::decode(came).map_err(|e| Error::Protocol(e.to_string()))?;
        let whole = FRAME_LEN + f.body as usize;
        if whole > self.buf.len() {
            return Err(Error::Protocol(format!("a frame of {whole} bytes")));
        }
        Ok(came.get(FRAME_LEN..whole).map(|body| (f, body)))
    }

    /// Makes one receive call: returns how many bytes came, 0 at the link's end.
    fn fill(&mut self, conn: &dyn Conn) -> Result<Option<usize>> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.buf.len() - self.to < self.buf.len() / 2 {
            self.buf.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let n = receive(conn, &mut self.buf[self.to..])?;
        self.to += n.unwrap_or(0);
        Ok(n)
    }
}

fn receive(conn: &dyn Conn, room: &mut [u8]) -> Result<Option<usize>> {
    match conn.recv(&mut [IoSliceMut::new(room)]) {
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(Error::io("receiving", &e)),
    }
}

/// The result of one look at the feed.
enum Step {
    Nothing,
    /// Records were taken: the committed LSN that came with them, and the length of the
    /// last one.
    Moved(u64, usize),
    Ended,
}

/// This replica's copy: its log, and which records may enter it.
struct Kept {
    log: Log,
    lane: LaneIn,
    history: History,
    mutation: Option<Mutation>,
}

impl Kept {
    /// Takes a record of `len` bytes, which `fetch` puts into the given buffer.
    fn take(&mut self, len: usize, fetch: impl FnOnce(&mut [u8])) -> Result<()> {
        let head = self.log.head();
        // Nothing is ever released, so a record is placed at the head or has no room.
        if self.log.place(head, len) != Some(head) {
            return Err(Error::Invalid("this log is too small for the run".into()));
        }
        // SAFETY: only this thread appends to this log; `head` is its head, and `place`
        // returned it. A record that is then refused is not published.
        let slot = unsafe { self.log.slot(head, head, len, 0, 0) };
        fetch(slot);
        let h = match RecordView::decode(slot) {
            Ok(r) if r.bytes().len() == len => r.header,
            Ok(_) => return Err(Error::Protocol("a frame larger than its record".into())),
            Err(e) => return Err(Error::Protocol(e.to_string())),
        };
        match self.lane.arrive(&h, &self.history) {
            Arrival::Accept => {}
            Arrival::Duplicate => return Ok(()),
            Arrival::Refuse(why) => return Err(Error::Protocol(why)),
        }
        match self.mutation {
            Some(Mutation::Drop(lsn)) if lsn == h.lsn => {
                // A recovery would count its bytes, published or not.
                slot.fill(0);
                return Ok(());
            }
            Some(Mutation::Change(lsn)) if lsn == h.lsn => change(slot),
            _ => {}
        }
        self.log.publish(head, len);
        Ok(())
    }
}

fn change(record: &mut [u8]) {
    let end = record.len() - RECORD_TRAILER_LEN;
    record[end - 1] ^= 1;
    let sum = crc32c(&record[..end]);
    record[end..end + 4].copy_from_slice(&sum.to_le_bytes());
}

struct Replica {
    feed: Feed,
    /// The link to the sender of records; over shared memory it only tells of the
    /// sender's end.
    before: Arc<dyn Conn>,
    kept: Kept,
    next: Option<(Tx, Arc<dyn Conn>)>,
    answer: Option<Arc<dyn Conn>>,
}

impl Replica {
    /// Takes records that have come, makes them persistent, passes them on and
    /// acknowledges them.
    fn step(&mut self) -> Result<Step> {
        let step = self.receive()?;
        let Step::Moved(committed, size) = step else {
            return Ok(step);
        };
        let log = &self.kept.log;
        log.persist(log.head())?;
        if let Some((tx, conn)) = &mut self.next {
            let link = |e| Error::io("link to the next replica", &e);
            tx.pump(log, EPOCH, committed).map_err(link)?;
            while tx.is_behind(log) {
                conn.wait(true, LIMIT).map_err(link)?;
                tx.pump(log, EPOCH, committed).map_err(link)?;
            }
        }
        if let Some(conn) = &self.answer {
            let (lsn, level) = (self.kept.lane.last(), log.level() as u16);
            match &self.feed {
                Feed::Ring(ring, _) => ring.ack(lsn, level),
                Feed::Stream(_) => {
                    acknowledge(&**conn, lsn, level).map_err(|e| Error::io("acknowledging", &e))?
                }
            }
        }
        log.prefetch(size);
        Ok(step)
    }

    fn receive(&mut self) -> Result<Step> {
        match &mut self.feed {
            Feed::Stream(s) => {
                match s.fill(&*self.before)? {
                    None => return Ok(Step::Nothing),
                    Some(0) => return Ok(Step::Ended),
                    Some(_) => {}
                }
                let (mut committed, mut size) = (0, 0);
                while let Some((f, body)) = s.front()? {
                    if f.epoch != EPOCH || f.kind != FrameKind::Record {
                        return Err(Error::Protocol(format!("{:?} of {}", f.kind, f.epoch)));
                    }
                    self.kept.take(body.len(), |to| to.copy_from_slice(body))?;
                    committed = committed.max(f.lsn);
                    size = body.len();
                    s.from += FRAME_LEN + size;
                }
                match size {
                    0 => Ok(Step::Nothing),
                    _ => Ok(Step::Moved(committed, size)),
                }
            }
            Feed::Ring(ring, vain) => {
                let Front::Record(mut size) = ring.front()? else {
                    *vain = vain.wrapping_add(1);
                    if vain.is_multiple_of(4096) && has_ended(&*self.before)? {
                        return Ok(Step::Ended);
                    }
                    return Ok(Step::Nothing);
                };
                loop {
                    self.kept.take(size, |to| ring.take(to))?;
                    match ring.front()? {
                        Front::Record(n) => size = n,
                        Front::Nothing => return Ok(Step::Moved(ring.committed(), size)),
                    }
                }
            }
        }
    }

    /// Blocks until something may have come. True if that is the link's end.
    fn wait(&self) -> Result<bool> {
        let limit = Duration::from_millis(50);
        match &self.feed {
            Feed::Stream(_) => {
                // The next step finds the end, or an error.
                let _ = self.before.wait(false, limit);
                Ok(false)
            }
            Feed::Ring(ring, _) => {
                ring.wait(limit);
                has_ended(&*self.before)
            }
        }
    }
}

/// Whether the stream beside a shared log was closed.
fn has_ended(conn: &dyn Conn) -> Result<bool> {
    match receive(conn, &mut [0])? {
        None => Ok(false),
        Some(0) => Ok(true),
        Some(_) => Err(Error::Protocol("bytes beside a shared log".into())),
    }
}

fn acknowledge(conn: &dyn Conn, lsn: u64, level: u16) -> io::Result<()> {
    let ack = Frame {
        kind: FrameKind::Ack,
        flags: level,
        epoch: EPOCH,
        lsn,
        body: 0,
    };
    let ack = ack.encode();
    let mut bytes = &ack[..];
    while !bytes.is_empty() {
        match conn.send(&[IoSlice::new(bytes)]) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                conn.wait(true, LIMIT)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
