//! The kernel's requests, decoded.
//!
//! Owns the numbers and the bytes of requests. Owns also that each request that awaits an answer
//! has a [`Reply`]. A request that cannot be decoded, or that nobody knows, is answered here.
//!
//! Invariant: no bytes of a request are looked at that are not there. Requests come from the
//! kernel, or from whoever has the descriptor.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mojim_format::FormatError;
use mojim_format::bytes::Reader;
use rustix::io::Errno;

use crate::name_table::Time;
use crate::reply::{Reply, Transport};

/// Numbers of requests.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const READLINK: u32 = 5;
    pub(super) const SYMLINK: u32 = 6;
    pub(super) const MKNOD: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const UNLINK: u32 = 10;
    pub(super) const RMDIR: u32 = 11;
    pub(super) const RENAME: u32 = 12;
    pub(super) const LINK: u32 = 13;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const SETXATTR: u32 = 21;
    pub(super) const GETXATTR: u32 = 22;
    pub(super) const LISTXATTR: u32 = 23;
    pub(super) const REMOVEXATTR: u32 = 24;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const FSYNCDIR: u32 = 30;
    pub(super) const CREATE: u32 = 35;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const NOTIFY_REPLY: u32 = 41;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const READDIRPLUS: u32 = 44;
    pub(super) const RENAME2: u32 = 45;
    pub(super) const LSEEK: u32 = 46;
}

/// Bytes of a request's header.
pub(crate) const HEADER: usize = 40;
const WHAT: &str = "FUSE request";

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    opcode: u32,
    pub(crate) unique: u64,
    pub(crate) ino: u64,
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Head {
    /// Reads one.
    ///
    /// # Errors
    /// It is shorter than any.
    pub(crate) fn read(bytes: &[u8]) -> Result<Head, FormatError> {
        let mut r = Reader::new(WHAT, bytes);
        let (_len, opcode) = (r.u32()?, r.u32()?);
        let head = Head {
            opcode,
            unique: r.u64()?,
            ino: r.u64()?,
            uid: r.u32()?,
            gid: r.u32()?,
            pid: r.u32()?,
        };
        r.u32()?;
        Ok(head)
    }

    /// Whether it is what [`Device::ask`](crate::device::Device::ask) asked for.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.opcode == op::NOTIFY_REPLY
    }

    /// Whether it is of a file's bytes.
    pub(crate) fn is_of_bytes(&self) -> bool {
        [op::READ, op::WRITE, op::FSYNC].contains(&self.opcode)
    }

    pub(crate) fn is_init(&self) -> bool {
        self.opcode == op::INIT
    }

    /// Bytes of the argument in front of names and data.
    pub(crate) fn argument(&self) -> usize {
        match self.opcode {
            op::FORGET | op::MKDIR | op::RENAME | op::LINK | op::OPEN | op::SETXATTR => 8,
            op::GETXATTR | op::LISTXATTR | op::OPENDIR | op::BATCH_FORGET => 8,
            op::GETATTR | op::MKNOD | op::FSYNC | op::FSYNCDIR | op::CREATE | op::RENAME2 => 16,
            op::RELEASE | op::RELEASEDIR | op::LSEEK => 24,
            op::FALLOCATE => 32,
            op::READ | op::READDIR | op::READDIRPLUS | op::WRITE => 40,
            op::SETATTR => 88,
            _ => 0,
        }
    }
}

/// Who asks, and of what node.
pub(crate) struct Request<'a> {
    pub(crate) ino: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The thread; 0: the kernel itself, or one that cannot be looked at.
    pub(crate) pid: u32,
    pub(crate) by: &'a dyn Transport,
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    Now,
    At(Time),
}

/// What is to be set of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) accessed: Option<When>,
    pub(crate) modified: Option<When>,
}

/// What a new node is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct New<'a> {
    pub(crate) name: &'a [u8],
    /// With the file's type, for a node that is no directory.
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

/// A call. Names and data are parts of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call<'a> {
    Lookup(&'a [u8]),
    GetAttr,
    SetAttr(Setting),
    ReadLink,
    SymLink(&'a [u8], &'a [u8]),
    MkNod(New<'a>, u32),
    MkDir(New<'a>),
    Unlink(&'a [u8]),
    RmDir(&'a [u8]),
    Rename {
        name: &'a [u8],
        to: (u64, &'a [u8]),
        flags: u32,
    },
    /// A further name for a node.
    Link(u64, &'a [u8]),
    Open(i32),
    Create(New<'a>, i32),
    Read {
        handle: u64,
        offset: u64,
        size: u32,
    },
    Write {
        offset: u64,
        data: &'a [u8],
        flags: u32,
    },
    StatFs,
    Release(u64),
    Sync,
    SetXattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: i32,
    },
    GetXattr(&'a [u8], u32),
    ListXattr(u32),
    RemoveXattr(&'a [u8]),
    OpenDir,
    ReadDir {
        handle: u64,
        offset: u64,
        size: u32,
        /// Attributes are asked for, too.
        plus: bool,
    },
    ReleaseDir(u64),
    SyncDir,
    Allocate {
        offset: u64,
        length: u64,
        mode: i32,
    },
    Seek {
        offset: i64,
        whence: i32,
    },
}

/// Flags of a write.
pub(crate) mod write {
    /// The kernel writes back what was stored before.
    pub(crate) const CACHE: u32 = 1 << 0;
    /// Set-ID bits are to go.
    pub(crate) const KILL_SUIDGID: u32 = 1 << 2;
}

/// Whoever makes the calls.
pub(crate) trait Calls: Send + Sync + 'static {
    /// Makes a call, and answers it, now or later.
    fn call(&self, req: &Request<'_>, call: Call<'_>, reply: Reply);

    /// The kernel has forgotten a node, `times` times.
    fn forget(&self, ino: u64, times: u64);
}

/// A request that came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw<'a> {
    pub(crate) head: Head,
    /// The argument, of [`Head::argument`] bytes at least.
    pub(crate) argument: &'a [u8],
    /// Names, and data.
    pub(crate) rest: &'a [u8],
}

/// Has a request served that came by `by`, which has given it `place`. False if it awaits no answer.
pub(crate) fn serve(calls: &dyn Calls, raw: &Raw<'_>, by: &Arc<dyn Transport>, place: u32) -> bool {
    let head = &raw.head;
    match head.opcode {
        op::FORGET | op::BATCH_FORGET => {
            // What is not there of it counts as not forgotten: memory is kept.
            let _ = forget(calls, raw);
            return false;
        }
        op::NOTIFY_REPLY => return false,
        _ => {}
    }
    let reply = Reply::new(by.clone(), place, head.unique);
    if head.opcode == op::DESTROY {
        reply.ok();
        return true;
    }
    let call = match decode(raw) {
        Ok(Some(call)) => call,
        // The kernel asks no more, and does by itself what it can: for a descriptor that is closed
        // (FUSE_FLUSH) nothing is done, and nothing is committed; FUSE_INTERRUPT is never heeded.
        Ok(None) => {
            reply.error(Errno::NOSYS);
            return true;
        }
        // Not ENOSYS: one such answer to a sync would have all others succeed.
        Err(e) => {
            tracing::error!("a request of the kernel cannot be read: {e}");
            reply.error(Errno::IO);
            return true;
        }
    };
    let req = Request {
        ino: head.ino,
        uid: head.uid,
        gid: head.gid,
        pid: head.pid,
        by: &**by,
    };
    // A panic is reported; its call has been answered with EIO, and the thread goes on for others.
    let _ = catch_unwind(AssertUnwindSafe(|| calls.call(&req, call, reply)));
    true
}

fn forget(calls: &dyn Calls, raw: &Raw<'_>) -> Result<(), FormatError> {
    let mut argument = Reader::new(WHAT, raw.argument);
    if raw.head.opcode == op::FORGET {
        calls.forget(raw.head.ino, argument.u64()?);
        return Ok(());
    }
    let mut all = Reader::new(WHAT, raw.rest);
    for _ in 0..argument.u32()? {
        calls.forget(all.u64()?, all.u64()?);
    }
    Ok(())
}

/// The call of a request; `None` if nobody here knows it.
pub(crate) fn decode<'a>(raw: &Raw<'a>) -> Result<Option<Call<'a>>, FormatError> {
    let mut names = Names(raw.rest);
    let mut r = Reader::new(WHAT, raw.argument);
    let call = match raw.head.opcode {
        op::LOOKUP => Call::Lookup(names.next()?),
        op::GETATTR => Call::GetAttr,
        op::SETATTR => Call::SetAttr(setting(&mut r)?),
        op::READLINK => Call::ReadLink,
        op::SYMLINK => Call::SymLink(names.next()?, names.next()?),
        op::MKNOD => {
            let (mode, device, umask) = (r.u32()?, r.u32()?, r.u32()?);
            let name = names.next()?;
            Call::MkNod(New { name, mode, umask }, device)
        }
        op::MKDIR => {
            let (mode, umask) = (r.u32()?, r.u32()?);
            let name = names.next()?;
            Call::MkDir(New { name, mode, umask })
        }
        op::CREATE => {
            let (flags, mode, umask) = (r.u32()?, r.u32()?, r.u32()?);
            let name = names.next()?;
            Call::Create(New { name, mode, umask }, flags as i32)
        }
        op::UNLINK => Call::Unlink(names.next()?),
        op::RMDIR => Call::RmDir(names.next()?),
        op::RENAME | op::RENAME2 => {
            let dir = r.u64()?;
            let flags = match raw.head.opcode {
                op::RENAME2 => r.u32()?,
                _ => 0,
            };
            let (name, to) = (names.next()?, (dir, names.next()?));
            Call::Rename { name, to, flags }
        }
        op::LINK => Call::Link(r.u64()?, names.next()?),
        op::SETXATTR => {
            let (size, flags) = (r.u32()?, r.u32()? as i32);
            let name = names.next()?;
            let value = Reader::new(WHAT, names.0).take(size as usize)?;
            Call::SetXattr { name, value, flags }
        }
        op::GETXATTR => Call::GetXattr(names.next()?, r.u32()?),
        op::LISTXATTR => Call::ListXattr(r.u32()?),
        op::REMOVEXATTR => Call::RemoveXattr(names.next()?),
        _ => return of_file(raw, &mut r),
    };
    Ok(Some(call))
}

/// A call on a file's bytes, or on what is open.
fn of_file<'a>(raw: &Raw<'a>, r: &mut Reader<'a>) -> Result<Option<Call<'a>>, FormatError> {
    let call = match raw.head.opcode {
        op::OPEN => Call::Open(r.u32()? as i32),
        op::READ => Call::Read {
            handle: r.u64()?,
            offset: place(r.u64()?)?,
            size: r.u32()?,
        },
        op::WRITE => {
            let (_handle, offset) = (r.u64()?, place(r.u64()?)?);
            let (size, flags) = (r.u32()?, r.u32()?);
            let data = Reader::new(WHAT, raw.rest).take(size as usize)?;
            Call::Write {
                offset,
                data,
                flags,
            }
        }
        op::STATFS => Call::StatFs,
        op::RELEASE => Call::Release(r.u64()?),
        op::FSYNC => Call::Sync,
        op::OPENDIR => Call::OpenDir,
        op::READDIR | op::READDIRPLUS => Call::ReadDir {
            handle: r.u64()?,
            offset: r.u64()?,
            size: r.u32()?,
            plus: raw.head.opcode == op::READDIRPLUS,
        },
        op::RELEASEDIR => Call::ReleaseDir(r.u64()?),
        op::FSYNCDIR => Call::SyncDir,
        op::FALLOCATE => {
            r.u64()?;
            Call::Allocate {
                offset: place(r.u64()?)?,
                length: place(r.u64()?)?,
                mode: r.u32()? as i32,
            }
        }
        op::LSEEK => {
            r.u64()?;
            Call::Seek {
                offset: r.u64()? as i64,
                whence: r.u32()? as i32,
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(call))
}

/// A place in a file, as the system has them: it is not negative.
fn place(at: u64) -> Result<u64, FormatError> {
    match i64::try_from(at) {
        Ok(_) => Ok(at),
        Err(_) => Err(field("offset", at)),
    }
}

fn field(field: &'static str, value: u64) -> FormatError {
    let what = WHAT;
    FormatError::Field { what, field, value }
}

/// Names, each with a zero behind it.
struct Names<'a>(&'a [u8]);

impl<'a> Names<'a> {
    fn next(&mut self) -> Result<&'a [u8], FormatError> {
        let end = self.0.iter().position(|b| *b == 0);
        let end = end.ok_or(field(
            "a name without an end, of length",
            self.0.len() as u64,
        ))?;
        let name = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(name)
    }
}

fn setting(r: &mut Reader<'_>) -> Result<Setting, FormatError> {
    const MODE: u32 = 1 << 0;
    const UID: u32 = 1 << 1;
    const GID: u32 = 1 << 2;
    const SIZE: u32 = 1 << 3;
    const ACCESSED: u32 = 1 << 4;
    const MODIFIED: u32 = 1 << 5;
    const ACCESSED_NOW: u32 = 1 << 7;
    const MODIFIED_NOW: u32 = 1 << 8;
    let valid = r.u32()?;
    let (_padding, _handle, size, _owner) = (r.u32()?, r.u64()?, r.u64()?, r.u64()?);
    let (accessed, modified, _changed) = (r.u64()?, r.u64()?, r.u64()?);
    let (accessed_part, modified_part, _) = (r.u32()?, r.u32()?, r.u32()?);
    let (mode, _) = (r.u32()?, r.u32()?);
    let (uid, gid) = (r.u32()?, r.u32()?);
    let has = |bit: u32| valid & bit != 0;
    let when = |bit, now, seconds: u64, part: u32| match (has(bit), has(now)) {
        (false, _) => Ok(None),
        (true, true) => Ok(Some(When::Now)),
        (true, false) if part >= 1_000_000_000 => Err(field("nanoseconds", part.into())),
        (true, false) => Ok(Some(When::At((seconds as i64, part)))),
    };
    Ok(Setting {
        mode: has(MODE).then_some(mode),
        uid: has(UID).then_some(uid),
        gid: has(GID).then_some(gid),
        size: has(SIZE).then_some(place(size)?),
        accessed: when(ACCESSED, ACCESSED_NOW, accessed, accessed_part)?,
        modified: when(MODIFIED, MODIFIED_NOW, modified, modified_part)?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;
    use crate::reply::tests::Kept;

    fn head(opcode: u32) -> Head {
        Head {
            opcode,
            unique: 9,
            ino: 1,
            uid: 2,
            gid: 3,
            pid: 4,
        }
    }

    /// What was asked, in words, and what was forgotten.
    #[derive(Default)]
    struct Told(Mutex<Vec<String>>);

    impl Calls for Told {
        fn call(&self, req: &Request<'_>, call: Call<'_>, reply: Reply) {
            let who = (req.ino, req.uid, req.gid, req.pid);
            self.0.lock().unwrap().push(format!("{who:?} {call:?}"));
            match call {
                Call::StatFs => panic!("as the test asks"),
                _ => reply.ok(),
            }
        }

        fn forget(&self, ino: u64, times: u64) {
            self.0.lock().unwrap().push(format!("{ino} {times}"));
        }
    }

    /// Serves one request: what was told, and the errors that were answered.
    fn served(opcode: u32, argument: &[u8], rest: &[u8]) -> (Vec<String>, Vec<i32>) {
        let (told, kept) = (Told::default(), Arc::new(Kept::default()));
        let raw = Raw {
            head: head(opcode),
            argument,
            rest,
        };
        let by: Arc<dyn Transport> = kept.clone();
        let awaits = serve(&told, &raw, &by, 3);
        let answers = std::mem::take(&mut *kept.0.lock().unwrap());
        assert_eq!(answers.len(), usize::from(awaits), "each has one answer");
        assert!(answers.iter().all(|a| (a.0, a.1) == (3, 9)));
        let answers = answers.iter().map(|a| a.2).collect();
        (told.0.into_inner().unwrap(), answers)
    }

    fn words(all: &[u64]) -> Vec<u8> {
        all.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn requests_are_read_as_the_kernel_writes_them() {
        let told = |opcode, argument: &[u8], rest: &[u8]| {
            let (told, errors) = served(opcode, argument, rest);
            assert_eq!(errors, [0], "{told:?}");
            told[0].strip_prefix("(1, 2, 3, 4) ").unwrap().to_owned()
        };
        let name = format!("{:?}", b"ab");
        assert_eq!(told(1, &[], b"ab\0"), format!("Lookup({name})"));
        assert_eq!(
            told(6, &[], b"ab\0ab\0"),
            format!("SymLink({name}, {name})")
        );
        let rename = format!("Rename {{ name: {name}, to: (7, {name}), flags: 2 }}");
        assert_eq!(told(45, &words(&[7, 2]), b"ab\0ab\0"), rename);
        assert_eq!(
            told(12, &words(&[7]), b"ab\0ab\0"),
            rename.replace("2 }", "0 }")
        );
        // Handle, offset, size with flags, and what is not looked at.
        let write = words(&[5, 6, 2 | 4 << 32, 0, 0]);
        let written = format!("Write {{ offset: 6, data: {name}, flags: 4 }}");
        assert_eq!(told(16, &write, b"ab"), written);
        let mut set = words(&[
            1 | 1 << 5 | 1 << 4 | 1 << 7,
            0,
            0,
            0,
            0,
            -3i64 as u64,
            0,
            8 << 32,
            0o644 << 32,
        ]);
        set.resize(88, 0);
        let set = told(4, &set, &[]);
        assert!(set.contains("mode: Some(420), uid: None"), "{set}");
        assert!(set.contains("accessed: Some(Now)"), "{set}");
        assert!(set.contains("modified: Some(At((-3, 8)))"), "{set}");
    }

    #[test]
    fn what_is_forgotten_awaits_no_answer() {
        assert_eq!(
            served(2, &words(&[8]), &[]),
            (vec!["1 8".to_owned()], vec![])
        );
        let forgets = served(42, &words(&[2]), &words(&[5, 6, 7, 8]));
        assert_eq!(forgets, (vec!["5 6".to_owned(), "7 8".to_owned()], vec![]));
        // More than there are.
        let forgets = served(42, &words(&[2]), &words(&[5, 6, 7]));
        assert_eq!(forgets, (vec!["5 6".to_owned()], vec![]));
    }

    /// The kernel takes one ENOSYS to a sync for all of them: they would succeed from then on.
    #[test]
    fn what_cannot_be_read_fails_and_what_nobody_knows_is_not_asked_again() {
        assert_eq!(served(1, &[], b"ab").1, [libc::EIO]);
        assert_eq!(served(16, &words(&[5, 6, 3, 0, 0]), b"ab").1, [libc::EIO]);
        assert_eq!(
            served(15, &words(&[5, u64::MAX, 3, 0, 0]), &[]).1,
            [libc::EIO]
        );
        assert_eq!(served(25, &words(&[0; 3]), &[]).1, [libc::ENOSYS]);
        assert_eq!(served(4000, &[], &[]).1, [libc::ENOSYS]);
        // A panic is an answer, too.
        assert_eq!(served(17, &[], &[]).1, [libc::EIO]);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_answered(
            opcode in 0u32..60,
            argument in proptest::collection::vec(any::<u8>(), 0..128),
            rest in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..200),
        ) {
            prop_assume!(opcode != 17);
            let (_, errors) = served(opcode, &argument, &rest);
            let awaits = ![2, 41, 42].contains(&opcode);
            prop_assert_eq!(errors.len(), usize::from(awaits));
        }

        #[test]
        fn a_header_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            prop_assert_eq!(Head::read(&bytes).is_ok(), bytes.len() >= HEADER);
        }
    }
}
