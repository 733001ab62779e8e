//! Persistent memory behind a cache that loses, with the power, all that was
//! not flushed: an emulated processor has none, so that what is not flushed
//! would be there all the same.
//!
//! Owns the copy that the engine stores into, and the way from there to the
//! real memory. It is for the broken engines only: the shipped one has the real
//! memory itself.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use mojim_env::{Env, Memory};
use mojim_linux::Os;

/// The owner of the memory that the engine has.
pub struct Cache {
    os: Os,
    copy: Memory,
    real: Memory,
    /// What was flushed last, and has not been written.
    late: Mutex<Option<Range<usize>>>,
}

impl Cache {
    /// A cache before `real`, as the memory for the engine.
    pub fn before(os: &Os, real: Memory) -> io::Result<Memory> {
        let copy = os.anonymous_memory(real.len())?;
        // SAFETY: two memories of this length, which nobody else has yet.
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

    /// The one behind `memory`, if there is one.
    pub fn of(memory: &Memory) -> Option<&Cache> {
        memory.owner().downcast_ref()
    }

    /// What is in it.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.copy.len());
        // SAFETY: inside the copy; the engine has just stored these bytes, and
        // stores none of them again before the flush has returned.
        unsafe { std::slice::from_raw_parts(self.copy.ptr().add(range.start), range.len()) }
    }

    /// Writes it to the real memory.
    pub fn write(&self, range: Range<usize>) {
        let bytes = self.bytes(range.clone());
        // SAFETY: inside the real memory, which has the length of the copy and
        // which nobody else uses.
        unsafe {
            let to = self.real.ptr().add(range.start);
            to.copy_from(bytes.as_ptr(), bytes.len());
        }
        self.os.flush(&self.real, range.start, range.len());
    }

    /// Writes what was to be written the last time, and this the next time.
    pub fn write_late(&self, range: Range<usize>) {
        let before = self.late.lock().expect("no thread panics").replace(range);
        if let Some(before) = before {
            self.write(before);
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Who ends in order was told that it is there.
        if let Some(late) = self.late.lock().expect("no thread panics").take() {
            self.write(late);
        }
    }
}
