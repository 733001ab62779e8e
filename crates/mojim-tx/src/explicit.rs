//! Transactions whose stores the program writes down.
//!
//! Every function concerns the calling thread's transaction.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use mojim_env::{Error, Result};
use mojim_memory::fork::{check_fork, is_forked};
use mojim_undo::{Entry, Log, alone_within};

use crate::commit::{again, frames_to, give_up, outermost, take_back};
use crate::object::{Later, Thread, no_memory, push_later};
use crate::thread::{known, mine};

/// Begins a transaction, or a level of the one that is open.
///
/// # Errors
/// `Unsupported` in a forked child; `Io` with ENOMEM.
#[inline]
pub fn begin() -> Result<()> {
    check_fork()?;
    let t = mine()?;
    // SAFETY: the calling thread's own.
    match unsafe { Log::begin(t.cast(), false) }.is_null() {
        true => Err(no_memory()),
        false => Ok(()),
    }
}

/// Whether the calling thread has a transaction open.
#[inline]
pub fn is_open() -> bool {
    depth() > 0
}

/// How many levels the calling thread has open.
#[inline]
pub fn depth() -> usize {
    let t = known();
    // SAFETY: the calling thread's own.
    unsafe { t.as_ref() }.map_or(0, |t| t.log.levels().len())
}

/// The calling thread's transaction, which is open.
#[inline]
fn open() -> Result<*mut Thread> {
    match is_open() {
        true => Ok(known()),
        false => Err(Error::Invalid(
            "no transaction is open in this thread: mojim_tx_begin".into(),
        )),
    }
}

/// As [`open`], where the program began the innermost level itself.
fn begun() -> Result<*mut Thread> {
    let t = open()?;
    // SAFETY: the calling thread's own.
    let last = unsafe { (*t).log.levels().last().map(|l| l.captured) };
    match last {
        Some(1) => Err(Error::Invalid(
            "the innermost transaction is a __transaction_atomic block, which ends itself".into(),
        )),
        _ => Ok(t),
    }
}

fn noted(done: bool) -> Result<()> {
    match done {
        true => Ok(()),
        false => Err(no_memory()),
    }
}

/// Has pages that will be stored to be there for that, before their bytes are read: else a page that was never
/// used is faulted in to be read, and once more to be stored to. Not many: there may be no memory to note them.
///
/// # Safety
/// The bytes can be read and written.
#[inline(always)]
unsafe fn touch(addr: *mut u8, len: usize) {
    let end = (addr as usize).wrapping_add(len);
    let mut at = addr as usize;
    while at < end && len <= 16 * PAGE {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a byte of the range, which becomes what it is. Atomic: the range may have a lock in it that
        // other threads try to take meanwhile.
        unsafe {
            std::arch::asm!("lock or byte ptr [{}], 0", in(reg) at, options(nostack))
        };
        at = (at | (PAGE - 1)) + 1;
    }
}

/// The smallest page there is.
const PAGE: usize = 4096;

/// Notes bytes that the transaction is about to store to: an abort gives them what they have
/// now, a commit commits what they have then.
///
/// # Safety
/// The bytes can be read and written until the transaction ends.
#[inline]
pub unsafe fn add(addr: *mut u8, len: usize) -> Result<()> {
    let t = open()?;
    if addr.is_null() && len > 0 {
        return Err(Error::Invalid("the address is NULL".into()));
    }
    // SAFETY: the caller's promise; the calling thread's own log.
    noted(unsafe {
        touch(addr, len);
        match len {
            8 => Log::save::<8>(t.cast(), addr),
            _ => Log::save_bytes(t.cast(), addr, len),
        }
    })
}

/// As [`add`], for bytes whose content does not matter before: an abort leaves them as they are.
///
/// # Safety
/// As for [`add`].
pub unsafe fn add_new(addr: *mut u8, len: usize) -> Result<()> {
    let t = open()?;
    let end = (addr as usize).checked_add(len);
    if len > 0 && (addr.is_null() || end.is_none() || len > isize::MAX as usize) {
        return Err(Error::Invalid(format!(
            "{len} bytes at {addr:p} are no memory"
        )));
    }
    // SAFETY: the caller's promise; the calling thread's own log.
    noted(unsafe { Log::fresh(t.cast(), addr, len) })
}

/// Has `f` called after the commit of the outermost level, when the transaction is closed.
///
/// # Safety
/// `f` may be called with `arg` then.
pub unsafe fn on_commit(
    f: unsafe extern "C-unwind" fn(*mut c_void),
    arg: *mut c_void,
) -> Result<()> {
    let t = open()?;
    // SAFETY: the calling thread's own.
    noted(push_later(unsafe { &mut *t }, Later::Call(f, arg)))
}

/// Has `f` called if the level is taken back, in the reverse order of all that is.
///
/// # Safety
/// `f` may be called with `arg` then. It begins and ends no transaction.
pub unsafe fn on_abort(
    f: unsafe extern "C-unwind" fn(*mut c_void),
    arg: *mut c_void,
) -> Result<()> {
    let t = open()?;
    // SAFETY: the caller's promise; the calling thread's own log.
    noted(unsafe { Log::on_abort(t.cast(), f, arg) })
}

/// Ends the innermost level. If it is the outermost: commits all that the transaction has noted, as
/// one sync point.
///
/// # Errors
/// As [`mojim::gmsync`]; the transaction stays open, and the call can be repeated.
#[inline]
pub fn commit() -> Result<()> {
    let t = begun()?;
    // SAFETY: the calling thread's own, and a level is open.
    unsafe {
        match Log::end(t.cast()) {
            true => Ok(()),
            false => outermost(t),
        }
    }
}

/// Ends the innermost level if there is nothing to commit for it. Else nothing has changed.
#[inline]
pub fn end_quickly() -> bool {
    let t = known();
    // SAFETY: the calling thread's own.
    unsafe {
        let last = match t.is_null() {
            true => None,
            false => (*t).log.levels().last(),
        };
        last.is_some_and(|l| l.captured == 0) && Log::end(t.cast())
    }
}

/// Takes the innermost level back, and ends it.
///
/// # Errors
/// `Timeout` where a commit failed so after it had its place in the log: it may be committed.
/// `Unsupported` if it was the outermost one and something in it cannot be taken back: it has ended, and
/// this process commits nothing more.
pub fn abort() -> Result<()> {
    abort_to(0)
}

/// [`abort`] for a caller whose stack begins at `sp`: what lies below in memory were frames of functions
/// that have returned, and are those of this call. Bytes that were noted there stay.
///
/// # Errors
/// As [`abort`].
pub fn abort_to(sp: usize) -> Result<()> {
    let t = begun()?;
    // SAFETY: the calling thread's own, and a level is open.
    unsafe {
        if (*t).in_doubt {
            return Err(Error::Timeout(
                "the transaction is in doubt: its commit may have happened; commit it again".into(),
            ));
        }
        take_back(t, frames_to(sp))
    }
}

/// How long an unmap waits for the transactions of other threads.
const PATIENCE: Duration = Duration::from_secs(3);

/// Unmaps regions by `f`, while no other thread has a transaction open: it might have noted bytes of
/// theirs, and would commit no region, or store to memory that is another one's.
///
/// # Errors
/// `Busy` if the calling thread's open transaction has noted bytes of theirs, or another thread's is
/// open for longer than 3 s; and those of `f`.
pub fn unmapping<T>(regions: &[Range<usize>], f: impl FnOnce() -> Result<T>) -> Result<T> {
    if is_forked() {
        // Its copy of the memory is nobody else's.
        return f();
    }
    let t = known();
    // SAFETY: the calling thread's own, or null.
    if let Some(t) = unsafe { t.as_ref() } {
        let in_one = |e: Entry| match e {
            Entry::Bytes { addr, len } => {
                let of = |r: &&Range<usize>| addr < r.end && r.start < addr + len;
                regions.iter().find(of)
            }
            Entry::Call => None,
        };
        if let Some(r) = t.log.entries().find_map(in_one) {
            return Err(Error::Busy(format!(
                "the transaction that this thread has open changes the region at {:#x}: commit or abort it first",
                r.start
            )));
        }
    }
    let Some(first) = regions.first() else {
        return f();
    };
    let _alone = alone_within(PATIENCE).ok_or_else(|| {
        Error::Busy(format!(
            "another thread has had a transaction open for {PATIENCE:?}, which may change the region at {:#x}: it is not unmapped",
            first.start
        ))
    })?;
    f()
}

/// The transaction of [`atomically`].
#[derive(Debug)]
pub struct Tx(PhantomData<*mut ()>);

impl Tx {
    /// Notes bytes that are about to be stored to ([`add`]).
    ///
    /// # Safety
    /// As for [`add`].
    pub unsafe fn add(&self, addr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { add(addr, len) }
    }

    /// Stores a value; an abort takes it back.
    ///
    /// # Safety
    /// As for [`add`]: the place stays until the transaction ends, whatever becomes of the
    /// reference.
    pub unsafe fn set<T: Copy>(&self, place: &mut T, value: T) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { add((&raw mut *place).cast(), size_of::<T>())? };
        *place = value;
        Ok(())
    }
}

struct TakesBack(usize);

impl Drop for TakesBack {
    fn drop(&mut self) {
        let t = known();
        // SAFETY: the calling thread's own.
        unsafe {
            while (*t).log.levels().len() > self.0 {
                // `f` has failed, or the commit: whoever called has that error.
                let _ = take_back(t, 0..0);
            }
        }
    }
}

/// Whether the thread is in a captured block of which this library hears nothing, since the program is linked
/// with another runtime of the ABI than libmojim_itm. (In a block of ours a transaction is open.)
fn is_in_foreign_block() -> bool {
    type InTransaction = unsafe extern "C" fn() -> c_int;
    static ASKS: OnceLock<Option<InTransaction>> = OnceLock::new();
    let asks = ASKS.get_or_init(|| {
        // SAFETY: looks a name up. What the published ABI calls so has this type.
        unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, c"_ITM_inTransaction".as_ptr());
            std::mem::transmute::<*mut c_void, Option<InTransaction>>(found)
        }
    });
    // SAFETY: as above.
    asks.is_some_and(|asks| unsafe { asks() } != 0)
}

/// Runs `f` in a transaction: commits what it noted if it succeeds, takes it back if it fails or
/// panics. A commit that is in doubt is repeated until it is known (`mojim_tx_on_failure` has
/// another rule).
///
/// # Errors
/// Those of `f`; those of the commit, where it was taken back or never can be made.
pub fn atomically<T, E: From<Error>>(f: impl FnOnce(&Tx) -> Result<T, E>) -> Result<T, E> {
    if !is_open() && is_in_foreign_block() {
        let text = "the open __transaction_atomic block is libitm's, so nothing that it stores is committed: link -lmojim_itm -lmojim, and libitm behind them";
        return Err(Error::Unsupported(text.into()).into());
    }
    begin()?;
    let t = known();
    // SAFETY: the calling thread's own.
    let takes_back = TakesBack(unsafe { (*t).log.levels().len() } - 1);
    let value = f(&Tx(PhantomData))?;
    // SAFETY: as above.
    if unsafe { (*t).log.levels().len() } != takes_back.0 + 1 {
        let text = "a transaction that was begun within another one was left open";
        return Err(Error::Invalid(text.into()).into());
    }
    while let Err(e) = commit() {
        // SAFETY: as above.
        if !unsafe { (*t).in_doubt } {
            return Err(e.into());
        }
        if !again(&e) {
            give_up(t, &e);
            return Err(e.into());
        }
    }
    std::mem::forget(takes_back);
    Ok(value)
}
