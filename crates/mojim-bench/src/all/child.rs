//! The process of a measurement: its group, its limit and its end.
//!
//! Invariants:
//!
//! - The process leads a group. The group gets signals only until the process is reaped, so its
//!   number is nobody else's.
//! - No process of the group is left when [`run`] returns, nor after a signal that ends this one.
//! - Its output lies in memory. A process that still has the output open delays nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use mojim_cli::failure::say_on_stderr;
use mojim_cli::signals;
use mojim_env::locks::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};

use crate::orphan::ends_with_us;
use crate::scratch::remove_left;

/// How long a group may clean up once it is asked to end.
const GRACE: Duration = Duration::from_secs(10);

/// The measurement that runs.
static RUNNING: Mutex<Option<Pid>> = Mutex::new(None);

/// From here on a signal that asks this process to end also ends the measurement that runs.
/// Call this before any thread is started.
pub(crate) fn end_on_signals() -> io::Result<()> {
    signals::block()?;
    let wait = || {
        let signal = signals::wait().unwrap_or(libc::SIGTERM);
        // It stays locked: nothing is started or reaped any more.
        let running = lock(&RUNNING);
        if let Some(pid) = *running {
            end(pid);
            remove_memory(pid);
        }
        say_on_stderr("interrupted: the same command goes on from here");
        // SAFETY: ends the process without running anything more.
        unsafe { libc::_exit(128 + signal) }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(wait).map(drop)
}

/// Runs the command until it ends. Its output is none if it did not end before `until`.
pub(crate) fn run(command: &mut Command, until: Instant) -> io::Result<Option<Output>> {
    let (out, err) = (memory("rows")?, memory("notes")?);
    command.stdout(out.try_clone()?).stderr(err.try_clone()?);
    command.process_group(0);
    ends_with_us(command, libc::SIGTERM);
    // SAFETY: it makes async-signal-safe system calls only.
    unsafe { command.pre_exec(signals::unblock_interrupt) };
    let mut running = lock(&RUNNING);
    let mut child = command.spawn()?;
    let pid = Pid::from_child(&child);
    *running = Some(pid);
    drop(running);
    let in_time = has_ended(pid, until);
    if !matches!(in_time, Ok(true)) {
        end(pid);
    }
    // It stays to be reaped below.
    let _ = waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    );
    let mut running = lock(&RUNNING);
    // That of its processes which it left behind.
    let _ = kill_process_group(pid, Signal::KILL);
    remove_memory(pid);
    let status = child.wait();
    *running = None;
    drop(running);
    let output = Output {
        status: status?,
        stdout: contents(&out)?,
        stderr: contents(&err)?,
    };
    Ok(in_time?.then_some(output))
}

/// Asks the group to end, and kills it if it does not. Its first process must not be reaped yet.
fn end(pid: Pid) {
    // No member may be left: either way it has ended.
    let _ = kill_process_group(pid, Signal::TERM);
    let _ = has_ended(pid, Instant::now() + GRACE);
    let _ = kill_process_group(pid, Signal::KILL);
}

/// Frees the shared memory that it left there if it was killed.
fn remove_memory(pid: Pid) {
    remove_left(Path::new("/dev/shm"), pid.as_raw_nonzero().get() as u32);
}

/// Whether the child has ended, of which `until` is waited for.
fn has_ended(pid: Pid, until: Instant) -> io::Result<bool> {
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&process, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(n) => return Ok(n > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// A file in memory.
fn memory(name: &str) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

fn contents(of: &File) -> io::Result<Vec<u8>> {
    let mut all = vec![0; of.metadata()?.len() as usize];
    // The place where a process writes next stays as it is.
    of.read_exact_at(&mut all, 0)?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// A shell with this script, and a pipe that ends with the last process that has the shell's
    /// standard input.
    fn shell(script: &str) -> (Command, io::PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        let mut c = Command::new("sh");
        c.args(["-c", script]).stdin(writer);
        (c, reader)
    }

    /// Waits until all processes of a shell have ended.
    fn await_end(command: Command, mut reader: io::PipeReader) {
        drop(command);
        let mut fds = [PollFd::new(&reader, PollFlags::IN)];
        let most = Timespec::try_from(Duration::from_secs(60)).unwrap();
        assert_eq!(poll(&mut fds, Some(&most)), Ok(1), "they did not end");
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }

    /// A measurement that hung kept the whole report from its end.
    #[test]
    fn what_takes_too_long_is_ended_with_its_children() {
        let (mut c, reader) = shell("exec 9<&0; sleep 600 & sleep 60; echo row");
        let until = Instant::now() + Duration::from_millis(300);
        assert!(run(&mut c, until).unwrap().is_none());
        await_end(c, reader);
    }

    /// A node of a measurement that failed stayed, and took time from all measurements after it.
    #[test]
    fn what_has_ended_leaves_no_child() {
        let (mut c, reader) = shell("exec 9<&0; sleep 600 & echo row; echo note >&2; exit 3");
        let until = Instant::now() + Duration::from_secs(3600);
        let out = run(&mut c, until).unwrap().expect("it ended");
        let said = (&out.stdout[..], &out.stderr[..], out.status.code());
        assert_eq!(said, (&b"row\n"[..], &b"note\n"[..], Some(3)));
        await_end(c, reader);
    }
}
