//! The two ends of a lane: how records travel and acknowledgements return.
//!
//! Owns the framing on a byte stream and the shared page of a shared-memory lane.
//!
//! - Over a stream, a record is sent from the ring slot in which it was encoded, and answered by 32
//!   bytes.
//! - Over shared memory nothing is sent. The mirror maps the primary's ring read-only and copies
//!   records out of it. A page beside it carries the positions.
//!
//! Invariants:
//!
//! - Nothing here allocates.
//! - Nothing here makes a system call besides send and receive (stream), or futex when a side
//!   sleeps (shared memory).
//! - Nothing that the peer writes is ever trusted: lengths are checked against the ring, a record
//!   is copied out first and validated afterwards.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};
use std::time::Duration;

use mojim_format::frame::WAITS;
use mojim_format::message::{Message, Refuse, RefuseCode};
use mojim_format::pad::PAD_MAGIC;
use mojim_format::{FRAME_LEN, Frame, FrameKind, RECORD_HEADER_LEN, RecordHeader};

use mojim_env::processors::processor;
use mojim_env::{Conn, Error, Memory, Result};
use mojim_store::log::{CONTROL_LEN, Log};

/// How often each side sends a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_millis(100);
/// A link on which nothing came for this long is broken.
pub const SILENCE: Duration = Duration::from_secs(3);
/// As [`SILENCE`], while the peer makes a copy or a spill file durable.
pub const COPY_SILENCE: Duration = Duration::from_secs(120);
/// When a copy that failed for want of room or the like is tried again.
pub const COPY_AGAIN: Duration = Duration::from_secs(30);

/// Polls of shared memory that take about as long as giving way to another thread once.
pub(crate) const POLLS_OF_MEMORY: u32 = 64;
/// As [`POLLS_OF_MEMORY`], of a stream: each is a system call.
pub(crate) const POLLS_OF_STREAM: u32 = 1;

/// Bytes of the page shared by both ends of a shared-memory lane.
pub const PAGE_LEN: usize = 4096;

/// The positions of a shared-memory lane. What one side writes at once lies in one cache
/// line, so that the other side fetches only one.
#[derive(Clone)]
pub struct Page(Memory);

#[derive(Clone, Copy)]
#[repr(usize)]
enum Field {
    Head = 0,
    Committed = 8,
    /// Its processor's number plus one; 0 if that is not known.
    Processor = 16,
    Acked = 128,
    Level = 136,
    Waits = 144,
    MirrorSleeps = 256,
    PrimarySleeps = 320,
}

impl Page {
    /// Wraps shared memory of at least `PAGE_LEN` bytes.
    pub fn new(memory: Memory) -> Page {
        assert!(memory.len() >= PAGE_LEN);
        Page(memory)
    }

    /// The page's memory, for passing it to the peer.
    pub fn memory(&self) -> &Memory {
        &self.0
    }

    fn field(&self, field: Field) -> &AtomicU64 {
        // SAFETY: inside the page, 8-aligned, used only as AtomicU64 here and
        // by the peer; any value is a valid u64.
        unsafe { &*(self.0.ptr().add(field as usize) as *const AtomicU64) }
    }

    fn sleeper(&self, field: Field) -> &AtomicU32 {
        // SAFETY: as above; the low half of the word (little-endian) is used
        // as the futex.
        unsafe { &*(self.0.ptr().add(field as usize) as *const AtomicU32) }
    }

    /// Publishes the primary's head; wakes a sleeping mirror.
    #[inline]
    fn publish(&self, head: u64, committed: u64) {
        self.field(Field::Committed).store(committed, Relaxed);
        self.field(Field::Head).store(head, Release);
        self.wake(Field::MirrorSleeps);
    }

    /// Says where the primary publishes.
    fn publish_processor(&self) {
        let here = processor().map_or(0, |here| here as u64 + 1);
        self.field(Field::Processor).store(here, Relaxed);
    }

    #[inline]
    fn wake(&self, who: Field) {
        // Pairs with the fence in `sleep`: either the sleeper sees the new
        // position, or this sees that it sleeps.
        fence(SeqCst);
        if self.sleeper(who).load(Relaxed) != 0 {
            self.sleeper(who).store(0, Relaxed);
            mojim_env::futex::futex_wake(self.sleeper(who), i32::MAX);
        }
    }

    fn sleep(&self, who: Field, ready: impl Fn() -> bool, timeout: Duration) {
        self.sleeper(who).store(1, Relaxed);
        fence(SeqCst);
        if !ready() {
            mojim_env::futex::futex_wait(self.sleeper(who), 1, timeout);
        }
        self.sleeper(who).store(0, Relaxed);
    }
}

/// What carries a lane.
#[derive(Clone)]
pub enum Carrier {
    /// A byte stream.
    Stream,
    /// The shared page; the stream only tells when the peer is gone.
    Shared(Page),
}

/// The sending end of a lane, on a primary or a node that forwards.
pub struct Tx {
    conn: Arc<dyn Conn>,
    carrier: Carrier,
    /// Position of the first record that is not completely sent.
    sent: u64,
    /// Bytes of that record's frame that are sent.
    off: usize,
    /// The committed LSN in the headers of a send that was not taken as a whole, and
    /// where its records end. The link may hold part of this send, so the same bytes are
    /// sent until all are taken.
    said: Option<(u64, u64)>,
    /// Times that something was published in shared memory.
    times: u32,
}

/// In shared memory the processor is said once in so many times: to ask for it takes longer than
/// to publish.
const SAYS_PROCESSOR: u32 = 16;
/// Most records in one send.
const BATCH: usize = 16;

impl Tx {
    /// Sends what lies in the log from `sent` on.
    pub fn new(conn: Arc<dyn Conn>, carrier: Carrier, sent: u64) -> Tx {
        Tx {
            conn,
            carrier,
            sent,
            off: 0,
            said: None,
            times: 0,
        }
    }

    /// Position up to which everything was handed to the link.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// As `sent`, plus what the stream has taken of the next record. 0 for shared memory,
    /// which takes everything at once: that tells nothing.
    pub(crate) fn taken(&self) -> u64 {
        match self.carrier {
            Carrier::Shared(_) => 0,
            Carrier::Stream => self.sent + self.off as u64,
        }
    }

    /// Sends all that the link takes of what the log holds.
    #[inline]
    pub fn pump(&mut self, log: &Log, epoch: u64, committed: u64) -> io::Result<()> {
        match &self.carrier {
            Carrier::Shared(page) => {
                let head = log.head();
                if head != self.sent {
                    page.publish(head, committed);
                    self.sent = head;
                    self.times = self.times.wrapping_add(1);
                    if self.times.is_multiple_of(SAYS_PROCESSOR) {
                        page.publish_processor();
                    }
                }
                Ok(())
            }
            Carrier::Stream => self.pump_until(log, u64::MAX, epoch, committed),
        }
    }

    /// As [`Tx::pump`] over a stream, but sends no record that begins at `limit` or
    /// behind.
    pub fn pump_until(
        &mut self,
        log: &Log,
        limit: u64,
        epoch: u64,
        committed: u64,
    ) -> io::Result<()> {
        while self.sent < log.head().min(limit) {
            let mut headers = [[0u8; FRAME_LEN]; BATCH];
            let mut records: [&[u8]; BATCH] = [&[]; BATCH];
            let mut nexts = [0u64; BATCH];
            let mut n = 0;
            let mut walk = log.records(self.sent);
            let (committed, until) = self.said.take().unwrap_or((committed, u64::MAX));
            while n < BATCH
                && walk.position() < until
                && let Some(r) = walk.next_if(|r| r.at < limit)
            {
                headers[n] = Frame {
                    kind: FrameKind::Record,
                    flags: 0,
                    epoch,
                    lsn: committed,
                    body: r.header.len,
                }
                .encode();
                records[n] = r.bytes();
                nexts[n] = r.next;
                n += 1;
            }
            let at = walk.position();
            if n == 0 {
                // Only a pad so far; its record is not published yet.
                return Ok(());
            }
            self.said = Some((committed, at));
            const EMPTY: &[u8] = &[];
            let mut slices = [IoSlice::new(EMPTY); 2 * BATCH];
            for i in 0..n {
                slices[2 * i] = IoSlice::new(&headers[i]);
                slices[2 * i + 1] = IoSlice::new(records[i]);
            }
            let first_skip = self.off.min(FRAME_LEN);
            slices[0] = IoSlice::new(&headers[0][first_skip..]);
            slices[1] = IoSlice::new(&records[0][self.off - first_skip..]);
            let from = if first_skip == FRAME_LEN { 1 } else { 0 };
            let mut took = match self.conn.send(&slices[from..2 * n]) {
                Ok(t) => t,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            };
            for i in 0..n {
                let left = FRAME_LEN + records[i].len() - self.off;
                if took < left {
                    self.off += took;
                    break;
                }
                took -= left;
                self.off = 0;
                self.sent = nexts[i];
            }
            if self.sent == at {
                self.said = None;
            }
        }
        Ok(())
    }

    /// Whether the log holds records that are not completely sent.
    pub fn is_behind(&self, log: &Log) -> bool {
        self.sent < log.head()
    }
}

/// What the other end of a lane last said of what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// The lane's last LSN in its log.
    pub lsn: u64,
    /// How safe it is there.
    pub level: u16,
    /// The records behind it are not taken yet, since a backup lacks too much.
    pub waits: bool,
}

/// The end of a lane that receives acknowledgements.
pub struct Rx {
    conn: Arc<dyn Conn>,
    carrier: Carrier,
    buf: Box<[u8; 8192]>,
    filled: usize,
    /// Position of the first record that is not acknowledged.
    pub acked_at: u64,
    last: u64,
    /// How often the other end had said that it waits.
    waits: u64,
    waited: bool,
}

impl Rx {
    /// Expects acknowledgements for the records from `acked_at` on.
    pub fn new(conn: Arc<dyn Conn>, carrier: Carrier, acked_at: u64) -> Rx {
        Rx {
            conn,
            carrier,
            buf: Box::new([0; 8192]),
            filled: 0,
            acked_at,
            last: 0,
            waits: 0,
            waited: false,
        }
    }

    /// The last acknowledgement that has arrived, if one has.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Ack>> {
        if let Carrier::Shared(page) = &self.carrier {
            let acked = page.field(Field::Acked).load(Acquire);
            let waits = page.field(Field::Waits).load(Relaxed);
            if acked != self.last || waits != self.waits {
                let said = waits != self.waits;
                (self.last, self.waits) = (acked, waits);
                return Ok(Some(Ack {
                    lsn: acked,
                    level: page.field(Field::Level).load(Relaxed) as u16,
                    waits: said,
                }));
            }
            // The stream only tells when the peer is gone: it is looked at after a wait.
            if !std::mem::take(&mut self.waited) {
                return Ok(None);
            }
        }
        self.poll_stream()
    }

    fn poll_stream(&mut self) -> Result<Option<Ack>> {
        let got = {
            let room = &mut self.buf[self.filled..];
            match self.conn.recv(&mut [IoSliceMut::new(room)]) {
                Ok(0) => {
                    return Err(Error::Protocol(format!(
                        "{} closed the link",
                        self.conn.peer()
                    )));
                }
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(Error::io(format!("link to {}", self.conn.peer()), &e)),
            }
        };
        self.filled += got;
        let mut at = 0;
        let mut last = None;
        while self.filled - at >= FRAME_LEN {
            let f = Frame::decode(&self.buf[at..self.filled])
                .map_err(|e| Error::Protocol(format!("from {}: {e}", self.conn.peer())))?;
            match f.kind {
                FrameKind::Ack => {
                    last = Some(Ack {
                        lsn: f.lsn,
                        level: f.flags & !WAITS,
                        waits: f.flags & WAITS != 0,
                    });
                    at += FRAME_LEN;
                }
                FrameKind::Refuse => {
                    let end = at + FRAME_LEN + f.body as usize;
                    if self.filled < end {
                        break;
                    }
                    let refuse = Refuse::decode(&self.buf[at + FRAME_LEN..end])
                        .map_err(|e| Error::Protocol(e.to_string()))?;
                    let (peer, code, text) = (self.conn.peer(), refuse.code, refuse.text);
                    return Err(match code {
                        RefuseCode::Protocol => Error::Refused {
                            code,
                            text: format!("{peer} refused a record: {text}"),
                        },
                        // The peer's disk failed, say: no record is at fault.
                        _ => Error::Io {
                            what: format!("{peer} failed"),
                            errno: libc::EIO,
                            error: text,
                        },
                    });
                }
                k => {
                    return Err(Error::Protocol(format!(
                        "{} sent {k:?} where an acknowledgement belongs",
                        self.conn.peer()
                    )));
                }
            }
        }
        self.buf.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(last)
    }

    /// Whether a round trip takes system calls.
    #[inline]
    pub(crate) fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream)
    }

    /// After how many polls a thread gives way to others.
    #[inline]
    pub(crate) fn polls(&self) -> u32 {
        match self.carrier {
            Carrier::Shared(_) => POLLS_OF_MEMORY,
            Carrier::Stream => POLLS_OF_STREAM,
        }
    }

    /// Blocks until something may have arrived, or `timeout`.
    pub fn wait(&mut self, timeout: Duration) {
        self.waited = true;
        match &self.carrier {
            Carrier::Shared(page) => page.sleep(
                Field::PrimarySleeps,
                || page.field(Field::Acked).load(Acquire) != self.last,
                timeout,
            ),
            Carrier::Stream => {
                // An error shows at the next poll.
                let _ = self.conn.wait(false, timeout);
            }
        }
    }

    /// Closes the link.
    pub fn close(&self) {
        self.conn.close();
    }
}

/// The mirror's reading side of a shared-memory lane.
pub struct RingIn {
    ring: Memory,
    size: u64,
    align: u64,
    at: u64,
    page: Page,
}

/// What the mirror found at the front of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// Nothing new.
    Nothing,
    /// A record of this many bytes, by its header.
    Record(usize),
}

impl RingIn {
    /// `ring` is the primary's, control page included, mapped read-only.
    pub fn new(ring: Memory, size: u64, align: u64, at: u64, page: Page) -> Result<RingIn> {
        let sane = size as usize + CONTROL_LEN == ring.len()
            && align.is_power_of_two()
            && align >= 64
            && size.is_multiple_of(align)
            && at.is_multiple_of(align);
        if !sane {
            return Err(Error::Protocol("a shared ring of impossible shape".into()));
        }
        Ok(RingIn {
            ring,
            size,
            align,
            at,
            page,
        })
    }

    /// The processor on which the primary last published.
    pub fn processor(&self) -> Option<usize> {
        let said = self.page.field(Field::Processor).load(Relaxed);
        usize::try_from(said).ok()?.checked_sub(1)
    }

    /// The committed LSN as the primary last said.
    pub fn committed(&self) -> u64 {
        self.page.field(Field::Committed).load(Relaxed)
    }

    fn copy(&self, off: usize, to: &mut [u8]) {
        assert!(off + to.len() <= self.size as usize);
        // SAFETY: inside the ring (asserted). The peer may be writing there;
        // what is copied is validated afterwards.
        unsafe {
            let from = self.ring.ptr().add(CONTROL_LEN + off);
            mojim_env::racing::copy(from, to.as_mut_ptr(), to.len());
        }
    }

    /// Fetches the first cache lines of what has come at once, instead of the second one
    /// only after the header was read. (For longer records the processor does it.)
    #[inline]
    fn prefetch(&self, off: usize, ahead: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            let end = (off + ahead.min(512) as usize).min(self.size as usize);
            for line in (off..end).step_by(64) {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                // SAFETY: a prefetch changes nothing; the address lies in the ring.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(self.ring.ptr().add(CONTROL_LEN + line).cast())
                };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (off, ahead);
    }

    /// Looks at the next record.
    #[inline]
    pub fn front(&mut self) -> Result<Front> {
        loop {
            let head = self.page.field(Field::Head).load(Acquire);
            if head == self.at {
                return Ok(Front::Nothing);
            }
            if head < self.at {
                // The primary has not published its head yet.
                return Ok(Front::Nothing);
            }
            let ahead = head - self.at;
            if ahead > self.size || !head.is_multiple_of(self.align) {
                return Err(Error::Protocol(
                    "a shared ring's head is out of range".into(),
                ));
            }
            let off = (self.at % self.size) as usize;
            self.prefetch(off, ahead);
            let mut b = [0u8; RECORD_HEADER_LEN];
            self.copy(off, &mut b);
            if b[..4] == PAD_MAGIC.to_le_bytes() {
                let skip = self.size - off as u64;
                if skip > ahead {
                    return Err(Error::Protocol(
                        "a shared ring's pad is out of range".into(),
                    ));
                }
                self.at += skip;
                continue;
            }
            let h = RecordHeader::decode(&b).map_err(|e| Error::Protocol(e.to_string()))?;
            let len = h.len as u64;
            if len > ahead || off as u64 + len > self.size {
                return Err(Error::Protocol(
                    "a shared ring's record is out of range".into(),
                ));
            }
            return Ok(Front::Record(len as usize));
        }
    }

    /// Copies the record that `front` saw into `to` and steps over it.
    #[inline]
    pub fn take(&mut self, to: &mut [u8]) {
        let off = (self.at % self.size) as usize;
        self.copy(off, to);
        self.at += (to.len() as u64).next_multiple_of(self.align);
    }

    /// Acknowledges up to `lsn`; wakes a sleeping primary.
    #[inline]
    pub fn ack(&self, lsn: u64, level: u16) {
        self.page.field(Field::Level).store(level as u64, Relaxed);
        self.page.field(Field::Acked).store(lsn, Release);
        self.page.wake(Field::PrimarySleeps);
    }

    /// Says that what has come is not taken yet, since a backup lacks too much.
    pub fn say_waits(&self) {
        self.page.field(Field::Waits).fetch_add(1, Relaxed);
    }

    /// Blocks until something may have come, or `timeout`.
    pub fn wait(&self, timeout: Duration) {
        self.page.sleep(
            Field::MirrorSleeps,
            || self.page.field(Field::Head).load(Acquire) > self.at,
            timeout,
        );
    }
}
