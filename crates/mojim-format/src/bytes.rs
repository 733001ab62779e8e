//! Reading and writing little-endian fields: a cursor each way.
//!
//! `Reader` returns errors, never panics. `Writer` writes into a caller's `Vec`. The sync path uses
//! fixed offsets instead and never comes here.

use crate::FormatError;

/// Reads a `u16` at `at`. The caller has checked the length.
#[inline]
pub fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// Reads a `u32` at `at`. The caller has checked the length.
#[inline]
pub fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().expect("four bytes"))
}

/// Reads a `u64` at `at`. The caller has checked the length.
#[inline]
pub fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().expect("eight bytes"))
}

/// Reads fields one after another.
pub struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
    whole: usize,
}

impl<'a> Reader<'a> {
    /// A reader over `bytes`; `what` names the structure in errors.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Reader {
            what,
            rest: bytes,
            whole: bytes.len(),
        }
    }

    /// The next `n` bytes.
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], FormatError> {
        if self.rest.len() < n {
            let used = self.whole - self.rest.len();
            return Err(FormatError::Short {
                what: self.what,
                have: self.whole,
                need: used.saturating_add(n),
            });
        }
        let (a, b) = self.rest.split_at(n);
        self.rest = b;
        Ok(a)
    }

    /// The next byte.
    pub fn u8(&mut self) -> Result<u8, FormatError> {
        Ok(self.take(1)?[0])
    }

    /// The next byte as a truth value: 0 or 1, nothing else.
    pub fn bool(&mut self, field: &'static str) -> Result<bool, FormatError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            v => Err(FormatError::Field {
                what: self.what,
                field,
                value: v as u64,
            }),
        }
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Result<u16, FormatError> {
        Ok(u16_at(self.take(2)?, 0))
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32_at(self.take(4)?, 0))
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64_at(self.take(8)?, 0))
    }

    /// A text of at most `max` bytes, after its `u16` length.
    pub fn text(&mut self, field: &'static str, max: usize) -> Result<&'a str, FormatError> {
        let n = self.u16()? as usize;
        if n > max {
            return Err(FormatError::Field {
                what: self.what,
                field,
                value: n as u64,
            });
        }
        std::str::from_utf8(self.take(n)?).map_err(|_| FormatError::Name {
            what: self.what,
            field,
        })
    }

    /// Everything not yet read.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Bytes not yet read.
    pub fn left(&self) -> usize {
        self.rest.len()
    }
}

/// Appends fields one after another.
pub struct Writer<'a>(pub &'a mut Vec<u8>);

impl Writer<'_> {
    /// One byte.
    pub fn u8(&mut self, v: u8) -> &mut Self {
        self.0.push(v);
        self
    }

    /// Two bytes.
    pub fn u16(&mut self, v: u16) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Four bytes.
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Eight bytes.
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    /// Bytes as they are.
    pub fn raw(&mut self, v: &[u8]) -> &mut Self {
        self.0.extend_from_slice(v);
        self
    }

    /// A text, after its `u16` length. A text longer than that allows is the caller's mistake.
    pub fn text(&mut self, v: &str) -> &mut Self {
        let n = u16::try_from(v.len()).expect("a name fits 65,535 bytes");
        self.u16(n).raw(v.as_bytes())
    }
}
