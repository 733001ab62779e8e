//! Sizes of blocks: which class serves a request, and how large its slabs are.
//!
//! The classes are the multiples of 16 up to 128, then four for each doubling up to 32 KiB. So at
//! most a fifth of a block is lost beyond 128 bytes. A larger block is a slab of its own.

use mojim_format::heap::{GRAIN, UNIT};

/// How many classes there are.
pub const CLASSES: usize = 40;
/// The largest block of a class.
pub const MOST: usize = 32 << 10;

const STEPPED: usize = 128;
const FIRST: usize = STEPPED / GRAIN;

/// Sizes up to this are looked up by grains, larger ones by steps: branches by a random size are guessed
/// wrongly.
const BY_GRAIN: usize = 1024;
/// The sizes of classes beyond are multiples of this.
const STEP: usize = 256;
/// The last entry that is by grains.
const GRAINS: usize = BY_GRAIN / GRAIN;

/// Entries of the list.
pub const ENTRIES: usize = GRAINS + 1 + MOST / STEP + 1;

/// The class of each number of grains, then of each number of steps.
pub static LIST: [u8; ENTRIES] = {
    let mut list = [0; ENTRIES];
    let mut i = 0;
    while i < list.len() {
        let size = match i <= GRAINS {
            true => i * GRAIN,
            false => (i - GRAINS - 1) * STEP,
        };
        list[i] = computed(size) as u8;
        i += 1;
    }
    list
};

/// The class that serves `size` bytes, below [`CLASSES`]; `None` beyond [`MOST`].
#[inline(always)]
pub fn class_for(size: usize) -> Option<usize> {
    Some(LIST[entry_for(size)?] as usize)
}

/// Which entry of the list is that of `size` bytes; `None` beyond [`MOST`].
#[inline(always)]
pub fn entry_for(size: usize) -> Option<usize> {
    Some(if size <= BY_GRAIN {
        size.div_ceil(GRAIN)
    } else if size <= MOST {
        GRAINS + 1 + size.div_ceil(STEP)
    } else {
        return None;
    })
}

/// The class that serves `size` bytes, which must be at most [`MOST`].
#[inline]
pub fn class_of(size: usize) -> usize {
    class_for(size).expect("not more than the most")
}

const fn computed(size: usize) -> usize {
    if size == 0 {
        return 0;
    }
    if size <= STEPPED {
        return (size - 1) / GRAIN;
    }
    let last = size - 1;
    let doubling = last.ilog2() as usize;
    // Of the quarters of this doubling, the one that `last` lies in.
    FIRST + (doubling - STEPPED.ilog2() as usize) * 4 + ((last >> (doubling - 2)) & 3)
}

/// Bytes of a block of a class.
#[inline]
pub fn size_of(class: usize) -> usize {
    if class < FIRST {
        return (class + 1) * GRAIN;
    }
    let (doubling, quarter) = ((class - FIRST) / 4, (class - FIRST) % 4);
    (STEPPED / 4 * (5 + quarter)) << doubling
}

/// Units of a slab of a class.
pub fn units_of(class: usize) -> usize {
    let bytes: usize = match size_of(class) {
        ..1025 => 64 << 10,
        1025..8193 => 256 << 10,
        _ => 1 << 20,
    };
    bytes / UNIT
}

/// Blocks of a slab of a class.
pub fn blocks_of(class: usize) -> usize {
    units_of(class) * UNIT / size_of(class)
}

/// How many free blocks of a class a thread keeps at most.
pub fn kept(class: usize) -> usize {
    ((64 << 10) / size_of(class)).clamp(4, 128)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_the_smallest_that_fits() {
        for size in 0..=MOST {
            let c = class_of(size);
            assert!(size_of(c) >= size, "{size}");
            assert!(c == 0 || size_of(c - 1) < size, "{size}");
        }
        assert_eq!(size_of(CLASSES - 1), MOST);
        for c in 0..CLASSES {
            assert!(size_of(c).is_multiple_of(GRAIN));
            assert!(blocks_of(c) >= 32);
            assert!(blocks_of(c) <= units_of(c) * mojim_format::heap::STATES_PER_UNIT);
        }
    }
}
