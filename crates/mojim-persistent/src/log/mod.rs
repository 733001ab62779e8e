//! A log: records that are appended, read, and discarded from the front.
//!
//! Owns the ring of words, its header, and the three encodings of a record. All access to
//! memory goes through [`Medium`], so that the simulator can enumerate what a loss of power may
//! leave at each fence. `docs/reference/format.md`, "Append-only logs".
//!
//! Invariants:
//! - A record is read after a crash if its append had returned, and only whole.
//! - A position is the number of words before a record since the log was made: it never wraps.
//! - Words that are in use are not stored to before the head that frees them is durable.
//!
//! Source: Mnemosyne, "High performance logging".

mod checksum;
mod fences;
mod ring;
mod starts;
mod torn;

use mojim::{Error, Result};
use mojim_format::crc32c;
use mojim_format::persistent::{
    LOG_FIXED_WORDS, LOG_HEAD_WORD, LOG_MAGIC, LOG_OPENING_WORD, LOG_RING_WORD, LOG_TAIL_WORD,
};

#[doc(hidden)]
pub use ring::Defect;
pub use ring::Medium;
use ring::Ring;
use starts::Starts;

/// How the end of a log is found after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Encoding {
    /// 63 bits of each word are the record's; the other one says in which pass over the ring
    /// the word was stored. One fence an append.
    TornBit = 1,
    /// The tail is stored behind the record. Two fences an append.
    TwoFences = 2,
    /// Each record has a checksum. One fence an append. The only one that finds damaged bytes.
    Checksum = 3,
}

impl Encoding {
    /// All of them, with their names.
    pub const ALL: [(Encoding, &'static str); 3] = [
        (Encoding::TornBit, "torn-bit"),
        (Encoding::TwoFences, "two-fences"),
        (Encoding::Checksum, "checksum"),
    ];

    /// The encoding of a number in a header.
    pub fn of(number: u32) -> Option<Encoding> {
        let mut all = Encoding::ALL.into_iter();
        all.find(|(e, _)| *e as u32 == number).map(|(e, _)| e)
    }
}

/// Fewest and most words of a ring.
const RING_WORDS: std::ops::RangeInclusive<usize> = 16..=1 << 40;
/// Positions stay below this: enough for an append each nanosecond over 140 years.
const MOST: u64 = 1 << 62;

/// A log. One thread at a time uses it.
pub struct Log<M> {
    ring: Ring<M>,
    encoding: Encoding,
    head: u64,
    tail: u64,
    starts: Starts,
}

impl<M: Medium> Log<M> {
    /// Words of a medium with room for a ring of `bytes`.
    pub fn words_for(bytes: usize) -> usize {
        LOG_RING_WORD + bytes.div_ceil(8).max(*RING_WORDS.start())
    }

    /// Whether the medium holds a log: false if it was never made, or not completed.
    pub fn is_there(medium: &M) -> bool {
        medium.load(0) == LOG_MAGIC
    }

    /// Makes a log on a medium of `words` words, whose ring is all zeros.
    pub fn make(medium: &mut M, words: usize, encoding: Encoding, salt: u64) -> Result<()> {
        let fixed = [
            LOG_MAGIC,
            encoding as u64,
            (words - LOG_RING_WORD) as u64,
            salt,
        ];
        let sum = u64::from(header_sum(&fixed));
        for (word, value) in fixed.into_iter().chain([sum]).enumerate().skip(1) {
            medium.store(word, value);
        }
        medium.flush(1, LOG_FIXED_WORDS - 1);
        medium.order()?;
        // It is there from this word on.
        medium.store(0, LOG_MAGIC);
        medium.flush(0, 1);
        medium.fence()
    }

    /// Opens a log on a medium of `words` words, and finds its end.
    ///
    /// # Errors
    /// A text that says what is damaged: `Ok(Err(_))`; those of the medium.
    pub fn open(medium: M, words: usize) -> Result<Result<Log<M>, String>> {
        Log::open_with(medium, words, None)
    }

    #[doc(hidden)]
    pub fn open_with(
        medium: M,
        words: usize,
        defect: Option<Defect>,
    ) -> Result<Result<Log<M>, String>> {
        let fixed: Vec<u64> = (0..4).map(|w| medium.load(w)).collect();
        if fixed[0] != LOG_MAGIC {
            return Ok(Err("it is no log".into()));
        }
        if medium.load(4) != u64::from(header_sum(&fixed)) {
            return Ok(Err("its header is damaged".into()));
        }
        let encoding = u32::try_from(fixed[1]).ok().and_then(Encoding::of);
        let Some(encoding) = encoding else {
            return Ok(Err(format!("encoding {} is not known", fixed[1])));
        };
        let ring = usize::try_from(fixed[2]).unwrap_or(usize::MAX);
        if !RING_WORDS.contains(&ring) || words - LOG_RING_WORD < ring {
            return Ok(Err(format!(
                "its ring has {ring} words, its memory {words}"
            )));
        }
        let head = medium.load(LOG_HEAD_WORD);
        if head > MOST {
            return Ok(Err(format!("its head is {head}")));
        }
        let mut log = Log {
            ring: Ring {
                medium,
                words: ring,
                salt: fixed[3],
                opening: 0,
                defect,
            },
            encoding,
            head,
            tail: head,
            starts: Starts::new(ring),
        };
        log.find_tail()?;
        Ok(Ok(log))
    }

    /// Finds the end, and makes what is behind it unreadable.
    fn find_tail(&mut self) -> Result<()> {
        let tail = match self.encoding {
            Encoding::TwoFences => self.ring.medium.load(LOG_TAIL_WORD),
            _ => u64::MAX,
        };
        let mut opening = None;
        while self.tail < tail
            && let Some(next) = self.next(self.tail, &mut Vec::new())
        {
            if self.encoding == Encoding::Checksum {
                let of = checksum::opening(&self.ring, self.tail);
                if opening.is_some_and(|before| !checksum::is_from(of, before)) {
                    break;
                }
                opening = Some(of);
            }
            self.starts.push(self.tail);
            self.tail = next;
        }
        match self.encoding {
            Encoding::TornBit => {
                let behind = self.tail..self.end();
                torn::clean(&mut self.ring, behind)
            }
            Encoding::TwoFences if tail != self.tail => self.ring.set(LOG_TAIL_WORD, self.tail),
            Encoding::TwoFences => Ok(()),
            Encoding::Checksum => {
                // The count may be damaged, too. It is durable with the first append.
                let counted = self.ring.medium.load(LOG_OPENING_WORD);
                let next = checksum::next_opening(counted);
                self.ring.opening = match opening {
                    Some(last) if !checksum::is_from(next, checksum::next_opening(last)) => {
                        checksum::next_opening(last)
                    }
                    _ => next,
                };
                self.ring.medium.store(LOG_OPENING_WORD, self.ring.opening);
                self.ring.medium.flush(LOG_OPENING_WORD, 1);
                Ok(())
            }
        }
    }

    /// Where the words end that an append may use.
    fn end(&self) -> u64 {
        self.head + self.ring.words as u64
    }

    /// Reads the record at a position into `out`; the position behind it, or `None` if no whole
    /// record begins there.
    fn next(&self, at: u64, out: &mut Vec<u8>) -> Option<u64> {
        let room = self.end() - at;
        match self.encoding {
            Encoding::TornBit => torn::read(&self.ring, at, room, out),
            Encoding::TwoFences => fences::read(&self.ring, at, room, out),
            Encoding::Checksum => checksum::read(&self.ring, at, room, out),
        }
    }

    /// Whether one of the log's records begins at a position.
    fn begins(&self, at: u64) -> bool {
        if !(self.head..self.tail).contains(&at) {
            return false;
        }
        let Some(mut walk) = self.starts.before(at) else {
            return false;
        };
        while walk < at {
            let len = match self.encoding {
                Encoding::TornBit => torn::len(&self.ring, walk),
                Encoding::TwoFences => fences::len(&self.ring, walk),
                Encoding::Checksum => checksum::len(&self.ring, walk),
            };
            // Memory that was stored to by others may have any length.
            match len / 8 < (self.end() - walk) {
                true => walk += self.takes(len as usize) as u64,
                false => return false,
            }
        }
        walk == at
    }

    /// The encoding.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Position of the oldest record; the end, if there is none.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Position behind the last record.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Words that a record of `len` bytes takes.
    fn takes(&self, len: usize) -> usize {
        match self.encoding {
            Encoding::TornBit => torn::words(len),
            Encoding::TwoFences => 1 + len.div_ceil(8),
            Encoding::Checksum => 2 + len.div_ceil(8),
        }
    }

    /// Bytes of the largest record that fits now.
    pub fn room(&self) -> usize {
        let words = (self.end() - self.tail) as usize;
        match self.encoding {
            Encoding::TornBit => words.saturating_sub(1) * 63 / 8,
            Encoding::TwoFences => words.saturating_sub(1) * 8,
            Encoding::Checksum => words.saturating_sub(2) * 8,
        }
    }

    /// Appends a record; returns its position, when it is durable.
    ///
    /// # Errors
    /// `Io` with ENOBUFS if it does not fit: nothing has changed. Those of the medium, a full disk
    /// among them: the record is in doubt; it is there if a later append succeeds.
    pub fn append(&mut self, record: &[u8]) -> Result<u64> {
        let words = self.takes(record.len());
        if words as u64 > self.end() - self.tail {
            return Err(Error::Io {
                what: format!("appending {} bytes to a log", record.len()),
                errno: libc::ENOBUFS,
                error: format!("it has room for {}: discard old records first", self.room()),
            });
        }
        let at = self.tail;
        self.starts.push(at);
        self.tail += words as u64;
        match self.encoding {
            Encoding::TornBit => torn::append(&mut self.ring, at, record)?,
            Encoding::TwoFences => fences::append(&mut self.ring, at, self.tail, record)?,
            Encoding::Checksum => checksum::append(&mut self.ring, at, record)?,
        }
        Ok(at)
    }

    /// Reads the record at a position into `out`, which is cleared first; returns the position
    /// of the next one. `None` at the end.
    ///
    /// # Errors
    /// `Invalid` if no record begins there.
    pub fn read(&self, at: u64, out: &mut Vec<u8>) -> Result<Option<u64>> {
        out.clear();
        if at == self.tail {
            return Ok(None);
        }
        let next = match self.begins(at) {
            true => self.next(at, out).filter(|next| *next <= self.tail),
            false => None,
        };
        match next {
            Some(next) => Ok(Some(next)),
            None => Err(Error::Invalid(format!(
                "no record of the log begins at {at} (they begin at {} and end at {})",
                self.head, self.tail
            ))),
        }
    }

    /// Discards the records before a position, durably: one store of 8 bytes.
    ///
    /// # Errors
    /// `Invalid` if no record begins there, nor ends the log. Those of the medium: whether the
    /// records are there after a crash is in doubt.
    pub fn truncate(&mut self, to: u64) -> Result<()> {
        if to != self.tail && !self.begins(to) {
            return Err(Error::Invalid(format!(
                "no record of the log begins at {to} (they begin at {} and end at {})",
                self.head, self.tail
            )));
        }
        self.ring.medium.store(LOG_HEAD_WORD, to);
        self.ring.medium.flush(LOG_HEAD_WORD, 1);
        if !self.ring.has(Defect::Truncate) {
            self.ring.medium.fence()?;
        }
        self.head = to;
        self.starts.cut(to);
        Ok(())
    }

    /// The medium.
    pub fn medium(&mut self) -> &mut M {
        &mut self.ring.medium
    }
}

fn header_sum(fixed: &[u64]) -> u32 {
    let bytes: Vec<u8> = fixed.iter().flat_map(|w| w.to_le_bytes()).collect();
    crc32c(&bytes)
}

#[cfg(test)]
mod tests;
