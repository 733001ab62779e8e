//! Whether a thread is being killed.
//!
//! Owns what the system says of that. SIGKILL becomes pending for each thread of a process that
//! is ended at once. Such an end comes by:
//!
//! - SIGKILL
//! - another signal whose action is to end it and that is not a reason to dump its memory
//! - a call of `exit` or `execve` in another thread
//!
//! The kernel asks nothing else itself where a wait ends only for a thread that is being killed.
//!
//! Invariant: a thread counts as killed only if it never comes back to its program.

use std::fs::read;

/// The bit of SIGKILL.
const KILL: u64 = 1 << (libc::SIGKILL - 1);

/// Whether the thread that called is being killed, as far as can be seen. 0: the kernel itself, or one in
/// a namespace of process ids that is not below that of the mount.
pub(crate) fn is_killed(thread: u32) -> bool {
    thread != 0 && has_kill_pending(&status(&thread.to_string())) && sees_own_ids()
}

fn status(of: &str) -> Vec<u8> {
    read(format!("/proc/{of}/status")).unwrap_or_default()
}

/// What a status says behind `name`. The name of the program, which it chooses, has no end of a line.
fn field<'a>(status: &'a [u8], name: &str) -> Option<&'a str> {
    let mut lines = status.split(|b| *b == b'\n');
    let value = lines.find_map(|l| l.strip_prefix(name.as_bytes()))?;
    Some(str::from_utf8(value.strip_prefix(b":")?).ok()?.trim())
}

/// The kernel makes SIGKILL pending for each thread, also where the signal was for the whole process.
fn has_kill_pending(status: &[u8]) -> bool {
    let pending = field(status, "SigPnd").and_then(|s| u64::from_str_radix(s, 16).ok());
    pending.is_some_and(|signals| signals & KILL != 0)
}

/// Whether `/proc` has the ids that this process sees, as the kernel's requests do. It may be that of a
/// namespace above: then there are as many ids of this process.
fn sees_own_ids() -> bool {
    let own = status("self");
    field(&own, "NSpid").is_some_and(|ids| ids == std::process::id().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pending_sigkill_counts() {
        let with = |pending: &str| {
            let all = "fffffffffffffeff";
            format!(
                "Name:\tx\\nSigPnd:\t{all}\nSigPnd:\t{pending}\nShdPnd:\t{all}\nSigBlk:\t{all}\n"
            )
        };
        let is = |pending| has_kill_pending(with(pending).as_bytes());
        assert!(is("0000000000000100") && is("ffffffffffffffff"));
        assert!(!is("0000000000000000") && !is("fffffffffffffeff"));
        assert!(!has_kill_pending(b"") && !has_kill_pending(b"SigPnd:\n"));
        // SIGUSR1 and SIGTERM, to name two that programs handle.
        assert!(!is("0000000000000200") && !is("0000000000004000"));
        let me = std::process::id();
        assert!(has_kill_pending(b"SigPnd:\t100\n") && sees_own_ids() && !is_killed(me));
        assert!(!is_killed(0));
    }
}
