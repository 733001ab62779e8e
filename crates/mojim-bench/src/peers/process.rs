//! A peer process and its starter: how the one starts, says that it is ready, and ends.
//!
//! Invariant: a peer never outlives the process that started it:
//!
//! - Dropping [`PeerProcess`] kills it.
//! - If the starter dies without that, the pipe at the peer's standard output breaks and the peer
//!   exits. (Not `PR_SET_PDEATHSIG`: it fires when the *thread* that started the peer ends.)

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};

/// The hidden first argument that turns the program into a peer.
pub const PEER_ARGUMENT: &str = "__raw-peer";

/// What a peer writes before the text that its starter waits for.
const READY: &str = "mojim-raw-peer ready ";

/// A peer that runs as a child process; killed and reaped on drop.
#[derive(Debug)]
pub struct PeerProcess {
    child: Child,
    // Open as long as the peer may live: its end tells the peer to exit.
    _stdout: BufReader<ChildStdout>,
    ready: String,
}

impl PeerProcess {
    /// Starts this executable as a peer with `args` (`tcp ...`, for one) and waits until it is
    /// ready. `stdin` becomes the peer's standard input.
    pub fn spawn(args: &[String], stdin: Option<OwnedFd>) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(PEER_ARGUMENT)
            .args(args)
            .args(harness_arguments())
            .stdin(stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("stdout was piped");
        let mut peer = Self {
            child,
            _stdout: BufReader::new(stdout),
            ready: String::new(),
        };
        // From here on an early return drops `peer`, which kills the process.
        let mut line = String::new();
        loop {
            line.clear();
            if peer._stdout.read_line(&mut line)? == 0 {
                return Err(io::Error::other(
                    "the peer process ended early; does main call peers::maybe_run_peer first?",
                ));
            }
            if let Some((_, ready)) = line.split_once(READY) {
                peer.ready = ready.trim_end().to_owned();
                return Ok(peer);
            }
        }
    }

    /// What the peer said when it was ready (the TCP peer: its address).
    pub fn ready(&self) -> &str {
        &self.ready
    }

    /// The peer's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the peer has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a peer: tells the starter that work can begin, and watches for the starter's end.
pub(crate) fn announce(text: &str) -> io::Result<()> {
    std::thread::Builder::new()
        .name("starter-watch".into())
        .spawn(|| {
            let stdout = io::stdout();
            // No event is asked for: poll reports only that the pipe's reader has gone.
            let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
            loop {
                match poll(&mut fds, None) {
                    Err(rustix::io::Errno::INTR) => continue,
                    _ => std::process::exit(0),
                }
            }
        })?;
    let mut out = io::stdout().lock();
    writeln!(out, "\n{READY}{text}")?;
    out.flush()
}

/// What has to follow the peer's arguments so that the executable runs as a peer.
#[cfg(not(test))]
fn harness_arguments() -> [&'static str; 0] {
    []
}

/// Under the test harness, whose `main` is not ours, a test is the entry.
#[cfg(test)]
fn harness_arguments() -> [&'static str; 4] {
    [
        "--exact",
        "peers::tests::peer_entry",
        "--nocapture",
        "--test-threads=1",
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_with_its_starter() {
        let mut peer = PeerProcess::spawn(&["tcp".into()], None).unwrap();
        assert!(peer.ready().starts_with("127.0.0.1:"));
        assert!(!peer.has_ended());
        let id = rustix::process::Pid::from_raw(peer.id() as i32).unwrap();
        drop(peer);
        assert!(rustix::process::test_kill_process(id).is_err());
    }

    #[test]
    fn ends_when_the_pipe_breaks() {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([PEER_ARGUMENT, "tcp"])
            .args(harness_arguments())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(READY) {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0);
        }
        drop(out);
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn an_unknown_peer_is_an_error() {
        assert!(PeerProcess::spawn(&["pigeon".into()], None).is_err());
    }
}
