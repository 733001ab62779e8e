//! The record: one sync point, or one part of a split one, as bytes.
//!
//! The bytes are the same on the wire and in every log (`docs/reference/invariants.md`, 5).
//! A record is valid if and only if:
//!
//! - Its magic, version and end mark are right.
//! - Its lengths add up.
//! - Its CRC-32C matches.
//!
//! Nothing outside a record says where it ends. `docs/reference/format.md`, "Record".
//!
//! Invariants of a valid record:
//!
//! - `length` = header + 24 × ops + payloads + trailer.
//! - Payloads follow the operations' table in the same order, without gaps.
//! - Reserved fields are zero.

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::{FORMAT_VERSION, FormatError, crc32c};

/// `MJR1`.
pub const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"MJR1");
/// `MJRE`, the last four bytes of a record.
pub const RECORD_END: u32 = u32::from_le_bytes(*b"MJRE");
/// Bytes before the operations' table.
pub const RECORD_HEADER_LEN: usize = 48;
/// Checksum and end mark.
pub const RECORD_TRAILER_LEN: usize = 8;
/// A record's bytes besides its operations and payloads.
pub const RECORD_OVERHEAD: usize = RECORD_HEADER_LEN + RECORD_TRAILER_LEN;
/// Bytes of one entry of the operations' table.
pub const OP_LEN: usize = 24;
/// Flag: the last part of its sync point (Mojim 4.2, "the end of an atomic operation").
pub const FLAG_END: u16 = 1;
/// Most operations in one record.
pub const MAX_OPS: usize = 1 << 16;
/// Longest record, in bytes.
pub const MAX_RECORD: usize = 64 << 20;

const WHAT: &str = "record";

/// What one operation does to its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum OpKind {
    /// The payload's bytes go to `offset`.
    Write = 1,
    /// An empty file is created under the name in the payload.
    Create = 2,
    /// The file becomes `offset` bytes long; new bytes are zero.
    Resize = 3,
    /// The file and its name are removed.
    Remove = 4,
    /// The file takes the name in the payload; a file of that name is replaced.
    Rename = 5,
    /// The operations of this sync point are in a spill file: `offset` is its
    /// length, the payload is the number in its name (8 bytes). The file is a
    /// sequence of records whose LSN and epoch are 1.
    Spill = 6,
}

impl OpKind {
    fn from_u16(v: u16) -> Option<OpKind> {
        Some(match v {
            1 => OpKind::Write,
            2 => OpKind::Create,
            3 => OpKind::Resize,
            4 => OpKind::Remove,
            5 => OpKind::Rename,
            6 => OpKind::Spill,
            _ => return None,
        })
    }
}

/// One entry of the operations' table. An extent is an `Op` of kind `Write`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    /// Number of the file in its volume's catalogue.
    pub file: u32,
    /// What happens to it.
    pub kind: OpKind,
    /// Byte offset for `Write`, size for `Resize`, length for `Spill`, else 0.
    pub offset: u64,
    /// Bytes of payload.
    pub len: u32,
}

/// The fixed part of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHeader {
    /// Identity of the volume.
    pub volume: u64,
    /// The record's number, unique and increasing in its volume.
    pub lsn: u64,
    /// The epoch in which the record was made. It stays when the record is sent again.
    pub epoch: u64,
    /// Bytes from the magic to the end mark.
    pub len: u32,
    /// Entries of the operations' table.
    pub ops: u32,
    /// Which part of a split sync point this is, from 0.
    pub part: u32,
    /// Whether this is the last part.
    pub end: bool,
    /// The committed LSN when the record was made (its low 32 bits are stored):
    /// every record up to that LSN had been acknowledged, so a copy that lacks
    /// one of them is damaged or behind, not merely torn at its end.
    pub committed: u64,
}

impl RecordHeader {
    /// Reads the fixed part and checks everything that can be checked without
    /// the rest. The record's own length is bounded by `MAX_RECORD`.
    pub fn decode(b: &[u8]) -> Result<RecordHeader, FormatError> {
        if b.len() < RECORD_HEADER_LEN {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: RECORD_HEADER_LEN,
            });
        }
        let magic = u32_at(b, 0);
        if magic != RECORD_MAGIC {
            return Err(FormatError::Magic {
                what: WHAT,
                found: magic,
            });
        }
        let version = u16_at(b, 4);
        if version != FORMAT_VERSION {
            return Err(FormatError::Version {
                what: WHAT,
                found: version,
                known: FORMAT_VERSION,
            });
        }
        let flags = u16_at(b, 6);
        let field = |field, value: u64| FormatError::Field {
            what: WHAT,
            field,
            value,
        };
        if flags & !FLAG_END != 0 {
            return Err(field("flags", flags as u64));
        }
        let lsn = u64_at(b, 16);
        let h = RecordHeader {
            volume: u64_at(b, 8),
            lsn: u64_at(b, 16),
            epoch: u64_at(b, 24),
            len: u32_at(b, 32),
            ops: u32_at(b, 36),
            part: u32_at(b, 40),
            end: flags & FLAG_END != 0,
            // The low half is stored; the distance is always below 2^32.
            committed: lsn
                .checked_sub((lsn as u32).wrapping_sub(u32_at(b, 44)) as u64)
                .ok_or_else(|| field("committed", u32_at(b, 44) as u64))?,
        };
        let len = h.len as usize;
        if !(RECORD_OVERHEAD..=MAX_RECORD).contains(&len) {
            return Err(field("length", h.len as u64));
        }
        if h.ops as usize > MAX_OPS || h.ops as usize * OP_LEN > len - RECORD_OVERHEAD {
            return Err(field("operations", h.ops as u64));
        }
        if h.lsn == 0 || h.lsn == u64::MAX {
            return Err(field("lsn", h.lsn));
        }
        if h.epoch == 0 {
            return Err(field("epoch", h.epoch));
        }
        Ok(h)
    }

    /// Bytes from the magic to the end of the operations' table.
    pub fn table_end(&self) -> usize {
        RECORD_HEADER_LEN + self.ops as usize * OP_LEN
    }

    /// The operations' table of this record, of which `b` has the bytes up to its end: read without
    /// the payloads.
    pub fn table<'a>(
        &self,
        b: &'a [u8],
    ) -> impl Iterator<Item = Result<Op, FormatError>> + use<'a> {
        let (n, b) = (self.ops as usize, &b[..self.table_end()]);
        (0..n).map(move |i| RecordView::op_at(b, i))
    }
}

/// A whole, valid record, read in place.
#[derive(Debug, Clone, Copy)]
pub struct RecordView<'a> {
    /// The record's fixed part.
    pub header: RecordHeader,
    bytes: &'a [u8],
}

impl<'a> RecordView<'a> {
    /// Validates the record at the start of `b` completely (lengths, table,
    /// checksum, end mark). Bytes behind it are ignored.
    pub fn decode(b: &'a [u8]) -> Result<RecordView<'a>, FormatError> {
        let header = RecordHeader::decode(b)?;
        let len = header.len as usize;
        if b.len() < len {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: len,
            });
        }
        let b = &b[..len];
        let end = u32_at(b, len - 4);
        if end != RECORD_END {
            return Err(FormatError::Field {
                what: WHAT,
                field: "end mark",
                value: end as u64,
            });
        }
        let found = u32_at(b, len - 8);
        let expected = crc32c(&b[..len - RECORD_TRAILER_LEN]);
        if found != expected {
            return Err(FormatError::Checksum {
                what: WHAT,
                found,
                expected,
            });
        }
        let mut payload = 0usize;
        for i in 0..header.ops as usize {
            let op = Self::op_at(b, i)?;
            payload += op.len as usize;
            if payload > len {
                break;
            }
        }
        if RECORD_OVERHEAD + header.ops as usize * OP_LEN + payload != len {
            return Err(FormatError::Field {
                what: WHAT,
                field: "payload length",
                value: payload as u64,
            });
        }
        Ok(RecordView { header, bytes: b })
    }

    /// Wraps bytes that this process itself encoded or has validated before.
    /// Only the fixed part is checked.
    pub fn trusted(b: &'a [u8]) -> Result<RecordView<'a>, FormatError> {
        let header = RecordHeader::decode(b)?;
        if b.len() < header.len as usize {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: header.len as usize,
            });
        }
        Ok(RecordView {
            header,
            bytes: &b[..header.len as usize],
        })
    }

    fn op_at(b: &[u8], i: usize) -> Result<Op, FormatError> {
        let at = RECORD_HEADER_LEN + i * OP_LEN;
        let kind = u16_at(b, at + 4);
        let field = |field, value: u64| FormatError::Field {
            what: WHAT,
            field,
            value,
        };
        let op = Op {
            file: u32_at(b, at),
            kind: OpKind::from_u16(kind).ok_or_else(|| field("operation kind", kind as u64))?,
            offset: u64_at(b, at + 8),
            len: u32_at(b, at + 16),
        };
        if u16_at(b, at + 6) != 0 || u32_at(b, at + 20) != 0 {
            return Err(field("operation reserved", u32_at(b, at + 20) as u64));
        }
        // No file has an offset beyond i64.
        if op.offset > i64::MAX as u64 - op.len as u64 {
            return Err(field("operation offset", op.offset));
        }
        Ok(op)
    }

    /// The record's bytes, magic to end mark.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The operations with their payloads, in order.
    pub fn ops(&self) -> impl Iterator<Item = (Op, &'a [u8])> + use<'a> {
        let bytes = self.bytes;
        let n = self.header.ops as usize;
        let mut at = RECORD_HEADER_LEN + n * OP_LEN;
        (0..n).map_while(move |i| {
            let op = Self::op_at(bytes, i).ok()?;
            let payload = bytes.get(at..at + op.len as usize)?;
            at += op.len as usize;
            Some((op, payload))
        })
    }
}

/// Encodes one record into given memory, usually a log's slot.
///
/// Call `op` for every operation first, then `payload` for each in the same
/// order, then `finish`. Nothing is allocated.
pub struct RecordWriter<'a> {
    buf: &'a mut [u8],
    ops: usize,
    next_op: usize,
    at: usize,
}

impl<'a> RecordWriter<'a> {
    /// Bytes of a record with `ops` operations and `payload` bytes of payload.
    pub const fn len_for(ops: usize, payload: usize) -> usize {
        RECORD_OVERHEAD + ops * OP_LEN + payload
    }

    /// Starts a record that will have `ops` operations. `buf` must be at least
    /// `len_for` bytes long; asserted when written to.
    pub fn new(buf: &'a mut [u8], ops: usize) -> Self {
        assert!(ops <= MAX_OPS, "more operations than a record can have");
        RecordWriter {
            buf,
            ops,
            next_op: 0,
            at: RECORD_HEADER_LEN + ops * OP_LEN,
        }
    }

    /// Appends one entry of the operations' table.
    #[inline]
    pub fn op(&mut self, op: Op) {
        assert!(self.next_op < self.ops);
        let at = RECORD_HEADER_LEN + self.next_op * OP_LEN;
        let b = &mut self.buf[at..at + OP_LEN];
        b[0..4].copy_from_slice(&op.file.to_le_bytes());
        b[4..6].copy_from_slice(&(op.kind as u16).to_le_bytes());
        b[6..8].fill(0);
        b[8..16].copy_from_slice(&op.offset.to_le_bytes());
        b[16..20].copy_from_slice(&op.len.to_le_bytes());
        b[20..24].fill(0);
        self.next_op += 1;
    }

    /// Appends an operation's payload.
    #[inline]
    pub fn payload(&mut self, bytes: &[u8]) {
        self.buf[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Room for `len` bytes of payload, to be filled by the caller.
    #[inline]
    pub fn payload_mut(&mut self, len: usize) -> &mut [u8] {
        let at = self.at;
        self.at += len;
        &mut self.buf[at..at + len]
    }

    /// Writes the header, the checksum and the end mark; returns the length.
    /// `committed` is the committed LSN at this moment, less than 2^32 below `lsn`.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    pub fn finish(
        self,
        volume: u64,
        lsn: u64,
        epoch: u64,
        part: u32,
        end: bool,
        committed: u64,
    ) -> usize {
        assert!(self.next_op == self.ops, "an operation was not given");
        let len = self.at + RECORD_TRAILER_LEN;
        let b = &mut self.buf[..len];
        b[0..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
        b[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        b[6..8].copy_from_slice(&(if end { FLAG_END } else { 0 }).to_le_bytes());
        b[8..16].copy_from_slice(&volume.to_le_bytes());
        b[16..24].copy_from_slice(&lsn.to_le_bytes());
        b[24..32].copy_from_slice(&epoch.to_le_bytes());
        b[32..36].copy_from_slice(&(len as u32).to_le_bytes());
        b[36..40].copy_from_slice(&(self.ops as u32).to_le_bytes());
        b[40..44].copy_from_slice(&part.to_le_bytes());
        b[44..48].copy_from_slice(&(committed as u32).to_le_bytes());
        let crc = crc32c(&b[..len - RECORD_TRAILER_LEN]);
        b[len - 8..len - 4].copy_from_slice(&crc.to_le_bytes());
        b[len - 4..].copy_from_slice(&RECORD_END.to_le_bytes());
        len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(payload: &[u8]) -> Vec<u8> {
        let mut buf = vec![0u8; RecordWriter::len_for(1, payload.len())];
        let mut w = RecordWriter::new(&mut buf, 1);
        w.op(Op {
            file: 3,
            kind: OpKind::Write,
            offset: 16,
            len: payload.len() as u32,
        });
        w.payload(payload);
        let n = w.finish(9, 7, 2, 0, true, 5);
        assert_eq!(n, buf.len());
        buf
    }

    #[test]
    fn what_is_written_is_read() {
        let b = sample(b"hello");
        let v = RecordView::decode(&b).unwrap();
        assert_eq!((v.header.lsn, v.header.epoch, v.header.volume), (7, 2, 9));
        assert_eq!(v.header.committed, 5);
        let ops: Vec<_> = v.ops().collect();
        assert_eq!(ops.len(), 1);
        assert_eq!(ops[0].0.offset, 16);
        assert_eq!(ops[0].1, b"hello");
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let b = sample(b"some payload");
        for bit in 0..b.len() * 8 {
            let mut c = b.clone();
            c[bit / 8] ^= 1 << (bit % 8);
            assert!(RecordView::decode(&c).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_truncation_is_found() {
        let b = sample(b"some payload");
        for n in 0..b.len() {
            assert!(RecordView::decode(&b[..n]).is_err(), "{n} bytes");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(b in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = RecordView::decode(&b);
        }

        #[test]
        fn any_operations_survive(ops in proptest::collection::vec((any::<u32>(), 0u64..1 << 40, proptest::collection::vec(any::<u8>(), 0..64)), 0..20), lsn in 1u64..u64::MAX - 1, end: bool) {
            let total: usize = ops.iter().map(|o| o.2.len()).sum();
            let mut buf = vec![0xAA; RecordWriter::len_for(ops.len(), total)];
            let mut w = RecordWriter::new(&mut buf, ops.len());
            for (file, offset, p) in &ops {
                w.op(Op { file: *file, kind: OpKind::Write, offset: *offset, len: p.len() as u32 });
            }
            for (_, _, p) in &ops { w.payload(p); }
            w.finish(1, lsn, 1, 0, end, lsn - 1);
            let v = RecordView::decode(&buf).unwrap();
            prop_assert_eq!(v.header.lsn, lsn);
            prop_assert_eq!(v.header.end, end);
            let got: Vec<_> = v.ops().map(|(o, p)| (o.file, o.offset, p.to_vec())).collect();
            prop_assert_eq!(got, ops);
        }
    }
}
