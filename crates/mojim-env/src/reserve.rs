//! Memory for when the system gives none, and the memory that is given back to the system.
//!
//! Rust ends the process where an allocation fails. In a program that is linked with libmojim the
//! process is the program's. So a reserve gives what the system's allocator refuses.
//!
//! While memory is short:
//!
//! - The engine does without what it can do without.
//! - It refuses what grows with the caller's data ([`room`]).
//! - No call begins while much of the reserve is used.
//!
//! Owns the allocator ([`Reserved`]) and the reserve, which is addresses only until it is used.
//! libmojim alone installs the allocator. In other programs memory is never short here.
//!
//! Invariants:
//!
//! - Nothing is taken from the reserve while the system's allocator still gives.
//! - No allocation takes more than an eighth of it.
//! - The lock is held for a walk over the blocks' bits, never during another call.
//!
//! Limit: the process still ends where what is not refused needs more than the rest of the reserve.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::spin_loop;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

/// Bytes of the reserve.
const SIZE: usize = 32 << 20;
/// Bytes that are given out together.
const BLOCK: usize = 256;
const BLOCKS: usize = SIZE / BLOCK;
/// No call begins, and nothing grows, while memory is short and more blocks than these are used.
const MOST_USED: usize = BLOCKS / 4;
/// The blocks that one allocation can take.
const MOST_AT_ONCE: usize = BLOCKS / 8;
/// Memory is short until the system gives so many bytes again.
const ENOUGH: usize = 1 << 20;
/// The mapping's alignment.
const PAGE: usize = 4096;

/// The system's allocator, and the reserve after it.
pub struct Reserved;

static BASE: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// The process that holds the lock; 0: none.
static LOCK: AtomicU32 = AtomicU32::new(0);
static USED: AtomicUsize = AtomicUsize::new(0);
/// The system has refused memory, and was not seen to give any since.
static SHORT: AtomicBool = AtomicBool::new(false);
/// A bit for each block: whether it is given out.
static TAKEN: [AtomicU64; BLOCKS / 64] = [const { AtomicU64::new(0) }; BLOCKS / 64];

/// Makes the reserve. False if the system has no addresses for it and for `more` bytes.
pub fn fill(more: usize) -> bool {
    let (none, new) = (
        libc::PROT_NONE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    // SAFETY: new memory, at an address of the system's choice.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), more, none, new, -1, 0) };
    if p == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: made above, and seen by nobody.
    unsafe { libc::munmap(p, more) };
    if !BASE.load(Acquire).is_null() {
        return true;
    }
    let (read_write, own) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    // SAFETY: new memory, at an address of the system's choice.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, read_write, own, -1, 0) };
    if p == libc::MAP_FAILED {
        return false;
    }
    let null = std::ptr::null_mut();
    if BASE
        .compare_exchange(null, p.cast(), Release, Relaxed)
        .is_err()
    {
        // Another thread was first.
        // SAFETY: made above, and seen by nobody.
        unsafe { libc::munmap(p, SIZE) };
    }
    true
}

/// Whether the system gives this process no more memory.
#[inline]
pub fn is_short() -> bool {
    SHORT.load(Relaxed)
}

/// Whether a call may begin. Looks at whether there is memory again.
#[inline]
pub fn may_begin() -> bool {
    !is_short() || ends_shortage() || USED.load(Relaxed) <= MOST_USED
}

#[cold]
fn ends_shortage() -> bool {
    let is_there = is_given(ENOUGH);
    if is_there {
        SHORT.store(false, Relaxed);
    }
    is_there
}

/// Whether the C library has so many bytes to give now.
pub fn is_given(bytes: usize) -> bool {
    // SAFETY: freed at once, if there is any.
    let p = unsafe { libc::malloc(bytes) };
    // The compiler would leave out a pair of calls whose result nobody sees.
    let p = std::hint::black_box(p);
    // SAFETY: from malloc above, or null.
    unsafe { libc::free(p) };
    !p.is_null()
}

/// Room in a vector for `n` more; for vectors that grow with the caller's data.
///
/// # Errors
/// ENOMEM, instead of the end of the process.
#[inline]
pub fn room<T>(v: &mut Vec<T>, n: usize) -> io::Result<()> {
    if v.capacity() - v.len() >= n {
        return Ok(());
    }
    let is_low = is_short() && USED.load(Relaxed) > MOST_USED;
    match !is_low && v.try_reserve(n).is_ok() {
        true => Ok(()),
        false => Err(none_left()),
    }
}

/// The error of a call that gets no memory.
#[cold]
pub fn none_left() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// Gives the system what the C library keeps of freed memory: of its own it gives only the end of each of
/// its heaps.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: changes no memory that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn locked<T>(f: impl FnOnce() -> T) -> T {
    let me = std::process::id();
    while let Err(holder) = LOCK.compare_exchange_weak(0, me, Acquire, Relaxed) {
        // In a forked child: a thread held it that is not there.
        if holder != 0 && holder != me {
            let _ = LOCK.compare_exchange(holder, 0, Relaxed, Relaxed);
        }
        spin_loop();
    }
    let done = f();
    LOCK.store(0, Release);
    done
}

fn bit(block: usize) -> (&'static AtomicU64, u64) {
    (&TAKEN[block / 64], 1 << (block % 64))
}

fn is_taken(block: usize) -> bool {
    let (word, bit) = bit(block);
    word.load(Relaxed) & bit != 0
}

fn blocks(l: Layout) -> usize {
    l.size().div_ceil(BLOCK).max(1)
}

/// Memory of the reserve, or null.
fn take(l: Layout) -> *mut u8 {
    let base = BASE.load(Acquire);
    let n = blocks(l);
    if base.is_null() {
        return std::ptr::null_mut();
    }
    SHORT.store(true, Relaxed);
    if l.align() > PAGE || n > MOST_AT_ONCE {
        return std::ptr::null_mut();
    }
    let step = (l.align() / BLOCK).max(1);
    let found = locked(|| {
        let mut from = 0;
        while from + n <= BLOCKS {
            match (from..from + n).rev().find(|b| is_taken(*b)) {
                Some(taken) => from = (taken + 1).next_multiple_of(step),
                None => {
                    for b in from..from + n {
                        let (word, bit) = bit(b);
                        word.fetch_or(bit, Relaxed);
                    }
                    USED.fetch_add(n, Relaxed);
                    return Some(from);
                }
            }
        }
        None
    });
    found.map_or(std::ptr::null_mut(), |from| base.wrapping_add(from * BLOCK))
}

/// The block at which memory of the reserve begins; none for other memory.
fn place(p: *mut u8) -> Option<usize> {
    let base = BASE.load(Acquire);
    let at = (p as usize).wrapping_sub(base as usize);
    (!base.is_null() && at < SIZE).then_some(at / BLOCK)
}

fn give_back(from: usize, l: Layout) {
    let n = blocks(l);
    locked(|| {
        for b in from..from + n {
            let (word, bit) = bit(b);
            word.fetch_and(!bit, Relaxed);
        }
        USED.fetch_sub(n, Relaxed);
    });
}

// SAFETY: memory is the system's, or whole blocks of the reserve, aligned as asked, that are
// given to one caller until it gives them back with the same layout. Nothing here unwinds.
unsafe impl GlobalAlloc for Reserved {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let p = unsafe { System.alloc(l) };
        if p.is_null() { take(l) } else { p }
    }

    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let mut p = unsafe { System.alloc_zeroed(l) };
        if p.is_null() {
            p = take(l);
            if !p.is_null() {
                // SAFETY: as long as was asked for.
                unsafe { p.write_bytes(0, l.size()) };
            }
        }
        p
    }

    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        match place(p) {
            Some(from) => give_back(from, l),
            // SAFETY: as the caller promises; it is not of the reserve, so it is the system's.
            None => unsafe { System.dealloc(p, l) },
        }
    }

    unsafe fn realloc(&self, p: *mut u8, l: Layout, size: usize) -> *mut u8 {
        let is_mine = place(p).is_some();
        if !is_mine {
            // SAFETY: as the caller promises; it is the system's.
            let new = unsafe { System.realloc(p, l, size) };
            if !new.is_null() {
                return new;
            }
        }
        // SAFETY: the caller promises a size that is valid with this alignment.
        let bigger = unsafe { Layout::from_size_align_unchecked(size, l.align()) };
        // SAFETY: `alloc` asks for no more; the old memory has `l.size()` bytes, the new one `size`.
        unsafe {
            let new = match is_mine {
                true => self.alloc(bigger),
                false => take(bigger),
            };
            if !new.is_null() {
                new.copy_from_nonoverlapping(p, l.size().min(size));
                self.dealloc(p, l);
            }
            new
        }
    }
}
