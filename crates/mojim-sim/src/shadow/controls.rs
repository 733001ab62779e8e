//! Three small programs over persistent memory, to check the checker: one
//! stores in place (`naive`), one acknowledges before its log is durable
//! (`nosync`), one is a plain correct redo log (`log`).
//!
//! Owns their formats. Words 0 to 63 of the memory are the data. Word 64 is the number of
//! the record up to which they are current. The records follow at `LOG`.

use std::path::Path;
use std::sync::Arc;

use mojim_env::locks::lock;
use mojim_env::{Env, Memory};

use super::medium::Shadow;
use super::model::{Broken, Content, Model, Named, System};
use crate::rng::Rng;

const DATA: u64 = 64;
const CHECKPOINT: usize = 512;
const LOG: usize = 4096;
const LEN: usize = LOG + 1024;

pub(super) struct Control {
    env: Arc<Shadow>,
    memory: Memory,
    kind: Broken,
    last: u64,
    head: usize,
    data: Vec<u64>,
    /// For `nosync`: the range that is still to be flushed.
    late: Option<(usize, usize)>,
}

fn sum(words: &[u64]) -> u64 {
    words
        .iter()
        .fold(0x6a09_e667_f3bc_c909, |s, w| Rng::new(s ^ w).next_u64())
}

impl Control {
    fn load(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8) && at + 8 <= LEN);
        // SAFETY: inside the memory and aligned; one thread only.
        unsafe { self.memory.ptr().add(at).cast::<u64>().read() }
    }

    fn store(&self, at: usize, word: u64) {
        assert!(at.is_multiple_of(8) && at + 8 <= LEN);
        // SAFETY: as above.
        unsafe { self.memory.ptr().add(at).cast::<u64>().write(word) }
    }

    fn flush(&self, at: usize, len: usize) {
        self.env.flush(&self.memory, at, len);
    }

    /// The record at `at`, if it is number `n`: its changes and its end.
    fn record(&self, at: usize, n: u64) -> Option<(Vec<(u64, u64)>, usize)> {
        if at + 16 > LEN || self.load(at) != n || !(1..=4).contains(&self.load(at + 8)) {
            return None;
        }
        let end = at + 16 + self.load(at + 8) as usize * 16;
        if end + 8 > LEN {
            return None;
        }
        let words: Vec<u64> = (at..end).step_by(8).map(|a| self.load(a)).collect();
        let changes = words[2..].chunks(2).map(|c| (c[0] % DATA, c[1])).collect();
        (self.load(end) == sum(&words)).then_some((changes, end + 8))
    }

    /// Makes the data current as of the last record, and starts the log again.
    fn checkpoint(&mut self) {
        for (i, word) in self.data.iter().enumerate() {
            self.store(i * 8, *word);
        }
        self.flush(0, DATA as usize * 8);
        self.store(CHECKPOINT, self.last);
        self.flush(CHECKPOINT, 8);
        self.head = LOG;
    }

    fn flush_late(&mut self) {
        if let Some((at, len)) = self.late.take() {
            self.flush(at, len);
        }
    }
}

impl System for Control {
    fn open(env: &Arc<Shadow>, kind: Option<Broken>) -> Result<Control, String> {
        let memory = env.persistent_memory(Path::new("/p/memory"), LEN);
        let mut c = Control {
            env: env.clone(),
            memory: memory.map_err(|e| e.to_string())?,
            kind: kind.expect("a control has a name"),
            last: 0,
            head: LOG,
            data: Vec::new(),
            late: None,
        };
        c.data = (0..DATA as usize).map(|i| c.load(i * 8)).collect();
        if c.kind == Broken::Naive {
            c.last = c.data[0];
            return Ok(c);
        }
        c.last = c.load(CHECKPOINT);
        while let Some((changes, end)) = c.record(c.head, c.last + 1) {
            for (i, word) in changes {
                c.data[i as usize] = word;
            }
            c.last += 1;
            c.head = end;
        }
        c.checkpoint();
        Ok(c)
    }

    fn found(&self) -> Result<(u64, Content), String> {
        let bytes = self.data.iter().flat_map(|w| w.to_le_bytes()).collect();
        let bytes = Arc::new(bytes);
        Ok((
            self.last,
            Content::from([("memory".to_owned(), Named { id: 0, bytes })]),
        ))
    }

    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String> {
        self.flush_late();
        let n = self.last + 1;
        let mut changes: Vec<(u64, u64)> = (0..rng.between(1, 3))
            .map(|_| (rng.between(1, DATA - 1), rng.next_u64()))
            .collect();
        changes.push((0, n));
        if self.head + 24 + changes.len() * 16 > LEN {
            self.checkpoint();
        }
        for (i, word) in &changes {
            self.data[*i as usize] = *word;
        }
        self.last = n;
        let state = (n, self.found()?.1);
        lock(model).states.push(state);
        if self.kind == Broken::Naive {
            for (i, word) in &changes {
                self.store(*i as usize * 8, *word);
            }
            self.flush(0, DATA as usize * 8);
            lock(model).acked = n;
            return Ok(());
        }
        let mut words = vec![n, changes.len() as u64];
        words.extend(changes.iter().flat_map(|(i, w)| [*i, *w]));
        words.push(sum(&words));
        for (i, word) in words.iter().enumerate() {
            self.store(self.head + i * 8, *word);
        }
        self.late = Some((self.head, words.len() * 8));
        self.head += words.len() * 8;
        if self.kind == Broken::Log {
            self.flush_late();
        }
        lock(model).acked = n;
        Ok(())
    }

    fn end(&mut self, _model: &Model) -> Result<(), String> {
        if self.kind != Broken::Naive {
            self.flush_late();
            self.checkpoint();
        }
        Ok(())
    }
}
