//! Parts of a page, in the order in which they were written.
//!
//! Owns their layout in memory: of each part its place and length, 4 bytes each,
//! then its bytes.

use mojim_format::bytes::u32_at;

/// Bytes that a part takes beside its own: its place and length.
pub const PART_OVERHEAD: usize = 8;

/// Parts of one page.
#[derive(Debug, Default)]
pub struct PageDelta(Vec<u8>);

impl PageDelta {
    /// Whether there are no parts.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes that the parts take, with their places and lengths.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a part: `bytes`, written to the page from `at` on.
    pub fn push(&mut self, at: usize, bytes: &[u8]) {
        self.0.extend((at as u32).to_le_bytes());
        self.0.extend((bytes.len() as u32).to_le_bytes());
        self.0.extend(bytes);
    }

    /// Writes the parts over `page`.
    pub fn put(&self, page: &mut [u8]) {
        let mut rest = &self.0[..];
        while let Some((at, len, more)) = first(rest) {
            page[at..at + len].copy_from_slice(&more[..len]);
            rest = &more[len..];
        }
    }
}

/// Place and length of the first part, and what follows them.
fn first(parts: &[u8]) -> Option<(usize, usize, &[u8])> {
    let (head, more) = parts.split_first_chunk::<PART_OVERHEAD>()?;
    Some((u32_at(head, 0) as usize, u32_at(head, 4) as usize, more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_parts_win() {
        let mut parts = PageDelta::default();
        parts.push(2, b"xyz");
        parts.push(4, b"12");
        parts.push(0, b"");
        let mut page = *b"........";
        parts.put(&mut page);
        assert_eq!(&page, b"..xy12..");
        assert_eq!(parts.len(), 3 * PART_OVERHEAD + 5);
    }
}
