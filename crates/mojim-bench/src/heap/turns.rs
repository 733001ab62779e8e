//! The requests to allocators: cases, and turns at them.

use std::io;
use std::time::Instant;

use super::allocator::Allocator;
use mojim_env::rng::Rng;

/// Live blocks of a thread.
const SLOTS: usize = 1024;

/// The requests of a thread: which block, and its next size.
fn requests(mixed: bool, n: usize, seed: u64) -> Vec<(u16, u16)> {
    let mut rng = Rng::new(seed);
    let mut next = || rng.next() >> 11;
    let size = |r: u64| match mixed {
        false => 16 + (r % 241) as u16,
        // As many of each doubling.
        true => {
            let low = 16u64 << (r % 10);
            (low + (r >> 8) % low) as u16
        }
    };
    (0..n)
        .map(|_| ((next() % SLOTS as u64) as u16, size(next())))
        .collect()
}

/// A thread's live blocks.
struct Table {
    allocator: Allocator,
    live: Vec<*mut u64>,
}

// SAFETY: blocks may be freed by any thread.
unsafe impl Send for Table {}

impl Table {
    fn new(allocator: Allocator) -> Table {
        let live = (0..SLOTS).map(|_| allocator.malloc(64)).collect();
        Table { allocator, live }
    }

    /// Nanoseconds for each request.
    fn run(&mut self, requests: &[(u16, u16)]) -> io::Result<f64> {
        let begin = Instant::now();
        for &(slot, size) in requests {
            let p = &mut self.live[slot as usize];
            self.allocator.free(*p);
            *p = self.allocator.malloc(size as usize);
            if p.is_null() {
                return Err(io::Error::other("no block"));
            }
            // SAFETY: a block of at least 16 bytes.
            unsafe { **p = u64::from(size) };
        }
        Ok(begin.elapsed().as_nanos() as f64 / requests.len() as f64)
    }
}

pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// What an allocator has to do, again and again: how many threads, and with which sizes.
#[derive(Clone, Copy, PartialEq)]
pub struct Case {
    pub mixed: bool,
    pub threads: usize,
    /// Operations of each thread in a turn.
    pub ops: usize,
}

/// An allocator's blocks in a case.
pub struct Turns {
    tables: Vec<Table>,
    requests: Vec<Vec<(u16, u16)>>,
}

impl Turns {
    pub fn new(allocator: Allocator, case: Case) -> Turns {
        let seed = |t| 88172645463325252 + t as u64;
        Turns {
            tables: (0..case.threads).map(|_| Table::new(allocator)).collect(),
            requests: (0..case.threads)
                .map(|t| requests(case.mixed, case.ops, seed(t)))
                .collect(),
        }
    }

    /// Nanoseconds for each request; the median of the threads.
    pub fn turn(&mut self) -> io::Result<f64> {
        let work = self.tables.iter_mut().zip(&self.requests);
        let took: io::Result<Vec<f64>> = std::thread::scope(|s| {
            let all: Vec<_> = work.map(|(t, r)| s.spawn(move || t.run(r))).collect();
            let joined = all
                .into_iter()
                .map(|t| t.join().expect("it does not panic"));
            joined.collect()
        });
        Ok(median(took?))
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        for t in &self.tables {
            t.live.iter().for_each(|p| t.allocator.free(*p));
        }
    }
}
