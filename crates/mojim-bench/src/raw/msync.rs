//! The rival: a mapped file and `msync(MS_SYNC)` of the pages that were written.
//!
//! It has two speeds:
//!
//! - Where the page cache holds large folios, `msync` of one page costs 100 µs and more. It holds
//!   them where the file was written in large pieces.
//! - Where it holds single pages, `msync` of one page costs 18 to 28 µs.
//!
//! Which one a program gets depends on how its file was written, so both are measured.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use mojim_env::rng::Rng;
use rustix::mm::{MsyncFlags, msync};

use super::mapping::Mapping;
use super::rules::{MAX_BYTES, check_length};

/// The size of the mapped file in bytes.
pub const SIZE: usize = 64 << 20;

/// How the file came into the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Folios {
    /// Written with `write(2)` in pieces of 1 MiB.
    Large,
    /// A sparse file whose pages were touched through a mapping without readahead
    /// (`MADV_RANDOM`; with it the kernel makes larger folios here too).
    Small,
}

impl Folios {
    /// The name in reports: `large-folios` or `small-folios`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Large => "large-folios",
            Self::Small => "small-folios",
        }
    }
}

/// A mapped file of 64 MiB that is synced with plain `msync`.
#[derive(Debug)]
pub struct PlainMsync {
    map: Mapping,
    page: usize,
    random: Rng,
    dirty: (usize, usize),
}

impl PlainMsync {
    /// Creates, fills and maps the file `dir/msync-<folios>`.
    pub fn create(dir: &Path, folios: Folios) -> io::Result<Self> {
        let path = dir.join(format!("msync-{}", folios.name()));
        let mut file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        let page = rustix::param::page_size();
        let map = match folios {
            Folios::Large => {
                let piece = vec![0xa5; 1 << 20];
                for _ in 0..SIZE / piece.len() {
                    file.write_all(&piece)?;
                }
                file.sync_all()?;
                Mapping::shared(&file, SIZE)?
            }
            Folios::Small => {
                file.set_len(SIZE as u64)?;
                let mut map = Mapping::shared(&file, SIZE)?;
                map.no_readahead()?;
                for offset in (0..SIZE).step_by(page) {
                    map.put(offset, &[0xa5]);
                }
                file.sync_all()?;
                map
            }
        };
        Ok(Self {
            map,
            page,
            random: Rng::new(1),
            dirty: (0, 0),
        })
    }

    /// Stores `bytes` at a random page and syncs the pages; the time of the `msync` alone.
    pub fn sync(&mut self, bytes: &[u8]) -> io::Result<Duration> {
        self.dirty(bytes)?;
        let start = Instant::now();
        self.msync()?;
        Ok(start.elapsed())
    }

    /// Stores `bytes` at the beginning of a random page. The first store to a clean page costs a
    /// fault, which is the application's time, not the sync's.
    pub fn dirty(&mut self, bytes: &[u8]) -> io::Result<()> {
        check_length(bytes.len())?;
        let random = self.random.next();
        let pages = (SIZE - MAX_BYTES) / self.page;
        let offset = (random % pages as u64) as usize * self.page;
        self.map.put(offset, bytes);
        self.dirty = (offset, bytes.len().max(1));
        Ok(())
    }

    /// Where the file is mapped: [`SIZE`] bytes.
    pub fn base(&self) -> *mut u8 {
        self.map.at(0)
    }

    /// Syncs all of the file.
    pub fn msync_all(&mut self) -> io::Result<()> {
        // SAFETY: the whole mapping; msync changes no memory.
        unsafe { msync(self.map.at(0).cast(), SIZE, MsyncFlags::SYNC)? }
        Ok(())
    }

    /// Syncs the pages that the last [`dirty`](Self::dirty) wrote.
    pub fn msync(&mut self) -> io::Result<()> {
        let (offset, len) = self.dirty;
        let len = len.next_multiple_of(self.page);
        // SAFETY: the range begins at a page and is within the mapping: `dirty` keeps MAX_BYTES
        // of room behind its offset, and msync changes no memory.
        unsafe { msync(self.map.at(offset).cast(), len, MsyncFlags::SYNC)? }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn both_variants_sync() {
        let dir = Scratch::new().unwrap();
        for folios in [Folios::Large, Folios::Small] {
            let mut file = PlainMsync::create(dir.path(), folios).unwrap();
            file.msync().unwrap();
            file.sync(b"x").unwrap();
            file.sync(&[1; 10_000]).unwrap();
            let (offset, _) = file.dirty;
            let path = dir.path().join(format!("msync-{}", folios.name()));
            let content = std::fs::read(path).unwrap();
            assert_eq!(content[offset..offset + 10_000], [1; 10_000]);
            assert!(file.sync(&vec![0; MAX_BYTES + 1]).is_err());
        }
    }
}
