//! The image: what is to be written to pages of files, merged in memory.
//!
//! Owns the layout of parts in memory. They lie one after the other, so a part costs no allocation
//! of its own. Each has a head of 8 bytes, then its bytes. The head has:
//!
//! - where the part before it of the same page lies, 4 bytes
//! - its length, 2 bytes
//! - its place in the page, 2 bytes
//!
//! Invariants:
//! - Parts of a page are written over it in the order in which they came.
//! - A page has parts, or it is there as a whole.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::{BuildHasher, Hasher};
use std::ops::RangeInclusive;

use mojim_format::bytes::{u16_at, u32_at};

/// Bytes of one page of the image: a unit of merging, not of any hardware.
pub const IMAGE_PAGE: usize = 4096;

/// What a page of the image takes beside its bytes, about.
const PAGE_OVERHEAD: usize = 64;

/// Bytes of a part before its own.
const PART_OVERHEAD: usize = 8;

/// Most bytes of a page's parts: a part that comes to others, beyond that, has the whole page read.
const MOST_PARTS: usize = 2048;

/// In the place of a part before the first one.
const NONE: u32 = u32::MAX;

/// The number of a file, and of a page in it.
pub(super) type At = (u32, u64);

/// What is to be written to a page.
pub(super) enum Page {
    /// Little: only these bytes, as parts.
    Parts {
        /// Where the last one lies.
        last: u32,
        /// Bytes that all of them take.
        bytes: usize,
    },
    /// The whole page, with everything that was written to it.
    Whole(Box<[u8; IMAGE_PAGE]>),
}

/// Pages to which something is to be written.
#[derive(Default)]
pub(super) struct Image {
    pages: HashMap<At, Page, SeededHash>,
    parts: Vec<u8>,
    /// Pages that are there as a whole.
    whole: usize,
}

/// A page has so many parts that it is to be read: [`Image::read`].
pub(super) struct TooMany;

impl Image {
    /// Memory that it takes in bytes, about.
    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * PAGE_OVERHEAD + self.parts.len() + self.whole * IMAGE_PAGE
    }

    /// Whether something is to be written to one of these pages of a file.
    pub(super) fn has(&self, id: u32, pages: RangeInclusive<u64>) -> bool {
        match pages.end() - pages.start() < self.pages.len() as u64 {
            true => pages.into_iter().any(|p| self.pages.contains_key(&(id, p))),
            false => {
                let mut all = self.pages.keys();
                all.any(|(of, page)| *of == id && pages.contains(page))
            }
        }
    }

    /// `bytes` are to be written to the page from `within` on.
    pub(super) fn put(&mut self, at: At, within: usize, bytes: &[u8]) -> Result<(), TooMany> {
        // The area writes the image out long before: behind a record, at 32 MiB.
        assert!(within + bytes.len() <= IMAGE_PAGE && self.parts.len() < NONE as usize);
        if let Ok(whole) = bytes.try_into() {
            match self.pages.entry(at).or_insert(Page::Parts {
                last: NONE,
                bytes: 0,
            }) {
                Page::Whole(page) => **page = whole,
                page => {
                    *page = Page::Whole(Box::new(whole));
                    self.whole += 1;
                }
            }
            return Ok(());
        }
        let (before, taken) = match self.pages.entry(at) {
            Entry::Vacant(page) => {
                page.insert(Page::Parts {
                    last: self.parts.len() as u32,
                    bytes: PART_OVERHEAD + bytes.len(),
                });
                (NONE, 0)
            }
            Entry::Occupied(page) => match page.into_mut() {
                Page::Whole(page) => {
                    page[within..within + bytes.len()].copy_from_slice(bytes);
                    return Ok(());
                }
                Page::Parts { last, bytes: taken } => {
                    let part = Part::at(&self.parts, *last);
                    if (part.within, part.len) == (within, bytes.len()) {
                        self.parts[part.begin..part.begin + bytes.len()].copy_from_slice(bytes);
                        return Ok(());
                    }
                    let before = std::mem::replace(last, self.parts.len() as u32);
                    *taken += PART_OVERHEAD + bytes.len();
                    (before, *taken)
                }
            },
        };
        let place = (within as u32) << 16 | bytes.len() as u32;
        self.parts.extend(before.to_le_bytes());
        self.parts.extend(place.to_le_bytes());
        self.parts.extend(bytes);
        match taken <= MOST_PARTS {
            true => Ok(()),
            false => Err(TooMany),
        }
    }

    /// The page's bytes in its file are these: it is there as a whole from here on.
    pub(super) fn read(&mut self, at: At, mut bytes: Box<[u8; IMAGE_PAGE]>) {
        let Some(page) = self.pages.get_mut(&at) else {
            return;
        };
        write_over(&self.parts, page, &mut bytes[..]);
        *page = Page::Whole(bytes);
        self.whole += 1;
    }

    /// Nothing is to be written to a file.
    pub(super) fn forget(&mut self, id: u32) {
        self.pages.retain(|(of, _), _| *of != id);
    }

    /// Its pages, those of a file one after the other.
    pub(super) fn into_pages(self) -> Pages {
        let mut pages: Vec<_> = self.pages.into_iter().collect();
        pages.sort_unstable_by_key(|(at, _)| *at);
        Pages {
            parts: self.parts,
            pages: pages.into_iter().peekable(),
        }
    }
}

/// The pages of an image, to be written.
pub(super) struct Pages {
    parts: Vec<u8>,
    pages: std::iter::Peekable<std::vec::IntoIter<(At, Page)>>,
}

impl Pages {
    /// The next page.
    pub(super) fn next(&mut self) -> Option<(At, Page)> {
        self.pages.next()
    }

    /// The next page, if it is this one.
    pub(super) fn next_if(&mut self, at: At) -> Option<Page> {
        let next = self.pages.next_if(|(of, _)| *of == at);
        next.map(|(_, page)| page)
    }

    /// The place in the page, and the bytes, if nothing else is to be written to it.
    pub(super) fn only(&self, page: &Page) -> Option<(usize, &[u8])> {
        let Page::Parts { last, .. } = page else {
            return None;
        };
        let part = Part::at(&self.parts, *last);
        let bytes = &self.parts[part.begin..part.begin + part.len];
        (part.before == NONE).then_some((part.within, bytes))
    }

    /// Writes the page over its file's bytes.
    pub(super) fn write_over(&self, page: &Page, bytes: &mut [u8]) {
        write_over(&self.parts, page, bytes);
    }
}

impl Page {
    /// Whether all of its bytes are known.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Page::Whole(_))
    }
}

/// A part, in the memory of all parts.
struct Part {
    before: u32,
    within: usize,
    begin: usize,
    len: usize,
}

impl Part {
    fn at(parts: &[u8], at: u32) -> Part {
        let head = &parts[at as usize..][..PART_OVERHEAD];
        Part {
            before: u32_at(head, 0),
            within: u16_at(head, 6) as usize,
            begin: at as usize + PART_OVERHEAD,
            len: u16_at(head, 4) as usize,
        }
    }
}

fn write_over(parts: &[u8], page: &Page, bytes: &mut [u8]) {
    match page {
        Page::Whole(page) => bytes.copy_from_slice(&page[..]),
        Page::Parts { last, .. } => {
            let mut order = [NONE; MOST_PARTS / PART_OVERHEAD + 1];
            let (mut at, mut count) = (*last, 0);
            while at != NONE {
                order[count] = at;
                count += 1;
                at = u32_at(parts, at as usize);
            }
            for at in order[..count].iter().rev() {
                let p = Part::at(parts, *at);
                bytes[p.within..p.within + p.len].copy_from_slice(&parts[p.begin..p.begin + p.len]);
            }
        }
    }
}

/// Hashes places of pages: a program chooses its pages, but not the seed.
struct SeededHash(u64);

impl Default for SeededHash {
    fn default() -> SeededHash {
        SeededHash(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for SeededHash {
    type Hasher = PlaceHasher;

    fn build_hasher(&self) -> PlaceHasher {
        PlaceHasher(self.0)
    }
}

struct PlaceHasher(u64);

impl Hasher for PlaceHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, n: u64) {
        // Digits of pi.
        let product = (self.0 ^ n) as u128 * 0x243f_6a88_85a3_08d3;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64((*b).into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some bytes, another time others.
    fn bytes(n: u64, len: usize) -> Vec<u8> {
        (0..len).map(|i| (n as usize * 31 + i) as u8 | 1).collect()
    }

    /// Writes that overlap, repeat and fill pages, beside the same in plain memory: what the file
    /// gets is the same, however many parts its pages have.
    #[test]
    fn parts_are_written_in_the_order_in_which_they_came() {
        let old = [7u8; IMAGE_PAGE];
        let mut plain: HashMap<At, [u8; IMAGE_PAGE]> = HashMap::new();
        let mut image = Image::default();
        let mut n = 1u64;
        let mut many = 0;
        for round in 0..4000u64 {
            n ^= n << 13;
            n ^= n >> 7;
            n ^= n << 17;
            // Few pages, of which one is written to seldom.
            let at = (1 + (n % 2) as u32, [0, 1, 1, 1, 9][(n >> 8) as usize % 5]);
            let (within, len) = match round % 97 {
                0 => (0, IMAGE_PAGE),
                r if r % 3 == 0 => (64, 8),
                _ => (
                    (n >> 16) as usize % (IMAGE_PAGE - 300),
                    1 + (n >> 32) as usize % 300,
                ),
            };
            let bytes = bytes(round, len);
            if image.put(at, within, &bytes).is_err() {
                many += 1;
                image.read(at, Box::new(old));
            }
            let page = plain.entry(at).or_insert(old);
            page[within..within + len].copy_from_slice(&bytes);
            if round % 61 == 60 {
                for (id, page) in plain.keys() {
                    assert!(image.has(*id, *page..=*page), "{id} {page}");
                    assert!(image.has(*id, page.saturating_sub(1)..=page + 1));
                }
                assert!(!image.has(3, 0..=u64::MAX) && !image.has(1, 2..=8));
                let mut pages = std::mem::take(&mut image).into_pages();
                let (mut found, mut last) = (0, None);
                while let Some((at, page)) = pages.next() {
                    assert!(last < Some(at), "ascending");
                    last = Some(at);
                    let mut bytes = old;
                    match pages.only(&page) {
                        Some((within, part)) => {
                            bytes[within..within + part.len()].copy_from_slice(part);
                        }
                        None => pages.write_over(&page, &mut bytes),
                    }
                    assert_eq!(bytes[..], plain[&at][..], "page {at:?} in round {round}");
                    found += 1;
                }
                assert_eq!(found, plain.len());
                plain.clear();
                assert_eq!(image.bytes(), 0);
            }
        }
        assert!(many > 10, "{many}");
    }

    /// A program that stores to one place, and then again, has one part.
    #[test]
    fn what_is_written_again_takes_no_more_room() {
        let mut image = Image::default();
        for byte in 1..=3 {
            assert!(image.put((1, 1), 8, &[byte; 8]).is_ok());
        }
        assert_eq!(image.bytes(), PAGE_OVERHEAD + PART_OVERHEAD + 8);
        let mut pages = image.into_pages();
        let (_, page) = pages.next().unwrap();
        assert_eq!(pages.only(&page), Some((8, &[3; 8][..])));
    }

    /// As many parts as a page can have. The page is written out also where it was not read then:
    /// its file told of an error.
    #[test]
    fn the_smallest_parts_are_told_apart() {
        let mut image = Image::default();
        let mut plain = [7; IMAGE_PAGE];
        let mut count = 0;
        loop {
            let (within, byte) = (count % 2 * 100 + count / 9, count as u8);
            plain[within] = byte;
            count += 1;
            if image.put((1, 0), within, &[byte]).is_err() {
                break;
            }
        }
        assert_eq!(count, MOST_PARTS / (PART_OVERHEAD + 1) + 1);
        let mut pages = image.into_pages();
        let (_, page) = pages.next().unwrap();
        let mut bytes = [7; IMAGE_PAGE];
        pages.write_over(&page, &mut bytes);
        assert_eq!(bytes, plain);
    }

    #[test]
    fn what_is_forgotten_is_not_written() {
        let mut image = Image::default();
        for id in 1..=2 {
            for page in 0..3 {
                assert!(image.put((id, page), 1, &[5]).is_ok());
            }
        }
        image.forget(1);
        assert!(!image.has(1, 0..=5) && image.has(2, 2..=2) && !image.has(2, 3..=u64::MAX));
        let mut pages = image.into_pages();
        assert!(pages.next_if((2, 1)).is_none());
        let mut next = || pages.next().map(|(at, _)| at);
        assert_eq!(
            [next(), next(), next(), next()],
            [Some((2, 0)), Some((2, 1)), Some((2, 2)), None]
        );
    }
}
