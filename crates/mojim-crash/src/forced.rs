//! A durable file on a disk that has writes with forced unit access.
//!
//! The kernel writes such a file by them where the file system has nothing to commit for it: where the bytes were
//! written before. Here it is written without `O_DSYNC` there, and the device is told which writes those were.
//!
//! Invariant: a write returns when its bytes are durable, and has had nothing else flushed.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use mojim_env::File;

use crate::device::Forced;

const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
/// The place of the bytes is not known, or they read as zeros until they are written.
const NOT_WRITTEN: u32 = 0x2 | 0x4 | 0x800;
const EXTENTS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    len: u64,
    _reserved: [u64; 2],
    flags: u32,
    _more: [u32; 3],
}

#[repr(C)]
struct Fiemap {
    start: u64,
    len: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    _reserved: u32,
    extents: [Extent; EXTENTS],
}

struct Durable {
    inner: Arc<dyn File>,
    direct: std::fs::File,
    device: Forced,
}

/// The file `inner`, which was opened to be durable.
pub fn over(inner: Arc<dyn File>, path: &Path, device: Forced) -> io::Result<Arc<dyn File>> {
    let mut how = OpenOptions::new();
    let direct = how.write(true).custom_flags(libc::O_DIRECT).open(path)?;
    Ok(Arc::new(Durable {
        inner,
        direct,
        device,
    }))
}

impl Durable {
    /// Where on the device bytes of the file are; `None` if some were never written.
    fn places(&self, at: u64, len: u64) -> io::Result<Option<Vec<Range<u64>>>> {
        let mut map = Fiemap {
            start: at,
            len,
            flags: 0,
            mapped: 0,
            count: EXTENTS as u32,
            _reserved: 0,
            extents: [Extent::default(); EXTENTS],
        };
        // SAFETY: the call fills at most `count` extents.
        if unsafe { libc::ioctl(self.direct.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let (mut all, mut next, end) = (Vec::new(), at, at + len);
        for e in &map.extents[..map.mapped as usize] {
            if e.flags & NOT_WRITTEN != 0 || e.logical > next {
                return Ok(None);
            }
            let to = (e.logical + e.len).min(end);
            let from = e.physical + (next - e.logical);
            all.push(from..from + (to - next));
            next = to;
        }
        Ok((next == end).then_some(all))
    }
}

impl File for Durable {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let len = buf.len() as u64;
        let places = match len {
            0 => None,
            _ => self.places(offset, len)?,
        };
        let Some(places) = places else {
            return self.inner.write_at(buf, offset);
        };
        self.direct.write_all_at(buf, offset)?;
        let mut places = places.into_iter();
        places.try_for_each(|p| self.device.mark(p.start, p.end - p.start))
    }
    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
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
