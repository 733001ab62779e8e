//! The connection to the kernel, /dev/fuse.
//!
//! Requests are read from it, answers and notices are written to it.
//!
//! Owns its descriptor. Several threads read from it, and each read gets one request.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mojim_format::bytes::Writer;
use rustix::io::{Errno, read, writev};

use crate::calls::{Calls, HEADER, Head, Raw, serve};
use crate::init::MOST;
use crate::reply::Transport;

/// The notice that something the kernel keeps of a file is so no longer.
const INVAL_INODE: i32 = 2;
/// The notice that bytes which the kernel keeps of a file are wanted.
const RETRIEVE: i32 = 5;

pub(crate) struct Device(pub(crate) OwnedFd);

/// What comes of a read.
pub(crate) enum Came {
    /// A request of so many bytes.
    Request(usize),
    /// The connection has ended.
    End,
}

impl Device {
    /// A buffer for [`Device::receive`]: the longest request is a write.
    pub(crate) fn buffer() -> Vec<u8> {
        vec![0; MOST as usize + 4096]
    }

    /// Waits for a request.
    ///
    /// # Errors
    /// The system's, which no connection gets over.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<Came, Errno> {
        loop {
            match read(&self.0, &mut *buffer) {
                Ok(len) => return Ok(Came::Request(len)),
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(Came::End),
                // Who asked was interrupted before the request was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Serves requests until the connection ends.
    pub(crate) fn serve(self: &Arc<Device>, calls: &dyn Calls) {
        let by: Arc<dyn Transport> = self.clone();
        let mut buffer = Device::buffer();
        loop {
            let len = match self.receive(&mut buffer) {
                Ok(Came::Request(len)) => len,
                Ok(Came::End) => return,
                Err(e) => {
                    let e = std::io::Error::from(e);
                    tracing::error!("a thread serves no more: reading /dev/fuse: {e}");
                    return;
                }
            };
            match raw(&buffer[..len]) {
                Some(raw) => drop(serve(calls, &raw, &by, 0)),
                None => tracing::error!("a request of {len} bytes has no header"),
            }
        }
    }

    /// Has the kernel forget attributes of a file, and, unless `offset` is negative, its bytes from there,
    /// `len` of them or, with 0, all. What was stored into mappings is written back first.
    pub(crate) fn inval_inode(&self, ino: u64, offset: i64, len: i64) -> Result<(), Errno> {
        let mut body = Vec::new();
        let mut w = Writer(&mut body);
        w.u64(ino).u64(offset as u64).u64(len as u64);
        self.write(0, INVAL_INODE, &body)
    }

    /// Has the kernel make a request in the name of the calling thread, that awaits no answer: with none of the
    /// bytes of a file.
    pub(crate) fn ask(&self, unique: u64, file: u64) -> Result<(), Errno> {
        let mut body = Vec::new();
        let mut w = Writer(&mut body);
        w.u64(unique).u64(file).u64(0).u32(0).u32(0);
        self.write(0, RETRIEVE, &body)
    }

    fn write(&self, unique: u64, error: i32, body: &[u8]) -> Result<(), Errno> {
        let mut header = Vec::with_capacity(16);
        let mut w = Writer(&mut header);
        w.u32((16 + body.len()) as u32)
            .u32(error as u32)
            .u64(unique);
        let all = [IoSlice::new(&header), IoSlice::new(body)];
        loop {
            match writev(&self.0, &all) {
                Err(Errno::INTR) => {}
                written => return written.map(drop),
            }
        }
    }
}

impl Transport for Device {
    fn answer(&self, _place: u32, unique: u64, error: i32, body: Vec<u8>) {
        match self.write(unique, -error, &body) {
            // Nobody waits for it any more.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::PERM) => {}
            Err(e) => tracing::error!("answering the kernel: {}", std::io::Error::from(e)),
        }
    }

    fn is_beside(&self) -> bool {
        false
    }
}

/// A request as it is read. One without its whole argument has none.
pub(crate) fn raw(bytes: &[u8]) -> Option<Raw<'_>> {
    let head = Head::read(bytes).ok()?;
    let body = &bytes[HEADER..];
    let (argument, rest) = body
        .split_at_checked(head.argument())
        .unwrap_or((&[], body));
    Some(Raw {
        head,
        argument,
        rest,
    })
}
