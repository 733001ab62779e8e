//! The limit of a local log: one aligned, durable write into a file whose blocks are written.
//!
//! The file is written over once and synced when it is created, because a write into an unwritten
//! extent costs half as much again. Then it is opened with `O_DIRECT|O_DSYNC` and used in a circle,
//! so that no commit changes metadata of the file system. It is to be run with a
//! [`RawTcp`](super::RawTcp) alive beside it, for Mojim's log never runs without its mirror.
//!
//! Threads share it through [`Combining`](super::Combining): all records that wait, or the first
//! 32, go into one aligned block, which is one write. [`RawLogs`] writes each block to two logs at
//! once, as a primary and a mirror do that keep their logs on one disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use super::combining::{Carrier, RECORD, Record};
use super::mapping::Mapping;
use super::rules::{MAX_BYTES, check_length};

/// What the file is filled with: not zeros, which a file system or a disk may treat apart.
const PATTERN: u8 = 0xa5;
/// What threads that share the log write at once.
const BLOCK: usize = 4096;

/// A preallocated, overwritten, circular log that is written past the page cache.
#[derive(Debug)]
pub struct RawLog {
    file: File,
    buffer: Mapping,
    alignment: usize,
    direct: bool,
    capacity: u64,
    position: u64,
    staged: usize,
}

impl RawLog {
    /// Creates the log `dir/raw.log` of `capacity` bytes, rounded up to at least two of the largest
    /// records.
    pub fn create(dir: &Path, capacity: u64) -> io::Result<Self> {
        Self::create_at(&dir.join("raw.log"), capacity)
    }

    fn create_at(path: &Path, capacity: u64) -> io::Result<Self> {
        let piece = vec![PATTERN; MAX_BYTES];
        let pieces = capacity.div_ceil(MAX_BYTES as u64).max(2);
        let capacity = pieces * MAX_BYTES as u64;
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, capacity).or_else(
            |e| {
                if e == rustix::io::Errno::OPNOTSUPP {
                    Ok(())
                } else {
                    Err(e)
                }
            },
        )?;
        for _ in 0..pieces {
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        drop(file);
        let open = |flags| {
            OpenOptions::new()
                .write(true)
                .custom_flags(flags)
                .open(path)
        };
        let (file, direct) = match open(libc::O_DIRECT | libc::O_DSYNC) {
            Ok(file) => (file, true),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => (open(libc::O_DSYNC)?, false),
            Err(e) => return Err(e),
        };
        let mut buffer = Mapping::anonymous(MAX_BYTES)?;
        buffer.as_mut_slice().fill(PATTERN);
        let alignment = smallest_write(&file, buffer.as_mut_slice())?;
        Ok(Self {
            file,
            buffer,
            alignment,
            direct,
            capacity,
            position: 0,
            staged: 0,
        })
    }

    /// Writes `bytes` as the next record, rounded up to the alignment; the time of the write. The
    /// copy into the aligned buffer is not in it: a log that is a limit has its record there.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<Duration> {
        self.stage(bytes)?;
        let start = Instant::now();
        self.write_staged()?;
        Ok(start.elapsed())
    }

    /// Copies `bytes` into the aligned buffer.
    pub fn stage(&mut self, bytes: &[u8]) -> io::Result<()> {
        check_length(bytes.len())?;
        self.buffer.put(0, bytes);
        self.staged = bytes.len().max(1).next_multiple_of(self.alignment);
        Ok(())
    }

    /// Writes what was staged; durable on return.
    pub fn write_staged(&mut self) -> io::Result<()> {
        if self.position + self.staged as u64 > self.capacity {
            self.position = 0;
        }
        self.file
            .write_all_at(&self.buffer.as_mut_slice()[..self.staged], self.position)?;
        self.position += self.staged as u64;
        Ok(())
    }

    /// The unit in bytes to which a record is rounded up.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Whether the page cache is bypassed (not every file system can).
    pub fn is_direct(&self) -> bool {
        self.direct
    }
}

impl Carrier for RawLog {
    const MOST: usize = BLOCK / RECORD;

    fn stage(&mut self, at: usize, record: &Record) {
        self.buffer.put(at * RECORD, record);
    }

    /// Writes the block, whose rest is what it was.
    fn carry(&mut self, _: usize, _: &dyn Fn() -> bool) -> io::Result<()> {
        self.staged = BLOCK.next_multiple_of(self.alignment);
        self.write_staged()
    }
}

/// Two logs on one disk, both of which have each block when it is carried.
pub struct RawLogs {
    own: RawLog,
    /// To the thread that writes the other one, and what it says of each write.
    blocks: SyncSender<Vec<u8>>,
    written: Receiver<io::Result<Vec<u8>>>,
    /// The block as the other log gets it.
    block: Vec<u8>,
}

impl RawLogs {
    /// Creates the logs `dir/own.log` and `dir/other.log`, each as [`RawLog::create`].
    pub fn create(dir: &Path, capacity: u64) -> io::Result<Self> {
        let own = RawLog::create_at(&dir.join("own.log"), capacity)?;
        let mut other = RawLog::create_at(&dir.join("other.log"), capacity)?;
        let (blocks, next) = sync_channel::<Vec<u8>>(1);
        let (say, written) = sync_channel(1);
        // It ends when the logs are dropped.
        std::thread::Builder::new().spawn(move || {
            while let Ok(block) = next.recv() {
                let done = other.append(&block).map(|_| block);
                if say.send(done).is_err() {
                    return;
                }
            }
        })?;
        Ok(RawLogs {
            own,
            blocks,
            written,
            block: vec![PATTERN; BLOCK],
        })
    }
}

impl Carrier for RawLogs {
    const MOST: usize = RawLog::MOST;

    fn stage(&mut self, at: usize, record: &Record) {
        Carrier::stage(&mut self.own, at, record);
        self.block[at * RECORD..(at + 1) * RECORD].copy_from_slice(record);
    }

    fn carry(&mut self, n: usize, crowded: &dyn Fn() -> bool) -> io::Result<()> {
        let gone = || io::Error::other("the other log's thread ended");
        let block = std::mem::take(&mut self.block);
        self.blocks.send(block).map_err(|_| gone())?;
        let own = self.own.carry(n, crowded);
        self.block = self.written.recv().map_err(|_| gone())??;
        own
    }
}

/// The smallest power of two from 512 bytes to 64 KiB that `file` takes as a write's length.
///
/// Trying it is the one question to which every file system and kernel answers; the written bytes
/// are the pattern that is there already.
fn smallest_write(file: &File, pattern: &[u8]) -> io::Result<usize> {
    let mut size = 512;
    loop {
        // At an odd multiple, so that the offset is tried too.
        match file.write_all_at(&pattern[..size], size as u64) {
            Ok(()) => return Ok(size),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && size < 64 << 10 => size *= 2,
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::combining::tests::sixteen;
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn writes_in_a_circle() {
        let dir = Scratch::new().unwrap();
        let mut log = RawLog::create(dir.path(), 1).unwrap();
        let size = 2 * MAX_BYTES as u64;
        let path = dir.path().join("raw.log");
        assert_eq!(path.metadata().unwrap().len(), size);
        log.append(b"first").unwrap();
        log.append(&[7; 5000]).unwrap();
        let unit = log.alignment();
        let content = std::fs::read(&path).unwrap();
        assert_eq!(&content[..5], b"first");
        assert_eq!(content[unit..unit + 5000], [7; 5000]);
        for _ in 0..3 {
            log.append(&vec![1; MAX_BYTES]).unwrap();
        }
        assert_eq!(path.metadata().unwrap().len(), size);
        assert!(log.append(&vec![0; MAX_BYTES + 1]).is_err());
    }

    #[test]
    fn both_logs_have_every_block() {
        let dir = Scratch::new().unwrap();
        let logs = sixteen(RawLogs::create(dir.path(), 1).unwrap(), 20);
        let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        let end = logs.own.position as usize;
        assert!(end >= 20 * BLOCK);
        assert!(read("own.log")[..end] == read("other.log")[..end]);
    }

    #[test]
    fn threads_share_blocks() {
        let dir = Scratch::new().unwrap();
        let log = RawLog::create(dir.path(), 1).unwrap();
        let log = sixteen(log, 20);
        // From none shared to all of every thread's.
        let blocks = log.position / BLOCK as u64;
        assert!((20..=16 * 20).contains(&blocks), "{blocks}");
        let content = std::fs::read(dir.path().join("raw.log")).unwrap();
        let mut found = [false; 16];
        for record in content[..log.position as usize].chunks(RECORD) {
            if record[0] != PATTERN {
                assert!(record.iter().all(|b| *b == record[0]));
                found[usize::from(record[0])] = true;
            }
        }
        assert_eq!(found, [true; 16]);
    }
}
