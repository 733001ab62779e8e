//! Durable files on a file system that is itself memory.
//!
//! Owns the mapping through which they are written. There a write is a copy into a page, which a
//! store into the mapping is, too, without a system call: on tmpfs nothing is more durable than
//! either.
//!
//! Invariants:
//! - Only a file that has all its pages is mapped, and nobody here cuts it: a store into a page that
//!   is missing, on a file system that is full, would be SIGBUS.
//! - Bytes beyond what is mapped are written by the kernel, as anywhere else.

use super::disk::DiskFile;
use super::memory::Mapping;
use mojim_env::{File, Memory, descriptors};
use rustix::fd::BorrowedFd;
use std::io;
use std::ops::Range;
use std::sync::Arc;

struct InMemory {
    file: DiskFile,
    memory: Memory,
}

/// `file`, which is open to be written past the page cache; written without the kernel if it is in
/// memory and has all its pages.
pub(super) fn of(file: DiskFile) -> Arc<dyn File> {
    match map(&file) {
        Some(memory) => Arc::new(InMemory { file, memory }),
        None => Arc::new(file),
    }
}

/// `None` also where it cannot be mapped: the kernel writes it as well.
fn map(file: &DiskFile) -> Option<Memory> {
    let fd = file.fd()?;
    let kind = rustix::fs::fstatfs(fd).ok()?.f_type;
    if kind as libc::c_long != libc::TMPFS_MAGIC as libc::c_long {
        return None;
    }
    let s = rustix::fs::fstat(fd).ok()?;
    let len = usize::try_from(s.st_size).ok()?;
    if (s.st_blocks as u64) * 512 < len as u64 {
        return None;
    }
    Mapping::of_file(descriptors::duplicate(fd).ok()?, len).ok()
}

impl File for InMemory {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.memory.len() as u64) {
            return self.file.write_at(buf, offset);
        }
        // SAFETY: inside the mapping, whose bytes nobody has a reference to; two writers of the same
        // bytes race as two writes of a file do, and no caller has two.
        unsafe {
            let to = self.memory.ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(buf.as_ptr(), to, buf.len());
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len < self.memory.len() as u64 {
            let text = "a file in memory that is mapped is not cut";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        self.file.set_len(len)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.file.next_data(offset)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.fd()
    }
}

#[cfg(test)]
mod tests {
    use crate::Os;
    use mojim_env::{Env, File, OpenHow};
    use std::path::Path;
    use std::sync::Arc;

    const DURABLE: OpenHow = OpenHow {
        create: false,
        write: true,
        durable: true,
        plain: false,
    };

    fn open(path: &Path) -> Arc<dyn File> {
        Os::new().unwrap().open(path, DURABLE).unwrap()
    }

    /// Whether this process has it mapped.
    fn is_mapped(path: &Path) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(path.to_str().unwrap())
    }

    /// Each commit of a volume in memory was a system call, two thirds of its time.
    #[test]
    fn a_file_in_memory_is_written_by_stores() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, vec![0; 8192]).unwrap();
        let file = open(&path);
        assert!(is_mapped(&path));
        file.write_at(&[1; 512], 512).unwrap();
        file.write_at(&[2; 512], 7680).unwrap();
        let mut expected = vec![0; 8192];
        expected[512..1024].fill(1);
        expected[7680..].fill(2);
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        let mut read = [0; 512];
        assert_eq!(file.read_at(&mut read, 512).unwrap(), 512);
        assert_eq!(read, [1; 512]);
        // Across the end of what is mapped, and beyond.
        file.write_at(&[3; 1024], 7680).unwrap();
        file.write_at(&[4; 512], 16384).unwrap();
        let all = std::fs::read(&path).unwrap();
        assert_eq!((all.len(), all[8703], all[16895]), (16896, 3, 4));
        assert!(file.set_len(4096).is_err(), "its pages are mapped");
        drop(file);
        assert!(!is_mapped(&path));
    }

    /// A store into a page that is not there would be SIGBUS on a file system that is full.
    #[test]
    fn a_file_in_memory_with_holes_is_not_mapped() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, vec![0; 4096]).unwrap();
        let plain = std::fs::File::options().write(true).open(&path).unwrap();
        plain.set_len(1 << 20).unwrap();
        let file = open(&path);
        assert!(!is_mapped(&path));
        file.write_at(&[1; 512], 65536).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[65536], 1);
        let on_disk = tempfile::tempdir().unwrap();
        let path = on_disk.path().join("log");
        std::fs::write(&path, vec![0; 4096]).unwrap();
        let file = open(&path);
        let kind = rustix::fs::statfs(on_disk.path()).unwrap().f_type;
        let in_memory = kind as libc::c_long == libc::TMPFS_MAGIC as libc::c_long;
        assert_eq!(is_mapped(&path), in_memory);
        drop(file);
    }
}
