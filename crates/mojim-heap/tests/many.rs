//! As many heaps are open as a process can have: one more is refused before it takes addresses, and can be
//! opened at these when another one was closed.

use mojim_heap::Heap;

mod memory;

use memory::{Disk, open, try_open};

const MOST: usize = 64;
const BASE: usize = 0x2700_0000_0000;

#[test]
fn one_too_many_takes_no_addresses() {
    let disks: Vec<Disk> = (0..=MOST).map(|_| Disk::default()).collect();
    let base = |i: usize| BASE + i * (4 << 30);
    let all: Vec<Heap> = (0..MOST).map(|i| open(&disks[i], base(i))).collect();
    for _ in 0..2 {
        let refused = try_open(&disks[MOST], base(MOST)).err().unwrap();
        assert_eq!(refused.errno(), libc::EBUSY, "{refused}");
        assert!(refused.to_string().contains("64 heaps"), "{refused}");
    }
    all[7].close().unwrap();
    let last = open(&disks[MOST], base(MOST));
    last.close().unwrap();
    let others = all.iter().enumerate().filter(|(i, _)| *i != 7);
    others.for_each(|(_, h)| h.close().unwrap());
    leaves_nothing(&disks[0]);
}

/// The process's addresses, in pages.
fn pages() -> u64 {
    let all = std::fs::read_to_string("/proc/self/statm").unwrap();
    all.split(' ').next().unwrap().parse().unwrap()
}

/// A heap that is closed leaves no tables behind, and the next one finds nothing in them.
fn leaves_nothing(disk: &Disk) {
    let mut before = 0;
    for i in 0..30 {
        let heap = open(disk, BASE);
        let kept = heap.root("kept", "").ok();
        assert_eq!(kept.is_some(), i > 0);
        let p = heap.malloc(100).unwrap();
        heap.set_root("kept", p, "").unwrap();
        heap.sync().unwrap();
        if let Some(kept) = kept {
            heap.free(kept).unwrap();
        }
        // Uncommitted: in the next heap it is free.
        let other = heap.malloc(5000).unwrap();
        heap.close().unwrap();
        assert!(heap.find(other).is_err() && heap.malloc(100).is_err());
        if i == 1 {
            before = pages();
        }
    }
    let more = pages().saturating_sub(before);
    // Of one heap: 12 MiB.
    assert!(more < 30 * 1024, "{more} more pages after 28 heaps");
    let report = mojim_heap::check(&disk.0.lock().unwrap()).unwrap();
    assert_eq!(report.problems, [""; 0]);
}
