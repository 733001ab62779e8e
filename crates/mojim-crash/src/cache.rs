//! Persistent memory behind a cache that loses everything that was not flushed when the
//! power is lost. An emulated processor has no cache, so without this one, stores that
//! were not flushed would be durable all the same.
//!
//! Owns the copy into which the engine stores, and the way from this copy to the real
//! memory. It is for the broken engines only: the shipped engine has the real memory
//! itself.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use mojim_env::{Env, Memory};
use mojim_linux::Os;

/// The owner of the memory that the engine gets.
pub struct Cache {
    os: Os,
    copy: Memory,
    real: Memory,
    /// The range that was flushed last, and not written yet.
    late: Mutex<Option<Range<usize>>>,
}

impl Cache {
    /// Puts a cache before `real`, and returns the engine's memory.
    pub fn before(os: &Os, real: Memory) -> io::Result<Memory> {
        let copy = os.anonymous_memory(real.len())?;
        // SAFETY: two memories of this length, to which nothing else has access yet.
        unsafe { copy.ptr().copy_from(real.ptr(), real.len()) };
        let (ptr, len) = (copy.ptr(), copy.len());
        let late = Mutex::new(None);
        let os = os.clone();
        let cache = Arc::new(Cache {
            os,
            copy,
            real,
            late,
        });
        // SAFETY: the cache, its owner, has the copy as long as it lives.
        Ok(unsafe { Memory::new(ptr, len, cache) })
    }

    /// The cache behind `memory`, if there is one.
    pub fn of(memory: &Memory) -> Option<&Cache> {
        memory.owner().downcast_ref()
    }

    /// The cached bytes of a range.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.copy.len());
        // SAFETY: inside the copy; the engine has just stored these bytes, and
        // stores none of them again before the flush has returned.
        unsafe { std::slice::from_raw_parts(self.copy.ptr().add(range.start), range.len()) }
    }

    /// Writes a range to the real memory.
    pub fn write(&self, range: Range<usize>) {
        let bytes = self.bytes(range.clone());
        // SAFETY: inside the real memory, which has the length of the copy and to which
        // nothing else has access.
        unsafe {
            let to = self.real.ptr().add(range.start);
            to.copy_from(bytes.as_ptr(), bytes.len());
        }
        self.os.flush(&self.real, range.start, range.len());
    }

    /// Writes the range of the last call, and keeps this one for the next call.
    pub fn write_late(&self, range: Range<usize>) {
        let before = self.late.lock().expect("no thread panics").replace(range);
        if let Some(before) = before {
            self.write(before);
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // A process that ends cleanly was told that the range is durable.
        if let Some(late) = self.late.lock().expect("no thread panics").take() {
            self.write(late);
        }
    }
}
