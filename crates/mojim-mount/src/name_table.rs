//! The file of names: everything that a mounted directory shows beyond the bytes of its files,
//! in cells.
//!
//! Owns the bytes of a cell, and where cells lie. The file is one of the volume's. So it is
//! committed in the same sync points as the files' own bytes, and copied to the same nodes.
//! `docs/reference/format.md`, "The file of names", has it byte by byte.
//!
//! Invariants:
//! - Cells follow each other without gaps from offset 0 up to a length of 0, or the file's end.
//! - A cell keeps its place while it lives. A sync point is atomic, so a cell is written in
//!   place and needs no checksum of its own.

use std::collections::BTreeMap;

use mojim_format::FormatError;
use mojim_format::bytes::{Reader, Writer};

/// The first cell's text.
const MAGIC: [u8; 8] = *b"MJNAMES1";
const WHAT: &str = "file of names";
/// Length and tag.
const HEAD: usize = 8;
/// Cells have multiples of so many bytes.
const UNIT: usize = 32;
/// Longest value of an extended attribute (that of Linux).
pub(crate) const MOST_VALUE: usize = 64 << 10;
/// Longest name in a directory.
pub(crate) const MOST_NAME: usize = 255;
/// Longest target of a symbolic link.
pub(crate) const MOST_TARGET: usize = 4096;

/// The file types that are not the volume's.
const SPECIAL: [u32; 4] = [libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR, libc::S_IFBLK];

const FREE: u32 = 0;
const FIRST: u32 = 1;
const NODE: u32 = 2;
const NAME: u32 = 3;
const XATTR: u32 = 4;

/// A time: seconds since 1970, and nanoseconds.
pub(crate) type Time = (i64, u32);

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Dir,
    /// A file of the volume, by its number.
    File(u32),
    /// A symbolic link, and its target.
    Link(Vec<u8>),
    /// A device, pipe or socket, which is this machine's: the file type of its mode, and the
    /// device's number.
    Special(u32, u32),
}

/// A node's attributes. Its size is its file's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) kind: Kind,
    /// Permissions, with the set-ID and sticky bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) accessed: Time,
    pub(crate) modified: Time,
    pub(crate) changed: Time,
}

/// What a cell says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cell {
    /// No file of the volume has had this number or a greater one from a mount.
    First(u32),
    Node {
        ino: u64,
        attributes: Attributes,
    },
    Name {
        parent: u64,
        ino: u64,
        name: Vec<u8>,
    },
    Xattr {
        ino: u64,
        name: Vec<u8>,
        value: Vec<u8>,
    },
}

impl Cell {
    /// The cell's bytes, of a multiple of [`UNIT`].
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEAD];
        let mut w = Writer(&mut out);
        let tag = match self {
            Cell::First(next) => {
                w.raw(&MAGIC).u32(*next);
                FIRST
            }
            Cell::Node { ino, attributes: a } => {
                let (kind, number, target) = match &a.kind {
                    Kind::Dir => (1, 0, &[][..]),
                    Kind::File(n) => (2, *n, &[][..]),
                    Kind::Link(t) => (3, 0, &t[..]),
                    Kind::Special(kind, device) => (*kind, *device, &[][..]),
                };
                w.u64(*ino).u32(kind).u32(number);
                w.u32(a.mode).u32(a.uid).u32(a.gid);
                for (s, n) in [a.accessed, a.modified, a.changed] {
                    w.u64(s as u64).u32(n);
                }
                w.u32(target.len() as u32).raw(target);
                NODE
            }
            Cell::Name { parent, ino, name } => {
                w.u64(*parent).u64(*ino);
                w.u32(name.len() as u32).raw(name);
                NAME
            }
            Cell::Xattr { ino, name, value } => {
                w.u64(*ino).u32(name.len() as u32).raw(name);
                w.u32(value.len() as u32).raw(value);
                XATTR
            }
        };
        out.resize(out.len().next_multiple_of(UNIT), 0);
        let len = out.len() as u32;
        out[..4].copy_from_slice(&len.to_le_bytes());
        out[4..HEAD].copy_from_slice(&tag.to_le_bytes());
        out
    }

    fn decode(tag: u32, body: &[u8]) -> Result<Cell, FormatError> {
        let mut r = Reader::new(WHAT, body);
        let cell = match tag {
            FIRST if r.take(MAGIC.len())? == MAGIC => Cell::First(r.u32()?),
            NODE => Cell::Node {
                ino: r.u64()?,
                attributes: attributes(&mut r)?,
            },
            NAME => Cell::Name {
                parent: r.u64()?,
                ino: r.u64()?,
                name: bytes(&mut r, MOST_NAME)?,
            },
            XATTR => Cell::Xattr {
                ino: r.u64()?,
                name: bytes(&mut r, MOST_NAME)?,
                value: bytes(&mut r, MOST_VALUE)?,
            },
            _ => return Err(bad("a cell of an unknown kind")),
        };
        Ok(cell)
    }
}

fn bad(field: &'static str) -> FormatError {
    let (what, value) = (WHAT, 0);
    FormatError::Field { what, field, value }
}

fn bytes(r: &mut Reader<'_>, most: usize) -> Result<Vec<u8>, FormatError> {
    let n = r.u32()? as usize;
    if n > most {
        return Err(bad("a length"));
    }
    Ok(r.take(n)?.to_vec())
}

fn attributes(r: &mut Reader<'_>) -> Result<Attributes, FormatError> {
    let (kind, number) = (r.u32()?, r.u32()?);
    let (mode, uid, gid) = (r.u32()?, r.u32()?, r.u32()?);
    let mut times = [(0, 0); 3];
    for t in &mut times {
        *t = (r.u64()? as i64, r.u32()?);
    }
    let target = bytes(r, MOST_TARGET)?;
    if !target.is_empty() && kind != 3 || number != 0 && [1, 3].contains(&kind) {
        return Err(bad("a node's kind"));
    }
    let kind = match kind {
        1 => Kind::Dir,
        2 => Kind::File(number),
        3 => Kind::Link(target),
        k if SPECIAL.contains(&k) => Kind::Special(k, number),
        _ => return Err(bad("a node's kind")),
    };
    let [accessed, modified, changed] = times;
    if times.iter().any(|t| t.1 >= 1_000_000_000) {
        return Err(bad("a time"));
    }
    Ok(Attributes {
        kind,
        mode: mode & 0o7777,
        uid,
        gid,
        accessed,
        modified,
        changed,
    })
}

/// Where a cell lies: its offset and its length.
pub(crate) type CellExtent = (u64, u32);

/// The places of the file.
#[derive(Debug, Default)]
pub(crate) struct CellAllocator {
    /// Behind the last cell.
    end: u64,
    /// Free cells, by length.
    free: BTreeMap<u32, Vec<u64>>,
}

impl CellAllocator {
    /// Reads a file: its places, and the living cells.
    pub(crate) fn read(
        file: &[u8],
    ) -> Result<(CellAllocator, Vec<(CellExtent, Cell)>), FormatError> {
        let mut places = CellAllocator::default();
        let mut cells = Vec::new();
        while let Some(head) = file[places.end as usize..].get(..HEAD) {
            let word = |i| u32::from_le_bytes(std::array::from_fn(|k| head[i + k]));
            let (len, tag) = (word(0), word(4));
            if len == 0 {
                break;
            }
            let at = places.end as usize;
            let cell = file.get(at..at + len as usize);
            let Some(cell) = cell.filter(|_| (len as usize).is_multiple_of(UNIT)) else {
                return Err(bad("a cell's length"));
            };
            let place = (places.end, len);
            match tag {
                FREE => places.free(place),
                tag => {
                    let decoded = Cell::decode(tag, &cell[HEAD..])?;
                    if decoded.encode().len() != len as usize {
                        return Err(bad("a cell's length"));
                    }
                    cells.push((place, decoded));
                }
            }
            if (at == 0) != (tag == FIRST) {
                return Err(bad("the first cell"));
            }
            places.end += u64::from(len);
        }
        Ok((places, cells))
    }

    /// A place for a cell of `len` bytes.
    pub(crate) fn take(&mut self, len: u32) -> CellExtent {
        if let Some(all) = self.free.get_mut(&len)
            && let Some(at) = all.pop()
        {
            return (at, len);
        }
        let at = self.end;
        self.end += u64::from(len);
        (at, len)
    }

    /// The place's cell is gone.
    pub(crate) fn free(&mut self, (at, len): CellExtent) {
        self.free.entry(len).or_default().push(at);
    }

    /// The head of a free cell of `len` bytes.
    pub(crate) fn free_head(len: u32) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&len.to_le_bytes());
        head
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }
}
