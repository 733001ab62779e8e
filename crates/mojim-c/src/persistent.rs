//! `include/mojim_persistent.h`: persistent variables, regions and logs.

use std::ffi::{c_char, c_int, c_void};

use engine::Volume;
use mojim_persistent::variables;

use crate::{Failure, Mojim, guard, handle, text};

/// The volume of a handle that has it for itself.
///
/// # Safety
/// As for [`handle`].
unsafe fn own<'a>(m: *mut Mojim, what: &str) -> Result<&'a Volume, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { handle(m)? } {
        Mojim::Primary(v) if v.in_child().is_none() => Ok(v),
        Mojim::Primary(_) | Mojim::Guest(_) => Err(Failure(
            libc::EOPNOTSUPP,
            format!(
                "{what}: another process has the volume attached (mojim_join, or a fork); only that one can have them"
            ),
        )),
        Mojim::Reader(r) => Err(Failure(
            libc::EROFS,
            format!(
                "{what}: volume {} is only read here (mojim_attach_reader)",
                r.name()
            ),
        )),
    }
}

/// `mojim_variables_of`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string; `start` and `stop` are the bounds of
/// the caller's section, which no other thread uses now.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_variables_of(
    m: *mut Mojim,
    file: *const c_char,
    start: *mut c_void,
    stop: *mut c_void,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        unsafe {
            let (volume, file) = (own(m, "persistent variables")?, text(file, "file")?);
            variables::open(volume, file, start.cast(), stop.cast())?;
        }
        Ok(0)
    })
}
