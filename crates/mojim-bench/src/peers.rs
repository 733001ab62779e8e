//! The peer process: Mojim's mirror is another process, so the raw links' other end is one too.
//!
//! The measuring program runs its own executable again with the hidden argument `__raw-peer`. The
//! peer finds what it needs on its standard input (the shared memory) and reports on its standard
//! output (its port). This file is the peer's entry. [`PeerProcess`] starts and ends it.

use crate::raw;

pub(crate) mod process;

pub use process::{PEER_ARGUMENT, PeerProcess};

/// Runs this process as a peer if its first argument is [`PEER_ARGUMENT`], and says whether it did.
///
/// Call it first in `main`, before anything reads the arguments; when it returns `true` the peer's
/// work is over and `main` returns. A peer that fails says why on standard error and exits with 1.
pub fn maybe_run_peer() -> bool {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_none_or(|first| first != PEER_ARGUMENT) {
        return false;
    }
    let args: Vec<String> = args.map(|a| a.to_string_lossy().into_owned()).collect();
    if let Err(e) = raw::raw_peer_main(&args) {
        eprintln!("mojim {PEER_ARGUMENT}: {e}");
        std::process::exit(1);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Not a test: the peer of the other tests starts here (the harness takes `__raw-peer` and
    /// what follows it for names of tests that do not exist).
    #[test]
    fn peer_entry() {
        if maybe_run_peer() {
            std::process::exit(0);
        }
    }
}
