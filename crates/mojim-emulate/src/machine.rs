//! How fast this machine's own memory is.
//!
//! Owns the measurements: bandwidth, read latency, and the cost of a flushed line in each mode.
//! On some virtual machines a flush costs nothing, so the report names the cost, and the emulator
//! can put its own in the place.

use std::hint::black_box;
use std::time::Instant;

use mojim_linux::{FlushMode, flush_range_by};

/// Bytes of the buffer: more than caches hold.
const BUFFER: usize = 64 << 20;
const LINE: usize = 64;
/// Lines that a measured flush has: a page's.
const LINES: usize = 64;

/// What was measured.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Bytes that one thread writes past the caches in a second.
    pub write_bytes_per_second: u64,
    /// Nanoseconds of a read that no cache has.
    pub read_ns: u32,
    /// Nanoseconds of one line of a page whose lines are all modified, for each mode that the
    /// processor has.
    pub line_ns: Vec<(FlushMode, u32)>,
}

impl Machine {
    /// Measures it. Takes some 0.2 s and 64 MiB of memory.
    pub fn measured() -> Machine {
        let mut buffer = vec![1_u64; BUFFER / 8];
        let modes = FlushMode::ALL.into_iter().filter(|m| m.is_available());
        let line_ns = modes.map(|m| (m, line_ns(&mut buffer, m))).collect();
        let write_bytes_per_second = bandwidth(&mut buffer);
        let read_ns = read_ns(&mut buffer);
        Machine {
            write_bytes_per_second,
            read_ns,
            line_ns,
        }
    }

    /// Nanoseconds of a line that is flushed in this mode, if that was measured.
    pub fn line(&self, mode: FlushMode) -> Option<u32> {
        let of = |(m, ns): &(FlushMode, u32)| (*m == mode).then_some(*ns);
        self.line_ns.iter().find_map(of)
    }
}

/// Writes all of it past the caches, and says how fast that was at its best.
fn bandwidth(buffer: &mut [u64]) -> u64 {
    let mut write = |value| {
        let begun = Instant::now();
        store_past_caches(buffer, value);
        begun.elapsed().as_nanos().max(1)
    };
    let least = (0..5).map(&mut write).min().expect("five");
    (BUFFER as u128 * 1_000_000_000 / least) as u64
}

#[cfg(target_arch = "x86_64")]
fn store_past_caches(buffer: &mut [u64], value: u64) {
    for word in buffer.iter_mut() {
        // SAFETY: an aligned word of the buffer, which this function has alone.
        unsafe {
            std::arch::asm!("movnti [{}], {}", in(reg) word, in(reg) value, options(nostack, preserves_flags));
        }
    }
    // SAFETY: a fence changes no memory.
    unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
}

#[cfg(not(target_arch = "x86_64"))]
fn store_past_caches(buffer: &mut [u64], value: u64) {
    buffer.fill(value);
    black_box(buffer);
}

/// Follows a chain through all of it, so that each read must end before the next begins.
fn read_ns(buffer: &mut [u64]) -> u32 {
    const STEP: usize = LINE / 8;
    let lines = buffer.len() / STEP;
    assert!(lines.is_power_of_two(), "the chain below meets each line");
    // A full period: the factor is one more than a multiple of four, the addend odd.
    let next = |n: usize| (n * 2_891_336_453 + 1_234_567) % lines;
    for n in 0..lines {
        buffer[n * STEP] = next(n) as u64;
    }
    const HOPS: u32 = 100_000;
    let mut at = 0;
    let mut hops = || {
        let begun = Instant::now();
        for _ in 0..HOPS {
            at = buffer[at * STEP] as usize;
        }
        black_box(at);
        begun.elapsed().as_nanos() as u32 / HOPS
    };
    (0..3).map(|_| hops()).min().expect("three")
}

/// Modifies a page's lines and flushes them, and says what a line of the median page took.
fn line_ns(buffer: &mut [u64], mode: FlushMode) -> u32 {
    const PAGE: usize = LINE * LINES / 8;
    let first = buffer.as_ptr().align_offset(PAGE * 8);
    let pages = buffer[first..].chunks_exact_mut(PAGE).take(501);
    let mut times: Vec<u32> = pages
        .map(|page| {
            page.iter_mut().step_by(LINE / 8).for_each(|w| *w += 1);
            let begun = Instant::now();
            // SAFETY: the page's whole lines, which this function has alone.
            unsafe { flush_range_by(mode, page.as_mut_ptr().cast(), PAGE * 8) };
            begun.elapsed().as_nanos() as u32 / LINES as u32
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_of_the_processor_is_measured() {
        let m = Machine::measured();
        for mode in FlushMode::ALL {
            assert_eq!(m.line(mode).is_some(), mode.is_available(), "{mode:?}");
        }
        assert!(
            m.write_bytes_per_second > 1 << 20 && m.read_ns < 100_000,
            "{m:?}"
        );
    }

    /// A chain that misses lines would stay in a cache.
    #[test]
    fn the_chain_of_reads_meets_each_line() {
        let mut buffer = vec![0_u64; 1 << 12];
        read_ns(&mut buffer);
        let (mut at, mut met) = (0, 0);
        loop {
            at = buffer[at * 8] as usize;
            met += 1;
            if at == 0 {
                break;
            }
        }
        assert_eq!(met, buffer.len() / 8);
    }
}
