//! A heap whose rollback fails.
//!
//! - Before anything was undone it can be tried again.
//! - Half-way, the heap can only be closed, and nothing of it is handed out or committed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use mojim_env::{Error, Result};
use mojim_heap::{Heap, HeapOptions, Nowhere, Space, Span};

/// A heap's file in plain memory. Its rollbacks come to what is said here; then they succeed.
#[derive(Clone, Default)]
struct Memory {
    rollbacks: Arc<Mutex<VecDeque<Result<()>>>>,
    syncs: Arc<Mutex<u32>>,
}

impl Space for Memory {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()> {
        Nowhere.map(offset, len, at)
    }

    fn commit(&self, _: &[Span], _: bool) -> Result<()> {
        Ok(())
    }

    fn sync(&self, _: &[Span]) -> Result<()> {
        *self.syncs.lock().unwrap() += 1;
        Ok(())
    }

    fn rollback(&self, _: Span) -> Result<()> {
        let next = self.rollbacks.lock().unwrap().pop_front();
        next.unwrap_or(Ok(()))
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        Nowhere.unmap(at, len)
    }
}

impl Memory {
    fn open(&self) -> Heap {
        let head = (vec![0; 64 << 10], 0);
        // Its own addresses, which no other test's heap has.
        let options = HeapOptions::new(1 << 30, 0x2900_0000_0000);
        Heap::open_over(Box::new(self.clone()), "torn", head, &options).unwrap()
    }
}

fn silent() -> Error {
    Error::Timeout("the mirror is silent".into())
}

fn broken() -> Error {
    Error::Poisoned("reading the data file".into())
}

fn errno<T>(done: Result<T>) -> i32 {
    done.map_or_else(|e| e.errno(), |_| 0)
}

/// What was awaited before the first byte was undone leaves the heap whole. Whatever else fails
/// leaves it torn, if it is the first mapping or a later one; blocks that threads have in their
/// caches are handed out no more.
#[test]
fn a_heap_that_was_rolled_back_half_way_can_only_be_closed() {
    for (answers, torn) in [
        (vec![Err(silent())], false),
        (vec![Err(Error::Stale("another is primary".into()))], false),
        (vec![Err(broken())], true),
        (vec![Ok(()), Err(silent())], true),
        (vec![Ok(()), Err(broken())], true),
    ] {
        let memory = Memory::default();
        let heap = memory.open();
        // More than the first chunk: there are two mappings.
        heap.malloc(24 << 20).unwrap();
        let small = heap.malloc(64).unwrap();
        heap.sync().unwrap();
        // The thread's cache has others of its size.
        heap.free(small).unwrap();
        let expected = answers.iter().find_map(|a| a.as_ref().err()).unwrap();
        let expected = expected.errno();
        memory.rollbacks.lock().unwrap().extend(answers);
        assert_eq!(errno(heap.rollback()), expected);
        assert!(memory.rollbacks.lock().unwrap().is_empty());
        let syncs = *memory.syncs.lock().unwrap();
        let all = [
            errno(heap.malloc(64)),
            errno(heap.malloc(1 << 20)),
            errno(heap.take(64, 16)),
            errno(heap.sync()),
            errno(heap.rollback()),
        ];
        match torn {
            true => assert_eq!(all, [libc::EIO; 5]),
            false => assert_eq!(all, [0; 5]),
        }
        let more = *memory.syncs.lock().unwrap() - syncs;
        assert_eq!(more, u32::from(!torn));
        heap.close().unwrap();
    }
    detaches();
}

/// A detach that fails leaves the heap as it is. One that succeeds closes the heaps that were opened
/// through the same attachment, and no others.
fn detaches() {
    // That of heaps that are opened over other memory.
    const MINE: usize = 0;
    let memory = Memory::default();
    let heap = memory.open();
    let all = || [errno(heap.malloc(64)), errno(heap.sync())];
    let failed = Heap::ending(MINE, || Err(silent()), |_| false);
    assert_eq!(errno(failed), libc::ETIMEDOUT);
    assert_eq!(all(), [0; 2]);
    Heap::ending(MINE + 1, || Ok(()), |_| true).unwrap();
    assert_eq!(all(), [0; 2]);
    // Its memory is gone, though what had to be written was not.
    let gone = || {
        let base = heap.base().cast();
        // SAFETY: mapped by `map`, in one piece.
        unsafe { rustix::mm::munmap(base, 16 << 20) }.unwrap();
        Err(broken())
    };
    let is_it = |base: usize| base == heap.base() as usize;
    assert_eq!(errno(Heap::ending(MINE, gone, is_it)), libc::EIO);
    assert_eq!(all(), [libc::EINVAL; 2]);
    memory.open().close().unwrap();
}
