//! Where a program that is measured stores next, and what: the same for a volume
//! and for a rival.

use mojim_env::rng::Rng;

/// Bytes of each mapped file.
pub const REGION: usize = 16 << 20;

/// Where a program stores next, and what: some page of its file, with bytes that
/// it never had before.
pub struct Store {
    page: usize,
    random: Rng,
    bytes: Vec<u8>,
}

impl Store {
    /// A file's first store, of no bytes yet.
    pub fn new() -> Store {
        Store {
            page: rustix::param::page_size(),
            random: Rng::new(1),
            bytes: Vec::new(),
        }
    }

    /// From now on this many bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.bytes = vec![0x5a; bytes];
    }

    /// The offset in the file, and the bytes.
    pub fn next(&mut self) -> (usize, &[u8]) {
        let random = self.random.next();
        let pages = (REGION - self.bytes.len()) / self.page;
        let at = (random % pages as u64) as usize * self.page;
        let stamp = random.to_le_bytes();
        let n = stamp.len().min(self.bytes.len());
        self.bytes[..n].copy_from_slice(&stamp[..n]);
        (at, &self.bytes)
    }
}
