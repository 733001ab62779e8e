//! read, write and their kin, and fsync, on a volume's files.
//!
//! A read gives the committed bytes (under `mojim run --read` those that the node shows)
//! and, where the file is mapped, the bytes in memory: POSIX promises that read sees
//! stores to a shared mapping. A write goes to the memory where the file is mapped, and
//! is committed with it. Where the file is not mapped, the write is refused.
//!
//! Invariant: a descriptor's position is that of the real descriptor.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, off_t, size_t};

use crate::api::{api, failed};
use crate::inside::{self, enter, on};
use crate::names::{name_of, present_name};
use crate::process::{attach, check_owner, settle};
use crate::real::{self, c_name, exports, say, size_of, stat_of};
use crate::regions::{self, Region};
use crate::settings::directory;
use crate::table::{self, APPEND, DURABLE, Entry, READ, WRITE, position_lock};

/// Bytes at a position of a file.
///
/// # Safety
/// `buf` has room for `n` bytes.
unsafe fn read_at(fd: c_int, e: Entry, buf: *mut u8, n: usize, at: i64) -> Result<usize, c_int> {
    if !e.may(READ) {
        return Err(libc::EBADF);
    }
    if inside::reads() {
        // The data file may be in the middle of a sync point.
        let (h, api, name) = (attach()?, api()?, c_name(&name_of(e)?)?);
        // SAFETY: the handle, a C string, and the caller's promise.
        let got = unsafe { (api.mojim_read)(h, name.as_ptr(), buf.cast(), n, at) };
        return usize::try_from(got).map_err(|_| failed(api));
    }
    // SAFETY: the caller's promise.
    let got = unsafe { real::pread(fd, buf.cast(), n, at)? };
    for r in regions::of_file(e.id(), at as u64, got as u64) {
        let from = r.offset.max(at as u64);
        let to = r.file_end().min(at as u64 + got as u64);
        // SAFETY: inside the buffer, and inside the region, which the program
        // has not unmapped while it reads the same bytes. The program's own
        // stores meanwhile give old or new bytes, as with read(2).
        unsafe {
            std::ptr::copy(
                (r.start as u64 + (from - r.offset)) as *const u8,
                buf.add((from - at as u64) as usize),
                (to - from) as usize,
            );
        }
    }
    Ok(got)
}

/// Puts bytes into the memory where the file is mapped.
///
/// # Safety
/// `buf` has `n` bytes.
unsafe fn write_at(fd: c_int, e: Entry, buf: *const u8, n: usize, at: i64) -> Result<usize, c_int> {
    if !e.may(WRITE) {
        return Err(libc::EBADF);
    }
    if n == 0 {
        return Ok(0);
    }
    check_owner()?;
    let end = (at as u64).checked_add(n as u64).ok_or(libc::EFBIG)?;
    let mut there: Vec<_> = regions::of_file(e.id(), at as u64, n as u64)
        .filter(|r| r.write)
        .collect();
    there.sort_by_key(|r| r.offset);
    let mut covered = at as u64;
    for r in &there {
        if r.offset > covered {
            break;
        }
        covered = covered.max(r.file_end());
    }
    // Memory beyond the end of a file that was made shorter cannot be touched.
    if covered < end || end > size_of(fd)? {
        if table::warn_once(fd) {
            say(&format!(
                "write(2) to {} of volume {} is not supported unless it is mapped there",
                name_of(e)?,
                std::env::var("MOJIM_VOLUME").unwrap_or_else(|_| "(the only one)".into()),
            ));
        }
        return Err(libc::EOPNOTSUPP);
    }
    for r in &there {
        let from = r.offset.max(at as u64);
        let to = r.file_end().min(end);
        // SAFETY: inside the region, which allows stores, and the buffer.
        unsafe {
            std::ptr::copy(
                buf.add((from - at as u64) as usize),
                (r.start as u64 + (from - r.offset)) as *mut u8,
                (to - from) as usize,
            );
        }
    }
    Ok(n)
}

/// Runs `f` for each part of a vector; stops at a short one.
///
/// # Safety
/// `v` has `n` entries.
unsafe fn each(
    v: *const iovec,
    n: c_int,
    mut at: i64,
    mut f: impl FnMut(*mut u8, usize, i64) -> Result<usize, c_int>,
) -> Result<usize, c_int> {
    if !(0..=1024).contains(&n) || n > 0 && v.is_null() {
        return Err(libc::EINVAL);
    }
    let mut done = 0;
    for i in 0..n as usize {
        // SAFETY: entry i of n.
        let part = unsafe { *v.add(i) };
        match f(part.iov_base.cast(), part.iov_len, at) {
            Ok(k) => {
                done += k;
                at += k as i64;
                if k < part.iov_len {
                    break;
                }
            }
            Err(e) if done == 0 => return Err(e),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Where a call reads or writes: at a position of its own, or at the descriptor's.
#[derive(Clone, Copy)]
enum At {
    Here(i64),
    Current,
}

fn at(offset: off_t) -> Result<At, c_int> {
    if offset < 0 {
        Err(libc::EINVAL)
    } else {
        Ok(At::Here(offset))
    }
}

/// A read or write at a position; moves the descriptor's position if the call uses it.
fn positioned(
    fd: c_int,
    at: At,
    to_end: bool,
    f: impl FnOnce(i64) -> Result<usize, c_int>,
) -> Result<isize, c_int> {
    match at {
        At::Here(at) => f(at).map(|n| n as isize),
        At::Current => {
            // Two threads at one position: one after the other, as in the kernel.
            let _lock = position_lock();
            let here = if to_end {
                size_of(fd)? as i64
            } else {
                real::lseek(fd, 0, libc::SEEK_CUR)?
            };
            let n = f(here)?;
            real::lseek(fd, here + n as i64, libc::SEEK_SET)?;
            Ok(n as isize)
        }
    }
}

unsafe fn reads(fd: c_int, e: Entry, v: *const iovec, n: c_int, at: At) -> Result<isize, c_int> {
    if !e.may(READ) {
        return Err(libc::EBADF);
    }
    settle()?;
    positioned(fd, at, false, |at| {
        // SAFETY: the program's vector and buffers.
        unsafe { each(v, n, at, |p, len, at| read_at(fd, e, p, len, at)) }
    })
}

unsafe fn writes(fd: c_int, e: Entry, v: *const iovec, n: c_int, at: At) -> Result<isize, c_int> {
    // SAFETY: the caller's promise.
    unsafe { writes_with(fd, e, v, n, at, e.may(DURABLE)) }
}

/// Writes; `durable`: what was written is committed, as one sync point, when this
/// returns.
unsafe fn writes_with(
    fd: c_int,
    e: Entry,
    v: *const iovec,
    n: c_int,
    at: At,
    durable: bool,
) -> Result<isize, c_int> {
    positioned(fd, at, e.may(APPEND), |at| {
        // SAFETY: the program's vector and buffers.
        let n = unsafe { each(v, n, at, |p, len, at| write_at(fd, e, p, len, at))? };
        if durable && n > 0 {
            commit(
                regions::of_file(e.id(), at as u64, n as u64),
                at as u64,
                n as u64,
            )?;
        }
        Ok(n)
    })
}

/// A range of gmsync, as the header has it.
#[repr(C)]
struct Range {
    address: *mut c_void,
    length: c_int,
}

/// One sync point of `[at, at + n)` of files, as far as it lies in these regions.
fn commit(there: impl Iterator<Item = Region>, at: u64, n: u64) -> Result<(), c_int> {
    /// What a range's length can hold.
    const MOST: u64 = 1 << 30;
    let mut there: Vec<_> = there.filter(|r| r.write).collect();
    there.sort_by_key(|r| (r.file, r.offset));
    let mut ranges = Vec::new();
    let (mut file, mut covered) = (usize::MAX, at);
    for r in &there {
        if r.file != file {
            (file, covered) = (r.file, at);
        }
        // Memory that several mappings show is named once.
        let (mut from, to) = (
            r.offset.max(covered),
            r.file_end().min(at.saturating_add(n)),
        );
        covered = covered.max(to);
        while from < to {
            let length = (to - from).min(MOST);
            ranges.push(Range {
                address: (r.start as u64 + (from - r.offset)) as *mut c_void,
                length: length as c_int,
            });
            from += length;
        }
    }
    if ranges.is_empty() {
        return Ok(());
    }
    let api = api()?;
    let n = c_int::try_from(ranges.len()).map_err(|_| libc::ENOMEM)?;
    // SAFETY: `n` ranges, of regions; the program is told not to store meanwhile.
    match unsafe { (api.gmsync)(ranges.as_ptr().cast(), n, libc::MS_SYNC) } {
        0 => Ok(()),
        _ => Err(failed(api)),
    }
}

/// One sync point of all that this process has mapped.
fn sync_all() -> Result<c_int, c_int> {
    if inside::reads() || !regions::any() {
        return Ok(0);
    }
    check_owner()?;
    commit(regions::all(), 0, u64::MAX)?;
    Ok(0)
}

/// syncfs on any descriptor: true if the volume lies on its file system.
fn is_of_the_volume(fd: c_int) -> Result<bool, c_int> {
    use std::os::unix::fs::MetadataExt;
    let (dir, _) = directory()?;
    let there = std::fs::metadata(dir).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
    Ok(stat_of(fd)?.st_dev == there.dev())
}

fn one(buf: *const c_void, n: size_t) -> iovec {
    iovec {
        iov_base: buf.cast_mut(),
        iov_len: n.min(0x7fff_f000),
    }
}

/// The entry, if this library handles the call.
#[inline]
fn ours(fd: c_int) -> Option<Entry> {
    table::get(fd).filter(|_| on())
}

exports! { |pass|
    fn read(fd: c_int, buf: *mut c_void, n: size_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, At::Current) }),
            None => pass(),
        }
    }
    fn __read_chk(fd: c_int, buf: *mut c_void, n: size_t, room: size_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) if n <= room => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, At::Current) }),
            _ => pass(),
        }
    }
    fn pread(fd: c_int, buf: *mut c_void, n: size_t, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, at(offset)?) }),
            None => pass(),
        }
    }
    fn pread64(fd: c_int, buf: *mut c_void, n: size_t, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, at(offset)?) }),
            None => pass(),
        }
    }
    fn __pread_chk(fd: c_int, buf: *mut c_void, n: size_t, offset: off_t, room: size_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) if n <= room => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, at(offset)?) }),
            _ => pass(),
        }
    }
    fn __pread64_chk(fd: c_int, buf: *mut c_void, n: size_t, offset: off_t, room: size_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) if n <= room => enter(-1, || unsafe { reads(fd, e, &one(buf, n), 1, at(offset)?) }),
            _ => pass(),
        }
    }
    fn readv(fd: c_int, v: *const iovec, n: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { reads(fd, e, v, n, At::Current) }),
            None => pass(),
        }
    }
    fn preadv(fd: c_int, v: *const iovec, n: c_int, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { reads(fd, e, v, n, at(offset)?) }),
            None => pass(),
        }
    }
    fn preadv64(fd: c_int, v: *const iovec, n: c_int, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { reads(fd, e, v, n, at(offset)?) }),
            None => pass(),
        }
    }
    fn preadv2(fd: c_int, v: *const iovec, n: c_int, offset: off_t, flags: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { reads(fd, e, v, n, or_current(offset, flags)?) }),
            None => pass(),
        }
    }
    fn preadv64v2(fd: c_int, v: *const iovec, n: c_int, offset: off_t, flags: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { reads(fd, e, v, n, or_current(offset, flags)?) }),
            None => pass(),
        }
    }
    fn write(fd: c_int, buf: *const c_void, n: size_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { writes(fd, e, &one(buf, n), 1, At::Current) }),
            None => pass(),
        }
    }
    fn pwrite(fd: c_int, buf: *const c_void, n: size_t, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { writes(fd, e, &one(buf, n), 1, at(offset)?) }),
            None => pass(),
        }
    }
    fn pwrite64(fd: c_int, buf: *const c_void, n: size_t, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's buffer.
            Some(e) => enter(-1, || unsafe { writes(fd, e, &one(buf, n), 1, at(offset)?) }),
            None => pass(),
        }
    }
    fn writev(fd: c_int, v: *const iovec, n: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { writes(fd, e, v, n, At::Current) }),
            None => pass(),
        }
    }
    fn pwritev(fd: c_int, v: *const iovec, n: c_int, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { writes(fd, e, v, n, at(offset)?) }),
            None => pass(),
        }
    }
    fn pwritev64(fd: c_int, v: *const iovec, n: c_int, offset: off_t) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { writes(fd, e, v, n, at(offset)?) }),
            None => pass(),
        }
    }
    fn pwritev2(fd: c_int, v: *const iovec, n: c_int, offset: off_t, flags: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { flagged(fd, e, v, n, offset, flags) }),
            None => pass(),
        }
    }
    fn pwritev64v2(fd: c_int, v: *const iovec, n: c_int, offset: off_t, flags: c_int) -> isize {
        match ours(fd) {
            // SAFETY: the program's vector.
            Some(e) => enter(-1, || unsafe { flagged(fd, e, v, n, offset, flags) }),
            None => pass(),
        }
    }
}

/// preadv2's and pwritev2's position and flags.
fn or_current(offset: off_t, flags: c_int) -> Result<At, c_int> {
    match (flags, offset) {
        (0, -1) => Ok(At::Current),
        (0, offset) => at(offset),
        _ => Err(libc::EOPNOTSUPP),
    }
}

/// pwritev2: its flags may ask for what O_DSYNC and O_SYNC do.
unsafe fn flagged(
    fd: c_int,
    e: Entry,
    v: *const iovec,
    n: c_int,
    offset: off_t,
    flags: c_int,
) -> Result<isize, c_int> {
    const SYNC: c_int = libc::RWF_DSYNC | libc::RWF_SYNC;
    let at = or_current(offset, flags & !SYNC)?;
    let durable = flags & SYNC != 0 || e.may(DURABLE);
    // SAFETY: the caller's promise.
    unsafe { writes_with(fd, e, v, n, at, durable) }
}

/// A sync point of all regions of a file, of whichever process, atomic as a whole.
fn sync_file(fd: c_int, e: Entry) -> Result<c_int, c_int> {
    // As with fsync, a bad descriptor is an error.
    let st = stat_of(fd)?;
    if inside::reads() {
        return Ok(0);
    }
    check_owner()?;
    if st.st_nlink == 0 {
        return Ok(0); // nothing is left of a file that was removed
    }
    let (h, api, name) = (attach()?, api()?, c_name(&present_name(fd, e)?)?);
    // SAFETY: the handle and a C string; the program is told not to store meanwhile.
    match unsafe { (api.mojim_fsync)(h, name.as_ptr()) } {
        0 => Ok(0),
        _ => Err(failed(api)),
    }
}

exports! { |pass|
    fn fsync(fd: c_int) -> c_int {
        match ours(fd) {
            Some(e) => enter(-1, || sync_file(fd, e)),
            None => pass(),
        }
    }
    fn fdatasync(fd: c_int) -> c_int {
        match ours(fd) {
            Some(e) => enter(-1, || sync_file(fd, e)),
            None => pass(),
        }
    }
    fn sync() -> () {
        if regions::any() {
            // sync returns nothing: a failure is reported on standard error only.
            enter(-1, sync_all);
        }
        pass()
    }
    fn syncfs(fd: c_int) -> c_int {
        if regions::any()
            && enter(-1, || if is_of_the_volume(fd)? { sync_all() } else { Ok(0) }) != 0
        {
            return -1;
        }
        pass()
    }
    fn sync_file_range(fd: c_int, offset: off_t, n: off_t, flags: c_uint) -> c_int {
        match ours(fd) {
            // The kernel checks the arguments.
            Some(e) if flags != 0 && pass() == 0 => enter(-1, || sync_file(fd, e)),
            _ => pass(),
        }
    }
    // The C library calls its own fsync, from a thread of its own, past this library.
    fn aio_fsync(op: c_int, cb: *mut libc::aiocb) -> c_int {
        if commit_first(cb) { pass() } else { -1 }
    }
    fn aio_fsync64(op: c_int, cb: *mut libc::aiocb) -> c_int {
        if commit_first(cb) { pass() } else { -1 }
    }
}

/// aio_fsync: commits before the C library's call begins, which then only has to notify
/// the program. False, with errno, if the commit failed.
fn commit_first(cb: *mut libc::aiocb) -> bool {
    if cb.is_null() {
        return true;
    }
    // SAFETY: the program's, as aio_fsync(3) asks for.
    let fd = unsafe { (*cb).aio_fildes };
    match ours(fd) {
        Some(e) => enter(-1, || sync_file(fd, e)) == 0,
        None => true,
    }
}
