//! A block device of the test's own: one file in a file system in user space,
//! over which a loop device lies.
//!
//! Owns the device's bytes and the history of its requests. Requests are answered one after
//! the other, in the order of the history.
//!
//! - A write that was answered is in the device's cache.
//! - Everything answered before a flush came is on the medium when the flush is answered.
//! - A write with forced unit access (FUA) is on the medium when it is answered, itself
//!   alone.
//!
//! The kernel's loop device has no writes with FUA. So a program writes the file as it would
//! write a disk that has them. Afterwards it says which writes they were ([`Forced`]).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};

use crate::Result;

const DISK: INodeNo = INodeNo(2);
const NAME: &str = "disk";
const TTL: Duration = Duration::from_secs(3600);

/// A request to the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Bytes for an offset, both in whole sectors.
    Write(u64, Vec<u8>),
    /// As `Write`, and durable when it is answered, whatever else is in the device's cache.
    Forced(u64, Vec<u8>),
    /// Everything written before must become durable.
    Flush,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    history: Option<Vec<Event>>,
    clock: Option<Clock>,
    /// The time of each event of the history, if there is a clock.
    times: Vec<u64>,
}

impl State {
    fn note(&mut self, event: impl FnOnce() -> Event) {
        if let Some(history) = &mut self.history {
            history.push(event());
            self.times.extend(self.clock.as_ref().map(|now| now()));
        }
    }
}

impl State {
    /// The last writes of these bytes were forced. False if the history has not all of them.
    fn force(&mut self, at: u64, len: u64) -> bool {
        let Some(history) = &mut self.history else {
            return true;
        };
        let mut left = len;
        for e in history.iter_mut().rev() {
            let Event::Write(from, bytes) = e else {
                continue;
            };
            if (at..at + len).contains(from) && *from + bytes.len() as u64 <= at + len {
                left = left.saturating_sub(bytes.len() as u64);
                *e = Event::Forced(*from, std::mem::take(bytes));
            }
            if left == 0 {
                return true;
            }
        }
        false
    }
}

/// Tells a device which writes were forced.
#[derive(Clone)]
pub struct Forced(Arc<Mutex<State>>);

impl Forced {
    /// The last writes of `len` bytes at `at`, which were answered, were forced.
    pub fn mark(&self, at: u64, len: u64) -> std::io::Result<()> {
        match lock(&self.0).force(at, len) {
            true => Ok(()),
            false => Err(std::io::Error::other(format!(
                "the device was not asked to write {len} bytes at {at}"
            ))),
        }
    }
}

impl std::fmt::Debug for Forced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forced")
    }
}

/// Orders events that are seen in several places: each call returns a larger number.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The device, while it lives.
pub struct Device {
    state: Arc<Mutex<State>>,
    path: PathBuf,
    _session: BackgroundSession,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no thread panics")
}

impl Device {
    /// A device with these bytes, as a file below `at`; the directory is made.
    pub fn new(at: &Path, bytes: Vec<u8>) -> Result<Device> {
        std::fs::create_dir_all(at)?;
        let state = Arc::new(Mutex::new(State {
            bytes,
            ..State::default()
        }));
        let disk = Disk(state.clone());
        let session = Session::new(disk, at, &Config::default()).and_then(Session::spawn);
        Ok(Device {
            state,
            path: at.join(NAME),
            _session: session.map_err(|e| format!("/dev/fuse: {e}"))?,
        })
    }

    /// The path of the device's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For who writes to it by forced writes.
    pub fn forced(&self) -> Forced {
        Forced(self.state.clone())
    }

    /// Records requests from now on.
    pub fn record(&self) {
        lock(&self.state).history = Some(Vec::new());
    }

    /// Records requests from now on, each with a time between its arrival and its answer.
    pub fn record_by(&self, clock: Clock) {
        let mut state = lock(&self.state);
        state.history = Some(Vec::new());
        state.times = Vec::new();
        state.clock = Some(clock);
    }

    /// The requests since recording began, with their times; ends the recording.
    pub fn take_timed_history(&self) -> (Vec<Event>, Vec<u64>) {
        let mut state = lock(&self.state);
        state.clock = None;
        let times = std::mem::take(&mut state.times);
        (state.history.take().unwrap_or_default(), times)
    }

    /// The requests since recording began; ends the recording.
    pub fn take_history(&self) -> Vec<Event> {
        lock(&self.state).history.take().unwrap_or_default()
    }

    /// All bytes, in the device's cache or on its medium.
    pub fn bytes(&self) -> Vec<u8> {
        lock(&self.state).bytes.clone()
    }

    /// Replaces all bytes, as if this were another device.
    pub fn load(&self, bytes: Vec<u8>) {
        lock(&self.state).bytes = bytes;
    }
}

/// The file system.
struct Disk(Arc<Mutex<State>>);

impl Disk {
    fn attributes(&self, number: INodeNo) -> FileAttr {
        let size = lock(&self.0).bytes.len() as u64;
        let is_disk = number == DISK;
        FileAttr {
            ino: number,
            size: if is_disk { size } else { 0 },
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_disk {
                FileType::RegularFile
            } else {
                FileType::Directory
            },
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&TTL, &self.attributes(DISK), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(number));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // The kernel caches nothing of the file and delays nothing.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = lock(&self.0);
        let from = (offset as usize).min(state.bytes.len());
        let to = (from + size as usize).min(state.bytes.len());
        reply.data(&state.bytes[from..to]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = lock(&self.0);
        let at = offset as usize;
        match state.bytes.get_mut(at..at + data.len()) {
            Some(there) => there.copy_from_slice(data),
            None => return reply.error(Errno::ENOSPC),
        }
        state.note(|| Event::Write(offset, data.to_vec()));
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        lock(&self.0).note(|| Event::Flush);
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last writes of a range become forced ones, in their places, whole and no others; and a write that never
    /// came is missed.
    #[test]
    fn forced_writes_are_the_last_ones_of_their_bytes() {
        let write = |at: u64, n: u8| Event::Write(at, vec![n; 512]);
        let forced = |at: u64, n: u8| Event::Forced(at, vec![n; 512]);
        let mut state = State {
            history: Some(vec![
                write(0, 1),
                write(512, 2),
                write(0, 3),
                Event::Flush,
                write(512, 4),
                write(1024, 5),
            ]),
            ..State::default()
        };
        assert!(state.force(0, 1024));
        let mut expected = vec![
            write(0, 1),
            write(512, 2),
            forced(0, 3),
            Event::Flush,
            forced(512, 4),
            write(1024, 5),
        ];
        assert_eq!(state.history.as_ref(), Some(&expected));
        assert!(!state.force(1024, 1024));
        expected[5] = forced(1024, 5);
        assert_eq!(state.history, Some(expected));
    }
}
