//! The engine's needs from the world around it: one node's disk, memory, network, clock and random
//! numbers, passed in.
//!
//! Owns the traits, not an implementation: `mojim-linux` implements them over the
//! kernel, `mojim-sim` from a seed. The engine calls nothing else that could
//! block, fail or differ between two runs.
//!
//! The medium is assumed to do this (the simulated one does no more):
//!
//! - A write to a `File` opened with `durable` has reached the medium when it returns success. If
//!   power is lost during it, any subset of its 512-byte sectors may have reached it.
//! - Any other write may reach the medium at any time, or never, until
//!   `sync` returns success. After `sync` failed, nothing is known.
//! - Creation, renaming and removal are durable after `sync_dir`.
//! - `Memory` keeps its bytes when processes die and loses them with power. Of persistent memory,
//!   stores that were not flushed may reach the medium or not, 8 bytes at a time.
//! - A `Conn` is a byte stream: in order, without gaps, until it breaks. It
//!   can break at any byte, and silently.

use std::any::Any;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// For which purpose a lock is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locker {
    /// A program works with what is locked.
    Program,
    /// A node's daemon itself looks at it, mends it or keeps it for others.
    Node,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenHow {
    /// Create the file if it does not exist.
    pub create: bool,
    /// Allow writing.
    pub write: bool,
    /// Every write is on the medium when it returns, past the page cache:
    /// buffers, offsets and lengths must be multiples of [`Env::sector`].
    pub durable: bool,
    /// It is in a volume's directory, into which anybody may put things: only a plain file that
    /// lies there itself is opened. Another thing is [`NotPlain`], or a directory; no link is
    /// followed, and no pipe is waited for.
    pub plain: bool,
}

impl OpenHow {
    /// To read a data file.
    pub const DATA: OpenHow = OpenHow {
        create: false,
        write: false,
        durable: false,
        plain: true,
    };
}

/// What lies where [`OpenHow::plain`] looks for a file, in words.
#[derive(Debug, thiserror::Error)]
#[error("it is {0}, not a plain file")]
pub struct NotPlain(pub &'static str);

impl NotPlain {
    /// Whether this is why a file was not opened.
    pub fn is(e: &io::Error) -> bool {
        e.get_ref().is_some_and(|e| e.is::<NotPlain>())
    }
}

impl From<NotPlain> for io::Error {
    fn from(e: NotPlain) -> io::Error {
        io::Error::new(io::ErrorKind::AlreadyExists, e)
    }
}

/// One file on this node's disk. All calls may be made from several threads.
pub trait File: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// The same without a wait for the disk, where that can be had: `WouldBlock` if bytes are not in
    /// memory. Then any part of `buf` may be written to.
    fn read_at_once(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read_at(buf, offset)
    }
    /// Writes all of `buf` at `offset`. Beyond [`Env::file_size_limit`] fails
    /// with EFBIG, without a signal.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// Makes everything written before durable (`fdatasync`).
    fn sync(&self) -> io::Result<()>;
    /// Sets the length; new bytes are zero.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// The length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether the length is zero.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Reserves space for `len` bytes, so that later writes within them do not
    /// fail for want of space.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// The next range at or after `offset` that may hold bytes other than zero
    /// (`SEEK_DATA`); `None` if there is none. The answer may be all the rest of
    /// the file.
    fn next_data(&self, offset: u64) -> io::Result<Option<std::ops::Range<u64>>>;
    /// The descriptor, if the file has one, for mapping it.
    fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

/// The file system of a directory, opened so that it can be synced as a whole. It is opened
/// before the first write for which its syncs are to answer.
pub trait FileSystem: Send + Sync {
    /// Makes all that was written to the file system before durable, and all names. It waits
    /// for what other programs have written, too. Fails if any write to the file system failed
    /// since it was opened, or since the last call, whoever had made that write.
    fn sync(&self) -> io::Result<()>;
    /// Whether the file lies on it.
    fn has(&self, file: &dyn File) -> bool;
    /// Whether the directory lies on it.
    fn has_dir(&self, dir: &Path) -> bool;
}

/// Memory that several processes may map. It stays valid while a clone lives.
#[derive(Clone)]
pub struct Memory {
    ptr: *mut u8,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `Memory` is a pointer and a length that its owner keeps valid on
// every thread; all access goes through raw pointers whose users state why
// they do not race.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Wraps memory that lives as long as `owner`.
    ///
    /// # Safety
    /// `ptr .. ptr + len` is readable and writable (or only readable, where
    /// the user of this memory only reads) as long as `owner` lives.
    pub unsafe fn new(ptr: *mut u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Memory {
        Memory { ptr, len, owner }
    }

    /// Its first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What gives this memory for as long as another clone keeps it alive.
    pub fn weak(&self) -> impl Fn() -> Option<Memory> + Send + 'static {
        let (at, len, owner) = (self.ptr as usize, self.len, Arc::downgrade(&self.owner));
        move || {
            let owner = owner.upgrade()?;
            let ptr = at as *mut u8;
            Some(Memory { ptr, len, owner })
        }
    }

    /// The value that keeps the memory alive; an environment downcasts it to its
    /// own type.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }
}

/// What a connection proves about its peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Nothing: the cluster has no keys.
    Nothing,
    /// The peer is a process of this host that could read this process's memory
    /// anyway.
    Local,
    /// The peer is the node of this name, by its certificate.
    Node {
        /// Its name.
        name: String,
        /// Whether the connection is encrypted too.
        encrypted: bool,
    },
    /// The peer is an operator's tool, by its certificate: it may send requests,
    /// and is not a node.
    Client {
        /// Whether the connection is encrypted too.
        encrypted: bool,
    },
}

/// One end of a byte stream. At most one thread sends and one receives; both may
/// do so at the same time.
pub trait Conn: Send + Sync {
    /// Sends some of the bytes; `WouldBlock` if none can be taken now. The caller
    /// must offer the bytes that were not taken again, unchanged, before any
    /// others: some of them may be on their way already.
    fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Receives some bytes; `WouldBlock` if there are none, 0 if the peer closed.
    fn recv(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
    /// Blocks until there may be something to receive, or, with `to_send`,
    /// room to send, or until `timeout`. False after a timeout.
    fn wait(&self, to_send: bool, timeout: Duration) -> io::Result<bool>;
    /// The processor on which the peer last sent, if it is on this host and that is known.
    fn processor(&self) -> Option<usize> {
        None
    }
    /// Closes both directions; a thread in `wait` wakes.
    fn close(&self);
    /// Who is at the other end, for messages.
    fn peer(&self) -> String;
    /// What the connection proves about its peer; known once bytes have been sent
    /// or received.
    fn proof(&self) -> Proof {
        Proof::Nothing
    }
    /// Passes shared memory to the peer, which must be on the same host.
    fn send_memory(&self, _memory: &Memory) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes shared memory that the peer passed, of exactly `len` bytes,
    /// mapped read-only unless `write`.
    fn recv_memory(&self, _len: usize, _write: bool) -> io::Result<Memory> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Where a peer listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix socket, on this host.
    Unix(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Tcp(a) => write!(f, "{a}"),
            Address::Unix(p) => write!(f, "{}", p.display()),
        }
    }
}

/// What a file system has free for users other than root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes; `u64::MAX` if the file system does not count them.
    pub bytes: u64,
    /// Files and directories that can still be made; `u64::MAX` if that has no bound.
    pub files: u64,
    /// The unit in which files take bytes.
    pub block: u32,
}

impl Space {
    /// Of a file system that counts nothing.
    pub const UNBOUNDED: Space = Space {
        bytes: u64::MAX,
        files: u64::MAX,
        block: 4096,
    };
}

/// The longest names that files can have in a directory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Longest {
    /// Of one component of a path.
    pub part: u16,
    /// Of a path within the directory.
    pub path: u16,
}

impl Longest {
    /// In a directory with a short path, on a usual file system.
    pub const USUAL: Longest = Longest {
        part: 255,
        path: 4094,
    };

    /// Whether a file can have this name.
    pub fn takes(self, name: &str) -> bool {
        let part = |p: &str| p.len() <= self.part.into();
        name.len() <= self.path.into() && name.split('/').all(part)
    }

    /// What both directories take.
    pub fn and(self, other: Longest) -> Longest {
        Longest {
            part: self.part.min(other.part),
            path: self.path.min(other.path),
        }
    }
}

/// One node's environment.
pub trait Env: Send + Sync {
    /// Time since some fixed moment; never goes back.
    fn now(&self) -> Duration;
    /// Identifies this boot of the machine.
    fn boot_id(&self) -> [u8; 16];
    /// A random number, never 0.
    fn random(&self) -> u64;
    /// The unit of a durable write, in bytes: a power of two, at least 512.
    fn sector(&self, path: &Path) -> io::Result<usize>;

    /// Opens a file.
    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>>;
    /// Makes a directory and its parents.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// From here on only its owner, and root, come to what is in a directory.
    fn close_dir(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
    /// As [`Env::create_dir_all`], durable only after [`Env::sync_dir`] of each parent.
    fn create_dirs(&self, path: &Path) -> io::Result<()> {
        self.create_dir_all(path)
    }
    /// The file system of a directory. `Unsupported` where its sync would not tell of every
    /// write that failed.
    fn file_system(&self, _dir: &Path) -> io::Result<Arc<dyn FileSystem>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Removes a directory that contains, at any depth, nothing but directories.
    /// Otherwise fails with `DirectoryNotEmpty`; it never removes anything but
    /// directories.
    fn remove_empty_dirs(&self, _path: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// The largest size, in bytes, that the file system allows for a file in this
    /// directory.
    fn max_file_size(&self, _dir: &Path) -> io::Result<u64> {
        Ok(i64::MAX as u64)
    }
    /// Tells a directory from every other one. Fails if this process cannot make files in it, as where it
    /// has another root or another user by now.
    fn reach(&self, _dir: &Path) -> io::Result<(u64, u64)> {
        Ok((0, 0))
    }
    /// The longest names that files can have in this directory.
    fn longest_names(&self, _dir: &Path) -> io::Result<Longest> {
        Ok(Longest::USUAL)
    }
    /// The largest size, in bytes, to which this process may extend a file
    /// (RLIMIT_FSIZE).
    fn file_size_limit(&self) -> u64 {
        u64::MAX
    }
    /// What the file system of `dir` has free.
    fn space(&self, _dir: &Path) -> io::Result<Space> {
        Ok(Space::UNBOUNDED)
    }
    /// The most files of one volume to keep open, since the process's descriptors
    /// must suffice for other uses too.
    fn most_open(&self) -> usize {
        usize::MAX
    }
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Renames a file, replacing any file that has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes creations, renames and removals in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// All regular files below a directory, as paths relative to it.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;
    /// Takes an exclusive lock that is released when the value is dropped or the
    /// process dies. `WouldBlock`, with the holder in the text, if it is taken.
    fn lock(&self, path: &Path, locker: Locker) -> io::Result<Box<dyn Any + Send + Sync>>;
    /// Which kind of holder has the lock of that name. Takes nothing: whoever wants the lock
    /// meanwhile gets it.
    fn locker(&self, path: &Path) -> io::Result<Option<Locker>>;

    /// Named memory that outlives the process but not a power failure: opened if
    /// it exists with this length, else created, zeroed.
    fn memory(&self, path: &Path, len: usize) -> io::Result<Memory>;
    /// Populates the pages of such memory in the background, first to last, so
    /// that a thread that uses them in that order meets no page fault.
    fn populate(&self, _memory: &Memory) {}
    /// Removes such memory's name.
    fn remove_memory(&self, path: &Path) -> io::Result<()>;
    /// Memory shared with a peer for one session, without a name, zeroed, whose
    /// size neither end can change.
    fn anonymous_memory(&self, len: usize) -> io::Result<Memory>;
    /// Persistent memory: a file on DAX, mapped with `MAP_SYNC`.
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory>;
    /// Makes stores to persistent memory durable: flush the lines, then fence.
    fn flush(&self, memory: &Memory, offset: usize, len: usize);
    /// Whether [`Env::arrived`] is to be told of bytes that a link has written into such memory, or
    /// into memory that takes its place.
    fn counts_arrivals(&self) -> bool {
        false
    }
    /// So many bytes came from a link into a log's memory.
    fn arrived(&self, _bytes: usize) {}

    /// Begins to connect; the connection may not be complete on return.
    fn connect(&self, to: &Address) -> io::Result<Arc<dyn Conn>>;
}
