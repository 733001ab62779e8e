//! The frame: the header of a record or a message on a link.
//!
//! A frame has 32 bytes, and its own CRC-32C is checked before its length is used.
//! It carries the link's epoch, so that records of an older epoch can be sent
//! again over a newer link, and one LSN: the committed LSN with a record or a
//! heartbeat to the mirror, the acknowledged LSN with an acknowledgement on the
//! way back. `docs/reference/format.md`, "Frame".

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::{FormatError, crc32c};

/// `MJF1`.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"MJF1");
/// Bytes of a frame's header.
pub const FRAME_LEN: usize = 32;
/// Version of the wire, which both ends must share.
pub const WIRE_VERSION: u8 = 3;
/// Longest body of any frame that is not a record, in bytes.
pub const MAX_BODY: usize = (1 << 20) + 4096;

/// Flag of an [`Ack`](FrameKind::Ack): a record has arrived and is not accepted
/// yet, since a backup lacks too much.
pub const WAITS: u16 = 1 << 8;

/// Flag of a [`CopyStream`](FrameKind::CopyStream): the answer to the first frame,
/// the stream is open.
pub const STREAM_OPEN: u16 = 1;
/// Another such flag: nothing more comes over this link.
pub const STREAM_END: u16 = 2;
/// The answer to [`STREAM_END`]: everything that came over the link is staged.
pub const STREAM_STAGED: u16 = 3;

const WHAT: &str = "frame";

/// What a frame's body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// A record. `lsn` is the committed LSN.
    Record = 1,
    /// No body. `lsn` is the last LSN of this connection that is in the log.
    /// Flags: a [`Level`], and [`WAITS`].
    Ack = 2,
    /// No body. `lsn` is the committed LSN; on the way back, the prefix held.
    Heartbeat = 3,
    /// First on a control link: who asks for what. [`crate::message::Hello`].
    Hello = 4,
    /// The answer to `Hello`. [`crate::message::Welcome`].
    Welcome = 5,
    /// A refusal, with its reason; the link is closed. [`crate::message::Refuse`].
    Refuse = 6,
    /// The session begins. [`crate::message::Start`].
    Start = 7,
    /// `Start` is durable; lanes may be opened. [`crate::message::Started`].
    Started = 8,
    /// First on a lane link. [`crate::message::Lane`].
    Lane = 9,
    /// The lane is open. No body.
    LaneOk = 10,
    /// Requests the peer's whole copy. No body.
    CopyRequest = 11,
    /// A whole copy follows. [`crate::message::CopyBegin`].
    CopyBegin = 12,
    /// One file of the copy. [`crate::message::CopyFile`].
    CopyFile = 13,
    /// Bytes of that file. [`crate::message::CopyData`].
    CopyData = 14,
    /// The copy is complete: the result of exactly the records up to `lsn`. No body.
    CopyEnd = 15,
    /// The copy is durable at the receiver. No body.
    Copied = 16,
    /// A piece of a spill file. [`crate::message::CopyData`].
    Spill = 17,
    /// A request of another node or an operator's tool. JSON text.
    Request = 18,
    /// The answer to a `Request`. JSON text.
    Response = 19,
    /// How much of a copy's file the receiver can compare. [`crate::message::CopyHave`].
    CopyHave = 20,
    /// Sums of a copy's pages. [`crate::message::CopySums`].
    CopySums = 21,
    /// Which of these pages are to be sent. [`crate::message::CopyWant`].
    CopyWant = 22,
    /// Flags 0: first on a link that carries a part of a copy,
    /// [`crate::message::CopyStream`]; [`STREAM_OPEN`], [`STREAM_END`],
    /// [`STREAM_STAGED`]: no body.
    CopyStream = 23,
}

impl FrameKind {
    fn from_u8(v: u8) -> Option<FrameKind> {
        use FrameKind::*;
        const ALL: [FrameKind; 23] = [
            Record,
            Ack,
            Heartbeat,
            Hello,
            Welcome,
            Refuse,
            Start,
            Started,
            Lane,
            LaneOk,
            CopyRequest,
            CopyBegin,
            CopyFile,
            CopyData,
            CopyEnd,
            Copied,
            Spill,
            Request,
            Response,
            CopyHave,
            CopySums,
            CopyWant,
            CopyStream,
        ];
        ALL.into_iter().find(|k| *k as u8 == v)
    }
}

/// How safe a record is on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum Level {
    /// In the node's memory: survives its processes, not a loss of power.
    Received = 1,
    /// In persistent memory.
    Pmem = 2,
    /// On a disk.
    Disk = 3,
}

impl Level {
    /// The level with this number.
    pub fn from_u16(v: u16) -> Option<Level> {
        Some(match v {
            1 => Level::Received,
            2 => Level::Pmem,
            3 => Level::Disk,
            _ => return None,
        })
    }

    /// Whether the record would survive the node's loss of power.
    pub fn is_persistent(self) -> bool {
        self >= Level::Pmem
    }
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// What the body is.
    pub kind: FrameKind,
    /// Meaning depends on the kind; for `Ack` a [`Level`], and [`WAITS`].
    pub flags: u16,
    /// The link's epoch.
    pub epoch: u64,
    /// Committed or acknowledged LSN.
    pub lsn: u64,
    /// Bytes that follow.
    pub body: u32,
}

impl Frame {
    /// The header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; FRAME_LEN] {
        let mut b = [0u8; FRAME_LEN];
        b[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        b[4] = WIRE_VERSION;
        b[5] = self.kind as u8;
        b[6..8].copy_from_slice(&self.flags.to_le_bytes());
        b[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        b[16..24].copy_from_slice(&self.lsn.to_le_bytes());
        b[24..28].copy_from_slice(&self.body.to_le_bytes());
        let crc = crc32c(&b[..28]);
        b[28..32].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads and validates a header; the body's length is bounded by its kind.
    #[inline]
    pub fn decode(b: &[u8]) -> Result<Frame, FormatError> {
        if b.len() < FRAME_LEN {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: FRAME_LEN,
            });
        }
        let magic = u32_at(b, 0);
        if magic != FRAME_MAGIC {
            return Err(FormatError::Magic {
                what: WHAT,
                found: magic,
            });
        }
        // Before the checksum: another version may compute that differently.
        if b[4] != WIRE_VERSION {
            return Err(FormatError::Version {
                what: WHAT,
                found: b[4] as u16,
                known: WIRE_VERSION.into(),
            });
        }
        let (found, expected) = (u32_at(b, 28), crc32c(&b[..28]));
        if found != expected {
            return Err(FormatError::Checksum {
                what: WHAT,
                found,
                expected,
            });
        }
        let field = |field, value: u64| FormatError::Field {
            what: WHAT,
            field,
            value,
        };
        let kind = FrameKind::from_u8(b[5]).ok_or_else(|| field("kind", b[5] as u64))?;
        let f = Frame {
            kind,
            flags: u16_at(b, 6),
            epoch: u64_at(b, 8),
            lsn: u64_at(b, 16),
            body: u32_at(b, 24),
        };
        let most = match kind {
            FrameKind::Record => crate::record::MAX_RECORD,
            FrameKind::Hello
            | FrameKind::Lane
            | FrameKind::CopyStream
            | FrameKind::Refuse
            | FrameKind::Request => 4096,
            _ => MAX_BODY,
        };
        if f.body as usize > most {
            return Err(field("body length", f.body as u64));
        }
        Ok(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_flipped_bit_is_found() {
        let b = Frame {
            kind: FrameKind::Ack,
            flags: Level::Disk as u16,
            epoch: 4,
            lsn: 77,
            body: 0,
        }
        .encode();
        assert_eq!(Frame::decode(&b).unwrap().lsn, 77);
        for bit in 0..b.len() * 8 {
            let mut c = b;
            c[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::decode(&c).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(b in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::decode(&b);
        }
    }
}
