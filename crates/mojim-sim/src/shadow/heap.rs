//! A program on the persistent heap, over the shipped engine.
//!
//! It allocates, frees and sets roots, in transactions and outside of them. This file owns the
//! program, its model of the heap, and what lies between heap and engine, with its defects.
//!
//! Every state of the heap that is committed has a number, which lies in a block of the heap. It
//! grows by one with each transaction and each sync of the heap. So a recovered file tells which
//! state it must be. The heap also commits by itself (slabs and chunks), which changes no number.
//!
//! Invariant: the bytes of a block begin with their number, so a block knows what it must hold.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use mojim_env::Result as Done;
use mojim_env::locks::lock;
use mojim_format::heap::{
    ALIGNMENT, ALLOCATED, FREE, HEAD_LEN, HeapHead, chunk_entry_at, encode_chunk,
};
use mojim_heap::{Block, Heap, HeapOptions, Space, Span, blocks, check};
use mojim_replica::pace::Pace;
use mojim_replica::piece::Piece;
use mojim_replica::primary::Primary;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::engine::{read_back, start, text};
use super::medium::Shadow;
use super::model::{Broken, Content, HeapDefect as Defect, Model, Named, System};
use crate::rng::Rng;

/// Addresses of a heap, and where the first one lies.
const CAPACITY: usize = 64 << 20;
const FIRST: usize = 0x2400_0000_0000;
/// Bytes of a new heap: the smallest that there can be, since each state is a copy.
const SMALL: usize = ALIGNMENT;
const NAME: &str = "heap";
/// The root of the block with the state's number.
const NUMBER: &str = "n";
const ROOTS: u64 = 4;
/// Bytes at the begin of each block: how many are in use, and a number that no other block has.
const PREFIX: usize = 16;

/// The file of a heap, and its memory.
struct Disk {
    primary: Primary,
    file: u32,
    base: usize,
    defect: Option<Defect>,
    /// As it is committed.
    committed: Mutex<Vec<u8>>,
    /// What a defect holds back.
    held: Mutex<Vec<Range<usize>>>,
}

impl Disk {
    fn append(&self, pieces: &[Piece<'_>], wait: bool) -> Done<()> {
        let bytes: usize = pieces.iter().map(|p| p.len() + 64).sum();
        let p = &self.primary;
        if p.is_too_large(bytes) {
            let begun = p.begin_commit(pieces)?;
            return p.finish_commit(&begun).map(drop);
        }
        for _ in 0..8 {
            let lane = pieces.len() % 2;
            if let Some(begun) = p.try_append_now(pieces, lane)? {
                return match wait {
                    true => p.wait(begun.lsn).map(drop),
                    false => Ok(()),
                };
            }
            p.wait(p.last())?;
            p.checkpoint_step(Pace::Idle)?;
        }
        Err(mojim_env::Error::Invalid(
            "no room after checkpoints".into(),
        ))
    }

    fn write(&self, spans: &[Span], wait: bool) -> Done<()> {
        let piece = |&(ptr, len): &Span| Piece::Write {
            file: self.file,
            offset: (ptr as usize - self.base) as u64,
            ptr,
            len,
        };
        let mut committed = self.committed.lock().expect("one thread");
        for &(ptr, len) in spans {
            let at = ptr as usize - self.base;
            // SAFETY: bytes of the heap, which one thread uses.
            let now = unsafe { std::slice::from_raw_parts(ptr, len) };
            committed[at..at + len].copy_from_slice(now);
        }
        drop(committed);
        self.append(&spans.iter().map(piece).collect::<Vec<_>>(), wait)
    }
}

/// As the heap has it.
struct Shared(Arc<Disk>);

impl Space for Shared {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Done<()> {
        let end = offset as usize + len;
        let mut committed = self.0.committed.lock().expect("one thread");
        if committed.len() < end {
            let grown = Piece::Resize {
                file: self.0.file,
                size: end as u64,
            };
            self.0.append(&[grown], false)?;
            committed.resize(end, 0);
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the heap has reserved these addresses.
        unsafe { mmap_anonymous(at.cast(), len, prot, flags) }.expect("memory");
        for (i, page) in committed[offset as usize..end].chunks(4096).enumerate() {
            if page.iter().any(|b| *b != 0) {
                // SAFETY: inside the mapping.
                unsafe {
                    at.add(i * 4096)
                        .copy_from_nonoverlapping(page.as_ptr(), page.len())
                };
            }
        }
        Ok(())
    }

    fn commit(&self, spans: &[Span], wait: bool) -> Done<()> {
        let mut held = self.0.held.lock().expect("one thread");
        if !wait && self.0.defect == Some(Defect::Slab) {
            held.extend(spans.iter().map(|s| s.0 as usize..s.0 as usize + s.1));
            return Ok(());
        }
        self.0.write(spans, wait)?;
        let late: Vec<Span> = held
            .drain(..)
            .map(|r| (r.start as *const u8, r.len()))
            .collect();
        match late.is_empty() {
            true => Ok(()),
            false => self.0.write(&late, false),
        }
    }

    fn sync(&self, mappings: &[Span]) -> Done<()> {
        let mut spans: Vec<Span> = Vec::new();
        for &(at, len) in mappings {
            // SAFETY: a mapping of the heap.
            let now = unsafe { std::slice::from_raw_parts(at, len) };
            let from = at as usize - self.0.base;
            let committed = self.0.committed.lock().expect("one thread");
            let old = &committed[from..from + len];
            for (i, (new, old)) in now.chunks(64).zip(old.chunks(64)).enumerate() {
                if new != old {
                    spans.push((at.wrapping_add(i * 64), new.len()));
                }
            }
        }
        self.commit(&spans, true)
    }

    fn rollback(&self, _: Span) -> Done<()> {
        unreachable!("the program rolls nothing back")
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Done<()> {
        // SAFETY: made by `map`.
        unsafe { munmap(at.cast(), len) }.expect("it was mapped");
        Ok(())
    }
}

/// Offsets of blocks, and the bytes in use of each.
type Blocks = BTreeMap<usize, Vec<u8>>;

/// A heap's content.
#[derive(Clone, Default)]
struct HeapContent {
    blocks: Blocks,
    /// Where each root points to.
    roots: BTreeMap<String, usize>,
}

impl HeapContent {
    fn content(&self) -> Content {
        if self.blocks.is_empty() && self.roots.is_empty() {
            return Content::new();
        }
        let block = |(at, b): (&usize, &Vec<u8>)| [&at.to_le_bytes()[..], b].concat();
        let root = |(n, at): (&String, &usize)| [n.as_bytes(), &at.to_le_bytes()].concat();
        let named = |bytes| Named {
            id: 0,
            bytes: Arc::new(bytes),
        };
        let all = [
            ("blocks", self.blocks.iter().flat_map(block).collect()),
            ("roots", self.roots.iter().flat_map(root).collect()),
        ];
        all.map(|(n, bytes)| (n.to_owned(), named(bytes))).into()
    }

    /// What a heap's file has.
    fn of(bytes: &[u8]) -> Result<(u64, HeapContent), String> {
        let mut held = HeapContent::default();
        if bytes[..bytes.len().min(HEAD_LEN)].iter().all(|b| *b == 0) {
            return Ok((0, held));
        }
        let report = check(bytes).map_err(|e| format!("torn: {e}"))?;
        if let Some(p) = report.problems.first() {
            return Err(format!("torn: {p}"));
        }
        for (at, len) in blocks(bytes).map_err(|e| format!("torn: {e}"))? {
            let at = at as usize;
            let used = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
            let used = (used as usize).clamp(PREFIX, len);
            held.blocks.insert(at, bytes[at..at + used].to_vec());
        }
        for r in report.roots {
            held.roots
                .insert(r.name, (r.pointer - report.base) as usize);
        }
        let number = held.roots.get(NUMBER).map(|at| {
            let block = held
                .blocks
                .get(at)
                .ok_or("torn: a root without its block")?;
            let word = block[8..16].try_into().expect("eight");
            Ok::<_, String>(u64::from_le_bytes(word))
        });
        Ok((number.transpose()?.unwrap_or(0), held))
    }
}

pub(super) struct Persistent {
    disk: Arc<Disk>,
    heap: Heap,
    number: u64,
    /// The number of the block that was filled last.
    filled: u64,
    /// As of the last commit, and as it is.
    committed: HeapContent,
    now: HeapContent,
    /// Roots were set outside of transactions since the last sync.
    roots_changed: bool,
}

impl Drop for Persistent {
    fn drop(&mut self) {
        self.heap.close().expect("no transaction is open");
    }
}

/// Makes the file, and a heap in it.
fn make(primary: &Primary, disk: &mut Vec<u8>) -> Done<u32> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let n = MADE.fetch_add(1, Relaxed) % 4096;
    let head = HeapHead {
        base: (FIRST + n * 2 * CAPACITY) as u64,
        capacity: CAPACITY as u64,
        identity: 1,
    };
    let found = primary.store.area().find(NAME).map(|f| f.id);
    let file = found.unwrap_or_else(|| primary.store.area().next_id());
    let mut pieces = vec![Piece::Resize {
        file,
        size: SMALL as u64,
    }];
    if found.is_none() {
        pieces.insert(0, Piece::Create { file, name: NAME });
    }
    let first = primary.begin_commit(&pieces)?;
    primary.finish_commit(&first)?;
    disk.resize(SMALL, 0);
    let chunk = encode_chunk(HEAD_LEN as u64, (SMALL - HEAD_LEN) as u64);
    let fixed = head.encode();
    disk[..fixed.len()].copy_from_slice(&fixed);
    disk[chunk_entry_at(0)..][..chunk.len()].copy_from_slice(&chunk);
    let write = |at: usize, len| Piece::Write {
        file,
        offset: at as u64,
        ptr: disk[at..].as_ptr(),
        len,
    };
    let pieces = [write(0, fixed.len()), write(chunk_entry_at(0), chunk.len())];
    let second = primary.begin_commit(&pieces)?;
    primary.finish_commit(&second)?;
    Ok(file)
}

impl System for Persistent {
    /// Each is a copy of the file.
    const SAMPLE: u64 = 10;
    /// The addresses are those of the heap that is cut off; and the engine's own recovery, which this
    /// would look at, is looked at without a heap.
    const CUT_OFF: bool = false;

    fn open(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Persistent, String> {
        let Some(Broken::Heap(defect)) = broken else {
            unreachable!("a heap's program");
        };
        let primary = start(env)?;
        let file = primary.store.area().find(NAME).map(|f| (f.id, f.size));
        let mut bytes = vec![0; file.map_or(0, |f| f.1 as usize)];
        if let Some((id, _)) = file {
            let read = primary.store.area().read(id, 0, &mut bytes);
            read.map_err(text)?;
        }
        let (number, held) = HeapContent::of(&bytes)?;
        let file = match file {
            Some((id, _)) if bytes.iter().take(8).any(|b| *b != 0) => id,
            _ => make(&primary, &mut bytes).map_err(text)?,
        };
        let head = HeapHead::decode(&bytes)
            .expect("it was read")
            .expect("it is made");
        let first = (bytes[..HEAD_LEN].to_vec(), bytes.len() as u64);
        let disk = Arc::new(Disk {
            primary,
            file,
            base: head.base as usize,
            defect,
            committed: Mutex::new(bytes),
            held: Mutex::default(),
        });
        let name = format!("{:x}", head.base);
        let options = HeapOptions::default();
        let heap = Heap::open_over(Box::new(Shared(disk.clone())), &name, first, &options);
        let heap = heap.map_err(|e| format!("torn: {e}"))?;
        let number_of = |b: &Vec<u8>| u64::from_le_bytes(b[8..16].try_into().expect("eight"));
        let filled = held.blocks.values().map(number_of).max().unwrap_or(0);
        let found = Persistent {
            disk,
            heap,
            number,
            filled: filled + (1 << 32),
            committed: held.clone(),
            now: held,
            roots_changed: false,
        };
        found.look()?;
        Ok(found)
    }

    fn found(&self) -> Result<(u64, Content), String> {
        Ok((self.number, self.committed.content()))
    }

    fn recovered(env: &Arc<Shadow>, _: Option<Broken>) -> Result<(u64, Content), String> {
        let (_, files) = read_back(env)?;
        let Some(file) = files.get(NAME) else {
            return Ok((0, Content::new()));
        };
        let (number, held) = HeapContent::of(&file.bytes)?;
        Ok((number, held.content()))
    }

    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String> {
        if self.number == 0 {
            return self.transaction(rng, model);
        }
        match rng.below(24) {
            0..=4 => self.malloc(rng),
            5 | 6 => self.free(rng),
            7 => self.realloc(rng),
            8 => self.root_outside(rng),
            9..=17 => self.transaction(rng, model),
            18 | 19 => self.sync(model),
            20 | 21 => {
                let p = &self.disk.primary;
                p.checkpoint_step(Pace::Busy).map(drop).map_err(text)
            }
            _ => {
                let p = &self.disk.primary;
                p.persist_wait(rng.below(2) as usize).map_err(text)
            }
        }
    }

    fn end(&mut self, _: &Model) -> Result<(), String> {
        let p = &self.disk.primary;
        p.wait(p.last()).map_err(text)?;
        while p.store.applied() < p.last() {
            p.checkpoint_step(Pace::Idle).map_err(text)?;
        }
        p.store.close_clean(p.last()).map_err(text)
    }
}

/// What a transaction of the program does until its commit.
#[derive(Default)]
struct Open {
    spans: Vec<Span>,
    /// State bytes of new blocks, their bytes, and roots.
    states: Vec<Span>,
    roots: Vec<Span>,
    taken: Vec<Block>,
    freed: Vec<Block>,
}

impl Persistent {
    fn at(&self, offset: usize) -> *mut u8 {
        (self.disk.base + offset) as *mut u8
    }

    fn offset(&self, p: *const u8) -> usize {
        p as usize - self.disk.base
    }

    /// The heap that was opened has what its file has.
    fn look(&self) -> Result<(), String> {
        for (at, bytes) in &self.now.blocks {
            let usable = self.heap.usable(self.at(*at));
            if !usable.is_ok_and(|n| n >= bytes.len()) {
                return Err(format!("torn: the block at {at:#x} is none after an open"));
            }
            // SAFETY: a block of the heap, of at least so many bytes.
            let now = unsafe { std::slice::from_raw_parts(self.at(*at), bytes.len()) };
            if now != bytes {
                return Err(format!("torn: the block at {at:#x} after an open"));
            }
        }
        for (name, at) in &self.now.roots {
            if !self
                .heap
                .root(name, "")
                .is_ok_and(|p| self.offset(p) == *at)
            {
                return Err(format!("torn: root {name} after an open"));
            }
        }
        Ok(())
    }

    /// Bytes for a new block of `usable`.
    fn fill(&mut self, at: usize, usable: usize, rng: &mut Rng) -> Vec<u8> {
        self.filled += 1;
        let used = (PREFIX + rng.below(80) as usize).min(usable);
        let mut bytes = vec![self.filled as u8; used];
        bytes[..8].copy_from_slice(&(used as u64).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.filled.to_le_bytes());
        self.put(at, &bytes);
        bytes
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        // SAFETY: a block of the heap, which only this thread uses.
        unsafe {
            self.at(at)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    fn size(rng: &mut Rng) -> usize {
        match rng.below(20) {
            0 => 40_000 + rng.below(100_000) as usize,
            1 => 1000 + rng.below(8000) as usize,
            _ => PREFIX + rng.below(120) as usize,
        }
    }

    /// A block handed out must not be in use, nor, for a transaction, have been as of the last commit.
    fn is_free(&self, at: usize, usable: usize, of: &HeapContent) -> Result<(), String> {
        let last = of.blocks.range(..at + usable).next_back();
        match last.is_some_and(|(b, bytes)| b + bytes.len() > at) {
            true => Err(format!("torn: the block at {at:#x} was handed out twice")),
            false => Ok(()),
        }
    }

    fn malloc(&mut self, rng: &mut Rng) -> Result<(), String> {
        if self.now.blocks.len() > 60 {
            return self.free(rng);
        }
        let p = self.heap.malloc(Self::size(rng)).map_err(text)?;
        let (at, usable) = (self.offset(p), self.heap.usable(p).map_err(text)?);
        self.is_free(at, usable, &self.now)?;
        let bytes = self.fill(at, usable, rng);
        self.now.blocks.insert(at, bytes);
        Ok(())
    }

    /// A block that no root names; `settled`: one that is as it was committed.
    fn any(&self, settled: bool, rng: &mut Rng) -> Option<usize> {
        let fits = |(at, bytes): &(&usize, &Vec<u8>)| {
            let named = self.now.roots.values().chain(self.committed.roots.values());
            let same = self.committed.blocks.get(*at) == Some(*bytes);
            !named.into_iter().any(|n| n == *at) && (same || !settled)
        };
        let all: Vec<_> = self.now.blocks.iter().filter(fits).collect();
        (!all.is_empty()).then(|| *rng.pick(&all).0)
    }

    fn free(&mut self, rng: &mut Rng) -> Result<(), String> {
        let Some(at) = self.any(false, rng) else {
            return Ok(());
        };
        self.now.blocks.remove(&at);
        self.heap.free(self.at(at)).map_err(text)
    }

    fn realloc(&mut self, rng: &mut Rng) -> Result<(), String> {
        let Some(at) = self.any(false, rng) else {
            return Ok(());
        };
        let old = self.now.blocks.remove(&at).expect("it is there");
        let size = Self::size(rng).max(old.len());
        // SAFETY: one thread uses the heap.
        let p = unsafe { self.heap.realloc(self.at(at), size) }.map_err(text)?;
        let to = self.offset(p);
        self.is_free(to, size, &self.now)?;
        // SAFETY: a block of at least so many bytes.
        if unsafe { std::slice::from_raw_parts(p, old.len()) } != old {
            return Err("torn: realloc has not moved the bytes".into());
        }
        let bytes = self.fill(to, size, rng);
        self.now.blocks.insert(to, bytes);
        Ok(())
    }

    fn name(rng: &mut Rng) -> String {
        format!("r{}", rng.below(ROOTS))
    }

    fn root_outside(&mut self, rng: &mut Rng) -> Result<(), String> {
        let name = Self::name(rng);
        self.roots_changed = true;
        if self.now.roots.contains_key(&name) && rng.coin() {
            self.now.roots.remove(&name);
            let done = self.heap.set_root(&name, std::ptr::null_mut(), "");
            return done.map_err(text);
        }
        let Some(at) = self.any(false, rng) else {
            return Ok(());
        };
        self.now.roots.insert(name.clone(), at);
        self.heap.set_root(&name, self.at(at), "").map_err(text)
    }

    /// The next state, which is about to be committed.
    fn next(&mut self, committed: HeapContent, model: &Model) {
        self.number += 1;
        self.committed = committed;
        let state = (self.number, self.committed.content());
        lock(model).states.push(state);
    }

    fn acknowledged(&self, model: &Model) {
        lock(model).acked = self.number;
    }

    fn sync(&mut self, model: &Model) -> Result<(), String> {
        let at = self.now.roots[NUMBER];
        let bytes = self.now.blocks.get_mut(&at).expect("it is never freed");
        bytes[8..16].copy_from_slice(&(self.number + 1).to_le_bytes());
        let bytes = bytes.clone();
        self.put(at, &bytes);
        self.next(self.now.clone(), model);
        self.heap.sync().map_err(text)?;
        self.roots_changed = false;
        self.acknowledged(model);
        Ok(())
    }

    fn take(
        &mut self,
        open: &mut Open,
        to: &mut HeapContent,
        rng: &mut Rng,
    ) -> Result<usize, String> {
        let b = self.heap.take(Self::size(rng), 1).map_err(text)?;
        let at = self.offset(b.ptr);
        for of in [&self.now, &self.committed, &*to] {
            self.is_free(at, b.usable, of)?;
        }
        // SAFETY: the block's state byte.
        unsafe { b.state.write(ALLOCATED) };
        let bytes = self.fill(at, b.usable, rng);
        open.states.push((b.state, 1));
        open.spans.push((b.ptr, bytes.len()));
        to.blocks.insert(at, bytes.clone());
        self.now.blocks.insert(at, bytes);
        open.taken.push(b);
        Ok(at)
    }

    fn set_root(
        &mut self,
        name: &str,
        at: Option<usize>,
        open: &mut Open,
        to: &mut HeapContent,
    ) -> Result<(), String> {
        let p = at.map_or(std::ptr::null_mut(), |at| self.at(at));
        let roots = &mut open.roots;
        let mut note = |p: *mut u8, len| {
            roots.push((p.cast_const(), len));
            Ok(())
        };
        let done = self.heap.set_root_with(name, p, "", &mut note);
        done.map_err(text)?;
        for of in [&mut self.now, to] {
            match at {
                Some(at) => of.roots.insert(name.into(), at),
                None => of.roots.remove(name),
            };
        }
        Ok(())
    }

    /// Some blocks come and go, and roots, in one commit; some transactions are taken back.
    fn transaction(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String> {
        let (mut open, mut to) = (Open::default(), self.committed.clone());
        let first = self.number == 0;
        let aborts = !first && rng.below(5) == 0;
        for _ in 0..rng.between(1, 4) {
            match rng.below(5) {
                0 | 1 if to.blocks.len() < 60 => {
                    self.take(&mut open, &mut to, rng)?;
                }
                2 | 3 => {
                    let Some(at) = self.any(true, rng) else {
                        continue;
                    };
                    let b = self.heap.find(self.at(at)).map_err(text)?;
                    // SAFETY: the block's state byte.
                    unsafe { b.state.write(FREE) };
                    open.spans.push((b.state, 1));
                    if !aborts {
                        to.blocks.remove(&at);
                        self.now.blocks.remove(&at);
                    }
                    open.freed.push(b);
                    if aborts {
                        break;
                    }
                }
                _ if !aborts && to.blocks.len() < 60 => {
                    let name = Self::name(rng);
                    // Its place in memory may be another root's, which is not committed.
                    if self.roots_changed {
                        continue;
                    }
                    if to.roots.contains_key(&name) && rng.coin() {
                        self.set_root(&name, None, &mut open, &mut to)?;
                        continue;
                    }
                    let at = self.take(&mut open, &mut to, rng)?;
                    self.set_root(&name, Some(at), &mut open, &mut to)?;
                    // One that is named is not freed in the same transaction.
                    break;
                }
                _ => {}
            }
        }
        if aborts {
            self.take_back(open);
            return Ok(());
        }
        if first {
            let at = self.take(&mut open, &mut to, rng)?;
            self.set_root(NUMBER, Some(at), &mut open, &mut to)?;
        }
        let at = to.roots[NUMBER];
        for of in [&mut to, &mut self.now] {
            let bytes = of.blocks.get_mut(&at).expect("it is never freed");
            bytes[8..16].copy_from_slice(&(self.number + 1).to_le_bytes());
        }
        self.put(at, &to.blocks[&at]);
        open.spans.push((self.at(at + 8), 8));
        self.commit(open, to, model)
    }

    fn take_back(&mut self, open: Open) {
        for b in open.freed {
            // SAFETY: the block's state byte.
            unsafe { b.state.write(ALLOCATED) };
        }
        for b in open.taken {
            // SAFETY: as above.
            unsafe { b.state.write(FREE) };
            self.now.blocks.remove(&self.offset(b.ptr));
            self.heap.give(b);
        }
    }

    fn commit(&mut self, mut open: Open, to: HeapContent, model: &Model) -> Result<(), String> {
        self.next(to, model);
        let mut parts = vec![];
        match self.disk.defect {
            Some(Defect::State) => {
                open.states.pop();
            }
            Some(Defect::Root) => parts.push(std::mem::take(&mut open.roots)),
            Some(Defect::Halves) => parts.push(std::mem::take(&mut open.states)),
            _ => {}
        }
        parts.push([open.states, open.spans, open.roots].concat());
        for part in parts.iter().filter(|p| !p.is_empty()) {
            Shared(self.disk.clone()).commit(part, true).map_err(text)?;
        }
        self.acknowledged(model);
        open.freed.into_iter().for_each(|b| self.heap.give(b));
        Ok(())
    }
}
