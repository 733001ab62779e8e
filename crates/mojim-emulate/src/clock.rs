//! Time in nanoseconds that a thread can wait for exactly, without a system call.
//!
//! Owns the rate of the processor's time-stamp counter. The rate is found once for each process.
//! Where the counter's rate varies, or another processor is below, the system's clock is read instead.
//!
//! Invariant: a wait never ends early.

use std::hint::spin_loop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long the counter is compared with the system's clock.
const COMPARED: Duration = Duration::from_millis(20);

/// A wait that has less than these nanoseconds left only looks at the clock.
const PAUSES: u64 = 200;

/// The clock of this process.
#[derive(Debug)]
pub struct Clock {
    origin: Instant,
    /// Where the time-stamp counter is used.
    counter: Option<Rate>,
}

/// How the counter's ticks become nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Rate {
    /// The counter at the clock's origin.
    origin: u64,
    /// Nanoseconds of 2^32 ticks.
    nanos: u64,
}

impl Clock {
    /// The clock. The first call takes some 20 ms.
    pub fn get() -> &'static Clock {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        CLOCK.get_or_init(Clock::calibrated)
    }

    fn calibrated() -> Clock {
        let origin = Instant::now();
        let counter = counter::is_steady().then(|| {
            let (first, last) = (both(), after(COMPARED));
            let ticks = last.1.wrapping_sub(first.1).max(1);
            let nanos = last.0.duration_since(first.0).as_nanos();
            let since = first.0.duration_since(origin).as_nanos();
            let nanos = ((nanos << 32) / u128::from(ticks)).max(1);
            let before = (since << 32) / nanos;
            Rate {
                origin: first.1.wrapping_sub(before as u64),
                nanos: nanos as u64,
            }
        });
        Clock { origin, counter }
    }

    /// How this clock measures, for a report.
    pub fn source(&self) -> &'static str {
        match self.counter {
            Some(_) => "time-stamp counter",
            None => "clock of the system",
        }
    }

    /// Nanoseconds since some moment.
    #[inline]
    pub fn now(&self) -> u64 {
        match self.counter {
            Some(rate) => {
                let ticks = counter::read().wrapping_sub(rate.origin);
                ((u128::from(ticks) * u128::from(rate.nanos)) >> 32) as u64
            }
            None => self.origin.elapsed().as_nanos() as u64,
        }
    }

    /// Waits until this moment. The thread keeps its processor.
    #[inline]
    pub fn wait_until(&self, due: u64) {
        loop {
            match due.saturating_sub(self.now()) {
                0 => return,
                // A pause takes up to 50 ns, and would end late.
                1..PAUSES => {}
                _ => spin_loop(),
            }
        }
    }
}

/// Both clocks at one moment: the pair that was read in the least time of several.
fn both() -> (Instant, u64) {
    let read = || {
        let before = counter::read();
        let at = Instant::now();
        (counter::read().wrapping_sub(before), (at, before))
    };
    (0..32).map(|_| read()).min_by_key(|r| r.0).expect("32").1
}

/// Both clocks, when this time is over.
fn after(time: Duration) -> (Instant, u64) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        spin_loop();
    }
    both()
}

#[cfg(target_arch = "x86_64")]
mod counter {
    /// Whether the counter has one rate, also while the processor changes its own.
    pub(super) fn is_steady() -> bool {
        use std::arch::x86_64::__cpuid;
        // Safe to call in newer compilers, unsafe in older ones.
        #[allow(unused_unsafe)]
        // SAFETY: every x86_64 processor has cpuid, and the second leaf is asked only if the first
        // says that it is there.
        unsafe {
            __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx & 1 << 8 != 0
        }
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86_64 processor that Linux runs on has the counter.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    pub(super) fn is_steady() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rate that was calculated wrongly made every delay of the emulator wrong by as much.
    #[test]
    fn the_clock_runs_as_fast_as_the_system_s() {
        let clock = Clock::get();
        // A thread that loses its processor between two reads sees a wrong difference. Of many
        // pairs one is read without a break.
        let pair = || {
            let (a, before) = (Instant::now(), clock.now());
            while a.elapsed() < Duration::from_millis(2) {
                spin_loop();
            }
            let (b, after) = (Instant::now(), clock.now());
            (after - before) as f64 / b.duration_since(a).as_nanos() as f64
        };
        let off = (0..100).map(|_| (pair() - 1.0).abs());
        let least = off.fold(f64::INFINITY, f64::min);
        assert!(
            least < 0.005,
            "the clock is wrong by {:.2} %",
            least * 100.0
        );
    }

    #[test]
    fn a_wait_never_ends_early() {
        let clock = Clock::get();
        for nanos in [0, 1, 30, 1_000, 50_000] {
            let begun = clock.now();
            clock.wait_until(begun + nanos);
            assert!(clock.now() - begun >= nanos);
        }
    }
}
