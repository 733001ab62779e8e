//! The process that watches a mount's process (`mount_lifetime.rs`), as the parent of that.
//!
//! Owns what follows the death of the mount's process. A dead mount does not come back for who has it:
//! the working directories and open files of its programs stay dead, and each call fails. So these
//! programs are killed, as by a machine that stops. Their service managers start them again, and the
//! next `mojim run` mounts the volume again.
//!
//! Invariants:
//! - The watching process does nothing else, and waits only. It needs no memory of the volume's.
//! - No mount's process runs without it from the start: if it cannot watch, it ends that one.
//! - The mount's process sees when nobody waits for the mount any more: the pipe to the `mojim run` that
//!   started the mount is this one's output, and the other one's input ([`nobody_waits`]).
//! - Programs are killed only where the mount ended under them, and only those in namespaces that were
//!   made for this run of it: the number of its file system may be another volume's by then.
//! - It says why the mount's process ended, in the log of the mount and beside it, before it
//!   kills anything.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::failure::{Done, Failure};
use crate::mount_lifetime::{CUT_OFF, end_users};
use crate::namespace::below;
use crate::run_note;
use crate::runs_mount::{Begun, device_of};
use crate::signals;

/// The exit code of a process that panicked.
const PANICKED: i32 = 101;

/// Starts the mount's process, which is this one's command line and `word`, and waits for its end.
/// `id` is that of this run of the mount.
pub fn watch(at: &Path, word: &str, id: &str) -> Done {
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg(word)
        .stdin(std::io::stdout().as_fd().try_clone_to_owned()?)
        .stdout(Stdio::piped())
        .spawn()?;
    if let Err(e) = pass_signals_on(&child) {
        // Whoever starts the mount is told, and no program uses it yet.
        let _ = child.kill().and_then(|()| child.wait());
        return Err(Failure::from(e).at("watching the mount's process"));
    }
    let mut device = None;
    let said = BufReader::new(child.stdout.take().expect("it is piped"));
    for line in said.lines().map_while(Result::ok) {
        if let Ok(Begun::Mounted) = serde_json::from_str(&line) {
            device = device_of(at).ok();
        }
        // Who started this process may have ended.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
    let status = child.wait()?;
    let code = status.code().unwrap_or(1) as u8;
    let Some(device) = device.filter(|_| ended_under_programs(status)) else {
        return Ok(code);
    };
    tracing::error!("the mount's process ended ({status}): the programs that use it are killed");
    if died(status) {
        note(at, status);
    }
    match end_users(device, &below(id)) {
        0 => {}
        n => tracing::error!("{n} processes that used the mount were killed"),
    }
    Ok(code)
}

/// In the mount's process, before it is mounted: whether the `mojim run` that started it has ended, or
/// waits no longer. Also if the watching process has ended.
pub fn nobody_waits() -> bool {
    let (input, output) = (std::io::stdin(), std::io::stdout());
    // Both are ends of pipes to write to, and an error says that nobody reads.
    let none = PollFlags::empty();
    let mut fds = [PollFd::new(&input, none), PollFd::new(&output, none)];
    let now = rustix::time::Timespec::default();
    let _ = poll(&mut fds, Some(&now));
    fds.iter().any(|fd| fd.revents().contains(PollFlags::ERR))
}

/// Whether programs may be left that use the mount, which is dead. One that ended since nobody used it
/// may also have failed, to commit what they had stored.
fn ended_under_programs(status: ExitStatus) -> bool {
    died(status) || status.code() == Some(CUT_OFF.into())
}

/// Whether the process could not say itself what became of the volume.
fn died(status: ExitStatus) -> bool {
    status.code().is_none_or(|code| code == PANICKED)
}

/// Leaves word for the next `mojim run`, and for `mojim status`.
fn note(at: &Path, status: ExitStatus) {
    let why = format!(
        "the process of their mount died ({status}): changes that they had not synced are lost, and running programs were killed"
    );
    run_note::write_if_none(at.parent().unwrap_or(Path::new("/")), &why);
}

/// A service manager may know of this process only.
fn pass_signals_on(child: &Child) -> std::io::Result<()> {
    let to = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    std::thread::Builder::new().spawn(move || {
        while let Ok(signal) = signals::wait() {
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = pidfd_send_signal(&to, signal);
            }
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// A mount that nobody used any more, and that could not commit what was stored, had the programs
    /// killed of the volume that was mounted meanwhile and had got its file system's number.
    #[test]
    fn programs_are_killed_only_where_the_mount_ended_under_them() {
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        assert!(ended_under_programs(ExitStatus::from_raw(libc::SIGKILL)));
        assert!(ended_under_programs(exited(PANICKED)));
        assert!(ended_under_programs(exited(CUT_OFF.into())));
        assert!(!ended_under_programs(exited(0)));
        assert!(!ended_under_programs(exited(1)));
    }
}
