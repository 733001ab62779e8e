//! The bytes of a persistent heap: a file whose offsets are addresses less its base.
//!
//! ```text
//! head (64 KiB): fixed fields, table of chunks, roots
//! chunk 0:       slab table, state bytes, units
//! chunk 1: ...
//! ```
//!
//! A chunk is cut into units of 16 KiB. A slab is a run of units of one chunk, which holds blocks
//! of one size. Its entry in the slab table is that of its first unit. Entries of its other
//! units, and of units in no slab, are 0. Each block has one state byte: 0 free, 1 allocated.
//! Nothing else is kept: free lists are made anew at open. See `docs/reference/format.md`,
//! "Heap".

use crate::bytes::{u32_at, u64_at};
use crate::{FormatError, crc32c};

/// `MJHEAP01`.
pub const HEAP_MAGIC: [u8; 8] = *b"MJHEAP01";
/// Version of the heap's format.
pub const HEAP_VERSION: u32 = 1;
/// Bytes of the head.
pub const HEAD_LEN: usize = 64 << 10;
/// Bytes of the fixed fields.
pub const FIXED_LEN: usize = 64;
/// Most chunks of a heap.
pub const MAX_CHUNKS: usize = 64;
/// Bytes of an entry of the table of chunks.
pub const CHUNK_ENTRY_LEN: usize = 16;
/// Most roots of a heap.
pub const MAX_ROOTS: usize = 128;
/// Bytes of a root.
pub const ROOT_LEN: usize = 256;
/// Longest name of a root, in bytes.
pub const MAX_ROOT_NAME: usize = 63;
/// Longest type of a root, in bytes.
pub const MAX_ROOT_KIND: usize = 127;
/// Bytes of a unit.
pub const UNIT: usize = 16 << 10;
/// State bytes of a unit.
pub const STATES_PER_UNIT: usize = 1024;
/// Bytes of an entry of a slab table.
pub const SLAB_ENTRY_LEN: usize = 8;
/// The smallest block, and the alignment of all.
pub const GRAIN: usize = UNIT / STATES_PER_UNIT;
/// Base addresses, capacities and chunks are multiples of this, but for chunk 0, which
/// is smaller by the head.
pub const ALIGNMENT: usize = 1 << 20;
/// The class of a slab that holds one block of all its units.
pub const LARGE: u8 = 255;
/// State of a block that can be handed out.
pub const FREE: u8 = 0;
/// State of a block that a program has.
pub const ALLOCATED: u8 = 1;

const WHAT: &str = "heap";
const CHUNKS_AT: usize = 1024;
const ROOTS_AT: usize = 4096;
const KIND_AT: usize = 64;
const POINTER_AT: usize = 192;
const FIXED_CRC_AT: usize = FIXED_LEN - 4;
const CHECK_SHIFT: u32 = 40;

const _: () = assert!(CHUNKS_AT + MAX_CHUNKS * CHUNK_ENTRY_LEN <= ROOTS_AT);
const _: () = assert!(ROOTS_AT + MAX_ROOTS * ROOT_LEN <= HEAD_LEN);
const _: () = assert!(KIND_AT > MAX_ROOT_NAME && POINTER_AT - KIND_AT > MAX_ROOT_KIND);
const _: () = assert!(POINTER_AT + 8 <= ROOT_LEN && GRAIN == 16);

/// The fixed fields: written once, when the heap is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeapHead {
    /// The address at which the heap lies.
    pub base: u64,
    /// Bytes of addresses that it may take.
    pub capacity: u64,
    /// A random number: which heap this is.
    pub identity: u64,
}

impl HeapHead {
    /// Its bytes.
    pub fn encode(&self) -> [u8; FIXED_LEN] {
        let mut b = [0; FIXED_LEN];
        b[..8].copy_from_slice(&HEAP_MAGIC);
        b[8..12].copy_from_slice(&HEAP_VERSION.to_le_bytes());
        b[12..16].copy_from_slice(&(UNIT as u32).to_le_bytes());
        b[16..24].copy_from_slice(&self.base.to_le_bytes());
        b[24..32].copy_from_slice(&self.capacity.to_le_bytes());
        b[32..40].copy_from_slice(&self.identity.to_le_bytes());
        let crc = crc32c(&b[..FIXED_CRC_AT]);
        b[FIXED_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Reads them; `None` if all is zero: a heap that was not made yet.
    pub fn decode(b: &[u8]) -> Result<Option<HeapHead>, FormatError> {
        if b.len() < FIXED_LEN {
            return Err(FormatError::Short {
                what: WHAT,
                have: b.len(),
                need: FIXED_LEN,
            });
        }
        let b = &b[..FIXED_LEN];
        if b.iter().all(|x| *x == 0) {
            return Ok(None);
        }
        if b[..8] != HEAP_MAGIC {
            return Err(invalid("it does not begin as a heap does"));
        }
        if u32_at(b, FIXED_CRC_AT) != crc32c(&b[..FIXED_CRC_AT]) {
            return Err(invalid("the checksum of its head is wrong"));
        }
        if u32_at(b, 8) != HEAP_VERSION || u32_at(b, 12) != UNIT as u32 {
            return Err(invalid("another release wrote it"));
        }
        let head = HeapHead {
            base: u64_at(b, 16),
            capacity: u64_at(b, 24),
            identity: u64_at(b, 32),
        };
        match head.is_sane() {
            true => Ok(Some(head)),
            false => Err(invalid("its address or capacity cannot be")),
        }
    }

    /// Whether its addresses can be a program's.
    pub fn is_sane(&self) -> bool {
        const USER: u64 = 1 << 47;
        let aligned = |v: u64| v != 0 && v.is_multiple_of(ALIGNMENT as u64);
        let end = self.base.checked_add(self.capacity);
        aligned(self.base) && aligned(self.capacity) && end.is_some_and(|e| e < USER)
    }
}

fn invalid(why: &'static str) -> FormatError {
    FormatError::Wrong { what: WHAT, why }
}

/// Where the entry of a chunk lies in the head.
pub fn chunk_entry_at(index: usize) -> usize {
    CHUNKS_AT + index * CHUNK_ENTRY_LEN
}

/// The bytes of a chunk's entry: of `len` bytes, the first at `offset`.
pub fn encode_chunk(offset: u64, len: u64) -> [u8; CHUNK_ENTRY_LEN] {
    let mut b = [0; CHUNK_ENTRY_LEN];
    b[..8].copy_from_slice(&len.to_le_bytes());
    b[8..12].copy_from_slice(&chunk_check(offset, len).to_le_bytes());
    b
}

fn chunk_check(offset: u64, len: u64) -> u32 {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&offset.to_le_bytes());
    b[8..].copy_from_slice(&len.to_le_bytes());
    crc32c(&b)
}

/// The chunks that a head lists, each with its first byte and length. `head`: the bytes of
/// the head. `file`: bytes of the file.
pub fn decode_chunks(head: &[u8], file: u64) -> Result<Vec<(u64, u64)>, FormatError> {
    let mut all = Vec::new();
    let mut offset = HEAD_LEN as u64;
    for i in 0..MAX_CHUNKS {
        let at = chunk_entry_at(i);
        if head.len() < at + CHUNK_ENTRY_LEN {
            return Err(invalid("its head is cut"));
        }
        let (len, check) = (u64_at(head, at), u32_at(head, at + 8));
        if len == 0 {
            break;
        }
        if check != chunk_check(offset, len) {
            return Err(invalid("an entry of its chunks is damaged"));
        }
        let end = offset.checked_add(len);
        let whole = |e: u64| e <= file && e.is_multiple_of(ALIGNMENT as u64);
        if !end.is_some_and(whole) || Chunk::of(offset, len).is_none() {
            return Err(invalid("its file is shorter than its chunks"));
        }
        all.push((offset, len));
        offset += len;
    }
    Ok(all)
}

/// Where things lie in a chunk: offsets in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Its first byte, where its slab table begins.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// How many units it has.
    pub units: usize,
    /// The state bytes of its units.
    pub states: u64,
    /// Its first unit.
    pub data: u64,
}

impl Chunk {
    /// The parts of a chunk; `None` if it is too small to have a unit.
    pub fn of(offset: u64, len: u64) -> Option<Chunk> {
        let each = (UNIT + SLAB_ENTRY_LEN + STATES_PER_UNIT) as u64;
        let mut units = len / each;
        loop {
            let meta = units * (SLAB_ENTRY_LEN + STATES_PER_UNIT) as u64;
            let data = meta.next_multiple_of(UNIT as u64);
            if units == 0 {
                return None;
            }
            if data + units * UNIT as u64 <= len {
                let states = offset + units * SLAB_ENTRY_LEN as u64;
                return Some(Chunk {
                    offset,
                    len,
                    units: units as usize,
                    states,
                    data: offset + data,
                });
            }
            units -= 1;
        }
    }

    /// Bytes of the smallest chunk that has so many units in a row.
    pub fn len_for(units: usize) -> u64 {
        let meta = units * (SLAB_ENTRY_LEN + STATES_PER_UNIT);
        ((meta.next_multiple_of(UNIT) + units * UNIT) as u64).next_multiple_of(ALIGNMENT as u64)
    }

    /// Where the slab entry of a unit lies.
    pub fn entry_at(&self, unit: usize) -> u64 {
        self.offset + (unit * SLAB_ENTRY_LEN) as u64
    }

    /// Where the state byte of the first block of a slab lies that begins with this unit.
    pub fn states_at(&self, unit: usize) -> u64 {
        self.states + (unit * STATES_PER_UNIT) as u64
    }

    /// Where a unit lies.
    pub fn unit_at(&self, unit: usize) -> u64 {
        self.data + (unit * UNIT) as u64
    }
}

/// What an entry of a slab table says: the class of its blocks, and its units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabEntry {
    /// The class of its blocks, or [`LARGE`].
    pub class: u8,
    /// Its units.
    pub units: u32,
}

impl SlabEntry {
    /// Its bytes, as a number. `at`: where in the file it lies.
    pub fn encode(self, at: u64) -> u64 {
        assert!(self.units > 0, "a slab has a unit");
        let body = u64::from(self.class) + 1 + (u64::from(self.units) << 9);
        // Nine bits of the class, 31 of the units.
        body | check(body, at) << CHECK_SHIFT
    }

    /// Reads it; `None` for no slab.
    pub fn decode(v: u64, at: u64) -> Result<Option<SlabEntry>, FormatError> {
        if v == 0 {
            return Ok(None);
        }
        let body = v & ((1 << CHECK_SHIFT) - 1);
        let (class, units) = (body & 0x1ff, (body >> 9) as u32);
        if v >> CHECK_SHIFT != check(body, at) || class == 0 || class > 256 || units == 0 {
            return Err(invalid("an entry of a slab table is damaged"));
        }
        Ok(Some(SlabEntry {
            class: (class - 1) as u8,
            units,
        }))
    }
}

/// 24 bits.
fn check(body: u64, at: u64) -> u64 {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&body.to_le_bytes());
    b[8..].copy_from_slice(&at.to_le_bytes());
    u64::from(crc32c(&b) >> 8)
}

/// Where a root lies in the head.
pub fn root_at(index: usize) -> usize {
    ROOTS_AT + index * ROOT_LEN
}

/// A named root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Its name.
    pub name: String,
    /// What it points to, in the program's words.
    pub kind: String,
    /// Where it points to; 0 for a place that is free.
    pub pointer: u64,
}

impl Root {
    /// Its bytes. The name and the type must be short enough.
    pub fn encode(&self) -> [u8; ROOT_LEN] {
        assert!(self.name.len() <= MAX_ROOT_NAME && self.kind.len() <= MAX_ROOT_KIND);
        let mut b = [0; ROOT_LEN];
        b[..self.name.len()].copy_from_slice(self.name.as_bytes());
        b[KIND_AT..KIND_AT + self.kind.len()].copy_from_slice(self.kind.as_bytes());
        b[POINTER_AT..POINTER_AT + 8].copy_from_slice(&self.pointer.to_le_bytes());
        b
    }

    /// Reads it from `ROOT_LEN` bytes; `None` for a place that is free.
    pub fn decode(b: &[u8]) -> Result<Option<Root>, FormatError> {
        let text = |b: &[u8]| {
            let end = b.iter().position(|x| *x == 0);
            let text = end.map(|e| b[..e].to_vec()).map(String::from_utf8);
            text.and_then(Result::ok)
                .ok_or(invalid("a root of it has no name"))
        };
        let pointer = u64_at(b, POINTER_AT);
        if b[0] == 0 {
            return Ok(None);
        }
        Ok(Some(Root {
            name: text(&b[..KIND_AT])?,
            kind: text(&b[KIND_AT..POINTER_AT])?,
            pointer,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_and_any_changed_bit_is_seen() {
        let head = HeapHead {
            base: 0x2000_0000_0000,
            capacity: 64 << 30,
            identity: 7,
        };
        let bytes = head.encode();
        assert_eq!(HeapHead::decode(&bytes), Ok(Some(head)));
        assert_eq!(HeapHead::decode(&[0; FIXED_LEN]), Ok(None));
        for bit in 0..FIXED_LEN * 8 {
            let mut b = bytes;
            b[bit / 8] ^= 1 << (bit % 8);
            assert!(HeapHead::decode(&b).is_err(), "{bit}");
        }
        for (class, units) in [(0, 1), (39, 64), (LARGE, (1 << 31) - 1)] {
            let entry = SlabEntry { class, units };
            let v = entry.encode(4096);
            assert_eq!(SlabEntry::decode(v, 4096), Ok(Some(entry)));
            assert!(SlabEntry::decode(v, 4104).is_err());
            for bit in 0..64 {
                let v = v ^ (1 << bit);
                assert!(v == 0 || SlabEntry::decode(v, 4096).is_err(), "{bit}");
            }
        }
        let root = Root {
            name: "a".repeat(MAX_ROOT_NAME),
            kind: "t".repeat(MAX_ROOT_KIND),
            pointer: 5,
        };
        assert_eq!(Root::decode(&root.encode()), Ok(Some(root)));
        assert_eq!(Root::decode(&[0; ROOT_LEN]), Ok(None));
        assert!(Root::decode(&[b'x'; ROOT_LEN]).is_err());
    }

    #[test]
    fn a_chunk_has_room_for_what_it_is_said_to_have() {
        for len in [(16 << 20) - HEAD_LEN as u64, 1 << 20, 1 << 34, 32 << 10] {
            let c = Chunk::of(HEAD_LEN as u64, len).unwrap();
            assert!(c.states_at(c.units) <= c.data);
            assert!(c.unit_at(c.units) <= c.offset + len);
            assert!(c.data.is_multiple_of(UNIT as u64));
        }
        assert_eq!(Chunk::of(0, 16 << 10), None);
        for units in [1, 2, 1000, 100_000] {
            assert!(Chunk::of(0, Chunk::len_for(units)).unwrap().units >= units);
        }
        let mut head = vec![0; HEAD_LEN];
        let len = (16 << 20) - HEAD_LEN as u64;
        let at = chunk_entry_at(0);
        head[at..at + 16].copy_from_slice(&encode_chunk(HEAD_LEN as u64, len));
        assert_eq!(
            decode_chunks(&head, 16 << 20),
            Ok(vec![(HEAD_LEN as u64, len)])
        );
        assert!(decode_chunks(&head, (16 << 20) - 1).is_err());
        head[at + 3] ^= 1;
        assert!(decode_chunks(&head, 1 << 40).is_err());
    }
}
