//! A heap's file in plain memory, which keeps what was committed.
//!
//! Also holds what models of a heap share.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use mojim_env::Result;
use mojim_env::rng::Rng;
use mojim_heap::{Heap, HeapOptions, Space, Span, check};

/// What survives a crash: a file; and how many commits there were.
#[derive(Clone, Default)]
pub struct Disk(pub Arc<Mutex<Vec<u8>>>, pub Arc<AtomicU64>);

/// A heap's file in plain memory. `base`: where the heap lies.
pub struct Memory {
    pub disk: Disk,
    pub base: usize,
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
        self.disk.1.fetch_add(1, Relaxed);
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

pub struct Random(pub Rng);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    pub fn size(&mut self) -> usize {
        match self.below(20) {
            0 => 20_000 + self.below(200_000) as usize,
            1..=3 => self.below(9000) as usize,
            _ => self.below(300) as usize,
        }
    }
}

/// Blocks by address: their bytes, and what fills them.
pub type Blocks = BTreeMap<usize, (usize, u8)>;

pub fn overlaps(all: &Blocks, at: usize, len: usize) -> bool {
    let before = all.range(..at + len).next_back();
    before.is_some_and(|(a, (l, _))| a + l.max(&1) > at)
}

pub fn fill(at: usize, len: usize, with: u8) {
    // SAFETY: a block of the heap.
    unsafe { std::ptr::write_bytes(at as *mut u8, with, len) };
}

/// Where the `n`th heap of a test lies. `HEAPS_AT`, in hexadecimal, for the thread sanitizer, which refuses
/// most addresses.
pub fn address(n: usize) -> usize {
    let base = match std::env::var("HEAPS_AT") {
        Ok(text) => usize::from_str_radix(&text, 16).unwrap(),
        Err(_) => 0x2100_0000_0000,
    };
    base + (n << 32)
}

pub fn open(disk: &Disk, base: usize) -> Heap {
    try_open(disk, base).unwrap()
}

pub fn try_open(disk: &Disk, base: usize) -> Result<Heap> {
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
    Heap::open_over(
        Box::new(space),
        &format!("at-{base:x}"),
        (head, size),
        &options,
    )
}

/// The file, as a crash now would leave it, has these blocks and no others, with what fills them.
pub fn check_file(bytes: &[u8], base: usize, committed: &Blocks) {
    let report = check(bytes).unwrap();
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(
        report.used_blocks(),
        committed.len() as u64,
        "leaked or lost"
    );
    for (at, (len, with)) in committed {
        let bytes = &bytes[at - base..][..*len];
        assert!(bytes.iter().all(|b| b == with), "block at {at:#x}");
    }
}
