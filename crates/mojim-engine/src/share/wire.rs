//! The messages between a guest and its owner.
//!
//! Owns their bytes. Both ends run on one host and are normally of one build, so no other version
//! is supported: [`VERSION`] is in the first message and must be equal. Each request is answered by
//! one reply, in order.
//!
//! Invariant: whatever the bytes are, decoding gives a message or an error, and takes no more
//! memory than the message has.

use std::path::PathBuf;

use mojim_format::bytes::{Reader, Writer};
use mojim_format::message::RefuseCode;
use mojim_format::{FormatError, Level};

use super::line::MOST;
use mojim_env::Error;

/// Changes with every change of a message.
pub const VERSION: u32 = 1;
/// Most ranges of one sync point.
pub const MOST_RANGES: usize = (MOST - 64) / RANGE;
/// Bytes of a range.
const RANGE: usize = 24;
/// Most bytes of a text.
const MOST_TEXT: usize = 4096;
/// Most nodes in a [`Reply::Copies`].
const MOST_COPIES: usize = 256;

/// A part of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The owner's number for the window.
    pub window: u64,
    /// Where in the window it begins.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// A part of a file, mapped at an address of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shown {
    /// The file's number.
    pub file: u32,
    /// Where in the file it begins.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The address.
    pub base: u64,
    /// The identity of the memory that it maps: the file may have other memory by now.
    pub memory: u64,
    /// Whether stores are allowed.
    pub write: bool,
    /// As in [`MapFlags`](mojim_memory::region::MapFlags).
    pub atomic: bool,
    /// A forked child has it from its parent. Its end commits nothing, since the memory may have
    /// half of a change of the parent's.
    pub inherited: bool,
}

/// What a guest asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The first request. Comes with the guest's pagemap, unless the guest cannot arm its pages:
    /// then its windows are not watched, and always count as written whole.
    Hello { version: u32, volume: String },
    /// A file's memory, to be mapped. Answered by the file's number and the mapping's length in
    /// bytes, with the memory.
    Map {
        file: String,
        offset: u64,
        len: u64,
        create: bool,
        write: bool,
    },
    /// The memory is mapped, and armed. Answered by the window's number.
    Show(Shown),
    /// The window will be unmapped.
    Unmap { window: u64 },
    /// A sync point. Answered by its LSN, or 0.
    Sync { wait: bool, parts: Vec<Part> },
    /// A rollback. Answered by 1 if it was done.
    Rollback(Part),
    /// A sync point of a file. Answered by its LSN, or 0.
    Fsync { file: String },
    /// Makes a file. Answered by 1 if it was made.
    Create { file: String },
    /// Removes a file.
    Remove { file: String },
    /// Renames a file.
    Rename { from: String, to: String },
    /// Sets a file's size.
    Truncate { file: String, size: u64 },
    /// A file's size. Answered by 1 and the size, or by 0 if there is no such file.
    Size { file: String },
    /// Waits until `lsn` is committed.
    Wait { lsn: u64 },
    /// Waits until the data files show what is committed.
    Settle,
    /// Which nodes have `lsn`.
    Copies { lsn: u64 },
    /// The guest ends in good order: its writable windows that are neither atomic nor inherited are
    /// committed, and all its windows are forgotten.
    Detach,
}

/// What the owner answers.
#[derive(Debug, Clone)]
pub enum Reply {
    /// The request is done. `lsn`: with this LSN, its sync point and those that it found begun are
    /// committed; 0 if there are none. `value` and `more`: as [`Request`] says.
    Done { lsn: u64, value: u64, more: u64 },
    /// Which nodes have the LSN, and how safe it is there.
    Copies(Vec<(String, Option<Level>)>),
    /// The request was not done.
    Failed(Error),
}

type Result<T> = std::result::Result<T, FormatError>;

fn wrong(field: &'static str, value: u64) -> FormatError {
    let what = "message of a guest";
    FormatError::Field { what, field, value }
}

fn text(r: &mut Reader<'_>) -> Result<String> {
    Ok(r.text("text", MOST_TEXT)?.to_owned())
}

/// Cuts a text that is too long: an error's text may be longer than a message.
fn put_text(w: &mut Writer<'_>, text: &str) {
    let mut end = text.len().min(MOST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    w.text(&text[..end]);
}

fn put_part(w: &mut Writer<'_>, p: &Part) {
    w.u64(p.window).u64(p.at).u64(p.len);
}

fn part(r: &mut Reader<'_>) -> Result<Part> {
    Ok(Part {
        window: r.u64()?,
        at: r.u64()?,
        len: r.u64()?,
    })
}

/// Begins a [`Request::Sync`] in `out`. [`push_part`] appends its parts, so that no list of them
/// is needed.
pub fn begin_sync(wait: bool, out: &mut Vec<u8>) {
    out.clear();
    Writer(out).u8(5).u8(wait.into());
}

/// Appends a part of a sync point.
pub fn push_part(p: &Part, out: &mut Vec<u8>) {
    put_part(&mut Writer(out), p);
}

impl Request {
    /// Whether its names and parts fit in a message.
    pub fn fits(&self) -> bool {
        match self {
            Request::Map { file, .. }
            | Request::Fsync { file }
            | Request::Create { file }
            | Request::Remove { file }
            | Request::Truncate { file, .. }
            | Request::Size { file } => file.len() <= MOST_TEXT,
            Request::Rename { from, to } => from.len().max(to.len()) <= MOST_TEXT,
            Request::Sync { parts, .. } => parts.len() <= MOST_RANGES,
            _ => true,
        }
    }

    /// Replaces the contents of `out` by the request's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        let mut w = Writer(out);
        match self {
            Request::Hello { version, volume } => {
                w.u8(1).u32(*version);
                put_text(&mut w, volume);
            }
            Request::Map {
                file,
                offset,
                len,
                create,
                write,
            } => {
                w.u8(2).u64(*offset).u64(*len);
                w.u8((*create).into()).u8((*write).into());
                put_text(&mut w, file);
            }
            Request::Show(s) => {
                w.u8(3).u32(s.file).u64(s.offset).u64(s.len).u64(s.base);
                w.u64(s.memory).u8(s.write.into()).u8(s.atomic.into());
                w.u8(s.inherited.into());
            }
            Request::Unmap { window } => {
                w.u8(4).u64(*window);
            }
            Request::Sync { wait, parts } => {
                w.u8(5).u8((*wait).into());
                parts.iter().for_each(|p| put_part(&mut w, p));
            }
            Request::Rollback(p) => {
                w.u8(6);
                put_part(&mut w, p);
            }
            Request::Fsync { file } => put_text(w.u8(7), file),
            Request::Create { file } => put_text(w.u8(8), file),
            Request::Remove { file } => put_text(w.u8(9), file),
            Request::Rename { from, to } => {
                w.u8(10);
                put_text(&mut w, from);
                put_text(&mut w, to);
            }
            Request::Truncate { file, size } => {
                w.u8(11).u64(*size);
                put_text(&mut w, file);
            }
            Request::Size { file } => put_text(w.u8(12), file),
            Request::Wait { lsn } => {
                w.u8(13).u64(*lsn);
            }
            Request::Settle => {
                w.u8(14);
            }
            Request::Copies { lsn } => {
                w.u8(15).u64(*lsn);
            }
            Request::Detach => {
                w.u8(16);
            }
        }
    }

    /// Decodes a request, which must take all of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Request> {
        let mut r = Reader::new("message of a guest", bytes);
        let request = match r.u8()? {
            1 => Request::Hello {
                version: r.u32()?,
                volume: text(&mut r)?,
            },
            2 => Request::Map {
                offset: r.u64()?,
                len: r.u64()?,
                create: r.bool("create")?,
                write: r.bool("write")?,
                file: text(&mut r)?,
            },
            3 => Request::Show(Shown {
                file: r.u32()?,
                offset: r.u64()?,
                len: r.u64()?,
                base: r.u64()?,
                memory: r.u64()?,
                write: r.bool("write")?,
                atomic: r.bool("atomic")?,
                inherited: r.bool("inherited")?,
            }),
            4 => Request::Unmap { window: r.u64()? },
            5 => {
                let wait = r.bool("wait")?;
                if !r.left().is_multiple_of(RANGE) {
                    return Err(wrong("ranges", r.left() as u64));
                }
                let parts = (0..r.left() / RANGE).map(|_| part(&mut r));
                let parts = parts.collect::<Result<_>>()?;
                Request::Sync { wait, parts }
            }
            6 => Request::Rollback(part(&mut r)?),
            7 => Request::Fsync {
                file: text(&mut r)?,
            },
            8 => Request::Create {
                file: text(&mut r)?,
            },
            9 => Request::Remove {
                file: text(&mut r)?,
            },
            10 => Request::Rename {
                from: text(&mut r)?,
                to: text(&mut r)?,
            },
            11 => Request::Truncate {
                size: r.u64()?,
                file: text(&mut r)?,
            },
            12 => Request::Size {
                file: text(&mut r)?,
            },
            13 => Request::Wait { lsn: r.u64()? },
            14 => Request::Settle,
            15 => Request::Copies { lsn: r.u64()? },
            16 => Request::Detach,
            kind => return Err(wrong("kind", kind.into())),
        };
        all_read(&r)?;
        Ok(request)
    }
}

fn all_read(r: &Reader<'_>) -> Result<()> {
    match r.left() {
        0 => Ok(()),
        left => Err(wrong("end", left as u64)),
    }
}

impl Reply {
    /// Replaces the contents of `out` by the reply's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        let mut w = Writer(out);
        match self {
            Reply::Done { lsn, value, more } => {
                w.u8(1).u64(*lsn).u64(*value).u64(*more);
            }
            Reply::Copies(all) => {
                w.u8(2);
                for (node, level) in all.iter().take(MOST_COPIES) {
                    w.u8(level.map_or(0, |l| l as u8));
                    put_text(&mut w, node);
                }
            }
            Reply::Failed(e) => {
                w.u8(3);
                put_error(&mut w, e);
            }
        }
    }

    /// Decodes a reply, which must take all of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Reply> {
        let mut r = Reader::new("message of a guest", bytes);
        let reply = match r.u8()? {
            1 => Reply::Done {
                lsn: r.u64()?,
                value: r.u64()?,
                more: r.u64()?,
            },
            2 => {
                let mut all = Vec::new();
                while r.left() > 0 && all.len() < MOST_COPIES {
                    let level = level(r.u8()?)?;
                    all.push((text(&mut r)?, level));
                }
                Reply::Copies(all)
            }
            3 => Reply::Failed(error(&mut r)?),
            kind => return Err(wrong("kind", kind.into())),
        };
        all_read(&r)?;
        Ok(reply)
    }
}

fn level(n: u8) -> Result<Option<Level>> {
    let all = [Level::Received, Level::Pmem, Level::Disk];
    match all.into_iter().find(|l| *l as u8 == n) {
        None if n != 0 => Err(wrong("level", n.into())),
        level => Ok(level),
    }
}

fn put_error(w: &mut Writer<'_>, e: &Error) {
    let (kind, text) = match e {
        Error::Invalid(t) => (1, t),
        Error::NotFound(t) => (2, t),
        Error::Exists(t) => (3, t),
        Error::Busy(t) => (4, t),
        Error::Unsupported(t) => (5, t),
        Error::ReadOnly(t) => (6, t),
        Error::Timeout(t) => (7, t),
        Error::Stale(t) => (8, t),
        Error::Poisoned(t) => (9, t),
        Error::Protocol(t) => (10, t),
        Error::Config(t) => (11, t),
        Error::Full(t) => (14, t),
        Error::Damaged { path, what } => {
            put_text(w.u8(12), &path.to_string_lossy());
            return put_text(w, what);
        }
        Error::Io { what, errno, error } => {
            put_text(w.u8(13).u32(*errno as u32), what);
            return put_text(w, error);
        }
        Error::Refused { code, text } => return put_text(w.u8(15).u16(*code as u16), text),
        Error::Answered { errno, text } => return put_text(w.u8(16).u32(*errno as u32), text),
        e => return put_text(w.u8(16).u32(e.errno() as u32), &e.to_string()),
    };
    put_text(w.u8(kind), text);
}

fn error(r: &mut Reader<'_>) -> Result<Error> {
    let kind = match r.u8()? {
        1 => Error::Invalid,
        2 => Error::NotFound,
        3 => Error::Exists,
        4 => Error::Busy,
        5 => Error::Unsupported,
        6 => Error::ReadOnly,
        7 => Error::Timeout,
        8 => Error::Stale,
        9 => Error::Poisoned,
        10 => Error::Protocol,
        11 => Error::Config,
        14 => Error::Full,
        12 => {
            let path = PathBuf::from(text(r)?);
            let what = text(r)?;
            return Ok(Error::Damaged { path, what });
        }
        13 => {
            return Ok(Error::Io {
                errno: r.u32()? as i32,
                what: text(r)?,
                error: text(r)?,
            });
        }
        15 => {
            return Ok(Error::Refused {
                code: RefuseCode::from_number(r.u16()?),
                text: text(r)?,
            });
        }
        16 => {
            return Ok(Error::Answered {
                errno: r.u32()? as i32,
                text: text(r)?,
            });
        }
        kind => return Err(wrong("error", kind.into())),
    };
    text(r).map(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        let file = || "a/b.db".to_owned();
        let part = Part {
            window: 1,
            at: u64::MAX,
            len: 7,
        };
        vec![
            Request::Hello {
                version: VERSION,
                volume: "v".into(),
            },
            Request::Map {
                file: file(),
                offset: 4096,
                len: 1 << 40,
                create: true,
                write: false,
            },
            Request::Show(Shown {
                file: 9,
                offset: 8192,
                len: 5,
                base: 1 << 46,
                memory: 77,
                write: true,
                atomic: false,
                inherited: true,
            }),
            Request::Unmap { window: 3 },
            Request::Sync {
                wait: true,
                parts: vec![part; MOST_RANGES],
            },
            Request::Sync {
                wait: false,
                parts: vec![],
            },
            Request::Rollback(part),
            Request::Fsync { file: file() },
            Request::Create { file: file() },
            Request::Remove { file: file() },
            Request::Rename {
                from: file(),
                to: "x".repeat(MOST_TEXT),
            },
            Request::Truncate {
                file: file(),
                size: 3,
            },
            Request::Size { file: file() },
            Request::Wait { lsn: 12 },
            Request::Settle,
            Request::Copies { lsn: 1 },
            Request::Detach,
        ]
    }

    fn errors() -> Vec<Error> {
        let t = || "why".to_owned();
        vec![
            Error::Invalid(t()),
            Error::NotFound(t()),
            Error::Exists(t()),
            Error::Busy(t()),
            Error::Unsupported(t()),
            Error::ReadOnly(t()),
            Error::Timeout(t()),
            Error::Stale(t()),
            Error::Poisoned(t()),
            Error::Full(t()),
            Error::Protocol(t()),
            Error::Config(t()),
            Error::Damaged {
                path: "/x".into(),
                what: t(),
            },
            Error::Io {
                what: t(),
                errno: libc::ENOSPC,
                error: t(),
            },
            Error::Refused {
                code: RefuseCode::Busy,
                text: t(),
            },
            Error::Answered {
                errno: libc::ESTALE,
                text: t(),
            },
        ]
    }

    fn replies() -> Vec<Reply> {
        let copies = vec![
            ("a".to_owned(), Some(Level::Disk)),
            ("b".to_owned(), None),
            ("c".to_owned(), Some(Level::Received)),
        ];
        let done = Reply::Done {
            lsn: 1,
            value: u64::MAX,
            more: 2,
        };
        let mut all = vec![done, Reply::Copies(copies), Reply::Copies(vec![])];
        all.extend(errors().into_iter().map(Reply::Failed));
        all
    }

    #[test]
    fn messages_are_understood_as_they_were_meant() {
        let mut bytes = Vec::new();
        for q in requests() {
            assert!(q.fits());
            q.encode(&mut bytes);
            assert!(bytes.len() <= MOST);
            assert_eq!(Request::decode(&bytes).unwrap(), q);
        }
        for a in replies() {
            a.encode(&mut bytes);
            assert!(bytes.len() <= MOST);
            let again = Reply::decode(&bytes).unwrap();
            assert_eq!(format!("{again:?}"), format!("{a:?}"));
        }
        for e in errors() {
            Reply::Failed(e.clone()).encode(&mut bytes);
            let Reply::Failed(again) = Reply::decode(&bytes).unwrap() else {
                panic!("not an error");
            };
            assert_eq!(again.errno(), e.errno());
        }
    }

    #[test]
    fn a_sync_point_is_the_same_without_a_list() {
        let parts = [(1, 2, 3), (4, 5, 6)].map(|(window, at, len)| Part { window, at, len });
        let (mut a, mut b) = (Vec::new(), vec![9; 9]);
        let parts_of = parts.to_vec();
        Request::Sync {
            wait: true,
            parts: parts_of,
        }
        .encode(&mut a);
        begin_sync(true, &mut b);
        parts.iter().for_each(|p| push_part(p, &mut b));
        assert_eq!(a, b);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let e = Error::Invalid("ß".repeat(MOST_TEXT));
        let mut bytes = Vec::new();
        Reply::Failed(e).encode(&mut bytes);
        let Reply::Failed(Error::Invalid(t)) = Reply::decode(&bytes).unwrap() else {
            panic!("another error");
        };
        assert_eq!(t, "ß".repeat(MOST_TEXT / 2));
    }

    #[test]
    fn broken_messages_are_errors() {
        let mut all = vec![Vec::new()];
        for q in requests() {
            q.encode(all.last_mut().unwrap());
            all.push(Vec::new());
        }
        for a in replies() {
            a.encode(all.last_mut().unwrap());
            all.push(Vec::new());
        }
        all.pop();
        let decode = |b: &[u8]| {
            let _ = Request::decode(b);
            let _ = Reply::decode(b);
        };
        let mut rng = mojim_env::rng::Rng::new(1);
        let mut random = move || rng.next();
        for m in &all {
            for n in 0..m.len().min(300) {
                decode(&m[..n]);
                let mut longer = m.clone();
                longer.push(n as u8);
                decode(&longer);
                let mut changed = m.clone();
                changed[n] ^= 1 << (random() % 8);
                decode(&changed);
            }
        }
        for _ in 0..20_000 {
            let n = random() as usize % 200;
            let mut bytes: Vec<u8> = (0..n).map(|_| random() as u8).collect();
            if let Some(kind) = bytes.first_mut() {
                *kind %= 18;
            }
            decode(&bytes);
        }
        let unknown: [&[u8]; 3] = [&[0], &[17], &[]];
        for bytes in unknown {
            assert!(Request::decode(bytes).is_err());
        }
        assert!(Request::decode(&[14, 0]).is_err(), "more than a message");
        assert!(Request::decode(&[5, 2]).is_err(), "neither 0 nor 1");
        assert!(Request::decode(&[5, 1, 0]).is_err(), "part of a range");
    }
}
