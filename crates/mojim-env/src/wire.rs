//! Frames with their bodies over a connection, without blocking.
//!
//! Owns what a control link, a stream of a copy and the first words of a lane have in
//! common: the queue of what is to be sent, and the cut of what comes into frames.
//!
//! Invariants:
//! - Nothing that comes is trusted: a length is checked before its bytes are waited for.
//! - Nothing behind a frame is read before that frame is taken.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use mojim_format::message::{CopyData, Message};
use mojim_format::{FRAME_LEN, Frame, FrameKind};

use crate::{Conn, Error, Result};

/// Words by which one end says that the keys of the two do not fit. `mojim status` knows by them
/// what to advise.
pub mod unfit {
    /// The other end has keys, and this one has none.
    pub const SPEAKS_TLS: &str = "speaks TLS and this side does not";
    /// This end has keys, and the other one has none.
    pub const SPEAKS_NO_TLS: &str = "does not speak TLS";
    /// Of another authority, of another name, or over.
    pub const CERTIFICATE: &str = "its certificate is refused";
    /// The other end does so with this one's.
    pub const LINK: &str = "refused the link";
    /// The same, after this end had taken the link for made.
    pub const CERTIFICATE_OR_LINK: &str = "refused this certificate or link";
}

/// The error for a message that cannot be decoded.
pub fn bad(e: mojim_format::FormatError) -> Error {
    Error::Protocol(format!("bad message: {e}"))
}

/// Frames with bodies over a stream, without blocking: for control links and
/// for the first words of a lane.
pub struct Wire {
    /// The stream.
    pub conn: Arc<dyn Conn>,
    inbuf: Vec<u8>,
    outbuf: Vec<u8>,
    out_at: usize,
    /// Longest body that is accepted.
    pub limit: usize,
}

impl Wire {
    /// Speaks over `conn`.
    pub fn new(conn: Arc<dyn Conn>) -> Wire {
        Wire {
            conn,
            inbuf: Vec::new(),
            outbuf: Vec::new(),
            out_at: 0,
            limit: mojim_format::frame::MAX_BODY,
        }
    }

    /// Queues a frame with its body.
    pub fn queue(&mut self, kind: FrameKind, epoch: u64, lsn: u64, flags: u16, body: &[u8]) {
        let f = Frame {
            kind,
            flags,
            epoch,
            lsn,
            body: body.len() as u32,
        };
        self.outbuf.extend_from_slice(&f.encode());
        self.outbuf.extend_from_slice(body);
    }

    /// Queues a message.
    pub fn send<M: Message>(&mut self, kind: FrameKind, epoch: u64, m: &M) {
        self.queue(kind, epoch, 0, 0, &m.encode());
    }

    /// Queues `CopyData` of `len` bytes, which `fill` writes to where they are sent from;
    /// nothing if `fill` returns false.
    pub fn queue_data(
        &mut self,
        epoch: u64,
        id: u64,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<bool>,
    ) -> Result<()> {
        let start = self.outbuf.len();
        let (before, behind) = CopyData::AROUND;
        let f = Frame {
            kind: FrameKind::CopyData,
            flags: 0,
            epoch,
            lsn: 0,
            body: (before + len + behind) as u32,
        };
        self.outbuf.resize(start + FRAME_LEN + f.body as usize, 0);
        let (header, body) = self.outbuf[start..].split_at_mut(FRAME_LEN);
        match fill(&mut body[before..before + len]) {
            Ok(true) => {
                header.copy_from_slice(&f.encode());
                CopyData::seal(body, id, offset);
                Ok(())
            }
            r => {
                self.outbuf.truncate(start);
                r.map(drop)
            }
        }
    }

    /// Bytes queued and not yet taken by the link.
    pub fn backlog(&self) -> usize {
        self.outbuf.len() - self.out_at
    }

    /// Hands queued bytes to the link. True if none are left.
    pub fn flush(&mut self) -> Result<bool> {
        while self.out_at < self.outbuf.len() {
            match self.conn.send(&[IoSlice::new(&self.outbuf[self.out_at..])]) {
                Ok(n) => self.out_at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // Bytes that are sent are dropped even if the queue is never quite
                    // empty.
                    if self.out_at > self.backlog() {
                        self.outbuf.drain(..self.out_at);
                        self.out_at = 0;
                    }
                    return Ok(false);
                }
                Err(e) => return Err(Error::io(format!("link to {}", self.conn.peer()), &e)),
            }
        }
        self.outbuf.clear();
        self.out_at = 0;
        Ok(true)
    }

    /// Whether what came is TLS: an alert or the beginning of a handshake.
    fn is_tls(&self) -> bool {
        matches!(self.inbuf[..], [21 | 22, 3, 0..=4, ..])
    }

    #[cold]
    fn no_frame(&self, why: &str) -> Error {
        let peer = self.conn.peer();
        Error::Protocol(match self.is_tls() {
            true => format!(
                "{peer} {}: both need `keys` in their configuration",
                unfit::SPEAKS_TLS
            ),
            false => format!("{peer} {why}"),
        })
    }

    /// The next whole frame, if it has arrived. A frame with an impossible
    /// header is an error before its body is waited for.
    pub fn take_frame(&mut self) -> Result<Option<(Frame, Vec<u8>)>> {
        loop {
            if self.inbuf.len() >= FRAME_LEN {
                let f = Frame::decode(&self.inbuf)
                    .map_err(|e| self.no_frame(&format!("sent no frame: {e}")))?;
                if f.body as usize > self.limit {
                    return Err(Error::Protocol(format!(
                        "{:?} of {} bytes, {} at most are taken here",
                        f.kind, f.body, self.limit
                    )));
                }
                if f.kind == FrameKind::Record {
                    return Err(Error::Protocol("a record on a control link".into()));
                }
                let whole = FRAME_LEN + f.body as usize;
                if self.inbuf.len() >= whole {
                    let body = self.inbuf[FRAME_LEN..whole].to_vec();
                    self.inbuf.drain(..whole);
                    return Ok(Some((f, body)));
                }
            }
            // Never more than one frame is asked for: what follows the first
            // frame of a lane belongs to the lane's own reader.
            let want = if self.inbuf.len() < FRAME_LEN {
                FRAME_LEN - self.inbuf.len()
            } else {
                let f = Frame::decode(&self.inbuf).expect("checked above");
                (FRAME_LEN + f.body as usize - self.inbuf.len()).min(256 << 10)
            };
            let old = self.inbuf.len();
            self.inbuf.resize(old + want, 0);
            let r = self
                .conn
                .recv(&mut [IoSliceMut::new(&mut self.inbuf[old..])]);
            self.inbuf.truncate(old + *r.as_ref().unwrap_or(&0));
            match r {
                Ok(0) => return Err(self.no_frame("closed the link")),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(Error::io(format!("link to {}", self.conn.peer()), &e)),
            }
        }
    }
}
