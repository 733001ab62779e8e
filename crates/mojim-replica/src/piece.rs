//! The pieces of a sync point, which become the operations of a record.
//!
//! Owns how pieces are encoded, and how they are cut where one record cannot hold them.

use mojim_env::{File, racing};
use mojim_format::record::MAX_OPS;
use mojim_format::{OP_LEN, Op, OpKind, RECORD_OVERHEAD, RecordWriter};

/// The number that no file has.
const NO_FILE: u32 = 0;

/// One operation of a sync point, as the caller has it.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Memory that goes to `offset` of the file.
    Write {
        /// The file's number.
        file: u32,
        /// Byte offset in the file.
        offset: u64,
        /// First byte. Other threads may be storing there, which tears this sync point but
        /// nothing else: it is read by `mojim_env::racing` alone.
        ptr: *const u8,
        /// Bytes.
        len: usize,
    },
    /// Bytes of another file that go to the same place of the file. They are read only
    /// when they are written to a spill file, piece by piece.
    Copy {
        /// The file's number.
        file: u32,
        /// Byte offset in both.
        offset: u64,
        /// Bytes.
        len: usize,
        /// The other file; what it does not have is zero.
        from: OtherFile<'a>,
    },
    /// A new file.
    Create {
        /// Its number.
        file: u32,
        /// Its name.
        name: &'a str,
    },
    /// A new size.
    Resize {
        /// The file's number.
        file: u32,
        /// Bytes.
        size: u64,
    },
    /// The file goes.
    Remove {
        /// The file's number.
        file: u32,
    },
    /// The file takes another name.
    Rename {
        /// The file's number.
        file: u32,
        /// The new name.
        name: &'a str,
    },
    /// The operations stand in a spill file that both nodes have.
    Spill {
        /// Its bytes.
        length: u64,
        /// The number in its name.
        id: [u8; 8],
    },
}

/// A file to read from.
#[derive(Clone, Copy)]
pub struct OtherFile<'a>(pub &'a dyn File);

impl std::fmt::Debug for OtherFile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OtherFile")
    }
}

impl Piece<'_> {
    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Piece::Write { len, .. } | Piece::Copy { len, .. } => *len,
            Piece::Create { name, .. } | Piece::Rename { name, .. } => name.len(),
            Piece::Resize { .. } | Piece::Remove { .. } => 0,
            Piece::Spill { .. } => 8,
        }
    }

    /// Whether it has no payload.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn op(&self) -> Op {
        let (file, kind, offset) = match *self {
            Piece::Write { file, offset, .. } | Piece::Copy { file, offset, .. } => {
                (file, OpKind::Write, offset)
            }
            Piece::Create { file, .. } => (file, OpKind::Create, 0),
            Piece::Resize { file, size } => (file, OpKind::Resize, size),
            Piece::Remove { file } => (file, OpKind::Remove, 0),
            Piece::Rename { file, .. } => (file, OpKind::Rename, 0),
            Piece::Spill { length, .. } => (0, OpKind::Spill, length),
        };
        Op {
            file,
            kind,
            offset,
            len: self.len() as u32,
        }
    }

    /// Its first `n` bytes, which are not all, and the rest; `None` if it cannot be
    /// split.
    fn split(self, n: usize) -> Option<(Self, Self)> {
        assert!(n < self.len());
        match self {
            Piece::Write {
                file,
                offset,
                ptr,
                len,
            } => {
                let piece = |offset, ptr, len| Piece::Write {
                    file,
                    offset,
                    ptr,
                    len,
                };
                // SAFETY: n < len.
                let behind = unsafe { ptr.add(n) };
                Some((
                    piece(offset, ptr, n),
                    piece(offset + n as u64, behind, len - n),
                ))
            }
            Piece::Copy {
                file,
                offset,
                len,
                from,
            } => {
                let piece = |offset, len| Piece::Copy {
                    file,
                    offset,
                    len,
                    from,
                };
                Some((piece(offset, n), piece(offset + n as u64, len - n)))
            }
            _ => None,
        }
    }

    #[inline]
    fn copy_to(&self, to: &mut [u8]) {
        match *self {
            Piece::Write { ptr, len, .. } => {
                assert_eq!(to.len(), len);
                // SAFETY: whoever made the piece vouches that `len` bytes at
                // `ptr` stay readable during the call; the target is ours.
                unsafe { racing::copy(ptr, to.as_mut_ptr(), len) }
            }
            Piece::Create { name, .. } | Piece::Rename { name, .. } => {
                to.copy_from_slice(name.as_bytes());
            }
            Piece::Resize { .. } | Piece::Remove { .. } => {}
            Piece::Copy { .. } => unreachable!("its bytes are read before it is encoded"),
            Piece::Spill { id, .. } => to.copy_from_slice(&id),
        }
    }
}

/// The pieces, with the bytes of each `Copy` read into `bytes`.
pub(crate) fn read_copies<'a>(
    pieces: &[Piece<'a>],
    bytes: &mut Vec<u8>,
) -> std::io::Result<Vec<Piece<'a>>> {
    let copied = |p: &Piece<'_>| matches!(p, Piece::Copy { .. });
    bytes.clear();
    bytes.resize(pieces.iter().filter(|p| copied(p)).map(Piece::len).sum(), 0);
    let mut rest = &mut bytes[..];
    let mut out = pieces.to_vec();
    for p in &mut out {
        if let Piece::Copy {
            file,
            offset,
            len,
            from,
        } = *p
        {
            let (to, more) = rest.split_at_mut(len);
            rest = more;
            from.0.read_at(to, offset)?;
            let ptr = to.as_ptr();
            *p = Piece::Write {
                file,
                offset,
                ptr,
                len,
            };
        }
    }
    Ok(out)
}

/// Encodes pieces as one record. Returns its length.
#[inline]
#[allow(clippy::too_many_arguments)]
pub fn encode(
    buf: &mut [u8],
    pieces: &[Piece<'_>],
    volume: u64,
    lsn: u64,
    epoch: u64,
    part: u32,
    end: bool,
    committed: u64,
) -> usize {
    let mut w = RecordWriter::new(buf, pieces.len());
    for p in pieces {
        w.op(p.op());
    }
    for p in pieces {
        p.copy_to(w.payload_mut(p.len()));
    }
    w.finish(volume, lsn, epoch, part, end, committed)
}

/// Encodes a record as long as `buf` that changes nothing: empty, or with bytes for a file that
/// there is not.
pub(crate) fn encode_nothing(
    buf: &mut [u8],
    volume: u64,
    lsn: u64,
    epoch: u64,
    (part, end): (u32, bool),
    committed: u64,
) {
    let len = buf.len() - RECORD_OVERHEAD;
    let mut w = RecordWriter::new(buf, usize::from(len > 0));
    if len > 0 {
        w.op(Op {
            file: NO_FILE,
            kind: OpKind::Write,
            offset: 0,
            len: (len - OP_LEN) as u32,
        });
        w.payload_mut(len - OP_LEN).fill(0);
    }
    w.finish(volume, lsn, epoch, part, end, committed);
}

/// Cuts the pieces of one sync point into parts whose records have at most
/// `max` bytes.
pub fn cut<'a>(pieces: &[Piece<'a>], max: usize) -> Vec<Vec<Piece<'a>>> {
    let mut parts: Vec<Vec<Piece<'a>>> = vec![Vec::new()];
    let mut left = max - RECORD_OVERHEAD;
    for &p in pieces {
        let mut p = p;
        loop {
            let part = parts.last_mut().expect("never empty");
            let full = part.len() >= MAX_OPS.min(max / OP_LEN);
            if !full && OP_LEN + p.len() <= left {
                left -= OP_LEN + p.len();
                part.push(p);
                break;
            }
            if !full
                && left >= OP_LEN + 64
                && let Some((first, rest)) = p.split(left - OP_LEN)
            {
                part.push(first);
                p = rest;
            }
            parts.push(Vec::new());
            left = max - RECORD_OVERHEAD;
        }
    }
    parts
}
