//! Keeping the threads that answer the kernel on the processor of the program that asks.
//!
//! Owns who asked lately, and where it runs. A program sleeps while its request is answered, so
//! its processor is free; a thread on another one has to be woken there, and wakes the program
//! from there (measured: 25 to 60 µs for both on a virtual machine, where the answer takes 10).
//! Only one program that asks alone is followed: with two, a thread on the processor of the one
//! would keep the other waiting.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// After so many requests in a row from one thread, and as many again, it is looked where it runs.
const LOOK: u32 = 32;
/// No processor in particular.
const ANY: usize = usize::MAX;

thread_local! {
    /// The processor on which this thread stays.
    static HERE: Cell<usize> = const { Cell::new(ANY) };
}

/// Who asks, and where the threads that answer are to be.
#[derive(Debug)]
pub(crate) struct Beside {
    asker: AtomicU32,
    /// Requests in a row from it.
    row: AtomicU32,
    there: AtomicUsize,
    /// The processors that this process may use.
    all: Option<CpuSet>,
}

impl Beside {
    pub(crate) fn new() -> Beside {
        Beside {
            asker: AtomicU32::new(0),
            row: AtomicU32::new(0),
            there: AtomicUsize::new(ANY),
            all: sched_getaffinity(None).ok(),
        }
    }

    /// The calling thread is to answer a request of the thread `asker` (0: of the kernel's own).
    pub(crate) fn answer(&self, asker: u32) {
        let Some(all) = self.all.as_ref().filter(|_| asker != 0) else {
            return;
        };
        if self.asker.load(Relaxed) != asker {
            self.asker.store(asker, Relaxed);
            self.row.store(0, Relaxed);
            self.there.store(ANY, Relaxed);
        } else if (self.row.fetch_add(1, Relaxed) + 1).is_multiple_of(LOOK) {
            let cpu = processor_of(asker).filter(|cpu| *cpu < CpuSet::MAX_CPU && all.is_set(*cpu));
            self.there.store(cpu.unwrap_or(ANY), Relaxed);
        }
        let there = self.there.load(Relaxed);
        if HERE.replace(there) == there {
            return;
        }
        let mut one = CpuSet::new();
        if there != ANY {
            one.set(there);
        }
        // It is a matter of speed alone.
        let _ = sched_setaffinity(None, if there == ANY { all } else { &one });
    }
}

/// The processor on which a thread ran last.
fn processor_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The name, in brackets, may have anything in it; the processor is the 37th field behind.
    stat.rsplit_once(')')?.1.split(' ').nth(37)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_stay_where_the_one_program_runs_that_asks() {
        let all = sched_getaffinity(None).unwrap();
        let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        // In a thread of its own, since it is moved.
        let answers = std::thread::spawn(move || {
            let beside = Beside::new();
            (0..LOOK).for_each(|_| beside.answer(me));
            assert_eq!(
                sched_getaffinity(None).unwrap(),
                all,
                "not asked for long enough"
            );
            beside.answer(me);
            let here = sched_getaffinity(None).unwrap();
            assert_eq!(here.count(), 1);
            // A request of the kernel's own changes nothing.
            beside.answer(0);
            assert_eq!(sched_getaffinity(None).unwrap(), here);
            // Nobody has this number; and then nobody asks alone.
            beside.answer(u32::MAX);
            assert_eq!(sched_getaffinity(None).unwrap(), all);
            (0..=LOOK).for_each(|_| beside.answer(u32::MAX));
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        });
        answers.join().unwrap();
    }
}
