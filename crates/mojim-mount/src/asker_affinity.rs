//! Keeping the threads that answer the kernel on the processor of the program that asks.
//!
//! Owns who asked lately, and where it runs. A program sleeps while its request is answered, so its
//! processor is free. A thread on another one has to be woken there, and wakes the program from
//! there. Both together were measured at 25 to 60 µs on a virtual machine, where the answer takes
//! 10. Only one program that asks alone is followed. With two, a thread on the processor of the one
//! would keep the other waiting. A program that does not sleep meanwhile is not followed either.
//!
//! Invariant: a thread that is kept to one processor gets back all that it may use when it first
//! answers a request of anybody else.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use mojim_env::processors::home;
use rustix::thread::{CpuSet, sched_setaffinity};

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
pub(crate) struct AskerAffinity {
    asker: AtomicU32,
    /// Requests in a row from it.
    row: AtomicU32,
    there: AtomicUsize,
    /// The processors that the threads may use otherwise.
    all: Option<CpuSet>,
}

impl AskerAffinity {
    pub(crate) fn new() -> AskerAffinity {
        AskerAffinity {
            asker: AtomicU32::new(0),
            row: AtomicU32::new(0),
            there: AtomicUsize::new(ANY),
            all: home(),
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
        if HERE.get() == there {
            return;
        }
        let mut one = CpuSet::new();
        if there != ANY {
            one.set(there);
        }
        // If that fails, it is tried again: it is a matter of speed alone.
        if sched_setaffinity(None, if there == ANY { all } else { &one }).is_ok() {
            HERE.set(there);
        }
    }
}

/// The processor on which a thread ran last that sleeps now.
fn processor_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The name, in brackets, may have anything in it. Behind it, the first field is the state, and
    // the 37th the processor.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    fields.next().filter(|state| ["S", "D"].contains(state))?;
    fields.nth(35)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{gettid, sched_getaffinity};

    #[test]
    fn threads_stay_where_the_one_program_sleeps_that_asks() {
        let all = sched_getaffinity(None).unwrap();
        let me = gettid().as_raw_nonzero().get() as u32;
        let (asks, asked) = std::sync::mpsc::channel::<()>();
        // In a thread of its own, since it is moved.
        let answers = std::thread::spawn(move || {
            let affinity = AskerAffinity::new();
            let now = || sched_getaffinity(None).unwrap();
            (0..LOOK).for_each(|_| affinity.answer(me));
            assert_eq!(now(), all, "not for long enough");
            // It may not sleep yet.
            while now() == all && all.count() > 1 {
                affinity.answer(me);
            }
            let here = now();
            assert_eq!(here.count(), 1);
            // A request of the kernel's own changes nothing.
            affinity.answer(0);
            assert_eq!(now(), here);
            // Another one asks, which is never asleep: this thread.
            let busy = gettid().as_raw_nonzero().get() as u32;
            affinity.answer(busy);
            assert_eq!(now(), all);
            (0..=LOOK).for_each(|_| affinity.answer(busy));
            assert_eq!(now(), all);
            drop(asks);
        });
        let _ = asked.recv();
        answers.join().unwrap();
    }
}
