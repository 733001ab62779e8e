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
}
