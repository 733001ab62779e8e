//! `include/mojim_persistent.h`: persistent variables, regions and logs.

use std::ffi::{c_char, c_int, c_void};

use std::path::Path;

use engine::Volume;
use mojim_persistent::log::Encoding;
use mojim_persistent::{AppendLog, regions, store8, variables};

use crate::{Failure, Mojim, guard, guard_always, handle, invalid, text};

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

/// `mojim_pmap`.
///
/// # Safety
/// As for [`mojim_variables_of`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_pmap(
    m: *mut Mojim,
    file: *const c_char,
    size: usize,
) -> *mut c_void {
    guard(libc::MAP_FAILED, || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (own(m, "persistent regions")?, text(file, "file")?) };
        Ok(regions::pmap(volume, file, size)?.ptr.cast())
    })
}

/// `mojim_punmap`.
///
/// # Safety
/// Nobody uses the region's memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_punmap(addr: *mut c_void) -> c_int {
    guard_always(-1, || {
        let span = engine::span_of(addr as usize);
        mojim_tx::unmapping(span.as_slice(), || regions::punmap(addr.cast()))?;
        Ok(0)
    })
}

/// `mojim_store8`.
///
/// # Safety
/// Eight bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_store8(p: *mut u64, value: u64) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        unsafe { store8(p, value)? };
        Ok(0)
    })
}

fn encoding(number: c_int) -> Result<Option<Encoding>, Failure> {
    match u32::try_from(number) {
        Ok(0) => Ok(None),
        Ok(n) if Encoding::of(n).is_some() => Ok(Encoding::of(n)),
        _ => invalid(format!("{number} is no encoding of a log")),
    }
}

/// `mojim_log_open`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_open(
    m: *mut Mojim,
    file: *const c_char,
    size: usize,
    how: c_int,
) -> *mut AppendLog {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (own(m, "logs")?, text(file, "file")?) };
        let log = AppendLog::open(volume, file, size, encoding(how)?)?;
        Ok(Box::into_raw(Box::new(log)))
    })
}

/// `mojim_log_open_pmem`.
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_open_pmem(
    path: *const c_char,
    size: usize,
    how: c_int,
    delay_ns: u32,
) -> *mut AppendLog {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let path = Path::new(unsafe { text(path, "path")? });
        let log = AppendLog::open_persistent(path, size, encoding(how)?, delay_ns)?;
        Ok(Box::into_raw(Box::new(log)))
    })
}

/// A log's handle.
///
/// # Safety
/// `log` is null or came from `mojim_log_open` or `mojim_log_open_pmem` and was not closed.
unsafe fn opened<'a>(log: *const AppendLog) -> Result<&'a AppendLog, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { log.as_ref() } {
        Some(log) => Ok(log),
        None => invalid("the log is NULL: mojim_log_open failed?"),
    }
}

/// `mojim_log_close`.
///
/// # Safety
/// As for [`opened`]; no other call uses the log.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_close(log: *mut AppendLog) -> c_int {
    guard_always(-1, || {
        // SAFETY: the caller's promise; made by `Box::into_raw`.
        unsafe {
            opened(log)?;
            Box::from_raw(log).close()?;
        }
        Ok(0)
    })
}

/// `mojim_log_append`.
///
/// # Safety
/// As for [`opened`]; `data` begins `n` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_append(
    log: *mut AppendLog,
    data: *const c_void,
    n: usize,
    position: *mut u64,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let log = unsafe { opened(log)? };
        let record = match (data.is_null(), n) {
            (_, 0) => &[],
            (true, _) => return invalid("the record is NULL"),
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(data.cast::<u8>(), n) },
        };
        let at = log.append(record)?;
        if !position.is_null() {
            // SAFETY: the caller's promise.
            unsafe { position.write(at) };
        }
        Ok(0)
    })
}

/// `mojim_log_read`.
///
/// # Safety
/// As for [`opened`]; `position` is null or can be written, `out` has room for `n` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_read(
    log: *mut AppendLog,
    position: *mut u64,
    out: *mut c_void,
    n: usize,
) -> libc::ssize_t {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let log = unsafe { opened(log)? };
        if position.is_null() || out.is_null() && n > 0 {
            return invalid("the position, or the buffer, is NULL");
        }
        // SAFETY: the caller's promise.
        let at = unsafe { position.read() };
        let mut record = Vec::new();
        let Some(next) = log.read(at, &mut record)? else {
            return Err(Failure(libc::ENOENT, format!("the log ends at {at}")));
        };
        if record.len() > n {
            let text = format!(
                "the record at {at} has {} bytes, the buffer {n}",
                record.len()
            );
            return Err(Failure(libc::ERANGE, text));
        }
        // SAFETY: the caller's promise; `record` is not longer.
        unsafe {
            std::ptr::copy_nonoverlapping(record.as_ptr(), out.cast(), record.len());
            position.write(next);
        }
        Ok(record.len() as libc::ssize_t)
    })
}

/// `mojim_log_truncate`.
///
/// # Safety
/// As for [`opened`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_truncate(log: *mut AppendLog, position: u64) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        unsafe { opened(log)? }.truncate(position)?;
        Ok(0)
    })
}

/// `mojim_log_ends`.
///
/// # Safety
/// As for [`opened`]; the other arguments are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_log_ends(
    log: *mut AppendLog,
    first: *mut u64,
    end: *mut u64,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        unsafe {
            let (head, tail) = opened(log)?.ends()?;
            for (to, value) in [(first, head), (end, tail)] {
                if let Some(to) = to.as_mut() {
                    *to = value;
                }
            }
        }
        Ok(0)
    })
}
