//! Slabs: which addresses hold blocks of which size, and which blocks can be handed out.
//!
//! Owns the slabs and the free units of the chunks. Owns of each slab the bits of those blocks
//! that are free and in no thread's cache. All this is in memory only, and made anew at
//! open: what is on disk is the table of chunks, the slab tables and the state bytes.
//!
//! Invariants:
//!
//! - A block whose bit is set is free as of the last commit.
//! - A slab whose state bytes were not looked at (`scanned`) has no block in any cache.
//! - A slab's entry is begun to be committed before any block of it is handed out, and its removal
//!   before its units are used again: what is committed later comes later.
//! - Where the removal of an entry cannot be begun, its units are not used until the next open.
//!
//! Lock order: a class before the units.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use mojim_env::locks::lock;
use mojim_env::{Error, Result};
use mojim_format::heap::{
    ALIGNMENT, CHUNK_ENTRY_LEN, Chunk, FREE, GRAIN, HEAD_LEN, LARGE, MAX_CHUNKS, SLAB_ENTRY_LEN,
    STATES_PER_UNIT, SlabEntry, UNIT, chunk_entry_at, decode_chunks, encode_chunk,
};

use crate::classes::{CLASSES, blocks_of, size_of, units_of};
use crate::owners;
use crate::space::{Space, Span};
use crate::table::{Table, Zeroed};

/// Bytes of a new heap's file.
pub const FIRST: u64 = 16 << 20;
/// A slab of this class is none.
const NO_CLASS: u8 = 254;

const _: () = assert!(CLASSES < NO_CLASS as usize);

/// Slabs of a class that a thread looks at for one of its own.
pub const LOOKED: usize = 64;
/// Slabs of a class, with blocks that are free, that are left to other threads.
const LEFT: usize = 4;

/// A block, free or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabBlock {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Its state byte.
    pub state: *mut u8,
}

// SAFETY: two addresses; what is done with them is the heap's affair.
unsafe impl Send for SlabBlock {}

/// A run of units with blocks of one size.
pub struct Slab {
    start: AtomicUsize,
    states: AtomicUsize,
    size: AtomicUsize,
    /// 2^32 divided by the grains of a block, rounded up.
    reciprocal: AtomicU64,
    blocks: AtomicU32,
    /// Bits that are set. Changed under the class's lock.
    free: AtomicU32,
    class: AtomicU8,
    /// The thread that takes blocks of it.
    owner: AtomicU32,
    scanned: AtomicBool,
    /// It is among the class's `partial`.
    listed: AtomicBool,
}

// SAFETY: atomics only.
unsafe impl Zeroed for Slab {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicU64 {}

impl Slab {
    /// Bytes of each of its blocks.
    #[inline]
    pub fn size(&self) -> usize {
        self.size.load(Relaxed)
    }

    /// The class of its blocks, or [`LARGE`].
    #[inline]
    pub fn class(&self) -> u8 {
        self.class.load(Relaxed)
    }

    /// Whether it is in the list of the slabs of a class that have free blocks: it may have ended since
    /// it was put there, and its number be that of another one.
    fn is_listed(&self, class: usize) -> bool {
        self.class() == class as u8 && self.listed.load(Relaxed)
    }

    /// The thread whose slab it is.
    #[inline]
    pub fn owner(&self) -> u32 {
        self.owner.load(Relaxed)
    }

    /// The block that begins at `ptr`, which lies in the slab.
    #[inline]
    fn block_at(&self, ptr: usize) -> Option<usize> {
        let offset = ptr - self.start.load(Relaxed);
        // Exact: grains below 2^16, divided by less than 2^12. Of a large block it is 0.
        let reciprocal = self.reciprocal.load(Relaxed);
        let i = (((offset / GRAIN) as u64).wrapping_mul(reciprocal) >> 32) as usize;
        (i * self.size() == offset && i < self.blocks.load(Relaxed) as usize).then_some(i)
    }
}

/// The slabs of one class.
#[derive(Default)]
pub struct Class {
    /// Some block of it may be free.
    partial: Vec<u32>,
    /// Nobody looked yet.
    unscanned: Vec<u32>,
    /// Slabs of which all blocks are free.
    empty: usize,
}

#[derive(Default)]
struct Units {
    chunks: Vec<Chunk>,
    /// Free runs: the first unit, counted from the base, and how many.
    runs: BTreeMap<usize, usize>,
    by_len: BTreeSet<(usize, usize)>,
    /// Numbers of slabs that are none any more.
    numbers: Vec<u32>,
    next: u32,
    /// The addresses behind the last chunk are another mapping's now.
    stuck: bool,
}

impl Units {
    fn add(&mut self, mut start: usize, mut len: usize) {
        if let Some((&s, &l)) = self.runs.range(..start).next_back()
            && s + l == start
        {
            self.remove(s, l);
            (start, len) = (s, l + len);
        }
        if let Some(&l) = self.runs.get(&(start + len)) {
            self.remove(start + len, l);
            len += l;
        }
        self.runs.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: usize, len: usize) {
        self.runs.remove(&start);
        self.by_len.remove(&(len, start));
    }

    /// Takes `len` units in a row of the smallest run that has them at an `align`ed unit.
    fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let fits = |&&(l, s): &&(usize, usize)| s.next_multiple_of(align) + len <= s + l;
        let &(l, s) = self.by_len.range((len, 0)..).find(fits)?;
        let start = s.next_multiple_of(align);
        self.remove(s, l);
        if start > s {
            self.add(s, start - s);
        }
        if s + l > start + len {
            self.add(start + len, s + l - start - len);
        }
        Some(start)
    }
}

/// What a free without a lock looks at: a line for each unit of a slab whose state bytes were looked at
/// and whose blocks can be in caches. Zeros: none.
#[repr(C, align(32))]
pub struct Quick {
    start: AtomicUsize,
    states: AtomicUsize,
    /// 2^64 divided by the size of a block, rounded up.
    inverse: AtomicU64,
    /// The class in the upper half, the thread whose slab it is in the lower one.
    whose: AtomicU64,
}

// SAFETY: atomics only.
unsafe impl Zeroed for Quick {}

/// A block that may be freed without a lock.
pub struct LocatedBlock {
    pub place: SlabBlock,
    pub class: usize,
    /// The thread whose slab it lies in.
    pub owner: u32,
}

impl Quick {
    /// The block that begins at `ptr`, which lies in the unit. It may be one behind the slab's last, whose
    /// state byte is 0.
    #[inline(always)]
    pub fn find(&self, ptr: usize) -> Option<LocatedBlock> {
        let inverse = self.inverse.load(Acquire);
        let offset = ptr.wrapping_sub(self.start.load(Relaxed));
        // Exact, since offset and size are below 2^32: the upper half is the quotient, and the lower
        // half is below the inverse if nothing is left (Lemire, Kaser, Kurz, "Faster remainder by
        // direct computation", 2019, Section 3).
        let product = u128::from(offset as u64) * u128::from(inverse);
        if product as u64 >= inverse {
            return None;
        }
        let state = self.states.load(Relaxed) + (product >> 64) as usize;
        let place = SlabBlock {
            ptr: ptr as *mut u8,
            state: state as *mut u8,
        };
        let whose = self.whose.load(Relaxed);
        Some(LocatedBlock {
            place,
            class: (whose >> 32) as usize,
            owner: whose as u32,
        })
    }

    fn set_owner(&self, slab: &Slab) {
        let whose = u64::from(slab.class()) << 32 | u64::from(slab.owner());
        self.whose.store(whose, Relaxed);
    }

    fn set(&self, slab: &Slab) {
        self.set_owner(slab);
        self.start.store(slab.start.load(Relaxed), Relaxed);
        self.states.store(slab.states.load(Relaxed), Relaxed);
        let inverse = u64::MAX / slab.size() as u64 + 1;
        self.inverse.store(inverse, Release);
    }
}

/// All slabs of a heap.
pub struct Slabs {
    base: usize,
    capacity: usize,
    slabs: Table<Slab>,
    /// The slab of each unit, counted from the base; 0: none.
    of_unit: Table<AtomicU32>,
    quick: Table<Quick>,
    /// A bit for each block, [`STATES_PER_UNIT`] for each unit.
    bits: Table<AtomicU64>,
    classes: [Mutex<Class>; CLASSES],
    units: Mutex<Units>,
}

/// A state byte, which other threads may write.
///
/// # Safety
/// `p` is a state byte of a heap that is open.
#[inline(always)]
pub unsafe fn state<'a>(p: *mut u8) -> &'a AtomicU8 {
    // SAFETY: the caller's promise; a byte is aligned.
    unsafe { AtomicU8::from_ptr(p) }
}

impl Slabs {
    /// Of a heap whose head and first chunk are mapped at `base`.
    pub fn new(base: usize, capacity: usize) -> Result<Slabs> {
        let units = capacity / UNIT;
        Ok(Slabs {
            base,
            capacity,
            slabs: Table::new(units + 2)?,
            of_unit: Table::new(units)?,
            quick: Table::new(units)?,
            bits: Table::new(units * STATES_PER_UNIT / 64)?,
            classes: [const {
                Mutex::new(Class {
                    partial: Vec::new(),
                    unscanned: Vec::new(),
                    empty: 0,
                })
            }; CLASSES],
            units: Mutex::new(Units {
                next: 1,
                ..Units::default()
            }),
        })
    }

    fn at(&self, offset: u64) -> *mut u8 {
        (self.base + offset as usize) as *mut u8
    }

    /// The chunks that are in use.
    pub fn chunks(&self) -> Vec<Chunk> {
        lock(&self.units).chunks.clone()
    }

    /// The mappings of the heap: the head lies in the first.
    pub fn mappings(&self) -> Vec<Span> {
        let chunks = self.chunks();
        let all = chunks.iter().map(|c| match c.offset == HEAD_LEN as u64 {
            true => (self.base as *const u8, c.len as usize + HEAD_LEN),
            false => (self.at(c.offset).cast_const(), c.len as usize),
        });
        all.collect()
    }

    /// A chunk is mapped, in which a reader looks for no slab.
    pub fn know(&self, chunk: Chunk) {
        lock(&self.units).chunks.push(chunk);
    }

    /// The address behind the last chunk.
    pub fn end(&self) -> u64 {
        let units = lock(&self.units);
        let end = units.chunks.last().map_or(0, |c| c.offset + c.len);
        self.base as u64 + end
    }

    /// Takes a chunk, which is mapped, into use: reads its slab table. A large block that is free ends
    /// here, as it ends when it is freed: a crash came between.
    pub fn adopt(&self, chunk: Chunk, space: &dyn Space) -> Result<(), String> {
        let mut units = lock(&self.units);
        let mut ended: Vec<Span> = Vec::new();
        let first = (chunk.data / UNIT as u64) as usize;
        let (mut unit, mut free_from) = (0, 0);
        while unit < chunk.units {
            let at = chunk.entry_at(unit);
            // SAFETY: an entry of the chunk's slab table, which is mapped.
            let v = unsafe { self.at(at).cast::<u64>().read() };
            let entry = SlabEntry::decode(v, at).map_err(|e| e.to_string())?;
            let Some(entry) = entry else {
                unit += 1;
                continue;
            };
            let len = entry.units as usize;
            let known = match entry.class {
                LARGE => true,
                c => (c as usize) < CLASSES && len == units_of(c as usize),
            };
            if !known || len > chunk.units - unit {
                return Err(format!("the slab of unit {unit} cannot be"));
            }
            // SAFETY: the slab's first state byte.
            let first_state = || unsafe { state(self.at(chunk.states_at(unit))) }.load(Relaxed);
            // Only of a large block: else each slab would cost a page fault.
            if entry.class == LARGE && first_state() == FREE {
                let p = self.at(at);
                // SAFETY: as above; nobody else uses the chunk yet.
                unsafe { p.cast::<u64>().write(0) };
                ended.push((p.cast_const(), SLAB_ENTRY_LEN));
                unit += len;
                continue;
            }
            if unit > free_from {
                units.add(first + free_from, unit - free_from);
            }
            self.insert(&mut units, &chunk, unit, entry, false);
            unit += len;
            free_from = unit;
        }
        if chunk.units > free_from {
            units.add(first + free_from, chunk.units - free_from);
        }
        units.chunks.push(chunk);
        // Before the units are in another slab.
        match ended.is_empty() {
            true => Ok(()),
            false => space.commit(&ended, false).map_err(|e| e.to_string()),
        }
    }

    /// Reads all slab tables again, and forgets what was known of them. Nobody else uses the heap.
    pub fn begin_anew(&self, space: &dyn Space) -> Result<(), String> {
        let chunks = self.forget();
        self.slabs.clear();
        self.of_unit.clear();
        self.quick.clear();
        self.bits.clear();
        let mut chunks = chunks.into_iter();
        chunks.try_for_each(|c| self.adopt(c, space))
    }

    /// Forgets all but the tables. Returns the chunks.
    fn forget(&self) -> Vec<Chunk> {
        let mut units = lock(&self.units);
        // Addresses that are another mapping's stay so.
        let stuck = units.stuck;
        let chunks = std::mem::take(&mut *units).chunks;
        (units.next, units.stuck) = (1, stuck);
        drop(units);
        for class in &self.classes {
            *lock(class) = Class::default();
        }
        chunks
    }

    /// The heap is closed, and nobody uses it: its memory goes, but for this struct.
    pub fn close(&self) {
        self.forget();
        self.slabs.keep();
        self.of_unit.keep();
        self.quick.keep();
        self.bits.keep();
    }

    /// Makes the slab known. `new`: all its blocks are free.
    fn insert(
        &self,
        units: &mut Units,
        chunk: &Chunk,
        unit: usize,
        e: SlabEntry,
        new: bool,
    ) -> u32 {
        let id = units.numbers.pop().unwrap_or_else(|| {
            units.next += 1;
            units.next - 1
        });
        let slab = &self.slabs[id as usize];
        let len = e.units as usize;
        let (size, blocks) = match e.class {
            LARGE => (len * UNIT, 1),
            c => (size_of(c as usize), blocks_of(c as usize)),
        };
        let grains = (size / GRAIN) as u64;
        slab.start
            .store(self.at(chunk.unit_at(unit)) as usize, Relaxed);
        slab.states
            .store(self.at(chunk.states_at(unit)) as usize, Relaxed);
        slab.size.store(size, Relaxed);
        let reciprocal = match e.class {
            LARGE => 0,
            _ => (1u64 << 32).div_ceil(grains),
        };
        slab.reciprocal.store(reciprocal, Relaxed);
        slab.blocks.store(blocks as u32, Relaxed);
        slab.free.store(0, Relaxed);
        slab.class.store(e.class, Relaxed);
        slab.owner.store(owners::NOBODY, Relaxed);
        // A large one has no bit.
        slab.scanned.store(e.class == LARGE, Relaxed);
        slab.listed.store(false, Relaxed);
        let first = (chunk.unit_at(unit) / UNIT as u64) as usize;
        for u in first..first + len {
            self.of_unit[u].store(id, Release);
        }
        if !new && e.class != LARGE {
            lock(&self.classes[e.class as usize]).unscanned.push(id);
        }
        id
    }

    /// The slab in which an address lies, and the block that begins there.
    #[inline]
    pub fn find(&self, ptr: usize) -> Option<(&Slab, SlabBlock)> {
        let offset = ptr.wrapping_sub(self.base);
        if offset >= self.capacity {
            return None;
        }
        let id = self.of_unit[offset / UNIT].load(Acquire);
        if id == 0 {
            return None;
        }
        let slab = &self.slabs[id as usize];
        let i = slab.block_at(ptr)?;
        let place = SlabBlock {
            ptr: ptr as *mut u8,
            state: (slab.states.load(Relaxed) + i) as *mut u8,
        };
        Some((slab, place))
    }

    /// The line of the first unit.
    pub fn quick(&self) -> *const Quick {
        self.quick.start()
    }

    /// The first address.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Bytes of the addresses.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// To be called before a state byte of the slab is changed.
    #[inline]
    pub fn look(&self, slab: &Slab) {
        if !slab.scanned.load(Acquire) {
            self.look_now(slab);
        }
    }

    #[cold]
    fn look_now(&self, slab: &Slab) {
        let mut class = lock(&self.classes[slab.class() as usize]);
        self.scan(&mut class, slab);
    }

    fn number(&self, slab: &Slab) -> u32 {
        let start = slab.start.load(Relaxed);
        self.of_unit[(start - self.base) / UNIT].load(Relaxed)
    }

    fn word(&self, slab: &Slab, block: usize) -> (&AtomicU64, u64) {
        let unit = (slab.start.load(Relaxed) - self.base) / UNIT;
        let bit = unit * STATES_PER_UNIT + block;
        (&self.bits[bit / 64], 1 << (bit % 64))
    }

    /// Sets the bits of the blocks whose state byte says that they are free.
    fn scan(&self, class: &mut Class, slab: &Slab) {
        if slab.scanned.load(Relaxed) {
            return;
        }
        let states = slab.states.load(Relaxed);
        let mut free = 0;
        for i in 0..slab.blocks.load(Relaxed) as usize {
            // SAFETY: a state byte of the slab.
            if unsafe { state((states + i) as *mut u8) }.load(Relaxed) == FREE {
                let (word, bit) = self.word(slab, i);
                word.fetch_or(bit, Relaxed);
                free += 1;
            }
        }
        slab.free.store(free, Relaxed);
        let first = (slab.start.load(Relaxed) - self.base) / UNIT;
        for u in first..first + units_of(slab.class() as usize) {
            self.quick[u].set(slab);
        }
        slab.scanned.store(true, Release);
        self.list(class, slab);
    }

    fn list(&self, class: &mut Class, slab: &Slab) {
        if slab.free.load(Relaxed) > 0 && !slab.listed.swap(true, Relaxed) {
            class.partial.push(self.number(slab));
            if slab.free.load(Relaxed) == slab.blocks.load(Relaxed) {
                class.empty += 1;
            }
        }
    }

    /// The slab is this thread's from here on.
    pub fn own(&self, slab: &Slab, owner: u32) {
        if slab.owner.swap(owner, Relaxed) != owner {
            let first = (slab.start.load(Relaxed) - self.base) / UNIT;
            for u in first..first + units_of(slab.class() as usize) {
                self.quick[u].set_owner(slab);
            }
        }
    }

    /// Which of `partial` has blocks for this thread: a slab of its own, or of a thread that has ended;
    /// any slab where others have many, or there is no room for more (`all`).
    fn usable(&self, class: &mut Class, c: usize, owner: u32, all: bool) -> Option<usize> {
        let mut i = class.partial.len();
        let looked = i.saturating_sub(LOOKED);
        while i > looked {
            i -= 1;
            let slab = &self.slabs[class.partial[i] as usize];
            if !slab.is_listed(c) {
                class.partial.swap_remove(i);
            } else if slab.owner() == owner || !owners::is_live(slab.owner()) {
                return Some(i);
            }
        }
        while let Some(id) = class.partial.last()
            && !self.slabs[*id as usize].is_listed(c)
        {
            class.partial.pop();
        }
        let last = class.partial.len().checked_sub(1)?;
        (all || last >= LEFT).then_some(last)
    }

    /// Moves up to `want` free blocks of a class to `out`, at least one, for a thread.
    pub fn take(
        &self,
        c: usize,
        want: usize,
        out: &mut Vec<SlabBlock>,
        owner: u32,
        space: &dyn Space,
    ) -> Result<()> {
        let mut class = lock(&self.classes[c]);
        let goal = out.len() + want;
        let mut all = false;
        loop {
            while let Some(i) = self.usable(&mut class, c, owner, all) {
                let slab = &self.slabs[class.partial[i] as usize];
                if slab.free.load(Relaxed) == slab.blocks.load(Relaxed) {
                    class.empty = class.empty.saturating_sub(1);
                }
                self.own(slab, owner);
                self.take_of(slab, goal, out);
                if slab.free.load(Relaxed) > 0 {
                    return Ok(());
                }
                slab.listed.store(false, Relaxed);
                class.partial.swap_remove(i);
                if out.len() >= goal {
                    return Ok(());
                }
            }
            if let Some(id) = class.unscanned.pop() {
                // The number may be another slab's by now. One of this class changes under this lock.
                let slab = &self.slabs[id as usize];
                if slab.class() == c as u8 {
                    self.scan(&mut class, slab);
                }
                continue;
            }
            if out.len() + want > goal {
                return Ok(());
            }
            let entry = SlabEntry {
                class: c as u8,
                units: units_of(c) as u32,
            };
            match self.new_slab(entry, 1, space) {
                Ok(id) => self.scan(&mut class, &self.slabs[id as usize]),
                Err(_) if !all && !class.partial.is_empty() => all = true,
                Err(e) => return Err(e),
            }
        }
    }

    fn take_of(&self, slab: &Slab, goal: usize, out: &mut Vec<SlabBlock>) {
        let (start, states) = (slab.start.load(Relaxed), slab.states.load(Relaxed));
        let (size, blocks) = (slab.size(), slab.blocks.load(Relaxed) as usize);
        let mut taken = 0;
        for first in (0..blocks).step_by(64) {
            let (word, _) = self.word(slab, first);
            let mut bits = word.load(Relaxed);
            while bits != 0 && out.len() < goal {
                let i = first + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                out.push(SlabBlock {
                    ptr: (start + i * size) as *mut u8,
                    state: (states + i) as *mut u8,
                });
                taken += 1;
            }
            word.store(bits, Relaxed);
            if out.len() >= goal {
                break;
            }
        }
        slab.free.fetch_sub(taken, Relaxed);
    }

    /// Blocks of a class that are free as of the last commit come back.
    pub fn put(&self, c: usize, blocks: &[SlabBlock], space: &dyn Space) {
        let mut class = lock(&self.classes[c]);
        for p in blocks {
            let (slab, _) = self.find(p.ptr as usize).expect("a block lies in a slab");
            let i = slab.block_at(p.ptr as usize).expect("a block begins there");
            let (word, bit) = self.word(slab, i);
            let before = word.fetch_or(bit, Relaxed);
            assert_eq!(before & bit, 0, "a block of the heap came back twice");
            let free = slab.free.fetch_add(1, Relaxed) + 1;
            if free < slab.blocks.load(Relaxed) || !slab.listed.load(Relaxed) {
                self.list(&mut class, slab);
                continue;
            }
            // One empty slab of each class stays.
            match class.empty {
                0 => class.empty = 1,
                _ => self.drop_slab(slab, space),
            }
        }
    }

    /// A block of its own slab: of `units`, at a unit that is a multiple of `align`.
    pub fn take_large(&self, units: usize, align: usize, space: &dyn Space) -> Result<SlabBlock> {
        let entry = SlabEntry {
            class: LARGE,
            units: u32::try_from(units).map_err(|_| too_large(units * UNIT))?,
        };
        let slab = &self.slabs[self.new_slab(entry, align, space)? as usize];
        Ok(SlabBlock {
            ptr: slab.start.load(Relaxed) as *mut u8,
            state: slab.states.load(Relaxed) as *mut u8,
        })
    }

    /// A large block that is free as of the last commit comes back.
    pub fn put_large(&self, p: SlabBlock, space: &dyn Space) {
        let (slab, _) = self.find(p.ptr as usize).expect("a block lies in a slab");
        self.drop_slab(slab, space);
    }

    /// Makes a slab: takes units, and begins to commit its entry.
    fn new_slab(&self, entry: SlabEntry, align: usize, space: &dyn Space) -> Result<u32> {
        mojim_memory::fork::check_fork()?;
        let mut units = lock(&self.units);
        let len = entry.units as usize;
        // Small slabs begin where blocks of a power of two are aligned to their size.
        let align = align.max(len.min(2).next_power_of_two());
        let first = loop {
            match units.take(len, align) {
                Some(first) => break first,
                None => self.grow(&mut units, len + align, space)?,
            }
        };
        let (chunk, unit) = place_of(&units, first);
        let at = chunk.entry_at(unit);
        let p = self.at(at).cast::<u64>();
        // SAFETY: an entry of a slab table, which only the holder of `units` writes.
        unsafe { p.write(entry.encode(at)) };
        if let Err(e) = space.commit(&[(p.cast_const().cast(), SLAB_ENTRY_LEN)], false) {
            // What is not begun is in no log: nobody will find the slab.
            // SAFETY: as above.
            unsafe { p.write(0) };
            units.add(first, len);
            return Err(e);
        }
        if entry.class != LARGE {
            space.expect((self.at(chunk.unit_at(unit)), len * UNIT));
        }
        Ok(self.insert(&mut units, &chunk, unit, entry, true))
    }

    /// Ends a slab, all of whose blocks are free as of the last commit.
    fn drop_slab(&self, slab: &Slab, space: &dyn Space) {
        let mut units = lock(&self.units);
        let first = (slab.start.load(Relaxed) - self.base) / UNIT;
        let (chunk, unit) = place_of(&units, first);
        let at = chunk.entry_at(unit);
        let p = self.at(at).cast::<u64>();
        // SAFETY: an entry of a slab table, which only the holder of `units` writes.
        let entry = unsafe { p.read() };
        let entry = SlabEntry::decode(entry, at).ok().flatten();
        let len = entry.expect("a slab has its entry").units as usize;
        let id = self.number(slab);
        for i in (0..slab.blocks.load(Relaxed) as usize).step_by(64) {
            self.word(slab, i).0.store(0, Relaxed);
        }
        slab.class.store(NO_CLASS, Relaxed);
        slab.listed.store(false, Relaxed);
        slab.free.store(0, Relaxed);
        for u in first..first + len {
            self.quick[u].inverse.store(0, Relaxed);
            self.of_unit[u].store(0, Release);
        }
        // SAFETY: as above.
        unsafe { p.write(0) };
        if space
            .commit(&[(p.cast_const().cast(), SLAB_ENTRY_LEN)], false)
            .is_ok()
        {
            units.numbers.push(id);
            units.add(first, len);
        }
    }

    /// Maps another chunk, with at least so many units in a row.
    fn grow(&self, units: &mut Units, need: usize, space: &dyn Space) -> Result<()> {
        let full = || Error::Io {
            what: format!(
                "the heap at {:#x} has all of its capacity of {} bytes in use",
                self.base, self.capacity
            ),
            errno: libc::ENOMEM,
            error: "make a larger one, or free blocks".into(),
        };
        let last = units.chunks.last().expect("a heap has a chunk");
        let (offset, n) = (last.offset + last.len, units.chunks.len());
        let room = self.capacity as u64 - offset;
        let least = Chunk::len_for(need);
        // The file doubles: so a heap of any size has few chunks.
        let len = offset.max(least).min(room) / ALIGNMENT as u64 * ALIGNMENT as u64;
        if n == MAX_CHUNKS || len < least || units.stuck {
            return Err(full());
        }
        let chunk = Chunk::of(offset, len).expect("it has the units that are needed");
        space.map(offset, len as usize, self.at(offset))?;
        let entry = encode_chunk(offset, len);
        let at = self.at(chunk_entry_at(n) as u64);
        // SAFETY: an entry of the head, which only the holder of `units` writes.
        unsafe { at.copy_from_nonoverlapping(entry.as_ptr(), CHUNK_ENTRY_LEN) };
        if let Err(e) = space.commit(&[(at.cast_const(), CHUNK_ENTRY_LEN)], false) {
            // The next try maps it again, whatever became of the entry.
            let _ = space.unmap(self.at(offset), len as usize);
            units.stuck = !self.reserve_again(offset, len as usize);
            return Err(e);
        }
        units.add((chunk.data / UNIT as u64) as usize, chunk.units);
        units.chunks.push(chunk);
        Ok(())
    }

    /// Reserves the addresses of a chunk that was unmapped again; false if they are another mapping's.
    fn reserve_again(&self, offset: u64, len: usize) -> bool {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: replaces nothing.
        let got = unsafe { mmap_anonymous(self.at(offset).cast(), len, ProtFlags::empty(), flags) };
        got.is_ok()
    }

    /// Whether the addresses behind the last chunk are another mapping's.
    pub fn is_stuck(&self) -> bool {
        lock(&self.units).stuck
    }

    /// Chunks that a head lists and that are not mapped yet; for readers.
    pub fn new_chunks(&self, head: &[u8]) -> Result<Vec<Chunk>, mojim_format::FormatError> {
        let known = lock(&self.units).chunks.len();
        let all = decode_chunks(head, u64::MAX)?;
        if all
            .last()
            .is_some_and(|(o, l)| o + l > self.capacity as u64)
        {
            return Err(mojim_format::FormatError::Wrong {
                what: "heap",
                why: "its chunks are more than its capacity",
            });
        }
        let new = all.into_iter().skip(known);
        Ok(new.filter_map(|(o, l)| Chunk::of(o, l)).collect())
    }
}

/// The chunk of a unit that is counted from the base, and which of its units it is.
fn place_of(units: &Units, first: usize) -> (Chunk, usize) {
    let offset = (first * UNIT) as u64;
    let i = units.chunks.partition_point(|c| c.data <= offset);
    let chunk = units.chunks[i - 1];
    (chunk, ((offset - chunk.data) / UNIT as u64) as usize)
}

/// The error for more bytes than any heap has.
pub fn too_large(bytes: usize) -> Error {
    Error::Io {
        what: format!("a block of {bytes} bytes"),
        errno: libc::ENOMEM,
        error: "no heap has so many".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;
    use crate::space::Nowhere;
    use mojim_format::heap::ALLOCATED;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    /// Slabs with a first chunk that has these entries, one slab behind the other; of each the first
    /// block is allocated.
    fn slabs_with(entries: &[SlabEntry]) -> Slabs {
        let len = FIRST as usize;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory, at an address of the system's choice.
        let base = unsafe { mmap_anonymous(null_mut(), len, prot, flags) }.unwrap();
        let slabs = Slabs::new(base as usize, len).unwrap();
        let chunk = Chunk::of(HEAD_LEN as u64, FIRST - HEAD_LEN as u64).unwrap();
        let mut unit = 0;
        for e in entries {
            let at = chunk.entry_at(unit);
            // SAFETY: places of the chunk, which nobody else uses.
            unsafe {
                slabs.at(at).cast::<u64>().write(e.encode(at));
                slabs.at(chunk.states_at(unit)).write(ALLOCATED);
            }
            unit += e.units as usize;
        }
        slabs.adopt(chunk, &Nowhere).unwrap();
        slabs
    }

    fn of_class(class: usize) -> SlabEntry {
        SlabEntry {
            class: class as u8,
            units: units_of(class) as u32,
        }
    }

    /// The numbers of many slabs that had ended were in a list. Those that were looked at were left out,
    /// and the next one taken without a look.
    #[test]
    fn slabs_that_have_ended_have_no_blocks() {
        const ENDED: usize = 3;
        const OTHER: usize = 5;
        for want in [1, 64] {
            let entries: Vec<_> = (0..2 * LOOKED + 9).map(|_| of_class(ENDED)).collect();
            let slabs = slabs_with(&entries);
            let chunk = slabs.chunks()[0];
            for n in 0..entries.len() {
                let unit = slabs.base + chunk.unit_at(n * units_of(ENDED)) as usize;
                let (slab, p) = slabs.find(unit).unwrap();
                slabs.look(slab);
                // SAFETY: a state byte of the slab.
                unsafe { state(p.state) }.store(FREE, Relaxed);
                slabs.put(ENDED, &[p], &Nowhere);
            }
            // Nearly all numbers are those of other slabs by now.
            for _ in 0..2 * LOOKED + 4 {
                let id = slabs.new_slab(of_class(OTHER), 1, &Nowhere).unwrap();
                slabs.scan(&mut lock(&slabs.classes[OTHER]), &slabs.slabs[id as usize]);
            }
            let mut out = Vec::new();
            slabs.take(ENDED, want, &mut out, 1, &Nowhere).unwrap();
            assert!(!out.is_empty());
            let of_its_own =
                |p: &SlabBlock| slabs.find(p.ptr as usize).unwrap().0.class() == ENDED as u8;
            assert!(out.iter().all(of_its_own));
        }
    }

    /// The numbers of slabs that nobody has looked at stay in a list when a free looks at them. By the
    /// time that the list is used, the slab may have ended, and its number be that of a slab of another
    /// class, which another thread is about to look at.
    #[test]
    fn a_slab_is_listed_by_its_own_class_alone() {
        const ENDED: usize = 3;
        const OTHER: usize = 5;
        let slabs = slabs_with(&[of_class(ENDED), of_class(ENDED)]);
        let unit = |n: usize| {
            let chunk = slabs.chunks()[0];
            slabs.base + chunk.unit_at(n * units_of(ENDED)) as usize
        };
        // The only block of each is freed. One empty slab of a class stays, so the second ends.
        for n in 0..2 {
            let (slab, p) = slabs.find(unit(n)).unwrap();
            slabs.look(slab);
            // SAFETY: a state byte of the slab.
            unsafe { state(p.state) }.store(FREE, Relaxed);
            slabs.put(ENDED, &[p], &Nowhere);
        }
        assert!(slabs.find(unit(1)).is_none(), "it has ended");
        // A thread makes a slab, which gets the number,
        let id = slabs.new_slab(of_class(OTHER), 1, &Nowhere).unwrap();
        assert_eq!(id, 2);
        // another one takes all that there is of the first class,
        let mut out = Vec::new();
        let all = blocks_of(ENDED) + 1;
        slabs.take(ENDED, all, &mut out, 1, &Nowhere).unwrap();
        let of_its_own =
            |p: &SlabBlock| slabs.find(p.ptr as usize).unwrap().0.class() == ENDED as u8;
        assert!(out.iter().all(of_its_own));
        // and the first thread looks at its slab.
        slabs.scan(&mut lock(&slabs.classes[OTHER]), &slabs.slabs[id as usize]);
        out.clear();
        slabs.take(OTHER, 1, &mut out, 1, &Nowhere).unwrap();
        let found = slabs.find(out[0].ptr as usize).unwrap().0;
        assert_eq!(
            slabs.number(found),
            id,
            "its blocks are lost until the next open"
        );
    }
}
