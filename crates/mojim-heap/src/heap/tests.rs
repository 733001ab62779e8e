//! Syncs and frees that happen while a thread looks for blocks.

use std::cell::RefCell;

use super::*;
use crate::space::Nowhere;

type Hook = Box<dyn FnOnce()>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Called where a thread knows which sync began last, and has not looked for blocks yet.
pub(super) fn meanwhile() {
    if let Some(hook) = HOOK.take() {
        hook();
    }
}

/// A sync begins and succeeds, and blocks are freed after it; a thread that had looked at the syncs before gets these
/// blocks. Their free is not committed, so none is a transaction's.
#[test]
fn blocks_keep_when_they_were_freed() {
    const SIZE: usize = 64;
    let options = HeapOptions::new(64 << 20, 0x2800_0000_0000);
    let heap = Heap::open_over(Box::new(Nowhere), "freed", (vec![0; HEAD_LEN], 0), &options);
    let heap = heap.unwrap();
    let all: Vec<usize> = (0..40)
        .map(|_| heap.malloc(SIZE).unwrap() as usize)
        .collect();
    heap.sync().unwrap();
    let freed = all[..16].to_vec();
    let other = move || {
        let other = std::thread::spawn(move || {
            heap.sync().unwrap();
            for p in freed {
                heap.free(p as *mut u8).unwrap();
            }
        });
        other.join().unwrap();
    };
    HOOK.set(Some(Box::new(other)));
    // Until the thread has none at hand.
    let mut last = 0;
    while HOOK.with_borrow(Option::is_some) {
        last = heap.malloc(SIZE).unwrap() as usize;
    }
    assert!(all[..16].contains(&last), "it is one that was freed");
    for _ in 0..32 {
        let taken = heap.take(SIZE, 1).unwrap().ptr as usize;
        assert!(!all.contains(&taken), "its free is not committed");
    }
    heap.close().unwrap();
}
