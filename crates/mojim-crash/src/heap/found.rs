//! Requirements on a heap in which the region is found again:
//!
//! - It is sound.
//! - Each block is reached once from a root, and none besides.
//! - A program that opens it gets no block that is in use.

use std::collections::{BTreeMap, BTreeSet};

use mojim::{MapFlags, Volume, unmap};
use mojim_format::heap::HEAD_LEN;
use mojim_heap::{Heap, blocks, check};
use mojim_sim::Rng;
use mojim_tx as tx;

use super::layout::{NAMED, OTHER, PREFIX, SLOTS, TABLE, cells, name, options, other_size};
use crate::Result;
use crate::shipped::{FILE, attach};
use crate::subject::SubjectPaths;
use crate::workload::region_len;

/// Recovers the heap after a crash, and returns the region.
pub fn recover(place: &SubjectPaths, seed: u64) -> Result<Vec<u8>> {
    let volume = attach(place, seed, None, true)?;
    let found = region(&volume, seed);
    if tx::is_open() {
        tx::abort()?;
    }
    // Its addresses are the next state's.
    Heap::detach(&volume)?;
    found
}

fn region(volume: &Volume, seed: u64) -> Result<Vec<u8>> {
    let bytes = file(volume)?;
    // Its creation was not committed.
    if bytes[..HEAD_LEN.min(bytes.len())].iter().all(|b| *b == 0) {
        return Ok(vec![0; region_len(seed)]);
    }
    let mut image = Image::of(&bytes)?;
    let region = image.region(seed)?;
    let heap = Heap::open(volume, FILE, &options(seed))?;
    image.try_out(heap, seed)?;
    Ok(region)
}

/// The heap's file, as it is committed.
fn file(volume: &Volume) -> Result<Vec<u8>> {
    let mut bytes = vec![0; volume.size(FILE)?.unwrap_or(0) as usize];
    if !bytes.is_empty() {
        let flags = MapFlags {
            read_only: true,
            ..MapFlags::default()
        };
        let m = volume.map(FILE, bytes.len(), flags)?;
        // SAFETY: the mapping has so many bytes, and nobody stores to it.
        unsafe { bytes.as_mut_ptr().copy_from(m.ptr, bytes.len()) };
        unmap(m.ptr, m.len)?;
    }
    Ok(bytes)
}

/// A heap's file, and what was reached in it.
struct Image<'a> {
    bytes: &'a [u8],
    base: u64,
    blocks: BTreeMap<usize, usize>,
    roots: BTreeMap<String, u64>,
    reached: BTreeSet<usize>,
}

fn torn(what: impl std::fmt::Display) -> String {
    format!("torn: {what}")
}

fn word(bytes: &[u8], i: usize) -> u64 {
    u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight"))
}

impl<'a> Image<'a> {
    fn of(bytes: &'a [u8]) -> std::result::Result<Image<'a>, String> {
        let report = check(bytes).map_err(torn)?;
        if let Some(p) = report.problems.first() {
            return Err(torn(p));
        }
        let all = blocks(bytes).map_err(torn)?.into_iter();
        let roots = report.roots.into_iter().map(|r| (r.name, r.pointer));
        Ok(Image {
            bytes,
            base: report.base,
            blocks: all.map(|(at, len)| (at as usize, len)).collect(),
            roots: roots.collect(),
            reached: BTreeSet::new(),
        })
    }

    /// The block to which something points.
    fn reach(&mut self, pointer: u64, whose: &str) -> std::result::Result<&'a [u8], String> {
        let at = pointer.wrapping_sub(self.base) as usize;
        let Some(len) = self.blocks.get(&at) else {
            return Err(torn(format!(
                "{whose} points to {at:#x}, which is no block, or a free one"
            )));
        };
        match self.reached.insert(at) {
            true => Ok(&self.bytes[at..at + len]),
            false => Err(torn(format!(
                "{whose} points to {at:#x}, which another one has"
            ))),
        }
    }

    fn region(&mut self, seed: u64) -> std::result::Result<Vec<u8>, String> {
        let mut region = vec![0; region_len(seed)];
        let cells = cells(seed);
        if let Some(table) = self.roots.get(TABLE).copied() {
            let table = self.reach(table, TABLE)?;
            self.other(word(table, 0))?;
            for (i, r) in cells.iter().enumerate() {
                let pointer = match i < NAMED {
                    true => self.roots.get(&name(i)).copied().unwrap_or(0),
                    false => word(table, 1 + i),
                };
                if pointer == 0 {
                    continue;
                }
                let block = self.reach(pointer, &name(i))?;
                let number = |at: usize| {
                    u32::from_le_bytes(block[at..at + 4].try_into().expect("four")) as usize
                };
                let used = number(4);
                if number(0) != i || used > r.len() || PREFIX + used > block.len() {
                    return Err(torn(format!("the block of {} is not its own", name(i))));
                }
                region[r.start..r.start + used].copy_from_slice(&block[PREFIX..PREFIX + used]);
            }
        }
        match self.blocks.len() - self.reached.len() {
            0 => Ok(region),
            n => Err(torn(format!(
                "{n} blocks are allocated, and nothing points to them"
            ))),
        }
    }

    /// What the other thread had, which must be at least its transaction `known`.
    fn other(&mut self, known: u64) -> std::result::Result<(), String> {
        let root = self.roots.get(OTHER).copied().unwrap_or(0);
        let other = self.reach(root, OTHER)?;
        let made = word(other, 0);
        if made < known {
            return Err(format!(
                "lost: the other thread made {made} transactions, and a step knew of {known}"
            ));
        }
        for n in made.saturating_sub(SLOTS as u64 - 1).max(1)..=made {
            let block = self.reach(word(other, 1 + n as usize % SLOTS), OTHER)?;
            let rest = &block[8..other_size(n)];
            if word(block, 0) != n || rest.iter().any(|b| *b != n as u8) {
                return Err(torn(format!(
                    "the block of the other thread's transaction {n}"
                )));
            }
        }
        Ok(())
    }

    /// Takes blocks of the heap that was opened, outside of transactions and in one, and finds all others as
    /// they are in the file.
    fn try_out(&self, heap: Heap, seed: u64) -> Result<()> {
        let mut rng = Rng::new(seed ^ self.reached.len() as u64);
        let mut taken = Vec::new();
        tx::begin()?;
        for i in 0..24 {
            let size = match rng.below(12) {
                0 => rng.between(10_000, 60_000),
                _ => rng.between(1, 2000),
            } as usize;
            let p = match i % 2 {
                0 => tx::malloc(heap, size, 1)?,
                _ => heap.take(size, 1)?.ptr,
            };
            taken.push((p as usize - self.base as usize, size));
            // SAFETY: a block of so many bytes.
            unsafe { p.write_bytes(0xdd, size) };
        }
        let bytes = |at: usize, len: usize| {
            // SAFETY: bytes of the heap, which only this thread uses.
            unsafe { std::slice::from_raw_parts((self.base as usize + at) as *const u8, len) }
        };
        let wrong = self.blocks.iter().find(|(at, len)| {
            heap.usable(bytes(**at, 1).as_ptr()).is_err()
                || bytes(**at, **len) != &self.bytes[**at..**at + **len]
        });
        tx::abort()?;
        match wrong {
            Some((at, _)) => Err(torn(format!(
                "the block at {at:#x} is another one's after an open"
            ))
            .into()),
            None if taken.iter().any(|(at, _)| self.blocks.contains_key(at)) => {
                Err(torn("a block was handed out twice").into())
            }
            None => Ok(()),
        }
    }
}
