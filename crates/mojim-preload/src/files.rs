//! Calls that open, close and duplicate descriptors, size files, and change names.
//!
//! Owns what open and its kin, close, dup, fcntl, ftruncate, fallocate, unlink,
//! rename and link mean for a volume's files. Changes of names and sizes are
//! records. Everything else happens to a read-only descriptor of the data file.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libc::{mode_t, off_t, size_t};

use crate::api::{self, Api, Handle, api, failed};
use crate::inside::{self, enter, on, takes_paths};
use crate::locks;
use crate::made;
use crate::names::{check_parent, id_of, name_of, present_name, renamed};
use crate::path::{Kind, Target, resolve};
use crate::process::{self, attach, check_owner, is_owner};
use crate::real::{self, c_name, exports, real, say, size_of};
use crate::table::{self, APPEND, DURABLE, Entry, MAX_FD, READ, WRITE};

fn refuse<T>(text: String) -> Result<T, c_int> {
    say(&text);
    Err(libc::EOPNOTSUPP)
}

fn real_openat(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    real!(openat(dirfd => c_int, path => *const c_char, flags => c_int, mode => mode_t) -> c_int)
}

/// open, for any path. `pass` is the call as the program made it.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn open_at(
    dirfd: c_int,
    path: *const c_char,
    flags: c_int,
    pass: impl Fn() -> c_int,
) -> c_int {
    if path.is_null() || flags & libc::O_PATH != 0 {
        return pass();
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    if crate::path::is_elsewhere(bytes) || !takes_paths() {
        return pass();
    }
    let fd = enter(Some(-1), || {
        // SAFETY: the caller's promise.
        let target = unsafe { resolve(dirfd, path, flags & libc::O_NOFOLLOW == 0)? };
        target.map_or(Ok(None), |t| open_file(&t, flags))
    });
    fd.unwrap_or_else(pass)
}

/// Opens a volume's file; None if `t` is not a file to open here. Called inside.
pub fn open_file(t: &Target, flags: c_int) -> Result<Option<c_int>, c_int> {
    // O_TMPFILE too: what it makes has no name, and cannot be given one here.
    if t.kind == Kind::Other || flags & libc::O_DIRECTORY != 0 {
        return Ok(None);
    }
    let how = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => READ,
        libc::O_WRONLY => WRITE,
        _ => READ | WRITE,
    };
    let reads = how == READ && flags & (libc::O_CREAT | libc::O_TRUNC) == 0;
    if reads && !is_owner() && !inside::reads() {
        return Ok(None); // a child may read what is committed
    }
    check_reader(t, flags, how)?;
    check_open(t, flags, how)?;
    let (h, api) = (attach()?, api()?);
    let name = c_name(&t.name)?;
    if flags & libc::O_CREAT != 0 {
        create(t, &name, flags, (h, api))?;
    }
    let fd = open_data_file(t, flags)?;
    let mut how = how;
    if flags & libc::O_APPEND != 0 {
        how |= APPEND;
    }
    if flags & libc::O_DSYNC != 0 {
        how |= DURABLE;
    }
    match id_of(fd, &t.name) {
        Ok(id) => {
            table::set(fd, Some(Entry::new(id, how)));
            Ok(Some(fd))
        }
        Err(errno) => {
            real::close(fd);
            Err(errno)
        }
    }
}

/// Under `mojim run --read`, refuses an open that would change a file.
fn check_reader(t: &Target, flags: c_int, how: u32) -> Result<(), c_int> {
    let there = t.kind == Kind::File;
    if inside::reads() && (how & WRITE != 0 || flags & libc::O_TRUNC != 0 || !there) {
        if !there && flags & libc::O_CREAT == 0 {
            return Err(libc::ENOENT);
        }
        say(&format!(
            "{}: files of the volume are only read here (mojim run --read); its primary writes them",
            t.name
        ));
        return Err(libc::EROFS);
    }
    Ok(())
}

/// What O_CREAT asks for.
fn create(t: &Target, name: &CStr, flags: c_int, (h, api): (Handle, &Api)) -> Result<(), c_int> {
    let exclusive = flags & libc::O_EXCL != 0;
    if inside::reads() {
        // The file is there, or `check_reader` has refused the call.
        return if exclusive { Err(libc::EEXIST) } else { Ok(()) };
    }
    check_parent(t)?;
    // SAFETY: the handle, a C string.
    match unsafe { (api.mojim_create)(h, name.as_ptr()) } {
        -1 => Err(failed(api)),
        0 if exclusive => Err(libc::EEXIST),
        _ => Ok(()),
    }
}

/// The descriptor that the program gets: of the data file, for reading only.
fn open_data_file(t: &Target, flags: c_int) -> Result<c_int, c_int> {
    let kept = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NOATIME | libc::O_SYNC;
    let fd = real_openat(
        libc::AT_FDCWD,
        t.path.as_ptr(),
        libc::O_RDONLY | flags & kept,
        0,
    );
    if fd < 0 {
        return Err(real::errno());
    }
    if fd as usize >= MAX_FD {
        real::close(fd);
        say(&format!("{}: descriptor {fd} is beyond {MAX_FD}", t.name));
        return Err(libc::EMFILE);
    }
    Ok(fd)
}

/// Refuses, before anything has changed, an open whose purpose is a write(2) that would
/// be refused afterwards: by then the old bytes would be gone, or a file made that stays
/// empty. So O_TRUNC never truncates: it is allowed for an empty file only.
fn check_open(t: &Target, flags: c_int, how: u32) -> Result<(), c_int> {
    let has = |all: c_int| flags & all == all;
    let cuts = has(libc::O_TRUNC) && how & WRITE != 0 && t.size > 0;
    // A file cannot be mapped through a descriptor that is open for writing only.
    let anew = has(libc::O_TRUNC) || has(libc::O_APPEND) || has(libc::O_CREAT | libc::O_EXCL);
    if cuts || how == WRITE && anew {
        return refuse(format!(
            "opening {} with O_TRUNC is refused, and nothing was changed: write(2) to a file of a volume is not supported unless the file is mapped there. Open it with O_RDWR and without O_TRUNC, set its size by ftruncate, and map it",
            t.name
        ));
    }
    Ok(())
}

exports! { |pass|
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    fn openat(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(dirfd, path, flags, pass) }
    }
    fn openat64(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(dirfd, path, flags, pass) }
    }
    fn creat(path: *const c_char, mode: mode_t) -> c_int {
        let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    fn creat64(path: *const c_char, mode: mode_t) -> c_int {
        let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    // What _FORTIFY_SOURCE makes of open without a mode.
    fn __open_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(libc::AT_FDCWD, path, flags, pass) }
    }
    fn __openat_2(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(dirfd, path, flags, pass) }
    }
    fn __openat64_2(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the program's path.
        unsafe { open_at(dirfd, path, flags, pass) }
    }
}

/// Clears a descriptor's word before it is closed.
pub fn forget(fd: c_int) {
    if table::get(fd).is_some() && is_owner() {
        locks::let_go(fd);
        table::set(fd, None);
    }
}

fn forget_range(first: c_uint, last: c_uint) {
    for fd in first..=last.min(MAX_FD as c_uint - 1) {
        forget(fd as c_int);
    }
}

exports! { |pass|
    fn close(fd: c_int) -> c_int {
        if is_closed(fd) {
            return bad_number();
        }
        forget(fd);
        pass()
    }
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 && first <= last && on() {
            forget_range(first, last);
        }
        pass()
    }
    fn closefrom(first: c_int) -> () {
        if on() {
            forget_range(first.max(0) as c_uint, c_uint::MAX);
        }
        pass()
    }
}

/// Records that `to` was made a duplicate of `from`.
fn copied(from: c_int, to: c_int) -> c_int {
    let e = table::get(from);
    if to >= 0 && (e.is_some() || table::get(to).is_some()) && is_owner() {
        if e.is_some() && to as usize >= MAX_FD {
            real::close(to);
            real::set_errno(libc::EMFILE);
            return -1;
        }
        table::set(to, e);
    }
    to
}

/// The library, if its threads may open files in this process: for a moment such a file
/// may have a number that the program means to use.
fn engine() -> Option<&'static Api> {
    api::known().filter(|_| process::has_engine())
}

/// Whether the program has nothing open under this number. A shell saves or closes what a
/// number holds before it puts a file there.
fn is_closed(fd: c_int) -> bool {
    // SAFETY: any number.
    table::get(fd).is_none() && engine().is_some_and(|api| unsafe { (api.mojim_is_yours)(fd) } == 0)
}

fn bad_number() -> c_int {
    real::set_errno(libc::EBADF);
    -1
}

/// dup2 (without flags) and dup3: the old word is cleared before the descriptor is
/// replaced.
fn replaced(from: c_int, to: c_int, flags: c_int, pass: impl FnOnce() -> c_int) -> c_int {
    let call = || match engine() {
        // SAFETY: dup3, which reports a wrong number.
        Some(api) if from != to => unsafe { (api.mojim_dup3)(from, to, flags) },
        _ => pass(),
    };
    if from != to && is_closed(from) {
        return bad_number();
    }
    if from == to || table::get(from).is_none() && table::get(to).is_none() {
        return call();
    }
    let before = table::get(to);
    forget(to);
    let r = call();
    if r < 0 {
        if before.is_some() && is_owner() {
            table::set(to, before);
        }
        return r;
    }
    copied(from, r)
}

/// fcntl. Under `mojim run --read` a process's locks are always granted: no process
/// stores there.
fn control(fd: c_int, cmd: c_int, arg: *mut c_void, pass: impl FnOnce() -> c_int) -> c_int {
    let Some(e) = table::get(fd) else {
        let saves = [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC].contains(&cmd);
        return match saves && is_closed(fd) {
            true => bad_number(),
            false => pass(),
        };
    };
    match cmd {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, pass()),
        libc::F_GETFL => {
            let flags = pass();
            if flags < 0 {
                return flags;
            }
            let mode = match (e.may(READ), e.may(WRITE)) {
                (true, true) => libc::O_RDWR,
                (false, _) => libc::O_WRONLY,
                _ => libc::O_RDONLY,
            };
            flags & !libc::O_ACCMODE | mode | if e.may(APPEND) { libc::O_APPEND } else { 0 }
        }
        libc::F_SETFL => {
            let r = pass();
            if r == 0 && is_owner() {
                table::set_append(fd, arg as usize as c_int & libc::O_APPEND != 0);
            }
            r
        }
        libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK
            if !inside::reads() && is_owner() && !arg.is_null() =>
        {
            // SAFETY: the program's struct, as fcntl(2) asks for.
            unsafe { locks::control(fd, cmd, arg.cast()) }
        }
        libc::F_SETLK | libc::F_SETLKW if is_owner() && !arg.is_null() => 0,
        libc::F_GETLK if is_owner() && !arg.is_null() => {
            // SAFETY: the program's struct, as fcntl(2) asks for.
            unsafe { (*arg.cast::<libc::flock>()).l_type = libc::F_UNLCK as _ };
            0
        }
        _ => pass(),
    }
}

exports! { |pass|
    fn dup(fd: c_int) -> c_int {
        if is_closed(fd) {
            return bad_number();
        }
        copied(fd, pass())
    }
    fn dup2(from: c_int, to: c_int) -> c_int {
        replaced(from, to, 0, pass)
    }
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
        replaced(from, to, flags, pass)
    }
    fn fcntl(fd: c_int, cmd: c_int, arg: *mut c_void) -> c_int {
        control(fd, cmd, arg, pass)
    }
    fn fcntl64(fd: c_int, cmd: c_int, arg: *mut c_void) -> c_int {
        control(fd, cmd, arg, pass)
    }
    fn lockf(fd: c_int, cmd: c_int, len: off_t) -> c_int {
        if table::get(fd).is_some() && is_owner() {
            return if inside::reads() { 0 } else { locks::section(fd, cmd, len) };
        }
        pass()
    }
    fn lockf64(fd: c_int, cmd: c_int, len: off_t) -> c_int {
        if table::get(fd).is_some() && is_owner() {
            return if inside::reads() { 0 } else { locks::section(fd, cmd, len) };
        }
        pass()
    }
}

fn truncate_name(name: &str, size: off_t) -> Result<(), c_int> {
    let (h, api) = (attach()?, api()?);
    let name = c_name(name)?;
    // SAFETY: the handle, a C string.
    match unsafe { (api.mojim_truncate)(h, name.as_ptr(), size) } {
        0 => Ok(()),
        _ => Err(failed(api)),
    }
}

fn truncate_fd(fd: c_int, e: Entry, size: off_t) -> Result<(), c_int> {
    if !e.may(WRITE) || size < 0 {
        return Err(libc::EINVAL);
    }
    // Editors truncate in this way what they are about to rewrite, as with O_TRUNC
    // (`check_open`).
    if !e.may(READ) && (size as u64) < size_of(fd)? {
        return refuse(format!(
            "{}: cutting a file that is open for writing only is refused, and nothing was changed. Open it with O_RDWR",
            name_of(e)?
        ));
    }
    check_owner()?;
    truncate_name(&present_name(fd, e)?, size)
}

fn allocate(fd: c_int, e: Entry, mode: c_int, offset: off_t, len: off_t) -> Result<(), c_int> {
    if offset < 0 || len <= 0 {
        return Err(libc::EINVAL);
    }
    if !e.may(WRITE) {
        return Err(libc::EBADF);
    }
    if mode & !libc::FALLOC_FL_KEEP_SIZE != 0 {
        return refuse(format!(
            "{}: fallocate with mode {mode:#x} is not supported",
            name_of(e)?
        ));
    }
    let end = offset.checked_add(len).ok_or(libc::EFBIG)?;
    if mode == 0 && end as u64 > size_of(fd)? {
        return truncate_fd(fd, e, end);
    }
    Ok(())
}

/// A call on a path; None passes it on.
unsafe fn with_target(
    dirfd: c_int,
    path: *const c_char,
    follow: bool,
    f: impl FnOnce(Target) -> Result<c_int, c_int>,
) -> Option<c_int> {
    if !takes_paths() {
        return None;
    }
    enter(Some(-1), || {
        // SAFETY: the program's path.
        match unsafe { resolve(dirfd, path, follow)? } {
            Some(t) if t.kind == Kind::File => f(t).map(Some),
            _ => Ok(None),
        }
    })
}

fn ftruncate_any(fd: c_int, size: off_t, pass: impl FnOnce() -> c_int) -> c_int {
    match table::get(fd) {
        Some(e) if on() => enter(-1, || truncate_fd(fd, e, size).map(|()| 0)),
        _ => pass(),
    }
}

fn allocate_any(
    fd: c_int,
    mode: c_int,
    offset: off_t,
    len: off_t,
    pass: impl FnOnce() -> c_int,
) -> c_int {
    match table::get(fd) {
        Some(e) if on() => enter(-1, || allocate(fd, e, mode, offset, len).map(|()| 0)),
        _ => pass(),
    }
}

/// posix_fallocate gives its error back instead of setting errno.
fn allocate_posix(fd: c_int, offset: off_t, len: off_t, pass: impl FnOnce() -> c_int) -> c_int {
    match table::get(fd) {
        Some(_) if on() && inside::is_inside() => libc::EDEADLK,
        Some(e) if on() => enter(libc::EIO, || {
            Ok(allocate(fd, e, 0, offset, len).err().unwrap_or(0))
        }),
        _ => pass(),
    }
}

exports! { |pass|
    fn ftruncate(fd: c_int, size: off_t) -> c_int {
        ftruncate_any(fd, size, pass)
    }
    fn ftruncate64(fd: c_int, size: off_t) -> c_int {
        ftruncate_any(fd, size, pass)
    }
    fn truncate(path: *const c_char, size: off_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { with_target(libc::AT_FDCWD, path, true, |t| truncate_name(&t.name, size).map(|()| 0)) }
            .unwrap_or_else(pass)
    }
    fn truncate64(path: *const c_char, size: off_t) -> c_int {
        // SAFETY: the program's path.
        unsafe { with_target(libc::AT_FDCWD, path, true, |t| truncate_name(&t.name, size).map(|()| 0)) }
            .unwrap_or_else(pass)
    }
    fn fallocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
        allocate_any(fd, mode, offset, len, pass)
    }
    fn fallocate64(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
        allocate_any(fd, mode, offset, len, pass)
    }
    fn posix_fallocate(fd: c_int, offset: off_t, len: off_t) -> c_int {
        allocate_posix(fd, offset, len, pass)
    }
    fn posix_fallocate64(fd: c_int, offset: off_t, len: off_t) -> c_int {
        allocate_posix(fd, offset, len, pass)
    }
}

fn remove_name(t: &Target) -> Result<c_int, c_int> {
    let (h, api) = (attach()?, api()?);
    let name = c_name(&t.name)?;
    // SAFETY: the handle, a C string.
    if unsafe { (api.mojim_remove)(h, name.as_ptr()) } != 0 {
        return Err(failed(api));
    }
    renamed(t, None);
    Ok(0)
}

/// rename; None passes it on.
unsafe fn rename_any(
    from: (c_int, *const c_char),
    to: (c_int, *const c_char),
    flags: c_uint,
) -> Option<c_int> {
    if !takes_paths() {
        return None;
    }
    enter(Some(-1), || {
        // SAFETY: the program's paths.
        let (a, b) = unsafe { (resolve(from.0, from.1, false)?, resolve(to.0, to.1, false)?) };
        let (a, b) = match (a, b) {
            (None, None) => return Ok(None),
            (Some(a), Some(b)) => (a, b),
            // As between file systems: programs copy instead.
            (Some(_), None) => return Err(libc::EXDEV),
            // On EXDEV programs would remove the destination first.
            (None, Some(b)) => {
                return refuse(format!(
                    "{}: a file from elsewhere cannot be moved into a volume",
                    b.name
                ));
            }
        };
        if a.kind == Kind::Nothing {
            return Err(libc::ENOENT);
        }
        if a.kind == Kind::Other || b.kind == Kind::Other {
            return refuse(format!(
                "renaming {} to {}: only files can be renamed in a volume",
                a.name, b.name
            ));
        }
        if flags & !libc::RENAME_NOREPLACE != 0 {
            return Err(libc::EINVAL);
        }
        if flags & libc::RENAME_NOREPLACE != 0 && b.kind == Kind::File {
            return Err(libc::EEXIST);
        }
        check_parent(&b)?;
        if a.name == b.name {
            return Ok(Some(0));
        }
        let (h, api) = (attach()?, api()?);
        let (old, new) = (c_name(&a.name)?, c_name(&b.name)?);
        // SAFETY: the handle, C strings.
        if unsafe { (api.mojim_rename)(h, old.as_ptr(), new.as_ptr()) } != 0 {
            return Err(failed(api));
        }
        renamed(&b, None);
        renamed(&a, Some(&b.name));
        Ok(Some(0))
    })
}

/// link: a file of a volume has one name.
unsafe fn link_any(from: (c_int, *const c_char), to: (c_int, *const c_char)) -> Option<c_int> {
    if !takes_paths() {
        return None;
    }
    enter(Some(-1), || {
        // SAFETY: the program's paths.
        let (a, b) = unsafe { (resolve(from.0, from.1, false)?, resolve(to.0, to.1, false)?) };
        match a.or(b) {
            None => Ok(None),
            Some(t) => refuse(format!(
                "{}: a file of a volume has one name, no links",
                t.name
            )),
        }
    })
}

const CWD: c_int = libc::AT_FDCWD;

exports! { |pass|
    fn unlink(path: *const c_char) -> c_int {
        // SAFETY: the program's path.
        unsafe { with_target(CWD, path, false, |t| remove_name(&t)) }
            .unwrap_or_else(pass)
    }
    fn unlinkat(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
        if flags & libc::AT_REMOVEDIR != 0
            // SAFETY: the program's path.
            && let Some(answer) = unsafe { made::removed(dirfd, path) }
        {
            return answer;
        }
        // SAFETY: the program's path.
        unsafe { with_target(dirfd, path, false, |t| match flags & libc::AT_REMOVEDIR {
            0 => remove_name(&t),
            _ => Err(libc::ENOTDIR),
        }) }
            .unwrap_or_else(pass)
    }
    fn remove(path: *const c_char) -> c_int {
        // SAFETY: the program's path.
        unsafe { with_target(CWD, path, false, |t| remove_name(&t)) }
            .unwrap_or_else(pass)
    }
    fn rename(from: *const c_char, to: *const c_char) -> c_int {
        // SAFETY: the program's paths.
        unsafe { rename_any((CWD, from), (CWD, to), 0) }
            .unwrap_or_else(pass)
    }
    fn renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) -> c_int {
        // SAFETY: the program's paths.
        unsafe { rename_any((a, from), (b, to), 0) }
            .unwrap_or_else(pass)
    }
    fn renameat2(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_uint) -> c_int {
        // SAFETY: the program's paths.
        unsafe { rename_any((a, from), (b, to), flags) }
            .unwrap_or_else(pass)
    }
    fn link(from: *const c_char, to: *const c_char) -> c_int {
        // SAFETY: the program's paths.
        unsafe { link_any((CWD, from), (CWD, to)) }
            .unwrap_or_else(pass)
    }
    fn linkat(a: c_int, from: *const c_char, b: c_int, to: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the program's paths.
        unsafe { link_any((a, from), (b, to)) }
            .unwrap_or_else(pass)
    }
}

/// Copies inside the kernel: None passes the call on.
fn copy_any(from: c_int, to: c_int, what: &str) -> Option<isize> {
    if !on() || table::get(from).is_none() && table::get(to).is_none() {
        return None;
    }
    enter(Some(-1), || {
        if let Some(e) = table::get(to) {
            return refuse(format!("{what} into {} is not supported", name_of(e)?));
        }
        if let Some(e) = table::get(from) {
            if inside::reads() {
                // The data file may be in the middle of a sync point.
                return Err(libc::EINVAL);
            }
            if crate::regions::of_file(e.id(), 0, u64::MAX)
                .next()
                .is_some()
            {
                // The kernel would not see the stores; programs read and write instead.
                return Err(libc::EINVAL);
            }
            process::settle()?;
        }
        Ok(None)
    })
}

exports! { |pass|
    fn sendfile(to: c_int, from: c_int, at: *mut off_t, n: size_t) -> isize {
        copy_any(from, to, "sendfile")
            .unwrap_or_else(pass)
    }
    fn sendfile64(to: c_int, from: c_int, at: *mut off_t, n: size_t) -> isize {
        copy_any(from, to, "sendfile")
            .unwrap_or_else(pass)
    }
    fn copy_file_range(from: c_int, a: *mut off_t, to: c_int, b: *mut off_t, n: size_t, flags: c_uint) -> isize {
        copy_any(from, to, "copy_file_range")
            .unwrap_or_else(pass)
    }
    fn splice(from: c_int, a: *mut off_t, to: c_int, b: *mut off_t, n: size_t, flags: c_uint) -> isize {
        copy_any(from, to, "splice")
            .unwrap_or_else(pass)
    }
}
