//! How a subcommand ends when it cannot do its work: what, where, what to do, and
//! the exit code.
//!
//! Exit codes:
//!
//! - 0: it is done, or the answer is yes
//! - 1: the answer is no, or it failed
//! - 2: the command line or the configuration is wrong
//!
//! `mojim run` exits with its program's code. Like a shell, it exits with 126 if the program may
//! not be started, and with 127 if it is not there.

use std::io::{self, Write};

use mojim_format::shown::shown;

use crate::typed::typed;

/// Why a subcommand failed.
#[derive(Debug)]
pub struct Failure {
    /// The process's exit code.
    pub code: u8,
    /// For people; empty if the reader of our output has gone.
    pub text: String,
}

/// The end of a subcommand: an exit code, or a failure to report.
pub type Done = Result<u8, Failure>;

impl Failure {
    /// A failure of the work itself.
    pub fn failed(text: impl Into<String>) -> Failure {
        Failure {
            code: 1,
            text: text.into(),
        }
    }

    /// A wrong command line or configuration.
    pub fn usage(text: impl Into<String>) -> Failure {
        Failure {
            code: 2,
            text: text.into(),
        }
    }

    /// A program could not be started.
    pub fn not_started(e: &io::Error, text: String) -> Failure {
        let code = match e.kind() {
            io::ErrorKind::NotFound => 127,
            _ => 126,
        };
        Failure { code, text }
    }

    /// With where it happened in front.
    pub fn at(self, place: &str) -> Failure {
        Failure {
            text: format!("{place}: {}", self.text),
            ..self
        }
    }

    /// Writes it to standard error.
    pub fn report(&self) {
        say_on_stderr(&self.text);
    }
}

/// Writes lines to standard error, marked as this command's. If it is closed, that is not
/// a failure.
pub fn say_on_stderr(text: &str) {
    let mut err = io::stderr().lock();
    for line in typed(text).lines() {
        let _ = writeln!(err, "mojim: {}", shown(line));
    }
}

impl From<mojim::Error> for Failure {
    fn from(e: mojim::Error) -> Failure {
        match e {
            mojim::Error::Config(_) => Failure::usage(e.to_string()),
            e => Failure::failed(e.to_string()),
        }
    }
}

impl From<mojim_config::ConfigError> for Failure {
    fn from(e: mojim_config::ConfigError) -> Failure {
        Failure::usage(e.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        if e.kind() == io::ErrorKind::BrokenPipe {
            return Failure::failed("");
        }
        Failure::failed(e.to_string())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(e: serde_json::Error) -> Failure {
        Failure::from(io::Error::from(e))
    }
}
