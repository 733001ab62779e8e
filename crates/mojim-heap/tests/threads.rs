//! The heap against a model, with several threads: they allocate, commit their own blocks, and free each
//! other's, inside and outside of transactions. At random moments a crash is looked at: the file as it is
//! then has what was committed, and nothing else. Between the turns of the threads all is synced, or rolled
//! back, or the heap crashes.

mod memory;

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Barrier, Mutex};

use memory::{Blocks, Disk, Memory, Random, address, check_file, fill, open, overlaps};
use mojim_env::locks::lock;
use mojim_env::rng::Rng;
use mojim_heap::{ALLOCATED, Block, FREE, Heap, Space, Span};

/// Threads that stay for the whole run; one more in each turn ends with it.
const STAY: usize = 3;
const TURNS: usize = 6;
const STEPS: usize = 120;

/// What all threads know.
struct World {
    disk: Disk,
    base: usize,
    state: Mutex<State>,
    begins: Barrier,
    ends: Barrier,
}

struct State {
    heap: Heap,
    /// Blocks that the program has. Those of the second kind were allocated outside of transactions since
    /// the last sync: no transaction frees them (`mojim_heap.h`, caveat 5).
    committed: Blocks,
    fresh: Blocks,
    /// What a crash leaves.
    file: Blocks,
}

fn take_any(all: &mut Blocks, r: &mut Random) -> Option<(usize, (usize, u8))> {
    let from = r.below(1 << 24) as usize;
    let base = *all.keys().next()?;
    let at = all.range(base + from..).next().map_or(base, |(at, _)| *at);
    all.remove_entry(&at)
}

fn check_content(at: usize, (len, with): (usize, u8)) {
    // SAFETY: a block that the caller has.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
    assert!(
        bytes.iter().all(|b| *b == with),
        "block at {at:#x} was changed"
    );
}

impl World {
    fn new(seed: u64) -> World {
        let (disk, base) = (Disk::default(), address(seed as usize % 64));
        World {
            state: Mutex::new(State {
                heap: open(&disk, base),
                committed: Blocks::new(),
                fresh: Blocks::new(),
                file: Blocks::new(),
            }),
            disk,
            base,
            begins: Barrier::new(STAY + 2),
            ends: Barrier::new(STAY + 1),
        }
    }

    fn space(&self) -> Memory {
        Memory {
            disk: self.disk.clone(),
            base: self.base,
        }
    }

    /// A block is one's own from here on: nobody else has it.
    fn own(&self, state: &State, at: usize, len: usize) {
        let len = len.max(1);
        let twice = overlaps(&state.committed, at, len) || overlaps(&state.fresh, at, len);
        assert!(!twice, "handed out twice");
    }

    /// Some blocks come and go in one commit, or none do.
    fn transaction(&self, r: &mut Random) {
        let heap = lock(&self.state).heap;
        let mut new: Vec<(Block, usize, u8)> = Vec::new();
        let mut gone: Vec<(Block, (usize, u8))> = Vec::new();
        for _ in 0..1 + r.below(5) {
            if r.below(2) == 0 {
                let (len, with) = (r.size() % 40_000, r.below(256) as u8);
                let b = heap.take(len, 1).unwrap();
                let at = b.ptr as usize;
                {
                    let state = lock(&self.state);
                    self.own(&state, at, len);
                    assert!(
                        !overlaps(&state.file, at, len.max(1)),
                        "a transaction got a block that committed data still has"
                    );
                }
                // SAFETY: the block's state byte.
                unsafe { b.state.write(ALLOCATED) };
                fill(at, len, with);
                new.push((b, len, with));
            } else {
                let one = take_any(&mut lock(&self.state).committed, r);
                let Some((at, was)) = one else { continue };
                check_content(at, was);
                let b = heap.find(at as *const u8).unwrap();
                // SAFETY: as above.
                unsafe { b.state.write(FREE) };
                gone.push((b, was));
            }
        }
        let aborts = r.below(4) == 0;
        let mut state = lock(&self.state);
        if aborts {
            for (b, was) in gone {
                // SAFETY: as above.
                unsafe { b.state.write(ALLOCATED) };
                state.committed.insert(b.ptr as usize, was);
            }
            drop(state);
            for (b, ..) in new {
                // SAFETY: as above.
                unsafe { b.state.write(FREE) };
                heap.give(b);
            }
            return;
        }
        let mut spans: Vec<Span> = Vec::new();
        for (b, len, _) in &new {
            spans.extend([(b.state.cast_const(), 1), (b.ptr.cast_const(), *len)]);
        }
        spans.extend(gone.iter().map(|(b, _)| (b.state.cast_const(), 1)));
        self.space().commit(&spans, true).unwrap();
        for (b, len, with) in new {
            state.file.insert(b.ptr as usize, (len, with));
            state.committed.insert(b.ptr as usize, (len, with));
        }
        for (b, _) in &gone {
            state.file.remove(&(b.ptr as usize));
        }
        drop(state);
        gone.into_iter().for_each(|(b, _)| heap.give(b));
    }

    fn malloc(&self, r: &mut Random) {
        let (len, with) = (r.size() % 40_000, r.below(256) as u8);
        let heap = lock(&self.state).heap;
        let at = heap.malloc(len).unwrap() as usize;
        self.own(&lock(&self.state), at, len);
        fill(at, len, with);
        lock(&self.state).fresh.insert(at, (len, with));
    }

    /// Frees a block that any thread has allocated.
    fn free(&self, r: &mut Random) {
        let (heap, one) = {
            let mut state = lock(&self.state);
            let one = match r.below(2) {
                0 => take_any(&mut state.fresh, r),
                _ => take_any(&mut state.committed, r),
            };
            (state.heap, one)
        };
        if let Some((at, was)) = one {
            check_content(at, was);
            heap.free(at as *mut u8).unwrap();
        }
    }

    fn turn(&self, r: &mut Random) {
        for _ in 0..STEPS {
            match r.below(10) {
                0..5 => self.transaction(r),
                5..8 => self.malloc(r),
                _ => self.free(r),
            }
        }
    }

    /// As a crash in this moment would leave the file.
    fn look(&self) {
        let (bytes, file) = {
            let state = lock(&self.state);
            let bytes = lock(&self.disk.0).clone();
            (bytes, state.file.clone())
        };
        check_file(&bytes, self.base, &file);
    }

    /// Nobody else uses the heap.
    fn between(&self, r: &mut Random) {
        let mut state = lock(&self.state);
        match r.below(4) {
            0..2 => {
                state.heap.sync().unwrap();
                let mut fresh = std::mem::take(&mut state.fresh);
                state.committed.append(&mut fresh);
                state.file = state.committed.clone();
            }
            kind => {
                match kind {
                    2 => state.heap.rollback().unwrap(),
                    _ => {
                        state.heap.close().unwrap();
                        state.heap = open(&self.disk, self.base);
                    }
                }
                state.fresh.clear();
                state.committed = state.file.clone();
            }
        }
        for (at, was) in &state.committed {
            assert!(state.heap.usable(*at as *const u8).unwrap() >= was.0);
            check_content(*at, *was);
        }
    }
}

/// The others would wait for a thread that fails: all end, with its message.
fn end_all_when_one_fails() {
    std::panic::set_hook(Box::new(|why| {
        // Not by a macro: the test's output would be kept for its end.
        let seed = SEED.load(Relaxed);
        let _ = writeln!(std::io::stderr(), "seed {seed}: {why}");
        std::process::abort();
    }));
}

static SEED: AtomicU64 = AtomicU64::new(0);

#[test]
fn threads_free_each_others_blocks_and_commit_their_own() {
    let seeds: u64 = std::env::var("HEAP_SEEDS").map_or(2, |s| s.parse().unwrap());
    end_all_when_one_fails();
    for seed in 0..seeds {
        println!("seed {seed}");
        SEED.store(seed, Relaxed);
        let w = &World::new(seed);
        let random = |n: u64| Random(Rng::new((seed + 1) * 7919 + n * 104_729));
        std::thread::scope(|s| {
            for n in 0..STAY as u64 {
                s.spawn(move || {
                    let mut r = random(n);
                    for _ in 0..TURNS {
                        w.begins.wait();
                        w.turn(&mut r);
                        w.ends.wait();
                    }
                });
            }
            let mut r = random(100);
            for turn in 0..TURNS as u64 {
                let ended = s.spawn(move || {
                    w.begins.wait();
                    w.turn(&mut random(1000 + turn));
                });
                w.begins.wait();
                w.look();
                ended.join().unwrap();
                w.ends.wait();
                w.between(&mut r);
            }
        });
        lock(&w.state).heap.close().unwrap();
    }
}
