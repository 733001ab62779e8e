//! Stores into a shared mapping of the file, and one msync: what programs do
//! without Mojim. A control that must be found torn.

use std::fs::File;
use std::io::Read;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::Result;
use crate::redo::data_file;
use crate::subject::{Subject, SubjectPaths};
use crate::workload::{Patch, region_len};

/// The mapping of the whole file.
pub struct Naive {
    ptr: *mut u8,
    len: usize,
}

impl Naive {
    /// Opens and maps the file.
    pub fn open(place: &SubjectPaths, seed: u64) -> Result<Naive> {
        let file: File = data_file(place, seed)?;
        let len = region_len(seed);
        let how = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, how, MapFlags::SHARED, &file, 0)? };
        Ok(Naive {
            ptr: ptr.cast(),
            len,
        })
    }

    /// What is in the file.
    pub fn read(place: &SubjectPaths, seed: u64) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        data_file(place, seed)?.read_to_end(&mut all)?;
        Ok(all)
    }
}

impl Drop for Naive {
    fn drop(&mut self) {
        // SAFETY: the mapping of `open`, which nothing else uses. The call cannot fail.
        let _ = unsafe { munmap(self.ptr.cast(), self.len) };
    }
}

impl Subject for Naive {
    fn commit(&mut self, changes: &[Patch]) -> Result<()> {
        for c in changes {
            // Programs do not store everything at once.
            std::thread::yield_now();
            assert!(c.at + c.bytes.len() <= self.len);
            // SAFETY: inside the mapping, as was just checked.
            unsafe {
                self.ptr
                    .add(c.at)
                    .copy_from(c.bytes.as_ptr(), c.bytes.len())
            };
        }
        // SAFETY: the whole mapping.
        unsafe { msync(self.ptr.cast(), self.len, MsyncFlags::SYNC)? };
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
