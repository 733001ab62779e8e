//! How long a call may wait in the thread that makes it.
//!
//! Owns that, for each thread. Threads that serve the kernel wait for nothing, but where there are
//! several, some of them wait for the disk. The thread that makes calls anew waits for a moment:
//! until a disk has room, or a data file is open. All other threads wait.
//!
//! A thread that alone serves whoever asks on a processor waits for a sync point as long as nobody
//! else asks.

use std::cell::{Cell, RefCell};

use rustix::io::Errno;

/// What a call says that has changed nothing and would have to wait. No program is told this.
pub(crate) const WOULD_WAIT: Errno = Errno::INPROGRESS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum May {
    Wait,
    /// A moment, and not until the log has room.
    Pause,
    /// Until the disk has read something, and for nothing else.
    Disk,
    Nothing,
}

/// Whether others ask the thread.
type Asked = Box<dyn Fn() -> bool>;

thread_local! {
    static MAY: Cell<May> = const { Cell::new(May::Wait) };
    static ASKED: RefCell<Option<Asked>> = const { RefCell::new(None) };
}

/// Does the work of a thread that serves alone; `asked` says whether others ask it.
pub(crate) fn serve_alone<T>(asked: Asked, work: impl FnOnce() -> T) -> T {
    /// Also after a panic: what `asked` has goes before what that leads to.
    struct Serves;
    impl Drop for Serves {
        fn drop(&mut self) {
            ASKED.set(None);
        }
    }
    ASKED.set(Some(asked));
    let _serves = Serves;
    work()
}

/// Whether others ask the calling thread; `None` if it is not alone, or does not serve.
pub(crate) fn others_ask() -> Option<bool> {
    ASKED.with_borrow(|asked| asked.as_ref().map(|a| a()))
}

fn only<T>(may: May, call: impl FnOnce() -> T) -> T {
    MAY.set(may);
    let done = call();
    MAY.set(May::Wait);
    done
}

/// Makes a call, which fails with [`WOULD_WAIT`] in place of a wait.
pub(crate) fn at_once<T>(call: impl FnOnce() -> T) -> T {
    only(May::Nothing, call)
}

/// Makes a call, which may wait for a moment, and fails with [`WOULD_WAIT`] in place of a longer wait.
pub(crate) fn anew<T>(call: impl FnOnce() -> T) -> T {
    only(May::Pause, call)
}

/// Makes a call, which may wait until the disk has read something, and fails with [`WOULD_WAIT`] in place of
/// another wait.
pub(crate) fn by_disk<T>(call: impl FnOnce() -> T) -> T {
    only(May::Disk, call)
}

/// Whether this thread must not wait until the log has room.
pub(crate) fn is_at_once() -> bool {
    MAY.get() != May::Wait
}

/// Fails with [`WOULD_WAIT`] if this thread must not even wait for a moment.
pub(crate) fn may_pause() -> Result<(), Errno> {
    match MAY.get() {
        May::Nothing | May::Disk => Err(WOULD_WAIT),
        May::Wait | May::Pause => Ok(()),
    }
}

/// Fails with [`WOULD_WAIT`] if this thread must not even wait for the disk.
pub(crate) fn may_read() -> Result<(), Errno> {
    match MAY.get() {
        May::Nothing => Err(WOULD_WAIT),
        May::Wait | May::Pause | May::Disk => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that served slept for a moment, up to ten times in a call, until a full disk had room: eight
    /// such calls kept all others waiting.
    #[test]
    fn a_thread_that_serves_does_not_pause() {
        assert_eq!(
            at_once(|| (is_at_once(), may_pause())),
            (true, Err(WOULD_WAIT))
        );
        assert_eq!(anew(|| (is_at_once(), may_pause())), (true, Ok(())));
        assert_eq!((is_at_once(), may_pause()), (false, Ok(())));
        assert_eq!(at_once(may_read), Err(WOULD_WAIT));
        assert_eq!(
            by_disk(|| (may_read(), may_pause())),
            (Ok(()), Err(WOULD_WAIT))
        );
        assert_eq!((anew(may_read), may_read()), (Ok(()), Ok(())));
    }
}
