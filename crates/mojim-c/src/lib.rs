//! libmojim.so: the C interface of Mojim.
//!
//! Owns the translation between C and the engine's Rust interface, nothing
//! else. `include/mojim.h` is the manual. `tests/abi` checks that they agree.
//! `heap.rs`, `persistent.rs` and `tx.rs` have the other headers' functions. The
//! errno of an error is `Error::errno` of `mojim-env`.
//!
//! Invariants:
//! - No panic crosses the interface: it becomes EIO and a text.
//! - A thread is cancelled inside a call only at a point with nothing left to
//!   undo. Cancellation unwinds the stack, therefore `C-unwind`.
//! - Every failure sets errno and the calling thread's text, except that
//!   `mojim_dup3` and `mojim_open_above` set errno only.
//! - A handle is a leaked box. Only `mojim_detach` and `mojim_finish` free it,
//!   and only when they succeed.

mod heap;
mod persistent;
mod tx;

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use engine::{
    Config, Error, Guest, Joined, Level, MapFlags, Reader, ReaderOptions, Result, Volume,
};
use mojim_config::Working;
use mojim_env::descriptors;
use mojim_env::reserve::{self, Reserved};
use mojim_env::threads::{cancel_again, cancel_waits};
use mojim_heap::Heap;

/// What the system refuses comes from a reserve: the process is the program's.
#[global_allocator]
static ALLOCATOR: Reserved = Reserved;

/// `mojim_t`.
pub enum Mojim {
    /// From `mojim_attach` or `mojim_join`.
    Primary(Volume),
    /// From these two, if another process has the volume attached.
    Guest(Guest),
    /// From `mojim_attach_reader`.
    Reader(Reader),
}

/// `struct msync_input`, as in the paper's Figure 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MsyncInput {
    address: *mut c_void,
    length: c_int,
}

/// Bytes for a node's name in `struct mojim_copy`.
const NODE_BYTES: usize = 68;

/// `struct mojim_copy`.
#[repr(C)]
pub struct MojimCopy {
    node: [c_char; NODE_BYTES],
    level: c_int,
}

const MOJIM_CREATE: c_int = 0x0080_0000;
const MOJIM_RDONLY: c_int = 0x0040_0000;
const MOJIM_SHARED: c_int = 0x0020_0000;
const MAP_ATOMIC: c_int = 0x0200_0000;
const MS_MOJIM: c_int = 0x100;

const _: () = assert!(NODE_BYTES > mojim_config::MAX_NAME);
const _: () = assert!(size_of::<MojimCopy>() == 72 && align_of::<MojimCopy>() == 4);
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<MsyncInput>() == 16 && align_of::<MsyncInput>() == 8);
const _: () = assert!(
    Level::Received as c_int == 1 && Level::Pmem as c_int == 2 && Level::Disk as c_int == 3
);

thread_local! {
    static TEXT: RefCell<CString> = RefCell::new(CString::default());
}

/// A failed call: its errno and its text.
struct Failure(c_int, String);

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure(e.errno(), e.to_string())
    }
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure(libc::EINVAL, text.into()))
}

fn set_errno(e: c_int) {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = e };
}

/// Runs a call. A failure or a panic sets errno and the text, and returns `failed`. The
/// thread is not cancelled while `f` runs. A call that the process has no memory for does not begin.
fn guard<T: Copy>(failed: T, f: impl FnOnce() -> Result<T, Failure>) -> T {
    if !is_prepared() {
        set_errno(libc::ENOMEM);
        return failed;
    }
    guard_always(failed, || match reserve::may_begin() {
        true => f(),
        false => no_memory(),
    })
}

/// Has the thread's own variables exist, at its first call. False if there is no memory for
/// that: then there is none for a text either.
fn is_prepared() -> bool {
    /// The C library's notes, and what is in the variables, take a part of this.
    const PROBE: usize = 16 << 10;
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if !DONE.get() {
        if !reserve::is_given(PROBE) {
            return false;
        }
        let _ = TEXT.try_with(|_| ());
        let _ = std::thread::current();
        engine::prepare_thread();
        DONE.set(true);
    }
    true
}

fn no_memory<T>() -> Result<T, Failure> {
    let text = "the process gets no more memory from the system".to_owned();
    Err(Failure(libc::ENOMEM, text))
}

/// Addresses that must be free where an attach begins: its threads need stacks, and the C
/// library ends the process where a new thread gets no memory for its variables.
const ATTACH_NEEDS: usize = 32 << 20;

/// Makes the reserve, once.
fn with_reserve() -> Result<(), Failure> {
    match reserve::fill(ATTACH_NEEDS) {
        true => Ok(()),
        false => no_memory(),
    }
}

/// [`guard`] for calls that give memory back.
fn guard_always<T: Copy>(failed: T, f: impl FnOnce() -> Result<T, Failure>) -> T {
    let cancel = cancel_waits();
    let done = uncancelled(failed, f);
    // May not return, if the thread was cancelled: nothing is left here to drop.
    cancel_again(cancel);
    done
}

fn uncancelled<T>(failed: T, f: impl FnOnce() -> Result<T, Failure>) -> T {
    let Failure(errno, text) = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(v)) => return v,
        Ok(Err(e)) => e,
        Err(p) => {
            let what = p
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| p.downcast_ref::<&str>().copied())
                .unwrap_or("panic");
            Failure(libc::EIO, format!("internal error: {what}"))
        }
    };
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // While a thread ends its text may be gone already; errno is not.
    let _ = TEXT.try_with(|t| t.replace(text));
    set_errno(errno);
    failed
}

/// A string argument.
///
/// # Safety
/// `p` is null or a C string that stays for the call.
unsafe fn text<'a>(p: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if p.is_null() {
        return invalid(format!("{what} is NULL"));
    }
    // SAFETY: the caller's promise.
    match unsafe { CStr::from_ptr(p) }.to_str() {
        Ok(s) => Ok(s),
        Err(_) => invalid(format!("{what} is not UTF-8")),
    }
}

/// As [`text`], with null as None.
///
/// # Safety
/// As for [`text`].
unsafe fn text_or_none<'a>(p: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if p.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { text(p, what) }.map(Some)
}

/// What a handle stands for.
///
/// # Safety
/// `m` is null or came from `mojim_attach`, `mojim_join` or `mojim_attach_reader`
/// and was not freed.
unsafe fn handle<'a>(m: *mut Mojim) -> Result<&'a Mojim, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { m.as_ref() } {
        Some(m) => Ok(m),
        None => invalid("the handle is NULL: mojim_attach failed?"),
    }
}

/// A volume that can be written.
enum Writer<'a> {
    Own(&'a Volume),
    Shared(Guest),
}

/// Runs a call that both kinds of volume have.
macro_rules! either {
    ($volume:expr, $v:ident => $call:expr) => {
        match $volume {
            Writer::Own($v) => $call,
            Writer::Shared($v) => $call,
        }
    };
}

impl<'a> Writer<'a> {
    /// The volume itself; in a forked child, the child's handle as a guest.
    fn of(volume: &'a Volume) -> Writer<'a> {
        volume
            .in_child()
            .map_or(Writer::Own(volume), Writer::Shared)
    }
}

/// The volume of a handle that may write.
///
/// # Safety
/// As for [`handle`].
unsafe fn volume<'a>(m: *mut Mojim) -> Result<Writer<'a>, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { handle(m)? } {
        Mojim::Primary(v) => Ok(Writer::of(v)),
        Mojim::Guest(g) => Ok(Writer::Shared(g.clone())),
        Mojim::Reader(r) => Err(Failure(
            libc::EROFS,
            format!(
                "volume {} is only read here (mojim_attach_reader); its primary writes it",
                r.name()
            ),
        )),
    }
}

/// The reader of a handle.
///
/// # Safety
/// As for [`handle`].
unsafe fn reader<'a>(m: *mut Mojim) -> Result<&'a Reader, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { handle(m)? } {
        Mojim::Reader(r) => Ok(r),
        Mojim::Primary(_) | Mojim::Guest(_) => invalid(
            "the handle is of mojim_attach or mojim_join; this is for those of mojim_attach_reader",
        ),
    }
}

/// A configuration, a node of it, and perhaps a volume.
///
/// # Safety
/// The arguments are null or C strings, which stay as long as what is returned.
unsafe fn which<'a>(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
) -> Result<(Config, &'a str, Option<&'a str>), Failure> {
    // SAFETY: the caller's promise.
    let (config, node, name) = unsafe {
        (
            text(config, "config")?,
            text(node, "node")?,
            text_or_none(name, "volume")?,
        )
    };
    let config = engine::load_config(Path::new(config))?;
    Ok((config, node, name))
}

/// `mojim_attach`.
///
/// # Safety
/// The arguments are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_attach(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
) -> *mut Mojim {
    guard(std::ptr::null_mut(), || {
        with_reserve()?;
        // SAFETY: the caller's promise.
        let (config, node, name) = unsafe { which(config, node, name)? };
        let volume = config
            .volume(name)
            .map_err(|e| Error::Config(e.to_string()))?;
        if volume.working == Working::Shared {
            return joined(&config, node, name);
        }
        let volume = Volume::attach_with(&config, node, name, |_, _| {})?;
        Ok(Box::into_raw(Box::new(Mojim::Primary(volume))))
    })
}

fn joined(config: &Config, node: &str, name: Option<&str>) -> Result<*mut Mojim, Failure> {
    let handle = match engine::join(config, node, name)? {
        Joined::Owner(v) => Mojim::Primary(v),
        Joined::Guest(g) => Mojim::Guest(g),
    };
    Ok(Box::into_raw(Box::new(handle)))
}

/// `mojim_join`.
///
/// # Safety
/// The arguments are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_join(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
) -> *mut Mojim {
    guard(std::ptr::null_mut(), || {
        with_reserve()?;
        // SAFETY: the caller's promise.
        let (config, node, name) = unsafe { which(config, node, name)? };
        joined(&config, node, name)
    })
}

/// `mojim_attach_reader`.
///
/// # Safety
/// The arguments are null or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_attach_reader(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
) -> *mut Mojim {
    guard(std::ptr::null_mut(), || {
        with_reserve()?;
        // SAFETY: the caller's promise.
        let (config, node, name) = unsafe {
            (
                text(config, "config")?,
                text(node, "node")?,
                text_or_none(name, "volume")?,
            )
        };
        let reader = Reader::attach(Path::new(config), node, name)?;
        Ok(Box::into_raw(Box::new(Mojim::Reader(reader))))
    })
}

/// # Safety
/// As for [`handle`]; no other call uses the handle.
unsafe fn end(m: *mut Mojim, how: impl FnOnce(&Mojim) -> Result<()>) -> c_int {
    guard_always(-1, || {
        // SAFETY: the caller's promise.
        how(unsafe { handle(m)? })?;
        // SAFETY: made by `Box::into_raw`, and freed once: success ends it.
        drop(unsafe { Box::from_raw(m) });
        Ok(0)
    })
}

/// `mojim_detach`.
///
/// # Safety
/// `m` is null or a handle that nobody else is using.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_detach(m: *mut Mojim) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        end(m, |m| match m {
            Mojim::Primary(v) => match Writer::of(v) {
                Writer::Own(v) => mojim_tx::unmapping(&v.spans(), || Heap::detach(v)),
                Writer::Shared(v) => v.detach(),
            },
            Mojim::Guest(g) => g.detach(),
            Mojim::Reader(r) => Heap::detach_reader(r),
        })
    }
}

/// `mojim_finish`.
///
/// # Safety
/// As for [`mojim_detach`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_finish(m: *mut Mojim) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        end(m, |m| match m {
            Mojim::Primary(v) => either!(Writer::of(v), v => v.finish()),
            Mojim::Guest(g) => g.finish(),
            // The reader's memory stays, and its threads go on following.
            Mojim::Reader(_) => Ok(()),
        })
    }
}

/// `mojim_map`.
///
/// # Safety
/// As for [`mojim_map_at`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_map(
    m: *mut Mojim,
    file: *const c_char,
    len: usize,
    flags: c_int,
) -> *mut c_void {
    // SAFETY: the caller's promise; nothing is replaced.
    unsafe { mojim_map_at(m, file, len, flags, 0, std::ptr::null_mut()) }
}

/// `mojim_map_at`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string; `fixed` is null or
/// begins memory that the caller may replace.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_map_at(
    m: *mut Mojim,
    file: *const c_char,
    len: usize,
    flags: c_int,
    offset: libc::off_t,
    fixed: *mut c_void,
) -> *mut c_void {
    guard(libc::MAP_FAILED, || {
        // SAFETY: the caller's promise.
        let (known, file) = unsafe { (handle(m)?, text(file, "file")?) };
        let unknown = flags & !(MOJIM_CREATE | MOJIM_RDONLY | MOJIM_SHARED | MAP_ATOMIC);
        if unknown != 0 {
            return invalid(format!(
                "mapping {file}: flags {unknown:#x} are not among MOJIM_CREATE, MOJIM_RDONLY, MOJIM_SHARED and MAP_ATOMIC"
            ));
        }
        let Ok(offset) = u64::try_from(offset) else {
            return invalid(format!("mapping {file}: offset {offset} is negative"));
        };
        if !(fixed as usize).is_multiple_of(page_size()) {
            return invalid(format!(
                "mapping {file}: address {fixed:p} is not aligned to a page"
            ));
        }
        let flags = MapFlags {
            create: flags & MOJIM_CREATE != 0,
            atomic: flags & MAP_ATOMIC != 0,
            read_only: flags & MOJIM_RDONLY != 0,
            shared: flags & MOJIM_SHARED != 0,
            offset,
            fixed_at: fixed as usize,
            untracked: false,
        };
        if !fixed.is_null() && heap_in(fixed, len).is_some() {
            let text =
                format!("mapping {file}: an open heap may grow to the addresses from {fixed:p} on");
            return Err(Failure(libc::EADDRINUSE, text));
        }
        if let Mojim::Primary(v) = known {
            check_no_heap(&Writer::of(v), &[file])?;
        }
        // SAFETY: the caller's promise of what is at `fixed`.
        let mapping = unsafe {
            match known {
                Mojim::Primary(v) => {
                    either!(Writer::of(v), v => v.map_over(file, len, flags)?)
                }
                Mojim::Guest(g) => g.map_over(file, len, flags)?,
                Mojim::Reader(r) => r.map_over(file, len, flags)?,
            }
        };
        Ok(mapping.ptr.cast())
    })
}

/// The open heap that has some of these addresses.
fn heap_in(addr: *const c_void, len: usize) -> Option<Heap> {
    let begin = addr as usize;
    Heap::meets(begin..begin.saturating_add(len.max(1)))
}

/// An open heap keeps its file, whose size and name are its own affair.
fn check_no_heap(volume: &Writer<'_>, files: &[&str]) -> Result<(), Failure> {
    let Writer::Own(v) = volume else {
        return Ok(());
    };
    match (files.iter()).find(|f| Heap::in_file(v.attachment(), f).is_some()) {
        Some(file) => Err(Failure(
            libc::EBUSY,
            format!("{file} is an open heap: mojim_heap_close it first"),
        )),
        None => Ok(()),
    }
}

fn page_size() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// `mojim_unmap`.
///
/// # Safety
/// Nobody uses the region's memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_unmap(addr: *mut c_void, len: usize) -> c_int {
    guard_always(-1, || {
        if !engine::is_region(addr as usize) {
            return invalid(format!("unmapping {addr:p}: it is not in a region"));
        }
        if heap_in(addr, len).is_some() {
            return invalid(format!(
                "unmapping {addr:p}: it is a heap's: mojim_heap_close"
            ));
        }
        let span = engine::span_of(addr as usize);
        mojim_tx::unmapping(span.as_slice(), || engine::unmap(addr.cast(), len))?;
        Ok(0)
    })
}

/// `mojim_leave_memory`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_leave_memory(addr: *mut c_void) -> c_int {
    guard(-1, || {
        if Heap::of(addr.cast()).is_some() {
            return invalid(format!(
                "{addr:p} lies in a heap, which has to be at its address again when it is opened"
            ));
        }
        engine::leave_memory(addr as usize)?;
        Ok(0)
    })
}

/// `mojim_is_region`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_is_region(addr: *const c_void) -> c_int {
    guard_always(0, || Ok(engine::is_region(addr as usize) as c_int))
}

/// `mojim_msync`.
///
/// # Safety
/// Nobody stores into the range meanwhile; nor, with MS_INVALIDATE alone, reads it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_msync(addr: *mut c_void, len: usize, flags: c_int) -> c_int {
    const COMMIT: c_int = libc::MS_SYNC | libc::MS_ASYNC | MS_MOJIM;
    guard(-1, || {
        if flags & !(COMMIT | libc::MS_INVALIDATE) != 0 {
            return invalid(format!("msync: unknown flags in {flags:#x}"));
        }
        if flags & libc::MS_SYNC != 0 && flags & libc::MS_ASYNC != 0 {
            return invalid("msync: MS_SYNC and MS_ASYNC exclude each other");
        }
        if flags == 0 {
            return invalid("msync: flags are 0; use MS_SYNC");
        }
        if flags & COMMIT == 0 && heap_in(addr, len).is_some() {
            let text = "MS_INVALIDATE of a heap, which would not hear of it: mojim_heap_rollback";
            return Err(Failure(libc::EOPNOTSUPP, text.into()));
        }
        let addr = addr.cast_const().cast();
        let done = if flags & COMMIT == 0 {
            engine::rollback(addr, len).map(drop)
        } else if flags & libc::MS_ASYNC != 0 {
            engine::msync_async(addr, len).map(drop)
        } else {
            engine::msync(addr, len).map(drop)
        };
        match done {
            Ok(()) => Ok(0),
            Err(Error::NotFound(t)) => Err(Failure(libc::ENOMEM, t)),
            Err(e) => Err(e.into()),
        }
    })
}

/// `gmsync`.
///
/// # Safety
/// `input` has `n` entries; nobody stores into their ranges meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmsync(input: *const MsyncInput, n: c_int, flags: c_int) -> c_int {
    /// So many ranges are passed on without an allocation.
    const FEW: usize = 16;
    guard(-1, || {
        if flags & !(MS_MOJIM | libc::MS_SYNC | libc::MS_ASYNC) != 0 || flags == 0 {
            return invalid(format!("gmsync: flags {flags:#x}; use MS_MOJIM"));
        }
        if flags & libc::MS_SYNC != 0 && flags & libc::MS_ASYNC != 0 {
            return invalid("gmsync: MS_SYNC and MS_ASYNC exclude each other");
        }
        let sync = match flags & libc::MS_ASYNC {
            0 => engine::gmsync,
            _ => engine::gmsync_async,
        };
        let Ok(n) = usize::try_from(n) else {
            return invalid(format!("gmsync: {n} ranges"));
        };
        if n == 0 {
            return Ok(0);
        }
        if input.is_null() {
            return invalid("gmsync: input is NULL");
        }
        // SAFETY: the caller's promise.
        let input = unsafe { std::slice::from_raw_parts(input, n) };
        if let Some(i) = input.iter().find(|i| i.length < 0) {
            return invalid(format!("gmsync: a range of {} bytes", i.length));
        }
        let range = |i: &MsyncInput| (i.address as *const u8, i.length as usize);
        if n <= FEW {
            let mut few = [(std::ptr::null(), 0); FEW];
            for (to, from) in few.iter_mut().zip(input) {
                *to = range(from);
            }
            sync(&few[..n])?;
        } else {
            let mut all = Vec::new();
            if all.try_reserve_exact(n).is_err() {
                let text = format!("gmsync: no memory for {n} ranges");
                return Err(Failure(libc::ENOMEM, text));
            }
            all.extend(input.iter().map(range));
            sync(&all)?;
        }
        Ok(0)
    })
}

/// `mojim_fsync`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string; nobody stores into the
/// file's regions meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_fsync(m: *mut Mojim, file: *const c_char) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (volume(m)?, text(file, "file")?) };
        either!(volume, v => v.fsync(file)?);
        Ok(0)
    })
}

/// At the end of the program: finishes what is still attached.
extern "C" fn at_exit() {
    let cancel = cancel_waits();
    let done = catch_unwind(engine::finish_all);
    if let Ok(Err(e)) = &done {
        // A program that has closed standard error does not want the text.
        let _ = writeln!(std::io::stderr(), "mojim: at the program's end: {e}");
    }
    drop(done);
    cancel_again(cancel);
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// `mojim_last_lsn`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_last_lsn() -> u64 {
    guard(0, || Ok(engine::last_lsn()))
}

/// `mojim_wait`.
///
/// # Safety
/// `m` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_wait(m: *mut Mojim, lsn: u64) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        match unsafe { handle(m)? } {
            Mojim::Primary(v) => either!(Writer::of(v), v => v.wait(lsn)?),
            Mojim::Guest(g) => g.wait(lsn)?,
            Mojim::Reader(r) => r.wait(lsn, ReaderOptions::default().patience)?,
        }
        Ok(0)
    })
}

/// `mojim_shown`.
///
/// # Safety
/// `m` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_shown(m: *mut Mojim) -> i64 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        Ok(unsafe { reader(m)? }.shown() as i64)
    })
}

/// `mojim_following`.
///
/// # Safety
/// `m` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_following(m: *mut Mojim) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        unsafe { reader(m)? }.following()?;
        Ok(0)
    })
}

/// `mojim_read`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string; `buf` has room for `n`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_read(
    m: *mut Mojim,
    file: *const c_char,
    buf: *mut c_void,
    n: usize,
    offset: libc::off_t,
) -> libc::ssize_t {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (reader, file) = unsafe { (reader(m)?, text(file, "file")?) };
        let Ok(offset) = u64::try_from(offset) else {
            return invalid(format!("reading {file}: offset {offset} is negative"));
        };
        if n == 0 {
            return Ok(0);
        }
        if buf.is_null() {
            return invalid(format!("reading {file}: buf is NULL"));
        }
        // A slice cannot be longer; neither is any file.
        let n = n.min(isize::MAX as usize);
        // SAFETY: the caller's room; zeroing it initializes every byte.
        let buf = unsafe {
            std::ptr::write_bytes(buf.cast::<u8>(), 0, n);
            std::slice::from_raw_parts_mut(buf.cast::<u8>(), n)
        };
        Ok(reader.read(file, offset, buf)? as libc::ssize_t)
    })
}

/// `mojim_copies`.
///
/// # Safety
/// `m` is null or a handle; `out` has room for `n` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_copies(
    m: *mut Mojim,
    lsn: u64,
    out: *mut MojimCopy,
    n: c_int,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let copies: Vec<(String, Option<Level>)> = match unsafe { volume(m)? } {
            Writer::Own(v) => {
                let all = v.copies(lsn).into_iter();
                all.map(|c| (c.node, c.level)).collect()
            }
            Writer::Shared(g) => g.copies(lsn)?,
        };
        let Ok(n) = usize::try_from(n) else {
            return invalid(format!("mojim_copies: room for {n} entries"));
        };
        if n > 0 && out.is_null() {
            return invalid("mojim_copies: out is NULL");
        }
        for (i, (name, level)) in copies.iter().take(n).enumerate() {
            let mut node = [0; NODE_BYTES];
            for (to, from) in node[..NODE_BYTES - 1].iter_mut().zip(name.bytes()) {
                *to = from as c_char;
            }
            let level = level.map_or(0, |l| l as c_int);
            // SAFETY: entry i of at least n.
            unsafe { out.add(i).write(MojimCopy { node, level }) };
        }
        Ok(copies.len() as c_int)
    })
}

/// `mojim_create`.
///
/// # Safety
/// `m` is null or a handle, `file` null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_create(m: *mut Mojim, file: *const c_char) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (volume(m)?, text(file, "file")?) };
        let made = either!(volume, v => v.create(file)?);
        Ok(made as c_int)
    })
}

/// `mojim_remove`.
///
/// # Safety
/// As for [`mojim_create`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_remove(m: *mut Mojim, file: *const c_char) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (volume(m)?, text(file, "file")?) };
        check_no_heap(&volume, &[file])?;
        either!(volume, v => v.remove(file)?);
        Ok(0)
    })
}

/// `mojim_rename`.
///
/// # Safety
/// As for [`mojim_create`], for both names.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_rename(
    m: *mut Mojim,
    from: *const c_char,
    to: *const c_char,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (volume, from, to) = unsafe { (volume(m)?, text(from, "from")?, text(to, "to")?) };
        check_no_heap(&volume, &[from, to])?;
        either!(volume, v => v.rename(from, to)?);
        Ok(0)
    })
}

/// `mojim_truncate`.
///
/// # Safety
/// As for [`mojim_create`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_truncate(
    m: *mut Mojim,
    file: *const c_char,
    size: libc::off_t,
) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (volume, file) = unsafe { (volume(m)?, text(file, "file")?) };
        let Ok(size) = u64::try_from(size) else {
            return invalid(format!("{file}: a size of {size} bytes"));
        };
        check_no_heap(&volume, &[file])?;
        either!(volume, v => v.truncate(file, size)?);
        Ok(0)
    })
}

/// `mojim_size`.
///
/// # Safety
/// As for [`mojim_create`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_size(m: *mut Mojim, file: *const c_char) -> libc::off_t {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (handle, file) = unsafe { (handle(m)?, text(file, "file")?) };
        let (size, name) = match handle {
            Mojim::Primary(v) => (either!(Writer::of(v), v => v.size(file)?), v.name()),
            Mojim::Guest(g) => (g.size(file)?, g.name()),
            Mojim::Reader(r) => (r.size(file)?, r.name()),
        };
        match size {
            Some(s) => Ok(s as libc::off_t),
            None => Err(Failure(
                libc::ENOENT,
                format!("volume {name} has no file {file:?}"),
            )),
        }
    })
}

/// `mojim_settle`.
///
/// # Safety
/// `m` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_settle(m: *mut Mojim) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        either!(unsafe { volume(m)? }, v => v.settle()?);
        Ok(0)
    })
}

/// `mojim_dup3`.
#[unsafe(no_mangle)]
pub extern "C" fn mojim_dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: changes nothing but the caller's descriptors.
    descriptors::put(to, || unsafe {
        libc::syscall(libc::SYS_dup3, from, to, flags) as c_int
    })
}

/// `mojim_is_yours`.
#[unsafe(no_mangle)]
pub extern "C" fn mojim_is_yours(fd: c_int) -> c_int {
    descriptors::is_the_programs(fd).into()
}

/// `mojim_open_above`.
///
/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mojim_open_above(path: *const c_char, flags: c_int, mode: c_int) -> c_int {
    let open = || {
        let flags = flags | libc::O_CLOEXEC;
        // SAFETY: the caller's promise.
        match unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags, mode) } {
            // SAFETY: just opened; nothing else owns it.
            fd @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) }),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    match descriptors::open(open) {
        Ok(fd) => fd.into_raw_fd(),
        Err(e) => {
            // SAFETY: the calling thread's errno.
            unsafe { *libc::__errno_location() = e.raw_os_error().unwrap_or(libc::EIO) };
            -1
        }
    }
}

/// `mojim_usable`.
///
/// # Safety
/// `m` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_usable(m: *mut Mojim) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        Ok(match unsafe { handle(m)? } {
            Mojim::Primary(v) => v.is_usable().into(),
            Mojim::Guest(g) => g.is_usable().into(),
            Mojim::Reader(r) => r.is_usable().into(),
        })
    })
}

/// Writes a path of a volume on a node to `out`. Returns its length.
///
/// # Safety
/// The strings are null or C strings; `out` has room for `n` bytes.
unsafe fn path_of(
    strings: [*const c_char; 3],
    out: *mut c_char,
    n: usize,
    path: impl FnOnce(&mojim_config::Node, &str) -> PathBuf,
) -> c_int {
    use std::os::unix::ffi::OsStrExt;
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (config, node, name) = unsafe {
            (
                text(strings[0], "config")?,
                text(strings[1], "node")?,
                text_or_none(strings[2], "volume")?,
            )
        };
        let wrong = |e: mojim_config::ConfigError| Error::Config(e.to_string());
        let config = engine::load_config(Path::new(config))?;
        let name = &config.volume(name).map_err(wrong)?.name;
        let path = path(config.node(node).map_err(wrong)?, name);
        let bytes = path.as_os_str().as_bytes();
        if out.is_null() {
            return invalid("out is NULL");
        }
        if bytes.len() >= n {
            let needed = format!("{} bytes are needed", bytes.len() + 1);
            return Err(Failure(libc::ERANGE, needed));
        }
        // SAFETY: n bytes of room are more than the path's.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len());
            out.add(bytes.len()).write(0);
        }
        Ok(bytes.len() as c_int)
    })
}

/// `mojim_directory`.
///
/// # Safety
/// The strings are null or C strings; `out` has room for `n` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_directory(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
    out: *mut c_char,
    n: usize,
) -> c_int {
    engine::expect_forks();
    // SAFETY: the caller's promise.
    unsafe {
        path_of(
            [config, node, name],
            out,
            n,
            mojim_replica::layout::data_dir,
        )
    }
}

/// `mojim_locks`.
///
/// # Safety
/// As for [`mojim_directory`].
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mojim_locks(
    config: *const c_char,
    node: *const c_char,
    name: *const c_char,
    out: *mut c_char,
    n: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        path_of(
            [config, node, name],
            out,
            n,
            mojim_replica::layout::locks_dir,
        )
    }
}

/// `mojim_last_error`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_last_error() -> *const c_char {
    TEXT.try_with(|t| t.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// `mojim_version`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn mojim_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
