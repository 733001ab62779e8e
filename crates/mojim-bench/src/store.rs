//! Where a program that is measured stores next, and what: the same for a volume
//! and for a rival.

/// Bytes of each mapped file.
pub const REGION: usize = 16 << 20;

/// Where a program stores next, and what: some page of its file, with bytes that
/// it never had before.
pub struct Store {
    page: usize,
    random: u64,
    bytes: Vec<u8>,
}

impl Store {
    /// A file's first store, of no bytes yet.
    pub fn new() -> Store {
        Store {
            page: rustix::param::page_size(),
            random: 0x9e37_79b9_7f4a_7c15,
            bytes: Vec::new(),
        }
    }

    /// From now on this many bytes.
    pub fn resize(&mut self, bytes: usize) {
        self.bytes = vec![0x5a; bytes];
    }

    /// The offset in the file, and the bytes.
    pub fn next(&mut self) -> (usize, &[u8]) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = (REGION - self.bytes.len()) / self.page;
        let at = (self.random % pages as u64) as usize * self.page;
        let stamp = self.random.to_le_bytes();
        let n = stamp.len().min(self.bytes.len());
        self.bytes[..n].copy_from_slice(&stamp[..n]);
        (at, &self.bytes)
    }
}
