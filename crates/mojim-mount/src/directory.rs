//! How a mounted directory is taken away.

use std::path::Path;
use std::time::Duration;

use fuser::BackgroundSession;
use mojim_env::event::Event;
use mojim_env::{Context, Error, Result};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

/// How long an unmounted directory is waited for that programs still use.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it is looked whether they do.
const STEP: Duration = Duration::from_millis(5);

/// Takes a directory away in this process's namespace.
///
/// # Errors
/// Somebody uses it, unless `flags` say that this is no matter, or the helper fails that unmounts
/// for who is not root.
pub(crate) fn take_away(directory: &Path, flags: UnmountFlags) -> Result<()> {
    let what = || format!("unmounting {}", directory.display());
    match rustix::mount::unmount(directory, flags) {
        // Only root may; others have a helper.
        Err(Errno::PERM) => {
            let mut helper = std::process::Command::new("fusermount3");
            helper
                .arg("-u")
                .args(flags.contains(UnmountFlags::DETACH).then_some("-z"));
            let out = helper.arg(directory).output().context(what)?;
            if !out.status.success() {
                let said = String::from_utf8_lossy(&out.stderr).trim().to_owned();
                return Err(Error::io(what(), &std::io::Error::other(said)));
            }
            Ok(())
        }
        // Somebody else has.
        Err(Errno::INVAL) => Ok(()),
        taken => taken.map_err(std::io::Error::from).context(what),
    }
}

/// Takes a session's directory away, also from under programs that use it; `left`: that was done.
///
/// # Errors
/// It stays, as the system or the helper of who is not root says.
pub(crate) fn unmount(session: BackgroundSession, directory: &Path, left: bool) -> Result<()> {
    if session.guard.is_finished() {
        return Ok(());
    }
    let taken = match left {
        true => Ok(()),
        false => take_away(directory, UnmountFlags::DETACH),
    };
    // It ends when the last file is closed.
    let nothing = Event::new();
    for _ in 0..PATIENCE.as_millis() / STEP.as_millis() {
        if session.guard.is_finished() {
            return taken;
        }
        nothing.wait_unless(|| false, STEP);
    }
    // Dropped, it would unmount what somebody else may have mounted there by then.
    std::mem::forget(session);
    taken
}
