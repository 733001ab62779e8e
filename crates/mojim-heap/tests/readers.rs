//! A heap that is read while its primary changes it: what a root points to is mapped, and name and
//! pointer are of one state.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use mojim_env::Result;
use mojim_heap::{Heap, Space, Span};

mod memory;
use memory::{Disk, address, open};

const HEAD: usize = 64 << 10;

/// What a reader shows of a heap: one head after the other.
#[derive(Clone, Default)]
struct View {
    base: usize,
    coming: Arc<Mutex<VecDeque<Vec<u8>>>>,
    shown: Arc<Mutex<u64>>,
    /// It moves on when the heap asks what is shown, this often.
    asked: Arc<Mutex<u32>>,
    mapped: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl View {
    /// Shows the next state.
    fn advance(&self) {
        let Some(head) = self.coming.lock().unwrap().pop_front() else {
            return;
        };
        // SAFETY: the head, which is mapped.
        unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), self.base as *mut u8, HEAD) };
        *self.shown.lock().unwrap() += 1;
    }

    fn has(&self, at: *mut u8) -> bool {
        let all = self.mapped.lock().unwrap();
        all.iter()
            .any(|(a, len)| (at as usize).wrapping_sub(*a) < *len)
    }
}

impl Space for View {
    fn map(&self, offset: u64, len: usize, at: *mut u8) -> Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the heap has reserved these addresses.
        unsafe { mmap_anonymous(at.cast(), len, prot, flags) }.unwrap();
        self.mapped.lock().unwrap().push((at as usize, len));
        // In the middle of a look at the heap, or at its first.
        if offset == 0 || self.coming.lock().unwrap().len() == 1 {
            self.advance();
        }
        Ok(())
    }

    fn commit(&self, _: &[Span], _: bool) -> Result<()> {
        unreachable!("a reader")
    }

    fn sync(&self, _: &[Span]) -> Result<()> {
        unreachable!("a reader")
    }

    fn rollback(&self, _: Span) -> Result<()> {
        unreachable!("a reader")
    }

    fn shown(&self) -> u64 {
        let now = *self.shown.lock().unwrap();
        let mut asked = self.asked.lock().unwrap();
        if *asked > 0 {
            *asked -= 1;
            self.advance();
        }
        now
    }

    fn unmap(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: made by `map`.
        unsafe { rustix::mm::munmap(at.cast(), len) }.unwrap();
        Ok(())
    }
}

/// The view moves on while new chunks are mapped, and while the head is read.
#[test]
fn a_root_points_to_what_is_mapped() {
    let base = address(40);
    for asked in [0, 1] {
        // A heap of one chunk, of two, and of three: the root points into the last.
        let disk = Disk::default();
        let heap = open(&disk, base);
        let mut heads = VecDeque::new();
        let mut pointers = Vec::new();
        for bytes in [100, 16 << 20, 40 << 20] {
            let p = heap.malloc(bytes).unwrap();
            heap.set_root("last", p, "").unwrap();
            heap.sync().unwrap();
            heads.push_back(disk.0.lock().unwrap()[..HEAD].to_vec());
            pointers.push(p);
        }
        heap.close().unwrap();
        let first = (heads[0].clone(), 16 << 20);
        let view = View {
            base,
            coming: Arc::new(Mutex::new(heads)),
            ..View::default()
        };
        let heap = Heap::open_reader_over(Box::new(view.clone()), "read", first).unwrap();
        assert_eq!(heap.root("last", "").unwrap(), pointers[0]);
        match asked {
            0 => view.advance(),
            n => *view.asked.lock().unwrap() = n,
        }
        // The third state comes while the second chunk is mapped.
        let p = heap.root("last", "").unwrap();
        assert!(view.has(p), "{asked}: {p:p} is not mapped");
        assert_eq!(p, pointers[1]);
        let p = heap.root("last", "").unwrap();
        assert!(view.has(p) && p == pointers[2]);
        // It does not hear of blocks.
        assert_eq!(heap.usable(p).unwrap_err().errno(), libc::EROFS);
        heap.close().unwrap();
    }
}
