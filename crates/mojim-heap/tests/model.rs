//! The heap against a model, over memory that keeps what was committed: random calls outside
//! and inside of transactions, syncs, and crashes that throw away everything else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mojim_env::Result;
use mojim_heap::{ALLOCATED, Block, FREE, Heap, HeapOptions, Space, Span, check};

/// What survives a crash: a file. `base`: where the heap lies.
#[derive(Clone, Default)]
struct Disk(Arc<Mutex<Vec<u8>>>);

/// A heap's file in plain memory.
struct Memory {
    disk: Disk,
    base: usize,
}

impl Space for Memory {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the heap has reserved these addresses.
        unsafe { mmap_anonymous(at.cast(), len, prot, flags) }.unwrap();
        let mut disk = self.disk.0.lock().unwrap();
        let end = offset as usize + len;
        if disk.len() < end {
            disk.resize(end, 0);
        }
        let from = &disk[offset as usize..end];
        // Only what is not zero: memory is taken by that alone.
        for (i, page) in from
            .chunks(4096)
            .enumerate()
            .filter(|(_, p)| p.iter().any(|b| *b != 0))
        {
            // SAFETY: inside the mapping.
            unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), at.add(i * 4096), page.len()) };
        }
        Ok(())
    }

    fn commit(&self, spans: &[Span], _: bool) -> Result<()> {
        let mut disk = self.disk.0.lock().unwrap();
        for &(p, len) in spans {
            let at = p as usize - self.base;
            // SAFETY: bytes of the heap.
            disk[at..at + len].copy_from_slice(unsafe { std::slice::from_raw_parts(p, len) });
        }
        Ok(())
    }

    fn sync(&self, mappings: &[Span]) -> Result<()> {
        self.commit(mappings, true)
    }

    fn rollback(&self, (at, len): Span) -> Result<()> {
        let disk = self.disk.0.lock().unwrap();
        let from = &disk[at as usize - self.base..][..len];
        // SAFETY: a mapping of the heap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at.cast_mut(), len) };
        Ok(())
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: made by `map`.
        unsafe { rustix::mm::munmap(at.cast(), len) }.unwrap();
        Ok(())
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn size(&mut self) -> usize {
        match self.below(20) {
            0 => 20_000 + self.below(200_000) as usize,
            1..=3 => self.below(9000) as usize,
            _ => self.below(300) as usize,
        }
    }
}

/// Blocks by address: their bytes, and what fills them.
type Blocks = BTreeMap<usize, (usize, u8)>;

fn overlaps(all: &Blocks, at: usize, len: usize) -> bool {
    let before = all.range(..at + len).next_back();
    before.is_some_and(|(a, (l, _))| a + l.max(&1) > at)
}

fn fill(at: usize, len: usize, with: u8) {
    // SAFETY: a block of the heap.
    unsafe { std::ptr::write_bytes(at as *mut u8, with, len) };
}

fn open(disk: &Disk, base: usize) -> Heap {
    let (head, size) = {
        let d = disk.0.lock().unwrap();
        let mut head = vec![0; 64 << 10];
        let n = d.len().min(head.len());
        head[..n].copy_from_slice(&d[..n]);
        (head, d.len() as u64)
    };
    let space = Memory {
        disk: disk.clone(),
        base,
    };
    let options = HeapOptions::new(1 << 30, base);
    Heap::open_over(Box::new(space), "model", (head, size), &options).unwrap()
}

struct World {
    disk: Disk,
    base: usize,
    heap: Heap,
    r: Random,
    /// As of the last commits, and as it is.
    committed: Blocks,
    now: Blocks,
}

impl World {
    fn new(seed: u64, base: usize) -> World {
        let disk = Disk::default();
        World {
            heap: open(&disk, base),
            disk,
            base,
            r: Random(seed * 2 + 1),
            committed: Blocks::new(),
            now: Blocks::new(),
        }
    }

    fn any(&mut self) -> Option<usize> {
        let n = self.now.len() as u64;
        let i = if n == 0 { return None } else { self.r.below(n) };
        self.now.keys().nth(i as usize).copied()
    }

    fn malloc(&mut self) {
        let (len, with) = (self.r.size(), self.r.below(256) as u8);
        let align = if self.r.below(8) == 0 {
            1 << self.r.below(18)
        } else {
            1
        };
        let at = match align {
            1 => self.heap.malloc(len),
            _ => self.heap.malloc_aligned(len, align),
        };
        let at = at.unwrap() as usize;
        assert!(at.is_multiple_of(align.max(16)));
        assert!(!overlaps(&self.now, at, len.max(1)), "handed out twice");
        fill(at, len, with);
        self.now.insert(at, (len, with));
    }

    fn free(&mut self) {
        if let Some(at) = self.any() {
            self.heap.free(at as *mut u8).unwrap();
            assert!(self.heap.free(at as *mut u8).is_err(), "freed twice");
            assert!(self.heap.free((at + 8) as *mut u8).is_err());
            self.now.remove(&at);
        }
    }

    /// Some blocks come and go in one commit, or none do.
    fn transaction(&mut self) {
        let mut new: Vec<(Block, usize, u8)> = Vec::new();
        let mut gone: Vec<(Block, (usize, u8))> = Vec::new();
        for _ in 0..1 + self.r.below(6) {
            if self.r.below(2) == 0 {
                let (len, with) = (self.r.size(), self.r.below(256) as u8);
                let b = self.heap.take(len, 1).unwrap();
                let at = b.ptr as usize;
                assert!(!overlaps(&self.now, at, len.max(1)), "handed out twice");
                assert!(
                    !overlaps(&self.committed, at, len.max(1)),
                    "a transaction got a block that committed data still has"
                );
                // SAFETY: the block's state byte.
                unsafe { *b.state = ALLOCATED };
                fill(at, len, with);
                self.now.insert(at, (len, with));
                new.push((b, len, with));
            } else if let Some(at) = self.any()
                && !new.iter().any(|(b, ..)| b.ptr as usize == at)
            {
                let b = self.heap.find(at as *const u8).unwrap();
                // SAFETY: as above.
                unsafe { *b.state = FREE };
                assert!(
                    self.heap.find(b.ptr).is_err(),
                    "a block that is free was found"
                );
                let was = self.now.remove(&at).unwrap();
                gone.push((b, was));
            }
        }
        if self.r.below(4) == 0 {
            for (b, ..) in new {
                // SAFETY: as above.
                unsafe { *b.state = FREE };
                self.now.remove(&(b.ptr as usize));
                self.heap.give(b);
            }
            for (b, was) in gone {
                // SAFETY: as above.
                unsafe { *b.state = ALLOCATED };
                self.now.insert(b.ptr as usize, was);
            }
            return;
        }
        let mut spans: Vec<Span> = Vec::new();
        for (b, len, _) in &new {
            spans.extend([(b.state.cast_const(), 1), (b.ptr.cast_const(), *len)]);
        }
        spans.extend(gone.iter().map(|(b, _)| (b.state.cast_const(), 1)));
        let space = Memory {
            disk: self.disk.clone(),
            base: self.base,
        };
        space.commit(&spans, true).unwrap();
        for (b, len, with) in new {
            self.committed.insert(b.ptr as usize, (len, with));
        }
        for (b, _) in gone {
            self.committed.remove(&(b.ptr as usize));
            self.heap.give(b);
        }
    }

    fn sync(&mut self) {
        self.heap.sync().unwrap();
        self.committed = self.now.clone();
    }

    fn rollback(&mut self) {
        self.heap.rollback().unwrap();
        self.now = self.committed.clone();
        self.check();
    }

    fn crash(&mut self) {
        self.heap.close().unwrap();
        self.heap = open(&self.disk, self.base);
        self.now = self.committed.clone();
        self.check();
    }

    fn check(&self) {
        let report = check(&self.disk.0.lock().unwrap()).unwrap();
        assert_eq!(report.problems, [""; 0]);
        // Once, a large block that was free at open kept its units for ever.
        for large in report.classes.iter().filter(|c| c.size == 0) {
            assert_eq!(large.blocks, large.used, "units of large blocks leaked");
        }
        assert_eq!(
            report.used_blocks(),
            self.committed.len() as u64,
            "leaked or lost"
        );
        for (at, (len, with)) in &self.now {
            assert!(self.heap.usable(*at as *const u8).unwrap() >= *len);
            // SAFETY: a block of the heap.
            let bytes = unsafe { std::slice::from_raw_parts(*at as *const u8, *len) };
            assert!(bytes.iter().all(|b| b == with), "block at {at:#x}");
        }
    }
}

#[test]
fn blocks_are_as_of_the_last_commits() {
    let seeds: u64 = std::env::var("HEAP_SEEDS").map_or(6, |s| s.parse().unwrap());
    for seed in 0..seeds {
        println!("seed {seed}");
        let mut w = World::new(seed, 0x2100_0000_0000 + ((seed as usize % 64) << 32));
        for _ in 0..1500 {
            match w.r.below(100) {
                0..35 => w.malloc(),
                35..60 => w.free(),
                60..95 => w.transaction(),
                95..98 => w.sync(),
                98 => w.rollback(),
                _ => w.crash(),
            }
        }
        w.crash();
        w.heap.close().unwrap();
    }
}
