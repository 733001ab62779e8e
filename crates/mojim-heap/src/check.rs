//! A heap's file, read as bytes: whether it is sound, and what is in it.
//!
//! Owns what `mojim heap check` and `mojim heap info` say. It never writes, and trusts nothing
//! that it reads.

use std::fmt;
use std::fs::File;
use std::path::Path;

use mojim_env::{Context, Error, Result};
use mojim_format::FormatError;
use mojim_format::bytes::u64_at;
use mojim_format::heap::{
    ALLOCATED, Chunk, FREE, HEAD_LEN, HeapHead, LARGE, MAX_ROOTS, ROOT_LEN, Root, SlabEntry, UNIT,
    decode_chunks, root_at,
};

use crate::classes::{CLASSES, blocks_of, size_of, units_of};

/// Most problems that are listed.
const MOST_LISTED: usize = 100;

/// The blocks of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClassReport {
    /// Bytes of a block; 0 for the blocks that are larger than any class.
    pub size: usize,
    /// Slabs.
    pub slabs: u64,
    /// Blocks that these have.
    pub blocks: u64,
    /// Blocks that are allocated.
    pub used: u64,
    /// Bytes that the slabs take.
    pub bytes: u64,
    /// Bytes of the blocks that are allocated.
    pub used_bytes: u64,
}

/// What is in a heap.
#[derive(Debug, Clone, Default)]
pub struct HeapReport {
    /// Its first address.
    pub base: u64,
    /// Bytes of addresses that it may take.
    pub capacity: u64,
    /// Bytes of its chunks, with their tables.
    pub size: u64,
    /// Its chunks.
    pub chunks: u64,
    /// Bytes of its slabs' tables, state bytes and head.
    pub tables: u64,
    /// By size of block; those that no slab has are left out.
    pub classes: Vec<ClassReport>,
    /// Bytes in no slab.
    pub free: u64,
    /// The longest run of them.
    pub longest_free: u64,
    /// Its roots.
    pub roots: Vec<Root>,
    /// What is wrong, at most 100 lines.
    pub problems: Vec<String>,
}

impl HeapReport {
    /// Blocks that are allocated.
    pub fn used_blocks(&self) -> u64 {
        self.classes.iter().map(|c| c.used).sum()
    }

    /// Bytes of the blocks that are allocated.
    pub fn used_bytes(&self) -> u64 {
        self.classes.iter().map(|c| c.used_bytes).sum()
    }

    fn problem(&mut self, text: String) {
        if self.problems.len() < MOST_LISTED {
            self.problems.push(text);
        }
    }

    fn slab(&mut self, bytes: &[u8], chunk: &Chunk, unit: usize, e: SlabEntry) {
        let (size, blocks) = match e.class {
            LARGE => (e.units as usize * UNIT, 1),
            c => (size_of(c as usize), blocks_of(c as usize)),
        };
        let at = chunk.states_at(unit) as usize;
        let states = &bytes[at..at + blocks];
        let used = states.iter().filter(|s| **s == ALLOCATED).count();
        if let Some(i) = states.iter().position(|s| ![FREE, ALLOCATED].contains(s)) {
            self.problem(format!(
                "the block at {:#x} has the state {}, which is none",
                self.base + chunk.unit_at(unit) + (i * size) as u64,
                states[i]
            ));
        }
        let shown = if e.class == LARGE { 0 } else { size };
        let i = match self.classes.iter().position(|c| c.size == shown) {
            Some(i) => i,
            None => {
                self.classes.push(ClassReport {
                    size: shown,
                    ..ClassReport::default()
                });
                self.classes.len() - 1
            }
        };
        let c = &mut self.classes[i];
        c.slabs += 1;
        c.blocks += blocks as u64;
        c.used += used as u64;
        c.bytes += u64::from(e.units) * UNIT as u64;
        c.used_bytes += (used * size) as u64;
    }

    fn free_run(&mut self, units: usize) {
        let bytes = (units * UNIT) as u64;
        self.free += bytes;
        self.longest_free = self.longest_free.max(bytes);
    }

    fn chunk(&mut self, bytes: &[u8], chunk: &Chunk) {
        let (mut unit, mut run) = (0, 0);
        while unit < chunk.units {
            let at = chunk.entry_at(unit);
            let entry = SlabEntry::decode(u64_at(bytes, at as usize), at);
            let known = |e: &SlabEntry| match e.class {
                LARGE => true,
                c => (c as usize) < CLASSES && e.units as usize == units_of(c as usize),
            };
            match entry {
                Ok(None) => {
                    (unit, run) = (unit + 1, run + 1);
                    continue;
                }
                Ok(Some(e)) if known(&e) && e.units as usize <= chunk.units - unit => {
                    self.slab(bytes, chunk, unit, e);
                    self.free_run(run);
                    (unit, run) = (unit + e.units as usize, 0);
                    continue;
                }
                Ok(Some(_)) => self.problem(format!(
                    "the slab of unit {unit} of the chunk at {:#x} cannot be",
                    chunk.offset
                )),
                Err(e) => self.problem(format!(
                    "{e} (unit {unit} of the chunk at {:#x})",
                    chunk.offset
                )),
            }
            unit += 1;
        }
        self.free_run(run);
    }

    fn root(&mut self, bytes: &[u8], i: usize) {
        match Root::decode(&bytes[root_at(i)..][..ROOT_LEN]) {
            Ok(None) => {}
            Err(e) => self.problem(format!("{e} (root {i})")),
            Ok(Some(r)) => {
                let offset = r.pointer.wrapping_sub(self.base);
                if offset >= self.size {
                    self.problem(format!("root {} points out of the heap", r.name));
                }
                self.roots.push(r);
            }
        }
    }
}

impl fmt::Display for HeapReport {
    /// Lines for people.
    fn fmt(&self, t: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slabs: u64 = self.classes.iter().map(|c| c.bytes).sum();
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        let end = self.base + self.capacity;
        let used = (self.used_blocks(), self.used_bytes());
        let share = percent(used.1, slabs);
        writeln!(
            t,
            "address   {:#x} to {end:#x}, {} bytes of these in use",
            self.base, self.size
        )?;
        writeln!(
            t,
            "blocks    {} allocated, {} bytes, {share:.1} % of the slabs' {slabs}",
            used.0, used.1
        )?;
        writeln!(
            t,
            "free      {} bytes in no slab, the longest run {}",
            self.free, self.longest_free
        )?;
        writeln!(
            t,
            "tables    {} bytes, in {} chunks",
            self.tables, self.chunks
        )?;
        if !self.classes.is_empty() {
            writeln!(
                t,
                "\n  block size     slabs      blocks        used   used %"
            )?;
        }
        for c in &self.classes {
            let size = match c.size {
                0 => "larger".to_owned(),
                s => s.to_string(),
            };
            let used = percent(c.used, c.blocks);
            writeln!(
                t,
                "{size:>12}{:>10}{:>12}{:>12}{used:>9.1}",
                c.slabs, c.blocks, c.used
            )?;
        }
        if !self.roots.is_empty() {
            writeln!(t, "\nroots")?;
        }
        for r in &self.roots {
            writeln!(t, "  {}  {:#x}  {}", r.name, r.pointer, r.kind)?;
        }
        self.problems
            .iter()
            .try_for_each(|p| writeln!(t, "problem: {p}"))
    }
}

/// [`check`] of a file.
///
/// # Errors
/// If it cannot be read, and as [`check`].
pub fn check_file(path: &Path) -> Result<HeapReport> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let what = || format!("{}", path.display());
    let file = File::open(path).context(what)?;
    let len = file.metadata().context(what)?.len() as usize;
    if len == 0 {
        return Err(Error::Damaged {
            path: path.into(),
            what: "it is empty: no heap".into(),
        });
    }
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping, at an address of the system's choice.
    let at = unsafe { mmap(null, len, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
    let at = at.map_err(std::io::Error::from).context(what)?;
    // SAFETY: just mapped, and unmapped below. A heap's file never becomes shorter; another file that
    // does ends this process.
    let found = check(unsafe { std::slice::from_raw_parts(at.cast(), len) });
    // SAFETY: as above; what was found borrows nothing of it.
    let _ = unsafe { munmap(at, len) };
    found.map_err(|e| Error::Damaged {
        path: path.into(),
        what: e.to_string(),
    })
}

/// The blocks of a sound heap that are allocated: where in the file each lies, and its bytes.
///
/// # Errors
/// As [`check`]; and if there is any problem.
pub fn blocks(bytes: &[u8]) -> Result<Vec<(u64, usize)>, FormatError> {
    if !check(bytes)?.problems.is_empty() {
        return Err(FormatError::Wrong {
            what: "heap",
            why: "it is damaged (`mojim heap check`)",
        });
    }
    let mut all = Vec::new();
    for (offset, len) in decode_chunks(&bytes[..HEAD_LEN], bytes.len() as u64)? {
        let chunk = Chunk::of(offset, len).expect("it was checked");
        let mut unit = 0;
        while unit < chunk.units {
            let at = chunk.entry_at(unit);
            let Some(e) = SlabEntry::decode(u64_at(bytes, at as usize), at)? else {
                unit += 1;
                continue;
            };
            let (size, blocks) = match e.class {
                LARGE => (e.units as usize * UNIT, 1),
                c => (size_of(c as usize), blocks_of(c as usize)),
            };
            let states = &bytes[chunk.states_at(unit) as usize..][..blocks];
            let used = (0..blocks).filter(|i| states[*i] == ALLOCATED);
            all.extend(used.map(|i| (chunk.unit_at(unit) + (i * size) as u64, size)));
            unit += e.units as usize;
        }
    }
    Ok(all)
}

/// Reads a heap's file whole.
///
/// # Errors
/// If it is no heap: its head or the table of its chunks is damaged. Whatever else is wrong is
/// among the report's problems.
pub fn check(bytes: &[u8]) -> Result<HeapReport, FormatError> {
    let head = HeapHead::decode(bytes)?.ok_or(FormatError::Wrong {
        what: "heap",
        why: "it begins with zeros: it was not made yet, or is another file",
    })?;
    if bytes.len() < HEAD_LEN {
        return Err(FormatError::Short {
            what: "heap",
            have: bytes.len(),
            need: HEAD_LEN,
        });
    }
    let chunks = decode_chunks(&bytes[..HEAD_LEN], bytes.len() as u64)?;
    let mut report = HeapReport {
        base: head.base,
        capacity: head.capacity,
        chunks: chunks.len() as u64,
        size: HEAD_LEN as u64,
        tables: HEAD_LEN as u64,
        ..HeapReport::default()
    };
    for (offset, len) in chunks {
        let chunk = Chunk::of(offset, len).expect("it was checked");
        report.size += len;
        report.tables += chunk.data - chunk.offset;
        report.chunk(bytes, &chunk);
    }
    for i in 0..MAX_ROOTS {
        report.root(bytes, i);
    }
    report.classes.sort_by_key(|c| (c.size == 0, c.size));
    Ok(report)
}
