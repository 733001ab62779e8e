//! The steps that the threads of a program begin and have acknowledged, with the time of
//! each, in memory that other processes share.
//!
//! Owns the clock: a number that grows by one with each reading. Invariants: a step's
//! first time is taken before its sync point is called, the second after this call has
//! returned success. So an event that another event caused has a later time, in whichever
//! processes they are.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The most threads of a program.
pub const THREADS: usize = 8;
/// The most steps of a thread.
pub const STEPS: usize = 1 << 14;
const CLOCK: usize = 0;
const READY: usize = 1;
const FIRST: usize = 8;
const LEN: usize = (FIRST + THREADS * STEPS * 2) * 8;

/// The journal, as one process sees it.
pub struct Journal(*mut AtomicU64);

// SAFETY: memory that is mapped as long as this lives, used by atomic words.
unsafe impl Send for Journal {}
// SAFETY: as above.
unsafe impl Sync for Journal {}

impl Journal {
    /// Opens the journal, and creates it if it does not exist.
    pub fn open(path: &Path) -> io::Result<Journal> {
        let mut how = File::options();
        let file = how.read(true).write(true).create(true).truncate(false);
        let file = file.open(path)?;
        file.set_len(LEN as u64)?;
        // SAFETY: a new shared mapping of the whole file, whose length does not change
        // afterwards.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                LEN,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Journal(at.cast()))
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < LEN / 8);
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { &*self.0.add(i) }
    }

    fn step(&self, thread: usize, step: u64) -> usize {
        assert!(thread < THREADS && (1..=STEPS as u64).contains(&step));
        FIRST + (thread * STEPS + step as usize - 1) * 2
    }

    /// The next time of the clock.
    pub fn now(&self) -> u64 {
        self.word(CLOCK).fetch_add(1, SeqCst) + 1
    }

    /// Everything is set up: this is acknowledged like a step.
    pub fn ready(&self) {
        self.word(READY).store(self.now(), SeqCst);
    }

    /// When everything was set up, if it was.
    pub fn readied(&self) -> Option<u64> {
        Some(self.word(READY).load(SeqCst)).filter(|t| *t > 0)
    }

    /// A thread is about to call the sync point of this step.
    pub fn begin(&self, thread: usize, step: u64) {
        let at = self.step(thread, step);
        self.word(at).store(self.now(), SeqCst);
    }

    /// This step's call has returned success.
    pub fn acknowledge(&self, thread: usize, step: u64) {
        let at = self.step(thread, step) + 1;
        self.word(at).store(self.now(), SeqCst);
    }

    /// How many steps of a thread are acknowledged.
    pub fn acknowledged(&self, thread: usize) -> u64 {
        let all = 1..=STEPS as u64;
        let is = |s: &u64| self.word(self.step(thread, *s) + 1).load(SeqCst) > 0;
        all.take_while(is).count() as u64
    }

    /// The whole journal, as it is now.
    pub fn told(&self, threads: usize) -> Told {
        let of = |thread: usize| {
            let steps = (1..=STEPS as u64).map(|s| {
                let at = self.step(thread, s);
                // The later word is read first: if it is set, the earlier one is set too.
                let acknowledged = self.word(at + 1).load(SeqCst);
                (self.word(at).load(SeqCst), acknowledged)
            });
            steps.take_while(|(begun, _)| *begun > 0).collect()
        };
        Told {
            ready: self.readied().unwrap_or(u64::MAX),
            threads: (0..threads).map(of).collect(),
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: made by `open`, and no word is borrowed any more.
        unsafe { libc::munmap(self.0.cast(), LEN) };
    }
}

/// What was begun and acknowledged.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// When everything was set up.
    pub ready: u64,
    /// For each thread and each step, when it was begun and when acknowledged (0: never).
    pub threads: Vec<Vec<(u64, u64)>>,
}

impl Told {
    /// The last step of a thread that was acknowledged before `time`.
    pub fn acknowledged(&self, thread: usize, time: u64) -> u64 {
        let steps = &self.threads[thread];
        steps.partition_point(|(_, a)| *a > 0 && *a < time) as u64
    }

    /// The last step of a thread that was begun before `time`.
    pub fn begun(&self, thread: usize, time: u64) -> u64 {
        self.threads[thread].partition_point(|(b, _)| *b < time) as u64
    }

    /// What is wrong with the order of the steps that were found: `whole` has the last
    /// step of each thread that is there, `part` the last of which there is something. It
    /// is wrong if a step is missing that had been acknowledged when another step began,
    /// and there is something of that other step.
    pub fn disorder(&self, whole: &[u64], part: &[u64]) -> Option<String> {
        for (i, n) in part.iter().enumerate().filter(|(_, n)| **n > 0) {
            let (begun, _) = self.threads[i][*n as usize - 1];
            for (j, m) in whole.iter().enumerate() {
                let before = self.acknowledged(j, begun);
                if before > *m {
                    return Some(format!(
                        "thread {i} has step {n}, which began when step {before} of thread {j} was acknowledged, of which there is {m}"
                    ));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_read_in_its_order() {
        let path = std::env::temp_dir().join(format!("mojim-journal-{}", std::process::id()));
        let (mine, other) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        assert_eq!(other.readied(), None);
        mine.ready();
        mine.begin(0, 1);
        mine.acknowledge(0, 1);
        mine.begin(1, 1);
        mine.begin(0, 2);
        mine.acknowledge(0, 2);
        let told = other.told(2);
        assert_eq!(told.ready, 1);
        assert_eq!(told.threads, vec![vec![(2, 3), (5, 6)], vec![(4, 0)]]);
        assert_eq!((told.acknowledged(0, 3), told.acknowledged(0, 4)), (0, 1));
        assert_eq!((told.begun(1, 4), told.begun(1, 5)), (0, 1));
        assert_eq!((other.acknowledged(0), other.acknowledged(1)), (2, 0));
        assert_eq!(told.disorder(&[1, 1], &[1, 1]), None);
        assert!(told.disorder(&[0, 1], &[0, 1]).is_some());
        // Something of a step is as good as all of it, on this side only.
        assert!(told.disorder(&[0, 0], &[1, 1]).is_some());
        std::fs::remove_file(&path).unwrap();
    }
}
