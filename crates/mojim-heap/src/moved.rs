//! Giving a heap other addresses: its head, its roots, and the pointers in its blocks.
//!
//! A heap does not know where in its blocks the pointers are. So every aligned word of an allocated
//! block whose value is an address of the heap counts as one. A number that has such a value by chance
//! would be changed too: the addresses are far above what counters, sizes and times reach.

use mojim_format::FormatError;
use mojim_format::bytes::u64_at;
use mojim_format::heap::{FIXED_LEN, HeapHead, MAX_ROOTS, ROOT_LEN, Root, root_at};

use crate::check::{blocks, check};

/// What a move changed, or would change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Words in blocks that were taken for pointers.
    pub pointers: u64,
    /// Of these, words that do not point into an allocated block, nor right behind one.
    pub stray: u64,
    /// Roots.
    pub roots: u64,
}

/// Changes the bytes of a heap's file so that it lies at `base` and may take `capacity` bytes. `store`
/// is called with each eight bytes, or with each part of the head, and where they go.
///
/// # Errors
/// If the heap is damaged, or the new addresses cannot be.
pub fn move_heap(
    bytes: &[u8],
    base: u64,
    capacity: u64,
    store: &mut dyn FnMut(usize, &[u8]),
) -> Result<Moved, FormatError> {
    let blocks = blocks(bytes)?;
    let report = check(bytes)?;
    let old = HeapHead::decode(bytes)?.expect("it was checked");
    let new = HeapHead {
        base,
        capacity,
        ..old
    };
    if !new.is_sane() || capacity < report.size {
        return Err(FormatError::Wrong {
            what: "heap",
            why: "the new addresses cannot be: multiples of 1 MiB below 2^47, with room for its chunks",
        });
    }
    // The address behind the last byte is one of the heap's, too: the end of an array.
    let inside = |v: u64| v.wrapping_sub(old.base) <= report.size;
    let mut moved = Moved::default();
    let lies = |offset: u64| {
        let i = blocks.partition_point(|(at, _)| *at <= offset);
        i > 0 && offset <= blocks[i - 1].0 + blocks[i - 1].1 as u64
    };
    for &(at, len) in &blocks {
        for at in (at as usize..at as usize + len).step_by(8) {
            let v = u64_at(bytes, at);
            if inside(v) {
                moved.pointers += 1;
                moved.stray += u64::from(!lies(v - old.base));
                store(at, &(v - old.base + base).to_le_bytes());
            }
        }
    }
    for i in 0..MAX_ROOTS {
        let at = root_at(i);
        if let Some(root) = Root::decode(&bytes[at..at + ROOT_LEN])? {
            moved.roots += 1;
            let pointer = match inside(root.pointer) {
                true => root.pointer - old.base + base,
                false => root.pointer,
            };
            store(at, &Root { pointer, ..root }.encode());
        }
    }
    store(0, &new.encode()[..FIXED_LEN]);
    Ok(moved)
}
