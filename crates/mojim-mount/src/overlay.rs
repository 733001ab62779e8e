//! The state of a file beyond its data file.
//!
//! It is bytes and a size that are not committed yet, or are committed and not applied yet.
//!
//! Owns how writes, cuts and reads of one file meet. A data file is read as it is, at any
//! moment between what was last seen as applied and what was begun.
//!
//! Invariants:
//! - Extents do not overlap, and end at or before the file's size.
//! - `dirty` names exactly the extents that are not begun.
//! - `blocks` names each block for which room was taken, until its bytes are begun or cut.
//! - The memory that extents keep is bounded by their bytes, however often they were cut.
//! - Bytes that were begun stay here until their sync point is applied: until then the data
//!   file may have them or not.
//! - Bytes of the data file from a cut on do not count until that cut is applied. Each cut
//!   counts for itself: what was written behind an earlier one, and is applied, counts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use mojim::Change;
use mojim_format::OP_LEN;

/// An extent takes what is written behind it until it has so many bytes, usually.
const MOST: usize = 1 << 20;
/// Unit in which bytes that are not begun are counted for the room that they take.
pub(crate) const BLOCK: u64 = 4096;
/// An extent that was cut gives memory back from so many unused bytes on.
const MOST_UNUSED: usize = 512;
/// Bytes of the cell of a file's node with its operation, at most.
const NODE: usize = 160;
/// Of an extent that is not begun.
const NOT_YET: u64 = 0;

/// Bytes in a row.
#[derive(Debug)]
struct Extent {
    bytes: Vec<u8>,
    /// The LSN of its sync point, or [`NOT_YET`].
    lsn: u64,
}

impl Extent {
    /// After it became shorter: it would keep the memory of all that it had.
    fn shrink(&mut self) {
        if self.bytes.capacity() - self.bytes.len() > MOST_UNUSED {
            self.bytes.shrink_to_fit();
        }
    }
}

/// A place where the file was cut.
#[derive(Debug)]
struct Cut {
    at: u64,
    /// The LSN of its sync point, or [`NOT_YET`].
    lsn: u64,
}

/// A file's bytes and size, above its data file.
#[derive(Debug)]
pub(crate) struct Overlay {
    extents: BTreeMap<u64, Extent>,
    size: u64,
    /// The size as of the last sync point that was begun.
    begun_size: u64,
    /// The least size since then.
    low: u64,
    /// The last of them may not be begun, no other.
    cuts: Vec<Cut>,
    /// Where extents are that are not begun: of those that are, thousands may wait to be applied.
    dirty: BTreeSet<u64>,
    dirty_bytes: usize,
    /// Blocks of what is not begun, except where that takes the place of other bytes.
    blocks: BTreeSet<u64>,
    /// The oldest sync point of an extent or a cut; `u64::MAX`: none.
    oldest: u64,
    /// An extent takes what is written behind it until it has so many bytes.
    most: usize,
}

impl Overlay {
    /// Of a file whose data file has `size` bytes.
    pub(crate) fn new(size: u64) -> Overlay {
        Overlay::with_most(size, MOST)
    }

    /// As [`Overlay::new`], with extents of at most so many bytes, unless one write has more. What is
    /// written into an extent that was begun copies all that is behind it there.
    pub(crate) fn with_most(size: u64, most: usize) -> Overlay {
        Overlay {
            most,
            extents: BTreeMap::new(),
            size,
            begun_size: size,
            low: size,
            cuts: Vec::new(),
            dirty: BTreeSet::new(),
            dirty_bytes: 0,
            blocks: BTreeSet::new(),
            oldest: u64::MAX,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that a sync point would have, at most: what is not begun, its operations, and the cell
    /// of the file's node.
    pub(crate) fn dirty_bytes(&self) -> usize {
        match self.is_dirty() {
            true => self.dirty_bytes + (self.dirty.len() + 2) * OP_LEN + NODE,
            false => 0,
        }
    }

    /// Extents that are not begun.
    pub(crate) fn dirty_extents(&self) -> usize {
        self.dirty.len()
    }

    /// Blocks for which room was taken, and that are not begun.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks of `range`, which is not empty, for which no room was taken yet.
    pub(crate) fn new_blocks(&self, range: &Range<u64>) -> usize {
        let all = range.start / BLOCK..=(range.end - 1) / BLOCK;
        let count = (all.end() - all.start() + 1) as usize;
        count - self.blocks.range(all).count()
    }

    /// Room was taken for the blocks of `range`, which is not empty.
    pub(crate) fn take_blocks(&mut self, range: &Range<u64>) {
        self.blocks
            .extend(range.start / BLOCK..=(range.end - 1) / BLOCK);
    }

    /// Whether something was begun and may not be applied.
    pub(crate) fn is_begun(&self) -> bool {
        self.oldest != u64::MAX
    }

    /// Pages of so many bytes that extents touch, about.
    pub(crate) fn pages(&self, page: u64) -> u64 {
        let of = |(at, e): (&u64, &Extent)| (at + e.bytes.len() as u64).div_ceil(page) - at / page;
        self.extents.iter().map(of).sum()
    }

    /// Whether there is anything to commit.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || self.size != self.begun_size || self.low < self.begun_size
    }

    /// Stores bytes; the file grows if need be.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len() as u64;
        self.size = self.size.max(end);
        if self.overwrite(offset, bytes) {
            return;
        }
        self.clear(offset, end);
        self.dirty_bytes += bytes.len();
        if let Some((at, e)) = self.extents.range_mut(..offset).next_back()
            && e.lsn == NOT_YET
            && at + e.bytes.len() as u64 == offset
            && e.bytes.len() + bytes.len() <= self.most
        {
            e.bytes.extend_from_slice(bytes);
            return;
        }
        let bytes = bytes.to_vec();
        let lsn = NOT_YET;
        self.insert(offset, Extent { bytes, lsn });
    }

    fn insert(&mut self, at: u64, e: Extent) {
        if e.lsn == NOT_YET {
            self.dirty.insert(at);
        }
        self.extents.insert(at, e);
    }

    /// True if one extent that is not begun has all of that place.
    fn overwrite(&mut self, offset: u64, bytes: &[u8]) -> bool {
        if let Some((at, e)) = self.extents.range_mut(..=offset).next_back()
            && e.lsn == NOT_YET
            && offset + bytes.len() as u64 <= at + e.bytes.len() as u64
        {
            let from = (offset - at) as usize;
            e.bytes[from..from + bytes.len()].copy_from_slice(bytes);
            return true;
        }
        false
    }

    /// No extent has anything of `from..to` afterwards.
    fn clear(&mut self, from: u64, to: u64) {
        if let Some((at, e)) = self.extents.range_mut(..from).next_back() {
            let end = at + e.bytes.len() as u64;
            if end > from {
                let lsn = e.lsn;
                let rest = (to < end).then(|| e.bytes[(to - at) as usize..].to_vec());
                e.bytes.truncate((from - at) as usize);
                e.shrink();
                if lsn == NOT_YET {
                    self.dirty_bytes -= (end.min(to) - from) as usize;
                }
                if let Some(bytes) = rest {
                    self.insert(to, Extent { bytes, lsn });
                    return;
                }
            }
        }
        while let Some((&at, _)) = self.extents.range(from..to).next() {
            let mut e = self.extents.remove(&at).expect("just found");
            let end = at + e.bytes.len() as u64;
            if e.lsn == NOT_YET {
                self.dirty_bytes -= (end.min(to) - at) as usize;
                self.dirty.remove(&at);
            }
            if end > to {
                e.bytes.drain(..(to - at) as usize);
                e.shrink();
                self.insert(to, e);
            }
        }
    }

    /// Sets the size; new bytes are zero.
    pub(crate) fn resize(&mut self, size: u64) {
        if size < self.size {
            self.clear(size, u64::MAX);
            self.blocks.split_off(&size.div_ceil(BLOCK));
            self.low = self.low.min(size);
            match self.cuts.last_mut() {
                Some(cut) if cut.lsn == NOT_YET => cut.at = cut.at.min(size),
                _ => self.cuts.push(Cut {
                    at: size,
                    lsn: NOT_YET,
                }),
            }
        }
        self.size = size;
    }

    /// The first range from `at` on that is here, in one extent.
    pub(crate) fn next(&self, at: u64) -> Option<Range<u64>> {
        let end = |a: u64, e: &Extent| a + e.bytes.len() as u64;
        let before = self.extents.range(..at).next_back();
        let reaches = before.map(|(a, e)| at..end(*a, e)).filter(|r| r.end > at);
        let behind = self.extents.range(at..).next();
        reaches.or_else(|| behind.map(|(a, e)| *a..end(*a, e)))
    }

    /// Reads up to `out.len()` bytes; fewer at the file's end. `base` reads the data file and
    /// says how many bytes that had.
    pub(crate) fn read<E>(
        &self,
        offset: u64,
        out: &mut [u8],
        mut base: impl FnMut(u64, &mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let end = self.size.min(offset.saturating_add(out.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        let mut at = offset;
        let first = self.extents.range(..offset).next_back();
        let first = first.filter(|(at, e)| *at + e.bytes.len() as u64 > offset);
        for (&begin, e) in first.into_iter().chain(self.extents.range(offset..end)) {
            if begin > at {
                let gap = &mut out[(at - offset) as usize..(begin - offset) as usize];
                self.fill(at, gap, &mut base)?;
                at = begin;
            }
            let from = (at - begin) as usize;
            let n = (e.bytes.len() - from).min((end - at) as usize);
            let to = (at - offset) as usize;
            out[to..to + n].copy_from_slice(&e.bytes[from..from + n]);
            at += n as u64;
        }
        if at < end {
            let gap = &mut out[(at - offset) as usize..(end - offset) as usize];
            self.fill(at, gap, &mut base)?;
        }
        Ok((end - offset) as usize)
    }

    /// What no extent has: the data file's bytes as far as they count, else zeros.
    fn fill<E>(
        &self,
        at: u64,
        out: &mut [u8],
        base: &mut impl FnMut(u64, &mut [u8]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let limit = self.cuts.iter().map(|c| c.at).min().unwrap_or(u64::MAX);
        let counts = limit.saturating_sub(at).min(out.len() as u64) as usize;
        let got = match counts {
            0 => 0,
            n => base(at, &mut out[..n])?,
        };
        out[got..].fill(0);
        Ok(())
    }

    /// Adds to `out` what is to be committed.
    pub(crate) fn changes<'a>(&'a self, file: u32, out: &mut Vec<Change<'a>>) {
        if self.low < self.begun_size {
            let size = self.low;
            out.push(Change::Resize { file, size });
        }
        if self.size != self.low.min(self.begun_size) {
            let size = self.size;
            out.push(Change::Resize { file, size });
        }
        out.extend(self.dirty.iter().map(|&offset| Change::Write {
            file,
            offset,
            bytes: &self.extents[&offset].bytes,
        }));
    }

    /// What [`Overlay::changes`] gave was begun.
    pub(crate) fn begun(&mut self, lsn: u64) {
        while let Some(at) = self.dirty.pop_first() {
            self.extents.get_mut(&at).expect("it is there").lsn = lsn;
            self.oldest = self.oldest.min(lsn);
        }
        if let Some(cut) = self.cuts.last_mut()
            && cut.lsn == NOT_YET
        {
            cut.lsn = lsn;
            self.oldest = self.oldest.min(lsn);
        }
        self.dirty_bytes = 0;
        self.blocks.clear();
        self.begun_size = self.size;
        self.low = self.size;
    }

    /// Everything up to `lsn` is in the data file.
    pub(crate) fn applied(&mut self, lsn: u64) {
        if self.oldest > lsn {
            return;
        }
        self.extents.retain(|_, e| e.lsn == NOT_YET || e.lsn > lsn);
        self.cuts.retain(|c| c.lsn == NOT_YET || c.lsn > lsn);
        let extents = self.extents.values().map(|e| e.lsn);
        let begun = extents.chain(self.cuts.iter().map(|c| c.lsn));
        let begun = begun.filter(|l| *l != NOT_YET);
        self.oldest = begun.min().unwrap_or(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, Vec<u8>),
        Resize(u64),
        Begin,
        /// All, or all but the last, of what was begun is applied.
        Apply(bool),
        /// The data file has what was begun, and nobody has noticed yet.
        Early,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..200u64, prop::collection::vec(1..255u8, 1..60))
                .prop_map(|(at, b)| Step::Write(at, b)),
            2 => (0..250u64).prop_map(Step::Resize),
            2 => Just(Step::Begin),
            1 => any::<bool>().prop_map(Step::Apply),
            1 => Just(Step::Early),
        ];
        prop::collection::vec(step, 1..60)
    }

    /// What the engine does with a change.
    fn apply(disk: &mut Vec<u8>, change: &Owned) {
        match change {
            Owned::Resize(size) => disk.resize(*size as usize, 0),
            Owned::Write(at, bytes) => {
                let at = *at as usize;
                disk[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    enum Owned {
        Resize(u64),
        Write(u64, Vec<u8>),
    }

    /// Each write into the midst of an extent that was begun left the memory of the whole extent at its
    /// head: of 40,000 files that were removed from a mount its process had 5 GiB.
    #[test]
    fn what_is_cut_to_pieces_takes_no_more_memory() {
        const CELL: usize = 96;
        const CELLS: usize = 4000;
        let mut o = Overlay::new(0);
        let cell = |n: usize| (n * CELL) as u64;
        (0..CELLS).for_each(|n| o.write(cell(n), &[1; CELL]));
        o.begun(1);
        let kept = |o: &Overlay| {
            o.extents
                .values()
                .map(|e| e.bytes.capacity())
                .sum::<usize>()
        };
        for n in 0..CELLS {
            o.write(cell(n), &[2; CELL - 1]);
            if n % 2 == 0 {
                o.begun(2);
            }
        }
        let (kept, has) = (kept(&o), CELLS * CELL);
        assert!(kept < 3 * has, "{kept} bytes for {has}");
        o.resize(cell(1));
        assert_eq!(o.size(), CELL as u64);
    }

    /// Each block of a write was looked up by itself, which for 1 MiB took 256 searches.
    #[test]
    fn blocks_count_once_until_they_are_begun() {
        let mut o = Overlay::new(0);
        let of = |blocks: Range<u64>| blocks.start * BLOCK..blocks.end * BLOCK;
        o.write(0, &[1; 8 * BLOCK as usize]);
        o.take_blocks(&of(2..4));
        o.take_blocks(&of(6..7));
        assert_eq!(o.new_blocks(&of(0..8)), 5);
        assert_eq!((o.new_blocks(&of(2..4)), o.new_blocks(&of(4..6))), (0, 2));
        // Parts of blocks are blocks.
        assert_eq!(o.new_blocks(&(2 * BLOCK - 1..4 * BLOCK + 1)), 2);
        assert_eq!(o.new_blocks(&(3 * BLOCK..3 * BLOCK + 1)), 0);
        o.begun(1);
        assert_eq!(o.new_blocks(&of(0..8)), 8);
    }

    proptest! {
        /// Beside a plain array: each read gives the same bytes, whatever part of what was
        /// begun is applied, and committing gives the same file.
        #[test]
        fn reads_and_commits_are_those_of_a_plain_file(steps in steps(), start in 0..100u64) {
            let mut disk = vec![7u8; start as usize];
            let mut model = disk.clone();
            let mut o = Overlay::new(start);
            // What was begun and is not known to be applied; whether the disk has it.
            let mut queue: Vec<(u64, Vec<Owned>, bool)> = Vec::new();
            let mut lsn = 0;
            for s in steps {
                match s {
                    Step::Write(at, b) => {
                        let end = at as usize + b.len();
                        if model.len() < end {
                            model.resize(end, 0);
                        }
                        model[at as usize..end].copy_from_slice(&b);
                        o.write(at, &b);
                    }
                    Step::Resize(n) => {
                        model.resize(n as usize, 0);
                        o.resize(n);
                    }
                    Step::Begin => {
                        let mut out = Vec::new();
                        o.changes(1, &mut out);
                        prop_assert_eq!(out.is_empty(), !o.is_dirty());
                        let owned = out.iter().map(|c| match c {
                            Change::Resize { size, .. } => Owned::Resize(*size),
                            Change::Write { offset, bytes, .. } => Owned::Write(*offset, bytes.to_vec()),
                            _ => unreachable!(),
                        });
                        lsn += 1;
                        queue.push((lsn, owned.collect(), false));
                        o.begun(lsn);
                        prop_assert!(!o.is_dirty());
                        prop_assert_eq!((o.dirty_bytes, o.dirty.len()), (0, 0));
                    }
                    Step::Apply(all) => {
                        let keep = queue.len().min(!all as usize);
                        let n = queue.len() - keep;
                        for (l, changes, done) in queue.drain(..n) {
                            if !done {
                                changes.iter().for_each(|c| apply(&mut disk, c));
                            }
                            o.applied(l);
                        }
                    }
                    Step::Early => {
                        for (_, changes, done) in queue.iter_mut().filter(|q| !q.2) {
                            changes.iter().for_each(|c| apply(&mut disk, c));
                            *done = true;
                        }
                    }
                }
                let mut got = vec![0xaa; 400];
                let n = o.read(0, &mut got, |at, out| {
                    let from = (at as usize).min(disk.len());
                    let n = out.len().min(disk.len() - from);
                    out[..n].copy_from_slice(&disk[from..from + n]);
                    Ok::<_, ()>(n)
                }).unwrap();
                prop_assert_eq!(&got[..n], &model[..]);
                for at in 0..400u64 {
                    let here = o.extents.iter().map(|(a, e)| *a..*a + e.bytes.len() as u64);
                    let want = here.filter(|r| r.end > at).map(|r| r.start.max(at)..r.end).next();
                    prop_assert_eq!(o.next(at), want);
                }
                let dirty = o.extents.iter().filter(|(_, e)| e.lsn == NOT_YET);
                prop_assert_eq!(o.dirty_bytes, dirty.clone().map(|(_, e)| e.bytes.len()).sum::<usize>());
                prop_assert!(o.dirty.iter().eq(dirty.map(|(at, _)| at)));
            }
        }
    }
}
