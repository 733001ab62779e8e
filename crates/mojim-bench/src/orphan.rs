//! Children that do not outlive this process.
//!
//! The kernel sends the signal when the *thread* that started the child ends. So a thread that
//! lives as long as the child starts it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The command's process will get `signal` when the thread that starts it ends.
pub(crate) fn ends_with_us(command: &mut Command, signal: libc::c_int) {
    let parent = std::process::id();
    let ask = move || {
        // SAFETY: two async-signal-safe system calls, which take numbers.
        let orphan = unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal);
            libc::getppid() != parent as i32
        };
        match orphan {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => Ok(()),
        }
    };
    // SAFETY: `ask` makes async-signal-safe system calls only, and allocates nothing.
    unsafe { command.pre_exec(ask) };
}
