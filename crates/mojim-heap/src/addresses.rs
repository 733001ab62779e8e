//! The addresses of a heap: choosing them, reserving them, giving them back.

use mojim_env::{Error, Result};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Where heaps lie whose program gives no address: a range that neither the kernel nor
/// the C library uses for a program's own mappings, with address space layout randomization
/// or without.
const RANGE: std::ops::Range<usize> = 0x2000_0000_0000..0x3000_0000_0000;
const STEP: usize = 1 << 30;
const TRIES: usize = 16;

/// A random number.
pub fn random() -> u64 {
    let mut b = [0u8; 8];
    // SAFETY: writes at most eight bytes.
    let n = unsafe { libc::getrandom(b.as_mut_ptr().cast(), b.len(), 0) };
    assert_eq!(n, 8, "the kernel gives no random numbers");
    u64::from_le_bytes(b)
}

/// An address for a new heap, free in this process now.
pub fn choose(capacity: usize) -> Result<usize> {
    let room = (RANGE.end - RANGE.start).checked_sub(capacity);
    let steps = room.map_or(0, |r| r / STEP);
    let mut last = Errno::NOMEM;
    for _ in 0..TRIES {
        if steps == 0 {
            break;
        }
        let at = RANGE.start + random() as usize % steps * STEP;
        match hold(at, capacity) {
            Ok(()) => {
                release(at, capacity);
                return Ok(at);
            }
            Err(e) => last = e,
        }
    }
    Err(Error::io(
        format!("finding {capacity} bytes of addresses for a heap"),
        &last.into(),
    ))
}

fn hold(at: usize, len: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    let got = unsafe { mmap_anonymous(at as *mut _, len, ProtFlags::empty(), flags) }?;
    if got as usize != at {
        // A kernel before 4.17 takes the address for a hint.
        // SAFETY: just made.
        let _ = unsafe { munmap(got, len) };
        return Err(Errno::EXIST);
    }
    Ok(())
}

/// Reserves a heap's addresses.
pub fn reserve(file: &str, at: usize, len: usize) -> Result<()> {
    hold(at, len).map_err(|e| match e {
        Errno::EXIST => Error::Io {
            what: format!(
                "the heap {file} lies at {at:#x} to {:#x}, where this process has {}",
                at + len,
                whose(at, at + len)
            ),
            errno: libc::EADDRINUSE,
            error: "close that first, or give the heap other addresses (`mojim heap move`)".into(),
        },
        e => Error::io(
            format!("reserving {len} bytes of addresses at {at:#x} for the heap {file}"),
            &e.into(),
        ),
    })
}

/// Gives addresses back.
pub fn release(at: usize, len: usize) {
    if len > 0 {
        // SAFETY: the heap's own reservation, which nobody uses.
        let _ = unsafe { munmap(at as *mut _, len) };
    }
}

/// What the process has mapped in a range.
fn whose(start: usize, end: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let hit = maps.lines().find(|line| {
        let span = line.split(' ').next().and_then(|s| s.split_once('-'));
        let parsed = span.and_then(|(a, b)| {
            let a = usize::from_str_radix(a, 16).ok()?;
            Some((a, usize::from_str_radix(b, 16).ok()?))
        });
        parsed.is_some_and(|(a, b)| a < end && b > start)
    });
    match hit {
        Some(line) => format!(
            "another mapping ({})",
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        ),
        None => "another mapping".into(),
    }
}
