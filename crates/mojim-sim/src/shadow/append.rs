//! The log of `mojim-persistent` over persistent memory, in each of its encodings.
//!
//! Owns how a log's state is numbered: each event, an append or a discarding, makes the sum of
//! the numbers of its first and its last record greater.

use std::path::Path;
use std::sync::Arc;

use mojim_env::locks::lock;
use mojim_env::{Env, Memory};
use mojim_persistent::log::{Log, Medium};

use super::medium::Shadow;
use super::model::{Broken, Content, Model, Named, System};
use crate::memory::LINE;
use crate::rng::Rng;

/// Words of the memory: the ring wraps every few records.
const WORDS: usize = 64 + 44;
/// Where the log begins in the memory: behind what the machine takes for an engine's figures.
const BEGIN: usize = 4096;

struct Words {
    env: Arc<Shadow>,
    memory: Memory,
    flushed: Vec<(usize, usize)>,
}

impl Words {
    fn at(&self, word: usize) -> *mut u64 {
        assert!(word < WORDS);
        // SAFETY: inside the memory.
        unsafe { self.memory.ptr().add(BEGIN).cast::<u64>().add(word) }
    }
}

impl Medium for Words {
    fn load(&self, word: usize) -> u64 {
        // SAFETY: inside the memory, which one thread uses.
        unsafe { self.at(word).read() }
    }

    fn store(&mut self, word: usize, value: u64) {
        // SAFETY: as above.
        unsafe { self.at(word).write(value) }
    }

    fn flush(&mut self, word: usize, words: usize) {
        self.flushed.push((word, words));
    }

    fn fence(&mut self) -> mojim_env::Result<()> {
        for (word, words) in self.flushed.drain(..) {
            self.env.flush(&self.memory, BEGIN + word * 8, words * 8);
        }
        Ok(())
    }
}

pub(super) struct Append {
    log: Log<Words>,
    /// The records with their positions, oldest first.
    all: Vec<(u64, Vec<u8>)>,
}

fn number(record: &[u8]) -> u64 {
    let word = record
        .first_chunk()
        .expect("a record begins with its number");
    u64::from_le_bytes(*word)
}

impl Append {
    fn state(all: &[(u64, Vec<u8>)]) -> (u64, Content) {
        let (Some(first), Some(last)) = (all.first(), all.last()) else {
            return (0, Content::new());
        };
        let bytes = |r: &(u64, Vec<u8>)| [&[r.1.len() as u8][..], &r.1].concat();
        let bytes = Arc::new(all.iter().flat_map(bytes).collect());
        let content = [("log".to_owned(), Named { id: 0, bytes })];
        (number(&first.1) + number(&last.1), Content::from(content))
    }

    fn read(&mut self) -> Result<(), String> {
        let (mut at, mut record) = (self.log.head(), Vec::new());
        while let Some(next) = self.log.read(at, &mut record).map_err(|e| e.to_string())? {
            if record.len() < 8 {
                return Err(format!("torn: a record of {} bytes", record.len()));
            }
            self.all.push((at, record.clone()));
            at = next;
        }
        Ok(())
    }

    /// Discards all records before the one of this index.
    fn discard(&mut self, n: usize, model: &Model) -> Result<(), String> {
        let state = Append::state(&self.all[n..]);
        lock(model).states.push(state.clone());
        let done = self.log.truncate(self.all[n].0);
        done.map_err(|e| e.to_string())?;
        self.all.drain(..n);
        lock(model).acked = state.0;
        Ok(())
    }
}

impl System for Append {
    fn open(env: &Arc<Shadow>, broken: Option<Broken>) -> Result<Append, String> {
        let Some(Broken::Append(encoding, defect)) = broken else {
            unreachable!("a log has an encoding");
        };
        // Whole lines, as the machine takes memory.
        let len = (BEGIN + WORDS * 8).next_multiple_of(LINE);
        let memory = env.persistent_memory(Path::new("/p/log"), len);
        let mut words = Words {
            env: env.clone(),
            memory: memory.map_err(|e| e.to_string())?,
            flushed: Vec::new(),
        };
        if !Log::is_there(&words) {
            let made = Log::make(&mut words, WORDS, encoding, env.random());
            made.map_err(|e| e.to_string())?;
        }
        let log = Log::open_with(words, WORDS, defect).map_err(|e| e.to_string())?;
        let mut found = Append {
            log: log.map_err(|e| format!("torn: {e}"))?,
            all: Vec::new(),
        };
        found.read()?;
        Ok(found)
    }

    fn found(&self) -> Result<(u64, Content), String> {
        Ok(Append::state(&self.all))
    }

    fn step(&mut self, rng: &mut Rng, model: &Model) -> Result<(), String> {
        let mut record = vec![0; rng.between(8, 40) as usize];
        record.chunks_mut(8).for_each(|c| {
            let word = match rng.below(4) {
                0 => [0; 8],
                1 => [0xff; 8],
                _ => rng.next_u64().to_le_bytes(),
            };
            c.copy_from_slice(&word[..c.len()]);
        });
        let last = self.all.last().map_or(0, |r| number(&r.1));
        record[..8].copy_from_slice(&(last + 1).to_le_bytes());
        let full = self.log.room() < record.len();
        if self.all.len() > 1 && (full || rng.below(4) == 0) {
            // Never the last one, which tells how far the log has come.
            let n = rng.between(1, self.all.len() as u64 - 1);
            self.discard(n as usize, model)?;
            if self.log.room() < record.len() {
                return Ok(());
            }
        }
        let mut all = self.all.clone();
        all.push((self.log.tail(), record.clone()));
        let state = Append::state(&all);
        lock(model).states.push(state.clone());
        self.log.append(&record).map_err(|e| e.to_string())?;
        self.all = all;
        lock(model).acked = state.0;
        Ok(())
    }

    fn end(&mut self, _model: &Model) -> Result<(), String> {
        Ok(())
    }
}
