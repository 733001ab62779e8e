//! The machine on which the engine is told that it runs: this machine, in this or another
//! boot, with a disk that is correct or has one fault.
//!
//! Owns the mutations of these rungs. Each is below the engine, which is the shipped one:
//! what reaches the disk is what an engine without that flush, or with that order, would
//! have written.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mojim_env::{Env, File, Memory, OpenHow};
use mojim_format::{OpKind, RecordView, Superblock};
use mojim_linux::Os;

use crate::cache::Cache;
use crate::device::Forced;
use crate::forced;

/// A fault of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Log writes are not flushed; for persistent memory, no store is.
    NoLogFlush,
    /// Data files are not synced before the log is released.
    NoDataFlush,
    /// The superblock is not synced.
    NoSuperblockFlush,
    /// A record's bytes are in the data file, synced, before the record is in the log.
    DataFirst,
    /// A log write is reported done, but made only when the next one comes.
    AckEarly,
    /// The superblock is written and synced some milliseconds after its sync has
    /// returned, while the log space that it releases is used again.
    SuperblockLate,
    /// The superblock does not tell that the ring was lost.
    ForgetRing,
}

impl Fault {
    /// All faults, with the names by which a process is given one.
    const NAMED: [(Fault, &'static str); 7] = [
        (Fault::NoLogFlush, "no-log-flush"),
        (Fault::NoDataFlush, "no-data-flush"),
        (Fault::NoSuperblockFlush, "no-superblock-flush"),
        (Fault::DataFirst, "data-first"),
        (Fault::AckEarly, "ack-early"),
        (Fault::SuperblockLate, "superblock-late"),
        (Fault::ForgetRing, "forget-ring"),
    ];

    /// The fault's name.
    pub fn name(self) -> &'static str {
        let found = Fault::NAMED.into_iter().find(|(f, _)| *f == self);
        found.expect("all are there").1
    }

    /// The fault of this name.
    pub fn of(name: &str) -> Result<Fault, String> {
        let found = Fault::NAMED.into_iter().find(|(_, n)| *n == name);
        found.map(|(f, _)| f).ok_or_else(|| {
            let all = Fault::NAMED.map(|(_, n)| n);
            format!("one of {}", all.join(", "))
        })
    }
}

/// The delay of a late superblock.
const LATE: Duration = Duration::from_millis(20);

/// The machine of one process. `data` is the file of the one region.
pub struct Machine {
    /// The real operating system below.
    pub os: Os,
    /// Which boot of the machine: 0 is the present one; another number stands for a boot
    /// after a loss of power.
    pub boot: u8,
    /// Its fault, if it has one.
    pub fault: Option<Fault>,
    /// The data file, for [`Fault::DataFirst`].
    pub data: PathBuf,
    /// For [`Fault::DataFirst`]: the last LSN of which something was written to the data
    /// file.
    pub newest: Arc<Mutex<u64>>,
    /// The device, if it is written to by forced writes where a file is durable.
    pub forced: Option<Forced>,
}

impl Env for Machine {
    fn boot_id(&self) -> [u8; 16] {
        self.os.boot_id().map(|b| b ^ self.boot)
    }
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        let is_data = path.parent() == self.data.parent();
        let is_superblock = path.file_name().is_some_and(|n| n == "superblock");
        let hit = match self.fault {
            Some(Fault::NoLogFlush | Fault::DataFirst | Fault::AckEarly) => how.durable,
            Some(Fault::NoDataFlush) => is_data,
            Some(Fault::NoSuperblockFlush | Fault::SuperblockLate | Fault::ForgetRing) => {
                is_superblock
            }
            None => false,
        };
        let Some(fault) = self.fault.filter(|_| hit) else {
            let file = self.os.open(path, how)?;
            return match self.forced.clone().filter(|_| how.durable) {
                Some(device) => forced::over(file, path, device),
                None => Ok(file),
            };
        };
        let plain = OpenHow {
            durable: false,
            ..how
        };
        Ok(Arc::new(Broken {
            inner: self.os.open(path, plain)?,
            fault,
            os: self.os.clone(),
            data: self.data.clone(),
            newest: self.newest.clone(),
            late: Mutex::new(None),
            waiting: Mutex::default(),
        }))
    }
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        let real = self.os.persistent_memory(path, len)?;
        match self.fault {
            Some(Fault::NoLogFlush | Fault::DataFirst | Fault::AckEarly) => {
                Cache::before(&self.os, real)
            }
            _ => Ok(real),
        }
    }
    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        let Some(cache) = Cache::of(memory) else {
            return self.os.flush(memory, offset, len);
        };
        let range = offset..offset + len;
        match self.fault {
            Some(Fault::AckEarly) => cache.write_late(range),
            Some(Fault::DataFirst) => {
                // As an engine goes on whose data file fails: with its log.
                let _ = write_data(
                    &self.os,
                    &self.data,
                    &self.newest,
                    cache.bytes(range.clone()),
                );
                cache.write(range);
            }
            _ => {}
        }
    }

    mojim_env::forward_env!(
        os,
        now,
        random,
        sector,
        create_dir_all,
        remove_empty_dirs,
        max_file_size,
        longest_names,
        file_size_limit,
        most_open,
        remove,
        rename,
        sync_dir,
        list,
        lock,
        locker,
        memory,
        populate,
        remove_memory,
        anonymous_memory,
        connect
    );
}

/// Writes and syncs what the records in `buf` write to the data file, except what is
/// older than `newest`. The engine's threads may write the same records to the log twice,
/// at once and later. In the log this changes nothing, but in the data file it would
/// overwrite newer data, and lose it without any crash
/// (`what_is_not_crashed_is_all_there`, on a busy machine).
fn write_data(os: &Os, path: &Path, newest: &Mutex<u64>, buf: &[u8]) -> io::Result<()> {
    /// Records begin at multiples of this in memory, and at multiples of 512 on a disk.
    const ALIGN: usize = 64;
    let how = OpenHow {
        write: true,
        ..OpenHow::default()
    };
    let mut at = 0;
    let mut newest = newest.lock().expect("no thread panics");
    while at < buf.len() {
        let Ok(r) = RecordView::decode(&buf[at..]) else {
            at += ALIGN;
            continue;
        };
        let is_newest = r.header.lsn >= *newest;
        let writes = r.ops().filter(|(op, _)| op.kind == OpKind::Write);
        for (op, payload) in writes.filter(|_| is_newest) {
            let data = os.open(path, how)?;
            data.write_at(payload, op.offset)?;
            data.sync()?;
        }
        *newest = r.header.lsn.max(*newest);
        at += r.bytes().len().next_multiple_of(ALIGN);
    }
    Ok(())
}

/// A file on which the fault shows. It is not opened for durable writes;
/// [`Broken::write_durably`] makes a write durable where this is wanted.
struct Broken {
    inner: Arc<dyn File>,
    fault: Fault,
    os: Os,
    data: PathBuf,
    newest: Arc<Mutex<u64>>,
    /// The write that was reported done and is not made yet.
    late: Mutex<Option<(Vec<u8>, u64)>>,
    /// Writes that are made too late, after the next sync.
    waiting: Mutex<Vec<(Vec<u8>, u64)>>,
}

impl Broken {
    fn write_durably(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_at(buf, offset)?;
        self.inner.sync()
    }

    fn make_late(&self) -> io::Result<()> {
        let late = self.late.lock().expect("no thread panics").take();
        match late {
            Some((bytes, at)) => self.write_durably(&bytes, at),
            None => Ok(()),
        }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        // The engine was told long ago that it is durable.
        let _ = self.make_late();
    }
}

impl File for Broken {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.make_late()?;
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        match self.fault {
            Fault::NoLogFlush | Fault::NoDataFlush | Fault::NoSuperblockFlush => {
                self.inner.write_at(buf, offset)
            }
            Fault::DataFirst => {
                match write_data(&self.os, &self.data, &self.newest, buf) {
                    // On a mirror the file may not exist before the mirror applies the
                    // record that creates it.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    done => done?,
                }
                self.write_durably(buf, offset)
            }
            Fault::SuperblockLate => {
                // None of it may be in the page cache before its time either.
                let mut waiting = self.waiting.lock().expect("no thread panics");
                waiting.push((buf.to_vec(), offset));
                Ok(())
            }
            Fault::ForgetRing => match Superblock::decode(buf) {
                Ok(mut sb) => {
                    (sb.ring_lost, sb.renewed) = (false, false);
                    self.inner.write_at(&sb.encode()[..], offset)
                }
                Err(_) => self.inner.write_at(buf, offset),
            },
            Fault::AckEarly => {
                self.make_late()?;
                *self.late.lock().expect("no thread panics") = Some((buf.to_vec(), offset));
                Ok(())
            }
        }
    }
    fn sync(&self) -> io::Result<()> {
        match self.fault {
            Fault::NoDataFlush | Fault::NoSuperblockFlush => Ok(()),
            Fault::SuperblockLate => {
                let mut waiting = self.waiting.lock().expect("no thread panics");
                let (writes, inner) = (std::mem::take(&mut *waiting), self.inner.clone());
                drop(waiting);
                std::thread::spawn(move || {
                    std::thread::sleep(LATE);
                    for (bytes, at) in writes {
                        // The engine was told long ago that it is durable.
                        let _ = inner.write_at(&bytes, at);
                    }
                    let _ = inner.sync();
                });
                Ok(())
            }
            _ => self.inner.sync(),
        }
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn allocate(&self, len: u64) -> io::Result<()> {
        self.inner.allocate(len)
    }
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.inner.next_data(offset)
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
}
