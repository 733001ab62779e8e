//! Many pages of a file, read in one system call.
//!
//! Owns a mapping of the file that no thread accesses itself. The kernel copies from it
//! (`process_vm_readv`, of this process). So a file that was cut, or a medium that fails, is an
//! error and not SIGBUS.
//!
//! Pages that the call does not give are read one by one. So are all pages if the system does not
//! have or allow the call or the mapping.

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, OnceLock};

use rustix::mm::{MapFlags, ProtFlags};

use mojim_env::{Context, File, Result};

/// Most pages that are read at once.
pub const MOST_PAGES: usize = 32;

struct Map {
    base: *mut c_void,
    len: usize,
}

// SAFETY: an address that only the kernel reads at.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(file: &dyn File, offset: u64, len: usize) -> Option<Map> {
        let fd = file.fd()?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let at = std::ptr::null_mut();
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(at, len, ProtFlags::READ, flags, fd.as_fd(), offset) }
            .ok()?;
        // No read-ahead. If this fails, reading is only slower.
        // SAFETY: our own mapping, all of it.
        let _ = unsafe { rustix::mm::madvise(base, len, rustix::mm::Advice::Random) };
        Some(Map { base, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len) };
    }
}

/// A part of a file that begins with a page.
pub struct FilePages {
    file: Arc<dyn File>,
    offset: u64,
    pages: usize,
    page: usize,
    map: OnceLock<Option<Map>>,
    /// The system does not allow `process_vm_readv`.
    refused: AtomicBool,
}

impl FilePages {
    /// For `pages` pages from `offset` on.
    pub fn new(file: Arc<dyn File>, offset: u64, pages: usize) -> FilePages {
        FilePages {
            file,
            offset,
            pages,
            page: rustix::param::page_size(),
            map: OnceLock::new(),
            refused: AtomicBool::new(false),
        }
    }

    /// The length of the file.
    pub fn file_len(&self) -> Result<u64> {
        self.file.len().context(what)
    }

    /// Reads some pages, one after the other, into `bytes`; zeros beyond the
    /// file's end.
    pub fn read(&self, pages: &[usize], bytes: &mut [u8]) -> Result<()> {
        assert_eq!(bytes.len(), pages.len() * self.page);
        // A call for one page costs less without the kernel's search for it.
        let done = if pages.len() > 1 {
            self.copy(pages, bytes)
        } else {
            0
        };
        let mut rest = bytes.chunks_mut(self.page).zip(pages).skip(done);
        rest.try_for_each(|(bytes, page)| self.read_on(*page, bytes))
    }

    /// Reads the bytes from the start of a page on; zeros beyond the file's end.
    pub fn read_on(&self, page: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.offset + (page * self.page) as u64;
        let got = self.file.read_at(bytes, at).context(what)?;
        bytes[got..].fill(0);
        Ok(())
    }

    /// Reads the pages as far as the kernel copies them, and returns how many it
    /// did.
    fn copy(&self, pages: &[usize], bytes: &mut [u8]) -> usize {
        if self.refused.load(Relaxed) {
            return 0;
        }
        let len = self.pages * self.page;
        let map = || Map::new(&*self.file, self.offset, len);
        let Some(map) = self.map.get_or_init(map) else {
            return 0;
        };
        let mut done = 0;
        for (pages, bytes) in pages
            .chunks(MOST_PAGES)
            .zip(bytes.chunks_mut(MOST_PAGES * self.page))
        {
            let mut from = [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: self.page,
            }; MOST_PAGES];
            for (v, page) in from.iter_mut().zip(pages) {
                assert!(*page < self.pages);
                v.iov_base = map.base.wrapping_byte_add(page * self.page);
            }
            let to = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            // SAFETY: `to` is all of `bytes`. The kernel checks the addresses in
            // `from`: this process's mapping, where it may find no page.
            let got = unsafe {
                let pid = std::process::id() as libc::pid_t;
                libc::process_vm_readv(pid, &to, 1, from.as_ptr(), pages.len() as u64, 0)
            };
            // If a page cannot be read, `read_on` tells why.
            let Ok(got) = usize::try_from(got) else {
                if std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT) {
                    self.refused.store(true, Relaxed);
                }
                return done;
            };
            done += got / self.page;
            if got < bytes.len() {
                return done;
            }
        }
        done
    }
}

fn what() -> String {
    "reading what is committed".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_env::{Env, OpenHow};

    /// Pages are read in any order, also of a file that was cut meanwhile.
    #[test]
    fn what_was_cut_off_is_zeros_and_not_the_end() {
        let page = rustix::param::page_size();
        let path = std::env::temp_dir().join(format!("mojim-peek-{}", std::process::id()));
        let content: Vec<u8> = (0..100 * page).map(|i| (i / page + i % 7) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let env = mojim_linux::Os::new().unwrap();
        let file = env.open(&path, OpenHow::default()).unwrap();
        for refused in [false, true] {
            let peek = FilePages::new(file.clone(), page as u64, 99);
            peek.refused.store(refused, Relaxed);
            let check = |content: &[u8]| {
                let pages: Vec<usize> = (0..99).rev().step_by(2).chain([3, 3]).collect();
                let mut bytes = vec![9; pages.len() * page];
                peek.read(&pages, &mut bytes).unwrap();
                for (p, bytes) in pages.iter().zip(bytes.chunks(page)) {
                    assert!(*bytes == content[(p + 1) * page..(p + 2) * page], "{p}");
                }
            };
            check(&content);
            let kept = 50 * page + 10;
            let writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            writer.set_len(kept as u64).unwrap();
            let mut cut = content.clone();
            cut[kept..].fill(0);
            check(&cut);
            std::fs::write(&path, &content).unwrap();
            check(&content);
            let there = peek.map.get().is_some_and(Option::is_some);
            assert_eq!(there, !refused);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
