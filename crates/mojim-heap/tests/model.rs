//! The heap against a model, over memory that keeps what was committed: random calls outside
//! and inside of transactions, syncs, and crashes that throw away everything else.

// HEAP_SEEDS (default 6) seeds. No block may be handed out twice, no transaction may get a block
// that committed data still has, and after a crash exactly the committed blocks are there. A call
// changes at most two bytes of metadata in two ranges, except where a slab begins or ends.
//
// Seen to fail: a heap that hands blocks freed outside transactions to transactions, one that
// forgets a state byte, one whose caches survive a rollback (`threads.rs` too), one whose threads
// do not hear that a sync has begun (`threads.rs`), and one that keeps the units of large blocks.

mod memory;

use std::sync::atomic::Ordering::Relaxed;

use memory::{Blocks, Disk, Memory, Random, address, check_file, fill, open, overlaps};
use mojim_env::rng::Rng;
use mojim_heap::{ALLOCATED, Block, FREE, Heap, Space, Span, check};

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
            r: Random(Rng::new(seed * 2 + 1)),
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
        {
            let disk = self.disk.0.lock().unwrap();
            check_file(&disk, self.base, &self.committed);
            // Once, a large block that was free at open kept its units for ever.
            let report = check(&disk).unwrap();
            for large in report.classes.iter().filter(|c| c.size == 0) {
                assert_eq!(large.blocks, large.used, "units of large blocks leaked");
            }
        }
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
        let mut w = World::new(seed, address(seed as usize % 64));
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

/// The head, the slab tables and the state bytes, of a heap of one chunk.
struct Metadata {
    base: *const u8,
    before: Vec<u8>,
}

impl Metadata {
    fn new(heap: Heap) -> Metadata {
        let first = mojim_format::heap::HEAD_LEN as u64;
        let chunk = mojim_format::heap::Chunk::of(first, (16 << 20) - first).unwrap();
        let base = heap.base().cast_const();
        // SAFETY: the first chunk of the heap, which is mapped.
        let before = unsafe { std::slice::from_raw_parts(base, chunk.data as usize) }.to_vec();
        Metadata { base, before }
    }

    /// How many bytes have changed since the last look, and in how many runs.
    fn changed(&mut self) -> (usize, usize) {
        // SAFETY: as above.
        let now = unsafe { std::slice::from_raw_parts(self.base, self.before.len()) };
        let (mut bytes, mut runs, mut last) = (0, 0, usize::MAX);
        for (page, now) in now.chunks(4096).enumerate() {
            let before = &mut self.before[page * 4096..][..now.len()];
            if before == now {
                continue;
            }
            for i in 0..now.len() {
                let at = page * 4096 + i;
                if before[i] != now[i] {
                    bytes += 1;
                    runs += usize::from(last.wrapping_add(1) != at);
                    last = at;
                }
            }
            before.copy_from_slice(now);
        }
        (bytes, runs)
    }
}

/// What a commit has to carry of the heap itself: at most 2 ranges and 2 bytes for each call, but where a
/// slab begins or ends.
#[test]
fn a_call_changes_two_bytes_of_metadata_at_most() {
    let base = address(64);
    let disk = Disk::default();
    let heap = open(&disk, base);
    let mut r = Random(Rng::new(77));
    let mut live = Vec::new();
    let mut metadata = Metadata::new(heap);
    let (mut calls, mut slabs) = (0, 0);
    for _ in 0..4000 {
        let before = disk.1.load(Relaxed);
        match r.below(8) {
            0..4 => live.push(heap.malloc(r.below(3000) as usize).unwrap()),
            4 if !live.is_empty() => {
                let i = r.below(live.len() as u64) as usize;
                // SAFETY: a block, of this thread alone.
                live[i] = unsafe { heap.realloc(live[i], r.below(3000) as usize) }.unwrap();
            }
            5 => {
                let b = heap.take(r.below(3000) as usize, 1).unwrap();
                // SAFETY: the block's state byte.
                unsafe { *b.state = ALLOCATED };
                live.push(b.ptr);
            }
            _ if !live.is_empty() => {
                let i = r.below(live.len() as u64) as usize;
                heap.free(live.swap_remove(i)).unwrap();
            }
            _ => continue,
        }
        let (bytes, runs) = metadata.changed();
        // Each slab that begins or ends is one entry, committed by itself.
        let entries = (disk.1.load(Relaxed) - before) as usize;
        let (most, ranges) = (2 + 8 * entries, 2 + 8 * entries);
        assert!(
            bytes <= most && runs <= ranges,
            "{bytes} bytes, {runs} ranges, {entries} slabs"
        );
        slabs += entries;
        calls += 1;
    }
    assert!(calls > 3000 && slabs < calls / 10, "{slabs} of {calls}");
    heap.close().unwrap();
}
