//! One replica of a rival: what a mirror's lane does with a record, and where
//! the scheme has it go from there.
//!
//! Invariants:
//! - A record is passed on and acknowledged after it is in this replica's log,
//!   and persistent there if the medium persists: what the last of a chain has
//!   acknowledged, all have.
//! - Its log is not reused: it holds the whole run, for [`crate::audit`].

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mojim::env::{Address, Conn, Env};
use mojim::link::{Carrier, Tx, Wire};
use mojim::log::{Log, LogSpec};
use mojim::os::Listener;
use mojim::spinner::Spinner;
use mojim::{Error, Result};
use mojim_format::{FRAME_LEN, Frame, FrameKind, RECORD_TRAILER_LEN, RecordView, crc32c};
use mojim_protocol::{Arrival, History, LaneIn};

use crate::order::{LIMIT, Order, hear, say};
use crate::{EPOCH, history, open};

/// How a replica is wrong, for the tests of the audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Acknowledges this LSN without having put it into its log.
    Drop(u64),
    /// Puts another last byte of payload there, with a sum that fits it.
    Change(u64),
}

/// What a replica needs of its node.
#[derive(Debug, Clone)]
pub struct ReplicaSpec {
    /// Its log, large enough for the whole run.
    pub log: LogSpec,
    /// How long it polls before it blocks.
    pub spin: Duration,
    /// `None`, but for tests.
    pub mutation: Option<Mutation>,
}

/// Serves one run; ends when the records' sender has closed its link.
pub fn serve(env: &Arc<dyn Env>, listener: &Listener, spec: &ReplicaSpec) -> Result<()> {
    let (mut primary, order, before) = links(env, listener)?;
    let conn = before.unwrap_or_else(|| primary.conn.clone());
    let (log, _) = open(env, &spec.log, order.volume)?;
    let next = match &order.next {
        None => None,
        Some(address) => {
            let mut wire = Wire::new(connect(env, address)?);
            say(&mut wire, &**env, FrameKind::Lane, &[])?;
            let tx = Tx::new(wire.conn.clone(), Carrier::Stream, 0);
            Some((tx, wire.conn))
        }
    };
    say(&mut primary, &**env, FrameKind::LaneOk, &[])?;
    let mut replica = Replica {
        feed: Feed {
            conn,
            buf: vec![0; (log.size() as usize / 2).min(1 << 20) + FRAME_LEN],
            from: 0,
            to: 0,
        },
        next,
        answer: order.answers.then_some(primary.conn),
        lane: LaneIn::new(order.volume, 0, 0),
        history: history(),
        mutation: spec.mutation,
        log,
    };
    let mut spinner = Spinner::learning(spec.spin);
    loop {
        match replica.step()? {
            Step::Moved => spinner.hit(&**env),
            Step::Ended => break,
            Step::Nothing if !spinner.spin(&**env) => {
                // An error shows at the next step.
                let _ = replica.feed.conn.wait(false, Duration::from_millis(200));
            }
            Step::Nothing if spinner.gives_way() => std::thread::yield_now(),
            Step::Nothing => std::hint::spin_loop(),
        }
    }
    if let Some((_, conn)) = &replica.next {
        conn.close();
    }
    // Of a log on a disk, only what is on the disk counts from here on.
    replica.log.remove_ring();
    Ok(())
}

/// Connects to a replica.
pub(crate) fn connect(env: &Arc<dyn Env>, address: &str) -> Result<Arc<dyn Conn>> {
    let socket: SocketAddr = address
        .parse()
        .map_err(|_| Error::Invalid(format!("{address}: not an address")))?;
    env.connect(&Address::Tcp(socket))
        .map_err(|e| Error::io(format!("connecting to {address}"), &e))
}

type Links = (Wire, Order, Option<Arc<dyn Conn>>);

/// Takes the primary's link, and that of the replica before this one if there
/// is one.
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
                let order: Order = serde_json::from_slice(&body)
                    .map_err(|e| Error::Protocol(format!("no order: {e}")))?;
                ordered = Some((wire, order));
            }
            (f, _) if f.kind == FrameKind::Lane => before = Some(wire.conn),
            (f, _) => return Err(Error::Protocol(format!("{:?} came first", f.kind))),
        }
        if let Some((_, order)) = &ordered
            && order.first == before.is_none()
        {
            let (wire, order) = ordered.expect("just seen");
            return Ok((wire, order, before));
        }
    }
}

/// Bytes that came and are not taken yet.
struct Feed {
    conn: Arc<dyn Conn>,
    buf: Vec<u8>,
    from: usize,
    to: usize,
}

impl Feed {
    /// The frame and its body at the front, if all of it is there.
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

    /// One receive call: how many bytes came, 0 at the link's end.
    fn fill(&mut self) -> Result<Option<usize>> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.buf.len() - self.to < self.buf.len() / 2 {
            self.buf.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let room = &mut self.buf[self.to..];
        match self.conn.recv(&mut [IoSliceMut::new(room)]) {
            Ok(n) => {
                self.to += n;
                Ok(Some(n))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(Error::io("receiving", &e)),
        }
    }
}

enum Step {
    Nothing,
    Moved,
    Ended,
}

struct Replica {
    feed: Feed,
    next: Option<(Tx, Arc<dyn Conn>)>,
    answer: Option<Arc<dyn Conn>>,
    log: Log,
    lane: LaneIn,
    history: History,
    mutation: Option<Mutation>,
}

impl Replica {
    fn step(&mut self) -> Result<Step> {
        match self.feed.fill()? {
            None => return Ok(Step::Nothing),
            Some(0) => return Ok(Step::Ended),
            Some(_) => {}
        }
        let (mut committed, mut size) = (0, 0);
        while let Some((f, body)) = self.feed.front()? {
            if f.epoch != EPOCH || f.kind != FrameKind::Record {
                return Err(Error::Protocol(format!("{:?} of {}", f.kind, f.epoch)));
            }
            let r = RecordView::decode(body).map_err(|e| Error::Protocol(e.to_string()))?;
            if r.bytes().len() != body.len() {
                return Err(Error::Protocol("a frame larger than its record".into()));
            }
            match self.lane.arrive(&r.header, &self.history) {
                Arrival::Accept => append(&self.log, &r, self.mutation)?,
                Arrival::Duplicate => {}
                Arrival::Refuse(why) => return Err(Error::Protocol(why)),
            }
            committed = committed.max(f.lsn);
            size = body.len();
            self.feed.from += FRAME_LEN + size;
        }
        if size == 0 {
            return Ok(Step::Moved);
        }
        self.log.persist(self.log.head())?;
        if let Some((tx, conn)) = &mut self.next {
            let link = |e| Error::io("link to the next replica", &e);
            tx.pump(&self.log, EPOCH, committed).map_err(link)?;
            while tx.is_behind(&self.log) {
                conn.wait(true, LIMIT).map_err(link)?;
                tx.pump(&self.log, EPOCH, committed).map_err(link)?;
            }
        }
        if let Some(conn) = &self.answer {
            let ack = Frame {
                kind: FrameKind::Ack,
                flags: self.log.level() as u16,
                epoch: EPOCH,
                lsn: self.lane.last(),
                body: 0,
            };
            send(&**conn, &ack.encode()).map_err(|e| Error::io("acknowledging", &e))?;
        }
        self.log.prefetch(size);
        Ok(Step::Moved)
    }
}

fn append(log: &Log, r: &RecordView<'_>, mutation: Option<Mutation>) -> Result<()> {
    let h = &r.header;
    if mutation == Some(Mutation::Drop(h.lsn)) {
        return Ok(());
    }
    let (head, len) = (log.head(), r.bytes().len());
    let at = log
        .place(head, len)
        .ok_or_else(|| Error::Invalid("this log is too small for the run".into()))?;
    // SAFETY: only this thread appends to this log; `at` is of the present head.
    let slot = unsafe { log.slot(head, at, len, h.volume, h.lsn) };
    slot.copy_from_slice(r.bytes());
    if mutation == Some(Mutation::Change(h.lsn)) {
        let end = len - RECORD_TRAILER_LEN;
        slot[end - 1] ^= 1;
        let sum = crc32c(&slot[..end]);
        slot[end..end + 4].copy_from_slice(&sum.to_le_bytes());
    }
    log.publish(at, len);
    Ok(())
}

fn send(conn: &dyn Conn, mut bytes: &[u8]) -> io::Result<()> {
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
