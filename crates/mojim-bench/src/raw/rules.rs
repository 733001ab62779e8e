//! The rules that every raw limit keeps: how long a record may be, and how both ends of a link
//! wait, which the peer hears in its arguments.

use std::io;
use std::time::Duration;

/// The largest record that a raw limit takes, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// The largest time that any wait for a peer may last before it is an error.
pub(super) const GIVE_UP: Duration = Duration::from_secs(10);

/// How both ends of a raw link wait.
///
/// Polling is without `sched_yield`: beside a busy process one yield costs its whole slice (4 ms a
/// round trip were seen). But if the scheduler puts both ends on one processor, each spins in the
/// other's way (73 µs a round trip instead of 7, for a while, then back). So pin both: the peer
/// with [`peer_cpu`](Self::peer_cpu), the client with [`pin_thread`](super::pin_thread), a mirror
/// that is compared with [`pin_process`](super::pin_process), on the processors that
/// [`placement`](super::placement) gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The time to poll before the thread blocks. Zero: block at once.
    pub spin: Duration,
    /// The processor of the peer; `None`: where the starting thread may run.
    pub peer_cpu: Option<usize>,
}

impl Wait {
    /// Poll for 30 µs, then block; no pinning.
    pub const SPIN: Self = Self {
        spin: Duration::from_micros(30),
        peer_cpu: None,
    };
    /// Block at once; no pinning.
    pub const BLOCK: Self = Self {
        spin: Duration::ZERO,
        peer_cpu: None,
    };

    /// With the peer on this processor.
    pub fn peer_on(self, cpu: Option<usize>) -> Self {
        Self {
            peer_cpu: cpu,
            ..self
        }
    }
}

impl Default for Wait {
    fn default() -> Self {
        Self::SPIN
    }
}

/// The peer's arguments for `kind` and `wait`.
pub(super) fn peer_args(kind: &str, wait: Wait) -> Vec<String> {
    let mut args = vec![kind.to_owned(), wait.spin.as_nanos().to_string()];
    args.extend(wait.peer_cpu.map(|cpu| cpu.to_string()));
    args
}

/// An error for a record that is larger than [`MAX_BYTES`].
pub(super) fn check_length(len: usize) -> io::Result<()> {
    if len > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "record above raw::MAX_BYTES",
        ));
    }
    Ok(())
}
