//! mmap, msync, munmap and the other calls on mapped memory.
//!
//! Owns the meaning of these calls for regions. A region must be mapped,
//! unmapped and protected as a whole: change tracking depends on it.
//!
//! Invariant: calls that touch no region are one raw system call, without
//! locks or allocation.

use std::ffi::{c_int, c_void};

use libc::{off_t, size_t};

use crate::api::{MAP_ATOMIC, MOJIM_RDONLY, MOJIM_SHARED, api, failed, last_error};
use crate::inside::{enter, on, reads};
use crate::names::{name_of, present_name};
use crate::process::{attach, check_owner, is_owner, settle};
use crate::real::{self, c_name, exports, round_up, say, size_of};
use crate::regions::{self, Region};
use crate::table::{self, Entry, READ, WRITE};

/// MAP_SHARED, MAP_PRIVATE or MAP_SHARED_VALIDATE.
const MAP_TYPE: c_int = 0x0f;

fn refuse<T>(errno: c_int, text: String) -> Result<T, c_int> {
    say(&text);
    Err(errno)
}

/// What mmap is asked for.
#[derive(Clone, Copy)]
struct Request {
    addr: usize,
    len: usize,
    prot: c_int,
    flags: c_int,
    offset: off_t,
}

impl Request {
    fn writes(&self) -> bool {
        self.prot & libc::PROT_WRITE != 0
    }
}

/// Refuses a mapping that the file, or how it was opened, does not allow.
fn check_request(name: &str, e: Entry, q: Request) -> Result<(), c_int> {
    if q.prot & !(libc::PROT_READ | libc::PROT_WRITE) != 0 || q.prot == 0 {
        return refuse(
            libc::EOPNOTSUPP,
            format!("mapping {name}: only PROT_READ and PROT_WRITE are supported"),
        );
    }
    if q.flags & libc::MAP_SYNC != 0 && q.flags & MAP_TYPE == libc::MAP_SHARED_VALIDATE {
        return Err(libc::EOPNOTSUPP); // as for any file that is not DAX
    }
    if q.writes() && reads() {
        return refuse(
            libc::EACCES,
            format!("mapping {name}: files of the volume are only read here (mojim run --read)"),
        );
    }
    if !e.may(READ) || q.writes() && !e.may(WRITE) {
        return Err(libc::EACCES);
    }
    Ok(())
}

/// How many bytes of the file a mapping has: in the page where the file ends, the rest
/// of the page is not the file's.
fn bytes_of_file(fd: c_int, offset: u64, len: usize) -> Result<usize, c_int> {
    let size = size_of(fd)?;
    let end = offset.checked_add(len as u64).ok_or(libc::EOVERFLOW)?;
    if size > offset && end > size && round_up(end as usize) == round_up(size as usize) {
        Ok((size - offset) as usize)
    } else {
        Ok(len)
    }
}

/// A shared mapping of a volume's file.
fn map_file(fd: c_int, e: Entry, q: Request) -> Result<*mut c_void, c_int> {
    let offset = u64::try_from(q.offset).map_err(|_| libc::EINVAL)?;
    if q.len == 0 || !offset.is_multiple_of(real::page_size() as u64) {
        return Err(libc::EINVAL);
    }
    let name = present_name(fd, e)?;
    check_request(&name, e, q)?;
    let (h, api) = (attach()?, api()?);
    let len = bytes_of_file(fd, offset, q.len)?;
    let at = place(q)?;
    let Some(slot) = regions::reserve() else {
        give_back(at, q);
        return refuse(
            libc::ENOMEM,
            format!("mapping {name}: more than {} regions", regions::MAX),
        );
    };
    let mut flags = q.flags & MAP_ATOMIC;
    if !q.writes() {
        flags |= MOJIM_RDONLY;
    }
    let file = c_name(&name)?;
    let map = |flags| {
        // SAFETY: the handle, a C string, and a place that the program gave or
        // that was reserved for this.
        unsafe {
            (api.mojim_map_at)(
                h,
                file.as_ptr(),
                len,
                flags,
                q.offset,
                at.address() as *mut c_void,
            )
        }
    };
    let mut p = map(flags | if reads() { 0 } else { MOJIM_SHARED });
    if p == libc::MAP_FAILED && !reads() && real::errno() == libc::ENOMEM {
        // Large files have always been mapped once, which needs less.
        say(&format!(
            "{}; trying a private working copy, which no second mapping can have",
            last_error(api)
        ));
        p = map(flags);
    }
    if p == libc::MAP_FAILED {
        let errno = failed(api);
        give_back(at, q);
        return Err(errno);
    }
    slot.fill(p as usize, len, offset, e.id(), q.writes());
    Ok(p)
}

/// Where a mapping goes.
enum MapAddress {
    Anywhere,
    /// In place of what is there, as the program says.
    Fixed(usize),
    /// A place that was free, held by an empty mapping.
    Held(usize),
}

impl MapAddress {
    fn address(&self) -> usize {
        match *self {
            MapAddress::Anywhere => 0,
            MapAddress::Fixed(a) | MapAddress::Held(a) => a,
        }
    }
}

fn place(q: Request) -> Result<MapAddress, c_int> {
    let exact = q.flags & libc::MAP_FIXED_NOREPLACE == libc::MAP_FIXED_NOREPLACE;
    if q.flags & libc::MAP_FIXED != 0 && !exact {
        if !q.addr.is_multiple_of(real::page_size()) || q.addr == 0 {
            return Err(libc::EINVAL);
        }
        return Ok(MapAddress::Fixed(q.addr));
    }
    if q.addr == 0 {
        return Ok(MapAddress::Anywhere);
    }
    let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if exact {
        flags |= libc::MAP_FIXED_NOREPLACE;
    }
    // SAFETY: a new mapping, where there is none.
    let p = unsafe { real::mmap(q.addr as *mut c_void, q.len, libc::PROT_NONE, flags, -1, 0) };
    if p == libc::MAP_FAILED {
        return Err(real::errno());
    }
    Ok(MapAddress::Held(p as usize))
}

fn give_back(at: MapAddress, q: Request) {
    if let MapAddress::Held(a) = at {
        // SAFETY: the empty mapping that `place` made.
        unsafe { real::munmap(a as *mut c_void, q.len) };
    }
}

unsafe fn map_any(
    addr: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let e = if flags & libc::MAP_ANONYMOUS == 0 {
        table::get(fd)
    } else {
        None
    };
    if flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED
        && regions::any()
        && is_owner()
        && regions::overlapping(addr as usize, len).next().is_some()
    {
        return enter(libc::MAP_FAILED, || {
            refuse(
                libc::EOPNOTSUPP,
                format!("MAP_FIXED at {addr:p}: a region is there; unmap it first"),
            )
        });
    }
    if let Some(e) = e
        && on()
    {
        // The data file of a node that follows may be in the middle of a sync point. A
        // mapping that is only read shows the same bytes, shared or private.
        if flags & MAP_TYPE != libc::MAP_PRIVATE || reads() {
            return enter(libc::MAP_FAILED, || {
                check_owner()?;
                if flags & MAP_TYPE == libc::MAP_PRIVATE && prot & libc::PROT_WRITE != 0 {
                    return refuse(
                        libc::EACCES,
                        format!(
                            "mapping {}: under `mojim run --read` not with PROT_WRITE, also not privately; copy what is to be changed",
                            name_of(e)?
                        ),
                    );
                }
                map_file(
                    fd,
                    e,
                    Request {
                        addr: addr as usize,
                        len,
                        prot,
                        flags,
                        offset,
                    },
                )
            });
        }
        // A private mapping shows what is committed.
        if enter(false, || settle().map(|()| true)) {
            // SAFETY: the program's.
            return unsafe { real::mmap(addr, len, prot, flags, fd, offset) };
        }
        return libc::MAP_FAILED;
    }
    // SAFETY: the program's.
    unsafe { real::mmap(addr, len, prot, flags, fd, offset) }
}

/// A region that the call touches; None if the call may pass.
#[inline]
fn touched(addr: *mut c_void, len: usize) -> Option<Region> {
    if !regions::any() {
        return None;
    }
    regions::overlapping(addr as usize, len).next()
}

fn unmap(addr: usize, len: usize) -> Result<c_int, c_int> {
    let end = addr.checked_add(round_up(len)).ok_or(libc::EINVAL)?;
    let mut there: Vec<Region> = regions::overlapping(addr, end - addr).collect();
    there.sort_by_key(|r| r.start);
    if let Some(r) = there
        .iter()
        .find(|r| r.start < addr || r.mapped_end() > end)
    {
        return refuse(
            libc::EINVAL,
            format!(
                "munmap of {len} bytes at {addr:#x}, a part of the region of {} bytes at {:#x}: only whole regions can be unmapped",
                r.len, r.start
            ),
        );
    }
    let api = api()?;
    let mut from = addr;
    for r in &there {
        unmap_other(from, r.start)?;
        let slot = regions::take(r);
        // SAFETY: the program gives the region back.
        if unsafe { (api.mojim_unmap)(r.start as *mut c_void, r.len) } != 0 {
            let e = failed(api);
            slot.fill(r.start, r.len, r.offset, r.file, r.write);
            return Err(e);
        }
        from = r.mapped_end();
    }
    unmap_other(from, end)?;
    Ok(0)
}

fn unmap_other(from: usize, to: usize) -> Result<(), c_int> {
    if from < to {
        // SAFETY: the program gives it back, and no region is in it.
        real::check(unsafe { real::munmap(from as *mut c_void, to - from) } as i64)?;
    }
    Ok(())
}

fn sync(r: Region, addr: *mut c_void, len: usize, flags: c_int) -> Result<c_int, c_int> {
    let api = api()?;
    if (addr as usize) < r.start {
        return refuse(
            libc::EINVAL,
            format!(
                "msync of {len} bytes at {addr:p} begins outside the region at {:#x}",
                r.start
            ),
        );
    }
    // Linux takes 0 for MS_ASYNC.
    let flags = if flags == 0 { libc::MS_ASYNC } else { flags };
    // SAFETY: the program is told not to store meanwhile.
    match unsafe { (api.mojim_msync)(addr, len, flags) } {
        0 => Ok(0),
        _ => Err(failed(api)),
    }
}

/// What mprotect may do to a region: nothing that it has not already.
fn protect(r: Region, addr: *mut c_void, prot: c_int) -> Result<c_int, c_int> {
    let has = if r.write {
        libc::PROT_READ | libc::PROT_WRITE
    } else {
        libc::PROT_READ
    };
    let asked = prot & (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    if asked == has || r.write && asked == libc::PROT_WRITE {
        return Ok(0);
    }
    refuse(
        libc::EOPNOTSUPP,
        format!(
            "mprotect at {addr:p}: the protection of the region at {:#x} cannot be changed",
            r.start
        ),
    )
}

/// madvise on a region; None passes it on.
fn advise(r: Region, advice: c_int) -> Result<Option<c_int>, c_int> {
    const DONTNEED_LOCKED: c_int = 24;
    match advice {
        // On an ordinary shared mapping this loses nothing; on a region's memory it
        // would.
        libc::MADV_DONTNEED | DONTNEED_LOCKED => Ok(Some(0)),
        libc::MADV_FREE => Err(libc::EINVAL), // as for any file
        libc::MADV_REMOVE => refuse(
            libc::EOPNOTSUPP,
            format!(
                "MADV_REMOVE in the region at {:#x} is not supported",
                r.start
            ),
        ),
        _ => Ok(None),
    }
}

exports! {
    fn mmap(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
        // SAFETY: the program's.
        unsafe { map_any(addr, len, prot, flags, fd, offset) }
    }
    fn mmap64(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
        // SAFETY: the program's.
        unsafe { map_any(addr, len, prot, flags, fd, offset) }
    }
    fn munmap(addr: *mut c_void, len: size_t) -> c_int {
        match touched(addr, len) {
            Some(_) => enter(-1, || unmap(addr as usize, len)),
            // SAFETY: the program's.
            None => unsafe { real::munmap(addr, len) },
        }
    }
    fn mprotect(addr: *mut c_void, len: size_t, prot: c_int) -> c_int {
        match touched(addr, len) {
            Some(r) => enter(-1, || protect(r, addr, prot)),
            // SAFETY: the program's.
            None => unsafe { libc::syscall(libc::SYS_mprotect, addr, len, prot) as c_int },
        }
    }
    fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int {
        touched(addr, len)
            .and_then(|r| enter(Some(-1), || advise(r, advice)))
            // SAFETY: the program's.
            .unwrap_or_else(|| unsafe { libc::syscall(libc::SYS_madvise, addr, len, advice) as c_int })
    }
    fn mremap(addr: *mut c_void, len: size_t, new: size_t, flags: c_int, at: *mut c_void) -> *mut c_void {
        let replaced = flags & libc::MREMAP_FIXED != 0;
        let r = touched(addr, len.max(1)).or_else(|| replaced.then(|| touched(at, new)).flatten());
        if let Some(r) = r {
            return enter(libc::MAP_FAILED, || refuse(
                libc::EOPNOTSUPP,
                format!("mremap of the region at {:#x} is not supported; unmap it and map it again", r.start),
            ));
        }
        // SAFETY: the program's.
        unsafe { libc::syscall(libc::SYS_mremap, addr, len, new, flags, at) as *mut c_void }
    }
}

exports! { |pass|
    fn msync(addr: *mut c_void, len: size_t, flags: c_int) -> c_int {
        match touched(addr, len.max(1)) {
            Some(r) => enter(-1, || sync(r, addr, len, flags)),
            None => pass(),
        }
    }
}
