//! Answers to the kernel: their bytes, and that each request has one.
//!
//! Invariant: a [`Reply`] answers once: it is consumed by that, and one that is dropped says EIO.

use std::sync::Arc;
use std::time::Duration;

use mojim_format::bytes::Writer;
use rustix::io::Errno;

use crate::name_table::Time;

/// The way by which a request came, and its answer goes.
pub(crate) trait Transport: Send + Sync {
    /// Answers the request `unique`, which was given `place` when it came: `error` is 0, or an error's
    /// number.
    fn answer(&self, place: u32, unique: u64, error: i32, body: Vec<u8>);

    /// Whether the thread that serves is on the processor of who asks by itself.
    fn is_beside(&self) -> bool;
}

/// The attributes of a node.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attr {
    pub(crate) ino: u64,
    pub(crate) size: u64,
    /// Of 512 bytes.
    pub(crate) blocks: u64,
    pub(crate) accessed: Time,
    pub(crate) modified: Time,
    pub(crate) changed: Time,
    /// The type and the permissions.
    pub(crate) mode: u32,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) device: u32,
}

impl Attr {
    fn write(&self, w: &mut Writer<'_>) {
        let times = [self.accessed, self.modified, self.changed];
        w.u64(self.ino).u64(self.size).u64(self.blocks);
        for (seconds, _) in times {
            w.u64(seconds as u64);
        }
        for (_, nanoseconds) in times {
            w.u32(nanoseconds);
        }
        w.u32(self.mode).u32(self.links);
        w.u32(self.uid).u32(self.gid).u32(self.device);
        // The size of blocks, and flags.
        w.u32(4096).u32(0);
    }
}

/// What a name leads to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryOut {
    pub(crate) attr: Attr,
    pub(crate) generation: u64,
    /// How long the kernel may keep this.
    pub(crate) kept: Duration,
}

impl EntryOut {
    fn write(&self, w: &mut Writer<'_>) {
        let (seconds, nanoseconds) = (self.kept.as_secs(), self.kept.subsec_nanos());
        w.u64(self.attr.ino).u64(self.generation);
        w.u64(seconds).u64(seconds);
        w.u32(nanoseconds).u32(nanoseconds);
        self.attr.write(w);
    }
}

/// Entries of a directory, as many as there is room for.
pub(crate) struct Entries {
    bytes: Vec<u8>,
    room: usize,
}

impl Entries {
    /// For an answer of `room` bytes at most.
    pub(crate) fn new(room: u32) -> Entries {
        let (bytes, room) = (Vec::new(), room as usize);
        Entries { bytes, room }
    }

    /// Adds an entry behind which the listing goes on at `next`; `found` is there if attributes were
    /// asked for. False if it has no room.
    #[must_use]
    pub(crate) fn add(
        &mut self,
        (ino, mode): (u64, u32),
        next: u64,
        name: &[u8],
        found: Option<&EntryOut>,
    ) -> bool {
        let before = self.bytes.len();
        let mut w = Writer(&mut self.bytes);
        if let Some(found) = found {
            found.write(&mut w);
        }
        w.u64(ino).u64(next);
        w.u32(name.len() as u32).u32((mode & libc::S_IFMT) >> 12);
        w.raw(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let fits = self.bytes.len() <= self.room;
        if !fits {
            self.bytes.truncate(before);
        }
        fits
    }
}

/// What there is of a file system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Space {
    pub(crate) blocks: u64,
    pub(crate) free: u64,
    pub(crate) available: u64,
    pub(crate) files: u64,
    pub(crate) free_files: u64,
    pub(crate) block: u32,
    pub(crate) fragment: u32,
}

/// How the kernel treats a file that was opened.
pub(crate) mod opened {
    /// It keeps no bytes: each read and write comes here.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// It keeps those that it has.
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
}

/// The answer that a request awaits.
pub(crate) struct Reply {
    to: Arc<dyn Transport>,
    place: u32,
    unique: u64,
    is_due: bool,
}

impl Reply {
    /// That of the request `unique`, which came by `to`, where it has `place`.
    pub(crate) fn new(to: Arc<dyn Transport>, place: u32, unique: u64) -> Reply {
        Reply {
            to,
            place,
            unique,
            is_due: true,
        }
    }

    fn send(&mut self, error: i32, body: Vec<u8>) {
        self.is_due = false;
        self.to.answer(self.place, self.unique, error, body);
    }

    fn with(mut self, write: impl FnOnce(&mut Writer<'_>)) {
        let mut body = Vec::with_capacity(144);
        write(&mut Writer(&mut body));
        self.send(0, body);
    }

    /// The call failed.
    pub(crate) fn error(mut self, e: Errno) {
        self.send(e.raw_os_error(), Vec::new());
    }

    /// It was made.
    pub(crate) fn ok(self) {
        self.data(Vec::new());
    }

    /// It was made, or not.
    pub(crate) fn done(self, done: Result<(), Errno>) {
        match done {
            Ok(()) => self.ok(),
            Err(e) => self.error(e),
        }
    }

    pub(crate) fn data(mut self, bytes: Vec<u8>) {
        self.send(0, bytes);
    }

    pub(crate) fn entries(self, entries: Entries) {
        self.data(entries.bytes);
    }

    pub(crate) fn found(self, found: &EntryOut) {
        self.with(|w| found.write(w));
    }

    /// There is no such name, which the kernel may keep for so long.
    pub(crate) fn nothing(self, kept: Duration) {
        let (attr, generation) = (Attr::default(), 0);
        self.found(&EntryOut {
            attr,
            generation,
            kept,
        });
    }

    /// A file was made, and opened.
    pub(crate) fn created(self, found: &EntryOut, handle: u64, flags: u32) {
        self.with(|w| {
            found.write(w);
            w.u64(handle).u32(flags).u32(0);
        });
    }

    pub(crate) fn opened(self, handle: u64, flags: u32) {
        self.with(|w| {
            w.u64(handle).u32(flags).u32(0);
        });
    }

    /// Attributes that the kernel may keep for so long.
    pub(crate) fn attr(self, attr: &Attr, kept: Duration) {
        self.with(|w| {
            w.u64(kept.as_secs()).u32(kept.subsec_nanos()).u32(0);
            attr.write(w);
        });
    }

    /// So many bytes: of a write, or that a list of names has.
    pub(crate) fn size(self, bytes: u32) {
        self.with(|w| {
            w.u32(bytes).u32(0);
        });
    }

    pub(crate) fn offset(self, at: u64) {
        self.with(|w| {
            w.u64(at);
        });
    }

    pub(crate) fn space(self, s: &Space) {
        const LONGEST_NAME: u32 = 255;
        self.with(|w| {
            w.u64(s.blocks).u64(s.free).u64(s.available);
            w.u64(s.files).u64(s.free_files);
            w.u32(s.block).u32(LONGEST_NAME).u32(s.fragment);
            w.raw(&[0; 28]);
        });
    }

    /// A value of which the caller takes `room` bytes, or, with 0, asks the length.
    pub(crate) fn value(self, room: u32, value: Result<Vec<u8>, Errno>) {
        match value {
            Ok(v) if room == 0 => self.size(v.len() as u32),
            Ok(v) if v.len() > room as usize => self.error(Errno::RANGE),
            Ok(v) => self.data(v),
            Err(e) => self.error(e),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.is_due {
            self.send(Errno::IO.raw_os_error(), Vec::new());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// The place, the request, the error, the body.
    type Answer = (u32, u64, i32, Vec<u8>);

    /// Keeps what was answered.
    #[derive(Default)]
    pub(crate) struct Kept(pub(crate) Mutex<Vec<Answer>>);

    impl Transport for Kept {
        fn answer(&self, place: u32, unique: u64, error: i32, body: Vec<u8>) {
            self.0.lock().unwrap().push((place, unique, error, body));
        }

        fn is_beside(&self) -> bool {
            true
        }
    }

    fn answered(f: impl FnOnce(Reply)) -> (i32, Vec<u8>) {
        let kept = Arc::new(Kept::default());
        f(Reply::new(kept.clone(), 5, 7));
        let mut all = kept.0.lock().unwrap();
        assert_eq!(all.len(), 1, "one answer");
        let (place, unique, error, body) = all.remove(0);
        assert_eq!((place, unique), (5, 7));
        (error, body)
    }

    const ATTR: Attr = Attr {
        ino: 2,
        size: 3,
        blocks: 4,
        accessed: (-5, 6),
        modified: (7, 8),
        changed: (9, 10),
        mode: libc::S_IFREG | 0o640,
        links: 11,
        uid: 12,
        gid: 13,
        device: 14,
    };

    #[test]
    fn each_request_has_one_answer() {
        assert_eq!(answered(drop), (libc::EIO, vec![]));
        assert_eq!(answered(Reply::ok), (0, vec![]));
        assert_eq!(answered(|r| r.error(Errno::XDEV)), (libc::EXDEV, vec![]));
        assert_eq!(answered(|r| r.data(b"abc".to_vec())), (0, b"abc".to_vec()));
        assert_eq!(
            answered(|r| r.value(0, Ok(vec![1; 9]))),
            (0, vec![9, 0, 0, 0, 0, 0, 0, 0])
        );
        assert_eq!(
            answered(|r| r.value(8, Ok(vec![1; 9]))),
            (libc::ERANGE, vec![])
        );
        assert_eq!(answered(|r| r.value(9, Ok(vec![1; 9]))).1, [1; 9]);
    }

    /// The kernel refuses an answer of another length.
    #[test]
    fn answers_have_the_kernels_lengths() {
        let found = EntryOut {
            attr: ATTR,
            generation: 1,
            kept: Duration::from_secs(1),
        };
        assert_eq!(answered(|r| r.found(&found)).1.len(), 128);
        assert_eq!(answered(|r| r.created(&found, 1, 2)).1.len(), 144);
        assert_eq!(answered(|r| r.opened(1, 2)).1.len(), 16);
        assert_eq!(answered(|r| r.size(1)).1.len(), 8);
        assert_eq!(answered(|r| r.offset(1)).1.len(), 8);
        let space = Space {
            blocks: 1,
            free: 2,
            available: 3,
            files: 4,
            free_files: 5,
            block: 6,
            fragment: 7,
        };
        assert_eq!(answered(|r| r.space(&space)).1.len(), 80);
        let (_, body) = answered(|r| r.attr(&ATTR, Duration::ZERO));
        assert_eq!(body.len(), 104);
        let word = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        // The seconds of the last access, its nanoseconds, mode, links and owner.
        assert_eq!((word(40), word(44)), (-5i32 as u32, u32::MAX));
        assert_eq!(
            [64, 76, 80, 84, 88, 92].map(word),
            [6, ATTR.mode, 11, 12, 13, 14]
        );
    }

    #[test]
    fn a_listing_has_whole_entries_only() {
        let found = EntryOut {
            attr: ATTR,
            generation: 1,
            kept: Duration::ZERO,
        };
        let mut entries = Entries::new(64);
        let dir = (2, libc::S_IFDIR);
        assert!(entries.add(dir, 1, b"12345678", None));
        assert!(entries.add(dir, 2, b"a", None));
        assert!(!entries.add(dir, 3, b"b", None));
        let (_, body) = answered(|r| r.entries(entries));
        assert_eq!(body.len(), 32 + 32);
        assert_eq!(&body[16..20], &8u32.to_le_bytes());
        assert_eq!(&body[20..24], &4u32.to_le_bytes());
        assert_eq!(&body[56..], b"a\0\0\0\0\0\0\0");
        let mut entries = Entries::new(160);
        assert!(entries.add(dir, 1, b"12345678", Some(&found)));
        assert!(!entries.add(dir, 2, b"", Some(&found)));
        assert_eq!(answered(|r| r.entries(entries)).1.len(), 160);
    }
}
