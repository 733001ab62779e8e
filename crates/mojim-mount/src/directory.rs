//! How a session's directory is taken away, at the end.

use std::path::Path;
use std::time::Duration;

use mojim_env::Result;
use mojim_env::event::Event;
use rustix::mount::UnmountFlags;

use crate::mounting::take_away;
use crate::session::Session;

/// How long an unmounted directory is waited for that programs still use.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it is looked whether they do.
const STEP: Duration = Duration::from_millis(5);

/// Takes a session's directory away, also from under programs that use it; `left`: that was done.
///
/// # Errors
/// It stays, as the system or the helper of who is not root says.
pub(crate) fn unmount(session: &Session, directory: &Path, left: bool) -> Result<()> {
    if session.is_over() {
        return Ok(());
    }
    let taken = match left {
        true => Ok(()),
        false => take_away(directory, UnmountFlags::DETACH),
    };
    // It ends when the last file is closed.
    let nothing = Event::new();
    for _ in 0..PATIENCE.as_millis() / STEP.as_millis() {
        if session.is_over() {
            return taken;
        }
        nothing.wait_unless(|| false, STEP);
    }
    taken
}
