//! The words of a log's ring, and the memory in which they are.
//!
//! Owns what a position means as a word, and how words in a row are flushed.

use mojim::Result;
use mojim_format::persistent::LOG_RING_WORD;

/// Memory in words of 8 bytes, whose stores become durable by flushes and fences.
pub trait Medium {
    /// A word.
    fn load(&self, word: usize) -> u64;
    /// Changes a word: durable, whole, some time after it is flushed, or before.
    fn store(&mut self, word: usize, value: u64);
    /// Begins to make words durable.
    fn flush(&mut self, word: usize, words: usize);
    /// Waits until what was flushed is durable.
    fn fence(&mut self) -> Result<()>;
    /// What was flushed is durable before anything that is stored from here on.
    fn order(&mut self) -> Result<()> {
        self.fence()
    }
}

/// What is left out, or done wrongly, to check the checker.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defect {
    /// The last word of a record is not flushed.
    LastWord,
    /// An append does not fence.
    Fence,
    /// Two fences: the first one.
    Order,
    /// Torn bit: it is not flipped when the ring wraps.
    SameBit,
    /// Torn bit: what a torn append left is not cleaned away.
    Stale,
    /// Checksum: it is not compared.
    Sum,
    /// Truncation does not fence.
    Truncate,
}

/// The words of a ring.
pub struct Ring<M> {
    /// Where they are.
    pub medium: M,
    /// How many.
    pub words: usize,
    /// The log's random number.
    pub salt: u64,
    /// Checksums: the number of this opening of the log.
    pub opening: u64,
    /// What is done wrongly.
    pub defect: Option<Defect>,
}

impl<M: Medium> Ring<M> {
    pub fn has(&self, defect: Defect) -> bool {
        cfg!(feature = "mutations") && self.defect == Some(defect)
    }

    pub fn word(&self, position: u64) -> usize {
        LOG_RING_WORD + (position % self.words as u64) as usize
    }

    pub fn load(&self, position: u64) -> u64 {
        self.medium.load(self.word(position))
    }

    pub fn store(&mut self, position: u64, value: u64) {
        let word = self.word(position);
        self.medium.store(word, value);
    }

    /// Flushes words in a row, which may wrap.
    pub fn flush(&mut self, position: u64, words: usize) {
        let words = words - usize::from(self.has(Defect::LastWord));
        let first = self.word(position);
        let end = LOG_RING_WORD + self.words;
        let front = words.min(end - first);
        self.medium.flush(first, front);
        if words > front {
            self.medium.flush(LOG_RING_WORD, words - front);
        }
    }

    pub fn fence(&mut self) -> Result<()> {
        match self.has(Defect::Fence) {
            true => Ok(()),
            false => self.medium.fence(),
        }
    }

    /// One word of the header, durable.
    pub fn set(&mut self, word: usize, value: u64) -> Result<()> {
        self.medium.store(word, value);
        self.medium.flush(word, 1);
        self.medium.fence()
    }

    /// Words `from..`, as bytes, appended to `out`.
    pub fn bytes(&self, from: u64, len: usize, out: &mut Vec<u8>) {
        let end = out.len() + len;
        for n in 0..len.div_ceil(8) as u64 {
            out.extend_from_slice(&self.load(from + n).to_le_bytes());
        }
        out.truncate(end);
    }
}

/// The eight bytes of a record at `n * 8`, filled with zeros.
pub fn word_of(bytes: &[u8], n: usize) -> u64 {
    let rest = &bytes[n * 8..];
    match rest.first_chunk::<8>() {
        Some(word) => u64::from_le_bytes(*word),
        None => {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            u64::from_le_bytes(word)
        }
    }
}
