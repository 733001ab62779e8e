//! Transactions whose commit is in doubt.
//!
//! Owns how a program decides whether they are tried again.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use engine::Error;

/// Has `again` asked whether a transaction that is in doubt is tried again: after each commit that failed
/// so that it may have happened, because the mirror made no progress ([`Error::Timeout`]), or the disk
/// has no room meanwhile. `None`, at first: after `Timeout` and without memory it is tried for ever, else not.
///
/// It is called in the thread of the transaction, of whatever heap or region of the process, and calls nothing
/// of this crate. One that waits sleeps there: a try takes as long as a sync point that fails, or no time.
///
/// Where it returns false (or panics), the transaction returns the error. It may have been committed, and may be
/// later, whole. What it changed stays in memory, and **the process commits no transaction any more**: each could
/// build on it. End it; the next one finds the transaction whole or not at all.
///
/// ```
/// use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
/// static TRIES: AtomicU32 = AtomicU32::new(0);
///
/// mojim::on_doubt(Some(|e| {
///     eprintln!("{e}");
///     TRIES.fetch_add(1, Relaxed) < 5
/// }));
/// # mojim::on_doubt(None);
/// ```
pub fn on_doubt(again: Option<fn(&Error) -> bool>) {
    match again {
        Some(f) => mojim_tx::on_failure(Some(ask), f as *mut c_void),
        None => mojim_tx::on_failure(None, null_mut()),
    }
}

/// # Safety
/// `f` is the program's function, as [`on_doubt`] gave it, and `text` a C string.
unsafe extern "C-unwind" fn ask(errno: c_int, text: *const c_char, f: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let (f, text) = unsafe {
        let f = std::mem::transmute::<*mut c_void, fn(&Error) -> bool>(f);
        (f, CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    let e = match errno {
        libc::ETIMEDOUT => Error::Timeout(text),
        _ => Error::Io {
            what: "committing a transaction".into(),
            errno,
            error: text,
        },
    };
    // A transaction that is unwound would be taken back.
    let again = catch_unwind(AssertUnwindSafe(|| f(&e)));
    again.unwrap_or(false).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program is asked with the error, and its panic is no.
    #[test]
    fn a_program_is_asked() {
        fn is_late(e: &Error) -> bool {
            assert!(e.to_string().contains("late"));
            matches!(e, Error::Timeout(_)) || e.errno() == libc::ENOMEM
        }
        let ask = |errno, text: &CStr| {
            let f: fn(&Error) -> bool = is_late;
            // SAFETY: such a function, and a C string.
            unsafe { ask(errno, text.as_ptr(), f as *mut c_void) }
        };
        assert_eq!(ask(libc::ETIMEDOUT, c"late"), 1);
        assert_eq!(ask(libc::ENOMEM, c"late"), 1);
        assert_eq!(ask(libc::ENOSPC, c"late"), 0);
        assert_eq!(ask(libc::ETIMEDOUT, c"early"), 0);
    }
}
