//! Shared by tests of the whole product:
//!
//! - processes of the `mojim` command, which are started, read, signalled, and gone when a
//!   test ends,
//! - clusters of nodes, and what can go wrong around them.
//!
//! The tests themselves are in `tests/`.
//!
//! - `built.rs`: the command and the libraries of this source
//! - `home.rs`: a cluster's directories, ports and configuration
//! - `cluster.rs`: two nodes on loopback. `voters.rs`: nodes with a register
//! - `nodes.rs`: nodes in network namespaces. `network.rs`: what can go wrong there
//! - `link.rs`: slow or cut links. `disk.rs`, `small.rs`: slow or full disks. `mount.rs`: mounts
//! - `history.rs`: whether one log could have shown what clients saw
//! - `interface.rs`: what tests of the C interface and of the preload library begin with

#![allow(missing_docs, reason = "what a name says is not said again")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net;
use rustix::process::{Pid, Signal, kill_process};

mod built;
pub mod cluster;
pub mod disk;
pub mod history;
pub mod home;
pub mod interface;
pub mod link;
pub mod mount;
pub mod network;
pub mod nodes;
pub mod small;
pub mod voters;

pub use mojim_env::rng;

pub use built::{build_bench, libraries, mojim_path, source, temporary};

/// Longer than anything here takes, also on a machine with much else to do.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// A running `mojim`; killed on drop.
pub struct Process {
    /// The child.
    pub child: Child,
    out: BufReader<ChildStdout>,
    /// Its input, while it is open.
    pub stdin: Option<ChildStdin>,
    errors: PathBuf,
}

impl Process {
    pub fn start(args: &[&str], errors: &Path) -> Process {
        Process::start_with(args, errors, |_| {})
    }

    /// The same, of a command that `prepare` may still change.
    pub fn start_with(args: &[&str], errors: &Path, prepare: impl FnOnce(&mut Command)) -> Process {
        let mut command = Command::new(mojim_path());
        command.args(args);
        hear_signals(&mut command);
        prepare(&mut command);
        Process::of(command, errors)
    }

    /// The same, of another program.
    pub fn of(mut command: Command, errors: &Path) -> Process {
        let file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(errors)
            .unwrap();
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file);
        let mut child = command.spawn().unwrap();
        Process {
            out: BufReader::new(child.stdout.take().unwrap()),
            stdin: child.stdin.take(),
            child,
            errors: errors.to_owned(),
        }
    }

    /// The next line of its output; `None` at the end. What comes in pieces is
    /// one line; nothing within the deadline is a failure, not a wait without
    /// an end.
    pub fn line(&mut self) -> Option<String> {
        let end = Instant::now() + DEADLINE;
        let mut line = Vec::new();
        loop {
            if self.out.buffer().is_empty() {
                self.await_output(end);
            }
            let piece = self.out.fill_buf().unwrap();
            if piece.is_empty() {
                return None;
            }
            let ends = piece.iter().position(|b| *b == b'\n');
            let taken = ends.unwrap_or(piece.len());
            line.extend_from_slice(&piece[..taken]);
            self.out.consume(taken + ends.is_some() as usize);
            if ends.is_some() {
                return Some(String::from_utf8(line).unwrap());
            }
        }
    }

    /// Until there is output, or its end.
    fn await_output(&self, end: Instant) {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self.out.get_ref(), PollFlags::IN)];
            let time = Timespec::try_from(left).expect("a minute");
            match poll(&mut fds, Some(&time)) {
                Ok(0) => panic!("it says nothing: {}", self.errors()),
                Ok(_) => return,
                Err(Errno::INTR) => {}
                Err(e) => panic!("poll: {e}"),
            }
        }
    }

    /// The most memory that it ever had, in bytes.
    pub fn peak(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
        let kib = line.split_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap() << 10
    }

    pub fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    pub fn wait(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(s) = self.child.try_wait().unwrap() {
                return s.code();
            }
            assert!(
                begin.elapsed() < DEADLINE,
                "it does not end: {}",
                self.errors()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads acknowledged entries from `from` on until entry `to - 1`.
    pub fn acknowledged(&mut self, from: u64, to: u64) {
        for i in from..to {
            let line = self
                .line()
                .unwrap_or_else(|| panic!("ended before entry {i}: {}", self.errors()));
            assert_eq!(line, i.to_string());
        }
    }

    /// Its output, for a look at what is not read yet.
    pub fn pipe(&self) -> Pipe {
        Pipe(self.out.get_ref().as_fd().try_clone_to_owned().unwrap())
    }

    /// Lets it go on, whatever it says; the value ends it.
    pub fn read_on(self) -> Running {
        let mut p = self;
        let id = p.child.id();
        let reader = std::thread::spawn(move || while p.line().is_some() {});
        Running { id, reader }
    }

    /// Lets it go on, and keeps count of the entries that it has acknowledged.
    pub fn read_on_counting(self) -> Counted {
        let mut p = self;
        let id = p.child.id();
        let out = p.pipe();
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        let reader = std::thread::spawn(move || {
            while let Some(line) = p.line() {
                if let Ok(last) = line.parse::<u64>() {
                    counted.store(last + 1, Ordering::Release);
                }
            }
        });
        Counted {
            id,
            count,
            out,
            reader,
        }
    }

    /// Lets a program go on that waits for a line.
    pub fn go_on(&mut self) {
        let stdin = self.stdin.as_mut().expect("its input is open");
        writeln!(stdin).unwrap();
    }

    /// Lets a lingering program detach.
    pub fn finish(&mut self) {
        drop(self.stdin.take());
        assert_eq!(
            self.line().as_deref(),
            Some("detached"),
            "{}",
            self.errors()
        );
        assert_eq!(self.wait(), Some(0));
    }
}

/// The end of a process's output that a thread reads.
pub struct Pipe(OwnedFd);

impl Pipe {
    /// Until all is read of what a process said that says nothing more, and what
    /// the thread counts stands still.
    pub fn await_standstill(&self, count: impl Fn() -> u64) -> u64 {
        await_that("what it has said", || {
            let n = count();
            let left = rustix::io::ioctl_fionread(&self.0).unwrap();
            // The last piece may still be counted.
            std::thread::sleep(Duration::from_millis(200));
            (left == 0 && count() == n).then_some(n)
        })
    }
}

/// A program whose acknowledged entries a thread counts.
pub struct Counted {
    id: u32,
    count: Arc<AtomicU64>,
    out: Pipe,
    reader: std::thread::JoinHandle<()>,
}

impl Counted {
    /// Until `more` entries were acknowledged from now on.
    pub fn await_more(&self, more: u64) {
        let goal = self.count.load(Ordering::Acquire) + more;
        await_that("entries", || {
            assert!(!self.reader.is_finished(), "it ended by itself");
            (self.count.load(Ordering::Acquire) >= goal).then_some(())
        });
    }

    /// How many entries a program that is stopped said were acknowledged.
    pub fn read_all(&self) -> u64 {
        self.out.await_standstill(|| self.count())
    }

    /// How many entries were acknowledged.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.id
    }

    pub fn signal(&self, name: &str) {
        signal(self.id, name);
    }

    /// Until it ends by itself; how many entries were acknowledged.
    pub fn end(self) -> u64 {
        await_that("its end", || self.reader.is_finished().then_some(()));
        self.reader.join().unwrap();
        self.count.load(Ordering::Acquire)
    }

    /// It must still run, and is killed; how many entries were acknowledged.
    pub fn stop(self) -> u64 {
        assert!(!self.reader.is_finished(), "it ended by itself");
        signal(self.id, "KILL");
        self.reader.join().unwrap();
        self.count.load(Ordering::Acquire)
    }
}

/// A process whose output a thread reads.
pub struct Running {
    id: u32,
    reader: std::thread::JoinHandle<()>,
}

impl Running {
    /// It must still run, and is killed.
    pub fn stop(self) {
        assert!(!self.reader.is_finished(), "it ended by itself");
        signal(self.id, "KILL");
        self.reader.join().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port of 127.0.0.1 that is nobody else's while this lives: also not while
/// the node that listens there is dead. The socket is bound, but does not
/// listen, so the node's own may be bound to the same address.
pub struct Port {
    pub number: u16,
    _held: OwnedFd,
}

impl Port {
    pub fn new() -> Port {
        let held = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None).unwrap();
        net::sockopt::set_socket_reuseaddr(&held, true).unwrap();
        net::bind(&held, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = SocketAddrV4::try_from(net::getsockname(&held).unwrap()).unwrap();
        Port {
            number: at.port(),
            _held: held,
        }
    }
}

impl Default for Port {
    fn default() -> Port {
        Port::new()
    }
}

/// The command's process does by default what a signal asks for, whatever whoever started the tests has
/// ignored: what nohup, or a shell that starts them in the background, has ignored stays ignored for all
/// below, and no shell can catch it.
pub fn hear_signals(command: &mut Command) {
    let of_people = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGUSR2,
    ];
    let hear = move || {
        for s in of_people {
            // SAFETY: sets the default action of a valid signal.
            unsafe { libc::signal(s, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: system calls only.
    unsafe { command.pre_exec(hear) };
}

/// The program of the `mojim run` with this process id: its only child.
pub fn program_of(id: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    children.trim().parse().expect("one child")
}

/// Sends the signal of this name. No other process is started for that: on a busy machine
/// two signals would come at quite different times.
fn signal(id: u32, name: &str) {
    let signal = match name {
        "STOP" => Signal::STOP,
        "CONT" => Signal::CONT,
        "TERM" => Signal::TERM,
        "KILL" => Signal::KILL,
        "USR1" => Signal::USR1,
        "HUP" => Signal::HUP,
        other => panic!("no test sends {other}"),
    };
    let id = Pid::from_raw(id as i32).expect("a process");
    kill_process(id, signal).unwrap();
}

/// Has all of these processes stand still, at the same time; returns when the last of their
/// threads does.
pub fn stop_all(ids: &[u32]) {
    for id in ids {
        signal(*id, "STOP");
    }
    for id in ids {
        await_that("a standstill", || stands_still(*id).then_some(()));
    }
}

/// They go on.
pub fn continue_all(ids: &[u32]) {
    for id in ids {
        signal(*id, "CONT");
    }
}

/// Whether no thread of a process runs any more.
fn stands_still(id: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{id}/task")).into_iter();
    threads.flatten().flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state comes behind the name, which is in brackets.
        let state = stat.rsplit(") ").next().and_then(|s| s.chars().next());
        !matches!(state, Some('R' | 'S' | 'D'))
    })
}

pub fn mojim(args: &[&str]) -> Output {
    Command::new(mojim_path())
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Pauses between two looks at what is awaited.
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_millis(100);

pub fn await_that<T>(what: &str, f: impl FnMut() -> Option<T>) -> T {
    await_or(what, String::new, f)
}

/// The same, with what there is to say when it does not happen.
pub fn await_or<T>(
    what: &str,
    explain: impl FnOnce() -> String,
    mut f: impl FnMut() -> Option<T>,
) -> T {
    let begin = Instant::now();
    loop {
        let look = Instant::now();
        if let Some(x) = f() {
            return x;
        }
        if begin.elapsed() >= DEADLINE {
            panic!("{what} did not happen. {}", explain());
        }
        // Many looks start a process. That takes a processor from what is awaited.
        std::thread::sleep(look.elapsed().clamp(SHORTEST, LONGEST));
    }
}
