//! The engine's errors, in one enum.
//!
//! Each case is an operating error. Its text says what failed, where, and what to do. Broken
//! invariants are assertions instead.
//!
//! Invariants:
//!
//! - An error's text is one line. A configuration error has one line for each mistake.
//! - It has nothing that a terminal acts on, whatever a peer, a file's name or a program has put
//!   into it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use mojim_format::message::RefuseCode;
use mojim_format::shown::{shown, shown_lines};

/// What went wrong. [`Error::errno`] is what the C interface reports.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument breaks the call's rules.
    #[error("{}", shown(.0))]
    Invalid(String),
    /// There is no such file, volume or node.
    #[error("{}", shown(.0))]
    NotFound(String),
    /// It exists already.
    #[error("{}", shown(.0))]
    Exists(String),
    /// Another process, or another mapping, holds it.
    #[error("{}", shown(.0))]
    Busy(String),
    /// Mojim cannot do this, and says so instead of doing it wrongly.
    #[error("{}", shown(.0))]
    Unsupported(String),
    /// It can only be read here.
    #[error("{}", shown(.0))]
    ReadOnly(String),
    /// The mirror made no progress for `resend_timeout` × `resend_attempts`. The sync
    /// point is in doubt: it is there whole or not at all.
    #[error("{}", shown(.0))]
    Timeout(String),
    /// A newer view has another primary: this one cannot commit any more.
    #[error("{}", shown(.0))]
    Stale(String),
    /// A log or data file failed; nothing is acknowledged until it is
    /// attached again and verified (`docs/reference/invariants.md`, 6).
    #[error("poisoned: {}", shown(.0))]
    Poisoned(String),
    /// As [`Error::Poisoned`], because there is no room on the disk.
    #[error("poisoned: {}; make room on that disk, then attach again", shown(.0))]
    Full(String),
    /// Stored bytes are not what they should be.
    #[error("{}: {}", shown(&.path.display().to_string()), shown(.what))]
    Damaged {
        /// Where.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The peer broke the protocol.
    #[error("{}", shown(.0))]
    Protocol(String),
    /// The peer refused, over a link of a session.
    #[error("{}", shown(.text))]
    Refused {
        /// Why, for programs.
        code: RefuseCode,
        /// Who refused what, and why, for people.
        text: String,
    },
    /// A node refused a request.
    #[error("the node says: {}", shown(.text))]
    Answered {
        /// Its error number.
        errno: i32,
        /// Its text.
        text: String,
    },
    /// The configuration is wrong; every mistake is in the text.
    #[error("{}", shown_lines(.0))]
    Config(String),
    /// The operating system refused.
    #[error("{}: {}", shown(.what), shown(.error))]
    Io {
        /// What was tried, and where.
        what: String,
        /// The system's error number.
        errno: i32,
        /// Its text.
        error: String,
    },
}

/// The text, as for people: what a `main` that returns an error, or an `unwrap`, shows.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A result with the engine's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Wraps an I/O error with what was tried.
    pub fn io(what: impl Into<String>, e: &io::Error) -> Error {
        Error::Io {
            what: what.into(),
            errno: e.raw_os_error().unwrap_or(match e.kind() {
                io::ErrorKind::WouldBlock => libc::EAGAIN,
                io::ErrorKind::NotFound => libc::ENOENT,
                io::ErrorKind::PermissionDenied => libc::EACCES,
                io::ErrorKind::AlreadyExists => libc::EEXIST,
                io::ErrorKind::NotADirectory => libc::ENOTDIR,
                io::ErrorKind::IsADirectory => libc::EISDIR,
                io::ErrorKind::DirectoryNotEmpty => libc::ENOTEMPTY,
                io::ErrorKind::StorageFull => libc::ENOSPC,
                io::ErrorKind::TimedOut => libc::ETIMEDOUT,
                io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
                _ => libc::EIO,
            }),
            error: e.to_string(),
        }
    }

    /// A write or sync of a log or data file has failed: `what` was tried, and where.
    pub fn poisoned(what: impl std::fmt::Display, e: &io::Error) -> Error {
        Error::io(what.to_string(), e).into_poison()
    }

    /// Whether a disk had no room, where nothing is lost by that: it was not a sync that failed
    /// ([`Error::Full`]).
    pub fn lacks_room(&self) -> bool {
        matches!(self, Error::Io { errno, .. } if [libc::ENOSPC, libc::EDQUOT].contains(errno))
    }

    /// This error as what poisons a store.
    pub fn into_poison(self) -> Error {
        match self {
            Error::Poisoned(_) | Error::Full(_) => self,
            Error::Io { errno, .. } if [libc::ENOSPC, libc::EDQUOT].contains(&errno) => {
                Error::Full(self.to_string())
            }
            other => Error::Poisoned(other.to_string()),
        }
    }

    /// The text without the advice to a program's user: a node goes on by itself when
    /// there is room.
    pub fn cause(&self) -> String {
        match self {
            Error::Full(what) => format!("poisoned: {}", shown(what)),
            e => e.to_string(),
        }
    }

    /// The `errno` value that stands for this error in C.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Invalid(_) | Error::Config(_) => libc::EINVAL,
            Error::NotFound(_) => libc::ENOENT,
            Error::Exists(_) => libc::EEXIST,
            Error::Busy(_) => libc::EBUSY,
            Error::Unsupported(_) => libc::EOPNOTSUPP,
            Error::ReadOnly(_) => libc::EROFS,
            Error::Timeout(_) => libc::ETIMEDOUT,
            Error::Stale(_) => libc::ESTALE,
            Error::Poisoned(_) => libc::EIO,
            Error::Full(_) => libc::ENOSPC,
            Error::Damaged { .. } => libc::EUCLEAN,
            Error::Refused {
                code: RefuseCode::Poisoned,
                ..
            } => libc::EIO,
            Error::Protocol(_) | Error::Refused { .. } => libc::EPROTO,
            Error::Io { errno, .. } | Error::Answered { errno, .. } => *errno,
        }
    }
}

/// Adds what was tried to an I/O error.
pub trait Context<T> {
    /// Wraps the error; `what` is only called if there is one.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(what(), &e))
    }
}
