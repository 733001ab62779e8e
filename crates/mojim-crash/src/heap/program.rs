//! The program over the heap: it makes steps, beside another thread.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

use mojim::{MapFlags, Volume, gmsync, unmap};
use mojim_format::heap::{ALIGNMENT, HEAD_LEN, HeapHead, chunk_entry_at, encode_chunk};
use mojim_heap::{ALLOCATED, Heap};
use mojim_sim::Rng;
use mojim_tx as tx;

use super::layout::{
    CAPACITY, KIND, NAMED, OTHER, PREFIX, SLOTS, TABLE, cells, name, options, other_size,
};
use crate::Result;
use crate::shipped::{FILE, attach};
use crate::subject::{Slip, Subject, SubjectPaths};
use crate::workload::Patch;

/// A heap whose file begins small: less is copied for each state than of a heap as it is made elsewhere.
fn make_small(volume: &Volume, seed: u64) -> Result<()> {
    let flags = MapFlags {
        create: true,
        atomic: true,
        ..MapFlags::default()
    };
    let options = options(seed);
    let head = HeapHead {
        base: options.address as u64,
        capacity: CAPACITY as u64,
        identity: seed | 1,
    };
    let (head, chunk) = (
        head.encode(),
        encode_chunk(HEAD_LEN as u64, (ALIGNMENT - HEAD_LEN) as u64),
    );
    let m = volume.map(FILE, ALIGNMENT, flags)?;
    let at = m.ptr.wrapping_add(chunk_entry_at(0));
    // SAFETY: two places in the mapping, which only this thread uses.
    unsafe {
        m.ptr.copy_from(head.as_ptr(), head.len());
        at.copy_from(chunk.as_ptr(), chunk.len());
    }
    gmsync(&[
        (m.ptr.cast_const(), head.len()),
        (at.cast_const(), chunk.len()),
    ])?;
    Ok(unmap(m.ptr, m.len)?)
}

/// The heap of an attached volume, which has the region.
pub struct Persistent {
    volume: Volume,
    heap: Heap,
    cells: Vec<Range<usize>>,
    table: *mut u64,
    slip: Option<Slip>,
    rng: Rng,
    turn: u64,
    /// The program is in a transaction.
    inside: bool,
    /// What a slip commits when all else is.
    late: Vec<(*mut u8, usize)>,
    /// The other thread's transactions that are committed.
    other: AtomicU64,
}

impl Persistent {
    /// Attaches to the volume and opens its heap, or makes it.
    pub fn open(place: &SubjectPaths, seed: u64, slip: Option<Slip>) -> Result<Persistent> {
        let volume = attach(place, seed, None, false)?;
        let cells = cells(seed);
        let opened = Persistent::open_heap(&volume, seed, cells.len());
        let (heap, table) = match opened {
            Ok(done) => done,
            Err(e) => {
                while tx::is_open() {
                    tx::abort()?;
                }
                Heap::detach(&volume)?;
                return Err(e);
            }
        };
        let mut subject = Persistent {
            volume,
            heap,
            cells,
            table,
            slip,
            rng: Rng::new(seed ^ 0x4ea9),
            turn: seed,
            inside: false,
            late: Vec::new(),
            other: AtomicU64::new(0),
        };
        // SAFETY: the block of the other thread, which does not run.
        subject.other = AtomicU64::new(unsafe { subject.others()?.read() });
        Ok(subject)
    }

    fn open_heap(volume: &Volume, seed: u64, cells: usize) -> Result<(Heap, *mut u64)> {
        if volume.size(FILE)?.is_none() && !seed.is_multiple_of(4) {
            make_small(volume, seed)?;
        }
        let heap = Heap::open(volume, FILE, &options(seed))?;
        if heap.root(TABLE, KIND).is_err() {
            tx::atomically(|_| {
                for (root, words) in [(TABLE, 1 + cells), (OTHER, 1 + SLOTS)] {
                    let p = tx::malloc(heap, words * 8, 1)?;
                    // SAFETY: a new block of so many words.
                    unsafe { p.cast::<u64>().write_bytes(0, words) };
                    tx::set_root(heap, root, p, KIND)?;
                }
                Ok::<_, mojim_env::Error>(())
            })?;
        }
        Ok((heap, heap.root(TABLE, KIND)?.cast()))
    }

    fn others(&self) -> Result<*mut u64> {
        Ok(self.heap.root(OTHER, KIND)?.cast())
    }

    /// The word of the table for a cell that no root names.
    fn word(&self, cell: usize) -> *mut u64 {
        self.table.wrapping_add(1 + cell)
    }

    fn pointer(&self, cell: usize) -> *mut u8 {
        match cell < NAMED {
            true => self
                .heap
                .root(&name(cell), KIND)
                .unwrap_or(std::ptr::null_mut()),
            // SAFETY: a word of the table, which only this thread changes.
            false => unsafe { self.word(cell).read() as *mut u8 },
        }
    }

    fn content(&self, cell: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.cells[cell].len()];
        let p = self.pointer(cell);
        if !p.is_null() {
            // SAFETY: a block of the cell, as `fill` made it.
            unsafe {
                let used = p.add(4).cast::<u32>().read() as usize;
                bytes.as_mut_ptr().copy_from(p.add(PREFIX), used);
            }
        }
        bytes
    }

    /// Notes bytes that are about to be stored to.
    fn note(&self, p: *mut u8, len: usize) -> Result<()> {
        match self.inside {
            // SAFETY: bytes of the heap, which stays open.
            true => Ok(unsafe { tx::add(p, len) }?),
            false => Ok(()),
        }
    }

    /// A new block.
    fn malloc(&mut self, size: usize) -> Result<*mut u8> {
        let careless = matches!(self.slip, Some(Slip::NoState | Slip::RootFirst));
        if !self.inside {
            return Ok(self.heap.malloc(size)?);
        }
        if !careless {
            return Ok(tx::malloc(self.heap, size, 1)?);
        }
        let block = self.heap.take(size, 1)?;
        // SAFETY: a free block, which is this thread's.
        unsafe { block.state.write(ALLOCATED) };
        match self.slip {
            // SAFETY: as above.
            Some(Slip::NoState) => unsafe { tx::add_new(block.ptr, size)? },
            _ => self.late.extend([(block.state, 1), (block.ptr, size)]),
        }
        Ok(block.ptr)
    }

    fn free(&self, p: *mut u8) -> Result<()> {
        match self.inside {
            true => Ok(tx::free(self.heap, p)?),
            false => Ok(self.heap.free(p)?),
        }
    }

    /// Makes a block what the cell has now.
    fn fill(&self, p: *mut u8, cell: usize, bytes: &[u8]) {
        // SAFETY: a block of at least so many bytes, which only this thread uses.
        unsafe {
            p.cast::<u32>().write(cell as u32);
            p.add(4).cast::<u32>().write(bytes.len() as u32);
            p.add(PREFIX).copy_from(bytes.as_ptr(), bytes.len());
        }
    }

    fn set_pointer(&self, cell: usize, p: *mut u8) -> Result<()> {
        if cell < NAMED {
            return Ok(tx::set_root(self.heap, &name(cell), p, KIND)?);
        }
        let word = self.word(cell);
        self.note(word.cast(), 8)?;
        // SAFETY: as in `pointer`.
        unsafe { word.write(p as u64) };
        Ok(())
    }

    fn change(&mut self, cell: usize, bytes: &[u8]) -> Result<()> {
        let used = bytes.len() - bytes.iter().rev().take_while(|b| **b == 0).count();
        let (bytes, size) = (&bytes[..used], PREFIX + used);
        let old = self.pointer(cell);
        let room = match old.is_null() {
            true => 0,
            false => self.heap.usable(old)?,
        };
        if size <= room && self.rng.below(3) > 0 {
            self.note(old, size)?;
            self.fill(old, cell, bytes);
            return Ok(());
        }
        if !old.is_null() && !self.inside && self.rng.coin() {
            // SAFETY: only this thread uses the block.
            let p = unsafe { self.heap.realloc(old, size)? };
            self.fill(p, cell, bytes);
            return self.set_pointer(cell, p);
        }
        let p = self.malloc(size)?;
        self.fill(p, cell, bytes);
        self.set_pointer(cell, p)?;
        match old.is_null() {
            true => Ok(()),
            false => self.free(old),
        }
    }

    fn begin(&mut self, inside: bool) -> Result<()> {
        self.inside = inside;
        match inside {
            true => Ok(tx::begin()?),
            false => Ok(()),
        }
    }

    fn end(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.inside) {
            return Ok(self.heap.sync()?);
        }
        tx::commit()?;
        let late = std::mem::take(&mut self.late);
        if !late.is_empty() {
            tx::begin()?;
            for (p, n) in late {
                // SAFETY: a block of the heap, or its state.
                unsafe { tx::add_new(p, n)? };
            }
            tx::commit()?;
        }
        Ok(())
    }

    /// A transaction in which blocks come and go, and roots, and which is taken back.
    fn take_back(&mut self) -> Result<()> {
        tx::begin()?;
        for _ in 0..self.rng.between(1, 4) {
            let size = self.rng.between(1, 3000) as usize;
            let p = tx::malloc(self.heap, size, 1)?;
            // SAFETY: a new block.
            unsafe { p.write_bytes(0xee, size) };
            let cell = self.rng.below(self.cells.len() as u64) as usize;
            let old = self.pointer(cell);
            if !old.is_null() && self.heap.find(old).is_ok() {
                // SAFETY: a block of at least so many bytes.
                unsafe {
                    tx::add(old, PREFIX)?;
                    old.write_bytes(0xee, PREFIX);
                }
                tx::free(self.heap, old)?;
            }
            tx::set_root(
                self.heap,
                &name(self.rng.below(NAMED as u64) as usize),
                p,
                KIND,
            )?;
        }
        Ok(tx::abort()?)
    }

    /// The cells that changes touch, and what is in them then.
    fn changed(&self, changes: &[Patch]) -> Vec<(usize, Vec<u8>)> {
        let mut all: Vec<(usize, Vec<u8>)> = Vec::new();
        for c in changes {
            let end = c.at + c.bytes.len();
            let first = self.cells.partition_point(|r| r.end <= c.at);
            let touched = self.cells[first..].iter().take_while(|r| r.start < end);
            for (i, r) in touched.enumerate() {
                let cell = first + i;
                let found = all.iter().position(|(n, _)| *n == cell);
                let at = found.unwrap_or_else(|| {
                    all.push((cell, self.content(cell)));
                    all.len() - 1
                });
                let (from, to) = (c.at.max(r.start), end.min(r.end));
                all[at].1[from - r.start..to - r.start]
                    .copy_from_slice(&c.bytes[from - c.at..to - c.at]);
            }
        }
        all
    }

    fn make(&mut self, changed: &[(usize, Vec<u8>)], known: u64) -> Result<()> {
        let inside = !self.turn.is_multiple_of(3);
        if self.rng.below(4) == 0 {
            self.take_back()?;
        }
        self.begin(inside)?;
        self.note(self.table.cast(), 8)?;
        // SAFETY: the table's first word.
        unsafe { self.table.write(known) };
        for (i, (cell, bytes)) in changed.iter().enumerate() {
            if i > 0 && i == changed.len() / 2 && self.slip == Some(Slip::Halves) {
                self.end()?;
                self.begin(inside)?;
            }
            let level = inside && self.rng.below(4) == 0;
            if level {
                tx::begin()?;
            }
            self.change(*cell, bytes)?;
            if level {
                tx::commit()?;
            }
        }
        self.end()
    }
}

/// Transactions of another thread. Each has a block that comes and, later on, one that goes.
fn others(heap: Heap, at: usize, times: u64, committed: &AtomicU64) -> Result<()> {
    let count = at as *mut u64;
    for _ in 0..times {
        tx::begin()?;
        // SAFETY: the other thread's block, which no other one changes; a new block of so many bytes.
        unsafe {
            let n = count.read() + 1;
            let slot = count.add(1 + n as usize % SLOTS);
            let size = other_size(n);
            let p = tx::malloc(heap, size, 1)?;
            p.write_bytes(n as u8, size);
            p.cast::<u64>().write(n);
            let old = slot.read() as *mut u8;
            if !old.is_null() {
                tx::free(heap, old)?;
            }
            tx::add(slot.cast(), 8)?;
            tx::add(count.cast(), 8)?;
            slot.write(p as u64);
            count.write(n);
        }
        tx::commit()?;
        committed.fetch_add(1, SeqCst);
    }
    Ok(())
}

impl Subject for Persistent {
    fn commit(&mut self, changes: &[Patch]) -> Result<()> {
        self.turn += 1;
        let changed = self.changed(changes);
        let times = match self.turn.is_multiple_of(2) {
            true => self.rng.between(1, 3),
            false => 0,
        };
        let (heap, at) = (self.heap, self.others()? as usize);
        let early = match self.slip {
            Some(Slip::OtherEarly) => times,
            _ => 0,
        };
        let committed = std::mem::take(&mut self.other);
        let known = committed.load(SeqCst) + early;
        let (made, theirs) = std::thread::scope(|s| {
            let other = (times > 0).then(|| s.spawn(|| others(heap, at, times, &committed)));
            let made = self.make(&changed, known);
            let theirs = other.map_or(Ok(()), |o| o.join().expect("it does not panic"));
            (made, theirs)
        });
        self.other = committed;
        made.and(theirs)
    }

    fn close(self: Box<Self>) -> Result<()> {
        // A mistake is seen after a crash, and not where none was.
        self.heap.sync()?;
        self.heap.close()?;
        Ok(self.volume.detach()?)
    }
}
